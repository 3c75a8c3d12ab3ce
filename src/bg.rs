//! The background thread: rendezvous, links, and everything that no thread
//! of the program should have to wait for.
//!
//! It starts with the first connection that has something to gain. Threads of
//! the program hand it connections through a lock-free inbox and ring bell 0.

use crate::conn::*;
use crate::link::{self, kind, Link, Msg, Tuple, MSG_MAGIC};
use crate::log::{log, Level};
use crate::rendezvous as rv;
use crate::ring::{RxRing, TxRing};
use crate::side::Side;
use crate::stats::Why;
use crate::switch::RxPath;
use crate::sync::now_ns;
use crate::sys::{self, sys};
use crate::{arena, bell, config, epoll, fdhigh, pump, rules};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::*};
use libc::{c_int, c_void, epoll_event};
use std::collections::{HashMap, HashSet, VecDeque};

static INBOX: AtomicPtr<Conn> = AtomicPtr::new(core::ptr::null_mut());
/// 0: not started, 1: starting, 2: running, 3: cannot be started.
static STATE: AtomicU32 = AtomicU32::new(0);
static SEND_BELLS: AtomicBool = AtomicBool::new(false);

const MS: i64 = 1_000_000;
/// How long a connecting end waits to be found.
const LISTEN_NS: i64 = 1_500 * MS;
/// Tries of an accepting end to find the other; the pause doubles from 1 ms.
const DIALS: u32 = 10;
/// How long the memory of a dead link is kept: threads that looked at it without a lock have finished by then.
const GRACE_NS: i64 = 2_000 * MS;
/// How long a half-made link may take.
const HANDSHAKE_NS: i64 = 2_000 * MS;

/// Hands a connection to the background thread, starting it if need be.
pub fn submit(c: &Conn) {
    c.submitted.store(true, SeqCst);
    let mut head = INBOX.load(Relaxed);
    loop {
        c.next.store(head, Relaxed);
        match INBOX.compare_exchange_weak(head, (c as *const Conn).cast_mut(), Release, Relaxed) {
            Ok(_) => break,
            Err(h) => head = h,
        }
    }
    if STATE.load(Acquire) == 2 {
        bell::ring(0);
    } else {
        start();
    }
}

/// Asks for new bells to be made known to the peers.
pub fn send_bells() {
    if !SEND_BELLS.swap(true, AcqRel) {
        bell::ring(0);
    }
}

/// In a forked child: the thread is not here, and what was in its inbox was the parent's.
pub fn reset_after_fork() {
    STATE.store(0, Relaxed);
    INBOX.store(core::ptr::null_mut(), Relaxed);
    SEND_BELLS.store(false, Relaxed);
}

#[cold]
fn start() {
    if STATE.compare_exchange(0, 1, AcqRel, Acquire).is_err() {
        return;
    }
    let ok = bell::page_fd().is_some() && spawn();
    if !ok {
        log(Level::Warn, format_args!("cannot start the background thread: connections stay on TCP"));
    }
    STATE.store(if ok { 2 } else { 3 }, Release);
}

fn spawn() -> bool {
    let all = u64::MAX;
    let mut old = 0u64;
    // The program's signals are not for this thread.
    // SAFETY: both masks are 8 bytes, as the kernel wants them.
    let _ = unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &all, &mut old, 8) };
    // SAFETY: the attribute object is initialised before it is used; `main` takes no argument.
    let ok = unsafe {
        let mut attr: libc::pthread_attr_t = core::mem::zeroed();
        let mut t: libc::pthread_t = core::mem::zeroed();
        libc::pthread_attr_init(&mut attr);
        libc::pthread_attr_setstacksize(&mut attr, 512 << 10);
        libc::pthread_attr_setdetachstate(&mut attr, libc::PTHREAD_CREATE_DETACHED);
        let r = libc::pthread_create(&mut t, &attr, main, core::ptr::null_mut());
        libc::pthread_attr_destroy(&mut attr);
        r == 0
    };
    // SAFETY: as above.
    let _ = unsafe { sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &old, 0, 8) };
    ok
}

extern "C" fn main(_: *mut c_void) -> *mut c_void {
    // SAFETY: a NUL-terminated name.
    let _ = unsafe { sys!(libc::SYS_prctl, libc::PR_SET_NAME, c"ringsock".as_ptr()) };
    if let Some(mut bg) = Bg::new() {
        bg.run();
    }
    STATE.store(3, Release);
    core::ptr::null_mut()
}

/// What an epoll event of the thread's own set is about: the low three bits of its data.
mod token {
    pub const BELL: u64 = 1;
    pub const LISTENER: u64 = 2;
    pub const CALLER: u64 = 3;
    pub const LINK: u64 = 4;
    pub const CONN: u64 = 0;
}

/// Which end of a connection: its name, and whether it is the connecting end. Both may be in this process.
type End = (Tuple, bool);

/// A connection whose peer is being looked for.
struct Look {
    conn: &'static Conn,
    gen: u32,
    /// Listening socket, or -1.
    listener: c_int,
    dials: u32,
    /// The peer is found; a moment is awaited in which no thread is inside the kernel with it. With the
    /// peer's proposal, if it was the peer that proposed.
    found: Option<(&'static Link, Option<Msg>)>,
    /// How often that moment was looked for.
    busy: u32,
    /// When to do the next thing.
    at: i64,
    until: i64,
}

/// A Unix socket that is not a link yet.
struct Caller {
    /// For which connection we dialled.
    dialled: Option<Tuple>,
    /// Our half of a link that was offered.
    offer: Option<(Side, [u8; 16])>,
    until: i64,
}

struct Bg {
    epfd: c_int,
    process: [u8; 16],
    looks: HashMap<End, Look>,
    callers: HashMap<c_int, Caller>,
    links: Vec<&'static Link>,
    /// Which accepting processes (by address) are at the other end of which link.
    servers: HashMap<([u8; 16], u16), Vec<&'static Link>>,
    /// Connections that a peer has asked for before we looked for them.
    asked: HashMap<Tuple, (&'static Link, i64)>,
    /// Rings of connections that we have left, until the peer has left them too.
    parked: HashMap<(usize, u32), TxRing>,
    /// Slots that the peer has left before us.
    left_by_peer: HashSet<(usize, u32)>,
    dead: Vec<(&'static Link, i64)>,
    /// Links whose memory was given back.
    retired: Vec<&'static Link>,
    /// What a link's socket had no room for.
    unsent: HashMap<usize, VecDeque<(Msg, c_int)>>,
    /// Connections of a process whose link is being made: it is to be asked about them then.
    ask_later: Vec<([u8; 16], Tuple)>,
}

fn key(l: &Link) -> usize {
    l as *const Link as usize
}

impl Bg {
    fn new() -> Option<Bg> {
        // SAFETY: no preconditions.
        let epfd = unsafe { sys!(libc::SYS_epoll_create1, libc::EPOLL_CLOEXEC) }.ok()? as c_int;
        let epfd = fdhigh::not_for_children(fdhigh::move_high(epfd));
        let mut process = [0; 16];
        crate::process::random(&mut process);
        let bg = Bg {
            epfd,
            process,
            looks: HashMap::new(),
            callers: HashMap::new(),
            links: Vec::new(),
            servers: HashMap::new(),
            asked: HashMap::new(),
            parked: HashMap::new(),
            left_by_peer: HashSet::new(),
            dead: Vec::new(),
            retired: Vec::new(),
            unsent: HashMap::new(),
            ask_later: Vec::new(),
        };
        bg.watch(bell::fd(0), token::BELL, libc::EPOLLIN | libc::EPOLLET);
        Some(bg)
    }

    fn watch(&self, fd: c_int, token: u64, events: c_int) {
        let ev = epoll_event { events: events as u32, u64: token };
        // SAFETY: `ev` is readable.
        let _ = unsafe { sys!(libc::SYS_epoll_ctl, self.epfd, libc::EPOLL_CTL_ADD, fd, &ev) };
    }

    fn unwatch(&self, fd: c_int) {
        let ev = epoll_event { events: 0, u64: 0 };
        // SAFETY: `ev` is readable.
        let _ = unsafe { sys!(libc::SYS_epoll_ctl, self.epfd, libc::EPOLL_CTL_DEL, fd, &ev) };
    }

    fn run(&mut self) {
        let mut evs = [epoll_event { events: 0, u64: 0 }; 64];
        loop {
            bell::sleep_begin(0);
            let idle = INBOX.load(SeqCst).is_null() && !link::any_hints(0) && !SEND_BELLS.load(SeqCst);
            let timeout = if idle { self.timeout() } else { 0 };
            // SAFETY: `evs` has room for its length.
            let n = unsafe { sys!(libc::SYS_epoll_pwait, self.epfd, evs.as_mut_ptr(), evs.len(), timeout, 0, 8) };
            bell::sleep_end(0);
            link::drain_hints(0);
            for ev in &evs[..n.unwrap_or(0)] {
                let t = ev.u64;
                match t & 7 {
                    token::BELL => {}
                    token::LISTENER => self.answer((t >> 3) as c_int),
                    token::CALLER => self.hear((t >> 3) as c_int),
                    // SAFETY: links are never freed.
                    token::LINK => self.hear_link(unsafe { &*((t & !7) as *const Link) }),
                    // SAFETY: connections are never freed.
                    _ => self.stir(unsafe { &*(t as *const Conn) }),
                }
            }
            if SEND_BELLS.swap(false, SeqCst) {
                self.tell_bells();
            }
            self.inbox();
            self.timers();
        }
    }

    /// Milliseconds until something is due, -1: nothing is.
    fn timeout(&self) -> c_int {
        let mut at = i64::MAX;
        for l in self.looks.values() {
            at = at.min(l.at);
        }
        for c in self.callers.values() {
            at = at.min(c.until);
        }
        for (_, d) in &self.dead {
            // One that is overdue waits for the program to close its connections.
            at = at.min((*d).max(now_ns() + 500 * MS));
        }
        if at == i64::MAX {
            return -1;
        }
        ((at - now_ns()).max(0) / MS) as c_int + 1
    }

    fn inbox(&mut self) {
        let mut c = INBOX.swap(core::ptr::null_mut(), AcqRel);
        // SAFETY: connections are never freed.
        while let Some(conn) = unsafe { c.as_ref() } {
            c = conn.next.load(Relaxed);
            let what = conn.asked.swap(0, AcqRel);
            if what & ask::LOOK != 0 {
                self.look(conn);
            }
            if what & ask::LEAVE != 0 {
                conn.lock_both().sw().leave();
            }
            if what & (ask::PUMP | ask::LEAVE) != 0 {
                self.stir(conn);
            }
            if what & ask::CLOSED != 0 {
                self.closed(conn);
            }
        }
    }

    /// Moves a connection's switch on, and gives it back to the kernel when it is on TCP again.
    fn stir(&mut self, conn: &'static Conn) {
        if conn.phase() != Phase::Managed {
            return;
        }
        pump::drive(conn);
        conn.notify();
        let plain = conn.lock_both().sw().is_plain();
        if plain {
            self.unmanage(conn, Why::Returned);
        }
        if conn.lingering.load(Acquire) {
            self.linger(conn);
        }
    }

    /// A connection that the program has closed while a return was under way: closes it when that is done.
    fn linger(&mut self, conn: &'static Conn) {
        let done = {
            let mut b = conn.lock_both();
            !b.is_owed() || b.sw().is_plain() || conn.has_ended(END_EOF)
        };
        if done {
            let fd = conn.local().fd.swap(-1, AcqRel);
            self.unwatch(fd);
            sys::close(fd);
            conn.set_phase(Phase::Closed);
            self.closed(conn);
        }
    }

    fn look(&mut self, conn: &'static Conn) {
        let gen = conn.gen.load(Relaxed);
        let ends = {
            let _b = conn.lock_both();
            if conn.phase() != Phase::Raw {
                return;
            }
            if conn.procs.load(SeqCst) != 1 {
                conn.why(Why::Shared);
                return;
            }
            rv::ends(conn.local().fd.load(Relaxed))
        };
        let Some(ends) = ends else { return };
        note_ends(conn, &ends);
        let c = config::get();
        let why = if !c.links.shm {
            Why::LinksOff
        } else if !rules::allows(&rv::socket_addr(&ends[0]), &rv::socket_addr(&ends[1])) {
            Why::Rules
        } else if ends[0].0 != ends[1].0 && !rv::is_local(&ends[1]) {
            Why::OtherHost
        } else {
            Why::None
        };
        if why != Why::None {
            make_plain(conn, why);
            return;
        }
        let connector = conn.connector.load(Relaxed);
        let t = rv::tuple(&ends, connector);
        let end = (t, connector);
        if self.looks.contains_key(&end) {
            return;
        }
        conn.why(Why::Looking);
        let now = now_ns();
        let mut look =
            Look { conn, gen, listener: -1, dials: 0, found: None, busy: 0, at: now, until: now + LISTEN_NS };
        if connector {
            let mut told = false;
            let servers = self.servers.get(&(t.to, t.to_port)).cloned().unwrap_or_default();
            for l in servers.into_iter().rev().take(4) {
                told |= self.say(l, Msg { kind: kind::ASK, tuple: t, ..Msg::default() });
            }
            if told {
                look.at = now + 5 * MS;
            }
            self.looks.insert(end, look);
        } else if let Some((l, _)) = self.asked.remove(&t) {
            self.looks.insert(end, look);
            self.propose(l, t);
            return;
        } else {
            self.looks.insert(end, look);
        }
        self.timers();
    }

    fn timers(&mut self) {
        let now = now_ns();
        let due: Vec<End> = self.looks.iter().filter(|(_, l)| l.at <= now).map(|(t, _)| *t).collect();
        for t in due {
            self.step_look(t, now);
        }
        let late: Vec<c_int> = self.callers.iter().filter(|(_, c)| c.until <= now).map(|(fd, _)| *fd).collect();
        for fd in late {
            self.hang_up(fd);
        }
        for (l, _) in self.dead.extract_if(.., |(l, at)| *at <= now && l.retire()) {
            self.retired.push(l);
        }
        if self.asked.len() > 4096 {
            self.asked.retain(|_, (_, at)| now - *at < 10_000 * MS);
        }
    }

    fn step_look(&mut self, end: End, now: i64) {
        let t = end.0;
        let Some(look) = self.looks.get_mut(&end) else { return };
        let conn = look.conn;
        if conn.gen.load(Relaxed) != look.gen || conn.phase() != Phase::Raw {
            self.drop_look(end);
            return;
        }
        if let Some((l, proposal)) = look.found.take() {
            match proposal {
                Some(m) => self.on_propose(l, &m),
                None => self.propose(l, t),
            }
            return;
        }
        if conn.connector.load(Relaxed) {
            if look.listener < 0 && now < look.until {
                match rv::listen(&t) {
                    Ok(fd) => {
                        look.listener = fd;
                        look.at = look.until;
                        self.watch(fd, (fd as u64) << 3 | token::LISTENER, libc::EPOLLIN);
                    }
                    // Our own earlier listener for a former use of the same ports may linger for a moment.
                    Err(libc::EADDRINUSE) => look.at = now + 20 * MS,
                    Err(_) => self.fail_look(end, Why::Resources),
                }
            } else {
                self.fail_look(end, Why::NoPeer);
            }
            return;
        }
        if look.dials >= DIALS {
            self.fail_look(end, Why::NoPeer);
            return;
        }
        look.at = now + (MS << look.dials);
        look.dials += 1;
        match rv::dial(&t) {
            Ok(fd) => {
                let hello = Msg { kind: kind::HELLO, tuple: t, ..Msg::default() };
                // While this is under way there is nothing else to do.
                look.at = now + HANDSHAKE_NS;
                look.dials = DIALS;
                if link::send_msg(fd, &self.stamp(hello), &[]).is_ok() {
                    self.callers.insert(fd, Caller { dialled: Some(t), offer: None, until: now + HANDSHAKE_NS });
                    self.watch(fd, (fd as u64) << 3 | token::CALLER, libc::EPOLLIN);
                } else {
                    sys::close(fd);
                }
            }
            Err(libc::ECONNREFUSED | libc::EAGAIN | libc::ENOENT) => {}
            Err(_) => self.fail_look(end, Why::Resources),
        }
    }

    fn drop_look(&mut self, end: End) -> Option<Look> {
        let look = self.looks.remove(&end)?;
        if look.listener >= 0 {
            self.unwatch(look.listener);
            sys::close(look.listener);
        }
        Some(look)
    }

    /// The search was in vain. A second one in vain is the last.
    fn fail_look(&mut self, end: End, why: Why) {
        let Some(look) = self.drop_look(end) else { return };
        if look.conn.gen.load(Relaxed) != look.gen {
            return;
        }
        look.conn.why(why);
        let again = why == Why::NoPeer && !look.conn.looked_twice.swap(true, Relaxed);
        if !again {
            make_plain(look.conn, why);
        }
    }

    fn stamp(&self, m: Msg) -> Msg {
        Msg { magic: MSG_MAGIC, version: config::protocol(link::VERSION), process: self.process, ..m }
    }

    /// Sends a message, now or when there is room. `fd` goes along unless it is negative; it must stay
    /// open. False: the link is gone.
    fn say_with(&mut self, l: &Link, m: Msg, fd: c_int) -> bool {
        if l.dead.load(Relaxed) {
            return false;
        }
        let m = self.stamp(m);
        let queue = self.unsent.entry(key(l)).or_default();
        if !queue.is_empty() {
            queue.push_back((m, fd));
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

    fn say(&mut self, l: &Link, m: Msg) -> bool {
        self.say_with(l, m, -1)
    }

    /// Sends a message with the connection's own socket, which proves to the peer that we hold that end.
    fn say_as_holder(&mut self, l: &Link, m: Msg, conn: &Conn) -> bool {
        // Under the lock, so that the number is the connection's still.
        let _b = conn.lock_both();
        let fd = conn.local().fd.load(Relaxed);
        if fd < 0 || l.dead.load(Relaxed) || self.unsent.get(&key(l)).is_some_and(|q| !q.is_empty()) {
            return false;
        }
        link::send_msg(l.sock, &self.stamp(m), &[fd]).is_ok()
    }

    /// Whether the sender of a message has shown that it holds the other end of `conn`.
    fn is_holder(&self, conn: &Conn, shown: c_int) -> bool {
        let b = conn.lock_both();
        let fd = b.rx.conn().local().fd.load(Relaxed);
        match rv::ends(fd) {
            Some([local, peer]) if shown >= 0 => rv::is_end(shown, &[peer, local], fd),
            _ => false,
        }
    }

    /// Sends what there was no room for.
    fn flush_link(&mut self, l: &Link) {
        let Some(queue) = self.unsent.get_mut(&key(l)) else { return };
        while let Some((m, fd)) = queue.front() {
            if link::send_msg(l.sock, m, if *fd >= 0 { core::slice::from_ref(fd) } else { &[] }) == Err(libc::EAGAIN) {
                return;
            }
            queue.pop_front();
        }
    }

    /// Somebody has found us.
    fn answer(&mut self, listener: c_int) {
        let Ok(fd) = rv::accept(listener) else { return };
        self.callers.insert(fd, Caller { dialled: None, offer: None, until: now_ns() + HANDSHAKE_NS });
        self.watch(fd, (fd as u64) << 3 | token::CALLER, libc::EPOLLIN);
    }

    fn hang_up(&mut self, fd: c_int) {
        self.unwatch(fd);
        sys::close(fd);
        let Some(c) = self.callers.remove(&fd) else { return };
        if let Some((side, process)) = c.offer {
            self.ask_later.retain(|(p, _)| *p != process);
            // SAFETY: the peer never got to use it, or is going to fail.
            unsafe { side.destroy() };
        }
        if let Some(t) = c.dialled {
            self.fail_look((t, false), Why::NoPeer);
        }
    }

    fn hear(&mut self, fd: c_int) {
        let mut fds = [-1; 4];
        let msg = link::recv_msg(fd, &mut fds);
        let m = match msg {
            Ok(Some(m)) => m,
            Err(libc::EAGAIN) => return,
            Ok(None) | Err(_) => {
                close_all(&fds);
                if msg.is_err() && self.callers.contains_key(&fd) {
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
                let refusal = self.refusal(fd, version_ok);
                if let Some(why) = refusal {
                    let no = self.stamp(Msg { kind: kind::REFUSE, a: why as u32, ..Msg::default() });
                    let _ = link::send_msg(fd, &no, &[]);
                    if self.looks.contains_key(&(m.tuple, true)) {
                        self.fail_look((m.tuple, true), why);
                    }
                    return self.hang_up(fd);
                }
                if let Some(l) = self.links.iter().find(|l| l.answered && l.process == m.process).copied() {
                    let _ = link::send_msg(fd, &self.stamp(Msg { kind: kind::USE, ..Msg::default() }), &[]);
                    self.say(l, Msg { kind: kind::ASK, tuple: m.tuple, ..Msg::default() });
                    return self.hang_up(fd);
                }
                let offered = |c: &Caller| c.offer.as_ref().is_some_and(|(_, p)| *p == m.process);
                if self.callers.values().any(offered) {
                    self.ask_later.push((m.process, m.tuple));
                    let _ = link::send_msg(fd, &self.stamp(Msg { kind: kind::USE, ..Msg::default() }), &[]);
                    return self.hang_up(fd);
                }
                match self.offer() {
                    Some((side, fds)) => {
                        let welcome = self.stamp(Msg { kind: kind::WELCOME, ..Msg::default() });
                        let sent = link::send_msg(fd, &welcome, &fds).is_ok();
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
            kind::WELCOME if caller.dialled.is_some() && version_ok && fds[2] >= 0 => {
                let t = caller.dialled;
                if let Some(why) = self.refusal(fd, version_ok) {
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
                let Some((side, ours)) = self.offer() else {
                    close_all(&fds);
                    return self.hang_up(fd);
                };
                let linked = self.stamp(Msg { kind: kind::LINKED, ..Msg::default() });
                if link::send_msg(fd, &linked, &ours).is_err() {
                    close_all(&fds);
                    // SAFETY: nobody has seen it.
                    unsafe { side.destroy() };
                    return self.hang_up(fd);
                }
                self.callers.remove(&fd);
                if let (Some(l), Some(t)) = (self.connect(fd, m.process, false, side, fds), t) {
                    self.propose(l, t);
                }
            }
            kind::LINKED if version_ok && fds[2] >= 0 => match caller.offer.take() {
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

    fn refusal(&self, fd: c_int, version_ok: bool) -> Option<Why> {
        if !version_ok {
            return Some(Why::Version);
        }
        let (pid, uid, gid) = rv::credentials(fd)?;
        if !config::peer_allowed(uid, gid) {
            log(Level::Info, format_args!("process {pid} of user {uid} is not allowed by RINGSOCK_PEERS"));
            return Some(Why::PeerUser);
        }
        log(Level::Debug, format_args!("process {pid} of user {uid} asks for a link"));
        None
    }

    /// Our half of a new link, and the fds that the peer needs.
    fn offer(&self) -> Option<(Side, [c_int; 3])> {
        let page = bell::page_fd()?;
        match Side::new() {
            Ok(side) => {
                let fds = [side.fd, page, bell::fd(0)];
                Some((side, fds))
            }
            Err(e) => {
                log(Level::Warn, format_args!("no shared memory for a link (errno {e}): connections stay on TCP"));
                None
            }
        }
    }

    fn connect(
        &mut self,
        sock: c_int,
        process: [u8; 16],
        answered: bool,
        side: Side,
        fds: [c_int; 4],
    ) -> Option<&'static Link> {
        self.unwatch(sock);
        let l = match Link::new(process, answered, sock, side, [fds[0], fds[1], fds[2]]) {
            Ok(l) => link::publish(l, &mut self.retired),
            Err(e) => {
                log(Level::Warn, format_args!("a peer's memory cannot be used (errno {e})"));
                None
            }
        };
        let Some(l) = l else {
            sys::close(sock);
            return None;
        };
        self.links.push(l);
        self.watch(sock, key(l) as u64 | token::LINK, libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET);
        self.tell_bells();
        Some(l)
    }

    fn tell_bells(&mut self) {
        let used = bell::used();
        for l in self.links.clone() {
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

    fn hear_link(&mut self, l: &'static Link) {
        self.flush_link(l);
        loop {
            if l.dead.load(Relaxed) {
                return;
            }
            let mut fds = [-1; 4];
            match link::recv_msg(l.sock, &mut fds) {
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

    fn on_message(&mut self, l: &'static Link, m: &Msg, fds: &mut [c_int; 4]) {
        match m.kind {
            kind::ASK => {
                if self.looks.contains_key(&(m.tuple, false)) {
                    self.propose(l, m.tuple);
                } else {
                    self.asked.insert(m.tuple, (l, now_ns()));
                }
            }
            kind::PROPOSE => {
                let known = self.looks.get(&(m.tuple, true)).map(|k| k.conn);
                if known.is_some_and(|c| !self.is_holder(c, fds[0])) {
                    log(Level::Warn, format_args!("a peer has claimed a connection that it does not hold: ignored"));
                    return;
                }
                self.on_propose(l, m);
            }
            kind::ACCEPT => {
                let Some(conn) = l.conn(m.a).filter(|c| c.is_on(l, m.a)) else {
                    // Closed meanwhile.
                    self.say(l, Msg { kind: kind::REJECT, a: m.b, b: Why::Refused as u32, ..Msg::default() });
                    return;
                };
                if !self.is_holder(conn, fds[0]) {
                    log(Level::Warn, format_args!("a peer has claimed a connection that it does not hold: ignored"));
                    conn.lock_both().sw().disarm();
                    return self.unmanage(conn, Why::Refused);
                }
                if conn.unconfirmable.load(SeqCst) {
                    // We never write a mark now, so the peer need not look for one, nor may it write its own.
                    self.say(l, Msg { kind: kind::REJECT, a: m.b, b: Why::HalfClosed as u32, ..Msg::default() });
                    conn.lock_both().sw().disarm();
                    return self.unmanage(conn, Why::HalfClosed);
                }
                if !attach_peer(conn, l, m.b, m.nonce) {
                    return;
                }
                conn.confirmed.store(true, Release);
                self.say(l, Msg { kind: kind::CONFIRM, a: m.b, ..Msg::default() });
                self.stir(conn);
            }
            kind::CONFIRM => {
                let Some(conn) = l.conn(m.a).filter(|c| c.is_on(l, m.a)) else { return };
                conn.confirmed.store(true, Release);
                self.stir(conn);
            }
            kind::REJECT => {
                let Some(conn) = l.conn(m.a).filter(|c| c.is_on(l, m.a)) else {
                    if let Some(mut ring) = self.parked.remove(&(key(l), m.a)) {
                        free_slot(l, m.a, &mut ring);
                    }
                    return;
                };
                conn.lock_both().sw().disarm();
                self.left_by_peer.insert((key(l), m.a));
                self.unmanage(conn, Why::from_u8(m.b as u8));
            }
            kind::DETACH => match self.parked.remove(&(key(l), m.a)) {
                Some(mut ring) => free_slot(l, m.a, &mut ring),
                None => {
                    self.left_by_peer.insert((key(l), m.a));
                }
            },
            kind::BELL if fds[0] >= 0 => {
                l.set_bell_fd(m.a, fds[0]);
                fds[0] = -1;
                self.say(l, Msg { kind: kind::BELL_OK, a: m.a, ..Msg::default() });
            }
            kind::BELL_OK => {
                l.bells_known.fetch_or(1 << (m.a & 63), Release);
            }
            _ => {}
        }
    }

    fn propose(&mut self, l: &'static Link, t: Tuple) {
        let Some(look) = self.looks.get(&(t, false)) else { return };
        let (conn, gen) = (look.conn, look.gen);
        if conn.gen.load(Relaxed) != gen {
            self.drop_look((t, false));
            return;
        }
        match self.begin(conn, l) {
            Ok((slot, nonce)) => {
                self.drop_look((t, false));
                if !self.say_as_holder(l, Msg { kind: kind::PROPOSE, a: slot, nonce, tuple: t, ..Msg::default() }, conn)
                {
                    // Never sent, so the peer cannot have learnt the nonce.
                    conn.lock_both().sw().disarm();
                    self.left_by_peer.insert((key(l), slot));
                    self.unmanage(conn, Why::Refused);
                }
            }
            Err(None) => {
                if !self.wait_for_calm((t, false), l, None) {
                    self.drop_look((t, false));
                }
            }
            Err(Some(why)) => self.fail_look((t, false), why),
        }
    }

    fn on_propose(&mut self, l: &'static Link, m: &Msg) {
        let reject = |bg: &mut Bg, why: Why| {
            bg.say(l, Msg { kind: kind::REJECT, a: m.a, b: why as u32, ..Msg::default() });
        };
        let conn = match self.looks.get(&(m.tuple, true)) {
            Some(k) if k.conn.gen.load(Relaxed) == k.gen => k.conn,
            _ => return reject(self, Why::NoPeer),
        };
        let servers = self.servers.entry((m.tuple.to, m.tuple.to_port)).or_default();
        if !servers.iter().any(|s| core::ptr::eq(*s, l)) {
            servers.push(l);
        }
        match self.begin(conn, l) {
            Ok((slot, nonce)) => {
                self.drop_look((m.tuple, true));
                attach_peer(conn, l, m.a, m.nonce);
                if !self.say_as_holder(l, Msg { kind: kind::ACCEPT, a: m.a, b: slot, nonce, ..Msg::default() }, conn) {
                    // Never sent, so the peer cannot have learnt the nonce.
                    conn.lock_both().sw().disarm();
                    reject(self, Why::Resources);
                    return self.unmanage(conn, Why::Resources);
                }
                // What was written before this may have been the mark's cue.
                self.stir(conn);
            }
            Err(None) => {
                if !self.wait_for_calm((m.tuple, true), l, Some(*m)) {
                    reject(self, Why::Looking);
                    self.drop_look((m.tuple, true));
                }
            }
            Err(Some(why)) => {
                reject(self, why);
                self.fail_look((m.tuple, true), why);
            }
        }
    }

    /// A thread is inside the kernel with the connection: tries again in a moment, a bounded number of
    /// times. False: that was the last; the connection's next calls will have it looked for anew.
    fn wait_for_calm(&mut self, end: End, l: &'static Link, proposal: Option<Msg>) -> bool {
        const TRIES: u32 = 64;
        let Some(k) = self.looks.get_mut(&end) else { return false };
        k.busy += 1;
        if k.busy > TRIES {
            k.conn.hold.store(false, SeqCst);
            k.conn.notify();
            return false;
        }
        k.found = Some((l, proposal));
        k.at = now_ns() + MS / 2 * i64::from(1 + k.busy / 16);
        true
    }

    /// Makes a connection ours and starts to look for its mark. `Err(None)`: not now.
    fn begin(&mut self, conn: &'static Conn, l: &'static Link) -> Result<(u32, [u8; 16]), Option<Why>> {
        if l.dead.load(SeqCst) {
            return Err(Some(Why::Refused));
        }
        let mut b = conn.lock_both();
        let fd = conn.local().fd.load(Relaxed);
        if conn.phase() != Phase::Raw || fd < 0 {
            return Err(Some(Why::Refused));
        }
        if conn.procs.load(SeqCst) != 1 {
            return Err(Some(Why::Shared));
        }
        // Who is inside the kernel now has not been counted yet; who comes later sees the phase.
        let busy = || conn.rx_inflight.load(SeqCst) > 0 || conn.tx_inflight.load(SeqCst) > 0;
        if busy() {
            conn.hold.store(true, SeqCst);
            return Err(None);
        }
        conn.set_phase(Phase::Managed);
        if busy() {
            conn.set_phase(Phase::Raw);
            conn.hold.store(true, SeqCst);
            return Err(None);
        }
        conn.hold.store(false, SeqCst);
        let r = prepare(&mut b, conn, l, fd);
        match r {
            Ok(ok) => {
                // Whatever was said of the slot's former use.
                self.left_by_peer.remove(&(key(l), ok.0));
                self.watch(
                    fd,
                    conn as *const Conn as u64 | token::CONN,
                    libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET,
                );
                Ok(ok)
            }
            Err(why) => {
                conn.set_phase(Phase::Raw);
                drop(b);
                make_plain(conn, why);
                Err(Some(why))
            }
        }
    }

    /// Both directions are on TCP: the connection is the kernel's again.
    fn unmanage(&mut self, conn: &'static Conn, why: Why) {
        let mut b = conn.lock_both();
        if conn.phase() != Phase::Managed || !b.sw().is_plain() {
            return;
        }
        let fd = conn.local().fd.load(Relaxed);
        self.unwatch(fd);
        let s = conn.stats();
        if why == Why::Returned {
            s.returns.fetch_add(1, Relaxed);
        }
        self.detach(&mut b, conn);
        conn.confirmed.store(false, Relaxed);
        conn.nospace.store(false, Relaxed);
        let sw = b.sw();
        conn.publish_paths(sw);
        s.link.store(0, Relaxed);
        conn.why(why);
        let calls = conn.calls.load(Relaxed);
        conn.next_try.store(conn.next_try.load(Relaxed).max(calls.saturating_mul(2)), Relaxed);
        // Counts were kept while it was ours; the kernel's include marks, frames and repeated bytes.
        if let Some((tx, rx)) = rv::kernel_counts(fd, conn.connector.load(Relaxed)) {
            conn.tx_tcp.store(tx, Relaxed);
            conn.rx_tcp.store(rx, Relaxed);
        }
        conn.set_phase(Phase::Raw);
        if conn.has_ended(END_WRSHUT) {
            conn.set_phase(Phase::Plain);
            // SAFETY: an fd of the connection, which cannot be closed while we hold the locks.
            let _ = unsafe { sys!(libc::SYS_shutdown, fd, libc::SHUT_WR) };
        }
        epoll::unmanage(conn);
        drop(b);
        conn.notify();
    }

    /// Lets go of slot and ring.
    fn detach(&mut self, b: &mut Both, conn: &'static Conn) {
        // SAFETY: links are never freed.
        let Some(l) = (unsafe { conn.link.load(Acquire).as_ref() }) else { return };
        let (slot, peer) = (conn.slot.load(Relaxed), conn.peer_slot.load(Relaxed));
        let mut ring = core::mem::take(b.tx.ring());
        *b.rx.ring() = RxRing::default();
        conn.attach(core::ptr::null_mut(), 0, core::ptr::null());
        l.set_conn(slot, core::ptr::null());
        let left = self.left_by_peer.remove(&(key(l), slot));
        if peer != u32::MAX && !l.dead.load(Relaxed) {
            self.say(l, Msg { kind: kind::DETACH, a: peer, ..Msg::default() });
        }
        if left || l.dead.load(Relaxed) {
            free_slot(l, slot, &mut ring);
        } else {
            self.parked.insert((key(l), slot), ring);
        }
    }

    /// The program has closed it.
    fn closed(&mut self, conn: &'static Conn) {
        if conn.phase() != Phase::Closed {
            return;
        }
        let mine: Vec<End> = self.looks.iter().filter(|(_, k)| core::ptr::eq(k.conn, conn)).map(|(t, _)| *t).collect();
        for t in mine {
            self.drop_look(t);
        }
        {
            let mut b = conn.lock_both();
            self.detach(&mut b, conn);
        }
        arena::free(conn);
    }

    /// The process at the other end is gone.
    fn lost(&mut self, l: &'static Link) {
        self.unwatch(l.sock);
        sys::close(l.sock);
        l.dead.store(true, SeqCst);
        link::withdraw(l);
        self.links.retain(|x| !core::ptr::eq(*x, l));
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
            c.lock_both().sw().leave();
            self.stir(c);
        }
        self.unsent.remove(&key(l));
        for k in self.looks.values_mut() {
            if k.found.as_ref().is_some_and(|(x, _)| core::ptr::eq(*x, l)) {
                k.found = None;
                k.conn.hold.store(false, SeqCst);
            }
        }
        self.dead.push((l, now_ns() + GRACE_NS));
    }
}

/// Sets up slot, ring and switch. Under both locks.
fn prepare(b: &mut Both, conn: &'static Conn, l: &'static Link, fd: c_int) -> Result<(u32, [u8; 16]), Why> {
    const RDHUP: i16 = libc::POLLRDHUP;
    if conn.has_ended(END_WRSHUT | END_RDSHUT)
        || sys::poll_now(fd, RDHUP) & (RDHUP | libc::POLLHUP | libc::POLLERR) != 0
    {
        return Err(Why::HalfClosed);
    }
    let (tx, rx) = (conn.tx_tcp.load(Relaxed), conn.rx_tcp.load(Relaxed));
    if !rv::counts_match(fd, conn.connector.load(Relaxed), tx, rx) {
        return Err(Why::Bypass);
    }
    let slot = l.side.alloc_slot().ok_or(Why::Resources)?;
    let own = l.side.slot(slot);
    let Some(ring) = TxRing::new(&l.side, own, config::get().ring_bytes) else {
        l.side.free_slot(slot);
        return Err(Why::Resources);
    };
    if !epoll::manage(conn) {
        let mut ring = ring;
        ring.release();
        l.side.free_slot(slot);
        return Err(Why::Resources);
    }
    let mut nonce = [0; 16];
    crate::process::random(&mut nonce);
    *b.tx.ring() = ring;
    *b.rx.ring() = RxRing::default();
    conn.attach((l as *const Link).cast_mut(), slot, own);
    conn.hinted.store(0, Relaxed);
    conn.confirmed.store(false, Relaxed);
    l.slots.fetch_add(1, SeqCst);
    l.set_conn(slot, conn);
    b.sw().arm(nonce);
    conn.stats().link.store(1, Relaxed);
    Ok((slot, nonce))
}

/// The peer's slot and nonce are known.
fn attach_peer(conn: &'static Conn, l: &'static Link, slot: u32, nonce: [u8; 16]) -> bool {
    let mut b = conn.lock_both();
    let (Some(peer), Some(own)) = (l.peer_slot(slot), conn.own()) else { return false };
    if conn.phase() != Phase::Managed || b.sw().rx() != RxPath::Armed || b.rx.ring().is_attached() {
        return false;
    }
    *b.rx.ring() = RxRing::new(l.peer_base(), peer, own);
    b.tx.ring().set_peer(peer);
    conn.attach_peer(slot, peer);
    b.set_peer_nonce(nonce);
    true
}

fn free_slot(l: &Link, slot: u32, ring: &mut TxRing) {
    ring.release();
    l.side.free_slot(slot);
    l.slots.fetch_sub(1, SeqCst);
}

fn make_plain(conn: &Conn, why: Why) {
    let _b = conn.lock_both();
    if conn.phase() == Phase::Raw {
        conn.set_phase(Phase::Plain);
        conn.why(why);
    }
}

fn note_ends(conn: &Conn, ends: &[([u8; 16], u16); 2]) {
    let s = conn.stats();
    for (e, to) in ends.iter().zip([&s.local, &s.peer]) {
        for (b, cell) in e.0.iter().zip(&to.addr) {
            cell.store(*b, Relaxed);
        }
        to.port.store(e.1, Release);
    }
}

fn close_all(fds: &[c_int; 4]) {
    for fd in fds {
        if *fd >= 0 {
            sys::close_raw(*fd);
        }
    }
}
