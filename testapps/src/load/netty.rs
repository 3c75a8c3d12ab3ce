//! What a netty server and client do: one event loop with level-triggered epoll on each side, some
//! connections, gathered writes of several messages flushed together. The shape of hadroNIO's
//! benchmarks.

use super::common::{check, connect, is_end, message, seal, wrong, Clock, Tally};
use crate::args::Args;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

/// An epoll set.
struct Poller(RawFd);

impl Poller {
    fn new() -> io::Result<Poller> {
        // SAFETY: no pointers.
        match unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) } {
            fd if fd >= 0 => Ok(Poller(fd)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn set(&self, op: i32, fd: RawFd, key: u64, out: bool) -> io::Result<()> {
        let events = if out { libc::EPOLLIN | libc::EPOLLOUT } else { libc::EPOLLIN };
        let mut e = libc::epoll_event { events: events as u32, u64: key };
        // SAFETY: one event, valid for the call.
        match unsafe { libc::epoll_ctl(self.0, op, fd, &mut e) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Ready keys; empty after `ms`.
    fn wait(&self, ms: i32) -> io::Result<Vec<u64>> {
        let mut e = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: the array is valid for writes of its length.
        let n = unsafe { libc::epoll_wait(self.0, e.as_mut_ptr(), 64, ms) };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(e[..n as usize].iter().map(|e| e.u64).collect())
    }
}

/// One connection of either side.
struct Chan {
    s: TcpStream,
    /// Bytes that came, not yet a whole message.
    come: Vec<u8>,
    /// Bytes that wait to be written.
    wait: Vec<u8>,
    seq: u64,
    sent: u64,
    asked_out: bool,
}

impl Chan {
    fn new(s: TcpStream) -> io::Result<Chan> {
        s.set_nodelay(true)?;
        s.set_nonblocking(true)?;
        Ok(Chan { s, come: Vec::new(), wait: Vec::new(), seq: 0, sent: 0, asked_out: false })
    }

    /// Reads once, as netty does for a level-triggered set; `false` at the end of the stream.
    fn read(&mut self, b: &mut [u8]) -> io::Result<bool> {
        match self.s.read(b) {
            Ok(0) => Ok(false),
            Ok(n) => {
                self.come.extend_from_slice(&b[..n]);
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// Writes what waits, then these pieces; what does not fit waits.
    fn write(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<()> {
        let mut skip = 0;
        if self.wait.is_empty() && !pieces.is_empty() {
            match self.s.write_vectored(pieces) {
                Ok(n) => skip = n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        for p in pieces {
            let n = skip.min(p.len());
            self.wait.extend_from_slice(&p[n..]);
            skip -= n;
        }
        let mut at = 0;
        while at < self.wait.len() {
            match self.s.write(&self.wait[at..]) {
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
        self.wait.drain(..at);
        Ok(())
    }

    /// Asks the set for room to write exactly while something waits.
    fn ask(&mut self, p: &Poller, key: u64) -> io::Result<()> {
        let want = !self.wait.is_empty();
        if want != self.asked_out {
            self.asked_out = want;
            p.set(libc::EPOLL_CTL_MOD, self.s.as_raw_fd(), key, want)?;
        }
        Ok(())
    }
}

/// `load-server netty [--size S] [--batch B]`: checks every message and sends it back; what came by one
/// read goes back by one write. With a batch of more than 1 only the last message of each batch goes back.
pub fn server(a: &Args) -> io::Result<()> {
    let l = super::common::listen(a)?;
    let (size, batch) = (message(a.num("size", 64) as usize).len(), a.num("batch", 1).max(1));
    let p = Poller::new()?;
    p.set(libc::EPOLL_CTL_ADD, l.as_raw_fd(), u64::MAX, false)?;
    let mut chans: Vec<Option<Chan>> = Vec::new();
    let mut b = vec![0; 256 << 10];
    loop {
        for key in p.wait(-1).or_else(|e| if e.kind() == io::ErrorKind::Interrupted { Ok(vec![]) } else { Err(e) })? {
            if key == u64::MAX {
                let c = Chan::new(l.accept()?.0)?;
                p.set(libc::EPOLL_CTL_ADD, c.s.as_raw_fd(), chans.len() as u64, false)?;
                chans.push(Some(c));
                continue;
            }
            let Some(c) = chans[key as usize].as_mut() else { continue };
            match turn(c, &mut b, size, batch).and_then(|open| c.ask(&p, key).map(|_| open)) {
                Ok(true) => {}
                Ok(false) => chans[key as usize] = None,
                Err(e) if is_end(&e) => chans[key as usize] = None,
                Err(e) => return Err(e),
            }
        }
    }
}

/// One connection is ready: reads once, checks, answers. `false` at the end of its stream.
fn turn(c: &mut Chan, b: &mut [u8], size: usize, batch: u64) -> io::Result<bool> {
    if !c.read(b)? {
        return Ok(false);
    }
    let whole = c.come.len() / size * size;
    let mut back = Vec::new();
    for m in c.come[..whole].chunks_exact(size) {
        check(c.seq, m)?;
        c.seq += 1;
        if c.seq.is_multiple_of(batch) {
            back.extend_from_slice(m);
        }
    }
    c.come.drain(..whole);
    c.write(&[IoSlice::new(&back)])?;
    Ok(true)
}

/// `load-client netty [--size S] [--conns N] [--batch B]`: on each connection `B` messages by one gathered
/// write, the next ones when the answer to the last is here.
pub fn client(a: &Args) -> io::Result<()> {
    let clock = Clock::default();
    let t = clock.run(a, 1, |_| event_loop(a, &clock))?;
    t.print("");
    Ok(())
}

fn event_loop(a: &Args, clock: &Clock) -> io::Result<Tally> {
    let (size, batch) = (message(a.num("size", 64) as usize).len(), a.num("batch", 1).max(1));
    let (p, mut t) = (Poller::new()?, Tally::default());
    let (mut chans, mut began) = (Vec::new(), Vec::new());
    for key in 0..a.num("conns", 1) {
        let c = Chan::new(connect(a)?)?;
        p.set(libc::EPOLL_CTL_ADD, c.s.as_raw_fd(), key, false)?;
        chans.push(c);
        began.push(Instant::now());
    }
    let mut pool = vec![message(size); batch as usize];
    for (c, at) in chans.iter_mut().zip(&mut began) {
        burst(c, &mut pool, at)?;
    }
    let mut b = vec![0; 256 << 10];
    let mut quiet = 0;
    while !clock.over() {
        let ready = p.wait(1000)?;
        quiet = if ready.is_empty() { quiet + 1 } else { 0 };
        if quiet > 20 {
            return wrong("nothing came for 20 s");
        }
        for key in ready {
            let c = &mut chans[key as usize];
            if !c.read(&mut b)? {
                return wrong("the server has closed a connection");
            }
            c.write(&[])?;
            if c.come.len() >= size {
                check(c.sent - 1, &c.come[..size])?;
                if c.come.len() > size {
                    return wrong("more than one answer");
                }
                c.come.clear();
                let at = &mut began[key as usize];
                t.late(clock, at.elapsed().as_nanos() as u64);
                t.hit(clock, batch, batch * size as u64);
                burst(c, &mut pool, at)?;
            }
            c.ask(&p, key)?;
        }
    }
    Ok(t)
}

fn burst(c: &mut Chan, pool: &mut [Vec<u8>], at: &mut Instant) -> io::Result<()> {
    for m in pool.iter_mut() {
        seal(c.sent, m);
        c.sent += 1;
    }
    let pieces: Vec<IoSlice<'_>> = pool.iter().map(|m| IoSlice::new(m)).collect();
    *at = Instant::now();
    c.write(&pieces)
}
