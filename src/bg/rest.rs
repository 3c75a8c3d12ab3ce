//! The end of a background thread that has nothing to do. With a second thread the kernel does each call of the program that
//! is about an fd a little slower, and libc those that may wait. The next connection that has something to gain starts another.
//!
//! It stays where the program has threads of its own, and nothing to gain; while a peer may come (a connection that is looked
//! for, links); while anything is under way; while an operator has switched the library off; and for good where RDMA was used,
//! or the process has had children (see [`bear`]). While there is none an operator hears what is said where none ever was:
//! nothing is on a ring.

use super::*;

/// For how long something is waited for.
fn patience() -> i64 {
    if chaos::is_on() {
        return 2 * MS;
    }
    REST_AFTER_NS << RESTS.load(Relaxed).min(REST_DOUBLINGS)
}

/// Whether something has come that no timer tells of.
pub(super) fn is_asked() -> bool {
    let flags = END.load(SeqCst) || SEND_BELLS.load(SeqCst) || PROVIDE_BELLS.load(SeqCst) || crowd::is_asked();
    flags || !INBOX.load(SeqCst).is_null()
}

impl Bg {
    fn has_nothing_to_do(&self) -> bool {
        if crate::process::has_threads() {
            return false;
        }
        let at_peers =
            self.looks.is_empty() && self.callers.is_empty() && self.links.is_empty() && self.dead.is_empty();
        let with_them = self.parked.is_empty() && self.unsent.is_empty() && self.ask_later.is_empty();
        let of_conns = self.restless.is_empty() && self.later.is_empty() && self.suspects.is_empty();
        let of_rings = self.corked.is_empty() && self.grown.is_empty() && self.held_links.is_empty();
        // An operator who has switched it off is to be heard when that is over.
        let of_others = self.rests.is_empty() && self.guests.is_empty() && !order::is_off() && !BEARS.load(SeqCst);
        at_peers
            && with_them
            && of_conns
            && of_rings
            && of_others
            && !self.rdma.is_used()
            && !self.census.is_under_way()
    }

    /// When the thread may go, or `i64::MAX`.
    pub(super) fn rest_at(&self) -> i64 {
        match self.idle_since {
            0 => i64::MAX,
            since => since + patience(),
        }
    }

    /// Goes, if it is time: nothing is left of what the thread would have to do.
    pub(super) fn rests(&mut self) -> bool {
        if is_asked() || link::any_hints(0) || !self.has_nothing_to_do() {
            self.idle_since = 0;
            return false;
        }
        let now = now_ns();
        if self.idle_since == 0 {
            self.idle_since = now;
        }
        if now < self.rest_at() {
            return false;
        }
        if arena::any(Phase::Managed) {
            // What has no link any more, but is not closed yet.
            self.idle_since = now;
            return false;
        }
        RESTS.fetch_add(1, SeqCst);
        LEAVES.store(1, SeqCst);
        STATE.store(0, SeqCst);
        full_fence();
        // Who has put something there before that has rung, and starts nobody.
        if (is_asked() || BEARS.load(SeqCst)) && STATE.compare_exchange(0, 2, SeqCst, SeqCst).is_ok() {
            LEAVES.store(0, SeqCst);
            futex_wake(&LEAVES, i32::MAX);
            return false;
        }
        self.idle_since = 0;
        // Nobody who has not been found by now can be, so their ends concern the program alone.
        for k in self.known.drain().map(|(_, k)| k) {
            if k.conn.gen.load(Relaxed) == k.gen {
                k.conn.local().submitted.store(false, SeqCst);
            }
        }
        self.end_of.clear();
        self.asked.clear();
        log(Level::Debug, format_args!("nothing to do: the background thread ends until there is"));
        true
    }
}
