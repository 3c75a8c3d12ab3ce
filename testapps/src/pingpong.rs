//! Request and response of a fixed size, blocking or busy, every byte checked.

use crate::args::{die, Args};
use crate::{prng, sys, util};
use std::time::Instant;

fn recv_exact(fd: i32, b: &mut [u8], busy: bool) -> Result<bool, i32> {
    let flags = if busy { libc::MSG_DONTWAIT } else { 0 };
    let mut at = 0;
    while at < b.len() {
        match sys::recv(fd, &mut b[at..], flags) {
            Ok(0) if at == 0 => return Ok(false),
            Ok(0) => return Err(0),
            Ok(n) => at += n,
            Err(libc::EINTR) => {}
            Err(libc::EAGAIN) if busy => std::hint::spin_loop(),
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// Waits for a message, and then `us` longer before it is read: whoever writes it finds as little room as there is.
fn rest(fd: i32, us: u64) {
    if us > 0 {
        let _ = sys::poll1(fd, libc::POLLIN, -1);
        std::thread::sleep(std::time::Duration::from_micros(us));
    }
}

/// `pingpong-server [--port P] [--size S] [--busy] [--conns N] [--rest-us R]`: one thread per connection.
pub fn server(a: &Args) -> i32 {
    util::install_term();
    let (size, busy) = (a.num("size", 64) as usize, a.has("busy"));
    let rest_us = a.num("rest-us", 0);
    let limit = util::conn_limit(a, 0);
    let l = util::announce(a.num("port", 0) as u16);
    let mut threads = Vec::new();
    while let Some(fd) = util::accept_or_stop(l, limit, libc::SOCK_CLOEXEC) {
        threads.push(std::thread::spawn(move || {
            let mut b = vec![0; size];
            let mut n = 0u64;
            loop {
                rest(fd, rest_us);
                let Ok(true) = recv_exact(fd, &mut b, busy) else { break };
                // The answer is the request with every byte turned over, so that an echo by
                // mistake cannot pass.
                b.iter_mut().for_each(|x| *x = !*x);
                if sys::write_all(fd, &b).is_err() {
                    break;
                }
                n += 1;
            }
            let _ = sys::close(fd);
            util::SERVED.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            n
        }));
    }
    let n: u64 = threads.into_iter().map(|t| t.join().expect("thread")).sum();
    println!("SERVED {n}");
    0
}

/// `pingpong-client --port P [--size S] [--count N] [--busy] [--rest-us R] [--pause-us U [--burst B]]`: pauses after every `B`
/// rounds.
pub fn client(a: &Args) -> i32 {
    let (size, busy) = (a.num("size", 64) as usize, a.has("busy"));
    let count = a.num("count", 10_000);
    let rest_us = a.num("rest-us", 0);
    let (pause, burst) = (a.num("pause-us", 0), a.num("burst", 1));
    let fd = sys::connect(a.num("port", 0) as u16).unwrap_or_else(|e| die(&sys::strerror(e)));
    let (mut out, mut inp) = (vec![0; size], vec![0; size]);
    let mut ns = Vec::with_capacity(count as usize);
    for i in 0..count {
        prng::fill(42, i * size as u64, &mut out);
        let t = Instant::now();
        if let Err(e) = sys::write_all(fd, &out) {
            eprintln!("send {i}: {}", sys::strerror(e));
            return 1;
        }
        rest(fd, rest_us);
        match recv_exact(fd, &mut inp, busy) {
            Ok(true) => {}
            Ok(false) => {
                eprintln!("round {i}: end of the stream");
                return 1;
            }
            Err(e) => {
                eprintln!("recv {i}: {}", sys::strerror(e));
                return 1;
            }
        }
        ns.push(t.elapsed().as_nanos() as u64);
        if let Some(k) = (0..size).find(|&k| inp[k] != !out[k]) {
            eprintln!("round {i}: byte {k} differs");
            return 1;
        }
        if pause > 0 && (i + 1) % burst == 0 {
            std::thread::sleep(std::time::Duration::from_micros(pause));
        }
    }
    let _ = sys::close(fd);
    ns.sort_unstable();
    let at = |p: f64| ns[((ns.len() - 1) as f64 * p) as usize] as f64 / 1000.0;
    println!("OK rounds={count} size={size} median_us={:.2} p99_us={:.2}", at(0.5), at(0.99));
    0
}
