//! What the two ends of a link say to each other of their connections: the exchange of nonces that begins
//! an upgrade, and the end of slots, bells and links.

use super::home::free_slot;
use super::search::{soon, told};
use super::*;
use crate::desk::Lent;
use crate::layout::{MARK_BEGUN, WANT_ORDER};
use crate::stats::AT_PEER;

/// Why a connection is not made ours.
#[derive(Clone, Copy)]
pub(super) enum Not {
    /// A thread is inside the kernel with it.
    Now,
    /// The peer is being asked for memory that it can write.
    WithoutRoom,
    /// Nobody knows before that time whether the program waits for it by a set that the library has not seen.
    Before(i64),
    /// For this reason.
    For(Why),
}

impl Bg {
    /// Sends a message, now or when there is room. `fd` goes along unless it is negative; it must stay
    /// open. False: the link is gone.
    pub(super) fn say_with(&mut self, l: &Link, m: Msg, fd: c_int) -> bool {
        if l.dead.load(Relaxed) {
            return false;
        }
        let m = self.stamp(m);
        log(Level::Trace, format_args!("link: say {} {} {}", m.kind, m.a, m.b));
        let queue = self.unsent.entry(key(l)).or_default();
        if !queue.is_empty() {
            queue.push_back((m, fd));
            return true;
        }
        if let Some(r) = l.remote() {
            if !r.say(&m) {
                queue.push_back((m, fd));
                r.wants_to_say.store(true, SeqCst);
                // Room that came before that was announced to nobody.
                self.flush_link(l);
            }
            return true;
        }
        match link::send_msg(l.sock, &m, if fd >= 0 { core::slice::from_ref(&fd) } else { &[] }) {
            Err(libc::EAGAIN) => {
                queue.push_back((m, fd));
                true
            }
            r => r.is_ok(),
        }
    }

    pub(super) fn say(&mut self, l: &Link, m: Msg) -> bool {
        self.say_with(l, m, -1)
    }

    /// Sends what there was no room for.
    pub(super) fn flush_link(&mut self, l: &Link) {
        let Some(queue) = self.unsent.get_mut(&key(l)) else { return };
        if let Some(r) = l.remote() {
            while queue.front().is_some_and(|(m, _)| r.say(m)) {
                queue.pop_front();
            }
            return r.wants_to_say.store(!queue.is_empty(), SeqCst);
        }
        while let Some((m, fd)) = queue.front() {
            if link::send_msg(l.sock, m, if *fd >= 0 { core::slice::from_ref(fd) } else { &[] }) == Err(libc::EAGAIN) {
                return;
            }
            queue.pop_front();
        }
    }

    pub(super) fn tell_bells(&mut self) {
        let used = bell::used();
        for l in self.links.clone() {
            if l.remote().is_some() {
                continue;
            }
            let mut new = used & !l.bells_sent.load(Relaxed);
            while new != 0 {
                let k = new.trailing_zeros();
                new &= new - 1;
                if !self.say_with(l, Msg { kind: kind::BELL, a: k, ..Msg::default() }, bell::fd(k)) {
                    break;
                }
                l.bells_sent.fetch_or(1 << k, Relaxed);
            }
        }
    }

    pub(super) fn hear_link(&mut self, l: &'static Link) {
        self.flush_link(l);
        loop {
            if l.dead.load(Relaxed) {
                return;
            }
            let mut fds = [-1; 4];
            let got = match desk::is_open().then(|| link::brings_fds(l.sock)) {
                Some(Ok(true)) => {
                    desk::run(|| Lent::new(l.sock).map(|s| link::recv_msg(s.fd(), &mut fds))).and_then(|r| r)
                }
                Some(Err(e)) => Err(e),
                Some(Ok(false)) | None => link::recv_msg(l.sock, &mut fds),
            };
            match got {
                Ok(Some(m)) => self.on_message(l, &m, &mut fds),
                Err(libc::EAGAIN) => return,
                Err(libc::EINTR) => {}
                Ok(None) | Err(_) => {
                    close_all(&fds);
                    self.lost(l);
                    return;
                }
            }
            close_all(&fds);
        }
    }

    pub(super) fn on_message(&mut self, l: &'static Link, m: &Msg, fds: &mut [c_int; 4]) {
        log(Level::Trace, format_args!("link: heard {} {} {}", m.kind, m.a, m.b));
        match m.kind {
            // One that serves a single connection is never asked for another.
            kind::ASK if l.is_alone() => {}
            kind::ASK => {
                if self.found((m.tuple, false)).is_some() {
                    self.propose(l, m.tuple);
                } else {
                    self.asked.insert(m.tuple, (l, now_ns()));
                }
            }
            kind::PROPOSE => self.on_propose(l, m),
            kind::ACCEPT => {
                let Some(conn) = l.conn(m.a).filter(|c| c.is_on(l, m.a)) else {
                    // Closed meanwhile.
                    self.say(l, Msg { kind: kind::REJECT, a: m.b, b: Why::Refused as u32, ..Msg::default() });
                    return;
                };
                if !is_held_by(conn, l) {
                    log(Level::Warn, format_args!("another user's process has claimed a connection: ignored"));
                    self.say(l, Msg { kind: kind::REJECT, a: m.b, b: Why::PeerUser as u32, ..Msg::default() });
                    conn.lock_both().sw().disarm();
                    return self.unmanage(conn, Why::PeerUser);
                }
                let why = if conn.hurry.load(SeqCst) { Why::Refused } else { Why::HalfClosed };
                let agreed = !crate::process::is_ending() && why != Why::Refused;
                if !agreed || !attach_peer(conn, l, m.b, m.nonce) {
                    // Closed meanwhile, for one. We never write a mark now, so the peer need not look for one, nor may it
                    // write its own.
                    self.say(l, Msg { kind: kind::REJECT, a: m.b, b: why as u32, ..Msg::default() });
                    conn.lock_both().sw().disarm();
                    return self.unmanage(conn, why);
                }
                conn.confirmed.store(true, Release);
                self.stir(conn);
            }
            kind::REJECT => {
                let Some(conn) = l.conn(m.a).filter(|c| c.is_on(l, m.a)) else { return self.left(l, m.a) };
                conn.lock_both().sw().disarm();
                self.left_by_peer.insert((key(l), m.a));
                let why = Why::from_u8(m.b as u8);
                self.unmanage(conn, why);
                if !matches!(why, Why::Refused | Why::NoPeer) && conn.phase() == Phase::Raw {
                    conn.stats().why.fetch_or(AT_PEER, Relaxed);
                }
                // The program may have closed it meanwhile.
                self.stir(conn);
            }
            kind::DETACH => self.left(l, m.a),
            kind::BELL if fds[0] >= 0 => {
                let Ok(bell) = desk::place(core::mem::replace(&mut fds[0], -1)) else { return };
                l.set_bell_fd(m.a, bell);
                self.say(l, Msg { kind: kind::BELL_OK, a: m.a, ..Msg::default() });
            }
            kind::BELL_OK => {
                l.bells_known.fetch_or(1 << (m.a & 63), Release);
            }
            kind::END => self.on_end(l),
            kind::KEEP => self.on_keep(l),
            kind::NEED => self.offer_chunks(l, m.a),
            kind::KEYS => {
                if let Some(r) = l.remote() {
                    if !r.take_chunk(&l.side, m.a, m.b) {
                        log(Level::Warn, format_args!("no more memory can be registered for a link"));
                    }
                    let now = now_ns();
                    let here = |k: &&mut Look| k.found.as_ref().is_some_and(|(x, _)| core::ptr::eq(*x, l));
                    self.looks.values_mut().filter(here).for_each(|k| k.at = now);
                    // Nobody else wakes who waits for memory, not for the reader.
                    arena::each(|c| {
                        if c.nospace.load(Relaxed) && core::ptr::eq(c.link.load(Acquire), l) {
                            options::try_room(c);
                        }
                    });
                }
            }
            _ => {}
        }
    }

    /// The peer uses a slot no more, and says so once. This end may have yet to let go of it.
    fn left(&mut self, l: &Link, slot: u32) {
        match self.parked.remove(&(key(l), slot)) {
            Some(mut ring) => free_slot(l, slot, &mut ring),
            None => _ = self.left_by_peer.insert((key(l), slot)),
        }
    }

    pub(super) fn propose(&mut self, l: &'static Link, t: Tuple) {
        let turn = self.turn;
        let Some(look) = self.looks.get_mut(&(t, false)) else { return };
        let (conn, gen, since) = (look.conn, look.gen, look.since(turn));
        if conn.gen.load(Relaxed) != gen {
            self.drop_look((t, false));
            return;
        }
        match self.begin(conn, l, since) {
            Ok((slot, nonce)) => {
                self.drop_look((t, false));
                told(t, "proposed");
                if !self.say(l, Msg { kind: kind::PROPOSE, a: slot, nonce, tuple: t, ..Msg::default() }) {
                    // Never sent, so the peer cannot have learnt the nonce.
                    conn.lock_both().sw().disarm();
                    self.left_by_peer.insert((key(l), slot));
                    self.unmanage(conn, Why::Refused);
                }
            }
            Err(Not::For(why)) => self.fail_look((t, false), why),
            Err(not) => {
                if !self.wait_for_calm((t, false), l, None, not) {
                    self.drop_look((t, false));
                    again(conn, t, not);
                }
            }
        }
    }

    pub(super) fn on_propose(&mut self, l: &'static Link, m: &Msg) {
        let reject = |bg: &mut Bg, why: Why| {
            bg.say(l, Msg { kind: kind::REJECT, a: m.a, b: why as u32, ..Msg::default() });
        };
        let turn = self.turn;
        let Some((conn, since)) = self.found((m.tuple, true)).map(|k| (k.conn, k.since(turn))) else {
            return reject(self, Why::NoPeer);
        };
        if l.is_alone() && l.slots.load(SeqCst) > 0 {
            return reject(self, Why::Refused);
        }
        self.in_vain.remove(&(m.tuple.to, m.tuple.to_port));
        let servers = self.servers.entry((m.tuple.to, m.tuple.to_port)).or_default();
        if !l.is_alone() && !servers.iter().any(|s| core::ptr::eq(*s, l)) {
            servers.push(l);
        }
        match self.begin(conn, l, since) {
            Ok((slot, nonce)) => {
                self.drop_look((m.tuple, true));
                told(m.tuple, "accepted");
                if !attach_peer(conn, l, m.a, m.nonce) {
                    // The program has closed it since, or shut its direction, or is about to end. Nobody is left to read
                    // the peer's mark, which the kernel would answer with a reset.
                    reject(self, Why::Refused);
                    conn.lock_both().sw().disarm();
                    self.left_by_peer.insert((key(l), slot));
                    return self.unmanage(conn, Why::Refused);
                }
                self.say(l, Msg { kind: kind::ACCEPT, a: m.a, b: slot, nonce, ..Msg::default() });
                // What was written before this may have been the mark's cue.
                self.stir(conn);
            }
            Err(Not::For(why)) => {
                reject(self, why);
                self.fail_look((m.tuple, true), why);
            }
            Err(not) => {
                if !self.wait_for_calm((m.tuple, true), l, Some(*m), not) {
                    reject(self, Why::Looking);
                    self.drop_look((m.tuple, true));
                    again(conn, m.tuple, not);
                }
            }
        }
    }

    /// A connection cannot be made ours at this moment: tries again in the next, a bounded number of times.
    /// False: that was the last; the connection's next calls will have it looked for anew.
    pub(super) fn wait_for_calm(&mut self, end: End, l: &'static Link, proposal: Option<Msg>, not: Not) -> bool {
        const TRIES: u32 = 64;
        /// With the memory that is awaited comes a look at once.
        const ROOM_NS: i64 = 100 * MS;
        let Some(k) = self.looks.get_mut(&end) else { return false };
        k.busy += 1;
        let later = match not {
            Not::WithoutRoom => {
                // Much may have changed by then.
                k.since = 0;
                Some(now_ns() + ROOM_NS)
            }
            Not::Before(at) => Some(at),
            Not::Now | Not::For(_) => None,
        };
        if let Some(at) = later.filter(|_| k.busy <= TRIES) {
            // Until then nobody needs to stand back.
            k.conn.hold.store(false, SeqCst);
            k.found = Some((l, proposal));
            k.at = at;
            return true;
        }
        if k.busy > TRIES {
            log(Level::Debug, format_args!("no ring for a connection: it is always busy"));
            return false;
        }
        k.found = Some((l, proposal));
        k.at = now_ns() + MS / 2 * i64::from(1 + k.busy / 16);
        true
    }

    /// Makes a connection ours and starts to look for its mark. `since`: when that was asked for first.
    pub(super) fn begin(&mut self, conn: &'static Conn, l: &'static Link, since: i64) -> Result<(u32, [u8; 16]), Not> {
        if l.dead.load(SeqCst) {
            return Err(Not::For(Why::Refused));
        }
        if order::is_off() {
            return Err(Not::For(Why::Operator));
        }
        if l.ending.load(SeqCst) {
            // Its end, or that it does not end, is a moment away.
            return Err(Not::Now);
        }
        let log2 = config::get().ring_bytes.trailing_zeros();
        if l.remote().is_some() && !l.side.has_room(log2) {
            return Err(Not::WithoutRoom);
        }
        if self.unseen.has(conn, since).map_err(Not::Before)? {
            make_plain(conn, Why::Unseen);
            return Err(Not::For(Why::Unseen));
        }
        let fd = conn.local().fd.load(Relaxed);
        if crate::foreign::cookie(fd).is_some_and(|c| desk::run(|| crate::foreign::is_signed(c))) {
            return Err(Not::For(Why::Shared));
        }
        // In this order: who puts up a sign for a program that can ask nobody takes it down as that is there.
        let is_stranger = |pid| desk::run(|| crate::foreign::is_stranger(pid));
        if conn.holders.any_other(crate::process::holder_id(), is_stranger) {
            conn.visited.store(true, SeqCst);
            return Err(Not::For(Why::Shared));
        }
        if epoll::is_shared(conn) {
            return Err(Not::For(Why::Shared));
        }
        crate::fault::stand_by();
        let mut b = conn.lock_both();
        let fd = conn.local().fd.load(Relaxed);
        if conn.phase() != Phase::Raw || fd < 0 || crate::process::is_ending() || crate::process::is_executing() {
            return Err(Not::For(Why::Refused));
        }
        if conn.is_inherited() || !may_be_used(conn) {
            return Err(Not::For(Why::Shared));
        }
        let unseen = conn.unknown_items.load(SeqCst) > 0 || epoll::is_unawaited(conn);
        if unseen || !crate::io::has_evidence(conn) {
            // Taken back since the peer was looked for; or it is the peer that wants to.
            return Err(Not::For(Why::Unseen));
        }
        // Who is inside the kernel now has not been counted yet; who comes later sees the phase.
        let busy = || conn.local().rx_inflight.load(SeqCst) > 0 || conn.local().tx_inflight.load(SeqCst) > 0;
        if busy() {
            conn.gentle.store(true, SeqCst);
            conn.hold.store(true, SeqCst);
            return Err(Not::Now);
        }
        conn.set_phase(Phase::Managed);
        chaos::stumble();
        if busy() {
            conn.set_phase(Phase::Raw);
            conn.gentle.store(true, SeqCst);
            conn.hold.store(true, SeqCst);
            return Err(Not::Now);
        }
        let r = prepare(&mut b, conn, l, fd);
        match r {
            Ok(ok) => {
                if let Some(r) = l.remote() {
                    r.served.store(true, Relaxed);
                }
                // Whatever was said of the slot's former use.
                self.left_by_peer.remove(&(key(l), ok.0));
                self.watch_memory(l);
                self.watch_unread();
                if chaos::is_on() {
                    self.restless.push((conn, conn.gen.load(Relaxed), chaos::leave_at()));
                }
                self.watch(fd, conn as *const Conn as u64 | token::CONN, CONN_EVENTS);
                // Perhaps it waits already, where it will see nothing of the ring.
                if conn.out_of_sight.load(SeqCst) && !conn.suspected.swap(true, SeqCst) {
                    self.suspect(conn);
                }
                Ok(ok)
            }
            Err(not) => {
                conn.set_phase(Phase::Raw);
                drop(b);
                let Not::For(why) = not else { return Err(not) };
                if why == Why::Resources && l.remote().is_some() && !l.side.has_room(log2) {
                    // Another connection's ring has grown meanwhile.
                    return Err(Not::WithoutRoom);
                }
                if why != Why::Resources {
                    make_plain(conn, why);
                }
                Err(Not::For(why))
            }
        }
    }
}

/// No right moment came for a connection.
fn again(conn: &Conn, t: Tuple, not: Not) {
    if matches!(not, Not::WithoutRoom) {
        told(t, "no memory for its ring");
        conn.why(Why::Resources);
    } else {
        told(t, "a thread is in the way; again soon");
        soon(conn);
    }
}

/// Whether a connection of ours may be upgraded as far as other processes go: those that merely have a copy
/// of the fd do no harm, those that use it do.
pub(super) fn may_be_used(conn: &Conn) -> bool {
    if !conn.visited.load(SeqCst) {
        return true;
    }
    if !conn.holders.is_only(crate::process::holder_id()) {
        return false;
    }
    conn.visited.store(false, SeqCst);
    // A child that was forked meanwhile has been counted before it could visit.
    let only = conn.holders.is_only(crate::process::holder_id());
    conn.visited.store(!only, SeqCst);
    only
}

/// Sets up slot, ring and switch. Under both locks.
pub(super) fn prepare(b: &mut Both, conn: &'static Conn, l: &'static Link, fd: c_int) -> Result<(u32, [u8; 16]), Not> {
    const RDHUP: i16 = libc::POLLRDHUP;
    if conn.has_ended(END_WRSHUT | END_RDSHUT)
        || sys::poll_now(fd, RDHUP) & (RDHUP | libc::POLLHUP | libc::POLLERR) != 0
    {
        return Err(Not::For(Why::HalfClosed));
    }
    match rv::kernel_counts(fd, conn.connector.load(Relaxed)) {
        Ok(counts) if counts == (conn.tx_tcp(), conn.rx_tcp()) => {}
        Err(rv::Uncounted::Moving) => return Err(Not::Now),
        _ => return Err(Not::For(Why::Bypass)),
    }
    if let Some(why) = options::feature_of(fd) {
        return Err(Not::For(why));
    }
    options::read_options(conn, fd);
    let slot = l.side.alloc_slot().ok_or(Not::For(Why::Resources))?;
    let own = l.side.slot(slot);
    if let Some(r) = l.remote() {
        r.renew(slot);
    }
    let Some(ring) = TxRing::new(&l.side, own, config::get().ring_bytes.min(conn.ring_cap.load(Relaxed))) else {
        l.side.free_slot(slot);
        return Err(Not::For(Why::Resources));
    };
    if !epoll::manage(b) {
        let mut ring = ring;
        ring.release();
        l.side.free_slot(slot);
        return Err(Not::For(Why::Resources));
    }
    let mut nonce = [0; 16];
    crate::process::random(&mut nonce);
    *b.tx.ring() = ring;
    *b.rx.ring() = RxRing::default();
    conn.attach(Some(l), slot, own);
    conn.hinted.store(0, Relaxed);
    conn.ordered.store(0, Relaxed);
    if l.own {
        own.want.fetch_or(WANT_ORDER, SeqCst);
    }
    conn.mark_got.store(0, Relaxed);
    conn.confirmed.store(false, Relaxed);
    conn.hurry.store(false, Relaxed);
    conn.crowded.store(false, Relaxed);
    conn.leaves.store(Why::None as u8, Relaxed);
    l.slots.fetch_add(1, SeqCst);
    l.set_conn(slot, conn);
    b.sw().arm(nonce);
    conn.began.store(now_ns(), Relaxed);
    let n = conn.upgrade_no.fetch_add(1, SeqCst).wrapping_add(1);
    // Children that are forked from here on inherit the mappings.
    conn.local().mapped.store(n, Release);
    conn.stats().link.store(if l.remote().is_some() { 2 } else { 1 }, Relaxed);
    if !conn.connector.load(Relaxed) {
        crate::spin::SERVES.store(true, Relaxed);
    }
    options::take(conn, fd);
    conn.held.store(0, SeqCst);
    conn.grown.store(false, SeqCst);
    Ok((slot, nonce))
}

/// The peer's slot and nonce are known.
pub(super) fn attach_peer(conn: &'static Conn, l: &'static Link, slot: u32, nonce: [u8; 16]) -> bool {
    let mut b = conn.lock_both();
    if crate::process::is_ending() && !conn.connector.load(Relaxed) {
        // Nobody would read the mark that the other end writes when it sees ours.
        return false;
    }
    let (Some(peer), Some(own)) = (l.peer_slot(slot), conn.own()) else { return false };
    if conn.phase() != Phase::Managed || b.sw().rx() != RxPath::Armed || b.rx.ring().is_attached() {
        return false;
    }
    if conn.unconfirmable.load(SeqCst) {
        // The program has ended its direction since, and the kernel has sent that: no mark can follow it.
        return false;
    }
    *b.rx.ring() = RxRing::new(l.peer_base(), peer, own);
    b.tx.ring().set_peer(peer);
    if let Some(r) = l.remote() {
        r.pair(slot, conn.slot.load(Relaxed), conn);
    }
    conn.attach_peer(slot, peer);
    b.set_peer_nonce(nonce);
    // Somebody is there.
    conn.in_vain.store(0, Relaxed);
    true
}

/// The peer's mark has begun and cannot be seen, because it stands far behind what the program has not read: a program
/// that only sends may not read for long. Whether ours needs not wait for it, because the kernel, too, says whose end that is.
/// Over RDMA nobody else could say so.
pub(super) fn confirm(conn: &Conn) -> bool {
    if conn.confirmed.load(Acquire) || !conn.connector.load(Relaxed) || conn.phase() != Phase::Managed {
        return false;
    }
    // SAFETY: links are never freed.
    let Some(l) = (unsafe { conn.link.load(Acquire).as_ref() }).filter(|l| l.remote().is_none()) else { return false };
    let begun = conn.peer().is_some_and(|p| p.flags.load(SeqCst) & MARK_BEGUN != 0);
    if !begun || !is_held_by(conn, l) {
        return false;
    }
    conn.confirmed.store(true, Release);
    true
}

/// Whether the other end of `conn` belongs to the user of the process at the other end of the link. Only
/// then may this end write a mark before it has seen the other's: anybody can bind a free name, but whoever has that
/// user's rights can take that user's sockets anyway.
fn is_held_by(conn: &Conn, l: &Link) -> bool {
    if l.remote().is_some() {
        // Another host does not tell whose its sockets are; see "Trust" in the design.
        return true;
    }
    let Some((_, uid, _)) = rv::credentials(l.sock) else { return false };
    if uid == 0 {
        return true;
    }
    let ends = {
        let _b = conn.lock_both();
        rv::ends(conn.local().fd.load(Relaxed))
    };
    match ends.as_ref().and_then(rv::owner_of_peer) {
        Some(owner) => owner == uid,
        // The kernel does not tell: then only ourselves.
        None => {
            // SAFETY: no preconditions.
            let own = unsafe { sys!(libc::SYS_geteuid) };
            own == Ok(uid as usize)
        }
    }
}

#[cfg(test)]
mod tests;
