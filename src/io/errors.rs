//! How calls on a ring tell errors.

use super::*;

/// An error ends a call. Who gets the number of bytes that came before is told of it by the next one.
pub(super) fn fail_after(conn: &Conn, b: &Bufs, e: Errno) -> Outcome {
    if b.skip > 0 {
        conn.keep_error(e);
    }
    Outcome::Fail(e)
}

/// A send of no bytes: tells errors, as any other.
pub(super) fn send_nothing(fd: c_int, conn: &Conn, flags: c_int) -> Outcome {
    let quiet = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    if conn.peer_closed() && !conn.has_ended(END_EOF) {
        pump::drive(conn);
    }
    // As in `put`.
    let kernel = || conn.has_ended(END_TXDEAD) || conn.peer_closed() || conn.lock_tx().path() == TxPath::Tcp;
    let e = match conn.take_error() {
        0 if conn.has_ended(END_WRSHUT | END_FAILED) => shut_error(fd, conn),
        0 if kernel() => {
            // SAFETY: no bytes are read.
            unsafe { sys::send(fd, core::ptr::null(), 0, quiet) }.err().map_or(0, |e| told_by_kernel(conn, e))
        }
        e => e,
    };
    match e {
        0 => Outcome::Done(0),
        libc::EPIPE => broken_pipe(flags),
        e => Outcome::Fail(e),
    }
}

/// The kernel has told a send to a peer that is gone how that ended: what the peer says of it, maybe later by another host's
/// link, is no news then.
pub(super) fn told_by_kernel(conn: &Conn, e: Errno) -> Errno {
    match behind_end(conn, e) {
        e @ (libc::EPIPE | libc::ECONNRESET) => match conn.end.fetch_or(END_TOLD, SeqCst) & END_TOLD {
            0 => e,
            _ => libc::EPIPE,
        },
        e => e,
    }
}

/// The same where the call has sent something: the next one is told. Under the send lock, so that nobody makes the
/// connection the kernel's in between, which has nothing more to say. What is left to say of this call: nothing that is kept.
pub(super) fn keep_for_next(conn: &Conn, e: Errno) -> Errno {
    match behind_end(conn, e) {
        libc::ECONNRESET if conn.has_ended(END_TOLD) => {}
        e => conn.keep_error(e),
    }
    libc::EPIPE
}

/// An error that the kernel has told the library's own call: a send, or who asks for it, is told before what came before
/// it is read.
pub fn lost_error(conn: &Conn) -> Option<Errno> {
    let e = conn.find_lost()?;
    conn.end.fetch_or(END_TOLD, SeqCst);
    Some(behind_end(conn, e))
}

/// What the kernel calls an error of a stream that had ended before, where that end has come by the ring and the kernel knows
/// only of the reset; or, where it knows of an end that was none, the other way round.
fn behind_end(conn: &Conn, e: Errno) -> Errno {
    match e {
        // Nothing of the stream was ever the library's; and what it took for an end may be what the program has shut itself.
        e if conn.unconfirmable.load(SeqCst) => e,
        libc::ECONNRESET if conn.fin_seen() || conn.has_ended(END_SPOKEN) => libc::EPIPE,
        libc::EPIPE if conn.has_ended(END_BEREFT) => libc::ECONNRESET,
        e => e,
    }
}

/// The error of a reset that stands behind bytes of TCP that are unread, for who asks for errors alone, and for a send
/// that must fail anyway.
pub(super) fn reset_ahead(conn: &Conn) -> Option<Errno> {
    if !conn.is_reset_ahead() || conn.end.fetch_or(END_TOLD, SeqCst) & END_TOLD != 0 {
        return None;
    }
    Some(if conn.fin_seen() { libc::EPIPE } else { libc::ECONNRESET })
}

/// What who asks for errors alone is told, and nobody after it.
pub fn asked_error(fd: c_int, conn: &Conn) -> Option<Errno> {
    visit::arrive_by_exec(conn);
    // What a call that has moved something keeps for the next one nobody was told of yet.
    let kept = conn.take_error();
    if kept != 0 {
        return Some(kept);
    }
    let told = conn.has_ended(END_TOLD);
    if conn.is_ours() && !conn.has_ended(END_EOF) {
        pump::drive(conn);
    }
    // What the library has to say of what was told already is no news either.
    let e = pending_error(fd).filter(|_| !told).or_else(|| reset_ahead(conn));
    if matches!(e, Some(libc::ECONNRESET | libc::EPIPE)) && conn.phase() != Phase::Raw {
        // It may have been the kernel's: then the peer's word of it is no news.
        conn.end.fetch_or(END_TOLD, SeqCst);
    }
    e
}

/// What a send is told whose direction was shut. Where both are on TCP again the kernel may have been sent something
/// that nobody can read any more, which is a reset.
pub(super) fn shut_error(fd: c_int, conn: &Conn) -> Errno {
    if conn.has_ended(END_FAILED) {
        return libc::EPIPE;
    }
    if let Some(e) = reset_ahead(conn) {
        return e;
    }
    await_bereavement(fd, conn);
    let is_home = {
        let tx = conn.lock_tx();
        tx.path() == TxPath::Tcp && !tx.pending() && tx.peer_is_home()
    };
    // Of a peer that is gone, while bytes are unread, the kernel knows the end, too; and of one that has not answered yet it alone.
    match is_home || conn.has_ended(END_ORPHAN) || conn.unconfirmable.load(SeqCst) {
        true => pending_error(fd).unwrap_or(libc::EPIPE),
        false => libc::EPIPE,
    }
}

/// The kernel says that the peer has ended, and it has not said goodbye: it was killed. What became of the bytes that it was sent
/// is known when the background thread has heard of that, too, in a moment.
fn await_bereavement(fd: c_int, conn: &Conn) {
    const MOST_NS: i64 = 100_000_000;
    let unheard = || {
        conn.phase() == Phase::Managed
            && !conn.has_ended(END_EOF | END_ORPHAN | END_RDSHUT)
            && !(conn.fin_seen() || conn.peer_closed() || conn.rx_lock.held_by_me())
            && conn.remote().is_none()
            && sys::poll_now(fd, libc::POLLRDHUP) != 0
    };
    let until = now_ns() + MOST_NS;
    while unheard() && now_ns() < until {
        crate::sync::pause(100_000);
    }
}

/// The error that a connection on the ring is to report next, if there is one; it is reported by that.
pub fn pending_error(fd: c_int) -> Option<Errno> {
    let conn = table::conn(fd)?;
    if conn.phase() == Phase::Managed && conn.peer_closed() && !conn.has_ended(END_EOF) {
        pump::drive(conn);
        conn.forgive_reset(&conn.lock_rx());
    }
    let kernel = conn.phase() != Phase::Managed || conn.has_ended(END_EOF);
    let told = conn.has_ended(END_TOLD);
    let asked = || match behind_end(conn, sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_ERROR).unwrap_or(0)) {
        libc::ECONNRESET | libc::EPIPE if told => 0,
        e => e,
    };
    let e = match conn.take_error() {
        // What the kernel has to say of what was told already, maybe to another process, is no news.
        0 if conn.has_ended(END_FAILED) => 0,
        0 if kernel => match asked() {
            0 => lost_error(conn).unwrap_or(0),
            e => e,
        },
        // It may be told before what has come by TCP.
        0 if matches!(conn.lock_rx().path(), RxPath::Tcp | RxPath::Armed | RxPath::Draining | RxPath::Replay) => {
            match asked() {
                libc::EPIPE => {
                    conn.end.fetch_or(END_TOLD, SeqCst);
                    libc::EPIPE
                }
                e => {
                    if e != 0 {
                        conn.note_lost(e);
                    }
                    lost_error(conn).unwrap_or(0)
                }
            }
        }
        e => e,
    };
    (e != 0).then_some(e)
}

/// `EPIPE`, and the signal that goes with it.
pub fn broken_pipe(flags: c_int) -> Outcome {
    if flags & libc::MSG_NOSIGNAL == 0 {
        // To this thread, and as from a user, as the kernel sends it.
        // SAFETY: a signal to ourselves; all-zero is a valid `siginfo_t`, the kernel's of `SI_USER`.
        unsafe {
            let (pid, tid) = (sys::pid(), crate::thread::tid());
            let mut info: [i32; 32] = [0; 32];
            info[0] = libc::SIGPIPE;
            (info[4], info[5]) = (pid as i32, libc::getuid() as i32);
            if sys!(libc::SYS_rt_tgsigqueueinfo, pid, tid, libc::SIGPIPE, info.as_ptr()).is_err() {
                let _ = sys!(libc::SYS_tgkill, pid, tid, libc::SIGPIPE);
            }
        }
    }
    Outcome::Fail(libc::EPIPE)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{armed, arrive, know, reset, settle};
    use super::*;
    use crate::layout::Slot;
    use std::net::TcpStream;
    use std::os::fd::AsRawFd;

    /// A connection that knows nothing yet of its peer's end, which the kernel has seen.
    fn ended() -> (&'static Conn, TcpStream) {
        let slot: &Slot = Box::leak(Box::default());
        let (conn, ours, mut theirs) = armed(slot);
        know(ours.as_raw_fd(), conn);
        arrive(conn, &mut theirs, b"unread");
        drop(theirs);
        settle(conn, libc::POLLRDHUP);
        (conn, ours)
    }

    /// The kernel has seen the end of a peer that was killed, and then a reset: where that had left bytes of the ring unread,
    /// there was no end. It is told once.
    #[test]
    fn who_was_gone_before_it_had_read_all_has_reset_it() {
        for (bereft, told) in [(END_BEREFT, libc::ECONNRESET), (0, libc::EPIPE)] {
            let (conn, ours) = ended();
            let fd = ours.as_raw_fd();
            // SAFETY: the byte is readable.
            assert_eq!(unsafe { sys::send(fd, b"x".as_ptr().cast(), 1, 0) }, Ok(1));
            settle(conn, libc::POLLERR);
            conn.end.fetch_or(END_ORPHAN | END_WRSHUT | bereft, SeqCst);
            assert_eq!([shut_error(fd, conn), shut_error(fd, conn)], [told, libc::EPIPE]);
            table::take(fd);
            conn.set_phase(Phase::Closed);
        }
    }

    /// A reset of which the peer tells by its link and by TCP, in either order, is told once.
    #[test]
    fn a_reset_is_told_once_whoever_tells_it_first() {
        for (link_first, calls_between) in [(true, 1), (true, 2), (false, 0), (false, 1), (false, 2)] {
            let slot: &Slot = Box::leak(Box::default());
            let (conn, ours, theirs) = armed(slot);
            let fd = ours.as_raw_fd();
            know(fd, conn);
            let link = || {
                slot.flags.fetch_or(ABORT | CLOSED, SeqCst);
            };
            let kernel = |theirs: std::net::TcpStream| {
                reset(conn, theirs);
            };
            let x: *mut c_void = c"x".as_ptr().cast_mut().cast();
            let told = [libc::ECONNRESET, libc::EPIPE, libc::EPIPE];
            let sends = |which: &[c_int]| {
                for e in which {
                    // SAFETY: the byte is readable; no message.
                    let r = match unsafe { send(fd, &one(x, 1), core::ptr::null(), libc::MSG_NOSIGNAL) } {
                        // By now the background thread may have made it the kernel's.
                        // SAFETY: as above.
                        Outcome::Bypass => Outcome::from(unsafe { sys::send(fd, x.cast(), 1, libc::MSG_NOSIGNAL) }),
                        r => r,
                    };
                    assert_eq!(r, Outcome::Fail(*e), "link first {link_first}, after {calls_between}");
                }
            };
            if link_first {
                link();
                sends(&told[..calls_between]);
                kernel(theirs);
            } else {
                kernel(theirs);
                sends(&told[..calls_between]);
                link();
            }
            sends(&told[calls_between..]);
            assert_eq!(conn.readiness(0) & libc::EPOLLERR as u32, 0, "link {link_first} {calls_between}");
            let mut buf = [0u8; 8];
            let to = iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
            // SAFETY: a buffer that lives as long as the calls.
            let r = match unsafe { recv(fd, &[to], core::ptr::null_mut(), 0) } {
                // SAFETY: as above.
                Outcome::Bypass => Outcome::from(unsafe { sys::recv(fd, to.iov_base.cast(), 8, 0) }),
                r => r,
            };
            assert_eq!(r, Outcome::Done(0), "link {link_first} {calls_between}");
            table::take(fd);
            conn.set_phase(Phase::Closed);
        }
    }

    /// The kernel has told a send that had moved something before: who asks is told, once.
    #[test]
    fn an_error_that_is_kept_for_the_next_call_is_told_to_who_asks() {
        let slot: &Slot = Box::leak(Box::default());
        let (conn, ours, _theirs) = armed(slot);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        assert_eq!(keep_for_next(conn, libc::ECONNRESET), libc::EPIPE);
        let asked = [asked_error(fd, conn), asked_error(fd, conn)];
        assert_eq!(asked, [Some(libc::ECONNRESET), None]);
        table::take(fd);
        conn.set_phase(Phase::Closed);
    }

    /// The same where the peer's link tells of the reset when the kernel, which has told it, says only that there is an end.
    #[test]
    fn an_error_that_is_kept_is_what_the_kernel_has_said_whatever_the_link_says_then() {
        let slot: &Slot = Box::leak(Box::default());
        let (conn, ours, theirs) = armed(slot);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        reset(conn, theirs);
        let e = sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_ERROR);
        assert_eq!(e, Ok(libc::ECONNRESET));
        keep_for_next(conn, libc::ECONNRESET);
        slot.flags.fetch_or(ABORT | CLOSED, SeqCst);
        pump::drive(conn);
        assert!(conn.has_ended(END_EOF));
        let x = one(c"x".as_ptr().cast_mut().cast(), 1);
        let send = || match put(fd, conn, Bufs::new(&x), libc::MSG_NOSIGNAL) {
            Put::Error(e) => e,
            _ => 0,
        };
        assert_eq!([send(), send()], [libc::ECONNRESET, libc::EPIPE]);
        table::take(fd);
        conn.set_phase(Phase::Closed);
    }

    /// The kernel knows that the peer has ended before the background thread has heard that it was killed.
    #[test]
    fn what_became_of_its_bytes_is_waited_for() {
        let (conn, ours) = ended();
        let fd = ours.as_raw_fd();
        conn.end.fetch_or(END_WRSHUT, SeqCst);
        std::thread::scope(|s| {
            let asked = s.spawn(move || shut_error(fd, table::conn(fd).unwrap()));
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!asked.is_finished(), "it has not waited");
            // SAFETY: the byte is readable.
            assert_eq!(unsafe { sys::send(fd, b"x".as_ptr().cast(), 1, 0) }, Ok(1));
            settle(conn, libc::POLLERR);
            conn.end.fetch_or(END_ORPHAN | END_BEREFT, SeqCst);
            assert_eq!(asked.join().unwrap(), libc::ECONNRESET);
        });
        table::take(fd);
        conn.set_phase(Phase::Closed);
    }
}
