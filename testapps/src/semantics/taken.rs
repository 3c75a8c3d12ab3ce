//! Connections that a process takes from another one, or from itself, by `pidfd_getfd`.

use super::cx::{child_must_leave_tcp, untried, Cx, Res, Why};
use super::procs::{bye, child, reap};
use super::Check;
use crate::{ensure, same, sys};
use libc::{c_int, c_uint, SIGCONT, SIGKILL, SIGSTOP};
use std::os::fd::RawFd;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("taken-from-another", |cx| from_another(cx, by_syscall, Meanwhile::Answers)),
    ("taken-from-another-by-libc", |cx| from_another(cx, by_libc, Meanwhile::Answers)),
    ("taken-from-one-that-closes-it", |cx| from_another(cx, by_syscall, Meanwhile::Closes)),
    ("taken-from-one-that-is-killed", |cx| from_another(cx, by_syscall, Meanwhile::IsKilled)),
    ("taken-from-one-that-is-stopped", |cx| from_another(cx, by_syscall, Meanwhile::IsStopped)),
    ("taken-from-itself", from_itself),
];

type Take = fn(RawFd, RawFd) -> sys::R<RawFd>;

fn by_syscall(pidfd: RawFd, fd: RawFd) -> sys::R<RawFd> {
    // SAFETY: plain numbers.
    result(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, fd, 0) } as c_int)
}

/// (It is in glibc since 2.36.)
fn by_libc(pidfd: RawFd, fd: RawFd) -> sys::R<RawFd> {
    // SAFETY: the name is a string.
    let f = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"pidfd_getfd".as_ptr()) };
    if f.is_null() {
        return Err(libc::ENOSYS);
    }
    // SAFETY: its prototype, in sys/pidfd.h.
    let f: unsafe extern "C" fn(c_int, c_int, c_uint) -> c_int = unsafe { std::mem::transmute(f) };
    // SAFETY: plain numbers.
    result(unsafe { f(pidfd, fd, 0) })
}

fn result(r: c_int) -> sys::R<RawFd> {
    if r < 0 {
        Err(sys::errno())
    } else {
        Ok(r)
    }
}

/// A kernel before 5.6, a libc without it, or a system that lets only debuggers look into others.
fn may_be_refused(r: sys::R<RawFd>) -> Result<RawFd, Why> {
    match r {
        Err(libc::ENOSYS | libc::EPERM) => untried("this system does not give a process's files away").map(|()| -1),
        r => Ok(r?),
    }
}

fn pidfd_of(pid: libc::pid_t) -> Result<RawFd, Why> {
    // SAFETY: plain numbers.
    may_be_refused(result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as c_int))
}

/// What becomes of the process that a connection is taken from.
#[derive(Clone, Copy, PartialEq)]
enum Meanwhile {
    Answers,
    Closes,
    IsKilled,
    IsStopped,
}

const PIECE: usize = 60_000;

fn piece(n: u8) -> Vec<u8> {
    (0..PIECE).map(|i| (i % 251) as u8 ^ n).collect()
}

fn exchange(fd: RawFd, n: u8) -> Res {
    sys::write_all(fd, &piece(n))?;
    take(fd, n)
}

fn take(fd: RawFd, n: u8) -> Res {
    let mut b = vec![0; PIECE];
    sys::read_exact(fd, &mut b)?;
    ensure!(b == piece(n), "piece {n} is not what was sent");
    Ok(())
}

/// Sends back what comes, until that ends.
fn echo(l: RawFd) -> Res {
    let fd = sys::accept(l, 0)?;
    let mut b = vec![0; PIECE];
    loop {
        match sys::read(fd, &mut b)? {
            0 => return Ok(()),
            n => sys::write_all(fd, &b[..n])?,
        }
    }
}

/// Has a connection to an echo that leaves TCP, and says by which number, then does what it is told.
fn owner(ring: bool, port: u16, to: RawFd, from: RawFd) -> Res {
    let fd = sys::connect(port)?;
    let mut left = false;
    for i in 0..2000 {
        let before = sys::tcp_bytes(fd)?;
        let mut b = [0; 16];
        sys::write_all(fd, &[7; 16])?;
        sys::read_exact(fd, &mut b)?;
        left |= sys::tcp_bytes(fd)? == before;
        if i > 80 && (left || !ring) {
            break;
        }
        crate::util::pause_ms(u64::from(i % 8 == 7));
    }
    ensure!(left || !ring, "the connection never left TCP");
    // Its answer is for whoever takes the connection.
    sys::write_all(fd, &piece(1))?;
    let say = || sys::write_all_fd(to, &fd.to_ne_bytes());
    let told = || sys::read_exact(from, &mut [0; 1]);
    say()?;
    told()?;
    exchange(fd, 3)?;
    say()?;
    told()?;
    sys::close(fd)?;
    say()?;
    told()?;
    Ok(())
}

fn from_another(cx: &mut Cx, how: Take, meanwhile: Meanwhile) -> Res {
    child_must_leave_tcp(cx)?;
    let (l, port) = sys::listen(0, 4)?;
    let peer = child(|| echo(l))?;
    let ((answers, to), (from, words)) = (sys::pipe()?, sys::pipe()?);
    let ring = cx.is_to_leave();
    let pid = child(|| owner(ring, port, to, from))?;
    sys::close(l)?;
    let mut number = [0; 4];
    let mut heard = || sys::read_exact(answers, &mut number).map(|()| c_int::from_ne_bytes(number));
    let theirs = heard()?;
    let pidfd = pidfd_of(pid)?;
    if meanwhile == Meanwhile::IsStopped {
        sys::kill(pid, SIGSTOP)?;
    }
    let fd = may_be_refused(how(pidfd, theirs))?;
    if meanwhile == Meanwhile::IsStopped {
        sys::kill(pid, SIGCONT)?;
    }
    take(fd, 1)?;
    exchange(fd, 2)?;
    let go_on = || sys::write_all_fd(words, b".");
    go_on()?;
    heard()?;
    // Both have used it.
    exchange(fd, 4)?;
    match meanwhile {
        Meanwhile::Closes => {
            go_on()?;
            heard()?;
        }
        Meanwhile::IsKilled => {
            sys::kill(pid, SIGKILL)?;
            sys::waitpid(pid)?;
        }
        _ => {}
    }
    same!(sys::poll1(fd, libc::POLLIN | libc::POLLRDHUP, 30)?, 0, "what a connection tells that one of two has let go");
    for n in 5..12 {
        exchange(fd, n)?;
    }
    sys::shutdown(fd, libc::SHUT_WR)?;
    same!(sys::read(fd, &mut [0; 8]), Ok(0), "the end of the stream");
    sys::close(fd)?;
    sys::close(pidfd)?;
    reap(peer)?;
    match meanwhile {
        Meanwhile::IsKilled => return Ok(()),
        Meanwhile::Closes => go_on()?,
        _ => {
            go_on()?;
            heard()?;
            go_on()?;
        }
    }
    reap(pid)
}

/// Another number for the same.
fn from_itself(cx: &mut Cx) -> Res {
    // SAFETY: no preconditions.
    let pidfd = pidfd_of(unsafe { libc::getpid() })?;
    let fd = may_be_refused(by_syscall(pidfd, cx.fd))?;
    sys::close(pidfd)?;
    let before = sys::tcp_bytes(cx.fd)?;
    let first = std::mem::replace(&mut cx.fd, fd);
    cx.warm(40, 0)?;
    sys::close(first)?;
    cx.warm(40, 0)?;
    ensure!(!cx.is_to_leave() || sys::tcp_bytes(fd)? == before, "the connection is on TCP");
    bye(cx)?;
    Ok(())
}
