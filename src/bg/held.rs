//! Connections whose program says that more will follow, and perhaps does not say it in time.

use super::*;
use crate::io::{release_overdue, PATIENCE_NS};
use crate::switch::TxPath;

/// A connection whose bytes may be held back.
pub(super) struct Corked {
    conn: &'static Conn,
    gen: u32,
    at: i64,
}

impl Bg {
    pub(super) fn watch_held(&mut self, conn: &'static Conn) {
        self.corked.push(Corked { conn, gen: conn.gen.load(Relaxed), at: now_ns() + PATIENCE_NS });
    }

    /// When to look at them again.
    pub(super) fn held_at(&self) -> i64 {
        self.corked.iter().map(|c| c.at).min().unwrap_or(i64::MAX)
    }

    pub(super) fn release_held(&mut self, now: i64) {
        for c in self.corked.extract_if(.., |c| c.at <= now).collect::<Vec<_>>() {
            if c.conn.gen.load(Relaxed) != c.gen {
                continue;
            }
            // Before the look: whoever holds something back after it asks for another watch.
            c.conn.held_watched.store(false, SeqCst);
            if !c.conn.is_managed() {
                continue;
            }
            if c.conn.lock_tx().path() == TxPath::Tcp {
                // A mark may wait for that.
                self.stir(c.conn);
            } else if let Some(at) = release_overdue(c.conn, now) {
                if !c.conn.held_watched.swap(true, SeqCst) {
                    self.corked.push(Corked { at, ..c });
                }
            }
        }
    }
}
