//! Finding the process at the other end of a connection, and making a link with it.
//!
//! The end that connected listens at a name made of the connection's addresses; the end that accepted
//! dials it. Where a link exists already, the connecting end asks over it instead.

use super::*;
use crate::desk::Lent;
use crate::process;

impl Bg {
    pub(super) fn look(&mut self, conn: &'static Conn) {
        let Some(conn) = adopt(conn) else { return };
        if order::is_off() {
            conn.why(Why::Operator);
            return later(conn, RARELY);
        }
        let gen = conn.gen.load(Relaxed);
        let ends = {
            let _b = conn.lock_both();
            if conn.phase() != Phase::Raw {
                return;
            }
            if !upgrade::may_be_used(conn) {
                // Until the other process has let go of it, which may be soon.
                later(conn, 64);
                conn.why(Why::Shared);
                return;
            }
            let fd = conn.local().fd.load(Relaxed);
            rv::ends(fd).map(|ends| (ends, rv::network_of(fd)))
        };
        let Some((ends, network)) = ends else { return };
        let elsewhere = match (network, self.network) {
            (Some(its), Some(ours)) => its != ours,
            _ => process::has_left_network(),
        };
        let s = conn.stats();
        ends.iter().zip([&s.local, &s.peer]).for_each(|(end, to)| to.note(end));
        let c = config::get();
        let local = ends[0].0 == ends[1].0 || rv::is_local(&ends[1]);
        let verbs = !(local && c.links.shm);
        let why = if elsewhere {
            Why::Network
        } else if !rules::allows(&rv::socket_addr(&ends[0]), &rv::socket_addr(&ends[1])) {
            Why::Rules
        } else if !verbs {
            Why::None
        } else if !c.links.verbs {
            if local {
                Why::LinksOff
            } else {
                Why::OtherHost
            }
        } else {
            self.rdma_refusal(&ends[1].0)
        };
        if why != Why::None {
            if matches!(why, Why::NoWay | Why::NoDevice) && self.rdma_again(conn, why) {
                return;
            }
            if why == Why::NoWay && !is_hopeless(conn) {
                // That it cannot be reached is believed for a while only.
                conn.why(why);
            } else {
                make_plain(conn, why);
                if !self.end_of.contains_key(&(conn as *const Conn as usize)) {
                    // Nobody is to be told of its end.
                    conn.local().submitted.store(false, SeqCst);
                }
            }
            return;
        }
        let connector = conn.connector.load(Relaxed);
        let t = rv::tuple(&ends, connector);
        let end = (t, connector);
        let now = now_ns();
        if self.looks.get(&end).is_some_and(|l| l.gen != gen || !core::ptr::eq(l.conn, conn)) {
            self.drop_look(end);
        }
        let resting = connector && self.in_vain.get(&(t.to, t.to_port)).is_some_and(|(_, until)| *until > now);
        if self.looks.len() >= LOOKS || resting {
            return later(conn, 64);
        }
        // The thread before may have taken that back.
        conn.local().submitted.store(true, SeqCst);
        self.known.insert(end, Known { conn, gen });
        self.end_of.insert(conn as *const Conn as usize, end);
        conn.why(Why::Looking);
        let mut told = false;
        if connector {
            for l in self.perhaps_of((t.to, t.to_port), verbs).into_iter().rev().take(4) {
                told |= self.say(l, Msg { kind: kind::ASK, tuple: t, ..Msg::default() });
            }
        }
        let again = if connector { self.rdma_window(conn) } else { 0 };
        let look = self.looks.entry(end).or_insert_with(|| Look::new(conn, gen, now));
        let parked = look.at == look.until;
        if look.found.is_some() || (look.listener >= 0 && !parked) {
            return;
        }
        look.until = now + if verbs { again.max(LISTEN_NS * 5) } else { LISTEN_NS };
        look.verbs = verbs;
        if verbs && look.attempt != 0 {
            // It can be found still.
            look.at = look.until;
        } else if parked {
            look.at = now + GLANCE_NS;
        } else if told {
            look.at = now + 5 * MS;
        }
        match self.asked.remove(&t) {
            Some((l, _)) if !connector => self.propose(l, t),
            _ => self.timers(),
        }
    }

    /// Links of which one may have the accepting end of a connection. Where a rendezvous takes long, a server that is not known may
    /// be a process that is, with another port.
    fn perhaps_of(&self, server: ([u8; 16], u16), another_port: bool) -> Vec<&'static Link> {
        if let Some(links) = self.servers.get(&server) {
            return links.clone();
        }
        let mut found: Vec<&'static Link> = Vec::new();
        let there = self.servers.iter().filter(|((to, _), _)| another_port && *to == server.0);
        for l in there.flat_map(|(_, links)| links) {
            if !found.iter().any(|f| core::ptr::eq(*f, *l)) {
                found.push(l);
            }
        }
        found
    }

    /// The other end of a connection has found us: the search for it, begun anew if it had ended.
    pub(super) fn found(&mut self, end: End) -> Option<&mut Look> {
        let k = *self.known.get(&end)?;
        if !k.is_raw() {
            return None;
        }
        let look = self.looks.entry(end).or_insert_with(|| {
            let now = now_ns();
            Look { dials: DIALS, at: now + LOOK_NS, until: now, ..Look::new(k.conn, k.gen, now) }
        });
        (look.gen == k.gen).then_some(look)
    }

    pub(super) fn step_look(&mut self, end: End, now: i64) {
        let t = end.0;
        let hello = self.stamp(Msg { kind: kind::HELLO, tuple: t, ..Msg::default() });
        let epfd = self.desk_epfd;
        let Some(look) = self.looks.get_mut(&end) else { return };
        let conn = look.conn;
        if conn.gen.load(Relaxed) != look.gen || conn.phase() != Phase::Raw {
            self.drop_look(end);
            return;
        }
        let (many, verbs) = (self.listening > LISTENERS, look.verbs);
        if let Some((l, proposal)) = look.found.take() {
            match proposal {
                Some(m) => self.on_propose(l, &m),
                None => self.propose(l, t),
            }
            return;
        }
        if verbs {
            return self.step_rdma(end, now);
        }
        if conn.connector.load(Relaxed) {
            if look.listener < 0 && now < look.until {
                match watched(epfd, token::LISTENER, libc::EPOLLIN, || rv::listen(&t)) {
                    Ok(fd) => {
                        self.listening += 1;
                        look.listener = fd;
                        look.at = now + if look.again { GLANCE_NS } else { EASE_NS };
                        look.sure_at = now + LOOK_NS;
                    }
                    // Our own earlier listener for a former use of the same ports may linger for a moment.
                    Err(libc::EADDRINUSE) => look.at = now + 20 * MS,
                    Err(_) => self.fail_look(end, Why::Resources),
                }
            } else if now < look.sure_at && !look.again && !look.has_moved_enough(now) {
                look.ease();
                look.at = look.sure_at.min(now + EARLY_NS);
            } else if now < look.until && !many {
                // The other end may look later. Until then this is a connection like any other.
                look.at = look.until;
                again_if_busy(conn);
                conn.why(Why::NoPeer);
                if is_hopeless(conn) {
                    self.drop_look(end);
                    make_plain(conn, Why::NoPeer);
                }
            } else {
                self.fail_look(end, Why::NoPeer);
            }
            return;
        }
        if look.has_moved_enough(now) || look.dials >= if look.again { LATER_DIALS } else { DIALS } {
            self.fail_look(end, Why::NoPeer);
            return;
        }
        if MS << look.dials >= EASE_NS {
            look.ease();
        }
        look.at = now + (MS << look.dials);
        look.dials += 1;
        let dialled = watched(epfd, token::CALLER, libc::EPOLLIN, || {
            let fd = rv::dial(&t)?;
            let said = link::send_msg(fd, &hello, &[]);
            said.inspect_err(|_| sys::close(fd)).map(|_| fd).map_err(|_| libc::EAGAIN)
        });
        // While this is under way there is nothing else to do.
        let at = now + HANDSHAKE_NS;
        match dialled {
            Ok(fd) => {
                (look.at, look.dials) = (at, DIALS);
                self.callers.insert(fd, Caller { dialled: Some(t), offer: None, until: at });
            }
            Err(libc::ECONNREFUSED | libc::EAGAIN | libc::ENOENT) => {}
            Err(_) => self.fail_look(end, Why::Resources),
        }
    }

    pub(super) fn drop_look(&mut self, end: End) -> Option<Look> {
        let look = self.looks.remove(&end)?;
        self.rdma_let_go(look.attempt);
        if look.listener >= 0 {
            self.listening -= 1;
            desk::run(|| sys::close(look.listener));
        }
        if let Some((l, Some(m))) = look.found {
            // Who has proposed it keeps a slot and a ring for it until there is an answer.
            self.say(l, Msg { kind: kind::REJECT, a: m.a, b: Why::Refused as u32, ..Msg::default() });
        }
        if look.gen == look.conn.gen.load(Relaxed) {
            look.conn.gentle.store(false, Relaxed);
            // Who stands back for it needs not do so any more.
            if look.conn.hold.swap(false, SeqCst) {
                look.conn.notify();
            }
        }
        Some(look)
    }

    /// A connection is not to be looked for any more, and not to be found.
    pub(super) fn drop_looks(&mut self, conn: &Conn) {
        if let Some(end) = self.end_of.remove(&(conn as *const Conn as usize)) {
            // The same name may be that of a newer connection already.
            if self.known.get(&end).is_some_and(|k| core::ptr::eq(k.conn, conn)) {
                self.known.remove(&end);
                self.drop_look(end);
            }
        }
    }

    /// The search was in vain. If nobody was found the connection is looked for again when it has had
    /// several times as many calls. That there was no memory or no slot, or an operator was against it, may pass; most other
    /// reasons are final.
    pub(super) fn fail_look(&mut self, end: End, why: Why) {
        let Some(look) = self.drop_look(end) else { return };
        if look.conn.gen.load(Relaxed) != look.gen {
            return;
        }
        // Who has no room for a link hangs up at either end.
        let why = if why == Why::NoPeer && !link::has_address_space() { Why::Resources } else { why };
        look.conn.why(why);
        told(end.0, why.text());
        if look.verbs && matches!(why, Why::NoPeer | Why::NoWay) && self.rdma_again(look.conn, why) {
            return;
        }
        if matches!(why, Why::Shared | Why::Unseen) {
            // Until the other process has let go of it, or the program shows how it waits.
            later(look.conn, 64);
        } else if matches!(why, Why::Resources | Why::Operator) {
            later(look.conn, RARELY);
        } else if !matches!(why, Why::NoPeer | Why::NoWay) || is_hopeless(look.conn) {
            make_plain(look.conn, why);
        } else if why == Why::NoPeer {
            again_if_busy(look.conn);
            if !end.1 {
                return;
            }
            let (times, until) = self.in_vain.entry((end.0.to, end.0.to_port)).or_default();
            *times += 1;
            if *times >= PATIENCE {
                *until = now_ns() + REST_NS;
            }
        }
    }

    /// Somebody has found us.
    pub(super) fn answer(&mut self, listener: c_int) {
        let accept = || rv::accept(listener);
        let Ok(fd) = watched(self.desk_epfd, token::CALLER, libc::EPOLLIN, accept) else { return };
        self.callers.insert(fd, Caller { dialled: None, offer: None, until: now_ns() + HANDSHAKE_NS });
    }

    pub(super) fn hang_up(&mut self, fd: c_int) {
        desk::run(|| sys::close(fd));
        let Some(c) = self.callers.remove(&fd) else { return };
        if let Some((side, process)) = c.offer {
            self.ask_later.retain(|(p, _)| *p != process);
            // SAFETY: the peer never got to use it, or is going to fail.
            desk::run(|| unsafe { side.destroy() });
        }
        if let Some(t) = c.dialled {
            self.fail_look((t, false), Why::NoPeer);
        }
    }

    pub(super) fn hear(&mut self, fd: c_int) {
        let mut fds = [-1; 4];
        let (msg, who) = desk::run(|| (link::recv_msg(fd, &mut fds), rv::credentials(fd)));
        let m = match msg {
            Ok(Some(m)) => m,
            Err(libc::EAGAIN) => return,
            Ok(None) | Err(_) => {
                close_all(&fds);
                if matches!(msg, Err(libc::EPROTO)) && self.callers.contains_key(&fd) {
                    log(Level::Warn, format_args!("nonsense on a rendezvous socket: ignored"));
                }
                return self.hang_up(fd);
            }
        };
        let Some(caller) = self.callers.get_mut(&fd) else { return close_all(&fds) };
        let version_ok = m.version == config::protocol(link::VERSION);
        match m.kind {
            kind::HELLO if caller.dialled.is_none() && caller.offer.is_none() => {
                close_all(&fds);
                let refusal = self.refusal(who, version_ok);
                if let Some(why) = refusal {
                    let no = self.stamp(Msg { kind: kind::REFUSE, a: why as u32, ..Msg::default() });
                    let _ = desk::run(|| link::send_msg(fd, &no, &[]));
                    if self.looks.contains_key(&(m.tuple, true)) {
                        self.fail_look((m.tuple, true), why);
                    }
                    return self.hang_up(fd);
                }
                let serves = |l: &&&'static Link| l.answered && l.process == m.process && !l.ending.load(SeqCst);
                if let Some(l) = self.links.iter().find(serves).copied() {
                    let r#use = self.stamp(Msg { kind: kind::USE, ..Msg::default() });
                    let _ = desk::run(|| link::send_msg(fd, &r#use, &[]));
                    self.say(l, Msg { kind: kind::ASK, tuple: m.tuple, ..Msg::default() });
                    return self.hang_up(fd);
                }
                let offered = |c: &Caller| c.offer.as_ref().is_some_and(|(_, p)| *p == m.process);
                if self.callers.values().any(offered) {
                    self.ask_later.push((m.process, m.tuple));
                    let r#use = self.stamp(Msg { kind: kind::USE, ..Msg::default() });
                    let _ = desk::run(|| link::send_msg(fd, &r#use, &[]));
                    return self.hang_up(fd);
                }
                match self.offer(fd, kind::WELCOME) {
                    Some((side, sent)) => {
                        if let Some(c) = self.callers.get_mut(&fd) {
                            c.offer = Some((side, m.process));
                        }
                        if !sent {
                            self.hang_up(fd);
                        }
                    }
                    None => self.hang_up(fd),
                }
            }
            kind::WELCOME if caller.dialled.is_some() && version_ok && fds[3] >= 0 => {
                let t = caller.dialled;
                if let Some(why) = self.refusal(who, version_ok) {
                    close_all(&fds);
                    if let Some(c) = self.callers.get_mut(&fd) {
                        c.dialled = None;
                    }
                    self.hang_up(fd);
                    if let Some(t) = t {
                        self.fail_look((t, false), why);
                    }
                    return;
                }
                let Some((side, sent)) = self.offer(fd, kind::LINKED) else {
                    close_all(&fds);
                    return self.hang_up(fd);
                };
                if !sent {
                    close_all(&fds);
                    // SAFETY: nobody has seen it.
                    desk::run(|| unsafe { side.destroy() });
                    return self.hang_up(fd);
                }
                self.callers.remove(&fd);
                if let (Some(l), Some(t)) = (self.connect(fd, m.process, false, side, fds), t) {
                    self.propose(l, t);
                }
            }
            kind::LINKED if version_ok && fds[3] >= 0 => match caller.offer.take() {
                Some((side, process)) => {
                    self.callers.remove(&fd);
                    if let Some(l) = self.connect(fd, process, true, side, fds) {
                        for (p, t) in self.ask_later.extract_if(.., |(p, _)| *p == process).collect::<Vec<_>>() {
                            debug_assert_eq!(p, l.process);
                            self.say(l, Msg { kind: kind::ASK, tuple: t, ..Msg::default() });
                        }
                    }
                }
                None => {
                    close_all(&fds);
                    self.hang_up(fd);
                }
            },
            kind::USE if caller.dialled.is_some() => {
                // An ASK comes over the link; it may be here already.
                let t = caller.dialled.take();
                self.hang_up(fd);
                if let Some(t) = t {
                    if let Some((l, _)) = self.asked.remove(&t) {
                        self.propose(l, t);
                    }
                }
            }
            kind::REFUSE if caller.dialled.is_some() => {
                let t = caller.dialled.take();
                self.hang_up(fd);
                if let Some(t) = t {
                    self.fail_look((t, false), Why::from_u8(m.a as u8));
                }
            }
            _ => {
                close_all(&fds);
                log(Level::Warn, format_args!("nonsense on a rendezvous socket: ignored"));
                self.hang_up(fd);
            }
        }
    }

    pub(super) fn refusal(&self, who: Option<(u32, u32, u32)>, version_ok: bool) -> Option<Why> {
        if !version_ok {
            return Some(Why::Version);
        }
        let (pid, uid, gid) = who?;
        if !config::peer_allowed(uid, gid) {
            log(Level::Info, format_args!("process {pid} of user {uid} is not allowed by RINGSOCK_PEERS"));
            return Some(Why::PeerUser);
        }
        log(Level::Debug, format_args!("process {pid} of user {uid} asks for a link"));
        None
    }

    /// Makes our half of a new link, and sends it. Whether that went well.
    pub(super) fn offer(&self, fd: c_int, kind: u32) -> Option<(Side, bool)> {
        if !link::has_address_space() {
            return None;
        }
        let page = bell::page_fd()?;
        let m = self.stamp(Msg { kind, ..Msg::default() });
        let offer: SysResult<(Side, bool)> = desk::run(|| {
            let side = Side::new()?;
            let (Ok(page), Ok(bell)) = (Lent::new(page), Lent::new(bell::fd(0))) else { return Ok((side, false)) };
            let sent = link::send_msg(fd, &m, &[side.fd, page.fd(), bell.fd(), side.wakes_fd()]);
            Ok((side, sent.is_ok()))
        });
        match offer {
            Ok(offer) => Some(offer),
            Err(e) => {
                log(Level::Warn, format_args!("no shared memory for a link (errno {e}): connections stay on TCP"));
                None
            }
        }
    }

    pub(super) fn connect(
        &mut self,
        sock: c_int,
        process: [u8; 16],
        answered: bool,
        side: Side,
        fds: [c_int; 4],
    ) -> Option<&'static Link> {
        self.unwatch_desk(sock);
        let mut l = match Link::new(process, answered, sock, side, fds) {
            Ok(l) => l,
            Err(e) => {
                log(Level::Warn, format_args!("a peer's memory cannot be used (errno {e})"));
                return None;
            }
        };
        l.own = process == self.process;
        if l.own {
            epoll::own_peer();
        }
        let sock = l.sock;
        let Some(l) = link::publish(l, &mut self.retired) else {
            sys::close(sock);
            return None;
        };
        self.links.push(l);
        self.watch(sock, key(l) as u64 | token::LINK, libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET);
        self.tell_bells();
        Some(l)
    }
}

impl Look {
    fn new(conn: &'static Conn, gen: u32, now: i64) -> Look {
        Look {
            conn,
            gen,
            again: conn.in_vain.load(Relaxed) > 0,
            listener: -1,
            dials: 0,
            calls: conn.calls.load(Relaxed),
            bytes: conn.tx_tcp() + conn.rx_tcp(),
            found: None,
            verbs: false,
            attempt: 0,
            sent_to: None,
            busy: 0,
            since: 0,
            at: now,
            sure_at: now,
            begun: now,
            until: now + LISTEN_NS,
        }
    }

    /// Calls stay out of the way of an upgrade while it is looked for, unless there are so many that they do by themselves.
    fn ease(&mut self) {
        let calls = self.conn.calls.load(Relaxed);
        self.conn.gentle.store(calls.wrapping_sub(self.calls) < IN_A_HURRY, Relaxed);
        self.calls = calls;
    }

    /// Whether a peer, if there were one, would have shown itself by now: see [`ENOUGH_BYTES`].
    fn has_moved_enough(&self, now: i64) -> bool {
        now - self.begun >= EARLY_NS
            && (self.conn.tx_tcp() + self.conn.rx_tcp()).saturating_sub(self.bytes) >= ENOUGH_BYTES
    }

    /// Since when a moment is looked for in which the connection can be made ours: if not before, since this `turn`.
    pub(super) fn since(&mut self, turn: i64) -> i64 {
        if self.since == 0 {
            self.since = turn;
        }
        self.since
    }
}

/// The peer was looked for in vain: whether that was the last time.
fn is_hopeless(conn: &Conn) -> bool {
    conn.in_vain.fetch_add(1, Relaxed) + 1 >= SEARCHES && conn.calls.load(Relaxed) >= BUSY_CALLS
}

/// It was looked for in vain: the next time is when it has had as many calls again at the latest. (Calls that come while it
/// is looked for have that put off.)
fn again_if_busy(conn: &Conn) {
    let (calls, next) = (conn.calls.load(Relaxed), conn.next_try.load(Relaxed));
    if next != u32::MAX {
        conn.next_try.store(next.min(calls.saturating_mul(2).max(BUSY_CALLS)), Relaxed);
    }
    conn.gentle.store(false, Relaxed);
}

/// What became of an attempt to move a connection, for `RINGSOCK_LOG=debug`.
pub(super) fn told(t: Tuple, what: &str) {
    let (from, to) = (rv::socket_addr(&(t.from, t.from_port)), rv::socket_addr(&(t.to, t.to_port)));
    log(Level::Debug, format_args!("{from} to {to}: {what}"));
}

/// Has a connection looked for again after so many calls.
pub(super) fn later(conn: &Conn, calls: u32) {
    conn.next_try.store(conn.calls.load(Relaxed).saturating_add(calls), Relaxed);
    conn.gentle.store(false, Relaxed);
}

/// Has a connection looked for again with its next calls, and calls out of the way until then.
pub(super) fn soon(conn: &Conn) {
    later(conn, 16);
    conn.gentle.store(true, Relaxed);
}

/// A connection that was inherited, and that nobody else holds any more, becomes this process's own: it
/// gets a record in our arena. `None`: not now.
fn adopt(old: &'static Conn) -> Option<&'static Conn> {
    if !old.is_inherited() {
        return Some(old);
    }
    let me = crate::process::holder_id();
    let local = old.local();
    // A child that is forked meanwhile would be no holder of the new record.
    let _between = crate::forking::Between::begin();
    let b = old.lock_both();
    let alone = old.phase() == Phase::Raw && old.holders.is_only(me);
    if !alone || local.fd.load(Relaxed) < 0 || local.blind.load(Relaxed) > 0 {
        later(old, 64);
        return None;
    }
    let new = arena::alloc()?;
    // As in an upgrade: who is inside the kernel has not been counted yet, who comes later waits for the locks.
    let busy = || local.rx_inflight.load(SeqCst) > 0 || local.tx_inflight.load(SeqCst) > 0;
    let calm = !busy() && {
        old.set_phase(Phase::Managed);
        let calm = !busy();
        if !calm {
            old.set_phase(Phase::Raw);
        }
        calm
    };
    if !calm {
        arena::forget(new);
        soon(old);
        return None;
    }
    new.take_over(old);
    // Who finds it in the table uses it, and who closes it waits.
    let whole = new.lock_both();
    new.set_phase(Phase::Raw);
    epoll::moved(old, new, || {
        for fd in 0..=table::highest() {
            if table::is(fd, old) {
                table::put_conn(fd, new);
            }
        }
    });
    // After that: whoever sets something meanwhile notes it there, or is seen here to have set it.
    options::read_usual(new, local.fd.load(Relaxed));
    drop(whole);
    old.set_phase(Phase::Closed);
    drop(b);
    old.notify();
    let s = old.stats();
    if s.tx_bytes_tcp.load(Relaxed) + s.rx_bytes_tcp.load(Relaxed) + u64::from(s.upgrades.load(Relaxed)) > 0 {
        arena::free(old);
    } else {
        // The process that handed it on has done nothing with it.
        arena::forget(old);
    }
    Some(new)
}

pub(super) fn make_plain(conn: &Conn, why: Why) {
    let _b = conn.lock_both();
    if conn.phase() == Phase::Raw {
        conn.set_phase(Phase::Plain);
        conn.why(why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_connection_is_looked_for_again_soon_and_one_that_never_is_is_not() {
        let conn = arena::alloc().unwrap();
        for (calls, next, then) in [(25_000, 1 << 30, 50_000), (25_000, 30_000, 30_000), (100, 300, 300)] {
            conn.calls.store(calls, Relaxed);
            conn.next_try.store(next, Relaxed);
            again_if_busy(conn);
            assert_eq!(conn.next_try.load(Relaxed), then);
        }
        conn.next_try.store(u32::MAX, Relaxed);
        again_if_busy(conn);
        assert_eq!(conn.next_try.load(Relaxed), u32::MAX);
        conn.set_phase(Phase::Closed);
    }

    #[test]
    fn enough_was_moved_when_it_is_more_than_buffers_hold_and_not_at_once() {
        let conn = arena::alloc().unwrap();
        conn.count_rx_tcp(1 << 30);
        let look = Look::new(conn, 0, 1_000);
        let late = 1_000 + EARLY_NS;
        assert!(!look.has_moved_enough(late));
        conn.count_tx_tcp(ENOUGH_BYTES as usize);
        assert!(look.has_moved_enough(late));
        assert!(!look.has_moved_enough(late - 1));
        conn.set_phase(Phase::Closed);
    }
}
