//! When an edge-triggered item of an epoll set has news.
//!
//! The kernel reports such an item when something has happened to the socket since the last report: bytes have come,
//! room has come after a send that found none, a direction has ended. That a connection moves to a ring or back is
//! nothing that happens to it as far as the program can know. So each item remembers what it was told last, and is told
//! again only if there is more. As in the kernel, what has happened counts, if the item asks for it, not whether it still
//! can be seen: of bytes that were read meanwhile an item that also asks for room is told that there is room.

use crate::conn::{Conn, Rx, END_EOF, END_FAILED, END_RDSHUT};
use crate::layout::ABORT;
use crate::switch::RxPath;
use crate::sys;
use core::sync::atomic::Ordering::*;

const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
/// By any of these an item asks to be told when bytes come.
const READS: u32 = IN | (libc::EPOLLPRI | libc::EPOLLRDBAND) as u32;

/// How far a connection has come.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct News {
    /// Bytes that have arrived since it began; their end counts as one more, as in TCP.
    arrived: u64,
    /// That end, and a reset behind it. They are told to all.
    ends: u64,
    /// The kernel has closed. By that a reset is told of, too, which nobody counts on TCP.
    closed: bool,
    /// How often a send found no room.
    fulls: u32,
    /// How often it woke everybody, whatever for.
    kicks: u32,
    /// How often it woke those who wait for something to read, though nothing more had come.
    nudges: u32,
}

impl News {
    /// To be asked before the readiness that is compared with it.
    pub fn of(conn: &Conn) -> News {
        News::under(&mut conn.lock_rx())
    }

    /// The same for who has the receive lock.
    pub fn under(rx: &mut Rx) -> News {
        let conn = rx.conn();
        let (fulls, kicks, nudges) = (conn.fulls.load(SeqCst), conn.kicks.load(SeqCst), conn.nudges.load(SeqCst));
        let s = conn.stats();
        let on_tcp = matches!(rx.path(), RxPath::Tcp | RxPath::Armed | RxPath::Draining | RxPath::Replay);
        // That the program has ended this direction itself is a kick. (What the peer does after that, the kernel counts.)
        let asks = on_tcp && !conn.has_ended(END_RDSHUT);
        let ended = || asks && sys::poll_now(conn.local().fd.load(Relaxed), libc::POLLRDHUP) != 0;
        // Where the mark has not come nobody can take the end that the ring has behind it: that is news when it has.
        let there = match rx.path() {
            RxPath::Armed | RxPath::Draining => crate::io::before_mark(conn, rx).1,
            _ => true,
        };
        // A reset is told of at once, also where it stands behind bytes, and found once more when they are taken.
        let reset = conn.has_ended(END_FAILED) || conn.peer().is_some_and(|p| p.flags.load(Acquire) & ABORT != 0);
        let end = (conn.fin_seen() && there || conn.has_ended(END_EOF) || reset || ended()) as u64;
        // A reset is one more, for where it stands behind an end.
        let ends = end + reset as u64;
        let closed = on_tcp && sys::is_tcp_closed(conn.local().fd.load(Relaxed));
        let taken = s.rx_bytes_tcp.load(Relaxed) + s.rx_bytes_ring.load(Relaxed);
        News { arrived: taken + crate::io::unread(rx) as u64 + ends, ends, closed, fulls, kicks, nudges }
    }

    /// With no fewer bytes arrived than `more` after `before`.
    pub fn at_least(self, before: &News, more: u64) -> News {
        News { arrived: self.arrived.max(before.arrived + more), ..self }
    }

    /// Whether the peer's stream has ended, and not by a reset.
    pub fn has_ended(&self) -> bool {
        self.ends == 1
    }

    /// Whether as much had arrived of what an item that asks for `events` is told of.
    pub fn is_as_far(&self, other: &News, events: u32) -> bool {
        self.ends == other.ends && (events & READS == 0 || self.arrived == other.arrived)
    }
}

/// What an item was told last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Told {
    news: News,
    bits: u32,
    /// It was added or changed since, or it is not known: whatever there is, is news.
    fresh: bool,
}

impl Told {
    /// Nothing yet.
    pub const NOTHING: Told =
        Told { news: News { arrived: 0, ends: 0, closed: false, fulls: 0, kicks: 0, nudges: 0 }, bits: 0, fresh: true };

    /// All that there is now.
    pub fn all(news: News, bits: u32) -> Told {
        Told { news, bits, fresh: false }
    }

    /// Whether it, which asks for `events`, is to be told of `got`, and is so.
    pub fn tell(&mut self, now: News, got: u32, events: u32) -> bool {
        if !self.has_news(now, got, events) {
            // What is there no more is news when it comes back.
            self.bits &= got;
            return false;
        }
        self.fresh = false;
        self.bits = got;
        // Room that has not come yet is still to be told of.
        let fulls = if got & OUT != 0 { now.fulls } else { self.news.fulls };
        self.news = News { fulls, ..now };
        true
    }

    /// How far the connection was then.
    pub fn at(&self) -> &News {
        &self.news
    }

    /// Whether of `events` those that are there, `got`, would be reported.
    pub fn has_news(&self, now: News, got: u32, events: u32) -> bool {
        let was = &self.news;
        got != 0
            && (self.fresh
                || got & !self.bits != 0
                || now.kicks != was.kicks
                || now.ends > was.ends
                // To who was told that both directions have ended this is none, but the program may have ended both.
                || now.closed && !was.closed && (self.bits & HUP == 0 || was.ends == 0)
                || events & READS != 0 && (now.arrived > was.arrived || now.nudges != was.nudges)
                || got & OUT != 0 && now.fulls != was.fulls)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(arrived: u64, fulls: u32, kicks: u32) -> News {
        News { arrived, ends: 0, closed: false, fulls, kicks, nudges: 0 }
    }

    /// An item that asks for both is told.
    fn tell(t: &mut Told, now: News, got: u32) -> bool {
        t.tell(now, got, IN | OUT)
    }

    #[test]
    fn what_was_told_is_told_once() {
        let mut t = Told::NOTHING;
        assert!(!tell(&mut t, at(0, 0, 0), 0), "nothing is no news");
        assert!(tell(&mut t, at(10, 0, 0), IN), "the first");
        assert!(!tell(&mut t, at(10, 0, 0), IN), "the same unread bytes");
        assert!(tell(&mut t, at(11, 0, 0), IN), "one byte more");
        assert!(!tell(&mut t, at(11, 0, 0), 0), "all is read");
        assert!(!tell(&mut t, at(11, 0, 0), 0));
        assert!(tell(&mut t, at(20, 0, 0), IN), "new bytes after that");
    }

    #[test]
    fn room_is_news_after_a_send_that_found_none() {
        let mut t = Told::all(at(5, 0, 0), OUT);
        assert!(!tell(&mut t, at(5, 0, 0), OUT));
        // Nobody looked while it was full.
        assert!(tell(&mut t, at(5, 1, 0), OUT));
        assert!(!tell(&mut t, at(5, 1, 0), OUT));
        // Bytes come while it is full: the room is still to be told of.
        assert!(tell(&mut t, at(6, 2, 0), IN));
        assert!(tell(&mut t, at(6, 2, 0), IN | OUT));
        assert!(!tell(&mut t, at(6, 2, 0), IN | OUT));
    }

    #[test]
    fn a_nudge_is_news_to_who_can_read() {
        let mut t = Told::all(at(5, 0, 0), IN | OUT);
        let nudged = |nudges| News { nudges, ..at(5, 0, 0) };
        assert!(tell(&mut t, nudged(1), IN | OUT));
        assert!(!tell(&mut t, nudged(1), IN | OUT));
        assert!(!Told::all(at(5, 0, 0), OUT).tell(nudged(1), OUT, OUT));
    }

    #[test]
    fn bytes_that_came_and_went_are_news_to_who_asks_for_them() {
        let mut t = Told::all(at(5, 0, 0), OUT);
        assert!(!t.tell(at(9, 0, 0), OUT, OUT), "it asks for room only");
        assert!(t.tell(at(9, 0, 0), OUT, IN | OUT));
        assert!(!t.tell(at(9, 0, 0), OUT, IN | OUT));
        assert!(tell(&mut t, at(9, 0, 0), IN | OUT), "what could not be read then");
        assert!(t.tell(News { ends: 1, ..at(10, 0, 0) }, OUT, OUT), "an end is told to all");
        assert!(!t.tell(News { ends: 1, ..at(10, 0, 0) }, OUT, OUT));
    }

    #[test]
    fn that_the_kernel_closes_is_news_to_who_does_not_know_of_the_peers_end() {
        let closed = News { closed: true, ..at(6, 0, 0) };
        let ended = News { ends: 1, ..at(6, 0, 0) };
        let mut t = Told::all(ended, IN | HUP);
        assert!(!tell(&mut t, News { closed: true, ..ended }, IN | HUP));
        let mut t = Told::all(at(6, 0, 0), IN | HUP);
        assert!(tell(&mut t, closed, IN | HUP), "the program had ended both");
        let mut t = Told::all(at(6, 0, 0), IN | OUT);
        assert!(tell(&mut t, closed, IN | OUT));
        assert!(!tell(&mut t, closed, IN | OUT));
    }

    #[test]
    fn ends_and_kicks_are_news() {
        let rdhup = libc::EPOLLRDHUP as u32;
        let mut t = Told::all(at(5, 0, 0), IN);
        assert!(tell(&mut t, at(5, 0, 0), IN | rdhup));
        assert!(!tell(&mut t, at(5, 0, 0), IN | rdhup));
        assert!(tell(&mut t, at(5, 0, 1), IN | rdhup));
        assert!(!tell(&mut t, at(5, 0, 1), IN | rdhup));
    }
}
