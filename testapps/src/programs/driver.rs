//! The driver: runs programs natively and preloaded, compares, and makes what differs short.

use crate::args::Args;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Programs that one worker runs before it ends.
const BATCH: u64 = 50;
/// How long one program may take.
const LIMIT: Duration = Duration::from_secs(40);

/// What came of one program.
#[derive(Clone, Default, PartialEq)]
struct Outcome {
    trace: Vec<String>,
    upgraded: u64,
}

/// How the driver runs programs.
#[derive(Clone)]
struct Setup {
    lib: PathBuf,
    dir: PathBuf,
    pass: Vec<String>,
    warm: String,
    native_twice: bool,
}

/// Runs programs in one worker (and further ones, if it dies): the outcome of each.
fn batch(s: &Setup, preload: bool, from: u64, count: u64, keep: &str) -> BTreeMap<u64, Outcome> {
    let mut all = BTreeMap::new();
    let mut next = from;
    while next < from + count {
        let exe = std::env::current_exe().expect("the path of this program");
        let mut c = Command::new(exe);
        c.args(["programs", "--worker", "--seed", &next.to_string(), "--count", &(from + count - next).to_string()]);
        c.args(&s.pass);
        if !keep.is_empty() {
            c.args(["--keep", keep]);
        }
        c.env_remove("LD_PRELOAD");
        if preload {
            c.args(["--warm", &s.warm]);
            c.env("LD_PRELOAD", &s.lib).env("RINGSOCK_REPORT", s.dir.join("r.%p.json"));
            if std::env::var_os("RINGSOCK_UPGRADE_AFTER").is_none() {
                c.env("RINGSOCK_UPGRADE_AFTER", "1");
            }
        }
        c.stdin(Stdio::null()).stdout(Stdio::piped());
        std::os::unix::process::CommandExt::process_group(&mut c, 0);
        let mut child = c.spawn().expect("a worker");
        let (tell, told) = mpsc::channel();
        let out = BufReader::new(child.stdout.take().expect("its output"));
        let reader = std::thread::spawn(move || {
            for line in out.lines() {
                let Ok(line) = line else { return };
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        let mut now: Option<(u64, Outcome)> = None;
        let ended = loop {
            match told.recv_timeout(LIMIT) {
                Ok(line) => match (line.get(..2), line.get(2..).unwrap_or("")) {
                    (Some("P "), k) => now = Some((k.parse().unwrap_or(next), Outcome::default())),
                    (Some("T "), t) => {
                        if let Some((_, o)) = &mut now {
                            o.trace.push(t.to_string());
                        }
                    }
                    (Some("E "), n) => {
                        if let Some((k, mut o)) = now.take() {
                            o.upgraded = n.parse().unwrap_or(0);
                            next = k + 1;
                            all.insert(k, o);
                        }
                    }
                    _ => {}
                },
                Err(mpsc::RecvTimeoutError::Disconnected) => break "the worker ended in the middle",
                Err(mpsc::RecvTimeoutError::Timeout) => break "the worker hangs",
            }
        };
        // SAFETY: the group was made for this worker, and its leader has not been waited for.
        unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
        let _ = child.wait();
        drop(told);
        let _ = reader.join();
        if next < from + count {
            let (k, mut o) = now.take().unwrap_or((next, Outcome::default()));
            o.trace.push(ended.to_string());
            all.insert(k, o);
            next = k + 1;
        }
    }
    all
}

fn one(s: &Setup, preload: bool, k: u64, keep: &[usize]) -> Outcome {
    let keep: Vec<String> = keep.iter().map(|n| n.to_string()).collect();
    batch(s, preload, k, 1, &keep.join(",")).remove(&k).unwrap_or_default()
}

/// The first line in which two traces differ.
fn difference(a: &[String], b: &[String]) -> Option<usize> {
    if a == b {
        return None;
    }
    Some(a.iter().zip(b).position(|(x, y)| x != y).unwrap_or(a.len().min(b.len())))
}

/// The same, with what is wrong if that comes later, in one line.
fn in_a_line(native: &Outcome, loaded: &Outcome) -> String {
    let d = difference(&native.trace, &loaded.trace).unwrap_or(0);
    let at = |o: &Outcome| o.trace.get(d).map_or("nothing", |t| t.trim()).to_string();
    let sign = loaded.trace.iter().skip(d + 1).find(|t| is_bad(t)).map(|t| format!("; then {}", t.trim()));
    format!("{} / {}{}", at(native), at(loaded), sign.unwrap_or_default())
}

fn differs(s: &Setup, k: u64, keep: &[usize], tries: usize) -> Option<(Outcome, Outcome)> {
    for _ in 0..tries {
        let a = one(s, false, k, keep);
        let b = one(s, !s.native_twice, k, keep);
        if difference(&a.trace, &b.trace).is_some() {
            return Some((a, b));
        }
    }
    None
}

/// Leaves out steps as long as the two traces differ.
fn shrink(s: &Setup, k: u64, first: &(Outcome, Outcome)) -> Vec<usize> {
    let number = |t: &String| t.trim_start().split(' ').next().and_then(|n| n.parse::<usize>().ok());
    let until = |o: &(Outcome, Outcome)| {
        let d = difference(&o.0.trace, &o.1.trace).unwrap_or(0);
        let last = o.0.trace.get(d).and_then(number).or_else(|| o.1.trace.get(d).and_then(number));
        last.unwrap_or(usize::MAX - 1)
    };
    let mut keep: Vec<usize> = first.0.trace.iter().chain(&first.1.trace).filter_map(number).collect();
    keep.sort();
    keep.dedup();
    keep.retain(|n| *n <= until(first));
    let mut budget = 120;
    let mut size = keep.len() / 2;
    while size > 0 {
        let mut at = 0;
        while at < keep.len() && budget > 0 {
            let mut less = keep.clone();
            less.drain(at..(at + size).min(keep.len()));
            budget -= 1;
            match differs(s, k, &less, 2) {
                Some(d) if !less.is_empty() => {
                    keep = less;
                    keep.retain(|n| *n <= until(&d));
                }
                _ => at += size,
            }
        }
        size /= 2;
    }
    keep
}

fn show(s: &Setup, a: &Outcome, b: &Outcome, around: usize) {
    let d = difference(&a.trace, &b.trace).unwrap_or(a.trace.len());
    let second = if s.native_twice { "again " } else { "loaded" };
    for (i, t) in a.trace.iter().enumerate().take(d).skip(d.saturating_sub(around)) {
        println!("  {i:3}        {t}");
    }
    for (name, o) in [("native", a), (second, b)] {
        for (i, t) in o.trace.iter().enumerate().skip(d).take(3) {
            println!("  {i:3} {name} {t}");
        }
    }
}

/// The subcommand, but for the worker.
pub fn run(a: &Args) -> i32 {
    let exe = std::env::current_exe().expect("the path of this program");
    let beside = exe.parent().map(|d| d.join("libringsock.so")).unwrap_or_default();
    let dir = std::env::temp_dir().join(format!("rs-programs.{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder for reports");
    let mut pass = Vec::new();
    for name in ["steps", "without"] {
        if a.has(name) {
            pass.extend([format!("--{name}"), a.text(name, "")]);
        }
    }
    for name in ["images", "counted"] {
        if a.has(name) {
            pass.push(format!("--{name}"));
        }
    }
    let s = Setup {
        lib: PathBuf::from(a.text("lib", &beside.to_string_lossy())),
        dir: dir.clone(),
        pass,
        warm: a.text("warm", "60"),
        native_twice: a.has("native-twice"),
    };
    let code = match () {
        _ if a.has("one") => single(&s, a),
        _ if a.has("these") => these(&s, a),
        _ => many(&s, a),
    };
    let _ = std::fs::remove_dir_all(dir);
    code
}

fn single(s: &Setup, a: &Args) -> i32 {
    let (k, keep) = (a.num("one", 1), super::numbers(&a.text("keep", "")));
    let mut bad = 0;
    let times = a.num("times", 1);
    for _ in 0..times {
        let (x, y) = (one(s, false, k, &keep), one(s, !s.native_twice, k, &keep));
        let differ = difference(&x.trace, &y.trace).is_some();
        bad += differ as u64;
        if differ || times == 1 {
            println!("program {k}: {}, {} upgraded", if differ { "differs" } else { "same" }, y.upgraded);
            show(s, &x, &y, if a.has("verbose") { usize::MAX } else { 12 });
        }
    }
    println!("{} passed, {bad} failed", times - bad);
    (bad > 0) as i32
}

/// Single programs, each `--times` times. On a busy machine even what is most often determined may not be: what is seen without
/// the library, too, if only now and then, is no failure.
fn these(s: &Setup, a: &Args) -> i32 {
    /// How often the kernel is asked again.
    const AGAIN: usize = 10;
    let (mut passed, mut failed, mut open, mut upgraded, mut on_rings) = (0, 0, 0, 0, 0);
    for k in super::numbers(&a.text("these", "")).into_iter().map(|k| k as u64) {
        let mut natives = Vec::new();
        for _ in 0..a.num("times", 1) {
            let (x, y) = (one(s, false, k, &[]), one(s, !s.native_twice, k, &[]));
            upgraded += y.upgraded;
            on_rings += (y.upgraded > 0) as u64;
            natives.push(x.trace.clone());
            if x.trace == y.trace {
                passed += 1;
            } else if natives.contains(&y.trace) || (0..AGAIN).any(|_| one(s, false, k, &[]).trace == y.trace) {
                open += 1;
                println!("SKIP program {k}: so it is without the library, too, at times: {}", in_a_line(&x, &y));
            } else {
                failed += 1;
                println!("FAIL program {k}: {}", in_a_line(&x, &y));
            }
        }
    }
    println!("{upgraded} ends of connections were upgraded");
    if !s.native_twice && on_rings * 2 < passed + failed + open {
        println!("FAIL less than half of the programs had a connection on a ring: that is no test");
        failed += 1;
    }
    println!("{passed} passed, {failed} failed, {open} skipped");
    (failed > 0 || passed == 0) as i32
}

fn many(s: &Setup, a: &Args) -> i32 {
    let (from, count, jobs) = (a.num("seed", 1), a.num("count", 100), a.num("jobs", 2).max(1));
    let (mut passed, mut failed, mut hung, mut grave, mut upgraded, mut on_rings) =
        (0u64, 0u64, 0u64, 0u64, 0u64, 0u64);
    let mut next = from;
    let show_most = a.num("show", 10);
    while next < from + count {
        let rounds: Vec<(u64, u64)> = (0..jobs)
            .map(|j| (next + j * BATCH, BATCH.min((from + count).saturating_sub(next + j * BATCH))))
            .filter(|r| r.0 < from + count)
            .collect();
        next += jobs * BATCH;
        let threads: Vec<_> = rounds
            .into_iter()
            .map(|(k, n)| {
                let s = s.clone();
                std::thread::spawn(move || (batch(&s, false, k, n, ""), batch(&s, !s.native_twice, k, n, "")))
            })
            .collect();
        for t in threads {
            let (x, y) = t.join().expect("a batch");
            for (k, o) in x {
                let got = y.get(&k).cloned().unwrap_or_default();
                upgraded += got.upgraded;
                on_rings += (got.upgraded > 0) as u64;
                if difference(&o.trace, &got.trace).is_none() {
                    passed += 1;
                    continue;
                }
                if hangs_natively(&o, &got) {
                    hung += 1;
                    println!("SKIP program {k}: it hangs without the library: {}", in_a_line(&o, &got));
                    continue;
                }
                failed += 1;
                let is_grave = is_grave(&o, &got);
                grave += is_grave as u64;
                println!("FAIL program {k}: {}", in_a_line(&o, &got));
                if failed > show_most && !is_grave {
                    continue;
                }
                report(s, k, &(o, got), a.has("no-shrink"));
            }
        }
    }
    println!("{upgraded} ends of connections were upgraded, in {on_rings} programs");
    if !s.native_twice && on_rings * 2 < passed + failed {
        println!("FAIL less than half of the programs had a connection on a ring: that is no test");
        failed += 1;
    }
    // So many in a hundred may differ for reasons that are known.
    let known = (failed - grave).min(count * a.num("known", 0) / 100);
    failed -= known;
    println!("{passed} passed, {failed} failed, {} skipped", known + hung);
    (failed > 0 || passed == 0) as i32
}

/// Whether what differs is that without the library it hangs: the kernel does not wake a receive that has all it asked for, if
/// `SO_RCVLOWAT` is more than that. There is nothing to compare with.
fn hangs_natively(native: &Outcome, loaded: &Outcome) -> bool {
    let d = difference(&native.trace, &loaded.trace).unwrap_or(0);
    native.trace.get(d).is_some_and(|t| t.contains("HANG"))
}

/// Whether what differs is a hang, a death, bytes that are wrong or bytes that never came, and not so without the
/// library.
fn is_grave(native: &Outcome, loaded: &Outcome) -> bool {
    let bad = |o: &Outcome| o.trace.iter().any(|t| is_bad(t));
    bad(loaded) && !bad(native)
}

fn is_bad(line: &str) -> bool {
    const SIGNS: [&str; 6] = ["HANG", "DEAD", "the worker", "WRONG BYTES", "never came", "did not end"];
    SIGNS.iter().any(|s| line.contains(s))
}

fn report(s: &Setup, k: u64, found: &(Outcome, Outcome), as_is: bool) {
    show(s, &found.0, &found.1, 6);
    if as_is {
        return;
    }
    let Some(again) = differs(s, k, &[], 3) else {
        println!("  ... not in three more runs");
        return;
    };
    let keep = shrink(s, k, &again);
    let list: Vec<String> = keep.iter().map(|n| n.to_string()).collect();
    println!("  with steps {}:", list.join(","));
    if let Some((x, y)) = differs(s, k, &keep, 5) {
        show(s, &x, &y, 30);
    }
}
