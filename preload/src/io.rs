//! Bytes.

use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off64_t, size_t, sockaddr, socklen_t, ssize_t, timespec};
use libc::{SYS_read, SYS_readv, SYS_recvfrom, SYS_recvmsg, SYS_sendmsg, SYS_sendto, SYS_write, SYS_writev};
use ringsock_core::dispatch as shape;
use ringsock_core::ops::{self, Outcome};
use ringsock_core::signals;

use crate::real::{finish, is_straight, keep_errno, straight};

hook! { point(SYS_read) fn read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t = shape::read(fd, buf, n) }
hook! { point(SYS_read) fn __read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t = shape::read(fd, buf, n) }
hook! { point(SYS_recvfrom) fn recv(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int) -> ssize_t = ops::recv(fd, buf, n, flags) }
hook! { point(SYS_readv) fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t = shape::readv(fd, iov, n, 0) }
hook! {
    point(SYS_recvfrom) fn recvfrom(
        fd: c_int, buf: *mut c_void, n: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t,
    ) -> ssize_t = shape::recvfrom(fd, buf, n, flags, addr, len)
}
hook! {
    point fn preadv2(fd: c_int, iov: *const iovec, n: c_int, at: off64_t, flags: c_int) -> ssize_t
        = shape::preadv2(fd, iov, n, at, flags)
}
hook! {
    point fn preadv64v2(fd: c_int, iov: *const iovec, n: c_int, at: off64_t, flags: c_int) -> ssize_t
        = shape::preadv2(fd, iov, n, at, flags)
}

// The fortified forms: the real function tells of the overflow and aborts.
hook! {
    point(SYS_read) fn __read_chk(fd: c_int, buf: *mut c_void, n: size_t, size: size_t) -> ssize_t
        = if n > size { return real(fd, buf, n, size) } else { shape::read(fd, buf, n) }
}
hook! {
    point fn __recv_chk(fd: c_int, buf: *mut c_void, n: size_t, size: size_t, flags: c_int) -> ssize_t
        = if n > size { Outcome::Bypass } else { ops::recv(fd, buf, n, flags) }
}
hook! {
    point fn __recvfrom_chk(
        fd: c_int, buf: *mut c_void, n: size_t, size: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t,
    ) -> ssize_t = if n > size { Outcome::Bypass } else { shape::recvfrom(fd, buf, n, flags, addr, len) }
}

hook! {
    fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
        signals::point();
        match ops::recvmsg(fd, msg, flags) {
            Outcome::Bypass => {
                let got = if is_straight() {
                    straight(SYS_recvmsg, [fd as usize, msg as usize, flags as usize])
                } else {
                    real(fd, msg, flags)
                };
                if got >= 0 && (*msg).msg_controllen > 0 {
                    keep_errno(|| shape::received_fds(msg));
                }
                got
            }
            served => finish(served),
        }
    }
}
hook! {
    fn recvmmsg(fd: c_int, msgs: *mut mmsghdr, n: c_uint, flags: c_int, limit: *mut timespec) -> c_int {
        signals::point();
        match shape::recvmmsg(fd, msgs, n, flags, limit) {
            Outcome::Bypass => {
                let got = real(fd, msgs, n, flags, limit);
                for i in 0..got.max(0) as usize {
                    let msg = &raw const (*msgs.add(i)).msg_hdr;
                    if (*msg).msg_controllen > 0 {
                        keep_errno(|| shape::received_fds(msg));
                    }
                }
                got
            }
            served => finish(served),
        }
    }
}

hook! { point(SYS_write) fn write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t = shape::write(fd, buf, n) }
hook! { point(SYS_write) fn __write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t = shape::write(fd, buf, n) }
hook! { point(SYS_writev) fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t = shape::writev(fd, iov, n, 0) }
hook! { point(SYS_sendto) fn send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> ssize_t = ops::send(fd, buf, n, flags) }
hook! { point(SYS_sendto) fn __send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> ssize_t = ops::send(fd, buf, n, flags) }
hook! {
    point(SYS_sendto) fn sendto(
        fd: c_int, buf: *const c_void, n: size_t, flags: c_int, addr: *const sockaddr, len: socklen_t,
    ) -> ssize_t = shape::sendto(fd, buf, n, flags, addr, len)
}
hook! { point(SYS_sendmsg) fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t = ops::sendmsg(fd, msg, flags) }
hook! {
    point fn sendmmsg(fd: c_int, msgs: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int = shape::sendmmsg(fd, msgs, n, flags)
}
hook! {
    point fn pwritev2(fd: c_int, iov: *const iovec, n: c_int, at: off64_t, flags: c_int) -> ssize_t
        = shape::pwritev2(fd, iov, n, at, flags)
}
hook! {
    point fn pwritev64v2(fd: c_int, iov: *const iovec, n: c_int, at: off64_t, flags: c_int) -> ssize_t
        = shape::pwritev2(fd, iov, n, at, flags)
}
hook! {
    fn sendfile(out: c_int, inp: c_int, at: *mut off64_t, n: size_t) -> ssize_t = ops::sendfile(out, inp, at, n)
}
hook! {
    fn sendfile64(out: c_int, inp: c_int, at: *mut off64_t, n: size_t) -> ssize_t = ops::sendfile(out, inp, at, n)
}
hook! {
    point fn splice(
        inp: c_int, at_in: *mut off64_t, out: c_int, at_out: *mut off64_t, n: size_t, flags: c_uint,
    ) -> ssize_t = ops::splice(inp, at_in, out, at_out, n, flags)
}
