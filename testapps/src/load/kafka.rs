//! A log broker with partitions: producers append records and may wait until they are replicated,
//! consumers fetch from an offset. The shape of KafkaDirect's experiments, over plain sockets.

use super::common::{another, check, connect, end_with_the_first, message, now, read_or_end, reader, seal, serve};
use super::common::{wrong, Clock, Tally, HEAD};
use crate::args::Args;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Bytes of a request before its record.
const REQUEST: usize = 24;
/// Bytes of an answer before its records.
const ANSWER: usize = 16;
/// Bytes of records that the broker keeps for consumers, in all partitions.
const KEEP: usize = 128 << 20;
/// Bytes of records that a partition is filled with before they are consumed.
const FILL: usize = 8 << 20;

const PRODUCE: u32 = 1;
const FETCH: u32 = 2;
const COUNT: u32 = 3;

/// A request: what, which partition, an offset, a length, and `extra`: whether an answer is wanted
/// (produce), or how many milliseconds to wait for a record (fetch).
struct Request {
    op: u32,
    part: u32,
    arg: u64,
    len: u32,
    extra: u32,
}

impl Request {
    fn encode(&self) -> [u8; REQUEST] {
        let mut b = [0; REQUEST];
        b[..4].copy_from_slice(&self.op.to_le_bytes());
        b[4..8].copy_from_slice(&self.part.to_le_bytes());
        b[8..16].copy_from_slice(&self.arg.to_le_bytes());
        b[16..20].copy_from_slice(&self.len.to_le_bytes());
        b[20..].copy_from_slice(&self.extra.to_le_bytes());
        b
    }

    fn decode(b: &[u8; REQUEST]) -> Request {
        let u = |i: usize| u32::from_le_bytes(b[i..i + 4].try_into().expect("4 bytes"));
        let arg = u64::from_le_bytes(b[8..16].try_into().expect("8 bytes"));
        Request { op: u(0), part: u(4), arg, len: u(16), extra: u(20) }
    }
}

fn answer(len: u32, n: u32, offset: u64) -> [u8; ANSWER] {
    let mut b = [0; ANSWER];
    b[..4].copy_from_slice(&len.to_le_bytes());
    b[4..8].copy_from_slice(&n.to_le_bytes());
    b[8..].copy_from_slice(&offset.to_le_bytes());
    b
}

fn read_answer(r: &mut impl Read) -> io::Result<(u32, u32, u64)> {
    let mut b = [0; ANSWER];
    r.read_exact(&mut b)?;
    let u = |i: usize| u32::from_le_bytes(b[i..i + 4].try_into().expect("4 bytes"));
    Ok((u(0), u(4), u64::from_le_bytes(b[8..].try_into().expect("8 bytes"))))
}

#[derive(Default)]
struct Log {
    records: VecDeque<Vec<u8>>,
    bytes: usize,
    /// The offset of the next record.
    end: u64,
    file: Option<std::fs::File>,
}

#[derive(Default)]
struct Partition {
    log: Mutex<Log>,
    grown: Condvar,
    /// Bytes of records that it keeps.
    keep: usize,
}

impl Partition {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Appends a record after checking it; its offset.
    fn append(&self, record: &[u8]) -> io::Result<u64> {
        let mut l = self.log();
        check(l.end, record)?;
        // Room of records that nobody keeps any longer is used again.
        let mut room = Vec::new();
        while l.bytes + record.len() > self.keep {
            let Some(old) = l.records.pop_front() else { break };
            l.bytes -= old.len();
            room = old;
        }
        room.clear();
        room.extend_from_slice(record);
        l.records.push_back(room);
        l.bytes += record.len();
        l.end += 1;
        if let Some(f) = &mut l.file {
            f.write_all(record)?;
            f.sync_data()?;
        }
        self.grown.notify_all();
        Ok(l.end - 1)
    }

    /// Records from `offset` on, up to 64 KiB, waiting up to `ms` for the first.
    fn fetch(&self, offset: u64, ms: u32, out: &mut Vec<u8>) -> (u32, u64) {
        let mut l = self.log();
        if ms > 0 && l.end <= offset {
            let wait = Duration::from_millis(ms.into());
            l = self.grown.wait_timeout_while(l, wait, |l| l.end <= offset).unwrap_or_else(|e| e.into_inner()).0;
        }
        let first = l.end - l.records.len() as u64;
        let from = offset.max(first);
        let mut n = 0;
        for r in l.records.iter().skip((from - first) as usize) {
            if n > 0 && out.len() + r.len() > 64 << 10 {
                break;
            }
            out.extend_from_slice(r);
            n += 1;
        }
        (n, from)
    }
}

/// `load-server kafka [--partitions P] [--followers N] [--sync DIR]`: a broker; with followers it
/// starts N more of itself, and a record is acknowledged when all have it; with `--sync` each record
/// is in a file, synchronised, before that.
pub fn server(a: &Args) -> io::Result<()> {
    end_with_the_first(a);
    let mut parts: Vec<Partition> = Vec::new();
    let sync = a.text("sync", "");
    let n = a.num("partitions", 1);
    for i in 0..n {
        let p = Partition { keep: KEEP / n as usize, ..Partition::default() };
        if !sync.is_empty() {
            let name = format!("{sync}/ringsock-log.{}.{i}", std::process::id());
            p.log().file = Some(std::fs::File::create(&name)?);
            // The file lives as long as it is open.
            std::fs::remove_file(&name)?;
        }
        parts.push(p);
    }
    let parts = Arc::new(parts);
    let words = ["--partitions".to_string(), a.num("partitions", 1).to_string()];
    let followers: Vec<u16> =
        (0..a.num("followers", 0)).map(|_| another(a, "kafka", &words)).collect::<io::Result<_>>()?;
    serve(a, move |s| {
        let host = s.local_addr()?.ip();
        let mut copies = Vec::new();
        for &port in &followers {
            let f = TcpStream::connect((host, port))?;
            f.set_nodelay(true)?;
            copies.push(f);
        }
        converse(s, &parts, &mut copies)
    })
}

fn converse(s: TcpStream, parts: &[Partition], copies: &mut [TcpStream]) -> io::Result<()> {
    let mut r = reader(&s)?;
    let mut s = s;
    let (mut head, mut record, mut out) = ([0; REQUEST], Vec::new(), Vec::new());
    loop {
        // Answers are kept as long as more requests are here already.
        if r.buffer().is_empty() && !out.is_empty() {
            s.write_all(&out)?;
            out.clear();
        }
        if !read_or_end(&mut r, &mut head)? {
            return Ok(());
        }
        let q = Request::decode(&head);
        let Some(p) = parts.get(q.part as usize) else { return wrong("no such partition") };
        match q.op {
            PRODUCE => {
                if (q.len as usize) < HEAD {
                    return wrong("a record is too small");
                }
                record.resize(REQUEST + q.len as usize, 0);
                record[..REQUEST].copy_from_slice(&Request { extra: 1, ..q }.encode());
                r.read_exact(&mut record[REQUEST..])?;
                for f in copies.iter_mut() {
                    f.write_all(&record)?;
                }
                let offset = p.append(&record[REQUEST..])?;
                for f in copies.iter_mut() {
                    if read_answer(f)?.2 != offset {
                        return wrong("a follower has another offset");
                    }
                }
                if q.extra > 0 {
                    out.extend(answer(0, 1, offset));
                }
            }
            FETCH => {
                let at = out.len();
                out.extend([0; ANSWER]);
                let mut body = Vec::new();
                let (n, from) = p.fetch(q.arg, q.extra, &mut body);
                out[at..].copy_from_slice(&answer(body.len() as u32, n, from));
                out.extend(body);
            }
            COUNT => out.extend(answer(0, 0, p.log().end)),
            _ => return wrong("no such request"),
        }
    }
}

/// `load-client kafka --mode produce|consume|empty|e2e [--size S] [--partitions P] [--batch B] [--acks 0|1]`.
///
/// `produce`: a producer for each partition, `B` records in one write, each write awaited if `acks`.
/// `consume`: records that were produced before are fetched in batches. `empty`: fetches of a partition
/// that has nothing. `e2e`: the time from a record's production to its arrival at a waiting consumer.
pub fn client(a: &Args) -> io::Result<()> {
    let (clock, parts) = (Clock::default(), a.num("partitions", 1) as usize);
    let size = (a.num("size", 1024) as usize).max(HEAD);
    let t = match a.text("mode", "produce").as_str() {
        "produce" => clock.run(a, parts, |i| produce(a, &clock, i as u32, size))?,
        "consume" => {
            fill(a, size)?;
            clock.run(a, parts, |_| consume(a, &clock, size))?
        }
        "empty" => clock.run(a, parts, |i| empty(a, &clock, i as u32))?,
        "e2e" => clock.run(a, 2, |i| if i == 0 { paced(a, &clock, size) } else { follow(a, &clock, size) })?,
        other => return wrong(format!("unknown mode {other}")),
    };
    t.print("");
    Ok(())
}

fn record_of(part: u32, size: usize, acks: bool) -> Vec<u8> {
    let head = Request { op: PRODUCE, part, arg: 0, len: size as u32, extra: acks.into() };
    let mut b = head.encode().to_vec();
    b.extend(message(size));
    b
}

fn produce(a: &Args, clock: &Clock, part: u32, size: usize) -> io::Result<Tally> {
    let (mut s, mut t) = (connect(a)?, Tally::default());
    let mut r = reader(&s)?;
    let (batch, acks) = (a.num("batch", 1).max(1), a.num("acks", 1) > 0);
    let one = record_of(part, size, acks);
    let mut b = one.repeat(batch as usize);
    let mut seq = 0u64;
    while !clock.over() {
        for m in b.chunks_exact_mut(one.len()) {
            seal(seq, &mut m[REQUEST..]);
            seq += 1;
        }
        let at = Instant::now();
        s.write_all(&b)?;
        if acks {
            for i in 0..batch {
                if read_answer(&mut r)?.2 != seq - batch + i {
                    return wrong("acknowledgements are out of order");
                }
            }
            t.late(clock, at.elapsed().as_nanos() as u64);
        }
        t.hit(clock, batch, batch * size as u64);
    }
    s.write_all(&Request { op: COUNT, part, arg: 0, len: 0, extra: 0 }.encode())?;
    let end = read_answer(&mut r)?.2;
    if end != seq {
        return wrong(format!("the broker has {end} records of {seq}"));
    }
    Ok(t)
}

/// Puts records there that can be consumed.
fn fill(a: &Args, size: usize) -> io::Result<()> {
    let mut s = connect(a)?;
    let mut r = reader(&s)?;
    let mut b = record_of(0, size, false);
    for seq in 0..(FILL / size).min(20_000) as u64 {
        seal(seq, &mut b[REQUEST..]);
        s.write_all(&b)?;
    }
    s.write_all(&Request { op: COUNT, part: 0, arg: 0, len: 0, extra: 0 }.encode())?;
    read_answer(&mut r).map(|_| ())
}

fn consume(a: &Args, clock: &Clock, size: usize) -> io::Result<Tally> {
    let (mut s, mut t) = (connect(a)?, Tally::default());
    let mut r = reader(&s)?;
    let (mut body, mut next) = (Vec::new(), 0);
    while !clock.over() {
        let at = Instant::now();
        s.write_all(&Request { op: FETCH, part: 0, arg: next, len: 0, extra: 0 }.encode())?;
        let (len, n, from) = read_answer(&mut r)?;
        body.resize(len as usize, 0);
        r.read_exact(&mut body)?;
        t.late(clock, at.elapsed().as_nanos() as u64);
        if len as usize != n as usize * size {
            return wrong("records of another size");
        }
        for (i, m) in body.chunks_exact(size).enumerate() {
            check(from + i as u64, m)?;
        }
        t.hit(clock, n.into(), len.into());
        next = if n == 0 { 0 } else { from + u64::from(n) };
    }
    Ok(t)
}

fn empty(a: &Args, clock: &Clock, part: u32) -> io::Result<Tally> {
    let (mut s, mut t) = (connect(a)?, Tally::default());
    let mut r = reader(&s)?;
    while !clock.over() {
        let at = Instant::now();
        s.write_all(&Request { op: FETCH, part, arg: 0, len: 0, extra: 0 }.encode())?;
        if read_answer(&mut r)? != (0, 0, 0) {
            return wrong("an empty partition has records");
        }
        t.late(clock, at.elapsed().as_nanos() as u64);
        t.hit(clock, 1, (REQUEST + ANSWER) as u64);
    }
    Ok(t)
}

/// Where a record of the end-to-end mode carries its time.
const TIME: std::ops::Range<usize> = HEAD + 8..HEAD + 16;

/// Produces `--rate` records a second; each carries its time. Ends with an empty hand: the consumer counts.
fn paced(a: &Args, clock: &Clock, size: usize) -> io::Result<Tally> {
    let mut s = connect(a)?;
    let mut r = reader(&s)?;
    let mut b = record_of(0, size.max(TIME.end), true);
    let gap = 1_000_000_000 / a.num("rate", 2000).max(1);
    let (mut seq, mut due) = (0, now());
    while !clock.over() {
        due += gap;
        while now() < due {
            std::thread::sleep(Duration::from_nanos(due.saturating_sub(now())));
        }
        b[REQUEST..][TIME].copy_from_slice(&now().to_le_bytes());
        seal(seq, &mut b[REQUEST..]);
        s.write_all(&b)?;
        read_answer(&mut r)?;
        seq += 1;
    }
    Ok(Tally::default())
}

fn follow(a: &Args, clock: &Clock, size: usize) -> io::Result<Tally> {
    let (mut s, mut t) = (connect(a)?, Tally::default());
    let mut r = reader(&s)?;
    let (mut body, mut next, size) = (Vec::new(), 0u64, size.max(TIME.end));
    while !clock.over() {
        s.write_all(&Request { op: FETCH, part: 0, arg: next, len: 0, extra: 100 }.encode())?;
        let (len, n, from) = read_answer(&mut r)?;
        body.resize(len as usize, 0);
        r.read_exact(&mut body)?;
        let at = now();
        if n > 0 && from != next {
            return wrong(format!("records {next} to {from} are missing"));
        }
        for m in body.chunks_exact(size) {
            check(next, m)?;
            next += 1;
            t.late(clock, at.saturating_sub(u64::from_le_bytes(m[TIME].try_into().expect("8 bytes"))));
        }
        t.hit(clock, n.into(), len.into());
    }
    Ok(t)
}
