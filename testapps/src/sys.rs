//! Thin wrappers of the C library's socket calls: numbers in, `Result<_, errno>` out.
//!
//! The programs of this crate stand for unmodified ones, so every call goes through the C
//! library's own symbol, where a preloaded library can see it.

use libc::{c_int, c_void, pollfd, size_t, ssize_t};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::RawFd;

/// An `errno` value.
pub type Errno = i32;
/// What a call returns.
pub type R<T> = Result<T, Errno>;

/// The calling thread's `errno`.
pub fn errno() -> Errno {
    // SAFETY: the address that the C library gives is valid for the calling thread.
    unsafe { *libc::__errno_location() }
}

/// The text of an `errno`.
pub fn strerror(e: Errno) -> String {
    std::io::Error::from_raw_os_error(e).to_string()
}

fn size(r: ssize_t) -> R<usize> {
    if r < 0 {
        Err(errno())
    } else {
        Ok(r as usize)
    }
}

fn int(r: c_int) -> R<c_int> {
    if r < 0 {
        Err(errno())
    } else {
        Ok(r)
    }
}

/// `read(2)`.
pub fn read(fd: RawFd, b: &mut [u8]) -> R<usize> {
    // SAFETY: the buffer is valid for writes of its length.
    size(unsafe { libc::read(fd, b.as_mut_ptr() as *mut c_void, b.len()) })
}

/// `write(2)`.
pub fn write(fd: RawFd, b: &[u8]) -> R<usize> {
    // SAFETY: the buffer is valid for reads of its length.
    size(unsafe { libc::write(fd, b.as_ptr() as *const c_void, b.len()) })
}

/// `recv(2)`.
pub fn recv(fd: RawFd, b: &mut [u8], flags: c_int) -> R<usize> {
    // SAFETY: the buffer is valid for writes of its length.
    size(unsafe { libc::recv(fd, b.as_mut_ptr() as *mut c_void, b.len(), flags) })
}

/// `recv(2)` with no buffer, for `MSG_TRUNC`: TCP then discards `n` bytes.
pub fn recv_discard(fd: RawFd, n: usize, flags: c_int) -> R<usize> {
    // SAFETY: with MSG_TRUNC on TCP the kernel writes nothing to the buffer.
    size(unsafe { libc::recv(fd, std::ptr::null_mut(), n, flags | libc::MSG_TRUNC) })
}

/// `recvfrom(2)` without an address.
pub fn recvfrom(fd: RawFd, b: &mut [u8], flags: c_int) -> R<usize> {
    let (p, n) = (b.as_mut_ptr() as *mut c_void, b.len());
    // SAFETY: the buffer is valid for writes of its length; no address is asked for.
    size(unsafe { libc::recvfrom(fd, p, n, flags, std::ptr::null_mut(), std::ptr::null_mut()) })
}

/// `send(2)`; `MSG_NOSIGNAL` only if the caller says so.
pub fn send(fd: RawFd, b: &[u8], flags: c_int) -> R<usize> {
    // SAFETY: the buffer is valid for reads of its length.
    size(unsafe { libc::send(fd, b.as_ptr() as *const c_void, b.len(), flags) })
}

/// `sendto(2)` without an address.
pub fn sendto(fd: RawFd, b: &[u8], flags: c_int) -> R<usize> {
    // SAFETY: the buffer is valid for reads of its length; no address is given.
    size(unsafe { libc::sendto(fd, b.as_ptr() as *const c_void, b.len(), flags, std::ptr::null(), 0) })
}

/// Cuts a buffer into `parts` pieces of about the same size (empty ones are possible).
pub fn iovecs(b: &[u8], parts: usize) -> Vec<libc::iovec> {
    let parts = parts.max(1);
    let each = b.len().div_ceil(parts).max(1);
    let mut v = Vec::with_capacity(parts);
    for i in 0..parts {
        let (from, to) = ((i * each).min(b.len()), ((i + 1) * each).min(b.len()));
        v.push(libc::iovec { iov_base: b[from..to].as_ptr() as *mut c_void, iov_len: to - from });
    }
    v
}

/// `readv(2)` into `parts` pieces of the buffer.
pub fn readv(fd: RawFd, b: &mut [u8], parts: usize) -> R<usize> {
    let v = iovecs(b, parts);
    // SAFETY: the pieces lie within the buffer, which is borrowed for writing.
    size(unsafe { libc::readv(fd, v.as_ptr(), v.len() as c_int) })
}

/// `writev(2)` from `parts` pieces of the buffer.
pub fn writev(fd: RawFd, b: &[u8], parts: usize) -> R<usize> {
    let v = iovecs(b, parts);
    // SAFETY: the pieces lie within the buffer, which is borrowed for reading.
    size(unsafe { libc::writev(fd, v.as_ptr(), v.len() as c_int) })
}

/// A message header over pieces.
pub fn msghdr(v: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr.
    let mut h: libc::msghdr = unsafe { std::mem::zeroed() };
    h.msg_iov = v.as_mut_ptr();
    h.msg_iovlen = v.len() as _;
    h
}

/// `recvmsg(2)`; returns the length and `msg_flags`.
pub fn recvmsg(fd: RawFd, b: &mut [u8], parts: usize, flags: c_int) -> R<(usize, c_int)> {
    let mut v = iovecs(b, parts);
    let mut h = msghdr(&mut v);
    // SAFETY: the header points at pieces of the buffer, which is borrowed for writing.
    let n = size(unsafe { libc::recvmsg(fd, &mut h, flags) })?;
    Ok((n, h.msg_flags))
}

/// What a [`recvmsg_counted`] says.
#[derive(Debug, PartialEq)]
pub struct Counted {
    /// Bytes received.
    pub n: usize,
    /// The number that `TCP_INQ` has told, if all of it was.
    pub left: Option<c_int>,
    /// The length of the control data.
    pub told: usize,
    /// `msg_flags`.
    pub flags: c_int,
}

/// `recvmsg(2)` into `parts` pieces, with `room` bytes (64 at most) for control data, of which `TCP_INQ`'s are looked at.
pub fn recvmsg_counted(fd: RawFd, b: &mut [u8], parts: usize, flags: c_int, room: usize) -> R<Counted> {
    #[repr(C)]
    struct Control {
        header: libc::cmsghdr,
        left: c_int,
        beyond: [c_int; 11],
    }
    assert!(room <= std::mem::size_of::<Control>());
    // SAFETY: all-zero is one.
    let mut c: Control = unsafe { std::mem::zeroed() };
    c.beyond = [77; 11];
    let mut v = iovecs(b, parts);
    let mut h = msghdr(&mut v);
    if room > 0 {
        h.msg_control = (&raw mut c).cast();
    }
    h.msg_controllen = room as _;
    // SAFETY: the header points at pieces of the buffer, and at the room that it says, which are borrowed for writing.
    let n = size(unsafe { libc::recvmsg(fd, &mut h, flags) })?;
    let told = h.msg_controllen;
    // SAFETY: a sum of constants.
    let whole = unsafe { libc::CMSG_LEN(4) } as usize;
    let is_it = (c.header.cmsg_level, c.header.cmsg_type, c.header.cmsg_len as usize)
        == (libc::IPPROTO_TCP, libc::TCP_INQ, whole);
    assert_eq!(c.beyond, [77; 11], "what lies behind the number");
    Ok(Counted { n, left: (told > 0 && is_it).then_some(c.left), told, flags: h.msg_flags })
}

/// `recvmsg(2)` without any buffer.
pub fn recvmsg_nowhere(fd: RawFd, flags: c_int) -> R<usize> {
    // SAFETY: the header has no buffers.
    size(unsafe { libc::recvmsg(fd, &mut msghdr(&mut []), flags) })
}

/// `sendmsg(2)` without any buffer.
pub fn sendmsg_nothing(fd: RawFd, flags: c_int) -> R<usize> {
    // SAFETY: the header has no buffers.
    size(unsafe { libc::sendmsg(fd, &msghdr(&mut []), flags) })
}

/// `sendmsg(2)`.
pub fn sendmsg(fd: RawFd, b: &[u8], parts: usize, flags: c_int) -> R<usize> {
    let mut v = iovecs(b, parts);
    let h = msghdr(&mut v);
    // SAFETY: the header points at pieces of the buffer, which is borrowed for reading.
    size(unsafe { libc::sendmsg(fd, &h, flags) })
}

/// `recvmmsg(2)` into `msgs` pieces of the buffer; returns each message's length.
pub fn recvmmsg(fd: RawFd, b: &mut [u8], msgs: usize, flags: c_int) -> R<Vec<usize>> {
    let mut v = iovecs(b, msgs);
    let mut hs: Vec<libc::mmsghdr> =
        v.chunks_mut(1).map(|c| libc::mmsghdr { msg_hdr: msghdr(c), msg_len: 0 }).collect();
    let n = hs.len() as u32;
    // SAFETY: every header points at one piece of the buffer, which is borrowed for writing.
    let r = int(unsafe { libc::recvmmsg(fd, hs.as_mut_ptr(), n, flags as _, std::ptr::null_mut()) })?;
    Ok(hs[..r as usize].iter().map(|h| h.msg_len as usize).collect())
}

/// `sendmmsg(2)` from `msgs` pieces of the buffer; returns each message's length.
pub fn sendmmsg(fd: RawFd, b: &[u8], msgs: usize, flags: c_int) -> R<Vec<usize>> {
    let mut v = iovecs(b, msgs);
    let mut hs: Vec<libc::mmsghdr> =
        v.chunks_mut(1).map(|c| libc::mmsghdr { msg_hdr: msghdr(c), msg_len: 0 }).collect();
    let n = hs.len() as u32;
    // SAFETY: every header points at one piece of the buffer, which is borrowed for reading.
    let r = int(unsafe { libc::sendmmsg(fd, hs.as_mut_ptr(), n, flags as _) })?;
    Ok(hs[..r as usize].iter().map(|h| h.msg_len as usize).collect())
}

/// `poll(2)`.
pub fn poll(fds: &mut [pollfd], ms: c_int) -> R<usize> {
    // SAFETY: the array is valid for reads and writes of its length.
    int(unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as _, ms) }).map(|n| n as usize)
}

/// `poll(2)` on one fd: the events that are there, 0 when the time is over.
pub fn poll1(fd: RawFd, events: i16, ms: c_int) -> R<i16> {
    let mut p = [pollfd { fd, events, revents: 0 }];
    poll(&mut p, ms)?;
    Ok(p[0].revents)
}

/// Like [`poll1`], going on after a signal.
pub fn wait1(fd: RawFd, events: i16, ms: c_int) -> R<i16> {
    loop {
        match poll1(fd, events, ms) {
            Err(libc::EINTR) => continue,
            r => return r,
        }
    }
}

/// `ppoll(2)` on one fd with no signal mask.
pub fn ppoll1(fd: RawFd, events: i16, us: i64) -> R<i16> {
    let mut p = pollfd { fd, events, revents: 0 };
    let ts = libc::timespec { tv_sec: us / 1_000_000, tv_nsec: (us % 1_000_000) * 1000 };
    // SAFETY: one pollfd and one timespec, both valid for the call.
    int(unsafe { libc::ppoll(&mut p, 1, &ts, std::ptr::null()) })?;
    Ok(p.revents)
}

/// `select(2)` on lists of fds; returns those which are ready, as (readable, writable).
pub fn select(rd: &[RawFd], wr: &[RawFd], ms: i64) -> R<(Vec<RawFd>, Vec<RawFd>)> {
    let max = rd.iter().chain(wr).copied().max().unwrap_or(-1);
    assert!(max < 1024, "fd too large for select");
    let mut tv = libc::timeval { tv_sec: ms / 1000, tv_usec: (ms % 1000) * 1000 };
    // SAFETY: all-zero is an empty fd_set; all fds are below FD_SETSIZE; the pointers are valid.
    unsafe {
        let (mut r, mut w): (libc::fd_set, libc::fd_set) = (std::mem::zeroed(), std::mem::zeroed());
        rd.iter().for_each(|&f| libc::FD_SET(f, &mut r));
        wr.iter().for_each(|&f| libc::FD_SET(f, &mut w));
        int(libc::select(max + 1, &mut r, &mut w, std::ptr::null_mut(), &mut tv))?;
        let a = rd.iter().copied().filter(|&f| libc::FD_ISSET(f, &r)).collect();
        let b = wr.iter().copied().filter(|&f| libc::FD_ISSET(f, &w)).collect();
        Ok((a, b))
    }
}

/// `pselect(2)` for reading on one fd.
pub fn pselect_read(fd: RawFd, ms: i64) -> R<bool> {
    assert!(fd < 1024);
    let ts = libc::timespec { tv_sec: ms / 1000, tv_nsec: (ms % 1000) * 1_000_000 };
    let no: *mut libc::fd_set = std::ptr::null_mut();
    // SAFETY: all-zero is an empty fd_set, the fd is below FD_SETSIZE, the pointers are valid.
    unsafe {
        let mut r: libc::fd_set = std::mem::zeroed();
        libc::FD_SET(fd, &mut r);
        Ok(int(libc::pselect(fd + 1, &mut r, no, no, &ts, std::ptr::null()))? > 0)
    }
}

/// `epoll_create1(2)`.
pub fn epoll_create() -> R<RawFd> {
    // SAFETY: no pointers.
    int(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })
}

/// A new set that was waited for once by a call that the library sees: until then nothing that is in it leaves TCP.
pub fn epoll_awaited() -> R<RawFd> {
    let ep = epoll_create()?;
    epoll_wait(ep, 1, 0)?;
    Ok(ep)
}

/// `epoll_ctl(2)`.
pub fn epoll_ctl(ep: RawFd, op: c_int, fd: RawFd, events: u32, data: u64) -> R<()> {
    let mut e = libc::epoll_event { events, u64: data };
    // SAFETY: one event, valid for the call.
    int(unsafe { libc::epoll_ctl(ep, op, fd, &mut e) }).map(|_| ())
}

/// `epoll_wait(2)`: (events, data) of each.
pub fn epoll_wait(ep: RawFd, max: usize, ms: c_int) -> R<Vec<(u32, u64)>> {
    let mut v = vec![libc::epoll_event { events: 0, u64: 0 }; max];
    // SAFETY: the array is valid for writes of its length.
    let n = int(unsafe { libc::epoll_wait(ep, v.as_mut_ptr(), max as c_int, ms) })? as usize;
    Ok(v[..n].iter().map(|e| (e.events, e.u64)).collect())
}

/// `epoll_pwait(2)` without a mask.
pub fn epoll_pwait(ep: RawFd, max: usize, ms: c_int) -> R<Vec<(u32, u64)>> {
    let mut v = vec![libc::epoll_event { events: 0, u64: 0 }; max];
    let p = v.as_mut_ptr();
    // SAFETY: the array is valid for writes of its length.
    let n = int(unsafe { libc::epoll_pwait(ep, p, max as c_int, ms, std::ptr::null()) })? as usize;
    Ok(v[..n].iter().map(|e| (e.events, e.u64)).collect())
}

/// `close(2)`.
pub fn close(fd: RawFd) -> R<()> {
    // SAFETY: closing a number is the caller's decision; no memory is involved.
    int(unsafe { libc::close(fd) }).map(|_| ())
}

/// `shutdown(2)`.
pub fn shutdown(fd: RawFd, how: c_int) -> R<()> {
    // SAFETY: no pointers.
    int(unsafe { libc::shutdown(fd, how) }).map(|_| ())
}

/// `dup(2)`.
pub fn dup(fd: RawFd) -> R<RawFd> {
    // SAFETY: no pointers.
    int(unsafe { libc::dup(fd) })
}

/// `dup2(2)`.
pub fn dup2(from: RawFd, to: RawFd) -> R<RawFd> {
    // SAFETY: no pointers.
    int(unsafe { libc::dup2(from, to) })
}

/// `fcntl(2)` with a number.
pub fn fcntl(fd: RawFd, cmd: c_int, arg: c_int) -> R<c_int> {
    // SAFETY: only commands that take a number are used.
    int(unsafe { libc::fcntl(fd, cmd, arg) })
}

/// Turns `O_NONBLOCK` on or off by `fcntl`.
pub fn nonblock(fd: RawFd, on: bool) -> R<()> {
    let f = fcntl(fd, libc::F_GETFL, 0)?;
    let f = if on { f | libc::O_NONBLOCK } else { f & !libc::O_NONBLOCK };
    fcntl(fd, libc::F_SETFL, f).map(|_| ())
}

/// Turns `O_NONBLOCK` on or off by `ioctl(FIONBIO)`.
pub fn nonblock_ioctl(fd: RawFd, on: bool) -> R<()> {
    let mut v: c_int = on as c_int;
    // SAFETY: FIONBIO reads one int.
    int(unsafe { libc::ioctl(fd, libc::FIONBIO, &mut v) }).map(|_| ())
}

/// `ioctl(FIONREAD)`.
pub fn fionread(fd: RawFd) -> R<usize> {
    let mut v: c_int = 0;
    // SAFETY: FIONREAD writes one int.
    int(unsafe { libc::ioctl(fd, libc::FIONREAD, &mut v) })?;
    Ok(v as usize)
}

/// `ioctl(SIOCOUTQ)`.
pub fn siocoutq(fd: RawFd) -> R<usize> {
    let mut v: c_int = 0;
    // SAFETY: TIOCOUTQ is SIOCOUTQ's number and writes one int.
    int(unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &mut v) })?;
    Ok(v as usize)
}

/// `setsockopt(2)` with a plain value.
pub fn setsockopt<T: Copy>(fd: RawFd, level: c_int, name: c_int, v: T) -> R<()> {
    let (p, n) = (&v as *const T as *const c_void, std::mem::size_of::<T>() as libc::socklen_t);
    // SAFETY: a plain value of the length that is given.
    int(unsafe { libc::setsockopt(fd, level, name, p, n) }).map(|_| ())
}

/// `getsockopt(2)` of `SO_LINGER`.
pub fn linger(fd: RawFd) -> R<libc::linger> {
    let mut l = libc::linger { l_onoff: 0, l_linger: 0 };
    let mut n = std::mem::size_of_val(&l) as libc::socklen_t;
    // SAFETY: a value and its length, valid for writes.
    int(unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, (&raw mut l).cast(), &mut n) })?;
    Ok(l)
}

/// `getsockopt(2)` of an int.
pub fn getsockopt_int(fd: RawFd, level: c_int, name: c_int) -> R<c_int> {
    let mut v: c_int = 0;
    let mut n = std::mem::size_of::<c_int>() as libc::socklen_t;
    // SAFETY: one int and its length, valid for writes.
    int(unsafe { libc::getsockopt(fd, level, name, &mut v as *mut c_int as *mut c_void, &mut n) })?;
    Ok(v)
}

/// Sets `SO_RCVTIMEO` or `SO_SNDTIMEO`.
pub fn set_timeout(fd: RawFd, name: c_int, ms: i64) -> R<()> {
    let tv = libc::timeval { tv_sec: ms / 1000, tv_usec: (ms % 1000) * 1000 };
    setsockopt(fd, libc::SOL_SOCKET, name, tv)
}

/// Sets `SO_LINGER`.
pub fn set_linger(fd: RawFd, on: bool, secs: c_int) -> R<()> {
    let l = libc::linger { l_onoff: on as c_int, l_linger: secs };
    setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, l)
}

/// States of the kernel's TCP in which an end has been sent that is not acknowledged: FIN_WAIT1, LAST_ACK, CLOSING
/// (include/net/tcp_states.h).
pub const TCP_ENDS_ON_THEIR_WAY: [u8; 3] = [4, 9, 11];

/// Whether the kernel has a peer that has answered.
pub fn tcp_is_connected(fd: RawFd) -> R<bool> {
    const ESTABLISHED: u8 = 1;
    Ok(tcp_state(fd)? == ESTABLISHED)
}

/// The state of the kernel's TCP.
pub fn tcp_state(fd: RawFd) -> R<u8> {
    let mut state = 0u8;
    let mut n = 1 as libc::socklen_t;
    // SAFETY: a byte, which `struct tcp_info` begins with, and its length, valid for writes.
    int(unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut state).cast(), &mut n) })?;
    Ok(state)
}

/// Bytes that the kernel's TCP has sent and received on a socket (`TCP_INFO`'s
/// `tcpi_bytes_sent` and `tcpi_bytes_received`). This is how a program of ours knows, without
/// asking the library, whether its bytes still travel over TCP.
pub fn tcp_bytes(fd: RawFd) -> R<(u64, u64)> {
    let mut b = [0u64; 64];
    let mut n = std::mem::size_of_val(&b) as libc::socklen_t;
    // SAFETY: a buffer and its length, valid for writes.
    int(unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, b.as_mut_ptr() as *mut c_void, &mut n) })?;
    // struct tcp_info: 8 bytes, 24 u32, pacing_rate, max_pacing_rate, bytes_acked, bytes_received
    // (the 17th u64); eight more u64 lie before bytes_sent.
    Ok((b[25], b[16]))
}

/// How many bytes the TCP socket itself was given, with those that it has not sent yet (none may have been repeated), and how
/// many of them have come.
pub fn tcp_written(fd: RawFd) -> R<(u64, u64)> {
    let mut b = [0u64; 64];
    let mut n = std::mem::size_of_val(&b) as libc::socklen_t;
    // SAFETY: a buffer and its length, valid for writes.
    int(unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, b.as_mut_ptr() as *mut c_void, &mut n) })?;
    // See `tcp_bytes`: bytes_sent, and notsent_bytes behind the two counts of segments; bytes_acked.
    Ok((b[25] + u64::from(b[18] as u32), b[15]))
}

/// `pipe(2)`: (read end, write end).
pub fn pipe() -> R<(RawFd, RawFd)> {
    let mut p = [0; 2];
    // SAFETY: room for two ints.
    int(unsafe { libc::pipe2(p.as_mut_ptr(), libc::O_CLOEXEC) })?;
    Ok((p[0], p[1]))
}

/// A pair of connected Unix stream sockets.
pub fn socketpair() -> R<(RawFd, RawFd)> {
    let mut p = [0; 2];
    // SAFETY: room for two ints.
    int(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, p.as_mut_ptr()) })?;
    Ok((p[0], p[1]))
}

/// `splice(2)` without offsets.
pub fn splice(from: RawFd, to: RawFd, n: size_t, flags: u32) -> R<usize> {
    let no = std::ptr::null_mut();
    // SAFETY: no offsets are given.
    size(unsafe { libc::splice(from, no, to, no, n, flags) })
}

/// `sendfile(2)` at an offset, which is moved.
pub fn sendfile(out: RawFd, file: RawFd, off: &mut i64, n: usize) -> R<usize> {
    // SAFETY: the offset is valid for reads and writes.
    size(unsafe { libc::sendfile(out, file, off, n) })
}

/// The address that servers listen at and clients connect to: `RS_APP_HOST`, or 127.0.0.1.
pub fn host() -> IpAddr {
    let text = std::env::var("RS_APP_HOST").unwrap_or_default();
    text.parse().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// An address of the C library's kind, and its length.
fn sockaddr(host: IpAddr, port: u16) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: zeroes are valid.
    let mut s: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    // SAFETY: either kind of address fits.
    let len = unsafe {
        match host {
            IpAddr::V4(a) => {
                let to = &mut *(&raw mut s).cast::<libc::sockaddr_in>();
                (to.sin_family, to.sin_port) = (libc::AF_INET as u16, port.to_be());
                to.sin_addr.s_addr = u32::from_ne_bytes(a.octets());
                std::mem::size_of_val(to)
            }
            IpAddr::V6(a) => {
                let to = &mut *(&raw mut s).cast::<libc::sockaddr_in6>();
                (to.sin6_family, to.sin6_port) = (libc::AF_INET6 as u16, port.to_be());
                to.sin6_addr.s6_addr = a.octets();
                std::mem::size_of_val(to)
            }
        }
    };
    (s, len as libc::socklen_t)
}

/// A new TCP socket.
pub fn tcp_socket() -> R<RawFd> {
    tcp_socket_for(host())
}

/// A new TCP socket for addresses of this one's kind.
pub fn tcp_socket_for(host: IpAddr) -> R<RawFd> {
    let family = if host.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET };
    // SAFETY: no pointers.
    int(unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })
}

/// `connect(2)` to a port of [`host`].
pub fn connect_to(fd: RawFd, port: u16) -> R<()> {
    connect_to_host(fd, host(), port)
}

/// `connect(2)` to a port of a host.
pub fn connect_to_host(fd: RawFd, host: IpAddr, port: u16) -> R<()> {
    let (a, len) = sockaddr(host, port);
    // SAFETY: an address of the length that is given.
    int(unsafe { libc::connect(fd, &a as *const _ as *const libc::sockaddr, len) }).map(|_| ())
}

/// `bind(2)` to a port of a host.
pub fn bind_to_host(fd: RawFd, host: IpAddr, port: u16) -> R<()> {
    let (a, len) = sockaddr(host, port);
    // SAFETY: an address of the length that is given.
    int(unsafe { libc::bind(fd, &a as *const _ as *const libc::sockaddr, len) }).map(|_| ())
}

/// A listener on [`host`] (`port` 0: any): (fd, port).
pub fn listen(port: u16, backlog: c_int) -> R<(RawFd, u16)> {
    listen_at(host(), port, backlog)
}

/// A listener on an address of this machine (`port` 0: any): (fd, port).
pub fn listen_at(host: IpAddr, port: u16, backlog: c_int) -> R<(RawFd, u16)> {
    let fd = tcp_socket_for(host)?;
    setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1 as c_int)?;
    let (a, len) = sockaddr(host, port);
    // SAFETY: an address of the length that is given; then no pointers.
    unsafe {
        int(libc::bind(fd, &a as *const _ as *const libc::sockaddr, len))?;
        int(libc::listen(fd, backlog))?;
    }
    Ok((fd, sockname(fd, false)?.1))
}

/// `connect(2)` of a fresh socket to [`host`], `TCP_NODELAY` set.
pub fn connect(port: u16) -> R<RawFd> {
    connect_at(host(), port, |_| Ok(()))
}

/// The same, `with` the socket before.
pub fn connect_as(port: u16, with: impl FnOnce(RawFd) -> R<()>) -> R<RawFd> {
    connect_at(host(), port, with)
}

/// The same, to any host.
pub fn connect_at(host: IpAddr, port: u16, with: impl FnOnce(RawFd) -> R<()>) -> R<RawFd> {
    let fd = tcp_socket_for(host)?;
    if let Err(e) = with(fd).and_then(|()| connect_to_host(fd, host, port)) {
        close(fd)?;
        return Err(e);
    }
    nodelay(fd)?;
    Ok(fd)
}

/// `accept4(2)`.
pub fn accept(listener: RawFd, flags: c_int) -> R<RawFd> {
    let no = std::ptr::null_mut();
    // SAFETY: no address is asked for.
    let fd = int(unsafe { libc::accept4(listener, no, std::ptr::null_mut(), flags) })?;
    nodelay(fd)?;
    Ok(fd)
}

/// Sets `TCP_NODELAY`.
pub fn nodelay(fd: RawFd) -> R<()> {
    setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1 as c_int)
}

/// `getsockname(2)` or `getpeername(2)`: (IPv4 address, port). Of an IPv6 socket only the port means anything.
pub fn sockname(fd: RawFd, peer: bool) -> R<([u8; 4], u16)> {
    // SAFETY: zeroes are valid.
    let mut a: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut n = std::mem::size_of_val(&a) as libc::socklen_t;
    let p = &mut a as *mut _ as *mut libc::sockaddr;
    // SAFETY: room for one address of the length that is given.
    int(unsafe {
        if peer {
            libc::getpeername(fd, p, &mut n)
        } else {
            libc::getsockname(fd, p, &mut n)
        }
    })?;
    // SAFETY: the port lies at the same place in both kinds.
    let a = unsafe { &*(&raw const a).cast::<libc::sockaddr_in>() };
    Ok((a.sin_addr.s_addr.to_ne_bytes(), u16::from_be(a.sin_port)))
}

/// `fork(2)`: the child's pid in the parent, 0 in the child.
pub fn fork() -> R<libc::pid_t> {
    // SAFETY: callers do not hold locks of this crate, and a child uses plain calls only.
    int(unsafe { libc::fork() })
}

/// Ends a forked child in the ordinary way (exit handlers run, so a report is written).
pub fn exit(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::exit(code) }
}

/// `waitpid(2)`: the raw status.
pub fn waitpid(pid: libc::pid_t) -> R<c_int> {
    let mut st = 0;
    // SAFETY: room for one int.
    while let Err(e) = int(unsafe { libc::waitpid(pid, &mut st, 0) }) {
        if e != libc::EINTR {
            return Err(e);
        }
    }
    Ok(st)
}

/// `waitpid(2)` without waiting: the raw status if the child has ended.
pub fn waitpid_now(pid: libc::pid_t) -> R<Option<c_int>> {
    let mut st = 0;
    // SAFETY: room for one int.
    let r = int(unsafe { libc::waitpid(pid, &mut st, libc::WNOHANG) })?;
    Ok((r == pid).then_some(st))
}

/// Makes the kernel kill this process when its parent ends.
pub fn end_with_parent() {
    // SAFETY: plain numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// `kill(2)`.
pub fn kill(pid: libc::pid_t, sig: c_int) -> R<()> {
    // SAFETY: no pointers.
    int(unsafe { libc::kill(pid, sig) }).map(|_| ())
}

/// Sends a signal to one thread of a process.
pub fn tgkill(pid: libc::pid_t, tid: libc::pid_t, sig: c_int) -> R<()> {
    // SAFETY: no pointers.
    int(unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, sig) } as c_int).map(|_| ())
}

/// The calling thread's id.
pub fn gettid() -> libc::pid_t {
    // SAFETY: no preconditions.
    unsafe { libc::syscall(libc::SYS_gettid) as libc::pid_t }
}

/// Sends a signal to one thread.
pub fn pthread_kill(t: libc::pthread_t, sig: c_int) {
    // SAFETY: callers pass a thread that has not been joined.
    unsafe { libc::pthread_kill(t, sig) };
}

/// The calling thread.
pub fn pthread_self() -> libc::pthread_t {
    // SAFETY: no arguments.
    unsafe { libc::pthread_self() }
}

/// Installs a handler (async-signal-safe) with `sigaction(2)`.
pub fn sigaction(sig: c_int, handler: extern "C" fn(c_int), flags: c_int) -> R<()> {
    // SAFETY: the struct is filled in; the handlers of this crate only touch atomics.
    unsafe {
        let mut sa: libc::sigaction = std::mem::zeroed();
        sa.sa_sigaction = handler as *const () as usize;
        sa.sa_flags = flags;
        libc::sigemptyset(&mut sa.sa_mask);
        int(libc::sigaction(sig, &sa, std::ptr::null_mut())).map(|_| ())
    }
}

/// Reads until the buffer is full; `Err(0)` at an early end of the stream.
pub fn read_exact(fd: RawFd, b: &mut [u8]) -> R<()> {
    let mut at = 0;
    while at < b.len() {
        match read(fd, &mut b[at..]) {
            Ok(0) => return Err(0),
            Ok(n) => at += n,
            Err(libc::EINTR) => {}
            Err(libc::EAGAIN) => {
                wait1(fd, libc::POLLIN, 1000)?;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes the whole buffer (without `SIGPIPE`).
pub fn write_all(fd: RawFd, b: &[u8]) -> R<()> {
    let mut at = 0;
    while at < b.len() {
        match send(fd, &b[at..], libc::MSG_NOSIGNAL) {
            Ok(n) => at += n,
            Err(libc::EINTR) => {}
            Err(libc::EAGAIN) => {
                wait1(fd, libc::POLLOUT, 1000)?;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes the whole buffer to any kind of file.
pub fn write_all_fd(fd: RawFd, b: &[u8]) -> R<()> {
    let mut at = 0;
    while at < b.len() {
        at += write(fd, &b[at..])?;
    }
    Ok(())
}
