//! Spinning before sleeping, only where it pays.
//!
//! A thread remembers how long its recent waits took. Where they are shorter
//! than a sleep costs, it spins; where they are not, it sleeps at once, but
//! tries a spin now and then, because two sides that both sleep can never find
//! out that both would have been quick. While it spins it yields; a yield that
//! takes long means that others want the processor, and ends spinning for a while.

use crate::config::{self, Spin};
use crate::sync::now_ns;
use crate::sys::sys;
use core::cell::Cell;
use core::sync::atomic::{AtomicU32, Ordering::*};

/// Longer than this is never spun in `auto` mode: about what a sleep and a wake-up cost.
const WORTH_NS: i64 = 50_000;
/// In `auto` mode one wait in so many is spun although it looks hopeless.
const PROBE: u32 = 32;

thread_local! {
    static EXPECTED: Cell<i64> = const { Cell::new(0) };
    static COUNT: Cell<u32> = const { Cell::new(0) };
    static CROWDED: Cell<u32> = const { Cell::new(0) };
}

static CPUS: AtomicU32 = AtomicU32::new(0);

fn cpus() -> u32 {
    let n = CPUS.load(Relaxed);
    if n != 0 {
        return n;
    }
    let mut mask = [0u64; 128];
    // SAFETY: `mask` is writable for the length given.
    let got = unsafe { sys!(libc::SYS_sched_getaffinity, 0, size_of_val(&mask), mask.as_mut_ptr()) }.unwrap_or(8);
    let n = mask[..got / 8].iter().map(|w| w.count_ones()).sum::<u32>().max(1);
    CPUS.store(n, Relaxed);
    n
}

/// One wait.
pub struct Wait {
    begun: i64,
    budget: i64,
}

impl Wait {
    /// A wait begins.
    #[inline]
    pub fn begin() -> Wait {
        let budget = match config::get().spin {
            Spin::Us(us) => i64::from(us) * 1000,
            Spin::Auto => auto_budget(),
        };
        Wait { begun: now_ns(), budget }
    }

    /// Polls `done` until it is true or spinning no longer pays. `slow` is polled every few microseconds.
    pub fn spin(&self, mut done: impl FnMut() -> bool, mut slow: impl FnMut() -> bool) -> bool {
        let mut done = || {
            crate::remote::progress();
            done()
        };
        if self.budget == 0 {
            return done();
        }
        let mut next_slow = self.begun + 5_000;
        loop {
            for _ in 0..32 {
                if done() {
                    return true;
                }
                core::hint::spin_loop();
            }
            let now = now_ns();
            if now - self.begun > self.budget {
                return false;
            }
            if now > next_slow {
                if slow() {
                    return true;
                }
                // SAFETY: no preconditions.
                let _ = unsafe { sys!(libc::SYS_sched_yield) };
                let after = now_ns();
                if after - now > 30_000 && matches!(config::get().spin, Spin::Auto) {
                    CROWDED.with(|c| c.set(64));
                    return done();
                }
                next_slow = after + 5_000;
            }
        }
    }

    /// The wait is over: something came (not: a timeout).
    #[inline]
    pub fn end(self) {
        let took = (now_ns() - self.begun).min(1_000_000);
        EXPECTED.with(|e| {
            let old = e.get();
            // A short wait is believed at once: it ends the state in which both sides sleep.
            e.set(if took < WORTH_NS / 2 { took.max(old / 4) } else { (old * 3 + took) / 4 });
        });
    }
}

#[inline]
fn auto_budget() -> i64 {
    if cpus() < 2 {
        return 0;
    }
    let crowded = CROWDED.with(|c| {
        let n = c.get();
        c.set(n.saturating_sub(1));
        n > 0
    });
    if crowded {
        return 0;
    }
    if EXPECTED.with(Cell::get) < WORTH_NS {
        return WORTH_NS;
    }
    let n = COUNT.with(|c| {
        c.set(c.get().wrapping_add(1));
        c.get()
    });
    if n.is_multiple_of(PROBE) {
        WORTH_NS
    } else {
        0
    }
}
