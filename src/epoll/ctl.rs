//! What is in a set: `epoll_ctl`, closed numbers, and connections that move to rings and back.

use super::wait::IN;
use super::*;
use crate::early;
use crate::stats::Why;
use crate::switch::RxPath;

/// The connection's last number is closed, and its items go with it; until then the sets report it under the number that
/// was added.
pub fn fd_closed(conn: &Conn) {
    let local = conn.local();
    if !crate::process::has_threads() && local.watchers.load(SeqCst) == 0 {
        // In no set, and nobody is just about to put it into one.
        return;
    }
    let _g = local.lock.lock();
    // SAFETY: guarded by `local.lock`.
    let items = unsafe { &mut *local.items.get() };
    local.watchers_left(items.len());
    for (set, fd) in items.drain(..) {
        // SAFETY: sets are never freed.
        let s = unsafe { &*set };
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        s.removed(unsafe { &mut *s.inner.get() }.remove(Key::new(fd, conn), &s.begin_change()));
    }
}

/// `epoll_ctl(2)`.
///
/// # Safety
/// `ev` must be readable where the operation needs it.
pub unsafe fn ctl(epfd: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> Outcome {
    // SAFETY: the caller's promise.
    if let Some(outcome) = unsafe { young::ctl(epfd, op, fd, ev) } {
        return outcome;
    }
    loop {
        // SAFETY: the caller's promise.
        if let Some(outcome) = unsafe { try_ctl(epfd, op, fd, ev) } {
            return outcome;
        }
    }
}

/// What [`Set::change`] has done.
#[derive(PartialEq)]
enum Change {
    Done,
    /// Nothing: the set would need a bell, and gets none, or others use it, too.
    NotOurs(Why),
    /// Nothing: the number is another record's.
    Elsewhere,
}

/// `None`: the number's connection has got another record meanwhile.
unsafe fn try_ctl(epfd: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> Option<Outcome> {
    if let Some(inner) = set_of(fd) {
        return Some(match make_set(epfd) {
            Some(outer) if op == libc::EPOLL_CTL_DEL || !ev.is_null() => outer.nest(op, fd, inner, ev),
            _ => Outcome::Bypass,
        });
    }
    let Some(conn) = table::conn(fd) else {
        // SAFETY: the caller's promise.
        return unsafe { early::epoll_ctl(epfd, op, fd, ev) };
    };
    chaos::stumble();
    if conn.is_inherited() {
        if op != libc::EPOLL_CTL_DEL {
            crate::visit::settle(conn);
        }
        // Only a set that is the child's own says what it has of the connection.
        if let Some(set) = set_of(epfd) {
            set.meet(fd, conn);
        }
    }
    if matches!(conn.phase(), Phase::Plain | Phase::Closed) && conn.local_items_empty() {
        // A record that is no more has no items, but the one that it goes on as may have.
        return table::is(fd, conn).then_some(Outcome::Bypass);
    }
    let want = match op {
        libc::EPOLL_CTL_DEL => None,
        // SAFETY: any bits are an event.
        _ => match unsafe { copy::read(ev) } {
            Ok(e) => Some(e),
            Err(copy::Fault) => return Some(Outcome::Fail(libc::EFAULT)),
        },
    };
    let Some(set) = make_set(epfd) else { return Some(Outcome::Bypass) };
    // (A handler inside a receive of its own thread cannot wait for that.)
    if op != libc::EPOLL_CTL_ADD && !conn.rx_lock.held_by_me() {
        // Who has it nevertheless is told so by the kernel.
        set.has_lost(fd, conn);
    }
    let mut done = set.change(op, fd, conn, want);
    if let Ok(Change::NotOurs(why)) = done {
        crate::process::give_up(conn, why);
        done = set.change(op, fd, conn, want);
    }
    if done == Err(libc::EEXIST) && set.has_lost(fd, conn) {
        done = set.change(op, fd, conn, want);
    }
    if done == Ok(Change::Done) {
        set.note_anew(fd, conn);
    }
    Some(match done {
        Ok(Change::Elsewhere) => return None,
        // It could not return, and is reset.
        Ok(Change::NotOurs(_)) => Outcome::Fail(libc::ENOSPC),
        Ok(Change::Done) => {
            if op != libc::EPOLL_CTL_DEL {
                set.note_evidence(conn);
                kernel_is_stirred();
            }
            Outcome::Done(0)
        }
        Err(e) => Outcome::Fail(e),
    })
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
    /// An item is there no more.
    pub(super) fn removed(&self, item: Option<Item>) {
        if let Some(mut i) = item {
            self.unmute(&mut i);
            self.came(&mut i);
            if i.managed {
                self.managed.fetch_sub(1, SeqCst);
                self.count_managed(-1);
            }
        }
    }

    /// The item `fd` has been changed: children may go by what was noted of it.
    fn note_anew(&self, fd: c_int, conn: &Conn) {
        let name = self.name();
        // (A handler inside a receive of its own thread cannot wait for that.)
        let own = conn.rx_lock.held_by_me();
        if own || name.is_none() && (conn.is_managed() || conn.upgrade_no.load(Relaxed) == 0) {
            return;
        }
        let mut rx = conn.lock_rx();
        let Some(name) = name else { return rx.left().lacks_one() };
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`.
        let item = unsafe { &(*self.inner.get()).items }.get(&Key::new(fd, conn)).map(|i| Note::of(name, fd, i));
        match conn.is_managed() {
            true => rx.left().is_taken_out(name, fd, item.is_none()),
            false => rx.left().set(name, fd, item),
        }
    }

    /// The program has added an item, or changed it.
    fn item_changed(&self, item: &mut Item, to: &epoll_event, managed: bool) {
        item.events = to.events;
        item.data = to.u64;
        item.spent = false;
        item.told = Told::NOTHING;
        item.rearmed = managed;
        item.changes = item.changes.wrapping_add(1);
        self.unmute(item);
        self.came(item);
    }

    /// Why the set can have nothing that is managed.
    fn has_no_room(&self) -> Option<Why> {
        match self.need_bell() {
            None => Some(Why::Resources),
            _ => self.is_shared().then_some(Why::Shared),
        }
    }

    /// One more item is managed, in a set that has a bell. Those who sleep in the kernel, and do not know of the
    /// bell, are counted there from now on.
    fn one_more(&self) {
        let b = self.bell.load(Acquire);
        self.count_managed(1);
        if self.managed.fetch_add(1, SeqCst) == 0 {
            bell::count_unaware(b, self.place());
            bell::ring(b);
        }
    }

    /// Whatever the kernel says of an item is for the program.
    pub(super) fn unmute(&self, i: &mut Item) {
        if core::mem::take(&mut i.muted) {
            self.muted.fetch_sub(1, SeqCst);
        }
    }

    /// Nothing keeps an item out of the kernel's set any more.
    pub(super) fn came(&self, i: &mut Item) {
        if core::mem::take(&mut i.away) {
            self.away.fetch_sub(1, SeqCst);
        }
    }

    /// The kernel's set has a connection from its first moment on.
    ///
    /// # Safety
    /// The caller holds `local.lock` of the connection.
    pub unsafe fn begin_with(&'static self, fd: c_int, conn: &'static Conn, ev: &epoll_event) {
        let _g = self.lock.lock();
        // SAFETY: guarded by `lock`, and by `local.lock`: the caller's promise.
        unsafe {
            let items = &mut (*self.inner.get()).items;
            items.change(&self.begin_change()).insert(Key::new(fd, conn), Item::new(conn, ev, false));
            (*conn.local().items.get()).push((self, fd));
        }
        conn.watcher_added();
    }

    /// Changes an item. `EPOLL_CTL_ADD` needs `want`, and so does `EPOLL_CTL_MOD`.
    fn change(
        &'static self,
        op: c_int,
        fd: c_int,
        conn: &'static Conn,
        want: Option<epoll_event>,
    ) -> Result<Change, Errno> {
        let epfd = self.epfd.load(Relaxed);
        let key = Key::new(fd, conn);
        let local = conn.local();
        let lg = local.lock.lock();
        if !table::is(fd, conn) {
            return Ok(Change::Elsewhere);
        }
        let sg = self.lock.lock();
        // SAFETY: guarded by `local.lock` and `lock`.
        let (mine, inner) = unsafe { (&mut *local.items.get(), &mut *self.inner.get()) };
        let ev = want.unwrap_or(epoll_event { events: 0, u64: 0 });
        if ev.events & ONESHOT != 0 {
            // Before the kernel can report it: whoever gets that must come here, and wait for the lock.
            self.oneshots.store(1, SeqCst);
        }
        let managed = local.managed.load(Relaxed);
        let mut item = inner.items.get_mut(&key);
        if let (libc::EPOLL_CTL_MOD, Some(i), false) = (op, &mut item, managed) {
            // What programs do most with connections that are the kernel's.
            i.kernel_mod(self, fd, &ev)?;
            self.item_changed(i, &ev, false);
            return Ok(Change::Done);
        }
        let absent = item.as_ref().is_some_and(|i| i.spent || i.away);
        let may_lack = item.as_ref().is_some_and(|i| i.may_lack(self));
        let known = item.map(|i| (i.managed, i.events));
        match (op, known) {
            (libc::EPOLL_CTL_ADD, Some(_)) if managed || absent => {
                check_exclusive(ev.events)?;
                return Err(libc::EEXIST);
            }
            (libc::EPOLL_CTL_ADD, _) if managed => {
                check_exclusive(ev.events)?;
                if let Some(why) = self.has_no_room() {
                    return Ok(Change::NotOurs(why));
                }
                self.one_more();
            }
            (libc::EPOLL_CTL_MOD, Some((true, was))) => {
                if (ev.events | was) & EXCLUSIVE != 0 {
                    return Err(libc::EINVAL);
                }
            }
            (libc::EPOLL_CTL_MOD, None) if managed => {
                // Added before it was a connection: that the kernel knows it proves that it is here.
                kernel_ctl(epfd, op, fd, &ev)?;
                if let Some(why) = self.has_no_room() {
                    return Ok(Change::NotOurs(why));
                }
                let _ = kernel_ctl(epfd, libc::EPOLL_CTL_DEL, fd, &ev);
                self.one_more();
            }
            (libc::EPOLL_CTL_MOD, None) => {
                kernel_ctl(epfd, op, fd, &ev)?;
                conn.item_met();
            }
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, _) => kernel_ctl(epfd, op, fd, &ev).map(|_| ())?,
            (libc::EPOLL_CTL_DEL, _) => {
                if known.is_none_or(|(managed, _)| !managed) {
                    match kernel_ctl(epfd, op, fd, &ev) {
                        Err(libc::ENOENT) if may_lack => {}
                        r => drop(r?),
                    }
                }
                if known.is_none() {
                    conn.item_met();
                }
                self.removed(inner.remove(key, &self.begin_change()));
                let before = mine.len();
                mine.retain(|(s, f)| !(core::ptr::eq(*s, self) && *f == fd));
                local.watchers_left(before - mine.len());
                return Ok(Change::Done);
            }
            _ => return Err(libc::EINVAL),
        }
        let c = self.begin_change();
        let was = inner.items.get(&key).map_or(0, |i| if i.spent { 0 } else { i.events });
        let item = inner.items.change(&c).entry(key).or_insert_with(|| Item::new(conn, &ev, managed));
        drop(c);
        self.item_changed(item, &ev, managed);
        if !mine.iter().any(|(s, f)| core::ptr::eq(*s, self) && *f == fd) {
            mine.push((self, fd));
            conn.watcher_added();
        }
        drop(sg);
        drop(lg);
        if managed {
            self.push_ready(fd, conn);
            self.changed_in_order(fd, conn, was, ev.events);
        }
        Ok(Change::Done)
    }
}

/// The connection's readiness is ours from now on: takes it out of the kernel's sets. Gives false, and
/// changes nothing, where a set gets no bell, or has the connection under a number that is closed: the
/// kernel takes such an item out for nobody.
pub fn manage(b: &mut Both) -> bool {
    let conn = b.rx.conn();
    let local = conn.local();
    let _lg = local.lock.lock();
    // SAFETY: guarded by `local.lock`.
    let items = unsafe { &*local.items.get() };
    // SAFETY: sets are never freed.
    if !items.iter().all(|(s, fd)| table::is(*fd, conn) && unsafe { &**s }.need_bell().is_some()) {
        return false;
    }
    local.managed.store(true, Relaxed);
    let mut notes = Vec::new();
    for (s, fd) in items {
        // SAFETY: sets are never freed.
        let s = unsafe { &**s };
        {
            let _g = s.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &mut *s.inner.get() };
            let key = Key::new(*fd, conn);
            let fired = s.may_be_another(inner, key) && s.fired(inner.items[&key].data).contains(fd);
            let Some(i) = inner.items.get_mut(&key) else { continue };
            s.moves.fetch_add(1, SeqCst);
            i.spent |= fired;
            let dummy = epoll_event { events: 0, u64: 0 };
            let delete = || kernel_ctl(s.epfd.load(Relaxed), libc::EPOLL_CTL_DEL, *fd, &dummy);
            if i.events & ET == 0 {
                let _ = delete();
            } else {
                // Nothing that the set is yet to report: then all that there was is reported.
                let before = state(b, *fd);
                // Our own bell is no news. It is rung again below.
                bell::clear(s.bell.load(Relaxed));
                let quiet = sys::poll_now(s.epfd.load(Relaxed), libc::POLLIN) == 0;
                let _ = delete();
                if i.muted {
                    s.unmute(i);
                } else if quiet && state(b, *fd) == before {
                    i.told = Told::all(before.0, before.1);
                } else {
                    i.told = Told::NOTHING;
                }
            }
            i.moved = Moved::default();
            notes.push(s.name().map(|name| Note::of(name, *fd, i)));
            s.came(i);
            i.managed = true;
            i.rearmed = false;
            i.since = s.rounds.load(Relaxed);
            // It may be listed since it was managed before.
            if !core::mem::replace(&mut i.listed, true) {
                inner.ready.push_back(key);
            }
            s.listed.store(inner.ready.len() as u32, SeqCst);
            s.one_more();
            s.moves.fetch_add(1, SeqCst);
        }
        // The item is listed.
        bell::ring(s.bell.load(Relaxed));
    }
    // (What is added from here on is not noted.)
    b.rx.left().renew(notes.into_iter(), false);
    shared::look_back(items);
    true
}

/// What the kernel would tell of a connection on TCP.
fn state(b: &mut Both, fd: c_int) -> (News, u32) {
    const ALL: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP | libc::POLLPRI;
    // This first: the kernel has told whoever is to be told of bytes that it counts.
    let bits = sys::poll_now(fd, ALL | libc::POLLRDNORM | libc::POLLWRNORM) as u16;
    (News::under(&mut b.rx), bits.into())
}

/// The same, and what the kernel had moved then, or will have when it has all that had arrived by a ring, and the end that the
/// ring has told of; if it goes on to receive, perhaps a little less.
pub(super) fn still(b: &mut Both, fd: c_int) -> (Moved, (News, u32)) {
    const TRIES: u32 = 8;
    let look = |b: &mut Both| {
        let to_come = match b.rx.path() {
            RxPath::Replay => {
                let there = sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) as usize;
                b.rx.missing_shown().saturating_sub(there) as u64
            }
            _ => 0,
        };
        let (news, bits) = state(b, fd);
        let end = |ended: bool| u64::from(news.has_ended() && !ended);
        let received = rendezvous::received_and_ended(fd).map_or(0, |(n, ended)| n + to_come + end(ended));
        (Moved { received, sent: rendezvous::sent(fd) }, (news, if to_come > 0 { bits | IN } else { bits }))
    };
    let mut before = look(b);
    for _ in 0..TRIES {
        let after = look(b);
        if after == before {
            break;
        }
        before = after;
    }
    before
}

/// A number under which the kernel's set has an item.
pub(super) struct Number {
    pub(super) fd: c_int,
    /// It lives for this moment only: the item stays in the set when it is closed.
    aside: bool,
}

impl Number {
    /// Of the item `fd`: its own, or another if that is closed, as it is in the kernel's sets. Under both locks.
    fn of(fd: c_int, conn: &Conn) -> Option<Number> {
        if table::is(fd, conn) {
            return Some(Number { fd, aside: false });
        }
        // Another number of the connection is open, for the caller holds both its locks.
        let d = crate::fdhigh::dup_aside(conn.local().fd.load(Relaxed), None).ok()?;
        Some(Number { fd: d, aside: true })
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if self.aside {
            crate::sys::close(self.fd);
        }
    }
}

/// A closed number is the connection's again, and so are the items that were added under it: in the kernel's sets they may
/// stand under another. Under both locks.
pub fn number_back(conn: &Conn, fd: c_int) {
    let local = conn.local();
    let _lg = local.lock.lock();
    // SAFETY: guarded by `local.lock`.
    for (s, _) in unsafe { &*local.items.get() }.iter().filter(|(_, f)| *f == fd) {
        // SAFETY: sets are never freed.
        let s = unsafe { &**s };
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &mut *s.inner.get() };
        let Some(i) = inner.items.get_mut(&Key::new(fd, conn)) else { continue };
        let aside = core::mem::replace(&mut i.aside, -1);
        if i.managed || aside < 0 {
            continue;
        }
        // What the kernel has it takes out by that number only.
        let Ok(d) = crate::fdhigh::dup_aside(fd, Some(aside)) else { continue };
        let epfd = s.epfd.load(Relaxed);
        let ev = i.for_kernel();
        if d == aside && kernel_ctl(epfd, libc::EPOLL_CTL_DEL, d, &ev).is_ok() {
            let _ = kernel_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &ev);
        }
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
        unsafe { &**s }.push_seen(*fd, conn, ET);
    }
}

impl Set {
    /// A managed item goes back to the kernel's set. Returns what its connection's heirs are to know of it. Under the set's lock
    /// and both of the connection's.
    pub(super) fn return_item(&self, inner: &mut Inner, key: Key, b: &mut Both) -> Option<Note> {
        let conn = b.rx.conn();
        let muted = inner.items.get_mut(&key).is_some_and(|i| self.mute(i, b));
        let mut silenced = false;
        let is_idle = muted && self.is_idle_in_kernel(inner, &mut silenced);
        let i = inner.items.get_mut(&key)?;
        self.moves.fetch_add(1, SeqCst);
        let mut note = self.name().map(|name| Note::of(name, key.fd, i));
        // Before the kernel can report it. Calls that begin from here on hear of it from the kernel alone.
        i.since = self.rounds.fetch_add(1, SeqCst);
        self.returned.store(i.since, SeqCst);
        let number = if i.spent { None } else { Number::of(key.fd, conn) };
        if let Some(n) = &number {
            let _ = kernel_ctl(self.epfd.load(Relaxed), libc::EPOLL_CTL_ADD, n.fd, &i.for_kernel());
        }
        i.aside = number.as_ref().filter(|n| n.aside).map_or(-1, |n| n.fd);
        i.managed = false;
        let quiet = is_idle && number.is_some_and(|n| self.take_edge(inner, key, &n, b));
        note.iter_mut().for_each(|n| n.quiet = quiet);
        if silenced {
            bell::ring(self.bell.load(Acquire));
        }
        if self.managed.fetch_sub(1, SeqCst) == 1 && self.forked.load(Relaxed) {
            // Other processes see it in their kernel's set, which it would make readable.
            bell::clear(self.bell.load(Relaxed));
        }
        self.count_managed(-1);
        self.moves.fetch_add(1, SeqCst);
        note
    }

    /// The kernel will tell of an edge-triggered item because it has it again: notes whether there is news of it. Whether there
    /// is none.
    fn mute(&self, i: &mut Item, b: &mut Both) -> bool {
        if i.events & (ET | ONESHOT) != ET {
            return false;
        }
        let (moved, (news, bits)) = still(b, i.conn.local().fd.load(Relaxed));
        let bits = bits & (i.events | ALWAYS);
        if bits == 0 || i.told.has_news(news, bits, i.events) {
            i.told = Told::NOTHING;
            return false;
        }
        i.told = Told::all(news, bits);
        (i.muted, i.moved) = (true, moved);
        self.muted.fetch_add(1, SeqCst);
        true
    }
}

/// Whether the connection has items, all edge-triggered, that have been told of all that there is: what is repeated by TCP is
/// news to none of them.
pub fn is_told_of_all(b: &mut Both) -> bool {
    let local = b.rx.conn().local();
    if !local.managed.load(Relaxed) {
        return false;
    }
    let (_, (news, bits)) = still(b, local.fd.load(Relaxed));
    let is_told = |i: &Item| {
        let bits = bits & (i.events | ALWAYS);
        i.spent || i.events & (ET | ONESHOT) == ET && bits != 0 && !i.told.has_news(news, bits, i.events)
    };
    let _lg = local.lock.lock();
    // SAFETY: guarded by `local.lock`.
    let items = unsafe { &*local.items.get() };
    items.iter().all(|(s, fd)| {
        // SAFETY: sets are never freed.
        let s = unsafe { &**s };
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        let items = unsafe { &(*s.inner.get()).items };
        items.get(&Key::new(*fd, b.rx.conn())).is_none_or(|i| !i.managed || is_told(i))
    })
}

/// The connection is the kernel's again.
pub fn unmanage(b: &mut Both) {
    let conn = b.rx.conn();
    let local = conn.local();
    let _lg = local.lock.lock();
    if !local.managed.swap(false, Relaxed) {
        return;
    }
    // SAFETY: guarded by `local.lock`.
    let items = unsafe { &*local.items.get() };
    let mut notes = Vec::with_capacity(items.len());
    for (s, fd) in items {
        // SAFETY: sets are never freed.
        let s = unsafe { &**s };
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        let inner = unsafe { &mut *s.inner.get() };
        let key = Key::new(*fd, conn);
        if inner.items.get(&key).is_some_and(|i| i.managed) {
            notes.push(s.return_item(inner, key, b));
        }
    }
    b.rx.left().renew(notes.into_iter(), !local.left_in_a_set.load(Relaxed));
}
