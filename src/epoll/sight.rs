//! Whether a program that has a connection in a set waits for that set where the library sees it.
//!
//! Some (Bun) make sets and fill them by libc, and wait by system calls of their own.

use super::*;

impl Set {
    /// A call of ours waits for it, or looks.
    #[inline]
    pub(super) fn note_awaited(&self) {
        if !self.awaited.load(Relaxed) {
            self.awaited.store(true, Relaxed);
        }
    }

    /// A connection was added or changed.
    pub(super) fn note_evidence(&self, conn: &Conn) {
        if self.awaited.load(Relaxed) {
            conn.evidence.store(true, Relaxed);
            conn.in_sight();
        } else if conn.phase() == Phase::Managed {
            conn.suspect();
        }
    }
}

/// The sets that have it, in this process.
fn any_set(conn: &Conn, is: impl Fn(&Set) -> bool) -> bool {
    let local = conn.local();
    if local.lock.held_by_me() {
        // A handler that has interrupted a change of them.
        return false;
    }
    // SAFETY: null, or a set; these are never freed.
    if unsafe { local.young.set().as_ref() }.is_some_and(&is) {
        return true;
    }
    let _g = local.lock.lock();
    // SAFETY: guarded by `local.lock`; sets are never freed.
    unsafe { (*local.items.get()).iter().any(|(set, _)| is(&**set)) }
}

/// Whether a set that has it is waited for in sight.
pub fn is_awaited(conn: &Conn) -> bool {
    any_set(conn, |s| s.awaited.load(Relaxed))
}

/// Whether one has it that was not, so far.
pub fn is_unawaited(conn: &Conn) -> bool {
    any_set(conn, |s| !s.awaited.load(Relaxed))
}

/// Whether `epfd` is such a set, and has it.
pub fn has_unawaited(epfd: c_int, conn: &Conn) -> bool {
    let Entry::Set(set) = table::get(epfd) else { return false };
    any_set(conn, |s| core::ptr::eq(s, set) && !s.awaited.load(Relaxed))
}
