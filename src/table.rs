//! From fd numbers to what the library knows of them.

use crate::conn::Conn;
use crate::epoll::Set;
use crate::{chaos, shm, thread};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering::*};
use libc::c_int;

/// Fds from here on are never looked at.
const MAX_FDS: usize = 1 << 20;

static TABLE: AtomicPtr<AtomicUsize> = AtomicPtr::new(core::ptr::null_mut());
/// So many fds there is room for.
static LIMIT: AtomicUsize = AtomicUsize::new(0);
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
        LIMIT.store(MAX_FDS, Release);
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
    let fd = thread::place_of(fd);
    // There is a table where there is room.
    if fd >= LIMIT.load(Acquire) {
        return None;
    }
    // SAFETY: in bounds of a mapping that is never unmapped; zeroes are valid.
    Some(unsafe {
        let table = TABLE.load(Relaxed);
        core::hint::assert_unchecked(!table.is_null());
        &*table.add(fd)
    })
}

/// Where it is noted what an fd is: for calls that look at that more than once.
#[derive(Clone, Copy)]
pub struct Place(&'static AtomicUsize);

impl Place {
    /// That of `fd`.
    #[inline(always)]
    pub fn of(fd: c_int) -> Option<Place> {
        cell(fd).map(Place)
    }

    /// What stands there; 0: the library knows nothing of the fd.
    #[inline(always)]
    pub fn noted(self) -> usize {
        self.0.load(Acquire)
    }

    /// Whether the fd is (still) this connection, which is not fresh.
    #[inline(always)]
    pub fn is(self, c: &Conn) -> bool {
        self.noted() == c as *const Conn as usize
    }
}

/// The connection that was noted so, if it is not fresh.
///
/// # Safety
/// It must be what [`Place::noted`] gave.
#[inline(always)]
pub unsafe fn settled(noted: usize) -> Option<&'static Conn> {
    // Sets have the lowest bit, fresh connections the other one, and so has whatever else is noted: see `TCP`.
    match noted & 3 {
        // SAFETY: null, or a record's address; those are never freed.
        0 => unsafe { (noted as *const Conn).as_ref() },
        _ => None,
    }
}

/// Whether the library knows nothing of `fd`. One load.
#[inline(always)]
pub fn is_foreign(fd: c_int) -> bool {
    cell(fd).is_none_or(|c| c.load(Relaxed) == 0)
}

/// What `fd` is. A connection that was fresh is so no more. Not under the lock of an epoll set, which that may take.
#[inline(always)]
pub fn get(fd: c_int) -> Entry {
    let Some(cell) = cell(fd) else { return Entry::None };
    let v = cell.load(Acquire);
    if is_fresh(v) {
        return settle(cell, v);
    }
    decode(v)
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
/// In the address of a connection's record: it may be fresh. See [`put_fresh`].
const FRESH: usize = 2;

const fn is_fresh(v: usize) -> bool {
    v & 3 == FRESH && v >= RECORDS
}

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
            v => Entry::Conn(&*((v & !FRESH) as *const Conn)),
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

/// Does `f` with the connection that `fd` is, and again where that has got another record meanwhile, which knows nothing of it:
/// what a forked child has for itself goes on as a record of its own. `None`: it is no connection.
pub fn each_record<R>(fd: c_int, mut f: impl FnMut(&'static Conn) -> R) -> Option<R> {
    let mut done = None;
    while let Some(c) = conn(fd) {
        chaos::stumble();
        done = Some(f(c));
        if is(fd, c) {
            break;
        }
    }
    done
}

/// Whether `fd` is (still) this connection.
#[inline(always)]
pub fn is(fd: c_int, c: &Conn) -> bool {
    cell(fd).is_some_and(|x| x.load(Acquire) & !FRESH == c as *const Conn as usize)
}

/// Whether `fd` is (still) this epoll set.
pub fn is_set(fd: c_int, s: &Set) -> bool {
    cell(fd).is_some_and(|x| x.load(Acquire) == s as *const Set as usize | 1)
}

/// `fd`, which is nothing else than `was`, is this fresh connection from now on: whoever asks for it by [`get`] settles it.
/// Returns false, and changes nothing, if `fd` is something else.
pub fn put_fresh(fd: c_int, c: &Conn, was: Before) -> bool {
    let was = match was {
        Before::Nothing => 0,
        Before::Tcp => TCP,
    };
    ANY_TCP.store(true, Relaxed);
    cell(fd).is_some_and(|cell| {
        reach(fd);
        cell.compare_exchange(was, c as *const Conn as usize | FRESH, SeqCst, Relaxed).is_ok()
    })
}

/// What the number of a new connection is to the library before.
#[derive(Clone, Copy)]
pub enum Before {
    /// Nothing: it was accepted.
    Nothing,
    /// A TCP socket of which nothing is noted: it was dialled.
    Tcp,
}

/// The connection that `fd` is, which stays fresh.
#[inline(always)]
pub fn peek(fd: c_int) -> Option<&'static Conn> {
    match decode(cell(fd).map_or(0, |c| c.load(Acquire))) {
        Entry::Conn(c) => Some(c),
        _ => None,
    }
}

/// The connection that `fd` is, if it is fresh, and stays so. (One that a thread of the parent's had just begun when this
/// process was forked is the parent's to settle.)
pub fn fresh(fd: c_int) -> Option<&'static Conn> {
    let v = cell(fd).map_or(0, |c| c.load(Acquire));
    match decode(v) {
        Entry::Conn(c) if is_fresh(v) && !c.is_inherited() => Some(c),
        _ => None,
    }
}

/// Does what changes little of a connection that is fresh, and stays so; nobody meets it meanwhile. `None`, and nothing is
/// done: `fd` is no such connection.
pub fn quickly<R>(fd: c_int, f: impl FnOnce(&'static Conn) -> R) -> Option<R> {
    let c = fresh(fd)?;
    c.while_fresh(|| is(fd, c).then(|| f(c)))?
}

/// Forgets `fd` if it is a fresh connection with which no call is under way. Nobody else has that then.
pub fn take_fresh(fd: c_int) -> Option<&'static Conn> {
    let cell = cell(fd)?;
    fresh(fd).filter(|c| c.take_fresh()).inspect(|_| cell.store(0, Release))
}

/// The connection in `cell` is fresh no more.
#[cold]
#[inline(never)]
fn settle(cell: &AtomicUsize, v: usize) -> Entry {
    match decode(v) {
        Entry::Conn(c) if c.settle() => {
            let _ = cell.compare_exchange(v, v & !FRESH, SeqCst, Relaxed);
            decode(cell.load(Acquire))
        }
        _ => Entry::None,
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conn::Phase;
    use crate::{arena, fdhigh, sys};
    use core::sync::atomic::AtomicU32;

    /// A number that nobody else has, and a record.
    fn fresh() -> (c_int, &'static Conn) {
        for_tests();
        let (fd, c) = (fdhigh::dup_high(2).unwrap(), arena::alloc().unwrap());
        begin(fd, c);
        (fd, c)
    }

    fn begin(fd: c_int, c: &'static Conn) {
        c.local().fd.store(fd, Relaxed);
        c.begin_fresh();
        c.set_phase(Phase::Raw);
        assert!(put_fresh(fd, c, Before::Nothing));
    }

    fn end(fd: c_int, c: &Conn) {
        take(fd);
        sys::close(fd);
        c.local().fd.store(-1, Relaxed);
        c.set_phase(Phase::Closed);
    }

    #[test]
    fn who_asks_for_a_fresh_connection_settles_it() {
        let (fd, c) = fresh();
        assert!(peek(fd).is_some_and(|p| core::ptr::eq(p, c)) && is(fd, c));
        // A quick call is under way.
        c.local().tx_inflight.fetch_add(1, SeqCst);
        assert!(!c.is_in_hand() && take_fresh(fd).is_none());
        c.local().tx_inflight.fetch_sub(1, SeqCst);
        assert!(take_fresh(fd).is_none(), "who closes it then has met it");
        end(fd, c);
        let (fd, c) = fresh();
        assert!(conn(fd).is_some_and(|p| core::ptr::eq(p, c)));
        assert!(take_fresh(fd).is_none());
        assert!(is(fd, c) && c.settle());
        end(fd, c);
        // As long as nobody does, it can be taken; then there is none.
        let (fd, c) = fresh();
        assert!(peek(fd).is_some() && take_fresh(fd).is_some());
        assert!(!c.settle() && conn(fd).is_none());
        end(fd, c);
    }

    struct Over<'a>(&'a AtomicU32);

    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(u32::MAX, SeqCst);
        }
    }

    /// What is set on a connection that gets another record meanwhile is set on that one, too.
    #[test]
    fn both_records_are_told() {
        for_tests();
        let fd = crate::fdhigh::dup_high(2).unwrap();
        let [old, new] = [(); 2].map(|()| crate::arena::alloc().unwrap());
        assert!(put_conn(fd, old));
        let mut told = Vec::new();
        let done = each_record(fd, |c| {
            put_conn(fd, new);
            told.push(c as *const Conn);
            told.len()
        });
        assert_eq!((done, told), (Some(2), vec![old as *const Conn, new]));
        take(fd);
        assert_eq!(each_record(fd, |_| ()), None);
        crate::sys::close(fd);
        [old, new].iter().for_each(|c| c.set_phase(Phase::Closed));
    }

    /// Who closes a connection without more ado has it for himself, though somebody goes through all records meanwhile, and
    /// another begins calls on it.
    #[test]
    fn nobody_else_has_what_is_fresh_to_its_end() {
        const LIVES: u32 = 100_000;
        let (fd, c) = fresh();
        let (life, touched, ended) = (AtomicU32::new(1), AtomicU32::new(0), AtomicU32::new(0));
        let (mut ends, called) = ([0; 2], AtomicU32::new(0));
        let at = &raw const *c as usize;
        // SAFETY: records are never freed.
        let record = || unsafe { &*(at as *const Conn) };
        std::thread::scope(|s| {
            s.spawn(|| {
                let c = record();
                while life.load(SeqCst) <= LIVES {
                    let this = life.load(SeqCst);
                    if this % 2 == 0 && c.phase() == Phase::Raw && c.settle() {
                        touched.store(this, SeqCst);
                    }
                }
            });
            s.spawn(|| {
                let c = record();
                let inside = &c.local().rx_inflight;
                while life.load(SeqCst) <= LIVES {
                    inside.fetch_add(1, SeqCst);
                    let this = life.load(SeqCst);
                    let may = c.phase() == Phase::Raw && is(fd, c) && !c.is_in_hand();
                    if may && life.load(SeqCst) == this {
                        called.fetch_add(1, SeqCst);
                        std::thread::yield_now();
                        assert_ne!(ended.load(SeqCst), this, "it ended without more ado under a call");
                    }
                    inside.fetch_sub(1, SeqCst);
                    std::thread::yield_now();
                }
            });
            let _over = Over(&life);
            for n in 1..=LIVES {
                if n % 3 == 0 {
                    std::thread::yield_now();
                }
                let mine = take_fresh(fd).is_some();
                if mine {
                    ended.store(n, SeqCst);
                }
                assert!(!mine || touched.load(SeqCst) != n, "life {n}");
                ends[usize::from(mine)] += 1;
                take(fd);
                c.set_phase(Phase::Closed);
                life.store(n + 1, SeqCst);
                begin(fd, c);
            }
        });
        assert!(ends.iter().all(|n| *n > 0) && called.load(SeqCst) > 0, "{ends:?}");
        end(fd, c);
    }
}
