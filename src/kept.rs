//! Bytes that were taken out of a TCP stream for somebody who gets them later.

use crate::copy::{copy, Fault};
use crate::shm::{self, Map};
use crate::side::Side;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The last number that a mapping got.
static LAST: AtomicU32 = AtomicU32::new(0);

/// Such bytes, in the order in which they came. To be [released](Kept::release), because it is copied freely.
#[derive(Debug, Clone, Copy)]
pub struct Kept {
    ptr: *mut u8,
    cap: usize,
    start: usize,
    end: usize,
    /// Which mapping it is: a child that was forked later has it, too. 0: it is a block of `side`'s.
    id: u32,
    side: *const Side,
    page: u32,
}

impl Kept {
    /// None, and no memory.
    pub const NONE: Kept =
        Kept { ptr: core::ptr::null_mut(), cap: 0, start: 0, end: 0, id: 0, side: core::ptr::null(), page: 0 };

    /// How many there are.
    #[inline]
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.end == self.start
    }

    /// Which mapping they are in, of all that the process has made; 0: whoever has the rings mapped has them, too.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// All of them.
    pub fn bytes(&self) -> &[u8] {
        if self.ptr.is_null() {
            return &[];
        }
        // SAFETY: inside our mapping, where `added` said that so much was written.
        unsafe { core::slice::from_raw_parts(self.ptr.add(self.start), self.len()) }
    }

    /// Where the next `n` bytes are to be written, which [`Kept::added`] is to be told of. `None`: no memory. A block of
    /// `side`'s, if there is one, because children have that mapped; it must outlive what is kept.
    pub fn room(&mut self, n: usize, side: Option<&Side>) -> Option<*mut u8> {
        let need = self.end.checked_add(n)?;
        if need > self.cap {
            let cap = need.max(64 << 10).checked_next_power_of_two()?;
            let block = side.and_then(|s| Some((s, s.alloc_block(cap.trailing_zeros())?)));
            let base = match block {
                Some((s, page)) => s.block(page),
                None => shm::anon_shared(cap).ok()?.base,
            };
            // SAFETY: both mappings hold `end` bytes and do not overlap.
            unsafe {
                if !self.ptr.is_null() {
                    core::ptr::copy_nonoverlapping(self.ptr, base, self.end);
                }
                self.give_back();
            }
            (self.ptr, self.cap) = (base, cap);
            (self.side, self.page) = block.map_or((core::ptr::null(), 0), |(s, page)| (s as *const Side, page));
            self.id = if self.side.is_null() { LAST.fetch_add(1, Relaxed).wrapping_add(1).max(1) } else { 0 };
        }
        // SAFETY: `end <= cap`.
        Some(unsafe { self.ptr.add(self.end) })
    }

    /// So many bytes were written to [`Kept::room`].
    pub fn added(&mut self, n: usize) {
        self.end = (self.end + n).min(self.cap);
    }

    /// Takes up to `len` of the first ones, or (not `COPY`) forgets them. Returns the count.
    ///
    /// # Safety
    /// `dst` must be the program's for `len` bytes, or writable.
    pub unsafe fn take<const COPY: bool>(&mut self, dst: *mut u8, len: usize) -> Result<usize, Fault> {
        let n = len.min(self.len());
        if COPY && n > 0 {
            // SAFETY: `n` bytes are there; `dst` by the caller's promise.
            unsafe { copy(self.ptr.add(self.start), dst, n) }?;
        }
        self.start += n;
        Ok(n)
    }

    /// Forgets up to `len` of the first ones.
    pub fn pass(&mut self, len: usize) {
        self.start += len.min(self.len());
    }

    /// Forgets them and gives the memory back. Of several copies only one may.
    pub fn release(&mut self) {
        // SAFETY: the caller's promise.
        unsafe { self.give_back() };
        *self = Kept::NONE;
    }

    /// # Safety
    /// Nothing may use the memory any more.
    unsafe fn give_back(&self) {
        // SAFETY: the promise of who called `room`.
        if let Some(side) = unsafe { self.side.as_ref() } {
            side.free_block(self.page, self.cap.trailing_zeros());
        } else if !self.ptr.is_null() {
            // SAFETY: mapped by `room`, with that length.
            unsafe { shm::unmap(Map { base: self.ptr, len: self.cap }) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_added_comes_out_in_order() {
        let mut k = Kept::NONE;
        assert!(k.is_empty() && k.bytes().is_empty());
        let mut sent = Vec::new();
        for n in [1usize, 70_000, 3, 200_000] {
            let at = k.room(n, None).expect("memory");
            let part: Vec<u8> = (0..n).map(|i| (i * 7 + n) as u8).collect();
            // SAFETY: `room` gave so much.
            unsafe { core::ptr::copy_nonoverlapping(part.as_ptr(), at, n) };
            k.added(n);
            sent.extend(part);
        }
        let mut got = vec![0; 100_000];
        // SAFETY: the buffer has that length.
        assert_eq!(unsafe { k.take::<true>(got.as_mut_ptr(), got.len()) }, Ok(got.len()));
        assert_eq!(got, sent[..100_000]);
        assert_eq!(k.bytes(), &sent[100_000..]);
        k.release();
        assert!(k.is_empty());
    }
}
