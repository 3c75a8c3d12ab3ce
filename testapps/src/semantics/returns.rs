//! What a return to TCP must not change: ends, hang-ups, and who has to wait for whom.

use super::cx::{Cx, Op, Res, Why};
use super::procs::{bye, child, reap};
use super::unread::{quick, unread, OURS};
use super::Check;
use crate::{ensure, prng, same, sys, util};
use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, POLLERR, POLLHUP, POLLIN, POLLRDHUP, SHUT_RD, SHUT_RDWR, SHUT_WR};
use std::time::Instant;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("return-end", end),
    ("return-hangup", hangup),
    ("return-child-sends", child_sends),
    ("return-child-takes-nothing", child_takes_nothing),
    ("return-shut-receiver", shut_receiver),
    ("return-and-the-sender-is-killed", sender_killed),
    ("splice-the-rest", splice_the_rest),
];

/// The end stands in the ring, and is there the moment the connection is the kernel's.
fn end(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.tell(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    cx.recv(100)?;
    same!(sys::wait1(cx.fd, POLLIN, 2000)?, POLLIN, "poll at the end");
    let flags = sys::fcntl(cx.fd, libc::F_GETFL, 0)?;
    sys::fcntl(cx.fd, libc::F_SETFL, flags | libc::O_ASYNC)?;
    same!(sys::recv(cx.fd, &mut [0], MSG_DONTWAIT), Ok(0), "receive after the connection has moved");
    cx.send(100)?;
    same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "bytes in the other direction");
    Ok(())
}

/// A child shuts both directions; what the peer sends is refused, and the peer sees that although it has not read all.
fn hangup(cx: &mut Cx) -> Res {
    cx.send(2)?;
    let fd = cx.fd;
    reap(child(move || Ok(sys::shutdown(fd, SHUT_RDWR)?))?)?;
    cx.tell(Op::Sleep, 30_000, 0, 0)?;
    cx.tell(Op::Send, 137, 0, 0)?;
    cx.tell(Op::Sleep, 30_000, 0, 0)?;
    let got = cx.tell(Op::Poll, 500, POLLRDHUP as u64, 0)?;
    same!(got, (POLLRDHUP | POLLHUP | POLLERR) as u64, "what the peer polls");
    Ok(())
}

/// Who only sends does not wait until somebody reads.
fn child_sends(cx: &mut Cx) -> Res {
    unread(cx, 3000)?;
    let mut c = cx.with_fd(cx.fd);
    let began = Instant::now();
    reap(child(move || Ok(c.send(100)?))?)?;
    quick(began)?;
    cx.tx += 100;
    same!(cx.tell(Op::Recv, OURS as u64 + 100, 0, 0)?, OURS as u64 + 100, "bytes that arrived");
    let there = sys::fionread(cx.fd)?;
    cx.recv(there)?;
    bye(cx)?;
    Ok(())
}

fn child_takes_nothing(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    let fd = cx.fd;
    let began = Instant::now();
    reap(child(move || {
        same!(sys::recv(fd, &mut [], 0), Ok(0), "a receive of no bytes");
        Ok(())
    })?)?;
    quick(began)?;
    cx.recv(100)?;
    bye(cx)?;
    Ok(())
}

/// Has this process's connections return, if it is preloaded, and the command is where this program is. What has no room in
/// the kernel is still on its way then.
fn order_off() -> Res {
    let command = std::env::current_exe().map_err(|e| Why(e.to_string()))?.with_file_name("ringsock");
    if !command.exists() {
        return Ok(());
    }
    let me = std::process::id().to_string();
    let mut told = std::process::Command::new(command)
        .args(["off", &me])
        .env_remove("LD_PRELOAD")
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .map_err(|e| Why(e.to_string()))?;
    for _ in 0..50 {
        if told.try_wait().is_ok_and(|s| s.is_some()) {
            return Ok(());
        }
        util::pause_ms(10);
    }
    told.kill().and_then(|()| told.wait()).map(|_| ()).map_err(|e| Why(e.to_string()))
}

/// A connection comes back to TCP, which has no room for all that is in the ring, and who sent that is killed: it was sent.
fn sender_killed(_: &mut Cx) -> Res {
    const SEED: u64 = 77;
    let (l, port) = sys::listen(0, 4)?;
    let (rd, wr) = sys::pipe()?;
    let pid = child(move || {
        let a = sys::connect(port)?;
        for i in 0..60 {
            sys::write_all(a, &[i; 16])?;
            sys::read_exact(a, &mut [0; 16])?;
        }
        let mut sent = 0u64;
        for _ in 0..20 {
            while let Ok(n) = sys::send(a, &prng::bytes(SEED, sent, 100_000), MSG_DONTWAIT) {
                sent += n as u64;
            }
            util::pause_ms(2);
        }
        sys::write(wr, &sent.to_ne_bytes())?;
        util::pause_ms(20_000);
        Ok(())
    })?;
    let b = sys::accept(l, libc::SOCK_CLOEXEC)?;
    for _ in 0..60 {
        let mut m = [0; 16];
        sys::read_exact(b, &mut m)?;
        sys::write_all(b, &m)?;
    }
    let mut sent = [0; 8];
    same!(sys::read(rd, &mut sent)?, 8, "what the child says");
    order_off()?;
    sys::kill(pid, libc::SIGKILL)?;
    sys::waitpid(pid)?;
    let (sent, mut got) = (u64::from_ne_bytes(sent), 0);
    let mut piece = vec![0; 70_000];
    while got < sent {
        match sys::recv(b, &mut piece, 0) {
            Ok(n @ 1..) => {
                prng::verify(SEED, got, &piece[..n]).map_err(Why)?;
                got += n as u64;
            }
            end => return Err(Why(format!("{end:?} after {got} of {sent} bytes"))),
        }
    }
    same!(sys::recv(b, &mut piece, 0), Ok(0), "receive behind the last of {sent} bytes");
    sys::close(b)?;
    Ok(sys::close(l)?)
}

/// The parent has shut its receiving direction, and closes; that holds for the child.
fn shut_receiver(cx: &mut Cx) -> Res {
    sys::shutdown(cx.fd, SHUT_RD)?;
    let mut c = cx.with_fd(cx.fd);
    let (rd, wr) = sys::pipe()?;
    let pid = child(move || {
        sys::read(rd, &mut [0])?;
        c.send(100)?;
        same!(sys::poll1(c.fd, POLLRDHUP, 0)? & POLLRDHUP, POLLRDHUP, "what the child polls");
        same!(sys::recv(c.fd, &mut [0], MSG_DONTWAIT), Ok(0), "what the child receives");
        Ok(())
    })?;
    sys::close(cx.fd)?;
    util::pause_ms(30);
    sys::write(wr, b"x")?;
    reap(pid)?;
    same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "bytes of the child");
    Ok(())
}

/// The peer has closed: what it sent, and the end, can still be spliced.
fn splice_the_rest(cx: &mut Cx) -> Res {
    let n = 40_000;
    cx.tell(Op::Send, n as u64, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    cx.arrive(n)?;
    util::pause_ms(20);
    let (rd, wr) = sys::pipe()?;
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
    let _ = sys::send(cx.fd, &[1], MSG_NOSIGNAL);
    Ok(())
}
