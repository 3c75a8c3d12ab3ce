//! The mark in the stream, and the frames.

use proptest::prelude::*;
use ringsock_core::wire::{mark, scan, scan_from, Frame, Nonce, Scan, FRAME_LEN, MARK_LEN, MARK_MAGIC};

const NONCE: Nonce = *b"\xf3ringso\xf3ringsoc\x01";

/// The definition, word by word.
fn oracle(window: &[u8], nonce: &Nonce, begun: bool) -> Scan {
    let m = mark(nonce);
    for at in 0..window.len() {
        let rest = &window[at..];
        let whole = rest.starts_with(&m);
        let part = begun && rest.len() < MARK_LEN && m.starts_with(rest);
        if whole || part {
            return match at {
                0 if whole => Scan::Mark,
                0 => Scan::Partial,
                at => Scan::App(at),
            };
        }
    }
    if window.is_empty() {
        Scan::Partial
    } else {
        Scan::App(window.len())
    }
}

/// Bytes made of pieces of marks, of frames, and of anything.
fn nasty() -> impl Strategy<Value = Vec<u8>> {
    let mut other = NONCE;
    other[15] ^= 1;
    let piece = prop_oneof![
        (0..=MARK_LEN).prop_map(|n| mark(&NONCE)[..n].to_vec()),
        (0..=MARK_LEN).prop_map(move |n| mark(&other)[..n].to_vec()),
        (1..MARK_LEN).prop_map(|n| mark(&NONCE)[n..].to_vec()),
        Just(Frame::Leave.encode().to_vec()),
        Just(vec![0xf3]),
        prop::collection::vec(any::<u8>(), 0..6),
    ];
    prop::collection::vec(piece, 0..6).prop_map(|p| p.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4000) })]

    #[test]
    fn scan_is_what_it_says(bytes in nasty(), begun: bool) {
        prop_assert_eq!(scan(&bytes, &NONCE, begun), oracle(&bytes, &NONCE, begun));
    }

    /// However the stream is cut into windows, the mark is found where it first stands.
    #[test]
    fn mark_is_found_in_any_fragments(before in nasty(), after in nasty(), cuts in prop::collection::vec(1usize..70, 1..40)) {
        let m = mark(&NONCE);
        let stream = [&before[..], &m, &after].concat();
        let truth = stream.windows(MARK_LEN).position(|w| w == m).unwrap();
        let (mut have, mut at, mut cuts) = (0, 0, cuts.iter().cycle());
        loop {
            // Once a byte of the mark itself is there, it has begun.
            match scan(&stream[at..have], &NONCE, have > truth) {
                Scan::App(n) => at += n,
                Scan::Mark => break,
                Scan::Partial => {
                    prop_assert!(have < stream.len());
                    have = stream.len().min(have + cuts.next().unwrap());
                }
            }
            prop_assert!(at <= truth);
        }
        prop_assert_eq!(at, truth);
    }

    /// A sender that says where its mark begins lets all before it through, however much it looks like marks.
    #[test]
    fn a_mark_whose_place_is_known(from in 0usize..80, cut in 0usize..140, fill in 0usize..4) {
        let whole = mark(&NONCE);
        let like = [&[0xf3][..], b"\xf3ringsock-mar", b"x", &whole[..31]][fill];
        let mut bytes: Vec<u8> = like.iter().copied().cycle().take(from).collect();
        bytes.extend_from_slice(&mark(&NONCE));
        let cut = cut.min(bytes.len());
        let expected = match cut.min(from) {
            0 if cut == MARK_LEN => Scan::Mark,
            0 => Scan::Partial,
            n => Scan::App(n),
        };
        prop_assert_eq!(scan_from(&bytes[..cut], &NONCE, Some(from)), expected);
    }

    #[test]
    fn frames_survive(kind in 0..3, a: u64, b: u64) {
        let frame = match kind {
            0 => Frame::Leave,
            1 => Frame::Return { consumed: a },
            _ => Frame::Resume { from: a, until: b },
        };
        prop_assert_eq!(Frame::decode(&frame.encode()), Some(frame));
    }

    #[test]
    fn what_is_not_a_frame_is_none(bytes: [u8; FRAME_LEN], valid: [bool; 4]) {
        let mut bytes = bytes;
        for (i, b) in Frame::Leave.encode()[..4].iter().enumerate() {
            if valid[i] { bytes[i] = *b; }
        }
        if let Some(frame) = Frame::decode(&bytes) {
            prop_assert_eq!(frame.encode(), bytes);
        }
    }
}

#[test]
fn tail_like_a_mark_is_not_held_back_before_it_begins() {
    let m = mark(&NONCE);
    for n in 1..MARK_LEN {
        assert_eq!(scan(&m[..n], &NONCE, false), Scan::App(n));
        assert_eq!(scan(&m[..n], &NONCE, true), Scan::Partial);
        let stream = [b"get ", &m[..n]].concat();
        assert_eq!(scan(&stream, &NONCE, true), Scan::App(4));
        assert_eq!(scan(&stream, &NONCE, false), Scan::App(4 + n));
    }
    assert_eq!(scan(&m, &NONCE, false), Scan::Mark);
    assert_eq!(scan(&[], &NONCE, false), Scan::Partial);
    assert_eq!(m[..16], MARK_MAGIC);
}

#[test]
fn marks_of_other_nonces_are_bytes() {
    for i in 0..16 {
        let mut other = NONCE;
        other[i] ^= 0x80;
        let m = mark(&other);
        for begun in [false, true] {
            assert!(matches!(scan(&m, &NONCE, begun), Scan::App(n) if n > 0));
            assert_eq!(scan(&m, &NONCE, begun), oracle(&m, &NONCE, begun));
        }
    }
}

#[test]
fn flipped_bit_is_no_frame_or_another() {
    let frame = Frame::Resume { from: 7, until: 99 };
    for bit in 0..FRAME_LEN * 8 {
        let mut bytes = frame.encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert_ne!(Frame::decode(&bytes), Some(frame));
    }
    let mut padded = Frame::Leave.encode();
    padded[5] = 1;
    assert_eq!(Frame::decode(&padded), None);
    let mut long = Frame::Return { consumed: 1 }.encode();
    long[23] = 1;
    assert_eq!(Frame::decode(&long), None);
}
