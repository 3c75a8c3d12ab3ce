//! Handlers that jump out of calls, with `siglongjmp`: a program's own time limit, from before there were others.

use super::cx::{Cx, Op, Res, Why, IN};
use super::Check;
use crate::{ensure, prng, same, sys};
use libc::{c_int, MSG_DONTWAIT, MSG_WAITALL, POLLIN};
use std::cell::UnsafeCell;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    // What the kernel's call had taken nobody was told of, so the connection may stay on TCP.
    ("handler-jumps-out-of-receives", |cx| jumps(cx, receive, |cx| cx.warm(60, 10))),
    ("handler-jumps-out-of-polls", |cx| jumps(cx, poll, Cx::leave_tcp)),
    ("handler-jumps-out-of-sends", sends),
];

/// A call on an fd, and on nothing else.
pub(super) type Call = unsafe extern "C" fn(RawFd) -> isize;

/// Where a handler jumps to: libc's `sigjmp_buf`, which is smaller.
#[repr(C, align(16))]
pub(super) struct Place(pub(super) UnsafeCell<[u64; 64]>);

// SAFETY: one thread uses it.
unsafe impl Sync for Place {}

static PLACE: Place = Place(UnsafeCell::new([0; 64]));
/// The thread whose calls are left.
static THREAD: AtomicI32 = AtomicI32::new(0);
/// A call is under way that is to be left.
static INSIDE: AtomicBool = AtomicBool::new(false);

/// What a call returns that a handler has left.
pub(super) const LEFT: isize = -1000;

// `sigsetjmp` returns twice, which no function of Rust may live through.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.rs_app_leavable, \"ax\", @progbits",
    ".type rs_app_leavable, @function",
    "rs_app_leavable:",
    "push rbx",
    "push r12",
    "sub rsp, 8",
    "mov rbx, rsi",
    "mov r12d, edx",
    "mov esi, 1",
    "call __sigsetjmp@PLT",
    "test eax, eax",
    "mov rax, -1000",
    "jne 2f",
    "mov edi, r12d",
    "call rbx",
    "2:",
    "add rsp, 8",
    "pop r12",
    "pop rbx",
    "ret",
    ".size rs_app_leavable, . - rs_app_leavable",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".pushsection .text.rs_app_leavable, \"ax\", @progbits",
    ".type rs_app_leavable, @function",
    "rs_app_leavable:",
    "stp x29, x30, [sp, #-32]!",
    "stp x19, x20, [sp, #16]",
    "mov x29, sp",
    "mov x19, x1",
    "mov w20, w2",
    "mov w1, #1",
    "bl __sigsetjmp",
    "mov w1, w0",
    "mov x0, #-1000",
    "cbnz w1, 2f",
    "mov w0, w20",
    "blr x19",
    "2:",
    "ldp x19, x20, [sp, #16]",
    "ldp x29, x30, [sp], #32",
    "ret",
    ".size rs_app_leavable, . - rs_app_leavable",
    ".popsection",
);

extern "C" {
    /// Makes the call; [`LEFT`] if a handler jumps to `place`.
    pub(super) fn rs_app_leavable(place: *mut u64, call: Call, fd: RawFd) -> isize;
    pub(super) fn siglongjmp(place: *mut u64, value: c_int) -> !;
}

extern "C" fn jump(_: c_int) {
    // While this thread is here the next alarm may be another's.
    // SAFETY: no preconditions.
    let mine = unsafe { libc::gettid() } == THREAD.load(SeqCst);
    if mine && INSIDE.swap(false, SeqCst) {
        // SAFETY: the call under way is made by `rs_app_leavable`, whose frame is there as long as that.
        unsafe { siglongjmp(PLACE.0.get().cast(), 1) }
    }
}

unsafe extern "C" fn receive(fd: RawFd) -> isize {
    let mut b = [0u8; 64];
    INSIDE.store(true, SeqCst);
    let r = libc::recv(fd, b.as_mut_ptr().cast(), 64, MSG_WAITALL);
    INSIDE.store(false, SeqCst);
    r
}

unsafe extern "C" fn poll(fd: RawFd) -> isize {
    let mut b = [0u8; 8];
    let mut p = libc::pollfd { fd, events: POLLIN, revents: 0 };
    INSIDE.store(true, SeqCst);
    libc::poll(&mut p, 1, -1);
    INSIDE.store(false, SeqCst);
    libc::recv(fd, b.as_mut_ptr().cast(), 8, MSG_DONTWAIT)
}

/// `SIGALRM` in so many microseconds, and every 150 after that; 0: never.
pub fn alarm_in(us: i64) {
    let [it_value, it_interval] = [us, 150 * i64::from(us > 0)].map(|us| libc::timeval { tv_sec: 0, tv_usec: us });
    // SAFETY: the record is readable.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &libc::itimerval { it_interval, it_value }, std::ptr::null_mut()) };
}

unsafe extern "C" fn send<const N: usize>(fd: RawFd) -> isize {
    static BYTES: [u8; 60_000] = [7; 60_000];
    INSIDE.store(true, SeqCst);
    let r = libc::send(fd, BYTES.as_ptr().cast(), N, libc::MSG_NOSIGNAL);
    INSIDE.store(false, SeqCst);
    r
}

/// A peer that sleeps hears of what a send has given it, though a handler has left that send.
fn sends(cx: &mut Cx) -> Res {
    let pair = || -> std::io::Result<_> {
        let l = TcpListener::bind("127.0.0.1:0")?;
        Ok((TcpStream::connect(l.local_addr()?)?, l.accept()?.0))
    };
    let (ours, theirs) = pair().map_err(|e| Why(e.to_string()))?;
    let (fd, peer) = (ours.as_raw_fd(), theirs.as_raw_fd());
    // SAFETY: all-zero is an empty mask, and the calls write and read just that.
    let reader = unsafe {
        let mut alarm: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut alarm, libc::SIGALRM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &alarm, std::ptr::null_mut());
        let t = std::thread::spawn(move || while let Ok(1..) = sys::read(theirs.as_raw_fd(), &mut [0; 65536]) {});
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &alarm, std::ptr::null_mut());
        t
    };
    let (mut before, mut moved) = ((0, 0), false);
    for _ in 0..400 {
        sys::send(fd, b"x", 0)?;
        std::thread::sleep(Duration::from_millis(1));
        let now = sys::tcp_bytes(fd)?;
        moved = now == before;
        if moved {
            break;
        }
        before = now;
    }
    ensure!(moved || !cx.ring, "the connection never left TCP");
    // SAFETY: no preconditions.
    THREAD.store(unsafe { libc::gettid() }, SeqCst);
    sys::sigaction(libc::SIGALRM, jump, 0)?;
    for i in 0..600 {
        let call: Call = if i % 2 == 0 { send::<20_000> } else { send::<60_000> };
        let begun = Instant::now();
        alarm_in(150);
        while begun.elapsed() < Duration::from_micros(130 + i * 7 % 40) {}
        // SAFETY: the call takes nothing but an fd, and its frame has nothing to drop.
        unsafe { rs_app_leavable(PLACE.0.get().cast(), call, fd) };
        alarm_in(0);
        let begun = Instant::now();
        let unread = || Ok::<_, i32>(sys::siocoutq(fd)? + sys::fionread(peer)?);
        while unread()? > 0 {
            ensure!(begun.elapsed() < Duration::from_secs(2), "the peer sleeps, with {} bytes to read", unread()?);
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    drop(ours);
    reader.join().map_err(|_| Why("the reader panicked".into()))
}

/// A connection whose calls were left, asleep or not, moves and ends as any other.
fn jumps(cx: &mut Cx, call: Call, then: fn(&mut Cx) -> Res) -> Res {
    const BYTES: u64 = 30_000;
    cx.renew()?;
    // SAFETY: no preconditions.
    THREAD.store(unsafe { libc::gettid() }, SeqCst);
    sys::sigaction(libc::SIGALRM, jump, 0)?;
    cx.post(Op::SendBits, BYTES / 8, 8, 30)?;
    for i in 0..200 {
        alarm_in(20 + i * 37 % 700);
        // SAFETY: the calls take nothing but an fd, and their frames have nothing to drop.
        let left = (0..10_000).any(|_| unsafe { rs_app_leavable(PLACE.0.get().cast(), call, cx.fd) } == LEFT);
        alarm_in(0);
        ensure!(left, "no handler came in ten thousand calls");
    }
    std::thread::sleep(Duration::from_millis(5));
    cx.wait()?;
    // From another machine some may still be on their way. (If a call that was left has taken the last, nothing is.)
    let (end, mut last) = (prng::bytes(IN, BYTES - 8, 8), Vec::new());
    while last != end && sys::wait1(cx.fd, POLLIN, 1000)? != 0 {
        match cx.grab(4096) {
            Err(libc::EAGAIN) => {}
            b => last.extend(b?),
        }
        last.drain(..last.len().saturating_sub(8));
    }
    cx.rx = BYTES;
    then(cx)?;
    sys::close(cx.fd)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads then");
    Ok(())
}
