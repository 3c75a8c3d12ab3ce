//! Sending and receiving: what the ways to do it share.
//!
//! A connection in phase `Raw` uses the kernel's calls, counted; one in phase
//! `Managed` takes its bytes from where the path switch says. A call that has
//! to wait does so where a signal, a timeout and the peer's death end it as
//! they would in the kernel.

use crate::conn::*;
use crate::copy::is_nowhere;
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
use crate::{chaos, early, options, process};
use core::sync::atomic::{AtomicI64, AtomicU32, Ordering::*};
use libc::{c_int, c_void, iovec, msghdr};

mod armed;
mod away;
mod call;
mod errors;
mod held;
mod message;
mod raw;
mod receive;
mod send;
pub mod steady;
mod wait;
pub mod young;
use armed::{armed_front, armed_peek, armed_rest};
pub use armed::{before_mark, drain, front, mark_is_there, unread, Front};
use away::{recv_away, send_away};
use call::{poll_wait, Call};
pub use errors::{asked_error, broken_pipe, lost_error, pending_error};
use errors::{fail_after, keep_for_next, reset_ahead, send_nothing, shut_error, told_by_kernel};
use held::{holds, note_held, note_more};
pub use held::{is_behind_cork, release, release_overdue, show, PATIENCE_NS};
use message::tell_message;
pub use raw::{end_peek, has_evidence, BEGIN_SLOW};
use raw::{leave_kernel, looks_on, note_bytes, note_call, pause, recv_raw, send_raw, to_see};
pub use receive::recv;
use receive::{await_resume, stands_at_error, take, tcp_take, waited, Take};
use send::{put, Put};
pub use send::{send, send_after};
use wait::{is_dry, wait};

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
        let is_ours = |c: &Call| self.skip > 0 || c.is_late() || c.is_interrupted() || pins::is_held();
        let Some(mut call) = call.filter(is_ours) else {
            return Outcome::Bypass;
        };
        let sends = nr == libc::SYS_sendmsg;
        let whole = self.skip + self.len();
        loop {
            let quick = call.is_late() || pins::is_held();
            let flags = if quick { flags | libc::MSG_DONTWAIT } else { flags };
            let (at, conn) = if pins::is_held() { pins::find(fd) } else { (fd, None) };
            // Where the kernel does not wait, this does.
            let lowat = || sys::sockopt_int(at, libc::SOL_SOCKET, libc::SO_RCVLOWAT).map_or(1, |n| n.max(1) as usize);
            let least = match flags & (libc::MSG_WAITALL | libc::MSG_PEEK) {
                _ if sends => whole,
                libc::MSG_WAITALL => whole,
                0 if quick && call.may_wait => lowat().min(whole),
                _ => 1,
            };
            let mut if_left = || ();
            let any = call.is_timed() || self.skip > 0;
            let mut how = Sleep { since: call.since, any, if_left: &mut if_left };
            let first = (call.may_wait && !quick).then(|| how.again());
            let now = Since::now();
            let r = {
                // The number is not closed under it.
                let _locks = conn.filter(|_| pins::is_held()).map(|c| c.lock_both());
                // An error that stands behind what a receive has is not its own to take. (One that comes while it sleeps it takes
                // all the same: only a call that the kernel keeps cannot find another file under its number.)
                match !sends && self.skip > 0 && raw::more_of(at).is_none() {
                    true => Ok(0),
                    false => kernel_msg(nr, at, self, usize::MAX, None, flags, first),
                }
            };
            match r {
                Ok(n) if !sends && quick && call.may_wait && looks_on(at, n, to_see(flags, self.len(), lowat)) => {
                    if pause(&mut call, true, &mut || ()).is_err() {
                        return Outcome::Done(n as isize);
                    }
                }
                Ok(n) if n > 0 && self.skip + n < least && (quick || n == self.reach(usize::MAX)) => {
                    call.looks_again(if quick { now } else { Since::at_wake() });
                    call.goes_on(&mut self, n);
                }
                Err(libc::EAGAIN) if quick && call.may_wait => {
                    let waited = match sends {
                        true => poll_wait(at, libc::POLLOUT, call.deadline(), how),
                        // `poll` would wait for all of `SO_RCVLOWAT`, of which some may have been taken.
                        false if least > 1 && self.skip > 0 => pause(&mut call, true, &mut || ()),
                        false => poll_wait(at, libc::POLLIN, call.deadline(), how),
                    };
                    if let Err(e) = waited {
                        return self.outcome(Outcome::Fail(e));
                    }
                }
                r => return self.outcome(r.map_or_else(Outcome::Fail, |n| Outcome::Done(n as isize))),
            }
        }
    }

    /// Whether a buffer lies where no program's memory can: in the first page, or in the upper part of the
    /// address space. (Other bad addresses are found out when something is copied.)
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
    mut msg: Option<&mut msghdr>,
    flags: c_int,
    how: Option<Sleep>,
) -> sys::SysResult {
    let waits = how.is_some();
    match kernel_call(nr, fd, b, limit, msg.as_deref_mut(), flags, how) {
        Err(libc::EINTR) if waits => {
            unless_it_waits(kernel_call(nr, fd, b, limit, msg, flags | libc::MSG_DONTWAIT, None))
        }
        r => r,
    }
}

/// What becomes of a call that a handler has ended. It may have run when the call was on its way into the kernel, which then
/// was not asked at all: so it is made once more, in a way that does not wait. Where there is something to do, there is no
/// `EINTR`.
fn unless_it_waits(again: sys::SysResult) -> sys::SysResult {
    again.map_err(|e| if e == libc::EAGAIN { libc::EINTR } else { e })
}

fn kernel_call(
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
    loop {
        let (at, conn) = if begun || pins::is_whole() { pins::find(fd) } else { (fd, early::conn(fd)) };
        let Some(c) = conn else { return (at, None) };
        chaos::stumble();
        if let Some(ours) = is_served(c, at, flags) {
            return (at, conn.filter(|_| ours));
        }
    }
}

/// Whether what was found by the number `at` is ours to serve. `None`: it goes on as another record, which is to count what the
/// kernel moves, and may be on a ring.
fn is_served(c: &Conn, at: c_int, flags: c_int) -> Option<bool> {
    match c.phase() {
        // What is in the error queue is the kernel's, and never waited for.
        Phase::Raw | Phase::Managed | Phase::Away => Some(flags & libc::MSG_ERRQUEUE == 0),
        _ => c.is_at(at).then_some(false),
    }
}

/// Whether the library serves transfers by `fd`.
pub fn serves(fd: c_int) -> bool {
    live(fd, 0, false).1.is_some()
}

/// A single buffer as an `iovec`.
pub fn one(buf: *const c_void, len: usize) -> [iovec; 1] {
    [iovec { iov_base: buf.cast_mut(), iov_len: len }]
}

#[cfg(test)]
mod returns;
#[cfg(test)]
pub(crate) mod tests;
