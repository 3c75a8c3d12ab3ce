//! Numbers that have a stream of libc's stdio, which reads and writes them unseen.

use core::sync::atomic::{AtomicU64, Ordering::*};
use libc::c_int;

/// The numbers that have one from the beginning.
pub const STANDARD: core::ops::Range<c_int> = 0..3;

const WORDS: usize = 1024;
/// One bit for each number. (Those above are not looked at.)
static HAS: [AtomicU64; WORDS] = {
    let mut a = [const { AtomicU64::new(0) }; WORDS];
    a[0] = AtomicU64::new((1 << STANDARD.end) - 1);
    a
};

fn bit(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let n = crate::thread::place_of(fd);
    Some((HAS.get(n / 64)?, 1 << (n % 64)))
}

/// The number has a stream, whatever file it is or becomes.
pub fn made(fd: c_int) {
    if let Some((word, bit)) = bit(fd) {
        word.fetch_or(bit, Relaxed);
    }
}

/// The stream is closed.
pub fn ended(fd: c_int) {
    if let Some((word, bit)) = bit(fd) {
        word.fetch_and(!bit, Relaxed);
    }
}

/// Whether the number has a stream.
pub fn has(fd: c_int) -> bool {
    bit(fd).is_some_and(|(word, bit)| word.load(Relaxed) & bit != 0)
}
