//! What the workloads share: servers, timed phases, tallies, checked messages.

use crate::args::Args;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Bytes of a message that carry its number and its sum; no message is smaller.
pub const HEAD: usize = 16;

/// An error with a text of our own.
pub fn wrong<T>(text: impl Into<String>) -> io::Result<T> {
    Err(io::Error::other(text.into()))
}

/// A 64-bit sum of bytes that notices lost, doubled and exchanged words, at the speed of memory.
pub fn sum(b: &[u8]) -> u64 {
    let mut lanes = [1u64, 2, 3, 4];
    let mut chunks = b.chunks_exact(32);
    for c in &mut chunks {
        for (i, l) in lanes.iter_mut().enumerate() {
            let w = u64::from_le_bytes(c[i * 8..i * 8 + 8].try_into().expect("8 bytes"));
            // One to one in both: a single changed word always shows.
            *l = (*l ^ w).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        }
    }
    let mut s = lanes.iter().fold(b.len() as u64, |s, l| s.rotate_left(17) ^ l);
    for &x in chunks.remainder() {
        s = s.rotate_left(7).wrapping_add(u64::from(x));
    }
    s
}

/// Makes `m` message number `seq`: its head, and a body that differs from message to message.
pub fn seal(seq: u64, m: &mut [u8]) {
    let (head, body) = m.split_at_mut(HEAD);
    let n = body.len().min(8);
    body[..n].copy_from_slice(&seq.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[..n]);
    head[..8].copy_from_slice(&seq.to_le_bytes());
    head[8..].copy_from_slice(&sum(body).to_le_bytes());
}

/// Checks message number `seq`.
pub fn check(seq: u64, m: &[u8]) -> io::Result<()> {
    let (head, body) = m.split_at(HEAD);
    let got = u64::from_le_bytes(head[..8].try_into().expect("8 bytes"));
    if got != seq {
        return wrong(format!("message {seq} carries number {got}"));
    }
    if u64::from_le_bytes(head[8..].try_into().expect("8 bytes")) != sum(body) {
        return wrong(format!("message {seq}: other bytes than were sent"));
    }
    Ok(())
}

/// A message of a size, filled; [`seal`] makes it a numbered one.
pub fn message(size: usize) -> Vec<u8> {
    let size = size.max(HEAD);
    (0..size).map(|i| (i * 131 + i / 256) as u8).collect()
}

/// Listens where `--host` and `--port` say, prints `listening PORT`, and calls `serve` for each
/// connection in a thread of its own; SIGTERM ends the process in the ordinary way.
pub fn serve(a: &Args, serve: impl Fn(TcpStream) -> io::Result<()> + Send + Sync + 'static) -> io::Result<()> {
    serve_on(listen(a)?, serve)
}

/// The same at a listener.
pub fn serve_on(l: TcpListener, serve: impl Fn(TcpStream) -> io::Result<()> + Send + Sync + 'static) -> io::Result<()> {
    let serve = std::sync::Arc::new(serve);
    loop {
        let s = l.accept()?.0;
        s.set_nodelay(true)?;
        let serve = serve.clone();
        std::thread::spawn(move || {
            if let Err(e) = serve(s) {
                // A client that is gone is none of our business; wrong bytes are.
                if !is_end(&e) {
                    eprintln!("server: {e}");
                    std::process::exit(3);
                }
            }
        });
    }
}

/// Whether an error only says that the other end is gone.
pub fn is_end(e: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(e.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

/// The listener of a server, announced; SIGTERM ends the process from now on.
pub fn listen(a: &Args) -> io::Result<TcpListener> {
    end_by_sigterm();
    let l = TcpListener::bind((a.text("host", "127.0.0.1").as_str(), a.num("port", 0) as u16))?;
    println!("listening {}", l.local_addr()?.port());
    io::stdout().flush()?;
    Ok(l)
}

fn end_by_sigterm() {
    // SAFETY: plain signal sets; the mask is inherited by all threads, so that only ours takes the signal.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        std::thread::spawn(move || {
            let mut sig = 0;
            libc::sigwait(&set, &mut sig);
            std::process::exit(0);
        });
    }
}

/// Starts another server of a kind, which ends with the calling thread, with `words` besides its address; returns its port.
pub fn another(a: &Args, kind: &str, words: &[String]) -> io::Result<u16> {
    let all: Vec<String> = std::env::args().skip(1).collect();
    let at = all.iter().position(|w| w == kind).unwrap_or(0);
    let mut c = Command::new(std::env::current_exe()?);
    c.args(&all[..=at]).args(["--host", &a.text("host", "127.0.0.1"), "--follows"]).args(words);
    let mut child: Child = c.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?).read_line(&mut line)?;
    let pid = child.id() as i32;
    OTHERS.lock().unwrap_or_else(|e| e.into_inner()).push(pid);
    // SAFETY: the function ends children of ours.
    unsafe { libc::atexit(end_others) };
    line.trim().rsplit(' ').next().and_then(|p| p.parse().ok()).ok_or(io::ErrorKind::InvalidData.into())
}

static OTHERS: Mutex<Vec<i32>> = Mutex::new(Vec::new());

extern "C" fn end_others() {
    for pid in std::mem::take(&mut *OTHERS.lock().unwrap_or_else(|e| e.into_inner())) {
        // SAFETY: a child of ours that was not waited for.
        unsafe {
            libc::kill(pid, libc::SIGTERM);
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
    }
}

/// For a server that was started by [`another`]: it ends when that one is gone.
pub fn end_with_the_first(a: &Args) {
    if a.has("follows") {
        // SAFETY: no pointers.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
    }
}

/// A connection to the server, `TCP_NODELAY` set.
pub fn connect(a: &Args) -> io::Result<TcpStream> {
    connect_to(a, a.num("port", 0) as u16)
}

/// The same to another port of that host.
pub fn connect_to(a: &Args, port: u16) -> io::Result<TcpStream> {
    let s = TcpStream::connect((a.text("host", "127.0.0.1").as_str(), port))?;
    s.set_nodelay(true)?;
    // Nothing here waits that long unless something is lost.
    s.set_read_timeout(Some(Duration::from_secs(30)))?;
    Ok(s)
}

/// A connection on which `greet` succeeds: real servers listen before they serve, and close what comes until then, or
/// never answer it.
pub fn greeted<T>(a: &Args, mut greet: impl FnMut(&mut TcpStream) -> io::Result<T>) -> io::Result<(TcpStream, T)> {
    use io::ErrorKind::{TimedOut, WouldBlock};
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let mut s = connect(a)?;
        let usual = s.read_timeout()?;
        s.set_read_timeout(Some(Duration::from_secs(2)))?;
        match greet(&mut s) {
            Err(e) if Instant::now() < until && (is_end(&e) || matches!(e.kind(), TimedOut | WouldBlock)) => {
                std::thread::sleep(Duration::from_millis(50));
            }
            r => {
                s.set_read_timeout(usual)?;
                return r.map(|t| (s, t));
            }
        }
    }
}

/// A buffered reader of the usual size.
pub fn reader(s: &TcpStream) -> io::Result<BufReader<TcpStream>> {
    Ok(BufReader::with_capacity(64 << 10, s.try_clone()?))
}

/// Reads exactly one message; `None` at the end of the stream between messages.
pub fn read_or_end(r: &mut impl Read, b: &mut [u8]) -> io::Result<bool> {
    let mut at = 0;
    while at < b.len() {
        match r.read(&mut b[at..]) {
            Ok(0) if at == 0 => return Ok(false),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => at += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// Nanoseconds of the host's monotonic clock: comparable between processes.
pub fn now() -> u64 {
    // SAFETY: room for the answer.
    unsafe {
        let mut t: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    }
}

/// The phases of a run: warming up, measured, over.
#[derive(Default)]
pub struct Clock(AtomicU8);

impl Clock {
    /// Whether the run is over.
    pub fn over(&self) -> bool {
        self.0.load(Relaxed) == 2
    }

    /// Whether what happens now counts.
    pub fn counts(&self) -> bool {
        self.0.load(Relaxed) == 1
    }

    /// Runs `n` workers with their numbers in threads, `--warm` and then `--secs` seconds long; the sum of
    /// their tallies.
    pub fn run(&self, a: &Args, n: usize, f: impl Fn(usize) -> io::Result<Tally> + Sync) -> io::Result<Tally> {
        let seconds = |name: &str, default: f64| a.text(name, "").parse().unwrap_or(default);
        let (warm, secs) = (seconds("warm", 0.2), seconds("secs", 1.0));
        std::thread::scope(|s| {
            let workers: Vec<_> = (0..n)
                .map(|i| {
                    let f = &f;
                    std::thread::Builder::new().spawn_scoped(s, move || f(i))
                })
                .collect::<io::Result<_>>()?;
            std::thread::sleep(Duration::from_secs_f64(warm));
            let t = Instant::now();
            self.0.store(1, Relaxed);
            std::thread::sleep(Duration::from_secs_f64(secs));
            self.0.store(2, Relaxed);
            let secs = t.elapsed().as_secs_f64();
            let mut all = Tally { secs, ..Tally::default() };
            for w in workers {
                all.add(w.join().map_err(|_| io::Error::other("a worker panicked"))??);
            }
            match all.count {
                0 => wrong("not one message in the measured time"),
                _ => Ok(all),
            }
        })
    }
}

/// What a worker counted.
#[derive(Default)]
pub struct Tally {
    /// Messages in the measured time.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Messages of the whole run.
    pub all: u64,
    /// Their bytes.
    pub all_bytes: u64,
    /// Latencies in the measured time, in nanoseconds.
    pub ns: Vec<u32>,
    /// Length of the measured time.
    pub secs: f64,
}

/// Latencies that one worker keeps.
const KEEP: usize = 1 << 20;

impl Tally {
    /// Counts `n` messages with `bytes` in all.
    pub fn hit(&mut self, c: &Clock, n: u64, bytes: u64) {
        self.all += n;
        self.all_bytes += bytes;
        if c.counts() {
            self.count += n;
            self.bytes += bytes;
        }
    }

    /// Counts a latency.
    pub fn late(&mut self, c: &Clock, ns: u64) {
        if c.counts() && self.ns.len() < KEEP {
            self.ns.push(ns.min(u32::MAX.into()) as u32);
        }
    }

    /// Adds another worker's.
    pub fn add(&mut self, o: Tally) {
        self.count += o.count;
        self.bytes += o.bytes;
        self.all += o.all;
        self.all_bytes += o.all_bytes;
        self.ns.extend(o.ns);
    }

    /// Median and 99th percentile in microseconds, if there are any.
    pub fn percentiles(&mut self) -> Option<(f64, f64)> {
        self.ns.sort_unstable();
        let last = self.ns.len().checked_sub(1)?;
        let at = |q: f64| f64::from(self.ns[(last as f64 * q) as usize]) / 1000.0;
        Some((at(0.5), at(0.99)))
    }

    /// Prints the line that ends a client; `more` are further words.
    pub fn print(mut self, more: &str) {
        let rate = self.count as f64 / self.secs;
        print!("OK rate={rate:.1} mb={:.3}", self.bytes as f64 / self.secs / 1e6);
        if let Some((p50, p99)) = self.percentiles() {
            print!(" p50={p50:.2} p99={p99:.2}");
        }
        println!(" messages={} bytes={}{more}", self.all, self.all_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_message_is_noticed() {
        for size in [16, 17, 32, 60, 1024, 4099] {
            let mut m = message(size);
            seal(7, &mut m);
            assert!(check(7, &m).is_ok() && check(8, &m).is_err());
            for i in HEAD..size {
                m[i] ^= 4;
                assert!(check(7, &m).is_err(), "size {size}, byte {i}");
                m[i] ^= 4;
            }
        }
        let mut m = message(128);
        seal(7, &mut m);
        m[32..].rotate_left(32);
        assert!(check(7, &m).is_err(), "exchanged words");
    }

    #[test]
    fn percentiles_of_a_tally() {
        let mut t = Tally { ns: (1..=1000).map(|x| x * 1000).collect(), ..Tally::default() };
        assert_eq!(t.percentiles(), Some((500.0, 990.0)));
        assert_eq!(Tally::default().percentiles(), None);
    }
}
