//! Links to other hosts: the rendezvous by `rdma_cm`, and what the provider tells.
//!
//! As on one host, the accepting end dials the connecting end, here at the address and port that its TCP
//! socket has: that port space is not shared with TCP. The private data of request and answer carry what
//! `HELLO`, `WELCOME` and `LINKED` do on one host.

use super::*;
use crate::desk::kept;
use crate::provider::{self, Api, Event, Options, Release, What};
use crate::remote::{self, Half, Remote, FIRST_CHUNK};
use awaited::Awaited;
use hello::{flag, says, Hello, Referral};

mod awaited;
mod dial;
mod hello;
mod knock;

/// How long a host that could not be reached by RDMA is left alone: at first, and at most.
const IN_VAIN_NS: i64 = 1_000 * MS;
const IN_VAIN_LONGEST_NS: i64 = 60_000 * MS;
/// How many connections of one host are asked for at a time.
const KNOCKING: usize = 16;
/// How long others wait for one of these to be done, and for a peer to ask over a link that is there.
const KNOCK_LATER_NS: i64 = 16 * MS;
const ASKED_BY_NS: i64 = 20 * MS;
/// How long it is believed that this host has a device.
const DEVICE_NS: i64 = 1_000 * MS;
/// How long a dial may take, with all that both ends do in it.
const DIAL_NS: i64 = 5_000 * MS;
/// How many times the memory of hosts in vain.
const IN_VAIN_MOST: usize = 1024;

/// See [`Rdma::again`].
struct Again {
    conn: &'static Conn,
    gen: u32,
    tries: u32,
    at: i64,
    /// When it was due last.
    was: i64,
}

/// A listener, an attempt, or a link by its token.
enum Place {
    /// `at`: another listener of the same connection, and the address where it is; all that come here are sent there.
    Listener {
        id: *mut c_void,
        end: End,
        at: Option<(u64, [u8; 16])>,
    },
    /// `half`: with a queue pair. `invited`: the peer has said that it wants one. `sent_to`: as in the search for it.
    Dial {
        id: *mut c_void,
        end: End,
        half: Option<Half>,
        invited: bool,
        sent_to: Option<[u8; 16]>,
        until: i64,
    },
    Answer {
        half: Half,
        process: [u8; 16],
        host: [u8; 16],
        alone: bool,
        until: i64,
    },
    Link(&'static Link),
}

/// The thread's RDMA state.
#[derive(Default)]
pub(super) struct Rdma {
    /// The provider, and its state; null where it could not start.
    started: Option<(Option<&'static Api>, usize)>,
    /// Until when it is believed that there is a device.
    device: i64,
    places: HashMap<u64, Place>,
    /// How many of them are [`Place::Dial`], by host.
    dialled: HashMap<[u8; 16], usize>,
    last: u64,
    looks: remote::Looks,
    /// The hosts of links that we have dialled.
    hosts: HashMap<usize, [u8; 16]>,
    /// Hosts that could not be reached, until when that is believed, and for how long it was.
    in_vain: HashMap<[u8; 16], (i64, i64)>,
    /// Connections that have been on a link which was lost: how often they were looked for since, and when
    /// the next time is.
    again: HashMap<usize, Again>,
    /// Pieces of segments that were asked for.
    asked: HashMap<usize, u32>,
    /// Links for one connection that were made lately, and until when it is awaited.
    fresh: Vec<(&'static Link, i64)>,
    awaited: Awaited,
}

impl Rdma {
    /// Whether the provider has begun anything.
    pub(super) fn is_used(&self) -> bool {
        self.started.is_some()
    }

    /// When something is due.
    pub(super) fn due(&self) -> i64 {
        let mut at = if self.looks.at > 0 { self.looks.at } else { i64::MAX };
        for p in self.places.values() {
            if let Place::Dial { until, .. } | Place::Answer { until, .. } = p {
                at = at.min(*until);
            }
        }
        for a in self.again.values() {
            at = at.min(a.at);
        }
        for (_, until) in &self.fresh {
            at = at.min(*until);
        }
        at.min(self.awaited.due())
    }

    fn token(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn put(&mut self, token: u64, p: Place) {
        if let Place::Dial { end, .. } = &p {
            *self.dialled.entry(end.0.from).or_insert(0) += 1;
        }
        self.places.insert(token, p);
    }

    fn take(&mut self, token: u64) -> Option<Place> {
        let p = self.places.remove(&token)?;
        if let Place::Dial { end, .. } = &p {
            match self.dialled.get_mut(&end.0.from) {
                Some(n) if *n > 1 => *n -= 1,
                _ => _ = self.dialled.remove(&end.0.from),
            }
        }
        Some(p)
    }
}

/// Whether this host has a device that may be used. Cheap, so that most hosts never load the provider.
fn has_device() -> bool {
    let c = config::get();
    let wanted = c.device.as_bytes();
    let Ok(dir) = std::fs::read_dir("/sys/class/infiniband") else { return false };
    dir.flatten().any(|e| {
        use std::os::unix::ffi::OsStrExt;
        let name = e.file_name();
        match wanted {
            [] => c.links.verbs_named || e.path().join("device").exists(),
            w => w == name.as_bytes(),
        }
    })
}

impl Bg {
    /// Why RDMA is of no use for a connection with a host; `None`: it may be of use.
    pub(super) fn rdma_refusal(&mut self, peer: &[u8; 16]) -> Why {
        let now = now_ns();
        if now >= self.rdma.device {
            if !desk::run(has_device) {
                return Why::NoDevice;
            }
            self.rdma.device = now + DEVICE_NS;
        }
        if self.rdma.in_vain.get(peer).is_some_and(|(until, _)| *until > now) {
            return Why::NoWay;
        }
        if self.provider().is_none() {
            return Why::NoDevice;
        }
        Why::None
    }

    fn provider(&mut self) -> Option<(&'static Api, *mut c_void)> {
        if self.rdma.started.is_none() {
            let api = provider::load();
            let mut state = core::ptr::null_mut();
            if let Some(api) = api {
                let c = config::get();
                extern "C" fn place(fd: c_int) -> c_int {
                    kept::keep(fd)
                }
                extern "C" fn release(fd: c_int, how: Release) {
                    kept::give_up(fd, how);
                }
                let software = c.links.verbs_named.into();
                let gid_index = c.gid_index.map_or(-1, i32::from);
                let mut o = Options { device: [0; 64], software, gid_index, place, release, why: [0; 128] };
                for (to, b) in o.device.iter_mut().zip(c.device.as_bytes().iter().take(63)) {
                    *to = *b as libc::c_char;
                }
                // SAFETY: `o` is valid.
                state = kept::host(|| unsafe { (api.start)(&mut o) });
                if state.is_null() {
                    // SAFETY: the provider ends it with a NUL.
                    let why = unsafe { core::ffi::CStr::from_ptr(o.why.as_ptr()) };
                    log(Level::Warn, format_args!("no verbs link: {}", why.to_string_lossy()));
                } else {
                    // SAFETY: a state of the provider's.
                    let fd = unsafe { (api.fd)(state) };
                    self.watch(fd, token::VERBS, libc::EPOLLIN);
                }
            }
            self.rdma.started = Some((api, state as usize));
        }
        match self.rdma.started {
            Some((Some(api), state)) if state != 0 => Some((api, state as *mut c_void)),
            _ => None,
        }
    }

    fn hello(&self, half: Option<&Half>) -> Hello {
        Hello {
            magic: hello::MAGIC,
            version: config::protocol(link::VERSION),
            process: self.process,
            mirror: half.map_or(0, |h| h.mirror.base as u64),
            keys: half.map_or([0; 2], |h| h.keys),
            flags: if config::get().strict { flag::ALONE } else { 0 },
            ..Hello::default()
        }
    }

    /// One step of the search for a peer on another host.
    pub(super) fn step_rdma(&mut self, end: End, now: i64) {
        let Some((api, state)) = self.provider() else { return self.fail_look(end, Why::NoDevice) };
        let token = self.rdma.token();
        let Some(look) = self.looks.get_mut(&end) else { return };
        let t = end.0;
        let mut id = core::ptr::null_mut();
        if end.1 {
            if look.attempt != 0 || now >= look.until {
                return self.fail_look(end, Why::NoPeer);
            }
            // SAFETY: a state of the provider's, and valid pointers.
            match kept::host(|| unsafe { (api.listen)(state, &t.from, t.from_port, token, &mut id) }) {
                0 => {
                    look.attempt = token;
                    look.at = look.until;
                    let at = self.listen_at_own(api, state, end);
                    self.rdma.places.insert(token, Place::Listener { id, end, at });
                }
                libc::EADDRINUSE => look.at = now + 20 * MS,
                e => {
                    log(Level::Debug, format_args!("RDMA: cannot listen, errno {e}"));
                    self.fail_look(end, Why::NoWay);
                }
            }
            return;
        }
        if look.attempt != 0 {
            // The attempt's own time limit ends it.
            look.at = now + HANDSHAKE_NS;
            return;
        }
        if look.dials >= knock::MOST || now >= look.until {
            return self.fail_look(end, Why::NoPeer);
        }
        if self.rdma.dialled.get(&t.from).is_some_and(|n| *n >= KNOCKING) {
            look.at = now + KNOCK_LATER_NS;
            return;
        }
        if look.dials == 0 && self.rdma.hosts.values().any(|h| *h == t.from) {
            look.dials = 1;
            look.at = now + ASKED_BY_NS;
            return;
        }
        self.rdma_try(end, now, false);
    }

    /// Listens at the address that `RINGSOCK_GID_INDEX` says, if it is another one than the connection's.
    fn listen_at_own(&mut self, api: &'static Api, state: *mut c_void, end: End) -> Option<(u64, [u8; 16])> {
        let (t, mut at, mut id) = (end.0, [0; 16], core::ptr::null_mut());
        // SAFETY: a state of the provider's, and valid pointers.
        if kept::host(|| unsafe { (api.own)(state, &t.to, &mut at) }) != 0 || at == t.from {
            return None;
        }
        let token = self.rdma.token();
        // SAFETY: as above.
        if kept::host(|| unsafe { (api.listen)(state, &at, t.from_port, token, &mut id) }) != 0 {
            return None;
        }
        self.rdma.places.insert(token, Place::Listener { id, end, at: None });
        Some((token, at))
    }

    fn rdma_unreachable(&mut self, end: End) {
        let peer = if end.1 { end.0.to } else { end.0.from };
        if self.rdma.hosts.values().any(|h| *h == peer) {
            // There is a link with that host, which has only been too slow.
            return self.fail_look(end, Why::NoPeer);
        }
        let now = now_ns();
        if self.rdma.in_vain.len() >= IN_VAIN_MOST {
            self.rdma.in_vain.clear();
        }
        let known = self.rdma.in_vain.get(&peer).copied().unwrap_or((0, 0));
        // Of several connections that fail together only the first makes the time longer.
        let span = if now < known.0 { known.1 } else { (known.1 * 2).clamp(IN_VAIN_NS, IN_VAIN_LONGEST_NS) };
        self.rdma.in_vain.insert(peer, (now + span, span));
        log(Level::Debug, format_args!("a host cannot be reached by RDMA: not tried for {} s", span / (1000 * MS)));
        self.fail_look(end, Why::NoWay);
    }

    /// The connection has been on a link to another host, or its host could not be reached, which may have been so for a
    /// moment only: it is looked for again, at longer and longer intervals. False: not so, or too often.
    pub(super) fn rdma_again(&mut self, conn: &'static Conn, why: Why) -> bool {
        const AT_FIRST: u32 = 5;
        /// A link that lasted so long from the moment on in which it was looked for was a good one.
        const GOOD_NS: i64 = 2_000 * MS;
        let gen = conn.gen.load(Relaxed);
        let known = self.rdma.again.get(&(conn as *const Conn as usize)).filter(|a| a.gen == gen);
        let fresh = conn.stats().upgrades.load(Relaxed) == 0;
        if conn.phase() != Phase::Raw || fresh && (why != Why::NoWay || known.is_some_and(|a| a.tries >= AT_FIRST)) {
            return false;
        }
        let a =
            self.rdma.again.entry(conn as *const Conn as usize).or_insert(Again { conn, gen, tries: 0, at: 0, was: 0 });
        if a.gen != gen || why == Why::Returned && now_ns() - a.was > GOOD_NS {
            (a.gen, a.tries) = (gen, 0);
        }
        // The end that connected is there first.
        let early = if conn.connector.load(Relaxed) { 3 } else { 4 };
        a.at = now_ns() + ((early * 250 * MS) << a.tries.min(6));
        a.tries += 1;
        true
    }

    /// How long the end that connected can be found after a link was lost: until the other end, which looks at longer
    /// and longer intervals as well, has looked in any case.
    pub(super) fn rdma_window(&self, conn: &Conn) -> i64 {
        self.rdma.again.get(&(conn as *const Conn as usize)).map_or(0, |a| (2_000 * MS) << a.tries.min(6))
    }

    fn rdma_look_again(&mut self, now: i64) {
        let due: Vec<usize> = self.rdma.again.iter().filter(|(_, a)| a.at <= now).map(|(k, _)| *k).collect();
        for k in due {
            let Some(a) = self.rdma.again.get_mut(&k) else { continue };
            let (conn, gen) = (a.conn, a.gen);
            if conn.gen.load(Relaxed) != gen || conn.phase() != Phase::Raw {
                // Gone, or upgraded: then its next loss counts from the beginning.
                self.rdma.again.remove(&k);
                continue;
            }
            (a.at, a.was) = (i64::MAX, now);
            self.look(conn);
        }
    }

    fn rdma_drop(&mut self, token: u64) {
        if let Some(p) = self.rdma.take(token) {
            self.rdma_end(p);
        }
    }

    fn rdma_end(&mut self, p: Place) {
        let Some((api, _)) = self.provider() else { return };
        if let Place::Listener { at: Some((other, _)), .. } = &p {
            self.rdma_drop(*other);
        }
        match p {
            Place::Listener { id, .. } | Place::Dial { id, half: None, .. } => {
                // SAFETY: an id of the provider's that nobody else has.
                kept::host(|| unsafe { (api.close)(id) })
            }
            Place::Dial { half: Some(half), .. } => half.destroy(api),
            Place::Answer { half, process, alone, .. } => {
                if !alone {
                    self.rdma_expects_no_more(&process);
                }
                half.destroy(api);
            }
            Place::Link(_) => {}
        }
    }

    /// Whatever the provider has to tell, messages that have come, and what is due. `rang`: perhaps a
    /// completion channel has something.
    pub(super) fn rdma_events(&mut self, rang: bool) {
        let Some((Some(api), state)) = self.rdma.started else { return };
        if state == 0 {
            return;
        }
        let spinning = remote::spun();
        let mut e = Event::default();
        let state = state as *mut c_void;
        // Mostly it is a queue pair that has rung, for which nobody need go to the clerk.
        // SAFETY: a state of the provider's.
        let news = rang && sys::poll_now(unsafe { (api.fd)(state) }, libc::POLLIN) != 0;
        // SAFETY: as above.
        while news && kept::host(|| unsafe { (api.event)(state, &mut e) }) == 1 {
            self.rdma_event(api, &e);
        }
        self.rdma.looks.look(rang, spinning);
        let now = now_ns();
        for l in self.links.clone() {
            let Some(r) = l.remote() else { continue };
            if rang {
                r.end_quiet();
            }
            self.hear_remote(l, r);
        }
        self.rdma_look_again(now);
        for (l, _) in self.rdma.fresh.extract_if(.., |(_, until)| *until <= now).collect::<Vec<_>>() {
            let unused = l.remote().is_some_and(|r| !r.served.load(Relaxed));
            if unused && !l.dead.load(Relaxed) {
                self.lost(l);
            }
        }
        for p in self.rdma.awaited.late(now) {
            self.rdma_expects_no_more(&p);
        }
        let late: Vec<u64> = self
            .rdma
            .places
            .iter()
            .filter(|(_, p)| matches!(p, Place::Dial { until, .. } | Place::Answer { until, .. } if *until <= now))
            .map(|(t, _)| *t)
            .collect();
        for t in late {
            self.rdma_in_vain(t);
        }
    }

    fn hear_remote(&mut self, l: &'static Link, r: &'static Remote) {
        if l.dead.load(Relaxed) {
            return;
        }
        if r.wants_to_say.load(SeqCst) {
            self.flush_link(l);
        }
        while let Some(m) = r.next_message() {
            if m.magic == MSG_MAGIC {
                self.on_message(l, &m, &mut [-1; 4]);
            }
            r.poll(false);
        }
        let wanted = l.side.wanted();
        let asked = self.rdma.asked.entry(key(l)).or_insert(0);
        if wanted > *asked {
            *asked = wanted;
            self.say(l, Msg { kind: kind::NEED, a: wanted, ..Msg::default() });
        }
        // Its connection was here, and both ends have left it.
        let over = r.alone.load(Relaxed) && r.served.load(Relaxed) && l.slots.load(SeqCst) == 0;
        if over || r.failed.load(SeqCst) {
            self.lost(l);
        }
    }

    /// The peer wants to use its segment up to piece `last`: registers the mirror of what is missing.
    pub(super) fn offer_chunks(&mut self, l: &'static Link, last: u32) {
        let Some(r) = l.remote() else { return };
        for chunk in FIRST_CHUNK..=last.min(remote::CHUNKS as u32 - 1) {
            if r.offers(chunk) {
                continue;
            }
            let Some(key) = r.offer_chunk(chunk) else {
                log(Level::Warn, format_args!("no more memory can be registered for a peer (see `ulimit -l`)"));
                return;
            };
            self.say(l, Msg { kind: kind::KEYS, a: chunk, b: key, ..Msg::default() });
        }
    }

    fn rdma_event(&mut self, api: &'static Api, e: &Event) {
        log(Level::Debug, format_args!("RDMA: {:?}, status {}", e.what, e.status));
        match e.what {
            What::Request => self.rdma_request(api, e),
            What::Routed => self.rdma_routed(api, e),
            What::Established => self.rdma_established(e),
            What::Rejected => self.rdma_rejected(e),
            What::Unreachable | What::Lost => match self.rdma.places.get(&e.token) {
                Some(Place::Dial { .. }) => {
                    log(Level::Debug, format_args!("RDMA: no way to the peer (status {})", e.status));
                    self.rdma_in_vain(e.token);
                }
                Some(Place::Link(l)) => {
                    let l = *l;
                    self.lost(l);
                }
                Some(_) => self.rdma_drop(e.token),
                None => {}
            },
            What::None => {}
        }
    }

    /// A peer has found a listener of ours.
    fn rdma_request(&mut self, api: &'static Api, e: &Event) {
        let refuse = |h: Hello| {
            // SAFETY: the request's id is ours alone.
            kept::host(|| unsafe {
                (api.reject)(e.id, h.bytes().as_ptr(), h.bytes().len() as u32);
                (api.close)(e.id);
            })
        };
        let Some(Place::Listener { end, at, .. }) = self.rdma.places.get(&e.listener) else {
            return refuse(Hello { says: says::REFUSE, why: Why::NoPeer as u8, ..self.hello(None) });
        };
        let (end, at) = (*end, *at);
        let t = end.0;
        let Some(h) = Hello::read(e).filter(|h| h.port == t.to_port) else {
            return refuse(Hello { says: says::REFUSE, why: Why::NoPeer as u8, ..self.hello(None) });
        };
        if h.version != config::protocol(link::VERSION) {
            refuse(Hello { says: says::REFUSE, why: Why::Version as u8, ..self.hello(None) });
            return self.fail_look(end, Why::Version);
        }
        if let Some((_, at)) = at {
            let r = Referral { hello: Hello { says: says::AT, ..self.hello(None) }, at };
            // SAFETY: as above.
            kept::host(|| unsafe {
                (api.reject)(e.id, r.bytes().as_ptr(), r.bytes().len() as u32);
                (api.close)(e.id);
            });
            return;
        }
        let alone = h.is_alone();
        let same =
            |l: &&'static Link| !alone && l.answered && l.process == h.process && l.remote().is_some() && !l.is_alone();
        if let Some(l) = self.links.iter().copied().find(|l| same(l)) {
            refuse(Hello { says: says::USE, ..self.hello(None) });
            self.say(l, Msg { kind: kind::ASK, tuple: t, ..Msg::default() });
            return;
        }
        let under_way = |p: &Place| matches!(p, Place::Answer { process, .. } if *process == h.process);
        let knocks = h.says == says::KNOCK;
        let comes = knocks && self.rdma.awaited.has(&h.process);
        if !alone && (comes || !knocks && self.rdma.places.values().any(under_way)) {
            self.ask_later.push((h.process, t));
            return refuse(Hello { says: says::USE, ..self.hello(None) });
        }
        if knocks {
            if !alone {
                let listener = self.looks.get(&end).map_or(0, |look| look.attempt);
                self.rdma_expects(&h.process, DIAL_NS, listener);
            }
            return refuse(Hello { says: says::COME, ..self.hello(None) });
        }
        let token = self.rdma.token();
        // SAFETY: a request that nobody else has.
        let half = match unsafe { Half::new(api, e.id, token) } {
            Ok(half) => half,
            Err(errno) => {
                cannot_register(errno);
                if !alone {
                    self.rdma_expects_no_more(&h.process);
                }
                return refuse(Hello { says: says::REFUSE, why: Why::Resources as u8, ..self.hello(None) });
            }
        };
        self.rdma.in_vain.remove(&e.from);
        half.set_peer(h.mirror, h.keys);
        let answer = self.hello(Some(&half));
        // SAFETY: an open request; the data is readable.
        if kept::host(|| unsafe { (api.accept)(e.id, answer.bytes().as_ptr(), answer.bytes().len() as u32) }) != 0 {
            if !alone {
                self.rdma_expects_no_more(&h.process);
            }
            return half.destroy(api);
        }
        if !alone {
            // Until it is there, for those that knock meanwhile.
            self.rdma_expects(&h.process, 2 * DIAL_NS, 0);
        }
        let until = now_ns() + DIAL_NS;
        self.rdma.places.insert(token, Place::Answer { half, process: h.process, host: t.to, alone, until });
    }

    /// The way to a peer is known.
    fn rdma_routed(&mut self, api: &'static Api, e: &Event) {
        let Some(Place::Dial { end, invited, .. }) = self.rdma.places.get(&e.token) else { return };
        let (end, invited) = (*end, *invited);
        if !config::get().strict && !invited {
            let knock = Hello { port: end.0.to_port, says: says::KNOCK, ..self.hello(None) };
            // SAFETY: a routed id; the data is readable.
            if kept::host(|| unsafe { (api.connect)(e.id, knock.bytes().as_ptr(), knock.bytes().len() as u32) }) == 0 {
                return;
            }
            // A device that wants to see a queue pair first.
        }
        // SAFETY: a routed id that nobody else has.
        let half = match unsafe { Half::new(api, e.id, e.token) } {
            Ok(half) => half,
            Err(errno) => {
                cannot_register(errno);
                if self.is_attempt(&end, e.token) {
                    self.fail_look(end, Why::Resources);
                }
                return self.rdma_drop(e.token);
            }
        };
        let hello = Hello { port: end.0.to_port, ..self.hello(Some(&half)) };
        // SAFETY: an open id; the data is readable.
        let r = kept::host(|| unsafe { (api.connect)(e.id, hello.bytes().as_ptr(), hello.bytes().len() as u32) });
        if let Some(Place::Dial { half: to, .. }) = self.rdma.places.get_mut(&e.token) {
            *to = Some(half);
        }
        if r != 0 {
            self.rdma_in_vain(e.token);
        }
    }

    fn rdma_established(&mut self, e: &Event) {
        match self.rdma.take(e.token) {
            Some(Place::Dial { end, half: Some(half), id, invited, sent_to, .. }) => {
                let look = self.looks.get_mut(&end).filter(|look| look.attempt == e.token);
                let seeks = look.map(|look| look.attempt = 0).is_some();
                let Some(h) = Hello::read(e) else {
                    self.rdma_end(Place::Dial { id, end, half: Some(half), invited, sent_to, until: 0 });
                    if seeks {
                        self.fail_look(end, Why::Refused);
                    }
                    return;
                };
                half.set_peer(h.mirror, h.keys);
                self.rdma.in_vain.remove(&end.0.from);
                if let Some(l) = self.rdma_link(e.token, h.process, false, half, h.is_alone()) {
                    if !l.is_alone() {
                        self.rdma.hosts.insert(key(l), end.0.from);
                    }
                    self.propose(l, end.0);
                }
            }
            Some(Place::Answer { half, process, alone: true, .. }) => {
                self.rdma_link(e.token, process, true, half, true);
            }
            Some(Place::Answer { half, process, host, .. }) => {
                let left = self.rdma.awaited.end(&process);
                self.rdma_leave(left);
                if let Some(l) = self.rdma_link(e.token, process, true, half, false) {
                    // For all that it may have accepted, too, also where the search is over.
                    let others = self.known.iter().filter(|((t, ours), k)| *ours && t.to == host && k.is_raw());
                    for t in others.map(|((t, _), _)| *t).collect::<Vec<_>>() {
                        self.say(l, Msg { kind: kind::ASK, tuple: t, ..Msg::default() });
                    }
                    for (_, t) in self.ask_later.extract_if(.., |(p, _)| *p == process).collect::<Vec<_>>() {
                        self.say(l, Msg { kind: kind::ASK, tuple: t, ..Msg::default() });
                    }
                }
            }
            Some(p) => self.rdma.put(e.token, p),
            None => {}
        }
    }

    fn rdma_link(
        &mut self,
        token: u64,
        process: [u8; 16],
        answered: bool,
        half: Half,
        alone: bool,
    ) -> Option<&'static Link> {
        let l = Link::new_remote(process, answered, half);
        if let Some(r) = l.remote() {
            r.alone.store(alone, Relaxed);
        }
        let l = link::publish(l, &mut self.retired)?;
        if alone {
            self.rdma.fresh.push((l, now_ns() + 2 * DIAL_NS));
        }
        self.links.push(l);
        self.rdma.places.insert(token, Place::Link(l));
        self.rdma.asked.remove(&key(l));
        remote::count(true);
        let (api, _) = self.provider()?;
        if let Some(r) = l.remote() {
            if !remote::link_is(api, r.channel, true) {
                self.lost(l);
                return None;
            }
            if let Some(fd) = r.make_timer() {
                self.watch(fd, token::VERBS, libc::EPOLLIN | libc::EPOLLET);
            }
            self.hear_remote(l, r);
        }
        log(Level::Info, format_args!("a verbs link is up"));
        Some(l)
    }

    fn rdma_rejected(&mut self, e: &Event) {
        let Some(Place::Dial { end, sent_to, .. }) = self.rdma.places.get(&e.token) else { return };
        let (end, sent_to) = (*end, *sent_to);
        self.rdma_drop(e.token);
        let Some(look) = self.looks.get_mut(&end).filter(|look| look.attempt == e.token) else {
            // The peer takes nobody else meanwhile.
            if Hello::read(e).is_some_and(|h| h.says == says::COME) {
                let _ = self.rdma_dial(end, true, sent_to);
            }
            return;
        };
        look.attempt = 0;
        look.at = now_ns() + knock::again_in(look.dials);
        match Hello::read(e) {
            Some(h) if h.says == says::USE => {
                if let Some((l, _)) = self.asked.remove(&end.0) {
                    self.propose(l, end.0);
                } else {
                    look.at = now_ns() + HANDSHAKE_NS;
                }
            }
            Some(h) if h.says == says::AT => {
                look.sent_to = Referral::read(e);
                look.at = now_ns();
            }
            Some(h) if h.says == says::COME => {
                let now = now_ns();
                look.until = look.until.max(now + HANDSHAKE_NS);
                // At once, even after the last attempt: the peer takes nobody else meanwhile, and the connection may be about
                // to end.
                self.rdma_try(end, now, true);
            }
            Some(h) if h.says == says::REFUSE && h.why != Why::NoPeer as u8 => {
                self.fail_look(end, Why::from_u8(h.why));
            }
            // Nobody listens there (yet), or the peer still takes us for an earlier connection.
            _ => {}
        }
    }

    /// A link to another host has failed: takes what has arrived, and ends it.
    pub(super) fn rdma_lost(&mut self, l: &'static Link, r: &Remote) {
        if let Some((api, _)) = self.provider() {
            // Its channel may be closed with it.
            remote::link_is(api, r.channel, false);
        }
        r.poll(true);
        while let Some(m) = r.next_message() {
            if m.kind == kind::DETACH {
                self.left_by_peer.insert((key(l), m.a));
            }
            r.poll(true);
        }
        r.close();
        remote::count(false);
        self.rdma.hosts.remove(&key(l));
        self.rdma.places.retain(|_, p| !matches!(p, Place::Link(x) if core::ptr::eq(*x, l)));
        self.rdma.fresh.retain(|(x, _)| !core::ptr::eq(*x, l));
        if l.slots.load(SeqCst) > 0 {
            log(Level::Info, format_args!("a verbs link is lost: its connections go on over TCP"));
        }
    }
}

fn cannot_register(errno: i32) {
    match errno {
        libc::ENOMEM => log(Level::Warn, format_args!("no verbs link: memory cannot be registered (see `ulimit -l`)")),
        // The peer may have given up meanwhile.
        e => log(Level::Debug, format_args!("RDMA: no queue pair, errno {e}")),
    }
}
