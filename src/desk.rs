//! A file table of the library's own, and how an fd gets from there to a high number of the program's.
//!
//! The kernel gives every new fd the lowest number that is free, and a program may count on getting that number itself,
//! or on there being nothing under it. So what the background thread needs fds for is done by another thread, the
//! *clerk*, whose file table is its own: empty but for what the library has there. What threads of the program are to
//! use, too (bells, a link's socket, a segment's memory), is put under a number of the program's table that was reserved
//! high up.
//!
//! One kernel interface puts a file of one table under a given number of another: `SECCOMP_IOCTL_NOTIF_ADDFD` (Linux 5.9),
//! by which the supervisor of a thread answers its system calls. So the background thread has a filter that lets all
//! pass but one call with a magic argument, which the clerk answers: that call is how it hands over what is to be done.
//! Where a kernel or a container does not allow this there is no clerk, and things are done where they are asked for: then
//! an fd has a low number for the moment until [`fdhigh::move_high`] has moved it.
//!
//! Nobody but the clerk holds the other end of the filter. So if it should ever end by itself, the kernel refuses the call
//! that waits for it, and another clerk begins; what was in the table of the first is closed.

use crate::log::{log, Level};
use crate::sync::{futex_wait, futex_wake, now_ns, pause};
use crate::sys::{self, sys, Errno, SysResult};
use crate::{fdhigh, thread};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use libc::{c_int, c_long, c_void};

pub mod kept;

/// The call that the filter hands to the clerk, and the first argument by which it knows it.
const CALL: c_long = libc::SYS_gettid;
const MAGIC: u32 = 0x7273_4331;
/// How long the clerk is waited for when it starts, and when it ends.
const PATIENCE_NS: i64 = 1_000_000_000;

const SYS_CLOSE_RANGE: c_long = 436;
const SYS_PIDFD_GETFD: c_long = 438;
const CLOSE_RANGE_UNSHARE: u32 = 2;
const SECCOMP_SET_MODE_FILTER: u32 = 1;
const SECCOMP_FILTER_FLAG_NEW_LISTENER: u32 = 8;
const SECCOMP_RET_USER_NOTIF: u32 = 0x7fc0_0000;
const SECCOMP_RET_ALLOW: u32 = 0x7fff_0000;
// linux/seccomp.h: _IOWR('!', 0, 80 bytes), _IOWR('!', 1, 24 bytes), _IOW('!', 3, 24 bytes), _IOW('!', 4, 8 bytes).
const NOTIF_RECV: u64 = 0xc050_2100;
const NOTIF_SEND: u64 = 0xc018_2101;
const NOTIF_ADDFD: u64 = 0x4018_2103;
const NOTIF_SET_FLAGS: u64 = 0x4008_2104;
/// The clerk runs at once, where the thread that asks was running (Linux 6.6).
const SYNC_WAKE_UP: u64 = 1;
const ADDFD_FLAG_SETFD: u32 = 1;

/// A call that the clerk is to answer (`struct seccomp_notif`).
#[repr(C)]
#[derive(Default)]
struct Notif {
    id: u64,
    pid: u32,
    flags: u32,
    nr: c_int,
    arch: u32,
    ip: u64,
    args: [u64; 6],
}

/// `struct seccomp_notif_resp`.
#[repr(C)]
struct Answer {
    id: u64,
    val: i64,
    error: i32,
    flags: u32,
}

/// `struct seccomp_notif_addfd`.
#[repr(C)]
struct AddFd {
    id: u64,
    flags: u32,
    srcfd: u32,
    newfd: u32,
    newfd_flags: u32,
}

const _: () = assert!(size_of::<Notif>() == 80 && size_of::<Answer>() == 24 && size_of::<AddFd>() == 24);

/// What the clerk is asked for. It lies on the stack of who asks, which waits.
struct Request {
    call: unsafe fn(*mut c_void),
    data: *mut c_void,
    /// It was called. (A signal makes the kernel ask again.)
    done: AtomicBool,
    /// An fd of the clerk's, and the number of the program's under which it is put; -1: none.
    from: c_int,
    to: c_int,
    /// `from` is closed then.
    close: bool,
    /// Why that failed, or 0.
    error: AtomicI32,
    /// The clerk is to end.
    end: bool,
}

/// 0: no clerk, 1: about to be one, 2: there is one.
static STATE: AtomicU32 = AtomicU32::new(0);
/// The thread that may ask, and the clerk; 0: none.
static ASKER: AtomicU32 = AtomicU32::new(0);
static CLERK: AtomicU32 = AtomicU32::new(0);
/// Where a clerk that begins finds what it answers, or -1.
static LISTENER: AtomicI32 = AtomicI32::new(-1);
/// Any file, by which numbers of the program's table are reserved.
static HOLD: AtomicI32 = AtomicI32::new(-1);
/// Starts a thread that calls [`clerk`], as a `fn() -> bool`.
static SPAWN: AtomicUsize = AtomicUsize::new(0);
/// The clerk's fd for this process.
static PIDFD: AtomicI32 = AtomicI32::new(-1);
/// The other end of the filter, and the call that is being answered: the clerk's own.
static DESK: AtomicI32 = AtomicI32::new(-1);
static CALLER: AtomicU64 = AtomicU64::new(0);

/// Whether there is a clerk.
pub fn has_clerk() -> bool {
    CLERK.load(SeqCst) != 0
}

/// Whether a thread is the clerk.
pub fn is_clerk(tid: u32) -> bool {
    tid == CLERK.load(SeqCst)
}

/// Whether the caller is the clerk: what it does with fds concerns a table of its own.
#[inline]
pub fn is_here() -> bool {
    let clerk = CLERK.load(Relaxed);
    clerk != 0 && clerk == thread::tid()
}

/// Whether there is a clerk for the caller.
#[inline]
pub fn is_open() -> bool {
    let asker = ASKER.load(Relaxed);
    asker != 0 && asker == thread::tid()
}

/// Does `f` at the clerk's if the caller is the background thread, else here. `f` makes system calls and takes no lock
/// that the caller may hold; the fds that it is about are the clerk's.
pub fn run<R>(f: impl FnOnce() -> R) -> R {
    unsafe fn call<F: FnOnce() -> R, R>(data: *mut c_void) {
        // SAFETY: the pair below, which nobody else touches meanwhile.
        let (f, r) = unsafe { &mut *(data as *mut (Option<F>, Option<R>)) };
        *r = f.take().map(|f| f());
    }
    fn caller<F: FnOnce() -> R, R>(_: &F) -> unsafe fn(*mut c_void) {
        call::<F, R>
    }
    if !is_open() {
        return f();
    }
    let how = caller(&f);
    let mut pair = (Some(f), None);
    loop {
        let there = ask(&Request { data: (&raw mut pair).cast(), ..Request::new(how) });
        if let Some(r) = pair.1.take() {
            return r;
        }
        if !there {
            replace();
        }
    }
}

impl Request {
    fn new(call: unsafe fn(*mut c_void)) -> Request {
        let data = core::ptr::null_mut();
        let (done, error) = (AtomicBool::new(false), AtomicI32::new(0));
        Request { call, data, done, from: -1, to: -1, close: false, error, end: false }
    }

    fn nothing() -> Request {
        fn nothing(_: *mut c_void) {}
        Request::new(nothing)
    }
}

/// Whether there is a clerk to ask.
fn ask(r: &Request) -> bool {
    // SAFETY: the filter hands this call to the clerk, which uses the request until it answers.
    unsafe { sys!(CALL, u64::from(MAGIC), r) != Err(libc::ENOSYS) }
}

/// The clerk has ended, which it does for no reason that is known: another one begins.
#[cold]
fn replace() {
    const PAUSE_NS: i64 = 10_000_000;
    // SAFETY: what `open` has put there.
    let spawn = unsafe { core::mem::transmute::<usize, fn() -> bool>(SPAWN.load(SeqCst)) };
    shut();
    // Without one the numbers that the caller knows would be taken for the program's.
    while !begin(spawn, true) {
        pause(PAUSE_NS);
    }
    log(Level::Warn, format_args!("the clerk has ended, and is replaced"));
}

/// There is no clerk any more.
fn shut() {
    for word in [&ASKER, &STATE, &CLERK] {
        word.store(0, SeqCst);
    }
    sys::close(HOLD.swap(-1, Relaxed));
}

/// Puts an fd that [`run`] has made under a high number of the program's table, close-on-exec. It is closed in the
/// clerk's table whatever comes of it.
pub fn place(fd: c_int) -> SysResult<c_int> {
    put(fd, true)
}

/// As [`place`], but the fd stays open in the clerk's table, too.
pub fn share(fd: c_int) -> SysResult<c_int> {
    put(fd, false)
}

fn put(fd: c_int, close: bool) -> SysResult<c_int> {
    if !is_open() {
        return Ok(if fdhigh::is_ours(fd) { fd } else { fdhigh::move_high(fd) });
    }
    // A number that nobody can get meanwhile: any file will do to hold it.
    let to = match fdhigh::dup_high(HOLD.load(Relaxed)) {
        Ok(to) => to,
        Err(e) => {
            run(|| {
                if close {
                    sys::close_raw(fd)
                }
            });
            return Err(e);
        }
    };
    let r = Request { from: fd, to, close, ..Request::nothing() };
    while !r.done.load(Acquire) {
        if !ask(&r) {
            replace();
        }
    }
    match r.error.load(Relaxed) {
        0 => Ok(to),
        e => {
            sys::close(to);
            Err(e)
        }
    }
}

/// Makes an fd, and puts it under a high number.
pub fn make(f: impl FnOnce() -> SysResult) -> SysResult<c_int> {
    place(run(f)? as c_int)
}

/// An fd of the program's table, where [`run`] can use it.
pub struct Lent(c_int);

impl Lent {
    /// Of the number `fd` of the program's table.
    pub fn new(fd: c_int) -> SysResult<Lent> {
        if !is_here() {
            return Ok(Lent(fd));
        }
        // SAFETY: plain numbers.
        unsafe { sys!(SYS_PIDFD_GETFD, PIDFD.load(Relaxed), fd, 0) }.map(|fd| Lent(fd as c_int))
    }

    /// Its number there.
    pub fn fd(&self) -> c_int {
        self.0
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if is_here() {
            sys::close_raw(self.0);
        }
    }
}

/// Opens the desk for the calling thread, which must not have been told of any fd that [`run`] has made. `spawn` starts a
/// thread that calls [`clerk`].
pub fn open(spawn: fn() -> bool) {
    SPAWN.store(spawn as usize, SeqCst);
    begin(spawn, false);
}

/// `again`: there was a clerk for the calling thread before. Whether there is one now.
fn begin(spawn: fn() -> bool, again: bool) -> bool {
    let Ok(listener) = fdhigh::not_for_children(|| listen(again).map(fdhigh::move_high)) else { return false };
    LISTENER.store(listener, Relaxed);
    STATE.store(1, SeqCst);
    let until = now_ns() + PATIENCE_NS;
    let started = spawn();
    while started && STATE.load(SeqCst) == 1 && now_ns() < until {
        let _ = futex_wait(&STATE, 1, until - now_ns());
    }
    if STATE.compare_exchange(1, 0, SeqCst, SeqCst).is_err() && STATE.load(SeqCst) == 2 {
        HOLD.store(listener, Relaxed);
        ASKER.store(thread::tid(), SeqCst);
        // SAFETY: no preconditions.
        let other = || make(|| unsafe { sys!(libc::SYS_eventfd2, 0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) });
        HOLD.store(fdhigh::not_for_children(other).unwrap_or(-1), Relaxed);
    }
    LISTENER.store(-1, Relaxed);
    sys::close(listener);
    is_open()
}

/// Has the calling thread's magic calls answered by whoever reads what this returns.
fn listen(again: bool) -> SysResult<c_int> {
    const LOAD: u16 = 0x20;
    const IS: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let line = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // struct seccomp_data: the number at 0, the low half of the first argument at 16.
    let mut lines = [
        line(LOAD, 0, 0, 0),
        line(IS, 0, 3, CALL as u32),
        line(LOAD, 0, 0, 16),
        line(IS, 0, 1, MAGIC),
        line(RETURN, 0, 0, SECCOMP_RET_USER_NOTIF),
        line(RETURN, 0, 0, SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: lines.len() as u16, filter: lines.as_mut_ptr() };
    // SAFETY: all concern the calling thread alone, which executes nothing; `program` is readable.
    unsafe {
        // A filter that was there before may kill the process for a call that it does not know: those of services under
        // systemd's `SystemCallFilter=` do, and `pidfd_getfd` is not among the calls of `@system-service`.
        if !again && sys!(libc::SYS_prctl, libc::PR_GET_SECCOMP, 0, 0, 0, 0)? != 0 {
            return Err(libc::EPERM);
        }
        sys!(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)?;
        sys!(libc::SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program)
    }
    .map(|fd| fd as c_int)
}

/// Where the clerk begins.
pub fn clerk() {
    let listener = settle();
    let state = if listener.is_ok() { 2 } else { 0 };
    if listener.is_ok() {
        CLERK.store(thread::tid(), SeqCst);
    }
    // Too late, perhaps.
    let expected = STATE.compare_exchange(1, state, SeqCst, SeqCst).is_ok();
    futex_wake(&STATE, 1);
    if let Ok(listener) = listener {
        if expected {
            serve(listener);
        }
    }
    CLERK.store(0, SeqCst);
}

/// Leaves the program's file table for an empty one, without holding any of its files meanwhile.
fn settle() -> Result<c_int, Errno> {
    // SAFETY: plain numbers; from the first call on the table is the thread's own.
    unsafe {
        sys!(SYS_CLOSE_RANGE, 0, u32::MAX, CLOSE_RANGE_UNSHARE)?;
        let pidfd = sys!(libc::SYS_pidfd_open, sys::pid(), 0)? as c_int;
        PIDFD.store(pidfd, SeqCst);
        let listener = sys!(SYS_PIDFD_GETFD, pidfd, LISTENER.load(SeqCst), 0)? as c_int;
        // Standard output and error are neither of these: what is written there by mistake gets no further.
        while sys!(libc::SYS_dup, pidfd)? <= 2 {}
        let _ = sys!(libc::SYS_ioctl, listener, NOTIF_SET_FLAGS, SYNC_WAKE_UP);
        Ok(listener)
    }
}

/// Puts an fd of the clerk's under a number of the program's table. Only for the clerk, while it answers a call.
fn add(from: c_int, to: c_int) -> SysResult {
    let add = AddFd {
        id: CALLER.load(Relaxed),
        flags: ADDFD_FLAG_SETFD,
        srcfd: from as u32,
        newfd: to as u32,
        newfd_flags: libc::O_CLOEXEC as u32,
    };
    // SAFETY: `add` is readable.
    unsafe { sys!(libc::SYS_ioctl, DESK.load(Relaxed), NOTIF_ADDFD, &add) }
}

fn serve(listener: c_int) {
    DESK.store(listener, Relaxed);
    loop {
        let mut n = Notif::default();
        // SAFETY: `n` is writable, and zero as the kernel wants it.
        match unsafe { sys!(libc::SYS_ioctl, listener, NOTIF_RECV, &mut n) } {
            Ok(_) => {}
            // A signal of libc's own; or the call was given up before it was told, and will come again.
            Err(libc::EINTR | libc::ENOENT) => continue,
            Err(_) => return,
        }
        CALLER.store(n.id, Relaxed);
        // SAFETY: the request of a thread that waits for the answer.
        let r = unsafe { &*(n.args[1] as *const Request) };
        if !r.done.load(Acquire) {
            // SAFETY: the call and its data belong together.
            unsafe { (r.call)(r.data) };
        }
        if r.from >= 0 {
            r.error.store(add(r.from, r.to).err().unwrap_or(0), Relaxed);
        }
        let (end, close) = (r.end, if r.close { r.from } else { -1 });
        r.done.store(true, Release);
        let answer = Answer { id: n.id, val: 0, error: 0, flags: 0 };
        // SAFETY: `answer` is readable. If this fails a signal has interrupted the call, which comes again.
        let sent = unsafe { sys!(libc::SYS_ioctl, listener, NOTIF_SEND, &answer) };
        if sent.is_ok() {
            if close >= 0 {
                sys::close_raw(close);
            }
            if end {
                return;
            }
        }
    }
}

/// Closes the desk: the clerk ends, and with it what is in its table.
pub fn close() {
    if !is_open() {
        return;
    }
    let clerk = CLERK.load(SeqCst);
    let r = Request { end: true, ..Request::nothing() };
    while !r.done.load(Acquire) {
        if !ask(&r) {
            break;
        }
    }
    shut();
    let until = now_ns() + PATIENCE_NS;
    // SAFETY: signal 0 asks only whether the thread exists.
    while now_ns() < until && unsafe { sys!(libc::SYS_tgkill, sys::pid(), clerk, 0) }.is_ok() {
        // SAFETY: no preconditions.
        let _ = unsafe { sys!(libc::SYS_sched_yield) };
    }
}

/// In a forked child: there is no clerk here.
pub fn reset_after_fork() {
    for word in [&STATE, &ASKER, &CLERK] {
        word.store(0, Relaxed);
    }
    LISTENER.store(-1, Relaxed);
    HOLD.store(-1, Relaxed);
    kept::reset_after_fork();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{mpsc, Mutex};
    use std::time::Duration;

    /// There is one clerk in a process.
    pub static ONE: Mutex<()> = Mutex::new(());

    #[test]
    fn a_clerk_that_ends_is_replaced() {
        let _one = ONE.lock();
        fn spawn() -> bool {
            std::thread::spawn(clerk);
            true
        }
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            open(spawn);
            if !is_open() {
                return tell.send((0, 0, Ok(0), true));
            }
            let first = CLERK.load(SeqCst);
            ask(&Request { end: true, ..Request::nothing() });
            let again = run(thread::tid);
            // SAFETY: no preconditions.
            let made = make(|| unsafe { sys!(libc::SYS_eventfd2, 0, libc::EFD_CLOEXEC) });
            let high = made.is_ok_and(fdhigh::is_ours);
            close();
            tell.send((first, again, made, high))
        });
        let (first, again, made, high) = told.recv_timeout(Duration::from_secs(10)).expect("nobody waits for ever");
        assert!(first == 0 || again != first);
        assert!(made.is_ok() && high, "{made:?}");
    }
}
