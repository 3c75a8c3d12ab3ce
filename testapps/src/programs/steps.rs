//! The steps of a program: each is chosen by a number of its own and by what the model allows, so that any of them can
//! be left out and the rest is still a program.

use super::conductor::{Done, Run, Sleeper, Stop};
use super::model::{peer, End, Obj};
use super::wire::{Cmd, Op};
use crate::prng::Rng;
use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC, MSG_WAITALL};
use std::os::fd::RawFd;

/// Most bytes that may wait for an end, so that no socket buffer is ever full by itself.
const ROOM: i64 = 40_000;

/// An end, and who has it.
#[derive(Clone, Copy)]
pub struct At {
    /// The process.
    pub p: usize,
    /// The fd.
    pub fd: RawFd,
    /// The end.
    pub e: usize,
}

/// Picks one of a list.
pub fn pick<T: Copy>(rng: &mut Rng, list: &[T]) -> T {
    list[rng.below(list.len() as u64) as usize]
}

impl Run {
    /// A living process.
    pub fn any_proc(&self, rng: &mut Rng) -> usize {
        let alive: Vec<usize> = (0..self.procs.len()).filter(|&p| self.procs[p].alive).collect();
        pick(rng, &alive)
    }

    /// Any end that a process holds and that fits.
    pub fn any_end(&self, rng: &mut Rng, fits: impl Fn(&End) -> bool) -> Option<At> {
        let mut all = Vec::new();
        for (p, q) in self.procs.iter().enumerate().filter(|(_, q)| q.alive) {
            for t in &q.table {
                if let Obj::End(e) = t.obj {
                    let end = &self.model.ends[e];
                    if !end.full && !self.model.ends[peer(e)].full && fits(end) {
                        all.push(At { p, fd: t.fd, e });
                    }
                }
            }
        }
        (!all.is_empty()).then(|| pick(rng, &all))
    }

    /// The seed of the stream that an end sends.
    pub fn stream(&self, e: usize) -> i64 {
        (self.seed.wrapping_mul(0x9e37) ^ e as u64) as i64 & i64::MAX
    }

    /// A send.
    pub fn do_send(&mut self, rng: &mut Rng) -> Done {
        let Some(at) = self.any_end(rng, |_| true) else { return Ok(false) };
        let room = ROOM - self.model.ends[peer(at.e)].rx;
        let mut n = if rng.below(12) == 0 { 0 } else { rng.log_uniform(1, 12_000) as i64 };
        n = n.min(room.max(0));
        if self.model.ends[peer(at.e)].sleeper.is_some() {
            // What wakes somebody arrives in one piece.
            n = n.min(4000);
        }
        let mut call = rng.below(7) as i64;
        if call == 6 && self.model.ends[peer(at.e)].sleeper.is_some() {
            call = 0;
        }
        let mut flags = MSG_NOSIGNAL;
        if rng.below(4) == 0 {
            flags |= MSG_DONTWAIT;
        }
        let parts = 1 + rng.below(4) as i64;
        let lane = self.lane(at.p, rng);
        let c = [at.fd as i64, call, n, flags as i64, self.stream(at.e), self.model.ends[at.e].sent, parts];
        let r = if rng.below(12) == 0 && n > 0 {
            self.tell(at.p, lane, &Cmd::new(Op::Sendfile, &[c[0], n, 0, 0, c[4], c[5]]))?
        } else {
            self.tell(at.p, lane, &Cmd::new(Op::Send, &c))?
        };
        self.model.sent(at.e, r.ret);
        Ok(true)
    }

    /// A receive that does not have to wait, or whose wait ends by a time limit.
    pub fn do_recv(&mut self, rng: &mut Rng) -> Done {
        let Some(at) = self.any_end(rng, |e| e.sleeper.is_none()) else { return Ok(false) };
        let end = self.model.ends[at.e].clone();
        let call = rng.below(7) as i64;
        let n = if rng.below(10) == 0 { 0 } else { rng.log_uniform(1, 30_000) as i64 };
        let mut flags = 0;
        if call != 1 && call != 2 && call != 5 {
            flags |= pick(rng, &[0, 0, MSG_DONTWAIT, MSG_DONTWAIT, MSG_PEEK, MSG_WAITALL, MSG_PEEK | MSG_DONTWAIT]);
            if call == 0 && rng.below(8) == 0 {
                flags |= MSG_TRUNC;
            }
            if call == 6 {
                flags &= !MSG_PEEK;
            }
        }
        let wait_for = match flags & MSG_WAITALL != 0 || call == 6 {
            true => n.max(1),
            false => end.lowat.min(n).max(1),
        };
        let waits = !end.nonblock && flags & MSG_DONTWAIT == 0 && end.rx < wait_for && !end.ended();
        if waits && end.rcvtimeo == 0 {
            if call == 1 || call == 2 || call == 5 {
                return Ok(false);
            }
            flags |= MSG_DONTWAIT;
        }
        let parts = 1 + rng.below(4) as i64;
        let lane = self.lane(at.p, rng);
        let c = [at.fd as i64, call, n, flags as i64, self.stream(peer(at.e)), end.taken, parts];
        let r = self.tell(at.p, lane, &Cmd::new(Op::Recv, &c))?;
        if flags & MSG_PEEK == 0 {
            self.model.took(at.e, r.ret);
        }
        Ok(true)
    }

    /// A shutdown.
    pub fn do_shutdown(&mut self, rng: &mut Rng) -> Done {
        let Some(at) = self.any_end(rng, |_| true) else { return Ok(false) };
        let how = rng.below(3) as i64;
        // Whoever sleeps is told of the end before it is acknowledged, and of that no more.
        let sleepers = self.procs.iter().flat_map(|p| p.sleepers.iter().flatten());
        if self.model.ends[at.e].watched && sleepers.into_iter().any(|s| s.set.is_some()) {
            return Ok(false);
        }
        let lane = self.lane(at.p, rng);
        let r = self.tell(at.p, lane, &Cmd::new(Op::Shutdown, &[at.fd as i64, how]))?;
        if r.ret == 0 {
            self.model.shutdown(at.e, how as i32);
        }
        Ok(true)
    }

    /// Whether a thread of some process sleeps in a call on this fd's object.
    pub fn in_use(&self, obj: Obj) -> bool {
        match obj {
            Obj::End(e) => self.model.ends[e].sleeper.is_some() || self.model.ends[e].full,
            Obj::Set(n) => self.procs.iter().any(|p| p.sleepers.iter().flatten().any(|s| s.set == Some(n))),
            _ => false,
        }
    }

    /// A close of any fd.
    pub fn do_close(&mut self, rng: &mut Rng) -> Done {
        let p = self.any_proc(rng);
        if self.procs[p].table.is_empty() {
            return Ok(false);
        }
        let list: Vec<_> = self.procs[p].table.clone();
        let t = pick(rng, &list);
        if self.in_use(t.obj) || (t.obj == Obj::Listener && rng.below(4) > 0) {
            return Ok(false);
        }
        let lane = self.lane(p, rng);
        let how = rng.below(6) as i64;
        self.tell(p, lane, &Cmd::new(Op::Close, &[t.fd as i64, how]))?;
        self.forget(p, t.fd);
        Ok(true)
    }

    /// A duplicate, onto a free number or over another fd.
    pub fn do_dup(&mut self, rng: &mut Rng) -> Done {
        let p = self.any_proc(rng);
        if self.procs[p].table.is_empty() || self.procs[p].table.len() > 14 {
            return Ok(false);
        }
        let list: Vec<_> = self.procs[p].table.clone();
        let (t, over) = (pick(rng, &list), pick(rng, &list));
        let how = rng.below(5) as i64;
        let to = if rng.below(2) == 0 && !self.in_use(over.obj) && over.obj != Obj::Listener {
            over.fd as i64
        } else {
            40 + rng.below(20) as i64
        };
        if self.procs[p].table.iter().any(|x| x.fd as i64 == to && self.in_use(x.obj)) {
            return Ok(false);
        }
        let lane = self.lane(p, rng);
        let r = self.tell(p, lane, &Cmd::new(Op::Dup, &[t.fd as i64, how, to]))?;
        if r.ret >= 0 && r.ret != t.fd as i64 {
            self.add(p, r.ret, t.obj);
        }
        Ok(true)
    }

    /// `poll`, `ppoll` or `select` of several fds, with little or no time.
    pub fn do_poll(&mut self, rng: &mut Rng) -> Done {
        let p = self.any_proc(rng);
        let list: Vec<_> = self.procs[p]
            .table
            .iter()
            .filter(|t| {
                !matches!(t.obj, Obj::End(e) if self.model.ends[e].sleeper.is_some_and(|n| n > 1)
                || self.model.ends[e].full || self.model.ends[peer(e)].full)
            })
            .copied()
            .collect();
        if list.is_empty() {
            return Ok(false);
        }
        let call = rng.below(3) as i64;
        let ms = pick(rng, &[0, 0, 0, 1, 4]);
        let n = 1 + rng.below(5) as i64;
        let mut a = vec![call, ms, n];
        for _ in 0..n {
            let fd = match rng.below(24) {
                0 => -1,
                1 => 77,
                _ => pick(rng, &list).fd as i64,
            };
            let events = pick(rng, &[1i64, 1, 4, 5, 0x2001, 0x2005, 0x2000, 2, 7, 0, 0x40, 0x104 | 0x41, 0x2000 | 4]);
            a.extend([fd, events]);
        }
        let lane = self.lane(p, rng);
        self.tell(p, lane, &Cmd::new(Op::Poll, &a))?;
        Ok(true)
    }

    /// Sets or asks for options, names, counts.
    pub fn do_option(&mut self, rng: &mut Rng) -> Done {
        use libc::*;
        let Some(at) = self.any_end(rng, |e| e.sleeper.is_none()) else { return Ok(false) };
        let (fd, lane) = (at.fd as i64, self.lane(at.p, rng));
        let sol = SOL_SOCKET as i64;
        let tcp = IPPROTO_TCP as i64;
        let set = |opt: c_int, v: i64| Cmd::new(Op::SetOpt, &[fd, sol, opt as i64, v]);
        let end = &mut self.model.ends[at.e];
        let c = match rng.below(16) {
            0 | 1 => {
                end.nonblock = rng.below(2) == 0;
                Cmd::new(Op::Nonblock, &[fd, rng.below(2) as i64, end.nonblock as i64])
            }
            2 => {
                end.lowat = pick(rng, &[1, 1, 2, 10, 500]);
                set(SO_RCVLOWAT, end.lowat)
            }
            3 => {
                end.rcvtimeo = pick(rng, &[0, 2, 10]);
                Cmd::new(Op::SetOpt, &[fd, sol, SO_RCVTIMEO as i64, end.rcvtimeo, 0, 2])
            }
            4 => Cmd::new(Op::SetOpt, &[fd, sol, SO_SNDTIMEO as i64, pick(rng, &[0, 10]), 0, 2]),
            5 => {
                let on = rng.below(3) as i64;
                end.linger0 = on == 1;
                Cmd::new(Op::SetOpt, &[fd, sol, SO_LINGER as i64, (on > 0) as i64, if on == 2 { 1 } else { 0 }, 1])
            }
            6 => set(SO_KEEPALIVE, rng.below(2) as i64),
            7 | 8 => Cmd::new(Op::Fionread, &[fd]),
            9 | 10 => Cmd::new(Op::GetOpt, &[fd, sol, SO_ERROR as i64]),
            11 => {
                Cmd::new(Op::GetOpt, &[fd, sol, pick(rng, &[SO_RCVLOWAT, SO_TYPE, SO_KEEPALIVE, SO_ACCEPTCONN]) as i64])
            }
            12 => Cmd::new(Op::GetOpt, &[fd, tcp, TCP_NODELAY as i64]),
            // Known to differ: on a ring the kernel's socket outlives the stream, so `getpeername` still succeeds.
            13 | 14 if !end.hup() => Cmd::new(Op::Names, &[fd]),
            _ => Cmd::new(Op::SetOpt, &[fd, tcp, TCP_NODELAY as i64, 1]),
        };
        self.tell(at.p, lane, &c)?;
        // A new threshold may make ready what was not.
        self.model.ends[at.e].dirty = true;
        Ok(true)
    }

    /// Pipes, files, event counters: what else has fd numbers.
    pub fn do_other(&mut self, rng: &mut Rng) -> Done {
        let p = self.any_proc(rng);
        let lane = self.lane(p, rng);
        let others: Vec<_> = self.procs[p].table.iter().filter(|t| t.obj == Obj::Other).copied().collect();
        if !others.is_empty() && rng.below(3) > 0 {
            let fd = pick(rng, &others).fd as i64;
            let op = if rng.below(2) == 0 { Op::OtherWrite } else { Op::OtherRead };
            self.tell(p, lane, &Cmd::new(op, &[fd, 8]))?;
            return Ok(true);
        }
        if self.procs[p].table.len() > 14 {
            return Ok(false);
        }
        let kind = rng.below(5) as i64;
        let r = self.tell(p, lane, &Cmd::new(Op::Other, &[kind]))?;
        self.add(p, r.ret, Obj::Other);
        if kind == 0 || kind == 4 {
            self.add(p, r.aux, Obj::Other);
        }
        Ok(true)
    }

    /// A new connection between any two processes, which may be one.
    pub fn do_connect(&mut self, rng: &mut Rng) -> Done {
        if self.model.ends.len() >= 8 {
            return Ok(false);
        }
        let q = self.any_proc(rng);
        let mut p = self.any_proc(rng);
        if p == q && rng.below(4) > 0 {
            p = self.any_proc(rng);
        }
        let (lfd, port) = match self.listeners.iter().find(|l| l.0 == q) {
            Some(l) => (l.1, l.2),
            None => {
                let r = self.tell(q, 0, &Cmd::new(Op::Listen, &[]))?;
                self.add(q, r.ret, Obj::Listener);
                self.listeners.push((q, r.ret as RawFd, r.aux));
                (r.ret as RawFd, r.aux)
            }
        };
        let c = self.tell(p, 0, &Cmd::new(Op::Connect, &[port]))?;
        let a = self.tell(q, 0, &Cmd::new(Op::Accept, &[lfd as i64]))?;
        if c.ret < 0 || a.ret < 0 {
            return Err(Stop("stopped".into()));
        }
        let e = self.model.connection();
        self.add(p, c.ret, Obj::End(e));
        self.add(q, a.ret, Obj::End(e + 1));
        if rng.below(5) > 0 {
            let lane = (p == q) as usize;
            if self.procs[q].sleepers[lane].is_none() {
                let first = (p, 0, Cmd::new(Op::Warm, &[c.ret, 1, self.warm]));
                let second = (q, lane, Cmd::new(Op::Warm, &[a.ret, 0]));
                let (x, y) = self.both(first, second)?;
                self.note(format!("warm {} {}", x.text, y.text));
            }
        }
        Ok(true)
    }

    /// A receive or a wait in a thread of its own that has to wait for something to come.
    pub fn do_sleep(&mut self, rng: &mut Rng) -> Done {
        let Some(at) = self.any_end(rng, |e| e.sleeper.is_none() && !e.ended()) else { return Ok(false) };
        let lane = 1 + rng.below(2) as usize;
        if self.procs[at.p].sleepers[lane].is_some() {
            return Ok(false);
        }
        let end = self.model.ends[at.e].clone();
        let fd = at.fd as i64;
        let kind = rng.below(3);
        let (c, want) = if kind == 0 {
            let n = rng.log_uniform(1, 5000) as i64;
            let all = rng.below(3) == 0 && !end.watched;
            let want = if all { n } else { end.lowat.min(n).max(1) };
            if end.nonblock || end.rx >= want || end.rcvtimeo > 0 || (want > 1 && end.watched) {
                return Ok(false);
            }
            let call = pick(rng, &[0, 3, 4]);
            let flags = if all { MSG_WAITALL } else { 0 } as i64;
            let parts = 1 + rng.below(3) as i64;
            (Cmd::new(Op::Recv, &[fd, call, n, flags, self.stream(peer(at.e)), end.taken, parts]), want)
        } else {
            if end.rx >= end.lowat {
                return Ok(false);
            }
            let events = pick(rng, &[1i64, 0x2001]);
            let c = if kind == 1 {
                let call = rng.below(3) as i64;
                Cmd::new(Op::Poll, &[call, 5000, 1, fd, if call == 2 { 1 } else { events }])
            } else {
                let ep = self.tell(at.p, lane, &Cmd::new(Op::EpNew, &[]))?.ret;
                self.add(at.p, ep, Obj::Set(self.sets));
                self.sets += 1;
                let how = pick(rng, &[0, libc::EPOLLET, libc::EPOLLONESHOT, libc::EPOLLEXCLUSIVE]);
                let events = (events & if how == libc::EPOLLEXCLUSIVE { 1 } else { -1 }) | (how as u32 as i64);
                let ctl = Cmd::new(Op::EpCtl, &[ep, libc::EPOLL_CTL_ADD as i64, fd, events, fd]);
                self.tell(at.p, lane, &ctl)?;
                self.model.ends[at.e].watched = true;
                Cmd::new(Op::EpWait, &[ep, rng.below(3) as i64, 4, 5000])
            };
            (c, end.lowat)
        };
        let s = Sleeper {
            ends: vec![at.e],
            set: (kind == 2).then(|| self.sets - 1),
            takes: kind == 0,
            restarts: kind == 0,
            what: super::conductor::describe(&c),
        };
        self.model.ends[at.e].sleeper = Some(want);
        self.sleep(at.p, lane, c, s)?;
        if rng.below(3) > 0 {
            self.asleep(at.p, lane);
        }
        Ok(true)
    }

    /// A signal to a thread that sleeps.
    pub fn do_signal(&mut self, rng: &mut Rng) -> Done {
        let mut all = Vec::new();
        for (p, q) in self.procs.iter().enumerate().filter(|(_, q)| q.alive) {
            all.extend((1..q.sleepers.len()).filter(|&l| q.sleepers[l].is_some()).map(|l| (p, l)));
        }
        if all.is_empty() {
            return Ok(false);
        }
        let (p, lane) = pick(rng, &all);
        let restart = rng.below(2) == 0;
        self.asleep(p, lane);
        let flags = if restart { libc::SA_RESTART } else { 0 };
        let c = [self.procs[p].tids[lane], libc::SIGUSR1 as i64, flags as i64];
        self.tell(p, 0, &Cmd::new(Op::Signal, &c))?;
        let s = self.procs[p].sleepers[lane].as_ref().expect("it sleeps");
        // A receive that has taken something ends with that.
        let some = s.takes && self.model.ends[s.ends[0]].rx > 0;
        if !(s.restarts && restart) || some {
            self.woken(p, lane)?;
        } else {
            self.asleep(p, lane);
        }
        Ok(true)
    }

    /// Fills a connection until it takes no more, looks at it, and drains it.
    pub fn do_fill(&mut self, rng: &mut Rng) -> Done {
        let fits = |e: &End| !e.shut_wr && !e.ended() && e.sleeper.is_none() && !e.watched;
        let Some(at) = self.any_end(rng, fits) else { return Ok(false) };
        let o = peer(at.e);
        let other = self.model.ends[o].clone();
        if other.closed || other.ended() || other.sleeper.is_some() || other.watched || other.lowat > 1 {
            return Ok(false);
        }
        let Some((q, ofd)) = self.holder(o) else { return Ok(false) };
        let (fd, stream) = (at.fd as i64, self.stream(at.e));
        let sent = self.model.ends[at.e].sent;
        let r = self.tell(at.p, 0, &Cmd::new(Op::Fill, &[fd, 0, 0, 0, stream, sent]))?;
        self.tell(at.p, 0, &Cmd::new(Op::Poll, &[rng.below(3) as i64, 0, 1, fd, libc::POLLOUT as i64]))?;
        let mut total = r.aux;
        let mut waits = false;
        if rng.below(2) == 0 && self.procs[at.p].sleepers[1].is_none() && !self.model.ends[at.e].nonblock {
            // A send that has to wait for the drain.
            let n = 100_000;
            let c = Cmd::new(Op::SendAll, &[fd, 0, n, 0, stream, sent + total]);
            let what = super::conductor::describe(&Cmd::new(Op::SendAll, &[fd, 0, n]));
            self.sleep(at.p, 1, c, Sleeper { ends: vec![], set: None, takes: false, restarts: false, what })?;
            self.trace.pop();
            self.asleep(at.p, 1);
            total += n;
            waits = true;
        }
        let drain = Cmd::new(Op::Drain, &[ofd as i64, 0, other.rx + total, 0, stream, other.taken]);
        let d = self.quiet(q, 0, &drain)?;
        self.note(format!("p{q} drains: {}", d.text));
        if waits {
            self.woken(at.p, 1)?;
        }
        self.model.ends[at.e].sent += total;
        self.model.ends[o].taken += other.rx + total;
        self.model.ends[o].rx = 0;
        self.model.ends[at.e].dirty = true;
        self.tell(at.p, 0, &Cmd::new(Op::Poll, &[0, 2000, 1, fd, libc::POLLOUT as i64]))?;
        Ok(true)
    }
}
