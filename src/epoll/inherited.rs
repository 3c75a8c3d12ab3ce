//! Sets that a process has inherited over `fork`. The kernel's set is one for both; what the library knows of
//! it, and the connections that it took out of it, are each process's own.

use super::listing::Listed;
use super::*;
use crate::{process, visit};

impl Set {
    /// Whether this process has only inherited it.
    #[inline]
    pub(super) fn is_inherited(&self) -> bool {
        self.life.load(Relaxed) != process::life()
    }

    /// In a forked child, before it has more than one thread.
    pub(super) fn reset_after_fork(&self) {
        self.make_whole();
        self.lock.reset_after_fork();
        self.bell_lock.reset_after_fork();
        for w in [&self.bell, &self.managed, &self.young, &self.listed, &self.moving, &self.muted, &self.away] {
            w.store(0, Relaxed);
        }
        self.exposed.store(false, Relaxed);
        // Who was just letting one go over is not in this process, and would be waited for.
        self.moves.store(self.moves.load(Relaxed).next_multiple_of(2), Relaxed);
    }

    /// The child uses the set: its connections come home, and are looked after by the kernel.
    #[cold]
    pub(super) fn adopt(&'static self) {
        let before = self.life.load(Relaxed);
        let now = process::life();
        if before == now || self.life.compare_exchange(before, now, AcqRel, Relaxed).is_err() {
            return;
        }
        let whole = self.enter();
        let items: Vec<(Key, Item)> = {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &mut *self.inner.get() };
            inner.ready.clear();
            inner.moving.clear();
            let c = self.begin_change();
            inner.items.change(&c).drain().collect()
        };
        let lives = |key: &Key, i: &Item| table::is(key.fd, i.conn) && i.conn.gen.load(Relaxed) == i.gen;
        let items: Vec<(Key, Item)> = items
            .into_iter()
            .filter(|(key, item)| lives(key, item))
            .map(|(key, item)| (key, Item { away: !visit::settle(item.conn) && !item.spent, ..item }))
            .collect();
        let strays = match items.iter().any(|(_, i)| i.managed || has_left(i.conn)) {
            true => self.strays(),
            false => Vec::new(),
        };
        for (key, item) in items {
            // (Another thread may have closed it while others were waited for.)
            if lives(&key, &item) {
                self.take_over(key, item, &strays, whole);
            }
        }
        // By sets in it the kernel makes it readable.
        self.sets_in_it().into_iter().for_each(|(_, set)| set.adopt());
    }

    /// The item becomes this process's. `whole`: the kernel's set has all that its owner had taken out.
    fn take_over(&'static self, key: Key, mut item: Item, strays: &[Listed], whole: bool) {
        let (fd, conn) = (key.fd, item.conn);
        // What was told before the fork is no news for having been put back, nor what was told after it.
        let known = item.managed || item.muted;
        let was_away = item.managed || has_left(conn);
        if !known {
            item.told = Told::NOTHING;
        }
        let mut quiet = false;
        if was_away && !item.away {
            match self.found(conn, fd) {
                Found::Note(n) => {
                    item.set_to(&n);
                    quiet = n.quiet;
                }
                Found::Gone => return saw(conn),
                _ => {}
            }
        }
        let away = item.away;
        let ev = item.for_kernel();
        let stray = !away && self.take_stray(strays, fd, &ev);
        if !item.spent && !away && (!whole && was_away || stray) {
            // Its owner took it out of the kernel's set, and puts it back if it still lives. (What it did not is there, unless the
            // program has taken it out.)
            quiet &= kernel_ctl(self.epfd.load(Relaxed), libc::EPOLL_CTL_ADD, fd, &ev).is_err();
        }
        let (told, moved, spent) = (item.told, item.moved, item.spent);
        let muted = (known || was_away) && !quiet && item.events & (ET | ONESHOT) == ET;
        let item = Item { spent, away, told, moved, muted, ..Item::new(conn, &ev, false) };
        self.muted.fetch_add(muted.into(), SeqCst);
        self.away.fetch_add(away.into(), SeqCst);
        let local = conn.local();
        let _lg = local.lock.lock();
        let _sg = self.lock.lock();
        // SAFETY: guarded by `local.lock` and `lock`.
        unsafe {
            (*self.inner.get()).items.change(&self.begin_change()).insert(key, item);
            (*local.items.get()).push((self, fd));
        }
        conn.watcher_added();
        saw(conn);
    }

    /// The number `fd` is named to the set. An item that another process has added under it since the fork is this process's, too,
    /// from now on: if that has closed the number meanwhile the kernel has it under another.
    #[cold]
    pub(super) fn meet(&'static self, fd: c_int, conn: &'static Conn) {
        let key = Key::new(fd, conn);
        let is_known = || {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            unsafe { &(*self.inner.get()).items }.get(&key).is_some()
        };
        if !self.forked.load(Relaxed) || conn.upgrade_no.load(SeqCst) == 0 || is_known() {
            return;
        }
        if let Found::Note(n) = self.found(conn, fd) {
            let item = Item::new(conn, &epoll_event { events: n.events, u64: n.data }, true);
            conn.local().blind.fetch_add(1, Relaxed);
            self.take_over(key, item, &self.strays(), true);
        }
    }

    /// What the connection's owner has left of the item `fd`, when it gave it back to the kernel's set.
    fn found(&self, conn: &Conn, fd: c_int) -> Found {
        let Some(mut b) = visit::lock_both(conn) else { return Found::Unknown };
        match b.rx.left().find(self.name(), fd) {
            // Who has closed the set knows nothing of its items.
            Found::Gone if self.lacks() => Found::Unknown,
            found => found,
        }
    }

    /// Whether another process has taken the item `fd` out since; then it is there no more.
    #[cold]
    pub(super) fn has_lost(&self, fd: c_int, conn: &Conn) -> bool {
        // (Only of what the kernel's set does not have anyway can it be so.)
        let absent = || {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let item = unsafe { &(*self.inner.get()).items }.get(&Key::new(fd, conn));
            item.is_some_and(|i| !i.managed && (i.spent || i.away))
        };
        let lost = self.forked.load(Relaxed) && absent() && matches!(self.found(conn, fd), Found::Gone);
        if lost {
            self.forget(Key::new(fd, conn), conn);
        }
        lost
    }

    /// An item that another process has taken out is there no more.
    fn forget(&self, key: Key, conn: &Conn) {
        let local = conn.local();
        let _lg = local.lock.lock();
        let _g = self.lock.lock();
        // SAFETY: guarded by `local.lock` and `lock`.
        let (mine, inner) = unsafe { (&mut *local.items.get(), &mut *self.inner.get()) };
        self.removed(inner.remove(key, &self.begin_change()));
        let before = mine.len();
        mine.retain(|(s, f)| !(core::ptr::eq(*s, self) && *f == key.fd));
        local.watchers_left(before - mine.len());
    }

    /// What the kernel's set has under numbers of the library's. An owner that has closed an item's number puts it back under one
    /// that lives for a moment only: the kernel takes it out by that alone, and has it beside what is added here.
    fn strays(&self) -> Vec<Listed> {
        let mut all = Vec::new();
        let _ = listing::any_listed(self.epfd.load(Relaxed), |l| {
            if crate::fdhigh::is_aside(l.fd) {
                all.push(l);
            }
            false
        });
        all
    }

    /// Takes the one that is the item `fd` out of the kernel's set, if there is one. Whether there was.
    fn take_stray(&self, strays: &[Listed], fd: c_int, ev: &epoll_event) -> bool {
        if strays.is_empty() {
            return false;
        }
        let Some(inode) = listing::inode(fd) else { return false };
        let Some(stray) = strays.iter().find(|l| l.inode == inode && l.data == ev.u64) else { return false };
        let Ok(d) = crate::fdhigh::dup_aside(fd, Some(stray.fd)) else { return false };
        // Where its number is another file's here, it is none of the library's.
        let gone = d == stray.fd && kernel_ctl(self.epfd.load(Relaxed), libc::EPOLL_CTL_DEL, d, ev).is_ok();
        crate::sys::close(d);
        gone
    }

    /// Gives the kernel's set what has come home since [`adopt`](Self::adopt). False: something is still away; to be asked
    /// again in a moment.
    #[cold]
    pub(super) fn fetch(&self) -> bool {
        const MOST: usize = 8;
        let mut some: [Option<(Key, &'static Conn)>; MOST] = [None; MOST];
        {
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let items = unsafe { &(*self.inner.get()).items };
            for (to, (key, i)) in some.iter_mut().zip(items.iter().filter(|(_, i)| i.away)) {
                *to = Some((*key, i.conn));
            }
        }
        for (key, conn) in some.iter().flatten() {
            if !visit::settle(conn) {
                continue;
            }
            let found = self.found(conn, key.fd);
            if matches!(found, Found::Gone) {
                self.forget(*key, conn);
                continue;
            }
            let strays = self.strays();
            let _g = self.lock.lock();
            // SAFETY: guarded by `lock`.
            let inner = unsafe { &mut *self.inner.get() };
            if let Some(i) = inner.items.get_mut(key).filter(|i| i.away) {
                if let Found::Note(n) = found {
                    i.set_to(&n);
                }
                if table::is(key.fd, conn) {
                    self.take_stray(&strays, key.fd, &i.for_kernel());
                }
                if table::is(key.fd, conn) && !i.spent {
                    let _ = kernel_ctl(self.epfd.load(Relaxed), libc::EPOLL_CTL_ADD, key.fd, &i.for_kernel());
                }
                self.came(i);
            }
        }
        self.away.load(SeqCst) == 0
    }
}

/// Whether the connection's owner has taken it out of the kernel's sets since the fork.
fn has_left(conn: &Conn) -> bool {
    conn.upgrade_no.load(SeqCst) != conn.local().mapped.load(Relaxed)
}

/// A set that has the connection is not inherited, or not there, any more.
pub(super) fn saw(conn: &Conn) {
    let _ = conn.local().blind.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1));
}

/// The connection `old`, which is not managed, goes on as `new`. `rename` gives its numbers to `new`: a change of an item
/// that has found `old` by its number looks whether it still is that number's, and must not find an item moved that it has
/// yet to change.
pub fn moved(old: &'static Conn, new: &'static Conn, rename: impl FnOnce()) {
    let (from, to) = (old.local(), new.local());
    let _og = from.lock.lock();
    let _ng = to.lock.lock();
    rename();
    chaos::stumble();
    // SAFETY: guarded by `local.lock`, both of them.
    let (theirs, ours) = unsafe { (&mut *from.items.get(), &mut *to.items.get()) };
    to.left_in_a_set.store(from.left_in_a_set.load(Relaxed), Relaxed);
    // Threads in `poll` leave by themselves.
    from.watchers_left(theirs.len());
    for (set, fd) in theirs.drain(..) {
        // SAFETY: sets are never freed.
        let s = unsafe { &*set };
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        let items = unsafe { &mut (*s.inner.get()).items };
        let c = s.begin_change();
        let items = items.change(&c);
        if let Some(mut i) = items.remove(&Key::new(fd, old)) {
            s.unmute(&mut i);
            let ev = i.for_kernel();
            items.insert(Key::new(fd, new), Item { spent: i.spent, away: i.away, ..Item::new(new, &ev, false) });
            ours.push((set, fd));
        }
    }
    to.set_watchers(ours.len());
}

/// Before a fork: either process may put its bell into a set, where the other finds it. To be followed by
/// [`forking::is_over`](crate::forking::is_over) in the parent. Whether there is any set.
pub fn about_to_fork() -> bool {
    // A child could not tell what is kept with a fresh connection from what its parent goes on to do with that. Most are settled
    // before others have to wait for the fork; none is begun during it.
    crate::arena::each(|_| ());
    sets().for_each(Set::may_be_shared);
    // Whether a bell that makes a set readable means anything, the child could not tell.
    settle_all();
    crate::forking::begins();
    crate::arena::each(|_| ());
    let mut any = false;
    for s in sets() {
        any = true;
        s.belled.store(true, SeqCst);
        s.forked.store(true, SeqCst);
        s.await_whole();
    }
    any
}

/// A number of a set, which is still open in the kernel, is about to be closed. If it is the last one here, children that have
/// inherited the set see in it what the kernel has: of a connection that they have, they know; of one that they have closed they
/// hear in no other way.
pub fn about_to_close(s: &Set) {
    if !s.forked.load(Relaxed) || s.is_inherited() || s.fds.load(SeqCst) != 1 {
        return;
    }
    let all: Vec<&'static Conn> = {
        let _g = s.lock.lock();
        // SAFETY: guarded by `lock`.
        unsafe { &(*s.inner.get()).items }.values().map(|i| i.conn).collect()
    };
    // (A handler inside a call of its own thread cannot wait for that.)
    let is_free = |c: &Conn| !c.rx_lock.held_by_me() && !c.tx_lock.held_by_me();
    let is_ours = |c: &&Conn| c.holders.is_only(process::holder_id()) && is_free(c);
    process::stay_for_others(&all.into_iter().filter(is_ours).collect::<Vec<_>>());
}

/// All sets that have a number, some of them more than once.
pub(super) fn sets() -> impl Iterator<Item = &'static Set> {
    (0..=table::highest()).filter_map(|fd| match table::get(fd) {
        Entry::Set(s) => Some(s),
        _ => None,
    })
}

/// In a forked child: sets that were inherited are plain kernel sets to us, until they are used.
pub fn reset_after_fork() {
    shared::reset_after_fork();
    FREE_LOCK.reset_after_fork();
    EXPOSED.lock.reset_after_fork();
    // SAFETY: this is the child's only thread.
    unsafe { core::ptr::write(EXPOSED.sets.get(), Vec::new()) };
    FREE.store(core::ptr::null_mut(), Relaxed);
    sets().for_each(Set::reset_after_fork);
}
