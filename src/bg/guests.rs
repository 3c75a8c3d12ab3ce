//! Programs that processes of this family have started, and that use connections which they inherited over
//! `exec`: see [`crate::foreign`]. And operators, who ask for all connections: see [`crate::order`].

use super::search::later;
use super::*;
use crate::foreign;
use crate::order::{self, Order};

impl Bg {
    pub(super) fn guest_comes(&mut self, listener: c_int) {
        let accept = || rv::accept(listener);
        let Ok(fd) = watched(self.desk_epfd, token::GUEST, libc::EPOLLIN | libc::EPOLLRDHUP, accept) else { return };
        self.guests.insert(fd, None);
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
        let cookie = words[0];
        let mut found = None;
        if n == Ok(8) && self.guests.get(&fd).is_some_and(|k| k.is_none()) {
            arena::each(|c| {
                let has = matches!(c.phase(), Phase::Raw | Phase::Managed | Phase::Plain) && !c.came_by_exec();
                let own = c.local().fd.load(Relaxed);
                if has && own >= 0 && found.is_none() && foreign::cookie(own) == Some(cookie) {
                    found = Some(c);
                }
            });
        }
        let Some(conn) = found else {
            desk::run(|| sys::close(fd));
            self.guests.remove(&fd);
            return;
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
            if conn.phase() == Phase::Managed {
                conn.bequeathed.store(true, SeqCst);
                pump::hurry(&mut b);
            }
        }
        self.guests.insert(fd, Some(Known { conn, gen: conn.gen.load(Relaxed) }));
        self.stir(conn);
        self.leave_ended(conn);
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
        desk::run(|| sys::close(fd));
        self.guests.remove(&fd);
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
                    pump::hurry(&mut c.lock_both());
                    self.stir(c);
                }
                Order::On => later(c, 0),
            }
        }
        concerned.len() as u64
    }

    /// Tells those whose connections are home.
    pub(super) fn answer_guests(&mut self) {
        if self.guests.is_empty() {
            return;
        }
        for (fd, k) in self.guests.iter().filter_map(|(f, k)| k.map(|k| (*f, k))).collect::<Vec<_>>() {
            let same = k.conn.gen.load(Relaxed) == k.gen;
            if same && k.conn.phase() == Phase::Managed {
                let mut b = k.conn.lock_both();
                if b.sw().rx() == RxPath::Replay && visit::is_home(&mut b) {
                    // What is repeated is plain TCP to the program that asks.
                    let n = b.sw().replay_missing() as usize;
                    b.sw().took_tcp(n);
                }
                drop(b);
                self.stir(k.conn);
                if k.conn.phase() == Phase::Managed {
                    continue;
                }
            }
            desk::run(|| {
                let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                // SAFETY: one readable byte.
                let _ = unsafe { sys::send(fd, (&raw const foreign::HOME).cast(), 1, flags) };
                sys::close(fd);
            });
            self.guests.remove(&fd);
        }
    }
}
