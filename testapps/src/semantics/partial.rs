//! Calls that have moved a part, bytes before a reset, and room that comes back.

use super::cx::{Cx, Op, Res, Why};
use super::procs::{child, reap};
use super::waiting::set;
use super::Check;
use crate::{ensure, more, same, sys, util};
use libc::{EAGAIN, ECONNRESET, EPIPE, EPOLLET, EPOLLOUT, EPOLL_CTL_MOD, MSG_DONTWAIT, MSG_NOSIGNAL};
use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("linger-0-after-bytes", linger_0_after_bytes),
    ("linger-0-of-a-full-connection", linger_0_full),
    ("part-of-a-send-then-a-reset", |cx| part_then_reset(cx, false, 0)),
    ("part-of-a-send-then-a-reset-early", |cx| part_then_reset(cx, true, 0)),
    ("part-of-a-send-then-linger-0", |cx| part_then_reset(cx, false, 1)),
    ("part-of-a-send-then-signals", part_then_signals),
    ("room-after-eagain", |cx| room(cx, false, false)),
    ("room-after-eagain-edge", |cx| room(cx, true, false)),
    ("room-after-eagain-nonblocking", |cx| room(cx, false, true)),
    ("room-after-eagain-edge-nonblocking", |cx| room(cx, true, true)),
    ("room-is-for-a-message", room_for_a_message),
    ("room-after-poll-edge", room_after_poll),
    ("room-after-it-stays-on-tcp", room_on_tcp_for_good),
];

/// Waits until the connection has failed.
pub(super) fn until_reset(cx: &Cx) -> Res {
    for _ in 0..2000 {
        if sys::poll1(cx.fd, POLLIN, 0)? & (POLLERR | POLLHUP) == POLLERR | POLLHUP {
            return Ok(());
        }
        util::pause_ms(1);
    }
    Err(Why("the reset never came".into()))
}

/// What had come before the reset is read before it is told.
fn linger_0_after_bytes(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 5000, 0, 0)?;
    cx.arrive(5000)?;
    cx.tell(Op::Linger, 0, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    until_reset(cx)?;
    cx.recv(2000)?;
    same!(sys::poll1(cx.fd, POLLIN | POLLOUT, 0)?, POLLIN | POLLOUT | POLLERR | POLLHUP, "poll with bytes left");
    cx.recv(3000)?;
    same!(sys::recv(cx.fd, &mut [0; 4], 0), Err(ECONNRESET), "recv after the bytes");
    same!(sys::recv(cx.fd, &mut [0; 4], 0), Ok(0), "recv then");
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(EPIPE), "send");
    Ok(())
}

/// Of what had not come yet the rest is lost; none of it is wrong.
fn linger_0_full(cx: &mut Cx) -> Res {
    let n = cx.fill(5000)?;
    sys::set_linger(cx.fd, true, 0)?;
    sys::close(cx.fd)?;
    let mut got = 0;
    for _ in 0..n / 5000 + 1 {
        cx.post(Op::Recv, 5000, 0, 0)?;
        match cx.answer()? {
            Ok(k) => got += k as usize,
            Err(e) => {
                same!(e, ECONNRESET, "what the peer reads");
                ensure!(got <= n, "the peer read {got} bytes of {n}");
                return Ok(());
            }
        }
    }
    Err(Why(format!("the peer read {got} bytes of {n}, and no error")))
}

/// How much the peer reads first.
const TAKEN: u64 = 300_000;

/// A send that waits has moved a part when the peer goes: it says how much, and the next one why.
fn part_then_reset(cx: &mut Cx, early: bool, linger: u64) -> Res {
    if early {
        // So many calls at this end, and so few at the other, that it is looked for and not found.
        cx.renew()?;
        for _ in 0..20 {
            cx.send(16)?;
        }
        same!(cx.tell(Op::Recv, 320, 0, 0)?, 320, "the first bytes");
    }
    let begun = cx.tx;
    cx.post(Op::Recv, TAKEN, 0, 0)?;
    cx.post(Op::Sleep, 50_000, 0, 0)?;
    if linger > 0 {
        cx.post(Op::Linger, 0, 0, 0)?;
    }
    cx.post(Op::Close, 0, 0, 0)?;
    let b = crate::prng::bytes(super::cx::OUT, begun, 64 << 20);
    let r = sys::send(cx.fd, &b, MSG_NOSIGNAL);
    ensure!(matches!(r, Ok(k) if k as u64 >= TAKEN && k < b.len()), "a send that waited: {r:?}");
    same!(sys::send(cx.fd, &b, MSG_NOSIGNAL), Err(ECONNRESET), "the next send");
    same!(sys::send(cx.fd, &b, MSG_NOSIGNAL), Err(EPIPE), "the one after");
    same!(sys::recv(cx.fd, &mut [0; 4], 0), Ok(0), "recv");
    cx.wait()?;
    Ok(())
}

/// There is a signal for `EPIPE`, and for nothing else.
fn part_then_signals(cx: &mut Cx) -> Res {
    more::count_signal(libc::SIGPIPE, 0)?;
    cx.post(Op::Recv, TAKEN, 0, 0)?;
    cx.post(Op::Sleep, 50_000, 0, 0)?;
    cx.post(Op::Close, 0, 0, 0)?;
    let b = crate::prng::bytes(super::cx::OUT, cx.tx, 64 << 20);
    let r = sys::send(cx.fd, &b, 0);
    ensure!(matches!(r, Ok(1..)), "a send that waited: {r:?}");
    same!(more::signals(), 0, "signals of a send that has moved a part");
    same!(sys::send(cx.fd, &b, 0), Err(ECONNRESET), "the next send");
    same!(more::signals(), 0, "signals of the error");
    same!(sys::send(cx.fd, &b, 0), Err(EPIPE), "the one after");
    same!(more::signals(), 1, "signals");
    cx.wait()?;
    Ok(())
}

/// Who was told `EAGAIN` is told when the peer has made room, and not before there is any.
fn room(cx: &mut Cx, edge: bool, nonblock: bool) -> Res {
    let ep = set(cx, if edge { EPOLLOUT | EPOLLET } else { EPOLLOUT })?;
    same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "events of an empty connection");
    if nonblock {
        sys::nonblock(cx.fd, true)?;
    }
    let flags = if nonblock { MSG_NOSIGNAL } else { MSG_NOSIGNAL | MSG_DONTWAIT };
    for i in 0..5 {
        // Buffers grow by themselves for a while.
        let mut n = 0;
        for _ in 0..4 {
            n += cx.fill(4096)?;
            util::pause_ms(5);
        }
        n += cx.fill(4096)?;
        if i % 2 == 1 {
            sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, (if edge { EPOLLOUT | EPOLLET } else { EPOLLOUT }) as u32, 7)?;
        }
        let _ = sys::epoll_wait(ep, 4, 0)?;
        n += cx.fill(4096)?;
        same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes that arrived");
        let got = sys::epoll_wait(ep, 4, 3000)?;
        same!(got.len(), 1, "events of an empty connection (round {i})");
        same!(sys::poll1(cx.fd, POLLOUT, 0), Ok(POLLOUT), "poll");
        let b = cx.out(4096);
        let r = sys::send(cx.fd, &b, flags);
        ensure!(r == Ok(4096), "a send where there is room: {r:?}, not {EAGAIN}");
        same!(cx.tell(Op::Recv, 4096, 0, 0)?, 4096, "bytes that arrived");
    }
    Ok(())
}

/// Sends that must not wait, as long as `poll` says that there is room. How much that was.
fn send_while_there_is_room(cx: &mut Cx, each: usize) -> Result<usize, Why> {
    let mut n = 0;
    while sys::poll1(cx.fd, POLLOUT, 0)? == POLLOUT {
        let b = cx.out(each);
        let r = sys::send(cx.fd, &b, MSG_NOSIGNAL | MSG_DONTWAIT);
        ensure!(r == Ok(each), "a send of {each} bytes where there is room: {r:?}, behind {n}");
        n += each;
        ensure!(n < 1 << 30, "there is always room");
    }
    Ok(n)
}

/// Where `poll` says that there is room there is some for more than a byte: a relay with blocking calls in both directions
/// would wait for ever in a send for whom it does not read.
fn room_for_a_message(cx: &mut Cx) -> Res {
    const EACH: usize = 8000;
    let mut left = send_while_there_is_room(cx, EACH)?;
    for _ in 0..300 {
        same!(cx.tell(Op::Recv, 5000, 0, 0)?, 5000, "bytes that arrived");
        left -= 5000;
        left += send_while_there_is_room(cx, EACH)?;
    }
    same!(cx.tell(Op::Recv, left as u64, 0, 0)?, left as u64, "the rest");
    Ok(())
}

/// Who was told by `poll` that there is no room hears of an edge when there is, though no send has failed.
fn room_after_poll(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLOUT | EPOLLET)?;
    same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "events of an empty connection");
    for i in 0..5 {
        let mut n = send_while_there_is_room(cx, 8000)?;
        for _ in 0..4 {
            // Buffers grow by themselves for a while.
            util::pause_ms(5);
            n += send_while_there_is_room(cx, 8000)?;
        }
        let _ = sys::epoll_wait(ep, 4, 0)?;
        n += send_while_there_is_room(cx, 8000)?;
        same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes that arrived");
        same!(sys::epoll_wait(ep, 4, 3000)?.len(), 1, "events of an empty connection (round {i})");
    }
    Ok(())
}

/// Who was told of room on a ring hears of it again where the connection has come home, and stays there: nobody sees that a
/// send fails.
fn room_on_tcp_for_good(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLOUT | EPOLLET)?;
    same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "events of an empty connection");
    let fd = cx.fd;
    reap(child(|| Ok(sys::poll1(fd, POLLIN, 0).map(|_| ())?))?)?;
    sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1i32)?;
    for i in 0..3 {
        let mut n = 0;
        for _ in 0..5 {
            n += cx.fill(4096)?;
            util::pause_ms(5);
        }
        same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes that arrived");
        same!(sys::epoll_wait(ep, 4, 3000)?.len(), 1, "events of an empty connection (round {i})");
    }
    Ok(())
}
