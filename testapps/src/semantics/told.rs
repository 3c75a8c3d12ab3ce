//! What is told once, and what is told all the same.

use super::cx::{between, Cx, Op, Res};
use super::procs::{child, reap};
use super::surface::hidden;
use super::waiting::{events, set};
use super::Check;
use crate::{ensure, more, same, sys, util};
use libc::{
    EPOLLERR, EPOLLET, EPOLLHUP, EPOLLIN, EPOLLOUT, EPOLLRDHUP, MSG_NOSIGNAL, MSG_WAITALL, POLLERR, POLLHUP, POLLIN,
    POLLOUT, POLLRDHUP,
};
use libc::{SA_RESTART, SHUT_RDWR, SHUT_WR, SIGUSR1};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::Arc;
use std::time::Instant;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("told-of-a-shutdown-in-vain", shutdown_in_vain),
    ("told-to-a-child-once", child_once),
    ("told-to-a-child-of-the-time-before", child_of_before),
    ("told-nothing-by-a-full-socket", full),
    ("waits-on-after-a-handler", waits_on),
    ("waits-no-longer-for-many", for_many),
    ("refused-after-a-return", refused),
    ("told-a-child-how-it-failed", child_fails),
    ("told-a-child-the-error", child_asks),
    ("told-the-parent-alone", parent_alone),
    ("told-a-child-what-its-parent-was-not", child_of_untold),
    ("told-of-a-reset-before-the-bytes", reset_before_bytes),
    ("told-a-send-of-what-it-refused", send_after_refusal),
    ("told-after-a-part", after_a_part),
    ("told-how-a-refusal-ended", refusal),
    ("a-receive-of-nothing-waits-once", nothing),
    ("waits-for-the-low-water-mark", low_water),
    ("low-water-and-a-signal", low_water_signal),
    ("edge-low-water", low_water_edges),
    ("edge-short-receive", short_receive),
    ("edge-of-bytes-that-were-read", read_before),
    ("edge-of-an-end-for-who-asks-for-room", end_for_room),
    ("edge-old-after-splice", |cx| spliced(cx, true)),
    ("edge-new-after-splice", |cx| spliced(cx, false)),
    ("edge-of-room-after-splice", room_after_splice),
];

/// Bytes that have come and were read are an edge to who asks for them: what else is there is told once more.
fn read_before(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLOUT | EPOLLET)?;
    same!(events(ep, 1000)?, EPOLLOUT, "events");
    for _ in 0..3 {
        cx.tell(Op::Send, 10, 0, 0)?;
        cx.arrive(10)?;
        cx.recv(10)?;
        same!(events(ep, 1000)?, EPOLLOUT, "events when all is read");
        same!(events(ep, 20)?, 0, "events");
    }
    Ok(sys::close(ep)?)
}

/// An end is told to all, and bytes to those that ask for them.
fn end_for_room(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLOUT | EPOLLET)?;
    same!(events(ep, 1000)?, EPOLLOUT, "events");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    same!(events(ep, 20)?, 0, "events of bytes");
    cx.tell(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLOUT, "events of the end");
    same!(events(ep, 20)?, 0, "events");
    cx.recv(10)?;
    Ok(sys::close(ep)?)
}

/// What `splice` takes has been told of, and what comes after that is told of again: to who waits (if `old`: of nothing), or polls
/// the set.
fn spliced(cx: &mut Cx, old: bool) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    cx.tell(Op::Send, 12, 0, 0)?;
    same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "events when bytes have come");
    let (rd, wr) = sys::pipe()?;
    same!(sys::splice(cx.fd, wr, 12, 0), Ok(12), "splice");
    let mut b = [0; 12];
    sys::read_exact(rd, &mut b)?;
    cx.take(&b)?;
    util::pause_ms(50);
    if old {
        same!(sys::epoll_wait(ep, 4, 0)?.len(), 0, "events when all was taken");
    }
    cx.tell(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    same!(sys::poll1(ep, POLLIN, 2000)?, POLLIN, "the polled set at the end");
    same!(sys::epoll_wait(ep, 4, 0)?.len(), 1, "events at the end");
    [rd, wr, ep].into_iter().try_for_each(sys::close)?;
    Ok(())
}

/// Nor is room that has been told of told of again; room that comes after a send that found none is.
fn room_after_splice(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLOUT | EPOLLET)?;
    same!(events(ep, 1000)?, EPOLLOUT, "events");
    cx.tell(Op::Send, 12, 0, 0)?;
    cx.arrive(12)?;
    let (rd, wr) = sys::pipe()?;
    same!(sys::splice(cx.fd, wr, 12, 0), Ok(12), "splice");
    let mut b = [0; 12];
    sys::read_exact(rd, &mut b)?;
    cx.take(&b)?;
    util::pause_ms(20);
    same!(events(ep, 0)?, 0, "events when nothing was sent");
    let n = cx.fill(16_384)?;
    same!(events(ep, 0)?, 0, "events when there is no room");
    same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes");
    same!(events(ep, 2000)?, EPOLLOUT, "events when there is room again");
    [rd, wr, ep].into_iter().try_for_each(sys::close)?;
    Ok(())
}

/// The kernel wakes whoever waits for an edge, although there is no connection any more.
fn shutdown_in_vain(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLRDHUP | EPOLLET)?;
    cx.tell(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    sys::shutdown(cx.fd, SHUT_WR)?;
    for _ in 0..2000 {
        if sys::poll1(cx.fd, POLLRDHUP, 0)? & POLLHUP != 0 {
            break;
        }
        util::pause_ms(1);
    }
    util::pause_ms(20);
    same!(sys::epoll_wait(ep, 4, 0)?.len(), 1, "events of the end");
    same!(sys::epoll_wait(ep, 4, 0)?.len(), 0, "events after that");
    same!(sys::shutdown(cx.fd, SHUT_RDWR), Err(libc::ENOTCONN), "shutdown when both directions have ended");
    same!(sys::epoll_wait(ep, 4, 1000)?.len(), 1, "events of that");
    Ok(())
}

/// That a connection returns because a child uses it is no edge.
fn child_once(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "events of ten bytes");
    let mut c = cx.with_fd(cx.fd);
    reap(child(move || {
        c.send(10)?;
        same!(sys::epoll_wait(ep, 4, 50)?.len(), 0, "events in the child");
        Ok(())
    })?)?;
    cx.tx += 10;
    same!(cx.tell(Op::Recv, 10, 0, 0)?, 10, "bytes of the child");
    same!(sys::epoll_wait(ep, 4, 0)?.len(), 0, "events of the same bytes");
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "events of ten more bytes");
    cx.recv(20)
}

/// Nor is it one where the connection has left TCP only after the fork.
fn child_of_before(cx: &mut Cx) -> Res {
    const N: u64 = 60;
    cx.renew()?;
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "events of ten bytes");
    let (rd, wr) = sys::pipe()?;
    let mut c = cx.with_fd(cx.fd);
    c.tx += N * 16;
    let pid = child(move || {
        sys::read(rd, &mut [0])?;
        c.send(10)?;
        same!(sys::epoll_wait(ep, 4, 50)?.len(), 0, "events in the child");
        Ok(())
    })?;
    cx.post(Op::SlowRecv, N * 16, 16, 0)?;
    for _ in 0..N {
        cx.send(16)?;
        util::pause_ms(1);
    }
    cx.wait()?;
    sys::write(wr, b"x")?;
    reap(pid)?;
    cx.tx += 10;
    same!(cx.tell(Op::Recv, 10, 0, 0)?, 10, "bytes of the child");
    same!(sys::epoll_wait(ep, 4, 0)?.len(), 0, "events of the same bytes");
    cx.recv(10)
}

/// That a connection leaves TCP makes no room: neither while it is full, nor when there is some, but less than is told of.
/// (One that was full on a ring, and comes back, finds the room of the kernel's buffers, as it would in TCP when these grow;
/// and a return in a hurry empties them.)
fn full(cx: &mut Cx) -> Res {
    const SOME: u64 = 100_000;
    for _ in 0..6 {
        cx.renew()?;
        sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 300_000i32)?;
        cx.warm(2, 0)?;
        let before = sys::tcp_written(cx.fd)?.0;
        let mut n = 0;
        for _ in 0..3 {
            n += cx.fill(30_000)? as u64;
            util::pause_ms(3);
        }
        let on_tcp = sys::tcp_written(cx.fd)?.0 - before == n;
        // So many calls that the peer looks for a ring.
        same!(cx.tell(Op::SlowRecv, SOME, 10_000, 0)?, SOME, "the first bytes that arrived");
        for _ in 0..20 {
            let got = sys::poll1(cx.fd, POLLOUT, 0)?;
            let room = got == 0 || hidden::poll(cx.fd, POLLOUT, 0);
            ensure!(room || !on_tcp, "poll of a full connection: {got:#x}");
            util::pause_ms(1);
        }
        same!(cx.tell(Op::Recv, n - SOME, 0, 0)?, n - SOME, "bytes that arrived");
        same!(sys::wait1(cx.fd, POLLOUT, 2000)?, POLLOUT, "poll when there is room");
    }
    cx.warm(6, 0)
}

/// A handler that has run before the first byte came does not end a call that it let go on.
fn waits_on(cx: &mut Cx) -> Res {
    more::count_signal(SIGUSR1, SA_RESTART)?;
    let t = more::signal_after(20, SIGUSR1);
    for n in [14, 61] {
        cx.post(Op::Sleep, 200_000, 0, 0)?;
        cx.post(Op::Send, n, 0, 0)?;
    }
    let mut b = [0; 75];
    same!(sys::recv(cx.fd, &mut b, MSG_WAITALL), Ok(75), "recv of all");
    cx.take(&b)?;
    cx.wait()?;
    ensure!(t.join().is_ok(), "the signal");
    same!(more::signals(), 1, "signals");
    cx.warm(6, 0)
}

/// A time limit is one for all that a call waits, however often something comes, or finds room.
fn for_many(cx: &mut Cx) -> Res {
    const LIMIT: i64 = 200;
    let other = std::thread::spawn(|| util::pause_ms(2000));
    for fresh in [true, false] {
        if fresh {
            cx.renew()?;
        } else {
            cx.leave_tcp()?;
        }
        sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, LIMIT)?;
        let mut b = [0; 12];
        let t = Instant::now();
        cx.post(Op::SendBits, 12, 1, 60_000)?;
        let n = sys::recv(cx.fd, &mut b, MSG_WAITALL)?;
        let took = t.elapsed().as_millis() as u64;
        between("the receive", took, LIMIT as u64 - 10, LIMIT as u64 + 100)?;
        ensure!((1..=6).contains(&n), "{n} bytes in {took} ms");
        cx.take(&b[..n])?;
        sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, 0)?;
        cx.recv(12 - n)?;
        cx.wait()?;
    }
    for fresh in [true, false] {
        if fresh {
            cx.renew()?;
        } else {
            cx.leave_tcp()?;
        }
        sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 50_000i32)?;
        sys::set_timeout(cx.fd, libc::SO_SNDTIMEO, LIMIT)?;
        cx.post(Op::SlowRecv, 64 << 20, 50_000, 3_000)?;
        let b = cx.out(32 << 20);
        let t = Instant::now();
        let n = sys::send(cx.fd, &b, 0)?;
        let took = t.elapsed().as_millis() as u64;
        between("the send", took, LIMIT as u64 - 10, LIMIT as u64 + 100)?;
        ensure!(n < b.len(), "{n} bytes in {took} ms");
        cx.tx -= (b.len() - n) as u64;
        sys::shutdown(cx.fd, SHUT_WR)?;
        same!(cx.wait()?, n as u64, "bytes that arrived");
        cx.renew()?;
    }
    ensure!(other.join().is_ok(), "a thread");
    cx.warm(6, 0)
}

/// Who has shut both directions refuses what comes, also when the connection has returned to TCP for the sender's child.
fn refused(cx: &mut Cx) -> Res {
    for _ in 0..8 {
        cx.tell(Op::Shutdown, SHUT_RDWR as u64, 0, 0)?;
        same!(sys::wait1(cx.fd, POLLIN, 2000)?, POLLIN, "poll of the end");
        let mut c = cx.with_fd(cx.fd);
        reap(child(move || Ok(c.send(100)?))?)?;
        util::pause_ms(5);
        same!(cx.tell(Op::Fionread, 0, 0, 0)?, 0, "bytes that have come to who refuses them");
        let left = cx.tell(Op::Poll, 2000, POLLRDHUP as u64, 0)? as i16;
        same!(left & libc::POLLERR, libc::POLLERR, "what the peer polls");
        cx.renew()?;
        cx.warm(40, 8)?;
    }
    Ok(())
}

/// How a connection failed is told once, to whoever asks first.
fn child_fails(cx: &mut Cx) -> Res {
    cx.send(32)?;
    let (rd, wr) = sys::pipe()?;
    let fd = cx.fd;
    let pid = child(move || {
        // The peer may be a thread of this process: its end is not the child's to hold.
        for n in (3..64).filter(|n| *n != fd && *n != rd) {
            let _ = sys::close(n);
        }
        sys::read(rd, &mut [0])?;
        same!(sys::poll1(fd, POLLOUT, 0)?, POLLOUT | POLLERR | POLLHUP, "what the child polls");
        Ok(())
    })?;
    same!(cx.tell(Op::Poll, 2000, POLLIN as u64, 0)?, POLLIN as u64, "what the peer polls");
    cx.tell(Op::Close, 0, 0, 0)?;
    util::pause_ms(30);
    sys::write(wr, b"x")?;
    reap(pid)?;
    same!(sys::send(cx.fd, &[], MSG_NOSIGNAL), Err(libc::ECONNRESET), "send of nothing after a reset");
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(libc::EPIPE), "send after that");
    Ok(())
}

/// Who asks first is told, once.
fn child_asks(cx: &mut Cx) -> Res {
    let error = |fd| sys::getsockopt_int(fd, libc::SOL_SOCKET, libc::SO_ERROR);
    cx.send(32)?;
    same!(cx.tell(Op::Poll, 2000, POLLIN as u64, 0)?, POLLIN as u64, "what the peer polls");
    cx.tell(Op::Close, 0, 0, 0)?;
    util::pause_ms(30);
    let fd = cx.fd;
    reap(child(move || {
        same!(error(fd), Ok(libc::ECONNRESET), "SO_ERROR in the child");
        same!(error(fd), Ok(0), "SO_ERROR again");
        Ok(())
    })?)?;
    same!(error(cx.fd), Ok(0), "SO_ERROR in the parent");
    same!(sys::recv(cx.fd, &mut [0; 4], 0), Ok(0), "recv");
    same!(sys::poll1(cx.fd, POLLIN, 0), Ok(POLLIN | POLLHUP), "poll");
    Ok(())
}

/// The parent is told of a reset; its child, which has shut both directions and gone back to TCP, reads what came before, and the
/// end.
fn parent_alone(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 421, 0, 0)?;
    cx.arrive(421)?;
    cx.send(2320)?;
    same!(cx.tell(Op::Poll, 2000, POLLIN as u64, 0)?, POLLIN as u64, "what the peer polls");
    let (shut, go) = (sys::pipe()?, sys::pipe()?);
    let fd = cx.fd;
    let mut c = cx.with_fd(fd);
    let pid = child(move || {
        // The peer may be a thread of this process: its end is not the child's to hold.
        for n in (3..64).filter(|n| ![fd, shut.1, go.0].contains(n)) {
            let _ = sys::close(n);
        }
        sys::shutdown(fd, SHUT_RDWR)?;
        sys::write(shut.1, b"x")?;
        sys::read(go.0, &mut [0])?;
        c.recv(421)?;
        same!(sys::recv(fd, &mut [0; 4], 0), Ok(0), "recv in the child");
        Ok(())
    })?;
    sys::read(shut.0, &mut [0])?;
    cx.tell(Op::Close, 0, 0, 0)?;
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(libc::ECONNRESET), "send after a reset");
    sys::write(go.1, b"x")?;
    reap(pid)?;
    [shut.0, shut.1, go.0, go.1].into_iter().try_for_each(sys::close)?;
    Ok(())
}

/// What the parent has sent to an end that is gone was refused: a child is told so, behind whose back the rest comes home.
fn child_of_untold(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 33, 0, 0)?;
    cx.arrive(33)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    for _ in 0..1000 {
        if sys::poll1(cx.fd, POLLRDHUP, 0)? & POLLRDHUP != 0 {
            break;
        }
        util::pause_ms(1);
    }
    same!(sys::send(cx.fd, &[1; 545], MSG_NOSIGNAL)?, 545, "a send to an end that is gone");
    util::pause_ms(30);
    let fd = cx.fd;
    let mut c = cx.with_fd(fd);
    reap(child(move || {
        same!(sys::poll1(fd, POLLIN, 0)?, POLLIN | POLLERR | POLLHUP, "what the child polls");
        same!(sys::getsockopt_int(fd, libc::SOL_SOCKET, libc::SO_ERROR)?, libc::EPIPE, "SO_ERROR in the child");
        c.recv(33)?;
        same!(sys::recv(fd, &mut [0; 4], 0), Ok(0), "recv in the child");
        Ok(())
    })?)?;
    Ok(())
}

/// A new connection that has left TCP, but for 33 bytes that came before and that nobody reads.
fn moved_but_unread(cx: &mut Cx) -> Res {
    const N: u64 = 200;
    cx.renew()?;
    cx.tell(Op::Send, 33, 0, 0)?;
    cx.arrive(33)?;
    cx.post(Op::SlowRecv, N * 16, 16, 0)?;
    for i in 0..N {
        cx.send(16)?;
        util::pause_ms(u64::from(i % 8 == 0));
    }
    cx.wait()?;
    Ok(())
}

/// Who has shut both directions, and is sent something all the same, is told so by its next send, whatever it has not read.
fn send_after_refusal(cx: &mut Cx) -> Res {
    for nothing in [false, true] {
        moved_but_unread(cx)?;
        sys::shutdown(cx.fd, libc::SHUT_RDWR)?;
        let hup = POLLRDHUP as u64;
        same!(cx.tell(Op::Poll, 2000, POLLRDHUP as u64, 0)? & hup, hup, "what the peer polls");
        cx.tell(Op::Send, 100, 0, 0)?;
        util::pause_ms(20);
        const ALL: i16 = POLLIN | POLLOUT | POLLRDHUP;
        same!(sys::poll1(cx.fd, ALL, 0), Ok(ALL | POLLERR | POLLHUP), "poll");
        let send = || sys::send(cx.fd, if nothing { &[] } else { &[1] }, MSG_NOSIGNAL);
        same!(send(), Err(libc::ECONNRESET), "a send");
        same!(send(), Err(libc::EPIPE), "the next");
        same!(sys::poll1(cx.fd, ALL, 0), Ok(ALL | POLLHUP), "poll then");
        cx.recv(33)?;
        same!(sys::recv(cx.fd, &mut [0; 4], 0), Ok(0), "recv");
    }
    Ok(())
}

/// The bytes came before the connection left TCP, and nobody reads them: a reset is told of all the same.
fn reset_before_bytes(cx: &mut Cx) -> Res {
    let error = |fd| sys::getsockopt_int(fd, libc::SOL_SOCKET, libc::SO_ERROR);
    moved_but_unread(cx)?;
    cx.send(100)?;
    same!(cx.tell(Op::Poll, 2000, POLLIN as u64, 0)?, POLLIN as u64, "what the peer polls");
    cx.tell(Op::Close, 0, 0, 0)?;
    util::pause_ms(20);
    const ALL: i16 = POLLIN | POLLOUT | POLLRDHUP;
    same!(sys::poll1(cx.fd, ALL, 0), Ok(ALL | POLLERR | POLLHUP), "poll");
    same!(error(cx.fd), Ok(libc::ECONNRESET), "SO_ERROR");
    same!(error(cx.fd), Ok(0), "SO_ERROR again");
    same!(sys::poll1(cx.fd, ALL, 0), Ok(ALL | POLLHUP), "poll then");
    cx.recv(33)?;
    same!(sys::recv(cx.fd, &mut [0; 4], 0), Ok(0), "recv");
    Ok(())
}

/// An error that ends a call which has received something is the next call's, whatever that is.
fn after_a_part(cx: &mut Cx) -> Res {
    let other = std::thread::spawn(|| util::pause_ms(300));
    for (fresh, asks) in [(true, false), (false, true), (true, true), (false, false)] {
        cx.renew()?;
        if !fresh {
            cx.leave_tcp()?;
        }
        // What nobody reads there makes the close a reset.
        cx.send(8)?;
        cx.post(Op::Send, 24, 0, 0)?;
        cx.post(Op::Sleep, 20_000, 0, 0)?;
        cx.post(Op::Close, 0, 0, 0)?;
        let mut b = [0; 725];
        same!(sys::recv(cx.fd, &mut b, MSG_WAITALL), Ok(24), "recv of all");
        cx.take(&b[..24])?;
        cx.wait()?;
        same!(sys::poll1(cx.fd, 0, 0)?, POLLERR | POLLHUP, "poll with an error that is still to be told");
        if asks {
            let ask = || sys::getsockopt_int(cx.fd, libc::SOL_SOCKET, libc::SO_ERROR);
            same!(ask(), Ok(libc::ECONNRESET), "SO_ERROR");
            same!(ask(), Ok(0), "SO_ERROR again");
        } else {
            same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(libc::ECONNRESET), "send after a reset");
        }
        same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(libc::EPIPE), "send after that");
        same!(sys::recv(cx.fd, &mut b, 0), Ok(0), "recv after that");
    }
    ensure!(other.join().is_ok(), "a thread");
    cx.renew()?;
    cx.warm(6, 0)
}

/// Who has shut both directions, and is sent something all the same, has no connection any more.
fn refusal(cx: &mut Cx) -> Res {
    for last in [Op::Send, Op::Shutdown] {
        // The end of the stream stands behind what is not read.
        cx.send(8)?;
        same!(cx.tell(Op::Poll, 2000, POLLIN as u64, 0)?, POLLIN as u64, "poll of what came");
        cx.tell(Op::Shutdown, SHUT_RDWR as u64, 0, 0)?;
        same!(sys::wait1(cx.fd, POLLIN, 2000)?, POLLIN, "poll of the end");
        let mut c = cx.with_fd(cx.fd);
        reap(child(move || Ok(c.send(100)?))?)?;
        util::pause_ms(5);
        let wanted = if last == Op::Send { libc::ECONNRESET } else { libc::ENOTCONN };
        cx.post(last, 1, 0, 0)?;
        same!(cx.answer()?, Err(wanted), "what it is told");
        cx.renew()?;
        cx.warm(40, 8)?;
    }
    Ok(())
}

fn nothing(cx: &mut Cx) -> Res {
    sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, 5)?;
    same!(sys::recv(cx.fd, &mut [], 0), Ok(0), "recv of no bytes");
    same!(sys::recv(cx.fd, &mut [0], 0), Err(libc::EAGAIN), "recv of one");
    same!(sys::recv(cx.fd, &mut [], libc::MSG_DONTWAIT), Err(libc::EAGAIN), "recv of no bytes that must not wait");
    sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, 0)?;
    cx.warm(6, 0)
}

/// `SO_RCVLOWAT` on a connection that is by TCP, set before and after it was on a ring.
fn low_water(cx: &mut Cx) -> Res {
    let lowat = |cx: &Cx, n: i32| sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, n);
    let other = std::thread::spawn(|| util::pause_ms(300));
    for most in [10, 2000] {
        cx.renew()?;
        lowat(cx, 10)?;
        for (n, ms) in [(3, 30), (20, 0)] {
            cx.post(Op::Send, n, 0, 0)?;
            cx.post(Op::Sleep, ms * 1000, 0, 0)?;
        }
        let mut b = [0; 2000];
        let got = sys::recv(cx.fd, &mut b[..most], 0)?;
        same!(got, most.min(23), "bytes of a receive that waits for ten");
        cx.take(&b[..got])?;
        cx.recv(23 - got)?;
        cx.wait()?;
        lowat(cx, 1)?;
        cx.tell(Op::Send, 3, 0, 0)?;
        same!(sys::recv(cx.fd, &mut b, 0)?, 3, "bytes of a receive that waits for one");
        cx.take(&b[..3])?;
    }
    ensure!(other.join().is_ok(), "a thread");
    cx.warm(6, 0)
}

/// A signal ends a receive that waits for as much as `SO_RCVLOWAT` says, or for all, if anything has come.
fn low_water_signal(cx: &mut Cx) -> Res {
    extern "C" fn nothing(_: libc::c_int) {}
    sys::sigaction(SIGUSR1, nothing, SA_RESTART)?;
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 100)?;
    for flags in [0, MSG_WAITALL] {
        for first in [0, 6] {
            if first > 0 {
                cx.tell(Op::Send, first, 0, 0)?;
                cx.arrive(first as usize)?;
            }
            cx.post(Op::Sleep, 30_000, 0, 0)?;
            cx.post(Op::Send, 5, 0, 0)?;
            // SAFETY: no preconditions; the thread lives until it has joined the other.
            let me = unsafe { libc::pthread_self() };
            let done = Arc::new(AtomicBool::new(false));
            let seen = done.clone();
            let t = std::thread::spawn(move || {
                // One that comes before the bytes ends nothing.
                for _ in 0..50 {
                    util::pause_ms(120);
                    if seen.load(SeqCst) {
                        break;
                    }
                    // SAFETY: as above.
                    unsafe { libc::pthread_kill(me, SIGUSR1) };
                }
            });
            let mut b = [0; 60];
            let got = sys::recv(cx.fd, &mut b, flags)?;
            done.store(true, SeqCst);
            ensure!((1..=first as usize + 5).contains(&got), "a signal ended a receive with {got} bytes");
            cx.take(&b[..got])?;
            cx.wait()?;
            cx.wait()?;
            sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1)?;
            cx.recv(first as usize + 5 - got)?;
            sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 100)?;
            ensure!(t.join().is_ok(), "a thread");
        }
    }
    Ok(())
}

/// `SO_RCVLOWAT` tells who waits for edges again of what is there, if it is as much, and of nothing else.
fn low_water_edges(cx: &mut Cx) -> Res {
    let lowat = |cx: &Cx, n: i32| sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, n);
    let ep = set(cx, EPOLLIN | EPOLLOUT | EPOLLET)?;
    same!(events(ep, 1000)?, EPOLLOUT, "what there is at first");
    lowat(cx, 1)?;
    same!(events(ep, 20)?, 0, "nothing has come");
    cx.tell(Op::Send, 50, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN | EPOLLOUT, "bytes have come");
    lowat(cx, 100)?;
    same!(events(ep, 20)?, 0, "less has come than is waited for");
    lowat(cx, 50)?;
    same!(events(ep, 1000)?, EPOLLIN | EPOLLOUT, "as much has come");
    lowat(cx, 1)?;
    same!(events(ep, 1000)?, EPOLLIN | EPOLLOUT, "more has come");
    cx.recv(50)?;
    // What its peer has not read makes the close a reset.
    sys::write_all(cx.fd, &[0; 50])?;
    same!(cx.tell(Op::Poll, 2000, POLLIN as u64, 0)?, POLLIN as u64, "what the peer polls");
    cx.tell(Op::Close, 0, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP, "a reset");
    util::pause_ms(20);
    lowat(cx, 2)?;
    same!(events(ep, 20)?, 0, "nothing comes after a reset");
    Ok(sys::close(ep)?)
}

/// A receive of less than was asked for has taken all that there was: who knows that waits for the next edge.
fn short_receive(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    let mut b = vec![0; 16_336];
    for i in 0..400 {
        let n = 15_000 + i * 30;
        cx.post(Op::Send, n as u64, 0, 0)?;
        let mut got = 0;
        while got < n {
            let events = sys::epoll_wait(ep, 4, 2000)?;
            ensure!(events.len() == 1, "no edge in 2 s for the rest of {n} bytes, of which {got} were received");
            loop {
                let k = match sys::recv(cx.fd, &mut b, libc::MSG_DONTWAIT) {
                    Err(libc::EAGAIN) => break,
                    r => r?,
                };
                cx.take(&b[..k])?;
                got += k;
                if k < b.len() {
                    break;
                }
            }
        }
        cx.wait()?;
        cx.send(8)?;
        cx.tell(Op::Recv, 8, 0, 0)?;
    }
    Ok(())
}
