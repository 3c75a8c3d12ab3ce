//! The usual call, made short: few bytes, a connection that is on its rings and stays there, room or bytes at hand.
//!
//! Nothing is decided here. Whatever is not so plainly the case is for [`super::send`] and [`super::recv`], which look at
//! everything anew: this way either does the whole call or leaves no trace. It looks at the same things under the same
//! lock, only fewer of them one by one, and it lets the lock's release be the fence that stands between what it has
//! published and the look at who waits for that.

use super::*;
use crate::thread::Critical;
use core::num::NonZeroUsize;

/// Flags that change nothing where nothing has to be waited for.
const USUAL: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// Sends all of it, or does nothing.
///
/// # Safety
/// `buf` must be readable for `len` bytes.
#[inline(never)]
pub unsafe fn send(fd: c_int, buf: *const c_void, len: usize, flags: c_int) -> Option<NonZeroUsize> {
    if is_nowhere(buf as usize) {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { send_parts(fd, core::iter::once((buf.cast(), len)), len, flags) }
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
    // SAFETY: the caller's promise.
    unsafe { send_parts(fd, b.parts().map(|(p, n)| (p.cast_const(), n)), b.len(), flags) }
}

/// The same of `parts`, `len` bytes together.
///
/// # Safety
/// Each part must be readable for its length.
#[inline(always)]
unsafe fn send_parts(
    fd: c_int,
    parts: impl Iterator<Item = (*const u8, usize)>,
    len: usize,
    flags: c_int,
) -> Option<NonZeroUsize> {
    if flags & !USUAL != 0 || chaos::detours() {
        return None;
    }
    let sent = NonZeroUsize::new(len)?;
    let conn = table::conn(fd).filter(|c| c.is_managed())?;
    // A handler that jumps out does so when the peer was told.
    let _critical = Critical::new();
    let mut tx = conn.try_lock_tx()?;
    let remote = conn.remote();
    let steady = conn.is_ours()
        && table::is(fd, conn)
        && conn.end.load(Acquire) == 0
        && tx.is_steady()
        && conn.peer().is_some_and(|p| p.flags.load(Acquire) & (CLOSED | RDSHUT) == 0)
        && !conn.corked.load(Relaxed)
        && !(remote.is_some() && tx.ring().is_small_for(len));
    // SAFETY: the caller's promise.
    if !steady || !unsafe { tx.ring().write_all(parts, len) } {
        return None;
    }
    let count = &conn.stats().tx_bytes_ring;
    // Counted under the send lock alone.
    count.store(count.load(Relaxed).wrapping_add(len as u64), Relaxed);
    tx.unlock_and_fence();
    conn.in_sight();
    match remote {
        Some(r) => r.sent(conn.slot.load(Relaxed)),
        None => conn.tell_peer_fenced(WANT_RX, FUTEX_RX),
    }
    Some(sent)
}

/// Takes what a receive would give, if there is enough for one, or does nothing.
///
/// # Safety
/// `buf` must be writable for `len` bytes.
#[inline(never)]
pub unsafe fn recv(fd: c_int, buf: *mut c_void, len: usize, flags: c_int) -> Option<NonZeroUsize> {
    let conn = table::conn(fd)?;
    // SAFETY: the caller's promise.
    unsafe { recv_of(fd, conn, buf, len, flags) }
}

/// The same of the connection that `fd` was.
///
/// # Safety
/// As above.
#[inline(always)]
pub(super) unsafe fn recv_of(
    fd: c_int,
    conn: &Conn,
    buf: *mut c_void,
    len: usize,
    flags: c_int,
) -> Option<NonZeroUsize> {
    if flags & !(USUAL | libc::MSG_WAITALL) != 0 || is_nowhere(buf as usize) || !conn.is_managed() || chaos::detours() {
        return None;
    }
    let _critical = Critical::new();
    let mut rx = conn.try_lock_rx()?;
    if !conn.is_ours() || !table::is(fd, conn) || rx.path() != RxPath::Ring {
        return None;
    }
    let least = if flags & libc::MSG_WAITALL != 0 { len } else { len.min(conn.rcvlowat.load(Relaxed) as usize) };
    // SAFETY: the caller's promise.
    let got = NonZeroUsize::new(unsafe { rx.ring().read_all(buf.cast(), len, least) })?;
    let count = &conn.stats().rx_bytes_ring;
    // Counted under the receive lock alone.
    count.store(count.load(Relaxed).wrapping_add(got.get() as u64), Relaxed);
    rx.unlock_and_fence();
    conn.in_sight();
    conn.tell_read_fenced();
    Some(got)
}
