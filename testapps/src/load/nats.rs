//! A client of a real NATS server: publishes and receives its own messages.

use super::common::{check, connect, message, now, reader, seal, wrong, Clock, Tally, HEAD};
use crate::args::Args;
use std::io::{self, BufRead, Read, Write};

/// `load-client nats --port P [--size S] [--conns N]`: N pairs of a publisher and a subscriber, each message
/// published when the last has arrived. The protocol is that of docs.nats.io, "Client protocol".
pub fn client(a: &Args) -> io::Result<()> {
    let clock = Clock::default();
    let t = clock.run(a, a.num("conns", 1) as usize, |i| {
        const HELLO: &[u8] = b"CONNECT {\"verbose\":false,\"pedantic\":false}\r\n";
        let (mut p, mut s) = (connect(a)?, connect(a)?);
        p.write_all(HELLO)?;
        s.write_all(HELLO)?;
        s.write_all(format!("SUB rs.{i} 1\r\nPING\r\n").as_bytes())?;
        let mut r = reader(&s)?;
        let mut line = String::new();
        while line != "PONG\r\n" {
            line.clear();
            if r.read_line(&mut line)? == 0 || line.starts_with("-ERR") {
                return wrong(format!("the server refuses the subscription: {line}"));
            }
        }
        let mut m = message((a.num("size", 100) as usize).max(HEAD));
        let mut got = vec![0; m.len() + 2];
        let (head, want) = (format!("PUB rs.{i} {}\r\n", m.len()), format!("MSG rs.{i} 1 {}\r\n", m.len()));
        let (mut out, mut t) = (Vec::new(), Tally::default());
        for seq in 0.. {
            if clock.over() {
                break;
            }
            seal(seq, &mut m);
            out.clear();
            out.extend_from_slice(head.as_bytes());
            out.extend_from_slice(&m);
            out.extend_from_slice(b"\r\n");
            let at = now();
            p.write_all(&out)?;
            loop {
                line.clear();
                r.read_line(&mut line)?;
                match line.as_str() {
                    "PING\r\n" => s.write_all(b"PONG\r\n")?,
                    l if l == want => break,
                    _ => return wrong(format!("instead of a message came {line:?}")),
                }
            }
            r.read_exact(&mut got)?;
            t.late(&clock, now() - at);
            check(seq, &got[..m.len()])?;
            t.hit(&clock, 1, 2 * m.len() as u64);
        }
        Ok(t)
    })?;
    t.print("");
    Ok(())
}
