//! Random programs of socket calls, run on plain TCP and preloaded: what comes of every call must be the same.
//!
//! A program is a list of numbers. Each number stands for a step (one call, or a few that belong together), which is
//! chosen by it among those whose outcome the kernel determines in the state that the steps before have led to. The
//! calls are made by *actors*, threads of several processes, one at a time, as a *conductor* tells them; the trace of
//! a program is what came of each call.

mod actor;
mod calls;
mod conductor;
mod driver;
mod images;
mod model;
mod sets;
mod steps;
mod wire;

use crate::args::Args;
use crate::prng::{mix, Rng};
use conductor::{Done, Run, Stop};

/// `programs [--seed S] [--count N] [--one K [--keep LIST] [--verbose]] [--these LIST] [--lib PATH] [--native-twice]
/// [--steps N] [--without KINDS] [--images] [--counted] [--jobs N] [--known PERCENT] [--warm N]`.
///
/// Runs `--count` programs from number `--seed` on, natively and with the library preloaded, and compares. A program
/// that differs is made as short as possible. `--one` runs a single program and shows both traces; `--keep` has the
/// steps to do (as `3,5-9`). `--these` runs single programs, each `--times` times. `--native-twice` does without the library:
/// what differs then is the generator's fault. Up to `--known` percent that differ are counted as skipped, but never a hang, a
/// death or wrong bytes. `--without` leaves out kinds of steps (as `fork,pass`). With `--images` there are steps in which a process
/// starts another program, or becomes one, that goes on with what it has inherited (these are other programs). With `--counted` connections have `TCP_INQ`. A connection that is preloaded first exchanges
/// messages until it has left TCP, but no more than `--warm` (60).
pub fn run(a: &Args) -> i32 {
    if a.has("counted") {
        calls::count();
    }
    if a.has("actor") {
        actor::process(a.num("actor", 0) as usize)
    } else if a.has("worker") {
        worker(a)
    } else {
        driver::run(a)
    }
}

/// A kind of step: its name, its weight, and what it does.
type Kind = (&'static str, u64, fn(&mut Run, &mut Rng) -> Done);

const KINDS: &[Kind] = &[
    ("send", 22, Run::do_send),
    ("recv", 22, Run::do_recv),
    ("shutdown", 3, Run::do_shutdown),
    ("close", 5, Run::do_close),
    ("dup", 5, Run::do_dup),
    ("poll", 14, Run::do_poll),
    ("option", 9, Run::do_option),
    ("other", 4, Run::do_other),
    ("connect", 2, Run::do_connect),
    ("sleep", 9, Run::do_sleep),
    ("signal", 3, Run::do_signal),
    ("fill", 1, Run::do_fill),
    ("epoll", 8, Run::do_epoll_ctl),
    ("wait", 8, Run::do_epoll_wait),
    ("fork", 3, Run::do_fork),
    ("pass", 1, Run::do_pass),
    ("splice", 1, Run::do_splice),
];

/// What `--images` adds.
const IMAGES: &[Kind] = &[("image", 6, Run::do_image)];

/// How a program is run.
struct How {
    /// Most messages of the warm-up.
    warm: i64,
    /// The steps to do; all, if empty.
    keep: Vec<usize>,
    /// Kinds of steps not to do.
    without: Vec<String>,
    /// Steps of a program; 0: between 15 and 70.
    steps: usize,
    /// Kinds of steps there are.
    kinds: Vec<Kind>,
}

/// The numbers in a list such as `3,5-9`.
fn numbers(list: &str) -> Vec<usize> {
    let mut v = Vec::new();
    for part in list.split(',').filter(|p| !p.is_empty()) {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(a), Ok(b)) = (a.parse::<usize>(), b.parse::<usize>()) {
            v.extend(a..=b);
        }
    }
    v
}

/// Runs programs one after the other and writes their traces to stdout, for the driver.
fn worker(a: &Args) -> i32 {
    let (seed, count) = (a.num("seed", 1), a.num("count", 1));
    let how = How {
        warm: a.num("warm", 3) as i64,
        keep: numbers(&a.text("keep", "")),
        without: a.text("without", "").split(',').map(str::to_string).collect(),
        steps: a.num("steps", 0) as usize,
        kinds: [KINDS, if a.has("images") { IMAGES } else { &[] }].concat(),
    };
    let reports = std::env::var("RINGSOCK_REPORT").unwrap_or_default();
    for k in seed..seed + count {
        println!("P {k}");
        flush();
        let (trace, pids) = match program(k, &how) {
            Ok(v) => v,
            Err(e) => (vec![format!("cannot begin: {}", crate::sys::strerror(e))], vec![]),
        };
        for t in trace {
            println!("T {t}");
        }
        println!("E {}", upgraded(&reports, &pids));
        flush();
    }
    0
}

fn flush() {
    use std::io::Write;
    let _ = std::io::stdout().flush();
}

/// How many connections the reports of processes show as upgraded. The reports are removed.
fn upgraded(pattern: &str, pids: &[i64]) -> u64 {
    let mut n = 0;
    for pid in pids {
        let path = pattern.replace("%p", &pid.to_string());
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let _ = std::fs::remove_file(&path);
        if let Some(i) = text.rfind("\"upgraded\":") {
            let digits: String = text[i + 11..].trim_start().chars().take_while(|c| c.is_ascii_digit()).collect();
            n += digits.parse::<u64>().unwrap_or(0);
        }
    }
    n
}

/// Runs one program: its trace, and the ids of its first processes.
fn program(k: u64, how: &How) -> crate::sys::R<(Vec<String>, Vec<i64>)> {
    let mut rng = Rng::new(mix(k));
    let steps = if how.steps > 0 { how.steps } else { 15 + rng.below(56) as usize };
    let mut run = Run::new(k, how.warm)?;
    let mut clean = true;
    for i in 0..steps {
        if !how.keep.is_empty() && !how.keep.contains(&i) {
            continue;
        }
        run.step = i;
        // A step's choice depends on its own number only, not on how many there were before.
        let mut rng = Rng::new(mix(k).wrapping_add(mix(i as u64 + 1)));
        if let Err(Stop(why)) = step(&mut run, i, &mut rng, how) {
            if why != "stopped" {
                run.note(why);
            }
            clean = false;
            break;
        }
    }
    if clean {
        run.step = steps;
        if let Err(Stop(why)) = run.settle() {
            run.note(why);
            clean = false;
        }
    }
    let pids = run.end(clean);
    Ok((run.trace, pids))
}

fn step(run: &mut Run, i: usize, rng: &mut Rng, how: &How) -> Result<(), Stop> {
    if run.model.ends.is_empty() {
        run.do_connect(rng)?;
        return Ok(());
    }
    if i == 1 && rng.below(2) == 0 {
        run.do_connect(rng)?;
        return Ok(());
    }
    let total: u64 = how.kinds.iter().map(|k| k.1).sum();
    for _ in 0..6 {
        let mut at = rng.below(total);
        let kind = how.kinds.iter().find(|k| {
            let hit = at < k.1;
            at = at.wrapping_sub(k.1);
            hit
        });
        let Some((name, _, f)) = kind else { continue };
        if how.without.iter().any(|w| w == name) {
            continue;
        }
        // Several sends may follow each other; whatever looks at an end must find it at rest.
        if *name != "send" || rng.below(3) == 0 {
            run.settle()?;
        }
        if f(run, rng)? {
            break;
        }
    }
    run.sleepers()?;
    if rng.below(4) > 0 {
        run.settle()?;
    }
    Ok(())
}
