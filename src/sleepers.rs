//! Threads that sleep in the kernel without having told anybody, at next to no cost to them.
//!
//! A thread that waits in an epoll set without rings must not pay for the possibility that a ring comes to
//! the set while it sleeps: an atomic addition and a subtraction make a system call a tenth slower. So it
//! only stores, in a word of its own, where it sleeps. Who wants to know has every thread of the process
//! execute a barrier (`membarrier(2)`), and looks at the words then. It is one store and one load on either
//! side: the sleeper stores its word and then looks whether there is a ring, the other side makes the
//! ring known, has the barrier executed, and looks at the word; at least one of them sees the other.

use crate::sys::sys;
use crate::thread::{me, tid};
use core::sync::atomic::{compiler_fence, fence, AtomicBool, AtomicU32, AtomicUsize, Ordering::*};

/// Threads with a word of their own. Others are counted.
const WORDS: usize = 512;

/// A thread's word.
#[repr(align(64))]
pub struct Word {
    /// Whose it is, 0: nobody's. A thread that has ended leaves its word behind.
    tid: AtomicU32,
    /// Where it sleeps, 0: nowhere.
    place: AtomicUsize,
    /// Where it is in a call that may sleep there, 0: in none.
    within: AtomicUsize,
}

impl Word {
    const fn new() -> Word {
        Word { tid: AtomicU32::new(0), place: AtomicUsize::new(0), within: AtomicUsize::new(0) }
    }
}

static ALL: [Word; WORDS] = [const { Word::new() }; WORDS];
/// No word from this one on was ever used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Sleepers without a word.
static MORE: AtomicUsize = AtomicUsize::new(0);
/// The kernel executes barriers for others.
static REMOTE: AtomicBool = AtomicBool::new(false);

const PRIVATE_EXPEDITED: i32 = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: i32 = 1 << 4;

fn membarrier(cmd: i32) -> bool {
    // SAFETY: no pointers.
    unsafe { sys!(libc::SYS_membarrier, cmd, 0, 0) }.is_ok()
}

/// The library is loaded, or a child has been forked: nobody sleeps. Quick as long as there is one thread.
pub fn init() {
    for w in &ALL[..USED.swap(0, Relaxed).min(WORDS)] {
        w.tid.store(0, Relaxed);
        w.place.store(0, Relaxed);
        w.within.store(0, Relaxed);
    }
    MORE.store(0, Relaxed);
    me(|t| t.word.set(None));
    REMOTE.store(membarrier(REGISTER_PRIVATE_EXPEDITED), Relaxed);
}

/// The calling thread's word, if there is one for it.
#[cold]
fn take() -> Option<&'static Word> {
    let id = tid();
    let is_dead = |other: u32| {
        // SAFETY: no pointers; signal 0 is none.
        let r = unsafe { sys!(libc::SYS_tgkill, crate::sys::pid(), other, 0) };
        r == Err(libc::ESRCH)
    };
    let mine = ALL.iter().position(|w| {
        let of = w.tid.load(Relaxed);
        (of == 0 || of == id || is_dead(of)) && w.tid.compare_exchange(of, id, AcqRel, Relaxed).is_ok()
    })?;
    ALL[mine].place.store(0, Relaxed);
    ALL[mine].within.store(0, Relaxed);
    USED.fetch_max(mine + 1, SeqCst);
    me(|t| t.word.set(Some(&ALL[mine])));
    Some(&ALL[mine])
}

/// What a sleeper stores is to be seen before it looks.
#[inline]
fn barrier() {
    if REMOTE.load(Relaxed) {
        compiler_fence(SeqCst);
    } else {
        fence(SeqCst);
    }
}

/// The calling thread is about to sleep at `place`, which is not 0. It must look for news of that place after this, and
/// call [`leave`] with the result.
#[inline]
pub fn enter(place: usize) -> Option<&'static Word> {
    let word = me(|t| t.word.get()).or_else(take);
    match word {
        Some(w) => w.place.store(place, Relaxed),
        None => {
            MORE.fetch_add(1, SeqCst);
        }
    }
    barrier();
    word
}

/// The calling thread sleeps no more. It must look for news of that place after this.
#[inline]
pub fn leave(word: Option<&Word>) {
    match word {
        Some(w) => w.place.store(0, Relaxed),
        None => {
            MORE.fetch_sub(1, SeqCst);
        }
    }
    barrier();
}

/// The calling thread begins a call that may sleep at `place`, however often. It must look whether the place still is what it
/// was after this, and call [`end`] with the result. Of a thread without a word nobody knows.
#[inline]
pub fn begin(place: usize) -> usize {
    let few = || (USED.load(Relaxed) < WORDS).then(take).flatten();
    let word = me(|t| t.word.get()).or_else(few);
    let before = word.map_or(0, |w| w.within.load(Relaxed));
    end(place);
    before
}

/// The call is over; a handler's goes back to the one that it has interrupted. Must look for news of the place after this.
#[inline]
pub fn end(before: usize) {
    if let Some(w) = me(|t| t.word.get()) {
        w.within.store(before, Relaxed);
    }
    barrier();
}

/// From here on [`any`] and [`any_within`] see every thread that did not see what the caller has made known before.
pub fn see_all() {
    fence(SeqCst);
    if REMOTE.load(Relaxed) && !membarrier(PRIVATE_EXPEDITED) {
        // A filter of system calls that came later. Sleepers that come now use barriers of their own; the others are
        // taken to be there for good.
        REMOTE.store(false, SeqCst);
        MORE.fetch_add(1, SeqCst);
    }
}

/// Whether a thread is in a call that may sleep at `place`.
pub fn any_within(place: usize) -> bool {
    ALL[..USED.load(SeqCst).min(WORDS)].iter().any(|w| w.within.load(SeqCst) == place)
}

/// Whether a thread may be asleep at `place`.
pub fn any(place: usize) -> bool {
    let used = USED.load(SeqCst).min(WORDS);
    MORE.load(SeqCst) > 0 || ALL[..used].iter().any(|w| w.place.load(SeqCst) == place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn once() {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(init);
    }

    #[test]
    fn words_of_the_dead_are_used_again() {
        once();
        for i in 1..=2 * WORDS {
            std::thread::spawn(move || {
                let w = enter(i);
                assert!(w.is_some());
                assert!(any(i));
                leave(w);
                assert!(!any(i));
            })
            .join()
            .unwrap();
        }
    }

    /// Either the sleeper sees the news, or the other side sees the sleeper.
    #[test]
    fn one_of_the_two_sees_the_other() {
        once();
        let (place, news) = (7777, AtomicUsize::new(0));
        let round = AtomicUsize::new(0);
        let asleep = AtomicUsize::new(0);
        std::thread::scope(|s| {
            s.spawn(|| {
                for i in 1..=2000 {
                    while round.load(Acquire) != i {
                        core::hint::spin_loop();
                    }
                    let w = enter(place);
                    let saw = news.load(Relaxed) == i;
                    asleep.store(1 + usize::from(saw), Release);
                    while round.load(Acquire) == i {
                        core::hint::spin_loop();
                    }
                    leave(w);
                    asleep.store(0, Release);
                }
            });
            for i in 1..=2000 {
                round.store(i, Release);
                for _ in 0..i % 50 {
                    core::hint::spin_loop();
                }
                news.store(i, Relaxed);
                see_all();
                let seen = any(place);
                let other = loop {
                    match asleep.load(Acquire) {
                        0 => core::hint::spin_loop(),
                        n => break n,
                    }
                };
                round.store(usize::MAX, Release);
                while asleep.load(Acquire) != 0 {
                    core::hint::spin_loop();
                }
                assert!(seen || other == 2, "round {i}: neither saw the other");
            }
        });
    }
}
