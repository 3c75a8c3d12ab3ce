//! Tests of what a return must not do to who closes, ends, sends or waits meanwhile.

use super::tests::{armed, arrive, know, settle, NONCE};
use super::*;
use crate::layout::Slot;
use crate::wire::Frame;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// A connection on rings in both directions, of which nobody has sent a byte, and the peer.
struct OnRing {
    conn: &'static Conn,
    ours: TcpStream,
    theirs: TcpStream,
    own: &'static Slot,
    slot: &'static Slot,
}

impl OnRing {
    fn new() -> OnRing {
        let [own, slot]: [&'static Slot; 2] = [(); 2].map(|()| &*Box::leak(Box::default()));
        let (conn, ours, mut theirs) = armed(slot);
        conn.attach(None, 0, own);
        conn.attach_peer(0, slot);
        conn.confirmed.store(true, SeqCst);
        slot.flags.store(MARK_BEGUN | MARK_TAKEN, SeqCst);
        arrive(conn, &mut theirs, &wire::mark(&NONCE));
        pump::run(&mut conn.lock_both());
        theirs.read_exact(&mut [0; wire::MARK_LEN]).unwrap();
        know(ours.as_raw_fd(), conn);
        assert!(conn.lock_both().sw().is_ring());
        OnRing { conn, ours, theirs, own, slot }
    }

    /// The peer has said `Return`, and the answer has gone out.
    fn resumed() -> OnRing {
        let mut r = OnRing::new();
        arrive(r.conn, &mut r.theirs, &Frame::Return { consumed: 0 }.encode());
        pump::run(&mut r.conn.lock_both());
        r.theirs.read_exact(&mut [0; 2 * wire::FRAME_LEN]).unwrap();
        assert!(r.conn.lock_tx().has_resumed());
        r
    }

    fn put(&self) -> Put {
        put(self.ours.as_raw_fd(), self.conn, Bufs::new(&one(c"x".as_ptr().cast(), 1)), 0)
    }

    /// How many bytes have come to the peer.
    fn sent(&mut self) -> usize {
        self.theirs.set_nonblocking(true).unwrap();
        self.theirs.read(&mut [0; 100]).unwrap_or(0)
    }
}

impl Drop for OnRing {
    fn drop(&mut self) {
        table::take(self.ours.as_raw_fd());
        self.conn.attach(None, 0, core::ptr::null());
        self.conn.set_phase(Phase::Closed);
    }
}

/// Its kernel would answer with a reset, though it has read everything.
#[test]
fn no_frame_goes_to_who_has_closed() {
    for gone in [CLOSED, BYE] {
        let mut r = OnRing::new();
        r.slot.flags.fetch_or(gone, SeqCst);
        r.conn.lock_both().sw().leave();
        pump::run(&mut r.conn.lock_both());
        assert_eq!(r.sent(), 0, "bytes with {gone:#x}");
        assert_eq!(r.own.flags.load(SeqCst) & LEAVING, 0, "it goes on waiting for frames");
    }
    // Who ends begins nothing, but answers.
    let mut r = OnRing::new();
    r.own.flags.fetch_or(BYE, SeqCst);
    r.conn.lock_both().sw().leave();
    pump::run(&mut r.conn.lock_both());
    assert_eq!(r.sent(), 0);
    r.slot.flags.fetch_or(LEAVING, SeqCst);
    pump::run(&mut r.conn.lock_both());
    r.theirs.set_nonblocking(false).unwrap();
    r.theirs.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
    r.theirs.read_exact(&mut [0; wire::FRAME_LEN]).unwrap();
    assert_eq!(r.sent(), 0);
}

/// The other half of the same: who closes keeps the kernel's socket for the frames that are announced.
#[test]
fn who_closes_waits_for_frames_that_are_announced() {
    let r = OnRing::new();
    assert!(!r.conn.lock_both().is_owed());
    r.slot.flags.fetch_or(LEAVING, SeqCst);
    assert!(r.conn.lock_both().is_owed());
    // And for the last one, after which the peer is on TCP.
    let r = OnRing::resumed();
    assert!(r.conn.lock_both().is_owed());
}

/// The peer was killed before it read `Resume`, behind which there was nothing.
#[test]
fn a_reset_for_frames_alone_is_the_end() {
    for sent in [0, 1] {
        let r = OnRing::resumed();
        r.conn.count_tx_tcp(sent);
        crate::fds::reset_at_close(r.theirs.as_raw_fd());
        let fd = r.theirs.as_raw_fd();
        // SAFETY: the peer's socket, which is closed once more in vain when it is dropped.
        let _ = unsafe { sys!(libc::SYS_shutdown, fd, libc::SHUT_RD) };
        let unspec = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
        // SAFETY: the address is readable for its length.
        let _ = unsafe { sys!(libc::SYS_connect, fd, &unspec, size_of_val(&unspec)) };
        settle(r.conn, libc::POLLERR);
        pump::run(&mut r.conn.lock_both());
        let want = if sent > 0 { libc::ECONNRESET } else { 0 };
        assert_eq!(r.conn.take_error(), want, "{sent} bytes sent by TCP since");
        assert!(r.conn.has_ended(END_EOF));
    }
}

/// The kernel of who has closed had not said so yet when something came for it, and what it says then is no end. It is behind
/// the end for the program, which was told of that.
#[test]
fn what_is_sent_to_the_closed_before_its_kernel_closes_is_refused_behind_the_end() {
    for ended in [0, FIN] {
        let r = OnRing::new();
        let fd = r.ours.as_raw_fd();
        r.slot.flags.fetch_or(CLOSED | ended, SeqCst);
        assert!(matches!(r.put(), Put::Sent(1)));
        pump::disconnect_number(r.theirs.as_raw_fd());
        settle(r.conn, libc::POLLERR);
        pump::run(&mut r.conn.lock_both());
        let mut b = [0u8; 4];
        let v = one(b.as_mut_ptr().cast(), b.len());
        // SAFETY: the buffer is writable; no message.
        assert_eq!(unsafe { recv(fd, &v, core::ptr::null_mut(), 0) }, Outcome::Done(0));
        assert_eq!(r.conn.readiness(0), (libc::EPOLLERR | libc::EPOLLHUP) as u32);
        assert_eq!([errors::asked_error(fd, r.conn), errors::asked_error(fd, r.conn)], [Some(libc::EPIPE), None]);
    }
}

/// What the peer has reset it has reset, also in the middle of a return.
#[test]
fn a_reset_within_a_return_is_told() {
    let r = OnRing::resumed();
    r.slot.flags.fetch_or(ABORT | CLOSED, SeqCst);
    r.theirs.shutdown(std::net::Shutdown::Both).unwrap();
    settle(r.conn, libc::POLLRDHUP);
    pump::run(&mut r.conn.lock_both());
    assert_eq!(r.conn.take_error(), libc::ECONNRESET);
}

/// The kernel hears later of a reset that the peer has told of, and the program was told.
#[test]
fn a_reset_that_was_told_is_no_error_any_more() {
    const ENDS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
    let r = OnRing::new();
    r.slot.flags.fetch_or(ABORT | CLOSED, SeqCst);
    assert_eq!(r.conn.readiness(0), ENDS);
    assert!(errors::reset_ahead(r.conn).is_some());
    assert_eq!(r.conn.readiness(0), libc::EPOLLHUP as u32);
    crate::fds::reset_at_close(r.theirs.as_raw_fd());
    let unspec = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
    // SAFETY: the peer's socket; the address is readable for its length.
    let _ = unsafe { sys!(libc::SYS_connect, r.theirs.as_raw_fd(), &unspec, size_of_val(&unspec)) };
    settle(r.conn, libc::POLLERR);
    assert_eq!(r.conn.readiness(0), libc::EPOLLHUP as u32);
    pump::run(&mut r.conn.lock_both());
    assert!(r.conn.has_ended(END_EOF));
    assert_eq!((r.conn.readiness(0), r.conn.take_error()), (libc::EPOLLHUP as u32, 0));
}

/// The peer has shut both directions, and is still to come back: its kernel refuses what is sent, and not before. It is so for
/// who has shut the other direction, of whose kernel's socket `poll` says the same.
#[test]
fn what_is_refused_waits_for_the_kernel_that_refuses_it() {
    for shut_here in [false, true] {
        let mut r = OnRing::resumed();
        let fd = r.ours.as_raw_fd();
        r.slot.flags.fetch_or(FIN | RDSHUT, SeqCst);
        if shut_here {
            r.conn.end.fetch_or(END_RDSHUT, SeqCst);
            r.ours.shutdown(std::net::Shutdown::Read).unwrap();
        }
        assert!(matches!(r.put(), Put::Busy), "it was sent, or the connection was reset");
        assert!(!r.conn.writable());
        r.theirs.write_all(&Frame::Resume { from: 0, until: 0 }.encode()).unwrap();
        settle(r.conn, libc::POLLIN);
        pump::run(&mut r.conn.lock_both());
        assert!(matches!(r.put(), Put::Busy), "the peer's kernel has not ended");
        r.theirs.shutdown(std::net::Shutdown::Both).unwrap();
        while sys::is_tcp_to_be_ended(fd) {
            std::thread::yield_now();
        }
        pump::run(&mut r.conn.lock_both());
        // By now the background thread may have made it the kernel's.
        assert!(matches!(r.put(), Put::Sent(1) | Put::Gone));
    }
}

/// The kernel's socket has room: its call would have ended before the handler ran.
#[test]
fn no_handler_ends_a_send_that_only_waits_for_the_return() {
    let mut r = OnRing::resumed();
    r.slot.flags.fetch_or(FIN | RDSHUT, SeqCst);
    let fd = r.ours.as_raw_fd();
    let (tell, told) = std::sync::mpsc::channel();
    let t = std::thread::spawn(move || {
        tell.send(crate::thread::me(|t| [&raw const t.handled as usize, &raw const t.hard as usize])).unwrap();
        // SAFETY: the byte is readable; no message.
        unsafe { send(fd, &one(c"x".as_ptr().cast(), 1), core::ptr::null(), libc::MSG_NOSIGNAL) }
    });
    let counts = told.recv().unwrap().map(|at| at as *const AtomicU32);
    let asleep = || r.conn.local().fut_tx.load(SeqCst) > 0;
    while !asleep() && !t.is_finished() {
        std::thread::yield_now();
    }
    for n in counts {
        // SAFETY: the thread's own counters; it ends only after this.
        unsafe { &*n }.fetch_add(1, SeqCst);
    }
    r.conn.notify();
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!t.is_finished(), "{:?}", t.join());
    r.theirs.write_all(&Frame::Resume { from: 0, until: 0 }.encode()).unwrap();
    r.theirs.shutdown(std::net::Shutdown::Both).unwrap();
    settle(r.conn, libc::POLLRDHUP);
    pump::run(&mut r.conn.lock_both());
    r.conn.notify();
    assert_eq!(t.join().unwrap(), Outcome::Done(1));
}

/// Who has closed while it returns keeps the kernel's socket for its frames: it would take what is sent for a part of one.
#[test]
fn who_has_closed_while_it_returns_refuses_what_is_sent() {
    for ours in [true, false] {
        let mut r = OnRing::new();
        r.slot.flags.fetch_or(CLOSED, SeqCst);
        (if ours { r.own } else { r.slot }).flags.fetch_or(LEAVING, SeqCst);
        assert!(matches!(r.put(), Put::Sent(1)), "the call that is refused is the last that succeeds");
        assert_eq!(r.conn.take_error(), libc::EPIPE);
        assert!(r.conn.has_ended(END_FAILED));
        assert_eq!(r.sent(), 0, "bytes in the kernel's socket");
    }
}

/// Who has reset it while it returns keeps that socket, too, but takes nothing: a call that has slept since tells of a part.
#[test]
fn who_has_reset_while_it_returns_takes_nothing() {
    for ours in [true, false] {
        let mut r = OnRing::new();
        r.slot.flags.fetch_or(CLOSED | ABORT, SeqCst);
        (if ours { r.own } else { r.slot }).flags.fetch_or(LEAVING, SeqCst);
        assert!(matches!(r.put(), Put::Error(libc::ECONNRESET)));
        assert_eq!(r.sent(), 0, "bytes in the kernel's socket");
    }
}

/// Who has shut its own reading reads what was sent before, though the word that ends the return stands before it.
#[test]
fn what_comes_behind_the_end_of_a_return_is_there_for_who_has_shut_its_reading() {
    let mut r = OnRing::new();
    r.conn.lock_both().sw().leave();
    pump::run(&mut r.conn.lock_both());
    assert_eq!(r.conn.lock_rx().path(), RxPath::Returning);
    r.conn.end.fetch_or(END_RDSHUT, SeqCst);
    let answers = [Frame::Return { consumed: 0 }, Frame::Resume { from: 0, until: 0 }];
    answers.iter().for_each(|f| r.theirs.write_all(&f.encode()).unwrap());
    arrive(r.conn, &mut r.theirs, b"sent");
    let mut b = [0u8; 8];
    let v = one(b.as_mut_ptr().cast(), b.len());
    // SAFETY: the buffer is writable; no message.
    let receive = || unsafe { recv(r.ours.as_raw_fd(), &v, core::ptr::null_mut(), libc::MSG_DONTWAIT) };
    assert_eq!([receive(), receive()], [Outcome::Done(4), Outcome::Done(0)]);
}

/// Where the kernel has no room a mark that a return needs makes none.
#[test]
fn a_return_makes_no_room() {
    let r = OnRing::new();
    assert!(r.conn.writable());
    let full = [0u8; 1 << 16];
    let fd = r.ours.as_raw_fd();
    // SAFETY: `full` is readable.
    while unsafe { sys::send(fd, full.as_ptr().cast(), full.len(), libc::MSG_DONTWAIT) }.is_ok() {}
    r.conn.fulls.fetch_add(1, SeqCst);
    r.conn.lock_both().sw().leave();
    assert!(!r.conn.writable());
    assert!(matches!(r.put(), Put::Full));
}

/// A thread that sends without end writes the mark itself: no other need get the locks for that.
#[test]
fn who_sends_begins_the_mark() {
    let own = Slot::default();
    let slot = Slot::default();
    let (conn, ours, _theirs) = armed(&slot);
    conn.attach(None, 0, &own);
    conn.attach_peer(0, &slot);
    let fd = ours.as_raw_fd();
    know(fd, conn);
    let x = one(c"x".as_ptr().cast(), 1);
    assert!(matches!(put(fd, conn, Bufs::new(&x), 0), Put::Sent(1)));
    conn.confirmed.store(true, SeqCst);
    assert!(matches!(put(fd, conn, Bufs::new(&x), 0), Put::Gone), "it was sent before the mark");
    assert_eq!(conn.lock_tx().path(), TxPath::Ring);
    table::take(fd);
    conn.attach(None, 0, core::ptr::null());
    conn.set_phase(Phase::Closed);
}

/// The end stands in the ring before the mark has come: whoever was told of it could not take it yet, and is told again.
#[test]
fn an_end_behind_a_mark_is_news_with_the_mark() {
    use crate::edges::{News, Told};
    let slot = Slot::default();
    let (conn, _ours, mut theirs) = armed(&slot);
    let own = Slot::default();
    conn.attach(None, 0, &own);
    conn.attach_peer(0, &slot);
    slot.flags.store(MARK_BEGUN | FIN, SeqCst);
    let told = Told::all(News::of(conn), libc::EPOLLIN as u32);
    arrive(conn, &mut theirs, &wire::mark(&NONCE));
    assert!(told.has_news(News::of(conn), libc::EPOLLIN as u32, libc::EPOLLIN as u32));
    pump::run(&mut conn.lock_both());
    assert!(told.has_news(News::of(conn), libc::EPOLLIN as u32, libc::EPOLLIN as u32));
    conn.attach(None, 0, core::ptr::null());
    conn.set_phase(Phase::Closed);
}

impl OnRing {
    /// Five bytes are in the ring, and the return has begun here.
    fn returning() -> OnRing {
        let r = OnRing::new();
        *r.conn.lock_rx().ring() = crate::ring::RxRing::new(core::ptr::null(), r.slot, r.own);
        r.slot.produced.store(5, SeqCst);
        r.conn.lock_both().sw().leave();
        pump::run(&mut r.conn.lock_both());
        assert_eq!(r.conn.lock_rx().path(), RxPath::Returning);
        r
    }

    /// The peer repeats them in these pieces, with a pause before each.
    fn repeats(&self, ms: u64, pieces: &'static [&'static [u8]]) -> std::thread::JoinHandle<()> {
        let mut peer = self.theirs.try_clone().unwrap();
        std::thread::spawn(move || {
            peer.write_all(&Frame::Return { consumed: 0 }.encode()).unwrap();
            peer.write_all(&Frame::Resume { from: 0, until: 5 }.encode()).unwrap();
            for piece in pieces {
                std::thread::sleep(std::time::Duration::from_millis(ms));
                peer.write_all(piece).unwrap();
            }
        })
    }

    fn receive(&self, flags: c_int) -> (Outcome, [u8; 50]) {
        let mut b = [0u8; 50];
        let v = one(b.as_mut_ptr().cast(), b.len());
        // SAFETY: the buffer is writable; no message.
        (unsafe { recv(self.ours.as_raw_fd(), &v, core::ptr::null_mut(), flags) }, b)
    }
}

/// What is on its way from the ring to TCP had arrived: a receive whose time is over has it all the same.
#[test]
fn a_receive_without_time_waits_for_what_returns() {
    let r = OnRing::returning();
    r.conn.rcvtimeo.store(1, SeqCst);
    let t = r.repeats(5, &[b"bytes"]);
    let (got, b) = r.receive(libc::MSG_WAITALL);
    t.join().unwrap();
    assert_eq!((got, &b[..5]), (Outcome::Done(5), &b"bytes"[..]));
}

/// A look sees what had arrived, also while some of it is on its way. (On a busy machine it may be so for too long.)
#[test]
fn a_look_sees_all_that_returns() {
    for flags in [libc::MSG_PEEK, libc::MSG_PEEK | libc::MSG_DONTWAIT] {
        let sees_all = |_| {
            let r = OnRing::returning();
            let t = r.repeats(30, &[b"b", b"ytes"]);
            settle(r.conn, libc::POLLIN);
            while r.conn.lock_rx().path() != RxPath::Replay {
                pump::run(&mut r.conn.lock_both());
            }
            settle(r.conn, libc::POLLIN);
            let (got, b) = r.receive(flags);
            t.join().unwrap();
            assert_eq!(r.receive(libc::MSG_DONTWAIT).0, Outcome::Done(5));
            (got, &b[..5]) == (Outcome::Done(5), &b"bytes"[..])
        };
        assert!((0..3).any(sees_all), "with flags {flags:#x}");
    }
}

/// A close that leaves bytes of TCP unread is a reset, and not one for frames alone: the peer is told so.
#[test]
fn what_is_left_unread_on_tcp_is_a_reset() {
    let slot = Slot::default();
    let (conn, _ours, mut theirs) = armed(&slot);
    conn.lock_both().sw().disarm();
    assert!(!crate::fds::unread(&mut conn.lock_both()));
    arrive(conn, &mut theirs, b"x");
    assert_eq!(conn.lock_rx().path(), RxPath::Tcp);
    assert!(crate::fds::unread(&mut conn.lock_both()));
    conn.set_phase(Phase::Closed);
}
