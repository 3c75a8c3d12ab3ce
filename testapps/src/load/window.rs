//! Windowed counting of events by key, as stream processors do it: either every event goes to the
//! worker that owns its key (`--mode repartition`), or each worker counts for itself and a leader
//! merges its partial counts at the end of each window (`--mode partial`). Keys may be skewed.

use super::common::{connect, message, read_or_end, seal, serve, wrong, Clock, Tally, HEAD};
use crate::args::Args;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex};

/// Bytes of a buffer between workers.
const BUFFER: usize = 32 << 10;
/// Keys, as many as the Yahoo benchmark has campaigns.
const KEYS: usize = 100;
/// Bytes of an event: its key and its time.
const EVENT: usize = 16;
/// Events of a window, for one worker.
const WINDOW: u64 = 50_000;

/// `load-server window --mode repartition|partial`: counts what comes; at a stream's end it answers the
/// counts of all keys that came on it.
pub fn server(a: &Args) -> io::Result<()> {
    let partial = a.text("mode", "repartition") == "partial";
    let total: Arc<Mutex<Vec<u64>>> = Arc::new(Mutex::new(vec![0; KEYS]));
    serve(a, move |mut s| {
        let (mut b, mut mine, mut seq) = (message(HEAD + BUFFER), vec![0u64; KEYS], 0);
        let size = if partial { HEAD + KEYS * 8 } else { HEAD + BUFFER };
        while read_or_end(&mut s, &mut b[..size])? {
            super::common::check(seq, &b[..size])?;
            seq += 1;
            let words = b[HEAD + 8..size].chunks_exact(8);
            if partial {
                // The first word is the sealing's: key 0 does not occur.
                let mut t = total.lock().unwrap_or_else(|e| e.into_inner());
                for (k, w) in words.enumerate() {
                    let n = u64::from_le_bytes(w.try_into().expect("8 bytes"));
                    mine[k + 1] += n;
                    t[k + 1] += n;
                }
            } else {
                for e in b[HEAD + EVENT..size].chunks_exact(EVENT) {
                    let key = u64::from_le_bytes(e[..8].try_into().expect("8 bytes")) as usize;
                    mine[key % KEYS] += 1;
                }
            }
        }
        let out: Vec<u8> = mine.iter().flat_map(|n| n.to_le_bytes()).collect();
        s.write_all(&out)
    })
}

/// Keys 1 to 99; with `skew` half of all events have one of ten keys.
fn key(state: &mut u64, skew: bool) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    let x = *state >> 33;
    if skew && x & 1 == 1 {
        1 + (x >> 1) % 10
    } else {
        1 + (x >> 1) % (KEYS as u64 - 1)
    }
}

/// `load-client window --mode repartition|partial [--workers N] [--skew 1]`.
pub fn client(a: &Args) -> io::Result<()> {
    let (clock, workers, skew) = (Clock::default(), a.num("workers", 1) as usize, a.num("skew", 0) > 0);
    let partial = a.text("mode", "repartition") == "partial";
    let t = clock.run(a, workers, |i| {
        let (mut s, mut t) = (connect(a)?, Tally::default());
        let mut counts = vec![0u64; KEYS];
        let mut state = 12345 + i as u64;
        let mut seq = 0;
        let size = if partial { HEAD + KEYS * 8 } else { HEAD + BUFFER };
        let mut b = message(size);
        let mut window = vec![0u64; KEYS];
        while !clock.over() {
            let n = if partial {
                window.fill(0);
                for _ in 0..WINDOW {
                    window[key(&mut state, skew) as usize] += 1;
                }
                for (to, w) in b[HEAD..].chunks_exact_mut(8).zip(&window) {
                    to.copy_from_slice(&w.to_le_bytes());
                }
                counts.iter_mut().zip(&window).for_each(|(c, w)| *c += w);
                WINDOW
            } else {
                for e in b[HEAD + EVENT..].chunks_exact_mut(EVENT) {
                    let k = key(&mut state, skew);
                    counts[k as usize] += 1;
                    e[..8].copy_from_slice(&k.to_le_bytes());
                    e[8..].copy_from_slice(&state.to_le_bytes());
                }
                ((size - HEAD) / EVENT - 1) as u64
            };
            seal(seq, &mut b);
            seq += 1;
            s.write_all(&b)?;
            t.hit(&clock, n, size as u64);
        }
        s.shutdown(std::net::Shutdown::Write)?;
        let mut end = vec![0; KEYS * 8];
        s.read_exact(&mut end)?;
        for (k, w) in end.chunks_exact(8).enumerate() {
            let n = u64::from_le_bytes(w.try_into().expect("8 bytes"));
            if n != counts[k] {
                return wrong(format!("key {k}: {n} events counted of {}", counts[k]));
            }
        }
        Ok(t)
    })?;
    t.print("");
    Ok(())
}
