//! What can be done without waiting.

use super::*;

impl Conn {
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
            && (crate::io::unread(&mut rx) >= lowat.max(1) as usize || self.fin_seen())
    }

    /// Whether the end that the peer has announced in the ring is still to come by TCP, and is bound to. (Behind many unread
    /// bytes it may have no room.)
    pub fn awaits_fin(&self) -> bool {
        let fd = self.local().fd.load(Relaxed);
        let has_room = || {
            let there = sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(i32::MAX);
            there == 0 || sys::sockopt_int(fd, libc::SOL_SOCKET, libc::SO_RCVBUF).is_ok_and(|all| there < all / 4)
        };
        // What we have shut ourselves looks to `poll` like that end.
        let is_to_come =
            || sys::poll_now(fd, libc::POLLRDHUP) == 0 || self.has_ended(END_RDSHUT) && sys::is_tcp_to_be_ended(fd);
        self.fin_seen() && has_room() && is_to_come()
    }

    /// Whether a receive would find `want` bytes now, or an end. Looks into the kernel where the bytes still come from TCP.
    pub fn takeable(&self, want: u32) -> bool {
        let want = want.max(1) as usize;
        if self.has_ended(END_RESET | END_RDSHUT) {
            return true;
        }
        let mut rx = self.lock_rx();
        match rx.path() {
            RxPath::Ring | RxPath::Returning | RxPath::RingFinal if !self.is_mapped() => self.has_ended(END_EOF),
            RxPath::Ring | RxPath::Returning | RxPath::RingFinal => {
                let returning = rx.path() == RxPath::Returning;
                let n = rx.ring().waiting();
                let enough = n >= want as u64 || self.fin_seen() || n > 0 && want > 1 && self.sender_is_stuck();
                (!returning && enough) || self.has_ended(END_EOF)
            }
            RxPath::Tcp | RxPath::Replay => {
                let fd = self.local().fd.load(Relaxed);
                // An error alone is nothing to read: so the kernel tells of what is in the error queue. One that ends the
                // connection comes with its end.
                let e = sys::poll_now(fd, libc::POLLIN | libc::POLLRDHUP) & !libc::POLLERR;
                let enough = || {
                    let there = sys::ioctl_int(fd, libc::FIONREAD).unwrap_or(0) as usize;
                    there >= want || there > 0 && sys::has_no_room(fd)
                };
                // The kernel's `SO_RCVLOWAT` is 1 now, or the program's (`visit::give_lowat`), which is for who polls.
                let readable = match e {
                    0 => self.rcvlowat.load(Relaxed) > 1 && enough(),
                    libc::POLLIN => want <= 1 || enough(),
                    _ => true,
                };
                readable || rx.path() == RxPath::Tcp && self.fin_seen()
            }
            RxPath::Draining if rx.ring().kept.len() >= want => true,
            RxPath::Armed | RxPath::Draining => match crate::io::front(&mut rx) {
                Front::App(_) if want > 1 => {
                    let fd = self.local().fd.load(Relaxed);
                    crate::io::unread(&mut rx) >= want || self.fin_seen() || sys::has_no_room(fd)
                }
                Front::App(_) | Front::End | Front::Failed(_) => true,
                Front::Wait => false,
                front @ (Front::Mark | Front::Part(_)) => {
                    // Nothing else will look at it: its arrival was announced together with the bytes before it.
                    self.ask(ask::PUMP);
                    front == Front::Mark && rx.ring().is_attached() && crate::io::unread(&mut rx) >= want
                }
            },
        }
    }

    /// Whether the peer waits for room. Who waits for more bytes than a ring holds (`SO_RCVLOWAT`)
    /// would wait for ever: the kernel, too, says that there is something to read when its window is shut.
    #[cold]
    pub fn sender_is_stuck(&self) -> bool {
        let (Some(own), Some(peer)) = (self.own(), self.peer()) else { return false };
        peer.want.load(SeqCst) & (WANT_TX | FUTEX_TX) != 0 && own.consumed.load(Relaxed) < peer.tx_goal.load(Relaxed)
    }

    /// Whether its bytes come from the ring, so that the peer tells of new ones.
    #[inline]
    pub fn reads_ring(&self) -> bool {
        self.stats().path_rx.load(Relaxed) == 1
    }

    /// Whether there are urgent data. They come by TCP only, and may do so while what came by the ring before them is unread.
    fn is_urgent(&self) -> bool {
        !self.reads_ring() && sys::poll_now(self.local().fd.load(Relaxed), libc::POLLPRI) & libc::POLLPRI != 0
    }

    /// `SO_RCVLOWAT`, of which the kernel may not know.
    pub fn lowat(&self) -> usize {
        self.rcvlowat.load(Relaxed).max(1) as usize
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

    /// What the kernel's socket says of ends, where what is read still comes from there: they may stand behind bytes that
    /// are unread.
    fn ends_in_tcp(&self) -> u32 {
        let on_tcp = {
            let rx = self.lock_rx();
            matches!(rx.path(), RxPath::Tcp | RxPath::Armed | RxPath::Draining | RxPath::Replay)
        };
        if on_tcp {
            self.kernel_events(libc::POLLRDHUP)
        } else {
            0
        }
    }

    /// Whether something can be written without waiting (or an error be had).
    pub fn writable(&self) -> bool {
        if self.has_ended(END_RESET | END_WRSHUT | END_TXDEAD) {
            return true;
        }
        let mut tx = self.lock_tx();
        match tx.path() {
            // The mark goes first.
            TxPath::Ring if tx.pending() => false,
            TxPath::Ring if self.is_refused() || self.peer_closed() => true,
            TxPath::Ring if tx.is_cramped(false) => false,
            TxPath::Ring => {
                if self.has_room(&mut tx) {
                    return true;
                }
                let first = !self.nospace.swap(true, Relaxed);
                // Nobody makes room who does not see what is there.
                crate::io::show(tx);
                if first {
                    // As the kernel's `tcp_poll`: whoever waits now is to be told, though no send has failed.
                    self.fulls.fetch_add(1, SeqCst);
                    self.ask_for_room();
                    return self.writable();
                }
                false
            }
            TxPath::Tcp if tx.pending() => false,
            TxPath::Tcp if self.is_refused() && (tx.has_resumed() || self.awaits_fin()) => false,
            TxPath::Tcp => {
                let room = sys::poll_now(self.local().fd.load(Relaxed), libc::POLLOUT) != 0;
                if !room {
                    // The kernel's edge may come when this is a ring again.
                    self.fulls.fetch_add(1, SeqCst);
                }
                room
            }
            _ => false,
        }
    }

    /// Whether there is room in the ring, or will be when it grows.
    fn has_room(&self, tx: &mut Tx) -> bool {
        let limit = self.ring_limit();
        let ring = tx.ring();
        // Who has found no room has found that it does not grow.
        let had_none = self.nospace.load(Relaxed);
        let room = !had_none && ring.can_grow(limit) || ring.has_room().unwrap_or(true);
        if room && had_none {
            self.nospace.store(false, Relaxed);
        }
        room
    }

    /// What `SIOCOUTQ` says of a ring (`None`: it is not on one): the bytes that a peer's kernel would not have acknowledged.
    ///
    /// That acknowledges what its program has not read, as much as its buffer takes, which is 64 KiB at first; programs wait
    /// for it to be all. Another host tells how far its program has read for each half of the ring, so less says nothing.
    pub fn unacknowledged(&self) -> Option<u64> {
        const WINDOW: u64 = 64 << 10;
        self.flush();
        let mut tx = self.lock_tx();
        if tx.path() != TxPath::Ring {
            return None;
        }
        let least = WINDOW.min(self.ring_limit() as u64 / 2);
        let ring = tx.ring();
        // A peer that breaks the protocol is for whoever sends to find out.
        let _ = ring.refresh();
        let unread = ring.shown() - ring.consumed;
        let held = ring.produced - ring.shown();
        Some(match self.remote() {
            Some(r) => held + r.unsent(self.slot.load(Relaxed)).max(unread.saturating_sub(least.max(ring.half()))),
            None => held + unread.saturating_sub(least),
        })
    }

    /// `EPOLLERR` and `EPOLLHUP` as the kernel's socket has them. After the end of the TCP stream it alone knows what
    /// has become of bytes that were sent to a peer that is gone.
    pub fn kernel_hangup(&self) -> u32 {
        self.kernel_events(0) & (libc::POLLERR | libc::POLLHUP) as u32
    }

    /// What the kernel's socket says of `events`, of errors and of ends. A reset is one event to whoever sleeps, but two to who
    /// looks just then: `tcp_reset` sets the error first, and the rest a moment later.
    fn kernel_events(&self, events: i16) -> u32 {
        let look = || sys::poll_now(self.local().fd.load(Relaxed), events);
        let e = look();
        let half = e & (libc::POLLERR | libc::POLLHUP) == libc::POLLERR;
        (if half { e | look() } else { e }) as u32
    }

    /// Whether both directions have ended, so that the kernel would have no connection any more.
    pub fn is_over(&self) -> bool {
        self.has_ended(END_FAILED | END_RESET)
            || self.is_aborted()
            || self.has_ended(END_WRSHUT) && (self.fin_seen() || self.peer_closed())
            || self.has_ended(END_EOF | END_ORPHAN) && self.kernel_hangup() & libc::EPOLLHUP as u32 != 0
    }

    /// Whether the kernel would have received a FIN: an end that is no reset, or came before one.
    pub fn has_fin(&self) -> bool {
        let flags = self.peer().map_or(0, |p| p.flags.load(Acquire));
        let failed = flags & ABORT != 0 || self.has_ended(END_RESET | END_FAILED);
        flags & FIN != 0 || self.has_ended(END_ORDERLY) || self.has_ended(END_EOF) && !failed
    }

    /// Whether the peer has closed the connection; the end of the TCP stream may still be behind unread bytes.
    pub fn peer_closed(&self) -> bool {
        self.has_ended(END_ORPHAN) || self.peer().is_some_and(|p| p.flags.load(Acquire) & CLOSED != 0)
    }

    /// Whether the peer has said that it has closed the connection, and that nothing was left unread.
    pub fn has_closed_properly(&self) -> bool {
        self.peer().is_some_and(|p| p.flags.load(Acquire) & (CLOSED | ABORT) == CLOSED)
    }

    /// Whether either end has said that frames of a return come, to a peer on this host.
    pub fn is_leaving(&self) -> bool {
        let says = |s: Option<&Slot>| s.is_some_and(|s| s.flags.load(Acquire) & LEAVING != 0);
        self.remote().is_none() && (says(self.own()) || says(self.peer()))
    }

    /// Whether the peer has reset it, though this end may not have come to that yet.
    pub fn is_aborted(&self) -> bool {
        self.peer().is_some_and(|p| p.flags.load(Acquire) & ABORT != 0)
    }

    /// Whether the peer has reset it, which stands behind bytes of TCP that are unread: the kernel tells of that at once.
    pub fn is_reset_ahead(&self) -> bool {
        let flags = self.peer().map_or(0, |p| p.flags.load(Acquire));
        // To an end that has ended, too, it means nothing.
        let nothing = flags & FIN != 0 && self.has_ended(END_WRSHUT);
        // A kernel that knows of it tells it by itself, and may have told it to another process.
        let elsewhere = || self.visited.load(Relaxed) && sys::is_tcp_closed(self.local().fd.load(Relaxed));
        flags & ABORT != 0 && !nothing && !self.has_ended(END_EOF | END_TOLD) && !elsewhere()
    }

    /// A reset behind the ends of both directions is none: the kernel would have no connection any more that could be reset.
    /// From now on it counts as told, if all that the peer has sent has come: a reset may have cost what stood before its mark.
    pub fn forgive_reset(&self, rx: &Rx) {
        const BOTH: u32 = FIN | ABORT;
        let over = || self.peer().is_some_and(|p| p.flags.load(Acquire) & BOTH == BOTH);
        let whole = || match rx.path() {
            RxPath::Ring | RxPath::RingFinal | RxPath::Returning => true,
            RxPath::Armed | RxPath::Draining => self.is_mapped() && crate::io::before_mark(self, rx).1,
            RxPath::Tcp | RxPath::Replay => false,
        };
        if self.has_ended(END_WRSHUT) && !self.has_ended(END_TOLD | END_RESET) && over() && whole() {
            self.end.fetch_or(END_TOLD, AcqRel);
        }
    }

    /// Whether the peer's program has shut both directions of a connection on the ring: the kernel answers what is
    /// sent then, and nobody can ever read, by a reset (RFC 1122, 4.2.2.13).
    pub fn is_refused(&self) -> bool {
        const BOTH: u32 = FIN | RDSHUT;
        self.peer().is_some_and(|p| p.flags.load(Acquire) & BOTH == BOTH)
    }

    /// Whether that was so before something came that had been sent when nobody here knew.
    pub fn is_refused_late(&self) -> bool {
        self.peer().is_some_and(|p| p.flags.load(Acquire) & REFUSED != 0)
    }

    /// `poll(2)`'s view of it, of the events in `mask` and those that cannot be masked.
    pub fn readiness(&self, mask: u32) -> u32 {
        let mut r = 0u32;
        const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
        const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
        const HANGUPS: u32 = libc::EPOLLRDHUP as u32;
        if mask & libc::EPOLLPRI as u32 != 0 && self.is_urgent() {
            r |= libc::EPOLLPRI as u32;
        }
        if mask & IN != 0 && self.readable() {
            r |= IN;
        }
        if mask & OUT != 0 && self.writable() {
            r |= OUT;
        }
        let end = self.end.load(Acquire);
        let ends = self.ends_in_tcp();
        let rxfin = self.fin_seen() || end & END_RDSHUT != 0 || ends & HANGUPS != 0;
        if rxfin {
            // What stands before the end may be late, and a receive would find neither.
            r |= HANGUPS | if self.late.load(Relaxed) { 0 } else { mask & IN };
        }
        if end & END_RESET != 0 {
            r |= (libc::EPOLLERR | libc::EPOLLHUP) as u32;
        } else if end & END_FAILED != 0 || end & (END_EOF | END_TOLD) == END_EOF | END_TOLD {
            // How the kernel's socket fared after that is no news.
            r |= libc::EPOLLHUP as u32;
        } else if end & END_EOF != 0 {
            r |= self.kernel_hangup();
        } else if self.peer_closed() {
            // Whoever is just fetching the kernel's error keeps it for us.
            let rx = self.lock_rx();
            self.forgive_reset(&rx);
            let hung = match self.has_ended(END_RESET) || self.is_reset_ahead() {
                true => (libc::EPOLLERR | libc::EPOLLHUP) as u32,
                // The kernel may be about to hear of what the program was told.
                false if self.has_ended(END_TOLD) => libc::EPOLLHUP as u32,
                false => self.kernel_hangup(),
            };
            if hung != 0 {
                // It came after the first looks above.
                r |= hung | HANGUPS | mask & (IN | OUT);
            }
        } else {
            const RESET: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
            let hung = ends & RESET;
            if hung == RESET && self.remote().is_some() {
                // TCP was faster than the link. From now on nobody is told anything else.
                self.end.fetch_or(END_ORPHAN, AcqRel);
            }
            r |= hung;
        }
        if rxfin && end & (END_WRSHUT | END_FAILED) != 0 {
            r |= libc::EPOLLHUP as u32;
        }
        r & (mask | (libc::EPOLLERR | libc::EPOLLHUP) as u32)
    }
}
