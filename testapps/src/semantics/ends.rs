//! How connections end: half-close, clean close, reset, and what `poll` says then.

use super::cx::{goes_by_rdma, untried, Cx, Op, Res};
use super::found::{has_left, pair};
use super::waiting::events;
use super::Check;
use crate::{ensure, more, same, sys, util};
use libc::{ECONNRESET, EPIPE, MSG_NOSIGNAL, POLLERR, POLLHUP, POLLIN, POLLOUT, POLLRDHUP};
use libc::{EPOLLET, EPOLLOUT, EPOLLRDHUP, EPOLL_CTL_ADD, SHUT_RD, SHUT_RDWR, SHUT_WR, SOL_SOCKET, SO_ERROR};
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("close-while-the-peer-looks", close_while_looking),
    ("half-close-mine-first", half_mine),
    ("half-close-peer-first", half_peer),
    ("half-close-with-data", half_with_data),
    ("shutdown-rd", shutdown_rd),
    ("shutdown-rdwr", shutdown_rdwr),
    ("shutdown-twice", shutdown_twice),
    ("eof-clean", eof_clean),
    ("eof-wakes-recv", eof_wakes),
    ("eof-poll-bits", eof_bits),
    ("epipe-after-close", epipe_after_close),
    ("sigpipe", sigpipe),
    ("sigpipe-is-as-from-a-user", sigpipe_code),
    ("reset-unread", reset_unread),
    ("reset-unread-poll", reset_unread_poll),
    ("reset-after-data", reset_after_data),
    ("reset-wakes-recv", reset_wakes_recv),
    ("reset-wakes-send", reset_wakes_send),
    ("reset-by-me", reset_by_me),
    ("linger-0", linger_0),
    ("linger-0-mine", linger_0_mine),
    ("linger-0-from-before-the-connection", linger_0_from_before),
    ("close-with-pending", close_pending),
    ("shutdown-with-pending", shutdown_pending),
    ("bad-fd-after-close", bad_fd),
    ("shut-both-refuses", shut_both_refuses),
    ("shut-both-resets-me", shut_both_resets_me),
    ("reset-unread-after-shutdown-rd", reset_unread_shut),
    ("send-to-the-closed-hangs-up", closed_hangs_up),
    ("send-to-the-closed-that-is-not-done-hangs-up", closed_hangs_up_late),
    ("send-nothing-at-the-end", send_nothing),
    ("shutdown-of-the-reset", shutdown_of_reset),
    ("recvmmsg-tells-errors-first", recvmmsg_first),
    ("close-is-told-at-once", close_told_at_once),
];

const ALL: i16 = POLLIN | POLLOUT | POLLRDHUP;

fn half_mine(cx: &mut Cx) -> Res {
    cx.send(1000)?;
    sys::shutdown(cx.fd, SHUT_WR)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 1000, "bytes before the end");
    cx.post(Op::Send, 200_000, 0, 0)?;
    cx.recv(200_000)?;
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(EPIPE), "send after shutdown");
    cx.tell(Op::Close, 0, 0, 0)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "end of the stream");
    Ok(())
}

fn half_peer(cx: &mut Cx) -> Res {
    cx.tell(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    for _ in 0..3 {
        same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "end of the stream");
    }
    cx.post(Op::Recv, 200_000, 0, 0)?;
    cx.send(200_000)?;
    same!(cx.wait()?, 200_000, "bytes after the peer's end");
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "bytes after close");
    Ok(())
}

fn half_with_data(cx: &mut Cx) -> Res {
    cx.post(Op::Send, 100_000, 0, 0)?;
    cx.post(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    util::pause_ms(50);
    cx.recv(100_000)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "end of the stream");
    Ok(())
}

fn shutdown_rd(cx: &mut Cx) -> Res {
    sys::shutdown(cx.fd, SHUT_RD)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "read after SHUT_RD");
    same!(sys::poll1(cx.fd, ALL, 0)?, ALL, "poll after SHUT_RD");
    cx.send(100)?;
    same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "bytes that still go out");
    // The kernel's TCP still takes what comes in.
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    cx.recv(10)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "read at last");
    Ok(())
}

fn shutdown_rdwr(cx: &mut Cx) -> Res {
    cx.send(10)?;
    sys::shutdown(cx.fd, SHUT_RDWR)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "read");
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(EPIPE), "send");
    same!(sys::poll1(cx.fd, ALL, 0)?, ALL | POLLHUP, "poll");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 10, "bytes before the end");
    Ok(())
}

fn shutdown_twice(cx: &mut Cx) -> Res {
    sys::shutdown(cx.fd, SHUT_WR)?;
    sys::shutdown(cx.fd, SHUT_WR)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "bytes before the end");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.recv(10)?;
    ensure!(sys::sockname(cx.fd, true).is_ok(), "the peer's name");
    cx.tell(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "end of the stream");
    same!(sys::sockname(cx.fd, true).err(), Some(libc::ENOTCONN), "the name of no peer");
    Ok(())
}

fn eof_clean(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 5000, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    cx.recv(5000)?;
    for _ in 0..3 {
        same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "end of the stream");
    }
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, SO_ERROR)?, 0, "SO_ERROR");
    Ok(())
}

fn eof_wakes(cx: &mut Cx) -> Res {
    cx.post(Op::Sleep, 50_000, 0, 0)?;
    cx.post(Op::Close, 0, 0, 0)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "a read that waits for the end");
    Ok(())
}

fn eof_bits(cx: &mut Cx) -> Res {
    same!(sys::poll1(cx.fd, ALL, 0)?, POLLOUT, "poll of an idle connection");
    cx.post(Op::Sleep, 30_000, 0, 0)?;
    cx.post(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    same!(sys::poll1(cx.fd, POLLRDHUP, 2000)?, POLLRDHUP, "poll for POLLRDHUP alone");
    same!(sys::poll1(cx.fd, ALL, 0)?, ALL, "poll after the peer's end");
    same!(sys::poll1(cx.fd, 0, 20)?, 0, "poll for nothing");
    sys::shutdown(cx.fd, SHUT_WR)?;
    same!(sys::poll1(cx.fd, 0, 2000)?, POLLHUP, "poll for nothing after both ends");
    same!(sys::poll1(cx.fd, ALL, 0)?, ALL | POLLHUP, "poll after both ends");
    Ok(())
}

/// Sends until that fails: the error, or 0.
fn send_until_error(cx: &Cx, flags: i32) -> i32 {
    for _ in 0..2000 {
        if let Err(e) = sys::send(cx.fd, &[1], flags) {
            return e;
        }
        util::pause_ms(1);
    }
    0
}

fn epipe_after_close(cx: &mut Cx) -> Res {
    cx.tell(Op::Close, 0, 0, 0)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "end of the stream");
    more::count_signal(libc::SIGPIPE, 0)?;
    same!(send_until_error(cx, MSG_NOSIGNAL), EPIPE, "send to a peer that has closed");
    same!(more::signals(), 0, "SIGPIPE with MSG_NOSIGNAL");
    same!(sys::write(cx.fd, &[1]), Err(EPIPE), "write once more");
    same!(more::signals(), 1, "SIGPIPE");
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "read at last");
    Ok(())
}

fn sigpipe(cx: &mut Cx) -> Res {
    more::count_signal(libc::SIGPIPE, 0)?;
    sys::shutdown(cx.fd, SHUT_WR)?;
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(EPIPE), "send with MSG_NOSIGNAL");
    same!(more::signals(), 0, "SIGPIPE with MSG_NOSIGNAL");
    same!(sys::write(cx.fd, &[1]), Err(EPIPE), "write");
    same!(more::signals(), 1, "SIGPIPE of write");
    same!(sys::writev(cx.fd, &[1], 1), Err(EPIPE), "writev");
    same!(more::signals(), 2, "SIGPIPE of writev");
    same!(sys::sendmsg(cx.fd, &[1], 1, 0), Err(EPIPE), "sendmsg");
    same!(more::signals(), 3, "SIGPIPE of sendmsg");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "bytes before the end");
    Ok(())
}

/// What a handler is told of the signal.
fn sigpipe_code(cx: &mut Cx) -> Res {
    static CODE: AtomicI32 = AtomicI32::new(77);
    static PID: AtomicI32 = AtomicI32::new(0);
    extern "C" fn note(_: libc::c_int, info: *const libc::siginfo_t) {
        // SAFETY: the kernel's, for a handler with `SA_SIGINFO`.
        unsafe {
            CODE.store((*info).si_code, SeqCst);
            PID.store((*info).si_pid(), SeqCst);
        }
    }
    // SAFETY: a handler of that kind; all-zero is a valid `sigaction`.
    unsafe {
        let mut a: libc::sigaction = std::mem::zeroed();
        (a.sa_sigaction, a.sa_flags) = (note as *const () as usize, libc::SA_SIGINFO);
        same!(libc::sigaction(libc::SIGPIPE, &a, std::ptr::null_mut()), 0, "sigaction");
    }
    sys::shutdown(cx.fd, SHUT_WR)?;
    same!(sys::write(cx.fd, &[1]), Err(EPIPE), "write");
    same!(CODE.load(SeqCst), 0, "si_code: SI_USER");
    same!(PID.load(SeqCst), std::process::id() as i32, "si_pid");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "bytes before the end");
    Ok(())
}

/// Lets the peer close while it has unread data.
fn make_reset(cx: &mut Cx) -> Res {
    cx.send(1000)?;
    same!(cx.tell(Op::Poll, 2000, POLLIN as u64, 0)?, POLLIN as u64, "what the peer polls");
    cx.tell(Op::Close, 0, 0, 0)?;
    Ok(())
}

fn reset_unread(cx: &mut Cx) -> Res {
    make_reset(cx)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Err(ECONNRESET), "read after a reset");
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "the second read");
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(EPIPE), "send after that");
    Ok(())
}

fn reset_unread_poll(cx: &mut Cx) -> Res {
    make_reset(cx)?;
    same!(sys::poll1(cx.fd, POLLIN, 2000)? & POLLERR, POLLERR, "POLLERR");
    same!(sys::poll1(cx.fd, ALL, 0)?, ALL | POLLERR | POLLHUP, "poll after a reset");
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, SO_ERROR)?, ECONNRESET, "SO_ERROR");
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, SO_ERROR)?, 0, "SO_ERROR again");
    same!(sys::poll1(cx.fd, ALL, 0)?, ALL | POLLHUP, "poll when the error was fetched");
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "read after that");
    Ok(())
}

fn reset_after_data(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 500, 0, 0)?;
    cx.arrive(500)?;
    make_reset(cx)?;
    same!(sys::poll1(cx.fd, POLLERR, 2000)? & POLLERR, POLLERR, "POLLERR");
    cx.recv(500)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Err(ECONNRESET), "read after the data");
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "the second read");
    Ok(())
}

fn reset_wakes_recv(cx: &mut Cx) -> Res {
    cx.post(Op::Sleep, 50_000, 0, 0)?;
    cx.post(Op::Linger, 0, 0, 0)?;
    cx.post(Op::Close, 0, 0, 0)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Err(ECONNRESET), "a read that waits");
    Ok(())
}

fn reset_wakes_send(cx: &mut Cx) -> Res {
    cx.fill(4096)?;
    cx.post(Op::Sleep, 50_000, 0, 0)?;
    cx.post(Op::Close, 0, 0, 0)?;
    let b = vec![1; 64 << 20];
    let r = sys::send(cx.fd, &b, MSG_NOSIGNAL);
    let e = match r {
        Ok(_) => sys::send(cx.fd, &b, MSG_NOSIGNAL).err().unwrap_or(0),
        Err(e) => e,
    };
    ensure!(e == ECONNRESET || e == EPIPE, "a send that waits: {r:?}, {}", sys::strerror(e));
    Ok(())
}

fn reset_by_me(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    sys::close(cx.fd)?;
    cx.post(Op::Drain, 0, 0, 0)?;
    same!(cx.answer()?, Err(ECONNRESET), "what the peer reads");
    Ok(())
}

fn linger_0(cx: &mut Cx) -> Res {
    cx.tell(Op::Linger, 0, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Err(ECONNRESET), "read");
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(EPIPE), "send");
    Ok(())
}

/// libnfs sets it before it connects; an accepted connection has its listener's.
fn linger_0_from_before(cx: &mut Cx) -> Res {
    for by_listener in [false, true] {
        let (l, port) = sys::listen(0, 4)?;
        if by_listener {
            sys::set_linger(l, true, 0)?;
        }
        let a = sys::connect_as(port, |fd| if by_listener { Ok(()) } else { sys::set_linger(fd, true, 0) })?;
        let b = sys::accept(l, 0)?;
        let left = has_left(a, b, if cx.is_to_leave() { 200 } else { 1 })?;
        ensure!(left || !cx.is_to_leave(), "the connection has not left TCP");
        let (closes, hears) = if by_listener { (b, a) } else { (a, b) };
        sys::close(closes)?;
        same!(sys::recv(hears, &mut [0; 8], 0), Err(libc::ECONNRESET), "recv then, by_listener {by_listener}");
        sys::close(hears)?;
        sys::close(l)?;
    }
    cx.warm(4, 0)
}

fn linger_0_mine(cx: &mut Cx) -> Res {
    sys::set_linger(cx.fd, true, 0)?;
    sys::close(cx.fd)?;
    cx.post(Op::Drain, 0, 0, 0)?;
    same!(cx.answer()?, Err(ECONNRESET), "what the peer reads");
    Ok(())
}

fn close_pending(cx: &mut Cx) -> Res {
    let n = cx.fill(5000)?;
    sys::close(cx.fd)?;
    util::pause_ms(50);
    same!(cx.tell(Op::SlowRecv, n as u64, 65_536, 100)?, n as u64, "bytes before close");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "bytes after that");
    Ok(())
}

fn shutdown_pending(cx: &mut Cx) -> Res {
    let n = cx.fill(5000)?;
    sys::shutdown(cx.fd, SHUT_WR)?;
    util::pause_ms(30);
    same!(cx.tell(Op::Drain, 0, 0, 0)?, n as u64, "bytes before the end");
    cx.post(Op::Send, 1000, 0, 0)?;
    cx.recv(1000)?;
    Ok(())
}

fn bad_fd(cx: &mut Cx) -> Res {
    sys::close(cx.fd)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Err(libc::EBADF), "read");
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(libc::EBADF), "send");
    same!(sys::poll1(cx.fd, POLLIN, 100)?, libc::POLLNVAL, "poll");
    same!(sys::shutdown(cx.fd, SHUT_WR), Err(libc::EBADF), "shutdown");
    same!(sys::close(cx.fd), Err(libc::EBADF), "close");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads");
    Ok(())
}

/// Polls until a bit is there.
pub(super) fn until(cx: &Cx, bit: i16) -> Res {
    for _ in 0..2000 {
        if sys::poll1(cx.fd, POLLIN | POLLRDHUP, 0)? & bit != 0 {
            return Ok(());
        }
        util::pause_ms(1);
    }
    ensure!(false, "poll never gave {bit:#x}: {:#x}", sys::poll1(cx.fd, POLLIN | POLLRDHUP, 0)?);
    Ok(())
}

fn shut_both_refuses(cx: &mut Cx) -> Res {
    // The peer's program can read nothing any more: the kernel answers what is sent by a reset.
    cx.tell(Op::Shutdown, SHUT_RDWR as u64, 0, 0)?;
    until(cx, POLLRDHUP)?;
    cx.send(100)?;
    until(cx, POLLHUP)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "read: the end had come before");
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(EPIPE), "the next send");
    Ok(())
}

fn shut_both_resets_me(cx: &mut Cx) -> Res {
    sys::shutdown(cx.fd, SHUT_RDWR)?;
    cx.tell(Op::Poll, 2000, POLLRDHUP as u64, 0)?;
    cx.tell(Op::Send, 100, 0, 0)?;
    until(cx, POLLERR)?;
    same!(sys::recv(cx.fd, &mut [0; 4], 0), Err(ECONNRESET), "recv after bytes came that nobody can read");
    same!(sys::recv(cx.fd, &mut [0; 4], 0), Ok(0), "recv then");
    Ok(())
}

fn reset_unread_shut(cx: &mut Cx) -> Res {
    cx.send(100)?;
    cx.tell(Op::Poll, 2000, POLLIN as u64, 0)?;
    cx.tell(Op::Shutdown, SHUT_RD as u64, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    until(cx, POLLHUP)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Err(ECONNRESET), "read");
    Ok(())
}

fn closed_hangs_up(cx: &mut Cx) -> Res {
    cx.tell(Op::Close, 0, 0, 0)?;
    until(cx, POLLRDHUP)?;
    cx.send(100)?;
    until(cx, POLLHUP)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "read: the end had come before");
    same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, SO_ERROR)?, EPIPE, "SO_ERROR");
    Ok(())
}

/// The connection leaves TCP just when one end closes: its last bytes there are unread, and the kernel has not heard yet
/// that they have come.
fn closed_hangs_up_late(_: &mut Cx) -> Res {
    let other = std::thread::spawn(|| util::pause_ms(300));
    let (l, port) = sys::listen(0, 8)?;
    // Of what is shorter and longer than what the ends say to each other.
    for (ms, n) in [(2, 19), (5, 24), (10, 25), (15, 48), (20, 5000)] {
        let (a, b) = (sys::connect(port)?, sys::accept(l, 0)?);
        sys::poll1(a, POLLIN, 0)?;
        for _ in 0..12 {
            same!(sys::send(a, &[1; 8], 0), Ok(8), "send");
            same!(sys::wait1(b, POLLIN, 2000)?, POLLIN, "poll");
            same!(sys::recv(b, &mut [0; 8], 0), Ok(8), "recv");
        }
        same!(sys::send(a, &[2; 402], 0), Ok(402), "send of what nobody reads");
        for _ in 0..ms {
            sys::poll1(b, POLLIN, 0)?;
            util::pause_ms(1);
        }
        sys::close(a)?;
        same!(sys::wait1(b, POLLRDHUP, 2000)? & POLLRDHUP, POLLRDHUP, "poll of the end");
        util::pause_ms(3);
        same!(sys::send(b, &[3; 5000][..n], MSG_NOSIGNAL), Ok(n), "send to who has closed");
        same!(comes_to(b, POLLRDHUP, POLLRDHUP | POLLERR | POLLHUP)?, POLLRDHUP | POLLERR | POLLHUP, "poll of a reset");
        same!(sys::send(b, &[1], MSG_NOSIGNAL), Err(EPIPE), "the next send");
        same!(sys::poll1(b, POLLRDHUP, 0)?, POLLRDHUP | POLLHUP, "poll when the reset was told");
        same!(sys::getsockopt_int(b, libc::SOL_SOCKET, libc::SO_ERROR)?, 0, "SO_ERROR when it was told");
        same!(sys::recv(b, &mut [0; 500], 0), Ok(402), "recv of what came");
        same!(sys::recv(b, &mut [0; 500], 0), Ok(0), "recv of the end");
        sys::close(b)?;
    }
    sys::close(l)?;
    ensure!(other.join().is_ok(), "a thread");
    Ok(())
}

fn send_nothing(cx: &mut Cx) -> Res {
    same!(sys::send(cx.fd, &[], MSG_NOSIGNAL), Ok(0), "send of nothing");
    cx.tell(Op::Close, 0, 0, 0)?;
    until(cx, POLLRDHUP)?;
    same!(sys::send(cx.fd, &[], MSG_NOSIGNAL), Ok(0), "send of nothing after the peer's end");
    cx.send(100)?;
    until(cx, POLLHUP)?;
    same!(sys::send(cx.fd, &[], MSG_NOSIGNAL), Err(EPIPE), "send of nothing after a reset");
    Ok(())
}

fn shutdown_of_reset(cx: &mut Cx) -> Res {
    cx.send(100)?;
    cx.tell(Op::Poll, 2000, POLLIN as u64, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    until(cx, POLLHUP)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Err(ECONNRESET), "read");
    same!(sys::shutdown(cx.fd, SHUT_RDWR), Err(libc::ENOTCONN), "shutdown when the error has been told");
    Ok(())
}

fn recvmmsg_first(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    cx.send(100)?;
    cx.tell(Op::Poll, 2000, POLLIN as u64, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    until(cx, POLLHUP)?;
    same!(sys::recvmmsg(cx.fd, &mut [0; 20], 2, 0), Err(ECONNRESET), "recvmmsg with bytes before the error");
    cx.recv(10)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "read at last");
    Ok(())
}

/// What `poll` says in the end: between TCP and a ring one thing may be told a moment before another.
fn comes_to(fd: i32, events: i16, want: i16) -> sys::R<i16> {
    for _ in 0..2000 {
        if sys::poll1(fd, events, 0)? == want {
            break;
        }
        util::pause_ms(1);
    }
    sys::poll1(fd, events, 0)
}

/// A close at any moment on the way to a ring is an end in order: nothing of the library's is answered by a reset.
fn close_while_looking(cx: &mut Cx) -> Res {
    for i in 0..60 {
        cx.renew()?;
        cx.warm(8 + i % 24, 0)?;
        cx.post(Op::Close, 0, 0, 0)?;
        same!(comes_to(cx.fd, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP)?, POLLIN | POLLRDHUP, "poll of the end");
        util::pause_ms(i % 3);
        same!(sys::poll1(cx.fd, POLLIN | POLLRDHUP, 0)?, POLLIN | POLLRDHUP, "the same a moment later");
        same!(sys::recv(cx.fd, &mut [0; 8], 0), Ok(0), "recv of the end");
        cx.wait()?;
        match i % 5 {
            0 => {
                same!(sys::getsockopt_int(cx.fd, SOL_SOCKET, SO_ERROR), Ok(0), "SO_ERROR");
                same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Ok(1), "send to who has closed");
                const OVER: i16 = POLLIN | POLLERR | POLLHUP;
                same!(comes_to(cx.fd, POLLIN, OVER)?, OVER, "poll after that");
                let again = sys::send(cx.fd, &[1], MSG_NOSIGNAL);
                ensure!(matches!(again, Err(EPIPE | ECONNRESET)), "another send: {again:?}");
            }
            1 => {
                same!(sys::send(cx.fd, &[], MSG_NOSIGNAL), Ok(0), "send of nothing");
                same!(sys::shutdown(cx.fd, SHUT_WR), Ok(()), "shutdown");
                same!(sys::poll1(cx.fd, POLLIN, 0)?, POLLIN | POLLHUP, "poll after that");
            }
            _ => {}
        }
    }
    cx.renew()?;
    cx.warm(6, 0)
}

/// Who has closed the other end himself finds that at once in a set that is as yet unused, also in one that asks for no bytes;
/// and no more after that.
fn close_told_at_once(cx: &mut Cx) -> Res {
    if std::env::var_os("RINGSOCK_CHAOS").is_some() {
        return untried("an end, too, waits for a change of path, and an edge may be told once more after one");
    }
    let is_to_leave = cx.is_to_leave() && !goes_by_rdma();
    for i in 0..12 {
        let (a, b) = pair()?;
        let left = has_left(a, b, if is_to_leave { 40 } else { 2 })?;
        ensure!(left || !is_to_leave, "it never left TCP");
        let ep = sys::epoll_awaited()?;
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, a, (EPOLLET | if i % 2 == 0 { EPOLLRDHUP } else { EPOLLOUT }) as u32, 7)?;
        sys::close(b)?;
        ensure!(events(ep, 0)? != 0, "nothing is told in round {i}");
        same!(events(ep, 0)?, 0, "what is told then");
        sys::close(ep)?;
        sys::close(a)?;
    }
    Ok(())
}
