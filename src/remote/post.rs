//! Sending: what has changed in our slots goes to the peer's mirror.

use super::*;
use crate::provider::{INLINE, SIGNALED, SOLICITED, WRITE_WITH_IMM};
use core::mem::MaybeUninit;

/// Writes that are given to the device together.
const BATCH: usize = 8;

/// Writes that are about to be posted.
struct Batch {
    list: [MaybeUninit<Write>; BATCH],
    n: usize,
    /// There are bytes of connections among them, with a completion.
    data: bool,
}

impl Batch {
    fn new() -> Batch {
        Batch { list: [const { MaybeUninit::uninit() }; BATCH], n: 0, data: false }
    }
}

impl Remote {
    /// The program has sent something by our slot `slot`. A write costs much more than a copy, so while a few are
    /// under way as far as is known, what is sent gathers until one of them is done; and for a moment after a write
    /// nobody looks for that, unless so much has gathered that it is worth a write. Whoever waits, receives or
    /// closes looks at once; the timer is for who does not.
    pub fn sent(&self, slot: u32) {
        if !self.is_ours() {
            return;
        }
        if !self.waiting.has(slot) {
            if !self.send_at_once(slot) {
                self.pending.add(slot);
                self.work();
            }
            if self.waiting.is_empty() {
                return;
            }
        }
        if self.is_gathered(slot) {
            return;
        }
        if self.waiting.has(slot) && self.unsent(slot) >= self.gather.bytes {
            self.pending.add(slot);
            self.work();
        }
        self.flush(slot);
    }

    /// Whether what the program has sent by our slot `slot` can be left for later: it waits, little has come together, and
    /// this is a moment in which nobody looks.
    #[inline(always)]
    pub(super) fn is_gathered(&self, slot: u32) -> bool {
        self.waiting.has(slot) && self.unsent(slot) < self.gather.bytes && self.may_gather()
    }

    /// Sends what is new of a slot where that is all there is to do, and nobody is at it. False: it did nothing.
    #[inline]
    fn send_at_once(&self, slot: u32) -> bool {
        if self.has_work() {
            return false;
        }
        let Some(g) = self.post_lock.try_lock() else { return false };
        let live = self.live().is_some();
        if live {
            // SAFETY: guarded by `post_lock`.
            let p = unsafe { &mut *self.post.get() };
            let mut batch = Batch::new();
            if !self.copy(p, &mut batch, slot) {
                self.waiting.add(slot);
            }
            self.submit(p, &mut batch);
            self.open_short_way(p);
        }
        drop(g);
        // Who came meanwhile has left it to us; and the writes for which the slot was refused may be done by now.
        crate::sync::full_fence();
        self.work();
        live
    }

    /// Bytes in the ring of our slot `slot` that are not given to the device yet.
    pub fn unsent(&self, slot: u32) -> u64 {
        self.own(slot).produced.load(Relaxed).wrapping_sub(self.posted_to[slot as usize % SLOTS].load(Relaxed))
    }

    fn may_gather(&self) -> bool {
        crate::sync::now_ns() - self.posted_at.load(Relaxed) <= self.gather.quiet_ns
            && (self.quiet.load(SeqCst) || self.set_timer())
    }

    #[cold]
    fn set_timer(&self) -> bool {
        let fd = self.timer.load(SeqCst);
        if fd < 0 {
            return false;
        }
        if self.quiet.swap(true, SeqCst) {
            return true;
        }
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let at = libc::itimerspec { it_interval: none, it_value: crate::sync::timespec_of(self.gather.look_ns) };
        // SAFETY: `at` is readable, and the fd the link's until nobody uses it.
        unsafe { crate::sys::sys!(libc::SYS_timerfd_settime, fd, 0, &at, 0) }.is_ok()
    }

    /// The timer may have rung. Only for the background thread.
    pub fn end_quiet(&self) {
        // Whoever has gathered may have found it set, and relies on this look.
        self.quiet.store(false, SeqCst);
        if !self.waiting.is_empty() {
            self.look_for_done();
        }
    }

    /// Something waits for writes to be done: perhaps they are by now, or somebody is to hear of it.
    fn look_for_done(&self) {
        self.poll(false);
        if !self.waiting.is_empty() && super::guard::is_watched() && self.arm(true) {
            self.poll(true);
        }
    }

    /// Something of our slot `slot` may have to be told to the peer. Never waits.
    pub fn flush(&self, slot: u32) {
        if !self.is_ours() {
            return;
        }
        // What waits goes when a write that is under way is done: with all that there was by the time at which it was last seen
        // to wait.
        crate::sync::full_fence();
        if !self.waiting.has(slot) {
            self.pending.add(slot);
            self.work();
        }
        if !self.waiting.is_empty() {
            self.look_for_done();
        }
    }

    /// Sends what is pending, unless another thread does so. Whoever has held `post_lock` calls it after letting go,
    /// because of those who could not have it meanwhile.
    #[inline]
    pub(super) fn work(&self) {
        if self.has_work() {
            self.work_now();
        }
    }

    #[inline]
    fn has_work(&self) -> bool {
        !self.pending.is_empty() || self.moved.load(SeqCst) || self.owes_receives()
    }

    fn work_now(&self) {
        while self.has_work() {
            let Some(g) = self.take_post_lock() else { return };
            let live = self.live().is_some();
            if live {
                self.drain();
            }
            drop(g);
            // Who came meanwhile has left it to us.
            crate::sync::full_fence();
            if !live || (self.pending.is_empty() && !self.moved.load(SeqCst)) {
                return;
            }
        }
    }

    /// `post_lock`, or nothing: then whoever has it looks, after letting go, whether there is work.
    fn take_post_lock(&self) -> Option<crate::sync::Guard<'_>> {
        self.post_lock.try_lock().or_else(|| {
            self.left.store(true, SeqCst);
            // It may have been let go just before.
            self.post_lock.try_lock()
        })
    }

    /// As [`Remote::work`], for who had the lock for a moment in which nothing else has changed than what others left.
    #[inline(always)]
    pub(super) fn work_left(&self) {
        if self.left.load(SeqCst) {
            self.left.store(false, SeqCst);
            self.work();
        }
    }

    fn owes_receives(&self) -> bool {
        self.received.load(Relaxed) - self.told.load(Relaxed) >= TELL_AFTER
    }

    /// Under `post_lock`.
    fn drain(&self) {
        // SAFETY: guarded by `post_lock`.
        let p = unsafe { &mut *self.post.get() };
        if self.moved.swap(false, SeqCst) {
            let done = self.done.load(Acquire);
            while p.done < done {
                let whose = p.whose[p.done as usize % WRITES];
                if let Some(c) = p.copied.get_mut(usize::from(whose)) {
                    c.flight.done();
                }
                p.done += 1;
            }
            self.waiting.take(|s| self.pending.add(s));
        }
        let mut batch = Batch::new();
        self.pending.take(|slot| {
            if !self.copy(p, &mut batch, slot) {
                self.waiting.add(slot);
            }
        });
        if self.owes_receives() && self.has_room(p, &batch, 0) {
            self.note(p, &mut batch, Note { kind: note::RECEIVED, ..Note::default() });
        }
        self.submit(p, &mut batch);
        self.open_short_way(p);
        if self.quiet.load(Relaxed) && self.waiting.is_empty() {
            // Whoever gathers next sets the timer anew; until then it may ring for nothing.
            self.quiet.store(false, SeqCst);
        }
    }

    /// Whether one more write can be posted, and `keep` receives of the peer's are left then.
    fn has_room(&self, p: &Post, b: &Batch, keep: u64) -> bool {
        self.has_room_behind(p.posted + b.n as u64, p.done, keep)
    }

    /// The same, behind so many writes, of which so many are done.
    #[inline]
    fn has_room_behind(&self, posted: u64, done: u64, keep: u64) -> bool {
        posted - done + 1 < self.writes && posted - self.granted.load(Acquire) + keep < u64::from(RECEIVES)
    }

    /// What [`Remote::sent_shortly`] may do from now on. To be called by whoever changes what waits.
    fn open_short_way(&self, p: &mut Post) {
        // As `has_room_behind` says, whose bounds only rise.
        let room = (p.done + self.writes - 1).min(self.granted.load(Acquire) + u64::from(RECEIVES) - RESERVE);
        p.limit = if self.waiting.is_empty() { room } else { 0 };
    }

    /// Copies what is new of a slot. False: not all of it could be.
    fn copy(&self, p: &mut Post, b: &mut Batch, slot: u32) -> bool {
        let slot = slot % SLOTS as u32;
        let (own, peer) = (self.own(slot), self.partner(slot));
        loop {
            let (posted, done) = (p.posted + b.n as u64, p.done);
            // In this order: what the flags say follows all bytes that were produced before.
            let flags = own.flags.load(Acquire);
            let produced = own.produced.load(Acquire);
            let geos = own.geo_count.load(Acquire);
            let c = &mut p.copied[slot as usize];
            if c.posted < produced {
                let heard = peer.map_or(0, |q| q.produced.load(Relaxed));
                if heard != c.heard {
                    c.heard = heard;
                    c.flight.answered();
                }
                let few = produced - c.posted < self.gather.bytes;
                if !c.flight.takes(few) {
                    if few {
                        c.flight.hold();
                    }
                    return false;
                }
                if !self.has_room_behind(posted, done, RESERVE) {
                    return false;
                }
                let next = &own.geo[c.geos as usize % GEOS];
                if c.geos != geos && next.start.load(Relaxed) == c.posted {
                    c.start = c.posted;
                    c.page = next.page.load(Relaxed);
                    c.log2 = next.log2.load(Relaxed);
                    c.geos = c.geos.wrapping_add(1);
                    c.next.end = 0;
                    let n =
                        Note { kind: note::GEO, slot, start: c.start, page: c.page, log2: c.log2, ..Note::default() };
                    self.note(p, b, n);
                    continue;
                }
                let end = if c.geos != geos { next.start.load(Relaxed).min(produced) } else { produced };
                let cap = 1u64 << c.log2;
                let at = (c.posted - c.start) & (cap - 1);
                let place = (u64::from(c.page) << 12) + at;
                let chunk = place as usize / CHUNK;
                let len = (end - c.posted).min(cap - at).min(((chunk + 1) * CHUNK) as u64 - place).min(PIECE);
                let consumed = own.consumed.load(Relaxed);
                let imm = imm::data(slot, consumed);
                c.posted += len;
                // Rounded down, so a little of it may be said again.
                c.consumed = c.consumed.max(consumed / imm::UNIT * imm::UNIT);
                let said = c.consumed;
                let signal = c.flight.post(few, len, c.next.piece.length.into());
                self.posted_to[slot as usize].store(c.posted, Relaxed);
                self.said(slot, peer, said);
                let Some((lkey, rkey)) = self.keys(chunk) else {
                    // Blocks are taken from registered pieces only.
                    self.fail();
                    return true;
                };
                let w = Write {
                    from: self.seg as u64 + place,
                    to: self.there.load(Relaxed) + place,
                    lkey,
                    rkey,
                    len: len as u32,
                    imm,
                    ..Write::default()
                };
                let number = self.add(p, b, w, slot as u16, signal);
                let c = &mut p.copied[slot as usize];
                c.last = number;
                // What follows in the same piece of the ring and of memory goes the short way.
                c.next = Next {
                    end: c.posted - len + (cap - at).min(((chunk + 1) * CHUNK) as u64 - place),
                    read: consumed / imm::UNIT * imm::UNIT,
                    request: Request {
                        sg_list: &raw mut c.next.piece,
                        num_sge: 1,
                        opcode: WRITE_WITH_IMM,
                        imm_data: imm.to_be(),
                        remote_addr: w.to,
                        rkey,
                        ..Next::default().request
                    },
                    piece: Piece { addr: w.from, length: len as u32, lkey },
                };
                Self::satisfied(peer, said);
                continue;
            }
            let wants = own.want.load(Acquire) & (WANT_TX | FUTEX_TX) != 0;
            let goal = if wants { own.tx_goal.load(Relaxed) } else { c.goal };
            let consumed = own.consumed.load(Acquire);
            let asks = goal != c.goal && peer.is_some_and(|q| goal > q.consumed.load(Relaxed));
            let owes = consumed > c.consumed && self.is_due_to(slot, peer, consumed);
            // After the flags: where a mark begins is written before they say that it does.
            let mark_at = own.mark_at.load(Acquire);
            if flags == c.flags && mark_at == c.mark_at && !asks && !owes {
                return true;
            }
            if !self.has_room_behind(posted, done, RESERVE) {
                return false;
            }
            c.flags = flags;
            c.mark_at = mark_at;
            c.consumed = consumed;
            c.goal = goal;
            self.said(slot, peer, consumed);
            let said = if asks { goal } else { u64::MAX };
            let n = Note { kind: note::SLOT, slot, flags, consumed, goal: said, mark_at, ..Note::default() };
            p.copied[slot as usize].last = self.note(p, b, n);
            Self::satisfied(peer, consumed);
        }
    }

    fn keys(&self, chunk: usize) -> Option<(u32, u32)> {
        let (l, r) = (self.lkeys[chunk].load(Acquire), self.rkeys[chunk].load(Acquire));
        (l != 0 && r != 0).then_some((l as u32, r as u32))
    }

    /// Writes a note. There must be room.
    fn note(&self, p: &mut Post, b: &mut Batch, n: Note) -> u64 {
        let received = self.received.load(Acquire);
        self.told.store(received, Relaxed);
        self.put_note(p, b, &Note { received, ..n }, n.flags & CLOSED != 0)
    }

    fn put_note<T: Copy>(&self, p: &mut Post, b: &mut Batch, n: &T, signal: bool) -> u64 {
        let i = p.notes % u64::from(RECEIVES);
        p.notes += 1;
        let place = (NOTES_OFFSET + i as usize * NOTE_BYTES) as u64;
        // SAFETY: the place lies in the segment's head. What lay there has been read by the peer, because
        // no more notes are under way than it has receives.
        unsafe { (self.seg.add(place as usize) as *mut T).write(*n) };
        let Some((lkey, rkey)) = self.keys(HEAD) else { return 0 };
        let w = Write {
            from: self.seg as u64 + place,
            to: self.there.load(Relaxed) + place,
            lkey,
            rkey,
            len: size_of::<T>() as u32,
            imm: imm::NOTE << 30 | i as u32,
            ..Write::default()
        };
        self.add(p, b, w, u16::MAX, signal)
    }

    /// Returns the write's number, from 1 on.
    #[inline]
    fn add(&self, p: &mut Post, b: &mut Batch, mut w: Write, whose: u16, signal: bool) -> u64 {
        if b.n == BATCH {
            self.submit(p, b);
        }
        w.flags = SOLICITED;
        if w.len <= self.inline {
            w.flags |= INLINE;
        }
        p.silent -= 1;
        if signal || p.silent == 0 {
            w.flags |= SIGNALED;
            p.silent = self.silent;
            p.signaled += 1;
        }
        let number = p.posted + b.n as u64;
        p.whose[number as usize % WRITES] = whose;
        w.id = number + 1;
        b.list[b.n].write(w);
        b.n += 1;
        // Only behind those does anything gather.
        b.data |= whose != u16::MAX && w.flags & SIGNALED != 0;
        w.id
    }

    fn submit(&self, p: &mut Post, b: &mut Batch) {
        if b.n == 0 {
            return;
        }
        p.posted += b.n as u64;
        p.more += b.n as u64 - 1;
        if let Some(id) = self.live() {
            let keep = crate::sys::Kept::new();
            // SAFETY: live under `post_lock`; `n` are there, and lie in registered memory.
            if unsafe { (self.api().post)(id, b.list.as_ptr().cast(), b.n as u32) } != 0 {
                self.fail();
            }
            drop(keep);
        }
        if core::mem::take(&mut b.data) {
            self.posted_at.store(crate::sync::now_ns(), Relaxed);
        }
        b.n = 0;
    }

    /// The peer was told that we have read up to `consumed`.
    pub(super) fn said(&self, slot: u32, peer: Option<&Slot>, consumed: u64) {
        // Grows while the slot has this life: who reads an older one tells too early, which does no harm.
        self.tell_at[slot as usize % SLOTS].store(consumed + Self::half(peer), Release);
    }

    /// The mirror's slot of the connection that has our slot `slot`.
    #[inline]
    pub(super) fn partner(&self, slot: u32) -> Option<&Slot> {
        match self.partners[slot as usize % SLOTS].load(Acquire) {
            0 => None,
            n => Some(self.peer(n - 1)),
        }
    }

    /// Half of the peer's ring.
    fn half(peer: Option<&Slot>) -> u64 {
        let log2 = peer.map_or(12, |peer| {
            let last = peer.geo_count.load(Relaxed).wrapping_sub(1) as usize % GEOS;
            peer.geo[last].log2.load(Relaxed)
        });
        1 << log2.clamp(12, 27) >> 1
    }

    /// Whether the peer should hear that we have read up to `consumed`: it is half of its ring, or it
    /// sleeps until then.
    #[inline]
    pub fn is_due(&self, slot: u32, consumed: u64) -> bool {
        self.is_due_to(slot, self.partner(slot), consumed)
    }

    #[inline(always)]
    pub(crate) fn is_due_to(&self, slot: u32, peer: Option<&Slot>, consumed: u64) -> bool {
        consumed >= self.tell_at[slot as usize % SLOTS].load(SeqCst)
            || peer.is_some_and(|peer| peer.want.load(SeqCst) & FUTEX_TX != 0 && consumed >= peer.tx_goal.load(SeqCst))
    }

    /// The peer is being told of `consumed`: a sleeper that waits for it waits no more.
    #[inline]
    fn satisfied(peer: Option<&Slot>, consumed: u64) {
        let Some(peer) = peer else { return };
        if peer.want.load(SeqCst) & FUTEX_TX == 0 || consumed < peer.tx_goal.load(SeqCst) {
            return;
        }
        peer.want.fetch_and(!FUTEX_TX, SeqCst);
        if consumed < peer.tx_goal.load(SeqCst) {
            // Another wish came in between.
            peer.want.fetch_or(FUTEX_TX, SeqCst);
        }
    }

    /// Our slot `slot` begins a new life.
    pub fn renew(&self, slot: u32) {
        let g = self.post_lock.lock();
        // SAFETY: guarded by `post_lock`.
        let c = unsafe { &mut (&mut *self.post.get()).copied[slot as usize % SLOTS] };
        *c = Copied { flight: c.flight, ..Copied::default() };
        self.tell_at[slot as usize % SLOTS].store(0, SeqCst);
        self.posted_to[slot as usize % SLOTS].store(0, SeqCst);
        self.partners[slot as usize % SLOTS].store(0, SeqCst);
        drop(g);
        self.work();
    }

    /// Sends a message, if there is room. Only for the background thread.
    pub fn say(&self, m: &Msg) -> bool {
        let done = {
            let _g = self.post_lock.lock();
            // SAFETY: guarded by `post_lock`.
            let p = unsafe { &mut *self.post.get() };
            let mut b = Batch::new();
            if !self.has_room(p, &b, RESERVE) {
                false
            } else {
                let received = self.received.load(Acquire);
                self.told.store(received, Relaxed);
                self.put_note(p, &mut b, &Full { kind: note::MESSAGE, slot: 0, received, message: *m }, false);
                self.submit(p, &mut b);
                true
            }
        };
        // What others left while we had the lock.
        self.work();
        done
    }

    /// Whether all that was produced in `slot`, and said in its flags, has arrived at the peer. What nobody has told it is
    /// told: who waits for this has nothing else to say.
    pub fn has_delivered(&self, slot: u32) -> bool {
        let Some(g) = self.post_lock.try_lock() else { return false };
        // SAFETY: guarded by `post_lock`.
        let c = unsafe { (&*self.post.get()).copied[slot as usize % SLOTS] };
        drop(g);
        self.work();
        let own = self.own(slot);
        let told = c.posted == own.produced.load(Acquire) && c.flags == own.flags.load(Acquire);
        if !told {
            self.flush(slot);
        }
        // The number of the last write in the short way is in its request.
        told && self.done.load(Acquire) >= c.last.max(c.next.request.wr_id)
    }

    /// Nothing can be sent or received any more: the background thread ends the link.
    pub(super) fn fail(&self) {
        if !self.failed.swap(true, SeqCst) {
            crate::bell::ring(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::fake::{half, DEVICE};

    fn posted(r: &Remote) -> u64 {
        let _g = r.post_lock.lock();
        // SAFETY: guarded by `post_lock`.
        unsafe { (*r.post.get()).posted }
    }

    #[test]
    fn small_sends_gather_behind_writes_under_way() {
        let half = half();
        // SAFETY: as long as the half.
        let r = unsafe { &*half.remote };
        assert!(r.make_timer().is_some());
        let own = r.own(3);
        own.geo[0].page.store((BLOCKS_OFFSET >> 12) as u32, SeqCst);
        own.geo[0].log2.store(16, SeqCst);
        own.geo_count.store(1, SeqCst);
        let sent = |n: u64| {
            own.produced.fetch_add(n, SeqCst);
            r.posted_at.store(crate::sync::now_ns() + 1_000_000_000, SeqCst);
            r.sent(3);
            posted(r)
        };
        // With the note of where the ring lies.
        assert_eq!(sent(64), 2);
        assert_eq!(sent(64), 3);
        assert_eq!(sent(64), 3);
        assert_eq!(sent(64), 3);
        assert!(r.quiet.load(SeqCst) && r.waiting.has(3));
        assert_eq!(sent(r.gather.bytes), 4);
        assert_eq!(sent(64), 4);
        // One of them is done, and whoever receives looks.
        r.done.store(4, SeqCst);
        r.moved.store(true, SeqCst);
        r.work();
        assert_eq!(posted(r), 5);
        half.destroy(&DEVICE);
    }

    /// Who is answered each time gathers nothing, and costs few completions.
    #[test]
    fn an_answer_tells_that_a_write_is_done() {
        let half = half();
        // SAFETY: as long as the half.
        let r = unsafe { &*half.remote };
        let own = r.own(3);
        own.geo[0].page.store((BLOCKS_OFFSET >> 12) as u32, SeqCst);
        own.geo[0].log2.store(16, SeqCst);
        own.geo_count.store(1, SeqCst);
        r.partners[3].store(8 + 1, SeqCst);
        for i in 1..=64 {
            own.produced.fetch_add(64, SeqCst);
            r.sent(3);
            // With the note of where the ring lies.
            assert_eq!(posted(r), i + 1);
            r.peer(8).produced.fetch_add(64, SeqCst);
        }
        let g = r.post_lock.lock();
        // SAFETY: guarded by `post_lock`.
        let signaled = unsafe { (*r.post.get()).signaled };
        drop(g);
        assert!((1..=5).contains(&signaled), "{signaled}");
        half.destroy(&DEVICE);
    }

    /// Whoever asks whether all has arrived may have nothing else to say that would take along what is left.
    #[test]
    fn what_is_waited_for_is_told() {
        let half = half();
        // SAFETY: as long as the half.
        let r = unsafe { &*half.remote };
        assert!(r.has_delivered(3));
        r.own(3).flags.store(CLOSED, SeqCst);
        assert!(!r.has_delivered(3) && !r.has_delivered(3));
        assert_eq!(posted(r), 1);
        r.done.store(1, SeqCst);
        assert!(r.has_delivered(3));
        half.destroy(&DEVICE);
    }

    /// Who cannot have `post_lock` leaves what it has to whoever holds it, for whatever reason.
    #[test]
    fn whoever_lets_go_of_the_lock_sends_what_others_have_left() {
        let half = half();
        // SAFETY: as long as the half.
        let r = unsafe { &*half.remote };
        let looks = || _ = r.has_delivered(9);
        let uses: [&dyn Fn(); 3] = [&|| r.renew(9), &looks, &|| r.log_counts()];
        for (i, used) in uses.iter().enumerate() {
            let (slot, before) = (i as u32, posted(r));
            let busy = r.post_lock.lock();
            r.own(slot).flags.store(CLOSED, SeqCst);
            r.flush(slot);
            drop(busy);
            used();
            assert_eq!(posted(r), before + 1, "{i}");
        }
        half.destroy(&DEVICE);
    }
}
