//! The actors: threads that do one call at a time, as the conductor tells them, and report what came of it.

use super::calls;
use super::wire::{self, Cmd, Op, Reply};
use crate::start::{self, How};
use crate::{more, sys};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// Processes of a program: two that stand at the beginning, and what is forked.
pub const PROCS: usize = 6;
/// Threads of a process that take commands.
pub const LANES: usize = 3;
/// Where the actors' ends of the Unix sockets are, beyond the numbers that a program deals with.
pub const CTL_BASE: RawFd = 400;

/// The control socket of a lane.
pub fn ctl(process: usize, lane: usize) -> RawFd {
    CTL_BASE + (process * LANES + lane) as RawFd
}

/// The Unix socket by which fds are passed to a process: (for others, for itself).
pub fn mailbox(process: usize) -> (RawFd, RawFd) {
    let base = CTL_BASE + (PROCS * LANES + process * 2) as RawFd;
    (base, base + 1)
}

/// Which process of the program this one is.
static ME: AtomicU64 = AtomicU64::new(0);

/// The first thread of a process: ends with the process.
pub fn process(me: usize) -> ! {
    ME.store(me as u64, Ordering::SeqCst);
    sys::end_with_parent();
    lane(me, 0);
    sys::exit(0)
}

fn lane(me: usize, lane: usize) {
    let sock = ctl(me, lane);
    while let Ok(c) = wire::get_cmd(sock) {
        if c.announce && wire::put_reply(sock, &Reply::default()).is_err() {
            return;
        }
        let r = act(me, &c);
        if wire::put_reply(sock, &r).is_err() || c.op == Op::Quit {
            return;
        }
    }
}

/// The calling thread's id.
fn tid() -> i64 {
    // SAFETY: no arguments.
    unsafe { libc::syscall(libc::SYS_gettid) }
}

fn act(me: usize, c: &Cmd) -> Reply {
    let a = &c.a;
    let fd = a[0] as RawFd;
    match c.op {
        Op::Lane => {
            let (tell, told) = std::sync::mpsc::channel();
            let n = a[0] as usize;
            std::thread::spawn(move || {
                let _ = tell.send(tid());
                lane(me, n);
            });
            Reply { aux: told.recv().unwrap_or(0), ..Reply::default() }
        }
        Op::Fork => fork(a[0] as usize),
        Op::Start => start_image(a[0] as usize, a[1], a[2] != 0),
        Op::Become => calls::fail(with_words(a[0] as usize, a[2] != 0, start::become_program)),
        Op::Keep => calls::int(sys::fcntl(fd, libc::F_SETFD, 0)),
        Op::Have => {
            let open = (0..fd).filter(|n| sys::fcntl(*n, libc::F_GETFD, 0).is_ok());
            Reply { text: open.map(|n| n.to_string()).collect::<Vec<_>>().join(" "), ..Reply::default() }
        }
        Op::Reap => calls::int(sys::waitpid(a[0] as i32)),
        Op::Quit => Reply::default(),
        Op::Signal => {
            let r = sys::sigaction(a[1] as i32, more::counter, a[2] as i32);
            // SAFETY: plain numbers.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), a[0], a[1]) };
            calls::unit(r)
        }
        Op::PassFd => calls::unit(more::send_fd(fd, a[1] as RawFd)),
        Op::TakeFd => calls::new_fd(more::recv_fd(fd)),
        _ => calls::act(c),
    }
}

/// The child goes on as another process of the program, with the forking thread as its first lane.
fn fork(child: usize) -> Reply {
    match sys::fork() {
        Ok(0) => process(child),
        Ok(pid) => Reply { aux: pid as i64, text: "forked".into(), ..Reply::default() },
        Err(e) => calls::fail(e),
    }
}

/// Does something with the words of a command that is process `me` of the program.
fn with_words<T>(me: usize, bare: bool, f: impl FnOnce(&[&str]) -> T) -> T {
    let (exe, me) = (std::env::current_exe().expect("the path of this program"), me.to_string());
    let mut words = vec!["/usr/bin/env", "-u", "LD_PRELOAD"];
    words.truncate(if bare { 3 } else { 0 });
    words.extend([exe.to_str().expect("a path of text"), "programs", "--actor", &me]);
    words.extend(calls::are_counted().then_some("--counted"));
    f(&words)
}

/// Starts another process of the program that has inherited what its parent had over `exec`.
fn start_image(me: usize, way: i64, bare: bool) -> Reply {
    let how = match way {
        0 => How::Fork,
        1 => How::Vfork,
        _ => How::Spawn,
    };
    match with_words(me, bare, |words| start::start_with(how, words, &[])) {
        Ok(pid) => Reply { aux: pid as i64, text: "started".into(), ..Reply::default() },
        Err(e) => calls::fail(e),
    }
}
