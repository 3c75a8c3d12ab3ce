//! `epoll`.

use super::basic::ms;
use super::cx::{between, goes_by_rdma, untried, Cx, Op, Res, Why};
use super::Check;
use crate::{ensure, more, same, sys, util};
use libc::{EPOLLERR, EPOLLET, EPOLLEXCLUSIVE, EPOLLHUP, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDHUP};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, POLLIN, POLLOUT, POLLRDHUP};
use std::os::fd::RawFd;
use std::time::Instant;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("epoll-level", level),
    ("epoll-level-out", |cx| out_after_drain(cx, 0)),
    ("epoll-level-out-of-full-buffer", out_of_full_buffer),
    ("epoll-edge-out", |cx| out_after_drain(cx, EPOLLET)),
    ("more-room", more_room),
    ("more-room-than-usual", more_room_than_usual),
    ("epoll-edge-first", edge_first),
    ("epoll-edge-no-second", edge_no_second),
    ("epoll-edge-new-data", edge_new_data),
    ("epoll-edge-mod", edge_mod),
    ("epoll-edge-to-the-end", edge_drain),
    ("epoll-oneshot", oneshot),
    ("epoll-rdhup", rdhup),
    ("epoll-rdhup-edge", rdhup_edge),
    ("epoll-edge-of-a-threshold", edge_of_a_threshold),
    ("epoll-edge-of-the-end", |cx| edge_of_the_end(cx, 10)),
    ("epoll-edge-of-the-end-behind-bytes", |cx| edge_of_the_end(cx, 4)),
    ("epoll-hup", hup),
    ("epoll-err", err),
    ("epoll-exclusive", exclusive),
    ("epoll-new-one-first", new_one_first),
    ("epoll-two-sets", two_sets),
    ("epoll-a-hundred-sets", hundred_sets),
    ("epoll-nested", nested),
    ("epoll-in-poll", in_poll),
    ("epoll-many-kinds", many_kinds),
    ("epoll-round-robin", round_robin),
    ("epoll-ctl-errors", ctl_errors),
    ("epoll-close-removes", close_removes),
    ("epoll-added-again", added_again),
    ("epoll-timeout", epoll_timeout),
    ("epoll-pwait2", pwait2),
    ("epoll-data", data),
    ("epoll-added-before-traffic", added_early),
];

/// An epoll set with the check's fd in it.
pub fn set(cx: &Cx, events: i32) -> Result<RawFd, Why> {
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, events as u32, 7)?;
    Ok(ep)
}

/// The events of the set's only fd, 0 if there are none in time.
pub fn events(ep: RawFd, ms: i32) -> Result<i32, Why> {
    let v = sys::epoll_wait(ep, 8, ms)?;
    ensure!(v.len() <= 1, "{} events of one fd: {v:?}", v.len());
    ensure!(v.iter().all(|e| e.1 == 7), "wrong data {v:?}");
    Ok(v.first().map_or(0, |e| e.0 as i32))
}

fn level(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    same!(events(ep, 0)?, 0, "events of nothing");
    cx.later(20, 100)?;
    same!(events(ep, 2000)?, EPOLLIN, "events");
    cx.arrive(100)?;
    for _ in 0..3 {
        same!(events(ep, 1000)?, EPOLLIN, "events until it is read");
        cx.recv(30)?;
    }
    cx.recv(10)?;
    same!(events(ep, 20)?, 0, "events when it is read");
    sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, (EPOLLIN | EPOLLOUT) as u32, 7)?;
    same!(events(ep, 1000)?, EPOLLOUT, "events with EPOLLOUT");
    same!(events(ep, 1000)?, EPOLLOUT, "EPOLLOUT again");
    sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, 0, 7)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    same!(events(ep, 20)?, 0, "events with no interest");
    sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, EPOLLIN as u32, 7)?;
    same!(events(ep, 20)?, EPOLLIN, "events with interest again");
    cx.recv(10)
}

fn out_after_drain(cx: &mut Cx, et: i32) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLOUT | et)?;
    same!(events(ep, 1000)?, EPOLLOUT, "events of an idle connection");
    for _ in 0..3 {
        let mut n = cx.fill(4096)?;
        // There may be room once more: the kernel's buffers grow, and a ring is another buffer.
        for _ in 0..50 {
            if events(ep, 40)? == 0 {
                break;
            }
            n += cx.fill(4096)?;
        }
        cx.post(Op::Sleep, 20_000, 0, 0)?;
        cx.post(Op::Recv, n as u64, 0, 0)?;
        same!(events(ep, 3000)?, EPOLLOUT, "events while the peer reads");
        same!(cx.wait()?, n as u64, "bytes that arrived");
        if et == 0 {
            same!(events(ep, 1000)?, EPOLLOUT, "events when the peer has read");
        }
    }
    Ok(())
}

/// The last send took all the room that there was, to the byte: none has failed.
fn out_of_full_buffer(cx: &mut Cx) -> Res {
    let size: libc::c_int = 4096;
    // SAFETY: the option is readable for its length.
    let r = unsafe { libc::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_SNDBUF, (&raw const size).cast(), 4) };
    same!(r, 0, "SO_SNDBUF");
    let ep = set(cx, EPOLLIN | EPOLLOUT)?;
    for each in [4096, 1, 100] {
        let room = cx.fill(each)?;
        same!(cx.tell(Op::Recv, room as u64, 0, 0)?, room as u64, "bytes that arrived");
        same!(events(ep, 3000)?, EPOLLOUT, "events when the peer has read");
        let b = cx.out(room);
        let sent = sys::send(cx.fd, &b, libc::MSG_DONTWAIT)?;
        cx.tx -= (room - sent) as u64;
        events(ep, 20)?;
        cx.post(Op::Sleep, 20_000, 0, 0)?;
        cx.post(Op::Recv, sent as u64, 0, 0)?;
        let mut got = events(ep, 3000)?;
        if got == 0 {
            got = events(ep, 0)?;
        }
        same!(got, EPOLLOUT, "events while the peer reads");
        cx.wait()?;
    }
    Ok(())
}

/// Who speaks on a new connection, and then on one that is on a ring, is heard in that order. (Where connections return at
/// any moment, the old one may be the one by TCP.)
fn new_one_first(cx: &mut Cx) -> Res {
    let moves = std::env::var_os("RINGSOCK_CHAOS").is_some();
    let (l, port) = sys::listen(0, 8)?;
    let pair = || -> sys::R<(RawFd, RawFd)> {
        let client = sys::connect(port)?;
        Ok((client, sys::accept(l, 0)?))
    };
    let ep = sys::epoll_awaited()?;
    let old = pair()?;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, old.1, EPOLLIN as u32, 1)?;
    let mut b = [0; 1];
    for _ in 0..60 {
        sys::write_all(old.0, b"o")?;
        same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "events of the old connection");
        sys::read_exact(old.1, &mut b)?;
        sys::write_all(old.1, b"o")?;
        sys::read_exact(old.0, &mut b)?;
        util::pause_ms(1);
    }
    for round in 0..40 {
        let new = pair()?;
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, new.1, EPOLLIN as u32, 2)?;
        for _ in 0..2 {
            // What was told of stays first in a level-triggered set until somebody finds that there is no more of it.
            same!(sys::epoll_wait(ep, 4, 0)?, [], "events when all is read");
            sys::write_all(new.0, b"n")?;
            sys::write_all(old.0, b"o")?;
            let mut got: Vec<u64> = sys::epoll_wait(ep, 4, 2000)?.iter().map(|e| e.1).collect();
            // What goes to another host may come when the wait is over, and before what goes another way.
            if moves || got.len() == 1 && goes_by_rdma() {
                got = vec![2, 1];
            }
            same!(got, [2, 1], "whose events, in round {round}");
            sys::read_exact(new.1, &mut b)?;
            sys::read_exact(old.1, &mut b)?;
        }
        sys::close(new.0)?;
        sys::close(new.1)?;
    }
    for fd in [l, ep, old.0, old.1] {
        sys::close(fd)?;
    }
    cx.warm(4, 0)
}

/// Sends, `each` bytes at a time, until there is no room for good. The bytes sent.
fn fill_up(cx: &mut Cx, each: usize) -> Result<usize, Why> {
    let (mut n, mut full) = (0, 0);
    // What the sender's buffer holds goes on to the receiver's for a while: less than a segment at the next probe.
    while full < 5 {
        let more = cx.fill(each)?;
        n += more;
        full = if more == 0 { full + 1 } else { 0 };
        util::pause_ms(100);
    }
    Ok(n)
}

/// A larger `SO_SNDBUF` is room for whoever waits for some.
fn more_room(cx: &mut Cx) -> Res {
    // So little that the larger one has room for all of it, also where what a ring held comes back to the kernel's.
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 20_000i32)?;
    let ep = set(cx, EPOLLOUT | EPOLLET)?;
    let n = fill_up(cx, 30_000)?;
    events(ep, 100)?;
    same!(events(ep, 20)?, 0, "events of a full connection");
    let (fd, last) = (cx.fd, cx.out(1));
    let sender = std::thread::spawn(move || sys::send(fd, &last, 0));
    util::pause_ms(50);
    ensure!(!sender.is_finished(), "a send to a full connection does not wait");
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 200_000i32)?;
    same!(sys::poll1(cx.fd, POLLOUT, 3000)?, POLLOUT, "poll with a larger SO_SNDBUF");
    same!(events(ep, 3000)?, EPOLLOUT, "the edge of more room");
    ensure!(matches!(sender.join(), Ok(Ok(1))), "the send that waited for room");
    same!(cx.tell(Op::Recv, n as u64 + 1, 0, 0)?, n as u64 + 1, "bytes that arrived");
    Ok(())
}

/// A buffer that is made larger than what connections usually have takes more all the same.
fn more_room_than_usual(cx: &mut Cx) -> Res {
    let set = |bytes: i32| sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes);
    match set(3 << 20) {
        Err(libc::EPERM) => return untried("only who administers the network may set such buffers"),
        r => r?,
    }
    let n = fill_up(cx, 64 << 10)?;
    let (fd, last) = (cx.fd, cx.out(1));
    let sender = std::thread::spawn(move || sys::send(fd, &last, 0));
    util::pause_ms(50);
    if goes_by_rdma() && sender.is_finished() {
        return untried("memory for the ring was still being registered");
    }
    ensure!(!sender.is_finished(), "a send to a full connection does not wait");
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, 16 << 20)?;
    same!(sys::poll1(cx.fd, POLLOUT, 3000)?, POLLOUT, "poll with a larger SO_SNDBUF");
    ensure!(matches!(sender.join(), Ok(Ok(1))), "the send that waited for room");
    same!(cx.tell(Op::Recv, n as u64 + 1, 0, 0)?, n as u64 + 1, "bytes that arrived");
    Ok(())
}

fn edge_first(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    same!(events(ep, 1000)?, EPOLLIN, "the first event of what is there already");
    same!(events(ep, 20)?, 0, "a second one");
    cx.recv(10)?;
    let ep = set(cx, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET)?;
    same!(events(ep, 1000)?, EPOLLOUT, "the first event of an idle connection");
    same!(events(ep, 20)?, 0, "a second one");
    Ok(())
}

fn edge_no_second(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    for _ in 0..3 {
        cx.later(15, 100)?;
        same!(events(ep, 2000)?, EPOLLIN, "the edge");
        cx.wait()?;
        cx.arrive(100)?;
        same!(events(ep, 30)?, 0, "a second edge without new data");
        cx.recv(50)?;
        same!(events(ep, 30)?, 0, "an edge with the rest unread");
        cx.recv(50)?;
        same!(events(ep, 30)?, 0, "an edge when all is read");
    }
    Ok(())
}

fn edge_new_data(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    for i in 1..6 {
        cx.later(15, 10)?;
        same!(events(ep, 2000)?, EPOLLIN, "the edge of new data behind unread data, round {i}");
        cx.wait()?;
        cx.arrive(10 * i)?;
        same!(events(ep, 20)?, 0, "a second edge, round {i}");
    }
    cx.recv(50)
}

fn edge_mod(cx: &mut Cx) -> Res {
    let e = EPOLLIN | EPOLLET;
    let ep = set(cx, e)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    same!(events(ep, 1000)?, EPOLLIN, "the edge");
    for _ in 0..3 {
        same!(events(ep, 20)?, 0, "a second edge");
        sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, e as u32, 7)?;
        same!(events(ep, 1000)?, EPOLLIN, "the event of unread data after EPOLL_CTL_MOD");
    }
    cx.recv(10)?;
    sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, e as u32, 7)?;
    same!(events(ep, 20)?, 0, "EPOLL_CTL_MOD with nothing unread");
    sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, (e | EPOLLOUT) as u32, 7)?;
    same!(events(ep, 1000)?, EPOLLOUT, "EPOLL_CTL_MOD to EPOLLOUT");
    same!(events(ep, 20)?, 0, "EPOLLOUT again");
    Ok(())
}

fn edge_drain(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLRDHUP | EPOLLET)?;
    let n = 2_000_000;
    cx.post(Op::SendBits, 200, 10_000, 50)?;
    let mut got = 0;
    while got < n {
        same!(events(ep, 2000)?, EPOLLIN, "an edge after {got} bytes");
        loop {
            match cx.grab(30_000) {
                Ok(b) => {
                    got += b.len();
                    cx.take(&b)?;
                }
                Err(libc::EAGAIN) => break,
                Err(e) => return Err(e.into()),
            }
        }
    }
    cx.wait()?;
    same!(got, n, "bytes");
    Ok(())
}

fn oneshot(cx: &mut Cx) -> Res {
    let e = EPOLLIN | EPOLLONESHOT;
    let ep = set(cx, e)?;
    cx.later(15, 10)?;
    same!(events(ep, 2000)?, EPOLLIN, "the event");
    cx.wait()?;
    same!(events(ep, 20)?, 0, "a second one");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(20)?;
    same!(events(ep, 20)?, 0, "one of new data");
    sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, e as u32, 7)?;
    same!(events(ep, 1000)?, EPOLLIN, "the event after EPOLL_CTL_MOD");
    same!(events(ep, 20)?, 0, "a second one after it");
    cx.recv(20)?;
    sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, e as u32, 7)?;
    same!(events(ep, 20)?, 0, "EPOLL_CTL_MOD with nothing there");
    cx.later(15, 10)?;
    same!(events(ep, 2000)?, EPOLLIN, "the event after that");
    cx.wait()?;
    cx.recv(10)
}

fn rdhup(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLRDHUP)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(events(ep, 30)?, 0, "EPOLLRDHUP of data");
    cx.post(Op::Sleep, 20_000, 0, 0)?;
    cx.post(Op::Shutdown, libc::SHUT_WR as u64, 0, 0)?;
    same!(events(ep, 2000)?, EPOLLRDHUP, "EPOLLRDHUP of the end");
    sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, (EPOLLIN | EPOLLOUT | EPOLLRDHUP) as u32, 7)?;
    same!(events(ep, 2000)?, EPOLLIN | EPOLLOUT | EPOLLRDHUP, "all events");
    cx.recv(10)?;
    same!(events(ep, 2000)?, EPOLLIN | EPOLLOUT | EPOLLRDHUP, "all events when all is read");
    Ok(())
}

fn rdhup_edge(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLRDHUP | EPOLLET)?;
    cx.post(Op::Send, 10, 0, 0)?;
    same!(events(ep, 2000)?, EPOLLIN, "the edge of data");
    cx.wait()?;
    end(cx)?;
    same!(events(ep, 2000)?, EPOLLIN | EPOLLRDHUP, "the edge of the end");
    same!(events(ep, 20)?, 0, "a second one");
    cx.recv(10)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "end of the stream");
    Ok(())
}

/// `SO_RCVLOWAT` wakes whoever waits, if what is there is enough.
fn edge_of_a_threshold(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    same!(events(ep, 2000)?, EPOLLIN, "the edge of data");
    same!(events(ep, 20)?, 0, "a second one");
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 5i32)?;
    same!(events(ep, 2000)?, EPOLLIN, "the edge of a threshold that is reached");
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 50i32)?;
    same!(events(ep, 20)?, 0, "one of a threshold that is not");
    // A receive waits for no more than it asks for.
    cx.recv(10)
}

/// Has the peer end its direction. The kernel wakes twice for that, for the state and for what can be read: whoever waits
/// just then may be told twice.
fn end(cx: &mut Cx) -> Res {
    cx.tell(Op::Shutdown, libc::SHUT_WR as u64, 0, 0)?;
    same!(sys::wait1(cx.fd, POLLRDHUP, 2000)?, POLLRDHUP, "poll of the end");
    util::pause_ms(5);
    Ok(())
}

/// A program that was told of 10 bytes, took `n` of them and did not ask for `EPOLLRDHUP`: the end is an edge too.
fn edge_of_the_end(cx: &mut Cx, n: usize) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    same!(events(ep, 2000)?, EPOLLIN, "the edge of data");
    cx.recv(n)?;
    end(cx)?;
    same!(events(ep, 2000)?, EPOLLIN, "the edge of the end");
    same!(events(ep, 20)?, 0, "a second one");
    cx.recv(10 - n)?;
    same!(sys::read(cx.fd, &mut [0; 4]), Ok(0), "end of the stream");
    Ok(())
}

fn hup(cx: &mut Cx) -> Res {
    let ep = set(cx, 0)?;
    sys::shutdown(cx.fd, libc::SHUT_WR)?;
    same!(events(ep, 20)?, 0, "events of my end");
    cx.post(Op::Sleep, 20_000, 0, 0)?;
    cx.post(Op::Close, 0, 0, 0)?;
    same!(events(ep, 2000)?, EPOLLHUP, "EPOLLHUP of both ends");
    Ok(())
}

fn err(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    cx.post(Op::Sleep, 20_000, 0, 0)?;
    cx.post(Op::Linger, 0, 0, 0)?;
    cx.post(Op::Close, 0, 0, 0)?;
    same!(events(ep, 2000)?, EPOLLIN | EPOLLERR | EPOLLHUP, "events of a reset");
    same!(sys::read(cx.fd, &mut [0; 4]), Err(libc::ECONNRESET), "read");
    Ok(())
}

fn exclusive(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLEXCLUSIVE)?;
    let r = sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, EPOLLIN as u32, 7);
    same!(r, Err(libc::EINVAL), "EPOLL_CTL_MOD of an exclusive one");
    cx.later(15, 10)?;
    same!(events(ep, 2000)?, EPOLLIN, "the event");
    cx.wait()?;
    cx.recv(10)?;
    same!(events(ep, 20)?, 0, "one of nothing");
    let add = |events: i32| sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, events as u32, 7);
    same!(add(EPOLLIN | EPOLLEXCLUSIVE), Err(libc::EEXIST), "a second one");
    same!(add(EPOLLIN | EPOLLONESHOT | EPOLLEXCLUSIVE), Err(libc::EINVAL), "a second one that cannot be");
    sys::epoll_ctl(ep, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
    same!(add(EPOLLIN | EPOLLONESHOT | EPOLLEXCLUSIVE), Err(libc::EINVAL), "EPOLLEXCLUSIVE with EPOLLONESHOT");
    Ok(())
}

fn two_sets(cx: &mut Cx) -> Res {
    let (a, b) = (set(cx, EPOLLIN | EPOLLET)?, set(cx, EPOLLIN)?);
    for _ in 0..3 {
        cx.later(15, 10)?;
        same!(events(a, 2000)?, EPOLLIN, "the event of the first set");
        same!(events(b, 2000)?, EPOLLIN, "the event of the second set");
        same!(events(a, 20)?, 0, "a second edge of the first set");
        same!(events(b, 20)?, EPOLLIN, "the second set again");
        cx.wait()?;
        cx.recv(10)?;
        same!(events(b, 20)?, 0, "the second set when all is read");
    }
    sys::epoll_ctl(a, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
    cx.later(15, 10)?;
    same!(events(b, 2000)?, EPOLLIN, "the second set without the first");
    same!(events(a, 20)?, 0, "the first set after EPOLL_CTL_DEL");
    cx.wait()?;
    cx.recv(10)
}

/// More sets than the library has bells, the last of which are seen by another one only.
fn hundred_sets(cx: &mut Cx) -> Res {
    let outer = sys::epoll_awaited()?;
    let sets: Vec<RawFd> = (0..100).map(|_| sys::epoll_awaited()).collect::<Result<_, _>>()?;
    for (i, &ep) in sets.iter().enumerate() {
        let edge = if i % 2 == 0 { EPOLLET } else { 0 };
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, (EPOLLIN | edge) as u32, 7)?;
        if i % 10 == 9 {
            sys::epoll_ctl(outer, EPOLL_CTL_ADD, ep, EPOLLIN as u32, ep as u64)?;
        }
        same!(events(ep, 0)?, 0, "events of set {i} at first");
    }
    for round in 0..3 {
        same!(sys::epoll_wait(outer, 20, 0)?.len(), 0, "sets with events in round {round}, before anything came");
        cx.later(10, 100)?;
        ensure!(!sys::epoll_wait(outer, 20, 2000)?.is_empty(), "no set with an event in round {round}");
        cx.arrive(100)?;
        same!(sys::epoll_wait(outer, 20, 0)?.len(), 10, "sets with events in round {round}");
        for (i, &ep) in sets.iter().enumerate() {
            same!(events(ep, 2000)?, EPOLLIN, "events of set {i} in round {round}");
        }
        cx.recv(100)?;
        for (i, &ep) in sets.iter().enumerate() {
            same!(events(ep, 0)?, 0, "events of set {i} after round {round}");
        }
        cx.wait()?;
    }
    sets.iter().chain([&outer]).try_for_each(|ep| sys::close(*ep))?;
    cx.warm(10, 0)
}

fn nested(cx: &mut Cx) -> Res {
    let inner = set(cx, EPOLLIN)?;
    let outer = sys::epoll_awaited()?;
    sys::epoll_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN as u32, 7)?;
    same!(events(outer, 20)?, 0, "the outer set of nothing");
    for _ in 0..3 {
        cx.later(15, 10)?;
        same!(events(outer, 2000)?, EPOLLIN, "the outer set");
        same!(events(inner, 0)?, EPOLLIN, "the inner set");
        cx.wait()?;
        cx.recv(10)?;
        same!(events(inner, 20)?, 0, "the inner set when all is read");
        same!(events(outer, 20)?, 0, "the outer set when all is read");
    }
    Ok(())
}

fn in_poll(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    same!(sys::poll1(ep, POLLIN, 20)?, 0, "poll of the set");
    for _ in 0..3 {
        cx.later(15, 10)?;
        same!(sys::poll1(ep, POLLIN, 2000)?, POLLIN, "poll of the set with data");
        same!(sys::select(&[ep], &[], 0)?.0, vec![ep], "select of the set with data");
        same!(events(ep, 0)?, EPOLLIN, "the set");
        cx.wait()?;
        cx.recv(10)?;
        same!(sys::poll1(ep, POLLIN, 20)?, 0, "poll of the set when all is read");
    }
    Ok(())
}

fn many_kinds(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    let (ev, (l, _)) = (more::eventfd()?, sys::listen(0, 4)?);
    let ep = sys::epoll_awaited()?;
    for (i, fd) in [cx.fd, rd, ev, l].into_iter().enumerate() {
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN as u32, i as u64)?;
    }
    let ready = |ms| -> Result<Vec<u64>, Why> {
        let mut v: Vec<u64> = sys::epoll_wait(ep, 8, ms)?.into_iter().map(|e| e.1).collect();
        v.sort();
        Ok(v)
    };
    same!(ready(0)?, vec![], "nothing");
    sys::write(ev, &1u64.to_ne_bytes())?;
    same!(ready(1000)?, vec![2], "an eventfd");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    same!(ready(1000)?, vec![0, 2], "eventfd and connection");
    sys::write(wr, b"x")?;
    let port = sys::sockname(l, false)?.1;
    let c = sys::connect(port)?;
    same!(ready(1000)?, vec![0, 1, 2, 3], "all kinds");
    cx.recv(10)?;
    same!(ready(1000)?, vec![1, 2, 3], "all but the connection");
    sys::close(c)?;
    Ok(())
}

fn round_robin(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    let ep = set(cx, EPOLLIN)?;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, rd, EPOLLIN as u32, 8)?;
    sys::write(wr, b"x")?;
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    let mut seen = [0; 2];
    for _ in 0..20 {
        let v = sys::epoll_wait(ep, 1, 1000)?;
        same!(v.len(), 1, "events with room for one");
        seen[(v[0].1 - 7) as usize] += 1;
    }
    ensure!(seen[0] >= 5 && seen[1] >= 5, "one fd starves the other: {seen:?}");
    cx.recv(10)
}

fn ctl_errors(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    let ctl = |op, fd| sys::epoll_ctl(ep, op, fd, EPOLLIN as u32, 7);
    same!(ctl(EPOLL_CTL_ADD, cx.fd), Err(libc::EEXIST), "EPOLL_CTL_ADD twice");
    same!(ctl(EPOLL_CTL_DEL, cx.fd), Ok(()), "EPOLL_CTL_DEL");
    same!(ctl(EPOLL_CTL_DEL, cx.fd), Err(libc::ENOENT), "EPOLL_CTL_DEL twice");
    same!(ctl(EPOLL_CTL_MOD, cx.fd), Err(libc::ENOENT), "EPOLL_CTL_MOD of nothing");
    same!(ctl(EPOLL_CTL_ADD, 900), Err(libc::EBADF), "EPOLL_CTL_ADD of an fd that is not open");
    same!(ctl(77, cx.fd), Err(libc::EINVAL), "an unknown operation");
    same!(sys::epoll_ctl(cx.fd, EPOLL_CTL_ADD, ep, 1, 7), Err(libc::EINVAL), "epoll_ctl on a connection");
    same!(sys::epoll_wait(cx.fd, 4, 0), Err(libc::EINVAL), "epoll_wait on a connection");
    same!(sys::epoll_wait(ep, 0, 0), Err(libc::EINVAL), "epoll_wait for no events");
    same!(ctl(EPOLL_CTL_ADD, cx.fd), Ok(()), "EPOLL_CTL_ADD after EPOLL_CTL_DEL");
    cx.later(15, 10)?;
    same!(events(ep, 2000)?, EPOLLIN, "the event after that");
    cx.wait()?;
    cx.recv(10)
}

fn added_again(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    for _ in 0..3 {
        same!(events(ep, 1000)?, EPOLLIN, "events");
        sys::epoll_ctl(ep, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, EPOLLIN as u32, 7)?;
        same!(events(ep, 1000)?, EPOLLIN, "events when it is added again");
    }
    cx.recv(10)?;
    same!(events(ep, 20)?, 0, "events when it is read");
    Ok(())
}

fn close_removes(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLOUT)?;
    same!(events(ep, 1000)?, EPOLLOUT, "events before close");
    let fd = cx.fd;
    sys::close(fd)?;
    same!(events(ep, 20)?, 0, "events after close");
    let (rd, wr) = sys::pipe()?;
    let (rd, wr) = (sys::dup2(rd, fd)?, wr);
    sys::write(wr, b"x")?;
    same!(events(ep, 20)?, 0, "events of another file with that number");
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, rd, EPOLLIN as u32, 7)?;
    same!(events(ep, 1000)?, EPOLLIN, "events when that is added");
    Ok(())
}

fn epoll_timeout(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    for want in [0, 1, 10, 60, 150] {
        let t = Instant::now();
        same!(events(ep, want)?, 0, "epoll_wait");
        between("epoll_wait", ms(t), want as u64, want as u64 + 30)?;
        let t = Instant::now();
        same!(sys::epoll_pwait(ep, 4, want)?, vec![], "epoll_pwait");
        between("epoll_pwait", ms(t), want as u64, want as u64 + 30)?;
    }
    Ok(())
}

fn pwait2(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    for us in [0, 200, 3000, 50_000] {
        let t = Instant::now();
        let Some(r) = more::epoll_pwait2(ep, 4, us) else { return untried("the kernel has no epoll_pwait2") };
        same!(r?, vec![], "epoll_pwait2");
        let took = t.elapsed().as_micros() as i64;
        ensure!(took >= us, "epoll_pwait2 of {us} us took {took}");
        between("epoll_pwait2", took as u64 / 1000, us as u64 / 1000, us as u64 / 1000 + 30)?;
    }
    cx.later(15, 10)?;
    let Some(r) = more::epoll_pwait2(ep, 4, 2_000_000) else { return untried("the kernel has no epoll_pwait2") };
    same!(r?, vec![(EPOLLIN as u32, 7)], "epoll_pwait2 with data");
    cx.wait()?;
    cx.recv(10)
}

fn data(cx: &mut Cx) -> Res {
    let ep = sys::epoll_awaited()?;
    let mut value = 0xfeed_face_dead_beef_u64;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, EPOLLOUT as u32, value)?;
    for _ in 0..3 {
        same!(sys::epoll_wait(ep, 4, 1000)?, vec![(EPOLLOUT as u32, value)], "event and data");
        value = value.rotate_left(17);
        sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, EPOLLOUT as u32, value)?;
    }
    Ok(())
}

fn added_early(cx: &mut Cx) -> Res {
    // A second connection is added to the set while it is new, and stays there.
    let (l, port) = sys::listen(0, 4)?;
    let a = sys::connect(port)?;
    let b = sys::accept(l, 0)?;
    let ep = sys::epoll_awaited()?;
    for (i, fd) in [a, b].into_iter().enumerate() {
        sys::nonblock(fd, true)?;
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, (EPOLLIN | EPOLLET) as u32, i as u64)?;
    }
    let mut buf = [0; 64];
    for i in 0..400u64 {
        if i % 8 == 0 {
            util::pause_ms(2);
        }
        let (from, to) = if i % 2 == 0 { (a, 1) } else { (b, 0) };
        sys::write_all(from, &[i as u8; 40])?;
        same!(sys::epoll_wait(ep, 4, 2000)?, vec![(EPOLLIN as u32, to)], "event {i}");
        let fd = if to == 1 { b } else { a };
        same!(sys::read(fd, &mut buf), Ok(40), "bytes of message {i}");
        ensure!(buf[..40].iter().all(|&x| x == i as u8), "wrong bytes of message {i}");
    }
    for fd in [a, b] {
        sys::close(fd)?;
    }
    cx.warm(4, 0)
}
