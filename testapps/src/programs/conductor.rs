//! The conductor: holds no TCP socket, tells the actors one call after the other, and writes down what came of each.

use super::actor::{self, LANES, PROCS};
use super::model::{Entry, Model, Obj};
use super::wire::{self, Cmd, Op, Reply};
use crate::prng::Rng;
use crate::sys::{self, R};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// How long an answer that must come is waited for.
const PATIENCE_MS: i32 = 6000;

/// A thread that sleeps in a call.
pub struct Sleeper {
    /// The ends that can wake it.
    pub ends: Vec<usize>,
    /// The epoll set that it waits for.
    pub set: Option<usize>,
    /// It is in a call that takes bytes.
    pub takes: bool,
    /// It never returns `EINTR` when the handler was installed with `SA_RESTART`.
    pub restarts: bool,
    /// What it does.
    pub what: String,
}

/// One process of the cast.
#[derive(Default)]
pub struct Proc {
    /// Its process id.
    pub pid: i64,
    /// It lives.
    pub alive: bool,
    /// Which process forked it.
    pub parent: usize,
    /// Thread ids of helper threads; 0: not started.
    pub tids: [i64; LANES],
    /// Threads that sleep.
    pub sleepers: [Option<Sleeper>; LANES],
    /// Its fds.
    pub table: Vec<Entry>,
}

/// The program goes no further: its processes can no longer be told what to do, or are not where they must be.
pub struct Stop(pub String);

impl From<i32> for Stop {
    fn from(e: i32) -> Stop {
        Stop(format!("conductor: {}", sys::strerror(e)))
    }
}

/// What a step returns: whether it did anything.
pub type Done = Result<bool, Stop>;

/// A program that is being run.
pub struct Run {
    /// The seed of the streams' bytes.
    pub seed: u64,
    /// The processes.
    pub procs: Vec<Proc>,
    /// The connections.
    pub model: Model,
    /// What came of each call so far.
    pub trace: Vec<String>,
    /// The step that is being done.
    pub step: usize,
    /// (process, port) of listeners.
    pub listeners: Vec<(usize, RawFd, i64)>,
    /// Epoll sets so far.
    pub sets: usize,
    /// Connections are made in advance until they leave TCP.
    pub warm: i64,
    socks: Vec<RawFd>,
}

impl Run {
    /// Makes the sockets between conductor and actors, and the first two processes.
    pub fn new(seed: u64, warm: i64) -> R<Run> {
        let mut socks = Vec::new();
        let mut pairs = Vec::new();
        for _ in 0..PROCS * LANES {
            let (mine, its) = sys::socketpair()?;
            socks.push(mine);
            pairs.push(its);
        }
        for _ in 0..PROCS {
            let (x, y) = sys::socketpair()?;
            pairs.extend([x, y]);
        }
        for (i, its) in pairs.iter().enumerate() {
            sys::dup2(*its, actor::CTL_BASE + i as RawFd)?;
            sys::close(*its)?;
        }
        let mut run = Run {
            seed,
            procs: (0..PROCS).map(|_| Proc::default()).collect(),
            model: Model::default(),
            trace: Vec::new(),
            step: 0,
            listeners: Vec::new(),
            sets: 0,
            warm,
            socks,
        };
        for p in 0..2 {
            let pid = sys::fork()?;
            if pid == 0 {
                // The numbers that a program sees begin after the standard ones.
                for s in &run.socks {
                    let _ = sys::close(*s);
                }
                actor::process(p);
            }
            run.procs[p].pid = pid as i64;
            run.procs[p].alive = true;
        }
        for i in 0..pairs.len() {
            sys::close(actor::CTL_BASE + i as RawFd)?;
        }
        Ok(run)
    }

    /// One line of the trace.
    pub fn note(&mut self, text: String) {
        self.trace.push(format!("{:3} {text}", self.step));
    }

    fn sock(&self, p: usize, lane: usize) -> RawFd {
        self.socks[p * LANES + lane]
    }

    fn reply(&self, p: usize, lane: usize) -> Result<Reply, Stop> {
        match sys::wait1(self.sock(p, lane), libc::POLLIN, PATIENCE_MS)? {
            0 => {
                let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.procs[p].pid)).unwrap_or_default();
                // Behind the name: the state.
                let lives = stat.rsplit(") ").next().is_some_and(|s| !s.is_empty() && !s.starts_with('Z'));
                let how = if lives { "HANG" } else { "DEAD" };
                Err(Stop(format!("{how}: p{p}.{lane} does not answer")))
            }
            _ => Ok(wire::get_reply(self.sock(p, lane))?),
        }
    }

    /// Tells an actor something and waits for its answer; writes nothing down.
    pub fn quiet(&mut self, p: usize, lane: usize, c: &Cmd) -> Result<Reply, Stop> {
        if lane > 0 && self.procs[p].tids[lane] == 0 {
            wire::put_cmd(self.sock(p, 0), &Cmd::new(Op::Lane, &[lane as i64]))?;
            self.procs[p].tids[lane] = self.reply(p, 0)?.aux;
        }
        wire::put_cmd(self.sock(p, lane), c)?;
        self.reply(p, lane).map_err(|Stop(s)| Stop(format!("{s}: {}", describe(c))))
    }

    /// Tells an actor something, waits for its answer, and writes it down.
    pub fn tell(&mut self, p: usize, lane: usize, c: &Cmd) -> Result<Reply, Stop> {
        let r = match self.quiet(p, lane, c) {
            Ok(r) => r,
            Err(Stop(s)) => {
                self.note(format!("p{p}.{lane} {} = {s}", describe(c)));
                return Err(Stop("stopped".into()));
            }
        };
        self.note(format!("p{p}.{lane} {} = {}", describe(c), r.text));
        Ok(r)
    }

    /// Tells a process something that it does not answer.
    pub fn tell_only(&mut self, p: usize, c: &Cmd) -> Result<(), Stop> {
        wire::put_cmd(self.sock(p, 0), c)?;
        self.note(format!("p{p} {}", describe(c)));
        Ok(())
    }

    /// Two commands at a time, of two lanes that depend on each other.
    pub fn both(&mut self, a: (usize, usize, Cmd), b: (usize, usize, Cmd)) -> Result<(Reply, Reply), Stop> {
        for (p, lane, _) in [&a, &b] {
            if *lane > 0 && self.procs[*p].tids[*lane] == 0 {
                self.quiet(*p, 0, &Cmd::new(Op::Lane, &[*lane as i64])).map(|r| self.procs[*p].tids[*lane] = r.aux)?;
            }
        }
        wire::put_cmd(self.sock(a.0, a.1), &a.2)?;
        wire::put_cmd(self.sock(b.0, b.1), &b.2)?;
        Ok((self.reply(a.0, a.1)?, self.reply(b.0, b.1)?))
    }

    /// A lane that can take a command: mostly the first.
    pub fn lane(&self, p: usize, rng: &mut Rng) -> usize {
        if rng.below(4) > 0 {
            return 0;
        }
        let l = rng.below(LANES as u64) as usize;
        if self.procs[p].sleepers[l].is_some() {
            0
        } else {
            l
        }
    }

    /// Lets a lane do what will not return before something else happens.
    pub fn sleep(&mut self, p: usize, lane: usize, mut c: Cmd, s: Sleeper) -> Result<(), Stop> {
        if self.procs[p].tids[lane] == 0 {
            self.procs[p].tids[lane] = self.quiet(p, 0, &Cmd::new(Op::Lane, &[lane as i64]))?.aux;
        }
        c.announce = true;
        wire::put_cmd(self.sock(p, lane), &c)?;
        self.reply(p, lane)?;
        self.note(format!("p{p}.{lane} {} ... sleeps", describe(&c)));
        self.procs[p].sleepers[lane] = Some(s);
        Ok(())
    }

    /// Waits until a thread really sleeps in the kernel.
    pub fn asleep(&self, p: usize, lane: usize) {
        let path = format!("/proc/{}/task/{}/stat", self.procs[p].pid, self.procs[p].tids[lane]);
        let begin = Instant::now();
        // Where the library stumbles on purpose, a call may sleep that has not looked yet.
        let most = if std::env::var_os("RINGSOCK_CHAOS").is_some() { 100 } else { 3 };
        let mut seen = 0;
        while seen < most && begin.elapsed() < Duration::from_secs(1) {
            let s = std::fs::read_to_string(&path).unwrap_or_default();
            let state = s.rfind(')').and_then(|i| s[i..].split(' ').nth(1).map(str::to_string));
            seen = if state.as_deref() == Some("S") { seen + 1 } else { 0 };
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Waits for a thread that must have been woken, and writes down what its call returned.
    pub fn woken(&mut self, p: usize, lane: usize) -> Result<(), Stop> {
        let Some(s) = self.procs[p].sleepers[lane].take() else { return Ok(()) };
        for &e in &s.ends {
            self.model.ends[e].sleeper = None;
        }
        match self.reply(p, lane) {
            Ok(r) => {
                self.note(format!("p{p}.{lane} ... {} = {}", s.what, r.text));
                if s.takes {
                    self.model.took(s.ends[0], r.ret);
                }
                Ok(())
            }
            Err(Stop(t)) => {
                self.note(format!("p{p}.{lane} ... {} = {t}", s.what));
                Err(Stop("stopped".into()))
            }
        }
    }

    /// Wakes who must be awake now, and catches who is awake and must not be.
    pub fn sleepers(&mut self) -> Result<(), Stop> {
        for p in 0..PROCS {
            for lane in 0..LANES {
                let Some(s) = &self.procs[p].sleepers[lane] else { continue };
                let met = s.ends.iter().any(|&e| {
                    let end = &self.model.ends[e];
                    end.ended() || end.rx >= end.sleeper.unwrap_or(1)
                });
                if met {
                    self.woken(p, lane)?;
                } else if sys::wait1(self.sock(p, lane), libc::POLLIN, 0)? != 0 {
                    self.note(format!("p{p}.{lane} is awake for nothing"));
                    self.woken(p, lane)?;
                }
            }
        }
        Ok(())
    }

    /// A living process that has an end, and the number.
    pub fn holder(&self, e: usize) -> Option<(usize, RawFd)> {
        (0..PROCS)
            .filter(|&p| self.procs[p].alive)
            .find_map(|p| self.procs[p].table.iter().find(|t| t.obj == Obj::End(e)).map(|t| (p, t.fd)))
    }

    /// Waits until everything that is on its way has arrived.
    pub fn settle(&mut self) -> Result<(), Stop> {
        for e in 0..self.model.ends.len() {
            let end = self.model.ends[e].clone();
            if end.unacked && end.watched && !end.closed {
                self.model.ends[e].unacked = false;
                if let Some((p, fd)) = self.holder(e) {
                    self.quiet(p, 0, &Cmd::new(Op::Acked, &[fd as i64]))?;
                }
            }
            if !end.dirty || end.closed || end.full || self.model.ends[e ^ 1].full {
                continue;
            }
            if end.sleeper.is_some_and(|n| n > 1) {
                continue;
            }
            self.model.ends[e].dirty = false;
            let Some((p, fd)) = self.holder(e) else { continue };
            let c = Cmd::new(Op::Settle, &[fd as i64, end.rx, end.rdhup() as i64, end.hup() as i64]);
            let r = self.quiet(p, 0, &c)?;
            if r.ret != 0 {
                self.note(format!("p{p} end {e} (fd {fd}) {}", r.text));
                return Err(Stop("stopped".into()));
            }
        }
        Ok(())
    }

    /// An fd of a process is gone.
    pub fn forget(&mut self, p: usize, fd: RawFd) {
        let Some(i) = self.procs[p].table.iter().position(|t| t.fd == fd) else { return };
        let t = self.procs[p].table.remove(i);
        self.listeners.retain(|l| (l.0, l.1) != (p, fd));
        self.dropped(t.obj);
    }

    fn dropped(&mut self, obj: Obj) {
        if let Obj::End(e) = obj {
            if self.holder(e).is_none() && !self.model.ends[e].closed {
                self.model.closed(e);
            }
        }
    }

    /// A process has ended.
    pub fn ended(&mut self, p: usize) {
        self.procs[p].alive = false;
        self.listeners.retain(|l| l.0 != p);
        for t in std::mem::take(&mut self.procs[p].table) {
            self.dropped(t.obj);
        }
    }

    /// A process has one more fd.
    pub fn add(&mut self, p: usize, fd: i64, obj: Obj) {
        if fd >= 0 {
            self.forget(p, fd as RawFd);
            self.procs[p].table.push(Entry { fd: fd as RawFd, obj });
        }
    }

    /// Ends all processes; tells the process ids of the first two.
    pub fn end(&mut self, clean: bool) -> Vec<i64> {
        for p in (0..PROCS).rev() {
            if !self.procs[p].alive {
                continue;
            }
            let pid = self.procs[p].pid as libc::pid_t;
            let mut gone = false;
            if clean && wire::put_cmd(self.sock(p, 0), &Cmd::new(Op::Quit, &[])).is_ok() && self.reply(p, 0).is_ok() {
                gone = p < 2 && ends_within(pid, Duration::from_secs(5));
                if p >= 2 {
                    let parent = self.procs[p].parent;
                    let c = Cmd::new(Op::Reap, &[pid as i64]);
                    gone = self.procs[parent].alive && self.quiet(parent, 0, &c).is_ok();
                }
            }
            if !gone {
                let _ = sys::kill(pid, libc::SIGKILL);
                if p < 2 {
                    let _ = sys::waitpid(pid);
                }
                if clean && p < 2 {
                    self.note(format!("p{p} did not end"));
                }
            }
            self.procs[p].alive = false;
        }
        for s in self.socks.drain(..) {
            let _ = sys::close(s);
        }
        self.procs[..2].iter().map(|p| p.pid).collect()
    }
}

fn ends_within(pid: libc::pid_t, limit: Duration) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < limit {
        match sys::waitpid_now(pid) {
            Ok(Some(_)) | Err(_) => return true,
            Ok(None) => std::thread::sleep(Duration::from_micros(100)),
        }
    }
    false
}

/// A command as the trace shows it; without what differs from run to run.
pub fn describe(c: &Cmd) -> String {
    let hidden = match c.op {
        Op::Connect | Op::Reap | Op::Warm => 20,
        Op::Signal => 1,
        _ => 0,
    };
    let last = c.a.iter().rposition(|v| *v != 0).map_or(0, |i| i + 1);
    let seeded = matches!(c.op, Op::Send | Op::Recv | Op::SendAll | Op::Drain | Op::Fill | Op::Sendfile | Op::Splice);
    let words: Vec<String> = (hidden..last.max(1))
        .filter(|i| *i < last.max(1) && !(seeded && (*i == 4 || *i == 5)))
        .map(|i| c.a[i].to_string())
        .collect();
    format!("{:?}({})", c.op, words.join(" "))
}
