//! A publish/subscribe broker: whatever a publisher sends goes to every subscriber. The shape of
//! RocketBufs' experiments, and of a live relay (one ingest, many viewers).

use super::common::{check, connect, message, now, read_or_end, reader, seal, serve, wrong, Clock, Tally, HEAD};
use crate::args::Args;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Where a message carries the time at which it was published.
const TIME: std::ops::Range<usize> = HEAD + 8..HEAD + 16;

fn size(a: &Args) -> usize {
    (a.num("size", 1024) as usize).max(TIME.end)
}

/// `load-server pubsub [--size S]`: a connection that says `S` is a subscriber's, one that says `P` a
/// publisher's, which gets the number of its messages when it ends its stream.
pub fn server(a: &Args) -> io::Result<()> {
    let size = size(a);
    let subs: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
    serve(a, move |mut s| {
        let mut who = [0];
        s.read_exact(&mut who)?;
        if who == *b"S" {
            s.write_all(b"+")?;
            subs.lock().unwrap_or_else(|e| e.into_inner()).push(s);
            return Ok(());
        }
        let (mut r, mut b, mut n) = (reader(&s)?, message(size), 0u64);
        while read_or_end(&mut r, &mut b)? {
            check(n, &b)?;
            n += 1;
            for to in subs.lock().unwrap_or_else(|e| e.into_inner()).iter_mut() {
                to.write_all(&b)?;
            }
        }
        subs.lock().unwrap_or_else(|e| e.into_inner()).clear();
        s.write_all(&n.to_le_bytes())
    })
}

/// `load-client pubsub [--size S] [--subscribers N] [--rate R]`: one publisher, as fast as it goes or
/// `R` messages a second; the line says what subscribers got (`goodput` in MB/s) and how late.
pub fn client(a: &Args) -> io::Result<()> {
    let (clock, size, n) = (Clock::default(), size(a), a.num("subscribers", 1) as usize);
    let mut subs = Vec::new();
    for _ in 0..n {
        let mut s = connect(a)?;
        s.write_all(b"S")?;
        s.read_exact(&mut [0])?;
        subs.push(Mutex::new(Some(s)));
    }
    let got = Mutex::new(Tally::default());
    let mut t = clock.run(a, n + 1, |i| {
        let Some(mine) = i.checked_sub(1) else { return publish(a, &clock, size) };
        let s = subs[mine].lock().unwrap_or_else(|e| e.into_inner()).take();
        let t = subscribe(s.ok_or(io::ErrorKind::NotConnected)?, &clock, size)?;
        got.lock().unwrap_or_else(|e| e.into_inner()).add(t);
        Ok(Tally::default())
    })?;
    let got = got.into_inner().unwrap_or_else(|e| e.into_inner());
    if got.all != t.all * n as u64 {
        return wrong(format!("{} messages arrived of {} times {n}", got.all, t.all));
    }
    let good = got.bytes as f64 / t.secs / 1e6;
    t.ns = got.ns;
    t.all += got.all;
    t.all_bytes += got.all_bytes;
    t.print(&format!(" goodput={good:.3}"));
    Ok(())
}

fn publish(a: &Args, clock: &Clock, size: usize) -> io::Result<Tally> {
    let (mut s, mut t, mut m) = (connect(a)?, Tally::default(), message(size));
    s.write_all(b"P")?;
    let gap = match a.num("rate", 0) {
        0 => 0,
        r => 1_000_000_000 / r,
    };
    let (mut seq, mut due) = (0u64, now());
    while !clock.over() {
        if gap > 0 {
            due += gap;
            while now() < due {
                std::thread::sleep(Duration::from_nanos(due.saturating_sub(now())));
            }
        }
        m[TIME].copy_from_slice(&now().to_le_bytes());
        seal(seq, &mut m);
        s.write_all(&m)?;
        seq += 1;
        t.hit(clock, 1, size as u64);
    }
    s.shutdown(std::net::Shutdown::Write)?;
    let mut end = [0; 8];
    s.read_exact(&mut end)?;
    if u64::from_le_bytes(end) != seq {
        return wrong(format!("the broker has {} messages of {seq}", u64::from_le_bytes(end)));
    }
    Ok(t)
}

fn subscribe(s: TcpStream, clock: &Clock, size: usize) -> io::Result<Tally> {
    let (mut r, mut t, mut b) = (reader(&s)?, Tally::default(), message(size));
    let mut seq = 0;
    while read_or_end(&mut r, &mut b)? {
        let at = now();
        check(seq, &b)?;
        seq += 1;
        t.late(clock, at.saturating_sub(u64::from_le_bytes(b[TIME].try_into().expect("8 bytes"))));
        t.hit(clock, 1, size as u64);
    }
    Ok(t)
}
