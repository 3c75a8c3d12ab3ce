//! Receiving: what the peer has written is applied to the mirror, and whoever waits is told.

use super::*;
use crate::conn::ask;
use crate::layout::{ABORT, CLOSED, DOUBT, FIN, FUTEX_RX, FUTEX_TX, HURRY, REFUSED, WANT_RX, WANT_TX};
use crate::link;
use crate::provider::Completion;
use crate::sys::keeping;
use crate::thread::Within;
use core::hint::assert_unchecked;
use core::mem::MaybeUninit;

/// Completions that are taken at a time.
const BATCH: usize = 16;
/// So many receives are used up before they are posted again.
const POST_AFTER: u32 = 16;

/// Links of this kind that this process has.
static ACTIVE: AtomicU32 = AtomicU32::new(0);
/// Somebody has looked at completion queues without sleeping.
static SPUN: AtomicBool = AtomicBool::new(false);

/// Takes what has come, for a thread that will not sleep, or not yet.
#[inline]
pub fn progress() {
    if ACTIVE.load(Relaxed) != 0 {
        progress_now();
    }
}

#[cold]
fn progress_now() {
    if !SPUN.load(Relaxed) {
        SPUN.store(true, Relaxed);
    }
    link::each_remote(|r| r.poll(false));
}

/// Whether anybody has called [`progress`], or looked at a link, since this was asked last.
pub fn spun() -> bool {
    SPUN.swap(false, AcqRel)
}

/// In a forked child: no link is its.
pub(crate) fn reset_after_fork() {
    ACTIVE.store(0, Relaxed);
    super::guard::reset_after_fork();
}

/// Whether this process has any.
#[inline]
pub(super) fn is_active() -> bool {
    ACTIVE.load(SeqCst) != 0
}

/// There is one more link, or one less.
pub(crate) fn count(up: bool) {
    if up {
        ACTIVE.fetch_add(1, SeqCst);
    } else {
        ACTIVE.fetch_sub(1, SeqCst);
    }
}

/// Connections that have news, each once where that is easy to see.
struct News {
    list: [MaybeUninit<(&'static Conn, u8)>; BATCH],
    n: usize,
}

/// The peer's end has closed: the switch must look at the TCP stream again.
const ENDED: u8 = 1;
/// The peer waits for room.
const WISH: u8 = 2;
/// There is something to read, or room, or an end.
const LOOK: u8 = 4;
/// Bytes have come for a program that had shut both directions.
const LATE: u8 = 8;

impl News {
    #[inline]
    fn new() -> News {
        News { list: [const { MaybeUninit::uninit() }; BATCH], n: 0 }
    }

    #[inline(always)]
    fn add(&mut self, c: Option<&'static Conn>, what: u8) {
        let Some(c) = c else { return };
        if self.n > 0 {
            // SAFETY: the first `n` are written.
            let (last, bits) = unsafe { self.list[self.n - 1].assume_init_mut() };
            if core::ptr::eq(*last, c) {
                *bits |= what;
                return;
            }
        }
        self.list[self.n].write((c, what));
        self.n += 1;
    }

    #[inline(always)]
    fn tell(&self) {
        for one in &self.list[..self.n] {
            // SAFETY: the first `n` are written.
            let (c, what) = unsafe { one.assume_init_ref() };
            if what & LOOK != 0 {
                c.notify_watched();
            }
            if what & !LOOK != 0 {
                Self::tell_more(c, *what);
            }
        }
    }

    #[inline(never)]
    fn tell_more(c: &Conn, what: u8) {
        if what & WISH != 0 {
            c.tell_peer(WANT_TX, FUTEX_TX);
        }
        if what & ENDED != 0 {
            c.ask(crate::conn::ask::PUMP);
        }
        if what & LATE != 0 {
            c.answer_late();
        }
    }
}

impl Remote {
    /// Takes what has come by this link, for a thread that finds nothing of a connection that it has.
    #[inline(always)]
    pub(crate) fn look(&self, by: Within) {
        if !SPUN.load(Relaxed) {
            SPUN.store(true, Relaxed);
        }
        self.take_shortly(by);
    }

    #[inline(never)]
    fn take_shortly(&self, by: Within) {
        loop {
            let Some(g) = self.poll_lock.try_hold(by) else { return };
            if !self.take_and_tell(g) {
                return;
            }
        }
    }

    /// Takes completions by `poll_lock`, which `held` holds, and tells those whom they concern. Whether there may be more.
    #[inline(always)]
    fn take_and_tell<G>(&self, held: G) -> bool {
        let mut news = News::new();
        let n = self.take(&mut news);
        drop(held);
        news.tell();
        if n > 0 {
            self.work();
        }
        n >= BATCH
    }

    /// Takes completions and tells those whom they concern. `wait`: also if another thread is at it, for
    /// who is about to sleep.
    pub fn poll(&self, wait: bool) {
        if !self.is_ours() || self.poll_lock.held_by_me() {
            return;
        }
        let lock = || if wait { Some(self.poll_lock.lock()) } else { self.poll_lock.try_lock() };
        while lock().is_some_and(|g| self.take_and_tell(g)) {}
    }

    /// Under `poll_lock`.
    #[inline(always)]
    fn take(&self, news: &mut News) -> usize {
        let id = self.id.load(Acquire);
        let free = INBOX as u32 - self.inbox_in.load(Relaxed).wrapping_sub(self.inbox_out.load(Acquire));
        if id.is_null() || free == 0 {
            return 0;
        }
        // Mostly there is one or nothing, so nothing is cleared before it is known.
        let mut done = [const { MaybeUninit::<Completion>::uninit() }; BATCH];
        // SAFETY: guarded by `poll_lock`.
        let p = unsafe { &mut *self.poll.get() };
        p.looks += 1;
        let (most, to) = (free.min(BATCH as u32) as i32, done.as_mut_ptr().cast());
        // SAFETY: live under `poll_lock`; room for as many as are asked for.
        let ask = || unsafe { (*self.direct.poll)(self.direct.cq, most, to) };
        let n = if self.direct.quiet != 0 { ask() } else { keeping(ask) };
        if n <= 0 {
            if n < 0 {
                self.fail();
            }
            return 0;
        }
        // SAFETY: not more than were asked for.
        unsafe { assert_unchecked(n as usize <= BATCH) };
        let mut received = 0;
        for d in &done[..n as usize] {
            // SAFETY: written by the device's driver.
            let d = unsafe { d.assume_init_ref() };
            if d.status != 0 {
                self.fail();
            } else if !d.is_received() {
                self.done.fetch_max(d.wr_id, SeqCst);
                self.moved.store(true, SeqCst);
            } else {
                received += 1;
                if !self.apply(p, d, news) {
                    crate::log::log(
                        crate::log::Level::Warn,
                        format_args!("a peer broke the protocol of the verbs link"),
                    );
                    self.fail();
                }
            }
        }
        if received > 0 {
            p.taken += u64::from(received);
            p.used += received;
            if p.used >= POST_AFTER {
                let used = core::mem::take(&mut p.used);
                // SAFETY: as above.
                if !self.failed.load(Relaxed) && keeping(|| unsafe { (self.api().post_recv)(id, used) }) != 0 {
                    self.fail();
                }
                self.received.fetch_add(used.into(), SeqCst);
            }
        }
        n as usize
    }

    #[inline(always)]
    fn apply(&self, p: &mut Poll, d: &Completion, news: &mut News) -> bool {
        let said = u32::from_be(d.imm_data);
        match said >> 30 {
            imm::DATA => {
                let slot = said >> 18 & 0xfff;
                let s = self.peer(slot);
                let refused = !self.refusing.is_empty() && self.refusing.has(slot);
                if !refused {
                    s.produced.store(s.produced.load(Relaxed).wrapping_add(d.byte_len.into()), Release);
                }
                let had = s.consumed.load(Relaxed) / imm::UNIT;
                if (had as u32 ^ said) & (imm::UNITS - 1) as u32 != 0 {
                    let more = u64::from(said).wrapping_sub(had) % imm::UNITS;
                    // What is said may be older than what is known.
                    if more < imm::UNITS / 2 {
                        s.consumed.store((had + more) * imm::UNIT, Release);
                    }
                }
                news.add(self.conn(slot), if refused { LATE } else { LOOK });
                true
            }
            imm::NOTE => self.read_note(p, said & 0x3fff_ffff, news),
            _ => false,
        }
    }

    #[inline(never)]
    fn read_note(&self, p: &mut Poll, number: u32, news: &mut News) -> bool {
        let i = p.notes % u64::from(RECEIVES);
        p.notes += 1;
        if number != i as u32 {
            return false;
        }
        // SAFETY: the place lies in the mirror's head. The peer may change it meanwhile, which is
        // why it is copied once, and the copy is looked at.
        unsafe {
            let at = self.mirror.add(NOTES_OFFSET + i as usize * NOTE_BYTES);
            let n = (at as *const Note).read_volatile();
            self.granted(n.received);
            match n.kind {
                note::MESSAGE => self.on_message(&(at as *const Full).read_volatile().message),
                _ => self.on_note(&n, news),
            }
        }
    }

    fn granted(&self, received: u64) {
        if self.granted.fetch_max(received, SeqCst) < received {
            self.moved.store(true, SeqCst);
            if self.wants_to_say.load(SeqCst) {
                crate::bell::ring(0);
            }
        }
    }

    fn on_note(&self, n: &Note, news: &mut News) -> bool {
        if n.slot as usize >= SLOTS {
            return false;
        }
        let s = self.peer(n.slot);
        match n.kind {
            note::GEO => {
                let count = s.geo_count.load(Relaxed);
                let g = &s.geo[count as usize % GEOS];
                g.start.store(n.start, Relaxed);
                g.page.store(n.page, Relaxed);
                g.log2.store(n.log2, Relaxed);
                s.geo_count.store(count.wrapping_add(1), Release);
            }
            note::SLOT => {
                let conn = self.conn(n.slot);
                let (mut what, mut news_for) = (0, false);
                if n.consumed > s.consumed.load(Relaxed) {
                    s.consumed.store(n.consumed, Release);
                    // Only a writer that waits for so much is told: edges are counted.
                    let own = conn.and_then(Conn::own);
                    news_for = own.is_some_and(|o| {
                        o.want.load(SeqCst) & (WANT_TX | FUTEX_TX) != 0 && n.consumed >= o.tx_goal.load(SeqCst)
                    });
                }
                // What was held back may be the program's.
                news_for |= s.mark_at.swap(n.mark_at, SeqCst) != n.mark_at;
                let was = s.flags.swap(n.flags, SeqCst);
                news_for |= (was ^ n.flags) & (FIN | CLOSED | ABORT) != 0;
                if n.flags & !was & DOUBT != 0 {
                    if let Some(c) = conn {
                        c.ask(ask::PUMP);
                    }
                }
                if n.flags & !was & (CLOSED | REFUSED) != 0 {
                    what |= ENDED;
                }
                if n.flags & !was & HURRY != 0 {
                    crate::log::log(
                        crate::log::Level::Debug,
                        format_args!("another host's end of a connection hurries"),
                    );
                    if let Some(c) = conn {
                        c.ask(ask::PUMP);
                    }
                }
                if n.goal != u64::MAX {
                    s.tx_goal.store(n.goal, SeqCst);
                    s.want.fetch_or(FUTEX_TX, SeqCst);
                    what |= WISH;
                    // Who waits for more than there is room for takes what there is.
                    news_for |= conn.is_some_and(|c| c.rcvlowat.load(Relaxed) > 1);
                }
                if news_for {
                    what |= LOOK;
                }
                if what != 0 {
                    news.add(conn, what);
                }
            }
            note::RECEIVED => {}
            _ => return false,
        }
        true
    }

    fn on_message(&self, m: &Msg) -> bool {
        use crate::link::kind;
        // The peer's slot begins a new life: before anything that it writes there.
        let fresh = match m.kind {
            kind::PROPOSE => Some(m.a),
            kind::ACCEPT => Some(m.b),
            _ => None,
        };
        if let Some(slot) = fresh {
            if slot as usize >= SLOTS {
                return false;
            }
            let s = self.peer(slot);
            self.part(slot);
            self.refusing.remove(slot);
            for w in [&s.produced, &s.consumed, &s.tx_goal, &s.mark_at] {
                w.store(0, Relaxed);
            }
            s.flags.store(0, Relaxed);
            s.geo_count.store(0, Relaxed);
            // Whatever changes is to be told: see `Conn::tell_peer`.
            s.want.store(WANT_RX | WANT_TX | FUTEX_RX, SeqCst);
        }
        let at = self.inbox_in.load(Relaxed);
        // SAFETY: there is room, see `take`; the background thread reads it after the next store.
        unsafe { (*self.inbox.get())[at as usize % INBOX] = *m };
        self.inbox_in.store(at.wrapping_add(1), Release);
        crate::bell::ring(0);
        true
    }

    /// Asks for the channel's guard to be woken by what comes, if that is not so yet. True: it was not.
    pub fn arm(&self, any: bool) -> bool {
        let want = 1 + u32::from(any);
        if self.armed.load(SeqCst) >= want || self.armed.fetch_max(want, SeqCst) >= want {
            return false;
        }
        let Some(_g) = self.poll_lock_unless_mine() else { return false };
        let id = self.id.load(Acquire);
        if !id.is_null() {
            let _keep = crate::sys::Kept::new();
            // SAFETY: live under `poll_lock`.
            unsafe {
                (*self.poll.get()).armed += 1;
                (self.api().arm)(id, (!any).into());
            }
        }
        true
    }

    fn poll_lock_unless_mine(&self) -> Option<crate::sync::Guard<'_>> {
        (!self.poll_lock.held_by_me()).then(|| self.poll_lock.lock())
    }
}
