//! What processes do with connections that they have inherited, and what becomes of those in the others.

use super::cx::{Cx, Op, Res, Why};
use super::procs::{bye, child, reap};
use super::waiting::{events, set};
use super::Check;
use crate::{ensure, prng, same, sys, util};
use libc::{EPOLLIN, POLLHUP, POLLIN, POLLRDHUP, SHUT_RDWR, SHUT_WR};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering::*};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("family-idle-child", idle_child),
    ("family-child-came-first", child_came_first),
    ("family-parent-polls", parent_polls),
    ("family-epoll-of-both", epoll_of_both),
    ("family-inherited-epoll", inherited_epoll),
    ("family-poll-of-a-parents-set", poll_of_parents_set),
    ("family-daemon-epoll", daemon_epoll),
    ("family-killed-visitor", killed_visitor),
    ("family-killed-holders", killed_holders),
    ("family-killed-parent", killed_parent),
    ("family-parent-closes-at-once", parent_closes_at_once),
    ("family-parent-closes-meanwhile", parent_closes_meanwhile),
    ("family-parent-closes-what-a-set-has", parent_closes_watched),
    ("family-child-half-closes", child_half_closes),
    ("family-peer-closed-before", peer_closed_before),
    ("family-nonblocking-child", nonblocking_child),
    ("family-grandchild", grandchild),
    ("family-forks-in-the-midst", forks_in_the_midst),
    ("family-child-is-refused", child_is_refused),
    ("family-thread-in-child", thread_in_child),
    ("family-thread-polls-in-child", polls_in_child),
];

/// A child that sleeps with all that it has inherited, until it is killed.
fn sleeper() -> Result<libc::pid_t, Why> {
    let pid = sys::fork()?;
    if pid == 0 {
        sys::end_with_parent();
        util::pause_ms(60_000);
        sys::exit(0);
    }
    Ok(pid)
}

fn kill(pid: libc::pid_t) -> Res {
    sys::kill(pid, libc::SIGKILL)?;
    sys::waitpid(pid)?;
    Ok(())
}

fn idle_child(cx: &mut Cx) -> Res {
    // A child that merely has a copy keeps nobody on TCP.
    cx.renew()?;
    let pid = sleeper()?;
    cx.leave_tcp()?;
    cx.post(Op::Send, 300_000, 0, 0)?;
    cx.recv(300_000)?;
    cx.wait()?;
    kill(pid)?;
    cx.leave_tcp()?;
    bye(cx)?;
    Ok(())
}

fn child_came_first(cx: &mut Cx) -> Res {
    // The child was there before the connection left TCP, and uses it afterwards.
    cx.renew()?;
    let (rd, wr) = sys::pipe()?;
    let mut c = cx.with_fd(cx.fd);
    let (far_rd, far_wr) = sys::pipe()?;
    let pid = child(move || {
        let mut at = [0; 16];
        sys::read_exact(rd, &mut at)?;
        c.tx = u64::from_ne_bytes(at[..8].try_into().expect("8 bytes"));
        c.rx = u64::from_ne_bytes(at[8..].try_into().expect("8 bytes"));
        for _ in 0..20 {
            c.send(10_000)?;
            c.recv(10_000)?;
        }
        Ok(sys::write_all_fd(far_wr, b"x")?)
    })?;
    cx.leave_tcp()?;
    sys::write_all_fd(wr, &[cx.tx.to_ne_bytes(), cx.rx.to_ne_bytes()].concat())?;
    cx.tell(Op::Echo, 20, 10_000, 0)?;
    sys::read_exact(far_rd, &mut [0])?;
    cx.tx += 200_000;
    cx.rx += 200_000;
    reap(pid)?;
    cx.warm(20, 0)?;
    cx.leave_tcp()?;
    bye(cx)?;
    Ok(())
}

fn parent_polls(cx: &mut Cx) -> Res {
    // The child takes some bytes away and sends some; the parent waits for its own all the while.
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || {
        c.recv(10_000)?;
        Ok(c.send(10_000)?)
    })?;
    cx.tell(Op::Send, 10_000, 0, 0)?;
    same!(cx.tell(Op::Recv, 10_000, 0, 0)?, 10_000, "bytes of the child");
    (cx.tx, cx.rx) = (cx.tx + 10_000, cx.rx + 10_000);
    reap(pid)?;
    same!(sys::poll1(cx.fd, POLLIN, 0), Ok(0), "poll of what the child has read");
    for _ in 0..10 {
        cx.later(5, 100)?;
        same!(sys::poll1(cx.fd, POLLIN, 3000), Ok(POLLIN), "poll in the parent");
        cx.recv(100)?;
        cx.wait()?;
    }
    cx.leave_tcp()
}

fn epoll_of_both(cx: &mut Cx) -> Res {
    // Parent and child each have a set of their own with the connection in it.
    let ep = set(cx, EPOLLIN)?;
    let (rd, wr) = sys::pipe()?;
    let (seen_rd, seen_wr) = sys::pipe()?;
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || {
        let ep = set(&c, EPOLLIN)?;
        same!(events(ep, 3000)?, EPOLLIN, "events in the child");
        sys::read_exact(seen_rd, &mut [0])?;
        c.recv(1000)?;
        sys::write(wr, b"x")?;
        Ok(())
    })?;
    util::pause_ms(20);
    cx.tell(Op::Send, 1000, 0, 0)?;
    same!(events(ep, 3000)?, EPOLLIN, "events in the parent");
    sys::write(seen_wr, b"x")?;
    sys::read_exact(rd, &mut [0])?;
    cx.rx += 1000;
    same!(events(ep, 0)?, 0, "events in the parent when the child has read it all");
    reap(pid)?;
    for _ in 0..20 {
        cx.later(2, 500)?;
        same!(events(ep, 3000)?, EPOLLIN, "events in the parent alone");
        cx.recv(500)?;
        cx.wait()?;
    }
    cx.leave_tcp()?;
    cx.later(10, 500)?;
    same!(events(ep, 3000)?, EPOLLIN, "events in the end");
    cx.recv(500)
}

fn inherited_epoll(cx: &mut Cx) -> Res {
    // The child waits in the set that its parent has made, and adds nothing to it.
    let ep = set(cx, EPOLLIN)?;
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || {
        for i in 0..10 {
            same!(events(ep, 3000)?, EPOLLIN, "event {i} in the child");
            c.recv(1000)?;
            same!(events(ep, 0)?, 0, "event {i} when it is read");
            c.send(1000)?;
        }
        Ok(())
    })?;
    for _ in 0..10 {
        util::pause_ms(2);
        cx.tell(Op::Send, 1000, 0, 0)?;
        same!(cx.tell(Op::Recv, 1000, 0, 0)?, 1000, "bytes of the child");
    }
    reap(pid)?;
    (cx.tx, cx.rx) = (cx.tx + 10_000, cx.rx + 10_000);
    cx.later(10, 500)?;
    same!(events(ep, 3000)?, EPOLLIN, "events in the parent");
    cx.recv(500)?;
    cx.wait()?;
    cx.leave_tcp()
}

/// Runs `f` in a grandchild whose parent has ended without a word; its status comes by a pipe.
fn orphan(parent_ends: fn(), f: impl FnOnce() -> Res) -> Result<RawFd, Why> {
    let (rd, wr) = sys::pipe()?;
    let middle = sys::fork()?;
    if middle == 0 {
        let pid = sys::fork()?;
        if pid > 0 {
            parent_ends();
        }
        // Until the parent is gone.
        util::pause_ms(30);
        let said = match f() {
            Ok(()) => "ok".into(),
            Err(Why(w)) => w,
        };
        let _ = sys::write_all_fd(wr, said.as_bytes());
        sys::exit(0);
    }
    sys::waitpid(middle)?;
    sys::close(wr)?;
    Ok(rd)
}

fn outcome(rd: RawFd) -> Res {
    let mut b = [0; 300];
    let mut n = 0;
    loop {
        match sys::read(rd, &mut b[n..])? {
            0 => break,
            k => n += k,
        }
    }
    same!(String::from_utf8_lossy(&b[..n]), "ok", "what the orphan says");
    Ok(())
}

fn kill_me() {
    let _ = sys::kill(std::process::id() as i32, libc::SIGKILL);
}

/// A set that is polled before and after a fork, of which the parent was to be told of what its child has taken since.
fn poll_of_parents_set(cx: &mut Cx) -> Res {
    for round in 0..4 {
        cx.renew()?;
        let ep = set(cx, EPOLLIN | libc::EPOLLET)?;
        cx.leave_tcp()?;
        same!(sys::poll1(ep, POLLIN, 0)?, 0, "poll of the set before, round {round}");
        let (hear, tell) = sys::pipe()?;
        let mut c = cx.with_fd(cx.fd);
        let pid = child(move || {
            sys::read_exact(hear, &mut [0])?;
            same!(sys::poll1(ep, POLLIN, 0)?, POLLIN, "poll of the set in the child, round {round}");
            c.recv(10)?;
            for wait in [0, 20, 0] {
                same!(sys::poll1(ep, POLLIN, wait)?, 0, "poll of the set when all is read, round {round}");
            }
            Ok(())
        })?;
        cx.tell(Op::Send, 10, 0, 0)?;
        cx.arrive(10)?;
        sys::write(tell, &[1])?;
        reap(pid)?;
        // What the child has read is not ours to read any more.
        [ep, hear, tell].into_iter().try_for_each(sys::close)?;
    }
    cx.renew()
}

/// A connection that the caller opens, warms up and hands on: the puppet's stream positions begin anew.
fn daemon_epoll(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    let mut c = cx.with_fd(cx.fd);
    let rd = orphan(
        || sys::exit(0),
        move || {
            for i in 0..10 {
                same!(events(ep, 3000)?, EPOLLIN, "event {i} in the daemon");
                c.recv(1000)?;
                c.send(1000)?;
            }
            Ok(())
        },
    )?;
    sys::close(cx.fd)?;
    sys::close(ep)?;
    let mut talk = || -> Res {
        for _ in 0..10 {
            cx.tell(Op::Send, 1000, 0, 0)?;
            same!(cx.tell(Op::Recv, 1000, 0, 0)?, 1000, "bytes of the daemon");
        }
        Ok(())
    };
    let talked = talk();
    // What it has found amiss is why it has ended, if it has.
    outcome(rd).and(talked)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads when the daemon has ended");
    Ok(())
}

fn killed_visitor(cx: &mut Cx) -> Res {
    // A child that has used the connection is killed in the middle of a call on it.
    let mut c = cx.with_fd(cx.fd);
    let (rd, wr) = sys::pipe()?;
    let pid = sys::fork()?;
    if pid == 0 {
        sys::end_with_parent();
        let _ = c.send(1000);
        let _ = sys::write(wr, b"x");
        let _ = sys::read(c.fd, &mut [0; 8]);
        sys::exit(0);
    }
    same!(cx.tell(Op::Recv, 1000, 0, 0)?, 1000, "bytes of the child");
    cx.tx += 1000;
    sys::read_exact(rd, &mut [0])?;
    util::pause_ms(20);
    kill(pid)?;
    cx.warm(20, 0)?;
    cx.leave_tcp()?;
    bye(cx)?;
    Ok(())
}

fn killed_holders(cx: &mut Cx) -> Res {
    // More of them than anybody counts on, and zombies.
    let pids = (0..12).map(|_| sleeper()).collect::<Result<Vec<_>, _>>()?;
    for (i, pid) in pids.iter().enumerate() {
        sys::kill(*pid, libc::SIGKILL)?;
        if i % 2 == 0 {
            sys::waitpid(*pid)?;
        }
    }
    cx.leave_tcp()?;
    util::pause_ms(20);
    bye(cx)?;
    for pid in pids.iter().skip(1).step_by(2) {
        sys::waitpid(*pid)?;
    }
    Ok(())
}

fn killed_parent(cx: &mut Cx) -> Res {
    // The process that has moved the connection is killed; its child goes on with it.
    let mut c = cx.with_fd(cx.fd);
    let far = cx.fd;
    let (port_rd, port_wr) = sys::pipe()?;
    let (go_rd, go_wr) = sys::pipe()?;
    sys::close(far)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    cx.tell(Op::Restart, 0, 0, 0)?;
    let port = cx.expect()?;
    sys::write_all_fd(port_wr, &port.to_ne_bytes())?;
    cx.post(Op::Echo, 100, 16, 0)?;
    let (said_rd, said_wr) = sys::pipe()?;
    let middle = sys::fork()?;
    if middle == 0 {
        let mut run = move || -> Res {
            let mut port = [0; 2];
            sys::read_exact(port_rd, &mut port)?;
            c.fd = c.connect(u16::from_ne_bytes(port))?;
            (c.tx, c.rx) = (0, 0);
            for i in 0..100 {
                c.send(16)?;
                c.recv(16)?;
                if i % 10 == 0 {
                    util::pause_ms(5);
                }
            }
            if sys::fork()? > 0 {
                kill_me();
            }
            sys::read_exact(go_rd, &mut [0])?;
            for _ in 0..20 {
                c.send(5000)?;
                c.recv(5000)?;
            }
            Ok(())
        };
        let said = run().map_or_else(|Why(w)| w, |()| "ok".into());
        let _ = sys::write_all_fd(said_wr, said.as_bytes());
        sys::exit(0);
    }
    sys::close(said_wr)?;
    sys::waitpid(middle)?;
    cx.wait()?;
    util::pause_ms(20);
    cx.post(Op::Echo, 20, 5000, 0)?;
    sys::write(go_wr, b"x")?;
    outcome(said_rd)?;
    same!(cx.wait()?, 20, "messages of the orphan");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads when the orphan has ended");
    Ok(())
}

fn parent_closes_at_once(cx: &mut Cx) -> Res {
    // As a server does that forks for each connection, but late; both directions are full of bytes.
    cx.post(Op::Send, 200_000, 0, 0)?;
    cx.send(200_000)?;
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || {
        c.recv(200_000)?;
        c.send(200_000)?;
        for _ in 0..200 {
            c.send(16)?;
            c.recv(16)?;
        }
        Ok(())
    })?;
    sys::close(cx.fd)?;
    cx.wait()?;
    same!(cx.tell(Op::Recv, 400_000, 0, 0)?, 400_000, "bytes of parent and child");
    same!(cx.tell(Op::Echo, 200, 16, 0)?, 200, "messages of the child");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads when the child has ended");
    reap(pid)
}

fn parent_closes_meanwhile(cx: &mut Cx) -> Res {
    // The connection becomes the child's own while the child changes what its set waits for, as PostgreSQL does with each
    // request, and gives it further numbers and takes them away.
    for round in 0..16 {
        cx.renew()?;
        let mut c = cx.with_fd(cx.fd);
        cx.post(Op::Echo, 300, 16, 0)?;
        let pid = child(move || {
            let ep = set(&c, libc::EPOLLOUT)?;
            for i in 0..300 {
                sys::epoll_ctl(ep, libc::EPOLL_CTL_MOD, c.fd, libc::EPOLLOUT as u32, 7)?;
                same!(events(ep, 3000)?, libc::EPOLLOUT, "events for writing, message {i}");
                c.send(16)?;
                sys::epoll_ctl(ep, libc::EPOLL_CTL_MOD, c.fd, EPOLLIN as u32, 7)?;
                same!(events(ep, 3000)?, EPOLLIN, "events for reading, message {i}");
                c.recv(16)?;
                sys::close(sys::dup(c.fd)?)?;
            }
            Ok(())
        })?;
        sys::close(cx.fd)?;
        same!(cx.wait()?, 300, "messages of child {round}");
        reap(pid)?;
        // A number for `renew` to close.
        cx.fd = sys::epoll_awaited()?;
    }
    Ok(())
}

/// A connection comes home to a set that its parent and a child have, under a number that only the child has: there it is once,
/// and can be changed and taken out.
fn parent_closes_watched(cx: &mut Cx) -> Res {
    for (closes_set, moves_before) in [(true, true), (true, false), (false, true), (false, false)] {
        cx.renew()?;
        if moves_before {
            cx.leave_tcp()?;
        }
        let ep = set(cx, EPOLLIN)?;
        let mut c = cx.with_fd(cx.fd);
        (c.tx, c.rx) = (0, 0);
        let (hear, tell) = sys::pipe()?;
        let pid = child(move || {
            sys::read_exact(hear, &mut [0])?;
            same!(events(ep, 3000)?, EPOLLIN, "events in the child");
            sys::epoll_ctl(ep, libc::EPOLL_CTL_MOD, c.fd, libc::EPOLLOUT as u32, 7)?;
            same!(events(ep, 3000)?, libc::EPOLLOUT, "events when it was changed");
            sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, c.fd, 0, 0)?;
            same!(events(ep, 0)?, 0, "events when it was taken out");
            c.recv(1000)
        })?;
        cx.leave_tcp()?;
        sys::close(cx.fd)?;
        // (In the meantime it comes home, behind the child's back.)
        util::pause_ms(200);
        if closes_set {
            sys::close(ep)?;
        }
        cx.tell(Op::Restart, 0, 0, 0)?;
        cx.tell(Op::Send, 1000, 0, 0)?;
        sys::write(tell, &[1])?;
        reap(pid)?;
        [hear, tell].into_iter().try_for_each(sys::close)?;
        // A number for `renew` to close.
        cx.fd = if closes_set { sys::epoll_awaited()? } else { ep };
    }
    Ok(())
}

fn child_half_closes(cx: &mut Cx) -> Res {
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || {
        c.send(100_000)?;
        sys::shutdown(c.fd, SHUT_WR)?;
        c.recv(100_000)?;
        same!(sys::read(c.fd, &mut [0; 8]), Ok(0), "end of the stream in the child");
        Ok(())
    })?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 100_000, "bytes of the child");
    cx.tell(Op::Send, 100_000, 0, 0)?;
    cx.tell(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    reap(pid)?;
    same!(sys::read(cx.fd, &mut [0; 8]), Ok(0), "end of the stream in the parent");
    Ok(())
}

fn peer_closed_before(cx: &mut Cx) -> Res {
    // What the peer sent before it closed is there for whoever reads first.
    cx.tell(Op::Send, 12_000, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    util::pause_ms(20);
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || c.recv(10_000))?;
    reap(pid)?;
    cx.rx += 10_000;
    cx.recv(2000)?;
    same!(sys::read(cx.fd, &mut [0; 8]), Ok(0), "end of the stream");
    let fd = cx.fd;
    let pid = child(move || {
        same!(sys::read(fd, &mut [0; 8]), Ok(0), "end of the stream in a child");
        Ok(())
    })?;
    reap(pid)
}

fn nonblocking_child(cx: &mut Cx) -> Res {
    sys::nonblock(cx.fd, true)?;
    cx.tell(Op::Send, 5000, 0, 0)?;
    cx.arrive(5000)?;
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || {
        // What is there is there at once.
        let b = c.grab(4000)?;
        same!(b.len(), 4000, "bytes that a child reads without waiting");
        c.take(&b)?;
        same!(sys::fionread(c.fd)?, 1000, "FIONREAD in the child");
        let b = c.grab(4000)?;
        c.take(&b)?;
        same!(c.grab(4000), Err(libc::EAGAIN), "read of nothing in the child");
        same!(sys::send(c.fd, &c.out(1000), 0), Ok(1000), "send in the child");
        Ok(())
    })?;
    reap(pid)?;
    cx.rx += 5000;
    cx.tx += 1000;
    same!(cx.tell(Op::Recv, 1000, 0, 0)?, 1000, "bytes of the child");
    same!(cx.grab(10), Err(libc::EAGAIN), "read of nothing in the parent");
    sys::nonblock(cx.fd, false)?;
    cx.warm(20, 0)
}

fn grandchild(cx: &mut Cx) -> Res {
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || {
        let mut g = c.with_fd(c.fd);
        let pid = child(move || {
            g.recv(50_000)?;
            Ok(g.send(50_000)?)
        })?;
        reap(pid)?;
        (c.tx, c.rx) = (c.tx + 50_000, c.rx + 50_000);
        c.recv(50_000)?;
        Ok(c.send(50_000)?)
    })?;
    cx.tell(Op::Send, 100_000, 0, 0)?;
    same!(cx.tell(Op::Recv, 100_000, 0, 0)?, 100_000, "bytes of child and grandchild");
    reap(pid)?;
    (cx.tx, cx.rx) = (cx.tx + 100_000, cx.rx + 100_000);
    cx.warm(20, 0)?;
    cx.leave_tcp()?;
    bye(cx)?;
    Ok(())
}

fn forks_in_the_midst(cx: &mut Cx) -> Res {
    // Threads move bytes while another one forks children that end in all ways.
    static DONE: AtomicBool = AtomicBool::new(false);
    let (l, port) = sys::listen(0, 8)?;
    let threads: Vec<_> = (0..3u64)
        .map(|i| -> Result<_, Why> {
            let a = sys::connect(port)?;
            let b = sys::accept(l, 0)?;
            let far = std::thread::spawn(move || {
                let mut at = 0;
                let mut m = vec![0; 3000];
                while let Ok(n @ 1..) = sys::read(b, &mut m) {
                    if prng::verify(i, at, &m[..n]).is_err() || sys::write_all(b, &m[..n]).is_err() {
                        return Err(Why("wrong bytes there".into()));
                    }
                    at += n as u64;
                }
                Ok(())
            });
            let near = std::thread::spawn(move || -> Res {
                let (mut at, mut m) = (0, vec![0; 2000]);
                while !DONE.load(Relaxed) {
                    sys::write_all(a, &prng::bytes(i, at, m.len()))?;
                    sys::read_exact(a, &mut m)?;
                    prng::verify(i, at, &m).map_err(|e| Why(e.to_string()))?;
                    at += m.len() as u64;
                }
                sys::shutdown(a, SHUT_WR)?;
                Ok(())
            });
            Ok([near, far])
        })
        .collect::<Result<Vec<_>, _>>()?;
    for i in 0..40 {
        cx.warm(4, 0)?;
        let mut c = cx.with_fd(cx.fd);
        let pid = sys::fork()?;
        if pid == 0 {
            sys::end_with_parent();
            match i % 4 {
                0 => sys::exit(0),
                1 => kill_me(),
                2 => {
                    let _ = c.send(100);
                    sys::exit(0);
                }
                _ => {
                    let _ = sys::close(c.fd);
                    sys::exit(0);
                }
            }
        }
        sys::waitpid(pid)?;
        if i % 4 == 2 {
            same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "bytes of child {i}");
            cx.tx += 100;
        }
        util::pause_ms(2);
    }
    DONE.store(true, Relaxed);
    for t in threads.into_iter().flatten() {
        t.join().map_err(|_| Why("a thread has panicked".into()))??;
    }
    cx.leave_tcp()?;
    ensure!(cx.fd >= 0, "no connection");
    bye(cx)?;
    Ok(())
}

/// The peer takes nothing any more, and has sent what is not read yet: the child's bytes are answered by a reset.
fn child_is_refused(cx: &mut Cx) -> Res {
    cx.send(9000)?;
    cx.tell(Op::Send, 129, 0, 0)?;
    cx.arrive(129)?;
    cx.tell(Op::Shutdown, SHUT_RDWR as u64, 0, 0)?;
    let comes = |bit: i16| -> Res {
        for _ in 0..2000 {
            if sys::poll1(cx.fd, POLLIN | POLLRDHUP, 0)? & bit != 0 {
                return Ok(());
            }
            util::pause_ms(1);
        }
        Err(Why(format!("poll never said {bit:#x}")))
    };
    comes(POLLRDHUP)?;
    let mut c = cx.with_fd(cx.fd);
    reap(child(move || Ok(c.send(876)?))?)?;
    comes(POLLHUP)?;
    cx.recv(129)
}

/// Messages of a child that has a connection for itself, enough for it to move.
const CHILDS: u64 = 300;

/// Sends them, and tells by a pipe that it has.
fn goes_on(c: &mut Cx, told: RawFd) -> Res {
    for i in 0..CHILDS {
        c.send(16)?;
        util::pause_ms(u64::from(i % 8 == 0));
    }
    Ok(sys::write_all_fd(told, b"x")?)
}

/// The child has the connection for itself, and a thread that sleeps in a call on it while the other thread's calls bring it
/// to a ring of the child's own.
fn thread_in_child(cx: &mut Cx) -> Res {
    cx.renew()?;
    let (rd, wr) = sys::pipe()?;
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || {
        let fd = c.fd;
        let t = std::thread::spawn(move || {
            let mut b = vec![0; 100];
            (sys::recv(fd, &mut b, libc::MSG_WAITALL), b)
        });
        util::pause_ms(30);
        goes_on(&mut c, wr)?;
        let (r, b) = t.join().map_err(|_| Why("a thread panicked".into()))?;
        same!(r, Ok(100), "a receive that waited");
        c.take(&b)
    })?;
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Recv, CHILDS * 16, 0, 0)?, CHILDS * 16, "bytes of the child");
    sys::read_exact(rd, &mut [0])?;
    cx.tell(Op::Send, 10, 0, 0)?;
    util::pause_ms(20);
    cx.tell(Op::Send, 90, 0, 0)?;
    reap(pid)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

/// The same of a thread in `poll`.
fn polls_in_child(cx: &mut Cx) -> Res {
    cx.renew()?;
    let (rd, wr) = sys::pipe()?;
    let mut c = cx.with_fd(cx.fd);
    let pid = child(move || {
        let fd = c.fd;
        let t = std::thread::spawn(move || sys::poll1(fd, POLLIN, 5000));
        util::pause_ms(30);
        goes_on(&mut c, wr)?;
        same!(t.join().map_err(|_| Why("a thread panicked".into()))?, Ok(POLLIN), "a poll that waited");
        let b = c.grab(100)?;
        c.take(&b)
    })?;
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Recv, CHILDS * 16, 0, 0)?, CHILDS * 16, "bytes of the child");
    sys::read_exact(rd, &mut [0])?;
    cx.tell(Op::Send, 100, 0, 0)?;
    reap(pid)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}
