//! Sockets as a C program makes them. (Rust's ask for `SOCK_CLOEXEC` and call `accept4`, which rsocket's preload does
//! not know.)

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// An address for the kernel, and its length.
fn raw(at: &SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all-zero is a valid address of any family; those that are written are smaller.
    unsafe {
        let mut to: libc::sockaddr_storage = zeroed();
        let len = match at {
            SocketAddr::V4(a) => {
                let to = &mut *(&raw mut to).cast::<libc::sockaddr_in>();
                to.sin_family = libc::AF_INET as _;
                to.sin_port = a.port().to_be();
                to.sin_addr.s_addr = u32::from_ne_bytes(a.ip().octets());
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(a) => {
                let to = &mut *(&raw mut to).cast::<libc::sockaddr_in6>();
                to.sin6_family = libc::AF_INET6 as _;
                to.sin6_port = a.port().to_be();
                to.sin6_addr.s6_addr = a.ip().octets();
                size_of::<libc::sockaddr_in6>()
            }
        };
        (to, len as libc::socklen_t)
    }
}

fn checked(r: libc::c_int) -> io::Result<libc::c_int> {
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(r)
    }
}

type Call = unsafe extern "C" fn(libc::c_int, *const libc::sockaddr, libc::socklen_t) -> libc::c_int;

/// A socket that has bound itself to an address, or connected with it.
fn made(at: (&str, u16), call: Call) -> io::Result<OwnedFd> {
    let at = at.to_socket_addrs()?.next().ok_or(io::ErrorKind::AddrNotAvailable)?;
    let family = if at.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let (to, len) = raw(&at);
    // SAFETY: the fd is nobody else's; the address is readable for its length.
    unsafe {
        let fd = OwnedFd::from_raw_fd(checked(libc::socket(family, libc::SOCK_STREAM, 0))?);
        checked(call(fd.as_raw_fd(), (&raw const to).cast(), len))?;
        Ok(fd)
    }
}

/// Listens at a free port of an address.
pub fn listen(host: &str) -> io::Result<TcpListener> {
    let fd = made((host, 0), libc::bind)?;
    // SAFETY: no pointers.
    checked(unsafe { libc::listen(fd.as_raw_fd(), 128) })?;
    Ok(fd.into())
}

/// Takes the next connection.
pub fn accept(l: &TcpListener) -> io::Result<TcpStream> {
    let none = std::ptr::null_mut();
    // SAFETY: null pointers are allowed; the fd is nobody else's.
    unsafe { Ok(TcpStream::from_raw_fd(checked(libc::accept(l.as_raw_fd(), none, none.cast()))?)) }
}

/// Connects.
pub fn connect(at: (&str, u16)) -> io::Result<TcpStream> {
    Ok(made(at, libc::connect)?.into())
}
