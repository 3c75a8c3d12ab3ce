//! `poll` and `select`.

use super::basic::ms;
use super::cx::{between, Cx, Op, Res, Why};
use super::Check;
use crate::{ensure, same, sys, util};
use libc::{POLLIN, POLLOUT, POLLRDHUP};
use std::os::fd::RawFd;
use std::time::Instant;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("poll-in", poll_in),
    ("poll-many", poll_many),
    ("poll-as-many-as-may-be-open", poll_limit),
    ("select-beyond-the-limit", select_limit),
    ("poll-of-the-end-alone", poll_end),
    ("poll-while-another-moves", poll_moves),
    ("poll-means-bytes-while-it-moves", poll_means_bytes),
    ("poll-timeout", poll_timeout),
    ("poll-with-pipe", poll_with_pipe),
    ("poll-out-after-drain", poll_out),
    ("select-read-write", select_rw),
    ("select-timeout", select_timeout),
];

fn poll_in(cx: &mut Cx) -> Res {
    same!(sys::poll1(cx.fd, POLLIN, 0)?, 0, "poll of nothing");
    for _ in 0..5 {
        cx.later(15, 100)?;
        same!(sys::poll1(cx.fd, POLLIN, 2000)?, POLLIN, "poll");
        same!(sys::poll1(cx.fd, POLLIN, 0)?, POLLIN, "poll again");
        cx.arrive(100)?;
        cx.recv(60)?;
        same!(sys::poll1(cx.fd, POLLIN, 0)?, POLLIN, "poll with 40 bytes left");
        cx.recv(40)?;
        same!(sys::poll1(cx.fd, POLLIN, 0)?, 0, "poll with nothing left");
        cx.wait()?;
    }
    Ok(())
}

fn poll_many(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    let p = |fd, events| libc::pollfd { fd, events, revents: 77 };
    let mut v = [p(-1, POLLIN), p(cx.fd, POLLIN | POLLOUT), p(rd, POLLIN), p(wr, POLLOUT), p(cx.fd, POLLIN)];
    same!(sys::poll(&mut v, 1000)?, 2, "fds that are ready");
    let got: Vec<i16> = v.iter().map(|x| x.revents).collect();
    same!(got, vec![0, POLLOUT, 0, POLLOUT, 0], "events");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    same!(sys::poll(&mut v, 1000)?, 3, "fds that are ready then");
    let got: Vec<i16> = v.iter().map(|x| x.revents).collect();
    same!(got, vec![0, POLLIN | POLLOUT, 0, POLLOUT, POLLIN], "events then");
    let mut v = [p(900, POLLIN), p(cx.fd, POLLIN)];
    same!(sys::poll(&mut v, 1000)?, 2, "with an fd that is not open");
    same!((v[0].revents, v[1].revents), (libc::POLLNVAL, POLLIN), "events of those");
    cx.recv(10)
}

/// The kernel takes as many as the process may have open, and not one more.
fn poll_limit(cx: &mut Cx) -> Res {
    for most in [64usize, 300, 2] {
        limit_files(most as u64)?;
        let mut p = vec![libc::pollfd { fd: -1, events: POLLIN, revents: 0 }; most + 1];
        p[most / 2].fd = cx.fd;
        same!(sys::poll(&mut p[..most], 0), Ok(0), "poll of {most} that does not wait");
        same!(sys::poll(&mut p[..most], 30), Ok(0), "poll of {most} with nothing to come");
        same!(sys::poll(&mut p, 10), Err(libc::EINVAL), "poll of more than {most}");
        cx.later(30, 100)?;
        same!(sys::poll(&mut p[..most], 5000), Ok(1), "poll of {most}");
        same!(p[most / 2].revents, POLLIN, "what the connection has");
        cx.recv(100)?;
        cx.wait()?;
    }
    Ok(())
}

fn limit_files(most: u64) -> Res {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is readable and writable.
    unsafe {
        same!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0, "getrlimit");
        limit.rlim_cur = most;
        same!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0, "setrlimit");
    }
    Ok(())
}

/// `select` knows no such limit as `poll` does. With none that may be open a connection that is goes on.
fn select_limit(cx: &mut Cx) -> Res {
    let other = sys::dup(cx.fd)?;
    let (rd, wr) = sys::pipe()?;
    for most in [2, 1, 0] {
        limit_files(most)?;
        let all = [rd, cx.fd, other];
        same!(sys::select(&all, &[], 0)?, (vec![], vec![]), "what is readable of three files, with {most}");
        same!(sys::select(&all, &[wr, cx.fd], 500)?, (vec![], vec![wr, cx.fd]), "what is writable, with {most}");
        let began = Instant::now();
        same!(sys::select(&all, &[], 30)?, (vec![], vec![]), "what is readable after 30 ms, with {most}");
        ensure!(ms(began) >= 29, "it took {} ms", ms(began));
        // (What the check itself needs polls.)
        limit_files(64)?;
        cx.later(30, 100)?;
        limit_files(most)?;
        same!(sys::select(&all, &[], 5000)?, (vec![cx.fd, other], vec![]), "what is readable then, with {most}");
        cx.recv(100)?;
        limit_files(64)?;
        cx.wait()?;
        cx.warm(20, 0)?;
    }
    Ok(())
}

/// Who waits for nothing but the end is told of it, wherever the connection is by then.
fn poll_end(cx: &mut Cx) -> Res {
    for events in [POLLRDHUP, POLLRDHUP | libc::POLLPRI] {
        cx.renew()?;
        let fd = cx.fd;
        let t = std::thread::spawn(move || sys::poll1(fd, events, 8000));
        cx.leave_tcp()?;
        util::pause_ms(5);
        let began = Instant::now();
        cx.tell(Op::Shutdown, libc::SHUT_WR as u64, 0, 0)?;
        let got = t.join().map_err(|_| Why("the thread".into()))?;
        same!(got?, POLLRDHUP, "poll of the end");
        ensure!(ms(began) < 1000, "poll was told after {} ms", ms(began));
    }
    Ok(())
}

/// A connection leaves TCP while a thread sleeps that waits for it, and for one that has left before: it hears of what comes
/// then. Of all threads it runs last, so that the rest has happened when it looks.
fn poll_moves(cx: &mut Cx) -> Res {
    let (l, port) = sys::listen(0, 8)?;
    let server = std::thread::spawn(move || -> sys::R<()> {
        for _ in 0..MOVES {
            let fd = sys::accept(l, 0)?;
            let mut b = [0; 16];
            while sys::read_exact(fd, &mut b).is_ok() {
                util::pause_ms(2);
                sys::write_all(fd, &b)?;
            }
            sys::close(fd)?;
        }
        Ok(())
    });
    last_to_run()?;
    for k in 0..MOVES {
        let fd = sys::connect(port)?;
        for round in 0..25u8 {
            sys::write_all(fd, &[round; 16])?;
            let mut p = [cx.fd, fd].map(|fd| libc::pollfd { fd, events: POLLIN, revents: 0 });
            same!(sys::poll(&mut p, 3000), Ok(1), "fds that are ready, connection {k}, round {round}");
            let mut b = [0; 16];
            sys::read_exact(fd, &mut b)?;
            same!(b, [round; 16], "bytes");
        }
        sys::close(fd)?;
    }
    ensure!(matches!(server.join(), Ok(Ok(()))), "the server");
    Ok(())
}

const MOVES: u32 = 10;

/// What `poll` reports of connections that come and go between TCP and rings is the program's bytes and not the library's: a
/// receive finds them.
fn poll_means_bytes(_: &mut Cx) -> Res {
    let (l, port) = sys::listen(0, 8)?;
    let echo = move |fd: RawFd| -> sys::R<()> {
        let mut b = [0; 16];
        while sys::read_exact(fd, &mut b).is_ok() {
            util::pause_ms(1);
            sys::write_all(fd, &b)?;
        }
        sys::close(fd)
    };
    let mut threads = Vec::new();
    let mut fds = [0; 3];
    for fd in &mut fds {
        *fd = sys::connect(port)?;
        let theirs = sys::accept(l, 0)?;
        threads.push(std::thread::spawn(move || echo(theirs)));
        sys::write_all(*fd, &[0; 16])?;
    }
    let end = Instant::now() + std::time::Duration::from_secs(3);
    while Instant::now() < end {
        let mut p = fds.map(|fd| libc::pollfd { fd, events: POLLIN, revents: 0 });
        sys::poll(&mut p, 0)?;
        for p in p.iter().filter(|p| p.revents != 0) {
            let mut b = [0; 16];
            same!(sys::recv(p.fd, &mut b, libc::MSG_DONTWAIT), Ok(16), "bytes that poll has told of");
            sys::write_all(p.fd, &[1; 16])?;
        }
    }
    for fd in fds {
        sys::close(fd)?;
    }
    ensure!(threads.into_iter().all(|t| t.join().is_ok()), "the other ends");
    Ok(())
}

/// The process has one processor from now on, and the calling thread runs when no other wants to.
fn last_to_run() -> Res {
    // SAFETY: plain data, and of the right size.
    let done = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let size = std::mem::size_of_val(&set);
        libc::sched_getaffinity(0, size, &mut set);
        let first = (0..libc::CPU_SETSIZE as usize).find(|c| libc::CPU_ISSET(*c, &set)).unwrap_or(0);
        libc::CPU_ZERO(&mut set);
        libc::CPU_SET(first, &mut set);
        for t in std::fs::read_dir("/proc/self/task").map_err(|e| Why(e.to_string()))?.flatten() {
            let tid = t.file_name().to_string_lossy().parse().unwrap_or(0);
            libc::sched_setaffinity(tid, size, &set);
        }
        let none: libc::sched_param = std::mem::zeroed();
        libc::sched_setscheduler(0, libc::SCHED_IDLE, &none)
    };
    ensure!(done == 0, "sched_setscheduler: {}", sys::strerror(sys::errno()));
    Ok(())
}

fn poll_timeout(cx: &mut Cx) -> Res {
    for want in [0, 1, 10, 60, 150] {
        let t = Instant::now();
        same!(sys::poll1(cx.fd, POLLIN, want)?, 0, "poll");
        between("poll", ms(t), want as u64, want as u64 + 30)?;
        let t = Instant::now();
        same!(sys::ppoll1(cx.fd, POLLIN, want as i64 * 1000 + 300)?, 0, "ppoll");
        between("ppoll", ms(t), want as u64, want as u64 + 30)?;
    }
    let t = Instant::now();
    for _ in 0..20 {
        same!(sys::ppoll1(cx.fd, POLLIN, 200)?, 0, "ppoll of 0.2 ms");
    }
    between("20 times ppoll of 0.2 ms", ms(t), 4, 40)
}

fn poll_with_pipe(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    for i in 0..6 {
        let t = std::thread::spawn(move || {
            util::pause_ms(30);
            if i % 2 == 0 {
                let _ = sys::write(wr, b"x");
            }
        });
        if i % 2 == 1 {
            cx.later(30, 1)?;
        }
        let p = |fd| libc::pollfd { fd, events: POLLIN, revents: 0 };
        let mut v = [p(cx.fd), p(rd)];
        same!(sys::poll(&mut v, 3000)?, 1, "fds that are ready");
        same!((v[0].revents != 0, v[1].revents != 0), (i % 2 == 1, i % 2 == 0), "which one");
        t.join().map_err(|_| Why("thread".into()))?;
        if i % 2 == 0 {
            sys::read(rd, &mut [0])?;
        } else {
            cx.recv(1)?;
            cx.wait()?;
        }
    }
    Ok(())
}

fn poll_out(cx: &mut Cx) -> Res {
    same!(sys::poll1(cx.fd, POLLOUT, 0)?, POLLOUT, "poll of an idle connection");
    let mut n = cx.fill(4096)?;
    // Buffers may grow while nobody reads: the kernel's by themselves, a ring's by becoming the kernel's. But not for ever.
    let mut grown = 0;
    while sys::poll1(cx.fd, POLLOUT, 30)? != 0 {
        grown += 1;
        let more = cx.fill(4096)?;
        ensure!(grown < 20 && more > 0, "poll of a full one: there is room for {more} bytes");
        n += more;
    }
    cx.post(Op::Sleep, 30_000, 0, 0)?;
    cx.post(Op::Recv, n as u64, 0, 0)?;
    same!(sys::poll1(cx.fd, POLLIN | POLLOUT, 3000)?, POLLOUT, "poll while the peer reads");
    same!(cx.wait()?, n as u64, "bytes that arrived");
    Ok(())
}

fn select_rw(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    let f = cx.fd;
    same!(sys::select(&[f, rd], &[f, wr], 1000)?, (vec![], vec![f, wr]), "select");
    cx.later(20, 10)?;
    same!(sys::select(&[f, rd], &[], 2000)?, (vec![f], vec![]), "select for reading");
    cx.wait()?;
    sys::write(wr, b"x")?;
    same!(sys::select(&[f, rd], &[f], 2000)?, (vec![f, rd], vec![f]), "select with all");
    ensure!(sys::pselect_read(f, 100)?, "pselect says no");
    cx.recv(10)?;
    let mut n = cx.fill(4096)?;
    let mut full = false;
    for _ in 0..50 {
        // The kernel's buffers grow, and a ring is another buffer: there may be room again in between.
        full = sys::select(&[f], &[f], 40)?.1.is_empty() && sys::select(&[f], &[f], 0)? == (vec![], vec![]);
        if full {
            break;
        }
        n += cx.fill(4096)?;
    }
    ensure!(full, "select says that there is always room");
    cx.post(Op::Sleep, 20_000, 0, 0)?;
    cx.post(Op::Recv, n as u64, 0, 0)?;
    same!(sys::select(&[f], &[f], 2000)?, (vec![], vec![f]), "select while the peer reads");
    Ok(())
}

fn select_timeout(cx: &mut Cx) -> Res {
    for want in [0, 10, 80] {
        let t = Instant::now();
        same!(sys::select(&[cx.fd], &[], want)?, (vec![], vec![]), "select");
        between("select", ms(t), want as u64, want as u64 + 30)?;
        let t = Instant::now();
        ensure!(!sys::pselect_read(cx.fd, want)?, "pselect says yes");
        between("pselect", ms(t), want as u64, want as u64 + 30)?;
    }
    Ok(())
}
