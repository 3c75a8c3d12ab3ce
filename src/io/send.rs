//! Sending: bytes to where the path switch says, in the general way.

use super::*;
use crate::ring::{Failure, STRIDE};
use crate::thread::Critical;

/// `sendmsg(2)` and all its kin.
///
/// # Safety
/// `iov` must describe readable memory, `msg` must be null or valid.
pub unsafe fn send(fd: c_int, iov: &[iovec], msg: *const msghdr, flags: c_int) -> Outcome {
    let _held = pins::Holding::begin();
    // SAFETY: the caller's promise.
    unsafe { send_after(fd, iov, 0, msg, flags) }
}

/// The same for a call that has sent the first `sent` bytes of `iov` before, which are not looked at, and are among those that
/// are told. What the thread holds ([`pins::hold`]) is the caller's to let go.
///
/// # Safety
/// As for [`send`], but for the first `sent` bytes.
pub unsafe fn send_after(fd: c_int, iov: &[iovec], sent: usize, msg: *const msghdr, flags: c_int) -> Outcome {
    let mut b = Bufs { skip: sent, ..Bufs::new(iov) };
    let since = Since::now();
    let mut begun = None;
    loop {
        let (at, conn) = live(fd, flags, sent > 0 || begun.is_some());
        let Some(conn) = conn else { return b.finish(libc::SYS_sendmsg, fd, flags, begun) };
        let call = begun.get_or_insert_with(|| Call::new(since, conn, flags, &conn.sndtimeo));
        // SAFETY: null or valid by the caller's promise.
        let controls = || unsafe { msg.as_ref() }.is_some_and(|m| m.msg_controllen > 0 && !message::is_ignored(m));
        let zero_copy = || flags & libc::MSG_ZEROCOPY != 0 && b.skip == 0 && crate::options::is_zero_copy(at);
        let why = match flags & (libc::MSG_OOB | libc::MSG_FASTOPEN) {
            0 if controls() => Some(Why::Control),
            0 => zero_copy().then_some(Why::ZeroCopy),
            libc::MSG_FASTOPEN => Some(Why::FastOpen),
            _ => Some(Why::Urgent),
        };
        if let Some(why) = why {
            call.deadline();
            if call.may_wait && !pins::hold(at, conn) {
                continue;
            }
            while !crate::process::try_give_up(conn, why) {
                if !call.may_wait || call.is_out_of_time() {
                    return Outcome::Fail(libc::EAGAIN);
                }
                if call.is_interrupted() {
                    return Outcome::Fail(libc::EINTR);
                }
            }
            if !conn.is_at(at) {
                continue;
            }
            return match pins::number(fd) {
                n if n == fd => Outcome::Bypass,
                // SAFETY: the caller's promise.
                n => unsafe { kernel_send(n, iov, msg, flags) },
            };
        }
        visit::arrive(conn);
        let step = match conn.phase() {
            Phase::Raw => send_raw(at, conn, &mut b, flags, call),
            Phase::Away => send_away(at, conn, &mut b, flags, call),
            _ => {
                call.moved(&conn.sndtimeo);
                send_managed(at, conn, &mut b, flags, call)
            }
        };
        if let Step::Return(o) = step {
            return b.outcome(o);
        }
    }
}

/// The kernel's call, with all that the program's says, on what has no number of the program's any more.
///
/// # Safety
/// As for [`send`].
unsafe fn kernel_send(fd: c_int, iov: &[iovec], msg: *const msghdr, flags: c_int) -> Outcome {
    // SAFETY: all-zero is one.
    let mut plain: msghdr = unsafe { core::mem::zeroed() };
    plain.msg_iov = iov.as_ptr().cast_mut();
    plain.msg_iovlen = iov.len() as _;
    let msg = if msg.is_null() { &raw const plain } else { msg };
    // SAFETY: the caller's promise.
    Outcome::from(unsafe { sys!(libc::SYS_sendmsg, fd, msg, flags) })
}

pub(super) enum Put {
    Sent(usize),
    /// All of it was sent, and the peer is not to see it yet.
    Held(usize),
    Full,
    /// It is between ring and TCP, where nothing can be written for a moment; the kernel's socket may have room.
    Busy,
    Error(Errno),
    Gone,
}

/// How much is written under one hold of the lock, before a sleeping reader is told.
const PIECE: usize = 256 << 10;

pub(super) fn put(fd: c_int, conn: &'static Conn, b: Bufs, flags: c_int) -> Put {
    let mut tx = conn.lock_tx();
    if !conn.is_at(fd) || !conn.is_managed() {
        return Put::Gone;
    }
    if conn.peer_closed() && !conn.has_ended(END_EOF) {
        // How it ended is for this call to tell, if nobody has looked yet.
        drop(tx);
        if pump::run(&mut conn.lock_both()) {
            return Put::Gone;
        }
        tx = conn.lock_tx();
    }
    if conn.has_ended(END_RESET) {
        let e = conn.take_error();
        if e != 0 {
            return Put::Error(e);
        }
    }
    if conn.has_ended(END_WRSHUT | END_FAILED) {
        drop(tx);
        return Put::Error(shut_error(fd, conn));
    }
    if tx.is_due() && !conn.rx_lock.held_by_me() {
        // Behind how much more of the program's bytes the mark comes is this thread's doing, which may give the locks to no
        // other for long; and a peer in a hurry takes all that stands before it.
        drop(tx);
        if pump::run(&mut conn.lock_both()) {
            return Put::Gone;
        }
        tx = conn.lock_tx();
    }
    let path = tx.path();
    if path == TxPath::Replay || tx.pending() {
        drop(tx);
        let mut both = conn.lock_both();
        let moved = pump::run(&mut both);
        // It may have been over when we had both locks.
        let over = both.sw().tx() != TxPath::Replay && both.sw().pending().is_empty();
        return if moved || over { Put::Gone } else { Put::Busy };
    }
    if path == TxPath::Ring && !conn.is_mapped() {
        return Put::Busy;
    }
    let away = conn.phase() == Phase::Away;
    let on_rings = !tx.peer_is_home() && !tx.has_resumed();
    // Who has closed while it returns keeps the kernel's socket, which refuses nothing, and expects frames there. (A reset takes
    // nothing any more.)
    let refused = match conn.peer_closed() {
        true => path == TxPath::Ring && !conn.has_ended(END_ORPHAN) && conn.is_leaving() && !conn.is_aborted(),
        false => conn.is_refused(),
    };
    if refused && on_rings && !conn.has_ended(END_TXDEAD) && !b.is_nowhere() {
        // As in the kernel: this call is the last that succeeds.
        drop(tx);
        pump::reset_with(&mut conn.lock_both(), libc::EPIPE);
        return Put::Sent(b.len());
    }
    if path == TxPath::Tcp
        && (away && on_rings || (conn.is_refused() || away) && (tx.has_resumed() || conn.awaits_fin()))
    {
        // Not before the peer's kernel refuses it, too. (Whether it does only the owner can know.)
        return Put::Busy;
    }
    if path == TxPath::Tcp && conn.lost.load(Relaxed) != 0 {
        if let Some(e) = lost_error(conn) {
            return Put::Error(e);
        }
    }
    if path == TxPath::Tcp || conn.has_ended(END_TXDEAD) || conn.peer_closed() {
        // But it takes what is sent before it has heard of a reset that the peer has told of.
        if conn.is_aborted() && !conn.has_ended(END_EOF) && conn.kernel_hangup() == 0 {
            drop(tx);
            return Put::Error(reset_ahead(conn).unwrap_or(libc::EPIPE));
        }
        if path == TxPath::Tcp {
            pump::say_beyond(conn);
        }
        // To a peer that is gone, too: the kernel knows what to say.
        let r = kernel_msg(
            libc::SYS_sendmsg,
            fd,
            b,
            usize::MAX,
            None,
            flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            None,
        );
        return match r {
            Ok(n) => {
                if path == TxPath::Ring && n > 0 && conn.has_closed_properly() {
                    conn.end.fetch_or(END_SPOKEN, SeqCst);
                }
                if path == TxPath::Tcp {
                    conn.count_tx_tcp(n);
                    pump::settle_doubt(conn);
                    note_more(conn, flags);
                }
                Put::Sent(n)
            }
            Err(libc::EAGAIN) => Put::Full,
            Err(e) if b.skip > 0 => Put::Error(keep_for_next(conn, e)),
            Err(e) => Put::Error(told_by_kernel(conn, e)),
        };
    }
    if b.is_nowhere() {
        return Put::Error(libc::EFAULT);
    }
    if tx.is_cramped(true) && !conn.is_refused() {
        return Put::Full;
    }
    if conn.is_refused() {
        drop(tx);
        pump::reset_with(&mut conn.lock_both(), libc::EPIPE);
        return Put::Sent(b.len());
    }
    if conn.remote().is_some() {
        // What fills most of a ring has to wait for the reader's word, which needs a write of its own.
        while tx.ring().is_small_for(b.len()) && grow(conn, &mut tx) {}
    }
    let aside = holds(conn, &mut tx, b.len(), flags);
    let begun = tx.ring().produced == tx.ring().shown();
    let from = tx.ring().produced;
    let mut n = 0;
    'parts: for (p, len) in b.parts() {
        let mut at = 0;
        while at < len && n < PIECE {
            let most = (len - at).min(PIECE - n);
            // SAFETY: the program's buffer, as it gave it.
            let put = unsafe {
                match aside {
                    true => tx.ring().set_aside(p.wrapping_add(at), most),
                    false => tx.ring().write(p.wrapping_add(at), most),
                }
            };
            match put {
                Ok(0) => {
                    if !grow(conn, &mut tx) {
                        break 'parts;
                    }
                }
                Ok(got) => {
                    at += got;
                    n += got;
                }
                Err(Failure::Fault) => {
                    // The kernel sends no part of a piece that it cannot copy whole. The next attempt tells.
                    let ring = tx.ring();
                    let whole = (ring.produced - from) / STRIDE as u64 * STRIDE as u64;
                    ring.take_back(from + whole);
                    n = (ring.produced - from) as usize;
                    if n == 0 {
                        return Put::Error(libc::EFAULT);
                    }
                    break 'parts;
                }
                Err(Failure::Violation) => {
                    drop(tx);
                    pump::reset(&mut conn.lock_both());
                    return Put::Error(libc::ECONNRESET);
                }
            }
        }
        if n >= PIECE {
            break;
        }
    }
    if n == 0 {
        conn.nospace.store(true, Relaxed);
        // Nobody makes room who does not see what is there.
        show(tx);
        return Put::Full;
    }
    conn.stats().tx_bytes_ring.fetch_add(n as u64, Relaxed);
    if !aside || n < b.len() {
        // (If it is to be held back, there was no room for more.)
        tx.ring().show();
        return Put::Sent(n);
    }
    note_held(conn, begun);
    Put::Held(n)
}

/// Makes the ring larger, for as long as it is used.
fn grow(conn: &Conn, tx: &mut Tx) -> bool {
    let grown = tx.ring().grow(conn.ring_limit());
    if grown && !conn.grown.swap(true, SeqCst) {
        conn.ask(ask::GROWN);
    }
    grown
}

/// How long no handler ends a send that only waits for the connection to go from the ring to TCP. That takes milliseconds, if
/// the peer's process runs.
const SIT_OUT_NS: i64 = 1_000_000_000;

/// A handler has run while a send waited for that, and the kernel's socket has room: the kernel's call would not have waited,
/// and so not been interrupted.
fn sit_out(fd: c_int, conn: &'static Conn, call: &mut Call) -> Result<(), Errno> {
    let end = now_ns() + SIT_OUT_NS;
    loop {
        let mut brief = call.until(end);
        let r = wait(fd, conn, None, (true, 0), &mut brief);
        call.handled();
        match r {
            Err(libc::EINTR) => {}
            Err(libc::EAGAIN) => return Err(if call.is_out_of_time() { libc::EAGAIN } else { libc::EINTR }),
            r => return r,
        }
    }
}

fn send_managed(fd: c_int, conn: &'static Conn, b: &mut Bufs, flags: c_int, call: &mut Call) -> Step {
    if conn.tx_lock.held_by_me() {
        return Step::Return(Outcome::Fail(libc::EAGAIN));
    }
    if b.len() == 0 {
        return Step::Return(send_nothing(fd, conn, flags));
    }
    loop {
        // A handler that jumps out does so when the peer was told.
        let critical = Critical::new();
        let put = put(fd, conn, *b, flags);
        match put {
            Put::Sent(_) => {
                conn.in_sight();
                conn.tell_sent();
            }
            Put::Held(_) => conn.in_sight(),
            _ => {}
        }
        drop(critical);
        match put {
            Put::Held(n) => return Step::Return(Outcome::Done(n as isize)),
            Put::Sent(n) if n >= b.len() => return Step::Return(Outcome::Done(n as isize)),
            Put::Sent(n) => call.goes_on(b, n),
            Put::Gone => return Step::Again,
            Put::Error(libc::EPIPE) if b.skip == 0 => return Step::Return(broken_pipe(flags)),
            Put::Error(e) => return Step::Return(fail_after(conn, b, e)),
            Put::Full | Put::Busy if !call.may_wait => {
                conn.fulls.fetch_add(1, SeqCst);
                conn.sent_away();
                conn.ask_for_room();
                if conn.writable() {
                    conn.notify();
                }
                return Step::Return(Outcome::Fail(libc::EAGAIN));
            }
            full @ (Put::Full | Put::Busy) => {
                conn.fulls.fetch_add(1, SeqCst);
                conn.nospace.store(true, Relaxed);
                let r = match (wait(fd, conn, None, (b.skip > 0, 0), call), full) {
                    (Err(libc::EINTR), Put::Busy) if sys::poll_now(fd, libc::POLLOUT) & libc::POLLOUT != 0 => {
                        sit_out(fd, conn, call)
                    }
                    (r, _) => r,
                };
                if let Err(e) = r {
                    return Step::Return(Outcome::Fail(e));
                }
            }
        }
    }
}
