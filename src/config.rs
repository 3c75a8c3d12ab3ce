//! The settings of this process, read once from its environment and from the
//! rules file.
//!
//! The first call may come from any hook in any thread, in a signal handler,
//! or in a child between `fork` and `exec`. So there is no lock: whoever comes
//! first parses into memory of its own (`mmap`, not the program's allocator)
//! and publishes it with one compare-and-swap; who loses that race throws its
//! copy away.
//!
//! A value that cannot be understood is named in the log, with what was
//! expected, and the default holds.

use crate::log::{self, Level, Quoted};
use crate::rules::Rules;
use crate::sys::sys;
use crate::userdb;
use core::ffi::c_char;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicPtr, Ordering};

/// The largest ring, in bytes.
pub const RING_LARGEST: usize = 64 << 20;

/// Which links this process may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links {
    /// Shared memory, between processes of one host.
    pub shm: bool,
    /// RDMA, between hosts.
    pub verbs: bool,
    /// `verbs` was asked for by name, so that software devices (rxe, siw) count too.
    pub verbs_named: bool,
}

/// How long a call that must wait looks at its rings before it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spin {
    /// As long as it has paid for itself lately.
    Auto,
    /// This many microseconds.
    Us(u32),
}

/// Text of at most `N - 1` bytes in place, always followed by a NUL.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Text<const N: usize> {
    buf: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    /// Nothing.
    pub const EMPTY: Self = Text { buf: [0; N], len: 0 };

    /// A copy of `bytes`, if they fit and hold no NUL.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut t = Self::EMPTY;
        if bytes.len() >= N || bytes.contains(&0) {
            return None;
        }
        t.buf.get_mut(..bytes.len())?.copy_from_slice(bytes);
        t.len = bytes.len();
        Some(t)
    }

    /// A copy of as much of `bytes` as fits.
    pub fn cut(bytes: &[u8]) -> Self {
        let n = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len()).min(N.saturating_sub(1));
        bytes.get(..n).and_then(Self::new).unwrap_or(Self::EMPTY)
    }

    /// The bytes without the NUL.
    pub fn as_bytes(&self) -> &[u8] {
        self.buf.get(..self.len).unwrap_or(&[])
    }

    /// The bytes with the NUL.
    pub fn as_bytes_with_nul(&self) -> &[u8] {
        self.buf.get(..=self.len).unwrap_or(b"\0")
    }

    /// As text for C; valid as long as `self`.
    pub fn as_ptr(&self) -> *const c_char {
        self.as_bytes_with_nul().as_ptr().cast()
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Replaces `%p` by the process id and `%%` by `%`; `None` if it does not fit.
    pub fn expand(&self, pid: u32) -> Option<Self> {
        let mut out = Self::EMPTY;
        let mut bytes = self.as_bytes().iter().copied();
        while let Some(b) = bytes.next() {
            match b {
                b'%' => match bytes.next() {
                    Some(b'p') => write!(out, "{pid}").ok()?,
                    Some(b'%') => out.push(b'%')?,
                    Some(other) => {
                        out.push(b'%')?;
                        out.push(other)?;
                    }
                    None => out.push(b'%')?,
                },
                b => out.push(b)?,
            }
        }
        Some(out)
    }

    fn push(&mut self, b: u8) -> Option<()> {
        if self.len + 1 >= N {
            return None;
        }
        *self.buf.get_mut(self.len)? = b;
        self.len += 1;
        Some(())
    }
}

impl<const N: usize> fmt::Write for Text<N> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        s.bytes().try_for_each(|b| self.push(b)).ok_or(fmt::Error)
    }
}

impl<const N: usize> fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Quoted(self.as_bytes()), f)
    }
}

/// A path in a setting.
pub type Path = Text<1024>;

/// Most users and groups that `RINGSOCK_PEERS` can come to, members of groups included.
pub const MAX_PEERS: usize = 64;

/// Whose processes may be linked with this one.
#[derive(Debug, Clone, Copy)]
pub struct Peers {
    any: bool,
    same_user: bool,
    uids: [u32; MAX_PEERS],
    n_uids: usize,
    gids: [u32; MAX_PEERS],
    n_gids: usize,
}

impl Peers {
    const ANY: Peers = Peers { any: true, ..Peers::NOBODY };
    const NOBODY: Peers =
        Peers { any: false, same_user: false, uids: [0; MAX_PEERS], n_uids: 0, gids: [0; MAX_PEERS], n_gids: 0 };

    /// Whether a peer with these effective ids is one of them; `me` is our effective user.
    fn allows(&self, uid: u32, gid: u32, me: u32) -> bool {
        self.any
            || (self.same_user && uid == me)
            || self.uids.iter().take(self.n_uids).any(|&u| u == uid)
            || self.gids.iter().take(self.n_gids).any(|&g| g == gid)
    }

    fn add_uid(&mut self, uid: u32) -> Option<()> {
        *self.uids.get_mut(self.n_uids)? = uid;
        self.n_uids += 1;
        Some(())
    }

    fn add_gid(&mut self, gid: u32) -> Option<()> {
        *self.gids.get_mut(self.n_gids)? = gid;
        self.n_gids += 1;
        Some(())
    }
}

/// All settings of this process.
pub struct Config {
    /// `RINGSOCK_LINKS`.
    pub links: Links,
    /// `RINGSOCK_SPIN_US`.
    pub spin: Spin,
    /// `RINGSOCK_RING_BYTES`: size of a direction's first ring in bytes, a power of two.
    pub ring_bytes: usize,
    /// `RINGSOCK_RING_MAX`: size in bytes that a ring may grow to, a power of two, at least `ring_bytes`.
    pub ring_max: usize,
    /// `RINGSOCK_IDLE`: after so many seconds memory that links do not need goes back to the kernel; 0: never.
    pub idle_s: u32,
    /// `RINGSOCK_PEERS`; ask [`peer_allowed`].
    pub peers: Peers,
    /// `RINGSOCK_UPGRADE_AFTER`: I/O calls on a connection before it looks for its peer.
    pub upgrade_after: u32,
    /// `RINGSOCK_UPGRADE_BYTES`: bytes on a connection, both directions, before it looks for its peer.
    pub upgrade_bytes: u64,
    /// `RINGSOCK_LOG`, the level.
    pub log_level: Level,
    /// `RINGSOCK_LOG`, the file; `None` is stderr. `%p` is not expanded.
    pub log_to: Option<Path>,
    /// `RINGSOCK_REPORT`; `%p` is not expanded, because a forked child has another one.
    pub report: Option<Path>,
    /// `RINGSOCK_RULES`: the file that was asked for.
    pub rules_path: Option<Path>,
    /// What that file says; ask [`crate::rules`].
    pub rules: Rules,
    /// `RINGSOCK_DEVICE`: name of the RDMA device for `verbs`; empty means to choose.
    pub device: Text<64>,
    /// `RINGSOCK_GID_INDEX`: index in the device's GID table; `None` means to choose.
    pub gid_index: Option<u8>,
    /// `RINGSOCK_ISOLATION`: each connection with another host has a link, and so keys, of its own.
    pub strict: bool,
    /// `RINGSOCK_TEST_PROTOCOL`: the protocol version to announce instead of our own, for tests.
    pub test_protocol: Option<u32>,
    /// `RINGSOCK_TEST_LAG`: for how many microseconds the library sleeps wherever others may come in between, for tests.
    pub test_lag: u32,
    /// `RINGSOCK_CHAOS`: the seed of random upgrades and returns, for tests; `None` is off.
    pub chaos: Option<u64>,
    complaints: Complaints,
}

/// A setting, as the command line, the rules file and the documents know it.
#[derive(Debug)]
pub struct Setting {
    /// Name in the environment.
    pub env: &'static str,
    /// What is understood, for people.
    pub expected: &'static str,
    /// The default, as it would be written.
    pub default: &'static str,
}

impl Setting {
    /// Whether `key` is the name of this setting: as in the environment, or without `RINGSOCK_`, in any case.
    pub fn named(&self, key: &[u8]) -> bool {
        let env = self.env.as_bytes();
        env.eq_ignore_ascii_case(key) || env.get(PREFIX.len()..).is_some_and(|short| short.eq_ignore_ascii_case(key))
    }
}

/// Whether a value of this setting would be understood, for who offers it to others.
pub fn understood(setting: &Setting, value: &[u8]) -> bool {
    let Some(&id) = Id::ALL.iter().find(|id| id.setting().env == setting.env) else { return false };
    let mut config = default_config();
    config.apply(id, value);
    config.complaints.n == 0
}

const PREFIX: &str = "RINGSOCK_";

macro_rules! settings {
    ($($id:ident, $env:literal, $expected:literal, $default:literal;)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(usize)]
        enum Id { $($id,)* }
        /// Every setting.
        pub const SETTINGS: &[Setting] =
            &[$(Setting { env: $env, expected: $expected, default: $default },)*];
        impl Id {
            const ALL: &'static [Id] = &[$(Id::$id,)*];
            const fn setting(self) -> &'static Setting {
                match self { $(Id::$id => &Setting { env: $env, expected: $expected, default: $default },)* }
            }
        }
    };
}
settings! {
    Log, "RINGSOCK_LOG", "off, error, warn, info, debug or trace, then optionally `,stderr` or `,/path` (%p is the pid)", "warn,stderr";
    Rules, "RINGSOCK_RULES", "the path of a rules file", "";
    Links, "RINGSOCK_LINKS", "auto, none, or a list of shm and verbs", "auto";
    SpinUs, "RINGSOCK_SPIN_US", "auto, or 0 to 1000000 microseconds", "auto";
    RingBytes, "RINGSOCK_RING_BYTES", "a power of two from 4K to 4M bytes", "16K";
    RingMax, "RINGSOCK_RING_MAX", "a power of two from RINGSOCK_RING_BYTES to 64M bytes", "4M";
    Idle, "RINGSOCK_IDLE", "0 to 86400 seconds", "60";
    Peers, "RINGSOCK_PEERS", "any, same-user, or a list of users and @groups, names or numbers", "any";
    UpgradeAfter, "RINGSOCK_UPGRADE_AFTER", "0 to 1000000 calls", "8";
    UpgradeBytes, "RINGSOCK_UPGRADE_BYTES", "0 to 1G bytes", "64K";
    Report, "RINGSOCK_REPORT", "a path of at most 1023 bytes (%p is the pid)", "";
    Device, "RINGSOCK_DEVICE", "the name of an RDMA device, at most 63 bytes", "";
    GidIndex, "RINGSOCK_GID_INDEX", "auto, or 0 to 255", "auto";
    Isolation, "RINGSOCK_ISOLATION", "shared or strict", "shared";
    TestProtocol, "RINGSOCK_TEST_PROTOCOL", "a number from 0 to 4294967295", "";
    TestLag, "RINGSOCK_TEST_LAG", "0 to 100000 us", "0";
    Chaos, "RINGSOCK_CHAOS", "a number from 0 to 18446744073709551615", "";
}

/// What was wrong with the settings, to be logged once the log itself is set up.
#[derive(Clone, Copy)]
struct Complaints {
    list: [Option<Complaint>; SETTINGS.len()],
    n: usize,
    /// A name in `RINGSOCK_PEERS` that this host does not know.
    unknown_peer: Option<Text<64>>,
    too_many_peers: bool,
}

#[derive(Clone, Copy)]
struct Complaint {
    id: Id,
    value: Text<96>,
}

impl Complaints {
    const NONE: Complaints =
        Complaints { list: [None; SETTINGS.len()], n: 0, unknown_peer: None, too_many_peers: false };

    fn add(&mut self, id: Id, value: &[u8]) {
        if let Some(slot) = self.list.get_mut(self.n) {
            *slot = Some(Complaint { id, value: Text::cut(value) });
            self.n += 1;
        }
    }
}

const fn default_config() -> Config {
    Config {
        links: Links { shm: true, verbs: true, verbs_named: false },
        spin: Spin::Auto,
        ring_bytes: 16 << 10,
        ring_max: 4 << 20,
        idle_s: 60,
        peers: Peers::ANY,
        upgrade_after: 8,
        upgrade_bytes: 64 << 10,
        log_level: Level::Warn,
        log_to: None,
        report: None,
        rules_path: None,
        rules: Rules::EMPTY,
        device: Text::EMPTY,
        gid_index: None,
        strict: false,
        test_protocol: None,
        test_lag: 0,
        chaos: None,
        complaints: Complaints::NONE,
    }
}

/// What holds when there is not even memory for the settings.
static DEFAULT: Config = default_config();
static CONFIG: AtomicPtr<Config> = AtomicPtr::new(core::ptr::null_mut());

/// The settings of this process. After the first call this costs one load.
#[inline]
pub fn get() -> &'static Config {
    let p = CONFIG.load(Ordering::Acquire);
    if p.is_null() {
        return first();
    }
    // SAFETY: a published pointer is to a complete `Config` that is never changed or freed.
    unsafe { &*p }
}

/// Whether `RINGSOCK_PEERS` lets a process with these effective ids (`SO_PEERCRED`) be linked with us.
pub fn peer_allowed(uid: u32, gid: u32) -> bool {
    // SAFETY: takes no arguments.
    let me = unsafe { sys!(libc::SYS_geteuid) }.map_or(u32::MAX, |u| u as u32);
    get().peers.allows(uid, gid, me)
}

/// The protocol version to announce, given our own.
pub fn protocol(own: u32) -> u32 {
    get().test_protocol.unwrap_or(own)
}

#[cold]
fn first() -> &'static Config {
    let size = core::mem::size_of::<Config>();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new private mapping.
    let page = unsafe { sys!(libc::SYS_mmap, 0, size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    let Ok(page) = page else { return &DEFAULT };
    let mine = page as *mut Config;
    // SAFETY: the mapping is page aligned, large enough and nobody else's.
    unsafe { mine.write(default_config()) };
    // SAFETY: just initialised, and not published yet.
    let config = unsafe { &mut *mine };
    // In a setuid program the environment is another user's, and it names files to write.
    // SAFETY: getauxval reads a table of the process; it is not interposed.
    let env = if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 { Env(core::ptr::null()) } else { Env::of_process() };
    config.fill(env);
    match CONFIG.compare_exchange(core::ptr::null_mut(), mine, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            crate::chaos::set(config.chaos.is_some());
            config.tell();
            config
        }
        Err(winner) => {
            config.rules.free();
            // SAFETY: our own mapping, which nobody else has seen.
            let _ = unsafe { sys!(libc::SYS_munmap, mine, size) };
            // SAFETY: as in `get`.
            unsafe { &*winner }
        }
    }
}

extern "C" {
    static environ: *const *const c_char;
}

/// An environment: a list of `NAME=value` that ends with a null pointer.
#[derive(Clone, Copy)]
struct Env(*const *const c_char);

impl Env {
    fn of_process() -> Env {
        // SAFETY: reads the pointer that libc keeps. A thread that changes the
        // environment at the same time is the program's race, as with `getenv`.
        Env(unsafe { environ })
    }

    fn entries(self) -> impl Iterator<Item = &'static [u8]> {
        let mut at = self.0;
        core::iter::from_fn(move || {
            if at.is_null() {
                return None;
            }
            // SAFETY: `at` is inside the list, whose last element is null.
            let entry = unsafe { *at };
            if entry.is_null() {
                return None;
            }
            // SAFETY: not past the null element.
            at = unsafe { at.add(1) };
            // SAFETY: entries are C strings.
            Some(unsafe { core::ffi::CStr::from_ptr(entry) }.to_bytes())
        })
    }

    fn get(self, name: &str) -> Option<&'static [u8]> {
        self.entries().find_map(|e| e.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
    }
}

impl Config {
    fn fill(&mut self, env: Env) {
        if let Some(path) = env.get(Id::Rules.setting().env).filter(|v| !v.is_empty()) {
            self.apply(Id::Rules, path);
        }
        if let Some(path) = self.rules_path {
            self.rules = Rules::load(&path);
        }
        for &id in Id::ALL {
            if id == Id::Rules {
                continue;
            }
            let setting = id.setting();
            let Some(value) = env.get(setting.env).or_else(|| self.rules.value(setting)) else { continue };
            // An empty variable is how a shell unsets one for a single command.
            if !value.is_empty() || id == Id::Links {
                self.apply(id, value);
            }
        }
        if self.ring_max < self.ring_bytes {
            let mut text = Text::<96>::EMPTY;
            let _ = write!(text, "{}", self.ring_max);
            self.complaints.add(Id::RingMax, text.as_bytes());
            self.ring_max = self.ring_bytes.max(default_config().ring_max);
        }
    }

    /// Takes one value; what cannot be understood is noted and changes nothing.
    fn apply(&mut self, id: Id, value: &[u8]) {
        let understood = match id {
            Id::Links => parse_links(value).map(|v| self.links = v),
            Id::SpinUs => {
                parse_auto(value, 0, 1_000_000).map(|v| self.spin = v.map_or(Spin::Auto, |us| Spin::Us(us as u32)))
            }
            Id::RingBytes => parse_power(value, 4 << 10, 4 << 20).map(|v| self.ring_bytes = v),
            Id::RingMax => parse_power(value, 4 << 10, RING_LARGEST as u64).map(|v| self.ring_max = v),
            Id::Idle => parse_number(value, 0, 86_400).map(|v| self.idle_s = v as u32),
            Id::Peers => parse_peers(value, &mut self.complaints).map(|v| self.peers = v),
            Id::UpgradeAfter => parse_number(value, 0, 1_000_000).map(|v| self.upgrade_after = v as u32),
            Id::UpgradeBytes => parse_size(value).filter(|&v| v <= 1 << 30).map(|v| self.upgrade_bytes = v),
            Id::Log => parse_log(value).map(|(level, to)| {
                self.log_level = level;
                self.log_to = to;
            }),
            Id::Report => Path::new(value).map(|v| self.report = Some(v)),
            Id::Rules => Path::new(value).map(|v| self.rules_path = Some(v)),
            Id::Device => Text::new(value).map(|v| self.device = v),
            Id::GidIndex => parse_auto(value, 0, 255).map(|v| self.gid_index = v.map(|n| n as u8)),
            Id::Isolation => parse_isolation(value).map(|v| self.strict = v),
            Id::TestProtocol => {
                parse_number(value, 0, u64::from(u32::MAX)).map(|v| self.test_protocol = Some(v as u32))
            }
            Id::TestLag => parse_number(value, 0, 100_000).map(|v| self.test_lag = v as u32),
            Id::Chaos => parse_number(value, 0, u64::MAX).map(|v| self.chaos = Some(v)),
        };
        if understood.is_none() {
            self.complaints.add(id, value);
            if id == Id::Peers {
                // A list that was meant to keep users out must not let all in.
                self.peers = Peers { same_user: true, ..Peers::NOBODY };
            }
        }
    }

    /// Sets up the log, and logs what was wrong.
    fn tell(&self) {
        // SAFETY: takes no arguments.
        let pid = unsafe { sys!(libc::SYS_getpid) }.unwrap_or(0) as u32;
        let path = self.log_to.and_then(|p| p.expand(pid));
        if let Err(e) = log::init(self.log_level, path.as_ref().map(|p| p.as_bytes_with_nul())) {
            let shown = path.unwrap_or(Path::EMPTY);
            log::warn!("cannot open the log file {} (error {e}), logging to stderr", Quoted(shown.as_bytes()));
        }
        for c in self.complaints.list.iter().flatten() {
            let s = c.id.setting();
            let holds = if c.id == Id::Peers { "same-user" } else { s.default };
            log::warn!(
                "{}={} is not understood (expected {}); {} holds",
                s.env,
                Quoted(c.value.as_bytes()),
                s.expected,
                if holds.is_empty() { "no value" } else { holds }
            );
        }
        if let Some(name) = &self.complaints.unknown_peer {
            log::warn!("RINGSOCK_PEERS: no user or group {} on this host; it allows nobody", Quoted(name.as_bytes()));
        }
        if self.complaints.too_many_peers {
            log::warn!("RINGSOCK_PEERS: only the first {MAX_PEERS} users and groups count");
        }
        if let Some(path) = &self.rules_path {
            self.rules.tell(path);
        }
    }
}

fn parse_links(value: &[u8]) -> Option<Links> {
    let mut links = Links { shm: false, verbs: false, verbs_named: false };
    match value {
        b"" | b"none" => return Some(links),
        b"auto" => return Some(DEFAULT.links),
        _ => {}
    }
    for item in value.split(|&b| b == b',') {
        match item.trim_ascii() {
            b"shm" => links.shm = true,
            b"verbs" => {
                links.verbs = true;
                links.verbs_named = true;
            }
            _ => return None,
        }
    }
    Some(links)
}

fn parse_isolation(value: &[u8]) -> Option<bool> {
    match value.trim_ascii() {
        b"shared" => Some(false),
        b"strict" => Some(true),
        _ => None,
    }
}

/// A decimal number within bounds.
pub(crate) fn parse_number(value: &[u8], least: u64, most: u64) -> Option<u64> {
    let digits = value.trim_ascii();
    if !digits.first()?.is_ascii_digit() {
        return None;
    }
    let n: u64 = core::str::from_utf8(digits).ok()?.parse().ok()?;
    (least..=most).contains(&n).then_some(n)
}

/// `auto` (as `None`) or a number within bounds.
fn parse_auto(value: &[u8], least: u64, most: u64) -> Option<Option<u64>> {
    match value.trim_ascii() {
        b"auto" => Some(None),
        v => parse_number(v, least, most).map(Some),
    }
}

/// Bytes, with an optional suffix K, M or G (powers of 1024).
fn parse_size(value: &[u8]) -> Option<u64> {
    let value = value.trim_ascii();
    let (digits, shift) = match value.split_last()? {
        (b'k' | b'K', rest) => (rest, 10),
        (b'm' | b'M', rest) => (rest, 20),
        (b'g' | b'G', rest) => (rest, 30),
        _ => (value, 0),
    };
    parse_number(digits, 0, u64::MAX >> shift).map(|n| n << shift)
}

fn parse_power(value: &[u8], least: u64, most: u64) -> Option<usize> {
    parse_size(value).filter(|n| n.is_power_of_two() && (least..=most).contains(n)).map(|n| n as usize)
}

fn parse_log(value: &[u8]) -> Option<(Level, Option<Path>)> {
    let comma = value.iter().position(|&b| b == b',');
    let (level, to) = match comma {
        Some(at) => (value.get(..at)?, value.get(at + 1..)?),
        None => (value, &b"stderr"[..]),
    };
    let level = Level::parse(level.trim_ascii())?;
    match to.trim_ascii() {
        b"stderr" => Some((level, None)),
        path if path.starts_with(b"/") => Some((level, Some(Path::new(path)?))),
        _ => None,
    }
}

fn parse_peers(value: &[u8], complaints: &mut Complaints) -> Option<Peers> {
    let value = value.trim_ascii();
    if value == b"any" {
        return Some(Peers::ANY);
    }
    let mut peers = Peers::NOBODY;
    for item in value.split(|&b| b == b',') {
        let item = item.trim_ascii();
        let added = match item.strip_prefix(b"@") {
            Some(group) => add_group(&mut peers, group, complaints)?,
            None if item == b"same-user" => {
                peers.same_user = true;
                Some(())
            }
            None => add_user(&mut peers, item, complaints)?,
        };
        if added.is_none() {
            complaints.too_many_peers = true;
        }
    }
    Some(peers)
}

/// The outer `None` is for what cannot be a name, the inner for a full list.
fn add_user(peers: &mut Peers, name: &[u8], complaints: &mut Complaints) -> Option<Option<()>> {
    if let Some(uid) = parse_number(name, 0, u64::from(u32::MAX)) {
        return Some(peers.add_uid(uid as u32));
    }
    if !userdb::is_name(name) || name == b"any" {
        return None;
    }
    match userdb::uid_of(name) {
        Some(uid) => Some(peers.add_uid(uid)),
        None => {
            complaints.unknown_peer = Some(Text::cut(name));
            Some(Some(()))
        }
    }
}

/// As [`add_user`], for a group: those whose main group it is, and its listed members.
fn add_group(peers: &mut Peers, name: &[u8], complaints: &mut Complaints) -> Option<Option<()>> {
    if let Some(gid) = parse_number(name, 0, u64::from(u32::MAX)) {
        return Some(peers.add_gid(gid as u32));
    }
    if !userdb::is_name(name) {
        return None;
    }
    let mut fits = Some(());
    match userdb::group(name, |uid| fits = fits.and(peers.add_uid(uid))) {
        Some(gid) => Some(fits.and(peers.add_gid(gid))),
        None => {
            complaints.unknown_peer = Some(Text::cut(name));
            Some(Some(()))
        }
    }
}

#[cfg(test)]
mod tests;
