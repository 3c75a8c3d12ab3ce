//! Calls beside the ordinary socket ones: duplicates, signals, passed fds, raw system calls.

use crate::sys::{errno, pthread_kill, pthread_self, Errno, R};
use libc::{c_int, c_void};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

fn int(r: c_int) -> R<c_int> {
    if r < 0 {
        Err(errno())
    } else {
        Ok(r)
    }
}

/// `dup3(2)`.
pub fn dup3(from: RawFd, to: RawFd, flags: c_int) -> R<RawFd> {
    // SAFETY: no pointers.
    int(unsafe { libc::dup3(from, to, flags) })
}

/// `close_range(2)` through the C library's own function.
pub fn close_range(first: RawFd, last: RawFd) -> R<()> {
    // SAFETY: no pointers.
    int(unsafe { libc::close_range(first as u32, last as u32, 0) }).map(|_| ())
}

/// `close(2)` as libuv does it: by `syscall`.
pub fn close_by_syscall(fd: RawFd) -> R<()> {
    // SAFETY: no pointers.
    int(unsafe { libc::syscall(libc::SYS_close, fd) } as c_int).map(|_| ())
}

/// `eventfd(2)`, non-blocking.
pub fn eventfd() -> R<RawFd> {
    // SAFETY: no pointers.
    int(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })
}

/// Opens a file; `path` ends with a zero byte.
pub fn open(path: &str, flags: c_int) -> R<RawFd> {
    assert!(path.ends_with('\0'));
    // SAFETY: the path is a C string.
    int(unsafe { libc::open(path.as_ptr() as *const libc::c_char, flags, 0o600) })
}

/// A nameless file that holds `b`.
pub fn memfile(b: &[u8]) -> R<RawFd> {
    // SAFETY: the name is a C string.
    let fd = int(unsafe { libc::memfd_create(c"rs-app".as_ptr(), libc::MFD_CLOEXEC) })?;
    let mut at = 0;
    while at < b.len() {
        // SAFETY: the buffer is valid for reads of its length.
        let n = unsafe { libc::pwrite(fd, b[at..].as_ptr() as *const c_void, b.len() - at, at as i64) };
        if n <= 0 {
            return Err(errno());
        }
        at += n as usize;
    }
    Ok(fd)
}

/// `epoll_pwait2(2)`, where the C library has it.
pub fn epoll_pwait2(ep: RawFd, max: usize, us: i64) -> Option<R<Vec<(u32, u64)>>> {
    type F = unsafe extern "C" fn(
        c_int,
        *mut libc::epoll_event,
        c_int,
        *const libc::timespec,
        *const libc::sigset_t,
    ) -> c_int;
    // SAFETY: the name is a C string.
    let f = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"epoll_pwait2".as_ptr()) };
    if f.is_null() {
        return None;
    }
    // SAFETY: that symbol has this signature.
    let f: F = unsafe { std::mem::transmute::<*mut c_void, F>(f) };
    let mut v = vec![libc::epoll_event { events: 0, u64: 0 }; max];
    let ts = libc::timespec { tv_sec: us / 1_000_000, tv_nsec: (us % 1_000_000) * 1000 };
    // SAFETY: the array is valid for writes of its length, the time for reads.
    let n = int(unsafe { f(ep, v.as_mut_ptr(), max as c_int, &ts, std::ptr::null()) });
    Some(n.map(|n| v[..n as usize].iter().map(|e| (e.events, e.u64)).collect()))
}

/// Sends an fd over a Unix socket, with one byte.
pub fn send_fd(sock: RawFd, fd: RawFd) -> R<()> {
    let mut byte = [b'f'];
    let mut iov = [libc::iovec { iov_base: byte.as_mut_ptr() as *mut c_void, iov_len: 1 }];
    let mut h = crate::sys::msghdr(&mut iov);
    let mut room = [0u64; 4];
    h.msg_control = room.as_mut_ptr() as *mut c_void;
    // SAFETY: the control buffer is aligned and large enough for one fd.
    unsafe {
        h.msg_controllen = libc::CMSG_SPACE(4) as _;
        let c = libc::CMSG_FIRSTHDR(&h);
        (*c).cmsg_level = libc::SOL_SOCKET;
        (*c).cmsg_type = libc::SCM_RIGHTS;
        (*c).cmsg_len = libc::CMSG_LEN(4) as _;
        (libc::CMSG_DATA(c) as *mut c_int).write_unaligned(fd);
        int(libc::sendmsg(sock, &h, 0) as c_int).map(|_| ())
    }
}

/// Receives an fd from a Unix socket.
pub fn recv_fd(sock: RawFd) -> R<RawFd> {
    let mut byte = [0u8];
    let mut iov = [libc::iovec { iov_base: byte.as_mut_ptr() as *mut c_void, iov_len: 1 }];
    let mut h = crate::sys::msghdr(&mut iov);
    let mut room = [0u64; 4];
    h.msg_control = room.as_mut_ptr() as *mut c_void;
    h.msg_controllen = std::mem::size_of_val(&room) as _;
    // SAFETY: the control buffer is aligned and of the length that is given; the kernel fills it.
    unsafe {
        int(libc::recvmsg(sock, &mut h, libc::MSG_CMSG_CLOEXEC) as c_int)?;
        let c = libc::CMSG_FIRSTHDR(&h);
        if c.is_null() || (*c).cmsg_type != libc::SCM_RIGHTS {
            return Err(libc::EPROTO);
        }
        Ok((libc::CMSG_DATA(c) as *const c_int).read_unaligned())
    }
}

/// Calls of [`counter`] so far.
pub static SIGNALS: AtomicUsize = AtomicUsize::new(0);

/// A signal handler that counts.
pub extern "C" fn counter(_: c_int) {
    SIGNALS.fetch_add(1, Ordering::SeqCst);
}

/// Installs [`counter`] and sets the count to nothing.
pub fn count_signal(sig: c_int, flags: c_int) -> R<()> {
    crate::sys::sigaction(sig, counter, flags)?;
    SIGNALS.store(0, Ordering::SeqCst);
    Ok(())
}

/// The count of [`counter`].
pub fn signals() -> usize {
    SIGNALS.load(Ordering::SeqCst)
}

/// Sends a signal to the calling thread after a while. The caller joins.
pub fn signal_after(ms: u64, sig: c_int) -> JoinHandle<()> {
    let me = pthread_self();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(ms));
        pthread_kill(me, sig);
    })
}

/// A signal set with one signal, or none.
pub fn sigset(sig: Option<c_int>) -> libc::sigset_t {
    // SAFETY: the set is initialised by sigemptyset.
    unsafe {
        let mut s: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut s);
        if let Some(n) = sig {
            libc::sigaddset(&mut s, n);
        }
        s
    }
}

/// Blocks one signal in the calling thread.
pub fn block_signal(sig: c_int) {
    let s = sigset(Some(sig));
    // SAFETY: the set is valid; the old one is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &s, std::ptr::null_mut()) };
}

/// The waits that take a signal mask; each with an empty one, for reading on `fd` (an epoll set
/// for `epoll_pwait`).
pub fn masked_wait(call: &str, fd: RawFd, ms: i64) -> R<c_int> {
    let s = sigset(None);
    let ts = libc::timespec { tv_sec: ms / 1000, tv_nsec: (ms % 1000) * 1_000_000 };
    // SAFETY: all structs live through the call; the fd fits into an fd_set.
    unsafe {
        match call {
            "ppoll" => {
                let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                int(libc::ppoll(&mut p, 1, &ts, &s))
            }
            "pselect" => {
                assert!(fd < 1024);
                let mut r: libc::fd_set = std::mem::zeroed();
                libc::FD_SET(fd, &mut r);
                let no: *mut libc::fd_set = std::ptr::null_mut();
                int(libc::pselect(fd + 1, &mut r, no, no, &ts, &s))
            }
            _ => {
                let mut e = libc::epoll_event { events: 0, u64: 0 };
                int(libc::epoll_pwait(fd, &mut e, 1, ms as c_int, &s))
            }
        }
    }
}

/// Calls `recvfrom` with room for an address: (bytes, length of the address afterwards).
pub fn recvfrom_len(fd: RawFd, b: &mut [u8]) -> R<(usize, u32)> {
    // SAFETY: all-zero is a valid address; the buffer and the address are valid for writes.
    unsafe {
        let mut a: libc::sockaddr_in = std::mem::zeroed();
        let mut n = std::mem::size_of_val(&a) as libc::socklen_t;
        let (p, pa) = (b.as_mut_ptr() as *mut c_void, &mut a as *mut _ as *mut libc::sockaddr);
        let r = libc::recvfrom(fd, p, b.len(), 0, pa, &mut n);
        if r < 0 {
            return Err(errno());
        }
        Ok((r as usize, n))
    }
}

/// What `lseek`, `isatty` and `fstat` say: (errno of lseek, is a tty, is a socket).
pub fn odd_calls(fd: RawFd) -> (Errno, bool, bool) {
    // SAFETY: all-zero is a valid stat buffer; it is valid for writes.
    unsafe {
        let seek = if libc::lseek(fd, 0, libc::SEEK_CUR) < 0 { errno() } else { 0 };
        let tty = libc::isatty(fd) == 1;
        let mut st: libc::stat = std::mem::zeroed();
        let sock = libc::fstat(fd, &mut st) == 0 && st.st_mode & libc::S_IFMT == libc::S_IFSOCK;
        (seek, tty, sock)
    }
}

/// `preadv2`/`pwritev2` at offset -1, which on a socket are `readv`/`writev` with flags.
pub fn rw2(fd: RawFd, b: &mut [u8], write: bool, flags: c_int) -> R<usize> {
    let v = crate::sys::iovecs(b, 2);
    // SAFETY: the pieces lie within the buffer, which is borrowed for writing.
    let r = unsafe {
        if write {
            libc::pwritev2(fd, v.as_ptr(), 2, -1, flags)
        } else {
            libc::preadv2(fd, v.as_ptr(), 2, -1, flags)
        }
    };
    if r < 0 {
        Err(errno())
    } else {
        Ok(r as usize)
    }
}
