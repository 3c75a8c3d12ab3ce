//! Edges that the kernel's set tells of once more, because a connection has come back to it, are no news.
//!
//! The kernel makes one where an item is added that is ready. It is taken out at once where that can be done without taking
//! another's; where it cannot, or where more of what was told of is to follow, the item is *muted*: what the kernel says of
//! it is compared with what was told.

use super::ctl::Number;
use super::listing::{can_list, Listed};
use super::*;
use crate::conn::{END_RDSHUT, END_WRSHUT};

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

impl Set {
    /// Whether the kernel's set has no event: what is added to it then is the first to be told of. The bell may have to be
    /// silenced for that, which is to be rung again then. No also where an event that comes in between could not be made again.
    pub(super) fn is_idle_in_kernel(&self, inner: &Inner, silenced: &mut bool) -> bool {
        // Of more, some may be missing in the kernel's list.
        const MOST: usize = 256;
        let epfd = self.epfd.load(Relaxed);
        if inner.items.len() > MOST || inner.items.values().any(|i| i.aside >= 0) || !can_list(epfd) {
            return false;
        }
        let idle = || sys::poll_now(epfd, libc::POLLIN) == 0;
        let b = self.bell.load(Acquire);
        if b != 0 && !idle() {
            bell::clear(b);
            *silenced = true;
        }
        idle()
    }

    /// Takes the edge out of the kernel's set that adding the muted item has made, if it is the first there. Whether all that
    /// the kernel says of it from now on is news. Under the set's lock and both of the connection's.
    pub(super) fn take_edge(&self, inner: &mut Inner, key: Key, number: &Number, b: &mut Both) -> bool {
        let Some(e) = self.next_in_kernel() else { return false };
        if inner.only(e.u64) != Some(key) {
            self.put_again(inner, e);
            return false;
        }
        let Some(i) = inner.items.get_mut(&key) else { return false };
        let (fd, was) = (i.conn.local().fd.load(Relaxed), i.moved.received);
        // After that: what happens from now on makes an edge of its own.
        let (now, (news, bits)) = ctl::still(b, fd);
        if now.received != was || i.told.has_news(news, bits & (i.events | ALWAYS), i.events) {
            let _ = kernel_ctl(self.epfd.load(Relaxed), libc::EPOLL_CTL_MOD, number.fd, &i.for_kernel());
            i.told = Told::NOTHING;
            self.unmute(i);
        }
        // Room may be told of because of what this library sends, and an end because it shuts the kernel's socket.
        let kernels = !i.conn.has_ended(END_WRSHUT | END_RDSHUT) || sys::is_tcp_ended(fd);
        if i.events & libc::EPOLLOUT as u32 == 0 && kernels && rendezvous::received(fd) == Some(was) {
            self.unmute(i);
        }
        !i.muted
    }

    /// The next event of the kernel's set, which it has no more then.
    pub(super) fn next_in_kernel(&self) -> Option<epoll_event> {
        let mut e = epoll_event { events: 0, u64: 0 };
        let n = self.call_kernel((&mut e, 1), 0, core::ptr::null(), None);
        (n == Ok(1)).then_some(e)
    }

    /// An event was taken that came in a moment at which none was expected: it is made once more, if it was an edge or of a
    /// one-shot.
    #[cold]
    pub(super) fn put_again(&self, inner: &Inner, e: epoll_event) {
        let epfd = self.epfd.load(Relaxed);
        let known = inner.only(e.u64).and_then(|key| Some((key.fd, inner.items.get(&key)?)));
        if let Some((fd, i)) = known {
            let _ = kernel_ctl(epfd, libc::EPOLL_CTL_MOD, fd, &i.for_kernel());
            return;
        }
        let mut all: Vec<Listed> = Vec::new();
        let _ = any_listed(epfd, |l| {
            all.push(l);
            false
        });
        // The kernel knows an item by its number and its file, so where it has one of that number it is this or none.
        let alone = |fd| all.iter().filter(|l| l.fd == fd).count() == 1;
        for l in all.iter().filter(|l| l.data == e.u64 && alone(l.fd)) {
            let Listed { fd, events, .. } = *l;
            // What a one-shot waited for is not told once it has fired.
            let events = if l.has_fired() { events | e.events | ONESHOT } else { events };
            let ev = epoll_event { events, u64: e.u64 };
            let changed = || kernel_ctl(epfd, libc::EPOLL_CTL_MOD, fd, &ev);
            if events & (ET | ONESHOT) != 0 && changed() == Err(libc::EINVAL) {
                // One that is exclusive cannot be changed.
                let _ = kernel_ctl(epfd, libc::EPOLL_CTL_DEL, fd, &ev);
                let _ = kernel_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &ev);
            }
        }
    }
}
