//! How an ancestor is asked, and how long.

use super::*;
use crate::poll;

/// The connection is home.
pub static HOME: u8 = b'y';
/// It is there, and not home yet.
pub static WAIT: u8 = b'w';
/// Added to a cookie: not only while the asking process lives. (The kernel counts cookies from 1.)
pub const FOR_GOOD: u64 = 1 << 63;
/// Who works on it says so this often.
pub const WAIT_NS: i64 = 1_000_000_000;

/// How long a process is waited for, in milliseconds.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    /// That says nothing.
    answer: i64,
    /// That has the connection, and says nothing more: it is stopped.
    silence: i64,
}

pub(super) const PATIENCE: Patience = Patience { answer: 5_000, silence: 30_000 };

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// It has brought the connection home.
    Home,
    /// It has none, as far as can be told.
    Nothing,
    /// It has the connection, and does not bring it home: it has died, or is stopped.
    Lost,
}

/// Asks the process `pid`, which listens at `name` if it has a background thread, for a connection: one of its numbers
/// here, and its cookie. It may take as long as the peer is stopped, without `patience` no longer than an answer.
///
/// A handler that runs meanwhile ends nothing: what is not home is not to be read.
pub(super) fn ask(pid: u32, name: &rv::Name, (fd, cookie): (c_int, u64), patience: Option<Patience>) -> Answer {
    let mut left = patience.unwrap_or(PATIENCE).answer;
    let s = loop {
        match rv::call(name) {
            Ok(s) => break s,
            // Others are asking, more than it can listen to.
            Err(libc::EAGAIN | libc::EINTR) if left > 0 => pause(&mut left),
            Err(_) => return Answer::Nothing,
        }
    };
    // Anybody may bind a name.
    let answer = match rv::credentials(s) {
        Some((p, ..)) if p == pid => listen(s, pid, (fd, cookie), left, patience),
        _ => Answer::Nothing,
    };
    sys::close(s);
    answer
}

fn listen(s: c_int, pid: u32, (fd, cookie): (c_int, u64), mut left: i64, patience: Option<Patience>) -> Answer {
    // SAFETY: eight readable bytes.
    while let Err(e) = unsafe { sys::send(s, (&raw const cookie).cast(), 8, libc::MSG_NOSIGNAL) } {
        if !matches!(e, libc::EINTR | libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) || left <= 0 {
            return Answer::Nothing;
        }
        pause(&mut left);
    }
    let mut has = false;
    loop {
        await_word(s, &mut left);
        let mut said = 0u8;
        // SAFETY: one writable byte.
        match unsafe { sys::recv(s, (&raw mut said).cast(), 1, libc::MSG_DONTWAIT) } {
            Ok(1) if said == HOME => return Answer::Home,
            Ok(1) if said == WAIT => {
                has = true;
                left = patience.map_or(left, |p| p.silence);
            }
            Ok(1) | Err(libc::EAGAIN | libc::EINTR) => {}
            _ if has => return Answer::Lost,
            _ => return Answer::Nothing,
        }
        if left > 0 {
            continue;
        }
        match patience {
            _ if has => return Answer::Lost,
            // It may be any process that is stopped.
            Some(p) if holds(pid, fd) => (has, left) = (true, p.silence - p.answer),
            _ => return Answer::Nothing,
        }
    }
}

/// What is waited at once, in milliseconds: a process that is stopped with the other does not lose more.
const SLICE: i64 = 100;

fn await_word(s: c_int, left: &mut i64) {
    let before = now_ns();
    let _ = poll::wait_one(s, libc::POLLIN, SLICE.min(*left) * 1_000_000);
    *left -= ((now_ns() - before) / 1_000_000).min(SLICE);
}

fn pause(left: &mut i64) {
    crate::sync::pause(1_000_000);
    *left -= 1;
}

/// Whether a process has the socket `fd` open, too; also if it does not let us look.
fn holds(pid: u32, fd: c_int) -> bool {
    // SAFETY: all-zero is a valid stat.
    let mut st: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `st` is writable.
    if unsafe { sys!(libc::SYS_fstat, fd, &mut st) }.is_err() {
        return false;
    }
    let (dev, ino) = (st.st_dev, st.st_ino);
    let mut path = [0u8; 32];
    let _ = core::fmt::Write::write_fmt(&mut Text(&mut path, 0), format_args!("/proc/{pid}/fd\0"));
    let Ok(path) = core::ffi::CStr::from_bytes_until_nul(&path) else { return true };
    let mut found = false;
    let looked = numbers::each_in(path, |dir, n| {
        let mut name = [0u8; 16];
        let _ = core::fmt::Write::write_fmt(&mut Text(&mut name, 0), format_args!("{n}\0"));
        // SAFETY: the name ends with a NUL, `st` is writable.
        let known = unsafe { sys!(libc::SYS_newfstatat, dir, name.as_ptr(), &mut st, 0) };
        found |= known.is_ok() && (st.st_dev, st.st_ino) == (dev, ino);
    });
    match looked {
        Ok(()) => found,
        Err(e) => e != libc::ENOENT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    const SHORT: Patience = Patience { answer: 150, silence: 400 };

    fn pause_ms(ms: u64) {
        std::thread::sleep(Duration::from_millis(ms));
    }

    /// What becomes of a question to an ancestor that does `f` with who asks, or does not listen at all.
    fn asked(what: &str, fd: c_int, f: Option<fn(c_int)>) -> Answer {
        let name = rv::name(format_args!("ringsock/test-{what}-{}", std::process::id()));
        let l = rv::listen_at(&name).unwrap();
        std::thread::scope(|s| {
            if let Some(f) = f {
                s.spawn(move || {
                    poll::wait_one(l, libc::POLLIN, -1).unwrap();
                    let g = rv::accept(l).unwrap();
                    hear(g);
                    f(g);
                    sys::close(g);
                });
            }
            let answer = ask(std::process::id(), &name, (fd, 7), Some(SHORT));
            sys::close(l);
            answer
        })
    }

    fn hear(g: c_int) {
        poll::wait_one(g, libc::POLLIN, -1).unwrap();
        let mut cookie = 0u64;
        // SAFETY: eight writable bytes.
        assert_eq!(unsafe { sys::recv(g, (&raw mut cookie).cast(), 8, 0) }, Ok(8));
        assert_eq!(cookie, 7);
    }

    fn say(g: c_int, word: &u8) {
        // SAFETY: one readable byte.
        unsafe { sys::send(g, (word as *const u8).cast(), 1, libc::MSG_NOSIGNAL) }.unwrap();
    }

    #[test]
    fn who_is_at_it_is_waited_for() {
        let t = Instant::now();
        let late = |g| {
            for _ in 0..3 {
                say(g, &WAIT);
                pause_ms(200);
            }
            say(g, &HOME);
        };
        assert_eq!(asked("late", -1, Some(late)), Answer::Home);
        assert!(t.elapsed() >= Duration::from_millis(600));
    }

    #[test]
    fn who_has_it_and_dies_or_says_no_more_has_lost_it() {
        assert_eq!(asked("dies", -1, Some(|g| say(g, &WAIT))), Answer::Lost);
        let stops = |g| {
            say(g, &WAIT);
            pause_ms(600);
        };
        assert_eq!(asked("stops", -1, Some(stops)), Answer::Lost);
        assert_eq!(asked("has-none", -1, Some(|_| {})), Answer::Nothing);
    }

    /// The socket of the question stands for the connection: both processes, this one, have it.
    #[test]
    fn a_silent_one_matters_only_if_it_has_the_socket() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(asked("silent", a.as_raw_fd(), None), Answer::Lost);
        assert_eq!(asked("other", -1, None), Answer::Nothing);
        let child = std::process::Command::new("sleep").arg("9").spawn();
        if let Ok(mut child) = child {
            assert!(!holds(child.id(), a.as_raw_fd()));
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(!holds(child.id(), a.as_raw_fd()), "a process that is gone");
        }
    }

    /// More ask than a process can listen to.
    #[test]
    fn whose_queue_is_full_is_asked_again() {
        let name = rv::name(format_args!("ringsock/test-full-{}", std::process::id()));
        let l = rv::listen_at(&name).unwrap();
        let mut others = Vec::new();
        while let Ok(s) = rv::call(&name) {
            others.push(s);
        }
        let answer = std::thread::scope(|s| {
            s.spawn(|| {
                pause_ms(50);
                let mut all = Vec::new();
                for _ in 0..=others.len() {
                    // (Who asks may have given up: nothing to accept then.)
                    poll::wait_one(l, libc::POLLIN, 20_000_000_000).unwrap();
                    all.push(rv::accept(l).unwrap());
                }
                hear(*all.last().unwrap());
                say(*all.last().unwrap(), &HOME);
                all.into_iter().for_each(sys::close);
            });
            // On a busy machine it takes the other thread a while to begin.
            ask(std::process::id(), &name, (-1, 7), Some(PATIENCE))
        });
        assert_eq!(answer, Answer::Home);
        others.into_iter().chain([l]).for_each(sys::close);
    }
}
