//! The RDMA table: what sockets do over TCP, over rsocket and over the `verbs` link, beside a queue pair alone.

use crate::run::{once_under, rsocket, Case, Expect, Preload, Setting};
use ringsock_bench::counts::inclusive;
use ringsock_bench::work::{Job, COUNTED};
use serde_json::{json, Value};

fn case(kind: &str, size: usize, count: usize, preload: Preload) -> Case {
    let job = Job { kind: kind.into(), size, count, warm: WARM };
    let expect = if preload == Preload::Verbs { Expect::Ring } else { Expect::Any };
    Case { name: String::new(), job, preload, expect, metrics: &[], runs: 1, busy: false }
}

/// Long enough for the link to be there before anything is measured.
const WARM: usize = 6_000;

/// Streams: as many bytes that what a ring costs that grows does not matter.
const ROWS: [(&str, usize, usize, &str, &str); 5] = [
    ("pingpong", 64, 4_000, "median", "us"),
    ("pingpong", 16 << 10, 1_000, "median", "us"),
    ("stream", 64, 25_000, "bytes", "MB/s"),
    ("stream", 1 << 10, 20_000, "bytes", "MB/s"),
    ("stream", 64 << 10, 1_600, "bytes", "MB/s"),
];

/// The rows whose names contain `only`, printed and as JSON.
pub fn rows(s: &Setting, only: &str) -> Result<Vec<Value>, String> {
    let heads = ["kernel TCP", "rsocket", "write + send", "with imm", "ringsock", "of raw"];
    println!("{:<22} {}", "", heads.map(|h| format!("{h:>14}")).concat());
    let mut rows = Vec::new();
    for (kind, size, count, metric, unit) in ROWS {
        let name = format!("{kind} {size}, {unit}");
        if !name.contains(only) {
            continue;
        }
        let one = |kind: String, preload: Preload, second: bool| -> Result<f64, String> {
            let c = case(&kind, size, count, preload);
            once_under(&[], &c, s, second)?[metric].as_f64().ok_or(format!("no {metric}"))
        };
        let tcp = one(kind.into(), Preload::Both, false)?;
        // Streams of others take minutes here: only their trips are looked at.
        let trips = kind == "pingpong";
        let theirs = if trips && rsocket().is_some() { Some(one(kind.into(), Preload::Rsocket, true)?) } else { None };
        let send = if trips { Some(one(format!("send-{kind}"), Preload::Both, false)?) } else { None };
        let raw = one(format!("raw-{kind}"), Preload::Both, false)?;
        let ours = one(kind.into(), Preload::Verbs, true)?;
        let text = |t: Option<f64>| t.map_or("-".into(), |t| format!("{t:.1}"));
        let (a, b) = (text(theirs), text(send));
        println!("{name:<22} {tcp:>14.1}{a:>14}{b:>14}{raw:>14.1}{ours:>14.1}{:>14.2}", ours / raw);
        rows.push(json!({
            "kind": kind, "size": size, "unit": unit, "tcp": tcp, "rsocket": theirs, "send": send, "raw": raw,
            "ringsock": ours,
        }));
    }
    Ok(rows)
}

/// What a message of 64 bytes costs each end in user space when many are sent in a row, in ns, by the processes' clocks: in a
/// machine whose clock counts instructions, that many. What is gathered by the clock is, which under valgrind nothing is.
fn in_a_row(s: &Setting, p: Preload, count: usize) -> Result<[f64; 2], String> {
    let v = once_under(&[], &case("stream", 64, count, p), s, true)?;
    let ns = |k: &str| v[k].as_f64().map(|t| t * 1e9 / count as f64).ok_or(format!("no {k}"));
    Ok([ns("user")?, ns("user of the server")?])
}

/// Instructions in user space of one `send` and one `recv` of 64 bytes, counted by callgrind: ours and rsocket's. Messages are
/// exchanged one by one, or sent in a row; and these as [`in_a_row`] has them, too.
pub fn calls(s: &Setting) -> Result<Vec<Value>, String> {
    const COUNT: usize = 1000;
    let count = |kind: &str, p: Preload| -> Result<[f64; 2], String> {
        let file = s.file("callgrind");
        let under = ["valgrind", "-q", "--tool=callgrind", &format!("--callgrind-out-file={}", file.display())];
        let mut c = case(kind, 64, COUNT, p);
        // A thread that has much to do keeps the library's own from running under valgrind: the pauses are for that one.
        c.job.warm = 50;
        c.expect = Expect::Any;
        let v = once_under(&under.map(String::from), &c, s, true)?;
        let ring = v["ring"].as_u64().unwrap_or(0);
        if p == Preload::Verbs && ring < (2 * 64 * COUNT) as u64 {
            return Err(format!("only {ring} bytes went over rings: not the calls that were to be counted"));
        }
        let text = std::fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        Ok(COUNTED.map(|f| inclusive(&text, f) as f64 / COUNT as f64))
    };
    let mut rows = Vec::new();
    for (kind, how) in [("counted", "exchanged"), ("counted-stream", "in a row")] {
        let ours = count(kind, Preload::Verbs)?;
        let theirs = if rsocket().is_some() { Some(count(kind, Preload::Rsocket)?) } else { None };
        println!("instructions in user space, 64 bytes {how}: send {:.0}, recv {:.0}", ours[0], ours[1]);
        if let Some(t) = theirs {
            println!("the same with rsocket: send {:.0}, recv {:.0}", t[0], t[1]);
        }
        rows.push(json!({ "kind": kind, "size": 64, "unit": "instructions", "ringsock": ours, "rsocket": theirs }));
    }
    let ours = in_a_row(s, Preload::Verbs, 2_000_000)?;
    let theirs = if rsocket().is_some() { Some(in_a_row(s, Preload::Rsocket, 40_000)?) } else { None };
    println!(
        "time in user space, a message of 64 bytes in a row: sender {:.0} ns, receiver {:.0} ns",
        ours[0], ours[1]
    );
    if let Some(t) = theirs {
        println!("the same with rsocket: sender {:.0} ns, receiver {:.0} ns", t[0], t[1]);
    }
    rows.push(json!({ "kind": "stream", "size": 64, "unit": "ns in user space", "ringsock": ours, "rsocket": theirs }));
    Ok(rows)
}
