//! One TCP connection, as the library knows it.
//!
//! A [`Conn`] lies in memory that forked children share, and never moves: a
//! thread that still holds a pointer to a closed one reads memory that is
//! still a `Conn`. What belongs to one process alone (who waits for it) is in
//! its [`Local`].
//!
//! Locks: `tx` is held to send, `rx` to receive, both (`rx` first) for
//! everything that changes the path. Nobody sleeps while holding either.

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

/// The TCP stream has ended.
pub const END_EOF: u32 = 1;
/// The connection was reset; one error is still to be reported.
pub const END_RESET: u32 = 2;
/// The program has shut its receiving direction.
pub const END_RDSHUT: u32 = 4;
/// The program has shut its sending direction.
pub const END_WRSHUT: u32 = 8;
/// The peer's sending direction has ended (by its FIN in the ring or of TCP).
pub const END_RXFIN: u32 = 16;
/// Nobody reads what we send: it goes to the kernel, which knows the right error.
pub const END_TXDEAD: u32 = 32;

/// It has failed: whatever is sent is refused.
pub const END_FAILED: u32 = 64;
/// The kernel has said that nothing moves in either direction any more.
pub const END_HUP: u32 = 128;
/// The process at the other end is gone, and the end of its stream is behind bytes that are not read yet.
pub const END_ORPHAN: u32 = 256;

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
    /// Tell the peer of what is held back, in a while.
    pub const HELD: u32 = 64;
}

/// What this process alone knows: who waits here.
#[derive(Default)]
pub struct Local {
    /// Guards the rest.
    pub lock: Lock,
    /// An fd number of it in this process, or -1: then this process does not touch the socket any more.
    pub fd: AtomicI32,
    /// How many fd numbers of this process are it.
    pub fds: AtomicU32,
    /// Whether the epoll sets of this process know it as managed. Under `lock`.
    pub managed: AtomicBool,
    /// Epoll sets that have it, as `(set, fd)`.
    pub items: UnsafeCell<Vec<(*const crate::epoll::Set, i32)>>,
    /// In how many epoll sets it may be that were made before a fork, of which only the kernel knows in this process.
    pub blind: AtomicU32,
    /// How many sets and threads that is: where it is not one, no single bell will do.
    pub watchers: AtomicU32,
    /// Threads in `poll` that wait for it.
    pub waiters: UnsafeCell<Vec<*const Waiter>>,
    /// Threads that are inside a sending system call.
    pub tx_inflight: AtomicU32,
    /// Threads that are inside a receiving system call.
    pub rx_inflight: AtomicU32,
    /// Threads that wait in the kernel for the socket to become readable; see also [`Local::is_peeked`].
    pub peekers: AtomicU32,
    /// Of the record that this one took the connection over from, in whose name threads may still wait.
    pub former: AtomicPtr<Local>,
    /// Threads asleep until readable / writable.
    pub fut_rx: AtomicU32,
    /// See `fut_rx`.
    pub fut_tx: AtomicU32,
    /// `ask::*`.
    pub asked: AtomicU32,
    /// Next in the background thread's inbox.
    pub next: AtomicPtr<Conn>,
    /// Given to the background thread.
    pub submitted: AtomicBool,
    /// The upgrade whose memory is mapped in this process: by itself, or by a parent before the fork.
    pub mapped: AtomicU32,
    /// An inherited connection whose rings this process uses itself, because the process that upgraded it
    /// cannot bring it back any more.
    pub direct: AtomicBool,
    /// A visit took too long: later ones do not wait.
    pub hasty: AtomicBool,
}

impl Local {
    /// Whether a thread is still inside a call on the record's former life.
    pub fn is_haunted(&self) -> bool {
        [&self.tx_inflight, &self.rx_inflight, &self.peekers, &self.fut_rx, &self.fut_tx]
            .iter()
            .any(|w| w.load(SeqCst) != 0)
    }

    /// Whether threads wait in the kernel for the socket to become readable, which the mark is to wake.
    pub fn is_peeked(&self) -> bool {
        // SAFETY: null, or a record's part, which is never freed.
        let former = unsafe { self.former.load(SeqCst).as_ref() };
        self.peekers.load(SeqCst) > 0 || former.is_some_and(|f| f.peekers.load(SeqCst) > 0)
    }

    /// For a new connection, or in a forked child: nobody is inside a call, nothing was asked.
    pub fn clear_counts(&self) {
        self.former.store(core::ptr::null_mut(), Relaxed);
        for w in [&self.tx_inflight, &self.rx_inflight, &self.peekers, &self.fut_rx, &self.fut_tx, &self.asked] {
            w.store(0, Relaxed);
        }
        for b in [&self.submitted, &self.direct, &self.hasty] {
            b.store(false, Relaxed);
        }
    }
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
    /// `TCP_CORK`.
    pub corked: AtomicBool,
    /// Bytes in the ring of which the peer was not told; see `io/held.rs`.
    pub held: AtomicU32,
    /// The background thread looks after them.
    pub held_watched: AtomicBool,
    /// How often a send found no room, on a ring or on TCP.
    pub fulls: AtomicU32,
    /// How often something happened that is news to all who wait for edges.
    pub kicks: AtomicU32,
    /// What is on its way from the ring to TCP did not come while a receive waited for it; see [`Conn::readable`].
    pub late: AtomicBool,
    /// `SO_LINGER` with a time of 0: a close resets.
    pub linger0: AtomicBool,
    /// The peer has our nonce and waits for its mark.
    pub confirmed: AtomicBool,
    /// Calls that may wait are to stay out of the kernel for a moment.
    pub hold: AtomicBool,
    /// The program ended its direction before the peer's nonce was known: we never write a mark.
    pub unconfirmable: AtomicBool,
    /// Its peer is being looked for: sends that may wait do it in pieces, so that no thread is long in the way of
    /// an upgrade.
    pub gentle: AtomicBool,
    /// The program has closed it, but bytes of a return are still to be written.
    pub lingering: AtomicBool,
    /// The processes that hold it.
    pub holders: Holders,
    /// Another process than its owner has used it: no upgrade until only one holds it.
    pub visited: AtomicBool,
    /// Such a process asks its owner to bring it back to TCP.
    pub wanted: AtomicBool,
    /// Up to where, counted as `rx_tcp`, the TCP stream is known to be the program's: for such processes.
    pub rx_safe: AtomicU64,
    /// Counts its upgrades; see [`Local::mapped`].
    pub upgrade_no: AtomicU32,
    /// How often the program was told so on a ring.
    pub empties: AtomicU32,
    /// I/O calls.
    pub calls: AtomicU32,
    /// The count of calls at which to look for the peer (again).
    pub next_try: AtomicU32,
    /// How often its peer was looked for in vain.
    pub in_vain: AtomicU32,
    /// How many more receives are taken to have to wait, because one had to. (A lost count does no harm.)
    pub slow: AtomicU32,
    /// The program's bytes sent by TCP.
    pub tx_tcp: AtomicU64,
    /// The program's bytes received by TCP.
    pub rx_tcp: AtomicU64,
    /// `SO_RCVLOWAT`.
    pub rcvlowat: AtomicU32,
    /// How many bytes of the peer's mark were taken out of the TCP stream. Under the receive lock.
    pub mark_got: AtomicU32,
    /// What the sending ring may grow to, in bytes.
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
    /// Futex word: this side adds 1 to wake its own sleepers.
    pub epoch: AtomicU32,
    /// The peer's `want` for which a hint was given last.
    pub hinted: AtomicU32,
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
    tx: UnsafeCell<TxRing>,
    rx: UnsafeCell<RxRing>,
}

/// The right to send.
pub struct Tx<'a> {
    conn: &'a Conn,
    _g: Guard<'a>,
}

/// The right to receive.
pub struct Rx<'a> {
    conn: &'a Conn,
    _g: Guard<'a>,
}

/// Both rights: everything may be changed.
pub struct Both<'a> {
    /// To receive.
    pub rx: Rx<'a>,
    /// To send.
    pub tx: Tx<'a>,
}

impl<'a> Tx<'a> {
    /// The connection.
    pub fn conn(&self) -> &'a Conn {
        self.conn
    }
    /// Where the next byte goes.
    #[inline]
    pub fn path(&self) -> TxPath {
        // SAFETY: the switch changes only under both locks, and we hold one.
        unsafe { (*self.conn.sw.get()).tx() }
    }
    /// Whether control bytes have to go first.
    pub fn pending(&self) -> bool {
        // SAFETY: as above.
        !unsafe { (*self.conn.sw.get()).pending() }.is_empty()
    }
    /// What the peer looks for.
    pub fn peer_nonce(&self) -> Nonce {
        // SAFETY: changes only under both locks, and we hold one.
        unsafe { *self.conn.peer_nonce.get() }
    }
    /// The ring that we write.
    #[inline]
    pub fn ring(&mut self) -> &mut TxRing {
        // SAFETY: only the holder of the send lock uses it, and `&mut self` is unique.
        unsafe { &mut *self.conn.tx.get() }
    }
}

impl<'a> Rx<'a> {
    /// The connection.
    pub fn conn(&self) -> &'a Conn {
        self.conn
    }
    /// Where the next byte comes from.
    #[inline]
    pub fn path(&self) -> RxPath {
        // SAFETY: the switch changes only under both locks, and we hold one.
        unsafe { (*self.conn.sw.get()).rx() }
    }
    /// The nonce to look for.
    pub fn nonce(&self) -> crate::wire::Nonce {
        // SAFETY: as above.
        unsafe { *(*self.conn.sw.get()).nonce() }
    }
    /// How many bytes of a replay are still to be read from TCP.
    pub fn missing(&self) -> usize {
        // SAFETY: as above.
        unsafe { (*self.conn.sw.get()).replay_missing() as usize }
    }
    /// The ring that we read.
    #[inline]
    pub fn ring(&mut self) -> &mut RxRing {
        // SAFETY: only the holder of the receive lock uses it, and `&mut self` is unique.
        unsafe { &mut *self.conn.rx.get() }
    }
}

impl Both<'_> {
    /// The switch.
    pub fn sw(&mut self) -> &mut Switch {
        // SAFETY: both locks are held, and `&mut self` is unique.
        unsafe { &mut *self.rx.conn.sw.get() }
    }
    /// Whether the kernel's socket must stay open for a while after a close: bytes of ours are still to be
    /// written, or the peer may still write a mark, which would make a closed socket answer with a reset.
    pub fn is_owed(&mut self) -> bool {
        let conn = self.rx.conn();
        self.tx.pending()
            || self.tx.path() == TxPath::Replay
            || (self.rx.path() == RxPath::Armed && conn.peer().is_some() && !conn.has_ended(END_EOF))
            || (self.tx.path() == TxPath::Ring
                && !conn.has_ended(END_EOF)
                && conn.remote().is_some_and(|r| !r.has_delivered(conn.slot.load(Relaxed))))
    }

    /// Notes what the peer looks for.
    pub fn set_peer_nonce(&mut self, n: Nonce) {
        // SAFETY: both locks are held, and `&mut self` is unique.
        unsafe { *self.rx.conn.peer_nonce.get() = n };
    }
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
            &mut self.corked,
            &mut self.held_watched,
            &mut self.late,
            &mut self.linger0,
            &mut self.confirmed,
            &mut self.lingering,
            &mut self.gentle,
            &mut self.unconfirmable,
            &mut self.hold,
            &mut self.wanted,
        ] {
            *b.get_mut() = false;
        }
        for w in [
            &mut self.in_vain,
            &mut self.calls,
            &mut self.next_try,
            &mut self.end,
            &mut self.hinted,
            &mut self.held,
            &mut self.slot,
            &mut self.upgrade_no,
            &mut self.fulls,
            &mut self.kicks,
        ] {
            *w.get_mut() = 0;
        }
        *self.slow.get_mut() = crate::io::BEGIN_SLOW;
        for w in [&mut self.tx_tcp, &mut self.rx_tcp, &mut self.rx_safe] {
            *w.get_mut() = 0;
        }
        for w in [&mut self.rcvtimeo, &mut self.sndtimeo, &mut self.eof_at] {
            *w.get_mut() = 0;
        }
        *self.err.get_mut() = 0;
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
        *self.sw.get_mut() = Switch::new();
        *self.tx.get_mut() = TxRing::default();
        *self.rx.get_mut() = RxRing::default();
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

    /// Takes the send lock.
    #[inline]
    pub fn lock_tx(&self) -> Tx<'_> {
        Tx { conn: self, _g: self.tx_lock.lock() }
    }

    /// Takes the receive lock.
    #[inline]
    pub fn lock_rx(&self) -> Rx<'_> {
        Rx { conn: self, _g: self.rx_lock.lock() }
    }

    /// Takes both locks.
    pub fn lock_both(&self) -> Both<'_> {
        let rx = self.lock_rx();
        Both { rx, tx: self.lock_tx() }
    }

    /// Takes both locks if both are free.
    pub fn try_lock_both(&self) -> Option<Both<'_>> {
        let rx = Rx { conn: self, _g: self.rx_lock.try_lock()? };
        Some(Both { rx, tx: Tx { conn: self, _g: self.tx_lock.try_lock()? } })
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

    /// Tells a peer on another host what has changed in our slot.
    #[inline]
    pub fn flush(&self) {
        if let Some(r) = self.remote() {
            r.flush(self.slot.load(Relaxed));
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

    /// Sets what is known of the peer. Under both locks.
    pub fn attach_peer(&self, slot: u32, peer: *const Slot) {
        self.peer_slot.store(slot, Release);
        self.peer.store(peer.cast_mut(), Release);
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

    /// Whether `END_*` is set.
    #[inline]
    pub fn has_ended(&self, bits: u32) -> bool {
        self.end.load(Acquire) & bits != 0
    }

    /// Takes the error that is to be reported once.
    pub fn take_error(&self) -> i32 {
        if self.end.load(Relaxed) & END_RESET == 0 && self.err.load(Relaxed) == 0 {
            return 0;
        }
        let e = self.err.swap(0, AcqRel);
        self.end.fetch_and(!END_RESET, AcqRel);
        e
    }

    /// Whether no epoll set of this process has it.
    pub fn local_items_empty(&self) -> bool {
        let _g = self.local().lock.lock();
        // SAFETY: guarded by `local.lock`.
        unsafe { (*self.local().items.get()).is_empty() }
    }

    /// The connection has failed with `errno`. Whoever waits for it is told.
    pub fn fail(&self, errno: i32) {
        if !self.has_ended(END_EOF) {
            self.err.store(errno, Release);
            self.end.fetch_or(END_EOF | END_RESET | END_RXFIN | END_TXDEAD | END_FAILED, AcqRel);
            self.notify();
        }
    }

    /// The program is told that it would have to wait. It may go and do so where nobody sees it.
    pub fn sent_away(&self) {
        if self.local().watchers.load(SeqCst) > 0 || !self.is_ours() {
            return;
        }
        self.empties.fetch_add(1, Relaxed);
        self.out_of_sight.store(true, SeqCst);
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

    /// Whether something is there to be read (or an end or error to be reported). In the middle of a return that
    /// may be on its way from the ring to TCP, and a receive waits for it; but once only, for a peer may be stopped.
    pub fn readable(&self) -> bool {
        let lowat = self.rcvlowat.load(Relaxed);
        if self.takeable(lowat) {
            return true;
        }
        if self.late.load(Relaxed) {
            return false;
        }
        let mut rx = self.lock_rx();
        matches!(rx.path(), RxPath::Returning | RxPath::Replay)
            && self.is_mapped()
            && crate::io::unread(&mut rx) >= lowat.max(1) as usize
    }

    /// Whether a receive would find `want` bytes now, or an end. Looks into the kernel where the bytes still come from TCP.
    pub fn takeable(&self, want: u32) -> bool {
        let want = want.max(1) as usize;
        if self.has_ended(END_RESET | END_RDSHUT) {
            return true;
        }
        let mut rx = self.lock_rx();
        match rx.path() {
            RxPath::Ring | RxPath::Returning | RxPath::RingFinal => {
                let returning = rx.path() == RxPath::Returning;
                let n = rx.ring().waiting();
                (!returning && (n >= want as u64 || self.fin_seen())) || self.has_ended(END_EOF)
            }
            RxPath::Tcp | RxPath::Replay => {
                let fd = self.local().fd.load(Relaxed);
                let e = sys::poll_now(fd, libc::POLLIN | libc::POLLRDHUP);
                // The kernel's own `SO_RCVLOWAT` is 1 now.
                let few = || e == libc::POLLIN && sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|n| n < want as i32);
                e != 0 && (want <= 1 || !few())
            }
            RxPath::Armed => match crate::io::front(&mut rx) {
                Front::App(_) if want > 1 => {
                    let (n, whole) = crate::io::before_mark(self, &rx);
                    let rest = if whole && rx.ring().is_attached() { rx.ring().waiting() as usize } else { 0 };
                    n + rest >= want || self.fin_seen()
                }
                Front::App(_) | Front::End | Front::Failed(_) => true,
                Front::Wait => false,
                front @ (Front::Mark | Front::Part(_)) => {
                    // Nothing else will look at it: its arrival was announced together with the bytes before it.
                    self.ask(ask::PUMP);
                    front == Front::Mark && rx.ring().is_attached() && rx.ring().waiting() >= want as u64
                }
            },
        }
    }

    /// Whether its bytes come from the ring, so that the peer tells of new ones.
    #[inline]
    pub fn reads_ring(&self) -> bool {
        self.stats().path_rx.load(Relaxed) == 1
    }

    /// How many bytes a receive of `len` waits for. Like the kernel's, it takes what comes meanwhile.
    pub fn least(&self, flags: i32, may_wait: bool, len: usize) -> usize {
        if !may_wait || flags & libc::MSG_PEEK != 0 {
            1
        } else if flags & libc::MSG_WAITALL != 0 {
            len
        } else {
            len.min(self.rcvlowat.load(Relaxed) as usize)
        }
    }

    /// Whether the peer has ended its direction in the ring.
    #[inline]
    pub fn fin_seen(&self) -> bool {
        if self.has_ended(END_RXFIN) {
            return true;
        }
        match self.peer() {
            Some(p) if p.flags.load(Acquire) & FIN != 0 => {
                self.end.fetch_or(END_RXFIN, AcqRel);
                true
            }
            _ => false,
        }
    }

    /// Whether the end of the peer's direction stands in the TCP stream, behind bytes that are still unread.
    fn fin_in_tcp(&self) -> bool {
        let on_tcp = {
            let rx = self.lock_rx();
            matches!(rx.path(), RxPath::Tcp | RxPath::Armed | RxPath::Replay)
        };
        on_tcp && sys::poll_now(self.local().fd.load(Relaxed), libc::POLLRDHUP) & libc::POLLRDHUP != 0
    }

    /// Whether something can be written without waiting (or an error be had).
    pub fn writable(&self) -> bool {
        if self.has_ended(END_RESET | END_WRSHUT | END_TXDEAD) {
            return true;
        }
        let mut tx = self.lock_tx();
        match tx.path() {
            TxPath::Ring if self.is_refused() || self.peer_closed() => true,
            TxPath::Ring => {
                let cap_known = self.ring_cap.load(Relaxed);
                let ring = tx.ring();
                let nospace = self.nospace.load(Relaxed);
                if !nospace {
                    return ring.space(1).unwrap_or(1) > 0 || ring.can_grow(cap_known);
                }
                if ring.refresh().is_err() {
                    return true;
                }
                let ok = ring.consumed >= ring.goal();
                if ok {
                    self.nospace.store(false, Relaxed);
                }
                ok
            }
            TxPath::Tcp if !tx.pending() => sys::poll_now(self.local().fd.load(Relaxed), libc::POLLOUT) != 0,
            _ => false,
        }
    }

    /// `EPOLLERR` and `EPOLLHUP` as the kernel's socket has them. After the end of the TCP stream it alone knows what
    /// has become of bytes that were sent to a peer that is gone.
    pub fn kernel_hangup(&self) -> u32 {
        let e = sys::poll_now(self.local().fd.load(Relaxed), 0);
        (e & (libc::POLLERR | libc::POLLHUP)) as u32
    }

    /// Whether both directions have ended, so that the kernel would have no connection any more.
    pub fn is_over(&self) -> bool {
        self.has_ended(END_FAILED | END_RESET)
            || self.has_ended(END_WRSHUT) && self.fin_seen()
            || self.has_ended(END_EOF) && self.kernel_hangup() & libc::EPOLLHUP as u32 != 0
    }

    /// Whether the peer has closed the connection; the end of the TCP stream may still be behind unread bytes.
    pub fn peer_closed(&self) -> bool {
        self.has_ended(END_ORPHAN) || self.peer().is_some_and(|p| p.flags.load(Acquire) & CLOSED != 0)
    }

    /// Whether the peer's program has shut both directions of a connection on the ring: the kernel answers what is
    /// sent then, and nobody can ever read, by a reset (RFC 1122, 4.2.2.13).
    pub fn is_refused(&self) -> bool {
        const BOTH: u32 = FIN | RDSHUT;
        self.peer().is_some_and(|p| p.flags.load(Acquire) & BOTH == BOTH)
    }

    /// `poll(2)`'s view of it, of the events in `mask` and those that cannot be masked.
    pub fn readiness(&self, mask: u32) -> u32 {
        let mut r = 0u32;
        const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
        const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
        const HANGUPS: u32 = libc::EPOLLRDHUP as u32;
        if mask & IN != 0 && self.readable() {
            r |= IN;
        }
        if mask & OUT != 0 && self.writable() {
            r |= OUT;
        }
        let end = self.end.load(Acquire);
        let rxfin = self.fin_seen() || end & END_RDSHUT != 0 || mask & HANGUPS != 0 && self.fin_in_tcp();
        if rxfin {
            r |= (libc::EPOLLRDHUP as u32) | (mask & IN);
        }
        if end & END_RESET != 0 {
            r |= (libc::EPOLLERR | libc::EPOLLHUP) as u32;
        } else if end & END_FAILED != 0 {
            // How the kernel's socket fared after that is no news.
            r |= libc::EPOLLHUP as u32;
        } else if end & END_EOF != 0 {
            r |= self.kernel_hangup();
        } else if self.peer_closed() {
            // Whoever is just fetching the kernel's error keeps it for us.
            let _rx = self.lock_rx();
            let reset = self.has_ended(END_RESET);
            let hung = if reset { (libc::EPOLLERR | libc::EPOLLHUP) as u32 } else { self.kernel_hangup() };
            if hung != 0 {
                // It came after the first looks above.
                r |= hung | HANGUPS | mask & (IN | OUT);
            }
        }
        if rxfin && end & (END_WRSHUT | END_FAILED) != 0 {
            r |= libc::EPOLLHUP as u32;
        }
        r & (mask | (libc::EPOLLERR | libc::EPOLLHUP) as u32)
    }

    /// The bell that a waiter at bell `k` is to name to the peer.
    pub fn bell_for(&self, k: u32) -> u32 {
        // SAFETY: links are never freed.
        match unsafe { self.link.load(Acquire).as_ref() } {
            Some(l) if k != 0 && self.local().watchers.load(SeqCst) <= 1 => l.usable_bell(k),
            _ => 0,
        }
    }

    /// Another set or thread waits for it. Under `local.lock`.
    pub fn watcher_added(&self) {
        if self.local().watchers.fetch_add(1, SeqCst) == 1 {
            // What was asked of the peer names the first one's bell alone.
            self.arm(WANT_RX, 0);
            self.epoch.fetch_add(1, SeqCst);
        }
    }

    /// Asks the peer for a hint when `bits` (`WANT_*`) come true; to be followed by another look.
    pub fn arm(&self, bits: u32, bell: u32) {
        let Some(own) = self.own() else { return };
        if bits & WANT_TX != 0 {
            let tx = self.lock_tx();
            // SAFETY: we hold the send lock.
            own.tx_goal.store(unsafe { (*self.tx.get()).goal() }, Relaxed);
            drop(tx);
        }
        own.bell.store(bell, Relaxed);
        let mut w = own.want.load(Relaxed);
        loop {
            // A wish replaces the one before it, unless it may be somebody else's.
            let keep = if self.local().watchers.load(SeqCst) > 1 { 0xff } else { FUTEX_RX | FUTEX_TX };
            let new = (((w >> WANT_SHIFT).wrapping_add(1)) << WANT_SHIFT) | (w & keep) | bits;
            match own.want.compare_exchange_weak(w, new, SeqCst, Relaxed) {
                Ok(_) => break,
                Err(v) => w = v,
            }
        }
        full_fence();
        if bits & WANT_TX != 0 {
            self.flush();
        }
    }

    /// Bytes were published for the peer (`WANT_RX`, `FUTEX_RX`) or room was made for it: wakes whoever asked.
    #[inline]
    pub fn tell_peer(&self, hint_bit: u32, futex_bit: u32) {
        full_fence();
        let Some(peer) = self.peer() else { return };
        let want = peer.want.load(Acquire);
        if want & (hint_bit | futex_bit) != 0 {
            self.tell_peer_slow(peer, want, hint_bit, futex_bit);
        }
    }

    #[cold]
    fn tell_peer_slow(&self, peer: &Slot, want: u32, hint_bit: u32, futex_bit: u32) {
        if self.is_foreign() {
            return;
        }
        if let Some(r) = self.remote() {
            let slot = self.slot.load(Relaxed);
            let only_read = hint_bit == WANT_TX && futex_bit == FUTEX_TX;
            let consumed = || self.own().map_or(0, |o| o.consumed.load(SeqCst));
            if !only_read || r.is_due(slot, consumed()) {
                r.flush(slot);
            }
            return;
        }
        // SAFETY: links are never freed while a connection has one.
        let Some(link) = (unsafe { self.link.load(Acquire).as_ref() }) else { return };
        let due = hint_bit != WANT_TX && futex_bit != FUTEX_TX || self.reached_goal(peer);
        if !due {
            return;
        }
        if want & futex_bit != 0 {
            if let Some(own) = self.own() {
                own.wake.fetch_add(1, SeqCst);
                futex_wake(&own.wake, i32::MAX);
            }
        }
        if want & hint_bit != 0 {
            let seq = want >> WANT_SHIFT;
            // One hint for each wish; both directions share the counter.
            if self.hinted.swap(seq.wrapping_add(1), AcqRel) != seq.wrapping_add(1) {
                link.hint_peer(peer.bell.load(Relaxed), self.peer_slot.load(Relaxed));
            }
        }
    }

    fn reached_goal(&self, peer: &Slot) -> bool {
        self.own().is_some_and(|o| o.consumed.load(Relaxed) >= peer.tx_goal.load(Relaxed))
    }

    /// Something has changed here: everybody in this process who waits for this connection looks again.
    pub fn notify(&self) {
        self.epoch.fetch_add(1, SeqCst);
        let local = self.local();
        // A process that visits it sleeps on the same word.
        let sleepers = local.fut_rx.load(SeqCst) + local.fut_tx.load(SeqCst);
        if sleepers > 0 && sleepers > crate::remote::rouse(self) || self.visited.load(SeqCst) {
            futex_wake(&self.epoch, i32::MAX);
        }
        let _g = local.lock.lock();
        // SAFETY: guarded by `local.lock`; sets are never freed, waiters unregister under the lock.
        unsafe {
            for (set, fd) in (*local.items.get()).iter() {
                (**set).push_ready(*fd, self);
            }
            for w in (*local.waiters.get()).iter() {
                (**w).ring();
            }
        }
    }

    /// Gives the background thread something to do.
    pub fn ask(&self, what: u32) {
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
        for (to, from) in [(&self.tx_tcp, &old.tx_tcp), (&self.rx_tcp, &old.rx_tcp)] {
            to.store(from.load(Relaxed), Relaxed);
        }
        self.err.store(old.err.load(Relaxed), Relaxed);
        let (to, from) = (self.local(), old.local());
        to.fd.store(from.fd.load(Relaxed), Relaxed);
        to.fds.store(from.fds.load(Relaxed), Relaxed);
        to.former.store((&raw const *from).cast_mut(), SeqCst);
    }

    /// Copies the paths into what others see.
    pub fn publish_paths(&self, sw: &Switch) {
        let s = self.stats();
        s.path_tx.store((sw.tx() == TxPath::Ring) as u8, Relaxed);
        s.path_rx.store(matches!(sw.rx(), RxPath::Ring | RxPath::RingFinal) as u8, Relaxed);
    }
}

/// The totals that closed connections are added to.
pub fn add_totals(to: &stats::Totals, s: &ConnStats) {
    to.tx_bytes_tcp.fetch_add(s.tx_bytes_tcp.load(Relaxed), Relaxed);
    to.tx_bytes_ring.fetch_add(s.tx_bytes_ring.load(Relaxed), Relaxed);
    to.rx_bytes_tcp.fetch_add(s.rx_bytes_tcp.load(Relaxed), Relaxed);
    to.rx_bytes_ring.fetch_add(s.rx_bytes_ring.load(Relaxed), Relaxed);
    to.upgrades.fetch_add(s.upgrades.load(Relaxed).into(), Relaxed);
    to.returns.fetch_add(s.returns.load(Relaxed).into(), Relaxed);
    to.connections.fetch_add(1, Relaxed);
    to.upgraded.fetch_add((s.upgrades.load(Relaxed) > 0) as u64, Relaxed);
}
