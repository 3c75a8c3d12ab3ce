//! Socket options, `fcntl` and `ioctl`: what a program sets holds on a ring as well, or brings the connection back to TCP.

use crate::config::RING_LARGEST;
use crate::conn::*;
use crate::copy::{self, is_nowhere};
use crate::ops::Outcome;
use crate::stats::Why;
use crate::switch::{RxPath, TxPath};
use crate::sys::{self, sys};
use crate::{config, epoll, io, process, table, visit};
use core::sync::atomic::{AtomicBool, Ordering::*};
use libc::{c_int, c_void, linger, socklen_t, timeval};

/// Which buffer sizes were set by the program (Linux 5.14).
const SO_BUF_LOCK: c_int = 72;

/// Options that were set before we knew the connection; an accepted one inherits its listener's.
pub fn read_options(c: &Conn, fd: c_int) {
    // A program that has bounded what may be under way counts on a sender that has to wait. The kernel would
    // hold as much, or twice that; what it had grown to by itself is no bound.
    const SNDBUF_LOCKED: c_int = 1;
    let max = config::get().ring_max;
    let cap = match sys::sockopt_int(fd, libc::SOL_SOCKET, SO_BUF_LOCK) {
        Ok(locks) if locks & SNDBUF_LOCKED != 0 => {
            let n = sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(c_int::MAX);
            (n.max(4096) as usize).checked_next_power_of_two().unwrap_or(max).min(max)
        }
        _ => UNBOUND,
    };
    c.ring_cap.store(cap, Relaxed);
    read_timeouts(c, fd);
}

/// Notes what decides how calls behave on a ring. It may have been set before the library knew the connection, or by another
/// process. Under both locks.
pub fn take(c: &Conn, fd: c_int) {
    take_lowat(c, fd);
    let option = |name: c_int| sys::sockopt_int(fd, libc::IPPROTO_TCP, name).unwrap_or(0);
    c.corked.store(option(libc::TCP_CORK) != 0, SeqCst);
    c.inq.store(option(libc::TCP_INQ) != 0, Relaxed);
    c.segment.store(option(libc::TCP_MAXSEG) as u32, Relaxed);
    if let Some(l) = get_linger(fd).filter(|_| c.linger.load(Relaxed) == 0) {
        c.linger0.store(is_to_reset(l), Relaxed);
    }
}

fn get_linger(fd: c_int) -> Option<linger> {
    let (mut l, mut len) = (linger { l_onoff: 0, l_linger: 0 }, size_of::<linger>() as socklen_t);
    // SAFETY: both are writable.
    let r = unsafe { sys!(libc::SYS_getsockopt, fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut l, &mut len) };
    r.is_ok().then_some(l)
}

/// Whether a close resets.
fn is_to_reset(l: linger) -> bool {
    l.l_onoff != 0 && l.l_linger == 0
}

/// A program that says nothing of what it does may have the connection, too, which is on TCP then: what it may have set is asked of
/// the kernel.
pub fn reread(c: &Conn) {
    if c.phase() != Phase::Raw || !c.visited.load(Relaxed) && c.holders.at_most() <= 1 {
        return;
    }
    read_usual(c, c.local().fd.load(Relaxed));
}

/// Notes what decides how calls behave on a connection that is on TCP, as the kernel has it.
pub fn read_usual(c: &Conn, fd: c_int) {
    read_timeouts(c, fd);
    note_lowat(c, fd);
    // SAFETY: a query.
    if let Ok(flags) = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFL) } {
        c.nonblock.store(flags as c_int & libc::O_NONBLOCK != 0, Relaxed);
    }
}

fn read_timeouts(c: &Conn, fd: c_int) {
    for (name, to) in [(libc::SO_RCVTIMEO, &c.rcvtimeo), (libc::SO_SNDTIMEO, &c.sndtimeo)] {
        match read_timeout(fd, name) {
            // The kernel does not tell one from the other.
            0 if to.load(Relaxed) == AT_ONCE => {}
            t => to.store(t, Relaxed),
        }
    }
}

/// A time limit of less than nothing, which the kernel takes for one that is always over. Not 0, which is none.
const AT_ONCE: i64 = 1;

/// A time limit in nanoseconds, as the kernel has understood it.
fn read_timeout(fd: c_int, name: c_int) -> i64 {
    let mut t = timeval { tv_sec: 0, tv_usec: 0 };
    let mut len = size_of::<timeval>() as socklen_t;
    // SAFETY: `t` and `len` are writable.
    let _ = unsafe { sys!(libc::SYS_getsockopt, fd, libc::SOL_SOCKET, name, &mut t, &mut len) };
    t.tv_sec * 1_000_000_000 + t.tv_usec * 1000
}

/// Notes the socket's `SO_RCVLOWAT`, by which calls go that do not wait in the kernel.
fn note_lowat(c: &Conn, fd: c_int) {
    if let Ok(n) = sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
        c.rcvlowat.store(n.max(1) as u32, Relaxed);
    }
}

/// Notes the socket's `SO_RCVLOWAT`, and takes it from the kernel. While the connection is managed the kernel's is 1, because marks and frames are
/// shorter than what a program may wait for, and whoever sleeps there must be woken by them.
fn take_lowat(c: &Conn, fd: c_int) {
    note_lowat(c, fd);
    set_lowat(c, fd, 1);
}

/// Gives `SO_RCVLOWAT` back to the kernel. Under both locks.
pub fn give_lowat(c: &Conn, fd: c_int) {
    set_lowat(c, fd, c.rcvlowat.load(Relaxed));
}

fn set_lowat(c: &Conn, fd: c_int, n: u32) {
    // (To set it once more would be an edge.)
    let is_so = || sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT) == Ok(n as c_int);
    if c.rcvlowat.load(Relaxed) > 1 && !is_so() {
        // SAFETY: `n` is readable for its size.
        let _ = unsafe { sys!(libc::SYS_setsockopt, fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &n, 4) };
    }
}

/// `TCP_FASTOPEN_CONNECT` has been in use.
static CONNECTS_LATE: AtomicBool = AtomicBool::new(false);

/// Whether a `connect` in this process may have done nothing yet when it succeeds.
pub fn connects_late() -> bool {
    CONNECTS_LATE.load(Relaxed)
}

/// A feature that rings lack has been in use on a TCP socket before it was a connection.
static BEGINS_WITH_FEATURE: AtomicBool = AtomicBool::new(false);

/// A time limit of calls was set for such a socket.
static BEGINS_WITH_LIMITS: AtomicBool = AtomicBool::new(false);

fn is_time_limit(name: c_int) -> bool {
    matches!(name, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | SO_RCVTIMEO_NEW | SO_SNDTIMEO_NEW)
}

/// The time limits of a new connection.
pub fn begin_with_limits(c: &Conn, fd: c_int) {
    if BEGINS_WITH_LIMITS.load(Relaxed) {
        read_timeouts(c, fd);
    }
}

/// Such a feature that a new connection has by its listener, or since before it was dialled. What the kernel then has for
/// the program beside its bytes (completions, which look like errors) is nothing that our ways of waiting expect.
pub fn begins_with(fd: c_int) -> Option<Why> {
    BEGINS_WITH_FEATURE.load(Relaxed).then(|| feature_of(fd)).flatten()
}

/// `O_NONBLOCK` is set or cleared. A program that will not wait in its calls any more has to wait in another
/// way, and what was seen before tells nothing of it.
fn blocking(c: &Conn, yes: bool) {
    let was = !c.nonblock.swap(!yes, Relaxed);
    if was && !yes && c.local().watchers.load(SeqCst) == 0 && !epoll::has_young(c) {
        match c.phase() {
            Phase::Managed => c.sent_away(),
            _ => c.evidence.store(false, Relaxed),
        }
    }
}

/// `fcntl(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn fcntl(fd: c_int, cmd: c_int, arg: usize) -> Outcome {
    if cmd != libc::F_SETFL {
        return Outcome::Bypass;
    }
    let set = |c: &Conn| {
        // SAFETY: as for the call.
        let r = unsafe { sys!(libc::SYS_fcntl, fd, cmd, arg) };
        if r.is_ok() {
            blocking(c, arg as c_int & libc::O_NONBLOCK == 0);
        }
        r
    };
    let is_async = arg as c_int & libc::O_ASYNC != 0;
    if let Some(r) = (!is_async).then(|| table::quickly(fd, set)).flatten() {
        return Outcome::from(r);
    }
    if is_async {
        // SIGIO comes from the kernel's socket only. What the return itself moves there is none, if the peer reads.
        table::each_record(fd, |c| process::try_give_up(c, Why::Signals));
    }
    let done = table::each_record(fd, |c| {
        visit::arrive_by_exec(c);
        Outcome::from(set(c))
    });
    done.unwrap_or(Outcome::Bypass)
}

/// `ioctl(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn ioctl(fd: c_int, req: u64, arg: usize) -> Outcome {
    let set = |c: &Conn| {
        // SAFETY: as for the call.
        let r = unsafe { sys!(libc::SYS_ioctl, fd, req, arg) };
        if r.is_ok() {
            // SAFETY: the kernel has just read it.
            blocking(c, unsafe { *(arg as *const c_int) } == 0);
        }
        r
    };
    let sets = req == libc::FIONBIO;
    if let Some(r) = sets.then(|| table::quickly(fd, set)).flatten() {
        return Outcome::from(r);
    }
    if sets {
        let done = table::each_record(fd, |c| {
            visit::arrive_by_exec(c);
            Outcome::from(set(c))
        });
        return done.unwrap_or(Outcome::Bypass);
    }
    let Some(c) = table::conn(fd) else { return Outcome::Bypass };
    if req == libc::FIOASYNC {
        // SAFETY: there may be nothing.
        if unsafe { copy::read(arg as *const c_int) }.is_ok_and(|on| on != 0) {
            table::each_record(fd, |c| process::try_give_up(c, Why::Signals));
        }
        return Outcome::Bypass;
    }
    if c.is_inherited() {
        visit::settle(c);
    }
    if c.phase() != Phase::Managed || is_nowhere(arg) {
        return Outcome::Bypass;
    }
    let value = if req == libc::FIONREAD {
        let mut b = c.lock_both();
        if b.rx.path() == RxPath::Tcp {
            return Outcome::Bypass;
        }
        crate::io::unread(&mut b.rx) as c_int
    } else if req == libc::TIOCOUTQ {
        match c.unacknowledged() {
            Some(n) => n as c_int,
            None => return Outcome::Bypass,
        }
    } else {
        return Outcome::Bypass;
    };
    if req == libc::FIONREAD && value > 0 {
        epoll::seen(c);
    }
    answered(copy::write(arg as *mut c_int, value))
}

const TCP_ZEROCOPY_RECEIVE: c_int = 35;
const SO_TIMESTAMP_NEW: c_int = 63;
const SO_TIMESTAMPING_NEW: c_int = 65;
const SO_RCVTIMEO_NEW: c_int = 66;
const SO_SNDTIMEO_NEW: c_int = 67;

/// What is in use on the socket, since before we knew it or by its listener, that rings lack.
pub fn feature_of(fd: c_int) -> Option<Why> {
    const STAMPS: [c_int; 3] = [libc::SO_TIMESTAMP, libc::SO_TIMESTAMPNS, libc::SO_TIMESTAMPING];
    let mut name = [0u8; 16];
    let mut len = name.len() as socklen_t;
    // SAFETY: queries that write to our own memory.
    let (flags, ulp) = unsafe {
        (
            sys!(libc::SYS_fcntl, fd, libc::F_GETFL).unwrap_or(0),
            sys!(libc::SYS_getsockopt, fd, libc::IPPROTO_TCP, libc::TCP_ULP, name.as_mut_ptr(), &mut len),
        )
    };
    let option = |name: c_int| sys::sockopt_int(fd, libc::SOL_SOCKET, name);
    if flags & libc::O_ASYNC as usize != 0 {
        Some(Why::Signals)
    } else if option(libc::SO_PEEK_OFF).is_ok_and(|v| v >= 0) {
        Some(Why::PeekOff)
    } else if ulp.is_ok() && len > 0 {
        Some(Why::Ulp)
    } else {
        STAMPS.iter().any(|name| option(*name).is_ok_and(|v| v != 0)).then_some(Why::Stamps)
    }
}

/// What rings lack and setting this option asks for.
fn asked_feature(level: c_int, name: c_int) -> Option<Why> {
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_TIMESTAMP | libc::SO_TIMESTAMPNS | libc::SO_TIMESTAMPING) => Some(Why::Stamps),
        (libc::SOL_SOCKET, SO_TIMESTAMP_NEW..=SO_TIMESTAMPING_NEW) => Some(Why::Stamps),
        (libc::SOL_SOCKET, libc::SO_PEEK_OFF) => Some(Why::PeekOff),
        (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER | libc::SO_ATTACH_BPF) => Some(Why::Filter),
        (libc::IPPROTO_TCP, libc::TCP_ULP) => Some(Why::Ulp),
        (libc::IPPROTO_TCP, libc::TCP_REPAIR) => Some(Why::Repair),
        _ => None,
    }
}

/// Whether a send with `MSG_ZEROCOPY` is one. The option alone is nothing to stay on TCP for: programs set it where there might
/// be such sends (QEMU, gRPC).
pub fn is_zero_copy(fd: c_int) -> bool {
    sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY).is_ok_and(|on| on != 0)
}

/// In [`Conn::linger`]: there is something.
const KNOWN: u64 = 1 << 63;

fn set_linger(fd: c_int, l: linger) {
    // SAFETY: `l` is readable for its size.
    let _ = unsafe { sys!(libc::SYS_setsockopt, fd, libc::SOL_SOCKET, libc::SO_LINGER, &l, size_of::<linger>()) };
}

fn pack(l: linger) -> u64 {
    KNOWN | u64::from(l.l_onoff != 0) << 32 | u64::from(l.l_linger as u32)
}

fn unpack(v: u64) -> linger {
    linger { l_onoff: (v >> 32 & 1) as c_int, l_linger: v as u32 as c_int }
}

/// Bytes are being repeated on TCP. Should this process be killed before all are, the stream must not end as if there had
/// been no more: the kernel is to reset it. Under both locks.
pub fn owe(c: &Conn, fd: c_int) {
    if c.linger.load(Relaxed) != 0 {
        return;
    }
    if let Some(l) = get_linger(fd) {
        c.linger.store(pack(l), Relaxed);
        set_linger(fd, linger { l_onoff: 1, l_linger: 0 });
    }
}

/// They are. Under both locks.
pub fn owe_nothing(c: &Conn, fd: c_int) {
    match c.linger.swap(0, Relaxed) {
        0 => {}
        v => set_linger(fd, unpack(v)),
    }
}

/// `getsockopt(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn getsockopt(fd: c_int, level: c_int, name: c_int, val: *mut c_void, len: *mut socklen_t) -> Outcome {
    if (level, name) != (libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE) {
        // SAFETY: as for the call.
        let ask = |_: &Conn| unsafe { sys!(libc::SYS_getsockopt, fd, level, name, val, len) };
        if let Some(r) = table::quickly(fd, ask) {
            return Outcome::from(r);
        }
    }
    let Some(c) = table::conn(fd) else { return Outcome::Bypass };
    // A negative length, too, is the kernel's to refuse. (So is a bad address, where the answer is not ours.)
    // SAFETY: any number is one.
    let room = || unsafe { copy::read(len) }.map_or(-1, |n| n as c_int);
    let fits = || !is_nowhere(val as usize) && room() >= 4;
    let ours = matches!(c.phase(), Phase::Raw | Phase::Managed | Phase::Away);
    let e = match (level, name) {
        // Also to a child that has not used the connection: the kernel has told it to who owns that.
        (libc::SOL_SOCKET, libc::SO_ERROR) if ours && fits() => io::asked_error(fd, c).unwrap_or(0),
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT) if c.is_managed() => c.rcvlowat.load(Relaxed) as c_int,
        (libc::SOL_SOCKET, libc::SO_LINGER) if c.linger.load(Relaxed) != 0 && fits() => {
            let l = unpack(c.linger.load(Relaxed));
            let n = (room().max(0) as usize).min(size_of::<linger>());
            // SAFETY: no more than there is of it.
            let r = unsafe { copy::copy((&raw const l).cast(), val.cast(), n) };
            return answered(r.and_then(|()| copy::write(len, n as socklen_t)));
        }
        // SAFETY: the caller's promise.
        (libc::IPPROTO_TCP, libc::TCP_INFO) if c.is_ours() => return unsafe { tcp_info(c, fd, val, len) },
        (libc::IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE) => {
            table::each_record(fd, |c| process::give_up(c, Why::ZeroCopy));
            return Outcome::Bypass;
        }
        _ => return Outcome::Bypass,
    };
    if !fits() {
        return Outcome::Bypass;
    }
    answered(copy::write(val.cast(), e).and_then(|()| copy::write(len, 4)))
}

/// How a call ends that had the program's memory to write to.
fn answered(r: Result<(), copy::Fault>) -> Outcome {
    r.map_or(Outcome::Fail(libc::EFAULT), |()| Outcome::Done(0))
}

/// `TCP_INFO`: the kernel's, but ends that were told in the ring have happened, though its own come only later.
///
/// # Safety
/// As for `getsockopt`.
unsafe fn tcp_info(c: &Conn, fd: c_int, val: *mut c_void, len: *mut socklen_t) -> Outcome {
    // linux/tcp_states.h
    const ESTABLISHED: u8 = 1;
    const FIN_WAIT1: u8 = 4;
    const FIN_WAIT2: u8 = 5;
    const CLOSE: u8 = 7;
    const CLOSE_WAIT: u8 = 8;
    let (theirs, ours) = (c.fin_seen(), c.has_ended(END_WRSHUT));
    // SAFETY: the program's arguments, for the kernel to check.
    let r = unsafe { sys!(libc::SYS_getsockopt, fd, libc::IPPROTO_TCP, libc::TCP_INFO, val, len) };
    // SAFETY: the kernel has just written both.
    if r.is_ok() && unsafe { *len } > 0 {
        // SAFETY: as above; the state is the first byte.
        let state = unsafe { &mut *val.cast::<u8>() };
        *state = match (*state, theirs, ours) {
            (ESTABLISHED, true, false) => CLOSE_WAIT,
            (ESTABLISHED, false, true) => FIN_WAIT2,
            (ESTABLISHED | FIN_WAIT1 | FIN_WAIT2 | CLOSE_WAIT, true, true) => CLOSE,
            (s, _, _) => s,
        };
    }
    Outcome::from(r)
}

/// The bound of what may be under way was changed. The kernel wakes all who wait, if there is room now.
fn more_room(c: &Conn, fd: c_int) {
    // (Of a ring that only another process has there is nothing to see.)
    if c.phase() != Phase::Managed {
        return;
    }
    {
        let mut tx = c.lock_tx();
        if tx.path() == TxPath::Ring {
            // Whoever waits beside a full ring counts on it that a larger buffer has room, also beyond what rings grow to
            // by themselves.
            let full = matches!(tx.ring().has_room(), Ok(false)) && !tx.ring().can_grow(c.ring_limit());
            let wanted = sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(0).max(0) as usize;
            if full && wanted as u64 > 2 * tx.ring().half() {
                c.ring_cap.store(wanted.next_power_of_two().min(RING_LARGEST), Relaxed);
            }
        }
    }
    try_room(c);
}

/// A ring may be able to grow that was not: whoever waits beside it tries.
pub fn try_room(c: &Conn) {
    if c.phase() != Phase::Managed {
        return;
    }
    {
        let mut tx = c.lock_tx();
        if tx.path() == TxPath::Ring && tx.ring().can_grow(c.ring_limit()) {
            c.nospace.store(false, Relaxed);
        }
    }
    if c.writable() {
        c.fulls.fetch_add(1, SeqCst);
        c.notify();
    }
}

/// `setsockopt(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn setsockopt(fd: c_int, level: c_int, name: c_int, val: *const c_void, len: socklen_t) -> Outcome {
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT) {
        CONNECTS_LATE.store(true, Relaxed);
    }
    let feature = asked_feature(level, name);
    let ours = level == libc::IPPROTO_TCP && matches!(name, libc::TCP_CORK | libc::TCP_NODELAY | libc::TCP_INQ);
    if feature.is_none() && level != libc::SOL_SOCKET && !ours {
        return Outcome::Bypass;
    }
    // Many programs set these first; of such a connection nothing is kept that they would change.
    let usual = matches!(
        (level, name),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY | libc::TCP_INQ)
            | (libc::SOL_SOCKET, libc::SO_KEEPALIVE | libc::SO_OOBINLINE | libc::SO_ZEROCOPY)
    );
    if usual && table::fresh(fd).is_some() {
        return Outcome::Bypass;
    }
    // SAFETY: the caller's promise.
    let done = table::each_record(fd, |c| unsafe { setsockopt_of(c, fd, (level, name), val, len) });
    done.unwrap_or_else(|| {
        let is_tcp =
            || table::is_tcp(fd) || sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP);
        let limits = level == libc::SOL_SOCKET && is_time_limit(name);
        if feature.is_some() && is_tcp() {
            BEGINS_WITH_FEATURE.store(true, Relaxed);
        }
        if limits && is_tcp() {
            BEGINS_WITH_LIMITS.store(true, Relaxed);
        }
        Outcome::Bypass
    })
}

/// The same of a connection, one that matters here.
///
/// # Safety
/// As for the call.
unsafe fn setsockopt_of(
    c: &'static Conn,
    fd: c_int,
    (level, name): (c_int, c_int),
    val: *const c_void,
    len: socklen_t,
) -> Outcome {
    let feature = asked_feature(level, name);
    if feature == Some(Why::Ulp) {
        // Programs ask so whether there is one. As long as it has no keys, what is sent is what is received.
        // SAFETY: as for the call.
        let r = unsafe { sys!(libc::SYS_setsockopt, fd, level, name, val, len) };
        if r.is_ok() {
            process::give_up(c, Why::Ulp);
        }
        return Outcome::from(r);
    }
    if let Some(why) = feature {
        process::give_up(c, why);
        return Outcome::Bypass;
    }
    visit::arrive_by_exec(c);
    // What an upgrade or a return under way makes of it must not be in between.
    let between = matches!(
        (level, name),
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT | libc::SO_LINGER) | (libc::IPPROTO_TCP, libc::TCP_CORK)
    );
    let tcp = level == libc::IPPROTO_TCP && matches!(name, libc::TCP_CORK | libc::TCP_NODELAY);
    // What is held back is another process's to show, and whoever waits for more than one byte its to wake.
    let its = tcp && c.held.load(SeqCst) != 0 || (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
    if its && c.is_inherited() {
        visit::settle(c);
    }
    let both = (between && !c.tx_lock.held_by_me() && !c.rx_lock.held_by_me()).then(|| c.lock_both());
    // SAFETY: as for the call.
    let r = unsafe { sys!(libc::SYS_setsockopt, fd, level, name, val, len) };
    if r.is_err() {
        return Outcome::from(r);
    }
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_INQ) {
        // SAFETY: the kernel has just read it.
        c.inq.store(unsafe { (val as *const c_int).read_unaligned() } != 0, Relaxed);
        return Outcome::from(r);
    }
    if tcp {
        // SAFETY: the kernel has just read it.
        let on = unsafe { (val as *const c_int).read_unaligned() } != 0;
        if name == libc::TCP_CORK {
            c.corked.store(on, SeqCst);
        }
        drop(both);
        if on == (name == libc::TCP_NODELAY) {
            io::release(c);
        }
        return Outcome::from(r);
    }
    match name {
        libc::SO_RCVLOWAT => {
            let by_kernel = both.as_ref().is_some_and(visit::is_polled_by_kernel);
            if c.is_managed() && !by_kernel {
                take_lowat(c, fd);
            } else {
                note_lowat(c, fd);
            }
            // In a handler that found the locks held by its own thread the option holds all the same.
            let Some(mut b) = both else { return Outcome::from(r) };
            // It wakes whoever waits for an edge, if there is as much now, or the peer has ended its direction.
            let ended = match c.is_managed() {
                true => c.fin_seen() && !c.has_ended(END_RESET | END_FAILED),
                false => sys::poll_now(fd, libc::POLLRDHUP) != 0 && !sys::is_tcp_closed(fd),
            };
            let there = io::unread(&mut b.rx);
            if ended || there > 0 && there >= c.rcvlowat.load(Relaxed) as usize {
                c.nudges.fetch_add(1, SeqCst);
            }
            drop(b);
            c.notify();
        }
        name if is_time_limit(name) => {
            let receive = matches!(name, libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW);
            // SAFETY: the kernel has just read it.
            let over = unsafe { (val as *const timeval).read_unaligned() }.tv_sec < 0;
            let t = if over { AT_ONCE } else { read_timeout(fd, name) };
            if receive { &c.rcvtimeo } else { &c.sndtimeo }.store(t, Relaxed);
        }
        libc::SO_SNDBUF | libc::SO_SNDBUFFORCE => {
            read_options(c, fd);
            more_room(c, fd);
        }
        libc::SO_LINGER if len as usize >= size_of::<linger>() => {
            // SAFETY: the kernel has just read it.
            let l = unsafe { (val as *const linger).read_unaligned() };
            c.linger0.store(is_to_reset(l), Relaxed);
            if c.linger.load(Relaxed) != 0 {
                c.linger.store(pack(l), Relaxed);
                set_linger(fd, linger { l_onoff: 1, l_linger: 0 });
            }
        }
        _ => {}
    }
    Outcome::from(r)
}
