//! The rest of what a program may do with a socket: what rings do not have, and what nobody sees.

use super::counted::stays;
use super::cx::{untried, Cx, Op, Res, Why, LATE, OUT};
use super::found::pair;
use super::Check;
use crate::{ensure, more, prng, same, sys, util};
use libc::{c_int, c_void, EAGAIN, EFAULT, MSG_DONTWAIT, MSG_OOB, POLLIN, SOL_SOCKET};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("wait-out-of-sight-poll", |cx| out_of_sight(cx, hidden::poll)),
    ("wait-out-of-sight-epoll", |cx| out_of_sight(cx, hidden::epoll)),
    ("wait-out-of-sight-unasked", out_of_sight_unasked),
    ("wait-out-of-sight-to-send", out_of_sight_out),
    ("wait-out-of-sight-for-a-set", for_a_set),
    ("wait-out-of-sight-for-a-set-from-the-start", for_a_set_from_the_start),
    ("thinks-between-looks", |cx| thinks(cx, (3, 200), computes)),
    ("thinks-for-seconds-between-looks", |cx| thinks(cx, (1, 2500), computes)),
    ("thinks-asleep-between-looks", |cx| thinks(cx, (3, 200), std::thread::sleep)),
    ("thinks-for-a-thread-between-looks", |cx| thinks(cx, (3, 200), waits_for_a_thread)),
    ("oob-sent", oob_sent),
    ("oob-received", oob_received),
    ("oob-received-inline", oob_inline),
    ("zerocopy", zerocopy),
    ("zerocopy-unused", zerocopy_unused),
    ("sigio-fcntl", |cx| sigio(cx, false)),
    ("sigio-ioctl", |cx| sigio(cx, true)),
    ("control-data-that-is-none", bad_control_data),
    ("control-data-for-nobody", ignored_control_data),
    ("stdio-fdopen", stdio),
    ("stdio-dprintf", dprintf),
    ("connect-to-nowhere", nowhere),
    ("connect-to-itself", itself),
    ("tcp-info", tcp_info),
    ("io-uring-set-up", io_uring),
    ("bad-addresses-above", bad_above),
];

/// System calls that no library sees.
pub(super) mod hidden {
    use libc::{c_int, c_long, timespec};
    use std::os::fd::RawFd;

    /// Makes a system call.
    ///
    /// # Safety
    /// As for the call.
    pub unsafe fn call(n: c_long, a: [usize; 6]) -> isize {
        let r: isize;
        #[cfg(target_arch = "x86_64")]
        core::arch::asm!("syscall", inlateout("rax") n as isize => r, in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
            in("r10") a[3], in("r8") a[4], in("r9") a[5], lateout("rcx") _, lateout("r11") _);
        #[cfg(target_arch = "aarch64")]
        core::arch::asm!("svc 0", in("x8") n, inlateout("x0") a[0] as isize => r, in("x1") a[1], in("x2") a[2],
            in("x3") a[3], in("x4") a[4], in("x5") a[5]);
        r
    }

    /// Waits at most `ms` for `events`; says whether they came.
    pub fn poll(fd: RawFd, events: i16, ms: i64) -> bool {
        let mut p = libc::pollfd { fd, events, revents: 0 };
        let ts = timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 };
        // SAFETY: both structs live through the call.
        let r = unsafe { call(libc::SYS_ppoll, [&raw mut p as usize, 1, &raw const ts as usize, 0, 8, 0]) };
        r == 1 && p.revents & events != 0
    }

    /// Waits at most `ms` for a set; says whether there was an event.
    pub fn epoll_wait(ep: RawFd, ms: i64) -> bool {
        let mut e = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: the event lives through the call.
        let r =
            unsafe { call(libc::SYS_epoll_pwait, [ep as usize, &raw mut e as usize, 1, ms as c_int as usize, 0, 8]) };
        r == 1
    }

    /// The same by an epoll set.
    pub fn epoll(fd: RawFd, events: i16, ms: i64) -> bool {
        let mut e = libc::epoll_event { events: events as u32, u64: 0 };
        // SAFETY: the event lives through the calls.
        unsafe {
            let ep = call(libc::SYS_epoll_create1, [0; 6]) as usize;
            call(libc::SYS_epoll_ctl, [ep, libc::EPOLL_CTL_ADD as usize, fd as usize, &raw mut e as usize, 0, 0]);
            let r = call(libc::SYS_epoll_pwait, [ep, &raw mut e as usize, 1, ms as c_int as usize, 0, 8]);
            call(libc::SYS_close, [ep, 0, 0, 0, 0, 0]);
            r == 1
        }
    }
}

/// Waits for ten bytes. (That a socket was readable does not promise that it still is.)
fn noticed(cx: &mut Cx, wait: impl Fn(RawFd, i16, i64) -> bool) -> Res {
    for _ in 0..100 {
        ensure!(wait(cx.fd, POLLIN, 3000), "data were not noticed");
        match cx.grab(10) {
            Err(EAGAIN) => {}
            b => return cx.take(&b?),
        }
    }
    ensure!(false, "readable and nothing there, again and again");
    Ok(())
}

fn out_of_sight(cx: &mut Cx, wait: fn(RawFd, i16, i64) -> bool) -> Res {
    sys::nonblock(cx.fd, true)?;
    for pause in [0, 5, 200] {
        same!(cx.grab(10), Err(EAGAIN), "recv of nothing");
        cx.later(pause, 10)?;
        noticed(cx, wait).map_err(|e| Why(format!("after {pause} ms: {}", e.0)))?;
        cx.wait()?;
    }
    cx.warm(20, 0)
}

/// Bun makes its set and fills it by libc, and waits by a system call of its own.
fn for_a_set(cx: &mut Cx) -> Res {
    sys::nonblock(cx.fd, true)?;
    let ep = sys::epoll_create()?;
    sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, cx.fd, POLLIN as u32, 0)?;
    for pause in [0, 5, 200] {
        same!(cx.grab(10), Err(EAGAIN), "recv of nothing");
        cx.later(pause, 10)?;
        noticed(cx, |_, _, ms| hidden::epoll_wait(ep, ms)).map_err(|e| Why(format!("after {pause} ms: {}", e.0)))?;
        cx.wait()?;
    }
    sys::close(ep)?;
    cx.warm(20, 0)
}

fn for_a_set_from_the_start(_: &mut Cx) -> Res {
    let (a, b) = pair()?;
    let side = |fd: RawFd, first: bool| -> Res {
        let ep = sys::epoll_create()?;
        sys::nonblock(fd, true)?;
        sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, POLLIN as u32, 0)?;
        let mut buf = [0; 16];
        for i in 0..400u32 {
            if first {
                sys::write_all(fd, &[i as u8; 16])?;
            }
            loop {
                ensure!(hidden::epoll_wait(ep, 5000), "message {i} was not noticed");
                match sys::recv(fd, &mut buf, 0) {
                    Err(EAGAIN) => {}
                    n => break same!(n, Ok(16), "bytes of message {i}"),
                }
            }
            same!(buf, [i as u8; 16], "message {i}");
            if !first {
                sys::write_all(fd, &buf)?;
            }
        }
        sys::close(ep)?;
        Ok(())
    };
    std::thread::scope(|s| {
        let other = s.spawn(|| side(b, false));
        side(a, true)?;
        other.join().map_err(|_| Why("a thread panicked".into()))?
    })?;
    sys::close(a)?;
    sys::close(b)?;
    Ok(())
}

fn out_of_sight_unasked(cx: &mut Cx) -> Res {
    // The program does not try first.
    sys::nonblock(cx.fd, true)?;
    cx.later(20, 10)?;
    noticed(cx, hidden::poll)?;
    cx.wait()?;
    cx.warm(20, 0)
}

fn out_of_sight_out(cx: &mut Cx) -> Res {
    sys::nonblock(cx.fd, true)?;
    let n = cx.fill(4096)? as u64;
    cx.post(Op::Sleep, 30_000, 0, 0)?;
    cx.post(Op::Recv, n, 0, 0)?;
    ensure!(hidden::poll(cx.fd, libc::POLLOUT, 3000), "room was not noticed");
    same!(cx.wait()?, n, "bytes that arrived");
    cx.warm(20, 0)
}

/// A program that looks now and then, and computes meanwhile, waits nowhere.
/// Who is told `EAGAIN` and then does something else for a while keeps its ring: it computes, or sleeps where no socket wakes it.
fn thinks(cx: &mut Cx, (rounds, ms): (u32, u64), about: fn(Duration)) -> Res {
    sys::nonblock(cx.fd, true)?;
    let before = sys::tcp_bytes(cx.fd)?;
    for _ in 0..rounds {
        same!(cx.grab(10), Err(EAGAIN), "recv of nothing");
        about(Duration::from_millis(ms));
        // It must not wait for the puppet before it looks again: that is a sleep where a socket wakes it.
        cx.post(Op::Send, 10, 0, 0)?;
        let got = loop {
            match cx.grab(10) {
                Err(EAGAIN) => core::hint::spin_loop(),
                got => break got?,
            }
        };
        cx.take(&got)?;
        cx.wait()?;
    }
    let now = sys::tcp_bytes(cx.fd)?;
    if cx.is_to_leave() && now != before {
        return Err(Why(format!("{LATE}it returned to TCP, which has carried {now:?} bytes, and {before:?} before")));
    }
    sys::nonblock(cx.fd, false)?;
    cx.warm(6, 0)
}

fn computes(long: Duration) {
    let until = Instant::now() + long;
    while Instant::now() < until {
        core::hint::spin_loop();
    }
}

/// As for an interpreter's lock.
fn waits_for_a_thread(long: Duration) {
    let _ = std::thread::spawn(move || std::thread::sleep(long)).join();
}

fn oob_sent(cx: &mut Cx) -> Res {
    cx.send(100)?;
    same!(sys::send(cx.fd, b"!", MSG_OOB), Ok(1), "send of urgent data");
    cx.send(100)?;
    same!(cx.tell(Op::Recv, 200, 0, 0)?, 200, "bytes beside it");
    cx.warm(6, 0)
}

fn at_mark(fd: RawFd) -> Result<bool, i32> {
    let mut v: c_int = -1;
    // SAFETY: the request writes an int.
    if unsafe { libc::ioctl(fd, 0x8905, &mut v) } < 0 {
        return Err(sys::errno());
    }
    Ok(v == 1)
}

fn oob_received(cx: &mut Cx) -> Res {
    same!(at_mark(cx.fd), Ok(false), "SIOCATMARK without urgent data");
    same!(sys::recv(cx.fd, &mut [0; 1], MSG_OOB), Err(libc::EINVAL), "recv of urgent data that there are not");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.tell(Op::Urgent, 0, 0, 0)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(sys::poll1(cx.fd, libc::POLLPRI, 2000)?, libc::POLLPRI, "poll of urgent data");
    cx.recv(10)?;
    same!(at_mark(cx.fd), Ok(true), "SIOCATMARK before the urgent byte");
    let mut b = [0];
    same!(sys::recv(cx.fd, &mut b, MSG_OOB), Ok(1), "recv of urgent data");
    same!(b, [b'!'], "the urgent byte");
    cx.recv(10)?;
    same!(at_mark(cx.fd), Ok(false), "SIOCATMARK behind it");
    cx.warm(6, 0)
}

/// Qt has the urgent byte among the others in every connection: as long as there is none, that is nothing to go back for.
fn oob_inline(cx: &mut Cx) -> Res {
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_OOBINLINE, 1i32)?;
    cx.leave_tcp()?;
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, cx.fd, libc::EPOLLPRI as u32, 7)?;
    cx.post(Op::Send, 10, 0, 0)?;
    cx.post(Op::Sleep, 30_000, 0, 0)?;
    cx.post(Op::Urgent, 0, 0, 0)?;
    cx.post(Op::Send, 10, 0, 0)?;
    // While what came before is unread.
    same!(sys::poll1(cx.fd, libc::POLLPRI, 2000)?, libc::POLLPRI, "poll of urgent data");
    same!(sys::epoll_wait(ep, 1, 2000)?, [(libc::EPOLLPRI as u32, 7)], "what a set says of urgent data");
    sys::close(ep)?;
    cx.wait()?;
    cx.arrive(21)?;
    let before = cx.grab(50)?;
    same!(before.len(), 10, "what a receive takes before the urgent byte");
    cx.take(&before)?;
    same!(at_mark(cx.fd), Ok(true), "SIOCATMARK before it");
    let rest = cx.grab(50)?;
    same!((rest.len(), rest.first()), (11, Some(&b'!')), "what a receive takes from there");
    cx.take(&rest[1..])?;
    same!(at_mark(cx.fd), Ok(false), "SIOCATMARK behind it");
    cx.warm(6, 0)
}

/// The option, without a send that makes use of it.
fn zerocopy_unused(cx: &mut Cx) -> Res {
    cx.renew()?;
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_ZEROCOPY, 1i32)?;
    cx.leave_tcp()?;
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_ZEROCOPY, 1i32)?;
    stays(cx)?;
    zerocopy(cx)
}

/// TCP takes no notice of fds and credentials that are sent along.
fn ignored_control_data(cx: &mut Cx) -> Res {
    for kind in [libc::SCM_CREDENTIALS, libc::SCM_RIGHTS] {
        let b = cx.out(100);
        let mut v = [libc::iovec { iov_base: b.as_ptr().cast_mut().cast(), iov_len: b.len() }];
        let mut h = sys::msghdr(&mut v);
        let mut room = [0u64; 4];
        // SAFETY: the control data has room for an entry of 12 bytes, and is borrowed for writing.
        unsafe {
            h.msg_control = room.as_mut_ptr().cast();
            h.msg_controllen = libc::CMSG_SPACE(12) as _;
            let c = libc::CMSG_FIRSTHDR(&h);
            (*c).cmsg_level = SOL_SOCKET;
            (*c).cmsg_type = kind;
            (*c).cmsg_len = libc::CMSG_LEN(12) as _;
            same!(libc::sendmsg(cx.fd, &h, 0), 100, "sendmsg with control data of kind {kind}");
        }
        same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "bytes that arrived");
    }
    stays(cx)
}

fn zerocopy(cx: &mut Cx) -> Res {
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_ZEROCOPY, 1i32)?;
    let b = cx.out(60_000);
    let mut n = 0;
    while n < b.len() {
        n += sys::send(cx.fd, &b[n..], libc::MSG_ZEROCOPY)?;
    }
    same!(cx.tell(Op::Recv, 60_000, 0, 0)?, 60_000, "bytes that arrived");
    let mut room = [0u64; 32];
    for i in 0.. {
        let mut v = [];
        let mut h = sys::msghdr(&mut v);
        h.msg_control = room.as_mut_ptr().cast();
        h.msg_controllen = std::mem::size_of_val(&room) as _;
        // SAFETY: the control buffer is of the length that is given.
        if unsafe { libc::recvmsg(cx.fd, &mut h, libc::MSG_ERRQUEUE) } == 0 {
            ensure!(h.msg_controllen > 0, "a completion without contents");
            break;
        }
        ensure!(i < 1000, "no completion: {}", sys::strerror(sys::errno()));
        util::pause_ms(1);
    }
    cx.warm(6, 0)
}

fn sigio(cx: &mut Cx, ioctl: bool) -> Res {
    more::count_signal(libc::SIGIO, libc::SA_RESTART)?;
    sys::fcntl(cx.fd, libc::F_SETOWN, std::process::id() as i32)?;
    if ioctl {
        let on: c_int = 1;
        // SAFETY: the request reads an int.
        same!(unsafe { libc::ioctl(cx.fd, libc::FIOASYNC, &on) }, 0, "FIOASYNC");
    } else {
        let flags = sys::fcntl(cx.fd, libc::F_GETFL, 0)?;
        sys::fcntl(cx.fd, libc::F_SETFL, flags | libc::O_ASYNC)?;
    }
    util::pause_ms(20);
    same!(more::signals(), 0, "signals before anything comes");
    for _ in 0..3 {
        let before = more::signals();
        cx.tell(Op::Send, 10, 0, 0)?;
        for _ in 0..1000 {
            if more::signals() > before {
                break;
            }
            util::pause_ms(1);
        }
        ensure!(more::signals() > before, "no SIGIO");
        cx.recv(10)?;
    }
    Ok(())
}

/// Control data that the kernel refuses, while there is a connection on a ring.
fn bad_control_data(cx: &mut Cx) -> Res {
    let (a, b) = sys::socketpair()?;
    for len in [0, 1, 15, 24, 1000, usize::MAX] {
        let mut h = sys::msghdr(&mut []);
        let mut room = [0u64; 3];
        // SAFETY: the control data has room for the head of an entry.
        unsafe {
            h.msg_control = room.as_mut_ptr().cast();
            h.msg_controllen = size_of_val(&room) as _;
            let c = libc::CMSG_FIRSTHDR(&h);
            (*c).cmsg_level = libc::SOL_SOCKET;
            (*c).cmsg_type = libc::SCM_RIGHTS;
            (*c).cmsg_len = len as _;
            libc::CMSG_DATA(c).cast::<[c_int; 2]>().write([cx.fd, cx.fd]);
            if len == 24 {
                h.msg_controllen = 23;
            }
            same!(libc::sendmsg(a, &h, 0), -1, "sendmsg with an entry of {len}");
        }
        same!(sys::errno(), libc::EINVAL, "errno of {len}");
    }
    [a, b].into_iter().try_for_each(sys::close)?;
    cx.warm(6, 0)
}

fn stdio(cx: &mut Cx) -> Res {
    // SAFETY: the mode is a C string.
    let f = unsafe { libc::fdopen(cx.fd, c"r+".as_ptr()) };
    ensure!(!f.is_null(), "fdopen: {}", sys::strerror(sys::errno()));
    for _ in 0..5 {
        cx.tell(Op::Send, 3000, 0, 0)?;
        let mut b = vec![0u8; 3000];
        // SAFETY: the stream is open, and the buffer of that length.
        same!(unsafe { libc::fread(b.as_mut_ptr().cast(), 1, 3000, f) }, 3000, "fread");
        cx.take(&b)?;
        let b = cx.out(2000);
        // SAFETY: as above.
        unsafe {
            libc::fseek(f, 0, libc::SEEK_CUR);
            same!(libc::fwrite(b.as_ptr().cast(), 1, 2000, f), 2000, "fwrite");
            same!(libc::fflush(f), 0, "fflush");
        }
        same!(cx.tell(Op::Recv, 2000, 0, 0)?, 2000, "bytes of fwrite");
    }
    // SAFETY: the stream is open.
    same!(unsafe { libc::fclose(f) }, 0, "fclose");
    same!(sys::read(cx.fd, &mut [0; 1]), Err(libc::EBADF), "read after fclose");
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "bytes before the end");
    Ok(())
}

/// The C library's function, under another name.
mod c {
    extern "C" {
        pub fn dprintf(fd: libc::c_int, format: *const libc::c_char, ...) -> libc::c_int;
    }
}

fn dprintf(cx: &mut Cx) -> Res {
    for _ in 0..5 {
        let b = cx.out(9);
        let v = |i: usize| b[i] as c_int;
        // SAFETY: nine arguments for nine conversions.
        let n = unsafe {
            c::dprintf(cx.fd, c"%c%c%c%c%c%c%c%c%c".as_ptr(), v(0), v(1), v(2), v(3), v(4), v(5), v(6), v(7), v(8))
        };
        same!(n, 9, "dprintf");
        same!(cx.tell(Op::Recv, 9, 0, 0)?, 9, "bytes of dprintf");
    }
    cx.warm(6, 0)
}

fn unspec() -> libc::sockaddr {
    // SAFETY: all-zero is an address of no family.
    unsafe { std::mem::zeroed() }
}

fn nowhere(cx: &mut Cx) -> Res {
    let a = unspec();
    // SAFETY: the address lives through the call.
    same!(unsafe { libc::connect(cx.fd, &a, 16) }, 0, "connect to AF_UNSPEC");
    ensure!(sys::sockname(cx.fd, true).is_err(), "there is still a peer");
    let r = cx.tell(Op::Drain, 0, 0, 0);
    ensure!(r.is_err(), "the peer saw no reset");
    // The same socket is connected anew.
    let (l, port) = sys::listen(0, 4)?;
    // SAFETY: all-zero is a valid address.
    let mut to: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    to.sin_family = libc::AF_INET as libc::sa_family_t;
    to.sin_port = port.to_be();
    to.sin_addr.s_addr = u32::from_be_bytes([127, 0, 0, 1]).to_be();
    // SAFETY: the address lives through the call.
    let r = unsafe { libc::connect(cx.fd, (&raw const to).cast(), std::mem::size_of_val(&to) as u32) };
    same!(r, 0, "connect again: {}", sys::strerror(sys::errno()));
    let peer = sys::accept(l, 0)?;
    talk(cx.fd, peer)?;
    sys::close(peer)?;
    same!(sys::read(cx.fd, &mut [0; 1]), Ok(0), "the end of the second stream");
    Ok(())
}

/// Sends messages both ways in one thread.
fn talk(a: RawFd, b: RawFd) -> Res {
    for i in 0..300u64 {
        let (from, to) = if i % 2 == 0 { (a, b) } else { (b, a) };
        let out = prng::bytes(OUT, i * 100, 100);
        sys::write_all(from, &out)?;
        let mut got = [0; 100];
        sys::read_exact(to, &mut got)?;
        ensure!(got[..] == out[..], "wrong bytes in message {i}");
        if i % 50 == 0 {
            util::pause_ms(5);
        }
    }
    Ok(())
}

fn itself(cx: &mut Cx) -> Res {
    let fd = sys::tcp_socket()?;
    sys::nodelay(fd)?;
    // SAFETY: all-zero is a valid address; it lives through the calls.
    unsafe {
        let mut a: libc::sockaddr_in = std::mem::zeroed();
        a.sin_family = libc::AF_INET as libc::sa_family_t;
        a.sin_addr.s_addr = u32::from_be_bytes([127, 0, 0, 1]).to_be();
        let len = std::mem::size_of_val(&a) as u32;
        same!(libc::bind(fd, (&raw const a).cast(), len), 0, "bind");
        a.sin_port = sys::sockname(fd, false)?.1.to_be();
        same!(libc::connect(fd, (&raw const a).cast(), len), 0, "connect to itself");
    }
    talk(fd, fd)?;
    sys::close(fd)?;
    cx.warm(6, 0)
}

fn tcp_info(cx: &mut Cx) -> Res {
    // The first byte is the state: 1 is ESTABLISHED, 8 CLOSE_WAIT.
    let state = |fd| sys::getsockopt_int(fd, libc::IPPROTO_TCP, libc::TCP_INFO).map(|v| v & 0xff);
    same!(state(cx.fd), Ok(1), "the state");
    cx.warm(6, 0)?;
    same!(state(cx.fd), Ok(1), "the state after traffic");
    cx.tell(Op::Close, 0, 0, 0)?;
    same!(sys::read(cx.fd, &mut [0; 1]), Ok(0), "the end");
    same!(state(cx.fd), Ok(8), "the state after the peer's end");
    cx.renew()?;
    cx.leave_tcp()?;
    sys::shutdown(cx.fd, libc::SHUT_WR)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads");
    // FIN_WAIT1 until the end is acknowledged, which takes its time; then FIN_WAIT2. 7 is CLOSE.
    let got = state(cx.fd);
    ensure!(matches!(got, Ok(4 | 5)), "the state after our own end: {got:?}");
    cx.tell(Op::Shutdown, libc::SHUT_WR as u64, 0, 0)?;
    same!(sys::read(cx.fd, &mut [0; 1]), Ok(0), "the end");
    same!(state(cx.fd), Ok(7), "the state after both");
    Ok(())
}

fn io_uring(cx: &mut Cx) -> Res {
    // `IORING_SETUP_IOPOLL`: nobody has asked for one with connections, and the library knows nothing of it.
    let mut params = [0u32; 128];
    params[2] = 1;
    // SAFETY: the parameters are larger than the kernel's.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, params.as_mut_ptr()) };
    let e = sys::errno();
    cx.warm(6, 0)?;
    if ring < 0 {
        return untried(&format!("io_uring_setup: {}", sys::strerror(e)));
    }
    // As the kernel would do it for the ring: out of sight.
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    let mut b = [0u8; 10];
    // SAFETY: the buffer is of that length.
    let n = unsafe { hidden::call(libc::SYS_read, [cx.fd as usize, b.as_mut_ptr() as usize, 10, 0, 0, 0]) };
    same!(n, 10, "a read that nobody sees");
    cx.take(&b)?;
    cx.warm(20, 0)
}

fn bad_above(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    for at in [usize::MAX - 4095, usize::MAX / 2 + 1, 0xffff_8000_0000_0000] {
        // SAFETY: the kernel answers EFAULT for an address that is not a program's.
        let r = unsafe { libc::read(cx.fd, at as *mut c_void, 5) };
        same!((r, sys::errno()), (-1, EFAULT), "read to {at:x}");
        // SAFETY: as above.
        let r = unsafe { libc::send(cx.fd, at as *const c_void, 5, MSG_DONTWAIT) };
        same!((r, sys::errno()), (-1, EFAULT), "send from {at:x}");
    }
    cx.recv(10)?;
    cx.warm(6, 0)
}
