//! An echo server in the styles of real ones.

use crate::args::{die, Args};
use crate::{sys, util};
use libc::{EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDHUP, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD};
use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const BACKLOG: usize = 1 << 20;
const CHUNK: usize = 64 << 10;

/// The styles by name.
pub const STYLES: [&str; 10] = [
    "thread",
    "poll",
    "epoll-lt",
    "epoll-et",
    "epoll-oneshot",
    "epoll-multi",
    "epoll-nested",
    "prefork",
    "fork",
    "fork-left",
];

/// One connection of a non-blocking server: what has been read and not yet written back.
struct Conn {
    fd: RawFd,
    out: Vec<u8>,
    eof: bool,
}

#[derive(PartialEq)]
enum State {
    Open,
    Done,
}

impl Conn {
    fn new(fd: RawFd) -> Conn {
        Conn { fd, out: Vec::new(), eof: false }
    }

    fn wants_read(&self) -> bool {
        !self.eof && self.out.len() < BACKLOG
    }

    /// Reads and writes until neither can go on (or, if `once`, one read and one write).
    fn turn(&mut self, once: bool, tmp: &mut [u8]) -> State {
        loop {
            let (mut in_moved, mut out_moved) = (false, false);
            if self.wants_read() {
                match sys::recv(self.fd, tmp, libc::MSG_DONTWAIT) {
                    Ok(0) => self.eof = true,
                    Ok(n) => {
                        self.out.extend_from_slice(&tmp[..n]);
                        in_moved = true;
                    }
                    Err(libc::EAGAIN) => {}
                    Err(libc::EINTR) => in_moved = true,
                    Err(_) => return State::Done,
                }
            }
            if !self.out.is_empty() {
                match sys::send(self.fd, &self.out, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) {
                    Ok(n) => {
                        self.out.drain(..n);
                        out_moved = true;
                    }
                    Err(libc::EAGAIN) => {}
                    Err(libc::EINTR) => out_moved = true,
                    Err(_) => return State::Done,
                }
            }
            if self.eof && self.out.is_empty() {
                return State::Done;
            }
            if once || !(in_moved || out_moved) {
                return State::Open;
            }
        }
    }

    fn interest(&self) -> u32 {
        let r = if self.wants_read() { EPOLLIN } else { 0 };
        let w = if self.out.is_empty() { 0 } else { EPOLLOUT };
        (r | w) as u32
    }
}

fn served(fd: RawFd) {
    let _ = sys::close(fd);
    util::SERVED.fetch_add(1, Ordering::SeqCst);
}

/// `echo-server --style S [--port P] [--conns N] [--threads T] [--children C]`.
pub fn run(a: &Args) -> i32 {
    util::install_term();
    let limit = util::conn_limit(a, 0);
    let style = a.text("style", "thread");
    if !STYLES.contains(&style.as_str()) {
        die(&format!("--style is one of {STYLES:?}"));
    }
    let l = util::announce(a.num("port", 0) as u16);
    let threads = a.num("threads", 3) as usize;
    match style.as_str() {
        "thread" => by_thread(l, limit),
        "poll" => by_poll(l, limit),
        "epoll-lt" => by_epoll(l, limit, 0, false),
        "epoll-et" => by_epoll(l, limit, (EPOLLET | EPOLLRDHUP) as u32, false),
        "epoll-nested" => by_epoll(l, limit, 0, true),
        "epoll-oneshot" => shared(l, limit, threads, false),
        "epoll-multi" => shared(l, limit, threads, true),
        "prefork" => return prefork(l, limit, a.num("children", 3) as usize),
        style => return fork_each(l, limit, style == "fork-left"),
    }
    let _ = sys::close(l);
    println!("SERVED {}", util::SERVED.load(Ordering::SeqCst));
    0
}

/// Echoes one connection with blocking calls.
fn echo_blocking(fd: RawFd) {
    echo_to_the_end(fd);
    served(fd);
}

fn echo_to_the_end(fd: RawFd) {
    let mut b = vec![0u8; CHUNK];
    loop {
        match sys::read(fd, &mut b) {
            Ok(0) => break,
            Ok(n) => {
                if sys::write_all(fd, &b[..n]).is_err() {
                    break;
                }
            }
            Err(libc::EINTR) => {}
            Err(_) => break,
        }
    }
}

fn by_thread(l: RawFd, limit: usize) {
    while let Some(fd) = util::accept_or_stop(l, limit, libc::SOCK_CLOEXEC) {
        std::thread::spawn(move || echo_blocking(fd));
    }
}

fn by_poll(l: RawFd, limit: usize) {
    let mut tmp = vec![0u8; CHUNK];
    let mut conns: Vec<Conn> = Vec::new();
    sys::nonblock(l, true).expect("nonblock");
    while !util::stopping(limit) {
        let mut p = vec![libc::pollfd { fd: l, events: libc::POLLIN, revents: 0 }];
        p.extend(conns.iter().map(|c| {
            let r = if c.wants_read() { libc::POLLIN } else { 0 };
            let w = if c.out.is_empty() { 0 } else { libc::POLLOUT };
            libc::pollfd { fd: c.fd, events: r | w, revents: 0 }
        }));
        if sys::poll(&mut p, 100).is_err() {
            continue;
        }
        let mut i = 0;
        conns.retain_mut(|c| {
            i += 1;
            if p[i].revents != 0 && c.turn(true, &mut tmp) == State::Done {
                served(c.fd);
                return false;
            }
            true
        });
        if p[0].revents != 0 {
            while let Ok(fd) = sys::accept(l, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) {
                conns.push(Conn::new(fd));
            }
        }
    }
    conns.iter().for_each(|c| served(c.fd));
}

/// One thread, one set (or an outer set that holds the inner one with the connections).
fn by_epoll(l: RawFd, limit: usize, extra: u32, nested: bool) {
    let ep = sys::epoll_create().expect("epoll");
    let outer = if nested { sys::epoll_create().expect("epoll") } else { ep };
    sys::nonblock(l, true).expect("nonblock");
    sys::epoll_ctl(outer, EPOLL_CTL_ADD, l, EPOLLIN as u32, l as u64).expect("add listener");
    if nested {
        sys::epoll_ctl(outer, EPOLL_CTL_ADD, ep, EPOLLIN as u32, ep as u64).expect("add inner");
    }
    let et = extra & EPOLLET as u32 != 0;
    let all = EPOLLIN as u32 | EPOLLOUT as u32 | extra;
    let mut tmp = vec![0u8; CHUNK];
    let mut conns: HashMap<RawFd, Conn> = HashMap::new();
    while !util::stopping(limit) {
        let Ok(mut evs) = sys::epoll_wait(outer, 64, 100) else { continue };
        if nested && evs.iter().any(|e| e.1 == ep as u64) {
            evs.retain(|e| e.1 != ep as u64);
            evs.extend(sys::epoll_wait(ep, 64, 0).unwrap_or_default());
        }
        for (_, data) in evs {
            let fd = data as RawFd;
            if fd == l {
                while let Ok(c) = sys::accept(l, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) {
                    let ev = if et { all } else { EPOLLIN as u32 };
                    sys::epoll_ctl(ep, EPOLL_CTL_ADD, c, ev, c as u64).expect("add");
                    conns.insert(c, Conn::new(c));
                }
                continue;
            }
            let Some(c) = conns.get_mut(&fd) else { continue };
            let before = c.interest();
            if c.turn(!et, &mut tmp) == State::Done {
                conns.remove(&fd);
                // Half of the connections leave the set by DEL, the others by close.
                if fd % 2 == 0 {
                    let _ = sys::epoll_ctl(ep, EPOLL_CTL_DEL, fd, 0, 0);
                }
                served(fd);
            } else if !et && c.interest() != before {
                sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, c.interest(), fd as u64).expect("mod");
            }
        }
    }
    conns.keys().for_each(|&fd| served(fd));
    let _ = sys::close(ep);
    if nested {
        let _ = sys::close(outer);
    }
}

/// Several threads: on one set with one-shot events, or (`multi`) each on a set of its own with
/// every connection in two of them, level-triggered.
fn shared(l: RawFd, limit: usize, threads: usize, multi: bool) {
    let n_sets = if multi { threads.max(2) } else { 1 };
    let sets: Vec<RawFd> = (0..n_sets).map(|_| sys::epoll_create().expect("epoll")).collect();
    let conns: Arc<Mutex<HashMap<u64, Arc<Mutex<Conn>>>>> = Arc::default();
    let next = AtomicUsize::new(0);
    sys::nonblock(l, true).expect("nonblock");
    std::thread::scope(|s| {
        for t in 0..threads {
            let (sets, conns) = (&sets, conns.clone());
            let ep = sets[t % sets.len()];
            s.spawn(move || {
                let mut tmp = vec![0u8; CHUNK];
                while !util::stopping(limit) {
                    for (_, id) in sys::epoll_wait(ep, 16, 50).unwrap_or_default() {
                        let Some(c) = conns.lock().expect("lock").get(&id).cloned() else { continue };
                        let mut c = c.lock().expect("lock");
                        if c.fd < 0 {
                            continue;
                        }
                        if c.turn(false, &mut tmp) == State::Done {
                            conns.lock().expect("lock").remove(&id);
                            let fd = std::mem::replace(&mut c.fd, -1);
                            served(fd);
                        } else if !multi {
                            let ev = c.interest() | EPOLLONESHOT as u32;
                            sys::epoll_ctl(ep, EPOLL_CTL_MOD, c.fd, ev, id).expect("mod");
                        } else {
                            let i = id as usize % sets.len();
                            for e in [sets[i], sets[(i + 1) % sets.len()]] {
                                sys::epoll_ctl(e, EPOLL_CTL_MOD, c.fd, c.interest(), id).expect("mod");
                            }
                        }
                    }
                }
            });
        }
        while let Some(fd) = util::accept_or_stop(l, limit, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) {
            let id = next.fetch_add(1, Ordering::SeqCst);
            let c = Arc::new(Mutex::new(Conn::new(fd)));
            // Held while the sets are changed, so that no thread serves (and closes) it in between.
            let guard = c.lock().expect("lock");
            conns.lock().expect("lock").insert(id as u64, c.clone());
            let i = id % sets.len();
            let one = if multi { 0 } else { EPOLLONESHOT as u32 };
            sys::epoll_ctl(sets[i], EPOLL_CTL_ADD, fd, EPOLLIN as u32 | one, id as u64).expect("add");
            if multi {
                let e = sets[(i + 1) % sets.len()];
                sys::epoll_ctl(e, EPOLL_CTL_ADD, fd, EPOLLIN as u32, id as u64).expect("add");
            }
            drop(guard);
        }
        util::STOP.store(true, Ordering::SeqCst);
    });
    for e in sets {
        let _ = sys::close(e);
    }
}

fn end_children(pids: &mut Vec<i32>) -> i32 {
    let mut bad = 0;
    for &p in pids.iter() {
        let _ = sys::kill(p, libc::SIGTERM);
    }
    let until = Instant::now() + Duration::from_secs(10);
    for p in pids.drain(..) {
        let st = wait_until(p, until);
        if st != Some(0) {
            eprintln!("child {p} ended with status {st:?}");
            bad = 1;
        }
    }
    bad
}

/// Waits for a child; kills it when the time is over (`None`).
fn wait_until(pid: i32, until: Instant) -> Option<i32> {
    loop {
        let mut st = 0;
        // SAFETY: room for one int.
        let r = unsafe { libc::waitpid(pid, &mut st, libc::WNOHANG) };
        if r == pid {
            return Some(st);
        }
        if r < 0 || Instant::now() > until {
            let _ = sys::kill(pid, libc::SIGKILL);
            let _ = sys::waitpid(pid);
            return None;
        }
        util::pause_ms(2);
    }
}

/// Children share the listener; each accepts and serves one connection after the other. The
/// parent counts them over a pipe.
fn prefork(l: RawFd, limit: usize, children: usize) -> i32 {
    let (r, w) = sys::pipe().expect("pipe");
    let mut pids = Vec::new();
    sys::nonblock(l, true).expect("nonblock");
    for _ in 0..children {
        match sys::fork().expect("fork") {
            0 => {
                let _ = sys::close(r);
                while let Some(fd) = util::accept_or_stop(l, 0, libc::SOCK_CLOEXEC) {
                    echo_blocking(fd);
                    let _ = sys::write(w, b"x");
                }
                sys::exit(0);
            }
            p => pids.push(p),
        }
    }
    let _ = sys::close(w);
    let mut n = 0;
    let mut b = [0u8; 64];
    while !util::stopping(0) && (limit == 0 || n < limit) {
        match sys::poll1(r, libc::POLLIN, 100) {
            Ok(ev) if ev != 0 => n += sys::read(r, &mut b).unwrap_or(0),
            _ => {}
        }
    }
    println!("SERVED {n}");
    end_children(&mut pids)
}

/// Accepts, forks, serves in the child, closes in the parent (PostgreSQL's way). `left`: the child ends without closing.
fn fork_each(l: RawFd, limit: usize, left: bool) -> i32 {
    let (mut pids, mut bad, mut n) = (Vec::new(), 0, 0);
    loop {
        if util::stopping(0) || (limit > 0 && n >= limit) {
            break;
        }
        pids.retain(|&p| {
            let mut st = 0;
            // SAFETY: room for one int.
            if unsafe { libc::waitpid(p, &mut st, libc::WNOHANG) } == p {
                n += 1;
                if st != 0 {
                    eprintln!("child {p} ended with status {st}");
                    bad = 1;
                }
                return false;
            }
            true
        });
        match sys::poll1(l, libc::POLLIN, 20) {
            Ok(ev) if ev != 0 => {}
            _ => continue,
        }
        let Ok(fd) = sys::accept(l, libc::SOCK_CLOEXEC) else { continue };
        match sys::fork().expect("fork") {
            0 => {
                let _ = sys::close(l);
                echo_to_the_end(fd);
                if !left {
                    served(fd);
                }
                sys::exit(0);
            }
            p => pids.push(p),
        }
        let _ = sys::close(fd);
    }
    println!("SERVED {n}");
    end_children(&mut pids) | bad
}
