//! One call of the program, which may go on in the kernel, on a ring and elsewhere before it is over.

use super::*;

/// What holds for all of a call, wherever its connection is meanwhile.
pub(super) struct Call {
    /// As it was when the call began: what `O_NONBLOCK` becomes meanwhile does not end a wait.
    pub may_wait: bool,
    pub since: Since,
    /// When it last began to look for the first bytes; see [`Since::begun`].
    then: Since,
    /// How long it may wait in all, in ns; 0: for ever.
    limit: i64,
    /// The end of that; 0: it has not waited yet.
    until: i64,
    /// It began where the kernel keeps the time limit, which another process may have set (for a listener that was passed on):
    /// it is known since the connection has moved.
    by_kernel: bool,
}

impl Call {
    /// `limit` is what holds `SO_RCVTIMEO` or `SO_SNDTIMEO`.
    pub fn new(since: Since, conn: &Conn, flags: c_int, limit: &AtomicI64) -> Call {
        options::reread(conn);
        let limit = limit.load(Relaxed);
        let may_wait = flags & libc::MSG_DONTWAIT == 0 && !conn.nonblock.load(Relaxed);
        Call { may_wait, since, then: since, limit, until: 0, by_kernel: limit == 0 && conn.phase() == Phase::Raw }
    }

    /// The connection is no more where the call began; `limit` as in [`Call::new`].
    pub fn moved(&mut self, limit: &AtomicI64) {
        if core::mem::take(&mut self.by_kernel) {
            self.limit = limit.load(Relaxed);
        }
    }

    /// It has a time limit, so that the kernel never goes on with it after a handler.
    pub fn is_timed(&self) -> bool {
        self.limit > 0
    }

    /// A handler that ends it has run before the kernel has heard of it.
    pub fn is_interrupted(&self) -> bool {
        self.may_wait && self.since.is_over(self.is_timed())
    }

    /// It begins to wait, or does so once more: until when, in ns of `CLOCK_MONOTONIC`; 0: for ever.
    pub fn deadline(&mut self) -> i64 {
        if self.until == 0 && self.limit > 0 {
            self.until = now_ns() + self.limit;
        }
        self.until
    }

    /// The same call from now on, until `end` at most, whichever handlers have run.
    pub fn until(&mut self, end: i64) -> Call {
        let now = Since::now();
        let until = Some(self.deadline()).filter(|d| *d > 0).map_or(end, |d| d.min(end));
        Call { since: now, then: now, until, ..*self }
    }

    /// The handlers that have run so far do not end it.
    pub fn handled(&mut self) {
        self.since = Since::now();
    }

    /// Its time limit is over.
    pub fn is_out_of_time(&self) -> bool {
        self.until > 0 && now_ns() >= self.until
    }

    /// Some of its time is gone already: the kernel, which counts that of each of its own calls, cannot be the one to wait.
    pub fn is_late(&self) -> bool {
        self.until > 0
    }

    /// It has waited, until it was what this tells, and looks again.
    pub fn looks_again(&mut self, then: Since) {
        self.then = then;
    }

    /// The first bytes are there, or were transferred. See [`Since::begun`].
    pub fn has_begun(&mut self) {
        self.since.begun(self.then);
    }

    /// `n` bytes were transferred, and there is more to do.
    pub fn goes_on(&mut self, b: &mut Bufs, n: usize) {
        if b.skip == 0 {
            self.has_begun();
        }
        b.skip += n;
    }
}

/// How long a call that has slept sleeps by a number in the kernel, before it looks whether that is still its connection's.
const SLICE_NS: i64 = 100_000_000;

/// Waits in the kernel, for the rest of a call's time at most, until `events` are there; the caller is to look again. Where
/// another thread can close the number, what is waited for may be another file that has just got it.
pub(super) fn poll_wait(fd: c_int, events: i16, until: i64, how: Sleep) -> Result<(), Errno> {
    let (since, any) = (how.since, how.any);
    let mut p = libc::pollfd { fd, events, revents: 0 };
    let slice = if process::has_threads() { now_ns() + SLICE_NS } else { 0 };
    let end = if slice > 0 && (until == 0 || slice < until) { slice } else { until };
    let ts = timespec_of(end - now_ns());
    let tsp = if end > 0 { &raw const ts as usize } else { 0 };
    // SAFETY: `p` is writable and `ts` readable; both outlive the call.
    match unsafe { signals::sleep(libc::SYS_ppoll, [&raw mut p as usize, 1, tsp, 0, 8, 0], how) } {
        // This one the kernel never goes on with by itself.
        Err(libc::EINTR) if !since.is_over(any) => Ok(()),
        Ok(0) if end == until => Err(libc::EAGAIN),
        r => r.map(|_| ()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{armed, know};
    use super::*;
    use crate::layout::Slot;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::sync::mpsc;

    /// A handler with `SA_RESTART` runs before the first byte has come, which finds the connection managed: the call goes on.
    #[test]
    fn a_handler_before_the_first_byte_does_not_end_a_call_that_moves() {
        let slot = Slot::default();
        let (conn, ours, mut theirs) = armed(&slot);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        conn.set_phase(Phase::Raw);
        conn.gentle.store(true, SeqCst);
        let (tell, told) = mpsc::channel();
        let t = std::thread::spawn(move || {
            tell.send(crate::thread::me(|t| &raw const t.handled as usize)).unwrap();
            let mut b = [0u8; 75];
            let v = one(b.as_mut_ptr().cast(), b.len());
            // SAFETY: the buffer is writable; no message.
            unsafe { recv(fd, &v, core::ptr::null_mut(), libc::MSG_WAITALL) }
        });
        let handled = told.recv().unwrap() as *const AtomicU32;
        while conn.local().peekers.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        // SAFETY: the thread's own counter; it ends only after this.
        unsafe { &*handled }.fetch_add(1, SeqCst);
        conn.set_phase(Phase::Managed);
        theirs.write_all(&[0; 14]).unwrap();
        while conn.local().fut_rx.load(SeqCst) == 0 && !t.is_finished() {
            std::thread::yield_now();
        }
        theirs.write_all(&[0; 61]).unwrap();
        pump::run(&mut conn.lock_both());
        conn.notify();
        assert_eq!(t.join().unwrap(), Outcome::Done(75));
        table::take(fd);
        conn.set_phase(Phase::Closed);
    }
}
