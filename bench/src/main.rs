//! `rs-bench`: plain programs with and without ringsock, measured in pairs.
//!
//! Every case is run alternately plain and preloaded, in fresh processes, over loopback. What the
//! library itself reports proves that bytes went over rings, or did not. `--verbs` makes the table of the `verbs`
//! link instead, on a host (or in a machine of `ci/rdma-vm`) that has an RDMA device; `--calls` counts instructions of
//! single calls there.

mod run;
mod table;

use ringsock_bench::work::Job;
use run::{Case, Expect, Preload, Setting};
use serde_json::{json, Value};
use std::path::PathBuf;

const USAGE: &str =
    "usage: rs-bench [--lib PATH] [--rounds N] [--quick] [--only NAME] [--json FILE] [--verbs] [--calls]";

fn die(text: &str) -> ! {
    eprintln!("rs-bench: {text}");
    std::process::exit(2)
}

fn cases(quick: bool) -> Vec<Case> {
    let n = |full: usize| if quick { full / 8 } else { full };
    let job = |kind: &str, size, count, warm| Job { kind: kind.into(), size, count: n(count), warm };
    let case = |name: &str, job: Job, preload, expect, metrics| Case {
        name: name.into(),
        job,
        preload,
        expect,
        metrics,
        runs: 1,
        busy: false,
    };
    let trip: &[_] = &[("median", "us", false), ("p99", "us", false), ("cpu", "CPU s/M msg", false)];
    let flow: &[_] = &[("rate", "msg/s", true), ("bytes", "MB/s", true), ("cpu", "CPU s/M msg", false)];
    // The lower decile is what a connection takes when nothing else comes in between.
    let conn: &[_] =
        &[("rate", "conn/s", true), ("best", "us", false), ("median", "us", false), ("cpu", "CPU s/M conn", false)];
    let setup = |kind: &str| job(kind, 64, 4000, 200);
    let often = |c: Case| Case { runs: 4, ..c };
    // The same programs are at times beside busy ones and at times not, as the kernel likes.
    let beside = |c: Case| Case { runs: 4, busy: true, ..c };
    let busy: &[_] = &[("rate", "trips/s", true), ("p99", "us", false), ("cpu", "CPU s/M msg", false)];
    let call: &[_] = &[
        ("write", "ns", false),
        ("read", "ns", false),
        ("pair", "ns", false),
        ("poll", "ns", false),
        ("epoll", "ns", false),
    ];
    use Expect::{Any, Ring, Tcp};
    use Preload::{Both, Client, NoLinks, Server};
    let mut v = vec![
        case("pingpong 64", job("pingpong", 64, 80_000, 2000), Both, Ring, trip),
        case("pingpong 64 epoll", job("epoll", 64, 80_000, 2000), Both, Ring, trip),
        beside(case("pingpong 64, busy", job("pingpong", 64, 160_000, 2000), Both, Ring, busy)),
        beside(case("pingpong 64 epoll, busy", job("epoll", 64, 160_000, 2000), Both, Ring, busy)),
        case("pingpong 16K", job("pingpong", 16 << 10, 20_000, 2000), Both, Ring, trip),
        case("stream 8", job("stream", 8, 4_000_000, 2000), Both, Ring, flow),
        case("stream 1K", job("stream", 1 << 10, 2_000_000, 2000), Both, Ring, flow),
        case("stream 64K", job("stream", 64 << 10, 80_000, 2000), Both, Ring, flow),
        often(case("set-up", setup("setup"), Both, Any, conn)),
        often(case("set-up, 1 processor", setup("setup-one"), Both, Any, conn)),
        case("other fds", job("call", 1, 2_000_000, 0), Both, Any, call),
    ];
    for (name, p) in [("links none", NoLinks), ("client only", Client), ("server only", Server)] {
        v.push(case(&format!("pingpong 64, {name}"), job("pingpong", 64, 80_000, 2000), p, Tcp, trip));
        v.push(case(&format!("stream 1K, {name}"), job("stream", 1 << 10, 2_000_000, 2000), p, Tcp, flow));
        // How fast this is by TCP differs by a quarter from one run of the very same to the next.
        let large = case(&format!("stream 64K, {name}"), job("stream", 64 << 10, 160_000, 2000), p, Tcp, flow);
        v.push(Case { runs: 2, ..large });
    }
    v.push(often(case("set-up, links none", setup("setup"), NoLinks, Tcp, conn)));
    v
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Some(code) = ringsock_bench::program(&words) {
        std::process::exit(code);
    }
    let (mut lib, mut rounds, mut quick, mut only, mut json_file) = (None, None, false, String::new(), None);
    let (mut verbs, mut calls) = (false, false);
    let mut it = words.into_iter();
    while let Some(w) = it.next() {
        let mut value = || it.next().unwrap_or_else(|| die(&format!("{w} wants a value")));
        match w.as_str() {
            "--lib" => lib = Some(PathBuf::from(value())),
            "--rounds" => rounds = value().parse().ok().filter(|&n: &usize| n > 0),
            "--quick" => quick = true,
            "--verbs" => verbs = true,
            "--calls" => calls = true,
            "--only" => only = value(),
            "--json" => json_file = Some(value()),
            _ => die(USAGE),
        }
    }
    let lib = lib.unwrap_or_else(|| {
        let exe = std::env::current_exe().unwrap_or_else(|e| die(&e.to_string()));
        exe.with_file_name("libringsock.so")
    });
    let lib = lib.canonicalize().unwrap_or_else(|e| die(&format!("{}: {e}", lib.display())));
    let setting = Setting::new(lib).unwrap_or_else(|e| die(&e));
    if verbs || calls {
        let mut made = Ok(Vec::new());
        if verbs {
            made = table::rows(&setting, &only);
        }
        if calls {
            made = made.and_then(|mut rows| {
                rows.extend(table::calls(&setting)?);
                Ok(rows)
            });
        }
        setting.clean();
        let rows = made.unwrap_or_else(|e| die(&e));
        if let Some(f) = json_file {
            std::fs::write(&f, format!("{:#}\n", json!(rows))).unwrap_or_else(|e| die(&format!("{f}: {e}")));
        }
        return;
    }
    let rounds = rounds.unwrap_or(if quick { 2 } else { 5 });
    let (mut rows, mut bad) = (Vec::new(), 0);
    run::print_head();
    for c in cases(quick).into_iter().filter(|c| c.name.contains(&only)) {
        match run::measure(&c, &setting, rounds) {
            Ok(v) => rows.extend(v),
            Err(e) => {
                println!("{}: FAILED: {e}", c.name);
                rows.push(json!({ "case": c.name, "failed": e }));
                bad += 1;
            }
        }
    }
    setting.clean();
    if let Some(f) = json_file {
        let cores = std::thread::available_parallelism().map_or(0, |n| n.get());
        let all: Value = json!({ "rounds": rounds, "quick": quick, "cores": cores, "rows": rows });
        std::fs::write(&f, format!("{all:#}\n")).unwrap_or_else(|e| die(&format!("{f}: {e}")));
    }
    std::process::exit((bad > 0) as i32);
}
