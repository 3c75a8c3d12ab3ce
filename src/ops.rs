//! What each interposed call does: the preload crate's hooks are one
//! expression each, and all logic starts here.

use crate::stats::Why;
use crate::sys::{self, sys, Errno};
use crate::{
    bg, copy, epoll, fds, foreign, io, limits, options, pins, poll, process, retire, signals, streams, table, transfer,
};
use libc::{
    c_char, c_int, c_uint, c_void, epoll_event, fd_set, iovec, msghdr, off64_t, pollfd, sigset_t, size_t, socklen_t,
};

/// What became of an interposed call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Not ours: the hook calls the real libc function with the same arguments.
    Bypass,
    /// Served by us: the hook returns this value.
    Done(isize),
    /// Served by us: the hook sets `errno` to this and returns -1.
    Fail(Errno),
}

/// As the system call has ended.
impl From<sys::SysResult> for Outcome {
    fn from(r: sys::SysResult) -> Outcome {
        match r {
            Ok(v) => Outcome::Done(v as isize),
            Err(e) => Outcome::Fail(e),
        }
    }
}

/// The library is loaded.
///
/// # Safety
/// To be called once, before other threads run.
pub unsafe fn init() {
    process::init();
}

/// The process ends.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn exiting() {
    process::exiting();
}

/// The calling thread ends by a system call of its own. Whether the process does: the library's threads are none of the program's.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn thread_exiting() -> bool {
    // (Where the program filters calls the library's threads have ended before, and looking for them may be forbidden.)
    let last = !retire::is_retired() && bg::is_last();
    if last {
        process::exiting();
    }
    last
}

/// Before fork.
///
/// # Safety
/// To be followed by `forked` or `fork_child`.
pub unsafe fn fork_prepare() {
    process::fork_prepare();
}

/// After fork, in the parent, before its result is known.
///
/// # Safety
/// See `fork_prepare`.
pub unsafe fn fork_is_over() {
    process::fork_is_over();
}

/// After fork, in the parent, where its result is known: the child's id, or less than 0.
///
/// # Safety
/// See `fork_prepare`.
pub unsafe fn forked(child: c_int) {
    process::forked(child);
}

/// After fork, in the child.
///
/// # Safety
/// See `fork_prepare`.
pub unsafe fn fork_child() {
    process::fork_child();
}

/// Before exec. `path` is null where it is not known.
///
/// # Safety
/// `path` and `envp` are null or as for `execve(2)`.
pub unsafe fn exec_prepare(path: *const c_char, envp: *const *const c_char) {
    process::exec_prepare();
    if process::is_active() {
        // SAFETY: the caller's promise.
        unsafe { foreign::prepare(path, envp) };
    }
    limits::before_exec();
}

/// Where a program is that is searched for by this name; null where that is not known. The path may be in `place`.
///
/// # Safety
/// `file` is null or a string.
pub unsafe fn found(file: *const c_char, place: &mut [u8; libc::PATH_MAX as usize]) -> *const c_char {
    if !process::is_active() {
        return core::ptr::null();
    }
    // SAFETY: the caller's promise.
    unsafe { foreign::search(file, place) }
}

/// `posix_spawn_file_actions_init(3)`.
pub fn spawn_begins(acts: *const c_void) {
    foreign::new_actions(acts as usize);
}

/// `posix_spawn_file_actions_adddup2(3)`: a child may get this fd.
pub fn spawn_gives(acts: *const c_void, fd: c_int) {
    foreign::give(acts as usize, fd);
}

/// Before `posix_spawn(3)`. True: [`spawned`] is to be called after it.
///
/// # Safety
/// `path` and `envp` are null or as for `execve(2)`.
pub unsafe fn spawn_prepare(path: *const c_char, envp: *const *const c_char, acts: *const c_void) -> bool {
    about_to_bear();
    // SAFETY: the caller's promise.
    process::is_active() && process::spawn_prepare(acts as usize, unsafe { foreign::is_preloaded(path, envp) })
}

/// Before the process has a child by other ways than `fork`.
pub fn about_to_bear() {
    if process::is_active() && !process::is_guest() {
        bg::bear();
    }
}

/// A child has been spawned, or (0) was not.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn spawned(child: c_int) {
    process::spawned(child);
}

/// exec has failed: the program goes on.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn exec_failed() {
    limits::exec_failed();
    process::exec_failed();
}

/// A thread is about to be started with this function.
pub fn thread_new(start: usize) {
    if !bg::entries().contains(&start) {
        process::another_thread();
    }
}

/// A call has returned this fd number: whatever it was before is gone.
#[inline]
pub fn fd_new(fd: c_int) {
    if !table::is_foreign(fd) {
        fds::stale(fd);
    }
}

/// `socket(2)` has returned `fd`. To be called after [`fd_new`].
pub fn socket_new(fd: c_int, family: c_int, kind: c_int, protocol: c_int) {
    fds::created(fd, family, kind, protocol);
}

/// The program sets up an io_uring, by which it can use any socket out of our sight: all stay on, or return
/// to, TCP.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn no_more_rings() {
    process::no_more_rings();
}

/// The program is about to install a filter of system calls.
pub fn confining() {
    retire::retire();
}

/// The kernel has refused what it allows only to a process of one thread. Whether it is worth asking again.
pub fn leave_alone() -> bool {
    retire::leave_alone()
}

/// libc is about to use `fd` by itself, where we do not see it: a connection stays on, or returns to, TCP.
pub fn to_kernel(fd: c_int) {
    table::each_record(fd, |c| process::give_up(c, Why::LibcWrites));
}

/// As [`to_kernel`]; libc is about to read there. What cannot return, because its sender is gone, must not look to it
/// like the end of the stream.
pub fn to_reader(fd: c_int) {
    table::each_record(fd, |c| process::give_up(c, Why::Libc));
}

/// libc is about to close `fd`, which has a stream, by itself.
pub fn closing(fd: c_int) {
    streams::ended(fd);
    if !table::is_foreign(fd) {
        fds::replaced(fd);
    }
}

/// `connect(2)` to `AF_UNSPEC` has succeeded. To be called with a connection that is on TCP.
pub fn disconnected(fd: c_int) {
    fds::disconnected(fd);
}

/// `epoll_create(2)` has returned `fd`. To be called after [`fd_new`].
pub fn epoll_new(fd: c_int) {
    epoll::created(fd);
}

/// `pidfd_getfd(2)` has returned `fd`, which is `theirs` to that process. To be called after [`fd_new`]. Waits while that
/// process brings a connection home.
pub fn got_fd(pidfd: c_int, theirs: c_int, fd: c_int) {
    if process::is_active() {
        foreign::got(pidfd, theirs, fd);
    }
}

/// `accept4(2)` has returned `fd`. `flags`: as they were given to it.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn accepted(listener: c_int, fd: c_int, flags: c_int) {
    // The same bit; and of a listener's status flags an accepted socket inherits none on Linux.
    const _: () = assert!(libc::SOCK_NONBLOCK == libc::O_NONBLOCK);
    fds::opened(fd, Some(listener), Some(flags));
    streamed(fd);
}

/// `connect(2)` has succeeded (`waited`) or begun.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn connecting(fd: c_int, waited: bool) {
    // One that does not wait succeeds only if it does nothing before the first send.
    let flags = (waited && !crate::options::connects_late()).then_some(0);
    fds::opened(fd, None, flags);
    streamed(fd);
    crate::epoll::kernel_has_news();
}

macro_rules! foreign {
    ($fd:expr) => {
        if table::is_foreign($fd) {
            return Outcome::Bypass;
        }
    };
}

/// The same of a call that may make an fd of the kernel's ready that the program waits for, or this one.
macro_rules! foreign_news {
    ($fd:expr) => {
        if table::is_foreign($fd) {
            return kernels_own();
        }
    };
}

/// The kernel's, whose sets may have news of it.
#[inline(always)]
fn kernels_own() -> Outcome {
    tells_kernel();
    Outcome::Bypass
}

/// libc is about to do something to an fd of the kernel's that may be in a set.
#[inline(always)]
pub fn tells_kernel() {
    epoll::kernel_is_stirred();
}

/// `recv(2)`, `read(2)`.
///
/// # Safety
/// As for the call.
#[inline(always)]
pub unsafe fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> Outcome {
    let Some(at) = table::Place::of(fd) else { return Outcome::Bypass };
    let noted = at.noted();
    if noted == 0 {
        return Outcome::Bypass;
    }
    // SAFETY: noted just now.
    if let Some(c) = unsafe { table::settled(noted) }.filter(|c| c.is_managed()) {
        // SAFETY: the caller's promise.
        if let Some(n) = unsafe { io::steady::recv(at, c, buf, len, flags) } {
            return Outcome::Done(n.get() as isize);
        }
    }
    // SAFETY: as above.
    unsafe { recv_otherwise(fd, buf, len, flags) }
}

#[inline(never)]
unsafe fn recv_otherwise(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> Outcome {
    // SAFETY: the caller's promise.
    let quick = io::young::conn(fd).and_then(|c| unsafe { io::young::recv(c, fd, buf, len, flags) });
    // SAFETY: as above.
    quick.unwrap_or_else(|| unsafe { io::recv(fd, &io::one(buf, len), core::ptr::null_mut(), flags) })
}

/// The most buffers that the kernel takes in one call (`UIO_MAXIOV`).
const MAX_VECTORS: usize = 1024;

/// The bytes that an array of buffers has room for, if it is one that the kernel would take.
///
/// # Safety
/// None: there may be no array.
pub unsafe fn total(iov: *const iovec, n: usize) -> Option<usize> {
    if n > MAX_VECTORS || !copy::is_there(iov, n) {
        return None;
    }
    let mut sum = 0usize;
    for i in 0..n {
        // SAFETY: it was just looked for.
        let len = unsafe { (*iov.add(i)).iov_len };
        if len > isize::MAX as usize {
            return None;
        }
        sum = sum.saturating_add(len);
    }
    Some(sum)
}

/// Such an array, and the bytes that it has room for.
///
/// # Safety
/// As above.
unsafe fn vector<'a>(iov: *const iovec, n: usize) -> Option<(&'a [iovec], usize)> {
    // SAFETY: none is needed; then, it has just been read.
    unsafe { total(iov, n).filter(|_| n > 0).map(|all| (core::slice::from_raw_parts(iov, n), all)) }
}

/// `readv(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn recvv(fd: c_int, iov: *const iovec, n: usize, flags: c_int) -> Outcome {
    foreign!(fd);
    // SAFETY: the caller's promise.
    match unsafe { vector(iov, n) } {
        // SAFETY: the caller's promise.
        Some(([one], 1..)) => unsafe { recv(fd, one.iov_base, one.iov_len, flags) },
        // SAFETY: the caller's promise.
        Some((v, 1..)) => unsafe { io::recv(fd, v, core::ptr::null_mut(), flags) },
        // Like `read` of nothing, the kernel does not look at the socket.
        Some(_) | None => Outcome::Bypass,
    }
}

/// `recvmsg(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> Outcome {
    if !pins::is_whole() {
        foreign!(fd);
    }
    if msg.is_null() {
        return Outcome::Bypass;
    }
    // As the kernel does it: a copy, and what has changed is written back.
    let Some(mut m) = header(msg) else { return Outcome::Bypass };
    // SAFETY: the caller's promise.
    unsafe {
        let Some(v) = parts(m.msg_iov, m.msg_iovlen) else { return Outcome::Bypass };
        let o = io::recv(fd, v, &mut m, flags);
        match o {
            Outcome::Done(_) => tell(msg, &m).map_or(Outcome::Fail(libc::EFAULT), |()| o),
            _ => o,
        }
    }
}

/// A message's buffers. Unlike an array for `readv` it may have none, and is of no bytes then.
///
/// # Safety
/// As for [`total`].
unsafe fn parts<'a>(iov: *const iovec, n: usize) -> Option<&'a [iovec]> {
    match n {
        0 => Some(&[]),
        // SAFETY: the caller's promise.
        n => unsafe { vector(iov, n) }.map(|(v, _)| v),
    }
}

/// A copy of a message's header.
fn header(msg: *const msghdr) -> Option<msghdr> {
    if !copy::is_there(msg, 1) {
        return None;
    }
    // SAFETY: it was just looked for; all-zero is one. Word by word, as programs write it: larger loads would have to wait for
    // all of that.
    unsafe {
        let mut m: msghdr = core::mem::zeroed();
        m.msg_name = (&raw const (*msg).msg_name).read_volatile();
        m.msg_namelen = (&raw const (*msg).msg_namelen).read_volatile();
        m.msg_iov = (&raw const (*msg).msg_iov).read_volatile();
        m.msg_iovlen = (&raw const (*msg).msg_iovlen).read_volatile();
        m.msg_control = (&raw const (*msg).msg_control).read_volatile();
        m.msg_controllen = (&raw const (*msg).msg_controllen).read_volatile();
        Some(m)
    }
}

/// Writes to a message's header what a receive has said in its copy.
fn tell(msg: *mut msghdr, m: &msghdr) -> Result<(), copy::Fault> {
    let at = |offset: usize| msg.wrapping_byte_add(offset);
    if !m.msg_name.is_null() {
        copy::write(at(core::mem::offset_of!(msghdr, msg_namelen)).cast(), m.msg_namelen)?;
    }
    const LENGTH: usize = core::mem::offset_of!(msghdr, msg_controllen);
    const _: () = assert!(core::mem::offset_of!(msghdr, msg_flags) == LENGTH + 8);
    // SAFETY: none is needed.
    unsafe { copy::put(at(LENGTH).cast(), m.msg_controllen as u64, m.msg_flags as u32) }
}

/// What `recvmmsg` looks at first: an error that is still to be reported.
pub fn pending_error(fd: c_int) -> Option<crate::sys::Errno> {
    if table::is_foreign(fd) {
        return None;
    }
    io::asked_error(fd, table::conn(fd)?)
}

/// `send(2)`, `write(2)`.
///
/// # Safety
/// As for the call.
#[inline(always)]
pub unsafe fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> Outcome {
    let Some(at) = table::Place::of(fd) else { return kernels_own() };
    let noted = at.noted();
    if noted == 0 {
        return kernels_own();
    }
    // SAFETY: noted just now.
    if let Some(c) = unsafe { table::settled(noted) }.filter(|c| c.is_managed()) {
        // SAFETY: the caller's promise.
        if let Some(n) = unsafe { io::steady::send(at, c, buf, len, flags) } {
            return Outcome::Done(n.get() as isize);
        }
    }
    // SAFETY: as above.
    unsafe { send_otherwise(fd, buf, len, flags) }
}

#[inline(never)]
unsafe fn send_otherwise(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> Outcome {
    // SAFETY: the caller's promise.
    let quick = io::young::conn(fd).and_then(|c| unsafe { io::young::send(c, fd, buf, len, flags) });
    // SAFETY: as above.
    quick.unwrap_or_else(|| unsafe { io::send(fd, &io::one(buf, len), core::ptr::null(), flags) })
}

/// `writev(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn sendv(fd: c_int, iov: *const iovec, n: usize, flags: c_int) -> Outcome {
    foreign_news!(fd);
    // SAFETY: the caller's promise.
    match unsafe { vector(iov, n) } {
        // SAFETY: the caller's promise.
        Some((v, all @ 1..)) => unsafe { sendv_of(fd, (v, all), core::ptr::null(), flags) },
        // As above.
        Some(_) | None => Outcome::Bypass,
    }
}

/// Buffers as the kernel would take them, with how many bytes these are, of a message that has no more than these.
///
/// # Safety
/// `v` must describe readable memory; `msg` is null or valid.
unsafe fn sendv_of(fd: c_int, (v, all): (&[iovec], usize), msg: *const msghdr, flags: c_int) -> Outcome {
    let quick = match io::young::conn(fd).filter(|_| all > 0) {
        // Of a call whose number may be another's by now.
        _ if pins::is_whole() => None,
        // SAFETY: the caller's promise.
        Some(c) => unsafe { io::young::sendv(c, fd, v, all, flags) },
        // SAFETY: as above.
        None => unsafe { io::steady::sendv(fd, v, flags) }.map(|n| Outcome::Done(n.get() as isize)),
    };
    // SAFETY: as above.
    quick.unwrap_or_else(|| unsafe { io::send(fd, v, msg, flags) })
}

/// `sendmsg(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> Outcome {
    if msg.is_null() {
        return Outcome::Bypass;
    }
    if table::is_foreign(fd) && !pins::is_whole() {
        if !table::is_without_tcp() {
            if let Some(m) = header(msg) {
                if m.msg_controllen > 0 {
                    // SAFETY: the caller's promise.
                    unsafe { process::passing_fds(&m) };
                }
            }
        }
        return kernels_own();
    }
    if !copy::is_there(msg, 1) {
        return Outcome::Bypass;
    }
    // SAFETY: it was just looked for; the caller's promise.
    unsafe {
        match vector((*msg).msg_iov, (*msg).msg_iovlen) {
            Some(all) if (*msg).msg_controllen == 0 && (*msg).msg_name.is_null() => sendv_of(fd, all, msg, flags),
            _ => parts((*msg).msg_iov, (*msg).msg_iovlen).map_or(Outcome::Bypass, |v| io::send(fd, v, msg, flags)),
        }
    }
}

/// `sendfile(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn sendfile(out: c_int, inp: c_int, off: *mut off64_t, n: size_t) -> Outcome {
    foreign_news!(out);
    // SAFETY: the caller's promise.
    unsafe { transfer::sendfile(out, inp, off, n) }
}

/// `splice(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn splice(
    inp: c_int,
    offin: *mut off64_t,
    out: c_int,
    offout: *mut off64_t,
    n: size_t,
    flags: c_uint,
) -> Outcome {
    if table::is_foreign(inp) && table::is_foreign(out) {
        return kernels_own();
    }
    // SAFETY: the caller's promise.
    unsafe { transfer::splice(inp, offin, out, offout, n, flags) }
}

/// `shutdown(2)`.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn shutdown(fd: c_int, how: c_int) -> Outcome {
    foreign_news!(fd);
    fds::shutdown(fd, how)
}

/// `getpeername(2)`.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn getpeername(fd: c_int) -> Outcome {
    foreign!(fd);
    fds::getpeername(fd)
}

/// `close(2)`.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn close(fd: c_int) -> Outcome {
    if table::is_foreign(fd) && !process::is_own_fd(fd) {
        return kernels_own();
    }
    fds::close(fd)
}

/// `close_range(2)`, `closefrom(3)`.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> Outcome {
    fds::close_range(first, last, flags)
}

/// `dup(2)` or `F_DUPFD` has made `new` of `old`.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn dup_new(old: c_int, new: c_int) {
    fd_new(new);
    if !table::is_foreign(old) {
        fds::duplicated(old, new);
        streamed(new);
    }
}

/// `dup2(2)`, `dup3(2)`.
///
/// # Safety
/// None; `unsafe` for the hooks' uniformity.
pub unsafe fn dup2(old: c_int, new: c_int, flags: Option<c_int>) -> Outcome {
    if table::is_foreign(old) && table::is_foreign(new) && !process::is_own_fd(new) {
        return Outcome::Bypass;
    }
    let done = fds::dup2(old, new, flags);
    streamed(new);
    done
}

/// A connection whose number has a stream is libc's.
fn streamed(fd: c_int) {
    if !table::is_foreign(fd) && streams::has(fd) && !process::is_guest() {
        match fd {
            libc::STDOUT_FILENO | libc::STDERR_FILENO => to_kernel(fd),
            _ => to_reader(fd),
        }
    }
}

/// libc has made a stream of `fd`.
pub fn stream_made(fd: c_int) {
    streams::made(fd);
}

/// `fcntl(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn fcntl(fd: c_int, cmd: c_int, arg: usize) -> Outcome {
    foreign!(fd);
    // SAFETY: the caller's promise.
    unsafe { options::fcntl(fd, cmd, arg) }
}

/// `ioctl(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn ioctl(fd: c_int, req: u64, arg: usize) -> Outcome {
    foreign!(fd);
    // SAFETY: the caller's promise.
    unsafe { options::ioctl(fd, req, arg) }
}

/// `getsockopt(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn getsockopt(fd: c_int, level: c_int, name: c_int, val: *mut c_void, len: *mut socklen_t) -> Outcome {
    foreign!(fd);
    // SAFETY: the caller's promise.
    unsafe { options::getsockopt(fd, level, name, val, len) }
}

/// `setsockopt(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn setsockopt(fd: c_int, level: c_int, name: c_int, val: *const c_void, len: socklen_t) -> Outcome {
    foreign!(fd);
    // SAFETY: the caller's promise.
    unsafe { options::setsockopt(fd, level, name, val, len) }
}

/// `ppoll(2)` and its kin. `timeout_ns` < 0 waits for ever; `sigmask` may be null.
///
/// # Safety
/// As for the call.
pub unsafe fn poll(fds: *mut pollfd, n: usize, timeout_ns: i64, sigmask: *const sigset_t) -> Outcome {
    if table::is_without_tcp() {
        return Outcome::Bypass;
    }
    // SAFETY: the caller's promise.
    match masked(sigmask, || unsafe { poll::poll(fds, n, timeout_ns, sigmask) }) {
        Outcome::Done(0) if timeout_ns == 0 && !sigmask.is_null() => let_in(sigmask),
        o => o,
    }
}

/// For a call that looks with a mask, and has found nothing: a handler that is put off otherwise runs then.
#[cold]
fn let_in(mask: *const sigset_t) -> Outcome {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: no fds; `now` is readable, and the kernel looks whether the mask is.
    match unsafe { sys!(libc::SYS_ppoll, 0, 0, &raw const now, mask, 8) } {
        Err(e) => Outcome::Fail(e),
        Ok(_) => Outcome::Done(0),
    }
}

/// `pselect(2)` and its kin. `timeout_ns` < 0 waits for ever; `sigmask` may be null.
///
/// # Safety
/// As for the call.
pub unsafe fn select(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    timeout_ns: i64,
    sigmask: *const sigset_t,
) -> Outcome {
    if !process::is_active() {
        return Outcome::Bypass;
    }
    // SAFETY: the caller's promise.
    if !unsafe { crate::select::any(n, r, w, e, |fd| !table::is_foreign(fd)) } {
        return Outcome::Bypass;
    }
    // SAFETY: the caller's promise.
    masked(sigmask, || unsafe { crate::select::select(n, r, w, e, timeout_ns, sigmask) })
}

/// A call that waits with a mask, if it has one. What cannot be read the kernel looks at first.
#[inline(always)]
fn masked(mask: *const sigset_t, wait: impl FnOnce() -> Outcome) -> Outcome {
    if mask.is_null() {
        return wait();
    }
    if !copy::is_word(mask.cast()) {
        return Outcome::Bypass;
    }
    let Ok(_masked) = signals::Masked::new(mask) else { return Outcome::Bypass };
    wait()
}

/// `epoll_ctl(2)`.
///
/// # Safety
/// As for the call.
pub unsafe fn epoll_ctl(ep: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> Outcome {
    foreign_news!(fd);
    // SAFETY: the caller's promise.
    unsafe { epoll::ctl(ep, op, fd, ev) }
}

/// `epoll_wait(2)` and its kin.
///
/// # Safety
/// As for the call.
#[inline(always)]
pub unsafe fn epoll_wait(
    ep: c_int,
    evs: *mut epoll_event,
    max: c_int,
    timeout_ns: i64,
    sigmask: *const sigset_t,
) -> Outcome {
    // SAFETY: the caller's promise, here and below.
    let now = if timeout_ns == 0 && sigmask.is_null() { unsafe { epoll::look(ep, evs, max, sigmask) } } else { None };
    if let Some(o) = now {
        return o;
    }
    // SAFETY: as above.
    masked(sigmask, || unsafe { epoll::wait(ep, evs, max, timeout_ns, sigmask) })
}
