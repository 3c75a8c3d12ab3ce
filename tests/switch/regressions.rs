//! Schedules that once went wrong.

use crate::world::*;
use ringsock_core::switch::{End, RxPath, Switch};
use ringsock_core::wire::mark;
use std::sync::Arc;

fn world(a: &[u8], b: &[u8]) -> World {
    World::new(Arc::new(Cfg { stream: [a.to_vec(), b.to_vec()], pipe_cap: 64, ring_cap: 8, remote: false }))
}

fn play(world: &mut World, actions: &[Action]) {
    for action in actions {
        world.apply(*action).unwrap();
    }
}

/// An armed end that might mark read the end of the peer's stream, and still
/// switched to the ring when the link broke: a return could never be answered.
#[test]
fn end_of_stream_while_armed_gives_up_the_mark() {
    let mut sw = Switch::new();
    sw.arm([1; 16]);
    sw.allow_mark([2; 16]);
    sw.leave();
    assert_eq!(sw.end(false), End::Eof);
    assert_eq!(sw.step(0, 0, 0), Ok(false));
    assert!(sw.is_plain() && !sw.can_mark());

    let mut w = world(b"hello", b"and the answer");
    play(
        &mut w,
        &[
            Action::Propose,
            Action::Msg(A),
            Action::Msg(B),
            Action::Lose(false),
            Action::Notice(A),
            Action::Write(A, 5),
            Action::Shut(A),
            Action::Timeout,
            Action::Read(B, 99),
            Action::Read(B, 99),
            Action::Notice(B),
            Action::Mark(B),
        ],
    );
    assert!(w.ends[B].eof);
    w.finish(true).unwrap();
    assert!(!w.reset, "{w:?}");
    assert_eq!(w.ends[A].read, 14);
}

/// The peer dies before the first byte of its mark leaves: nothing was
/// accepted for the ring, so the end is a clean one.
#[test]
fn death_before_the_first_byte_of_the_mark() {
    let mut w = world(b"xyz", &[7; 80]);
    play(
        &mut w,
        &[
            Action::Propose,
            Action::Msg(A),
            Action::Msg(B),
            Action::Write(B, 64),
            Action::Mark(B),
            Action::Write(B, 8),
            Action::Kill(B),
        ],
    );
    assert_eq!(w.ends[B].sent, 64);
    w.finish(false).unwrap();
    assert!(w.ends[A].eof);
    assert_eq!(w.ends[A].read, 64);
}

/// A's link broke between ACCEPT and CONFIRM; B marks in order to return.
#[test]
fn mark_on_a_dead_link_is_answered_by_a_return() {
    let mut w = world(b"abc\xf3", b"def\xf3");
    play(
        &mut w,
        &[
            Action::Propose,
            Action::Msg(A),
            Action::Msg(B),
            Action::Lose(false),
            Action::Notice(A),
            Action::Write(B, 4),
            Action::Notice(B),
            Action::Write(B, 0),
        ],
    );
    w.finish(true).unwrap();
    w.up_and_down().unwrap();
}

/// A is left armed by a handshake that B gave up; the next proposal frees it.
#[test]
fn orphaned_nonce_is_dropped_at_the_next_proposal() {
    let mut w = world(b"abc\xf3", b"def\xf3");
    play(&mut w, &[Action::Propose, Action::Msg(A), Action::Lose(false), Action::Notice(A), Action::Notice(B)]);
    assert_eq!(w.ends[A].sw.rx(), RxPath::Armed);
    w.finish(true).unwrap();
    assert_eq!(w.ends[A].sw.rx(), RxPath::Armed);
    w.up_and_down().unwrap();
}

/// Bytes that were read ahead, and the end behind them: both are the program's, in this order.
#[test]
fn end_behind_what_was_read_ahead() {
    for flush in [0, 32, 64] {
        let mut w = world(&[7; 23], b"");
        play(
            &mut w,
            &[
                Action::Propose,
                Action::Write(A, 23),
                Action::Msg(A),
                Action::Msg(B),
                Action::Msg(A),
                Action::Hurry(B),
                Action::Mark(A),
                Action::Flush(A, flush),
                Action::Kill(A),
                Action::Read(B, 0),
                Action::Read(B, 1),
                Action::Read(B, 0),
            ],
        );
        w.finish(false).unwrap();
    }
}

/// An end that says `Return` before it gives back what it read ahead has thrown those bytes away: its own affair, and
/// the check of the other end's bytes goes on.
#[test]
fn a_return_before_what_was_to_be_given_back() {
    let mut w = world(b"", b"rs");
    play(
        &mut w,
        &[
            Action::Propose,
            Action::Msg(A),
            Action::Msg(B),
            Action::Msg(A),
            Action::Mark(A),
            Action::Flush(A, 5),
            Action::Write(B, 1),
            Action::Flush(A, 27),
            Action::Read(B, 0),
            Action::Mark(B),
            Action::Lie(B, 2464518060),
            Action::Lie(B, 1410046723),
            Action::Hurry(A),
            Action::Write(B, 0),
        ],
    );
    w.finish(true).unwrap();
    assert!(w.faults.out_of_turn[A] && w.ends[B].read > 0);
}

/// An end says `Return` before it has read the mark, and its peer, which believes it, is killed while it repeats: the mark
/// goes with what the kernel had not sent yet, and the end that is read then is the liar's own affair.
#[test]
fn a_return_before_the_mark_of_a_peer_that_is_killed() {
    let stream = [vec![7; 73], Vec::new()];
    let mut w = World::new(Arc::new(Cfg { stream, pipe_cap: 63, ring_cap: 10, remote: true }));
    play(
        &mut w,
        &[
            Action::Propose,
            Action::Msg(A),
            Action::Msg(B),
            Action::Mark(B),
            Action::Write(A, 99),
            Action::Flush(B, 32),
            Action::Read(A, 0),
            Action::Mark(A),
            Action::Read(B, 32),
            Action::Lie(A, 560085346),
            Action::Write(A, 10),
            Action::Read(A, 24),
            Action::Kill(A),
        ],
    );
    assert!(w.faults.out_of_turn[B] && w.ends[A].sent == 73);
    w.finish(true).unwrap();
    assert!(w.reset && w.ends[B].read == 63);
}

/// An end says `Return` twice, and the end of the answer comes when it takes bytes for the program's: its own affair.
#[test]
fn a_return_that_is_said_again() {
    let m = mark(&nonce(DECOY, A));
    let mut w =
        World::new(Arc::new(Cfg { stream: [[m, m].concat(), Vec::new()], pipe_cap: 56, ring_cap: 1, remote: false }));
    play(
        &mut w,
        &[
            Action::Write(A, 1),
            Action::Propose,
            Action::Msg(A),
            Action::Hurry(B),
            Action::Msg(B),
            Action::Write(B, 0),
            Action::Control(A, 24),
            Action::Control(B, 0),
            Action::Write(A, 0),
            Action::Read(B, 0),
            Action::Write(B, 0),
            Action::Lie(A, 223260914),
            Action::Read(A, 5),
            Action::Read(A, 19),
            Action::Write(A, 1),
            Action::Read(B, 24),
            Action::Read(B, 24),
            Action::Read(B, 1),
        ],
    );
    assert!(w.faults.out_of_turn[B]);
    w.finish(true).unwrap();
}
