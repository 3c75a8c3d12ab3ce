//! The C library's own reads and writes, which no hook sees: standard streams that a connection becomes, in this
//! program and in one that is started, and what is left of a connection whose peer has gone.

use super::cx::{Cx, Op, Res, Why};
use super::images::{read_all, start_with, How};
use super::procs::bye;
use super::Check;
use crate::{ensure, same, sys, util};
use libc::{FILE, SHUT_WR};
use std::os::fd::RawFd;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("stdio-standard-input", standard_input),
    ("stdio-standard-output", standard_output),
    ("stdio-lowest-number", lowest_number),
    ("stdio-number-of-a-file", number_of_a_file),
    ("stdio-the-rest", the_rest),
    ("stdio-image-fork", |cx| image(cx, How::Fork)),
    ("stdio-image-vfork", |cx| image(cx, How::Vfork)),
    ("stdio-image-spawn", |cx| image(cx, How::Spawn)),
];

extern "C" {
    static stdin: *mut FILE;
    static stdout: *mut FILE;
}

/// An fd of a file of which nothing is read, and to which anything may be written.
fn nothing() -> Result<RawFd, Why> {
    // SAFETY: the path is a C string.
    let fd = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    ensure!(fd >= 0, "/dev/null: {}", sys::strerror(sys::errno()));
    Ok(fd)
}

/// What is read by `stdin` is what the number 0 is.
fn standard_input(cx: &mut Cx) -> Res {
    sys::dup2(cx.fd, 0)?;
    for n in [1000, 1, 4096, 70_000] {
        cx.tell(Op::Send, n as u64, 0, 0)?;
        let mut b = vec![0u8; n];
        // SAFETY: the stream is open, and the buffer of that length.
        same!(unsafe { libc::fread(b.as_mut_ptr().cast(), 1, n, stdin) }, n, "fread of standard input");
        cx.take(&b)?;
    }
    let null = nothing()?;
    sys::dup2(null, 0)?;
    cx.warm(6, 0)?;
    bye(cx)?;
    Ok(())
}

/// A shell's `echo >&3`: standard output for a moment, between calls that the library sees.
fn standard_output(cx: &mut Cx) -> Res {
    let was = sys::dup(1)?;
    for n in [10, 3000, 100] {
        sys::dup2(cx.fd, 1)?;
        let b = cx.out(n);
        // SAFETY: the stream is open, and the buffer of that length.
        unsafe {
            same!(libc::fwrite(b.as_ptr().cast(), 1, n, stdout), n, "fwrite to standard output");
            same!(libc::fflush(stdout), 0, "fflush");
        }
        sys::dup2(was, 1)?;
        same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes of standard output");
        cx.warm(6, 0)?;
    }
    bye(cx)?;
    Ok(())
}

/// The number is the lowest that is free, which `dup` gives.
fn lowest_number(cx: &mut Cx) -> Res {
    sys::close(0)?;
    same!(sys::dup(cx.fd), Ok(0), "the number of a duplicate");
    cx.tell(Op::Send, 1000, 0, 0)?;
    let mut b = vec![0u8; 1000];
    // SAFETY: the stream is open, and the buffer of that length.
    same!(unsafe { libc::fread(b.as_mut_ptr().cast(), 1, 1000, stdin) }, 1000, "fread of standard input");
    cx.take(&b)?;
    cx.warm(6, 0)?;
    Ok(())
}

/// A stream that was made of another file, whose number the connection gets.
fn number_of_a_file(cx: &mut Cx) -> Res {
    // SAFETY: the strings are C strings; the stream is open.
    let (f, fd) = unsafe {
        let f = libc::fopen(c"/dev/null".as_ptr(), c"r".as_ptr());
        ensure!(!f.is_null(), "fopen: {}", sys::strerror(sys::errno()));
        (f, libc::fileno(f))
    };
    sys::dup2(cx.fd, fd)?;
    cx.tell(Op::Send, 1000, 0, 0)?;
    let mut b = vec![0u8; 1000];
    // SAFETY: the stream is open, and the buffer of that length.
    same!(unsafe { libc::fread(b.as_mut_ptr().cast(), 1, 1000, f) }, 1000, "fread");
    cx.take(&b)?;
    // SAFETY: the stream is open.
    same!(unsafe { libc::fclose(f) }, 0, "fclose");
    cx.warm(6, 0)?;
    bye(cx)?;
    Ok(())
}

/// The peer has closed before the program reads the rest by stdio: all of it, or an error, but no early end.
fn the_rest(cx: &mut Cx) -> Res {
    let n = 40_000;
    cx.tell(Op::Send, n as u64, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    cx.arrive(n)?;
    util::pause_ms(20);
    // SAFETY: the mode is a C string; the stream is open, and the buffer of that length.
    unsafe {
        let f = libc::fdopen(cx.fd, c"r".as_ptr());
        ensure!(!f.is_null(), "fdopen: {}", sys::strerror(sys::errno()));
        let mut b = vec![0u8; n];
        let got = libc::fread(b.as_mut_ptr().cast(), 1, n, f);
        cx.take(&b[..got])?;
        ensure!(got == n || libc::ferror(f) != 0, "the stream ended after {got} bytes");
    }
    Ok(())
}

/// A program that uses nothing but stdio, on a connection that is its standard input, output or both.
fn image(cx: &mut Cx, how: How) -> Res {
    let null = nothing()?;
    let pid = start_with(how, &["/usr/bin/seq", "3"], &[(null, 0), (cx.fd, 1)])?;
    same!(sys::waitpid(pid)?, 0, "status of a program that writes");
    // What it wrote is none of the puppet's bytes; the puppet says so, having received them.
    cx.post(Op::Recv, 6, 0, 0)?;
    same!(cx.answer()?, Err(9999), "what the peer makes of the program's bytes");
    util::pause_ms(20);
    cx.warm(80, 12)?;
    let (rd, wr) = sys::pipe()?;
    sys::fcntl(rd, libc::F_SETFD, libc::FD_CLOEXEC)?;
    let n = 5000;
    cx.tell(Op::Send, n, 0, 0)?;
    let pid = start_with(how, &["/bin/sed", "-n", "p"], &[(cx.fd, 0), (wr, 1)])?;
    cx.tell(Op::Send, n, 0, 0)?;
    cx.tell(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    sys::close(wr)?;
    let b = read_all(rd)?;
    same!(sys::waitpid(pid)?, 0, "status of a program that reads");
    ensure!(b.len() == 2 * n as usize, "the program read {} bytes", b.len());
    cx.take(&b)?;
    Ok(())
}
