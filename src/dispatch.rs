//! The shapes of calls.
//!
//! One operation of [`crate::ops`] is reached by several libc functions and by
//! `syscall()`. What these forms have in common before and after the operation
//! (a `read` of nothing, a time limit in one of four formats, the address that
//! `recvfrom` reports) stands here once, for the hooks and for [`syscall`].
//!
//! [`syscall`] is the dispatcher behind libc's `syscall()`: Node.js and libuv
//! close, duplicate and send by it. A JVM or an Erlang node also makes some
//! hundred thousand futex and gettid calls by it, so the hook first asks the
//! table made from [`interesting`] and comes here only for the numbers in it.

use crate::ops::{self, total, Outcome};
use crate::sys::syscall6;
use crate::{copy, fault, limits, pins, process, retire, table, uring};
use core::ptr;
use libc::{
    c_int, c_long, c_uint, c_void, epoll_event, fd_set, iovec, mmsghdr, msghdr, off64_t, pollfd, sigset_t, size_t,
    sockaddr, socklen_t, timespec, timeval,
};
use Outcome::{Bypass, Done, Fail};

/// The most messages that the kernel sends in one call (`UIO_MAXIOV`).
const MAX_MESSAGES: usize = 1024;
const NS_PER_SEC: i64 = 1_000_000_000;
/// `preadv2`/`pwritev2` flags that sockets take: all but `RWF_NOWAIT` mean nothing there.
const RWF_OF_SOCKETS: c_int = 0x3f;
const RWF_NOWAIT: c_int = 0x08;

// ---------------------------------------------------------------- time limits

/// A limit in milliseconds, negative for none, as nanoseconds.
#[inline]
pub fn millis_ns(ms: c_int) -> i64 {
    if ms < 0 {
        -1
    } else {
        i64::from(ms) * 1_000_000
    }
}

/// A `timespec` limit as nanoseconds: -1 for a null pointer (no limit),
/// saturated, `None` where the kernel says `EINVAL` or `EFAULT`.
///
/// # Safety
/// `ts` is null or the program's.
#[inline]
pub unsafe fn timespec_ns(ts: *const timespec) -> Option<i64> {
    if ts.is_null() {
        return Some(-1);
    }
    let t = copy::read(ts).ok()?;
    if t.tv_sec < 0 || !(0..NS_PER_SEC).contains(&t.tv_nsec) {
        return None;
    }
    Some(t.tv_sec.saturating_mul(NS_PER_SEC).saturating_add(t.tv_nsec))
}

/// The same for `select`'s `timeval`, whose microseconds may exceed a second.
///
/// # Safety
/// `tv` is null or the program's.
#[inline]
pub unsafe fn timeval_ns(tv: *const timeval) -> Option<i64> {
    if tv.is_null() {
        return Some(-1);
    }
    let t = copy::read(tv).ok()?;
    if t.tv_sec < 0 || t.tv_usec < 0 {
        return None;
    }
    Some(t.tv_sec.saturating_mul(NS_PER_SEC).saturating_add(t.tv_usec.saturating_mul(1000)))
}

/// Nanoseconds of the monotonic clock, by the vDSO.
pub(crate) fn now_ns() -> i64 {
    let mut t = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a writable timespec; clock_gettime is not interposed and cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec * NS_PER_SEC + t.tv_nsec
}

// ------------------------------------------------------- reading and writing

/// `read`: `recv`, but for a length of 0 the kernel returns before it looks at the socket.
///
/// # Safety
/// As `read`.
#[inline]
pub unsafe fn read(fd: c_int, buf: *mut c_void, n: size_t) -> Outcome {
    if n == 0 || n > isize::MAX as usize {
        return Bypass;
    }
    ops::recv(fd, buf, n, 0)
}

/// `readv`, and `preadv2` without a position.
///
/// # Safety
/// As `readv`.
pub unsafe fn readv(fd: c_int, iov: *const iovec, n: c_int, flags: c_int) -> Outcome {
    usize::try_from(n).map_or(Bypass, |n| ops::recvv(fd, iov, n, flags))
}

/// `write`: `send`, but a length that no call can have is the kernel's to refuse.
///
/// # Safety
/// As `write`.
#[inline]
pub unsafe fn write(fd: c_int, buf: *const c_void, n: size_t) -> Outcome {
    if n > isize::MAX as usize {
        return Bypass;
    }
    ops::send(fd, buf, n, 0)
}

/// `writev`, and `pwritev2` without a position.
///
/// # Safety
/// As `writev`.
pub unsafe fn writev(fd: c_int, iov: *const iovec, n: c_int, flags: c_int) -> Outcome {
    usize::try_from(n).map_or(Bypass, |n| ops::sendv(fd, iov, n, flags))
}

fn rwf(offset: off64_t, flags: c_int) -> Option<c_int> {
    // A position is ESPIPE, an unknown flag EOPNOTSUPP: the kernel says so before it moves a byte.
    if offset != -1 || flags & !RWF_OF_SOCKETS != 0 {
        return None;
    }
    Some(if flags & RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 })
}

/// `preadv2`.
///
/// # Safety
/// As `preadv2`.
pub unsafe fn preadv2(fd: c_int, iov: *const iovec, n: c_int, offset: off64_t, flags: c_int) -> Outcome {
    match rwf(offset, flags) {
        Some(msg) => readv(fd, iov, n, msg),
        None => Bypass,
    }
}

/// `pwritev2`.
///
/// # Safety
/// As `pwritev2`.
pub unsafe fn pwritev2(fd: c_int, iov: *const iovec, n: c_int, offset: off64_t, flags: c_int) -> Outcome {
    match rwf(offset, flags) {
        Some(msg) => writev(fd, iov, n, msg),
        None => Bypass,
    }
}

/// `recvfrom`: TCP reports an address of no length.
///
/// # Safety
/// As `recvfrom`.
#[inline]
pub unsafe fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> Outcome {
    let got = ops::recv(fd, buf, n, flags);
    if addr.is_null() || !matches!(got, Done(_)) {
        return got;
    }
    // The kernel looks at the length that it was given only now, and as a signed number.
    match copy::read(len).map(|n| n as i32) {
        Ok(..0) => Fail(libc::EINVAL),
        Ok(_) => copy::write(len, 0).map_or(Fail(libc::EFAULT), |()| got),
        Err(copy::Fault) => Fail(libc::EFAULT),
    }
}

/// `sendto`: a connected TCP socket ignores the address.
///
/// # Safety
/// As `sendto`.
#[inline]
pub unsafe fn sendto(
    fd: c_int,
    buf: *const c_void,
    n: size_t,
    flags: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> Outcome {
    // EISCONN for fast open, EINVAL for a length out of range: the kernel says so before it sends.
    if flags & libc::MSG_FASTOPEN != 0
        || (!addr.is_null() && len as usize > core::mem::size_of::<libc::sockaddr_storage>())
    {
        return Bypass;
    }
    ops::send(fd, buf, n, flags)
}

/// `recvmmsg`: as the kernel does it, by `recvmsg` for each message.
///
/// # Safety
/// As `recvmmsg`.
pub unsafe fn recvmmsg(fd: c_int, msgs: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> Outcome {
    if table::is_foreign(fd) {
        return Bypass;
    }
    let Some(limit) = timespec_ns(timeout) else { return Bypass };
    let _whole = (n > 1).then(|| pins::Whole::begin(fd));
    // The time limit is looked at between messages only.
    let end = if limit < 0 { 0 } else { now_ns().saturating_add(limit) };
    let mut flags_now = flags & !libc::MSG_WAITFORONE;
    let mut done = 0usize;
    // Unlike the other calls it reports an error even if there are bytes before it.
    if flags & libc::MSG_ERRQUEUE == 0 {
        if let Some(e) = ops::pending_error(fd) {
            return Fail(e);
        }
    }
    while done < n as usize {
        let entry = msgs.wrapping_add(done);
        let len = match ops::recvmsg(fd, &raw mut (*entry).msg_hdr, flags_now) {
            Bypass if done == 0 => return Bypass,
            // The connection left the ring between two messages: the rest comes from the kernel.
            Bypass => raw(libc::SYS_recvmsg, pins::number(fd) as usize, entry as usize, flags_now as usize, 0, 0, 0),
            other => other,
        };
        match len {
            Done(len) => {
                if copy::write(&raw mut (*entry).msg_len, len as c_uint).is_err() {
                    if done == 0 {
                        return Fail(libc::EFAULT);
                    }
                    break;
                }
            }
            other if done == 0 => return other,
            _ => break,
        }
        done += 1;
        if flags & libc::MSG_WAITFORONE != 0 {
            flags_now |= libc::MSG_DONTWAIT;
        }
        if !timeout.is_null() {
            let left = (end - now_ns()).max(0);
            if copy::write(timeout, timespec { tv_sec: left / NS_PER_SEC, tv_nsec: left % NS_PER_SEC }).is_err() {
                return Fail(libc::EFAULT);
            }
            if left == 0 {
                break;
            }
        }
        if copy::read(&raw const (*entry).msg_hdr.msg_flags).is_ok_and(|f| f & libc::MSG_OOB != 0) {
            break;
        }
    }
    if done == 0 {
        return Bypass;
    }
    Done(done as isize)
}

/// `sendmmsg`: as the kernel does it, by `sendmsg` for each message.
///
/// # Safety
/// As `sendmmsg`.
pub unsafe fn sendmmsg(fd: c_int, msgs: *mut mmsghdr, n: c_uint, flags: c_int) -> Outcome {
    if table::is_without_tcp() {
        return Bypass;
    }
    let _whole = (n > 1).then(|| pins::Whole::begin(fd));
    let mut done = 0usize;
    while done < (n as usize).min(MAX_MESSAGES) {
        let entry = msgs.wrapping_add(done);
        let sent = match ops::sendmsg(fd, &raw const (*entry).msg_hdr, flags) {
            Bypass if done == 0 => return Bypass,
            Bypass => raw(libc::SYS_sendmsg, pins::number(fd) as usize, entry as usize, flags as usize, 0, 0, 0),
            other => other,
        };
        let sent = match sent {
            Done(sent) => sent as usize,
            other if done == 0 => return other,
            _ => break,
        };
        if copy::write(&raw mut (*entry).msg_len, sent as c_uint).is_err() {
            if done == 0 {
                return Fail(libc::EFAULT);
            }
            break;
        }
        done += 1;
        // A message that went out in part is the last one.
        let all = copy::read(&raw const (*entry).msg_hdr).ok().and_then(|h| total(h.msg_iov, h.msg_iovlen));
        if all.is_some_and(|all| sent < all) {
            break;
        }
    }
    if done == 0 {
        return Bypass;
    }
    Done(done as isize)
}

/// The program is about to give the kernel work for fds, of which it does not tell us when it does it (`io_submit(2)`).
///
/// # Safety
/// None: there may be no list.
pub unsafe fn submitted(n: c_long, list: *const *const c_void) {
    if table::is_without_tcp() {
        return;
    }
    for i in 0..n.max(0) as usize {
        // Behind a bad address the kernel goes no further.
        let Ok(block) = copy::read(list.wrapping_add(i)) else { return };
        // `aio_fildes` of struct iocb (linux/aio_abi.h).
        let Ok(fd) = copy::read(block.wrapping_byte_add(20).cast::<c_int>()) else { return };
        // What cannot return must not look like the end of the stream to what reads.
        ops::to_reader(fd);
    }
}

/// `unshare(2)`.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn unshare(flags: c_int) -> Outcome {
    let flags = match flags & libc::CLONE_FILES != 0 && !retire::gives_own_table() {
        true => flags & !libc::CLONE_FILES,
        false => flags,
    };
    const OF_ONE: c_int = libc::CLONE_NEWUSER | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM;
    let done = match raw(libc::SYS_unshare, flags as usize, 0, 0, 0, 0, 0) {
        Fail(libc::EINVAL) if flags & OF_ONE != 0 && ops::leave_alone() => {
            raw(libc::SYS_unshare, flags as usize, 0, 0, 0, 0, 0)
        }
        o => o,
    };
    moved(flags, done)
}

/// A call that takes the thread to namespaces of these kinds, or others, is done.
fn moved(kinds: c_int, done: Outcome) -> Outcome {
    if kinds & libc::CLONE_NEWNET != 0 && matches!(done, Done(_)) {
        process::left_network();
    }
    done
}

/// `setns(2)`.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn setns(fd: c_int, kind: c_int) -> Outcome {
    let done = match raw(libc::SYS_setns, fd as usize, kind as usize, 0, 0, 0, 0) {
        // (The second of time namespaces.)
        Fail(libc::EINVAL | libc::EUSERS) if ops::leave_alone() => {
            raw(libc::SYS_setns, fd as usize, kind as usize, 0, 0, 0, 0)
        }
        o => o,
    };
    // 0: of whatever kind it is.
    moved(if kind == 0 { libc::CLONE_NEWNET } else { kind }, done)
}

/// Tells the core about file descriptors that came with a message of another (Unix) socket.
///
/// # Safety
/// `msg` was filled in by a successful `recvmsg`.
pub unsafe fn received_fds(msg: *const msghdr) {
    process::fds_in((*msg).msg_control, (*msg).msg_controllen, ops::fd_new);
}

// -------------------------------------------------------------------- waiting

/// `ppoll`.
///
/// # Safety
/// As `ppoll`.
pub unsafe fn ppoll(fds: *mut pollfd, n: usize, limit: *const timespec, mask: *const sigset_t) -> Outcome {
    if table::is_without_tcp() {
        return Bypass;
    }
    match timespec_ns(limit) {
        Some(ns) => ops::poll(fds, n, ns, mask),
        None => Bypass,
    }
}

/// `epoll_pwait2`.
///
/// # Safety
/// As `epoll_pwait2`.
pub unsafe fn epoll_pwait2(
    ep: c_int,
    events: *mut epoll_event,
    max: c_int,
    limit: *const timespec,
    mask: *const sigset_t,
) -> Outcome {
    if !limit.is_null() && !(0..2).all(|word| copy::is_word(limit.cast::<u64>().wrapping_add(word))) {
        return Bypass;
    }
    match timespec_ns(limit) {
        Some(ns) => ops::epoll_wait(ep, events, max, ns, mask),
        None => Bypass,
    }
}

/// Runs a call with a time limit, and says what is left of it: like the kernel,
/// whatever the result is, but not for a limit of zero.
fn timed(ns: i64, call: impl FnOnce() -> Outcome) -> (Outcome, Option<i64>) {
    let start = if ns > 0 { now_ns() } else { 0 };
    let out = call();
    let left = (ns > 0 && out != Bypass).then(|| (ns - (now_ns() - start)).max(0));
    (out, left)
}

/// `select`, which tells how much of its time was left.
///
/// # Safety
/// As `select`.
pub unsafe fn select(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, limit: *mut timeval) -> Outcome {
    if table::is_without_tcp() {
        return Bypass;
    }
    let Some(ns) = timeval_ns(limit) else { return Bypass };
    let (out, left) = timed(ns, || ops::select(n, r, w, e, ns, ptr::null()));
    if let Some(left) = left {
        // Where it may not be written the kernel lets it be.
        let _ = copy::write(limit, timeval { tv_sec: left / NS_PER_SEC, tv_usec: left % NS_PER_SEC / 1000 });
    }
    out
}

/// libc's `pselect`, which does not.
///
/// # Safety
/// As `pselect`.
pub unsafe fn pselect(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    limit: *const timespec,
    mask: *const sigset_t,
) -> Outcome {
    if table::is_without_tcp() {
        return Bypass;
    }
    match timespec_ns(limit) {
        Some(ns) => ops::select(n, r, w, e, ns, mask),
        None => Bypass,
    }
}

/// The system call `pselect6`, which does, and takes the mask by a pair of pointer and size.
#[allow(clippy::too_many_arguments)]
unsafe fn pselect6(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    limit: *mut timespec,
    pair: *const [usize; 2],
) -> Outcome {
    if table::is_without_tcp() {
        return Bypass;
    }
    let (Some(ns), Some(mask)) = (timespec_ns(limit), if pair.is_null() { Some(0) } else { mask_at(pair) }) else {
        return Bypass;
    };
    let (out, left) = timed(ns, || ops::select(n, r, w, e, ns, mask as *const sigset_t));
    if let Some(left) = left {
        let _ = copy::write(limit, timespec { tv_sec: left / NS_PER_SEC, tv_nsec: left % NS_PER_SEC });
    }
    out
}

/// The system call `ppoll`, which does as well.
unsafe fn raw_ppoll(fds: *mut pollfd, n: usize, limit: *mut timespec, mask: *const sigset_t) -> Outcome {
    if table::is_without_tcp() {
        return Bypass;
    }
    let Some(ns) = timespec_ns(limit) else { return Bypass };
    let (out, left) = timed(ns, || ops::poll(fds, n, ns, mask));
    if let Some(left) = left {
        let _ = copy::write(limit, timespec { tv_sec: left / NS_PER_SEC, tv_nsec: left % NS_PER_SEC });
    }
    out
}

/// The same of a pair that the program has somewhere.
unsafe fn mask_at(pair: *const [usize; 2]) -> Option<usize> {
    mask_of(copy::read(pair).ok()?)
}

/// A signal mask of a raw system call, or `None` if its size is not the kernel's.
fn mask_of(pair: [usize; 2]) -> Option<usize> {
    (pair[0] == 0 || pair[1] == 8).then_some(pair[0])
}

// ------------------------------------------------------------------ syscall()

unsafe fn raw(n: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> Outcome {
    match syscall6(n, a, b, c, d, e, f) {
        Ok(v) => Done(v as isize),
        Err(errno) => Fail(errno),
    }
}

/// A call that returned a new epoll set.
fn noting_set(o: Outcome) -> Outcome {
    if let Outcome::Done(fd) = o {
        ops::epoll_new(fd as c_int);
    }
    o
}

/// A call whose result is a new file descriptor.
unsafe fn raw_fd(n: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> Outcome {
    let out = raw(n, a, b, c, d, e, f);
    if let Done(fd) = out {
        ops::fd_new(fd as c_int);
    }
    out
}

/// A call that stores two new file descriptors.
unsafe fn raw_pair(n: c_long, a: usize, b: usize, c: usize, d: usize, fds: *const c_int) -> Outcome {
    let out = raw(n, a, b, c, d, 0, 0);
    if let Done(0) = out {
        ops::fd_new(*fds);
        ops::fd_new(*fds.add(1));
    }
    out
}

unsafe fn raw_socket(family: usize, kind: usize, protocol: usize) -> Outcome {
    let out = raw_fd(libc::SYS_socket, family, kind, protocol, 0, 0, 0);
    if let Done(fd) = out {
        ops::socket_new(fd as c_int, family as c_int, kind as c_int, protocol as c_int);
    }
    out
}

unsafe fn raw_accept(n: c_long, listener: usize, addr: usize, len: usize, flags: usize) -> Outcome {
    let out = raw_fd(n, listener, addr, len, flags, 0, 0);
    if let Done(fd) = out {
        ops::accepted(listener as c_int, fd as c_int, flags as c_int);
    }
    out
}

unsafe fn raw_connect(fd: usize, addr: usize, len: usize) -> Outcome {
    let out = raw(libc::SYS_connect, fd, addr, len, 0, 0, 0);
    if matches!(out, Done(_) | Fail(libc::EINPROGRESS)) {
        ops::connecting(fd as c_int, matches!(out, Done(_)));
    }
    out
}

unsafe fn raw_dup(n: c_long, old: usize, b: usize, c: usize) -> Outcome {
    let out = raw(n, old, b, c, 0, 0, 0);
    if let Done(new) = out {
        ops::dup_new(old as c_int, new as c_int);
    }
    out
}

unsafe fn raw_fcntl(fd: usize, cmd: usize, arg: usize) -> Outcome {
    match ops::fcntl(fd as c_int, cmd as c_int, arg) {
        Bypass if matches!(cmd as c_int, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) => {
            raw_dup(libc::SYS_fcntl, fd, cmd, arg)
        }
        other => other,
    }
}

unsafe fn raw_recvmsg(fd: usize, msg: usize, flags: usize) -> Outcome {
    match ops::recvmsg(fd as c_int, msg as *mut msghdr, flags as c_int) {
        Bypass => {
            let out = raw(libc::SYS_recvmsg, fd, msg, flags, 0, 0, 0);
            if let Done(_) = out {
                received_fds(msg as *const msghdr);
            }
            out
        }
        other => other,
    }
}

unsafe fn raw_exec(n: c_long, a: usize, b: usize, c: usize, d: usize, e: usize) -> Outcome {
    let (path, envp) = if n == libc::SYS_execve { (a, c) } else { (b, d) };
    ops::exec_prepare(path as _, envp as _);
    let out = raw(n, a, b, c, d, e, 0);
    ops::exec_failed();
    out
}

unsafe fn masked(mask: usize, size: usize, call: impl FnOnce(*const sigset_t) -> Outcome) -> Outcome {
    match mask_of([mask, size]) {
        Some(mask) => call(mask as *const sigset_t),
        None => Bypass,
    }
}

/// Makes from one list the dispatcher and the question whether a number is in it.
macro_rules! calls {
    ($($arg:ident)* : $($(#[$only:meta])* $($n:ident)|+ => $do:expr;)*) => {
        /// Whether [`syscall`] does anything about system call `n`.
        pub const fn interesting(n: c_long) -> bool {
            match n {
                $($(#[$only])* $(libc::$n)|+ => true,)*
                _ => false,
            }
        }

        /// libc's `syscall()`. `Bypass`: make the call, we have no part in it.
        ///
        /// # Safety
        /// The arguments are a program's; they are used as the kernel would use them.
        #[allow(clippy::too_many_arguments)]
        pub unsafe fn syscall(n: c_long, $($arg: usize),*) -> Outcome {
            match n {
                $($(#[$only])* $(libc::$n)|+ => { $do })*
                _ => Bypass,
            }
        }
    };
}

// `as _` takes a register of the call for what the operation expects there: the
// low half for an int, all of it for a length or a pointer, as the kernel does.
calls! { a b c d e f :
    SYS_read => read(a as _, b as _, c);
    SYS_readv => readv(a as _, b as _, c as _, 0);
    SYS_preadv2 => preadv2(a as _, b as _, c as _, d as _, f as _);
    SYS_recvfrom => recvfrom(a as _, b as _, c, d as _, e as _, f as _);
    SYS_recvmsg => raw_recvmsg(a, b, c);
    SYS_recvmmsg => recvmmsg(a as _, b as _, c as _, d as _, e as _);
    SYS_write => write(a as _, b as _, c);
    SYS_writev => writev(a as _, b as _, c as _, 0);
    SYS_pwritev2 => pwritev2(a as _, b as _, c as _, d as _, f as _);
    SYS_sendto => sendto(a as _, b as _, c, d as _, e as _, f as _);
    SYS_sendmsg => ops::sendmsg(a as _, b as _, c as _);
    SYS_sendmmsg => sendmmsg(a as _, b as _, c as _, d as _);
    SYS_sendfile => ops::sendfile(a as _, b as _, c as _, d);
    SYS_splice => ops::splice(a as _, b as _, c as _, d as _, e, f as _);
    SYS_shutdown => ops::shutdown(a as _, b as _);
    SYS_getpeername => ops::getpeername(a as _);
    SYS_close => ops::close(a as _);
    SYS_close_range => ops::close_range(a as _, b as _, c as _);
    SYS_fcntl => raw_fcntl(a, b, c);
    SYS_ioctl => ops::ioctl(a as _, b as c_uint as u64, c);
    SYS_getsockopt => ops::getsockopt(a as _, b as _, c as _, d as _, e as _);
    SYS_setsockopt => ops::setsockopt(a as _, b as _, c as _, d as _, e as _);

    SYS_dup => raw_dup(libc::SYS_dup, a, 0, 0);
    #[cfg(target_arch = "x86_64")]
    SYS_dup2 => ops::dup2(a as _, b as _, None);
    SYS_dup3 => ops::dup2(a as _, b as _, Some(c as _));

    #[cfg(target_arch = "x86_64")]
    SYS_poll => ops::poll(a as _, b as c_uint as usize, millis_ns(c as _), ptr::null());
    SYS_ppoll => masked(d, e, |mask| raw_ppoll(a as _, b as c_uint as usize, c as _, mask));
    #[cfg(target_arch = "x86_64")]
    SYS_select => select(a as _, b as _, c as _, d as _, e as _);
    SYS_pselect6 => pselect6(a as _, b as _, c as _, d as _, e as _, f as _);
    SYS_epoll_ctl => ops::epoll_ctl(a as _, b as _, c as _, d as _);
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_wait => ops::epoll_wait(a as _, b as _, c as _, millis_ns(d as _), ptr::null());
    SYS_epoll_pwait => masked(e, f, |mask| ops::epoll_wait(a as _, b as _, c as _, millis_ns(d as _), mask));
    SYS_epoll_pwait2 => masked(e, f, |mask| epoll_pwait2(a as _, b as _, c as _, d as _, mask));

    SYS_connect => raw_connect(a, b, c);
    SYS_accept => raw_accept(libc::SYS_accept, a, b, c, 0);
    SYS_accept4 => raw_accept(libc::SYS_accept4, a, b, c, d);
    SYS_socketpair => raw_pair(libc::SYS_socketpair, a, b, c, d, d as _);
    SYS_pipe2 => raw_pair(libc::SYS_pipe2, a, b, 0, 0, a as _);
    #[cfg(target_arch = "x86_64")]
    SYS_pipe => raw_pair(libc::SYS_pipe, a, 0, 0, 0, a as _);
    SYS_socket => raw_socket(a, b, c);
    SYS_openat => raw_fd(libc::SYS_openat, a, b, c, d, 0, 0);
    SYS_openat2 => raw_fd(libc::SYS_openat2, a, b, c, d, 0, 0);
    SYS_eventfd2 => raw_fd(libc::SYS_eventfd2, a, b, 0, 0, 0, 0);
    SYS_timerfd_create => raw_fd(libc::SYS_timerfd_create, a, b, 0, 0, 0, 0);
    SYS_inotify_init1 => raw_fd(libc::SYS_inotify_init1, a, 0, 0, 0, 0, 0);
    SYS_epoll_create1 => noting_set(raw_fd(libc::SYS_epoll_create1, a, 0, 0, 0, 0, 0));
    SYS_memfd_create => raw_fd(libc::SYS_memfd_create, a, b, 0, 0, 0, 0);
    SYS_pidfd_open => raw_fd(libc::SYS_pidfd_open, a, b, 0, 0, 0, 0);
    SYS_pidfd_getfd => {
        let o = raw_fd(libc::SYS_pidfd_getfd, a, b, c, 0, 0, 0);
        if let Done(fd) = o { ops::got_fd(a as _, b as _, fd as _) }
        o
    };
    SYS_fanotify_init => raw_fd(libc::SYS_fanotify_init, a, b, 0, 0, 0, 0);
    SYS_userfaultfd => raw_fd(libc::SYS_userfaultfd, a, 0, 0, 0, 0, 0);
    SYS_perf_event_open => raw_fd(libc::SYS_perf_event_open, a, b, c, d, e, 0);
    SYS_seccomp => { if retire::confines(a as c_uint, b, c) { ops::confining() }; Bypass };
    SYS_prctl => { if retire::confines_by_prctl(a as c_int, b, c) { ops::confining() }; Bypass };
    SYS_io_submit => { submitted(b as _, c as _); Bypass };
    SYS_prlimit64 => limits::prlimit(a as _, b as _, c as _, d as _);
    SYS_setrlimit => limits::prlimit(0, a as _, b as _, ptr::null_mut());
    SYS_getrlimit => limits::prlimit(0, a as _, ptr::null(), b as _);
    SYS_unshare => unshare(a as _);
    SYS_setns => setns(a as _, b as _);
    SYS_io_uring_setup => uring::setup(b, || raw_fd(libc::SYS_io_uring_setup, a, b, 0, 0, 0, 0));
    SYS_io_uring_enter => { uring::entering(a as _, b as _, d as _); Bypass };
    SYS_io_uring_register => { uring::registering(b as _); Bypass };
    #[cfg(target_arch = "x86_64")]
    SYS_open => raw_fd(libc::SYS_open, a, b, c, 0, 0, 0);
    #[cfg(target_arch = "x86_64")]
    SYS_creat => raw_fd(libc::SYS_creat, a, b, 0, 0, 0, 0);
    #[cfg(target_arch = "x86_64")]
    SYS_eventfd => raw_fd(libc::SYS_eventfd, a, 0, 0, 0, 0, 0);
    #[cfg(target_arch = "x86_64")]
    SYS_inotify_init => raw_fd(libc::SYS_inotify_init, 0, 0, 0, 0, 0, 0);
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_create => noting_set(raw_fd(libc::SYS_epoll_create, a, 0, 0, 0, 0, 0));
    // With an fd of -1 these two make a new signalfd, else they change an old one.
    SYS_signalfd4 => if a as c_int == -1 { raw_fd(libc::SYS_signalfd4, a, b, c, d, 0, 0) } else { Bypass };
    #[cfg(target_arch = "x86_64")]
    SYS_signalfd => if a as c_int == -1 { raw_fd(libc::SYS_signalfd, a, b, c, 0, 0, 0) } else { Bypass };

    SYS_rt_sigaction => fault::raw_sigaction(a as _, b, c, d);
    SYS_execve => raw_exec(libc::SYS_execve, a, b, c, 0, 0);
    SYS_execveat => raw_exec(libc::SYS_execveat, a, b, c, d, e);
    SYS_exit_group => { ops::exiting(); Bypass };
    SYS_exit => { if ops::thread_exiting() { syscall6(libc::SYS_exit_group, a, 0, 0, 0, 0, 0).ok(); } Bypass };
}
