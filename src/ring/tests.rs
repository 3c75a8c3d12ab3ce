use super::*;
use std::collections::VecDeque;

const MAX: usize = 64 << 10;

/// Both ends of a ring, in one process.
struct Pair {
    side: Side,
    theirs: Box<Slot>,
}

impl Pair {
    fn new() -> Pair {
        Pair { side: Side::new().expect("memory"), theirs: Box::default() }
    }

    fn ends(&self) -> (TxRing, RxRing) {
        let slot = self.side.slot(0);
        let mut tx = TxRing::new(&self.side, slot, 4096).expect("memory");
        tx.set_peer(&raw const *self.theirs);
        (tx, RxRing::new(self.side.base(), slot, &self.theirs))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: its rings are gone.
        unsafe { self.side.destroy() };
    }
}

fn write_all(tx: &mut TxRing, data: &[u8]) -> bool {
    if data.len().is_multiple_of(2) && data.len() <= STRIDE {
        // SAFETY: a slice is readable for its length.
        return unsafe { tx.write_one(data.as_ptr(), data.len(), false) };
    }
    let parts = data.chunks(1 + data.len() / 3).map(|part| (part.as_ptr(), part.len()));
    // SAFETY: a slice is readable for its length.
    unsafe { tx.write_all(parts, data.len()) }
}

fn write(tx: &mut TxRing, data: &[u8]) -> usize {
    // SAFETY: as above.
    let n = unsafe { tx.write(data.as_ptr(), data.len()) }.unwrap();
    tx.show();
    n
}

fn read_all(rx: &mut RxRing, to: &mut [u8], least: usize) -> usize {
    // SAFETY: a slice is writable for its length.
    unsafe { rx.read_all(to.as_mut_ptr(), to.len(), least) }
}

fn read(rx: &mut RxRing, to: &mut [u8]) -> Result<usize, Failure> {
    // SAFETY: as above.
    unsafe { rx.read(to.as_mut_ptr(), to.len()) }
}

/// splitmix64: the same numbers for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }

    /// Up to `most`, small ones as likely as large ones.
    fn size(&mut self, most: usize) -> usize {
        let bits = self.next() % u64::from(most.ilog2() + 1);
        (self.next() as usize & ((2 << bits) - 1)).clamp(1, most)
    }
}

/// The byte at an offset of the stream.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9) >> 13) as u8
}

fn bytes(from: u64, n: usize) -> Vec<u8> {
    (from..from + n as u64).map(byte).collect()
}

/// Whatever way bytes are written and read, what comes out is what went in, and each way does what it says of itself.
#[test]
fn both_ways_give_the_same_stream() {
    let pair = Pair::new();
    let (mut short_writes, mut short_reads, mut shrunk) = (0, 0, 0);
    for seed in 0..200 {
        let mut r = Random(seed);
        let (mut tx, mut rx) = pair.ends();
        let mut model = VecDeque::new();
        let mut buf = vec![0; 2 * MAX];
        for _ in 0..400 {
            match r.next() % 8 {
                0 if r.one_in(2) => shrunk += u32::from(tx.cap > 4096 && tx.shrink(4096)),
                0 => {
                    tx.grow(MAX);
                }
                1..=3 => {
                    let data = bytes(tx.produced, r.size(2 * STRIDE));
                    let room = tx.space(usize::MAX).unwrap();
                    let n = if r.one_in(2) {
                        let all = write_all(&mut tx, &data);
                        assert_eq!(all, data.len() <= room.min(STRIDE), "seed {seed}");
                        short_writes += u32::from(all);
                        usize::from(all) * data.len()
                    } else {
                        let n = write(&mut tx, &data);
                        assert_eq!(n, data.len().min(room), "seed {seed}");
                        n
                    };
                    model.extend(&data[..n]);
                }
                4 => {
                    let (skip, n) = (r.size(256) - 1, r.size(STRIDE));
                    let (one, two) = buf.split_at_mut(skip);
                    // SAFETY: both are writable for their length.
                    let got =
                        unsafe { rx.peek([(one.as_mut_ptr(), skip), (two.as_mut_ptr(), n)].into_iter()) }.unwrap();
                    assert_eq!(got, (skip + n).min(model.len()), "seed {seed}");
                    assert!(buf[..got].iter().eq(model.iter().take(got)), "seed {seed}");
                }
                _ => {
                    let n = r.size(2 * STRIDE);
                    let (least, short) = (if r.one_in(4) { n } else { 1 }, r.one_in(2));
                    let got = match short {
                        true => read_all(&mut rx, &mut buf[..n], least),
                        false if r.one_in(2) => {
                            let (one, two) = buf[..n].split_at_mut(r.size(n) - 1);
                            let parts = [one, two].map(|p| (p.as_mut_ptr(), p.len()));
                            // SAFETY: as above.
                            unsafe { rx.read_into(parts.into_iter()) }.unwrap()
                        }
                        false => read(&mut rx, &mut buf[..n]).unwrap(),
                    };
                    short_reads += u32::from(short && got > 0);
                    assert!(got == n.min(model.len()) || short && got == 0, "seed {seed}");
                    assert!(got == 0 || !short || got >= least, "seed {seed}");
                    assert!(buf[..got].iter().copied().eq(model.drain(..got)), "seed {seed}");
                    assert_eq!(rx.waiting(), model.len() as u64, "seed {seed}");
                }
            }
            assert_eq!(tx.produced - rx.consumed, model.len() as u64, "seed {seed}");
        }
        tx.refresh().unwrap();
        tx.release();
    }
    assert!(short_writes > 5_000 && short_reads > 4_500 && shrunk > 200, "{short_writes} {short_reads} {shrunk}");
}

fn set_aside(tx: &mut TxRing, data: &[u8]) -> usize {
    // SAFETY: a slice is readable for its length.
    unsafe { tx.set_aside(data.as_ptr(), data.len()) }.unwrap()
}

/// What was set aside is seen with the next byte that is not, or when it is shown, however the ring wraps and grows
/// meanwhile; and if the writer is gone.
#[test]
fn what_is_set_aside_is_not_seen() {
    let pair = Pair::new();
    let mut grown = 0;
    for seed in 0..200 {
        let mut r = Random(seed);
        let (mut tx, mut rx) = pair.ends();
        let (mut buf, mut shown) = (vec![0; 2 * MAX], 0);
        for _ in 0..400 {
            let data = bytes(tx.produced, r.size(3000));
            match r.next() % 8 {
                0 if r.one_in(2) => _ = tx.shrink(4096),
                0 => grown += u32::from(tx.grow(MAX)),
                1 if write_all(&mut tx, &data) => shown = tx.produced,
                2 => {
                    write(&mut tx, &data);
                    shown = tx.produced;
                }
                3 => {
                    assert_eq!(tx.show(), shown != tx.produced, "seed {seed}");
                    shown = tx.produced;
                }
                4 => {
                    // A part of a message.
                    // SAFETY: a slice is readable for its length.
                    let n = unsafe { tx.write(data.as_ptr(), data.len()) }.unwrap();
                    let more = tx.shown() - shown;
                    assert!(more == 0 || more >= STRIDE as u64, "seed {seed}: {more}");
                    assert!(n == 0 || tx.produced - tx.shown() < STRIDE as u64, "seed {seed}");
                    shown += more;
                }
                5 => {
                    let room = tx.space(usize::MAX).unwrap();
                    assert_eq!(set_aside(&mut tx, &data), data.len().min(room), "seed {seed}");
                }
                _ => {
                    let (n, at) = (r.size(8000), rx.consumed);
                    let got = match r.one_in(2) {
                        true => read_all(&mut rx, &mut buf[..n], 1),
                        false => read(&mut rx, &mut buf[..n]).unwrap(),
                    };
                    assert!(buf[..got].iter().copied().eq((at..at + got as u64).map(byte)), "seed {seed}");
                }
            }
            assert_eq!(tx.shown(), shown, "seed {seed}");
            assert_eq!(rx.waiting(), shown - rx.consumed, "seed {seed}");
        }
        let data = bytes(tx.produced, 10);
        set_aside(&mut tx, &data);
        rx.orphan();
        assert_eq!(rx.waiting(), tx.produced - rx.consumed, "seed {seed}");
        let at = rx.consumed;
        let got = read(&mut rx, &mut buf).unwrap();
        assert!(buf[..got].iter().copied().eq((at..tx.produced).map(byte)), "seed {seed}");
        tx.show();
        tx.refresh().unwrap();
        tx.release();
    }
    assert!(grown > 100, "{grown}");
}

/// Two threads at once: every byte in its place, however the ring wraps and grows meanwhile.
#[test]
fn a_reader_sees_no_byte_too_early() {
    const TOTAL: u64 = 8 << 20;
    let pair = Pair::new();
    let (mut tx, mut rx) = pair.ends();
    let writer = |tx: &mut TxRing| {
        let mut r = Random(1);
        while tx.produced < TOTAL {
            let data = bytes(tx.produced, r.size(3 * 1024).min((TOTAL - tx.produced) as usize));
            let done = !r.one_in(4) && write_all(tx, &data);
            if !done && write(tx, &data) == 0 && r.one_in(64) {
                tx.grow(MAX);
            }
            if r.one_in(256) {
                tx.shrink(4096);
            }
        }
    };
    let reader = |rx: &mut RxRing| {
        let (mut r, mut buf, mut at) = (Random(2), vec![0; 8 << 10], 0);
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while at < TOTAL {
            let n = r.size(buf.len());
            let mut got = read_all(rx, &mut buf[..n], 1);
            if got == 0 {
                got = read(rx, &mut buf[..n]).unwrap();
            }
            assert!(buf[..got].iter().copied().eq((at..at + got as u64).map(byte)), "at {at}");
            at += got as u64;
            if got == 0 {
                assert!(std::time::Instant::now() < until, "nothing comes any more, at {at}");
                std::thread::yield_now();
            }
        }
    };
    struct Sent<T>(T);
    // SAFETY: each end is used by one thread at a time, and the memory outlives both.
    unsafe impl<T> Send for Sent<T> {}
    let (mut a, mut b) = (Sent(&mut tx), Sent(&mut rx));
    std::thread::scope(|s| {
        s.spawn(move || {
            let a = &mut a;
            writer(a.0);
        });
        let b = &mut b;
        reader(b.0);
    });
    assert_eq!(rx.consumed, TOTAL);
    tx.refresh().unwrap();
    tx.release();
}

/// What an honest peer would not say takes nothing, by the short way either.
#[test]
fn nothing_is_read_of_what_cannot_be() {
    let pair = Pair::new();
    let (mut tx, mut rx) = pair.ends();
    let data = bytes(0, 100);
    let mut buf = vec![0; MAX];
    assert!(write_all(&mut tx, &data));
    assert_eq!(read(&mut rx, &mut buf[..10]), Ok(10));
    let slot = pair.side.slot(0);
    for lie in [5, 10 + 4097, u64::MAX] {
        slot.produced.store(lie, SeqCst);
        assert_eq!(read_all(&mut rx, &mut buf, 1), 0, "{lie}");
        assert_eq!(read(&mut rx, &mut buf), Err(Failure::Violation), "{lie}");
    }
    slot.produced.store(100, SeqCst);
    assert_eq!(read_all(&mut rx, &mut buf, 1), 90);
    assert_eq!(buf[..90], data[10..]);
    // What has been set aside is not what was written before.
    slot.written.store(50, SeqCst);
    rx.orphan();
    assert_eq!(read(&mut rx, &mut buf), Ok(0));
    // The same of a writer.
    assert_eq!(set_aside(&mut tx, &[0; 10]), 10);
    pair.theirs.consumed.store(101, SeqCst);
    assert!(!write_all(&mut tx, &[0; 4096]));
    assert_eq!(tx.space(4096), Err(Violation));
    pair.theirs.consumed.store(100, SeqCst);
    tx.refresh().unwrap();
    tx.release();
}

/// A ring that is used no more is small again, and what it had is there for others; one that is not read stays as it is.
#[test]
fn an_idle_ring_gives_its_memory_back() {
    let pair = Pair::new();
    let (mut tx, mut rx) = pair.ends();
    let mut buf = vec![0; MAX];
    for _ in 0..3 {
        let free = pair.side.alloc_block(16).unwrap();
        pair.side.free_block(free, 16);
        while tx.grow(MAX) {}
        assert!(!tx.can_grow(MAX));
        let at = tx.produced;
        assert_eq!(write(&mut tx, &bytes(at, MAX)), MAX);
        assert_eq!(read(&mut rx, &mut buf[..MAX / 4]), Ok(MAX / 4));
        assert!(!tx.shrink(4096) && tx.cap == MAX as u64, "three quarters are unread");
        assert_eq!(read(&mut rx, &mut buf[..MAX / 2]), Ok(MAX / 2));
        assert!(!tx.shrink(4096) && tx.cap == 4096, "what is unread lies in the large piece");
        assert_eq!(write(&mut tx, &bytes(at + MAX as u64, 5000)), 4096);
        assert_eq!(read(&mut rx, &mut buf), Ok(MAX / 4 + 4096));
        assert!(buf[..MAX / 4 + 4096].iter().copied().eq((at..).skip(MAX / 4 * 3).map(byte).take(MAX / 4 + 4096)));
        assert!(tx.shrink(4096));
        let now_free = pair.side.alloc_block(16).unwrap();
        pair.side.free_block(now_free, 16);
        assert_eq!(now_free, free, "the large piece is still taken");
    }
    tx.release();
}
