//! io_urings that no library sees, because liburing makes its system calls by itself, and others that are used by libc's
//! `syscall()`.

use super::counted::stays;
use super::cx::{untried, Cx, Op, Res, Why};
use super::found::{has_left, pair};
use super::surface::hidden;
use super::Check;
use crate::{ensure, more, same, sys, util};
use libc::{EPOLLIN, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, POLLIN};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("io-uring-out-of-sight", before),
    ("io-uring-out-of-sight-for-what-has-left", after),
    ("io-uring-out-of-sight-for-files", files),
    ("io-uring-in-sight-for-a-set", for_a_set),
    ("io-uring-in-sight-for-new-connections", for_new_ones),
    ("io-uring-in-sight-for-sockets", |cx| for_sockets(cx, OP_RECV)),
    ("io-uring-in-sight-to-poll-sockets", |cx| for_sockets(cx, OP_POLL_ADD)),
    ("io-uring-in-sight-for-files", in_sight_for_files),
    ("io-uring-in-sight-to-poll-a-set", to_poll_a_set),
];

// What the kernel's include/uapi/linux/io_uring.h says.
const OFF_SQES: libc::off_t = 0x1000_0000;
const ENTER_GETEVENTS: usize = 1;
const OP_POLL_ADD: u8 = 6;
const OP_READ: u8 = 22;
const OP_RECV: u8 = 27;
const OP_EPOLL_CTL: u8 = 29;
const SETUP_NO_SQARRAY: u32 = 1 << 16;
const SQE_BYTES: usize = 64;

/// A place for one request, and for a few answers.
struct Uring {
    fd: RawFd,
    /// `struct io_uring_params`.
    params: [u32; 30],
    rings: *mut u8,
    sqes: *mut u8,
    call: Call,
}

/// How system calls are made.
type Call = fn(libc::c_long, [usize; 6]) -> isize;

fn out_of_sight(n: libc::c_long, a: [usize; 6]) -> isize {
    // SAFETY: those of a ring of ours.
    unsafe { hidden::call(n, a) }
}

fn in_sight(n: libc::c_long, a: [usize; 6]) -> isize {
    // SAFETY: as above.
    match unsafe { libc::syscall(n, a[0], a[1], a[2], a[3], a[4], a[5]) } {
        -1 => -sys::errno() as isize,
        r => r as isize,
    }
}

const RINGS_BYTES: usize = 4096;

impl Uring {
    /// None where the kernel, or who guards it, gives none.
    fn new() -> Result<Uring, String> {
        Uring::made(out_of_sight, 0)
    }

    /// As libuv has them: without a list of entries, if the kernel can do without.
    fn in_sight() -> Result<Uring, String> {
        Uring::made(in_sight, SETUP_NO_SQARRAY).or_else(|_| Uring::made(in_sight, 0))
    }

    fn made(call: Call, flags: u32) -> Result<Uring, String> {
        let mut params = [0u32; 30];
        params[2] = flags;
        let fd = call(libc::SYS_io_uring_setup, [1, params.as_mut_ptr() as usize, 0, 0, 0, 0]);
        if fd < 0 {
            return Err(format!("io_uring_setup: {}", sys::strerror(-fd as i32)));
        }
        let map = |len, at| {
            let how = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
            // SAFETY: a new mapping disturbs nothing.
            unsafe { libc::mmap(std::ptr::null_mut(), len, how.0, how.1, fd as RawFd, at) }.cast::<u8>()
        };
        // (Since Linux 5.4 one mapping has both rings.)
        Ok(Uring { fd: fd as RawFd, params, rings: map(RINGS_BYTES, 0), sqes: map(SQE_BYTES, OFF_SQES), call })
    }

    /// A number in the rings of which the parameters say, as the `at`th word, where it is.
    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the kernel's offsets lie in what is mapped, as long as `self` lives.
        unsafe { &*self.rings.add(self.params[at] as usize).cast() }
    }

    /// Asks for one thing, and waits for the answer.
    fn ask(&self, op: u8, fd: RawFd, to: &mut [u8], events: i16) -> Result<i32, Why> {
        let at = if to.is_empty() { 0 } else { to.as_mut_ptr() as u64 };
        self.ask_for(op, fd, (0, at, to.len() as u32), events)
    }

    /// A change of an epoll set.
    fn epoll_ctl(&self, ep: RawFd, op: i32, fd: RawFd, events: i32, data: u64) -> Result<i32, Why> {
        let mut e = libc::epoll_event { events: events as u32, u64: data };
        self.ask_for(OP_EPOLL_CTL, ep, (fd as u64, &raw mut e as u64, op as u32), 0)
    }

    fn ask_for(&self, op: u8, fd: RawFd, (off, at, len): (u64, u64, u32), events: i16) -> Result<i32, Why> {
        // SAFETY: one request is mapped, and nobody else uses it.
        unsafe {
            self.sqes.write_bytes(0, SQE_BYTES);
            self.sqes.write(op);
            self.sqes.add(4).cast::<i32>().write(fd);
            self.sqes.add(8).cast::<u64>().write(off);
            self.sqes.add(16).cast::<u64>().write(at);
            self.sqes.add(24).cast::<u32>().write(len);
            self.sqes.add(28).cast::<u32>().write(events as u32);
        }
        // The submission ring's tail and array, and the completion ring's head, tail and entries.
        let (tail, array, head, end, cqes) = (11, 16, 20, 21, 25);
        if self.params[2] & SETUP_NO_SQARRAY == 0 {
            self.word(array).store(0, Relaxed);
        }
        self.word(tail).fetch_add(1, Release);
        let n = (self.call)(libc::SYS_io_uring_enter, [self.fd as usize, 1, 1, ENTER_GETEVENTS, 0, 0]);
        same!(n, 1, "io_uring_enter");
        let at = self.word(head).load(Relaxed);
        ensure!(self.word(end).load(Acquire) != at, "no answer");
        // (Of one request there are two answers' places.)
        // SAFETY: an answer has 16 bytes, of which the result is at 8; the kernel has written it.
        let result =
            unsafe { self.rings.add(self.params[cqes] as usize + (at as usize % 2) * 16 + 8).cast::<i32>().read() };
        self.word(head).store(at + 1, Release);
        Ok(result)
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // SAFETY: both were mapped so, and nobody has them.
        unsafe {
            libc::munmap(self.rings.cast(), RINGS_BYTES);
            libc::munmap(self.sqes.cast(), SQE_BYTES);
        }
        (self.call)(libc::SYS_close, [self.fd as usize, 0, 0, 0, 0, 0]);
    }
}

/// A program that sets one up for sockets, then uses a connection for long by libc alone, blocks there, and then receives by
/// that again.
fn before(cx: &mut Cx) -> Res {
    let uring = match Uring::new() {
        Ok(u) => u,
        Err(why) => return untried(&why),
    };
    let (a, b) = pair()?;
    for i in 0..10 {
        let mut buf = [0; 40];
        if i == 1 {
            has_left(a, b, 20)?;
        }
        sys::write_all(a, &[i; 40])?;
        if i % 2 == 0 {
            same!(
                uring.ask(OP_POLL_ADD, b, &mut [], POLLIN)? & i32::from(POLLIN),
                i32::from(POLLIN),
                "what is polled for"
            );
        }
        same!(uring.ask(OP_RECV, b, &mut buf, 0)?, 40, "bytes that are received");
        same!(buf, [i; 40], "bytes of round {i}");
    }
    drop(uring);
    sys::close(a)?;
    sys::close(b)?;
    cx.warm(4, 0)
}

/// A program that reads files by one, as databases do, has its connections on rings all the same.
fn files(cx: &mut Cx) -> Res {
    let uring = match Uring::new() {
        Ok(u) => u,
        Err(why) => return untried(&why),
    };
    let file = more::memfile(&[7; 40])?;
    let mut buf = [0; 40];
    match uring.ask(OP_READ, file, &mut buf, 0)? {
        40 => same!(buf, [7; 40], "bytes of the file"),
        r => return untried(&format!("IORING_OP_READ: {}", sys::strerror(-r))),
    }
    let (a, b) = pair()?;
    let left = has_left(a, b, if cx.is_to_leave() { 200 } else { 1 })?;
    ensure!(left || !cx.is_to_leave(), "the connection has not left TCP");
    for fd in [file, a, b] {
        sys::close(fd)?;
    }
    cx.warm(4, 0)
}

/// A program that has only ever blocked in libc, sets one up when the connection has left TCP, and waits there.
fn after(cx: &mut Cx) -> Res {
    let mut left = 0;
    for i in 0..4 {
        let (a, b) = pair()?;
        left += u32::from(has_left(a, b, if cx.is_to_leave() { 200 } else { 1 })?);
        let uring = match Uring::new() {
            Ok(u) => u,
            Err(why) => return untried(&why),
        };
        let late = std::thread::spawn(move || {
            util::pause_ms(if i % 2 == 0 { 0 } else { 100 });
            sys::write_all(a, &[i; 40])
        });
        same!(uring.ask(OP_POLL_ADD, b, &mut [], POLLIN)? & i32::from(POLLIN), i32::from(POLLIN), "what is polled for");
        let mut buf = [0; 40];
        sys::read_exact(b, &mut buf)?;
        same!(buf, [i; 40], "bytes of round {i}");
        late.join().map_err(|_| Why("the thread".into()))??;
        sys::close(a)?;
        sys::close(b)?;
    }
    ensure!(left >= 2 || !cx.is_to_leave(), "only {left} of 4 connections had left TCP");
    cx.warm(4, 0)
}

/// libuv changes its sets by one. A connection on a ring keeps it.
fn for_a_set(cx: &mut Cx) -> Res {
    let uring = match Uring::in_sight() {
        Ok(u) => u,
        Err(why) => return untried(&why),
    };
    let ep = sys::epoll_awaited()?;
    let nothing = more::memfile(&[0])?;
    let ctl = |op, fd, events, data| uring.epoll_ctl(ep, op, fd, events, data);
    if ctl(EPOLL_CTL_ADD, nothing, EPOLLIN, 0)? == -libc::EINVAL {
        return untried("IORING_OP_EPOLL_CTL");
    }
    let wait = |ms| -> Result<Vec<(u32, u64)>, Why> { Ok(sys::epoll_wait(ep, 4, ms)?) };
    for round in 0..3 {
        same!(ctl(EPOLL_CTL_ADD, cx.fd, EPOLLIN, 7)?, 0, "it is added, round {round}");
        same!(ctl(EPOLL_CTL_ADD, cx.fd, EPOLLIN, 7)?, -libc::EEXIST, "once more");
        same!(wait(0)?, [], "events of nothing");
        cx.tell(Op::Send, 10, 0, 0)?;
        same!(wait(5000)?, [(EPOLLIN as u32, 7)], "events of ten bytes");
        same!(ctl(EPOLL_CTL_MOD, cx.fd, EPOLLOUT, 8)?, 0, "it is changed");
        same!(wait(5000)?, [(EPOLLOUT as u32, 8)], "events then");
        cx.recv(10)?;
        same!(ctl(EPOLL_CTL_DEL, cx.fd, 0, 0)?, 0, "it is taken out");
        same!(ctl(EPOLL_CTL_DEL, cx.fd, 0, 0)?, -libc::ENOENT, "once more");
        same!(ctl(EPOLL_CTL_MOD, cx.fd, EPOLLIN, 7)?, -libc::ENOENT, "it is changed, and is not there");
        same!(wait(0)?, [], "events without it");
    }
    same!(ctl(EPOLL_CTL_ADD, -1, EPOLLIN, 7)?, -libc::EBADF, "what is no fd");
    sys::close(nothing)?;
    sys::close(ep)?;
    drop(uring);
    stays(cx)
}

/// Who waits so until a set has something, and looks then.
fn to_poll_a_set(cx: &mut Cx) -> Res {
    let uring = match Uring::in_sight() {
        Ok(u) => u,
        Err(why) => return untried(&why),
    };
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, EPOLLIN as u32, 7)?;
    for pause in [0, 5, 100] {
        cx.later(pause, 10)?;
        // (The kernel takes a mark or a frame for bytes, and these are a moment late: then who waits again hears of them.)
        let mut told = Vec::new();
        for _ in 0..2 {
            let got = uring.ask(OP_POLL_ADD, ep, &mut [], POLLIN)?;
            same!(got & i32::from(POLLIN), i32::from(POLLIN), "a set with ten bytes");
            told = sys::epoll_wait(ep, 4, 0)?;
            if !told.is_empty() {
                break;
            }
        }
        same!(told, [(EPOLLIN as u32, 7)], "its events");
        cx.recv(10)?;
        cx.wait()?;
    }
    sys::close(ep)?;
    cx.warm(6, 0)
}

/// Both ends of a connection in sets that are changed so, from before it is one.
fn for_new_ones(cx: &mut Cx) -> Res {
    let (l, port) = sys::listen(0, 4)?;
    let a = sys::tcp_socket()?;
    let side = |fd: RawFd, first: bool| -> Result<u32, Why> {
        let uring = Uring::in_sight()?;
        let ep = sys::epoll_awaited()?;
        sys::nonblock(fd, true)?;
        let mut buf = [0; 16];
        let mut moved = 0;
        if first {
            same!(uring.epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLOUT, 0)?, 0, "it is added");
            let r = sys::connect_to(fd, port);
            ensure!(r == Ok(()) || r == Err(libc::EINPROGRESS), "connect: {r:?}");
            ensure!(!sys::epoll_wait(ep, 1, 5000)?.is_empty(), "it is connected");
            same!(uring.epoll_ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN, 0)?, 0, "it is changed");
        } else {
            same!(uring.epoll_ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 0)?, 0, "it is added");
        }
        for i in 0..2000u32 {
            let before = sys::tcp_bytes(fd)?;
            if first {
                sys::write_all(fd, &[i as u8; 16])?;
            }
            loop {
                match sys::epoll_wait(ep, 1, 5000) {
                    // Linux 6.1 ends a wait so, without any handler, when a request was given to a worker (natively, 5 of 20 runs).
                    Err(libc::EINTR) => continue,
                    events => ensure!(!events?.is_empty(), "message {i} was not noticed"),
                }
                match sys::recv(fd, &mut buf, 0) {
                    Err(libc::EAGAIN) => {}
                    n => break same!(n, Ok(16), "bytes of message {i}"),
                }
            }
            same!(buf, [i as u8; 16], "message {i}");
            if !first {
                sys::write_all(fd, &buf)?;
            }
            moved += u32::from(sys::tcp_bytes(fd)? == before);
        }
        sys::close(ep)?;
        Ok(moved)
    };
    if let Err(why) = Uring::in_sight() {
        return untried(&why);
    }
    let moved = std::thread::scope(|s| {
        let other = s.spawn(|| {
            let b = sys::accept(l, 0)?;
            let moved = side(b, false)?;
            sys::close(b)?;
            Ok::<u32, Why>(moved)
        });
        let moved = side(a, true)?;
        Ok::<u32, Why>(moved.min(other.join().map_err(|_| Why("a thread panicked".into()))??))
    })?;
    ensure!(moved > 100 || !cx.is_to_leave(), "only {moved} of 2000 messages went by another way than TCP");
    sys::close(a)?;
    sys::close(l)?;
    cx.warm(4, 0)
}

/// Who asks one for a socket's bytes has the connection on TCP from then on.
fn for_sockets(cx: &mut Cx, op: u8) -> Res {
    let uring = match Uring::in_sight() {
        Ok(u) => u,
        Err(why) => return untried(&why),
    };
    cx.warm(6, 0)?;
    let mut b = [0u8; 10];
    for round in 0..3 {
        cx.later(if round == 1 { 50 } else { 0 }, 10)?;
        if op == OP_POLL_ADD {
            let got = uring.ask(op, cx.fd, &mut [], POLLIN)?;
            same!(got & i32::from(POLLIN), i32::from(POLLIN), "what is polled for");
        }
        same!(uring.ask(OP_RECV, cx.fd, &mut b, 0)?, 10, "bytes that are received");
        cx.take(&b)?;
        cx.wait()?;
        cx.warm(6, 0)?;
    }
    Ok(())
}

/// Who reads files by one, and waits for other things than sockets there, keeps its rings.
fn in_sight_for_files(cx: &mut Cx) -> Res {
    let uring = match Uring::in_sight() {
        Ok(u) => u,
        Err(why) => return untried(&why),
    };
    let file = more::memfile(&[7; 40])?;
    let (reader, writer) = sys::pipe()?;
    sys::write(writer, b"x")?;
    let mut buf = [0; 40];
    same!(uring.ask(OP_READ, file, &mut buf, 0)?, 40, "bytes that are read");
    same!(buf, [7; 40], "bytes of the file");
    let got = uring.ask(OP_POLL_ADD, reader, &mut [], POLLIN)?;
    same!(got & i32::from(POLLIN), i32::from(POLLIN), "a pipe");
    for fd in [file, reader, writer] {
        sys::close(fd)?;
    }
    drop(uring);
    stays(cx)
}
