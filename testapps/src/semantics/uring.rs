//! io_urings that no library sees: liburing makes its system calls by itself.

use super::cx::{untried, Cx, Res, Why};
use super::found::{has_left, pair};
use super::surface::hidden;
use super::Check;
use crate::{ensure, more, same, sys, util};
use libc::POLLIN;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("io-uring-out-of-sight", before),
    ("io-uring-out-of-sight-for-what-has-left", after),
    ("io-uring-out-of-sight-for-files", files),
];

// What the kernel's include/uapi/linux/io_uring.h says.
const OFF_SQES: libc::off_t = 0x1000_0000;
const ENTER_GETEVENTS: usize = 1;
const OP_POLL_ADD: u8 = 6;
const OP_READ: u8 = 22;
const OP_RECV: u8 = 27;
const SQE_BYTES: usize = 64;

/// A place for one request, and for a few answers.
struct Uring {
    fd: RawFd,
    /// `struct io_uring_params`.
    params: [u32; 30],
    rings: *mut u8,
    sqes: *mut u8,
}

const RINGS_BYTES: usize = 4096;

impl Uring {
    /// None where the kernel, or who guards it, gives none.
    fn new() -> Result<Uring, String> {
        let mut params = [0u32; 30];
        // SAFETY: the parameters are as large as the kernel's.
        let fd = unsafe { hidden::call(libc::SYS_io_uring_setup, [1, params.as_mut_ptr() as usize, 0, 0, 0, 0]) };
        if fd < 0 {
            return Err(format!("io_uring_setup: {}", sys::strerror(-fd as i32)));
        }
        let map = |len, at| {
            let how = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
            // SAFETY: a new mapping disturbs nothing.
            unsafe { libc::mmap(std::ptr::null_mut(), len, how.0, how.1, fd as RawFd, at) }.cast::<u8>()
        };
        // (Since Linux 5.4 one mapping has both rings.)
        Ok(Uring { fd: fd as RawFd, params, rings: map(RINGS_BYTES, 0), sqes: map(SQE_BYTES, OFF_SQES) })
    }

    /// A number in the rings of which the parameters say, as the `at`th word, where it is.
    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the kernel's offsets lie in what is mapped, as long as `self` lives.
        unsafe { &*self.rings.add(self.params[at] as usize).cast() }
    }

    /// Asks for one thing, and waits for the answer.
    fn ask(&self, op: u8, fd: RawFd, to: &mut [u8], events: i16) -> Result<i32, Why> {
        // SAFETY: one request is mapped, and nobody else uses it.
        unsafe {
            self.sqes.write_bytes(0, SQE_BYTES);
            self.sqes.write(op);
            self.sqes.add(4).cast::<i32>().write(fd);
            if !to.is_empty() {
                self.sqes.add(16).cast::<u64>().write(to.as_mut_ptr() as u64);
                self.sqes.add(24).cast::<u32>().write(to.len() as u32);
            }
            self.sqes.add(28).cast::<u32>().write(events as u32);
        }
        // The submission ring's tail and array, and the completion ring's head, tail and entries.
        let (tail, array, head, end, cqes) = (11, 16, 20, 21, 25);
        self.word(array).store(0, Relaxed);
        self.word(tail).fetch_add(1, Release);
        // SAFETY: the buffer lives until the kernel has answered, which is waited for.
        let n = unsafe { hidden::call(libc::SYS_io_uring_enter, [self.fd as usize, 1, 1, ENTER_GETEVENTS, 0, 0]) };
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
            hidden::call(libc::SYS_close, [self.fd as usize, 0, 0, 0, 0, 0]);
        }
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
