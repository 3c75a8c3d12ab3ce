//! `ringsock bench`: the same programs plain and preloaded, and a report of what differs.

use crate::library;
use indicatif::{ProgressBar, ProgressStyle};
use ringsock_bench::link::Link;
use ringsock_bench::measure::{Outcome, Series};
use ringsock_bench::pairs::Lab;
use ringsock_bench::peer::{self, Peer, Terms};
use ringsock_bench::plan::Experiment;
use ringsock_bench::variant::Variant;
use ringsock_bench::{csv, html, machine, plan};
use serde_json::json;
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The hidden subcommand that makes this command one of the measured programs.
pub const PROGRAM: &str = "__program";
/// The hidden subcommand that makes it the agent on the other host.
pub const AGENT: &str = peer::AGENT;
/// Further columns that a report can have.
const ALSO: usize = 3;

/// Options of `ringsock bench`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringsock bench --quick                     everything, less than ten minutes
  ringsock bench --only redis,netty          experiments whose names contain one of these
  ringsock bench --list                      their names
  ringsock bench --out report                folder of report.html, report.json, report.csv
  ringsock bench --peer \"ssh hostb ringsock\" --address 10.1.0.2 --baseline 192.168.0.2
                                             servers on hostb: preloaded ones at its RDMA
                                             address, plain ones at another of its addresses
  ringsock bench --also rsocket              a further column, from the same runs

Plain and preloaded runs alternate, in fresh processes, over the loopback address or between
two hosts. Real servers take part where they are installed; they let anybody in who reaches
their address while they run. Exit status 1 says that a run failed.")]
pub struct Args {
    /// Fewer points, fewer and shorter runs: less than ten minutes on two cores
    #[arg(long)]
    quick: bool,
    /// Only experiments whose names contain one of these, separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// Folder for the report [default: ringsock-bench]
    #[arg(long, value_name = "DIR", default_value = "ringsock-bench", hide_default_value = true)]
    out: PathBuf,
    /// Run the servers on another host: a command that runs `ringsock` there, with its words on
    /// standard input and output, such as "ssh hostb ringsock"
    #[arg(long, value_name = "COMMAND", requires = "address")]
    peer: Option<String>,
    /// Address at which the servers listen [default: 127.0.0.1]
    #[arg(long, value_name = "ADDR")]
    address: Option<IpAddr>,
    /// Address at which they listen in plain runs: the baseline's (IPoIB, Ethernet) [default: that of --address]
    #[arg(long, value_name = "ADDR")]
    baseline: Option<IpAddr>,
    /// Another accelerator as a further column: rsocket, smc (SMC-R), or NAME=LIBRARY that is preloaded; up to three
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    also: Vec<String>,
    /// Rounds of a plain and a preloaded run at each point [default: 7, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Length of a measurement in seconds [default: 2, with --quick 0.4]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Say the names of all experiments and end
    #[arg(long)]
    list: bool,
    /// The library, if it is not found by itself
    #[arg(long, value_name = "FILE")]
    lib: Option<PathBuf>,
}

/// The addresses from which clients reach the servers.
fn clients(servers: &[&str]) -> Result<Vec<IpAddr>, String> {
    let from = |to: &&str| -> std::io::Result<IpAddr> {
        let any = if to.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
        let s = UdpSocket::bind(any)?;
        s.connect((*to, 9))?;
        Ok(s.local_addr()?.ip())
    };
    servers.iter().map(|to| from(to).map_err(|e| format!("no way to {to}: {e}"))).collect()
}

/// The agent that `--peer` starts on the other host.
pub fn agent() -> Result<ExitCode, String> {
    // Whoever asked is told by its standard input ending, too.
    peer::agent(&library::find(None)?, (this_file()?, Some(PROGRAM))).map(|()| ExitCode::SUCCESS)
}

fn this_file() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|e| format!("cannot find this command's own file: {e}"))
}

/// Takes out what cannot be run, here or there; why.
fn leave_out(all: &mut Vec<Experiment>, peer: Option<&Peer>) -> Vec<String> {
    let mut notes = Vec::new();
    all.retain(|e| {
        let here = e.missing(peer.is_none(), true).map(str::to_string);
        let there = || peer?.missing.iter().find(|m| m.0 == e.name).map(|m| m.1.clone());
        let why = match (here, there()) {
            (None, None) => return true,
            (Some(p), _) => format!("{p} is not installed"),
            (_, Some(p)) => format!("{p} is not installed on the other host"),
        };
        notes.push(format!("{}: {why}", e.title));
        false
    });
    notes
}

/// Measures and writes the report.
pub fn run(a: &Args) -> Result<ExitCode, String> {
    let secs = a.seconds.unwrap_or(if a.quick { 0.4 } else { 2.0 });
    if !(0.05..=60.0).contains(&secs) {
        return Err("--seconds wants 0.05 to 60".into());
    }
    let mut all = plan::all(a.quick, secs);
    if !a.only.is_empty() {
        all.retain(|e| a.only.iter().any(|o| e.name.contains(o.as_str())));
        if all.is_empty() {
            return Err(format!("no experiment is called {}; --list says their names", a.only.join(" or ")));
        }
    }
    if a.list {
        let missing = leave_out(&mut all, None);
        all.iter().for_each(|e| println!("{:<22}{}", e.name, e.title));
        missing.iter().for_each(|m| println!("not here: {m}"));
        return Ok(ExitCode::SUCCESS);
    }
    if a.also.len() > ALSO {
        return Err(format!("--also takes up to {ALSO}"));
    }
    let mut variants = Variant::both();
    for spec in &a.also {
        let v = Variant::parse(spec).map_err(|e| format!("--also {e}"))?;
        if variants.iter().any(|w| w.name == v.name) {
            return Err(format!("--also: {} twice", v.name));
        }
        variants.push(v);
    }
    let found = library::find(a.lib.as_deref())?;
    library::try_preload(&found)?;
    std::fs::create_dir_all(&a.out).map_err(|e| format!("{}: {e}", a.out.display()))?;
    let rounds = usize::from(a.rounds.unwrap_or(if a.quick { 3 } else { 7 }));
    let mut about = machine::describe(&found, rounds, a.quick, secs);
    let mut lab = Lab::new(&found, (this_file()?, Some(PROGRAM)), secs)?;
    lab.host = a.address.map_or(lab.host.clone(), |h| h.to_string());
    lab.baseline = a.baseline.map_or(lab.host.clone(), |h| h.to_string());
    if let Some(command) = &a.peer {
        // An agent that goes away is an error of the run that asks it.
        // SAFETY: sets a disposition; children get the default back.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        lab.clients = clients(&[&lab.host, &lab.baseline])?;
        let variants = variants.iter().map(|v| v.spec.clone()).collect();
        let terms = Terms { quick: a.quick, secs, clients: lab.clients.clone(), variants };
        let peer = Peer::start(command, &terms)?;
        about["peer"] = peer.machine.clone();
        all.iter_mut().for_each(Experiment::between_hosts);
        lab.peer = Some(peer);
    }
    let missing = leave_out(&mut all, lab.peer.as_ref());
    let link = Link::new(&lab);
    let runs: usize = all.iter().map(|e| e.points.len() * rounds * variants.len()).sum();
    let bar = ProgressBar::new(runs as u64);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:32}] {pos}/{len} {eta} left  {msg}");
    bar.set_style(style.map_err(|e| e.to_string())?.progress_chars("=> "));
    bar.enable_steady_tick(Duration::from_millis(500));
    let (began, mut done) = (Instant::now(), Vec::new());
    let mut series = Series::new(&lab, &link, &variants, rounds);
    for e in &all {
        let o = series.experiment(e, &mut |what| {
            bar.set_message(what.to_string());
            bar.inc(1);
        });
        bar.suspend(|| say(&o));
        done.push(o);
    }
    bar.finish_and_clear();
    about["took_seconds"] = json!(began.elapsed().as_secs());
    about["address"] = json!(lab.host);
    about["baseline"] = json!(lab.baseline);
    about["limit"] = json!(link.what);
    let data = json!({
        "machine": about, "not_run": missing, "experiments": done.iter().map(Outcome::json).collect::<Vec<_>>(),
    });
    write(&a.out, "report.json", &format!("{data:#}\n"))?;
    write(&a.out, "report.csv", &csv::text(&done))?;
    write(&a.out, "report.html", &html::page(&about, &done, &missing))?;
    println!("\n{} in {} s", a.out.join("report.html").display(), began.elapsed().as_secs());
    let failed = done.iter().flat_map(|o| &o.rows).filter(|r| r.failed.is_some()).count();
    Ok(ExitCode::from(u8::from(failed > 0)))
}

fn write(dir: &Path, name: &str, text: &str) -> Result<(), String> {
    let path = dir.join(name);
    std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
}

/// The experiment's first metric, a line for each point.
fn say(o: &Outcome) {
    use ringsock_bench::stats::short;
    println!("{}", o.title);
    for r in &o.rows {
        if let Some(why) = &r.failed {
            println!("  {:<20} FAILED: {why}", r.x);
        }
        r.lost.iter().for_each(|(v, why)| println!("  {:<20} {v} failed: {why}", r.x));
        for c in r.cells.iter().take(1) {
            let share = r.share.map_or(0.0, |s| s * 100.0);
            let other = |(n, v): (&String, &Option<_>)| {
                v.as_ref().map(|v: &ringsock_bench::stats::Runs| format!("  {n} {}", short(v.median)))
            };
            let others: String = o.variants[2..].iter().zip(&c.others).filter_map(other).collect();
            println!(
                "  {:<20} {:<24} plain {:>8}  preloaded {:>8}  {:<14} {share:5.1} % on rings{others}",
                r.x,
                c.metric.label,
                short(c.plain.median),
                short(c.ring.median),
                c.verdict().text(),
            );
        }
    }
}
