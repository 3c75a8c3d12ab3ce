//! Memory of links that their connections need no more.
//!
//! What is given back to a link serves its other connections, but the kernel gets it back only with the whole segment:
//! the seal that lets nobody else write one forbids punching holes into it. So a link that has taken much, and of which
//! little is used, is left: its connections return to TCP, and when it has none any more, both ends let go of it. They
//! move again with their next calls, over a new link.
//!
//! A link may be left only if the other end has begun nothing on it that this end has not heard of yet. Who wants to
//! leave begins nothing more itself and says `END`. Messages keep their order, so what the other end hears before that
//! is all there will be: it lets go at once, which says so, or answers `KEEP`.

use super::*;
use crate::link::kind;

/// What a segment may have taken before it is worth the trouble.
const LEAST: usize = 4 << 20;
/// A link is quiet if not more has gone over it since the last look: heartbeats, for instance.
const FEW: u64 = 1 << 20;

/// A link whose memory may not be needed.
pub(super) struct Held {
    link: &'static Link,
    /// What had gone over it at the last look, and whether it had no connection then.
    moved: u64,
    empty: bool,
    at: i64,
}

fn is_on(conn: &Conn, l: &Link) -> bool {
    core::ptr::eq(conn.link.load(Acquire), l)
}

/// Bytes that its connections have moved.
fn moved(l: &Link) -> u64 {
    let mut all = 0u64;
    arena::each(|c| {
        if is_on(c, l) {
            let s = c.stats();
            all = all.wrapping_add(s.tx_bytes_ring.load(Relaxed)).wrapping_add(s.rx_bytes_ring.load(Relaxed));
        }
    });
    all
}

/// How long nobody may have needed a link's memory.
fn patience() -> i64 {
    let usual = i64::from(config::get().idle_s) * 1000 * MS;
    if chaos::is_on() && usual > 0 {
        (chaos::leave_at() - now_ns()).max(MS)
    } else {
        usual
    }
}

impl Bg {
    /// A ring has grown on it, or shrunk, or a connection has come or gone.
    pub(super) fn watch_memory(&mut self, l: &'static Link) {
        let wait = patience();
        if wait == 0
            || l.dead.load(SeqCst)
            || l.remote().is_some()
            || self.held_links.iter().any(|h| core::ptr::eq(h.link, l))
        {
            return;
        }
        self.held_links.push(Held { link: l, moved: moved(l), empty: false, at: now_ns() + wait });
    }

    /// The link is dead.
    pub(super) fn forget_memory(&mut self, l: &'static Link) {
        self.held_links.retain(|h| !core::ptr::eq(h.link, l));
    }

    /// When to look at them again.
    pub(super) fn memory_at(&self) -> i64 {
        self.held_links.iter().map(|h| h.at).min().unwrap_or(i64::MAX)
    }

    pub(super) fn leave_unused(&mut self, now: i64) {
        for h in self.held_links.extract_if(.., |h| h.at <= now).collect::<Vec<_>>() {
            // (None of them is dead, whose memory may be gone: `Bg::lost` takes those out.)
            let (l, now_moved) = (h.link, moved(h.link));
            let (taken, used) = l.side.memory();
            let little = chaos::is_on() || taken >= LEAST && used <= taken / 4;
            if l.ending.load(SeqCst) || !little {
                // Whatever changes that has it watched again.
                continue;
            }
            let empty = l.slots.load(SeqCst) == 0;
            if empty && h.empty {
                l.ending.store(true, SeqCst);
                self.say(l, Msg { kind: kind::END, ..Msg::default() });
                continue;
            }
            if !empty && !chaos::is_on() && now_moved.wrapping_sub(h.moved) <= FEW {
                log(Level::Debug, format_args!("a link keeps {taken} bytes and uses {used}: its connections leave it"));
                self.leave_all(l);
            }
            if !l.dead.load(SeqCst) {
                self.held_links.push(Held { link: l, moved: now_moved, empty, at: now + patience() });
            }
        }
    }

    /// Those of its connections return that can do so at once; the others are asked the next time.
    fn leave_all(&mut self, l: &'static Link) {
        let mut on_it = Vec::new();
        arena::each(|c| {
            if is_on(c, l) && c.phase() == Phase::Managed {
                on_it.push(c);
            }
        });
        for c in on_it {
            if self.leaves(c, Why::Unused) {
                self.stir(c);
            }
        }
    }

    /// The peer has no use for the link.
    pub(super) fn on_end(&mut self, l: &'static Link) {
        if l.remote().is_some() {
            // Nobody says that by RDMA.
            return;
        }
        if l.slots.load(SeqCst) > 0 || self.unsent.get(&key(l)).is_some_and(|q| !q.is_empty()) {
            self.say(l, Msg { kind: kind::KEEP, ..Msg::default() });
            return;
        }
        log(Level::Debug, format_args!("a link that is used no more ends"));
        self.lost(l);
    }

    /// The peer has.
    pub(super) fn on_keep(&mut self, l: &'static Link) {
        l.ending.store(false, SeqCst);
        self.watch_memory(l);
    }
}
