//! How the two ends of a TCP connection on one host find each other: names, identities, and the
//! questions that only the kernel can answer.

use crate::desk;
use crate::link::Tuple;
use crate::sync;
use crate::sys::{self, sys, SysResult};
use core::fmt::Write;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use libc::{c_int, sockaddr_storage, sockaddr_un, socklen_t};

/// An address as the kernel gives it: IPv6 bytes (IPv4 is mapped) and port.
fn endpoint(s: &sockaddr_storage) -> Option<([u8; 16], u16)> {
    match c_int::from(s.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says which type it is.
            let a = unsafe { &*(s as *const sockaddr_storage as *const libc::sockaddr_in) };
            let v4 = core::net::Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
            Some((v4.to_ipv6_mapped().octets(), u16::from_be(a.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let a = unsafe { &*(s as *const sockaddr_storage as *const libc::sockaddr_in6) };
            Some((a.sin6_addr.s6_addr, u16::from_be(a.sin6_port)))
        }
        _ => None,
    }
}

fn name_of(fd: c_int, nr: libc::c_long) -> Option<([u8; 16], u16)> {
    // SAFETY: all-zero is a valid sockaddr_storage.
    let mut s: sockaddr_storage = unsafe { core::mem::zeroed() };
    let mut len = size_of::<sockaddr_storage>() as socklen_t;
    // SAFETY: `s` and `len` are writable.
    unsafe { sys!(nr, fd, &mut s, &mut len) }.ok()?;
    endpoint(&s)
}

/// Our end and the peer's end of a connected socket.
pub fn ends(fd: c_int) -> Option<[([u8; 16], u16); 2]> {
    Some([name_of(fd, libc::SYS_getsockname)?, name_of(fd, libc::SYS_getpeername)?])
}

/// The network namespace of a socket, as the kernel counts them: a name made of addresses says who is meant only within one.
/// `None`: the kernel does not tell (before Linux 5.14).
pub fn network_of(fd: c_int) -> Option<u64> {
    const SO_NETNS_COOKIE: c_int = 71;
    let (mut cookie, mut len) = (0u64, size_of::<u64>() as socklen_t);
    // SAFETY: `cookie` and `len` are writable.
    unsafe { sys!(libc::SYS_getsockopt, fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut cookie, &mut len) }.ok()?;
    Some(cookie)
}

/// That in which rendezvous sockets are made. To be called by whoever makes them: each thread may be in one of its own.
pub fn own_network() -> Option<u64> {
    desk::run(|| {
        let fd = socket_of(libc::SOCK_DGRAM).ok()?;
        let network = network_of(fd);
        sys::close(fd);
        network
    })
}

/// Whether a socket is that of a connection, be it one that is over: of such a one the kernel has no names any more.
pub fn is_or_was_one(fd: c_int) -> bool {
    let was = || sys::is_tcp_closed(fd) && tcp_counts(fd).is_some_and(|(acked, received, _)| acked + received > 0);
    ends(fd).is_some() || was()
}

/// The connection's name, the same at both ends.
pub fn tuple(ends: &[([u8; 16], u16); 2], connector: bool) -> Tuple {
    let [local, peer] = *ends;
    let (from, to) = if connector { (local, peer) } else { (peer, local) };
    Tuple { from: from.0, to: to.0, from_port: from.1, to_port: to.1 }
}

/// For rules and logs.
pub fn socket_addr(e: &([u8; 16], u16)) -> SocketAddr {
    SocketAddr::new(IpAddr::V6(Ipv6Addr::from(e.0)).to_canonical(), e.1)
}

/// Whether an address is one of this host's (in this network namespace).
pub fn is_local(e: &([u8; 16], u16)) -> bool {
    let addr = socket_addr(e).ip();
    if addr.is_loopback() {
        return true;
    }
    // Whether it can be bound to is the kernel's answer to that question.
    // SAFETY: all-zero is a valid sockaddr_in6.
    let mut sa: libc::sockaddr_in6 = unsafe { core::mem::zeroed() };
    sa.sin6_family = libc::AF_INET6 as u16;
    sa.sin6_addr.s6_addr = e.0;
    let mut sa4: libc::sockaddr_in =
        // SAFETY: all-zero is a valid sockaddr_in.
        unsafe { core::mem::zeroed() };
    sa4.sin_family = libc::AF_INET as u16;
    let (family, ptr, len) = match addr {
        IpAddr::V4(a) => {
            sa4.sin_addr.s_addr = u32::from(a).to_be();
            (libc::AF_INET, &raw const sa4 as usize, size_of_val(&sa4))
        }
        IpAddr::V6(_) => (libc::AF_INET6, &raw const sa as usize, size_of_val(&sa)),
    };
    // SAFETY: plain calls with valid addresses.
    desk::run(|| unsafe {
        let Ok(fd) = sys!(libc::SYS_socket, family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) else { return false };
        let ok = sys!(libc::SYS_bind, fd, ptr, len).is_ok();
        sys::close_raw(fd as c_int);
        ok
    })
}

/// Why [`kernel_counts`] gives none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uncounted {
    /// Something came, or was acknowledged, all the while.
    Moving,
    /// The kernel does not tell.
    Untold,
}

/// How long the kernel is asked for counts. A stream that nobody reads stops when its window is full.
const PATIENCE_NS: i64 = 10_000_000;

/// How many bytes the kernel has taken from the program and given to it: written, read. To be asked while
/// nobody reads or writes.
///
/// Bytes arrive, and are acknowledged, between two answers of the kernel, so it is asked until nothing has
/// happened meanwhile.
pub fn kernel_counts(fd: c_int, connector: bool) -> Result<(u64, u64), Uncounted> {
    let until = sync::now_ns() + PATIENCE_NS;
    let queues =
        || Some((sys::ioctl_int(fd, libc::TIOCOUTQ).ok()? as u64, sys::ioctl_int(fd, libc::FIONREAD).ok()? as u64));
    let ((acked, received, state), (outq, inq)) = quiet(|| tcp_counts(fd), queues, || sync::now_ns() < until)?;
    // The SYN of the side that connected counts as a byte, and so does a FIN in either direction.
    // States from include/net/tcp_states.h.
    let fin_sent = matches!(state, 4 | 5 | 6 | 7 | 9 | 11);
    let fin_received = matches!(state, 6 | 7 | 8 | 9 | 11);
    let tx = (acked + outq).saturating_sub(connector as u64 + fin_sent as u64);
    Ok((tx, received.saturating_sub(inq + fin_received as u64)))
}

/// What `around` and `between` tell, where `around` has told the same before and after it. `goes_on`: it may be asked again.
fn quiet<A: PartialEq, B>(
    around: impl Fn() -> Option<A>,
    between: impl Fn() -> Option<B>,
    goes_on: impl Fn() -> bool,
) -> Result<(A, B), Uncounted> {
    const TRIES: u32 = 64;
    let ask = || around().ok_or(Uncounted::Untold);
    let (mut before, mut tries) = (ask()?, 0);
    while tries < TRIES || goes_on() {
        let told = between().ok_or(Uncounted::Untold)?;
        let after = ask()?;
        if before == after {
            return Ok((after, told));
        }
        (before, tries) = (after, tries + 1);
    }
    Err(Uncounted::Moving)
}

/// How many bytes the kernel's socket has received; an end counts as one.
pub fn received(fd: c_int) -> Option<u64> {
    tcp_counts(fd).map(|(_, received, _)| received)
}

/// The same, and whether that end has come.
pub fn received_and_ended(fd: c_int) -> Option<(u64, bool)> {
    /// `TCP_TIME_WAIT`, `TCP_CLOSE`, `TCP_CLOSE_WAIT`, `TCP_LAST_ACK` and `TCP_CLOSING`.
    const ENDED: [u8; 5] = [6, 7, 8, 9, 11];
    tcp_counts(fd).map(|(_, received, state)| (received, ENDED.contains(&state)))
}

/// How many bytes the kernel's socket has been given to send; so do a `SYN` and an end count. `None` if it is sending just now,
/// or does not tell.
pub fn sent(fd: c_int) -> Option<u64> {
    let queued = || sys::ioctl_int(fd, libc::TIOCOUTQ).ok();
    let ((acked, ..), queued) = quiet(|| tcp_counts(fd), queued, || false).ok()?;
    Some(acked + queued as u64)
}

/// Bytes acknowledged and received, and the state.
fn tcp_counts(fd: c_int) -> Option<(u64, u64, u8)> {
    let mut info = [0u64; 32];
    let mut len = size_of_val(&info) as socklen_t;
    // SAFETY: `info` and `len` are writable.
    unsafe { sys!(libc::SYS_getsockopt, fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr(), &mut len) }.ok()?;
    // struct tcp_info: tcpi_bytes_acked at 120, tcpi_bytes_received at 128 (linux/tcp.h).
    (len >= 136).then(|| (info[15], info[16], info[0] as u8))
}

/// The user who made the socket at the other end of a connection of this host, as `sock_diag(7)` tells
/// everybody. `ends`: our end and the other.
pub fn owner_of_peer(ends: &[([u8; 16], u16); 2]) -> Option<u32> {
    desk::run(|| ask_owner_of_peer(ends))
}

fn ask_owner_of_peer(ends: &[([u8; 16], u16); 2]) -> Option<u32> {
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    const NLM_F_REQUEST: u16 = 1;
    let [ours, theirs] = ends;
    // The peer's socket may be an IPv4 one, or an IPv6 one with mapped addresses.
    let mapped = theirs.0[..12] == Ipv6Addr::from([0, 0, 0, 0, 0, 0xffff, 0, 0]).octets()[..12];
    let families: &[c_int] = if mapped { &[libc::AF_INET, libc::AF_INET6] } else { &[libc::AF_INET6] };
    // SAFETY: no preconditions.
    let fd =
        unsafe { sys!(libc::SYS_socket, libc::AF_NETLINK, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 4) }.ok()? as c_int;
    let mut owner = None;
    for family in families {
        // struct nlmsghdr (16 bytes), struct inet_diag_req_v2 (56 bytes): linux/inet_diag.h.
        let mut q = [0u8; 72];
        q[0..4].copy_from_slice(&72u32.to_ne_bytes());
        q[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        q[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
        q[16] = *family as u8;
        q[17] = libc::IPPROTO_TCP as u8;
        q[20..24].copy_from_slice(&u32::MAX.to_ne_bytes());
        q[24..26].copy_from_slice(&theirs.1.to_be_bytes());
        q[26..28].copy_from_slice(&ours.1.to_be_bytes());
        if *family == libc::AF_INET {
            q[28..32].copy_from_slice(&theirs.0[12..]);
            q[44..48].copy_from_slice(&ours.0[12..]);
        } else {
            q[28..44].copy_from_slice(&theirs.0);
            q[44..60].copy_from_slice(&ours.0);
        }
        q[64..72].copy_from_slice(&[0xff; 8]);
        let mut a = [0u8; 512];
        // SAFETY: both buffers are valid for their lengths.
        let n = unsafe {
            let sent = sys::send(fd, q.as_ptr().cast(), q.len(), libc::MSG_DONTWAIT);
            sent.and_then(|_| sys::recv(fd, a.as_mut_ptr().cast(), a.len(), libc::MSG_DONTWAIT))
        };
        // struct inet_diag_msg: the user is at offset 64 of it.
        if n.is_ok_and(|n| n >= 16 + 72) && u16::from_ne_bytes([a[4], a[5]]) == SOCK_DIAG_BY_FAMILY {
            owner = a[80..84].try_into().ok().map(u32::from_ne_bytes);
            break;
        }
    }
    sys::close_raw(fd);
    owner
}

/// An abstract Unix address, and its length.
pub type Name = (sockaddr_un, socklen_t);

/// The abstract Unix address of this name, which is cut where it does not fit.
pub fn name(text: core::fmt::Arguments) -> Name {
    // SAFETY: all-zero is a valid sockaddr_un.
    let mut sa: sockaddr_un = unsafe { core::mem::zeroed() };
    sa.sun_family = libc::AF_UNIX as u16;
    struct To<'a>(&'a mut [libc::c_char], usize);
    impl Write for To<'_> {
        fn write_str(&mut self, s: &str) -> core::fmt::Result {
            for b in s.bytes() {
                *self.0.get_mut(self.1).ok_or(core::fmt::Error)? = b as libc::c_char;
                self.1 += 1;
            }
            Ok(())
        }
    }
    let mut to = To(&mut sa.sun_path[1..], 0);
    let _ = to.write_fmt(text);
    let n = to.1;
    (sa, (size_of::<libc::sa_family_t>() + 1 + n) as socklen_t)
}

/// The abstract Unix address where the connecting process of `t` can be found.
pub fn address(t: &Tuple) -> Name {
    // Fits: two IPv6 addresses with ports take less than 107 bytes.
    let (from, to) = (socket_addr(&(t.from, t.from_port)), socket_addr(&(t.to, t.to_port)));
    name(format_args!("ringsock/{from}-{to}"))
}

fn unix_socket() -> SysResult<c_int> {
    crate::fdhigh::not_for_children(|| socket_of(libc::SOCK_SEQPACKET))
}

fn socket_of(kind: c_int) -> SysResult<c_int> {
    let flags = kind | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no preconditions.
    let fd = unsafe { sys!(libc::SYS_socket, libc::AF_UNIX, flags, 0) }? as c_int;
    Ok(crate::fdhigh::move_high(fd))
}

/// A socket that does nothing but have a name, as long as this process or a child of it lives.
pub fn stand_at((sa, len): &Name) -> SysResult<c_int> {
    let fd = socket_of(libc::SOCK_DGRAM)?;
    // SAFETY: `sa` is valid for `len` bytes.
    match unsafe { sys!(libc::SYS_bind, fd, sa, *len) } {
        Ok(_) => Ok(fd),
        Err(e) => {
            sys::close(fd);
            Err(e)
        }
    }
}

/// Whether anybody [stands](stand_at) at one of these names.
pub fn is_stood_at(mut names: impl Iterator<Item = Name>) -> bool {
    let Ok(fd) = socket_of(libc::SOCK_DGRAM) else { return false };
    // SAFETY: `sa` is valid for `len` bytes.
    let there = names.any(|(sa, len)| unsafe { sys!(libc::SYS_connect, fd, &sa, len) } != Err(libc::ECONNREFUSED));
    sys::close(fd);
    there
}

/// Listens at the connection's name.
pub fn listen(t: &Tuple) -> SysResult<c_int> {
    listen_at(&address(t))
}

/// Listens at a name.
pub fn listen_at((sa, len): &Name) -> SysResult<c_int> {
    let fd = unix_socket()?;
    // SAFETY: `sa` is valid for `len` bytes.
    let r = unsafe { sys!(libc::SYS_bind, fd, sa, *len).and_then(|_| sys!(libc::SYS_listen, fd, 4)) };
    match r {
        Ok(_) => Ok(fd),
        Err(e) => {
            sys::close(fd);
            Err(e)
        }
    }
}

/// Connects to the connection's name, without waiting.
pub fn dial(t: &Tuple) -> SysResult<c_int> {
    call(&address(t))
}

/// Connects to a name, without waiting.
pub fn call((sa, len): &Name) -> SysResult<c_int> {
    let fd = unix_socket()?;
    // SAFETY: `sa` is valid for `len` bytes.
    match unsafe { sys!(libc::SYS_connect, fd, sa, *len) } {
        Ok(_) => Ok(fd),
        Err(e) => {
            sys::close(fd);
            Err(e)
        }
    }
}

/// Takes a connection from a listener.
pub fn accept(fd: c_int) -> SysResult<c_int> {
    // SAFETY: no addresses are asked for.
    let accept = || unsafe { sys!(libc::SYS_accept4, fd, 0, 0, libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) };
    crate::fdhigh::not_for_children(|| accept().map(|new| crate::fdhigh::move_high(new as c_int)))
}

/// User and group of the process at the other end.
pub fn credentials(fd: c_int) -> Option<(u32, u32, u32)> {
    let mut c = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as socklen_t;
    // SAFETY: `c` and `len` are writable.
    unsafe { sys!(libc::SYS_getsockopt, fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut c, &mut len) }.ok()?;
    Some((c.pid as u32, c.uid, c.gid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    /// A stream that comes faster than the kernel can be asked.
    #[test]
    fn counts_are_told_when_a_stream_has_come_to_rest() {
        let counts = |rests_at: u32, patience: u32| {
            let (now, asked) = (Cell::new(0), Cell::new(0));
            let look = || {
                asked.set(asked.get() + 1);
                now.set((now.get() + 1).min(rests_at));
                Some(now.get())
            };
            quiet(look, || Some(now.get()), || asked.get() < patience)
        };
        assert_eq!(counts(0, 0), Ok((0, 0)));
        assert_eq!(counts(10, 0), Ok((10, 10)));
        assert_eq!(counts(500, 1000), Ok((500, 500)));
        assert_eq!(counts(1000, 500), Err(Uncounted::Moving));
        assert_eq!(quiet(|| None::<u32>, || Some(0), || true), Err(Uncounted::Untold));
        assert_eq!(quiet(|| Some(0), || None::<u32>, || true), Err(Uncounted::Untold));
    }

    #[test]
    fn the_owner_of_the_other_end_is_found() {
        for addr in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(l) = TcpListener::bind(addr) else { continue };
            let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
            let (b, _) = l.accept().unwrap();
            // SAFETY: no preconditions.
            let me = unsafe { libc::geteuid() };
            for s in [&a, &b] {
                let ends = ends(s.as_raw_fd()).unwrap();
                assert_eq!(owner_of_peer(&ends), Some(me), "{addr}");
            }
            let nobody = [([1; 16], 1), ([2; 16], 2)];
            assert_eq!(owner_of_peer(&nobody), None);
        }
    }

    #[test]
    fn both_ends_give_a_connection_the_same_name() {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let (b, _) = l.accept().unwrap();
        let (x, y) = (ends(a.as_raw_fd()).unwrap(), ends(b.as_raw_fd()).unwrap());
        assert_eq!(tuple(&x, true), tuple(&y, false));
        assert_eq!(kernel_counts(a.as_raw_fd(), true), Ok((0, 0)));
        assert_eq!(kernel_counts(b.as_raw_fd(), false), Ok((0, 0)));
    }
}
