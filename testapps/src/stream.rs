//! One way: messages with sequence numbers, and a digest of all bytes at the end.

use crate::args::{die, Args};
use crate::prng::{self, Digest};
use crate::{sys, util};
use std::time::Instant;

/// `stream-server [--port P] [--size S] [--conns N]`: receives, checks each message's
/// sequence number and bytes, and answers the end of the stream with the digest.
pub fn server(a: &Args) -> i32 {
    util::install_term();
    let size = a.num("size", 64).max(8) as usize;
    let limit = util::conn_limit(a, 1);
    let l = util::announce(a.num("port", 0) as u16);
    let mut bad = 0;
    while let Some(fd) = util::accept_or_stop(l, limit, libc::SOCK_CLOEXEC) {
        if let Err(e) = receive(fd, size) {
            eprintln!("stream: {e}");
            bad = 1;
        }
        let _ = sys::close(fd);
        util::SERVED.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    }
    bad
}

fn receive(fd: i32, size: usize) -> Result<(), String> {
    let mut buf = vec![0u8; (size * 4).max(1 << 18)];
    let (mut have, mut seq) = (0usize, 0u64);
    let mut d = Digest::default();
    loop {
        match sys::recv(fd, &mut buf[have..], 0) {
            Ok(0) => break,
            Ok(n) => {
                d.update(&buf[have..have + n]);
                have += n;
            }
            Err(libc::EINTR) => continue,
            Err(e) => return Err(format!("recv at message {seq}: {}", sys::strerror(e))),
        }
        let mut at = 0;
        while have - at >= size {
            let m = &buf[at..at + size];
            let s = u64::from_le_bytes(m[..8].try_into().expect("8 bytes"));
            if s != seq {
                return Err(format!("message {seq} carries number {s}"));
            }
            prng::verify(seq, 0, &m[8..]).map_err(|e| format!("message {seq}: {e}"))?;
            seq += 1;
            at += size;
        }
        buf.copy_within(at..have, 0);
        have -= at;
    }
    if have != 0 {
        return Err(format!("{have} bytes of an unfinished message at the end"));
    }
    let mut answer = [0u8; 16];
    answer[..8].copy_from_slice(&seq.to_le_bytes());
    answer[8..].copy_from_slice(&d.value().to_le_bytes());
    sys::write_all(fd, &answer).map_err(|e| format!("answer: {}", sys::strerror(e)))
}

/// `stream-client --port P [--size S] [--count N] [--reader 1]`; with a reader a thread waits for the answer
/// from before the first message on.
pub fn client(a: &Args) -> i32 {
    let size = a.num("size", 64).max(8) as usize;
    let count = a.num("count", 100_000);
    let fd = sys::connect(a.num("port", 0) as u16).unwrap_or_else(|e| die(&sys::strerror(e)));
    let answer = move || {
        let mut b = [0u8; 16];
        sys::read_exact(fd, &mut b).map(|_| b)
    };
    let reader = (a.num("reader", 0) > 0).then(|| std::thread::spawn(answer));
    if reader.is_some() {
        // Long enough for it to be inside its call.
        util::pause_ms(50);
    }
    let mut d = Digest::default();
    let mut m = vec![0u8; size];
    let t = Instant::now();
    for seq in 0..count {
        m[..8].copy_from_slice(&seq.to_le_bytes());
        prng::fill(seq, 0, &mut m[8..]);
        d.update(&m);
        if let Err(e) = sys::write_all(fd, &m) {
            eprintln!("send {seq}: {}", sys::strerror(e));
            return 1;
        }
    }
    let ended = sys::shutdown(fd, libc::SHUT_WR);
    let answer = match reader {
        Some(r) => ended.and_then(|_| r.join().unwrap_or(Err(libc::EINVAL))),
        None => ended.and_then(|_| answer()),
    };
    let answer = match answer {
        Ok(b) => b,
        Err(e) => {
            eprintln!("no answer: {}", sys::strerror(e));
            return 1;
        }
    };
    let secs = t.elapsed().as_secs_f64();
    let n = u64::from_le_bytes(answer[..8].try_into().expect("8 bytes"));
    let v = u64::from_le_bytes(answer[8..].try_into().expect("8 bytes"));
    let _ = sys::close(fd);
    if n != count || v != d.value() {
        eprintln!("the receiver saw {n} messages of {count}, digest {v:x} against {:x}", d.value());
        return 1;
    }
    let mb = (count * size as u64) as f64 / 1e6;
    println!("OK messages={count} size={size} msg_per_s={:.0} MB_per_s={:.1}", count as f64 / secs, mb / secs);
    0
}
