//! What the end-to-end tests share: the artifacts, processes with and without the preload, the
//! reports that they write, and the assertion that bytes went over rings.
//!
//! Only the outside of the library is used: its environment variables and its report. Every wait
//! has a bound, and every process that is started here is ended here.

#![allow(dead_code)]

pub mod json;
pub mod procfs;

use json::Json;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Share of the bytes between two preloaded processes that must have gone over rings. These runs are short,
/// and on a busy machine the upgrade takes some milliseconds of them; long ones (`ci/redis_check.py --full`)
/// must reach 99 %.
pub const WANTED_SHARE: f64 = 0.95;

/// What one direction of a connection at full speed may send by TCP before its upgrade: some milliseconds
/// at memory speed.
pub const BULK_HEAD: u64 = 80 << 20;

/// The folder of the build's artifacts: where this test's own executable lies, one up.
pub fn artifacts() -> PathBuf {
    let exe = std::env::current_exe().expect("the test's own path");
    exe.ancestors().nth(2).expect("target/PROFILE/deps/TEST").to_path_buf()
}

fn artifact(name: &str) -> PathBuf {
    let p = artifacts().join(name);
    let how = if p.components().any(|c| c.as_os_str() == "release") { " --release" } else { "" };
    assert!(p.exists(), "{} is missing: run `cargo build{how} --workspace` first (ci/test does)", p.display());
    p
}

/// The library.
pub fn library() -> PathBuf {
    artifact("libringsock.so")
}

/// The test program.
pub fn app() -> PathBuf {
    artifact("rs-app")
}

/// Tests of one executable run one after the other: they load the machine, and some measure time.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|e| e.into_inner())
}

/// A number from the environment.
pub fn env_num(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Notes that something was not tested, and why, where ci/test counts it.
pub fn skip(what: &str) {
    eprintln!("SKIP {what}");
    if let Some(path) = std::env::var_os("RINGSOCK_TEST_SKIPPED") {
        use std::io::Write;
        let f = std::fs::OpenOptions::new().create(true).append(true).open(path);
        f.and_then(|mut f| writeln!(f, "{what}")).expect("note of a skipped test");
    }
}

/// A folder of its own for a test, removed at the end.
pub struct Place {
    dir: PathBuf,
}

impl Place {
    /// A fresh folder.
    pub fn new(name: &str) -> Place {
        static N: AtomicU32 = AtomicU32::new(0);
        let n = N.fetch_add(1, Ordering::SeqCst);
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("temporary folder");
        Place { dir }
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The report of a process that has ended; `None` if it wrote none.
    pub fn report(&self, pid: u32) -> Option<Report> {
        let path = self.path(&format!("{pid}.json"));
        let text = std::fs::read_to_string(&path).ok()?;
        let json = Json::parse(&text).unwrap_or_else(|e| panic!("{}: {e}: {text}", path.display()));
        let r = Report { json };
        assert_eq!(r.json.get("pid").num(), u64::from(pid));
        Some(r)
    }

    /// How many reports there are.
    pub fn reports(&self) -> usize {
        let all = std::fs::read_dir(&self.dir).expect("temporary folder").flatten();
        all.filter(|e| e.path().extension().is_some_and(|x| x == "json")).count()
    }

    /// The library's log of all processes.
    pub fn log(&self) -> String {
        let mut out = String::new();
        for e in std::fs::read_dir(&self.dir).expect("temporary folder").flatten() {
            if e.path().extension().is_some_and(|x| x == "log") {
                out += &String::from_utf8_lossy(&std::fs::read(e.path()).unwrap_or_default());
            }
        }
        out
    }

    /// Makes `cmd` a preloaded one that reports and logs here.
    pub fn preload(&self, cmd: &mut Command) {
        cmd.env("LD_PRELOAD", library());
        cmd.env("RINGSOCK_REPORT", self.path("%p.json"));
        cmd.env("RINGSOCK_LOG", format!("warn,{}", self.path("%p.log").display()));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}

/// A command without any preload or setting of ringsock around it.
pub fn plain_command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut c = Command::new(program);
    c.env_remove("LD_PRELOAD").stdin(Stdio::null());
    for (k, _) in std::env::vars_os() {
        if k.to_string_lossy().starts_with("RINGSOCK_") {
            c.env_remove(k);
        }
    }
    c
}

/// What `ringsock stat` says of the connections of a process that runs; none as long as there are none.
pub fn connections(pid: u32) -> Vec<Json> {
    let mut stat = plain_command(artifacts().join("ringsock"));
    let out = stat.args(["stat", "--json", &pid.to_string()]).output().expect("the command");
    let all = Json::parse(&String::from_utf8_lossy(&out.stdout)).ok();
    let process = all.and_then(|all| all.list().first().cloned());
    process.map_or_else(Vec::new, |p| p.get("connections").list().to_vec())
}

/// Byte counts of a report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    pub tx_tcp: u64,
    pub tx_ring: u64,
    pub rx_tcp: u64,
    pub rx_ring: u64,
    pub upgrades: u64,
    pub returns: u64,
    pub connections: u64,
    pub upgraded: u64,
}

impl Totals {
    /// All bytes sent.
    pub fn tx(&self) -> u64 {
        self.tx_tcp + self.tx_ring
    }

    /// All bytes received.
    pub fn rx(&self) -> u64 {
        self.rx_tcp + self.rx_ring
    }

    /// Share of the bytes that was on rings.
    pub fn share(&self) -> f64 {
        let all = (self.tx() + self.rx()).max(1);
        (self.tx_ring + self.rx_ring) as f64 / all as f64
    }
}

/// What a process wrote at its end.
#[derive(Debug)]
pub struct Report {
    /// All of it.
    pub json: Json,
}

impl Report {
    /// The sums.
    pub fn totals(&self) -> Totals {
        let t = self.json.get("totals");
        let n = |k: &str| t.get(k).num();
        Totals {
            tx_tcp: n("tx_bytes_tcp"),
            tx_ring: n("tx_bytes_ring"),
            rx_tcp: n("rx_bytes_tcp"),
            rx_ring: n("rx_bytes_ring"),
            upgrades: n("upgrades"),
            returns: n("returns"),
            connections: n("connections"),
            upgraded: n("upgraded"),
        }
    }

    /// Nearly all bytes went over rings.
    #[track_caller]
    pub fn assert_rings(&self, who: &str) {
        let t = self.totals();
        assert!(t.share() >= WANTED_SHARE, "{who}: {:.2} % of the bytes on rings: {t:?}", t.share() * 100.0);
    }

    /// Whether nearly all bytes of each direction went over rings, not counting what filled the kernel's buffers at first.
    pub fn is_on_rings_in_bulk(&self) -> bool {
        let t = self.totals();
        let head = BULK_HEAD * t.connections;
        let few = |tcp: u64, all: u64| tcp <= head + all / 100;
        few(t.tx_tcp, t.tx()) && few(t.rx_tcp, t.rx())
    }

    /// As `assert_rings`, not counting what filled the kernel's buffers at the beginning.
    #[track_caller]
    pub fn assert_bulk_rings(&self, who: &str) {
        let t = self.totals();
        assert!(self.is_on_rings_in_bulk(), "{who}: too many bytes by TCP: {t:?}");
        assert!(t.tx_ring + t.rx_ring > 0 && t.upgraded == t.connections, "{who}: {t:?}");
    }

    /// Exactly so many bytes were sent and received.
    #[track_caller]
    pub fn assert_bytes(&self, (tx, rx): (u64, u64), who: &str) {
        let t = self.totals();
        assert_eq!((t.tx(), t.rx()), (tx, rx), "{who} reports other bytes sent and received than there were: {t:?}");
    }

    /// There was traffic, and none of it went over rings.
    #[track_caller]
    pub fn assert_tcp(&self, who: &str) {
        let t = self.totals();
        assert!(t.tx_tcp + t.rx_tcp > 0 && t.connections > 0, "{who}: no traffic in the report: {t:?}");
        assert_eq!((t.tx_ring, t.rx_ring, t.upgrades, t.upgraded), (0, 0, 0, 0), "{who}: {t:?}");
    }
}

/// How a process ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit status; `None` if it was ended by a signal.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Its output.
    pub out: String,
    /// Its error output.
    pub err: String,
    /// Its report, if it wrote one.
    pub report: Option<Report>,
}

impl Ended {
    /// It ended with status 0.
    #[track_caller]
    pub fn assert_ok(&self, who: &str) {
        let Ended { code, signal, out, err, .. } = self;
        assert_eq!(*code, Some(0), "{who}: ended by signal {signal:?}:\n{out}{err}");
        assert!(!self.out.contains("BAD"), "{who}: {}", self.out);
    }

    /// Its report; it must have written one.
    #[track_caller]
    pub fn report(&self, who: &str) -> &Report {
        self.report.as_ref().unwrap_or_else(|| panic!("{who} wrote no report: {}{}", self.out, self.err))
    }
}

/// A process of ours. It leads a process group, so that its children end with it.
pub struct Proc<'a> {
    child: Child,
    place: &'a Place,
    out: PathBuf,
    err: PathBuf,
    what: String,
}

impl<'a> Proc<'a> {
    /// Starts a command, its output in files.
    pub fn start(place: &'a Place, mut cmd: Command) -> Proc<'a> {
        use std::os::unix::process::CommandExt;
        static N: AtomicU32 = AtomicU32::new(0);
        let n = N.fetch_add(1, Ordering::SeqCst);
        let (out, err) = (place.path(&format!("out.{n}")), place.path(&format!("err.{n}")));
        let file = |p: &Path| std::fs::File::create(p).expect("output file");
        cmd.stdout(file(&out)).stderr(file(&err)).process_group(0);
        let what = format!("{cmd:?}");
        let child = cmd.spawn().unwrap_or_else(|e| panic!("{what}: {e}"));
        Proc { child, place, out, err, what }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed so far.
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.out).unwrap_or_default()
    }

    /// The port that a server announces.
    pub fn port(&mut self) -> u16 {
        self.says("listening ").parse().expect("a port")
    }

    /// Waits until it has printed a line that begins so; returns the rest of the line.
    pub fn says(&mut self, start: &str) -> String {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let out = self.output();
            // The last line may still be coming.
            let whole = out.rfind('\n').map_or("", |end| &out[..end]);
            if let Some(rest) = whole.lines().find_map(|l| l.strip_prefix(start)) {
                return rest.trim().into();
            }
            let gone = self.child.try_wait().expect("wait").is_some();
            let err = std::fs::read_to_string(&self.err).unwrap_or_default();
            assert!(!gone && Instant::now() < until, "{}: never said \"{start}\": {out}{err}", self.what);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, sig: i32) {
        // SAFETY: no memory is involved; the child has not been waited for, so the id is its own.
        unsafe { libc::kill(self.child.id() as i32, sig) };
    }

    /// Whether it still runs.
    pub fn alive(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_none()
    }

    /// Waits for its end; panics if it takes longer than `secs`.
    #[track_caller]
    pub fn wait(self, secs: f64) -> Ended {
        let what = self.what.clone();
        self.try_wait(secs).unwrap_or_else(|so_far| panic!("{what}: still running after {secs} s: {so_far}"))
    }

    /// Waits for its end, or kills it when the time is over (its output as the error).
    pub fn try_wait(mut self, secs: f64) -> Result<Ended, String> {
        let until = Instant::now() + Duration::from_secs_f64(secs);
        loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                let read = |p: &Path| String::from_utf8_lossy(&std::fs::read(p).unwrap_or_default()).into_owned();
                let report = self.place.report(self.child.id());
                use std::os::unix::process::ExitStatusExt;
                return Ok(Ended {
                    code: status.code(),
                    signal: status.signal(),
                    out: read(&self.out),
                    err: read(&self.err),
                    report,
                });
            }
            if Instant::now() > until {
                let stacks = stacks(self.pid());
                return Err(format!("{}{}", self.output(), stacks));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends it by SIGTERM, in the ordinary way.
    #[track_caller]
    pub fn stop(self) -> Ended {
        self.signal(libc::SIGTERM);
        self.wait(20.0)
    }

    /// Kills it.
    pub fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Proc<'_> {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // SAFETY: no memory is involved; the group is that of a child not yet waited for.
            unsafe { libc::kill(-(self.child.id() as i32), libc::SIGKILL) };
            let _ = self.child.wait();
        }
    }
}

/// Where the threads of a hanging process wait.
fn stacks(pid: u32) -> String {
    let mut out = String::new();
    for t in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let read = |f: &str| std::fs::read_to_string(t.path().join(f)).unwrap_or_default();
        let (name, wchan, call) = (read("comm"), read("wchan"), read("syscall"));
        out += &format!("\n  thread {} in {wchan} ({})", name.trim(), call.trim());
    }
    out
}

/// One side of a test: whether it is preloaded, and with which settings.
#[derive(Clone, Copy, Debug)]
pub struct Side {
    /// Preloaded.
    pub preloaded: bool,
    /// Further environment.
    pub set: &'static [(&'static str, &'static str)],
}

/// Preloaded with the defaults.
pub const RINGS: Side = Side { preloaded: true, set: &[] };
/// Not preloaded.
pub const PLAIN: Side = Side { preloaded: false, set: &[] };

/// Preloaded with settings.
pub const fn with(set: &'static [(&'static str, &'static str)]) -> Side {
    Side { preloaded: true, set }
}

/// Whether the tests' own machinery is tried natively: no preload anywhere, no claims about rings.
pub fn dry() -> bool {
    std::env::var_os("RINGSOCK_TEST_DRY").is_some()
}

/// Starts `rs-app` with these words.
pub fn start_app<'a>(place: &'a Place, side: &Side, words: &[&str]) -> Proc<'a> {
    let mut cmd = plain_command(app());
    cmd.args(words);
    if side.preloaded && !dry() {
        place.preload(&mut cmd);
        cmd.envs(side.set.iter().copied());
    }
    Proc::start(place, cmd)
}

/// Splits a line of words.
pub fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Starts a server, and says on which port.
pub fn start_server<'a>(place: &'a Place, side: &Side, line: &str) -> (Proc<'a>, u16) {
    let mut p = start_app(place, side, &words(line));
    let port = p.port();
    (p, port)
}

/// Starts a client of a port.
pub fn start_client<'a>(place: &'a Place, side: &Side, line: &str, port: u16) -> Proc<'a> {
    let port = port.to_string();
    let mut w = words(line);
    w.extend(["--port", &port]);
    start_app(place, side, &w)
}

/// How many bytes a client has sent and received, by what it was told to do and what it printed.
pub fn expected_bytes(line: &str, out: &str) -> (u64, u64) {
    let printed = |key: &str| -> Option<u64> {
        let at = out.split_whitespace().find_map(|w| w.strip_prefix(key)?.strip_prefix('='))?;
        at.parse().ok()
    };
    let option = |key: &str, default: u64| -> u64 {
        let Some(v) = line.split(&format!("--{key} ")).nth(1).and_then(|r| r.split(' ').next()) else { return default };
        match v.strip_suffix('m') {
            Some(n) => n.parse::<u64>().expect("a number") << 20,
            None => v.parse().expect("a number"),
        }
    };
    let size = printed("size").unwrap_or(0);
    if let Some(n) = printed("echoed") {
        (n, n)
    } else if let Some(n) = printed("rounds") {
        (n * size, n * size)
    } else if let Some(n) = printed("messages") {
        (n * size, 16)
    } else {
        // soak: each connection begins with its number.
        let (n, bytes) = (option("conns", 1), option("bytes", 0));
        assert!(bytes > 0, "nothing is known of the bytes of `{line}`: {out}");
        (n * (bytes + 8), n * bytes)
    }
}

/// A server and a client from beginning to end; the server gets SIGTERM where it does not end by
/// itself. Both verify all bytes and must end well.
#[track_caller]
pub fn run_pair(place: &Place, server: (Side, &str), client: (Side, &str), secs: f64) -> (Ended, Ended) {
    let (mut s, port) = start_server(place, &server.0, server.1);
    let c = start_client(place, &client.0, client.1, port).wait(secs);
    if s.alive() {
        s.signal(libc::SIGTERM);
    }
    let s = s.wait(20.0);
    c.assert_ok(&format!("client `{}` of `{}`", client.1, server.1));
    s.assert_ok(&format!("server `{}` of `{}`", server.1, client.1));
    procfs::no_names(port, Duration::from_secs(3)).expect("rendezvous names");
    (s, c)
}
