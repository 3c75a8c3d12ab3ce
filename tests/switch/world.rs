//! A simulated world: two endpoints, two bounded TCP pipes, two rings, a link.
//!
//! The driver here does what the runtime must do around [`Switch`]; every rule
//! of its own that the promises depend on is marked "Rule".

use ringsock_core::switch::{End as StreamEnd, RxPath, Switch, TxPath};
use ringsock_core::wire::{self, Nonce, Scan, MARK_LEN};
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// The end that accepted the TCP connection.
pub const A: usize = 0;
/// The end that connected: it proposes upgrades.
pub const B: usize = 1;

/// What does not change during a run.
#[derive(Debug)]
pub struct Cfg {
    /// What each end's program sends.
    pub stream: [Vec<u8>; 2],
    pub pipe_cap: usize,
    pub ring_cap: usize,
    /// Like RDMA: ring bytes and credits travel, and stop where the link breaks;
    /// nobody can know that the peer has begun its mark.
    pub remote: bool,
}

#[derive(Clone, Debug)]
pub struct Shared(Arc<Cfg>);
impl Hash for Shared {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}
impl PartialEq for Shared {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl Eq for Shared {}
impl Deref for Shared {
    type Target = Cfg;
    fn deref(&self) -> &Cfg {
        &self.0
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pipe {
    pub q: VecDeque<u8>,
    pub ended: bool,
}

/// One direction's ring; the sender's end has the same index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ring {
    pub buf: Vec<u8>,
    pub produced: u64,
    /// What the receiver can see of `produced`.
    pub visible: u64,
    pub consumed: u64,
    /// What the sender knows of `consumed`.
    pub credit: u64,
    pub fin: Option<u64>,
    /// `start_mark` was called.
    pub begun: bool,
}

impl Ring {
    fn new(cap: usize) -> Ring {
        Ring { buf: vec![0; cap], ..Ring::default() }
    }
    fn at(&self, offset: u64) -> u8 {
        self.buf[offset as usize % self.buf.len()]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Msg {
    Propose(u8),
    Accept(u8),
    Confirm(u8),
    /// "I do not, and never shall, use your nonce."
    Refuse(u8),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Link {
    pub up: bool,
    pub broken: bool,
    /// To each end.
    pub msgs: [VecDeque<Msg>; 2],
    pub noticed: [bool; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shake {
    Idle,
    /// B has armed and proposed.
    Proposed,
    /// A has armed and accepted.
    Accepted,
    /// This end may mark.
    Ready,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    pub sw: Switch,
    pub shake: Shake,
    pub gen: u8,
    pub alive: bool,
    /// Bytes of the program that `send` accepted, and that were delivered to the program.
    pub sent: usize,
    pub read: usize,
    pub want_fin: bool,
    pub kernel_fin: bool,
    pub eof: bool,
    /// The peer's kernel FIN was read.
    pub tcp_eof: bool,
    /// Wants out at once; and what is known of the peer.
    pub hurry: bool,
    pub peer_hurries: bool,
    /// Taken before the mark, for the program.
    pub kept: Vec<u8>,
    /// Given back, and not repeated yet.
    pub given: Vec<u8>,
    /// The mark behind them never came.
    pub only_kept: bool,
    /// What the peer has given back.
    pub back: Vec<u8>,
}

/// Faults after which a reset is a legitimate outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Faults {
    pub killed: bool,
    pub lied: bool,
    /// Who lied: what comes from there is its own affair.
    pub liar: [bool; 2],
    /// Who said `Back` or `Return` out of turn, and so made its peer repeat what it need not: what it gets is its own
    /// affair, too.
    pub out_of_turn: [bool; 2],
    /// A gave up waiting for the mark of a broken handshake and closed its stream.
    pub timed_out: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub cfg: Shared,
    pub ends: [Endpoint; 2],
    pub pipes: [Pipe; 2],
    pub rings: [Ring; 2],
    pub link: Link,
    pub reset: bool,
    pub faults: Faults,
    pub gen: u8,
}

/// One thing that happens. `n` bounds the bytes that move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    Write(usize, usize),
    Read(usize, usize),
    Flush(usize, usize),
    Control(usize, usize),
    Mark(usize),
    Leave(usize),
    /// As `Leave`; and nobody's reading is waited for.
    Hurry(usize),
    Shut(usize),
    Msg(usize),
    /// The link breaks; what was under way arrives or is lost.
    Lose(bool),
    Notice(usize),
    Kill(usize),
    Propose,
    Timeout,
    Sync,
    /// The peer of this end lies: the next frame is something else.
    Lie(usize, u32),
}

pub type Check = Result<(), String>;

macro_rules! ensure {
    ($cond:expr, $($arg:tt)+) => {
        if !$cond {
            return Err(format!($($arg)+));
        }
    };
}
pub(crate) use ensure;

/// Nonces from this one on are never handed out.
pub const DECOY: u8 = 200;
/// No program sends this byte: it stands for what nobody can guess.
pub const SECRET: u8 = 0x5a;

/// A nonce that is as unpleasant as it can be: it starts like a mark.
pub fn nonce(gen: u8, end: usize) -> Nonce {
    let mut n = [0; 16];
    n[..8].copy_from_slice(&wire::MARK_MAGIC[..8]);
    n[8] = 0xf3;
    n[9] = if gen < DECOY { SECRET } else { 0 };
    n[14] = gen;
    n[15] = end as u8;
    n
}

impl World {
    pub fn new(cfg: Arc<Cfg>) -> World {
        let end = Endpoint {
            sw: Switch::new(),
            shake: Shake::Idle,
            gen: 0,
            alive: true,
            sent: 0,
            read: 0,
            want_fin: false,
            kernel_fin: false,
            eof: false,
            tcp_eof: false,
            hurry: false,
            peer_hurries: false,
            kept: Vec::new(),
            given: Vec::new(),
            only_kept: false,
            back: Vec::new(),
        };
        World {
            cfg: Shared(cfg),
            ends: [end.clone(), end],
            pipes: Default::default(),
            rings: Default::default(),
            link: Link::default(),
            reset: false,
            faults: Faults::default(),
            gen: 0,
        }
    }

    pub fn apply(&mut self, action: Action) -> Check {
        let end = match action {
            Action::Write(e, _) | Action::Read(e, _) | Action::Flush(e, _) | Action::Control(e, _) => e,
            Action::Mark(e) | Action::Leave(e) | Action::Hurry(e) | Action::Shut(e) | Action::Msg(e) => e,
            Action::Notice(e) | Action::Kill(e) | Action::Lie(e, _) => e,
            Action::Timeout => A,
            Action::Propose => B,
            Action::Lose(_) | Action::Sync => usize::MAX,
        };
        if self.reset || (end < 2 && !self.ends[end].alive) {
            return Ok(());
        }
        match action {
            Action::Write(e, n) => self.write(e, n)?,
            Action::Read(e, n) => self.read(e, n)?,
            Action::Flush(e, n) => self.flush(e, n)?,
            Action::Control(e, n) => self.control(e, n)?,
            Action::Mark(e) => self.mark(e)?,
            Action::Leave(e) => self.leave(e)?,
            Action::Hurry(e) => self.hurry(e)?,
            Action::Shut(e) => {
                self.ends[e].want_fin = true;
                self.try_fin(e, false)?;
            }
            Action::Msg(e) => self.message(e)?,
            Action::Lose(keep) => self.lose(keep),
            Action::Notice(e) => self.notice(e)?,
            Action::Kill(e) => self.kill(e),
            Action::Propose => self.propose(),
            Action::Timeout => {
                if self.ends[A].want_fin && !self.ends[A].kernel_fin {
                    self.try_fin(A, true)?;
                }
            }
            Action::Sync => self.sync(),
            Action::Lie(e, r) => self.lie(e, r),
        }
        if !self.cfg.remote {
            self.sync();
        }
        ensure!(
            !self.reset || self.faults.killed || self.faults.lied || self.faults.timed_out,
            "reset without a fault"
        );
        Ok(())
    }

    // ---- sending -------------------------------------------------------

    fn pipe_write(&mut self, e: usize, bytes: &[u8]) -> usize {
        if !self.ends[1 - e].alive {
            return bytes.len();
        }
        let n = bytes.len().min(self.cfg.pipe_cap.saturating_sub(self.pipes[e].q.len()));
        self.pipes[e].q.extend(&bytes[..n]);
        n
    }

    /// Rule: pending bytes, then the replay, and only then anything of the program.
    fn flush(&mut self, e: usize, max: usize) -> Check {
        let mut left = max;
        ensure!(!self.ends[e].kernel_fin || self.ends[e].sw.pending().is_empty(), "pending after FIN");
        let pending = self.ends[e].sw.pending().to_vec();
        let n = self.pipe_write(e, &pending[..pending.len().min(left)]);
        self.ends[e].sw.written(n);
        left -= n;
        if !self.ends[e].sw.pending().is_empty() {
            return Ok(());
        }
        let given = self.ends[e].sw.giving();
        if !given.is_empty() {
            ensure!(given.end == self.ends[e].kept.len() as u64, "gives {given:?} of what is kept");
            let bytes: Vec<u8> = self.ends[e].kept[given.start as usize..].iter().take(left).copied().collect();
            let n = self.pipe_write(e, &bytes);
            self.ends[e].sw.gave(n as u64);
            self.step(e)?;
            return if n == 0 || left == n || self.reset { Ok(()) } else { self.flush(e, left - n) };
        }
        let range = self.ends[e].sw.replay_back();
        if !range.is_empty() {
            ensure!(range.end == self.ends[e].back.len() as u64, "repeats {range:?} of what was given back");
            let bytes: Vec<u8> = self.ends[e].back[range.start as usize..].iter().take(left).copied().collect();
            let n = self.pipe_write(e, &bytes);
            self.ends[e].sw.replayed_back(n as u64);
            left -= n;
            self.settled(e);
        }
        if !self.ends[e].sw.replay_back().is_empty() {
            return Ok(());
        }
        let range = self.ends[e].sw.replay();
        if !range.is_empty() {
            let ring = &self.rings[e];
            ensure!(range.end == ring.produced, "replay to {range:?}, produced {}", ring.produced);
            let there = range.start + ring.buf.len() as u64 >= ring.produced;
            ensure!(there && (range.start >= ring.credit || self.faults.lied), "replay of freed bytes {range:?}");
            let bytes: Vec<u8> = range.take(left).map(|at| ring.at(at)).collect();
            let n = self.pipe_write(e, &bytes);
            self.ends[e].sw.replayed(n as u64);
            self.settled(e);
        }
        self.try_fin(e, false)
    }

    fn write(&mut self, e: usize, n: usize) -> Check {
        self.flush(e, usize::MAX)?;
        let end = &self.ends[e];
        if end.want_fin || !end.sw.pending().is_empty() || !self.ends[1 - e].alive {
            return Ok(());
        }
        let from = end.sent;
        let until = (from + n).min(self.cfg.stream[e].len());
        let accepted = match end.sw.tx() {
            TxPath::Tcp => {
                let bytes = self.cfg.stream[e][from..until].to_vec();
                self.pipe_write(e, &bytes)
            }
            TxPath::Ring => {
                let ring = &mut self.rings[e];
                let room = ring.buf.len() - (ring.produced - ring.credit) as usize;
                let count = room.min(until - from);
                for i in 0..count {
                    let at = (ring.produced as usize + i) % ring.buf.len();
                    ring.buf[at] = self.cfg.stream[e][from + i];
                }
                ring.produced += count as u64;
                count
            }
            TxPath::Replay => 0,
        };
        self.ends[e].sent += accepted;
        Ok(())
    }

    fn mark(&mut self, e: usize) -> Check {
        ensure!(!self.ends[e].kernel_fin || !self.ends[e].sw.can_mark(), "could mark after FIN");
        self.start_mark(e);
        self.step(e)
    }

    /// Rule: `begun` is visible before the first byte of the mark is written, so only the owner begins one.
    fn start_mark(&mut self, e: usize) {
        self.rings[e].begun |= self.ends[e].sw.start_mark();
    }

    pub fn leave(&mut self, e: usize) -> Check {
        self.ends[e].sw.leave();
        self.step(e)
    }

    /// Rule: an end that may mark marks first and closes on the ring; an end that has handed
    /// out its nonce and does not know yet waits (for a bounded time, once the link is broken).
    fn try_fin(&mut self, e: usize, timeout: bool) -> Check {
        if !self.ends[e].want_fin || self.ends[e].kernel_fin {
            return Ok(());
        }
        if self.ends[e].sw.can_mark() {
            self.mark(e)?;
        }
        let end = &self.ends[e];
        if !end.sw.pending().is_empty() || end.sw.tx() == TxPath::Replay {
            return Ok(());
        }
        match (end.sw.tx(), end.sw.rx()) {
            (TxPath::Ring, _) => {
                let ring = &mut self.rings[e];
                ring.fin = Some(ring.produced);
                return Ok(());
            }
            (TxPath::Replay, _) => return Ok(()),
            (TxPath::Tcp, RxPath::Armed | RxPath::Draining) if e == B => {
                self.ends[B].sw.disarm();
                ensure!(self.ends[B].sw.is_plain(), "B cannot disarm");
                self.post(A, Msg::Refuse(self.ends[B].gen));
                self.ends[B].shake = Shake::Idle;
            }
            (TxPath::Tcp, RxPath::Armed | RxPath::Draining) if !timeout || !self.link.noticed[A] => return Ok(()),
            (TxPath::Tcp, RxPath::Armed | RxPath::Draining) => self.faults.timed_out = true,
            _ => {}
        }
        self.ends[e].kernel_fin = true;
        self.pipes[e].ended = true;
        Ok(())
    }

    // ---- receiving -----------------------------------------------------

    pub fn deliver(&mut self, e: usize, bytes: &[u8]) -> Check {
        let end = &mut self.ends[e];
        let other = &self.cfg.stream[1 - e];
        ensure!(!end.eof || bytes.is_empty() || self.faults.lied, "bytes after EOF");
        let until = end.read + bytes.len();
        if self.faults.liar[1 - e] || self.faults.out_of_turn[e] {
            end.read = until;
            return Ok(());
        }
        ensure!(other.get(end.read..until) == Some(bytes), "end {e} at {}: wrong bytes {bytes:?}", end.read);
        end.read = until;
        let sent = self.ends[1 - e].sent;
        ensure!(until <= sent, "delivered more than was accepted");
        Ok(())
    }

    fn eof(&mut self, e: usize) -> Check {
        let (end, peer) = (&self.ends[e], &self.ends[1 - e]);
        let complete = end.read == peer.sent || self.faults.liar[1 - e] || self.faults.out_of_turn[e];
        ensure!(complete, "end {e}: EOF after {} of {} bytes", end.read, peer.sent);
        ensure!(peer.want_fin || !peer.alive, "end {e}: EOF from nowhere");
        self.ends[e].eof = true;
        Ok(())
    }

    fn stream_ended(&mut self, e: usize, partial: bool) -> Check {
        self.ends[e].tcp_eof = true;
        if !self.cfg.remote && !self.faults.lied {
            self.read_on(e)?;
        }
        match self.ends[e].sw.end(partial) {
            StreamEnd::Eof => {
                ensure!(!self.ends[e].sw.can_mark(), "end {e} may mark though the peer cannot answer");
                // Rule: with our direction on the ring and the peer's stream closed
                // before its mark, nothing could ever bring our direction back.
                if self.ends[e].sw.tx() == TxPath::Ring {
                    self.reset = true;
                }
                if self.ends[e].sw.rx() == RxPath::RingFinal {
                    self.ends[e].only_kept = true;
                    return Ok(());
                }
                self.eof(e)?;
                self.settled(e);
                self.step(e)
            }
            StreamEnd::AfterRing => Ok(()),
            StreamEnd::Reset => {
                self.reset = true;
                Ok(())
            }
        }
    }

    /// Rule: what is missing of a replay is read where it was, if that memory is there.
    fn read_on(&mut self, e: usize) -> Check {
        let end = &mut self.ends[e];
        if let Some((given, from)) = end.sw.read_on() {
            let ring = &mut self.rings[1 - e];
            ensure!((ring.consumed..=ring.visible).contains(&from), "end {e} reads on at {from} of {ring:?}");
            ring.consumed = from;
            ensure!(given as usize <= end.given.len(), "end {e}: {given} bytes of {:?} are missing", end.given);
            end.kept = end.given.split_off(end.given.len() - given as usize);
        }
        Ok(())
    }

    fn read(&mut self, e: usize, max: usize) -> Check {
        let p = 1 - e;
        match self.ends[e].sw.rx() {
            RxPath::Tcp | RxPath::Replay => {
                let n = max.min(self.pipes[p].q.len());
                let bytes: Vec<u8> = self.pipes[p].q.drain(..n).collect();
                self.deliver(e, &bytes)?;
                self.ends[e].sw.took_tcp(n);
                self.settled(e);
                if self.pipes[p].q.is_empty() && self.pipes[p].ended && !self.ends[e].tcp_eof {
                    self.stream_ended(e, false)?;
                }
            }
            RxPath::Armed => self.read_armed(e, max, false)?,
            RxPath::Draining => {
                self.drain(e)?;
                if !self.reset && matches!(self.ends[e].sw.rx(), RxPath::Draining) {
                    self.read_kept(e, max)?;
                }
            }
            RxPath::Ring => {
                self.control(e, max)?;
                if !self.reset && self.ends[e].sw.rx() == RxPath::Ring {
                    self.read_ring(e, max)?;
                }
            }
            RxPath::Returning => self.control(e, max)?,
            RxPath::RingFinal if self.ends[e].only_kept => {
                self.read_kept(e, max)?;
                if self.ends[e].kept.is_empty() && !self.ends[e].eof {
                    self.eof(e)?;
                }
            }
            RxPath::RingFinal => {
                self.read_ring(e, max)?;
                let ring = &self.rings[p];
                if self.ends[e].kept.is_empty() && ring.consumed == ring.visible && !self.ends[e].eof {
                    // Rule: without shared memory a peer that did not say goodbye is a reset.
                    if self.cfg.remote {
                        self.reset = true;
                    } else {
                        self.eof(e)?;
                    }
                }
            }
        }
        if self.reset {
            Ok(())
        } else {
            self.step(e)
        }
    }

    /// `keep`: for the program, which has not asked for it.
    pub fn read_armed(&mut self, e: usize, max: usize, keep: bool) -> Check {
        let p = 1 - e;
        // The shortest window that a reader may peek with, and longer ones.
        let size = self.pipes[p].q.len().min(max.max(MARK_LEN));
        let window: Vec<u8> = self.pipes[p].q.iter().take(size).copied().collect();
        let ended = self.pipes[p].ended && size == self.pipes[p].q.len();
        // Rule: `begun` is read after the window.
        let begun = self.rings[p].begun || self.cfg.remote;
        match wire::scan(&window, self.ends[e].sw.nonce(), begun) {
            Scan::App(n) => {
                ensure!(n > 0 && n <= window.len(), "scan: App({n}) of {}", window.len());
                let bytes: Vec<u8> = self.pipes[p].q.drain(..n.min(max)).collect();
                if keep {
                    self.ends[e].kept.extend(bytes);
                    return Ok(());
                }
                self.deliver(e, &bytes)
            }
            Scan::Mark => {
                self.pipes[p].q.drain(..MARK_LEN);
                let end = &mut self.ends[e];
                end.sw.mark_seen();
                // Rule: whoever has seen the mark may mark.
                if end.shake == Shake::Accepted {
                    if end.kernel_fin {
                        self.reset = true;
                        return Ok(());
                    }
                    end.sw.allow_mark(nonce(end.gen, B));
                    end.shake = Shake::Ready;
                }
                Ok(())
            }
            Scan::Partial => {
                ensure!(begun || window.is_empty(), "held back {window:?} though the mark has not begun");
                ensure!(window.len() < MARK_LEN, "held back a whole window");
                if ended && !self.ends[e].tcp_eof {
                    self.stream_ended(e, !window.is_empty())?;
                }
                Ok(())
            }
        }
    }

    fn read_ring(&mut self, e: usize, max: usize) -> Check {
        let kept = self.ends[e].kept.len().min(max);
        self.read_kept(e, kept)?;
        let max = max - kept;
        if !self.ends[e].kept.is_empty() {
            return Ok(());
        }
        let ring = &mut self.rings[1 - e];
        let n = (max as u64).min(ring.visible - ring.consumed);
        let bytes: Vec<u8> = (ring.consumed..ring.consumed + n).map(|at| ring.at(at)).collect();
        ring.consumed += n;
        let fin = ring.fin == Some(ring.consumed);
        self.deliver(e, &bytes)?;
        if fin && !self.ends[e].eof {
            self.eof(e)?;
        }
        Ok(())
    }

    fn control(&mut self, e: usize, max: usize) -> Check {
        let p = 1 - e;
        let mut left = max;
        self.drain(e)?;
        while !self.reset && left > 0 {
            let back = self.ends[e].sw.back_want();
            if back > 0 {
                let n = left.min(back as usize).min(self.pipes[p].q.len());
                let bytes: Vec<u8> = self.pipes[p].q.drain(..n).collect();
                self.ends[e].back.extend(bytes);
                self.ends[e].sw.took_back(n as u64);
                left -= n;
                if n > 0 {
                    continue;
                }
                if self.pipes[p].ended {
                    self.stream_ended(e, false)?;
                }
                break;
            }
            if self.ends[e].sw.control_want() == 0 {
                break;
            }
            let n = self.ends[e].sw.control_want().min(left).min(self.pipes[p].q.len());
            if n == 0 {
                if self.pipes[p].ended {
                    self.stream_ended(e, false)?;
                }
                break;
            }
            left -= n;
            let bytes: Vec<u8> = self.pipes[p].q.drain(..n).collect();
            if self.ends[e].sw.control(&bytes).is_err() {
                ensure!(self.faults.lied, "end {e}: violation by an honest peer");
                self.reset = true;
                return Ok(());
            }
            self.settled(e);
            self.step(e)?;
        }
        Ok(())
    }

    pub fn step(&mut self, e: usize) -> Check {
        let (consumed, produced) = (self.rings[1 - e].consumed, self.rings[e].produced);
        let kept = self.ends[e].kept.len() as u64;
        if self.ends[e].sw.leaving() {
            self.start_mark(e);
        }
        let before = self.ends[e].sw.clone();
        match self.ends[e].sw.step(consumed, produced, kept) {
            Ok(changed) => ensure!(changed || before == self.ends[e].sw, "step changed without saying so"),
            Err(_) => {
                ensure!(self.faults.lied, "end {e}: step: violation by an honest peer");
                self.reset = true;
                return Ok(());
            }
        }
        let end = &self.ends[e];
        ensure!(end.sw.tx() != TxPath::Ring || self.rings[e].begun, "end {e}: a mark that nobody was told of");
        // Rule: the peer may not ask for bytes that it has already given back.
        let replay = end.sw.replay();
        if !replay.is_empty() && replay.start < self.rings[e].credit {
            ensure!(self.faults.lied, "end {e}: replay of freed bytes {replay:?}");
            self.reset = true;
        }
        self.settled(e);
        let mut again = self.ends[e].sw.clone();
        ensure!(again.step(consumed, produced, kept) == Ok(false), "step is not idempotent");
        Ok(())
    }

    fn settled(&mut self, e: usize) {
        let end = &mut self.ends[e];
        match end.sw.rx() {
            RxPath::Replay if !end.kept.is_empty() => end.given = std::mem::take(&mut end.kept),
            RxPath::Tcp => {
                end.kept.clear();
                end.given.clear();
            }
            _ => {}
        }
        if end.sw.tx() == TxPath::Tcp {
            end.back.clear();
        }
        if end.sw.is_plain() {
            end.hurry = false;
        }
        let end = &mut self.ends[e];
        let plain = end.sw.tx() == TxPath::Tcp && end.sw.rx() == RxPath::Tcp;
        if plain && end.shake != Shake::Idle {
            end.shake = Shake::Idle;
            if e == B && end.tcp_eof {
                self.post(A, Msg::Refuse(self.ends[B].gen));
            }
        }
    }

    // ---- the link ------------------------------------------------------

    fn post(&mut self, to: usize, msg: Msg) {
        if !self.link.broken {
            self.link.msgs[to].push_back(msg);
        }
    }

    fn sync(&mut self) {
        for ring in &mut self.rings {
            if !(self.cfg.remote && self.link.broken) {
                ring.visible = ring.produced;
                ring.credit = ring.consumed;
            }
        }
        for e in [A, B] {
            // Each upgrade has words of its own.
            let same = self.ends[e].gen == self.ends[1 - e].gen;
            if same && !(self.cfg.remote && self.link.broken) {
                self.ends[e].peer_hurries = self.ends[1 - e].hurry;
            }
        }
    }

    fn propose(&mut self) {
        let end = &self.ends[B];
        if end.shake != Shake::Idle || !end.sw.is_plain() || end.want_fin || end.tcp_eof || !self.ends[A].alive {
            return;
        }
        // A new upgrade takes a new ring; who lied might still be owed bytes of the old one.
        if self.faults.lied || self.link.broken && self.link.noticed != [true, true] {
            return;
        }
        if self.link.broken || !self.link.up {
            self.link = Link { up: true, ..Link::default() };
        }
        self.gen += 1;
        let end = &mut self.ends[B];
        assert!(end.sw.arm(nonce(self.gen, B)));
        end.gen = self.gen;
        end.shake = Shake::Proposed;
        self.rings[A] = Ring::new(self.cfg.ring_cap);
        (self.ends[B].hurry, self.ends[B].peer_hurries) = (false, false);
        self.post(A, Msg::Propose(self.gen));
    }

    fn message(&mut self, e: usize) -> Check {
        let Some(msg) = self.link.msgs[e].pop_front() else { return Ok(()) };
        let end = &mut self.ends[e];
        match msg {
            Msg::Propose(gen) => {
                // Rule: who proposes is plain, so it has given up the nonce that it had.
                if end.shake == Shake::Accepted {
                    end.sw.disarm();
                    end.shake = Shake::Idle;
                }
                let plain = end.shake == Shake::Idle && end.sw.is_plain() && !self.faults.lied;
                if plain && !end.want_fin && !end.tcp_eof && end.sw.arm(nonce(gen, A)) {
                    end.gen = gen;
                    end.shake = Shake::Accepted;
                    (end.hurry, end.peer_hurries) = (false, false);
                    self.rings[B] = Ring::new(self.cfg.ring_cap);
                    self.post(B, Msg::Accept(gen));
                } else {
                    self.post(B, Msg::Refuse(gen));
                }
            }
            Msg::Accept(gen) if end.shake == Shake::Proposed && end.gen == gen => {
                end.sw.allow_mark(nonce(gen, A));
                end.shake = Shake::Ready;
                self.post(A, Msg::Confirm(gen));
                self.step(e)?;
            }
            Msg::Confirm(gen) if end.shake == Shake::Accepted && end.gen == gen => {
                end.sw.allow_mark(nonce(gen, B));
                end.shake = Shake::Ready;
                self.step(e)?;
            }
            Msg::Refuse(gen) if matches!(end.shake, Shake::Proposed | Shake::Accepted) && end.gen == gen => {
                end.sw.disarm();
                end.shake = Shake::Idle;
            }
            _ => {}
        }
        Ok(())
    }

    fn lose(&mut self, keep: bool) {
        if self.link.up && !self.link.broken {
            self.link.broken = true;
            if !keep {
                self.link.msgs = Default::default();
            }
        }
    }

    fn notice(&mut self, e: usize) -> Check {
        if !self.link.broken || self.link.noticed[e] || !self.link.msgs[e].is_empty() {
            return Ok(());
        }
        self.link.noticed[e] = true;
        if self.ends[e].shake == Shake::Proposed {
            self.ends[e].sw.disarm();
            self.ends[e].shake = Shake::Idle;
            return Ok(());
        }
        self.leave(e)
    }

    fn kill(&mut self, e: usize) {
        if self.ends.iter().all(|end| end.alive) {
            self.ends[e].alive = false;
            self.pipes[e].ended = true;
            if self.ends[e].sw.tx() == TxPath::Replay {
                // The kernel resets what has not repeated all, and what it had not sent yet is gone.
                let half = self.pipes[e].q.len() / 2;
                self.pipes[e].q.truncate(half);
            }
            self.pipes[1 - e].q.clear();
            self.link.broken = true;
            self.faults.killed = true;
        }
    }
}
