use super::*;
use crate::io::tests::{armed, know};
use crate::layout::Slot;
use std::os::fd::AsRawFd;

/// The program ends its direction after the connection has become ours, and before the peer is known: the kernel tells of
/// that end, behind which no mark can stand.
#[test]
fn an_end_that_was_the_kernels_is_followed_by_no_mark() {
    let l: &'static Link = Box::leak(Box::new(crate::link::tests::pair().into_iter().next().unwrap()));
    let unused = Slot::default();
    let (conn, ours, _theirs) = armed(&unused);
    conn.attach(None, 0, core::ptr::null());
    let slot = l.side.alloc_slot().unwrap();
    conn.attach(Some(l), slot, l.side.slot(slot));
    know(ours.as_raw_fd(), conn);
    assert_eq!(fds::shutdown(ours.as_raw_fd(), libc::SHUT_WR), crate::ops::Outcome::Done(0));
    assert!(!attach_peer(conn, l, 0, [7; 16]), "the peer is known, and may be marked to");
    assert!(conn.peer().is_none());
    table::take(ours.as_raw_fd());
    conn.attach(None, 0, core::ptr::null());
    conn.set_phase(Phase::Closed);
}

/// The peer has accepted, and the program has closed, or its stream has ended, just before: the peer is told, or it would
/// look for our mark, and keep the slot, for ever.
#[test]
fn who_accepts_too_late_is_told() {
    let l: &'static mut Link = Box::leak(Box::new(crate::link::tests::pair().into_iter().next().unwrap()));
    let mut socks = [-1; 2];
    // SAFETY: room for two.
    unsafe { sys!(libc::SYS_socketpair, libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, socks.as_mut_ptr()) }.unwrap();
    l.sock = socks[0];
    let l: &'static Link = l;
    let unused = Slot::default();
    let (conn, ours, _theirs) = armed(&unused);
    conn.attach(None, 0, core::ptr::null());
    let slot = l.side.alloc_slot().unwrap();
    conn.attach(Some(l), slot, l.side.slot(slot));
    l.slots.fetch_add(1, SeqCst);
    l.set_conn(slot, conn);
    know(ours.as_raw_fd(), conn);
    conn.lock_both().sw().disarm();
    let mut bg = Bg::with(-1, -1);
    let accept = Msg { kind: kind::ACCEPT, a: slot, b: 5, nonce: [7; 16], ..Msg::default() };
    bg.on_message(l, &accept, &mut [-1; 4]);
    let answer = link::recv_msg(socks[1], &mut [-1; 4]).unwrap().unwrap();
    assert_eq!((answer.kind, answer.a), (kind::REJECT, 5));
    table::take(ours.as_raw_fd());
    conn.set_phase(Phase::Closed);
    socks.into_iter().for_each(sys::close_raw);
}

/// The peer's process became another program when it had proposed, and before it heard that this was accepted: it has left its
/// socket to that program, and no mark comes, nor an end.
#[test]
fn who_is_lost_before_any_mark_leaves_the_connection_to_tcp() {
    for begun in [false, true] {
        let l: &'static mut Link = Box::leak(Box::new(crate::link::tests::pair().into_iter().next().unwrap()));
        l.sock = -1;
        let l: &'static Link = l;
        let theirs = Slot::default();
        let (conn, ours, _theirs) = armed(&theirs);
        let slot = l.side.alloc_slot().unwrap();
        conn.attach(Some(l), slot, l.side.slot(slot));
        conn.attach_peer(0, &theirs);
        l.slots.fetch_add(1, SeqCst);
        know(ours.as_raw_fd(), conn);
        if begun {
            theirs.flags.store(MARK_BEGUN, SeqCst);
        }
        Bg::with(-1, -1).lost(l);
        assert_eq!(conn.phase() == Phase::Managed, begun);
        table::take(ours.as_raw_fd());
        conn.attach(None, 0, core::ptr::null());
        conn.set_phase(Phase::Closed);
    }
}

/// The peer has proposed, a thread of ours was in the way, and the program has closed before the right moment came: the peer
/// is told, or it would keep slot and ring for ever.
#[test]
fn who_has_proposed_too_late_is_told() {
    let l: &'static mut Link = Box::leak(Box::new(crate::link::tests::pair().into_iter().next().unwrap()));
    let mut socks = [-1; 2];
    // SAFETY: room for two.
    unsafe { sys!(libc::SYS_socketpair, libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, socks.as_mut_ptr()) }.unwrap();
    l.sock = socks[0];
    let l: &'static Link = l;
    let conn = crate::arena::alloc().unwrap();
    conn.set_phase(Phase::Raw);
    let mut bg = Bg::with(-1, -1);
    let propose = Msg { kind: kind::PROPOSE, a: 5, nonce: [7; 16], ..Msg::default() };
    let end = (propose.tuple, true);
    bg.known.insert(end, Known { conn, gen: conn.gen.load(Relaxed) });
    bg.end_of.insert(conn as *const Conn as usize, end);
    assert!(bg.found(end).is_some());
    assert!(bg.wait_for_calm(end, l, Some(propose), Not::Now));
    bg.drop_looks(conn);
    let answer = link::recv_msg(socks[1], &mut [-1; 4]).unwrap().unwrap();
    assert_eq!((answer.kind, answer.a), (kind::REJECT, 5));
    conn.set_phase(Phase::Closed);
    socks.into_iter().for_each(sys::close_raw);
}

/// The peer refuses when the program has closed, of which the background thread has yet to hear: nothing is kept for it.
#[test]
fn what_is_refused_after_a_close_is_free() {
    let l: &'static mut Link = Box::leak(Box::new(crate::link::tests::pair().into_iter().next().unwrap()));
    l.sock = -1;
    let l: &'static Link = l;
    let unused = Slot::default();
    let (conn, ours, _theirs) = armed(&unused);
    let slot = l.side.alloc_slot().unwrap();
    conn.attach(None, 0, core::ptr::null());
    conn.attach(Some(l), slot, l.side.slot(slot));
    l.slots.fetch_add(1, SeqCst);
    l.set_conn(slot, conn);
    know(ours.as_raw_fd(), conn);
    table::take(ours.as_raw_fd());
    conn.set_phase(Phase::Closed);
    let mut bg = Bg::with(-1, -1);
    let reject = Msg { kind: kind::REJECT, a: slot, b: Why::Refused as u32, ..Msg::default() };
    bg.on_message(l, &reject, &mut [-1; 4]);
    bg.detach(&mut conn.lock_both(), conn);
    assert!(bg.parked.is_empty() && bg.left_by_peer.is_empty());
    assert_eq!(l.slots.load(SeqCst), 0);
}
