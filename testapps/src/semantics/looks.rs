//! Looks (`MSG_PEEK`) that wait for more than the first byte: for all of a buffer, or for `SO_RCVLOWAT`.

use super::cx::{between, Cx, Op, Res, Why};
use super::Check;
use crate::{more, same, sys};
use libc::{c_int, MSG_DONTWAIT, MSG_PEEK, MSG_WAITALL, SA_RESTART, SHUT_WR, SIGUSR1, SOL_SOCKET, SO_RCVLOWAT};
use std::time::Instant;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("look-at-all", |cx| all_or_the_end(cx, 1, MSG_PEEK | MSG_WAITALL)),
    ("look-at-all-and-a-signal", |cx| signalled(cx, 1, MSG_PEEK | MSG_WAITALL)),
    ("look-at-all-in-time", |cx| in_time(cx, 1, MSG_PEEK | MSG_WAITALL)),
    ("look-at-the-low-water-mark", |cx| all_or_the_end(cx, ALL, MSG_PEEK)),
    ("look-at-the-low-water-mark-and-a-signal", |cx| signalled(cx, ALL, MSG_PEEK)),
    ("look-at-the-low-water-mark-in-time", |cx| in_time(cx, ALL, MSG_PEEK)),
    ("look-below-the-low-water-mark", below),
];

/// What a look waits for.
const ALL: usize = 60;
/// What comes of it at first.
const FIRST: usize = 20;

fn set_mark(cx: &Cx, mark: usize) -> Res {
    Ok(sys::setsockopt(cx.fd, SOL_SOCKET, SO_RCVLOWAT, mark as i32)?)
}

/// Looks once, which is to show `want` bytes after `lo` to `hi` milliseconds.
fn look(cx: &Cx, flags: c_int, want: usize, (lo, hi): (u64, u64)) -> Res {
    let mut b = [0; ALL];
    let began = Instant::now();
    let n = sys::recv(cx.fd, &mut b, flags)?;
    same!(n, want, "bytes of the look");
    between("the look", began.elapsed().as_millis() as u64, lo, hi)?;
    cx.look(0, &b[..n])
}

fn all_or_the_end(cx: &mut Cx, mark: usize, flags: c_int) -> Res {
    set_mark(cx, mark)?;
    cx.post(Op::SendBits, 3, FIRST as u64, 50_000)?;
    look(cx, flags, ALL, (0, 2000))?;
    cx.wait()?;
    cx.recv(ALL)?;
    cx.later(50, FIRST as u64)?;
    cx.post(Op::Sleep, 50_000, 0, 0)?;
    cx.post(Op::Shutdown, SHUT_WR as u64, 0, 0)?;
    look(cx, flags, FIRST, (30, 2000))?;
    cx.wait()?;
    // That the end has come by now changes nothing.
    look(cx, flags, FIRST, (0, 1000))?;
    cx.recv(FIRST)?;
    look(cx, flags, 0, (0, 1000))
}

/// Any handler ends it that runs when something has been seen.
fn signalled(cx: &mut Cx, mark: usize, flags: c_int) -> Res {
    set_mark(cx, mark)?;
    for restart in [0, SA_RESTART] {
        more::count_signal(SIGUSR1, restart)?;
        cx.tell(Op::Send, FIRST as u64, 0, 0)?;
        cx.arrive(FIRST)?;
        let s = more::signal_after(200, SIGUSR1);
        look(cx, flags, FIRST, (50, 2000))?;
        s.join().map_err(|_| Why("a thread panicked".into()))?;
        cx.recv(FIRST)?;
    }
    Ok(())
}

fn in_time(cx: &mut Cx, mark: usize, flags: c_int) -> Res {
    set_mark(cx, mark)?;
    sys::set_timeout(cx.fd, libc::SO_RCVTIMEO, 200)?;
    cx.later(50, FIRST as u64)?;
    look(cx, flags, FIRST, (150, 2000))?;
    cx.wait()?;
    cx.recv(FIRST)
}

/// One that does not wait shows what there is, and so does one of fewer bytes than the mark.
fn below(cx: &mut Cx) -> Res {
    set_mark(cx, ALL)?;
    cx.tell(Op::Send, FIRST as u64, 0, 0)?;
    cx.arrive(FIRST)?;
    look(cx, MSG_PEEK | MSG_DONTWAIT, FIRST, (0, 1000))?;
    let mut b = [0; FIRST];
    same!(sys::recv(cx.fd, &mut b, MSG_PEEK), Ok(FIRST), "bytes of a look at no more");
    cx.look(0, &b)?;
    cx.recv(FIRST)
}
