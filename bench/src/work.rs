//! The measured programs: a server and a client over plain sockets, which know nothing of
//! ringsock, and loops of calls on fds that are never accelerated.

use crate::sock;
use serde_json::{json, Value};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// What is measured; the same words go to server and client.
#[derive(Clone, Debug)]
pub struct Job {
    /// `pingpong`, `epoll`, `counted`, `counted-stream`, `stream`, `setup`, `setup-one` (both ends on one processor) or
    /// `call`; those of `raw-` and `send-` are done
    /// by RDMA alone.
    pub kind: String,
    /// Bytes of a message.
    pub size: usize,
    /// Messages, round trips, connections or calls that are measured.
    pub count: usize,
    /// Round trips before that; then 100 ms of them with pauses.
    pub warm: usize,
}

impl Job {
    /// As words of a command line.
    pub fn words(&self) -> Vec<String> {
        vec![self.kind.clone(), self.size.to_string(), self.count.to_string(), self.warm.to_string()]
    }

    /// Whether connections are what is counted.
    fn is_setup(&self) -> bool {
        self.kind.starts_with("setup")
    }

    /// Whether no sockets are used.
    fn is_raw(&self) -> bool {
        self.kind.starts_with("raw-") || self.kind.starts_with("send-")
    }

    /// From words of a command line.
    pub fn parse(w: &[String]) -> Option<Job> {
        let n = |i: usize| w.get(i)?.parse().ok();
        Some(Job { kind: w.first()?.clone(), size: n(1)?, count: n(2)?, warm: n(3)? })
    }
}

/// CPU seconds (user and system) that this process has used.
fn cpu() -> f64 {
    used().iter().sum()
}

/// CPU seconds that this process has used in user space, and in the kernel.
fn used() -> [f64; 2] {
    // SAFETY: all-zero is a valid rusage and the pointer is valid.
    let u: libc::rusage = unsafe {
        let mut u = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut u);
        u
    };
    [u.ru_utime, u.ru_stime].map(|t| t.tv_sec as f64 + t.tv_usec as f64 / 1e6)
}

/// An epoll set with one fd, level-triggered.
struct Epoll(RawFd);

impl Epoll {
    fn new(fd: RawFd) -> io::Result<Epoll> {
        // SAFETY: no pointers.
        let ep = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        let mut e = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        // SAFETY: one event, valid for the call.
        if ep < 0 || unsafe { libc::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, &mut e) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Epoll(ep))
    }

    fn wait(&self) -> io::Result<()> {
        let mut e = [libc::epoll_event { events: 0, u64: 0 }; 8];
        // SAFETY: the array is valid for writes of its length.
        if unsafe { libc::epoll_wait(self.0, e.as_mut_ptr(), 8, 20_000) } <= 0 {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "epoll_wait"));
        }
        Ok(())
    }
}

/// One end that exchanges messages, blocking or by epoll.
struct End {
    s: TcpStream,
    ep: Option<Epoll>,
}

impl End {
    fn new(s: TcpStream, epoll: bool) -> io::Result<End> {
        s.set_nodelay(true)?;
        let mut ep = None;
        if epoll {
            s.set_nonblocking(true)?;
            ep = Some(Epoll::new(s.as_raw_fd())?);
        }
        Ok(End { s, ep })
    }

    fn recv(&mut self, b: &mut [u8]) -> io::Result<()> {
        let Some(ep) = &self.ep else { return self.s.read_exact(b) };
        let mut at = 0;
        while at < b.len() {
            ep.wait()?;
            match self.s.read(&mut b[at..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn trip(&mut self, b: &mut [u8]) -> io::Result<()> {
        self.s.write_all(b)?;
        self.recv(b)
    }

    fn echo(&mut self, b: &mut [u8]) -> io::Result<()> {
        self.recv(b)?;
        self.s.write_all(b)
    }
}

/// Round trips of the warm-up that have a pause of 5 ms before them: more under valgrind, where the library takes seconds
/// to be ready.
fn pauses(j: &Job) -> usize {
    if j.kind.starts_with("counted") {
        1000
    } else {
        20
    }
}

/// Warms a connection up from the client's side; [`warm_up_server`] is the other.
fn warm_up(e: &mut End, j: &Job) -> io::Result<()> {
    let mut b = vec![7; j.size.min(1024)];
    for i in 0..j.warm + pauses(j) {
        if i >= j.warm {
            std::thread::sleep(Duration::from_millis(5));
        }
        e.trip(&mut b)?;
    }
    Ok(())
}

fn warm_up_server(e: &mut End, j: &Job) -> io::Result<()> {
    let mut b = vec![0; j.size.min(1024)];
    (0..j.warm + pauses(j)).try_for_each(|_| e.echo(&mut b))
}

/// The server at an address: says its port on standard output, serves the job, says its CPU time.
pub fn serve(j: &Job, host: &str) -> io::Result<()> {
    if j.is_raw() {
        return crate::verbs::serve(j);
    }
    let l = sock::listen(host)?;
    println!("{}", l.local_addr()?.port());
    io::stdout().flush()?;
    let epoll = j.kind == "epoll";
    let mut b = vec![0; j.size.max(64 << 10)];
    let mut start = used();
    if j.is_setup() {
        pin(j)?;
        for i in 0..j.count + j.warm {
            if i == j.warm {
                start = used();
            }
            let mut e = End::new(sock::accept(&l)?, false)?;
            e.echo(&mut b[..j.size])?;
            // The client closes first, so that its side keeps the time-wait state.
            let _ = e.s.read(&mut b[..1])?;
        }
    } else {
        let mut e = End::new(sock::accept(&l)?, epoll)?;
        warm_up_server(&mut e, j)?;
        start = used();
        let whole = j.size * j.count;
        if j.kind == "stream" {
            let n = take_all(&mut e.s, &mut b, whole)?;
            e.s.write_all(&(n as u64).to_ne_bytes())?;
        } else if j.kind == "counted-stream" {
            take_all(&mut e.s, &mut b, whole)?;
            b[..j.size].fill(3);
            (0..j.count).try_for_each(|_| e.s.write_all(&b[..j.size]))?;
        } else {
            for _ in 0..j.count {
                e.echo(&mut b[..j.size])?;
            }
        }
        let _ = e.s.read(&mut b);
    }
    let user = used()[0] - start[0];
    println!("{}", json!({ "cpu": cpu() - start.iter().sum::<f64>(), "user": user }));
    Ok(())
}

/// Reads until there were `want` bytes.
fn take_all(s: &mut TcpStream, b: &mut [u8], want: usize) -> io::Result<usize> {
    let mut n = 0;
    while n < want {
        match s.read(b)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            k => n += k,
        }
    }
    Ok(n)
}

/// The client: does the job and says what it measured.
pub fn client(j: &Job, at: (&str, u16)) -> io::Result<()> {
    let v = match j.kind.as_str() {
        _ if j.is_setup() => setup(j, at)?,
        "stream" => stream(j, at)?,
        "counted" | "counted-stream" => counted(j, at)?,
        _ if j.is_raw() => crate::verbs::client(j, at.1)?,
        _ => pingpong(j, at)?,
    };
    println!("{v}");
    Ok(())
}

/// Median and 99th percentile in microseconds.
pub(crate) fn percentiles(mut ns: Vec<u64>) -> (f64, f64) {
    ns.sort_unstable();
    let at = |q: f64| ns[((ns.len() - 1) as f64 * q) as usize] as f64 / 1000.0;
    (at(0.5), at(0.99))
}

fn pingpong(j: &Job, at: (&str, u16)) -> io::Result<Value> {
    let mut e = End::new(sock::connect(at)?, j.kind == "epoll")?;
    warm_up(&mut e, j)?;
    let (mut b, mut ns) = (vec![3; j.size], Vec::with_capacity(j.count));
    let (start, begun) = (cpu(), Instant::now());
    for _ in 0..j.count {
        let t = Instant::now();
        e.trip(&mut b)?;
        ns.push(t.elapsed().as_nanos() as u64);
    }
    let (used, took) = (cpu() - start, begun.elapsed().as_secs_f64());
    if b.iter().any(|&x| x != 3) {
        return Err(io::Error::other("other bytes came back"));
    }
    let (median, p99) = percentiles(ns);
    Ok(json!({ "median": median, "p99": p99, "rate": j.count as f64 / took, "cpu": used, "messages": 2 * j.count }))
}

/// Messages by functions of their own, in which callgrind counts instructions, [`COUNTED`]: exchanged one by one, or all of
/// them sent and then as many received.
fn counted(j: &Job, at: (&str, u16)) -> io::Result<Value> {
    let mut e = End::new(sock::connect(at)?, false)?;
    warm_up(&mut e, j)?;
    let (mut b, fd) = (vec![3; j.size], e.s.as_raw_fd());
    let rounds = if j.kind == "counted" { vec![1; j.count] } else { vec![j.count] };
    for n in rounds {
        for _ in 0..n {
            if counted_send(fd, &b) != j.size as isize {
                return Err(io::Error::last_os_error());
            }
        }
        let mut left = n * j.size;
        while left > 0 {
            let most = left.min(j.size);
            match counted_recv(fd, &mut b[..most]) {
                n @ 1.. => left -= n as usize,
                _ => return Err(io::Error::last_os_error()),
            }
        }
    }
    if b.iter().any(|&x| x != 3) {
        return Err(io::Error::other("other bytes came back"));
    }
    Ok(json!({ "cpu": 0, "messages": 2 * j.count }))
}

/// What callgrind calls the functions that send and receive one message of a `counted` job.
pub const COUNTED: [&str; 2] = ["ringsock_bench::work::counted_send", "ringsock_bench::work::counted_recv"];

#[inline(never)]
fn counted_send(fd: RawFd, b: &[u8]) -> isize {
    // SAFETY: the buffer is readable for its length.
    std::hint::black_box(unsafe { libc::send(fd, b.as_ptr().cast(), b.len(), 0) })
}

#[inline(never)]
fn counted_recv(fd: RawFd, b: &mut [u8]) -> isize {
    // SAFETY: the buffer is writable for its length.
    std::hint::black_box(unsafe { libc::recv(fd, b.as_mut_ptr().cast(), b.len(), 0) })
}

fn stream(j: &Job, at: (&str, u16)) -> io::Result<Value> {
    let mut e = End::new(sock::connect(at)?, false)?;
    warm_up(&mut e, j)?;
    let b = vec![5; j.size];
    let (start, t) = (used(), Instant::now());
    for _ in 0..j.count {
        e.s.write_all(&b)?;
    }
    let mut n = [0; 8];
    e.s.read_exact(&mut n)?;
    let secs = t.elapsed().as_secs_f64();
    let (cpu, user) = (cpu() - start.iter().sum::<f64>(), used()[0] - start[0]);
    if u64::from_ne_bytes(n) != (j.size * j.count) as u64 {
        return Err(io::Error::other("the server counted other bytes"));
    }
    let rate = j.count as f64 / secs;
    Ok(json!({
        "rate": rate, "bytes": rate * j.size as f64 / 1e6, "cpu": cpu, "user": user, "messages": j.count,
    }))
}

/// A job for one processor stays on the first that the process may use: where the scheduler puts two processes that wait
/// for each other differs from run to run, and moves the time of a connection more than a library does.
fn pin(j: &Job) -> io::Result<()> {
    if j.kind != "setup-one" {
        return Ok(());
    }
    let size = size_of::<libc::cpu_set_t>();
    // SAFETY: a set of processors is plain bits; all indices are below its size.
    let r = unsafe {
        let (mut all, mut one): (libc::cpu_set_t, libc::cpu_set_t) = (std::mem::zeroed(), std::mem::zeroed());
        if libc::sched_getaffinity(0, size, &mut all) != 0 {
            return Err(io::Error::last_os_error());
        }
        let first = (0..size * 8).find(|&i| libc::CPU_ISSET(i, &all));
        libc::CPU_SET(first.unwrap_or(0), &mut one);
        libc::sched_setaffinity(0, size, &one)
    };
    match r {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn setup(j: &Job, at: (&str, u16)) -> io::Result<Value> {
    pin(j)?;
    let (mut b, mut ns) = (vec![1; j.size], Vec::with_capacity(j.count));
    let (mut start, mut t0) = (cpu(), Instant::now());
    for i in 0..j.warm + j.count {
        if i == j.warm {
            (start, t0) = (cpu(), Instant::now());
        }
        let t = Instant::now();
        let mut e = End::new(sock::connect(at)?, false)?;
        e.trip(&mut b)?;
        e.s.shutdown(Shutdown::Write)?;
        drop(e);
        if i >= j.warm {
            ns.push(t.elapsed().as_nanos() as u64);
        }
    }
    let rate = j.count as f64 / t0.elapsed().as_secs_f64();
    ns.sort_unstable();
    let best = ns[ns.len() / 10] as f64 / 1000.0;
    let (median, p99) = percentiles(ns);
    let used = cpu() - start;
    Ok(json!({ "rate": rate, "best": best, "median": median, "p99": p99, "cpu": used, "messages": j.count }))
}

/// Nanoseconds of one call on fds that are never accelerated.
pub fn calls(j: &Job) -> io::Result<()> {
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
    let zero = std::fs::File::open("/dev/zero")?;
    let (a, b) = std::os::unix::net::UnixStream::pair()?;
    let mut x = [0u8; 1];
    let p = x.as_mut_ptr() as *mut libc::c_void;
    let (null, zero) = (null.as_raw_fd(), zero.as_raw_fd());
    let (a, b) = (a.as_raw_fd(), b.as_raw_fd());
    let time = |f: &mut dyn FnMut() -> isize| -> io::Result<f64> {
        let t = Instant::now();
        for _ in 0..j.count {
            if f() < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(t.elapsed().as_nanos() as f64 / j.count as f64)
    };
    // SAFETY: one byte, valid for reads.
    let write = time(&mut || unsafe { libc::write(null, p, 1) })?;
    // SAFETY: one byte, valid for writes.
    let read = time(&mut || unsafe { libc::read(zero, p, 1) })?;
    // SAFETY: one byte, valid for reads and writes.
    let pair = time(&mut || unsafe { libc::send(a, p, 1, 0).min(libc::recv(b, p, 1, 0)) })?;
    let mut pfd = libc::pollfd { fd: a, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, valid for the call.
    let poll = time(&mut || unsafe { libc::poll(&mut pfd, 1, 0) as isize })?;
    let ep = Epoll::new(a)?;
    let mut e = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: one event, valid for writes.
    let epoll = time(&mut || unsafe { libc::epoll_wait(ep.0, &mut e, 1, 0) as isize })?;
    let v = json!({ "write": write, "read": read, "pair": pair / 2.0, "poll": poll, "epoll": epoll });
    println!("{v}");
    Ok(())
}

/// Runs `@serve JOB [HOST]`, `@client JOB PORT [HOST]` or `@call JOB`; the exit status.
pub fn child(words: &[String]) -> i32 {
    let Some(job) = Job::parse(&words[1..]) else {
        eprintln!("{} needs a job", words[0]);
        return 2;
    };
    let host = |i: usize| words.get(i).map_or("127.0.0.1", String::as_str);
    let port = words.get(5).and_then(|w| w.parse().ok()).unwrap_or(0);
    let r = match words[0].as_str() {
        "@serve" => serve(&job, host(5)),
        "@client" => client(&job, (host(6), port)),
        _ => calls(&job),
    };
    if let Err(e) = r {
        eprintln!("{}: {e}", words[0]);
        return 1;
    }
    0
}
