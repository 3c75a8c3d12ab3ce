//! What an armed connection's TCP stream holds: bytes of the program's, then perhaps the mark, behind which the
//! ring goes on.

use super::*;

/// What stands at the front of an armed connection's TCP stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Front {
    /// So many bytes for the program.
    App(usize),
    /// The mark.
    Mark,
    /// Nothing, or perhaps the first part of a mark.
    Wait,
    /// The end of the stream.
    End,
    /// The kernel's error, which is consumed by having been seen.
    Failed(Errno),
}

/// Looks at the TCP stream of an armed connection without taking anything.
pub fn front(rx: &mut Rx) -> Front {
    front_of(rx.conn(), rx.nonce())
}

/// Whether the peer may have begun to write its mark. To be read after the bytes in question: whoever
/// wrote the first byte of a mark had said so before.
fn mark_begun(conn: &Conn) -> bool {
    conn.peer().is_some_and(|p| p.flags.load(SeqCst) & MARK_BEGUN != 0)
}

fn front_of(conn: &Conn, nonce: wire::Nonce) -> Front {
    match peek_front(conn, &nonce) {
        // The stream may have ended there; what was still missing of the mark came before the end.
        (Front::Wait, true) if sys::poll_now(conn.local().fd.load(Relaxed), libc::POLLRDHUP) != 0 => {
            match peek_front(conn, &nonce) {
                (Front::Wait, true) => {
                    conn.fail(libc::ECONNRESET);
                    Front::Failed(libc::ECONNRESET)
                }
                (front, _) => front,
            }
        }
        (front, _) => front,
    }
}

/// What stands at the front, and whether it is the first part of a mark.
fn peek_front(conn: &Conn, nonce: &wire::Nonce) -> (Front, bool) {
    let mut buf = [0u8; 4096];
    // SAFETY: `buf` has room.
    let n = match unsafe {
        sys::recv(
            conn.local().fd.load(Relaxed),
            buf.as_mut_ptr().cast(),
            buf.len(),
            libc::MSG_PEEK | libc::MSG_DONTWAIT,
        )
    } {
        Ok(0) => return (Front::End, false),
        Ok(n) => n,
        Err(libc::EAGAIN | libc::EINTR) => return (Front::Wait, false),
        Err(e) => {
            // The kernel tells it once.
            conn.fail(e);
            return (Front::Failed(e), false);
        }
    };
    match wire::scan(&buf[..n], nonce, mark_begun(conn)) {
        Scan::App(n) => (Front::App(n), false),
        Scan::Mark => (Front::Mark, false),
        Scan::Partial => (Front::Wait, true),
    }
}

/// Copies what is in the ring behind the first `at` bytes of the program's buffers, and leaves it there.
pub(super) fn ring_peek(rx: &mut Rx, b: Bufs, at: usize) -> Take {
    let mut n = 0;
    for (p, len) in b.after(at).parts() {
        // SAFETY: the program's buffer, as it gave it.
        let got = unsafe { rx.ring().peek(n, p, len) }.unwrap_or(0);
        n += got;
        if got < len {
            break;
        }
    }
    match at + n {
        0 => Take::Empty,
        n => Take::Got(n),
    }
}

/// Looks at the `before` bytes that stand before the mark, and at what is in the ring behind it: a program
/// that peeks until it sees enough must see more than ends at the mark.
pub(super) fn armed_peek(fd: c_int, conn: &Conn, rx: &mut Rx, b: Bufs, before: usize) -> Take {
    match tcp_take(fd, conn, b, before, libc::MSG_PEEK) {
        Take::Got(n) if n == before && rx.ring().is_attached() => ring_peek(rx, b, n),
        t => t,
    }
}

/// What stands at the front, with all of `enough` bytes that may be taken at once, and whether the mark is behind it.
pub(super) fn armed_front(conn: &Conn, rx: &mut Rx, enough: usize) -> (Front, bool) {
    match before_mark(conn, rx, enough) {
        Some((n, whole)) if n > 0 => (Front::App(n), whole),
        _ => (front(rx), false),
    }
}

/// How many bytes of an armed connection's TCP stream are the program's, and whether the whole mark has
/// come behind them. Looks no further than `enough` bytes and a mark. `None`: not known for lack of memory.
pub fn before_mark(conn: &Conn, rx: &Rx, enough: usize) -> Option<(usize, bool)> {
    let fd = conn.local().fd.load(Relaxed);
    let there = sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) as usize;
    if there == 0 || !mark_begun(conn) {
        return Some((there, false));
    }
    let window = there.min(enough.saturating_add(wire::MARK_LEN));
    let look = |at: *mut u8| {
        // SAFETY: the callers' memory has room for `window` bytes.
        let got = unsafe { sys::recv(fd, at.cast(), window, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
        // SAFETY: the kernel has just written so many.
        let bytes = unsafe { core::slice::from_raw_parts(at, got.unwrap_or(0)) };
        match wire::scan(bytes, &rx.nonce(), true) {
            Scan::App(n) => (n, wire::scan(&bytes[n..], &rx.nonce(), true) == Scan::Mark),
            Scan::Mark => (0, true),
            Scan::Partial => (0, false),
        }
    };
    let mut small = [0u8; 4096];
    if window <= small.len() {
        return Some(look(small.as_mut_ptr()));
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new private mapping.
    let at = unsafe { sys!(libc::SYS_mmap, 0, window, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) }.ok()?;
    let r = look(at as *mut u8);
    // SAFETY: our own mapping, which nobody refers to any more.
    let _ = unsafe { sys!(libc::SYS_munmap, at, window) };
    Some(r)
}
