//! What each interposed call does: the preload crate's hooks are one
//! expression each, and all logic starts here.

use crate::sys::Errno;
use libc::{c_int, c_uint, c_void, epoll_event, fd_set, iovec, msghdr, off64_t, pollfd, sigset_t, size_t, socklen_t};

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

pub unsafe fn init() {}
pub unsafe fn exiting() {}
pub unsafe fn fork_prepare() {}
pub unsafe fn fork_parent() {}
pub unsafe fn fork_child() {}
pub unsafe fn exec_prepare() {}
pub unsafe fn exec_failed() {}
pub fn fd_new(_fd: c_int) {}
pub unsafe fn accepted(_listener: c_int, _fd: c_int) {}
pub unsafe fn connecting(_fd: c_int) {}
pub unsafe fn recv(_fd: c_int, _buf: *mut c_void, _len: size_t, _flags: c_int) -> Outcome { Outcome::Bypass }
pub unsafe fn recvv(_fd: c_int, _iov: *const iovec, _n: usize, _flags: c_int) -> Outcome { Outcome::Bypass }
pub unsafe fn recvmsg(_fd: c_int, _msg: *mut msghdr, _flags: c_int) -> Outcome { Outcome::Bypass }
pub unsafe fn send(_fd: c_int, _buf: *const c_void, _len: size_t, _flags: c_int) -> Outcome { Outcome::Bypass }
pub unsafe fn sendv(_fd: c_int, _iov: *const iovec, _n: usize, _flags: c_int) -> Outcome { Outcome::Bypass }
pub unsafe fn sendmsg(_fd: c_int, _msg: *const msghdr, _flags: c_int) -> Outcome { Outcome::Bypass }
pub unsafe fn sendfile(_out: c_int, _inp: c_int, _off: *mut off64_t, _n: size_t) -> Outcome { Outcome::Bypass }
pub unsafe fn splice(_inp: c_int, _offin: *mut off64_t, _out: c_int, _offout: *mut off64_t, _n: size_t, _flags: c_uint) -> Outcome { Outcome::Bypass }
pub unsafe fn shutdown(_fd: c_int, _how: c_int) -> Outcome { Outcome::Bypass }
pub unsafe fn close(_fd: c_int) -> Outcome { Outcome::Bypass }
pub unsafe fn close_range(_first: c_uint, _last: c_uint, _flags: c_int) -> Outcome { Outcome::Bypass }
pub unsafe fn dup_new(_old: c_int, _new: c_int) {}
pub unsafe fn dup2(_old: c_int, _new: c_int, _flags: Option<c_int>) -> Outcome { Outcome::Bypass }
pub unsafe fn fcntl(_fd: c_int, _cmd: c_int, _arg: usize) -> Outcome { Outcome::Bypass }
pub unsafe fn ioctl(_fd: c_int, _req: u64, _arg: usize) -> Outcome { Outcome::Bypass }
pub unsafe fn getsockopt(_fd: c_int, _level: c_int, _name: c_int, _val: *mut c_void, _len: *mut socklen_t) -> Outcome { Outcome::Bypass }
pub unsafe fn setsockopt(_fd: c_int, _level: c_int, _name: c_int, _val: *const c_void, _len: socklen_t) -> Outcome { Outcome::Bypass }
/// `timeout_ns` < 0 waits for ever; `sigmask` may be null.
pub unsafe fn poll(_fds: *mut pollfd, _n: usize, _timeout_ns: i64, _sigmask: *const sigset_t) -> Outcome { Outcome::Bypass }
pub unsafe fn select(_n: c_int, _r: *mut fd_set, _w: *mut fd_set, _e: *mut fd_set, _timeout_ns: i64, _sigmask: *const sigset_t) -> Outcome { Outcome::Bypass }
pub unsafe fn epoll_ctl(_ep: c_int, _op: c_int, _fd: c_int, _ev: *mut epoll_event) -> Outcome { Outcome::Bypass }
pub unsafe fn epoll_wait(_ep: c_int, _evs: *mut epoll_event, _max: c_int, _timeout_ns: i64, _sigmask: *const sigset_t) -> Outcome { Outcome::Bypass }
