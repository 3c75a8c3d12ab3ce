//! What a program's io_urings are for that it makes or uses by system calls of its own.
//!
//! What it asks of one no library sees (`crate::uring` does, of others). But the entries by which it does lie in memory that
//! whoever has the fd can map, and stay there until others take their places: so they tell whether sockets were among what it
//! was asked of, or files alone (databases use one so).

use super::*;
use crate::config::Text;
use crate::textfile::TextFile;
use crate::uring::{asks_a_socket, is_known, is_ring, OFF_SQES, SQE_BYTES};
use core::fmt::Write;

/// Whether it has been, or may have been, used for sockets.
pub(super) fn is_for_sockets(uring: c_int) -> bool {
    // What is asked of these in sight is of none, or no connection would be where we are asked.
    if is_known(uring) {
        return false;
    }
    // One of our own: the program's may be another file's in a moment, which is not to be mapped.
    let fd = match fdhigh::dup_high(uring) {
        Ok(fd) => fd,
        Err(e) => return e != libc::EBADF,
    };
    let found = is_ring(fd).then(|| entries(fd).and_then(|n| any_socket(fd, n)));
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
