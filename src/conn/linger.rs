//! A connection that the program has closed while bytes of a return are still to be written: the process keeps it by an fd of
//! the library's until they are. Others that have it know nothing of that fd, and may live on when that process is gone.

use super::*;

impl Conn {
    /// This process lets it linger, by an fd of the library's.
    pub fn begin_to_linger(&self) {
        self.lingering.store(crate::process::life(), SeqCst);
    }

    /// It does no more.
    pub fn end_to_linger(&self) {
        self.lingering.store(0, Release);
    }

    /// Whether this process, and not one that it descends from, and that may be gone, lets it linger.
    #[inline]
    pub fn lingers(&self) -> bool {
        self.lingering.load(SeqCst) == crate::process::life()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A parent was killed while it kept what it had closed: its child closed the fd that its own program had.
    #[test]
    fn what_another_process_keeps_is_not_this_ones() {
        let conn = crate::arena::alloc().unwrap();
        assert!(!conn.lingers());
        conn.begin_to_linger();
        assert!(conn.lingers());
        conn.lingering.store(crate::process::life() + 2, SeqCst);
        assert!(!conn.lingers(), "another process's");
        conn.end_to_linger();
        crate::arena::forget(conn);
    }
}
