//! Connections that a process takes from another one by `pidfd_getfd(2)`.

use super::*;
use crate::{fds, process};

/// `fd` is what process `pidfd` has as its `theirs`. A connection that it has on rings comes home, for good: the kernel does
/// not tell it that there is one more who holds it.
pub fn got(pidfd: c_int, theirs: c_int, fd: c_int) {
    // (The look for whose it is opens a file.)
    let _room = Room::make();
    let Some(pid) = process_of(pidfd) else { return };
    if pid == sys::pid() {
        return fds::duplicated(theirs, fd);
    }
    if !is_tcp(fd) || !rv::is_or_was_one(fd) {
        return;
    }
    if process::is_guest() {
        // The number would be one of another process, whose memory this is.
        ask_from(pid, fd, FOR_GOOD, false);
        return;
    }
    let cookie = cookie(fd);
    let is_it = |n: &c_int| table::conn(*n).is_some() && self::cookie(*n) == cookie;
    if let Some(ours) = (0..=table::highest()).filter(|n| *n != fd).find(is_it) {
        // We have inherited it, or they.
        return fds::duplicated(ours, fd);
    }
    let Some(c) = note(fd, pid) else { return };
    // In this order: a process that cannot be asked yet looks for the sign before it moves anything.
    put_up_sign(c, fd);
    // At once: they may close it next, which is not the end of it.
    if ask_from(pid, fd, FOR_GOOD, false) == Answer::Home {
        c.visited.store(true, SeqCst);
        c.stats().gen.fetch_or(1, Relaxed);
        take_down_sign(c);
        stays(c, fd);
    }
    // Else they have no such connection, or are stopped: whoever uses it asks again.
}

/// The number of the process behind a pidfd, as its `fdinfo` tells it (proc(5)); `None`: it has ended, or that is no pidfd.
fn process_of(pidfd: c_int) -> Option<u32> {
    let mut path = [0u8; 40];
    core::fmt::Write::write_fmt(&mut Text(&mut path, 0), format_args!("/proc/self/fdinfo/{pidfd}\0")).ok()?;
    let mut text = [0u8; 256];
    // SAFETY: the path ends with a NUL, `text` is writable.
    let n = unsafe {
        let fd = sys!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC).ok()?;
        let n = sys!(libc::SYS_read, fd, text.as_mut_ptr(), text.len());
        sys::close_raw(fd as c_int);
        n.ok()?
    };
    let line = text[..n].split(|b| *b == b'\n').find_map(|l| l.strip_prefix(b"Pid:"))?;
    core::str::from_utf8(line).ok()?.trim().parse().ok().filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pidfd_tells_whose_it_is() {
        // SAFETY: plain numbers.
        let pidfd = unsafe { sys!(libc::SYS_pidfd_open, std::process::id(), 0) }.unwrap() as c_int;
        assert_eq!(process_of(pidfd), Some(std::process::id()));
        sys::close_raw(pidfd);
        assert_eq!(process_of(pidfd), None, "a number that is closed");
        assert_eq!(process_of(-1), None);
    }
}
