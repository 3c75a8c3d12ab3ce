//! Keeping the library's own fds out of the program's way: they get high
//! numbers, so that the program's own numbers stay as they would be, and they
//! are known, so that a program that closes everything does not close them.

use crate::desk;
use crate::forking::Between;
use crate::sys::{self, sys, SysResult};
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering::*};
use libc::{c_int, rlimit};

const BITS: usize = 1 << 16;
static OURS: [AtomicU64; BITS / 64] = [const { AtomicU64::new(0) }; BITS / 64];
/// Those that a forked child must not keep: its holding them would hide this process's death from others.
static SINGLE: [AtomicU64; BITS / 64] = [const { AtomicU64::new(0) }; BITS / 64];
static LOWEST: AtomicI32 = AtomicI32::new(0);

fn lowest() -> c_int {
    match LOWEST.load(Relaxed) {
        0 => lowest_now(),
        l => l,
    }
}

/// As the limit is now: programs lower it.
fn lowest_now() -> c_int {
    let mut r = rlimit { rlim_cur: 1024, rlim_max: 1024 };
    // SAFETY: `r` is writable.
    let _ = unsafe { sys!(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, 0, &mut r) };
    let cur = r.rlim_cur.min(BITS as u64) as c_int;
    let l = (cur - cur / 4).max(3);
    LOWEST.store(l, Relaxed);
    l
}

/// Moves a new fd of the library to a high number (close-on-exec). Gives `fd` itself where that fails.
pub fn move_high(fd: c_int) -> c_int {
    if desk::is_here() {
        // No number of the program's.
        return fd;
    }
    match dup_out_of_the_way(fd) {
        Ok(new) => {
            sys::close_raw(fd);
            new
        }
        Err(_) => {
            note(fd);
            fd
        }
    }
}

/// Another fd for what `fd` is: with a high number, or with any, and close-on-exec.
pub fn dup_high(fd: c_int) -> SysResult<c_int> {
    dup_out_of_the_way(fd).or_else(|_| dup_from(fd, 3))
}

/// As [`dup_high`], but only with a high number.
pub fn dup_out_of_the_way(fd: c_int) -> SysResult<c_int> {
    match dup_from(fd, lowest()) {
        // No number is that high any more.
        Err(libc::EINVAL) => dup_from(fd, lowest_now()),
        r => r,
    }
}

fn dup_from(fd: c_int, from: c_int) -> SysResult<c_int> {
    // SAFETY: a new number disturbs nothing.
    let new = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, from) }? as c_int;
    note(new);
    Ok(new)
}

/// Where numbers of [`dup_aside`] begin: the last of the library's quarter.
fn aside_from() -> c_int {
    const LAST: c_int = 32;
    lowest() / 3 * 4 - LAST
}

/// Whether a number is one that [`dup_aside`] may have given, in this process or another one with the same limits.
pub fn is_aside(fd: c_int) -> bool {
    fd >= aside_from()
}

/// Another fd for what `fd` is, for a moment, with a number that is unlikely to be in use before that number is wanted
/// again: `at`, which may be taken all the same, or any.
pub fn dup_aside(fd: c_int, at: Option<c_int>) -> SysResult<c_int> {
    let from = at.unwrap_or_else(aside_from);
    // SAFETY: a new number disturbs nothing.
    not_for_children(|| match unsafe { sys!(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, from) } {
        Ok(new) => {
            note(new as c_int);
            Ok(new as c_int)
        }
        Err(_) => dup_high(fd),
    })
}

/// Notes that `fd` is the library's.
fn note(fd: c_int) {
    if (0..BITS as c_int).contains(&fd) {
        OURS[fd as usize / 64].fetch_or(1 << (fd % 64), Relaxed);
    }
}

/// The fd that `make` gives, of which a forked child must close its copy.
pub fn not_for_children(make: impl FnOnce() -> SysResult<c_int>) -> SysResult<c_int> {
    if desk::is_here() {
        return make();
    }
    let _between = Between::begin();
    let fd = make()?;
    if (0..BITS as c_int).contains(&fd) {
        SINGLE[fd as usize / 64].fetch_or(1 << (fd % 64), Relaxed);
    }
    Ok(fd)
}

/// In a forked child: closes what it must not keep.
pub fn close_singles() {
    for (i, word) in SINGLE.iter().enumerate() {
        let mut w = word.load(Relaxed);
        while w != 0 {
            sys::close((i * 64) as c_int + w.trailing_zeros() as c_int);
            w &= w - 1;
        }
    }
}

/// Notes that `fd` is nobody's any more.
pub fn forget(fd: c_int) {
    if !desk::is_here() && (0..BITS as c_int).contains(&fd) {
        SINGLE[fd as usize / 64].fetch_and(!(1 << (fd % 64)), Relaxed);
        OURS[fd as usize / 64].fetch_and(!(1 << (fd % 64)), Relaxed);
    }
}

/// Whether `fd` is the library's.
#[inline]
pub fn is_ours(fd: c_int) -> bool {
    (0..BITS as c_int).contains(&fd) && OURS[fd as usize / 64].load(Relaxed) & (1 << (fd % 64)) != 0
}

/// The lowest fd of the library at or above `from`.
pub fn next_from(from: u32) -> Option<u32> {
    (from..BITS as u32).find(|fd| {
        // Skip empty words quickly.
        OURS[*fd as usize / 64].load(Relaxed) & (1 << (fd % 64)) != 0
    })
}

/// Room for a few fds more, where the program has as many as it may, for what a connection depends on.
pub struct Room(Option<(rlimit, rlimit)>);

impl Room {
    /// Until this is dropped, if there is none.
    pub fn make() -> Room {
        const FEW: u64 = 8;
        // SAFETY: no preconditions.
        match unsafe { sys!(libc::SYS_eventfd2, 0, libc::EFD_CLOEXEC) } {
            Err(libc::EMFILE) => {}
            r => {
                r.into_iter().for_each(|fd| sys::close_raw(fd as c_int));
                return Room(None);
            }
        }
        let was = limit(None);
        let more = rlimit { rlim_cur: was.rlim_cur.saturating_add(FEW).min(was.rlim_max), ..was };
        limit(Some(&more));
        Room(Some((was, more)))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some((was, more)) = self.0.take() {
            // The program may have set another meanwhile.
            let now = limit(None);
            if now.rlim_cur == more.rlim_cur {
                limit(Some(&rlimit { rlim_cur: was.rlim_cur, ..now }));
            }
        }
    }
}

/// How many fds there may be; sets that first.
fn limit(to: Option<&rlimit>) -> rlimit {
    let mut now = rlimit { rlim_cur: 0, rlim_max: 0 };
    let to = to.map_or(core::ptr::null(), |t| t as *const rlimit);
    // SAFETY: `to` is readable or null, `now` is writable.
    let _ = unsafe { sys!(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, to, &mut now) };
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_high_below_a_limit_that_was_lowered_too() {
        lowest();
        // The limit is the whole process's: a child's.
        // SAFETY: the child makes system calls only.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let few = rlimit { rlim_cur: 200, ..limit(None) };
            limit(Some(&few));
            let is_high = |fd: SysResult<c_int>| fd.is_ok_and(|fd| (150..200).contains(&fd));
            // SAFETY: no preconditions.
            let well = unsafe { sys!(libc::SYS_eventfd2, 0, 0) }.is_ok_and(|fd| {
                let fd = fd as c_int;
                is_high(dup_out_of_the_way(fd)) && is_high(dup_high(fd)) && is_high(dup_out_of_the_way(fd))
            });
            // SAFETY: no preconditions.
            unsafe { libc::_exit(i32::from(!well)) };
        }
        let mut status = 0;
        // SAFETY: `status` is writable.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(status, 0);
    }
}
