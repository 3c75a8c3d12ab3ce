//! File descriptors: how they come, change and go.

use libc::{c_char, c_int, c_uint, c_ulong, c_void, mode_t, pid_t, sigset_t, sockaddr, socklen_t};
use ringsock_core::ops::{self, Outcome};

use crate::real::{finish, keep_errno};

/// Tells the core of a new descriptor: whatever it knew under that number is gone.
#[inline(always)]
unsafe fn new(fd: c_int) -> c_int {
    if fd >= 0 {
        keep_errno(|| ops::fd_new(fd));
    }
    fd
}

/// The same for two of them.
#[inline(always)]
unsafe fn new_pair(result: c_int, fds: *const c_int) -> c_int {
    if result == 0 {
        new(*fds);
        new(*fds.add(1));
    }
    result
}

// -------------------------------------------------------------------- sockets

hook! {
    fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int {
        let fd = new(real(family, kind, protocol));
        if fd >= 0 {
            ops::socket_new(fd, family, kind, protocol);
        }
        fd
    }
}
hook! {
    fn socketpair(family: c_int, kind: c_int, protocol: c_int, fds: *mut c_int) -> c_int {
        new_pair(real(family, kind, protocol, fds), fds)
    }
}

unsafe fn accepted(listener: c_int, fd: c_int, flags: c_int) -> c_int {
    if fd >= 0 {
        keep_errno(|| {
            ops::fd_new(fd);
            ops::accepted(listener, fd, flags);
        });
    }
    fd
}

hook! {
    fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int { accepted(fd, real(fd, addr, len), 0) }
}
hook! {
    fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
        accepted(fd, real(fd, addr, len, flags), flags)
    }
}

unsafe fn connecting(fd: c_int, addr: *const sockaddr, len: socklen_t, real: impl FnOnce() -> c_int) -> c_int {
    // To be connected to nothing: the socket is to forget its connection.
    let nowhere = !addr.is_null() && len >= 2 && (*addr).sa_family == libc::AF_UNSPEC as libc::sa_family_t;
    if nowhere {
        keep_errno(|| ops::to_kernel(fd));
    }
    let result = real();
    if nowhere {
        if result == 0 {
            keep_errno(|| ops::disconnected(fd));
        }
    } else if result == 0 || *libc::__errno_location() == libc::EINPROGRESS {
        keep_errno(|| ops::connecting(fd, result == 0));
    }
    result
}

hook! {
    fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
        connecting(fd, addr, len, || real(fd, addr, len))
    }
}
hook! {
    fn __connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
        connecting(fd, addr, len, || real(fd, addr, len))
    }
}
hook! { fn shutdown(fd: c_int, how: c_int) -> c_int = ops::shutdown(fd, how) }
hook! { fn getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int = ops::getpeername(fd) }
hook! {
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int
        = ops::getsockopt(fd, level, name, value, len)
}
hook! {
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int
        = ops::setsockopt(fd, level, name, value, len)
}

// -------------------------------------------------------- close and duplicate

hook! { point(libc::SYS_close) fn close(fd: c_int) -> c_int = ops::close(fd) }
hook! { point(libc::SYS_close) fn __close(fd: c_int) -> c_int = ops::close(fd) }
hook! { fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int = ops::close_range(first, last, flags) }
hook! {
    fn closefrom(low: c_int) -> () {
        // It has no way to fail: where the core cannot, libc tries by other means.
        if !matches!(ops::close_range(low.max(0) as c_uint, c_uint::MAX, 0), Outcome::Done(_)) {
            real(low);
        }
    }
}

unsafe fn duplicated(old: c_int, new: c_int) -> c_int {
    if new >= 0 {
        keep_errno(|| ops::dup_new(old, new));
    }
    new
}

hook! { fn dup(old: c_int) -> c_int { duplicated(old, real(old)) } }
hook! { fn dup2(old: c_int, new: c_int) -> c_int = ops::dup2(old, new, None) }
hook! { fn __dup2(old: c_int, new: c_int) -> c_int = ops::dup2(old, new, None) }
hook! { fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int = ops::dup2(old, new, Some(flags)) }

// Variadic in C. The third argument travels in the same register as that of a
// function with three, on both architectures, and whoever does not need it
// does not look at it.

#[inline(always)]
unsafe fn any_fcntl(fd: c_int, cmd: c_int, arg: usize, real: unsafe fn(c_int, c_int, usize) -> c_int) -> c_int {
    match ops::fcntl(fd, cmd, arg) {
        Outcome::Bypass if matches!(cmd, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) => duplicated(fd, real(fd, cmd, arg)),
        Outcome::Bypass => real(fd, cmd, arg),
        served => finish(served),
    }
}

hook! { fn fcntl(fd: c_int, cmd: c_int, arg: usize) -> c_int { any_fcntl(fd, cmd, arg, real) } }
hook! { fn __fcntl(fd: c_int, cmd: c_int, arg: usize) -> c_int { any_fcntl(fd, cmd, arg, real) } }
hook! { fn fcntl64(fd: c_int, cmd: c_int, arg: usize) -> c_int { any_fcntl(fd, cmd, arg, real) } }
hook! {
    /// The kernel takes 32 bits of the request; programs that keep it in an int extend its sign.
    fn ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int = ops::ioctl(fd, u64::from(request as u32), arg)
}

// ------------------------------------------------- everything else that opens

hook! { fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int { new(real(path, flags, mode)) } }
hook! { fn __open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int { new(real(path, flags, mode)) } }
hook! { fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int { new(real(path, flags, mode)) } }
hook! { fn __open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int { new(real(path, flags, mode)) } }
hook! {
    fn openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        new(real(dir, path, flags, mode))
    }
}
hook! {
    fn openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        new(real(dir, path, flags, mode))
    }
}
hook! { fn creat(path: *const c_char, mode: mode_t) -> c_int { new(real(path, mode)) } }
hook! { fn creat64(path: *const c_char, mode: mode_t) -> c_int { new(real(path, mode)) } }
hook! { fn __open_2(path: *const c_char, flags: c_int) -> c_int { new(real(path, flags)) } }
hook! { fn __open64_2(path: *const c_char, flags: c_int) -> c_int { new(real(path, flags)) } }
hook! { fn __openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int { new(real(dir, path, flags)) } }
hook! { fn __openat64_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int { new(real(dir, path, flags)) } }
hook! { fn pipe(fds: *mut c_int) -> c_int { new_pair(real(fds), fds) } }
hook! { fn pipe2(fds: *mut c_int, flags: c_int) -> c_int { new_pair(real(fds, flags), fds) } }
hook! { fn eventfd(count: c_uint, flags: c_int) -> c_int { new(real(count, flags)) } }
hook! {
    // It writes, inside libc.
    fn eventfd_write(fd: c_int, value: libc::eventfd_t) -> c_int {
        ops::tells_kernel();
        real(fd, value)
    }
}
hook! { fn timerfd_create(clock: c_int, flags: c_int) -> c_int { new(real(clock, flags)) } }
hook! {
    fn signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int {
        let result = real(fd, mask, flags);
        // Given an old one, it only changes its mask.
        if fd == -1 { new(result) } else { result }
    }
}
hook! { fn inotify_init() -> c_int { new(real()) } }
hook! { fn inotify_init1(flags: c_int) -> c_int { new(real(flags)) } }
hook! { fn memfd_create(name: *const c_char, flags: c_uint) -> c_int { new(real(name, flags)) } }
hook! { fn pidfd_open(pid: pid_t, flags: c_uint) -> c_int { new(real(pid, flags)) } }
hook! {
    fn pidfd_getfd(pidfd: c_int, theirs: c_int, flags: c_uint) -> c_int {
        let fd = new(real(pidfd, theirs, flags));
        if fd >= 0 {
            keep_errno(|| ops::got_fd(pidfd, theirs, fd));
        }
        fd
    }
}
hook! { fn fanotify_init(flags: c_uint, event_flags: c_uint) -> c_int { new(real(flags, event_flags)) } }
hook! { fn mkstemp(name: *mut c_char) -> c_int { new(real(name)) } }
hook! { fn mkstemp64(name: *mut c_char) -> c_int { new(real(name)) } }
hook! { fn mkostemp(name: *mut c_char, flags: c_int) -> c_int { new(real(name, flags)) } }
hook! { fn mkostemp64(name: *mut c_char, flags: c_int) -> c_int { new(real(name, flags)) } }
hook! { fn mkstemps(name: *mut c_char, suffix: c_int) -> c_int { new(real(name, suffix)) } }
hook! { fn mkstemps64(name: *mut c_char, suffix: c_int) -> c_int { new(real(name, suffix)) } }
hook! { fn mkostemps(name: *mut c_char, suffix: c_int, flags: c_int) -> c_int { new(real(name, suffix, flags)) } }
hook! { fn mkostemps64(name: *mut c_char, suffix: c_int, flags: c_int) -> c_int { new(real(name, suffix, flags)) } }
/// A new fd that is an epoll set.
#[inline(always)]
unsafe fn new_set(fd: c_int) -> c_int {
    let fd = new(fd);
    if fd >= 0 {
        keep_errno(|| ops::epoll_new(fd));
    }
    fd
}
hook! { fn epoll_create(size: c_int) -> c_int { new_set(real(size)) } }
hook! { fn epoll_create1(flags: c_int) -> c_int { new_set(real(flags)) } }
