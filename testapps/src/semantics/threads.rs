//! Several threads at one connection or one epoll set.

use super::basic::ms;
use super::cx::{Cx, Op, Res, Why, IN};
use super::waiting::set;
use super::Check;
use crate::{ensure, more, prng, same, sys, util};
use libc::{EPIPE, EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD};
use libc::{MSG_NOSIGNAL, POLLIN, SHUT_RDWR, SHUT_WR};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::{spawn, JoinHandle};
use std::time::Instant;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("shutdown-wakes-recv", shutdown_wakes_recv),
    ("shutdown-wakes-send", shutdown_wakes_send),
    ("shutdown-wakes-poll", shutdown_wakes_poll),
    ("two-readers", two_readers),
    ("two-writers", two_writers),
    ("reader-and-writer", reader_and_writer),
    ("poll-beside-reader", poll_beside_reader),
    ("epoll-add-while-waiting", |cx| ctl_while_waiting(cx, EPOLL_CTL_ADD)),
    ("epoll-mod-while-waiting", |cx| ctl_while_waiting(cx, EPOLL_CTL_MOD)),
    ("epoll-del-while-waiting", del_while_waiting),
    ("epoll-mod-rearms-other-thread", rearm_other),
    ("epoll-edge-two-waiters", edge_two_waiters),
    ("epoll-asleep-before-the-move", asleep_before_the_move),
    ("epoll-look-beside-a-sleeper", beside_a_sleeper),
    ("epoll-goes-to-another-set", to_another_set),
    ("epoll-oneshot-armed-meanwhile", armed_meanwhile),
    ("epoll-wakes-all-sets", all_sets),
    ("epoll-oneshot-workers", oneshot_workers),
    ("fcntl-by-other-thread", fcntl_other),
    ("calls-on-a-small-stack", small_stack),
];

fn join<T>(t: JoinHandle<T>) -> Result<T, Why> {
    t.join().map_err(|_| Why("a thread panicked".into()))
}

fn after(ms: u64, f: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    spawn(move || {
        util::pause_ms(ms);
        f()
    })
}

fn shutdown_wakes_recv(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    let t = after(50, move || {
        let _ = sys::shutdown(fd, SHUT_RDWR);
    });
    same!(sys::read(fd, &mut [0; 4]), Ok(0), "a read that waits");
    join(t)?;
    same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "what the peer reads");
    Ok(())
}

fn shutdown_wakes_send(cx: &mut Cx) -> Res {
    let (n, fd) = (cx.fill(4096)?, cx.fd);
    let t = after(50, move || {
        let _ = sys::shutdown(fd, SHUT_WR);
    });
    let b = prng::bytes(super::cx::OUT, cx.tx, 32 << 20);
    let r = sys::send(fd, &b, MSG_NOSIGNAL);
    join(t)?;
    let more = match r {
        Ok(k) => {
            same!(sys::send(fd, &b, MSG_NOSIGNAL), Err(EPIPE), "the next send");
            k
        }
        Err(e) => {
            same!(e, EPIPE, "a send that waits");
            0
        }
    };
    same!(cx.tell(Op::Drain, 0, 0, 0)?, (n + more) as u64, "bytes before the end");
    Ok(())
}

fn shutdown_wakes_poll(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    let w = spawn(move || sys::epoll_wait(ep, 4, 5000));
    let t = after(50, move || {
        let _ = sys::shutdown(fd, SHUT_RDWR);
    });
    let r = sys::poll1(fd, POLLIN, 5000)?;
    same!(r, POLLIN | libc::POLLHUP, "a poll that waits");
    same!(join(w)?, Ok(vec![((EPOLLIN | libc::EPOLLHUP) as u32, 7)]), "an epoll_wait that waits");
    join(t)
}

/// Reads messages of 8 bytes (their numbers) until the number is `u64::MAX`.
fn read_numbers(fd: RawFd) -> Result<Vec<u64>, i32> {
    let mut v = Vec::new();
    loop {
        let mut b = [0; 8];
        match sys::read(fd, &mut b) {
            Ok(8) => v.push(u64::from_ne_bytes(b)),
            Ok(0) => return Ok(v),
            Ok(_) => return Err(libc::EPROTO),
            Err(e) => return Err(e),
        }
    }
}

fn two_readers(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    // Pieces of 8 bytes, whole in every read: which are which says the stream's own contents.
    let n = 4000;
    let t: Vec<_> = (0..2).map(|_| spawn(move || read_numbers(fd))).collect();
    util::pause_ms(20);
    cx.post(Op::SendBits, n, 8, 0)?;
    cx.post(Op::Sleep, 20_000, 0, 0)?;
    cx.post(Op::SendBits, 40, 8, 1000)?;
    cx.post(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    cx.wait()?;
    let mut got = Vec::new();
    for t in t {
        got.extend(join(t)??);
    }
    let want = prng::bytes(IN, cx.rx, (n as usize + 40) * 8);
    let number = |c: &[u8]| c.iter().rev().fold(0, |a, &x| a << 8 | x as u64);
    let mut want: Vec<u64> = want.chunks(8).map(number).collect();
    want.sort();
    got.sort();
    ensure!(got == want, "two readers got {} pieces of {}, or others", got.len(), want.len());
    Ok(())
}

/// Traffic between two ends of our own, for long enough to move.
fn talk(a: RawFd, b: RawFd) -> Res {
    for i in 0..60u8 {
        let mut m = [0; 32];
        sys::write_all(a, &[i; 32])?;
        sys::read_exact(b, &mut m)?;
        sys::write_all(b, &m)?;
        sys::read_exact(a, &mut m)?;
        ensure!(m == [i; 32], "wrong bytes in round {i}");
        if i % 10 == 0 {
            util::pause_ms(5);
        }
    }
    Ok(())
}

fn two_writers(cx: &mut Cx) -> Res {
    // Each writer repeats one byte; what arrives is echoed by nobody, so a second connection of
    // our own is used, warmed by its own traffic.
    let (l, port) = sys::listen(0, 4)?;
    let a = sys::connect(port)?;
    let b = sys::accept(l, 0)?;
    talk(a, b)?;
    let each = 3000;
    let t: Vec<_> =
        (1..3u8).map(|k| spawn(move || (0..each).all(|_| sys::send(a, &[k; 1000], 0) == Ok(1000)))).collect();
    let (mut count, mut buf) = ([0usize; 3], vec![0; 2 * each * 1000]);
    sys::read_exact(b, &mut buf)?;
    buf.iter().for_each(|&x| count[(x as usize).min(2) * (x < 3) as usize] += 1);
    for t in t {
        ensure!(join(t)?, "a send failed");
    }
    same!(count, [0, each * 1000, each * 1000], "bytes of each writer");
    sys::close(a)?;
    sys::close(b)?;
    cx.warm(4, 0)
}

/// Threads sleep in a set while its connection may move, and another keeps looking at it, which takes whatever is meant
/// to tell them. They still wake for what comes later.
fn asleep_before_the_move(cx: &mut Cx) -> Res {
    const TRIES: u32 = 6;
    for _ in 0..TRIES {
        let (l, port) = sys::listen(0, 4)?;
        let (a, b) = (sys::connect(port)?, sys::accept(l, 0)?);
        let ep = sys::epoll_awaited()?;
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, b, 0, 3)?;
        let sleepers: Vec<_> = (0..2).map(|_| spawn(move || sys::epoll_wait(ep, 4, 4000))).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let looks = spawn(move || -> Result<usize, i32> {
            let mut n = 0;
            while !seen.load(Ordering::Relaxed) {
                n += sys::epoll_wait(ep, 4, 0)?.len();
            }
            Ok(n)
        });
        talk(a, b)?;
        stop.store(true, Ordering::Relaxed);
        same!(join(looks)??, 0, "events of a connection for which none are wanted");
        sys::write_all(a, b"x")?;
        sys::epoll_ctl(ep, EPOLL_CTL_MOD, b, EPOLLIN as u32, 3)?;
        for t in sleepers {
            same!(join(t)??, vec![(EPOLLIN as u32, 3)], "what a thread sees that slept before");
        }
        for fd in [a, b, l, ep] {
            sys::close(fd)?;
        }
    }
    cx.warm(4, 0)
}

fn reader_and_writer(cx: &mut Cx) -> Res {
    let n = 8 << 20;
    let mut w = cx.with_fd(cx.fd);
    // The puppet does one thing at a time, so it echoes big messages.
    cx.post(Op::Echo, 64, n / 64, 0)?;
    let t = spawn(move || w.send(n as usize).map(|_| w.tx));
    cx.recv(n as usize)?;
    cx.tx = join(t)??;
    same!(cx.wait()?, 64, "messages echoed");
    Ok(())
}

fn poll_beside_reader(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    let w = spawn(move || sys::poll1(fd, POLLIN, 5000));
    util::pause_ms(20);
    cx.later(20, 10)?;
    same!(join(w)?, Ok(POLLIN), "poll in another thread");
    cx.wait()?;
    cx.recv(10)?;
    // Both wait; whoever comes first, nobody hangs.
    let w = spawn(move || sys::poll1(fd, POLLIN, 300));
    cx.later(50, 10)?;
    cx.recv(10)?;
    let got = join(w)?;
    ensure!(got == Ok(0) || got == Ok(POLLIN), "poll beside a reader: {got:?}");
    Ok(())
}

fn ctl_while_waiting(cx: &mut Cx, op: i32) -> Res {
    let ep = sys::epoll_awaited()?;
    if op == EPOLL_CTL_MOD {
        sys::epoll_ctl(ep, EPOLL_CTL_ADD, cx.fd, 0, 7)?;
    }
    // First with data that is there already, then with data that comes later.
    for early in [true, false] {
        if early {
            cx.tell(Op::Send, 10, 0, 0)?;
            cx.arrive(10)?;
        }
        let w = spawn(move || (sys::epoll_wait(ep, 4, 5000), Instant::now()));
        util::pause_ms(40);
        let t = Instant::now();
        sys::epoll_ctl(ep, op, cx.fd, EPOLLIN as u32, 7)?;
        if !early {
            util::pause_ms(20);
            cx.tell(Op::Send, 10, 0, 0)?;
        }
        let (got, at) = join(w)?;
        same!(got, Ok(vec![(EPOLLIN as u32, 7)]), "epoll_wait (early {early})");
        ensure!(at.duration_since(t).as_millis() < 1000, "it took {:?}", at.duration_since(t));
        cx.recv(10)?;
        if op == EPOLL_CTL_ADD {
            sys::epoll_ctl(ep, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
        } else {
            sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, 0, 7)?;
        }
    }
    Ok(())
}

fn del_while_waiting(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    let w = spawn(move || sys::epoll_wait(ep, 4, 200));
    util::pause_ms(40);
    sys::epoll_ctl(ep, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    same!(join(w)?, Ok(vec![]), "events after EPOLL_CTL_DEL");
    cx.recv(10)
}

fn rearm_other(cx: &mut Cx) -> Res {
    let e = EPOLLIN | EPOLLONESHOT;
    let ep = set(cx, e)?;
    for round in 0..5 {
        cx.tell(Op::Send, 20, 0, 0)?;
        same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "the event of round {round}");
        cx.arrive(20)?;
        let w = spawn(move || sys::epoll_wait(ep, 4, 5000));
        util::pause_ms(20);
        cx.recv(10)?;
        sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, e as u32, 7)?;
        same!(join(w)?, Ok(vec![(EPOLLIN as u32, 7)]), "the event in the other thread");
        cx.recv(10)?;
        sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, e as u32, 7)?;
    }
    Ok(())
}

fn edge_two_waiters(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN | EPOLLET)?;
    for _ in 0..5 {
        let w: Vec<_> = (0..2).map(|_| spawn(move || sys::epoll_wait(ep, 4, 250))).collect();
        cx.later(40, 10)?;
        let mut n = 0;
        for w in w {
            n += join(w)??.len();
        }
        same!(n, 1, "threads that one edge woke");
        cx.wait()?;
        cx.recv(10)?;
    }
    Ok(())
}

fn pause(us: u64) {
    std::thread::sleep(std::time::Duration::from_micros(us));
}

/// A thread sleeps in a set, and another looks at it once, at the very moment: it may take whatever is to tell the first.
fn beside_a_sleeper(cx: &mut Cx) -> Res {
    const TIMES: u64 = 200;
    let ep = set(cx, EPOLLIN)?;
    let mut rng = prng::Rng::new(5);
    for i in 0..TIMES {
        let w = spawn(move || sys::epoll_wait(ep, 4, 5000));
        cx.post(Op::Sleep, 700, 0, 0)?;
        cx.post(Op::Send, 10, 0, 0)?;
        pause(500 + rng.below(800));
        sys::epoll_wait(ep, 4, 0)?;
        same!(join(w)?, Ok(vec![(EPOLLIN as u32, 7)]), "what the sleeper is told in round {i}");
        cx.wait()?;
        cx.recv(10)?;
    }
    Ok(())
}

/// A connection goes from one set to another while a thread looks at the first, and never does again.
fn to_another_set(cx: &mut Cx) -> Res {
    const TIMES: u64 = 200;
    let (first, second) = (sys::epoll_awaited()?, sys::epoll_awaited()?);
    let mut rng = prng::Rng::new(6);
    for i in 0..TIMES {
        sys::epoll_ctl(first, EPOLL_CTL_ADD, cx.fd, EPOLLIN as u32, 7)?;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let looks = spawn(move || -> Result<(), i32> {
            while !seen.load(Ordering::SeqCst) {
                sys::epoll_wait(first, 4, 0)?;
            }
            Ok(())
        });
        pause(rng.below(300));
        stop.store(true, Ordering::SeqCst);
        sys::epoll_ctl(first, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
        sys::epoll_ctl(second, EPOLL_CTL_ADD, cx.fd, EPOLLIN as u32, 8)?;
        cx.post(Op::Sleep, 1500, 0, 0)?;
        cx.post(Op::Send, 10, 0, 0)?;
        same!(sys::epoll_wait(second, 4, 5000), Ok(vec![(EPOLLIN as u32, 8)]), "events of the second set, round {i}");
        sys::epoll_ctl(second, EPOLL_CTL_DEL, cx.fd, 0, 0)?;
        join(looks)??;
        cx.wait()?;
        cx.recv(10)?;
    }
    Ok(())
}

/// A one-shot is armed for something else while a thread is on its way with what it was armed for first, and takes no
/// notice of that: the other is told as well.
fn armed_meanwhile(cx: &mut Cx) -> Res {
    const TIMES: u64 = 120;
    let (first, then) = ((EPOLLIN | EPOLLONESHOT) as u32, (EPOLLOUT | EPOLLONESHOT) as u32);
    let mut rng = prng::Rng::new(7);
    let mut ep = set(cx, 0)?;
    for i in 0..TIMES {
        // On TCP, mostly.
        if i.is_multiple_of(6) {
            sys::close(ep)?;
            cx.renew()?;
            ep = set(cx, 0)?;
        }
        sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, first, 7)?;
        let w = spawn(move || loop {
            match sys::epoll_wait(ep, 4, 5000)?.as_slice() {
                [(e, 7)] if *e == EPOLLIN as u32 => {}
                got => return Ok::<_, i32>(got.to_vec()),
            }
        });
        cx.post(Op::Sleep, 500, 0, 0)?;
        cx.post(Op::Send, 10, 0, 0)?;
        pause(400 + rng.below(400));
        sys::epoll_ctl(ep, EPOLL_CTL_MOD, cx.fd, then, 7)?;
        same!(join(w)?, Ok(vec![(EPOLLOUT as u32, 7)]), "what it is armed for last, in round {i}");
        cx.wait()?;
        cx.recv(10)?;
    }
    cx.renew()?;
    cx.warm(6, 0)
}

fn all_sets(cx: &mut Cx) -> Res {
    let sets = [set(cx, EPOLLIN)?, set(cx, EPOLLIN | EPOLLET)?, set(cx, EPOLLIN | EPOLLONESHOT)?];
    let w: Vec<_> = sets.into_iter().map(|ep| spawn(move || sys::epoll_wait(ep, 4, 3000))).collect();
    cx.later(50, 10)?;
    for (i, w) in w.into_iter().enumerate() {
        same!(join(w)?, Ok(vec![(EPOLLIN as u32, 7)]), "set {i}");
    }
    cx.wait()?;
    cx.recv(10)
}

fn oneshot_workers(cx: &mut Cx) -> Res {
    let e = EPOLLIN | EPOLLONESHOT;
    let ep = set(cx, e)?;
    let stop = more::eventfd()?;
    sys::epoll_ctl(ep, EPOLL_CTL_ADD, stop, EPOLLIN as u32, 9)?;
    let fd = cx.fd;
    // One echo worker at a time owns the connection; the byte streams show any overlap.
    let worker = move || -> Result<usize, i32> {
        let mut n = 0;
        for _ in 0..1_000_000 {
            for (_, d) in sys::epoll_wait(ep, 1, 5000)? {
                if d == 9 {
                    return Ok(n);
                }
                let mut b = [0; 256];
                let k = sys::recv(fd, &mut b, libc::MSG_DONTWAIT)?;
                n += k;
                sys::epoll_ctl(ep, EPOLL_CTL_MOD, fd, e as u32, 7)?;
            }
        }
        Err(libc::ETIME)
    };
    let t: Vec<_> = (0..3).map(|_| spawn(worker)).collect();
    cx.tell(Op::SendBits, 1000, 50, 20)?;
    for _ in 0..2000 {
        if sys::fionread(fd)? == 0 {
            break;
        }
        util::pause_ms(1);
    }
    util::pause_ms(20);
    sys::write(stop, &1u64.to_ne_bytes())?;
    let mut n = 0;
    for t in t {
        n += join(t)??;
    }
    same!(n, 50_000, "bytes that the workers read");
    Ok(())
}

fn fcntl_other(cx: &mut Cx) -> Res {
    // O_NONBLOCK set while another thread waits does not disturb that wait.
    let fd = cx.fd;
    let t = after(30, move || {
        let _ = sys::nonblock(fd, true);
    });
    cx.later(80, 10)?;
    let mut b = [0; 10];
    let start = Instant::now();
    same!(sys::read(fd, &mut b), Ok(10), "a read that waits");
    ensure!(ms(start) >= 60, "it took {} ms", ms(start));
    cx.take(&b)?;
    join(t)?;
    same!(sys::read(fd, &mut b), Err(libc::EAGAIN), "the next read");
    sys::nonblock(fd, false)?;
    Ok(())
}

/// What a thread (or a coroutine) with little stack does natively it can do on a ring.
fn small_stack(cx: &mut Cx) -> Res {
    const STACK: usize = 32 << 10;
    const FILE: usize = 100_000;
    let (fd, ep) = (cx.fd, set(cx, EPOLLIN)?);
    let file = more::memfile(&cx.out(FILE))?;
    cx.post(Op::Recv, FILE as u64, 0, 0)?;
    let thread = std::thread::Builder::new().stack_size(STACK).spawn(move || -> sys::R<usize> {
        let (mut off, mut sent) = (0, 0);
        while sent < FILE {
            sent += sys::sendfile(fd, file, &mut off, FILE - sent)?;
        }
        Ok(sent)
    });
    same!(join(thread.map_err(|e| Why(e.to_string()))?)??, FILE, "bytes by sendfile");
    same!(cx.wait()?, FILE as u64, "bytes of the file that arrived");
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    let thread = std::thread::Builder::new().stack_size(STACK).spawn(move || -> sys::R<_> {
        let polled = sys::poll1(fd, POLLIN, 100)?;
        let (selected, _) = sys::select(&[fd], &[], 100)?;
        Ok((polled, selected.len(), sys::epoll_wait(ep, 4, 100)?.len()))
    });
    same!(join(thread.map_err(|e| Why(e.to_string()))?)??, (POLLIN, 1, 1), "what waits tell");
    cx.recv(10)?;
    sys::close(file)?;
    sys::close(ep)?;
    Ok(())
}
