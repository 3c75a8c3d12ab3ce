//! How a connection ends: by the end of the TCP stream, by a peer that is gone, or by a reset of ours.

use super::{leave, run, QUIET};
use crate::conn::*;
use crate::kept::Kept;
use crate::layout::*;
use crate::log::{log, Level};
use crate::stats::Why;
use crate::switch::{End, RxPath, TxPath};
use crate::sys;
use core::sync::atomic::Ordering::*;

/// How long the end of a ring on another host may come after the end of the TCP stream.
const END_NS: i64 = 1_000_000_000;

/// Whether the ring's own end is still on its way: on another host's link the kernel's FIN may overtake it.
fn awaits_end(conn: &Conn) -> bool {
    let Some(r) = conn.remote() else { return false };
    r.poll(true);
    if conn.peer().is_none_or(|p| p.flags.load(SeqCst) & CLOSED != 0) || r.failed.load(SeqCst) {
        return false;
    }
    let now = crate::sync::now_ns();
    match conn.eof_at.compare_exchange(0, now, SeqCst, SeqCst) {
        Ok(_) => {
            conn.ask(ask::ENDING);
            true
        }
        Err(at) => now - at < END_NS,
    }
}

/// The TCP stream has ended, or failed with `errno`. False: that is to be looked at again later.
pub(super) fn ended(b: &mut Both, errno: i32) -> bool {
    let conn = b.rx.conn();
    if matches!(b.sw().rx(), RxPath::Ring | RxPath::Returning) && awaits_end(conn) {
        if errno != 0 {
            conn.note_lost(errno);
        }
        return false;
    }
    let errno = if errno == 0 { conn.find_lost().unwrap_or(0) } else { errno };
    let (spoke, resumed_empty) = (b.sw().has_sent_frames(), b.sw().resumed_empty());
    let verdict = b.sw().end(false);
    let (mut aborted, mut closed, mut after_fin, mut beyond) = (false, false, false, false);
    if let Some(p) = conn.peer() {
        let f = p.flags.load(SeqCst);
        beyond = f & BEYOND != 0;
        after_fin = f & FIN != 0;
        aborted = f & ABORT != 0;
        closed = f & CLOSED != 0;
    }
    let _ = b.tx.ring().refresh();
    let unread = {
        let r = b.tx.ring();
        r.shown() > r.consumed
    };
    let on_ring = b.sw().tx() == TxPath::Ring;
    let reset = on_ring && unread;
    // It had read all that it knew of when it closed: what came then its kernel would have refused.
    let refused = reset && closed && !aborted;
    // A call that had moved something was told by the kernel, and has left it to the next one.
    let kept = conn.kept_error();
    // The kernel gave the end, and not an error, so that came before the peer's reset. (Its program had ended its direction in the
    // middle of an upgrade, where the slot does not say so. Who takes nothing any more is given an end whatever comes.)
    let ends_first = verdict == End::Eof && errno == 0 && kept.is_none() && !conn.has_ended(END_RDSHUT);
    // What the program has sent to who had closed may have come before its kernel had said so.
    let spoken = conn.has_ended(END_SPOKEN) && closed && !aborted;
    after_fin |= refused || spoken || aborted && ends_first;
    if !closed && !reset {
        // Without a goodbye, and without a reset: what the peer's program had behind a cork the kernel would have sent.
        b.rx.ring().orphan();
    }
    // Whoever still reads its ring, as the peer did, has not got to our `Resume`, nor to anything behind it.
    let sent_since = conn.own().is_none_or(|o| conn.tx_tcp() != o.mark_at.load(Relaxed));
    // And a reset of plain TCP may have cost what the peer's program had sent last.
    let frames_alone = !beyond && if on_ring { spoke } else { resumed_empty && !sent_since };
    let missing = match verdict {
        End::Reset => true,
        // The mark is lost, and with it the place of what the peer has written into its ring.
        End::Eof => b.rx.ring().behind() > 0,
        End::AfterRing => false,
    };
    let error = match verdict {
        _ if missing => libc::ECONNRESET,
        // Died without a goodbye on another host: nobody knows what it had accepted for sending.
        End::AfterRing if conn.remote_pid.load(Relaxed) != 0 && !closed => libc::ECONNRESET,
        // TCP resets a connection that is closed before everything was read.
        _ if aborted || refused || on_ring && !closed && unread => libc::ECONNRESET,
        // A reset of TCP's that only says that control frames were left unread.
        _ if errno == libc::ECONNRESET && !aborted && !spoken && (closed || frames_alone) => 0,
        _ => errno,
    };
    match error {
        0 => {}
        _ if conn.has_ended(END_TOLD) => conn.fail_as_told(),
        // The peer may have said that it has ended, but that end stands behind what is missing.
        e if missing => conn.fail(e),
        _ if kept.is_some() => conn.fail(kept.unwrap_or(0)),
        // After the end of the peer's stream a reset means that it takes nothing more, and to an end that has
        // ended too it means nothing.
        libc::ECONNRESET if after_fin && conn.has_ended(END_WRSHUT) => {}
        libc::ECONNRESET if after_fin => conn.fail(libc::EPIPE),
        e => conn.fail(e),
    }
    if conn.kernel_hangup() != 0 {
        conn.end.fetch_or(END_HUP, AcqRel);
    }
    let orderly = if after_fin { END_ORDERLY } else { 0 };
    conn.end.fetch_or(END_EOF | END_RXFIN | END_TXDEAD | orderly, AcqRel);
    true
}

/// The TCP stream has ended, or failed with `errno`, in the middle of a replay, because who repeated was killed: what is
/// missing is still where it was, if that is this host's memory. Whether it is read from there now.
pub fn read_on(b: &mut Both, errno: i32) -> bool {
    let conn = b.rx.conn();
    if conn.remote().is_some() || !conn.is_mapped() || !b.rx.ring().is_attached() {
        return false;
    }
    let until = b.sw().replay_until();
    let Some((given, from)) = b.sw().read_on() else { return false };
    let ring = b.rx.ring();
    ring.orphan();
    let skip = from.checked_sub(ring.consumed).filter(|_| ring.consumed + ring.behind() >= until);
    let lost = (ring.given.len() as u64).checked_sub(given);
    let goes_on = skip.zip(lost).is_some_and(|(skip, lost)| {
        let there = ring.pass(skip as usize) == Ok(skip as usize);
        ring.given.pass(lost as usize);
        ring.kept = core::mem::replace(&mut ring.given, Kept::NONE);
        there
    });
    if !goes_on {
        reset(b);
        return true;
    }
    let n = given + until - from;
    log(Level::Debug, format_args!("a peer has ended in the middle of a return: {n} bytes are read where they were"));
    ended(b, errno);
    conn.publish_paths(b.sw());
    conn.notify();
    true
}

/// A replay cannot come to its end, because who repeated was killed, and the kernel's socket is about to serve the program:
/// what has come of it, and what is still where it was, is put together. Whether that was so.
pub fn rescue(b: &mut Both) -> bool {
    let conn = b.rx.conn();
    let fd = conn.local().fd.load(Relaxed);
    let cut_off = b.sw().rx() == RxPath::Replay
        && conn.remote().is_none()
        && conn.is_mapped()
        && b.rx.ring().is_attached()
        && sys::poll_now(fd, libc::POLLRDHUP) & libc::POLLRDHUP != 0;
    let there = || sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0).max(0) as usize;
    if !cut_off || there() as u64 >= b.sw().replay_missing() {
        return false;
    }
    // SAFETY: links are never freed.
    let side = unsafe { conn.link.load(Acquire).as_ref() }.map(|l| &l.side);
    let mut came = Kept::NONE;
    let end = loop {
        let n = there().max(1);
        let Some(to) = came.room(n, side) else { return false };
        // SAFETY: `room` has given so much.
        match unsafe { sys::recv(fd, to.cast(), n, QUIET) } {
            Ok(0) => break 0,
            Ok(n) => {
                came.added(n);
                b.sw().took_tcp(n);
            }
            Err(libc::EINTR) => {}
            Err(e) => break e,
        }
    };
    read_on(b, end);
    let rest = &mut b.rx.ring().kept;
    let n = rest.len();
    if let Some(to) = came.room(n, side) {
        // SAFETY: `room` has given so much, in memory of its own.
        unsafe { core::ptr::copy_nonoverlapping(rest.bytes().as_ptr(), to, n) };
        came.added(n);
    }
    rest.release();
    *rest = came;
    true
}

/// The peer's process is gone, or another program has taken its place, and neither end has begun a mark: the connection stays
/// on TCP. Whether that is so.
pub fn is_never_marked(b: &mut Both) -> bool {
    let conn = b.rx.conn();
    let begun = |s: Option<&Slot>| s.is_some_and(|s| s.flags.load(SeqCst) & MARK_BEGUN != 0);
    let pending = !b.sw().pending().is_empty();
    if b.sw().rx() != RxPath::Armed || b.sw().tx() != TxPath::Tcp || pending || begun(conn.own()) || begun(conn.peer())
    {
        return false;
    }
    b.sw().disarm();
    true
}

/// The peer's process is gone. As long as the program does not read what stands before the peer's mark, nothing says
/// so but the kernel's socket: what is written goes there from now on, and if the peer left bytes of ours unread, the
/// kernel is made to find out that they are lost. Whether that was the case.
pub fn bereave(b: &mut Both) -> bool {
    let conn = b.rx.conn();
    if b.sw().rx() != RxPath::Armed || b.sw().tx() != TxPath::Ring || conn.has_ended(END_EOF) {
        return false;
    }
    let end = sys::poll_now(conn.local().fd.load(Relaxed), libc::POLLRDHUP);
    if end == 0 {
        return false;
    }
    if conn.end.fetch_or(END_ORPHAN, AcqRel) & END_ORPHAN == 0 {
        let ring = b.tx.ring();
        let _ = ring.refresh();
        if ring.shown() > ring.consumed {
            // Nobody reads that frame: a reset is the answer.
            conn.end.fetch_or(END_BEREFT, AcqRel);
            leave(b, Why::Gone);
            run(b);
        }
        conn.notify();
    }
    true
}

/// The peer broke the protocol, or bytes are lost: the connection ends with `ECONNRESET` at both ends.
pub fn reset(b: &mut Both) {
    reset_with(b, libc::ECONNRESET);
}

/// Has the kernel reset it at both ends: to nobody may it look like a proper end.
pub fn disconnect(conn: &Conn) {
    disconnect_number(conn.local().fd.load(Relaxed));
}

/// The same by a number of it.
pub fn disconnect_number(fd: i32) {
    let unspec = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
    // SAFETY: the address is readable for its length.
    let _ = unsafe { sys::sys!(libc::SYS_connect, fd, &unspec, size_of_val(&unspec)) };
}

/// As [`reset`], with this end's program being told `errno`.
pub fn reset_with(b: &mut Both, errno: i32) {
    let conn = b.rx.conn();
    conn.fail(errno);
    if let Some(own) = conn.own() {
        own.flags.fetch_or(ABORT | CLOSED, AcqRel);
    }
    // SAFETY: an fd of the connection, which cannot be closed while we hold the locks.
    let _ = unsafe { sys::sys!(libc::SYS_shutdown, conn.local().fd.load(Relaxed), libc::SHUT_RDWR) };
    conn.tell_peer(WANT_RX | WANT_TX, FUTEX_RX | FUTEX_TX);
    conn.notify();
}
