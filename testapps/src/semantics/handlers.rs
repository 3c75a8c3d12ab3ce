//! Signal handlers that use the very connection whose call they interrupt. They allocate nothing, for they may interrupt the
//! allocator.

use super::cx::{Cx, Op, Res, Why, IN, OUT};
use super::waiting::set;
use super::Check;
use crate::{ensure, prng, same, sys, util};
use libc::{c_int, EAGAIN, EPOLLIN, EPOLL_CTL_MOD, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, POLLIN, SA_RESTART, SIGUSR1};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("handler-looks", looks),
    ("handler-receives", receives),
    ("handler-sends", sends),
    ("handler-shuts-down-while-sending", |cx| ends_sending(cx, shut)),
    ("handler-closes-while-sending", |cx| ends_sending(cx, shut_by_close)),
    ("handler-shuts-down-while-receiving", |cx| ends_receiving(cx, shut_rd)),
    ("handler-closes-while-receiving", |cx| ends_receiving(cx, shut_by_close)),
    ("handler-once", once),
    ("handler-old-actions", old_actions),
];

static FD: AtomicI32 = AtomicI32::new(-1);
static SET: AtomicI32 = AtomicI32::new(-1);
static RUNS: AtomicU64 = AtomicU64::new(0);
static AT: AtomicU64 = AtomicU64::new(0);
static WRONG: AtomicU64 = AtomicU64::new(0);
static STOP: AtomicBool = AtomicBool::new(false);

/// What a handler must leave as it was.
struct Errno(c_int);

impl Errno {
    fn kept() -> Errno {
        Errno(sys::errno())
    }
}

impl Drop for Errno {
    fn drop(&mut self) {
        // SAFETY: the thread's own variable.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

/// Notes that line `at` found something wrong.
fn wrong(at: u32) {
    let _ = WRONG.compare_exchange(0, at.into(), SeqCst, SeqCst);
}

/// Runs `f` while signals come all the time, each of which runs `handler`.
fn under_fire(cx: &Cx, handler: extern "C" fn(c_int), f: impl FnOnce() -> Res) -> Res {
    FD.store(cx.fd, SeqCst);
    STOP.store(false, SeqCst);
    sys::sigaction(SIGUSR1, handler, SA_RESTART)?;
    let me = sys::pthread_self();
    let t = std::thread::spawn(move || {
        while !STOP.load(SeqCst) {
            sys::pthread_kill(me, SIGUSR1);
            std::thread::sleep(Duration::from_micros(60));
        }
    });
    // The other thread may take its time to begin.
    for _ in 0..5000 {
        if RUNS.load(SeqCst) > 0 {
            break;
        }
        util::pause_ms(1);
    }
    let r = f();
    STOP.store(true, SeqCst);
    t.join().map_err(|_| Why("a thread panicked".into()))?;
    same!(WRONG.load(SeqCst), 0, "what went wrong in the handler: the line");
    ensure!(RUNS.load(SeqCst) > 0, "no signal came");
    r
}

extern "C" fn look(_: c_int) {
    let _errno = Errno::kept();
    RUNS.fetch_add(1, SeqCst);
    let (fd, ep) = (FD.load(SeqCst), SET.load(SeqCst));
    let there = sys::fionread(fd).unwrap_or(0);
    let mut b = [0; 16];
    let peeked = sys::recv(fd, &mut b, MSG_PEEK | MSG_DONTWAIT);
    if there > 0 && peeked.is_err() || !matches!(peeked, Ok(1..) | Err(EAGAIN)) {
        wrong(line!());
    }
    if there > 0 && sys::poll1(fd, POLLIN, 0) != Ok(POLLIN) {
        wrong(line!());
    }
    if sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN as u32, 7).is_err() {
        wrong(line!());
    }
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
    // SAFETY: the array is as long as is said.
    if there > 0 && unsafe { libc::epoll_wait(ep, events.as_mut_ptr(), 4, 0) } != 1 {
        wrong(line!());
    }
}

fn looks(cx: &mut Cx) -> Res {
    SET.store(set(cx, EPOLLIN)?, SeqCst);
    let fd = Cx::with_fd(cx, cx.fd);
    under_fire(&fd, look, || {
        for _ in 0..3 {
            cx.post(Op::SendBits, 100, 5000, 100)?;
            cx.recv(500_000)?;
            cx.wait()?;
            cx.post(Op::SlowRecv, 2_000_000, 100_000, 200)?;
            cx.send(2_000_000)?;
            same!(cx.wait()?, 2_000_000, "bytes that arrived");
        }
        Ok(())
    })
}

extern "C" fn receive(_: c_int) {
    let _errno = Errno::kept();
    RUNS.fetch_add(1, SeqCst);
    let mut b = [0; 2000];
    while let Ok(n) = sys::recv(FD.load(SeqCst), &mut b, MSG_DONTWAIT) {
        if n == 0 || prng::verify(IN, AT.load(SeqCst), &b[..n]).is_err() {
            return wrong(line!());
        }
        AT.fetch_add(n as u64, SeqCst);
    }
}

fn receives(cx: &mut Cx) -> Res {
    const N: u64 = 1500;
    AT.store(cx.rx, SeqCst);
    let goal = cx.rx + N * 4096;
    let fd = Cx::with_fd(cx, cx.fd);
    under_fire(&fd, receive, || {
        cx.post(Op::Echo, N, 4096, 0)?;
        for _ in 0..N {
            cx.send(4096)?;
        }
        for _ in 0..3000 {
            if AT.load(SeqCst) == goal {
                break;
            }
            util::pause_ms(1);
        }
        same!(AT.load(SeqCst), goal, "bytes that the handler received");
        same!(cx.wait()?, N, "messages");
        Ok(())
    })
}

extern "C" fn send(_: c_int) {
    let _errno = Errno::kept();
    RUNS.fetch_add(1, SeqCst);
    let at = AT.load(SeqCst);
    let mut b = [0u8; 64];
    prng::fill(OUT, at, &mut b);
    match sys::send(FD.load(SeqCst), &b, MSG_DONTWAIT | MSG_NOSIGNAL) {
        Ok(n) => {
            AT.fetch_add(n as u64, SeqCst);
        }
        Err(EAGAIN) => {}
        Err(_) => wrong(line!()),
    }
}

fn sends(cx: &mut Cx) -> Res {
    AT.store(cx.tx, SeqCst);
    let begun = cx.tx;
    let fd = Cx::with_fd(cx, cx.fd);
    under_fire(&fd, send, || {
        cx.post(Op::SendBits, 300, 5000, 100)?;
        cx.recv(1_500_000)?;
        cx.wait()?;
        Ok(())
    })?;
    let n = AT.load(SeqCst) - begun;
    same!(cx.tell(Op::Recv, n, 0, 0)?, n, "bytes of the handler that arrived");
    cx.tx += n;
    cx.warm(6, 0)
}

/// After so many signals the connection is ended.
const LAST: u64 = 60;

extern "C" fn shut(_: c_int) {
    let _errno = Errno::kept();
    if RUNS.fetch_add(1, SeqCst) == LAST && sys::shutdown(FD.load(SeqCst), libc::SHUT_WR).is_err() {
        wrong(line!());
    }
}

extern "C" fn shut_rd(_: c_int) {
    let _errno = Errno::kept();
    if RUNS.fetch_add(1, SeqCst) == LAST && sys::shutdown(FD.load(SeqCst), libc::SHUT_RD).is_err() {
        wrong(line!());
    }
}

extern "C" fn shut_by_close(_: c_int) {
    let _errno = Errno::kept();
    if RUNS.fetch_add(1, SeqCst) == LAST && sys::close(FD.load(SeqCst)).is_err() {
        wrong(line!());
    }
}

fn ends_sending(cx: &mut Cx, handler: extern "C" fn(c_int)) -> Res {
    let mut sent = 0;
    let fd = Cx::with_fd(cx, cx.fd);
    cx.post(Op::Drain, 0, 0, 0)?;
    let mut error = 0;
    under_fire(&fd, handler, || {
        // Small pieces and large ones.
        for i in 0..10_000_000usize {
            let b = prng::bytes(OUT, cx.tx, if i % 4 == 0 { 100_000 } else { 500 });
            match sys::send(cx.fd, &b, MSG_NOSIGNAL) {
                Ok(n) => {
                    sent += n as u64;
                    cx.tx += n as u64;
                }
                Err(e) => {
                    error = e;
                    break;
                }
            }
        }
        Ok(())
    })?;
    let closed = std::ptr::fn_addr_eq(handler, shut_by_close as extern "C" fn(c_int));
    same!(error, if closed { libc::EBADF } else { libc::EPIPE }, "how sending ended");
    same!(cx.wait()?, sent, "bytes that arrived before the end");
    Ok(())
}

fn ends_receiving(cx: &mut Cx, handler: extern "C" fn(c_int)) -> Res {
    let fd = Cx::with_fd(cx, cx.fd);
    let closed = std::ptr::fn_addr_eq(handler, shut_by_close as extern "C" fn(c_int));
    let want = if closed { Err(libc::EBADF) } else { Ok(0) };
    under_fire(&fd, handler, || {
        let got = sys::read(cx.fd, &mut [0; 10]);
        same!(got, want, "a read that waits");
        Ok(())
    })
}

fn once(cx: &mut Cx) -> Res {
    // A handler that is reset when it has run, in the middle of transfers.
    const ENOUGH: usize = 200_000_000;
    let me = sys::pthread_self();
    let mut all = 0;
    for _ in 0..200 {
        if all > ENOUGH {
            break;
        }
        let before = RUNS.load(SeqCst);
        sys::sigaction(SIGUSR1, counted, libc::SA_RESETHAND | SA_RESTART)?;
        let t = std::thread::spawn(move || sys::pthread_kill(me, SIGUSR1));
        let n = cx.fill(30_000)?;
        t.join().map_err(|_| Why("a thread panicked".into()))?;
        for _ in 0..1000 {
            if RUNS.load(SeqCst) > before {
                break;
            }
            util::pause_ms(1);
        }
        same!(RUNS.load(SeqCst), before + 1, "runs of the handler");
        same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes that arrived");
        all += n;
    }
    Ok(())
}

extern "C" fn counted(_: c_int) {
    RUNS.fetch_add(1, SeqCst);
}

extern "C" fn with_info(_: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel's record.
    if unsafe { (*info).si_pid() } != std::process::id() as i32 {
        wrong(line!());
    }
    RUNS.fetch_add(1, SeqCst);
}

extern "C" {
    fn siginterrupt(sig: c_int, yes: c_int) -> c_int;
}

fn action(handler: usize, flags: c_int) -> libc::sigaction {
    // SAFETY: all-zero is a valid action.
    let mut a: libc::sigaction = unsafe { std::mem::zeroed() };
    a.sa_sigaction = handler;
    a.sa_flags = flags;
    a
}

fn old_actions(cx: &mut Cx) -> Res {
    let plain = counted as *const () as usize;
    let info = with_info as *const () as usize;
    let mut was: Option<(usize, c_int)> = None;
    for (handler, flags) in [
        (plain, 0),
        (info, libc::SA_SIGINFO | SA_RESTART),
        (libc::SIG_IGN, 0),
        (plain, SA_RESTART | libc::SA_NODEFER),
        (libc::SIG_DFL, 0),
    ] {
        let mut old = action(0, 0);
        // SAFETY: both actions are locals.
        let r = unsafe { libc::sigaction(SIGUSR1, &action(handler, flags), &mut old) };
        same!(r, 0, "sigaction");
        if let Some(was) = was {
            // The C library adds a flag of its own.
            same!((old.sa_sigaction, old.sa_flags & !0x0400_0000), was, "the old action");
        }
        was = Some((handler, flags));
    }
    // SAFETY: valid handlers.
    unsafe {
        same!(libc::signal(SIGUSR1, plain), libc::SIG_DFL, "signal: the old handler");
        same!(libc::signal(SIGUSR1, info), plain, "signal: the old handler");
        same!(libc::signal(SIGUSR1, plain), info, "signal: the old handler");
    }
    let mut old = action(0, 0);
    // SAFETY: `old` is a local.
    unsafe { libc::sigaction(SIGUSR1, std::ptr::null(), &mut old) };
    same!((old.sa_sigaction, old.sa_flags & SA_RESTART), (plain, SA_RESTART), "what signal has installed");
    // SAFETY: no pointers but to locals.
    unsafe {
        siginterrupt(SIGUSR1, 1);
        libc::sigaction(SIGUSR1, std::ptr::null(), &mut old);
    }
    same!((old.sa_sigaction, old.sa_flags & SA_RESTART), (plain, 0), "what siginterrupt has changed");
    sys::kill(std::process::id() as i32, SIGUSR1)?;
    // SAFETY: a local action.
    unsafe { libc::sigaction(SIGUSR1, &action(info, libc::SA_SIGINFO), std::ptr::null_mut()) };
    sys::kill(std::process::id() as i32, SIGUSR1)?;
    util::pause_ms(20);
    same!(RUNS.load(SeqCst), 2, "handlers that ran");
    same!(WRONG.load(SeqCst), 0, "the sender of the signal: the line");
    cx.warm(6, 0)
}
