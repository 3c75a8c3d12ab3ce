//! How a connection has ended, and what of that its program was told.

use super::Conn;
use crate::layout::{ABORT, CLOSED};
use core::sync::atomic::Ordering::*;

/// The TCP stream has ended.
pub const END_EOF: u32 = 1;
/// The connection was reset; one error is still to be reported.
pub const END_RESET: u32 = 2;
/// The program has shut its receiving direction.
pub const END_RDSHUT: u32 = 4;
/// The program has shut its sending direction.
pub const END_WRSHUT: u32 = 8;
/// The peer's sending direction has ended (by its FIN in the ring or of TCP).
pub const END_RXFIN: u32 = 16;
/// Nobody reads what we send: it goes to the kernel, which knows the right error.
pub const END_TXDEAD: u32 = 32;
/// It has failed: whatever is sent is refused.
pub const END_FAILED: u32 = 64;
/// The kernel has said that nothing moves in either direction any more.
pub const END_HUP: u32 = 128;
/// The process at the other end is gone, or has reset it and its link has yet to say so; the end of its stream is behind
/// bytes that are not read yet.
pub const END_ORPHAN: u32 = 256;
/// The error that stands at the end of what is to be read has been told before it.
pub const END_TOLD: u32 = 512;
/// The process at the other end was gone before it had read all that it was sent: a reset, which the kernel, that has seen the
/// end of its stream first, calls a broken pipe.
pub const END_BEREFT: u32 = 1024;
/// The program has sent something to a peer that has closed, whose kernel may have been yet to say so: it calls a reset then
/// what is one behind the end of a stream.
pub const END_SPOKEN: u32 = 2048;
/// The peer's stream had ended in order before the connection was reset.
pub const END_ORDERLY: u32 = 4096;

/// Whether an error is the socket's, which the kernel tells once. Others are about one call, or, as `EPIPE`, told to every
/// call.
pub fn is_told_once(errno: i32) -> bool {
    use libc::{EAGAIN, EFAULT, EINTR, EINVAL, ENOBUFS, ENOMEM, EPIPE};
    !matches!(errno, EAGAIN | EFAULT | EINTR | EINVAL | ENOBUFS | ENOMEM | EPIPE)
}

impl Conn {
    /// Whether `END_*` is set.
    #[inline]
    pub fn has_ended(&self, bits: u32) -> bool {
        self.end.load(Acquire) & bits != 0
    }

    /// Takes the error that is to be reported once.
    pub fn take_error(&self) -> i32 {
        if self.end.load(Relaxed) & END_RESET == 0 && self.err.load(Relaxed) == 0 {
            return 0;
        }
        let e = self.err.swap(0, AcqRel);
        if e == libc::ECONNRESET {
            // Whoever finds the reset after this, in the kernel's socket or on the link, has no news.
            self.end.fetch_or(END_TOLD, AcqRel);
        }
        self.end.fetch_and(!END_RESET, AcqRel);
        e
    }

    /// The connection has failed with `errno`. Whoever waits for it is told.
    pub fn fail(&self, errno: i32) {
        if !self.has_ended(END_EOF) {
            self.err.store(errno, Release);
            self.end.fetch_or(END_EOF | END_RESET | END_RXFIN | END_TXDEAD | END_FAILED, AcqRel);
            self.notify();
        }
    }

    /// The connection has failed in a way that the program was told of.
    pub fn fail_as_told(&self) {
        if !self.has_ended(END_EOF) {
            self.end.fetch_or(END_EOF | END_RXFIN | END_TXDEAD | END_FAILED, AcqRel);
            self.notify();
        }
    }

    /// The kernel has told the library an error.
    pub fn note_lost(&self, errno: i32) {
        if is_told_once(errno) {
            self.lost.store(errno, Release);
        }
    }

    /// A call that has transferred something does not tell its error: the next one does.
    pub fn keep_error(&self, errno: i32) {
        if is_told_once(errno) {
            self.err.store(errno, Release);
            // Who took it was not told.
            self.end.fetch_and(!END_TOLD, AcqRel);
            self.end.fetch_or(END_RESET, AcqRel);
        }
    }

    /// What that left to be told, if nobody was yet.
    pub fn kept_error(&self) -> Option<i32> {
        Some(self.err.load(Acquire)).filter(|e| *e != 0 && self.has_ended(END_RESET))
    }

    /// The stream of the kernel's socket has ended as if that were all: it has not, if an error was told before.
    pub fn find_lost(&self) -> Option<i32> {
        if self.lost.load(Relaxed) == 0 {
            return None;
        }
        let e = self.lost.swap(0, AcqRel);
        // A reset by a peer that had closed properly says only that frames were left unread.
        let flags = self.peer().map_or(0, |p| p.flags.load(Acquire));
        let proper = e == libc::ECONNRESET && flags & (CLOSED | ABORT) == CLOSED && !self.has_ended(END_SPOKEN);
        (e != 0 && !proper).then_some(e)
    }
}
