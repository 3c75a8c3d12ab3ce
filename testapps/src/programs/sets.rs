//! Steps that deal with epoll sets, and with processes.

use super::actor::{self, PROCS};
use super::conductor::{Done, Run};
use super::model::Obj;
use super::steps::pick;
use super::wire::{Cmd, Op};
use crate::prng::Rng;
use crate::sys;
use libc::{EPOLLET, EPOLLEXCLUSIVE, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDHUP};

impl Run {
    fn set_of(&self, rng: &mut Rng) -> Option<(usize, i64)> {
        let p = self.any_proc(rng);
        let all: Vec<i64> = self.procs[p]
            .table
            .iter()
            .filter(|t| matches!(t.obj, Obj::Set(_)) && !self.in_use(t.obj))
            .map(|t| t.fd as i64)
            .collect();
        (!all.is_empty()).then(|| (p, pick(rng, &all)))
    }

    /// A new epoll set, or a change of one.
    pub fn do_epoll_ctl(&mut self, rng: &mut Rng) -> Done {
        let Some((p, ep)) = self.set_of(rng).filter(|_| rng.below(5) > 0) else {
            let p = self.any_proc(rng);
            if self.procs[p].table.len() > 14 {
                return Ok(false);
            }
            let lane = self.lane(p, rng);
            let r = self.tell(p, lane, &Cmd::new(Op::EpNew, &[]))?;
            self.add(p, r.ret, Obj::Set(self.sets));
            self.sets += 1;
            return Ok(true);
        };
        let list = self.procs[p].table.clone();
        let t = pick(rng, &list);
        let op = pick(rng, &[libc::EPOLL_CTL_ADD, libc::EPOLL_CTL_ADD, libc::EPOLL_CTL_MOD, libc::EPOLL_CTL_DEL]);
        let base = pick(rng, &[EPOLLIN, EPOLLIN, EPOLLOUT, EPOLLIN | EPOLLOUT, EPOLLIN | EPOLLRDHUP, EPOLLRDHUP, 0]);
        let how = pick(rng, &[0, 0, EPOLLET, EPOLLET, EPOLLONESHOT, EPOLLET | EPOLLONESHOT, EPOLLEXCLUSIVE]);
        let events = (base | how) as u32 as i64;
        if let Obj::End(e) = t.obj {
            if self.model.ends[e].sleeper.is_some_and(|n| n > 1) {
                return Ok(false);
            }
            self.model.ends[e].watched = true;
        }
        let lane = self.lane(p, rng);
        let data = t.fd as i64 + 1000 * rng.below(3) as i64;
        self.tell(p, lane, &Cmd::new(Op::EpCtl, &[ep, op as i64, t.fd as i64, events, data]))?;
        Ok(true)
    }

    /// What an epoll set has.
    pub fn do_epoll_wait(&mut self, rng: &mut Rng) -> Done {
        let Some((p, ep)) = self.set_of(rng) else { return Ok(false) };
        let lane = self.lane(p, rng);
        let (call, ms) = (rng.below(3) as i64, pick(rng, &[0, 0, 2]));
        self.tell(p, lane, &Cmd::new(Op::EpWait, &[ep, call, 30, ms]))?;
        Ok(true)
    }

    /// A fork; or the end of a forked child, of its own accord or by a signal.
    pub fn do_fork(&mut self, rng: &mut Rng) -> Done {
        let free = (2..PROCS).find(|&p| self.procs[p].pid == 0);
        let children: Vec<usize> = (2..PROCS).filter(|&p| self.procs[p].alive).collect();
        if children.is_empty() || (free.is_some() && rng.below(3) == 0) {
            let Some(child) = free else { return Ok(false) };
            let p = self.any_proc(rng);
            let lane = self.lane(p, rng);
            let r = self.tell(p, lane, &Cmd::new(Op::Fork, &[child as i64]))?;
            if r.errno == 0 {
                let table = self.procs[p].table.clone();
                let c = &mut self.procs[child];
                (c.pid, c.alive, c.parent, c.table) = (r.aux, true, p, table);
            }
            return Ok(true);
        }
        let c = pick(rng, &children);
        let parent = self.procs[c].parent;
        let sleeps = self.procs[c].sleepers.iter().any(|s| s.is_some());
        let has_children = self.procs.iter().any(|q| q.alive && q.parent == c);
        if sleeps || has_children || !self.procs[parent].alive {
            return Ok(false);
        }
        if rng.below(2) == 0 {
            self.quiet(c, 0, &Cmd::new(Op::Quit, &[]))?;
            self.note(format!("p{c} ends"));
        } else {
            sys::kill(self.procs[c].pid as i32, libc::SIGKILL)?;
            self.note(format!("p{c} is killed"));
        }
        self.tell(parent, 0, &Cmd::new(Op::Reap, &[self.procs[c].pid]))?;
        self.ended(c);
        Ok(true)
    }

    /// Passes an fd to another process by a Unix socket.
    pub fn do_pass(&mut self, rng: &mut Rng) -> Done {
        let (p, q) = (self.any_proc(rng), self.any_proc(rng));
        let list: Vec<_> = self.procs[p].table.iter().filter(|t| matches!(t.obj, Obj::End(_))).copied().collect();
        if list.is_empty() || self.procs[q].table.len() > 14 {
            return Ok(false);
        }
        let t = pick(rng, &list);
        let (to, from) = actor::mailbox(q);
        self.tell(p, 0, &Cmd::new(Op::PassFd, &[to as i64, t.fd as i64]))?;
        let r = self.tell(q, 0, &Cmd::new(Op::TakeFd, &[from as i64]))?;
        self.add(q, r.ret, t.obj);
        Ok(true)
    }

    /// A receive by `splice`, which takes a connection off rings.
    pub fn do_splice(&mut self, rng: &mut Rng) -> Done {
        let fits =
            |e: &super::model::End| e.sleeper.is_none() && (e.rx > 0 || e.peer_fin || e.nonblock) && e.lowat == 1;
        let Some(at) = self.any_end(rng, fits) else { return Ok(false) };
        let n = rng.log_uniform(1, 4000) as i64;
        let (taken, stream) = (self.model.ends[at.e].taken, self.stream(at.e ^ 1));
        let r = self.tell(at.p, 0, &Cmd::new(Op::Splice, &[at.fd as i64, n, 0, 0, stream, taken]))?;
        self.model.took(at.e, r.ret);
        Ok(true)
    }
}
