//! Which pages of a segment are in use.
//!
//! A bit for each page and nothing else, so whoever is killed in the middle of a change leaves pages that nobody gets, and
//! never one that two get; and what was given back in pieces is whole again by itself.

use crate::layout::{BLOCKS_OFFSET, SEG_BYTES};
use core::sync::atomic::{AtomicU64, Ordering::*};

/// Size of a page as a power of two.
pub const PAGE: u32 = 12;
const WORDS: usize = (SEG_BYTES >> PAGE) / 64;
/// The first word of those for ring memory.
const FIRST: usize = (BLOCKS_OFFSET >> PAGE) / 64;
/// The largest block is half of a segment.
const LARGEST: u32 = SEG_BYTES.trailing_zeros() - 1;

/// For memory that forked children share; zeroes are an empty one. The callers have a lock.
#[repr(C)]
pub struct Pages {
    used: [AtomicU64; WORDS],
    /// Memory for these has been allocated.
    exist: [AtomicU64; WORDS],
}

/// The words of a map in which the bits of a block are, each with those bits.
fn bits(map: &[AtomicU64; WORDS], page: u32, pages: u32) -> impl Iterator<Item = (&AtomicU64, u64)> {
    let bits = if pages < 64 { ((1u64 << pages) - 1) << (page % 64) } else { u64::MAX };
    map.iter().skip(page as usize / 64).take((pages as usize).div_ceil(64)).map(move |w| (w, bits))
}

impl Pages {
    /// How many pages a block of `1 << log2` bytes has. `None`: there are no such blocks.
    pub fn of_block(log2: u32) -> Option<u32> {
        (PAGE..=LARGEST).contains(&log2).then(|| 1 << (log2 - PAGE))
    }

    /// The first place where `pages`, a power of two, lie together unused, and which `fits`. Small ones never lie in two words.
    pub fn find(&self, pages: u32, fits: impl Fn(u32) -> bool) -> Option<u32> {
        let needs = (pages as usize).div_ceil(64);
        let steps = 64u32.div_ceil(pages);
        let begin = (FIRST..=WORDS - needs).filter(|w| self.used[*w].load(Relaxed) != u64::MAX);
        begin
            .flat_map(|w| (0..steps).map(move |i| w as u32 * 64 + i * pages))
            .find(|page| bits(&self.used, *page, pages).all(|(w, bits)| w.load(Relaxed) & bits == 0) && fits(*page))
    }

    /// From now on they are somebody's.
    pub fn take(&self, page: u32, pages: u32) {
        bits(&self.used, page, pages).for_each(|(w, bits)| _ = w.fetch_or(bits, Release));
    }

    /// They are nobody's any more.
    pub fn give_back(&self, page: u32, pages: u32) {
        bits(&self.used, page, pages).for_each(|(w, bits)| _ = w.fetch_and(!bits, Release));
    }

    /// Bytes for which memory exists, and those that are somebody's.
    pub fn sizes(&self) -> (usize, usize) {
        let count =
            |map: &[AtomicU64]| map.iter().map(|w| w.load(Relaxed).count_ones() as usize).sum::<usize>() << PAGE;
        (count(&self.exist), count(&self.used))
    }

    /// Whether memory for all of them exists.
    pub fn exist(&self, page: u32, pages: u32) -> bool {
        bits(&self.exist, page, pages).all(|(w, bits)| w.load(Relaxed) & bits == bits)
    }

    /// It does.
    pub fn note_existing(&self, page: u32, pages: u32) {
        bits(&self.exist, page, pages).for_each(|(w, bits)| _ = w.fetch_or(bits, Release));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none() -> Box<Pages> {
        // SAFETY: atomics, for which zeroes are valid.
        Box::new(unsafe { core::mem::zeroed() })
    }

    fn get(p: &Pages, pages: u32) -> Option<u32> {
        let page = p.find(pages, |_| true)?;
        p.take(page, pages);
        Some(page)
    }

    #[test]
    fn what_came_back_in_pieces_is_whole_again() {
        let p = none();
        let small: Vec<u32> = std::iter::from_fn(|| get(&p, 4)).collect();
        assert_eq!(small.len(), (SEG_BYTES - BLOCKS_OFFSET) >> 14);
        assert_eq!(get(&p, 1), None);
        small.iter().for_each(|page| p.give_back(*page, 4));
        let large = (0..31).map(|_| get(&p, 2048).unwrap()).collect::<Vec<_>>();
        assert_eq!(get(&p, 2048), None, "the rest is smaller");
        assert!(get(&p, 1024).is_some());
        large.iter().for_each(|page| p.give_back(*page, 2048));
        assert!(get(&p, 32768).is_some(), "half of the segment");
    }

    /// Random blocks: no two have a page in common, none lies outside, and nothing is lost.
    #[test]
    fn no_page_is_two_blocks() {
        let p = none();
        let mut owner = vec![0u32; SEG_BYTES >> PAGE];
        let mut blocks: Vec<(u32, u32)> = Vec::new();
        let (mut seed, mut refused) = (1u64, 0);
        for n in 1..60_000u32 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let r = (seed >> 33) as u32;
            if r % 8 < 5 {
                let pages = 1 << ((r >> 3) % 11);
                let Some(page) = get(&p, pages) else {
                    refused += 1;
                    continue;
                };
                assert!(page as usize >= BLOCKS_OFFSET >> PAGE);
                let of = &mut owner[page as usize..][..pages as usize];
                assert!(of.iter().all(|o| *o == 0), "{page} {pages}");
                of.fill(n);
                blocks.push((page, pages));
            } else if !blocks.is_empty() {
                let (page, pages) = blocks.swap_remove(r as usize % blocks.len());
                p.give_back(page, pages);
                owner[page as usize..][..pages as usize].fill(0);
            }
        }
        assert!(refused > 1_000 && blocks.len() > 100, "{refused} {}", blocks.len());
        blocks.iter().for_each(|(page, pages)| p.give_back(*page, *pages));
        assert!(get(&p, 32768).is_some());
    }
}
