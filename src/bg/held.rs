//! Connections whose program says that more will follow, and perhaps does not say it in time.

use super::*;
use crate::io::release;

/// Twice this is how long the kernel keeps bytes back.
const EVERY_NS: i64 = 100 * MS;

/// A connection whose bytes may be held back.
pub(super) struct Corked {
    conn: &'static Conn,
    gen: u32,
    at: i64,
}

impl Bg {
    pub(super) fn watch_held(&mut self, conn: &'static Conn) {
        self.corked.push(Corked { conn, gen: conn.gen.load(Relaxed), at: now_ns() + EVERY_NS });
    }

    /// When to look at them again.
    pub(super) fn held_at(&self) -> i64 {
        self.corked.iter().map(|c| c.at).min().unwrap_or(i64::MAX)
    }

    pub(super) fn release_held(&mut self, now: i64) {
        self.corked.retain_mut(|c| {
            if c.at > now || c.conn.gen.load(Relaxed) != c.gen {
                return c.at > now;
            }
            // Before the look: whoever holds something back after it asks for another watch.
            c.conn.held_watched.store(false, SeqCst);
            release(c.conn);
            false
        });
    }
}
