//! Calls that are given memory that is not there, or not for this: `EFAULT`, and nothing is lost.
//!
//! How much of a transfer is done that meets the end of the memory on its way is the kernel's secret: it copies in pieces,
//! and transfers those that it could copy whole. So a count must be no more than there was memory for, and be true.

use super::cx::{Cx, Op, Res, Why, OUT};
use super::Check;
use crate::{ensure, prng, same, sys};
use libc::{c_void, iovec, msghdr, EFAULT, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_WAITALL, POLLIN};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("bad-memory-of-sends", sends),
    ("bad-memory-of-receives", receives),
    ("bad-memory-behind-what-is-sent", |cx| each(cx, READS, send_edge)),
    ("bad-memory-behind-what-is-received", |cx| each(cx, WRITES, receive_edge)),
    ("bad-memory-of-every-length", lengths),
    ("bad-memory-in-the-middle", middle),
    ("bad-memory-of-a-long-send", long_send),
    ("bad-memory-of-a-long-receive", long_receive),
    ("bad-memory-of-a-receive-that-waits", waitall),
    ("bad-memory-of-a-send-behind-a-cork", corked),
    ("bad-memory-of-arrays", arrays),
    ("bad-memory-of-headers", headers),
    ("bad-memory-of-addresses", addresses),
    ("bad-memory-of-options", options),
    ("bad-memory-of-polls", polls),
    ("bad-memory-of-selects", selects),
    ("bad-memory-of-sets", |cx| sets(cx, 0)),
    ("bad-memory-of-sets-with-edges", |cx| sets(cx, libc::EPOLLET as u32)),
    ("bad-memory-in-threads", threads),
];

const PAGE: usize = 4096;

/// What is wrong with a page.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Bad {
    /// Nothing is mapped there.
    Hole,
    /// It may not be accessed.
    Shut,
    /// It may not be written to.
    ReadOnly,
    /// It is of a file, behind its end.
    PastEnd,
}

/// For a call that reads the program's memory.
const READS: &[Bad] = &[Bad::Hole, Bad::Shut, Bad::PastEnd];
/// For one that writes there.
const WRITES: &[Bad] = &[Bad::Hole, Bad::Shut, Bad::ReadOnly, Bad::PastEnd];

/// Pages of which some are good.
pub struct Pages {
    /// The first byte.
    pub at: *mut u8,
    n: usize,
}

impl Pages {
    /// `good` pages and a bad one; behind it another good one, if the bad one is not the end of a file.
    pub fn new(good: usize, bad: Bad) -> Result<Pages, Why> {
        let n = good + 2;
        let (all, rw) = (n * PAGE, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: mappings of our own.
        unsafe {
            let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let mut file = -1;
            if bad == Bad::PastEnd {
                file = libc::memfd_create(c"pages".as_ptr(), 0);
                ensure!(file >= 0 && libc::ftruncate(file, (good * PAGE) as i64) == 0, "no file");
                flags = libc::MAP_SHARED;
            }
            // Far from where the kernel maps what anybody asks for, so that a hole stays one.
            static NEXT: AtomicUsize = AtomicUsize::new(1 << 44);
            let at = NEXT.fetch_add(1 << 24, SeqCst) as *mut c_void;
            let at = libc::mmap(at, all, rw, flags | libc::MAP_FIXED_NOREPLACE, file, 0);
            ensure!(at != libc::MAP_FAILED, "no memory");
            if file >= 0 {
                sys::close(file)?;
            }
            let at = at.cast::<u8>();
            let page = at.add(good * PAGE).cast::<c_void>();
            let r = match bad {
                Bad::Hole => libc::munmap(page, PAGE),
                Bad::Shut => libc::mprotect(page, PAGE, libc::PROT_NONE),
                Bad::ReadOnly => libc::mprotect(page, PAGE, libc::PROT_READ),
                Bad::PastEnd => 0,
            };
            same!(r, 0, "making a page bad");
            Ok(Pages { at, n })
        }
    }

    /// Puts a value where a page begins that is [`Bad::ReadOnly`].
    pub fn put<T>(&self, good: usize, value: T) -> Res {
        let page = self.end(good);
        // SAFETY: a page of our own.
        unsafe {
            same!(libc::mprotect(page.cast(), PAGE, libc::PROT_READ | libc::PROT_WRITE), 0, "mprotect");
            page.cast::<T>().write(value);
            same!(libc::mprotect(page.cast(), PAGE, libc::PROT_READ), 0, "mprotect");
        }
        Ok(())
    }

    /// Where the first bad page begins, if there are so many good ones.
    pub fn end(&self, good: usize) -> *mut u8 {
        self.at.wrapping_add(good * PAGE)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more.
        unsafe {
            libc::munmap(self.at.cast(), self.n * PAGE);
        }
    }
}

fn each(cx: &mut Cx, bads: &[Bad], f: fn(&mut Cx, Bad) -> Res) -> Res {
    bads.iter().try_for_each(|bad| f(cx, *bad).map_err(|Why(w)| Why(format!("{bad:?}: {w}"))))
}

fn iov(at: *mut u8, n: usize) -> iovec {
    iovec { iov_base: at.cast(), iov_len: n }
}

fn header(v: &mut [iovec]) -> msghdr {
    sys::msghdr(v)
}

/// A way to transfer bytes of one buffer.
type Way = (&'static str, unsafe fn(i32, *mut u8, usize) -> isize);

/// One of these.
macro_rules! way {
    ($name:literal, |$fd:ident, $p:ident, $n:ident| $call:block) => {{
        unsafe fn call($fd: i32, $p: *mut u8, $n: usize) -> isize {
            // SAFETY: the kernel answers for what is there.
            unsafe { $call }
        }
        ($name, call)
    }};
}

const SENDS: &[Way] = &[
    way!("write", |fd, p, n| { libc::write(fd, p.cast(), n) }),
    way!("send", |fd, p, n| { libc::send(fd, p.cast(), n, MSG_NOSIGNAL) }),
    way!("sendto", |fd, p, n| { libc::sendto(fd, p.cast(), n, MSG_DONTWAIT, std::ptr::null(), 0) }),
    way!("writev", |fd, p, n| { libc::writev(fd, &iov(p, n), 1) }),
    way!("writev of two", |fd, p, n| {
        libc::writev(fd, [iov(p, n / 2), iov(p.wrapping_add(n / 2), n - n / 2)].as_ptr(), 2)
    }),
    way!("pwritev2", |fd, p, n| { libc::pwritev2(fd, &iov(p, n), 1, -1, 0) }),
    way!("sendmsg", |fd, p, n| { libc::sendmsg(fd, &header(&mut [iov(p, n)]), 0) }),
    way!("sendmmsg", |fd, p, n| {
        let mut v = [iov(p, n)];
        let mut m = libc::mmsghdr { msg_hdr: header(&mut v), msg_len: 0 };
        match libc::sendmmsg(fd, &mut m, 1, 0) {
            1 => m.msg_len as isize,
            r => r as isize,
        }
    }),
    way!("syscall", |fd, p, n| { libc::syscall(libc::SYS_write, fd, p, n) as isize }),
];

const RECEIVES: &[Way] = &[
    way!("read", |fd, p, n| { libc::read(fd, p.cast(), n) }),
    way!("recv", |fd, p, n| { libc::recv(fd, p.cast(), n, MSG_DONTWAIT) }),
    way!("recvfrom", |fd, p, n| { libc::recvfrom(fd, p.cast(), n, 0, null_mut(), null_mut()) }),
    way!("readv", |fd, p, n| { libc::readv(fd, &iov(p, n), 1) }),
    way!("readv of two", |fd, p, n| {
        libc::readv(fd, [iov(p, n / 2), iov(p.wrapping_add(n / 2), n - n / 2)].as_ptr(), 2)
    }),
    way!("preadv2", |fd, p, n| { libc::preadv2(fd, &iov(p, n), 1, -1, 0) }),
    way!("recvmsg", |fd, p, n| { libc::recvmsg(fd, &mut header(&mut [iov(p, n)]), 0) }),
    way!("recvmmsg", |fd, p, n| {
        let mut v = [iov(p, n)];
        let mut m = libc::mmsghdr { msg_hdr: header(&mut v), msg_len: 0 };
        match libc::recvmmsg(fd, &mut m, 1, 0, null_mut()) {
            1 => m.msg_len as isize,
            r => r as isize,
        }
    }),
    way!("peek", |fd, p, n| { libc::recv(fd, p.cast(), n, MSG_PEEK) }),
    way!("syscall", |fd, p, n| { libc::syscall(libc::SYS_read, fd, p, n) as isize }),
];

fn is_fault(r: isize) -> bool {
    r == -1 && sys::errno() == EFAULT
}

/// Nothing that is there: nothing is sent.
fn sends(cx: &mut Cx) -> Res {
    for (name, call) in SENDS {
        for bad in READS {
            let p = Pages::new(1, *bad)?;
            for n in [2, 40, 100, 300, 4000] {
                // SAFETY: the kernel answers for bad memory.
                let r = unsafe { call(cx.fd, p.end(1), n) };
                ensure!(is_fault(r), "{name} of {n} bytes, {bad:?}: {r}, errno {}", sys::errno());
            }
        }
        cx.warm(4, 0)?;
    }
    Ok(())
}

/// The same for receives: what has come stays there.
fn receives(cx: &mut Cx) -> Res {
    for (name, call) in RECEIVES {
        cx.tell(Op::Send, 5000, 0, 0)?;
        cx.arrive(5000)?;
        for bad in WRITES {
            let p = Pages::new(1, *bad)?;
            for n in [2, 40, 100, 300, 4000] {
                // SAFETY: as above.
                let r = unsafe { call(cx.fd, p.end(1), n) };
                ensure!(is_fault(r), "{name} of {n} bytes, {bad:?}: {r}, errno {}", sys::errno());
            }
        }
        cx.recv(5000)?;
        cx.warm(4, 0)?;
    }
    Ok(())
}

/// Sends so many bytes that are there and `more` that are not.
fn send_over(cx: &mut Cx, p: &Pages, pages: usize, good: usize, more: usize, way: &Way) -> Res {
    let b = prng::bytes(OUT, cx.tx, good);
    let at = p.end(pages).wrapping_sub(good);
    // SAFETY: `good` bytes are there.
    let r = unsafe {
        at.copy_from_nonoverlapping(b.as_ptr(), good);
        way.1(cx.fd, at, good + more)
    };
    ensure!(
        is_fault(r) || (1..=good as isize).contains(&r),
        "{} of {good} bytes and {more}: {r}, errno {}",
        way.0,
        sys::errno()
    );
    if r > 0 {
        cx.tx += r as u64;
        same!(cx.tell(Op::Recv, r as u64, 0, 0)?, r as u64, "received");
    }
    Ok(())
}

fn send_edge(cx: &mut Cx, bad: Bad) -> Res {
    let p = Pages::new(1, bad)?;
    for way in SENDS {
        for good in [1, 17, 100, 1000, 3000] {
            send_over(cx, &p, 1, good, 100, way)?;
        }
        cx.warm(4, 0)?;
    }
    Ok(())
}

/// Receives into so many bytes that are there and `more` that are not. Returns how many have come.
fn receive_over(cx: &mut Cx, p: &Pages, pages: usize, good: usize, more: usize, way: &Way) -> Result<usize, Why> {
    let at = p.end(pages).wrapping_sub(good);
    // SAFETY: the kernel answers for bad memory.
    let r = unsafe { way.1(cx.fd, at, good + more) };
    ensure!(
        is_fault(r) || (1..=good as isize).contains(&r),
        "{} to {good} bytes and {more}: {r}, errno {}",
        way.0,
        sys::errno()
    );
    let n = r.max(0) as usize;
    // SAFETY: so many were written just now.
    let b = unsafe { std::slice::from_raw_parts(at, n) };
    cx.look(0, b)?;
    if way.0 == "peek" {
        return Ok(0);
    }
    cx.rx += n as u64;
    Ok(n)
}

fn receive_edge(cx: &mut Cx, bad: Bad) -> Res {
    let p = Pages::new(1, bad)?;
    for way in RECEIVES {
        for good in [1, 17, 100, 1000, 3000] {
            cx.tell(Op::Send, good as u64 + 100, 0, 0)?;
            cx.arrive(good + 100)?;
            let n = receive_over(cx, &p, 1, good, 100, way)?;
            cx.recv(good + 100 - n)?;
        }
        cx.warm(4, 0)?;
    }
    Ok(())
}

/// The last byte is not there.
fn lengths(cx: &mut Cx) -> Res {
    let p = Pages::new(1, Bad::Hole)?;
    cx.tell(Op::Send, 700, 0, 0)?;
    cx.arrive(700)?;
    let mut got = 0;
    for n in 0..300 {
        send_over(cx, &p, 1, n, 1, &SENDS[n % 2])?;
        if got + n < 700 {
            got += receive_over(cx, &p, 1, n, 1, &RECEIVES[n % 2])?;
        }
    }
    cx.recv(700 - got)?;
    cx.warm(4, 0)
}

/// A page is missing, and there is more behind it.
fn middle(cx: &mut Cx) -> Res {
    for bad in [Bad::Hole, Bad::Shut] {
        for way in SENDS {
            let p = Pages::new(2, bad)?;
            send_over(cx, &p, 2, 2 * PAGE, 2 * PAGE, way)?;
        }
        for way in RECEIVES {
            let p = Pages::new(2, bad)?;
            cx.tell(Op::Send, 4 * PAGE as u64, 0, 0)?;
            cx.arrive(4 * PAGE)?;
            let n = receive_over(cx, &p, 2, 2 * PAGE, 2 * PAGE, way)?;
            cx.recv(4 * PAGE - n)?;
        }
    }
    cx.warm(4, 0)
}

fn long_send(cx: &mut Cx) -> Res {
    for pages in [5, 40, 150] {
        let p = Pages::new(pages, Bad::Hole)?;
        for way in SENDS {
            send_over(cx, &p, pages, pages * PAGE - 100, 5000, way)?;
            send_over(cx, &p, pages, pages * PAGE, 100_000, way)?;
        }
        cx.warm(4, 0)?;
    }
    Ok(())
}

fn long_receive(cx: &mut Cx) -> Res {
    for pages in [5, 16, 40] {
        let p = Pages::new(pages, Bad::Shut)?;
        for way in RECEIVES {
            let all = pages * PAGE + 3000;
            cx.post(Op::Send, all as u64, 0, 0)?;
            cx.arrive(all.min(100_000))?;
            let mut got = 0;
            for _ in 0..3 {
                // As much as there is memory for may have come before the rest.
                // SAFETY: the kernel answers for bad memory.
                let r = unsafe { way.1(cx.fd, p.end(pages).wrapping_sub(pages * PAGE - 10), pages * PAGE + 2000) };
                ensure!(is_fault(r) || (1..=(pages * PAGE) as isize).contains(&r), "{}: {r}, {}", way.0, sys::errno());
                if r > 0 {
                    // SAFETY: so many were written just now.
                    let b = unsafe { std::slice::from_raw_parts(p.at.add(10), r as usize) };
                    cx.look(0, b)?;
                    if way.0 != "peek" {
                        cx.rx += r as u64;
                        got += r as usize;
                    }
                }
                if got > 0 {
                    break;
                }
            }
            cx.recv(all - got)?;
            cx.wait()?;
        }
        cx.warm(4, 0)?;
    }
    Ok(())
}

/// The bytes that fit have been taken when the others come.
fn waitall(cx: &mut Cx) -> Res {
    let p = Pages::new(1, Bad::Hole)?;
    let at = p.end(1).wrapping_sub(100);
    cx.post(Op::SendBits, 2, 100, 100_000)?;
    // SAFETY: the kernel answers for bad memory.
    let r = unsafe { libc::recv(cx.fd, at.cast(), 200, MSG_WAITALL) };
    same!(r, 100, "MSG_WAITALL, errno {}", sys::errno());
    // SAFETY: so many were written just now.
    cx.take(unsafe { std::slice::from_raw_parts(at, 100) })?;
    cx.wait()?;
    cx.recv(100)?;
    cx.warm(4, 0)
}

/// What is behind a cork stays there, and what could not be sent does not come to it.
fn corked(cx: &mut Cx) -> Res {
    let p = Pages::new(1, Bad::Hole)?;
    sys::setsockopt(cx.fd, libc::IPPROTO_TCP, libc::TCP_CORK, 1i32)?;
    cx.send(50)?;
    // SAFETY: the kernel answers for bad memory.
    let r = unsafe { libc::write(cx.fd, p.end(1).cast(), 60) };
    ensure!(is_fault(r), "write behind a cork: {r}, errno {}", sys::errno());
    // SAFETY: as above.
    let r = unsafe { libc::writev(cx.fd, [iov(p.at, 0), iov(p.end(1), 60)].as_ptr(), 2) };
    ensure!(is_fault(r), "writev behind a cork: {r}, errno {}", sys::errno());
    cx.send(50)?;
    sys::setsockopt(cx.fd, libc::IPPROTO_TCP, libc::TCP_CORK, 0i32)?;
    same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "received");
    cx.warm(4, 0)
}

/// The array of buffers is not there.
fn arrays(cx: &mut Cx) -> Res {
    for bad in READS {
        let p = Pages::new(1, *bad)?;
        for at in [p.end(1), p.end(1).wrapping_sub(16)] {
            let v = at.cast::<iovec>();
            let mut m = header(&mut []);
            (m.msg_iov, m.msg_iovlen) = (v, 3);
            if at != p.end(1) {
                // SAFETY: there is room for one.
                unsafe { v.write(iov(p.at, 10)) };
            }
            // SAFETY: the kernel answers for bad memory.
            let all = unsafe {
                [
                    ("writev", libc::writev(cx.fd, v, 3)),
                    ("readv", libc::readv(cx.fd, v, 3)),
                    ("pwritev2", libc::pwritev2(cx.fd, v, 3, -1, 0)),
                    ("preadv2", libc::preadv2(cx.fd, v, 3, -1, 0)),
                    ("sendmsg", libc::sendmsg(cx.fd, &m, 0)),
                    ("recvmsg", libc::recvmsg(cx.fd, &mut m, 0)),
                ]
            };
            let errno = sys::errno();
            ensure!(all.iter().all(|(_, r)| *r == -1), "{bad:?}: {all:?}");
            same!(errno, EFAULT, "{bad:?}");
        }
        cx.warm(4, 0)?;
    }
    Ok(())
}

/// The header is not there.
fn headers(cx: &mut Cx) -> Res {
    for bad in READS {
        let p = Pages::new(1, *bad)?;
        for at in [p.end(1), p.end(1).wrapping_sub(24)] {
            let m = at.cast::<msghdr>();
            // SAFETY: the kernel answers for bad memory.
            unsafe {
                ensure!(is_fault(libc::sendmsg(cx.fd, m, 0)), "sendmsg, {bad:?}: errno {}", sys::errno());
                ensure!(is_fault(libc::recvmsg(cx.fd, m, 0)), "recvmsg, {bad:?}: errno {}", sys::errno());
                let r = libc::sendmmsg(cx.fd, m.cast(), 1, 0);
                ensure!(is_fault(r as isize), "sendmmsg, {bad:?}: errno {}", sys::errno());
                let r = libc::recvmmsg(cx.fd, m.cast(), 1, 0, null_mut());
                ensure!(is_fault(r as isize), "recvmmsg, {bad:?}: errno {}", sys::errno());
            }
        }
    }
    // One that may only be read: the bytes are lost.
    let p = Pages::new(1, Bad::Hole)?;
    let mut b = cx.out(100);
    let mut v = [iov(b.as_mut_ptr(), 100)];
    let m = p.at.cast::<msghdr>();
    // SAFETY: a page of our own.
    unsafe {
        m.write(header(&mut v));
        same!(libc::mprotect(p.at.cast(), PAGE, libc::PROT_READ), 0, "mprotect");
        ensure!(libc::sendmsg(cx.fd, m, MSG_DONTWAIT) == 100, "sendmsg: errno {}", sys::errno());
    }
    same!(sys::recv(cx.fd, &mut [0; 1], MSG_DONTWAIT), Err(libc::EAGAIN), "nothing has come");
    same!(cx.tell(Op::Recv, 100, 0, 0)?, 100, "received");
    cx.tell(Op::Send, 100, 0, 0)?;
    cx.arrive(100)?;
    // SAFETY: as above.
    let r = unsafe { libc::recvmsg(cx.fd, m, 0) };
    ensure!(is_fault(r), "recvmsg: {r}, errno {}", sys::errno());
    cx.take(&b)?;
    same!(sys::recv(cx.fd, &mut [0; 1], MSG_DONTWAIT), Err(libc::EAGAIN), "all is taken");
    cx.warm(4, 0)
}

/// Where the peer's address is to go is not there: the bytes are taken.
fn addresses(cx: &mut Cx) -> Res {
    let p = Pages::new(1, Bad::Hole)?;
    let mut b = [0u8; 50];
    let mut name = [0u8; 128];
    cx.tell(Op::Send, 50, 0, 0)?;
    cx.arrive(50)?;
    // SAFETY: the kernel answers for bad memory.
    let r = unsafe {
        libc::recvfrom(
            cx.fd,
            b.as_mut_ptr().cast(),
            50,
            0,
            name.as_mut_ptr().cast(),
            p.end(1).cast::<libc::socklen_t>(),
        )
    };
    ensure!(is_fault(r), "recvfrom: {r}, errno {}", sys::errno());
    cx.take(&b)?;
    cx.warm(4, 0)
}

fn options(cx: &mut Cx) -> Res {
    for bad in WRITES {
        let p = Pages::new(1, *bad)?;
        let mut len = 4 as libc::socklen_t;
        let at = p.end(1);
        // SAFETY: the kernel answers for bad memory.
        unsafe {
            for name in [libc::SO_ERROR, libc::SO_RCVLOWAT] {
                let r = libc::getsockopt(cx.fd, libc::SOL_SOCKET, name, at.cast(), &mut len);
                ensure!(is_fault(r as isize), "getsockopt {name} to {bad:?}: {r}, errno {}", sys::errno());
                if *bad != Bad::ReadOnly {
                    let mut v = 0i32;
                    let r = libc::getsockopt(cx.fd, libc::SOL_SOCKET, name, (&raw mut v).cast(), at.cast());
                    ensure!(is_fault(r as isize), "getsockopt {name} by {bad:?}: {r}, errno {}", sys::errno());
                }
            }
            let r = libc::ioctl(cx.fd, libc::FIONREAD, at);
            ensure!(is_fault(r as isize), "FIONREAD to {bad:?}: {r}, errno {}", sys::errno());
            let r = libc::ioctl(cx.fd, libc::TIOCOUTQ, at);
            ensure!(is_fault(r as isize), "TIOCOUTQ to {bad:?}: {r}, errno {}", sys::errno());
        }
        cx.warm(4, 0)?;
    }
    Ok(())
}

fn polls(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    for bad in WRITES {
        let p = Pages::new(1, *bad)?;
        let fds = p.end(1).cast::<libc::pollfd>();
        // SAFETY: the kernel answers for bad memory.
        unsafe {
            if *bad == Bad::ReadOnly {
                p.put(1, libc::pollfd { fd: cx.fd, events: POLLIN, revents: 0 })?;
            }
            ensure!(is_fault(libc::poll(fds, 1, 100) as isize), "poll, {bad:?}: errno {}", sys::errno());
            let mut one = libc::pollfd { fd: cx.fd, events: POLLIN, revents: 0 };
            if *bad != Bad::ReadOnly {
                // (libc's own function looks at the limit itself.)
                let none = std::ptr::null::<u64>();
                let r = libc::syscall(libc::SYS_ppoll, &raw mut one, 1, fds, none, 8);
                ensure!(is_fault(r as isize), "ppoll, time limit, {bad:?}: errno {}", sys::errno());
            }
            same!(libc::poll(&mut one, 1, 1000), 1, "poll");
        }
    }
    cx.recv(10)?;
    cx.warm(4, 0)
}

fn selects(cx: &mut Cx) -> Res {
    cx.tell(Op::Send, 10, 0, 0)?;
    cx.arrive(10)?;
    for bad in WRITES {
        let p = Pages::new(1, *bad)?;
        let set = p.end(1).cast::<libc::fd_set>();
        // SAFETY: the kernel answers for bad memory.
        unsafe {
            if *bad == Bad::ReadOnly {
                let mut one: libc::fd_set = core::mem::zeroed();
                libc::FD_SET(cx.fd, &mut one);
                p.put(1, one)?;
            }
            let mut limit = libc::timeval { tv_sec: 0, tv_usec: 100_000 };
            let r = libc::select(cx.fd + 1, set, null_mut(), null_mut(), &mut limit);
            ensure!(is_fault(r as isize), "select, {bad:?}: {r}, errno {}", sys::errno());
        }
        same!(sys::select(&[cx.fd], &[], 1000)?.0, vec![cx.fd], "select");
    }
    cx.recv(10)?;
    cx.warm(4, 0)
}

/// What could not be told is told to the next call.
fn sets(cx: &mut Cx, flags: u32) -> Res {
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, cx.fd, libc::EPOLLIN as u32 | flags, 7)?;
    same!(sys::epoll_wait(ep, 4, 0)?, vec![], "nothing");
    for bad in WRITES {
        let p = Pages::new(1, *bad)?;
        // SAFETY: the kernel answers for bad memory.
        let r = unsafe { libc::epoll_ctl(ep, libc::EPOLL_CTL_MOD, cx.fd, p.end(1).cast()) };
        if *bad != Bad::ReadOnly {
            ensure!(is_fault(r as isize), "epoll_ctl, {bad:?}: errno {}", sys::errno());
        } else {
            sys::epoll_ctl(ep, libc::EPOLL_CTL_MOD, cx.fd, libc::EPOLLIN as u32 | flags, 7)?;
        }
        cx.tell(Op::Send, 10, 0, 0)?;
        cx.arrive(10)?;
        for ms in [0, 1000, -1] {
            // SAFETY: as above.
            let r = unsafe { libc::epoll_wait(ep, p.end(1).cast(), 4, ms) };
            ensure!(is_fault(r as isize), "epoll_wait of {ms} ms, {bad:?}: {r}, errno {}", sys::errno());
        }
        same!(sys::epoll_wait(ep, 4, 1000)?, vec![(libc::EPOLLIN as u32, 7)], "told then");
        cx.recv(10)?;
        same!(sys::epoll_wait(ep, 4, 0)?, vec![], "nothing more");
    }
    sys::close(ep)?;
    cx.warm(4, 0)
}

/// Many threads fail at once, while the stream goes on.
fn threads(cx: &mut Cx) -> Res {
    let fd = cx.fd;
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let all: Vec<_> = (0..3usize)
        .map(|k| {
            let stop = stop.clone();
            std::thread::spawn(move || -> Result<u32, String> {
                let p = Pages::new(1, READS[k % READS.len()]).map_err(|Why(w)| w)?;
                let mut runs = 0;
                loop {
                    for n in [16, 60, 200, 4000] {
                        // SAFETY: the kernel answers for bad memory.
                        let r = unsafe { libc::send(fd, p.end(1).cast(), n, MSG_NOSIGNAL) };
                        if !is_fault(r) {
                            return Err(format!("send: {r}, errno {}", sys::errno()));
                        }
                        // SAFETY: as above.
                        let r = unsafe { libc::recv(fd, p.end(1).cast(), n, MSG_PEEK | MSG_DONTWAIT) };
                        if !is_fault(r) && sys::errno() != libc::EAGAIN {
                            return Err(format!("peek: {r}, errno {}", sys::errno()));
                        }
                    }
                    runs += 1;
                    if stop.load(SeqCst) {
                        return Ok(runs);
                    }
                }
            })
        })
        .collect();
    let result = cx.warm(2000, 0);
    stop.store(true, SeqCst);
    for t in all {
        let runs = t.join().map_err(|_| Why("a thread failed".into()))?.map_err(Why)?;
        ensure!(runs > 0, "a thread did nothing");
    }
    result
}
