//! A client of a real memcached: sets and gets over kept connections, every value compared.

use super::common::{connect, reader, wrong, Clock, Tally};
use crate::args::Args;
use std::io::{self, BufRead, Read, Write};
use std::time::Instant;

/// `load-client memcache --port P [--size S] [--conns N]`: nine gets for a set, as caches see them.
pub fn client(a: &Args) -> io::Result<()> {
    let (clock, size) = (Clock::default(), a.num("size", 100) as usize);
    let t = clock.run(a, a.num("conns", 1) as usize, |i| {
        let (mut s, mut t) = (connect(a)?, Tally::default());
        let mut r = reader(&s)?;
        let mut line = String::new();
        let mut value = vec![0u8; size + 2];
        let fill = |n: u64| (n * 31 + i as u64) as u8;
        let mut stored = 0;
        for n in 0u64.. {
            if clock.over() {
                break;
            }
            let at = Instant::now();
            line.clear();
            if n % 10 == 0 {
                let mut m = format!("set k{i} 0 0 {size}\r\n").into_bytes();
                stored = fill(n);
                m.resize(m.len() + size, stored);
                m.extend(b"\r\n");
                s.write_all(&m)?;
                r.read_line(&mut line)?;
                if line != "STORED\r\n" {
                    return wrong(format!("set was answered by {line:?}"));
                }
            } else {
                s.write_all(format!("get k{i}\r\n").as_bytes())?;
                r.read_line(&mut line)?;
                if line != format!("VALUE k{i} 0 {size}\r\n") {
                    return wrong(format!("get was answered by {line:?}"));
                }
                r.read_exact(&mut value)?;
                if value[..size].iter().any(|&x| x != stored) {
                    return wrong("a value is not the one that was set");
                }
                line.clear();
                r.read_line(&mut line)?;
                if line != "END\r\n" {
                    return wrong(format!("a value is followed by {line:?}"));
                }
            }
            t.late(&clock, at.elapsed().as_nanos() as u64);
            t.hit(&clock, 1, size as u64);
        }
        Ok(t)
    })?;
    t.print("");
    Ok(())
}
