//! The calls that actors make, with what came of them as text. The text has only what the kernel's result determines.

use super::wire::{Cmd, Op, Reply};
use crate::sys::{self, R};
use crate::{more, prng};
use libc::{c_int, pollfd};
use std::fmt::Write;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Connections are told by `TCP_INQ` how much they have left unread.
static COUNTED: AtomicBool = AtomicBool::new(false);

/// Whether connections are told how much they have left unread.
pub fn are_counted() -> bool {
    COUNTED.load(Relaxed)
}

/// From now on they are.
pub fn count() {
    COUNTED.store(true, Relaxed);
}

/// A new connection.
fn new_connection(r: R<c_int>) -> Reply {
    if let (Ok(fd), true) = (r, are_counted()) {
        let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INQ, 1i32);
    }
    new_fd(r)
}

/// How long a state that must come is waited for.
const PATIENCE: Duration = Duration::from_secs(3);

/// The name of an error.
pub fn name(e: i32) -> String {
    let s = match e {
        libc::EAGAIN => "EAGAIN",
        libc::EPIPE => "EPIPE",
        libc::ECONNRESET => "ECONNRESET",
        libc::EBADF => "EBADF",
        libc::ENOTCONN => "ENOTCONN",
        libc::EINTR => "EINTR",
        libc::EINVAL => "EINVAL",
        libc::ENOENT => "ENOENT",
        libc::EEXIST => "EEXIST",
        libc::ENOTSOCK => "ENOTSOCK",
        libc::EPERM => "EPERM",
        libc::ESPIPE => "ESPIPE",
        _ => return format!("errno {e}"),
    };
    s.into()
}

/// The fd, under the lowest number from `min` on that is free. A preloaded library that makes fds of its own may have
/// had that number for a moment; what the kernel gives then is not determined.
fn lowest(fd: c_int, min: c_int) -> c_int {
    let free = |n: &c_int| sys::fcntl(*n, libc::F_GETFD, 0) == Err(libc::EBADF);
    if (min..fd).any(|n| free(&n)) {
        if let Ok(n) = sys::fcntl(fd, libc::F_DUPFD, min) {
            let _ = sys::close(fd);
            return n;
        }
    }
    fd
}

/// The answer of a call that makes an fd.
pub fn new_fd(r: R<c_int>) -> Reply {
    int(r.map(|fd| lowest(fd, 3)))
}

/// The answer of a call that failed.
pub fn fail(e: i32) -> Reply {
    Reply { ret: -1, errno: e, aux: 0, text: name(e) }
}

/// The answer of a call that returns nothing.
pub fn unit(r: R<()>) -> Reply {
    match r {
        Ok(()) => Reply { text: "ok".into(), ..Reply::default() },
        Err(e) => fail(e),
    }
}

/// The answer of a call that returns a number.
pub fn int(r: R<c_int>) -> Reply {
    match r {
        Ok(n) => Reply { ret: n as i64, text: n.to_string(), ..Reply::default() },
        Err(e) => fail(e),
    }
}

fn size(r: R<usize>) -> Reply {
    match r {
        Ok(n) => Reply { ret: n as i64, text: n.to_string(), ..Reply::default() },
        Err(e) => fail(e),
    }
}

/// Does what a command says, but for what concerns processes.
pub fn act(c: &Cmd) -> Reply {
    let a = &c.a;
    let fd = a[0] as RawFd;
    match c.op {
        Op::Listen => match sys::listen(0, 16) {
            Ok((fd, port)) => Reply { ret: lowest(fd, 3) as i64, aux: port as i64, text: String::new(), errno: 0 },
            Err(e) => fail(e),
        },
        Op::Connect => new_connection(sys::connect(a[0] as u16)),
        Op::Accept => new_connection(sys::accept(fd, libc::SOCK_CLOEXEC)),
        Op::Warm => unit(warm(fd, a[1] != 0, a[2])),
        Op::Send => send(a),
        Op::Recv => recv(a),
        Op::Shutdown => unit(sys::shutdown(fd, a[1] as c_int)),
        Op::Close => unit(match a[1] {
            1 => more::close_by_syscall(fd),
            2 => more::close_range(fd, fd),
            _ => sys::close(fd),
        }),
        Op::Dup => int(match a[1] {
            0 => sys::dup(fd).map(|n| lowest(n, 3)),
            1 => sys::dup2(fd, a[2] as RawFd),
            2 => more::dup3(fd, a[2] as RawFd, libc::O_CLOEXEC),
            3 => sys::fcntl(fd, libc::F_DUPFD, a[2] as c_int).map(|n| lowest(n, a[2] as c_int)),
            _ => sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, a[2] as c_int).map(|n| lowest(n, a[2] as c_int)),
        }),
        Op::Poll => poll(a),
        Op::EpNew => new_fd(sys::epoll_create()),
        Op::EpCtl => unit(sys::epoll_ctl(fd, a[1] as c_int, a[2] as RawFd, a[3] as u32, a[4] as u64)),
        Op::EpWait => epoll_wait(a),
        Op::SetOpt => {
            let (level, opt) = (a[1] as c_int, a[2] as c_int);
            unit(match a[5] {
                1 => sys::set_linger(fd, a[3] != 0, a[4] as c_int),
                2 => sys::set_timeout(fd, opt, a[3]),
                _ => sys::setsockopt(fd, level, opt, a[3] as c_int),
            })
        }
        Op::GetOpt => int(sys::getsockopt_int(fd, a[1] as c_int, a[2] as c_int)),
        Op::Nonblock => unit(if a[1] == 0 { sys::nonblock(fd, a[2] != 0) } else { sys::nonblock_ioctl(fd, a[2] != 0) }),
        Op::Fionread => size(sys::fionread(fd)),
        Op::Names => names(fd),
        Op::Other => other(a[0]),
        Op::OtherWrite => size(sys::write(fd, &vec![7; a[1] as usize])),
        Op::OtherRead => size(sys::read(fd, &mut vec![0; a[1] as usize])),
        Op::Settle => settle(fd, a[1], a[2] != 0, a[3] != 0),
        Op::Acked => acked(fd),
        Op::Sendfile => sendfile(a),
        Op::Splice => splice(a),
        Op::Fill => fill(a),
        Op::Drain => drain(a),
        Op::SendAll => match sys::write_all(fd, &prng::bytes(a[4] as u64, a[5] as u64, a[2] as usize)) {
            Ok(()) => Reply { ret: a[2], text: format!("all {}", a[2]), ..Reply::default() },
            Err(e) => fail(e),
        },
        _ => Reply { ret: -1, text: format!("{:?} is not for this", c.op), ..Reply::default() },
    }
}

/// Exchanges messages until both ends see that the kernel's TCP moves nothing any more.
fn warm(fd: RawFd, first: bool, most: i64) -> R<()> {
    let mut b = [0u8; 16];
    if !first {
        loop {
            sys::read_exact(fd, &mut b)?;
            sys::write_all(fd, &b)?;
            if b[0] == b'q' {
                return Ok(());
            }
        }
    }
    let mut last = (0, 0);
    for i in 0..most {
        let now = sys::tcp_bytes(fd)?;
        if i > 2 && now == last {
            break;
        }
        last = now;
        sys::write_all(fd, &b)?;
        sys::read_exact(fd, &mut b)?;
        std::thread::sleep(Duration::from_micros(if i < 4 { 0 } else { 500 }));
    }
    sys::write_all(fd, &[b'q'; 16])?;
    sys::read_exact(fd, &mut b)
}

fn send(a: &[i64]) -> Reply {
    let (fd, flags, parts) = (a[0] as RawFd, a[3] as c_int, a[6] as usize);
    let mut b = prng::bytes(a[4] as u64, a[5] as u64, a[2] as usize);
    size(match a[1] {
        0 => sys::send(fd, &b, flags),
        1 => sys::write(fd, &b),
        2 => sys::writev(fd, &b, parts),
        3 => sys::sendmsg(fd, &b, parts, flags),
        4 => sys::sendto(fd, &b, flags),
        5 => more::rw2(fd, &mut b, true, 0),
        _ => sys::sendmmsg(fd, &b, parts, flags).map(|v| v.iter().sum()),
    })
}

/// Whether received bytes are those of the stream.
fn judge(r: &mut Reply, seed: i64, off: i64, b: &[u8]) {
    if let Err(e) = prng::verify(seed as u64, off as u64, b) {
        let _ = write!(r.text, " WRONG BYTES: {e}");
    }
}

fn recv(a: &[i64]) -> Reply {
    let (fd, flags, parts) = (a[0] as RawFd, a[3] as c_int, a[6] as usize);
    let mut b = vec![0xaa; a[2] as usize];
    if flags & libc::MSG_TRUNC != 0 {
        return size(sys::recv_discard(fd, b.len(), flags));
    }
    let mut beside = String::new();
    let r = match a[1] {
        0 | 3 if are_counted() => sys::recvmsg_counted(fd, &mut b, parts, flags, 64).map(|c| {
            let _ = write!(beside, " flags {:#x} left {:?}", c.flags & !libc::MSG_CMSG_CLOEXEC, c.left);
            c.n
        }),
        0 => sys::recv(fd, &mut b, flags),
        1 => sys::read(fd, &mut b),
        2 => sys::readv(fd, &mut b, parts),
        3 => sys::recvmsg(fd, &mut b, parts, flags).map(|(n, f)| {
            let _ = write!(beside, " flags {:#x}", f & !libc::MSG_CMSG_CLOEXEC);
            n
        }),
        4 => sys::recvfrom(fd, &mut b, flags),
        5 => more::rw2(fd, &mut b, false, 0),
        _ => sys::recvmmsg(fd, &mut b, parts, flags).map(|v| {
            let _ = write!(beside, " as {v:?}");
            v.iter().sum()
        }),
    };
    let mut r = size(r);
    r.text += &beside;
    if r.ret > 0 {
        let n = r.ret as usize;
        judge(&mut r, a[4], a[5], &b[..n]);
    }
    r
}

fn poll(a: &[i64]) -> Reply {
    let (call, ms, n) = (a[0], a[1] as c_int, a[2] as usize);
    let list: Vec<(RawFd, i16)> = a[3..3 + 2 * n].chunks(2).map(|c| (c[0] as RawFd, c[1] as i16)).collect();
    let mut r = Reply::default();
    if call >= 2 {
        let of = |e: i16| list.iter().filter(|x| x.1 & e != 0 && x.0 >= 0).map(|x| x.0).collect::<Vec<_>>();
        let (mut rd, mut wr) = (of(libc::POLLIN), of(libc::POLLOUT));
        rd.dedup();
        wr.dedup();
        return match sys::select(&rd, &wr, ms as i64) {
            Ok((r, w)) => {
                Reply { ret: (r.len() + w.len()) as i64, text: format!("read {r:?} write {w:?}"), ..Reply::default() }
            }
            Err(e) => fail(e),
        };
    }
    let mut p: Vec<pollfd> = list.iter().map(|&(fd, events)| pollfd { fd, events, revents: 0 }).collect();
    let got = if call == 0 {
        sys::poll(&mut p, ms)
    } else {
        let ts = libc::timespec { tv_sec: ms as i64 / 1000, tv_nsec: (ms as i64 % 1000) * 1_000_000 };
        // SAFETY: the array and the time are valid for the call.
        let k = unsafe { libc::ppoll(p.as_mut_ptr(), p.len() as _, &ts, std::ptr::null()) };
        if k < 0 {
            Err(sys::errno())
        } else {
            Ok(k as usize)
        }
    };
    match got {
        Ok(k) => {
            r.ret = k as i64;
            r.text = k.to_string();
            for x in &p {
                let _ = write!(r.text, " {}:{:#x}", x.fd, x.revents);
            }
            r
        }
        Err(e) => fail(e),
    }
}

fn epoll_wait(a: &[i64]) -> Reply {
    let (ep, call, max, ms) = (a[0] as RawFd, a[1], a[2] as usize, a[3] as c_int);
    let got = match call {
        0 => sys::epoll_wait(ep, max, ms),
        1 => sys::epoll_pwait(ep, max, ms),
        _ => match more::epoll_pwait2(ep, max, ms as i64 * 1000) {
            Some(r) => r,
            None => sys::epoll_wait(ep, max, ms),
        },
    };
    match got {
        Ok(mut v) => {
            let n = v.len() as i64;
            v.sort_by_key(|e| e.1);
            let mut r = Reply { ret: n, text: n.to_string(), ..Reply::default() };
            for (e, d) in v {
                let _ = write!(r.text, " {d}:{e:#x}");
            }
            r
        }
        Err(e) => fail(e),
    }
}

fn names(fd: RawFd) -> Reply {
    let mut r = Reply::default();
    for peer in [false, true] {
        match sys::sockname(fd, peer) {
            Ok((ip, _)) => _ = write!(r.text, "{ip:?} "),
            Err(e) => _ = write!(r.text, "{} ", name(e)),
        }
    }
    let _ = write!(r.text, "{:?}", more::odd_calls(fd));
    r
}

fn other(kind: i64) -> Reply {
    let pair = |p: R<(RawFd, RawFd)>| match p {
        Ok((x, y)) => {
            let x = lowest(x, 3);
            let y = lowest(y, 3);
            Reply { ret: x as i64, aux: y as i64, text: format!("{x} {y}"), errno: 0 }
        }
        Err(e) => fail(e),
    };
    match kind {
        0 => pair(sys::pipe().and_then(|p| {
            sys::nonblock(p.0, true)?;
            sys::nonblock(p.1, true)?;
            Ok(p)
        })),
        1 => new_fd(sys::tcp_socket()),
        2 => new_fd(more::open("/dev/zero\0", libc::O_RDONLY)),
        3 => new_fd(more::eventfd()),
        _ => pair(sys::socketpair().and_then(|p| {
            sys::nonblock(p.0, true)?;
            sys::nonblock(p.1, true)?;
            Ok(p)
        })),
    }
}

/// Looks again and again until the state is there, and says what is there in the end.
fn settle(fd: RawFd, bytes: i64, rdhup: bool, hup: bool) -> Reply {
    let begin = Instant::now();
    loop {
        let n = sys::fionread(fd);
        let e = sys::poll1(fd, libc::POLLRDHUP, 0);
        let (has_rdhup, has_hup) = match e {
            Ok(e) => (e & libc::POLLRDHUP != 0, e & libc::POLLHUP != 0),
            Err(_) => (false, false),
        };
        let there = n == Ok(bytes as usize) && has_rdhup == rdhup && has_hup == hup;
        if there {
            return Reply::default();
        }
        if begin.elapsed() > PATIENCE {
            let text = format!("never came to {bytes} bytes, rdhup {rdhup}, hup {hup}: FIONREAD {n:?} poll {e:x?}");
            return Reply { ret: -1, text, ..Reply::default() };
        }
        std::thread::sleep(Duration::from_micros(if begin.elapsed().as_millis() < 2 { 20 } else { 300 }));
    }
}

/// Waits until no end of the stream is on its way to the peer. (On a ring it is so at once.)
fn acked(fd: RawFd) -> Reply {
    const LONGEST: Duration = Duration::from_millis(100);
    let begin = Instant::now();
    while sys::tcp_state(fd).is_ok_and(|s| sys::TCP_ENDS_ON_THEIR_WAY.contains(&s)) && begin.elapsed() < LONGEST {
        std::thread::sleep(Duration::from_millis(1));
    }
    Reply::default()
}

fn sendfile(a: &[i64]) -> Reply {
    let b = prng::bytes(a[4] as u64, a[5] as u64, a[1] as usize);
    let r = more::memfile(&b).and_then(|file| {
        let r = sys::sendfile(a[0] as RawFd, file, &mut 0, b.len());
        sys::close(file)?;
        r
    });
    size(r)
}

fn splice(a: &[i64]) -> Reply {
    let r = sys::pipe().and_then(|(rd, wr)| {
        let r = sys::splice(a[0] as RawFd, wr, a[1] as usize, libc::SPLICE_F_NONBLOCK);
        let mut b = vec![0; r.unwrap_or(0)];
        let k = if b.is_empty() { Ok(()) } else { sys::read_exact(rd, &mut b) };
        sys::close(rd)?;
        sys::close(wr)?;
        k?;
        r.map(|_| b)
    });
    match r {
        Ok(b) => {
            let mut r = Reply { ret: b.len() as i64, text: b.len().to_string(), ..Reply::default() };
            judge(&mut r, a[4], a[5], &b);
            r
        }
        Err(e) => fail(e),
    }
}

fn fill(a: &[i64]) -> Reply {
    let mut done = 0;
    loop {
        let b = prng::bytes(a[4] as u64, (a[5] + done) as u64, 32 << 10);
        match sys::send(a[0] as RawFd, &b, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) {
            Ok(n) => done += n as i64,
            Err(libc::EAGAIN) if done > 0 => {
                // What the kernel has under way makes room for a moment: full is full twice.
                std::thread::sleep(Duration::from_millis(3));
                match sys::send(a[0] as RawFd, &b, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) {
                    Ok(n) => done += n as i64,
                    _ => return Reply { ret: 0, aux: done, text: "full".into(), errno: 0 },
                }
            }
            Err(e) => return fail(e),
        }
        if done > 256 << 20 {
            return Reply { ret: -1, text: "never full".into(), ..Reply::default() };
        }
    }
}

fn drain(a: &[i64]) -> Reply {
    let mut b = vec![0; 64 << 10];
    let mut r = Reply::default();
    let mut done = 0;
    while done < a[2] {
        let want = b.len().min((a[2] - done) as usize);
        match sys::recv(a[0] as RawFd, &mut b[..want], 0) {
            Ok(0) => {
                r.text = format!("ended after {done}");
                return r;
            }
            Ok(n) => {
                judge(&mut r, a[4], a[5] + done, &b[..n]);
                done += n as i64;
            }
            Err(libc::EAGAIN) => match sys::poll1(a[0] as RawFd, libc::POLLIN, 3000) {
                Ok(e) if e != 0 => {}
                _ => {
                    r.text = format!("nothing more after {done}");
                    return r;
                }
            },
            Err(e) => return fail(e),
        }
    }
    r.ret = done;
    r.text += "drained";
    r
}
