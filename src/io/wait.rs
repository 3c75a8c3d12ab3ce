//! The sleep of a call that has to wait for the other end of a ring.

use super::*;
use crate::bell;
use crate::sync::{full_fence, WaitV};
use crate::thread::Critical;
use core::cell::Cell;
use core::sync::atomic::AtomicBool;

/// Sleeps until `Some` bytes may be received, or (`None`) something sent. `begun`: some bytes are transferred already, so
/// that every signal ends the call. `lose`: what has come of so many bytes goes with the thread, if it does not come back.
pub(super) fn wait(
    fd: c_int,
    conn: &'static Conn,
    want: Option<u32>,
    how: (bool, usize),
    call: &mut Call,
) -> Result<(), Errno> {
    let then = Cell::new(Since::now());
    let r = sleep(fd, conn, want, how, call, &then);
    call.looks_again(then.get());
    match (r, want) {
        // What had arrived, and is on its way from the ring to TCP, is there for who waits no longer.
        (Err(libc::EAGAIN), Some(n)) => {
            pump::quick(conn);
            await_resume(conn);
            if conn.is_managed() && !conn.takeable(n) {
                r
            } else {
                Ok(())
            }
        }
        _ => r,
    }
}

/// See [`wait`]. `then`: see [`Call::looks_again`].
fn sleep(
    fd: c_int,
    conn: &'static Conn,
    want: Option<u32>,
    (begun, lose): (bool, usize),
    call: &mut Call,
    then: &Cell<Since>,
) -> Result<(), Errno> {
    let (deadline, since) = (call.deadline(), call.since);
    let to_write = want.is_none();
    let (bits, count): (u32, &AtomicU32) =
        if to_write { (FUTEX_TX, &conn.local().fut_tx) } else { (FUTEX_RX, &conn.local().fut_rx) };
    conn.in_sight();
    let first = conn.epoch.load(SeqCst);
    let changed = || conn.epoch.load(SeqCst) != first;
    let there = || want.map_or_else(|| conn.writable(), |n| quickly_readable(conn, n));
    // A handler since the last look that was in vain may have run when there was something: this thread may have had no
    // processor since.
    let ready = || {
        let now = Since::now();
        let r = changed() || there();
        if !r {
            then.set(now);
        }
        r
    };
    if spin(ready, || deadline > 0 && now_ns() >= deadline) {
        return if deadline > 0 && now_ns() >= deadline { Err(libc::EAGAIN) } else { Ok(()) };
    }
    let _critical = Critical::new();
    count.fetch_add(1, SeqCst);
    let r = loop {
        chaos::stumble();
        let epoch = conn.epoch.load(SeqCst);
        if epoch != first {
            break Ok(());
        }
        let is_remote = conn.remote().is_some();
        // News from another host is this process's own to tell.
        let word = if is_remote { None } else { conn.wake_word() }.unwrap_or(&conn.epoch);
        let value = word.load(SeqCst);
        if let Some(own) = conn.own() {
            if to_write {
                let mut tx = conn.lock_tx();
                own.tx_goal.store(tx.ring().goal(), Relaxed);
            }
            own.want.fetch_or(bits, SeqCst);
        }
        full_fence();
        chaos::stumble();
        if to_write {
            conn.flush();
            // It may wait for more than there is room for.
            conn.tell_peer(WANT_RX, FUTEX_RX);
        }
        if !pins::hold(fd, conn) {
            break Ok(());
        }
        let place = if is_remote { remote::Place::Call(conn) } else { remote::Place::Elsewhere };
        let mut asleep = remote::before_sleep(place);
        // On TCP again since the ring was looked at: the kernel's call is to wait, nobody tells us of that socket.
        if !conn.is_managed() || ready() {
            break Ok(());
        }
        if deadline > 0 && now_ns() >= deadline {
            break Err(libc::EAGAIN);
        }
        chaos::stumble();
        let guards = (!asleep.fds().is_empty()).then(|| Guarding::new(&asleep, deadline));
        let mut if_left = || {
            asleep.end();
            woken(conn, bits, count);
            // A handler that jumps out may take its time, in which the kernel's call, already over, would take nothing.
            if signals::any_cancelled() {
                lose_arrived(fd, lose);
            }
        };
        // With a timeout the kernel does not go on after a handler, whatever that asked for.
        let how = Sleep { since, any: deadline > 0 || begun, if_left: &mut if_left };
        let words = [(&raw const *word, value), (&raw const conn.epoch, epoch)];
        let r = match guards {
            // Whoever notifies after this look rings the bell.
            Some(_) if conn.epoch.load(SeqCst) != epoch => Ok(0),
            Some(g) => g.sleep(deadline, how),
            None => futex_sleep(words, conn.is_inherited(), deadline, how),
        };
        if r.is_ok() {
            then.set(Since::at_wake());
        }
        if conn.is_inherited() {
            // The background thread that watched it was another process's, which is dead.
            pump::quick(conn);
        }
        // The kernel's `poll` is ended by handlers that let other calls go on.
        if r == Err(libc::EINTR) && since.is_over(deadline > 0 || begun) {
            break Err(libc::EINTR);
        }
    };
    woken(conn, bits, count);
    r
}

/// A thread sleeps no more.
fn woken(conn: &Conn, bits: u32, count: &AtomicU32) {
    if count.fetch_sub(1, SeqCst) == 1 {
        unask(conn, bits, count);
    }
}

/// The peer need not wake threads of ours any more.
pub(super) fn unask(conn: &Conn, bits: u32, count: &AtomicU32) {
    let Some(own) = conn.own() else { return };
    own.want.fetch_and(!bits, SeqCst);
    // Somebody may have begun to wait since, and asked before that. What the peer has done in between it has told nobody.
    if count.load(SeqCst) > 0 {
        own.want.fetch_or(bits, SeqCst);
        conn.notify();
    }
}

/// The kernel's call would have taken what has come of `most` bytes by the time that the thread left it, and lost it.
fn lose_arrived(fd: c_int, most: usize) {
    let mut room = [0u8; 4096];
    let mut left = most;
    while left > 0 {
        let v = one(room.as_mut_ptr().cast(), left.min(room.len()));
        // SAFETY: `room` is writable; without a message.
        let n = match unsafe { recv(fd, &v, core::ptr::null_mut(), libc::MSG_DONTWAIT) } {
            Outcome::Done(n) => n as usize,
            // SAFETY: as above.
            Outcome::Bypass => unsafe { sys::recv(fd, v[0].iov_base, v[0].iov_len, libc::MSG_DONTWAIT) }.unwrap_or(0),
            Outcome::Fail(_) => 0,
        };
        if n == 0 {
            return;
        }
        left -= n;
    }
}

/// What a thread sleeps on that is the guard of the completion channels: the channels, and a bell.
enum Guarding {
    /// A set of them: without a deadline, because sets count in milliseconds.
    Set {
        set: c_int,
        bell: u32,
    },
    List(List),
}

impl Guarding {
    fn new(asleep: &remote::Asleep, deadline: i64) -> Guarding {
        match asleep.set() {
            Some(set) if deadline == 0 => Guarding::Set { set, bell: asleep.bell() },
            _ => Guarding::List(List::new(asleep)),
        }
    }

    fn sleep(self, deadline: i64, how: Sleep) -> sys::SysResult {
        match self {
            Guarding::Set { set, bell } => sleep_in(set, bell, how),
            Guarding::List(l) => l.sleep(deadline, how),
        }
    }
}

fn sleep_in(set: c_int, bell: u32, how: Sleep) -> sys::SysResult {
    /// Somebody is in the set, or has left it by a handler, and perhaps taken an event along.
    static INSIDE: AtomicBool = AtomicBool::new(false);
    if INSIDE.swap(true, Relaxed) {
        remote::renew_call_set();
    }
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 2];
    let args = [set as usize, events.as_mut_ptr() as usize, events.len(), -1i32 as usize, 0, 8];
    // SAFETY: `events` is writable, and outlives the call.
    let r = unsafe { signals::sleep(libc::SYS_epoll_pwait, args, how) };
    for e in &events[..r.unwrap_or(0).min(2)] {
        match e.u64 {
            remote::BELL => bell::clear(bell),
            _ => remote::hear(),
        }
    }
    INSIDE.store(false, Relaxed);
    r
}

struct List {
    fds: [libc::pollfd; remote::GUARDED + 1],
    n: usize,
    bell: u32,
}

impl List {
    fn new(asleep: &remote::Asleep) -> List {
        let mut g = List {
            fds: [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; remote::GUARDED + 1],
            n: asleep.fds().len() + 1,
            bell: asleep.bell(),
        };
        g.fds[0].fd = bell::fd(g.bell);
        for (to, fd) in g.fds[1..].iter_mut().zip(asleep.fds()) {
            to.fd = *fd;
        }
        g
    }

    fn sleep(mut self, deadline: i64, how: Sleep) -> sys::SysResult {
        let ts = timespec_of(deadline - now_ns());
        let tsp = if deadline > 0 { &raw const ts as usize } else { 0 };
        let args = [self.fds.as_mut_ptr() as usize, self.n, tsp, 0, 8, 0];
        // SAFETY: `fds` is writable, and outlives the call as `ts` does.
        let r = unsafe { signals::sleep(libc::SYS_ppoll, args, how) };
        if self.fds[0].revents != 0 {
            bell::clear(self.bell);
        }
        if self.fds[1..].iter().any(|p| p.revents != 0) {
            remote::hear();
        }
        r
    }
}

/// Sleeps while both words have their values; in `slices` for 20 ms at most.
fn futex_sleep(words: [(*const AtomicU32, u32); 2], slices: bool, deadline: i64, mut how: Sleep) -> sys::SysResult {
    static NO_WAITV: AtomicBool = AtomicBool::new(false);
    if !NO_WAITV.load(Relaxed) {
        let until = if slices { now_ns() + 20_000_000 } else { deadline };
        let until = if slices && deadline > 0 { until.min(deadline) } else { until };
        let ts = timespec_of(until);
        let tsp = if until > 0 { &raw const ts as usize } else { 0 };
        let list = words.map(|(w, v)| WaitV::new(w, v));
        let args = [list.as_ptr() as usize, 2, 0, tsp, libc::CLOCK_MONOTONIC as usize, 0];
        // SAFETY: the words are mapped for as long as the caller holds its connection; `list` and `ts` outlive
        // the call. 449 is futex_waitv.
        match unsafe { signals::sleep(449, args, how.again()) } {
            Err(libc::ENOSYS) => NO_WAITV.store(true, Relaxed),
            r => return r,
        }
    }
    // In slices, because something may happen here that does not change the first word.
    let ns = if deadline > 0 { (deadline - now_ns()).clamp(0, 10_000_000) } else { 10_000_000 };
    let ts = timespec_of(ns);
    let args = [words[0].0 as usize, libc::FUTEX_WAIT as usize, words[0].1 as usize, &raw const ts as usize, 0, 0];
    // SAFETY: as above.
    unsafe { signals::sleep(libc::SYS_futex, args, how) }
}

/// Whether a receive has to wait for another host, as far as can be told without a lock.
#[inline]
pub(super) fn is_dry(conn: &Conn, want: u32) -> bool {
    conn.remote().is_some() && conn.reads_ring() && conn.end.load(Relaxed) == 0 && !quickly_readable(conn, want)
}

/// Without the lock where the ring tells.
#[inline]
fn quickly_readable(conn: &Conn, want: u32) -> bool {
    if conn.end.load(Relaxed) != 0 {
        return conn.takeable(want);
    }
    match (conn.own(), conn.peer()) {
        // Only where both directions are on the ring, and stay there, do the cursors alone tell.
        (Some(own), Some(peer)) if conn.stats().path_rx.load(Relaxed) == 1 => {
            let there = peer.produced.load(Acquire).wrapping_sub(own.consumed.load(Relaxed));
            there >= u64::from(want)
                || peer.flags.load(Relaxed) & FIN != 0
                || want > 1 && there > 0 && conn.sender_is_stuck()
        }
        _ => conn.takeable(want),
    }
}
