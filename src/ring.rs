//! The byte rings: one for each direction, in the sender's segment.
//!
//! Cursors are counts of bytes since the ring began and never wrap. The
//! sender owns the memory and may, at any time, announce a further piece of
//! memory that holds the bytes from some offset on (a [`Geo`]): so a ring
//! begins small and grows without waiting for its reader. Bytes stay in place
//! until the reader has consumed them, which is what makes replay free.

use crate::copy::{copy, Fault};
use crate::kept::Kept;
use crate::layout::*;
use crate::side::Side;
use core::sync::atomic::Ordering::*;

/// The peer wrote something that an honest peer would not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Violation;

/// Why a transfer is not, or ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The peer's doing.
    Violation,
    /// The program's: it has no memory where it says.
    Fault,
}

impl From<Violation> for Failure {
    fn from(_: Violation) -> Failure {
        Failure::Violation
    }
}

impl From<Fault> for Failure {
    fn from(_: Fault) -> Failure {
        Failure::Fault
    }
}

/// How much is copied before it is published, so that reader and writer overlap on large messages. And it is what is
/// transferred whole or not at all where the program's memory ends, as with the kernel, whose pieces are of some such size.
pub const STRIDE: usize = 32 << 10;

/// The writing end. Whoever uses it holds the connection's send lock.
#[derive(Debug)]
pub struct TxRing {
    side: *const Side,
    own: *const Slot,
    peer: *const Slot,
    /// Bytes written, ever: those included that the peer does not see yet.
    pub produced: u64,
    /// The peer's `consumed` as last seen.
    pub consumed: u64,
    /// Geometries given back to the allocator, and announced.
    geo_first: u32,
    geo_count: u32,
    start: u64,
    ptr: *mut u8,
    cap: u64,
    /// Up to which byte, ever, what is written next lies in one piece that the peer is known to have read, and where byte 0
    /// of that would be.
    straight: u64,
    base: usize,
    /// What the peer has given back, to be repeated on TCP before what is in the ring.
    pub back: Kept,
}

impl Default for TxRing {
    fn default() -> Self {
        TxRing {
            side: core::ptr::null(),
            own: core::ptr::null(),
            peer: core::ptr::null(),
            produced: 0,
            consumed: 0,
            geo_first: 0,
            geo_count: 0,
            start: 0,
            ptr: core::ptr::null_mut(),
            cap: 0,
            straight: 0,
            base: 0,
            back: Kept::NONE,
        }
    }
}

impl TxRing {
    /// A new ring of `bytes` in `side`'s segment, announced in the side's slot `own`.
    /// `None` if there is no memory for it. `side` and `own` must outlive the ring.
    pub fn new(side: &Side, own: &Slot, bytes: usize) -> Option<TxRing> {
        let mut r = TxRing { side, own, ..TxRing::default() };
        own.produced.store(0, Relaxed);
        own.written.store(0, Relaxed);
        own.geo_count.store(0, Relaxed);
        r.announce(bytes.trailing_zeros()).then_some(r)
    }

    /// Where the peer says how far it has read.
    pub fn set_peer(&mut self, peer: *const Slot) {
        self.peer = peer;
    }

    fn own(&self) -> &Slot {
        // SAFETY: set by `new` from a reference that outlives the ring.
        unsafe { &*self.own }
    }

    fn announce(&mut self, log2: u32) -> bool {
        // SAFETY: set by `new` from a reference that outlives the ring.
        let side = unsafe { &*self.side };
        if (self.geo_count - self.geo_first) as usize >= GEOS - 1 {
            return false;
        }
        let Some(page) = side.alloc_block(log2) else { return false };
        let own = self.own();
        let g = &own.geo[self.geo_count as usize % GEOS];
        g.start.store(self.produced, Relaxed);
        g.page.store(page, Relaxed);
        g.log2.store(log2, Relaxed);
        own.geo_count.store(self.geo_count + 1, Release);
        self.geo_count += 1;
        self.start = self.produced;
        self.ptr = side.block(page);
        self.cap = 1 << log2;
        self.straight = 0;
        true
    }

    /// Reads the peer's cursor and gives back memory that it has finished with.
    #[inline(never)]
    pub fn refresh(&mut self) -> Result<(), Violation> {
        if self.peer.is_null() {
            return Ok(());
        }
        // SAFETY: the link keeps the peer's segment mapped while a connection uses it.
        let c = unsafe { &*self.peer }.consumed.load(Acquire);
        if c < self.consumed || c > self.shown() {
            return Err(Violation);
        }
        self.consumed = c;
        while self.geo_first + 1 < self.geo_count {
            let own = self.own();
            if own.geo[(self.geo_first + 1) as usize % GEOS].start.load(Relaxed) > c {
                break;
            }
            let g = &own.geo[self.geo_first as usize % GEOS];
            // SAFETY: set by `new` from a reference that outlives the ring.
            unsafe { &*self.side }.free_block(g.page.load(Relaxed), g.log2.load(Relaxed));
            self.geo_first += 1;
        }
        Ok(())
    }

    #[inline(always)]
    fn room(&self) -> usize {
        (self.cap - (self.produced - self.consumed.max(self.start))) as usize
    }

    /// Bytes that can be written now. Looks at the peer's cursor when what is known of it is less than `enough`.
    #[inline]
    pub fn space(&mut self, enough: usize) -> Result<usize, Violation> {
        if self.room() < enough {
            self.refresh()?;
        }
        Ok(self.room())
    }

    /// Adds a piece four times as large, up to `max` bytes.
    pub fn grow(&mut self, max: usize) -> bool {
        let next = (self.cap * 4).min(max as u64);
        next > self.cap && self.announce(next.trailing_zeros())
    }

    /// Goes on in a piece of `bytes`, if what it has is larger and not nearly full. What was written lies where it is until the
    /// reader has consumed it. True: the ring is as small as that, and all other memory given back.
    pub fn shrink(&mut self, bytes: usize) -> bool {
        if self.own.is_null() || self.refresh().is_err() {
            return false;
        }
        // Who reads may find no more to read than what it has been shown; and who does not read is to find no new room.
        let idle = self.shown() == self.produced && self.produced - self.consumed <= self.half();
        if self.cap > bytes as u64 && idle && self.announce(bytes.trailing_zeros()) {
            let _ = self.refresh();
        }
        self.cap <= bytes as u64 && self.geo_count - self.geo_first == 1
    }

    /// Whether so many bytes at a time fill more than half of it.
    #[inline]
    pub fn is_small_for(&self, len: usize) -> bool {
        len as u64 > self.half()
    }

    /// Half of its size in bytes.
    pub fn half(&self) -> u64 {
        self.cap / 2
    }

    /// Whether [`TxRing::grow`] up to `max` bytes may succeed.
    pub fn can_grow(&self, max: usize) -> bool {
        // SAFETY: set by `new` from a reference that outlives the ring.
        let has_memory = |log2| self.side.is_null() || unsafe { &*self.side }.may_give(log2);
        self.cap < max as u64
            && ((self.geo_count - self.geo_first) as usize) < GEOS - 1
            && has_memory((self.cap * 4).min(max as u64).trailing_zeros())
    }

    /// Whether a quarter is free. Programs rely on it that a send does not wait for which `poll` has said that there is room:
    /// those that use blocking calls in both directions would wait for each other. (The kernel wants a third of `SO_SNDBUF`:
    /// `sk_stream_is_writeable`, include/net/sock.h.)
    pub fn has_room(&mut self) -> Result<bool, Violation> {
        let enough = (self.cap / 4) as usize;
        Ok(self.space(enough)? >= enough)
    }

    /// The peer's cursor at which a writer that found no room is worth waking: see [`TxRing::has_room`].
    pub fn goal(&self) -> u64 {
        (self.produced + self.cap / 4).saturating_sub(self.cap).max(self.start)
    }

    /// Bytes that the peer may see, ever.
    #[inline]
    pub fn shown(&self) -> u64 {
        if self.own.is_null() {
            return self.produced;
        }
        self.own().produced.load(Relaxed)
    }

    /// Publishes what was set aside. Whether there was anything.
    pub fn show(&mut self) -> bool {
        let any = self.shown() != self.produced;
        if any {
            self.own().produced.store(self.produced, Release);
        }
        any
    }

    /// Writes as much as fits, a part of a message that [`TxRing::show`] is to follow: the peer sees no less of it than all, or
    /// as much as is published at once. Returns the count. After a fault there may be a part of it, see [`TxRing::take_back`].
    ///
    /// # Safety
    /// `src` must be the program's for `len` bytes, or readable.
    #[inline]
    pub unsafe fn write(&mut self, src: *const u8, len: usize) -> Result<usize, Failure> {
        // SAFETY: the caller's promise.
        unsafe { self.put(src, len, STRIDE as u64) }
    }

    /// Writes as much as fits; the peer does not see it before [`TxRing::show`]. Returns the count. After a fault as above.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn set_aside(&mut self, src: *const u8, len: usize) -> Result<usize, Failure> {
        // SAFETY: the caller's promise.
        let n = unsafe { self.put(src, len, u64::MAX) }?;
        self.own().written.store(self.produced, Release);
        Ok(n)
    }

    /// The bytes from `from` on are not written, but for those that the peer may have seen, and for others where they would
    /// be in its way.
    pub fn take_back(&mut self, from: u64) {
        self.produced = from.max(self.shown()).max(self.start).min(self.produced);
        self.straight = 0;
    }

    /// Writes as much as fits, and publishes it whenever there is `most` that is not.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn put(&mut self, src: *const u8, len: usize, most: u64) -> Result<usize, Failure> {
        let n = len.min(self.space(len)?);
        let mut done = 0;
        while done < n {
            let at = ((self.produced - self.start) & (self.cap - 1)) as usize;
            let part = (n - done).min(self.cap as usize - at).min(STRIDE);
            // SAFETY: `at + part <= cap`, the block is ours and the peer has consumed what lay there.
            unsafe { copy(src.wrapping_add(done), self.ptr.add(at), part) }?;
            done += part;
            self.produced += part as u64;
            if self.produced - self.shown() >= most {
                self.show();
            }
        }
        Ok(n)
    }

    /// As [`TxRing::write_all`] of one part, of at most [`STRIDE`] bytes. `far`: not where the ring is small for them, and it is
    /// not just their place that is there.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub unsafe fn write_one(&mut self, src: *const u8, len: usize, far: bool) -> bool {
        let (begin, end) = (self.produced, self.produced.wrapping_add(len as u64));
        if end > self.straight {
            // SAFETY: the caller's promise.
            return !(far && self.is_small_for(len)) && unsafe { self.write_around(src, len) };
        }
        // SAFETY: the bytes lie in the block, which is ours, and the peer has consumed what lay there.
        if unsafe { copy(src, self.base.wrapping_add(begin as usize) as *mut u8, len) }.is_err() {
            return false;
        }
        self.produced = end;
        self.own().produced.store(end, Release);
        true
    }

    #[inline(never)]
    unsafe fn write_around(&mut self, src: *const u8, len: usize) -> bool {
        // SAFETY: the caller's promise.
        let done = unsafe { self.write_all(core::iter::once((src, len)), len) };
        if !self.ptr.is_null() {
            let at = (self.produced - self.start) & (self.cap - 1);
            let lap = self.produced - at;
            self.straight = self.cap + lap.min(self.consumed.max(self.start));
            self.base = (self.ptr as usize).wrapping_sub(lap as usize);
        }
        done
    }

    /// Writes `parts`, `len` bytes together, at once and publishes them, if there is room for them and they are few, and the
    /// program has them. False: it has written nothing.
    ///
    /// # Safety
    /// Each part must be the program's for its length, or readable.
    #[inline(always)]
    pub unsafe fn write_all(&mut self, parts: impl Iterator<Item = (*const u8, usize)>, len: usize) -> bool {
        if len > STRIDE || self.room() < len && (self.refresh().is_err() || self.room() < len) {
            return false;
        }
        let begin = self.produced;
        let end = begin + len as u64;
        for (src, n) in parts {
            // A program may change its array while it is read.
            let n = n.min((end - self.produced) as usize);
            let at = ((self.produced - self.start) & (self.cap - 1)) as usize;
            let first = n.min(self.cap as usize - at);
            // SAFETY: both pieces lie in the block, which is ours and where the peer has consumed what lay there.
            let r = unsafe {
                match copy(src, self.ptr.add(at), first) {
                    Ok(()) if first < n => copy(src.wrapping_add(first), self.ptr, n - first),
                    r => r,
                }
            };
            if r.is_err() {
                self.produced = begin;
                return false;
            }
            self.produced += n as u64;
        }
        self.own().produced.store(self.produced, Release);
        true
    }

    /// The bytes from `from` on that lie together, for replay. Empty at the end.
    pub fn retained(&self, from: u64) -> &[u8] {
        let own = self.own();
        let mut i = self.geo_count;
        let mut end = self.produced;
        while i > self.geo_first {
            let g = &own.geo[(i - 1) as usize % GEOS];
            let start = g.start.load(Relaxed);
            if from >= start {
                let cap = 1u64 << g.log2.load(Relaxed);
                let at = (from - start) & (cap - 1);
                let n = (end - from).min(cap - at) as usize;
                // SAFETY: our own block; bytes not yet consumed are never overwritten.
                return unsafe {
                    core::slice::from_raw_parts((*self.side).block(g.page.load(Relaxed)).add(at as usize), n)
                };
            }
            end = start;
            i -= 1;
        }
        &[]
    }

    /// Gives all memory back. Only when the peer reads this ring no more.
    pub fn release(&mut self) {
        self.back.release();
        if self.side.is_null() {
            return;
        }
        while self.geo_first < self.geo_count {
            let g = &self.own().geo[self.geo_first as usize % GEOS];
            // SAFETY: set by `new` from a reference that outlives the ring.
            unsafe { &*self.side }.free_block(g.page.load(Relaxed), g.log2.load(Relaxed));
            self.geo_first += 1;
        }
        *self = TxRing::default();
    }
}

/// The reading end. Whoever uses it holds the connection's receive lock.
#[derive(Debug)]
pub struct RxRing {
    seg: *const u8,
    own: *const Slot,
    peer: *const Slot,
    /// Bytes taken, ever.
    pub consumed: u64,
    geo_next: u32,
    start: u64,
    /// First byte that lies in the next piece, if one is announced.
    end: u64,
    ptr: *const u8,
    cap: u64,
    /// What stood before the mark and was taken out of TCP for the program, which gets it before what is in the ring.
    pub kept: Kept,
    /// What of that was given back, as long as the peer has not repeated all.
    pub given: Kept,
    /// Between that and the ring there is more to come by TCP.
    pub only_kept: bool,
    /// What the writer has set aside is to be read, too: it is gone.
    orphaned: bool,
}

impl Default for RxRing {
    fn default() -> Self {
        RxRing {
            seg: core::ptr::null(),
            own: core::ptr::null(),
            peer: core::ptr::null(),
            consumed: 0,
            geo_next: 0,
            start: 0,
            end: u64::MAX,
            ptr: core::ptr::null(),
            cap: 0,
            kept: Kept::NONE,
            given: Kept::NONE,
            only_kept: false,
            orphaned: false,
        }
    }
}

impl RxRing {
    /// Reads the ring that the slot `peer` in the segment `seg` describes; says how far in `own`.
    /// All three must stay mapped while the ring is used.
    pub fn new(seg: *const u8, peer: &Slot, own: &Slot) -> RxRing {
        own.consumed.store(0, Release);
        RxRing { seg, own, peer, ..RxRing::default() }
    }

    fn peer(&self) -> &Slot {
        // SAFETY: set by `new` from a reference that outlives the ring.
        unsafe { &*self.peer }
    }

    /// How far the writer has come.
    #[inline]
    fn there(&self) -> u64 {
        let shown = self.peer().produced.load(Acquire);
        match self.orphaned {
            true => shown.max(self.peer().written.load(Acquire)),
            false => shown,
        }
    }

    /// The writer has ended without having shown what it had set aside, as a kernel would have sent it: there it is.
    pub fn orphan(&mut self) {
        self.orphaned = true;
    }

    /// Whether a peer's ring is attached.
    pub fn is_attached(&self) -> bool {
        !self.peer.is_null()
    }

    /// Bytes that wait for the program.
    #[inline]
    pub fn waiting(&self) -> u64 {
        let ring = if self.only_kept { 0 } else { self.behind() };
        self.kept.len() as u64 + ring
    }

    /// Bytes that wait in the ring, all pieces together.
    #[inline]
    pub fn behind(&self) -> u64 {
        if self.peer.is_null() {
            return 0;
        }
        self.there().saturating_sub(self.consumed)
    }

    /// Bytes that wait in the current piece; moves on to the next piece when this one is used up.
    #[inline]
    fn available(&mut self) -> Result<usize, Violation> {
        let p = self.there();
        if p == self.consumed {
            return Ok(0);
        }
        if p < self.consumed {
            return Err(Violation);
        }
        // Read after `produced`, so every piece that these bytes lie in is announced.
        let count = self.peer().geo_count.load(Acquire);
        if count != self.geo_next && (self.end == u64::MAX || self.end == self.consumed) {
            self.look_for_geo(count)?;
        }
        let n = p.min(self.end) - self.consumed;
        if n > self.cap {
            return Err(Violation);
        }
        Ok(n as usize)
    }

    #[cold]
    fn look_for_geo(&mut self, count: u32) -> Result<(), Violation> {
        while self.geo_next != count {
            let g = &self.peer().geo[self.geo_next as usize % GEOS];
            let start = g.start.load(Relaxed);
            if start > self.consumed {
                self.end = start;
                break;
            }
            if start < self.consumed {
                return Err(Violation);
            }
            let (page, log2) = (g.page.load(Relaxed) as usize, g.log2.load(Relaxed));
            if !(12..28).contains(&log2) {
                return Err(Violation);
            }
            let (off, cap) = (page << 12, 1usize << log2);
            if off < BLOCKS_OFFSET || off > SEG_BYTES - cap {
                return Err(Violation);
            }
            // SAFETY: the block lies inside the peer's segment, which is mapped whole.
            self.ptr = unsafe { self.seg.add(off) };
            self.cap = cap as u64;
            self.start = start;
            self.end = u64::MAX;
            self.geo_next = self.geo_next.wrapping_add(1);
        }
        Ok(())
    }

    /// Copies as many of the bytes that wait as go into `parts`, and leaves them. Returns the count.
    ///
    /// # Safety
    /// Each part must be the program's for its length, or writable.
    pub unsafe fn peek(&mut self, parts: impl Iterator<Item = (*mut u8, usize)>) -> Result<usize, Failure> {
        // A reader of its own that says nothing of how far it has come.
        let aside = Slot::default();
        // SAFETY: the caller's promise; bytes that nobody has consumed stay in place.
        unsafe { RxRing { own: &aside, ..*self }.read_into(parts) }
    }

    /// Takes up to `len` bytes at once: all that wait, or as many, if they are `least` and few and lie in one piece, and the
    /// program has room for them. Else 0, and nothing is taken.
    ///
    /// # Safety
    /// `dst` must be the program's for `len` bytes, or writable.
    #[inline(always)]
    pub unsafe fn read_all(&mut self, dst: *mut u8, len: usize, least: usize) -> usize {
        if self.peer.is_null() || self.only_kept || !self.kept.is_empty() {
            return 0;
        }
        let peer = self.peer();
        let produced = peer.produced.load(Acquire);
        if produced <= self.consumed {
            return 0;
        }
        let there = produced - self.consumed;
        let n = there.min(len as u64) as usize;
        // Read after `produced`, so every piece that these bytes lie in is announced.
        let here = if peer.geo_count.load(Acquire) == self.geo_next && self.end == u64::MAX {
            there
        } else {
            self.available().unwrap_or(0) as u64
        };
        if here > self.cap || (n as u64) > here || n < least || n > STRIDE {
            return 0;
        }
        let at = ((self.consumed - self.start) & (self.cap - 1)) as usize;
        let first = n.min(self.cap as usize - at);
        // SAFETY: both parts lie inside the mapped block.
        let r = unsafe {
            match copy(self.ptr.add(at), dst, first) {
                Ok(()) if first < n => copy(self.ptr, dst.wrapping_add(first), n - first),
                r => r,
            }
        };
        if r.is_err() {
            return 0;
        }
        self.consumed += n as u64;
        // SAFETY: set by `new` from a reference that outlives the ring.
        unsafe { &*self.own }.consumed.store(self.consumed, Release);
        n
    }

    /// Takes up to `len` bytes. Returns the count.
    ///
    /// # Safety
    /// `dst` must be the program's for `len` bytes, or writable.
    #[inline]
    pub unsafe fn read(&mut self, dst: *mut u8, len: usize) -> Result<usize, Failure> {
        // SAFETY: the caller's promise.
        unsafe { self.read_into(core::iter::once((dst, len))) }
    }

    /// Takes as many bytes as go into `parts`. Returns the count; an error only if there are none before it.
    ///
    /// # Safety
    /// Each part as for [`RxRing::read`].
    #[inline]
    pub unsafe fn read_into(&mut self, parts: impl Iterator<Item = (*mut u8, usize)>) -> Result<usize, Failure> {
        // SAFETY: the caller's promise.
        unsafe { self.take::<true>(parts) }
    }

    /// Takes up to `n` bytes that nobody wants. Returns the count.
    pub fn pass(&mut self, n: usize) -> Result<usize, Failure> {
        // SAFETY: nothing is copied.
        unsafe { self.take::<false>(core::iter::once((core::ptr::null_mut(), n))) }
    }

    #[inline(always)]
    unsafe fn take<const COPY: bool>(
        &mut self,
        parts: impl Iterator<Item = (*mut u8, usize)>,
    ) -> Result<usize, Failure> {
        let mut done = 0;
        // Of those in the ring that were taken, what the writer is not told yet.
        let mut fresh = 0;
        for (dst, len) in parts {
            let mut got = 0;
            if !self.kept.is_empty() {
                // SAFETY: the caller's promise.
                match unsafe { self.kept.take::<COPY>(dst, len) } {
                    Ok(n) => got = n,
                    Err(_) if done > 0 => return Ok(done),
                    Err(e) => return Err(e.into()),
                }
                done += got;
            }
            if self.peer.is_null() || self.only_kept {
                match self.kept.is_empty() {
                    true => break,
                    false => continue,
                }
            }
            while got < len {
                let before = self.geo_next;
                let there = match self.available() {
                    Ok(n) => n,
                    Err(_) if done + fresh > 0 => 0,
                    Err(e) => return Err(e.into()),
                };
                if there == 0 {
                    self.say(fresh);
                    return Ok(done + fresh);
                }
                if self.geo_next != before {
                    // There is no way back into the piece before.
                    done += self.say(fresh);
                    fresh = 0;
                }
                let n = there.min(len - got).min(STRIDE - fresh);
                let at = ((self.consumed - self.start) & (self.cap - 1)) as usize;
                let first = n.min(self.cap as usize - at);
                // SAFETY: both parts lie inside the mapped block; `dst` by the caller's promise.
                let r = unsafe {
                    let to = dst.wrapping_add(got);
                    match COPY {
                        false => Ok(()),
                        true => match copy(self.ptr.add(at), to, first) {
                            Ok(()) if first < n => copy(self.ptr, to.wrapping_add(first), n - first),
                            r => r,
                        },
                    }
                };
                if let Err(e) = r {
                    self.consumed -= fresh as u64;
                    return if done > 0 { Ok(done) } else { Err(e.into()) };
                }
                got += n;
                fresh += n;
                self.consumed += n as u64;
                if fresh == STRIDE {
                    done += self.say(fresh);
                    fresh = 0;
                }
            }
        }
        Ok(done + self.say(fresh))
    }

    /// Tells the writer how far it has come, which is `n` bytes further. Returns that.
    #[inline(always)]
    fn say(&self, n: usize) -> usize {
        if n > 0 {
            // SAFETY: set by `new` from a reference that outlives the ring.
            unsafe { &*self.own }.consumed.store(self.consumed, Release);
        }
        n
    }
}

#[cfg(test)]
mod tests;
