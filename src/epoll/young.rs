//! Items of connections that are fresh (`Conn::while_fresh`): most end before anybody meets them, so an item of the one set
//! that such a connection is in is kept with the connection, and comes to the set's own list when somebody does. Until
//! then the set knows only how many of these it has.

use super::*;
use core::ptr::null_mut;

/// What is kept with the connection.
#[derive(Default)]
pub struct Young {
    /// The set, or null.
    set: AtomicPtr<Set>,
    events: AtomicU32,
    data: AtomicU64,
}

impl Young {
    /// The set, or null.
    pub fn set(&self) -> *const Set {
        self.set.load(Relaxed)
    }

    fn take(&self) -> Option<(&'static Set, epoll_event)> {
        // SAFETY: null, or a set; these are never freed.
        let set = unsafe { self.set.load(Relaxed).as_ref() }?;
        self.set.store(null_mut(), Relaxed);
        set.young.fetch_sub(1, SeqCst);
        let ev = epoll_event { events: self.events.load(Relaxed), u64: self.data.load(Relaxed) };
        self.events.store(0, Relaxed);
        self.data.store(0, Relaxed);
        Some((set, ev))
    }

    /// In a forked child, whose set is the kernel's alone. Whether there was one.
    pub fn forget(&self) -> bool {
        !self.set.swap(null_mut(), Relaxed).is_null()
    }
}

/// `epoll_ctl(2)` of a connection that is fresh, and stays so. `None`, and nothing is done: it is not, or will not be.
///
/// # Safety
/// As for the call.
pub(super) unsafe fn ctl(epfd: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> Option<Outcome> {
    let conn = table::fresh(fd)?;
    let Entry::Set(s) = table::get(epfd) else { return None };
    let set = (s as *const Set).cast_mut();
    let ev = match op {
        libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD => copy::read(ev).ok()?,
        libc::EPOLL_CTL_DEL => epoll_event { events: 0, u64: 0 },
        _ => return None,
    };
    if s.is_inherited() || ev.events & (ONESHOT | EXCLUSIVE) != 0 {
        return None;
    }
    let adds = op == libc::EPOLL_CTL_ADD;
    conn.while_fresh(|| {
        let young = &conn.local().young;
        let known = young.set.load(Relaxed);
        if !table::is(fd, conn) || known != if adds { null_mut() } else { set } {
            return None;
        }
        let r = kernel_ctl(epfd, op, fd, &ev);
        if r.is_ok() && op == libc::EPOLL_CTL_DEL {
            young.take();
        } else if r.is_ok() {
            young.events.store(ev.events, Relaxed);
            young.data.store(ev.u64, Relaxed);
            if adds {
                young.set.store(set, Relaxed);
                s.young.fetch_add(1, SeqCst);
            }
            s.note_evidence(conn);
            kernel_is_stirred();
        }
        Some(Outcome::from(r))
    })?
}

/// Whether there is an item of a connection that is fresh. (Not for long, if it is not in this thread's hands.)
pub fn has_young(conn: &Conn) -> bool {
    !conn.local().young.set.load(Relaxed).is_null()
}

/// A connection is about to be fresh no more: its item comes to its set.
pub fn grown_up(conn: &'static Conn) {
    let local = conn.local();
    if let Some((set, ev)) = local.young.take() {
        let _lg = local.lock.lock();
        // SAFETY: `local.lock` is held.
        unsafe { set.begin_with(local.fd.load(Relaxed), conn, &ev) };
    }
}

/// A connection ends that was fresh to its end: the kernel takes it out of its set.
pub fn ended(conn: &Conn) {
    conn.local().young.take();
}

/// The set is closed, and its memory may soon be another's.
pub(super) fn set_closed(s: &Set) {
    if s.young.load(SeqCst) == 0 {
        return;
    }
    for conn in (0..=table::highest()).filter_map(table::fresh) {
        // One that has grown up meanwhile has its item in the set.
        conn.while_fresh(|| {
            let young = &conn.local().young;
            if core::ptr::eq(young.set.load(Relaxed), s) {
                young.take();
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Before;
    use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    /// A connection that is fresh, with both its ends.
    fn fresh() -> (&'static Conn, TcpStream, TcpStream) {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let ours = l.accept().unwrap().0;
        let conn = crate::arena::alloc().unwrap();
        begin(conn, ours.as_raw_fd());
        (conn, ours, theirs)
    }

    fn begin(conn: &'static Conn, fd: c_int) {
        conn.local().fd.store(fd, Relaxed);
        conn.local().fds.store(1, Relaxed);
        conn.begin_fresh();
        conn.set_phase(Phase::Raw);
        // What another test had there.
        table::take(fd);
        assert!(table::put_fresh(fd, conn, Before::Nothing));
    }

    fn end(conn: &'static Conn, fd: c_int) {
        table::take(fd);
        fd_closed(conn);
        conn.set_phase(Phase::Closed);
    }

    fn ctl(ep: c_int, op: c_int, fd: c_int, data: u64) -> Outcome {
        let mut ev = epoll_event { events: libc::EPOLLOUT as u32, u64: data };
        // SAFETY: the event is valid.
        unsafe { super::super::ctl(ep, op, fd, &mut ev) }
    }

    /// What the set's list has.
    fn listed(s: &Set) -> Vec<(c_int, u64)> {
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        unsafe { &*s.inner.get() }.items.iter().map(|(k, i)| (k.fd, i.data)).collect()
    }

    /// What the kernel reports of the set.
    fn reported(ep: c_int) -> Vec<u64> {
        let mut evs = [epoll_event { events: 0, u64: 0 }; 8];
        // SAFETY: the array has room.
        let n = unsafe { sys!(libc::SYS_epoll_pwait, ep, evs.as_mut_ptr(), 8, 0, core::ptr::null::<sigset_t>(), 8) };
        evs[..n.unwrap()].iter().map(|e| e.u64).collect()
    }

    #[test]
    fn an_item_comes_to_its_set_with_who_meets_the_connection() {
        let (s, ep) = set_for_tests();
        let (conn, ours, _theirs) = fresh();
        let fd = ours.as_raw_fd();
        assert_eq!(ctl(ep, EPOLL_CTL_ADD, fd, 1), Outcome::Done(0));
        assert_eq!(ctl(ep, EPOLL_CTL_MOD, fd, 2), Outcome::Done(0));
        assert_eq!((listed(s), s.young.load(SeqCst), reported(ep)), (vec![], 1, vec![2]));
        assert!(table::fresh(fd).is_some());
        // A second item is more than is kept with it, even one that is refused.
        assert_eq!(ctl(ep, EPOLL_CTL_ADD, fd, 3), Outcome::Fail(libc::EEXIST));
        assert!(table::fresh(fd).is_none());
        assert_eq!((listed(s), s.young.load(SeqCst), reported(ep)), (vec![(fd, 2)], 0, vec![2]));
        assert_eq!(ctl(ep, EPOLL_CTL_DEL, fd, 0), Outcome::Done(0));
        assert_eq!((listed(s), reported(ep)), (vec![], vec![]));
        end(conn, fd);
        number_closed(s, ep, true);
        table::take(ep);
        sys::close(ep);
    }

    #[test]
    fn a_connection_does_not_outlive_its_set_in_it() {
        let (s, ep) = set_for_tests();
        let (conn, ours, _theirs) = fresh();
        let fd = ours.as_raw_fd();
        assert_eq!(ctl(ep, EPOLL_CTL_ADD, fd, 1), Outcome::Done(0));
        number_closed(s, ep, true);
        table::take(ep);
        sys::close(ep);
        let (s, ep) = set_for_tests();
        assert!(table::conn(fd).is_some());
        assert_eq!((listed(s), s.young.load(SeqCst)), (vec![], 0), "it comes to a set that it was never in");
        // One that ends while it is fresh, too.
        end(conn, fd);
        begin(conn, fd);
        assert_eq!(ctl(ep, EPOLL_CTL_ADD, fd, 1), Outcome::Done(0));
        assert!(table::take_fresh(fd).is_some() && s.young.load(SeqCst) == 0);
        end(conn, fd);
        number_closed(s, ep, true);
        table::take(ep);
        sys::close(ep);
    }

    /// Nobody waits for a thread that has panicked.
    struct Over<'a>(&'a AtomicU64);

    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(u64::MAX, SeqCst);
        }
    }

    /// Whoever meets a connection while its item is changed: the set's list has what the kernel has.
    #[test]
    fn the_set_and_the_kernel_agree() {
        const LIVES: u64 = 3000;
        let (s, ep) = set_for_tests();
        let (conn, ours, _theirs) = fresh();
        let fd = ours.as_raw_fd();
        let (begun, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let await_it = |which: &AtomicU64, life| {
            while which.load(SeqCst) <= life {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _over = Over(&done);
                for life in 0..LIVES {
                    await_it(&begun, life);
                    for _ in 0..life % 60 {
                        core::hint::spin_loop();
                    }
                    assert!(table::conn(fd).is_some());
                    done.store(life + 1, SeqCst);
                }
            });
            let _over = Over(&begun);
            for life in 0..LIVES {
                begun.store(life + 1, SeqCst);
                let mut last = None;
                for n in 0..6 {
                    let data = life * 8 + n;
                    let (op, want) = match n {
                        0 | 4 => (EPOLL_CTL_ADD, Some(data)),
                        3 => (EPOLL_CTL_DEL, None),
                        _ => (EPOLL_CTL_MOD, Some(data)),
                    };
                    assert_eq!(ctl(ep, op, fd, data), Outcome::Done(0));
                    last = want;
                }
                await_it(&done, life);
                let last = last.unwrap();
                assert_eq!((listed(s), reported(ep)), (vec![(fd, last)], vec![last]), "life {life}");
                assert_eq!(conn.local().watchers.load(SeqCst), 1);
                assert_eq!(ctl(ep, EPOLL_CTL_DEL, fd, 0), Outcome::Done(0));
                end(conn, fd);
                begin(conn, fd);
            }
        });
        end(conn, fd);
        number_closed(s, ep, true);
        table::take(ep);
        sys::close(ep);
    }
}
