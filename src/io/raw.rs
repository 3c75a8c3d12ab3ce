//! Sending and receiving while a connection is the kernel's, but may be upgraded: the kernel's own calls,
//! counted, and made so that no thread is inside one of them when the mark arrives.

use super::*;
use crate::thread::Critical;

pub(super) fn recv_raw(
    fd: c_int,
    conn: &'static Conn,
    b: &mut Bufs,
    mut msg: Option<&mut msghdr>,
    flags: c_int,
    call: &mut Call,
) -> Step {
    let may_wait = call.may_wait;
    note_call(conn, may_wait);
    let least = conn.least(flags, may_wait, b.len() + b.skip);
    let mut waited = false;
    loop {
        stand_back(conn, may_wait, call.since);
        // Not only while the peer is looked for: where there are threads, one may wait here from the first call on
        // for what comes at the end of all, and it would be in the way of every upgrade until then. And a call that
        // waits goes on when somebody sets `O_NONBLOCK`.
        let shared = process::has_threads() || conn.gentle.load(Relaxed) || conn.nonblock.load(Relaxed);
        let gentle = may_wait && (shared || call.is_late() || b.skip > 0);
        let how = if gentle { flags | libc::MSG_DONTWAIT } else { flags };
        let slow = conn.slow.load(Relaxed);
        if gentle && slow > 0 && !waited && b.len() > 0 {
            waited = true;
            conn.slow.store(slow - 1, Relaxed);
            if let Err(e) = peek_wait(fd, conn, b.skip > 0, call) {
                return Step::Return(fail_later(conn, b, e));
            }
        }
        // No handler jumps out where the thread is counted, but from its sleep. (What is not to wait the kernel may let wait all
        // the same, if another process has cleared `O_NONBLOCK`.)
        let critical = may_wait.then(Critical::new);
        // Who closes the number of a call that has slept does not do so before the kernel's call is over. (One that has not
        // may come too late in the kernel as well.)
        let there = pins::is_held().then(|| conn.lock_rx());
        conn.local().rx_inflight.fetch_add(1, SeqCst);
        if conn.phase() != Phase::Raw || !conn.is_at(fd) {
            drop(there);
            leave_kernel(conn, &conn.local().rx_inflight);
            return Step::Again;
        }
        let mut if_left = || leave_kernel(conn, &conn.local().rx_inflight);
        // What has a time limit the kernel does not go on with after a handler, whatever that asked for.
        let any = call.is_timed();
        let sleep = (may_wait && !gentle).then_some(Sleep { since: call.since, any, if_left: &mut if_left });
        let r = match if b.skip > 0 { more_of(fd) } else { Some(usize::MAX) } {
            None => Ok(0),
            Some(0) => Err(libc::EAGAIN),
            Some(most) => kernel_msg(libc::SYS_recvmsg, fd, *b, most, msg.as_deref_mut(), how, sleep),
        };
        if let Ok(n) = r {
            if flags & libc::MSG_PEEK == 0 {
                conn.count_rx_tcp(n);
            }
        }
        drop(there);
        leave_kernel(conn, &conn.local().rx_inflight);
        drop(critical);
        match r {
            Ok(n) if gentle && looks_on(fd, n, to_see(flags, b.len(), || conn.lowat())) => {
                pins::hold(fd, conn);
                if pause(call, true, &mut || ()).is_err() {
                    return Step::Return(Outcome::Done(n as isize));
                }
            }
            Ok(0) if b.skip == 0 && b.len() > 0 && conn.lost.load(Relaxed) != 0 => {
                let lost = conn.find_lost().map_or(Outcome::Done(0), Outcome::Fail);
                return Step::Return(lost);
            }
            Ok(n) => {
                conn.in_sight();
                note_bytes(conn, n);
                if n == 0 || n >= b.len() || !gentle || b.skip + n >= least {
                    return Step::Return(Outcome::Done(n as isize));
                }
                call.goes_on(b, n);
            }
            Err(libc::EAGAIN) if gentle => {
                waited = true;
                conn.slow.store(EXPECT_SLOW, Relaxed);
                if let Err(e) = peek_wait(fd, conn, b.skip > 0, call) {
                    return Step::Return(match e {
                        libc::EAGAIN => super::waited(b, e),
                        e => fail_later(conn, b, e),
                    });
                }
            }
            Err(e) => {
                if e == libc::EAGAIN && !may_wait {
                    conn.out_of_sight.store(true, SeqCst);
                }
                return Step::Return(fail_later(conn, b, e));
            }
        }
    }
}

/// How much there is for a call that has bytes already; `None`: nothing comes any more that belongs to it. An error of the
/// connection ends it as well, and is for the next call, and for who polls: the kernel tells it once, so it is not asked.
pub(super) fn more_of(fd: c_int) -> Option<usize> {
    // This first, because bytes may come together with the end.
    let ends = sys::poll_now(fd, libc::POLLRDHUP | libc::POLLPRI) != 0;
    match sys::ioctl_int(fd, libc::FIONREAD) {
        Ok(n @ 1..) => Some(n as usize),
        _ if ends => None,
        _ => Some(0),
    }
}

/// What the kernel has said ends a call. If bytes were moved before, the program is told of those, and of this by its next call.
fn fail_later(conn: &Conn, b: &Bufs, e: Errno) -> Outcome {
    if b.skip > 0 {
        conn.note_lost(e);
    }
    Outcome::Fail(e)
}

/// A receive that had to wait is likely to be followed by others: one system call less for each of these. Those
/// that a connection begins with ([`BEGIN_SLOW`]) mostly have to wait too.
const EXPECT_SLOW: u32 = 16;

/// See [`EXPECT_SLOW`].
pub const BEGIN_SLOW: u32 = 2;

const PEEK_ALL: c_int = libc::MSG_PEEK | libc::MSG_WAITALL;

/// How many bytes of `len` a call that may wait is to see before it returns; 0: it takes what it sees.
pub(super) fn to_see(flags: c_int, len: usize, lowat: impl FnOnce() -> usize) -> usize {
    match flags & PEEK_ALL {
        PEEK_ALL => len,
        libc::MSG_PEEK => lowat().min(len),
        _ => 0,
    }
}

/// Whether a call that has seen `n` bytes, and is to see `least`, goes on until more come.
pub(super) fn looks_on(fd: c_int, n: usize, least: usize) -> bool {
    (1..least).contains(&n) && sys::poll_now(fd, libc::POLLRDHUP) == 0
}

/// Lets a moment pass. For the one wait for which nobody is to be woken: for more than can be read already.
/// `begun`: the call has bytes already, so that every handler ends it.
pub(super) fn pause(call: &mut Call, begun: bool, if_left: &mut dyn FnMut()) -> Result<(), Errno> {
    let (deadline, since) = (call.deadline(), call.since);
    if deadline > 0 && now_ns() >= deadline {
        return Err(libc::EAGAIN);
    }
    let ts = timespec_of(200_000);
    let any = deadline > 0 || begun;
    let how = Sleep { since, any, if_left };
    // SAFETY: `ts` is readable.
    match unsafe { signals::sleep(libc::SYS_nanosleep, [&raw const ts as usize, 0, 0, 0, 0, 0], how) } {
        // This one the kernel never goes on with by itself.
        Err(libc::EINTR) if !since.is_over(any) => Ok(()),
        r => r.map(|_| ()),
    }
}

/// A thread is inside the kernel no more with a call that is counted.
#[inline(always)]
pub(super) fn leave_kernel(conn: &Conn, inside: &AtomicU32) {
    chaos::stumble();
    if inside.fetch_sub(1, SeqCst) == 1 && conn.phase() == Phase::Managed {
        // The mark may have been waiting for us.
        conn.ask(ask::PUMP);
    }
}

/// The background thread waits for a moment in which no thread is inside the kernel with this
/// connection: a call that may wait anyway lets it have that moment. One that may not does so for hardly longer than until
/// the next try, and if nobody else is inside: a program that does nothing but send would else be inside each time.
fn stand_back(conn: &Conn, may_wait: bool, since: Since) {
    let held = || {
        let local = conn.local();
        let inside = || local.rx_inflight.load(SeqCst) > 0 || local.tx_inflight.load(SeqCst) > 0;
        conn.hold.load(SeqCst) && (may_wait || !inside())
    };
    if held() {
        let epoch = conn.epoch.load(SeqCst);
        if held() {
            let ts = timespec_of(if may_wait { 5_000_000 } else { 1_000_000 });
            let _critical = Critical::new();
            let sleepers = &conn.local().fut_rx;
            sleepers.fetch_add(1, SeqCst);
            let mut if_left = || _ = sleepers.fetch_sub(1, SeqCst);
            let how = Sleep { since, any: false, if_left: &mut if_left };
            let word = &raw const conn.epoch as usize;
            let args = [word, libc::FUTEX_WAIT as usize, epoch as usize, &raw const ts as usize, 0, 0];
            // SAFETY: records are never freed; `ts` is readable.
            let _ = unsafe { signals::sleep(libc::SYS_futex, args, how) };
            sleepers.fetch_sub(1, SeqCst);
        }
    }
}

/// Waits in the kernel until something can be read or the connection is managed. `begun`: the call has bytes already.
fn peek_wait(fd: c_int, conn: &'static Conn, begun: bool, call: &mut Call) -> Result<(), Errno> {
    // Every handler ends it.
    let any = begun || call.is_timed();
    let again = pins::is_held();
    chaos::stumble();
    if !pins::hold(fd, conn) {
        return Ok(());
    }
    let critical = Critical::new();
    conn.local().peekers.fetch_add(1, SeqCst);
    let sleeps = conn.phase() == Phase::Raw;
    let r = if sleeps {
        chaos::stumble();
        let mut byte = 0u8;
        let late = call.is_late();
        let until = call.deadline();
        let mut if_left = || end_peek(conn);
        let how = Sleep { since: call.since, any, if_left: &mut if_left };
        if !late && !again && !begun && !conn.nonblock.load(Relaxed) {
            // By the kernel's own rules for timeouts. (It takes the connection's error, which ends such a call.)
            let args = [fd as usize, &raw mut byte as usize, 1, libc::MSG_PEEK as usize, 0, 0];
            // SAFETY: one writable byte.
            unsafe { signals::sleep(libc::SYS_recvfrom, args, how).map(|_| ()) }
        } else if conn.rcvlowat.load(Relaxed) > 1 {
            // For which `poll` would wait, though some of that may have been taken already.
            pause(call, begun, &mut || end_peek(conn))
        } else {
            poll_wait(fd, libc::POLLIN, until, how)
        }
    } else {
        Ok(())
    };
    call.looks_again(if sleeps { Since::at_wake() } else { Since::now() });
    end_peek(conn);
    drop(critical);
    // The handler may have run before the kernel was asked.
    if r == Err(libc::EINTR) && sys::poll_now(fd, libc::POLLIN) & libc::POLLIN != 0 {
        return Ok(());
    }
    r
}

/// A thread waits in the kernel no more.
pub fn end_peek(conn: &'static Conn) {
    chaos::stumble();
    if conn.local().peekers.fetch_sub(1, SeqCst) == 1 {
        // The mark was left for us. It may have another record by now.
        let c = table::conn(conn.local().fd.load(Relaxed)).unwrap_or(conn);
        if c.phase() == Phase::Managed {
            c.ask(ask::PUMP);
        }
    }
}

/// How much a call that may wait gives the kernel at once: it can be called out after each such piece.
const RAW_PIECE: usize = 64 << 10;

pub(super) fn send_raw(fd: c_int, conn: &'static Conn, b: &mut Bufs, flags: c_int, call: &mut Call) -> Step {
    let may_wait = call.may_wait;
    note_call(conn, may_wait);
    loop {
        stand_back(conn, may_wait, call.since);
        // As for a receive.
        let critical = may_wait.then(Critical::new);
        let again = pins::is_held();
        let there = again.then(|| conn.lock_tx());
        conn.local().tx_inflight.fetch_add(1, SeqCst);
        if conn.phase() != Phase::Raw || !conn.is_at(fd) {
            drop(there);
            leave_kernel(conn, &conn.local().tx_inflight);
            return Step::Again;
        }
        if conn.lost.load(Relaxed) != 0 && b.skip == 0 {
            if let Some(e) = lost_error(conn) {
                drop(there);
                leave_kernel(conn, &conn.local().tx_inflight);
                return Step::Return(Outcome::Fail(e));
            }
        }
        if b.skip > 0 && sys::poll_now(fd, 0) != 0 {
            // It has failed, which is for the next call to tell.
            drop(there);
            leave_kernel(conn, &conn.local().tx_inflight);
            return Step::Return(Outcome::Done(0));
        }
        let left = b.len();
        let piece = if may_wait && conn.gentle.load(Relaxed) { left.min(RAW_PIECE) } else { left };
        let asked = b.reach(piece);
        // The kernel may wait with the last bytes of a piece as it would not in the middle of a call.
        let more = if asked < left { libc::MSG_MORE } else { 0 };
        // A handler behind the piece before this one ends the call where it would have to wait.
        let over = b.skip > 0 && call.since.is_over(true);
        let late = may_wait && (call.is_late() || again || over);
        let until = if may_wait { call.deadline() } else { 0 };
        let quick = if late { libc::MSG_DONTWAIT } else { 0 };
        // A call that has sent something tells of no error, nor is there a signal.
        let quiet = if b.skip > 0 { libc::MSG_NOSIGNAL } else { 0 };
        let any = call.is_timed() || b.skip > 0;
        // What it does not take at once is to go on.
        if may_wait && (late || asked < left) && !pins::hold(fd, conn) {
            leave_kernel(conn, &conn.local().tx_inflight);
            return Step::Again;
        }
        let mut if_left = || leave_kernel(conn, &conn.local().tx_inflight);
        let how = (may_wait && !late).then_some(Sleep { since: call.since, any, if_left: &mut if_left });
        let r = kernel_msg(libc::SYS_sendmsg, fd, *b, piece, None, flags | more | quick | quiet, how);
        if let Ok(n) = r {
            conn.count_tx_tcp(n);
            note_more(conn, flags);
            note_bytes(conn, n);
        }
        // That it found no room, as a call that waits may have too, makes room news; see `edges`.
        if r.map_or_else(|e| e == libc::EAGAIN, |n| n < asked || may_wait && n > 4096) {
            conn.fulls.fetch_add(1, SeqCst);
        }
        drop(there);
        leave_kernel(conn, &conn.local().tx_inflight);
        drop(critical);
        match r {
            // A piece that was cut short was cut by a signal or a timeout, which ends the call, unless it did not wait.
            Ok(n) if n < left && (n == asked || late) => {
                if !late {
                    call.looks_again(Since::at_wake());
                }
                call.goes_on(b, n);
            }
            Ok(n) => return Step::Return(Outcome::Done(n as isize)),
            Err(libc::EAGAIN) if late => {
                let how = Sleep { since: call.since, any, if_left: &mut || () };
                if let Err(e) = poll_wait(fd, libc::POLLOUT, until, how) {
                    return Step::Return(Outcome::Fail(e));
                }
                call.looks_again(Since::at_wake());
            }
            Err(e) => return Step::Return(fail_later(conn, b, e)),
        }
    }
}

#[inline(always)]
pub(super) fn note_call(conn: &Conn, may_wait: bool) {
    if may_wait && !conn.evidence.load(Relaxed) {
        conn.evidence.store(true, Relaxed);
    }
    let n = conn.calls.load(Relaxed).wrapping_add(1);
    conn.calls.store(n, Relaxed);
    if n >= conn.next_try.load(Relaxed) {
        look(conn, n);
    }
}

/// Few calls with much in them count as many.
pub(super) fn note_bytes(conn: &Conn, n: usize) {
    let cfg = crate::config::get();
    let calls = conn.calls.load(Relaxed);
    if n >= 4096 && calls < cfg.upgrade_after {
        let moved = conn.tx_tcp() + conn.rx_tcp();
        if moved >= cfg.upgrade_bytes {
            conn.calls.store(cfg.upgrade_after, Relaxed);
        }
    }
}

/// Whether it was seen how the program waits for it.
pub fn has_evidence(conn: &Conn) -> bool {
    conn.evidence.load(SeqCst) || crate::epoll::is_awaited(conn)
}

/// Enough has gone through it to be worth a ring: looks for the peer.
#[cold]
fn look(conn: &Conn, calls: u32) {
    if conn.is_inherited() && !conn.holders.is_only(crate::process::holder_id()) {
        // Until the other processes have let go of it, which may be soon.
        conn.next_try.store(calls.saturating_add(64), Relaxed);
        return;
    }
    if crate::process::is_guest() {
        // A number of another process in our memory: nothing that is asked of the background thread would be about it.
        conn.next_try.store(u32::MAX, Relaxed);
        return;
    }
    let again = calls.saturating_add(chaos::again(calls.saturating_mul(3)));
    conn.next_try.store(again.max(calls.saturating_add(1)), Relaxed);
    if !has_evidence(conn) || conn.local().blind.load(Relaxed) > 0 {
        conn.why(Why::Unseen);
        return;
    }
    if !crate::process::rings_allowed() {
        conn.why(Why::Confined);
        return;
    }
    conn.gentle.store(true, Relaxed);
    conn.ask(ask::LOOK);
    chaos::dawdle(conn);
}
