//! Runs a case in pairs of plain and preloaded programs and puts the numbers side by side.

use ringsock_bench::stats::spread;
use ringsock_bench::work::Job;
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
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
}

/// What all cases share.
pub struct Setting {
    lib: PathBuf,
    dir: PathBuf,
    exe: PathBuf,
}

/// Longest time of one run.
const LIMIT: Duration = Duration::from_secs(90);

impl Setting {
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

    fn command(&self, preload: bool, links: Option<&str>) -> Command {
        let mut c = Command::new(&self.exe);
        c.env_remove("LD_PRELOAD").stdin(Stdio::null()).stdout(Stdio::piped());
        for (k, _) in std::env::vars().filter(|(k, _)| k == "RINGSOCK_REPORT" || k == "RINGSOCK_LINKS") {
            c.env_remove(k);
        }
        if preload {
            c.env("LD_PRELOAD", &self.lib).env("RINGSOCK_REPORT", self.dir.join("%p"));
            if let Some(l) = links {
                c.env("RINGSOCK_LINKS", l);
            }
        }
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

fn last_json(mut out: BufReader<ChildStdout>) -> Result<Value, String> {
    let mut text = String::new();
    out.read_to_string(&mut text).map_err(|e| e.to_string())?;
    let line = text.lines().last().ok_or("a program said nothing")?;
    serde_json::from_str(line).map_err(|e| format!("{line:?}: {e}"))
}

/// One run: what it measured.
fn once(c: &Case, s: &Setting, second: bool) -> Result<Value, String> {
    let until = Instant::now() + LIMIT;
    let links = match c.preload {
        Preload::NoLinks => Some("none"),
        Preload::Verbs => Some("verbs"),
        _ => None,
    };
    let server_pre = second && c.preload != Preload::Client;
    let client_pre = second && c.preload != Preload::Server;
    let words = |role: &str| -> Vec<String> { std::iter::once(role.to_string()).chain(c.job.words()).collect() };
    if c.job.kind == "call" {
        let (mut k, out) = Kid::start(s.command(client_pre, links), &words("@call"))?;
        k.finish(until)?;
        return last_json(out);
    }
    let (mut server, mut sout) = Kid::start(s.command(server_pre, links), &words("@serve"))?;
    let mut port = String::new();
    sout.read_line(&mut port).map_err(|e| e.to_string())?;
    let mut w = words("@client");
    w.push(port.trim().to_string());
    let (mut client, cout) = Kid::start(s.command(client_pre, links), &w)?;
    client.finish(until)?;
    server.finish(until)?;
    let mut v = last_json(cout)?;
    let sv = last_json(sout)?;
    let sum = v["cpu"].as_f64().unwrap_or(0.0) + sv["cpu"].as_f64().unwrap_or(0.0);
    v["cpu"] = json!(sum / v["messages"].as_f64().unwrap_or(1.0) * 1e6);
    let (mut ring, mut tcp) = (0, 0);
    for (pre, kid) in [(server_pre, &server), (client_pre, &client)] {
        if pre {
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

/// The RDMA table: what sockets do over TCP and over the `verbs` link, beside a queue pair alone. Rows as JSON.
pub fn verbs(s: &Setting, only: &str, count: impl Fn(usize) -> usize) -> Result<Vec<Value>, String> {
    println!("{:<22} {:>12} {:>12} {:>12} {:>10}", "", "kernel TCP", "raw verbs", "ringsock", "of raw");
    let mut rows = Vec::new();
    for (kind, size, n, metric, unit) in [
        ("pingpong", 64, 20_000, "median", "us"),
        ("pingpong", 16 << 10, 4_000, "median", "us"),
        ("stream", 64, 200_000, "bytes", "MB/s"),
        ("stream", 1 << 10, 60_000, "bytes", "MB/s"),
        ("stream", 64 << 10, 4_000, "bytes", "MB/s"),
    ] {
        let name = format!("{kind} {size}, {unit}");
        if !name.contains(only) {
            continue;
        }
        let one = |kind: &str, second: bool| -> Result<f64, String> {
            // Long enough for the link to be there before anything is measured.
            let job = Job { kind: kind.into(), size, count: count(n), warm: 20_000 };
            let expect = if second { Expect::Ring } else { Expect::Any };
            let c = Case { name: String::new(), job, preload: Preload::Verbs, expect, metrics: &[] };
            once(&c, s, second)?[metric].as_f64().ok_or(format!("no {metric}"))
        };
        let (tcp, raw, ours) = (one(kind, false)?, one(&format!("raw-{kind}"), false)?, one(kind, true)?);
        println!("{name:<22} {tcp:>12.1} {raw:>12.1} {ours:>12.1} {:>10.2}", ours / raw);
        rows.push(json!({ "kind": kind, "size": size, "unit": unit, "tcp": tcp, "raw": raw, "ringsock": ours }));
    }
    Ok(rows)
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
    for _ in 0..rounds {
        for (i, r) in runs.iter_mut().enumerate() {
            let v = once(c, s, i == 1);
            r.push(v.map_err(|e| format!("{} {e}", ["plain:", "preloaded:"][i]))?);
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
