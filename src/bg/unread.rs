//! What lies unread on a ring while the program waits for it out of sight.
//!
//! A program that has only ever been seen to block in libc, and was never told `EAGAIN` (see [`sight`]), may come to wait for the
//! next bytes by a system call of its own. Nothing tells of that. So twice a second, as long as anything is on a ring,
//! connections are looked for that have something to be read and nobody who waits for it in sight. If a thread of the process
//! sleeps in the kernel for one of them, or in an io_uring that is used for sockets, it returns to TCP, where the kernel wakes
//! that thread. (Not if it receives by such a call: it would get what the ends say to each other on the way.)

use super::*;
use crate::numbers;
use libc::{c_long, pollfd};

const EACH_NS: i64 = 500 * MS;
/// The longest time between two looks at the threads for the sake of a connection that stays as it is.
const LONGEST_NS: i64 = 8_000 * MS;
/// Threads are looked at for at most a twentieth of the time.
const SHARE: i64 = 20;
/// `IORING_ENTER_REGISTERED_RING`
const ENTER_REGISTERED_RING: usize = 16;
/// So many fds of one call are looked at.
const MOST_POLLED: usize = 4096;

#[cfg(target_arch = "x86_64")]
const POLLS: &[c_long] = &[libc::SYS_ppoll, libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const POLLS: &[c_long] = &[libc::SYS_ppoll];
#[cfg(target_arch = "x86_64")]
const SELECTS: &[c_long] = &[libc::SYS_pselect6, libc::SYS_select];
#[cfg(not(target_arch = "x86_64"))]
const SELECTS: &[c_long] = &[libc::SYS_pselect6];
#[cfg(target_arch = "x86_64")]
const SET_WAITS: &[c_long] = &[libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_epoll_wait];
#[cfg(not(target_arch = "x86_64"))]
const SET_WAITS: &[c_long] = &[libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];

/// A connection that has something to be read, for which nobody waits in sight.
struct Alone {
    gen: u32,
    /// How far it has been read.
    consumed: u64,
    pause: i64,
    /// When to look at the threads for it.
    at: i64,
}

/// Those that there are.
pub(super) struct Unread {
    /// When to look for them, or `i64::MAX`.
    at: i64,
    /// By the record's address.
    alone: HashMap<usize, Alone>,
    /// Threads are not looked at before.
    not_before: i64,
}

impl Default for Unread {
    fn default() -> Unread {
        Unread { at: i64::MAX, alone: HashMap::new(), not_before: 0 }
    }
}

/// How far a connection has been read that is left alone with something to be read.
fn left_alone(c: &Conn) -> Option<u64> {
    let l = c.local();
    let seen = || l.watchers.load(SeqCst) > 0 || l.fut_rx.load(SeqCst) > 0;
    if c.phase() != Phase::Managed || !c.is_ours() || !c.reads_ring() || seen() || !c.takeable(1) {
        return None;
    }
    Some(c.lock_rx().ring().consumed)
}

/// What threads of the process sleep in: calls by which a program may wait for an fd.
#[derive(Debug, PartialEq, Eq)]
enum Wait {
    Fd(c_int),
    Set(c_int),
    /// What an io_uring was asked to wait for nobody can see.
    Uring(c_int),
    Anything,
}

/// Bytes of this process's memory. Of what is not there: none.
fn memory(at: usize, to: &mut [u8]) -> usize {
    desk::run(|| {
        let how = libc::O_RDONLY | libc::O_CLOEXEC;
        // SAFETY: the path ends with NUL; `to` is writable; who has opened the fd closes it.
        unsafe {
            let Ok(fd) = sys!(libc::SYS_openat, libc::AT_FDCWD, c"/proc/self/mem".as_ptr(), how) else { return 0 };
            let n = sys!(libc::SYS_pread64, fd, to.as_mut_ptr(), to.len(), at);
            sys::close_raw(fd as c_int);
            n.unwrap_or(0)
        }
    })
}

/// What who waits to read asks `poll` for.
const TO_READ: i16 = libc::POLLIN | libc::POLLRDNORM | libc::POLLRDHUP;
/// Whatever is asked for, or nothing: ends and errors are told anyway.
const ANYTHING: i16 = 0;

/// The fds that a call waits for with any of `events`.
fn fds_of(number: c_long, args: [usize; 6], events: i16) -> Vec<Wait> {
    if SET_WAITS.contains(&number) {
        return vec![Wait::Set(args[0] as c_int)];
    }
    if number == libc::SYS_io_uring_enter {
        // By its number among those that the process has registered it is not known.
        let registered = args[3] & ENTER_REGISTERED_RING != 0;
        return vec![if registered { Wait::Anything } else { Wait::Uring(args[0] as c_int) }];
    }
    if POLLS.contains(&number) {
        const EACH: usize = size_of::<pollfd>();
        let mut bytes = vec![0; args[1].min(MOST_POLLED) * EACH];
        let n = memory(args[0], &mut bytes);
        // The fd, and then the events.
        let asks = |p: &&[u8]| events == ANYTHING || i16::from_ne_bytes([p[4], p[5]]) & events != 0;
        let fd = |p: &[u8]| c_int::from_ne_bytes([p[0], p[1], p[2], p[3]]);
        let all = bytes[..n].chunks_exact(EACH).filter(asks);
        return all.map(fd).filter(|fd| *fd >= 0).map(Wait::Fd).collect();
    }
    if SELECTS.contains(&number) {
        // The set to read comes first.
        let sets = if events == ANYTHING { &args[1..4] } else { &args[1..2] };
        return sets.iter().filter(|at| **at != 0).flat_map(|at| selected(*at, args[0])).collect();
    }
    Vec::new()
}

/// The fds below `n` of a set for `select`.
fn selected(at: usize, n: usize) -> Vec<Wait> {
    let mut bytes = vec![0; n.min(MOST_POLLED).div_ceil(8)];
    let known = memory(at, &mut bytes);
    // (As `fd_set` is laid out on a machine whose bytes go from low to high.)
    let has = |fd: &usize| bytes[fd / 8] & 1 << (fd % 8) != 0;
    (0..n.min(known * 8)).filter(has).map(|fd| Wait::Fd(fd as c_int)).collect()
}

/// The calls in which threads sleep, but for the library's own.
fn calls() -> impl Iterator<Item = (c_long, [usize; 6])> {
    let mut threads = Vec::new();
    let _ = desk::run(|| numbers::each_in(c"/proc/self/task", |_, tid| threads.push(tid as u32)));
    threads.retain(|tid| !life::is_ours(*tid));
    threads.into_iter().filter_map(sight::call_of)
}

/// What all threads wait for.
fn waits() -> Vec<Wait> {
    calls().flat_map(|(number, args)| fds_of(number, args, TO_READ)).collect()
}

/// Whether a thread may wait for the connection by a call of its own, of whatever kind.
pub(super) fn may_be_awaited(conn: &Conn) -> bool {
    calls().filter(|(number, _)| !sight::is_elsewhere(*number)).any(|(number, args)| {
        // An fd, for whatever else, comes first or second.
        let named = args[..2].iter().any(|a| c_int::try_from(*a).is_ok_and(|fd| table::is(fd, conn)));
        match fds_of(number, args, ANYTHING) {
            fds if fds.is_empty() => named,
            fds => fds.iter().any(|w| w.is_for(conn)),
        }
    })
}

impl Wait {
    fn is_for(&self, conn: &Conn) -> bool {
        match *self {
            Wait::Fd(fd) => table::is(fd, conn),
            Wait::Set(set) => unseen::contains(set, conn) || epoll::has_unawaited(set, conn),
            Wait::Uring(fd) => uring::is_for_sockets(fd),
            Wait::Anything => true,
        }
    }
}

impl Bg {
    /// Something is on a ring.
    pub(super) fn watch_unread(&mut self) {
        if self.unread.at == i64::MAX {
            self.unread.at = now_ns() + EACH_NS;
        }
    }

    /// When to look for what is left alone.
    pub(super) fn unread_at(&self) -> i64 {
        self.unread.at
    }

    pub(super) fn look_for_unread(&mut self, now: i64) {
        if now < self.unread.at {
            return;
        }
        if !arena::any(Phase::Managed) {
            self.unread = Unread::default();
            return;
        }
        self.unread.at = now + EACH_NS;
        let mut known = core::mem::take(&mut self.unread.alone);
        let mut due = Vec::new();
        let late = now < self.unread.not_before;
        arena::each(|c| {
            let Some(consumed) = left_alone(c) else { return };
            let (key, gen) = (c as *const Conn as usize, c.gen.load(Relaxed));
            let old = known.remove(&key).filter(|a| (a.gen, a.consumed) == (gen, consumed));
            let mut a = old.unwrap_or(Alone { gen, consumed, pause: EACH_NS, at: now });
            if a.at <= now && !late {
                due.push(c);
                a.at = now + a.pause;
                a.pause = (a.pause * 2).min(LONGEST_NS);
            }
            self.unread.alone.insert(key, a);
        });
        if due.is_empty() {
            return;
        }
        let all = waits();
        due.retain(|c| all.iter().any(|w| w.is_for(c)) && left_alone(c).is_some());
        self.unread.not_before = now + (now_ns() - now) * SHARE;
        for c in due {
            log(Level::Debug, format_args!("a thread waits out of sight for what is on a ring: it returns"));
            self.return_unseen(c);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    /// What a thread is found to wait for that makes `call` with a pipe's end.
    fn found(call: impl FnOnce(c_int) + Send) -> (c_int, Vec<Wait>) {
        let (end, mut other) = std::io::pipe().unwrap();
        let fd = end.as_raw_fd();
        let wanted = |w: &Wait| matches!(w, Wait::Fd(f) if *f == fd);
        let all = std::thread::scope(|s| {
            s.spawn(|| call(fd));
            for _ in 0..2000 {
                if waits().iter().any(wanted) {
                    break;
                }
                crate::sync::pause(MS);
            }
            let all = waits();
            std::io::Write::write_all(&mut other, b"x").unwrap();
            all
        });
        (fd, all)
    }

    #[test]
    fn threads_are_found_by_what_they_wait_for() {
        let (_reader, room) = std::io::pipe().unwrap();
        let (fd, all) = found(|fd| {
            let events = [(-1, libc::POLLIN), (room.as_raw_fd(), libc::POLLERR), (fd, libc::POLLIN)];
            let mut p = events.map(|(fd, events)| pollfd { fd, events, revents: 0 });
            // SAFETY: `p` is an array of so many.
            unsafe { libc::poll(p.as_mut_ptr(), 3, 5000) };
        });
        assert!(all.contains(&Wait::Fd(fd)), "poll: {all:?} without {fd}");
        assert!(!all.contains(&Wait::Fd(room.as_raw_fd())), "poll: {all:?} with what is not to be read");
        let (fd, all) = found(|fd| {
            // SAFETY: all zeroes is an empty set; the calls read and write the set.
            unsafe {
                let mut set: libc::fd_set = core::mem::zeroed();
                libc::FD_SET(fd, &mut set);
                let null = core::ptr::null_mut();
                libc::select(fd + 1, &mut set, null, null, core::ptr::null_mut());
            }
        });
        assert!(all.contains(&Wait::Fd(fd)), "select: {all:?} without {fd}");
        assert_eq!(fds_of(libc::SYS_epoll_pwait, [7, 1, 2, 3, 4, 5], TO_READ), [Wait::Set(7)]);
        assert_eq!(fds_of(libc::SYS_io_uring_enter, [7, 1, 2, 1, 4, 5], TO_READ), [Wait::Uring(7)]);
        assert_eq!(fds_of(libc::SYS_io_uring_enter, [7, 1, 2, 17, 4, 5], TO_READ), [Wait::Anything]);
        assert_eq!(fds_of(libc::SYS_futex, [7, 1, 2, 3, 4, 5], TO_READ), []);
    }

    #[test]
    fn any_call_of_a_connection_may_wait_for_it() {
        use crate::io::tests::{armed, know};
        let slot = crate::layout::Slot::default();
        let (conn, ours, theirs) = armed(&slot);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        assert!(!may_be_awaited(conn));
        let is_found = |call: &(dyn Fn() + Sync)| {
            std::thread::scope(|s| {
                s.spawn(call);
                let found = (0..2000).any(|_| may_be_awaited(conn) || (crate::sync::pause(MS), false).1);
                // SAFETY: an fd of the test's.
                unsafe { libc::shutdown(fd, libc::SHUT_RD) };
                found
            })
        };
        // SAFETY: the buffer is writable.
        let receives = || unsafe {
            libc::recv(fd, [0u8; 4].as_mut_ptr().cast(), 4, 0);
        };
        assert!(is_found(&receives), "a receive");
        let (conn, ours, _theirs) = (conn, theirs, ours);
        table::take(fd);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        assert!(!may_be_awaited(conn));
        let polls = || {
            let mut p = pollfd { fd, events: libc::POLLPRI, revents: 0 };
            // SAFETY: `p` is writable.
            unsafe { libc::poll(&mut p, 1, 300) };
        };
        assert!(is_found(&polls), "a poll");
        table::take(fd);
        conn.set_phase(crate::conn::Phase::Closed);
    }

    #[test]
    fn memory_that_is_not_there_has_nothing() {
        let here = *b"here";
        let mut to = [0; 4];
        assert_eq!((memory(here.as_ptr() as usize, &mut to), to), (4, here));
        assert_eq!(memory(0, &mut to), 0);
    }
}
