//! Duplicates, reuse of numbers, `fork`, spawned programs, passed fds.

use super::cx::{child_must_leave_tcp, goes_by_rdma, untried, Cx, Op, Res, Why, LATE};
use super::waiting::{events, set};
use super::Check;
use crate::{ensure, more, same, sys, util};
use libc::{EBADF, EPOLLIN, MSG_NOSIGNAL, O_RDONLY, POLLIN, SHUT_WR};
use std::os::fd::RawFd;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("reuse-by-open", reuse_open),
    ("reuse-by-pipe", reuse_pipe),
    ("reuse-by-socket", reuse_socket),
    ("reuse-by-connection", reuse_connection),
    ("numbers-stay-free", numbers_stay_free),
    ("dup", dup),
    ("dup-fcntl", dup_fcntl),
    ("dup-in-epoll", dup_in_epoll),
    ("dup-in-epoll-number-reused", dup_in_epoll_reused),
    ("dup-in-epoll-returned", dup_in_epoll_returned),
    ("dup-in-epoll-back-to-tcp", dup_in_epoll_back),
    ("dup-shutdown", dup_shutdown),
    ("dup2-over-ring", dup2_over),
    ("dup2-over-ring-wakes-nobody", dup2_same),
    ("dup2-from-ring", dup2_from),
    ("dup3-errors", dup3_errors),
    ("close-range", close_range),
    ("close-by-syscall", close_by_syscall),
    ("fork-child-writes", fork_child_writes),
    ("fork-child-reads", fork_child_reads),
    ("fork-child-waits-for-more", fork_child_waits),
    ("fork-parent-takes-less", fork_parent_takes_less),
    ("fork-without-room-for-fds", fork_without_room),
    ("fork-both", fork_both),
    ("fork-child-closes", fork_child_closes),
    ("fork-parent-closes", fork_parent_closes),
    ("fork-child-exits", fork_child_exits),
    ("fork-child-epoll", fork_child_epoll),
    ("fork-then-shutdown", fork_then_shutdown),
    ("spawn-true", spawn_true),
    ("spawn-with-the-socket", spawn_with_socket),
    ("spawn-reads-the-socket", spawn_reads),
    ("pass-fd", pass_fd),
    ("exit-with-pending", exit_pending),
    ("exec-with-pending", exec_pending),
    ("exec-that-fails", exec_fails),
];

/// Forks a child that runs `f`.
pub fn child(f: impl FnOnce() -> Res) -> Result<libc::pid_t, Why> {
    let pid = sys::fork()?;
    if pid == 0 {
        sys::exit(in_child(f));
    }
    Ok(pid)
}

/// Runs `f` in a child. How that is to exit.
pub fn in_child(f: impl FnOnce() -> Res) -> i32 {
    sys::end_with_parent();
    match f() {
        Ok(()) => 0,
        Err(Why(w)) => {
            eprintln!("rs-app: in the forked child: {w}");
            if w.starts_with(LATE) {
                MERELY_LATE
            } else {
                1
            }
        }
    }
}

/// How a child of [`child`] exits whose only fault is that something took too long.
const MERELY_LATE: i32 = 77;

/// Waits for a child that is to end well.
pub fn reap(pid: libc::pid_t) -> Res {
    match sys::waitpid(pid)? {
        0 => Ok(()),
        s if s == MERELY_LATE << 8 => Err(Why(format!("{LATE}so says the forked child"))),
        s => Err(Why(format!("status of the forked child: {s}"))),
    }
}

/// Takes all free numbers below that of an fd, so that the fd's number is the next one given when
/// it is closed.
fn plug(fd: RawFd) -> Res {
    for _ in 0..100 {
        let n = more::open("/dev/null\0", O_RDONLY)?;
        if n > fd {
            sys::close(n)?;
            break;
        }
    }
    Ok(())
}

/// Closes the check's fd and lets the peer see that.
pub fn bye(cx: &mut Cx) -> Result<RawFd, Why> {
    plug(cx.fd)?;
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads at the end");
    Ok(cx.fd)
}

fn reuse_open(cx: &mut Cx) -> Res {
    let old = bye(cx)?;
    let fd = more::open("/dev/zero\0", O_RDONLY)?;
    same!(fd, old, "the number of the new file");
    let mut b = [9; 100];
    same!(sys::read(fd, &mut b), Ok(100), "read of a file with that number");
    ensure!(b == [0; 100], "other bytes than the file's");
    same!(sys::recv(fd, &mut b, 0), Err(libc::ENOTSOCK), "recv of a file");
    same!(sys::poll1(fd, POLLIN, 0), Ok(POLLIN), "poll of a file");
    Ok(())
}

fn reuse_pipe(cx: &mut Cx) -> Res {
    let old = bye(cx)?;
    let (rd, wr) = sys::pipe()?;
    ensure!(rd == old || wr == old, "pipe gave {rd} and {wr}, not {old}");
    sys::nonblock(rd, true)?;
    let mut b = [0; 10];
    same!(sys::read(rd, &mut b), Err(libc::EAGAIN), "read of an empty pipe");
    same!(sys::write(wr, b"hello"), Ok(5), "write to the pipe");
    same!(sys::poll1(rd, POLLIN, 100), Ok(POLLIN), "poll of the pipe");
    same!(sys::read(rd, &mut b), Ok(5), "read of the pipe");
    Ok(())
}

fn reuse_socket(cx: &mut Cx) -> Res {
    let old = bye(cx)?;
    let fd = sys::tcp_socket()?;
    same!(fd, old, "the number of the new socket");
    same!(sys::send(fd, &[1], MSG_NOSIGNAL), Err(libc::EPIPE), "send without a connection");
    same!(sys::recv(fd, &mut [0], 0), Err(libc::ENOTCONN), "recv without a connection");
    same!(sys::sockname(fd, true), Err(libc::ENOTCONN), "getpeername");
    Ok(())
}

fn reuse_connection(cx: &mut Cx) -> Res {
    let mut last = bye(cx)?;
    let (l, port) = sys::listen(0, 4)?;
    for round in 0..4u8 {
        let a = sys::connect(port)?;
        let b = sys::accept(l, 0)?;
        for i in 0..100u8 {
            let mut m = [0; 24];
            sys::write_all(a, &[i ^ round; 24])?;
            sys::read_exact(b, &mut m)?;
            ensure!(m == [i ^ round; 24], "wrong bytes in round {round}");
            sys::write_all(b, &[!i; 24])?;
            sys::read_exact(a, &mut m)?;
            ensure!(m == [!i; 24], "wrong bytes back in round {round}");
            if i % 25 == 0 {
                util::pause_ms(3);
            }
        }
        sys::close(a)?;
        same!(sys::read(b, &mut [0; 4]), Ok(0), "end of the stream in round {round}");
        sys::close(b)?;
        ensure!(last == l || a == last || round == 0, "numbers: {a} after {last}");
        last = a;
    }
    Ok(())
}

/// Whether the library can keep its new fds out of the program's low numbers: the kernel lets it, nobody filters system
/// calls, and there is no RDMA.
fn numbers_can_stay_free() -> bool {
    // SAFETY: plain numbers; the second fd is closed with the process.
    let got = unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0);
        let got = libc::syscall(libc::SYS_pidfd_getfd, pidfd, 0, 0);
        libc::close(got as i32);
        libc::close(pidfd as i32);
        got
    };
    let actions = std::fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    // SAFETY: plain numbers.
    let filtered = unsafe { libc::prctl(libc::PR_GET_SECCOMP) } != 0;
    !filtered && got >= 0 && actions.contains("user_notif") && !goes_by_rdma()
}

fn numbers_stay_free(cx: &mut Cx) -> Res {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
    if !numbers_can_stay_free() {
        return untried("the kernel or a filter of system calls has no clerk");
    }
    let (l, port) = sys::listen(0, 16)?;
    let pairs = (0..64).map(|_| Ok((sys::connect(port)?, sys::accept(l, 0)?))).collect::<Result<Vec<_>, Why>>()?;
    let is_open = |fd: &RawFd| sys::fcntl(*fd, libc::F_GETFD, 0).is_ok();
    let free: Vec<RawFd> = (3..).filter(|fd| !is_open(fd)).take(3).collect();
    let (looks, seen, over) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
    let met = std::thread::scope(|s| {
        s.spawn(|| {
            while !over.load(SeqCst) {
                looks.fetch_add(1, SeqCst);
                seen.fetch_add(free.iter().any(is_open) as u32, SeqCst);
            }
        });
        // Each connection moves meanwhile, and the two ends make a link.
        let all = (|| {
            for (a, b) in &pairs {
                for i in 0..12 {
                    let mut m = [0; 24];
                    sys::write_all(*a, &[i; 24])?;
                    sys::read_exact(*b, &mut m)?;
                    sys::write_all(*b, &m)?;
                    sys::read_exact(*a, &mut m)?;
                    ensure!(m == [i; 24], "wrong bytes");
                }
                util::pause_ms(3);
            }
            Ok(())
        })();
        over.store(true, SeqCst);
        all
    });
    for (a, b) in pairs {
        sys::close(a)?;
        sys::close(b)?;
    }
    sys::close(l)?;
    met?;
    let (looks, seen) = (looks.load(SeqCst), seen.load(SeqCst));
    ensure!(seen == 0, "of {looks} looks at numbers that are nobody's, {seen} found something");
    cx.warm(6, 0)
}

fn dup(cx: &mut Cx) -> Res {
    let (old, new) = (cx.fd, sys::dup(cx.fd)?);
    cx.warm(10, 0)?;
    cx.fd = new;
    cx.warm(10, 0)?;
    sys::close(old)?;
    cx.warm(10, 0)?;
    sys::nonblock(new, true)?;
    let third = sys::dup(new)?;
    same!(sys::read(third, &mut [0; 4]), Err(libc::EAGAIN), "read of a non-blocking duplicate");
    sys::nonblock(third, false)?;
    cx.later(30, 10)?;
    cx.recv(10)?;
    cx.wait()?;
    sys::close(new)?;
    cx.fd = third;
    cx.warm(10, 0)?;
    bye(cx)?;
    Ok(())
}

fn dup_fcntl(cx: &mut Cx) -> Res {
    let new = sys::fcntl(cx.fd, libc::F_DUPFD_CLOEXEC, 200)?;
    ensure!(new >= 200, "F_DUPFD_CLOEXEC gave {new}");
    sys::close(cx.fd)?;
    cx.fd = new;
    cx.warm(10, 0)?;
    bye(cx)?;
    Ok(())
}

/// A set that has the connection under a number that is closed, and that number.
fn orphan(cx: &mut Cx) -> Result<(i32, i32), Why> {
    let old = cx.fd;
    let ep = set(cx, EPOLLIN)?;
    cx.fd = sys::dup(old)?;
    sys::close(old)?;
    Ok((ep, old))
}

fn dup_in_epoll_reused(cx: &mut Cx) -> Res {
    let (ep, old) = orphan(cx)?;
    let ctl = |op, fd, data| sys::epoll_ctl(ep, op, fd, EPOLLIN as u32, data);
    same!(ctl(libc::EPOLL_CTL_MOD, old, 7), Err(libc::EBADF), "EPOLL_CTL_MOD of the closed number");
    same!(ctl(libc::EPOLL_CTL_DEL, cx.fd, 7), Err(libc::ENOENT), "EPOLL_CTL_DEL of the duplicate");
    // The number comes to be another file, which the set does not know.
    let (rd, wr) = sys::pipe()?;
    sys::dup2(rd, old)?;
    same!(ctl(libc::EPOLL_CTL_MOD, old, 8), Err(libc::ENOENT), "EPOLL_CTL_MOD of another file");
    ctl(libc::EPOLL_CTL_ADD, old, 8)?;
    ctl(libc::EPOLL_CTL_ADD, cx.fd, 9)?;
    sys::write(wr, b"x")?;
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    let ready = || -> Result<Vec<u64>, Why> {
        let mut v: Vec<u64> = sys::epoll_wait(ep, 8, 1000)?.into_iter().map(|e| e.1).collect();
        v.sort();
        Ok(v)
    };
    same!(ready()?, vec![7, 8, 9], "events of the old item, of the new file, and of the duplicate");
    // The number is the connection's again, and so is the item.
    sys::dup2(cx.fd, old)?;
    same!(ctl(libc::EPOLL_CTL_ADD, old, 6), Err(libc::EEXIST), "EPOLL_CTL_ADD when the number is back");
    ctl(libc::EPOLL_CTL_MOD, old, 6)?;
    same!(ready()?, vec![6, 9], "events when the number is back");
    ctl(libc::EPOLL_CTL_DEL, old, 0)?;
    same!(ready()?, vec![9], "events when the item is gone");
    sys::close(old)?;
    cx.recv(10)
}

/// The connection has returned to TCP while the number of its item was closed; then the number is its own again.
fn dup_in_epoll_returned(cx: &mut Cx) -> Res {
    let (ep, old) = orphan(cx)?;
    let ctl = |op, data| sys::epoll_ctl(ep, op, old, EPOLLIN as u32, data);
    // Rings do not have this option.
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_TIMESTAMP, 1i32)?;
    sys::dup2(cx.fd, old)?;
    same!(ctl(libc::EPOLL_CTL_ADD, 6), Err(libc::EEXIST), "EPOLL_CTL_ADD when the number is back");
    ctl(libc::EPOLL_CTL_MOD, 6)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(sys::epoll_wait(ep, 8, 2000)?, vec![(EPOLLIN as u32, 6)], "events when the number is back");
    ctl(libc::EPOLL_CTL_DEL, 0)?;
    same!(sys::epoll_wait(ep, 8, 20)?.len(), 0, "events when the item is gone");
    sys::close(old)?;
    cx.recv(10)
}

fn dup_in_epoll_back(cx: &mut Cx) -> Res {
    let (ep, _) = orphan(cx)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(events(ep, 2000)?, EPOLLIN, "events of the closed number");
    // Rings do not have this option.
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_TIMESTAMP, 1i32)?;
    same!(events(ep, 2000)?, EPOLLIN, "events with an option that rings lack");
    cx.recv(10)?;
    same!(events(ep, 20)?, 0, "events when all is read");
    cx.later(20, 10)?;
    same!(events(ep, 2000)?, EPOLLIN, "events of new data");
    cx.wait()?;
    cx.recv(10)?;
    sys::close(cx.fd)?;
    same!(events(ep, 20)?, 0, "events when the last number is closed");
    Ok(())
}

fn dup_in_epoll(cx: &mut Cx) -> Res {
    let old = cx.fd;
    cx.fd = sys::dup(old)?;
    let ep = set(cx, EPOLLIN)?;
    sys::close(old)?;
    cx.later(20, 10)?;
    same!(events(ep, 2000)?, EPOLLIN, "events of a duplicate whose original is closed");
    cx.wait()?;
    cx.recv(10)?;
    // The set knows the open file: another number for it keeps the entry alive.
    let other = sys::dup(cx.fd)?;
    sys::close(cx.fd)?;
    cx.fd = other;
    cx.later(20, 10)?;
    same!(events(ep, 2000)?, EPOLLIN, "events when the number that was added is closed");
    cx.wait()?;
    cx.recv(10)
}

fn dup_shutdown(cx: &mut Cx) -> Res {
    let new = sys::dup(cx.fd)?;
    sys::shutdown(new, SHUT_WR)?;
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(libc::EPIPE), "send through the original");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.recv(10)
}

fn dup2_over(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    cx.send(100)?;
    same!(sys::dup2(rd, cx.fd)?, cx.fd, "dup2");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 100, "what the peer reads when dup2 closed the connection");
    same!(sys::write(wr, b"hello"), Ok(5), "write to the pipe");
    same!(sys::read(cx.fd, &mut [0; 10]), Ok(5), "read of the pipe with the old number");
    same!(sys::recv(cx.fd, &mut [0; 10], 0), Err(libc::ENOTSOCK), "recv of it");
    Ok(())
}

fn dup2_same(cx: &mut Cx) -> Res {
    same!(sys::dup2(cx.fd, cx.fd)?, cx.fd, "dup2 onto itself");
    cx.warm(10, 0)?;
    bye(cx)?;
    Ok(())
}

fn dup2_from(cx: &mut Cx) -> Res {
    let target = more::open("/dev/null\0", O_RDONLY)?;
    same!(sys::dup2(cx.fd, target)?, target, "dup2");
    sys::close(cx.fd)?;
    cx.fd = target;
    cx.warm(20, 0)?;
    let high = more::dup3(cx.fd, 333, libc::O_CLOEXEC)?;
    same!(high, 333, "dup3");
    sys::close(cx.fd)?;
    cx.fd = high;
    cx.warm(20, 0)?;
    bye(cx)?;
    Ok(())
}

fn dup3_errors(cx: &mut Cx) -> Res {
    same!(more::dup3(cx.fd, cx.fd, 0), Err(libc::EINVAL), "dup3 onto itself");
    same!(sys::dup2(900, cx.fd), Err(EBADF), "dup2 of an fd that is not open");
    same!(sys::dup2(cx.fd, -1), Err(EBADF), "dup2 onto -1");
    cx.warm(10, 0)
}

fn close_range(cx: &mut Cx) -> Res {
    plug(cx.fd)?;
    match more::close_range(cx.fd, cx.fd) {
        Err(libc::ENOSYS) => return untried("the kernel has no close_range"),
        r => r?,
    }
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads");
    same!(sys::read(cx.fd, &mut [0; 4]), Err(EBADF), "read after close_range");
    reuse_after(cx.fd)
}

fn close_by_syscall(cx: &mut Cx) -> Res {
    plug(cx.fd)?;
    more::close_by_syscall(cx.fd)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads");
    reuse_after(cx.fd)
}

fn reuse_after(old: RawFd) -> Res {
    let fd = more::open("/dev/zero\0", O_RDONLY)?;
    same!(fd, old, "the number of the new file");
    same!(sys::read(fd, &mut [9; 100]), Ok(100), "read of a file with that number");
    Ok(())
}

fn fork_child_writes(cx: &mut Cx) -> Res {
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || Ok(c.send(300_000)?))?;
    cx.tx += 300_000;
    same!(cx.tell(Op::Recv, 300_000, 0, 0)?, 300_000, "bytes of the child");
    reap(pid)?;
    cx.warm(20, 0)?;
    bye(cx)?;
    Ok(())
}

fn fork_child_reads(cx: &mut Cx) -> Res {
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || c.recv(300_000))?;
    cx.tell(Op::Send, 300_000, 0, 0)?;
    cx.rx += 300_000;
    reap(pid)?;
    cx.warm(20, 0)?;
    bye(cx)?;
    Ok(())
}

/// What a child waits for by its parent's `SO_RCVLOWAT`, while the first of it comes home.
fn fork_child_waits(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 3, 0, 0)?;
    cx.arrive(3)?;
    let mut c = cx.with_fd(cx.fd);
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 100i32)?;
    let pid = child(move || {
        same!(sys::poll1(c.fd, libc::POLLIN, 50)?, 0, "POLLIN below SO_RCVLOWAT");
        let mut b = [0; 100];
        same!(sys::recv(c.fd, &mut b, 0)?, 100, "what a receive that waits gets");
        c.take(&b)
    })?;
    cx.later(200, 200)?;
    reap(pid)?;
    cx.wait()?;
    cx.rx += 100;
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1i32)?;
    cx.recv(103)
}

/// A receive of less than `SO_RCVLOWAT` takes what is there, also when a child has brought the connection home.
fn fork_parent_takes_less(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 500i32)?;
    let fd = cx.fd;
    reap(child(|| {
        same!(sys::poll1(fd, libc::POLLIN, 0)?, 0, "POLLIN below SO_RCVLOWAT");
        Ok(())
    })?)?;
    for n in [6, 60] {
        let mut b = [0; 60];
        same!(sys::recv(cx.fd, &mut b[..n], 0)?, n, "what a receive that may wait gets");
        cx.take(&b[..n])?;
    }
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1i32)?;
    cx.recv(34)
}

/// A fork where the program has as many fds as it may.
fn fork_without_room(cx: &mut Cx) -> Res {
    const MOST: u64 = 100;
    let mut r = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `r` is writable, and then readable.
    unsafe {
        same!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut r), 0, "getrlimit");
        r.rlim_cur = MOST;
        same!(libc::setrlimit(libc::RLIMIT_NOFILE, &r), 0, "setrlimit");
    }
    let mut all = Vec::new();
    while let Ok(fd) = sys::dup(cx.fd) {
        all.push(fd);
    }
    cx.tell(Op::Send, 1000, 0, 0)?;
    let mut c = cx.with_fd(cx.fd);
    reap(child(move || c.recv(1000))?)?;
    // SAFETY: `r` is writable.
    same!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut r) }, 0, "getrlimit");
    same!(r.rlim_cur, MOST, "the limit");
    same!(sys::dup(cx.fd), Err(libc::EMFILE), "dup");
    all.into_iter().try_for_each(sys::close)?;
    cx.rx += 1000;
    cx.tell(Op::Send, 1000, 0, 0)?;
    cx.recv(1000)
}

fn fork_both(cx: &mut Cx) -> Res {
    // The child writes while the parent reads; then the other way about.
    let mut c = cx.with_fd(cx.fd);
    cx.post(Op::Echo, 30, 10_000, 0)?;
    let pid = child(move || Ok(c.send(300_000)?))?;
    cx.tx += 300_000;
    cx.recv(300_000)?;
    same!(cx.wait()?, 30, "messages echoed");
    reap(pid)?;
    let mut c = cx.with_fd(cx.fd);
    cx.post(Op::Echo, 30, 10_000, 0)?;
    let pid = child(move || c.recv(300_000))?;
    cx.rx += 300_000;
    cx.send(300_000)?;
    same!(cx.wait()?, 30, "messages echoed then");
    reap(pid)?;
    cx.warm(20, 0)
}

fn fork_child_closes(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    let pid = child(move || Ok(sys::close(fd)?))?;
    reap(pid)?;
    cx.warm(20, 0)?;
    bye(cx)?;
    Ok(())
}

fn fork_parent_closes(cx: &mut Cx) -> Res {
    let mut c = cx.with_fd(cx.fd);
    let (rd, wr) = sys::pipe()?;
    let pid = child(move || {
        sys::read(rd, &mut [0])?;
        c.send(100_000)?;
        c.recv(100_000)?;
        Ok(sys::close(c.fd)?)
    })?;
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Poll, 50, POLLIN as u64, 0)?, 0, "what the peer polls: the child lives");
    sys::write(wr, b"x")?;
    same!(cx.tell(Op::Recv, 100_000, 0, 0)?, 100_000, "bytes of the child");
    cx.tell(Op::Send, 100_000, 0, 0)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads when the child has closed");
    reap(pid)
}

fn fork_child_exits(cx: &mut Cx) -> Res {
    for _ in 0..3 {
        reap(child(|| Ok(()))?)?;
        cx.warm(20, 0)?;
    }
    let pid = sys::fork()?;
    if pid == 0 {
        util::pause_ms(10_000);
        sys::exit(3);
    }
    sys::kill(pid, libc::SIGKILL)?;
    sys::waitpid(pid)?;
    cx.warm(20, 0)?;
    bye(cx)?;
    Ok(())
}

fn fork_child_epoll(cx: &mut Cx) -> Res {
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || {
        let ep = set(&c, EPOLLIN)?;
        for i in 0..20 {
            same!(events(ep, 3000)?, EPOLLIN, "event {i} in the child");
            c.recv(1000)?;
            same!(events(ep, 0)?, 0, "event {i} when it is read");
            c.send(1000)?;
        }
        Ok(())
    })?;
    for _ in 0..20 {
        util::pause_ms(2);
        cx.tell(Op::Send, 1000, 0, 0)?;
        same!(cx.tell(Op::Recv, 1000, 0, 0)?, 1000, "bytes of the child");
    }
    cx.rx += 20_000;
    cx.tx += 20_000;
    reap(pid)?;
    cx.warm(20, 0)
}

fn fork_then_shutdown(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    let pid = child(move || Ok(sys::shutdown(fd, SHUT_WR)?))?;
    reap(pid)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads after the child's shutdown");
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(libc::EPIPE), "send in the parent");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.recv(10)
}

fn spawn_true(cx: &mut Cx) -> Res {
    for _ in 0..5 {
        let ok = std::process::Command::new("true").status().map_err(|e| Why(e.to_string()))?;
        ensure!(ok.success(), "`true` failed");
        cx.warm(20, 0)?;
    }
    bye(cx)?;
    Ok(())
}

/// Runs a shell command whose standard input is the connection.
fn shell(cx: &Cx, text: &str) -> Result<String, Why> {
    use std::os::fd::FromRawFd;
    let fd = sys::dup(cx.fd)?;
    // SAFETY: the duplicate is nobody else's.
    let input = unsafe { std::process::Stdio::from_raw_fd(fd) };
    let out = std::process::Command::new("sh").arg("-c").arg(text).stdin(input).output();
    let out = out.map_err(|e| Why(e.to_string()))?;
    ensure!(out.status.success(), "sh: {}", String::from_utf8_lossy(&out.stderr));
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn spawn_with_socket(cx: &mut Cx) -> Res {
    // The program inherits the connection and never touches it.
    for _ in 0..3 {
        shell(cx, "true")?;
        cx.warm(20, 0)?;
    }
    bye(cx)?;
    Ok(())
}

fn spawn_reads(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 1000, 0, 0)?;
    let text = shell(cx, "head -c 1000 | od -An -v -tu1")?;
    let b: Vec<u8> = text.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    same!(b.len(), 1000, "bytes that the program read");
    cx.take(&b)?;
    cx.warm(20, 0)?;
    bye(cx)?;
    Ok(())
}

fn pass_fd(cx: &mut Cx) -> Res {
    let (a, b) = sys::socketpair()?;
    more::send_fd(a, cx.fd)?;
    sys::close(cx.fd)?;
    cx.fd = more::recv_fd(b)?;
    cx.warm(40, 0)?;
    cx.post(Op::Send, 200_000, 0, 0)?;
    cx.recv(200_000)?;
    cx.wait()?;
    bye(cx)?;
    Ok(())
}

fn exit_pending(cx: &mut Cx) -> Res {
    let mut c = cx.with_fd(cx.fd);
    let (rd, wr) = sys::pipe()?;
    // The child fills the connection and ends without closing it.
    let pid = child(move || {
        let n = c.fill(5000)? as u64;
        sys::write(wr, &n.to_ne_bytes())?;
        Ok(())
    })?;
    sys::close(cx.fd)?;
    let mut b = [0; 8];
    sys::read_exact(rd, &mut b)?;
    let n = u64::from_ne_bytes(b);
    util::pause_ms(50);
    same!(cx.tell(Op::SlowRecv, n, 50_000, 100)?, n, "bytes of the child");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    reap(pid)
}

/// Another program in place of this one; it comes back only if that fails.
fn become_other(path: &std::ffi::CStr) -> std::io::Error {
    let argv = [path.as_ptr(), std::ptr::null()];
    // SAFETY: the path is a string, the array ends with a null.
    unsafe { libc::execv(path.as_ptr(), argv.as_ptr()) };
    std::io::Error::last_os_error()
}

/// Another image takes the place of a program whose connection is full, and perhaps about to be the kernel's again; it
/// does not get the connection.
fn exec_pending(cx: &mut Cx) -> Res {
    child_must_leave_tcp(cx)?;
    let (rd, wr) = sys::pipe()?;
    let pid = child(|| {
        cx.renew()?;
        cx.leave_tcp()?;
        sys::fcntl(cx.fd, libc::F_SETFD, libc::FD_CLOEXEC)?;
        let n = cx.fill(5000)? as u64;
        let fd = cx.fd;
        let flags = sys::fcntl(fd, libc::F_GETFL, 0)?;
        std::thread::spawn(move || sys::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC));
        util::pause_ms(30);
        sys::write(wr, &n.to_ne_bytes())?;
        Err(Why(format!("no exec: {}", become_other(c"/bin/true"))))
    })?;
    let mut b = [0; 8];
    sys::read_exact(rd, &mut b)?;
    let n = u64::from_ne_bytes(b);
    util::pause_ms(50);
    same!(cx.tell(Op::SlowRecv, n, 50_000, 100)?, n, "bytes of the program that is no more");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    reap(pid)
}

/// The program goes on after an `exec` that fails, and its connection as well, also to where rings do not follow.
fn exec_fails(cx: &mut Cx) -> Res {
    child_must_leave_tcp(cx)?;
    let pid = child(|| {
        cx.renew()?;
        cx.leave_tcp()?;
        sys::fcntl(cx.fd, libc::F_SETFD, libc::FD_CLOEXEC)?;
        for i in 0..3 {
            same!(become_other(c"/no such program").raw_os_error(), Some(libc::ENOENT), "exec");
            cx.warm(6, 0)?;
            if i == 1 {
                let flags = sys::fcntl(cx.fd, libc::F_GETFL, 0)?;
                sys::fcntl(cx.fd, libc::F_SETFL, flags | libc::O_ASYNC)?;
            }
        }
        Ok(())
    })?;
    reap(pid)
}
