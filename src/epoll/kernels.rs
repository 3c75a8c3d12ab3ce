//! The kernel's part of a wait: its call, and what of its events is for the program.

use super::listing::any_listed;
use super::*;
use crate::chaos;
use crate::signals::{self, Sleep};

/// The system call that waits in milliseconds: without a mask to look at it takes a tenth less time.
#[inline]
pub(super) fn number(mask: *const sigset_t) -> libc::c_long {
    match mask.is_null() {
        #[cfg(target_arch = "x86_64")]
        true => libc::SYS_epoll_wait,
        _ => libc::SYS_epoll_pwait,
    }
}

impl Set {
    #[inline]
    pub(super) fn kernel_wait(
        &self,
        to: (*mut epoll_event, usize),
        timeout_ns: i64,
        mask: *const sigset_t,
        how: Option<Sleep>,
    ) -> SysResult {
        let sleeps = how.is_some();
        match self.call_kernel(to, timeout_ns, mask, how) {
            Err(libc::EINTR) if sleeps && !signals::has_slept() => self.look_instead(to),
            r => r,
        }
    }

    /// A handler had run before the call came to the kernel, which would have told of what was ready then.
    #[cold]
    fn look_instead(&self, to: (*mut epoll_event, usize)) -> SysResult {
        match self.call_kernel(to, 0, core::ptr::null(), None) {
            Ok(0) => Err(libc::EINTR),
            r => r,
        }
    }

    #[inline]
    pub(super) fn call_kernel(
        &self,
        to: (*mut epoll_event, usize),
        timeout_ns: i64,
        mask: *const sigset_t,
        mut how: Option<Sleep>,
    ) -> SysResult {
        let (epfd, evs, max) = (self.epfd.load(Relaxed) as usize, to.0 as usize, to.1);
        let masklen = if mask.is_null() { 0usize } else { 8 };
        if timeout_ns <= 0 || timeout_ns % 1_000_000 == 0 {
            let ms = if timeout_ns < 0 { -1 } else { (timeout_ns / 1_000_000).min(i32::MAX.into()) as c_int };
            let args = [epfd, evs, max, ms as usize, mask as usize, masklen];
            // SAFETY: `evs` has room for `max` events.
            return unsafe { signals::call(how.as_mut().map(Sleep::again), number(mask), args) };
        }
        let ts = timespec_of(timeout_ns);
        let args = [epfd, evs, max, &raw const ts as usize, mask as usize, masklen];
        // SAFETY: `evs` has room for `max` events, `ts` is readable. 441 is epoll_pwait2.
        match unsafe { signals::call(how.as_mut().map(Sleep::again), 441, args) } {
            Err(libc::ENOSYS) => {
                let ms = (timeout_ns / 1_000_000 + 1).min(i32::MAX.into()) as c_int;
                let args = [epfd, evs, max, ms as usize, mask as usize, masklen];
                // SAFETY: as above.
                unsafe { signals::call(how.as_mut().map(Sleep::again), libc::SYS_epoll_pwait, args) }
            }
            r => r,
        }
    }

    /// The kernel's part of `wait`. Where it is empty because only bells rang, `Ok(0)` too.
    pub(super) fn ask_kernel(
        &self,
        evs: *mut epoll_event,
        max: usize,
        timeout_ns: i64,
        mask: *const sigset_t,
        how: Option<Sleep>,
    ) -> SysResult {
        if max == 0 {
            return Ok(0);
        }
        let nests = self.nests.load(Relaxed);
        let moves = if nests { moves_of_all() } else { 0 };
        if nests {
            settle_all();
        }
        let sleeps = how.is_some();
        chaos::stumble();
        let n = self.kernel_wait((evs, max), timeout_ns, mask, how)?;
        let mut left = self.admit(evs, n, sleeps);
        if nests && left < max && moves_of_all() != moves {
            settle_all();
            // SAFETY: `left < max`.
            let after = unsafe { evs.add(left) };
            let more = self.call_kernel((after, max - left), 0, core::ptr::null(), None).unwrap_or(0);
            left = self.unite(evs, left, left + self.admit(after, more, sleeps));
        }
        if n == max && left < n {
            // What was none of the program's had a place that another event may be waiting for.
            // SAFETY: `left < max`.
            let after = unsafe { evs.add(left) };
            let more = self.call_kernel((after, max - left), 0, core::ptr::null(), None).unwrap_or(0);
            left = self.unite(evs, left, left + self.admit(after, more, sleeps));
        }
        if left > 0 {
            // What is level-triggered it would tell again.
            self.kernel_at.store(0, Relaxed);
        }
        Ok(left)
    }

    /// What of the kernel's `n` events at `evs` is for the program.
    fn admit(&self, evs: *mut epoll_event, mut n: usize, sleeps: bool) -> usize {
        chaos::stumble();
        if n > 0 && self.nests.load(Relaxed) {
            n = self.without_idle(evs, n);
        }
        let kept = self.without_token(evs, n);
        if kept < n {
            // The bell's event, or a completion channel's.
            remote::hear_in(self as *const Set as usize);
        }
        if kept < n && self.exposed.load(Relaxed) {
            bell::clear(self.bell.load(Relaxed));
        } else if kept < n && !sleeps {
            self.pass_on();
        }
        self.without_told(evs, kept)
    }

    /// Who only looks has taken the bell's edge, and may leave without what it rang for: so those who sleep hear of that in
    /// another way. (Who slept looks for it.) Peers, which ring once for a sleep, are to ring for what comes after this.
    #[cold]
    fn pass_on(&self) {
        let b = self.bell.load(Acquire);
        if bell::asleep(b) {
            bell::renew(b);
            crate::sync::full_fence();
        }
        link::drain_hints(b);
        if self.listed.load(SeqCst) > 0 {
            self.wake();
        }
    }

    /// The same without waiting.
    pub(super) fn look_kernel(&self, evs: *mut epoll_event, max: usize) -> SysResult {
        self.ask_kernel(evs, max, 0, core::ptr::null(), None)
    }

    /// What is the program's of `n` events, in a set that was only the kernel's when they were asked for.
    #[cold]
    pub(super) fn admit_late(&self, evs: *mut epoll_event, n: usize) -> usize {
        let kept = self.without_token(evs, n);
        if kept < n {
            // The bell is an edge, and meant for those who sleep.
            bell::ring(self.bell.load(Acquire));
        }
        self.without_told(evs, kept)
    }

    /// Removes the bell's own events.
    fn without_token(&self, evs: *mut epoll_event, n: usize) -> usize {
        let token = self.token.load(Relaxed);
        let mut out = 0;
        for i in 0..n {
            // SAFETY: the kernel wrote `n` events at `evs`.
            unsafe {
                let e = evs.add(i).read_unaligned();
                if e.u64 != token {
                    evs.add(out).write_unaligned(e);
                    out += 1;
                }
            }
        }
        out
    }

    /// What the kernel says of a one-shot that has fired, or of an edge that was told of, is not for the program.
    /// Returns how many events are left.
    fn without_told(&self, evs: *mut epoll_event, n: usize) -> usize {
        let single = !self.forked.load(Relaxed);
        if self.oneshots.load(Relaxed) == 0 && self.muted.load(SeqCst) == 0 && single {
            return n;
        }
        let mut out = 0;
        for at in 0..n {
            // SAFETY: the kernel wrote `n` events at `evs`.
            let e = unsafe { evs.add(at).read_unaligned() };
            if self.is_told(e) {
                continue;
            }
            // SAFETY: as above, and `out <= at`.
            unsafe { evs.add(out).write_unaligned(e) };
            out += 1;
        }
        out
    }

    /// Whether an event of the kernel's is none; notes what it means for its item.
    pub(super) fn is_told(&self, e: epoll_event) -> bool {
        let (key, was) = {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &mut *self.inner.get() };
            let Some(key) = inner.only(e.u64) else {
                // It may be any of them.
                let shots = |i: &Item| i.data == e.u64 && i.events & ONESHOT != 0 && !i.managed && !i.spent;
                let fired = if inner.items.values().any(shots) { self.fired(e.u64) } else { Vec::new() };
                for (key, i) in inner.items.iter_mut().filter(|(_, i)| i.data == e.u64) {
                    self.unmute(i);
                    i.spent |= shots(i) && fired.contains(&if i.aside >= 0 { i.aside } else { key.fd });
                }
                return false;
            };
            match inner.items.get_mut(&key) {
                // It must not fire again if it becomes ours. If it did so meanwhile, the kernel's may be of a time
                // before somebody else was told, and took care of it.
                Some(i) if i.events & ONESHOT != 0 && i.managed && i.rearmed => return true,
                // It was changed since the kernel told of it, to a thread that comes here late. So it is armed, and the program
                // may take no notice of what it does not wait for any more.
                Some(i) if i.events & ONESHOT != 0 && e.events & !(i.events | ALWAYS) != 0 => return false,
                Some(i) if i.events & ONESHOT != 0 => return core::mem::replace(&mut i.spent, true),
                // A forked child that uses the set has put it into the kernel's, too. (An edge may be of the time before.)
                Some(i) if i.managed && i.events & ET == 0 && !i.spent => {
                    if !core::mem::replace(&mut i.listed, true) {
                        inner.ready.push_back(key);
                        self.listed.store(inner.ready.len() as u32, SeqCst);
                    }
                    return true;
                }
                Some(i) if i.muted => (key, Muted::of(i)),
                _ => return false,
            }
        };
        // More of what had come by a ring is no news either.
        let goes_on = was.moved.received > 0 && was.received_now().is_some_and(|n| n < was.moved.received);
        let new = was.is_new(e.events, false);
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &mut *self.inner.get() };
        if let Some(i) = inner.items.get_mut(&key).filter(|_| new || !goes_on) {
            self.unmute(i);
        }
        !new
    }

    /// Whether it is a one-shot of which an event of the kernel's does not say that it was this.
    pub(super) fn may_be_another(&self, inner: &Inner, key: Key) -> bool {
        inner.items.get(&key).is_some_and(|i| i.events & ONESHOT != 0 && !i.spent && inner.only(i.data).is_none())
    }

    /// The numbers in the kernel's set of one-shots with this data that have fired.
    #[cold]
    pub(super) fn fired(&self, data: u64) -> Vec<c_int> {
        let mut all = Vec::new();
        let _ = any_listed(self.epfd.load(Relaxed), |l| {
            if l.data == data && l.has_fired() {
                all.push(l.fd);
            }
            false
        });
        all
    }

    /// In a call during which a connection went back to the kernel's set, both may have reported it; and a forked child that
    /// uses the set may have put one into the kernel's that is ours here.
    pub(super) fn merge(&self, evs: *mut epoll_event, n: usize, first: u64) -> usize {
        let forked = self.forked.load(Relaxed);
        if n < 2 || self.returned.load(SeqCst) < first && !forked {
            return n;
        }
        let mut twins = Twins::of(self);
        unite(evs, 0, n, |data| {
            let may = {
                let _g = self.lock.lock();
                // SAFETY: guarded by `lock`.
                let inner = unsafe { &*self.inner.get() };
                match inner.only(data).and_then(|k| inner.items.get(&k)) {
                    Some(i) => i.since >= first || forked && i.managed,
                    // Another thread, which was told as well, may have taken it out since.
                    None => inner.items.values().all(|i| i.data != data),
                }
            };
            if may {
                twins.most(data)
            } else {
                usize::MAX
            }
        })
    }

    /// Makes one event of those from `from` on and those before them that may be of the same item. Returns how many of the `n`
    /// events are left.
    pub(super) fn unite(&self, evs: *mut epoll_event, from: usize, n: usize) -> usize {
        let mut twins = Twins::of(self);
        unite(evs, from, n, |data| twins.most(data))
    }
}

/// Which items of a set have the same data, by which alone events name them.
struct Twins<'a> {
    set: &'a Set,
    /// Of each data how many items have it, and whether one of them is told of only once. Made when it is asked for.
    all: Option<FxHashMap<u64, (usize, bool)>>,
}

impl Twins<'_> {
    fn of(set: &Set) -> Twins<'_> {
        Twins { set, all: None }
    }

    /// How many events with this data a call may have to tell of: as many as there are items, if one of them is told of only
    /// once. (The others are told of again by the next call, as long as they are ready.)
    #[cold]
    fn most(&mut self, data: u64) -> usize {
        let set = self.set;
        let all = self.all.get_or_insert_with(|| {
            let mut all: FxHashMap<u64, (usize, bool)> = FxHashMap::default();
            let mut add = |data, events: u32| {
                let (n, once) = all.entry(data).or_default();
                *n += 1;
                *once |= events & (ET | ONESHOT) != 0;
            };
            // What the kernel has, and what it has not; where it does not tell, or has too many, what is known of both.
            let listed = any_listed(set.epfd.load(Relaxed), |l| {
                add(l.data, l.events);
                false
            });
            let _g = set.lock.lock();
            // SAFETY: guarded by `lock`.
            let items = unsafe { &(*set.inner.get()).items };
            items.values().filter(|i| i.managed || listed.is_err()).for_each(|i| add(i.data, i.events));
            all
        });
        match all.get(&data) {
            Some((n, true)) => *n,
            _ => 1,
        }
    }
}

/// Makes one event of those from `from` on and one before them with the same data, once there are `most` of that. Returns how
/// many of the `n` events are left.
fn unite(evs: *mut epoll_event, from: usize, n: usize, mut most: impl FnMut(u64) -> usize) -> usize {
    // SAFETY: `n` events were written at `evs`.
    let event = |k: usize| unsafe { evs.add(k).read_unaligned() };
    let mut out = from;
    for at in from..n {
        let e = event(at);
        let mut before = (0..out).filter(|k| event(*k).u64 == e.u64);
        match before.next() {
            Some(k) if before.count() + 1 >= most(e.u64) => {
                let events = event(k).events | e.events;
                // SAFETY: as above.
                unsafe { evs.add(k).write_unaligned(epoll_event { events, u64: e.u64 }) };
            }
            _ => {
                // SAFETY: as above; `out <= at`.
                unsafe { evs.add(out).write_unaligned(e) };
                out += 1;
            }
        }
    }
    out
}
