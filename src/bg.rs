//! The background thread: rendezvous, links, and everything that no thread
//! of the program should have to wait for.
//!
//! It starts with the first connection that has something to gain. Threads of
//! the program hand it connections through a lock-free inbox and ring bell 0.

use crate::conn::*;
use crate::layout::{ABORT, CLOSED, MARK_TAKEN};
use crate::link::{self, kind, Link, Msg, Tuple, MSG_MAGIC};
use crate::log::{log, Level};
use crate::rendezvous as rv;
use crate::ring::{RxRing, TxRing};
use crate::side::Side;
use crate::spin::crowd;
use crate::stats::Why;
use crate::switch::RxPath;
use crate::sync::{full_fence, futex_wait, futex_wake, now_ns};
use crate::sys::{self, sys, SysResult};
use crate::{
    arena, bell, chaos, config, desk, epoll, fdhigh, fds, limits, options, order, pump, remains, rules, table, visit,
};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering::*};
use libc::{c_int, c_void, epoll_event};
use std::collections::{HashMap, HashSet, VecDeque};

pub mod guests;
mod held;
mod home;
mod idle;
pub mod last;
mod life;
mod search;
mod sight;
mod unread;
mod unseen;
mod unused;
mod upgrade;
mod uring;
mod verbs;

pub use life::{bear, end, entries, is_last, is_only_other, is_there, mapped, spawn};
use life::{is_asked, start, END, LEFT, STATE};
use search::make_plain;

static INBOX: AtomicPtr<Conn> = AtomicPtr::new(core::ptr::null_mut());
/// The thread's epoll set, or -1.
static EPFD: AtomicI32 = AtomicI32::new(-1);
static SEND_BELLS: AtomicBool = AtomicBool::new(false);
static PROVIDE_BELLS: AtomicBool = AtomicBool::new(false);

const MS: i64 = 1_000_000;
/// How long an end looks for the other with all its might: the first time, and later.
const LOOK_NS: i64 = 500 * MS;
const GLANCE_NS: i64 = 20 * MS;
/// How long the end of the TCP stream may follow the end of the process that had it.
const ORPHAN_NS: i64 = 500 * MS;
/// How long a connecting end can be found, unless too many others want to be.
const LISTEN_NS: i64 = 30_000 * MS;
/// How many connecting ends can be found for that long.
const LISTENERS: usize = 32;
/// How many connections are looked for at the same time.
const LOOKS: usize = 4096;
/// After so many searches in vain for a server's process, none is begun for [`REST_NS`].
const PATIENCE: u32 = 16;
const REST_NS: i64 = 2_000 * MS;
/// Tries of an accepting end to find the other, the first time, and later; the pause doubles from 1 ms.
const DIALS: u32 = 9;
const LATER_DIALS: u32 = 4;
/// Each time after this a connection with so many calls since the last has them out of the way all the time: that each of them
/// looks before it waits would cost more than it gains.
const EASE_NS: i64 = 8 * MS;
const IN_A_HURRY: u32 = 32;
/// So many bytes are more than all buffers between two ends hold: whoever is there has moved most of them, and has had its own
/// reason to look for us. Seen so early, nobody is.
const ENOUGH_BYTES: u64 = 16 << 20;
const EARLY_NS: i64 = 100 * MS;
/// A connection that was looked for in vain so often, and has had so many calls, is plain for good: it
/// is busy, and every call that is counted costs it something.
const SEARCHES: u32 = 3;
const BUSY_CALLS: u32 = 20_000;
/// After how many calls a connection is looked for again that had no memory, or an operator against it.
const RARELY: u32 = 1024;
/// Who was on a ring for so long, and had to return, may have another at once.
const CALM_NS: i64 = 2_000 * MS;
/// How long the memory of a dead link is kept: threads that looked at it without a lock have finished by then.
const GRACE_NS: i64 = 2_000 * MS;
/// What is watched of a managed connection's kernel socket.
const CONN_EVENTS: c_int = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
/// How long a half-made link may take.
const HANDSHAKE_NS: i64 = 2_000 * MS;

/// Hands a connection to the background thread, starting it if need be.
pub fn submit(c: &Conn) {
    let l = c.local();
    let mut head = INBOX.load(Relaxed);
    loop {
        l.next.store(head, Relaxed);
        match INBOX.compare_exchange_weak(head, (c as *const Conn).cast_mut(), Release, Relaxed) {
            Ok(_) => break,
            Err(h) => head = h,
        }
    }
    // A thread that is about to go looks into its inbox after it has said so.
    full_fence();
    if STATE.load(Acquire) == 2 {
        bell::ring(0);
    } else {
        start();
        if life::is_impossible() && c.phase() == Phase::Raw {
            c.why(Why::Resources);
        }
    }
}

/// Asks for new bells to be made known to the peers.
pub fn send_bells() {
    if !SEND_BELLS.swap(true, AcqRel) {
        bell::ring(0);
    }
}

/// Asks for new bells to be made.
pub fn provide_bells() {
    if !PROVIDE_BELLS.swap(true, AcqRel) {
        bell::ring(0);
    }
}

/// Has the thread listen to the bell that forked children ring. Where there is no thread yet, it will.
pub fn watch_visitors(bell: c_int) {
    let epfd = EPFD.load(Acquire);
    if epfd >= 0 {
        let ev = epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: token::VISITORS };
        // SAFETY: `ev` is readable.
        let _ = unsafe { sys!(libc::SYS_epoll_ctl, epfd, libc::EPOLL_CTL_ADD, bell, &ev) };
    }
}

/// Has the thread watch a managed connection by `new` instead of `old`, which is about to be closed: as long
/// as other processes hold the socket, closing a number does not end its being watched.
pub fn watch_instead(old: c_int, new: c_int, conn: &Conn) {
    let epfd = EPFD.load(Acquire);
    let ev = epoll_event { events: CONN_EVENTS as u32, u64: conn as *const Conn as u64 | token::CONN };
    // SAFETY: `ev` is readable.
    unsafe {
        let _ = sys!(libc::SYS_epoll_ctl, epfd, libc::EPOLL_CTL_DEL, old, &ev);
        let _ = sys!(libc::SYS_epoll_ctl, epfd, libc::EPOLL_CTL_ADD, new, &ev);
    }
}

/// Where the thread waits for completion channels.
pub fn channels_place() -> (c_int, u64) {
    (EPFD.load(Acquire), token::VERBS)
}

/// In a forked child: the thread is not here, and what was in its inbox was the parent's.
pub fn reset_after_fork() {
    life::reset_after_fork();
    last::reset_after_fork();
    INBOX.store(core::ptr::null_mut(), Relaxed);
    SEND_BELLS.store(false, Relaxed);
    PROVIDE_BELLS.store(false, Relaxed);
    crowd::reset_after_fork();
    EPFD.store(-1, Relaxed);
}

/// What an epoll event of the thread's own set is about: the low three bits of its data.
mod token {
    pub const BELL: u64 = 1;
    pub const LISTENER: u64 = 2;
    pub const CALLER: u64 = 3;
    pub const LINK: u64 = 4;
    pub const VISITORS: u64 = 5;
    pub const VERBS: u64 = 6;
    pub const GUEST: u64 = 7;
    pub const CONN: u64 = 0;
}

/// Which end of a connection: its name, and whether it is the connecting end. Both may be in this process.
type End = (Tuple, bool);

/// A connection, and which use of its record.
#[derive(Clone, Copy)]
struct Known {
    conn: &'static Conn,
    gen: u32,
}

impl Known {
    fn is_raw(&self) -> bool {
        self.conn.gen.load(Relaxed) == self.gen && self.conn.phase() == Phase::Raw
    }
}

/// A connection whose peer is being looked for.
struct Look {
    conn: &'static Conn,
    gen: u32,
    /// It was looked for in vain before.
    again: bool,
    /// Listening socket, or -1.
    listener: c_int,
    dials: u32,
    /// How many calls the connection had had when that was looked at last, and bytes when the search began.
    calls: u32,
    bytes: u64,
    begun: i64,
    /// The peer is found; a moment is awaited in which no thread is inside the kernel with it. With the
    /// peer's proposal, if it was the peer that proposed.
    found: Option<(&'static Link, Option<Msg>)>,
    /// The peer is looked for by RDMA.
    verbs: bool,
    /// An RDMA listener or attempt, or 0.
    attempt: u64,
    /// Where the peer has said that it is.
    sent_to: Option<[u8; 16]>,
    /// How often that moment was looked for, ...
    busy: u32,
    /// ... and since when; 0: not yet.
    since: i64,
    /// When to do the next thing.
    at: i64,
    /// Until when nothing but the connection's own traffic says that nobody is there.
    sure_at: i64,
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
    /// The same set at the desk.
    desk_epfd: c_int,
    process: [u8; 16],
    looks: HashMap<End, Look>,
    /// Every connection that was ever looked for and is not closed: its peer may ask for it at any time.
    known: HashMap<End, Known>,
    /// The same the other way round, by the record's address.
    end_of: HashMap<usize, End>,
    /// How many of `looks` can be found.
    listening: usize,
    /// Servers whose process was looked for in vain: how often, and until when not again.
    in_vain: HashMap<([u8; 16], u16), (u32, i64)>,
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
    /// With `RINGSOCK_CHAOS`: connections on rings, their generations, and when they are to return.
    restless: Vec<(&'static Conn, u32, i64)>,
    unseen: unseen::Unseen,
    /// Since when there is nothing to do; 0: there is.
    idle_since: i64,
    /// When it was last woken, with all that it looks at until it sleeps again.
    turn: i64,
    rdma: verbs::Rdma,
    /// Connections to look at again: where a closed one has not delivered all, the end of a ring is awaited, or that
    /// of a stream whose other process is gone.
    later: Vec<(&'static Conn, u32, i64)>,
    census: crowd::Census,
    /// Connections for which the program may wait out of sight.
    suspects: Vec<sight::Suspect>,
    /// The same, of those that never gave reason to think so.
    unread: unread::Unread,
    /// Connections with bytes of which the peer is to be told in a while.
    corked: Vec<held::Corked>,
    /// Connections whose rings have grown.
    grown: Vec<idle::Grown>,
    /// Links whose memory may not be needed.
    held_links: Vec<unused::Held>,
    /// What peers that are gone have left, where a socket had no room for all of it.
    rests: Vec<remains::Rest>,
    /// Where they come, or -1.
    home: c_int,
    /// The network namespace in which this thread looks for peers, if the kernel tells.
    network: Option<u64>,
    /// Programs that ask for connections that they have inherited over `exec`, and what they wait for.
    guests: HashMap<c_int, guests::Guest>,
}

fn key(l: &Link) -> usize {
    l as *const Link as usize
}

impl Bg {
    fn new() -> Option<Box<Bg>> {
        // SAFETY: no preconditions.
        let made = desk::run(|| unsafe { sys!(libc::SYS_epoll_create1, libc::EPOLL_CLOEXEC) }).ok()? as c_int;
        let epfd = fdhigh::not_for_children(|| desk::share(made)).ok()?;
        let desk_epfd = if desk::is_open() { made } else { epfd };
        // SAFETY: what the thread before has left, and nobody else takes.
        let left = unsafe { LEFT.swap(core::ptr::null_mut(), SeqCst).as_mut().map(|bg| Box::from_raw(bg)) };
        let mut bg = left.unwrap_or_else(|| Box::new(Bg::with(epfd, desk_epfd)));
        (bg.epfd, bg.desk_epfd) = (epfd, desk_epfd);
        bg.network = rv::own_network();
        let home = || rv::listen_at(&crate::foreign::home_of(crate::process::pid()));
        bg.home = watched(desk_epfd, token::GUEST, libc::EPOLLIN, home).unwrap_or(-1);
        bell::provide();
        bg.watch(bell::fd(0), token::BELL, libc::EPOLLIN | libc::EPOLLET);
        EPFD.store(epfd, Release);
        if let Some(fd) = visit::own_bell() {
            watch_visitors(fd);
        }
        Some(bg)
    }

    /// One that nobody knows of yet.
    fn with(epfd: c_int, desk_epfd: c_int) -> Bg {
        let mut process = [0; 16];
        crate::process::random(&mut process);
        Bg {
            epfd,
            desk_epfd,
            process,
            looks: HashMap::new(),
            known: HashMap::new(),
            end_of: HashMap::new(),
            listening: 0,
            in_vain: HashMap::new(),
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
            restless: Vec::new(),
            unseen: unseen::Unseen::default(),
            idle_since: 0,
            turn: 0,
            rdma: verbs::Rdma::default(),
            later: Vec::new(),
            census: crowd::Census::default(),
            suspects: Vec::new(),
            unread: unread::Unread::default(),
            corked: Vec::new(),
            grown: Vec::new(),
            held_links: Vec::new(),
            rests: Vec::new(),
            home: -1,
            network: None,
            guests: HashMap::new(),
        }
    }

    fn watch(&self, fd: c_int, token: u64, events: c_int) {
        let ev = epoll_event { events: events as u32, u64: token };
        // SAFETY: `ev` is readable.
        let _ = unsafe { sys!(libc::SYS_epoll_ctl, self.epfd, libc::EPOLL_CTL_ADD, fd, &ev) };
    }

    /// Watches an fd of the desk's no more.
    fn unwatch_desk(&self, fd: c_int) {
        let ev = epoll_event { events: 0, u64: 0 };
        // SAFETY: `ev` is readable.
        let _ = desk::run(|| unsafe { sys!(libc::SYS_epoll_ctl, self.desk_epfd, libc::EPOLL_CTL_DEL, fd, &ev) });
    }

    fn unwatch(&self, fd: c_int) {
        let ev = epoll_event { events: 0, u64: 0 };
        // SAFETY: `ev` is readable.
        let _ = unsafe { sys!(libc::SYS_epoll_ctl, self.epfd, libc::EPOLL_CTL_DEL, fd, &ev) };
    }

    /// Until it is to end, or has nothing to do, which it says.
    fn run(&mut self) -> bool {
        let mut evs = [epoll_event { events: 0, u64: 0 }; 64];
        while !END.load(SeqCst) {
            if self.rests() {
                return true;
            }
            bell::sleep_begin(0);
            let idle = !is_asked() && !link::any_hints(0);
            let timeout = if idle { self.timeout() } else { 0 };
            // SAFETY: `evs` has room for its length.
            let n = unsafe { sys!(libc::SYS_epoll_pwait, self.epfd, evs.as_mut_ptr(), evs.len(), timeout, 0, 8) };
            bell::sleep_end(0);
            self.turn = now_ns();
            chaos::stumble();
            link::drain_hints(0);
            let mut rang = false;
            for ev in &evs[..n.unwrap_or(0)] {
                let t = ev.u64;
                match t & 7 {
                    token::BELL => {}
                    token::VISITORS => self.visitors(),
                    token::GUEST if (t >> 3) as c_int == self.home => self.guest_comes(self.home),
                    token::GUEST => self.guest_asks((t >> 3) as c_int),
                    token::LISTENER => self.answer((t >> 3) as c_int),
                    token::CALLER => self.hear((t >> 3) as c_int),
                    // SAFETY: links are never freed.
                    token::LINK => self.hear_link(unsafe { &*((t & !7) as *const Link) }),
                    token::VERBS => rang = true,
                    // SAFETY: connections are never freed.
                    _ => self.stir(unsafe { &*(t as *const Conn) }),
                }
            }
            if SEND_BELLS.swap(false, SeqCst) {
                self.tell_bells();
            }
            if PROVIDE_BELLS.swap(false, SeqCst) {
                bell::provide();
            }
            self.rdma_events(rang);
            self.inbox();
            self.timers();
            self.answer_guests();
        }
        false
    }

    /// Peers are to see that nobody answers any more.
    fn close_all(&self) {
        let listeners = self.looks.values().map(|l| l.listener).filter(|fd| *fd >= 0);
        self.links.iter().map(|l| l.sock).filter(|fd| *fd >= 0).for_each(sys::close);
        let home = (self.home >= 0).then_some(self.home);
        desk::run(|| listeners.chain(self.callers.keys().copied()).chain(home).for_each(sys::close));
        if desk::is_open() {
            desk::run(|| sys::close(self.desk_epfd));
        }
        sys::close(EPFD.swap(-1, SeqCst));
    }

    /// Milliseconds until something is due, -1: nothing is.
    fn timeout(&self) -> c_int {
        let mut at =
            self.suspects_at().min(self.held_at()).min(self.grown_at()).min(self.memory_at()).min(self.rest_at());
        for l in self.looks.values() {
            at = at.min(l.at);
        }
        for c in self.callers.values() {
            at = at.min(c.until);
        }
        for (_, _, a) in &self.restless {
            at = at.min(*a);
        }
        for (_, _, t) in &self.later {
            at = at.min(*t);
        }
        at = self.rests.iter().fold(at, |at, r| at.min(r.due()));
        at = at.min(self.unread_at()).min(self.rdma.due()).min(self.census.due()).min(self.guests_at());
        at = at.min(last::due());
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
            c = conn.local().next.load(Relaxed);
            let what = conn.local().asked.swap(0, AcqRel);
            if what & ask::LOOK != 0 {
                self.look(conn);
            }
            if what & ask::SUSPECT != 0 {
                self.suspect(conn);
            }
            if what & ask::HELD != 0 {
                self.watch_held(conn);
            }
            if what & ask::GROWN != 0 {
                self.watch_grown(conn);
            }
            if what & ask::PUMP != 0 {
                self.stir(conn);
            }
            if what & ask::LET_GO != 0 {
                self.drop_looks(conn);
            }
            if what & ask::CLOSED != 0 {
                self.closed(conn);
            }
            if what & ask::ENDING != 0 {
                self.look_later(conn, 1_001 * MS);
            }
        }
    }

    /// Moves a connection's switch on, and gives it back to the kernel when it is on TCP again.
    fn stir(&mut self, conn: &'static Conn) {
        if conn.phase() != Phase::Managed {
            if conn.lingers() {
                self.linger(conn);
            }
            return;
        }
        chaos::stumble();
        pump::drive(conn);
        chaos::stumble();
        if upgrade::confirm(conn) {
            pump::drive(conn);
        }
        if home::is_orphan(conn) {
            pump::bereave(&mut conn.lock_both());
        }
        let unseen = !conn.evidence.load(SeqCst) && epoll::is_unawaited(conn);
        if unseen || conn.visited.load(SeqCst) || epoll::is_shared(conn) {
            // Whoever has it, or a set with it, waits in the kernel from now on, also for what is still to be read of a replay.
            let mut b = conn.lock_both();
            if visit::is_home(&mut b) && visit::may_be_polled(&mut b) {
                epoll::unmanage(&mut b);
            }
        }
        self.stay(conn);
        // Whatever it was that came, it may be what somebody waits for.
        conn.notify();
        let mut b = conn.lock_both();
        if conn.bequeathed.load(SeqCst) && conn.has_ended(END_EOF) && !remains::settle(&mut b, &mut self.rests) {
            // Whoever waits for that waits no longer.
            conn.bequeathed.store(false, SeqCst);
        }
        match b.sw().is_plain() {
            true => self.give_back(b, conn, Why::Returned),
            false => drop(b),
        }
        if conn.lingers() {
            self.linger(conn);
        }
    }

    /// Processes that inherited connections ask for them.
    fn visitors(&mut self) {
        let mut wanted = Vec::new();
        arena::each(|c| {
            if c.wanted.load(Relaxed) && c.wanted.swap(false, SeqCst) && c.phase() == Phase::Managed && !c.is_let_go() {
                wanted.push(c);
            }
        });
        epoll::wanted(|c| wanted.push(c));
        for c in wanted {
            // Who only sends must not wait until somebody reads what stands before a mark.
            pump::hurry(&mut c.lock_both(), Why::Forked);
            self.stir(c);
            crate::process::reset_doomed(c);
            self.leave_ended(c);
            // What stands before a mark is in the way of the return, until somebody reads it.
            let rx = c.lock_rx();
            if c.phase() == Phase::Managed && rx.path() == RxPath::Armed {
                let n = crate::io::before_mark(c, &rx).0;
                c.rx_safe.fetch_max(c.rx_tcp() + n as u64, SeqCst);
            }
        }
    }

    /// A connection whose stream has ended cannot return. What is left of it goes into the kernel's socket.
    fn leave_ended(&mut self, conn: &'static Conn) {
        if conn.phase() != Phase::Managed || !conn.has_ended(END_EOF) {
            return;
        }
        let mut b = conn.lock_both();
        // The kernel may have a connection still where the program has none, or knows nothing of its error.
        // (Not where the stream is TCP's already: it knows of that.)
        let by_tcp = matches!(b.rx.path(), RxPath::Tcp | RxPath::Replay);
        let (rest, failed) = (b.rx.ring().waiting() > 0, !by_tcp && conn.has_ended(END_FAILED | END_RESET));
        let settled = (rest || failed) && remains::settle(&mut b, &mut self.rests);
        if rest && !settled {
            return;
        }
        if conn.has_ended(END_RESET) {
            // Whoever asks first how it failed is told here, which takes no ring.
            return self.detach(&mut b, conn);
        }
        if !settled {
            // What the program has shut the kernel has not: it was the ring's.
            for (end, how) in [(END_RDSHUT, libc::SHUT_RD), (END_WRSHUT, libc::SHUT_WR)] {
                if conn.has_ended(end) {
                    // SAFETY: an fd of the connection, which cannot be closed while we hold the locks, or none.
                    let _ = unsafe { sys!(libc::SYS_shutdown, conn.local().fd.load(Relaxed), how) };
                }
            }
        }
        *b.sw() = crate::switch::Switch::new();
        conn.next_try.store(u32::MAX, Relaxed);
        // How it ended is the kernel's to tell from now on, and nobody is to ask in between.
        self.give_back(b, conn, Why::Forked);
    }

    /// Has [`Bg::look_again`] called for a connection in `ns` from now.
    fn look_later(&mut self, conn: &'static Conn, ns: i64) {
        self.later.push((conn, conn.gen.load(Relaxed), now_ns() + ns));
    }

    /// The same, unless it is to be earlier anyway. (An entry may be one of another connection that had the same record.)
    fn look_within(&mut self, conn: &'static Conn, ns: i64) {
        let (gen, until) = (conn.gen.load(Relaxed), now_ns() + ns);
        if !self.later.iter().any(|(c, g, at)| core::ptr::eq(*c, conn) && *g == gen && *at <= until) {
            self.look_later(conn, ns);
        }
    }

    /// A connection that the program has closed while a return was under way: closes it when that is done.
    fn linger(&mut self, conn: &'static Conn) {
        let me = crate::process::holder_id();
        if !conn.holders.is_only(me) {
            // While there is an fd by which the kernel can be told.
            self.leave_ended(conn);
        }
        let shared = {
            let mut b = conn.lock_both();
            let shared = !conn.holders.is_only(me);
            // Bytes for a program that has closed: TCP answers them with a reset.
            let late = !shared && (fds::unread(&mut b) || b.is_sent_late());
            // Whoever was the last to have it has closed it just now, and left unread what had come.
            let left = !shared && conn.outlived.swap(false, Relaxed);
            let abort = match late {
                true if left => {
                    fds::reset_at_close(conn.local().fd.load(Relaxed));
                    ABORT
                }
                true => fds::refuse_late(&mut b, conn.local().fd.load(Relaxed)),
                false => 0,
            };
            // Others need no more of us than that it is home: what is repeated, they read from TCP.
            let home = visit::is_home(&mut b) || shared && remains::settle(&mut b, &mut self.rests);
            // The kernel is yet to know what the program has shut. It might refuse what is repeated after that.
            if shared && home && visit::waits_for_rest(&mut b) && !conn.has_ended(END_EOF) {
                self.look_within(conn, 5 * MS);
                return;
            }
            // Asked for before what is owed: it may arrive in between, and nobody would look again.
            let silent = conn.remote().is_some() || b.has_unsent();
            let done = if shared { home } else { late || !b.is_owed() || b.sw().is_plain() };
            if !done && !conn.has_ended(END_EOF) {
                // What was accepted has not arrived yet, and nothing says so when it has.
                let again = if conn.remote().is_some() { MS } else { 20 * MS };
                if silent {
                    self.look_within(conn, again);
                }
                return;
            }
            if shared && home && conn.local().managed.load(SeqCst) {
                epoll::unmanage(&mut b);
            }
            epoll::fd_closed(conn);
            if shared && home {
                if visit::has_rest(&b) {
                    // Others may be programs that know nothing of us.
                    options::give_lowat(conn, conn.local().fd.load(Relaxed));
                    visit::shut_kernels(conn);
                }
                self.detach(&mut b, conn);
            } else if let Some(own) = conn.own().filter(|_| !shared) {
                if !late {
                    b.tx.ring().show();
                }
                own.flags.fetch_or(CLOSED | abort, SeqCst);
                conn.flush();
            }
            conn.end_to_linger();
            conn.holders.remove(me);
            shared
        };
        let fd = conn.local().fd.swap(-1, AcqRel);
        self.unwatch(fd);
        sys::close(fd);
        if shared {
            self.drop_looks(conn);
        } else {
            conn.set_phase(Phase::Closed);
            self.closed(conn);
        }
    }

    fn timers(&mut self) {
        let now = now_ns();
        last::look(now);
        self.census.go_on(now);
        let due: Vec<End> = self.looks.iter().filter(|(_, l)| l.at <= now).map(|(t, _)| *t).collect();
        for t in due {
            self.step_look(t, now);
        }
        let late: Vec<c_int> = self.callers.iter().filter(|(_, c)| c.until <= now).map(|(fd, _)| *fd).collect();
        for fd in late {
            self.hang_up(fd);
        }
        for (c, gen, _) in self.later.extract_if(.., |(_, _, at)| *at <= now).collect::<Vec<_>>() {
            if c.gen.load(Relaxed) == gen {
                self.look_again(c);
            }
        }
        for (l, _) in self.dead.extract_if(.., |(l, at)| *at <= now && l.retire()) {
            self.retired.push(l);
        }
        for (c, gen, _) in self.restless.extract_if(.., |(_, _, at)| *at <= now).collect::<Vec<_>>() {
            self.unsettle(c, gen);
        }
        self.rests.retain_mut(|r| r.due() > now || !r.go_on(now));
        self.question_suspects(now);
        self.look_for_unread(now);
        self.release_held(now);
        self.shrink_idle(now);
        self.leave_unused(now);
        if self.asked.len() > 1 << 16 {
            self.asked.retain(|_, (_, at)| now - *at < 10_000 * MS);
        }
        if self.in_vain.len() > 1 << 10 {
            self.in_vain.retain(|_, (_, until)| *until > now);
        }
    }

    /// Makes a connection return: in its turn if that can begin at once at both ends, because what the peer's program has
    /// not read from TCP yet would be in the way; or else, sometimes, in a hurry.
    fn unsettle(&mut self, conn: &'static Conn, gen: u32) {
        if conn.gen.load(Relaxed) != gen || conn.phase() != Phase::Managed {
            return;
        }
        let left = self.leaves(conn, Why::Chaos) || {
            let mut b = conn.lock_both();
            let flags = conn.peer().map_or(0, |p| p.flags.load(Acquire));
            if conn.peer().is_some() && flags & CLOSED == 0 && conn.fulls.load(Relaxed) == 0 && chaos::hurries() {
                // Megabytes to be repeated would only take time.
                pump::hurry(&mut b, Why::Chaos);
            }
            b.sw().leaving()
        };
        if left {
            self.stir(conn);
        } else {
            self.restless.push((conn, gen, chaos::leave_at().max(now_ns() + MS)));
        }
    }

    /// Makes a connection return in its turn, if that can begin at once at both ends.
    fn leaves(&self, conn: &'static Conn, why: Why) -> bool {
        let mut b = conn.lock_both();
        let flags = conn.peer().map_or(0, |p| p.flags.load(Acquire));
        let ready = b.sw().is_ring() && flags & (MARK_TAKEN | CLOSED) == MARK_TAKEN;
        if ready {
            pump::leave(&mut b, why);
        }
        ready
    }

    fn stamp(&self, m: Msg) -> Msg {
        Msg { magic: MSG_MAGIC, version: config::protocol(link::VERSION), process: self.process, ..m }
    }
}

/// Makes an fd at the desk, and watches it by the set `epfd` there.
fn watched(epfd: c_int, token: u64, events: c_int, make: impl FnOnce() -> SysResult<c_int>) -> SysResult<c_int> {
    desk::run(|| {
        let fd = make()?;
        let ev = epoll_event { events: events as u32, u64: (fd as u64) << 3 | token };
        // SAFETY: `ev` is readable.
        let _ = unsafe { sys!(libc::SYS_epoll_ctl, epfd, libc::EPOLL_CTL_ADD, fd, &ev) };
        Ok(fd)
    })
}

/// Closes fds of the desk's.
fn close_all(fds: &[c_int; 4]) {
    if fds.iter().any(|fd| *fd >= 0) {
        desk::run(|| fds.iter().filter(|fd| **fd >= 0).for_each(|fd| sys::close_raw(*fd)));
    }
}
