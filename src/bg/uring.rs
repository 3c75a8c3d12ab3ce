//! What a program's io_urings are for.
//!
//! What it asks of one no library sees. But the entries by which it does lie in memory that whoever has the fd can map, and
//! stay there until others take their places: so they tell whether sockets were among what it was asked of, or files alone
//! (databases use one so).

use super::*;
use crate::config::Text;
use crate::textfile::TextFile;
use core::fmt::Write;

// What the kernel's include/uapi/linux/io_uring.h says.
const OFF_SQES: usize = 0x1000_0000;
const SQE_BYTES: usize = 64;
const FIXED_FILE: u8 = 1;
/// `IORING_OP_READV`, `_WRITEV`, `_READ_FIXED`, `_WRITE_FIXED`, `_READ`, `_WRITE`.
const DATA: [u8; 6] = [1, 2, 4, 5, 22, 23];
/// Those that no socket is asked for: of files and their names, of memory, times and other requests. (0, `IORING_OP_NOP`, is
/// what has not been used.)
const NO_SOCKETS: [u8; 25] =
    [0, 3, 8, 11, 12, 14, 15, 17, 18, 19, 20, 21, 24, 25, 28, 31, 32, 35, 36, 37, 38, 39, 51, 52, 55];

/// Whether it has been, or may have been, used for sockets.
pub(super) fn is_for_sockets(uring: c_int) -> bool {
    // One of our own: the program's may be another file's in a moment, which is not to be mapped.
    let fd = match fdhigh::dup_high(uring) {
        Ok(fd) => fd,
        Err(e) => return e != libc::EBADF,
    };
    let found = unseen::is_uring(fd).then(|| entries(fd).and_then(|n| any_socket(fd, n)));
    sys::close(fd);
    // What is no io_uring any more is for nothing; of what cannot be known anything is possible.
    found.is_some_and(|known| known.unwrap_or(true))
}

/// For how many requests there is room.
fn entries(fd: c_int) -> Option<usize> {
    let mut path = Text::<64>::EMPTY;
    let _ = write!(path, "/proc/self/fdinfo/{fd}");
    let text = TextFile::read(path.as_bytes_with_nul(), 64 << 10).ok()?;
    // (Since Linux 5.16.)
    let line = core::str::from_utf8(text.bytes()).ok()?.lines().find_map(|l| l.strip_prefix("SqMask:"))?;
    let mask = usize::from_str_radix(line.trim().strip_prefix("0x")?, 16).ok()?;
    // The kernel allows 32,768.
    (mask < 1 << 16).then_some(mask + 1)
}

/// Looks at all of them.
fn any_socket(fd: c_int, entries: usize) -> Option<bool> {
    let len = entries * SQE_BYTES;
    // SAFETY: a new mapping of what an fd of ours is.
    let at = unsafe { sys::sys!(libc::SYS_mmap, 0, len, libc::PROT_READ, libc::MAP_SHARED, fd, OFF_SQES) }.ok()?;
    let any = (0..entries).any(|i| {
        let sqe = (at + i * SQE_BYTES) as *const u8;
        // SAFETY: within what was mapped: opcode, flags and, at 4, the fd. The program may write them meanwhile.
        let (op, flags, fd) =
            unsafe { (sqe.read_volatile(), sqe.add(1).read_volatile(), sqe.add(4).cast::<c_int>().read_volatile()) };
        asks_a_socket(op, flags, || sys::is_socket(fd))
    });
    // SAFETY: what was mapped above, and nobody has.
    let _ = unsafe { sys::sys!(libc::SYS_munmap, at, len) };
    Some(any)
}

/// Whether a request is, or may be, one of a socket.
fn asks_a_socket(op: u8, flags: u8, is_socket: impl FnOnce() -> bool) -> bool {
    match op {
        op if NO_SOCKETS.contains(&op) => false,
        op if DATA.contains(&op) => flags & FIXED_FILE != 0 || is_socket(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_of_files_or_of_sockets() {
        let (read, recv, poll_add, fsync, nop) = (22, 27, 6, 3, 0);
        assert!(!asks_a_socket(read, 0, || false), "a file");
        assert!(asks_a_socket(read, 0, || true));
        assert!(asks_a_socket(read, FIXED_FILE, || false), "by a number that is not one of its fds");
        for op in [recv, poll_add, 200] {
            assert!(asks_a_socket(op, 0, || false), "{op}");
        }
        for op in [fsync, nop] {
            assert!(!asks_a_socket(op, FIXED_FILE, || true), "{op}");
        }
    }
}
