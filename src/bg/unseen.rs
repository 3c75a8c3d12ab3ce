//! Epoll sets, and io_urings, that the library knows nothing of, because the program makes and fills them by system calls of
//! its own (Rust's `rustix`, for one, and liburing). A connection in such a set must stay on TCP: there the program would be
//! woken by marks, and not by what comes on a ring. So must all of a program that uses an io_uring for sockets: what it asks of
//! that nobody can see.

use super::uring;
use crate::config::Text;
use crate::conn::Conn;
use crate::sync::now_ns;
use crate::sys::sys;
use crate::table::{self, Entry};
use crate::{chaos, epoll, fdhigh, numbers};
use core::fmt::Write;
use libc::c_int;

/// What a link in `/proc/self/fd` says of an epoll set, and of an io_uring.
const SET: &[u8] = b"anon_inode:[eventpoll]";
const URING: &[u8] = b"anon_inode:[io_uring]";
/// The process's fds are gone through for at most a twentieth of the time, ...
const SHARE: i64 = 20;
/// ... once they have been for that share of this time without a pause, ...
const BURST_NS: i64 = 400_000_000;
/// ... but whoever wants to know waits no longer than this.
const LONGEST_NS: i64 = 500_000_000;
/// Who asks again, so long after they were, is not told what they were then.
const MOMENT_NS: i64 = 5_000_000;

/// What was there when it was looked for last.
#[derive(Default)]
pub(super) struct Unseen {
    sets: Vec<c_int>,
    urings: Vec<c_int>,
    /// One of these is used for sockets.
    has_uring: bool,
    /// When that began and ended.
    began: i64,
    ended: i64,
    /// When they may be looked for again.
    next: i64,
}

impl Unseen {
    /// Whether one of them has, or may have, the connection. One may have been made since they were looked for: if that was
    /// before `since`, and may not be done again now, nobody knows, and this is the time at which to ask again.
    pub(super) fn has(&mut self, conn: &Conn, since: i64) -> Result<bool, i64> {
        let now = now_ns();
        let is_old = self.began < since || now - self.ended > MOMENT_NS;
        // Under chaos a connection may move in the moment in which its set is made.
        if chaos::is_on() || now >= self.next && is_old {
            self.list();
            (self.began, self.ended) = (now, now_ns());
            self.next = next_after(self.next, self.began, self.ended);
        }
        match self.began >= since {
            true => Ok(self.has_uring || self.sets.iter().any(|set| contains(*set, conn))),
            false => Err(self.next),
        }
    }

    fn list(&mut self) {
        self.sets.clear();
        self.urings.clear();
        crate::desk::run(|| self.gather());
        self.has_uring = self.urings.iter().any(|fd| uring::is_for_sockets(*fd));
    }

    fn gather(&mut self) {
        let _ = numbers::each_in(c"/proc/self/fd", |dir, fd| {
            let known = matches!(table::get(fd), Entry::Conn(_) | Entry::Set(_)) || fdhigh::is_ours(fd);
            if known {
                return;
            }
            match what_is(dir, format_args!("{fd}")) {
                What::Set => self.sets.push(fd),
                What::Uring => self.urings.push(fd),
                What::Other => {}
            }
        });
    }
}

/// When they may be looked for again, if they might from `next` on, and were from `began` until `now`.
fn next_after(next: i64, began: i64, now: i64) -> i64 {
    (next.max(began - BURST_NS) + (now - began) * SHARE).min(now + LONGEST_NS)
}

#[derive(PartialEq)]
enum What {
    Set,
    Uring,
    Other,
}

/// What the fd is that a list of fds has as `link`, in the folder `dir`.
fn what_is(dir: c_int, link: core::fmt::Arguments) -> What {
    let mut name = Text::<32>::EMPTY;
    let _ = name.write_fmt(link);
    let mut to = [0u8; SET.len() + 1];
    // SAFETY: the name ends with NUL; `to` has room.
    let n = unsafe { sys!(libc::SYS_readlinkat, dir, name.as_bytes_with_nul().as_ptr(), to.as_mut_ptr(), to.len()) };
    match n.map(|n| &to[..n]) {
        Ok(SET) => What::Set,
        Ok(URING) => What::Uring,
        _ => What::Other,
    }
}

/// Whether the kernel names a number of the connection among the set's. One that is too large is taken to have all.
pub(super) fn contains(set: c_int, conn: &Conn) -> bool {
    epoll::any_listed(set, |item| table::is(item.fd, conn)).unwrap_or_else(|e| e == libc::EFBIG)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;
    /// What a test makes, others of the process would find.
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    /// Those who ask all the time, with a list that takes `cost`: how often it was made in `span`, and the longest wait.
    fn asked(cost: i64, span: i64) -> (i64, i64) {
        let begin = 10_000 * MS;
        let (mut now, mut next, mut lists, mut longest) = (begin, 0, 0, 0);
        while now < begin + span {
            let end = now + cost;
            next = next_after(next, now, end);
            lists += 1;
            longest = longest.max(next - end);
            now = next.max(end);
        }
        (lists, longest)
    }

    #[test]
    fn what_was_listed_before_somebody_asked_tells_nothing() {
        let _one = ONE.lock();
        let (conn, _ours, _theirs) = crate::io::tests::armed(Box::leak(Box::default()));
        let mut u = Unseen::default();
        let first = now_ns();
        assert_eq!(u.has(conn, first), Ok(false));
        // For so long it may not be done again.
        u.next = i64::MAX;
        assert_eq!(u.has(conn, first), Ok(false));
        assert_eq!(u.has(conn, now_ns()), Err(i64::MAX));
        u.next = 0;
        assert_eq!(u.has(conn, now_ns()), Ok(false));
    }

    /// A kernel, or who guards it, may have none.
    #[test]
    fn who_uses_an_io_uring_for_sockets_may_wait_there_for_anything() {
        const SHARED: c_int = libc::MAP_SHARED;
        const SQES: usize = 0x1000_0000;
        const READ: u8 = 22;
        const RECV: u8 = 27;
        let _one = ONE.lock();
        let (conn, _ours, _theirs) = crate::io::tests::armed(Box::leak(Box::default()));
        let mut u = Unseen { began: i64::MAX, next: i64::MAX, ..Unseen::default() };
        let mut has = || {
            u.list();
            u.has(conn, 0)
        };
        let mut params = [0u64; 64];
        // SAFETY: the parameters are larger than the kernel's.
        let Ok(fd) = (unsafe { sys!(libc::SYS_io_uring_setup, 4, params.as_mut_ptr()) }) else { return };
        assert_eq!(has(), Ok(false), "nothing was asked of it");
        // SAFETY: a new mapping.
        let at =
            unsafe { sys!(libc::SYS_mmap, 0, 4 * 64, libc::PROT_READ | libc::PROT_WRITE, SHARED, fd, SQES) }.unwrap();
        let ask = |entry: usize, op: u8| {
            // SAFETY: one of four entries, which nobody else uses. (Of no fd that is open.)
            unsafe {
                ((at + entry * 64 + 4) as *mut c_int).write_volatile(-1);
                ((at + entry * 64) as *mut u8).write_volatile(op);
            }
        };
        ask(0, READ);
        assert_eq!(has(), Ok(false), "files");
        ask(3, RECV);
        assert_eq!(has(), Ok(true), "sockets");
        crate::sys::close(fd as c_int);
        assert_eq!(has(), Ok(false));
        // SAFETY: what was mapped above.
        let _ = unsafe { sys!(libc::SYS_munmap, at, 4 * 64) };
    }

    #[test]
    fn what_is_quick_is_done_at_once_but_not_for_more_than_its_share() {
        let (lists, longest) = asked(MS / 10, 4_000 * MS);
        // A twentieth of the time, and of that which may be made up for.
        assert!((2_000..=2_300).contains(&lists), "{lists}");
        assert!(longest <= 2 * MS, "{longest}");
        assert_eq!(asked(MS / 10, 10 * MS), (100, 0));
    }

    #[test]
    fn what_takes_long_keeps_nobody_waiting_for_ever() {
        let (lists, longest) = asked(200 * MS, 7_000 * MS);
        assert_eq!(longest, LONGEST_NS);
        assert!((9..=11).contains(&lists), "{lists}");
    }
}
