//! Queries over streams of events that several processes answer together, as stream processors do (after Slash and
//! the Yahoo streaming benchmark): counting what comes (`--mode count`), or counting the views of each campaign in
//! windows of time. For the latter a worker filters its events and joins the advertisement of each with its
//! campaign; then either every event goes to the owner of its campaign (`--mode repartition`), or each worker counts
//! for itself and a leader merges its partial counts at each window's end (`--mode partial`). Campaigns may be
//! skewed.

use super::common::{check, connect, message, read_or_end, seal, serve, wrong, Clock, Tally, HEAD};
use crate::args::Args;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};

/// Bytes of events in a message; the first [`EVENT`] are the sealing's.
const BUFFER: usize = 32 << 10;
/// Campaigns, and advertisements of each: as many as the Yahoo benchmark has.
const CAMPAIGNS: usize = 100;
const ADS: usize = 10;
/// Bytes of an event on its way: its key and its time.
const EVENT: usize = 16;
/// Events of a window, for one worker.
const WINDOW: u64 = 50_000;
/// Instead of a campaign: the rest of the message is empty.
const NONE: u64 = u64::MAX;

#[derive(Clone, Copy, PartialEq)]
enum Plan {
    Count,
    Repartition,
    Partial,
}

impl Plan {
    fn of(a: &Args) -> io::Result<Plan> {
        match a.text("mode", "repartition").as_str() {
            "count" => Ok(Plan::Count),
            "repartition" => Ok(Plan::Repartition),
            "partial" => Ok(Plan::Partial),
            other => wrong(format!("no such mode: {other}")),
        }
    }

    fn message(self) -> usize {
        HEAD + if self == Plan::Partial { 8 + CAMPAIGNS * 8 } else { BUFFER }
    }
}

fn word(b: &[u8]) -> u64 {
    u64::from_le_bytes(b.try_into().expect("8 bytes"))
}

/// An event: which advertisement, whether it was viewed, and when.
struct Event {
    ad: usize,
    view: bool,
    time: u64,
}

/// A source of events.
struct Source {
    state: u64,
    skew: bool,
    time: u64,
    /// The campaign of each advertisement.
    campaigns: Vec<u64>,
}

impl Source {
    fn new(seed: u64, skew: bool) -> Source {
        // One to one between tens, so that neighbours belong together as little as in a real table.
        let campaigns = (0..CAMPAIGNS * ADS).map(|ad| (ad * 37 % CAMPAIGNS) as u64).collect();
        Source { state: seed, skew, time: 0, campaigns }
    }

    fn next(&mut self) -> Event {
        self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = (self.state >> 33) as usize;
        // Skewed: half of all events are of a hundredth of the advertisements.
        let of = if self.skew && x & 1 == 1 { ADS } else { CAMPAIGNS * ADS };
        self.time += 1;
        Event { ad: (x >> 3) % of, view: (x >> 1).is_multiple_of(3), time: self.time }
    }

    /// The campaign of an event that the query is about.
    fn campaign(&self, e: &Event) -> Option<u64> {
        e.view.then(|| self.campaigns[e.ad])
    }
}

/// What a stream has come to.
#[derive(Default, Clone, PartialEq, Debug)]
struct Counts {
    all: u64,
    sum: u64,
    views: Vec<u64>,
}

impl Counts {
    fn new() -> Counts {
        Counts { views: vec![0; CAMPAIGNS], ..Counts::default() }
    }

    fn event(&mut self, key: u64, time: u64) {
        self.all += 1;
        self.sum = self.sum.wrapping_add(key ^ time.rotate_left(20));
    }

    fn encode(&self) -> Vec<u8> {
        let head = [self.all, self.sum];
        head.iter().chain(&self.views).flat_map(|n| n.to_le_bytes()).collect()
    }
}

/// The leader's and the owners' counts of the window that is open, which ends when one of the next begins.
#[derive(Default)]
struct Window {
    number: u64,
    views: Vec<u64>,
}

impl Window {
    fn add(&mut self, number: u64, campaign: usize, n: u64) {
        if number > self.number || self.views.is_empty() {
            self.number = number;
            self.views.clear();
            self.views.resize(CAMPAIGNS, 0);
        }
        self.views[campaign] += n;
    }
}

/// `load-server window --mode count|repartition|partial`: answers the query; at a stream's end it answers what
/// that stream has come to.
pub fn server(a: &Args) -> io::Result<()> {
    let plan = Plan::of(a)?;
    let leader: Arc<Mutex<Window>> = Arc::default();
    serve(a, move |mut s| {
        let size = plan.message();
        let (mut b, mut mine, mut open, mut seq) = (message(size), Counts::new(), Window::default(), 0);
        while read_or_end(&mut s, &mut b)? {
            check(seq, &b)?;
            if plan == Plan::Partial {
                let mut leader = leader.lock().unwrap_or_else(|e| e.into_inner());
                for (k, w) in b[HEAD + 8..].chunks_exact(8).enumerate() {
                    mine.views[k] += word(w);
                    leader.add(seq, k, word(w));
                }
            } else {
                for e in b[HEAD + EVENT..].chunks_exact(EVENT) {
                    let (key, time) = (word(&e[..8]), word(&e[8..]));
                    if key == NONE {
                        break;
                    }
                    mine.event(key, time);
                    if plan == Plan::Repartition {
                        let Some(n) = mine.views.get_mut(key as usize) else { return wrong("no such campaign") };
                        *n += 1;
                        open.add(time / WINDOW, key as usize, 1);
                    }
                }
            }
            seq += 1;
        }
        s.write_all(&mine.encode())
    })
}

/// A worker's connection to the owner of some campaigns, or to the leader.
struct Out {
    s: TcpStream,
    b: Vec<u8>,
    at: usize,
    seq: u64,
    sent: Counts,
}

impl Out {
    fn new(a: &Args, plan: Plan) -> io::Result<Out> {
        Ok(Out { s: connect(a)?, b: message(plan.message()), at: HEAD + EVENT, seq: 0, sent: Counts::new() })
    }

    fn send(&mut self) -> io::Result<()> {
        seal(self.seq, &mut self.b);
        self.seq += 1;
        self.at = HEAD + EVENT;
        self.s.write_all(&self.b)
    }

    /// Puts an event into the message; returns whether that was sent.
    fn event(&mut self, key: u64, time: u64) -> io::Result<bool> {
        self.sent.event(key, time);
        let to = &mut self.b[self.at..self.at + EVENT];
        to[..8].copy_from_slice(&key.to_le_bytes());
        to[8..].copy_from_slice(&time.to_le_bytes());
        self.at += EVENT;
        let full = self.at + EVENT > self.b.len();
        if full {
            self.send()?;
        }
        Ok(full)
    }

    /// Ends the stream, and compares what it has come to.
    fn end(mut self, plan: Plan) -> io::Result<()> {
        if plan != Plan::Partial && self.at > HEAD + EVENT {
            self.b[self.at..self.at + 8].copy_from_slice(&NONE.to_le_bytes());
            self.send()?;
        }
        self.s.shutdown(std::net::Shutdown::Write)?;
        let want = self.sent.encode();
        let mut got = vec![0; want.len()];
        self.s.read_exact(&mut got)?;
        if got != want {
            return wrong(format!("the answer is {got:?}, not {want:?}"));
        }
        Ok(())
    }
}

/// `load-client window --mode count|repartition|partial [--workers N] [--owners N] [--skew 1]`: as many owners as
/// workers, if nothing is said. The rate is that of the events before the filter.
pub fn client(a: &Args) -> io::Result<()> {
    let (clock, workers, skew) = (Clock::default(), a.num("workers", 1), a.num("skew", 0) > 0);
    let plan = Plan::of(a)?;
    let owners = if plan == Plan::Repartition { a.num("owners", workers).max(1) } else { 1 };
    let t = clock.run(a, workers as usize, |i| {
        let (mut source, mut t) = (Source::new(12345 + i as u64, skew), Tally::default());
        let mut outs: Vec<Out> = (0..owners).map(|_| Out::new(a, plan)).collect::<io::Result<_>>()?;
        let size = plan.message() as u64;
        let mut since = 0;
        while !clock.over() {
            match plan {
                Plan::Count => {
                    let e = source.next();
                    since += 1;
                    if outs[0].event(e.ad as u64, e.time)? {
                        t.hit(&clock, std::mem::take(&mut since), size);
                    }
                }
                Plan::Repartition => {
                    let e = source.next();
                    since += 1;
                    let Some(c) = source.campaign(&e) else { continue };
                    let out = &mut outs[(c % owners) as usize];
                    out.sent.views[c as usize] += 1;
                    if out.event(c, e.time)? {
                        t.hit(&clock, std::mem::take(&mut since), size);
                    }
                }
                Plan::Partial => {
                    let (mut window, out) = (vec![0u64; CAMPAIGNS], &mut outs[0]);
                    for _ in 0..WINDOW {
                        let e = source.next();
                        if let Some(c) = source.campaign(&e) {
                            window[c as usize] += 1;
                        }
                    }
                    for (to, n) in out.b[HEAD + 8..].chunks_exact_mut(8).zip(&window) {
                        to.copy_from_slice(&n.to_le_bytes());
                    }
                    out.sent.views.iter_mut().zip(&window).for_each(|(all, n)| *all += n);
                    out.send()?;
                    t.hit(&clock, WINDOW, size);
                }
            }
        }
        outs.into_iter().try_for_each(|o| o.end(plan))?;
        Ok(t)
    })?;
    t.print("");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_of_the_events_are_views_and_skew_prefers_few_campaigns() {
        for (skew, share) in [(false, 0.1), (true, 0.55)] {
            let mut s = Source::new(1, skew);
            let (mut views, mut few) = (0, 0);
            for _ in 0..30_000 {
                let e = s.next();
                few += u64::from(e.ad < CAMPAIGNS * ADS / 10 && s.campaign(&e).is_some());
                views += u64::from(s.campaign(&e).is_some());
            }
            assert!((9_500..10_500).contains(&views), "{views}");
            let got = few as f64 / views as f64;
            assert!((got - share).abs() < 0.05, "{got}");
        }
        let s = Source::new(1, false);
        assert!((0..CAMPAIGNS as u64).all(|c| s.campaigns.iter().filter(|x| **x == c).count() == ADS));
    }

    #[test]
    fn a_window_is_closed_by_the_next() {
        let mut w = Window::default();
        for (number, views) in [(0, 2), (0, 4), (1, 2), (0, 4), (3, 2)] {
            w.add(number, 5, 2);
            assert_eq!(w.views[5], views);
        }
    }
}
