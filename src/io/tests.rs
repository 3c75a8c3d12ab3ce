use super::*;
use crate::layout::Slot;
use crate::ring::RxRing;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

pub const NONCE: wire::Nonce = [0x5a; 16];

/// A connection that is armed, and the peer that writes to it.
pub fn armed(peer_slot: &Slot) -> (&'static Conn, TcpStream, TcpStream) {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = TcpStream::connect(l.local_addr().unwrap()).unwrap();
    let ours = l.accept().unwrap().0;
    let conn = crate::arena::alloc().unwrap();
    conn.local().fd.store(ours.as_raw_fd(), Relaxed);
    conn.set_phase(Phase::Managed);
    conn.attach_peer(0, peer_slot);
    conn.lock_both().sw().arm(NONCE);
    (conn, ours, theirs)
}

/// The fd is the connection's, for calls that look it up.
pub fn know(fd: c_int, conn: &'static Conn) {
    table::for_tests();
    assert!(table::put_conn(fd, conn));
}

/// Until the kernel tells it.
pub fn settle(conn: &Conn, events: i16) {
    let fd = conn.local().fd.load(Relaxed);
    for _ in 0..5000 {
        if sys::poll_now(fd, events) & events == events {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("nothing arrived");
}

/// The peer resets, and the kernel tells it.
pub fn reset(conn: &Conn, theirs: TcpStream) {
    crate::fds::reset_at_close(theirs.as_raw_fd());
    drop(theirs);
    settle(conn, libc::POLLERR);
}

/// The peer writes, and the kernel has it all: what is written on loopback may come later, and two writes apart.
pub fn arrive(conn: &Conn, theirs: &mut TcpStream, bytes: &[u8]) {
    let fd = conn.local().fd.load(Relaxed);
    let queued = || sys::ioctl_int(fd, libc::FIONREAD).unwrap();
    let wanted = queued() + bytes.len() as c_int;
    theirs.write_all(bytes).unwrap();
    for _ in 0..5000 {
        if queued() >= wanted {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("{} of {wanted} bytes arrived", queued());
}

#[test]
fn a_stream_that_ends_within_the_mark_is_a_reset() {
    let slot = Slot::default();
    let (conn, _ours, mut theirs) = armed(&slot);
    slot.flags.store(MARK_BEGUN, SeqCst);
    arrive(conn, &mut theirs, &wire::mark(&NONCE)[..20]);
    assert_eq!(front(&mut conn.lock_rx()), Front::Part(20));
    drop(theirs);
    settle(conn, libc::POLLIN | libc::POLLRDHUP);
    assert_eq!(front(&mut conn.lock_rx()), Front::Failed(libc::ECONNRESET));
    assert_eq!(conn.take_error(), libc::ECONNRESET);
    conn.set_phase(Phase::Closed);
}

#[test]
fn a_whole_mark_before_the_end_is_the_mark() {
    let slot = Slot::default();
    let (conn, _ours, mut theirs) = armed(&slot);
    slot.flags.store(MARK_BEGUN, SeqCst);
    theirs.write_all(&wire::mark(&NONCE)).unwrap();
    drop(theirs);
    settle(conn, libc::POLLIN | libc::POLLRDHUP);
    assert_eq!(front(&mut conn.lock_rx()), Front::Mark);
    conn.set_phase(Phase::Closed);
}

/// A byte that looks like the beginning of a mark, but stands before it, must reach the program: the kernel's
/// buffer may have no room for more until it has been read.
#[test]
fn only_the_mark_is_held_back() {
    let slot = Slot::default();
    let (conn, _ours, mut theirs) = armed(&slot);
    slot.mark_at.store(6, SeqCst);
    slot.flags.store(MARK_BEGUN, SeqCst);
    arrive(conn, &mut theirs, b"abcd\xf3");
    assert_eq!(front(&mut conn.lock_rx()), Front::App(5));
    assert_eq!(before_mark(conn, &conn.lock_rx()), (5, false));
    conn.set_phase(Phase::Closed);
}

/// The first part of a mark is taken at once, for the same reason.
#[test]
fn a_mark_may_come_in_parts() {
    let slot = Slot::default();
    let (conn, _ours, mut theirs) = armed(&slot);
    slot.flags.store(MARK_BEGUN, SeqCst);
    let mark = wire::mark(&NONCE);
    for part in [&mark[..3], &mark[3..31]] {
        arrive(conn, &mut theirs, part);
        assert_eq!(front(&mut conn.lock_rx()), Front::Part(part.len()));
        pump::run(&mut conn.lock_both());
        assert_eq!(front(&mut conn.lock_rx()), Front::Wait);
    }
    arrive(conn, &mut theirs, &mark[31..]);
    assert_eq!(front(&mut conn.lock_rx()), Front::Mark);
    pump::run(&mut conn.lock_both());
    assert_eq!(conn.lock_rx().path(), RxPath::Ring);
    drop(theirs);
    conn.set_phase(Phase::Closed);
}

/// A thread waits in the kernel while its connection gets another record: the mark, which alone will wake it, is
/// left to it.
#[test]
fn a_mark_wakes_who_waits_in_the_name_of_a_former_record() {
    let slot = Slot::default();
    let (old, _other, _theirs) = armed(&slot);
    let (conn, _ours, mut theirs) = armed(&slot);
    slot.flags.store(MARK_BEGUN, SeqCst);
    old.local().peekers.store(1, SeqCst);
    let fd = conn.local().fd.load(Relaxed);
    conn.take_over(old);
    conn.local().fd.store(fd, Relaxed);
    arrive(conn, &mut theirs, &wire::mark(&NONCE));
    pump::run(&mut conn.lock_both());
    assert_eq!(front(&mut conn.lock_rx()), Front::Mark);
    end_peek(old);
    pump::run(&mut conn.lock_both());
    assert_eq!(conn.lock_rx().path(), RxPath::Ring);
    for c in [old, conn] {
        c.set_phase(Phase::Closed);
    }
}

#[test]
fn a_stream_that_ends_after_a_part_of_the_mark_is_a_reset() {
    let slot = Slot::default();
    let (conn, _ours, mut theirs) = armed(&slot);
    slot.flags.store(MARK_BEGUN, SeqCst);
    arrive(conn, &mut theirs, &wire::mark(&NONCE)[..20]);
    pump::run(&mut conn.lock_both());
    drop(theirs);
    settle(conn, libc::POLLRDHUP);
    assert_eq!(front(&mut conn.lock_rx()), Front::Failed(libc::ECONNRESET));
    conn.set_phase(Phase::Closed);
}

/// The end is found once, by whoever reads: a thread that waits for room must learn it from that one.
#[test]
fn who_finds_the_end_tells_the_others() {
    let slot = Slot::default();
    for reset in [false, true] {
        let (conn, ours, mut theirs) = armed(&slot);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        theirs.write_all(b"before the end").unwrap();
        if reset {
            crate::fds::reset_at_close(theirs.as_raw_fd());
        }
        drop(theirs);
        settle(conn, libc::POLLIN | libc::POLLRDHUP);
        let mut buf = [0u8; 64];
        let iov = one(buf.as_mut_ptr().cast(), buf.len());
        let mut epoch = conn.epoch.load(SeqCst);
        loop {
            match take(fd, conn, Bufs::new(&iov), 0) {
                Take::Got(_) | Take::Gone => epoch = conn.epoch.load(SeqCst),
                Take::End | Take::Error(_) => break,
                Take::Empty => panic!("nothing, and no end"),
            }
        }
        assert!(conn.has_ended(END_TXDEAD));
        assert_ne!(conn.epoch.load(SeqCst), epoch, "nobody was told (reset: {reset})");
        table::take(fd);
        conn.set_phase(Phase::Closed);
    }
}

/// A program that only writes does not get to the end of the stream, which is behind bytes that it has not read.
#[test]
fn who_only_writes_learns_that_the_peer_is_gone() {
    let slot = Slot::default();
    let (conn, ours, mut theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    know(fd, conn);
    {
        let mut b = conn.lock_both();
        b.sw().allow_mark(NONCE);
        assert!(b.sw().start_mark());
        assert!(pump::run(&mut b) || b.sw().pending().is_empty());
        assert!(!pump::bereave(&mut b), "it is there");
    }
    theirs.write_all(b"not read").unwrap();
    drop(theirs);
    settle(conn, libc::POLLIN | libc::POLLRDHUP);
    assert!(!conn.peer_closed());
    assert!(pump::bereave(&mut conn.lock_both()));
    assert!(conn.writable() && conn.peer_closed());
    let byte = [0u8; 1];
    let iov = one(byte.as_ptr().cast_mut().cast(), 1);
    let mut last = None;
    for _ in 0..1000 {
        match put(fd, conn, Bufs::new(&iov), libc::MSG_NOSIGNAL) {
            Put::Error(e) => {
                last = Some(e);
                break;
            }
            _ => std::thread::sleep(std::time::Duration::from_millis(1)),
        }
    }
    assert!(matches!(last, Some(libc::EPIPE | libc::ECONNRESET)), "{last:?}");
    table::take(fd);
    conn.set_phase(Phase::Closed);
}

/// Whether a process is killed or ends properly, the kernel would have reset the connection for what it leaves unread.
#[test]
fn what_a_process_leaves_unread_in_its_ring_is_a_reset() {
    for flags in [0, crate::layout::BYE] {
        let (slot, own) = (Slot::default(), Slot::default());
        let (conn, _ours, mut theirs) = armed(&slot);
        conn.attach(None, 0, &own);
        conn.attach_peer(0, &slot);
        {
            let mut b = conn.lock_both();
            b.sw().allow_mark(NONCE);
            assert!(b.sw().start_mark());
            pump::run(&mut b);
            b.tx.ring().produced = 100;
        }
        theirs.read_exact(&mut [0; wire::MARK_LEN]).unwrap();
        arrive(conn, &mut theirs, b"not read");
        slot.flags.store(flags, SeqCst);
        drop(theirs);
        settle(conn, libc::POLLRDHUP);
        assert!(pump::bereave(&mut conn.lock_both()));
        settle(conn, libc::POLLHUP | libc::POLLERR);
        conn.set_phase(Phase::Closed);
        conn.attach(None, 0, core::ptr::null());
    }
}

/// A return that has been announced, and then there is nobody to hear what it says: a peer that keeps its socket for that would
/// wait for ever, and our program for the end.
#[test]
fn what_is_announced_is_taken_back_if_the_peer_has_closed_before_it_is_said() {
    let (slot, own) = (Slot::default(), Slot::default());
    let (conn, _ours, mut theirs) = armed(&slot);
    conn.attach(None, 0, &own);
    conn.attach_peer(0, &slot);
    {
        let mut b = conn.lock_both();
        b.sw().leave();
        pump::run(&mut b);
        assert_ne!(own.flags.load(SeqCst) & LEAVING, 0, "not announced");
        assert!(!b.sw().has_sent_frames());
        slot.flags.fetch_or(CLOSED, SeqCst);
        b.sw().allow_mark(NONCE);
        assert!(b.sw().start_mark());
        pump::run(&mut b);
        assert!(!b.sw().has_sent_frames());
    }
    theirs.read_exact(&mut [0; wire::MARK_LEN]).unwrap();
    assert_eq!(own.flags.load(SeqCst) & LEAVING, 0, "the peer still waits for it");
    conn.set_phase(Phase::Closed);
    conn.attach(None, 0, core::ptr::null());
}

/// The peer has said that it resets the connection, which its kernel does a moment later: what is told of that now holds.
#[test]
fn who_was_told_of_a_reset_sends_nothing() {
    let slot = Slot::default();
    let (conn, ours, mut theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    know(fd, conn);
    arrive(conn, &mut theirs, b"not read");
    slot.flags.store(CLOSED | ABORT, SeqCst);
    assert_ne!(conn.readiness(0) & libc::EPOLLHUP as u32, 0);
    let iov = one(c"x".as_ptr().cast(), 1);
    let send = || match put(fd, conn, Bufs::new(&iov), libc::MSG_NOSIGNAL) {
        Put::Error(e) => e,
        _ => 0,
    };
    assert_eq!([send(), send()], [libc::ECONNRESET, libc::EPIPE]);
    crate::fds::reset_at_close(theirs.as_raw_fd());
    drop(theirs);
    settle(conn, libc::POLLERR | libc::POLLHUP);
    assert_eq!([send(), send()], [libc::EPIPE; 2], "once is enough");
    table::take(fd);
    conn.set_phase(Phase::Closed);
}

/// What the kernel is about to read or send is never a mark or a frame.
#[test]
fn what_cannot_return_is_reset() {
    let slot = Slot::default();
    let (conn, ours, mut theirs) = armed(&slot);
    know(ours.as_raw_fd(), conn);
    {
        let mut b = conn.lock_both();
        b.sw().allow_mark(NONCE);
        assert!(b.sw().start_mark());
        pump::run(&mut b);
    }
    // Nobody reads that, so the mark behind it is not found.
    arrive(conn, &mut theirs, b"not read");
    crate::process::give_up(conn, crate::stats::Why::Feature);
    assert!(conn.has_ended(END_FAILED));
    // SAFETY: a byte is read from where one is.
    let r = unsafe { sys::send(ours.as_raw_fd(), [0u8; 1].as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
    assert_eq!(r, Err(libc::EPIPE));
    table::take(ours.as_raw_fd());
    conn.set_phase(Phase::Closed);
}

/// A connection that was reset while its mark had come and was not taken, and whose error was told, has ended: a receive
/// that waited would wait for ever.
#[test]
fn what_was_reset_before_its_mark_was_taken_has_ended() {
    let slot = Slot::default();
    let (conn, ours, mut theirs) = armed(&slot);
    know(ours.as_raw_fd(), conn);
    slot.flags.store(MARK_BEGUN, SeqCst);
    arrive(conn, &mut theirs, &wire::mark(&NONCE));
    pump::reset_with(&mut conn.lock_both(), libc::EPIPE);
    assert_eq!(conn.take_error(), libc::EPIPE);
    let mut buf = [0u8; 8];
    let one = iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    // SAFETY: a buffer that lives as long as the call.
    let r = unsafe { recv(ours.as_raw_fd(), &[one], core::ptr::null_mut(), 0) };
    assert_eq!(r, crate::ops::Outcome::Done(0));
    table::take(ours.as_raw_fd());
    conn.set_phase(Phase::Closed);
}

/// An armed end of a program that has found no room, and the peer's; how much the kernel took.
fn full(slot: &Slot, own: &Slot) -> (&'static Conn, TcpStream, TcpStream, usize) {
    let (conn, ours, theirs) = armed(slot);
    conn.attach(None, 0, own);
    conn.attach_peer(0, slot);
    know(ours.as_raw_fd(), conn);
    ours.set_nonblocking(true).unwrap();
    // As large as may be asked for, and no more grown by the kernel meanwhile.
    let (fd, much) = (ours.as_raw_fd(), 1 << 20);
    // SAFETY: the value is readable for its length.
    unsafe { sys!(libc::SYS_setsockopt, fd, libc::SOL_SOCKET, libc::SO_SNDBUF, &much, size_of::<c_int>()) }.unwrap();
    let mut sent = 0;
    while let Ok(n) = (&ours).write(&[0; 65536]) {
        sent += n;
    }
    conn.count_tx_tcp(sent);
    conn.fulls.store(1, SeqCst);
    slot.flags.store(MARK_BEGUN, SeqCst);
    (conn, ours, theirs, sent)
}

/// Where a mark begins is said before its first byte can come. A program that found no room finds none until it has some in
/// the kernel: until then the mark is not written, and a return does not wait for that.
#[test]
fn a_mark_begins_where_there_is_no_room_and_is_written_where_there_is() {
    for leaves in [false, true] {
        let (slot, own) = (Slot::default(), Slot::default());
        let (conn, ours, mut theirs, sent) = full(&slot, &own);
        arrive(conn, &mut theirs, &wire::mark(&NONCE));
        pump::run(&mut conn.lock_both());
        {
            let mut b = conn.lock_both();
            assert_eq!((b.sw().rx(), b.sw().tx(), b.tx.pending()), (RxPath::Ring, TxPath::Ring, true));
            assert!(b.is_owed(), "a frame that finds no socket makes the kernel drop what it has");
        }
        assert_eq!((own.flags.load(SeqCst) & MARK_BEGUN, own.mark_at.load(SeqCst)), (MARK_BEGUN, sent as u64));
        let byte = iovec { iov_base: [0u8; 1].as_mut_ptr().cast(), iov_len: 1 };
        // SAFETY: a byte that lives as long as the call.
        let r = unsafe { send(ours.as_raw_fd(), &[byte], core::ptr::null(), libc::MSG_DONTWAIT) };
        assert_eq!(r, crate::ops::Outcome::Fail(libc::EAGAIN));
        if leaves {
            arrive(conn, &mut theirs, &wire::Frame::Leave.encode());
            pump::run(&mut conn.lock_both());
            assert!(conn.lock_both().sw().leaving());
        }
        // Room, but not as much as makes it writable, for as long as the kernel has it so. It queues whole writes.
        let queued = || sys::ioctl_int(ours.as_raw_fd(), libc::TIOCOUTQ).unwrap();
        let whole = queued();
        let mut got = vec![0; sent];
        let mut at = 0;
        for piece in got.chunks_mut(10_000) {
            theirs.read_exact(piece).unwrap();
            at += piece.len();
            std::thread::sleep(std::time::Duration::from_millis(2));
            if sys::poll_now(ours.as_raw_fd(), libc::POLLOUT) != 0 {
                break;
            }
            let has_room = queued() < whole * 13 / 16;
            pump::run(&mut conn.lock_both());
            let pending = conn.lock_both().tx.pending();
            // It was writable for a moment, perhaps: the mark itself may make it full again.
            let writable = sys::poll_now(ours.as_raw_fd(), libc::POLLOUT) != 0 || queued() < whole * 3 / 4;
            // What another test does to all connections it does to this one.
            let leaves = leaves || conn.lock_both().sw().leaving();
            assert!(pending || leaves || writable, "written after {at} of {sent} bytes");
            assert!(!pending || !leaves || !has_room, "not written after {at} of {sent} bytes");
            if !pending {
                break;
            }
        }
        theirs.read_exact(&mut got[at..]).unwrap();
        settle(conn, libc::POLLOUT);
        pump::run(&mut conn.lock_both());
        let mut mark = [0; wire::MARK_LEN];
        theirs.read_exact(&mut mark).unwrap();
        assert_eq!(mark, wire::mark(&conn.lock_both().tx.peer_nonce()));
        table::take(ours.as_raw_fd());
        conn.set_phase(Phase::Closed);
    }
}

/// Between a look at the ring and the sleep a connection may become the kernel's, which wakes nobody who sleeps here.
#[test]
fn nobody_sleeps_for_a_ring_that_was_left() {
    let slot = Slot::default();
    let (conn, ours, _theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    conn.lock_both().sw().disarm();
    know(fd, conn);
    let full = [0u8; 1 << 16];
    // SAFETY: `full` is readable.
    while unsafe { sys::send(fd, full.as_ptr().cast(), full.len(), libc::MSG_DONTWAIT) }.is_ok() {}
    conn.set_phase(Phase::Raw);
    let mut call = Call::new(Since::now(), conn, 0, 2_000_000_000);
    assert_eq!(wait(fd, conn, None, (false, 0), &mut call), Ok(()));
    table::take(fd);
    conn.set_phase(Phase::Closed);
}

/// Who sleeps no more takes back what it asked of the peer, and may take back what another thread has just asked, too.
#[test]
fn who_begins_to_wait_meanwhile_looks_again() {
    let (own, slot) = (Slot::default(), Slot::default());
    let (conn, _ours, _theirs) = armed(&slot);
    conn.attach(None, 0, &own);
    own.want.store(FUTEX_RX, SeqCst);
    let count = AtomicU32::new(0);
    let before = conn.epoch.load(SeqCst);
    wait::unask(conn, FUTEX_RX, &count);
    assert_eq!((own.want.load(SeqCst), conn.epoch.load(SeqCst)), (0, before), "nobody waits");
    own.want.store(FUTEX_RX, SeqCst);
    count.store(1, SeqCst);
    wait::unask(conn, FUTEX_RX, &count);
    assert_eq!(own.want.load(SeqCst) & FUTEX_RX, FUTEX_RX);
    assert_ne!(conn.epoch.load(SeqCst), before, "a thread that sleeps is not told");
    conn.attach(None, 0, core::ptr::null());
    conn.set_phase(Phase::Closed);
}

/// When a return is complete, but the connection not yet given back to the kernel, nothing else would carry the end.
#[test]
fn an_end_after_a_return_is_the_kernels() {
    use std::io::Read;
    let slot = Slot::default();
    let (conn, ours, mut theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    conn.lock_both().sw().disarm();
    know(fd, conn);
    assert_eq!(crate::fds::shutdown(fd, libc::SHUT_WR), Outcome::Done(0));
    theirs.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
    assert_eq!(theirs.read(&mut [0; 8]).unwrap(), 0);
    table::take(fd);
    conn.set_phase(Phase::Closed);
}

/// This direction has come back, and the peer has not yet said that the other does: a shutdown does not wait for what the
/// peer repeats to be read.
#[test]
fn an_end_between_the_two_halves_of_a_return_is_the_kernels() {
    use std::io::Read;
    let (slot, own) = (Slot::default(), Slot::default());
    let (conn, ours, mut theirs) = armed(&slot);
    conn.attach(None, 0, &own);
    conn.attach_peer(0, &slot);
    let fd = ours.as_raw_fd();
    know(fd, conn);
    conn.confirmed.store(true, SeqCst);
    slot.flags.store(MARK_BEGUN, SeqCst);
    arrive(conn, &mut theirs, &wire::mark(&NONCE));
    arrive(conn, &mut theirs, &wire::Frame::Return { consumed: 0 }.encode());
    pump::run(&mut conn.lock_both());
    {
        let mut b = conn.lock_both();
        assert_eq!((b.sw().tx(), b.sw().rx(), b.tx.pending()), (TxPath::Tcp, RxPath::Returning, false));
    }
    assert_eq!(crate::fds::shutdown(fd, libc::SHUT_WR), Outcome::Done(0));
    theirs.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
    let mut all = Vec::new();
    theirs.read_to_end(&mut all).expect("the end");
    assert_eq!(all.len(), wire::MARK_LEN + 2 * wire::FRAME_LEN);
    table::take(fd);
    conn.attach(None, 0, core::ptr::null());
    conn.set_phase(Phase::Closed);
}

/// A handler that had to wait while the first bytes were taken came behind them, and ends the call.
#[test]
fn a_handler_behind_the_first_bytes_ends_a_call() {
    let handler = || crate::thread::me(|t| t.handled.fetch_add(1, SeqCst));
    let mut since = Since::now();
    handler();
    let then = Since::now();
    let mut before = since;
    before.begun(then);
    assert!(!before.is_over(true), "it came before them");
    handler();
    since.begun(then);
    assert!(since.is_over(true));
}

/// What is looked at window by window, because another host's mark may stand anywhere, is received at once.
#[test]
fn a_receive_gives_more_than_one_window() {
    let slot = Slot::default();
    let (conn, ours, mut theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    know(fd, conn);
    conn.remote_pid.store(crate::process::for_tests(), SeqCst);
    const MANY: usize = 20_000;
    theirs.write_all(&[7; MANY]).unwrap();
    while sys::ioctl_int(fd, libc::FIONREAD) != Ok(MANY as i32) {
        std::thread::yield_now();
    }
    let mut buf = [0u8; MANY];
    let iov = one(buf.as_mut_ptr().cast(), buf.len());
    match take(fd, conn, Bufs::new(&iov), 0) {
        Take::Got(n) => assert_eq!(n, MANY),
        _ => panic!("nothing"),
    }
    assert_eq!(buf, [7; MANY]);
    conn.remote_pid.store(0, SeqCst);
    table::take(fd);
    conn.set_phase(Phase::Closed);
}

/// Where another host's mark may stand anywhere, what has come is not told to be less: neither before the mark, nor where
/// something that looks like its first part is followed by something else. Only that part is held back as long as it is last.
#[test]
fn all_that_stands_before_a_mark_is_seen_also_behind_one_window() {
    const MANY: usize = 40_000;
    let slot = Slot::default();
    let (conn, ours, mut theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    know(fd, conn);
    conn.remote_pid.store(crate::process::for_tests(), SeqCst);
    let mark = wire::mark(&NONCE);
    let there = || {
        let mut rx = conn.lock_rx();
        (before_mark(conn, &rx), unread(&mut rx))
    };
    arrive(conn, &mut theirs, &[7; MANY - 20]);
    assert_eq!(there(), ((MANY - 20, false), MANY - 20));
    arrive(conn, &mut theirs, &mark[..20]);
    assert_eq!(there(), ((MANY - 20, false), MANY - 20));
    arrive(conn, &mut theirs, &[7; 10]);
    assert_eq!(there(), ((MANY + 10, false), MANY + 10));
    arrive(conn, &mut theirs, &mark);
    assert_eq!(there(), ((MANY + 10, false), MANY + 10));
    // A peek sees it, too.
    let mut buf = vec![0u8; MANY + 100];
    let iov = one(buf.as_mut_ptr().cast(), buf.len());
    assert!(matches!(take(fd, conn, Bufs::new(&iov), libc::MSG_PEEK), Take::Got(n) if n == MANY + 10));
    assert!(matches!(take(fd, conn, Bufs::new(&iov), 0), Take::Got(n) if n == MANY + 10));
    assert_eq!(there(), ((0, false), 0));
    assert_eq!(front(&mut conn.lock_rx()), Front::Mark);
    conn.remote_pid.store(0, SeqCst);
    table::take(fd);
    conn.set_phase(Phase::Closed);
}

/// The end of a stream tells that what looks like the first part of a mark was none, also where all is taken out of the way.
#[test]
fn what_looks_like_a_mark_at_the_end_is_taken_with_the_rest() {
    const MANY: usize = 10_000;
    let slot = Slot::default();
    let (conn, _ours, mut theirs) = armed(&slot);
    conn.remote_pid.store(crate::process::for_tests(), SeqCst);
    arrive(conn, &mut theirs, &[7; MANY]);
    arrive(conn, &mut theirs, &wire::mark(&NONCE)[..5]);
    assert!(drain(&mut conn.lock_rx()));
    assert_eq!(conn.lock_rx().ring().kept.len(), MANY);
    drop(theirs);
    settle(conn, libc::POLLRDHUP);
    assert!(drain(&mut conn.lock_rx()));
    assert_eq!(conn.lock_rx().ring().kept.len(), MANY + 5);
    conn.lock_rx().ring().kept.release();
    conn.remote_pid.store(0, SeqCst);
    conn.set_phase(Phase::Closed);
}

/// The kernel tells a reset once; where it was our own mark that was told, the program is to hear of it all the same.
#[test]
fn a_reset_that_was_told_to_a_mark_is_the_programs() {
    let slot = Slot::default();
    let (conn, ours, theirs) = armed(&slot);
    know(ours.as_raw_fd(), conn);
    reset(conn, theirs);
    {
        let mut b = conn.lock_both();
        b.sw().allow_mark(NONCE);
        assert!(b.sw().start_mark());
        pump::run(&mut b);
    }
    let mut buf = [0u8; 8];
    let iov = one(buf.as_mut_ptr().cast(), buf.len());
    assert!(matches!(take(ours.as_raw_fd(), conn, Bufs::new(&iov), 0), Take::Error(libc::ECONNRESET)));
    assert!(matches!(take(ours.as_raw_fd(), conn, Bufs::new(&iov), 0), Take::End));
    table::take(ours.as_raw_fd());
    conn.set_phase(Phase::Closed);
}

/// A close while the peer's mark is awaited keeps the kernel's socket open; what the ring holds ends at once.
#[test]
fn the_end_of_a_ring_does_not_wait_for_a_mark() {
    use std::os::fd::IntoRawFd;
    let (slot, own): (&Slot, &Slot) = (Box::leak(Box::default()), Box::leak(Box::default()));
    let (conn, ours, _theirs) = armed(slot);
    let fd = ours.into_raw_fd();
    know(fd, conn);
    conn.local().fds.store(1, SeqCst);
    conn.attach(None, 0, own);
    conn.attach_peer(0, slot);
    {
        let mut b = conn.lock_both();
        b.sw().allow_mark(NONCE);
        assert!(b.sw().start_mark());
        pump::run(&mut b);
    }
    assert_eq!(crate::fds::close(fd), Outcome::Done(0));
    assert_eq!(own.flags.load(SeqCst) & (FIN | CLOSED), FIN | CLOSED);
    assert!(conn.lingers());
}

/// Who shuts down, and then closes with bytes unread, sends an end and a reset behind it, also in the middle of an upgrade.
#[test]
fn a_reset_by_a_close_is_behind_the_end_by_a_shutdown() {
    use std::os::fd::IntoRawFd;
    let (slot, own): (&Slot, &Slot) = (Box::leak(Box::default()), Box::leak(Box::default()));
    let (conn, ours, mut theirs) = armed(slot);
    let fd = ours.into_raw_fd();
    know(fd, conn);
    conn.local().fds.store(1, SeqCst);
    conn.attach(None, 0, own);
    conn.attach_peer(0, slot);
    arrive(conn, &mut theirs, b"not read");
    let _ = crate::fds::shutdown(fd, libc::SHUT_RDWR);
    assert_eq!(crate::fds::close(fd), Outcome::Done(0));
    assert_eq!(theirs.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(theirs.take_error().unwrap().and_then(|e| e.raw_os_error()), Some(libc::EPIPE));
}

/// What the kernel has in its error queue, such as that a send without copying is done, is nothing to read.
#[test]
fn a_completion_is_nothing_to_read() {
    let slot = Slot::default();
    let (conn, ours, mut theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    conn.lock_both().sw().disarm();
    let on: c_int = 1;
    // SAFETY: `on` and the bytes are readable for their sizes, and the bytes live for ever.
    unsafe {
        sys!(libc::SYS_setsockopt, fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, &on, 4).unwrap();
        sys!(libc::SYS_sendto, fd, c"bytes".as_ptr(), 5, libc::MSG_ZEROCOPY, 0, 0).unwrap();
    }
    settle(conn, libc::POLLERR);
    assert!(!conn.takeable(1));
    arrive(conn, &mut theirs, b"12345");
    assert!(conn.takeable(1));
    assert!(!conn.takeable(6));
    drop(theirs);
    settle(conn, libc::POLLRDHUP);
    assert!(conn.takeable(6));
    conn.set_phase(Phase::Closed);
}

/// What comes after such a close is answered by a reset, as in the kernel: behind the end of the stream, so that the
/// sender finds a broken pipe. If the program's own bytes are still on their way back, there is no such end.
#[test]
fn what_comes_after_a_close_is_refused_behind_the_end() {
    for (ended, told) in [(true, libc::EPIPE), (false, libc::ECONNRESET)] {
        let slot: &Slot = Box::leak(Box::default());
        let (conn, ours, mut theirs) = armed(slot);
        let flags = {
            let mut b = conn.lock_both();
            if ended {
                b.sw().allow_mark(NONCE);
                assert!(b.sw().start_mark());
                pump::run(&mut b);
                // As long as it has not arrived a reset would discard it.
                let fd = ours.as_raw_fd();
                let left = |_: &_| sys::ioctl_int(fd, libc::TIOCOUTQ) != Ok(0);
                (0..5000).take_while(left).for_each(|_| std::thread::sleep(std::time::Duration::from_millis(1)));
            }
            crate::fds::refuse_late(&mut b, ours.as_raw_fd())
        };
        assert_eq!(flags, ABORT | if ended { FIN } else { 0 });
        if ended {
            let mut sent = Vec::new();
            theirs.read_to_end(&mut sent).unwrap();
            assert_eq!(sent, wire::mark(&NONCE));
        } else {
            drop(ours);
            assert_eq!(theirs.read(&mut [0]).unwrap_err().raw_os_error(), Some(libc::ECONNRESET));
        }
        conn.set_phase(Phase::Closed);

        let slot: &Slot = Box::leak(Box::default());
        let (conn, _ours, mut theirs) = armed(slot);
        theirs.write_all(&wire::mark(&NONCE)).unwrap();
        slot.flags.fetch_or(CLOSED | flags, SeqCst);
        drop(theirs);
        settle(conn, libc::POLLIN | libc::POLLRDHUP);
        pump::run(&mut conn.lock_both());
        assert_eq!(conn.take_error(), told);
        conn.set_phase(Phase::Closed);
    }
}

/// ... but not while the kernel still has bytes that stand before the end: the reset discards them, and their reader must
/// not find a proper end.
#[test]
fn what_comes_after_a_close_before_all_has_arrived_is_a_reset() {
    let slot: &Slot = Box::leak(Box::default());
    let (conn, mut ours, _theirs) = armed(slot);
    ours.set_nonblocking(true).unwrap();
    while ours.write(&[0; 1 << 16]).is_ok() {}
    let mut b = conn.lock_both();
    b.sw().allow_mark(NONCE);
    assert!(b.sw().start_mark());
    // As if the mark, too, were the kernel's.
    let n = b.sw().pending().len();
    b.sw().written(n);
    assert_eq!(crate::fds::refuse_late(&mut b, ours.as_raw_fd()), ABORT);
    drop(b);
    conn.set_phase(Phase::Closed);
}

/// A receive that has got something says so, and leaves the reset behind it to the next one.
#[test]
fn a_reset_behind_bytes_is_told_by_the_next_call() {
    let slot = Slot::default();
    let (conn, ours, mut theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    conn.lock_both().sw().disarm();
    know(fd, conn);
    arrive(conn, &mut theirs, &[7; 5]);
    reset(conn, theirs);
    let mut buf = [0u8; 8];
    let iov = one(buf.as_mut_ptr().cast(), buf.len());
    // SAFETY: `buf` is writable.
    let receive = |flags| unsafe { recv(fd, &iov, core::ptr::null_mut(), flags) };
    assert_eq!(receive(libc::MSG_WAITALL), Outcome::Done(5));
    assert_eq!(receive(libc::MSG_WAITALL), Outcome::Fail(libc::ECONNRESET));
    assert_eq!(receive(0), Outcome::Done(0));
    table::take(fd);
    conn.set_phase(Phase::Closed);
}

/// What was wrong with one call is nothing that the connection has.
#[test]
fn a_bad_address_is_not_told_again() {
    let slot = Slot::default();
    let (conn, _ours, _theirs) = armed(&slot);
    for e in [libc::EFAULT, libc::EAGAIN, libc::ENOMEM] {
        conn.note_lost(e);
        conn.keep_error(e);
    }
    assert_eq!((conn.find_lost(), conn.take_error()), (None, 0));
    assert!(!conn.has_ended(END_RESET));
    conn.note_lost(libc::ETIMEDOUT);
    assert_eq!((conn.find_lost(), conn.find_lost()), (Some(libc::ETIMEDOUT), None));
    conn.set_phase(Phase::Closed);
}

/// A reset behind the ends of both directions is none, but one that costs bytes before the peer's mark is, whatever the peer
/// says of its end.
#[test]
fn a_reset_behind_both_ends_is_none_if_all_has_come() {
    for whole in [true, false] {
        let slot = Slot::default();
        let (conn, ours, mut theirs) = armed(&slot);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        slot.mark_at.store(if whole { 8 } else { 20 }, SeqCst);
        slot.flags.store(MARK_BEGUN, SeqCst);
        arrive(conn, &mut theirs, &[7; 8]);
        if whole {
            arrive(conn, &mut theirs, &wire::mark(&NONCE));
        }
        conn.end.fetch_or(END_WRSHUT, SeqCst);
        slot.flags.fetch_or(FIN | CLOSED | ABORT, SeqCst);
        reset(conn, theirs);
        assert_ne!(conn.readiness(0) & libc::EPOLLHUP as u32, 0);
        assert_eq!(conn.readiness(0) & libc::EPOLLERR as u32 == 0, whole);
        let mut buf = [0u8; 16];
        let iov = one(buf.as_mut_ptr().cast(), buf.len());
        // SAFETY: `buf` is writable.
        let receive = || unsafe { recv(fd, &iov, core::ptr::null_mut(), libc::MSG_DONTWAIT) };
        assert_eq!(receive(), Outcome::Done(8));
        if whole {
            assert_eq!(pending_error(fd), None);
            assert!(!conn.has_ended(END_RESET));
        } else {
            assert_eq!(receive(), Outcome::Fail(libc::ECONNRESET));
        }
        assert_eq!(receive(), Outcome::Done(0));
        table::take(fd);
        conn.set_phase(Phase::Closed);
    }
}

/// The peer's end on the ring is no end where the mark never came, before which the bytes in the ring cannot be read.
#[test]
fn an_end_behind_a_mark_that_is_lost_is_a_reset() {
    for shut in [false, true] {
        let (slot, own) = (Slot::default(), Slot::default());
        let (conn, _ours, theirs) = armed(&slot);
        *conn.lock_rx().ring() = RxRing::new(core::ptr::null(), &slot, &own);
        slot.produced.store(10, SeqCst);
        slot.flags.store(MARK_BEGUN | FIN, SeqCst);
        if shut {
            conn.end.fetch_or(END_WRSHUT, SeqCst);
        }
        drop(theirs);
        settle(conn, libc::POLLRDHUP);
        pump::run(&mut conn.lock_both());
        assert_eq!(conn.take_error(), libc::ECONNRESET, "{shut}");
        conn.set_phase(Phase::Closed);
    }
}

/// A server that answers, shuts down and closes with bytes unread, in the middle of an upgrade: the end comes by TCP alone, before
/// the reset that both tell of.
#[test]
fn a_reset_behind_an_end_by_tcp_is_a_broken_pipe() {
    for ended in [true, false] {
        let slot = Slot::default();
        let (conn, ours, mut theirs) = armed(&slot);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        arrive(conn, &mut theirs, b"answer");
        slot.flags.store(CLOSED | ABORT, SeqCst);
        if ended {
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            settle(conn, libc::POLLRDHUP);
        }
        reset(conn, theirs);
        let mut buf = [0u8; 8];
        let iov = one(buf.as_mut_ptr().cast(), buf.len());
        // SAFETY: `buf` is writable.
        let receive = || unsafe { recv(fd, &iov, core::ptr::null_mut(), 0) };
        assert_eq!(receive(), Outcome::Done(6));
        if ended {
            assert_eq!(receive(), Outcome::Done(0));
            assert_eq!(conn.take_error(), libc::EPIPE);
        } else {
            assert_eq!(receive(), Outcome::Fail(libc::ECONNRESET));
        }
        assert_eq!(receive(), Outcome::Done(0));
        table::take(fd);
        conn.set_phase(Phase::Closed);
    }
}

/// A connection that has come back from a ring in which ten bytes were unread, which its peer is to repeat.
fn replaying(slot: &Slot, own: &Slot) -> (&'static Conn, TcpStream, TcpStream) {
    let (conn, ours, mut theirs) = armed(slot);
    conn.attach(None, 0, own);
    conn.attach_peer(0, slot);
    slot.flags.store(MARK_BEGUN, SeqCst);
    {
        let mut b = conn.lock_both();
        b.sw().allow_mark(NONCE);
        assert!(b.sw().start_mark());
        arrive(conn, &mut theirs, &wire::mark(&NONCE));
        pump::run(&mut b);
        b.sw().leave();
        pump::run(&mut b);
    }
    arrive(conn, &mut theirs, &wire::Frame::Return { consumed: 0 }.encode());
    pump::run(&mut conn.lock_both());
    arrive(conn, &mut theirs, &wire::Frame::Resume { from: 0, until: 10 }.encode());
    pump::run(&mut conn.lock_both());
    assert_eq!(conn.lock_rx().path(), RxPath::Replay);
    (conn, ours, theirs)
}

/// What is missing of a replay does not come any more: an error once, and then the end, whatever the peer says of its own.
#[test]
fn a_reset_in_the_middle_of_a_replay_is_told_once_and_by_all_means() {
    for ended in [false, true] {
        let (slot, own) = (Slot::default(), Slot::default());
        let (conn, ours, mut theirs) = replaying(&slot, &own);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        arrive(conn, &mut theirs, &[7; 4]);
        if ended {
            conn.end.fetch_or(END_WRSHUT, SeqCst);
            slot.flags.fetch_or(FIN | CLOSED | ABORT, SeqCst);
        }
        reset(conn, theirs);
        let mut buf = [0u8; 16];
        let iov = one(buf.as_mut_ptr().cast(), buf.len());
        // SAFETY: `buf` is writable.
        let receive = || unsafe { recv(fd, &iov, core::ptr::null_mut(), libc::MSG_DONTWAIT) };
        assert_eq!(receive(), Outcome::Done(4));
        assert_eq!(receive(), Outcome::Fail(libc::ECONNRESET), "{ended}");
        assert_eq!([receive(), receive()], [Outcome::Done(0), Outcome::Done(0)]);
        table::take(fd);
        conn.set_phase(Phase::Closed);
    }
}

/// A reset that the kernel has told a receive is not told once more because the peer's slot says so, too.
#[test]
fn a_reset_of_the_kernels_is_told_once() {
    let slot = Slot::default();
    let (conn, ours, theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    conn.lock_both().sw().disarm();
    know(fd, conn);
    slot.flags.store(CLOSED | ABORT, SeqCst);
    reset(conn, theirs);
    let mut buf = [0u8; 8];
    let iov = one(buf.as_mut_ptr().cast(), buf.len());
    // SAFETY: `buf` is writable.
    let receive = || unsafe { recv(fd, &iov, core::ptr::null_mut(), 0) };
    assert_eq!(receive(), Outcome::Fail(libc::ECONNRESET));
    assert_eq!(asked_error(fd, conn), None);
    assert_eq!(receive(), Outcome::Done(0));
    assert_eq!(conn.readiness(0), libc::EPOLLHUP as u32);
    table::take(fd);
    conn.set_phase(Phase::Closed);
}

/// Each `shutdown` wakes all who wait for the socket. Where it is home they may be other processes, which only the kernel wakes.
#[test]
fn a_shutdown_again_is_an_edge_of_the_kernels_set() {
    for how in [libc::SHUT_RD, libc::SHUT_RDWR] {
        let (slot, own) = (Slot::default(), Slot::default());
        let (conn, ours, mut theirs) = replaying(&slot, &own);
        let fd = ours.as_raw_fd();
        know(fd, conn);
        arrive(conn, &mut theirs, &[7; 10]);
        // SAFETY: no preconditions.
        let set = unsafe { sys!(libc::SYS_epoll_create1, 0) }.unwrap() as c_int;
        let mut ev = libc::epoll_event { events: (libc::EPOLLRDHUP | libc::EPOLLET) as u32, u64: 0 };
        crate::epoll::kernel_ctl(set, libc::EPOLL_CTL_ADD, fd, &ev).unwrap();
        // SAFETY: `ev` is writable.
        let mut told = || unsafe { sys!(libc::SYS_epoll_pwait, set, &mut ev, 1, 0, 0, 8) };
        assert_eq!(told(), Ok(0));
        for _ in 0..3 {
            assert_eq!(crate::fds::shutdown(fd, how), Outcome::Done(0));
            assert_eq!(told(), Ok(1), "{how}");
            assert_eq!(told(), Ok(0), "{how}");
        }
        sys::close(set);
        table::take(fd);
        conn.set_phase(Phase::Closed);
    }
}

/// Where the kernel has no connection any more, both ends have left it, whatever the link has still to tell.
#[test]
fn nothing_is_shut_where_the_kernel_has_no_connection() {
    let slot = Slot::default();
    let (conn, ours, theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    know(fd, conn);
    drop(theirs);
    settle(conn, libc::POLLRDHUP);
    conn.end.fetch_or(END_WRSHUT, SeqCst);
    ours.shutdown(std::net::Shutdown::Write).unwrap();
    settle(conn, libc::POLLHUP);
    assert_eq!(crate::fds::shutdown(fd, libc::SHUT_RDWR), Outcome::Fail(libc::ENOTCONN));
    table::take(fd);
    conn.set_phase(Phase::Closed);
}
