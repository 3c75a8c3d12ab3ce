//! What a child may ask of a connection that its parent has moved since the fork.

use super::cx::{Cx, Op, Res, Why};
use super::procs::{child, reap};
use super::waiting::events;
use super::Check;
use crate::{ensure, same, sys};
use libc::{EPOLLIN, MSG_NOSIGNAL, POLLIN};
use std::os::fd::RawFd;

/// The checks of this file.
pub const CHECKS: &[Check] = &[("fork-child-asks-of-what-has-moved", fork_child_asks)];

/// What a child may ask of a socket, and what it gets where 300 bytes wait.
type Asks = (&'static str, fn(RawFd) -> Res);
const ASKS: &[Asks] = &[
    ("SO_RCVLOWAT", |fd| {
        sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 500i32)?;
        same!(sys::poll1(fd, POLLIN, 50)?, 0, "POLLIN below SO_RCVLOWAT");
        Ok(sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1i32)?)
    }),
    ("SO_SNDBUF", |fd| Ok(sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 20)?)),
    ("SO_RCVBUF", |fd| Ok(sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, 1 << 20)?)),
    ("SO_LINGER", |fd| Ok(sys::set_linger(fd, false, 0)?)),
    ("SO_RCVTIMEO", |fd| Ok(sys::set_timeout(fd, libc::SO_RCVTIMEO, 0)?)),
    ("TCP_NODELAY", |fd| Ok(sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?)),
    ("TCP_CORK", |fd| {
        sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CORK, 1)?;
        Ok(sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CORK, 0)?)
    }),
    ("TCP_INFO", |fd| {
        ensure!(sys::tcp_is_connected(fd)?, "not connected");
        Ok(())
    }),
    ("SO_ERROR", |fd| {
        same!(sys::getsockopt_int(fd, libc::SOL_SOCKET, libc::SO_ERROR), Ok(0), "SO_ERROR");
        Ok(())
    }),
    ("FIONREAD", |fd| {
        same!(sys::fionread(fd), Ok(300), "FIONREAD");
        Ok(())
    }),
    ("SIOCOUTQ", |fd| {
        sys::siocoutq(fd)?;
        Ok(())
    }),
    ("a name", |fd| {
        sys::sockname(fd, true)?;
        Ok(())
    }),
    ("O_NONBLOCK", |fd| {
        sys::nonblock(fd, true)?;
        Ok(sys::nonblock(fd, false)?)
    }),
    ("a receive of nothing", |fd| {
        same!(sys::recv(fd, &mut [], libc::MSG_DONTWAIT), Ok(0), "recv of nothing");
        Ok(())
    }),
    ("a send of nothing", |fd| {
        same!(sys::send(fd, &[], MSG_NOSIGNAL), Ok(0), "send of nothing");
        Ok(())
    }),
    ("MSG_PEEK", |fd| {
        same!(sys::recv(fd, &mut [0; 400], libc::MSG_PEEK), Ok(300), "a peek");
        Ok(())
    }),
    ("poll", |fd| {
        same!(sys::poll1(fd, POLLIN | libc::POLLOUT, 0), Ok(POLLIN | libc::POLLOUT), "poll");
        Ok(())
    }),
    ("select", |fd| {
        same!(sys::select(&[fd], &[fd], 0), Ok((vec![fd], vec![fd])), "select");
        Ok(())
    }),
    ("epoll", |fd| {
        let ep = sys::epoll_awaited()?;
        sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, EPOLLIN as u32, 7)?;
        same!(events(ep, 1000)?, EPOLLIN, "epoll_wait");
        Ok(())
    }),
    ("dup", |fd| Ok(sys::close(sys::dup(fd)?)?)),
    ("close", |fd| Ok(sys::close(fd)?)),
];

/// What a child asks of a connection that has moved since the fork: the ring is not in its memory.
fn fork_child_asks(cx: &mut Cx) -> Res {
    for &(what, ask) in ASKS {
        cx.renew()?;
        let (rd, wr) = sys::pipe()?;
        let fd = cx.fd;
        let pid = child(move || {
            sys::read(rd, &mut [0])?;
            ask(fd)
        })?;
        cx.leave_tcp()?;
        cx.tell(Op::Send, 300, 0, 0)?;
        cx.arrive(300)?;
        sys::write(wr, b"x")?;
        reap(pid).map_err(|Why(w)| Why(format!("{what}: {w}")))?;
        [rd, wr].into_iter().try_for_each(sys::close)?;
        cx.recv(300)?;
        cx.warm(20, 0)?;
    }
    Ok(())
}
