//! Bytes behind a cork: nobody sees them before it is drawn, however hard he looks.

use super::cx::{child_must_leave_tcp, goes_by_rdma, Cx, Op, Res, Why};
use super::procs::{child, reap};
use super::Check;
use crate::{ensure, same, sys, util};
use libc::{IPPROTO_TCP, MSG_MORE, POLLIN, SHUT_WR, SIGKILL, SOL_SOCKET, SO_TIMESTAMP, TCP_CORK, TCP_NODELAY};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("cork", cork),
    ("cork-never-drawn", never_drawn),
    ("cork-hides", |cx| rounds(cx, 8, |cx, i| hides(cx, i, more(i)))),
    ("cork-hides-in-a-call-of-many", |cx| rounds(cx, 4, in_many)),
    ("cork-hides-while-a-thread-waits", while_a_thread_waits),
    ("cork-hides-over-a-return", over_a_return),
    ("cork-hides-from-the-first-byte-on", from_the_first),
    ("cork-nodelay", |cx| rounds(cx, 4, nodelay)),
    ("cork-wakes", |cx| rounds(cx, 4, wakes)),
    ("cork-unsent", |cx| rounds(cx, 4, unsent)),
    ("cork-that-a-child-draws", |cx| rounds(cx, 3, |cx, i| drawn_by_child(cx, i, false))),
    ("cork-behind-which-a-child-sends", |cx| rounds(cx, 3, |cx, i| drawn_by_child(cx, i, true))),
    ("cork-shutdown", |cx| ended(cx, |cx| Ok(sys::shutdown(cx.fd, SHUT_WR)?))),
    ("cork-close", |cx| ended(cx, |cx| Ok(sys::close(std::mem::replace(&mut cx.fd, -1))?))),
    ("cork-exit", |cx| in_child(cx, || sys::exit(0))),
    ("cork-kill", |cx| in_child(cx, || _ = sys::kill(std::process::id() as i32, SIGKILL))),
];

/// Where the cork is drawn so late, the kernel may have done it.
const LATE: Duration = Duration::from_millis(150);
/// So long somebody looks in vain.
const PAUSE: u64 = 15;
/// How long it takes until no acknowledgement is outstanding, whose coming would draw a `MSG_MORE`: 40 ms.
const QUIET: u64 = 60;
/// With a cork (0), or with `MSG_MORE`.
const MORE: [i32; 2] = [0, MSG_MORE];

/// One of the two in turn. While connections move at random moments, the kernel acknowledges what belongs to the move, which
/// draws a `MSG_MORE`, but no cork.
fn more(i: usize) -> i32 {
    match std::env::var_os("RINGSOCK_CHAOS") {
        Some(_) => 0,
        None => MORE[i % 2],
    }
}

fn set_cork(fd: RawFd, on: bool) -> Res {
    Ok(sys::setsockopt(fd, IPPROTO_TCP, TCP_CORK, i32::from(on))?)
}

/// Sends `n` bytes with `flags`.
fn put(cx: &mut Cx, n: usize, flags: i32) -> Res {
    let b = cx.out(n);
    same!(sys::send(cx.fd, &b, flags), Ok(n), "send");
    Ok(())
}

/// Rounds of `f`, which says whether it was quick enough to mean something.
fn rounds(cx: &mut Cx, n: usize, f: impl Fn(&mut Cx, usize) -> Result<bool, Why>) -> Res {
    let mut late = 0;
    for i in 0..n {
        util::pause_ms(QUIET);
        while !f(cx, i)? {
            late += 1;
            ensure!(late < 20, "this machine is too slow");
            util::pause_ms(QUIET);
        }
    }
    cx.warm(6, 0)
}

/// What a peer that looks without rest sees at first, if the `first` bytes lie behind a cork, and `rest` more come with its
/// being drawn by `draw`. False: it was drawn too late.
fn seen(cx: &mut Cx, (first, rest): (usize, usize), more: i32, draw: impl FnOnce(&mut Cx) -> Res) -> Result<bool, Why> {
    cx.post(Op::First, 0, 0, 0)?;
    set_cork(cx.fd, more == 0)?;
    util::pause_ms(2);
    let begun = Instant::now();
    put(cx, first, more)?;
    util::pause_ms(PAUSE);
    let early = cx.has_answer()?;
    draw(cx)?;
    let late = begun.elapsed() > LATE;
    let got = cx.wait()?;
    // To another host bytes go in as many pieces as a ring has where they lie.
    let part = goes_by_rdma() && !early;
    ensure!(
        late || part || got == (first + rest) as u64,
        "{got} bytes are seen first, of {first} (flags {more}) and {rest}"
    );
    same!(cx.tell(Op::Recv, (first + rest) as u64, 0, 0)?, (first + rest) as u64, "bytes that arrived");
    Ok(!late)
}

fn hides(cx: &mut Cx, i: usize, more: i32) -> Result<bool, Why> {
    let rest = [10, 2000, 20_000, 30_000][i / 2 % 4];
    seen(cx, (100, rest), more, |cx| {
        if more == 0 {
            put(cx, rest / 2, 0)?;
        }
        put(cx, if more == 0 { rest - rest / 2 } else { rest }, 0)?;
        set_cork(cx.fd, false)
    })
}

fn in_many(cx: &mut Cx, i: usize) -> Result<bool, Why> {
    let n = [300, 30_000][i / 2 % 2];
    seen(cx, (100, n), more(i), |cx| {
        let b = cx.out(n);
        same!(sys::sendmsg(cx.fd, &b, 3, 0), Ok(n), "sendmsg");
        set_cork(cx.fd, false)
    })
}

/// That somebody else waits for an answer draws no cork.
fn while_a_thread_waits(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    let waits = std::thread::spawn(move || sys::recv(fd, &mut [0; 1], libc::MSG_PEEK));
    // Without a cork what comes for the thread, its acknowledgement for one, would.
    for i in [0, 2, 4] {
        util::pause_ms(QUIET);
        hides(cx, i, 0)?;
    }
    cx.tell(Op::Send, 16, 0, 0)?;
    same!(waits.join().map_err(|_| Why("the thread".into()))?, Ok(1), "what the thread was told");
    cx.recv(16)?;
    cx.warm(6, 0)
}

/// What is behind a cork stays there when the connection has to go on in the kernel. `MSG_MORE` is drawn by an acknowledgement,
/// also of what belongs to the move, which now and then comes just then.
fn over_a_return(cx: &mut Cx) -> Res {
    let mut drawn = 0;
    for i in [0, 1, 1, 1, 1] {
        cx.renew()?;
        cx.leave_tcp()?;
        util::pause_ms(QUIET);
        let hidden = seen(cx, (100, 50), more(i), |cx| {
            sys::setsockopt(cx.fd, SOL_SOCKET, SO_TIMESTAMP, 1i32)?;
            util::pause_ms(PAUSE);
            put(cx, 50, 0)?;
            set_cork(cx.fd, false)
        });
        match hidden {
            Err(_) if more(i) != 0 && drawn < 3 => drawn += 1,
            Err(e) => return Err(e),
            Ok(_) if more(i) != 0 => break,
            Ok(_) => {}
        }
    }
    cx.renew()?;
    cx.warm(6, 0)
}

/// Messages behind corks while the connection leaves TCP: the peer sees each in one piece.
fn from_the_first(cx: &mut Cx) -> Res {
    for more in MORE {
        cx.renew()?;
        // To another host a message goes in two pieces where it lies around the end of a ring.
        let mut parts = 0;
        for _ in 0..60 {
            let begun = Instant::now();
            cx.post(Op::First, 0, 0, 0)?;
            set_cork(cx.fd, more == 0)?;
            put(cx, 100, more)?;
            std::thread::sleep(Duration::from_micros(300));
            put(cx, 200, 0)?;
            set_cork(cx.fd, false)?;
            let late = begun.elapsed() > LATE;
            let got = cx.wait()?;
            parts += usize::from(goes_by_rdma() && got != 300 && got != 100);
            // Where no cork is, an acknowledgement that comes in between draws it.
            let is_part = got != 100 && (1..=2).contains(&parts);
            let whole = late || more != 0 || got == 300 || is_part;
            ensure!(whole, "{got} bytes are seen first, of 100 and 200");
            same!(cx.tell(Op::Recv, 300, 0, 0)?, 300, "bytes that arrived");
            cx.tell(Op::Send, 16, 0, 0)?;
            cx.recv(16)?;
        }
    }
    cx.warm(6, 0)
}

/// To set `TCP_NODELAY` shows what there is, once.
fn nodelay(cx: &mut Cx, i: usize) -> Result<bool, Why> {
    let more = more(i);
    let nodelay = |cx: &mut Cx| Ok(sys::setsockopt(cx.fd, IPPROTO_TCP, TCP_NODELAY, 1i32)?);
    if !seen(cx, (100, 0), more, nodelay)? {
        return Ok(false);
    }
    hides(cx, i, more)
}

/// Who waits is woken when the cork is drawn, and not before.
fn wakes(cx: &mut Cx, i: usize) -> Result<bool, Why> {
    let more = more(i);
    set_cork(cx.fd, more == 0)?;
    let begun = Instant::now();
    put(cx, 100, more)?;
    let before = cx.tell(Op::Poll, PAUSE, POLLIN as u64, 0)?;
    let there = cx.tell(Op::Fionread, 0, 0, 0)?;
    let late = begun.elapsed() > LATE;
    ensure!(late || before == 0 && there == 0, "before the cork is drawn: events {before:#x}, {there} bytes");
    cx.post(Op::Poll, 2000, POLLIN as u64, 0)?;
    cx.post(Op::Fionread, 0, 0, 0)?;
    util::pause_ms(5);
    if more != 0 {
        put(cx, 20, 0)?;
    }
    set_cork(cx.fd, false)?;
    let want = if more == 0 { 100 } else { 120 };
    let got = cx.wait()?;
    ensure!(late || got == want, "{got} bytes wake, not {want}");
    same!(cx.tell(Op::Recv, want, 0, 0)?, want, "bytes that arrived");
    Ok(!late)
}

/// What is behind a cork is not sent, which `SIOCOUTQ` says.
fn unsent(cx: &mut Cx, i: usize) -> Result<bool, Why> {
    let mut n = 0;
    let fine = seen(cx, (100, 20), more(i), |cx| {
        n = sys::siocoutq(cx.fd)?;
        put(cx, 20, 0)?;
        set_cork(cx.fd, false)
    })?;
    // What belongs to a move counts, too.
    ensure!(!fine || n >= 100, "{n} bytes are not acknowledged");
    Ok(fine)
}

/// A cork belongs to the socket, not to the process that has set it.
fn drawn_by_child(cx: &mut Cx, i: usize, sends: bool) -> Result<bool, Why> {
    let more = if sends { more(i) } else { 0 };
    seen(cx, (100, if sends { 20 } else { 0 }), more, |cx| {
        let b = if sends { cx.out(20) } else { Vec::new() };
        let fd = cx.fd;
        reap(child(move || {
            if !b.is_empty() {
                same!(sys::send(fd, &b, 0), Ok(20), "send of the child");
            }
            set_cork(fd, false)
        })?)
    })
}

/// The end of the stream is behind what was behind a cork.
fn ended(cx: &mut Cx, end: impl Fn(&mut Cx) -> Res) -> Res {
    for more in MORE {
        if cx.fd < 0 {
            cx.fd = sys::dup(0)?;
        }
        cx.renew()?;
        cx.leave_tcp()?;
        util::pause_ms(QUIET);
        seen(cx, (100, 0), more, &end)?;
        same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "bytes behind that");
    }
    Ok(())
}

/// The same where it is the process that ends.
fn in_child(cx: &mut Cx, end: fn()) -> Res {
    child_must_leave_tcp(cx)?;
    for more in MORE {
        let pid = child(|| {
            cx.renew()?;
            cx.leave_tcp()?;
            set_cork(cx.fd, more == 0)?;
            put(cx, 100, more)?;
            end();
            Ok(())
        })?;
        sys::waitpid(pid)?;
        same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "bytes of the child");
        same!(cx.tell(Op::Drain, 0, 0, 0)?, 0, "bytes behind that");
    }
    Ok(())
}

fn cork(cx: &mut Cx) -> Res {
    for _ in 0..3 {
        set_cork(cx.fd, true)?;
        cx.send(10)?;
        put(cx, 10, MSG_MORE)?;
        cx.send(10)?;
        set_cork(cx.fd, false)?;
        same!(cx.tell(Op::Recv, 30, 0, 0)?, 30, "bytes that arrived");
    }
    cx.warm(6, 0)
}

/// The kernel keeps bytes behind a cork for 200 ms and no longer; a full buffer draws it, too.
fn never_drawn(cx: &mut Cx) -> Res {
    cx.warm(6, 0)?;
    for how in [0, MSG_MORE, 0, MSG_MORE] {
        set_cork(cx.fd, how == 0)?;
        cx.post(Op::Recv, 20, 0, 0)?;
        std::thread::sleep(Duration::from_millis(20));
        for _ in 0..2 {
            put(cx, 10, how)?;
        }
        let begun = Instant::now();
        same!(cx.wait()?, 20, "bytes that arrived");
        let took = begun.elapsed();
        ensure!(took < Duration::from_secs(2), "they took {took:?}");
    }
    set_cork(cx.fd, true)?;
    cx.post(Op::Recv, 1 << 20, 0, 0)?;
    for _ in 0..128 {
        cx.send(8 << 10)?;
    }
    same!(cx.wait()?, 1 << 20, "bytes that arrived");
    // Nobody makes room who does not see what is there.
    let n = cx.fill(3000)? as u64;
    same!(cx.tell(Op::Recv, n, 0, 0)?, n, "bytes of a connection that is full");
    cx.warm(6, 0)
}
