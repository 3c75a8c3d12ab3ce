//! Programs that once waited for a connection where the library sees it, and now wait somewhere else.
//!
//! A program that is told `EAGAIN` (or makes the socket non-blocking) and then neither calls again nor waits
//! by a call of ours may have gone to sleep on the kernel's socket, where nothing of a ring ever arrives.
//! Such a connection returns to TCP. So does one that was put into a set which then nobody waits for by a call of ours.

use super::*;
use crate::textfile::TextFile;
use crate::wire::{FRAME_LEN, MARK_LEN};
use core::fmt::Write;

/// How long a connection may be left alone so before it returns.
const PATIENCE_NS: i64 = 50 * MS;
/// How often more than that while the thread that left it has something else to do. After that it is asked what the other threads
/// do, at longer intervals: as long as it runs, and so often while it sleeps.
const BUSY_LOOKS: u32 = 20;
const ASLEEP_LOOKS: u32 = 10;
const BUSY_NS: i64 = 200 * MS;
/// Of the time it is asked for at most a twentieth.
const SHARE: i64 = 20;

/// A connection that was left after `EAGAIN`.
pub(super) struct Suspect {
    conn: &'static Conn,
    gen: u32,
    /// How often it had been told `EAGAIN` when it was looked at last.
    empties: u32,
    /// How often that thread was found busy since.
    busy: u32,
    at: i64,
}

/// What a thread of this process is about that has left a connection alone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum About {
    /// It runs, or wants to: then it waits for nothing.
    Running,
    /// It sleeps in a call that no socket ends: a lock, or an interpreter's, a pause, a child.
    Elsewhere,
    /// It may wait for the connection.
    Unknown,
}

impl About {
    fn of(tid: u32) -> About {
        if runs(tid) {
            return About::Running;
        }
        match call_of(tid) {
            Some((number, _)) if is_elsewhere(number) => About::Elsewhere,
            _ => About::Unknown,
        }
    }
}

/// Whether a call waits for no socket, nor for any other fd.
pub(super) fn is_elsewhere(number: libc::c_long) -> bool {
    const CALLS: [libc::c_long; 8] = [
        libc::SYS_futex,
        libc::SYS_futex_waitv,
        libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep,
        libc::SYS_wait4,
        libc::SYS_waitid,
        libc::SYS_fsync,
        libc::SYS_fdatasync,
    ];
    CALLS.contains(&number)
}

/// What has become of a connection since its program was told `EAGAIN`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    /// The program waits where the library sees it, or had something.
    InSight,
    /// It was told so again (so often by now), or another thread waits: it asks again and again instead of waiting.
    Asked(u32),
    /// Nothing.
    Alone,
}

/// What is to become of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Seen,
    Later { empties: Option<u32>, busy: u32 },
    Lost,
}

/// Whether a connection is waited for out of sight. `looks`: how often its thread was found busy. What the thread is about
/// is looked at between two looks at the connection: a thread that sleeps may have gone to sleep in sight just now.
fn judge(left: impl Fn() -> Left, looks: u32, busy: impl FnOnce() -> bool) -> Verdict {
    let of = |l| match l {
        Left::InSight => Some(Verdict::Seen),
        Left::Asked(empties) => Some(Verdict::Later { empties: Some(empties), busy: 0 }),
        Left::Alone => None,
    };
    of(left()).unwrap_or_else(|| {
        if busy() {
            return Verdict::Later { empties: None, busy: looks + 1 };
        }
        of(left()).unwrap_or(Verdict::Lost)
    })
}

/// The system call that a thread of this process is in, and its arguments.
pub(super) fn call_of(tid: u32) -> Option<(libc::c_long, [usize; 6])> {
    let mut path = crate::config::Text::<64>::EMPTY;
    let _ = write!(path, "/proc/self/task/{tid}/syscall");
    let text = TextFile::read(path.as_bytes_with_nul(), 4096).ok()?;
    let mut words = core::str::from_utf8(text.bytes()).ok()?.split(' ');
    let number = words.next()?.parse().ok()?;
    let mut args = [0; 6];
    for (arg, word) in args.iter_mut().zip(words) {
        *arg = usize::from_str_radix(word.strip_prefix("0x")?, 16).ok()?;
    }
    Some((number, args))
}

/// Whether bytes of the peer's program are yet in the kernel's socket: whoever waits there is told of them.
fn is_told_by_kernel(c: &Conn) -> bool {
    const CONTROL: i32 = (MARK_LEN + 2 * FRAME_LEN) as i32;
    sys::ioctl_int(c.local().fd.load(Relaxed), libc::FIONREAD).is_ok_and(|n| n > CONTROL)
}

fn runs(tid: u32) -> bool {
    let mut path = crate::config::Text::<64>::EMPTY;
    let _ = write!(path, "/proc/self/task/{tid}/stat");
    let Ok(text) = TextFile::read(path.as_bytes_with_nul(), 4096) else { return false };
    // The state follows the name, which may contain anything.
    let bytes = text.bytes();
    bytes.iter().rposition(|b| *b == b')').is_some_and(|at| bytes[at..].starts_with(b") R"))
}

impl Bg {
    pub(super) fn suspect(&mut self, conn: &'static Conn) {
        let (gen, empties) = (conn.gen.load(Relaxed), conn.empties.load(Relaxed));
        if !self.suspects.iter().any(|s| core::ptr::eq(s.conn, conn)) {
            self.suspects.push(Suspect { conn, gen, empties, busy: 0, at: now_ns() + PATIENCE_NS });
        }
    }

    /// When to look at the suspects again.
    pub(super) fn suspects_at(&self) -> i64 {
        self.suspects.iter().map(|s| s.at).min().unwrap_or(i64::MAX)
    }

    pub(super) fn question_suspects(&mut self, now: i64) {
        let mut lost = Vec::new();
        let unseen = &mut self.unseen;
        self.suspects.retain_mut(|s| {
            if s.at > now {
                return true;
            }
            let c = s.conn;
            if c.gen.load(Relaxed) != s.gen {
                return false;
            }
            let known = s.empties;
            let left = || {
                let l = c.local();
                let in_sight = || !c.out_of_sight.load(SeqCst) || l.watchers.load(SeqCst) > 0;
                if c.phase() != Phase::Managed || !epoll::is_unawaited(c) && in_sight() {
                    return Left::InSight;
                }
                let asleep = l.fut_rx.load(SeqCst) + l.fut_tx.load(SeqCst) > 0;
                let empties = c.empties.load(Relaxed);
                if empties != known || asleep || is_told_by_kernel(c) {
                    Left::Asked(empties)
                } else {
                    Left::Alone
                }
            };
            let (long, mut runs) = (s.busy >= BUSY_LOOKS, false);
            let nobody = || !long || !unread::may_be_awaited(c);
            let busy = || match About::of(c.sent_away.load(Relaxed)) {
                // It thinks, or others have its processor.
                About::Running => {
                    runs = true;
                    nobody()
                }
                // Another thread may wait for it, if only by a set of its own making.
                // (If nobody knows now, the next look will.)
                About::Elsewhere => {
                    s.busy < BUSY_LOOKS + ASLEEP_LOOKS && unseen.has(c, now - PATIENCE_NS) != Ok(true) && nobody()
                }
                About::Unknown => false,
            };
            match judge(left, s.busy, busy) {
                Verdict::Later { empties, busy } => {
                    s.empties = empties.unwrap_or(s.empties);
                    s.busy = if runs { busy.min(BUSY_LOOKS) } else { busy };
                    s.at = now + if long { BUSY_NS.max((now_ns() - now) * SHARE) } else { PATIENCE_NS };
                    return true;
                }
                Verdict::Lost => lost.push(c),
                Verdict::Seen => {}
            }
            c.suspected.store(false, SeqCst);
            false
        });
        for c in lost {
            self.return_unseen(c);
        }
    }

    /// The program waits for it out of sight.
    pub(super) fn return_unseen(&mut self, conn: &'static Conn) {
        {
            let mut b = conn.lock_both();
            if conn.phase() != Phase::Managed {
                return;
            }
            // Only what it does in sight from now on counts.
            conn.evidence.store(false, Relaxed);
            conn.next_try.store(u32::MAX, Relaxed);
            // It may come to wait in sight, for a peer that has yet to read what stands before a mark.
            pump::hurry(&mut b, Why::Unseen);
        }
        self.stir(conn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn what_comes_into_sight_while_its_thread_is_looked_at_stays() {
        let now = Cell::new(Left::Alone);
        let comes = |l| {
            now.set(Left::Alone);
            judge(|| now.get(), 3, || (now.set(l), false).1)
        };
        assert_eq!(comes(Left::InSight), Verdict::Seen);
        assert_eq!(comes(Left::Asked(9)), Verdict::Later { empties: Some(9), busy: 0 });
        assert_eq!(comes(Left::Alone), Verdict::Lost);
    }

    #[test]
    fn a_busy_thread_has_patience() {
        let alone = || Left::Alone;
        assert_eq!(judge(alone, 3, || true), Verdict::Later { empties: None, busy: 4 });
        assert_eq!(judge(alone, 3, || false), Verdict::Lost);
    }

    #[test]
    fn what_is_in_sight_or_asked_for_needs_no_look_at_the_thread() {
        let unasked = || panic!("nobody needs to know");
        assert_eq!(judge(|| Left::InSight, 0, unasked), Verdict::Seen);
        assert_eq!(judge(|| Left::Asked(2), 7, unasked), Verdict::Later { empties: Some(2), busy: 0 });
    }
}
