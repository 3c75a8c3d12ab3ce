//! Many threads at one epoll set, and connections that come and go in it: whatever is ready somebody hears of, and nobody
//! hears of what is not there.

use super::cx::{Cx, Res, Why};
use super::Check;
use crate::prng::{self, Rng};
use crate::{ensure, more, same, sys, util};
use libc::{c_int, EPOLLET, EPOLLEXCLUSIVE, EPOLLIN, EPOLLONESHOT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD};
use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::{scope, spawn};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("pool-level", |cx| pool(cx, &[0])),
    ("pool-edge", |cx| pool(cx, &[EPOLLET])),
    ("pool-oneshot", |cx| pool(cx, &[EPOLLONESHOT])),
    ("pool-exclusive", |cx| pool(cx, &[EPOLLEXCLUSIVE])),
    ("pool-of-all-kinds", |cx| pool(cx, &[0, EPOLLET, EPOLLONESHOT, EPOLLONESHOT | EPOLLET, EPOLLEXCLUSIVE])),
    ("pool-looker-beside-a-sleeper", looker),
];

const WORKERS: usize = 4;
const CLIENTS: u64 = 4;
const SESSIONS: u64 = 5;
const ROUNDS: u64 = 40;
const MOST: usize = 3000;
/// What tells the workers that all is over.
const OVER: u64 = u64::MAX - 1;
/// The listener's.
const LISTENER: u64 = u64::MAX - 2;

/// A connection of the pool's.
struct Served {
    fd: RawFd,
    events: c_int,
    /// One thread at a time reads and answers, so that answers keep their order. True: closed.
    turn: Mutex<bool>,
    /// Somebody was told, and has not asked to be told again.
    told: AtomicBool,
}

struct Pool {
    ep: RawFd,
    listener: RawFd,
    kinds: &'static [c_int],
    served: Mutex<HashMap<u64, Arc<Served>>>,
    /// How many there were.
    count: AtomicU64,
}

impl Pool {
    fn accept(&self) -> Res {
        let fd = sys::accept(self.listener, libc::SOCK_CLOEXEC)?;
        let n = self.count.fetch_add(1, SeqCst);
        let events = self.kinds[n as usize % self.kinds.len()] | EPOLLIN;
        let served = Served { fd, events, turn: Mutex::new(false), told: AtomicBool::new(false) };
        self.served.lock().unwrap().insert(n, Arc::new(served));
        sys::epoll_ctl(self.ep, EPOLL_CTL_ADD, fd, events as u32, n)?;
        sys::epoll_ctl(self.ep, EPOLL_CTL_MOD, self.listener, (EPOLLIN | EPOLLONESHOT) as u32, LISTENER)?;
        Ok(())
    }

    /// One connection has something, says the set.
    fn serve(&self, data: u64, events: u32) -> Res {
        let known = self.served.lock().unwrap().get(&data).cloned();
        let Some(s) = known else {
            // Another thread may have closed it since.
            ensure!(data < self.count.load(SeqCst), "an event {events:#x} of nothing ({data:#x})");
            return Ok(());
        };
        let single = s.events & EPOLLONESHOT != 0;
        if single {
            ensure!(!s.told.swap(true, SeqCst), "a one-shot was told twice");
        }
        let mut over = s.turn.lock().unwrap();
        let mut b = [0; MOST];
        while !*over {
            match sys::recv(s.fd, &mut b, libc::MSG_DONTWAIT) {
                Ok(0) => {
                    *over = true;
                    self.served.lock().unwrap().remove(&data);
                    if data.is_multiple_of(2) {
                        sys::epoll_ctl(self.ep, EPOLL_CTL_DEL, s.fd, 0, 0)?;
                    }
                    sys::close(s.fd)?;
                }
                Ok(n) => sys::write_all(s.fd, &b[..n])?,
                Err(libc::EAGAIN) => break,
                Err(e) => return Err(e.into()),
            }
            if s.events & EPOLLET == 0 && b[0].is_multiple_of(2) {
                // Level-triggered: what is left is told again.
                break;
            }
        }
        if single && !*over {
            s.told.store(false, SeqCst);
            sys::epoll_ctl(self.ep, EPOLL_CTL_MOD, s.fd, s.events as u32, data)?;
        }
        Ok(())
    }

    fn work(&self, seed: u64) -> Res {
        let mut rng = Rng::new(seed);
        loop {
            // Mostly to sleep until something comes: what nobody is told of is not found by looking again.
            let ms = [10_000, 10_000, 10_000, 10_000, 0, 1][rng.below(6) as usize];
            let max = 1 + rng.below(3) as usize;
            let got = sys::epoll_wait(self.ep, max, ms)?;
            for (i, (events, data)) in got.iter().enumerate() {
                ensure!(!got[..i].iter().any(|g| g.1 == *data), "two events of one connection: {got:?}");
                match *data {
                    OVER => return Ok(()),
                    LISTENER => self.accept()?,
                    _ => self.serve(*data, *events)?,
                }
            }
        }
    }
}

/// Connects again and again, and has what it sends echoed.
fn client(port: u16, seed: u64) -> Res {
    let mut rng = Rng::new(seed);
    for session in 0..SESSIONS {
        let fd = sys::connect(port)?;
        sys::set_timeout(fd, libc::SO_RCVTIMEO, 5000)?;
        let (mut at, seed) = (0, seed * 1000 + session);
        for round in 0..ROUNDS {
            let b = prng::bytes(seed, at, rng.log_uniform(1, MOST));
            sys::write_all(fd, &b)?;
            let mut back = vec![0; b.len()];
            if let Err(e) = sys::read_exact(fd, &mut back) {
                return Err(Why(format!("answer {round} of {ROUNDS}: {}", sys::strerror(e))));
            }
            ensure!(b == back, "answer {round} is wrong");
            at += b.len() as u64;
            if rng.below(3) > 0 {
                std::thread::sleep(std::time::Duration::from_micros(rng.below(1500)));
            }
        }
        if session.is_multiple_of(2) {
            sys::shutdown(fd, libc::SHUT_WR)?;
            same!(sys::read(fd, &mut [0; 8])?, 0, "the end of the stream");
        }
        sys::close(fd)?;
    }
    Ok(())
}

fn pool(cx: &mut Cx, kinds: &'static [c_int]) -> Res {
    let (listener, port) = sys::listen(0, 64)?;
    let (ep, bell) = (sys::epoll_awaited()?, more::eventfd()?);
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, listener, (EPOLLIN | EPOLLONESHOT) as u32, LISTENER)?;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, bell, EPOLLIN as u32, OVER)?;
    let pool = Pool { ep, listener, kinds, served: Mutex::default(), count: AtomicU64::new(0) };
    scope(|s| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|i| {
                s.spawn({
                    let p = &pool;
                    move || p.work(i as u64)
                })
            })
            .collect();
        let clients: Vec<_> = (0..CLIENTS).map(|i| spawn(move || client(port, 100 + i))).collect();
        let mut all = Ok(());
        for c in clients {
            all = all.and(c.join().unwrap_or_else(|_| Err(Why("a client panicked".into()))));
        }
        sys::write_all_fd(bell, &1u64.to_ne_bytes())?;
        for w in workers {
            all = all.and(w.join().unwrap_or_else(|_| Err(Why("a worker panicked".into()))));
        }
        all
    })?;
    util::pause_ms(1);
    for fd in [ep, bell, listener] {
        sys::close(fd)?;
    }
    cx.warm(4, 0)
}

/// One thread sleeps, and another looks at the same set for a while after each time that the first had something, as Go's
/// scheduler does: what the second takes away from the first is not to leave that asleep.
fn looker(cx: &mut Cx) -> Res {
    const ROUNDS: u32 = 6000;
    let (l, port) = sys::listen(0, 4)?;
    let a = sys::connect(port)?;
    let b = sys::accept(l, libc::SOCK_CLOEXEC)?;
    sys::close(l)?;
    sys::set_timeout(a, libc::SO_RCVTIMEO, 3000)?;
    sys::nonblock(b, true)?;
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, b, (EPOLLIN | libc::EPOLLRDHUP | EPOLLET) as u32, 7)?;
    let (slept, over) = (&AtomicU64::new(0), &AtomicBool::new(false));
    let answer = || -> Res {
        let mut buf = [0; 64];
        loop {
            match sys::recv(b, &mut buf, 0) {
                Ok(0) => break over.store(true, SeqCst),
                Ok(n) => sys::write_all(b, &buf[..n])?,
                Err(libc::EAGAIN) => break,
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    };
    let sleeps = || -> Res {
        while !over.load(SeqCst) {
            if !sys::epoll_wait(ep, 1, 5000)?.is_empty() {
                slept.fetch_add(1, SeqCst);
                answer()?;
            }
        }
        Ok(())
    };
    let looks = || -> Res {
        let mut seen = u64::MAX;
        while !over.load(SeqCst) {
            if slept.load(SeqCst) == seen {
                std::thread::sleep(std::time::Duration::from_micros(5));
                continue;
            }
            seen = slept.load(SeqCst);
            for _ in 0..20_000 {
                if !sys::epoll_wait(ep, 1, 0)?.is_empty() {
                    answer()?;
                    for _ in 0..5 {
                        if !sys::epoll_wait(ep, 1, 0)?.is_empty() {
                            answer()?;
                        }
                    }
                    break;
                }
            }
        }
        Ok(())
    };
    let asks = || -> Res {
        let mut buf = [0; 4];
        let begun = std::time::Instant::now();
        for i in (0..ROUNDS).take_while(|_| begun.elapsed() < std::time::Duration::from_secs(2)) {
            sys::write_all(a, &i.to_le_bytes())?;
            sys::read_exact(a, &mut buf).map_err(|e| Why(format!("answer {i}: {}", sys::strerror(e))))?;
            same!(buf, i.to_le_bytes(), "answer {i}");
            if i % 16 == 0 {
                std::thread::sleep(std::time::Duration::from_micros(u64::from(i) * 7 % 60));
            }
        }
        Ok(())
    };
    scope(|s| {
        let threads = [s.spawn(sleeps), s.spawn(looks)];
        let r = asks().and_then(|()| {
            let by_tcp = sys::tcp_bytes(a)?;
            // (A first link for RDMA may take as long as all of this.)
            let left = !cx.is_to_leave() || super::cx::goes_by_rdma() || asks().is_ok() && sys::tcp_bytes(a)? == by_tcp;
            ensure!(left, "the connection never left TCP");
            Ok(())
        });
        sys::close(a)?;
        let all = threads.into_iter().map(|t| t.join().map_err(|_| Why("a thread died".into()))?);
        all.fold(r, |r, t| r.and(t))
    })?;
    cx.warm(6, 0)
}
