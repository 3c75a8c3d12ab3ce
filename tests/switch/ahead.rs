//! What is read ahead, where a return is not to wait for a program.

use crate::world::*;
use ringsock_core::switch::{RxPath, TxPath};

impl World {
    /// Rule: only where the mark is bound to come is anything read ahead.
    fn may_drain(&self, e: usize) -> bool {
        let end = &self.ends[e];
        (end.hurry || end.peer_hurries)
            && matches!(end.sw.rx(), RxPath::Armed | RxPath::Draining)
            && (self.rings[1 - e].begun && !self.cfg.remote || end.sw.tx() == TxPath::Ring)
    }

    pub fn hurry(&mut self, e: usize) -> Check {
        self.ends[e].sw.leave();
        self.ends[e].hurry |= self.ends[e].sw.leaving();
        self.step(e)?;
        self.drain(e)
    }

    pub fn drain(&mut self, e: usize) -> Check {
        while self.may_drain(e) && !self.reset {
            let before = self.pipes[1 - e].q.len();
            self.ends[e].sw.drain();
            let ended = self.ends[e].tcp_eof;
            self.read_armed(e, usize::MAX >> 1, true)?;
            if self.pipes[1 - e].q.len() == before && self.ends[e].tcp_eof == ended {
                break;
            }
        }
        if self.reset {
            return Ok(());
        }
        self.step(e)
    }

    pub fn read_kept(&mut self, e: usize, max: usize) -> Check {
        let n = self.ends[e].kept.len().min(max);
        let bytes: Vec<u8> = self.ends[e].kept.drain(..n).collect();
        self.deliver(e, &bytes)
    }
}
