//! Round trips: a message goes there and comes back, on one or more connections, blocking.

use super::common::{check, connect, message, read_or_end, seal, serve, Clock, Tally};
use crate::args::Args;
use std::io::{self, Read, Write};
use std::time::Instant;

/// `load-server trips [--size S]`: gives every message back.
pub fn server(a: &Args) -> io::Result<()> {
    let size = a.num("size", 64) as usize;
    serve(a, move |mut s| {
        let mut b = message(size);
        while read_or_end(&mut s, &mut b)? {
            s.write_all(&b)?;
        }
        Ok(())
    })
}

/// `load-client trips [--size S] [--conns N]`.
pub fn client(a: &Args) -> io::Result<()> {
    let clock = Clock::default();
    let t = clock.run(a, a.num("conns", 1) as usize, |_| {
        let (mut s, mut t) = (connect(a)?, Tally::default());
        let mut m = message(a.num("size", 64) as usize);
        let n = m.len() as u64;
        for seq in 0.. {
            if clock.over() {
                break;
            }
            seal(seq, &mut m);
            let at = Instant::now();
            s.write_all(&m)?;
            s.read_exact(&mut m)?;
            t.late(&clock, at.elapsed().as_nanos() as u64);
            check(seq, &m)?;
            t.hit(&clock, 1, 2 * n);
        }
        Ok(t)
    })?;
    t.print("");
    Ok(())
}
