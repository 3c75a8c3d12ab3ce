//! Bytes of which a sleeping peer is not told yet, because the program has said that more will follow at once
//! (`TCP_CORK`, `MSG_MORE`): the peer is woken for all of them together, as the kernel sends them together.
//!
//! A peer that looks at its ring sees them all the same. The kernel keeps such bytes for 200 ms at most; here the
//! background thread tells of them then (`bg/held.rs`).

use super::*;

/// So much is not held back: the peer may begin with it.
const MOST: u32 = 16 << 10;

/// After `n` bytes were put into the ring, the last of their call: whether their peer is left asleep.
#[inline]
pub(super) fn hold(conn: &Conn, n: usize, flags: c_int) -> bool {
    if flags & libc::MSG_MORE != 0 || conn.corked.load(Relaxed) {
        return hold_more(conn, n, flags);
    }
    if conn.held.load(Relaxed) > 0 {
        conn.held.store(0, Relaxed);
    }
    false
}

#[cold]
fn hold_more(conn: &Conn, n: usize, flags: c_int) -> bool {
    if n >= MOST as usize || conn.held.load(Relaxed) + n as u32 > MOST || !conn.is_ours() || conn.remote().is_some() {
        conn.held.store(0, Relaxed);
        return false;
    }
    conn.held.fetch_add(n as u32, SeqCst);
    if !conn.held_watched.swap(true, SeqCst) {
        conn.ask(ask::HELD);
    }
    if flags & libc::MSG_MORE == 0 && !conn.corked.load(SeqCst) {
        // Another thread has drawn the cork meanwhile, perhaps before it could see that something is held.
        release(conn);
    }
    true
}

/// Nothing follows for now: tells the peer of what was held back.
#[inline]
pub fn release(conn: &Conn) {
    if conn.held.load(SeqCst) > 0 && conn.held.swap(0, SeqCst) > 0 {
        conn.tell_peer(WANT_RX, FUTEX_RX);
    }
}
