//! The life of an fd: opened, duplicated, configured, shut down, closed.

use crate::conn::*;
use crate::layout::*;
use crate::ops::Outcome;
use crate::stats::Why;
use crate::switch::{RxPath, TxPath};
use crate::sys::{self, sys, Errno};
use crate::table::{self, Before, Entry};
use crate::{
    arena, bg, chaos, config, desk, early, epoll, fdhigh, foreign, forking, options, pins, process, pump, rendezvous,
    retire, visit,
};
use core::sync::atomic::Ordering::*;
use libc::{c_int, c_uint, linger};

/// `socket(2)` has returned `fd`: remembers it if it is TCP, so that nobody has to ask the kernel later.
pub fn created(fd: c_int, family: c_int, kind: c_int, protocol: c_int) {
    let stream = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == libc::SOCK_STREAM;
    let tcp = stream && matches!(family, libc::AF_INET | libc::AF_INET6) && matches!(protocol, 0 | libc::IPPROTO_TCP);
    if tcp && process::is_active() {
        table::put_tcp(fd);
    }
}

/// A connection has come into being on `fd`, accepted from `listener` if that is given. `flags`: its file
/// status flags, where the caller knows them.
pub fn opened(fd: c_int, listener: Option<c_int>, flags: Option<c_int>) {
    if !process::is_active() {
        return;
    }
    let connector = listener.is_none();
    if connector && table::fresh(fd).is_some() {
        // As below.
        return;
    }
    match table::get(fd) {
        // What another process in this one's memory notes of its own number is void with the next use of ours.
        Entry::None if connector => {}
        Entry::None => early::forget(fd),
        // A second connect() on the same socket: the outcome of the first.
        _ if connector || process::is_guest() => return,
        _ => stale(fd),
    }
    let is_tcp = table::is_tcp(listener.unwrap_or(fd))
        || sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP);
    if !is_tcp {
        return;
    }
    let Some(c) = arena::alloc() else { return };
    c.local().fd.store(fd, Relaxed);
    c.connector.store(connector, Relaxed);
    c.local().fds.store(1, Relaxed);
    // SAFETY: a query.
    let asked = || unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFL) }.unwrap_or(0) as c_int;
    c.nonblock.store(flags.unwrap_or_else(asked) & libc::O_NONBLOCK != 0, Relaxed);
    let cfg = config::get();
    c.next_try.store(chaos::calls(cfg.upgrade_after), Relaxed);
    let (why, phase) = if !cfg.links.shm && !cfg.links.verbs {
        (Why::LinksOff, Phase::Plain)
    } else if let Some(why) = options::begins_with(fd) {
        (why, Phase::Plain)
    } else {
        (Why::New, Phase::Raw)
    };
    c.why(why);
    options::begin_with_limits(c, fd);
    // (What may wait has no quick calls where there are threads; but many make a socket nonblocking next.)
    let quick = phase == Phase::Raw && !chaos::is_on();
    if quick {
        // Before anybody meets the record.
        c.begin_fresh();
    }
    c.set_phase(phase);
    if quick && table::put_fresh(fd, c, if connector { Before::Tcp } else { Before::Nothing }) {
        // Either this sees the fork, or that sees the connection.
        if forking::is_under_way() {
            c.settle();
        }
        return;
    }
    c.settle();
    if !(if connector { early::dialled(fd, c) } else { table::put_conn(fd, c) }) {
        c.set_phase(Phase::Closed);
        arena::free(c);
    }
}

/// `new` is another number of `old`.
pub fn duplicated(old: c_int, new: c_int) {
    if process::is_guest() {
        return foreign::renumbered(new);
    }
    loop {
        match table::get(old) {
            Entry::Conn(c) => {
                chaos::stumble();
                let _b = c.lock_both();
                if !table::is(old, c) {
                    // It goes on as another record.
                    continue;
                }
                c.local().fds.fetch_add(1, SeqCst);
                table::put_conn(new, c);
                epoll::number_back(c, new);
            }
            Entry::Set(s) => epoll::duplicated(s, new),
            // It has become a connection meanwhile.
            Entry::None if !early::duplicated(old, new) => continue,
            Entry::None => {}
        }
        return;
    }
}

/// `dup2(2)`, `dup3(2)`: closes `new` first, as a close by the program would.
pub fn dup2(old: c_int, new: c_int, flags: Option<c_int>) -> Outcome {
    if old == new {
        return Outcome::Bypass;
    }
    if process::is_guest() {
        foreign::renumbered(old);
        if !desk::is_here() {
            // By that number its calls are for the kernel. (It may be another file's here already, and so may another number of
            // it, by which nothing is to be sent then.)
            let is = |c: &Conn, n| rendezvous::ends(n).is_some_and(|e| c.stats().ends() == Some(e));
            let there = |c: &&Conn| c.phase() != Phase::Managed || is(c, new) && is(c, c.local().fd.load(Relaxed));
            table::conn(new).filter(|c| there(&&**c)).into_iter().for_each(|c| process::give_up(c, Why::Forked));
        }
        return Outcome::Bypass;
    }
    if process::is_own_fd(new) {
        // The program's number, as far as it can know: ours moves out of the way.
        return Outcome::Fail(libc::EBUSY);
    }
    // SAFETY: a query.
    if unsafe { sys!(libc::SYS_fcntl, old, libc::F_GETFD) }.is_err() {
        return Outcome::Bypass;
    }
    // SAFETY: a query.
    let shared = process::has_threads() && unsafe { sys!(libc::SYS_fcntl, new, libc::F_GETFD) }.is_ok();
    if shared {
        // Another thread may be on its way into the kernel by that number, and read there what is no program's.
        table::each_record(old, |c| process::try_give_up(c, Why::Replaced));
    }
    // SAFETY: plain numbers.
    let kernel = || unsafe { sys!(libc::SYS_dup3, old, new, flags.unwrap_or(0)) };
    let r = match shared.then(|| replace(new, kernel)).flatten() {
        Some(r) => r,
        None => {
            // What `new` was is let go before the kernel does so; its number is replaced at once, not closed.
            forget(new, How::Replace);
            kernel()
        }
    };
    if r.is_ok() {
        duplicated(old, new);
    }
    Outcome::from(r)
}

/// Has the kernel put another file in a connection's place, for whose locks calls by that number wait meanwhile: none is to
/// find that nothing is known of it, and read in the kernel what is no program's. `None`: it is no connection's number.
fn replace(fd: c_int, kernel: impl Fn() -> Result<usize, Errno>) -> Option<Result<usize, Errno>> {
    loop {
        let Entry::Conn(c) = table::get(fd) else { return None };
        chaos::stumble();
        let mut b = c.lock_both();
        if !table::is(fd, c) {
            continue;
        }
        let last = c.local().fds.load(SeqCst) == 1;
        if last && !pins::set_aside(&mut b, fd) {
            return None;
        }
        let r = kernel();
        number_gone(c, fd);
        drop(b);
        if last {
            pins::close_unheld(c);
        }
        // A call by that number is to look again.
        c.notify();
        return Some(r);
    }
}

/// `fd` is the connection's no more. How many numbers it has left. Under its locks.
fn number_gone(c: &Conn, fd: c_int) -> u32 {
    table::take(fd);
    let left = c.local().fds.fetch_sub(1, SeqCst) - 1;
    if left > 0 && c.local().fd.load(Relaxed) == fd {
        if let Some(other) = table::other_fd_of(c) {
            c.local().fd.store(other, Relaxed);
        }
    }
    left
}

/// The number was closed behind our back and is something else now.
pub fn stale(fd: c_int) {
    if !process::is_guest() {
        forget(fd, How::Stale);
    }
}

/// The number is about to be closed by somebody else, or replaced.
pub fn replaced(fd: c_int) {
    if !process::is_guest() {
        forget(fd, How::Replace);
    }
}

/// `close(2)`.
pub fn close(fd: c_int) -> Outcome {
    if process::is_guest() {
        return Outcome::Bypass;
    }
    if process::is_own_fd(fd) {
        return Outcome::Fail(libc::EBADF);
    }
    close_fresh(fd).unwrap_or_else(|| forget(fd, How::Close))
}

/// Closes a connection that nobody has had but its first, quick calls.
fn close_fresh(fd: c_int) -> Option<Outcome> {
    let c = table::take_fresh(fd)?;
    c.local().fds.store(0, Relaxed);
    c.local().fd.store(-1, Relaxed);
    let r = close_number(fd, How::Close);
    arena::free(c);
    Some(r)
}

/// `close_range(2)`: spares the library's own fds.
pub fn close_range(first: c_uint, last: c_uint, flags: c_int) -> Outcome {
    const UNSHARE: c_int = 2;
    const CLOEXEC: c_int = 4;
    let mut flags = flags;
    if flags & !(UNSHARE | CLOEXEC) == 0 && flags & UNSHARE != 0 && first <= last && !retire::gives_own_table() {
        flags &= !UNSHARE;
        if flags & CLOEXEC != 0 {
            // SAFETY: plain numbers.
            return Outcome::from(unsafe { sys!(libc::SYS_close_range, first, last, flags) });
        }
    }
    if !process::is_active() || process::is_guest() || flags & CLOEXEC != 0 || first > last {
        return Outcome::Bypass;
    }
    for fd in first..=last.min(table::highest().max(0) as c_uint) {
        if !table::is_foreign(fd as c_int) {
            forget(fd as c_int, How::Close);
        }
    }
    let mut from = first;
    loop {
        let ours = fdhigh::next_from(from).filter(|o| *o <= last);
        let to = ours.map_or(last, |o| o.wrapping_sub(1));
        if ours != Some(from) && from <= to {
            // SAFETY: plain numbers.
            match unsafe { sys!(libc::SYS_close_range, from, to, flags) } {
                Err(libc::ENOSYS) => return Outcome::Bypass,
                Err(e) => return Outcome::Fail(e),
                Ok(_) => {}
            }
        }
        match ours {
            Some(o) if o < last => from = o + 1,
            _ => return Outcome::Done(0),
        }
    }
}

/// How a number comes to an end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// It is to be closed.
    Close,
    /// The caller puts another file in its place, which closes this one.
    Replace,
    /// It has been closed behind our back, and is something else now.
    Stale,
    /// It is the library's own: the program's was closed before.
    Own,
}

/// Lets go of a number.
fn forget(fd: c_int, how: How) -> Outcome {
    let and_close = how == How::Close;
    let kernel = || close_number(fd, how);
    let c = match table::get(fd) {
        Entry::Conn(c) => c,
        Entry::Set(s) => {
            if how != How::Stale {
                epoll::about_to_close(s);
            }
            table::take(fd);
            epoll::number_closed(s, fd, how != How::Stale);
            return kernel();
        }
        Entry::None => {
            early::forget(fd);
            table::take(fd);
            return if and_close { Outcome::Bypass } else { Outcome::Done(0) };
        }
    };
    chaos::stumble();
    let mut b = c.lock_both();
    if !table::is(fd, c) {
        // It goes on as another record, or another thread was quicker.
        drop(b);
        return forget(fd, how);
    }
    if number_gone(c, fd) > 0 {
        let r = kernel();
        drop(b);
        // This may be a handler that has interrupted a call by that number, which is to look again.
        c.notify();
        return r;
    }
    if how != How::Stale && pins::keep_open(&mut b, fd) {
        let r = kernel();
        drop(b);
        // They may have let go of it meanwhile, or this may be a handler that has interrupted the call.
        pins::close_unheld(c);
        c.notify();
        return r;
    }
    end(c, b, fd, how)
}

/// Closes a number, if that is ours to do.
fn close_number(fd: c_int, how: How) -> Outcome {
    match how {
        // SAFETY: closing a number that the program closes.
        How::Close => Outcome::from(unsafe { sys!(libc::SYS_close, fd) }),
        How::Own => {
            sys::close(fd);
            Outcome::Done(0)
        }
        How::Replace | How::Stale => Outcome::Done(0),
    }
}

/// No call holds a connection open any more whose last number is closed.
pub fn close_unnamed(c: &'static Conn) {
    let b = c.lock_both();
    // Another thread may have closed it long ago, and the record be in use again, and held.
    if c.local().pins.load(SeqCst) == 0 && c.local().unnamed.swap(false, SeqCst) {
        end(c, b, c.local().fd.load(Relaxed), How::Own);
    }
}

/// Lets go of a connection with its last number, `fd`.
fn end(c: &'static Conn, mut b: Both, fd: c_int, how: How) -> Outcome {
    let kernel = || close_number(fd, how);
    if how != How::Stale {
        process::read_kernel_counts(c, fd);
    }
    if c.came_by_exec() {
        foreign::take_down_sign(c);
    }
    let me = process::holder_id();
    if !c.holders.is_only(me) {
        // Other processes hold it, so nothing ends here; but the number is not ours to use any more.
        let mut keep = -1;
        if c.is_ours() && how != How::Stale {
            // Only we can bring it home for them: the background thread does, with an fd of its own. Sets that have it keep it
            // as long as anybody has it open: they give it to the kernel's then.
            pump::hurry(&mut b, Why::Shared);
            if let Ok(d) = fdhigh::not_for_children(|| fdhigh::dup_high(fd)) {
                keep = d;
                bg::watch_instead(fd, keep, c);
                c.outlived.store(true, Relaxed);
                c.begin_to_linger();
            }
        }
        if keep < 0 {
            epoll::fd_closed(c);
            c.holders.remove(me);
        }
        c.local().fd.store(keep, SeqCst);
        let r = kernel();
        drop(b);
        c.notify();
        if keep >= 0 {
            c.ask(ask::PUMP);
            process::await_let_go(c);
        } else if c.local().submitted.load(SeqCst) {
            c.ask(ask::LET_GO);
        }
        return r;
    }
    epoll::fd_closed(c);
    let mut abort = false;
    if c.phase() == Phase::Managed {
        if let Some(own) = c.own() {
            abort = unread(&mut b) || c.linger0.load(Relaxed);
            if !abort {
                // By a reset it is lost.
                b.tx.ring().show();
            }
            own.flags.fetch_or(CLOSED | if abort { ABORT } else { 0 }, SeqCst);
        }
        if how == How::Stale {
            c.local().fd.store(-1, Relaxed);
        }
        c.flush();
        pump::run(&mut b);
        let owed = b.is_owed() && !abort;
        if owed && how != How::Stale && !c.has_ended(END_TXDEAD) {
            // The background thread finishes what is under way with an fd of its own.
            if let Ok(d) = fdhigh::not_for_children(|| fdhigh::dup_high(fd)) {
                // The kernel's end comes only then; that of the ring needs not wait for it. (A return that waits for no
                // program is over at once, and the end of both is the same.)
                let flags = c.peer().map_or(0, |p| p.flags.load(SeqCst));
                let quick = flags & (LEAVING | MARK_TAKEN) == LEAVING | MARK_TAKEN;
                if let Some(own) = c.own().filter(|_| b.tx.path() == TxPath::Ring && !quick) {
                    own.flags.fetch_or(FIN, SeqCst);
                    c.flush();
                }
                c.local().fd.store(d, Relaxed);
                c.outlived.store(false, Relaxed);
                c.begin_to_linger();
                let r = kernel();
                drop(b);
                c.tell_peer(WANT_RX | WANT_TX, FUTEX_RX | FUTEX_TX);
                c.ask(ask::PUMP);
                return r;
            }
        }
    }
    c.holders.remove(me);
    c.set_phase(Phase::Closed);
    c.local().fd.store(-1, Relaxed);
    if abort && how != How::Stale {
        if c.has_ended(END_WRSHUT) && b.tx.path() == TxPath::Tcp && !b.tx.pending() {
            // The program's own end has come before the reset, which is another error then. (On the ring the flags say so.)
            // SAFETY: an fd of the connection, which is closed below.
            let _ = unsafe { sys!(libc::SYS_shutdown, fd, libc::SHUT_WR) };
        }
        reset_at_close(fd);
    }
    let r = kernel();
    drop(b);
    c.tell_peer(WANT_RX | WANT_TX, FUTEX_RX | FUTEX_TX);
    if c.local().submitted.load(SeqCst) {
        c.notify();
        c.ask(ask::CLOSED);
    } else {
        arena::free(c);
    }
    r
}

/// Makes the last close of the socket a reset.
pub fn reset_at_close(fd: c_int) {
    let l = linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: `l` is readable for its size.
    let _ = unsafe { sys!(libc::SYS_setsockopt, fd, libc::SOL_SOCKET, libc::SO_LINGER, &l, size_of::<linger>()) };
}

/// Bytes have come for a program that closed before them: makes the last close of `fd` the reset that answers them. The
/// flags that tell the peer so. If the program's own end is out already, and the peer's kernel has all before it, the
/// reset comes behind that end; what is still to be sent a reset discards, which must not look like a proper end.
pub fn refuse_late(b: &mut Both, fd: c_int) -> u32 {
    let ended = b.tx.path() == TxPath::Ring && !b.tx.pending();
    let arrived = ended && sys::ioctl_int(fd, libc::TIOCOUTQ) == Ok(0);
    if ended {
        // SAFETY: no memory is passed.
        let _ = unsafe { sys!(libc::SYS_shutdown, fd, libc::SHUT_WR) };
    }
    reset_at_close(fd);
    ABORT | if arrived { FIN } else { 0 }
}

/// Whether the program leaves bytes unread, which TCP answers with a reset.
pub fn unread(b: &mut Both) -> bool {
    use crate::switch::RxPath::*;
    match b.rx.path() {
        Ring | RingFinal | Returning => b.rx.ring().waiting() > 0,
        Armed | Draining => {
            let ring = b.rx.ring();
            let begun = ring.is_attached() && ring.behind() > 0 || !ring.kept.is_empty();
            begun || matches!(crate::io::front(&mut b.rx), crate::io::Front::App(_))
        }
        // The kernel does so itself; but the peer must be able to tell that from a reset for frames alone.
        Tcp | Replay => crate::io::unread(&mut b.rx) > 0,
    }
}

/// `getpeername(2)`: the kernel's socket has a peer for as long as it is open.
pub fn getpeername(fd: c_int) -> Outcome {
    match table::peek(fd) {
        Some(c) if c.phase() == Phase::Managed && c.is_over() => Outcome::Fail(libc::ENOTCONN),
        _ => Outcome::Bypass,
    }
}

/// A connection that is the kernel's is half closed: it is not worth a ring any more.
fn half_close(c: &Conn, rd: bool, wr: bool) {
    c.end.fetch_or(if wr { END_WRSHUT } else { 0 } | if rd { END_RDSHUT } else { 0 }, SeqCst);
    c.next_try.store(u32::MAX, Relaxed);
    // (What has kept it until then says more.)
    if matches!(Why::from_u8(c.stats().why.load(Relaxed)), Why::None | Why::New | Why::Looking) {
        c.why(Why::HalfClosed);
    }
}

/// `shutdown(2)`.
pub fn shutdown(fd: c_int, how: c_int) -> Outcome {
    if !(0..=2).contains(&how) {
        return Outcome::Bypass;
    }
    let (rd, wr) = (how != libc::SHUT_WR, how != libc::SHUT_RD);
    // Nobody waits for one that is fresh, and no lock is another's.
    if table::quickly(fd, |c| half_close(c, rd, wr)).is_some() {
        return Outcome::Bypass;
    }
    let Some(c) = table::conn(fd) else { return Outcome::Bypass };
    if c.is_inherited() {
        visit::settle(c);
    }
    c.hear();
    let mut b = c.lock_both();
    if c.phase() == Phase::Closed && !table::is(fd, c) {
        // It goes on as another record.
        drop(b);
        return shutdown(fd, how);
    }
    if c.phase() != Phase::Managed {
        // The kernel wakes all who wait for the socket, also where there is nothing to shut.
        c.kicks.fetch_add(1, SeqCst);
    }
    match c.phase() {
        Phase::Raw => {
            half_close(c, rd, wr);
            drop(b);
            return Outcome::Bypass;
        }
        // To whoever holds it, though the kernel's socket may live on.
        Phase::Away if c.has_ended(END_FAILED) => return Outcome::Fail(libc::ENOTCONN),
        Phase::Away if visit::is_home(&mut b) => {
            c.end.fetch_or(if wr { END_WRSHUT } else { 0 } | if rd { END_RDSHUT } else { 0 }, SeqCst);
            return Outcome::Bypass;
        }
        Phase::Managed => {}
        _ => return Outcome::Bypass,
    }
    if c.is_over()
        || c.peer_closed() && c.kernel_hangup() & libc::EPOLLHUP as u32 != 0
        // (What the peer says of its end may come later than its kernel's word.)
        || c.has_ended(END_WRSHUT) && sys::is_tcp_closed(fd)
        || (visit::is_home(&mut b) || c.peer().is_none()) && sys::is_tcp_closed(fd)
    {
        // The kernel wakes all who wait for the socket all the same.
        c.kicks.fetch_add(1, SeqCst);
        drop(b);
        c.notify();
        return Outcome::Fail(libc::ENOTCONN);
    }
    // The kernel wakes those who wait there, and they may be of other processes.
    let by_kernel = visit::is_polled_by_kernel(&b);
    if rd {
        c.end.fetch_or(END_RDSHUT, SeqCst);
        if let Some(own) = c.own() {
            own.flags.fetch_or(RDSHUT, SeqCst);
        }
    }
    if wr && !c.has_ended(END_WRSHUT) {
        c.end.fetch_or(END_WRSHUT, SeqCst);
        match b.tx.path() {
            TxPath::Ring => {
                b.tx.ring().show();
                if let Some(own) = c.own() {
                    own.flags.fetch_or(FIN, SeqCst);
                }
            }
            // Nobody can have our nonce without having shown us theirs: no mark will ever be written.
            TxPath::Tcp if c.peer().is_none() => {
                c.unconfirmable.store(true, SeqCst);
                // SAFETY: an fd of the connection, which cannot be closed while we hold the locks.
                let _ = unsafe { sys!(libc::SYS_shutdown, fd, libc::SHUT_WR) };
            }
            // This direction has come back already, though the other may not have. (With both shut `pump` does it.)
            TxPath::Tcp
                if !by_kernel
                    && !b.tx.pending()
                    && !c.has_ended(END_RDSHUT)
                    && matches!(b.rx.path(), RxPath::Tcp | RxPath::Replay | RxPath::Returning) =>
            {
                // SAFETY: as above.
                let _ = unsafe { sys!(libc::SYS_shutdown, fd, libc::SHUT_WR) };
            }
            // In the middle of the change: the end follows the mark, or the replay.
            _ => {}
        }
    }
    let both = c.has_ended(END_RDSHUT) && c.has_ended(END_WRSHUT);
    if both && matches!(b.rx.path(), RxPath::Armed | RxPath::Draining) && c.shut_at.load(Relaxed) == 0 {
        let there = crate::io::before_mark(c, &b.rx).0 as u64;
        c.shut_at.store(c.rx_tcp() + there + 1, Relaxed);
    }
    if both && c.unconfirmable.load(SeqCst) {
        // The stream is the kernel's, which is to refuse what comes.
        // SAFETY: as above.
        let _ = unsafe { sys!(libc::SYS_shutdown, fd, libc::SHUT_RDWR) };
    }
    // The kernel wakes all who wait for the socket, with whatever it has.
    let kick = || c.kicks.fetch_add(1, SeqCst);
    if by_kernel {
        kick();
        // SAFETY: as above.
        let _ = unsafe { sys!(libc::SYS_shutdown, fd, how) };
    }
    // With the locks: the peer's slot may be another connection's when this one has left it.
    c.refuse();
    drop(b);
    chaos::stumble();
    // With both shut a sender that waits for room waits in vain.
    let (also, also_futex) = if both { (WANT_TX, FUTEX_TX) } else { (0, 0) };
    c.tell_peer(WANT_RX | also, FUTEX_RX | also_futex);
    if !by_kernel {
        kick();
    }
    pump::drive(c);
    c.notify();
    Outcome::Done(0)
}

/// The socket has been disconnected (`connect` to `AF_UNSPEC`) after its connection came back to TCP: all its
/// numbers are those of a socket without one.
pub fn disconnected(fd: c_int) {
    let Some(c) = table::conn(fd) else { return };
    let b = c.lock_both();
    if process::is_guest() || c.phase() != Phase::Plain {
        return;
    }
    while let Some(n) = table::other_fd_of(c) {
        table::take(n);
    }
    epoll::fd_closed(c);
    c.local().fds.store(0, SeqCst);
    c.local().fd.store(-1, SeqCst);
    let me = process::holder_id();
    let last = c.holders.is_only(me);
    c.holders.remove(me);
    if !last {
        return;
    }
    c.set_phase(Phase::Closed);
    drop(b);
    if c.local().submitted.load(SeqCst) {
        c.ask(ask::CLOSED);
    } else {
        arena::free(c);
    }
}
