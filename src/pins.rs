//! Calls that sleep hold their connection open, as they hold a file in the kernel.
//!
//! A thread that closes the last number of a connection while another sleeps in a call on it closes the number, and no more:
//! the call goes on, the peer is told of nothing, and the last of such calls closes the connection as it leaves it. Meanwhile
//! the socket has a number of the library's own. Only where a program has several threads is there anything to hold: a
//! handler that closes the number of the call that it interrupts ends that call, in the kernel too, which begins it anew.

use crate::conn::{Both, Conn, Phase};
use crate::signals::Since;
use crate::sync::full_fence;
use crate::{bg, fdhigh, fds, process, table};
use core::cell::Cell;
use core::sync::atomic::Ordering::*;
use libc::c_int;

/// The connection that a call holds open, if it does, and since when.
#[derive(Default)]
pub struct Pin(Cell<Option<(&'static Conn, Since)>>);

impl Pin {
    /// Holds `conn`, whose number is `fd`, open until the end of the call. False: it is its number no more, and the call is
    /// to look again what is.
    pub fn hold(&self, fd: c_int, conn: &'static Conn) -> bool {
        if self.get().is_some_and(|c| core::ptr::eq(c, conn)) {
            return true;
        }
        self.let_go();
        let since = Since::now();
        if !process::has_threads() {
            return table::is(fd, conn);
        }
        let held = take(fd, conn);
        if held {
            self.0.set(Some((conn, since)));
        }
        held
    }

    /// The connection that is held. After a handler has run the call begins anew, by the number that it was given.
    fn get(&self) -> Option<&'static Conn> {
        let (conn, since) = self.0.get()?;
        if since.is_over(true) {
            self.let_go();
            return None;
        }
        Some(conn)
    }

    /// The call is over, or begins anew. No lock is held.
    pub fn let_go(&self) {
        if let Some((c, _)) = self.0.take() {
            release(c);
        }
    }

    /// Whether the call holds a connection.
    pub fn is_held(&self) -> bool {
        self.get().is_some()
    }

    /// What a call on `fd` is about, and a number that it has.
    pub fn find(&self, fd: c_int) -> (c_int, Option<&'static Conn>) {
        match self.get().filter(|c| !table::is(fd, c)) {
            // It goes on as another record.
            Some(c) if c.phase() == Phase::Closed => self.let_go(),
            Some(c) => return (c.local().fd.load(Relaxed), Some(c)),
            None => {}
        }
        (fd, table::conn(fd))
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// One more call holds `conn` open, if `fd` still is its number; to be followed by [`release`].
pub fn take(fd: c_int, conn: &'static Conn) -> bool {
    conn.local().pins.fetch_add(1, SeqCst);
    // Who closes the number sees the pin, or this sees that it is closed.
    full_fence();
    let there = table::is(fd, conn);
    if !there {
        release(conn);
    }
    there
}

/// A call holds `conn` open no more.
pub fn release(conn: &'static Conn) {
    // In a child that was forked by a handler within the call nobody holds it.
    if conn.local().pins.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)) == Ok(1) {
        close_unheld(conn);
    }
}

/// `fd`, the last number of a connection, has left the table and is about to be closed. Whether calls hold the connection
/// open: then it has a number of the library's own, and [`close_unheld`] is to be called without its locks.
pub fn keep_open(b: &mut Both, fd: c_int) -> bool {
    let conn = b.rx.conn();
    full_fence();
    if conn.local().pins.load(SeqCst) == 0 {
        return false;
    }
    let Ok(own) = fdhigh::dup_high(fd) else { return false };
    // A forked child would keep the peer from being told when it is closed.
    fdhigh::not_for_children(own);
    if conn.phase() == Phase::Managed {
        bg::watch_instead(fd, own, conn);
    }
    conn.local().fd.store(own, SeqCst);
    conn.local().unnamed.store(true, SeqCst);
    true
}

/// Closes a connection without a number that no call holds open.
pub fn close_unheld(conn: &'static Conn) {
    let l = conn.local();
    full_fence();
    if l.pins.load(SeqCst) == 0 && l.unnamed.load(SeqCst) {
        fds::close_unnamed(conn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A handler within a call forks, and returns in the child: the call lets go of what the child has forgotten.
    #[test]
    fn a_child_holds_nothing() {
        let conn = crate::arena::alloc().unwrap();
        let l = conn.local();
        table::for_tests();
        let fd = fdhigh::dup_high(2).unwrap();
        assert!(table::put_conn(fd, conn));
        assert!(take(fd, conn));
        assert_eq!(l.pins.load(SeqCst), 1);
        l.begin_anew();
        release(conn);
        assert_eq!(l.pins.load(SeqCst), 0, "a close would wait for a call that is not there");
        table::take(fd);
        assert!(!take(fd, conn), "its number is closed");
        crate::sys::close(fd);
        conn.set_phase(Phase::Closed);
    }
}
