//! From fd numbers to what the library knows of them.

use crate::conn::Conn;
use crate::epoll::Set;
use crate::shm;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering::*};
use libc::c_int;

/// Fds from here on are never looked at.
const MAX_FDS: usize = 1 << 20;

static TABLE: AtomicPtr<AtomicUsize> = AtomicPtr::new(core::ptr::null_mut());
static HIGHEST: AtomicI32 = AtomicI32::new(-1);
static ANY_TCP: AtomicBool = AtomicBool::new(false);

/// What an fd is to the library.
pub enum Entry {
    /// Nothing.
    None,
    /// A TCP connection.
    Conn(&'static Conn),
    /// An epoll set that has (or had) such connections in it.
    Set(&'static Set),
}

/// Makes the table. Until then every fd is [`Entry::None`].
pub fn init() {
    if let Ok(m) = shm::anon_private(MAX_FDS * size_of::<AtomicUsize>()) {
        TABLE.store(m.base.cast(), Release);
    }
}

/// The same for tests, which share it.
#[cfg(test)]
pub fn for_tests() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(init);
}

#[inline(always)]
fn cell(fd: c_int) -> Option<&'static AtomicUsize> {
    let t = TABLE.load(Relaxed);
    if t.is_null() || fd as u32 as usize >= MAX_FDS {
        return None;
    }
    // SAFETY: in bounds of a mapping that is never unmapped; zeroes are valid.
    Some(unsafe { &*t.add(fd as usize) })
}

/// Whether the library knows nothing of `fd`. One load.
#[inline(always)]
pub fn is_foreign(fd: c_int) -> bool {
    cell(fd).is_none_or(|c| c.load(Relaxed) == 0)
}

/// What `fd` is.
#[inline(always)]
pub fn get(fd: c_int) -> Entry {
    decode(cell(fd).map_or(0, |c| c.load(Acquire)))
}

/// A TCP socket that is no connection (yet). What else is known of it is in the bits below.
const TCP: usize = 2;
/// Somebody has put it into an epoll set.
pub const AWAITED: usize = 4;
/// It has, or had, more than one number.
pub const DUPED: usize = 8;
/// It was open at a fork, or was passed to somebody.
pub const SHARED: usize = 16;
/// A call on it has begun in the kernel, and may be there still.
pub const USED: usize = 32;
/// No record's address is below.
const RECORDS: usize = 64;

const fn is_early(v: usize) -> bool {
    v & TCP != 0 && v < RECORDS
}

#[inline(always)]
fn decode(v: usize) -> Entry {
    // SAFETY: only `put_*` store other values, of records that are never freed.
    unsafe {
        match v {
            0..RECORDS => Entry::None,
            v if v & 1 == 1 => Entry::Set(&*((v & !1) as *const Set)),
            v => Entry::Conn(&*(v as *const Conn)),
        }
    }
}

/// The connection that `fd` is.
#[inline(always)]
pub fn conn(fd: c_int) -> Option<&'static Conn> {
    match get(fd) {
        Entry::Conn(c) => Some(c),
        _ => None,
    }
}

/// Whether `fd` is (still) this connection.
#[inline(always)]
pub fn is(fd: c_int, c: &Conn) -> bool {
    cell(fd).is_some_and(|x| x.load(Acquire) == c as *const Conn as usize)
}

/// `fd` is this connection from now on.
pub fn put_conn(fd: c_int, c: &Conn) -> bool {
    ANY_TCP.store(true, Relaxed);
    put(fd, c as *const Conn as usize)
}

/// `fd` is this epoll set from now on.
pub fn put_set(fd: c_int, s: &'static Set) -> bool {
    put(fd, s as *const Set as usize | 1)
}

/// `fd` is a new TCP socket. Changes nothing if it is something already: the caller may be a `vfork`
/// child, whose numbers are not ours.
pub fn put_tcp(fd: c_int) {
    if let Some(c) = cell(fd) {
        reach(fd);
        ANY_TCP.store(true, Relaxed);
        let _ = c.compare_exchange(0, TCP, Relaxed, Relaxed);
    }
}

/// Notes `what` of a TCP socket that is no connection (yet). Returns false, and changes nothing, if `fd` is none.
pub fn mark(fd: c_int, what: usize) -> bool {
    cell(fd).is_some_and(|c| c.fetch_update(SeqCst, SeqCst, |v| is_early(v).then_some(v | what)).is_ok())
}

/// `new` is another number of the TCP socket `old`, which is no connection (yet). Returns false if `old` is none.
pub fn put_duped(old: c_int, new: c_int) -> bool {
    mark(old, DUPED) && put(new, marks(old) & !AWAITED | TCP)
}

/// What is noted of a TCP socket that is no connection (yet).
pub fn marks(fd: c_int) -> usize {
    cell(fd).map_or(0, |c| c.load(SeqCst)) & if is_tcp(fd) { AWAITED | DUPED | SHARED | USED } else { 0 }
}

/// `fd`, a TCP socket of which nothing is noted, is this connection from now on. Returns false, and changes nothing, if it is
/// something else.
pub fn put_dialled(fd: c_int, c: &Conn) -> bool {
    let to = c as *const Conn as usize;
    cell(fd).is_some_and(|cell| cell.compare_exchange(TCP, to, SeqCst, SeqCst).is_ok())
}

/// Whether `fd` is known to be a TCP socket that is no connection (yet): it may be listening.
pub fn is_tcp(fd: c_int) -> bool {
    cell(fd).is_some_and(|c| is_early(c.load(Relaxed)))
}

fn reach(fd: c_int) {
    if fd > highest() {
        HIGHEST.fetch_max(fd, Relaxed);
    }
}

fn put(fd: c_int, v: usize) -> bool {
    let Some(c) = cell(fd) else { return false };
    reach(fd);
    c.store(v, Release);
    true
}

/// Forgets `fd`; gives what it was.
pub fn take(fd: c_int) -> Entry {
    decode(cell(fd).map_or(0, |c| c.swap(0, AcqRel)))
}

/// Whether no fd ever was a TCP socket: then calls about many fds are the kernel's alone, bad pointers and all.
#[inline]
pub fn is_without_tcp() -> bool {
    !ANY_TCP.load(Relaxed)
}

/// The highest fd that ever was something.
pub fn highest() -> c_int {
    HIGHEST.load(Relaxed)
}

/// Another fd number of the same connection.
pub fn other_fd_of(c: &Conn) -> Option<c_int> {
    (0..=highest()).find(|fd| is(*fd, c))
}
