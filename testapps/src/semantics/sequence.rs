//! In which order a set tells of connections that become ready one after the other, to a program that is its own peer.

use super::cx::{goes_by_rdma, untried, Cx, Res, Why};
use super::found::{has_left, pair};
use super::Check;
use crate::{ensure, same, sys};
use libc::{EPOLLIN, EPOLL_CTL_ADD};
use std::os::fd::RawFd;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("own-connections-in-order", |cx| in_order(cx, false)),
    ("own-connections-in-order-just-added", |cx| in_order(cx, true)),
];

/// What [`told`] calls the three connections.
const OLD: u64 = 1;
const OTHER: u64 = 2;
const BY_TCP: u64 = 3;

/// Which connections `ep` tells of.
fn told(ep: RawFd) -> Result<Vec<u64>, Why> {
    Ok(sys::epoll_wait(ep, 8, 0)?.iter().map(|e| e.1).collect())
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
        let ep = sys::epoll_create()?;
        let add = |fd, name| sys::epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN as u32, name);
        // (Not in the order in which they become ready.)
        add(b, OTHER)?;
        add(a, OLD)?;
        let [c, c_peer] = ends()?;
        add(c, BY_TCP)?;
        // (A connection that is made is something by TCP, too: then that goes first.)
        let n = if late { 2 } else { 3 };
        if !late {
            same!(told(ep)?, vec![], "what is told before");
        }
        let order: Vec<u64> = (0..3).map(|i| (first - 1 + i) % 3 + 1).filter(|which| *which <= n).collect();
        for which in &order {
            match *which {
                // An end comes as bytes do.
                OLD if round % 2 == 1 => sys::shutdown(a_peer, libc::SHUT_WR)?,
                OLD => sys::write_all(a_peer, b"x")?,
                OTHER => sys::write_all(b_peer, b"x")?,
                _ => sys::write_all(c_peer, b"x")?,
            }
        }
        let told = told(ep)?;
        ensure!(told == order, "{told:?} are told of in round {round}, which became ready as {order:?}");
        [ep, a, a_peer, b, b_peer, c, c_peer].into_iter().try_for_each(sys::close)?;
    }
    Ok(())
}

fn ends() -> Result<[RawFd; 2], Why> {
    let (a, b) = pair()?;
    Ok([a, b])
}
