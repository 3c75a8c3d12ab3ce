//! Bytes behind a cork (`TCP_CORK`, `MSG_MORE`): they lie in the ring, and the peer is not shown them, until the program draws
//! the cork, sends without it, sets `TCP_NODELAY`, ends its direction, finds no room, or there is as much as the kernel would
//! send of itself, which is a segment. The kernel keeps them for 200 ms at most; here the background thread shows them then
//! (`bg/held.rs`).
//!
//! Only the process that has the connection on its rings sets anything aside: others have no such thread. If it ends, whoever
//! reads finds by itself what was set aside ([`crate::ring::RxRing::orphan`]).

use super::*;

/// How long the kernel keeps bytes back: its shortest time for a retransmission, by whose timer it sends them.
pub const PATIENCE_NS: i64 = 200_000_000;

/// Whether `n` bytes more are to be set aside.
#[inline]
pub(super) fn holds(conn: &Conn, tx: &mut Tx, n: usize, flags: c_int) -> bool {
    (flags & libc::MSG_MORE != 0 || conn.corked.load(Relaxed)) && conn.is_ours() && {
        let ring = tx.ring();
        ring.produced - ring.shown() + (n as u64) < conn.segment.load(Relaxed).into()
    }
}

/// Bytes are held back, the first of them from now on if `begun`. The background thread is to look after them.
#[cold]
pub(super) fn note_held(conn: &Conn, begun: bool) {
    if begun {
        conn.held.store(now_ns(), SeqCst);
    }
    if !conn.held_watched.swap(true, SeqCst) {
        conn.ask(ask::HELD);
    }
}

/// The peer is to see what was set aside.
pub fn release(conn: &Conn) {
    if conn.is_managed() && !conn.tx_lock.held_by_me() {
        show(conn.lock_tx());
    }
}

/// The same, under the lock.
pub fn show(mut tx: Tx) {
    let conn = tx.conn();
    if !conn.is_mapped() {
        return;
    }
    // What is on its way to TCP instead is the kernel's to hold back no longer.
    conn.held.store(0, SeqCst);
    if tx.path() == TxPath::Ring && tx.ring().show() {
        drop(tx);
        chaos::stumble();
        conn.tell_peer(WANT_RX, FUTEX_RX);
    }
}

/// The same of what has been held back for as long as the kernel does. When to look again, if anything still is.
pub fn release_overdue(conn: &Conn, now: i64) -> Option<i64> {
    let tx = conn.lock_tx();
    let since = conn.held.load(SeqCst);
    if since != 0 && since + PATIENCE_NS > now {
        return Some(since + PATIENCE_NS);
    }
    show(tx);
    None
}

/// Whether a mark is not to be written yet, because it would push what the program has the kernel hold back.
pub fn is_behind_cork(conn: &Conn, fd: c_int) -> bool {
    let corked = conn.corked.load(Relaxed) || conn.more.load(Relaxed);
    if !corked || !sys::ioctl_int(fd, pump::SIOCOUTQNSD).is_ok_and(|n| n > 0) {
        return false;
    }
    match conn.held.load(SeqCst) {
        0 => note_held(conn, true),
        since => return now_ns() - since < PATIENCE_NS,
    }
    true
}

/// A send by TCP: whether the program has said that more will follow.
#[inline]
pub(super) fn note_more(conn: &Conn, flags: c_int) {
    let more = flags & libc::MSG_MORE != 0;
    if conn.more.load(Relaxed) != more {
        conn.more.store(more, Relaxed);
    }
}
