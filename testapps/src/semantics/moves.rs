//! What sets tell while their connections move, to a program that is its own peer: as much as the kernel would at once, and
//! nothing less for ever.

use super::cx::{goes_by_rdma, Cx, Res, Why};
use super::found::{has_left, pair};
use super::Check;
use crate::prng::Rng;
use crate::sys::R;
use crate::{ensure, more, same, sys};
use libc::{
    c_int, EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, MSG_DONTWAIT,
    MSG_PEEK, POLLHUP, POLLIN, POLLOUT, POLLRDHUP,
};
use std::os::fd::RawFd;
use std::time::Duration;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("moving-as-a-model", |cx| as_a_model(cx, 0)),
    ("moving-as-a-model-by-edges", |cx| as_a_model(cx, EPOLLET)),
    ("moving-as-a-model-one-shot", |cx| as_a_model(cx, EPOLLONESHOT)),
    ("moving-as-a-model-of-polls", of_polls),
    ("set-of-a-ring-and-a-pipe", and_a_pipe),
    ("moving-with-the-same-data", |cx| same_data(cx, 0)),
    ("moving-with-the-same-data-by-edges", |cx| same_data(cx, EPOLLET)),
    ("moving-with-the-same-data-one-shot", |cx| same_data(cx, EPOLLONESHOT)),
];

/// So long the library may take to tell of something at last.
const PATIENCE: u32 = 2000;
/// While a thread of the library's has the kernel's socket locked, what comes there waits for that thread.
const FEW: usize = 5;

/// Whether one look is to tell of all.
fn is_prompt(cx: &Cx) -> bool {
    cx.is_to_leave() && !goes_by_rdma()
}

/// What was sent is there; by an adapter, soon.
fn arrives(fd: RawFd) -> Res {
    if goes_by_rdma() {
        sys::wait1(fd, POLLIN, 2000)?;
    }
    Ok(())
}

fn nap(us: u64) {
    std::thread::sleep(Duration::from_micros(us));
}

/// An end of a connection of this process to itself.
#[derive(Default)]
struct End {
    fd: RawFd,
    unread: usize,
    /// What its item asks for, if it is in the set.
    asks: Option<c_int>,
    /// By edges: something has happened since it was told of. A one-shot: it was armed since.
    edge: bool,
}

impl End {
    /// What the kernel would tell of it.
    fn due(&self, how: c_int) -> c_int {
        let there = EPOLLOUT | if self.unread > 0 { EPOLLIN } else { 0 };
        match self.asks {
            Some(asks) if how == 0 || self.edge => asks & there,
            _ => 0,
        }
    }
}

/// Looks once, and again if that did not tell of all. Returns whether it did.
fn look(ep: RawFd, ends: &mut [End], how: c_int) -> Result<bool, Why> {
    let mut got = vec![0; ends.len()];
    let mut looks = 0;
    loop {
        for (events, at) in sys::epoll_wait(ep, 16, 0)? {
            got[at as usize] |= events as c_int;
        }
        looks += 1;
        let missing = |got: &[c_int]| ends.iter().zip(got).position(|(e, got)| e.due(how) & !got != 0);
        let Some(at) = missing(&got) else { break };
        let (due, got) = (ends[at].due(how), got[at]);
        ensure!(looks < PATIENCE, "of end {at} {due:#x} is due, and {got:#x} is told");
        nap(1000);
    }
    for (e, got) in ends.iter_mut().zip(got) {
        let more = got & !e.due(how);
        ensure!(how == EPOLLET || more == 0, "{more:#x} is told of what has it not");
        e.edge &= how == EPOLLONESHOT && got == 0;
    }
    Ok(looks == 1)
}

/// Bytes are sent and read, and items added, changed and taken out, at random.
fn as_a_model(cx: &mut Cx, how: c_int) -> Res {
    let mut rng = Rng::new(8);
    lives(cx, || life(&mut rng, how))
}

/// What one life has shown.
struct Life {
    /// So many looks did not tell of all at once.
    late: usize,
    /// Of the bytes that were sent some went by no kernel's socket.
    left: bool,
}

fn lives(cx: &mut Cx, mut life: impl FnMut() -> Result<Life, Why>) -> Res {
    let (mut late, mut left) = (0, 0);
    for _ in 0..if cx.is_to_leave() { 20 } else { 4 } {
        let l = life()?;
        late += l.late;
        left += usize::from(l.left);
    }
    ensure!(left > 0 || !is_prompt(cx), "no connection left TCP");
    ensure!(late <= FEW || !is_prompt(cx), "{late} looks did not tell of all");
    cx.warm(4, 0)
}

/// How many bytes have come to these by TCP.
fn come_by_tcp(mut fds: impl Iterator<Item = RawFd>) -> R<usize> {
    fds.try_fold(0, |n, fd| Ok(n + sys::tcp_bytes(fd)?.1 as usize))
}

fn life(rng: &mut Rng, how: c_int) -> Result<Life, Why> {
    const PAIRS: usize = 3;
    const STEPS: usize = 250;
    let mut ends = Vec::new();
    for _ in 0..PAIRS {
        let (a, b) = pair()?;
        ends.extend([a, b].map(|fd| End { fd, ..End::default() }));
    }
    let mut ep = sys::epoll_awaited()?;
    let (mut late, mut sent) = (0, 0);
    for _ in 0..STEPS {
        let at = rng.below(ends.len() as u64) as usize;
        let asks = if rng.below(3) == 0 { EPOLLIN | EPOLLOUT } else { EPOLLIN };
        let change = |e: &mut End, op, asks: Option<c_int>| {
            (e.asks, e.edge) = (asks, asks.is_some());
            sys::epoll_ctl(ep, op, e.fd, (asks.unwrap_or(0) | how) as u32, at as u64)
        };
        match rng.below(100) {
            0..30 if ends[at ^ 1].unread < 20_000 => {
                let n = rng.log_uniform(1, 500);
                sys::write_all(ends[at].fd, &[7; 500][..n])?;
                sent += n;
                ends[at ^ 1].unread += n;
                ends[at ^ 1].edge |= how == EPOLLET;
            }
            30..50 if ends[at].unread > 0 => {
                let most = if rng.below(2) == 0 { 4096 } else { 1 + rng.below(ends[at].unread as u64) as usize };
                let mut buf = [0; 4096];
                arrives(ends[at].fd)?;
                let n = sys::recv(ends[at].fd, &mut buf[..most], MSG_DONTWAIT)?;
                ensure!(buf[..n].iter().all(|b| *b == 7), "other bytes");
                ends[at].unread -= n;
            }
            50..60 if ends[at].asks.is_none() => change(&mut ends[at], EPOLL_CTL_ADD, Some(asks))?,
            60..64 if ends[at].asks.is_some() => change(&mut ends[at], EPOLL_CTL_MOD, Some(asks))?,
            64..66 if ends[at].asks.is_some() => change(&mut ends[at], EPOLL_CTL_DEL, None)?,
            66..68 => {
                sys::close(ep)?;
                ep = sys::epoll_awaited()?;
                ends.iter_mut().for_each(|e| e.asks = None);
            }
            68..90 => late += usize::from(!look(ep, &mut ends, how)?),
            90.. => nap(rng.below(400)),
            _ => {}
        }
    }
    let left = come_by_tcp(ends.iter().map(|e| e.fd))? < sent;
    ends.iter().map(|e| e.fd).chain([ep]).try_for_each(sys::close)?;
    Ok(Life { late, left })
}

/// `poll`, `FIONREAD`, a peek and a receive say what was sent, and the end behind it, wherever the bytes are.
fn of_polls(cx: &mut Cx) -> Res {
    let mut rng = Rng::new(10);
    lives(cx, || life_in_polls(&mut rng))
}

fn life_in_polls(rng: &mut Rng) -> Result<Life, Why> {
    const STEPS: usize = 250;
    let ends = (0..3).map(|_| pair()).collect::<Result<Vec<_>, _>>()?;
    let fds: Vec<RawFd> = ends.into_iter().flat_map(|(a, b)| [a, b]).collect();
    let mut unread = vec![0; fds.len()];
    // Whether the other end has ended its direction.
    let mut ended = vec![false; fds.len()];
    let (mut late, mut sent) = (0, 0);
    let mut buf = [0; 4096];
    for _ in 0..STEPS {
        let at = rng.below(fds.len() as u64) as usize;
        let what = rng.below(100);
        let mut found = |unread: &[usize], ended: &[bool]| -> Result<bool, Why> {
            let there = unread[at].min(buf.len());
            Ok(match what {
                0..10 => sys::recv(fds[at], &mut buf, MSG_DONTWAIT | MSG_PEEK) == Ok(there) || there == 0,
                10..20 => sys::fionread(fds[at])? == unread[at],
                _ => (0..fds.len()).all(|i| {
                    let end = if ended[i] { POLLIN | POLLRDHUP } else { 0 };
                    let bytes = if unread[i] > 0 { POLLIN } else { 0 };
                    let both = if ended[i] && ended[i ^ 1] { POLLHUP } else { 0 };
                    sys::poll1(fds[i], POLLIN | POLLOUT | POLLRDHUP, 0) == Ok(POLLOUT | end | bytes | both)
                }),
            })
        };
        match what {
            0..50 => {
                let mut looks = 0;
                while !found(&unread, &ended)? {
                    looks += 1;
                    ensure!(looks < PATIENCE, "look {what} at end {at}, which has {} bytes", unread[at]);
                    nap(1000);
                }
                late += usize::from(looks > 0);
            }
            50..72 if !ended[at ^ 1] && unread[at ^ 1] < 20_000 => {
                let n = rng.log_uniform(1, 500);
                sys::write_all(fds[at], &[7; 500][..n])?;
                sent += n;
                unread[at ^ 1] += n;
            }
            72..90 => {
                let is_due = unread[at] > 0 || ended[at];
                if is_due {
                    arrives(fds[at])?;
                }
                match sys::recv(fds[at], &mut buf, MSG_DONTWAIT) {
                    Ok(n) => {
                        ensure!(n <= unread[at] && is_due && (n > 0 || unread[at] == 0), "{n} of {} bytes", unread[at]);
                        unread[at] -= n;
                    }
                    e => same!((e, is_due), (Err(libc::EAGAIN), false), "a receive"),
                }
            }
            90..92 if !ended[at ^ 1] => {
                sys::shutdown(fds[at], libc::SHUT_WR)?;
                ended[at ^ 1] = true;
            }
            _ => nap(rng.below(400)),
        }
    }
    let left = come_by_tcp(fds.iter().copied())? < sent;
    fds.into_iter().try_for_each(sys::close)?;
    Ok(Life { late, left })
}

/// What is the kernel's is told of together with what is on a ring, however busy that is.
fn and_a_pipe(cx: &mut Cx) -> Res {
    let (a, b) = pair()?;
    let left = has_left(a, b, if cx.is_to_leave() { 200 } else { 1 })?;
    ensure!(left || !is_prompt(cx), "it never left TCP");
    let (rd, wr) = sys::pipe()?;
    let event = more::eventfd()?;
    let ep = sys::epoll_awaited()?;
    let told = || Ok::<_, Why>(sys::epoll_wait(ep, 4, 0)?.iter().fold(0, |all, e| all | e.1));
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, a, EPOLLIN as u32, 1)?;
    let mut late = 0;
    let mut is = |all, what| {
        late += usize::from(told()? != all);
        for _ in 0..PATIENCE {
            if told()? == all {
                return Ok(());
            }
            nap(1000);
        }
        Err(Why(format!("{what}: {} is told, {all} is there", told()?)))
    };
    for _ in 0..100 {
        sys::write_all(b, b"x")?;
        is(1, "bytes on the ring")?;
        sys::write_all_fd(wr, b"x")?;
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, rd, EPOLLIN as u32, 2)?;
        is(3, "a pipe is added")?;
        sys::read_exact(rd, &mut [0])?;
        is(1, "the pipe is read")?;
        sys::write_all_fd(wr, b"x")?;
        is(3, "the pipe has more")?;
        sys::read_exact(a, &mut [0])?;
        is(2, "the ring is read")?;
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, event, EPOLLIN as u32, 4)?;
        // SAFETY: no preconditions.
        same!(unsafe { libc::eventfd_write(event, 1) }, 0, "eventfd_write");
        is(6, "the eventfd has a number")?;
        sys::epoll_ctl(ep, EPOLL_CTL_DEL, event, 0, 0)?;
        sys::read_exact(event, &mut [0; 8])?;
        sys::epoll_ctl(ep, EPOLL_CTL_DEL, rd, 0, 0)?;
        is(0, "the pipe is taken out")?;
        sys::read_exact(rd, &mut [0])?;
    }
    ensure!(late <= FEW || !is_prompt(cx), "{late} looks did not tell of all");
    [a, b, rd, wr, event, ep].into_iter().try_for_each(sys::close)?;
    cx.warm(4, 0)
}

/// Two connections move while a set gets them, with the same data: it tells of both.
fn same_data(cx: &mut Cx, how: c_int) -> Res {
    let mut rng = Rng::new(9);
    let (mut late, mut left) = (0, 0);
    for _ in 0..60 {
        let mut sent = 0;
        let pairs = [pair()?, pair()?];
        for _ in 0..rng.below(40) {
            let (a, b) = pairs[rng.below(2) as usize];
            let (from, to) = if rng.below(2) == 0 { (a, b) } else { (b, a) };
            sys::write_all(from, b"x")?;
            sys::read_exact(to, &mut [0])?;
            sent += 1;
            nap(rng.below(200));
        }
        let ep = sys::epoll_awaited()?;
        let arm = |op| pairs.iter().try_for_each(|(_, b)| sys::epoll_ctl(ep, op, *b, (EPOLLIN | how) as u32, 7));
        arm(EPOLL_CTL_ADD)?;
        for turn in 0..3 {
            let first = rng.below(2) as usize;
            // Both at once, or one after the other, as only what is told of once lets them be told apart.
            for of in if how == 0 || rng.below(2) == 0 { vec![vec![0, 1]] } else { vec![vec![first], vec![1 - first]] }
            {
                for i in &of {
                    sys::write_all(pairs[*i].0, b"z")?;
                    sent += 1;
                }
                let mut n = sys::epoll_wait(ep, 2, 0)?.len();
                late += usize::from(n < of.len());
                for _ in 0..PATIENCE {
                    if n >= of.len() {
                        break;
                    }
                    nap(1000);
                    let more = sys::epoll_wait(ep, 2, 0)?.len();
                    n = if how == 0 { more } else { n + more };
                }
                ensure!(n >= of.len(), "{n} of {} events in turn {turn}", of.len());
                nap(rng.below(1000));
            }
            for (_, b) in &pairs {
                sys::read_exact(*b, &mut [0])?;
            }
            if how == EPOLLONESHOT {
                arm(EPOLL_CTL_MOD)?;
            }
        }
        same!(how == 0 && !sys::epoll_wait(ep, 2, 0)?.is_empty(), false, "events of what is read");
        let fds = || pairs.into_iter().flat_map(|(a, b)| [a, b]);
        // (A mark is longer than what is sent here, in all.)
        left += usize::from(come_by_tcp(fds())? != sent);
        fds().chain([ep]).try_for_each(sys::close)?;
    }
    ensure!(left > 0 || !is_prompt(cx), "no connection left TCP");
    ensure!(late <= FEW || !is_prompt(cx), "{late} looks did not tell of all");
    cx.warm(4, 0)
}
