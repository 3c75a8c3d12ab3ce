//! A client of a real STOMP broker: publishes and receives its own messages by a topic.

use super::common::{check, greeted, message, now, reader, seal, wrong, Clock, Tally, HEAD};
use crate::args::Args;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// A frame as STOMP 1.2 has it.
fn frame(command: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let lines: String = headers.iter().map(|(k, v)| format!("{k}:{v}\n")).collect();
    let mut b = format!("{command}\n{lines}\n").into_bytes();
    b.extend_from_slice(body);
    b.push(0);
    b
}

/// Reads a frame with a body of at most `body.len()` bytes: its command, and how long its body is.
fn read_frame(r: &mut BufReader<TcpStream>, body: &mut [u8], line: &mut String) -> io::Result<(String, usize)> {
    let (mut command, mut length) = (String::new(), None);
    loop {
        line.clear();
        if r.read_line(line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let text = line.trim_end_matches(['\r', '\n']);
        match (command.is_empty(), text.is_empty()) {
            // Line ends between frames are heart-beats.
            (true, true) => {}
            (true, false) => command = text.to_string(),
            (false, true) => break,
            (false, false) => {
                if let Some(n) = text.strip_prefix("content-length:") {
                    length = n.trim().parse().ok();
                }
            }
        }
    }
    let length: usize = length.unwrap_or(0);
    let Some(to) = body.get_mut(..length) else { return wrong(format!("{command} with a body of {length} bytes")) };
    r.read_exact(to)?;
    let mut rest = Vec::new();
    r.read_until(0, &mut rest)?;
    if rest.len() != 1 && command == "MESSAGE" {
        return wrong("a message without its length");
    }
    Ok((command, length))
}

/// `load-client stomp --port P [--size S] [--conns N]`: N pairs of a publisher and a subscriber, each message
/// published when the last has arrived.
pub fn client(a: &Args) -> io::Result<()> {
    let clock = Clock::default();
    let t = clock.run(a, a.num("conns", 1) as usize, |i| {
        let mut m = message((a.num("size", 100) as usize).max(HEAD));
        let (mut got, mut line) = (vec![0; m.len().max(4096)], String::new());
        let hello = [("accept-version", "1.2"), ("host", "/"), ("login", "guest"), ("passcode", "guest")];
        let mut ends = Vec::new();
        for _ in 0..2 {
            ends.push(greeted(a, |s| {
                let mut r = reader(s)?;
                s.write_all(&frame("CONNECT", &hello, &[]))?;
                match read_frame(&mut r, &mut got, &mut line)? {
                    (c, _) if c == "CONNECTED" => Ok(r),
                    (c, n) => wrong(format!("{c}: {}", String::from_utf8_lossy(&got[..n]))),
                }
            })?);
        }
        let [(p, _), (s, r)] = &mut ends[..] else { return wrong("two sessions") };
        let (topic, size) = (format!("/topic/rs-{}-{i}", std::process::id()), m.len().to_string());
        s.write_all(&frame("SUBSCRIBE", &[("id", "0"), ("destination", &topic), ("receipt", "1")], &[]))?;
        if read_frame(r, &mut got, &mut line)?.0 != "RECEIPT" {
            return wrong("the broker refuses the subscription");
        }
        let mut t = Tally::default();
        for seq in 0.. {
            if clock.over() {
                break;
            }
            seal(seq, &mut m);
            let out = frame("SEND", &[("destination", &topic), ("content-length", &size)], &m);
            let at = now();
            p.write_all(&out)?;
            match read_frame(r, &mut got, &mut line)? {
                (c, n) if c == "MESSAGE" && n == m.len() => check(seq, &got[..n])?,
                (c, n) => return wrong(format!("instead of a message came {c} of {n} bytes")),
            }
            t.late(&clock, now() - at);
            t.hit(&clock, 1, 2 * m.len() as u64);
        }
        Ok(t)
    })?;
    t.print("");
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn frames_end_with_a_zero() {
        let f = super::frame("SEND", &[("destination", "/a"), ("content-length", "2")], b"xy");
        assert_eq!(f, b"SEND\ndestination:/a\ncontent-length:2\n\nxy\0");
    }
}
