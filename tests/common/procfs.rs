//! What the kernel says of a process and of the host: nothing may be left behind.

use std::time::{Duration, Instant};

/// What a process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holdings {
    /// Open fds.
    pub fds: usize,
    /// Threads.
    pub threads: usize,
    /// Mappings of the library's memfds.
    pub maps: usize,
}

impl Holdings {
    /// Of a living process.
    pub fn of(pid: u32) -> Holdings {
        let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, |d| d.count());
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let maps = maps.lines().filter(|l| l.contains("memfd:ringsock")).count();
        Holdings { fds: count("fd"), threads: count("task"), maps }
    }

    /// Whether this is at most as much as `base` in every way.
    pub fn within(&self, base: &Holdings) -> bool {
        self.fds <= base.fds && self.threads <= base.threads && self.maps <= base.maps
    }

    /// The smallest of each of several looks during `time`.
    pub fn settled(pid: u32, time: Duration) -> Holdings {
        let until = Instant::now() + time;
        let mut low = Holdings::of(pid);
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
            let h = Holdings::of(pid);
            low = Holdings { fds: low.fds.min(h.fds), threads: low.threads.min(h.threads), maps: low.maps.min(h.maps) };
        }
        low
    }

    /// Waits until the process holds no more than `base`; what it still holds when `time` is over.
    pub fn back_to(pid: u32, base: &Holdings, time: Duration) -> Result<(), Holdings> {
        let until = Instant::now() + time;
        loop {
            let h = Holdings::of(pid);
            if h.within(base) {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(h);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What the fds of a process are, for a message about a leak.
pub fn fd_list(pid: u32) -> String {
    let Ok(dir) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return String::new() };
    let mut v: Vec<String> = dir
        .flatten()
        .filter_map(|e| std::fs::read_link(e.path()).ok().map(|t| (e.file_name(), t)))
        .map(|(n, t)| format!("{}={}", n.to_string_lossy(), t.display()))
        .collect();
    v.sort();
    v.join(" ")
}

/// Abstract Unix names of the library that concern this TCP port: name and socket type.
pub fn rendezvous_names(port: u16) -> Vec<(String, i32)> {
    let text = std::fs::read("/proc/net/unix").unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let port = format!(":{port}");
    text.lines()
        .filter_map(|l| {
            let mut words = l.split_whitespace();
            let kind = i32::from_str_radix(words.nth(4)?, 16).ok()?;
            let name = words.nth(2)?.strip_prefix('@')?;
            let ours = name.contains("ringsock")
                && name
                    .match_indices(&port)
                    .any(|(i, _)| !name[i + port.len()..].starts_with(|c: char| c.is_ascii_digit()));
            ours.then(|| (name.to_string(), kind))
        })
        .collect()
}

/// Waits until no name of the library is left for this port.
pub fn no_names(port: u16, time: Duration) -> Result<(), String> {
    let until = Instant::now() + time;
    loop {
        let left = rendezvous_names(port);
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(format!("names left in /proc/net/unix: {left:?}"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
