//! A connection that one thread closes while another sleeps in a call on it: the kernel's call goes on, and the peer is told
//! of nothing until that is over.

use super::basic::ms;
use super::cx::{Cx, Op, Res, Why, IN, OUT};
use super::found::pair;
use super::procs::{child, reap};
use super::waiting::{events, set};
use super::Check;
use crate::{ensure, more, prng, same, sys, util};
use libc::{EAGAIN, EPOLLIN, MSG_NOSIGNAL, MSG_WAITALL, POLLIN, POLLRDHUP, SHUT_RDWR};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc;
use std::thread::{spawn, JoinHandle};
use std::time::{Duration, Instant};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("close-under-a-receive", |cx| under_a_receive(cx, 0, close_and_reuse)),
    ("close-under-a-receive-of-all", |cx| under_a_receive(cx, MSG_WAITALL, close_and_reuse)),
    ("replace-under-a-receive", |cx| under_a_receive(cx, 0, replace)),
    ("close-range-under-a-receive", |cx| under_a_receive(cx, 0, close_range)),
    ("close-another-number-under-a-receive", another_number),
    ("close-under-a-timed-receive", timed),
    ("close-under-a-send", under_a_send),
    ("replace-under-sendfile", |cx| {
        under_pieces(cx, |fd, b| {
            let (file, mut at) = (more::memfile(b)?, 0);
            sys::sendfile(fd, file, &mut at, b.len())
        })
    }),
    ("close-after-a-sendfile-that-waited", after_sendfile),
    ("replace-under-sendmmsg", |cx| under_pieces(cx, |fd, b| Ok(sys::sendmmsg(fd, b, 16, MSG_NOSIGNAL)?.iter().sum()))),
    ("replace-under-splice", |cx| under_pieces(cx, spliced)),
    ("replace-under-an-urgent-byte", |cx| under_pieces(cx, |fd, b| sys::send(fd, b, MSG_NOSIGNAL | libc::MSG_OOB))),
    ("replace-under-recvmmsg", under_recvmmsg),
    ("close-under-a-poll", under_a_poll),
    ("close-under-two-calls", two_calls),
    ("shutdown-and-close-under-calls", shut_and_close),
    ("close-under-a-call-and-fork", and_fork),
    ("close-between-two-forks", between_forks),
    ("close-with-bytes-unread-before-a-child-ends", before_a_child_ends),
    ("close-under-a-call-as-bytes-come", as_bytes_come),
    ("reuse-under-a-poll", reuse_under_a_poll),
    ("close-set-under-a-wait", |cx| set_under_a_wait(cx, close_and_reuse)),
    ("replace-set-under-a-wait", |cx| set_under_a_wait(cx, replace)),
    ("handler-closes-another-number", handler_closes),
    ("replace-by-a-connection-among-threads", by_a_connection),
];

/// Another thread may be on its way into the kernel with the number of a file that a connection takes the place of: so what it
/// would read there is to be the program's.
fn by_a_connection(cx: &mut Cx) -> Res {
    let at = other_file()?;
    let (over, ended) = mpsc::channel::<()>();
    let t = spawn(move || ended.recv());
    sys::dup2(cx.fd, at)?;
    sys::close(std::mem::replace(&mut cx.fd, at))?;
    let before = sys::tcp_bytes(cx.fd)?;
    cx.warm(40, 0)?;
    ensure!(sys::tcp_bytes(cx.fd)? != before, "its bytes are not those of TCP");
    drop(over);
    let _ = t.join();
    Ok(())
}

/// A child that is forked after a connection was closed holds it no more, though another child does and it is still to be
/// brought home for that one: the peer sees the end as soon as that one is gone.
fn between_forks(cx: &mut Cx) -> Res {
    for _ in 0..5 {
        let pipes = [sys::pipe()?, sys::pipe()?];
        let until_told = |(rd, _): (RawFd, RawFd)| {
            child(move || {
                sys::read(rd, &mut [0])?;
                Ok(())
            })
        };
        // What the peer has not read is in the way of the return.
        cx.send(100)?;
        let holds = until_told(pipes[0])?;
        sys::close(cx.fd)?;
        let lives = until_told(pipes[1])?;
        cx.post(Op::Drain, 0, 0, 0)?;
        sys::write(pipes[0].1, b"x")?;
        reap(holds)?;
        let began = Instant::now();
        while !cx.has_answer()? && began.elapsed() < Duration::from_secs(3) {
            util::pause_ms(1);
        }
        let ended = cx.has_answer()?;
        sys::write(pipes[1].1, b"x")?;
        reap(lives)?;
        pipes.into_iter().flat_map(|(rd, wr)| [rd, wr]).try_for_each(sys::close)?;
        ensure!(ended, "the peer saw no end while a child lived that had never had the connection");
        same!(cx.wait()?, 100, "bytes before the end");
        cx.fd = more::open("/dev/null\0", libc::O_RDONLY)?;
        cx.renew()?;
        cx.leave_tcp()?;
    }
    Ok(())
}

/// The last of a family to have a connection ends with bytes unread, which are as old as the connection's last close: a reset,
/// and no end before it.
fn before_a_child_ends(cx: &mut Cx) -> Res {
    for _ in 0..20 {
        cx.tell(Op::Send, 100, 0, 0)?;
        cx.arrive(100)?;
        cx.send(70)?;
        let (rd, wr) = sys::pipe()?;
        let pid = child(move || {
            sys::read(rd, &mut [0])?;
            Ok(())
        })?;
        sys::close(cx.fd)?;
        sys::write(wr, b"x")?;
        reap(pid)?;
        let reset = sys::strerror(libc::ECONNRESET);
        match cx.tell(Op::Drain, 0, 0, 0) {
            Err(Why(why)) if why.contains(&reset) => {}
            other => return Err(Why(format!("a receive of all: {other:?}"))),
        }
        [rd, wr].into_iter().try_for_each(sys::close)?;
        cx.fd = more::open("/dev/null\0", libc::O_RDONLY)?;
        cx.renew()?;
        cx.leave_tcp()?;
    }
    Ok(())
}

fn join<T>(t: JoinHandle<T>) -> Result<T, Why> {
    t.join().map_err(|_| Why("a thread panicked".into()))
}

/// Makes a call in another thread; returns when that sleeps in it.
fn sleeping<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>, Why> {
    let (tell, told) = mpsc::channel();
    let t = spawn(move || {
        // SAFETY: no preconditions.
        let _ = tell.send(unsafe { libc::gettid() });
        call()
    });
    let tid = told.recv().map_err(|_| Why("a thread panicked".into()))?;
    // Not a pause, nor a lock: what a socket is waited for by, in the kernel and on a ring, of this host and of another.
    const FUTEX_WAITV: i64 = 449;
    let calls = [
        FUTEX_WAITV,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
        libc::SYS_recvfrom,
        libc::SYS_recvmsg,
        libc::SYS_sendto,
        libc::SYS_sendmsg,
        libc::SYS_recvmmsg,
        libc::SYS_sendmmsg,
        libc::SYS_sendfile,
        libc::SYS_splice,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait,
        libc::SYS_ppoll,
    ];
    let mut asleep = 0;
    for _ in 0..5000 {
        // The number of the call in which it sleeps, or "running".
        let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/syscall")).map_err(|e| Why(e.to_string()))?;
        let call = text.split(' ').next().and_then(|n| n.parse::<i64>().ok());
        asleep = if call.is_some_and(|n| calls.contains(&n)) { asleep + 1 } else { 0 };
        if asleep == 10 {
            return Ok(t);
        }
        util::pause_ms(1);
    }
    Err(Why("a thread never fell asleep".into()))
}

/// What a receive returned, and its buffer.
type Received = (sys::R<usize>, Vec<u8>);

/// A receive of 100 bytes in another thread, which sleeps.
fn receive(fd: RawFd, flags: i32) -> Result<JoinHandle<Received>, Why> {
    sleeping(move || {
        let mut b = vec![0; 100];
        (sys::recv(fd, &mut b, flags), b)
    })
}

/// What is read by a number that is used again is not the connection's.
fn other_file() -> sys::R<RawFd> {
    let (rd, wr) = sys::pipe()?;
    sys::write_all_fd(wr, &[0xee; 1000])?;
    Ok(rd)
}

fn close_and_reuse(fd: RawFd) -> Res {
    let rd = other_file()?;
    sys::close(fd)?;
    sys::dup2(rd, fd)?;
    Ok(())
}

fn replace(fd: RawFd) -> Res {
    sys::dup2(other_file()?, fd)?;
    Ok(())
}

fn close_range(fd: RawFd) -> Res {
    // SAFETY: plain numbers.
    let r = unsafe { libc::syscall(libc::SYS_close_range, fd, fd, 0) };
    same!(r, 0, "close_range");
    Ok(())
}

/// The peer is told of nothing as yet.
fn nothing_told(cx: &mut Cx) -> Res {
    same!(cx.tell(Op::Poll, 60, (POLLIN | POLLRDHUP) as u64, 0)?, 0, "what the peer is told while the call sleeps");
    Ok(())
}

fn under_a_receive(cx: &mut Cx, flags: i32, close: fn(RawFd) -> Res) -> Res {
    let t = receive(cx.fd, flags)?;
    close(cx.fd)?;
    nothing_told(cx)?;
    let want = prng::bytes(IN, cx.rx, 100);
    cx.tell(Op::Send, 100, 0, 0)?;
    let (r, b) = join(t)?;
    same!(r, Ok(100), "a receive that waited");
    ensure!(b == want, "the bytes differ: {:02x?}", &b[..8]);
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

fn another_number(cx: &mut Cx) -> Res {
    let d = sys::dup(cx.fd)?;
    let t = receive(cx.fd, 0)?;
    close_and_reuse(cx.fd)?;
    let want = prng::bytes(IN, cx.rx, 100);
    cx.tell(Op::Send, 100, 0, 0)?;
    let (r, b) = join(t)?;
    same!(r, Ok(100), "a receive that waited");
    ensure!(b == want, "the bytes differ: {:02x?}", &b[..8]);
    nothing_told(cx)?;
    sys::close(d)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

fn timed(cx: &mut Cx) -> Res {
    let tv = libc::timeval { tv_sec: 0, tv_usec: 300_000 };
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, tv)?;
    let begun = Instant::now();
    let t = receive(cx.fd, 0)?;
    close_and_reuse(cx.fd)?;
    nothing_told(cx)?;
    same!(join(t)?.0, Err(EAGAIN), "a receive whose time is over");
    let took = ms(begun);
    ensure!((300..2000).contains(&took), "it took {took} ms");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

fn under_a_send(cx: &mut Cx) -> Res {
    const MORE: usize = 8 << 20;
    let n = cx.fill(4096)?;
    let (fd, b) = (cx.fd, prng::bytes(OUT, cx.tx, MORE));
    let t = sleeping(move || sys::send(fd, &b, MSG_NOSIGNAL))?;
    close_and_reuse(cx.fd)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, (n + MORE) as u64, "bytes before the end");
    same!(join(t)?, Ok(MORE), "a send that waited");
    Ok(())
}

/// What a call has held it holds no more when it is over, whatever its thread does then.
fn after_sendfile(cx: &mut Cx) -> Res {
    const MORE: usize = 60_000;
    let n = cx.fill(4096)?;
    let (fd, file) = (cx.fd, more::memfile(&prng::bytes(OUT, cx.tx, MORE))?);
    let (done, is_done) = mpsc::channel();
    let (go, goes) = mpsc::channel::<()>();
    let t = sleeping(move || {
        let _ = done.send(sys::sendfile(fd, file, &mut 0, MORE));
        // It makes no other call on a connection.
        let _ = goes.recv();
    })?;
    same!(cx.tell(Op::Recv, (n + MORE) as u64, 0, 0)?, (n + MORE) as u64, "bytes that arrived");
    same!(is_done.recv().map_err(|e| Why(e.to_string()))?, Ok(MORE), "a sendfile that waited");
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Poll, 2000, POLLRDHUP as u64, 0)?, POLLRDHUP as u64, "what the peer is told of the close");
    drop(go);
    join(t)
}

/// A pipe that has as much as it holds moves to a connection.
fn spliced(fd: RawFd, b: &[u8]) -> sys::R<usize> {
    let (rd, wr) = sys::pipe()?;
    let n = b.len().min(64 << 10);
    sys::write_all_fd(wr, &b[..n])?;
    sys::splice(rd, fd, n, 0)
}

/// A call that the library makes of several, or for which the connection goes back to TCP, is about what its number was at
/// its beginning: another connection gets that number while it waits for room, and gets nothing else.
fn under_pieces(cx: &mut Cx, call: fn(RawFd, &[u8]) -> sys::R<usize>) -> Res {
    const MORE: usize = 1 << 20;
    let n = cx.fill(4096)?;
    let (fd, b) = (cx.fd, prng::bytes(OUT, cx.tx, MORE));
    let t = sleeping(move || call(fd, &b))?;
    let (other, far) = pair()?;
    sys::dup2(other, fd)?;
    util::pause_ms(50);
    cx.post(Op::Drain, 0, 0, 0)?;
    let sent = join(t)?.map_err(|e| Why(sys::strerror(e)))?;
    // Of an urgent message the last byte is not in the stream.
    let got = cx.wait()? as usize;
    ensure!(sent > 0 && [n + sent, n + sent - 1].contains(&got), "{n} bytes, and {sent} more: {got} arrived");
    same!(sys::poll1(far, POLLIN, 0), Ok(0), "what came to the connection that has the number");
    [other, far].into_iter().try_for_each(sys::close)?;
    Ok(())
}

/// The same where the first of several messages is there.
fn under_recvmmsg(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 100, 0, 0)?;
    let fd = cx.fd;
    let want = prng::bytes(IN, cx.rx, 300);
    let t = sleeping(move || {
        let mut b = vec![0; 300];
        (sys::recvmmsg(fd, &mut b, 3, MSG_WAITALL), b)
    })?;
    replace(fd)?;
    cx.tell(Op::Send, 200, 0, 0)?;
    let (r, b) = join(t)?;
    same!(r, Ok(vec![100; 3]), "the messages");
    ensure!(b == want, "other bytes came");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

fn under_a_poll(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    let t = sleeping(move || {
        let begun = Instant::now();
        (sys::poll1(fd, POLLIN, 300), ms(begun))
    })?;
    sys::close(cx.fd)?;
    nothing_told(cx)?;
    // When it wakes the kernel looks what has the number.
    let (r, took) = join(t)?;
    same!(r, Ok(libc::POLLNVAL), "a poll whose time is over");
    ensure!((300..2000).contains(&took), "it took {took} ms");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

fn two_calls(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    let p = sleeping(move || sys::poll1(fd, POLLIN, 5000))?;
    let t = receive(fd, MSG_WAITALL)?;
    close_and_reuse(fd)?;
    let want = prng::bytes(IN, cx.rx, 100);
    cx.tell(Op::Send, 10, 0, 0)?;
    util::pause_ms(20);
    nothing_told(cx)?;
    cx.tell(Op::Send, 90, 0, 0)?;
    let (r, b) = join(t)?;
    same!(r, Ok(100), "a receive that waited");
    ensure!(b == want, "the bytes differ: {:02x?}", &b[..8]);
    // The receive may have been quicker than the poll, which then goes on.
    same!(cx.tell(Op::Shutdown, libc::SHUT_WR as u64, 0, 0)?, 0, "shutdown");
    same!(join(p)?, Ok(POLLIN), "a poll that waited: of the file that has the number then");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

fn shut_and_close(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    let p = sleeping(move || sys::poll1(fd, POLLIN, 5000))?;
    let t = receive(fd, 0)?;
    sys::shutdown(fd, SHUT_RDWR)?;
    replace(fd)?;
    same!(join(t)?.0, Ok(0), "a receive that waited");
    // Of the connection, or of the file that has the number then.
    ensure!(join(p)?? & POLLIN != 0, "a poll that waited");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

fn and_fork(cx: &mut Cx) -> Res {
    let t = receive(cx.fd, 0)?;
    sys::close(cx.fd)?;
    // It does not have the connection, so the peer is not to wait for its end.
    let pid = sys::fork()?;
    if pid == 0 {
        util::pause_ms(3000);
        sys::exit(0);
    }
    cx.tell(Op::Send, 100, 0, 0)?;
    same!(join(t)?.0, Ok(100), "a receive that waited");
    let begun = Instant::now();
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    let took = ms(begun);
    sys::kill(pid, libc::SIGKILL)?;
    sys::waitpid(pid)?;
    ensure!(took < 2000, "the peer read the end after {took} ms");
    Ok(())
}

/// The number is given to another file just when the first bytes wake the call: that file is not read, nor waited for.
fn as_bytes_come(cx: &mut Cx) -> Res {
    const ROUNDS: u64 = 120;
    let (l, port) = sys::listen(0, 4)?;
    for i in 0..ROUNDS {
        let a = sys::connect(port)?;
        let (b, file) = (sys::accept(l, 0)?, other_file()?);
        let t = receive(a, MSG_WAITALL)?;
        sys::write_all(b, &[1; 10])?;
        let until = Instant::now() + Duration::from_micros(i % 60);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        sys::dup2(file, a)?;
        util::pause_ms(1);
        sys::write_all(b, &[2; 90])?;
        let (r, got) = join(t)?;
        same!(r, Ok(100), "a receive that waited (round {i})");
        ensure!(got[..10] == [1; 10] && got[10..] == [2; 90], "the bytes differ (round {i}): {got:02x?}");
        same!(sys::fionread(file)?, 1000, "bytes of the other file (round {i})");
        same!(sys::read(b, &mut [0; 4]), Ok(0), "the end of the stream (round {i})");
        for fd in [a, b, file] {
            sys::close(fd)?;
        }
    }
    sys::close(l)?;
    cx.warm(20, 0)
}

/// A number that was no connection when the poll began becomes one that is on a ring, while the poll sleeps for one on TCP.
fn reuse_under_a_poll(cx: &mut Cx) -> Res {
    let (l, port) = sys::listen(0, 4)?;
    let (a, (rd, wr)) = (sys::connect(port)?, sys::pipe()?);
    let b = sys::accept(l, 0)?;
    let t = sleeping(move || {
        let mut p = [a, rd].map(|fd| libc::pollfd { fd, events: POLLIN, revents: 0 });
        (sys::poll(&mut p, 5000), p.map(|p| p.revents))
    })?;
    // The kernel's call goes on with the pipe, too.
    let file = sys::dup(rd)?;
    sys::dup2(cx.fd, rd)?;
    sys::write_all(b, b"x")?;
    same!(join(t)?, (Ok(1), [POLLIN, 0]), "a poll of a connection and a number that was used again");
    for fd in [file, wr, rd, a, b, l] {
        sys::close(fd)?;
    }
    cx.warm(20, 0)
}

/// What [`close_it`] closes.
static NUMBER: AtomicI32 = AtomicI32::new(-1);

extern "C" fn close_it(_: i32) {
    // SAFETY: closing a number is always allowed.
    unsafe { libc::close(NUMBER.load(Ordering::SeqCst)) };
}

/// With `SO_RCVLOWAT` a receive has a wait of its own. A handler closes the number that it was given; the connection has
/// another, and lives.
fn handler_closes(cx: &mut Cx) -> Res {
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 50i32)?;
    let d = sys::dup(cx.fd)?;
    NUMBER.store(d, Ordering::SeqCst);
    let once = libc::itimerval {
        it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 },
        it_value: libc::timeval { tv_sec: 0, tv_usec: 50_000 },
    };
    // SAFETY: `once` is readable, and the handler makes one system call. (The call goes on after it: `SA_RESTART`.)
    unsafe {
        libc::signal(libc::SIGALRM, close_it as extern "C" fn(i32) as libc::sighandler_t);
        libc::setitimer(libc::ITIMER_REAL, &once, std::ptr::null_mut());
    }
    same!(sys::recv(d, &mut [0; 100], 0), Err(libc::EBADF), "a receive that is begun anew by a number that is closed");
    cx.tell(Op::Send, 50, 0, 0)?;
    cx.recv(50)
}

/// How many numbers of epoll sets there are.
fn sets() -> Result<usize, Why> {
    let dir = std::fs::read_dir("/proc/self/fd").map_err(|e| Why(e.to_string()))?;
    let is_set = |e: &std::fs::DirEntry| {
        std::fs::read_link(e.path()).is_ok_and(|to| to.to_string_lossy().ends_with("[eventpoll]"))
    };
    Ok(dir.flatten().filter(is_set).count())
}

/// The last number of an epoll set is closed, or replaced, while a thread waits in it: that is told what comes then.
fn set_under_a_wait(cx: &mut Cx, close: fn(RawFd) -> Res) -> Res {
    let before = sets()?;
    for round in 0..3 {
        let ep = set(cx, EPOLLIN)?;
        let t = sleeping(move || sys::epoll_wait(ep, 8, 3000))?;
        close(ep)?;
        same!(sys::epoll_wait(ep, 8, 0), Err(libc::EINVAL), "a look at what has its number now");
        let other = set(cx, EPOLLIN)?;
        cx.tell(Op::Send, 100, 0, 0)?;
        same!(join(t)?, Ok(vec![(EPOLLIN as u32, 7)]), "what the wait told of");
        same!(events(other, 1000)?, EPOLLIN, "what another set tells of");
        cx.recv(100)?;
        sys::close(other)?;
        sys::close(ep)?;
        same!(sets()?, before, "sets that are open after round {round}");
    }
    cx.warm(20, 5)
}
