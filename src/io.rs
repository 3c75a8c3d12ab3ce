//! Sending and receiving.
//!
//! A connection in phase `Raw` uses the kernel's calls, counted; one in phase
//! `Managed` takes its bytes from where the path switch says. A call that has
//! to wait does so where a signal, a timeout and the peer's death end it as
//! they would in the kernel.

use crate::conn::*;
use crate::layout::*;
use crate::ops::Outcome;
use crate::pins;
use crate::pump;
use crate::remote;
use crate::signals::{self, Since, Sleep};
use crate::spin::spin;
use crate::stats::Why;
use crate::switch::{RxPath, TxPath};
use crate::sync::{now_ns, timespec_of};
use crate::sys::{self, sys, Errno};
use crate::table;
use crate::visit;
use crate::wire::{self, Scan};
use crate::{chaos, process};
use core::sync::atomic::{AtomicU32, Ordering::*};
use libc::{c_int, c_void, iovec, msghdr};

mod armed;
mod away;
mod call;
mod errors;
mod held;
mod raw;
pub mod steady;
mod wait;
use armed::{armed_front, armed_peek, armed_rest, ring_peek};
pub use armed::{before_mark, drain, front, mark_is_there, unread, Front};
use away::{recv_away, send_away};
use call::{poll_wait, Call};
use errors::{broken_pipe, fail_after, send_nothing, shut_error, tell_message};
pub use errors::{lost_error, pending_error, reset_ahead};
use held::hold;
pub use held::release;
pub use raw::{end_peek, BEGIN_SLOW};
use raw::{pause, recv_raw, send_raw};
use wait::{is_dry, wait};

/// Whether no program's memory can lie at this address.
pub fn is_nowhere(at: usize) -> bool {
    !(4096..1 << 56).contains(&at)
}

/// The program's buffers.
#[derive(Clone, Copy)]
struct Bufs<'a> {
    iov: &'a [iovec],
    /// Bytes at the front that are done with.
    skip: usize,
    /// How many bytes count, those included.
    end: usize,
}

/// The most that the kernel transfers in one call: `MAX_RW_COUNT` in linux/fs.h, with pages of 4 KiB.
pub const MOST: usize = 0x7fff_f000;

impl<'a> Bufs<'a> {
    fn new(iov: &'a [iovec]) -> Bufs<'a> {
        let all = match iov {
            [one] => one.iov_len,
            many => many.iter().fold(0usize, |n, v| n.saturating_add(v.iov_len)),
        };
        Bufs { iov, skip: 0, end: all.min(MOST) }
    }

    /// What a call returns that ends so: what was transferred before goes first.
    fn outcome(&self, o: Outcome) -> Outcome {
        match o {
            _ if self.skip == 0 => o,
            Outcome::Done(n) => Outcome::Done(n + self.skip as isize),
            _ => Outcome::Done(self.skip as isize),
        }
    }

    /// The connection is the kernel's for good, perhaps since the middle of this call, whose rest it does then.
    fn finish(mut self, nr: libc::c_long, fd: c_int, flags: c_int, call: Option<Call>) -> Outcome {
        let Some(mut call) = call.filter(|c| self.skip > 0 || c.is_late() || pins::is_held()) else {
            return Outcome::Bypass;
        };
        let sends = nr == libc::SYS_sendmsg;
        let all = sends || flags & libc::MSG_WAITALL != 0;
        loop {
            let quick = call.is_late() || pins::is_held();
            let flags = if quick { flags | libc::MSG_DONTWAIT } else { flags };
            let (at, conn) = if pins::is_held() { pins::find(fd) } else { (fd, None) };
            let mut if_left = || ();
            let any = call.is_late() || self.skip > 0;
            let mut how = Sleep { since: call.since, any, if_left: &mut if_left };
            let first = (call.may_wait && !quick).then(|| how.again());
            let r = {
                // The number is not closed under it.
                let _locks = conn.filter(|_| pins::is_held()).map(|c| c.lock_both());
                kernel_msg(nr, at, self, usize::MAX, None, flags, first)
            };
            match r {
                Ok(n) if all && n > 0 && (quick || n == self.reach(usize::MAX)) && n < self.len() => self.skip += n,
                Err(libc::EAGAIN) if quick && call.may_wait => {
                    let events = if sends { libc::POLLOUT } else { libc::POLLIN };
                    if let Err(e) = poll_wait(at, events, call.deadline(), how) {
                        return self.outcome(Outcome::Fail(e));
                    }
                }
                r => return self.outcome(r.map_or_else(Outcome::Fail, |n| Outcome::Done(n as isize))),
            }
        }
    }

    /// Whether a buffer lies where no program's memory can: in the first page, or in the upper part of the
    /// address space. (Other bad addresses are not told from good ones without a system call: they fault here
    /// instead of giving `EFAULT`.)
    fn is_nowhere(&self) -> bool {
        let bad = |v: &iovec| is_nowhere(v.iov_base as usize) && v.iov_len > 0;
        match self.iov {
            [one] => bad(one),
            many => many.iter().any(bad),
        }
    }

    fn len(&self) -> usize {
        self.end - self.skip
    }

    /// The same, but for `n` bytes more.
    fn after(mut self, n: usize) -> Self {
        self.skip += n;
        self
    }

    /// How much one kernel call is asked for that may transfer `limit` bytes.
    fn reach(&self, limit: usize) -> usize {
        if self.skip == 0 && limit >= self.len() {
            return self.len();
        }
        self.parts().take(FEW).map(|(_, n)| n).sum::<usize>().min(limit)
    }

    /// The parts that are left, first to last.
    #[inline(always)]
    fn parts(&self) -> Parts<'a> {
        Parts { iov: self.iov.iter(), skip: self.skip, left: self.len() }
    }
}

/// See [`Bufs::parts`].
struct Parts<'a> {
    iov: core::slice::Iter<'a, iovec>,
    skip: usize,
    left: usize,
}

impl Iterator for Parts<'_> {
    type Item = (*mut u8, usize);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        while self.left > 0 {
            let v = self.iov.next()?;
            let s = self.skip.min(v.iov_len);
            self.skip -= s;
            let n = self.left.min(v.iov_len - s);
            self.left -= n;
            if n > 0 {
                // SAFETY: `s` is at most the buffer's length.
                return Some((unsafe { v.iov_base.cast::<u8>().add(s) }, n));
            }
        }
        None
    }
}

/// The most buffers of a call that is made in parts.
const FEW: usize = 64;

/// A kernel call on the buffers that are left.
fn kernel_msg(
    nr: libc::c_long,
    fd: c_int,
    b: Bufs,
    limit: usize,
    msg: Option<&mut msghdr>,
    flags: c_int,
    how: Option<Sleep>,
) -> sys::SysResult {
    if msg.is_none() && b.iov.len() == 1 {
        let v = b.iov[0];
        // SAFETY: `skip` is at most the buffer's length; the program's buffer, as it gave it.
        return unsafe {
            let p = v.iov_base.cast::<u8>().add(b.skip).cast::<c_void>();
            let len = b.len().min(limit);
            let nr = if nr == libc::SYS_recvmsg { libc::SYS_recvfrom } else { libc::SYS_sendto };
            signals::call(how, nr, [fd as usize, p as usize, len, flags as usize, 0, 0])
        };
    }
    let mut iov = [iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }; FEW];
    // SAFETY: all-zero is a valid msghdr.
    let mut own: msghdr = unsafe { core::mem::zeroed() };
    let h = msg.unwrap_or(&mut own);
    let (keep_iov, keep_n) = (h.msg_iov, h.msg_iovlen);
    if b.skip == 0 && limit >= b.len() {
        h.msg_iov = b.iov.as_ptr().cast_mut();
        h.msg_iovlen = b.iov.len();
    } else {
        // Where there are more than fit here, no more than `Bufs::reach` says is asked for.
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
        h.msg_iov = iov.as_mut_ptr();
        h.msg_iovlen = n;
    }
    // SAFETY: the program's buffers, as it gave them.
    let r = unsafe { signals::call(how, nr, [fd as usize, h as *mut msghdr as usize, flags as usize, 0, 0, 0]) };
    h.msg_iov = keep_iov;
    h.msg_iovlen = keep_n;
    r
}

/// What a step of a transfer came to. The connection is looked up again where it says `Again`.
enum Step {
    Return(Outcome),
    Again,
}

/// What a call on `fd` is about, with a number of it, where that is ours to serve.
fn live(fd: c_int, flags: c_int, begun: bool) -> (c_int, Option<&'static Conn>) {
    let (fd, conn) = if begun { pins::find(fd) } else { (fd, table::conn(fd)) };
    let served = conn.filter(|c| match c.phase() {
        // What is in the error queue is the kernel's, and never waited for.
        Phase::Raw | Phase::Managed | Phase::Away => flags & libc::MSG_ERRQUEUE == 0,
        _ => false,
    });
    (fd, served)
}

/// `recvmsg(2)` and all its kin.
///
/// # Safety
/// `iov` must describe writable memory, `msg` must be null or valid.
pub unsafe fn recv(fd: c_int, iov: &[iovec], msg: *mut msghdr, flags: c_int) -> Outcome {
    let mut b = Bufs::new(iov);
    let since = Since::now();
    let _held = pins::Holding::begin();
    let mut begun = None;
    loop {
        let (at, conn) = live(fd, flags, begun.is_some());
        let Some(conn) = conn else {
            let o = b.finish(libc::SYS_recvmsg, fd, flags, begun);
            // SAFETY: null or valid by the caller's promise.
            if let (Outcome::Done(_), Some(m)) = (o, unsafe { msg.as_mut() }) {
                tell_message(m, flags);
            }
            return o;
        };
        let call = begun.get_or_insert_with(|| Call::new(since, conn, flags, conn.rcvtimeo.load(Relaxed)));
        if flags & libc::MSG_OOB != 0 {
            crate::process::give_up(conn, Why::Feature);
            return Outcome::Bypass;
        }
        visit::arrive(conn);
        // SAFETY: null or valid by the caller's promise.
        let msg = unsafe { msg.as_mut() };
        let (step, msg) = match conn.phase() {
            Phase::Raw if b.skip == 0 => (recv_raw(at, conn, &mut b, msg, flags, call), None),
            Phase::Raw => (recv_raw(at, conn, &mut b, None, flags, call), msg),
            Phase::Away => (recv_away(at, conn, &mut b, flags, call), msg),
            _ => (recv_managed(at, conn, &mut b, flags, call), msg),
        };
        if let Step::Return(o) = step {
            let o = b.outcome(o);
            if let (Outcome::Done(_), Some(m)) = (o, msg) {
                tell_message(m, flags);
            }
            return o;
        }
    }
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
    if !conn.is_at(fd) || !conn.is_managed() {
        return Take::Gone;
    }
    match rx.path() {
        RxPath::Ring | RxPath::RingFinal | RxPath::Returning | RxPath::Draining if !conn.is_mapped() => Take::Empty,
        RxPath::Draining if !rx.ring().kept.is_empty() => {
            ring_take(conn, &mut rx, b, flags).map_or(Take::Empty, Take::Got)
        }
        // What was to be repeated will not be, if the connection has failed meanwhile.
        RxPath::Returning if !conn.has_ended(END_EOF) => match peek && !trunc {
            // What is peeked at now is repeated on TCP later.
            true if rx.ring().waiting() > 0 => ring_peek(&mut rx, b, 0),
            // The end is announced after the last byte.
            _ if conn.fin_seen() && rx.ring().waiting() == 0 => failed(conn),
            _ => Take::Empty,
        },
        RxPath::Ring | RxPath::RingFinal | RxPath::Returning => {
            if !trunc && b.is_nowhere() && rx.ring().waiting() > 0 {
                return Take::Error(libc::EFAULT);
            }
            let Ok(n) = ring_take(conn, &mut rx, b, flags) else {
                drop(rx);
                pump::reset(&mut conn.lock_both());
                return Take::Error(libc::ECONNRESET);
            };
            if n > 0 {
                return Take::Got(n);
            }
            ended(conn, &mut rx)
        }
        RxPath::Tcp => {
            let over = conn.fin_seen();
            match tcp_take(fd, conn, b, usize::MAX, flags) {
                // All that comes before the end was there.
                Take::Empty if over => Take::End,
                Take::End => {
                    conn.find_lost().into_iter().for_each(|e| conn.fail(e));
                    failed(conn)
                }
                t => t,
            }
        }
        RxPath::Replay => {
            drop(rx);
            let mut both = conn.lock_both();
            if both.rx.path() != RxPath::Replay {
                return Take::Gone;
            }
            // What follows the repeated bytes is the program's too.
            let r = tcp_take(fd, conn, b, usize::MAX, flags);
            match r {
                Take::Got(n) if !peek => {
                    both.sw().took_tcp(n);
                    pump::run(&mut both);
                    if both.sw().is_plain() {
                        conn.ask(ask::PUMP);
                        if conn.phase() == Phase::Away {
                            visit::press(conn);
                        }
                    }
                }
                Take::End => {
                    conn.fail(libc::ECONNRESET);
                    return failed(conn);
                }
                _ => {}
            }
            r
        }
        RxPath::Armed | RxPath::Draining => match armed_front(conn, &mut rx) {
            (Front::App(n), true) if peek && !trunc => armed_peek(fd, conn, &mut rx, b, n),
            (Front::App(n), whole) => match tcp_take(fd, conn, b, n, flags) {
                Take::Got(got) if whole && got == n && !peek => {
                    // Nothing else will look at the mark, whose arrival was announced with these bytes: the program
                    // may not come back. And one receive gives all that has arrived.
                    let mut both = Both { rx, tx: conn.lock_tx() };
                    if pump::run(&mut both) {
                        // Whoever else waits looks again.
                        conn.ask(ask::PUMP);
                    }
                    let rest = match both.rx.path() {
                        RxPath::Ring | RxPath::RingFinal => {
                            ring_take(conn, &mut both.rx, b.after(got), flags).unwrap_or(0)
                        }
                        _ => 0,
                    };
                    Take::Got(got + rest)
                }
                Take::Got(got) if got == n && !peek => {
                    Take::Got(got + armed_rest(fd, conn, &mut rx, b.after(got), flags))
                }
                t => t,
            },
            (at @ (Front::Mark | Front::Part(_)), _) => {
                drop(rx);
                let mut both = conn.lock_both();
                pump::run(&mut both);
                if !matches!(both.rx.path(), RxPath::Armed | RxPath::Draining) || !both.rx.ring().kept.is_empty() {
                    return Take::Gone;
                }
                // Others who wait in the kernel must be woken by the mark (see `pump`), or this thread waits there and
                // is in a handler. What is behind the mark can be had all the same.
                match at {
                    Front::Mark if conn.is_mapped() && both.rx.ring().is_attached() => {
                        match ring_take(conn, &mut both.rx, b, flags) {
                            Ok(n @ 1..) => Take::Got(n),
                            _ => Take::Empty,
                        }
                    }
                    _ => Take::Empty,
                }
            }
            (Front::Wait, _) => Take::Empty,
            (Front::End, _) => {
                drop(rx);
                let mut both = conn.lock_both();
                pump::run(&mut both);
                ended(conn, &mut both.rx)
            }
            (Front::Failed(_), _) => failed(conn),
        },
    }
}

/// Takes what is in the ring.
fn ring_take(conn: &Conn, rx: &mut Rx, b: Bufs, flags: c_int) -> Result<usize, crate::ring::Violation> {
    let peek = flags & libc::MSG_PEEK != 0;
    let trunc = flags & libc::MSG_TRUNC != 0;
    if let ([one], false) = (b.iov, peek || trunc) {
        // SAFETY: `skip` is at most the buffer's length; the program's buffer, as it gave it.
        let n = unsafe { rx.ring().read(one.iov_base.cast::<u8>().add(b.skip), b.len()) }?;
        conn.stats().rx_bytes_ring.fetch_add(n as u64, Relaxed);
        return Ok(n);
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
            Err(e) => return Err(e),
        }
    }
    if !peek {
        conn.stats().rx_bytes_ring.fetch_add(n as u64, Relaxed);
    }
    Ok(n)
}

fn ended(conn: &Conn, rx: &mut Rx) -> Take {
    // The end is announced after the last byte, so bytes are looked for again after it was seen.
    if conn.fin_seen() || conn.has_ended(END_EOF | END_RDSHUT) {
        if matches!(rx.path(), RxPath::Ring | RxPath::RingFinal | RxPath::Returning) && rx.ring().waiting() > 0 {
            return Take::Gone;
        }
        return failed(conn);
    }
    Take::Empty
}

/// The connection has ended: its error, which is told once, then the end.
fn failed(conn: &Conn) -> Take {
    if conn.err.load(Relaxed) == libc::EPIPE {
        // The reset came after the end of the stream, which goes on to be reported: the error is for others.
        return Take::End;
    }
    match conn.take_error() {
        0 => Take::End,
        e => Take::Error(e),
    }
}

fn tcp_take(fd: c_int, conn: &Conn, mut b: Bufs, mut limit: usize, flags: c_int) -> Take {
    let flags = (flags & !libc::MSG_WAITALL) | libc::MSG_DONTWAIT;
    let mut total = 0;
    loop {
        let asked = b.reach(limit);
        match kernel_msg(libc::SYS_recvmsg, fd, b, limit, None, flags, None) {
            Ok(0) if total == 0 => return Take::End,
            Ok(n) if flags & libc::MSG_PEEK != 0 => return Take::Got(n),
            Ok(n) => {
                conn.count_rx_tcp(n);
                total += n;
                b.skip += n;
                limit -= n;
                if n == 0 || n < asked || limit == 0 || b.len() == 0 {
                    return Take::Got(total);
                }
            }
            Err(e) if total > 0 => {
                conn.note_lost(e);
                return Take::Got(total);
            }
            Err(libc::EAGAIN) => return Take::Empty,
            Err(e) => return Take::Error(e),
        }
    }
}

fn recv_managed(fd: c_int, conn: &'static Conn, b: &mut Bufs, flags: c_int, call: &mut Call) -> Step {
    if conn.rx_lock.held_by_me() {
        // A signal handler inside our own call: it cannot wait for itself.
        return Step::Return(Outcome::Fail(libc::EAGAIN));
    }
    let may_wait = call.may_wait;
    let least = conn.least(flags, may_wait, b.len() + b.skip);
    // Fewer bytes than `SO_RCVLOWAT` are taken together with what is still missing.
    let together = may_wait && flags & (libc::MSG_PEEK | libc::MSG_WAITALL) == 0 && (2..=b.len()).contains(&least);
    // What the kernel takes before the call is over goes with a thread that is cancelled in it.
    let lose = |b: &Bufs| if least > 1 { b.len() } else { 0 };
    let mut looked = false;
    let peek_all = flags & libc::MSG_WAITALL != 0 && flags & libc::MSG_PEEK != 0 && may_wait;
    // What was waited for is most often there, and all that is wanted.
    let quickly = |b: &Bufs| match b {
        // SAFETY: the program's buffer, as it gave it.
        Bufs { iov: [one], skip: 0, .. } => unsafe { steady::recv_of(fd, conn, one.iov_base, one.iov_len, flags) }
            .map(|n| Step::Return(Outcome::Done(n.get() as isize))),
        _ => None,
    };
    loop {
        // An error with no bytes before it is told even to who asks for none.
        let told = || conn.has_ended(END_RESET) && conn.lock_rx().ring().waiting() == 0;
        if b.len() == 0 && conn.phase() == Phase::Managed && conn.takeable(1) && !told() {
            return Step::Return(Outcome::Done(0));
        }
        let want = (least.saturating_sub(b.skip) as u32).clamp(1, conn.rcvlowat.load(Relaxed).max(1));
        if together && b.skip == 0 && conn.is_at(fd) && conn.is_managed() && !conn.takeable(want) {
            match wait(fd, conn, Some(want), (false, lose(b)), call) {
                Ok(()) => continue,
                Err(e) => match take(fd, conn, *b, flags) {
                    Take::Got(n) => return Step::Return(Outcome::Done(n as isize)),
                    _ => return Step::Return(Outcome::Fail(e)),
                },
            }
        }
        if may_wait && is_dry(conn, want) {
            if let Err(e) = wait(fd, conn, Some(want), (b.skip > 0, lose(b)), call) {
                return Step::Return(waited(b, e));
            }
            if let Some(done) = quickly(b) {
                return done;
            }
        }
        match take(fd, conn, *b, flags) {
            Take::Got(n) if peek_all && n < b.len() && !conn.fin_seen() && !conn.has_ended(END_EOF) => {
                pins::hold(fd, conn);
                if let Err(e) = pause(call, &mut || ()) {
                    return Step::Return(if e == libc::EAGAIN { Outcome::Done(n as isize) } else { Outcome::Fail(e) });
                }
            }
            Take::Got(n) => {
                conn.in_sight();
                conn.tell_read();
                if n >= b.len() || b.skip + n >= least {
                    return Step::Return(Outcome::Done(n as isize));
                }
                call.goes_on(b, n);
            }
            Take::End => return Step::Return(Outcome::Done(0)),
            Take::Error(e) => return Step::Return(fail_after(conn, b, e)),
            Take::Gone => return Step::Again,
            // Wherever the connection is on its way to: nothing comes any more that this end takes.
            Take::Empty if conn.has_ended(END_RDSHUT) && unread(&mut conn.lock_rx()) == 0 => match failed(conn) {
                Take::Error(e) => return Step::Return(fail_after(conn, b, e)),
                _ => return Step::Return(Outcome::Done(0)),
            },
            Take::Empty if may_wait => {
                if let Err(e) = wait(fd, conn, Some(want), (b.skip > 0, lose(b)), call) {
                    return Step::Return(waited(b, e));
                }
                if let Some(done) = quickly(b) {
                    return done;
                }
            }
            Take::Empty if !looked => {
                looked = true;
                remote::progress();
                pump::quick(conn);
                await_resume(conn);
            }
            Take::Empty => {
                conn.sent_away();
                return Step::Return(Outcome::Fail(libc::EAGAIN));
            }
        }
    }
}

/// How a receive ends that has waited in vain. One of no bytes waits once, as any, and has all that it wants then.
fn waited(b: &Bufs, e: Errno) -> Outcome {
    match e {
        libc::EAGAIN if b.len() == 0 => Outcome::Done(0),
        e => Outcome::Fail(e),
    }
}

/// In the middle of a return what was readable has to come by TCP: the peer answers at once, so even a call
/// that may not wait gives it a moment rather than lose sight of what was there.
fn await_resume(conn: &Conn) {
    const MOST_NS: i64 = 100_000_000;
    let held = || {
        let mut rx = conn.lock_rx();
        match rx.path() {
            RxPath::Returning => rx.ring().waiting() > 0,
            RxPath::Replay => rx.missing() > 0 && sys::poll_now(conn.local().fd.load(Relaxed), libc::POLLIN) == 0,
            _ => false,
        }
    };
    let until = now_ns() + if conn.late.load(Relaxed) { 0 } else { MOST_NS };
    while held() && !conn.has_ended(END_EOF) {
        if now_ns() >= until {
            // From now on it is not there, and will be news when it comes.
            conn.late.store(true, SeqCst);
            conn.kicks.fetch_add(1, SeqCst);
            return;
        }
        let _ = crate::poll::wait_one(conn.local().fd.load(Relaxed), libc::POLLIN, 1_000_000);
        pump::quick(conn);
    }
}

/// `sendmsg(2)` and all its kin.
///
/// # Safety
/// `iov` must describe readable memory, `msg` must be null or valid.
pub unsafe fn send(fd: c_int, iov: &[iovec], msg: *const msghdr, flags: c_int) -> Outcome {
    let mut b = Bufs::new(iov);
    let since = Since::now();
    let _held = pins::Holding::begin();
    let mut begun = None;
    loop {
        let (at, conn) = live(fd, flags, begun.is_some());
        let Some(conn) = conn else { return b.finish(libc::SYS_sendmsg, fd, flags, begun) };
        let call = begun.get_or_insert_with(|| Call::new(since, conn, flags, conn.sndtimeo.load(Relaxed)));
        // SAFETY: null or valid by the caller's promise.
        let controls = unsafe { msg.as_ref() }.is_some_and(|m| m.msg_controllen > 0);
        if flags & (libc::MSG_OOB | libc::MSG_FASTOPEN) != 0 || controls {
            crate::process::give_up(conn, Why::Feature);
            return Outcome::Bypass;
        }
        visit::arrive(conn);
        let step = match conn.phase() {
            Phase::Raw => send_raw(at, conn, &mut b, flags, call),
            Phase::Away => send_away(at, conn, &mut b, flags, call),
            _ => send_managed(at, conn, &mut b, flags, call),
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
    if !conn.is_at(fd) || !conn.is_managed() {
        return Put::Gone;
    }
    if conn.peer_closed() && !conn.has_ended(END_EOF) {
        // How it ended is for this call to tell, if nobody has looked yet.
        drop(tx);
        if pump::run(&mut conn.lock_both()) {
            return Put::Gone;
        }
        tx = conn.lock_tx();
    }
    if conn.has_ended(END_RESET) {
        let e = conn.take_error();
        if e != 0 {
            return Put::Error(e);
        }
    }
    if conn.has_ended(END_WRSHUT | END_FAILED) {
        drop(tx);
        return Put::Error(shut_error(fd, conn));
    }
    if tx.is_due() && !conn.rx_lock.held_by_me() {
        // Behind how much more of the program's bytes the mark comes is this thread's doing, which may give the locks to no
        // other for long; and a peer in a hurry takes all that stands before it.
        drop(tx);
        if pump::run(&mut conn.lock_both()) {
            return Put::Gone;
        }
        tx = conn.lock_tx();
    }
    let path = tx.path();
    if path == TxPath::Replay || tx.pending() {
        drop(tx);
        return if pump::run(&mut conn.lock_both()) { Put::Gone } else { Put::Full };
    }
    if path == TxPath::Ring && !conn.is_mapped() {
        return Put::Full;
    }
    let away = conn.phase() == Phase::Away;
    let on_rings = !tx.peer_is_home() && !tx.has_resumed();
    if conn.is_refused() && on_rings && !conn.has_ended(END_TXDEAD) && !conn.peer_closed() && !b.is_nowhere() {
        // As in the kernel: this call is the last that succeeds.
        drop(tx);
        pump::reset_with(&mut conn.lock_both(), libc::EPIPE);
        return Put::Sent(b.len());
    }
    if path == TxPath::Tcp
        && (away && on_rings || (conn.is_refused() || away) && (tx.has_resumed() || conn.awaits_fin()))
    {
        // Not before the peer's kernel refuses it, too. (Whether it does only the owner can know.)
        return Put::Full;
    }
    if path == TxPath::Tcp && conn.lost.load(Relaxed) != 0 {
        if let Some(e) = lost_error(conn) {
            return Put::Error(e);
        }
    }
    if path == TxPath::Tcp || conn.has_ended(END_TXDEAD) || conn.peer_closed() {
        // To a peer that is gone, too: the kernel knows what to say.
        let r = kernel_msg(
            libc::SYS_sendmsg,
            fd,
            b,
            usize::MAX,
            None,
            flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            None,
        );
        return match r {
            Ok(n) => {
                if path == TxPath::Tcp {
                    conn.count_tx_tcp(n);
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
    if tx.is_cramped() && !conn.is_refused() {
        return Put::Full;
    }
    if conn.is_refused() {
        drop(tx);
        pump::reset_with(&mut conn.lock_both(), libc::EPIPE);
        return Put::Sent(b.len());
    }
    if conn.remote().is_some() {
        // What fills most of a ring has to wait for the reader's word, which needs a write of its own.
        while tx.ring().is_small_for(b.len()) && tx.ring().grow(conn.ring_limit()) {}
    }
    let mut n = 0;
    'parts: for (p, len) in b.parts() {
        let mut at = 0;
        while at < len && n < PIECE {
            // SAFETY: the program's buffer, as it gave it.
            match unsafe { tx.ring().write(p.add(at), (len - at).min(PIECE - n)) } {
                Ok(0) => {
                    if !tx.ring().grow(conn.ring_limit()) {
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

fn send_managed(fd: c_int, conn: &'static Conn, b: &mut Bufs, flags: c_int, call: &mut Call) -> Step {
    if conn.tx_lock.held_by_me() {
        return Step::Return(Outcome::Fail(libc::EAGAIN));
    }
    if b.len() == 0 {
        return Step::Return(send_nothing(fd, conn, flags));
    }
    loop {
        match put(fd, conn, *b, flags) {
            Put::Sent(n) => {
                conn.in_sight();
                let last = n >= b.len();
                if !(last && hold(conn, n, flags)) {
                    conn.tell_sent();
                }
                if last {
                    return Step::Return(Outcome::Done(n as isize));
                }
                call.goes_on(b, n);
            }
            Put::Gone => return Step::Again,
            Put::Error(libc::EPIPE) if b.skip == 0 => return Step::Return(broken_pipe(flags)),
            Put::Error(e) => return Step::Return(fail_after(conn, b, e)),
            Put::Full if !call.may_wait => {
                release(conn);
                conn.fulls.fetch_add(1, SeqCst);
                conn.sent_away();
                ask_for_room(conn);
                return Step::Return(Outcome::Fail(libc::EAGAIN));
            }
            Put::Full => {
                conn.fulls.fetch_add(1, SeqCst);
                conn.nospace.store(true, Relaxed);
                if let Err(e) = wait(fd, conn, None, (b.skip > 0, 0), call) {
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

/// A single buffer as an `iovec`.
pub fn one(buf: *const c_void, len: usize) -> [iovec; 1] {
    [iovec { iov_base: buf.cast_mut(), iov_len: len }]
}

#[cfg(test)]
mod returns;
#[cfg(test)]
pub(crate) mod tests;
