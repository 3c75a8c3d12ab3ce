//! Futexes, and a lock that lives in shared memory.

use crate::sys::{sys, SysResult};
use crate::thread::{enter, leave, tid, Within};
#[cfg(target_arch = "x86_64")]
use core::sync::atomic::compiler_fence;
#[cfg(not(target_arch = "x86_64"))]
use core::sync::atomic::fence;
use core::sync::atomic::{AtomicU32, Ordering::*};
use libc::timespec;

/// Wakes up to `n` sleepers of `word`, in any process.
#[inline(never)]
pub fn futex_wake(word: *const AtomicU32, n: i32) {
    // SAFETY: the kernel only uses the address as a key; a bad one gives EFAULT.
    let _ = unsafe { sys!(libc::SYS_futex, word, libc::FUTEX_WAKE, n) };
}

/// Sleeps while `*word == val`, for at most `timeout_ns` (< 0: for ever).
pub fn futex_wait(word: *const AtomicU32, val: u32, timeout_ns: i64) -> SysResult {
    let ts = timespec_of(timeout_ns);
    let tsp = if timeout_ns < 0 { core::ptr::null() } else { &ts };
    // SAFETY: `word` is mapped for as long as the caller holds its connection; `ts` outlives the call.
    unsafe { sys!(libc::SYS_futex, word, libc::FUTEX_WAIT, val, tsp) }
}

/// What `futex_waitv(2)` waits for: that a word has another value.
#[repr(C)]
pub struct WaitV {
    val: u64,
    addr: u64,
    flags: u32,
    reserved: u32,
}

impl WaitV {
    /// For a word of shared memory.
    pub fn new(word: *const AtomicU32, val: u32) -> WaitV {
        const FUTEX_32: u32 = 2;
        WaitV { val: val.into(), addr: word as u64, flags: FUTEX_32, reserved: 0 }
    }
}

/// A time span for the kernel; negative spans become 0.
pub fn timespec_of(ns: i64) -> timespec {
    let ns = ns.max(0);
    timespec { tv_sec: ns / 1_000_000_000, tv_nsec: ns % 1_000_000_000 }
}

/// Sleeps for so many nanoseconds, or until a signal comes.
pub fn pause(ns: i64) {
    let ts = timespec_of(ns);
    // SAFETY: `ts` is readable.
    let _ = unsafe { sys!(libc::SYS_nanosleep, &ts, 0) };
}

/// `CLOCK_MONOTONIC` in nanoseconds.
#[inline]
pub fn now_ns() -> i64 {
    let mut ts = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is writable; clock_gettime is served by the vDSO and is not interposed.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
    ts.tv_sec * 1_000_000_000 + ts.tv_nsec
}

/// The same as of the kernel's last tick, at most [`TICK_NS`] ago, for a third of the price.
#[inline]
pub fn coarse_ns() -> i64 {
    let mut ts = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: as above.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut ts) };
    ts.tv_sec * 1_000_000_000 + ts.tv_nsec
}

/// The longest time between two ticks of a kernel: `CONFIG_HZ=100`.
pub const TICK_NS: i64 = 10_000_000;

/// In a loop that waits for another thread to take a few steps, which may have to get the processor first.
#[cold]
pub fn give_way(tries: &mut u32) {
    const SPINS: u32 = 100;
    *tries += 1;
    if *tries < SPINS {
        return core::hint::spin_loop();
    }
    // A thread of a lower priority gets it only from one that sleeps.
    pause(20_000);
}

const WAITERS: u32 = 1 << 31;

/// A mutual-exclusion lock of one word, usable between processes.
///
/// The word is 0 when free, else the holder's thread id, with the top bit set
/// while others may be asleep. Holders never sleep while they hold it, so a
/// holder that is gone was killed: the lock is then taken over. While one is
/// held, signal handlers are put off ([`crate::signals`]). Everything that it
/// protects is published by single atomic stores, so a holder that
/// dies in the middle leaves nothing half done that a successor could see.
#[repr(transparent)]
#[derive(Default)]
pub struct Lock(AtomicU32);

/// Unlocks when dropped.
pub struct Guard<'a>(&'a Lock);

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.0 .0.swap(0, Release) & WAITERS != 0 {
            futex_wake(&self.0 .0, 1);
        }
        leave();
    }
}

/// Of a lock that is held within a critical section which outlasts that. Unlocks when dropped.
pub(crate) struct Held<'a>(&'a Lock);

impl Drop for Held<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.0 .0.swap(0, Release) & WAITERS != 0 {
            futex_wake(&self.0 .0, 1);
        }
    }
}

impl Held<'_> {
    /// Unlocks. What was stored before is seen by all before anything is loaded after it.
    #[inline(always)]
    pub(crate) fn unlock_and_fence(self) {
        drop(self);
        // An exchange is such a fence already on this processor.
        #[cfg(target_arch = "x86_64")]
        compiler_fence(SeqCst);
        #[cfg(not(target_arch = "x86_64"))]
        fence(SeqCst);
    }
}

impl Lock {
    /// A free lock.
    pub const fn new() -> Self {
        Lock(AtomicU32::new(0))
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_>> {
        let me = enter();
        if self.0.compare_exchange(0, me, Acquire, Relaxed).is_ok() {
            return Some(Guard(self));
        }
        leave();
        None
    }

    /// The same within a critical section of the caller's.
    #[inline(always)]
    pub(crate) fn try_hold<'a>(&'a self, by: Within<'a>) -> Option<Held<'a>> {
        self.0.compare_exchange(0, by.0, Acquire, Relaxed).is_ok().then(|| Held(self))
    }

    /// Whether this very thread holds it: a signal handler has interrupted a call of ours.
    pub fn held_by_me(&self) -> bool {
        self.0.load(Relaxed) & !WAITERS == tid()
    }

    /// Takes the lock, sleeping if need be.
    #[inline]
    pub fn lock(&self) -> Guard<'_> {
        let me = enter();
        match self.0.compare_exchange(0, me, Acquire, Relaxed) {
            Ok(_) => Guard(self),
            Err(_) => self.lock_slow(me),
        }
    }

    #[cold]
    #[inline(never)]
    fn lock_slow(&self, me: u32) -> Guard<'_> {
        for _ in 0..100 {
            if self.0.compare_exchange(0, me, Acquire, Relaxed).is_ok() {
                return Guard(self);
            }
            core::hint::spin_loop();
        }
        loop {
            let v = self.0.load(Relaxed);
            if v == 0 {
                // Others may still be asleep: say so for them.
                if self.0.compare_exchange(0, me | WAITERS, Acquire, Relaxed).is_ok() {
                    return Guard(self);
                }
                continue;
            }
            if v & WAITERS == 0 && self.0.compare_exchange(v, v | WAITERS, Relaxed, Relaxed).is_err() {
                continue;
            }
            let v = v | WAITERS;
            if futex_wait(&self.0, v, 50_000_000) == Err(libc::ETIMEDOUT) {
                let holder = v & !WAITERS;
                let gone = crate::liveness::is_dead(holder);
                if gone && self.0.compare_exchange(v, me | WAITERS, Acquire, Relaxed).is_ok() {
                    return Guard(self);
                }
            }
        }
    }

    /// Whether its holder is dead, so that [`Lock::lock`] takes it over.
    pub fn is_orphaned(&self) -> bool {
        let holder = self.0.load(Relaxed) & !WAITERS;
        holder != 0 && crate::liveness::is_dead(holder)
    }

    /// Whether anybody holds it.
    pub fn is_held(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    /// In a forked child: whoever held this process-private lock is not here.
    pub fn reset_after_fork(&self) {
        self.0.store(0, Release);
    }
}

/// A store before it is visible to all before any load after it.
#[inline(always)]
pub fn full_fence() {
    // What a locked instruction does as well takes half the time of the `mfence` that a compiler makes of it.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: adds nothing to what lies there, at once, so that nobody sees that it was written.
    unsafe {
        core::arch::asm!("lock or dword ptr [rsp], 0", options(nostack));
    }
    #[cfg(not(target_arch = "x86_64"))]
    fence(SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thread::Critical;

    /// Who was killed while it held a lock keeps nobody out.
    #[test]
    fn a_lock_of_the_dead_is_taken_over() {
        let mut dead = std::process::Command::new("/bin/true").spawn().unwrap();
        let lock = Lock(AtomicU32::new(dead.id()));
        dead.wait().unwrap();
        assert!(lock.is_orphaned() && lock.try_lock().is_none());
        let held = lock.lock();
        assert!(lock.is_held() && !lock.is_orphaned());
        drop(held);
        assert!(!lock.is_held() && !lock.is_orphaned());
    }

    /// What was not taken is not let go.
    #[test]
    fn a_lock_that_another_has_stays_his() {
        let (lock, c) = (Lock::new(), Critical::new());
        let held = lock.try_hold(c.within());
        assert!(held.is_some() && lock.is_held());
        assert!(lock.try_hold(c.within()).is_none());
        assert!(lock.is_held());
        drop(held);
        assert!(!lock.is_held());
    }
}
