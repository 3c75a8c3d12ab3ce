//! Which processes hold a connection: those that made it or inherited it over `fork`, and have not closed it.
//!
//! The kernel knows, and tells nobody. So each connection has a short list of process ids in memory that
//! the family shares, and who asks looks whether the others are still alive: a process that was killed
//! takes itself off no list. Where the list is too short, or a process cannot be told (it lives in another
//! pid namespace, or a fork failed out of sight), the connection counts as held by more processes than it
//! is. That costs its upgrade, and never a byte.

use crate::liveness;
use core::sync::atomic::{AtomicU32, Ordering::*};

const PLACES: usize = 6;
/// A child that is about to be born; the lower bits are its parent's token.
const UNBORN: u32 = 1 << 31;
/// A process whose id means nothing here.
pub const UNKNOWN: u32 = 1 << 30;

/// The processes that hold a connection.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Holders {
    who: [AtomicU32; PLACES],
    /// Those for whom there was no place.
    more: AtomicU32,
}

impl Holders {
    /// Held by `me` alone.
    pub fn reset(&mut self, me: u32) {
        for w in &mut self.who {
            *w.get_mut() = 0;
        }
        *self.who[0].get_mut() = me;
        *self.more.get_mut() = 0;
    }

    /// `who` (a process, or a token with [`Holders::expect`]) holds it, too.
    pub fn add(&self, who: u32) {
        for round in 0..2 {
            let free = |w: &AtomicU32| w.compare_exchange(0, who, SeqCst, Relaxed).is_ok();
            if self.who.iter().any(free) {
                return;
            }
            if round == 0 {
                self.reap();
            }
        }
        self.more.fetch_add(1, SeqCst);
    }

    /// The same, if it is not on the list yet.
    pub fn add_once(&self, who: u32) {
        if !self.who.iter().any(|w| w.load(SeqCst) == who) {
            self.add(who);
        }
    }

    /// Before a fork: the child that is known by `token`.
    pub fn expect(&self, token: u32) {
        self.add(UNBORN | token);
    }

    /// The child of `token` is the process `who`; 0: there is none.
    pub fn born(&self, token: u32, who: u32) {
        let it = |w: &AtomicU32| w.compare_exchange(UNBORN | token, who, SeqCst, Relaxed).is_ok();
        let found = self.who.iter().any(it);
        if !found && who == 0 {
            self.remove(0);
        }
    }

    /// As [`Holders::born`], where only some connections expect a child: others are left as they are.
    pub fn spawned(&self, token: u32, who: u32) {
        let _ = self.who.iter().any(|w| w.compare_exchange(UNBORN | token, who, SeqCst, Relaxed).is_ok());
    }

    /// `who` holds it no more.
    pub fn remove(&self, who: u32) {
        let it = |w: &AtomicU32| who != 0 && w.compare_exchange(who, 0, SeqCst, Relaxed).is_ok();
        if !self.who.iter().any(it) {
            let _ = self.more.fetch_update(SeqCst, Relaxed, |n| n.checked_sub(1));
        }
    }

    /// `who` is taken off the list, if it is on it.
    pub fn remove_if_there(&self, who: u32) {
        let _ = self.who.iter().any(|w| w.compare_exchange(who, 0, SeqCst, Relaxed).is_ok());
    }

    /// Takes the dead off the list.
    fn reap(&self) {
        for w in &self.who {
            let v = w.load(SeqCst);
            if v != 0 && v & (UNBORN | UNKNOWN) == 0 && liveness::is_dead(v) {
                let _ = w.compare_exchange(v, 0, SeqCst, Relaxed);
            }
        }
    }

    /// How many there are, the dead included: cheap, and at least as many as there are.
    pub fn at_most(&self) -> u32 {
        self.who.iter().filter(|w| w.load(SeqCst) != 0).count() as u32 + self.more.load(SeqCst)
    }

    /// Whether one of the others has the property. (Of who is unknown nothing can be said.)
    pub fn any_other(&self, me: u32, has: impl Fn(u32) -> bool) -> bool {
        let known = |v: &u32| *v != 0 && *v != me && v & (UNBORN | UNKNOWN) == 0;
        self.who.iter().map(|w| w.load(SeqCst)).filter(known).any(has)
    }

    /// Whether `me`, who holds it, does so alone. Asks the kernel about others.
    pub fn is_only(&self, me: u32) -> bool {
        let mut n = self.at_most();
        if n > 1 {
            self.reap();
            n = self.at_most();
        }
        n <= 1 && self.who.iter().any(|w| w.load(SeqCst) == me)
    }

    /// Whether nobody holds it.
    pub fn is_nobody(&self) -> bool {
        if self.at_most() > 0 {
            self.reap();
        }
        self.at_most() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dead_hold_nothing() {
        let me = std::process::id();
        let mut h = Holders::default();
        h.reset(me);
        assert!(h.is_only(me) && !h.is_nobody());
        let mut child = std::process::Command::new("sleep").arg("10").spawn().unwrap();
        h.expect(5);
        assert!(!h.is_only(me));
        h.born(5, child.id());
        assert!(!h.is_only(me));
        child.kill().unwrap();
        // Not waited for: a zombie holds nothing either.
        for _ in 0..1000 {
            if h.is_only(me) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(h.is_only(me));
        child.wait().unwrap();
        h.remove(me);
        assert!(h.is_nobody());
    }

    #[test]
    fn who_expects_no_child_gets_none() {
        let me = std::process::id();
        let mut h = Holders::default();
        h.reset(me);
        h.spawned(7, 0);
        assert!(h.is_only(me));
        h.expect(7);
        assert!(!h.is_only(me), "an upgrade may begin while the child is being made");
        h.spawned(8, 0);
        assert!(!h.is_only(me));
        h.spawned(7, 0);
        assert!(h.is_only(me));
    }

    #[test]
    fn too_many_are_counted() {
        let me = std::process::id();
        let mut h = Holders::default();
        h.reset(me);
        for t in 0..10 {
            h.expect(t);
        }
        assert_eq!(h.at_most(), 11);
        for t in 0..10 {
            // A fork that failed.
            h.born(t, 0);
        }
        assert!(h.is_only(me));
    }
}
