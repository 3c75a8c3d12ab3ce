//! Our side of a link: the segment that we write and the peer reads, and who uses which part of it.
//!
//! The bookkeeping lies in memory that forked children share, because a child
//! goes on with the connections that it inherits.

use crate::layout::*;
use crate::pages::{Pages, PAGE};
use crate::remote::{CHUNK, CHUNKS};
use crate::shm::{self, Map};
use crate::sync::Lock;
use crate::sys::{self, SysResult};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use libc::c_int;

/// The end of a segment is kept for blocks of at most so many pages.
const RESERVED: usize = 32 << 20;
const SMALL: u32 = (64 << 10) >> PAGE;

/// Bookkeeping of a segment, shared with forked children.
#[repr(C)]
struct Books {
    lock: Lock,
    pages: Pages,
    slot_used: [AtomicU64; SLOTS / 64],
    slot_page: [AtomicU64; SLOTS / 64],
    queue_lock: [Lock; QUEUES],
    /// Of a side that is copied to another host: which pieces may be used, and up to which one more are wanted.
    chunks: [AtomicU64; CHUNKS / 64],
    wanted: AtomicU32,
}

/// Our side of a link.
pub struct Side {
    /// The segment's memfd, which the peer is given.
    pub fd: c_int,
    seg: Map,
    books: Map,
    /// [`Wakes`] and its memfd, until the peer has it; null with a peer on another host.
    wakes: Map,
    wakes_fd: c_int,
    /// Blocks are taken only from pieces of the segment that have been enabled.
    gated: bool,
}

/// The word for slot `i` in a mapping of [`Wakes`].
pub fn wake_word<'a>(wakes: Map, i: u32) -> Option<&'a AtomicU32> {
    // SAFETY: null, or mapped with that size for as long as the link's users hold it; zeroes are valid.
    unsafe { (wakes.base as *const Wakes).as_ref() }.map(|w| &w.word[i as usize % SLOTS])
}

impl Side {
    /// A new segment.
    pub fn new() -> SysResult<Side> {
        Self::make(false)
    }

    /// A new segment whose ring memory is enabled piece by piece.
    pub fn new_remote() -> SysResult<Side> {
        Self::make(true)
    }

    fn make(gated: bool) -> SysResult<Side> {
        let (fd, seg) = shm::create_owned(b"ringsock-ring\0", SEG_BYTES)?;
        let none = Map { base: core::ptr::null_mut(), len: 0 };
        let mut side = Side { fd, seg, books: none, wakes: none, wakes_fd: -1, gated };
        match side.furnish() {
            Ok(()) => Ok(side),
            Err(e) => {
                // SAFETY: nobody has seen it.
                unsafe { side.destroy() };
                Err(e)
            }
        }
    }

    fn furnish(&mut self) -> SysResult<()> {
        shm::allocate(self.fd, 0, SLOTS_OFFSET)?;
        self.books = shm::anon_shared(size_of::<Books>())?;
        if !self.gated {
            (self.wakes_fd, self.wakes) = shm::create_common(b"ringsock-wake\0", size_of::<Wakes>())?;
            shm::allocate(self.wakes_fd, 0, size_of::<Wakes>())?;
        }
        self.head().magic.store(SEG_MAGIC, Release);
        Ok(())
    }

    /// The memfd of the words on which our threads sleep, for the peer.
    pub fn wakes_fd(&self) -> c_int {
        self.wakes_fd
    }

    /// The peer has what it needs.
    pub fn close_wakes_fd(&mut self) {
        if self.wakes_fd >= 0 {
            sys::close(self.wakes_fd);
            self.wakes_fd = -1;
        }
    }

    /// The word on which threads sleep that wait for the connection of our slot `i`.
    pub fn wake(&self, i: u32) -> Option<&AtomicU32> {
        wake_word(self.wakes, i)
    }

    /// Brings the segment's fd, made at the desk, to where all threads can use it.
    pub fn place(&mut self) -> SysResult<()> {
        self.fd = crate::desk::place(core::mem::replace(&mut self.fd, -1))?;
        Ok(())
    }

    /// Gives everything back.
    ///
    /// # Safety
    /// Nothing may use the segment any more.
    pub unsafe fn destroy(&self) {
        if self.fd >= 0 {
            sys::close(self.fd);
        }
        if self.wakes_fd >= 0 {
            sys::close(self.wakes_fd);
        }
        for map in [self.seg, self.books, self.wakes] {
            // SAFETY: the caller's promise.
            unsafe { shm::unmap(map) };
        }
    }

    /// First byte of the segment.
    pub fn base(&self) -> *mut u8 {
        self.seg.base
    }

    /// Makes the memory of a piece exist.
    pub fn allocate_chunk(&self, chunk: u32) -> bool {
        shm::allocate(self.fd, chunk as usize * CHUNK, CHUNK).is_ok()
    }

    /// Blocks may be taken from a piece.
    pub fn enable_chunk(&self, chunk: u32) {
        self.books().chunks[chunk as usize / 64 % (CHUNKS / 64)].fetch_or(1 << (chunk % 64), Release);
    }

    fn is_enabled(&self, chunk: usize) -> bool {
        self.books().chunks[chunk / 64 % (CHUNKS / 64)].load(Acquire) & (1 << (chunk % 64)) != 0
    }

    /// The piece up to which more are wanted; 0: none.
    pub fn wanted(&self) -> u32 {
        self.books().wanted.load(Acquire)
    }

    /// Whether a block of `1 << log2` bytes can be had; asks for more pieces if it cannot, or just can.
    pub fn has_room(&self, log2: u32) -> bool {
        let b = self.books();
        let _g = b.lock.lock();
        Pages::of_block(log2).and_then(|pages| self.find(b, pages)).is_some()
    }

    /// Whether a block of `1 << log2` bytes can be had, as far as that has to be prepared: what a peer on another host has yet
    /// to register is asked for.
    pub fn may_give(&self, log2: u32) -> bool {
        !self.gated || self.has_room(log2)
    }

    /// Where `pages` lie together that nobody uses.
    fn find(&self, b: &Books, pages: u32) -> Option<u32> {
        // New connections get rings, however much those that are there have grown.
        let may_lie = |page: u32| pages <= SMALL || page + pages <= ((SEG_BYTES - RESERVED) >> PAGE) as u32;
        if !self.gated {
            return b.pages.find(pages, may_lie);
        }
        const PAGES: u32 = (CHUNK >> PAGE) as u32;
        let last = |page: u32| (page + pages - 1) / PAGES;
        let may_be_used = |page: u32| may_lie(page) && (page / PAGES..=last(page)).all(|c| self.is_enabled(c as usize));
        let found = b.pages.find(pages, may_be_used);
        // One more is asked for in good time.
        if let Some(page) = found.or_else(|| b.pages.find(pages, may_lie)) {
            let ahead = (last(page) + 1).min(CHUNKS as u32 - 1);
            if !self.is_enabled(ahead as usize) && b.wanted.fetch_max(ahead, AcqRel) < ahead {
                crate::bell::ring(0);
            }
        }
        found
    }

    fn head(&self) -> &SegHead {
        // SAFETY: the segment is mapped, zeroed or written by us, and all fields are atomics.
        unsafe { &*(self.seg.base as *const SegHead) }
    }

    fn books(&self) -> &Books {
        // SAFETY: the mapping has the size of `Books`; zeroes are a valid value.
        unsafe { &*(self.books.base as *const Books) }
    }

    /// Our slot `i`.
    pub fn slot(&self, i: u32) -> &Slot {
        let i = i as usize % SLOTS;
        // SAFETY: slots lie inside the segment (see the assertions in `layout`).
        unsafe { &*(self.seg.base.add(SLOTS_OFFSET) as *const Slot).add(i) }
    }

    /// First byte of a block.
    pub fn block(&self, page: u32) -> *mut u8 {
        // SAFETY: pages come from `alloc_block` and lie inside the segment.
        unsafe { self.seg.base.add((page as usize) << PAGE) }
    }

    /// Takes a block of `1 << log2` bytes whose pages exist.
    pub fn alloc_block(&self, log2: u32) -> Option<u32> {
        let pages = Pages::of_block(log2)?;
        let b = self.books();
        let _g = b.lock.lock();
        let first = self.find(b, pages)?;
        if !self.gated && !b.pages.exist(first, pages) {
            shm::allocate(self.fd, (first as usize) << PAGE, 1 << log2).ok()?;
            b.pages.note_existing(first, pages);
        }
        b.pages.take(first, pages);
        Some(first)
    }

    /// Bytes of ring memory that the kernel has given, and those that are in use.
    pub fn memory(&self) -> (usize, usize) {
        self.books().pages.sizes()
    }

    /// Gives a block back.
    pub fn free_block(&self, page: u32, log2: u32) {
        let Some(pages) = Pages::of_block(log2) else { return };
        let b = self.books();
        let _g = b.lock.lock();
        b.pages.give_back(page, pages);
    }

    /// Takes a slot, zeroed but for its `want` counter.
    pub fn alloc_slot(&self) -> Option<u32> {
        let b = self.books();
        let _g = b.lock.lock();
        for (w, word) in b.slot_used.iter().enumerate() {
            let v = word.load(Relaxed);
            if v == u64::MAX {
                continue;
            }
            let bit = (!v).trailing_zeros();
            let i = w as u32 * 64 + bit;
            if b.slot_page[w].load(Relaxed) == 0 {
                let at = SLOTS_OFFSET + w * 64 * core::mem::size_of::<Slot>();
                shm::allocate(self.fd, at & !4095, 64 * core::mem::size_of::<Slot>() + 4096).ok()?;
                b.slot_page[w].store(1, Relaxed);
            }
            word.store(v | 1 << bit, Relaxed);
            let s = self.slot(i);
            s.produced.store(0, Relaxed);
            s.written.store(0, Relaxed);
            s.consumed.store(0, Relaxed);
            s.flags.store(0, Relaxed);
            s.mark_at.store(0, Relaxed);
            s.order.store(0, Relaxed);
            s.geo_count.store(0, Relaxed);
            s.bell.store(0, Relaxed);
            s.want.store(s.want.load(Relaxed) >> WANT_SHIFT << WANT_SHIFT, Release);
            return Some(i);
        }
        None
    }

    /// Gives a slot back.
    pub fn free_slot(&self, i: u32) {
        let b = self.books();
        let _g = b.lock.lock();
        let (w, bit) = (i as usize / 64 % b.slot_used.len(), i % 64);
        b.slot_used[w].fetch_and(!(1 << bit), Relaxed);
    }

    /// Tells the peer that its slot `slot` has news, in the queue for its bell `bell`.
    pub fn hint(&self, bell: u32, slot: u32) {
        let i = bell as usize % QUEUES;
        let q = &self.head().queues[i];
        let _g = self.books().queue_lock[i].lock();
        let h = q.head.load(Relaxed);
        q.entries[h as usize % QUEUE_LEN].store(slot, Relaxed);
        q.head.store(h + 1, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of a side until there are no more.
    fn all(side: &Side, log2: u32) -> Vec<u32> {
        std::iter::from_fn(|| side.alloc_block(log2)).collect()
    }

    /// However many connections come and go, and however much their rings grow, the next ones find memory.
    #[test]
    fn memory_comes_back() {
        let side = Side::new().unwrap();
        for _ in 0..3 {
            for (log2, at_least) in [(14, 16_000), (22, 50), (12, 60_000)] {
                let blocks = all(&side, log2);
                assert!(blocks.len() >= at_least, "{log2}: {}", blocks.len());
                blocks.iter().for_each(|page| side.free_block(*page, log2));
            }
        }
        let grown = all(&side, 22);
        assert!(grown.len() >= 50);
        assert!(all(&side, 14).len() >= RESERVED >> 14, "nothing is left for new connections");
        // SAFETY: nobody uses it.
        unsafe { side.destroy() };
    }
}
