//! In which order a set tells of connections that become ready one after the other, to a program that is its own peer.

use super::cx::{goes_by_rdma, untried, Cx, Res, Why};
use super::found::{has_left, pair};
use super::Check;
use crate::prng::Rng;
use crate::{ensure, same, sys};
use libc::{
    EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, MSG_DONTWAIT, POLLIN,
};
use std::os::fd::RawFd;
use std::time::Instant;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("own-connections-in-order", |cx| in_order(cx, false)),
    ("own-connections-in-order-just-added", |cx| in_order(cx, true)),
    ("own-connections-each-in-its-turn", in_turn),
    ("own-connections-in-the-kernels-order", |cx| as_the_kernel(cx, 0)),
    ("own-connections-in-the-kernels-order-one-shot", |cx| as_the_kernel(cx, EPOLLONESHOT)),
    ("own-connections-in-the-kernels-order-edges", |cx| as_the_kernel(cx, EPOLLET)),
];

/// What [`told`] calls the three connections.
const OLD: u64 = 1;
const OTHER: u64 = 2;
const BY_TCP: u64 = 3;

/// Which connections `ep` tells of.
fn told(ep: RawFd, max: usize) -> Result<Vec<u64>, Why> {
    Ok(sys::epoll_wait(ep, max, 0)?.iter().map(|e| e.1).collect())
}

/// Two connections on rings and a new one, which is on TCP yet, become ready in some order, by bytes and by an end.
/// `late`: the set has not been asked since it got them, and the new one has nothing to say.
fn in_order(cx: &mut Cx, late: bool) -> Res {
    if std::env::var_os("RINGSOCK_CHAOS").is_some() {
        return untried("what is sent in the middle of a change of path may come later than what is sent after it");
    }
    if goes_by_rdma() {
        return untried("what goes by an adapter arrives when it does");
    }
    let is_to_leave = cx.is_to_leave();
    let times = if is_to_leave { 40 } else { 2 };
    for (round, first) in [OLD, OTHER, BY_TCP].into_iter().cycle().take(12).enumerate() {
        let ([a, a_peer], [b, b_peer]) = (ends()?, ends()?);
        let left = has_left(a, a_peer, times)? && has_left(b, b_peer, times)?;
        ensure!(left || !is_to_leave, "they never left TCP");
        let ep = sys::epoll_awaited()?;
        let add = |fd, name| sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN as u32, name);
        // (Not in the order in which they become ready.)
        add(b, OTHER)?;
        add(a, OLD)?;
        let [c, c_peer] = ends()?;
        add(c, BY_TCP)?;
        // (A connection that is made is something by TCP, too: then that goes first.)
        let n = if late { 2 } else { 3 };
        if !late {
            same!(told(ep, 8)?, vec![], "what is told before");
        }
        let order: Vec<u64> = (0..3).map(|i| (first - 1 + i) % 3 + 1).filter(|which| *which <= n).collect();
        for which in &order {
            let (here, there) = [(a, a_peer), (b, b_peer), (c, c_peer)][*which as usize - 1];
            match *which {
                // An end comes as bytes do.
                OLD if round % 2 == 1 => sys::shutdown(there, libc::SHUT_WR)?,
                _ => sys::write_all(there, b"x")?,
            }
            // (A busy kernel may be a moment late.)
            same!(sys::wait1(here, POLLIN, 2000)?, POLLIN, "poll of what has come");
        }
        let told = told(ep, 8)?;
        ensure!(told == order, "{told:?} are told of in round {round}, which became ready as {order:?}");
        [ep, a, a_peer, b, b_peer, c, c_peer].into_iter().try_for_each(sys::close)?;
    }
    Ok(())
}

fn ends() -> Result<[RawFd; 2], Why> {
    let (a, b) = pair()?;
    Ok([a, b])
}

/// Two connections always have something to read, and a third has room again: who asks for one event at a time hears of it, too.
fn in_turn(cx: &mut Cx) -> Res {
    let is_to_leave = cx.is_to_leave() && !goes_by_rdma();
    let ep = sys::epoll_awaited()?;
    let mut fds = vec![];
    for name in [OLD, OTHER, BY_TCP] {
        let [a, b] = ends()?;
        let left = has_left(a, b, if is_to_leave { 40 } else { 2 })?;
        ensure!(left || !is_to_leave, "they never left TCP");
        let events = if name == BY_TCP { EPOLLOUT } else { EPOLLIN };
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, a, events as u32, name)?;
        if name == BY_TCP {
            while sys::send(a, &[0; 4096], MSG_DONTWAIT).is_ok() {}
        } else {
            sys::write_all(b, b"x")?;
        }
        fds.extend([a, b]);
    }
    for _ in 0..10 {
        ensure!(!sys::epoll_wait(ep, 1, 1000)?.is_empty(), "nothing is told");
    }
    let began = Instant::now();
    let mut got = [0; 65536];
    while !told(ep, 1)?.contains(&BY_TCP) {
        ensure!(began.elapsed().as_secs() < 3, "nobody tells that there is room");
        let _ = sys::recv(fds[5], &mut got, MSG_DONTWAIT);
    }
    fds.into_iter().chain([ep]).try_for_each(sys::close)?;
    Ok(())
}

/// The same is done to connections in one set and to pairs of Unix sockets, which never leave the kernel, in another, at
/// random: both sets tell the same in the same order. `how`: `EPOLLET` or `EPOLLONESHOT`, or level-triggered.
fn as_the_kernel(cx: &mut Cx, how: i32) -> Res {
    const PAIRS: usize = 4;
    const STEPS: usize = 30_000;
    if std::env::var_os("RINGSOCK_CHAOS").is_some() {
        return untried("what is sent in the middle of a change of path may come later than what is sent after it");
    }
    if goes_by_rdma() {
        return untried("what goes by an adapter arrives when it does");
    }
    let is_to_leave = cx.is_to_leave();
    let sets = [sys::epoll_awaited()?, sys::epoll_awaited()?];
    let mut pairs = vec![];
    for i in 0..PAIRS {
        let [a, b] = ends()?;
        let left = has_left(a, b, if is_to_leave { 40 } else { 2 })?;
        ensure!(left || !is_to_leave, "they never left TCP");
        let (c, d) = sys::socketpair()?;
        for (ep, fd) in sets.into_iter().zip([a, c]) {
            sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, (EPOLLIN | how) as u32, i as u64)?;
        }
        pairs.push(([a, c], [b, d]));
    }
    let mut rng = Rng::new(71);
    let by_tcp = || pairs.iter().map(|(here, _)| sys::tcp_bytes(here[0])).collect::<Result<Vec<_>, _>>();
    let before = by_tcp()?;
    let mut did = vec![];
    let mut is_in = [true; PAIRS];
    for step in 0..STEPS {
        let i = rng.below(PAIRS as u64) as usize;
        let (here, there) = pairs[i];
        let op = rng.below(12);
        did.push((op, i));
        match op {
            0..=3 => {
                there.into_iter().try_for_each(|fd| sys::write_all(fd, b"x"))?;
                let began = Instant::now();
                while !is_to_leave && sys::fionread(here[0])? < sys::fionread(here[1])? {
                    ensure!(began.elapsed().as_secs() < 2, "a byte is late");
                }
            }
            4..=5 => {
                let mut got = [0; 512];
                let [n, like] = here.map(|fd| sys::recv(fd, &mut got, MSG_DONTWAIT));
                same!(n, like, "bytes");
            }
            6..=7 => {
                let max = 1 + rng.below(PAIRS as u64) as usize;
                let [n, like] = sets.map(|ep| told(ep, max));
                let (n, like, last) = (n?, like?, &did[did.len().saturating_sub(24)..]);
                ensure!(n == like, "{n:?} are told of in step {step}, and {like:?} of those like them, after {last:?}");
            }
            8..=9 if is_in[i] => {
                let events = if rng.below(3) == 0 { 0 } else { EPOLLIN } | how;
                for (ep, fd) in sets.into_iter().zip(here) {
                    sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, events as u32, i as u64)?;
                }
            }
            10 => {
                let (op, events) = if is_in[i] { (EPOLL_CTL_DEL, 0) } else { (EPOLL_CTL_ADD, EPOLLIN | how) };
                is_in[i] = !is_in[i];
                for (ep, fd) in sets.into_iter().zip(here) {
                    sys::epoll_ctl(ep, op, fd, events as u32, i as u64)?;
                }
            }
            _ => {}
        }
    }
    ensure!(!is_to_leave || by_tcp()? == before, "they went by TCP");
    sets.into_iter().chain(pairs.into_iter().flat_map(|(a, b)| [a, b].concat())).try_for_each(sys::close)?;
    Ok(())
}
