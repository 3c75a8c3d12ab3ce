//! What preloaded processes tell about themselves: the memfd `ringsock-state`
//! of each, and the JSON that is made of it.
//!
//! The memfd is copied with `pread`, not mapped: it belongs to another process,
//! which could cut it short, and reading a missing page of a mapping would kill
//! this command.

use ringsock_core::report::{program_name, Conn, Sums, Tally};
use ringsock_core::stats::{ConnStats, Header, CONNS_OFFSET, MAGIC, MEMFD_NAME, VERSION};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::mem::size_of;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

/// One process, in the shape of `stat --json` and of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    pub program: String,
    pub connections: Vec<Connection>,
    pub totals: Totals,
}

/// One live connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    pub local: String,
    pub peer: String,
    pub link: Option<String>,
    pub path_tx: String,
    pub path_rx: String,
    pub tx_bytes_tcp: u64,
    pub tx_bytes_ring: u64,
    pub rx_bytes_tcp: u64,
    pub rx_bytes_ring: u64,
    pub upgrades: u32,
    pub returns: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Sums over live and closed connections.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    pub connections: u64,
    pub upgraded: u64,
    pub tx_bytes_tcp: u64,
    pub tx_bytes_ring: u64,
    pub rx_bytes_tcp: u64,
    pub rx_bytes_ring: u64,
    pub upgrades: u64,
    pub returns: u64,
    /// How many never left TCP, by why.
    #[serde(default)]
    pub stayed: Reasons,
    /// `returns`, by why.
    #[serde(default)]
    pub returned: Reasons,
}

/// How often each reason occurred.
pub type Reasons = BTreeMap<String, u64>;

impl Totals {
    /// Adds another process's.
    pub fn add(&mut self, o: &Totals) {
        self.connections = self.connections.saturating_add(o.connections);
        self.upgraded = self.upgraded.saturating_add(o.upgraded);
        self.tx_bytes_tcp = self.tx_bytes_tcp.saturating_add(o.tx_bytes_tcp);
        self.tx_bytes_ring = self.tx_bytes_ring.saturating_add(o.tx_bytes_ring);
        self.rx_bytes_tcp = self.rx_bytes_tcp.saturating_add(o.rx_bytes_tcp);
        self.rx_bytes_ring = self.rx_bytes_ring.saturating_add(o.rx_bytes_ring);
        self.upgrades = self.upgrades.saturating_add(o.upgrades);
        self.returns = self.returns.saturating_add(o.returns);
        for (to, from) in [(&mut self.stayed, &o.stayed), (&mut self.returned, &o.returned)] {
            for (why, n) in from {
                let to = to.entry(why.clone()).or_default();
                *to = to.saturating_add(*n);
            }
        }
    }

    /// Bytes on rings, both directions.
    pub fn ring(&self) -> u64 {
        self.tx_bytes_ring.saturating_add(self.rx_bytes_ring)
    }

    /// Bytes on any path, both directions.
    pub fn all(&self) -> u64 {
        self.ring().saturating_add(self.tx_bytes_tcp).saturating_add(self.rx_bytes_tcp)
    }
}

impl From<Sums> for Totals {
    fn from(s: Sums) -> Totals {
        Totals {
            connections: s.connections,
            upgraded: s.upgraded,
            tx_bytes_tcp: s.tx_bytes_tcp,
            tx_bytes_ring: s.tx_bytes_ring,
            rx_bytes_tcp: s.rx_bytes_tcp,
            rx_bytes_ring: s.rx_bytes_ring,
            upgrades: s.upgrades,
            returns: s.returns,
            stayed: in_words(&s.stayed),
            returned: in_words(&s.returned),
        }
    }
}

fn in_words(tally: &Tally) -> Reasons {
    tally.reasons().map(|(why, n)| (why.to_string(), n.into())).collect()
}

impl From<Conn> for Connection {
    fn from(c: Conn) -> Connection {
        Connection {
            local: c.local.to_string(),
            peer: c.peer.to_string(),
            link: c.link.map(str::to_string),
            path_tx: c.path_tx.into(),
            path_rx: c.path_rx.into(),
            tx_bytes_tcp: c.tx_bytes_tcp,
            tx_bytes_ring: c.tx_bytes_ring,
            rx_bytes_tcp: c.rx_bytes_tcp,
            rx_bytes_ring: c.rx_bytes_ring,
            upgrades: c.upgrades,
            returns: c.returns,
            why: c.why.map(str::to_string),
        }
    }
}

/// Why a process has nothing to show.
#[derive(Debug, PartialEq, Eq)]
pub enum Missing {
    /// No such process, or it has just ended.
    Gone,
    /// Its fds may not be looked at.
    Denied,
    /// It has no state: the library is not in it, or has not been needed.
    NoState,
    /// It has state that this command does not understand.
    Foreign(String),
}

/// The state of one process.
pub fn of(pid: u32) -> Result<Process, Missing> {
    let dir = format!("/proc/{pid}/fd");
    let entries = fs::read_dir(dir).map_err(|e| missing(&e))?;
    let wanted = format!("/memfd:{MEMFD_NAME}");
    let mut result = Err(Missing::NoState);
    for entry in entries.flatten() {
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        if link.to_str().map(|l| l.trim_end_matches(" (deleted)")) != Some(&wanted) {
            continue;
        }
        match read(&entry.path()) {
            // A forked child still has its parent's.
            Ok(p) if p.pid != pid && p.pid != pid_inside(pid) => {}
            Ok(p) => return Ok(Process { pid, ..p }),
            Err(m) => result = Err(m),
        }
    }
    result
}

fn missing(e: &std::io::Error) -> Missing {
    match e.kind() {
        ErrorKind::PermissionDenied => Missing::Denied,
        _ => Missing::Gone,
    }
}

/// The number that a process has for itself, in the innermost pid namespace.
pub fn pid_inside(pid: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("NSpid:"));
    line.and_then(|l| l.split_whitespace().last()?.parse().ok()).unwrap_or(pid)
}

/// Memory for a copy, aligned as the records need it.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// As many bytes of the file as there are, of those asked for.
fn copy(file: &File, offset: u64, bytes: usize) -> std::io::Result<(Vec<Line>, usize)> {
    let mut lines = vec![Line([0; 64]); bytes.div_ceil(64)];
    // SAFETY: lines are plain bytes without gaps.
    let room = unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<u8>(), bytes) };
    let mut done = 0;
    while done < bytes {
        match file.read_at(&mut room[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok((lines, done))
}

/// Reads and checks one memfd.
pub fn read(path: &Path) -> Result<Process, Missing> {
    let file = File::open(path).map_err(|e| missing(&e))?;
    let (head, n) = copy(&file, 0, size_of::<Header>()).map_err(|e| Missing::Foreign(e.to_string()))?;
    if n < size_of::<Header>() {
        return Err(Missing::Foreign("it is too short".into()));
    }
    // SAFETY: a full `Header` was read into memory that is aligned for it; any bytes are valid atomics.
    let header = unsafe { &*head.as_ptr().cast::<Header>() };
    if header.magic.load(Relaxed) != MAGIC {
        return Err(Missing::Foreign("it does not begin as it should".into()));
    }
    let version = header.version.load(Relaxed);
    if version != VERSION {
        return Err(Missing::Foreign(format!(
            "its layout has version {version} and this command knows {VERSION}; use the `ringsock` of that library"
        )));
    }
    let size = file.metadata().map_or(0, |m| m.len());
    let room = usize::try_from(size).unwrap_or(0).saturating_sub(CONNS_OFFSET) / size_of::<ConnStats>();
    let used = (header.used.load(Relaxed) as usize).min(header.capacity.load(Relaxed) as usize).min(room);
    let records = || -> std::io::Result<(Vec<Line>, usize)> {
        let (lines, n) = copy(&file, CONNS_OFFSET as u64, used * size_of::<ConnStats>())?;
        Ok((lines, n / size_of::<ConnStats>()))
    };
    // Twice: a record that was given to another connection in between is of neither.
    let (first, second) = match (records(), records()) {
        (Ok(a), Ok(b)) => (a, b),
        (Err(e), _) | (_, Err(e)) => return Err(Missing::Foreign(e.to_string())),
    };
    let mut sums = Sums::closed(&header.closed);
    let mut connections = Vec::new();
    for (a, b) in as_records(&first).iter().zip(as_records(&second)) {
        if a.gen.load(Relaxed) != b.gen.load(Relaxed) {
            continue;
        }
        if let Some(c) = Conn::snapshot(a) {
            sums.add(&c);
            connections.push(c.into());
        }
    }
    let mut name = [0; 64];
    let n = program_name(header, &mut name);
    Ok(Process {
        pid: header.pid.load(Relaxed),
        program: String::from_utf8_lossy(&name[..n]).into_owned(),
        connections,
        totals: sums.into(),
    })
}

fn as_records((lines, n): &(Vec<Line>, usize)) -> &[ConnStats] {
    // SAFETY: `copy` read `n` whole records into memory aligned to 64; any bytes are valid atomics.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), *n) }
}

/// The pids of all processes.
pub fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<u32> = entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringsock_core::stats::Why;
    use std::os::fd::{AsRawFd, FromRawFd};

    /// A memfd as a preloaded process makes it, with two records of which one is in use.
    fn memfd(version: u32, pid: u32) -> File {
        let name = std::ffi::CString::new(MEMFD_NAME).unwrap();
        // SAFETY: a new fd that only `File` owns.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC)) };
        let len = CONNS_OFFSET + 2 * size_of::<ConnStats>();
        file.set_len(len as u64).unwrap();
        // SAFETY: a mapping of the whole file.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        // SAFETY: zeroes are a valid `Header`, and the mapping is long enough.
        let h = unsafe { &*at.cast::<Header>() };
        h.magic.store(MAGIC, Relaxed);
        h.version.store(version, Relaxed);
        h.pid.store(pid, Relaxed);
        h.capacity.store(2, Relaxed);
        h.used.store(1000, Relaxed);
        h.closed.connections.store(3, Relaxed);
        h.closed.stayed.count(Why::NoPeer);
        h.closed.returned.count(Why::Urgent);
        h.program[0].store(b'x', Relaxed);
        // SAFETY: as above; records begin at this offset.
        let c = unsafe { &*at.byte_add(CONNS_OFFSET).cast::<ConnStats>() };
        c.gen.store(5, Relaxed);
        c.why.store(Why::NoPeer as u8, Relaxed);
        c.local.port.store(80, Relaxed);
        c.tx_bytes_tcp.store(9, Relaxed);
        // SAFETY: nobody uses the mapping any more.
        unsafe { libc::munmap(at, len) };
        file
    }

    fn path(file: &File) -> std::path::PathBuf {
        format!("/proc/self/fd/{}", file.as_raw_fd()).into()
    }

    #[test]
    fn a_state_is_read() {
        let p = read(&path(&memfd(VERSION, 7))).unwrap();
        assert_eq!((p.pid, p.program.as_str(), p.connections.len()), (7, "x", 1));
        assert_eq!((p.totals.connections, p.totals.tx_bytes_tcp), (4, 9));
        assert_eq!(p.totals.stayed, Reasons::from([(Why::NoPeer.text().into(), 2)]));
        assert_eq!(p.totals.returned, Reasons::from([(Why::Urgent.text().into(), 1)]));
        let json = serde_json::to_value(&p).unwrap();
        assert_eq!(json["connections"][0]["local"], "[::]:80");
        assert_eq!(json["connections"][0]["link"], serde_json::Value::Null);
        assert_eq!(json["connections"][0]["why"], Why::NoPeer.text());
        assert_eq!(serde_json::from_value::<Process>(json).unwrap(), p);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let file = memfd(VERSION + 1, 7);
        assert!(matches!(read(&path(&file)), Err(Missing::Foreign(w)) if w.contains("version")));
        file.set_len(100).unwrap();
        assert!(matches!(read(&path(&file)), Err(Missing::Foreign(w)) if w.contains("short")));
        let file = memfd(VERSION, 7);
        file.set_len(CONNS_OFFSET as u64 + 10).unwrap();
        assert_eq!(read(&path(&file)).unwrap().connections.len(), 0);
    }

    #[test]
    fn a_process_is_found_by_its_fds() {
        let me = std::process::id();
        // Another process's state, as a forked child has it, is not ours.
        let parents = memfd(VERSION, me + 1);
        // Other tests of this process have memfds as well, some that cannot be understood: only ours passes.
        assert!(matches!(of(me), Err(Missing::NoState | Missing::Foreign(_))));
        drop(parents);
        let _mine = memfd(VERSION, me);
        assert_eq!(of(me).unwrap().pid, me);
        assert_eq!(of(u32::MAX), Err(Missing::Gone));
        assert!(pids().contains(&me));
    }
}
