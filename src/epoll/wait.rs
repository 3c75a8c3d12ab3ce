//! `epoll_wait`: events of rings and of the kernel's fds together.

use super::*;
use crate::signals::{self, Since, Sleep};
use crate::sleepers;
use crate::sync::{coarse_ns, TICK_NS};
use crate::thread::me;
use crate::{chaos, pump};

use super::kernels::number;
use super::sequence::{events_at, is_own_peer, news, order_of, stirs};

pub(super) const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;

/// An item that may be ready: with its connection, which use of the record that is and how often the item was changed,
/// its events, how often those who wait for the connection had changed, and [`Item::place`].
type Candidate = (Key, &'static Conn, (u32, u32), u32, u32, u64);

/// Whether a call that has events of rings asks the kernel for its.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Ask {
    No,
    /// They go before those of rings.
    First,
    /// They go behind those: nothing says that they came before.
    Behind,
}

impl Set {
    pub(super) fn new_round(&self) -> u64 {
        self.rounds.fetch_add(1, Relaxed) + 1
    }

    /// Takes events from the list of items that may be ready, but for those that call `round` has reported, or
    /// the kernel to it.
    fn harvest(&self, evs: *mut epoll_event, max: usize, round: u64) -> usize {
        self.harvest_of(evs, max, round, |_| true)
    }

    /// The same of those connections alone that are `wanted`.
    fn harvest_of(&self, evs: *mut epoll_event, max: usize, round: u64, wanted: impl Fn(&Conn) -> bool) -> usize {
        if self.listed.load(SeqCst) == 0 {
            return 0;
        }
        // (A program's stack may be small.)
        const BATCH: usize = 16;
        let mut out = 0;
        let mut left = usize::MAX;
        let mut in_order = !is_own_peer();
        while left > 0 && out < max {
            let mut batch: [Option<Candidate>; BATCH] = [None; BATCH];
            let mut n = 0;
            {
                let _g = self.lock.lock();
                // SAFETY: guarded by `lock`.
                let inner = unsafe { &mut *self.inner.get() };
                if !core::mem::replace(&mut in_order, true) {
                    Self::put_in_order(inner);
                }
                // Once around: what stays on the list keeps its order.
                left = left.min(inner.ready.len());
                while left > 0 && n < BATCH.min(max - out) {
                    let Some(key) = inner.ready.pop_front() else { break };
                    left -= 1;
                    if let Some(i) = inner.items.get_mut(&key) {
                        i.listed = false;
                        // Another thread's call, which began later, may have overwritten that this one reported it.
                        let told = i.round >= round || i.since >= round;
                        if i.managed && !i.spent && (told || !wanted(i.conn)) {
                            i.listed = true;
                            inner.ready.push_back(key);
                        } else if i.managed && !i.spent {
                            let seats = i.conn.local().seats.load(SeqCst);
                            let place = core::mem::take(&mut i.place);
                            (i.order_seen, i.passed_by) = (order_of(i.conn, 0), 0);
                            batch[n] = Some((key, i.conn, (i.gen, i.changes), i.events, seats, place));
                            n += 1;
                        }
                    }
                }
                self.listed.store(inner.ready.len() as u32, SeqCst);
            }
            if n == 0 {
                break;
            }
            for (key, conn, which, events, seats, place) in batch[..n].iter().flatten().copied() {
                chaos::stumble();
                let mask = (events & !NOT_EVENTS) | ALWAYS;
                let (mut got, mut news) = (0, News::default());
                if conn.peer_closed() && conn.reads_ring() && !conn.fin_seen() {
                    // The kernel has its end before the background thread hears of that.
                    pump::drive(conn);
                }
                if events & ET == 0 {
                    got = conn.readiness(mask);
                }
                if got == 0 {
                    // The next change is to be told; what happened before that request is looked at after it.
                    self.arm(conn, mask, seats);
                    if events & ET != 0 {
                        news = News::of(conn);
                    }
                    got = conn.readiness(mask);
                }
                chaos::stumble();
                // What is level-triggered stays on the list once it is ready; of more behind an edge only the kernel tells.
                let moving = |got| (got & IN == 0 || events & ET != 0) && mask & IN != 0 && !conn.reads_ring();
                let mut moves = moving(got);
                if moves && got & (IN | ALWAYS) == 0 && got != 0 {
                    // It is told of once in this call, and bytes may be there behind what makes it a ring.
                    pump::soon(conn);
                    // Where it is ready no more, somebody is to say when it is.
                    self.arm(conn, mask, seats);
                    news = News::of(conn);
                    got = conn.readiness(mask);
                    moves = moving(got);
                }
                if got == 0 && !moves && events & ET == 0 {
                    continue;
                }
                let _g = self.lock.lock();
                // SAFETY: guarded by `lock`.
                let inner = unsafe { &mut *self.inner.get() };
                let Some(i) = inner.items.get_mut(&key) else { continue };
                // A change lists it again.
                if (i.gen, i.changes) != which || i.spent || !i.managed {
                    continue;
                }
                if moves && !i.moving {
                    i.moving = true;
                    inner.moving.push_back(key);
                    self.moving.store(inner.moving.len() as u32, Relaxed);
                }
                let told = i.told;
                if i.events & ET != 0 && !i.told.tell(news, got, i.events) || got == 0 {
                    continue;
                }
                if copy::write(evs.wrapping_add(out), epoll_event { events: got, u64: i.data }).is_err() {
                    // It is there for the next call.
                    i.told = told;
                    if !core::mem::replace(&mut i.listed, true) {
                        inner.ready.push_back(key);
                        self.listed.store(inner.ready.len() as u32, SeqCst);
                    }
                    me(|t| t.faulted.set(true));
                    continue;
                }
                out += 1;
                i.order = order_of(conn, place);
                // Of several calls the one that began last: this one may have been slow.
                i.round = i.round.max(round);
                if i.events & ONESHOT != 0 {
                    i.spent = true;
                } else if i.events & ET == 0 && !i.listed {
                    // As in the kernel, it stands before what becomes ready later.
                    (i.listed, i.place) = (true, if i.order != 0 { next_order() } else { 0 });
                    inner.ready.push_back(key);
                    self.listed.store(inner.ready.len() as u32, SeqCst);
                }
            }
        }
        let b = self.bell.load(Relaxed);
        if self.listed.load(SeqCst) > 0 && b != 0 && (bell::asleep(b) || self.exposed.load(Relaxed)) {
            bell::ring(b);
        }
        out
    }

    /// Has the peer tell the set of the events in `mask`, which was one of `seats` when it was looked for.
    pub(super) fn arm(&self, conn: &Conn, mask: u32, seats: u32) {
        let bits = || match mask & libc::EPOLLOUT as u32 != 0 && conn.nospace.load(SeqCst) {
            true => WANT_RX | WANT_TX,
            false => WANT_RX,
        };
        let bell = self.bell.load(Relaxed);
        let first = bits();
        conn.arm_at(first, bell, seats);
        // Another thread may have found no room meanwhile, and asked for it: this wish has replaced that one then.
        let now = bits();
        if now != first {
            conn.arm_at(now, bell, seats);
        }
    }

    /// All that is ready now, of rings and of the kernel's fds, neither of which may starve the other.
    fn gather(&self, evs: *mut epoll_event, max: usize, ask: Ask, round: u64, heard: u32) -> usize {
        // SAFETY: never past `max` events, here and below.
        let after = |n: usize| unsafe { evs.add(n) };
        let kernel = |at: usize| self.look_kernel(after(at), max - at).unwrap_or(0);
        let n = if self.kernel_first.swap(false, Relaxed) {
            let n = kernel(0);
            n + self.harvest(after(n), max - n, round)
        } else {
            let n = self.harvest(evs, max, round);
            if n == max {
                self.kernel_first.store(true, Relaxed);
                return n;
            }
            if n > 0 && ask == Ask::No && self.moving.load(Relaxed) == 0 {
                return n;
            }
            if n > 0 {
                return n + self.complete(evs, n, max, ask, round, heard);
            }
            kernel(0)
        };
        if n == 0 || n == max {
            return n;
        }
        let n = n + self.harvest_moving(after(n), max - n, round);
        n + self.late(after(n), max - n, round)
    }

    /// For a call that is about to return `n` events of rings at `evs`: what was ready before it, too. Returns how many
    /// events that makes.
    ///
    /// What came by TCP goes first. Nothing tells which came earlier; but connections that are not on rings are most often
    /// new, and whoever speaks on a new connection and then on an old one is to be heard in that order. What this process has
    /// told itself before it gave the kernel anything since `heard`, which [`news`] was then, goes before that.
    pub(super) fn complete(
        &self,
        evs: *mut epoll_event,
        n: usize,
        max: usize,
        ask: Ask,
        round: u64,
        heard: u32,
    ) -> usize {
        // SAFETY: never past `max` events, here and below.
        let after = |n: usize| unsafe { evs.add(n) };
        let mut by_tcp = if ask == Ask::First { self.look_kernel(after(n), max - n).unwrap_or(0) } else { 0 };
        by_tcp += self.harvest_moving(after(n + by_tcp), max - n - by_tcp, round);
        if n > 0 && by_tcp > 0 {
            // SAFETY: so many were written there, for this call.
            let all = unsafe { events_at(evs, n + by_tcp) };
            let first = self.bring_forward(&mut all[..n], heard);
            all[first..].rotate_left(n - first);
        }
        let n = n + by_tcp;
        let behind = if ask == Ask::Behind { self.look_kernel(after(n), max - n).unwrap_or(0) } else { 0 };
        let n = n + behind;
        by_tcp + behind + self.late(after(n), max - n, round)
    }

    /// What connections have whose bytes still come from the kernel.
    fn harvest_moving(&self, evs: *mut epoll_event, max: usize, round: u64) -> usize {
        if max == 0 || self.moving.load(Relaxed) == 0 {
            return 0;
        }
        self.look_at_moving();
        self.harvest_of(evs, max, round, |c| !c.reads_ring())
    }

    /// For a call that is about to return: rings that were ready before it, but have not come to the list
    /// yet, because the background thread was to be told of them.
    fn late(&self, evs: *mut epoll_event, max: usize, round: u64) -> usize {
        if max == 0 {
            return 0;
        }
        link::drain_hints_of(self.bell.load(Acquire), 0);
        self.harvest(evs, max, round)
    }

    /// Asks the kernel about connections whose bytes still come from there.
    fn look_at_moving(&self) {
        if self.moving.load(Relaxed) == 0 {
            return;
        }
        let mut some: [Option<(Key, &'static Conn)>; 16] = [None; 16];
        {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &mut *self.inner.get() };
            for to in some.iter_mut() {
                let Some(key) = inner.moving.pop_front() else { break };
                if let Some(i) = inner.items.get_mut(&key) {
                    i.moving = false;
                    *to = Some((key, i.conn));
                }
            }
            self.moving.store(inner.moving.len() as u32, Relaxed);
        }
        // Looking puts those back that still move.
        for (key, conn) in some.iter().flatten() {
            pump::soon(conn);
            self.push_ready(key.fd, conn);
        }
    }

    /// Whether all that the kernel says is for the program, and nobody else has anything to say.
    #[inline]
    fn is_the_kernels(&self) -> bool {
        let ours =
            self.managed.load(SeqCst) | self.muted.load(SeqCst) | self.away.load(Relaxed) | self.oneshots.load(Relaxed);
        ours == 0 && !self.belled.load(Relaxed) && !self.nests.load(Relaxed)
    }

    /// Names the set among the places where threads sleep.
    #[inline]
    pub(super) fn place(&self) -> usize {
        self as *const Set as usize
    }

    /// Has the thread `sleep` as if nothing were managed. If that changes meanwhile, the thread counts at the bell.
    #[inline]
    fn unaware(&'static self, since: Since, sleep: impl FnOnce(Sleep) -> SysResult) -> SysResult {
        chaos::stumble();
        let word = sleepers::enter(self.place());
        chaos::stumble();
        let end = || {
            sleepers::leave(word);
            if self.managed.load(SeqCst) > 0 {
                self.leave_late();
            }
        };
        if self.managed.load(SeqCst) > 0 {
            end();
            return Ok(0);
        }
        let mut if_left = || {
            end();
            self.leave_call(0);
        };
        let r = sleep(Sleep { since, any: true, if_left: &mut if_left });
        end();
        r
    }

    /// The thread slept, counted at a bell that it did not know, and sleeps no more. It may have had the bell's edge.
    #[cold]
    fn leave_late(&self) {
        let b = self.bell.load(Acquire);
        bell::count_unaware(b, self.place());
        if bell::asleep(b) {
            bell::ring(b);
        }
    }

    /// Not in line: it has much on its stack, which those who only look should not pay for.
    #[inline(never)]
    pub(super) fn wait(
        &'static self,
        evs: *mut epoll_event,
        max: c_int,
        timeout_ns: i64,
        mask: *const sigset_t,
        since: Since,
    ) -> Result<isize, Errno> {
        let moves = self.moves();
        match self.wait_once(evs, max, timeout_ns, mask, since) {
            Err(libc::EINTR) => self.interrupted(evs, max as usize, moves),
            r => r,
        }
    }

    #[inline]
    fn wait_once(
        &'static self,
        evs: *mut epoll_event,
        max: c_int,
        timeout_ns: i64,
        mask: *const sigset_t,
        since: Since,
    ) -> Result<isize, Errno> {
        let mut limit = timeout_ns;
        if timeout_ns != 0 && self.is_the_kernels() {
            let moves = self.moves();
            let began = if timeout_ns > 0 { coarse_ns() } else { 0 };
            let to = (evs, max as usize);
            let n = self.unaware(since, |how| self.kernel_wait(to, timeout_ns, mask, Some(how)))?;
            // Another thread may have added a one-shot, or a bell, meanwhile.
            let is_plain = self.is_the_kernels();
            let n = if is_plain { n } else { self.admit_late(evs, n) };
            let moved = self.moves.load(SeqCst) != moves;
            if n > 0 && moved {
                return Ok(self.look_again(evs, n, max as usize) as isize);
            }
            if n > 0 || !moved && is_plain {
                return Ok(n as isize);
            }
            if timeout_ns > 0 {
                limit = (began + TICK_NS).saturating_add(timeout_ns).saturating_sub(now_ns()).clamp(0, timeout_ns);
            }
        }
        let first = self.rounds.load(Relaxed);
        let n = self.await_events(evs, max, limit, mask, since)?;
        Ok(self.merge(evs, n as usize, first) as isize)
    }

    fn await_events(
        &'static self,
        evs: *mut epoll_event,
        max: c_int,
        timeout_ns: i64,
        mask: *const sigset_t,
        since: Since,
    ) -> Result<isize, Errno> {
        /// Fds of the kernel's are looked at when rings are busy at least this often, and after [`kernel_has_news`] and
        /// [`kernel_is_stirred`].
        const KERNEL_EVERY_NS: i64 = 3_000;
        let max = max as usize;
        let deadline = if timeout_ns > 0 { now_ns().saturating_add(timeout_ns) } else { timeout_ns };
        let left = || if deadline > 0 { (deadline - now_ns()).max(0) } else { deadline };
        let faulted = || me(|t| t.faulted.replace(false));
        let mut limit = timeout_ns;
        faulted();
        loop {
            // What has not come home is looked for again.
            let most = if self.away.load(Relaxed) == 0 || self.fetch() { i64::MAX } else { crate::visit::SLICE_NS };
            let shortly = |t: i64| if t < 0 && most < i64::MAX { most } else { t.min(most) };
            let moves = self.moves();
            // A connection that went over between the looks at its two possible places was seen in neither.
            let moved = || self.moves.load(SeqCst) != moves;
            if self.managed.load(SeqCst) == 0 {
                let n = match limit {
                    0 => self.ask_kernel(evs, max, 0, mask, None)?,
                    _ => self.unaware(since, |how| self.ask_kernel(evs, max, shortly(limit), mask, Some(how)))?,
                };
                if n > 0 {
                    let n = if moved() { self.look_again(evs, n, max) } else { n };
                    return Ok(n as isize);
                }
                limit = left();
                if limit == 0 && !moved() {
                    return Ok(0);
                }
                continue;
            }
            let b = self.bell.load(Acquire);
            if self.exposed.load(Relaxed) {
                bell::renew(b);
            }
            link::drain_hints(b);
            let now = now_ns();
            let (news, heard) = (news(), self.kernel_news.load(Relaxed));
            let due = now - self.kernel_at.load(Relaxed) > KERNEL_EVERY_NS || news != heard;
            if due {
                self.kernel_at.store(now, Relaxed);
                self.kernel_news.store(news, Relaxed);
            }
            let stirs = stirs();
            let stirred = self.kernel_stirs.load(Relaxed) != stirs;
            if stirred {
                self.kernel_stirs.store(stirs, Relaxed);
            }
            let ask = match due {
                true => Ask::First,
                false if stirred => Ask::Behind,
                false => Ask::No,
            };
            let round = self.new_round();
            let mut n = self.gather(evs, max, ask, round, heard);
            if n > 0 {
                if moved() {
                    n = self.look_again(evs, n, max);
                }
                self.show();
                return Ok(n as isize);
            }
            if faulted() {
                return Err(libc::EFAULT);
            }
            if timeout_ns == 0 {
                self.look_at_kernel();
                link::drain_hints(0);
                self.look_at_moving();
                let n = self.harvest(evs, max, self.new_round());
                if n == 0 && faulted() {
                    return Err(libc::EFAULT);
                }
                if n == 0 && moved() {
                    continue;
                }
                self.show();
                return Ok(n as isize);
            }
            let mut kernel = 0;
            let hit = spin(
                || self.listed.load(SeqCst) > 0 || link::any_hints(b),
                || {
                    kernel = self.look_kernel(evs, max).unwrap_or(0);
                    kernel > 0 || (deadline > 0 && now_ns() >= deadline)
                },
            );
            let mut asleep = Ok(0);
            if !hit {
                bell::sleep_begin(b);
                let place = if self.exposed.load(SeqCst) {
                    remote::Place::Elsewhere
                } else {
                    remote::Place::Set(self as *const Set as usize, self.epfd.load(Relaxed), self.token.load(Relaxed))
                };
                let mut remotes = remote::before_sleep(place);
                if self.exposed.load(SeqCst) {
                    remote::leave_set(self as *const Set as usize);
                }
                link::drain_hints(b);
                chaos::stumble();
                if self.listed.load(SeqCst) == 0 {
                    let mut end = || {
                        remotes.end();
                        bell::sleep_end(b);
                        self.leave_call(0);
                    };
                    let how = Sleep { since, any: true, if_left: &mut end };
                    asleep = self.ask_kernel(evs, max, shortly(left()), mask, Some(how));
                }
                bell::sleep_end(b);
            }
            let n = kernel + asleep?;
            link::drain_hints(b);
            let round = if n > 0 { round } else { self.new_round() };
            // SAFETY: `n <= max` events are used.
            let (evs_of_rings, left_of_max) = (unsafe { evs.add(n) }, max - n);
            let of_rings = self.harvest(evs_of_rings, left_of_max, round);
            let over = left() == 0;
            let mut n = n + of_rings;
            if n > 0 || over {
                // Also what else became ready while we span.
                let ask = if hit && kernel == 0 { Ask::First } else { Ask::No };
                n += self.complete(evs_of_rings, of_rings, left_of_max, ask, round, news);
            }
            if n > 0 {
                if moved() {
                    n = self.look_again(evs, n, max);
                }
                self.show();
                return Ok(n as isize);
            }
            if faulted() {
                return Err(libc::EFAULT);
            }
            if over && !moved() {
                return Ok(0);
            }
            // If the set becomes the kernel's now, that waits for the rest only.
            limit = left();
        }
    }

    /// Changes with each connection that becomes managed, or ceases to be. Waits for one that is just going over: it may be in
    /// neither place.
    #[inline]
    pub(super) fn moves(&self) -> u32 {
        loop {
            let moves = self.moves.load(SeqCst);
            // (A handler may have interrupted who does that.)
            if moves.is_multiple_of(2) || self.lock.held_by_me() {
                return moves;
            }
            drop(self.lock.lock());
        }
    }

    /// For a call that is about to return the `n` events at `evs`, and during which connections went over: they may have been looked
    /// for in vain at both of their places. Returns how many events there are then.
    #[cold]
    fn look_again(&self, evs: *mut epoll_event, mut n: usize, max: usize) -> usize {
        const MOST: usize = 16;
        // SAFETY: never past `max` events, here and below.
        let after = |n: usize| unsafe { evs.add(n) };
        for _ in 0..MOST {
            if n == max {
                break;
            }
            let moves = self.moves();
            self.look_at_kernel();
            let mut full = false;
            for by_tcp in [true, false] {
                let room = max - n;
                let more = match by_tcp {
                    true => self.look_kernel(after(n), room).unwrap_or(0),
                    false => self.harvest(after(n), room, self.new_round()),
                };
                // (Of what was told of before.)
                full |= more == room;
                n = self.unite(evs, n, n + more);
            }
            if !full && self.moves.load(SeqCst) == moves {
                break;
            }
        }
        n
    }

    /// For a caller that will not wait: what the background thread would find out in a moment.
    pub(super) fn look_at_kernel(&self) {
        let mut some: [Option<&'static Conn>; 16] = [None; 16];
        {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let items = unsafe { &(*self.inner.get()).items };
            for (to, i) in some.iter_mut().zip(items.values().filter(|i| i.managed)) {
                *to = Some(i.conn);
            }
        }
        for c in some.iter().flatten() {
            pump::soon(c);
        }
    }
}

/// As [`wait`], for who will not sleep and has a set that is only the kernel's, or none: in line, because each return from
/// a function behind a system call costs as much as a wrong guess of the processor's. `None`: look again.
///
/// # Safety
/// As for [`wait`].
#[inline(always)]
pub unsafe fn look(epfd: c_int, evs: *mut epoll_event, max: c_int, mask: *const sigset_t) -> Option<Outcome> {
    let Entry::Set(s) = table::get(epfd) else {
        // A connection that comes to it meanwhile has nothing to say yet.
        return table::is_foreign(epfd).then_some(Outcome::Bypass);
    };
    s.note_awaited();
    if s.is_inherited() || !s.is_the_kernels() || max <= 0 || evs.is_null() || !crate::process::is_active() {
        return None;
    }
    let moves = s.moves();
    let masklen = if mask.is_null() { 0usize } else { 8 };
    // SAFETY: the program's array; `mask` by the caller's promise.
    let n = match unsafe { sys!(number(mask), epfd, evs, max, 0, mask, masklen) } {
        Ok(n) if s.is_the_kernels() => n,
        Ok(n) => s.admit_late(evs, n),
        Err(e) => return Some(Outcome::Fail(e)),
    };
    let n = match s.moves.load(SeqCst) == moves {
        true => n as usize,
        false if n == 0 => return None,
        false => s.look_again(evs, n as usize, max as usize),
    };
    Some(Outcome::Done(n as isize))
}

/// `epoll_wait(2)` and its kin; `timeout_ns < 0` waits for ever.
///
/// # Safety
/// `evs` must have room for `max` events; `mask` is null or readable.
#[inline(never)]
pub unsafe fn wait(epfd: c_int, evs: *mut epoll_event, max: c_int, timeout_ns: i64, mask: *const sigset_t) -> Outcome {
    if max <= 0 || evs.is_null() || !crate::process::is_active() {
        return Outcome::Bypass;
    }
    let begun = Since::now();
    let mut spent = 0;
    let s = match table::get(epfd) {
        Entry::Set(s) if !s.is_inherited() => s,
        Entry::Set(s) => {
            let began = now_ns();
            s.adopt();
            spent = now_ns() - began;
            s
        }
        _ => {
            // A connection may be added while we sleep, so we must not sleep where we cannot filter. The
            // first call tells whether it is an epoll set at all.
            // SAFETY: the program's array.
            match unsafe { sys!(number(mask), epfd, evs, max, 0, mask, if mask.is_null() { 0usize } else { 8 }) } {
                Ok(0) if timeout_ns != 0 => {}
                Ok(n) => return Outcome::Done(n as isize),
                Err(_) => return Outcome::Bypass,
            }
            match make_set(epfd) {
                Some(s) => s,
                None => return Outcome::Bypass,
            }
        }
    };
    s.note_awaited();
    let since = signals::since(begun, mask);
    let result = s.within(epfd, || s.wait(evs, max, since.left(timeout_ns, spent), mask, since));
    match result {
        Some(Ok(n)) => Outcome::Done(n),
        Some(Err(e)) => Outcome::Fail(e),
        // SAFETY: as for this one.
        None => unsafe { wait(epfd, evs, max, timeout_ns, mask) },
    }
}
