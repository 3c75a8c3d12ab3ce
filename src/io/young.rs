//! The first calls on a connection, made short: nobody has looked for its peer yet, and most connections end before that.
//!
//! As with [`super::steady`], nothing is decided here. Whatever is not plainly so is for [`super::send`] and [`super::recv`]:
//! either does the whole call or leaves no trace. What it does is what they would do: a thread is counted while it is in the
//! kernel, so that no mark arrives where it reads.

use super::*;
use crate::thread::Critical;

/// The longest send. What is longer may find no room.
const SHORT: usize = 4096;

/// The connection that `fd` is, if it may be one of these.
#[inline(always)]
pub fn conn(fd: c_int) -> Option<&'static Conn> {
    table::peek(fd).filter(|c| c.phase() == Phase::Raw)
}

/// Receives as the kernel does.
///
/// # Safety
/// `buf` must be writable for `len` bytes.
#[inline(never)]
pub unsafe fn recv(conn: &'static Conn, fd: c_int, buf: *mut c_void, len: usize, flags: c_int) -> Option<Outcome> {
    if !is_young(conn, flags) {
        return None;
    }
    if is_brief(conn, flags) {
        // SAFETY: the caller's promise.
        return unsafe { recv_briefly(conn, fd, buf, len, flags) };
    }
    if process::has_threads() || conn.rcvtimeo.load(Relaxed) != 0 {
        return None;
    }
    let args = [fd as usize, buf as usize, len.min(MOST), flags as usize, 0, 0];
    // No handler jumps out where the thread is counted, but from its sleep.
    let _critical = Critical::new();
    // SAFETY: the caller's promise.
    let r = unsafe { call(conn, fd, &conn.local().rx_inflight, libc::SYS_recvfrom, args) }?;
    if let Ok(n) = r {
        conn.count_rx_tcp(n);
        conn.in_sight();
        note_bytes(conn, n);
    }
    leave_kernel(conn, &conn.local().rx_inflight);
    Some(Outcome::from(r))
}

/// Sends as the kernel does.
///
/// # Safety
/// `buf` must be readable for `len` bytes.
#[inline(never)]
pub unsafe fn send(conn: &'static Conn, fd: c_int, buf: *const c_void, len: usize, flags: c_int) -> Option<Outcome> {
    let args = [fd as usize, buf as usize, len, flags as usize, 0, 0];
    // SAFETY: the caller's promise.
    unsafe { send_by(conn, fd, len, flags, (libc::SYS_sendto, args)) }
}

/// The same of several buffers, `len` bytes together.
///
/// # Safety
/// `iov` must describe readable memory.
#[inline(never)]
pub unsafe fn sendv(conn: &'static Conn, fd: c_int, iov: &[iovec], len: usize, flags: c_int) -> Option<Outcome> {
    // SAFETY: all-zero is one.
    let mut m: msghdr = unsafe { core::mem::zeroed() };
    m.msg_iov = iov.as_ptr().cast_mut();
    m.msg_iovlen = iov.len() as _;
    let args = [fd as usize, &raw const m as usize, flags as usize, 0, 0, 0];
    // SAFETY: the caller's promise; `m` outlives the call.
    unsafe { send_by(conn, fd, len, flags, (libc::SYS_sendmsg, args)) }
}

/// The same by that system call.
///
/// # Safety
/// As for the system call.
#[inline(always)]
unsafe fn send_by(
    conn: &'static Conn,
    fd: c_int,
    len: usize,
    flags: c_int,
    (nr, args): (libc::c_long, [usize; 6]),
) -> Option<Outcome> {
    if !is_young(conn, flags) || len > SHORT || conn.corked.load(Relaxed) || conn.more.load(Relaxed) {
        return None;
    }
    if is_brief(conn, flags) {
        // SAFETY: the caller's promise.
        return unsafe { send_briefly(conn, fd, len, nr, args) };
    }
    if process::has_threads() || conn.sndtimeo.load(Relaxed) != 0 {
        return None;
    }
    // As for a receive.
    let _critical = Critical::new();
    // SAFETY: the caller's promise.
    let r = unsafe { call(conn, fd, &conn.local().tx_inflight, nr, args) }?;
    if let Ok(n) = r {
        conn.count_tx_tcp(n);
    }
    if r.map_or_else(|e| e == libc::EAGAIN, |n| n < len) {
        conn.fulls.fetch_add(1, SeqCst);
    }
    leave_kernel(conn, &conn.local().tx_inflight);
    Some(Outcome::from(r))
}

/// The same for a call that does not wait, and so is neither interrupted nor holds its connection open.
///
/// # Safety
/// As for [`recv`].
unsafe fn recv_briefly(conn: &'static Conn, fd: c_int, buf: *mut c_void, len: usize, flags: c_int) -> Option<Outcome> {
    let inside = Inside::enter(conn, fd, &conn.local().rx_inflight)?;
    note_call(conn, false);
    // SAFETY: the caller's promise.
    let r = unsafe { sys!(libc::SYS_recvfrom, fd, buf, len.min(MOST), flags, 0, 0) };
    match r {
        Ok(n) => {
            conn.count_rx_tcp(n);
            conn.in_sight();
            note_bytes(conn, n);
        }
        Err(libc::EAGAIN) => conn.out_of_sight.store(true, SeqCst),
        Err(_) => {}
    }
    inside.leave();
    let lost = if r == Ok(0) && len > 0 { conn.find_lost() } else { None };
    Some(lost.map_or(Outcome::from(r), Outcome::Fail))
}

/// The same of a send.
///
/// # Safety
/// As for the system call.
#[inline(always)]
unsafe fn send_briefly(
    conn: &'static Conn,
    fd: c_int,
    len: usize,
    nr: libc::c_long,
    args: [usize; 6],
) -> Option<Outcome> {
    let inside = Inside::enter(conn, fd, &conn.local().tx_inflight)?;
    note_call(conn, false);
    // SAFETY: the caller's promise.
    let r = unsafe { sys!(nr, args[0], args[1], args[2], args[3], args[4], args[5]) };
    if let Ok(n) = r {
        conn.count_tx_tcp(n);
        note_bytes(conn, n);
    }
    if r.map_or_else(|e| e == libc::EAGAIN, |n| n < len) {
        conn.fulls.fetch_add(1, SeqCst);
    }
    inside.leave();
    Some(Outcome::from(r))
}

/// Whether the kernel's call does not wait.
#[inline(always)]
fn is_brief(conn: &Conn, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT != 0 || conn.nonblock.load(Relaxed)
}

#[inline(always)]
fn is_young(conn: &Conn, flags: c_int) -> bool {
    flags & !(libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) == 0
        && conn.calls.load(Relaxed).saturating_add(1) < conn.next_try.load(Relaxed)
        && !conn.is_inherited()
        && !pins::is_held()
        && !conn.gentle.load(Relaxed)
        && !conn.hold.load(Relaxed)
        && conn.lost.load(Relaxed) == 0
        && !chaos::detours()
}

/// A thread in the kernel, and where it is counted.
struct Inside<'a> {
    conn: &'static Conn,
    count: &'a AtomicU32,
}

impl<'a> Inside<'a> {
    /// `None`: `fd` is that connection no more, or has left TCP.
    #[inline(always)]
    fn enter(conn: &'static Conn, fd: c_int, count: &'a AtomicU32) -> Option<Inside<'a>> {
        let inside = Inside { conn, count };
        count.fetch_add(1, SeqCst);
        if conn.phase() != Phase::Raw || !conn.is_at(fd) || conn.is_in_hand() {
            inside.leave();
            return None;
        }
        Some(inside)
    }

    #[inline(always)]
    fn leave(self) {
        leave_kernel(self.conn, self.count);
    }
}

/// It does not come back.
unsafe extern "C" fn left(arg: *mut c_void) {
    // SAFETY: `call`'s own record, in a frame that is being left and still there.
    let inside = unsafe { &*arg.cast::<Inside>() };
    leave_kernel(inside.conn, inside.count);
}

/// See [`unless_it_waits`].
///
/// # Safety
/// As for the system call.
#[cold]
unsafe fn again(nr: libc::c_long, mut args: [usize; 6]) -> sys::SysResult {
    let flags = if nr == libc::SYS_sendmsg { 2 } else { 3 };
    args[flags] |= libc::MSG_DONTWAIT as usize;
    // SAFETY: the caller's promise.
    unless_it_waits(unsafe { sys!(nr, args[0], args[1], args[2], args[3], args[4], args[5]) })
}

/// The call, counted, and its thread as long as it is in the kernel: by `count`, which the caller is to take back. `None`: it
/// was not made. In a critical section, which it leaves while it sleeps.
///
/// # Safety
/// As for the system call.
#[inline(always)]
unsafe fn call(
    conn: &'static Conn,
    fd: c_int,
    count: &AtomicU32,
    nr: libc::c_long,
    args: [usize; 6],
) -> Option<sys::SysResult> {
    let since = Since::now();
    let mut inside = Inside::enter(conn, fd, count)?;
    note_call(conn, true);
    // SAFETY: the caller's promise; no lock is held, and `inside` lives until it returns.
    let r = unsafe { signals::sleep_alone(nr, args, since, left, (&raw mut inside).cast()) };
    Some(if r == Err(libc::EINTR) { again(nr, args) } else { r })
}

#[cfg(test)]
mod tests {
    use super::super::tests::armed;
    use super::*;
    use crate::layout::Slot;
    use crate::table::Before;
    use crate::{arena, options};
    use std::io::Write;
    use std::os::fd::AsRawFd;

    /// All that a record is, but for what tells its lives apart.
    fn image(c: &Conn) -> Vec<u8> {
        let bytes = |p: *const u8, n: usize| {
            // SAFETY: a record's memory, which began as zeroes; nobody else uses it.
            (0..n).map(move |i| unsafe { p.add(i).read_volatile() })
        };
        let gens = (c.gen.swap(0, SeqCst), c.stats().gen.swap(0, SeqCst));
        c.begin_fresh();
        let mut all: Vec<u8> = bytes((&raw const *c).cast(), size_of::<Conn>()).collect();
        all.extend(bytes((&raw const *c.local()).cast(), size_of_val(c.local())));
        all.extend(bytes((&raw const *c.stats()).cast(), size_of_val(c.stats())));
        c.gen.store(gens.0, SeqCst);
        c.stats().gen.store(gens.1, SeqCst);
        all
    }

    /// What the quick calls change of a record is put back when it is used again; all else they leave as it was.
    #[test]
    fn a_record_that_was_fresh_to_its_end_is_like_a_new_one() {
        let slot = Slot::default();
        let (other, ours, mut theirs) = armed(&slot);
        let fd = ours.as_raw_fd();
        crate::table::for_tests();
        for _ in 0..1000 {
            let c = arena::alloc().unwrap();
            let new = image(c);
            c.local().fd.store(fd, Relaxed);
            c.local().fds.store(1, Relaxed);
            c.next_try.store(100, Relaxed);
            c.set_phase(Phase::Raw);
            // What another test had there.
            table::take(fd);
            assert!(table::put_fresh(fd, c, Before::Nothing));
            theirs.write_all(b"abc").unwrap();
            let mut b = [0u8; 3];
            // SAFETY: the buffers are valid for their lengths.
            let (got, sent) = unsafe {
                let got = recv(conn(fd).unwrap(), fd, b.as_mut_ptr().cast(), 3, 0);
                (got, send(conn(fd).unwrap(), fd, b.as_ptr().cast(), 3, 0))
            };
            assert_eq!((got, sent), (Some(Outcome::Done(3)), Some(Outcome::Done(3))));
            // What does not wait, and is in an epoll set.
            let (set, ep) = crate::epoll::set_for_tests();
            let mut ev = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 1 };
            let (yes, mut e, mut len) = (1, -1, 4);
            let two = [one(b.as_mut_ptr().cast(), 2)[0], one(b.as_mut_ptr().cast(), 3)[0]];
            // SAFETY: the event, and the buffers for their lengths, are valid.
            unsafe {
                assert_eq!(options::ioctl(fd, libc::FIONBIO, &raw const yes as usize), Outcome::Done(0));
                assert_eq!(options::fcntl(fd, libc::F_SETFL, 0), Outcome::Done(0));
                assert!(!c.nonblock.load(Relaxed));
                assert_eq!(options::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK as usize), Outcome::Done(0));
                assert_eq!(crate::epoll::ctl(ep, libc::EPOLL_CTL_ADD, fd, &mut ev), Outcome::Done(0));
                assert_eq!(recv(conn(fd).unwrap(), fd, b.as_mut_ptr().cast(), 3, 0), Some(Outcome::Fail(libc::EAGAIN)));
                assert_eq!(send(conn(fd).unwrap(), fd, b.as_ptr().cast(), 3, 0), Some(Outcome::Done(3)));
                assert_eq!(sendv(conn(fd).unwrap(), fd, &two, 5, 0), Some(Outcome::Done(5)));
                let to = (&raw mut e).cast();
                let asked = options::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, to, &mut len);
                assert_eq!((asked, e), (Outcome::Done(0), 0));
            }
            assert_eq!(crate::fds::shutdown(fd, libc::SHUT_WR), Outcome::Bypass);
            assert_ne!(image(c), new);
            assert!(table::take_fresh(fd).is_some());
            crate::epoll::number_closed(set, ep, true);
            crate::table::take(ep);
            sys::close(ep);
            ours.set_nonblocking(false).unwrap();
            c.local().fds.store(0, Relaxed);
            c.local().fd.store(-1, Relaxed);
            arena::free(c);
            assert!(c.was_taken() || c.phase() != Phase::Free);
            let again = arena::alloc().unwrap();
            // Other tests take records, too.
            let same = core::ptr::eq(c, again);
            let now = image(again);
            arena::forget(again);
            if same {
                assert!(now == new, "{:?}", now.iter().zip(&new).position(|(a, b)| a != b));
                other.set_phase(Phase::Closed);
                return;
            }
        }
        panic!("no record was used again");
    }
}
