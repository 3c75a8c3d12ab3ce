//! `ringsock check`: what this host can do, and why not more.

use crate::{host, library, program, state, table};
use ringsock_core::config::{understood, SETTINGS};
use serde::Serialize;
use std::ffi::OsString;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Options of `ringsock check`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringsock check                 this host
  ringsock check redis-server    and whether this program can be preloaded
  ringsock check 1234            and whether this process is
  ringsock check 10.0.0.7        and what connections with this host would use
  ringsock check --json

Lines begin with: ok, note (worth knowing), warn (less than could be), FAIL (connections stay on TCP).
The exit status is 1 if there is a FAIL.")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The library to look at [default: found as `run` finds it]
    #[arg(long, value_name = "FILE")]
    lib: Option<PathBuf>,
    /// A program's name or path, a process's number, or a peer's address
    #[arg(value_name = "PROGRAM|PID|ADDRESS")]
    target: Option<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Note,
    Warn,
    Fail,
}

#[derive(Debug, Serialize)]
struct Item {
    name: &'static str,
    verdict: Verdict,
    text: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Item {
    fn new(name: &'static str, verdict: Verdict, text: impl Into<String>) -> Item {
        Item { name, verdict, text: text.into(), advice: None }
    }

    fn advice(mut self, advice: impl Into<String>) -> Item {
        self.advice = Some(advice.into());
        self
    }

    /// `good` if it worked, else `bad` with the error and what to do.
    fn tried<T>(
        name: &'static str,
        result: std::io::Result<T>,
        good: &str,
        bad: Verdict,
        without: &str,
        advice: &str,
    ) -> Item {
        match result {
            Ok(_) => Item::new(name, Verdict::Ok, good),
            Err(e) => Item::new(name, bad, format!("{without} ({e})")).advice(advice),
        }
    }
}

#[derive(Serialize)]
struct Report {
    /// No connection between two processes of this host has to stay on TCP for what was found here.
    shm: bool,
    /// The RDMA link works.
    verbs: bool,
    items: Vec<Item>,
    rdma: Vec<host::RdmaPort>,
}

/// Runs it.
pub fn run(args: &Args) -> Result<ExitCode, String> {
    let mut items = Vec::new();
    library_items(args.lib.as_deref(), &mut items);
    kernel_items(&mut items);
    limit_items(&mut items);
    let rdma = host::rdma_ports(Path::new("/sys/class/infiniband"));
    items.push(rdma_item(&rdma));
    if !rdma.is_empty() {
        provider_items(&mut items);
    }
    setting_items(&mut items);
    if let Some(target) = &args.target {
        let text = target.to_str().unwrap_or_default();
        items.push(if let Ok(pid) = text.parse::<u32>() {
            process_item(pid)
        } else if let Ok(address) = text.parse::<IpAddr>() {
            peer_item(address, &rdma)
        } else {
            program_item(target)
        });
    }
    let shm = items.iter().all(|i| i.verdict != Verdict::Fail);
    let verbs = usable(&rdma);
    let report = Report { shm, verbs, items, rdma };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(|e| e.to_string())?);
    } else {
        print!("{}", text(&report));
    }
    Ok(if shm { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn library_items(asked: Option<&Path>, items: &mut Vec<Item>) {
    match library::find(asked) {
        Ok(path) => {
            items.push(match library::try_preload(&path) {
                Ok(()) => Item::new("library", Verdict::Ok, format!("{} can be preloaded", path.display())),
                Err(e) => Item::new("library", Verdict::Fail, format!("{} cannot be loaded: {e}", path.display()))
                    .advice("build it on this host, or for its glibc and processor"),
            });
        }
        Err(e) => items.push(Item::new("library", Verdict::Fail, e)),
    }
}

fn kernel_items(items: &mut Vec<Item>) {
    let release = host::kernel();
    items.push(match host::kernel_version(&release) {
        Some(v) if v >= (5, 1) => Item::new("kernel", Verdict::Ok, format!("Linux {release}")),
        _ => Item::new("kernel", Verdict::Warn, format!("Linux {release}; 5.1 or later has all that is used")),
    });
    match host::sealed_memfd() {
        Ok(file) => {
            items.push(Item::new("memory", Verdict::Ok, "shared memory can be sealed against shrinking"));
            items.push(Item::tried(
                "futex",
                host::futex_on_read_only_memory(&file),
                "one can wait on memory that one may only read",
                Verdict::Warn,
                "one cannot wait on memory that one may only read, so blocking waits may not work on rings",
                "use a stock Linux kernel (sandboxes such as gVisor lack it)",
            ));
            items.push(Item::tried(
                "write seal",
                host::future_write_seal(&file),
                "a peer can be kept from writing what is not its own",
                Verdict::Warn,
                "F_SEAL_FUTURE_WRITE is missing; a peer could write more than its own part of the memory",
                "Linux 5.1 has it; until then set RINGSOCK_PEERS=same-user on hosts with users you do not trust",
            ));
        }
        Err(e) => items.push(
            Item::new("memory", Verdict::Fail, format!("no sealed shared memory ({e})"))
                .advice("let memfd_create and fcntl pass the sandbox or seccomp filter"),
        ),
    }
    items.push(Item::tried(
        "rendezvous",
        host::abstract_sockets(),
        "abstract Unix sockets work",
        Verdict::Fail,
        "abstract Unix sockets do not work, so processes cannot find each other",
        "allow Unix sockets (systemd: RestrictAddressFamilies= needs AF_UNIX; AppArmor, Landlock: abstract sockets)",
    ));
    items.push(Item::tried(
        "tcp counts",
        host::tcp_counts(),
        "the kernel counts a connection's bytes",
        Verdict::Fail,
        "the kernel does not say how many bytes a connection has moved, so none can be taken off TCP safely",
        "use a stock Linux kernel (sandboxes such as gVisor lack it), and see that loopback is up",
    ));
    items.push(match host::seccomp("self") {
        Some(0) => Item::new("seccomp", Verdict::Ok, "no filter"),
        Some(_) => Item::new("seccomp", Verdict::Note, "a filter is on; what it refuses shows in the lines above"),
        None => Item::new("seccomp", Verdict::Note, "unknown: /proc cannot be read"),
    });
}

fn limit_items(items: &mut Vec<Item>) {
    let (soft, hard) = host::limit(libc::RLIMIT_NOFILE);
    let text = format!("at most {} open files per process", count(soft));
    items.push(if soft < 4096 {
        let item = Item::new("files", Verdict::Note, format!("{text}; links to other processes use a few each"));
        let up = if hard > soft { format!(" (up to {} without privileges)", count(hard)) } else { String::new() };
        item.advice(format!("for servers with many clients raise it{up}: ulimit -n"))
    } else {
        Item::new("files", Verdict::Ok, text)
    });
    let (locked, _) = host::limit(libc::RLIMIT_MEMLOCK);
    let size = if locked == libc::RLIM_INFINITY { "unlimited".into() } else { table::bytes(locked) };
    // Two pieces of 1 MiB each and two heads are registered for every process at the other end.
    let enough = locked >= 16 << 20;
    let item = Item::new(
        "locked memory",
        if enough { Verdict::Ok } else { Verdict::Note },
        format!("{size}, for the verbs link"),
    );
    items.push(if enough { item } else { item.advice("with RDMA: `ulimit -l`, limits.conf or LimitMEMLOCK=infinity") });
    let cpus = host::cpus();
    let quota = host::cpu_quota();
    let limited = quota.map_or(String::new(), |q| format!(", limited to the time of {q:.1}"));
    let text = format!("{cpus} for this process{limited}");
    items.push(if cpus < 2 || quota.is_some_and(|q| q < 2.0) {
        Item::new("CPUs", Verdict::Warn, format!("{text}: spinning takes time from the peer"))
            .advice("leave RINGSOCK_SPIN_US at auto, or set it to 0; give both ends CPUs of their own")
    } else {
        Item::new(
            "CPUs",
            Verdict::Ok,
            format!("{text}; RINGSOCK_SPIN_US=auto suits, a fixed value suits dedicated CPUs"),
        )
    });
}

fn count(n: u64) -> String {
    if n == libc::RLIM_INFINITY {
        "unlimited".into()
    } else {
        n.to_string()
    }
}

fn rdma_item(ports: &[host::RdmaPort]) -> Item {
    if ports.is_empty() {
        return Item::new("rdma", Verdict::Note, "no RDMA device: connections between hosts stay on TCP".to_string());
    }
    let named: Vec<String> = ports
        .iter()
        .map(|p| {
            let kind = if p.software { "software, " } else { "" };
            format!("{} port {} ({kind}{}, {})", p.device, p.port, p.link_layer, p.state.to_lowercase())
        })
        .collect();
    let named = named.join(", ");
    if !usable(ports) {
        let text =
            format!("{named}; none that is used unless RINGSOCK_LINKS names verbs, or RINGSOCK_DEVICE the device");
        return Item::new("rdma", Verdict::Note, text);
    }
    Item::new("rdma", Verdict::Ok, named)
}

/// Which link a connection with `peer` would use, and why.
fn peer_item(peer: IpAddr, ports: &[host::RdmaPort]) -> Item {
    let item = |verdict, text: String| Item::new("peer", verdict, format!("connections with {peer} {text}"));
    let links = std::env::var("RINGSOCK_LINKS").unwrap_or_default();
    let device = std::env::var("RINGSOCK_DEVICE").unwrap_or_default();
    let auto = links.is_empty() || links == "auto";
    let named = |name: &str| links.split(',').any(|l| l.trim() == name);
    // What an address of this host is, the kernel says.
    if std::net::UdpSocket::bind((peer, 0)).is_ok() && (auto || named("shm")) {
        return item(Verdict::Ok, "would use shared memory: the address is this host's".into());
    }
    let stays = |why: String| item(Verdict::Note, format!("would stay on TCP: {why}"));
    if !auto && !named("verbs") {
        return stays(format!("RINGSOCK_LINKS={links} does not name verbs"));
    }
    if ports.is_empty() {
        return stays("this host has no RDMA device".into());
    }
    let Some(api) = ringsock_core::provider::load() else {
        return stays("libringsock_verbs.so does not lie beside this program".into());
    };
    let address = match peer {
        IpAddr::V4(a) => a.to_ipv6_mapped(),
        IpAddr::V6(a) => a,
    };
    let (mut text, mut len) = (vec![0u8; 256], 256);
    // SAFETY: valid pointers; `len` is the buffer's length.
    let e = unsafe { (api.way)(&address.octets(), text.as_mut_ptr().cast(), &mut len) };
    if e != 0 {
        let why = std::io::Error::from_raw_os_error(e);
        return stays(format!("the route to it leads to no RDMA device ({why})"));
    }
    let way = String::from_utf8_lossy(&text[..len]).into_owned();
    let found = way.split(' ').next().unwrap_or_default();
    if !device.is_empty() && device != found {
        return stays(format!("the route leads to {way}, and RINGSOCK_DEVICE is {device}"));
    }
    if device.is_empty() && auto && ports.iter().any(|p| p.device == found && p.software) {
        return stays(format!(
            "the route leads to {way}, a software device, which is slower (RINGSOCK_LINKS=verbs uses it)"
        ));
    }
    item(Verdict::Ok, format!("would use verbs by {way}, if the peer's end can too"))
}

/// Whether a device would be used for connections to other hosts, as things are set here.
fn usable(ports: &[host::RdmaPort]) -> bool {
    let set = |name: &str| std::env::var(name).unwrap_or_default();
    let (links, device) = (set("RINGSOCK_LINKS"), set("RINGSOCK_DEVICE"));
    let named = links.split(',').any(|l| l.trim() == "verbs");
    let allowed = named || links.is_empty() || links == "auto";
    allowed
        && ports.iter().any(|p| {
            let chosen = if device.is_empty() { named || !p.software } else { p.device == device };
            chosen && p.state.eq_ignore_ascii_case("active")
        })
}

/// What the provider of the verbs link says of this host: one line each.
fn provider_items(items: &mut Vec<Item>) {
    let Some(api) = ringsock_core::provider::load() else {
        items.push(Item::new(
            "verbs",
            Verdict::Warn,
            "libringsock_verbs.so does not lie beside this program".to_string(),
        ));
        return;
    };
    let mut text = vec![0u8; 16 << 10];
    // SAFETY: the buffer is writable for its length.
    let n = unsafe { (api.describe)(text.as_mut_ptr().cast(), text.len()) };
    for line in String::from_utf8_lossy(&text[..n.min(text.len())]).lines() {
        items.push(Item::new("verbs", Verdict::Note, line.to_string()));
    }
}

fn setting_items(items: &mut Vec<Item>) {
    for s in SETTINGS {
        let Some(value) = std::env::var_os(s.env).filter(|v| !v.is_empty()) else { continue };
        items.push(if understood(s, value.as_encoded_bytes()) {
            Item::new("setting", Verdict::Ok, format!("{}={}", s.env, value.to_string_lossy()))
        } else {
            Item::new("setting", Verdict::Warn, format!("{}={} is not understood", s.env, value.to_string_lossy()))
                .advice(format!("expected {}", s.expected))
        });
    }
}

fn program_item(name: &OsString) -> Item {
    let shown = name.to_string_lossy();
    let Some(path) = program::resolve(name) else {
        return Item::new("program", Verdict::Fail, format!("{shown} was not found")).advice("name it with its path");
    };
    match program::inspect(&path) {
        None => Item::new("program", Verdict::Ok, format!("{} can be preloaded", path.display())),
        Some(o) => Item::new("program", Verdict::Fail, format!("{} {}", path.display(), o.text()))
            .advice("its connections stay on TCP; use a dynamically linked build of it for glibc, without privileges"),
    }
}

fn process_item(pid: u32) -> Item {
    let maps = match fs::read_to_string(format!("/proc/{pid}/maps")) {
        Ok(maps) => maps,
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
            return Item::new("process", Verdict::Warn, format!("process {pid} is another user's"))
                .advice("run this as that user or as root");
        }
        Err(_) => return Item::new("process", Verdict::Fail, format!("there is no process {pid}")),
    };
    let Some(path) = library::maps_library(&maps) else {
        let item = Item::new("process", Verdict::Fail, format!("process {pid} does not have the library"));
        return match program::inspect(Path::new(&format!("/proc/{pid}/exe"))) {
            Some(o) => item.advice(format!("its program {}", o.text())),
            None => item.advice("start it with `ringsock run -- PROGRAM`"),
        };
    };
    let text = match state::of(pid) {
        Ok(p) => format!(
            "process {pid} ({}) has {path}; {} connections, {} upgraded",
            p.program, p.totals.connections, p.totals.upgraded
        ),
        Err(_) => format!("process {pid} has {path}, but shows no connections"),
    };
    Item::new("process", Verdict::Ok, text)
}

fn text(report: &Report) -> String {
    let mut out = String::new();
    for i in &report.items {
        let verdict = match i.verdict {
            Verdict::Ok => "ok",
            Verdict::Note => "note",
            Verdict::Warn => "warn",
            Verdict::Fail => "FAIL",
        };
        out += &format!("{verdict:<5} {:<14} {}\n", i.name, i.text.replace('\n', "\n                     "));
        if let Some(advice) = &i.advice {
            out += &format!("      {:<14} -> {advice}\n", "");
        }
    }
    out += if report.shm {
        "\nConnections between preloaded processes of this host can move to shared memory.\n"
    } else {
        "\nConnections stay on TCP: see the lines with FAIL.\n"
    };
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_processes() {
        assert_eq!(program_item(&"sh".into()).verdict, Verdict::Ok);
        assert_eq!(program_item(&"no-such-program".into()).verdict, Verdict::Fail);
        let me = process_item(std::process::id());
        assert!(me.verdict == Verdict::Fail && me.advice.unwrap().contains("ringsock run"));
        assert_eq!(process_item(u32::MAX).verdict, Verdict::Fail);
    }

    #[test]
    fn the_rdma_line_says_what_is_missing() {
        assert!(rdma_item(&[]).text.contains("no RDMA device"));
        let port = host::RdmaPort {
            device: "mlx5_0".into(),
            port: 1,
            state: "ACTIVE".into(),
            link_layer: "Ethernet".into(),
            software: false,
        };
        assert!(rdma_item(&[port]).text.starts_with("mlx5_0 port 1 (Ethernet, active)"));
    }

    #[test]
    fn a_peer_of_this_host_uses_shared_memory_and_others_say_why_not() {
        assert!(peer_item(IpAddr::from([127, 0, 0, 1]), &[]).text.contains("shared memory"));
        assert!(peer_item(IpAddr::from([192, 0, 2, 1]), &[]).text.contains("no RDMA device"));
    }

    #[test]
    fn a_fail_is_told_at_the_end() {
        let items = vec![Item::new("x", Verdict::Fail, "y").advice("z")];
        let t = text(&Report { shm: false, verbs: false, items, rdma: vec![] });
        assert!(t.starts_with("FAIL  x              y\n") && t.contains("-> z") && t.contains("stay on TCP"));
    }
}
