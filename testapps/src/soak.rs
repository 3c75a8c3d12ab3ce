//! Both directions at the same time, in every style of reading, writing and waiting; every byte
//! verified at both ends, then the ends of the streams.

use crate::args::{die, Args};
use crate::prng::{self, Rng};
use crate::waiter::{Mode, Waiter};
use crate::{sys, util};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// Who may shut down its writing side first.
#[derive(Clone, Copy, PartialEq)]
enum Close {
    /// Each end as soon as it has written all.
    Any,
    /// This end waits until it has read the other's end of stream.
    Last,
}

/// What one end of a connection does.
#[derive(Clone)]
struct Plan {
    /// Streams written and read.
    wr_seed: u64,
    rd_seed: u64,
    /// Bytes to write and to read.
    wr_bytes: u64,
    rd_bytes: u64,
    max_op: usize,
    mode: Mode,
    threads: bool,
    close: Close,
    /// The peer may die at any moment: a reset or an early end is then a good end.
    expect_death: bool,
}

/// How it ended.
#[derive(Debug, PartialEq)]
enum End {
    /// All bytes, then the end of the stream.
    Whole,
    /// The peer went away first: an errno, or 0 for an end of stream.
    Death(i32),
}

/// One direction's progress.
struct Reader {
    at: u64,
    eof: bool,
    rng: Rng,
    buf: Vec<u8>,
    peek: Vec<u8>,
}

struct Writer {
    at: u64,
    shut: bool,
    rng: Rng,
    buf: Vec<u8>,
}

/// What one operation brought.
enum Step {
    Moved,
    Again,
    Gone(i32),
}

impl Reader {
    fn new(p: &Plan) -> Reader {
        Reader { at: 0, eof: false, rng: Rng::new(p.rd_seed ^ 0x11), buf: vec![0; p.max_op], peek: vec![0; p.max_op] }
    }

    /// One read in a style drawn by lot.
    fn step(&mut self, fd: RawFd, p: &Plan) -> Result<Step, String> {
        let n = self.rng.log_uniform(1, p.max_op);
        let parts = 1 + self.rng.below(4) as usize;
        let b = &mut self.buf[..n];
        let blocking = p.mode == Mode::Blocking;
        let r = match self.rng.below(10) {
            0 | 1 => sys::read(fd, b),
            2 => sys::recv(fd, b, 0),
            3 => sys::recvfrom(fd, b, 0),
            4 => sys::readv(fd, b, parts),
            5 => sys::recvmsg(fd, b, parts, 0).map(|x| x.0),
            6 => {
                // A look first: the bytes must be there again, and the same.
                match sys::recv(fd, &mut self.peek[..n], libc::MSG_PEEK) {
                    Ok(k) if k > 0 => {
                        let r = sys::recv(fd, &mut b[..k], 0);
                        if r != Ok(k) {
                            return Err(format!("peeked {k} bytes at {}, then recv gave {r:?}", self.at));
                        }
                        if b[..k] != self.peek[..k] {
                            return Err(format!("peek and recv differ at {}", self.at));
                        }
                        r
                    }
                    r => r,
                }
            }
            7 if blocking => {
                let left = (p.rd_bytes - self.at).min(n as u64) as usize;
                let b = if left > 0 { &mut b[..left] } else { b };
                match sys::recv(fd, b, libc::MSG_WAITALL) {
                    Ok(k) if left > 0 && k != left && !p.expect_death => {
                        return Err(format!("MSG_WAITALL gave {k} of {left} at {}", self.at));
                    }
                    r => r,
                }
            }
            8 => match sys::recv(fd, b, libc::MSG_DONTWAIT) {
                Err(libc::EAGAIN) if blocking => match sys::wait1(fd, libc::POLLIN, 5000) {
                    Ok(_) => return Ok(Step::Moved),
                    Err(e) => Err(e),
                },
                r => r,
            },
            9 => match sys::fionread(fd) {
                Ok(k) if k > 0 => {
                    let want = k.min(n);
                    let r = sys::recv(fd, &mut b[..want], libc::MSG_DONTWAIT);
                    if r != Ok(want) && !p.expect_death {
                        return Err(format!("FIONREAD said {k}, recv of {want} gave {r:?}"));
                    }
                    r
                }
                _ => sys::read(fd, b),
            },
            _ => sys::read(fd, b),
        };
        match r {
            Ok(0) => {
                self.eof = true;
                if self.at == p.rd_bytes {
                    Ok(Step::Moved)
                } else if p.expect_death {
                    Ok(Step::Gone(0))
                } else {
                    Err(format!("end of the stream at {} of {}", self.at, p.rd_bytes))
                }
            }
            Ok(k) => {
                if self.at + k as u64 > p.rd_bytes {
                    return Err(format!("{k} bytes at {}: more than {} were sent", self.at, p.rd_bytes));
                }
                prng::verify(p.rd_seed, self.at, &self.buf[..k])?;
                self.at += k as u64;
                Ok(Step::Moved)
            }
            Err(libc::EAGAIN) if blocking => Err(format!("EAGAIN from a blocking read at {}", self.at)),
            Err(libc::EAGAIN) => Ok(Step::Again),
            Err(libc::EINTR) => Ok(Step::Moved),
            Err(e) if p.expect_death && util::is_death(e) => Ok(Step::Gone(e)),
            Err(e) => Err(format!("read at {}: {}", self.at, sys::strerror(e))),
        }
    }
}

impl Writer {
    fn new(p: &Plan) -> Writer {
        Writer { at: 0, shut: false, rng: Rng::new(p.wr_seed ^ 0x22), buf: vec![0; p.max_op] }
    }

    /// One write in a style drawn by lot; shuts the direction down after the last byte.
    fn step(&mut self, fd: RawFd, p: &Plan, read_all: bool) -> Result<Step, String> {
        let left = p.wr_bytes - self.at;
        if left == 0 {
            if p.close == Close::Any || read_all {
                match sys::shutdown(fd, libc::SHUT_WR) {
                    Ok(()) => self.shut = true,
                    Err(libc::ENOTCONN) if p.expect_death => return Ok(Step::Gone(libc::EPIPE)),
                    Err(e) => return Err(format!("shutdown: {}", sys::strerror(e))),
                }
                return Ok(Step::Moved);
            }
            return Ok(Step::Again);
        }
        let n = (self.rng.log_uniform(1, p.max_op) as u64).min(left) as usize;
        let parts = 1 + self.rng.below(5) as usize;
        let b = &mut self.buf[..n];
        prng::fill(p.wr_seed, self.at, b);
        let blocking = p.mode == Mode::Blocking;
        let r = match self.rng.below(7) {
            0 | 1 => sys::write(fd, b),
            2 => sys::send(fd, b, libc::MSG_NOSIGNAL),
            3 => sys::writev(fd, b, parts),
            4 => sys::sendmsg(fd, b, parts, libc::MSG_NOSIGNAL),
            5 => sys::sendto(fd, b, libc::MSG_NOSIGNAL),
            _ => match sys::send(fd, b, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) {
                Err(libc::EAGAIN) if blocking => match sys::wait1(fd, libc::POLLOUT, 5000) {
                    Ok(_) => return Ok(Step::Moved),
                    Err(e) => Err(e),
                },
                r => {
                    if let Ok(k) = r {
                        self.at += k as u64;
                        return Ok(Step::Moved);
                    }
                    r
                }
            },
        };
        match r {
            Ok(k) if k > n || k == 0 => Err(format!("a write of {n} bytes returned {k}")),
            Ok(k) if blocking && k != n && !p.expect_death => {
                Err(format!("a blocking write of {n} bytes returned {k}"))
            }
            Ok(k) => {
                self.at += k as u64;
                Ok(Step::Moved)
            }
            Err(libc::EAGAIN) if blocking => Err(format!("EAGAIN from a blocking write at {}", self.at)),
            Err(libc::EAGAIN) => Ok(Step::Again),
            Err(libc::EINTR) => Ok(Step::Moved),
            Err(e) if p.expect_death && util::is_death(e) => Ok(Step::Gone(e)),
            Err(e) => Err(format!("write at {}: {}", self.at, sys::strerror(e))),
        }
    }
}

/// Runs one or both directions until they have ended. `read_all` says across threads that the
/// reading side has seen its end of stream.
fn pump(fd: RawFd, p: &Plan, rd: bool, wr: bool, read_all: &AtomicBool, early: Option<Waiter>) -> Result<End, String> {
    let late = || Waiter::new(p.mode, fd).map_err(|e| format!("waiter: {}", sys::strerror(e)));
    let mut w = early.map_or_else(late, Ok)?;
    let (mut r, mut o) = (Reader::new(p), Writer::new(p));
    let mut nap = Rng::new(p.wr_seed ^ p.rd_seed ^ 0x33);
    // As a loop of edges does: one that only tries, and is never blocked, may not wait for its set until the end.
    let (mut can_read, mut can_write) = (!p.mode.keeps_flags(), !p.mode.keeps_flags());
    let mut moved_at = std::time::Instant::now();
    loop {
        let need_r = rd && !r.eof;
        let need_w = wr && !o.shut;
        if !need_r && !need_w {
            return Ok(End::Whole);
        }
        let mut moved = false;
        if need_r && can_read {
            match r.step(fd, p)? {
                Step::Moved => moved = true,
                Step::Again => can_read = false,
                Step::Gone(e) => return Ok(End::Death(e)),
            }
            if r.eof {
                read_all.store(true, Ordering::SeqCst);
            }
        }
        // All is written, but the shutdown has to wait for the other end's.
        let parked = need_w && o.at == p.wr_bytes && p.close == Close::Last && !read_all.load(Ordering::SeqCst);
        if need_w && can_write && !parked {
            match o.step(fd, p, read_all.load(Ordering::SeqCst))? {
                Step::Moved => moved = true,
                Step::Again => can_write = false,
                Step::Gone(e) => return Ok(End::Death(e)),
            }
        }
        if nap.below(400) == 0 {
            std::thread::sleep(std::time::Duration::from_micros(nap.below(1500)));
        }
        if p.mode == Mode::Blocking {
            if parked {
                util::pause_ms(1);
            }
            continue;
        }
        if parked && !rd {
            util::pause_ms(1);
            continue;
        }
        if moved && p.mode.keeps_flags() {
            continue;
        }
        let wait_w = need_w && !parked && !o.shut;
        if moved && !w.fresh_look() {
            continue;
        }
        match w.wait(need_r && !r.eof, wait_w, 1000) {
            Ok((i, x)) => {
                if p.mode.keeps_flags() {
                    can_read |= i;
                    can_write |= x;
                } else {
                    can_read = i;
                    can_write = x;
                }
                // By the clock: an edge of a direction that is done with is a wake-up too.
                if i || x {
                    moved_at = std::time::Instant::now();
                }
                if moved_at.elapsed().as_secs() >= 20 {
                    let (a, b, e) = (r.at, o.at, p.rd_bytes);
                    return Err(format!("nothing for 20 s: read {a} of {e}, wrote {b} of {}", p.wr_bytes));
                }
            }
            Err(libc::EINTR) => {}
            Err(e) => return Err(format!("wait: {}", sys::strerror(e))),
        }
    }
}

/// `early`: what waits for it, from before it was a connection. Threads have each their own.
fn run_conn(fd: RawFd, p: &Plan, early: Option<Waiter>) -> Result<End, String> {
    if p.mode != Mode::Blocking {
        sys::nonblock(fd, true).map_err(sys::strerror)?;
    }
    let read_all = Arc::new(AtomicBool::new(false));
    let end = if p.threads || p.mode == Mode::Blocking {
        let (p2, ra) = (p.clone(), read_all.clone());
        let t = std::thread::spawn(move || pump(fd, &p2, false, true, &ra, None));
        let a = pump(fd, p, true, false, &read_all, None);
        if a.is_err() || matches!(a, Ok(End::Death(_))) {
            read_all.store(true, Ordering::SeqCst);
            let _ = sys::shutdown(fd, libc::SHUT_RDWR);
        }
        let b = t.join().map_err(|_| "the writer panicked".to_string())?;
        match (a?, b) {
            (End::Whole, b) => b?,
            (d, _) => d,
        }
    } else {
        pump(fd, p, true, true, &read_all, early)?
    };
    sys::close(fd).map_err(|e| format!("close: {}", sys::strerror(e)))?;
    Ok(end)
}

fn plan(a: &Args, server: bool, i: u64) -> Plan {
    let seed = a.num("seed", 1).wrapping_mul(1000).wrapping_add(i);
    let (up, down) = (prng::mix(seed) | 1, prng::mix(!seed) & !1);
    let n = a.num("bytes", 4 << 20);
    let close = match (a.text("close", "any").as_str(), server) {
        ("any", _) | ("client-first", false) | ("server-first", true) => Close::Any,
        ("client-first", true) | ("server-first", false) => Close::Last,
        (x, _) => die(&format!("--close {x}: any, client-first or server-first")),
    };
    Plan {
        wr_seed: if server { down } else { up },
        rd_seed: if server { up } else { down },
        wr_bytes: n,
        rd_bytes: n,
        max_op: a.num("max-op", 1 << 20) as usize,
        mode: Mode::parse(&a.text(if server { "server-mode" } else { "mode" }, &a.text("mode", "blocking"))),
        threads: a.has("threads"),
        close,
        expect_death: a.has("expect-death"),
    }
}

/// Serves connections, each in a thread; the client says its number in the first 8 bytes.
fn serve(l: RawFd, a: &Args, limit: usize) -> Vec<Result<End, String>> {
    let mut threads = Vec::new();
    while threads.len() < limit || limit == 0 {
        let Some(fd) = util::accept_or_stop(l, 0, libc::SOCK_CLOEXEC) else { break };
        let mut b = [0u8; 8];
        if let Err(e) = sys::read_exact(fd, &mut b) {
            threads.push(std::thread::spawn(move || Ok(End::Death(e))));
            continue;
        }
        let p = plan(a, true, u64::from_le_bytes(b));
        threads.push(std::thread::spawn(move || run_conn(fd, &p, None)));
        util::say(&format!("serving {}", threads.len()));
    }
    threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("panic".into()))).collect()
}

fn clients(port: u16, a: &Args) -> Vec<Result<End, String>> {
    let n = a.num("conns", 1);
    let threads: Vec<_> = (0..n)
        .map(|i| {
            let (p, is_early) = (plan(a, false, i), a.has("early"));
            std::thread::spawn(move || {
                let mut early = None;
                let wait = |fd| match is_early {
                    true => Waiter::new(p.mode, fd).map(|w| early = Some(w)),
                    false => Ok(()),
                };
                let fd = sys::connect_as(port, wait).map_err(|e| format!("connect: {}", sys::strerror(e)))?;
                sys::write_all(fd, &i.to_le_bytes()).map_err(sys::strerror)?;
                run_conn(fd, &p, early)
            })
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("panic".into()))).collect()
}

fn verdict(who: &str, ends: Vec<Result<End, String>>) -> i32 {
    let mut bad = 0;
    for (i, e) in ends.iter().enumerate() {
        match e {
            Ok(End::Whole) => println!("OK {who} {i} whole"),
            Ok(End::Death(0)) => println!("OK {who} {i} death eof"),
            Ok(End::Death(n)) => println!("OK {who} {i} death errno={n}"),
            Err(x) => {
                println!("BAD {who} {i}: {x}");
                bad = 1;
            }
        }
    }
    bad
}

/// `soak-server [--port P] [--conns N] ...`, the options of the client with it.
pub fn server(a: &Args) -> i32 {
    util::install_term();
    sys::sigaction(libc::SIGPIPE, noop, 0).expect("sigaction");
    util::watchdog(a.num("limit-s", 300));
    let l = util::announce(a.num("port", 0) as u16);
    verdict("server", serve(l, a, a.num("conns", 1) as usize))
}

/// `soak-client --port P [--conns N] [--bytes B] [--seed S] [--mode M] [--server-mode M]
/// [--threads] [--close any|client-first|server-first] [--max-op B] [--expect-death]`.
pub fn client(a: &Args) -> i32 {
    sys::sigaction(libc::SIGPIPE, noop, 0).expect("sigaction");
    util::watchdog(a.num("limit-s", 300));
    verdict("client", clients(a.num("port", 0) as u16, a))
}

/// `soak [--both-in-one-process] ...`: server and client in two processes, or in one.
pub fn soak(a: &Args) -> i32 {
    if a.has("both-in-one-process") {
        return both(a);
    }
    let (r, w) = sys::pipe().expect("pipe");
    let pid = sys::fork().expect("fork");
    sys::sigaction(libc::SIGPIPE, noop, 0).expect("sigaction");
    util::watchdog(a.num("limit-s", 300));
    if pid == 0 {
        let _ = sys::close(r);
        let (l, port) = sys::listen(0, 1024).expect("listen");
        sys::write(w, &port.to_le_bytes()).expect("port to the parent");
        let _ = sys::close(w);
        sys::exit(verdict("server", serve(l, a, a.num("conns", 1) as usize)));
    }
    let _ = sys::close(w);
    let mut b = [0; 2];
    sys::read_exact(r, &mut b).expect("port from the child");
    let _ = sys::close(r);
    let bad = verdict("client", clients(u16::from_le_bytes(b), a));
    // The server's watchdog bounds this wait.
    let st = sys::waitpid(pid).expect("waitpid");
    if st != 0 {
        println!("BAD the server ended with status {st}");
    }
    bad | (st != 0) as i32
}

/// Both ends in this process (`soak-self`).
pub fn both(a: &Args) -> i32 {
    sys::sigaction(libc::SIGPIPE, noop, 0).expect("sigaction");
    util::watchdog(a.num("limit-s", 300));
    let (l, port) = sys::listen(0, 1024).expect("listen");
    let (s, c) = std::thread::scope(|sc| {
        let s = sc.spawn(|| serve(l, a, a.num("conns", 1) as usize));
        let c = clients(port, a);
        (s.join().expect("server"), c)
    });
    verdict("server", s) | verdict("client", c)
}

extern "C" fn noop(_: i32) {}
