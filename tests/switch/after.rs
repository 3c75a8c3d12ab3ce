//! What must hold once the world comes to rest; and the lies of a peer.

use crate::world::*;
use ringsock_core::wire::{Frame, FRAME_LEN};

impl World {
    /// Replaces the frame at the front of `e`'s control stream, or adds one.
    pub fn lie(&mut self, e: usize, r: u32) {
        let end = &self.ends[e];
        if end.sw.control_want() != FRAME_LEN {
            return;
        }
        let (consumed, produced) = (self.rings[1 - e].consumed, self.rings[e].produced);
        let near = |x: u64| x.wrapping_add(u64::from(r >> 8 & 7)).wrapping_sub(3);
        let mut bytes = match r % 7 {
            6 => Frame::Back { len: u64::from(r >> 8 & 63) },
            0 => Frame::Leave,
            1 => Frame::Return { consumed: near(produced) },
            2 => Frame::Return { consumed: u64::from(r >> 8 & 15) },
            3 => Frame::Return { consumed: u64::MAX - u64::from(r >> 8 & 1) },
            4 => Frame::Resume { from: consumed, until: near(consumed) },
            _ => Frame::Resume { from: near(consumed), until: u64::MAX },
        }
        .encode();
        if r & 0x10_0000 != 0 {
            bytes[(r >> 8) as usize % FRAME_LEN] ^= 1 << (r >> 16 & 7);
        }
        self.faults.lied = true;
        self.faults.liar[1 - e] = true;
        let given = matches!(Frame::decode(&bytes), Some(Frame::Back { .. } | Frame::Return { .. }));
        self.faults.out_of_turn[1 - e] |= given;
        let q = &mut self.pipes[1 - e].q;
        if q.len() >= FRAME_LEN && r & 0x20_0000 != 0 {
            q.drain(..FRAME_LEN);
        }
        for b in bytes.into_iter().rev() {
            q.push_front(b);
        }
    }

    /// Lets everything that is under way finish, in few rounds.
    pub fn quiesce(&mut self, write: bool) -> Check {
        let bytes: usize = self.cfg.stream.iter().map(Vec::len).sum();
        let bound = 24 + 2 * bytes / self.cfg.pipe_cap.min(self.cfg.ring_cap);
        let mut waited = false;
        for _ in 0..bound + 400 / self.cfg.pipe_cap {
            let before = self.clone();
            for e in [A, B] {
                for _ in 0..self.link.msgs[e].len() {
                    self.apply(Action::Msg(e))?;
                }
                self.apply(Action::Notice(e))?;
                if write {
                    self.apply(Action::Write(e, usize::MAX >> 1))?;
                }
                self.apply(Action::Flush(e, usize::MAX))?;
                self.apply(Action::Control(e, usize::MAX))?;
                self.apply(Action::Sync)?;
                self.apply(Action::Read(e, usize::MAX >> 1))?;
            }
            if *self == before {
                if waited || !self.ends[A].want_fin {
                    return Ok(());
                }
                waited = true;
                let timed_out = self.faults.timed_out;
                self.apply(Action::Timeout)?;
                self.faults.timed_out = timed_out;
            }
        }
        if self.faults.lied {
            Ok(())
        } else {
            Err("no end in sight".into())
        }
    }

    /// What must hold once both programs have read on and the link is at rest.
    pub fn finish(&mut self, write: bool) -> Check {
        self.quiesce(write)?;
        if self.reset || self.faults.lied {
            return Ok(());
        }
        for e in [A, B] {
            let (end, peer) = (&self.ends[e], &self.ends[1 - e]);
            if !end.alive {
                continue;
            }
            ensure!(end.read == peer.sent, "end {e} stuck after {} of {} bytes", end.read, peer.sent);
            ensure!(end.eof == (peer.want_fin || !peer.alive), "end {e}: eof is {}", end.eof);
            if !peer.alive {
                continue;
            }
            ensure!(end.sw.pending().is_empty(), "end {e}: pending bytes are stuck");
            ensure!(!write || end.want_fin || end.sent == self.cfg.stream[e].len(), "end {e} cannot send");
            let orphan = end.shake == Shake::Accepted && self.link.noticed[A];
            ensure!(!end.sw.leaving() || orphan, "end {e}: the return does not end");
            ensure!(!self.link.broken || end.sw.is_plain() || orphan, "end {e} stays on a dead link");
        }
        Ok(())
    }

    pub fn untouched(&self) -> bool {
        !self.reset && self.ends.iter().all(|e| e.alive && !e.want_fin) && !self.faults.lied
    }

    /// From wherever it is: back to TCP, up again, and back.
    pub fn up_and_down(&mut self) -> Check {
        if !self.untouched() {
            return Ok(());
        }
        for e in [A, B] {
            self.apply(Action::Leave(e))?;
        }
        self.finish(false)?;
        self.apply(Action::Propose)?;
        self.quiesce(false)?;
        for e in [A, B] {
            self.apply(Action::Mark(e))?;
        }
        self.finish(true)?;
        for e in [A, B] {
            ensure!(self.ends[e].sw.is_ring(), "end {e} cannot be upgraded: {:?}", self.ends[e]);
        }
        self.apply(Action::Leave(B))?;
        self.finish(true)?;
        for e in [A, B] {
            ensure!(self.ends[e].sw.is_plain(), "end {e} did not return: {:?}", self.ends[e]);
        }
        Ok(())
    }
}
