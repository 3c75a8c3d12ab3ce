//! The usual write, made short: a little that is sent on a link where nothing waits and nothing else is to be said.
//!
//! As in `io::steady` nothing is decided here. What is not so plainly the case is for [`Remote::sent`], which looks at
//! everything anew: this way does all that there is to do, or nothing. What a write looks like was found out by the one
//! before it (`Next`).

use super::*;
use crate::layout::{FUTEX_TX, WANT_TX};
use crate::provider::{INLINE, SIGNALED, SOLICITED};
use crate::sync::Held;
use crate::sys::keeping;
use crate::thread::Within;
use libc::c_int;

impl Remote {
    /// The program has sent something by our slot `slot`, whose partner in the mirror is `peer`.
    ///
    /// No lock of the connection is held, so it may have left the link, and come to another: what is sent is the slot's,
    /// whoever has that by now.
    #[inline(never)]
    pub(crate) fn sent_shortly(&self, slot: u32, peer: Option<&Slot>, by: Within) {
        let place = slot as usize % SLOTS;
        let own = self.own(slot);
        let held = peer.and_then(|peer| Some((peer, self.post_lock.try_hold(by)?)));
        let Some((peer, g)) = held else { return self.sent_otherwise(slot) };
        // SAFETY: guarded by `post_lock`.
        let p = unsafe { &mut *self.post.get() };
        if !self.prepare::<true>(p, place, own, peer) {
            return self.sent_in_a_row(slot, peer, g);
        }
        if self.give(&raw mut p.copied[place].next.request) != 0 {
            self.post_failed();
        }
        g.unlock_and_fence();
        // Who came meanwhile has left it to us.
        self.work_left();
    }

    /// The same of what is to give a completion, or goes by a device that is not quiet.
    #[cold]
    #[inline(never)]
    fn sent_in_a_row(&self, slot: u32, peer: &Slot, g: Held) {
        let place = slot as usize % SLOTS;
        // SAFETY: guarded by `post_lock`, which `g` holds. (No parameter: it must not outlast that.)
        let p = unsafe { &mut *self.post.get() };
        let does = self.prepare::<false>(p, place, self.own(slot), peer);
        if does {
            let request = &raw mut p.copied[place].next.request;
            if self.direct.quiet == 0 {
                if keeping(|| self.give(request)) != 0 {
                    self.fail();
                }
            } else if self.give(request) != 0 {
                self.post_failed();
            }
        }
        g.unlock_and_fence();
        self.work_left();
        if !does {
            self.sent_otherwise(slot);
        }
    }

    #[cold]
    #[inline(never)]
    fn sent_otherwise(&self, slot: u32) {
        if !self.is_ours() || !self.is_gathered(slot) {
            self.sent(slot);
        }
    }

    /// Gives the device a request that was prepared under `post_lock`, which is still held. 0: it has taken it.
    #[inline(always)]
    fn give(&self, request: *mut Request) -> c_int {
        // SAFETY: the queue pair is there as long as `limit` is, so it was when this was prepared; the request is valid, and its
        // bytes lie in registered memory.
        unsafe { (*self.direct.post)(self.direct.qp, request, self.bad.get()) }
    }

    /// A device that is quiet has refused a request.
    #[cold]
    #[inline(never)]
    fn post_failed(&self) {
        (self.direct.restore)();
        self.fail();
    }

    /// Makes the next request of a slot what it is to be. Under `post_lock`. `EXCHANGE`: only if it is exchanged one by one, or
    /// follows others that nothing gathers behind, without a completion, by a device that is quiet, which takes fewer looks.
    #[inline(always)]
    fn prepare<const EXCHANGE: bool>(&self, p: &mut Post, slot: usize, own: &Slot, peer: &Slot) -> bool {
        let c = &mut p.copied[slot];
        // The flags first, as in `copy`. Whoever begins to wait, or has read much, comes by himself.
        let more = (own.flags.load(Acquire) ^ c.flags)
            | (own.want.load(Relaxed) & (WANT_TX | FUTEX_TX))
            | (peer.want.load(Relaxed) & FUTEX_TX);
        let produced = own.produced.load(Acquire);
        let more = more | (own.geo_count.load(Acquire) ^ c.geos);
        let len = produced.wrapping_sub(c.posted);
        let most = if EXCHANGE { self.shortest } else { self.short };
        if more != 0 || produced > c.next.end || len.wrapping_sub(1) >= most || p.posted >= p.limit {
            return false;
        }
        let heard = peer.produced.load(Relaxed);
        if EXCHANGE {
            if heard != c.heard {
                if !c.flight.exchange() {
                    return false;
                }
                c.heard = heard;
            } else if !c.flight.follow() {
                return false;
            }
            c.next.request.send_flags = SOLICITED | INLINE;
            p.silent -= 1;
            if p.silent == 0 {
                // Nothing is going to gather behind it: see `posted_at`.
                c.next.request.send_flags |= SIGNALED;
                p.silent = self.silent;
                p.signaled += 1;
            }
        } else if !self.prepare_flight(p, slot, heard, len) {
            return false;
        }
        let c = &mut p.copied[slot];
        let consumed = own.consumed.load(Relaxed);
        if consumed.wrapping_sub(c.next.read) >= imm::UNIT {
            self.say_read(c, slot, peer, consumed);
        }
        p.whose[p.posted as usize % WRITES] = slot as u16;
        p.posted += 1;
        c.next.request.wr_id = p.posted;
        c.posted = produced;
        self.posted_to[slot].store(produced, Relaxed);
        // Behind the one before.
        let before = u64::from(c.next.piece.length);
        c.next.request.remote_addr += before;
        c.next.piece.addr += before;
        c.next.piece.length = len as u32;
        true
    }

    /// The part of it that says whether the write may go, and is to give a completion.
    #[inline(always)]
    fn prepare_flight(&self, p: &mut Post, slot: usize, heard: u64, len: u64) -> bool {
        let c = &mut p.copied[slot];
        if heard != c.heard {
            c.heard = heard;
            c.flight.answered();
        }
        if !c.flight.takes(true) {
            return false;
        }
        let signal = c.flight.post(true, len, c.next.piece.length.into());
        p.silent -= 1;
        let mut flags = SOLICITED;
        if len as u32 <= self.inline {
            flags |= INLINE;
        }
        if signal || p.silent == 0 {
            flags |= SIGNALED;
            p.silent = self.silent;
            p.signaled += 1;
            // Behind it others may gather.
            self.posted_at.store(crate::sync::now_ns(), Relaxed);
        }
        c.next.request.send_flags = flags;
        true
    }

    /// The next write says that we have read up to `consumed`.
    #[inline(always)]
    fn say_read(&self, c: &mut Copied, slot: usize, peer: &Slot, consumed: u64) {
        c.next.read = consumed / imm::UNIT * imm::UNIT;
        c.next.request.imm_data = imm::data(slot as u32, consumed).to_be();
        c.consumed = c.consumed.max(c.next.read);
        self.said(slot as u32, Some(peer), c.consumed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::fake::{self, half, Sent, DEVICE};
    use crate::remote::Half;
    use crate::thread::Critical;

    const OURS: u32 = 3;
    const THEIRS: u32 = 8;
    const LOG2: u32 = 12;

    /// A connection that has moved to the link, and what has come of it by now.
    struct World {
        half: Half,
        arrived: u64,
        writes: u64,
        /// Writes that came the short way.
        short: u64,
    }

    impl World {
        fn new() -> World {
            let half = half();
            let mut w = World { half, arrived: 0, writes: 0, short: 0 };
            let r = w.remote();
            assert!(r.make_timer().is_some());
            let own = r.own(OURS);
            own.geo[0].page.store((BLOCKS_OFFSET >> 12) as u32, SeqCst);
            own.geo[0].log2.store(LOG2, SeqCst);
            own.geo_count.store(1, SeqCst);
            r.partners[OURS as usize].store(THEIRS + 1, SeqCst);
            // The note of where the ring lies goes before the first bytes.
            w.send(10);
            while w.does() {}
            r.poll(false);
            // Which is answered.
            r.peer(THEIRS).produced.store(10, SeqCst);
            w
        }

        fn remote(&self) -> &'static Remote {
            // SAFETY: it lasts until `ends`, behind which no test uses it.
            unsafe { &*self.half.remote }
        }

        /// The program sends `n` bytes, for which there is room.
        fn send(&mut self, n: u64) {
            let r = self.remote();
            r.own(OURS).produced.fetch_add(n, SeqCst);
            let critical = Critical::new();
            r.sent_shortly(OURS, Some(r.peer(THEIRS)), critical.within());
            critical.end();
        }

        /// The device does a write, which has to be the next of the stream, and the peer takes it.
        fn does(&mut self) -> bool {
            let Some(sent) = fake::does() else { return false };
            self.writes += 1;
            self.short += u64::from(sent.short);
            let r = self.remote();
            assert_eq!(sent.id, self.writes);
            assert_eq!(sent.from - r.seg as u64, sent.to);
            if sent.imm >> 30 == imm::DATA {
                self.arrives(sent);
            }
            // The peer has receives again.
            r.granted.fetch_add(1, SeqCst);
            r.moved.store(true, SeqCst);
            true
        }

        fn arrives(&mut self, sent: Sent) {
            let (r, cap) = (self.remote(), 1 << LOG2);
            assert_eq!(sent.to, BLOCKS_OFFSET as u64 + self.arrived % cap);
            let len = u64::from(sent.len);
            assert!(len > 0 && self.arrived % cap + len <= cap && (len <= 100 || sent.flags & INLINE == 0));
            assert_eq!(sent.imm >> 18, OURS);
            assert!(u64::from(sent.imm & 0x3ffff) <= r.own(OURS).consumed.load(SeqCst) / imm::UNIT);
            self.arrived += len;
            r.peer(THEIRS).consumed.store(self.arrived, SeqCst);
        }

        fn room(&self) -> u64 {
            (1 << LOG2) - (self.remote().own(OURS).produced.load(SeqCst) - self.arrived)
        }

        /// All arrives, if somebody looks for what is done.
        fn ends(mut self) {
            let r = self.remote();
            for _ in 0..100 {
                while self.does() {}
                r.poll(false);
            }
            assert_eq!(self.arrived, r.own(OURS).produced.load(SeqCst));
            assert!(r.waiting.is_empty() && r.pending.is_empty() && !r.failed.load(SeqCst));
            self.half.destroy(&DEVICE);
        }
    }

    /// Sends of all kinds between answers, completions, looks and reads: what comes is the stream, and nothing waits without
    /// being told.
    #[test]
    fn what_is_sent_arrives_once_and_in_order() {
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = |n: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % n
        };
        let mut short = 0;
        for _ in 0..200 {
            let mut w = World::new();
            let r = w.remote();
            let slow = next(2) == 0;
            for _ in 0..300 {
                match next(8) {
                    0..=3 => {
                        let n = [1, 64, 100, 101, 700][next(5) as usize].min(w.room());
                        if slow {
                            r.posted_at.store(0, SeqCst);
                        }
                        if n > 0 {
                            w.send(n);
                        }
                    }
                    4 => _ = r.peer(THEIRS).produced.fetch_add(64, SeqCst),
                    5 => _ = w.does(),
                    6 => r.own(OURS).consumed.store(r.peer(THEIRS).produced.load(SeqCst), SeqCst),
                    _ => r.poll(false),
                }
                let left = r.unsent(OURS) > 0;
                assert!(!left || r.waiting.has(OURS) && fake::will_tell(), "nobody sends the rest");
            }
            short += w.short;
            w.ends();
        }
        assert!(short > 1000, "{short} writes went the short way");
    }

    /// Who sends faster than the device gathers behind two writes.
    #[test]
    fn who_sends_in_a_row_gathers() {
        let mut w = World::new();
        let r = w.remote();
        for _ in 0..40 {
            r.posted_at.store(crate::sync::now_ns() + 1_000_000_000, SeqCst);
            w.send(64);
        }
        assert_eq!(r.unsent(OURS), 38 * 64);
        assert!(r.waiting.has(OURS));
        w.ends();
    }
}
