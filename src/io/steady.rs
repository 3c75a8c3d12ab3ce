//! The usual call, made short: few bytes, a connection that is on its rings and stays there, room or bytes at hand.
//!
//! Nothing is decided here. Whatever is not so plainly the case is for [`super::send`] and [`super::recv`], which look at
//! everything anew: this way either does the whole call or leaves no trace. It looks at the same things under the same
//! lock, only fewer of them one by one, and it lets the lock's release be the fence that stands between what it has
//! published and the look at who waits for that.

use super::*;
use crate::remote::Remote;
use crate::ring::{TxRing, STRIDE};
use crate::table::Place;
use crate::thread::{Critical, Within};
use core::num::NonZeroUsize;

/// Flags that change nothing where nothing has to be waited for.
const USUAL: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// Sends all of it, or does nothing.
///
/// # Safety
/// `buf` must be readable for `len` bytes.
#[inline(always)]
pub unsafe fn send(at: Place, conn: &Conn, buf: *const c_void, len: usize, flags: c_int) -> Option<NonZeroUsize> {
    if is_nowhere(buf as usize) {
        return None;
    }
    send_all(at, conn, len, flags, One(buf.cast()))
}

/// The same of several buffers.
///
/// # Safety
/// `iov` must describe readable memory.
#[inline(never)]
pub unsafe fn sendv(fd: c_int, iov: &[iovec], flags: c_int) -> Option<NonZeroUsize> {
    let b = Bufs::new(iov);
    if b.is_nowhere() {
        return None;
    }
    let (at, conn) = (Place::of(fd)?, table::conn(fd).filter(|c| c.is_managed())?);
    send_all(at, conn, b.len(), flags, b)
}

/// Where bytes come from.
trait Source {
    /// Writes them, `len` together, or nothing. `far`: to another host, where a ring that is small for them is to grow.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn write(&self, to: &mut TxRing, len: usize, far: bool) -> bool;
}

struct One(*const u8);

impl Source for One {
    #[inline(always)]
    unsafe fn write(&self, to: &mut TxRing, len: usize, far: bool) -> bool {
        // SAFETY: the caller's promise.
        unsafe { to.write_one(self.0, len, far) }
    }
}

impl Source for Bufs<'_> {
    #[inline(always)]
    unsafe fn write(&self, to: &mut TxRing, len: usize, far: bool) -> bool {
        // SAFETY: the caller's promise.
        !(far && to.is_small_for(len)) && unsafe { to.write_all(self.parts().map(|(p, n)| (p.cast_const(), n)), len) }
    }
}

/// The same of any source, `len` bytes together, which are readable.
#[inline(always)]
fn send_all(at: Place, conn: &Conn, len: usize, flags: c_int, from: impl Source) -> Option<NonZeroUsize> {
    // One comparison for what is nothing, and what is much.
    if flags & !USUAL != 0 || len.wrapping_sub(1) >= STRIDE || chaos::detours() {
        return None;
    }
    // A handler that jumps out does so when the peer was told.
    let critical = Critical::new();
    let by = critical.within();
    let Some(remote) = write(at, conn, len, &from, by) else {
        critical.end();
        return None;
    };
    match remote {
        Some(r) => r.sent_shortly(conn.slot.load(Relaxed), conn.peer_known(), by),
        None => conn.tell_peer_fenced(WANT_RX, FUTEX_RX),
    }
    critical.end();
    // SAFETY: as was compared above.
    Some(unsafe { NonZeroUsize::new_unchecked(len) })
}

/// Writes it into the ring. What copies that to another host, if all was written.
#[inline(always)]
fn write<'a>(at: Place, conn: &'a Conn, len: usize, from: &impl Source, by: Within) -> Option<Option<&'a Remote>> {
    let mut tx = conn.try_hold_tx(by)?;
    if !conn.is_ours() {
        return None;
    }
    let (remote, peer) = (conn.remote_held(), conn.peer_known()?);
    let usual = at.is(conn)
        && conn.end.load(Acquire) == 0
        && tx.is_steady()
        && peer.flags.load(Acquire) & (CLOSED | RDSHUT) == 0
        && !conn.corked.load(Relaxed);
    // SAFETY: the source's bytes are readable, as who made it has promised.
    if !usual || !unsafe { from.write(tx.ring(), len, remote.is_some()) } {
        return None;
    }
    let count = &conn.stats().tx_bytes_ring;
    // Counted under the send lock alone.
    count.store(count.load(Relaxed).wrapping_add(len as u64), Relaxed);
    tx.unlock_and_fence();
    conn.in_sight();
    Some(remote)
}

/// Takes what a receive would give, if there is enough for one, or takes nothing.
///
/// # Safety
/// `buf` must be writable for `len` bytes.
#[inline(always)]
pub unsafe fn recv(at: Place, conn: &Conn, buf: *mut c_void, len: usize, flags: c_int) -> Option<NonZeroUsize> {
    if flags & !(USUAL | libc::MSG_WAITALL) != 0 || is_nowhere(buf as usize) || chaos::detours() {
        return None;
    }
    let critical = Critical::new();
    // SAFETY: the caller's promise.
    let got = unsafe { recv_within(at, conn, buf, len, flags, critical.within()) };
    critical.end();
    NonZeroUsize::new(got)
}

/// The same within a critical section: how many bytes.
///
/// # Safety
/// As above.
#[inline(always)]
unsafe fn recv_within(at: Place, conn: &Conn, buf: *mut c_void, len: usize, flags: c_int, by: Within) -> usize {
    let Some((own, peer)) = conn.slots_of_ours() else { return 0 };
    let remote = conn.remote();
    if let Some(r) = remote {
        // What has come from another host is in the ring when somebody has looked.
        let is_dry = || peer.produced.load(Acquire) == own.consumed.load(Relaxed);
        if is_dry() {
            r.look(by);
            if is_dry() {
                return 0;
            }
        }
    }
    let Some(mut rx) = conn.try_hold_rx(by) else { return 0 };
    // In another life of the connection slot and link are others than those looked at without the lock. (It is inherited by
    // nobody who has it.)
    if !conn.is_peer(peer) || !conn.is_managed() || !at.is(conn) || rx.path() != RxPath::Ring {
        return 0;
    }
    let least = if flags & libc::MSG_WAITALL != 0 { len } else { len.min(conn.rcvlowat.load(Relaxed) as usize) };
    // SAFETY: the caller's promise.
    let got = unsafe { rx.ring().read_all(buf.cast(), len, least) };
    if got == 0 {
        return 0;
    }
    let consumed = rx.ring().consumed;
    let count = &conn.stats().rx_bytes_ring;
    // Counted under the receive lock alone.
    count.store(count.load(Relaxed).wrapping_add(got as u64), Relaxed);
    rx.unlock_and_fence();
    conn.in_sight();
    match remote {
        Some(r) => {
            let slot = conn.slot.load(Relaxed);
            if r.is_due_to(slot, Some(peer), consumed) {
                r.flush(slot);
            }
        }
        None => conn.tell_peer_fenced(WANT_TX, FUTEX_TX),
    }
    got
}
