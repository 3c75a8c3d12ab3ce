//! `ringsock stat`: live connections of preloaded processes.

use crate::library::maps_library;
use crate::state::{self, Missing, Process, Totals};
use crate::table;
use std::fs;
use std::process::ExitCode;
use std::time::Duration;

/// Options of `ringsock stat`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringsock stat                  every preloaded process that you may look at
  ringsock stat 1234             one process
  ringsock stat --watch 1        again every second
  ringsock stat --json | jq '.[].totals'

Bytes are of both paths: RING is what went over rings, TCP what the kernel carried.
Other users' processes are shown to root only.")]
pub struct Args {
    /// Print a JSON array of processes
    #[arg(long)]
    json: bool,
    /// Print again every SECS seconds, until interrupted
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    watch: Option<f64>,
    /// Only this process
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.1..=86400.0).contains(&s) => Ok(s),
        _ => Err("expected 0.1 to 86400 seconds".into()),
    }
}

/// Runs it.
pub fn run(args: &Args) -> Result<ExitCode, String> {
    let Some(every) = args.watch else { return once(args) };
    loop {
        if !args.json && std::io::IsTerminal::is_terminal(&std::io::stdout()) {
            print!("\x1b[H\x1b[2J");
        }
        let code = once(args)?;
        if code != ExitCode::SUCCESS && args.pid.is_some() {
            return Ok(code);
        }
        std::thread::sleep(Duration::from_secs_f64(every));
    }
}

fn once(args: &Args) -> Result<ExitCode, String> {
    let mut notes = Vec::new();
    let found = match args.pid {
        Some(pid) => match state::of(pid) {
            Ok(p) => vec![p],
            Err(m) => return Err(explain(pid, &m)),
        },
        None => all(&mut notes),
    };
    if args.json {
        println!("{}", serde_json::to_string(&found).map_err(|e| e.to_string())?);
    } else {
        print!("{}", text(&found));
    }
    for note in notes {
        eprintln!("{note}");
    }
    Ok(ExitCode::SUCCESS)
}

fn all(notes: &mut Vec<String>) -> Vec<Process> {
    let (mut found, mut denied) = (Vec::new(), 0);
    for pid in state::pids() {
        match state::of(pid) {
            Ok(p) => found.push(p),
            Err(Missing::Denied) => denied += 1,
            Err(Missing::Foreign(why)) => notes.push(format!("ringsock: process {pid}: {why}")),
            Err(Missing::Gone | Missing::NoState) => {}
        }
    }
    if found.is_empty() {
        notes.push("No preloaded process was found. Start programs with `ringsock run -- PROGRAM`.".into());
        if denied > 0 {
            notes.push(format!(
                "{denied} processes of other users could not be looked at; run this as root to see them."
            ));
        }
    }
    found
}

/// Why one process has nothing to show, and what to do.
pub fn explain(pid: u32, missing: &Missing) -> String {
    match missing {
        Missing::Gone => format!("there is no process {pid}"),
        Missing::Denied => format!("process {pid} is another user's; run this as that user or as root"),
        Missing::Foreign(why) => format!("the state of process {pid} cannot be read: {why}"),
        Missing::NoState => match fs::read_to_string(format!("/proc/{pid}/maps")) {
            Ok(maps) if maps_library(&maps).is_some() => format!(
                "process {pid} has the library, but no state: it is switched off for it (RINGSOCK_LINKS, RINGSOCK_RULES), \
                 or it is a forked child without connections of its own"
            ),
            _ => format!("process {pid} is not preloaded; start it with `ringsock run -- PROGRAM`"),
        },
    }
}

/// An address, if it has been looked at.
fn known(end: &str) -> String {
    if end == "[::]:0" { "-" } else { end }.into()
}

fn path(tx: &str, rx: &str) -> String {
    if tx == rx {
        tx.into()
    } else {
        format!("{tx}/{rx}")
    }
}

fn text(processes: &[Process]) -> String {
    let mut out = String::new();
    for p in processes {
        let Totals { connections, upgraded, upgrades, returns, .. } = p.totals;
        if !out.is_empty() {
            out.push('\n');
        }
        out += &format!(
            "{} {}: {} open, {connections} ever, {upgraded} upgraded ({upgrades} upgrades, {returns} returns), {} of {} on rings\n",
            p.pid,
            clean(&p.program),
            p.connections.len(),
            table::share(p.totals.ring(), p.totals.all()),
            table::bytes(p.totals.all()),
        );
        out += &table::reasons("never left TCP", &p.totals.stayed, 2);
        out += &table::reasons("returned to it", &p.totals.returned, 2);
        if p.connections.is_empty() {
            continue;
        }
        let rows: Vec<Vec<String>> = p
            .connections
            .iter()
            .map(|c| {
                vec![
                    known(&c.local),
                    known(&c.peer),
                    c.link.clone().unwrap_or_else(|| "-".into()),
                    path(&c.path_tx, &c.path_rx),
                    table::bytes(c.tx_bytes_ring),
                    table::bytes(c.rx_bytes_ring),
                    table::bytes(c.tx_bytes_tcp),
                    table::bytes(c.rx_bytes_tcp),
                    c.why.clone().unwrap_or_default(),
                ]
            })
            .collect();
        let right = ["TX RING", "RX RING", "TX TCP", "RX TCP"];
        let head = ["LOCAL", "PEER", "LINK", "PATH", right[0], right[1], right[2], right[3], "WHY ON TCP"];
        out += &table::format(&head, &rows, &right);
    }
    out
}

/// A name that another process chose, without what could drive a terminal.
pub fn clean(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Connection;

    #[test]
    fn a_table_of_one_process() {
        let c = Connection {
            local: "127.0.0.1:6379".into(),
            peer: "127.0.0.1:5000".into(),
            link: Some("shm".into()),
            path_tx: "ring".into(),
            path_rx: "tcp".into(),
            tx_bytes_tcp: 10,
            tx_bytes_ring: 2048,
            rx_bytes_tcp: 0,
            rx_bytes_ring: 0,
            upgrades: 1,
            returns: 0,
            why: Some("looking for the peer".into()),
        };
        let totals =
            Totals { connections: 2, upgraded: 1, tx_bytes_ring: 2048, tx_bytes_tcp: 2048, ..Totals::default() };
        let new = Connection { local: "[::]:0".into(), peer: "[::]:0".into(), link: None, ..c.clone() };
        let totals = Totals {
            stayed: [("a few".into(), 1), ("most".into(), 2)].into(),
            returned: [("one".into(), 1)].into(),
            ..totals
        };
        let p = Process { pid: 1, program: "re\x1bdis".into(), connections: vec![c, new], totals };
        let t = text(&[p]);
        assert!(
            t.starts_with("1 re?dis: 2 open, 2 ever, 1 upgraded (0 upgrades, 0 returns), 50.0% of 4.0 KiB on rings\n"),
            "{t}"
        );
        assert!(t.contains(
            "never left TCP:\n         2  most\n         1  a few\n  returned to it:\n         1  one\nLOCAL "
        ));
        assert!(!t.contains("[::]") && t.contains("\n-               -  "), "{t}");
        assert!(t.contains("ring/tcp") && t.contains("2.0 KiB") && t.trim_end().ends_with("looking for the peer"));
    }

    #[test]
    fn reasons_say_what_to_do() {
        assert!(explain(std::process::id(), &Missing::NoState).contains("ringsock run"));
        assert!(explain(1, &Missing::Denied).contains("root"));
        assert!(seconds("0").is_err() && seconds("x").is_err() && seconds("0.5") == Ok(0.5));
    }
}
