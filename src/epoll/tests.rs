//! Orders of events that no program can bring about at will.

use super::wait::IN;
use super::*;
use crate::signals::{Since, Sleep};
use crate::thread::me;

fn event(u64: u64) -> epoll_event {
    epoll_event { events: IN, u64 }
}

fn end((s, epfd): (&'static Set, c_int)) {
    number_closed(s, epfd, true);
    table::take(epfd);
    sys::close(epfd);
}

/// A connection that went back to the kernel's set was told by both; then another thread took it out.
#[test]
fn what_is_taken_out_meanwhile_is_told_once() {
    let (s, epfd) = set_for_tests();
    s.returned.store(5, SeqCst);
    let mut evs = [event(7), event(9), event(7)];
    assert_eq!(s.merge(evs.as_mut_ptr(), 3, 3), 2);
    let mut evs = [event(7), event(7)];
    assert_eq!(s.merge(evs.as_mut_ptr(), 2, 6), 2, "none went back during this call");
    end((s, epfd));
}

/// Events name their items by the program's data only, which several may have: no edge may be taken for another item's.
#[test]
fn of_items_with_the_same_data_each_edge_is_told() {
    for events in [0, ET, ONESHOT] {
        let (s, epfd) = set_for_tests();
        let conn = crate::arena::alloc().unwrap();
        let add = |fd, u64| {
            let item = Item::new(conn, &epoll_event { events: IN | events, u64 }, true);
            with_inner(s, |inner| inner.items.change(&s.begin_change()).insert(Key::new(fd, conn), item));
        };
        [(5, 7), (6, 7), (8, 9)].into_iter().for_each(|(fd, data)| add(fd, data));
        let mut evs = [7, 9, 7, 9, 7].map(event);
        let n = s.unite(evs.as_mut_ptr(), 2, 5);
        let told: Vec<u64> = evs[..n].iter().map(|e| e.u64).collect();
        let all: &[u64] = if events == 0 { &[7, 9] } else { &[7, 9, 7] };
        assert_eq!(told, all, "of {events:x}");
        crate::arena::free(conn);
        end((s, epfd));
    }
    // Of what is no connection the kernel says how many it has.
    let (s, epfd) = set_for_tests();
    // SAFETY: no preconditions.
    let fds = [0; 2].map(|_| unsafe { sys!(libc::SYS_eventfd2, 0, libc::EFD_NONBLOCK) }.unwrap() as c_int);
    for (events, left) in [(IN, 1), (IN | ET, 2)] {
        for fd in fds {
            kernel_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &epoll_event { events, u64: 3 }).unwrap();
        }
        assert_eq!(s.unite([3, 3].map(event).as_mut_ptr(), 1, 2), left);
        assert_eq!(s.unite([4, 4].map(event).as_mut_ptr(), 1, 2), 1, "there is none");
        // One that is level-triggered, and on a ring, beside them.
        let conn = crate::arena::alloc().unwrap();
        let item = Item::new(conn, &epoll_event { events: IN, u64: 3 }, true);
        let key = Key::new(5, conn);
        with_inner(s, |inner| inner.items.change(&s.begin_change()).insert(key, item));
        assert_eq!(s.unite([3, 3, 3, 3].map(event).as_mut_ptr(), 1, 4), if left == 1 { 1 } else { 3 });
        with_inner(s, |inner| inner.remove(key, &s.begin_change()));
        crate::arena::free(conn);
        fds.iter().for_each(|fd| assert!(kernel_ctl(epfd, libc::EPOLL_CTL_DEL, *fd, &event(0)).is_ok()));
    }
    fds.iter().for_each(|fd| sys::close(*fd));
    end((s, epfd));
}

/// Which of several one-shots has fired the event does not say, but the kernel's list does.
#[test]
fn of_one_shots_with_the_same_data_the_one_that_has_fired_is_spent() {
    let (s, epfd) = set_for_tests();
    let conn = crate::arena::alloc().unwrap();
    // SAFETY: no preconditions.
    let fds = [0, 1].map(|n| unsafe { sys!(libc::SYS_eventfd2, n, libc::EFD_NONBLOCK) }.unwrap() as c_int);
    let ev = epoll_event { events: IN | ONESHOT, u64: 3 };
    for fd in fds {
        kernel_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &ev).unwrap();
        with_inner(s, |inner| {
            inner.items.change(&s.begin_change()).insert(Key::new(fd, conn), Item::new(conn, &ev, false))
        });
    }
    let spent = || fds.map(|fd| with_inner(s, |inner| inner.items[&Key::new(fd, conn)].spent));
    let may = || fds.map(|fd| with_inner(s, |inner| s.may_be_another(inner, Key::new(fd, conn))));
    assert_eq!(may(), [true, true]);
    let e = s.next_in_kernel().unwrap();
    assert!(!s.is_told(e));
    assert_eq!((spent(), may()), ([false, true], [true, false]));
    fds.iter().for_each(|fd| sys::close(*fd));
    crate::arena::free(conn);
    end((s, epfd));
}

/// A handler runs after the call has begun, and before the kernel is asked.
#[test]
fn what_is_ready_is_told_rather_than_of_a_handler() {
    let (s, epfd) = set_for_tests();
    // SAFETY: no preconditions.
    let fd = unsafe { sys!(libc::SYS_eventfd2, 1, libc::EFD_NONBLOCK) }.unwrap() as c_int;
    kernel_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &event(3)).unwrap();
    let wait = || {
        let mut evs = [event(0); 4];
        let since = Since::now();
        me(|t| t.handled.fetch_add(1, Relaxed));
        let how = Sleep { since, any: true, if_left: &mut || () };
        s.kernel_wait((evs.as_mut_ptr(), 4), -1, core::ptr::null(), Some(how))
    };
    assert_eq!(wait(), Ok(1));
    kernel_ctl(epfd, libc::EPOLL_CTL_DEL, fd, &event(3)).unwrap();
    assert_eq!(wait(), Err(libc::EINTR));
    sys::close(fd);
    end((s, epfd));
}

/// A thread that only looks takes the edge of the bell, for which another sleeps.
#[test]
fn who_only_looks_wakes_those_who_sleep() {
    let (s, epfd) = set_for_tests();
    let b = s.need_bell().unwrap();
    let mut evs = [event(0); 4];
    let mut look = || s.look_kernel(evs.as_mut_ptr(), 4);
    let rings = || {
        let mut evs = [event(0); 4];
        s.kernel_wait((evs.as_mut_ptr(), 4), 0, core::ptr::null(), None)
    };
    bell::sleep_begin(b);
    for (listed, again) in [(0, 0), (1, 1)] {
        s.listed.store(listed, SeqCst);
        bell::ring(b);
        assert_eq!(look(), Ok(0), "the bell is nobody's event");
        assert_eq!(rings(), Ok(again), "events for who sleeps, with {listed} items that may be ready");
    }
    bell::sleep_end(b);
    bell::ring(b);
    look().unwrap();
    assert_eq!(rings(), Ok(0), "nobody sleeps");
    s.listed.store(0, SeqCst);
    end((s, epfd));
}

/// What a thread has from the kernel may come here late, when the item was armed again for something else.
#[test]
fn a_one_shot_that_is_armed_for_something_else_fires_again() {
    const OUT: u32 = libc::EPOLLOUT as u32;
    for managed in [false, true] {
        let (s, epfd) = set_for_tests();
        let conn = crate::arena::alloc().unwrap();
        // It became managed, if it did, after that.
        let item = Item::new(conn, &epoll_event { events: OUT | ONESHOT, u64: 77 }, false);
        let c = s.begin_change();
        // SAFETY: nobody else knows the set.
        let inner = unsafe { &mut *s.inner.get() };
        inner.items.change(&c).insert(Key::new(7, conn), Item { managed, ..item });
        drop(c);
        let told = |events| s.is_told(epoll_event { events, u64: 77 });
        assert!(!told(IN), "of the time before");
        assert!(!told(OUT), "what it is armed for");
        assert!(!told(IN), "of the time before, very late");
        assert!(told(OUT), "it has fired");
        assert!(told(libc::EPOLLHUP as u32));
        crate::arena::free(conn);
        end((s, epfd));
    }
}

fn with_inner<R>(s: &Set, f: impl FnOnce(&mut Inner) -> R) -> R {
    // SAFETY: nobody else knows the set.
    f(unsafe { &mut *s.inner.get() })
}

/// A set in which the connection is an edge-triggered item, by the number `fd`, and managed.
fn set_with(conn: &'static Conn, fd: c_int) -> (&'static Set, c_int) {
    let (s, epfd) = set_for_tests();
    s.need_bell().unwrap();
    let item = Item::new(conn, &epoll_event { events: IN | ET, u64: 7 }, true);
    with_inner(s, |inner| inner.items.change(&s.begin_change()).insert(Key::new(fd, conn), item));
    s.managed.store(1, SeqCst);
    s.push_ready(fd, conn);
    (s, epfd)
}

/// Bytes come by TCP, in the middle of an upgrade, behind an edge that was told of: nobody but the kernel says so to a
/// thread that does not wait until the background thread has.
#[test]
fn who_only_looks_sees_more_behind_an_edge() {
    use crate::io::tests::{armed, arrive};
    let slot = crate::layout::Slot::default();
    let (conn, ours, mut theirs) = armed(&slot);
    let fd = conn.local().fd.load(Relaxed);
    let (s, epfd) = set_with(conn, fd);
    let look = || {
        let mut evs = [event(0); 4];
        s.wait(evs.as_mut_ptr(), 4, 0, core::ptr::null(), Since::now())
    };
    assert_eq!(look(), Ok(0));
    for bytes in [b"abc", b"def", b"ghi"] {
        arrive(conn, &mut theirs, bytes);
        assert_eq!(look(), Ok(1), "bytes that nobody was told of");
        assert_eq!(look(), Ok(0), "told once");
        std::io::Read::read_exact(&mut &ours, &mut [0; 3]).unwrap();
        conn.stats().rx_bytes_tcp.fetch_add(3, Relaxed);
        assert_eq!(look(), Ok(0), "all is read");
    }
    conn.set_phase(Phase::Closed);
    with_inner(s, |inner| inner.remove(Key::new(fd, conn), &s.begin_change()));
    end((s, epfd));
}

/// The kernel counts the peer's end as one more byte received: none that an edge would be about, where the ring has told of it.
#[test]
fn the_end_that_a_ring_has_told_of_is_none_that_the_kernel_receives() {
    use crate::io::tests::{armed, settle};
    let slot = crate::layout::Slot::default();
    let (conn, ours, theirs) = armed(&slot);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&ours);
    let received = || ctl::still(&mut conn.lock_both(), fd).0.received;
    assert_eq!(received(), 0);
    conn.end.fetch_or(crate::conn::END_EOF, SeqCst);
    assert_eq!(received(), 1, "before the kernel has it");
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    settle(conn, libc::POLLRDHUP);
    assert_eq!(received(), 1);
    conn.set_phase(Phase::Closed);
}

/// An item comes back to the kernel's set with nothing new, where other things may have happened, among them that its number
/// was closed, and another is open.
#[test]
fn an_edge_that_is_no_news_is_taken_out_of_the_kernels_set() {
    use crate::io::tests::{armed, arrive};
    for (busy, closed) in [(false, false), (false, true), (true, false), (true, true)] {
        let slot = crate::layout::Slot::default();
        let (conn, ours, mut theirs) = armed(&slot);
        let fd = conn.local().fd.load(Relaxed);
        let number = if closed { crate::fdhigh::dup_high(fd).unwrap() } else { fd };
        let (s, epfd) = set_with(conn, number);
        if closed {
            sys::close(number);
        }
        table::for_tests();
        assert!(table::put_conn(fd, conn));
        arrive(conn, &mut theirs, b"abc");
        let look = || {
            let mut evs = [event(0); 4];
            let n = s.wait(evs.as_mut_ptr(), 4, 0, core::ptr::null(), Since::now()).unwrap() as usize;
            evs[..n].iter().map(|e| e.u64).collect::<Vec<_>>()
        };
        assert_eq!(look(), [7]);
        // SAFETY: no preconditions.
        let other = unsafe { sys!(libc::SYS_eventfd2, 0, libc::EFD_NONBLOCK) }.unwrap() as c_int;
        kernel_ctl(epfd, libc::EPOLL_CTL_ADD, other, &event(9)).unwrap();
        bell::ring(s.bell.load(SeqCst));
        if busy {
            bell::ring_fd(other);
        }
        with_inner(s, |inner| s.return_item(inner, Key::new(number, conn), &mut conn.lock_both()));
        assert_eq!(s.muted.load(SeqCst) > 0, busy, "an event of another item is not taken for it");
        let others = if busy { vec![9] } else { vec![] };
        assert_eq!(look(), others, "nothing new");
        arrive(conn, &mut theirs, b"def");
        assert_eq!(look().into_iter().filter(|d| *d == 7).count(), 1, "new bytes");
        assert_eq!(look(), others);
        table::take(fd);
        conn.set_phase(Phase::Closed);
        with_inner(s, |inner| inner.remove(Key::new(number, conn), &s.begin_change()));
        sys::close(other);
        drop(ours);
        end((s, epfd));
    }
}

/// An event that came in between is not lost, whatever its item asks for.
#[test]
fn what_was_taken_of_others_is_told() {
    let (s, epfd) = set_for_tests();
    let exclusive = libc::EPOLLEXCLUSIVE as u32;
    for how in [0, ET, ONESHOT, ET | ONESHOT, ET | exclusive] {
        // SAFETY: no preconditions.
        let fd = unsafe { sys!(libc::SYS_eventfd2, 1, libc::EFD_NONBLOCK) }.unwrap() as c_int;
        let ev = epoll_event { events: libc::EPOLLIN as u32 | how, u64: 3 };
        kernel_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &ev).unwrap();
        let e = s.next_in_kernel().unwrap();
        with_inner(s, |inner| s.put_again(inner, e));
        let again = s.next_in_kernel().expect("it is told once more");
        assert_eq!((again.events, again.u64), (e.events, 3), "{how:#x}");
        assert_eq!(s.next_in_kernel().is_some(), how == 0, "{how:#x}");
        kernel_ctl(epfd, libc::EPOLL_CTL_DEL, fd, &e).unwrap();
        sys::close(fd);
    }
    end((s, epfd));
}
