//! Runs programs in pairs, plain and preloaded in turn, and takes what they say, their processor
//! time, and what the library reports.

use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest time of one run; what still runs then is killed.
const LIMIT: Duration = Duration::from_secs(60);

/// Named numbers that a client said.
pub type Values = BTreeMap<String, f64>;

/// How a server is ended.
#[derive(Clone, Copy, PartialEq)]
pub enum Stop {
    /// By this signal.
    Signal(i32),
    /// It ends when its client has.
    ByItself,
}

/// A server that is about to be started.
pub struct Start {
    /// The program.
    pub command: Command,
    /// Where it will listen; `None`: the last word of its first line says.
    pub port: Option<u16>,
    /// How it is ended.
    pub stop: Stop,
}

/// Where and how everything is run.
pub struct Lab {
    /// The library, where every user can read it.
    pub lib: PathBuf,
    /// A folder for reports and servers' files, writable by everybody.
    pub dir: PathBuf,
    /// The address of the accelerated runs.
    pub host: String,
    /// The address of the plain runs.
    pub baseline: String,
    /// This program, and the word that makes it one of the measured ones.
    pub me: (PathBuf, Option<&'static str>),
    /// Length of a measurement in seconds.
    pub secs: f64,
}

/// One run's result.
pub struct Sample {
    /// What the client said.
    pub values: Values,
    /// Processor time of all processes, in seconds.
    pub cpu: f64,
    /// Processor time of the server alone.
    pub cpu_server: f64,
    /// Bytes sent over rings.
    pub ring: u64,
    /// Bytes sent over TCP, by preloaded processes.
    pub tcp: u64,
}

impl Lab {
    /// With a folder of its own below the temporary one, and a copy of the library there.
    pub fn new(lib: &Path, me: (PathBuf, Option<&'static str>), secs: f64) -> Result<Lab, String> {
        use std::os::unix::fs::PermissionsExt;
        let dir = std::env::temp_dir().join(format!("ringsock-bench.{}", std::process::id()));
        let say = |e: std::io::Error| format!("{}: {e}", dir.display());
        std::fs::create_dir_all(&dir).map_err(say)?;
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o1777)).map_err(say)?;
        let copy = dir.join("libringsock.so");
        std::fs::copy(lib, &copy).map_err(|e| format!("{}: {e}", lib.display()))?;
        std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o755)).map_err(say)?;
        let host = "127.0.0.1".to_string();
        Ok(Lab { lib: copy, dir, baseline: host.clone(), host, me, secs })
    }

    /// One of our own programs.
    pub fn own(&self, words: &[String]) -> Command {
        let mut c = Command::new(&self.me.0);
        c.args(self.me.1).args(words);
        c
    }

    fn dress(&self, c: &mut Command, preload: bool) {
        c.env_remove("LD_PRELOAD").env_remove("RINGSOCK_REPORT").stdin(Stdio::null()).process_group(0);
        if preload {
            c.env("LD_PRELOAD", &self.lib).env("RINGSOCK_REPORT", self.dir.join("report.%p"));
        }
    }

    /// Sums and removes the reports that lie here.
    fn reports(&self) -> Result<(u64, u64, usize), String> {
        let (mut ring, mut tcp, mut n) = (0, 0, 0);
        for e in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            if !e.file_name().to_string_lossy().starts_with("report.") {
                continue;
            }
            let text = std::fs::read(e.path()).map_err(|x| format!("a report: {x}"))?;
            let v: Value = serde_json::from_slice(&text).map_err(|x| format!("a report: {x}"))?;
            ring += v["totals"]["tx_bytes_ring"].as_u64().unwrap_or(0);
            tcp += v["totals"]["tx_bytes_tcp"].as_u64().unwrap_or(0);
            n += 1;
            let _ = std::fs::remove_file(e.path());
        }
        Ok((ring, tcp, n))
    }

    /// One run of a server and a client.
    pub fn run(&self, p: &dyn Pair, preload: bool) -> Result<Sample, String> {
        let _ = self.reports();
        let host = if preload { &self.host } else { &self.baseline };
        let watch = Watch::new();
        let mut start = p.server(self, host)?;
        self.dress(&mut start.command, preload);
        start.command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut server = Kid::start(start.command, &watch)?;
        let port = match start.port {
            Some(port) => server.ready(host, port)?,
            None => server.announced()?,
        };
        let mut c = p.client(self, host, port);
        self.dress(&mut c, preload);
        c.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut client = Kid::start(c, &watch)?;
        let said = client.all();
        let (status, cpu_client) = client.wait();
        if status != 0 {
            return Err(format!("the client ended with {status}: {}", tail(&said, &mut client)));
        }
        if let Stop::Signal(s) = start.stop {
            server.signal(s);
        }
        let (_, cpu_server) = server.wait();
        if watch.fired.load(SeqCst) {
            return Err(format!("still running after {} s", LIMIT.as_secs()));
        }
        let values = p.parse(&said).map_err(|e| format!("{e}: {}", tail(&said, &mut client)))?;
        let (ring, tcp, n) = self.reports()?;
        if preload && n == 0 {
            return Err("no process has reported: was it preloaded?".into());
        }
        Ok(Sample { values, cpu: cpu_client + cpu_server, cpu_server, ring, tcp })
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A server and a client that are measured together.
pub trait Pair {
    /// The server, to listen at an address.
    fn server(&self, lab: &Lab, host: &str) -> Result<Start, String>;
    /// The client of a server.
    fn client(&self, lab: &Lab, host: &str, port: u16) -> Command;
    /// The numbers in what the client said: at least `messages` and `bytes` of the whole run.
    fn parse(&self, said: &str) -> Result<Values, String>;
}

/// A pair of our own programs.
pub struct Own {
    /// Words of the server.
    pub server: Vec<String>,
    /// Words of the client; `--host`, `--port`, `--secs` and `--warm` follow.
    pub client: Vec<String>,
}

impl Pair for Own {
    fn server(&self, lab: &Lab, host: &str) -> Result<Start, String> {
        let job = self.server[0].starts_with('@');
        let mut words = self.server.clone();
        if !job {
            words.extend(["--host".into(), host.into()]);
        }
        let stop = if job { Stop::ByItself } else { Stop::Signal(libc::SIGTERM) };
        Ok(Start { command: lab.own(&words), port: None, stop })
    }

    fn client(&self, lab: &Lab, host: &str, port: u16) -> Command {
        let mut words = self.client.clone();
        if words[0].starts_with('@') {
            words.push(port.to_string());
        } else {
            words.extend(load_words(lab, host, port));
        }
        lab.own(&words)
    }

    fn parse(&self, said: &str) -> Result<Values, String> {
        parse_ok(said)
    }
}

/// The options that every client of ours takes.
pub fn load_words(lab: &Lab, host: &str, port: u16) -> Vec<String> {
    let (port, secs) = (port.to_string(), lab.secs.to_string());
    ["--host", host, "--port", &port, "--secs", &secs, "--warm", "0.25"].map(String::from).to_vec()
}

/// The last line of one of our clients: `OK name=value ...`, or one JSON object.
pub fn parse_ok(said: &str) -> Result<Values, String> {
    let line = said.lines().last().unwrap_or("");
    if line.starts_with('{') {
        let v: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
        let o = v.as_object().ok_or("not an object")?;
        return Ok(o.iter().filter_map(|(k, v)| Some((k.clone(), v.as_f64()?))).collect());
    }
    let words = line.strip_prefix("OK ").ok_or("the client did not say OK")?;
    let pair = |w: &str| {
        let (k, v) = w.split_once('=')?;
        Some((k.to_string(), v.parse().ok()?))
    };
    words.split_whitespace().map(|w| pair(w).ok_or(format!("not a number: {w}"))).collect()
}

fn tail(said: &str, k: &mut Kid) -> String {
    let mut err = String::new();
    if let Some(mut e) = k.child.stderr.take() {
        let _ = e.read_to_string(&mut err);
    }
    let all = format!("{} {}", said.trim(), err.trim());
    let cut = all.char_indices().rev().nth(300).map_or(0, |x| x.0);
    all[cut..].to_string()
}

/// Kills what was started for a run when it takes too long.
struct Watch {
    pids: Arc<Mutex<Vec<i32>>>,
    over: Arc<AtomicBool>,
    fired: Arc<AtomicBool>,
}

impl Watch {
    fn new() -> Watch {
        let w = Watch { pids: Arc::default(), over: Arc::default(), fired: Arc::default() };
        let (pids, over, fired) = (w.pids.clone(), w.over.clone(), w.fired.clone());
        std::thread::spawn(move || {
            let t = Instant::now();
            while !over.load(SeqCst) {
                if t.elapsed() > LIMIT {
                    fired.store(true, SeqCst);
                    for pid in pids.lock().unwrap_or_else(|e| e.into_inner()).iter() {
                        // SAFETY: a process group that we started and have not reaped.
                        unsafe { libc::kill(-pid, libc::SIGKILL) };
                    }
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        w
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, SeqCst);
    }
}

/// A process of ours, the leader of its group; killed when this goes.
struct Kid {
    child: Child,
    ended: Option<(i32, f64)>,
    pids: Arc<Mutex<Vec<i32>>>,
}

impl Kid {
    fn start(mut c: Command, w: &Watch) -> Result<Kid, String> {
        let child = c.spawn().map_err(|e| format!("{}: {e}", c.get_program().to_string_lossy()))?;
        w.pids.lock().unwrap_or_else(|e| e.into_inner()).push(child.id() as i32);
        Ok(Kid { child, ended: None, pids: w.pids.clone() })
    }

    fn signal(&self, s: i32) {
        // SAFETY: a child of ours that is not reaped yet.
        unsafe { libc::kill(self.child.id() as i32, s) };
    }

    /// The port in the first line of a server of ours.
    fn announced(&mut self) -> Result<u16, String> {
        let mut r = BufReader::new(self.child.stdout.take().ok_or("no output")?);
        let mut line = String::new();
        r.read_line(&mut line).map_err(|e| e.to_string())?;
        drain(r);
        let port = line.split_whitespace().last().and_then(|w| w.parse().ok());
        port.ok_or_else(|| format!("the server did not start: {line} {}", tail("", self)))
    }

    /// Waits until somebody accepts at a port.
    fn ready(&mut self, host: &str, port: u16) -> Result<u16, String> {
        if let Some(o) = self.child.stdout.take() {
            drain(o);
        }
        let until = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect((host, port)).is_err() {
            if Instant::now() > until {
                self.signal(libc::SIGKILL);
                return Err(format!("nobody listens at port {port}: {}", tail("", self)));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if let Some(e) = self.child.stderr.take() {
            drain(e);
        }
        Ok(port)
    }

    /// All that it prints.
    fn all(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut o) = self.child.stdout.take() {
            let _ = o.read_to_string(&mut text);
        }
        text
    }

    /// Waits for its end: status (128 and more: a signal) and processor time in seconds, that of its
    /// reaped children included.
    fn wait(&mut self) -> (i32, f64) {
        if let Some(e) = self.ended {
            return e;
        }
        let (mut status, pid) = (0, self.child.id() as i32);
        // SAFETY: room for both answers; a child of ours.
        let used = unsafe {
            let mut u: libc::rusage = std::mem::zeroed();
            while libc::wait4(pid, &mut status, 0, &mut u) < 0 && *libc::__errno_location() == libc::EINTR {}
            let t = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
            t(u.ru_utime) + t(u.ru_stime)
        };
        self.pids.lock().unwrap_or_else(|e| e.into_inner()).retain(|p| *p != pid);
        let status = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
        self.ended = Some((status, used));
        (status, used)
    }
}

impl Drop for Kid {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // SAFETY: the group of a child of ours that is not reaped yet.
            unsafe { libc::kill(-(self.child.id() as i32), libc::SIGKILL) };
            self.wait();
        }
    }
}

/// Reads a server's output to its end, so that it never waits for us.
fn drain(mut r: impl Read + Send + 'static) {
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut r, &mut std::io::sink());
    });
}

/// A TCP port of an address that nobody uses at this moment.
pub fn free_port(host: &str) -> Result<u16, String> {
    let l = std::net::TcpListener::bind((host, 0)).map_err(|e| format!("{host}: {e}"))?;
    l.local_addr().map(|a| a.port()).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_say() {
        let v = parse_ok("hello\nOK rate=2.5 p50=7 messages=10 bytes=20\n").unwrap();
        assert_eq!((v["rate"], v["bytes"]), (2.5, 20.0));
        assert_eq!(parse_ok("{\"median\":1.5,\"messages\":3}").unwrap()["median"], 1.5);
        assert!(parse_ok("BAD").is_err() && parse_ok("").is_err() && parse_ok("OK x=y").is_err());
    }
}
