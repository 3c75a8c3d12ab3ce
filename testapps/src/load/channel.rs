//! A stream channel as between the workers of a stream processor: full buffers, one way, one or
//! more connections.

use super::common::{connect, message, now, read_or_end, seal, serve, wrong, Clock, Tally, HEAD};
use crate::args::Args;
use std::io::{self, Read, Write};

/// Where a buffer carries the time at which it was sent (0: it does not count).
const TIME: std::ops::Range<usize> = HEAD..HEAD + 8;

fn size(a: &Args) -> usize {
    (a.num("size", 32 << 10) as usize).max(HEAD + 16)
}

/// `load-server channel [--size S]`: checks every buffer; at the end of the stream it answers how many
/// there were, and median and 99th percentile of their latency in nanoseconds.
pub fn server(a: &Args) -> io::Result<()> {
    let size = size(a);
    serve(a, move |mut s| {
        let (mut b, mut ns, mut n) = (message(size), Vec::new(), 0u64);
        while read_or_end(&mut s, &mut b)? {
            let t = u64::from_le_bytes(b[TIME].try_into().expect("8 bytes"));
            if t > 0 && ns.len() < 1 << 20 {
                ns.push(now().saturating_sub(t));
            }
            let (head, body) = (&b[..HEAD], &b[HEAD + 8..]);
            check_body(n, head, body)?;
            n += 1;
        }
        ns.sort_unstable();
        let at = |q: usize| ns.get(ns.len() * q / 100).copied().unwrap_or(0);
        for x in [n, at(50), at(99)] {
            s.write_all(&x.to_le_bytes())?;
        }
        Ok(())
    })
}

/// The time is written after the sum was made, so the sum leaves it out.
fn check_body(seq: u64, head: &[u8], body: &[u8]) -> io::Result<()> {
    let got = u64::from_le_bytes(head[..8].try_into().expect("8 bytes"));
    if got != seq {
        return wrong(format!("buffer {seq} carries number {got}"));
    }
    if u64::from_le_bytes(head[8..].try_into().expect("8 bytes")) != super::common::sum(body) {
        return wrong(format!("buffer {seq}: other bytes than were sent"));
    }
    Ok(())
}

/// `load-client channel [--size S] [--conns N]`.
pub fn client(a: &Args) -> io::Result<()> {
    let (clock, size) = (Clock::default(), size(a));
    let late = std::sync::Mutex::new((0u64, 0u64));
    let t = clock.run(a, a.num("conns", 1) as usize, |_| {
        let (mut s, mut t) = (connect(a)?, Tally::default());
        // The head and the body without the time lie in one message, so that `seal` can number it.
        let mut m = message(size - 8);
        let mut b = vec![0; size];
        let mut seq = 0u64;
        while !clock.over() {
            seal(seq, &mut m);
            b[..HEAD].copy_from_slice(&m[..HEAD]);
            b[HEAD + 8..HEAD + 16].copy_from_slice(&m[HEAD..HEAD + 8]);
            if seq == 0 {
                b[HEAD + 8..].copy_from_slice(&m[HEAD..]);
            }
            b[TIME].copy_from_slice(&if clock.counts() { now() } else { 0 }.to_le_bytes());
            s.write_all(&b)?;
            seq += 1;
            t.hit(&clock, 1, size as u64);
        }
        s.shutdown(std::net::Shutdown::Write)?;
        let mut end = [0u8; 24];
        s.read_exact(&mut end)?;
        let word = |i: usize| u64::from_le_bytes(end[i * 8..i * 8 + 8].try_into().expect("8 bytes"));
        if word(0) != seq {
            return wrong(format!("{} buffers arrived of {seq}", word(0)));
        }
        let mut l = late.lock().unwrap_or_else(|e| e.into_inner());
        *l = (l.0.max(word(1)), l.1.max(word(2)));
        Ok(t)
    })?;
    let (p50, p99) = late.into_inner().unwrap_or_else(|e| e.into_inner());
    // Between the clocks of both ends: a number of its own.
    t.print(&format!(" lag={:.2} lag99={:.2}", p50 as f64 / 1e3, p99 as f64 / 1e3));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::common::check;
    use super::*;

    #[test]
    fn the_sum_leaves_the_time_out() {
        let mut m = message(56);
        seal(3, &mut m);
        assert!(check(3, &m).is_ok());
        assert!(check_body(3, &m[..HEAD], &m[HEAD..]).is_ok());
    }
}
