//! Whether other processes live.

use crate::sys::{self, sys};
use crate::{desk, process};

/// Whether a process (or thread) has ended. One that nobody has waited for yet has. Does not wait.
///
/// The kernel tells it of any process by an fd, which another thread of the program may see for as long as it is there,
/// if only by the number that it gets itself. Of a parent and of children, whom most of those are that are asked for,
/// it says so without one.
pub fn is_dead(pid: u32) -> bool {
    if process::is_apart() {
        return false;
    }
    // SAFETY: plain numbers. Signal 0 only asks.
    if unsafe { sys!(libc::SYS_kill, pid, 0) } == Err(libc::ESRCH) {
        return true;
    }
    // SAFETY: no preconditions.
    if unsafe { sys!(libc::SYS_getppid) } == Ok(pid as usize) {
        return false;
    }
    has_ended(pid).unwrap_or_else(|| {
        // SAFETY: plain numbers; the fd is closed by who has opened it.
        desk::run(|| unsafe {
            let Ok(fd) = sys!(libc::SYS_pidfd_open, pid, 0) else { return false };
            let over = sys::poll_now(fd as i32, libc::POLLIN) & libc::POLLIN != 0;
            sys::close_raw(fd as i32);
            over
        })
    })
}

/// Whether a child has, who is left to be waited for as before; `None`: it is no child.
fn has_ended(pid: u32) -> Option<bool> {
    // Children of threads and with any signal. (Before Linux 4.7 `waitid` does not know that flag: then nobody is a child.)
    const HOW: i32 = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: all zeroes are one.
    let mut info: libc::siginfo_t = unsafe { core::mem::zeroed() };
    // SAFETY: `info` is writable, and nothing is asked for the usage.
    unsafe { sys!(libc::SYS_waitid, libc::P_PID, pid, &mut info, HOW, 0) }.ok()?;
    // SAFETY: the kernel has written it, for a child that has ended, or left it zero.
    Some(unsafe { info.si_pid() } != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What another process of this one's making finds, which may open nothing.
    fn without_fds(f: fn() -> bool) -> bool {
        // SAFETY: it makes system calls alone, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: `none` is readable.
            unsafe {
                libc::setrlimit(libc::RLIMIT_NOFILE, &none);
                libc::_exit(i32::from(f()));
            }
        }
        let mut status = 0;
        // SAFETY: `status` is writable.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 1
    }

    #[test]
    fn whether_parents_and_children_live_is_known_without_an_fd() {
        assert!(without_fds(|| {
            // SAFETY: no preconditions.
            let parent = unsafe { libc::getppid() };
            // SAFETY: it does nothing until it is killed.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: no preconditions.
                unsafe { libc::pause() };
            }
            let lived = !is_dead(child as u32) && !is_dead(parent as u32);
            // SAFETY: a child that nobody has waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            let ended = (0..5000).any(|_| {
                crate::sync::pause(1_000_000);
                is_dead(child as u32)
            });
            let mut status = 0;
            // SAFETY: `status` is writable.
            let waited = unsafe { libc::waitpid(child, &mut status, 0) } == child;
            lived && ended && waited && is_dead(child as u32)
        }));
    }

    #[test]
    fn a_stranger_who_has_ended_is_dead_before_anybody_has_waited_for_it() {
        use std::io::{BufRead, BufReader};
        use std::process::{Command, Stdio};
        let sh = ["-c", "sleep 0.2 & echo $!; exec sleep 60"];
        let mut child = Command::new("sh").args(sh).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let stranger = line.trim().parse().unwrap();
        assert_eq!(has_ended(stranger), None);
        let lived = !is_dead(stranger);
        let ended = (0..5000).any(|_| {
            crate::sync::pause(1_000_000);
            is_dead(stranger)
        });
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(lived && ended, "lived {lived}, ended {ended}");
    }
}
