//! `sendfile` and `splice` with a connection at one end.

use crate::conn::{Conn, Phase, END_EOF};
use crate::io;
use crate::ops::Outcome;
use crate::room::{self, Room};
use crate::signals::Since;
use crate::stats::Why;
use crate::sys::{self, sys, Errno};
use crate::{copy, pins, poll, process, pump, table, visit};
use core::ptr::null;
use core::sync::atomic::Ordering::*;
use libc::{c_int, c_uint, iovec, off64_t};

const CHUNK: usize = room::BYTES;
/// So much is read onto the stack, which may be a small one.
const LITTLE: usize = 4 << 10;

/// At an address to which a file with `O_DIRECT` can be read.
#[repr(align(512))]
struct Sectors([u8; LITTLE]);

/// `sendfile(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn sendfile(out: c_int, inp: c_int, off: *mut off64_t, n: usize) -> Outcome {
    if off.is_null() {
        // SAFETY: the caller's promise.
        return unsafe { send_file(out, inp, off, n) };
    }
    // SAFETY: any bits are a number; then, that is our own.
    unsafe {
        let Ok(mut at) = copy::read(off) else { return Outcome::Bypass };
        let o = send_file(out, inp, &mut at, n);
        match o {
            Outcome::Done(_) => copy::write(off, at).map_or(Outcome::Fail(libc::EFAULT), |()| o),
            _ => o,
        }
    }
}

/// Reads the file here and sends what was read.
///
/// # Safety
/// `off` is null or valid.
unsafe fn send_file(out: c_int, inp: c_int, off: *mut off64_t, n: usize) -> Outcome {
    if !io::serves(out) {
        return Outcome::Bypass;
    }
    if !is_readable(inp) {
        return Outcome::Fail(libc::EBADF);
    }
    // SAFETY: null or valid by the caller's promise.
    if let Some(e) = refusal(inp, unsafe { off.as_ref() }, n.min(1)) {
        return Outcome::Fail(e);
    }
    let asked = n;
    let n = n.min(io::MOST);
    let mut little = Sectors([0; LITTLE]);
    let much = if n > LITTLE { Room::take() } else { None };
    let (buf, room) = much.as_ref().map_or((little.0.as_mut_ptr(), LITTLE), |m| (m.at(), CHUNK));
    // The kernel looks at both numbers once: what they are by the next piece is not the call's.
    let _held = pins::Holding::begin();
    let several = n > room;
    let _whole = several.then(|| pins::Whole::begin(out));
    let mut file = (several && process::has_threads()).then(|| identity(inp));
    let mut done = 0usize;
    while done < n {
        let want = (n - done).min(room);
        // Reading at a position, so that what could not be sent is not lost from the file's own.
        // SAFETY: `off` is null or valid; `buf` has room.
        let at = unsafe {
            match off.is_null() {
                true => match sys!(libc::SYS_lseek, inp, 0, libc::SEEK_CUR) {
                    Ok(p) => p as off64_t,
                    Err(e) => return end(done, e),
                },
                false => *off,
            }
        };
        if i64::try_from(asked).ok().and_then(|n| at.checked_add(n)).is_none() {
            return end(done, libc::EINVAL);
        }
        // SAFETY: `buf` has room.
        let got = match unsafe { sys!(libc::SYS_pread64, inp, buf, want, at) } {
            Ok(0) => break,
            Ok(g) => g,
            Err(e) => return end(done, if e == libc::ESPIPE { libc::EINVAL } else { e }),
        };
        if file.is_some_and(|file| identity(inp) != file) {
            if done > 0 {
                break;
            }
            file = Some(identity(inp));
            continue;
        }
        let parts = [iovec { iov_base: buf.cast(), iov_len: done }, iovec { iov_base: buf.cast(), iov_len: got }];
        // SAFETY: `buf` holds `got` bytes.
        let sent = match unsafe { io::send_after(out, &parts[usize::from(done == 0)..], done, null(), 0) } {
            Outcome::Done(all) => all as usize - done,
            Outcome::Fail(e) => return end(done, e),
            Outcome::Bypass if done > 0 => break,
            Outcome::Bypass => return Outcome::Bypass,
        };
        // SAFETY: as above.
        unsafe {
            if off.is_null() && file.is_some_and(|file| identity(inp) != file) {
                return Outcome::Done((done + sent) as isize);
            } else if off.is_null() {
                let _ = sys!(libc::SYS_lseek, inp, at + sent as off64_t, libc::SEEK_SET);
            } else {
                *off = at + sent as off64_t;
            }
        }
        done += sent;
        if sent < got {
            // The kernel tries to send the rest of what it has read: how the connection has failed is told to that, and to nobody else.
            let (at, conn) = pins::find(out);
            conn.into_iter().for_each(|c| _ = io::asked_error(at, c));
            break;
        }
    }
    Outcome::Done(done as isize)
}

/// Which file a number means: its device and inode.
fn identity(fd: c_int) -> Option<(u64, u64)> {
    // SAFETY: all-zero is a valid stat, which the call writes.
    unsafe {
        let mut st: libc::stat = core::mem::zeroed();
        sys!(libc::SYS_fstat, fd, &mut st).is_ok().then_some((st.st_dev, st.st_ino))
    }
}

fn is_readable(fd: c_int) -> bool {
    // SAFETY: takes no pointer.
    unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFL) }
        .is_ok_and(|flags| flags as c_int & libc::O_ACCMODE != libc::O_WRONLY && flags as c_int & libc::O_PATH == 0)
}

/// The kernel's error for a file that `sendfile` cannot read, though `pread` may: a directory, most of `/proc`, what
/// cannot be sought. Files with a size are taken to be ordinary ones; of others the kernel is asked.
fn refusal(inp: c_int, off: Option<&off64_t>, n: usize) -> Option<Errno> {
    // SAFETY: all-zero is a valid stat.
    let mut st: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `st` is writable.
    if unsafe { libc::fstat(inp, &mut st) } != 0 {
        return Some(libc::EBADF);
    }
    if st.st_mode & libc::S_IFMT == libc::S_IFREG && st.st_size > 0 {
        return None;
    }
    let flags = libc::O_WRONLY | libc::O_CLOEXEC;
    // SAFETY: a path that ends with a NUL; the offset is our own.
    unsafe {
        let mut at = match off {
            Some(at) => *at,
            None => sys!(libc::SYS_lseek, inp, 0, libc::SEEK_CUR).unwrap_or(0) as off64_t,
        };
        let null = sys!(libc::SYS_openat, libc::AT_FDCWD, c"/dev/null".as_ptr(), flags).ok()?;
        let r = sys!(libc::SYS_sendfile, null, inp, &mut at, n);
        sys::close_raw(null as c_int);
        // Without an offset of its own the call does not ask for a place that it could not seek.
        r.err().map(|e| if e == libc::ESPIPE && off.is_none() { libc::EINVAL } else { e })
    }
}

fn end(done: usize, e: i32) -> Outcome {
    if done > 0 {
        Outcome::Done(done as isize)
    } else {
        Outcome::Fail(e)
    }
}

/// How often a connection of another process is asked home, each time for a second, which takes as long as its peer is
/// stopped.
const TRIES: usize = 30;

/// `splice(2)`: such a connection stays on, or returns to, TCP, where the kernel can move pages.
///
/// # Safety
/// As for the call.
pub unsafe fn splice(
    inp: c_int,
    offin: *mut off64_t,
    out: c_int,
    offout: *mut off64_t,
    n: usize,
    flags: c_uint,
) -> Outcome {
    if !is_pipe(inp) && !is_pipe(out) {
        // The kernel has nothing to move.
        return Outcome::Bypass;
    }
    let since = Since::now();
    let _held = pins::Holding::begin();
    let (given, mut at) = ([inp, out], [inp, out]);
    let files = process::has_threads().then(|| given.map(identity));
    for k in 0..given.len() {
        let Some(c) = table::conn(given[k]) else { continue };
        let may_wait = flags & libc::SPLICE_F_NONBLOCK == 0 && !c.nonblock.load(Relaxed);
        if may_wait && !pins::hold(given[k], c) {
            // SAFETY: as for this one.
            return unsafe { splice(inp, offin, out, offout, n, flags) };
        }
        for _ in 0..TRIES {
            if !matches!(c.phase(), Phase::Raw | Phase::Managed | Phase::Away) {
                break;
            }
            c.evidence.store(false, Relaxed);
            while !process::try_give_up(c, Why::Spliced) {
                if !may_wait {
                    return Outcome::Fail(libc::EAGAIN);
                }
                if since.is_over(false) {
                    return Outcome::Fail(libc::EINTR);
                }
            }
            if c.phase() == Phase::Away && visit::is_home(&mut c.lock_both()) {
                break;
            }
        }
        if c.phase() == Phase::Closed && !c.is_at(given[k]) {
            // It goes on as another record.
            // SAFETY: as for this one.
            return unsafe { splice(inp, offin, out, offout, n, flags) };
        }
        if c.phase() == Phase::Managed && c.has_ended(END_EOF) {
            if table::conn(inp).is_some_and(|i| core::ptr::eq(i, c)) {
                if offin.is_null() && offout.is_null() && is_pipe(out) {
                    return splice_the_rest(c, inp, out, n, flags);
                }
            } else if let Some(e) = io::pending_error(out) {
                return Outcome::Fail(e);
            }
            // What is sent to a peer that is gone is the kernel's affair.
            continue;
        }
        if c.phase() == Phase::Managed || c.phase() == Phase::Away && !visit::is_home(&mut c.lock_both()) {
            // It could not be brought home: in the kernel's hands a mark or a frame would become the program's, or the
            // other way about.
            pump::reset(&mut c.lock_both());
            return Outcome::Fail(libc::ECONNRESET);
        }
        at[k] = pins::number(given[k]);
        let pipe = 1 - k;
        if files.is_some_and(|files| identity(given[pipe]) != files[pipe]) {
            // The kernel would go on with the pipe that it was, which has no number any more.
            return Outcome::Fail(libc::EBADF);
        }
    }
    if at == given {
        return Outcome::Bypass;
    }
    // SAFETY: the caller's promise.
    Outcome::from(unsafe { sys!(libc::SYS_splice, at[0], offin, at[1], offout, n, flags) })
}

fn is_pipe(fd: c_int) -> bool {
    // SAFETY: all-zero is a valid stat, which the call writes.
    unsafe {
        let mut st: libc::stat = core::mem::zeroed();
        sys!(libc::SYS_fstat, fd, &mut st).is_ok() && st.st_mode & libc::S_IFMT == libc::S_IFIFO
    }
}

/// What the ring of a peer that has gone still holds, and the end behind it, are not the kernel's to splice.
fn splice_the_rest(c: &Conn, inp: c_int, pipe: c_int, n: usize, flags: c_uint) -> Outcome {
    const PIECE: usize = 4096;
    let mut buf = [0u8; PIECE];
    let mut done = 0;
    // How the stream ends behind its last byte is told to the call that finds nothing else.
    while done < n && (done == 0 || io::unread(&mut c.lock_rx()) > 0) {
        // As the kernel does, whether there is anything to move or not. What has come is all that is waited for.
        let wait = flags & libc::SPLICE_F_NONBLOCK == 0 && done == 0;
        match poll::wait_one(pipe, libc::POLLOUT, if wait { -1 } else { 0 }) {
            Ok(0) => return end(done, libc::EAGAIN),
            Err(libc::EINTR) if !wait => return end(done, libc::EAGAIN),
            Ok(_) if done > 0 && has_no_reader(pipe) => break,
            Ok(_) if has_no_reader(pipe) => return io::broken_pipe(0),
            Ok(_) => {}
            Err(e) => return end(done, e),
        }
        // Taken, not looked at: where the bytes lie may change meanwhile, as another process that has the connection
        // brings them home to TCP, and what was moved must not be had again.
        let part = io::one(buf.as_mut_ptr().cast(), PIECE.min(n - done));
        // SAFETY: `buf` is writable.
        let got = match unsafe { io::recv(inp, &part, core::ptr::null_mut(), 0) } {
            Outcome::Done(0) => break,
            Outcome::Done(got) => got as usize,
            Outcome::Fail(e) => return end(done, e),
            // They are the kernel's now.
            Outcome::Bypass if done == 0 => return Outcome::Bypass,
            Outcome::Bypass => break,
        };
        if let Err(e) = put_all(pipe, &buf[..got]) {
            return end(done, e);
        }
        done += got;
    }
    Outcome::Done(done as isize)
}

fn has_no_reader(pipe: c_int) -> bool {
    sys::poll_now(pipe, 0) & libc::POLLERR != 0
}

/// Writes what surely has room, unless another thread has written there meanwhile: then it comes when there is room again.
fn put_all(pipe: c_int, mut b: &[u8]) -> Result<(), Errno> {
    while !b.is_empty() {
        // SAFETY: `b` is readable.
        match unsafe { sys!(libc::SYS_write, pipe, b.as_ptr(), b.len()) } {
            Ok(k) => b = &b[k..],
            Err(libc::EAGAIN) => {
                let _ = poll::wait_one(pipe, libc::POLLOUT, -1);
            }
            Err(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
