//! Programs that processes of this family have started, and that use connections which they inherited over
//! `exec`: see [`crate::foreign`]. And operators, who ask for all connections: see [`crate::order`].

use super::search::later;
use super::*;
use crate::foreign;
use crate::order::{self, Order};
use core::sync::atomic::AtomicUsize;

/// One who asks.
#[derive(Clone, Copy, Default)]
pub(super) struct Guest {
    /// For this; nothing yet.
    conn: Option<Known>,
    /// When it was told last that this takes a while.
    told: i64,
    /// It is home, but for what is repeated.
    rest: visit::Progress,
}

/// How many have not got their answer.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Before the process ends, or its image: whose connection is home is to know. An end without an answer says that it is lost.
pub fn await_answers(until: i64) {
    let mut tries = 0;
    while WAITING.load(SeqCst) > 0 && now_ns() < until {
        bell::ring(0);
        crate::sync::give_way(&mut tries);
    }
}

/// In a forked child: they are the parent's.
pub fn reset_after_fork() {
    WAITING.store(0, Relaxed);
}

impl Bg {
    pub(super) fn guest_comes(&mut self, listener: c_int) {
        let accept = || rv::accept(listener);
        let Ok(fd) = watched(self.desk_epfd, token::GUEST, libc::EPOLLIN | libc::EPOLLRDHUP, accept) else { return };
        self.guests.insert(fd, Guest::default());
    }

    /// It says which connection it means.
    pub(super) fn guest_asks(&mut self, fd: c_int) {
        let mut words = [0u64; 2];
        // SAFETY: writable for its size.
        let n = desk::run(|| unsafe { sys::recv(fd, words.as_mut_ptr().cast(), 16, libc::MSG_DONTWAIT) });
        if n == Err(libc::EAGAIN) || n == Err(libc::EINTR) {
            return;
        }
        if let Some(o) = order::decode(&words).filter(|_| n == Ok(16)) {
            return self.ordered(fd, o);
        }
        let (cookie, for_good) = (words[0] & !foreign::FOR_GOOD, words[0] & foreign::FOR_GOOD != 0);
        let mut found = None;
        if n == Ok(8) && self.guests.get(&fd).is_some_and(|g| g.conn.is_none()) {
            arena::each(|c| {
                let has = matches!(c.phase(), Phase::Raw | Phase::Managed | Phase::Plain) && !c.came_by_exec();
                let own = c.local().fd.load(Relaxed);
                if has && own >= 0 && found.is_none() && foreign::cookie(own) == Some(cookie) {
                    found = Some(c);
                }
            });
        }
        let Some(conn) = found else {
            return self.guest_leaves(fd);
        };
        let who = desk::run(|| rv::credentials(fd));
        {
            let mut b = conn.lock_both();
            // From now on two processes use it.
            conn.visited.store(true, SeqCst);
            if let Some((pid, ..)) = who.filter(|(pid, ..)| *pid != 0) {
                conn.holders.remove_if_there(pid);
                conn.holders.add(pid);
            }
            if for_good {
                conn.for_good.store(true, Relaxed);
                conn.next_try.store(u32::MAX, Relaxed);
            }
            match conn.phase() {
                Phase::Managed => {
                    conn.bequeathed.store(true, SeqCst);
                    pump::hurry(&mut b, Why::Shared);
                }
                Phase::Raw if for_good => {
                    conn.set_phase(Phase::Plain);
                    conn.why(Why::Shared);
                }
                _ => {}
            }
        }
        self.guests.insert(fd, Guest { conn: Some(Known { conn, gen: conn.gen.load(Relaxed) }), ..Guest::default() });
        self.count_guests();
        self.stir(conn);
        self.leave_ended(conn);
    }

    /// When one is to be told again that it must wait, or need not any more.
    pub(super) fn guests_at(&self) -> i64 {
        let waiting = self.guests.values().filter(|g| g.conn.is_some());
        let at = |g: &Guest| if g.rest.has_begun() { now_ns() + 10 * MS } else { g.told + foreign::WAIT_NS };
        waiting.map(at).min().unwrap_or(i64::MAX)
    }

    fn guest_leaves(&mut self, fd: c_int) {
        desk::run(|| sys::close(fd));
        self.guests.remove(&fd);
        self.count_guests();
    }

    fn count_guests(&self) {
        WAITING.store(self.guests.values().filter(|g| g.conn.is_some()).count(), SeqCst);
    }

    /// An operator, if it is one, wants something of all connections.
    fn ordered(&mut self, fd: c_int, o: Order) {
        if desk::run(|| order::is_entitled(fd)) {
            let count = self.obey(o);
            log(Level::Info, format_args!("the operator says {o:?}: {count} connections"));
            desk::run(|| {
                let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                // SAFETY: eight readable bytes.
                unsafe { sys::send(fd, (&raw const count).cast(), 8, flags) }
            })
            .ok();
        }
        self.guest_leaves(fd);
    }

    fn obey(&mut self, o: Order) -> u64 {
        order::set(o);
        let mut concerned = Vec::new();
        arena::each(|c| {
            let raw = c.phase() == Phase::Raw && c.stats().why.load(Relaxed) == Why::Operator as u8;
            if c.phase() == Phase::Managed && o == Order::Off || raw && o == Order::On {
                concerned.push(c);
            }
        });
        for c in &concerned {
            match o {
                Order::Off => {
                    // Nobody's reading is waited for.
                    pump::hurry(&mut c.lock_both(), Why::Operator);
                    self.stir(c);
                }
                Order::On => later(c, 0),
            }
        }
        concerned.len() as u64
    }

    /// Tells those whose connections are home, and now and then the others that these are not.
    pub(super) fn answer_guests(&mut self) {
        if self.guests.is_empty() {
            return;
        }
        let now = now_ns();
        for (fd, k) in self.guests.iter().filter_map(|(f, g)| g.conn.map(|k| (*f, k))).collect::<Vec<_>>() {
            let home = self.is_for_guest(fd, k);
            let due = self.guests.get_mut(&fd).is_some_and(|g| {
                let due = home || now - g.told >= foreign::WAIT_NS;
                g.told = if due { now } else { g.told };
                due
            });
            if due {
                let word = if home { &raw const foreign::HOME } else { &raw const foreign::WAIT };
                let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                // SAFETY: one readable byte.
                let _ = desk::run(|| unsafe { sys::send(fd, word.cast(), 1, flags) });
            }
            if home {
                self.guest_leaves(fd);
            }
        }
    }

    /// Whether a connection is home.
    fn is_for_guest(&mut self, fd: c_int, k: Known) -> bool {
        let away = || k.conn.gen.load(Relaxed) == k.gen && k.conn.phase() == Phase::Managed;
        if !away() {
            return true;
        }
        let mut b = k.conn.lock_both();
        if b.sw().rx() == RxPath::Replay && visit::is_home(&mut b) {
            // What is repeated is plain TCP to the program that asks. It had arrived, and who must not wait finds it.
            let rest = visit::awaited(&b.rx);
            let guest = self.guests.get_mut(&fd);
            if rest.zip(guest).is_some_and(|(there, g)| !g.rest.is_stuck(there, now_ns())) {
                return false;
            }
            let n = b.sw().replay_missing() as usize;
            b.sw().took_tcp(n);
        }
        drop(b);
        self.stir(k.conn);
        // What was let go is home, and others give the record back.
        !away() || k.conn.is_let_go()
    }
}
