//! How connections become the kernel's again: given back when both directions are home, closed, or orphaned with their link.

use super::search::later;
use super::*;

impl Bg {
    /// What is to return at once before the accepting end has begun its mark stays on TCP: the other end writes its own
    /// only when ours has begun.
    pub(super) fn stay(&mut self, conn: &'static Conn) {
        if !conn.is_hurried() || conn.connector.load(Relaxed) || conn.phase() != Phase::Managed {
            return;
        }
        {
            let mut b = conn.lock_both();
            if b.sw().rx() != RxPath::Armed {
                return;
            }
            b.sw().disarm();
            if !b.sw().is_plain() {
                return;
            }
            // SAFETY: links are never freed.
            let link = unsafe { conn.link.load(Acquire).as_ref() };
            let peer = conn.peer_slot.load(Relaxed);
            if let Some(l) = link.filter(|_| peer != u32::MAX) {
                // This also says that we have left its slot.
                self.say(l, Msg { kind: kind::REJECT, a: peer, b: Why::Refused as u32, ..Msg::default() });
                if let Some(r) = l.remote() {
                    r.part(peer);
                }
                *b.rx.ring() = RxRing::default();
                conn.attach_peer(u32::MAX, core::ptr::null());
            }
        }
        self.unmanage(conn, Why::Refused);
    }

    /// Both directions are on TCP: the connection is the kernel's again.
    pub(super) fn unmanage(&mut self, conn: &'static Conn, why: Why) {
        self.give_back(conn.lock_both(), conn, why);
    }

    /// The same for who has the locks.
    pub(super) fn give_back(&mut self, mut b: Both, conn: &'static Conn, why: Why) {
        if conn.phase() != Phase::Managed || !b.sw().is_plain() || conn.awaits_fin() || conn.is_let_go() {
            // With the end that is still under way we are called again. What was let go whoever holds it gives back, who has
            // an fd to ask the kernel by.
            return;
        }
        conn.find_lost().into_iter().for_each(|e| conn.fail(e));
        if conn.has_ended(END_RESET) {
            // The kernel has told how it failed, and would tell of no more than the end.
            drop(b);
            return conn.notify();
        }
        let fd = conn.local().fd.load(Relaxed);
        self.unwatch(fd);
        let s = conn.stats();
        let returned = why == Why::Returned;
        let why = match Why::from_u8(conn.leaves.swap(Why::None as u8, Relaxed)) {
            _ if !returned => why,
            Why::None => Why::PeerLeft,
            ours => ours,
        };
        // (One that only began to move has not been on a ring.)
        if returned && s.returns.load(Relaxed) < s.upgrades.load(Relaxed) {
            arena::count_return(conn, why);
        }
        let was_remote = conn.remote_pid.load(Relaxed) != 0;
        if order::is_off() {
            self.keep_way(conn);
        }
        self.detach(&mut b, conn);
        conn.confirmed.store(false, Relaxed);
        conn.nospace.store(false, Relaxed);
        conn.late.store(false, Relaxed);
        conn.bequeathed.store(false, SeqCst);
        s.link.store(0, Relaxed);
        let calls = conn.calls.load(Relaxed);
        let next = conn.next_try.load(Relaxed);
        // What is on TCP for good is not the operator's to bring back.
        let off = order::is_off() && next != u32::MAX;
        conn.why(if off { Why::Operator } else { why });
        let sw = b.sw();
        conn.publish_paths(sw);
        if chaos::is_on() && next != u32::MAX {
            conn.next_try.store(calls + chaos::calls(0), Relaxed);
        } else if off {
            later(conn, RARELY);
        } else if conn.visited.load(Relaxed) && next != u32::MAX {
            // Until the visitor has let go of it, which may be soon.
            conn.next_try.store(calls.saturating_add(64), Relaxed);
        } else if next != u32::MAX && now_ns() - conn.began.load(Relaxed) > CALM_NS {
            conn.next_try.store(calls.saturating_add(config::get().upgrade_after), Relaxed);
        } else {
            conn.next_try.store(next.max(calls.saturating_mul(2)), Relaxed);
        }
        // Counts were kept while it was ours; the kernel's include marks, frames and repeated bytes.
        if let Ok(counts) = rv::kernel_counts(fd, conn.connector.load(Relaxed)) {
            conn.set_tcp_counts(counts);
        }
        options::give_lowat(conn, fd);
        if conn.has_ended(END_TOLD) {
            // What the library has told the kernel does not tell again, whichever process asks it.
            let _ = sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_ERROR);
        }
        conn.set_phase(if conn.for_good.load(Relaxed) { Phase::Plain } else { Phase::Raw });
        chaos::stumble();
        if visit::shut_kernels(conn) {
            conn.set_phase(Phase::Plain);
        }
        epoll::unmanage(&mut b);
        drop(b);
        conn.notify();
        if was_remote && returned {
            self.rdma_again(conn, Why::Returned);
        }
    }

    /// The other end looks for a connection that returned when that has had many calls, and only then listens. When this
    /// process may use rings again, its accepting ends propose over the link that there is.
    fn keep_way(&mut self, conn: &Conn) {
        // SAFETY: links are never freed.
        let link = unsafe { conn.link.load(Acquire).as_ref() };
        let end = self.end_of.get(&(conn as *const Conn as usize));
        if let (Some(l), Some(&(t, false))) = (link.filter(|l| !l.is_alone() && !l.dead.load(Relaxed)), end) {
            self.asked.insert(t, (l, now_ns()));
        }
    }

    /// Lets go of slot and ring.
    pub(super) fn detach(&mut self, b: &mut Both, conn: &'static Conn) {
        // SAFETY: links are never freed.
        let Some(l) = (unsafe { conn.link.load(Acquire).as_ref() }) else { return };
        let (slot, peer) = (conn.slot.load(Relaxed), conn.peer_slot.load(Relaxed));
        let mut ring = core::mem::take(b.tx.ring());
        let mut read = core::mem::take(b.rx.ring());
        read.kept.release();
        read.given.release();
        conn.attach(None, 0, core::ptr::null());
        l.set_conn(slot, core::ptr::null());
        let left = self.left_by_peer.remove(&(key(l), slot));
        if let Some(r) = l.remote().filter(|_| peer != u32::MAX) {
            r.part(peer);
        }
        if peer != u32::MAX && !l.dead.load(Relaxed) {
            self.say(l, Msg { kind: kind::DETACH, a: peer, ..Msg::default() });
        }
        if left || l.dead.load(Relaxed) {
            free_slot(l, slot, &mut ring);
        } else {
            self.parked.insert((key(l), slot), ring);
        }
        self.watch_memory(l);
    }

    /// The program has closed it.
    pub(super) fn closed(&mut self, conn: &'static Conn) {
        if conn.phase() != Phase::Closed {
            return;
        }
        self.drop_looks(conn);
        {
            let mut b = conn.lock_both();
            self.detach(&mut b, conn);
        }
        arena::free(conn);
    }

    /// A connection of which nothing was heard for a while after the process at the other end was gone.
    pub(super) fn look_again(&mut self, conn: &'static Conn) {
        if is_orphan(conn) && !conn.has_ended(END_EOF) {
            let mut b = conn.lock_both();
            if !pump::bereave(&mut b) {
                pump::leave(&mut b, Why::Gone);
            }
        }
        self.stir(conn);
    }

    /// The process at the other end is gone. On one host the end of its sockets follows within the same system call,
    /// and until then what it has written is there to be read, as TCP would have it: a return, which would ask
    /// for it to be repeated, begins only where other processes hold its sockets.
    pub(super) fn lost(&mut self, l: &'static Link) {
        if let Some(r) = l.remote() {
            self.rdma_lost(l, r);
        } else {
            self.unwatch(l.sock);
            sys::close(l.sock);
        }
        l.dead.store(true, SeqCst);
        link::withdraw(l);
        self.links.retain(|x| !core::ptr::eq(*x, l));
        self.forget_memory(l);
        for v in self.servers.values_mut() {
            v.retain(|x| !core::ptr::eq(*x, l));
        }
        self.servers.retain(|_, v| !v.is_empty());
        self.asked.retain(|_, (x, _)| !core::ptr::eq(*x, l));
        self.left_by_peer.retain(|(x, _)| *x != key(l));
        for ((_, slot), mut ring) in self.parked.extract_if(|(x, _), _| *x == key(l)).collect::<Vec<_>>() {
            free_slot(l, slot, &mut ring);
        }
        let mut on_it = Vec::new();
        arena::each(|c| {
            if core::ptr::eq(c.link.load(Acquire), l) && c.phase() == Phase::Managed {
                on_it.push(c);
            }
        });
        for c in on_it {
            if l.remote().is_some() {
                pump::hurry(&mut c.lock_both(), Why::LinkLost);
                self.stir(c);
            } else if pump::is_never_marked(&mut c.lock_both()) {
                self.unmanage(c, Why::Refused);
                self.stir(c);
            } else {
                pump::bereave(&mut c.lock_both());
                self.look_later(c, ORPHAN_NS);
            }
        }
        self.unsent.remove(&key(l));
        for k in self.looks.values_mut() {
            if k.found.as_ref().is_some_and(|(x, _)| core::ptr::eq(*x, l)) {
                // Whoever it is may be found anew.
                (k.found, k.dials, k.at) = (None, 0, now_ns());
                k.conn.hold.store(false, SeqCst);
            }
        }
        self.dead.push((l, now_ns() + GRACE_NS));
    }
}

/// Whether the process of this host at the other end of a connection is gone.
pub(super) fn is_orphan(conn: &Conn) -> bool {
    // SAFETY: links are never freed.
    let link = unsafe { conn.link.load(Acquire).as_ref() };
    conn.phase() == Phase::Managed && link.is_some_and(|l| l.dead.load(Relaxed) && l.remote().is_none())
}

pub(super) fn free_slot(l: &Link, slot: u32, ring: &mut TxRing) {
    ring.release();
    l.side.free_slot(slot);
    l.slots.fetch_sub(1, SeqCst);
}
