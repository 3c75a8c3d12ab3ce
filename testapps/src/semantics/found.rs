//! What other projects' test suites found, on connections of their own that are new when they begin.

use super::cx::{Cx, Op, Res, Why};
use super::surface::hidden;
use super::waiting::set;
use super::Check;
use crate::{ensure, same, sys, util};
use libc::{
    ECONNRESET, EPIPE, EPOLLET, EPOLLIN, EPOLL_CTL_ADD, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_ZEROCOPY, POLLERR, POLLHUP,
    POLLIN, POLLOUT, POLLRDHUP, SOL_SOCKET,
};
use std::os::fd::RawFd;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("epoll-by-own-system-calls", |cx| unseen_epoll(cx, 60)),
    ("epoll-by-own-system-calls-among-many-files", among_many),
    ("waits-by-own-system-calls-after-calls-that-block", unseen_waits),
    ("close-with-more-to-come", close_early),
    ("close-answers-what-is-sent-late", sent_late),
    ("close-answers-what-is-sent-just-then", |cx| sent_just_then(cx, false)),
    ("close-answers-what-is-sent-just-then-unread", |cx| sent_just_then(cx, true)),
    ("send-buffer-is-a-bound", send_buffer),
    ("many-pieces-when-new", many_pieces),
    ("poll-of-a-set-of-sets", set_of_sets),
    ("edges-of-a-set-in-a-set", edges_of_a_set),
    ("one-shot-of-a-set-in-a-set", one_shot_of_a_set),
    ("zerocopy-of-the-listener", completions),
];

/// Both ends of a new connection.
pub(super) fn pair() -> Result<(RawFd, RawFd), Why> {
    let (l, port) = sys::listen(0, 4)?;
    let a = sys::connect(port)?;
    let b = sys::accept(l, 0)?;
    sys::close(l)?;
    Ok((a, b))
}

/// So much to and fro that a connection has every reason to move.
pub(super) fn warm(a: RawFd, b: RawFd, rounds: usize) -> Res {
    let mut buf = [0; 16];
    for i in 0..rounds {
        for (from, to) in [(a, b), (b, a)] {
            sys::write_all(from, &[i as u8; 16])?;
            sys::read_exact(to, &mut buf)?;
            same!(buf, [i as u8; 16], "bytes of round {i}");
        }
        if i % 8 == 7 {
            util::pause_ms(3);
        }
    }
    Ok(())
}

/// The same, so many times at most, until it has moved; whether it has.
pub(super) fn has_left(a: RawFd, b: RawFd, times: usize) -> Result<bool, Why> {
    for _ in 0..times {
        let before = sys::tcp_bytes(a)?;
        warm(a, b, 16)?;
        if sys::tcp_bytes(a)? == before {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A system call that no library sees.
fn own_call(n: libc::c_long, a: usize, b: usize, c: usize, d: usize) -> isize {
    // SAFETY: the callers pass what the call expects.
    unsafe { hidden::call(n, [a, b, c, d, 0, 0]) }
}

/// A program that reads and writes by libc, and blocks there, but has an epoll set made by its own system calls.
fn unseen_epoll(cx: &mut Cx, rounds: usize) -> Res {
    let (a, b) = pair()?;
    let ep = own_call(libc::SYS_epoll_create1, 0, 0, 0, 0);
    ensure!(ep >= 0, "epoll_create1: {ep}");
    let mut ev = libc::epoll_event { events: EPOLLIN as u32, u64: 7 };
    let r = own_call(libc::SYS_epoll_ctl, ep as usize, EPOLL_CTL_ADD as usize, b as usize, &raw mut ev as usize);
    same!(r, 0, "epoll_ctl");
    let mut wait = |ms: usize| own_call(libc::SYS_epoll_pwait, ep as usize, &raw mut ev as usize, 1, ms);
    let mut buf = [0; 40];
    for i in (0..rounds).map(|i| i as u8) {
        sys::write_all(a, &[i; 40])?;
        same!(wait(2000), 1, "events in round {i}");
        sys::read_exact(b, &mut buf)?;
        same!(buf, [i; 40], "bytes of round {i}");
        sys::write_all(b, &[i; 40])?;
        sys::read_exact(a, &mut buf)?;
        if i % 8 == 7 {
            util::pause_ms(5);
        }
        same!(wait(0), 0, "events when all is read, round {i}");
    }
    sys::close(ep as RawFd)?;
    sys::close(a)?;
    sys::close(b)?;
    cx.warm(4, 0)
}

/// A program that has only ever blocked in libc, and then waits by its own system calls, of each kind, for bytes and for an end.
fn unseen_waits(cx: &mut Cx) -> Res {
    let mut left = 0;
    for i in 0..6 {
        let (a, b) = pair()?;
        left += u32::from(has_left(a, b, if cx.is_to_leave() { 200 } else { 1 })?);
        match i % 2 {
            0 => sys::write_all(a, &[1; 40])?,
            _ => sys::shutdown(a, libc::SHUT_WR)?,
        }
        let ms = 5000;
        let time = libc::timespec { tv_sec: 5, tv_nsec: 0 };
        let mut p = libc::pollfd { fd: b, events: POLLIN, revents: 0 };
        let found = match i / 2 {
            0 => own_call(libc::SYS_ppoll, &raw mut p as usize, 1, &raw const time as usize, 0),
            1 => {
                let ep = own_call(libc::SYS_epoll_create1, 0, 0, 0, 0) as usize;
                let mut ev = libc::epoll_event { events: EPOLLIN as u32, u64: 7 };
                let r = own_call(libc::SYS_epoll_ctl, ep, EPOLL_CTL_ADD as usize, b as usize, &raw mut ev as usize);
                same!(r, 0, "epoll_ctl");
                let n = own_call(libc::SYS_epoll_pwait, ep, &raw mut ev as usize, 1, ms);
                sys::close(ep as RawFd)?;
                n
            }
            _ => {
                // SAFETY: all zeroes is an empty set.
                let mut set: libc::fd_set = unsafe { std::mem::zeroed() };
                // SAFETY: few fds are open.
                unsafe { libc::FD_SET(b, &mut set) };
                // (The fifth argument is 0: for as long as it takes. Who hangs is ended.)
                own_call(libc::SYS_pselect6, b as usize + 1, &raw mut set as usize, 0, 0)
            }
        };
        same!(found, 1, "who waits by call {} of its own", i / 2);
        let mut buf = [0; 40];
        if i % 2 == 0 {
            sys::read_exact(b, &mut buf)?;
            same!(buf, [1; 40], "bytes");
            sys::shutdown(a, libc::SHUT_WR)?;
        }
        same!(sys::read(b, &mut buf), Ok(0), "the end");
        sys::close(a)?;
        sys::close(b)?;
    }
    ensure!(left >= 3 || !cx.is_to_leave(), "only {left} of 6 connections had left TCP");
    cx.warm(4, 0)
}

/// The same, made right after another connection has left TCP, in a process with so many files that its sets are not
/// looked for each time.
fn among_many(cx: &mut Cx) -> Res {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for both calls.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max.min(20_000);
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
    let (file, _) = sys::pipe()?;
    for _ in 0..limit.rlim_cur / 2 {
        sys::fcntl(file, libc::F_DUPFD, 0)?;
    }
    let (a, b) = pair()?;
    // The sets are listed when it leaves TCP.
    let left = has_left(a, b, if cx.is_to_leave() { 200 } else { 1 })?;
    ensure!(left || !cx.is_to_leave(), "the first connection never left TCP");
    unseen_epoll(cx, 400)?;
    sys::close(a)?;
    sys::close(b)?;
    Ok(())
}

/// One end closes while the other goes on writing: that one must hear of it, at whatever moment of a change
/// of path it was.
fn close_early(cx: &mut Cx) -> Res {
    for round in 0..60 {
        let (a, b) = pair()?;
        sys::nonblock(a, true)?;
        warm_nonblocking(a, b, round % 6)?;
        sys::close(b)?;
        let mut told = false;
        for _ in 0..300 {
            let events = sys::poll1(a, POLLIN | POLLOUT, 100)?;
            told = events & (POLLERR | POLLHUP) != 0
                || (events & POLLIN != 0 && sys::read(a, &mut [0; 64]).unwrap_or(0) == 0)
                || sys::send(a, &[0; 128], MSG_NOSIGNAL).is_err();
            if told {
                break;
            }
            util::pause_ms(5);
        }
        ensure!(told, "round {round}: the peer's end was never seen");
        sys::close(a)?;
    }
    cx.warm(4, 0)
}

/// What is sent to an end that has closed is answered by a reset, whether the sender could know or not, and with bytes of that
/// end's unread or without.
fn sent_late(cx: &mut Cx) -> Res {
    for round in 0..12 {
        cx.renew()?;
        cx.leave_tcp()?;
        let unread = if round % 2 == 0 { 0 } else { 500 };
        cx.tell(Op::Send, unread as u64, 0, 0)?;
        cx.arrive(unread)?;
        cx.tell(Op::Close, 0, 0, 0)?;
        if round % 4 < 2 {
            same!(sys::wait1(cx.fd, POLLRDHUP, 2000)?, POLLRDHUP, "poll at the end, round {round}");
        }
        same!(sys::send(cx.fd, &[1; 10], MSG_NOSIGNAL), Ok(10), "a send to an end that is closed, round {round}");
        same!(sys::wait1(cx.fd, 0, 2000)? & POLLHUP, POLLHUP, "poll then, round {round}");
        same!(sys::send(cx.fd, &[1; 10], MSG_NOSIGNAL), Err(EPIPE), "the next, round {round}");
        cx.recv(unread)?;
        same!(sys::recv(cx.fd, &mut [0; 4], 0), Ok(0), "recv then, round {round}");
    }
    Ok(())
}

/// `b` sends and `a` does not look until what `b` sends moves no more by TCP, and neither does what it gets, or so many times at
/// most. How much has come, and whether it is so.
fn has_left_unread(a: RawFd, b: RawFd, times: usize) -> Result<(usize, bool), Why> {
    let mut n = 0;
    for _ in 0..times {
        let before = (sys::tcp_bytes(a)?, sys::tcp_bytes(b)?);
        for i in 0..16 {
            sys::write_all(a, &[1; 16])?;
            sys::read_exact(b, &mut [0; 16])?;
            sys::write_all(b, &[2; 10])?;
            n += 10;
            if i % 8 == 7 {
                util::pause_ms(3);
            }
        }
        if (sys::tcp_bytes(a)?, sys::tcp_bytes(b)?) == before {
            return Ok((n, true));
        }
    }
    Ok((n, false))
}

/// ... nor does it depend on which of the two comes first. `behind`: what was sent before the connection moved is unread, too.
fn sent_just_then(cx: &mut Cx, behind: bool) -> Res {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    let spin = |n: u32| (0..n).for_each(|_| std::hint::spin_loop());
    let (mut left, times) = (0, if cx.is_to_leave() { 200 } else { 8 });
    for round in 0..60 {
        let (a, b) = pair()?;
        let (before, moved) = if behind { has_left_unread(a, b, times)? } else { (0, has_left(a, b, times)?) };
        left += u32::from(moved);
        let unread = if round % 2 == 0 { 0 } else { 500 };
        sys::write_all(b, &vec![2; unread])?;
        let (ready, go) = (AtomicBool::new(false), AtomicBool::new(false));
        let (sent, closed) = std::thread::scope(|s| {
            let closer = s.spawn(|| {
                ready.store(true, SeqCst);
                while !go.load(SeqCst) {
                    std::hint::spin_loop();
                }
                spin(round % 6 * 20);
                sys::close(b)
            });
            while !ready.load(SeqCst) {
                std::hint::spin_loop();
            }
            go.store(true, SeqCst);
            spin(round / 6 * 20);
            (sys::send(a, &[1; 10], MSG_NOSIGNAL), closer.join())
        });
        same!(sent, Ok(10), "the send of round {round}");
        same!(closed.map_err(|_| Why("the thread".into()))?, Ok(()), "the close of round {round}");
        same!(sys::wait1(a, 0, 2000)? & POLLHUP, POLLHUP, "poll then, round {round}");
        if round % 4 == 2 && !behind {
            let end = sys::recv(a, &mut [0; 4], 0);
            ensure!(matches!(end, Ok(0) | Err(ECONNRESET)), "recv first, round {round}: {end:?}");
        }
        let next = sys::send(a, &[1; 10], MSG_NOSIGNAL);
        ensure!(matches!(next, Err(EPIPE | ECONNRESET)), "the next, round {round}: {next:?}");
        let mut there = vec![0; before + unread];
        sys::read_exact(a, &mut there)?;
        ensure!(there.iter().all(|b| *b == 2), "wrong bytes in round {round}");
        same!(sys::recv(a, &mut [0; 4], 0), Ok(0), "recv then, round {round}");
        sys::close(a)?;
    }
    ensure!(left == 60 || !cx.is_to_leave(), "{left} of 60 connections left TCP");
    cx.warm(4, 0)
}

fn warm_nonblocking(a: RawFd, b: RawFd, rounds: usize) -> Res {
    for _ in 0..rounds {
        sys::send(a, &[0; 128], MSG_NOSIGNAL)?;
        sys::poll1(a, POLLIN | POLLOUT, 100)?;
        sys::read(b, &mut [0; 100])?;
        sys::write(b, &[1])?;
    }
    sys::send(a, &[0; 128], MSG_NOSIGNAL)?;
    Ok(())
}

/// A program that has made its send buffer small must be told to wait soon.
fn send_buffer(cx: &mut Cx) -> Res {
    let (a, b) = pair()?;
    for fd in [a, b] {
        sys::setsockopt(fd, SOL_SOCKET, libc::SO_SNDBUF, 4096i32)?;
        sys::setsockopt(fd, SOL_SOCKET, libc::SO_RCVBUF, 4096i32)?;
    }
    warm(a, b, 40)?;
    let mut taken = 0;
    while taken < 4 << 20 {
        match sys::send(a, &[5; 4096], MSG_NOSIGNAL | MSG_DONTWAIT) {
            Ok(n) => taken += n,
            Err(libc::EAGAIN) => break,
            Err(e) => ensure!(false, "send: {}", sys::strerror(e)),
        }
    }
    ensure!(taken < 256 << 10, "{taken} bytes went into a send buffer of 4 KiB");
    let mut left = taken;
    let mut buf = vec![0; 65536];
    while left > 0 {
        left -= sys::read(b, &mut buf)?;
    }
    sys::close(a)?;
    sys::close(b)?;
    cx.warm(4, 0)
}

/// A blocking `writev` of very many pieces takes them all, on a connection that is new as well.
fn many_pieces(cx: &mut Cx) -> Res {
    let (a, b) = pair()?;
    let bytes: Vec<u8> = (0..1000).map(|i| i as u8).collect();
    let iov: Vec<libc::iovec> =
        bytes.iter().map(|x| libc::iovec { iov_base: (x as *const u8).cast_mut().cast(), iov_len: 1 }).collect();
    for round in 0..40 {
        // SAFETY: the pieces lie in `bytes`, which is only read.
        let n = unsafe { libc::writev(a, iov.as_ptr(), iov.len() as i32) };
        same!(n, 1000, "writev of 1000 pieces, round {round}");
        let mut got = vec![0; 1000];
        sys::read_exact(b, &mut got)?;
        ensure!(got == bytes, "wrong bytes in round {round}");
        sys::write_all(b, &[1])?;
        sys::read_exact(a, &mut got[..1])?;
    }
    sys::close(a)?;
    sys::close(b)?;
    cx.warm(4, 0)
}

/// A set of sets is polled when what was in the inner one is read: random program 2473.
fn set_of_sets(cx: &mut Cx) -> Res {
    for how in [EPOLLIN, EPOLLIN | EPOLLET] {
        let inner = set(cx, EPOLLIN)?;
        let t = std::thread::spawn(move || sys::epoll_wait(inner, 4, 5000));
        util::pause_ms(20);
        let outer = sys::epoll_awaited()?;
        sys::epoll_ctl(outer, EPOLL_CTL_ADD, inner, how as u32, 9)?;
        cx.tell(Op::Send, 42, 0, 0)?;
        let got = t.join().map_err(|_| Why("the thread".into()))?;
        same!(got, Ok(vec![(EPOLLIN as u32, 7)]), "an epoll_wait that waits");
        same!(sys::poll1(outer, POLLIN, 2000)?, POLLIN, "poll before it is read");
        cx.recv(42)?;
        same!(sys::poll1(outer, POLLIN, 0)?, 0, "poll when it is read");
        same!(sys::epoll_wait(outer, 4, 0)?, vec![], "epoll_wait then");
        sys::close(outer)?;
        sys::close(inner)?;
    }
    Ok(())
}

/// A set in another by edges is not told of again and again, but when there is more.
fn edges_of_a_set(cx: &mut Cx) -> Res {
    let inner = set(cx, EPOLLIN)?;
    let outer = sys::epoll_awaited()?;
    sys::epoll_ctl(outer, EPOLL_CTL_ADD, inner, (EPOLLIN | EPOLLET) as u32, 9)?;
    let told = vec![(EPOLLIN as u32, 9)];
    for round in 0..20 {
        for more in [false, true] {
            if more {
                cx.later(2, 14)?;
            } else {
                cx.tell(Op::Send, 28, 0, 0)?;
            }
            same!(sys::epoll_wait(outer, 4, 2000)?, told, "bytes of round {round}, more: {more}");
            // A hint that is found after the bell was rung for it may be told once more, as some kernels do when the inner set
            // is looked at; and what moves, at any time.
            let again: usize = (0..6).map(|_| sys::epoll_wait(outer, 4, 0).map_or(9, |v| v.len())).sum();
            ensure!(again <= 1 || !cx.is_to_leave(), "told {again} times more of the same, in round {round}");
            // Nor is it news that somebody asks how much there is.
            let ask = |_| Ok(sys::fionread(cx.fd).and(sys::epoll_wait(outer, 4, 0))?.len());
            let asked = (0..6).map(ask).sum::<sys::R<usize>>()?;
            ensure!(asked <= 1 || !cx.is_to_leave(), "told {asked} times more for who had asked, in round {round}");
        }
        cx.wait()?;
        cx.recv(42)?;
        same!(sys::epoll_wait(outer, 4, 0)?, vec![], "nothing, in round {round}");
    }
    sys::close(outer)?;
    sys::close(inner)?;
    Ok(())
}

/// So do the virtual threads of a JVM: a set of one-shots, which is a one-shot in another set whenever it has nothing.
fn one_shot_of_a_set(cx: &mut Cx) -> Res {
    const ONCE: u32 = (EPOLLIN | libc::EPOLLONESHOT) as u32;
    for _ in 0..4 {
        let (a, b) = pair()?;
        let server = std::thread::spawn(move || -> Res {
            let mut buf = [0; 16];
            while sys::recv(b, &mut buf, libc::MSG_WAITALL)? == 16 {
                util::pause_ms(2);
                sys::write_all(b, &buf)?;
            }
            Ok(sys::close(b)?)
        });
        sys::nonblock(a, true)?;
        let (inner, outer) = (sys::epoll_awaited()?, sys::epoll_awaited()?);
        sys::epoll_ctl(inner, EPOLL_CTL_ADD, a, 0, 5)?;
        sys::epoll_ctl(outer, EPOLL_CTL_ADD, inner, 0, 6)?;
        for round in 0..60u8 {
            sys::write_all(a, &[round; 16])?;
            let mut buf = [0; 16];
            while sys::recv(a, &mut buf, 0) == Err(libc::EAGAIN) {
                sys::epoll_ctl(inner, libc::EPOLL_CTL_MOD, a, ONCE, 5)?;
                while sys::epoll_wait(inner, 4, 0)?.is_empty() {
                    sys::epoll_ctl(outer, libc::EPOLL_CTL_MOD, inner, ONCE, 6)?;
                    same!(
                        sys::epoll_wait(outer, 4, 5000)?,
                        vec![(EPOLLIN as u32, 6)],
                        "the inner set, in round {round}"
                    );
                    same!(sys::epoll_wait(outer, 4, 0)?, vec![], "a one-shot that has fired, in round {round}");
                }
            }
            same!(buf, [round; 16], "bytes of round {round}");
        }
        for fd in [inner, outer, a] {
            sys::close(fd)?;
        }
        server.join().map_err(|_| Why("the server".into()))??;
    }
    cx.warm(4, 0)
}

/// Both ends had `SO_ZEROCOPY` before there was a connection, and nobody takes the completions of what was sent: these are
/// nothing to read, and no reason to end a call early.
fn completions(cx: &mut Cx) -> Res {
    const LONG: usize = 300_000;
    let on = |fd| sys::setsockopt(fd, SOL_SOCKET, libc::SO_ZEROCOPY, 1i32);
    for round in 0..40 {
        let (l, port) = sys::listen(0, 4)?;
        on(l)?;
        let a = sys::connect_as(port, on)?;
        let b = sys::accept(l, 0)?;
        sys::close(l)?;
        // The kernel may come to the bytes long after the call.
        let (bytes, long): (&[[u8; 16]; 12], Vec<u8>) = (&std::array::from_fn(|i| [i as u8; 16]), vec![9; LONG]);
        let answers = *bytes;
        let peer = std::thread::spawn(move || -> sys::R<()> {
            let mut buf = vec![0; LONG];
            for (i, answer) in answers.iter().enumerate() {
                sys::read_exact(a, &mut buf[..16])?;
                util::pause_ms(1);
                for half in [8, 8] {
                    sys::send(a, &answer[..half], MSG_ZEROCOPY)?;
                    util::pause_ms(u64::from(i == 6));
                }
                if i % 4 == 3 {
                    sys::read_exact(a, &mut buf)?;
                }
            }
            // All of it has come with the end.
            sys::shutdown(a, libc::SHUT_WR)?;
            match sys::read(a, &mut buf[..1])? {
                0 => Ok(()),
                _ => Err(libc::EPROTO),
            }
        });
        for (i, sent) in bytes.iter().enumerate() {
            same!(sys::send(b, sent, MSG_ZEROCOPY), Ok(16), "send {i} of round {round}");
            let mut buf = [0; 16];
            // Until there is something the completions alone are told.
            loop {
                let events = sys::poll1(b, POLLIN, 5000)?;
                ensure!(events != 0, "nothing came in answer {i} of round {round}");
                if events & POLLIN != 0 {
                    break;
                }
            }
            if i % 2 == 0 {
                same!(sys::recv(b, &mut buf[..1], MSG_DONTWAIT), Ok(1), "recv {i} of round {round}, polled");
                sys::read_exact(b, &mut buf[1..])?;
            } else {
                same!(sys::recv(b, &mut buf, libc::MSG_WAITALL), Ok(16), "recv {i} of round {round}, whole");
            }
            same!(buf, [i as u8; 16], "bytes of answer {i} of round {round}");
            if i % 4 == 3 {
                same!(sys::send(b, &long, MSG_ZEROCOPY), Ok(LONG), "a long send, {i} of round {round}");
            }
        }
        sys::shutdown(b, libc::SHUT_WR)?;
        ensure!(matches!(peer.join(), Ok(Ok(()))), "the peer's thread, round {round}");
        sys::close(a)?;
        sys::close(b)?;
    }
    cx.warm(4, 0)
}
