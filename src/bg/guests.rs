//! Programs that processes of this family have started, and that use connections which they inherited over
//! `exec`: see [`crate::foreign`].

use super::*;
use crate::foreign;

impl Bg {
    pub(super) fn guest_comes(&mut self, listener: c_int) {
        let accept = || rv::accept(listener);
        let Ok(fd) = watched(self.desk_epfd, token::GUEST, libc::EPOLLIN | libc::EPOLLRDHUP, accept) else { return };
        self.guests.insert(fd, None);
    }

    /// It says which connection it means.
    pub(super) fn guest_asks(&mut self, fd: c_int) {
        let mut cookie = 0u64;
        // SAFETY: eight writable bytes.
        let n = desk::run(|| unsafe { sys::recv(fd, (&raw mut cookie).cast(), 8, libc::MSG_DONTWAIT) });
        if n == Err(libc::EAGAIN) || n == Err(libc::EINTR) {
            return;
        }
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
