//! Memory of the library's own: what runs inside a program never calls the program's `malloc`.
//!
//! A program may bring a `malloc` that knows of no second thread, because the program has none, and its signal handlers
//! may come in the middle of `malloc`, and then call what is hooked. So this allocator has no locks: a signal handler,
//! a thread that was cancelled, or a forked child never finds it in the middle of something, except for a block or two
//! that nobody will ever use.
//!
//! Small blocks come from chunks that are never given back, and go to lists by their size; a large one is a mapping.

use crate::shm::{self, Map};
use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

/// The allocator. There is one heap, however many of these there are.
pub struct Heap;

/// Blocks begin at multiples of this, and are not smaller.
const GRAIN: usize = 16;
/// The largest block of a chunk.
const LARGEST: usize = 64 << 10;
/// Bytes of a chunk, and what it is aligned to.
const CHUNK: usize = 1 << 20;
/// Four sizes to each doubling: no more than a fifth of a block is unused.
const CLASSES: usize = 4 + 4 * 10;

/// The index of the smallest class whose blocks have `size` bytes, and how many they have.
const fn class(size: usize) -> (usize, usize) {
    if size <= 4 * GRAIN {
        let n = if size == 0 { 1 } else { size.div_ceil(GRAIN) };
        return (n - 1, n * GRAIN);
    }
    let log = (size - 1).ilog2() as usize;
    let quarter = 1 << (log - 2);
    let part = (size - 1) / quarter % 4;
    (4 + 4 * (log - 6) + part, (5 + part) * quarter)
}

/// Free blocks of a size, each of which begins with the address of the next.
///
/// The head holds an address and a count of its changes, so that who has read a block's successor notices if the block
/// was taken, and put back, meanwhile. User space has no addresses of more than 49 bits unless it asks for them.
struct List(AtomicU64);

const ADDRESS_BITS: u32 = 45;
const ADDRESS: u64 = (1 << ADDRESS_BITS) - 1;

impl List {
    fn head(old: u64, at: *mut u8) -> u64 {
        ((old >> ADDRESS_BITS).wrapping_add(1) << ADDRESS_BITS) | (at as u64 / GRAIN as u64)
    }

    fn first(head: u64) -> *mut u8 {
        ((head & ADDRESS) as usize * GRAIN) as *mut u8
    }

    /// # Safety
    /// The block is of this list's size, and nobody's.
    unsafe fn put(&self, at: *mut u8) {
        let mut head = self.0.load(Relaxed);
        loop {
            // SAFETY: a block has room for an address, and is aligned for it.
            unsafe { &*at.cast::<AtomicUsize>() }.store(Self::first(head) as usize, Relaxed);
            match self.0.compare_exchange_weak(head, Self::head(head, at), Release, Relaxed) {
                Ok(_) => return,
                Err(h) => head = h,
            }
        }
    }

    fn take(&self) -> *mut u8 {
        let mut head = self.0.load(Acquire);
        loop {
            let at = Self::first(head);
            if at.is_null() {
                return at;
            }
            // SAFETY: chunks are never unmapped. Whoever has taken the block meanwhile may write there; then what is read
            // is not used, because the head has changed.
            let next = unsafe { &*at.cast::<AtomicUsize>() }.load(Relaxed);
            match self.0.compare_exchange_weak(head, Self::head(head, next as *mut u8), Acquire, Acquire) {
                Ok(_) => return at,
                Err(h) => head = h,
            }
        }
    }
}

static FREE: [List; CLASSES] = [const { List(AtomicU64::new(0)) }; CLASSES];

/// The first blocks are cut from here, with no system call: a program may have a filter of those by then.
struct First(UnsafeCell<[u8; FIRST]>);

/// Bytes; pages that are not used do not exist.
const FIRST: usize = 256 << 10;

// SAFETY: blocks of it have one owner each, see `cut`.
unsafe impl Sync for First {}

static FIRST_BLOCKS: First = First(UnsafeCell::new([0; FIRST]));
/// How much of it is used, and more once a block has not found room.
static FIRST_USED: AtomicUsize = AtomicUsize::new(0);

/// Where the newest chunk's unused part begins. Where a chunk would begin: there is none.
static UNUSED: AtomicUsize = AtomicUsize::new(0);

/// A new block. Null: no memory.
fn cut(bytes: usize) -> *mut u8 {
    let base = FIRST_BLOCKS.0.get().cast::<u8>();
    let skip = base.align_offset(GRAIN);
    if FIRST_USED.load(Relaxed) < FIRST {
        let from = skip + FIRST_USED.fetch_add(bytes, Relaxed);
        if from + bytes <= FIRST {
            // SAFETY: within it.
            return unsafe { base.add(from) };
        }
    }
    let mut at = UNUSED.load(Acquire);
    loop {
        let left = at.next_multiple_of(CHUNK) - at;
        let fresh = if left >= bytes { None } else { Some(chunk()) };
        let from = match fresh {
            None => at,
            Some(base) if base.is_null() => return base,
            // Never the chunk's first byte; see `UNUSED`.
            Some(base) => base as usize + GRAIN,
        };
        match UNUSED.compare_exchange_weak(at, from + bytes, AcqRel, Acquire) {
            Ok(_) => return from as *mut u8,
            Err(now) => at = now,
        }
        if let Some(base) = fresh {
            // SAFETY: ours, and nobody has seen it.
            unsafe { shm::unmap(Map { base, len: CHUNK }) };
        }
    }
}

/// A new chunk. Null: no memory.
fn chunk() -> *mut u8 {
    let Ok(Map { base, len }) = shm::anon_private(2 * CHUNK) else { return null_mut() };
    let skip = base.align_offset(CHUNK);
    // SAFETY: the parts before and behind the chunk, which nobody uses.
    unsafe {
        let chunk = base.add(skip);
        if skip > 0 {
            shm::unmap(Map { base, len: skip });
        }
        shm::unmap(Map { base: chunk.add(CHUNK), len: len - skip - CHUNK });
        chunk
    }
}

const PAGE: usize = 4096;

/// Whether such a block is a mapping of its own.
const fn is_large(l: &Layout) -> bool {
    l.size() > LARGEST || l.align() > GRAIN
}

// SAFETY: blocks do not overlap: each is cut from a chunk once, is in one list at most, and is taken from there by one.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, l: Layout) -> *mut u8 {
        if is_large(&l) {
            if l.align() > PAGE {
                return null_mut();
            }
            return shm::anon_private(l.size().next_multiple_of(PAGE)).map_or(null_mut(), |m| m.base);
        }
        let (class, bytes) = class(l.size());
        let at = FREE[class].take();
        if at.is_null() {
            cut(bytes)
        } else {
            at
        }
    }

    unsafe fn alloc_zeroed(&self, l: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let at = unsafe { self.alloc(l) };
        // A mapping is zeroed.
        if !at.is_null() && !is_large(&l) {
            // SAFETY: a block of that size, or a larger one.
            unsafe { at.write_bytes(0, l.size()) };
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, l: Layout) {
        // SAFETY: a block that `alloc` gave for this layout, which nobody uses any more.
        unsafe {
            if is_large(&l) {
                shm::unmap(Map { base: at, len: l.size().next_multiple_of(PAGE) });
            } else {
                FREE[class(l.size()).0].put(at);
            }
        }
    }

    unsafe fn realloc(&self, at: *mut u8, l: Layout, size: usize) -> *mut u8 {
        let new = match Layout::from_size_align(size, l.align()) {
            Ok(new) if !is_large(&l) && !is_large(&new) && class(l.size()) == class(size) => return at,
            Ok(new) => new,
            Err(_) => return null_mut(),
        };
        // SAFETY: the caller's promise; both blocks have room for what is copied.
        unsafe {
            let to = self.alloc(new);
            if !to.is_null() {
                core::ptr::copy_nonoverlapping(at, to, l.size().min(size));
                self.dealloc(at, l);
            }
            to
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn classes_are_no_larger_than_they_must_be() {
        let mut last = (0, 0);
        for size in 0..=LARGEST {
            let (c, bytes) = class(size);
            assert!(c < CLASSES && bytes >= size && bytes.is_multiple_of(GRAIN), "{size}: {c} {bytes}");
            assert!(bytes <= GRAIN || bytes - size < GRAIN || bytes - size <= bytes / 5, "{size}: {bytes}");
            assert!(c == last.0 && bytes == last.1 || c == last.0 + 1 || size == 0, "{size}: {c} after {last:?}");
            assert_eq!(class(bytes), (c, bytes), "a whole block is of its own class");
            last = (c, bytes);
        }
        assert_eq!(last.0, CLASSES - 1);
    }

    /// Threads that hand blocks to each other: no block is ever two's, and what was written in it stays.
    #[test]
    fn blocks_are_one_owners() {
        const ROUNDS: usize = 40_000;
        let (tx, rx): (Vec<_>, Vec<_>) = (0..4).map(|_| std::sync::mpsc::channel::<(usize, Layout, u8)>()).unzip();
        let threads: Vec<_> = rx
            .into_iter()
            .enumerate()
            .map(|(me, rx)| {
                let tx = tx.clone();
                std::thread::spawn(move || {
                    let mut held: HashMap<usize, (Layout, u8)> = HashMap::new();
                    let mut seed = me as u64 + 1;
                    for round in 0..ROUNDS {
                        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        let random = (seed >> 33) as usize;
                        let size = 1 + random % [40, 40, 300, 5_000, 70_000][random / 7 % 5];
                        let l = Layout::from_size_align(size, 1 << (random % 5)).unwrap();
                        let mark = (random / 3) as u8;
                        // SAFETY: a size that is not zero; written within it.
                        let at = unsafe {
                            let at = if round % 2 == 0 { Heap.alloc(l) } else { Heap.alloc_zeroed(l) };
                            assert!(!at.is_null() && (at as usize).is_multiple_of(l.align()));
                            if round % 2 == 1 {
                                assert!((0..size).step_by(97).all(|i| *at.add(i) == 0));
                            }
                            at.write_bytes(mark, size);
                            at as usize
                        };
                        assert!(held.insert(at, (l, mark)).is_none(), "given twice");
                        if held.len() > 50 {
                            let (&at, &(l, mark)) = held.iter().next().unwrap();
                            held.remove(&at);
                            let _ = tx[random % tx.len()].send((at, l, mark));
                        }
                        for (at, l, mark) in rx.try_iter() {
                            let to = l.size() * 2 % 3_000 + 1;
                            // SAFETY: its owner has handed it over.
                            unsafe {
                                let bytes = core::slice::from_raw_parts(at as *const u8, l.size());
                                assert!(bytes.iter().all(|b| *b == mark), "written by somebody else");
                                let moved = Heap.realloc(at as *mut u8, l, to);
                                let kept = core::slice::from_raw_parts(moved, to.min(l.size()));
                                assert!(kept.iter().all(|b| *b == mark), "lost by being moved");
                                Heap.dealloc(moved, Layout::from_size_align(to, l.align()).unwrap());
                            }
                        }
                    }
                })
            })
            .collect();
        drop(tx);
        threads.into_iter().for_each(|t| t.join().unwrap());
    }

    #[test]
    fn what_is_given_back_is_used_again() {
        let l = Layout::from_size_align(50_001, 8).unwrap();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..1000 {
            // SAFETY: given back at once.
            unsafe {
                let at = Heap.alloc(l);
                seen.insert(at as usize);
                Heap.dealloc(at, l);
            }
        }
        // Another test may hold some of them.
        assert!(seen.len() < 100, "{} places", seen.len());
    }
}
