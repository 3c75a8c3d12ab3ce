//! The limit of shared memory itself on this host: two threads, one buffer, no socket and no library.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::time::{Duration, Instant};

const RING: usize = 1 << 20;

/// A buffer of bytes with one writer and one reader at a time.
struct Shared {
    bytes: UnsafeCell<Vec<u8>>,
    written: AtomicUsize,
    read: AtomicUsize,
    over: AtomicBool,
}

// SAFETY: the cursors say which part of the bytes belongs to the writer and which to the reader.
unsafe impl Sync for Shared {}

impl Shared {
    fn new() -> Shared {
        Shared {
            bytes: UnsafeCell::new(vec![0; RING]),
            written: AtomicUsize::new(0),
            read: AtomicUsize::new(0),
            over: AtomicBool::new(false),
        }
    }

    fn at(&self, pos: usize) -> *mut u8 {
        // SAFETY: the vector is never resized; the position is within it.
        unsafe { (*self.bytes.get()).as_mut_ptr().add(pos % RING) }
    }

    fn until(&self, ready: impl Fn() -> bool) -> bool {
        let mut n = 0u32;
        while !ready() {
            if self.over.load(Relaxed) {
                return false;
            }
            n += 1;
            if n.is_multiple_of(4096) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        true
    }

    /// Copies `m` in; `false` when the run is over.
    fn put(&self, m: &[u8]) -> bool {
        let w = self.written.load(Relaxed);
        // Messages lie on multiples of their size, a power of two: none wraps.
        if !self.until(|| w + m.len() - self.read.load(Acquire) <= RING) {
            return false;
        }
        // SAFETY: the part from `w` on is the writer's until it is published.
        unsafe { std::ptr::copy_nonoverlapping(m.as_ptr(), self.at(w), m.len()) };
        self.written.store(w + m.len(), Release);
        true
    }

    /// Copies a message out; `false` when the run is over.
    fn get(&self, m: &mut [u8]) -> bool {
        let r = self.read.load(Relaxed);
        if !self.until(|| self.written.load(Acquire) - r >= m.len()) {
            return false;
        }
        // SAFETY: the part up to `written` is the reader's until it gives it back.
        unsafe { std::ptr::copy_nonoverlapping(self.at(r), m.as_mut_ptr(), m.len()) };
        self.read.store(r + m.len(), Release);
        true
    }
}

fn size_of(size: usize) -> usize {
    size.next_power_of_two().min(RING / 4)
}

/// Megabytes per second of messages of a size (rounded up to a power of two), one way.
pub fn flow(size: usize, time: Duration) -> f64 {
    let (ring, size) = (Shared::new(), size_of(size));
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut m = vec![0; size];
            while ring.get(&mut m) {
                std::hint::black_box(&m);
            }
        });
        let (m, t) = (vec![7; size], Instant::now());
        let mut n = 0u64;
        while t.elapsed() < time {
            for _ in 0..16 {
                ring.put(&m);
                n += 1;
            }
        }
        let secs = t.elapsed().as_secs_f64();
        ring.over.store(true, Relaxed);
        n as f64 * size as f64 / secs / 1e6
    })
}

/// Median round trip in microseconds of messages of a size.
pub fn trip(size: usize, time: Duration) -> f64 {
    let (there, back, size) = (Shared::new(), Shared::new(), size_of(size));
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut m = vec![0; size];
            while there.get(&mut m) && back.put(&m) {}
        });
        let (mut m, t, mut ns) = (vec![7; size], Instant::now(), Vec::new());
        while t.elapsed() < time {
            let at = Instant::now();
            there.put(&m);
            back.get(&mut m);
            ns.push(at.elapsed().as_nanos() as u64);
        }
        for r in [&there, &back] {
            r.over.store(true, Relaxed);
        }
        ns.sort_unstable();
        ns[ns.len() / 2] as f64 / 1000.0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_limits_are_numbers() {
        let short = Duration::from_millis(20);
        assert!(flow(1000, short) > 0.0);
        assert!(trip(64, short) > 0.0);
        assert!(flow(4 << 20, short) > 0.0);
    }
}
