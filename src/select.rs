//! `select` as a `poll`.
//!
//! Waiting is written once, for [`crate::ops::poll`]. Here the three bit sets
//! become an array for it, and its answer becomes bits again, by the kernel's
//! own rules (`fs/select.c`). Used only if a set holds one of our sockets:
//! every other `select` goes to the kernel as it is.

use crate::copy;
use crate::dispatch::now_ns;
use crate::limits;
use crate::ops::{self, Outcome};
use crate::room::{self, Room};
use crate::sync::timespec_of;
use crate::sys::sys;
use core::mem::{size_of, MaybeUninit};
use libc::{c_int, fd_set, pollfd, sigset_t};

/// Bits in a word of an `fd_set`; the kernel reads and writes whole words.
const WORD: usize = usize::BITS as usize;
/// So many fds are listed on the program's stack, which may be a small one.
const SMALL: usize = 128;

// What the kernel asks of a file for each set, and takes for an answer. Only
// `POLLHUP` and `POLLERR` come without having been asked for.
const READ_ASK: i16 = libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND;
const READ_IS: i16 = READ_ASK | libc::POLLHUP | libc::POLLERR;
const WRITE_ASK: i16 = libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND;
const WRITE_IS: i16 = WRITE_ASK | libc::POLLERR;
const EXCEPT_ASK: i16 = libc::POLLPRI;
const EXCEPT_IS: i16 = EXCEPT_ASK;

/// How many descriptors `select` looks at when it is told `n`.
///
/// The kernel never looks beyond the process's table of descriptors. Programs
/// rely on it: `select(getdtablesize(), ...)` with sets of 1024 bits. The table
/// has at least 64 places and its size is only to be had from `/proc`, so it is
/// asked for only if `n` is more than an `fd_set` holds.
pub fn clip(n: c_int) -> usize {
    let n = usize::try_from(n).unwrap_or(0);
    if n <= SMALL {
        n
    } else {
        n.min(table_size().unwrap_or(SMALL))
    }
}

/// The size of the process's table of descriptors: `FDSize` in `/proc/self/status`.
fn table_size() -> Option<usize> {
    let mut text = [0u8; 1024];
    // SAFETY: a constant path, and a buffer of the length given; the descriptor is our own and closed here.
    let len = unsafe {
        let fd =
            sys!(libc::SYS_openat, libc::AT_FDCWD, c"/proc/self/status".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC)
                .ok()?;
        let len = sys!(libc::SYS_read, fd, text.as_mut_ptr(), text.len());
        let _ = sys!(libc::SYS_close, fd);
        len.ok()?
    };
    let text = &text[..len];
    let key = b"FDSize:";
    let at = text.windows(key.len()).position(|w| w == key)? + key.len();
    let digits = text[at..].iter().skip_while(|c| c.is_ascii_whitespace()).take_while(|c| c.is_ascii_digit());
    digits.fold(None, |sum, c| Some(sum.unwrap_or(0usize).checked_mul(10)? + usize::from(c - b'0')))
}

/// The three sets of a call, as words.
#[derive(Clone, Copy)]
struct Sets {
    sets: [*mut usize; 3],
    n: usize,
}

impl Sets {
    /// Whether something is true of all words of each set that is given.
    fn are(&self, it: impl Fn(*mut usize, usize) -> bool) -> bool {
        self.sets.iter().all(|set| set.is_null() || it(*set, self.n.div_ceil(WORD)))
    }

    /// Word `i` of set `s`, without the bits from `n` on; 0 for a set not given.
    unsafe fn word(&self, s: usize, i: usize) -> usize {
        let set = self.sets[s];
        if set.is_null() {
            return 0;
        }
        let bits = self.n - i * WORD;
        let mask = if bits >= WORD { usize::MAX } else { (1 << bits) - 1 };
        set.add(i).read() & mask
    }

    /// Calls `each` for every descriptor in any set, with what is asked of it, until it says no.
    unsafe fn scan(&self, mut each: impl FnMut(c_int, i16) -> bool) {
        for i in 0..self.n.div_ceil(WORD) {
            let [r, w, e] = [self.word(0, i), self.word(1, i), self.word(2, i)];
            let mut left = r | w | e;
            while left != 0 {
                let bit = left.trailing_zeros() as usize;
                left &= left - 1;
                let mut ask = 0;
                for (set, events) in [(r, READ_ASK), (w, WRITE_ASK), (e, EXCEPT_ASK)] {
                    if set >> bit & 1 != 0 {
                        ask |= events;
                    }
                }
                if !each((i * WORD + bit) as c_int, ask) {
                    return;
                }
            }
        }
    }

    /// Clears all words that the kernel would write.
    unsafe fn clear(&self) {
        for set in self.sets {
            if !set.is_null() {
                set.write_bytes(0, self.n.div_ceil(WORD));
            }
        }
    }

    unsafe fn set(&self, s: usize, fd: usize) {
        let word = self.sets[s].add(fd / WORD);
        word.write(word.read() | 1 << (fd % WORD));
    }
}

/// What an answer means for each of the three sets, given what was asked.
fn hits(p: &pollfd) -> [bool; 3] {
    [(READ_ASK, READ_IS), (WRITE_ASK, WRITE_IS), (EXCEPT_ASK, EXCEPT_IS)]
        .map(|(ask, is)| p.events & ask != 0 && p.revents & is != 0)
}

/// Whether `ours` is true of any descriptor in the sets.
///
/// # Safety
/// The sets are null or hold as many bits as `select` would look at.
pub unsafe fn any(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, ours: impl Fn(c_int) -> bool) -> bool {
    let sets = Sets { sets: [r.cast(), w.cast(), e.cast()], n: clip(n) };
    if !sets.are(|set, words| copy::is_there(set, words)) {
        // It is for the kernel to say so.
        return false;
    }
    let mut found = false;
    sets.scan(|fd, _| {
        found = ours(fd);
        !found
    });
    found
}

/// Memory for the array: the caller's, some that is kept for such calls, or pages of its own.
struct Array {
    at: *mut pollfd,
    _room: Option<Room>,
    mapped: usize,
}

impl Array {
    unsafe fn new(small: &mut [MaybeUninit<pollfd>], n: usize) -> Option<Array> {
        if n <= small.len() {
            return Some(Array { at: small.as_mut_ptr().cast(), _room: None, mapped: 0 });
        }
        let bytes = n * size_of::<pollfd>();
        if bytes <= room::BYTES {
            let room = Room::take()?;
            return Some(Array { at: room.at().cast(), _room: Some(room), mapped: 0 });
        }
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let at = sys!(libc::SYS_mmap, 0, bytes, prot, flags, -1isize, 0).ok()?;
        Some(Array { at: at as *mut pollfd, _room: None, mapped: bytes })
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        if self.mapped != 0 {
            // SAFETY: the pages were mapped by `new`, and nothing refers to them any more.
            let _ = unsafe { sys!(libc::SYS_munmap, self.at, self.mapped) };
        }
    }
}

/// `select` over sets that hold one of our sockets, by [`ops::poll`].
///
/// `timeout_ns` < 0 waits for ever; `sigmask` may be null. `Bypass` if `poll`
/// says so; the sets are then as they were.
///
/// # Safety
/// The sets are null or hold as many bits as `select` would look at.
pub unsafe fn select(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    timeout_ns: i64,
    sigmask: *const sigset_t,
) -> Outcome {
    if n < 0 {
        return Outcome::Fail(libc::EINVAL);
    }
    let sets = Sets { sets: [r.cast(), w.cast(), e.cast()], n: clip(n) };
    if !sets.are(copy::is_writable) {
        // The kernel waits first.
        return Outcome::Fail(libc::EFAULT);
    }
    let mut count = 0;
    sets.scan(|_, _| {
        count += 1;
        true
    });
    let mut small = [const { MaybeUninit::uninit() }; SMALL];
    let Some(array) = Array::new(&mut small, count) else { return Outcome::Fail(libc::ENOMEM) };
    let mut filled = 0;
    sets.scan(|fd, events| {
        // Another thread may add to the sets meanwhile; what was not counted has no place.
        if filled < count {
            array.at.add(filled).write(pollfd { fd, events, revents: 0 });
            filled += 1;
        }
        filled < count
    });
    let fds = core::slice::from_raw_parts_mut(array.at, filled);
    wait(&sets, fds, timeout_ns, sigmask)
}

unsafe fn wait(sets: &Sets, fds: &mut [pollfd], timeout_ns: i64, sigmask: *const sigset_t) -> Outcome {
    let end = if timeout_ns > 0 { now_ns().saturating_add(timeout_ns) } else { timeout_ns };
    let mut limit = timeout_ns;
    loop {
        match ops::poll(fds.as_mut_ptr(), fds.len(), limit, sigmask) {
            Outcome::Fail(libc::EINVAL) if fds.len() > limits::files() => match in_pieces(fds, limit, sigmask) {
                Outcome::Done(0) => {
                    sets.clear();
                    return Outcome::Done(0);
                }
                Outcome::Done(_) => {}
                other => return other,
            },
            Outcome::Done(0) => {
                sets.clear();
                return Outcome::Done(0);
            }
            Outcome::Done(_) => {}
            other => return other,
        }
        if fds.iter().any(|p| p.fd >= 0 && p.revents & libc::POLLNVAL != 0) {
            return Outcome::Fail(libc::EBADF);
        }
        if fds.iter().any(|p| p.fd >= 0 && hits(p).contains(&true)) {
            return Outcome::Done(answer(sets, fds));
        }
        // `poll` tells of a hang-up or an error also where only the other sets were asked for, and would
        // do so again and again: such a descriptor has nothing to wait for any more.
        for p in fds.iter_mut().filter(|p| p.fd >= 0 && p.revents != 0) {
            p.fd = !p.fd;
        }
        if timeout_ns > 0 {
            limit = (end - now_ns()).max(0);
        }
    }
}

/// [`ops::poll`] of more descriptors than the process may have open now, which `poll` refuses and `select` does not: as many at
/// a time as it takes. What comes may be found a moment later than by one call.
unsafe fn in_pieces(fds: &mut [pollfd], timeout_ns: i64, sigmask: *const sigset_t) -> Outcome {
    const SLICE_NS: i64 = 1_000_000;
    let end = if timeout_ns > 0 { now_ns().saturating_add(timeout_ns) } else { timeout_ns };
    let most = limits::files();
    if most == 0 {
        return Outcome::Fail(libc::EINVAL);
    }
    let mut slice = 0;
    loop {
        let mut ready = 0;
        for (i, piece) in fds.chunks_mut(most).enumerate() {
            // (Only one of them waits.)
            match some(piece, if i == 0 { slice } else { 0 }, sigmask) {
                Outcome::Done(n) => ready += n,
                other => return other,
            }
        }
        let left = if timeout_ns < 0 { SLICE_NS } else { end - now_ns() };
        if ready > 0 || timeout_ns == 0 || left <= 0 {
            return Outcome::Done(ready);
        }
        slice = left.min(SLICE_NS);
    }
}

/// As [`ops::poll`], also where none of them is ours.
unsafe fn some(fds: &mut [pollfd], timeout_ns: i64, sigmask: *const sigset_t) -> Outcome {
    match ops::poll(fds.as_mut_ptr(), fds.len(), timeout_ns, sigmask) {
        Outcome::Bypass => {
            let ts = timespec_of(timeout_ns);
            Outcome::from(sys!(libc::SYS_ppoll, fds.as_mut_ptr(), fds.len(), &ts, sigmask, size_of::<u64>()))
        }
        other => other,
    }
}

/// Writes the sets, and counts their bits.
unsafe fn answer(sets: &Sets, fds: &[pollfd]) -> isize {
    sets.clear();
    let mut bits = 0;
    for p in fds.iter().filter(|p| p.fd >= 0) {
        for (s, hit) in hits(p).into_iter().enumerate() {
            if hit {
                sets.set(s, p.fd as usize);
                bits += 1;
            }
        }
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(words: &mut [[usize; 2]; 3], n: usize) -> Sets {
        Sets { sets: words.each_mut().map(|w| w.as_mut_ptr()), n }
    }

    #[test]
    fn scan_asks_for_each_set_and_stops_at_n() {
        let mut words = [[1 << 3, 1 << 6], [1 << 3, 1], [0, 1 << 7]];
        let sets = sets(&mut words, 64 + 7);
        let mut seen = Vec::new();
        // SAFETY: the words hold 128 bits, more than n.
        unsafe {
            sets.scan(|fd, events| {
                seen.push((fd, events));
                true
            })
        };
        assert_eq!(seen, [(3, READ_ASK | WRITE_ASK), (64, WRITE_ASK), (70, READ_ASK)]);
    }

    #[test]
    fn answer_counts_bits_of_all_sets_and_clears_the_rest() {
        let mut words = [[usize::MAX, usize::MAX], [usize::MAX, usize::MAX], [usize::MAX, usize::MAX]];
        let sets = sets(&mut words, 64);
        let fd = |fd, events, revents| pollfd { fd, events, revents };
        let fds = [
            fd(1, READ_ASK | WRITE_ASK, libc::POLLIN | libc::POLLOUT),
            fd(2, READ_ASK, libc::POLLHUP),
            fd(3, WRITE_ASK, libc::POLLHUP),
            fd(4, WRITE_ASK | EXCEPT_ASK, libc::POLLERR),
            fd(5, EXCEPT_ASK, libc::POLLPRI),
            fd(!6, READ_ASK, libc::POLLIN),
        ];
        // SAFETY: the words hold 128 bits, more than n.
        assert_eq!(unsafe { answer(&sets, &fds) }, 5);
        // The second word lies beyond n and stays as it was.
        assert_eq!(words, [[0b110, usize::MAX], [0b10010, usize::MAX], [0b100000, usize::MAX]]);
    }

    #[test]
    fn a_negative_n_is_invalid_and_a_large_one_ends_with_the_table() {
        assert_eq!(clip(-1), 0);
        assert_eq!(clip(1024), 1024);
        let size = table_size().expect("/proc/self/status names FDSize");
        assert!(size >= 64, "FDSize {size}");
        assert_eq!(clip(c_int::MAX), size);
    }
}
