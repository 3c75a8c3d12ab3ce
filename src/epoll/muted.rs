//! Edges that the kernel's set tells of once more, because a connection has come back to it, are no news.

use super::*;

/// An item of which there was no news when its connection went back to the kernel's set.
pub(super) struct Muted {
    conn: &'static Conn,
    events: u32,
    told: Told,
    pub(super) moved: Moved,
}

/// What the kernel's socket had moved when an item went back to the kernel's set.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Moved {
    /// Bytes received; 0: not known.
    pub(super) received: u64,
    /// Bytes sent, if that is known.
    pub(super) sent: Option<u64>,
}

impl Muted {
    pub(super) fn of(i: &Item) -> Muted {
        Muted { conn: i.conn, events: i.events, told: i.told, moved: i.moved }
    }

    /// Whether the kernel's events `got` are news. `now`: they are there, not perhaps of a time before somebody took what had
    /// come.
    pub(super) fn is_new(&self, got: u32, now: bool) -> bool {
        // A send that is in the kernel right now may have found no room, and not have said so yet. Where the kernel alone sees
        // sends nobody will: only that something was sent.
        let sent = || rendezvous::sent(self.fd()).filter(|n| Some(*n) == self.moved.sent).is_none();
        let sending = self.conn.local().tx_inflight.load(SeqCst) > 0;
        let sending = sending || got & libc::EPOLLOUT as u32 != 0 && self.conn.phase() == Phase::Plain && sent();
        let mut news = News::of(self.conn);
        if self.moved.received > 0 {
            // What was taken since without being counted, by `splice` or another process, makes ours too low.
            let more = self.received_now().map_or(0, |n| n.saturating_sub(self.moved.received));
            news = news.at_least(self.told.at(), more);
        }
        sending || !now && !news.is_as_far(self.told.at(), self.events) || self.told.has_news(news, got, self.events)
    }

    /// How many bytes the kernel has received.
    pub(super) fn received_now(&self) -> Option<u64> {
        rendezvous::received(self.fd())
    }

    fn fd(&self) -> c_int {
        self.conn.local().fd.load(Relaxed)
    }
}
