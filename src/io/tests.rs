use super::*;
use crate::layout::Slot;
use crate::ring::RxRing;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

pub const NONCE: wire::Nonce = [0x5a; 16];

mod ends;

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
    let mut call = Call::new(Since::now(), conn, 0, &AtomicI64::new(2_000_000_000));
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

/// A program that sends and sends, and never waits, would be inside the kernel each time when a moment is looked for in
/// which it is not: its calls, too, let that moment be.
#[test]
fn a_call_that_may_not_wait_stands_back_for_a_moment() {
    let slot = Slot::default();
    let (conn, ours, _theirs) = armed(&slot);
    let fd = ours.as_raw_fd();
    conn.lock_both().sw().disarm();
    conn.set_phase(Phase::Raw);
    know(fd, conn);
    conn.hold.store(true, SeqCst);
    let stood_back = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            let byte = 7u8;
            for _ in 0..3000 {
                if stood_back.load(SeqCst) {
                    break;
                }
                let v = one((&raw const byte).cast_mut().cast(), 1);
                // SAFETY: the byte is readable; no message.
                assert_eq!(unsafe { send(fd, &v, core::ptr::null(), libc::MSG_DONTWAIT) }, Outcome::Done(1));
            }
            stood_back.store(true, SeqCst);
        });
        while conn.local().fut_rx.load(SeqCst) == 0 {
            assert!(!stood_back.load(SeqCst), "3000 calls went straight into the kernel");
        }
        stood_back.store(true, SeqCst);
    });
    conn.set_phase(Phase::Closed);
}

/// A call that has found a connection's old record looks again: what the kernel moved meanwhile nobody would count.
#[test]
fn a_record_that_is_left_is_not_the_kernels() {
    let [old, new] = [(); 2].map(|()| crate::arena::alloc().unwrap());
    let fd = crate::fdhigh::dup_high(2).unwrap();
    old.set_phase(Phase::Raw);
    know(fd, old);
    assert_eq!(is_served(old, fd, 0), Some(true));
    assert_eq!(is_served(old, fd, libc::MSG_ERRQUEUE), Some(false));
    new.set_phase(Phase::Raw);
    table::put_conn(fd, new);
    old.set_phase(Phase::Closed);
    assert_eq!(is_served(old, fd, 0), None);
    assert!(live(fd, 0, false).1.is_some_and(|c| core::ptr::eq(c, new)));
    new.set_phase(Phase::Plain);
    assert_eq!(is_served(new, fd, 0), Some(false));
    table::take(fd);
    sys::close(fd);
    new.set_phase(Phase::Closed);
}
