//! The other host of a measurement between two: an agent there starts and ends the servers.
//!
//! The agent is this very command, started by a command of the user's (`ssh HOST ringsock`, say), and
//! talked to by its standard input and output: a line of JSON asks, a line of JSON answers. It can do
//! nothing but run the servers of known experiments, and it ends with its standard input.

use crate::kid::{Kid, Watch};
use crate::pairs::{free_port, Bytes, Ended, Lab, Served, LIMIT};
use crate::plan::{self, Experiment};
use crate::variant::Variant;
use crate::{link, machine};
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{channel, Receiver};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long an answer may take: longer than the longest run.
const PATIENCE: Duration = Duration::from_secs(90);

/// The hidden subcommand that makes `ringsock` the agent.
pub const AGENT: &str = "__agent";

/// What both hosts must agree on before anything is measured.
#[derive(Clone)]
pub struct Terms {
    /// Whether the quick points are measured.
    pub quick: bool,
    /// Length of a measurement in seconds.
    pub secs: f64,
    /// Addresses from which clients will come.
    pub clients: Vec<IpAddr>,
    /// The specs of all columns.
    pub variants: Vec<String>,
}

/// Experiments and how many points each has: the same on both hosts, if the commands are the same.
fn shape(all: &[Experiment]) -> Value {
    all.iter().map(|e| json!([e.name, e.points.len()])).collect()
}

fn settings() -> Value {
    let of_a_host = ["RINGSOCK_REPORT", "RINGSOCK_LIB", "RINGSOCK_LOG", "RINGSOCK_RULES"];
    let ours = std::env::vars().filter(|(k, _)| k.starts_with("RINGSOCK_") && !of_a_host.contains(&k.as_str()));
    json!(ours.collect::<std::collections::BTreeMap<_, _>>())
}

/// The agent of the other host, from this side.
pub struct Peer {
    talk: Mutex<Talk>,
    /// The other host's description.
    pub machine: Value,
    /// Experiments whose servers are not installed there, and the program that is missing.
    pub missing: Vec<(String, String)>,
}

struct Talk {
    input: Option<ChildStdin>,
    /// Its lines; at an end when it has ended.
    answers: Receiver<String>,
    agent: Child,
}

impl Drop for Talk {
    fn drop(&mut self) {
        // At the end of its input it ends its servers and removes its files.
        self.input = None;
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until && !matches!(self.agent.try_wait(), Ok(Some(_))) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

impl Talk {
    fn ask(&mut self, q: Value) -> Result<Value, String> {
        let gone = "the agent on the other host is gone, or does not answer";
        let sent = self.input.as_mut().map(|i| writeln!(i, "{q}").and_then(|()| i.flush()));
        let answer = match sent {
            Some(Ok(())) => self.answers.recv_timeout(PATIENCE).ok(),
            _ => None,
        };
        let Some(answer) = answer else {
            // An answer that comes late is nobody's.
            self.input = None;
            return Err(gone.into());
        };
        let v: Value = serde_json::from_str(&answer).map_err(|_| format!("the other host says: {answer}"))?;
        match v["error"].as_str() {
            Some(e) => Err(format!("on the other host: {e}")),
            None => Ok(v),
        }
    }
}

impl Peer {
    /// Starts the agent by a command of the user's, to which [`AGENT`] is added.
    pub fn start(command: &str, terms: &Terms) -> Result<Peer, String> {
        // Words of its own on standard error, and what `ssh` may have to ask, are for the user.
        let mut c = Command::new("sh");
        c.arg("-c").arg(format!("exec {command} {AGENT}")).env_remove("LD_PRELOAD");
        c.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut agent = c.spawn().map_err(|e| format!("sh: {e}"))?;
        let (send, answers) = channel();
        let out = agent.stdout.take().ok_or("no output")?;
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let input = agent.stdin.take();
        let mut talk = Talk { input, answers, agent };
        let clients: Vec<String> = terms.clients.iter().map(IpAddr::to_string).collect();
        let hello = talk.ask(json!({
            "do": "hello", "version": env!("CARGO_PKG_VERSION"), "quick": terms.quick, "secs": terms.secs,
            "clients": clients, "variants": terms.variants, "settings": settings(),
            "plan": shape(&plan::all(terms.quick, terms.secs)),
        }))?;
        let pair = |v: &Value| Some((v[0].as_str()?.to_string(), v[1].as_str()?.to_string()));
        let missing = hello["missing"].as_array().into_iter().flatten().filter_map(pair).collect();
        Ok(Peer { talk: Mutex::new(talk), machine: hello["machine"].clone(), missing })
    }

    fn ask(&self, q: Value) -> Result<Value, String> {
        self.talk.lock().unwrap_or_else(|e| e.into_inner()).ask(q)
    }

    fn port(v: &Value) -> Result<u16, String> {
        v["port"].as_u64().and_then(|p| p.try_into().ok()).ok_or_else(|| "the other host named no port".into())
    }

    /// Starts the server of a point there; its port.
    pub fn start_server(&self, experiment: &str, point: usize, v: &Variant, host: &str) -> Result<u16, String> {
        let q = json!({ "do": "start", "experiment": experiment, "point": point, "variant": v.spec, "host": host });
        Self::port(&self.ask(q)?)
    }

    /// Starts the passive side of a measurement of the raw link there; its port.
    pub fn start_raw(&self, tool: link::Tool, size: usize, host: &str) -> Result<u16, String> {
        Self::port(&self.ask(json!({ "do": "raw", "tool": tool.program(), "size": size, "host": host }))?)
    }

    /// Ends the server.
    pub fn end(&self) -> Result<Ended, String> {
        let v = self.ask(json!({ "do": "end" }))?;
        let n = |k: &str| v[k].as_u64().unwrap_or(0);
        let bytes = Bytes { ring: n("ring"), tcp: n("tcp") };
        Ok(Ended { cpu: v["cpu"].as_f64().unwrap_or(0.0), bytes })
    }

    /// Kills what runs there, if anything does.
    pub fn forget(&self) {
        let _ = self.ask(json!({ "do": "forget" }));
    }
}

/// The agent's state after the hello.
struct Agent {
    lab: Lab,
    all: Vec<Experiment>,
    served: Option<Served>,
    raw: Option<(Kid, Watch)>,
}

impl Agent {
    fn hello(q: &Value, mut lab: Lab) -> Result<(Agent, Value), String> {
        let version = env!("CARGO_PKG_VERSION");
        if q["version"] != version {
            return Err(format!("ringsock {version} is installed here, and {} there", q["version"]));
        }
        let secs = q["secs"].as_f64().ok_or("no length")?;
        let quick = q["quick"] == true;
        lab.secs = secs;
        let all = plan::all(quick, secs);
        if q["plan"] != shape(&all) {
            return Err("another build of ringsock bench is installed here".into());
        }
        let words = |k: &str| q[k].as_array().cloned().unwrap_or_default();
        for v in words("variants") {
            Variant::parse(v.as_str().unwrap_or(""))?;
        }
        lab.clients = words("clients").iter().filter_map(|c| c.as_str()?.parse().ok()).collect();
        for (k, v) in q["settings"].as_object().into_iter().flatten() {
            // What this host has set for itself wins: its devices have names of their own.
            if k.starts_with("RINGSOCK_") && std::env::var_os(k).is_none() {
                lab.settings.push((k.clone(), v.as_str().unwrap_or("").into()));
            }
        }
        let missing: Vec<Value> = all.iter().filter_map(|e| Some(json!([e.name, e.missing(true, false)?]))).collect();
        let answer = json!({ "machine": machine::host(), "missing": missing });
        Ok((Agent { lab, all, served: None, raw: None }, answer))
    }

    fn act(&mut self, q: &Value) -> Result<Value, String> {
        let host = q["host"].as_str().unwrap_or("");
        match q["do"].as_str().unwrap_or("") {
            "start" => {
                self.served = None;
                let name = q["experiment"].as_str().unwrap_or("");
                let e = self.all.iter().find(|e| e.name == name).ok_or("no such experiment")?;
                let p = q["point"].as_u64().and_then(|i| e.points.get(i as usize)).ok_or("no such point")?;
                let v = Variant::parse(q["variant"].as_str().unwrap_or(""))?;
                let s = Served::start(&self.lab, p.pair.as_ref(), &v, host)?;
                let port = s.port;
                self.served = Some(s);
                Ok(json!({ "port": port }))
            }
            "raw" => {
                let tool = link::Tool::named(q["tool"].as_str().unwrap_or("")).ok_or("no such tool")?;
                let (port, watch) = (free_port(host)?, Watch::new(LIMIT));
                let size = q["size"].as_u64().unwrap_or(64) as usize;
                let own = host.parse().map_err(|_| format!("{host}: not an address"))?;
                let mut c = link::command(tool, size, port, own, None)?;
                c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                self.raw = Some((Kid::start(c, &watch)?, watch));
                Ok(json!({ "port": port }))
            }
            "end" => {
                let s = self.served.take().ok_or("nothing runs")?;
                let Ended { cpu, bytes } = s.end(&self.lab)?;
                Ok(json!({ "cpu": cpu, "ring": bytes.ring, "tcp": bytes.tcp }))
            }
            "forget" => {
                self.served = None;
                self.raw = None;
                Ok(json!({}))
            }
            _ => Err("not understood".into()),
        }
    }
}

/// The agent: answers until its standard input ends.
pub fn agent(lib: &Path, me: (std::path::PathBuf, Option<&'static str>)) -> Result<(), String> {
    // Whoever asks may go away at any moment; what runs here is ended then.
    // SAFETY: sets a disposition before there are threads; children get the default back.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let mut lab = Some(Lab::new(lib, me, 1.0)?);
    let mut agent: Option<Agent> = None;
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let q: Value = serde_json::from_str(&line).unwrap_or_default();
        let answer = match (&mut agent, lab.take()) {
            (None, Some(l)) if q["do"] == "hello" => Agent::hello(&q, l).map(|(a, answer)| {
                agent = Some(a);
                answer
            }),
            (Some(a), _) => a.act(&q),
            _ => Err("no hello".into()),
        };
        let text = answer.unwrap_or_else(|e| json!({ "error": e }));
        let mut out = std::io::stdout();
        if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
            break;
        }
    }
    Ok(())
}
