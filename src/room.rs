//! Memory for the length of one call, where the program's stack may be a small one (a coroutine's, a thread's of
//! `PTHREAD_STACK_MIN`). To map it anew for each call takes longer than what it is wanted for, so some is kept for the next ones, of
//! whichever threads. A call that is left by a jump does not give its own back.

use crate::shm::{self, Map};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering::*};

/// How much each has.
pub const BYTES: usize = 64 << 10;

/// [`BYTES`] bytes, aligned to pages, given back at the end.
pub struct Room(*mut u8);

static SPARE: [AtomicPtr<u8>; 8] = [const { AtomicPtr::new(null_mut()) }; 8];

impl Room {
    /// `None`: there is no memory. What is in it is left over from other calls.
    pub fn take() -> Option<Room> {
        let spare = SPARE.iter().map(|s| s.swap(null_mut(), Acquire)).find(|p| !p.is_null());
        spare.or_else(|| shm::anon_private(BYTES).ok().map(|m| m.base)).map(Room)
    }

    /// Its first byte.
    pub fn at(&self) -> *mut u8 {
        self.0
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if !SPARE.iter().any(|s| s.compare_exchange(null_mut(), self.0, Release, Relaxed).is_ok()) {
            // SAFETY: mapped by `take`, and nobody else knows of it.
            unsafe { shm::unmap(Map { base: self.0, len: BYTES }) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_gets_what_another_has() {
        let mut threads = Vec::new();
        for id in 1..=12u8 {
            threads.push(std::thread::spawn(move || {
                for _ in 0..500 {
                    let room = Room::take().unwrap();
                    // SAFETY: it has so many bytes, and is ours.
                    let bytes = unsafe { core::slice::from_raw_parts_mut(room.at(), BYTES) };
                    bytes[..64].fill(id);
                    std::thread::yield_now();
                    assert!(bytes[..64].iter().all(|b| *b == id));
                    bytes[BYTES - 1] = id;
                }
            }));
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
    }
}
