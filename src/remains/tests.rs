use super::*;
use crate::conn::Conn;
use crate::io::tests::{armed, arrive, know, settle as until, NONCE};
use crate::layout::{Slot, BEYOND, CLOSED, MARK_BEGUN};
use crate::ops::Outcome;
use crate::ring::{RxRing, TxRing};
use crate::side::Side;
use crate::wire::{self, Frame};
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

const BEFORE: &[u8] = b"before the mark ";
const IN_RING: &[u8] = b"and in the ring";

/// A connection whose peer has sent [`BEFORE`] by TCP, and is about to mark, and [`IN_RING`].
struct Half {
    conn: &'static Conn,
    ours: TcpStream,
    theirs: TcpStream,
    slot: &'static Slot,
    own: &'static Slot,
    side: Side,
}

impl Half {
    fn new() -> Half {
        let side = Side::new().expect("memory");
        // SAFETY: as long as the test runs; the segment is unmapped when it is over.
        let slot: &'static Slot = unsafe { &*(side.slot(0) as *const Slot) };
        let own: &'static Slot = Box::leak(Box::default());
        let (conn, ours, mut theirs) = armed(slot);
        conn.attach(None, 0, own);
        conn.attach_peer(0, slot);
        let mut ring = TxRing::new(&side, slot, 4096).expect("memory");
        // SAFETY: a slice is readable for its length.
        assert_eq!(unsafe { ring.write(IN_RING.as_ptr(), IN_RING.len()) }, Ok(IN_RING.len()));
        *conn.lock_both().rx.ring() = RxRing::new(side.base(), slot, own);
        arrive(conn, &mut theirs, BEFORE);
        slot.mark_at.store(BEFORE.len() as u64, SeqCst);
        slot.flags.store(MARK_BEGUN, SeqCst);
        ring.show();
        Half { conn, ours, theirs, slot, own, side }
    }

    fn run(&self) {
        pump::run(&mut self.conn.lock_both());
    }

    fn path(&self) -> RxPath {
        self.conn.lock_rx().path()
    }

    /// The mark comes, or not, and then the end.
    fn ends(&mut self, marks: bool) {
        if marks {
            arrive(self.conn, &mut self.theirs, &wire::mark(&NONCE));
        } else {
            self.slot.produced.store(0, SeqCst);
        }
        self.slot.flags.fetch_or(CLOSED, SeqCst);
        // SAFETY: an fd of this test's.
        let _ = unsafe { sys!(libc::SYS_shutdown, self.theirs.as_raw_fd(), libc::SHUT_WR) };
        until(self.conn, libc::POLLRDHUP);
        self.run();
    }

    /// What somebody gets who has nothing but the kernel's socket, and how that ends.
    fn rest(mut self) -> (String, Option<ErrorKind>) {
        assert!(settle(&mut self.conn.lock_both(), &mut Vec::new()), "nothing was left");
        assert!(self.conn.lock_both().sw().is_plain());
        self.ours.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        let mut got = Vec::new();
        let mut end = self.ours.read_to_end(&mut got).err().map(|e| e.kind());
        if end.is_none() {
            end = self.ours.take_error().unwrap().map(|e| e.kind());
        }
        (String::from_utf8(got).unwrap(), end)
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        let mut b = self.conn.lock_both();
        *b.rx.ring() = RxRing::default();
        self.conn.attach(None, 0, core::ptr::null());
        drop(b);
        self.conn.set_phase(Phase::Closed);
        // SAFETY: nobody uses it any more.
        unsafe { self.side.destroy() };
    }
}

fn all() -> String {
    String::from_utf8([BEFORE, IN_RING].concat()).unwrap()
}

/// Either end was in a hurry, so what stood before the mark was taken out of the stream; then the peer's process ended.
#[test]
fn what_was_kept_goes_before_what_is_in_the_ring() {
    let mut h = Half::new();
    h.conn.hurry.store(true, SeqCst);
    h.run();
    assert_eq!((h.path(), h.conn.lock_rx().ring().kept.len()), (RxPath::Draining, BEFORE.len()));
    h.ends(true);
    assert_eq!((h.path(), h.conn.has_ended(END_EOF)), (RxPath::RingFinal, true));
    assert_eq!(h.rest(), (all(), None));
}

/// The same, and it was killed before it could write the mark.
#[test]
fn what_was_kept_is_all_where_no_mark_came() {
    let mut h = Half::new();
    h.conn.hurry.store(true, SeqCst);
    h.run();
    h.ends(false);
    assert_eq!((h.path(), h.conn.has_ended(END_EOF)), (RxPath::RingFinal, true));
    assert_eq!(h.rest(), (String::from_utf8(BEFORE.to_vec()).unwrap(), None));
}

/// A send was refused, and so the connection failed, before anybody came to what the kernel has, to the mark, and to the ring.
#[test]
fn what_a_failure_left_in_the_kernel_comes_first() {
    for (marks, errno) in [(true, libc::EPIPE), (true, libc::ECONNRESET), (false, libc::ECONNRESET)] {
        let mut h = Half::new();
        h.conn.fail(errno);
        h.ends(marks);
        assert_eq!(h.path(), RxPath::Armed);
        let kind = if errno == libc::EPIPE { ErrorKind::BrokenPipe } else { ErrorKind::ConnectionReset };
        let want = if marks { all() } else { String::from_utf8(BEFORE.to_vec()).unwrap() };
        assert_eq!(h.rest(), (want, Some(kind)));
    }
}

/// The kernel has told the library of a reset that the program has not heard of, behind bytes that it has not read.
#[test]
fn what_is_the_kernels_stays_before_an_error_that_it_has_told() {
    let h = Half::new();
    h.conn.lock_both().sw().disarm();
    assert_eq!(h.path(), RxPath::Tcp);
    h.conn.fail(libc::ECONNRESET);
    assert_eq!(h.rest(), (String::from_utf8(BEFORE.to_vec()).unwrap(), Some(ErrorKind::ConnectionReset)));
}

/// A peer that ends before it begins its mark leaves plain TCP, for whoever is about to use the kernel's socket.
#[test]
fn who_hurries_waits_for_no_mark_of_a_stream_that_has_ended() {
    for hurries in [true, false] {
        let mut h = Half::new();
        h.slot.flags.store(0, SeqCst);
        h.conn.hurry.store(hurries, SeqCst);
        h.run();
        assert_eq!(h.path(), RxPath::Armed, "it may yet come");
        h.ends(false);
        assert_eq!(h.path(), if hurries { RxPath::Tcp } else { RxPath::Armed });
        assert_eq!(h.conn.lock_both().sw().is_plain(), hurries);
        let mut got = String::new();
        h.ours.read_to_string(&mut got).unwrap();
        assert_eq!(got.as_bytes(), BEFORE);
    }
    // One that has begun it is waited for.
    let mut h = Half::new();
    h.conn.hurry.store(true, SeqCst);
    h.ends(true);
    assert_eq!(h.rest(), (all(), None));
}

/// What the peer repeats does not all come, because of a reset. It is still in its ring; what its program has sent behind it,
/// if it can have sent anything, is lost, and nobody may take that for all.
#[test]
fn a_reset_in_the_middle_of_a_replay_is_the_end_only_of_what_was_all() {
    for beyond in [false, true] {
        let mut h = Half::new();
        know(h.ours.as_raw_fd(), h.conn);
        h.conn.confirmed.store(true, SeqCst);
        h.conn.hurry.store(true, SeqCst);
        arrive(h.conn, &mut h.theirs, &wire::mark(&NONCE));
        h.conn.lock_both().sw().leave();
        h.run();
        assert_eq!(h.path(), RxPath::Returning);
        let until_end = IN_RING.len() as u64;
        let frames = [Frame::Return { consumed: 0 }.encode(), Frame::Resume { from: 0, until: until_end }.encode()];
        arrive(h.conn, &mut h.theirs, &frames.concat());
        h.run();
        assert_eq!(h.path(), RxPath::Replay);
        assert_eq!(h.own.flags.load(SeqCst) & BEYOND, BEYOND, "ours is home");
        arrive(h.conn, &mut h.theirs, &BEFORE[..7]);
        h.slot.flags.fetch_or(if beyond { BEYOND } else { 0 }, SeqCst);
        crate::fds::reset_at_close(h.theirs.as_raw_fd());
        h.theirs = h.ours.try_clone().unwrap();
        until(h.conn, libc::POLLERR | libc::POLLHUP);
        let mut got = Vec::new();
        let last = loop {
            let mut buf = [0u8; 10];
            let one = crate::io::one(buf.as_mut_ptr().cast(), buf.len());
            // SAFETY: a buffer that lives as long as the call.
            match unsafe { crate::io::recv(h.ours.as_raw_fd(), &one, core::ptr::null_mut(), 0) } {
                Outcome::Done(n @ 1..) => got.extend_from_slice(&buf[..n as usize]),
                last => break last,
            }
        };
        assert_eq!(String::from_utf8(got).unwrap(), all());
        assert_eq!(last, if beyond { Outcome::Fail(libc::ECONNRESET) } else { Outcome::Done(0) });
        crate::table::take(h.ours.as_raw_fd());
    }
}
