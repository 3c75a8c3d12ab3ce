//! Where connections and what others see of them are kept.
//!
//! Each process has an arena of its own; a forked child goes on using the
//! records that it inherited and makes its own arena for new ones.

use crate::conn::{add_totals, ask, Conn, Local, Phase};
use crate::shm;
use crate::stats::{self, ConnStats, Header, Why};
use crate::sync::{now_ns, Guard, Lock};
use crate::thread::Critical;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::*};

const CAPACITY: usize = 1 << 16;
/// So many records at least there may be before those are looked for that nobody has.
const LEAST: u32 = 256;
/// How long ago the last holder of such a record must have been missed first: one that ends has told so before its last calls.
const REST_NS: i64 = 2_000_000_000;
const STATS_BYTES: usize = stats::CONNS_OFFSET + CAPACITY * size_of::<ConnStats>();

struct Arena {
    header: *const Header,
    stats: *mut ConnStats,
    conns: *mut Conn,
    locals: *mut Local,
}

static ARENA: AtomicPtr<Arena> = AtomicPtr::new(core::ptr::null_mut());
static HINT: AtomicU32 = AtomicU32::new(0);
/// How many records there may be before those are looked for that nobody has.
static ENOUGH: AtomicU32 = AtomicU32::new(LEAST);
/// A thread looks for them.
static TIDYING: AtomicBool = AtomicBool::new(false);
static LOCK: Lock = Lock::new();

fn make(name: [u8; 64]) -> Option<Arena> {
    let conns = shm::anon_shared(CAPACITY * size_of::<Conn>()).ok()?;
    let locals = shm::anon_private(CAPACITY * size_of::<Local>()).ok()?;
    let (fd, map) = shm::create_owned(b"ringsock-state\0", STATS_BYTES).ok()?;
    // The page of totals and the first records exist; later pages are allocated with their records.
    if shm::allocate(fd, 0, stats::CONNS_OFFSET).is_err() {
        crate::sys::close(fd);
        return None;
    }
    FD.store(fd, Relaxed);
    let header = map.base as *const Header;
    // SAFETY: the mapping is larger than a header, zeroed, and all fields are atomics.
    let h = unsafe { &*header };
    h.version.store(stats::VERSION, Relaxed);
    h.pid.store(crate::process::pid(), Relaxed);
    h.capacity.store(CAPACITY as u32, Relaxed);
    for (to, from) in h.program.iter().zip(name) {
        to.store(from, Relaxed);
    }
    h.magic.store(stats::MAGIC, Release);
    Some(Arena {
        header,
        // SAFETY: inside the mapping.
        stats: unsafe { map.base.add(stats::CONNS_OFFSET) }.cast(),
        conns: conns.base.cast(),
        locals: locals.base.cast(),
    })
}

static FD: core::sync::atomic::AtomicI32 = core::sync::atomic::AtomicI32::new(-1);

fn arena() -> Option<&'static Arena> {
    // SAFETY: set once to a leaked box.
    if let Some(a) = unsafe { ARENA.load(Acquire).as_ref() } {
        return Some(a);
    }
    let mut name = [0u8; 64];
    crate::process::program_name(&mut name);
    let _g = LOCK.lock();
    if ARENA.load(Acquire).is_null() {
        let a = make(name)?;
        ARENA.store(Box::into_raw(Box::new(a)), Release);
    }
    // SAFETY: as above.
    unsafe { ARENA.load(Acquire).as_ref() }
}

/// A new record, in no phase yet (`Closed`), with nobody else knowing it. `None`: no memory, or too many.
pub fn alloc() -> Option<&'static Conn> {
    alloc_for(crate::process::life())
}

/// As [`alloc`], for a connection that is another process's to upgrade.
pub fn alloc_for(owner: u32) -> Option<&'static Conn> {
    let a = arena()?;
    if let Some(c) = take(a, owner, ENOUGH.load(Relaxed) as usize) {
        return Some(c);
    }
    tidy(a, now_ns());
    take(a, owner, CAPACITY)
}

/// The first free one of so many records.
fn take(a: &Arena, owner: u32, most: usize) -> Option<&'static Conn> {
    // SAFETY: see `make`.
    let h = unsafe { &*a.header };
    let _g = LOCK.lock();
    let from = HINT.load(Relaxed) as usize;
    for n in 0..most {
        let i = (from + n) % most;
        // SAFETY: in bounds; zeroed memory is a `Conn` in phase `Free`.
        let c = unsafe { &*a.conns.add(i) };
        // SAFETY: in bounds; written when the record was used first.
        let haunted = || c.gen.load(Relaxed) != 0 && !c.was_taken() && unsafe { &*a.locals.add(i) }.is_haunted();
        if c.phase() != Phase::Free || haunted() || !c.claim() {
            continue;
        }
        if i as u32 >= h.used.load(Relaxed) {
            // 16 records a page: make the page exist before it is touched.
            let at = stats::CONNS_OFFSET + i * size_of::<ConnStats>();
            if shm::allocate(FD.load(Relaxed), at & !4095, 4096).is_err() {
                c.set_phase(Phase::Free);
                return None;
            }
            h.used.fetch_max(i as u32 + 1, Release);
        }
        let gen = c.gen.load(Relaxed).wrapping_add(1);
        if c.was_taken() && c.owner == owner {
            // Nobody has it from its former life: what the quick calls leave alone is as it was when that began.
            c.reset_fresh(gen);
            let s = c.stats();
            s.tx_bytes_tcp.store(0, Relaxed);
            s.rx_bytes_tcp.store(0, Relaxed);
            s.why.store(0, Relaxed);
            s.gen.store(s.gen.load(Relaxed) | 1, Release);
            HINT.store(i as u32 + 1, Relaxed);
            return Some(c);
        }
        // SAFETY: claimed, so nobody else uses record `i`; all three arrays have `CAPACITY` elements.
        unsafe {
            let local = a.locals.add(i);
            if (*local).fds.load(Relaxed) == u32::MAX || gen == 1 {
                local.write(Local::default());
            }
            (*local).fd.store(-1, Relaxed);
            (*local).fds.store(0, Relaxed);
            (*local).managed.store(false, Relaxed);
            (*local).blind.store(0, Relaxed);
            {
                // Threads in `poll` may not have left its former life yet.
                let _g = (*local).lock.lock();
                (*local).set_watchers((*(*local).waiters.get()).len());
            }
            (*local).clear_counts();
            (*local).mapped.store(0, Relaxed);
            (*a.conns.add(i)).reset(i as u32, owner, gen, local, a.stats.add(i), a.header.cast_mut());
            let s = &*a.stats.add(i);
            for w in [&s.tx_bytes_tcp, &s.tx_bytes_ring, &s.rx_bytes_tcp, &s.rx_bytes_ring] {
                w.store(0, Relaxed);
            }
            for w in [&s.upgrades, &s.returns] {
                w.store(0, Relaxed);
            }
            for w in [&s.why, &s.link, &s.path_tx, &s.path_rx] {
                w.store(0, Relaxed);
            }
            s.local.port.store(0, Relaxed);
            s.peer.port.store(0, Relaxed);
            s.gen.store(s.gen.load(Relaxed) | 1, Release);
            (*a.conns.add(i)).set_phase(Phase::Closed);
        }
        HINT.store(i as u32 + 1, Relaxed);
        // SAFETY: as above.
        return Some(unsafe { &*a.conns.add(i) });
    }
    None
}

/// Frees what was left by children that have ended, or were killed, without closing it. (What they close they free, and is
/// found by who comes round.)
#[cold]
fn tidy(a: &Arena, now: i64) {
    // A handler that jumped out would leave it begun.
    let _section = Critical::new();
    if TIDYING.swap(true, Acquire) {
        return;
    }
    // SAFETY: see `make`.
    let used = unsafe { &*a.header }.used.load(Acquire);
    let mut in_use = 0;
    for i in 0..used as usize {
        // SAFETY: in bounds.
        let c = unsafe { &*a.conns.add(i) };
        if c.phase() == Phase::Free || c.is_left() && give_back(c, now) {
            continue;
        }
        in_use += 1;
    }
    HINT.store(0, Relaxed);
    ENOUGH.store((2 * in_use).clamp(LEAST, CAPACITY as u32), Relaxed);
    TIDYING.store(false, Release);
}

/// Frees a record that nobody has, if it was seen so a while ago.
fn give_back(c: &'static Conn, now: i64) -> bool {
    let since = &c.local().left_since;
    if since.load(Relaxed) == 0 {
        since.store(now, Relaxed);
    }
    if now - since.load(Relaxed) < REST_NS {
        return false;
    }
    {
        // Who closes it as the last does so under these.
        let Some(_b) = c.lock_both_within(0) else { return false };
        if !c.is_left() {
            return false;
        }
        c.set_phase(Phase::Closed);
    }
    if c.local().submitted.load(SeqCst) {
        // The background thread knows it.
        c.ask(ask::CLOSED);
    } else {
        free(c);
    }
    true
}

/// Held while a connection's counts go from its record to the totals.
static BOOKS: Lock = Lock::new();

/// While the result lives, no connection is counted in the totals instead of its record. `None`: a signal
/// handler asks that has interrupted just that.
pub fn stop_books() -> Option<Guard<'static>> {
    (!BOOKS.held_by_me()).then(|| BOOKS.lock())
}

/// Frees a record, adding its counts to the totals of the process that made it.
pub fn free(c: &Conn) {
    if c.came_by_exec() && !c.visited.load(Relaxed) {
        // Nothing was ever done with it.
        return forget(c);
    }
    let _books = stop_books();
    // SAFETY: set when the record was made, to memory that is never unmapped, in forked children neither.
    let header = unsafe { &*c.header.load(Relaxed) };
    add_totals(&header.closed, c.stats());
    forget(c);
}

/// Counts a return of `c` for the process that made its record.
pub fn count_return(c: &Conn, why: Why) {
    c.stats().returns.fetch_add(1, Relaxed);
    // SAFETY: as in `free`.
    unsafe { &*c.header.load(Relaxed) }.closed.returned.count(why);
}

/// Frees a record whose connection goes on in another one.
pub fn forget(c: &Conn) {
    c.stats().gen.fetch_and(!1, Release);
    // Only where to look first: if two do this at once, either will do.
    if !c.is_inherited() && c.index < HINT.load(Relaxed) {
        HINT.store(c.index, Relaxed);
    }
    c.set_phase(Phase::Free);
}

/// The header and the records in use so far.
pub fn view() -> Option<(&'static Header, &'static [ConnStats])> {
    // SAFETY: set once to a leaked box.
    let a = unsafe { ARENA.load(Acquire).as_ref() }?;
    // SAFETY: the mapping holds `CAPACITY` records, of which `used` have their pages.
    unsafe {
        let h = &*a.header;
        Some((h, core::slice::from_raw_parts(a.stats, h.used.load(Acquire) as usize)))
    }
}

/// Every record that is in use. Those that were fresh are so no more.
pub fn each(mut f: impl FnMut(&'static Conn)) {
    // SAFETY: set once to a leaked box.
    let Some(a) = (unsafe { ARENA.load(Acquire).as_ref() }) else { return };
    // SAFETY: see `make`.
    let used = unsafe { &*a.header }.used.load(Acquire) as usize;
    for i in 0..used {
        // SAFETY: in bounds.
        let c = unsafe { &*a.conns.add(i) };
        if c.phase() != Phase::Free && c.settle() {
            f(c);
        }
    }
}

/// Whether a record is in this phase.
pub fn any(phase: Phase) -> bool {
    // SAFETY: as in `each`.
    let Some(a) = (unsafe { ARENA.load(Acquire).as_ref() }) else { return false };
    // SAFETY: see `make`.
    let used = unsafe { &*a.header }.used.load(Acquire) as usize;
    // SAFETY: in bounds.
    (0..used).any(|i| unsafe { &*a.conns.add(i) }.phase() == phase)
}

/// In a forked child: new connections go to a new arena.
pub fn reset_after_fork() {
    LOCK.reset_after_fork();
    BOOKS.reset_after_fork();
    ARENA.store(core::ptr::null_mut(), Relaxed);
    HINT.store(0, Relaxed);
    ENOUGH.store(LEAST, Relaxed);
    TIDYING.store(false, Relaxed);
    let fd = FD.swap(-1, Relaxed);
    if fd >= 0 {
        crate::sys::close(fd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conn::ask;

    /// The background thread's inbox is a list through the records. One that comes to be there twice makes a ring of it, and
    /// the thread goes round for ever.
    #[test]
    fn a_record_in_the_inbox_stays_there_once() {
        for _ in 0..1000 {
            let old = alloc().unwrap();
            old.local().asked.store(ask::PUMP, SeqCst);
            forget(old);
            let new = alloc().unwrap();
            let same = core::ptr::eq(old, new);
            let asked = new.local().asked.swap(0, SeqCst);
            forget(new);
            if same {
                assert_eq!(asked, ask::PUMP);
                return;
            }
        }
        panic!("no record was used again");
    }

    /// What nobody has is freed when it has been so for a while; what a child may still be about to use is not.
    #[test]
    fn a_record_that_was_left_is_freed_after_a_while() {
        let [left, held, late] = [(); 3].map(|()| alloc().unwrap());
        let me = std::process::id();
        for c in [left, held, late] {
            c.holders.add_once(me);
            c.set_phase(Phase::Raw);
        }
        left.holders.remove(me);
        assert!(left.is_left() && !held.is_left());
        let now = now_ns();
        assert!(!give_back(left, now) && left.phase() == Phase::Raw, "at once");
        late.holders.remove(me);
        assert!(!give_back(late, now + REST_NS) && give_back(left, now + REST_NS), "after a while");
        assert_eq!(left.phase(), Phase::Free);
        late.holders.add(me);
        assert!(!give_back(late, now + 2 * REST_NS), "somebody has it");
        for c in [held, late] {
            forget(c);
        }
    }
}
