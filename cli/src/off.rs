//! `ringsock off` and `ringsock on`: an operator takes the connections of running processes off rings, and lets them back.

use crate::stat::explain;
use crate::state::{self, Missing, Process};
use ringsock_core::order::{self, Order};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Options of `ringsock off` and of `ringsock on`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringsock off 1234          the connections of one process return to TCP, and stay there
  ringsock off --all         those of every preloaded process that you may look at
  ringsock on 1234           they may leave TCP again

The programs notice nothing, and no connection is closed. Processes that they fork keep the order; programs that are
started anew do not: for these there are RINGSOCK_LINKS and RINGSOCK_RULES.
The order is obeyed for the same user and for root.")]
pub struct Args {
    /// Every preloaded process
    #[arg(long, conflicts_with = "pids", required_unless_present = "pids")]
    all: bool,
    /// Which processes
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pids: Vec<u32>,
}

/// How long connections may take to return before they are named.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs `ringsock off`.
pub fn off(args: &Args) -> Result<ExitCode, String> {
    run(args, Order::Off)
}

/// Runs `ringsock on`.
pub fn on(args: &Args) -> Result<ExitCode, String> {
    run(args, Order::On)
}

fn run(args: &Args, order: Order) -> Result<ExitCode, String> {
    let pids = if args.all { state::pids() } else { args.pids.clone() };
    let (mut told, mut all_well) = (0, true);
    for pid in pids {
        let process = match state::of(pid) {
            Ok(p) => p,
            Err(Missing::Gone | Missing::NoState | Missing::Denied) if args.all => continue,
            Err(m) => return Err(explain(pid, &m)),
        };
        told += 1;
        match tell(pid, order) {
            Ok(n) => all_well &= report(&process, order, n),
            Err(e) => {
                all_well = false;
                eprintln!("ringsock: process {pid}: {}", refusal(e, &process));
            }
        }
    }
    if told == 0 {
        return Err("no preloaded process was found. Start programs with `ringsock run -- PROGRAM`.".into());
    }
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Gives the order in the network namespace of the process, where it listens.
fn tell(pid: u32, order: Order) -> Result<u64, i32> {
    let inside = state::pid_inside(pid);
    let place = |of: &str| fs::read_link(format!("/proc/{of}/ns/net")).ok();
    if place(&pid.to_string()) == place("self") {
        return order::give(inside, order);
    }
    let errno = |e: std::io::Error| e.raw_os_error().unwrap_or(libc::EIO);
    // A thread of its own, because it stays where it went.
    let there = std::thread::spawn(move || {
        let ns = File::open(format!("/proc/{pid}/ns/net")).map_err(errno)?;
        // SAFETY: changes the namespace of this thread only.
        if unsafe { libc::setns(ns.as_raw_fd(), libc::CLONE_NEWNET) } != 0 {
            return Err(errno(std::io::Error::last_os_error()));
        }
        order::give(inside, order)
    });
    there.join().unwrap_or(Err(libc::EIO))
}

fn refusal(e: i32, p: &Process) -> String {
    match e {
        libc::ECONNREFUSED if p.connections.is_empty() => {
            "it has no connection that could move, and nobody there to hear an order yet".into()
        }
        libc::ECONNREFUSED => "its connections are all on TCP, and nobody there hears an order: it looks for no peer \
                               at present, or has switched the library off"
            .into(),
        libc::EPERM => "it does not obey: only its own user and root may give orders".into(),
        libc::ETIMEDOUT => "it does not answer; is it stopped?".into(),
        e => std::io::Error::from_raw_os_error(e).to_string(),
    }
}

/// Says what became of it. Whether all is as it was ordered.
fn report(p: &Process, order: Order, count: u64) -> bool {
    let name = crate::stat::clean(&p.program);
    if order == Order::On {
        println!("{} {name}: {} may leave TCP again with their next calls", p.pid, connections(count));
        return true;
    }
    let until = Instant::now() + PATIENCE;
    loop {
        let on_rings = state::of(p.pid).map_or(0, |now| {
            now.connections.iter().filter(|c| c.path_tx == "ring" || c.path_rx == "ring").count() as u64
        });
        if on_rings == 0 {
            println!("{} {name}: {} returned to TCP, where all stay", p.pid, connections(count));
            return true;
        }
        if Instant::now() >= until {
            println!(
                "{} {name}: {} of {} not on TCP yet: these return when their peers answer (`ringsock stat {}`)",
                p.pid,
                on_rings,
                connections(count.max(on_rings)),
                p.pid
            );
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn connections(n: u64) -> String {
    format!("{n} connection{}", if n == 1 { "" } else { "s" })
}
