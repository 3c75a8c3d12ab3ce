//! What a return to TCP must not change: ends, hang-ups, and who has to wait for whom.

use super::cx::{child_must_leave_tcp, goes_by_rdma, untried, Cx, Op, Res, Why};
use super::images::{self, How};
use super::procs::{bye, child, reap};
use super::unread::{quick, unread, OURS};
use super::Check;
use crate::{ensure, more, prng, same, sys, util};
use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, MSG_WAITALL, SOL_SOCKET, SO_RCVLOWAT};
use libc::{POLLERR, POLLHUP, POLLIN, POLLRDHUP, SHUT_RD, SHUT_RDWR, SHUT_WR};
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("return-end", end),
    ("return-hangup", hangup),
    ("return-child-sends", child_sends),
    ("return-child-takes-nothing", child_takes_nothing),
    ("return-shut-receiver", shut_receiver),
    ("return-and-the-sender-is-killed", sender_killed),
    ("return-and-the-sender-is-killed-and-it-is-passed", sender_killed_and_passed),
    ("return-keeps-linger", linger_while_it_returns),
    ("return-in-a-wait", returns_in_a_wait),
    ("return-of-who-waits-for-more", waits_for_more),
    ("return-and-a-reset-behind-it", reset_behind_it),
    ("exec-while-unread", exec_while_unread),
    ("spawn-static-while-unread", |cx| started_while_unread(cx, SPAWN, 2500)),
    ("fork-static-while-unread-for-long", |cx| started_while_unread(cx, FORK, 6500)),
    ("splice-the-rest", splice_the_rest),
    ("splice-the-rest-in-a-child", splice_the_rest_in_a_child),
    ("splice-the-rest-for-no-reader", splice_the_rest_for_no_reader),
    ("return-for-good-while-the-peer-asks", for_good),
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

/// The only connection of a set comes back while the set is waited for: that takes no longer than it was to take.
fn returns_in_a_wait(cx: &mut Cx) -> Res {
    cx.leave_tcp()?;
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, cx.fd, libc::EPOLLIN as u32, 7)?;
    let fd = cx.fd;
    let began = Instant::now();
    let mover = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1i32)
    });
    same!(sys::epoll_wait(ep, 4, 600)?, vec![], "events");
    let took = began.elapsed().as_millis();
    same!(mover.join().ok(), Some(Ok(())), "the option");
    ensure!((590..1000).contains(&took), "a wait of 600 ms took {took} ms");
    sys::close(ep)?;
    Ok(())
}

/// A receive that waits for as much as `SO_RCVLOWAT` says does so in the kernel, too.
fn waits_for_more(cx: &mut Cx) -> Res {
    sys::setsockopt(cx.fd, SOL_SOCKET, SO_RCVLOWAT, 20)?;
    let fd = cx.fd;
    let receiver = std::thread::spawn(move || {
        let mut b = vec![0; 30];
        let n = sys::recv(fd, &mut b, 0)?;
        b.truncate(n);
        Ok::<_, i32>(b)
    });
    // (What it takes before it sleeps counts for nothing when the kernel looks whether enough is there to wake it.)
    util::pause_ms(100);
    cx.tell(Op::Send, 14, 0, 0)?;
    util::pause_ms(20);
    sys::setsockopt(cx.fd, SOL_SOCKET, libc::SO_ZEROCOPY, 1i32)?;
    util::pause_ms(100);
    ensure!(!receiver.is_finished(), "the receive is over");
    cx.tell(Op::Send, 10, 0, 0)?;
    let got = receiver.join().map_err(|_| Why("the thread".into()))?.map_err(|e| Why(format!("recv: {e}")))?;
    same!(got.len(), 24, "bytes received");
    cx.take(&got)?;
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

/// Gives this process an order (`off`: its connections return), if it is preloaded. What has no room in the kernel is still
/// on its way then.
fn order(what: &str) -> Res {
    let command = std::env::current_exe().map_err(|e| Why(e.to_string()))?.with_file_name("ringsock");
    if !command.exists() {
        return untried("the command `ringsock` is not beside this program");
    }
    let me = std::process::id().to_string();
    let mut told = std::process::Command::new(command)
        .args([what, &me])
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

/// What a [`Sender`]'s bytes are made of.
const SEED: u64 = 77;
/// What a [`Sender`] may be told.
const LINGER: u8 = 0;
const CLOSE: u8 = 1;
const EXEC: u8 = 2;
const SPAWN: u8 = 3;
const FORK: u8 = 4;

/// A program without any library, and what it says.
const SAYS: &[&str] = &["/bin/busybox", "printf", "0123456789"];

/// A process that has sent more than TCP has room for, on a connection to this one.
struct Sender {
    pid: i32,
    fd: i32,
    listener: i32,
    orders: i32,
    answers: i32,
    sent: u64,
    /// What TCP had brought before all that.
    by_tcp: u64,
}

impl Sender {
    /// Starts it, and has its connection leave TCP first, where `cx`'s must.
    fn start(cx: &mut Cx) -> Result<Sender, Why> {
        child_must_leave_tcp(cx)?;
        let (listener, port) = sys::listen(0, 4)?;
        let (answers, say) = sys::pipe()?;
        let (hear, orders) = sys::pipe()?;
        let pid = child(move || {
            sys::close(orders)?;
            Sender::run(port, hear, say)
        })?;
        let fd = sys::accept(listener, libc::SOCK_CLOEXEC)?;
        let mut away = false;
        for i in 0..400 {
            let before = sys::tcp_bytes(fd)?;
            sys::write_all(fd, &[1; 16])?;
            sys::read_exact(fd, &mut [0; 16])?;
            away = sys::tcp_bytes(fd)? == before;
            if away && i > 60 || !cx.is_to_leave() && i > 80 {
                break;
            }
            util::pause_ms((i % 10 == 9).into());
        }
        ensure!(away || !cx.is_to_leave(), "the sender's connection never left TCP");
        let by_tcp = sys::tcp_bytes(fd)?.1;
        sys::write_all(fd, &[0; 16])?;
        let mut sent = [0; 8];
        same!(sys::read(answers, &mut sent)?, 8, "what the sender says");
        Ok(Sender { pid, fd, listener, orders, answers, sent: u64::from_ne_bytes(sent), by_tcp })
    }

    /// Has the connection return; where `cx`'s must leave TCP, a part has come back when this ends, and not all.
    fn bring_back(&self, cx: &Cx) -> Res {
        order("off")?;
        let mut came = 0;
        for _ in 0..500 {
            came = sys::tcp_bytes(self.fd)?.1 - self.by_tcp;
            if came > 10_000 || !cx.is_to_leave() {
                break;
            }
            util::pause_ms(2);
        }
        ensure!(!cx.is_to_leave() || (10_000..self.sent).contains(&came), "{came} of {} bytes came by TCP", self.sent);
        Ok(())
    }

    fn run(port: u16, hear: i32, say: i32) -> Res {
        let a = sys::connect(port)?;
        let mut m = [1; 16];
        while m[0] == 1 {
            sys::read_exact(a, &mut m)?;
            if m[0] == 1 {
                sys::write_all(a, &m)?;
            }
        }
        let mut sent = 0u64;
        for _ in 0..20 {
            while let Ok(n) = sys::send(a, &prng::bytes(SEED, sent, 100_000), MSG_DONTWAIT) {
                sent += n as u64;
            }
            util::pause_ms(2);
        }
        sys::write(say, &sent.to_ne_bytes())?;
        let mut order = [0; 3];
        while sys::read(hear, &mut order)? == 3 {
            let mut l = libc::linger { l_onoff: order[1].into(), l_linger: order[2].into() };
            match order[0] {
                CLOSE => sys::close(a)?,
                SPAWN | FORK => {
                    let how = if order[0] == FORK { How::Fork } else { How::Spawn };
                    same!(sys::waitpid(images::start(how, SAYS, a)?)?, 0, "status of the program");
                    sys::close(a)?;
                }
                EXEC => {
                    sys::dup2(a, 9)?;
                    let shell = std::process::Command::new("/bin/sh").args(["-c", "printf 0123456789 >&9"]).exec();
                    return Err(Why(format!("exec: {shell}")));
                }
                _ => {
                    sys::setsockopt(a, libc::SOL_SOCKET, libc::SO_LINGER, l)?;
                    l = sys::linger(a)?;
                }
            }
            sys::write(say, &[l.l_onoff as u8, l.l_linger as u8])?;
        }
        Ok(())
    }

    fn order(&self, what: u8, onoff: u8, secs: u8) -> Result<[u8; 2], Why> {
        let mut said = [0; 2];
        sys::write(self.orders, &[what, onoff, secs])?;
        same!(sys::read(self.answers, &mut said)?, 2, "what the sender says");
        Ok(said)
    }

    /// Receives all that it has sent.
    fn take_all(&self) -> Res {
        let (mut got, mut piece) = (0, vec![0; 70_000]);
        while got < self.sent {
            let most = piece.len().min((self.sent - got) as usize);
            match sys::recv(self.fd, &mut piece[..most], 0) {
                Ok(n @ 1..) => {
                    prng::verify(SEED, got, &piece[..n]).map_err(Why)?;
                    got += n as u64;
                }
                end => return Err(Why(format!("{end:?} after {got} of {} bytes", self.sent))),
            }
        }
        Ok(())
    }

    fn end(self) -> Res {
        [self.fd, self.listener, self.orders, self.answers].into_iter().try_for_each(|fd| Ok(sys::close(fd)?))
    }
}

/// A connection comes back to TCP, which has no room for all that is in the ring, and who sent that is killed: it was sent.
fn sender_killed(cx: &mut Cx) -> Res {
    let s = Sender::start(cx)?;
    s.bring_back(cx)?;
    sys::kill(s.pid, libc::SIGKILL)?;
    sys::waitpid(s.pid)?;
    s.take_all()?;
    same!(sys::recv(s.fd, &mut [0; 8], 0), Ok(0), "receive behind the last of {} bytes", s.sent);
    s.end()
}

/// The same, for whoever gets it then.
fn sender_killed_and_passed(cx: &mut Cx) -> Res {
    let mut s = Sender::start(cx)?;
    s.bring_back(cx)?;
    sys::kill(s.pid, libc::SIGKILL)?;
    sys::waitpid(s.pid)?;
    let (a, b) = sys::socketpair()?;
    more::send_fd(a, s.fd)?;
    sys::close(s.fd)?;
    s.fd = more::recv_fd(b)?;
    s.take_all()?;
    same!(sys::recv(s.fd, &mut [0; 8], 0), Ok(0), "receive behind the last of {} bytes", s.sent);
    s.end()
}

/// All that was in the ring is in the kernel's hands when its sender sends more, and then resets the connection. What had not
/// come by then is lost, as with any TCP, and nobody takes what is left for all.
fn reset_behind_it(cx: &mut Cx) -> Res {
    const MORE: u64 = 30_000;
    // What a ring with another host has room for is less.
    let ring = if goes_by_rdma() { 150_000 } else { 1_500_000 };
    cx.leave_tcp()?;
    cx.tell(Op::Send, ring, 0, 0)?;
    order("off")?;
    util::pause_ms(200);
    cx.tell(Op::Send, MORE, 0, 0)?;
    cx.tell(Op::Linger, 0, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    let (mut got, mut piece) = (0, vec![0; 70_000]);
    let end = loop {
        match sys::recv(cx.fd, &mut piece, 0) {
            Ok(n @ 1..) => {
                cx.take(&piece[..n])?;
                got += n as u64;
            }
            end => break end,
        }
    };
    ensure!(got <= ring + MORE, "{got} bytes came of {}", ring + MORE);
    same!(end, Err(libc::ECONNRESET), "receive after {got} bytes of {}", ring + MORE);
    order("on")
}

/// How a close is to end the connection is the program's to say, also while the rest of a ring is on its way: it reads what
/// it set, and that is what holds at the end.
fn linger_while_it_returns(cx: &mut Cx) -> Res {
    for (set, ends) in [((0, 0), Ok(0)), ((1, 9), Ok(0)), ((1, 0), Err(libc::ECONNRESET))] {
        let s = Sender::start(cx)?;
        s.bring_back(cx)?;
        same!(s.order(LINGER, set.0, set.1)?, [set.0, set.1], "SO_LINGER in the middle of a return");
        s.take_all()?;
        util::pause_ms(50);
        s.order(CLOSE, 0, 0)?;
        same!(sys::recv(s.fd, &mut [0; 8], 0), ends, "receive after a close with a linger of {set:?}");
        let pid = s.pid;
        s.end()?;
        reap(pid)?;
        order("on")?;
    }
    Ok(())
}

/// A program becomes another one, which uses the connection, while much of what it has sent is not read.
fn exec_while_unread(cx: &mut Cx) -> Res {
    let s = Sender::start(cx)?;
    sys::write(s.orders, &[EXEC, 0, 0])?;
    util::pause_ms(2500);
    s.take_all()?;
    let mut rest = [0; 10];
    sys::read_exact(s.fd, &mut rest)?;
    same!(&rest, b"0123456789", "what the new program says");
    same!(sys::recv(s.fd, &mut [0; 8], 0), Ok(0), "receive behind that");
    let pid = s.pid;
    s.end()?;
    reap(pid)
}

/// A program is started whose output is the connection, and that cannot be preloaded, while much of what was sent before is
/// not read for so many milliseconds. What it says comes behind that.
fn started_while_unread(cx: &mut Cx, how: u8, ms: u64) -> Res {
    if !std::path::Path::new(SAYS[0]).exists() {
        return untried(&format!("no {}", SAYS[0]));
    }
    let s = Sender::start(cx)?;
    sys::write(s.orders, &[how, 0, 0])?;
    util::pause_ms(ms);
    s.take_all()?;
    let mut rest = [0; 10];
    let end = sys::recv(s.fd, &mut rest, MSG_WAITALL);
    same!((end, &rest), (Ok(10), b"0123456789"), "what the program says");
    same!(sys::recv(s.fd, &mut [0; 8], 0), Ok(0), "receive behind that");
    same!(sys::read(s.answers, &mut [0; 2])?, 2, "what the sender says");
    let pid = s.pid;
    s.end()?;
    reap(pid)
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
    splice_all(cx, n, 30_000, Ok(0))?;
    let _ = sys::send(cx.fd, &[1], MSG_NOSIGNAL);
    Ok(())
}

/// Splices `n` bytes and the end behind them, at first a few bytes, then in pieces.
fn splice_all(cx: &mut Cx, n: usize, piece: usize, end: sys::R<usize>) -> Res {
    let (rd, wr) = sys::pipe()?;
    let mut got = 0;
    while got < n {
        let k = sys::splice(cx.fd, wr, if got == 0 { 4 } else { piece }, 0)?;
        ensure!(k > 0, "splice: the end of the stream after {got} bytes");
        let mut b = vec![0; k];
        sys::read_exact(rd, &mut b)?;
        cx.take(&b)?;
        got += k;
    }
    same!(sys::splice(cx.fd, wr, 1000, 0), end, "splice at the end of the stream");
    sys::close(rd)?;
    sys::close(wr)?;
    Ok(())
}

/// The same of a child, while its parent brings the connection home.
fn splice_the_rest_in_a_child(cx: &mut Cx) -> Res {
    for i in 0..30 {
        cx.renew()?;
        cx.warm(3, 0)?;
        if i % 3 > 0 {
            cx.leave_tcp()?;
        }
        let n = 300 + 977 * i;
        cx.tell(Op::Send, n as u64, 0, 0)?;
        // What the peer leaves unread makes its close a reset.
        let reset = i % 2 > 0;
        if reset {
            cx.send(50)?;
            let began = Instant::now();
            while cx.tell(Op::Fionread, 0, 0, 0)? < 50 && began.elapsed().as_secs() < 2 {
                util::pause_ms(1);
            }
        }
        cx.tell(Op::Close, 0, 0, 0)?;
        cx.arrive(n)?;
        let mut c = cx.with_fd(cx.fd);
        let end = if reset { Err(libc::ECONNRESET) } else { Ok(0) };
        reap(child(move || splice_all(&mut c, n, 3000, end))?)?;
        same!(sys::recv(cx.fd, &mut [0], MSG_DONTWAIT), Ok(0), "the end of the stream");
    }
    Ok(())
}

/// A pipe that nobody reads takes nothing away.
fn splice_the_rest_for_no_reader(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 5000, 0, 0)?;
    cx.tell(Op::Close, 0, 0, 0)?;
    cx.arrive(5000)?;
    util::pause_ms(20);
    let (rd, wr) = sys::pipe()?;
    sys::close(rd)?;
    same!(sys::splice(cx.fd, wr, 1000, 0), Err(libc::EPIPE), "splice");
    sys::close(wr)?;
    cx.recv(5000)
}

/// What a connection is to use, rings lack, while its peer is calling so often that it asks for a ring again the moment both
/// have left one.
fn for_good(cx: &mut Cx) -> Res {
    const BITS: u64 = 40;
    for i in 0..60 {
        cx.renew()?;
        cx.warm(4 + i % 5, 0)?;
        cx.post(Op::SendBits, BITS, 3, 50)?;
        let began = Instant::now();
        sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_TIMESTAMP, 1)?;
        ensure!(began.elapsed().as_millis() < 900, "the option took {:?}", began.elapsed());
        cx.recv(3 * BITS as usize)?;
        cx.send(100)?;
        same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "bytes in the other direction");
    }
    bye(cx)?;
    Ok(())
}
