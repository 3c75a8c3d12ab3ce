//! Connections that a process has inherited over `fork`.
//!
//! Only the process that upgraded a connection (its owner) uses its rings: the memory, the bells, the epoll
//! sets are its own. A child that merely has a copy of the fd changes nothing. A child that *uses* it
//! visits: it asks the owner to bring the connection back to TCP, where every process is equal, and from
//! then on it stays there until only one process holds it. The owner's background thread is woken by an
//! eventfd that it made before the fork.
//!
//! An owner that was killed, or a peer that is gone, brings nothing back. Then a child whose parent had
//! upgraded the connection before the fork has the rings mapped and goes on by itself (`Local::direct`);
//! one that has not fails the connection if bytes are missing.

use crate::conn::*;
use crate::ring::{RxRing, TxRing};
use crate::stats::Why;
use crate::switch::{RxPath, TxPath};
use crate::sync::{futex_wait, now_ns, pause};
use crate::sys::{self, sys};
use crate::{bell, bg, chaos, epoll, fdhigh, foreign, liveness, options, poll, pump, rendezvous};
use core::sync::atomic::{AtomicI32, AtomicU32, Ordering::*};
use libc::c_int;

/// How long a call that must not wait stays for a return, which takes as long as two processes need to be woken.
const SHORT_NS: i64 = 1_000_000_000;
/// How long one look at a connection that is away lasts.
pub const SLICE_NS: i64 = 5_000_000;

/// So much surely has room in a kernel's socket.
const ROOM: usize = 64 << 10;

/// This process's bell for its children, or -1.
static BELL: AtomicI32 = AtomicI32::new(-1);

const ANCESTORS: usize = 32;
/// The bells of those that this process descends from.
static FDS: [AtomicI32; ANCESTORS] = [const { AtomicI32::new(-1) }; ANCESTORS];
static LIVES: [AtomicU32; ANCESTORS] = [const { AtomicU32::new(0) }; ANCESTORS];

/// Before a fork: makes the bell by which the child can ask for connections.
pub fn offer_bell() {
    if BELL.load(Acquire) >= 0 {
        return;
    }
    // A child that cannot ask waits for ever.
    let _room = fdhigh::Room::make();
    // SAFETY: no preconditions.
    let Ok(fd) = (unsafe { sys!(libc::SYS_eventfd2, 0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }) else { return };
    let fd = fdhigh::move_high(fd as c_int);
    if BELL.compare_exchange(-1, fd, AcqRel, Acquire).is_err() {
        // Another thread forks, too.
        crate::sys::close(fd);
        return;
    }
    bg::watch_visitors(fd);
}

/// The bell that children ring.
pub fn own_bell() -> Option<c_int> {
    Some(BELL.load(Acquire)).filter(|fd| *fd >= 0)
}

/// In a forked child: the bell is the parent's.
pub fn reset_after_fork(parents_life: u32) {
    let fd = BELL.swap(-1, Relaxed);
    if fd < 0 {
        return;
    }
    let place = FDS.iter().position(|f| f.load(Relaxed) < 0).unwrap_or(0);
    let old = FDS[place].swap(fd, Relaxed);
    LIVES[place].store(parents_life, Relaxed);
    if old >= 0 {
        crate::sys::close(old);
    }
}

/// Asks a connection's owner to bring it home.
fn call_owner(c: &Conn) {
    c.wanted.store(true, SeqCst);
    for (fd, life) in FDS.iter().zip(&LIVES) {
        if life.load(Relaxed) == c.owner && fd.load(Relaxed) >= 0 {
            bell::ring_fd(fd.load(Relaxed));
        }
    }
}

/// Whether all that is to come, and to go, comes and goes by TCP.
pub fn is_home(b: &mut Both) -> bool {
    let tx = b.tx.path() == TxPath::Tcp && !b.tx.pending();
    tx && matches!(b.sw().rx(), RxPath::Tcp | RxPath::Replay) && !b.rx.conn().awaits_fin()
}

/// Wakes those that this process descends from.
pub fn call_ancestors() {
    FDS.iter().map(|fd| fd.load(Relaxed)).filter(|fd| *fd >= 0).for_each(bell::ring_fd);
}

/// Before a process that inherited `c` uses it. From then on only TCP serves it, until one process alone holds it.
#[inline]
pub fn arrive(c: &Conn) {
    if !arrive_within(c, SLICE_NS) {
        // Nothing may be done with it before: its owner could make it leave TCP meanwhile.
        let _b = c.lock_both();
        c.visited.store(true, SeqCst);
    }
}

/// Before an image asks for what whoever has the connection on its rings is to know, or sets what that is to go by.
#[inline]
pub fn arrive_by_exec(c: &Conn) {
    if c.is_inherited() && c.came_by_exec() {
        arrive(c);
    }
}

/// The same as [`arrive`] for who can do without. False: a process that may have been stopped holds its locks.
fn arrive_within(c: &Conn, ns: i64) -> bool {
    if c.is_inherited() && c.came_by_exec() && c.phase() == Phase::Raw {
        foreign::fetch(c);
    } else if c.is_inherited() && !c.visited.load(Relaxed) {
        let Some(_b) = c.lock_both_within(ns) else { return false };
        c.visited.store(true, SeqCst);
    }
    true
}

/// What a look at a connection that is away came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// It is not away any more.
    Back,
    /// Both directions use TCP; the one to read still repeats what was in the ring.
    Home,
    /// Not yet.
    Away,
    /// A signal came meanwhile.
    Signal,
}

/// Asks for a connection that is away, and waits for a moment.
pub fn look(c: &'static Conn) -> Look {
    if !arrive_within(c, SLICE_NS) {
        return Look::Away;
    }
    let epoch = c.epoch.load(SeqCst);
    let rx = {
        let Some(mut b) = c.lock_both_within(SLICE_NS) else { return Look::Away };
        if c.phase() != Phase::Away {
            return Look::Back;
        }
        if regain(c, &mut b) {
            return Look::Back;
        }
        if is_home(&mut b) && !b.sw().is_plain() && !c.has_ended(END_RESET) {
            return Look::Home;
        }
        b.rx.path()
    };
    let owner_dead = liveness::is_dead(c.owner_pid);
    if owner_dead || c.has_ended(END_EOF) {
        let (kept, given) = {
            let mut b = c.lock_both();
            (b.rx.ring().kept, !b.tx.ring().back.is_empty())
        };
        let has_all = kept.is_empty() || kept.id() == 0 || kept.id() == c.local().kept.load(Relaxed);
        let mapped = c.is_let_go() || c.local().mapped.load(Acquire) == c.upgrade_no.load(Acquire);
        if has_all && !given && mapped {
            go_on(c, owner_dead);
            return Look::Back;
        }
        if owner_dead {
            abandon(c);
            return Look::Back;
        }
    }
    chaos::stumble();
    call_owner(c);
    let r = if matches!(rx, RxPath::Tcp | RxPath::Armed | RxPath::Replay) {
        // What comes is the caller's to read. (It may be the first part of a mark, which is not.)
        let fd = c.local().fd.load(Relaxed);
        match poll::wait_one(fd, libc::POLLIN, SLICE_NS) {
            Ok(1) => futex_wait(&c.epoch, epoch, SLICE_NS / 20),
            r => r,
        }
    } else {
        futex_wait(&c.epoch, epoch, SLICE_NS)
    };
    match c.phase() {
        Phase::Away if r == Err(libc::EINTR) => Look::Signal,
        Phase::Away => Look::Away,
        _ => Look::Back,
    }
}

/// Whether it is away no more because its owner has let go of it, and all that was repeated is read.
pub fn is_regained(c: &Conn) -> bool {
    c.is_let_go() && c.lock_both_within(SLICE_NS).is_some_and(|mut b| c.phase() == Phase::Away && regain(c, &mut b))
}

/// See [`is_regained`].
fn regain(c: &Conn, b: &mut Both) -> bool {
    if !c.is_let_go() || !is_home(b) || !b.sw().is_plain() || c.has_ended(END_RESET) {
        return false;
    }
    // What the kernel counts includes marks, frames and repeated bytes.
    let fd = c.local().fd.load(Relaxed);
    if let Ok(counts) = rendezvous::kernel_counts(fd, c.connector.load(Relaxed)) {
        c.set_tcp_counts(counts);
    }
    options::give_lowat(c, fd);
    c.set_phase(Phase::Raw);
    true
}

/// The owner cannot bring it home any more, but the rings are mapped here, too.
fn go_on(c: &'static Conn, owner_dead: bool) {
    c.local().direct.store(true, SeqCst);
    if owner_dead {
        pump::leave(&mut c.lock_both(), Why::Gone);
        pump::drive(c);
    } else {
        // It is over, but the kernel, which polls for other processes, knows only of the peer's end.
        let _b = c.lock_both();
        shut_kernels(c);
    }
}

/// The owner is dead, and its rings are out of reach.
fn abandon(c: &'static Conn) {
    let mut b = c.lock_both();
    if c.phase() != Phase::Away {
        return;
    }
    let lost = !b.sw().is_plain();
    *b.sw() = crate::switch::Switch::new();
    *b.tx.ring() = TxRing::default();
    *b.rx.ring() = RxRing::default();
    c.attach(None, 0, core::ptr::null());
    if lost {
        pump::disconnect(c);
        c.fail(libc::ECONNRESET);
        c.why(Why::Forked);
        c.set_phase(Phase::Plain);
    } else {
        options::give_lowat(c, c.local().fd.load(Relaxed));
        c.set_phase(Phase::Raw);
    }
}

/// Whether no process that has been stopped holds the connection's locks.
pub fn is_within_reach(c: &Conn) -> bool {
    c.lock_both_within(SLICE_NS).is_some()
}

/// Both locks of a connection, for who has a moment: another process may be at work below them, or have been stopped there.
pub fn lock_both(c: &Conn) -> Option<Both<'_>> {
    let hasty = &c.local().hasty;
    let b = c.lock_both_within(if hasty.load(Relaxed) { SLICE_NS } else { SHORT_NS });
    if b.is_none() {
        hasty.store(true, Relaxed);
    }
    b
}

/// As [`is_home`]; a connection out of reach is not.
pub fn has_come(c: &Conn) -> bool {
    c.lock_both_within(SLICE_NS).is_some_and(|mut b| is_home(&mut b))
}

/// Asks for a connection that is away, which [`settle`] is going to wait for.
pub fn press(c: &'static Conn) {
    reach(c);
}

/// The same. Whether it is not away.
fn reach(c: &Conn) -> bool {
    let arrived = arrive_within(c, SLICE_NS);
    if c.phase() == Phase::Away {
        call_owner(c);
        return false;
    }
    arrived
}

/// How a wait for what is repeated goes on.
#[derive(Clone, Copy, Default)]
pub struct Progress {
    most: usize,
    /// When so much was there first; 0: nothing was waited for yet.
    since: i64,
}

impl Progress {
    /// Whether anything was waited for.
    pub fn has_begun(&self) -> bool {
        self.since != 0
    }

    /// Whether nothing more has come for long; there is so much.
    pub fn is_stuck(&mut self, there: usize, now: i64) -> bool {
        const STUCK_NS: i64 = 100_000_000;
        if there > self.most || self.since == 0 {
            (self.most, self.since) = (there, now);
        }
        now - self.since > STUCK_NS
    }
}

/// What was in a ring when its connection left it had arrived, as far as the program can know: waits until it is in the
/// kernel's socket, or as much of it as surely has room there.
pub fn await_rest(c: &Conn, until: i64) {
    let mut progress = Progress::default();
    loop {
        let awaited = awaited(&c.lock_rx());
        let Some(there) = awaited else { return };
        let now = now_ns();
        if now >= until || progress.is_stuck(there, now) {
            return c.local().hasty.store(true, Relaxed);
        }
        pause(100_000);
    }
}

/// Whether all that was in a ring when its connection left it is in the kernel's socket.
pub fn has_rest(b: &Both) -> bool {
    let fd = b.rx.conn().local().fd.load(Relaxed);
    b.rx.path() != RxPath::Replay || sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|n| n as usize >= b.rx.missing())
}

/// How much of it is there, if some more is sure to come, whoever reads, or the end of the stream.
pub fn awaited<G>(rx: &Rx<'_, G>) -> Option<usize> {
    let fd = rx.conn().local().fd.load(Relaxed);
    if rx.path() != RxPath::Replay {
        return None;
    }
    let there = sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) as usize;
    (there < rx.missing_shown().min(ROOM) && sys::poll_now(fd, libc::POLLRDHUP) == 0).then_some(there)
}

/// Gives `SO_RCVLOWAT` to the kernel, by which it polls, as soon as everything is there that was in a ring: who waits for the
/// first of that must be woken by less.
fn give_lowat(c: &Conn) {
    if c.rcvlowat.load(Relaxed) <= 1 {
        return;
    }
    let Some(b) = lock_both(c) else { return };
    if c.phase() == Phase::Away && has_all(&b) {
        options::give_lowat(c, c.local().fd.load(Relaxed));
    }
}

/// Whether what was in the ring is repeated, and all of that is there.
fn has_all(b: &Both) -> bool {
    b.rx.path() == RxPath::Replay && has_rest(b)
}

/// Whether the kernel polls for the connection's owner, too, who has given it back to the kernel's sets.
pub fn is_polled_by_kernel(b: &Both) -> bool {
    !b.rx.conn().local().managed.load(SeqCst) && has_all(b)
}

/// Before its owner, which has the locks, gives it back to the kernel's sets: whether it may. Who waits for more than one byte
/// is to be woken by so many, and who waits for what the program has shut, by that; but the kernel can know of either only when
/// all is there that was in the ring. What edge-triggered items have been told of is no edge if it is there before they are.
pub fn may_be_polled(b: &mut Both) -> bool {
    let c = b.rx.conn();
    let waits_for_more = c.rcvlowat.load(Relaxed) > 1;
    if waits_for_more && has_all(b) {
        options::give_lowat(c, c.local().fd.load(Relaxed));
    }
    awaited(&b.rx).is_none() || !waits_for_more && !waits_for_rest(b)
}

/// Whether what is still to be repeated must be there first. (Not for `SO_RCVLOWAT`: who waits for that is to be woken, too, by
/// what has no room.)
pub fn waits_for_rest(b: &mut Both) -> bool {
    awaited(&b.rx).is_some() && (b.rx.conn().has_ended(END_RDSHUT | END_WRSHUT) || epoll::is_told_of_all(b))
}

/// Has the kernel shut what the program has shut, or what has failed: how it failed was told, and the kernel may not know that it
/// has. This also wakes threads that wait there. Whether there was anything. Under both locks.
pub fn shut_kernels(conn: &Conn) -> bool {
    let (rd, wr) = (conn.has_ended(END_RDSHUT | END_FAILED), conn.has_ended(END_WRSHUT | END_FAILED));
    // An fd of the connection, which cannot be closed while the caller holds the locks.
    let fd = conn.local().fd.load(Relaxed);
    // To be told again what it knows would be an edge.
    let how = match (rd && sys::poll_now(fd, libc::POLLRDHUP) == 0, wr && !sys::is_tcp_ended(fd)) {
        (true, true) => libc::SHUT_RDWR,
        (true, false) => libc::SHUT_RD,
        (false, true) => libc::SHUT_WR,
        _ => return rd || wr,
    };
    // SAFETY: no memory is passed.
    let _ = unsafe { sys!(libc::SYS_shutdown, fd, how) };
    true
}

/// Of a connection that has ended the kernel has to know how: its owner tells it.
fn await_end(c: &'static Conn, until: i64) {
    while c.has_ended(END_EOF) && c.phase() == Phase::Away && !liveness::is_dead(c.owner_pid) && now_ns() < until {
        let epoch = c.epoch.load(SeqCst);
        call_owner(c);
        if c.phase() == Phase::Away {
            let _ = futex_wait(&c.epoch, epoch, SLICE_NS / 5);
        }
        if now_ns() >= until {
            c.local().hasty.store(true, Relaxed);
        }
    }
}

/// Brings a connection that is away home, so that the kernel's calls do with it what the program means.
/// False: not in time. (Then the kernel may say that it is ready before it is, but never the other way about. Who may wait
/// calls again, which takes a moment each time.)
pub fn settle(c: &'static Conn) -> bool {
    if reach(c) {
        return true;
    }
    let l = c.local();
    let until = now_ns() + if l.hasty.load(Relaxed) { SLICE_NS } else { SHORT_NS };
    await_end(c, until);
    loop {
        if matches!(look(c), Look::Back | Look::Home) {
            await_rest(c, until);
            give_lowat(c);
            return true;
        }
        if now_ns() >= until {
            l.hasty.store(true, Relaxed);
            return false;
        }
    }
}

/// The time at which a call gives up waiting for a return, which may wait for what the program means until its `deadline`; 0:
/// for ever.
pub fn until(c: &Conn, may_wait: bool, deadline: i64) -> i64 {
    let patience = if c.local().hasty.load(Relaxed) { SLICE_NS } else { SHORT_NS };
    match (may_wait, deadline) {
        (true, 0) => i64::MAX,
        // What had come before the call is there after it, whatever little time it has.
        (true, t) => t.max(now_ns() + patience),
        _ => now_ns() + patience,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena;
    use std::sync::mpsc;
    use std::time::Duration;

    /// Who is at work below the locks is waited for; one that has been stopped there only once.
    #[test]
    fn locks_that_another_has_for_a_moment_are_waited_for() {
        let c = arena::alloc().unwrap();
        let (tell, told) = mpsc::channel();
        let at = core::ptr::from_ref(c) as usize;
        let holds = |ms| {
            let tell = tell.clone();
            std::thread::spawn(move || {
                // SAFETY: records are never unmapped.
                let _b = unsafe { &*(at as *const Conn) }.lock_both();
                tell.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(ms));
            })
        };
        let brief = holds(60);
        told.recv().unwrap();
        assert!(lock_both(c).is_some());
        brief.join().unwrap();
        let stopped = holds(2500);
        told.recv().unwrap();
        let t = now_ns();
        assert!(lock_both(c).is_none());
        let first = now_ns() - t;
        assert!(lock_both(c).is_none());
        assert!(first >= SHORT_NS && now_ns() - t < 2 * SHORT_NS, "{first}");
        stopped.join().unwrap();
        arena::forget(c);
    }
}
