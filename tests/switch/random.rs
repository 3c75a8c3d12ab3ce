//! Long random schedules with faults at any step, shrunk when they fail.

use crate::world::*;
use proptest::prelude::*;
use ringsock_core::wire::{mark, Frame};
use std::cell::Cell;
use std::sync::Arc;

fn cases(default: u32) -> ProptestConfig {
    let cases = std::env::var("RINGSOCK_TEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(default);
    ProptestConfig { failure_persistence: None, max_shrink_iters: 20_000, ..ProptestConfig::with_cases(cases) }
}

/// What a program might send that is hardest for the switch: beginnings of
/// marks, marks of other nonces, frames.
fn stream(seed: &[u8], from: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for (i, s) in seed.iter().enumerate() {
        let m = mark(&nonce(DECOY + (i as u8 & 7), from));
        match s % 8 {
            0 => out.extend_from_slice(&m),
            1 | 2 => out.extend_from_slice(&m[..usize::from(*s) >> 3]),
            3 => out.push(m[0]),
            4 => out.extend_from_slice(&Frame::Return { consumed: u64::from(*s) >> 3 }.encode()),
            5 => out.extend_from_slice(&m[usize::from(*s) >> 3..]),
            _ => out.extend((0..usize::from(*s) >> 3).map(|j| (i * 31 + j * 7) as u8)),
        }
    }
    out.iter_mut().filter(|b| **b == SECRET).for_each(|b| *b += 1);
    out
}

#[derive(Clone, Copy, Debug)]
struct Faults {
    lose: bool,
    kill: bool,
    shut: bool,
    lie: bool,
}

/// An action from four bytes. Simple ones have small numbers, for shrinking.
fn action((kind, a, n, r): (u8, bool, u8, u32), faults: Faults) -> Action {
    let e = usize::from(a);
    // Mostly small pieces, sometimes all there is.
    let n = if n > 200 { 1 << 20 } else { usize::from(n / 4) };
    match kind {
        0..=49 => Action::Write(e, n),
        50..=99 => Action::Read(e, n),
        100..=129 => Action::Flush(e, n),
        130..=159 => Action::Control(e, n),
        160..=194 => Action::Msg(e),
        195..=219 => Action::Mark(e),
        220..=229 => Action::Propose,
        230..=239 => Action::Notice(e),
        240..=245 => Action::Sync,
        246 => Action::Leave(e),
        247 => Action::Hurry(e),
        248 if faults.lose => Action::Lose(r & 1 == 0),
        249 if faults.shut && r % 4 == 0 => Action::Shut(e),
        250 if faults.shut => Action::Timeout,
        251 if faults.kill && r % 2 == 0 => Action::Kill(e),
        252.. if faults.lie => Action::Lie(e, r),
        _ => Action::Sync,
    }
}

#[derive(Default)]
struct Seen {
    rings: Cell<u32>,
    upgrades: Cell<u32>,
    resets: Cell<u32>,
    eofs: Cell<u32>,
    replays: Cell<u32>,
}

type Raw = Vec<(u8, bool, u8, u32)>;

fn schedule() -> impl Strategy<Value = (Raw, [Vec<u8>; 2], usize, usize, bool)> {
    (
        prop::collection::vec(any::<(u8, bool, u8, u32)>(), 0..800),
        [prop::collection::vec(any::<u8>(), 0..80), prop::collection::vec(any::<u8>(), 0..80)],
        32usize..160,
        1usize..64,
        prop::bool::weighted(0.3),
    )
}

fn play(
    (raw, seeds, pipe_cap, ring_cap, remote): (Raw, [Vec<u8>; 2], usize, usize, bool),
    faults: Faults,
    seen: &Seen,
) -> Check {
    let mut stream = [stream(&seeds[A], A), stream(&seeds[B], B)];
    if remote {
        // There, what could be a mark is held back from the moment of arming.
        stream.iter_mut().flatten().filter(|b| **b == 0xf3).for_each(|b| *b = 0xf4);
    }
    let mut world = World::new(Arc::new(Cfg { stream, pipe_cap, ring_cap, remote }));
    let bump = |c: &Cell<u32>, by: bool| c.set(c.get() + u32::from(by));
    let (mut ring, mut replay) = (false, false);
    for (i, raw) in raw.iter().enumerate() {
        let action = action(*raw, faults);
        world.apply(action).map_err(|why| format!("{why}: action {i}, {action:?}"))?;
        ring |= world.ends.iter().all(|e| e.sw.is_ring());
        replay |= world.ends.iter().any(|e| !e.sw.replay().is_empty());
    }
    bump(&seen.rings, ring);
    bump(&seen.replays, replay);
    bump(&seen.upgrades, world.gen > 1);
    world.finish(raw.len() % 2 == 0).map_err(|why| format!("{why}, at the end"))?;
    bump(&seen.resets, world.reset);
    bump(&seen.eofs, world.ends.iter().any(|e| e.eof));
    world.up_and_down().map_err(|why| format!("{why}, up and down"))
}

fn run(default: u32, faults: Faults) -> Seen {
    let seen = Seen::default();
    let mut runner = proptest::test_runner::TestRunner::new(cases(default));
    let began = std::time::Instant::now();
    let result = runner.run(&schedule(), |s| play(s, faults, &seen).map_err(TestCaseError::fail));
    if let Err(proptest::test_runner::TestError::Fail(why, (raw, seeds, pipe, ring, remote))) = &result {
        let actions: Vec<_> = raw.iter().map(|r| action(*r, faults)).collect();
        panic!("{why}\nstreams {seeds:?}, pipe {pipe}, ring {ring}, remote {remote}\n{actions:?}");
    }
    result.unwrap();
    println!(
        "{faults:?}: both on the ring {}, replays {}, upgraded again {}, resets {}, ends {}, in {:?}",
        seen.rings.get(),
        seen.replays.get(),
        seen.upgrades.get(),
        seen.resets.get(),
        seen.eofs.get(),
        began.elapsed()
    );
    seen
}

const CALM: Faults = Faults { lose: false, kill: false, shut: false, lie: false };

#[test]
fn upgrades_and_returns() {
    let seen = run(6000, CALM);
    assert!(seen.rings.get() > 20 && seen.replays.get() > 20 && seen.upgrades.get() > 20);
}

#[test]
fn broken_links() {
    let seen = run(6000, Faults { lose: true, ..CALM });
    assert_eq!((seen.resets.get(), seen.eofs.get()), (0, 0));
}

#[test]
fn half_closes_on_broken_links() {
    let seen = run(6000, Faults { lose: true, shut: true, ..CALM });
    assert!(seen.eofs.get() > 20);
}

#[test]
fn deaths() {
    let seen = run(6000, Faults { lose: true, shut: true, kill: true, ..CALM });
    assert!(seen.resets.get() > 20 && seen.eofs.get() > 20);
}

#[test]
fn lies() {
    let seen = run(6000, Faults { lose: true, shut: true, kill: true, lie: true });
    assert!(seen.resets.get() > 20);
}
