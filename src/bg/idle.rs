//! Rings that have grown and are used no more: they become as small as they were, so that others can grow.

use super::*;
use crate::switch::TxPath;

/// For how long nothing has been written to a ring that is used no more.
const IDLE_NS: i64 = 10_000 * MS;
/// The longest time between two looks at one that cannot shrink, because what lies in it is not read.
const LONGEST: i64 = 64;

/// A connection whose ring has grown.
pub(super) struct Grown {
    conn: &'static Conn,
    gen: u32,
    upgrade: u32,
    /// What had been written at the last look.
    produced: u64,
    pause: i64,
    at: i64,
}

fn idle_ns() -> i64 {
    match i64::from(config::get().idle_s) * 1000 * MS {
        0 => IDLE_NS,
        all => all.min(IDLE_NS),
    }
}

fn pause(usual: i64) -> i64 {
    if chaos::is_on() {
        chaos::leave_at() - now_ns() + MS
    } else {
        usual
    }
}

impl Grown {
    fn new(conn: &'static Conn, now: i64) -> Grown {
        let (gen, upgrade) = (conn.gen.load(Relaxed), conn.upgrade_no.load(SeqCst));
        Grown { conn, gen, upgrade, produced: 0, pause: idle_ns(), at: now + pause(idle_ns()) }
    }

    /// Makes the ring small if it is used no more. Whether, and when (`at`), to look again.
    fn look(&mut self, now: i64) -> bool {
        let conn = self.conn;
        let mut tx = conn.lock_tx();
        let same = conn.gen.load(Relaxed) == self.gen && conn.upgrade_no.load(SeqCst) == self.upgrade;
        if !same || conn.phase() != Phase::Managed || tx.path() != TxPath::Ring {
            // One that returns gives all back, and one that comes again begins anew.
            return false;
        }
        let ring = tx.ring();
        let idle = ring.produced == self.produced;
        if (idle || chaos::is_on()) && ring.shrink(config::get().ring_bytes.min(conn.ring_cap.load(Relaxed))) {
            // Under the lock: whoever has it grow again asks again.
            conn.grown.store(false, SeqCst);
            drop(tx);
            log(Level::Debug, format_args!("a ring that is used no more is small again"));
            return false;
        }
        self.produced = ring.produced;
        self.pause = if idle { (self.pause * 2).min(LONGEST * idle_ns()) } else { idle_ns() };
        self.at = now + pause(self.pause);
        true
    }
}

impl Bg {
    pub(super) fn watch_grown(&mut self, conn: &'static Conn) {
        self.grown.push(Grown::new(conn, now_ns()));
        // SAFETY: links are never freed.
        if let Some(l) = unsafe { conn.link.load(Acquire).as_ref() } {
            self.watch_memory(l);
        }
    }

    /// When to look at them again.
    pub(super) fn grown_at(&self) -> i64 {
        self.grown.iter().map(|g| g.at).min().unwrap_or(i64::MAX)
    }

    pub(super) fn shrink_idle(&mut self, now: i64) {
        for g in self.grown.extract_if(.., |g| g.at <= now && !g.look(now)).collect::<Vec<_>>() {
            // SAFETY: links are never freed.
            if let Some(l) = unsafe { g.conn.link.load(Acquire).as_ref() } {
                self.watch_memory(l);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::tests::armed;
    use crate::layout::Slot;

    #[test]
    fn a_ring_shrinks_when_it_is_used_no_more() {
        let side = Side::new().unwrap();
        let (own, theirs) = (side.slot(0), Slot::default());
        let (conn, _ours, _theirs) = armed(&theirs);
        let mut ring = TxRing::new(&side, own, config::get().ring_bytes).unwrap();
        ring.set_peer(&theirs);
        let use_it = |n: usize| {
            let mut tx = conn.lock_tx();
            // SAFETY: readable for its length.
            assert_eq!(unsafe { tx.ring().write(vec![7u8; n].as_ptr(), n) }, Ok(n));
            tx.ring().show();
            theirs.consumed.store(tx.ring().produced, SeqCst);
        };
        conn.ring_cap.store(config::get().ring_max, SeqCst);
        *conn.lock_both().tx.ring() = ring;
        while conn.lock_tx().ring().grow(conn.ring_limit()) {}
        conn.grown.store(true, SeqCst);
        let mut g = Grown::new(conn, 0);
        use_it(1000);
        assert!(!g.look(g.at), "it is not on its ring");
        {
            let mut b = conn.lock_both();
            b.sw().allow_mark([1; 16]);
            b.sw().start_mark();
            let n = b.sw().pending().len();
            b.sw().written(n);
        }
        assert_eq!(conn.lock_tx().path(), TxPath::Ring);
        for _ in 0..3 {
            use_it(1000);
            assert!(g.look(g.at) && !conn.lock_tx().ring().can_grow(config::get().ring_max), "it is used");
        }
        assert!(!g.look(g.at) && conn.lock_tx().ring().can_grow(config::get().ring_max));
        assert!(!conn.grown.load(SeqCst));
        *conn.lock_both().tx.ring() = TxRing::default();
        conn.set_phase(Phase::Closed);
        // SAFETY: nobody uses it.
        unsafe { side.destroy() };
    }
}
