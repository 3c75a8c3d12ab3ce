//! Sending and receiving.
//!
//! A connection in phase `Raw` uses the kernel's calls, counted; one in phase
//! `Managed` takes its bytes from where the path switch says. A call that has
//! to wait does so where a signal, a timeout and the peer's death end it as
//! they would in the kernel.

use crate::conn::*;
use crate::layout::*;
use crate::ops::Outcome;
use crate::pump;
use crate::spin::Wait;
use crate::stats::Why;
use crate::switch::{RxPath, TxPath};
use crate::sync::{full_fence, futex_wait, futex_wait2, now_ns};
use crate::sys::{self, sys, Errno};
use crate::table;
use crate::wire::{self, Scan};
use core::sync::atomic::{AtomicU32, Ordering::*};
use libc::{c_int, c_void, iovec, msghdr};

mod raw;
pub use raw::end_peek;
use raw::{pause, recv_raw, send_raw};

/// What stands at the front of an armed connection's TCP stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Front {
    /// So many bytes for the program.
    App(usize),
    /// The mark.
    Mark,
    /// Nothing, or perhaps the first part of a mark.
    Wait,
    /// The end of the stream.
    End,
    /// The kernel's error, which is consumed by having been seen.
    Failed(Errno),
}

/// Looks at the TCP stream of an armed connection without taking anything.
pub fn front(rx: &mut Rx) -> Front {
    front_of(rx.conn(), rx.nonce())
}

/// Whether the peer may have begun to write its mark. To be read after the bytes in question: whoever
/// wrote the first byte of a mark had said so before.
fn mark_begun(conn: &Conn) -> bool {
    conn.peer().is_some_and(|p| p.flags.load(SeqCst) & MARK_BEGUN != 0)
}

fn front_of(conn: &Conn, nonce: wire::Nonce) -> Front {
    match peek_front(conn, &nonce) {
        // The stream may have ended there; what was still missing of the mark came before the end.
        (Front::Wait, true) if sys::poll_now(conn.local().fd.load(Relaxed), libc::POLLRDHUP) != 0 => {
            match peek_front(conn, &nonce) {
                (Front::Wait, true) => {
                    conn.fail(libc::ECONNRESET);
                    Front::Failed(libc::ECONNRESET)
                }
                (front, _) => front,
            }
        }
        (front, _) => front,
    }
}

/// What stands at the front, and whether it is the first part of a mark.
fn peek_front(conn: &Conn, nonce: &wire::Nonce) -> (Front, bool) {
    let mut buf = [0u8; 4096];
    // SAFETY: `buf` has room.
    let n = match unsafe {
        sys::recv(
            conn.local().fd.load(Relaxed),
            buf.as_mut_ptr().cast(),
            buf.len(),
            libc::MSG_PEEK | libc::MSG_DONTWAIT,
        )
    } {
        Ok(0) => return (Front::End, false),
        Ok(n) => n,
        Err(libc::EAGAIN | libc::EINTR) => return (Front::Wait, false),
        Err(e) => {
            // The kernel tells it once.
            conn.fail(e);
            return (Front::Failed(e), false);
        }
    };
    match wire::scan(&buf[..n], nonce, mark_begun(conn)) {
        Scan::App(n) => (Front::App(n), false),
        Scan::Mark => (Front::Mark, false),
        Scan::Partial => (Front::Wait, true),
    }
}

/// The program's buffers.
#[derive(Clone, Copy)]
struct Bufs<'a> {
    iov: &'a [iovec],
    /// Bytes at the front that are done with.
    skip: usize,
}

impl<'a> Bufs<'a> {
    /// What a call returns that ends so: what was transferred before goes first.
    fn outcome(&self, o: Outcome) -> Outcome {
        match o {
            _ if self.skip == 0 => o,
            Outcome::Done(n) => Outcome::Done(n + self.skip as isize),
            _ => Outcome::Done(self.skip as isize),
        }
    }

    /// The connection is the kernel's for good, perhaps since the middle of this call, whose rest it does then.
    fn finish(self, nr: libc::c_long, fd: c_int, flags: c_int) -> Outcome {
        if self.skip == 0 {
            return Outcome::Bypass;
        }
        let r = kernel_msg(nr, fd, self, usize::MAX, None, flags);
        self.outcome(r.map_or_else(Outcome::Fail, |n| Outcome::Done(n as isize)))
    }

    /// Whether a buffer lies in the first page, where nothing is ever mapped. (Other bad addresses are
    /// not told from good ones without a system call: they fault here instead of giving `EFAULT`.)
    fn is_nowhere(&self) -> bool {
        self.iov.iter().any(|v| (v.iov_base as usize) < 4096 && v.iov_len > 0)
    }

    fn len(&self) -> usize {
        self.iov.iter().map(|v| v.iov_len).sum::<usize>() - self.skip
    }

    /// The parts that are left, first to last.
    fn parts(&self) -> impl Iterator<Item = (*mut u8, usize)> + 'a {
        let mut skip = self.skip;
        self.iov.iter().filter_map(move |v| {
            let s = skip.min(v.iov_len);
            skip -= s;
            // SAFETY: `s` is at most the buffer's length.
            (v.iov_len > s).then(|| (unsafe { v.iov_base.cast::<u8>().add(s) }, v.iov_len - s))
        })
    }
}

/// A kernel call on the buffers that are left.
fn kernel_msg(
    nr: libc::c_long,
    fd: c_int,
    b: Bufs,
    limit: usize,
    msg: Option<&mut msghdr>,
    flags: c_int,
) -> sys::SysResult {
    if msg.is_none() && b.iov.len() == 1 {
        let v = b.iov[0];
        // SAFETY: `skip` is at most the buffer's length; the program's buffer, as it gave it.
        return unsafe {
            let p = v.iov_base.cast::<u8>().add(b.skip).cast::<c_void>();
            let len = (v.iov_len - b.skip).min(limit);
            match nr {
                libc::SYS_recvmsg => sys::recv(fd, p, len, flags),
                _ => sys::send(fd, p, len, flags),
            }
        };
    }
    let mut iov = [iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }; 64];
    let mut n = 0;
    let mut left = limit;
    for ((p, len), to) in b.parts().zip(iov.iter_mut()) {
        *to = iovec { iov_base: p.cast(), iov_len: len.min(left) };
        left -= len.min(left);
        n += 1;
        if left == 0 {
            break;
        }
    }
    // SAFETY: all-zero is a valid msghdr.
    let mut own: msghdr = unsafe { core::mem::zeroed() };
    let h = msg.unwrap_or(&mut own);
    let (keep_iov, keep_n) = (h.msg_iov, h.msg_iovlen);
    // More than fit here: the kernel may transfer less than was asked for.
    h.msg_iov = iov.as_mut_ptr();
    h.msg_iovlen = n;
    // SAFETY: the program's buffers, as it gave them.
    let r = unsafe { sys!(nr, fd, h as *mut msghdr, flags) };
    h.msg_iov = keep_iov;
    h.msg_iovlen = keep_n;
    r
}

/// What a step of a transfer came to. The connection is looked up again where it says `Again`.
enum Step {
    Return(Outcome),
    Again,
}

fn live(fd: c_int, flags: c_int) -> Option<&'static Conn> {
    let c = table::conn(fd)?;
    match c.phase() {
        Phase::Raw => Some(c),
        Phase::Managed if flags & libc::MSG_ERRQUEUE == 0 => Some(c),
        _ => None,
    }
}

/// `recvmsg(2)` and all its kin.
///
/// # Safety
/// `iov` must describe writable memory, `msg` must be null or valid.
pub unsafe fn recv(fd: c_int, iov: &[iovec], msg: *mut msghdr, flags: c_int) -> Outcome {
    let mut b = Bufs { iov, skip: 0 };
    loop {
        let Some(conn) = live(fd, flags) else { return b.finish(libc::SYS_recvmsg, fd, flags) };
        if flags & libc::MSG_OOB != 0 {
            crate::process::give_up(conn, Why::Feature);
            return Outcome::Bypass;
        }
        // SAFETY: null or valid by the caller's promise.
        let msg = unsafe { msg.as_mut() };
        let step = match conn.phase() {
            Phase::Raw => recv_raw(fd, conn, &mut b, msg, flags),
            _ => recv_managed(fd, conn, &mut b, msg, flags),
        };
        if let Step::Return(o) = step {
            return b.outcome(o);
        }
    }
}

fn waits(conn: &Conn, flags: c_int) -> bool {
    // The queue of errors is never waited for.
    flags & (libc::MSG_DONTWAIT | libc::MSG_ERRQUEUE) == 0 && !conn.nonblock.load(Relaxed)
}

enum Take {
    Got(usize),
    Empty,
    End,
    Error(Errno),
    Gone,
}

/// Takes what is there, without waiting.
fn take(fd: c_int, conn: &'static Conn, b: Bufs, flags: c_int) -> Take {
    let peek = flags & libc::MSG_PEEK != 0;
    let trunc = flags & libc::MSG_TRUNC != 0;
    let mut rx = conn.lock_rx();
    if !table::is(fd, conn) || conn.phase() != Phase::Managed {
        return Take::Gone;
    }
    match rx.path() {
        RxPath::Ring | RxPath::RingFinal => {
            if !trunc && b.is_nowhere() && rx.ring().waiting() > 0 {
                return Take::Error(libc::EFAULT);
            }
            let mut n = 0;
            for (p, len) in b.parts() {
                // SAFETY: the program's buffers, as it gave them.
                let r = unsafe {
                    match (trunc, peek) {
                        (true, true) => Ok((rx.ring().waiting() as usize - n).min(len)),
                        (true, false) => rx.ring().read(core::ptr::null_mut(), len),
                        (false, true) => rx.ring().peek(n, p, len),
                        (false, false) => rx.ring().read(p, len),
                    }
                };
                match r {
                    Ok(got) => {
                        n += got;
                        if got < len {
                            break;
                        }
                    }
                    Err(_) if n > 0 => break,
                    Err(_) => {
                        drop(rx);
                        pump::reset(&mut conn.lock_both());
                        conn.notify();
                        return Take::Error(libc::ECONNRESET);
                    }
                }
            }
            if n > 0 {
                if !peek {
                    conn.stats().rx_bytes_ring.fetch_add(n as u64, Relaxed);
                }
                return Take::Got(n);
            }
            ended(conn, &mut rx)
        }
        RxPath::Returning => Take::Empty,
        RxPath::Tcp => tcp_take(fd, conn, b, usize::MAX, flags),
        RxPath::Replay => {
            drop(rx);
            let mut both = conn.lock_both();
            if both.rx.path() != RxPath::Replay {
                return Take::Gone;
            }
            let limit = both.sw().replay_missing() as usize;
            let r = tcp_take(fd, conn, b, limit, flags);
            match r {
                Take::Got(n) if !peek => {
                    both.sw().took_tcp(n);
                    pump::run(&mut both);
                }
                Take::End => {
                    conn.fail(libc::ECONNRESET);
                    return Take::Error(if conn.take_error() != 0 { libc::ECONNRESET } else { 0 });
                }
                _ => {}
            }
            r
        }
        RxPath::Armed => match front(&mut rx) {
            Front::App(n) if trunc => tcp_take(fd, conn, b, n, flags),
            Front::App(_) => armed_take(fd, conn, &rx, b, flags),
            Front::Mark => {
                drop(rx);
                let mut both = conn.lock_both();
                // Others who wait in the kernel must be woken by the mark; see `pump`.
                pump::run(&mut both);
                if both.rx.path() == RxPath::Armed {
                    Take::Empty
                } else {
                    Take::Gone
                }
            }
            Front::Wait => Take::Empty,
            Front::End => {
                drop(rx);
                let mut both = conn.lock_both();
                pump::run(&mut both);
                ended(conn, &mut both.rx)
            }
            Front::Failed(_) => {
                let e = conn.take_error();
                if e == 0 {
                    Take::End
                } else {
                    Take::Error(e)
                }
            }
        },
    }
}

fn ended(conn: &Conn, rx: &mut Rx) -> Take {
    // The end is announced after the last byte, so bytes are looked for again after it was seen.
    if conn.fin_seen() || conn.has_ended(END_EOF | END_RDSHUT) {
        if matches!(rx.path(), RxPath::Ring | RxPath::RingFinal) && rx.ring().waiting() > 0 {
            return Take::Gone;
        }
        let e = conn.take_error();
        return if e != 0 { Take::Error(e) } else { Take::End };
    }
    Take::Empty
}

/// Takes what stands before the mark, as much as a plain receive would: peeks into the program's own
/// buffers, and then takes what of it is the program's.
fn armed_take(fd: c_int, conn: &Conn, rx: &Rx, b: Bufs, flags: c_int) -> Take {
    let peek = flags & libc::MSG_PEEK != 0;
    let mut total = 0;
    for (p, len) in b.parts() {
        if len < wire::MARK_LEN {
            // Too small to tell a mark in; what is known to stand at the front will do.
            if total == 0 {
                let Front::App(n) = front_of(conn, rx.nonce()) else { return Take::Empty };
                return tcp_take(fd, conn, b, n, flags);
            }
            break;
        }
        let mut beyond = [0u8; wire::MARK_LEN];
        // SAFETY: the program's buffer, as it gave it.
        let n = match unsafe { peek_beyond(fd, p, len, &mut beyond) } {
            Ok(n) if n > 0 => n,
            Ok(_) | Err(libc::EAGAIN | libc::EINTR) => break,
            Err(e) => {
                // The kernel tells it once.
                conn.fail(e);
                break;
            }
        };
        // SAFETY: the kernel has just written so many bytes there.
        let window = unsafe { core::slice::from_raw_parts(p, n.min(len)) };
        let app = wire::scan_beyond(window, &beyond[..n - window.len()], &rx.nonce(), mark_begun(conn));
        if app == 0 {
            break;
        }
        if peek {
            return Take::Got(app);
        }
        // SAFETY: the program's buffer, as it gave it.
        let Ok(got) = (unsafe { sys::recv(fd, p.cast(), app, libc::MSG_DONTWAIT) }) else { break };
        conn.rx_tcp.fetch_add(got as u64, Relaxed);
        conn.stats().rx_bytes_tcp.fetch_add(got as u64, Relaxed);
        total += got;
        if got < len {
            break;
        }
    }
    match total {
        0 if conn.has_ended(END_RESET) => Take::Error(conn.take_error()),
        0 => Take::Empty,
        n => Take::Got(n),
    }
}

/// Peeks into the program's buffer, and at what follows.
///
/// # Safety
/// `p` must be writable for `len` bytes.
unsafe fn peek_beyond(fd: c_int, p: *mut u8, len: usize, beyond: &mut [u8]) -> sys::SysResult {
    let mut iov = [
        iovec { iov_base: p.cast(), iov_len: len },
        iovec { iov_base: beyond.as_mut_ptr().cast(), iov_len: beyond.len() },
    ];
    // SAFETY: all-zero is a valid msghdr.
    let mut h: msghdr = unsafe { core::mem::zeroed() };
    h.msg_iov = iov.as_mut_ptr();
    h.msg_iovlen = iov.len();
    // SAFETY: the caller's promise.
    unsafe { sys!(libc::SYS_recvmsg, fd, &mut h as *mut msghdr, libc::MSG_PEEK | libc::MSG_DONTWAIT) }
}

fn tcp_take(fd: c_int, conn: &Conn, b: Bufs, limit: usize, flags: c_int) -> Take {
    match kernel_msg(libc::SYS_recvmsg, fd, b, limit, None, (flags & !libc::MSG_WAITALL) | libc::MSG_DONTWAIT) {
        Ok(0) => Take::End,
        Ok(n) => {
            if flags & libc::MSG_PEEK == 0 {
                conn.rx_tcp.fetch_add(n as u64, Relaxed);
                conn.stats().rx_bytes_tcp.fetch_add(n as u64, Relaxed);
            }
            Take::Got(n)
        }
        Err(libc::EAGAIN) => Take::Empty,
        Err(e) => Take::Error(e),
    }
}

fn recv_managed(fd: c_int, conn: &'static Conn, b: &mut Bufs, msg: Option<&mut msghdr>, flags: c_int) -> Step {
    if conn.rx_lock.held_by_me() {
        // A signal handler inside our own call: it cannot wait for itself.
        return Step::Return(Outcome::Fail(libc::EAGAIN));
    }
    let may_wait = waits(conn, flags);
    let all = flags & libc::MSG_WAITALL != 0 && flags & libc::MSG_PEEK == 0 && may_wait;
    let timeout = conn.rcvtimeo.load(Relaxed);
    let deadline = if timeout > 0 { now_ns() + timeout } else { 0 };
    let mut looked = false;
    if let Some(m) = msg {
        m.msg_namelen = 0;
        m.msg_controllen = 0;
        m.msg_flags = 0;
    }
    let peek_all = flags & libc::MSG_WAITALL != 0 && flags & libc::MSG_PEEK != 0 && may_wait;
    loop {
        if b.len() == 0 && conn.phase() == Phase::Managed && conn.readable() {
            return Step::Return(Outcome::Done(0));
        }
        match take(fd, conn, *b, flags) {
            Take::Got(n) if peek_all && n < b.len() && !conn.fin_seen() && !conn.has_ended(END_EOF) => {
                if let Err(e) = pause(deadline) {
                    return Step::Return(if e == libc::EAGAIN { Outcome::Done(n as isize) } else { Outcome::Fail(e) });
                }
            }
            Take::Got(n) => {
                conn.tell_peer(WANT_TX, FUTEX_TX);
                if !all || n >= b.len() {
                    return Step::Return(Outcome::Done(n as isize));
                }
                b.skip += n;
            }
            Take::End => return Step::Return(Outcome::Done(0)),
            Take::Error(e) => return Step::Return(Outcome::Fail(e)),
            Take::Gone => return Step::Again,
            Take::Empty if may_wait => {
                if let Err(e) = wait(fd, conn, false, deadline, b.skip > 0) {
                    return Step::Return(Outcome::Fail(e));
                }
            }
            Take::Empty if !looked => {
                looked = true;
                pump::quick(conn);
            }
            Take::Empty => return Step::Return(Outcome::Fail(libc::EAGAIN)),
        }
    }
}

/// Sleeps until the connection may be readable (or writable). `deadline` in ns of `CLOCK_MONOTONIC`, 0: none.
/// `begun`: some bytes are transferred already, so that every signal ends the call.
fn wait(fd: c_int, conn: &Conn, to_write: bool, deadline: i64, begun: bool) -> Result<(), Errno> {
    let (bits, count): (u32, &AtomicU32) = if to_write { (FUTEX_TX, &conn.fut_tx) } else { (FUTEX_RX, &conn.fut_rx) };
    let first = conn.epoch.load(SeqCst);
    let changed = || conn.epoch.load(SeqCst) != first;
    let ready = || changed() || if to_write { conn.writable() } else { quickly_readable(conn) };
    let w = Wait::begin();
    if w.spin(ready, || deadline > 0 && now_ns() >= deadline) {
        w.end();
        return if deadline > 0 && now_ns() >= deadline { Err(libc::EAGAIN) } else { Ok(()) };
    }
    count.fetch_add(1, SeqCst);
    let r = loop {
        let epoch = conn.epoch.load(SeqCst);
        let (word, value) = match conn.peer() {
            Some(p) => (&raw const p.wake, p.wake.load(SeqCst)),
            None => (&raw const conn.epoch, epoch),
        };
        if let Some(own) = conn.own() {
            if to_write {
                let mut tx = conn.lock_tx();
                own.tx_goal.store(tx.ring().goal(), Relaxed);
            }
            own.want.fetch_or(bits, SeqCst);
        }
        full_fence();
        if !table::is(fd, conn) {
            break Err(libc::EBADF);
        }
        if epoch != first || if to_write { conn.writable() } else { conn.readable() } {
            break Ok(());
        }
        let r = if deadline > 0 {
            let left = deadline - now_ns();
            if left <= 0 {
                break Err(libc::EAGAIN);
            }
            // In slices, because a local event may come between the look and the sleep.
            futex_wait(word, value, left.min(10_000_000))
        } else if begun {
            futex_wait(word, value, 10_000_000)
        } else if conn.is_inherited() {
            // The background thread that watches it is another process's, which may have let go of it.
            let r = futex_wait(word, value, 20_000_000);
            pump::quick(conn);
            r
        } else {
            match futex_wait2(word, value, &conn.epoch, epoch) {
                Err(libc::ENOSYS) => futex_wait(word, value, 10_000_000),
                r => r,
            }
        };
        if r == Err(libc::EINTR) {
            break Err(libc::EINTR);
        }
    };
    if count.fetch_sub(1, SeqCst) == 1 {
        if let Some(own) = conn.own() {
            own.want.fetch_and(!bits, SeqCst);
            // Somebody may have begun to wait between the two.
            if count.load(SeqCst) > 0 {
                own.want.fetch_or(bits, SeqCst);
            }
        }
    }
    if r.is_ok() {
        w.end();
    }
    r
}

/// Without the lock where the ring tells.
#[inline]
fn quickly_readable(conn: &Conn) -> bool {
    if conn.end.load(Relaxed) != 0 {
        return conn.readable();
    }
    match (conn.own(), conn.peer()) {
        // Only where both directions are on the ring, and stay there, do the cursors alone tell.
        (Some(own), Some(peer)) if conn.stats().path_rx.load(Relaxed) == 1 => {
            peer.produced.load(Acquire) != own.consumed.load(Relaxed) || peer.flags.load(Relaxed) & FIN != 0
        }
        _ => conn.readable(),
    }
}

/// `sendmsg(2)` and all its kin.
///
/// # Safety
/// `iov` must describe readable memory, `msg` must be null or valid.
pub unsafe fn send(fd: c_int, iov: &[iovec], msg: *const msghdr, flags: c_int) -> Outcome {
    let mut b = Bufs { iov, skip: 0 };
    loop {
        let Some(conn) = live(fd, flags) else { return b.finish(libc::SYS_sendmsg, fd, flags) };
        // SAFETY: null or valid by the caller's promise.
        let controls = unsafe { msg.as_ref() }.is_some_and(|m| m.msg_controllen > 0);
        if flags & (libc::MSG_OOB | libc::MSG_FASTOPEN) != 0 || controls {
            crate::process::give_up(conn, Why::Feature);
            return Outcome::Bypass;
        }
        let step = match conn.phase() {
            Phase::Raw => send_raw(fd, conn, &mut b, flags),
            _ => send_managed(fd, conn, &mut b, flags),
        };
        if let Step::Return(o) = step {
            return b.outcome(o);
        }
    }
}

enum Put {
    Sent(usize),
    Full,
    Error(Errno),
    Gone,
}

/// How much is written under one hold of the lock, before a sleeping reader is told.
const PIECE: usize = 256 << 10;

fn put(fd: c_int, conn: &'static Conn, b: Bufs, flags: c_int) -> Put {
    let mut tx = conn.lock_tx();
    if !table::is(fd, conn) || conn.phase() != Phase::Managed {
        return Put::Gone;
    }
    if conn.has_ended(END_RESET) {
        let e = conn.take_error();
        if e != 0 {
            return Put::Error(e);
        }
    }
    if conn.has_ended(END_WRSHUT | END_FAILED) {
        return Put::Error(libc::EPIPE);
    }
    let path = tx.path();
    if path == TxPath::Replay || tx.pending() {
        drop(tx);
        let changed = pump::run(&mut conn.lock_both());
        if changed {
            conn.notify();
            return Put::Gone;
        }
        return Put::Full;
    }
    if path == TxPath::Tcp || conn.has_ended(END_TXDEAD) {
        // To a peer that is gone, too: the kernel knows what to say.
        let r = kernel_msg(libc::SYS_sendmsg, fd, b, usize::MAX, None, flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        return match r {
            Ok(n) => {
                if path == TxPath::Tcp {
                    conn.tx_tcp.fetch_add(n as u64, Relaxed);
                    conn.stats().tx_bytes_tcp.fetch_add(n as u64, Relaxed);
                }
                Put::Sent(n)
            }
            Err(libc::EAGAIN) => Put::Full,
            Err(e) => Put::Error(e),
        };
    }
    if b.is_nowhere() {
        return Put::Error(libc::EFAULT);
    }
    let mut n = 0;
    'parts: for (p, len) in b.parts() {
        let mut at = 0;
        while at < len && n < PIECE {
            // SAFETY: the program's buffer, as it gave it.
            match unsafe { tx.ring().write(p.add(at), (len - at).min(PIECE - n)) } {
                Ok(0) => {
                    if !tx.ring().grow(crate::config::get().ring_max) {
                        break 'parts;
                    }
                }
                Ok(got) => {
                    at += got;
                    n += got;
                }
                Err(_) => {
                    drop(tx);
                    pump::reset(&mut conn.lock_both());
                    conn.notify();
                    return Put::Error(libc::ECONNRESET);
                }
            }
        }
        if n >= PIECE {
            break;
        }
    }
    if n == 0 {
        conn.nospace.store(true, Relaxed);
        return Put::Full;
    }
    conn.stats().tx_bytes_ring.fetch_add(n as u64, Relaxed);
    Put::Sent(n)
}

fn send_managed(fd: c_int, conn: &'static Conn, b: &mut Bufs, flags: c_int) -> Step {
    if conn.tx_lock.held_by_me() {
        return Step::Return(Outcome::Fail(libc::EAGAIN));
    }
    let may_wait = waits(conn, flags);
    let timeout = conn.sndtimeo.load(Relaxed);
    let deadline = if timeout > 0 { now_ns() + timeout } else { 0 };
    if b.len() == 0 {
        return Step::Return(if conn.has_ended(END_WRSHUT) { broken_pipe(flags) } else { Outcome::Done(0) });
    }
    loop {
        match put(fd, conn, *b, flags) {
            Put::Sent(n) => {
                conn.tell_peer(WANT_RX, FUTEX_RX);
                if n >= b.len() {
                    return Step::Return(Outcome::Done(n as isize));
                }
                b.skip += n;
            }
            Put::Gone => return Step::Again,
            Put::Error(libc::EPIPE) if b.skip == 0 => return Step::Return(broken_pipe(flags)),
            Put::Error(e) => return Step::Return(Outcome::Fail(e)),
            Put::Full if !may_wait => {
                ask_for_room(conn);
                return Step::Return(Outcome::Fail(libc::EAGAIN));
            }
            Put::Full => {
                conn.nospace.store(true, Relaxed);
                if let Err(e) = wait(fd, conn, true, deadline, b.skip > 0) {
                    return Step::Return(Outcome::Fail(e));
                }
            }
        }
    }
}

/// A program that was told `EAGAIN` may wait for an edge: the peer is to say when there is room.
fn ask_for_room(conn: &Conn) {
    let Some(own) = conn.own() else { return };
    conn.arm(WANT_RX | WANT_TX, own.bell.load(Relaxed));
    if conn.writable() {
        conn.notify();
    }
}

fn broken_pipe(flags: c_int) -> Outcome {
    if flags & libc::MSG_NOSIGNAL == 0 {
        // To this thread, as the kernel sends it.
        // SAFETY: a signal to ourselves.
        let _ = unsafe { sys!(libc::SYS_tgkill, sys::pid(), crate::sync::tid(), libc::SIGPIPE) };
    }
    Outcome::Fail(libc::EPIPE)
}

/// A single buffer as an `iovec`.
pub fn one(buf: *const c_void, len: usize) -> [iovec; 1] {
    [iovec { iov_base: buf.cast_mut(), iov_len: len }]
}

#[cfg(test)]
mod tests;
