//! What a forked child must not find half done: a list of a set that another thread is rewriting, an fd of the library's of
//! which nobody has noted yet, or any more, that a child is not to keep it.
//!
//! The child has a copy of the parent's memory and fds, in which every other thread stands still at one of its instructions.
//! To hold locks during a fork would be simple, and could deadlock: libc's own locks are taken in between, and the program's.
//! So a fork waits until nothing of this kind is under way, which takes nanoseconds, or a system call, and who is about to
//! begin it waits until no fork is under way. Either wait is bounded, in case the one waits for the other.

use crate::sync::now_ns;
use crate::sys::sys;
use crate::thread::Critical;
use core::cell::Cell;
use core::sync::atomic::{AtomicU32, Ordering::*};

/// How long either waits for the other.
const PATIENCE_NS: i64 = 100_000_000;

/// How many forks are under way.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// How many [`Between`] there are.
static BETWEEN: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// This thread forks, and is counted in [`FORKS`].
    static FORKING: Cell<bool> = const { Cell::new(false) };
    /// How many of [`BETWEEN`] are this thread's: a handler within one may fork.
    static MINE: Cell<u32> = const { Cell::new(0) };
}

/// Waits until `done`, but not for ever. Whether it is.
pub fn await_it(done: impl Fn() -> bool) -> bool {
    let until = now_ns() + PATIENCE_NS;
    loop {
        if done() {
            return true;
        }
        if now_ns() > until {
            return false;
        }
        // SAFETY: no preconditions.
        let _ = unsafe { sys!(libc::SYS_sched_yield) };
    }
}

/// Before a fork, which waits for what is under way. To be followed by [`is_over`].
pub fn begins() {
    if !FORKING.replace(true) {
        FORKS.fetch_add(1, SeqCst);
    }
    await_it(|| BETWEEN.load(SeqCst) <= MINE.get());
}

/// The fork that this thread has begun is over, in the parent.
pub fn is_over() {
    if FORKING.replace(false) {
        FORKS.fetch_sub(1, SeqCst);
    }
}

/// Whether a thread of the program forks.
#[inline(always)]
pub fn is_under_way() -> bool {
    FORKS.load(SeqCst) > 0
}

/// Whether another thread than the calling one does.
pub fn is_anothers() -> bool {
    is_under_way() && !FORKING.get()
}

/// In the child, where no fork is under way.
pub fn reset_after_fork() {
    FORKING.set(false);
    FORKS.store(0, SeqCst);
    BETWEEN.store(MINE.get(), SeqCst);
}

/// While it lives no other thread forks: an fd is there, but not what is to be noted of it, or the other way round. No handler
/// of this thread's that might jump out of it runs before its end.
pub struct Between(#[expect(dead_code, reason = "it ends with this")] Critical);

impl Between {
    /// Waits, for a bounded time, until no other thread forks.
    pub fn begin() -> Between {
        let section = Critical::new();
        if MINE.get() > 0 || !may_begin() && !await_it(may_begin) {
            // A fork waits for the caller already, or there is no end of it.
            BETWEEN.fetch_add(1, SeqCst);
        }
        MINE.set(MINE.get() + 1);
        Between(section)
    }
}

/// Counts one [`Between`] more, if no other thread forks.
fn may_begin() -> bool {
    // Either this sees the fork, or that sees this.
    BETWEEN.fetch_add(1, SeqCst);
    let may = !is_anothers();
    if !may {
        BETWEEN.fetch_sub(1, SeqCst);
    }
    may
}

impl Drop for Between {
    fn drop(&mut self) {
        MINE.set(MINE.get() - 1);
        // In a child that was forked by a handler it may not be counted.
        let _ = BETWEEN.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
    }
}

/// For tests that begin forks: others see them.
#[cfg(test)]
pub static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    /// Either waits for a bounded time, so a thread that gets no processor for that long finds what must not be: it is tried again
    /// then, but no other failure is, and not more than twice.
    fn in_time(what: fn() -> Result<(), &'static str>) {
        for left in (0..3).rev() {
            let began = Instant::now();
            let Err(why) = what() else { return };
            assert!(left > 0 && began.elapsed() >= Duration::from_nanos(PATIENCE_NS as u64), "{why}");
        }
    }

    #[test]
    fn a_fork_and_an_fd_half_made_wait_for_each_other() {
        let _alone = ALONE.lock();
        in_time(|| {
            let (begun, has_begun) = channel();
            let outer = Between::begin();
            std::thread::scope(|scope| {
                let forks = scope.spawn(move || {
                    begins();
                    begun.send(Instant::now()).unwrap();
                    // Who forks makes fds, too.
                    drop(Between::begin());
                    std::thread::sleep(Duration::from_millis(5));
                    let over = Instant::now();
                    is_over();
                    over
                });
                if has_begun.recv_timeout(Duration::from_millis(20)).is_ok() {
                    return Err("a fork begins in between");
                }
                // It is waited for: this cannot wait for it.
                let before = Instant::now();
                drop(Between::begin());
                if before.elapsed() >= Duration::from_millis(50) {
                    return Err("two wait for each other");
                }
                drop(outer);
                let begun = has_begun.recv().unwrap();
                let next = Between::begin();
                let in_between = Instant::now();
                drop(next);
                let over = forks.join().unwrap();
                if in_between < over || over < begun {
                    return Err("an fd is made during a fork");
                }
                Ok(())
            })
        });
    }

    #[test]
    fn a_handler_may_fork_in_between() {
        let _alone = ALONE.lock();
        in_time(|| {
            let between = Between::begin();
            let before = Instant::now();
            begins();
            let took = before.elapsed();
            is_over();
            drop(between);
            if took >= Duration::from_nanos(PATIENCE_NS as u64) {
                return Err("it waits for itself");
            }
            Ok(())
        });
        assert_eq!(MINE.get(), 0);
    }
}
