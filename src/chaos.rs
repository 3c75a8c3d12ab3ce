//! `RINGSOCK_CHAOS`: every upgrade, return and re-upgrade happens at a random moment. For tests only.
//!
//! The moments come from a generator that is seeded with the setting and the process id. Unless the setting is
//! given nothing here runs but a look at the configuration, and that only where a connection changes its path.

use crate::conn::{Conn, Phase};
use crate::sync::{now_ns, pause, timespec_of};
use crate::sys::sys;
use crate::{config, process};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

/// What the last number was made of; 0: not seeded yet.
static STATE: AtomicU64 = AtomicU64::new(0);

const US: i64 = 1_000;

/// Whether chaos was asked for.
#[inline]
pub fn is_on() -> bool {
    config::get().chaos.is_some()
}

/// In a forked child: another process, other numbers.
pub fn reset_after_fork() {
    STATE.store(0, Relaxed);
}

/// The next random number (splitmix64).
fn next() -> u64 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let seed = config::get().chaos.unwrap_or(0);
    let first = (seed ^ u64::from(process::pid()).wrapping_mul(0xff51_afd7_ed55_8ccd)) | 1;
    let _ = STATE.compare_exchange(0, first, Relaxed, Relaxed);
    let mut z = STATE.fetch_add(STEP, Relaxed).wrapping_add(STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A time span in ns: from nothing to about 30 ms, short ones as likely as long ones.
fn span() -> i64 {
    let r = next();
    match r % 16 {
        0 => 0,
        k => (US << k) * ((r >> 32) % 1024) as i64 / 1024,
    }
}

/// The setting was given, as far as has been read.
static ON: AtomicBool = AtomicBool::new(false);

/// The settings have been read.
pub fn set(on: bool) {
    ON.store(on, Relaxed);
}

/// Whether a call that could take the short way is to take the general one, which is to be tested too.
#[inline(always)]
pub fn detours() -> bool {
    ON.load(Relaxed) && detours_now()
}

#[cold]
fn detours_now() -> bool {
    is_on() && next() & 1 == 0
}

/// After how many more calls a connection is to look for its peer; `usual` without chaos.
pub fn calls(usual: u32) -> u32 {
    if is_on() {
        // Mostly at once.
        let r = next();
        if r & 1 == 0 {
            0
        } else {
            (r >> 8) as u32 % 8
        }
    } else {
        usual
    }
}

/// How many calls later it is to look again.
pub fn again(usual: u32) -> u32 {
    if is_on() {
        (next() >> 8) as u32 % usual.clamp(1, 1 << 20).saturating_mul(2)
    } else {
        usual
    }
}

/// When an upgraded connection is to ask for its return.
pub fn leave_at() -> i64 {
    now_ns() + span()
}

/// Whether a return is not to wait until it can go quietly.
pub fn hurries() -> bool {
    next().is_multiple_of(8)
}

/// In a place where other threads or processes may come in between: now and then lets them. With `RINGSOCK_TEST_LAG` always,
/// as long as that says.
#[inline(always)]
pub fn stumble() {
    let c = config::get();
    if c.chaos.is_some() || c.test_lag > 0 {
        fall();
    }
}

#[cold]
fn fall() {
    let lag = i64::from(config::get().test_lag) * US;
    if lag > 0 {
        return pause(lag);
    }
    let r = next();
    let _ = match r % 64 {
        // SAFETY: no preconditions.
        0..4 => unsafe { sys!(libc::SYS_sched_yield) },
        4 => {
            let ts = timespec_of((r >> 32) as i64 % (1_000 * US));
            // SAFETY: `ts` is readable.
            unsafe { sys!(libc::SYS_nanosleep, &ts, 0) }
        }
        _ => return,
    };
}

/// In a call that has just asked for an upgrade: half of the time lets that come to its end, so that short
/// connections move as well; the peer's call may be in the same place.
#[cold]
pub fn dawdle(conn: &Conn) {
    if !is_on() || next() & 1 == 0 {
        return;
    }
    let until = now_ns() + 15_000 * US;
    while conn.phase() == Phase::Raw && now_ns() < until {
        let ts = timespec_of(200 * US);
        // SAFETY: `ts` is readable.
        if unsafe { sys!(libc::SYS_nanosleep, &ts, 0) }.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_short_and_long() {
        let spans: Vec<i64> = (0..10_000).map(|_| span()).collect();
        assert!(spans.iter().all(|s| (0..40_000 * US).contains(s)));
        assert!(spans.iter().filter(|s| **s < 10 * US).count() > 1_000);
        assert!(spans.iter().filter(|s| **s > 5_000 * US).count() > 500);
    }
}
