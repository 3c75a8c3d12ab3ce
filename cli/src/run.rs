//! `ringsock run`: a program with the library preloaded.

use crate::library;
use crate::program;
use crate::state::{Process, Totals};
use crate::table;
use ringsock_core::config::{understood, SETTINGS};
use ringsock_core::stats::Why;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// Options of `ringsock run`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringsock run -- redis-server --port 6379
  ringsock run --summary -- redis-benchmark -q
  ringsock run --spin-us 50 --log info -- ./server
  ringsock run --links none -- ./server          preloaded, but everything stays on TCP
  ringsock run --report /tmp/ringsock.%p.json -- ./server

Both ends of a connection must be preloaded; every other connection stays on TCP.
Each option is also an environment variable (--spin-us is RINGSOCK_SPIN_US), which the
program and its children see; an option wins over the variable.")]
pub struct Args {
    /// Links to use: auto, none, or a list of shm and verbs [default: auto]
    #[arg(long, value_name = "LIST")]
    links: Option<String>,
    /// Time to look at rings before sleeping, in microseconds, or auto [default: auto]
    #[arg(long, value_name = "US")]
    spin_us: Option<String>,
    /// First size of a ring, a power of two from 4K to 4M [default: 16K]
    #[arg(long, value_name = "BYTES")]
    ring_bytes: Option<String>,
    /// Size that a ring may grow to, a power of two up to 64M [default: 4M]
    #[arg(long, value_name = "BYTES")]
    ring_max: Option<String>,
    /// Seconds after which memory that rings do not need goes back to the system, 0 for never [default: 60]
    #[arg(long, value_name = "SECONDS")]
    idle: Option<String>,
    /// Whose processes may be linked: any, same-user, or a list like alice,@brokers,1000 [default: any]
    #[arg(long, value_name = "LIST")]
    peers: Option<String>,
    /// I/O calls on a connection before its peer is looked for [default: 8]
    #[arg(long, value_name = "CALLS")]
    upgrade_after: Option<String>,
    /// Bytes on a connection before its peer is looked for [default: 64K]
    #[arg(long, value_name = "BYTES")]
    upgrade_bytes: Option<String>,
    /// Rules file: which programs, addresses and ports may leave TCP
    #[arg(long, value_name = "FILE")]
    rules: Option<String>,
    /// Log level (off, error, warn, info, debug, trace) and target, like info,/tmp/%p.log [default: warn,stderr]
    #[arg(long, value_name = "LEVEL[,TARGET]")]
    log: Option<String>,
    /// Write a JSON summary there when a process ends (%p is its pid)
    #[arg(long, value_name = "FILE")]
    report: Option<String>,
    /// RDMA device for the verbs link
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Index in the RDMA device's GID table, or auto [default: auto]
    #[arg(long, value_name = "INDEX")]
    gid_index: Option<String>,
    /// Whether connections with another host share keys: shared or strict [default: shared]
    #[arg(long, value_name = "HOW")]
    isolation: Option<String>,
    /// Protocol version to announce, for tests
    #[arg(long, value_name = "VERSION", hide = true)]
    test_protocol: Option<String>,
    /// Microseconds to sleep wherever others may come in between, for tests
    #[arg(long, value_name = "US", hide = true)]
    test_lag: Option<String>,
    /// Seed of upgrades and returns at random moments, for tests
    #[arg(long, value_name = "SEED", hide = true)]
    chaos: Option<String>,
    /// The library to preload [default: found beside this command or in the system's folders]
    #[arg(long, value_name = "FILE")]
    lib: Option<PathBuf>,
    /// Wait for the program and print what was gained, on stderr
    #[arg(long, conflicts_with = "report")]
    summary: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

impl Args {
    /// The settings that were given, by variable.
    fn settings(&self) -> Vec<(&'static str, &str)> {
        let all = [
            ("RINGSOCK_LINKS", &self.links),
            ("RINGSOCK_SPIN_US", &self.spin_us),
            ("RINGSOCK_RING_BYTES", &self.ring_bytes),
            ("RINGSOCK_RING_MAX", &self.ring_max),
            ("RINGSOCK_IDLE", &self.idle),
            ("RINGSOCK_PEERS", &self.peers),
            ("RINGSOCK_UPGRADE_AFTER", &self.upgrade_after),
            ("RINGSOCK_UPGRADE_BYTES", &self.upgrade_bytes),
            ("RINGSOCK_RULES", &self.rules),
            ("RINGSOCK_LOG", &self.log),
            ("RINGSOCK_REPORT", &self.report),
            ("RINGSOCK_DEVICE", &self.device),
            ("RINGSOCK_GID_INDEX", &self.gid_index),
            ("RINGSOCK_ISOLATION", &self.isolation),
            ("RINGSOCK_TEST_PROTOCOL", &self.test_protocol),
            ("RINGSOCK_TEST_LAG", &self.test_lag),
            ("RINGSOCK_CHAOS", &self.chaos),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?))).collect()
    }
}

/// Runs it.
pub fn run(args: &Args) -> Result<ExitCode, String> {
    let library = library::find(args.lib.as_deref())?;
    let library = library.to_str().ok_or("the library's path is not text")?;
    let [name, rest @ ..] = args.program.as_slice() else { return Err("no program was named".into()) };
    let Some(path) = program::resolve(name) else {
        return Err(format!("program {} was not found", name.to_string_lossy()));
    };
    let mut command = Command::new(name);
    command.args(rest);
    for (variable, value) in args.settings() {
        command.env(variable, checked(variable, value)?);
    }
    let obstacle = program::inspect(&path);
    if let Some(o) = &obstacle {
        eprintln!("ringsock: {} {}: it cannot be preloaded, and its connections stay on TCP", path.display(), o.text());
    }
    if !obstacle.as_ref().is_some_and(program::Obstacle::must_not_try) {
        let old = env::var_os("LD_PRELOAD");
        let old = match &old {
            Some(text) => Some(text.to_str().ok_or("LD_PRELOAD is not text; unset it")?),
            None => None,
        };
        command.env("LD_PRELOAD", library::preload_list(library, old));
    }
    if args.summary {
        return with_summary(command);
    }
    let error = command.exec();
    Err(format!("cannot run {}: {error}", path.display()))
}

/// The value as the program will read it, or what is wrong with it.
fn checked(variable: &str, value: &str) -> Result<OsString, String> {
    let setting = SETTINGS.iter().find(|s| s.env == variable).ok_or_else(|| format!("unknown setting {variable}"))?;
    let value: OsString = match variable {
        // The program may change its folder before these are used.
        "RINGSOCK_RULES" | "RINGSOCK_REPORT" if !value.is_empty() => {
            std::path::absolute(value).map_err(|e| format!("{value}: {e}"))?.into()
        }
        "RINGSOCK_LOG" => match value.split_once(',') {
            Some((level, to)) if to != "stderr" && !to.is_empty() => {
                let to = std::path::absolute(to).map_err(|e| format!("{value}: {e}"))?;
                format!("{level},{}", to.display()).into()
            }
            _ => value.into(),
        },
        _ => value.into(),
    };
    let bytes = value.as_encoded_bytes();
    if !(bytes.is_empty() || understood(setting, bytes)) {
        let option = variable.trim_start_matches("RINGSOCK_").to_lowercase().replace('_', "-");
        return Err(format!("--{option} {value:?} is not understood; expected {}", setting.expected));
    }
    if variable == "RINGSOCK_RULES" && !bytes.is_empty() {
        fs::File::open(&value).map_err(|e| format!("the rules file {}: {e}", Path::new(&value).display()))?;
    }
    Ok(value)
}

/// The program, for the handlers that pass signals on.
static CHILD: AtomicI32 = AtomicI32::new(0);

extern "C" fn pass_on(signal: libc::c_int) {
    let child = CHILD.load(Relaxed);
    if child > 0 {
        // SAFETY: kill is async-signal-safe.
        unsafe { libc::kill(child, signal) };
    }
}

fn with_summary(mut command: Command) -> Result<ExitCode, String> {
    let dir = Reports::new()?;
    command.env("RINGSOCK_REPORT", dir.0.join("%p.json"));
    // The terminal sends these to the whole group: the program decides what to do.
    // SAFETY: plain dispositions; `pass_on` is async-signal-safe.
    let before = unsafe {
        let pass_on = pass_on as *const () as usize;
        [
            (libc::SIGINT, libc::signal(libc::SIGINT, libc::SIG_IGN)),
            (libc::SIGQUIT, libc::signal(libc::SIGQUIT, libc::SIG_IGN)),
            (libc::SIGTERM, libc::signal(libc::SIGTERM, pass_on)),
            (libc::SIGHUP, libc::signal(libc::SIGHUP, pass_on)),
        ]
    };
    // SAFETY: between fork and exec only system calls are made. The program gets what was before: `nohup` holds.
    unsafe {
        command.pre_exec(move || {
            for (signal, action) in before {
                libc::signal(signal, action);
            }
            Ok(())
        });
    }
    let mut child =
        command.spawn().map_err(|e| format!("cannot run {}: {e}", command.get_program().to_string_lossy()))?;
    CHILD.store(child.id() as i32, Relaxed);
    let status = child.wait().map_err(|e| format!("cannot wait for the program: {e}"))?;
    CHILD.store(0, Relaxed);
    eprint!("{}", summary(&dir.read(), status));
    Ok(ExitCode::from(exit_code(status)))
}

/// As a shell gives it.
fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128u8.wrapping_add(signal as u8),
        (None, None) => 1,
    }
}

/// A folder of our own for the reports, removed at the end.
struct Reports(PathBuf);

impl Reports {
    fn new() -> Result<Reports, String> {
        let template = env::temp_dir().join("ringsock-run-XXXXXX");
        // The library replaces `%p` in the whole path.
        if template.as_os_str().as_encoded_bytes().contains(&b'%') {
            return Err("--summary needs a temporary folder without % in its name; set TMPDIR".into());
        }
        let mut name = std::ffi::CString::new(template.as_os_str().as_encoded_bytes())
            .map_err(|_| "TMPDIR is not a path")?
            .into_bytes_with_nul();
        // SAFETY: a writable C string.
        if unsafe { libc::mkdtemp(name.as_mut_ptr().cast()) }.is_null() {
            let e = std::io::Error::last_os_error();
            return Err(format!("cannot make a folder for reports in {}: {e}", env::temp_dir().display()));
        }
        name.pop();
        let path = PathBuf::from(std::ffi::OsStr::from_bytes(&name));
        // Programs that run as another user (prefork servers) leave reports as well.
        let _ = fs::set_permissions(&path, fs::Permissions::from_mode(0o1733));
        Ok(Reports(path))
    }

    fn read(&self) -> Vec<Process> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        // Anyone may leave something here: take nothing but files, of a size that reports have.
        let files = entries.filter(|e| e.metadata().is_ok_and(|m| m.is_file() && m.len() < 256 << 20));
        files.filter_map(|e| serde_json::from_slice(&fs::read(e.path()).ok()?).ok()).collect()
    }
}

impl Drop for Reports {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn summary(processes: &[Process], status: ExitStatus) -> String {
    let mut t = Totals::default();
    processes.iter().for_each(|p| t.add(&p.totals));
    let mut out = String::from("\nringsock summary\n");
    if processes.is_empty() {
        out += match status.signal() {
            Some(_) => "  no report: the program was killed by a signal\n",
            None => "  no report: the program was not preloaded, was killed, or used no TCP connection\n",
        };
        return out;
    }
    let mut row = |name: &str, value: String| out += &format!("  {name:<22}{value}\n");
    row("processes", processes.len().to_string());
    row("connections", t.connections.to_string());
    row("upgraded", format!("{} ({})", t.upgraded, table::share(t.upgraded, t.connections)));
    row("upgrades, returns", format!("{}, {}", t.upgrades, t.returns));
    row("sent", table::bytes(t.tx_bytes_tcp.saturating_add(t.tx_bytes_ring)));
    row("received", table::bytes(t.rx_bytes_tcp.saturating_add(t.rx_bytes_ring)));
    row("bytes on rings", format!("{} ({})", table::bytes(t.ring()), table::share(t.ring(), t.all())));
    out += &table::reasons("never left TCP", &t.stayed, 2);
    out += &table::reasons("returned to it", &t.returned, 2);
    if t.stayed.contains_key(Why::NoPeer.text()) && t.upgraded == 0 {
        out +=
            "  Nothing was upgraded. Is the other end preloaded, too? `ringsock check` says what this host can do.\n";
    } else if t.stayed.contains_key(Why::New.text()) {
        out += "  A connection moves after some calls or bytes: see --upgrade-after and --upgrade-bytes.\n";
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_checked_before_the_program_starts() {
        assert!(checked("RINGSOCK_SPIN_US", "50").is_ok());
        let e = checked("RINGSOCK_SPIN_US", "fast").unwrap_err();
        assert!(e.contains("--spin-us") && e.contains("1000000"), "{e}");
        assert!(checked("RINGSOCK_RULES", "/nonexistent").unwrap_err().contains("/nonexistent"));
        let absolute = checked("RINGSOCK_REPORT", "r.%p.json").unwrap();
        assert!(Path::new(&absolute).is_absolute());
        let log = checked("RINGSOCK_LOG", "info,x.log").unwrap();
        assert!(log.to_str().unwrap().starts_with("info,/"));
        assert_eq!(checked("RINGSOCK_LOG", "info,stderr").unwrap(), "info,stderr");
        assert_eq!(checked("RINGSOCK_LINKS", "").unwrap(), "");
    }

    #[test]
    fn a_summary_adds_up() {
        let x = Process {
            pid: 1,
            program: "x".into(),
            connections: vec![],
            totals: Totals {
                connections: 2,
                upgraded: 1,
                tx_bytes_ring: 3 << 20,
                tx_bytes_tcp: 1 << 20,
                stayed: [("for a reason".into(), 1)].into(),
                ..Totals::default()
            },
        };
        let s = summary(&[x.clone(), x.clone()], ExitStatus::from_raw(0));
        assert!(
            s.contains("connections           4\n") && s.contains("2 (50.0%)") && s.contains("6.0 MiB (75.0%)"),
            "{s}"
        );
        assert!(s.contains("never left TCP:\n         2  for a reason\n") && !s.contains("returned to it"), "{s}");
        let few = |why: Why| Totals { connections: 1, stayed: [(why.text().into(), 1)].into(), ..Totals::default() };
        let said = |why| summary(&[Process { totals: few(why), ..x.clone() }], ExitStatus::from_raw(0));
        assert!(said(Why::NoPeer).contains("Is the other end preloaded") && said(Why::New).contains("--upgrade-after"));
        assert!(summary(&[], ExitStatus::from_raw(9)).contains("killed by a signal"));
    }

    #[test]
    fn exit_codes_as_in_a_shell() {
        assert_eq!(exit_code(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(exit_code(ExitStatus::from_raw(9)), 137);
    }
}
