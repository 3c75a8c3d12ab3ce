//! Limits that the program sets for itself, as far as the library's own share of a resource matters.
//!
//! What a link maps counts in `RLIMIT_AS`, but a program that limits itself knows nothing of it. So the kernel gets a limit
//! that is higher by what the library has mapped by then, and the program reads the one that it has set. A new image has none
//! of these mappings: before `exec` the kernel gets the program's own limit.

use crate::ops::{
    self,
    Outcome::{self, Bypass, Done, Fail},
};
use crate::sys::{sys, SysResult};
use crate::{bg, copy, process, shm};
use core::sync::atomic::{AtomicU64, Ordering::*};
use libc::{c_uint, pid_t, rlimit, RLIM_INFINITY};

/// Soft and hard limit.
struct Pair([AtomicU64; 2]);

impl Pair {
    const fn new() -> Pair {
        Pair([const { AtomicU64::new(RLIM_INFINITY) }; 2])
    }

    fn get(&self) -> rlimit {
        rlimit { rlim_cur: self.0[0].load(SeqCst), rlim_max: self.0[1].load(SeqCst) }
    }

    fn put(&self, r: rlimit) {
        self.0[0].store(r.rlim_cur, SeqCst);
        self.0[1].store(r.rlim_max, SeqCst);
    }

    fn is(&self, r: rlimit) -> bool {
        let own = self.get();
        own.rlim_cur == r.rlim_cur && own.rlim_max == r.rlim_max
    }
}

/// `RLIMIT_AS` as the program has set it, and what the kernel got for it.
static SET: Pair = Pair::new();
static GIVEN: Pair = Pair::new();
/// `RLIMIT_NPROC` (soft) when the library was loaded.
static THREADS: AtomicU64 = AtomicU64::new(RLIM_INFINITY);

/// The library is loaded.
pub fn init() {
    THREADS.store(ask(libc::RLIMIT_NPROC).map_or(RLIM_INFINITY, |r| r.rlim_cur), Relaxed);
}

/// Whether the program itself has said how many processes and threads there may be.
pub fn has_set_threads() -> bool {
    ask(libc::RLIMIT_NPROC).is_ok_and(|r| r.rlim_cur != THREADS.load(Relaxed))
}

/// How many files the process may have open.
pub fn files() -> usize {
    ask(libc::RLIMIT_NOFILE).map_or(usize::MAX, |r| r.rlim_cur as usize)
}

fn ask(resource: c_uint) -> SysResult<rlimit> {
    let mut r = rlimit { rlim_cur: RLIM_INFINITY, rlim_max: RLIM_INFINITY };
    // SAFETY: `r` is writable.
    unsafe { sys!(libc::SYS_prlimit64, 0, resource, 0, &mut r) }.map(|_| r)
}

fn give(r: rlimit) -> SysResult {
    // SAFETY: `r` is readable.
    unsafe { sys!(libc::SYS_prlimit64, 0, libc::RLIMIT_AS, &r, 0) }
}

/// What the program is to take for its limit, if the kernel has this one: somebody else may have set it since.
fn known(kernels: rlimit) -> rlimit {
    if GIVEN.is(kernels) {
        SET.get()
    } else {
        kernels
    }
}

/// What the kernel is to have where the program wants `new`, the kernel has `now`, and the program knows `before`: higher by
/// `more`. Where the program may not raise its hard limit the kernel must be asked for more than it has, to refuse it.
fn raised(new: rlimit, now: rlimit, before: rlimit, more: u64) -> rlimit {
    let up = |n: u64| if n == RLIM_INFINITY { n } else { n.saturating_add(more).min(RLIM_INFINITY - 1) };
    let max = if new.rlim_max > before.rlim_max {
        up(new.rlim_max).max(now.rlim_max.saturating_add(1))
    } else {
        up(new.rlim_max).min(now.rlim_max)
    };
    rlimit { rlim_cur: up(new.rlim_cur).min(max), rlim_max: max }
}

/// `prlimit(2)`, by which `setrlimit` and `getrlimit` are made, too.
///
/// # Safety
/// None: there may be nothing at `new` and `old`.
pub unsafe fn prlimit(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> Outcome {
    let own = pid == 0 || pid as u32 == process::pid();
    // No `poll` looks at anything then, and this library lives by it.
    if own && resource == libc::RLIMIT_NOFILE && copy::read(new).is_ok_and(|r| r.rlim_cur == 0) {
        ops::confining();
    }
    let ours = resource == libc::RLIMIT_AS && own;
    let more = if ours { shm::mapped() + bg::mapped() } else { 0 };
    // A guest is about to become another image.
    if more == 0 || !new.is_null() && process::is_guest() {
        return Bypass;
    }
    let Ok(now) = ask(resource) else { return Bypass };
    let before = known(now);
    if !new.is_null() {
        // SAFETY: any bits are valid.
        let Ok(new) = (unsafe { copy::read(new) }) else { return Fail(libc::EFAULT) };
        if new.rlim_cur > new.rlim_max {
            return Fail(libc::EINVAL);
        }
        let to = raised(new, now, before, more);
        if let Err(e) = give(to) {
            return Fail(e);
        }
        SET.put(new);
        GIVEN.put(to);
    }
    if !old.is_null() && copy::write(old, before).is_err() {
        return Fail(libc::EFAULT);
    }
    Done(0)
}

/// Before a new image begins in this process.
pub fn before_exec() {
    swap(&GIVEN, &SET);
}

/// It has not begun. The hard limit can be what it was only where the program may raise it.
pub fn exec_failed() {
    swap(&SET, &GIVEN);
}

fn swap(from: &Pair, to: &Pair) {
    let to = to.get();
    if !from.is(to) && ask(libc::RLIMIT_AS).is_ok_and(|now| from.is(now)) {
        let _ = give(to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    fn pair(rlim_cur: u64, rlim_max: u64) -> rlimit {
        rlimit { rlim_cur, rlim_max }
    }

    fn gives(new: rlimit, now: rlimit, before: rlimit) -> (u64, u64) {
        let r = raised(new, now, before, 700 * MB);
        (r.rlim_cur, r.rlim_max)
    }

    #[test]
    fn a_limit_is_raised_as_far_as_the_hard_one_permits() {
        let none = pair(RLIM_INFINITY, RLIM_INFINITY);
        assert_eq!(gives(none, none, none), (RLIM_INFINITY, RLIM_INFINITY));
        assert_eq!(gives(pair(200 * MB, RLIM_INFINITY), none, none), (900 * MB, RLIM_INFINITY));
        assert_eq!(gives(pair(200 * MB, 300 * MB), none, none), (900 * MB, 1000 * MB));
        let hard = pair(400 * MB, 500 * MB);
        assert_eq!(gives(pair(200 * MB, 500 * MB), hard, hard), (500 * MB, 500 * MB));
    }

    #[test]
    fn who_may_not_raise_the_hard_limit_is_refused() {
        let (now, before) = (pair(900 * MB, 1000 * MB), pair(200 * MB, 300 * MB));
        // The same again, when less is mapped and when more is.
        assert_eq!(gives(before, now, before), (900 * MB, 1000 * MB));
        assert_eq!(gives(before, pair(800 * MB, 900 * MB), before), (900 * MB, 900 * MB));
        assert!(gives(pair(200 * MB, 301 * MB), now, before).1 > now.rlim_max);
        assert!(gives(pair(200 * MB, 301 * MB), pair(5000 * MB, 5000 * MB), before).1 > 5000 * MB);
    }
}
