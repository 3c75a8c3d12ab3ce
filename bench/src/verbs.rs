//! What a reliable queue pair does by itself: RDMA writes with immediate data, waited for by completion events,
//! with no socket, no ring and no copy. The measure for the `verbs` link. And the same with writes that a send follows,
//! which is how others tell the receiver.

use crate::work::{percentiles, Job};
use ringsock_core::provider::{self, Api, Channel, Done, Event, Limits, Memory, Options, Release, What, Write};
use serde_json::{json, Value};
use std::ffi::{c_int, c_void};
use std::io::{self, Write as _};
use std::time::Instant;

/// Memory that the peer writes.
const RING: usize = 1 << 20;
/// Receives that are posted, and writes under way.
const RECEIVES: u32 = 256;
const WRITES: u32 = 256;
/// Every so many writes one gives a completion.
const SIGNAL: u64 = 32;
/// The IPv4-mapped address by which the provider finds a device of this host.
const HERE: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];

/// One end of a queue pair.
struct End {
    api: &'static Api,
    ctx: *mut c_void,
    id: *mut c_void,
    channel: Channel,
    memory: Vec<u8>,
    lkey: u32,
    /// Address and key of the peer's memory.
    there: (u64, u32),
    inline: u32,
    /// The receiver is told by a send behind each write.
    by_send: bool,
    /// Messages posted, and known to be done.
    sent: u64,
    done: u64,
    /// The peer's writes that have come, the last one's immediate value, and receives that are to be posted again.
    got: u64,
    said: u32,
    used: u32,
}

fn failed(what: &str) -> io::Error {
    io::Error::other(format!("{what} failed"))
}

fn checked(r: c_int) -> io::Result<()> {
    if r == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(r))
    }
}

fn readable(fd: c_int) {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, valid for the call.
    unsafe { libc::poll(&mut p, 1, -1) };
}

impl End {
    fn start(j: &Job) -> io::Result<End> {
        let api = provider::load().ok_or(failed("loading libringsock_verbs.so"))?;
        extern "C" fn place(fd: c_int) -> c_int {
            fd
        }
        extern "C" fn release(_: c_int, _: Release) {}
        let mut o = Options { device: [0; 64], software: 1, gid_index: -1, place, release, why: [0; 128] };
        // SAFETY: `o` is valid.
        let ctx = unsafe { (api.start)(&mut o) };
        if ctx.is_null() {
            return Err(failed("starting RDMA"));
        }
        Ok(End {
            api,
            ctx,
            id: std::ptr::null_mut(),
            channel: Channel::default(),
            memory: vec![0; RING],
            lkey: 0,
            there: (0, 0),
            inline: 0,
            by_send: j.kind.starts_with("send-"),
            sent: 0,
            done: 0,
            got: 0,
            said: 0,
            used: 0,
        })
    }

    fn event(&self, want: What) -> io::Result<Event> {
        let mut e = Event::default();
        loop {
            // SAFETY: the provider's state, and a valid event.
            if unsafe { (self.api.event)(self.ctx, &mut e) } == 0 {
                // SAFETY: the provider's state.
                readable(unsafe { (self.api.fd)(self.ctx) });
            } else if e.what == want {
                return Ok(e);
            } else {
                return Err(io::Error::other(format!("{:?} instead of {want:?}", e.what)));
            }
        }
    }

    /// Makes the queue pair, and what the peer is to know of this end.
    fn open(&mut self, id: *mut c_void) -> io::Result<[u8; 12]> {
        self.id = id;
        let (mut limits, mut m) = (Limits::default(), Memory::default());
        // SAFETY: a fresh id of the provider's; the memory is as long as the end.
        unsafe {
            checked((self.api.open)(id, 2 * WRITES, RECEIVES, 1, &mut limits))?;
            checked((self.api.register)(id, self.memory.as_mut_ptr(), RING, 1, &mut m))?;
            checked((self.api.post_recv)(id, RECEIVES))?;
            (self.api.channel)(id, &mut self.channel);
            // Whoever waits sleeps in the call that takes the event.
            let flags = libc::fcntl(self.channel.fd, libc::F_GETFL);
            libc::fcntl(self.channel.fd, libc::F_SETFL, flags & !libc::O_NONBLOCK);
        }
        (self.lkey, self.inline) = (m.lkey, limits.inline);
        let mut hello = [0; 12];
        hello[..8].copy_from_slice(&(self.memory.as_ptr() as u64).to_ne_bytes());
        hello[8..].copy_from_slice(&m.rkey.to_ne_bytes());
        Ok(hello)
    }

    fn meet(&mut self, e: &Event) {
        let (addr, key) = e.private[..12].split_at(8);
        self.there = (
            u64::from_ne_bytes(addr.try_into().expect("8 bytes")),
            u32::from_ne_bytes(key.try_into().expect("4 bytes")),
        );
    }

    fn accept(j: &Job) -> io::Result<End> {
        let mut end = End::start(j)?;
        let first = 20_000 + (std::process::id() % 20_000) as u16;
        let mut id = std::ptr::null_mut();
        // SAFETY: the provider's state and valid pointers.
        let port = (first..first + 100).find(|p| unsafe { (end.api.listen)(end.ctx, &HERE, *p, 1, &mut id) } == 0);
        println!("{}", port.ok_or(failed("listening"))?);
        io::stdout().flush()?;
        let e = end.event(What::Request)?;
        end.meet(&e);
        let hello = end.open(e.id)?;
        // SAFETY: an open request; the data is readable.
        checked(unsafe { (end.api.accept)(e.id, hello.as_ptr(), hello.len() as u32) })?;
        end.event(What::Established)?;
        Ok(end)
    }

    fn connect(j: &Job, port: u16) -> io::Result<End> {
        let mut end = End::start(j)?;
        let mut id = std::ptr::null_mut();
        // SAFETY: the provider's state and valid pointers.
        checked(unsafe { (end.api.dial)(end.ctx, &HERE, &HERE, port, 1, &mut id) })?;
        end.event(What::Routed)?;
        let hello = end.open(id)?;
        // SAFETY: an open id; the data is readable.
        checked(unsafe { (end.api.connect)(id, hello.as_ptr(), hello.len() as u32) })?;
        let e = end.event(What::Established)?;
        end.meet(&e);
        Ok(end)
    }

    /// Takes what has come.
    fn poll(&mut self) -> io::Result<bool> {
        let mut list = [Done::default(); 16];
        // SAFETY: an open id, room for as many completions as are asked for.
        let n = unsafe { (self.api.poll)(self.id, list.as_mut_ptr(), 16) };
        for d in &list[..n.max(0) as usize] {
            if d.status != 0 {
                return Err(failed("a completion"));
            }
            if d.received == 0 {
                self.done = self.done.max(d.id);
            } else {
                self.got += 1;
                self.said = d.imm;
                self.used += 1;
            }
        }
        if self.used >= 32 {
            // SAFETY: an open id.
            checked(unsafe { (self.api.post_recv)(self.id, std::mem::take(&mut self.used)) })?;
        }
        Ok(n > 0)
    }

    /// Waits for anything.
    fn wait(&mut self) -> io::Result<()> {
        if self.poll()? {
            return Ok(());
        }
        loop {
            // SAFETY: an open id.
            checked(unsafe { (self.api.arm)(self.id, 0) })?;
            if self.poll()? {
                return Ok(());
            }
            let mut token = 0;
            // SAFETY: the channel of an open id.
            unsafe { (self.api.heard)(self.channel.handle, &mut token) };
            if self.poll()? {
                return Ok(());
            }
        }
    }

    /// Writes `len` bytes to the same place in the peer's memory.
    fn write(&mut self, at: usize, len: usize, imm: u32) -> io::Result<()> {
        while self.sent - self.done >= u64::from(WRITES) - SIGNAL {
            self.wait()?;
        }
        self.sent += 1;
        let mut flags = provider::SOLICITED;
        if len as u32 <= self.inline {
            flags |= provider::INLINE;
        }
        if self.sent.is_multiple_of(SIGNAL) {
            flags |= provider::SIGNALED;
        }
        let told = Write {
            from: self.memory.as_ptr() as u64 + at as u64,
            to: self.there.0 + at as u64,
            lkey: self.lkey,
            rkey: self.there.1,
            len: len as u32,
            imm,
            id: self.sent,
            flags,
            reserved: 0,
        };
        let untold = Write { flags: flags & provider::INLINE | provider::UNTOLD, ..told };
        let send = Write { len: 0, flags: flags & !provider::INLINE | provider::SEND, ..told };
        let list = [untold, send];
        let list = if !self.by_send {
            core::slice::from_ref(&told)
        } else if len == 0 {
            &list[1..]
        } else {
            &list[..]
        };
        // SAFETY: an open id, and memory that is registered.
        checked(unsafe { (self.api.post)(self.id, list.as_ptr(), list.len() as u32) })
    }

    fn get(&mut self) -> io::Result<()> {
        let want = self.got + 1;
        while self.got < want {
            self.wait()?;
        }
        Ok(())
    }
}

/// How many messages may be under way.
fn window(size: usize) -> u64 {
    (RING / size).min(RECEIVES as usize - 64) as u64
}

/// `raw-pingpong`, `raw-stream`, `send-pingpong` and `send-stream`: the end that is found.
pub fn serve(j: &Job) -> io::Result<()> {
    let mut e = End::accept(j)?;
    if j.kind.ends_with("stream") {
        let (step, mut told) = (window(j.size) / 4, 0);
        while e.got < j.count as u64 {
            e.wait()?;
            if e.got >= told + step.max(1) || e.got == j.count as u64 {
                told = e.got;
                e.write(0, 0, told as u32)?;
            }
        }
    } else {
        for _ in 0..j.warm + j.count {
            e.get()?;
            e.write(0, j.size, 0)?;
        }
    }
    let _ = e.event(What::Lost);
    println!("{}", json!({ "cpu": 0 }));
    Ok(())
}

/// The other end: what it measured.
pub fn client(j: &Job, port: u16) -> io::Result<Value> {
    let mut e = End::connect(j, port)?;
    let v = if j.kind.ends_with("stream") {
        let t = Instant::now();
        let window = window(j.size);
        for i in 0..j.count as u64 {
            while i - u64::from(e.said) >= window {
                e.wait()?;
            }
            e.write((i % window) as usize * j.size, j.size, 0)?;
        }
        while (e.said as usize) < j.count {
            e.wait()?;
        }
        let rate = j.count as f64 / t.elapsed().as_secs_f64();
        json!({ "rate": rate, "bytes": rate * j.size as f64 / 1e6, "cpu": 0, "messages": j.count })
    } else {
        let mut ns = Vec::with_capacity(j.count);
        for i in 0..j.warm + j.count {
            let t = Instant::now();
            e.write(0, j.size, 0)?;
            e.get()?;
            if i >= j.warm {
                ns.push(t.elapsed().as_nanos() as u64);
            }
        }
        let (median, p99) = percentiles(ns);
        json!({ "median": median, "p99": p99, "cpu": 0, "messages": 2 * j.count })
    };
    // SAFETY: an open id that nobody uses any more.
    unsafe { (e.api.disconnect)(e.id) };
    Ok(v)
}
