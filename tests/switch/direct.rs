//! Single events, and a peer that knows the protocol and breaks it.

use proptest::prelude::*;
use ringsock_core::switch::{End, RxPath, Switch, TxPath, Violation};
use ringsock_core::wire::{mark, Frame, FRAME_LEN, MARK_LEN};

const MINE: [u8; 16] = [1; 16];
const PEERS: [u8; 16] = [2; 16];

fn armed() -> Switch {
    let mut sw = Switch::new();
    assert!(sw.arm(MINE));
    sw
}

/// On the ring in both directions, with the mark written.
fn ring() -> Switch {
    let mut sw = armed();
    sw.allow_mark(PEERS);
    assert!(sw.start_mark());
    assert_eq!(sw.pending(), mark(&PEERS));
    sw.written(MARK_LEN);
    sw.mark_seen();
    assert!(sw.is_ring());
    sw
}

/// `Return{5}` was said, 9 bytes were produced.
fn returning() -> Switch {
    let mut sw = ring();
    sw.leave();
    assert_eq!(sw.step(5, 9, 0), Ok(true));
    assert_eq!(sw.pending(), Frame::Return { consumed: 5 }.encode());
    sw.written(FRAME_LEN);
    sw
}

/// Whether bytes that stand in the control stream can be a frame is known before they are taken, in whatever pieces they come.
#[test]
fn what_can_be_a_frame() {
    let frames = [
        Frame::Leave,
        Frame::Return { consumed: 7 },
        Frame::Resume { from: 1, until: 1 << 40 },
        Frame::Back { len: 3 },
    ];
    for frame in frames.map(Frame::encode) {
        for at in 0..FRAME_LEN {
            let mut sw = ring();
            sw.control(&frame[..at]).unwrap();
            for n in 1..=FRAME_LEN - at {
                let mut next = frame[at..at + n].to_vec();
                assert!(sw.may_be_control(&next), "{at} {n}");
                if at < 8 {
                    // Magic, kind and what is reserved are known.
                    next[0] ^= 0x40;
                    assert!(!sw.may_be_control(&next), "{at} {n}");
                }
            }
            assert!(!sw.may_be_control(&[frame[at..].to_vec(), vec![0]].concat()));
        }
    }
    for program in [&[1u8; 10][..], b"rs", b"rs\x01", b"rs\x02", b"GET / HTTP/1.1\r\n\r\n"] {
        assert_eq!(ring().may_be_control(program), b"rs\x01".starts_with(program), "{program:?}");
    }
}

fn say(sw: &mut Switch, frame: Frame) -> Result<(), Violation> {
    for byte in frame.encode() {
        sw.control(&[byte])?;
    }
    Ok(())
}

#[test]
fn no_mark_before_both_nonces() {
    let mut sw = Switch::new();
    sw.allow_mark(PEERS);
    assert!(!sw.can_mark() && !sw.start_mark() && sw.is_plain());
    let mut sw = armed();
    assert!(!sw.can_mark() && !sw.start_mark());
    sw.leave();
    assert_eq!(sw.step(0, 0, 0), Ok(false));
    assert_eq!((sw.tx(), sw.rx()), (TxPath::Tcp, RxPath::Armed));
    sw.allow_mark(PEERS);
    assert!(sw.can_mark());
}

#[test]
fn disarm_only_while_nothing_has_begun() {
    let mut sw = armed();
    assert!(!sw.arm(PEERS), "armed twice");
    sw.disarm();
    assert!(sw.is_plain());
    let mut sw = ring();
    sw.disarm();
    assert!(sw.is_ring());
    let mut sw = armed();
    sw.mark_seen();
    sw.disarm();
    assert_eq!(sw.rx(), RxPath::Ring);
}

#[test]
fn leave_on_tcp_is_nothing() {
    let mut sw = Switch::new();
    sw.leave();
    assert!(!sw.leaving());
    assert!(sw.arm(MINE));
}

#[test]
fn order_of_a_return() {
    // Armed: nothing can be said before the mark, which the owner begins. With our direction on the ring all that can be
    // said is `Leave`.
    let mut sw = armed();
    sw.allow_mark(PEERS);
    sw.leave();
    assert_eq!(sw.step(0, 0, 0), Ok(false));
    assert!(sw.pending().is_empty() && sw.start_mark());
    assert_eq!(sw.step(0, 0, 0), Ok(true));
    let expect = [&mark(&PEERS)[..], &Frame::Leave.encode()].concat();
    assert_eq!(sw.pending(), expect);
    sw.mark_seen();
    assert_eq!(sw.step(0, 4, 0), Ok(true));
    assert_eq!(sw.step(0, 4, 0), Ok(false));
    assert_eq!(sw.rx(), RxPath::Returning);
    say(&mut sw, Frame::Return { consumed: 4 }).unwrap();
    assert_eq!(sw.step(0, 4, 0), Ok(true));
    let expect = [
        expect,
        Frame::Return { consumed: 0 }.encode().to_vec(),
        Frame::Resume { from: 4, until: 4 }.encode().to_vec(),
    ]
    .concat();
    assert_eq!(sw.pending(), expect);
    assert_eq!((sw.tx(), sw.replay()), (TxPath::Tcp, 0..0));
    say(&mut sw, Frame::Resume { from: 0, until: 3 }).unwrap();
    assert_eq!((sw.rx(), sw.control_want()), (RxPath::Replay, 0));
    sw.took_tcp(2);
    assert_eq!(sw.rx(), RxPath::Replay);
    sw.took_tcp(2);
    assert_eq!(sw.rx(), RxPath::Tcp);
    assert!(!sw.is_plain() && !sw.arm(MINE), "pending bytes are not yet written");
    sw.written(expect.len());
    assert!(sw.is_plain() && !sw.leaving() && !sw.can_mark());
}

#[test]
fn return_is_answered_by_return_and_resume() {
    let mut sw = ring();
    say(&mut sw, Frame::Return { consumed: 2 }).unwrap();
    assert!(sw.leaving());
    assert_eq!(sw.step(7, 6, 0), Ok(true));
    let expect = [Frame::Return { consumed: 7 }.encode(), Frame::Resume { from: 2, until: 6 }.encode()].concat();
    assert_eq!(sw.pending(), expect);
    assert_eq!((sw.tx(), sw.replay()), (TxPath::Replay, 2..6));
    sw.written(1000);
    sw.replayed(3);
    assert_eq!((sw.tx(), sw.replay()), (TxPath::Replay, 5..6));
    sw.replayed(1);
    assert_eq!((sw.tx(), sw.rx()), (TxPath::Tcp, RxPath::Returning));
    assert!(sw.leaving(), "until both are back");
    sw.allow_mark(PEERS);
    assert!(!sw.can_mark(), "a late permission after the return");
    assert_eq!(sw.step(7, 6, 0), Ok(false));
    say(&mut sw, Frame::Resume { from: 7, until: 7 }).unwrap();
    assert!(sw.is_plain() && !sw.leaving());
    assert!(sw.arm(MINE) && !sw.can_mark(), "the late permission is forgotten");
}

#[test]
fn lies_are_violations() {
    assert_eq!(say(&mut ring(), Frame::Resume { from: 0, until: 0 }), Err(Violation), "Resume before Return");
    assert_eq!(say(&mut returning(), Frame::Resume { from: 4, until: 9 }), Err(Violation));
    assert_eq!(say(&mut returning(), Frame::Resume { from: 6, until: 9 }), Err(Violation));
    assert_eq!(say(&mut returning(), Frame::Resume { from: 5, until: 4 }), Err(Violation));
    for consumed in [10, u64::MAX] {
        let mut sw = returning();
        say(&mut sw, Frame::Return { consumed }).unwrap();
        assert_eq!(sw.step(5, 9, 0), Err(Violation), "more than was produced");
    }
    let mut sw = ring();
    say(&mut sw, Frame::Return { consumed: 1 }).unwrap();
    assert_eq!(say(&mut sw, Frame::Return { consumed: 1 }), Err(Violation), "twice");
    let mut sw = armed();
    sw.mark_seen();
    assert_eq!(say(&mut sw, Frame::Return { consumed: 0 }), Err(Violation), "our direction is not on the ring");
    let mut sw = returning();
    say(&mut sw, Frame::Return { consumed: 9 }).unwrap();
    sw.step(5, 9, 0).unwrap();
    assert_eq!(say(&mut sw, Frame::Return { consumed: 9 }), Err(Violation), "after Resume");
    assert_eq!(ring().control(&[0; FRAME_LEN]), Err(Violation));
    assert_eq!(ring().control(&[0; FRAME_LEN + 1]), Err(Violation));
    assert_eq!(Switch::new().control(&[0]), Err(Violation));
}

/// `Return` came, and the end of the stream before our own could be said.
#[test]
fn no_resume_without_return() {
    let mut sw = ring();
    say(&mut sw, Frame::Return { consumed: 2 }).unwrap();
    assert_eq!(sw.end(false), End::AfterRing);
    assert_eq!(sw.step(7, 6, 0), Ok(false));
    assert!(sw.pending().is_empty());
}

#[test]
fn ends() {
    assert_eq!(Switch::new().end(false), End::Eof);
    assert_eq!(armed().end(false), End::Eof);
    assert_eq!(armed().end(true), End::Reset);
    for mut sw in [ring(), returning()] {
        assert_eq!(sw.end(false), End::AfterRing);
        assert_eq!((sw.rx(), sw.control_want()), (RxPath::RingFinal, 0));
        assert_eq!(sw.end(false), End::AfterRing);
        assert!(!sw.is_plain() && !sw.arm(MINE));
    }
    let mut sw = returning();
    sw.control(&Frame::Leave.encode()[..3]).unwrap();
    assert_eq!(sw.end(false), End::Reset, "in the middle of a frame");
    let mut sw = returning();
    say(&mut sw, Frame::Resume { from: 5, until: 7 }).unwrap();
    sw.took_tcp(1);
    assert_eq!(sw.end(false), End::Reset, "in the middle of the replay");
    sw.took_tcp(1);
    assert_eq!(sw.end(false), End::Eof);
}

/// What is missing of a replay is in the ring, and before that in what was given back.
#[test]
fn reads_on() {
    let mut sw = returning();
    assert_eq!(sw.read_on(), None, "nothing was repeated");
    say(&mut sw, Frame::Resume { from: 5, until: 9 }).unwrap();
    sw.took_tcp(1);
    assert_eq!(sw.read_on(), Some((0, 6)));
    assert_eq!((sw.rx(), sw.replay_missing(), sw.end(false)), (RxPath::RingFinal, 0, End::AfterRing));
    for (taken, rest) in [(0, (2, 5)), (1, (1, 5)), (2, (0, 5)), (3, (0, 6))] {
        let mut sw = ring();
        sw.leave();
        assert_eq!(sw.step(5, 0, 2), Ok(true));
        sw.written(FRAME_LEN);
        sw.gave(2);
        sw.step(5, 0, 2).unwrap();
        say(&mut sw, Frame::Resume { from: 5, until: 9 }).unwrap();
        assert_eq!(sw.replay_missing(), 6);
        sw.took_tcp(taken);
        assert_eq!(sw.read_on(), Some(rest));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(5000) })]

    /// Any events in any order: no panic, and what is said stays within bounds.
    #[test]
    fn anything_goes(events in prop::collection::vec((0..16u8, any::<u64>(), 0..12u64), 0..60)) {
        let mut sw = Switch::new();
        let (mut consumed, mut produced) = (0, 0);
        for (kind, wild, small) in events {
            let n = if wild % 16 == 0 { wild } else { small };
            match kind {
                0 => { if sw.arm(MINE) { (consumed, produced) = (0, 0); } }
                1 => sw.allow_mark(PEERS),
                2 => { sw.start_mark(); }
                3 => sw.mark_seen(),
                4 => sw.leave(),
                5 => sw.written(n as usize),
                6 => sw.replayed(n),
                7 => sw.took_tcp(n as usize),
                8 => { if sw.tx() == TxPath::Ring { produced += small; } }
                9 => { if sw.rx() == RxPath::Ring { consumed += small; } }
                10 => { let _ = say(&mut sw, Frame::Leave); }
                11 => { let _ = say(&mut sw, Frame::Return { consumed: n }); }
                12 => { let _ = say(&mut sw, Frame::Resume { from: consumed, until: n }); }
                13 => { let _ = sw.control(&wild.to_le_bytes()); }
                14 => { sw.end(wild & 1 == 0); }
                _ => sw.disarm(),
            }
            let _ = sw.step(consumed, produced, 0);
            prop_assert!(sw.replay().is_empty() || sw.replay().end == produced);
            prop_assert!(sw.control_want() <= FRAME_LEN);
            prop_assert!(sw.pending().len() <= MARK_LEN + 3 * FRAME_LEN);
            prop_assert!(!sw.can_mark() || sw.tx() == TxPath::Tcp);
        }
    }
}
