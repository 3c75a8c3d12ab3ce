//! Futexes, and a lock that lives in shared memory.

use crate::sys::{sys, SysResult};
use core::cell::Cell;
use core::sync::atomic::{fence, AtomicU32, Ordering::*};
use libc::timespec;

/// Wakes up to `n` sleepers of `word`, in any process.
pub fn futex_wake(word: *const AtomicU32, n: i32) {
    // SAFETY: the kernel only uses the address as a key; a bad one gives EFAULT.
    let _ = unsafe { sys!(libc::SYS_futex, word, libc::FUTEX_WAKE, n) };
}

/// Sleeps while `*word == val`, for at most `timeout_ns` (< 0: for ever). A handled signal gives
/// `EINTR` when there is a timeout, and otherwise as `SA_RESTART` says.
pub fn futex_wait(word: *const AtomicU32, val: u32, timeout_ns: i64) -> SysResult {
    let ts = timespec_of(timeout_ns);
    let tsp = if timeout_ns < 0 { core::ptr::null() } else { &ts };
    // SAFETY: `word` is mapped for as long as the caller holds its connection; `ts` outlives the call.
    unsafe { sys!(libc::SYS_futex, word, libc::FUTEX_WAIT, val, tsp) }
}

#[repr(C)]
struct WaitV {
    val: u64,
    addr: u64,
    flags: u32,
    reserved: u32,
}

/// Sleeps while both words hold their values, without a timeout; restarts as `SA_RESTART` says.
/// `ENOSYS` before Linux 5.16.
pub fn futex_wait2(a: *const AtomicU32, av: u32, b: *const AtomicU32, bv: u32) -> SysResult {
    const FUTEX_32: u32 = 2;
    let w = [
        WaitV { val: av.into(), addr: a as u64, flags: FUTEX_32, reserved: 0 },
        WaitV { val: bv.into(), addr: b as u64, flags: FUTEX_32, reserved: 0 },
    ];
    // SAFETY: as for `futex_wait`; `w` outlives the call.
    unsafe { sys!(449, w.as_ptr(), 2, 0, 0, 0) }
}

/// A time span for the kernel; negative spans become 0.
pub fn timespec_of(ns: i64) -> timespec {
    let ns = ns.max(0);
    timespec { tv_sec: ns / 1_000_000_000, tv_nsec: ns % 1_000_000_000 }
}

/// `CLOCK_MONOTONIC` in nanoseconds.
#[inline]
pub fn now_ns() -> i64 {
    let mut ts = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is writable; clock_gettime is served by the vDSO and is not interposed.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
    ts.tv_sec * 1_000_000_000 + ts.tv_nsec
}

thread_local! {
    static TID: Cell<u32> = const { Cell::new(0) };
}

/// The calling thread's id, cached.
#[inline]
pub fn tid() -> u32 {
    TID.with(|t| {
        let v = t.get();
        if v != 0 {
            return v;
        }
        // SAFETY: gettid has no preconditions.
        let v = unsafe { sys!(libc::SYS_gettid) }.unwrap_or(1) as u32;
        t.set(v);
        v
    })
}

/// After fork: the cached id is the parent's.
pub fn forget_tid() {
    TID.with(|t| t.set(0));
}

const WAITERS: u32 = 1 << 31;

/// A mutual-exclusion lock of one word, usable between processes.
///
/// The word is 0 when free, else the holder's thread id, with the top bit set
/// while others may be asleep. Holders never sleep while they hold it, so a
/// holder that is gone was killed: the lock is then taken over. Everything
/// that it protects is published by single atomic stores, so a holder that
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
        self.0.compare_exchange(0, tid(), Acquire, Relaxed).ok().map(|_| Guard(self))
    }

    /// Whether this very thread holds it: a signal handler has interrupted a call of ours.
    pub fn held_by_me(&self) -> bool {
        self.0.load(Relaxed) & !WAITERS == tid()
    }

    /// Takes the lock, sleeping if need be.
    #[inline]
    pub fn lock(&self) -> Guard<'_> {
        match self.try_lock() {
            Some(g) => g,
            None => self.lock_slow(),
        }
    }

    #[cold]
    fn lock_slow(&self) -> Guard<'_> {
        let me = tid();
        for _ in 0..100 {
            if let Some(g) = self.try_lock() {
                return g;
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
                // SAFETY: signal 0 only asks whether the thread exists.
                let gone = unsafe { sys!(libc::SYS_kill, holder, 0) } == Err(libc::ESRCH);
                if gone && self.0.compare_exchange(v, me | WAITERS, Acquire, Relaxed).is_ok() {
                    return Guard(self);
                }
            }
        }
    }

    /// In a forked child: whoever held this process-private lock is not here.
    pub fn reset_after_fork(&self) {
        self.0.store(0, Release);
    }
}

/// A store before it is visible to all before any load after it.
#[inline(always)]
pub fn full_fence() {
    fence(SeqCst);
}
