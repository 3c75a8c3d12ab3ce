//! Epoll sets that the library knows nothing of, because the program makes and fills them by system calls of
//! its own (Rust's `rustix`, for one). A connection in such a set must stay on TCP: there the program would be
//! woken by marks, and not by what comes on a ring.

use crate::conn::Conn;
use crate::sync::now_ns;
use crate::sys::{self, sys};
use crate::table::{self, Entry};
use crate::textfile::TextFile;
use crate::{chaos, fdhigh};
use core::fmt::Write;
use core::sync::atomic::Ordering::Relaxed;
use libc::c_int;

const DIR: &[u8] = b"/proc/self/fd\0";
/// What a link in that folder says of an epoll set.
const SET: &[u8] = b"anon_inode:[eventpoll]";
/// The process's fds are gone through for at most a twentieth of the time, ...
const SHARE: i64 = 20;
/// ... but what is known is not believed for longer than this.
const LONGEST_NS: i64 = 500_000_000;
/// A set that is described by more than this is taken to have every connection.
const MOST: usize = 64 << 10;

/// The sets that are there.
#[derive(Default)]
pub(super) struct Unseen {
    sets: Vec<c_int>,
    fresh_until: i64,
    /// Connections, and their generations, that are in none of them, as far as was known when they were asked for: a set
    /// may have been made since the list was.
    doubtful: Vec<(&'static Conn, u32)>,
}

impl Unseen {
    /// Whether one of them has the connection; what is not sure is looked at again, see [`Unseen::found_late`].
    pub(super) fn has(&mut self, conn: &'static Conn) -> bool {
        let now = now_ns();
        let fresh = now >= self.fresh_until;
        if fresh {
            self.list(now);
        }
        let has = self.is_in_any(conn);
        if !has && !fresh {
            self.doubtful.push((conn, conn.gen.load(Relaxed)));
        }
        has
    }

    /// When to ask for those that are in one.
    pub(super) fn due(&self) -> i64 {
        match self.doubtful.is_empty() {
            true => i64::MAX,
            false => self.fresh_until,
        }
    }

    /// Connections that turned out to be in one.
    pub(super) fn found_late(&mut self, now: i64) -> Vec<&'static Conn> {
        if now < self.due() {
            return Vec::new();
        }
        self.list(now);
        let all = core::mem::take(&mut self.doubtful).into_iter();
        all.filter(|(c, gen)| c.gen.load(Relaxed) == *gen && self.is_in_any(c)).map(|(c, _)| c).collect()
    }

    fn is_in_any(&self, conn: &Conn) -> bool {
        self.sets.iter().any(|set| contains(*set, conn))
    }

    fn list(&mut self, now: i64) {
        self.sets.clear();
        crate::desk::run(|| self.gather());
        let end = now_ns();
        // Under chaos a connection may move in the moment in which its set is made.
        self.fresh_until = end + if chaos::is_on() { 0 } else { ((end - now) * SHARE).min(LONGEST_NS) };
    }

    fn gather(&mut self) {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        // SAFETY: `DIR` ends with NUL.
        let Ok(dir) = (unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, DIR.as_ptr(), flags, 0) }) else { return };
        let mut buf = [0u8; 8192];
        loop {
            // SAFETY: `buf` has room.
            let n = match unsafe { sys!(libc::SYS_getdents64, dir, buf.as_mut_ptr(), buf.len()) } {
                Ok(n) if n > 0 => n,
                _ => break,
            };
            // Of each entry: its length in bytes 16 and 17, its name from byte 19 on.
            let mut rest = &buf[..n];
            while let (Some(len), Some(name)) = (rest.get(16..18), rest.get(19..)) {
                let len = usize::from(u16::from_ne_bytes([len[0], len[1]]));
                let digits = name.iter().take_while(|b| b.is_ascii_digit());
                let fd = digits.fold(0 as c_int, |fd, d| fd.saturating_mul(10).saturating_add(c_int::from(d - b'0')));
                let known = matches!(table::get(fd), Entry::Conn(_) | Entry::Set(_)) || fdhigh::is_ours(fd);
                if name.first().is_some_and(u8::is_ascii_digit) && !known && is_set(dir, name) {
                    self.sets.push(fd);
                }
                rest = rest.get(len.max(19)..).unwrap_or(&[]);
            }
        }
        sys::close_raw(dir as c_int);
    }
}

/// `name` is followed by NUL, as the kernel wrote it.
fn is_set(dir: usize, name: &[u8]) -> bool {
    let mut to = [0u8; SET.len() + 1];
    // SAFETY: `name` ends with NUL; `to` has room.
    let n = unsafe { sys!(libc::SYS_readlinkat, dir, name.as_ptr(), to.as_mut_ptr(), to.len()) };
    n == Ok(SET.len()) && to.starts_with(SET)
}

/// Whether the kernel names a number of the connection among the set's.
fn contains(set: c_int, conn: &Conn) -> bool {
    let mut path = crate::config::Text::<64>::EMPTY;
    let _ = write!(path, "/proc/self/fdinfo/{set}");
    let text = match TextFile::read(path.as_bytes_with_nul(), MOST) {
        Ok(text) => text,
        Err(e) => return e == libc::EFBIG,
    };
    text.bytes().split(|b| *b == b'\n').any(|line| {
        let number = line.strip_prefix(b"tfd:").map(<[u8]>::trim_ascii_start);
        let digits = number.map(|n| n.split(|b| !b.is_ascii_digit()).next().unwrap_or(&[]));
        let fd = digits.and_then(|d| core::str::from_utf8(d).ok()?.parse().ok());
        fd.is_some_and(|fd| table::is(fd, conn))
    })
}
