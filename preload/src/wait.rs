//! Waiting.

use core::mem::size_of;
use core::ptr;
use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use ringsock_core::dispatch as shape;
use ringsock_core::ops::{self, Outcome};

#[inline(always)]
unsafe fn in_millis(fds: *mut pollfd, n: nfds_t, ms: c_int) -> Outcome {
    ops::poll(fds, n as usize, shape::millis_ns(ms), ptr::null())
}

/// Whether an array of `size` bytes, as the compiler saw it, holds `n` entries.
fn fits(n: nfds_t, size: size_t) -> bool {
    n as usize <= size / size_of::<pollfd>()
}

/// `poll` and its kin; `call`: how the real function's system call is said to [`hook`].
macro_rules! polls {
    ($($call:tt)*) => {
        hook! { $($call)* fn poll(fds: *mut pollfd, n: nfds_t, ms: c_int) -> c_int = in_millis(fds, n, ms) }
        hook! { $($call)* fn __poll(fds: *mut pollfd, n: nfds_t, ms: c_int) -> c_int = in_millis(fds, n, ms) }
        hook! {
            $($call)* fn __poll_chk(fds: *mut pollfd, n: nfds_t, ms: c_int, size: size_t) -> c_int
                = if fits(n, size) { in_millis(fds, n, ms) } else { return real(fds, n, ms, size) }
        }
    };
}

/// `epoll_wait`, likewise.
macro_rules! epoll_waits {
    ($($call:tt)*) => {
        hook! {
            $($call)* fn epoll_wait(ep: c_int, evs: *mut epoll_event, max: c_int, ms: c_int) -> c_int
                = ops::epoll_wait(ep, evs, max, shape::millis_ns(ms), ptr::null())
        }
    };
}

#[cfg(target_arch = "x86_64")]
polls! { point(libc::SYS_poll) }
#[cfg(target_arch = "x86_64")]
epoll_waits! { point(libc::SYS_epoll_wait) }
// There are no such calls elsewhere.
#[cfg(not(target_arch = "x86_64"))]
polls! { point }
#[cfg(not(target_arch = "x86_64"))]
epoll_waits! { point }

hook! {
    point fn ppoll(fds: *mut pollfd, n: nfds_t, limit: *const timespec, mask: *const sigset_t) -> c_int
        = shape::ppoll(fds, n as usize, limit, mask)
}
hook! {
    point fn __ppoll_chk(
        fds: *mut pollfd, n: nfds_t, limit: *const timespec, mask: *const sigset_t, size: size_t,
    ) -> c_int = if fits(n, size) { shape::ppoll(fds, n as usize, limit, mask) } else { Outcome::Bypass }
}
hook! {
    point fn select(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, limit: *mut timeval) -> c_int
        = shape::select(n, r, w, e, limit)
}
hook! {
    point fn __select(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, limit: *mut timeval) -> c_int
        = shape::select(n, r, w, e, limit)
}
hook! {
    point fn pselect(
        n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, limit: *const timespec, mask: *const sigset_t,
    ) -> c_int = shape::pselect(n, r, w, e, limit, mask)
}

hook! { fn epoll_ctl(ep: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> c_int = ops::epoll_ctl(ep, op, fd, ev) }
hook! {
    point fn epoll_pwait(ep: c_int, evs: *mut epoll_event, max: c_int, ms: c_int, mask: *const sigset_t) -> c_int
        = ops::epoll_wait(ep, evs, max, shape::millis_ns(ms), mask)
}
hook! {
    point fn epoll_pwait2(
        ep: c_int, evs: *mut epoll_event, max: c_int, limit: *const timespec, mask: *const sigset_t,
    ) -> c_int = shape::epoll_pwait2(ep, evs, max, limit, mask)
}
