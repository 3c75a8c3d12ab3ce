//! What a program does with a socket before it dials it holds for the connection.

use super::cx::{Cx, Res, Why};
use super::found::{pair, warm};
use super::Check;
use crate::{ensure, more, same, sys, util};
use libc::{
    EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDHUP, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, POLLIN, POLLOUT,
};
use std::os::fd::RawFd;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("early-epoll-add", add),
    ("early-epoll-add-while-it-dials", while_it_dials),
    ("early-epoll-mod", |cx| changed(cx, true)),
    ("early-epoll-mod-then-known", |cx| changed(cx, false)),
    ("early-epoll-del", del),
    ("early-epoll-two-sets", two_sets),
    ("early-epoll-oneshot", oneshot),
    ("early-epoll-closed-set", closed_set),
    ("early-epoll-closed-number", closed_number),
    ("early-epoll-of-a-duplicate", of_a_duplicate),
    ("early-dup", duplicate),
    ("early-fork", forked),
    ("early-pass", passed),
    ("early-recv-while-it-dials", |cx| waits_while_it_dials(cx, |fd| sys::recv(fd, &mut [0], 0).map(|n| n == 1))),
    ("early-poll-while-it-dials", |cx| {
        waits_while_it_dials(cx, |fd| sys::poll1(fd, POLLIN, 10_000).map(|r| r == POLLIN))
    }),
    ("early-epoll-while-it-dials", |cx| {
        waits_while_it_dials(cx, |fd| {
            let ep = sys::epoll_awaited()?;
            sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN as u32, 2)?;
            let got = sys::epoll_wait(ep, 4, 10_000)?;
            sys::close(ep)?;
            Ok(got == [(EPOLLIN as u32, 2)])
        })
    }),
];

/// Both ends of a new connection; `with` gets the socket before it is dialled.
fn dialled(with: impl FnOnce(RawFd) -> sys::R<()>) -> Result<(RawFd, RawFd), Why> {
    let (l, port) = sys::listen(0, 4)?;
    let a = sys::connect_as(port, with)?;
    let b = sys::accept(l, 0)?;
    sys::close(l)?;
    Ok((a, b))
}

/// Bytes for `a` come, and the set says so once, as `want`.
fn told(ep: RawFd, a: RawFd, b: RawFd, want: (u32, u64)) -> Res {
    sys::write_all(b, &[1])?;
    same!(sys::epoll_wait(ep, 4, 2000)?, vec![want], "events");
    sys::read_exact(a, &mut [0])?;
    Ok(())
}

fn close(fds: &[RawFd]) -> Res {
    for fd in fds {
        sys::close(*fd)?;
    }
    Ok(())
}

/// The set gets the socket first, and is never told of it again; the program looks at it by `poll` as well.
fn add(cx: &mut Cx) -> Res {
    for how in [EPOLLIN, EPOLLIN | EPOLLET] {
        let ep = sys::epoll_awaited()?;
        let (a, b) = dialled(|fd| sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, how as u32, 3))?;
        for _ in 0..10 {
            sys::poll1(a, POLLOUT, 1000)?;
            warm(a, b, 8)?;
            sys::epoll_wait(ep, 4, 0)?;
            told(ep, a, b, (EPOLLIN as u32, 3))?;
        }
        sys::shutdown(b, libc::SHUT_WR)?;
        same!(sys::epoll_wait(ep, 4, 2000)?, vec![(EPOLLIN as u32, 3)], "the end");
        close(&[a, b, ep])?;
    }
    cx.warm(4, 0)
}

/// As nginx does: everything that is edge-triggered, then a `connect` that does not wait; the set says when it is done.
fn while_it_dials(cx: &mut Cx) -> Res {
    const ALL: i32 = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    for _ in 0..4 {
        let ep = sys::epoll_awaited()?;
        let (l, port) = sys::listen(0, 4)?;
        let a = sys::tcp_socket()?;
        sys::nonblock(a, true)?;
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, a, ALL as u32, 5)?;
        match sys::connect_to(a, port) {
            Ok(()) | Err(libc::EINPROGRESS) => {}
            Err(e) => ensure!(false, "connect: {}", sys::strerror(e)),
        }
        let b = sys::accept(l, 0)?;
        let mut dialled = 0;
        while dialled & EPOLLOUT == 0 {
            let got = sys::epoll_wait(ep, 4, 2000)?;
            ensure!(!got.is_empty(), "the set never says that it may be written to");
            dialled = got[0].0 as i32;
        }
        same!(sys::getsockopt_int(a, libc::SOL_SOCKET, libc::SO_ERROR)?, 0, "SO_ERROR");
        for round in 0..60u8 {
            same!(sys::write(a, &[round; 16])?, 16, "a request");
            sys::read_exact(b, &mut [0; 16])?;
            if round % 8 == 7 {
                util::pause_ms(3);
            }
            sys::write_all(b, &[round; 8])?;
            let mut got = [0; 8];
            let mut seen = Err(libc::EAGAIN);
            while seen == Err(libc::EAGAIN) {
                let events = sys::epoll_wait(ep, 4, 2000)?;
                ensure!(!events.is_empty(), "an answer of which the set says nothing, round {round}");
                seen = sys::read(a, &mut got);
            }
            same!((seen, got), (Ok(8), [round; 8]), "an answer");
            // Where edges are taken so, the rest is asked for.
            same!(sys::read(a, &mut got), Err(libc::EAGAIN), "more than the answer");
        }
        sys::close(b)?;
        let got = sys::epoll_wait(ep, 4, 2000)?;
        ensure!(got.len() == 1 && got[0].0 as i32 & EPOLLRDHUP != 0, "the end: {got:?}");
        close(&[a, l, ep])?;
    }
    cx.warm(4, 0)
}

/// The set is told something else of it, before it is dialled or after.
fn changed(cx: &mut Cx, early: bool) -> Res {
    let ep = sys::epoll_awaited()?;
    let to = |fd| sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN as u32, 8);
    let (a, b) = dialled(|fd| {
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLOUT as u32, 7)?;
        same_errno(sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLOUT as u32, 9), libc::EEXIST)?;
        if early {
            to(fd)?;
        }
        Ok(())
    })?;
    if !early {
        warm(a, b, 40)?;
        to(a)?;
    }
    warm(a, b, 60)?;
    same!(sys::epoll_wait(ep, 4, 0)?, vec![], "nothing to read");
    told(ep, a, b, (EPOLLIN as u32, 8))?;
    close(&[a, b, ep])?;
    cx.warm(4, 0)
}

fn same_errno(got: sys::R<()>, want: i32) -> sys::R<()> {
    match got {
        Err(e) if e == want => Ok(()),
        Err(e) => Err(e),
        Ok(()) => Err(libc::EPROTO),
    }
}

fn del(cx: &mut Cx) -> Res {
    let ep = sys::epoll_awaited()?;
    let (a, b) = dialled(|fd| {
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN as u32, 7)?;
        sys::epoll_ctl(ep, EPOLL_CTL_DEL, fd, 0, 0)?;
        same_errno(sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN as u32, 7), libc::ENOENT)
    })?;
    sys::poll1(a, POLLOUT, 1000)?;
    warm(a, b, 60)?;
    sys::write_all(b, &[1])?;
    same!(sys::epoll_wait(ep, 4, 20)?, vec![], "events of what is not in the set");
    same!(sys::epoll_ctl(ep, EPOLL_CTL_DEL, a, 0, 0), Err(libc::ENOENT), "to take it out again");
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, a, EPOLLIN as u32, 6)?;
    same!(sys::epoll_wait(ep, 4, 2000)?, vec![(EPOLLIN as u32, 6)], "events");
    close(&[a, b, ep])?;
    cx.warm(4, 0)
}

/// Two sets have it, one of which is told of it again.
fn two_sets(cx: &mut Cx) -> Res {
    for how in [0, EPOLLONESHOT] {
        let (one, two) = (sys::epoll_awaited()?, sys::epoll_awaited()?);
        let (a, b) = dialled(|fd| {
            sys::epoll_ctl(one, EPOLL_CTL_ADD, fd, (EPOLLIN | how) as u32, 1)?;
            sys::epoll_ctl(two, EPOLL_CTL_ADD, fd, (EPOLLIN | how) as u32, 2)
        })?;
        sys::poll1(a, POLLOUT, 1000)?;
        // Both fire when it is hung up, before it is dialled, or now.
        warm(a, b, 20)?;
        sys::epoll_ctl(one, EPOLL_CTL_MOD, a, (EPOLLIN | how) as u32, 1)?;
        sys::poll1(a, POLLOUT, 1000)?;
        warm(a, b, 60)?;
        if how != 0 {
            for (ep, data) in [(one, 1), (two, 2)] {
                sys::epoll_wait(ep, 4, 0)?;
                sys::epoll_ctl(ep, EPOLL_CTL_MOD, a, (EPOLLIN | how) as u32, data)?;
            }
            warm(a, b, 60)?;
            for (ep, data) in [(one, 1), (two, 2)] {
                sys::epoll_wait(ep, 4, 0)?;
                sys::epoll_ctl(ep, EPOLL_CTL_MOD, a, (EPOLLIN | how) as u32, data)?;
            }
        }
        sys::write_all(b, &[1])?;
        for (ep, data) in [(one, 1), (two, 2)] {
            same!(sys::epoll_wait(ep, 4, 2000)?, vec![(EPOLLIN as u32, data)], "events of set {data}");
        }
        close(&[a, b, one, two])?;
    }
    cx.warm(4, 0)
}

/// A one-shot that waits all the time, or has fired before it was dialled.
fn oneshot(cx: &mut Cx) -> Res {
    for fires in [false, true] {
        let ep = sys::epoll_awaited()?;
        let (a, b) = dialled(|fd| {
            sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, (EPOLLIN | EPOLLONESHOT) as u32, 3)?;
            if fires {
                // A socket that is not dialled is hung up.
                sys::epoll_wait(ep, 4, 0)?;
            }
            Ok(())
        })?;
        for round in 0..60u8 {
            sys::poll1(a, POLLOUT, 1000)?;
            sys::write_all(a, &[round; 16])?;
            sys::read_exact(b, &mut [0; 16])?;
            if round % 8 == 7 {
                util::pause_ms(3);
            }
        }
        sys::write_all(b, &[1])?;
        let want = if fires { vec![] } else { vec![(EPOLLIN as u32, 3)] };
        same!(sys::epoll_wait(ep, 4, if fires { 20 } else { 2000 })?, want, "what it says");
        same!(sys::epoll_wait(ep, 4, 0)?, vec![], "what it says twice");
        close(&[a, b, ep])?;
    }
    cx.warm(4, 0)
}

/// The set is closed before the socket is dialled, and another is made.
fn closed_set(cx: &mut Cx) -> Res {
    let mut other = -1;
    let (a, b) = dialled(|fd| {
        let ep = sys::epoll_awaited()?;
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN as u32, 7)?;
        sys::close(ep)?;
        other = sys::epoll_awaited()?;
        Ok(())
    })?;
    sys::poll1(a, POLLOUT, 1000)?;
    warm(a, b, 60)?;
    sys::write_all(b, &[1])?;
    same!(sys::epoll_wait(other, 4, 20)?, vec![], "events of another set");
    close(&[a, b, other])?;
    cx.warm(4, 0)
}

/// The number is closed before it is dialled, and another socket gets it.
fn closed_number(cx: &mut Cx) -> Res {
    let ep = sys::epoll_awaited()?;
    let gone = sys::tcp_socket()?;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, gone, EPOLLIN as u32, 7)?;
    sys::close(gone)?;
    // The client's is the first that is made.
    let (l, port) = sys::listen(0, 4)?;
    sys::dup2(l, 700)?;
    sys::close(l)?;
    let a = sys::connect(port)?;
    let b = sys::accept(700, 0)?;
    same!(a, gone, "the number");
    sys::poll1(a, POLLOUT, 1000)?;
    warm(a, b, 60)?;
    sys::write_all(b, &[1])?;
    same!(sys::epoll_wait(ep, 4, 20)?, vec![], "events of a socket that is gone");
    close(&[a, b, ep, 700])?;
    cx.warm(4, 0)
}

/// The set gets another number than the one that is dialled; that one is closed, before or after.
fn of_a_duplicate(cx: &mut Cx) -> Res {
    for early in [false, true] {
        let ep = sys::epoll_awaited()?;
        let mut other = -1;
        let (a, b) = dialled(|fd| {
            other = sys::dup(fd)?;
            sys::epoll_ctl(ep, EPOLL_CTL_ADD, other, EPOLLIN as u32, 3)?;
            if early {
                sys::close(other)?;
            }
            Ok(())
        })?;
        for round in 0..6 {
            sys::poll1(a, POLLOUT, 1000)?;
            warm(a, b, 16)?;
            if round == 3 && !early {
                sys::close(other)?;
            }
            told(ep, a, b, (EPOLLIN as u32, 3))?;
        }
        close(&[a, b, ep])?;
    }
    cx.warm(4, 0)
}

/// What goes in and out by either number is one stream.
fn duplicate(cx: &mut Cx) -> Res {
    let mut other = -1;
    let (a, b) = dialled(|fd| sys::dup(fd).map(|d| other = d))?;
    for round in 0..20 {
        warm(a, b, 8)?;
        warm(other, b, 4)?;
        if round == 10 {
            sys::close(a)?;
            sys::dup2(other, a)?;
        }
    }
    sys::close(a)?;
    warm(other, b, 20)?;
    sys::close(other)?;
    same!(sys::read(b, &mut [0]), Ok(0), "the end");
    sys::close(b)?;
    cx.warm(4, 0)
}

/// What a process does that has the socket as well, when it is told to.
fn other_process(fd: RawFd, orders: RawFd) -> ! {
    let mut b = [0; 16];
    loop {
        let good = match sys::read(orders, &mut b[..1]) {
            Ok(1) if b[0] == b'r' => sys::read_exact(fd, &mut b).is_ok(),
            Ok(1) => sys::write_all(fd, &[7; 16]).is_ok(),
            _ => sys::exit(0),
        };
        if !good || sys::write_all(orders, &b[..1]).is_err() {
            sys::exit(1);
        }
    }
}

/// `a`, which another process has as well, is used by both.
fn shared(a: RawFd, b: RawFd, orders: RawFd, pid: i32) -> Res {
    let mut got = [0; 16];
    for _ in 0..4 {
        warm(a, b, 40)?;
        sys::write_all_fd(orders, b"w")?;
        sys::read_exact(b, &mut got)?;
        same!(got, [7; 16], "what the other process writes");
        sys::read_exact(orders, &mut got[..1])?;
        sys::write_all(b, &[9; 16])?;
        sys::write_all_fd(orders, b"r")?;
        sys::read_exact(orders, &mut got[..1])?;
        same!(got[0], 9, "what the other process has read");
    }
    sys::close(orders)?;
    same!(sys::waitpid(pid)?, 0, "its end");
    warm(a, b, 20)?;
    close(&[a, b])
}

/// A child that was forked before the socket was dialled uses it, too.
fn forked(cx: &mut Cx) -> Res {
    let (orders, its) = sys::socketpair()?;
    let mut pid = -1;
    let (a, b) = dialled(|fd| {
        pid = sys::fork()?;
        if pid == 0 {
            sys::end_with_parent();
            sys::close(orders)?;
            other_process(fd, its);
        }
        sys::close(its)
    })?;
    shared(a, b, orders, pid)?;
    cx.warm(4, 0)
}

/// A process that was passed the socket before it was dialled uses it, too; or it alone has dialled it.
fn passed(cx: &mut Cx) -> Res {
    let (orders, its) = sys::socketpair()?;
    let pid = sys::fork()?;
    if pid == 0 {
        sys::end_with_parent();
        let _ = sys::close(orders);
        let Ok(fd) = more::recv_fd(its) else { sys::exit(2) };
        other_process(fd, its);
    }
    sys::close(its)?;
    let (a, b) = dialled(|fd| more::send_fd(orders, fd))?;
    shared(a, b, orders, pid)?;
    let (a, b) = pair()?;
    warm(a, b, 4)?;
    close(&[a, b])?;
    cx.warm(4, 0)
}

/// A thread waits for a socket that another thread dials, for a second or so: the queue of those to be accepted is full.
fn waits_while_it_dials(cx: &mut Cx, wait: fn(RawFd) -> sys::R<bool>) -> Res {
    let (l, port) = sys::listen(0, 0)?;
    let mut queue = Vec::new();
    for _ in 0..3 {
        let fd = sys::tcp_socket()?;
        sys::nonblock(fd, true)?;
        let _ = sys::connect_to(fd, port);
        queue.push(fd);
    }
    util::pause_ms(50);
    let a = sys::tcp_socket()?;
    let dials = std::thread::spawn(move || sys::connect_to(a, port));
    util::pause_ms(300);
    ensure!(!dials.is_finished(), "the queue is not full");
    let waits = std::thread::spawn(move || wait(a));
    util::pause_ms(100);
    let mine = sys::sockname(a, false)?;
    let mut b = -1;
    while b < 0 {
        let fd = sys::accept(l, 0)?;
        if sys::sockname(fd, true)? == mine {
            b = fd;
        } else {
            sys::close(fd)?;
        }
    }
    same!(dials.join().map_err(|_| Why("the thread".into()))?, Ok(()), "connect");
    for round in 0..100u8 {
        sys::write_all(a, &[round; 16])?;
        sys::read_exact(b, &mut [0; 16])?;
        if round % 8 == 7 {
            util::pause_ms(3);
        }
    }
    util::pause_ms(50);
    ensure!(!waits.is_finished(), "the thread sees something where there is nothing");
    sys::write_all(b, &[1])?;
    same!(waits.join().map_err(|_| Why("the thread".into()))?, Ok(true), "what the thread sees");
    close(&queue)?;
    close(&[a, b, l])?;
    cx.warm(4, 0)
}
