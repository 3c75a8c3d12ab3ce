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

/// The kernel has told a send to a peer that is gone how that ended: what the peer says of it is no news then.
pub(super) fn told_by_kernel(conn: &Conn, e: Errno) -> Errno {
    match behind_end(conn, e) {
        e @ (libc::EPIPE | libc::ECONNRESET) if conn.peer_closed() => {
            match conn.end.fetch_or(END_TOLD, SeqCst) & END_TOLD {
                0 => e,
                _ => libc::EPIPE,
            }
        }
        e => e,
    }
}

/// An error that the kernel has told the library's own call: a send, or who asks for it, is told before what came before
/// it is read.
pub fn lost_error(conn: &Conn) -> Option<Errno> {
    let e = conn.find_lost()?;
    conn.end.fetch_or(END_TOLD, SeqCst);
    Some(behind_end(conn, e))
}

/// What the kernel calls an error of a stream that had ended before, where that end has come by the ring and the kernel knows
/// only of the reset.
fn behind_end(conn: &Conn, e: Errno) -> Errno {
    match e {
        libc::ECONNRESET if conn.fin_seen() => libc::EPIPE,
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
    let told = conn.has_ended(END_TOLD);
    if conn.is_ours() && !conn.has_ended(END_EOF) {
        pump::drive(conn);
    }
    // What the library has to say of what was told already is no news either.
    pending_error(fd).filter(|_| !told).or_else(|| reset_ahead(conn))
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
    let is_home = {
        let tx = conn.lock_tx();
        tx.path() == TxPath::Tcp && !tx.pending() && tx.peer_is_home()
    };
    match is_home {
        true => pending_error(fd).unwrap_or(libc::EPIPE),
        false => libc::EPIPE,
    }
}

/// The error that a connection on the ring is to report next, if there is one; it is reported by that.
pub fn pending_error(fd: c_int) -> Option<Errno> {
    let conn = table::conn(fd)?;
    if conn.phase() == Phase::Managed && conn.peer_closed() && !conn.has_ended(END_EOF) {
        pump::drive(conn);
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
        // To this thread, as the kernel sends it.
        // SAFETY: a signal to ourselves.
        let _ = unsafe { sys!(libc::SYS_tgkill, sys::pid(), crate::thread::tid(), libc::SIGPIPE) };
    }
    Outcome::Fail(libc::EPIPE)
}

/// What the kernel says of a received message besides its bytes; if the call fails it says nothing.
pub(super) fn tell_message(m: &mut msghdr, flags: c_int) {
    if !m.msg_name.is_null() {
        m.msg_namelen = 0;
    }
    m.msg_controllen = 0;
    m.msg_flags = flags & libc::MSG_CMSG_CLOEXEC;
}
