//! Spinning before sleeping, only where it pays.
//!
//! Two things speak against spinning, and each has a memory of its own. A spin may be in *vain*: what it
//! waits for takes longer, perhaps because the peer would need this very processor. That is a matter of the
//! thread and of whom it talks to. Or others want the *processors*: then a thread that spins uses up its
//! turn, and is made to wait for milliseconds when it has something to do, where one that sleeps is served at
//! once. That is a matter of the whole process ([`crowd`]). Either way nobody spins for a while, and for a longer one each
//! time in a row. After it a spin is tried again, because two ends that both sleep can never find out that
//! both would have been quick.
//!
//! A processor that was gone for a moment without a switch to another thread was taken by an interrupt or by the
//! machine's host, which says nothing of those who want it here.
//!
//! A thread that has spun for a while yields once, to find out whether somebody waits for its processor. That gives
//! away a whole turn if somebody does (since Linux 6.18), so it is one more thing that ends spinning, not a way to spin
//! among others.

use crate::config::{self, Spin};
use crate::sync::now_ns;
use crate::sys::sys;
use core::cell::Cell;
use core::sync::atomic::{AtomicU32, Ordering::*};

mod apart;
pub mod crowd;
pub use apart::SERVES;
use crowd::{Crowd, CROWD};

const US: i64 = 1_000;
const MS: i64 = 1_000_000;

/// Longer than this is never spun in `auto` mode: about what it costs to sleep and to be woken on a processor that
/// has gone idle, and what the peer needs to be woken so and to answer.
const WORTH: i64 = 100 * US;
/// A spinning thread that finds so much time gone at once was not running.
const GAP: i64 = 30 * US;
/// Who has spun so long asks whether others wait.
const ASK_AFTER: i64 = 20 * US;
/// A yield that takes longer has let somebody run.
const YIELDED: i64 = 10 * US;
/// Who gives the processor back sooner did not want it for itself: it may be the peer, which waits for us in turn.
const TURN: i64 = 300 * US;
/// Who spins longer than this, as a setting says, lets others run at times.
const YIELD_EVERY: i64 = 200 * US;

/// What a thread has learnt from its spins.
#[derive(Clone, Copy)]
struct Luck {
    /// Spins that went well lately, weighed against those that were in vain.
    credit: i32,
    /// No spin before this moment.
    until: i64,
    /// How long the next pause is to be.
    pause: i64,
    /// How often others have had the processor for a moment since a spin went well.
    turns: u32,
}

impl Luck {
    /// So many are those of a peer that is about to go elsewhere, see [`apart`].
    const TURNS: u32 = 8;
    const MOST: i32 = 16;
    /// One spin in vain costs as much as so many good ones bring. What is left after a pause allows two.
    const VAIN: i32 = 4;
    const PAUSES: (i64, i64) = (MS, 32 * MS);

    const fn new() -> Luck {
        Luck { credit: Luck::VAIN, until: 0, pause: Luck::PAUSES.0, turns: 0 }
    }

    fn hit(&mut self) {
        self.turns = 0;
        self.credit += 1;
        if self.credit >= Luck::MOST {
            self.credit = Luck::MOST;
            self.pause = Luck::PAUSES.0;
        }
    }

    fn miss(&mut self, now: i64) {
        self.credit -= Luck::VAIN;
        if self.credit < 0 {
            let pause = (self.pause * 2).min(Luck::PAUSES.1);
            *self = Luck { credit: Luck::VAIN, until: now + self.pause, pause, turns: self.turns };
        }
    }
}

thread_local! {
    static LUCK: Cell<Luck> = const { Cell::new(Luck::new()) };
    /// How often this thread had lost its processor when that was looked at last.
    static LOST: Cell<i64> = const { Cell::new(0) };
}

static CPUS: AtomicU32 = AtomicU32::new(0);

fn cpus() -> u32 {
    let n = CPUS.load(Relaxed);
    if n != 0 {
        return n;
    }
    let n = apart::count_allowed();
    CPUS.store(n, Relaxed);
    n
}

/// Whether others have been given this thread's processor since it was asked last.
fn lost_processor() -> bool {
    // SAFETY: plain numbers, for which zeros are valid.
    let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
    // SAFETY: `usage` is writable.
    if unsafe { sys!(libc::SYS_getrusage, libc::RUSAGE_THREAD, &mut usage) }.is_err() {
        return true;
    }
    LOST.replace(usage.ru_nivcsw) != usage.ru_nivcsw
}

/// What is next for a spinning thread whose processor others have had for `ns`, until `now`. `came`: what it waits for has
/// come meanwhile. `None`: it goes on.
#[cold]
fn others_ran(ns: i64, now: i64, came: bool) -> Option<bool> {
    let mut luck = LUCK.get();
    luck.turns += 1;
    // The peer may be about to go: that is told from others only by the end of it.
    let short = ns < TURN && luck.turns <= Luck::TURNS;
    let mine = !apart::SERVES.load(Relaxed) || luck.turns > Luck::TURNS / 2;
    if short && came && mine && apart::may_part(now) && crowd::has_room(now) && apart::part(now) {
        luck.turns = 0;
    } else if !short {
        luck.turns = 0;
        crowd::met(now);
    }
    LUCK.set(luck);
    (came || !short).then_some(came)
}

/// Polls `done` until it is true or spinning no longer pays. `slow` is polled every few microseconds.
pub fn spin(mut done: impl FnMut() -> bool, mut slow: impl FnMut() -> bool) -> bool {
    /// How often `slow` is polled.
    const SLOW_EVERY: i64 = 5 * US;
    let mut done = || {
        crate::remote::progress();
        done()
    };
    let setting = config::get().spin;
    let auto = matches!(setting, Spin::Auto);
    let budget = match setting {
        Spin::Us(us) => i64::from(us) * US,
        Spin::Auto if cpus() < 2 => 0,
        Spin::Auto => WORTH,
    };
    if budget == 0 {
        return done();
    }
    let mut begun = now_ns();
    if auto && (begun < CROWD.until().max(LUCK.get().until) || !crowd::is_over()) {
        return done();
    }
    let learn = |f: &dyn Fn(&mut Luck)| {
        let mut luck = LUCK.get();
        f(&mut luck);
        LUCK.set(luck);
    };
    let (mut aware, mut usual) = (false, i64::MAX);
    let (mut last, mut next_slow, mut next_yield) =
        (begun, begun + SLOW_EVERY, begun + if auto { ASK_AFTER } else { YIELD_EVERY });
    loop {
        for _ in 0..32 {
            if done() {
                learn(&Luck::hit);
                return true;
            }
            core::hint::spin_loop();
        }
        let now = now_ns();
        let took = now - last;
        if took > GAP && auto {
            if lost_processor() {
                if let Some(came) = others_ran(took, now, done()) {
                    return came;
                }
                begun += took;
            }
            // Not spun, unless it is the looks that take so long, because they are at many connections.
            if took > usual.saturating_mul(2) {
                begun += took;
            }
        }
        usual = usual.min(took);
        if now - begun > budget {
            learn(&|l| l.miss(now));
            return false;
        }
        last = now;
        if now > next_slow {
            if slow() {
                return true;
            }
            if auto && !aware {
                lost_processor();
                aware = true;
            }
            if now > next_yield {
                let asked = now_ns();
                // SAFETY: no preconditions.
                let _ = unsafe { sys!(libc::SYS_sched_yield) };
                last = now_ns();
                let gone = last - asked;
                let ran = auto && gone > YIELDED;
                if ran {
                    if let Some(came) = others_ran(gone, last, done()) {
                        return came;
                    }
                    begun += gone;
                }
                next_yield = match auto {
                    true if ran => last + ASK_AFTER,
                    true => i64::MAX,
                    false => last + YIELD_EVERY,
                };
            }
            last = now_ns();
            next_slow = last + SLOW_EVERY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_in_vain_become_rare() {
        let mut l = Luck::new();
        let (mut now, mut spun) = (0, 0);
        while now < 1_000 * MS {
            if now >= l.until {
                now += WORTH;
                spun += WORTH;
                l.miss(now);
            }
            now += 20 * US;
        }
        assert!(spun < 10 * MS, "{spun}");
    }

    #[test]
    fn who_runs_on_the_processor_meanwhile_is_noticed() {
        use core::sync::atomic::AtomicBool;
        use std::sync::Arc;
        // SAFETY: a set of processors is plain bits.
        let mut one: libc::cpu_set_t = unsafe { core::mem::zeroed() };
        // SAFETY: as above; `sched_getcpu` gives a number below the size of the set, or the test ends here.
        unsafe { libc::CPU_SET(usize::try_from(libc::sched_getcpu()).unwrap(), &mut one) };
        let pin = move || {
            // SAFETY: the set is valid for its length; 0 is the calling thread.
            assert_eq!(unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &one) }, 0);
        };
        pin();
        lost_processor();
        let end = Arc::new(AtomicBool::new(false));
        let other = std::thread::spawn({
            let end = end.clone();
            move || {
                pin();
                while !end.load(Relaxed) {
                    core::hint::spin_loop();
                }
            }
        });
        let until = now_ns() + 10_000 * MS;
        let mut lost = false;
        while !lost && now_ns() < until {
            (0..1_000).for_each(|_| core::hint::spin_loop());
            lost = lost_processor();
        }
        end.store(true, Relaxed);
        other.join().unwrap();
        assert!(lost);
    }

    #[test]
    fn looks_that_take_long_end_like_others() {
        let short = (0..8).any(|_| {
            LUCK.set(Luck::new());
            let begun = now_ns();
            let look = || {
                let look = now_ns();
                while now_ns() - look < 3 * US {}
                now_ns() - begun > 500 * MS
            };
            spin(look, || false);
            now_ns() - begun < 50 * MS
        });
        assert!(short);
    }

    #[test]
    fn mostly_good_spins_go_on() {
        let mut l = Luck::new();
        (0..1_000).for_each(|_| l.hit());
        for _ in 0..1_000 {
            l.miss(MS);
            (0..5).for_each(|_| l.hit());
        }
        assert_eq!(l.until, 0);
        (0..5).for_each(|_| l.miss(MS));
        assert!(l.until > 0);
    }
}
