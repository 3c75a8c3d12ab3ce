//! Sets that several processes use. Whatever is in the kernel's set reports to all of them, so nothing may be out of it on a
//! ring: a connection in such a set stays on TCP.
//!
//! Each set that a fork has gone by has a record in memory that the family shares: who uses it, which is who made it and
//! each child from the moment when it first does, and how many of its items are managed. Who begins to use it says so first
//! and looks then whether items are managed; who has made an item managed has counted it first and looks then whether others
//! use the set. So one of them sees the other, and has it brought home.
//!
//! Only ancestors are asked, for whom there are bells: of two children one that has outlived the parent may have items
//! on rings which the other, that comes later, does not see until the first uses TCP for them again.

use super::*;
use crate::holders::Holders;
use crate::sync::{futex_wait, futex_wake};
use crate::{process, shm, visit};

/// What the processes that have inherited a set from one another know of it.
#[derive(Default)]
#[repr(C)]
pub(super) struct Record {
    users: Holders,
    /// How many items are managed, by whichever of them.
    managed: AtomicU32,
    /// One that has begun to use it wants them home.
    wanted: AtomicBool,
    /// This set, or one before it, was closed by a process that had such items: the kernel's does not have them, whoever uses
    /// it. (The number after it; 0: none was.)
    lacked: AtomicU32,
    /// The process that has made the record (`process::life`), and uses it for one set after another: ...
    owner: AtomicU32,
    /// ... this one.
    set: AtomicU32,
}

/// As many as a page has room for.
const BATCH: usize = 4096 / size_of::<Record>();
/// How long the first call of a process waits for items to come home.
const PATIENCE_NS: i64 = 1_000_000_000;

/// Records that no other process knows.
struct Spare {
    lock: Lock,
    records: UnsafeCell<Vec<&'static Record>>,
}

// SAFETY: `records` is guarded by `lock`.
unsafe impl Sync for Spare {}

static SPARE: Spare = Spare { lock: Lock::new(), records: UnsafeCell::new(Vec::new()) };

impl Record {
    /// A new one. `None`: there is no memory.
    fn take() -> Option<&'static Record> {
        let _g = SPARE.lock.lock();
        // SAFETY: guarded by `lock`.
        let spare = unsafe { &mut *SPARE.records.get() };
        if spare.is_empty() {
            let base = shm::anon_shared(BATCH * size_of::<Record>()).ok()?.base as *const Record;
            // SAFETY: so many records fit, zeros are a valid value, and the mapping stays.
            spare.extend((0..BATCH).map(|i| unsafe { &*base.add(i) }));
        }
        let r = spare.pop()?;
        r.owner.store(process::life(), Relaxed);
        Some(r)
    }
}

/// In a forked child: the spare ones are the parent's.
pub(super) fn reset_after_fork() {
    SPARE.lock.reset_after_fork();
    // SAFETY: this is the child's only thread. (The parent's list may be half changed, and is left alone.)
    unsafe { core::ptr::write(SPARE.records.get(), Vec::new()) };
}

impl Set {
    #[inline]
    fn record(&self) -> Option<&'static Record> {
        // SAFETY: null, or a record, which is never unmapped.
        let r = unsafe { self.shared.load(Acquire).as_ref() };
        r.filter(|r| r.set.load(Acquire) == self.shared_as.load(Relaxed))
    }

    /// What it is called among the processes that have inherited it; `None`: no fork has gone by it. It stays so when the
    /// record is another set's.
    pub(super) fn name(&self) -> Option<left::Name> {
        // SAFETY: null, or a record, which is never unmapped.
        let r = unsafe { self.shared.load(Acquire).as_ref() }?;
        Some((r as *const Record as usize, r.owner.load(Relaxed), self.shared_as.load(Relaxed)))
    }

    /// Before a fork, and before it keeps others from changing sets: the child may come to use this one.
    pub(super) fn may_be_shared(&self) {
        let me = process::holder_id();
        if self.is_inherited() {
            return;
        }
        if let Some(r) = self.record() {
            return r.users.add_once(me);
        }
        let Some(r) = Record::take() else { return };
        r.users.add_once(me);
        // What other threads count, they count under this lock.
        let _g = self.lock.lock();
        r.managed.store(self.managed.load(SeqCst), SeqCst);
        self.shared_as.store(r.set.load(Relaxed), Relaxed);
        self.shared.store((r as *const Record).cast_mut(), Release);
    }

    /// Whether other processes use it as well.
    #[inline]
    pub(super) fn is_shared(&self) -> bool {
        self.record().is_some_and(|r| r.users.at_most() > 0 && !r.users.is_only(process::holder_id()))
    }

    /// So many items more are managed, or less. Under the set's lock.
    #[inline]
    pub(super) fn count_managed(&self, n: i32) {
        if let Some(r) = self.record() {
            r.managed.fetch_add(n as u32, SeqCst);
            // Who waits is on the list.
            if n < 0 && r.users.at_most() > 1 {
                futex_wake(&r.managed, i32::MAX);
            }
        }
    }

    /// A child begins to use it: what ancestors have taken out of the kernel's set comes home. False: not all, or not in time.
    #[cold]
    pub(super) fn enter(&self) -> bool {
        let Some(r) = self.record() else { return false };
        let me = process::holder_id();
        r.users.add_once(me);
        let until = now_ns() + PATIENCE_NS;
        loop {
            let n = r.managed.load(SeqCst);
            if n == 0 || now_ns() >= until || r.users.is_only(me) {
                return n == 0 && !self.lacks();
            }
            r.wanted.store(true, SeqCst);
            visit::call_ancestors();
            let _ = futex_wait(&r.managed, n, visit::SLICE_NS);
        }
    }

    /// Whether the kernel's set lacks items that a process had taken out which has closed it since.
    pub(super) fn lacks(&self) -> bool {
        // SAFETY: null, or a record, which is never unmapped.
        let r = unsafe { self.shared.load(Acquire).as_ref() };
        r.is_none_or(|r| (self.shared_as.load(Relaxed).wrapping_sub(r.lacked.load(SeqCst)) as i32) < 0)
    }

    /// This process is about to close it. Before the connections forget that they are in it.
    pub(super) fn about_to_leave(&self) {
        if let Some(r) = self.record().filter(|_| !self.is_inherited() && self.managed.load(SeqCst) > 0) {
            r.lacked.fetch_max(self.shared_as.load(Relaxed).wrapping_add(1), SeqCst);
            self.leave_notes();
        }
    }

    /// This process uses it no more, and takes its managed items with it.
    pub(super) fn leave(&self) {
        let Some(r) = self.record() else { return };
        if !self.is_inherited() {
            r.managed.fetch_sub(self.managed.load(SeqCst), SeqCst);
            futex_wake(&r.managed, i32::MAX);
            r.users.remove_if_there(process::holder_id());
        }
        if r.owner.load(Relaxed) != process::life() || !r.users.is_nobody() {
            self.shared.store(core::ptr::null_mut(), Release);
            return;
        }
        // The next set that this record of a set stands for has it. A child that has inherited it, and never used it, sees that.
        r.managed.store(0, SeqCst);
        r.wanted.store(false, SeqCst);
        self.shared_as.store(r.set.fetch_add(1, SeqCst).wrapping_add(1), Relaxed);
    }
}

/// Whether the connection is in a set that other processes use as well.
pub fn is_shared(conn: &Conn) -> bool {
    let local = conn.local();
    let _lg = local.lock.lock();
    // SAFETY: guarded by `local.lock`; sets are never freed.
    unsafe { &*local.items.get() }.iter().any(|(s, _)| unsafe { &**s }.is_shared())
}

/// A child has begun to use sets: has `f` bring home what is managed in those that are wanted.
pub fn wanted(mut f: impl FnMut(&'static Conn)) {
    for s in inherited::sets() {
        // (What is wanted of those that use it is not for others to hear.)
        let wanted = || s.record().is_some_and(|r| r.wanted.swap(false, SeqCst));
        if s.is_inherited() || !wanted() {
            continue;
        }
        let managed: Vec<&'static Conn> = {
            let _g = s.lock.lock();
            // SAFETY: guarded by `lock`.
            let items = unsafe { &(*s.inner.get()).items };
            items.values().filter(|i| i.managed).map(|i| i.conn).collect()
        };
        managed.into_iter().for_each(&mut f);
    }
}

/// A connection has become managed. If others have begun to use its sets meanwhile it does not stay so: this process's
/// background thread is told. Under `local.lock`, `items` are those of the connection.
pub(super) fn look_back(items: &[(*const Set, c_int)]) {
    for (s, _) in items {
        // SAFETY: sets are never freed.
        let s = unsafe { &**s };
        if let Some(r) = s.record().filter(|_| s.is_shared()) {
            r.wanted.store(true, SeqCst);
            if let Some(fd) = visit::own_bell() {
                bell::ring_fd(fd);
            }
        }
    }
}
