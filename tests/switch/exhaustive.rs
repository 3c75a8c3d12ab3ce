//! Every interleaving of a small alphabet of actions, breadth first; states
//! that were seen are not looked at again.

use crate::world::*;
use std::collections::hash_map::DefaultHasher;
use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

const ALL: usize = usize::MAX >> 1;

fn key(world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

/// How often each of the rare things may happen.
#[derive(Clone, Copy)]
struct Budget {
    proposals: u8,
    leaves: u8,
    hurries: u8,
    shuts: bool,
    losses: u8,
    kills: bool,
}

#[derive(Clone, Hash)]
struct Node {
    world: World,
    leaves: u8,
    hurries: u8,
    losses: u8,
}

fn trace(path: &[(usize, Action)], mut at: usize) -> Vec<Action> {
    let mut actions = Vec::new();
    while at != 0 {
        actions.push(path[at].1);
        at = path[at].0;
    }
    actions.reverse();
    actions
}

/// Returns the number of states, and whether those are all that there are.
fn explore(cfg: Cfg, prefix: &[Action], budget: Budget, states: usize) -> (usize, bool) {
    let mut start = World::new(Arc::new(cfg));
    for action in prefix {
        start.apply(*action).unwrap();
    }
    let chunk = |e: usize| start.cfg.stream[e].len().div_ceil(2);
    let mut alphabet = vec![Action::Propose, Action::Lose(false), Action::Lose(true), Action::Timeout];
    if start.cfg.remote {
        alphabet.push(Action::Sync);
    }
    for e in [A, B] {
        alphabet.extend([
            Action::Write(e, chunk(e)),
            Action::Read(e, ALL),
            Action::Flush(e, usize::MAX),
            Action::Control(e, usize::MAX),
            Action::Mark(e),
            Action::Leave(e),
            Action::Hurry(e),
            Action::Shut(e),
            Action::Msg(e),
            Action::Notice(e),
            Action::Kill(e),
        ]);
    }
    let mut seen = HashSet::new();
    let mut path = vec![(0, Action::Sync)];
    let mut layer = vec![(0, Node { world: start, leaves: 0, hurries: 0, losses: 0 })];
    let (mut resets, mut eofs) = (0u64, 0u64);
    while !layer.is_empty() {
        let mut next = Vec::new();
        for (at, node) in layer {
            for action in &alphabet {
                let mut to = node.clone();
                match action {
                    Action::Propose if node.world.gen >= budget.proposals => continue,
                    Action::Leave(_) if node.leaves >= budget.leaves => continue,
                    Action::Hurry(_) if node.hurries >= budget.hurries => continue,
                    Action::Shut(_) if !budget.shuts => continue,
                    Action::Lose(_) if node.losses >= budget.losses => continue,
                    Action::Kill(_) if !budget.kills => continue,
                    Action::Leave(_) => to.leaves += 1,
                    Action::Hurry(_) => to.hurries += 1,
                    Action::Lose(_) => to.losses += 1,
                    _ => {}
                }
                let mut check = to.world.apply(*action);
                if check.is_ok() {
                    if to.world == node.world {
                        continue;
                    }
                    let mut hasher = DefaultHasher::new();
                    to.hash(&mut hasher);
                    if !seen.insert(hasher.finish()) {
                        continue;
                    }
                    let mut then = to.world.clone();
                    check = then.finish(key(&then).is_multiple_of(2)).and_then(|()| {
                        resets += u64::from(then.reset);
                        eofs += u64::from(then.ends[A].eof || then.ends[B].eof);
                        then.up_and_down()
                    });
                }
                path.push((at, *action));
                if let Err(why) = check {
                    panic!("{why}\nafter {:?}\nbefore {:?}", trace(&path, path.len() - 1), node.world);
                }
                next.push((path.len() - 1, to));
                if seen.len() >= states {
                    return (seen.len(), false);
                }
            }
        }
        layer = next;
    }
    if !budget.kills && !budget.shuts {
        assert_eq!((resets, eofs), (0, 0));
    }
    if budget.kills {
        assert!(resets > 0 && eofs > 0);
    }
    (seen.len(), true)
}

fn cfg(remote: bool) -> Cfg {
    // The pipe holds a mark and one byte more (a receiver that peeks needs room
    // for a mark), so marks and frames are cut; the streams look like the
    // beginning of a mark at every place.
    let (a, b): (&[u8], &[u8]) = if remote { (b"abc", b"x") } else { (b"a\xf3\xf3r", b"\xf3ri") };
    Cfg { stream: [a.to_vec(), b.to_vec()], pipe_cap: 33, ring_cap: 3, remote }
}

const SHAKEN: [Action; 5] = [Action::Propose, Action::Msg(A), Action::Msg(B), Action::Msg(A), Action::Mark(B)];

fn run(name: &str, remote: bool, prefix: &[Action], budget: Budget) {
    let began = std::time::Instant::now();
    let states = std::env::var("RINGSOCK_TEST_STATES").ok().and_then(|s| s.parse().ok()).unwrap_or(60_000);
    let (seen, all) = explore(cfg(remote), prefix, budget, states);
    println!("{name}: {seen} states, {} in {:?}", if all { "all" } else { "cut off" }, began.elapsed());
}

const NONE: Budget = Budget { proposals: 1, leaves: 0, hurries: 0, shuts: false, losses: 0, kills: false };

#[test]
fn every_upgrade() {
    run("upgrade", false, &[], NONE);
    run("upgrade, remote", true, &[], NONE);
}

#[test]
fn every_loss_of_the_link() {
    run("loss", false, &[], Budget { losses: 1, ..NONE });
    run("loss, remote", true, &[], Budget { losses: 1, ..NONE });
}

#[test]
fn every_return() {
    run("return", false, &SHAKEN, Budget { leaves: 2, ..NONE });
    run("return, remote", true, &SHAKEN, Budget { leaves: 1, losses: 1, ..NONE });
}

#[test]
fn every_hurried_return() {
    run("hurry", false, &SHAKEN, Budget { hurries: 2, ..NONE });
    run("hurry from the beginning", false, &[], Budget { hurries: 1, leaves: 1, ..NONE });
    run("hurry, remote", true, &SHAKEN, Budget { hurries: 1, losses: 1, ..NONE });
    run("hurry and half close", false, &SHAKEN, Budget { hurries: 1, shuts: true, ..NONE });
    run("hurry and death", false, &SHAKEN, Budget { hurries: 1, kills: true, ..NONE });
}

#[test]
fn every_second_upgrade() {
    run("again", false, &SHAKEN, Budget { proposals: 2, leaves: 1, losses: 1, ..NONE });
}

#[test]
fn every_half_close() {
    run("half close", false, &[], Budget { shuts: true, leaves: 1, ..NONE });
    run("half close and loss", false, &[], Budget { shuts: true, losses: 1, ..NONE });
}

#[test]
fn every_death() {
    run("death", false, &[], Budget { kills: true, ..NONE });
    run("death while returning", false, &SHAKEN, Budget { kills: true, leaves: 1, ..NONE });
    run("death, remote", true, &SHAKEN, Budget { kills: true, losses: 1, ..NONE });
}
