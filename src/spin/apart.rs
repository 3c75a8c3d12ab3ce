//! Leaving a processor that both ends of a connection share.
//!
//! The kernel wakes who reads from a socket where the writer runs, so two ends that have just left TCP often share a
//! processor while another one idles; and because they take turns, nobody who balances load sees two of them there. To
//! spin is in vain then, and each trip costs two switches between threads. A thread that has found that out goes to any
//! other processor of those it may use: its affinity is narrowed for the moment of the call, and put back.
//!
//! Not where somebody has set the thread's affinity, who knows better (and since Linux 6.2 a mask that was set is kept apart
//! from what the process' cpuset allows: only all processors are the same as none set, also when the cpuset grows); nor where
//! the process came with a filter of system calls, which may kill for one that it does not expect.

use super::Crowd;
use crate::log::{log, Level};
use crate::retire::is_filtered;
use crate::sys::sys;
use crate::thread::Critical;
use core::sync::atomic::AtomicBool;

/// Processors that a mask has room for: more than Linux can have (`NR_CPUS`).
const WORDS: usize = 128;

type Mask = [u64; WORDS];

/// No affinity: what the process' cpuset allows.
const ALL: Mask = [u64::MAX; WORDS];

/// The process has accepted connections that are on rings. Of two ends that share a processor one is to go: the other one,
/// unless it does not.
pub static SERVES: AtomicBool = AtomicBool::new(false);

/// When it was done last, and how long it is not to be done again.
static DONE: Crowd = Crowd::new();

/// Whether it may be tried at this moment.
pub fn may_part(now: i64) -> bool {
    now >= DONE.until() && !is_filtered()
}

/// The processors that this thread may use, and how many bytes of the mask the kernel has.
pub fn allowed() -> Option<(Mask, usize)> {
    let mut mask = [0; WORDS];
    // SAFETY: `mask` is writable for the length given.
    let n = unsafe { sys!(libc::SYS_sched_getaffinity, 0, size_of_val(&mask), mask.as_mut_ptr()) }.ok()?;
    Some((mask, n))
}

/// How many processors this thread may use.
pub fn count_allowed() -> u32 {
    allowed().map_or(1, |(mask, _)| mask.iter().map(|w| w.count_ones()).sum::<u32>().max(1))
}

fn allow(mask: &Mask, n: usize) -> bool {
    // SAFETY: `n` bytes of `mask` are readable.
    unsafe { sys!(libc::SYS_sched_setaffinity, 0, n, mask.as_ptr()) }.is_ok()
}

/// Goes to another processor, if [`may_part`] and there is one. Whether it has.
pub fn part(now: i64) -> bool {
    if !may_part(now) {
        return false;
    }
    DONE.met(now);
    // A handler would see the narrow mask, or give it to threads that it starts.
    let _critical = Critical::new();
    let mut cpu = 0u32;
    // SAFETY: one writable word.
    if unsafe { sys!(libc::SYS_getcpu, &raw mut cpu, 0usize, 0usize) }.is_err() {
        return false;
    }
    let Some((before, n)) = allowed() else { return false };
    if !allow(&ALL, n) || allowed().is_none_or(|(free, _)| free != before) {
        allow(&before, n);
        return false;
    }
    let mut others = before;
    if let Some(word) = others.get_mut(cpu as usize / 64) {
        *word &= !(1 << (cpu % 64));
    }
    if others == before || others == [0; WORDS] || !allow(&others, n) {
        return false;
    }
    // If somebody else has set it meanwhile, that holds.
    if allowed().is_some_and(|(now, _)| now == others) {
        allow(&ALL, n);
    }
    log(Level::Debug, format_args!("leaves processor {cpu}, which both ends of a connection share"));
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering::*;

    fn cpu() -> u32 {
        // SAFETY: no preconditions.
        unsafe { libc::sched_getcpu() as u32 }
    }

    #[test]
    fn the_processor_is_another_and_the_affinity_the_same() {
        std::thread::spawn(|| {
            let (before, n) = allowed().unwrap();
            let may = before.iter().map(|w| w.count_ones()).sum::<u32>() > 1;
            // (Where others run, the kernel may move it back at once.)
            let moved = (0..50).any(|_| {
                let here = cpu();
                DONE.until.store(0, Relaxed);
                assert_eq!(part(1), may);
                assert!(allowed().unwrap().0 == before);
                cpu() != here
            });
            assert_eq!(moved, may);
            assert!(!part(2), "so soon after the last time");
            // Where somebody has set it nothing happens.
            let mut one = [0; WORDS];
            one[cpu() as usize / 64] = 1 << (cpu() % 64);
            assert!(allow(&one, n));
            DONE.until.store(0, Relaxed);
            assert!(!part(1 << 40));
            assert!(allowed().unwrap().0 == one);
        })
        .join()
        .unwrap();
    }
}
