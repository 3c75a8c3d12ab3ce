//! Which writes of a connection's bytes give a completion, and when the next one may go.
//!
//! A completion tells that its write, and all before it, are done; most writes do without, because each costs both
//! the device and us. Whoever is refused waits for one, so there must be one to come.

/// Writes of one connection's bytes that may be under way; what is sent meanwhile goes with the next.
const MOST: u16 = 4;
/// While so many are, less than a `Gather`'s worth waits for one of them to be done; while fewer are, if the last
/// gives a completion. Of so many in a row one does.
const GATHER_FROM: u16 = 2;
/// A write of so many bytes always gives a completion.
pub(super) const LARGE: u64 = 32 << 10;

/// The writes of one connection's bytes that are under way.
#[derive(Clone, Copy, Default)]
#[repr(C, align(4))]
pub(super) struct Flight {
    writes: u16,
    /// How many of them were posted since the last that gives a completion.
    silent: u16,
}

impl Flight {
    /// Whether another may be posted. `few`: less than is worth a write of its own.
    #[inline(always)]
    pub(super) fn takes(&self, few: bool) -> bool {
        let most = match (few, self.silent) {
            (false, _) => MOST,
            (true, 0) => 1,
            (true, _) => GATHER_FROM,
        };
        self.writes < most
    }

    /// As [`Flight::answered`] and then [`Flight::post`] of a few bytes, if that may be and takes no completion.
    #[inline(always)]
    pub(super) fn exchange(&mut self) -> bool {
        // As one number.
        match u32::from(self.writes) | u32::from(self.silent) << 16 {
            0x1_0001 => true,
            0 => {
                *self = Flight { writes: 1, silent: 1 };
                true
            }
            _ => false,
        }
    }

    /// A write of `len` bytes is posted; whether it is to give a completion.
    #[inline(always)]
    pub(super) fn post(&mut self, len: u64) -> bool {
        self.writes += 1;
        self.silent += 1;
        let tells = self.silent >= GATHER_FROM || len >= LARGE;
        if tells {
            self.silent = 0;
        }
        tells
    }

    /// The peer has sent something meanwhile. Where one write is under way that is most often the answer to it, which has
    /// come then: whoever exchanges messages one by one needs no completions, and gathers nothing. (If it has not, and is
    /// done later, fewer are counted than there are, which keeps nobody from being told.)
    #[inline(always)]
    pub(super) fn answered(&mut self) {
        if self.writes == 1 {
            *self = Flight::default();
        }
    }

    /// The first of them is done.
    pub(super) fn done(&mut self) {
        self.writes = self.writes.saturating_sub(1);
        self.silent = self.silent.min(self.writes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// A connection's writes as the device has them: whether each gives a completion.
    #[derive(Clone, Default)]
    struct World {
        flight: Flight,
        device: VecDeque<bool>,
    }

    impl World {
        /// Every sequence of sends (few bytes, more, many), answers and completions, to a depth. A completion is that of
        /// the first write that gives one, or of a later write of another connection, which tells of all before it.
        fn explore(&self, depth: usize, seen: &mut u32) {
            *seen += 1;
            for few in [true, false] {
                let comes = self.device.iter().any(|tells| *tells);
                assert!(self.flight.takes(few) || comes, "refused, and nothing will tell: {:?}", self.device);
            }
            assert!(usize::from(self.flight.writes) <= self.device.len());
            if depth == 0 {
                return;
            }
            for (few, len) in [(true, 64), (false, 12 << 10), (false, LARGE)] {
                if self.flight.takes(few) {
                    let mut w = self.clone();
                    let tells = w.flight.post(len);
                    w.device.push_back(tells);
                    w.explore(depth - 1, seen);
                }
            }
            if self.flight.writes == 1 {
                let mut w = self.clone();
                w.flight.answered();
                w.explore(depth - 1, seen);
            }
            let own = self.device.iter().position(|tells| *tells).map(|at| at + 1);
            for n in own.into_iter().chain(1..=self.device.len()) {
                let mut w = self.clone();
                for _ in 0..n {
                    w.device.pop_front();
                    w.flight.done();
                }
                w.explore(depth - 1, seen);
            }
        }
    }

    #[test]
    fn who_is_refused_will_be_told() {
        let mut seen = 0;
        World::default().explore(7, &mut seen);
        assert!(seen > 10_000, "{seen}");
    }

    #[test]
    fn an_exchange_is_an_answer_and_a_write() {
        for (writes, silent) in (0..4).flat_map(|w| (0..=w).map(move |s| (w, s))) {
            let (mut f, mut one) = (Flight { writes, silent }, Flight { writes, silent });
            f.answered();
            if one.exchange() {
                assert!(f.takes(true) && !f.post(64));
                assert_eq!((one.writes, one.silent), (f.writes, f.silent), "{writes} {silent}");
            } else {
                assert!(writes > 1 || silent == 0 && writes == 1, "{writes} {silent}");
            }
        }
    }

    #[test]
    fn exchanges_have_no_completions_of_their_own() {
        let mut f = Flight::default();
        for _ in 0..10 {
            assert!(f.takes(true) && !f.post(64));
            f.answered();
        }
    }

    #[test]
    fn small_sends_without_answers_have_one_completion_for_two_writes() {
        let mut f = Flight::default();
        assert!(f.takes(true) && !f.post(64));
        assert!(f.takes(true) && f.post(64));
        assert!(!f.takes(true) && f.takes(false));
    }
}
