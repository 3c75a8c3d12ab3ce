//! Steps in which a process gets a program of its own that goes on with what it has inherited.

use super::actor::{LANES, PROCS};
use super::conductor::{Done, Run, Stop};
use super::model::Obj;
use super::steps::pick;
use super::wire::{Cmd, Op};
use crate::prng::Rng;
use std::os::fd::RawFd;

/// Numbers from here on are not the program's.
const MOST: i64 = 200;

impl Run {
    /// A child that is a new image, of which something may be closed while it starts; or a process that becomes one.
    pub fn do_image(&mut self, rng: &mut Rng) -> Done {
        let p = self.any_proc(rng);
        let bare = (rng.below(4) == 0) as i64;
        let way = rng.below(4) as i64;
        if way == 3 {
            // Children are to end with the thread that has made them, which may not be the one that goes on.
            let has_children = self.procs.iter().any(|q| q.alive && q.parent == p);
            if has_children || self.procs[p].sleepers.iter().any(Option::is_some) {
                return Ok(false);
            }
            self.keep_some(p, 0, rng)?;
            self.tell_only(p, &Cmd::new(Op::Become, &[p as i64, 0, bare]))?;
            self.procs[p].tids = [0; LANES];
            self.inherit(p)?;
            return Ok(true);
        }
        let Some(child) = (2..PROCS).find(|&p| self.procs[p].pid == 0) else { return Ok(false) };
        let lane = self.lane(p, rng);
        self.keep_some(p, lane, rng)?;
        let r = self.tell(p, lane, &Cmd::new(Op::Start, &[child as i64, way, bare]))?;
        if r.errno != 0 {
            return Ok(true);
        }
        let table = self.procs[p].table.clone();
        let unused: Vec<RawFd> = table.iter().filter(|t| !self.in_use(t.obj)).map(|t| t.fd).collect();
        let c = &mut self.procs[child];
        (c.pid, c.alive, c.parent, c.table) = (r.aux, true, p, table);
        if !unused.is_empty() && rng.below(2) == 0 {
            let fd = pick(rng, &unused);
            self.tell(p, lane, &Cmd::new(Op::Close, &[fd as i64, 0]))?;
            self.forget(p, fd);
        }
        self.inherit(child)?;
        Ok(true)
    }

    /// Most of what a process has is inherited over `exec` from now on.
    fn keep_some(&mut self, p: usize, lane: usize, rng: &mut Rng) -> Result<(), Stop> {
        for t in self.procs[p].table.clone() {
            if !matches!(t.obj, Obj::Set(_)) && rng.below(4) > 0 {
                self.tell(p, lane, &Cmd::new(Op::Keep, &[t.fd as i64]))?;
            }
        }
        Ok(())
    }

    /// An image is up: what was closed on the way to it is gone.
    fn inherit(&mut self, p: usize) -> Result<(), Stop> {
        let r = self.tell(p, 0, &Cmd::new(Op::Have, &[MOST]))?;
        let open: Vec<RawFd> = r.text.split(' ').filter_map(|n| n.parse().ok()).collect();
        let gone: Vec<RawFd> = self.procs[p].table.iter().map(|t| t.fd).filter(|fd| !open.contains(fd)).collect();
        gone.into_iter().for_each(|fd| self.forget(p, fd));
        // Known to differ: sets, to which the library of the image before has added something of its own.
        for t in self.procs[p].table.clone().iter().filter(|t| matches!(t.obj, Obj::Set(_))) {
            self.quiet(p, 0, &Cmd::new(Op::Close, &[t.fd as i64]))?;
            self.forget(p, t.fd);
        }
        Ok(())
    }
}
