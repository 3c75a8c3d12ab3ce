//! What is left of a connection whose peer is gone, for whoever gets its socket.
//!
//! Bytes that nobody has read lie in a ring, and how it has failed is in our record: of neither does the kernel's socket
//! know, which may go to a process that has no library. So the socket is connected anew, to one of the library's own on this
//! host: that sends the bytes, and ends as the peer has ended. The file stays the same, with its flags and its places in
//! epoll sets; of the names of its ends the kernel has none after a reset but its own, and that one changes.

use crate::conn::{Both, Phase, END_EOF, END_FAILED, END_HUP, END_RESET, END_WRSHUT};
use crate::log::{log, Level};
use crate::switch::{RxPath, Switch};
use crate::sync::now_ns;
use crate::sys::{self, sys, SysResult};
use crate::{desk, poll, pump};
use core::sync::atomic::{AtomicU32, Ordering::*};
use libc::{c_int, sockaddr_in, sockaddr_in6, socklen_t};

/// How long each step of it may take, all within this host.
const PATIENCE_NS: i64 = 1_000_000_000;
/// Strangers that may connect before our own socket does.
const STRANGERS: usize = 8;

/// How the stream ends behind its last byte.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Proper,
    /// With an error that is still to be told.
    Failed(c_int),
    /// With one that was.
    Told,
}

/// Puts it into the kernel's socket, so that the connection can become the kernel's. False: it is as it was, or there is
/// nothing of it. What the socket has no room for goes to `rests`. Only for the background thread.
pub fn settle(b: &mut Both, rests: &mut Vec<Rest>) -> bool {
    let conn = b.rx.conn();
    let fd = conn.local().fd.load(Relaxed);
    if conn.phase() != Phase::Managed || fd < 0 || !conn.has_ended(END_EOF) {
        return false;
    }
    let by_tcp = matches!(b.rx.path(), RxPath::Tcp | RxPath::Replay);
    let end = match (conn.has_ended(END_RESET), conn.has_ended(END_FAILED)) {
        (true, _) => End::Failed(conn.err.load(Relaxed)),
        (_, true) => End::Told,
        _ if !by_tcp && b.rx.ring().waiting() > 0 => End::Proper,
        _ => return false,
    };
    let Some(listener) = Listener::new(fd) else { return false };
    // What the program has sent since may have been answered, and nobody been told of that.
    let refused = end == End::Proper && conn.kernel_hangup() & libc::EPOLLERR as u32 != 0;
    let end = match refused.then(|| sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_ERROR)) {
        Some(Ok(libc::EPIPE)) => End::Failed(libc::EPIPE),
        _ => end,
    };
    let Some(bytes) = collect(b, fd) else { return false };
    let n = bytes.len();
    // What was sent to an end that is gone was answered; or the program has shut its own direction.
    let hung_up = conn.kernel_hangup() != 0 || conn.has_ended(END_HUP | END_WRSHUT);
    pump::disconnect(conn);
    // From here on there is no way back; what goes wrong looks like a reset.
    let played = listener.connect(fd).ok().and_then(|()| listener.play(fd, bytes, end));
    if let Some(rest) = played.flatten() {
        // The kernel is going to know.
        conn.end.fetch_and(!END_FAILED, AcqRel);
        rests.push(rest);
    }
    if end == End::Told {
        let _ = sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_ERROR);
    } else if end == End::Proper && hung_up {
        // SAFETY: an fd of the connection, which cannot be closed while we hold the locks.
        let _ = unsafe { sys!(libc::SYS_shutdown, fd, libc::SHUT_WR) };
    }
    log(
        Level::Debug,
        format_args!("a connection whose peer is gone is the kernel's, with {n} bytes that nobody has read"),
    );
    conn.err.store(0, Release);
    conn.lost.store(0, Release);
    conn.end.fetch_and(!END_RESET, AcqRel);
    *b.sw() = Switch::new();
    true
}

/// All that the program has not read, wherever it is. What it takes out of the kernel's socket is lost with `None`, which is
/// for a peer that lies.
fn collect(b: &mut Both, fd: c_int) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    match b.rx.path() {
        RxPath::Armed | RxPath::Draining => pump::drain_all(b, fd),
        RxPath::Tcp | RxPath::Replay => {
            bytes = vec![0; sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0).max(0) as usize];
            // SAFETY: as many are writable.
            let got = unsafe { sys::recv(fd, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) };
            bytes.truncate(got.unwrap_or(0));
            b.sw().took_tcp(bytes.len());
            pump::read_on(b, 0);
        }
        _ => {}
    }
    if matches!(b.rx.path(), RxPath::Tcp | RxPath::Replay) {
        return Some(bytes);
    }
    let (at, more) = (bytes.len(), b.rx.ring().waiting() as usize);
    bytes.resize(at + more, 0);
    // SAFETY: as many are writable.
    let got = unsafe { b.rx.ring().peek(core::iter::once((bytes[at..].as_mut_ptr(), more))) };
    (got == Ok(more)).then_some(bytes)
}

/// How long the other end of a socket that has no room waits before it looks for some, at first and at most.
const LEAST_NS: i64 = 1_000_000;
const MOST_NS: i64 = 64 * LEAST_NS;

/// What the other end of such a socket has still to do. Should it end before, with this process, that is a reset.
pub struct Rest {
    /// In the clerk's table.
    fd: c_int,
    bytes: Vec<u8>,
    sent: usize,
    end: End,
    at: i64,
    pause: i64,
}

/// How many there are.
static OPEN: AtomicU32 = AtomicU32::new(0);

fn pause() {
    crate::sync::pause(LEAST_NS);
}

/// Before the process ends: what others are to read is waited for, as far as that goes.
pub fn await_all(until: i64) {
    while OPEN.load(SeqCst) > 0 && now_ns() < until {
        pause();
    }
}

/// In a forked child: they are the parent's.
pub fn reset_after_fork() {
    OPEN.store(0, Relaxed);
}

impl Drop for Rest {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, SeqCst);
    }
}

impl Rest {
    /// When it is to be looked at again.
    pub fn due(&self) -> i64 {
        self.at
    }

    /// Does what can be done at `now`. Whether that is all.
    pub fn go_on(&mut self, now: i64) -> bool {
        let before = self.sent;
        let over = desk::run(|| {
            while self.sent < self.bytes.len() {
                let left = &self.bytes[self.sent..];
                // SAFETY: it is readable.
                match unsafe { sys::send(self.fd, left.as_ptr().cast(), left.len(), libc::MSG_NOSIGNAL) } {
                    Ok(n) => self.sent += n,
                    Err(libc::EINTR) => {}
                    Err(libc::EAGAIN) => return false,
                    // Whoever had the socket has closed it.
                    Err(_) => break,
                }
            }
            // A reset discards what has not arrived.
            let on_its_way = || sys::ioctl_int(self.fd, libc::TIOCOUTQ).is_ok_and(|n| n > 0);
            match self.end {
                End::Proper if self.sent == self.bytes.len() => set_abort(self.fd, false),
                End::Proper => {}
                _ if on_its_way() => return false,
                End::Failed(libc::EPIPE) => {
                    // SAFETY: plain numbers.
                    let _ = unsafe { sys!(libc::SYS_shutdown, self.fd, libc::SHUT_WR) };
                }
                _ => {}
            }
            sys::close(self.fd);
            true
        });
        self.pause = if self.sent > before { LEAST_NS } else { (2 * self.pause).min(MOST_NS) };
        self.at = now + self.pause;
        over
    }
}

/// Whether the close of `fd` is a reset. At the desk, or for a socket of it.
fn set_abort(fd: c_int, on: bool) {
    let l = libc::linger { l_onoff: on.into(), l_linger: 0 };
    // SAFETY: the option is readable for its length.
    let set = || unsafe { sys!(libc::SYS_setsockopt, fd, libc::SOL_SOCKET, libc::SO_LINGER, &l, size_of_val(&l)) };
    let _ = desk::run(set);
}

/// Where the socket is to connect to: in the clerk's table, so that the program sees no fd come and go.
struct Listener {
    fd: c_int,
    port: u16,
    v6: bool,
}

impl Drop for Listener {
    fn drop(&mut self) {
        desk::run(|| sys::close(self.fd));
    }
}

/// An address of this host's loopback, as a socket of that family takes it.
fn loopback(v6: bool, mapped: bool, port: u16) -> (sockaddr_in6, socklen_t) {
    // SAFETY: all-zero is a valid address of either family.
    let mut a: sockaddr_in6 = unsafe { core::mem::zeroed() };
    if !v6 {
        let v4 = sockaddr_in {
            sin_family: libc::AF_INET as u16,
            sin_port: port.to_be(),
            sin_addr: libc::in_addr { s_addr: u32::from(core::net::Ipv4Addr::LOCALHOST).to_be() },
            sin_zero: [0; 8],
        };
        // SAFETY: the larger one has room for the smaller.
        unsafe { (&raw mut a).cast::<sockaddr_in>().write(v4) };
        return (a, size_of::<sockaddr_in>() as socklen_t);
    }
    a.sin6_family = libc::AF_INET6 as u16;
    a.sin6_port = port.to_be();
    let localhost = core::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped();
    a.sin6_addr.s6_addr = if mapped { localhost } else { core::net::Ipv6Addr::LOCALHOST }.octets();
    (a, size_of::<sockaddr_in6>() as socklen_t)
}

/// The port of a socket's own end.
fn port_of(fd: c_int) -> Option<u16> {
    // SAFETY: all-zero is a valid address.
    let mut a: sockaddr_in6 = unsafe { core::mem::zeroed() };
    let mut len = size_of_val(&a) as socklen_t;
    // SAFETY: both are writable. The port stands at the same place in either family.
    unsafe { sys!(libc::SYS_getsockname, fd, &mut a, &mut len) }.ok()?;
    Some(u16::from_be(a.sin6_port))
}

impl Listener {
    /// For the connection that `fd` still is.
    fn new(fd: c_int) -> Option<Listener> {
        let v6 = sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) == Ok(libc::AF_INET6);
        let mapped = v6 && sys::sockopt_int(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Ok(0);
        let family = if v6 && !mapped { libc::AF_INET6 } else { libc::AF_INET };
        let (a, len) = loopback(family == libc::AF_INET6, false, 0);
        let made = desk::run(|| {
            let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            // SAFETY: the address is readable for its length.
            unsafe {
                let fd = sys!(libc::SYS_socket, family, kind, 0).ok()? as c_int;
                let listens = sys!(libc::SYS_bind, fd, &a, len).and_then(|_| sys!(libc::SYS_listen, fd, STRANGERS));
                let port = listens.ok().and_then(|_| port_of(fd));
                if port.is_none() {
                    sys::close(fd);
                }
                Some((fd, port?))
            }
        });
        made.map(|(fd, port)| Listener { fd, port, v6 })
    }

    /// Connects the program's socket `fd` with it.
    fn connect(&self, fd: c_int) -> SysResult<()> {
        let mapped = self.v6 && sys::sockopt_int(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) == Ok(0);
        let (a, len) = loopback(self.v6, mapped, self.port);
        // SAFETY: the address is readable for its length.
        let connect = || unsafe { sys!(libc::SYS_connect, fd, &a, len) };
        match connect() {
            Err(libc::EINPROGRESS | libc::EINTR) => {
                poll::wait_one(fd, libc::POLLOUT, PATIENCE_NS)?;
                match connect() {
                    Ok(_) | Err(libc::EISCONN) => Ok(()),
                    Err(e) => Err(e),
                }
            }
            r => r.map(|_| ()),
        }
    }

    /// The other end: sends `bytes` to `fd`, and ends. What is left to be done, if that cannot be done at once.
    fn play(&self, fd: c_int, bytes: Vec<u8>, end: End) -> Option<Option<Rest>> {
        let port = port_of(fd)?;
        let other = desk::run(|| self.accept(port))?;
        set_abort(other, true);
        OPEN.fetch_add(1, SeqCst);
        let mut rest = Rest { fd: other, bytes, sent: 0, end, at: 0, pause: LEAST_NS };
        // The kernel may say a moment later that all has come.
        let until = now_ns() + MOST_NS;
        while !rest.go_on(now_ns()) {
            if rest.sent < rest.bytes.len() || now_ns() > until {
                return Some(Some(rest));
            }
            pause();
        }
        if end != End::Proper {
            let _ = poll::wait_one(fd, libc::POLLHUP, PATIENCE_NS);
        }
        Some(None)
    }

    /// Whoever has connected from `port`.
    fn accept(&self, port: u16) -> Option<c_int> {
        for _ in 0..STRANGERS {
            poll::wait_one(self.fd, libc::POLLIN, PATIENCE_NS).ok().filter(|n| *n > 0)?;
            // SAFETY: all-zero is a valid address.
            let mut a: sockaddr_in6 = unsafe { core::mem::zeroed() };
            let mut len = size_of_val(&a) as socklen_t;
            let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            // SAFETY: the address and its length are writable.
            let other = unsafe { sys!(libc::SYS_accept4, self.fd, &mut a, &mut len, flags) }.ok()? as c_int;
            if u16::from_be(a.sin6_port) == port {
                return Some(other);
            }
            sys::close(other);
        }
        None
    }
}

#[cfg(test)]
mod tests;
