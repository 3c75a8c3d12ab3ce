//! A publish/subscribe broker: whatever a publisher sends goes to every subscriber. The shape of
//! RocketBufs' experiments, and of a live relay (one ingest, delivery servers, many viewers).

use super::common::{another, check, connect, connect_to, end_with_the_first, listen, message, now, read_or_end};
use super::common::{reader, seal, serve_on, wrong, Clock, Tally, HEAD};
use crate::args::Args;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Where a message carries the time at which it was published.
const TIME: std::ops::Range<usize> = HEAD + 8..HEAD + 16;

fn size(a: &Args) -> usize {
    (a.num("size", 1024) as usize).max(TIME.end)
}

type Subscribers = Arc<Mutex<Vec<TcpStream>>>;

/// Hands all messages of a stream to the subscribers, and ends their streams with it; how many there were.
fn relay(s: &TcpStream, size: usize, subs: &Subscribers) -> io::Result<u64> {
    let (mut r, mut b, mut n) = (reader(s)?, message(size), 0u64);
    while read_or_end(&mut r, &mut b)? {
        check(n, &b)?;
        n += 1;
        for to in subs.lock().unwrap_or_else(|e| e.into_inner()).iter_mut() {
            to.write_all(&b)?;
        }
    }
    subs.lock().unwrap_or_else(|e| e.into_inner()).clear();
    Ok(n)
}

/// Says that a connection is a subscriber's, and waits until it is one.
fn subscribed(mut s: TcpStream) -> io::Result<TcpStream> {
    s.write_all(b"S")?;
    s.read_exact(&mut [0])?;
    Ok(s)
}

/// `load-server pubsub [--size S] [--relays N]`: a connection that says `S` is a subscriber's, one that says `P` a
/// publisher's, which gets the number of its messages when it ends its stream. With relays it starts N delivery
/// servers, processes of their own that subscribe here, and tells their ports to whoever says `R`.
pub fn server(a: &Args) -> io::Result<()> {
    end_with_the_first(a);
    let size = size(a);
    let subs = Subscribers::default();
    let l = listen(a)?;
    if a.has("ingest") {
        let (a, to) = (a.clone(), subs.clone());
        std::thread::spawn(move || {
            let deliver = || {
                let ingest = subscribed(connect_to(&a, a.num("ingest", 0) as u16)?)?;
                // The stream may begin whenever it likes.
                ingest.set_read_timeout(None)?;
                relay(&ingest, size, &to)
            };
            if let Err(e) = deliver() {
                eprintln!("delivery server: {e}");
                std::process::exit(3);
            }
        });
    }
    let here = l.local_addr()?.port().to_string();
    let words = ["--size", &size.to_string(), "--ingest", &here].map(String::from);
    let relays: Vec<u16> = (0..a.num("relays", 0)).map(|_| another(a, "pubsub", &words)).collect::<io::Result<_>>()?;
    serve_on(l, move |mut s| {
        let mut who = [0];
        s.read_exact(&mut who)?;
        match &who {
            b"S" => {
                let mut subs = subs.lock().unwrap_or_else(|e| e.into_inner());
                s.write_all(b"+")?;
                subs.push(s);
                Ok(())
            }
            b"R" => {
                let until = Instant::now() + Duration::from_secs(10);
                while subs.lock().unwrap_or_else(|e| e.into_inner()).len() < relays.len() {
                    if Instant::now() > until {
                        return wrong("the delivery servers do not subscribe");
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                let ports: Vec<u8> = relays.iter().flat_map(|p| p.to_le_bytes()).collect();
                s.write_all(&ports)
            }
            _ => {
                let n = relay(&s, size, &subs)?;
                s.write_all(&n.to_le_bytes())
            }
        }
    })
}

/// `load-client pubsub [--size S] [--subscribers N] [--rate R]`: one publisher, as fast as it goes or
/// `R` messages a second; the line says how many each subscriber got (without any, how many were sent), what all of them got
/// (`goodput` in MB/s) and how late. The subscribers are spread over the delivery servers, if there are any.
pub fn client(a: &Args) -> io::Result<()> {
    let (clock, size, n) = (Clock::default(), size(a), a.num("subscribers", 1) as usize);
    let mut ports = Vec::new();
    let mut s = connect(a)?;
    s.write_all(b"R")?;
    s.read_to_end(&mut ports)?;
    let ports: Vec<u16> = ports.chunks_exact(2).map(|p| u16::from_le_bytes([p[0], p[1]])).collect();
    let mut subs = Vec::new();
    for i in 0..n {
        let s = if ports.is_empty() { connect(a) } else { connect_to(a, ports[i % ports.len()]) };
        subs.push(Mutex::new(Some(subscribed(s?)?)));
    }
    let got = Mutex::new(Tally::default());
    let mut t = clock.run(a, n + 1, |i| {
        let Some(mine) = i.checked_sub(1) else {
            let t = publish(a, &clock, size)?;
            // What is published goes in bursts: where buffers are full, nothing for as long as they take to drain.
            return Ok(if n > 0 { Tally { count: 0, bytes: 0, ..t } } else { t });
        };
        let s = subs[mine].lock().unwrap_or_else(|e| e.into_inner()).take();
        let t = subscribe(s.ok_or(io::ErrorKind::NotConnected)?, &clock, size)?;
        let counted = Tally { count: t.count, bytes: t.bytes, ..Tally::default() };
        got.lock().unwrap_or_else(|e| e.into_inner()).add(t);
        Ok(counted)
    })?;
    t.count /= n.max(1) as u64;
    t.bytes /= n.max(1) as u64;
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
