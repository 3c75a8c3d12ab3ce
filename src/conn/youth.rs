//! Who has met a connection besides its first, quick calls (`io/young.rs`, `epoll/young.rs`). Most end before anybody does: of
//! such a connection nothing is locked, told or put back.

use super::*;
use crate::sync::give_way;
use crate::thread::Critical;

/// What a record's word says of that.
#[repr(u8)]
enum Youth {
    /// Somebody, perhaps.
    Settled,
    /// Nobody.
    Fresh,
    /// Nobody, and it is over.
    Taken,
    /// Nobody, and a thread is about to change that, or what is kept of a fresh one: all others wait.
    Busy,
}

pub(super) const SETTLED: u8 = Youth::Settled as u8;
const FRESH: u8 = Youth::Fresh as u8;
const TAKEN: u8 = Youth::Taken as u8;
const BUSY: u8 = Youth::Busy as u8;

impl Conn {
    /// Nobody has it but its quick calls, from now on.
    pub fn begin_fresh(&self) {
        self.youth.store(FRESH, Release);
    }

    /// Calls `f` while nobody can meet it, if it is fresh. No handler runs meanwhile.
    #[inline(always)]
    pub fn while_fresh<R>(&self, f: impl FnOnce() -> R) -> Option<R> {
        let _critical = Critical::new();
        if !self.begin_busy() {
            return None;
        }
        let r = f();
        self.youth.store(FRESH, Release);
        Some(r)
    }

    /// Waits until no other thread is busy with it. Whether it is fresh: then this one is. In a critical section.
    #[inline(always)]
    fn begin_busy(&self) -> bool {
        let mut tries = 0;
        loop {
            match self.youth.compare_exchange(FRESH, BUSY, SeqCst, SeqCst) {
                Ok(_) => return true,
                Err(BUSY) => give_way(&mut tries),
                Err(_) => return false,
            }
        }
    }

    /// Somebody else has met it than its quick calls. Returns false if there is nothing to meet: it is being closed.
    #[inline]
    pub fn settle(&'static self) -> bool {
        self.youth.load(Acquire) == SETTLED || self.settle_now()
    }

    #[cold]
    #[inline(never)]
    fn settle_now(&'static self) -> bool {
        if self.is_inherited() {
            // It is for the process whose it is, which was about to when this one was forked.
            return true;
        }
        let _critical = Critical::new();
        if self.begin_busy() {
            crate::epoll::grown_up(self);
            self.youth.store(SETTLED, Release);
        }
        self.youth.load(Acquire) == SETTLED
    }

    /// Whether nobody but its quick calls has ever had it, and nobody ever will: for who closes it. Not so if one of these
    /// calls is under way, in another thread or interrupted by the handler that closes it.
    pub fn take_fresh(&'static self) -> bool {
        let _critical = Critical::new();
        if !self.begin_busy() {
            return false;
        }
        let l = self.local();
        // Either this sees the call, or that sees this.
        let idle = l.rx_inflight.load(SeqCst) == 0 && l.tx_inflight.load(SeqCst) == 0;
        if idle {
            crate::epoll::ended(self);
        } else {
            crate::epoll::grown_up(self);
        }
        self.youth.store(if idle { TAKEN } else { SETTLED }, Release);
        idle
    }

    /// Whether it is being closed, or is about to be settled or changed. For a quick call, which has counted itself.
    #[inline(always)]
    pub fn is_in_hand(&self) -> bool {
        matches!(self.youth.load(SeqCst), TAKEN | BUSY)
    }

    /// Whether that became of its last life.
    pub fn was_taken(&self) -> bool {
        self.youth.load(Acquire) == TAKEN
    }
}
