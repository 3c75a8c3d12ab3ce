//! Epoll sets that contain connections of ours.
//!
//! As long as none of its connections is managed a set is the kernel's, and
//! only remembered. A managed connection is taken out of the kernel's set; its
//! readiness is computed here, with the kernel's own algorithm: a list of
//! items that may be ready, looked at again when events are harvested,
//! level-triggered ones put back. The set's bell is in the kernel's set, so
//! whoever sleeps in the kernel wakes for either.

use crate::bell;
use crate::chaos;
use crate::conn::{Both, Conn, Phase};
use crate::copy;
use crate::edges::{News, Told};
use crate::layout::{WANT_RX, WANT_TX};
use crate::link;
use crate::ops::Outcome;
use crate::remote;
use crate::rendezvous;
use crate::spin::spin;
use crate::sync::{now_ns, timespec_of, Lock};
use crate::sys::{self, sys, Errno, SysResult};
use crate::table::{self, Entry};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use libc::{c_int, epoll_event, sigset_t};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
const WAKEUP: u32 = libc::EPOLLWAKEUP as u32;
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const NOT_EVENTS: u32 = ET | ONESHOT | EXCLUSIVE | WAKEUP;

mod ctl;
mod ended;
mod inherited;
mod kernels;
mod left;
mod listing;
mod muted;
mod nested;
mod outlived;
mod sequence;
mod shared;
mod sight;
#[cfg(test)]
mod tests;
mod wait;
mod whole;
mod young;
pub use ctl::{ctl, fd_closed, is_told_of_all, manage, number_back, seen, unmanage};
pub use inherited::{about_to_close, about_to_fork, moved, reset_after_fork};
pub use left::Left;
use left::{Found, Note};
pub use listing::any_listed;
use muted::{Moved, Muted};
pub use nested::{is_exposed, is_idle, polled, settle_fd};
use nested::{moves_of_all, settle_all, Nested, EXPOSED};
pub use sequence::{kernel_has_news, kernel_is_stirred, next_order, own_peer};
pub use shared::{is_shared, wanted};
pub use sight::{has_unawaited, is_awaited, is_unawaited};
pub use wait::{look, wait};
use whole::{Changing, Whole};
pub use young::{ended, grown_up, has_young, Young};

/// What the kernel tells items apart by: the number that was added, and what it was then. An item lives as
/// long as its connection has any number, not only the one that was added.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    fd: c_int,
    conn: usize,
}

impl Key {
    fn new(fd: c_int, conn: &Conn) -> Key {
        Key { fd, conn: conn as *const Conn as usize }
    }
}

struct Item {
    conn: &'static Conn,
    gen: u32,
    events: u32,
    data: u64,
    managed: bool,
    listed: bool,
    /// Since when, if its peer is in this process, and that is known: [`sequence::order_of`]. Or 0.
    place: u64,
    /// How many looks at the list have left it there, behind others, because nothing was said to have come.
    passed_by: u32,
    /// When it became ready that was reported last: [`sequence::order_of`].
    order: u64,
    /// What the peer had said of that when it was looked at last.
    order_seen: u64,
    /// A one-shot that has fired. If it has gone back to the kernel's since, the set there does not have it until it is armed:
    /// errors and ends would make it ready once more, and with it the set.
    spent: bool,
    /// Inherited, and its connection has not come home yet: the kernel's set does not have it until then.
    away: bool,
    /// Is in [`Inner::moving`].
    moving: bool,
    /// The call that reported it last, see [`Set::rounds`].
    round: u64,
    /// The last call that began before it became managed, or ceased to be: the other side may have reported it to
    /// that one.
    since: u64,
    /// Of an edge-triggered one: what was reported last.
    told: Told,
    /// It went back to the kernel's set when there was no news of it, which the kernel cannot know.
    muted: bool,
    /// What the kernel had moved then.
    moved: Moved,
    /// It was added or changed since it became managed, so that an event of the kernel's is of the time before.
    rearmed: bool,
    /// Put back into the kernel's set when its number was closed: the number that it has there instead, or -1.
    aside: c_int,
    /// Counts the times it was changed: who looks at it without the lock must not report it as it was before.
    changes: u32,
}

impl Item {
    fn new(conn: &'static Conn, ev: &epoll_event, managed: bool) -> Item {
        let (events, data) = (ev.events, ev.u64);
        let gen = conn.gen.load(Relaxed);
        let told = Told::NOTHING;
        let (listed, spent, away, moving, muted, rearmed) = (false, false, false, false, false, managed);
        Item {
            conn,
            gen,
            events,
            data,
            managed,
            listed,
            place: 0,
            passed_by: 0,
            order: 0,
            order_seen: 0,
            spent,
            away,
            moving,
            round: 0,
            since: 0,
            told,
            muted,
            moved: Moved::default(),
            rearmed,
            aside: -1,
            changes: 0,
        }
    }

    /// Is as its connection's owner has left it.
    fn set_to(&mut self, n: &Note) {
        (self.events, self.data, self.spent) = (n.events, n.data, n.spent);
        (self.told, self.moved) = (n.told, n.moved);
    }

    /// What the kernel's set is to have of it.
    fn for_kernel(&self) -> epoll_event {
        epoll_event { events: self.events, u64: self.data }
    }

    /// Whether the kernel's set `of` may lack it, though it was not taken out.
    fn may_lack(&self, of: &Set) -> bool {
        // A one-shot may have fired in another process.
        self.spent || self.away || self.events & ONESHOT != 0 && of.forked.load(Relaxed)
    }

    /// Changes it in the kernel's set `of`.
    fn kernel_mod(&self, of: &Set, fd: c_int, ev: &epoll_event) -> SysResult {
        let epfd = of.epfd.load(Relaxed);
        match kernel_ctl(epfd, libc::EPOLL_CTL_MOD, fd, ev) {
            Err(libc::ENOENT) if self.may_lack(of) => kernel_ctl(epfd, libc::EPOLL_CTL_ADD, fd, ev),
            r => r,
        }
    }
}

#[derive(Default)]
struct Inner {
    items: Whole<FxHashMap<Key, Item>>,
    ready: VecDeque<Key>,
    /// Items that were not ready when they were looked at last, or are edge-triggered, and whose bytes do not come from a
    /// ring (yet): no peer hints for them.
    moving: VecDeque<Key>,
    /// Sets in this one.
    nested: Whole<Vec<Nested>>,
}

impl Inner {
    /// Takes an item out, and its place in the list of those that may be ready, which another may soon have.
    fn remove(&mut self, key: Key, c: &Changing) -> Option<Item> {
        let item = self.items.change(c).remove(&key)?;
        if item.listed {
            self.ready.retain(|k| *k != key);
        }
        Some(item)
    }

    /// The one item that has this data, by which the kernel names it. `None`: there is none, or there are several.
    fn only(&self, data: u64) -> Option<Key> {
        // Most programs put the fd itself into the low half. (One that is fresh has no item here, and gets none: the caller
        // holds the set's lock.)
        let fd = data as u32 as c_int;
        let usual = table::peek(fd).map(|c| Key::new(fd, c));
        if let Some(key) = usual.filter(|k| self.items.get(k).is_some_and(|i| i.data == data)) {
            return Some(key);
        }
        let mut all = self.items.iter().filter(|(_, i)| i.data == data).map(|(k, _)| *k);
        all.next().filter(|_| all.next().is_none())
    }
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
    /// The kernel's set may have a bell in it: this process's, or that of another that uses the set.
    belled: AtomicBool,
    /// Another process may use it as well.
    forked: AtomicBool,
    /// Which ones do, and what `set` was there when it was ours; null: none has been forked since it was made.
    shared: AtomicPtr<shared::Record>,
    shared_as: AtomicU32,
    managed: AtomicU32,
    /// How many connections it has that are fresh (`young.rs`).
    young: AtomicU32,
    /// Items that may be ready.
    listed: AtomicU32,
    /// The length of [`Inner::moving`].
    moving: AtomicU32,
    /// Somebody polls the set's own fd, so its readiness must show in the kernel: its bell's eventfd is
    /// readable exactly while an item may be ready.
    exposed: AtomicBool,
    /// The program has waited for it by a call of ours. Until it has, it may wait by system calls of its own, which hear nothing of
    /// rings, and what is in it is taken to be waited for out of sight.
    awaited: AtomicBool,
    /// Others look at its fd, and there was no bell to tell them: no connection in it is to leave the kernel.
    unexposed: AtomicBool,
    /// There are such sets in this one.
    nests: AtomicBool,
    lock: Lock,
    /// Whether the lists are being rewritten, see [`Changing`].
    changing: AtomicU32,
    /// Held while the bell is made.
    bell_lock: Lock,
    inner: UnsafeCell<Inner>,
    next_free: AtomicPtr<Set>,
    /// Its last number is closed, and calls go on that wait in it (`outlived.rs`): `epfd` is the library's own.
    unnamed: AtomicBool,
    /// Not 0 once a one-shot item was added.
    oneshots: AtomicU32,
    /// How many items are muted.
    muted: AtomicU32,
    /// How many items are away.
    away: AtomicU32,
    /// The last call during which a connection ceased to be managed.
    returned: AtomicU64,
    /// How often one became managed, or ceased to be, twice; odd while one does, under the lock. See [`Set::moves`].
    moves: AtomicU32,
    /// The last harvest filled the program's array: the kernel's fds come first next time.
    kernel_first: AtomicBool,
    /// Counts calls, so that one that looks twice reports nothing twice, and connections that went back to the
    /// kernel's set. From 1 on.
    rounds: AtomicU64,
    /// When the kernel's fds were looked at last.
    kernel_at: AtomicI64,
    /// What [`wait`] knew then of what the process had given to the kernel.
    kernel_news: AtomicU32,
    /// And of what it had done to the kernel's fds.
    kernel_stirs: AtomicU32,
    /// How often in a row it was readable and had no event.
    idle_looks: AtomicU32,
    /// The process that uses it (`process::life`); another value: one that this process descends from.
    life: AtomicU32,
}

// SAFETY: `inner` is guarded by `lock`; the rest is atomic.
unsafe impl Sync for Set {}

static FREE_LOCK: Lock = Lock::new();
static FREE: AtomicPtr<Set> = AtomicPtr::new(core::ptr::null_mut());

/// The set that a number is, which this process makes its own.
pub fn set_of(epfd: c_int) -> Option<&'static Set> {
    match table::get(epfd) {
        Entry::Set(s) => {
            if s.is_inherited() {
                s.adopt();
            }
            Some(s)
        }
        _ => None,
    }
}

fn make_set(epfd: c_int) -> Option<&'static Set> {
    if let Some(s) = set_of(epfd) {
        return Some(s);
    }
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
            belled: AtomicBool::new(false),
            forked: AtomicBool::new(false),
            shared: AtomicPtr::new(core::ptr::null_mut()),
            shared_as: AtomicU32::new(0),
            managed: AtomicU32::new(0),
            young: AtomicU32::new(0),
            listed: AtomicU32::new(0),
            moving: AtomicU32::new(0),
            exposed: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
            unexposed: AtomicBool::new(false),
            nests: AtomicBool::new(false),
            lock: Lock::new(),
            changing: AtomicU32::new(0),
            bell_lock: Lock::new(),
            inner: UnsafeCell::new(Inner::default()),
            next_free: AtomicPtr::new(core::ptr::null_mut()),
            unnamed: AtomicBool::new(false),
            oneshots: AtomicU32::new(0),
            muted: AtomicU32::new(0),
            away: AtomicU32::new(0),
            returned: AtomicU64::new(0),
            moves: AtomicU32::new(0),
            kernel_first: AtomicBool::new(false),
            rounds: AtomicU64::new(1),
            kernel_at: AtomicI64::new(0),
            kernel_news: AtomicU32::new(0),
            kernel_stirs: AtomicU32::new(0),
            idle_looks: AtomicU32::new(0),
            life: AtomicU32::new(0),
        })),
    };
    let mut token = [0u8; 8];
    crate::process::random(&mut token);
    s.token.store(u64::from_ne_bytes(token), Relaxed);
    s.epfd.store(epfd, Relaxed);
    s.fds.store(1, Relaxed);
    s.life.store(crate::process::life(), Relaxed);
    s.awaited.store(false, Relaxed);
    table::put_set(epfd, s).then_some(s)
}

/// A new set, and its number.
#[cfg(test)]
pub fn set_for_tests() -> (&'static Set, c_int) {
    table::for_tests();
    // SAFETY: no preconditions.
    let epfd = unsafe { sys!(libc::SYS_epoll_create1, 0) }.unwrap() as c_int;
    // What another test had there.
    table::take(epfd);
    (make_set(epfd).unwrap(), epfd)
}

/// `epoll_ctl(2)`.
pub fn kernel_ctl(epfd: c_int, op: c_int, fd: c_int, ev: *const epoll_event) -> SysResult {
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

/// The number by which the kernel's set knows the bell of the set `epfd`, if there is one.
pub fn bell_of(epfd: c_int) -> Option<c_int> {
    let b = set_of(epfd)?.bell.load(Acquire);
    (b != 0).then(|| bell::fd(b))
}

/// A number of a set is closed. `open`: the kernel has it still.
pub fn number_closed(s: &'static Set, fd: c_int, open: bool) {
    if s.fds.fetch_sub(1, SeqCst) == 1 {
        if !(open && s.is_outlived(fd)) {
            closed(s);
        }
        return;
    }
    if s.epfd.load(Relaxed) == fd {
        let other = (0..=table::highest()).find(|n| set_of(*n).is_some_and(|x| core::ptr::eq(x, s)));
        s.epfd.store(other.unwrap_or(-1), Relaxed);
    }
}

fn closed(s: &'static Set) {
    remote::leave_set(s as *const Set as usize);
    crate::early::set_closed(s);
    young::set_closed(s);
    s.about_to_leave();
    let mut gone = Vec::new();
    {
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &mut *s.inner.get() };
        let c = s.begin_change();
        for (key, item) in inner.items.change(&c).drain() {
            if s.forked.load(Relaxed) && !item.managed {
                item.conn.local().left_in_a_set.store(true, Relaxed);
            }
            gone.push((key.fd, item.conn));
        }
        inner.ready.clear();
        inner.moving.clear();
        inner.nested.change(&c).clear();
    }
    for (fd, conn) in gone {
        if s.is_inherited() {
            // The child has never used it: no connection knows of it.
            inherited::saw(conn);
            continue;
        }
        let _g = conn.local().lock.lock();
        // SAFETY: guarded by `local.lock`.
        let items = unsafe { &mut *conn.local().items.get() };
        let before = items.len();
        items.retain(|(set, f)| !(core::ptr::eq(*set, s) && *f == fd));
        // Another thread may have closed the connection meanwhile.
        conn.local().watchers_left(before - items.len());
    }
    s.leave();
    s.listed.store(0, Relaxed);
    s.moving.store(0, Relaxed);
    s.managed.store(0, Relaxed);
    s.muted.store(0, Relaxed);
    s.away.store(0, Relaxed);
    let exposed = s.exposed.swap(false, Relaxed);
    s.nests.store(false, Relaxed);
    s.unexposed.store(false, Relaxed);
    s.belled.store(false, Relaxed);
    s.forked.store(false, Relaxed);
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

impl Set {
    /// The item `fd` may be ready, and more of it so than before.
    pub fn push_ready(&self, fd: c_int, conn: &Conn) {
        // More of what is on the list is news to who waits for edges of this set. (Where nothing is, only other processes that
        // use it would see the bell.)
        if self.list(fd, conn, 0) || self.exposed.load(Relaxed) && self.managed.load(SeqCst) > 0 {
            self.wake();
        }
    }

    /// The item `fd` may be ready, though nothing has happened to it now, unless it has one of the flags `but`.
    fn push_seen(&self, fd: c_int, conn: &Conn, but: u32) {
        if self.list(fd, conn, but) {
            self.wake();
        }
    }

    /// Puts an item on the list; false: it is there, or does not belong there.
    fn list(&self, fd: c_int, conn: &Conn, but: u32) -> bool {
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &mut *self.inner.get() };
        let key = Key::new(fd, conn);
        match inner.items.get_mut(&key) {
            Some(i) if i.managed && !i.listed && !i.spent && i.events & but == 0 => {
                (i.listed, i.place) = (true, 0);
                inner.ready.push_back(key);
                self.listed.store(inner.ready.len() as u32, SeqCst);
                true
            }
            _ => false,
        }
    }

    /// Nobody is to know the events of its bell any more.
    pub fn retire(&self) {
        let b = self.bell.load(Acquire);
        if b != 0 {
            let ev = epoll_event { events: 0, u64: 0 };
            let _ = kernel_ctl(self.epfd.load(Relaxed), libc::EPOLL_CTL_DEL, bell::fd(b), &ev);
        }
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
        if self.unexposed.load(Relaxed) {
            return None;
        }
        let b = bell::alloc()?;
        // Whoever gets the bell's event from the kernel must know what it is, and it may come at once.
        self.belled.store(true, SeqCst);
        let ev = epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: self.token.load(Relaxed) };
        if kernel_ctl(self.epfd.load(Relaxed), libc::EPOLL_CTL_ADD, bell::fd(b), &ev).is_err() {
            bell::free(b);
            return None;
        }
        self.bell.store(b, Release);
        Some(b)
    }
}
