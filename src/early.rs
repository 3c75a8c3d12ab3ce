//! TCP sockets that are no connections yet. What a program does with one before it dials it is noted here, for the
//! connection to begin with: in which epoll sets it is (nginx puts its upstream sockets into one first, and never tells the
//! set of them again), and which numbers it has.
//!
//! The marks of such a number in the table ([`table::marks`]) and this list change under one lock; only a fork marks without.

use crate::conn::{Conn, Phase};
use crate::epoll::{self, Set};
use crate::foreign::cookie;
use crate::ops::Outcome;
use crate::process;
use crate::stats::Why;
use crate::sync::Lock;
use crate::table::{self, AWAITED, DUPED, SHARED, USED};
use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::*;
use libc::{c_int, epoll_event};
use std::collections::BTreeMap;

struct Early {
    lock: Lock,
    items: UnsafeCell<Items>,
}

/// What each epoll item says, by its number and the address of its set.
type Items = BTreeMap<(c_int, usize), epoll_event>;

/// In the place of a set: one that the library does not know.
const UNKNOWN: usize = 0;

// SAFETY: `items` is guarded by `lock`.
unsafe impl Sync for Early {}

static EARLY: Early = Early { lock: Lock::new(), items: UnsafeCell::new(Items::new()) };

fn with<R>(f: impl FnOnce(&mut Items) -> R) -> R {
    let _g = EARLY.lock.lock();
    // SAFETY: guarded by `lock`.
    f(unsafe { &mut *EARLY.items.get() })
}

fn address(set: Option<&'static Set>) -> usize {
    set.map_or(UNKNOWN, |s| s as *const Set as usize)
}

/// Every number of the socket `fd` that is open.
fn numbers(fd: c_int) -> Vec<c_int> {
    if table::marks(fd) & DUPED == 0 {
        return vec![fd];
    }
    let this = cookie(fd);
    (0..=table::highest()).filter(|n| *n == fd || table::marks(*n) & DUPED != 0 && cookie(*n) == this).collect()
}

/// `epoll_ctl(2)` of a number that is no connection. `None`: it has become one meanwhile.
///
/// # Safety
/// As for the call.
pub unsafe fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> Option<Outcome> {
    if !table::is_tcp(fd) || process::is_guest() {
        return Some(Outcome::Bypass);
    }
    let set = address(epoll::set_of(epfd));
    with(|items| {
        if !table::is_tcp(fd) {
            return table::conn(fd).is_none().then_some(Outcome::Bypass);
        }
        let done = epoll::kernel_ctl(epfd, op, fd, ev);
        if done.is_ok() && op == libc::EPOLL_CTL_DEL {
            items.remove(&(fd, set));
        } else if done.is_ok() {
            // SAFETY: the kernel has just read it there.
            items.insert((fd, set), unsafe { ev.read_unaligned() });
            table::mark(fd, AWAITED);
        }
        Some(Outcome::from(done))
    })
}

/// `new` is another number of `old`. Returns false if that has become a connection meanwhile.
pub fn duplicated(old: c_int, new: c_int) -> bool {
    with(|_| table::conn(old).is_none() && (table::put_duped(old, new) || table::conn(old).is_none()))
}

/// `fd` is the connection `conn` from now on, with its other numbers, and what the sets have of it are the connection's
/// items. Returns false if the table has no room.
pub fn dialled(fd: c_int, conn: &'static Conn) -> bool {
    if table::put_dialled(fd, conn) {
        return true;
    }
    with(|items| {
        let local = conn.local();
        // Nobody changes the items before they are there.
        let _lg = local.lock.lock();
        let (seen, numbers) = (table::is_tcp(fd), numbers(fd));
        let marks = numbers.iter().fold(0, |m, n| m | table::marks(*n));
        for n in &numbers {
            if !table::put_conn(*n, conn) {
                return false;
            }
        }
        local.fds.store(numbers.len() as u32, SeqCst);
        // Who made the socket, and has it as well, is not known.
        let elsewhere = (!seen || marks & SHARED != 0).then_some(Why::Shared);
        let in_kernel = (marks & USED != 0).then_some(Why::Unseen);
        if let Some(why) = elsewhere.or(in_kernel).filter(|_| conn.phase() != Phase::Plain) {
            conn.why(why);
            conn.set_phase(Phase::Plain);
        }
        let found: Vec<_> =
            items.iter().filter(|((n, _), _)| numbers.contains(n)).map(|((n, set), ev)| (*n, *set, *ev)).collect();
        items.retain(|(n, _), _| !numbers.contains(n));
        if conn.phase() == Phase::Plain || process::is_guest() {
            return true;
        }
        // What one-shots have reported is not known.
        let (known, unknown): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|(_, set, ev)| *set != UNKNOWN && ev.events & libc::EPOLLONESHOT as u32 == 0);
        for (n, set, ev) in known {
            // SAFETY: sets are never freed; one that is closed leaves the list.
            let set = unsafe { &*(set as *const Set) };
            // SAFETY: `local.lock` is held.
            unsafe { set.begin_with(n, conn, &ev) };
        }
        conn.unknown_items.store(unknown.len() as u32, SeqCst);
        true
    })
}

/// A call on the socket `fd` that is no connection is about to begin: where it waits, for a connection that another thread
/// dials, nobody but the kernel can end it. Returns false if `fd` is something else.
pub fn used(fd: c_int) -> bool {
    let marks = || table::marks(fd) & USED != 0 || !process::has_threads() || table::mark(fd, USED);
    table::is_tcp(fd) && !process::is_guest() && marks()
}

/// The connection that `fd` is, for a call that may wait for it.
pub fn conn(fd: c_int) -> Option<&'static Conn> {
    table::conn(fd).or_else(|| {
        used(fd);
        // Another thread may have been quicker.
        table::conn(fd)
    })
}

/// The number is about to be closed, or something else already.
pub fn forget(fd: c_int) {
    let marks = table::marks(fd);
    if marks & (AWAITED | DUPED) == 0 || process::is_guest() {
        return;
    }
    with(|items| {
        let others = if marks & AWAITED != 0 { numbers(fd) } else { Vec::new() };
        if let Some(other) = others.into_iter().find(|n| *n != fd) {
            // The kernel's sets keep what was added under a number until the last is closed.
            items.insert((other, UNKNOWN), epoll_event { events: 0, u64: 0 });
            table::mark(other, AWAITED);
        }
        items.retain(|(n, _), _| *n != fd);
        table::take(fd);
    });
}

/// Whoever has the set's memory next must not find them.
pub fn set_closed(set: &'static Set) {
    with(|items| items.retain(|(_, s), _| *s != address(Some(set))));
}

/// A process that is forked now has them as well.
pub fn about_to_fork() {
    for fd in 0..=table::highest() {
        table::mark(fd, SHARED);
    }
}

/// It is about to be passed to somebody.
pub fn shared(fd: c_int) {
    table::mark(fd, SHARED);
}

/// In a forked child: whether the list is whole nobody knows, and it needs none, for its sockets are shared.
pub fn reset_after_fork() {
    EARLY.lock.reset_after_fork();
    // SAFETY: this is the child's only thread; what the list was is left alone.
    unsafe { core::ptr::write(EARLY.items.get(), Items::new()) };
}
