//! Our side of a link: the segment that we write and the peer reads, and who uses which part of it.
//!
//! The bookkeeping lies in memory that forked children share, because a child
//! goes on with the connections that it inherits.

use crate::layout::*;
use crate::remote::{CHUNK, CHUNKS};
use crate::shm::{self, Map};
use crate::sync::Lock;
use crate::sys::{self, SysResult};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use libc::c_int;

const CLASSES: usize = 28;
const FREE: usize = 512;

/// Bookkeeping of a segment, shared with forked children.
#[repr(C)]
struct Books {
    lock: Lock,
    /// Pages handed out from the start of ring memory on.
    bump: AtomicU32,
    free_len: [AtomicU32; CLASSES],
    free: [[AtomicU32; FREE]; CLASSES],
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

    /// Whether a block of that size can be had; asks for more pieces otherwise.
    pub fn has_room(&self, log2: u32) -> bool {
        let b = self.books();
        let _g = b.lock.lock();
        let class = log2 as usize % CLASSES;
        !self.gated || b.free_len[class].load(Relaxed) > 0 || self.may_bump(b, 1 << log2 >> 12).is_some()
    }

    /// The first page of the next `pages` that nobody has used, if they can be used.
    fn may_bump(&self, b: &Books, pages: u32) -> Option<u32> {
        let first = b.bump.load(Relaxed).max((BLOCKS_OFFSET >> 12) as u32);
        if (first + pages) as usize > SEG_BYTES >> 12 {
            return None;
        }
        if self.gated {
            const PAGES: u32 = (CHUNK >> 12) as u32;
            let last = (first + pages - 1) / PAGES;
            // One more is asked for in good time.
            let ahead = (last + 1).min(CHUNKS as u32 - 1);
            if !self.is_enabled(ahead as usize) && b.wanted.fetch_max(ahead, AcqRel) < ahead {
                crate::bell::ring(0);
            }
            if !(first / PAGES..=last).all(|c| self.is_enabled(c as usize)) {
                return None;
            }
        }
        Some(first)
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
        unsafe { self.seg.base.add((page as usize) << 12) }
    }

    /// Takes a block of `1 << log2` bytes whose pages exist.
    pub fn alloc_block(&self, log2: u32) -> Option<u32> {
        let b = self.books();
        let _g = b.lock.lock();
        let class = log2 as usize;
        if !(12..CLASSES).contains(&class) {
            return None;
        }
        let n = b.free_len[class].load(Relaxed);
        if n > 0 {
            b.free_len[class].store(n - 1, Relaxed);
            return Some(b.free[class][n as usize - 1].load(Relaxed));
        }
        let pages = 1u32 << (log2 - 12);
        let first = self.may_bump(b, pages)?;
        shm::allocate(self.fd, (first as usize) << 12, 1 << log2).ok()?;
        b.bump.store(first + pages, Relaxed);
        Some(first)
    }

    /// Gives a block back for others of its size.
    pub fn free_block(&self, page: u32, log2: u32) {
        let b = self.books();
        let _g = b.lock.lock();
        let class = log2 as usize;
        let n = b.free_len[class].load(Relaxed) as usize;
        // Past the list's length a block is lost until the link ends: memory is bounded by the segment.
        if n < FREE {
            b.free[class][n].store(page, Relaxed);
            b.free_len[class].store(n as u32 + 1, Relaxed);
        }
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
