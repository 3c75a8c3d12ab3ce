//! Drives a connection's path switch: writes what is pending, repeats ring
//! bytes on TCP, reads the control stream, looks for the mark.

use crate::chaos::stumble;
use crate::conn::*;
use crate::io::{drain, front, is_behind_cork, Front};
use crate::kept::Kept;
use crate::layout::*;
use crate::log::{log, Level};
use crate::options;
use crate::stats::Why;
use crate::switch::{RxPath, TxPath};
use crate::sys;
use crate::wire::{FRAME_LEN, MARK_LEN};
use core::sync::atomic::Ordering::*;

mod ends;
use ends::ended;
pub use ends::{bereave, disconnect, disconnect_number, is_never_marked, read_on, rescue, reset, reset_with};

const QUIET: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// Does all that can be done without waiting. Returns whether anything changed; whoever waits for the connection
/// has been told then. (Whoever moved the switch on may be a thread that cares for one direction only, and what it
/// has found, an end of the stream, is found once.)
pub fn run(b: &mut Both) -> bool {
    let changed = advance(b);
    if changed {
        b.rx.conn().notify();
    }
    changed
}

fn advance(b: &mut Both) -> bool {
    let conn = b.rx.conn();
    let fd = conn.local().fd.load(Relaxed);
    if fd < 0 || conn.phase() != Phase::Managed {
        return false;
    }
    let mut changed = false;
    settle_doubt(conn);
    if conn.is_refused_late() && !conn.has_ended(END_EOF) || b.is_refused_by_closed() {
        reset_with(b, libc::EPIPE);
        return true;
    }
    if b.is_refusing_late() {
        conn.answer_late();
    }
    // Each round makes progress on a finite switch; the bound only guards against a peer that floods frames.
    for _ in 0..256 {
        let was = b.sw().tx();
        let coming_home = was != TxPath::Tcp || !b.sw().pending().is_empty();
        let mut moved = false;
        for part in [|b: &mut Both, _: i32| start_mark(b), flush, give, replay, receive] {
            stumble();
            moved |= part(b, fd);
        }
        if was == TxPath::Tcp && b.sw().tx() != TxPath::Tcp {
            tell_of_mark(b, fd);
        }
        let (consumed, produced) = (b.rx.ring().consumed, b.tx.ring().produced);
        let kept = b.rx.ring().kept.len() as u64;
        // What has ended cannot return.
        let speaks = !conn.has_ended(END_EOF) && may_speak(b);
        let step = if speaks { b.sw().step(consumed, produced, kept) } else { Ok(false) };
        let stepped = match step {
            Ok(s) => s,
            Err(_) => {
                reset(b);
                return true;
            }
        };
        if stepped && was != TxPath::Tcp && b.sw().tx() != TxPath::Ring {
            let _ = b.tx.ring().refresh();
            let range = b.sw().replay();
            let ring = b.tx.ring();
            if range.start > ring.shown() || !range.is_empty() && range.start < ring.consumed {
                // It has given these bytes back already, so they may be overwritten; or it cannot have seen them.
                reset(b);
                return true;
            }
        }
        // Whoever was to have it has it by TCP, or will.
        match b.sw().rx() {
            RxPath::Replay if !b.rx.ring().kept.is_empty() => {
                let ring = b.rx.ring();
                ring.given = core::mem::replace(&mut ring.kept, Kept::NONE);
            }
            RxPath::Replay => b.rx.ring().kept.release(),
            RxPath::Tcp => {
                b.rx.ring().kept.release();
                b.rx.ring().given.release();
            }
            _ => {}
        }
        if b.sw().tx() == TxPath::Tcp {
            b.tx.ring().back.release();
            options::owe_nothing(conn, fd);
            if matches!(b.sw().rx(), RxPath::Tcp | RxPath::Replay) {
                say_beyond(conn);
            }
        }
        if conn.has_ended(END_WRSHUT | END_RDSHUT) {
            shut_home(b, fd, coming_home);
        }
        if !moved && !stepped {
            break;
        }
        changed = true;
    }
    if changed {
        // Another host hears from nothing else of the mark that was taken, or of the end that goes by the ring now.
        conn.flush();
        let sw = b.sw();
        conn.publish_paths(sw);
        if sw.is_plain() {
            conn.ask(ask::PUMP);
        }
    }
    changed
}

/// What is sent by TCP from now on follows what was repeated. Before its first byte.
pub fn say_beyond(conn: &Conn) {
    if let Some(own) = conn.own() {
        if own.flags.load(Relaxed) & (MARK_BEGUN | BEYOND) == MARK_BEGUN {
            own.flags.fetch_or(BEYOND, SeqCst);
        }
    }
}

/// Whether frames of a return may be sent, which is announced before the first. A peer that has closed, or ends, reads
/// none: its kernel would answer them with a reset, though nothing is amiss. Either it sees the announcement, and keeps its
/// socket until the return is done ([`Both::is_returning`]), or this end sees that it has closed; if both, it is taken back.
fn may_speak(b: &mut Both) -> bool {
    let conn = b.tx.conn();
    // For a reset is what [`bereave`] has it speak.
    if !b.sw().leaving() || b.sw().has_sent_frames() || conn.has_ended(END_BEREFT) {
        return true;
    }
    let (Some(own), Some(peer)) = (conn.own(), conn.peer()) else { return true };
    let in_vain = || {
        let flags = peer.flags.load(SeqCst);
        flags & (CLOSED | BYE) != 0 || flags & LEAVING == 0 && own.flags.load(SeqCst) & BYE != 0
    };
    // (It may have been announced long ago, when there was nothing to say as yet.)
    let mut announced = own.flags.load(SeqCst) & LEAVING != 0;
    if !in_vain() {
        own.flags.fetch_or(LEAVING, SeqCst);
        conn.flush();
        stumble();
        if !in_vain() {
            return true;
        }
        announced = true;
    }
    if announced {
        own.flags.fetch_and(!LEAVING, SeqCst);
        conn.flush();
        conn.hint_peer();
    }
    false
}

/// Directions that were shut in the ring are shut in TCP, too, when they have come there.
///
/// Who has shut both refuses what comes, in the kernel as on the ring, by a reset. So with both shut nothing of a replay may
/// be on its way any more, and nothing else may have come before: our end is what the peer waits for (`Conn::awaits_fin`).
/// What has no room in the kernel, and perhaps is never read, is not waited for.
fn shut_home(b: &mut Both, fd: i32, coming_home: bool) {
    let conn = b.rx.conn();
    let (rd, wr) = (conn.has_ended(END_RDSHUT), conn.has_ended(END_WRSHUT));
    let rx_home = matches!(b.sw().rx(), RxPath::Tcp | RxPath::Replay);
    let tx_home = b.sw().tx() == TxPath::Tcp && b.sw().pending().is_empty();
    let missing = b.sw().replay_missing() as i64;
    let there = || sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) as i64;
    // SAFETY: an fd of the connection, which cannot be closed while we hold the locks.
    let shut = |how: i32| _ = unsafe { sys::sys!(libc::SYS_shutdown, fd, how) };
    let has = |e: i16| sys::poll_now(fd, libc::POLLRDHUP) & e != 0;
    if rd && wr {
        let all = rx_home && (missing == 0 || there() >= missing);
        if all && tx_home {
            if !has(libc::POLLHUP) {
                shut(libc::SHUT_RDWR);
            }
        } else if coming_home
            && tx_home
            && missing > sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_RCVBUF).unwrap_or(0) as i64 / 4
        {
            shut(libc::SHUT_WR);
        }
    } else if rd && rx_home && (missing == 0 || there() >= missing) {
        if !has(libc::POLLRDHUP) {
            shut(libc::SHUT_RD);
        }
    } else if wr && coming_home && tx_home {
        shut(libc::SHUT_WR);
    }
}

/// Has a connection return in its turn. `why` is what is said of it, unless it was on its way before.
pub fn leave(b: &mut Both, why: Why) {
    let _ = b.tx.conn().leaves.compare_exchange(Why::None as u8, why as u8, Relaxed, Relaxed);
    b.sw().leave();
}

/// Has a connection return at once: neither end waits until its program has read what stands before the mark. Who is
/// about to use the kernel's socket must not find the mark in it.
pub fn hurry(b: &mut Both, why: Why) {
    let conn = b.tx.conn();
    leave(b, why);
    if !b.sw().leaving() || conn.hurry.swap(true, SeqCst) {
        return;
    }
    if let Some(own) = conn.own() {
        own.flags.fetch_or(HURRY, SeqCst);
        conn.flush();
        conn.hint_peer();
    }
}

/// As [`run`], for a thread that finds nothing to do and wants to be sure, unless others are at it.
pub fn quick(conn: &Conn) {
    if conn.phase() != Phase::Managed {
        return;
    }
    if let Some(mut b) = conn.try_lock_both() {
        run(&mut b);
    }
}

/// The same where others are to be waited for, because the kernel would tell what they are about to find: but not for long, of
/// who may be told to come again.
pub fn soon(conn: &Conn) {
    const SOON_NS: i64 = 20_000_000;
    if conn.phase() != Phase::Managed {
        return;
    }
    if let Some(mut b) = conn.lock_both_within(SOON_NS) {
        run(&mut b);
    }
}

/// As [`run`], once the locks are free.
pub fn drive(conn: &Conn) {
    run(&mut conn.lock_both());
}

/// Switches the sending direction to the ring as soon as that can be: both nonces are exchanged, and no
/// thread is inside a sending system call that began before the connection was managed.
fn start_mark(b: &mut Both) -> bool {
    let conn = b.tx.conn();
    if conn.local().tx_inflight.load(SeqCst) > 0 {
        return false;
    }
    // Our mark must not wait until the program has read what stands before the peer's: an end of either direction, and
    // a return, would wait for that too. Behind a long stretch it is looked for only where one has ended.
    if !conn.confirmed.load(Acquire) && matches!(b.sw().rx(), RxPath::Armed | RxPath::Draining) {
        const NEAR: usize = 64 << 10;
        let peers = conn.peer().map_or(0, |p| p.flags.load(Acquire));
        let most = if conn.has_ended(END_WRSHUT) || peers & (FIN | CLOSED) != 0 { usize::MAX } else { NEAR };
        if peers & MARK_BEGUN != 0 && crate::io::mark_is_there(conn, &mut b.rx, most) {
            conn.confirmed.store(true, Release);
        }
    }
    if conn.confirmed.load(Acquire) {
        let nonce = b.tx.peer_nonce();
        b.sw().allow_mark(nonce);
    }
    if !b.sw().can_mark() {
        return false;
    }
    if is_behind_cork(conn, conn.local().fd.load(Relaxed)) {
        return false;
    }
    conn.held.store(0, SeqCst);
    begin_mark(conn);
    if !b.sw().start_mark() {
        return false;
    }
    if conn.has_ended(END_WRSHUT) {
        // The program has ended its direction meanwhile; the end travels in the ring now.
        if let Some(own) = conn.own() {
            own.flags.fetch_or(FIN, AcqRel);
        }
        conn.refuse();
    }
    count_upgrade(b);
    true
}

/// The peer's own mark must not wait until ours has found room behind what its program does not read (`Bg::confirm`).
fn tell_of_mark(b: &mut Both, fd: i32) {
    let conn = b.tx.conn();
    // Also what was sent may have found no room there.
    let waits = || sys::ioctl_int(fd, libc::TIOCOUTQ).is_ok_and(|n| n > 0);
    if !conn.connector.load(Relaxed) && (!b.sw().pending().is_empty() || waits()) {
        conn.hint_peer();
    }
}

/// Bytes that were not sent for want of a window: `linux/sockios.h`.
pub const SIOCOUTQNSD: libc::c_ulong = 0x894B;

/// Before its first byte can arrive, the receiver must be able to see that a mark has begun.
fn begin_mark(conn: &Conn) {
    if let Some(own) = conn.own() {
        own.mark_at.store(conn.tx_tcp(), Relaxed);
        own.flags.fetch_or(MARK_BEGUN, SeqCst);
        conn.flush();
    }
}

/// A peer on another host that is in doubt hears up to where there is no mark. Under the send lock.
pub fn settle_doubt(conn: &Conn) {
    let (Some(_), Some(own), Some(peer)) = (conn.remote(), conn.own(), conn.peer()) else { return };
    if peer.flags.load(SeqCst) & DOUBT != 0 && own.flags.load(Relaxed) & MARK_BEGUN == 0 {
        // (What is being sent right now by another thread is counted later: then the next call says more.)
        own.mark_at.store(conn.tx_tcp(), SeqCst);
        conn.flush();
    }
}

fn count_upgrade(b: &mut Both) {
    if b.sw().tx() == TxPath::Ring && b.sw().rx() == RxPath::Ring {
        let s = b.rx.conn().stats();
        s.upgrades.fetch_add(1, Relaxed);
        s.why.store(0, Relaxed);
    }
}

/// Has the kernel send what was written: neither Nagle's algorithm nor a cork of the program's is to hold it back.
///
/// To switch Nagle's algorithm off pushes what is there, behind a cork, too; to switch it on again holds nothing back.
fn push(conn: &Conn, fd: i32) {
    let set = |on: i32| {
        // SAFETY: `on` is readable for its size.
        let _ = unsafe { sys::sys!(libc::SYS_setsockopt, fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &on, 4) };
    };
    let delays = sys::sockopt_int(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY) == Ok(0);
    if delays || conn.corked.load(Relaxed) {
        set(1);
    }
    if delays {
        set(0);
    }
}

/// The last frame has come, and nothing is repeated. Nagle's algorithm would hold back what the peer's program sends behind it until
/// the kernel acknowledges it, which it does at once now rather than after 40 ms. (Even: once only. Of bytes behind a cork, which
/// an acknowledgement draws, there are none yet.)
fn acknowledge(fd: i32) {
    let once = 2i32;
    // SAFETY: `once` is readable for its size.
    let _ = unsafe { sys::sys!(libc::SYS_setsockopt, fd, libc::IPPROTO_TCP, libc::TCP_QUICKACK, &once, 4) };
}

/// A program that found no room must not find the room of a ring: it is to wait until its peer reads. As long as our mark
/// is not written, what it sends finds none, and it may well have begun: the peer's may depend on that. (A peer in a hurry
/// makes room: it takes what stands before the mark.)
fn awaits_room(b: &mut Both, fd: i32) -> bool {
    let conn = b.tx.conn();
    let only_mark = b.sw().pending().len() == MARK_LEN && b.sw().tx() == TxPath::Ring;
    let ends = || conn.own().is_none_or(|o| o.flags.load(Relaxed) & (FIN | CLOSED | BYE) != 0);
    only_mark && conn.fulls.load(SeqCst) > 0 && !b.sw().leaving() && !ends() && sys::poll_now(fd, libc::POLLOUT) == 0
}

fn flush(b: &mut Both, fd: i32) -> bool {
    if b.sw().pending().is_empty() {
        return false;
    }
    if awaits_room(b, fd) {
        b.tx.conn().crowded.store(true, Relaxed);
        return false;
    }
    let moved = write_pending(b, fd);
    if moved {
        // What the peer's program has read has made room.
        if !b.tx.conn().does_peer_hurry() {
            b.tx.conn().crowded.store(false, Relaxed);
        }
        push(b.tx.conn(), fd);
    }
    moved
}

fn write_pending(b: &mut Both, fd: i32) -> bool {
    let mut moved = false;
    loop {
        let sw = b.sw();
        let p = sw.pending();
        if p.is_empty() {
            return moved;
        }
        // SAFETY: `p` is readable.
        match unsafe { sys::send(fd, p.as_ptr().cast(), p.len(), QUIET) } {
            Ok(n) => {
                sw.written(n);
                moved = true;
            }
            Err(libc::EINTR) => {}
            Err(libc::EAGAIN) => return moved,
            Err(e) => {
                let n = p.len();
                sw.written(n);
                b.tx.conn().note_lost(e);
                b.tx.conn().end.fetch_or(END_TXDEAD, AcqRel);
                return true;
            }
        }
    }
}

/// Gives what was taken before the mark, and the program has not got, back to the peer, which is to repeat it on TCP.
fn give(b: &mut Both, fd: i32) -> bool {
    let mut moved = false;
    while b.sw().pending().is_empty() && !b.sw().giving().is_empty() {
        let range = b.sw().giving();
        let bytes = b.rx.ring().kept.bytes().get(range.start as usize..range.end as usize).unwrap_or(&[]);
        if bytes.is_empty() {
            reset(b);
            return true;
        }
        // SAFETY: `bytes` is readable.
        match unsafe { sys::send(fd, bytes.as_ptr().cast(), bytes.len(), QUIET) } {
            Ok(n) => b.sw().gave(n as u64),
            Err(libc::EINTR) => {}
            Err(libc::EAGAIN) => return moved,
            Err(e) => {
                b.tx.conn().note_lost(e);
                b.sw().gave(range.end - range.start);
                b.tx.conn().end.fetch_or(END_TXDEAD, AcqRel);
            }
        }
        moved = true;
    }
    moved
}

/// The most that a peer can give back: more than any socket's buffers hold.
const BACK_MAX: u64 = 1 << 30;

/// Takes what the peer gives back.
fn take_back(b: &mut Both, fd: i32) -> bool {
    let want = b.sw().back_want();
    // It cannot be more than was ever sent.
    let most = BACK_MAX.min(b.tx.conn().tx_tcp());
    let link = b.tx.conn().link.load(Acquire);
    let ring = b.tx.ring();
    let there = ring.back.len() as u64;
    // SAFETY: links are never freed.
    let side = unsafe { link.as_ref() }.map(|l| &l.side);
    let to = if there + want > most { None } else { ring.back.room(want as usize, side) };
    let Some(to) = to else {
        reset(b);
        return true;
    };
    // SAFETY: `room` has given so much.
    match unsafe { sys::recv(fd, to.cast(), want as usize, QUIET) } {
        Ok(0) => return ended(b, 0),
        Ok(n) => {
            b.tx.ring().back.added(n);
            b.sw().took_back(n as u64);
        }
        Err(libc::EAGAIN | libc::EINTR) => return false,
        Err(e) => return ended(b, e),
    }
    true
}

/// Whether the return is not to wait for the program, and the peer's mark is bound to come.
fn may_drain(b: &mut Both) -> bool {
    let conn = b.rx.conn();
    if !conn.is_hurried() || conn.local().is_peeked() {
        return false;
    }
    let begun = conn.peer().is_some_and(|p| p.flags.load(SeqCst) & MARK_BEGUN != 0);
    conn.peer().is_some() && (begun || b.sw().tx() == TxPath::Ring)
}

/// Whether the peer's TCP stream has ended, and no mark is in it: the peer has closed, or was killed, before it could begin
/// one. What the program has not read yet is in the kernel's socket, whoever gets that.
fn no_mark_comes(b: &mut Both, fd: i32) -> bool {
    let conn = b.rx.conn();
    // Looked at before what the peer says, which is said before the first byte of a mark is written. (By another host it may
    // come later.)
    let over = b.sw().tx() == TxPath::Tcp
        && conn.remote_pid.load(Relaxed) == 0
        && sys::poll_now(fd, libc::POLLRDHUP) & libc::POLLRDHUP != 0;
    over && conn.peer().is_none_or(|p| p.flags.load(SeqCst) & MARK_BEGUN == 0)
}

fn replay(b: &mut Both, fd: i32) -> bool {
    let conn = b.tx.conn();
    let mut moved = false;
    while b.sw().tx() == TxPath::Replay && b.sw().pending().is_empty() {
        stumble();
        options::owe(conn, fd);
        let (back, mut range) = (b.sw().replay_back(), b.sw().replay());
        let ring = b.tx.ring();
        // What the peer was not shown the kernel goes on holding back.
        let hidden = back.is_empty() && range.start >= ring.shown();
        let more = if hidden && conn.held.load(SeqCst) != 0 { libc::MSG_MORE } else { 0 };
        if !hidden {
            range.end = range.end.min(ring.shown());
        }
        let (bytes, most) = match back.is_empty() {
            true => (ring.retained(range.start), range.end - range.start),
            false => (ring.back.bytes().get(back.start as usize..).unwrap_or(&[]), back.end - back.start),
        };
        let n = bytes.len().min(most as usize);
        if n == 0 {
            reset(b);
            return true;
        }
        // SAFETY: the ring's own memory, or what was given back.
        match unsafe { sys::send(fd, bytes.as_ptr().cast(), n, QUIET | more) } {
            Ok(n) => {
                if back.is_empty() {
                    b.sw().replayed(n as u64);
                } else {
                    b.sw().replayed_back(n as u64);
                }
                if !hidden {
                    push(conn, fd);
                }
                moved = true;
            }
            Err(libc::EINTR) => {}
            Err(libc::EAGAIN) => return moved,
            Err(e) => {
                b.tx.conn().note_lost(e);
                let (back, n) = (b.sw().replay_back(), b.sw().replay());
                b.sw().replayed_back(back.end - back.start);
                b.sw().replayed(n.end - n.start);
                b.tx.conn().end.fetch_or(END_TXDEAD, AcqRel);
                moved = true;
            }
        }
    }
    moved
}

fn receive(b: &mut Both, fd: i32) -> bool {
    let conn = b.rx.conn();
    if conn.has_ended(END_EOF) {
        // What is sent to a peer that is gone is answered by a reset, which changes what `poll` says.
        return !conn.has_ended(END_HUP | END_FAILED)
            && conn.kernel_hangup() != 0
            && conn.end.fetch_or(END_HUP, AcqRel) & END_HUP == 0;
    }
    match b.sw().rx() {
        RxPath::Ring | RxPath::Returning if b.sw().back_want() > 0 => take_back(b, fd),
        RxPath::Ring | RxPath::Returning => {
            let mut buf = [0u8; FRAME_LEN];
            let mut want = b.sw().control_want();
            if conn.own().is_some_and(|own| own.flags.load(SeqCst) & CLOSED != 0) {
                // What is no frame is to stay there: the kernel refuses it when the socket is closed, which is now. It may come
                // just now, so nothing is taken that was not there before it was asked what it is.
                // SAFETY: `buf` has room.
                match unsafe { sys::recv(fd, buf.as_mut_ptr().cast(), want, QUIET | libc::MSG_PEEK) } {
                    Ok(n) if n > 0 && b.is_sent_late() => return false,
                    Ok(n) if n > 0 => want = n,
                    Err(libc::EAGAIN | libc::EINTR) => return false,
                    // An end, or an error.
                    _ => {}
                }
            }
            // SAFETY: `buf` has room.
            match unsafe { sys::recv(fd, buf.as_mut_ptr().cast(), want, QUIET) } {
                Ok(0) => return ended(b, 0),
                Ok(n) => {
                    if b.sw().control(&buf[..n]).is_err() {
                        reset(b);
                    }
                    if b.sw().rx() == RxPath::Tcp {
                        acknowledge(fd);
                    }
                    match b.sw().back_want() {
                        0 => {}
                        n => {
                            log(Level::Debug, format_args!("the peer gives back {n} bytes that stood before our mark"))
                        }
                    }
                }
                Err(libc::EAGAIN | libc::EINTR) => return false,
                Err(e) => return ended(b, e),
            }
            true
        }
        RxPath::Armed if conn.is_hurried() && no_mark_comes(b, fd) => {
            b.sw().disarm();
            true
        }
        RxPath::Armed if may_drain(b) => {
            b.sw().drain();
            b.rx.ring().only_kept = true;
            true
        }
        RxPath::Draining if !conn.local().is_peeked() && drain(&mut b.rx) => true,
        RxPath::Armed | RxPath::Draining => match front(&mut b.rx) {
            // While others wait in the kernel for the socket to become readable, the mark is theirs to
            // find: once it were gone they would sleep on.
            Front::Mark if !conn.local().is_peeked() => {
                take_mark(b, fd);
                true
            }
            // The rest may have no room in the socket's buffer until these few bytes have left it.
            Front::Part(n) if !conn.local().is_peeked() => {
                let mut buf = [0u8; MARK_LEN];
                // SAFETY: `buf` has room; so many bytes were just seen in the socket's queue.
                let got = unsafe { sys::recv(fd, buf.as_mut_ptr().cast(), n.min(MARK_LEN), QUIET) };
                conn.mark_got.fetch_add(got.unwrap_or(0) as u32, Relaxed);
                got.inspect_err(|e| conn.note_lost(*e)).is_ok()
            }
            Front::End => {
                ended(b, 0);
                true
            }
            Front::Failed(e) => {
                ended(b, e);
                true
            }
            _ => false,
        },
        _ => false,
    }
}

/// Of a connection that has ended: takes all that has come before the peer's mark, and the mark, out of the TCP stream.
pub fn drain_all(b: &mut Both, fd: i32) {
    b.sw().drain();
    b.rx.ring().only_kept = true;
    drain(&mut b.rx);
    if front(&mut b.rx) == Front::Mark {
        take_mark(b, fd);
    }
}

/// The mark stands at the front of the TCP stream: consumes it.
pub fn take_mark(b: &mut Both, fd: i32) {
    let mut buf = [0u8; MARK_LEN];
    let missing = MARK_LEN.saturating_sub(b.rx.conn().mark_got.load(Relaxed) as usize);
    // SAFETY: `buf` has room; all of the mark was just seen in the socket's queue.
    if unsafe { sys::recv(fd, buf.as_mut_ptr().cast(), missing, QUIET) } != Ok(missing) {
        reset(b);
        return;
    }
    b.sw().mark_seen();
    b.rx.ring().only_kept = false;
    // The peer has our nonce, so we may use its: it has written a mark for it.
    b.rx.conn().confirmed.store(true, Release);
    if let Some(own) = b.rx.conn().own() {
        own.flags.fetch_or(MARK_TAKEN, AcqRel);
    }
    count_upgrade(b);
    let conn = b.rx.conn();
    conn.publish_paths(b.sw());
}
