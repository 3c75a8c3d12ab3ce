//! The rules file: which programs and which connections may leave TCP, and
//! settings for them.
//!
//! ```text
//! # comment
//! deny  peer 10.1.0.0/16             # for every program
//! program redis-*                    # what follows is for these programs only
//! set   spin_us=50
//! allow local *:6379
//! deny
//! program *                          # for every program again
//! allow program nginx peer [fd00::/8]:8000-8999
//! ```
//!
//! The first rule that fits a connection decides; without one it is allowed.
//! The first `set` of a setting holds, and the environment wins over it.
//! A program name with a `/` is matched with the path of the executable, one
//! without it with the executable's file name and with the process's own name
//! (`comm`). `*` and `?` match any text and any character.

use crate::config::{parse_number, Path, Setting, SETTINGS};
use crate::log::{self, Quoted};
use crate::sys::{sys, Errno};
use crate::textfile::{self, TextFile};
use core::net::{IpAddr, SocketAddr};

/// Largest rules file in bytes.
pub const MAX_BYTES: usize = 1 << 20;

/// Whether the rules let this connection leave TCP.
pub fn allows(local: &SocketAddr, peer: &SocketAddr) -> bool {
    crate::config::get().rules.allows(local, peer)
}

/// Whether the rules let any connection of this program leave TCP.
pub fn program_allowed() -> bool {
    !crate::config::get().rules.all_denied
}

/// A range of addresses and ports. All zero bytes are "port 0 of any address".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Net {
    /// IPv6 address in network order; IPv4 is mapped.
    addr: [u8; 16],
    /// How many leading bits of it count.
    bits: u8,
    first_port: u16,
    last_port: u16,
}

impl Net {
    const ANY: Net = Net { addr: [0; 16], bits: 0, first_port: 0, last_port: u16::MAX };

    fn contains(&self, at: &SocketAddr) -> bool {
        let port = at.port();
        if port < self.first_port || port > self.last_port {
            return false;
        }
        let ours = u128::from_be_bytes(self.addr);
        let theirs = u128::from_be_bytes(mapped(at.ip()));
        // A shift by all 128 bits is no shift for the processor, but here it means "any".
        let unequal = ours ^ theirs;
        self.bits == 0 || unequal.checked_shr(128 - u32::from(self.bits)).unwrap_or(0) == 0
    }

    /// `*`, `ADDRESS`, `ADDRESS/BITS`, each with `:PORT` or `:PORT-PORT`; IPv6 with a port in brackets.
    fn parse(text: &[u8]) -> Option<Net> {
        let text = core::str::from_utf8(text).ok()?;
        let (addr, ports) = if let Some(rest) = text.strip_prefix('[') {
            let (addr, after) = rest.split_once(']')?;
            (addr, if after.is_empty() { None } else { Some(after.strip_prefix(':')?) })
        } else if text.bytes().filter(|&b| b == b':').count() == 1 {
            let (addr, ports) = text.split_once(':')?;
            (addr, Some(ports))
        } else {
            (text, None)
        };
        let mut net = Net::ANY;
        if addr != "*" {
            let (ip, bits) = match addr.split_once('/') {
                Some((ip, bits)) => (ip, Some(bits)),
                None => (addr, None),
            };
            let ip: IpAddr = ip.parse().ok()?;
            let width = if ip.is_ipv4() { 32 } else { 128 };
            let bits = match bits {
                Some(b) => parse_number(b.as_bytes(), 0, width)?,
                None => width,
            };
            net.addr = mapped(ip);
            net.bits = (bits + 128 - width) as u8;
        }
        if let Some(ports) = ports.filter(|&p| p != "*") {
            let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
            net.first_port = parse_number(first.as_bytes(), 1, 65535)? as u16;
            net.last_port = parse_number(last.as_bytes(), u64::from(net.first_port), 65535)? as u16;
        }
        Some(net)
    }
}

fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// One `allow` or `deny` that is for this program.
#[derive(Debug, Clone, Copy)]
struct Rule {
    allow: bool,
    local: Net,
    peer: Net,
}

/// What a rules file says to this program.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    rules: &'static [Rule],
    /// The array that `rules` is the used part of.
    room: &'static [Rule],
    text: &'static [u8],
    /// The pairs of `set`, as (first line of the file's text that has one): looked up only at the start.
    settings: [Option<&'static [u8]>; SETTINGS.len()],
    all_denied: bool,
    unreadable: Option<Errno>,
    problems: Problems,
}

/// What is wrong in the file: the first problem in words, of some more the line numbers.
#[derive(Debug, Clone, Copy)]
struct Problems {
    first: Option<(u32, &'static str)>,
    more: [u32; 4],
    n_more: u32,
}

impl Problems {
    const NONE: Problems = Problems { first: None, more: [0; 4], n_more: 0 };

    fn add(&mut self, line: u32, what: &'static str) {
        if self.first.is_none() {
            self.first = Some((line, what));
            return;
        }
        if let Some(slot) = self.more.get_mut(self.n_more as usize) {
            *slot = line;
        }
        self.n_more += 1;
    }
}

/// The names that this program goes by.
struct Program<'a> {
    /// Path of the executable.
    exe: &'a [u8],
    /// Name of the process, at most 15 bytes.
    comm: &'a [u8],
}

impl Program<'_> {
    fn is(&self, pattern: &[u8]) -> bool {
        if pattern.contains(&b'/') {
            return glob(pattern, self.exe);
        }
        let file = self.exe.rsplit(|&b| b == b'/').next().unwrap_or(&[]);
        glob(pattern, file) || glob(pattern, self.comm)
    }
}

impl Rules {
    /// No rules: everything is allowed.
    pub(crate) const EMPTY: Rules = Rules {
        rules: &[],
        room: &[],
        text: &[],
        settings: [None; SETTINGS.len()],
        all_denied: false,
        unreadable: None,
        problems: Problems::NONE,
    };

    /// Reads a file. What is wrong with it is kept for [`Rules::tell`].
    pub(crate) fn load(path: &Path) -> Rules {
        let file = match TextFile::read(path.as_bytes_with_nul(), MAX_BYTES) {
            Ok(file) => file,
            Err(e) => return Rules { unreadable: Some(e), ..Rules::EMPTY },
        };
        let mut exe = [0u8; 4096];
        let link = b"/proc/self/exe\0";
        // SAFETY: the path is NUL-terminated and `exe` is as long as said.
        let n = unsafe { sys!(libc::SYS_readlinkat, libc::AT_FDCWD, link.as_ptr(), exe.as_mut_ptr(), exe.len()) };
        let comm = TextFile::read(b"/proc/self/comm\0", 4096).ok();
        let program = Program {
            exe: exe.get(..n.unwrap_or(0)).unwrap_or(&[]),
            comm: comm.as_ref().map_or(&b""[..], TextFile::bytes).trim_ascii_end(),
        };
        Rules::parse(file.leak(), &program)
    }

    fn parse(text: &'static [u8], program: &Program<'_>) -> Rules {
        let lines = text.iter().filter(|&&b| b == b'\n').count() + 1;
        // SAFETY: all zero bytes are a valid `Rule`.
        let room = match unsafe { textfile::zeroed_slice::<Rule>(lines) } {
            Ok(room) => room,
            Err(e) => return Rules { text, unreadable: Some(e), ..Rules::EMPTY },
        };
        let mut out = Rules { text, ..Rules::EMPTY };
        let mut n = 0;
        let mut ours = true;
        for (line, number) in text.split(|&b| b == b'\n').zip(1u32..) {
            let line = line.split(|&b| b == b'#').next().unwrap_or(&[]).trim_ascii();
            if line.is_empty() {
                continue;
            }
            match parse_line(line, program) {
                Ok(Line::Section(yes)) => ours = yes,
                Ok(Line::Set(index, value)) if ours => {
                    if let Some(slot) = out.settings.get_mut(index) {
                        slot.get_or_insert(value);
                    }
                }
                Ok(Line::Rule(Some(rule))) if ours => {
                    if let Some(slot) = room.get_mut(n) {
                        *slot = rule;
                        n += 1;
                    }
                }
                Ok(_) => {}
                Err(what) => out.problems.add(number, what),
            }
        }
        let room: &'static [Rule] = room;
        out.room = room;
        out.rules = room.get(..n).unwrap_or(&[]);
        // Denied as a whole if a rule for everything denies before any allows something.
        out.all_denied =
            out.rules.iter().find(|r| r.allow || (r.local == Net::ANY && r.peer == Net::ANY)).is_some_and(|r| !r.allow);
        out
    }

    fn allows(&self, local: &SocketAddr, peer: &SocketAddr) -> bool {
        self.rules.iter().find(|r| r.local.contains(local) && r.peer.contains(peer)).is_none_or(|r| r.allow)
    }

    /// The value that the file sets.
    pub(crate) fn value(&self, setting: &Setting) -> Option<&'static [u8]> {
        let index = SETTINGS.iter().position(|s| s.env == setting.env)?;
        *self.settings.get(index)?
    }

    /// Gives the memory back; only for rules that were never shown to anyone.
    pub(crate) fn free(&mut self) {
        let (text, room) = (self.text, self.room);
        *self = Rules::EMPTY;
        // SAFETY: both came from `textfile`, and the last references to them are gone.
        unsafe {
            textfile::free(text);
            textfile::free(room);
        }
    }

    /// Logs what was wrong with the file.
    pub(crate) fn tell(&self, path: &Path) {
        let name = Quoted(path.as_bytes());
        if let Some(e) = self.unreadable {
            let what = match e {
                libc::ENOENT => "it does not exist",
                libc::EACCES | libc::EPERM => "permission denied",
                libc::EFBIG => "it is larger than 1 MiB",
                libc::EISDIR => "it is a directory",
                libc::EINVAL => "it is not a regular file",
                _ => "it cannot be read",
            };
            log::warn!("rules file {name}: {what} (error {e}); no rules hold, every connection is allowed");
        }
        if let Some((line, what)) = self.problems.first {
            let p = &self.problems;
            let [a, b, c, d] = p.more;
            match p.n_more {
                0 => log::warn!("rules file {name} line {line}: {what}; the line is ignored"),
                1 => log::warn!("rules file {name} line {line}: {what}; it and line {a} are ignored"),
                2 => log::warn!("rules file {name} line {line}: {what}; it and lines {a}, {b} are ignored"),
                3 => log::warn!("rules file {name} line {line}: {what}; it and lines {a}, {b}, {c} are ignored"),
                n => log::warn!(
                    "rules file {name} line {line}: {what}; it and lines {a}, {b}, {c}, {d} ({n} in all) are ignored"
                ),
            }
        }
    }
}

enum Line {
    /// `program`: whether what follows is for us.
    Section(bool),
    /// `set`: index in [`SETTINGS`], and value.
    Set(usize, &'static [u8]),
    /// `allow` or `deny`, if it is for us.
    Rule(Option<Rule>),
}

fn parse_line(line: &'static [u8], program: &Program<'_>) -> Result<Line, &'static str> {
    let mut words = line.split(|b| b.is_ascii_whitespace()).filter(|w| !w.is_empty());
    let allow = match words.next() {
        Some(b"allow") => true,
        Some(b"deny") => false,
        Some(b"program") => {
            return match (words.next(), words.next()) {
                (Some(pattern), None) => Ok(Line::Section(program.is(pattern))),
                _ => Err("expected one name or pattern after `program`"),
            }
        }
        Some(b"set") => return parse_set(line.strip_prefix(b"set").unwrap_or(&[])),
        _ => return Err("expected `allow`, `deny`, `program` or `set`"),
    };
    let mut rule = Rule { allow, local: Net::ANY, peer: Net::ANY };
    let mut ours = true;
    while let Some(word) = words.next() {
        let what = words.next();
        let net = || {
            what.and_then(Net::parse).ok_or(
                "expected `*` or an address, optionally with /BITS and :PORT or :PORT-PORT, after `local` or `peer`",
            )
        };
        match word {
            b"local" => rule.local = net()?,
            b"peer" => rule.peer = net()?,
            b"program" => ours &= program.is(what.ok_or("expected a name or pattern after `program`")?),
            _ => return Err("expected `program`, `local` or `peer` after `allow` or `deny`"),
        }
    }
    Ok(Line::Rule(ours.then_some(rule)))
}

fn parse_set(text: &'static [u8]) -> Result<Line, &'static str> {
    const FORM: &str = "expected `set NAME=VALUE`";
    let equals = text.iter().position(|&b| b == b'=').ok_or(FORM)?;
    let key = text.get(..equals).ok_or(FORM)?.trim_ascii();
    let value = text.get(equals + 1..).ok_or(FORM)?.trim_ascii();
    if key.eq_ignore_ascii_case(b"rules") || key.eq_ignore_ascii_case(b"RINGSOCK_RULES") {
        return Err("a rules file cannot name another one");
    }
    let index = SETTINGS.iter().position(|s| s.named(key)).ok_or("`set` does not know this setting")?;
    Ok(Line::Set(index, value))
}

/// Whether `text` fits a pattern with `*` and `?`.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on after the last star, if what follows it does not fit here.
    let mut retry: Option<(usize, usize)> = None;
    loop {
        match (pattern.get(p), text.get(t)) {
            (Some(b'*'), _) => {
                retry = Some((p + 1, t));
                p += 1;
            }
            (Some(b'?'), Some(_)) => (p, t) = (p + 1, t + 1),
            (Some(a), Some(b)) if a == b => (p, t) = (p + 1, t + 1),
            (None, None) => return true,
            _ => match retry {
                Some((after, from)) if from < text.len() => {
                    retry = Some((after, from + 1));
                    (p, t) = (after, from + 1);
                }
                _ => return false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REDIS: Program<'static> = Program { exe: b"/usr/bin/redis-server", comm: b"redis-main" };

    fn parse(text: &'static str) -> Rules {
        Rules::parse(text.as_bytes(), &REDIS)
    }

    fn allows(rules: &Rules, local: &str, peer: &str) -> bool {
        rules.allows(&local.parse().unwrap(), &peer.parse().unwrap())
    }

    #[test]
    fn patterns() {
        for (pattern, text, fits) in [
            ("*", "", true),
            ("", "", true),
            ("redis-*", "redis-server", true),
            ("*s?rver", "redis-server", true),
            ("*a*b*c", "xxaxbxxbxc", true),
            ("redis", "redis-server", false),
            ("?", "", false),
            ("*x", "redis", false),
        ] {
            assert_eq!(glob(pattern.as_bytes(), text.as_bytes()), fits, "{pattern} {text}");
        }
    }

    #[test]
    fn nets() {
        let inside = |net: &str, at: &str| Net::parse(net.as_bytes()).unwrap().contains(&at.parse().unwrap());
        assert!(inside("10.0.0.0/8", "10.9.9.9:1"));
        assert!(inside("10.9.0.0/8:5-7", "[::ffff:10.1.1.1]:7"));
        assert!(!inside("10.0.0.0/8:5-7", "10.1.1.1:8"));
        assert!(!inside("10.0.0.0/8", "11.1.1.1:8"));
        assert!(inside("0.0.0.0/0", "1.2.3.4:1") && !inside("0.0.0.0/0", "[fe80::1]:1"));
        assert!(inside("::/0", "[fe80::1]:1") && inside("*", "1.2.3.4:1") && inside("*:*", "1.2.3.4:1"));
        assert!(inside("[::1]:80", "[::1]:80") && !inside("[::1]:80", "[::1]:81") && !inside("::1", "[::2]:80"));
        assert!(inside("*:6379", "1.2.3.4:6379") && !inside("*:6379", "1.2.3.4:6380"));
        for bad in
            ["", "x", "10.0.0.0/33", "10.0.0.1:", "10.0.0.1:0", "1.1.1.1:9-8", "[::1", "[::1]80", "::1/129", "*:x"]
        {
            assert_eq!(Net::parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let rules = parse("deny peer 10.1.0.0/16 # no\nallow peer 10.0.0.0/8\n\ndeny\n");
        assert!(rules.problems.first.is_none() && !rules.all_denied);
        assert!(!allows(&rules, "1.1.1.1:1", "10.1.2.3:80"));
        assert!(allows(&rules, "1.1.1.1:1", "10.2.2.3:80"));
        assert!(!allows(&rules, "1.1.1.1:1", "9.9.9.9:80"));
        assert!(allows(&parse(""), "1.1.1.1:1", "9.9.9.9:80"));
    }

    #[test]
    fn programs_and_sections() {
        let rules = parse("deny program nginx\nprogram nginx\ndeny\nset spin_us=1\nprogram redis-*\nset spin_us=2\nset SPIN_US=3\nset RINGSOCK_LINKS = none\ndeny local *:6380\nprogram *\nallow\n");
        assert!(rules.problems.first.is_none());
        assert!(!allows(&rules, "1.1.1.1:6380", "9.9.9.9:80"));
        assert!(allows(&rules, "1.1.1.1:6379", "9.9.9.9:80"));
        let value = |key: &str| rules.value(SETTINGS.iter().find(|s| s.env == key).unwrap());
        assert_eq!(value("RINGSOCK_SPIN_US"), Some(&b"2"[..]));
        assert_eq!(value("RINGSOCK_LINKS"), Some(&b"none"[..]));
        assert_eq!(value("RINGSOCK_PEERS"), None);
        assert!(parse("deny").all_denied && parse("deny local *:1\ndeny program redis-main").all_denied);
        assert!(parse("deny program /usr/bin/redis*").all_denied && !parse("deny program /bin/redis*").all_denied);
        assert!(!parse("allow local *:1\ndeny").all_denied && !parse("deny local *:1").all_denied);
    }

    #[test]
    fn problems_are_named_by_line() {
        let rules = parse("alow\ndeny peer 300.1.1.1\nset speed=3\nset spin_us\nprogram\nprogram a b\nset rules=/x\nallow to *\ndeny local *:99\n");
        assert_eq!(rules.problems.first, Some((1, "expected `allow`, `deny`, `program` or `set`")));
        assert_eq!((rules.problems.more, rules.problems.n_more), ([2, 3, 4, 5], 7));
        assert!(!allows(&rules, "1.1.1.1:99", "9.9.9.9:80"), "the good lines hold");
    }

    #[test]
    fn any_bytes_are_survived() {
        let noise: &'static [u8] = Box::leak((0..65536u32).map(|i| (i.wrapping_mul(2654435761) >> 13) as u8).collect());
        let mut rules = Rules::parse(Box::leak(noise.to_vec().into_boxed_slice()), &REDIS);
        rules.text = &[];
        rules.free();
    }

    #[test]
    fn an_unreadable_file_allows_everything() {
        let rules = Rules::load(&Path::new(b"/nonexistent/rules").unwrap());
        assert_eq!(rules.unreadable, Some(libc::ENOENT));
        assert!(allows(&rules, "1.1.1.1:1", "9.9.9.9:80"));
    }
}
