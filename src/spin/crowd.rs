//! What the process has learnt of the processors: whether others want them.
//!
//! To find out by spinning costs a turn each time, some milliseconds, and does lasting harm: a pair that has spun is two
//! threads that never sleep, so the kernel puts them on different processors, beside whoever is busy there, and each of
//! their wake-ups waits for that one from then on. Left to sleep they take turns on one processor, as TCP's ends do, and
//! the others have the rest. So who has met others does not try again before a *census*: the background thread asks the
//! kernel how many threads run or want to. If they are more than the processors, that counts as having met them once more.

use super::apart::count_allowed;
use super::MS;
use crate::log::{log, Level};
use crate::textfile::TextFile;
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering::*};

/// A pause that becomes longer with each trouble in a row.
pub(super) struct Crowd {
    /// Nothing is tried before this moment.
    pub(super) until: AtomicI64,
    /// How long the last pause was.
    pause: AtomicI64,
}

impl Crowd {
    pub(super) const PAUSES: (i64, i64) = (2 * MS, 256 * MS);
    /// Who meets trouble only so long after the last pause starts anew.
    const FORGET: i64 = 50 * MS;

    pub(super) const fn new() -> Crowd {
        Crowd { until: AtomicI64::new(0), pause: AtomicI64::new(0) }
    }

    pub(super) fn until(&self) -> i64 {
        self.until.load(Relaxed)
    }

    pub(super) fn met(&self, now: i64) {
        let (until, pause) = (self.until.load(Relaxed), self.pause.load(Relaxed));
        if now < until {
            return;
        }
        let again = now - until < Crowd::FORGET.max(8 * pause);
        let pause = if again { (2 * pause).clamp(Crowd::PAUSES.0, Crowd::PAUSES.1) } else { Crowd::PAUSES.0 };
        self.pause.store(pause, Relaxed);
        self.until.store(now + pause, Relaxed);
    }
}

/// While others want the processors.
pub(super) static CROWD: Crowd = Crowd::new();
/// Others were met since the last census, or there was none.
static DOUBT: AtomicBool = AtomicBool::new(true);
/// When a census found room last.
static ROOM: AtomicI64 = AtomicI64::new(0);
/// How long that is believed.
const BELIEVED: i64 = 20 * MS;
/// A census looks so often, with such pauses, before it says that there are too many.
const LOOKS: u32 = 4;
const BETWEEN: i64 = MS;

/// Whether one is asked for, or under way.
static STATE: AtomicU32 = AtomicU32::new(NONE);
const NONE: u32 = 0;
const ASKED: u32 = 1;
const BEGUN: u32 = 2;

/// Others want the processors: nobody spins for a while.
pub(super) fn met(now: i64) {
    DOUBT.store(true, Relaxed);
    CROWD.met(now);
}

/// Whether one may spin again, after the pause. If it is in doubt it will be known soon.
pub(super) fn is_over() -> bool {
    !DOUBT.load(Relaxed) || !ask()
}

/// Whether a thread that leaves its processor finds one that is free. If it is not known it will be soon.
pub(super) fn has_room(now: i64) -> bool {
    now - ROOM.load(Relaxed) < BELIEVED || !ask()
}

/// Asks for a census; not if there is no thread for it.
fn ask() -> bool {
    let there = crate::bg::is_there();
    if there && STATE.compare_exchange(NONE, ASKED, SeqCst, Relaxed).is_ok() {
        crate::bell::ring(0);
    }
    there
}

/// Whether the background thread is to begin one.
pub fn is_asked() -> bool {
    STATE.load(SeqCst) == ASKED
}

/// In a forked child: nobody is about to answer.
pub fn reset_after_fork() {
    STATE.store(NONE, Relaxed);
}

/// How many threads run or want to, in this machine.
fn running() -> Option<u32> {
    let text = TextFile::read(b"/proc/loadavg\0", 4096).ok()?;
    let field = text.bytes().split(|b| *b == b' ').nth(3)?;
    core::str::from_utf8(field.split(|b| *b == b'/').next()?).ok()?.parse().ok()
}

/// How many processors this machine has, from a list such as `0-3,6`.
fn count(list: &str) -> Option<u32> {
    let number = |n: &str| n.parse::<u32>().ok();
    list.trim_end().split(',').try_fold(0u32, |sum, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(sum + number(last)?.checked_sub(number(first)?)? + 1)
    })
}

fn processors() -> Option<u32> {
    let text = TextFile::read(b"/sys/devices/system/cpu/online\0", 64 << 10).ok()?;
    count(core::str::from_utf8(text.bytes()).ok()?)
}

/// How many processors there are, if this process may use all of them: where it has been given some for itself, what the
/// others are busy with does not concern it.
fn all_are_ours() -> Option<u32> {
    processors().filter(|all| count_allowed() >= *all)
}

/// The background thread's part.
#[derive(Default)]
pub struct Census {
    /// Looks that are still to be had, and when the next one is.
    left: u32,
    at: i64,
}

impl Census {
    /// Whether one has begun.
    pub fn is_under_way(&self) -> bool {
        self.left > 0
    }

    /// When there is something to do; `i64::MAX`: never.
    pub fn due(&self) -> i64 {
        match self.left {
            0 => i64::MAX,
            _ => self.at,
        }
    }

    /// Begins one, if it is asked for, or looks once more, if it is time. Where it cannot be known there is room.
    pub fn go_on(&mut self, now: i64) {
        if STATE.compare_exchange(ASKED, BEGUN, SeqCst, Relaxed).is_ok() {
            *self = Census { left: LOOKS, at: now };
        }
        if self.due() > now {
            return;
        }
        // Who asks runs, too.
        let crowded = all_are_ours().and_then(|all| Some(running()?.saturating_sub(1) > all));
        let Some(crowded) = self.seen(crowded.unwrap_or(false), now) else { return };
        log(Level::Trace, format_args!("others want the processors: {crowded}"));
        if crowded {
            met(now);
        } else {
            DOUBT.store(false, Relaxed);
            ROOM.store(now, Relaxed);
        }
        STATE.store(NONE, SeqCst);
    }

    /// What a look has found; the verdict, if there is one. Others that only happen to run, such as a peer's background thread,
    /// are gone at the next look.
    fn seen(&mut self, crowded: bool, now: i64) -> Option<bool> {
        self.left = if crowded { self.left - 1 } else { 0 };
        self.at = now + BETWEEN;
        (self.left == 0).then_some(crowded)
    }
}

#[cfg(test)]
mod tests {
    use super::super::US;
    use super::*;
    use crate::sync::now_ns;

    #[test]
    fn where_others_want_the_processors_little_is_spun() {
        let c = Crowd::new();
        let (mut now, mut spun) = (0, 0);
        while now < 10_000 * MS {
            if now >= c.until() {
                // A turn of ours, and one of theirs.
                now += 6 * MS;
                spun += 6 * MS;
                c.met(now);
            }
            now += 20 * US;
        }
        assert!(spun < 400 * MS, "{spun}");
        // A short trouble costs little.
        now += 3_000 * MS;
        c.met(now);
        assert_eq!(c.until() - now, Crowd::PAUSES.0);
    }

    #[test]
    fn who_runs_for_a_moment_is_no_crowd() {
        let verdict = |looks: &[bool]| {
            let mut c = Census { left: LOOKS, at: 0 };
            looks.iter().enumerate().find_map(|(i, crowded)| Some((i, c.seen(*crowded, 1)?)))
        };
        assert_eq!(verdict(&[true, true, true, true]), Some((3, true)));
        assert_eq!(verdict(&[false]), Some((0, false)));
        assert_eq!(verdict(&[true, true, true, false]), Some((3, false)));
        assert_eq!(verdict(&[true, true, true]), None);
    }

    #[test]
    fn others_who_never_sleep_are_a_crowd() {
        let Some(all) = all_are_ours() else { return };
        let end = AtomicBool::new(false);
        std::thread::scope(|s| {
            for _ in 0..=all {
                s.spawn(|| {
                    while !end.load(Relaxed) {
                        core::hint::spin_loop();
                    }
                });
            }
            let until = now_ns() + 10_000 * MS;
            let mut seen = false;
            while !seen && now_ns() < until {
                seen = running().unwrap() > all + 1;
            }
            end.store(true, Relaxed);
            assert!(seen);
        });
    }

    #[test]
    fn processors_are_counted() {
        assert_eq!(count("0\n"), Some(1));
        assert_eq!(count("0-3,6,8-9\n"), Some(7));
        assert_eq!(count("3-1\n"), None);
        assert_eq!(count("\n"), None);
        assert!(processors().is_some_and(|n| n >= count_allowed()));
    }

    #[test]
    fn who_runs_is_counted() {
        assert!(running().is_some_and(|n| n >= 1));
    }
}
