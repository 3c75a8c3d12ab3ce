//! Who waits for completion channels.
//!
//! What comes over a link is taken from its completion queue by whoever looks at it, so of all threads that
//! sleep only one has to hear of it: the *guard*, which takes what has come and wakes those whom it concerns.
//! As a thread of the program is best woken by nobody but the kernel, it is the guard itself where it sleeps
//! alone: its call waits for the channels too. Their fds stay where they were put last (the *holder*: an epoll
//! set of the program's, a thread in `poll` or a blocking call, or the background thread), so that one thread
//! that sleeps again and again moves nothing.
//!
//! While somebody sleeps there is a guard that sleeps too, or is awake and will look at the queues once more
//! before it goes: a guard that goes while others sleep leaves its place to the background thread, and arms
//! the queues anew. While nobody sleeps, the holder may be away; then the background thread looks at the
//! queues every millisecond, and takes the channels to itself when nobody has slept for a while.

use super::*;
use crate::conn::Conn;
use crate::link;
use crate::provider::{Api, Channel};
use crate::sync::now_ns;
use crate::sys::sys;
use crate::thread::{me, tid};
use libc::{c_int, epoll_event};

/// Devices that can have links at the same time.
pub const CHANNELS: usize = 16;
/// How long nobody but the background thread takes the channels after a guard had to leave sleepers behind.
const REST_NS: i64 = 10_000_000;

/// Where a thread is about to sleep.
#[derive(Clone, Copy)]
pub enum Place<'a> {
    /// In `poll`, where other things wake it too.
    Poll,
    /// In a blocking call on a connection.
    Call(&'a Conn),
    /// In an epoll set, known by an address, an fd, and what its bell is registered with.
    Set(usize, c_int, u64),
    /// Where no completion channel can wake it.
    Elsewhere,
}

/// The background thread, as a holder; threads; everything else is the address of a set.
const BACKGROUND: usize = 0;
const THREAD: usize = 1;
const NOBODY: usize = usize::MAX;

impl Place<'_> {
    fn key(&self) -> usize {
        match self {
            Place::Poll | Place::Call(_) => THREAD,
            Place::Set(set, ..) => *set,
            Place::Elsewhere => NOBODY,
        }
    }
}

struct State {
    /// With the number of links.
    channels: [(Channel, u32); CHANNELS],
    count: usize,
    api: Option<&'static Api>,
    holder: usize,
    /// The holder's epoll set, and under what the channels are there.
    epfd: c_int,
    token: u64,
    /// Guards that sleep.
    present: u32,
    /// Changes whenever the holder does.
    generation: u32,
    rest_until: i64,
    /// Events of channels that were read.
    heard: u32,
    /// What wakes a guard in a blocking call besides the channels.
    bell: Option<u32>,
    /// A set of the bell ([`BELL`]) and all channels ([`CHANNEL`]), for blocking calls; -1: there is none.
    call_set: c_int,
}

/// Under what bell and channels are in the set for blocking calls.
pub const BELL: u64 = 0;
/// See [`BELL`].
pub const CHANNEL: u64 = 1;

struct Guard {
    lock: Lock,
    state: UnsafeCell<State>,
}

// SAFETY: `state` is guarded by `lock`.
unsafe impl Sync for Guard {}

const FRESH: State = State {
    channels: [(Channel { fd: -1, handle: core::ptr::null_mut() }, 0); CHANNELS],
    count: 0,
    api: None,
    holder: BACKGROUND,
    epfd: -1,
    token: 0,
    present: 0,
    generation: 0,
    rest_until: 0,
    heard: 0,
    bell: None,
    call_set: -1,
};

static GUARD: Guard = Guard { lock: Lock::new(), state: UnsafeCell::new(FRESH) };

/// Threads that sleep, or are about to.
static SLEEPERS: AtomicU32 = AtomicU32::new(0);
/// [`State::present`], and whether the background thread is the holder: for those who have no time for the lock.
static PRESENT: AtomicU32 = AtomicU32::new(0);
static IN_BACKGROUND: AtomicBool = AtomicBool::new(true);
/// How often a guard has gone to sleep.
static TURNS: AtomicU32 = AtomicU32::new(0);
/// The background thread will not look again soon.
static SLOW: AtomicBool = AtomicBool::new(false);
/// The connection for which the guard is in a blocking call, its thread, and its bell.
static CALLER: AtomicPtr<Conn> = AtomicPtr::new(core::ptr::null_mut());
static CALLER_TID: AtomicU32 = AtomicU32::new(0);
static CALLER_BELL: AtomicU32 = AtomicU32::new(0);

fn with<R>(f: impl FnOnce(&mut State) -> R) -> R {
    let _g = GUARD.lock.lock();
    // SAFETY: guarded by `lock`.
    f(unsafe { &mut *GUARD.state.get() })
}

fn epoll(epfd: c_int, op: c_int, fd: c_int, token: u64) {
    epoll_for(libc::EPOLLIN, epfd, op, fd, token);
}

fn epoll_for(events: c_int, epfd: c_int, op: c_int, fd: c_int, token: u64) {
    let ev = epoll_event { events: events as u32, u64: token };
    // SAFETY: `ev` is readable.
    let _ = unsafe { sys!(libc::SYS_epoll_ctl, epfd, op, fd, &ev) };
}

impl State {
    fn fds(&self) -> impl Iterator<Item = c_int> + '_ {
        self.channels[..self.count].iter().map(|(c, _)| c.fd)
    }

    /// The channels are `key`'s from now on. Level-triggered: whoever else waits at the same set of the
    /// kernel's (a forked child) takes no event away.
    fn give(&mut self, key: usize, epfd: c_int, token: u64) {
        let old = self.epfd;
        for fd in self.fds() {
            if old >= 0 {
                epoll(old, libc::EPOLL_CTL_DEL, fd, 0);
            }
            if epfd >= 0 {
                epoll(epfd, libc::EPOLL_CTL_ADD, fd, token);
            }
        }
        (self.holder, self.epfd, self.token) = (key, epfd, token);
        self.generation = self.generation.wrapping_add(1);
        self.set_present(0);
        IN_BACKGROUND.store(key == BACKGROUND, SeqCst);
        if key != BACKGROUND {
            SLOW.store(true, SeqCst);
        }
    }

    fn make_call_set(&mut self) {
        let Some(bell) = self.bell else { return };
        // SAFETY: no preconditions.
        let made = || crate::desk::make(|| unsafe { sys!(libc::SYS_epoll_create1, libc::EPOLL_CLOEXEC) });
        let Ok(fd) = crate::fdhigh::not_for_children(made) else { return };
        self.call_set = fd;
        epoll(self.call_set, libc::EPOLL_CTL_ADD, crate::bell::fd(bell), BELL);
        for fd in self.fds() {
            epoll(self.call_set, libc::EPOLL_CTL_ADD, fd, CHANNEL);
        }
        self.renew_call_set();
    }

    /// What the set for blocking calls has not reported, or has reported and nobody heard, it reports again. Where
    /// there is one queue only an event is news even if an older one has not been read, and edges are cheaper.
    fn renew_call_set(&self) {
        let alone = self.channels[..self.count].iter().map(|(_, links)| links).sum::<u32>() == 1;
        let events = libc::EPOLLIN | if alone { libc::EPOLLET } else { 0 };
        for fd in self.fds() {
            epoll_for(events, self.call_set, libc::EPOLL_CTL_MOD, fd, CHANNEL);
        }
    }

    fn give_background(&mut self) {
        let (epfd, token) = crate::bg::channels_place();
        self.give(BACKGROUND, epfd, token);
    }

    fn set_present(&mut self, n: u32) {
        self.present = n;
        PRESENT.store(n, SeqCst);
    }

    /// Whether a thread that is about to sleep at `place` will be the guard. `alone`: nobody else sleeps.
    fn leads(&mut self, place: Place, alone: bool) -> bool {
        let key = place.key();
        if key == NOBODY || self.count == 0 {
            return false;
        }
        if let Place::Call(_) = place {
            if self.bell.is_none() {
                self.bell = crate::bell::alloc();
                self.make_call_set();
            }
            if self.bell.is_none() {
                return false;
            }
        }
        if self.holder == key {
            return key != THREAD || self.present == 0;
        }
        if self.present > 0 || !alone || (self.rest_until > 0 && now_ns() < self.rest_until) {
            return false;
        }
        match place {
            Place::Set(_, epfd, token) => self.give(key, epfd, token),
            _ => self.give(key, -1, 0),
        }
        true
    }
}

/// A thread that sleeps, or is about to.
#[derive(Default)]
pub struct Asleep {
    counted: bool,
    /// It was the guard when it began.
    leads: bool,
    /// What it waits for, if that is outside of epoll sets.
    fds: [c_int; CHANNELS],
    count: usize,
    bell: u32,
    set: Option<c_int>,
}

impl Asleep {
    /// The set of channels and bell, for the guard that sleeps in a blocking call.
    pub fn set(&self) -> Option<c_int> {
        self.set
    }

    /// The channels' fds, for the guard that sleeps outside of epoll sets; nothing for others.
    pub fn fds(&self) -> &[c_int] {
        &self.fds[..self.count]
    }

    /// The bell of a guard that sleeps in a blocking call.
    pub fn bell(&self) -> u32 {
        self.bell
    }

    /// The thread sleeps no more. For one that does not come back, and drops nothing, too.
    pub fn end(&mut self) {
        if !core::mem::take(&mut self.counted) {
            return;
        }
        SLEEPERS.fetch_sub(1, SeqCst);
        if core::mem::take(&mut self.leads) {
            leave(0);
        }
    }
}

impl Drop for Asleep {
    fn drop(&mut self) {
        self.end();
    }
}

/// The calling thread is the guard no more, if it still was; of the threads that sleep, `own` are itself.
fn leave(own: u32) {
    let since = me(|t| t.guards.replace(0));
    if since == 0 {
        return;
    }
    let needed = with(|s| {
        if CALLER_TID.load(Relaxed) == tid() {
            CALLER.store(core::ptr::null_mut(), SeqCst);
        }
        // Under the lock: whoever is counted later finds no guard there.
        let needed = SLEEPERS.load(SeqCst) > own;
        if u64::from(s.generation) + 1 == since {
            let n = s.present.saturating_sub(1);
            s.set_present(n);
            if n == 0 && needed {
                s.give_background();
                s.rest_until = now_ns() + REST_NS;
            }
        }
        needed
    });
    if needed {
        // What it has taken from a channel was for all.
        watch_all();
    } else if SLOW.load(Relaxed) && SLOW.swap(false, SeqCst) {
        crate::bell::ring(0);
    }
}

/// A handler of the program's is about to run in the calling thread, for who knows how long.
#[inline]
pub fn interrupted() {
    if me(|t| t.guards.get()) != 0 {
        leave(1);
    }
}

/// Arms all queues, and takes what has come.
fn watch_all() {
    link::each_remote(|r| {
        r.arm(!r.waiting.is_empty());
        r.poll(true);
    });
}

/// Sees to it that what comes from now on wakes the calling thread in its sleep, or a guard which wakes it,
/// and takes what has come. To be called before the last look, and kept while the caller sleeps.
pub fn before_sleep(place: Place) -> Asleep {
    if !super::poll::is_active() {
        return Asleep::default();
    }
    // A handler that nobody told of may have come in the middle of another sleep.
    interrupted();
    let alone = SLEEPERS.fetch_add(1, SeqCst) == 0;
    let mut asleep = Asleep { counted: true, ..Asleep::default() };
    with(|s| {
        if !s.leads(place, alone) {
            if s.present == 0 && s.holder != BACKGROUND {
                s.give_background();
            }
            return;
        }
        s.set_present(s.present + 1);
        asleep.leads = true;
        me(|t| t.guards.set(u64::from(s.generation) + 1));
        if s.holder == THREAD {
            for (to, fd) in asleep.fds.iter_mut().zip(s.fds()) {
                *to = fd;
            }
            (asleep.count, asleep.bell) = (s.count, s.bell.unwrap_or(0));
        }
        if let Place::Call(c) = place {
            CALLER_TID.store(tid(), Relaxed);
            CALLER_BELL.store(s.bell.unwrap_or(0), Relaxed);
            CALLER.store((c as *const Conn).cast_mut(), SeqCst);
            asleep.set = (s.call_set >= 0).then_some(s.call_set);
        }
    });
    if asleep.leads {
        TURNS.fetch_add(1, Relaxed);
    }
    watch_all();
    asleep
}

/// The connection has news. Returns how many of its sleepers need no other call: the guard, which is the
/// calling thread or has been woken.
#[inline]
pub fn rouse(c: &Conn) -> u32 {
    if !core::ptr::eq(CALLER.load(SeqCst), c) {
        return 0;
    }
    if CALLER_TID.load(Relaxed) != tid() {
        crate::bell::ring(CALLER_BELL.load(Relaxed));
    }
    1
}

/// Something in an epoll set may have been an event of a channel: see [`hear`].
pub fn hear_in(set: usize) {
    if super::poll::is_active() && with(|s| s.holder == set) {
        hear();
    }
}

/// A channel may have an event.
pub fn hear() {
    if take_events() && me(|t| t.guards.get()) == 0 {
        // A guard sees to the queues before it sleeps again, or goes; this may be somebody who does neither.
        watch_all();
    }
}

/// Takes an event from each channel that has one, and then what has come. False: there was none. The caller
/// must see to it that the queues are armed again, if somebody may sleep.
fn take_events() -> bool {
    // Under the lock, so that no channel goes meanwhile, no handler comes between an event and the note that its
    // queue is not armed any more, and whoever becomes the guard afterwards sees that.
    let any = with(|s| {
        let Some(api) = s.api else { return false };
        let _keep = crate::sys::Kept::new();
        let mut any = false;
        for (c, _) in &s.channels[..s.count] {
            let mut token = 0;
            // SAFETY: the channel of a link that is not closed yet.
            while unsafe { (api.heard)(c.handle, &mut token) } == 1 {
                any = true;
                link::each_remote(|r| {
                    if r.token == token {
                        r.armed.store(0, SeqCst);
                    }
                });
                // A queue that was armed for more has given two, now and then.
                s.heard = s.heard.wrapping_add(1);
                if !s.heard.is_multiple_of(64) {
                    break;
                }
            }
        }
        any
    });
    if any {
        link::each_remote(|r| r.poll(true));
    }
    any
}

/// Something waits for writes to be done: whether a sleeper will hear of that, so that the queue has to be
/// armed. Otherwise whoever looks at the queue next goes on; the background thread does so soon.
pub fn is_watched() -> bool {
    if IN_BACKGROUND.load(SeqCst) || PRESENT.load(SeqCst) > 0 {
        return true;
    }
    if SLOW.load(Relaxed) && SLOW.swap(false, SeqCst) {
        crate::bell::ring(0);
    }
    false
}

/// The set for blocking calls was left in the middle: see [`State::renew_call_set`].
pub fn renew_call_set() {
    with(|s| s.renew_call_set());
}

/// Whether anybody sleeps.
pub fn somebody_sleeps() -> bool {
    SLEEPERS.load(SeqCst) > 0
}

/// The set is closed, or no place for channels any more.
pub fn leave_set(set: usize) {
    if !super::poll::is_active() {
        return;
    }
    let left = with(|s| {
        let hit = s.holder == set;
        if hit {
            s.give_background();
        }
        hit
    });
    if left {
        watch_all();
    }
}

/// A link has come up by the channel, or (`up` false) has gone. Only for the background thread. False: there
/// is no room for one more device.
pub fn link_is(api: &'static Api, channel: Channel, up: bool) -> bool {
    let done = with(|s| {
        if s.holder != BACKGROUND {
            s.give_background();
        }
        let (epfd, token) = crate::bg::channels_place();
        (s.epfd, s.token, s.api) = (epfd, token, Some(api));
        let found = (0..s.count).find(|i| s.channels[*i].0.handle == channel.handle);
        match (found, up) {
            (Some(i), true) => s.channels[i].1 += 1,
            (Some(i), false) => {
                s.channels[i].1 -= 1;
                if s.channels[i].1 == 0 {
                    for set in [epfd, s.call_set] {
                        epoll(set, libc::EPOLL_CTL_DEL, channel.fd, 0);
                    }
                    s.count -= 1;
                    s.channels[i] = s.channels[s.count];
                }
            }
            (None, true) if s.count < CHANNELS => {
                s.channels[s.count] = (channel, 1);
                s.count += 1;
                epoll(epfd, libc::EPOLL_CTL_ADD, channel.fd, token);
                epoll(s.call_set, libc::EPOLL_CTL_ADD, channel.fd, CHANNEL);
            }
            (None, true) => return false,
            (None, false) => {}
        }
        s.renew_call_set();
        true
    });
    watch_all();
    done
}

/// The background thread's looks at queues that it does not wait for.
#[derive(Default)]
pub struct Looks {
    /// When the next one is due; 0: never.
    pub at: i64,
    pause: i64,
    /// Those in a row at which nobody slept, or had slept since the one before.
    idle: u32,
    turns: u32,
}

impl Looks {
    const PAUSE_NS: i64 = 1_000_000;
    /// Longer pauses than this are cut short by whoever needs a look.
    const SLOW_NS: i64 = 4_000_000;
    const LONGEST_NS: i64 = 64_000_000;
    const IDLE: u32 = 8;

    /// Something has woken the background thread. `rang`: perhaps a channel; `spinning`: threads look at the
    /// queues all the time.
    pub fn look(&mut self, rang: bool, spinning: bool) {
        if !super::poll::is_active() {
            self.at = 0;
            return;
        }
        if rang && take_events() && !IN_BACKGROUND.load(SeqCst) {
            // It was the guard's to hear: it would sleep on, with queues that nobody has armed.
            watch_all();
        }
        let now = now_ns();
        let due = self.at > 0 && self.at <= now;
        if IN_BACKGROUND.load(SeqCst) {
            self.idle = 0;
            if rang || due {
                link::each_remote(|r| r.poll(true));
                if spinning && !somebody_sleeps() {
                    self.at = now + Self::PAUSE_NS;
                } else {
                    self.at = 0;
                    watch_all();
                }
            }
            return;
        }
        if !SLOW.load(SeqCst) && (self.at == 0 || self.at > now + Self::SLOW_NS) {
            self.pause = Self::PAUSE_NS;
            self.at = now + self.pause;
            return;
        }
        if !due {
            return;
        }
        let turns = TURNS.load(Relaxed);
        let same = core::mem::replace(&mut self.turns, turns) == turns;
        if PRESENT.load(SeqCst) > 0 {
            self.idle = 0;
            let longer = (self.pause * 2).max(Self::PAUSE_NS);
            self.pause = if same { longer } else { longer.min(Self::SLOW_NS) };
        } else {
            link::each_remote(|r| r.poll(true));
            self.idle = if same { self.idle + 1 } else { 0 };
            // A guard that comes and goes sees to the queues by itself.
            self.pause = if same { Self::PAUSE_NS } else { (self.pause * 2).clamp(Self::PAUSE_NS, Self::SLOW_NS) };
        }
        self.at = now + self.pause;
        if self.idle >= Self::IDLE {
            self.at = 0;
            with(|s| {
                if s.present == 0 && s.holder != BACKGROUND {
                    s.give_background();
                }
            });
            watch_all();
        } else if self.pause > Self::SLOW_NS {
            // Under the lock, so that a guard that goes sees it, or is seen to be gone.
            let slow = with(|s| {
                SLOW.store(s.present > 0, SeqCst);
                s.present > 0
            });
            if !slow {
                self.pause = Self::PAUSE_NS;
                self.at = now + self.pause;
            } else if self.pause > Self::LONGEST_NS {
                self.at = 0;
            }
        }
    }
}

/// In a forked child: no link is its, and no channel.
pub fn reset_after_fork() {
    GUARD.lock.reset_after_fork();
    // SAFETY: this is the child's only thread.
    unsafe { *GUARD.state.get() = FRESH };
    for w in [&SLEEPERS, &PRESENT] {
        w.store(0, Relaxed);
    }
    IN_BACKGROUND.store(true, Relaxed);
    SLOW.store(false, Relaxed);
    CALLER.store(core::ptr::null_mut(), Relaxed);
    me(|t| t.guards.set(0));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::poll::count;

    /// A guard that a handler has interrupted is none any more when its call ends: another thread may have taken
    /// its place meanwhile, and is still there.
    #[test]
    fn a_guard_leaves_once() {
        count(true);
        with(|s| s.count = 1);
        // Threads of other tests may sleep as well, and take a place: then it is tried again.
        let tried = (0..1000).any(|_| {
            let (left, told) = (&std::sync::Barrier::new(2), &std::sync::Barrier::new(2));
            let mut first = before_sleep(Place::Poll);
            interrupted();
            let held = first.leads
                && std::thread::scope(|s| {
                    let second = s.spawn(move || {
                        let second = before_sleep(Place::Poll);
                        left.wait();
                        told.wait();
                        second.leads
                    });
                    left.wait();
                    first.end();
                    let present = PRESENT.load(SeqCst);
                    told.wait();
                    let leads = second.join().unwrap();
                    assert!(!leads || present == 1, "a guard sleeps, and {present} are known of");
                    leads
                });
            std::thread::yield_now();
            held
        });
        with(|s| s.count = 0);
        count(false);
        assert!(tried);
    }
}
