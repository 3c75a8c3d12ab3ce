//! Receiving: bytes from where the path switch says, in the general way.

use super::*;
use crate::ring::Failure;
use crate::thread::Critical;

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
                tell_message(m, flags, fd, None);
            }
            return o;
        };
        let call = begun.get_or_insert_with(|| Call::new(since, conn, flags, &conn.rcvtimeo));
        if flags & libc::MSG_OOB != 0 {
            // None is there before the peer's side is home.
            crate::process::try_give_up(conn, Why::Urgent);
            if !conn.is_at(at) {
                continue;
            }
            return Outcome::Bypass;
        }
        visit::arrive(conn);
        // SAFETY: null or valid by the caller's promise.
        let msg = unsafe { msg.as_mut() };
        let (step, msg) = match conn.phase() {
            Phase::Raw if b.skip == 0 => (recv_raw(at, conn, &mut b, msg, flags, call), None),
            Phase::Raw => (recv_raw(at, conn, &mut b, None, flags, call), msg),
            Phase::Away => (recv_away(at, conn, &mut b, flags, call), msg),
            _ => {
                call.moved(&conn.rcvtimeo);
                (recv_managed(at, conn, &mut b, flags, call), msg)
            }
        };
        if let Step::Return(o) = step {
            let o = b.outcome(o);
            if let (Outcome::Done(_), Some(m)) = (o, msg) {
                tell_message(m, flags, at, Some(conn));
            }
            return o;
        }
    }
}

pub(super) enum Take {
    Got(usize),
    Empty,
    End,
    Error(Errno),
    Gone,
}

/// Takes what is there, without waiting.
pub(super) fn take(fd: c_int, conn: &'static Conn, b: Bufs, flags: c_int) -> Take {
    let peek = flags & libc::MSG_PEEK != 0;
    let trunc = flags & libc::MSG_TRUNC != 0;
    let mut rx = conn.lock_rx();
    if !conn.is_at(fd) || !conn.is_managed() {
        return Take::Gone;
    }
    match rx.path() {
        RxPath::Ring | RxPath::RingFinal | RxPath::Returning | RxPath::Draining if !conn.is_mapped() => Take::Empty,
        RxPath::Draining if !rx.ring().kept.is_empty() => taken(ring_take(conn, &mut rx, b, flags)),
        // What was to be repeated will not be, if the connection has failed meanwhile.
        RxPath::Returning if !conn.has_ended(END_EOF) => match peek {
            // What is peeked at now is repeated on TCP later.
            true if rx.ring().waiting() > 0 => taken(ring_take(conn, &mut rx, b, flags)),
            // The end is announced after the last byte.
            _ if conn.fin_seen() && rx.ring().waiting() == 0 => failed(conn),
            _ => Take::Empty,
        },
        RxPath::Ring | RxPath::RingFinal | RxPath::Returning => {
            if !trunc && b.is_nowhere() && rx.ring().waiting() > 0 {
                return Take::Error(libc::EFAULT);
            }
            match ring_take(conn, &mut rx, b, flags) {
                Ok(0) => ended(conn, &mut rx),
                Ok(n) => Take::Got(n),
                Err(Failure::Fault) => Take::Error(libc::EFAULT),
                Err(Failure::Violation) => {
                    drop(rx);
                    pump::reset(&mut conn.lock_both());
                    Take::Error(libc::ECONNRESET)
                }
            }
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
                Take::Error(libc::ECONNRESET) => {
                    // What the peer's slot says of it is no news any more.
                    conn.end.fetch_or(END_TOLD, SeqCst);
                    Take::Error(libc::ECONNRESET)
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
                // The kernel says no more than that this end has shut its reading: what is missing an image that this process has
                // started may have taken, from the kernel.
                Take::End if conn.phase() == Phase::Away && conn.has_ended(END_RDSHUT) => return Take::End,
                Take::End if pump::read_on(&mut both, 0) => return Take::Gone,
                Take::Error(e @ (libc::ECONNRESET | libc::EPIPE)) if pump::read_on(&mut both, e) => return Take::Gone,
                // What is missing does not come any more.
                Take::End if conn.has_ended(END_TOLD) => {
                    conn.fail_as_told();
                    return Take::End;
                }
                Take::End => {
                    conn.fail(libc::ECONNRESET);
                    return failed(conn);
                }
                Take::Error(e) if is_told_once(e) => {
                    conn.fail(e);
                    return failed(conn);
                }
                _ => {}
            }
            r
        }
        RxPath::Armed | RxPath::Draining => match armed_front(conn, &mut rx) {
            (Front::App(n), true) if peek => armed_peek(fd, conn, &mut rx, b, n, flags),
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
                if at == Front::Mark && conn.is_mapped() && both.rx.ring().is_attached() {
                    match taken(ring_take(conn, &mut both.rx, b, flags)) {
                        Take::Got(0) | Take::Empty => {}
                        t => return t,
                    }
                }
                // Nobody takes the mark of what was reset, and nothing comes that could be waited for.
                match conn.has_ended(END_EOF) {
                    true => failed(conn),
                    false => Take::Empty,
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

/// What comes of what was in the ring, where a peer that lies is found out later.
fn taken(r: Result<usize, Failure>) -> Take {
    match r {
        Ok(n) => Take::Got(n),
        Err(Failure::Fault) => Take::Error(libc::EFAULT),
        Err(Failure::Violation) => Take::Empty,
    }
}

/// Takes what is in the ring.
pub(super) fn ring_take(conn: &Conn, rx: &mut Rx, b: Bufs, flags: c_int) -> Result<usize, Failure> {
    let peek = flags & libc::MSG_PEEK != 0;
    let trunc = flags & libc::MSG_TRUNC != 0;
    let ring = rx.ring();
    // SAFETY: the program's buffers, as it gave them.
    let n = unsafe {
        match (trunc, peek, b.iov) {
            (true, true, _) => (ring.waiting() as usize).min(b.len()),
            (true, false, _) => ring.pass(b.len())?,
            (false, true, _) => ring.peek(b.parts())?,
            // `skip` is at most the buffer's length.
            (false, false, [one]) => ring.read(one.iov_base.cast::<u8>().wrapping_add(b.skip), b.len())?,
            (false, false, _) => ring.read_into(b.parts())?,
        }
    };
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

pub(super) fn tcp_take(fd: c_int, conn: &Conn, mut b: Bufs, mut limit: usize, flags: c_int) -> Take {
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
            // What another process's call was told before the kernel knew of it.
            Err(libc::ECONNRESET) if conn.has_ended(END_TOLD) => return Take::End,
            Err(e) => return Take::Error(e),
        }
    }
}

/// Whether nothing comes any more but an error of the kernel's. That is for the next call, whoever makes it, and not for one
/// that has bytes already: the kernel tells it once.
pub(super) fn stands_at_error(fd: c_int, conn: &Conn) -> bool {
    let errs = || conn.lost.load(Relaxed) != 0 || sys::poll_now(fd, 0) & libc::POLLERR != 0;
    conn.lock_rx().path() == RxPath::Tcp && errs() && sys::ioctl_int(fd, libc::FIONREAD) == Ok(0)
}

/// Whether an urgent byte is next. No receive that has bytes already goes over it, wherever those were.
fn stands_at_mark(fd: c_int, conn: &Conn) -> bool {
    const SIOCATMARK: u64 = 0x8905;
    !conn.reads_ring() && sys::ioctl_int(fd, SIOCATMARK) == Ok(1)
}

fn recv_managed(fd: c_int, conn: &'static Conn, b: &mut Bufs, flags: c_int, call: &mut Call) -> Step {
    if conn.rx_lock.held_by_me() {
        // A signal handler inside our own call: it cannot wait for itself.
        return Step::Return(Outcome::Fail(libc::EAGAIN));
    }
    /// How often what has come before an end is looked for on its way from one path to the other.
    const MOST_LOOKS: u32 = 500;
    let may_wait = call.may_wait;
    let least = conn.least(flags, may_wait, b.len() + b.skip);
    // Fewer bytes than `SO_RCVLOWAT` are taken together with what is still missing.
    let together = may_wait && flags & (libc::MSG_PEEK | libc::MSG_WAITALL) == 0 && (2..=b.len()).contains(&least);
    // What the kernel takes before the call is over goes with a thread that is cancelled in it.
    let lose = |b: &Bufs| if least > 1 { b.len() } else { 0 };
    let mut looked = false;
    let mut looks = 0;
    // It has waited for the first byte.
    let mut dry = false;
    let to_see = if may_wait { to_see(flags, b.len(), || conn.lowat()) } else { 0 };
    // What was waited for is most often there, and all that is wanted.
    let quickly = |b: &Bufs| match b {
        Bufs { iov: [one], skip: 0, .. } if conn.is_managed() => {
            let at = table::Place::of(fd)?;
            // SAFETY: the program's buffer, as it gave it.
            let n = unsafe { steady::recv(at, conn, one.iov_base, one.iov_len, flags) }?;
            Some(Step::Return(Outcome::Done(n.get() as isize)))
        }
        _ => None,
    };
    loop {
        // An error with no bytes before it is told even to who asks for none.
        let told = || conn.has_ended(END_RESET) && conn.lock_rx().ring().waiting() == 0 || stands_at_error(fd, conn);
        if b.len() == 0 && conn.phase() == Phase::Managed && conn.takeable(1) && !told() {
            return Step::Return(Outcome::Done(0));
        }
        // In the kernel such a call has taken what has come when a signal ends it.
        let by_and_by = flags & (libc::MSG_PEEK | libc::MSG_WAITALL) == libc::MSG_WAITALL;
        // So it is with what comes by TCP: fewer bytes than that may be all for which the kernel has room.
        let most = if by_and_by || !conn.reads_ring() { 1 } else { conn.rcvlowat.load(Relaxed).max(1) };
        let want = (least.saturating_sub(b.skip) as u32).clamp(1, most);
        if together && b.skip == 0 && conn.is_at(fd) && conn.is_managed() && !conn.takeable(want) {
            let some = conn.takeable(1);
            if some && core::mem::take(&mut dry) {
                call.has_begun();
            }
            match wait(fd, conn, Some(if some { want } else { 1 }), (some, lose(b)), call) {
                Ok(()) => {
                    dry = !some;
                    continue;
                }
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
        if b.skip > 0 && (stands_at_error(fd, conn) || stands_at_mark(fd, conn)) {
            return Step::Return(Outcome::Done(0));
        }
        if flags & libc::MSG_PEEK != 0 && b.len() > 1 && !conn.reads_ring() {
            await_repeated(conn, b.len());
        }
        // A handler that jumps out does so when the peer was told.
        let critical = Critical::new();
        let mut taken = take(fd, conn, *b, flags);
        if let Take::Got(n) = &mut taken {
            conn.in_sight();
            conn.tell_read();
            if flags & libc::MSG_PEEK == 0 {
                *n += rest(fd, conn, b.after(*n), flags);
            }
        }
        drop(critical);
        match taken {
            Take::Got(n) if n < to_see && !shows_all(fd, conn, n) && looks < MOST_LOOKS => {
                looks += is_at_end(fd, conn) as u32;
                pins::hold(fd, conn);
                if pause(call, true, &mut || ()).is_err() {
                    return Step::Return(Outcome::Done(n as isize));
                }
            }
            Take::Got(n) => {
                if n >= b.len() || b.skip + n >= least {
                    return Step::Return(Outcome::Done(n as isize));
                }
                call.goes_on(b, n);
            }
            Take::End => return Step::Return(Outcome::Done(0)),
            Take::Error(e) => return Step::Return(fail_after(conn, b, e)),
            Take::Gone => return Step::Again,
            // Wherever the connection is on its way to: what is not there is not waited for any more.
            Take::Empty if looked && conn.has_ended(END_RDSHUT) && unread(&mut conn.lock_rx()) == 0 => {
                match failed(conn) {
                    Take::Error(e) => return Step::Return(fail_after(conn, b, e)),
                    _ => return Step::Return(Outcome::Done(0)),
                }
            }
            Take::Empty if may_wait && (looked || !conn.has_ended(END_RDSHUT)) => {
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
                await_reset(conn);
            }
            Take::Empty => {
                conn.sent_away();
                return Step::Return(Outcome::Fail(libc::EAGAIN));
            }
        }
    }
}

/// Whether no more bytes can come.
fn is_at_end(fd: c_int, conn: &Conn) -> bool {
    conn.fin_seen() || conn.has_ended(END_EOF | END_RDSHUT) || sys::poll_now(fd, libc::POLLRDHUP) != 0
}

/// Whether a look that has seen `n` bytes will not see more, however long it waits. (What came just before the end it may
/// have missed.)
fn shows_all(fd: c_int, conn: &Conn, n: usize) -> bool {
    let has_more = || {
        let mut rx = conn.lock_rx();
        !matches!(rx.path(), RxPath::Tcp | RxPath::Replay) && unread(&mut rx) > n
    };
    conn.has_ended(END_EOF) || conn.sender_is_stuck() || is_at_end(fd, conn) && !has_more()
}

/// Takes what had arrived, may have been told of, and was not there in the middle of a move: what is repeated comes in
/// pieces. A program that gets less than it asked for knows that there was no more, and waits for the next edge.
fn rest(fd: c_int, conn: &'static Conn, mut b: Bufs, flags: c_int) -> usize {
    let lacks = || {
        let mut rx = conn.lock_rx();
        // On a ring, and on plain TCP, a receive gets all that there is.
        let moves = !matches!(rx.path(), RxPath::Ring | RxPath::RingFinal | RxPath::Tcp);
        moves && conn.is_managed() && unread(&mut rx) > 0
    };
    let mut n = 0;
    while b.len() > 0 && lacks() {
        await_resume(conn);
        if stands_at_mark(fd, conn) {
            break;
        }
        match take(fd, conn, b, flags) {
            Take::Got(got) => {
                conn.tell_read();
                n += got;
                b = b.after(got);
            }
            other => {
                if let Take::Error(e) = other {
                    conn.keep_error(e);
                }
                // It is news when it comes, or to whoever has the connection now.
                conn.kicks.fetch_add(1, SeqCst);
                break;
            }
        }
    }
    n
}

/// How a receive ends that has waited in vain. One of no bytes waits once, as any, and has all that it wants then.
pub(super) fn waited(b: &Bufs, e: Errno) -> Outcome {
    match e {
        libc::EAGAIN if b.len() == 0 => Outcome::Done(0),
        e => Outcome::Fail(e),
    }
}

/// A peer says that it resets just before its kernel does. Who was told so by then is to find it, not that there is nothing.
fn await_reset(conn: &Conn) {
    const MOST_NS: i64 = 100_000_000;
    if conn.is_aborted() && !conn.has_ended(END_EOF) {
        let _ = crate::poll::wait_one(conn.local().fd.load(Relaxed), libc::POLLRDHUP, MOST_NS);
        pump::drive(conn);
    }
}

/// In the middle of a return what was readable has to come by TCP: the peer answers at once, so even a call
/// that may not wait gives it a moment rather than lose sight of what was there.
pub(super) fn await_resume(conn: &Conn) {
    await_repeated(conn, 1);
}

/// The same for a look, which takes nothing and so sees no more than there is at once: `want` bytes, if so many had arrived.
fn await_repeated(conn: &Conn, want: usize) {
    const MOST_NS: i64 = 100_000_000;
    /// Where this process answers itself nobody is stopped: the machine may be slow.
    const OWN_NS: i64 = 1_000_000_000;
    // SAFETY: links are never freed.
    let is_own = unsafe { conn.link.load(Acquire).as_ref() }.is_some_and(|l| l.own);
    let held = || {
        let mut rx = conn.lock_rx();
        let fd = conn.local().fd.load(Relaxed);
        match rx.path() {
            // A look still sees it there.
            RxPath::Returning => want == 1 && rx.ring().waiting() > 0,
            RxPath::Replay if want == 1 => rx.missing_shown() > 0 && sys::poll_now(fd, libc::POLLIN) == 0,
            RxPath::Replay => {
                let there = sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) as usize;
                there < want.min(rx.missing_shown()) && sys::poll_now(fd, libc::POLLRDHUP) == 0
            }
            _ => false,
        }
    };
    let most = if is_own { OWN_NS } else { MOST_NS };
    let until = now_ns() + if conn.late.load(Relaxed) { 0 } else { most };
    while held() && !conn.has_ended(END_EOF) {
        if now_ns() >= until {
            // From now on it is not there, and will be news when it comes.
            conn.late.store(true, SeqCst);
            conn.kicks.fetch_add(1, SeqCst);
            return;
        }
        if want > 1 {
            // Some of it is there already.
            crate::sync::pause(100_000);
        } else {
            let _ = crate::poll::wait_one(conn.local().fd.load(Relaxed), libc::POLLIN, 1_000_000);
        }
        pump::quick(conn);
    }
}
