//! Raw system calls.
//!
//! Nothing inside the library may call an interposed libc symbol: it would
//! come back to us, and it would use the program's `errno`. Every kernel
//! request of the library therefore goes through the inline assembly here.
//! Errors are returned as positive `errno` values.

use core::arch::asm;
use libc::{c_int, c_long, c_void};

/// A positive `errno` value.
pub type Errno = i32;

/// A result of a system call.
pub type SysResult<T = usize> = Result<T, Errno>;

/// Issues system call `n` with six arguments.
///
/// # Safety
/// The arguments must be what the system call expects; pointers among them
/// must be valid for the access that the kernel makes.
#[inline(always)]
pub unsafe fn syscall6(n: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> SysResult {
    let ret: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the x86-64 Linux system call convention; the caller vouches for the arguments.
    unsafe {
        asm!("syscall", inlateout("rax") n as isize => ret, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the aarch64 Linux system call convention; the caller vouches for the arguments.
    unsafe {
        asm!("svc 0", in("x8") n, inlateout("x0") a as isize => ret, in("x1") b, in("x2") c,
            in("x3") d, in("x4") e, in("x5") f, options(nostack));
    }
    if (-4095..0).contains(&ret) {
        Err(-ret as i32)
    } else {
        Ok(ret as usize)
    }
}

/// What can be an argument of a system call: integers, and addresses of what it reads or writes.
pub trait Arg {
    /// The register's value.
    fn arg(self) -> usize;
}
macro_rules! int_args { ($($t:ty),*) => { $(impl Arg for $t { #[inline(always)] fn arg(self) -> usize { self as usize } })* } }
int_args!(i32, u32, i64, u64, usize, isize, i16, u16);
impl<T> Arg for *const T {
    #[inline(always)]
    fn arg(self) -> usize {
        self as usize
    }
}
impl<T> Arg for *mut T {
    #[inline(always)]
    fn arg(self) -> usize {
        self as usize
    }
}
impl<T> Arg for &T {
    #[inline(always)]
    fn arg(self) -> usize {
        self as *const T as usize
    }
}
impl<T> Arg for &mut T {
    #[inline(always)]
    fn arg(self) -> usize {
        self as *mut T as usize
    }
}

/// `sys!(NUMBER, ARGS...)`: a raw system call with up to six arguments.
macro_rules! sys {
    ($n:expr $(, $a:expr)* $(,)?) => {{
        #[allow(unused_mut)]
        let mut args = [0usize; 6];
        let mut _i = 0;
        $( args[_i] = $crate::sys::Arg::arg($a); _i += 1; )*
        $crate::sys::syscall6($n, args[0], args[1], args[2], args[3], args[4], args[5])
    }};
}
pub(crate) use sys;

/// Closes an fd of the library.
pub fn close(fd: c_int) {
    // A child that is forked in between would keep it for good.
    let _between = (!crate::desk::is_here()).then(crate::forking::Between::begin);
    crate::fdhigh::forget(fd);
    close_raw(fd);
}

/// Closes an fd.
pub fn close_raw(fd: c_int) {
    // SAFETY: closing a number is always allowed; a bad one gives EBADF.
    let _ = unsafe { sys!(libc::SYS_close, fd) };
}

/// `send(2)` on a socket.
///
/// # Safety
/// `buf` must be readable for `len` bytes.
pub unsafe fn send(fd: c_int, buf: *const c_void, len: usize, flags: c_int) -> SysResult {
    // SAFETY: the caller's promise.
    unsafe { sys!(libc::SYS_sendto, fd, buf, len, flags, 0, 0) }
}

/// `recv(2)` on a socket.
///
/// # Safety
/// `buf` must be writable for `len` bytes.
pub unsafe fn recv(fd: c_int, buf: *mut c_void, len: usize, flags: c_int) -> SysResult {
    // SAFETY: the caller's promise.
    unsafe { sys!(libc::SYS_recvfrom, fd, buf, len, flags, 0, 0) }
}

/// An `int` socket option.
pub fn sockopt_int(fd: c_int, level: c_int, name: c_int) -> SysResult<c_int> {
    let mut v: c_int = 0;
    let mut l: libc::socklen_t = 4;
    // SAFETY: `v` and `l` are writable.
    unsafe { sys!(libc::SYS_getsockopt, fd, level, name, &mut v, &mut l) }?;
    Ok(v)
}

/// The state of a TCP socket (linux/tcp_states.h), if it is one.
fn tcp_state(fd: c_int) -> Option<u8> {
    let mut state = 0u8;
    let mut l: libc::socklen_t = 1;
    // SAFETY: one writable byte; the first of a `tcp_info` is the state.
    unsafe { sys!(libc::SYS_getsockopt, fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut state, &mut l) }.ok()?;
    Some(state)
}

/// Whether the kernel has no connection any more: it was reset, or both directions have ended.
pub fn is_tcp_closed(fd: c_int) -> bool {
    /// `TCP_CLOSE`.
    const CLOSE: u8 = 7;
    tcp_state(fd) == Some(CLOSE)
}

/// Whether the kernel takes nothing to be sent any more.
pub fn is_tcp_ended(fd: c_int) -> bool {
    /// `TCP_ESTABLISHED` and `TCP_CLOSE_WAIT`.
    const OPEN: [u8; 2] = [1, 8];
    tcp_state(fd).is_some_and(|s| !OPEN.contains(&s))
}

/// Whether an fd is a socket.
pub fn is_socket(fd: c_int) -> bool {
    let mut st = core::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: `st` has room for what the kernel writes; all zeroes is a valid one.
    unsafe {
        sys!(libc::SYS_fstat, fd, st.as_mut_ptr()).is_ok() && st.assume_init().st_mode & libc::S_IFMT == libc::S_IFSOCK
    }
}

/// Whether the peer's end of the stream has not come.
pub fn is_tcp_to_be_ended(fd: c_int) -> bool {
    /// `TCP_ESTABLISHED`, `TCP_FIN_WAIT1` and `TCP_FIN_WAIT2`.
    const OPEN: [u8; 3] = [1, 4, 5];
    tcp_state(fd).is_some_and(|s| OPEN.contains(&s))
}

/// An `int` that an ioctl reports.
pub fn ioctl_int(fd: c_int, req: u64) -> SysResult<c_int> {
    let mut v: c_int = 0;
    // SAFETY: `v` is writable.
    unsafe { sys!(libc::SYS_ioctl, fd, req, &mut v) }?;
    Ok(v)
}

/// Which of `events` an fd has now.
pub fn poll_now(fd: c_int, events: i16) -> i16 {
    let mut p = libc::pollfd { fd, events, revents: 0 };
    let ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `p` is writable, `ts` readable.
    let _ = unsafe { sys!(libc::SYS_ppoll, &mut p, 1, &ts, 0, 8) };
    p.revents
}

/// How much of its memory a socket has taken, and how much that may be, as `SK_MEMINFO_` in linux/sock_diag.h counts them.
fn socket_memory(fd: c_int) -> SysResult<[u32; 9]> {
    const SO_MEMINFO: c_int = 55;
    let mut memory = [0u32; 9];
    let mut len = size_of_val(&memory) as libc::socklen_t;
    // SAFETY: a query that writes to our own memory.
    unsafe { sys!(libc::SYS_getsockopt, fd, libc::SOL_SOCKET, SO_MEMINFO, memory.as_mut_ptr(), &mut len) }?;
    Ok(memory)
}

/// Whether a send to a TCP socket would find no room at all. (`poll` says that there is none as soon as less than a third is
/// free.)
pub fn is_full(fd: c_int) -> bool {
    const QUEUED: usize = 5;
    const MOST: usize = 3;
    let unsent = || {
        let limit = sockopt_int(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT).unwrap_or(0) as u32;
        limit != 0 && ioctl_int(fd, crate::pump::SIOCOUTQNSD).is_ok_and(|n| n as u32 >= limit)
    };
    poll_now(fd, libc::POLLOUT) == 0 && (socket_memory(fd).is_ok_and(|m| m[QUEUED] >= m[MOST]) || unsent())
}

/// Whether a TCP socket takes little more before something is read, as the kernel sees it where it says that there is
/// something to read, though it is less than `SO_RCVLOWAT`: most of its memory is taken, or a segment would fill its window.
pub fn has_no_room(fd: c_int) -> bool {
    // linux/tcp.h: `tcpi_rcv_mss`.
    const SEGMENT: usize = 20;
    let (mut memory, mut info) = ([0u32; 9], [0u8; 64]);
    let mut len = info.len() as libc::socklen_t;
    let r = socket_memory(fd).and_then(|m| {
        memory = m;
        // SAFETY: a query that writes to our own memory.
        unsafe { sys!(libc::SYS_getsockopt, fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr(), &mut len) }
    });
    let segment = info.get(SEGMENT..SEGMENT + 4).map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
    let (taken, most) = (memory[0], memory[1]);
    // Half of the memory is for bytes.
    r.is_ok() && (taken > most - most / 8 || most.saturating_sub(taken) / 2 <= segment)
}

/// Whether the program's memory is there to be read, where the kernel would say `EFAULT` if it is not. A system call:
/// for pointers that are rarely given. In doubt it is.
pub fn is_readable(at: *const c_void, len: usize) -> bool {
    let mut buf = [0u8; 1024];
    let mut done = 0;
    while done < len {
        let n = (len - done).min(buf.len());
        let own = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: n };
        let theirs = libc::iovec { iov_base: at.wrapping_byte_add(done).cast_mut(), iov_len: n };
        // SAFETY: `own` is writable; the kernel finds out about `theirs`.
        match unsafe { sys!(libc::SYS_process_vm_readv, pid(), &own, 1, &theirs, 1, 0) } {
            Ok(got) if got == n => done += n,
            Ok(_) | Err(libc::EFAULT) => return false,
            Err(_) => return true,
        }
    }
    true
}

/// This process's id.
pub fn pid() -> u32 {
    // SAFETY: getpid has no preconditions.
    unsafe { sys!(libc::SYS_getpid) }.unwrap_or(0) as u32
}

/// Keeps `errno` as it is, and the thread from being cancelled: for the few calls into libraries.
pub struct Kept(*mut c_int, c_int, c_int);

/// Instead of a cancel state.
const NOBODY: c_int = -1;

extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// Runs `f`, a call into a library, with `errno` kept, and the thread from being cancelled.
#[inline(always)]
pub fn keeping<R>(f: impl Fn() -> R) -> R {
    if crate::process::has_threads() {
        let _keep = Kept::new();
        return f();
    }
    // SAFETY: the thread's own variable.
    unsafe {
        let errno = libc::__errno_location();
        let was = *errno;
        let r = f();
        *errno = was;
        r
    }
}

impl Kept {
    /// Until this is dropped.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Kept {
        let mut state = 0;
        // SAFETY: the thread's own variables; 1 is PTHREAD_CANCEL_DISABLE.
        unsafe {
            if crate::process::has_threads() {
                pthread_setcancelstate(1, &mut state);
            } else {
                // Nobody could cancel it.
                state = NOBODY;
            }
            let errno = libc::__errno_location();
            Kept(errno, *errno, state)
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe {
            *self.0 = self.1;
            if self.2 != NOBODY {
                pthread_setcancelstate(self.2, &mut self.2);
            }
        }
    }
}
