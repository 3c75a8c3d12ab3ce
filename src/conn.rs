//! One TCP connection, as the library knows it.
//!
//! A [`Conn`] lies in memory that forked children share, and never moves: a
//! thread that still holds a pointer to a closed one reads memory that is
//! still a `Conn`. What belongs to one process alone (who waits for it) is in
//! its [`Local`].
//!
//! Locks: `tx` is held to send, `rx` to receive, both (`rx` first) for
//! everything that changes the path. Nobody sleeps while holding either.

use crate::epoll::Left;
use crate::holders::Holders;
use crate::io::Front;
use crate::layout::*;
use crate::link::Link;
use crate::remote::Remote;
use crate::ring::{RxRing, TxRing};
use crate::stats::{self, ConnStats, Why};
use crate::switch::{RxPath, Switch, TxPath};
use crate::sync::{full_fence, futex_wake, Guard, Lock};
use crate::wire::Nonce;
use crate::{poll::Waiter, sys};
use core::cell::UnsafeCell;
use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering::*,
};

mod ends;
mod linger;
mod local;
mod locks;
mod ready;
mod wake;
mod youth;
pub use ends::*;
pub use local::Local;
pub use locks::{Both, Rx, Tx};

/// What the library does with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
#[repr(u8)]
pub enum Phase {
    /// The record is free.
    Free = 0,
    /// On TCP; counted, because it may be upgraded.
    Raw = 1,
    /// Its readiness and its bytes are ours to give.
    Managed = 2,
    /// On TCP for good.
    Plain = 3,
    /// Closed by the program; its record waits for the background thread.
    Closed = 4,
    /// Managed by the process that it was inherited from, which is to bring it back before this one uses it.
    Away = 5,
}

/// The program has not bounded what may be under way (`SO_SNDBUF`): the ring grows as far as rings do by themselves.
pub const UNBOUND: usize = usize::MAX;

/// Requests to the background thread.
pub mod ask {
    /// Look for the peer.
    pub const LOOK: u32 = 1;
    /// The program has closed it.
    pub const CLOSED: u32 = 2;
    /// Move the switch on.
    pub const PUMP: u32 = 4;
    /// The program has closed it here, and other processes have not.
    pub const LET_GO: u32 = 8;
    /// Look again for the end of the ring in a while.
    pub const ENDING: u32 = 16;
    /// See whether the program waits for it out of sight.
    pub const SUSPECT: u32 = 32;
    /// Show the peer what is held back, in a while.
    pub const HELD: u32 = 64;
    /// Its ring has grown: look whether it is used, in a while.
    pub const GROWN: u32 = 128;
}

/// A connection. See the module's documentation.
#[repr(C, align(64))]
pub struct Conn {
    /// Its place in the arena.
    pub index: u32,
    /// The process whose arena it is in, and that alone may upgrade it: its id, ...
    pub owner_pid: u32,
    /// ... and what tells it from earlier and later processes with that id.
    pub owner: u32,
    /// Counts the uses of this record.
    pub gen: AtomicU32,
    phase: AtomicU8,
    /// See `youth.rs`.
    youth: AtomicU8,
    /// It has been managed, so that more of the record is to be put back before it is used again than calls on TCP change.
    stirred: AtomicBool,
    /// Whether our side connected (else: accepted).
    pub connector: AtomicBool,
    /// `O_NONBLOCK`.
    pub nonblock: AtomicBool,
    /// The program waits for it through us.
    pub evidence: AtomicBool,
    /// The program was told that it would have to wait, and has not waited in sight since.
    pub out_of_sight: AtomicBool,
    /// The background thread watches what becomes of that.
    pub suspected: AtomicBool,
    /// A send found the ring full.
    pub nospace: AtomicBool,
    /// Somebody else is to have its socket: what is left of it is to go there (`remains.rs`).
    pub bequeathed: AtomicBool,
    /// `TCP_CORK`.
    pub corked: AtomicBool,
    /// `TCP_INQ`, while it is managed.
    pub inq: AtomicBool,
    /// The last send by TCP had `MSG_MORE`.
    pub more: AtomicBool,
    /// When the first byte in the ring was written that the peer is not shown (`io/held.rs`), in ns of `CLOCK_MONOTONIC`; 0:
    /// there is none. What is sent the short way shows it, too, and leaves this as it is.
    pub held: AtomicI64,
    /// How many bytes the kernel sends of itself: `TCP_MAXSEG`.
    pub segment: AtomicU32,
    /// The background thread looks after them.
    pub held_watched: AtomicBool,
    /// Its ring has grown, and the background thread looks whether it is used (`bg/idle.rs`).
    pub grown: AtomicBool,
    /// How often a send found no room, on a ring or on TCP, or who waits for some was woken otherwise.
    pub fulls: AtomicU32,
    /// How often something happened that is news to all who wait for edges.
    pub kicks: AtomicU32,
    /// The same, to those who wait for something to read.
    pub nudges: AtomicU32,
    /// What is on its way from the ring to TCP did not come while a receive waited for it; see [`Conn::readable`].
    pub late: AtomicBool,
    /// `SO_LINGER` with a time of 0: a close resets.
    pub linger0: AtomicBool,
    /// The program's `SO_LINGER`, where the kernel has another one: see `options::owe`. 0: it has that.
    pub linger: AtomicU64,
    /// The peer has our nonce and waits for its mark.
    pub confirmed: AtomicBool,
    /// Calls that may wait are to stay out of the kernel for a moment.
    pub hold: AtomicBool,
    /// The program ended its direction before the peer's nonce was known: we never write a mark.
    pub unconfirmable: AtomicBool,
    /// Its peer is being looked for: sends that may wait do it in pieces, so that no thread is long in the way of
    /// an upgrade.
    pub gentle: AtomicBool,
    /// How many items epoll sets have of it that nobody here knows: they got the socket before it was dialled, and have not
    /// been told of it since.
    pub unknown_items: AtomicU32,
    /// The process whose program has closed it while bytes of a return are still to be written; 0: none. See [`Conn::lingers`].
    lingering: AtomicU32,
    /// ... while other processes held it: it ends with the last of them.
    pub outlived: AtomicBool,
    /// The processes that hold it.
    pub holders: Holders,
    /// Another process than its owner has used it: no upgrade until only one holds it.
    pub visited: AtomicBool,
    /// Such a process asks its owner to bring it back to TCP.
    pub wanted: AtomicBool,
    /// A child that is about to hand it on could not wait any longer: the owner is to reset it.
    pub doomed: AtomicBool,
    /// It is to return at once: what the program has not read is not waited for.
    pub hurry: AtomicBool,
    /// Its mark had no room in the kernel before the peer was in a hurry, and took what stood there: see [`Tx::is_cramped`].
    /// Under the send lock.
    pub crowded: AtomicBool,
    /// Why this end has it return: a [`stats::Why`]. None: it does not, or the peer does.
    pub leaves: AtomicU8,
    /// When it is back on TCP it stays there, whatever its peer asks for. Under both locks.
    pub for_good: AtomicBool,
    /// Up to where, counted as [`Conn::rx_tcp`], the TCP stream is known to be the program's: for such processes, and where
    /// what the peer says of its mark may be late.
    pub rx_safe: AtomicU64,
    /// The first place, counted alike, up to which it had not come when the program had shut both directions in the middle of
    /// an upgrade. 0: it has not done that.
    pub shut_at: AtomicU64,
    /// Counts its upgrades; see [`Local::mapped`].
    pub upgrade_no: AtomicU32,
    /// When the last of them began.
    pub began: AtomicI64,
    /// How often the program was told so on a ring.
    pub empties: AtomicU32,
    /// The thread that was told so last.
    pub sent_away: AtomicU32,
    /// I/O calls.
    pub calls: AtomicU32,
    /// The count of calls at which to look for the peer (again).
    pub next_try: AtomicU32,
    /// How often its peer was looked for in vain.
    pub in_vain: AtomicU32,
    /// How many more receives are taken to have to wait, because one had to. (A lost count does no harm.)
    pub slow: AtomicU32,
    /// How many more of the program's bytes were sent by TCP than the report has; see [`Conn::tx_tcp`].
    tx_more: AtomicU64,
    /// The same for bytes received.
    rx_more: AtomicU64,
    /// `SO_RCVLOWAT`.
    pub rcvlowat: AtomicU32,
    /// How many bytes of the peer's mark were taken out of the TCP stream. Under the receive lock.
    pub mark_got: AtomicU32,
    /// What the sending ring may grow to, in bytes, where the program has said so, or [`UNBOUND`].
    pub ring_cap: AtomicUsize,
    /// `SO_RCVTIMEO` in ns, 0: none.
    pub rcvtimeo: AtomicI64,
    /// `SO_SNDTIMEO` in ns, 0: none.
    pub sndtimeo: AtomicI64,
    /// When the TCP stream was seen to end before the ring did, in ns of `CLOCK_MONOTONIC`; 0: never.
    pub eof_at: AtomicI64,
    /// `END_*`.
    pub end: AtomicU32,
    /// The error that the kernel gave, to be reported once.
    pub err: AtomicI32,
    /// An error that the kernel has told a send or receive of the library's own, and will not tell again; 0: none. It is
    /// the program's, when it has read what came before.
    pub lost: AtomicI32,
    /// Futex word: this side adds 1 to wake its own sleepers.
    pub epoch: AtomicU32,
    /// The peer's `want` for which a hint was given last.
    pub hinted: AtomicU32,
    /// The peer's `want`, of this process, for which it was told last when it came to have something to read.
    pub ordered: AtomicU32,
    /// The link of the current upgrade.
    pub link: AtomicPtr<Link>,
    /// The process whose link to another host it is on, or 0.
    pub remote_pid: AtomicU32,
    /// Our slot in the link's segment.
    pub slot: AtomicU32,
    /// The peer's slot in its segment; `u32::MAX` while unknown.
    pub peer_slot: AtomicU32,
    own: AtomicPtr<Slot>,
    peer: AtomicPtr<Slot>,
    /// What others see of it.
    pub stats: AtomicPtr<ConnStats>,
    /// Where its owner keeps its totals.
    pub header: AtomicPtr<stats::Header>,
    /// This process's part; the pointer is right in forked children too.
    pub local: AtomicPtr<Local>,
    /// Send lock.
    pub tx_lock: Lock,
    /// Receive lock.
    pub rx_lock: Lock,
    sw: UnsafeCell<Switch>,
    /// What the peer looks for; under both locks.
    peer_nonce: UnsafeCell<Nonce>,
    /// See [`Rx::left`].
    left: UnsafeCell<Left>,
    tx: UnsafeCell<TxRing>,
    rx: UnsafeCell<RxRing>,
}

impl Conn {
    /// A new record at `index`. Only for the arena.
    pub fn reset(
        &mut self,
        index: u32,
        owner: u32,
        gen: u32,
        local: *mut Local,
        stats: *mut ConnStats,
        header: *mut stats::Header,
    ) {
        // Neither the phase nor the locks, nor the place in the inbox: late users of the record's former
        // life may still be at them.
        for b in [&mut self.connector, &mut self.nonblock, &mut self.evidence, &mut self.visited] {
            *b.get_mut() = false;
        }
        for b in [
            &mut self.nospace,
            &mut self.out_of_sight,
            &mut self.suspected,
            &mut self.bequeathed,
            &mut self.corked,
            &mut self.inq,
            &mut self.more,
            &mut self.held_watched,
            &mut self.grown,
            &mut self.late,
            &mut self.linger0,
            &mut self.confirmed,
            &mut self.outlived,
            &mut self.gentle,
            &mut self.unconfirmable,
            &mut self.hold,
            &mut self.wanted,
            &mut self.doomed,
            &mut self.hurry,
            &mut self.crowded,
            &mut self.for_good,
        ] {
            *b.get_mut() = false;
        }
        for w in [
            &mut self.lingering,
            &mut self.in_vain,
            &mut self.calls,
            &mut self.next_try,
            &mut self.end,
            &mut self.hinted,
            &mut self.ordered,
            &mut self.segment,
            &mut self.slot,
            &mut self.upgrade_no,
            &mut self.fulls,
            &mut self.kicks,
            &mut self.nudges,
            &mut self.unknown_items,
        ] {
            *w.get_mut() = 0;
        }
        *self.youth.get_mut() = youth::SETTLED;
        *self.slow.get_mut() = crate::io::BEGIN_SLOW;
        for w in [&mut self.tx_more, &mut self.rx_more, &mut self.rx_safe, &mut self.shut_at, &mut self.linger] {
            *w.get_mut() = 0;
        }
        for w in [&mut self.rcvtimeo, &mut self.sndtimeo, &mut self.eof_at, &mut self.held] {
            *w.get_mut() = 0;
        }
        *self.leaves.get_mut() = Why::None as u8;
        *self.err.get_mut() = 0;
        *self.lost.get_mut() = 0;
        *self.link.get_mut() = core::ptr::null_mut();
        *self.remote_pid.get_mut() = 0;
        *self.own.get_mut() = core::ptr::null_mut();
        *self.peer.get_mut() = core::ptr::null_mut();
        self.index = index;
        self.owner_pid = crate::process::pid();
        self.owner = owner;
        *self.gen.get_mut() = gen;
        *self.rcvlowat.get_mut() = 1;
        self.holders.reset(crate::process::holder_id());
        *self.peer_slot.get_mut() = u32::MAX;
        *self.local.get_mut() = local;
        *self.stats.get_mut() = stats;
        *self.header.get_mut() = header;
        if core::mem::take(self.stirred.get_mut()) || gen == 1 {
            *self.sw.get_mut() = Switch::new();
            *self.left.get_mut() = Left::NOTHING;
            *self.tx.get_mut() = TxRing::default();
            *self.rx.get_mut() = RxRing::default();
        }
    }

    /// The same for a record whose last connection was fresh to its end: puts back what the quick calls change. Only for the
    /// arena.
    pub fn reset_fresh(&self, gen: u32) {
        self.youth.store(youth::SETTLED, Release);
        self.gen.store(gen, Relaxed);
        for b in [&self.nonblock, &self.evidence, &self.out_of_sight] {
            b.store(false, Relaxed);
        }
        for w in [&self.calls, &self.next_try, &self.fulls, &self.end] {
            w.store(0, Relaxed);
        }
    }

    /// See [`Phase`].
    #[inline]
    pub fn phase(&self) -> Phase {
        match self.phase.load(Acquire) {
            1 => Phase::Raw,
            2 if self.is_mapped() => Phase::Managed,
            2 => Phase::Away,
            3 => Phase::Plain,
            4 => Phase::Closed,
            _ => Phase::Free,
        }
    }

    /// Changes the phase.
    pub fn set_phase(&self, p: Phase) {
        if p == Phase::Managed {
            self.stirred.store(true, Relaxed);
        }
        self.phase.store(p as u8, SeqCst);
    }

    /// Whether some process manages it, perhaps another one.
    #[inline]
    pub fn is_managed(&self) -> bool {
        self.phase.load(Acquire) == Phase::Managed as u8
    }

    /// Takes a free record. Only for the arena.
    pub fn claim(&self) -> bool {
        self.phase.compare_exchange(Phase::Free as u8, Phase::Closed as u8, AcqRel, Relaxed).is_ok()
    }

    /// Whether this process has only inherited it.
    #[inline]
    pub fn is_inherited(&self) -> bool {
        self.owner != crate::process::life()
    }

    /// Whether it was inherited over `exec`, so that other processes may have it on rings.
    #[inline]
    pub fn came_by_exec(&self) -> bool {
        self.owner == crate::foreign::FOREIGN
    }

    /// Whether this process may look into its rings while it is managed.
    #[inline]
    pub fn is_mapped(&self) -> bool {
        !self.is_inherited() || self.local().direct.load(Relaxed)
    }

    /// Whether its readiness is for this process to compute. Where one process has the rings of another
    /// that is dead, only the kernel can wake it.
    #[inline]
    pub fn is_ours(&self) -> bool {
        self.is_managed() && !self.is_inherited()
    }

    /// Our slot, while upgraded.
    #[inline]
    pub fn own(&self) -> Option<&Slot> {
        if !self.is_mapped() {
            return None;
        }
        // SAFETY: the link's segments stay mapped until the connection lets go of them under both locks.
        unsafe { self.own.load(Acquire).as_ref() }
    }

    /// The peer's slot, while upgraded.
    #[inline]
    pub fn peer(&self) -> Option<&Slot> {
        if !self.is_mapped() {
            return None;
        }
        // SAFETY: as for `own`.
        unsafe { self.peer.load(Acquire).as_ref() }
    }

    /// Our slot and the peer's, while upgraded, of a connection that [is ours](Conn::is_ours).
    #[inline(always)]
    pub fn slots_of_ours(&self) -> Option<(&Slot, &Slot)> {
        if !self.is_ours() {
            return None;
        }
        // SAFETY: as for `own`.
        unsafe { Some((self.own.load(Acquire).as_ref()?, self.peer_known()?)) }
    }

    /// The peer's slot, while upgraded, of one that [is ours](Conn::is_ours). It stays as it is while a lock is held.
    #[inline(always)]
    pub fn peer_known(&self) -> Option<&Slot> {
        // SAFETY: as for `own`.
        unsafe { self.peer.load(Acquire).as_ref() }
    }

    /// Whether that is (still) the peer's slot: then link and own slot are what they were, too.
    #[inline(always)]
    pub fn is_peer(&self, slot: &Slot) -> bool {
        core::ptr::eq(self.peer.load(Acquire), slot)
    }

    /// As [`Conn::remote`], for one that is upgraded and stays so as long as the caller holds a lock of it.
    #[inline(always)]
    pub fn remote_held(&self) -> Option<&Remote> {
        if self.remote_pid.load(Acquire) != crate::process::pid() {
            return None;
        }
        // SAFETY: as below; such a connection has a link, which changes under both locks.
        unsafe { (*self.link.load(Acquire)).remote() }
    }

    /// What copies its rings to another host, while upgraded over such a link of this process.
    #[inline]
    pub fn remote(&self) -> Option<&Remote> {
        let pid = self.remote_pid.load(Acquire);
        if pid == 0 || pid != crate::process::pid() {
            return None;
        }
        // SAFETY: a link of this process; links are never freed. See `Link::remote`.
        unsafe { self.link.load(Acquire).as_ref() }.and_then(Link::remote)
    }

    /// Whether it is on another process's link to another host, which this process cannot use.
    #[inline]
    pub fn is_foreign(&self) -> bool {
        let pid = self.remote_pid.load(Relaxed);
        pid != 0 && pid != crate::process::pid()
    }

    /// How large its ring may become. Over RDMA, where memory is registered and the way is short, less is enough.
    pub fn ring_limit(&self) -> usize {
        let c = crate::config::get();
        match self.ring_cap.load(Relaxed) {
            UNBOUND if self.remote_pid.load(Relaxed) == 0 => c.ring_max,
            UNBOUND => (c.ring_max / 4).max(c.ring_bytes),
            cap => cap,
        }
    }

    /// Tells a peer on another host what has changed in our slot.
    #[inline]
    pub fn flush(&self) {
        if let Some(r) = self.remote() {
            r.flush(self.slot.load(Relaxed));
        }
    }

    /// Takes what a peer on another host has said, which may say more than the kernel's socket.
    pub fn hear(&self) {
        if let Some(r) = self.remote() {
            r.poll(false);
        }
    }

    /// Such a thing has come: has the peer reset it.
    pub fn answer_late(&self) {
        if let Some(own) = self.own() {
            own.flags.fetch_or(REFUSED, SeqCst);
        }
        self.flush();
    }

    /// If our program has shut both directions, what another host sends from now on comes too late. Under a lock.
    pub fn refuse(&self) {
        const BOTH: u32 = FIN | RDSHUT;
        if let (Some(r), Some(own), Some(_)) = (self.remote(), self.own(), self.peer()) {
            if own.flags.load(SeqCst) & BOTH == BOTH {
                r.refuse(self.peer_slot.load(Relaxed));
            }
        }
    }

    /// Sets or clears what an upgrade needs. Under both locks.
    pub fn attach(&self, link: Option<&Link>, slot: u32, own: *const Slot) {
        self.link.store(link.map_or(core::ptr::null_mut(), |l| (l as *const Link).cast_mut()), Release);
        let remote = link.is_some_and(|l| l.remote().is_some());
        self.remote_pid.store(if remote { crate::process::pid() } else { 0 }, Release);
        self.slot.store(slot, Release);
        self.own.store(own.cast_mut(), Release);
        if own.is_null() {
            self.peer.store(core::ptr::null_mut(), Release);
            self.peer_slot.store(u32::MAX, Release);
        }
    }

    /// Whether the process that managed it has closed it, and left only what is to be read of a replay.
    pub fn is_let_go(&self) -> bool {
        self.link.load(Acquire).is_null()
    }

    /// Whether this process, whose record it is, has left it to others, and they are no more. Asks the kernel about them.
    pub fn is_left(&self) -> bool {
        let l = self.local();
        let ours = || match self.phase() {
            Phase::Raw | Phase::Plain => true,
            Phase::Managed => self.is_let_go(),
            _ => false,
        };
        l.fd.load(SeqCst) < 0
            && !self.is_inherited()
            && ours()
            && !self.lingers()
            && !l.is_haunted()
            && self.holders.is_nobody()
    }

    /// Sets what is known of the peer. Under both locks.
    pub fn attach_peer(&self, slot: u32, peer: *const Slot) {
        self.peer_slot.store(slot, Release);
        self.peer.store(peer.cast_mut(), Release);
    }

    /// Whether `fd` is a number of it.
    #[inline]
    pub fn is_at(&self, fd: i32) -> bool {
        crate::table::is(fd, self) || self.local().unnamed.load(SeqCst) && self.local().fd.load(SeqCst) == fd
    }

    /// Whether it is to return at once, for this end or the other.
    pub fn is_hurried(&self) -> bool {
        self.hurry.load(SeqCst) || self.does_peer_hurry()
    }

    /// The same, for the other end.
    pub fn does_peer_hurry(&self) -> bool {
        self.peer().is_some_and(|p| p.flags.load(SeqCst) & HURRY != 0)
    }

    /// Whether its current upgrade uses our slot `slot` of `l`.
    pub fn is_on(&self, l: &Link, slot: u32) -> bool {
        core::ptr::eq(self.link.load(Acquire), l) && self.slot.load(Relaxed) == slot && self.phase() == Phase::Managed
    }

    /// This process's part.
    #[inline]
    pub fn local(&self) -> &Local {
        // SAFETY: set by `reset` to memory that is never freed.
        unsafe { &*self.local.load(Relaxed) }
    }

    /// What others see of it.
    #[inline]
    pub fn stats(&self) -> &ConnStats {
        // SAFETY: set by `reset` to memory that is never unmapped.
        unsafe { &*self.stats.load(Relaxed) }
    }

    /// Says why it is on TCP.
    pub fn why(&self, w: Why) {
        self.stats().why.store(w as u8, Relaxed);
    }

    /// Whether no epoll set of this process has it.
    pub fn local_items_empty(&self) -> bool {
        let _g = self.local().lock.lock();
        // SAFETY: guarded by `local.lock`.
        unsafe { (*self.local().items.get()).is_empty() }
    }

    /// The program is told that it would have to wait. It may go and do so where nobody sees it.
    pub fn sent_away(&self) {
        if self.local().watchers.load(SeqCst) > 0 || !self.is_ours() {
            return;
        }
        self.empties.fetch_add(1, Relaxed);
        self.out_of_sight.store(true, SeqCst);
        self.suspect();
    }

    /// The background thread is to look whether the program waits for it in sight.
    pub fn suspect(&self) {
        self.sent_away.store(crate::thread::tid(), Relaxed);
        if !self.suspected.load(Relaxed) && !self.suspected.swap(true, SeqCst) {
            self.ask(ask::SUSPECT);
        }
    }

    /// The program waits for it in sight, or does not have to.
    #[inline]
    pub fn in_sight(&self) {
        if self.out_of_sight.load(Relaxed) {
            self.out_of_sight.store(false, SeqCst);
        }
    }

    /// Gives the background thread something to do.
    pub fn ask(&self, what: u32) {
        self.local().submitted.store(true, SeqCst);
        if self.local().asked.fetch_or(what, AcqRel) == 0 {
            crate::bg::submit(self);
        }
    }

    /// Goes on where another record of the same connection stands. Under both locks of that one.
    pub fn take_over(&self, old: &Conn) {
        for (to, from) in [
            (&self.connector, &old.connector),
            (&self.nonblock, &old.nonblock),
            (&self.evidence, &old.evidence),
            (&self.linger0, &old.linger0),
            (&self.for_good, &old.for_good),
        ] {
            to.store(from.load(Relaxed), Relaxed);
        }
        for (to, from) in [
            (&self.calls, &old.calls),
            (&self.next_try, &old.next_try),
            (&self.end, &old.end),
            (&self.upgrade_no, &old.upgrade_no),
        ] {
            to.store(from.load(Relaxed), Relaxed);
        }
        self.set_tcp_counts((old.tx_tcp(), old.rx_tcp()));
        self.shut_at.store(old.shut_at.load(Relaxed), Relaxed);
        self.err.store(old.err.load(Relaxed), Relaxed);
        self.lost.store(old.lost.load(Relaxed), Relaxed);
        let (to, from) = (self.local(), old.local());
        to.fd.store(from.fd.load(Relaxed), Relaxed);
        to.fds.store(from.fds.load(Relaxed), Relaxed);
        to.former.store((&raw const *from).cast_mut(), SeqCst);
    }

    /// The program's bytes sent by TCP since the connection began.
    pub fn tx_tcp(&self) -> u64 {
        self.stats().tx_bytes_tcp.load(Relaxed).wrapping_add(self.tx_more.load(Relaxed))
    }

    /// The program's bytes received by TCP since the connection began.
    pub fn rx_tcp(&self) -> u64 {
        self.stats().rx_bytes_tcp.load(Relaxed).wrapping_add(self.rx_more.load(Relaxed))
    }

    /// Bytes were sent by TCP. One addition for the report and for [`Conn::tx_tcp`], because each is a call's dearest part.
    #[inline]
    pub fn count_tx_tcp(&self, n: usize) {
        self.stats().tx_bytes_tcp.fetch_add(n as u64, Relaxed);
        crate::epoll::kernel_has_news();
    }

    /// Bytes were received by TCP.
    #[inline]
    pub fn count_rx_tcp(&self, n: usize) {
        self.stats().rx_bytes_tcp.fetch_add(n as u64, Relaxed);
    }

    /// Bytes were received by TCP that are to be in the report when the program takes them.
    pub fn count_rx_kept(&self, n: usize) {
        self.rx_more.fetch_add(n as u64, Relaxed);
    }

    /// Sets what was sent and received by TCP, but not in the report, without a call of the program under way.
    pub fn set_tcp_counts(&self, (tx, rx): (u64, u64)) {
        let s = self.stats();
        self.tx_more.store(tx.wrapping_sub(s.tx_bytes_tcp.load(Relaxed)), Relaxed);
        self.rx_more.store(rx.wrapping_sub(s.rx_bytes_tcp.load(Relaxed)), Relaxed);
    }

    /// In a forked child, before it has threads: what was kept for the program is mapped here, too.
    pub fn note_kept(&self) {
        // SAFETY: nobody else is in this process; a thread of the parent that changes it meanwhile makes another number of it.
        let id = unsafe { (*self.rx.get()).kept.id() };
        self.local().kept.store(id, Relaxed);
    }

    /// Copies the paths into what others see.
    pub fn publish_paths(&self, sw: &Switch) {
        let s = self.stats();
        let (tx, rx) = (sw.tx() == TxPath::Ring, matches!(sw.rx(), RxPath::Ring | RxPath::RingFinal));
        if !tx && !rx && s.why.load(Relaxed) == Why::None as u8 {
            // Nobody is to see it on TCP without a reason, until the background thread knows the rest.
            let ours = Why::from_u8(self.leaves.load(Relaxed));
            self.why(if ours == Why::None { Why::PeerLeft } else { ours });
        }
        s.path_tx.store(tx as u8, Release);
        s.path_rx.store(rx as u8, Release);
    }
}

/// The totals that closed connections are added to.
pub fn add_totals(to: &stats::Totals, s: &ConnStats) {
    // Most connections are short, and most of this is nothing.
    let add = |to: &AtomicU64, n: u64| {
        if n > 0 {
            to.fetch_add(n, Relaxed);
        }
    };
    add(&to.tx_bytes_tcp, s.tx_bytes_tcp.load(Relaxed));
    add(&to.tx_bytes_ring, s.tx_bytes_ring.load(Relaxed));
    add(&to.rx_bytes_tcp, s.rx_bytes_tcp.load(Relaxed));
    add(&to.rx_bytes_ring, s.rx_bytes_ring.load(Relaxed));
    add(&to.upgrades, s.upgrades.load(Relaxed).into());
    add(&to.returns, s.returns.load(Relaxed).into());
    add(&to.connections, 1);
    match s.upgrades.load(Relaxed) {
        0 => to.stayed.count(stats::Why::from_u8(s.why.load(Relaxed))),
        _ => add(&to.upgraded, 1),
    }
}
