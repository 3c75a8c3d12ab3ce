//! What an armed connection's TCP stream holds: bytes of the program's, then perhaps the mark, behind which the
//! ring goes on.

use super::receive::ring_take;
use super::*;
use crate::kept::Kept;

/// What stands at the front of an armed connection's TCP stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Front {
    /// So many bytes for the program.
    App(usize),
    /// The mark.
    Mark,
    /// So many bytes of the mark; the rest is still to come.
    Part(usize),
    /// Nothing.
    Wait,
    /// The end of the stream.
    End,
    /// The kernel's error, which is consumed by having been seen.
    Failed(Errno),
}

/// Looks at the TCP stream of an armed connection without taking anything.
pub fn front(rx: &mut Rx) -> Front {
    let (conn, nonce) = (rx.conn(), rx.nonce());
    match peek_front(conn, &nonce) {
        // The stream may have ended there; what was still missing of the mark came before the end.
        Front::Part(_) if sys::poll_now(conn.local().fd.load(Relaxed), libc::POLLRDHUP) != 0 => {
            match peek_front(conn, &nonce) {
                Front::Part(_) => lost(conn),
                front => front,
            }
        }
        Front::End if conn.mark_got.load(Relaxed) > 0 => lost(conn),
        front => front,
    }
}

/// The stream has ended within the mark.
fn lost(conn: &Conn) -> Front {
    conn.fail(libc::ECONNRESET);
    Front::Failed(libc::ECONNRESET)
}

/// How far behind the front of the TCP stream the peer says that its mark begins, if it may have begun to
/// write it. To be asked after the bytes in question were seen: whoever wrote the first byte of a mark had
/// said so before.
fn mark_from(conn: &Conn) -> Option<usize> {
    let p = conn.peer().filter(|p| p.flags.load(SeqCst) & MARK_BEGUN != 0)?;
    Some(p.mark_at.load(Relaxed).saturating_sub(conn.rx_tcp()) as usize)
}

/// Whether the mark may have begun without our knowing: what a peer on another host says of it may come later
/// than the mark itself. Then whatever looks like its first part is held back, and left where it is.
fn is_careful(conn: &Conn) -> bool {
    conn.remote_pid.load(Relaxed) != 0 && conn.peer().is_some_and(|p| p.flags.load(SeqCst) & MARK_BEGUN == 0)
}

/// Whether the peer says that its mark does not begin within the next `n` bytes. Where it has not said so it is asked, which is
/// heard of like news of the ring: else what happens to look like the beginning of a mark would lie there until more comes.
fn is_the_programs(conn: &Conn, n: usize) -> bool {
    if conn.peer().is_some_and(|p| p.mark_at.load(SeqCst) >= conn.rx_tcp() + n as u64) {
        return true;
    }
    if let Some(own) = conn.own() {
        if own.flags.load(Relaxed) & DOUBT == 0 {
            own.flags.fetch_or(DOUBT, SeqCst);
            conn.flush();
        }
    }
    false
}

/// What else of a stream can be taken that is looked at window by window: one receive gives all that has arrived.
pub(super) fn armed_rest(fd: c_int, conn: &Conn, rx: &mut Rx, mut b: Bufs, flags: c_int) -> usize {
    let mut n = 0;
    while b.len() > 0 && is_careful(conn) {
        let (Front::App(most), _) = armed_front(conn, rx) else { break };
        match tcp_take(fd, conn, b, most, flags) {
            Take::Got(got) => {
                n += got;
                b = b.after(got);
            }
            _ => break,
        }
    }
    n
}

fn peek_front(conn: &Conn, nonce: &wire::Nonce) -> Front {
    let mut buf = [0u8; 4096];
    let got = conn.mark_got.load(Relaxed) as usize;
    let len = if got > 0 { wire::MARK_LEN.saturating_sub(got) } else { buf.len() };
    let fd = conn.local().fd.load(Relaxed);
    let failed = |e| {
        // What a call was told before the kernel knew of it, or by its send, is no news.
        if e == libc::ECONNRESET && conn.has_ended(END_TOLD) {
            return Front::End;
        }
        conn.fail(e);
        Front::Failed(e)
    };
    // SAFETY: `buf` has room.
    let n = match unsafe { sys::recv(fd, buf.as_mut_ptr().cast(), len, libc::MSG_PEEK | libc::MSG_DONTWAIT) } {
        Ok(0) => return conn.find_lost().map_or(Front::End, failed),
        Ok(n) => n,
        Err(libc::EAGAIN | libc::EINTR) => return Front::Wait,
        // The kernel tells it once.
        Err(e) => return failed(e),
    };
    if got > 0 {
        let whole = wire::mark(nonce);
        return match (buf[..n] == whole[got..got + n], got + n == wire::MARK_LEN) {
            (true, true) => Front::Mark,
            (true, false) => Front::Part(n),
            // No mark after all, and its beginning cannot be given back.
            (false, _) => lost(conn),
        };
    }
    if is_careful(conn) {
        return match wire::scan(&buf[..n], nonce, true) {
            Scan::App(n) => Front::App(n),
            Scan::Mark => Front::Mark,
            // Nothing can follow it that would make it a mark.
            Scan::Partial if sys::poll_now(fd, libc::POLLRDHUP) != 0 && is_last(fd, n) => Front::App(n),
            Scan::Partial if is_the_programs(conn, n) => Front::App(n),
            Scan::Partial => Front::Wait,
        };
    }
    match wire::scan_from(&buf[..n], nonce, mark_from(conn)) {
        Scan::App(n) => Front::App(n),
        Scan::Mark => Front::Mark,
        Scan::Partial => Front::Part(n),
    }
}

/// Whether the socket holds no more than `n` bytes.
fn is_last(fd: c_int, n: usize) -> bool {
    sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|there| there as usize <= n)
}

/// Looks at the `before` bytes that stand before the mark, and at what is in the ring behind it: a program
/// that peeks until it sees enough must see more than ends at the mark.
pub(super) fn armed_peek(fd: c_int, conn: &Conn, rx: &mut Rx, b: Bufs, before: usize, flags: c_int) -> Take {
    match tcp_take(fd, conn, b, before, flags) {
        Take::Got(n) if n == before && conn.is_mapped() && rx.ring().is_attached() => {
            Take::Got(n + ring_take(conn, rx, b.after(n), flags).unwrap_or(0))
        }
        t => t,
    }
}

/// What stands at the front, with all that may be taken at once, and whether the mark is behind it.
pub(super) fn armed_front(conn: &Conn, rx: &mut Rx) -> (Front, bool) {
    if !conn.is_mapped() {
        // Only the process that manages it knows where the mark begins.
        let n = conn.rx_safe.load(SeqCst).saturating_sub(conn.rx_tcp());
        return (if n > 0 { Front::App(n as usize) } else { Front::Wait }, false);
    }
    match before_mark(conn, rx) {
        (0, _) => match front(rx) {
            // It has come since, and may be more than a look at it shows.
            Front::App(n) => match before_mark(conn, rx) {
                (all, whole) if all > n => (Front::App(all), whole),
                _ => (Front::App(n), false),
            },
            other => (other, false),
        },
        (n, whole) => (Front::App(n), whole),
    }
}

/// Memory that is only written to: bytes that are passed over when a place behind them is peeked at.
struct Nowhere(core::cell::UnsafeCell<[u8; NOWHERE]>);

// SAFETY: nobody ever reads it.
unsafe impl Sync for Nowhere {}

const NOWHERE: usize = 64 << 10;
static PASSED: Nowhere = Nowhere(core::cell::UnsafeCell::new([0; NOWHERE]));

/// Most pieces of a peek, and so what can be passed over: more than a socket's buffer holds.
const PARTS: usize = 128;

/// Looks at what stands `from` bytes behind the front of the TCP stream. How much of that there is.
fn peek_behind(conn: &Conn, from: usize, buf: &mut [u8]) -> usize {
    if from > (PARTS - 1) * NOWHERE {
        return 0;
    }
    let mut iov = [iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }; PARTS];
    let mut n = 0;
    let mut left = from;
    while left > 0 {
        iov[n] = iovec { iov_base: PASSED.0.get().cast(), iov_len: left.min(NOWHERE) };
        left -= iov[n].iov_len;
        n += 1;
    }
    iov[n] = iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    let b = Bufs::new(&iov[..=n]);
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let got = kernel_msg(libc::SYS_recvmsg, conn.local().fd.load(Relaxed), b, usize::MAX, None, flags, None);
    got.unwrap_or(0).saturating_sub(from)
}

/// Whether the peer's whole mark is in the TCP stream, behind whatever the program has not read yet, if that is no more
/// than `most` bytes: they are all copied.
pub fn mark_is_there(conn: &Conn, rx: &mut Rx, most: usize) -> bool {
    let (from, true) = before_mark(conn, rx) else { return false };
    if conn.mark_got.load(Relaxed) > 0 || from > most {
        return false;
    }
    let mut buf = [0u8; wire::MARK_LEN];
    peek_behind(conn, from, &mut buf) == buf.len() && buf == wire::mark(&rx.nonce())
}

/// How many of the `there` bytes that have come stand before whatever looks like a mark, where what the peer says of its
/// place may be late. Each byte is looked at once: what the program was told to be there may not become less.
fn clear(conn: &Conn, nonce: &wire::Nonce, there: usize) -> usize {
    let word = conn.peer().map_or(0, |p| p.mark_at.load(SeqCst));
    let known = word.max(conn.rx_safe.load(SeqCst)).saturating_sub(conn.rx_tcp()) as usize;
    if known >= there {
        return there;
    }
    let look = |buf: &mut [u8]| {
        let n = peek_behind(conn, known, buf);
        match wire::scan(&buf[..n], nonce, true) {
            Scan::App(n) => n,
            Scan::Mark | Scan::Partial => 0,
        }
    };
    let (mut little, mut much) = ([0u8; 4096], Kept::NONE);
    let len = there - known;
    let n = match little.get_mut(..len) {
        Some(buf) => look(buf),
        None => match much.room(len, None) {
            // SAFETY: `room` has given so much, which reads as zeroes.
            Some(to) => look(unsafe { core::slice::from_raw_parts_mut(to, len) }),
            None => look(&mut little),
        },
    };
    much.release();
    conn.rx_safe.fetch_max(conn.rx_tcp() + (known + n) as u64, SeqCst);
    known + n
}

/// How many bytes of an armed connection's TCP stream are the program's, and whether the whole mark has
/// come behind them. The peer's word for where its mark begins is enough for that: when that place is
/// reached the mark is looked for in the stream itself.
pub fn before_mark(conn: &Conn, rx: &Rx) -> (usize, bool) {
    let there = sys::ioctl_int(conn.local().fd.load(Relaxed), libc::FIONREAD).unwrap_or(0) as usize;
    if is_careful(conn) {
        let n = match clear(conn, &rx.nonce(), there) {
            // What else there is to say of what looks like the beginning of a mark is said where it stands at the front.
            0 if there > 0 => match peek_front(conn, &rx.nonce()) {
                Front::App(n) => n,
                _ => 0,
            },
            n => n,
        };
        return (n, false);
    }
    match (conn.mark_got.load(Relaxed) as usize, mark_from(conn)) {
        (0, Some(from)) if from < there => (from, there - from >= wire::MARK_LEN),
        (0, _) => (there, false),
        (got, _) => (0, there + got >= wire::MARK_LEN),
    }
}

/// Takes what stands before the mark out of the TCP stream, and keeps it for the program. Whether there was anything.
pub fn drain(rx: &mut Rx) -> bool {
    let (conn, mut any) = (rx.conn(), false);
    loop {
        let (n, _) = before_mark(conn, rx);
        if n == 0 {
            return any;
        }
        // SAFETY: links are never freed.
        let side = unsafe { conn.link.load(Acquire).as_ref() }.map(|l| &l.side);
        let Some(to) = rx.ring().kept.room(n, side) else { return any };
        // SAFETY: `room` has given so much.
        let got = unsafe { sys::recv(conn.local().fd.load(Relaxed), to.cast(), n, libc::MSG_DONTWAIT) };
        let Ok(got @ 1..) = got.inspect_err(|e| conn.note_lost(*e)) else { return any };
        rx.ring().kept.added(got);
        conn.count_rx_kept(got);
        any = true;
    }
}

/// How many of the program's bytes have come and not been taken. (A ring that only another process has may hold more.)
pub fn unread(rx: &mut Rx) -> usize {
    let conn = rx.conn();
    let mapped = conn.is_mapped();
    match rx.path() {
        RxPath::Ring | RxPath::RingFinal | RxPath::Returning if mapped => rx.ring().waiting() as usize,
        RxPath::Ring | RxPath::RingFinal | RxPath::Returning => rx.ring().kept.len(),
        RxPath::Armed | RxPath::Draining => match before_mark(conn, rx) {
            (n, true) if mapped && rx.ring().is_attached() => rx.ring().kept.len() + n + rx.ring().behind() as usize,
            (n, _) => rx.ring().kept.len() + n,
        },
        RxPath::Tcp | RxPath::Replay => {
            let there = sys::ioctl_int(conn.local().fd.load(Relaxed), libc::FIONREAD).unwrap_or(0) as usize;
            // What is being repeated had come before.
            there.max(rx.missing_shown())
        }
    }
}
