//! Sets whose own fd is polled, by another set or by `poll`: their readiness must show in the kernel.

use super::*;

impl Set {
    /// Makes an exposed set's fd show whether items are ready.
    pub(super) fn show(&self) {
        if self.exposed.load(Relaxed) {
            self.settle();
        }
    }

    /// Looks which of the listed items are ready, takes the others off the list, and lets the bell's
    /// eventfd say whether any is left.
    pub(super) fn settle(&self) {
        let b = self.bell.load(Acquire);
        if b == 0 {
            return;
        }
        bell::clear(b);
        bell::renew(b);
        link::drain_hints_of(b, 0);
        let listed: Vec<(c_int, &'static Conn, u32)> = {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &mut *self.inner.get() };
            let keys: Vec<Key> = inner.ready.drain(..).collect();
            self.listed.store(0, SeqCst);
            keys.into_iter()
                .filter_map(|key| {
                    let i = inner.items.get_mut(&key)?;
                    i.listed = false;
                    (i.managed && !i.spent).then_some((key.fd, i.conn, i.events))
                })
                .collect()
        };
        for (fd, conn, events) in listed {
            let mask = (events & !NOT_EVENTS) | ALWAYS;
            if conn.readiness(mask) == 0 {
                self.arm(conn, mask);
                if conn.readiness(mask) == 0 {
                    continue;
                }
            }
            self.push_ready(fd, conn);
        }
    }

    pub(super) fn expose(&self) {
        let new = {
            let _g = self.lock.lock();
            let b = self.need_bell();
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

/// Lets a set show what it has, if `fd` is an exposed one.
pub fn settle_fd(fd: c_int) {
    if let Some(s) = set_of(fd).filter(|s| s.exposed.load(Relaxed)) {
        s.settle();
    }
}

/// A set's fd is polled: its readiness must show in the kernel.
pub fn polled(epfd: c_int) {
    if let Some(s) = set_of(epfd) {
        s.expose();
    }
}
