//! Runs a case in pairs of plain and preloaded programs and puts the numbers side by side.

use ringsock_bench::stats::spread;
use ringsock_bench::work::Job;
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Which programs of the second variant of a pair are preloaded.
#[derive(Clone, Copy, PartialEq)]
pub enum Preload {
    /// Both.
    Both,
    /// Both, with `RINGSOCK_LINKS=none`.
    NoLinks,
    /// Both, with `RINGSOCK_LINKS=verbs`.
    Verbs,
    /// Both, with rsocket's library instead of ours.
    Rsocket,
    /// The client only.
    Client,
    /// The server only.
    Server,
}

/// Where the bytes of the second variant must have gone.
#[derive(Clone, Copy, PartialEq)]
pub enum Expect {
    /// Over rings, nearly all of them.
    Ring,
    /// Over TCP, all of them.
    Tcp,
    /// Anywhere.
    Any,
}

/// A number that a case yields: name, unit, whether more is better.
pub type Metric = (&'static str, &'static str, bool);

/// One case.
pub struct Case {
    /// Its name in the table.
    pub name: String,
    /// What is done.
    pub job: Job,
    /// Who is preloaded.
    pub preload: Preload,
    /// Where the bytes must have gone.
    pub expect: Expect,
    /// What is measured.
    pub metrics: &'static [Metric],
    /// Runs of each variant in a round: several short ones tell more where runs differ among themselves.
    pub runs: usize,
    /// Beside as many threads that never sleep as there are processors.
    pub busy: bool,
}

/// What all cases share.
pub struct Setting {
    lib: PathBuf,
    dir: PathBuf,
    exe: PathBuf,
}

/// Where distributions have rsocket's library to be preloaded.
const RSOCKET: [&str; 3] = [
    "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so",
    "/usr/lib/aarch64-linux-gnu/rsocket/librspreload.so",
    "/usr/lib64/rsocket/librspreload.so",
];

/// rsocket's library, if it is there.
pub fn rsocket() -> Option<&'static Path> {
    RSOCKET.into_iter().map(Path::new).find(|p| p.exists())
}

/// Longest time of one run.
const LIMIT: Duration = Duration::from_secs(90);

impl Setting {
    /// A file in the directory for reports.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// With a directory for reports.
    pub fn new(lib: PathBuf) -> Result<Setting, String> {
        let dir = std::env::temp_dir().join(format!("rs-bench.{}", std::process::id()));
        std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let exe = std::env::current_exe().map_err(|e| e.to_string())?;
        Ok(Setting { lib, dir, exe })
    }

    /// Removes the directory.
    pub fn clean(&self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }

    fn command(&self, preload: bool, p: Preload) -> Command {
        self.command_under(&[], preload, p)
    }

    /// The program behind the words of another one that runs it.
    fn command_under(&self, under: &[String], preload: bool, p: Preload) -> Command {
        let mut c = match under {
            [] => Command::new(&self.exe),
            [first, more @ ..] => {
                let mut c = Command::new(first);
                c.args(more).arg(&self.exe);
                c
            }
        };
        c.env_remove("LD_PRELOAD").stdin(Stdio::null()).stdout(Stdio::piped());
        for (k, _) in std::env::vars().filter(|(k, _)| k == "RINGSOCK_REPORT" || k == "RINGSOCK_LINKS") {
            c.env_remove(k);
        }
        if !preload {
            return c;
        }
        if p == Preload::Rsocket {
            c.env("LD_PRELOAD", rsocket().unwrap_or(Path::new("")));
            return c;
        }
        c.env("LD_PRELOAD", &self.lib).env("RINGSOCK_REPORT", self.dir.join("%p"));
        match p {
            Preload::NoLinks => c.env("RINGSOCK_LINKS", "none"),
            Preload::Verbs => c.env("RINGSOCK_LINKS", "verbs"),
            _ => &mut c,
        };
        c
    }

    /// Bytes sent over rings and over TCP by a process that has ended.
    fn report(&self, pid: u32) -> Result<(u64, u64), String> {
        let f = self.dir.join(pid.to_string());
        let text = std::fs::read(&f).map_err(|e| format!("the report of {pid}: {e}"))?;
        let v: Value = serde_json::from_slice(&text).map_err(|e| format!("the report of {pid}: {e}"))?;
        let n = |k: &str| v["totals"][k].as_u64().ok_or(format!("the report lacks totals.{k}"));
        Ok((n("tx_bytes_ring")?, n("tx_bytes_tcp")?))
    }
}

/// A child that is ended by its pid if it is still there when this goes.
struct Kid(Child);

impl Kid {
    fn start(mut c: Command, words: &[String]) -> Result<(Kid, BufReader<ChildStdout>), String> {
        let mut k = c.args(words).spawn().map_err(|e| e.to_string())?;
        let out = k.stdout.take().ok_or("no stdout")?;
        Ok((Kid(k), BufReader::new(out)))
    }

    fn finish(&mut self, until: Instant) -> Result<(), String> {
        loop {
            match self.0.try_wait().map_err(|e| e.to_string())? {
                Some(st) if st.success() => return Ok(()),
                Some(st) => return Err(format!("a program ended with {st}")),
                None if Instant::now() > until => return Err("a program did not end".into()),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

impl Drop for Kid {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Threads that never sleep, one for each processor.
struct Busy(Arc<AtomicBool>, Vec<JoinHandle<()>>);

impl Busy {
    fn new() -> Busy {
        let end = Arc::new(AtomicBool::new(false));
        let burn = |end: Arc<AtomicBool>| {
            move || {
                while !end.load(Relaxed) {
                    std::hint::spin_loop();
                }
            }
        };
        let n = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = (0..n).map(|_| std::thread::spawn(burn(end.clone()))).collect();
        Busy(end, threads)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
        self.1.drain(..).for_each(|t| drop(t.join()));
    }
}

fn last_json(mut out: BufReader<ChildStdout>) -> Result<Value, String> {
    let mut text = String::new();
    out.read_to_string(&mut text).map_err(|e| e.to_string())?;
    let line = text.lines().last().ok_or("a program said nothing")?;
    serde_json::from_str(line).map_err(|e| format!("{line:?}: {e}"))
}

/// One run: what it measured.
fn once(c: &Case, s: &Setting, second: bool) -> Result<Value, String> {
    once_under(&[], c, s, second)
}

/// The same, with the client run by another program, whose words come first.
pub fn once_under(under: &[String], c: &Case, s: &Setting, second: bool) -> Result<Value, String> {
    let until = Instant::now() + if under.is_empty() { LIMIT } else { 5 * LIMIT };
    let server_pre = second && c.preload != Preload::Client;
    let client_pre = second && c.preload != Preload::Server;
    let words = |role: &str| -> Vec<String> { std::iter::once(role.to_string()).chain(c.job.words()).collect() };
    // rsocket cannot listen at a loopback address. In a machine of `ci/rdma-vm` this is the one of its device.
    let host = std::env::var("SELF").ok().filter(|_| c.preload == Preload::Rsocket);
    let with_host = |w: Vec<String>| -> Vec<String> { w.into_iter().chain(host.clone()).collect() };
    if c.job.kind == "call" {
        let (mut k, out) = Kid::start(s.command(client_pre, c.preload), &words("@call"))?;
        k.finish(until)?;
        return last_json(out);
    }
    let (mut server, mut sout) = Kid::start(s.command(server_pre, c.preload), &with_host(words("@serve")))?;
    let mut port = String::new();
    sout.read_line(&mut port).map_err(|e| e.to_string())?;
    let mut w = words("@client");
    w.push(port.trim().to_string());
    let (mut client, cout) = Kid::start(s.command_under(under, client_pre, c.preload), &with_host(w))?;
    client.finish(until)?;
    server.finish(until)?;
    let mut v = last_json(cout)?;
    let sv = last_json(sout)?;
    let sum = v["cpu"].as_f64().unwrap_or(0.0) + sv["cpu"].as_f64().unwrap_or(0.0);
    v["user of the server"] = sv["user"].clone();
    v["cpu"] = json!(sum / v["messages"].as_f64().unwrap_or(1.0) * 1e6);
    let (mut ring, mut tcp) = (0, 0);
    for (pre, kid) in [(server_pre, &server), (client_pre, &client)] {
        if pre && c.preload != Preload::Rsocket {
            let (r, t) = s.report(kid.0.id())?;
            ring += r;
            tcp += t;
        }
    }
    v["ring"] = json!(ring);
    let all = ring + tcp;
    match c.expect {
        Expect::Ring if second && ring * 10 < all * 9 => Err(format!("only {ring} of {all} bytes went over rings")),
        Expect::Tcp if second && ring > 0 => Err(format!("{ring} bytes went over rings")),
        _ => Ok(v),
    }
}

fn short(x: f64) -> String {
    match x.abs() {
        a if a >= 1e6 => format!("{:.2}M", x / 1e6),
        a if a >= 1e4 => format!("{:.1}k", x / 1e3),
        a if a >= 100.0 => format!("{x:.0}"),
        a if a >= 10.0 => format!("{x:.1}"),
        _ => format!("{x:.2}"),
    }
}

/// Prints the head of the table.
pub fn print_head() {
    println!("{:<26} {:<20} {:>26} {:>26} {:>8}", "case", "metric", "plain", "preloaded", "better");
}

/// Measures one case: a row for each metric.
pub fn measure(c: &Case, s: &Setting, rounds: usize) -> Result<Vec<Value>, String> {
    let mut runs: [Vec<Value>; 2] = [Vec::new(), Vec::new()];
    let _busy = c.busy.then(Busy::new);
    for round in 0..rounds * c.runs {
        // Neither is always the first.
        for i in [round % 2, 1 - round % 2] {
            let v = once(c, s, i == 1);
            runs[i].push(v.map_err(|e| format!("{} {e}", ["plain:", "preloaded:"][i]))?);
        }
    }
    let mut rows = Vec::new();
    for &(name, unit, more) in c.metrics {
        let col = |i: usize| -> Vec<f64> { runs[i].iter().filter_map(|v| v[name].as_f64()).collect() };
        let (a, b) = (col(0), col(1));
        if a.is_empty() || b.is_empty() {
            return Err(format!("no {name}"));
        }
        let ((am, al, ah), (bm, bl, bh)) = (spread(&a), spread(&b));
        let better = if more { bm / am } else { am / bm };
        let cell = |m, l, h| format!("{} ({}..{})", short(m), short(l), short(h));
        let what = format!("{name} {unit}");
        println!("{:<26} {what:<20} {:>26} {:>26} {better:>7.2}x", c.name, cell(am, al, ah), cell(bm, bl, bh));
        let side = |m: f64, l: f64, h: f64, v: Vec<f64>| json!({ "median": m, "min": l, "max": h, "runs": v });
        rows.push(json!({
            "case": c.name, "metric": name, "unit": unit, "better": better,
            "plain": side(am, al, ah, a), "preloaded": side(bm, bl, bh, b),
            "ring_bytes": runs[1].iter().filter_map(|v| v["ring"].as_u64()).max(),
        }));
    }
    Ok(rows)
}
