//! The path switch: when a direction's bytes leave TCP for the ring, and when
//! they come back. A state machine without I/O, clock or memory of bytes.
//!
//! One [`Switch`] is one end of a connection. Its owner performs the I/O:
//!
//! * before it sends, it looks at [`Switch::tx`]; while [`Switch::pending`]
//!   is not empty those bytes go to TCP before anything else does;
//! * what it reads from TCP it first passes through [`wire::scan`] while
//!   armed, and through [`Switch::control`] while on the ring;
//! * after every event it calls [`Switch::step`] with the ring's cursors.
//!
//! What the promises also need from the owner:
//!
//! * It accepts nothing from the program, for the ring either, while
//!   [`Switch::pending`] or [`Switch::replay`] is not empty. A peer that dies
//!   in the middle of its mark has then lost nothing, and [`Switch::end`] may say so.
//! * The receiver's permission goes with the mark: who has seen the peer's mark
//!   calls [`Switch::allow_mark`] before the next [`Switch::step`].
//! * It starts the mark itself, also for a return, which goes on only behind it: [`Switch::step`] never does, because the
//!   receiver has to be told where the mark begins before its first byte can come.
//! * It refuses a [`Switch::replay`] from before what the peer has given back.
//! * It closes the TCP stream only with `TxPath::Tcp`, nothing pending, and not while
//!   armed with a nonce that the peer may yet use: an end that may mark marks first
//!   and closes on the ring. A closed stream cannot carry a `Return`.
//! * A return passes through what the program has not read yet. While
//!   [`Switch::leaving`] and armed, a program that only writes waits for
//!   itself, unless the owner reads ahead up to the mark: [`Switch::drain`].
//! * What it has read ahead, and the program has not got, it says at each
//!   [`Switch::step`]. Those bytes are the peer's to repeat before those of the ring; until
//!   then they are kept.
//!
//! Both directions return together: an end says `Return` for what it receives
//! and says `Resume` for what it sends only afterwards, so that the control
//! stream, which is the sending direction's TCP stream, stays open exactly as
//! long as it is needed.

use crate::wire::{self, Frame, Nonce, FRAME_LEN, MARK_LEN};

/// Where the next byte of the sending direction goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum TxPath {
    /// Into the TCP stream.
    Tcp,
    /// Into the ring; the TCP stream is a control stream.
    Ring,
    /// Nowhere yet: ring bytes are being repeated on TCP.
    Replay,
}

/// Where the next byte of the receiving direction comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RxPath {
    /// The TCP stream.
    Tcp,
    /// The TCP stream, until the mark.
    Armed,
    /// As `Armed`, but what stands before the mark is taken out of the stream at once, and kept for the program.
    Draining,
    /// The ring; the TCP stream is a control stream.
    Ring,
    /// Nowhere: `Return` was sent, `Resume` is awaited.
    Returning,
    /// The TCP stream, on which a known number of bytes is being repeated.
    Replay,
    /// The ring, and after its last byte the end: the TCP stream has ended.
    RingFinal,
}

/// The peer broke the protocol, or bytes are missing: the connection must fail with `ECONNRESET`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Violation;

/// What the end of the TCP stream means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The end of the application's stream.
    Eof,
    /// The ring holds the rest; then the end.
    AfterRing,
    /// Bytes are missing: `ECONNRESET`.
    Reset,
}

const PENDING: usize = MARK_LEN + 5 * FRAME_LEN;

/// One end's state of the path switch.
#[repr(C)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Switch {
    tx: TxPath,
    rx: RxPath,
    /// Whether the peer is known to look for our mark, and the nonce it waits for is in `mark_nonce`.
    may_mark: bool,
    wish: bool,
    leave_sent: bool,
    /// `Back` was sent, or there was nothing to give back.
    back_sent: bool,
    return_sent: bool,
    got_back: bool,
    got_return: bool,
    frame_len: u8,
    pending_len: u16,
    pending_done: u16,
    arm_nonce: Nonce,
    mark_nonce: Nonce,
    /// Valid when `got_return`.
    peer_consumed: u64,
    /// Next ring byte to repeat, and the end of them: valid in `TxPath::Replay`.
    replay_next: u64,
    replay_end: u64,
    /// Bytes that the receiver still expects of a replay: valid in `RxPath::Replay`.
    rx_missing: u64,
    /// Where what is repeated ends in the peer's ring.
    rx_until: u64,
    /// What we say in `Return`.
    returned_at: u64,
    /// Bytes that we give back, and how many of them were written.
    given: u64,
    given_done: u64,
    /// Bytes that the peer gives back, how many have come, and how many of them were repeated.
    back: u64,
    back_got: u64,
    back_done: u64,
    frame: [u8; FRAME_LEN],
    pending: [u8; PENDING],
}

impl Default for Switch {
    fn default() -> Self {
        Self::new()
    }
}

impl Switch {
    /// Both directions on TCP.
    pub const fn new() -> Self {
        Switch {
            tx: TxPath::Tcp,
            rx: RxPath::Tcp,
            may_mark: false,
            wish: false,
            leave_sent: false,
            back_sent: false,
            return_sent: false,
            got_back: false,
            got_return: false,
            frame_len: 0,
            pending_len: 0,
            pending_done: 0,
            arm_nonce: [0; 16],
            mark_nonce: [0; 16],
            peer_consumed: 0,
            replay_next: 0,
            replay_end: 0,
            rx_missing: 0,
            rx_until: 0,
            returned_at: 0,
            given: 0,
            given_done: 0,
            back: 0,
            back_got: 0,
            back_done: 0,
            frame: [0; FRAME_LEN],
            pending: [0; PENDING],
        }
    }

    /// The sending direction's path.
    #[inline]
    pub fn tx(&self) -> TxPath {
        self.tx
    }

    /// The receiving direction's path.
    #[inline]
    pub fn rx(&self) -> RxPath {
        self.rx
    }

    /// The nonce that this end looks for while armed.
    pub fn nonce(&self) -> &Nonce {
        &self.arm_nonce
    }

    /// Whether both directions are plain TCP and nothing is left to be done.
    pub fn is_plain(&self) -> bool {
        self.tx == TxPath::Tcp && self.rx == RxPath::Tcp && self.pending().is_empty()
    }

    /// Whether both directions use the ring and nothing is under way.
    pub fn is_ring(&self) -> bool {
        self.tx == TxPath::Ring && self.rx == RxPath::Ring && self.pending().is_empty() && !self.leaving()
    }

    /// Whether a return was asked for, by either end.
    pub fn leaving(&self) -> bool {
        self.wish || self.got_return
    }

    /// Whether what is sent goes to the ring, with nothing before it, and no return was asked for.
    #[inline(always)]
    pub fn is_steady(&self) -> bool {
        // Where nothing is pending the length is 0, see `written`.
        self.tx == TxPath::Ring && !self.leaving() && self.pending_len == 0
    }

    /// Whether frames were sent that the peer may not have read.
    pub fn has_sent_frames(&self) -> bool {
        self.leave_sent || self.back_sent
    }

    /// Starts to look for the mark of `nonce`, which the peer is told only afterwards.
    /// Does nothing unless both directions are plain.
    pub fn arm(&mut self, nonce: Nonce) -> bool {
        if !self.is_plain() {
            return false;
        }
        *self = Self::new();
        self.arm_nonce = nonce;
        self.rx = RxPath::Armed;
        true
    }

    /// Stops looking for the mark. Only for when the peer cannot have learnt the nonce, or has
    /// promised never to use it.
    pub fn disarm(&mut self) {
        if self.rx == RxPath::Armed && self.tx == TxPath::Tcp {
            *self = Self::new();
        }
    }

    /// What stands before the mark is taken out of the TCP stream from now on, so that nothing has to wait until the
    /// program reads it.
    pub fn drain(&mut self) {
        if self.rx == RxPath::Armed {
            self.rx = RxPath::Draining;
        }
    }

    /// The nonces have been exchanged for both directions: this end may write its mark.
    pub fn allow_mark(&mut self, peer_nonce: Nonce) {
        if self.tx == TxPath::Tcp && self.rx != RxPath::Tcp {
            self.mark_nonce = peer_nonce;
            self.may_mark = true;
        }
    }

    /// Whether [`Switch::start_mark`] would do something.
    pub fn can_mark(&self) -> bool {
        self.tx == TxPath::Tcp && self.may_mark && matches!(self.rx, RxPath::Armed | RxPath::Draining | RxPath::Ring)
    }

    /// Switches the sending direction to the ring: the mark becomes pending.
    pub fn start_mark(&mut self) -> bool {
        if !self.can_mark() {
            return false;
        }
        self.may_mark = false;
        self.tx = TxPath::Ring;
        let mark = wire::mark(&self.mark_nonce);
        self.push(&mark);
        true
    }

    /// The armed receiver has consumed the mark: the receiving direction is on the ring.
    pub fn mark_seen(&mut self) {
        if matches!(self.rx, RxPath::Armed | RxPath::Draining) {
            self.rx = RxPath::Ring;
        }
    }

    /// Asks for both directions to come back to TCP.
    pub fn leave(&mut self) {
        if self.rx != RxPath::Tcp || self.tx != TxPath::Tcp {
            self.wish = true;
        }
    }

    /// Bytes that must go to the TCP stream before anything else.
    pub fn pending(&self) -> &[u8] {
        &self.pending[usize::from(self.pending_done)..usize::from(self.pending_len)]
    }

    /// So many of the pending bytes were written.
    pub fn written(&mut self, n: usize) {
        self.pending_done += n.min(self.pending().len()) as u16;
        if self.pending_done == self.pending_len {
            self.pending_done = 0;
            self.pending_len = 0;
        }
    }

    /// How many bytes of the control stream may be read at most, so that none
    /// of the program's are among them. 0: the TCP stream is not a control stream.
    pub fn control_want(&self) -> usize {
        match self.rx {
            RxPath::Ring | RxPath::Returning if self.back_want() == 0 => FRAME_LEN - usize::from(self.frame_len),
            _ => 0,
        }
    }

    /// How many bytes of the control stream come next that the peer gives back.
    pub fn back_want(&self) -> u64 {
        self.back - self.back_got
    }

    /// So many of [`Switch::back_want`] were taken from the control stream, and put behind those before.
    pub fn took_back(&mut self, n: u64) {
        self.back_got += n.min(self.back_want());
    }

    /// Which of the kept bytes, counted from the first, are to be written to the control stream next, once nothing is
    /// pending.
    pub fn giving(&self) -> core::ops::Range<u64> {
        self.given_done..self.given
    }

    /// So many bytes of [`Switch::giving`] were written.
    pub fn gave(&mut self, n: u64) {
        self.given_done = (self.given_done + n).min(self.given);
    }

    /// Whether `bytes`, at most [`Switch::control_want`] of them, can come next in the control stream.
    pub fn may_be_control(&self, bytes: &[u8]) -> bool {
        let at = usize::from(self.frame_len);
        let mut frame = self.frame;
        let Some(to) = frame.get_mut(at..at + bytes.len()) else { return false };
        to.copy_from_slice(bytes);
        Frame::may_begin(&frame[..at + bytes.len()])
    }

    /// Takes bytes of the control stream, at most [`Switch::control_want`] of them.
    pub fn control(&mut self, bytes: &[u8]) -> Result<(), Violation> {
        if bytes.len() > self.control_want() {
            return Err(Violation);
        }
        let at = usize::from(self.frame_len);
        self.frame[at..at + bytes.len()].copy_from_slice(bytes);
        self.frame_len += bytes.len() as u8;
        if usize::from(self.frame_len) < FRAME_LEN {
            return Ok(());
        }
        self.frame_len = 0;
        match Frame::decode(&self.frame).ok_or(Violation)? {
            Frame::Leave => self.wish = true,
            Frame::Back { len } => {
                if self.got_back || self.got_return || self.tx != TxPath::Ring || len == 0 {
                    return Err(Violation);
                }
                self.got_back = true;
                self.back = len;
            }
            Frame::Return { consumed } => {
                if self.got_return || self.tx != TxPath::Ring {
                    return Err(Violation);
                }
                self.got_return = true;
                self.peer_consumed = consumed;
            }
            Frame::Resume { from, until } => {
                if self.rx != RxPath::Returning || !self.return_sent || from != self.returned_at || until < from {
                    return Err(Violation);
                }
                self.rx_until = until;
                self.rx_missing = (until - from).checked_add(self.given).ok_or(Violation)?;
                self.rx = if self.rx_missing == 0 { RxPath::Tcp } else { RxPath::Replay };
                self.settle();
            }
        }
        Ok(())
    }

    /// How many bytes the TCP stream still holds of a replay: no more may be taken at once.
    pub fn replay_missing(&self) -> u64 {
        self.rx_missing
    }

    /// Where it ends in the peer's ring.
    pub fn replay_until(&self) -> u64 {
        self.rx_until
    }

    /// So many application bytes were taken from the TCP stream.
    pub fn took_tcp(&mut self, n: usize) {
        if self.rx == RxPath::Replay {
            self.rx_missing = self.rx_missing.saturating_sub(n as u64);
            if self.rx_missing == 0 {
                self.rx = RxPath::Tcp;
                self.settle();
            }
        }
    }

    /// Does what the state asks for. `consumed`: bytes that this end took from the peer's ring;
    /// `produced`: bytes that it wrote into its own; `kept`: bytes that it took before the mark, and the program has not
    /// got. Returns whether anything changed.
    pub fn step(&mut self, consumed: u64, produced: u64, kept: u64) -> Result<bool, Violation> {
        let mut changed = false;
        if !self.leaving() {
            return Ok(false);
        }
        let armed = matches!(self.rx, RxPath::Armed | RxPath::Draining);
        if self.tx == TxPath::Ring && armed && !self.leave_sent {
            self.leave_sent = true;
            self.push(&Frame::Leave.encode());
            changed = true;
        }
        if self.tx == TxPath::Ring && self.rx == RxPath::Ring && !self.back_sent {
            self.back_sent = true;
            self.returned_at = consumed;
            self.rx = RxPath::Returning;
            if kept > 0 {
                self.given = kept;
                self.push(&Frame::Back { len: kept }.encode());
            }
            changed = true;
        }
        if self.rx == RxPath::Returning && !self.return_sent && self.giving().is_empty() {
            self.return_sent = true;
            self.push(&Frame::Return { consumed: self.returned_at }.encode());
            changed = true;
        }
        if self.tx == TxPath::Ring && self.got_return && self.return_sent {
            if self.peer_consumed > produced {
                return Err(Violation);
            }
            self.push(&Frame::Resume { from: self.peer_consumed, until: produced }.encode());
            self.replay_next = self.peer_consumed;
            self.replay_end = produced;
            self.tx = TxPath::Replay;
            self.replayed(0);
            changed = true;
        }
        Ok(changed)
    }

    /// Which of the bytes that the peer gave back, counted from the first, are to be repeated on TCP next, once
    /// nothing is pending.
    pub fn replay_back(&self) -> core::ops::Range<u64> {
        match self.tx {
            TxPath::Replay => self.back_done..self.back,
            _ => 0..0,
        }
    }

    /// So many bytes of [`Switch::replay_back`] were written to TCP.
    pub fn replayed_back(&mut self, n: u64) {
        if self.tx == TxPath::Replay {
            self.back_done = (self.back_done + n).min(self.back);
            self.replayed(0);
        }
    }

    /// The ring bytes that are to be repeated on TCP once nothing is pending, nor in [`Switch::replay_back`].
    pub fn replay(&self) -> core::ops::Range<u64> {
        match self.tx {
            TxPath::Replay => self.replay_next..self.replay_end,
            _ => 0..0,
        }
    }

    /// Whether this end has said `Resume` and had nothing to repeat.
    pub fn resumed_empty(&self) -> bool {
        matches!(self.tx, TxPath::Replay | TxPath::Tcp)
            && self.got_return
            && self.back == 0
            && self.replay_end == self.peer_consumed
    }

    /// So many bytes of [`Switch::replay`] were written to TCP.
    pub fn replayed(&mut self, n: u64) {
        if self.tx == TxPath::Replay {
            self.replay_next = (self.replay_next + n).min(self.replay_end);
            if self.replay_next == self.replay_end && self.back_done == self.back {
                self.tx = TxPath::Tcp;
                self.settle();
            }
        }
    }

    /// The TCP stream has ended (`FIN`) or failed. `partial_mark`: its last bytes are a mark's first part.
    pub fn end(&mut self, partial_mark: bool) -> End {
        match self.rx {
            RxPath::Tcp => End::Eof,
            RxPath::Armed | RxPath::Draining if partial_mark => End::Reset,
            RxPath::Armed => {
                // No mark can come any more, so ours could never be taken back: stay on TCP.
                self.disarm();
                End::Eof
            }
            RxPath::Draining => {
                // The same; and what is kept is still the program's to get.
                self.may_mark = false;
                self.rx = RxPath::RingFinal;
                End::Eof
            }
            RxPath::Replay => End::Reset,
            RxPath::RingFinal => End::AfterRing,
            RxPath::Ring | RxPath::Returning if self.frame_len > 0 || self.back_want() > 0 => End::Reset,
            RxPath::Ring | RxPath::Returning => {
                // What was to be given back stays the program's.
                self.given = self.given_done;
                self.rx = RxPath::RingFinal;
                End::AfterRing
            }
        }
    }

    /// The TCP stream has ended in the middle of a replay, and the peer's ring can still be read, because it lies in memory
    /// that both share: how many of the bytes that were given back are missing, the last ones, which are read first; and
    /// where in the ring is read on then.
    pub fn read_on(&mut self) -> Option<(u64, u64)> {
        if self.rx != RxPath::Replay {
            return None;
        }
        self.rx = RxPath::RingFinal;
        let missing = core::mem::take(&mut self.rx_missing);
        let of_ring = missing.min(self.rx_until - self.returned_at);
        Some((missing - of_ring, self.rx_until - of_ring))
    }

    /// Forgets a finished return, so that the connection may be upgraded again.
    fn settle(&mut self) {
        if self.tx == TxPath::Tcp && self.rx == RxPath::Tcp {
            self.wish = false;
            self.leave_sent = false;
            self.back_sent = false;
            self.return_sent = false;
            self.got_back = false;
            self.got_return = false;
            self.may_mark = false;
            (self.given, self.given_done) = (0, 0);
            (self.back, self.back_got, self.back_done) = (0, 0, 0);
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        let at = usize::from(self.pending_len);
        // A mark, Leave, Back, Return and Resume are each queued at most once per upgrade.
        if at + bytes.len() <= PENDING {
            self.pending[at..at + bytes.len()].copy_from_slice(bytes);
            self.pending_len += bytes.len() as u16;
        }
    }
}
