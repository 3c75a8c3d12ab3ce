//! Signals while a call waits, with and without `SA_RESTART`.

use super::basic::ms;
use super::cx::{goes_by_rdma, untried, Cx, Op, Res, Why};
use super::jumps::alarm_in;
use super::procs::{child, reap};
use super::waiting::set;
use super::Check;
use crate::{ensure, more, prng, same, sys, util};
use libc::{EINTR, EPOLLIN, MSG_NOSIGNAL, MSG_WAITALL, POLLIN, SA_RESTART, SIGUSR1};
use std::time::Instant;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("eintr-recv", eintr_recv),
    ("eintr-recv-timeout", eintr_recv_timeout),
    ("eintr-recv-waitall", eintr_waitall),
    ("waitall-bytes-and-a-signal", waitall_and_hit),
    ("waits-bytes-and-a-signal", waits_and_hit),
    ("eintr-send", eintr_send),
    ("eintr-send-partial", eintr_send_partial),
    ("eintr-poll", |cx| eintr_waits(cx, 0)),
    ("eintr-poll-restart", |cx| eintr_waits(cx, SA_RESTART)),
    ("eintr-waits-of-a-child", eintr_in_child),
    ("restart-recv", restart_recv),
    ("restart-recv-of-more", restart_recv_of_more),
    ("restart-recv-of-all-and-a-return", restart_recv_of_all),
    ("restart-send", restart_send),
    ("signal-masks", masks),
    ("signal-masks-of-looks", masks_of_looks),
    ("signal-mask-data", mask_data),
    ("signal-storm", storm),
    ("signals-beside-sends", beside_sends),
];

fn join(t: std::thread::JoinHandle<()>) -> Res {
    t.join().map_err(|_| Why("a thread panicked".into()))
}

/// Runs a call that a signal is to interrupt.
fn hit<T: std::fmt::Debug + PartialEq>(what: &str, want: T, f: impl FnOnce() -> T) -> Res {
    let before = more::signals();
    let t = Instant::now();
    let s = more::signal_after(40, SIGUSR1);
    let got = f();
    let took = ms(t);
    join(s)?;
    same!(got, want, "{what} after {took} ms");
    same!(more::signals(), before + 1, "signals in {what}");
    ensure!((30..1000).contains(&took), "{what} took {took} ms");
    Ok(())
}

/// A child's waits for a connection of its parent's, which is stopped, so that it cannot bring that home.
fn eintr_in_child(cx: &mut Cx) -> Res {
    more::count_signal(SIGUSR1, 0)?;
    for way in 0..4 {
        cx.renew()?;
        cx.leave_tcp()?;
        let (fd, ep) = (cx.fd, set(cx, EPOLLIN)?);
        let parent = std::process::id() as i32;
        reap(child(move || {
            sys::kill(parent, libc::SIGSTOP)?;
            let begin = || (Instant::now(), more::signal_after(300, SIGUSR1));
            let wait = || match way {
                0 => sys::poll1(fd, POLLIN, 3000).map(|_| ()),
                1 => sys::epoll_wait(ep, 1, 3000).map(|_| ()),
                2 => sys::poll1(fd, POLLIN, 1500).map(|_| ()),
                _ => sys::epoll_wait(ep, 1, 1500).map(|_| ()),
            };
            let (began, hit) = if way < 2 { begin() } else { (Instant::now(), std::thread::spawn(|| ())) };
            let got = wait();
            let took = ms(began);
            sys::kill(parent, libc::SIGCONT)?;
            join(hit)?;
            if way < 2 {
                same!(got, Err(EINTR), "wait {way} after {took} ms");
                ensure!((250..2500).contains(&took), "wait {way} took {took} ms");
            } else {
                same!(got, Ok(()), "wait {way} after {took} ms");
                ensure!((1490..2200).contains(&took), "wait {way} took {took} ms");
            }
            Ok(())
        })?)?;
        sys::close(ep)?;
    }
    cx.warm(10, 0)
}

fn eintr_recv(cx: &mut Cx) -> Res {
    more::count_signal(SIGUSR1, 0)?;
    let mut b = [0; 10];
    hit("read", Err(EINTR), || sys::read(cx.fd, &mut b))?;
    hit("recv", Err(EINTR), || sys::recv(cx.fd, &mut b, 0))?;
    hit("recvmsg", Err(EINTR), || sys::recvmsg(cx.fd, &mut b, 2, 0))?;
    hit("readv", Err(EINTR), || sys::readv(cx.fd, &mut b, 2))?;
    cx.warm(10, 0)
}

fn eintr_recv_timeout(cx: &mut Cx) -> Res {
    sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, 3000)?;
    let mut b = [0; 10];
    // With a timeout the kernel does not restart the call, whatever the handler asks for.
    for flags in [0, SA_RESTART] {
        more::count_signal(SIGUSR1, flags)?;
        hit("read with SO_RCVTIMEO", Err(EINTR), || sys::read(cx.fd, &mut b))?;
    }
    cx.warm(10, 0)
}

fn eintr_waitall(cx: &mut Cx) -> Res {
    more::count_signal(SIGUSR1, 0)?;
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    let mut b = [0; 50];
    hit("recv with MSG_WAITALL", Ok(10), || sys::recv(cx.fd, &mut b, MSG_WAITALL))?;
    cx.take(&b[..10])
}

/// A handler that lets a receive go on that waits for the first of several bytes ends it no more when that has come.
fn restart_recv_of_more(cx: &mut Cx) -> Res {
    more::count_signal(SIGUSR1, SA_RESTART)?;
    sys::setsockopt(cx.fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 2i32)?;
    cx.post(Op::Sleep, 150_000, 0, 0)?;
    cx.post(Op::SendBits, 2, 1, 150_000)?;
    let mut b = [0; 10];
    hit("a receive with SO_RCVLOWAT", Ok(2), || sys::recv(cx.fd, &mut b, 0))?;
    cx.take(&b[..2])?;
    cx.wait()?;
    cx.wait()?;
    Ok(())
}

/// Nor one of all, if the connection goes back to the kernel before the first byte comes.
fn restart_recv_of_all(cx: &mut Cx) -> Res {
    const ROUNDS: u32 = 8;
    more::count_signal(SIGUSR1, SA_RESTART)?;
    let mut in_time = 0;
    for _ in 0..ROUNDS {
        let (fd, (a, b)) = (cx.fd, sys::socketpair()?);
        let (before, began) = (more::signals(), Instant::now());
        // What another process might have it does not leave again.
        let returns = std::thread::spawn(move || {
            util::pause_ms(60);
            // On a busy machine all may come at once: a handler behind the first byte ends the call.
            let in_time = more::signals() > before && ms(began) < 80;
            more::send_fd(a, fd)?;
            more::recv_fd(b).map(|other| (other, in_time))
        });
        for (ms, n) in [(90, 10), (20, 40)] {
            cx.later(ms, n)?;
        }
        let hit = more::signal_after(40, SIGUSR1);
        let mut buf = [0; 50];
        let n = sys::recv(cx.fd, &mut buf, MSG_WAITALL)?;
        join(hit)?;
        let (other, so) = returns.join().map_err(|_| Why("a thread panicked".into()))??;
        if so {
            same!(n, 50, "a receive of all");
            in_time += 1;
        }
        cx.take(&buf[..n])?;
        cx.recv(50 - n)?;
        cx.wait()?;
        [a, b, other].into_iter().try_for_each(sys::close)?;
        cx.renew()?;
        cx.leave_tcp()?;
    }
    ensure!(in_time > 0, "in none of {ROUNDS} rounds the signal was in time");
    Ok(())
}

/// For what has the puppet send a signal.
fn puppet_can_hit(cx: &Cx) -> Res {
    if cx.hosts.are_two() {
        return untried("no signal comes from another machine");
    }
    Ok(())
}

/// Bytes wake the thread, and a signal comes before it runs: the kernel's call takes the bytes, and then sees the signal,
/// which ends it in spite of `SA_RESTART`.
fn waitall_and_hit(cx: &mut Cx) -> Res {
    const TIMES: u32 = 60;
    puppet_can_hit(cx)?;
    more::count_signal(SIGUSR1, SA_RESTART)?;
    let mut whole = 0;
    for i in 0..TIMES {
        cx.post(Op::Sleep, 2_000, 0, 0)?;
        cx.post(Op::SendHit, 10, sys::gettid() as u64, std::process::id().into())?;
        cx.post(Op::Sleep, 20_000, 0, 0)?;
        cx.post(Op::Send, 40, 0, 0)?;
        let mut b = [0; 50];
        let n = sys::recv(cx.fd, &mut b, MSG_WAITALL)?;
        cx.take(&b[..n])?;
        match n {
            10 => cx.recv(40)?,
            50 => whole += 1,
            _ => return Err(Why(format!("{n} bytes in round {i}"))),
        }
        for _ in 0..4 {
            cx.wait()?;
        }
    }
    // The thread may not have slept yet, and bytes of a connection that moves arrive after what wakes it.
    ensure!(whole <= TIMES / 3, "{whole} of {TIMES} calls went on after bytes and a signal");
    Ok(())
}

/// The same in `epoll_wait` and `poll`, which tell of the bytes, whichever way the thread hears of them: with a second set that
/// has the connection no bell alone is to be rung.
fn waits_and_hit(cx: &mut Cx) -> Res {
    const TIMES: u64 = 200;
    puppet_can_hit(cx)?;
    more::count_signal(SIGUSR1, SA_RESTART)?;
    let sets = [set(cx, EPOLLIN)?, set(cx, EPOLLIN)?];
    let mut rng = prng::Rng::new(3);
    // By another host's link bytes may come later than a signal that was sent after them, as by any network.
    let by_network = goes_by_rdma();
    let mut late = 0;
    for i in 0..TIMES {
        if i == TIMES / 2 {
            sys::close(sets[1])?;
        }
        cx.post(Op::Sleep, rng.below(2_000), 0, 0)?;
        cx.post(Op::SendHit, 10, sys::gettid() as u64, std::process::id().into())?;
        let waited = |late: &mut u64| -> Result<bool, Why> {
            let (got, all) = match i % 3 < 2 {
                true => (sys::epoll_wait(sets[0], 4, 5000).map(|v| v == [(EPOLLIN as u32, 7)]), "epoll_wait"),
                false => (sys::poll1(cx.fd, POLLIN, 5000).map(|r| r == POLLIN), "poll"),
            };
            if by_network && got == Err(EINTR) {
                *late += 1;
                return Ok(false);
            }
            same!(got, Ok(true), "{all} in round {i}");
            Ok(true)
        };
        if !waited(&mut late)? {
            ensure!(waited(&mut late)?, "a second signal in round {i}");
        }
        cx.wait()?;
        cx.recv(10)?;
    }
    ensure!(late <= TIMES / 20, "{late} of {TIMES} signals came before what was sent before them");
    Ok(())
}

fn eintr_send(cx: &mut Cx) -> Res {
    more::count_signal(SIGUSR1, 0)?;
    let mut n = 0;
    for what in ["send", "write", "writev"] {
        n += cx.full(|cx, b| {
            let (mut got, t) = (Ok(0), Instant::now());
            let r = hit(what, true, || {
                got = match what {
                    "send" => sys::send(cx.fd, b, MSG_NOSIGNAL),
                    "write" => sys::write(cx.fd, b),
                    _ => sys::writev(cx.fd, b, 3),
                };
                got == Err(EINTR)
            });
            match got {
                Ok(k) if ms(t) < 1000 => Ok(Some(k)),
                _ => r.map_err(|e| Why(format!("{} {got:?}", e.0))).map(|()| None),
            }
        })?;
    }
    same!(cx.tell(Op::Recv, n, 0, 0)?, n, "bytes that arrived");
    cx.warm(10, 0)
}

fn eintr_send_partial(cx: &mut Cx) -> Res {
    for flags in [0, SA_RESTART] {
        more::count_signal(SIGUSR1, flags)?;
        let b = prng::bytes(super::cx::OUT, cx.tx, 32 << 20);
        let mut got = Ok(0);
        hit("a long send", true, || {
            got = sys::send(cx.fd, &b, MSG_NOSIGNAL);
            matches!(got, Ok(n) if n > 0 && n < b.len())
        })
        .map_err(|e| Why(format!("{} {got:?}", e.0)))?;
        let n = got? as u64;
        cx.tx += n;
        same!(cx.tell(Op::Recv, n, 0, 0)?, n, "bytes that arrived");
    }
    cx.warm(10, 0)
}

fn eintr_waits(cx: &mut Cx, flags: i32) -> Res {
    more::count_signal(SIGUSR1, flags)?;
    let ep = set(cx, EPOLLIN)?;
    hit("poll", Err(EINTR), || sys::poll1(cx.fd, POLLIN, 5000))?;
    hit("poll without end", Err(EINTR), || sys::poll1(cx.fd, POLLIN, -1))?;
    hit("ppoll", Err(EINTR), || sys::ppoll1(cx.fd, POLLIN, 5_000_000))?;
    hit("select", Err(EINTR), || sys::select(&[cx.fd], &[], 5000))?;
    hit("pselect", Err(EINTR), || sys::pselect_read(cx.fd, 5000))?;
    hit("epoll_wait", Err(EINTR), || sys::epoll_wait(ep, 4, 5000))?;
    hit("epoll_wait without end", Err(EINTR), || sys::epoll_wait(ep, 4, -1))?;
    hit("epoll_pwait", Err(EINTR), || sys::epoll_pwait(ep, 4, 5000))?;
    cx.later(20, 10)?;
    same!(sys::epoll_wait(ep, 4, 2000)?.len(), 1, "events after signals");
    cx.wait()?;
    cx.recv(10)
}

fn restart_recv(cx: &mut Cx) -> Res {
    more::count_signal(SIGUSR1, SA_RESTART)?;
    for _ in 0..3 {
        let before = more::signals();
        cx.later(90, 10)?;
        let s = more::signal_after(40, SIGUSR1);
        let mut b = [0; 20];
        let t = Instant::now();
        let got = sys::read(cx.fd, &mut b);
        let took = ms(t);
        join(s)?;
        same!(got, Ok(10), "read with SA_RESTART");
        same!(more::signals(), before + 1, "signals");
        ensure!(took >= 60, "read took {took} ms");
        cx.take(&b[..10])?;
        cx.wait()?;
    }
    Ok(())
}

fn restart_send(cx: &mut Cx) -> Res {
    more::count_signal(SIGUSR1, SA_RESTART)?;
    let (begin, mut taken) = (cx.tx, 0);
    cx.full(|cx, b| {
        let there = cx.tx - begin - taken;
        taken += there;
        cx.post(Op::Sleep, 90_000, 0, 0)?;
        cx.post(Op::Recv, there, 0, 0)?;
        let s = more::signal_after(40, SIGUSR1);
        let t = Instant::now();
        let got = sys::send(cx.fd, b, MSG_NOSIGNAL);
        let took = ms(t);
        join(s)?;
        same!(got, Ok(b.len()), "send with SA_RESTART after {took} ms");
        same!(cx.wait()?, there, "bytes that arrived");
        if took < 60 {
            return Ok(Some(b.len()));
        }
        cx.tx += b.len() as u64;
        Ok(None)
    })?;
    let rest = cx.tx - begin - taken;
    same!(cx.tell(Op::Recv, rest, 0, 0)?, rest, "bytes that arrived then");
    Ok(())
}

fn masks(cx: &mut Cx) -> Res {
    more::count_signal(SIGUSR1, SA_RESTART)?;
    more::block_signal(SIGUSR1);
    let ep = set(cx, EPOLLIN)?;
    for (call, fd) in [("ppoll", cx.fd), ("pselect", cx.fd), ("epoll_pwait", ep)] {
        let before = more::signals();
        sys::pthread_kill(sys::pthread_self(), SIGUSR1);
        util::pause_ms(5);
        same!(more::signals(), before, "signals while it is blocked");
        // A wait with that signal blocked is not disturbed.
        same!(sys::poll1(cx.fd, POLLIN, 20), Ok(0), "poll with a blocked signal");
        let t = Instant::now();
        same!(more::masked_wait(call, fd, 3000), Err(EINTR), "{call} with an empty mask");
        ensure!(ms(t) < 500, "{call} took {} ms", ms(t));
        same!(more::signals(), before + 1, "signals in {call}");
        let s = more::signal_after(40, SIGUSR1);
        same!(more::masked_wait(call, fd, 3000), Err(EINTR), "{call}, signal while it waits");
        join(s)?;
        same!(more::signals(), before + 2, "signals in {call}");
    }
    cx.warm(10, 0)
}

/// Also who does not wait lets a handler in, if there is nothing else to tell.
fn masks_of_looks(cx: &mut Cx) -> Res {
    more::count_signal(SIGUSR1, SA_RESTART)?;
    more::block_signal(SIGUSR1);
    for call in ["ppoll", "pselect"] {
        let before = more::signals();
        sys::pthread_kill(sys::pthread_self(), SIGUSR1);
        same!(more::masked_wait(call, cx.fd, 0), Err(EINTR), "{call} that does not wait");
        same!(more::signals(), before + 1, "signals in {call}");
        same!(more::masked_wait(call, cx.fd, 0), Ok(0), "{call} without a signal");
        cx.tell(Op::Send, 10, 0, 0)?;
        cx.arrive(10)?;
        sys::pthread_kill(sys::pthread_self(), SIGUSR1);
        same!(more::masked_wait(call, cx.fd, 0), Ok(1), "{call} with something to tell");
        same!(more::signals(), before + 1, "signals in that");
        cx.recv(10)?;
        same!(more::masked_wait(call, cx.fd, 0), Err(EINTR), "{call} after that");
        same!(more::signals(), before + 2, "signals after that");
    }
    cx.warm(10, 0)
}

fn mask_data(cx: &mut Cx) -> Res {
    let ep = set(cx, EPOLLIN)?;
    more::count_signal(SIGUSR1, 0)?;
    more::block_signal(SIGUSR1);
    for (call, fd) in [("ppoll", cx.fd), ("pselect", cx.fd), ("epoll_pwait", ep)] {
        cx.later(30, 10)?;
        same!(more::masked_wait(call, fd, 3000), Ok(1), "{call} with an empty mask and data");
        cx.wait()?;
        cx.recv(10)?;
        same!(more::masked_wait(call, fd, 20), Ok(0), "{call} with nothing");
    }
    sys::pthread_kill(sys::pthread_self(), SIGUSR1);
    util::pause_ms(5);
    same!(more::signals(), 0, "signals: the mask was not put back");
    Ok(())
}

/// Sends for which there is room never wait, so no handler ends one.
fn beside_sends(cx: &mut Cx) -> Res {
    const SENDS: usize = 2000;
    const SIZE: usize = 16;
    more::count_signal(libc::SIGALRM, 0)?;
    for round in 0..20 {
        // By TCP first.
        if round == 10 {
            cx.leave_tcp()?;
        }
        // Rings take all of them in less than 100 us.
        alarm_in(10 + 3 * round);
        let failed = (0..SENDS).find_map(|i| {
            let b = cx.out(SIZE);
            let r = sys::send(cx.fd, &b, 0);
            (r != Ok(SIZE)).then_some((i, r))
        });
        alarm_in(0);
        ensure!(failed.is_none(), "round {round}: send {failed:?}");
        cx.tell(Op::Recv, (SENDS * SIZE) as u64, 0, 0)?;
        cx.wait()?;
    }
    ensure!(more::signals() > 0, "no signal came");
    cx.warm(10, 0)
}

fn storm(cx: &mut Cx) -> Res {
    use std::sync::atomic::{AtomicBool, Ordering};
    static DONE: AtomicBool = AtomicBool::new(false);
    more::count_signal(SIGUSR1, 0)?;
    let me = sys::pthread_self();
    let t = std::thread::spawn(move || {
        for _ in 0..100_000 {
            if DONE.load(Ordering::SeqCst) {
                break;
            }
            sys::pthread_kill(me, SIGUSR1);
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    });
    let mut run = || -> Res {
        for _ in 0..4 {
            cx.post(Op::SendBits, 100, 5000, 100)?;
            cx.recv(500_000)?;
            cx.wait()?;
            cx.post(Op::SlowRecv, 4_000_000, 100_000, 200)?;
            cx.send(4_000_000)?;
            same!(cx.wait()?, 4_000_000, "bytes that arrived");
        }
        Ok(())
    };
    let r = run();
    DONE.store(true, Ordering::SeqCst);
    join(t)?;
    r
}
