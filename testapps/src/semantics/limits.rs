//! Limits that a program sets for itself when its connections have moved.

use super::cx::{Cx, Res};
use super::mains::exchange;
use super::procs::{child, reap};
use super::Check;
use crate::{ensure, same, sys};
use libc::{c_int, rlimit};
use std::ptr::{null, null_mut};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("address-space-limited-later", |cx| limited(cx, true, by_setrlimit)),
    ("address-space-limited-by-prlimit", |cx| limited(cx, true, by_prlimit)),
    ("address-space-limited-by-syscall", |cx| limited(cx, true, by_syscall)),
    ("address-space-limited-in-a-child", |cx| limited(cx, false, by_setrlimit)),
];

/// More than the program uses by itself, ...
const LIMIT: u64 = 600 << 20;
/// ... which is less than it has left then, ...
const SOME: usize = 64 << 20;
/// ... and more than it has left.
const MUCH: usize = 700 << 20;

fn by_setrlimit(r: &rlimit) -> c_int {
    // SAFETY: `r` is readable.
    unsafe { libc::setrlimit(libc::RLIMIT_AS, r) }
}

fn by_prlimit(r: &rlimit) -> c_int {
    // SAFETY: `r` is readable.
    unsafe { libc::prlimit(libc::getpid(), libc::RLIMIT_AS, r, null_mut()) }
}

fn by_syscall(r: &rlimit) -> c_int {
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_AS, r, null::<rlimit>()) as c_int }
}

/// A connection of the program's own moves.
fn talk() -> Res {
    let (l, port) = sys::listen_at(sys::host(), 0, 1)?;
    let ours = sys::connect(port)?;
    let theirs = sys::accept(l, 0)?;
    exchange(ours, theirs, 300)
}

fn can_map(len: usize) -> bool {
    // SAFETY: a new mapping that nobody uses.
    unsafe {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let at = libc::mmap(null_mut(), len, prot, flags, -1, 0);
        at != libc::MAP_FAILED && libc::munmap(at, len) == 0
    }
}

fn limited(_: &mut Cx, moves: bool, set: fn(&rlimit) -> c_int) -> Res {
    if !moves {
        talk()?;
    }
    reap(child(|| {
        if moves {
            talk()?;
        }
        let wanted = rlimit { rlim_cur: LIMIT, rlim_max: LIMIT + (1 << 20) };
        let mut r = rlimit { rlim_cur: 0, rlim_max: 0 };
        for _ in 0..2 {
            same!(set(&wanted), 0, "the limit");
            // SAFETY: `r` is writable.
            same!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut r) }, 0, "getrlimit");
            same!((r.rlim_cur, r.rlim_max), (wanted.rlim_cur, wanted.rlim_max), "what is read back");
        }
        // SAFETY: as above.
        same!(unsafe { libc::prlimit(0, libc::RLIMIT_AS, null(), &mut r) }, 0, "prlimit");
        same!((r.rlim_cur, r.rlim_max), (wanted.rlim_cur, wanted.rlim_max), "what prlimit says");
        same!(set(&rlimit { rlim_cur: 2, rlim_max: 1 }), -1, "a soft limit above the hard one");
        same!(sys::errno(), libc::EINVAL, "why");
        ensure!(can_map(SOME), "mmap of {SOME} bytes: {}", sys::strerror(sys::errno()));
        ensure!(!can_map(MUCH), "mmap of {MUCH} bytes is not refused");
        image_has(wanted)
    })?)
}

/// A program that this one becomes has the same limits.
fn image_has(r: rlimit) -> Res {
    let (rd, wr) = sys::pipe()?;
    let pid = sys::fork()?;
    if pid == 0 {
        let argv = [c"sh".as_ptr(), c"-c".as_ptr(), c"ulimit -Sv; ulimit -Hv".as_ptr(), null()];
        // SAFETY: strings, and an array that ends with a null.
        unsafe {
            libc::dup2(wr, 1);
            libc::execv(c"/bin/sh".as_ptr(), argv.as_ptr());
            libc::_exit(126);
        }
    }
    sys::close(wr)?;
    let mut text = Vec::new();
    let mut b = [0; 256];
    while let n @ 1.. = sys::read(rd, &mut b)? {
        text.extend_from_slice(&b[..n]);
    }
    reap(pid)?;
    let wanted = format!("{}\n{}\n", r.rlim_cur >> 10, r.rlim_max >> 10);
    same!(String::from_utf8_lossy(&text), wanted, "what an image says");
    Ok(())
}
