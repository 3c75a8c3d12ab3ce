//! Much data, many pieces, and the calls that move bytes without buffers.

use super::cx::{Cx, Op, Res, Why, OUT};
use super::Check;
use crate::{ensure, more, prng, same, sys, util};
use libc::{c_int, EPIPE, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_WAITFORONE, SHUT_WR};
use std::time::{Duration, Instant};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("sendfile-of-what-is-no-file", no_file),
    ("sendfile", sendfile),
    ("sendfile-that-ends-with-a-reset", reset_sendfile),
    ("splice-out", splice_out),
    ("splice-in", splice_in),
    ("splice-in-nonblock", splice_in_nonblock),
    ("recvmmsg", recvmmsg),
    ("sendmmsg", sendmmsg),
    ("writev-many", writev_many),
    ("readv-many", readv_many),
    ("sendto-recvfrom", sendto_recvfrom),
    ("one-thread-1m", one_thread),
    ("big-write-slow-reader", big_write),
    ("all-sizes", all_sizes),
    ("byte-by-byte", byte_by_byte),
    ("both-full", both_full),
    ("stop-and-go", stop_and_go),
    ("idle-then-traffic", idle),
    ("others-after-large", others),
];

/// The peer reads some of it and closes. How the connection has failed the kernel tells to its own attempt to send more, and to
/// no later call.
fn reset_sendfile(cx: &mut Cx) -> Res {
    const FILE: usize = 16 << 20;
    let n = cx.fill(4096)?;
    let file = more::memfile(&prng::bytes(OUT, cx.tx, FILE))?;
    cx.post(Op::Sleep, 50_000, 0, 0)?;
    cx.post(Op::Recv, n as u64 * 3 / 4, 0, 0)?;
    cx.post(Op::Sleep, 200_000, 0, 0)?;
    cx.post(Op::Close, 0, 0, 0)?;
    let mut off = 0;
    let sent = sys::sendfile(cx.fd, file, &mut off, FILE)?;
    ensure!(sent > 0 && sent < FILE && off as usize == sent, "sendfile {sent}, offset {off}");
    same!(sys::send(cx.fd, &[1], MSG_NOSIGNAL), Err(EPIPE), "the next call");
    Ok(())
}

fn sendfile(cx: &mut Cx) -> Res {
    let n = 500_000;
    let data = cx.out(n);
    let file = more::memfile(&data)?;
    cx.post(Op::Recv, n as u64, 0, 0)?;
    let mut off = 0;
    while (off as usize) < n {
        let before = off;
        let k = sys::sendfile(cx.fd, file, &mut off, 100_000)?;
        ensure!(k > 0 && off == before + k as i64, "sendfile {k}, offset {before} to {off}");
    }
    same!(sys::sendfile(cx.fd, file, &mut off, 1000)?, 0, "sendfile at the end of the file");
    same!(cx.wait()?, n as u64, "bytes that arrived");
    cx.warm(10, 0)
}

/// What cannot be sent so: the kernel says the same of a socket that is none of ours.
fn no_file(cx: &mut Cx) -> Res {
    let other = sys::socketpair()?.0;
    let (pipe, full) = sys::pipe()?;
    sys::write_all_fd(full, b"something")?;
    let open = |path: &std::ffi::CStr| -> Result<c_int, Why> {
        // SAFETY: a path that ends with a NUL.
        let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY) };
        ensure!(fd >= 0, "open {path:?}");
        Ok(fd)
    };
    let inputs = [
        ("pipe", pipe),
        ("folder", open(c"/")?),
        ("proc", open(c"/proc/self/status")?),
        ("socket", other),
        ("itself", cx.fd),
        ("nothing", -1),
        ("written file", more::open("/dev/null\0", libc::O_WRONLY)?),
    ];
    for (what, from) in inputs {
        for count in [10, 0, usize::MAX / 2 + 1] {
            for at in [None, Some(0i64), Some(-3)] {
                let to = |out: c_int| {
                    let mut at = at;
                    let p = at.as_mut().map_or(std::ptr::null_mut(), |a| a as *mut i64);
                    // SAFETY: the offset is null or valid.
                    let r = unsafe { libc::sendfile(out, from, p, count) };
                    (r, if r < 0 { sys::errno() } else { 0 })
                };
                same!(to(cx.fd), to(other), "sendfile of {count} from {at:?} of a {what}");
            }
        }
    }
    cx.warm(10, 0)
}

fn splice_out(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    let (each, rounds) = (30_000, 20);
    cx.post(Op::Recv, each as u64 * rounds, 0, 0)?;
    for _ in 0..rounds {
        let b = cx.out(each);
        sys::write_all_fd(wr, &b)?;
        let mut left = each;
        while left > 0 {
            let k = sys::splice(rd, cx.fd, left, 0)?;
            ensure!(k > 0 && k <= left, "splice moved {k} of {left}");
            left -= k;
        }
    }
    same!(cx.wait()?, each as u64 * rounds, "bytes that arrived");
    cx.warm(10, 0)
}

fn splice_in(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    let n = 600_000;
    cx.post(Op::Send, n as u64, 0, 0)?;
    cx.post(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    let mut got = 0;
    while got < n {
        let k = sys::splice(cx.fd, wr, 30_000, 0)?;
        ensure!(k > 0, "splice: the end of the stream after {got} bytes");
        let mut b = vec![0; k];
        sys::read_exact(rd, &mut b)?;
        cx.take(&b)?;
        got += k;
    }
    same!(sys::splice(cx.fd, wr, 1000, 0)?, 0, "splice at the end of the stream");
    Ok(())
}

fn splice_in_nonblock(cx: &mut Cx) -> Res {
    let (rd, wr) = sys::pipe()?;
    let f = libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MOVE;
    sys::nonblock(cx.fd, true)?;
    same!(sys::splice(cx.fd, wr, 1000, f), Err(libc::EAGAIN), "splice of nothing");
    cx.tell(Op::Send, 700, 0, 0)?;
    cx.arrive(700)?;
    same!(sys::splice(cx.fd, wr, 1000, f), Ok(700), "splice");
    let mut b = vec![0; 700];
    sys::read_exact(rd, &mut b)?;
    cx.take(&b)?;
    sys::nonblock(cx.fd, false)?;
    cx.warm(10, 0)
}

fn recvmmsg(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 250, 0, 0)?;
    cx.arrive(250)?;
    let mut b = vec![0; 400];
    same!(sys::recvmmsg(cx.fd, &mut b, 4, MSG_DONTWAIT)?, vec![100, 100, 50], "recvmmsg");
    cx.take(&b[..250])?;
    cx.later(20, 100)?;
    same!(sys::recvmmsg(cx.fd, &mut b, 4, MSG_WAITFORONE)?, vec![100], "MSG_WAITFORONE");
    cx.take(&b[..100])?;
    cx.wait()?;
    cx.post(Op::SendBits, 4, 100, 15_000)?;
    let got = sys::recvmmsg(cx.fd, &mut b, 4, 0)?;
    same!(got, vec![100; 4], "recvmmsg that waits for all");
    cx.take(&b)?;
    cx.wait()?;
    cx.warm(10, 0)
}

fn sendmmsg(cx: &mut Cx) -> Res {
    let b = cx.out(1000);
    same!(sys::sendmmsg(cx.fd, &b, 10, 0)?, vec![100; 10], "sendmmsg");
    same!(cx.tell(Op::Recv, 1000, 0, 0)?, 1000, "bytes that arrived");
    let n = 3_000_000;
    let b = cx.out(n);
    cx.post(Op::Recv, n as u64, 0, 0)?;
    let got = sys::sendmmsg(cx.fd, &b, 3, 0)?;
    same!(got, vec![n / 3; 3], "sendmmsg of 3 MB");
    same!(cx.wait()?, n as u64, "bytes that arrived then");
    cx.warm(10, 0)
}

fn writev_many(cx: &mut Cx) -> Res {
    for (n, parts) in [(1024, 1024), (1000, 1024), (100_000, 1024), (3_000_000, 1000), (7, 3)] {
        let b = cx.out(n);
        cx.post(Op::Recv, n as u64, 0, 0)?;
        same!(sys::writev(cx.fd, &b, parts)?, n, "writev of {n} bytes in {parts} pieces");
        same!(cx.wait()?, n as u64, "bytes that arrived");
    }
    same!(sys::writev(cx.fd, &[1; 2000], 1025), Err(libc::EINVAL), "writev of 1025 pieces");
    same!(sys::sendmsg(cx.fd, &[1; 2000], 1025, 0), Err(libc::EMSGSIZE), "sendmsg of 1025 pieces");
    cx.warm(10, 0)
}

fn readv_many(cx: &mut Cx) -> Res {
    for (n, parts) in [(1024, 1024), (1000, 600), (50_000, 1024), (7, 3)] {
        cx.tell(Op::Send, n as u64, 0, 0)?;
        cx.arrive(n)?;
        let mut b = vec![0; n];
        same!(sys::readv(cx.fd, &mut b, parts)?, n, "readv of {n} bytes in {parts} pieces");
        cx.take(&b)?;
    }
    let r = sys::readv(cx.fd, &mut [1; 2000], 1025);
    same!(r, Err(libc::EINVAL), "readv of 1025 pieces");
    cx.warm(10, 0)
}

fn sendto_recvfrom(cx: &mut Cx) -> Res {
    for n in [1, 100, 10_000] {
        let b = cx.out(n);
        same!(sys::sendto(cx.fd, &b, 0)?, n, "sendto");
        same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes that arrived");
        cx.tell(Op::Send, n as u64, 0, 0)?;
        cx.arrive(n)?;
        let mut b = vec![0; n];
        same!(sys::recvfrom(cx.fd, &mut b, 0)?, n, "recvfrom");
        cx.take(&b)?;
    }
    Ok(())
}

fn one_thread(cx: &mut Cx) -> Res {
    // The kernel takes 1 MiB over loopback when nobody reads; a program with both ends in one
    // thread relies on that.
    let n = 1 << 20;
    for _ in 0..4 {
        cx.send(n)?;
        same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes that arrived");
    }
    Ok(())
}

fn big_write(cx: &mut Cx) -> Res {
    let n = 64 << 20;
    let b = cx.out(n);
    cx.post(Op::SlowRecv, n as u64, 200_000, 1000)?;
    same!(sys::write(cx.fd, &b)?, n, "a blocking write of 64 MiB");
    same!(cx.wait()?, n as u64, "bytes that arrived");
    cx.warm(10, 0)
}

fn all_sizes(cx: &mut Cx) -> Res {
    let mut sizes = Vec::new();
    for p in 0..21 {
        let s = 1usize << p;
        sizes.extend([s.saturating_sub(1), s, s + 1].into_iter().filter(|&s| s > 0));
    }
    for s in sizes {
        cx.post(Op::Echo, 3, s as u64, 0)?;
        for _ in 0..3 {
            let mut w = cx.with_fd(cx.fd);
            cx.tx += s as u64;
            if s < 60_000 {
                w.send(s)?;
                cx.recv(s)?;
            } else {
                let t = std::thread::spawn(move || w.send(s));
                cx.recv(s)?;
                t.join().map_err(|_| Why("a thread panicked".into()))??;
            }
        }
        same!(cx.wait()?, 3, "messages of {s} bytes echoed");
    }
    Ok(())
}

fn byte_by_byte(cx: &mut Cx) -> Res {
    let n = 30_000;
    cx.post(Op::Recv, n, 0, 0)?;
    for _ in 0..n {
        cx.send(1)?;
    }
    same!(cx.wait()?, n, "bytes that arrived");
    cx.post(Op::SendBits, n, 1, 0)?;
    for _ in 0..n {
        cx.recv(1)?;
    }
    cx.wait()?;
    Ok(())
}

fn both_full(cx: &mut Cx) -> Res {
    // Both directions are full at once; then each side reads what the other wrote.
    let n = cx.fill(10_000)?;
    cx.tell(Op::Send, 500_000, 0, 0)?;
    cx.recv(500_000)?;
    same!(cx.tell(Op::Recv, n as u64, 0, 0)?, n as u64, "bytes that arrived");
    cx.warm(10, 0)
}

fn stop_and_go(cx: &mut Cx) -> Res {
    for i in 0..12u64 {
        let n = cx.fill(1 + 700 * i as usize)? as u64;
        util::pause_ms(i % 4 * 3);
        same!(cx.tell(Op::Recv, n / 2, 0, 0)?, n / 2, "the first half of round {i}");
        let m = cx.fill(3000)? as u64;
        let rest = n - n / 2 + m;
        same!(cx.tell(Op::Recv, rest, 0, 0)?, rest, "the rest of round {i}");
    }
    cx.warm(10, 0)
}

fn idle(cx: &mut Cx) -> Res {
    for ms in [1, 20, 300, 1200] {
        util::pause_ms(ms);
        cx.warm(20, 0)?;
        cx.later(ms, 10)?;
        cx.recv(10)?;
        cx.wait()?;
    }
    Ok(())
}

/// Two ends in this process that have exchanged small messages; if it must leave TCP, until they no longer go there.
fn both_ends(cx: &Cx, listener: c_int, port: u16) -> Result<[c_int; 2], Why> {
    let a = sys::connect(port)?;
    let b = sys::accept(listener, libc::SOCK_CLOEXEC)?;
    let begun = Instant::now();
    // (With RDMA in a slow machine so many do not take long enough.)
    for i in (0..).take_while(|i| *i < 600 || begun.elapsed() < Duration::from_secs(10)) {
        let before = sys::tcp_bytes(a)?;
        for (from, to) in [(a, b), (b, a)] {
            let data = prng::bytes(i, 0, 16);
            sys::write_all(from, &data)?;
            let mut got = [0; 16];
            sys::read_exact(to, &mut got)?;
            ensure!(got[..] == data, "message {i} is wrong");
        }
        if i >= 20 && (!cx.is_to_leave() || sys::tcp_bytes(a)? == before) {
            return Ok([a, b]);
        }
        if i % 10 == 9 {
            util::pause_ms(5);
        }
    }
    Err(Why("a connection never left TCP".into()))
}

/// Many connections that hold as much as they can, and when these are gone many others: they move like the first.
fn others(cx: &mut Cx) -> Res {
    let (listener, port) = sys::listen(0, 64)?;
    let (large, small) = if cx.is_to_leave() { (50, 100) } else { (5, 20) };
    let mut ends = Vec::new();
    for seed in 0..large {
        let [a, b] = both_ends(cx, listener, port)?;
        let mut sent = 0;
        loop {
            match sys::send(a, &prng::bytes(seed, sent, 200_000), MSG_DONTWAIT) {
                Ok(n) => sent += n as u64,
                Err(libc::EAGAIN) => break,
                Err(e) => return Err(e.into()),
            }
        }
        ends.push((seed, a, b, sent));
    }
    for (seed, a, b, sent) in ends {
        let mut at = 0;
        let mut buf = vec![0; 300_000];
        while at < sent {
            let n = sys::read(b, &mut buf)?;
            ensure!(n > 0, "the end of the stream after {at} of {sent} bytes");
            prng::verify(seed, at, &buf[..n])?;
            at += n as u64;
        }
        sys::close(a)?;
        sys::close(b)?;
    }
    let mut ends = Vec::new();
    for _ in 0..small {
        ends.extend(both_ends(cx, listener, port)?);
    }
    for fd in ends.into_iter().chain([listener]) {
        sys::close(fd)?;
    }
    cx.warm(4, 0)
}
