//! `ringsock bench`: the same programs plain and preloaded, and a report of what differs.

use crate::library;
use indicatif::{ProgressBar, ProgressStyle};
use ringsock_bench::measure::Outcome;
use ringsock_bench::pairs::Lab;
use ringsock_bench::{csv, html, machine, measure, plan};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The hidden subcommand that makes this command one of the measured programs.
pub const PROGRAM: &str = "__program";

/// Options of `ringsock bench`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringsock bench --quick                     everything, less than ten minutes
  ringsock bench --only redis,netty          experiments whose names contain one of these
  ringsock bench --list                      their names
  ringsock bench --out report                folder of report.html, report.json, report.csv

Plain and preloaded runs alternate, in fresh processes, over the loopback address. Real
servers take part where they are installed. Exit status 1 says that a run failed.")]
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
    /// Address of this host at which preloaded servers listen [default: 127.0.0.1]
    #[arg(long, value_name = "ADDR")]
    address: Option<String>,
    /// Address of this host at which plain servers listen [default: that of --address]
    #[arg(long, value_name = "ADDR")]
    baseline: Option<String>,
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

/// Measures and writes the report.
pub fn run(a: &Args) -> Result<ExitCode, String> {
    let secs = a.seconds.unwrap_or(if a.quick { 0.4 } else { 2.0 });
    if !(0.05..=60.0).contains(&secs) {
        return Err("--seconds wants 0.05 to 60".into());
    }
    let (mut all, missing) = plan::all(a.quick, secs);
    if a.list {
        all.iter().for_each(|e| println!("{:<22}{}", e.name, e.title));
        missing.iter().for_each(|m| println!("not here: {m}"));
        return Ok(ExitCode::SUCCESS);
    }
    if !a.only.is_empty() {
        all.retain(|e| a.only.iter().any(|o| e.name.contains(o.as_str())));
        if all.is_empty() {
            return Err(format!("no experiment is called {}; --list says their names", a.only.join(" or ")));
        }
    }
    let found = library::find(a.lib.as_deref())?;
    library::try_preload(&found)?;
    std::fs::create_dir_all(&a.out).map_err(|e| format!("{}: {e}", a.out.display()))?;
    let rounds = usize::from(a.rounds.unwrap_or(if a.quick { 3 } else { 7 }));
    let about = machine::describe(&found, rounds, a.quick, secs);
    let me = std::env::current_exe().map_err(|e| format!("cannot find this command's own file: {e}"))?;
    let mut lab = Lab::new(&found, (me, Some(PROGRAM)), secs)?;
    lab.host = a.address.clone().unwrap_or(lab.host.clone());
    lab.baseline = a.baseline.clone().unwrap_or(lab.host.clone());
    let runs: usize = all.iter().map(|e| e.points.len() * rounds * 2).sum();
    let bar = ProgressBar::new(runs as u64);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:32}] {pos}/{len} {eta} left  {msg}");
    bar.set_style(style.map_err(|e| e.to_string())?.progress_chars("=> "));
    bar.enable_steady_tick(Duration::from_millis(500));
    let (began, mut done) = (Instant::now(), Vec::new());
    for e in &all {
        let o = measure::experiment(e, &lab, rounds, &mut |what| {
            bar.set_message(what.to_string());
            bar.inc(1);
        });
        bar.suspend(|| say(&o));
        done.push(o);
    }
    bar.finish_and_clear();
    let mut about = about;
    about["took_seconds"] = json!(began.elapsed().as_secs());
    about["address"] = json!(lab.host);
    about["baseline"] = json!(lab.baseline);
    let notes = if a.only.is_empty() { missing } else { vec![] };
    let data = json!({
        "machine": about, "not_run": notes, "experiments": done.iter().map(Outcome::json).collect::<Vec<_>>(),
    });
    write(&a.out, "report.json", &format!("{data:#}\n"))?;
    write(&a.out, "report.csv", &csv::text(&done))?;
    write(&a.out, "report.html", &html::page(&about, &done, &notes))?;
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
        for c in r.cells.iter().take(1) {
            let share = r.share.map_or(0.0, |s| s * 100.0);
            println!(
                "  {:<20} {:<24} plain {:>8}  preloaded {:>8}  {:<14} {share:5.1} % on rings",
                r.x,
                c.metric.label,
                short(c.plain.median),
                short(c.ring.median),
                c.verdict().text(),
            );
        }
    }
}
