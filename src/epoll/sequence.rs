//! Which came first: what this process has told itself by one ring or another, or what it has given the kernel. A program that
//! is its own peer counts on that. Of other processes nothing tells.

use super::wait::IN;
use super::*;

/// This process has given the kernel something since [`news`] was asked last, ...
static GIVEN: AtomicBool = AtomicBool::new(false);
/// ... and how often that was so.
static NEWS: AtomicU32 = AtomicU32::new(0);
/// The same of anything that may have made an fd of the kernel's ready.
static STIRRED: AtomicBool = AtomicBool::new(false);
static STIRS: AtomicU32 = AtomicU32::new(0);
/// How often a ring of this process to itself came to have something to read.
static ORDER: AtomicU64 = AtomicU64::new(0);

/// Whether there is a ring of this process to itself.
static IS_OWN_PEER: AtomicBool = AtomicBool::new(false);

/// How much of an order is [`news`].
const NEWS_BITS: u32 = 24;
const NEWS_MASK: u32 = (1 << NEWS_BITS) - 1;

/// The program has sent something by TCP, or made a connection. If it is its own peer, that is ready before all that it
/// sends by a ring from now on.
#[inline(always)]
pub fn kernel_has_news() {
    // Written to only where it says something else, because all threads come here.
    if !GIVEN.load(Relaxed) {
        GIVEN.store(true, Release);
    }
}

/// Changes with what the kernel was given.
#[inline]
pub(super) fn news() -> u32 {
    if GIVEN.load(Relaxed) && GIVEN.swap(false, AcqRel) {
        NEWS.fetch_add(1, Relaxed);
    }
    NEWS.load(Relaxed)
}

/// The program has done something to an fd of the kernel's, most often to one that is in no set: it may be ready, but nothing is
/// said of the order.
#[inline(always)]
pub fn kernel_is_stirred() {
    if !STIRRED.load(Relaxed) {
        STIRRED.store(true, Release);
    }
}

/// Changes with that.
#[inline]
pub(super) fn stirs() -> u32 {
    if STIRRED.load(Relaxed) && STIRRED.swap(false, AcqRel) {
        STIRS.fetch_add(1, Relaxed);
    }
    STIRS.load(Relaxed)
}

/// There will be a ring of this process to itself.
pub fn own_peer() {
    IS_OWN_PEER.store(true, Relaxed);
}

/// Whether that was so.
#[inline]
pub(super) fn is_own_peer() -> bool {
    IS_OWN_PEER.load(Relaxed)
}

/// For [`crate::layout::Slot::order`]: more with each call, and what the kernel had been given by then. Never 0.
pub fn next_order() -> u64 {
    (ORDER.fetch_add(1, Relaxed) + 1) << NEWS_BITS | u64::from(news() & NEWS_MASK)
}

/// When `conn` came to have what it is reported for; 0 where its peer is another process. `place`: not 0 if it is known
/// since when the item is on the list.
#[inline]
pub(super) fn order_of(conn: &Conn, place: u64) -> u64 {
    match conn.peer().map_or(0, |p| p.order.load(Acquire)) {
        0 => 0,
        order if place == 0 => order,
        _ => place,
    }
}

/// An event in a program's array, which need not be aligned for it.
pub(super) type Event = [u8; size_of::<epoll_event>()];

/// The `n` events at `evs`.
///
/// # Safety
/// They have been written there, in an array that nobody else uses meanwhile.
pub(super) unsafe fn events_at<'a>(evs: *mut epoll_event, n: usize) -> &'a mut [Event] {
    // SAFETY: by the caller's promise; bytes need no alignment.
    unsafe { core::slice::from_raw_parts_mut(evs.cast(), n) }
}

impl Set {
    /// The item `fd`, which waited for the events `was` (0: it is new, or had fired), waits for others. As in the kernel, it is
    /// on the list already if one of `was` has come since it was looked at, or comes to it here and now if one of the others
    /// is there.
    pub(super) fn changed_in_order(&self, fd: c_int, conn: &Conn, was: u32, events: u32) {
        if !conn.knows_order() {
            return;
        }
        conn.renew_order();
        let ready = conn.readiness((events & !NOT_EVENTS) | ALWAYS) != 0;
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &mut *self.inner.get() };
        let Some(i) = inner.items.get_mut(&Key::new(fd, conn)) else { return };
        let said = order_of(conn, 0);
        let has_come = core::mem::replace(&mut i.order_seen, said) != said && was & IN != 0;
        match i.place {
            0 if has_come => i.place = said,
            0 if ready => i.place = next_order(),
            _ => {}
        }
    }

    /// What the item that `event` is of was reported with.
    fn order_in(inner: &Inner, event: &Event) -> u64 {
        // SAFETY: so many bytes can be read, wherever they lie.
        let data = unsafe { event.as_ptr().cast::<epoll_event>().read_unaligned() }.u64;
        inner.only(data).and_then(|k| inner.items.get(&k)).map_or(0, |i| i.order)
    }

    /// Puts those items on the list whose peers are in this process in their order, at the places that they have: an item
    /// may have been listed before anything came. (Of the first ones: where there are many, a program takes many.)
    #[cold]
    pub(super) fn put_in_order(inner: &mut Inner) {
        const MOST: usize = 64;
        const PATIENCE: u32 = 32;
        let mut some = [(0, 0); MOST];
        let mut n = 0;
        for (at, key) in inner.ready.iter().enumerate().take(MOST) {
            let Some(i) = inner.items.get_mut(key).filter(|i| i.managed) else { continue };
            let said = order_of(i.conn, 0);
            if said == 0 {
                continue;
            }
            // Most often nothing has come; but of room nobody says so. It comes last, where there is room for it in the
            // program's array, but not for ever.
            let unsaid = i.place == 0 && said == i.order_seen;
            i.passed_by += u32::from(unsaid);
            if unsaid && i.passed_by > PATIENCE {
                i.place = next_order();
            }
            let order = match i.place {
                0 if unsaid => u64::MAX,
                0 => said,
                place => place,
            };
            some[n] = (order, at);
            n += 1;
        }
        // By insertion: what is out of order is a place or two away.
        for i in 1..n {
            let mut j = i;
            while j > 0 && some[j].0 < some[j - 1].0 {
                inner.ready.swap(some[j - 1].1, some[j].1);
                (some[j - 1].0, some[j].0) = (some[j].0, some[j - 1].0);
                j -= 1;
            }
        }
    }

    /// Moves those of some events of rings to the front that were ready when [`news`] was `heard`, and is more by now: what
    /// the kernel has from this process came later. Returns how many these are.
    #[cold]
    pub(super) fn bring_forward(&self, events: &mut [Event], heard: u32) -> usize {
        if self.kernel_news.load(Relaxed) == heard {
            return 0;
        }
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &*self.inner.get() };
        let mut first = 0;
        for i in 0..events.len() {
            let order = Self::order_in(inner, &events[i]);
            if order != 0 && order as u32 & NEWS_MASK == heard & NEWS_MASK {
                events[first..=i].rotate_right(1);
                first += 1;
            }
        }
        first
    }
}
