//! What is in a set: `epoll_ctl`, closed numbers, and connections that move to rings and back.

use super::*;

/// A number of the connection is closed. Its items go with the last one; until then the sets report it under
/// the number that was added.
pub fn fd_closed(conn: &Conn, last: bool) {
    if !last {
        return;
    }
    let local = conn.local();
    let _g = local.lock.lock();
    // SAFETY: guarded by `local.lock`.
    let items = unsafe { &mut *local.items.get() };
    local.watchers.fetch_sub(items.len() as u32, SeqCst);
    for (set, fd) in items.drain(..) {
        // SAFETY: sets are never freed.
        let s = unsafe { &*set };
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        if unsafe { &mut *s.inner.get() }.remove(Key::new(fd, conn)) == Some(true) {
            s.managed.fetch_sub(1, SeqCst);
        }
    }
}

/// `epoll_ctl(2)`.
///
/// # Safety
/// `ev` must be readable where the operation needs it.
pub unsafe fn ctl(epfd: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> Outcome {
    if let Some(inner) = set_of(fd) {
        // A set inside another: the outer one sees it through the kernel, and has to know of it.
        inner.expose();
        if let Some(outer) = make_set(epfd) {
            outer.nests.store(true, Relaxed);
        }
        return Outcome::Bypass;
    }
    let Some(conn) = table::conn(fd) else { return Outcome::Bypass };
    if conn.is_inherited() && op != libc::EPOLL_CTL_DEL {
        crate::visit::settle(conn);
    }
    if matches!(conn.phase(), Phase::Plain | Phase::Closed) && conn.local_items_empty() {
        return Outcome::Bypass;
    }
    if ev.is_null() && op != libc::EPOLL_CTL_DEL {
        return Outcome::Fail(libc::EFAULT);
    }
    let Some(set) = make_set(epfd) else { return Outcome::Bypass };
    // SAFETY: the caller's promise.
    let want = if op == libc::EPOLL_CTL_DEL { None } else { Some(unsafe { ev.read_unaligned() }) };
    match set.change(op, fd, conn, want) {
        Ok(()) => {
            if op != libc::EPOLL_CTL_DEL {
                conn.evidence.store(true, Relaxed);
                conn.in_sight();
            }
            Outcome::Done(0)
        }
        Err(e) => Outcome::Fail(e),
    }
}

/// As the kernel checks `EPOLLEXCLUSIVE` with `EPOLL_CTL_ADD`.
fn check_exclusive(events: u32) -> Result<(), Errno> {
    const WITH: u32 = (libc::EPOLLIN | libc::EPOLLOUT) as u32 | ALWAYS | WAKEUP | ET | EXCLUSIVE;
    if events & EXCLUSIVE != 0 && events & !WITH != 0 {
        return Err(libc::EINVAL);
    }
    Ok(())
}

impl Set {
    /// Changes an item. `EPOLL_CTL_ADD` needs `want`, and so does `EPOLL_CTL_MOD`.
    fn change(
        &'static self,
        op: c_int,
        fd: c_int,
        conn: &'static Conn,
        want: Option<epoll_event>,
    ) -> Result<(), Errno> {
        let epfd = self.epfd.load(Relaxed);
        let key = Key::new(fd, conn);
        let local = conn.local();
        let lg = local.lock.lock();
        let sg = self.lock.lock();
        // SAFETY: guarded by `local.lock` and `lock`.
        let (mine, inner) = unsafe { (&mut *local.items.get(), &mut *self.inner.get()) };
        let known = inner.items.get(&key).map(|i| (i.managed, i.events));
        let managed = local.managed.load(Relaxed);
        let ev = want.unwrap_or(epoll_event { events: 0, u64: 0 });
        match (op, known) {
            (libc::EPOLL_CTL_ADD, Some(_)) if managed => return Err(libc::EEXIST),
            (libc::EPOLL_CTL_ADD, _) if managed => {
                check_exclusive(ev.events)?;
                let b = self.need_bell().ok_or(libc::ENOSPC)?;
                if self.managed.fetch_add(1, SeqCst) == 0 {
                    // Who sleeps in the kernel does not know yet that there is a bell.
                    bell::ring(b);
                }
            }
            (libc::EPOLL_CTL_MOD, Some((true, was))) => {
                if (ev.events | was) & EXCLUSIVE != 0 {
                    return Err(libc::EINVAL);
                }
            }
            (libc::EPOLL_CTL_MOD, None) if managed => {
                // Added before it was a connection: that the kernel knows it proves that it is here.
                kernel_ctl(epfd, op, fd, &ev)?;
                self.need_bell().ok_or(libc::ENOSPC)?;
                let _ = kernel_ctl(epfd, libc::EPOLL_CTL_DEL, fd, &ev);
                self.managed.fetch_add(1, SeqCst);
            }
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, _) => kernel_ctl(epfd, op, fd, &ev).map(|_| ())?,
            (libc::EPOLL_CTL_DEL, _) => {
                if known.is_none_or(|(managed, _)| !managed) {
                    kernel_ctl(epfd, op, fd, &ev)?;
                }
                if inner.remove(key) == Some(true) {
                    self.managed.fetch_sub(1, SeqCst);
                }
                let before = mine.len();
                mine.retain(|(s, f)| !(core::ptr::eq(*s, self) && *f == fd));
                local.watchers.fetch_sub((before - mine.len()) as u32, SeqCst);
                return Ok(());
            }
            _ => return Err(libc::EINVAL),
        }
        if ev.events & ONESHOT != 0 {
            self.oneshots.store(1, Relaxed);
        }
        let item = inner.items.entry(key).or_insert_with(|| Item::new(conn, &ev, managed));
        item.events = ev.events;
        item.data = ev.u64;
        item.spent = false;
        if !mine.iter().any(|(s, f)| core::ptr::eq(*s, self) && *f == fd) {
            mine.push((self, fd));
            conn.watcher_added();
        }
        drop(sg);
        drop(lg);
        if managed {
            self.push_ready(fd, conn);
        }
        Ok(())
    }
}

/// The connection's readiness is ours from now on: takes it out of the kernel's sets. Gives false, and
/// changes nothing, where a set gets no bell, or has the connection under a number that is closed: the
/// kernel takes such an item out for nobody.
pub fn manage(conn: &Conn) -> bool {
    let local = conn.local();
    let _lg = local.lock.lock();
    // SAFETY: guarded by `local.lock`.
    let items = unsafe { &*local.items.get() };
    // SAFETY: sets are never freed.
    if !items.iter().all(|(s, fd)| table::is(*fd, conn) && unsafe { &**s }.need_bell().is_some()) {
        return false;
    }
    local.managed.store(true, Relaxed);
    for (s, fd) in items {
        // SAFETY: sets are never freed.
        let s = unsafe { &**s };
        {
            let _g = s.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &mut *s.inner.get() };
            let key = Key::new(*fd, conn);
            let Some(i) = inner.items.get_mut(&key) else { continue };
            let dummy = epoll_event { events: 0, u64: 0 };
            let _ = kernel_ctl(s.epfd.load(Relaxed), libc::EPOLL_CTL_DEL, *fd, &dummy);
            i.managed = true;
            i.since = s.rounds.load(Relaxed);
            i.listed = true;
            inner.ready.push_back(key);
            s.listed.store(inner.ready.len() as u32, SeqCst);
            s.managed.fetch_add(1, SeqCst);
        }
        // Who sleeps in the kernel does not know yet that there is a bell.
        bell::ring(s.bell.load(Relaxed));
    }
    true
}

/// Puts an item back into the kernel's set.
fn give_back(epfd: c_int, fd: c_int, conn: &Conn, ev: &epoll_event) {
    if table::is(fd, conn) {
        let _ = kernel_ctl(epfd, libc::EPOLL_CTL_ADD, fd, ev);
        return;
    }
    // Its number is closed, which leaves it in the set, as here: under a number that lives for a moment.
    // SAFETY: another number of the connection is open, for the caller holds both its locks.
    if let Ok(d) = unsafe { sys!(libc::SYS_fcntl, conn.local().fd.load(Relaxed), libc::F_DUPFD_CLOEXEC, 3) } {
        let d = crate::fdhigh::move_high(d as c_int);
        let _ = kernel_ctl(epfd, libc::EPOLL_CTL_ADD, d, ev);
        crate::sys::close(d);
    }
}

/// The program has seen that there is something to read, perhaps before the peer came to hint: what is
/// level-triggered must be so in its next `epoll_wait`.
pub fn seen(conn: &Conn) {
    let local = conn.local();
    if local.watchers.load(Relaxed) == 0 {
        return;
    }
    let _lg = local.lock.lock();
    // SAFETY: guarded by `local.lock`; sets are never freed.
    for (s, fd) in unsafe { &*local.items.get() } {
        // SAFETY: as above.
        unsafe { &**s }.push(*fd, conn, ET);
    }
}

/// The connection is the kernel's again.
pub fn unmanage(conn: &Conn) {
    let local = conn.local();
    let _lg = local.lock.lock();
    local.managed.store(false, Relaxed);
    // SAFETY: guarded by `local.lock`.
    for (s, fd) in unsafe { &*local.items.get() } {
        // SAFETY: sets are never freed.
        let s = unsafe { &**s };
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &mut *s.inner.get() };
        let Some(i) = inner.items.get_mut(&Key::new(*fd, conn)) else { continue };
        if i.managed {
            let events = if i.spent { i.events & NOT_EVENTS } else { i.events };
            let ev = epoll_event { events, u64: i.data };
            give_back(s.epfd.load(Relaxed), *fd, conn, &ev);
            i.managed = false;
            s.managed.fetch_sub(1, SeqCst);
        }
    }
}
