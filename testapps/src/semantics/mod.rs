//! Exact socket semantics, one named check each.
//!
//! Every check has a process of its own, and ten seconds. It first warms its connection up.

mod apart;
mod asks;
mod badmem;
mod basic;
mod brief;
mod bulk;
mod cancel;
mod clones;
mod closing;
mod corks;
mod counted;
pub mod cx;
mod dialled;
mod ends;
mod environs;
mod family;
pub mod far;
mod faults;
mod found;
mod handlers;
mod heirs;
mod images;
mod jumps;
mod limits;
mod looks;
mod mains;
mod moves;
mod partial;
mod polling;
mod pool;
mod procs;
mod returns;
mod sequence;
mod sets;
mod signals;
mod stdio;
mod surface;
mod taken;
mod threads;
mod told;
mod unread;
mod uring;
mod waiting;

use crate::args::Args;
use crate::sys;
use cx::{Cx, Hosts, Op, Res, Why, LATE, UNTRIED};
use far::Far;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// A check: its name and what it does.
pub type Check = (&'static str, fn(&mut Cx) -> Res);

fn all() -> Vec<Check> {
    let lists = [
        basic::CHECKS,
        ends::CHECKS,
        brief::CHECKS,
        partial::CHECKS,
        polling::CHECKS,
        waiting::CHECKS,
        signals::CHECKS,
        handlers::CHECKS,
        jumps::CHECKS,
        looks::CHECKS,
        cancel::CHECKS,
        threads::CHECKS,
        apart::CHECKS,
        mains::CHECKS,
        clones::CHECKS,
        closing::CHECKS,
        pool::CHECKS,
        procs::CHECKS,
        asks::CHECKS,
        family::CHECKS,
        images::CHECKS,
        bulk::CHECKS,
        dialled::CHECKS,
        found::CHECKS,
        uring::CHECKS,
        surface::CHECKS,
        taken::CHECKS,
        corks::CHECKS,
        counted::CHECKS,
        environs::CHECKS,
        limits::CHECKS,
        unread::CHECKS,
        returns::CHECKS,
        sequence::CHECKS,
        sets::CHECKS,
        moves::CHECKS,
        heirs::CHECKS,
        stdio::CHECKS,
        told::CHECKS,
        badmem::CHECKS,
        faults::CHECKS,
    ];
    lists.concat()
}

/// What checks are run with.
struct Setting<'a> {
    args: &'a Args,
    /// Where puppets are, if in another machine.
    far: Option<Far>,
}

/// `semantics [--two|--puppets ADDRESS:PORT] [--accept] [--ring] [--only NAME] [--list] [--secs N] [--known NAMES]
/// [--skip NAMES] [--again N]`.
///
/// `--two`: the other end is in another process. `--puppets`: in another machine, where `puppets` listens. `--accept`: the end under test accepts.
/// `--ring`: a check fails if its connection does not leave TCP first. `--only` takes beginnings of names, with commas
/// between them. `--known`: checks that may fail. `--skip`: checks not to run. `--again`: a check that fails is tried so
/// many times more, and counts as skipped if it holds then; wrong bytes fail at once. What was merely late gets two more
/// tries, and passes if one is in time. What the kernel or the user does not let be tried counts as skipped, too.
pub fn run(a: &Args) -> i32 {
    let only = a.text("only", "");
    let skip = a.text("skip", "");
    let skips = |name: &str| skip.split(',').any(|s| s == name);
    let wanted = |name: &str| only.split(',').any(|o| name.starts_with(o));
    let checks: Vec<Check> = all().into_iter().filter(|c| wanted(c.0) && !skips(c.0)).collect();
    if a.has("list") {
        checks.iter().for_each(|c| println!("{}", c.0));
        return 0;
    }
    let is_preloaded = || std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("libringsock.so"));
    if a.has("ring") && !is_preloaded() {
        eprintln!("--ring: nothing can leave TCP where the library is not loaded: LD_PRELOAD=.../libringsock.so");
        return 2;
    }
    // Checks that are known to fail are run and told of all the same, and counted as skipped.
    let known = a.text("known", "");
    let (mut good, mut bad, mut skipped) = (0, 0, skip.split(',').filter(|s| !s.is_empty()).count() as i32);
    let far = a.has("puppets").then(|| Far::new(&a.text("puppets", ""))).transpose();
    let at = match far {
        Ok(far) => Setting { args: a, far },
        Err(Why(w)) => {
            eprintln!("rs-app: {w}");
            return 2;
        }
    };
    for (name, f) in checks {
        let mut result = in_time(name, f, &at);
        for _ in 0..a.num("again", 0) {
            match &result {
                Err(Why(w))
                    if !w.contains("differs") && !w.starts_with(UNTRIED) && !known.split(',').any(|k| k == name) =>
                {
                    println!("AGAIN {name}: {w}");
                    let next = in_time(name, f, &at);
                    if next.is_ok() {
                        skipped += 1;
                        good -= 1;
                    }
                    result = next;
                }
                _ => break,
            }
        }
        match result {
            Err(Why(w)) if w.starts_with(UNTRIED) => {
                skipped += 1;
                println!("SKIP {name}: {w}");
            }
            Err(Why(w)) if known.split(',').any(|k| k == name) => {
                skipped += 1;
                println!("KNOWN {name}: {w}");
            }
            Ok(()) => {
                good += 1;
                println!("PASS {name}");
            }
            Err(Why(w)) => {
                bad += 1;
                println!("FAIL {name}: {w}");
            }
        }
    }
    if let Some(far) = at.far {
        far.end();
    }
    println!("{good} passed, {bad} failed, {skipped} skipped");
    (bad > 0 || good == 0) as i32
}

/// Runs one check, up to three times as long as it is merely late.
fn in_time(name: &str, f: fn(&mut Cx) -> Res, at: &Setting) -> Res {
    for _ in 0..2 {
        match apart(f, at) {
            Err(Why(w)) if w.starts_with(LATE) => println!("AGAIN {name}: {w}"),
            result => return result,
        }
    }
    apart(f, at)
}

/// Runs one check in a process of its own.
fn apart(f: fn(&mut Cx) -> Res, at: &Setting) -> Res {
    use std::io::Write;
    std::io::stdout().flush().map_err(|e| Why(e.to_string()))?;
    let (rd, wr) = sys::pipe()?;
    let pid = sys::fork()?;
    if pid == 0 {
        sys::end_with_parent();
        let code = match child(f, at) {
            Ok(()) => 0,
            Err(Why(w)) => {
                let _ = sys::write(wr, w.as_bytes());
                1
            }
        };
        sys::exit(code);
    }
    sys::close(wr)?;
    let limit = Instant::now() + Duration::from_secs(at.args.num("secs", 10));
    let mut hung = false;
    let status = loop {
        if let Some(st) = sys::waitpid_now(pid)? {
            break st;
        }
        if Instant::now() >= limit {
            hung = true;
            sys::kill(pid, libc::SIGKILL)?;
            break sys::waitpid(pid)?;
        }
        std::thread::sleep(Duration::from_micros(500));
    };
    let mut text = [0; 4096];
    // A grandchild may still hold the pipe, so nothing waits for its end here.
    sys::nonblock(rd, true)?;
    let n = sys::read(rd, &mut text).unwrap_or(0);
    sys::close(rd)?;
    let said = String::from_utf8_lossy(&text[..n]).into_owned();
    if hung {
        Err(Why(format!("hung {said}")))
    } else if libc::WIFSIGNALED(status) {
        Err(Why(format!("killed by signal {} {said}", libc::WTERMSIG(status))))
    } else if status != 0 || n > 0 {
        Err(Why(if n > 0 { said } else { format!("exit code {}", libc::WEXITSTATUS(status)) }))
    } else {
        Ok(())
    }
}

fn child(f: fn(&mut Cx) -> Res, at: &Setting) -> Res {
    let a = at.args;
    let (mut pid, mut hosts) = (0, Hosts::here());
    let mine = if let Some(far) = &at.far {
        hosts = far.hosts;
        far.call()?
    } else {
        let (mine, its): (RawFd, RawFd) = sys::socketpair()?;
        if a.has("two") {
            pid = sys::fork()?;
            if pid == 0 {
                sys::end_with_parent();
                sys::close(mine)?;
                cx::puppet(its);
                sys::exit(0);
            }
            sys::close(its)?;
        } else {
            std::thread::spawn(move || cx::puppet(its));
        }
        mine
    };
    let mut cx = Cx::new(mine, hosts, a.has("accept"), a.has("ring"))?;
    f(&mut cx)?;
    cx.wait()?;
    cx.tell(Op::Quit, 0, 0, 0)?;
    if pid > 0 {
        let st = sys::waitpid(pid)?;
        crate::same!(st, 0, "the peer process ended with status");
    } else if at.far.is_some() {
        crate::same!(cx.far_status()?, 0, "the peer process ended with status");
    }
    Ok(())
}
