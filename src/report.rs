//! The report that a process leaves at exit (`RINGSOCK_REPORT`): a JSON object
//! of the same shape as each process in `ringsock stat --json`.
//!
//! It may be written by a forked child of a multithreaded program, by a signal
//! handler or in the middle of `exit`. So it is made in a buffer on the stack
//! and written by raw system calls; there is no allocation and no lock.

use crate::config::{self, Path};
use crate::log::{self, Quoted};
use crate::stats::{text_of, ConnStats, Endpoint, Header, Totals, Why};
use crate::sys::{self, sys, Errno, SysResult};
use core::fmt::{self, Write};
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::sync::atomic::{fence, AtomicU8, Ordering};

/// Counts of one process, summed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sums {
    /// Application bytes sent through kernel TCP.
    pub tx_bytes_tcp: u64,
    /// Application bytes sent through rings.
    pub tx_bytes_ring: u64,
    /// Application bytes received through kernel TCP.
    pub rx_bytes_tcp: u64,
    /// Application bytes received through rings.
    pub rx_bytes_ring: u64,
    /// Completed upgrades.
    pub upgrades: u64,
    /// Completed returns.
    pub returns: u64,
    /// TCP connections ever seen.
    pub connections: u64,
    /// Connections that were upgraded at least once.
    pub upgraded: u64,
    /// The others, by why they never left TCP.
    pub stayed: Tally,
    /// `returns`, by why.
    pub returned: Tally,
}

/// A count for each reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tally([u32; Why::COUNT]);

impl Default for Tally {
    fn default() -> Tally {
        Tally([0; Why::COUNT])
    }
}

impl Tally {
    /// The reasons that occurred, in words, and how often. Those that are none in words are left out.
    pub fn reasons(&self) -> impl Iterator<Item = (&'static str, u32)> + '_ {
        let in_words = |(i, n): (usize, &u32)| (Why::from_u8(i as u8).text(), *n);
        self.0.iter().enumerate().filter(|(_, n)| **n > 0).map(in_words).filter(|(text, _)| !text.is_empty())
    }
}

impl Sums {
    /// A copy of the totals of closed connections.
    pub fn closed(t: &Totals) -> Sums {
        Sums {
            tx_bytes_tcp: t.tx_bytes_tcp.load(Ordering::Relaxed),
            tx_bytes_ring: t.tx_bytes_ring.load(Ordering::Relaxed),
            rx_bytes_tcp: t.rx_bytes_tcp.load(Ordering::Relaxed),
            rx_bytes_ring: t.rx_bytes_ring.load(Ordering::Relaxed),
            upgrades: t.upgrades.load(Ordering::Relaxed),
            returns: t.returns.load(Ordering::Relaxed),
            connections: t.connections.load(Ordering::Relaxed),
            upgraded: t.upgraded.load(Ordering::Relaxed),
            stayed: Tally(t.stayed.get()),
            returned: Tally(t.returned.get()),
        }
    }

    /// Adds a live connection.
    pub fn add(&mut self, c: &Conn) {
        // Counts come from a page that another process may write; they must not overflow anything here.
        self.tx_bytes_tcp = self.tx_bytes_tcp.wrapping_add(c.tx_bytes_tcp);
        self.tx_bytes_ring = self.tx_bytes_ring.wrapping_add(c.tx_bytes_ring);
        self.rx_bytes_tcp = self.rx_bytes_tcp.wrapping_add(c.rx_bytes_tcp);
        self.rx_bytes_ring = self.rx_bytes_ring.wrapping_add(c.rx_bytes_ring);
        self.upgrades = self.upgrades.wrapping_add(u64::from(c.upgrades));
        self.returns = self.returns.wrapping_add(u64::from(c.returns));
        self.connections = self.connections.wrapping_add(1);
        self.upgraded = self.upgraded.wrapping_add(u64::from(c.upgrades > 0));
        if let Some(n) = self.stayed.0.get_mut(c.reason as usize).filter(|_| c.upgrades == 0) {
            *n = n.wrapping_add(1);
        }
    }
}

/// A copy of one live connection's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conn {
    /// Our end.
    pub local: SocketAddr,
    /// The other end.
    pub peer: SocketAddr,
    /// `shm`, `verbs`, or none.
    pub link: Option<&'static str>,
    /// `tcp` or `ring`, for what we send.
    pub path_tx: &'static str,
    /// `tcp` or `ring`, for what we receive.
    pub path_rx: &'static str,
    /// Why a direction is on TCP; none if both are on a ring.
    pub why: Option<&'static str>,
    /// The same, as it was last.
    pub reason: Why,
    /// See [`Sums`].
    pub tx_bytes_tcp: u64,
    /// See [`Sums`].
    pub tx_bytes_ring: u64,
    /// See [`Sums`].
    pub rx_bytes_tcp: u64,
    /// See [`Sums`].
    pub rx_bytes_ring: u64,
    /// Completed upgrades.
    pub upgrades: u32,
    /// Completed returns.
    pub returns: u32,
}

impl Conn {
    /// Copies a record; `None` if it is not in use.
    ///
    /// A record that is given to another connection while it is copied is
    /// copied again, and left out if it never rests.
    pub fn snapshot(record: &ConnStats) -> Option<Conn> {
        for _ in 0..16 {
            let before = record.gen.load(Ordering::Acquire);
            if before & 1 == 0 {
                return None;
            }
            let copy = Conn::copy(record);
            fence(Ordering::Acquire);
            if record.gen.load(Ordering::Relaxed) == before {
                return Some(copy);
            }
        }
        None
    }

    fn copy(r: &ConnStats) -> Conn {
        let path = |p: &AtomicU8| if p.load(Ordering::Acquire) == 1 { "ring" } else { "tcp" };
        let (path_tx, path_rx) = (path(&r.path_tx), path(&r.path_rx));
        let on_ring = path_tx == "ring" && path_rx == "ring";
        let why = r.why.load(Ordering::Relaxed);
        Conn {
            local: endpoint(&r.local),
            peer: endpoint(&r.peer),
            link: match r.link.load(Ordering::Relaxed) {
                1 => Some("shm"),
                2 => Some("verbs"),
                _ => None,
            },
            path_tx,
            path_rx,
            why: (!on_ring).then(|| text_of(why)),
            reason: Why::from_u8(why),
            tx_bytes_tcp: r.tx_bytes_tcp.load(Ordering::Relaxed),
            tx_bytes_ring: r.tx_bytes_ring.load(Ordering::Relaxed),
            rx_bytes_tcp: r.rx_bytes_tcp.load(Ordering::Relaxed),
            rx_bytes_ring: r.rx_bytes_ring.load(Ordering::Relaxed),
            upgrades: r.upgrades.load(Ordering::Relaxed),
            returns: r.returns.load(Ordering::Relaxed),
        }
    }
}

/// A mapped IPv4 address comes out as IPv4, as the program knows it.
fn endpoint(e: &Endpoint) -> SocketAddr {
    let (addr, port) = e.get();
    SocketAddr::new(IpAddr::V6(Ipv6Addr::from(addr)).to_canonical(), port)
}

/// The program's name, without the NULs behind it.
pub fn program_name(header: &Header, buf: &mut [u8; 64]) -> usize {
    for (to, from) in buf.iter_mut().zip(&header.program) {
        *to = from.load(Ordering::Relaxed);
    }
    buf.iter().position(|&b| b == 0).unwrap_or(buf.len())
}

/// Writes the report of a process to `fd`, as one JSON object and a newline.
pub fn write_report(fd: i32, header: &Header, conns: &[ConnStats]) -> SysResult<()> {
    let mut out = Out { fd, buf: [0; 4096], len: 0, sent: 0, error: None };
    let _ = write_json(&mut out, header, conns);
    out.flush();
    out.error.map_or(Ok(()), Err)
}

fn write_json(out: &mut Out, header: &Header, conns: &[ConnStats]) -> fmt::Result {
    let mut name = [0u8; 64];
    let n = program_name(header, &mut name);
    write!(out, "{{\"pid\":{},\"program\":", header.pid.load(Ordering::Relaxed))?;
    write_string(out, name.get(..n).unwrap_or(&[]))?;
    out.write_str(",\"connections\":[")?;
    let mut sums = Sums::closed(&header.closed);
    let used = header.used.load(Ordering::Acquire) as usize;
    let mut first = true;
    for c in conns.iter().take(used).filter_map(Conn::snapshot) {
        sums.add(&c);
        out.write_str(if first { "\n" } else { ",\n" })?;
        first = false;
        write!(out, "{{\"local\":\"{}\",\"peer\":\"{}\",\"link\":", c.local, c.peer)?;
        match c.link {
            Some(link) => write!(out, "\"{link}\"")?,
            None => out.write_str("null")?,
        }
        write!(out, ",\"path_tx\":\"{}\",\"path_rx\":\"{}\",", c.path_tx, c.path_rx)?;
        write!(out, "\"tx_bytes_tcp\":{},\"tx_bytes_ring\":{},", c.tx_bytes_tcp, c.tx_bytes_ring)?;
        write!(out, "\"rx_bytes_tcp\":{},\"rx_bytes_ring\":{},", c.rx_bytes_tcp, c.rx_bytes_ring)?;
        write!(out, "\"upgrades\":{},\"returns\":{}", c.upgrades, c.returns)?;
        if let Some(why) = c.why {
            out.write_str(",\"why\":")?;
            write_string(out, why.as_bytes())?;
        }
        out.write_str("}")?;
    }
    out.write_str("],\n\"totals\":{")?;
    write!(out, "\"connections\":{},\"upgraded\":{},", sums.connections, sums.upgraded)?;
    write!(out, "\"tx_bytes_tcp\":{},\"tx_bytes_ring\":{},", sums.tx_bytes_tcp, sums.tx_bytes_ring)?;
    write!(out, "\"rx_bytes_tcp\":{},\"rx_bytes_ring\":{},", sums.rx_bytes_tcp, sums.rx_bytes_ring)?;
    write!(out, "\"upgrades\":{},\"returns\":{}", sums.upgrades, sums.returns)?;
    for (name, tally) in [("stayed", &sums.stayed), ("returned", &sums.returned)] {
        write!(out, ",\"{name}\":{{")?;
        for (i, (why, n)) in tally.reasons().enumerate() {
            out.write_str(if i == 0 { "" } else { "," })?;
            write_string(out, why.as_bytes())?;
            write!(out, ":{n}")?;
        }
        out.write_str("}")?;
    }
    out.write_str("}}\n")
}

/// A JSON string. Bytes that are not UTF-8 become U+FFFD.
fn write_string(out: &mut Out, bytes: &[u8]) -> fmt::Result {
    out.write_str("\"")?;
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '"' | '\\' => write!(out, "\\{c}")?,
                '\0'..='\x1f' => write!(out, "\\u{:04x}", c as u32)?,
                c => out.write_char(c)?,
            }
        }
        if !chunk.invalid().is_empty() {
            out.write_char('\u{fffd}')?;
        }
    }
    out.write_str("\"")
}

/// Leaves the report at the path of `RINGSOCK_REPORT`, if there is one.
///
/// The file appears whole or not at all. An error is logged and changes nothing else.
pub fn at_exit(header: &Header, conns: &[ConnStats]) {
    let Some(setting) = &config::get().report else { return };
    // SAFETY: takes no arguments.
    let pid = unsafe { sys!(libc::SYS_getpid) }.unwrap_or(0) as u32;
    let Some(path) = setting.expand(pid) else {
        log::warn!("RINGSOCK_REPORT: the path {} is too long", Quoted(setting.as_bytes()));
        return;
    };
    if let Err(e) = write_file(&path, pid, header, conns) {
        log::warn!("cannot write the report {} (error {e})", Quoted(path.as_bytes()));
    }
}

fn write_file(path: &Path, pid: u32, header: &Header, conns: &[ConnStats]) -> SysResult<()> {
    let name = path.as_bytes_with_nul().as_ptr();
    let create = libc::O_WRONLY | libc::O_CREAT | libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK;
    let mut st = core::mem::MaybeUninit::<libc::stat>::zeroed();
    let no_follow = libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: a NUL-terminated path, and room for what the kernel writes.
    let there = unsafe { sys!(libc::SYS_newfstatat, libc::AT_FDCWD, name, st.as_mut_ptr(), no_follow) };
    // SAFETY: all zeroes is a valid `stat`.
    let kind = unsafe { st.assume_init() }.st_mode & libc::S_IFMT;
    if there.is_ok() && kind != libc::S_IFREG {
        // A rename would put a file in the place of /dev/stderr, a FIFO or a link: write into those.
        // SAFETY: a NUL-terminated path.
        let fd = unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, name, create | libc::O_TRUNC, 0o644)? } as i32;
        let done = write_report(fd, header, conns);
        sys::close_raw(fd);
        return done;
    }
    let mut temp = config::Text::<1048>::EMPTY;
    for chunk in path.as_bytes().utf8_chunks() {
        if !chunk.invalid().is_empty() {
            return Err(libc::EILSEQ);
        }
        temp.write_str(chunk.valid()).map_err(|_| libc::ENAMETOOLONG)?;
    }
    write!(temp, ".tmp.{pid}").map_err(|_| libc::ENAMETOOLONG)?;
    let temp_name = temp.as_bytes_with_nul().as_ptr();
    // Whatever has that name is a rest of an earlier process with our pid, or a trap in a shared directory.
    // SAFETY: a NUL-terminated path.
    let _ = unsafe { sys!(libc::SYS_unlinkat, libc::AT_FDCWD, temp_name, 0) };
    let exclusive = create | libc::O_EXCL | libc::O_NOFOLLOW;
    // SAFETY: a NUL-terminated path.
    let fd = unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, temp_name, exclusive, 0o644)? } as i32;
    let mut done = write_report(fd, header, conns);
    sys::close_raw(fd);
    if done.is_ok() {
        // SAFETY: two NUL-terminated paths.
        done = unsafe { sys!(libc::SYS_renameat2, libc::AT_FDCWD, temp_name, libc::AT_FDCWD, name, 0) }.map(drop);
    }
    if done.is_err() {
        // SAFETY: a NUL-terminated path.
        let _ = unsafe { sys!(libc::SYS_unlinkat, libc::AT_FDCWD, temp_name, 0) };
    }
    done
}

/// Collects text and writes it when the buffer is full; after an error it drops all.
struct Out {
    fd: i32,
    buf: [u8; 4096],
    len: usize,
    /// Bytes written so far.
    sent: usize,
    error: Option<Errno>,
}

impl Out {
    fn flush(&mut self) {
        let mut rest = self.buf.get(..self.len).unwrap_or(&[]);
        if !crate::shm::may_have(self.sent + rest.len()) {
            self.error = Some(libc::EFBIG);
        }
        while self.error.is_none() && !rest.is_empty() {
            // SAFETY: `rest` is valid for its length.
            match unsafe { sys!(libc::SYS_write, self.fd, rest.as_ptr(), rest.len()) } {
                Ok(0) => self.error = Some(libc::EIO),
                Ok(n) => {
                    rest = rest.get(n..).unwrap_or(&[]);
                    self.sent += n;
                }
                Err(libc::EINTR) => {}
                Err(e) => self.error = Some(e),
            }
        }
        self.len = 0;
    }
}

impl Write for Out {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        for part in s.as_bytes().chunks(1024) {
            if self.len + part.len() > self.buf.len() {
                self.flush();
            }
            let to = self.buf.get_mut(self.len..self.len + part.len()).ok_or(fmt::Error)?;
            to.copy_from_slice(part);
            self.len += part.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU32, AtomicU64};
    use std::os::fd::AsRawFd;

    fn header(name: &[u8], used: u32) -> Header {
        let h = Header {
            magic: AtomicU64::new(crate::stats::MAGIC),
            version: AtomicU32::new(crate::stats::VERSION),
            pid: AtomicU32::new(42),
            used: AtomicU32::new(used),
            capacity: AtomicU32::new(64),
            closed: Totals::default(),
            program: [const { AtomicU8::new(0) }; 64],
        };
        for (to, from) in h.program.iter().zip(name) {
            to.store(*from, Ordering::Relaxed);
        }
        h
    }

    fn conn(local: &str, peer: &str) -> ConnStats {
        let c = ConnStats::default();
        for (e, text) in [(&c.local, local), (&c.peer, peer)] {
            let at: SocketAddr = text.parse().unwrap();
            let ip = match at.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            for (to, from) in e.addr.iter().zip(ip.octets()) {
                to.store(from, Ordering::Relaxed);
            }
            e.port.store(at.port(), Ordering::Relaxed);
        }
        c.gen.store(1, Ordering::Relaxed);
        c
    }

    fn report(header: &Header, conns: &[ConnStats]) -> String {
        let path = std::env::temp_dir().join(format!("ringsock-report-{:?}", std::thread::current().id()));
        let file = std::fs::File::create(&path).unwrap();
        write_report(file.as_raw_fd(), header, conns).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        text
    }

    #[test]
    fn nothing_happened() {
        let text = report(&header(b"x", 0), &[]);
        assert_eq!(
            text,
            "{\"pid\":42,\"program\":\"x\",\"connections\":[],\n\"totals\":{\"connections\":0,\"upgraded\":0,\
             \"tx_bytes_tcp\":0,\"tx_bytes_ring\":0,\"rx_bytes_tcp\":0,\"rx_bytes_ring\":0,\"upgrades\":0,\"returns\":0,\
             \"stayed\":{},\"returned\":{}}}\n"
        );
    }

    #[test]
    fn live_and_closed_connections_are_summed() {
        let ring = conn("127.0.0.1:80", "[::1]:5000");
        ring.link.store(1, Ordering::Relaxed);
        ring.path_tx.store(1, Ordering::Relaxed);
        ring.path_rx.store(1, Ordering::Relaxed);
        ring.tx_bytes_ring.store(1000, Ordering::Relaxed);
        ring.upgrades.store(1, Ordering::Relaxed);
        let tcp = conn("1.2.3.4:80", "[2001:db8::1]:1");
        tcp.why.store(Why::NoPeer as u8, Ordering::Relaxed);
        let unused = conn("9.9.9.9:9", "9.9.9.9:9");
        unused.gen.store(2, Ordering::Relaxed);
        let beyond = conn("8.8.8.8:9", "9.9.9.9:9");
        let h = header(b"a\"b\\\n\xff\xc3\xa9", 3);
        h.closed.connections.store(5, Ordering::Relaxed);
        h.closed.tx_bytes_ring.store(7, Ordering::Relaxed);
        h.closed.stayed.count(Why::New);
        h.closed.returned.count(Why::Urgent);
        h.closed.returned.count(Why::Urgent);
        let text = report(&h, &[ring, tcp, unused, beyond]);
        assert!(text.contains(r#""program":"a\"b\\\u000a�é""#), "{text}");
        assert!(text.contains(r#"{"local":"127.0.0.1:80","peer":"[::1]:5000","link":"shm","path_tx":"ring","path_rx":"ring","tx_bytes_tcp":0,"tx_bytes_ring":1000,"rx_bytes_tcp":0,"rx_bytes_ring":0,"upgrades":1,"returns":0}"#), "{text}");
        assert!(text.contains(r#""local":"1.2.3.4:80","peer":"[2001:db8::1]:1","link":null"#));
        assert!(text.contains(r#""why":"the peer is not preloaded, keeps it on TCP, or cannot be reached""#));
        assert!(text.contains(r#""stayed":{"too little traffic so far":1,"the peer is not preloaded, keeps it on TCP, or cannot be reached":1},"returned":{"urgent data (MSG_OOB)":2}}"#), "{text}");
        assert!(text.contains(r#""connections":7,"upgraded":1,"tx_bytes_tcp":0,"tx_bytes_ring":1007"#));
        assert!(!text.contains("9.9.9.9") && !text.contains("8.8.8.8"));
    }

    #[test]
    fn a_long_report_comes_out_whole() {
        let conns: Vec<_> = (0..500).map(|i| conn(&format!("10.0.0.1:{}", i + 1), "10.0.0.2:1")).collect();
        let text = report(&header(b"many", 500), &conns);
        assert_eq!(text.matches("\"local\"").count(), 500);
        assert!(text.ends_with("}}\n") && text.contains("10.0.0.1:500"));
    }

    #[test]
    fn the_file_appears_whole_or_not_at_all() {
        let dir = std::env::temp_dir().join(format!("ringsock-report-dir-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("r.json");
        let path = Path::new(file.to_str().unwrap().as_bytes()).unwrap();
        std::fs::write(&file, "old and much longer than nothing").unwrap();
        write_file(&path, 1, &header(b"x", 0), &[]).unwrap();
        assert!(std::fs::read_to_string(&file).unwrap().starts_with("{\"pid\":42"));
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "no temporary file is left");
        let bad = Path::new(dir.join("none/r.json").to_str().unwrap().as_bytes()).unwrap();
        assert_eq!(write_file(&bad, 1, &header(b"x", 0), &[]), Err(libc::ENOENT));
        write_file(&Path::new(b"/dev/null").unwrap(), 1, &header(b"x", 0), &[]).unwrap();
        assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
