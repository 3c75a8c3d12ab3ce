//! Runs programs in pairs, plain and preloaded in turn, and takes what they say, their processor
//! time, and what the library reports. The server may run on another host.

use crate::kid::{tail, Kid, Watch};
use crate::peer::Peer;
use crate::plan::Experiment;
use crate::variant::{Preload, Variant};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Longest time of one run; what still runs then is killed.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Named numbers that a client said.
pub type Values = BTreeMap<String, f64>;

/// How a server is ended.
#[derive(Clone, Copy, PartialEq)]
pub enum Stop {
    /// By this signal.
    Signal(i32),
    /// It ends when its client has.
    ByItself,
}

/// A server that is about to be started.
pub struct Start {
    /// The program.
    pub command: Command,
    /// Where it will listen; `None`: the last word of its first line says.
    pub port: Option<u16>,
    /// How it is ended.
    pub stop: Stop,
    /// The statuses with which it then ends.
    pub clean: &'static [i32],
}

/// Where and how everything is run.
pub struct Lab {
    /// The library, where every user can read it.
    pub lib: PathBuf,
    /// A folder for reports and servers' files, writable by everybody.
    pub dir: PathBuf,
    /// The address of the servers in accelerated runs.
    pub host: String,
    /// The address of the servers in plain runs.
    pub baseline: String,
    /// This program, and the word that makes it one of the measured ones.
    pub me: (PathBuf, Option<&'static str>),
    /// Length of a measurement in seconds.
    pub secs: f64,
    /// The other host, if servers run there.
    pub peer: Option<Peer>,
    /// Addresses from which clients come, if they are on another host than the servers.
    pub clients: Vec<IpAddr>,
    /// Settings of preloaded programs that this process has not in its environment.
    pub settings: Vec<(String, String)>,
}

/// What preloaded processes have reported, in all.
#[derive(Clone, Copy, Default, Debug)]
pub struct Bytes {
    /// Bytes sent over rings.
    pub ring: u64,
    /// Bytes sent over TCP.
    pub tcp: u64,
}

/// What is known of a server that has ended.
#[derive(Clone, Copy)]
pub struct Ended {
    /// Its processor time in seconds.
    pub cpu: f64,
    /// What the processes of its host have reported, its own and, if they are there, the client's.
    pub bytes: Bytes,
}

/// One run's result.
pub struct Sample {
    /// What the client said.
    pub values: Values,
    /// Processor time of all processes, in seconds.
    pub cpu: f64,
    /// Processor time of the server alone.
    pub cpu_server: f64,
    /// Bytes sent over rings.
    pub ring: u64,
    /// Bytes sent over TCP, by preloaded processes.
    pub tcp: u64,
}

/// A server that runs on this host.
pub struct Served {
    kid: Kid,
    watch: Watch,
    stop: Stop,
    clean: &'static [i32],
    /// Whether a report must be there, and the process's own: real servers may leave that to their children.
    reports: Option<bool>,
    /// Where it listens.
    pub port: u16,
}

impl Served {
    /// Starts the server of a pair at an address of this host.
    pub fn start(lab: &Lab, p: &dyn Pair, v: &Variant, host: &str) -> Result<Served, String> {
        let _ = lab.reports_with(None);
        let watch = Watch::new(LIMIT);
        let mut start = p.server(lab, host)?;
        lab.dress(&mut start.command, v);
        start.command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut kid = Kid::start(start.command, &watch)?;
        let port = match start.port {
            Some(port) => kid.ready(host, port)?,
            None => kid.announced()?,
        };
        let clean = start.clean;
        Ok(Served { kid, watch, stop: start.stop, clean, reports: v.rings().then_some(start.port.is_none()), port })
    }

    /// Ends it; its client has ended.
    pub fn end(mut self, lab: &Lab) -> Result<Ended, String> {
        if let Stop::Signal(s) = self.stop {
            self.kid.signal(s);
        }
        let (status, cpu) = self.kid.wait();
        if self.watch.fired() {
            return Err(format!("still running after {} s", LIMIT.as_secs()));
        }
        if !self.clean.contains(&status) {
            return Err(format!("the server ended with {status}: {}", tail("", &mut self.kid)));
        }
        let bytes = lab.reports_with(self.reports.map(|own| (own, &mut self.kid)))?;
        Ok(Ended { cpu, bytes })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // After a failure: a server that is killed may leave children behind.
        if let Stop::Signal(s) = self.stop {
            self.kid.ask_to_end(s);
        }
    }
}

/// A server here or there.
enum Server<'a> {
    Here(Box<Served>),
    There(Hold<'a>),
}

/// A server of the other host's, which is killed when this goes.
struct Hold<'a>(&'a Peer);

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.forget();
    }
}

impl Lab {
    /// With a folder of its own below the temporary one, and a copy of the library there.
    pub fn new(lib: &Path, me: (PathBuf, Option<&'static str>), secs: f64) -> Result<Lab, String> {
        use std::os::unix::fs::PermissionsExt;
        let dir = std::env::temp_dir().join(format!("ringsock-bench.{}", std::process::id()));
        let place = dir.display().to_string();
        let say = |e: std::io::Error| format!("{place}: {e}");
        std::fs::create_dir_all(&dir).map_err(say)?;
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o1777)).map_err(say)?;
        let copy = dir.join("libringsock.so");
        let host = "127.0.0.1".to_string();
        let lab = Lab {
            lib: copy,
            dir,
            baseline: host.clone(),
            host,
            me,
            secs,
            peer: None,
            clients: vec![],
            settings: vec![],
        };
        // The provider of RDMA is looked for beside the library.
        let provider = "libringsock_verbs.so";
        for (from, name) in [(lib.to_path_buf(), "libringsock.so"), (lib.with_file_name(provider), provider)] {
            if from.exists() {
                let to = lab.dir.join(name);
                std::fs::copy(&from, &to).map_err(|e| format!("{}: {e}", from.display()))?;
                std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755)).map_err(say)?;
            }
        }
        Ok(lab)
    }

    /// One of our own programs.
    pub fn own(&self, words: &[String]) -> Command {
        let mut c = Command::new(&self.me.0);
        c.args(self.me.1).args(words);
        c
    }

    /// Where the servers of a variant listen.
    pub fn address(&self, v: &Variant) -> &str {
        match v.preload {
            Preload::Nothing => &self.baseline,
            _ => &self.host,
        }
    }

    fn dress(&self, c: &mut Command, v: &Variant) {
        c.env_remove("LD_PRELOAD").env_remove("RINGSOCK_REPORT").stdin(Stdio::null()).process_group(0);
        match &v.preload {
            Preload::Nothing => {}
            Preload::Rings => {
                c.envs(self.settings.iter().map(|(k, v)| (k, v)));
                c.env("LD_PRELOAD", &self.lib).env("RINGSOCK_REPORT", self.dir.join("report.%p"));
            }
            Preload::Other(lib) => {
                c.env("LD_PRELOAD", lib);
            }
        }
    }

    /// Sums and removes the reports that lie here. If a process is given there must be some, or its own.
    fn reports_with(&self, want: Option<(bool, &mut Kid)>) -> Result<Bytes, String> {
        let (mut sum, mut pids) = (Bytes::default(), Vec::new());
        for e in std::fs::read_dir(&self.dir).map_err(|x| format!("reports: {x}"))?.flatten() {
            let name = e.file_name().to_string_lossy().into_owned();
            let Some(pid) = name.strip_prefix("report.") else { continue };
            let text = std::fs::read(e.path()).map_err(|x| format!("a report: {x}"))?;
            let v: Value = serde_json::from_slice(&text).map_err(|x| format!("a report: {x}"))?;
            sum.ring += v["totals"]["tx_bytes_ring"].as_u64().unwrap_or(0);
            sum.tcp += v["totals"]["tx_bytes_tcp"].as_u64().unwrap_or(0);
            pids.push(pid.to_string());
            let _ = std::fs::remove_file(e.path());
        }
        match want {
            Some((own, k)) if pids.is_empty() || own && !pids.contains(&k.child.id().to_string()) => {
                let said = tail("", k);
                Err(format!("{} has not reported: was it preloaded? Reports: {pids:?} {said}", k.child.id()))
            }
            _ => Ok(sum),
        }
    }

    /// One run of a point's server and client.
    pub fn run(&self, e: &Experiment, point: usize, v: &Variant) -> Result<Sample, String> {
        let (p, host) = (e.points[point].pair.as_ref(), self.address(v));
        let _ = self.reports_with(None);
        let (server, port) = match &self.peer {
            None => {
                let s = Served::start(self, p, v, host)?;
                let port = s.port;
                (Server::Here(Box::new(s)), port)
            }
            Some(peer) => {
                let hold = Hold(peer);
                (Server::There(hold), peer.start_server(e.name, point, v, host)?)
            }
        };
        let watch = Watch::new(LIMIT);
        let mut c = p.client(self, host, port);
        self.dress(&mut c, v);
        c.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut client = Kid::start(c, &watch)?;
        let said = client.all();
        let (status, cpu_client) = client.wait();
        if status != 0 {
            let why = if watch.fired() { format!(" (it took more than {} s)", LIMIT.as_secs()) } else { String::new() };
            return Err(format!("the client ended with {status}{why}: {}", tail(&said, &mut client)));
        }
        let values = p.parse(&said).map_err(|e| format!("{e}: {}", tail(&said, &mut client)))?;
        let here = match &self.peer {
            Some(_) => self.reports_with(v.rings().then_some((true, &mut client)))?,
            None => Bytes::default(),
        };
        let server = server.end(self)?;
        let (ring, tcp) = (here.ring + server.bytes.ring, here.tcp + server.bytes.tcp);
        Ok(Sample { values, cpu: cpu_client + server.cpu, cpu_server: server.cpu, ring, tcp })
    }
}

impl Server<'_> {
    fn end(self, lab: &Lab) -> Result<Ended, String> {
        match self {
            Server::Here(s) => s.end(lab),
            Server::There(hold) => hold.0.end(),
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A server and a client that are measured together.
pub trait Pair {
    /// The server, to listen at an address.
    fn server(&self, lab: &Lab, host: &str) -> Result<Start, String>;
    /// The client of a server.
    fn client(&self, lab: &Lab, host: &str, port: u16) -> Command;
    /// Programs that must be installed where the server runs, and where the client runs.
    fn programs(&self) -> (&'static [&'static str], &'static [&'static str]) {
        (&[], &[])
    }
    /// The numbers in what the client said: at least `messages` and `bytes` of the whole run.
    fn parse(&self, said: &str) -> Result<Values, String>;
}

/// A pair of our own programs.
pub struct Own {
    /// Words of the server.
    pub server: Vec<String>,
    /// Words of the client; `--host`, `--port`, `--secs` and `--warm` follow.
    pub client: Vec<String>,
}

impl Pair for Own {
    fn server(&self, lab: &Lab, host: &str) -> Result<Start, String> {
        let job = self.server[0].starts_with('@');
        let mut words = self.server.clone();
        if !job {
            words.extend(["--host".into(), host.into()]);
        }
        if job {
            words.push(host.into());
        }
        let stop = if job { Stop::ByItself } else { Stop::Signal(libc::SIGTERM) };
        Ok(Start { command: lab.own(&words), port: None, stop, clean: &[0] })
    }

    fn client(&self, lab: &Lab, host: &str, port: u16) -> Command {
        let mut words = self.client.clone();
        if words[0].starts_with('@') {
            words.extend([port.to_string(), host.into()]);
        } else {
            words.extend(load_words(lab, host, port));
        }
        lab.own(&words)
    }

    fn parse(&self, said: &str) -> Result<Values, String> {
        parse_ok(said)
    }
}

/// The options that every client of ours takes.
pub fn load_words(lab: &Lab, host: &str, port: u16) -> Vec<String> {
    let (port, secs) = (port.to_string(), lab.secs.to_string());
    ["--host", host, "--port", &port, "--secs", &secs, "--warm", "0.25"].map(String::from).to_vec()
}

/// The last line of one of our clients: `OK name=value ...`, or one JSON object.
pub fn parse_ok(said: &str) -> Result<Values, String> {
    let line = said.lines().last().unwrap_or("");
    if line.starts_with('{') {
        let v: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
        let o = v.as_object().ok_or("not an object")?;
        return Ok(o.iter().filter_map(|(k, v)| Some((k.clone(), v.as_f64()?))).collect());
    }
    let words = line.strip_prefix("OK ").ok_or("the client did not say OK")?;
    let pair = |w: &str| {
        let (k, v) = w.split_once('=')?;
        Some((k.to_string(), v.parse().ok()?))
    };
    words.split_whitespace().map(|w| pair(w).ok_or(format!("not a number: {w}"))).collect()
}

/// A TCP port of an address that nobody uses at this moment.
pub fn free_port(host: &str) -> Result<u16, String> {
    let l = std::net::TcpListener::bind((host, 0)).map_err(|e| format!("{host}: {e}"))?;
    l.local_addr().map(|a| a.port()).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_say() {
        let v = parse_ok("hello\nOK rate=2.5 p50=7 messages=10 bytes=20\n").unwrap();
        assert_eq!((v["rate"], v["bytes"]), (2.5, 20.0));
        assert_eq!(parse_ok("{\"median\":1.5,\"messages\":3}").unwrap()["median"], 1.5);
        assert!(parse_ok("BAD").is_err() && parse_ok("").is_err() && parse_ok("OK x=y").is_err());
    }
}
