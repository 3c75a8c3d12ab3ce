//! How connections come back to TCP in time for something that only the kernel's socket can serve.

use super::{is_active, is_guest};
use crate::conn::*;
use crate::log::{log, Level};
use crate::stats::Why;
use crate::sync::now_ns;
use crate::sys::{self, sys};
use crate::{options, pump, rendezvous, table, visit};
use core::sync::atomic::{AtomicBool, AtomicI64, Ordering::*};

/// How long a return is waited for, if otherwise the connection must be reset. A peer that is stopped, or does not read, may
/// go on after some time; and whoever waits here would, in the kernel, wait with what it sends.
pub(super) const PATIENCE_NS: i64 = if cfg!(test) { 1 } else { 30 } * 1_000_000_000;

/// Repeated bytes and what follows them are plain TCP to the kernel; nobody but it reads from now on.
pub(super) fn leave_to_kernel(c: &'static Conn) {
    let mut b = c.lock_both();
    let ours = c.phase() == Phase::Managed || c.phase() == Phase::Away && visit::is_home(&mut b);
    if ours && !pump::rescue(&mut b) && b.sw().rx() == crate::switch::RxPath::Replay {
        let n = b.sw().replay_missing() as usize;
        b.sw().took_tcp(n);
        drop(b);
        c.ask(ask::PUMP);
    }
}

pub(super) fn leave(c: &Conn, why: Why) {
    {
        let mut b = c.lock_both();
        pump::hurry(&mut b, why);
    }
    pump::drive(c);
}

/// Waits for a connection that the program has just closed, and others have, to come home: a new image has no rings, and
/// nobody brings it what is in them if we are killed. Not for long, because a close does not wait; and where a peer that is
/// stopped has held one up, none waits for a while.
pub fn await_let_go(c: &'static Conn) {
    const MOST_NS: i64 = 100_000_000;
    static NOT_BEFORE: AtomicI64 = AtomicI64::new(0);
    let until = now_ns() + MOST_NS;
    if until - MOST_NS < NOT_BEFORE.load(Relaxed) {
        return;
    }
    await_home(c, until);
    visit::await_rest(c, until);
    let now = now_ns();
    if now >= until {
        NOT_BEFORE.store(now + 10 * MOST_NS, Relaxed);
    }
}

/// Others may go on with a set that this process closes, and to them the kernel alone shows `all`: they stay with TCP. Waits for
/// those on rings like [`await_let_go`].
pub fn stay_for_others(all: &[&'static Conn]) {
    for c in all {
        let mut b = c.lock_both();
        c.next_try.store(u32::MAX, Relaxed);
        c.for_good.store(true, Relaxed);
        match c.phase() {
            Phase::Raw => c.set_phase(Phase::Plain),
            Phase::Managed => {
                pump::hurry(&mut b, Why::Shared);
                pump::run(&mut b);
            }
            _ => continue,
        }
        c.why(Why::Shared);
    }
    for c in all.iter().filter(|c| c.phase() == Phase::Managed) {
        await_let_go(c);
        if visit::has_come(c) && !has_no_way_home(c) {
            leave_to_kernel(c);
            await_kernels(c, || true, now_ns() + 100_000_000);
        }
    }
}

pub(super) fn await_home(c: &'static Conn, until: i64) {
    while c.phase() == Phase::Managed && now_ns() < until {
        pump::drive(c);
        if visit::is_home(&mut c.lock_both()) || c.has_ended(END_EOF) {
            return;
        }
        let _ = crate::poll::wait_one(c.local().fd.load(Relaxed), libc::POLLIN, 2_000_000);
    }
}

static NO_RINGS: AtomicBool = AtomicBool::new(false);

/// Nothing moves to rings any more in this process, and what is there returns.
pub fn no_more_rings() {
    if is_active() && !is_guest() && !NO_RINGS.swap(true, SeqCst) {
        // Nobody may look for a rest where the program cannot see it.
        leave_for_good((0..=table::highest()).filter_map(table::conn), Why::Confined, true, Some(PATIENCE_NS));
    }
}

/// Whether [`no_more_rings`] was called.
pub fn rings_allowed() -> bool {
    !NO_RINGS.load(Relaxed)
}

/// A connection is to use something that rings lack: it stays on, or returns to, TCP for good.
///
/// Waits for the return, which a peer that is stopped holds up. If it does not come within [`PATIENCE_NS`] the connection is
/// reset: what is about to use the kernel's socket would take a mark or a frame for the program's bytes, or send where the peer
/// expects frames.
pub fn give_up(c: &'static Conn, why: Why) {
    give_up_all([c].into_iter(), why);
}

/// As [`give_up`], with one time limit for all of them.
pub fn give_up_all(all: impl Iterator<Item = &'static Conn> + Clone, why: Why) {
    leave_for_good(all, why, matches!(why, Why::Shared | Why::Forked | Why::Libc), Some(PATIENCE_NS));
}

/// As [`give_up`], for what may be refused for now, or tried again, or done before it is home: waits for a moment, and never
/// resets it. Whether it is there. (If its peer does not read, more is on its way than the kernel's socket has room for: there
/// a send would wait, too, or be told `EAGAIN`. Where there is room the machine may be slow, and the wait is longer.)
pub fn try_give_up(c: &'static Conn, why: Why) -> bool {
    leave_for_good([c].into_iter(), why, false, None);
    c.phase() != Phase::Managed || c.has_ended(END_EOF)
}

/// The same. `whole`: what is left of one whose peer is gone goes into the kernel's socket, too. `patience`: in ns; after that it
/// is reset. `None`: it may go on to return.
fn leave_for_good(all: impl Iterator<Item = &'static Conn> + Clone, why: Why, whole: bool, patience: Option<i64>) {
    const MOMENT_NS: i64 = 100_000_000;
    const SLOW_NS: i64 = 1_000_000_000;
    let until = now_ns() + patience.unwrap_or(MOMENT_NS);
    all.clone().filter(|c| c.is_inherited()).for_each(visit::press);
    for c in all.clone() {
        if c.is_inherited() {
            visit::settle(c);
            leave_to_kernel(c);
        }
        let mut b = c.lock_both();
        match c.phase() {
            Phase::Raw => {
                c.set_phase(Phase::Plain);
                told(c, why);
            }
            Phase::Managed => {
                c.next_try.store(u32::MAX, Relaxed);
                // Between its coming home and our seeing that, the peer may ask for it again.
                c.for_good.store(true, Relaxed);
                pump::hurry(&mut b, why);
                pump::run(&mut b);
            }
            // It is home, and its owner has yet to see that.
            Phase::Away => {
                c.next_try.store(u32::MAX, Relaxed);
                c.for_good.store(true, Relaxed);
                told(c, why);
            }
            _ => {}
        }
    }
    for c in all.filter(|c| matches!(c.phase(), Phase::Managed | Phase::Raw)) {
        await_home(c, until);
        let abroad = || c.phase() == Phase::Managed && !c.has_ended(END_EOF) && !visit::is_home(&mut c.lock_both());
        if patience.is_none() && abroad() && sys::poll_now(c.local().fd.load(Relaxed), libc::POLLOUT) != 0 {
            await_home(c, until + SLOW_NS);
        }
        if patience.is_none() && abroad() {
            // The library reads and sends for it until it is home: nothing of its return is the kernel's alone.
            continue;
        }
        // That may have taken all the time there was; what is left to be done waits for nobody's program.
        let until = if patience.is_none() { until.max(now_ns() + SLOW_NS) } else { until };
        visit::await_rest(c, until);
        leave_to_kernel(c);
        let over = has_no_way_home(c);
        // The background thread makes it the kernel's again.
        if !over {
            await_kernels(c, || true, until);
        } else if whole {
            hand_over(c, until);
        }
        {
            // It may have come home long before we looked.
            let _b = c.lock_both();
            if c.phase() == Phase::Raw {
                c.set_phase(Phase::Plain);
            }
        }
        if c.phase() == Phase::Managed && !c.has_ended(END_EOF) {
            if patience.is_none() {
                continue;
            }
            reset_late(&mut c.lock_both());
        }
        if c.phase() == Phase::Managed && whole {
            // Its sender is gone, and who gets it cannot have the rest of the ring.
            let b = &mut c.lock_both();
            if c.phase() == Phase::Managed && (b.rx.ring().waiting() > 0 || c.err.load(Relaxed) == libc::ECONNRESET) {
                pump::disconnect(c);
            } else if c.phase() == Phase::Managed && c.has_ended(END_FAILED) {
                // How it failed was told.
                // SAFETY: an fd of the connection, which cannot be closed while we hold the locks.
                let _ = unsafe { sys!(libc::SYS_shutdown, c.local().fd.load(Relaxed), libc::SHUT_RDWR) };
            }
        }
        told(c, why);
    }
}

/// A connection is with TCP for good: says so to whoever asks.
fn told(c: &Conn, why: Why) {
    c.why(why);
    let s = c.stats();
    if s.ends().is_none() {
        // It was never looked for.
        let ends = rendezvous::ends(c.local().fd.load(Relaxed));
        ends.iter().flatten().zip([&s.local, &s.peer]).for_each(|(end, to)| to.note(end));
    }
    let Some([local, peer]) = s.ends().as_ref().map(|ends| ends.map(|end| rendezvous::socket_addr(&end))) else {
        return;
    };
    log(Level::Debug, format_args!("{local} to {peer}: stays on TCP: {}", why.text()));
}

/// It has not come home in time, and the kernel's socket is about to be used.
fn reset_late(b: &mut Both) {
    log(Level::Warn, format_args!("a connection did not return to TCP in time, and is reset"));
    pump::reset(b);
}

/// As [`reset_late`], if that is so.
pub(super) fn reset_abroad(c: &'static Conn) {
    let b = &mut c.lock_both();
    if c.phase() == Phase::Managed && !c.has_ended(END_EOF) && !visit::is_home(b) {
        reset_late(b);
        pump::disconnect(c);
    }
}

/// Waits for a connection that is the parent's to come home; if it does not, the parent is to reset it, as [`reset_abroad`]
/// would.
pub(super) fn await_parents(c: &'static Conn, until: i64) {
    let abroad = || c.is_inherited() && c.phase() == Phase::Away;
    while abroad() && !visit::settle(c) {
        if now_ns() >= until {
            c.doomed.store(true, SeqCst);
            if visit::settle(c) {
                c.doomed.store(false, SeqCst);
            } else {
                pump::disconnect(c);
            }
            return;
        }
    }
}

/// The owner's part of that.
pub fn reset_doomed(c: &'static Conn) {
    if c.doomed.swap(false, SeqCst) {
        reset_abroad(c);
    }
}

/// Waits for the background thread to make it the kernel's, as long as `may`.
fn await_kernels(c: &'static Conn, may: impl Fn() -> bool, until: i64) {
    while c.phase() == Phase::Managed && may() && now_ns() < until {
        c.ask(ask::PUMP);
        // SAFETY: no preconditions.
        let _ = unsafe { sys!(libc::SYS_sched_yield) };
    }
}

/// Somebody else gets its socket: if it has ended, what is left of it is in there then (`remains.rs`).
pub(super) fn hand_over(c: &'static Conn, until: i64) {
    if has_no_way_home(c) {
        c.bequeathed.store(true, SeqCst);
        await_kernels(c, || c.bequeathed.load(SeqCst), until);
    }
}

/// An image is about to have its socket, and there the kernel alone polls and answers: `SO_RCVLOWAT` is the program's again, if
/// the background thread has not come to that, and all is there that was in a ring.
pub(super) fn give_lowat(c: &Conn) {
    let b = c.lock_both();
    if c.phase() == Phase::Managed && visit::has_rest(&b) {
        options::give_lowat(c, c.local().fd.load(Relaxed));
    }
}

/// Whether a connection that has ended stays what it is: the kernel does not know what the ring still holds, nor how it
/// failed. If there is nothing of that it becomes the kernel's.
fn has_no_way_home(c: &'static Conn) -> bool {
    let mut b = c.lock_both();
    if c.phase() == Phase::Managed {
        c.find_lost().into_iter().for_each(|e| c.fail(e));
    }
    if c.phase() != Phase::Managed || !c.has_ended(END_EOF) {
        return false;
    }
    if c.has_ended(END_FAILED | END_RESET) || b.rx.ring().waiting() > 0 {
        return true;
    }
    // An image may be there before the background thread says it.
    visit::shut_kernels(c);
    *b.sw() = crate::switch::Switch::new();
    false
}
