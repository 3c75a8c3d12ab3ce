//! Who waits for a connection, here and at the peer.

use super::*;
use crate::chaos;

impl Conn {
    /// The bell that a waiter at bell `k` is to name to the peer.
    pub fn bell_for(&self, k: u32) -> u32 {
        // SAFETY: links are never freed.
        match unsafe { self.link.load(Acquire).as_ref() } {
            Some(l) if k != 0 && self.local().watchers.load(SeqCst) <= 1 => l.usable_bell(k),
            _ => 0,
        }
    }

    /// Another set or thread waits for it. Under `local.lock`.
    pub fn watcher_added(&self) {
        self.local().seats.fetch_add(1, SeqCst);
        if self.local().watchers.fetch_add(1, SeqCst) == 1 {
            // What was asked of the peer names the first one's bell alone.
            self.arm(WANT_RX, 0);
            self.epoch.fetch_add(1, SeqCst);
        }
    }

    /// An item of an epoll set that nobody here knew is known from now on, or gone.
    pub fn item_met(&self) {
        let _ = self.unknown_items.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
    }

    /// As [`Conn::arm`], for who waits at bell `k` and was one of the watchers when there had been `seats` changes of them. The
    /// bell is named if no other will do, and whoever came since has not waited in vain: else the background thread's.
    pub fn arm_at(&self, bits: u32, k: u32, seats: u32) {
        let bell = self.bell_for(k);
        chaos::stumble();
        self.arm(bits, bell);
        // Either who comes sees what was asked, and asks anew, or it is seen here.
        if bell != 0 && self.local().seats.load(SeqCst) != seats {
            self.arm(bits, 0);
        }
    }

    /// Asks the peer for a hint when `bits` (`WANT_*`) come true; to be followed by another look.
    pub fn arm(&self, bits: u32, bell: u32) {
        let Some(own) = self.own() else { return };
        if bits & WANT_TX != 0 {
            let tx = self.lock_tx();
            // SAFETY: we hold the send lock.
            own.tx_goal.store(unsafe { (*self.tx.get()).goal() }, Relaxed);
            drop(tx);
        }
        own.bell.store(bell, Relaxed);
        let mut w = own.want.load(Relaxed);
        loop {
            // A wish replaces the one before it, unless it may be somebody else's.
            let keep = if self.local().watchers.load(SeqCst) > 1 { 0xff } else { FUTEX_RX | FUTEX_TX | WANT_ORDER };
            let new = (((w >> WANT_SHIFT).wrapping_add(1)) << WANT_SHIFT) | (w & keep) | bits;
            match own.want.compare_exchange_weak(w, new, SeqCst, Relaxed) {
                Ok(_) => break,
                Err(v) => w = v,
            }
        }
        full_fence();
        if bits & WANT_TX != 0 {
            self.flush();
            // It may wait for more than there is room for.
            self.tell_peer(WANT_RX, FUTEX_RX);
        }
    }

    /// A program that was told that there is no room may wait for an edge: the peer is to say when there is. To be followed
    /// by another look.
    pub fn ask_for_room(&self) {
        if let Some(own) = self.own() {
            let seats = self.local().seats.load(SeqCst);
            let bell = own.bell.load(Relaxed);
            self.arm(WANT_RX | WANT_TX, bell);
            if bell != 0 && self.local().seats.load(SeqCst) != seats {
                self.arm(WANT_RX | WANT_TX, 0);
            }
        }
    }

    /// The word at which the peer, a process of this host, wakes threads that wait for this connection.
    pub fn wake_word(&self) -> Option<&AtomicU32> {
        self.peer()?;
        // SAFETY: links are never freed while a connection has one.
        unsafe { self.link.load(Acquire).as_ref() }?.side.wake(self.slot.load(Relaxed))
    }

    /// Bytes were published for the peer (`WANT_RX`, `FUTEX_RX`) or room was made for it: wakes whoever asked.
    #[inline]
    pub fn tell_peer(&self, hint_bit: u32, futex_bit: u32) {
        full_fence();
        self.tell_peer_fenced(hint_bit, futex_bit);
    }

    /// The same behind a full fence.
    #[inline(always)]
    pub fn tell_peer_fenced(&self, hint_bit: u32, futex_bit: u32) {
        let Some(peer) = self.peer() else { return };
        let want = peer.want.load(Acquire);
        let order = if hint_bit & WANT_RX != 0 { WANT_ORDER } else { 0 };
        if want & (hint_bit | futex_bit | order) != 0 {
            self.tell_peer_slow(peer, want, hint_bit, futex_bit);
        }
    }

    /// Bytes that a program has sent were published for the peer: as [`Conn::tell_peer`], but what goes to another
    /// host may gather for a moment.
    #[inline]
    pub fn tell_sent(&self) {
        match self.remote() {
            Some(r) => {
                full_fence();
                r.sent(self.slot.load(Relaxed));
            }
            None => self.tell_peer(WANT_RX, FUTEX_RX),
        }
    }

    /// Bytes were taken out of the ring: as [`Conn::tell_peer`] of room, but what goes to another host is told where it is
    /// worth it, without a look at what the mirror says, which is always that it is to be told.
    #[inline]
    pub fn tell_read(&self) {
        full_fence();
        self.tell_read_fenced();
    }

    /// The same behind a full fence.
    #[inline]
    pub fn tell_read_fenced(&self) {
        match (self.remote(), self.own(), self.peer()) {
            (Some(r), Some(own), Some(_)) => {
                let slot = self.slot.load(Relaxed);
                if r.is_due(slot, own.consumed.load(SeqCst)) {
                    r.flush(slot);
                }
            }
            _ => self.tell_peer_fenced(WANT_TX, FUTEX_TX),
        }
    }

    #[cold]
    #[inline(never)]
    fn tell_peer_slow(&self, peer: &Slot, want: u32, hint_bit: u32, futex_bit: u32) {
        chaos::stumble();
        if self.is_foreign() {
            return;
        }
        if let Some(r) = self.remote() {
            let slot = self.slot.load(Relaxed);
            let only_read = hint_bit == WANT_TX && futex_bit == FUTEX_TX;
            let consumed = || self.own().map_or(0, |o| o.consumed.load(SeqCst));
            if !only_read || r.is_due(slot, consumed()) {
                r.flush(slot);
            }
            return;
        }
        // SAFETY: links are never freed while a connection has one.
        let Some(link) = (unsafe { self.link.load(Acquire).as_ref() }) else { return };
        if want & WANT_ORDER != 0 && hint_bit & WANT_RX != 0 {
            self.tell_order(want);
        }
        let due = hint_bit != WANT_TX && futex_bit != FUTEX_TX || self.reached_goal(peer);
        if !due {
            return;
        }
        if want & futex_bit != 0 {
            link.wake_peer(self.peer_slot.load(Relaxed));
        }
        if want & hint_bit != 0 {
            let seq = want >> WANT_SHIFT;
            // One hint for each wish; both directions share the counter.
            if self.hinted.swap(seq.wrapping_add(1), AcqRel) != seq.wrapping_add(1) {
                link.hint_peer(peer.bell.load(Relaxed), self.peer_slot.load(Relaxed));
            }
        }
    }

    /// Whether the peer, in this process, tells when there is something to read.
    pub fn knows_order(&self) -> bool {
        self.own().is_some_and(|o| o.want.load(Relaxed) & WANT_ORDER != 0)
    }

    /// Wants to be told when there is something new to read from here on.
    pub fn renew_order(&self) {
        if let Some(own) = self.own() {
            own.want.fetch_add(1 << WANT_SHIFT, SeqCst);
        }
    }

    /// Says when the peer came to have something to read after it has looked last. As in the kernel, where an item stays on
    /// the list until somebody asks for events, it may have read that by then, and more may have come.
    fn tell_order(&self, want: u32) {
        let seq = (want >> WANT_SHIFT).wrapping_add(1);
        if let Some(own) = self.own().filter(|_| self.ordered.swap(seq, AcqRel) != seq) {
            own.order.store(crate::epoll::next_order(), Release);
        }
    }

    /// Has the peer's background thread look at the connection.
    pub fn hint_peer(&self) {
        // SAFETY: links are never freed.
        let Some(link) = (unsafe { self.link.load(Acquire).as_ref() }) else { return };
        if self.peer().is_some() && link.remote().is_none() {
            link.hint_peer(0, self.peer_slot.load(Relaxed));
        }
    }

    fn reached_goal(&self, peer: &Slot) -> bool {
        self.own().is_some_and(|o| o.consumed.load(Relaxed) >= peer.tx_goal.load(Relaxed))
    }

    /// Something has changed here: everybody in this process who waits for this connection looks again.
    pub fn notify(&self) {
        self.notify_waiting();
        self.notify_watchers();
    }

    /// The same of one that is managed, where the caller has published what there is to see: whoever begins to watch it looks
    /// for himself.
    #[inline(always)]
    pub fn notify_watched(&self) {
        self.notify_waiting();
        // After the change of the epoch, which stands between what was published and this look.
        if self.local().watchers.load(SeqCst) > 0 {
            self.notify_watchers();
        }
    }

    /// What sets and threads in `poll` are told.
    #[inline(never)]
    fn notify_watchers(&self) {
        let local = self.local();
        let _g = local.lock.lock();
        // SAFETY: guarded by `local.lock`; sets are never freed, waiters unregister under the lock.
        unsafe {
            for (set, fd) in (*local.items.get()).iter() {
                (**set).push_ready(*fd, self);
            }
            for w in (*local.waiters.get()).iter() {
                (**w).ring();
            }
        }
    }

    /// What threads in blocking calls are told.
    #[inline(always)]
    fn notify_waiting(&self) {
        self.epoch.fetch_add(1, SeqCst);
        let local = self.local();
        // A process that visits it sleeps on the same word.
        let sleepers = local.fut_rx.load(SeqCst) + local.fut_tx.load(SeqCst);
        if sleepers > 0 && sleepers > crate::remote::rouse(self) || self.visited.load(SeqCst) {
            futex_wake(&self.epoch, i32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that looks at a set names its bell to the peer; meanwhile the connection has got to another set.
    #[test]
    fn a_bell_is_named_by_who_still_waits_there() {
        const K: u32 = 5;
        let [l, _peer] = crate::link::tests::pair();
        let l: &'static Link = Box::leak(Box::new(l));
        l.bells_known.fetch_or(1 << K, SeqCst);
        let slot = l.side.alloc_slot().unwrap();
        let conn = crate::arena::alloc().unwrap();
        conn.attach(Some(l), slot, l.side.slot(slot));
        let bell = || conn.own().unwrap().bell.load(Relaxed);
        let seats = conn.local().seats.load(SeqCst);
        conn.watcher_added();
        assert_eq!(bell(), 0);
        let mine = conn.local().seats.load(SeqCst);
        assert_ne!(mine, seats);
        conn.arm_at(WANT_RX, K, mine);
        assert_eq!(bell(), K, "one waits, at this bell");
        // It goes to another set, and the thread comes late.
        conn.local().watchers_left(1);
        conn.watcher_added();
        conn.arm_at(WANT_RX, K, mine);
        assert_eq!(bell(), 0, "the background thread tells whoever it is");
        conn.local().watchers_left(1);
        conn.attach(None, 0, core::ptr::null());
        crate::arena::free(conn);
    }
}
