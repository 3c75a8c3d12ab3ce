//! What a check works with: its own end of a warmed-up connection, and a *puppet* that holds the
//! other end and does what it is told. The puppet is a thread or, with `--two`, a process that
//! was forked before there was any socket; with `--puppets` it is a process of another machine.

use crate::sys::{self, R};
use crate::{prng, util};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::RawFd;

/// Why a check failed.
#[derive(Debug)]
pub struct Why(pub String);

impl From<i32> for Why {
    #[track_caller]
    fn from(e: i32) -> Why {
        let at = std::panic::Location::caller();
        let text = if e == 0 { "early end of the stream".into() } else { sys::strerror(e) };
        Why(format!("{text} (line {} of {})", at.line(), at.file()))
    }
}

impl From<std::io::Error> for Why {
    #[track_caller]
    fn from(e: std::io::Error) -> Why {
        match e.raw_os_error() {
            Some(e) => e.into(),
            None => Why(e.to_string()),
        }
    }
}

impl From<String> for Why {
    fn from(s: String) -> Why {
        Why(s)
    }
}

/// How the text of a check begins that could not be tried here.
pub const UNTRIED: &str = "not tried: ";

/// The kernel, or the user, does not let the check be tried.
pub fn untried(why: &str) -> Res {
    Err(Why(format!("{UNTRIED}{why}")))
}

/// Whether connections leave TCP for RDMA only.
pub fn goes_by_rdma() -> bool {
    std::env::var("RINGSOCK_LINKS").is_ok_and(|v| v.contains("verbs"))
}

/// For what a forked child does with a connection that it has begun: the library gives it no RDMA.
pub fn child_must_leave_tcp(cx: &Cx) -> Res {
    if cx.is_to_leave() && goes_by_rdma() {
        return untried("a forked child's connections stay on TCP where there is RDMA only");
    }
    Ok(())
}

/// How the text of a check begins that held but for the time it took, or for what the library makes of such times: the
/// machine may have been at something else.
pub const LATE: &str = "late: ";

/// What took so many milliseconds was to take `lo` to `hi`.
pub fn between(what: &str, took: u64, lo: u64, hi: u64) -> Res {
    match took {
        _ if took + 1 < lo => Err(Why(format!("{what} took {took} ms, not {lo} to {hi}"))),
        _ if took > hi => Err(Why(format!("{LATE}{what} took {took} ms, not {lo} to {hi}"))),
        _ => Ok(()),
    }
}

/// What a check returns.
pub type Res = Result<(), Why>;

/// Fails the check with a text unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($cond:expr, $($text:tt)+) => {
        if !$cond {
            return Err($crate::semantics::cx::Why(format!("{} (line {})", format!($($text)+), line!())));
        }
    };
}

/// Fails the check unless both sides are equal.
#[macro_export]
macro_rules! same {
    ($got:expr, $want:expr, $($what:tt)+) => {{
        let (got, want) = (&$got, &$want);
        if got != want {
            let what = format!($($what)+);
            return Err($crate::semantics::cx::Why(format!(
                "{what}: got {got:?}, expected {want:?} (line {})", line!())));
        }
    }};
}

/// Seed of the bytes from the check to the puppet.
pub const OUT: u64 = 0x5eed;
/// Seed of the bytes from the puppet to the check.
pub const IN: u64 = 0x0ddba11;

/// What a puppet can be told to do; what its arguments are is said at each.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(u64)]
pub enum Op {
    /// Listens at an address (1, 2); the answer is the port.
    Listen,
    /// Accepts one connection.
    Accept,
    /// Connects to a port (1) of an address (2, 3).
    Connect,
    /// Echoes (1) messages of (2) bytes; ends well at the end of the stream.
    Echo,
    /// Sends (1) bytes.
    Send,
    /// Sends (1) bytes, and at once a signal, `SIGUSR1`, to the thread (2) of the process (3).
    SendHit,
    /// Sends (1) pieces of (2) bytes, (3) microseconds apart.
    SendBits,
    /// Receives exactly (1) bytes.
    Recv,
    /// Receives (1) bytes, at most (2) at a time, (3) microseconds apart.
    SlowRecv,
    /// Receives until the end of the stream; the answer is how many.
    Drain,
    /// Closes, if it has not yet.
    Close,
    /// Shuts down; (1) as for `shutdown`.
    Shutdown,
    /// Sleeps (1) microseconds.
    Sleep,
    /// Sets `SO_LINGER` to on, (1) seconds.
    Linger,
    /// The answer is `FIONREAD`.
    Fionread,
    /// Waits at most (1) milliseconds for events (2); the answer is those that are there.
    Poll,
    /// Forgets how far the streams have come.
    Restart,
    /// Sends one urgent byte.
    Urgent,
    /// Looks without rest until bytes are there, and leaves them; the answer is how many are seen then.
    First,
    /// Ends.
    Quit,
}

const OPS: [Op; 20] = [
    Op::Listen,
    Op::Accept,
    Op::Connect,
    Op::Echo,
    Op::Send,
    Op::SendHit,
    Op::SendBits,
    Op::Recv,
    Op::SlowRecv,
    Op::Drain,
    Op::Close,
    Op::Shutdown,
    Op::Sleep,
    Op::Linger,
    Op::Fionread,
    Op::Poll,
    Op::Restart,
    Op::Urgent,
    Op::First,
    Op::Quit,
];

/// The addresses of both ends of a check's connection with its puppet.
#[derive(Clone, Copy)]
pub struct Hosts {
    /// Where the check listens.
    pub check: IpAddr,
    /// Where the puppet listens.
    pub puppet: IpAddr,
}

impl Hosts {
    /// Both in this machine.
    pub fn here() -> Hosts {
        Hosts { check: sys::host(), puppet: sys::host() }
    }

    /// Whether the puppet is in another machine.
    pub fn are_two(&self) -> bool {
        self.check != self.puppet
    }
}

/// An address as arguments of an [`Op`].
fn words(host: IpAddr) -> [u64; 2] {
    let v6 = match host {
        IpAddr::V4(a) => a.to_ipv6_mapped(),
        IpAddr::V6(a) => a,
    };
    let n = v6.to_bits();
    [(n >> 64) as u64, n as u64]
}

/// The address that [`words`] are of.
fn address(high: u64, low: u64) -> IpAddr {
    Ipv6Addr::from_bits((high as u128) << 64 | low as u128).to_canonical()
}

/// What a control socket's answer is: the result of an [`Op`], its errno, or the status of a puppet that has ended.
const DONE: u64 = 0;
const FAILED: u64 = 1;
const ENDED: u64 = 2;

/// Tells the other end of a control socket the status of its puppet, which has ended.
pub fn tell_status(ctl: RawFd, status: i32) -> R<()> {
    put(ctl, [status as u64, ENDED, 0, 0])
}

fn put(fd: RawFd, words: [u64; 4]) -> R<()> {
    let mut b = [0u8; 32];
    for (c, w) in b.chunks_mut(8).zip(words) {
        c.copy_from_slice(&w.to_ne_bytes());
    }
    sys::write_all(fd, &b)
}

fn get(fd: RawFd) -> R<[u64; 4]> {
    let mut b = [0u8; 32];
    sys::read_exact(fd, &mut b)?;
    let mut w = [0u64; 4];
    for (c, w) in b.chunks(8).zip(w.iter_mut()) {
        *w = u64::from_ne_bytes(c.try_into().expect("8 bytes"));
    }
    Ok(w)
}

/// The errno of a puppet that received bytes other than those that were sent.
const WRONG: i32 = 9999;

/// One end of a connection: the socket and how far both streams have come.
struct End {
    fd: RawFd,
    tx: u64,
    rx: u64,
    tx_seed: u64,
    rx_seed: u64,
}

impl End {
    fn send(&mut self, n: usize) -> R<()> {
        let mut done = 0;
        while done < n {
            let b = prng::bytes(self.tx_seed, self.tx, (n - done).min(256 << 10));
            sys::write_all(self.fd, &b)?;
            self.tx += b.len() as u64;
            done += b.len();
        }
        Ok(())
    }

    fn take(&mut self, b: &[u8]) -> R<()> {
        if let Err(e) = prng::verify(self.rx_seed, self.rx, b) {
            eprintln!("rs-app: {e}");
            return Err(WRONG);
        }
        self.rx += b.len() as u64;
        Ok(())
    }

    /// Receives `n` bytes, at most `each` at a time; ends early at the end of the stream.
    fn recv(&mut self, n: usize, each: usize, us: u64) -> R<usize> {
        let mut b = vec![0; each.clamp(1, 256 << 10).min(n.max(1))];
        let mut done = 0;
        while done < n {
            let want = b.len().min(n - done);
            match sys::recv(self.fd, &mut b[..want], 0) {
                Ok(0) => break,
                Ok(k) => {
                    self.take(&b[..k])?;
                    done += k;
                }
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) => {
                    sys::wait1(self.fd, libc::POLLIN, 1000)?;
                }
                Err(e) => return Err(e),
            }
            if us > 0 {
                std::thread::sleep(std::time::Duration::from_micros(us));
            }
        }
        Ok(done)
    }
}

/// Runs a puppet until it is told to quit or its control socket ends.
pub fn puppet(ctl: RawFd) {
    let mut e = End { fd: -1, tx: 0, rx: 0, tx_seed: IN, rx_seed: OUT };
    let mut listener = -1;
    while let Ok([op, a, b, c]) = get(ctl) {
        let op = OPS[op as usize];
        let (r, tag) = match act(&mut e, &mut listener, op, a, b, c) {
            Ok(v) => (v, DONE),
            Err(errno) => (errno as u64, FAILED),
        };
        if put(ctl, [r, tag, e.tx, e.rx]).is_err() || op == Op::Quit {
            break;
        }
    }
    for fd in [e.fd, listener, ctl] {
        if fd >= 0 {
            let _ = sys::close(fd);
        }
    }
}

fn act(e: &mut End, listener: &mut RawFd, op: Op, a: u64, b: u64, c: u64) -> R<u64> {
    match op {
        Op::Listen => {
            let (fd, port) = sys::listen_at(address(a, b), 0, 8)?;
            *listener = fd;
            return Ok(port as u64);
        }
        Op::Accept => {
            e.fd = sys::accept(*listener, libc::SOCK_CLOEXEC)?;
            sys::close(*listener)?;
            *listener = -1;
        }
        Op::Connect => e.fd = sys::connect_at(address(b, c), a as u16, |_| Ok(()))?,
        Op::Echo => {
            for i in 0..a {
                if i % 4 == 0 {
                    sys::wait1(e.fd, libc::POLLIN, 5000)?;
                }
                if e.recv(b as usize, b as usize, 0)? < b as usize {
                    return Ok(i);
                }
                e.send(b as usize)?;
            }
            return Ok(a);
        }
        Op::Send => e.send(a as usize)?,
        Op::SendHit => {
            e.send(a as usize)?;
            sys::tgkill(c as i32, b as i32, libc::SIGUSR1)?;
        }
        Op::SendBits => {
            for i in 0..a {
                if i > 0 {
                    std::thread::sleep(std::time::Duration::from_micros(c));
                }
                e.send(b as usize)?;
            }
        }
        Op::Recv => return e.recv(a as usize, usize::MAX, 0).map(|n| n as u64),
        Op::SlowRecv => return e.recv(a as usize, b as usize, c).map(|n| n as u64),
        Op::Drain => return e.recv(usize::MAX, usize::MAX, 0).map(|n| n as u64),
        Op::Close => match std::mem::replace(&mut e.fd, -1) {
            -1 => {}
            fd => sys::close(fd)?,
        },
        Op::Shutdown => sys::shutdown(e.fd, a as i32)?,
        Op::Sleep => std::thread::sleep(std::time::Duration::from_micros(a)),
        Op::Linger => sys::set_linger(e.fd, true, a as i32)?,
        Op::Fionread => return sys::fionread(e.fd).map(|n| n as u64),
        Op::Poll => return sys::wait1(e.fd, b as i16, a as i32).map(|n| n as u64),
        Op::Restart => (e.tx, e.rx) = (0, 0),
        Op::Urgent => return sys::send(e.fd, b"!", libc::MSG_OOB).map(|n| n as u64),
        Op::First => return first(e.fd),
        Op::Quit => {}
    }
    Ok(0)
}

/// How many bytes are seen by who looks for them without rest, in one way after the other.
fn first(fd: RawFd) -> R<u64> {
    let mut b = vec![0; 128 << 10];
    let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
    for look in 0u32.. {
        let there = match look % 3 {
            0 => sys::poll1(fd, libc::POLLIN, 0)? != 0,
            1 => sys::fionread(fd)? > 0,
            _ => true,
        };
        if !there {
            continue;
        }
        match sys::recv(fd, &mut b, libc::MSG_PEEK | libc::MSG_DONTWAIT) {
            Err(libc::EAGAIN) if look % 3 < 2 => return Err(libc::EBADMSG),
            Err(libc::EAGAIN) if std::time::Instant::now() < until => {}
            r => return r.map(|n| n as u64),
        }
    }
    Ok(0)
}

/// See [`Cx::full`].
pub const PIECE: usize = 100;

/// What a check works with.
pub struct Cx {
    /// The check's own end.
    pub fd: RawFd,
    ctl: RawFd,
    /// Bytes sent so far.
    pub tx: u64,
    /// Bytes received so far.
    pub rx: u64,
    open: usize,
    /// The connection must leave TCP.
    pub ring: bool,
    /// Where the connection's ends are.
    pub hosts: Hosts,
}

impl Cx {
    /// Connects (or, with `accept`, accepts) and warms up. With `ring`, goes on until the bytes
    /// have left TCP.
    pub fn new(ctl: RawFd, hosts: Hosts, accept: bool, ring: bool) -> Result<Cx, Why> {
        let mut cx = Cx { fd: -1, ctl, tx: 0, rx: 0, open: 0, ring, hosts };
        if accept {
            let (l, port) = sys::listen_at(hosts.check, 0, 8)?;
            let [high, low] = words(hosts.check);
            cx.post(Op::Connect, port as u64, high, low)?;
            cx.fd = sys::accept(l, libc::SOCK_CLOEXEC)?;
            cx.wait()?;
            sys::close(l)?;
        } else {
            let port = cx.expect()?;
            cx.fd = cx.connect(port)?;
            cx.wait()?;
        }
        cx.leave_tcp()?;
        Ok(cx)
    }

    /// Warms up; with `--ring`, until the bytes have left TCP.
    pub fn leave_tcp(&mut self) -> Res {
        self.warm(80, 12)?;
        if !self.ring {
            return Ok(());
        }
        for i in 0..400 {
            let before = sys::tcp_bytes(self.fd)?;
            self.warm(4, 0)?;
            if sys::tcp_bytes(self.fd)? == before {
                return Ok(());
            }
            util::pause_ms(if i % 10 == 9 { 20 } else { 1 });
        }
        Err(Why("the connection never left TCP".into()))
    }

    /// Has the puppet listen, and accept one connection: the port.
    pub fn expect(&mut self) -> Result<u16, Why> {
        let [high, low] = words(self.hosts.puppet);
        let port = self.tell(Op::Listen, high, low, 0)?;
        self.post(Op::Accept, 0, 0, 0)?;
        Ok(port as u16)
    }

    /// Connects to a port of the puppet's.
    pub fn connect(&self, port: u16) -> R<RawFd> {
        sys::connect_at(self.hosts.puppet, port, |_| Ok(()))
    }

    /// Whether its connection must leave TCP.
    pub fn is_to_leave(&self) -> bool {
        self.ring
    }

    /// The same puppet with a new connection, which is not warmed up.
    pub fn renew(&mut self) -> Res {
        sys::close(self.fd)?;
        self.tell(Op::Close, 0, 0, 0)?;
        self.tell(Op::Restart, 0, 0, 0)?;
        let port = self.expect()?;
        self.fd = self.connect(port)?;
        self.wait()?;
        (self.tx, self.rx) = (0, 0);
        Ok(())
    }

    /// Exchanges `n` small messages both ways with `pauses` pauses of 5 ms.
    pub fn warm(&mut self, n: u64, pauses: u64) -> Res {
        self.post(Op::Echo, n, 16, 0)?;
        for i in 0..n {
            if pauses > 0 && i % (n / pauses).max(1) == 0 {
                util::pause_ms(5);
            }
            self.send(16)?;
            if i % 3 == 0 {
                sys::wait1(self.fd, libc::POLLIN, 5000)?;
            }
            self.recv(16)?;
        }
        self.wait()?;
        Ok(())
    }

    /// Tells the puppet to do something, without waiting for it.
    pub fn post(&mut self, op: Op, a: u64, b: u64, c: u64) -> Res {
        put(self.ctl, [op as u64, a, b, c])?;
        self.open += 1;
        Ok(())
    }

    /// Whether the puppet has answered already.
    pub fn has_answer(&self) -> Result<bool, Why> {
        Ok(sys::poll1(self.ctl, libc::POLLIN, 0)? != 0)
    }

    /// Waits for the puppet to do what it was told first: its answer.
    pub fn answer(&mut self) -> Result<R<u64>, Why> {
        assert!(self.open > 0, "nothing was asked");
        let [v, tag, _, _] = get(self.ctl)?;
        self.open -= 1;
        match tag {
            DONE => Ok(Ok(v)),
            FAILED => Ok(Err(v as i32)),
            _ => Err(Why(format!("the peer process ended with status {v}"))),
        }
    }

    /// Waits for the end of a puppet that is in another machine: its status.
    pub fn far_status(&mut self) -> Result<i32, Why> {
        match get(self.ctl)? {
            [status, ENDED, _, _] => Ok(status as i32),
            other => Err(Why(format!("the peer process says {other:?}, not how it ended"))),
        }
    }

    /// Waits for everything that the puppet was told: the last answer.
    #[track_caller]
    pub fn wait(&mut self) -> Result<u64, Why> {
        let at = std::panic::Location::caller().line();
        let mut last = 0;
        while self.open > 0 {
            last = match self.answer()? {
                Ok(v) => v,
                Err(WRONG) => return Err(Why(format!("the peer received wrong bytes (line {at})"))),
                Err(e) => return Err(Why(format!("the peer: {} (line {at})", sys::strerror(e)))),
            };
        }
        Ok(last)
    }

    /// Tells the puppet to do something and waits for it.
    #[track_caller]
    pub fn tell(&mut self, op: Op, a: u64, b: u64, c: u64) -> Result<u64, Why> {
        self.post(op, a, b, c)?;
        self.wait()
    }

    /// Tells the puppet to sleep and then to send.
    pub fn later(&mut self, ms: u64, n: u64) -> Res {
        self.post(Op::Sleep, ms * 1000, 0, 0)?;
        self.post(Op::Send, n, 0, 0)
    }

    /// The next `n` bytes to send; counts them as sent.
    pub fn out(&mut self, n: usize) -> Vec<u8> {
        let b = prng::bytes(OUT, self.tx, n);
        self.tx += n as u64;
        b
    }

    /// Sends `n` bytes.
    pub fn send(&mut self, n: usize) -> R<()> {
        let b = self.out(n);
        sys::write_all(self.fd, &b)
    }

    /// Sends until `EAGAIN` for a call of `each` bytes; returns how many bytes were taken.
    pub fn fill(&mut self, each: usize) -> Result<usize, Why> {
        // A full connection that moves finds the room of megabytes: byte by byte that would take too long.
        const MUCH: usize = 64 << 10;
        let (mut n, mut size, mut calls) = (0, each, 0);
        for _ in 0..10_000_000 {
            let b = prng::bytes(OUT, self.tx, size);
            match sys::send(self.fd, &b, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) {
                Ok(k) => {
                    n += k;
                    self.tx += k as u64;
                    calls += 1;
                    if calls > MUCH / each {
                        size = MUCH.max(each);
                    }
                }
                Err(libc::EAGAIN) if size == each => return Ok(n),
                Err(libc::EAGAIN) => (size, calls) = (each, 0),
                Err(e) => return Err(Why(format!("filling: {}", sys::strerror(e)))),
            }
        }
        Err(Why("the buffer never became full".into()))
    }

    /// Has `f` wait in a send of the stream's next [`PIECE`] bytes, in a connection that is full. It says how many were taken,
    /// or `None` if it did wait: buffers grow by themselves, and what finds room says nothing of waiting. Returns how many
    /// bytes were taken.
    pub fn full(&mut self, mut f: impl FnMut(&mut Cx, &[u8]) -> Result<Option<usize>, Why>) -> Result<u64, Why> {
        // Little, so that it is soon full.
        sys::setsockopt(self.fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 20_000i32)?;
        let (mut n, mut quiet) = (0, 0);
        for _ in 0..200 {
            // A receiver's kernel that had no room finds some when the sender's tries again, later and later.
            // (Large pieces first: of single bytes a socket holds few that are not acknowledged yet, whatever room there is.)
            let more = self.fill(4096)? as u64 + self.fill(1)? as u64;
            n += more;
            quiet = if more == 0 { quiet + 1 } else { 0 };
            util::pause_ms(50);
            if quiet < 12 {
                continue;
            }
            let b = prng::bytes(OUT, self.tx, PIECE);
            let Some(k) = f(self, &b)? else { return Ok(n) };
            self.tx += k as u64;
            n += k as u64;
            quiet = 0;
        }
        Err(Why("there was always room".into()))
    }

    /// Checks received bytes and counts them.
    #[track_caller]
    pub fn take(&mut self, b: &[u8]) -> Res {
        self.look(0, b)?;
        self.rx += b.len() as u64;
        Ok(())
    }

    /// Checks bytes that lie `ahead` of those received so far, without counting them.
    #[track_caller]
    pub fn look(&self, ahead: u64, b: &[u8]) -> Res {
        let at = std::panic::Location::caller().line();
        prng::verify(IN, self.rx + ahead, b).map_err(|e| Why(format!("{e} (line {at})")))
    }

    /// Receives exactly `n` bytes and checks them.
    #[track_caller]
    pub fn recv(&mut self, n: usize) -> Res {
        let at = std::panic::Location::caller().line();
        let mut b = vec![0; n];
        let got = sys::read_exact(self.fd, &mut b);
        got.map_err(|e| Why(format!("receiving {n} bytes: {} (line {at})", sys::strerror(e))))?;
        self.take(&b)
    }

    /// Receives what is there (at most `n`) without waiting.
    pub fn grab(&mut self, n: usize) -> R<Vec<u8>> {
        let mut b = vec![0; n];
        let k = sys::recv(self.fd, &mut b, libc::MSG_DONTWAIT)?;
        b.truncate(k);
        Ok(b)
    }

    /// Waits until `n` bytes can be read, at most two seconds.
    pub fn arrive(&mut self, n: usize) -> Res {
        for _ in 0..2000 {
            if sys::fionread(self.fd)? >= n {
                return Ok(());
            }
            util::pause_ms(1);
        }
        Err(Why(format!("{n} bytes never arrived: FIONREAD {}", sys::fionread(self.fd)?)))
    }

    /// The same streams, seen by another thread or through another fd.
    pub fn with_fd(&self, fd: RawFd) -> Cx {
        Cx { fd, ctl: -1, tx: self.tx, rx: self.rx, open: 0, ring: false, hosts: self.hosts }
    }
}
