//! Epoll sets that contain connections of ours.
//!
//! As long as none of its connections is managed a set is the kernel's, and
//! only remembered. A managed connection is taken out of the kernel's set; its
//! readiness is computed here, with the kernel's own algorithm: a list of
//! items that may be ready, looked at again when events are harvested,
//! level-triggered ones put back. The set's bell is in the kernel's set, so
//! whoever sleeps in the kernel wakes for either.

use crate::bell;
use crate::conn::{Conn, Phase};
use crate::layout::{WANT_RX, WANT_TX};
use crate::link;
use crate::ops::Outcome;
use crate::spin::Wait;
use crate::sync::{now_ns, timespec_of, Lock};
use crate::sys::{sys, Errno, SysResult};
use crate::table::{self, Entry};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use libc::{c_int, epoll_event, sigset_t};
use std::collections::{HashMap, VecDeque};

const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
const WAKEUP: u32 = libc::EPOLLWAKEUP as u32;
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const NOT_EVENTS: u32 = ET | ONESHOT | EXCLUSIVE | WAKEUP;

mod nested;
pub use nested::{polled, settle_fd};
use nested::{settle_all, EXPOSED};

struct Item {
    conn: &'static Conn,
    gen: u32,
    events: u32,
    data: u64,
    managed: bool,
    listed: bool,
    /// A one-shot that has fired.
    spent: bool,
}

#[derive(Default)]
struct Inner {
    items: HashMap<c_int, Item>,
    ready: VecDeque<c_int>,
}

/// An epoll set. Never freed; recycled when its fd is closed.
pub struct Set {
    epfd: AtomicI32,
    /// How many fd numbers it has.
    fds: AtomicU32,
    /// Its bell, 0: none yet.
    bell: AtomicU32,
    /// What the bell's eventfd is registered with: no program's data is equal to it but by a chance of 2^-64.
    token: AtomicU64,
    managed: AtomicU32,
    /// Items that may be ready.
    listed: AtomicU32,
    /// Somebody polls the set's own fd, so its readiness must show in the kernel: its bell's eventfd is
    /// readable exactly while an item may be ready.
    exposed: AtomicBool,
    /// There are such sets in this one.
    nests: AtomicBool,
    lock: Lock,
    /// Held while the bell is made.
    bell_lock: Lock,
    inner: UnsafeCell<Inner>,
    next_free: AtomicPtr<Set>,
    /// Not 0 once a one-shot item was added.
    oneshots: AtomicU32,
    /// The last harvest filled the program's array: the kernel's fds come first next time.
    kernel_first: AtomicBool,
    /// Threads that sleep here as if nothing were managed.
    unaware: AtomicU32,
    /// When the kernel's fds were looked at last.
    kernel_at: AtomicI64,
}

// SAFETY: `inner` is guarded by `lock`; the rest is atomic.
unsafe impl Sync for Set {}

static FREE_LOCK: Lock = Lock::new();
static FREE: AtomicPtr<Set> = AtomicPtr::new(core::ptr::null_mut());

fn set_of(epfd: c_int) -> Option<&'static Set> {
    match table::get(epfd) {
        Entry::Set(s) => Some(s),
        _ => None,
    }
}

fn make_set(epfd: c_int) -> Option<&'static Set> {
    let _g = FREE_LOCK.lock();
    match table::get(epfd) {
        Entry::None => {}
        Entry::Set(s) => return Some(s),
        // No epoll set at all: the kernel will say so.
        Entry::Conn(_) => return None,
    }
    let free = FREE.load(Relaxed);
    // SAFETY: sets are leaked boxes.
    let s: &'static Set = match unsafe { free.as_ref() } {
        Some(s) => {
            FREE.store(s.next_free.load(Relaxed), Relaxed);
            s
        }
        None => Box::leak(Box::new(Set {
            epfd: AtomicI32::new(-1),
            fds: AtomicU32::new(1),
            bell: AtomicU32::new(0),
            token: AtomicU64::new(0),
            managed: AtomicU32::new(0),
            listed: AtomicU32::new(0),
            exposed: AtomicBool::new(false),
            nests: AtomicBool::new(false),
            lock: Lock::new(),
            bell_lock: Lock::new(),
            inner: UnsafeCell::new(Inner::default()),
            next_free: AtomicPtr::new(core::ptr::null_mut()),
            oneshots: AtomicU32::new(0),
            kernel_first: AtomicBool::new(false),
            unaware: AtomicU32::new(0),
            kernel_at: AtomicI64::new(0),
        })),
    };
    let mut token = [0u8; 8];
    crate::process::random(&mut token);
    s.token.store(u64::from_ne_bytes(token), Relaxed);
    s.epfd.store(epfd, Relaxed);
    s.fds.store(1, Relaxed);
    table::put_set(epfd, s).then_some(s)
}

fn kernel_ctl(epfd: c_int, op: c_int, fd: c_int, ev: *const epoll_event) -> SysResult {
    // SAFETY: the kernel checks the address of `ev`.
    unsafe { sys!(libc::SYS_epoll_ctl, epfd, op, fd, ev) }
}

/// `epfd` is a new epoll set.
pub fn created(epfd: c_int) {
    if crate::process::is_active() && !crate::process::is_guest() {
        make_set(epfd);
    }
}

/// `new` is another number of the set.
pub fn duplicated(s: &'static Set, new: c_int) {
    if table::put_set(new, s) {
        s.fds.fetch_add(1, SeqCst);
    }
}

/// A number of a set is closed.
pub fn number_closed(s: &'static Set, fd: c_int) {
    if s.fds.fetch_sub(1, SeqCst) == 1 {
        return closed(s);
    }
    if s.epfd.load(Relaxed) == fd {
        let other = (0..=table::highest()).find(|n| set_of(*n).is_some_and(|x| core::ptr::eq(x, s)));
        s.epfd.store(other.unwrap_or(-1), Relaxed);
    }
}

fn closed(s: &'static Set) {
    let mut gone = Vec::new();
    {
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &mut *s.inner.get() };
        for (fd, item) in inner.items.drain() {
            gone.push((fd, item.conn));
        }
        inner.ready.clear();
    }
    for (fd, conn) in gone {
        let _g = conn.local().lock.lock();
        // SAFETY: guarded by `local.lock`.
        let items = unsafe { &mut *conn.local().items.get() };
        items.retain(|(set, f)| !(core::ptr::eq(*set, s) && *f == fd));
        conn.local().watchers.fetch_sub(1, SeqCst);
    }
    s.listed.store(0, Relaxed);
    s.managed.store(0, Relaxed);
    let exposed = s.exposed.swap(false, Relaxed);
    s.nests.store(false, Relaxed);
    let b = s.bell.swap(0, Relaxed);
    if b != 0 {
        if exposed {
            EXPOSED.with(|sets| sets.retain(|x| !core::ptr::eq(*x, s)));
            bell::sleep_end(b);
            bell::clear(b);
        }
        bell::free(b);
    }
    let _g = FREE_LOCK.lock();
    s.next_free.store(FREE.load(Relaxed), Relaxed);
    FREE.store((s as *const Set).cast_mut(), Relaxed);
}

/// An fd of the connection is closed: no set has it under that number any more.
pub fn fd_closed(conn: &Conn, fd: c_int) {
    let local = conn.local();
    let _g = local.lock.lock();
    // SAFETY: guarded by `local.lock`.
    let items = unsafe { &mut *local.items.get() };
    items.retain(|(set, f)| {
        if *f != fd {
            return true;
        }
        // SAFETY: sets are never freed.
        let s = unsafe { &**set };
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        if unsafe { &mut *s.inner.get() }.items.remove(&fd).is_some_and(|i| i.managed) {
            s.managed.fetch_sub(1, SeqCst);
        }
        local.watchers.fetch_sub(1, SeqCst);
        false
    });
}

impl Set {
    /// The item `fd` may be ready.
    pub fn push_ready(&self, fd: c_int, conn: &Conn) {
        {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &mut *self.inner.get() };
            match inner.items.get_mut(&fd) {
                Some(i) if i.managed && !i.listed && !i.spent && core::ptr::eq(i.conn, conn) => {
                    i.listed = true;
                    inner.ready.push_back(fd);
                    self.listed.store(inner.ready.len() as u32, SeqCst);
                }
                _ => return,
            }
        }
        self.wake();
    }

    fn wake(&self) {
        let b = self.bell.load(Acquire);
        if b != 0 && (bell::asleep(b) || self.exposed.load(Relaxed)) {
            bell::ring(b);
        }
    }

    /// Makes sure that the set has a bell in the kernel's set.
    fn need_bell(&self) -> Option<u32> {
        let _g = self.bell_lock.lock();
        let b = self.bell.load(Acquire);
        if b != 0 {
            return Some(b);
        }
        let b = bell::alloc()?;
        let ev = epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: self.token.load(Relaxed) };
        if kernel_ctl(self.epfd.load(Relaxed), libc::EPOLL_CTL_ADD, bell::fd(b), &ev).is_err() {
            bell::free(b);
            return None;
        }
        self.bell.store(b, Release);
        Some(b)
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

    /// Takes events from the list of items that may be ready.
    fn harvest(&self, evs: *mut epoll_event, max: usize) -> usize {
        if self.listed.load(SeqCst) == 0 {
            return 0;
        }
        const BATCH: usize = 64;
        let mut out = 0;
        let mut left = self.listed.load(Relaxed) as usize;
        while left > 0 && out < max {
            let mut batch: [(c_int, Option<&'static Conn>, u32, u32); BATCH] = [(-1, None, 0, 0); BATCH];
            let mut n = 0;
            {
                let _g = self.lock.lock();
                // SAFETY: guarded by `lock`.
                let inner = unsafe { &mut *self.inner.get() };
                while n < BATCH.min(max - out).min(left) {
                    let Some(fd) = inner.ready.pop_front() else { break };
                    if let Some(i) = inner.items.get_mut(&fd) {
                        i.listed = false;
                        if i.managed && !i.spent {
                            batch[n] = (fd, Some(i.conn), i.gen, i.events);
                            n += 1;
                        }
                    }
                }
                self.listed.store(inner.ready.len() as u32, SeqCst);
            }
            if n == 0 {
                break;
            }
            left -= n;
            for (fd, conn, gen, events) in batch[..n].iter().filter_map(|(f, c, g, e)| c.map(|c| (*f, c, *g, *e))) {
                let mask = (events & !NOT_EVENTS) | ALWAYS;
                let mut got = conn.readiness(mask);
                if got == 0 || events & ET != 0 {
                    // The next change is to be told; what happened before that request is looked at after it.
                    self.arm(conn, mask);
                    got |= conn.readiness(mask);
                }
                if got == 0 {
                    continue;
                }
                let _g = self.lock.lock();
                // SAFETY: guarded by `lock`.
                let inner = unsafe { &mut *self.inner.get() };
                let Some(i) = inner.items.get_mut(&fd) else { continue };
                if !core::ptr::eq(i.conn, conn) || i.gen != gen || i.spent || !i.managed {
                    continue;
                }
                // SAFETY: `out < max`, and the program's array has room for `max` events.
                unsafe { evs.add(out).write_unaligned(epoll_event { events: got, u64: i.data }) };
                out += 1;
                if i.events & ONESHOT != 0 {
                    i.spent = true;
                } else if i.events & ET == 0 && !i.listed {
                    i.listed = true;
                    inner.ready.push_back(fd);
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

    /// One-shots that the kernel has fired: they must not fire again if they become ours.
    fn note_fired(&self, evs: *const epoll_event, n: usize) {
        if self.oneshots.load(Relaxed) == 0 {
            return;
        }
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        let items = unsafe { &mut (*self.inner.get()).items };
        for i in 0..n {
            // SAFETY: the kernel wrote `n` events at `evs`.
            let data = unsafe { evs.add(i).read_unaligned() }.u64;
            let fits = |i: &Item| i.data == data && i.events & ONESHOT != 0 && !i.managed;
            // Most programs put the fd itself into the low half.
            if let Some(i) = items.get_mut(&(data as u32 as c_int)).filter(|i| fits(i)) {
                i.spent = true;
            } else if let Some(i) = items.values_mut().find(|i| fits(i)) {
                i.spent = true;
            }
        }
    }

    fn arm(&self, conn: &Conn, mask: u32) {
        let mut bits = WANT_RX;
        if mask & libc::EPOLLOUT as u32 != 0 && conn.nospace.load(Relaxed) {
            bits |= WANT_TX;
        }
        conn.arm(bits, conn.bell_for(self.bell.load(Relaxed)));
    }

    fn kernel_wait(&self, evs: *mut epoll_event, max: c_int, timeout_ns: i64, mask: *const sigset_t) -> SysResult {
        let epfd = self.epfd.load(Relaxed);
        let masklen = if mask.is_null() { 0usize } else { 8 };
        if timeout_ns <= 0 || timeout_ns % 1_000_000 == 0 {
            let ms = if timeout_ns < 0 { -1 } else { (timeout_ns / 1_000_000).min(i32::MAX.into()) as c_int };
            // SAFETY: `evs` has room for `max` events.
            return unsafe { sys!(libc::SYS_epoll_pwait, epfd, evs, max, ms, mask, masklen) };
        }
        let ts = timespec_of(timeout_ns);
        // SAFETY: `evs` has room for `max` events, `ts` is readable. 441 is epoll_pwait2.
        match unsafe { sys!(441, epfd, evs, max, &ts, mask, masklen) } {
            Err(libc::ENOSYS) => {
                let ms = (timeout_ns / 1_000_000 + 1).min(i32::MAX.into()) as c_int;
                // SAFETY: as above.
                unsafe { sys!(libc::SYS_epoll_pwait, epfd, evs, max, ms, mask, masklen) }
            }
            r => r,
        }
    }

    /// The kernel's part of `wait`. Where it is empty because only bells rang, `Ok(0)` too.
    fn ask_kernel(&self, evs: *mut epoll_event, max: usize, timeout_ns: i64, mask: *const sigset_t) -> SysResult {
        if max == 0 {
            return Ok(0);
        }
        if self.nests.load(Relaxed) {
            settle_all();
        }
        let n = self.kernel_wait(evs, max as c_int, timeout_ns, mask)?;
        if n > 0 && timeout_ns != 0 && self.nests.load(Relaxed) {
            // A set in this one may have been woken for nothing: what is left after a second look is true.
            settle_all();
            return self.ask_kernel(evs, max, 0, core::ptr::null());
        }
        let kept = self.without_token(evs, n);
        if kept < n && self.exposed.load(Relaxed) {
            bell::clear(self.bell.load(Relaxed));
        }
        self.note_fired(evs, kept);
        Ok(kept)
    }

    /// All that is ready now, of rings and of the kernel's fds, neither of which may starve the other.
    fn gather(&self, evs: *mut epoll_event, max: usize, kernel_due: bool) -> usize {
        // SAFETY: never past `max` events, here and below.
        let after = |n: usize| unsafe { evs.add(n) };
        let kernel = |at: usize| self.ask_kernel(after(at), max - at, 0, core::ptr::null()).unwrap_or(0);
        if self.kernel_first.swap(false, Relaxed) {
            let n = kernel(0);
            return n + self.harvest(after(n), max - n);
        }
        let n = self.harvest(evs, max);
        if n == max {
            self.kernel_first.store(true, Relaxed);
            return n;
        }
        if n == 0 || kernel_due {
            n + kernel(n)
        } else {
            n
        }
    }

    fn wait(&self, evs: *mut epoll_event, max: c_int, timeout_ns: i64, mask: *const sigset_t) -> Result<isize, Errno> {
        /// A kernel's fd is looked at when rings are busy at least this often.
        const KERNEL_EVERY_NS: i64 = 3_000;
        let max = max as usize;
        let deadline = if timeout_ns > 0 { now_ns().saturating_add(timeout_ns) } else { timeout_ns };
        let left = || if deadline > 0 { (deadline - now_ns()).max(0) } else { deadline };
        loop {
            if self.managed.load(SeqCst) == 0 {
                self.unaware.fetch_add(1, SeqCst);
                let n = self.ask_kernel(evs, max, left(), mask);
                let others = self.unaware.fetch_sub(1, SeqCst) > 1;
                if others && self.managed.load(SeqCst) > 0 {
                    // They sleep without being counted at the bell, which wakes one of them at a time.
                    bell::ring(self.bell.load(Acquire));
                }
                let n = n?;
                if n > 0 || left() == 0 {
                    return Ok(n as isize);
                }
                continue;
            }
            let b = self.bell.load(Acquire);
            if self.exposed.load(Relaxed) {
                bell::renew(b);
            }
            link::drain_hints(b);
            let now = now_ns();
            let due = now - self.kernel_at.load(Relaxed) > KERNEL_EVERY_NS;
            if due {
                self.kernel_at.store(now, Relaxed);
            }
            let n = self.gather(evs, max, due);
            if n > 0 {
                self.show();
                return Ok(n as isize);
            }
            if timeout_ns == 0 {
                self.look_at_kernel();
                link::drain_hints(0);
                let n = self.harvest(evs, max);
                self.show();
                return Ok(n as isize);
            }
            let wait = Wait::begin();
            let mut kernel = 0;
            let hit = wait.spin(
                || self.listed.load(SeqCst) > 0 || link::any_hints(b),
                || {
                    kernel = self.ask_kernel(evs, max, 0, core::ptr::null()).unwrap_or(0);
                    kernel > 0 || (deadline > 0 && now_ns() >= deadline)
                },
            );
            let mut asleep = Ok(0);
            if !hit {
                bell::sleep_begin(b);
                link::drain_hints(b);
                if self.listed.load(SeqCst) == 0 {
                    asleep = self.ask_kernel(evs, max, left(), mask);
                }
                bell::sleep_end(b);
            }
            let n = kernel + asleep?;
            link::drain_hints(b);
            // SAFETY: `n <= max` events are used.
            let mut n = n + self.harvest(unsafe { evs.add(n) }, max - n);
            if hit && kernel == 0 && n > 0 {
                // What else became ready while we span.
                // SAFETY: as above.
                n += self.ask_kernel(unsafe { evs.add(n) }, max - n, 0, core::ptr::null()).unwrap_or(0);
            }
            if n > 0 {
                wait.end();
                self.show();
                return Ok(n as isize);
            }
            if left() == 0 {
                return Ok(0);
            }
        }
    }

    /// For a caller that will not wait: what the background thread would find out in a moment.
    fn look_at_kernel(&self) {
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
            crate::pump::quick(c);
        }
    }
}

/// `epoll_ctl(2)`.
///
/// # Safety
/// `ev` must be readable where the operation needs it.
pub unsafe fn ctl(epfd: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> Outcome {
    if let Some(inner) = set_of(fd) {
        // A set inside another: the outer one sees it through the kernel, and has to know of it.
        inner.expose();
        if let Some(outer) = make_set(epfd) {
            outer.nests.store(true, Relaxed);
        }
        return Outcome::Bypass;
    }
    let Some(conn) = table::conn(fd) else { return Outcome::Bypass };
    if conn.phase() == Phase::Managed && conn.is_inherited() {
        crate::process::bring_home(conn);
    }
    if matches!(conn.phase(), Phase::Plain | Phase::Closed) && conn.local_items_empty() {
        return Outcome::Bypass;
    }
    if ev.is_null() && op != libc::EPOLL_CTL_DEL {
        return Outcome::Fail(libc::EFAULT);
    }
    let Some(set) = make_set(epfd) else { return Outcome::Bypass };
    // SAFETY: the caller's promise.
    let want = if op == libc::EPOLL_CTL_DEL { None } else { Some(unsafe { ev.read_unaligned() }) };
    match set.change(op, fd, conn, want) {
        Ok(()) => {
            if op != libc::EPOLL_CTL_DEL {
                conn.evidence.store(true, Relaxed);
            }
            Outcome::Done(0)
        }
        Err(e) => Outcome::Fail(e),
    }
}

impl Set {
    fn change(
        &'static self,
        op: c_int,
        fd: c_int,
        conn: &'static Conn,
        want: Option<epoll_event>,
    ) -> Result<(), Errno> {
        let epfd = self.epfd.load(Relaxed);
        let local = conn.local();
        let lg = local.lock.lock();
        let sg = self.lock.lock();
        // SAFETY: guarded by `local.lock` and `lock`.
        let (mine, inner) = unsafe { (&mut *local.items.get(), &mut *self.inner.get()) };
        let known = inner.items.get(&fd).map(|i| i.managed);
        let managed = local.managed.load(Relaxed);
        let ev = want.unwrap_or(epoll_event { events: 0, u64: 0 });
        if ev.events & ONESHOT != 0 {
            self.oneshots.store(1, Relaxed);
        }
        match op {
            libc::EPOLL_CTL_ADD => {
                if known.is_some() && managed {
                    return Err(libc::EEXIST);
                }
                if managed {
                    const WITH_EXCLUSIVE: u32 =
                        (libc::EPOLLIN | libc::EPOLLOUT) as u32 | ALWAYS | WAKEUP | ET | EXCLUSIVE;
                    if ev.events & EXCLUSIVE != 0 && ev.events & !WITH_EXCLUSIVE != 0 {
                        return Err(libc::EINVAL);
                    }
                    let b = self.need_bell().ok_or(libc::ENOSPC)?;
                    if self.managed.fetch_add(1, SeqCst) == 0 {
                        // Who sleeps in the kernel does not know yet that there is a bell.
                        bell::ring(b);
                    }
                } else {
                    kernel_ctl(epfd, op, fd, &ev)?;
                }
                let item = Item {
                    conn,
                    gen: conn.gen.load(Relaxed),
                    events: ev.events,
                    data: ev.u64,
                    managed,
                    listed: false,
                    spent: false,
                };
                inner.items.insert(fd, item);
                if !mine.iter().any(|(s, f)| core::ptr::eq(*s, self) && *f == fd) {
                    mine.push((self, fd));
                    conn.watcher_added();
                }
            }
            libc::EPOLL_CTL_MOD => match inner.items.get_mut(&fd) {
                Some(i) => {
                    if i.managed {
                        if ev.events & EXCLUSIVE != 0 || i.events & EXCLUSIVE != 0 {
                            return Err(libc::EINVAL);
                        }
                    } else {
                        kernel_ctl(epfd, op, fd, &ev)?;
                    }
                    i.events = ev.events;
                    i.data = ev.u64;
                    i.spent = false;
                }
                None => {
                    // Added before it was a connection: that the kernel knows it proves that it is here.
                    kernel_ctl(epfd, op, fd, &ev)?;
                    if managed {
                        self.need_bell().ok_or(libc::ENOSPC)?;
                        let _ = kernel_ctl(epfd, libc::EPOLL_CTL_DEL, fd, &ev);
                        self.managed.fetch_add(1, SeqCst);
                    }
                    let item = Item {
                        conn,
                        gen: conn.gen.load(Relaxed),
                        events: ev.events,
                        data: ev.u64,
                        managed,
                        listed: false,
                        spent: false,
                    };
                    inner.items.insert(fd, item);
                    mine.push((self, fd));
                    conn.watcher_added();
                }
            },
            libc::EPOLL_CTL_DEL => {
                if known != Some(true) {
                    kernel_ctl(epfd, op, fd, &ev)?;
                }
                if inner.items.remove(&fd).is_some_and(|i| i.managed) {
                    self.managed.fetch_sub(1, SeqCst);
                }
                let before = mine.len();
                mine.retain(|(s, f)| !(core::ptr::eq(*s, self) && *f == fd));
                local.watchers.fetch_sub((before - mine.len()) as u32, SeqCst);
                return Ok(());
            }
            _ => return Err(libc::EINVAL),
        }
        drop(sg);
        drop(lg);
        if managed {
            self.push_ready(fd, conn);
        }
        Ok(())
    }
}

/// Whether `fd` is a set with managed connections.
pub fn is_managing(fd: c_int) -> bool {
    set_of(fd).is_some_and(|s| s.managed.load(Relaxed) > 0)
}

/// `epoll_wait(2)` and its kin; `timeout_ns < 0` waits for ever.
///
/// # Safety
/// `evs` must have room for `max` events; `mask` is null or readable.
pub unsafe fn wait(epfd: c_int, evs: *mut epoll_event, max: c_int, timeout_ns: i64, mask: *const sigset_t) -> Outcome {
    if max <= 0 || evs.is_null() || !crate::process::is_active() {
        return Outcome::Bypass;
    }
    let s = match set_of(epfd) {
        Some(s) => s,
        None => {
            // A connection may be added while we sleep, so we must not sleep where we cannot filter. The
            // first call tells whether it is an epoll set at all.
            // SAFETY: the program's array.
            match unsafe {
                sys!(libc::SYS_epoll_pwait, epfd, evs, max, 0, mask, if mask.is_null() { 0usize } else { 8 })
            } {
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
    match s.wait(evs, max, timeout_ns, mask) {
        Ok(n) => Outcome::Done(n),
        Err(e) => Outcome::Fail(e),
    }
}

/// The connection's readiness is ours from now on: takes it out of the kernel's sets. Gives false, and
/// changes nothing, where a set gets no bell.
pub fn manage(conn: &Conn) -> bool {
    let local = conn.local();
    let _lg = local.lock.lock();
    // SAFETY: guarded by `local.lock`.
    let items = unsafe { &*local.items.get() };
    // SAFETY: sets are never freed.
    if !items.iter().all(|(s, _)| unsafe { &**s }.need_bell().is_some()) {
        return false;
    }
    local.managed.store(true, Relaxed);
    for (s, fd) in items {
        // SAFETY: sets are never freed.
        let s = unsafe { &**s };
        {
            let _g = s.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &mut *s.inner.get() };
            let Some(i) = inner.items.get_mut(fd) else { continue };
            let dummy = epoll_event { events: 0, u64: 0 };
            let _ = kernel_ctl(s.epfd.load(Relaxed), libc::EPOLL_CTL_DEL, *fd, &dummy);
            i.managed = true;
            i.listed = true;
            inner.ready.push_back(*fd);
            s.listed.store(inner.ready.len() as u32, SeqCst);
            s.managed.fetch_add(1, SeqCst);
        }
        // Who sleeps in the kernel does not know yet that there is a bell.
        bell::ring(s.bell.load(Relaxed));
    }
    true
}

/// The connection is the kernel's again.
pub fn unmanage(conn: &Conn) {
    let local = conn.local();
    let _lg = local.lock.lock();
    local.managed.store(false, Relaxed);
    // SAFETY: guarded by `local.lock`.
    for (s, fd) in unsafe { &*local.items.get() } {
        // SAFETY: sets are never freed.
        let s = unsafe { &**s };
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &mut *s.inner.get() };
        let Some(i) = inner.items.get_mut(fd) else { continue };
        if i.managed {
            let events = if i.spent { i.events & NOT_EVENTS } else { i.events };
            let ev = epoll_event { events, u64: i.data };
            let _ = kernel_ctl(s.epfd.load(Relaxed), libc::EPOLL_CTL_ADD, *fd, &ev);
            i.managed = false;
            s.managed.fetch_sub(1, SeqCst);
        }
    }
}

/// In a forked child: sets that were inherited are plain kernel sets to us.
pub fn reset_after_fork() {
    FREE_LOCK.reset_after_fork();
    EXPOSED.lock.reset_after_fork();
    // SAFETY: this is the child's only thread.
    unsafe { core::ptr::write(EXPOSED.sets.get(), Vec::new()) };
    FREE.store(core::ptr::null_mut(), Relaxed);
    for fd in 0..=table::highest() {
        if let Entry::Set(_) = table::get(fd) {
            table::take(fd);
        }
    }
}
