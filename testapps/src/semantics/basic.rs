//! Flags, options, timeouts and the other small print of `recv` and `send`.

use super::cx::{between, Cx, Op, Res, Why};
use super::found::warm;
use super::Check;
use crate::{ensure, more, same, sys, util};
use libc::{EAGAIN, MSG_DONTWAIT, MSG_PEEK, MSG_WAITALL, O_NONBLOCK, POLLIN, SOL_SOCKET};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::time::Instant;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("fionread", fionread),
    ("siocoutq", siocoutq),
    ("siocoutq-unread", siocoutq_unread),
    ("peek", peek),
    ("peek-waitall", peek_waitall),
    ("trunc", trunc),
    ("waitall", waitall),
    ("waitall-eof", waitall_eof),
    ("waitall-dontwait", waitall_dontwait),
    ("dontwait-empty", dontwait_empty),
    ("dontwait-full", dontwait_full),
    ("nonblock-fcntl", |cx| nonblock(cx, false)),
    ("nonblock-ioctl", |cx| nonblock(cx, true)),
    ("rcvtimeo", rcvtimeo),
    ("rcvtimeo-partial", rcvtimeo_partial),
    ("rcvtimeo-of-the-listener", rcvtimeo_of_listener),
    ("sndtimeo", sndtimeo),
    ("sndtimeo-partial", sndtimeo_partial),
    ("timeout-of-less-than-nothing", timeout_below_zero),
    ("recvmsg-in-vain", recvmsg_in_vain),
    ("rcvlowat-poll", rcvlowat_poll),
    ("rcvlowat-recv", rcvlowat_recv),
    ("rcvlowat-of-a-small-sender", rcvlowat_small),
    ("zero-send", zero_send),
    ("zero-recv", zero_recv),
    ("names", names),
    ("options", options),
    ("recvfrom-address", recvfrom_address),
    ("odd-calls", odd_calls),
    ("preadv2-pwritev2", rw2),
    ("errqueue", errqueue),
    ("bad-calls", bad_calls),
    ("more-than-two-gigabytes", huge),
    ("bad-addresses", bad_addresses),
];

/// Milliseconds since then.
pub fn ms(t: Instant) -> u64 {
    t.elapsed().as_millis() as u64
}

fn fionread(cx: &mut Cx) -> Res {
    same!(sys::fionread(cx.fd)?, 0, "FIONREAD of nothing");
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    same!(sys::fionread(cx.fd)?, 100, "FIONREAD");
    cx.recv(40)?;
    same!(sys::fionread(cx.fd)?, 60, "FIONREAD after 40");
    cx.recv(60)?;
    same!(sys::fionread(cx.fd)?, 0, "FIONREAD at the end");
    Ok(())
}

fn siocoutq(cx: &mut Cx) -> Res {
    let n = cx.fill(4096)?;
    let q = sys::siocoutq(cx.fd)?;
    ensure!(q > 0 && q <= n, "SIOCOUTQ {q} of {n} bytes that nobody reads");
    cx.tell(Op::Recv, n as u64, 0, 0)?;
    until_all_is_acknowledged(cx)
}

fn until_all_is_acknowledged(cx: &Cx) -> Res {
    for _ in 0..1000 {
        if sys::siocoutq(cx.fd)? == 0 {
            return Ok(());
        }
        util::pause_ms(1);
    }
    ensure!(false, "SIOCOUTQ {} at the end", sys::siocoutq(cx.fd)?);
    Ok(())
}

/// The kernel acknowledges what has come, whether or not the program reads it: some wait for that before they go on.
fn siocoutq_unread(cx: &mut Cx) -> Res {
    for n in [1, 100, 3000, 20_000] {
        cx.send(n)?;
        until_all_is_acknowledged(cx)?;
    }
    cx.tell(Op::Recv, 23_101, 0, 0)?;
    Ok(())
}

fn peek(cx: &mut Cx) -> Res {
    let mut b = [0; 200];
    same!(sys::recv(cx.fd, &mut b, MSG_PEEK | MSG_DONTWAIT), Err(EAGAIN), "peek at nothing");
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    for n in [1, 50, 100, 200] {
        b.fill(0);
        let got = sys::recv(cx.fd, &mut b[..n], MSG_PEEK)?;
        same!(got, n.min(100), "peek of {n}");
        cx.look(0, &b[..got])?;
        same!(sys::fionread(cx.fd)?, 100, "FIONREAD after a peek");
    }
    cx.recv(30)?;
    same!(sys::recv(cx.fd, &mut b, MSG_PEEK)?, 70, "peek after 30");
    cx.look(0, &b[..70])?;
    let (n, flags) = sys::recvmsg(cx.fd, &mut b, 3, MSG_PEEK)?;
    same!((n, flags), (70, 0), "recvmsg with MSG_PEEK");
    cx.recv(70)?;
    cx.later(30, 10)?;
    same!(sys::recv(cx.fd, &mut b, MSG_PEEK)?, 10, "a peek that waits");
    cx.recv(10)
}

fn peek_waitall(cx: &mut Cx) -> Res {
    let mut b = [0; 60];
    cx.post(Op::SendBits, 3, 20, 30_000)?;
    same!(sys::recv(cx.fd, &mut b, MSG_PEEK | MSG_WAITALL)?, 60, "MSG_PEEK | MSG_WAITALL");
    cx.look(0, &b)?;
    cx.wait()?;
    cx.recv(60)
}

fn trunc(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    same!(sys::recv_discard(cx.fd, 30, 0)?, 30, "MSG_TRUNC of 30");
    cx.rx += 30;
    same!(sys::fionread(cx.fd)?, 70, "FIONREAD after it");
    cx.recv(20)?;
    same!(sys::recv_discard(cx.fd, 500, 0)?, 50, "MSG_TRUNC of more than there is");
    cx.rx += 50;
    same!(sys::recv_discard(cx.fd, 5, MSG_DONTWAIT), Err(EAGAIN), "MSG_TRUNC of nothing");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.recv(10)
}

fn waitall(cx: &mut Cx) -> Res {
    let mut b = vec![0; 300];
    cx.post(Op::SendBits, 3, 100, 30_000)?;
    same!(sys::recv(cx.fd, &mut b, MSG_WAITALL)?, 300, "MSG_WAITALL");
    cx.take(&b)?;
    cx.wait()?;
    let mut b = vec![0; 3_000_000];
    cx.post(Op::Send, 3_000_000, 0, 0)?;
    same!(sys::recv(cx.fd, &mut b, MSG_WAITALL)?, 3_000_000, "MSG_WAITALL of 3 MB");
    cx.take(&b)?;
    cx.wait()?;
    cx.post(Op::SendBits, 3, 100, 10_000)?;
    same!(sys::recvmsg(cx.fd, &mut b[..300], 4, MSG_WAITALL)?.0, 300, "recvmsg with MSG_WAITALL");
    cx.take(&b[..300])?;
    Ok(())
}

fn waitall_eof(cx: &mut Cx) -> Res {
    cx.post(Op::Send, 10, 0, 0)?;
    cx.post(Op::Sleep, 30_000, 0, 0)?;
    cx.post(Op::Shutdown, libc::SHUT_WR as u64, 0, 0)?;
    let mut b = [0; 50];
    same!(sys::recv(cx.fd, &mut b, MSG_WAITALL)?, 10, "MSG_WAITALL up to the end of the stream");
    cx.take(&b[..10])?;
    same!(sys::recv(cx.fd, &mut b, MSG_WAITALL)?, 0, "after the end");
    Ok(())
}

fn waitall_dontwait(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    let mut b = [0; 50];
    same!(sys::recv(cx.fd, &mut b, MSG_WAITALL | MSG_DONTWAIT)?, 10, "MSG_WAITALL | MSG_DONTWAIT");
    cx.take(&b[..10])
}

fn dontwait_empty(cx: &mut Cx) -> Res {
    let mut b = [0; 50];
    let t = Instant::now();
    for i in 0..100 {
        let r = match i % 4 {
            0 => sys::recv(cx.fd, &mut b, MSG_DONTWAIT),
            1 => sys::recvmsg(cx.fd, &mut b, 2, MSG_DONTWAIT).map(|x| x.0),
            2 => sys::recvfrom(cx.fd, &mut b, MSG_DONTWAIT),
            _ => sys::recvmmsg(cx.fd, &mut b, 2, MSG_DONTWAIT).map(|x| x.len()),
        };
        same!(r, Err(EAGAIN), "MSG_DONTWAIT with nothing there");
    }
    ensure!(ms(t) < 500, "100 such calls took {} ms", ms(t));
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    let b = cx.grab(50)?;
    cx.take(&b)
}

fn dontwait_full(cx: &mut Cx) -> Res {
    let n = cx.fill(1000)?;
    ensure!(n >= 4096, "only {n} bytes fit");
    same!(sys::poll1(cx.fd, libc::POLLOUT, 0)?, 0, "POLLOUT of a full socket");
    cx.tell(Op::Recv, n as u64, 0, 0)?;
    same!(sys::poll1(cx.fd, libc::POLLOUT, 2000)?, libc::POLLOUT, "POLLOUT when it is empty");
    cx.send(10)?;
    same!(cx.tell(Op::Recv, 10, 0, 0)?, 10, "bytes after it");
    Ok(())
}

fn nonblock(cx: &mut Cx, ioctl: bool) -> Res {
    let set = if ioctl { sys::nonblock_ioctl } else { sys::nonblock };
    let mut b = [0; 50];
    for round in 0..3 {
        set(cx.fd, true)?;
        let on = sys::fcntl(cx.fd, libc::F_GETFL, 0)? & O_NONBLOCK != 0;
        ensure!(on, "F_GETFL says blocking in round {round}");
        same!(sys::read(cx.fd, &mut b), Err(EAGAIN), "read with O_NONBLOCK");
        set(cx.fd, false)?;
        let on = sys::fcntl(cx.fd, libc::F_GETFL, 0)? & O_NONBLOCK != 0;
        ensure!(!on, "F_GETFL says non-blocking in round {round}");
        cx.later(30, 10)?;
        let t = Instant::now();
        cx.recv(10)?;
        ensure!(ms(t) >= 15, "a blocking read came back after {} ms", ms(t));
        cx.wait()?;
    }
    set(cx.fd, true)?;
    let mut filled = 0;
    for _ in 0..1_000_000 {
        let buf = crate::prng::bytes(super::cx::OUT, cx.tx, 4096);
        match sys::write(cx.fd, &buf) {
            Ok(n) => {
                filled += n as u64;
                cx.tx += n as u64;
            }
            Err(e) => {
                same!(e, EAGAIN, "write to a full socket");
                break;
            }
        }
    }
    same!(cx.tell(Op::Recv, filled, 0, 0)?, filled, "bytes that arrived");
    Ok(())
}

fn rcvtimeo(cx: &mut Cx) -> Res {
    let mut b = [0; 50];
    for want in [20, 120] {
        sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, want)?;
        let t = Instant::now();
        same!(sys::read(cx.fd, &mut b), Err(EAGAIN), "read with SO_RCVTIMEO");
        between("read", ms(t), want as u64 - 1, want as u64 + 60)?;
    }
    let t = Instant::now();
    same!(sys::recvmsg(cx.fd, &mut b, 2, MSG_WAITALL), Err(EAGAIN), "recvmsg");
    ensure!(ms(t) >= 118, "recvmsg waited {} ms", ms(t));
    let t = Instant::now();
    same!(sys::recv(cx.fd, &mut b, MSG_DONTWAIT), Err(EAGAIN), "MSG_DONTWAIT");
    between("MSG_DONTWAIT", ms(t), 0, 59)?;
    cx.later(40, 10)?;
    cx.recv(10)?;
    cx.wait()?;
    sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, 0)?;
    cx.later(300, 10)?;
    same!(sys::read(cx.fd, &mut b), Ok(10), "read without a timeout");
    cx.take(&b[..10])
}

/// The kernel takes a negative time limit for one that is over.
fn timeout_below_zero(cx: &mut Cx) -> Res {
    let mut b = [0; 50];
    let nothing = libc::timeval { tv_sec: -1, tv_usec: 0 };
    for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        sys::setsockopt(cx.fd, SOL_SOCKET, name, nothing)?;
    }
    same!(sys::read(cx.fd, &mut b), Err(EAGAIN), "read of nothing");
    same!(sys::recv(cx.fd, &mut b, MSG_WAITALL), Err(EAGAIN), "recv of nothing");
    // Another option is no other limit.
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_SNDBUF, 50_000i32)?;
    same!(sys::read(cx.fd, &mut b), Err(EAGAIN), "read of nothing after SO_SNDBUF");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    same!(sys::recv(cx.fd, &mut b, MSG_WAITALL)?, 10, "recv of more than there is");
    cx.take(&b[..10])?;
    let n = cx.fill(4096)?;
    let more = cx.out(4096);
    let sent = match sys::send(cx.fd, &more, 0) {
        Ok(k) => k,
        Err(EAGAIN) => 0,
        Err(e) => return Err(e.into()),
    };
    cx.tx -= (more.len() - sent) as u64;
    let all = (n + sent) as u64;
    same!(cx.tell(Op::Recv, all, 0, 0)?, all, "bytes that arrived");
    sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, 0)?;
    cx.later(100, 10)?;
    same!(sys::read(cx.fd, &mut b), Ok(10), "read without a limit");
    cx.take(&b[..10])
}

/// A `recvmsg` that fails leaves its header alone: a program may call it again with the same.
fn recvmsg_in_vain(cx: &mut Cx) -> Res {
    let (mut b, mut name, mut control) = ([0u8; 10], [0u8; 64], [0u8; 32]);
    let mut v = [libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: b.len() }];
    let mut h = sys::msghdr(&mut v);
    h.msg_control = control.as_mut_ptr().cast();
    h.msg_controllen = control.len() as _;
    h.msg_namelen = 64;
    h.msg_flags = -1;
    let told = |h: &libc::msghdr| (h.msg_namelen, h.msg_controllen, h.msg_flags);
    for named in [false, true] {
        if named {
            h.msg_name = name.as_mut_ptr().cast();
        }
        // SAFETY: what the header points at is writable, here and below.
        same!(unsafe { libc::recvmsg(cx.fd, &mut h, libc::MSG_DONTWAIT) }, -1, "recvmsg of nothing");
        same!(told(&h), (64, 32, -1), "the header after a call in vain");
        cx.tell(Op::Send, 10, 0, 0)?;
        cx.arrive(10)?;
        // SAFETY: as above.
        same!(unsafe { libc::recvmsg(cx.fd, &mut h, 0) }, 10, "recvmsg");
        same!(told(&h), (if named { 0 } else { 64 }, 0, 0), "the header, with a name: {named}");
        cx.take(&b)?;
        h.msg_controllen = control.len() as _;
        h.msg_flags = -1;
    }
    Ok(())
}

/// An accepted connection has its listener's time limit, also in a call that sleeps when it moves.
fn rcvtimeo_of_listener(cx: &mut Cx) -> Res {
    const LIMIT_MS: i64 = 400;
    for rounds in [1, 3, 8, 40] {
        let (l, port) = sys::listen(0, 4)?;
        sys::set_timeout(l, libc::SO_RCVTIMEO, LIMIT_MS)?;
        let a = sys::connect(port)?;
        let b = sys::accept(l, 0)?;
        warm(a, b, rounds)?;
        let began = Instant::now();
        same!(sys::read(b, &mut [0; 4]), Err(EAGAIN), "read after {rounds} rounds");
        let took = began.elapsed().as_millis() as i64;
        ensure!((LIMIT_MS - 20..LIMIT_MS + 3000).contains(&took), "it took {took} ms after {rounds} rounds");
        for fd in [a, b, l] {
            sys::close(fd)?;
        }
    }
    cx.warm(4, 0)
}

fn rcvtimeo_partial(cx: &mut Cx) -> Res {
    sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, 150)?;
    cx.post(Op::Send, 10, 0, 0)?;
    let mut b = [0; 50];
    let t = Instant::now();
    same!(sys::recv(cx.fd, &mut b, MSG_WAITALL)?, 10, "MSG_WAITALL with SO_RCVTIMEO");
    ensure!(ms(t) >= 140, "it waited {} ms instead of 150", ms(t));
    cx.take(&b[..10])
}

fn sndtimeo(cx: &mut Cx) -> Res {
    let mut n = cx.fill(4096)?;
    for want in [20, 120] {
        sys::set_timeout(cx.fd, libc::SO_SNDTIMEO, want)?;
        let t = Instant::now();
        let buf = crate::prng::bytes(super::cx::OUT, cx.tx, 1000);
        let r = sys::send(cx.fd, &buf, libc::MSG_NOSIGNAL);
        // A little room may have come in the meantime.
        if let Ok(k) = r {
            cx.tx += k as u64;
            n += k;
            n += cx.fill(1)?;
            continue;
        }
        same!(r, Err(EAGAIN), "send with SO_SNDTIMEO");
        between("send", ms(t), want as u64 - 1, want as u64 + 60)?;
    }
    same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes that arrived");
    Ok(())
}

fn sndtimeo_partial(cx: &mut Cx) -> Res {
    sys::set_timeout(cx.fd, libc::SO_SNDTIMEO, 150)?;
    let b = crate::prng::bytes(super::cx::OUT, cx.tx, 64 << 20);
    let t = Instant::now();
    let n = sys::send(cx.fd, &b, libc::MSG_NOSIGNAL)?;
    ensure!(n > 0 && n < b.len(), "{n} of 64 MiB were taken");
    ensure!(ms(t) >= 145, "a send that could not end came back after {} ms", ms(t));
    cx.tx += n as u64;
    same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes that arrived");
    sys::set_timeout(cx.fd, libc::SO_SNDTIMEO, 0)?;
    cx.send(10)?;
    same!(cx.tell(Op::Recv, 10, 0, 0)?, 10, "bytes after it");
    Ok(())
}

fn rcvlowat_poll(cx: &mut Cx) -> Res {
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_RCVLOWAT, 100i32)?;
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, libc::SO_RCVLOWAT)?, 100, "SO_RCVLOWAT");
    cx.tell(Op::Send, 60, 0, 0)?;
    cx.arrive(60)?;
    same!(sys::poll1(cx.fd, POLLIN, 50)?, 0, "POLLIN below SO_RCVLOWAT");
    same!(sys::select(&[cx.fd], &[], 0)?.0.len(), 0, "select below SO_RCVLOWAT");
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, cx.fd, libc::EPOLLIN as u32, 1)?;
    same!(sys::epoll_wait(ep, 4, 20)?.len(), 0, "epoll below SO_RCVLOWAT");
    cx.later(30, 60)?;
    same!(sys::poll1(cx.fd, POLLIN, 2000)?, POLLIN, "POLLIN above SO_RCVLOWAT");
    same!(sys::epoll_wait(ep, 4, 1000)?.len(), 1, "epoll above SO_RCVLOWAT");
    cx.recv(30)?;
    same!(sys::poll1(cx.fd, POLLIN, 0)?, 0, "POLLIN with 90 bytes left");
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_RCVLOWAT, 1i32)?;
    same!(sys::poll1(cx.fd, POLLIN, 0)?, POLLIN, "POLLIN with SO_RCVLOWAT 1");
    cx.recv(90)
}

/// Who waits for more than the sender's buffer holds gets it all the same.
fn rcvlowat_small(cx: &mut Cx) -> Res {
    const MANY: usize = 200_000;
    let (l, port) = sys::listen(0, 8)?;
    let (client, server) = (sys::connect(port)?, sys::accept(l, 0)?);
    sys::setsockopt(client, SOL_SOCKET, libc::SO_SNDBUF, 4096i32)?;
    let t = std::thread::spawn(move || -> sys::R<()> {
        let mut b = [0; 16];
        for _ in 0..80 {
            sys::write_all(client, &[1; 16])?;
            sys::read_exact(client, &mut b)?;
            util::pause_ms(1);
        }
        for _ in 0..4 {
            sys::write_all(client, &[7; MANY])?;
            sys::read_exact(client, &mut b)?;
        }
        sys::close(client)
    });
    let mut b = [0; 16];
    for _ in 0..80 {
        sys::read_exact(server, &mut b)?;
        sys::write_all(server, &b)?;
    }
    sys::setsockopt(server, SOL_SOCKET, libc::SO_RCVLOWAT, MANY as i32 / 2)?;
    for round in 0..4 {
        let mut got = 0;
        let mut b = vec![0; MANY];
        while got < MANY / 2 {
            if round % 2 == 0 {
                same!(sys::poll1(server, POLLIN, 3000)?, POLLIN, "poll with SO_RCVLOWAT, {got} bytes received");
            }
            got += sys::recv(server, &mut b[got..], 0)?;
        }
        sys::setsockopt(server, SOL_SOCKET, libc::SO_RCVLOWAT, 1i32)?;
        sys::read_exact(server, &mut b[got..])?;
        sys::setsockopt(server, SOL_SOCKET, libc::SO_RCVLOWAT, MANY as i32 / 2)?;
        ensure!(b.iter().all(|b| *b == 7), "bytes");
        sys::write_all(server, &[1; 16])?;
    }
    ensure!(matches!(t.join(), Ok(Ok(()))), "the sender");
    sys::close(l)?;
    cx.warm(4, 0)
}

fn rcvlowat_recv(cx: &mut Cx) -> Res {
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_RCVLOWAT, 100i32)?;
    cx.tell(Op::Send, 60, 0, 0)?;
    cx.arrive(60)?;
    let b = cx.grab(20)?;
    same!(b.len(), 20, "a non-blocking recv below SO_RCVLOWAT");
    cx.take(&b)?;
    let b = cx.grab(400)?;
    cx.take(&b)?;
    // (With some bytes taken already, the kernel may sleep on although enough arrive in sum.)
    cx.post(Op::Sleep, 50_000, 0, 0)?;
    cx.post(Op::SendBits, 2, 60, 50_000)?;
    let mut b = [0; 400];
    same!(sys::recv(cx.fd, &mut b, 0)?, 120, "a blocking recv with SO_RCVLOWAT");
    cx.take(&b[..120])
}

fn zero_send(cx: &mut Cx) -> Res {
    for _ in 0..3 {
        same!(sys::send(cx.fd, &[], 0), Ok(0), "send of nothing");
        same!(sys::write(cx.fd, &[]), Ok(0), "write of nothing");
        same!(sys::writev(cx.fd, &[], 3), Ok(0), "writev of nothing");
        same!(sys::sendmsg(cx.fd, &[], 2, 0), Ok(0), "sendmsg of nothing");
        same!(sys::sendmsg_nothing(cx.fd, 0), Ok(0), "sendmsg without buffers");
    }
    same!(cx.tell(Op::Poll, 30, POLLIN as u64, 0)?, 0, "what the peer polls");
    cx.send(5)?;
    same!(cx.tell(Op::Recv, 5, 0, 0)?, 5, "bytes after it");
    sys::shutdown(cx.fd, libc::SHUT_WR)?;
    same!(sys::sendmsg_nothing(cx.fd, libc::MSG_NOSIGNAL), Err(libc::EPIPE), "sendmsg without buffers after the end");
    Ok(())
}

fn zero_recv(cx: &mut Cx) -> Res {
    same!(sys::read(cx.fd, &mut []), Ok(0), "read of nothing");
    same!(sys::recv(cx.fd, &mut [], MSG_DONTWAIT), Err(EAGAIN), "recv of nothing from nothing");
    same!(sys::recvmsg_nowhere(cx.fd, MSG_DONTWAIT), Err(EAGAIN), "recvmsg without buffers from nothing");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    same!(sys::read(cx.fd, &mut []), Ok(0), "read of nothing from something");
    same!(sys::recv(cx.fd, &mut [], 0), Ok(0), "recv of nothing from something");
    for flags in [MSG_DONTWAIT, 0] {
        same!(sys::recvmsg_nowhere(cx.fd, flags), Ok(0), "recvmsg without buffers from something");
    }
    same!(sys::fionread(cx.fd)?, 10, "FIONREAD after it");
    cx.recv(10)?;
    cx.tell(Op::Shutdown, libc::SHUT_WR as u64, 0, 0)?;
    same!(sys::poll1(cx.fd, POLLIN, 2000)?, POLLIN, "the end");
    same!(sys::recvmsg_nowhere(cx.fd, MSG_DONTWAIT), Ok(0), "recvmsg without buffers from the end");
    Ok(())
}

fn names(cx: &mut Cx) -> Res {
    let (me, peer) = (sys::sockname(cx.fd, false)?, sys::sockname(cx.fd, true)?);
    same!(IpAddr::from(me.0), cx.hosts.check, "own address");
    same!(IpAddr::from(peer.0), cx.hosts.puppet, "peer's address");
    ensure!(me.1 != peer.1 && me.1 != 0 && peer.1 != 0, "ports {} and {}", me.1, peer.1);
    cx.tell(Op::Shutdown, libc::SHUT_WR as u64, 0, 0)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "end of the stream");
    same!(sys::sockname(cx.fd, true)?, peer, "peer's address after its end");
    Ok(())
}

fn options(cx: &mut Cx) -> Res {
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, libc::SO_ERROR)?, 0, "SO_ERROR");
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, libc::SO_TYPE)?, libc::SOCK_STREAM, "SO_TYPE");
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, libc::SO_ACCEPTCONN)?, 0, "SO_ACCEPTCONN");
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, libc::SO_PROTOCOL)?, libc::IPPROTO_TCP, "SO_PROTOCOL");
    same!(sys::getsockopt_int(cx.fd, libc::IPPROTO_TCP, libc::TCP_NODELAY)?, 1, "TCP_NODELAY");
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_KEEPALIVE, 1i32)?;
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, libc::SO_KEEPALIVE)?, 1, "SO_KEEPALIVE");
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_RCVBUF, 50_000i32)?;
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, libc::SO_RCVBUF)?, 100_000, "SO_RCVBUF");
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_SNDBUF, 50_000i32)?;
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, libc::SO_SNDBUF)?, 100_000, "SO_SNDBUF");
    cx.warm(20, 0)
}

fn recvfrom_address(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 10, 0, 0)?;
    let mut b = [0; 10];
    cx.arrive(10)?;
    same!(more::recvfrom_len(cx.fd, &mut b)?, (10, 0), "recvfrom: bytes, length of the address");
    cx.take(&b)
}

fn odd_calls(cx: &mut Cx) -> Res {
    same!(more::odd_calls(cx.fd), (libc::ESPIPE, false, true), "lseek, isatty, is a socket");
    Ok(())
}

fn rw2(cx: &mut Cx) -> Res {
    let mut b = cx.out(100);
    same!(more::rw2(cx.fd, &mut b, true, 0)?, 100, "pwritev2");
    same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "bytes of pwritev2");
    same!(more::rw2(cx.fd, &mut b, false, libc::RWF_NOWAIT), Err(EAGAIN), "preadv2 with RWF_NOWAIT");
    cx.later(20, 100)?;
    same!(more::rw2(cx.fd, &mut b, false, 0)?, 100, "preadv2");
    cx.take(&b)
}

fn errqueue(cx: &mut Cx) -> Res {
    let mut b = [0; 10];
    same!(sys::recvmsg(cx.fd, &mut b, 1, libc::MSG_ERRQUEUE), Err(EAGAIN), "MSG_ERRQUEUE");
    cx.warm(4, 0)
}

/// One call transfers at most 2^31 bytes less a page, whatever it is asked for.
fn huge(cx: &mut Cx) -> Res {
    const MOST: isize = 0x7fff_f000;
    const ASKED: usize = 3 << 30;
    let mut ends = [0 as RawFd; 2];
    let (l, port) = sys::listen(0, 1)?;
    ends[0] = sys::connect(port)?;
    ends[1] = sys::accept(l, libc::SOCK_CLOEXEC)?;
    sys::close(l)?;
    // Enough for it to leave TCP.
    let (mut sent, mut got) = ([0u8; 64], [0u8; 64]);
    for i in 0..200 {
        sent.fill(i);
        for (from, to) in [(ends[0], ends[1]), (ends[1], ends[0])] {
            same!(sys::write(from, &sent)?, 64, "a small write");
            sys::wait1(to, libc::POLLIN, 5000)?;
            sys::read_exact(to, &mut got)?;
            same!(got, sent, "what it brought");
        }
    }
    let [from, to] = ends;
    let reader = std::thread::spawn(move || -> Result<u64, sys::Errno> {
        let mut b = vec![0u8; 1 << 20];
        let mut n = 0;
        loop {
            match sys::read(to, &mut b)? {
                0 => return Ok(n),
                k => n += k as u64,
            }
        }
    });
    // SAFETY: a new mapping; pages that are only read cost nothing.
    let r = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let at = libc::mmap(std::ptr::null_mut(), ASKED, libc::PROT_READ, flags, -1, 0);
        ensure!(at != libc::MAP_FAILED, "mmap");
        // In two pieces, too.
        let half = libc::iovec { iov_base: at, iov_len: ASKED / 2 };
        (libc::send(from, at, ASKED, 0), libc::writev(from, [half, half].as_ptr(), 2))
    };
    sys::shutdown(from, libc::SHUT_WR)?;
    let all = reader.join().map_err(|_| Why("the reader has panicked".into()))??;
    same!((r, all), ((MOST, MOST), 2 * MOST as u64), "what was sent, and what came");
    sys::close(from)?;
    sys::close(to)?;
    cx.warm(4, 0)
}

fn bad_calls(cx: &mut Cx) -> Res {
    let none = std::ptr::null_mut::<libc::c_void>();
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    // SAFETY: a negative count of pieces is refused before the pointer is looked at.
    let r = unsafe { libc::readv(cx.fd, none as *const libc::iovec, -1) };
    same!((r, sys::errno()), (-1, libc::EINVAL), "readv of -1 pieces");
    // SAFETY: no pointers.
    let r = unsafe { libc::listen(cx.fd, 5) };
    same!((r, sys::errno()), (-1, libc::EINVAL), "listen on a connection");
    same!(sys::shutdown(cx.fd, 7), Err(libc::EINVAL), "shutdown of 7");
    cx.recv(10)?;
    cx.warm(4, 0)
}

fn bad_addresses(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    // SAFETY: the kernel answers EFAULT for an address that is not mapped.
    let r = unsafe { libc::read(cx.fd, 8 as *mut libc::c_void, 5) };
    same!((r, sys::errno()), (-1, libc::EFAULT), "read to a bad address");
    // SAFETY: as above.
    let r = unsafe { libc::write(cx.fd, 8 as *const libc::c_void, 5) };
    same!((r, sys::errno()), (-1, libc::EFAULT), "write from a bad address");
    cx.recv(10)?;
    cx.warm(4, 0)
}
