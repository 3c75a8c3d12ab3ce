//! Threads that are cancelled while a call waits, or before.

use super::cx::{Cx, Op, Res, Why, PIECE};
use super::waiting::set;
use super::Check;
use crate::{ensure, same, sys, util};
use libc::{c_int, c_void, EPOLLIN, POLLIN};
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("cancel-receiving", receiving),
    ("cancel-receiving-timeout", receiving_timeout),
    ("cancel-receiving-part", receiving_part),
    ("cancel-sending", sending),
    ("cancel-waiting", waiting),
    ("cancel-accept", accepting),
    ("cancel-busy", busy),
    ("cancel-disabled", disabled),
    ("cancel-one-of-two", one_of_two),
    ("cancel-back-on-tcp", back_on_tcp),
    ("cancel-anywhere", anywhere),
    ("cancel-by-a-handler", left_by_handlers),
];

extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
    fn pthread_testcancel();
    fn pthread_timedjoin_np(t: libc::pthread_t, r: *mut *mut c_void, at: *const libc::timespec) -> c_int;
}

/// A call on an fd, and on nothing else.
type Call = unsafe fn(RawFd) -> isize;

/// What a cancelled thread returns.
const CANCELED: usize = usize::MAX;

/// What a thread is to do. Its frames have nothing to drop.
struct Job {
    fd: RawFd,
    call: Call,
    again: bool,
}

extern "C" fn main(job: *mut c_void) -> *mut c_void {
    // SAFETY: the job outlives the thread, which its maker joins.
    let job = unsafe { &*(job as *const Job) };
    loop {
        // SAFETY: the calls of this file take nothing but an fd.
        let r = unsafe { (job.call)(job.fd) };
        if !job.again {
            return (r as usize & 0xffff) as *mut c_void;
        }
    }
}

/// A thread that may be cancelled. (Its job is never freed.)
fn start(fd: RawFd, again: bool, call: Call) -> Result<libc::pthread_t, Why> {
    let job = Box::leak(Box::new(Job { fd, call, again }));
    let mut t: libc::pthread_t = 0;
    // SAFETY: `main` takes the job, which lives for ever.
    let r = unsafe { libc::pthread_create(&mut t, std::ptr::null(), main, (job as *mut Job).cast()) };
    same!(r, 0, "pthread_create");
    Ok(t)
}

/// What the thread returned, if it ends in time.
fn end(t: libc::pthread_t) -> Option<usize> {
    let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let mut r = null_mut();
    // SAFETY: all pointers are to locals.
    unsafe {
        libc::clock_gettime(libc::CLOCK_REALTIME, &mut at);
        at.tv_sec += 2;
        (pthread_timedjoin_np(t, &mut r, &at) == 0).then_some(r as usize)
    }
}

fn cancel(what: &str, fd: RawFd, again: bool, call: Call) -> Res {
    let t = start(fd, again, call)?;
    util::pause_ms(30);
    cancel_in(what, t)
}

fn cancel_in(what: &str, t: libc::pthread_t) -> Res {
    // SAFETY: the thread is not joined yet.
    same!(unsafe { libc::pthread_cancel(t) }, 0, "pthread_cancel");
    same!(end(t), Some(CANCELED), "how a thread in {what} ended");
    Ok(())
}

unsafe fn read(fd: RawFd) -> isize {
    let mut b = [0u8; 64];
    libc::read(fd, b.as_mut_ptr().cast(), 64)
}

unsafe fn recv(fd: RawFd) -> isize {
    let mut b = [0u8; 64];
    libc::recv(fd, b.as_mut_ptr().cast(), 64, 0)
}

unsafe fn peek(fd: RawFd) -> isize {
    let mut b = [0u8; 64];
    libc::recv(fd, b.as_mut_ptr().cast(), 64, libc::MSG_PEEK)
}

unsafe fn recvfrom(fd: RawFd) -> isize {
    let mut b = [0u8; 64];
    libc::recvfrom(fd, b.as_mut_ptr().cast(), 64, 0, null_mut(), null_mut())
}

unsafe fn readv(fd: RawFd) -> isize {
    let mut b = [0u8; 64];
    let v = libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: 64 };
    libc::readv(fd, &v, 1)
}

unsafe fn recvmsg(fd: RawFd) -> isize {
    let mut b = [0u8; 64];
    let mut v = libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: 64 };
    let mut m: libc::msghdr = std::mem::zeroed();
    m.msg_iov = &mut v;
    m.msg_iovlen = 1;
    libc::recvmsg(fd, &mut m, 0)
}

unsafe fn recv_all(fd: RawFd) -> isize {
    let mut b = [0u8; 64];
    libc::recv(fd, b.as_mut_ptr().cast(), 64, libc::MSG_WAITALL)
}

unsafe fn recv_now(fd: RawFd) -> isize {
    let mut b = [0u8; 64];
    libc::recv(fd, b.as_mut_ptr().cast(), 64, libc::MSG_DONTWAIT)
}

unsafe fn poll(fd: RawFd) -> isize {
    let mut p = libc::pollfd { fd, events: POLLIN, revents: 0 };
    libc::poll(&mut p, 1, -1) as isize
}

unsafe fn poll_now(fd: RawFd) -> isize {
    let mut p = libc::pollfd { fd, events: POLLIN, revents: 0 };
    libc::poll(&mut p, 1, 0) as isize
}

unsafe fn ppoll(fd: RawFd) -> isize {
    let mut p = libc::pollfd { fd, events: POLLIN, revents: 0 };
    let ts = libc::timespec { tv_sec: 60, tv_nsec: 0 };
    libc::ppoll(&mut p, 1, &ts, std::ptr::null()) as isize
}

unsafe fn select(fd: RawFd) -> isize {
    let mut r: libc::fd_set = std::mem::zeroed();
    libc::FD_SET(fd, &mut r);
    libc::select(fd + 1, &mut r, null_mut(), null_mut(), null_mut()) as isize
}

unsafe fn pselect(fd: RawFd) -> isize {
    let mut r: libc::fd_set = std::mem::zeroed();
    libc::FD_SET(fd, &mut r);
    libc::pselect(fd + 1, &mut r, null_mut(), null_mut(), std::ptr::null(), std::ptr::null()) as isize
}

unsafe fn epoll_wait(ep: RawFd) -> isize {
    let mut e = libc::epoll_event { events: 0, u64: 0 };
    libc::epoll_wait(ep, &mut e, 1, -1) as isize
}

unsafe fn epoll_now(ep: RawFd) -> isize {
    let mut e = libc::epoll_event { events: 0, u64: 0 };
    libc::epoll_wait(ep, &mut e, 1, 0) as isize
}

unsafe fn epoll_pwait(ep: RawFd) -> isize {
    let mut e = libc::epoll_event { events: 0, u64: 0 };
    libc::epoll_pwait(ep, &mut e, 1, 60_000, std::ptr::null()) as isize
}

/// What the calls below send.
static NEXT: [AtomicU8; PIECE] = [const { AtomicU8::new(0) }; PIECE];

unsafe fn send(fd: RawFd) -> isize {
    libc::send(fd, NEXT.as_ptr().cast(), PIECE, libc::MSG_NOSIGNAL)
}

unsafe fn write(fd: RawFd) -> isize {
    libc::write(fd, NEXT.as_ptr().cast(), PIECE)
}

unsafe fn writev(fd: RawFd) -> isize {
    let v = libc::iovec { iov_base: NEXT.as_ptr() as *mut c_void, iov_len: PIECE };
    libc::writev(fd, &v, 1)
}

fn receiving(cx: &mut Cx) -> Res {
    let calls: [(&str, Call); 6] = [
        ("read", read),
        ("recv", recv),
        ("recv with MSG_PEEK", peek),
        ("recvfrom", recvfrom),
        ("readv", readv),
        ("recvmsg", recvmsg),
    ];
    for (what, call) in calls {
        cancel(what, cx.fd, false, call)?;
        cx.warm(6, 0)?;
    }
    Ok(())
}

fn receiving_timeout(cx: &mut Cx) -> Res {
    sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, 60_000)?;
    cancel("recv with SO_RCVTIMEO", cx.fd, false, recv)?;
    cx.warm(6, 0)
}

fn receiving_part(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    let t = start(cx.fd, false, recv_all)?;
    // A thread that is cancelled before it has taken anything loses nothing.
    for _ in 0..2000 {
        if sys::fionread(cx.fd)? == 0 {
            break;
        }
        util::pause_ms(1);
    }
    util::pause_ms(30);
    cancel_in("recv with MSG_WAITALL", t)?;
    // What the call had taken is lost with it, as in the kernel.
    cx.rx += 10;
    cx.warm(6, 0)
}

fn sending(cx: &mut Cx) -> Res {
    let calls: [(&str, Call); 3] = [("send", send), ("write", write), ("writev", writev)];
    let mut n = 0;
    for (what, call) in calls {
        n += cx.full(|cx, b| {
            NEXT.iter().zip(b).for_each(|(to, from)| to.store(*from, SeqCst));
            let t = start(cx.fd, false, call)?;
            util::pause_ms(30);
            // SAFETY: the thread is not joined yet.
            same!(unsafe { libc::pthread_cancel(t) }, 0, "pthread_cancel");
            match end(t) {
                Some(CANCELED) => Ok(None),
                Some(k) if k > 0 && k <= PIECE => Ok(Some(k)),
                how => Err(Why(format!("a thread in {what} ended so: {how:?}"))),
            }
        })?;
    }
    same!(cx.tell(Op::Recv, n, 0, 0)?, n, "bytes that arrived");
    cx.warm(6, 0)
}

fn waiting(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    let calls: [(&str, RawFd, Call); 6] = [
        ("poll", cx.fd, poll),
        ("ppoll", cx.fd, ppoll),
        ("select", cx.fd, select),
        ("pselect", cx.fd, pselect),
        ("epoll_wait", ep, epoll_wait),
        ("epoll_pwait", ep, epoll_pwait),
    ];
    for _ in 0..2 {
        for (what, fd, call) in calls {
            cancel(what, fd, false, call)?;
            cx.later(15, 10)?;
            same!(sys::poll1(cx.fd, POLLIN, 2000)?, POLLIN, "poll after a cancelled {what}");
            same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "epoll after a cancelled {what}");
            cx.wait()?;
            cx.recv(10)?;
        }
    }
    Ok(())
}

unsafe fn accept(fd: RawFd) -> isize {
    libc::accept(fd, null_mut(), null_mut()) as isize
}

fn accepting(cx: &mut Cx) -> Res {
    let (l, _) = sys::listen(0, 4)?;
    cancel("accept", l, false, accept)?;
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, l, EPOLLIN as u32, 7)?;
    cancel("epoll_wait of a listener", ep, false, epoll_wait)?;
    cx.warm(6, 0)
}

fn busy(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    let calls: [(&str, RawFd, Call); 3] =
        [("recv without waiting", cx.fd, recv_now), ("poll", cx.fd, poll_now), ("epoll_wait", ep, epoll_now)];
    for (what, fd, call) in calls {
        cancel(what, fd, true, call)?;
        cx.warm(6, 0)?;
    }
    Ok(())
}

static TAKEN: AtomicBool = AtomicBool::new(false);

unsafe fn disabled_recv(fd: RawFd) -> isize {
    let mut b = [0u8; 10];
    pthread_setcancelstate(1, null_mut());
    let n = libc::recv(fd, b.as_mut_ptr().cast(), 10, libc::MSG_WAITALL);
    TAKEN.store(n == 10, SeqCst);
    pthread_setcancelstate(0, null_mut());
    pthread_testcancel();
    n
}

fn disabled(cx: &mut Cx) -> Res {
    let t = start(cx.fd, false, disabled_recv)?;
    util::pause_ms(20);
    // SAFETY: the thread is not joined yet.
    same!(unsafe { libc::pthread_cancel(t) }, 0, "pthread_cancel");
    util::pause_ms(20);
    ensure!(!TAKEN.load(SeqCst), "recv ended before anything came");
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(end(t), Some(CANCELED), "how the thread ended");
    ensure!(TAKEN.load(SeqCst), "recv was cancelled although that was disabled");
    cx.rx += 10;
    cx.warm(6, 0)
}

fn one_of_two(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    for (fd, call) in [(cx.fd, recv as Call), (ep, epoll_wait), (cx.fd, poll)] {
        let (a, b) = (start(fd, false, call)?, start(fd, false, call)?);
        util::pause_ms(20);
        // SAFETY: the thread is not joined yet.
        same!(unsafe { libc::pthread_cancel(a) }, 0, "pthread_cancel");
        same!(end(a), Some(CANCELED), "how the cancelled thread ended");
        cx.tell(Op::Send, 10, 0, 0)?;
        let r = end(b);
        ensure!(matches!(r, Some(1 | 10)), "how the other thread ended: {r:?}");
        if r == Some(10) {
            cx.rx += 10;
        } else {
            cx.recv(10)?;
        }
    }
    cx.warm(6, 0)
}

/// A thread sleeps in a call that the kernel has taken over; when it is gone the connection can be closed.
fn back_on_tcp(cx: &mut Cx) -> Res {
    let t = start(cx.fd, false, recv_all)?;
    util::pause_ms(30);
    // Which rings do not have.
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_TIMESTAMP, 1i32)?;
    util::pause_ms(30);
    cancel_in("a receive", t)?;
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

/// It has begun, or is about to.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// A call in which the thread may be cancelled at any instruction.
unsafe fn anywhere_in(call: Call, fd: RawFd) -> isize {
    pthread_setcanceltype(1, null_mut());
    BEGUN.store(true, SeqCst);
    let r = call(fd);
    pthread_setcanceltype(0, null_mut());
    r
}

unsafe fn anywhere_in_recv(fd: RawFd) -> isize {
    anywhere_in(recv, fd)
}

unsafe fn anywhere_in_poll(fd: RawFd) -> isize {
    anywhere_in(poll, fd)
}

unsafe fn anywhere_in_select(fd: RawFd) -> isize {
    anywhere_in(select, fd)
}

/// Threads that may be cancelled at any instruction, and are on the way to their sleep, or from it; when these are gone the
/// connection goes on, and can be closed.
fn anywhere(cx: &mut Cx) -> Res {
    for i in 0..200 {
        for call in [anywhere_in_recv, anywhere_in_poll, anywhere_in_select] {
            BEGUN.store(false, SeqCst);
            let t = start(cx.fd, false, call)?;
            let mut began = Instant::now();
            while began.elapsed() < Duration::from_nanos(i * 200) {
                if !BEGUN.load(SeqCst) {
                    began = Instant::now();
                }
                std::hint::spin_loop();
            }
            cancel_in("a call", t)?;
        }
        if i % 10 == 0 {
            cx.warm(1, 0)?;
        }
    }
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

extern "C" fn leave(_: c_int) {
    // SAFETY: the frames that the thread leaves have nothing to drop.
    unsafe { libc::pthread_exit(null_mut()) }
}

/// Handlers end threads in the middle of calls, asleep or not; when these are gone the connection can be closed.
fn left_by_handlers(cx: &mut Cx) -> Res {
    const ROUNDS: u64 = 150;
    sys::sigaction(libc::SIGUSR1, leave, 0)?;
    cx.post(Op::SendBits, 3000, 8, 30)?;
    for i in 0..ROUNDS {
        let call = [recv_all, poll_then_recv][i as usize % 2];
        let t = start(cx.fd, true, call)?;
        std::thread::sleep(std::time::Duration::from_micros(i * 37 % 900));
        sys::pthread_kill(t, libc::SIGUSR1);
        same!(end(t), Some(0), "how a thread ended whose handler left it");
    }
    cx.wait()?;
    while let Ok(1..) = sys::recv(cx.fd, &mut [0; 4096], libc::MSG_DONTWAIT) {}
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}

unsafe fn poll_then_recv(fd: RawFd) -> isize {
    poll(fd);
    recv_now(fd)
}
