//! The lists of a set, as a forked child finds them: whole, though another thread of its parent was changing them.
//!
//! What an item says of itself is single words, of which any mixture of old and new will do; but a list must not be caught half
//! rewritten. (See [`forking`](crate::forking). A fork that has waited in vain may find it empty.)

use super::*;
use crate::forking;
use core::ops::Deref;
use core::sync::atomic::fence;

/// While it lives the lists of a set may be rewritten.
pub(super) struct Changing<'a>(&'a Set);

/// Nobody rewrites the lists of a set ...
const IDLE: u32 = 0;
/// ... somebody looks whether he may, ...
const ABOUT: u32 = 1;
/// ... and does.
const REWRITES: u32 = 2;

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.changing.store(IDLE, Release);
    }
}

/// What only the holder of a [`Changing`] can rewrite.
#[derive(Default)]
pub(super) struct Whole<T>(T);

impl<T> Deref for Whole<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Whole<T> {
    /// The list, to be rewritten.
    pub(super) fn change(&mut self, _of: &Changing) -> &mut T {
        &mut self.0
    }
}

impl Whole<FxHashMap<Key, Item>> {
    pub(super) fn get_mut(&mut self, key: &Key) -> Option<&mut Item> {
        self.0.get_mut(key)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&Key, &mut Item)> {
        self.0.iter_mut()
    }
}

impl Set {
    /// The lists are about to be rewritten, by the holder of `lock`.
    #[inline]
    pub(super) fn begin_change(&self) -> Changing<'_> {
        if !crate::process::has_threads() {
            // Who could fork meanwhile?
            self.changing.store(REWRITES, Relaxed);
            fence(Release);
            return Changing(self);
        }
        self.begin_change_among_threads()
    }

    #[inline(never)]
    fn begin_change_among_threads(&self) -> Changing<'_> {
        let may_begin = || {
            if forking::is_anothers() {
                return false;
            }
            // Either this sees the fork, or that sees this. (A child that does finds nothing half done.)
            self.changing.store(ABOUT, SeqCst);
            let may = !forking::is_anothers();
            if !may {
                self.changing.store(IDLE, SeqCst);
            }
            may
        };
        if !may_begin() {
            forking::await_it(may_begin);
        }
        self.changing.store(REWRITES, Relaxed);
        // Before the lists are.
        fence(Release);
        Changing(self)
    }

    /// Waits until nobody rewrites the lists.
    pub(super) fn await_whole(&self) {
        forking::await_it(|| self.changing.load(SeqCst) == IDLE);
    }

    /// In a forked child, before it has more than one thread: what another thread of the parent's left half done is put
    /// right.
    pub(super) fn make_whole(&self) {
        let half_done = self.changing.swap(IDLE, SeqCst) == REWRITES;
        if !self.lock.is_held() {
            return;
        }
        // SAFETY: nobody else is here. What may be half rewritten is not looked at, and its memory is left alone.
        unsafe {
            let Inner { items, nested, ready, moving } = core::ptr::read(self.inner.get());
            core::mem::forget((ready, moving));
            let lists = if half_done {
                core::mem::forget((items, nested));
                Inner::default()
            } else {
                Inner { items, nested, ..Inner::default() }
            };
            core::ptr::write(self.inner.get(), lists);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A set of one item, whose number is 7.
    fn set() -> (&'static Set, c_int) {
        let (s, epfd) = set_for_tests();
        let conn = crate::arena::alloc().unwrap();
        let c = s.begin_change();
        // SAFETY: nobody else knows the set.
        let inner = unsafe { &mut *s.inner.get() };
        inner.items.change(&c).insert(Key::new(7, conn), Item::new(conn, &epoll_event { events: 1, u64: 7 }, false));
        drop(c);
        (s, epfd)
    }

    fn count(s: &Set) -> usize {
        // SAFETY: only tests of one thread call this.
        unsafe { &*s.inner.get() }.items.len()
    }

    #[test]
    fn a_child_knows_the_items_of_a_set_that_was_locked() {
        let (s, epfd) = set();
        core::mem::forget(s.lock.lock());
        s.moves.store(7, SeqCst);
        s.reset_after_fork();
        assert_eq!(count(s), 1);
        assert!(!s.lock.is_held());
        assert_eq!(s.moves(), 8, "a connection that moves in the parent only is waited for");
        core::mem::forget((s.lock.lock(), s.begin_change()));
        s.reset_after_fork();
        assert_eq!(count(s), 0, "what was half rewritten is used");
        crate::thread::leave();
        crate::thread::leave();
        number_closed(s, epfd, true);
        sys::close(epfd);
    }

    #[test]
    fn a_fork_and_a_change_wait_for_each_other() {
        use std::sync::mpsc::channel;
        use std::time::Duration;
        let _alone = forking::ALONE.lock();
        let (s, epfd) = set();
        let (begun, has_begun) = channel();
        // (A program of one thread has nobody to wait for.)
        let c = s.begin_change_among_threads();
        std::thread::scope(|scope| {
            let t = scope.spawn(move || {
                forking::begins();
                s.await_whole();
                begun.send(()).unwrap();
                // Who forks may change a set, too, in a handler of the program's.
                drop(s.begin_change_among_threads());
                let until = std::time::Instant::now() + Duration::from_millis(5);
                while std::time::Instant::now() < until {
                    assert_eq!(s.changing.load(SeqCst), IDLE, "a child would throw the lists away");
                }
                forking::is_over();
            });
            assert!(has_begun.recv_timeout(Duration::from_millis(20)).is_err(), "a fork begins during a change");
            drop(c);
            has_begun.recv().unwrap();
            drop(s.begin_change_among_threads());
            assert!(!forking::is_under_way());
            t.join().unwrap();
        });
        number_closed(s, epfd, true);
        sys::close(epfd);
    }
}
