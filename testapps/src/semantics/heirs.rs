//! What a forked child finds of a set that its parent goes on to use, and of an error that another call has seen.

use super::cx::{between, goes_by_rdma, Cx, Op, Res};
use super::procs::{child, reap};
use super::sets::bring_home;
use super::surface::hidden;
use super::waiting::{events, set};
use super::Check;
use crate::{ensure, more, same, sys, util};
use libc::{
    ECONNRESET, EPOLLERR, EPOLLET, EPOLLHUP, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDHUP, MSG_WAITALL, POLLIN,
    POLLRDHUP,
};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, SHUT_RD, SHUT_RDWR, SHUT_WR, SOL_SOCKET, SO_RCVLOWAT};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("set-told-of-room-before-a-fork", told_before),
    ("set-told-of-bytes-after-a-fork", |cx| told_after(cx, false)),
    ("set-told-of-its-own-end-after-a-fork", |cx| told_after(cx, true)),
    ("set-told-of-its-own-end", own_end),
    ("set-told-of-a-reset-behind-its-own-end", reset_behind),
    ("set-added-twice-after-a-return", added_twice),
    ("set-of-a-child-that-shuts", child_shuts),
    ("set-of-a-parent-that-takes-out", taken_out),
    ("set-of-a-parent-that-was-told-once", fired_in_the_parent),
    ("set-that-a-child-was-told-of-once", fired_in_the_child),
    ("set-that-asks-for-room-only", low_water_of_others),
    ("set-that-waits-for-more-after-a-return", low_water_after_a_return),
    ("set-told-of-low-water-by-a-child", low_water_by_a_child),
    ("low-water-of-who-has-closed", low_water_left),
    ("set-that-its-parent-empties-and-closes", emptied_and_closed),
    ("set-that-its-parent-closes-once-it-was-told", told_and_closed),
    ("set-that-its-parent-closes-before-a-ring", closed_before_a_ring),
    ("set-that-its-parent-closes-of-what-a-child-has-closed", closed_by_a_child),
    ("set-that-a-parent-adds-to", added_since),
    ("set-in-a-set-of-a-parent", in_a_set),
    ("set-told-of-a-reset-before-a-fork", told_of_a_reset),
    ("set-told-of-both-ends-before-a-fork", |cx| told_of_both_ends(cx, false)),
    ("set-told-of-both-ends-before-a-return", |cx| told_of_both_ends(cx, true)),
    ("set-that-asks-for-room-while-bytes-come", room_while_bytes_come),
    ("set-that-is-all-a-child-keeps", all_that_is_kept),
    ("set-of-who-shuts-and-is-told-by-a-child", told_by_a_child),
    ("set-of-a-child-that-waits-for-room", waits_for_room),
    ("child-of-who-has-shut-and-left-bytes", left_bytes),
    ("told-by-the-call-after", |cx| error_behind_bytes(cx, false, 10)),
    ("told-by-the-call-after-a-return", |cx| error_behind_bytes(cx, true, 10)),
    ("told-to-who-asks-for-nothing", |cx| error_behind_bytes(cx, true, 0)),
    ("told-by-the-call-after-it-is-passed", passed_behind_bytes),
    ("told-to-a-child-by-the-call-after", inherited_behind_bytes),
    ("passed-back-by-a-child", |cx| passed_by_a_child(cx, 0)),
    ("passed-back-by-a-child-with-bytes-unread", |cx| passed_by_a_child(cx, 300)),
];

/// A child that goes on when it is told.
struct Later {
    pid: libc::pid_t,
    tell: RawFd,
}

impl Later {
    fn fork(f: impl FnOnce() -> Res) -> Result<Later, super::cx::Why> {
        let (rd, tell) = sys::pipe()?;
        let pid = child(move || {
            sys::read_exact(rd, &mut [0])?;
            f()
        })?;
        sys::close(rd)?;
        Ok(Later { pid, tell })
    }

    fn run(self) -> Res {
        sys::write_all_fd(self.tell, &[1])?;
        reap(self.pid)?;
        Ok(sys::close(self.tell)?)
    }
}

/// Neither the set itself nor who polls it is told of anything.
fn is_quiet(ep: RawFd) -> Res {
    for _ in 0..3 {
        same!(sys::poll1(ep, POLLIN, 0)?, 0, "poll of the set");
        same!(events(ep, 20)?, 0, "events");
    }
    Ok(())
}

fn told_before(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLOUT | EPOLLET)?;
    same!(events(ep, 1000)?, EPOLLOUT, "events");
    reap(child(|| is_quiet(ep))?)?;
    is_quiet(ep)?;
    Ok(sys::close(ep)?)
}

/// A child does not wait for a connection to come home that was reset, and is told nothing that its parent was told.
fn told_of_a_reset(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    cx.tell(Op::Linger, 0, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN | EPOLLERR | EPOLLHUP, "events");
    is_quiet(ep)?;
    reap(child(|| {
        let before = std::time::Instant::now();
        is_quiet(ep)?;
        // To wait would take a second.
        between("looking at the set", before.elapsed().as_millis() as u64, 60, 800)
    })?)?;
    is_quiet(ep)?;
    Ok(sys::close(ep)?)
}

/// That the kernel's connection is closed when both directions have ended on the ring is no news.
fn told_of_both_ends(cx: &mut Cx, for_good: bool) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLRDHUP | EPOLLET)?;
    sys::shutdown(cx.fd, SHUT_WR)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    // (The kernel may tell of the end, and of what the end leads to.)
    util::pause_ms(if cx.hosts.are_two() { 500 } else { 20 });
    same!(events(ep, 1000)?, EPOLLIN | EPOLLRDHUP | EPOLLHUP, "events");
    is_quiet(ep)?;
    let two = cx.hosts.are_two();
    let stays_quiet = || {
        if two {
            // The kernel has sent our end only now, and makes an edge when another host acknowledges it, as it does without a
            // ring.
            util::pause_ms(100);
            sys::epoll_wait(ep, 4, 0)?;
        }
        is_quiet(ep)
    };
    if for_good {
        let (rd, wr) = sys::pipe()?;
        same!(sys::splice(cx.fd, wr, 10, 0), Ok(0), "splice of the end");
        sys::close(rd)?;
        sys::close(wr)?;
    } else {
        reap(child(stays_quiet)?)?;
    }
    stays_quiet()?;
    Ok(sys::close(ep)?)
}

/// Who does not ask for bytes is told of none, though they come when the connection has.
fn room_while_bytes_come(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLOUT | EPOLLET)?;
    same!(events(ep, 1000)?, EPOLLOUT, "events");
    reap(child(|| Ok(sys::poll1(cx.fd, POLLIN, 0).map(|_| ())?))?)?;
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    is_quiet(ep)?;
    cx.recv(100)?;
    Ok(sys::close(ep)?)
}

fn told_after(cx: &mut Cx, end: bool) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLRDHUP | EPOLLET)?;
    let later = Later::fork(|| is_quiet(ep))?;
    if end {
        sys::shutdown(cx.fd, SHUT_RD)?;
        same!(events(ep, 1000)?, EPOLLIN | EPOLLRDHUP, "events of the parent");
        later.run()?;
    } else {
        cx.tell(Op::Send, 100, 0, 0)?;
        same!(events(ep, 1000)?, EPOLLIN, "events of the parent");
        later.run()?;
        cx.tell(Op::Send, 50, 0, 0)?;
        same!(events(ep, 1000)?, EPOLLIN, "events of more");
        cx.recv(150)?;
    }
    is_quiet(ep)?;
    Ok(sys::close(ep)?)
}

/// That it moves is no news of the end that the program has made itself; the peer's is.
fn own_end(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLRDHUP | EPOLLET)?;
    sys::shutdown(cx.fd, SHUT_RD)?;
    same!(events(ep, 1000)?, EPOLLIN | EPOLLRDHUP, "events");
    bring_home(cx.fd)?;
    is_quiet(ep)?;
    cx.tell(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN | EPOLLRDHUP, "events when the peer has ended, too");
    is_quiet(ep)?;
    Ok(sys::close(ep)?)
}

/// Who has shut both directions is reset by what comes then.
fn reset_behind(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    sys::shutdown(cx.fd, SHUT_RDWR)?;
    same!(events(ep, 1000)?, EPOLLIN | EPOLLHUP, "events");
    bring_home(cx.fd)?;
    // The kernel tells once more when the peer's has acknowledged it.
    while events(ep, 100)? != 0 {}
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(events(ep, 1000)? & EPOLLHUP, EPOLLHUP, "events of the reset");
    Ok(sys::close(ep)?)
}

/// What is in a set is so whatever was noted when the connection came home before that.
fn added_twice(cx: &mut Cx) -> Res {
    let mut c = cx.with_fd(cx.fd);
    reap(child(move || Ok(c.send(10)?))?)?;
    cx.tx += 10;
    same!(cx.tell(Op::Recv, 10, 0, 0)?, 10, "bytes of the child");
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    reap(child(|| Ok(()))?)?;
    for _ in 0..2 {
        same!(sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, EPOLLIN as u32, 7), Err(libc::EEXIST), "adding it again");
    }
    cx.leave_tcp()?;
    while events(ep, 20)? != 0 {}
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN, "events on a ring");
    cx.recv(10)?;
    Ok(sys::close(ep)?)
}

fn child_shuts(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    let fd = cx.fd;
    let later = Later::fork(|| {
        sys::shutdown(fd, SHUT_RD)?;
        same!(events(ep, 1000)?, EPOLLIN, "events of the child's own end");
        is_quiet(ep)
    })?;
    cx.tell(Op::Send, 100, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN, "events of the parent");
    later.run()?;
    cx.recv(100)?;
    Ok(sys::close(ep)?)
}

/// What the parent has taken out of the set a child adds, and is told of.
fn adds_anew(ep: RawFd, fd: RawFd) -> Res {
    same!(sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN as u32, 8), Ok(()), "adding what the parent has taken out");
    same!(sys::epoll_wait(ep, 4, 1000)?, vec![(EPOLLIN as u32, 8)], "events of the child");
    Ok(())
}

fn taken_out(cx: &mut Cx) -> Res {
    for home in [false, true] {
        let ep = set(cx, EPOLLIN | EPOLLONESHOT)?;
        cx.tell(Op::Send, 100, 0, 0)?;
        same!(events(ep, 1000)?, EPOLLIN, "events");
        if home {
            sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_ZEROCOPY, 1i32)?;
        }
        let fd = cx.fd;
        let later = Later::fork(|| {
            for op in [EPOLL_CTL_MOD, EPOLL_CTL_DEL] {
                same!(sys::epoll_ctl(ep, op, fd, EPOLLIN as u32, 7), Err(libc::ENOENT), "operation {op}, home {home}");
            }
            adds_anew(ep, fd)
        })?;
        sys::epoll_ctl(ep, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
        later.run()?;
        cx.recv(100)?;
        sys::close(ep)?;
    }
    Ok(())
}

fn fired_in_the_parent(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLONESHOT)?;
    let fd = cx.fd;
    let later = Later::fork(|| {
        is_quiet(ep)?;
        same!(sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN as u32, 8), Err(libc::EEXIST), "adding it again");
        Ok(())
    })?;
    cx.tell(Op::Send, 100, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN, "events of the parent");
    later.run()?;
    cx.recv(100)?;
    Ok(sys::close(ep)?)
}

fn fired_in_the_child(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLONESHOT)?;
    let later = Later::fork(|| {
        same!(events(ep, 1000)?, EPOLLIN | EPOLLHUP, "events of the child");
        is_quiet(ep)
    })?;
    sys::shutdown(cx.fd, SHUT_RDWR)?;
    cx.tell(Op::Shutdown, SHUT_RDWR as u64, 0, 0)?;
    util::pause_ms(20);
    later.run()?;
    Ok(sys::close(ep)?)
}

/// Room is news to a child that has found none, though its parent was told of some before.
fn waits_for_room(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLOUT | EPOLLET)?;
    same!(events(ep, 1000)?, EPOLLOUT, "events of the parent");
    let mut c = cx.with_fd(cx.fd);
    cx.post(Op::Sleep, 500_000, 0, 0)?;
    cx.post(Op::Drain, 0, 0, 0)?;
    reap(child(move || {
        let n = c.fill(16 << 10)?;
        while events(ep, 0)? != 0 && c.fill(1)? > 0 {}
        same!(events(ep, 5000)?, EPOLLOUT, "events of room after {n} bytes");
        Ok(sys::shutdown(c.fd, SHUT_WR)?)
    })?)?;
    cx.wait()?;
    Ok(sys::close(ep)?)
}

/// That its parent had shut the connection the child sees in it when it is home, where nothing else says so, and before it
/// reads what had come.
fn left_bytes(cx: &mut Cx) -> Res {
    for i in 0..10 {
        cx.tell(Op::Send, 100, 0, 0)?;
        cx.arrive(100)?;
        sys::shutdown(cx.fd, if i % 2 == 0 { SHUT_RD } else { SHUT_RDWR })?;
        let mut c = cx.with_fd(cx.fd);
        let later = Later::fork(move || {
            for _ in 0..400 {
                if sys::poll1(c.fd, POLLRDHUP, 0)? != 0 {
                    break;
                }
                util::pause_ms(5);
            }
            let polled = sys::poll1(c.fd, POLLIN | POLLRDHUP, 0)?;
            same!(polled & (POLLIN | POLLRDHUP), POLLIN | POLLRDHUP, "what the child polls");
            c.recv(100)
        })?;
        cx.rx += 100;
        put_away(cx.fd)?;
        later.run()?;
        cx.renew()?;
        cx.leave_tcp()?;
    }
    Ok(())
}

/// A changed `SO_RCVLOWAT` wakes who waits for something to read, and nobody else.
fn low_water_of_others(cx: &mut Cx) -> Res {
    let (out, inp) = (set(cx, EPOLLOUT | EPOLLET)?, set(cx, EPOLLIN | EPOLLET)?);
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    same!((events(out, 1000)?, events(inp, 1000)?), (EPOLLOUT, EPOLLIN), "events");
    sys::setsockopt(cx.fd, SOL_SOCKET, SO_RCVLOWAT, 2i32)?;
    same!(events(inp, 1000)?, EPOLLIN, "events of who reads, at another mark");
    is_quiet(out)?;
    cx.recv(10)?;
    [out, inp].into_iter().try_for_each(sys::close)?;
    Ok(())
}

/// Fewer bytes than `SO_RCVLOWAT` wake nobody, whether it was set before the connection came home or after it.
fn low_water_after_a_return(cx: &mut Cx) -> Res {
    for before in [true, false] {
        cx.tell(Op::Send, 10, 0, 0)?;
        cx.arrive(10)?;
        let lowat = |n: i32| sys::setsockopt(cx.fd, SOL_SOCKET, SO_RCVLOWAT, n);
        if before {
            lowat(500)?;
        }
        let fd = cx.fd;
        reap(child(|| {
            same!(sys::poll1(fd, POLLIN, 0)?, if before { 0 } else { POLLIN }, "what the child polls");
            Ok(())
        })?)?;
        lowat(500)?;
        let ep = set(cx, EPOLLIN | EPOLLET)?;
        same!(events(ep, 100)?, 0, "events of few bytes");
        cx.tell(Op::Send, 490, 0, 0)?;
        same!(events(ep, 1000)?, EPOLLIN, "events of enough");
        sys::setsockopt(cx.fd, SOL_SOCKET, SO_RCVLOWAT, 1i32)?;
        cx.recv(500)?;
        sys::close(ep)?;
        cx.leave_tcp()?;
    }
    Ok(())
}

/// The kernel, which alone knows what is left to others, knows how many bytes wake them.
fn low_water_left(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    sys::setsockopt(cx.fd, SOL_SOCKET, SO_RCVLOWAT, 500i32)?;
    let fd = cx.fd;
    let later = Later::fork(|| {
        // What the ends say to each other on the way home is shorter, too.
        let until = Instant::now() + Duration::from_secs(10);
        util::pause_ms(300);
        while hidden::poll(fd, POLLIN, 0) && Instant::now() < until {
            util::pause_ms(10);
        }
        for _ in 0..10 {
            ensure!(!hidden::poll(fd, POLLIN, 10), "few bytes wake who polls by the kernel alone");
        }
        Ok(())
    })?;
    put_away(cx.fd)?;
    later.run()
}

fn low_water_by_a_child(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    cx.tell(Op::Send, 100, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN, "events");
    let fd = cx.fd;
    reap(child(|| Ok(sys::setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, 2i32)?))?)?;
    same!(sys::poll1(ep, POLLIN, 0)?, POLLIN, "poll of the set");
    same!(events(ep, 1000)?, EPOLLIN, "events at another mark");
    is_quiet(ep)?;
    cx.recv(100)?;
    Ok(sys::close(ep)?)
}

fn emptied_and_closed(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    let fd = cx.fd;
    let later = Later::fork(|| adds_anew(ep, fd))?;
    sys::epoll_ctl(ep, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
    sys::close(ep)?;
    cx.tell(Op::Send, 100, 0, 0)?;
    later.run()?;
    cx.recv(100)
}

/// What a parent was told before it closed the set is no news to a child.
fn told_and_closed(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    let later = Later::fork(|| is_quiet(ep))?;
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN, "events");
    sys::close(ep)?;
    later.run()?;
    cx.recv(10)
}

/// A set has what the child has closed itself as long as its parent has it.
fn closed_by_a_child(cx: &mut Cx) -> Res {
    for early in [true, false] {
        let ep = set(cx, EPOLLIN)?;
        let fd = cx.fd;
        let (closed, has_closed) = sys::pipe()?;
        let (go, goes) = sys::pipe()?;
        let pid = child(|| {
            sys::close(fd)?;
            sys::write_all_fd(has_closed, &[1])?;
            sys::read_exact(go, &mut [0])?;
            same!(sys::poll1(ep, POLLIN, 2000)?, POLLIN, "poll of the set");
            same!(events(ep, 1000)?, EPOLLIN, "events");
            Ok(())
        })?;
        sys::read_exact(closed, &mut [0])?;
        if early {
            cx.tell(Op::Send, 100, 0, 0)?;
        }
        sys::close(ep)?;
        if !early {
            cx.tell(Op::Send, 100, 0, 0)?;
        }
        sys::write_all_fd(goes, &[1])?;
        reap(pid)?;
        [closed, has_closed, go, goes].into_iter().try_for_each(sys::close)?;
        cx.recv(100)?;
        cx.renew()?;
        cx.leave_tcp()?;
    }
    Ok(())
}

/// Gives the number to a file that nobody asks for anything.
fn put_away(fd: RawFd) -> Res {
    let null = more::open("/dev/null\0", libc::O_RDONLY)?;
    sys::dup2(null, fd)?;
    Ok(sys::close(null)?)
}

/// What a parent has added since the fork is in the set, though it has closed the number.
fn added_since(cx: &mut Cx) -> Res {
    cx.renew()?;
    cx.leave_tcp()?;
    let (ep, fd) = (sys::epoll_awaited()?, cx.fd);
    let later = Later::fork(|| {
        same!(sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN as u32, 8), Err(libc::EEXIST), "adding it again");
        same!(sys::epoll_wait(ep, 4, 0)?, vec![(EPOLLOUT as u32, 7)], "events");
        same!(sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN as u32, 8), Ok(()), "changing it");
        same!(sys::epoll_wait(ep, 4, 0)?, vec![], "events once it is changed");
        same!(sys::epoll_ctl(ep, EPOLL_CTL_DEL, fd, 0, 0), Ok(()), "taking it out");
        same!(sys::epoll_ctl(ep, EPOLL_CTL_DEL, fd, 0, 0), Err(libc::ENOENT), "taking it out again");
        Ok(())
    })?;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLOUT as u32, 7)?;
    put_away(fd)?;
    later.run()?;
    sys::close(ep)?;
    cx.renew()?;
    cx.leave_tcp()
}

/// A set still has what it had when its parent closed it, though the parent's connection goes on a ring and back after that,
/// and the child's on another.
fn closed_before_a_ring(cx: &mut Cx) -> Res {
    const PIECES: u64 = 10_000;
    cx.renew()?;
    let ep = set(cx, EPOLLIN)?;
    // (The library gives a child no RDMA.)
    let (mut c, ring) = (cx.with_fd(cx.fd), cx.is_to_leave() && !goes_by_rdma());
    let (from, to) = sys::pipe()?;
    let later = Later::fork(move || {
        let mut far = [0; 8];
        sys::read_exact(from, &mut far)?;
        c.rx = u64::from_ne_bytes(far);
        same!(sys::epoll_ctl(ep, EPOLL_CTL_ADD, c.fd, EPOLLIN as u32, 7), Err(libc::EEXIST), "adding it again");
        let mut by_tcp = (0, 0);
        for i in 0..PIECES {
            if i == PIECES - 100 {
                by_tcp = sys::tcp_bytes(c.fd)?;
            }
            same!(events(ep, 5000)?, EPOLLIN, "events of piece {i}");
            c.recv(10)?;
        }
        let at_last = sys::tcp_bytes(c.fd)?;
        ensure!(!ring || at_last == by_tcp, "the child's connection never left TCP");
        Ok(())
    })?;
    sys::close(ep)?;
    cx.leave_tcp()?;
    sys::write_all_fd(to, &cx.rx.to_ne_bytes())?;
    put_away(cx.fd)?;
    cx.post(Op::SendBits, PIECES, 10, 200)?;
    later.run()?;
    cx.wait()?;
    [from, to].into_iter().try_for_each(sys::close)?;
    cx.renew()?;
    cx.leave_tcp()
}

/// A set in a set has nothing for a child, where its parent has read what there was.
fn in_a_set(cx: &mut Cx) -> Res {
    let (inner, outer) = (set(cx, EPOLLIN)?, sys::epoll_awaited()?);
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(events(inner, 1000)?, EPOLLIN, "events");
    sys::epoll_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN as u32, 7)?;
    cx.recv(10)?;
    let later = Later::fork(|| {
        is_quiet(outer)?;
        is_quiet(inner)
    })?;
    later.run()?;
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(events(outer, 1000)?, EPOLLIN, "events of the outer set");
    cx.recv(10)?;
    is_quiet(outer)?;
    [inner, outer].into_iter().try_for_each(|fd| Ok(sys::close(fd)?))
}

/// A child that has the set and not the connection sees nothing in it where nothing has come.
fn all_that_is_kept(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    same!(sys::poll1(ep, POLLIN, 0)?, 0, "poll of the set");
    let fd = cx.fd;
    reap(child(|| {
        sys::close(fd)?;
        is_quiet(ep)
    })?)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN, "events");
    cx.recv(10)?;
    Ok(sys::close(ep)?)
}

/// What a child was told is no news to its parent.
fn told_by_a_child(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLRDHUP | EPOLLET)?;
    cx.tell(Op::Send, 12, 0, 0)?;
    same!(events(ep, 1000)?, EPOLLIN, "events");
    let two = cx.hosts.are_two();
    let later = Later::fork(|| {
        let mut told = events(ep, 1000)?;
        // On a busy machine the bytes take longer home than a call waits for them, and the kernel is told of the end behind
        // them, which may be more than one edge.
        for _ in 0..3 {
            if two && told == EPOLLIN {
                told = events(ep, 10_000)?;
            }
        }
        same!(told, EPOLLIN | EPOLLRDHUP, "events of the child");
        Ok(())
    })?;
    sys::shutdown(cx.fd, SHUT_RD)?;
    later.run()?;
    is_quiet(ep)?;
    cx.recv(12)?;
    is_quiet(ep)?;
    Ok(sys::close(ep)?)
}

/// A receive that has some bytes when the connection is reset leaves the error to the next one, even to one of no bytes.
fn error_behind_bytes(cx: &mut Cx, home: bool, next: usize) -> Res {
    // A close with these unread is a reset.
    cx.send(600)?;
    if home {
        bring_home(cx.fd)?;
    }
    cut_off(cx)?;
    told_next(cx.fd, next)
}

/// A receive of all is cut off by a reset.
fn cut_off(cx: &mut Cx) -> Res {
    cx.later(30, 3)?;
    cx.post(Op::Sleep, 30_000, 0, 0)?;
    cx.post(Op::Close, 0, 0, 0)?;
    let mut b = [0; 10];
    same!(sys::recv(cx.fd, &mut b, MSG_WAITALL), Ok(3), "a receive of all that is cut off");
    cx.take(&b[..3])?;
    cx.wait()?;
    cx.wait()?;
    Ok(())
}

/// The next one is told.
fn told_next(fd: RawFd, n: usize) -> Res {
    let mut b = [0; 10];
    same!(sys::recv(fd, &mut b[..n], 0), Err(ECONNRESET), "the next one");
    same!(sys::recv(fd, &mut b, 0), Ok(0), "the one after that");
    Ok(())
}

/// The error is not lost on the way to who makes the next call.
fn passed_behind_bytes(cx: &mut Cx) -> Res {
    cx.send(600)?;
    cut_off(cx)?;
    let (a, b) = sys::socketpair()?;
    more::send_fd(a, cx.fd)?;
    let got = more::recv_fd(b)?;
    told_next(got, 10)?;
    [a, b, got].into_iter().try_for_each(|fd| Ok(sys::close(fd)?))
}

fn inherited_behind_bytes(cx: &mut Cx) -> Res {
    cx.send(600)?;
    cut_off(cx)?;
    let fd = cx.fd;
    reap(child(|| told_next(fd, 10))?)?;
    same!(sys::recv(fd, &mut [0; 10], 0), Ok(0), "the parent's after the child's");
    Ok(())
}

/// A child that is no more has passed the connection back: what is done by either number is done to one stream.
fn passed_by_a_child(cx: &mut Cx, unread: usize) -> Res {
    cx.tell(Op::Send, unread as u64, 0, 0)?;
    let (a, b) = sys::socketpair()?;
    reap(child(|| Ok(more::send_fd(a, cx.fd)?))?)?;
    let other = more::recv_fd(b)?;
    cx.recv(unread)?;
    // Time and calls enough to leave TCP again.
    cx.warm(400, 60)?;
    for fd in [other, cx.fd, other] {
        let mut by = cx.with_fd(fd);
        by.send(100)?;
        cx.tx = by.tx;
        cx.tell(Op::Recv, 100, 0, 0)?;
    }
    [a, b, other].into_iter().try_for_each(|fd| Ok(sys::close(fd)?))
}
