//! A client of a real MQTT broker: publishes and receives its own messages at QoS 0.

use super::common::{check, connect, message, now, seal, wrong, Clock, Tally, HEAD};
use crate::args::Args;
use std::io::{self, Read, Write};
use std::net::TcpStream;

/// A packet of a type, with its remaining length encoded as MQTT 3.1.1 (section 2.2.3) wants it.
fn packet(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut b = vec![kind];
    let mut n = body.len();
    loop {
        let low = (n & 127) as u8;
        n >>= 7;
        b.push(if n > 0 { low | 128 } else { low });
        if n == 0 {
            break;
        }
    }
    b.extend_from_slice(body);
    b
}

fn read_packet(s: &mut TcpStream, b: &mut Vec<u8>) -> io::Result<u8> {
    let mut one = [0];
    s.read_exact(&mut one)?;
    let kind = one[0];
    let (mut n, mut shift) = (0usize, 0);
    loop {
        s.read_exact(&mut one)?;
        n |= usize::from(one[0] & 127) << shift;
        shift += 7;
        if one[0] & 128 == 0 {
            break;
        }
    }
    b.resize(n, 0);
    s.read_exact(b)?;
    Ok(kind)
}

/// A connected session of a name.
fn session(a: &Args, name: &str) -> io::Result<TcpStream> {
    let mut s = connect(a)?;
    let mut body = vec![0, 4, b'M', b'Q', b'T', b'T', 4, 2, 0, 0, 0, name.len() as u8];
    body.extend_from_slice(name.as_bytes());
    s.write_all(&packet(0x10, &body))?;
    let mut b = Vec::new();
    if read_packet(&mut s, &mut b)? != 0x20 || b != [0, 0] {
        return wrong("the broker refuses the session");
    }
    Ok(s)
}

/// `load-client mqtt --port P [--size S] [--conns N]`: N pairs of a publisher and a subscriber, each
/// message published when the last has arrived.
pub fn client(a: &Args) -> io::Result<()> {
    let clock = Clock::default();
    let t = clock.run(a, a.num("conns", 1) as usize, |i| {
        let (pid, topic) = (std::process::id(), format!("rs/{i}"));
        let mut p = session(a, &format!("p{pid}-{i}"))?;
        let mut s = session(a, &format!("s{pid}-{i}"))?;
        let mut sub = vec![0, 1, 0, topic.len() as u8];
        sub.extend_from_slice(topic.as_bytes());
        sub.push(0);
        s.write_all(&packet(0x82, &sub))?;
        let (mut b, mut t) = (Vec::new(), Tally::default());
        if read_packet(&mut s, &mut b)? != 0x90 || b != [0, 1, 0] {
            return wrong("the broker refuses the subscription");
        }
        let mut m = message((a.num("size", 100) as usize).max(HEAD));
        let head = 2 + topic.len();
        let mut body = vec![0, topic.len() as u8];
        body.extend_from_slice(topic.as_bytes());
        body.extend_from_slice(&m);
        for seq in 0.. {
            if clock.over() {
                break;
            }
            seal(seq, &mut m);
            body[head..].copy_from_slice(&m);
            let at = now();
            p.write_all(&packet(0x30, &body))?;
            if read_packet(&mut s, &mut b)? != 0x30 || b.len() != body.len() {
                return wrong("something else came than a message");
            }
            t.late(&clock, now() - at);
            check(seq, &b[head..])?;
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
    fn lengths_are_encoded_as_the_standard_says() {
        assert_eq!(super::packet(0x30, &[0; 127])[..2], [0x30, 127]);
        assert_eq!(super::packet(0x30, &[0; 321])[..3], [0x30, 0xC1, 0x02]);
    }
}
