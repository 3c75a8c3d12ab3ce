//! A client of a real ZooKeeper server: reads and writes ephemeral nodes, every read compared.

use super::common::{check, greeted, message, now, seal, wrong, Clock, Tally, HEAD};
use crate::args::Args;
use std::io::{self, Read, Write};
use std::net::TcpStream;

// Numbers of requests, from ZooKeeper's `ZooDefs.OpCode`.
const CREATE: i32 = 1;
const GET: i32 = 4;
const SET: i32 = 5;
const EPHEMERAL: i32 = 1;

/// A record in ZooKeeper's encoding (jute): big-endian numbers, bytes behind their length.
#[derive(Default)]
struct Record(Vec<u8>);

impl Record {
    fn int(mut self, n: i32) -> Record {
        self.0.extend(n.to_be_bytes());
        self
    }

    fn long(mut self, n: i64) -> Record {
        self.0.extend(n.to_be_bytes());
        self
    }

    fn flag(mut self, yes: bool) -> Record {
        self.0.push(yes.into());
        self
    }

    fn bytes(self, b: &[u8]) -> Record {
        let mut r = self.int(b.len() as i32);
        r.0.extend(b);
        r
    }

    fn send(self, s: &mut TcpStream) -> io::Result<()> {
        let mut b = (self.0.len() as i32).to_be_bytes().to_vec();
        b.extend(self.0);
        s.write_all(&b)
    }
}

fn int(b: &[u8], at: usize) -> io::Result<i32> {
    match b.get(at..at + 4) {
        Some(n) => Ok(i32::from_be_bytes(n.try_into().expect("4 bytes"))),
        None => wrong("a short answer"),
    }
}

/// The body of one answer.
fn answer(s: &mut TcpStream, b: &mut Vec<u8>) -> io::Result<()> {
    let mut n = [0; 4];
    s.read_exact(&mut n)?;
    b.resize(u32::from_be_bytes(n).min(1 << 24) as usize, 0);
    s.read_exact(b)
}

/// Bytes of an answer's head: the request's number, the transaction's, and an error.
const ANSWER: usize = 16;

/// Asks, and waits for the answer; its body follows [`ANSWER`] bytes.
fn ask(
    s: &mut TcpStream,
    number: i32,
    op: i32,
    body: impl FnOnce(Record) -> Record,
    b: &mut Vec<u8>,
) -> io::Result<()> {
    body(Record::default().int(number).int(op)).send(s)?;
    answer(s, b)?;
    match (int(b, 0)?, int(b, 12)?) {
        (n, 0) if n == number => Ok(()),
        (n, e) => wrong(format!("request {number} of kind {op} was answered by {n} with error {e}")),
    }
}

/// `load-client zookeeper --port P [--size S] [--conns N]`: each session has a node of its own, nine reads for a write.
pub fn client(a: &Args) -> io::Result<()> {
    let clock = Clock::default();
    let t = clock.run(a, a.num("conns", 1) as usize, |i| {
        let (mut b, mut t) = (Vec::new(), Tally::default());
        let (mut s, ()) = greeted(a, |s| {
            // Protocol, last transaction seen, time-out in ms, session, its password, read-only.
            Record::default().int(0).long(0).int(30_000).long(0).bytes(&[0; 16]).flag(false).send(s)?;
            answer(s, &mut Vec::new())
        })?;
        let path = format!("/rs-{}-{i}", std::process::id());
        let mut m = message((a.num("size", 100) as usize).max(HEAD));
        seal(0, &mut m);
        let all = |r: Record| {
            let r = r.bytes(path.as_bytes()).bytes(&m);
            // One entry: everything is allowed to everybody.
            r.int(1).int(31).bytes(b"world").bytes(b"anyone").int(EPHEMERAL)
        };
        ask(&mut s, 1, CREATE, all, &mut b)?;
        let mut stored = 0;
        for n in 1.. {
            if clock.over() {
                break;
            }
            let at = now();
            if n % 10 == 0 {
                stored += 1;
                seal(stored, &mut m);
                ask(&mut s, n + 1, SET, |r| r.bytes(path.as_bytes()).bytes(&m).int(-1), &mut b)?;
            } else {
                ask(&mut s, n + 1, GET, |r| r.bytes(path.as_bytes()).flag(false), &mut b)?;
                match b.get(ANSWER + 4..ANSWER + 4 + m.len()) {
                    Some(got) if int(&b, ANSWER)? == m.len() as i32 => check(stored, got)?,
                    _ => return wrong("a node of another size"),
                }
            }
            t.late(&clock, now() - at);
            t.hit(&clock, 1, m.len() as u64);
        }
        Ok(t)
    })?;
    t.print("");
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn records_are_big_endian_with_lengths() {
        let r = super::Record::default().int(1).bytes(b"ab").flag(true).long(-1);
        assert_eq!(r.0[..11], [0, 0, 0, 1, 0, 0, 0, 2, b'a', b'b', 1]);
        assert_eq!(r.0[11..], [0xff; 8]);
    }
}
