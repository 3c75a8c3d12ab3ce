//! Our own random numbers, and byte streams that are determined by a seed and an offset, so that
//! a receiver can verify every byte wherever its reads begin and end.

/// One step of a 64-bit mix (splitmix64's finaliser).
pub fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A small generator (splitmix64).
#[derive(Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator with a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(mix(seed ^ 0x1234_5678_9abc_def1))
    }

    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `n` (0 when `n` is 0).
    pub fn below(&mut self, n: u64) -> u64 {
        if n == 0 {
            0
        } else {
            self.next() % n
        }
    }

    /// A size from `lo` to `hi`, log-uniform: small and large ones alike.
    pub fn log_uniform(&mut self, lo: usize, hi: usize) -> usize {
        let u = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        let (a, b) = ((lo.max(1) as f64).ln(), (hi.max(1) as f64 + 1.0).ln());
        ((a + u * (b - a)).exp() as usize).clamp(lo, hi)
    }
}

/// Fills a buffer with the bytes of stream `seed` from `off` on.
pub fn fill(seed: u64, off: u64, b: &mut [u8]) {
    let base = mix(seed ^ 0xdead_beef_0bad_cafe);
    let word = |w: u64| mix(base.wrapping_add(w.wrapping_mul(STEP))).to_le_bytes();
    let mut at = 0;
    let skew = (off % 8) as usize;
    let mut w = off / 8;
    if skew != 0 {
        let n = (8 - skew).min(b.len());
        b[..n].copy_from_slice(&word(w)[skew..skew + n]);
        at = n;
        w += 1;
    }
    let mut chunks = b[at..].chunks_exact_mut(8);
    for c in &mut chunks {
        c.copy_from_slice(&word(w));
        w += 1;
    }
    let rest = chunks.into_remainder();
    let n = rest.len();
    rest.copy_from_slice(&word(w)[..n]);
}

/// A buffer with the bytes of stream `seed` from `off` on.
pub fn bytes(seed: u64, off: u64, n: usize) -> Vec<u8> {
    let mut v = vec![0; n];
    fill(seed, off, &mut v);
    v
}

/// Compares a buffer with stream `seed` from `off` on; tells the first difference.
pub fn verify(seed: u64, off: u64, b: &[u8]) -> Result<(), String> {
    let mut tmp = [0u8; 4096];
    for (i, c) in b.chunks(tmp.len()).enumerate() {
        let o = off + (i * tmp.len()) as u64;
        let t = &mut tmp[..c.len()];
        fill(seed, o, t);
        if t != c {
            let k = t.iter().zip(c).position(|(a, b)| a != b).unwrap_or(0);
            let at = o + k as u64;
            return Err(format!("byte {at} differs: got {:#04x}, expected {:#04x}", c[k], t[k]));
        }
    }
    Ok(())
}

/// A running 64-bit digest of a byte stream, whatever the sizes of its pieces.
#[derive(Default)]
pub struct Digest {
    state: u64,
    tail: [u8; 8],
    fill: usize,
    len: u64,
}

impl Digest {
    /// Adds bytes.
    pub fn update(&mut self, mut b: &[u8]) {
        self.len += b.len() as u64;
        if self.fill > 0 {
            let n = (8 - self.fill).min(b.len());
            self.tail[self.fill..self.fill + n].copy_from_slice(&b[..n]);
            self.fill += n;
            b = &b[n..];
            if self.fill < 8 {
                return;
            }
            self.word(u64::from_le_bytes(self.tail));
            self.fill = 0;
        }
        let chunks = b.chunks_exact(8);
        let rest = chunks.remainder();
        for c in chunks {
            self.word(u64::from_le_bytes(c.try_into().expect("8 bytes")));
        }
        self.tail[..rest.len()].copy_from_slice(rest);
        self.fill = rest.len();
    }

    fn word(&mut self, w: u64) {
        let x = (self.state ^ w).wrapping_mul(0xff51_afd7_ed55_8ccd);
        self.state = x.rotate_left(29).wrapping_add(STEP);
    }

    /// The digest of all bytes so far.
    pub fn value(&self) -> u64 {
        let mut t = [0u8; 8];
        t[..self.fill].copy_from_slice(&self.tail[..self.fill]);
        mix(self.state ^ mix(u64::from_le_bytes(t).wrapping_add(self.len)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_stream_agree() {
        let whole = bytes(7, 0, 1000);
        for off in 0..40u64 {
            for n in [0usize, 1, 7, 8, 9, 100] {
                assert_eq!(bytes(7, off, n), whole[off as usize..off as usize + n]);
                verify(7, off, &whole[off as usize..off as usize + n]).unwrap();
            }
        }
        assert!(verify(8, 0, &whole).is_err());
    }

    #[test]
    fn digest_does_not_depend_on_pieces() {
        let b = bytes(3, 0, 777);
        let mut one = Digest::default();
        one.update(&b);
        let mut r = Rng::new(5);
        let (mut many, mut at) = (Digest::default(), 0);
        while at < b.len() {
            let n = (r.below(20) as usize).min(b.len() - at);
            many.update(&b[at..at + n]);
            at += n;
        }
        assert_eq!(one.value(), many.value());
        many.update(b"x");
        assert_ne!(one.value(), many.value());
    }

    #[test]
    fn sizes_stay_in_range() {
        let mut r = Rng::new(1);
        for _ in 0..10_000 {
            let n = r.log_uniform(1, 1 << 20);
            assert!((1..=1 << 20).contains(&n));
        }
    }
}
