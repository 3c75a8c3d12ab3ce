//! The ways in which a program may wait for one socket.

use crate::args::die;
use crate::sys::{self, R};
use libc::{EPOLLERR, EPOLLET, EPOLLHUP, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDHUP};
use std::os::fd::RawFd;

/// How a program waits.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Mode {
    /// Blocking calls.
    Blocking,
    /// `poll`.
    Poll,
    /// `ppoll`.
    Ppoll,
    /// `select`.
    Select,
    /// Level-triggered epoll.
    EpollLt,
    /// Edge-triggered epoll.
    EpollEt,
    /// One-shot epoll.
    EpollOneshot,
}

impl Mode {
    /// All modes by name.
    pub const NAMES: [(&'static str, Mode); 7] = [
        ("blocking", Mode::Blocking),
        ("poll", Mode::Poll),
        ("ppoll", Mode::Ppoll),
        ("select", Mode::Select),
        ("epoll-lt", Mode::EpollLt),
        ("epoll-et", Mode::EpollEt),
        ("epoll-oneshot", Mode::EpollOneshot),
    ];

    /// The mode of a name.
    pub fn parse(s: &str) -> Mode {
        let found = Self::NAMES.iter().find(|(n, _)| *n == s);
        found.map(|x| x.1).unwrap_or_else(|| die(&format!("unknown mode {s:?}")))
    }

    /// Whether readiness has to be remembered until `EAGAIN` (edges come only once).
    pub fn keeps_flags(self) -> bool {
        self == Mode::EpollEt
    }
}

/// Waits for one socket in one mode.
pub struct Waiter {
    mode: Mode,
    fd: RawFd,
    ep: RawFd,
    interest: u32,
    turn: u32,
}

impl Waiter {
    /// Prepares to wait for `fd` (already adds it to an epoll set where the mode has one).
    pub fn new(mode: Mode, fd: RawFd) -> R<Waiter> {
        let mut w = Waiter { mode, fd, ep: -1, interest: 0, turn: 0 };
        match mode {
            Mode::EpollLt | Mode::EpollOneshot => {
                w.ep = sys::epoll_create()?;
                sys::epoll_ctl(w.ep, libc::EPOLL_CTL_ADD, fd, 0, fd as u64)?;
            }
            Mode::EpollEt => {
                w.ep = sys::epoll_create()?;
                let ev = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
                sys::epoll_ctl(w.ep, libc::EPOLL_CTL_ADD, fd, ev as u32, fd as u64)?;
            }
            _ => {}
        }
        Ok(w)
    }

    /// After an operation that moved bytes, look for readiness again (mostly), or go on with
    /// another operation straight away (sometimes).
    pub fn fresh_look(&mut self) -> bool {
        self.turn = self.turn.wrapping_add(1);
        !self.turn.is_multiple_of(4)
    }

    /// Waits: (readable, writable).
    pub fn wait(&mut self, rd: bool, wr: bool, ms: i32) -> R<(bool, bool)> {
        match self.mode {
            Mode::Blocking => Ok((true, true)),
            Mode::Poll | Mode::Ppoll => {
                let ev = if rd { libc::POLLIN } else { 0 } | if wr { libc::POLLOUT } else { 0 };
                let r = if self.mode == Mode::Poll {
                    sys::poll1(self.fd, ev, ms)?
                } else {
                    sys::ppoll1(self.fd, ev, ms as i64 * 1000)?
                };
                let bad = r & (libc::POLLERR | libc::POLLHUP) != 0;
                Ok((rd && (bad || r & libc::POLLIN != 0), wr && (bad || r & libc::POLLOUT != 0)))
            }
            Mode::Select => {
                let one = [self.fd];
                let rs: &[RawFd] = if rd { &one } else { &[] };
                let ws: &[RawFd] = if wr { &one } else { &[] };
                let (a, b) = sys::select(rs, ws, ms as i64)?;
                Ok((!a.is_empty(), !b.is_empty()))
            }
            Mode::EpollLt | Mode::EpollOneshot => {
                let mut ev = if rd { EPOLLIN } else { 0 } | if wr { EPOLLOUT } else { 0 };
                if self.mode == Mode::EpollOneshot {
                    ev |= EPOLLONESHOT;
                }
                if self.interest != ev as u32 || self.mode == Mode::EpollOneshot {
                    sys::epoll_ctl(self.ep, libc::EPOLL_CTL_MOD, self.fd, ev as u32, self.fd as u64)?;
                    self.interest = ev as u32;
                }
                self.collect(rd, wr, ms)
            }
            Mode::EpollEt => self.collect(rd, wr, ms),
        }
    }

    fn collect(&mut self, rd: bool, wr: bool, ms: i32) -> R<(bool, bool)> {
        let mut out = (false, false);
        for (e, data) in sys::epoll_wait(self.ep, 4, ms)? {
            assert_eq!(data, self.fd as u64, "epoll gave back other data");
            let bad = e & (EPOLLERR | EPOLLHUP) as u32 != 0;
            out.0 |= rd && (bad || e & (EPOLLIN | EPOLLRDHUP) as u32 != 0);
            out.1 |= wr && (bad || e & EPOLLOUT as u32 != 0);
        }
        Ok(out)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if self.ep >= 0 {
            let _ = sys::close(self.ep);
        }
    }
}
