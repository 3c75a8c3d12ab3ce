//! Which writes of a connection's bytes give a completion, and when the next one may go.
//!
//! A completion tells that its write, and all before it, are done; most writes do without, because each costs both
//! the device and us. Whoever is refused waits for one, so there must be one to come.

/// Writes of one connection's bytes that may be under way, but for those of a little that give no completion.
const MOST: u8 = 4;
/// While so many are, less than a `Gather`'s worth waits for one of them to be done; while fewer are, if the last
/// gives a completion. Of so many in a row one does.
const GATHER_FROM: u8 = 2;
/// The same for who sends so slowly that nothing comes together meanwhile: there a completion is a mere cost.
const GATHER_LATEST: u8 = 32;
/// A write of so many bytes always gives a completion.
pub(super) const LARGE: u64 = 32 << 10;

/// The writes of one connection's bytes that are under way.
#[derive(Clone, Copy, Default)]
#[repr(C, align(4))]
pub(super) struct Flight {
    writes: u8,
    /// How many of them were posted since the last that gives a completion.
    silent: u8,
    /// So many more than [`GATHER_FROM`].
    wider: u8,
    /// Something that is less than worth a write waits.
    holds: bool,
}

impl Flight {
    /// Whether another may be posted. `few`: less than is worth a write of its own.
    #[inline(always)]
    pub(super) fn takes(&self, few: bool) -> bool {
        match (few, self.silent) {
            // Where none of them gives a completion, nobody would be told.
            (false, silent) => self.writes < MOST || self.writes == silent,
            (true, 0) => self.writes == 0,
            (true, _) => self.writes < self.most_silent(),
        }
    }

    #[inline(always)]
    fn most_silent(&self) -> u8 {
        GATHER_FROM + self.wider
    }

    /// A few bytes were refused, and gather.
    pub(super) fn hold(&mut self) {
        self.holds = true;
    }

    /// As [`Flight::answered`] and then [`Flight::post`] of a few bytes, if that may be and takes no completion.
    #[inline(always)]
    pub(super) fn exchange(&mut self) -> bool {
        // As one number.
        match u16::from(self.writes) | u16::from(self.silent) << 8 {
            0x101 => true,
            0 => {
                (self.writes, self.silent) = (1, 1);
                true
            }
            _ => false,
        }
    }

    /// [`Flight::post`] of a few bytes behind others of their kind, if that may be and takes no completion.
    #[inline(always)]
    pub(super) fn follow(&mut self) -> bool {
        let does = self.writes == self.silent && self.silent + 1 < self.most_silent();
        if does {
            self.writes += 1;
            self.silent += 1;
        }
        does
    }

    /// A write of `len` bytes is posted, behind one of `before`; whether it is to give a completion. `few`: as it was asked for.
    #[inline(always)]
    pub(super) fn post(&mut self, few: bool, len: u64, before: u64) -> bool {
        if core::mem::take(&mut self.holds) {
            self.learn(len, before);
        }
        self.writes += 1;
        self.silent += 1;
        let tells = self.silent >= self.most_silent() || len >= LARGE || (!few && self.writes >= MOST);
        if tells {
            self.silent = 0;
        }
        tells
    }

    /// What was held back is `len` bytes by now, and the write before it, of `before`, was most often one message.
    #[cold]
    fn learn(&mut self, len: u64, before: u64) {
        self.wider = match len <= 2 * before {
            true => (2 * self.most_silent()).min(GATHER_LATEST) - GATHER_FROM,
            false => 0,
        };
    }

    /// The peer has sent something meanwhile. Where one write is under way that is most often the answer to it, which has
    /// come then: whoever exchanges messages one by one needs no completions, and gathers nothing. (If it has not, and is
    /// done later, fewer are counted than there are, which keeps nobody from being told.)
    #[inline(always)]
    pub(super) fn answered(&mut self) {
        if self.writes == 1 {
            (self.writes, self.silent) = (0, 0);
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
                let mut w = self.clone();
                if w.flight.takes(few) {
                    let follows = w.clone().flight.follow();
                    // What was gathered is one message, or many.
                    for before in [64, 1].into_iter().take(if few && w.flight.holds { 2 } else { 1 }) {
                        let mut w = w.clone();
                        let tells = w.flight.post(few, len, before);
                        assert!(self.flight.holds || !few || !follows || !tells);
                        w.device.push_back(tells);
                        w.explore(depth - 1, seen);
                    }
                } else if few && !w.flight.holds {
                    w.flight.hold();
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
        // Narrow, in between, and with so many under way that what is more than a little is refused.
        for (wider, behind) in [(0, 0), (1, 0), (2, 0), (6, 5), (6, 7)] {
            let mut w = World { flight: Flight { wider, ..Flight::default() }, ..World::default() };
            for _ in 0..behind {
                assert!(w.flight.takes(true));
                w.device.push_back(w.flight.post(true, 64, 64));
            }
            w.explore(6, &mut seen);
        }
        assert!(seen > 50_000, "{seen}");
    }

    #[test]
    fn an_exchange_is_an_answer_and_a_write() {
        for (writes, silent) in (0..4).flat_map(|w| (0..=w).map(move |s| (w, s))) {
            let flight = Flight { writes, silent, ..Flight::default() };
            let (mut f, mut one) = (flight, flight);
            f.answered();
            if one.exchange() {
                assert!(f.takes(true) && !f.post(true, 64, 64));
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
            assert!(f.takes(true) && !f.post(true, 64, 64));
            f.answered();
        }
    }

    #[test]
    fn small_sends_without_answers_have_one_completion_for_two_writes() {
        let mut f = Flight::default();
        assert!(f.takes(true) && !f.post(true, 64, 64));
        assert!(f.takes(true) && f.post(true, 64, 64));
        assert!(!f.takes(true) && f.takes(false));
    }

    /// Writes until one is refused; all are done then, and what has gathered goes in one.
    fn cycle(f: &mut Flight, gathered: u64) -> u8 {
        let mut n = 0;
        while f.takes(true) {
            if !f.follow() {
                assert!(f.post(true, 64, 64));
            }
            n += 1;
        }
        f.hold();
        (0..f.writes).for_each(|_| f.done());
        assert!(f.takes(true) && !f.post(true, gathered, 64));
        n
    }

    /// A sender behind whose writes nothing comes together has fewer completions, until much does.
    #[test]
    fn who_gathers_nothing_has_few_completions() {
        let mut f = Flight::default();
        let slow: Vec<u8> = (0..5).map(|_| cycle(&mut f, 128)).collect();
        assert_eq!(slow, [2, 3, 7, 15, 31]);
        assert_eq!([cycle(&mut f, 640), cycle(&mut f, 640)], [31, 1]);
    }
}
