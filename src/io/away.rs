//! Sending and receiving while the connection is another process's to bring home.

use super::*;

/// A signal ends a wait only if it has lasted longer than a return usually takes.
const PATIENCE_NS: i64 = 100_000_000;

/// Waits for a connection that is away. True: look again.
fn await_owner(conn: &'static Conn, begun: i64, until: i64) -> Result<(), Errno> {
    let look = visit::look(conn);
    if look == visit::Look::Signal && now_ns() - begun > PATIENCE_NS {
        return Err(libc::EINTR);
    }
    match look {
        visit::Look::Away | visit::Look::Signal => in_time(conn, until),
        _ => Ok(()),
    }
}

/// Whether the time that the program has given a call is over.
fn is_late(deadline: i64) -> bool {
    deadline > 0 && now_ns() >= deadline
}

/// Whether a call may wait on.
fn in_time(conn: &Conn, until: i64) -> Result<(), Errno> {
    if now_ns() >= until {
        conn.local().hasty.store(true, Relaxed);
        return Err(libc::EAGAIN);
    }
    Ok(())
}

/// Another process is to bring the connection home; what comes by TCP on the way is read here.
pub(super) fn recv_away(fd: c_int, conn: &'static Conn, b: &mut Bufs, flags: c_int, call: &mut Call) -> Step {
    if visit::is_regained(conn) {
        return Step::Again;
    }
    if !conn.is_mapped() && (conn.is_aborted() || conn.peer_closed() || sys::poll_now(fd, 0) & libc::POLLHUP != 0) {
        // All has come that will, and one receive gives it, though some is on a ring.
        visit::settle(conn);
        if conn.phase() != Phase::Away {
            return Step::Again;
        }
    }
    let begun = now_ns();
    let deadline = call.deadline();
    let until = visit::until(conn, call.may_wait, deadline);
    let least = conn.least(flags, call.may_wait, b.len() + b.skip);
    let to_see = if call.may_wait { to_see(flags, b.len(), || conn.lowat()) } else { 0 };
    loop {
        let mut seen = 0;
        let free = visit::is_within_reach(conn);
        if free && b.skip > 0 && stands_at_error(fd, conn) {
            return Step::Return(Outcome::Done(0));
        }
        if free && b.len() > 0 {
            match take(fd, conn, *b, flags) {
                Take::Got(n) if flags & libc::MSG_WAITALL != 0 && flags & libc::MSG_PEEK == 0 && n < b.len() => {
                    b.skip += n;
                    continue;
                }
                Take::Got(n) if b.skip + n < least => {
                    call.goes_on(b, n);
                    continue;
                }
                Take::Got(n) if looks_on(fd, n, to_see) => {
                    seen = n;
                    crate::sync::pause(100_000);
                }
                Take::Got(n) => return Step::Return(Outcome::Done(n as isize)),
                Take::End => return Step::Return(Outcome::Done(0)),
                Take::Error(e) => return Step::Return(Outcome::Fail(e)),
                Take::Gone => return Step::Again,
                Take::Empty => {}
            }
        }
        if let Err(e) = await_owner(conn, begun, until) {
            if seen > 0 {
                return Step::Return(Outcome::Done(seen as isize));
            }
            return Step::Return(Outcome::Fail(e));
        }
        if conn.phase() != Phase::Away {
            return Step::Again;
        }
        // (Looked at once: to take no bytes is no end.)
        let home = visit::has_come(conn);
        if home && b.len() == 0 {
            // Nothing is taken, so the kernel may say what comes of it, behind what was in the ring.
            if !call.may_wait {
                visit::await_rest(conn, until);
            }
            return Step::Return(Outcome::Bypass);
        }
        if home {
            // What is repeated is yet to come, or what the program waits for.
            let how = Sleep { since: call.since, any: call.is_timed() || b.skip > 0, if_left: &mut || () };
            let slice = now_ns() + visit::SLICE_NS;
            let end = if deadline > 0 { slice.min(deadline) } else { slice };
            let over = match () {
                _ if !call.may_wait || is_late(deadline) => libc::EAGAIN,
                _ if poll_wait(fd, libc::POLLIN, end, how) == Err(libc::EINTR) => libc::EINTR,
                _ => continue,
            };
            visit::await_rest(conn, until);
            return match take(fd, conn, *b, flags) {
                Take::Got(n) => Step::Return(Outcome::Done(n as isize)),
                Take::End => Step::Return(Outcome::Done(0)),
                Take::Error(e) => Step::Return(Outcome::Fail(e)),
                Take::Gone => Step::Again,
                Take::Empty => Step::Return(Outcome::Fail(over)),
            };
        }
    }
}

/// See [`recv_away`].
pub(super) fn send_away(fd: c_int, conn: &'static Conn, b: &mut Bufs, flags: c_int, call: &mut Call) -> Step {
    if visit::is_regained(conn) {
        return Step::Again;
    }
    if conn.has_ended(END_WRSHUT) {
        // It fails, and how is known where all that the peer has done has come.
        visit::settle(conn);
    }
    let begun = now_ns();
    let deadline = call.deadline();
    let until = visit::until(conn, call.may_wait, deadline);
    loop {
        // What finds no room on the way may find some now.
        let home = visit::has_come(conn);
        match if visit::is_within_reach(conn) { put(fd, conn, *b, flags) } else { Put::Busy } {
            Put::Sent(n) if call.may_wait && n < b.len() => {
                b.skip += n;
                continue;
            }
            Put::Sent(n) | Put::Held(n) => {
                if n < b.len() {
                    // Who is told of edges waits for room now.
                    conn.fulls.fetch_add(1, SeqCst);
                }
                return Step::Return(Outcome::Done(n as isize));
            }
            Put::Gone => return Step::Again,
            Put::Error(libc::EPIPE) if b.skip == 0 => return Step::Return(broken_pipe(flags)),
            Put::Error(e) => return Step::Return(Outcome::Fail(e)),
            Put::Full if home => {
                conn.fulls.fetch_add(1, SeqCst);
                if !call.may_wait || is_late(deadline) {
                    return Step::Return(Outcome::Fail(libc::EAGAIN));
                }
                let _ = crate::poll::wait_one(fd, libc::POLLOUT, 5_000_000);
            }
            // The other end is not there yet.
            Put::Busy if home => {
                if let Err(e) = in_time(conn, until) {
                    return Step::Return(Outcome::Fail(e));
                }
                crate::sync::pause(100_000);
            }
            Put::Full | Put::Busy => {}
        }
        if let Err(e) = await_owner(conn, begun, until) {
            return Step::Return(Outcome::Fail(e));
        }
        if conn.phase() != Phase::Away {
            return Step::Again;
        }
    }
}
