//! The usual write, made short: a little that is sent on a link where nothing waits and nothing else is to be said.
//!
//! As in `io::steady` nothing is decided here. What is not so plainly the case is for [`Remote::sent`], which looks at
//! everything anew: this way does all that there is to do, or nothing. What a write looks like was found out by the one
//! before it (`Next`).

use super::*;
use crate::layout::{FUTEX_TX, WANT_TX};
use crate::provider::{INLINE, SIGNALED, SOLICITED};
use crate::sys::keeping;
use crate::thread::Within;

impl Remote {
    /// The program has sent something by `conn`, whose link this is.
    #[inline(never)]
    pub(crate) fn sent_shortly(&self, conn: &Conn, by: Within) {
        if !self.send_shortly::<true>(conn, by) {
            self.sent_in_a_row(conn, by);
        }
    }

    #[cold]
    #[inline(never)]
    fn sent_in_a_row(&self, conn: &Conn, by: Within) {
        if !self.send_shortly::<false>(conn, by) {
            // Who came while this way was tried has left it to us, and what is gathered next may look at nothing.
            self.work_left();
            self.sent(conn.slot.load(Relaxed));
        }
    }

    /// `EXCHANGE`: only what is exchanged one by one, without a completion, by a device that is quiet: it takes fewer looks.
    #[inline(always)]
    fn send_shortly<const EXCHANGE: bool>(&self, conn: &Conn, by: Within) -> bool {
        let slot = conn.slot.load(Relaxed) as usize % SLOTS;
        // No lock of the connection is held, so it may have left the link, and come to another: what is sent is the slot's,
        // whoever has that by now.
        let own = self.own(slot as u32);
        let Some(peer) = conn.peer_known() else { return false };
        let Some(g) = self.post_lock.try_hold(by) else { return false };
        // SAFETY: guarded by `post_lock`.
        let p = unsafe { &mut *self.post.get() };
        if !self.prepare::<EXCHANGE>(p, slot, own, peer) {
            g.unlock_and_fence();
            return false;
        }
        let request = &raw mut p.copied[slot].next.request;
        // SAFETY: the queue pair is there as long as `limit` is; the request is valid, and its bytes lie in registered memory.
        let post = || unsafe { (*self.direct.post)(self.direct.qp, request, self.bad.get()) };
        let failed = match EXCHANGE {
            true => post() != 0 && self.post_failed(),
            false if self.direct.quiet != 0 => post() != 0 && self.post_failed(),
            false => keeping(post) != 0,
        };
        if failed {
            self.fail();
        }
        g.unlock_and_fence();
        // Who came meanwhile has left it to us.
        self.work_left();
        true
    }

    /// A device that is quiet has refused a request.
    #[cold]
    #[inline(never)]
    fn post_failed(&self) -> bool {
        (self.direct.restore)();
        true
    }

    /// Makes the next request of a slot what it is to be. Under `post_lock`.
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
            if heard == c.heard || !c.flight.exchange() {
                return false;
            }
            c.heard = heard;
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
        let signal = c.flight.post(len);
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
