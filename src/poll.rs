//! `poll(2)` and its kin over connections of ours and kernel fds together.

use crate::bell;
use crate::chaos;
use crate::conn::{Conn, Phase, END_EOF};
use crate::copy;
use crate::early;
use crate::epoll;
use crate::io::end_peek;
use crate::layout::BELLS;
use crate::layout::{WANT_RX, WANT_TX};
use crate::link;
use crate::ops::Outcome;
use crate::pins;
use crate::pump;
use crate::remote;
use crate::signals::{self, Since, Sleep};
use crate::spin::spin;
use crate::sync::{now_ns, timespec_of};
use crate::sys::SysResult;
use crate::table::{self, Entry};
use crate::thread::Critical;
use crate::visit;
use core::sync::atomic::{AtomicBool, Ordering::*};
use libc::{c_int, pollfd, sigset_t};

/// A thread that waits in `poll`, as connections know it: one for each bell. Not on the thread's stack, which
/// a handler may jump out of.
pub struct Waiter {
    bell: u32,
    rung: AtomicBool,
}

static WAITERS: [Waiter; BELLS] = {
    let mut all = [const { Waiter { bell: 0, rung: AtomicBool::new(false) } }; BELLS];
    let mut k = 0;
    while k < BELLS {
        all[k].bell = k as u32;
        k += 1;
    }
    all
};

impl Waiter {
    /// Something has changed.
    pub fn ring(&self) {
        if !self.rung.swap(true, SeqCst) {
            bell::ring(self.bell);
        }
    }
}

const IN: i16 = libc::POLLIN | libc::POLLRDNORM;
const OUT: i16 = libc::POLLOUT | libc::POLLWRNORM;

/// Most calls have no more.
const FEW: usize = 3;
/// On the stack up to here; larger arrays are the allocator's.
const SMALL: usize = 64;

fn kernel(fds: &mut [pollfd], timeout_ns: i64, mask: *const sigset_t, how: Option<Sleep>) -> SysResult {
    let ts = timespec_of(timeout_ns);
    let tsp = if timeout_ns < 0 { core::ptr::null() } else { &raw const ts };
    let args = [fds.as_mut_ptr() as usize, fds.len(), tsp as usize, mask as usize, 8, 0];
    let sleeps = how.is_some();
    // SAFETY: `fds` is writable, `ts` outlives the call, `mask` is the program's.
    match unsafe { signals::call(how, libc::SYS_ppoll, args) } {
        // A handler had run before the call came to the kernel, which would have told of what was ready then.
        Err(libc::EINTR) if sleeps && !signals::has_slept() => match kernel(fds, 0, core::ptr::null(), None) {
            Ok(0) => Err(libc::EINTR),
            r => r,
        },
        r => r,
    }
}

/// `ppoll(2)`; `timeout_ns < 0` waits for ever.
///
/// # Safety
/// `fds` must be valid for `n` elements; `mask` null or readable.
pub unsafe fn poll(fds: *mut pollfd, n: usize, timeout_ns: i64, mask: *const sigset_t) -> Outcome {
    if n == 0 || n > 1 << 20 || !copy::is_there(fds, n) {
        return Outcome::Bypass;
    }
    // SAFETY: the caller's promise, or it was just looked for.
    let fds = unsafe { core::slice::from_raw_parts_mut(fds, n) };
    let begun = Since::now();
    let (mut ours, mut spent, mut away) = (false, 0, false);
    for p in fds.iter() {
        if early::used(p.fd) && table::is_tcp(p.fd) {
            continue;
        }
        match table::get(p.fd) {
            Entry::Conn(c) => {
                if c.is_inherited() {
                    let began = now_ns();
                    away |= !visit::settle(c);
                    spent += now_ns() - began;
                }
                if matches!(c.phase(), Phase::Raw | Phase::Managed) {
                    c.evidence.store(true, Relaxed);
                    c.in_sight();
                    ours = true;
                }
            }
            Entry::Set(_) => {
                epoll::polled(p.fd);
                ours |= epoll::is_exposed(p.fd);
            }
            Entry::None => {}
        }
    }
    let since = signals::since(begun, mask);
    let timeout_ns = since.left(timeout_ns, spent);
    if !ours && spent == 0 {
        return Outcome::Bypass;
    }
    if !copy::is_writable(fds.as_mut_ptr(), n) {
        // The kernel waits first.
        return Outcome::Fail(libc::EFAULT);
    }
    if !ours && !away {
        let mut nothing = || ();
        let how = (timeout_ns != 0).then_some(Sleep { since, any: true, if_left: &mut nothing });
        return match kernel(fds, timeout_ns, mask, how) {
            Ok(n) => Outcome::Done(n as isize),
            Err(e) => Outcome::Fail(e),
        };
    }
    let _held = pins::Holding::begin();
    if n <= FEW {
        // SAFETY: the caller's promise.
        unsafe { on_the_stack::<FEW, { FEW + 1 + remote::GUARDED }>(fds, since, timeout_ns, mask) }
    } else if n < SMALL {
        // SAFETY: the caller's promise.
        unsafe { on_the_stack::<SMALL, { SMALL + remote::GUARDED }>(fds, since, timeout_ns, mask) }
    } else {
        // A handler that came in the middle of the allocator could not use it.
        let critical = Critical::new();
        let mut copy = vec![pollfd { fd: -1, events: 0, revents: 0 }; n + 1 + remote::GUARDED];
        let mut conns = vec![None; n];
        drop(critical);
        let o =
            Call { fds, copy: &mut copy, conns: &mut conns, since, upgrades: 0, most: i64::MAX, interrupted: false }
                .run(timeout_ns, mask);
        let _critical = Critical::new();
        drop((copy, conns));
        o
    }
}

/// With room for `N` connections, and `M` fds to ask the kernel about. Not in line: what it clears is for its own case only.
///
/// # Safety
/// `mask` is null or readable.
#[inline(never)]
unsafe fn on_the_stack<const N: usize, const M: usize>(
    fds: &mut [pollfd],
    since: Since,
    timeout_ns: i64,
    mask: *const sigset_t,
) -> Outcome {
    let n = fds.len();
    let mut copy = [pollfd { fd: -1, events: 0, revents: 0 }; M];
    let mut conns = [None; N];
    let copy = &mut copy[..n + 1 + remote::GUARDED];
    Call { fds, copy, conns: &mut conns[..n], since, upgrades: 0, most: i64::MAX, interrupted: false }
        .run(timeout_ns, mask)
}

/// Whether the kernel does not know how ready a connection is: what has ended on rings is so for a forked child, too, that
/// goes on with them.
fn is_told_here(c: &Conn) -> bool {
    c.is_ours() || c.is_managed() && c.is_mapped() && c.has_ended(END_EOF)
}

struct Call<'a> {
    fds: &'a mut [pollfd],
    /// What the kernel is asked, and room for the bell and completion channels.
    copy: &'a mut [pollfd],
    /// The connections of ours, by position.
    conns: &'a mut [Option<&'static Conn>],
    since: Since,
    /// How often those that the kernel is asked about had moved when that was decided, all together.
    upgrades: u32,
    /// How long the thread may sleep before it looks again at what another process has not brought home yet.
    most: i64,
    /// A handler has run, by the mask of a call that looks once, and nothing was ready: no sleep follows that it would end.
    interrupted: bool,
}

/// Whether a connection that the thread holds open is still there, perhaps without the number.
fn lives(fd: c_int, c: &Conn) -> bool {
    table::is(fd, c) || pins::number_of(c).is_some()
}

impl Call<'_> {
    /// Holds the connections open, as far as it is about them alone that the thread sleeps, until the end of the call. False:
    /// one has lost its number.
    fn hold(&self) -> bool {
        let all = self.conns.iter().zip(self.fds.iter()).filter_map(|(c, p)| c.map(|c| (p.fd, c)));
        pins::is_held() || pins::hold_all(all)
    }

    /// Looks up the fds anew. Returns whether any is managed.
    fn look(&mut self) -> bool {
        let live = |c: &Conn| matches!(c.phase(), Phase::Raw | Phase::Managed);
        let stale = |(c, p): (&Option<&'static Conn>, &pollfd)| match c {
            // It goes on as another record.
            Some(c) => !lives(p.fd, c),
            // Its number was something else when the others were held, or it was another process's to serve.
            None => table::conn(p.fd).is_some_and(live),
        };
        if pins::is_held() && self.conns.iter().zip(self.fds.iter()).any(stale) {
            pins::let_go();
        }
        let holds = pins::is_held();
        let mut managed = false;
        self.upgrades = 0;
        self.most = i64::MAX;
        for (i, p) in self.fds.iter_mut().enumerate() {
            p.revents = 0;
            let c = loop {
                match table::conn(p.fd) {
                    _ if holds => break self.conns[i],
                    // It goes on as another record.
                    Some(c) if c.phase() == Phase::Closed && !table::is(p.fd, c) => {}
                    c => break c.filter(|c| live(c)),
                }
            };
            let away = c.is_none() && table::conn(p.fd).is_some_and(|c| c.is_inherited() && !visit::settle(c));
            if away {
                self.most = visit::SLICE_NS;
            }
            // Before its phase: what moves after that is counted later.
            let upgrades = c.map_or(0, |c| c.upgrade_no.load(SeqCst));
            let hidden = c.is_some_and(is_told_here);
            managed |= hidden;
            if hidden && p.events & libc::POLLPRI != 0 && c.is_some_and(|c| !c.reads_ring()) {
                // Urgent data may come by TCP behind what is unread, and wake nobody who sleeps here.
                self.most = visit::SLICE_NS;
            }
            if !hidden {
                self.upgrades = self.upgrades.wrapping_add(upgrades);
            }
            self.conns[i] = c;
            let fd = match c {
                // A negative fd is passed over; our own answer stands instead.
                Some(_) if hidden => -1,
                // What the kernel has of it may be frames.
                None if away => -1,
                Some(c) if holds && !table::is(p.fd, c) => pins::number_of(c).unwrap_or(p.fd),
                _ => p.fd,
            };
            self.copy[i] = pollfd { fd, events: p.events, revents: 0 };
        }
        let last = self.fds.len();
        self.copy[last..].fill(pollfd { fd: -1, events: libc::POLLIN, revents: 0 });
        managed
    }

    fn hidden(&self) -> impl Iterator<Item = (usize, &'static Conn)> + '_ {
        self.conns.iter().enumerate().filter_map(|(i, c)| c.filter(|_| self.copy[i].fd < 0).map(|c| (i, c)))
    }

    /// Asks the managed ones; returns how many have something.
    fn ours(&mut self) -> usize {
        let mut n = 0;
        for i in 0..self.fds.len() {
            let Some(c) = self.conns[i].filter(|_| self.copy[i].fd < 0) else { continue };
            let p = &mut self.fds[i];
            let r = c.readiness(p.events as u16 as u32);
            p.revents = r as i16 & (p.events | libc::POLLERR | libc::POLLHUP);
            n += (p.revents != 0) as usize;
        }
        n
    }

    /// Whether one that is not hidden has become managed, or has got another record.
    fn has_new(&self) -> bool {
        let holds = pins::is_held();
        let same = |p: &pollfd, c: &Conn| (table::is(p.fd, c) || holds && lives(p.fd, c)) && !is_told_here(c);
        let all = self.conns.iter().zip(self.fds.iter()).zip(self.copy.iter());
        all.filter_map(|((c, p), k)| c.filter(|_| k.fd >= 0).map(|c| (p, c))).any(|(p, c)| !same(p, c))
    }

    /// Whether one that is not hidden has begun to move since it was looked at, and has perhaps returned already: then the
    /// kernel may have taken a mark or a frame for the program's bytes. Nobody sends one before it is counted.
    fn has_moved(&self) -> bool {
        let shown = self.conns.iter().zip(self.copy.iter()).filter_map(|(c, k)| c.filter(|_| k.fd >= 0));
        shown.fold(0u32, |n, c| n.wrapping_add(c.upgrade_no.load(SeqCst))) != self.upgrades
    }

    /// What the kernel is asked by who does not sleep.
    fn asked(&mut self) -> &mut [pollfd] {
        &mut self.copy[..self.fds.len()]
    }

    /// Puts fds of the library's own beside the program's: in the places of those that are hidden, as long as there are
    /// any, because the kernel takes no more than the process may have open. Notes where, and returns how many the
    /// kernel is to be asked.
    fn add(&mut self, own: impl Iterator<Item = c_int>, places: &mut [usize]) -> usize {
        let all = self.fds.len();
        let mut at = 0;
        for (place, fd) in places.iter_mut().zip(own) {
            while at < all && self.copy[at].fd >= 0 {
                at += 1;
            }
            self.copy[at] = pollfd { fd, events: libc::POLLIN, revents: 0 };
            *place = at;
            at += 1;
        }
        all.max(at)
    }

    /// Makes epoll sets among the fds show what they have.
    fn settle(&self) {
        self.fds.iter().for_each(|p| epoll::settle_fd(p.fd));
    }

    /// Asks the kernel without waiting.
    fn look_kernel(&mut self) -> SysResult {
        chaos::stumble();
        match kernel(self.asked(), 0, core::ptr::null(), None) {
            // Nothing of the kernel's is ready, and a signal was: that is for a sleep to tell, if none of ours is ready either.
            Err(libc::EINTR) => self.asked().iter_mut().for_each(|k| k.revents = 0),
            r => _ = r?,
        }
        Ok(self.without_idle())
    }

    /// Takes out epoll sets that only their bells have made readable. Returns how many fds are left.
    fn without_idle(&mut self) -> usize {
        let mut n = 0;
        for k in self.asked().iter_mut().filter(|k| k.revents != 0) {
            if k.fd >= 0 && epoll::is_idle(k.fd) {
                k.revents = 0;
            }
            n += (k.revents != 0) as usize;
        }
        n
    }

    /// Copies the kernel's answers; returns how many fds have something.
    fn theirs(&mut self) -> usize {
        let mut n = 0;
        for ((p, k), c) in self.fds.iter_mut().zip(self.copy.iter()).zip(self.conns.iter()) {
            if k.fd >= 0 || p.fd < 0 {
                p.revents = if p.fd < 0 { 0 } else { k.revents };
                n += (p.revents != 0) as usize;
                if p.fd >= 0 && p.events & OUT != 0 && p.revents & OUT == 0 {
                    // Room is news then, also to who waits for edges of it on a ring; see `edges`.
                    c.filter(|c| c.phase() == Phase::Raw).into_iter().for_each(|c| _ = c.fulls.fetch_add(1, SeqCst));
                }
            }
        }
        n
    }

    /// Whether a connection that it holds open is not its number's any more.
    fn is_astray(&self) -> bool {
        pins::is_held() && self.conns.iter().zip(self.fds.iter()).any(|(c, p)| c.is_some_and(|c| !table::is(p.fd, c)))
    }

    fn run(mut self, timeout_ns: i64, mask: *const sigset_t) -> Outcome {
        let deadline = if timeout_ns > 0 { now_ns().saturating_add(timeout_ns) } else { timeout_ns };
        let o = match self.wait(deadline, mask) {
            Outcome::Done(0) if self.interrupted => Outcome::Fail(libc::EINTR),
            o => o,
        };
        if !self.is_astray() {
            return o;
        }
        // The kernel sleeps on what it found when the call began, and when it is woken, looks at what has the numbers by then.
        pins::let_go();
        match (self.wait(0, core::ptr::null()), o) {
            (Outcome::Done(0), Outcome::Done(1..)) => self.wait(deadline, mask),
            (Outcome::Done(0), o) => o,
            (now, _) => now,
        }
    }

    /// `deadline` in ns of `CLOCK_MONOTONIC`; 0: does not wait; less than 0: waits for ever.
    fn wait(&mut self, deadline: i64, mask: *const sigset_t) -> Outcome {
        let left = || if deadline > 0 { (deadline - now_ns()).max(0) } else { deadline };
        let done = |n: usize| Outcome::Done(n as isize);
        // The kernel has ended a sleep: what it has must be looked at here, because a thread may not spin.
        let mut woken = false;
        loop {
            if !self.look() && (deadline == 0 || !self.awaits_ends()) {
                match self.kernel_only(left(), mask) {
                    Ok(Some(n)) => return done(n),
                    Ok(None) => continue,
                    Err(e) => return Outcome::Fail(e),
                }
            }
            remote::progress();
            let have = self.ours() > 0 || deadline == 0;
            if have || woken {
                if deadline == 0 {
                    self.hidden().for_each(|(_, c)| pump::quick(c));
                }
                self.settle();
                if let Err(e) = self.look_kernel() {
                    return Outcome::Fail(e);
                }
                if self.has_moved() {
                    continue;
                }
                let n = self.theirs() + self.ours();
                // What was ready a moment ago may have begun to come home.
                if deadline == 0 || n > 0 {
                    return done(n);
                }
            }
            let (fds, conns) = (&*self.fds, &*self.conns);
            let copy = &mut self.copy[..fds.len()];
            let mut kernel_has = false;
            let hit = spin(
                || {
                    conns
                        .iter()
                        .zip(fds)
                        .any(|(c, p)| c.is_some_and(|c| is_told_here(c) && c.readiness(p.events as u16 as u32) != 0))
                },
                || {
                    kernel_has = kernel(copy, 0, core::ptr::null(), None) != Ok(0);
                    kernel_has || (deadline > 0 && now_ns() >= deadline)
                },
            );
            if hit {
                if self.ours() > 0 || kernel_has || left() == 0 {
                    if let Err(e) = self.look_kernel() {
                        return Outcome::Fail(e);
                    }
                    if self.has_moved() {
                        continue;
                    }
                    let n = self.theirs();
                    let n = n + self.ours();
                    if n > 0 || left() == 0 {
                        return done(n);
                    }
                }
                continue;
            }
            match self.sleep(left(), mask) {
                Ok(true) => woken = true,
                Ok(false) => return done(0),
                Err(e) => return Outcome::Fail(e),
            }
        }
    }

    /// Whether the end is all that is waited for of some connection. One that comes by a ring the kernel does not know of,
    /// and no mark wakes who does not wait for bytes.
    fn awaits_ends(&self) -> bool {
        let alone = |p: &pollfd| p.events & IN == 0 && (p.events & OUT == 0 || p.events & libc::POLLRDHUP != 0);
        self.conns.iter().zip(self.fds.iter()).any(|(c, p)| c.is_some() && alone(p))
    }

    /// How long to sleep of the time that is left.
    fn shortly(&self, timeout_ns: i64) -> i64 {
        if timeout_ns < 0 && self.most < i64::MAX {
            self.most
        } else {
            timeout_ns.min(self.most)
        }
    }

    /// Nothing is managed (yet): the kernel's own call. `None`: look again, something has become managed.
    fn kernel_only(&mut self, timeout_ns: i64, mask: *const sigset_t) -> Result<Option<usize>, i32> {
        if timeout_ns != 0 && !self.hold() {
            return Ok(None);
        }
        let _critical = Critical::new();
        let reading = |c: &Option<&'static Conn>, p: &pollfd| c.filter(|_| p.events & IN != 0);
        for (c, p) in self.conns.iter().zip(self.fds.iter()) {
            if let Some(c) = reading(c, p) {
                c.local().peekers.fetch_add(1, SeqCst);
            }
        }
        self.settle();
        chaos::stumble();
        let (conns, fds, holds) = (&*self.conns, &*self.fds, pins::is_held());
        // By number where none is held: a connection may get another record meanwhile.
        let managed = || {
            fds.iter().zip(conns).any(|(p, c)| match c {
                Some(c) if holds => is_told_here(c) || !lives(p.fd, c),
                _ => table::conn(p.fd).is_some_and(is_told_here),
            })
        };
        let mut end = || conns.iter().zip(fds).filter_map(|(c, p)| reading(c, p)).for_each(end_peek);
        let how = Sleep { since: self.since, any: true, if_left: &mut end };
        let t = self.shortly(timeout_ns);
        let moves = managed();
        let r = if moves { Ok(0) } else { kernel(&mut self.copy[..fds.len()], t, mask, Some(how)) };
        chaos::stumble();
        // One that moved may be home again.
        let again = moves || managed() || self.has_moved();
        end();
        // A handler that has run ends the next sleep as well, if nothing is ready by then.
        if again && matches!(r, Ok(_) | Err(libc::EINTR)) {
            self.interrupted |= r.is_err() && timeout_ns == 0;
            return Ok(None);
        }
        let got = r?;
        if got == 0 && t != timeout_ns {
            return Ok(None);
        }
        if self.without_idle() == 0 && got > 0 && timeout_ns != 0 {
            return Ok(None);
        }
        Ok(Some(self.theirs()))
    }

    /// Sleeps in the kernel. False: the time is over.
    fn sleep(&mut self, timeout_ns: i64, mask: *const sigset_t) -> Result<bool, i32> {
        if !self.hold() {
            return Ok(true);
        }
        let _critical = Critical::new();
        let bell = bell::borrow();
        if let Some(k) = bell {
            let waiter = &WAITERS[k as usize];
            waiter.rung.store(false, SeqCst);
            // Those too that are the kernel's as yet: when they are not any more, the kernel says nothing of them, and
            // the mark may be gone before this thread, woken by it, has looked.
            for c in self.conns.iter().flatten() {
                let l = c.local();
                let _g = l.lock.lock();
                // SAFETY: guarded by `local.lock`.
                unsafe { &mut *l.waiters.get() }.push(waiter);
                c.watcher_added();
            }
        }
        if let Some(k) = bell {
            bell::sleep_begin(k);
        }
        chaos::stumble();
        for (i, c) in self.hidden() {
            let mut bits = WANT_RX;
            if self.fds[i].events & OUT != 0 {
                bits |= WANT_TX;
            }
            c.arm_at(bits, bell.unwrap_or(0), c.local().seats.load(SeqCst));
        }
        let far = bell.is_some() && self.hidden().any(|(_, c)| c.remote().is_some());
        let mut remotes = remote::before_sleep(if far { remote::Place::Poll } else { remote::Place::Elsewhere });
        chaos::stumble();
        let still = self.hidden().all(|(_, c)| is_told_here(c)) && !self.has_new();
        let mut places = [usize::MAX; remote::GUARDED + 1];
        let r = if !still || self.ours() > 0 {
            Ok(1)
        } else {
            // Without a bell of its own (too many threads wait) a thread looks again every millisecond.
            let t = if bell.is_some() {
                self.shortly(timeout_ns)
            } else if timeout_ns < 0 {
                1_000_000
            } else {
                timeout_ns.min(1_000_000)
            };
            let asked = self.add(bell.map(bell::fd).into_iter().chain(remotes.fds().iter().copied()), &mut places);
            let (copy, conns) = (&mut self.copy[..asked], &*self.conns);
            let mut end = || {
                remotes.end();
                wake(bell, conns);
            };
            let how = Sleep { since: self.since, any: true, if_left: &mut end };
            match kernel(copy, t, mask, Some(how)) {
                Ok(0) if t != timeout_ns => Ok(1),
                r => r,
            }
        };
        let channels = &places[bell.is_some() as usize..];
        if channels.iter().any(|at| self.copy.get(*at).is_some_and(|p| p.revents != 0)) {
            remote::hear();
        }
        remotes.end();
        wake(bell, self.conns);
        let room = self.copy.len();
        for at in places.into_iter().take_while(|at| *at < room) {
            self.copy[at] = pollfd { fd: -1, events: 0, revents: 0 };
        }
        if r == Err(libc::EINTR) {
            // As in the kernel, what was ready before the handler ran is told of instead.
            self.hidden().for_each(|(_, c)| pump::quick(c));
        }
        match r {
            Ok(0) => Ok(self.ours() > 0),
            Ok(_) => Ok(true),
            // What has moved meanwhile is looked at where it is now; the next sleep ends at once.
            Err(libc::EINTR) if !self.hidden().all(|(_, c)| is_told_here(c)) || self.has_new() => Ok(true),
            Err(libc::EINTR) if self.ours() > 0 => Ok(true),
            Err(e) => Err(e),
        }
    }
}

/// A thread sleeps no more at `bell`, for any of `conns`.
fn wake(bell: Option<u32>, conns: &[Option<&'static Conn>]) {
    let Some(k) = bell else { return };
    let waiter: *const Waiter = &WAITERS[k as usize];
    for c in conns.iter().flatten() {
        let l = c.local();
        let _g = l.lock.lock();
        // SAFETY: guarded by `local.lock`.
        let waiters = unsafe { &mut *l.waiters.get() };
        let before = waiters.len();
        waiters.retain(|w| !core::ptr::eq(*w, waiter));
        l.watchers_left(before - waiters.len());
    }
    bell::sleep_end(k);
    bell::clear(k);
    link::drain_hints(k);
    bell::free(k);
}

/// For one fd, whatever it is, as internal callers need it: waits until `events` or the deadline.
pub fn wait_one(fd: c_int, events: i16, timeout_ns: i64) -> SysResult {
    kernel(&mut [pollfd { fd, events, revents: 0 }], timeout_ns, core::ptr::null(), None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::tests::{armed, arrive, know};
    use crate::layout::Slot;
    use std::os::fd::AsRawFd;

    /// What it was woken for, or found at first, may not be there any more when it looks again.
    #[test]
    fn who_finds_nothing_left_waits_on() {
        const LIMIT_NS: i64 = 1_000_000;
        const FOR_NS: i64 = 300 * LIMIT_NS;
        let slot: &Slot = Box::leak(Box::default());
        let (conn, ours, mut theirs) = armed(slot);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        arrive(conn, &mut theirs, b"0123456789");
        let over = AtomicBool::new(false);
        let found = std::thread::scope(|s| {
            s.spawn(|| {
                let c = table::conn(fd).unwrap();
                while !over.load(Relaxed) {
                    c.rcvlowat.store(100, Relaxed);
                    c.rcvlowat.store(1, Relaxed);
                }
            });
            let (end, mut each) = (now_ns() + FOR_NS, Vec::new());
            while now_ns() < end {
                let mut p = pollfd { fd, events: libc::POLLIN, revents: 0 };
                let began = now_ns();
                // SAFETY: one element, no mask.
                let r = unsafe { poll(&mut p, 1, LIMIT_NS, core::ptr::null()) };
                each.push((r, now_ns() - began));
            }
            over.store(true, Relaxed);
            each
        });
        table::take(fd);
        conn.set_phase(Phase::Closed);
        let hasty = |(r, ns): &&(Outcome, i64)| *r == Outcome::Done(0) && *ns < LIMIT_NS;
        assert_eq!(found.iter().filter(hasty).count(), 0, "calls that ended before their time, of {}", found.len());
        assert!(found.iter().any(|(r, _)| *r == Outcome::Done(1)), "nothing was ever found");
    }
}
