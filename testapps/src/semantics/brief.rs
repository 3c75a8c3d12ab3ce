//! Connections that live for a few calls, of which the library keeps as little as it can until somebody asks for more.

use super::cx::{Cx, Op, Res};
use super::procs::{child, reap};
use super::Check;
use crate::{ensure, same, sys, util};
use libc::{
    EAGAIN, EINPROGRESS, EPIPE, EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD,
};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("short-connections", short),
    ("short-connections-in-sets", short_in_sets),
    ("short-connections-half-closed", short_half_closed),
    ("short-connections-of-another-process-end", short_end),
    ("ends-at-the-change", at_the_change),
];

const IN: u32 = EPOLLIN as u32;
const OUT: u32 = EPOLLOUT as u32;

/// A child that ends at once.
fn fork() -> Res {
    // SAFETY: the child does nothing but end.
    match unsafe { libc::fork() } {
        // SAFETY: no destructors of the parent's are to run.
        0 => unsafe { libc::_exit(0) },
        child => same!(sys::waitpid(child)?, 0, "the child"),
    }
    Ok(())
}

/// Many connections that live for a few calls, and some to which more happens, one after another; then one that lasts.
fn short(cx: &mut Cx) -> Res {
    for i in 0..40u32 {
        cx.renew()?;
        cx.post(Op::Echo, 1, 16, 0)?;
        cx.send(16)?;
        match i % 8 {
            3 => {
                let other = sys::dup(cx.fd)?;
                sys::close(cx.fd)?;
                cx.fd = other;
            }
            5 => {
                sys::nonblock(cx.fd, true)?;
                sys::nonblock(cx.fd, false)?;
            }
            7 => fork()?,
            _ => {}
        }
        cx.recv(16)?;
        cx.wait()?;
    }
    cx.leave_tcp()?;
    cx.warm(50, 2)
}

/// A child that serves one connection after the other, each until its end, of a parent that closes each in the middle of a
/// move: were an end not told, the next would not be served. (Of a thousand some twenty close where a mark is under way, in a
/// record that another has just left.)
fn short_end(_cx: &mut Cx) -> Res {
    let (most, times) = (Duration::from_secs(8), 1500);
    let l = TcpListener::bind("127.0.0.1:0")?;
    let at = l.local_addr()?;
    let server = child(|| {
        let mut b = [0; 600];
        loop {
            let (mut s, _) = l.accept()?;
            let mut some = false;
            while let n @ 1.. = s.read(&mut b)? {
                s.write_all(&b[..n])?;
                some = true;
            }
            if !some {
                return Ok(());
            }
        }
    })?;
    drop(l);
    // It ends with a connection on which nothing comes.
    let begun = Instant::now();
    for i in 0..times {
        if begun.elapsed() > most {
            break;
        }
        let mut s = TcpStream::connect(at)?;
        s.set_read_timeout(Some(Duration::from_secs(5)))?;
        for k in 0..1 + i % 5 {
            let sent = vec![(i + k) as u8; 100 + (i * 37 + k * 11) % 400];
            let mut b = vec![0; sent.len()];
            s.write_all(&sent)?;
            s.read_exact(&mut b)?;
            ensure!(b == sent, "connection {i}, round {k}: other bytes");
        }
    }
    drop(TcpStream::connect(at)?);
    reap(server)
}

/// The one event that the set is to tell of.
fn told(ep: RawFd, events: u32, data: u64, what: &str) -> Res {
    same!(sys::epoll_wait(ep, 8, 5000)?, vec![(events, data)], "{what}");
    Ok(())
}

/// A message there and back, for which the set is waited.
fn trip(cx: &mut Cx, ep: RawFd, data: u64) -> Res {
    cx.send(16)?;
    let mut left = 16;
    while left > 0 {
        told(ep, IN, data, "the answer")?;
        let b = cx.grab(left)?;
        left -= b.len();
        cx.take(&b)?;
    }
    Ok(())
}

/// The same for what does not wait, and is in an epoll set, of which each makes another use.
fn short_in_sets(cx: &mut Cx) -> Res {
    let mut ep = sys::epoll_awaited()?;
    for i in 0..66u64 {
        cx.renew()?;
        sys::nonblock(cx.fd, true)?;
        let (fd, mut data) = (cx.fd, 1000 + i);
        cx.post(Op::Echo, 1, 16, 0)?;
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, OUT | if i % 2 == 0 { EPOLLET as u32 } else { 0 }, data)?;
        told(ep, OUT, data, "room")?;
        if i % 3 == 0 {
            data += 1 << 40;
        }
        sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, IN, data)?;
        match i % 11 {
            0 => fork()?,
            1 => {
                sys::close(ep)?;
                ep = sys::epoll_awaited()?;
                same!(sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, IN, data), Err(libc::ENOENT), "a change in another set");
                sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, IN, data)?;
            }
            2 => {
                // What was added under a number stays in the set when that is closed, as long as there is another.
                cx.fd = sys::dup(fd)?;
                sys::close(fd)?;
            }
            3 => {
                let second = sys::epoll_awaited()?;
                sys::epoll_ctl(second, EPOLL_CTL_ADD, fd, OUT, 7)?;
                told(second, OUT, 7, "the second set")?;
                sys::close(second)?;
            }
            4 => same!(sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, IN, 9), Err(libc::EEXIST), "it is there"),
            5 => {
                sys::epoll_ctl(ep, EPOLL_CTL_DEL, fd, 0, 0)?;
                same!(sys::epoll_ctl(ep, EPOLL_CTL_DEL, fd, 0, 0), Err(libc::ENOENT), "taken out twice");
                sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, IN, data)?;
            }
            6 => {
                sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, OUT | EPOLLONESHOT as u32, data)?;
                told(ep, OUT, data, "a one-shot")?;
                same!(sys::epoll_wait(ep, 8, 0)?, vec![], "a one-shot that has fired");
                sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, IN, data)?;
            }
            7 => std::thread::scope(|s| s.spawn(|| sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, IN, data)).join())
                .expect("it does not panic")?,
            8 => {
                sys::wait1(fd, libc::POLLOUT, 5000)?;
            }
            9 => same!(sys::epoll_ctl(ep, EPOLL_CTL_ADD, ep, IN, 0), Err(libc::EINVAL), "a set in itself"),
            _ => {}
        }
        trip(cx, ep, data)?;
        cx.wait()?;
        if i % 5 == 4 {
            sys::epoll_ctl(ep, EPOLL_CTL_DEL, fd, 0, 0).or_else(|e| if cx.fd == fd { Err(e) } else { Ok(()) })?;
        }
    }
    cx.renew()?;
    same!(sys::epoll_wait(ep, 8, 0)?, vec![], "of those that are closed");
    // One that goes on in the set, by TCP and on a ring.
    sys::nonblock(cx.fd, true)?;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, IN, 5)?;
    cx.post(Op::Echo, 300, 16, 0)?;
    for _ in 0..300 {
        trip(cx, ep, 5)?;
    }
    cx.wait()?;
    if cx.is_to_leave() {
        sys::nonblock(cx.fd, false)?;
        cx.leave_tcp()?;
        sys::nonblock(cx.fd, true)?;
        cx.post(Op::Echo, 20, 16, 0)?;
        for _ in 0..20 {
            trip(cx, ep, 5)?;
        }
        cx.wait()?;
    }
    sys::nonblock(cx.fd, false)?;
    sys::close(ep)?;
    Ok(())
}

/// A connection that is dialled without waiting, as servers' clients do: `connect` again tells how it went.
fn dial(cx: &mut Cx, ep: RawFd) -> Res {
    sys::close(cx.fd)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    cx.tell(Op::Restart, 0, 0, 0)?;
    let (port, host) = (cx.expect()?, cx.hosts.puppet);
    cx.fd = sys::tcp_socket_for(host)?;
    sys::nonblock(cx.fd, true)?;
    same!(sys::connect_to_host(cx.fd, host, port), Err(EINPROGRESS), "connect");
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, OUT, 1)?;
    told(ep, OUT, 1, "it is connected")?;
    same!(sys::getsockopt_int(cx.fd, libc::SOL_SOCKET, libc::SO_ERROR), Ok(0), "how it went");
    same!(sys::connect_to_host(cx.fd, host, port), Ok(()), "connect again");
    sys::epoll_ctl(ep, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
    cx.wait()?;
    (cx.tx, cx.rx) = (0, 0);
    Ok(())
}

/// Connections that are asked and told what servers ask and tell, and then half closed, with and without threads.
fn short_half_closed(cx: &mut Cx) -> Res {
    let ep = sys::epoll_awaited()?;
    for i in 0..48 {
        if i == 24 {
            std::thread::spawn(|| ()).join().expect("it does not panic");
        }
        if i % 2 == 0 {
            cx.renew()?;
            if i % 4 == 0 {
                sys::nonblock(cx.fd, true)?;
            } else {
                sys::nonblock_ioctl(cx.fd, true)?;
            }
        } else {
            dial(cx, ep)?;
        }
        same!(sys::recv(cx.fd, &mut [0; 4], 0), Err(EAGAIN), "nothing, and no wait for it");
        same!(sys::fcntl(cx.fd, libc::F_GETFL, 0)? & libc::O_NONBLOCK, libc::O_NONBLOCK, "the flag");
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, IN, 2)?;
        let b = cx.out(40);
        let sent = match i % 3 {
            0 => sys::writev(cx.fd, &b, 3),
            1 => sys::sendmsg(cx.fd, &b, 2, libc::MSG_NOSIGNAL),
            _ => sys::write(cx.fd, &b),
        };
        same!(sent, Ok(40), "a send in parts");
        cx.tell(Op::Recv, 40, 0, 0)?;
        if i % 6 == 5 {
            // Blocking again, in the middle.
            sys::epoll_ctl(ep, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
            sys::nonblock_ioctl(cx.fd, false)?;
            let b = cx.out(20);
            same!(sys::writev(cx.fd, &b, 2), Ok(20), "a blocking send");
            cx.later(20, 8)?;
            cx.recv(8)?;
            cx.wait()?;
            cx.tell(Op::Recv, 20, 0, 0)?;
            sys::nonblock(cx.fd, true)?;
            sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, IN, 2)?;
        }
        sys::shutdown(cx.fd, libc::SHUT_WR)?;
        same!(sys::sendmsg(cx.fd, b"more", 2, libc::MSG_NOSIGNAL), Err(EPIPE), "a send after the end");
        same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "bytes after the end");
        cx.tell(Op::Send, 24, 0, 0)?;
        told(ep, IN, 2, "the answer")?;
        let b = cx.grab(24)?;
        cx.take(&b)?;
        same!(b.len(), 24, "the answer");
        cx.tell(Op::Close, 0, 0, 0)?;
        told(ep, IN | libc::EPOLLHUP as u32, 2, "the end")?;
        same!(sys::recv(cx.fd, &mut [0; 4], 0), Ok(0), "the end");
        sys::epoll_ctl(ep, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
    }
    sys::close(ep)?;
    cx.renew()?;
    cx.leave_tcp()?;
    cx.warm(50, 2)
}

/// The end of either direction, and a close, at any moment of the change to a ring; the peer waits for it, and says nothing.
fn at_the_change(cx: &mut Cx) -> Res {
    let mut moved = 0;
    // On a busy host the change may take longer than the first ones live.
    for i in 0..180u32 {
        if i >= 60 && (moved >= 4 || !cx.is_to_leave()) {
            break;
        }
        cx.renew()?;
        cx.warm(10 + u64::from(i % 7), 2)?;
        util::pause_ms(u64::from(i));
        cx.post(Op::Drain, 0, 0, 0)?;
        match i % 3 {
            0 => sys::close(std::mem::replace(&mut cx.fd, sys::dup(2)?))?,
            _ => sys::shutdown(cx.fd, libc::SHUT_WR)?,
        }
        same!(cx.wait()?, 0, "bytes after the end");
        if i % 3 != 0 {
            let before = sys::tcp_bytes(cx.fd)?;
            cx.later(u64::from(i % 2), 24)?;
            cx.recv(24)?;
            moved += u32::from(sys::tcp_bytes(cx.fd)? == before);
            cx.wait()?;
            cx.post(Op::Close, 0, 0, 0)?;
            same!(sys::recv(cx.fd, &mut [0; 4], 0), Ok(0), "the end");
            cx.wait()?;
        }
    }
    ensure!(moved >= 4 || !cx.is_to_leave(), "only {moved} of 120 connections had left TCP by their ends");
    cx.renew()?;
    cx.leave_tcp()?;
    cx.warm(50, 2)
}
