//! What the servers share: the announcement of the port, the orderly end, watchdogs.

use crate::sys;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Set by SIGTERM.
pub static STOP: AtomicBool = AtomicBool::new(false);
/// Connections that have been served to their end.
pub static SERVED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_term(_: i32) {
    STOP.store(true, Ordering::SeqCst);
}

/// SIGTERM ends the program in the ordinary way (exit handlers run).
pub fn install_term() {
    sys::sigaction(libc::SIGTERM, on_term, 0).expect("sigaction");
}

/// Listens on 127.0.0.1 and says where: one line `listening PORT` on stdout.
pub fn announce(port: u16) -> RawFd {
    let (fd, port) = sys::listen(port, 1024).unwrap_or_else(|e| panic!("listen: {}", sys::strerror(e)));
    say(&format!("listening {port}"));
    fd
}

/// Prints a line that somebody waits for.
pub fn say(line: &str) {
    use std::io::Write;
    println!("{line}");
    std::io::stdout().flush().expect("stdout");
}

/// Whether a server is to end now: SIGTERM, or `limit` connections served (0: no limit).
pub fn stopping(limit: usize) -> bool {
    STOP.load(Ordering::SeqCst) || (limit > 0 && SERVED.load(Ordering::SeqCst) >= limit)
}

/// Accepts the next connection, or `None` when the server is to end.
pub fn accept_or_stop(listener: RawFd, limit: usize, flags: i32) -> Option<RawFd> {
    loop {
        if stopping(limit) {
            return None;
        }
        match sys::poll1(listener, libc::POLLIN, 50) {
            Ok(0) | Err(libc::EINTR) => continue,
            Ok(_) => {}
            Err(e) => panic!("poll on the listener: {}", sys::strerror(e)),
        }
        match sys::accept(listener, flags) {
            Ok(fd) => return Some(fd),
            Err(libc::EINTR | libc::EAGAIN | libc::ECONNABORTED) => {}
            Err(e) => panic!("accept: {}", sys::strerror(e)),
        }
    }
}

/// Ends the process with code 124 if it still runs after `secs` seconds.
pub fn watchdog(secs: u64) {
    if secs == 0 {
        return;
    }
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(secs));
        eprintln!("rs-app: still running after {secs} s: ended by the watchdog");
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(124) }
    });
}

/// Sleeps.
pub fn pause_ms(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// Whether an errno is what a dead or resetting peer gives.
pub fn is_death(e: i32) -> bool {
    matches!(e, libc::ECONNRESET | libc::EPIPE)
}

/// How many connections a server serves before it ends: `--conns`, or `--exit-after` (0: no limit).
pub fn conn_limit(a: &crate::args::Args, default: u64) -> usize {
    let n = a.num("exit-after", default);
    a.num("conns", n) as usize
}
