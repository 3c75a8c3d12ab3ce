//! Ends and resets, in any state of the change between TCP and a ring.

use super::*;

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

/// ... whenever it comes: also while this end looks for a frame.
#[test]
fn what_comes_after_a_close_is_never_taken() {
    for round in 0..400 {
        let (slot, own): (&Slot, &Slot) = (Box::leak(Box::default()), Box::leak(Box::default()));
        let (conn, ours, mut theirs) = armed(slot);
        let fd = ours.as_raw_fd();
        theirs.set_nodelay(true).unwrap();
        conn.attach(None, 0, own);
        conn.attach_peer(0, slot);
        arrive(conn, &mut theirs, &wire::mark(&NONCE));
        pump::run(&mut conn.lock_both());
        assert_eq!(conn.lock_rx().path(), RxPath::Ring);
        own.flags.fetch_or(CLOSED, SeqCst);
        let late = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_micros(20 + round % 7));
            theirs.write_all(b"late").unwrap();
            theirs
        });
        while !late.is_finished() {
            pump::run(&mut conn.lock_both());
        }
        let theirs = late.join().unwrap();
        settle(conn, libc::POLLIN);
        assert_eq!(sys::ioctl_int(fd, libc::FIONREAD), Ok(4), "round {round}");
        conn.set_phase(Phase::Closed);
        drop((ours, theirs));
    }
}

/// There is no such end while the kernel still has bytes that stand before it: the reset discards them, and their reader must
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

/// The program shuts both directions before the peer has answered, and what that sends then the kernel refuses: whichever call
/// comes first tells it.
#[test]
fn what_is_refused_before_the_peer_has_answered_is_told() {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    for first in 0..3 {
        let mut theirs = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let ours = l.accept().unwrap().0;
        let fd = ours.as_raw_fd();
        let conn = crate::arena::alloc().unwrap();
        conn.local().fd.store(fd, Relaxed);
        conn.set_phase(Phase::Managed);
        conn.lock_both().sw().arm(NONCE);
        know(fd, conn);
        assert_eq!(crate::fds::shutdown(fd, libc::SHUT_RDWR), Outcome::Done(0));
        let mut x = [b'x'];
        let iov = one(x.as_mut_ptr().cast(), 1);
        let send = || match put(fd, conn, Bufs::new(&iov), libc::MSG_NOSIGNAL) {
            Put::Error(e) => e,
            _ => 0,
        };
        // SAFETY: the buffer is writable.
        let receive = || unsafe { recv(fd, &iov, core::ptr::null_mut(), 0) };
        assert_eq!((send(), receive()), (libc::EPIPE, Outcome::Done(0)));
        theirs.write_all(b"late").unwrap();
        settle(conn, libc::POLLERR);
        match first {
            0 => assert_eq!(send(), libc::ECONNRESET),
            1 => assert_eq!(receive(), Outcome::Fail(libc::ECONNRESET)),
            _ => assert_eq!(asked_error(fd, conn), Some(libc::ECONNRESET)),
        }
        assert_eq!((send(), receive(), asked_error(fd, conn)), (libc::EPIPE, Outcome::Done(0), None));
        table::take(fd);
        conn.set_phase(Phase::Closed);
    }
}

/// ... nor is there anything to shut once the kernel was reset, whoever has found that.
#[test]
fn what_is_reset_before_the_peer_has_answered_is_not_shut() {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = TcpStream::connect(l.local_addr().unwrap()).unwrap();
    let ours = l.accept().unwrap().0;
    let fd = ours.as_raw_fd();
    let conn = crate::arena::alloc().unwrap();
    conn.local().fd.store(fd, Relaxed);
    conn.set_phase(Phase::Managed);
    conn.lock_both().sw().arm(NONCE);
    know(fd, conn);
    reset(conn, theirs);
    assert_eq!(crate::fds::shutdown(fd, libc::SHUT_RDWR), Outcome::Fail(libc::ENOTCONN));
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
