//! `TCP_INQ`: each `recvmsg` says how many bytes it has left unread. gRPC, for one, reads until that says none, and then waits
//! for an edge.

use super::cx::{Cx, Op, Res};
use super::Check;
use crate::{ensure, same, sys};
use libc::{c_int, MSG_CTRUNC, MSG_DONTWAIT, MSG_PEEK};
use std::os::fd::RawFd;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("counted-left", left),
    ("counted-left-since-before", since_before),
    ("counted-with-little-room", little_room),
    ("counted-at-the-end", at_the_end),
    ("counted-between-edges", between_edges),
    ("counted-in-a-child", in_a_child),
];

fn set(fd: RawFd, on: bool) -> sys::R<()> {
    sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INQ, c_int::from(on))
}

/// Receives at most `n` bytes: these, and what else was told.
fn receive(fd: RawFd, n: usize, flags: c_int, room: usize) -> sys::R<(Vec<u8>, sys::Counted)> {
    let mut b = vec![0; n];
    let c = sys::recvmsg_counted(fd, &mut b, 1, flags, room)?;
    b.truncate(c.n);
    Ok((b, c))
}

/// Receives at most `n` bytes, and checks them and the number.
#[track_caller]
fn take(cx: &mut Cx, n: usize, left: Option<c_int>) -> Res {
    let at = std::panic::Location::caller().line();
    let (b, c) = receive(cx.fd, n, 0, 64)?;
    same!((c.left, c.flags), (left, 0), "what a receive of {n} bytes has left (line {at})");
    cx.take(&b)
}

/// The connection is still where it was.
pub(super) fn stays(cx: &mut Cx) -> Res {
    let before = sys::tcp_bytes(cx.fd)?;
    cx.warm(6, 0)?;
    ensure!(!cx.is_to_leave() || sys::tcp_bytes(cx.fd)? == before, "it went back to TCP");
    Ok(())
}

fn left(cx: &mut Cx) -> Res {
    set(cx.fd, true)?;
    for round in 0..3 {
        cx.tell(Op::Send, 100, 0, 0)?;
        cx.arrive(100)?;
        let (_, c) = receive(cx.fd, 30, MSG_PEEK, 64)?;
        same!((c.n, c.left, c.told), (30, Some(100), 24), "a look, round {round}");
        take(cx, 10, Some(90))?;
        take(cx, 0, Some(90))?;
        take(cx, 40, Some(50))?;
        take(cx, 100, Some(0))?;
        same!(receive(cx.fd, 10, MSG_DONTWAIT, 64), Err(libc::EAGAIN), "a receive of nothing");
        stays(cx)?;
    }
    set(cx.fd, false)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    take(cx, 10, None)?;
    stays(cx)
}

fn since_before(cx: &mut Cx) -> Res {
    cx.renew()?;
    set(cx.fd, true)?;
    cx.leave_tcp()?;
    cx.tell(Op::Send, 3000, 0, 0)?;
    cx.arrive(3000)?;
    take(cx, 1000, Some(2000))?;
    take(cx, 3000, Some(0))
}

fn little_room(cx: &mut Cx) -> Res {
    set(cx.fd, true)?;
    for (room, said, cut) in
        [(0, 0, true), (15, 0, true), (16, 16, true), (19, 19, true), (20, 20, false), (24, 24, false), (30, 24, false)]
    {
        cx.tell(Op::Send, 10, 0, 0)?;
        cx.arrive(10)?;
        let (b, c) = receive(cx.fd, 7, 0, room)?;
        same!((c.told, c.flags & MSG_CTRUNC != 0), (said, cut), "control data in {room} bytes");
        same!(c.left, (room >= 20).then_some(3), "the number in {room} bytes");
        cx.take(&b)?;
        cx.recv(3)?;
    }
    stays(cx)
}

/// The end counts as one more, for as long as it is asked.
fn at_the_end(cx: &mut Cx) -> Res {
    set(cx.fd, true)?;
    cx.tell(Op::Send, 50, 0, 0)?;
    cx.tell(Op::Shutdown, libc::SHUT_WR as u64, 0, 0)?;
    ensure!(sys::poll1(cx.fd, libc::POLLRDHUP, 2000)? & libc::POLLRDHUP != 0, "the end did not come");
    cx.arrive(50)?;
    take(cx, 20, Some(31))?;
    take(cx, 30, Some(1))?;
    take(cx, 30, Some(1))?;
    take(cx, 30, Some(1))?;
    cx.send(100)?;
    same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "bytes that arrived");
    Ok(())
}

/// Who has been told that nothing is left is told of what comes after that, without having asked in vain.
fn between_edges(cx: &mut Cx) -> Res {
    const PIECES: u64 = 4000;
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, cx.fd, (libc::EPOLLIN | libc::EPOLLET) as u32, 7)?;
    set(cx.fd, true)?;
    sys::nonblock(cx.fd, true)?;
    for (size, pause) in [(37, 20), (5000, 0), (1, 5)] {
        cx.post(Op::SendBits, PIECES, size, pause)?;
        let (mut n, mut waits) = (0, 0u32);
        while n < (PIECES * size) as usize {
            let told = sys::epoll_wait(ep, 4, 3000)?;
            ensure!(told.len() == 1, "no edge behind {n} of {} bytes, after {waits}", PIECES * size);
            waits += 1;
            loop {
                match receive(cx.fd, 3000, 0, 24) {
                    Ok((b, sys::Counted { left: Some(left), .. })) => {
                        ensure!(!b.is_empty(), "an early end");
                        n += b.len();
                        cx.take(&b)?;
                        if left == 0 {
                            break;
                        }
                    }
                    Ok(r) => return Err(format!("a receive without its number: {:?}", r.1).into()),
                    // An edge may be of bytes that the receive before it has taken.
                    Err(libc::EAGAIN) => break,
                    Err(e) => return Err(e.into()),
                }
            }
        }
        cx.wait()?;
    }
    sys::nonblock(cx.fd, false)?;
    sys::close(ep)?;
    stays(cx)
}

fn in_a_child(cx: &mut Cx) -> Res {
    set(cx.fd, true)?;
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    let pid = sys::fork()?;
    if pid == 0 {
        let mut takes = || -> Res {
            take(cx, 10, Some(90))?;
            set(cx.fd, false)?;
            take(cx, 10, None)?;
            set(cx.fd, true)?;
            take(cx, 20, Some(60))
        };
        let r = takes();
        if let Err(why) = &r {
            eprintln!("in the child: {}", why.0);
        }
        sys::exit(r.is_err() as i32);
    }
    same!(sys::waitpid(pid)?, 0, "how the child ended");
    cx.rx += 40;
    take(cx, 10, Some(50))?;
    take(cx, 50, Some(0))?;
    cx.warm(6, 0)
}
