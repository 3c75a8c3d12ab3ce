//! Many connections of an echo server, from several threads, every byte verified.

use crate::args::Args;
use crate::prng::{self, Rng};
use crate::{sys, util};
use std::os::fd::RawFd;

/// How one thread's work ended.
enum End {
    Whole(u64),
    /// The server went away: errno (0: end of stream) after so many verified bytes.
    Death(i32, u64),
}

/// What each thread does.
#[derive(Clone)]
struct Plan {
    until: String,
    port: u16,
    conns: usize,
    warm: u64,
    rounds: u64,
    max: usize,
    seed: u64,
    pause_us: u64,
    expect_death: bool,
    reconnect: u64,
    select: bool,
}

struct Conn {
    fd: RawFd,
    seed: u64,
    at: u64,
}

fn open(p: &Plan, i: u64) -> Result<Conn, i32> {
    let fd = sys::connect(p.port)?;
    // A receive timeout: nothing may hang silently.
    sys::set_timeout(fd, libc::SO_RCVTIMEO, 20_000)?;
    Ok(Conn { fd, seed: p.seed.wrapping_mul(77_777).wrapping_add(i), at: 0 })
}

/// Sends `n` bytes and reads them back.
fn round(c: &mut Conn, n: usize, p: &Plan, out: &mut [u8], inp: &mut [u8]) -> Result<Option<i32>, String> {
    let gone = |e: i32, what: &str, at: u64| {
        if p.expect_death && (e == 0 || util::is_death(e)) {
            Ok(Some(e))
        } else {
            Err(format!("{what} at {at}: {}", if e == 0 { "end of the stream".into() } else { sys::strerror(e) }))
        }
    };
    prng::fill(c.seed, c.at, &mut out[..n]);
    if let Err(e) = sys::write_all(c.fd, &out[..n]) {
        return gone(e, "send", c.at);
    }
    let mut got = 0;
    while got < n {
        if p.select && sys::select(&[c.fd], &[], 20_000).map(|r| r.0.is_empty()).unwrap_or(false) {
            return Err(format!("select saw nothing for 20 s at {}", c.at));
        }
        match sys::recv(c.fd, &mut inp[got..n], 0) {
            Ok(0) => return gone(0, "recv", c.at + got as u64),
            Ok(k) => {
                prng::verify(c.seed, c.at + got as u64, &inp[got..got + k])?;
                got += k;
            }
            Err(libc::EINTR) => {}
            Err(e) => return gone(e, "recv", c.at + got as u64),
        }
    }
    c.at += n as u64;
    Ok(None)
}

/// Half-closes, and expects the server's end of stream.
fn finish(c: Conn, p: &Plan) -> Result<Option<i32>, String> {
    sys::shutdown(c.fd, libc::SHUT_WR).map_err(|e| format!("shutdown: {}", sys::strerror(e)))?;
    let mut b = [0u8; 16];
    match sys::recv(c.fd, &mut b, 0) {
        Ok(0) => {}
        Ok(n) => return Err(format!("{n} bytes too many")),
        Err(e) if p.expect_death && util::is_death(e) => return Ok(Some(e)),
        Err(e) => return Err(format!("recv at the end: {}", sys::strerror(e))),
    }
    sys::close(c.fd).map_err(|e| format!("close: {}", sys::strerror(e)))?;
    Ok(None)
}

fn work(p: &Plan) -> Result<End, String> {
    let mut rng = Rng::new(p.seed);
    let (mut out, mut inp) = (vec![0; p.max], vec![0; p.max]);
    let mut total = 0;
    for turn in 0..p.reconnect {
        let mut conns = Vec::new();
        for i in 0..p.conns {
            match open(p, turn * 1000 + i as u64) {
                Ok(c) => conns.push(c),
                Err(e) if p.expect_death => return Ok(End::Death(e, total)),
                Err(e) => return Err(format!("connect: {}", sys::strerror(e))),
            }
        }
        for _ in 0..p.warm {
            std::thread::sleep(std::time::Duration::from_millis(5));
            for c in conns.iter_mut() {
                if let Some(e) = round(c, 1, p, &mut out, &mut inp)? {
                    return Ok(End::Death(e, total));
                }
                total += 1;
            }
        }
        for _ in 0..p.rounds {
            if !p.until.is_empty() && std::path::Path::new(&p.until).exists() {
                break;
            }
            for c in conns.iter_mut() {
                let n = rng.log_uniform(1, p.max);
                if let Some(e) = round(c, n, p, &mut out, &mut inp)? {
                    return Ok(End::Death(e, total));
                }
                total += n as u64;
                if p.pause_us > 0 {
                    std::thread::sleep(std::time::Duration::from_micros(p.pause_us));
                }
            }
        }
        for c in conns {
            if let Some(e) = finish(c, p)? {
                return Ok(End::Death(e, total));
            }
        }
    }
    Ok(End::Whole(total))
}

/// `echo-client --port P [--conns N] [--threads M] [--rounds R] [--max B] [--seed S] [--warm W]
/// [--pause-us U] [--reconnect K] [--select] [--expect-death] [--limit-s S]`: N connections in all. The
/// first W rounds are of one byte, with pauses. `--until FILE` ends it as soon as that exists.
pub fn run(a: &Args) -> i32 {
    util::watchdog(a.num("limit-s", 120));
    let threads = a.num("threads", 1).max(1) as usize;
    let conns = a.num("conns", 1).max(1) as usize;
    let base = Plan {
        port: a.num("port", 0) as u16,
        conns: 0,
        until: a.text("until", ""),
        warm: a.num("warm", 0),
        rounds: a.num("rounds", 100),
        max: a.num("max", 64 << 10) as usize,
        seed: a.num("seed", 1),
        pause_us: a.num("pause-us", 0),
        expect_death: a.has("expect-death"),
        reconnect: a.num("reconnect", 1),
        select: a.has("select"),
    };
    let hs: Vec<_> = (0..threads)
        .map(|t| {
            let mut p = base.clone();
            p.conns = conns / threads + usize::from(t < conns % threads);
            p.seed = base.seed.wrapping_mul(1_000_003).wrapping_add(t as u64);
            std::thread::spawn(move || work(&p))
        })
        .collect();
    let (mut bytes, mut bad) = (0, 0);
    for h in hs {
        match h.join() {
            Ok(Ok(End::Whole(n))) => bytes += n,
            Ok(Ok(End::Death(e, n))) => {
                bytes += n;
                println!("DEATH errno={e} verified={n}");
            }
            Ok(Err(x)) => {
                println!("BAD {x}");
                bad = 1;
            }
            Err(_) => bad = 1,
        }
    }
    if bad == 0 {
        println!("OK echoed={bytes} conns={conns}");
    }
    bad
}
