//! The locks of the two directions, and what may be done under them.

use super::*;
use crate::sync::{give_way, now_ns, Held};
use crate::thread::Within;
use crate::wire::FRAME_LEN;

/// The right to send.
pub struct Tx<'a, G = Guard<'a>> {
    conn: &'a Conn,
    guard: G,
}

/// The right to receive.
pub struct Rx<'a, G = Guard<'a>> {
    conn: &'a Conn,
    guard: G,
}

/// Both rights: everything may be changed.
pub struct Both<'a> {
    /// To receive.
    pub rx: Rx<'a>,
    /// To send.
    pub tx: Tx<'a>,
}

impl Tx<'_, Held<'_>> {
    /// Lets others send. What was stored before is seen by all before anything is loaded after it.
    #[inline(always)]
    pub(crate) fn unlock_and_fence(self) {
        self.guard.unlock_and_fence();
    }
}

impl Rx<'_, Held<'_>> {
    /// Lets others receive. What was stored before is seen by all before anything is loaded after it.
    #[inline(always)]
    pub(crate) fn unlock_and_fence(self) {
        self.guard.unlock_and_fence();
    }
}

impl<'a, G> Tx<'a, G> {
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
    /// Whether the peer's direction is on TCP, for good or again.
    pub fn peer_is_home(&self) -> bool {
        // SAFETY: as above.
        matches!(unsafe { (*self.conn.sw.get()).rx() }, RxPath::Tcp | RxPath::Replay)
    }
    /// Whether the mark is still to be written, and may be, or is wanted soon.
    pub fn is_due(&self) -> bool {
        // SAFETY: as above.
        let rx = unsafe { (*self.conn.sw.get()).rx() };
        self.path() == TxPath::Tcp
            && matches!(rx, RxPath::Armed | RxPath::Draining | RxPath::Ring)
            && (self.conn.confirmed.load(Acquire) || self.conn.is_hurried())
    }
    /// Whether the way back to TCP has begun where the kernel has no room: what the ring has is room that no peer has made.
    /// Nor has a peer made any that took what stood before our mark out of the kernel's socket in a hurry: it is repeated there.
    /// (As long as the return depends on both libraries alone: it must not wait for a program that reads only when it has
    /// sent.)
    ///
    /// `sends`: what `poll` has told of is there for who comes now, though it would not tell of it any more. (The mark and a frame
    /// may have taken the last of what it tells of.)
    pub fn is_cramped(&self, sends: bool) -> bool {
        let c = self.conn;
        let full = || match c.local().fd.load(Relaxed) {
            fd if sends => sys::is_full(fd),
            fd => sys::poll_now(fd, libc::POLLOUT) == 0,
        };
        // SAFETY: as above.
        let (leaving, rx) = unsafe { ((*c.sw.get()).leaving(), (*c.sw.get()).rx()) };
        let repeats = c.crowded.load(Relaxed) && matches!(rx, RxPath::Ring | RxPath::Returning);
        repeats || leaving && c.fulls.load(SeqCst) > 0 && full()
    }
    /// Whether what is sent goes to the ring, with nothing before it, and no way back has begun.
    #[inline(always)]
    pub fn is_steady(&self) -> bool {
        // SAFETY: as above.
        unsafe { (*self.conn.sw.get()).is_steady() }
    }
    /// Whether our direction has come back to TCP, and the peer's has not.
    pub fn has_resumed(&self) -> bool {
        // SAFETY: as above.
        self.path() == TxPath::Tcp && unsafe { (*self.conn.sw.get()).rx() } == RxPath::Returning
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

impl<'a, G> Rx<'a, G> {
    /// What the epoll sets that had it were told when it last became managed, or ceased to be: for a child that was forked
    /// before that, and can know it from nowhere else.
    pub fn left(&mut self) -> &mut Left {
        // SAFETY: guarded by the receive lock, which we hold.
        unsafe { &mut *self.conn.left.get() }
    }
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
    /// How many of these bytes had arrived before: what the peer has not shown is behind them, and the peer's kernel may hold
    /// it back.
    pub fn missing_shown(&self) -> usize {
        // SAFETY: as above.
        let until = unsafe { (*self.conn.sw.get()).replay_until() };
        let hidden = self.conn.peer().map_or(0, |p| until.saturating_sub(p.produced.load(Acquire)));
        self.missing().saturating_sub(hidden as usize)
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
    /// written, or the peer may still write a mark, or a frame: a closed socket would answer with a reset, which loses what
    /// the kernel has, and looks like a failure to a peer that has returned to TCP. (What is in a ring is not lost.)
    pub fn is_owed(&mut self) -> bool {
        let conn = self.rx.conn();
        self.tx.pending()
            || self.tx.path() == TxPath::Replay
            || self.has_unsent()
            || self.is_returning()
            || (matches!(self.rx.path(), RxPath::Armed | RxPath::Draining)
                && conn.peer().is_some()
                && !conn.has_ended(END_EOF))
            || (self.tx.path() == TxPath::Ring
                && !conn.has_ended(END_EOF)
                && conn.remote().is_some_and(|r| !r.has_delivered(conn.slot.load(Relaxed))))
    }

    /// Whether the peer has frames to send, or sends what we have returned for.
    pub fn is_returning(&mut self) -> bool {
        let conn = self.rx.conn();
        let asked = conn.peer().is_some_and(|p| p.flags.load(SeqCst) & LEAVING != 0);
        (self.tx.has_resumed() || asked && matches!(self.rx.path(), RxPath::Ring | RxPath::Returning))
            && !conn.has_ended(END_EOF)
    }

    /// Whether the peer's program has sent something by TCP to ours, which has closed a connection on the ring. It is no
    /// frame: a peer on this host says before its first one that it comes; from another host that may come later, so it is
    /// looked at.
    pub fn is_sent_late(&mut self) -> bool {
        let conn = self.rx.conn();
        let fd = conn.local().fd.load(Relaxed);
        self.rx.path() == RxPath::Ring
            && !conn.has_ended(END_EOF | END_RESET | END_FAILED)
            && conn.own().is_some_and(|own| own.flags.load(SeqCst) & CLOSED != 0)
            && sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|n| n > 0)
            && !self.is_returning()
            && (conn.remote().is_none() || !self.may_be_frame(fd))
    }

    fn may_be_frame(&mut self, fd: i32) -> bool {
        let mut buf = [0u8; FRAME_LEN];
        let want = self.sw().control_want();
        // SAFETY: `buf` has room.
        let n = unsafe { sys::recv(fd, buf.as_mut_ptr().cast(), want, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
        n.map_or(true, |n| self.sw().may_be_control(&buf[..n]))
    }

    /// Whether the peer's program has closed before it could know of what ours had sent by then, which the kernel would have
    /// answered by a reset, and the end of its stream is behind bytes that our program has not read.
    pub fn is_refused_by_closed(&mut self) -> bool {
        let conn = self.rx.conn();
        let closed = conn.peer().is_some_and(|p| p.flags.load(Acquire) & (CLOSED | ABORT | LEAVING) == CLOSED)
            && !conn.has_ended(END_EOF | END_WRSHUT)
            && self.rx.path() == RxPath::Armed
            && self.tx.path() == TxPath::Ring
            && !self.tx.pending();
        // With the end of the stream has come what stands before it.
        closed
            && self.tx.ring().refresh().is_ok()
            && self.tx.ring().shown() > self.tx.ring().consumed
            && sys::poll_now(conn.local().fd.load(Relaxed), libc::POLLRDHUP) != 0
    }

    /// Whether bytes have come by TCP since the program has shut both directions: a peer on another host may hear of that late.
    /// (From one on this host nothing comes then.)
    pub fn is_refusing_late(&mut self) -> bool {
        const BOTH: u32 = END_RDSHUT | END_WRSHUT;
        let conn = self.rx.conn();
        conn.end.load(Acquire) & (BOTH | END_EOF) == BOTH
            && conn.remote().is_some()
            && conn.own().is_some_and(|own| own.flags.load(Acquire) & REFUSED == 0)
            && matches!(self.rx.path(), RxPath::Armed | RxPath::Draining)
            && conn.shut_at.load(Relaxed) > 0
            && conn.rx_tcp() + crate::io::before_mark(conn, &self.rx).0 as u64 >= conn.shut_at.load(Relaxed)
    }

    /// Whether the kernel has bytes of the program's that it has not delivered, and the peer may still send a frame.
    pub fn has_unsent(&mut self) -> bool {
        let conn = self.rx.conn();
        let taken = conn.peer().is_none_or(|p| p.flags.load(SeqCst) & MARK_TAKEN != 0);
        let by_tcp = self.tx.path() == TxPath::Tcp || self.tx.path() == TxPath::Ring && !taken;
        by_tcp
            && matches!(self.rx.path(), RxPath::Ring | RxPath::Returning)
            && !conn.has_ended(END_EOF)
            && sys::ioctl_int(conn.local().fd.load(Relaxed), libc::TIOCOUTQ).is_ok_and(|n| n > 0)
    }

    /// Notes what the peer looks for.
    pub fn set_peer_nonce(&mut self, n: Nonce) {
        // SAFETY: both locks are held, and `&mut self` is unique.
        unsafe { *self.rx.conn.peer_nonce.get() = n };
    }
}

impl Conn {
    /// Takes the send lock.
    #[inline]
    pub fn lock_tx(&self) -> Tx<'_> {
        Tx { conn: self, guard: self.tx_lock.lock() }
    }

    /// Takes the receive lock.
    #[inline]
    pub fn lock_rx(&self) -> Rx<'_> {
        Rx { conn: self, guard: self.rx_lock.lock() }
    }

    /// Takes the send lock if it is free, within a critical section.
    #[inline(always)]
    pub(crate) fn try_hold_tx<'a>(&'a self, by: Within<'a>) -> Option<Tx<'a, Held<'a>>> {
        Some(Tx { conn: self, guard: self.tx_lock.try_hold(by)? })
    }

    /// Takes the receive lock if it is free, within a critical section.
    #[inline(always)]
    pub(crate) fn try_hold_rx<'a>(&'a self, by: Within<'a>) -> Option<Rx<'a, Held<'a>>> {
        Some(Rx { conn: self, guard: self.rx_lock.try_hold(by)? })
    }

    /// Takes the send lock if it is free.
    #[inline]
    pub fn try_lock_tx(&self) -> Option<Tx<'_>> {
        Some(Tx { conn: self, guard: self.tx_lock.try_lock()? })
    }

    /// Takes the receive lock if it is free.
    #[inline]
    pub fn try_lock_rx(&self) -> Option<Rx<'_>> {
        Some(Rx { conn: self, guard: self.rx_lock.try_lock()? })
    }

    /// Takes both locks.
    pub fn lock_both(&self) -> Both<'_> {
        let rx = self.lock_rx();
        Both { rx, tx: self.lock_tx() }
    }

    /// Takes both locks if both are free.
    pub fn try_lock_both(&self) -> Option<Both<'_>> {
        let rx = self.try_lock_rx()?;
        Some(Both { rx, tx: self.try_lock_tx()? })
    }

    /// Takes both locks if they become free within `ns`: another process that shares them may have been stopped while it
    /// held one. (What one that is dead holds is free.)
    pub fn lock_both_within(&self, ns: i64) -> Option<Both<'_>> {
        let until = now_ns() + ns;
        let mut tries = 0;
        loop {
            match self.try_lock_both() {
                None if now_ns() >= until => {
                    let orphaned = self.rx_lock.is_orphaned() || self.tx_lock.is_orphaned();
                    return orphaned.then(|| self.lock_both());
                }
                None => give_way(&mut tries),
                both => return both,
            }
        }
    }
}
