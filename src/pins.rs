//! Calls that sleep hold their connection open, as they hold a file in the kernel.
//!
//! A thread that closes the last number of a connection while another sleeps in a call on it closes the number, and no more:
//! the call goes on, the peer is told of nothing, and the last of such calls closes the connection as it leaves it. Meanwhile
//! the socket has a number of the library's own. Only where a program has several threads is there anything to hold: a
//! handler that closes the number of the call that it interrupts ends that call, in the kernel too, which begins it anew.
//!
//! What a call holds is noted with its thread, not in the call, because the thread may never come back to it: a handler
//! jumps out, or ends the thread, or it is cancelled. Before a handler of the program's runs the kernel has left the call that
//! it interrupts, and holds nothing; so the library's, which runs before it, lets go.

use crate::conn::{Both, Conn, Phase};
use crate::sync::full_fence;
use crate::thread::{me, Critical};
use crate::{bg, early, fdhigh, fds, process, table};
use core::sync::atomic::Ordering::*;
use libc::c_int;

/// A mark on the address of a list in [`crate::thread::Thread::held`]; without it that is the one connection's.
const LIST: usize = 1;

type List = Vec<&'static Conn>;

/// While it lives the thread is in a call, at the end of which nothing is held any more.
pub struct Holding(());

impl Holding {
    /// A call begins. (A handler that was installed by a raw system call may have interrupted another.)
    #[inline]
    pub fn begin() -> Holding {
        end_of_piece();
        Holding(())
    }
}

impl Drop for Holding {
    #[inline]
    fn drop(&mut self) {
        end_of_piece();
    }
}

#[inline]
fn end_of_piece() {
    if is_held() && !is_whole() {
        let_go_now();
    }
}

/// While it lives the thread is in a call that the library makes of several, all of which are about the connection that its
/// number was at the beginning.
pub struct Whole(());

impl Whole {
    /// Such a call on `fd` begins. `None`: no other thread can close it, or it is no connection of ours.
    pub fn begin(fd: c_int) -> Option<Whole> {
        if !process::has_threads() {
            return None;
        }
        while let Some(c) = early::conn(fd) {
            if hold_all([(fd, c)].into_iter()) {
                me(|t| t.whole.set(true));
                return Some(Whole(()));
            }
        }
        None
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        let_go();
    }
}

/// Whether the thread is in a piece of such a call, and no handler has run within it: see [`find`].
#[inline]
pub fn is_whole() -> bool {
    me(|t| t.whole.get())
}

/// Whether the thread's call holds anything.
#[inline]
pub fn is_held() -> bool {
    me(|t| t.held.get() != 0)
}

/// The thread's call holds `conn`, whose number is `fd`, open until its end. False: it is its number no more, and the call is
/// to look again what is.
pub fn hold(fd: c_int, conn: &'static Conn) -> bool {
    me(|t| t.held.get()) == conn as *const Conn as usize || hold_all([(fd, conn)].into_iter())
}

/// The same of several.
pub fn hold_all(all: impl Iterator<Item = (c_int, &'static Conn)> + Clone) -> bool {
    let_go();
    if !process::has_threads() {
        return all.into_iter().all(|(fd, c)| table::is(fd, c));
    }
    // No handler comes before what is held is noted.
    let _critical = Critical::new();
    let held: usize = all.clone().take_while(|(fd, c)| take(*fd, c)).count();
    if all.clone().nth(held).is_some() {
        all.take(held).for_each(|(_, c)| release(c));
        return false;
    }
    let mut each = all.clone().map(|(_, c)| c);
    let noted = match held {
        0 | 1 => each.next().map_or(0, |c| c as *const Conn as usize),
        _ => Box::into_raw(Box::new(each.collect::<List>())) as usize | LIST,
    };
    me(|t| t.held.set(noted));
    true
}

/// The thread's call is over, begins anew, or is never come back to. No lock is held.
#[inline]
pub fn let_go() {
    if is_held() {
        let_go_now();
    }
}

#[cold]
fn let_go_now() {
    let _critical = Critical::new();
    me(|t| t.whole.set(false));
    match me(|t| t.held.replace(0)) {
        0 => {}
        at if at & LIST != 0 => {
            // SAFETY: noted by `hold_all`, and taken once.
            let list = unsafe { Box::from_raw((at & !LIST) as *mut List) };
            list.iter().for_each(|c| release(c));
        }
        // SAFETY: records are never freed.
        at => release(unsafe { &*(at as *const Conn) }),
    }
}

/// What the thread's call on `fd` is about, and a number that it has.
pub fn find(fd: c_int) -> (c_int, Option<&'static Conn>) {
    let held = me(|t| t.held.get());
    // SAFETY: records are never freed.
    let held = (held != 0 && held & LIST == 0).then(|| unsafe { &*(held as *const Conn) });
    if let Some(c) = held.filter(|c| !table::is(fd, c)) {
        if let Some(own) = number_of(c) {
            return (own, Some(c));
        }
        // It goes on as another record.
        let_go();
    }
    (fd, table::conn(fd))
}

/// A number of what the thread's call on `fd` is about, which the kernel can be given.
pub fn number(fd: c_int) -> c_int {
    if is_held() {
        find(fd).0
    } else {
        fd
    }
}

/// A number of a connection that is held. `None`: it goes on as another record. (This one may be in use again, by the
/// process whose it is.) No lock is held.
pub fn number_of(conn: &Conn) -> Option<c_int> {
    let number = || Some(conn.local().fd.load(SeqCst)).filter(|fd| conn.is_at(*fd));
    number().or_else(|| {
        // Who closes its last number has its locks until it has another.
        drop(conn.lock_both());
        number()
    })
}

/// One more call holds `conn` open, if `fd` still is its number; to be followed by [`release`].
fn take(fd: c_int, conn: &'static Conn) -> bool {
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
fn release(conn: &'static Conn) {
    // In a child that was forked by a handler within the call nobody holds it.
    if conn.local().pins.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)) == Ok(1) {
        close_unheld(conn);
    }
}

/// `fd`, the last number of a connection, has left the table and is about to be closed. Whether calls hold the connection
/// open: then it has a number of the library's own, and [`close_unheld`] is to be called without its locks.
pub fn keep_open(b: &mut Both, fd: c_int) -> bool {
    let conn = b.rx.conn();
    if !process::has_threads() {
        return false;
    }
    full_fence();
    if conn.local().pins.load(SeqCst) == 0 {
        return false;
    }
    set_aside(b, fd)
}

/// The socket gets a number of the library's own instead of `fd`, its last one, until [`close_unheld`]. False: there is none.
pub fn set_aside(b: &mut Both, fd: c_int) -> bool {
    let conn = b.rx.conn();
    // A forked child would keep the peer from being told when it is closed.
    let Ok(own) = fdhigh::not_for_children(|| fdhigh::dup_high(fd)) else { return false };
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

    /// The record may be in use again by then, for the process whose it is: what it says is another connection's.
    #[test]
    fn what_goes_on_as_another_record_is_found_there() {
        let [old, new] = [(); 2].map(|()| crate::arena::alloc().unwrap());
        table::for_tests();
        let fd = fdhigh::dup_high(2).unwrap();
        assert!(table::put_conn(fd, old));
        assert!(take(fd, old));
        me(|t| t.held.set(old as *const Conn as usize));
        let (at, conn) = find(fd);
        assert!(at == fd && conn.is_some_and(|c| core::ptr::eq(c, old)));
        table::put_conn(fd, new);
        old.set_phase(Phase::Raw);
        let (at, conn) = find(fd);
        assert!(at == fd && conn.is_some_and(|c| core::ptr::eq(c, new)));
        assert!(!is_held() && old.local().pins.load(SeqCst) == 0);
        table::take(fd);
        crate::sys::close(fd);
        [old, new].iter().for_each(|c| c.set_phase(Phase::Closed));
    }
}
