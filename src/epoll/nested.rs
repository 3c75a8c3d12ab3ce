//! Sets whose own fd is polled, by another set or by `poll`: their readiness must show in the kernel.

use super::listing::Listed;
use super::wait::IN;
use super::*;

/// The kernel has sets in sets so deep. What is remembered of closed ones may be in itself.
const DEPTH: u32 = 5;

impl Set {
    /// Makes an exposed set's fd show whether items are ready.
    pub(super) fn show(&self) {
        if self.exposed.load(Relaxed) {
            self.settle();
        }
    }

    /// Looks which of the listed items are ready, takes the others off the list, and lets the bell's
    /// eventfd say whether any is left. Returns that.
    ///
    /// It is not rung for what it says already: to who waits for edges of this set that would be one.
    pub(super) fn settle(&self) -> bool {
        let b = self.bell.load(Acquire);
        if b == 0 {
            return false;
        }
        bell::renew(b);
        link::drain_hints_of(b, 0);
        let any = self.sift();
        if !any {
            bell::clear(b);
            bell::renew(b);
            // What was rung for until then.
            link::drain_hints_of(b, 0);
        }
        if self.listed.load(SeqCst) > 0 && sys::poll_now(bell::fd(b), libc::POLLIN) == 0 {
            bell::ring(b);
        }
        any
    }

    /// Leaves those on the list that are ready, or by edges have news. Returns whether there are any.
    fn sift(&self) -> bool {
        let listed: Vec<(c_int, &'static Conn, u32, Told, u32)> = {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &mut *self.inner.get() };
            let keys: Vec<Key> = inner.ready.drain(..).collect();
            self.listed.store(0, SeqCst);
            keys.into_iter()
                .filter_map(|key| {
                    let i = inner.items.get_mut(&key)?;
                    i.listed = false;
                    let seats = i.conn.local().seats.load(SeqCst);
                    (i.managed && !i.spent).then_some((key.fd, i.conn, i.events, i.told, seats))
                })
                .collect()
        };
        let mut any = false;
        for (fd, conn, events, told, seats) in listed {
            let mask = (events & !NOT_EVENTS) | ALWAYS;
            let look = || {
                // Also of what is ready: more is an edge.
                self.arm(conn, mask, seats);
                (if events & ET != 0 { News::of(conn) } else { News::default() }, conn.readiness(mask))
            };
            let (mut news, mut got) = look();
            if got & IN == 0 && mask & IN != 0 && !conn.reads_ring() {
                // Bytes may be there behind what makes it a ring.
                crate::pump::soon(conn);
                (news, got) = look();
            }
            if got == 0 || events & ET != 0 && !told.has_news(news, got, events) {
                continue;
            }
            self.list(fd, conn, 0);
            any = true;
        }
        any
    }

    /// Whether an exposed set, whose `fd` is readable, has an event. Its bell may have rung for nothing, again and
    /// again, in the middle of an upgrade; so may the bells of sets in it.
    fn has_event(&self, fd: c_int) -> bool {
        let has = self.has_event_within(fd, DEPTH);
        if self.is_to_explain() {
            self.pace(!has && sys::poll_now(fd, libc::POLLIN) != 0);
        }
        has
    }

    fn has_event_within(&self, fd: c_int, depth: u32) -> bool {
        const ROUNDS: usize = 64;
        let mut unexplained = false;
        for _ in 0..ROUNDS {
            if self.nests.load(Relaxed) {
                // What makes it readable may be the bell of a set in it.
                settle_all();
            }
            if self.settle() {
                return true;
            }
            chaos::stumble();
            if sys::poll_now(fd, libc::POLLIN) == 0 {
                return false;
            }
            if sys::poll_now(bell::fd(self.bell.load(Acquire)), libc::POLLIN) != 0 || self.nests_idle(depth) {
                continue;
            }
            // Something of the kernel's own, unless another thread has just cleared the bell that rang.
            if core::mem::replace(&mut unexplained, true) {
                return !self.is_to_explain() || self.kernel_has_event(fd);
            }
        }
        true
    }

    /// Whether the kernel may call the set readable where it has no event for the program.
    fn is_to_explain(&self) -> bool {
        self.forked.load(Relaxed) || self.muted.load(Relaxed) > 0
    }

    /// Whether the set, which the kernel calls readable, is so for the program: not if only the bells of other processes that
    /// use it make it so (each has put its own into it, with the token that all have from the one that made the set), or edges
    /// that were told of before.
    #[cold]
    fn kernel_has_event(&self, fd: c_int) -> bool {
        let token = self.token.load(Relaxed);
        let ready = |item: Listed| {
            let mask = (item.events & !NOT_EVENTS) as libc::c_short;
            // (The kernel adds two events to those of all but a one-shot that has fired.)
            if item.data == token || mask == 0 {
                return false;
            }
            // What has another number here, or none, may well be it.
            let there = item.is_there(fd);
            let Some(number) = (if there { Some(item.fd) } else { self.number_of(item.data) }) else {
                return true;
            };
            let got = sys::poll_now(number, mask);
            got != 0 && !self.is_old(item.data, got as u32)
        };
        any_listed(fd, ready).unwrap_or(true)
    }

    /// A number of the connection that has the one item with that `data`.
    fn number_of(&self, data: u64) -> Option<c_int> {
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &*self.inner.get() };
        let item = inner.only(data).and_then(|key| inner.items.get(&key))?;
        Some(item.conn.local().fd.load(Relaxed)).filter(|fd| *fd >= 0 && table::is(*fd, item.conn))
    }

    /// What makes a set readable that has no event may stay, and whoever waits for the set looks again at once: not too often.
    fn pace(&self, stays: bool) {
        const AT_ONCE: u32 = 8;
        const PAUSE_NS: i64 = 500_000;
        if !stays {
            self.idle_looks.store(0, Relaxed);
        } else if self.idle_looks.fetch_add(1, Relaxed) >= AT_ONCE {
            crate::sync::pause(PAUSE_NS);
        }
    }

    /// Whether the kernel's event is an edge that was told of before its item went back to the kernel's set.
    fn is_old(&self, data: u64, events: u32) -> bool {
        let was = {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &*self.inner.get() };
            match inner.only(data).and_then(|key| inner.items.get(&key)) {
                Some(i) if i.muted => Muted::of(i),
                _ => return false,
            }
        };
        !was.is_new(events, true)
    }

    /// The sets that it has under numbers that still are theirs.
    pub(super) fn sets_in_it(&self) -> Vec<(c_int, &'static Set)> {
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        let all = unsafe { &(*self.inner.get()).nested }.iter();
        all.map(|n| (n.fd, n.set)).filter(|(fd, set)| table::is_set(*fd, set)).collect()
    }

    /// Whether a set in this one is readable, and has no event.
    fn nests_idle(&self, depth: u32) -> bool {
        if depth == 0 || !self.nests.load(Relaxed) {
            return false;
        }
        let mut idle = false;
        for (fd, set) in self.sets_in_it() {
            if set.exposed.load(Relaxed) && sys::poll_now(fd, libc::POLLIN) != 0 {
                idle |= !set.has_event_within(fd, depth - 1);
            }
        }
        idle
    }

    pub(super) fn expose(&self) {
        let new = {
            let _g = self.lock.lock();
            self.unexposed.store(false, Relaxed);
            let b = self.need_bell();
            self.unexposed.store(b.is_none(), Relaxed);
            match b {
                Some(b) if !self.exposed.swap(true, SeqCst) => {
                    // Nobody sleeps in `wait`, but somebody may at the set's fd: peers must ring.
                    bell::sleep_begin(b);
                    let ev = epoll_event { events: libc::EPOLLIN as u32, u64: self.token.load(Relaxed) };
                    let _ = kernel_ctl(self.epfd.load(Relaxed), libc::EPOLL_CTL_MOD, bell::fd(b), &ev);
                    true
                }
                _ => false,
            }
        };
        if new {
            remote::leave_set(self as *const Set as usize);
            EXPOSED.with(|sets| sets.push(self));
            self.settle();
        }
    }
}

/// A set inside another.
pub(super) struct Nested {
    fd: c_int,
    set: &'static Set,
    events: u32,
    data: u64,
}

impl Set {
    /// `epoll_ctl` on another set's fd: the outer one sees it through the kernel, and has to know of it.
    pub(super) fn nest(&'static self, op: c_int, fd: c_int, inner: &'static Set, ev: *mut epoll_event) -> Outcome {
        inner.expose();
        self.nests.store(true, Relaxed);
        let epfd = self.epfd.load(Relaxed);
        let _g = self.lock.lock();
        if let Err(e) = kernel_ctl(epfd, op, fd, ev) {
            return Outcome::Fail(e);
        }
        // SAFETY: guarded by `lock`.
        let nested = unsafe { &mut (*self.inner.get()).nested };
        let c = self.begin_change();
        let nested = nested.change(&c);
        nested.retain(|n| n.fd != fd);
        if op != libc::EPOLL_CTL_DEL {
            // SAFETY: the kernel has just read it.
            let ev = unsafe { ev.read_unaligned() };
            nested.push(Nested { fd, set: inner, events: ev.events, data: ev.u64 });
        }
        Outcome::Done(0)
    }

    /// What the kernel has said of a set in this one is not passed on: to the program, a one-shot has not fired.
    fn arm_again(&self, fd: c_int, data: u64) {
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        let mut all = unsafe { &(*self.inner.get()).nested }.iter();
        if let Some(n) = all.find(|n| (n.fd, n.data) == (fd, data)).filter(|n| n.events & ONESHOT != 0) {
            let ev = epoll_event { events: n.events, u64: n.data };
            let _ = kernel_ctl(self.epfd.load(Relaxed), libc::EPOLL_CTL_MOD, fd, &ev);
        }
    }

    /// Takes out what the kernel says of sets in this one that were woken for nothing.
    pub(super) fn without_idle(&self, evs: *mut epoll_event, n: usize) -> usize {
        settle_all();
        let mut out = 0;
        for at in 0..n {
            // SAFETY: the kernel wrote `n` events at `evs`.
            let e = unsafe { evs.add(at).read_unaligned() };
            let nested = {
                let _g = self.lock.lock();
                // SAFETY: guarded by `lock`.
                let mut all = unsafe { &(*self.inner.get()).nested }.iter().filter(|n| n.data == e.u64);
                let one = all.next().filter(|n| table::is_set(n.fd, n.set));
                one.filter(|n| n.set.exposed.load(Relaxed) && all.next().is_none()).map(|n| (n.fd, n.set))
            };
            if let Some((fd, _)) = nested.filter(|(fd, set)| !set.has_event(*fd)) {
                self.arm_again(fd, e.u64);
                continue;
            }
            // SAFETY: as above; `out <= at`.
            unsafe { evs.add(out).write_unaligned(e) };
            out += 1;
        }
        out
    }
}

/// Whether `fd` is a set whose own fd is polled.
pub fn is_exposed(fd: c_int) -> bool {
    set_of(fd).is_some_and(|s| s.exposed.load(Relaxed))
}

/// Whether `fd` is such a set, and readable without having an event.
pub fn is_idle(fd: c_int) -> bool {
    set_of(fd).is_some_and(|s| s.exposed.load(Relaxed) && !s.has_event(fd))
}

/// The sets that are exposed.
pub(super) struct Exposed {
    pub(super) lock: Lock,
    pub(super) sets: UnsafeCell<Vec<*const Set>>,
}

// SAFETY: `sets` is guarded by `lock`.
unsafe impl Sync for Exposed {}

pub(super) static EXPOSED: Exposed = Exposed { lock: Lock::new(), sets: UnsafeCell::new(Vec::new()) };

impl Exposed {
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Vec<*const Set>) -> R) -> R {
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        f(unsafe { &mut *self.sets.get() })
    }
}

/// Lets every exposed set show what it has.
pub(super) fn settle_all() {
    for s in EXPOSED.with(|sets| sets.clone()) {
        // SAFETY: sets are never freed.
        unsafe { &*s }.settle();
    }
}

/// Changes with each connection that moves in an exposed set: such a set may have shown nothing meanwhile. Waits for one that is
/// just going over.
pub(super) fn moves_of_all() -> u32 {
    // SAFETY: sets are never freed.
    EXPOSED.with(|sets| sets.clone()).iter().fold(0, |n, s| n.wrapping_add(unsafe { &**s }.moves()))
}

/// Lets a set show what it has, if `fd` is an exposed one.
pub fn settle_fd(fd: c_int) {
    if let Some(s) = set_of(fd).filter(|s| s.exposed.load(Relaxed)) {
        s.settle();
    }
}

/// A set's fd is polled: its readiness must show in the kernel.
pub fn polled(epfd: c_int) {
    if let Some(s) = set_of(epfd) {
        s.note_awaited();
        s.expose();
    }
}
