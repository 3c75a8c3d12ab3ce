//! Real servers, where they are installed: unmodified, each under a load tool of its own or one of
//! our clients that check what comes back.

use crate::pairs::{free_port, load_words, parse_ok, Lab, Pair, Start, Stop, Values};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A real server with its load.
pub struct Broker {
    /// Which.
    pub kind: Kind,
    /// Connections of the load.
    pub conns: usize,
    /// Bytes of a value, message or file.
    pub size: usize,
    /// Requests of a load tool that counts them instead of seconds.
    pub requests: u64,
}

/// The servers that are known.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    /// redis-server under redis-benchmark.
    Redis,
    /// memcached.
    Memcached,
    /// mosquitto.
    Mosquitto,
    /// PostgreSQL under pgbench.
    Postgres,
    /// nginx under wrk.
    Nginx,
    /// HAProxy before a page of its own, under wrk.
    Haproxy,
}

/// Where a program is, also in the places that only root's PATH has.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = path.split(':').map(PathBuf::from).collect();
    dirs.extend(["/usr/sbin", "/usr/local/sbin", "/sbin"].map(PathBuf::from));
    if let Ok(versions) = std::fs::read_dir("/usr/lib/postgresql") {
        let mut v: Vec<PathBuf> = versions.flatten().map(|e| e.path().join("bin")).collect();
        v.sort();
        // Debian's wrappers in PATH want a cluster of Debian's.
        dirs.splice(0..0, v.into_iter().rev());
    }
    dirs.iter()
        .map(|d| d.join(name))
        .find(|p| p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0))
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 6] =
        [Kind::Redis, Kind::Memcached, Kind::Mosquitto, Kind::Postgres, Kind::Nginx, Kind::Haproxy];

    fn programs(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            Kind::Redis => (&["redis-server"], &["redis-benchmark"]),
            Kind::Memcached => (&["memcached"], &[]),
            Kind::Mosquitto => (&["mosquitto"], &[]),
            Kind::Postgres => (&["initdb", "postgres"], &["pgbench", "pg_isready"]),
            Kind::Nginx => (&["nginx"], &["wrk"]),
            Kind::Haproxy => (&["haproxy"], &["wrk"]),
        }
    }

    /// Its name and what loads it.
    pub fn title(self) -> &'static str {
        match self {
            Kind::Redis => "Redis: GET under redis-benchmark",
            Kind::Memcached => "memcached: nine gets for a set",
            Kind::Mosquitto => "mosquitto: a message published and received (QoS 0)",
            Kind::Postgres => "PostgreSQL: pgbench, read only, prepared",
            Kind::Nginx => "nginx: a file over kept connections under wrk",
            Kind::Haproxy => "HAProxy: a page behind it over kept connections under wrk",
        }
    }
}

fn root() -> bool {
    // SAFETY: no preconditions.
    unsafe { libc::geteuid() == 0 }
}

/// A user's ids.
fn user(name: &str) -> Option<(u32, u32)> {
    let text = std::fs::read_to_string("/etc/passwd").ok()?;
    let line = text.lines().find(|l| l.split(':').next() == Some(name))?;
    let n = |i: usize| line.split(':').nth(i)?.parse().ok();
    Some((n(2)?, n(3)?))
}

/// An installed program.
pub fn program(name: &str) -> Result<Command, String> {
    find(name).map(Command::new).ok_or(format!("{name} is not installed"))
}

/// Writes a file.
pub fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

fn append(path: &Path, text: &str) -> Result<(), String> {
    let f = std::fs::OpenOptions::new().append(true).open(path);
    f.and_then(|mut f| f.write_all(text.as_bytes())).map_err(|e| format!("{}: {e}", path.display()))
}

/// An address as it stands before a port.
fn bracketed(host: &str) -> String {
    if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_string()
    }
}

impl Broker {
    /// PostgreSQL's files, made once; its server may not be root's.
    fn database(&self, lab: &Lab) -> Result<PathBuf, String> {
        let data = lab.dir.join("pg");
        if data.join("ready").exists() {
            return Ok(data);
        }
        std::fs::create_dir_all(&data).map_err(|e| e.to_string())?;
        std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o700)).map_err(|e| e.to_string())?;
        if let Some((uid, gid)) = user("postgres").filter(|_| root()) {
            std::os::unix::fs::chown(&data, Some(uid), Some(gid)).map_err(|e| e.to_string())?;
        }
        let mut c = self.as_postgres("initdb")?;
        c.arg("-D").arg(&data).args(["-A", "trust", "-U", "postgres", "--no-sync", "--locale=C"]);
        quiet(c)?;
        let lines: Vec<String> = lab
            .clients
            .iter()
            .map(|a| format!("host all all {a}/{} trust\n", if a.is_ipv4() { 32 } else { 128 }))
            .collect();
        append(&data.join("pg_hba.conf"), &lines.concat())?;
        write(&data.join("ready"), "")?;
        Ok(data)
    }

    fn as_postgres(&self, name: &str) -> Result<Command, String> {
        let mut c = program(name)?;
        c.env_remove("LD_PRELOAD").current_dir("/");
        if let Some((uid, gid)) = user("postgres").filter(|_| root()) {
            c.uid(uid).gid(gid);
        }
        Ok(c)
    }
}

fn quiet(mut c: Command) -> Result<(), String> {
    let o = c.output().map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&o.stderr).into_owned();
    o.status.success().then_some(()).ok_or(format!("{}: {text}", c.get_program().to_string_lossy()))
}

impl Pair for Broker {
    fn server(&self, lab: &Lab, host: &str) -> Result<Start, String> {
        let port = free_port(host)?;
        let p = port.to_string();
        let mut stop = Stop::Signal(libc::SIGTERM);
        let mut clean: &[i32] = &[0];
        let command = match self.kind {
            Kind::Redis => {
                let mut c = program("redis-server")?;
                c.args(["--port", &p, "--bind", host, "--save", "", "--appendonly", "no", "--daemonize", "no"]);
                c.args(["--protected-mode", "no"]).arg("--dir").arg(&lab.dir);
                c
            }
            Kind::Memcached => {
                let mut c = program("memcached")?;
                c.args(["-l", host, "-p", &p, "-U", "0", "-t", "4"]);
                if root() {
                    c.args(["-u", if user("memcache").is_some() { "memcache" } else { "root" }]);
                }
                c
            }
            Kind::Mosquitto => {
                let conf = lab.dir.join("mosquitto.conf");
                write(&conf, &format!("listener {port} {host}\nallow_anonymous true\nset_tcp_nodelay true\n"))?;
                let mut c = program("mosquitto")?;
                c.arg("-c").arg(conf);
                c
            }
            Kind::Postgres => {
                stop = Stop::Signal(libc::SIGINT);
                let data = self.database(lab)?;
                let mut c = self.as_postgres("postgres")?;
                c.arg("-D").arg(data).args(["-p", &p, "-c", &format!("listen_addresses={host}")]);
                c.args(["-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "log_min_messages=fatal"]);
                c
            }
            Kind::Nginx => {
                stop = Stop::Signal(libc::SIGQUIT);
                let (dir, file) = (lab.dir.display(), lab.dir.join("file"));
                write(&file, &"x".repeat(self.size))?;
                let user = if root() && user("www-data").is_some() { "user www-data;" } else { "" };
                let conf = lab.dir.join("nginx.conf");
                write(
                    &conf,
                    &format!(
                        "{user} worker_processes 1; daemon off; pid {dir}/nginx.pid; error_log stderr crit;\n\
                         events {{ worker_connections 512; }}\n\
                         http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000000;\n\
                         client_body_temp_path {dir}/n1; proxy_temp_path {dir}/n2; fastcgi_temp_path {dir}/n3;\n\
                         uwsgi_temp_path {dir}/n4; scgi_temp_path {dir}/n5;\n\
                         server {{ listen {}:{port}; root {dir}; }} }}\n",
                        bracketed(host)
                    ),
                )?;
                let mut c = program("nginx")?;
                c.args(["-e", "stderr", "-c"]).arg(conf);
                c
            }
            Kind::Haproxy => {
                // The page is HAProxy's own, behind another pair of connections.
                let (conf, page, back) = (lab.dir.join("haproxy.cfg"), lab.dir.join("page"), free_port(host)?);
                write(&page, &"x".repeat(self.size))?;
                let at = bracketed(host);
                let text = format!(
                    "defaults\n mode http\n timeout connect 10s\n timeout client 60s\n timeout server 60s\n\
                     frontend web\n bind {at}:{port}\n default_backend b\n\
                     backend b\n http-reuse always\n server s {at}:{back}\n\
                     frontend page\n bind {at}:{back}\n\
                     http-request return status 200 content-type text/plain file {}\n",
                    page.display()
                );
                write(&conf, &text)?;
                clean = &[0, 143];
                let mut c = program("haproxy")?;
                c.arg("-f").arg(conf);
                c
            }
        };
        Ok(Start { command, port: Some(port), stop, clean })
    }

    fn client(&self, lab: &Lab, host: &str, port: u16) -> Command {
        let (p, conns, size) = (port.to_string(), self.conns.to_string(), self.size.to_string());
        let named = |name: &str| Command::new(find(name).unwrap_or_else(|| name.into()));
        match self.kind {
            Kind::Redis => {
                let mut c = named("redis-benchmark");
                let n = self.requests.to_string();
                c.args(["-h", host, "-p", &p, "-t", "get", "-c", &conns, "-d", &size, "-n", &n, "--csv"]);
                c
            }
            Kind::Memcached | Kind::Mosquitto => {
                let kind = if self.kind == Kind::Memcached { "memcache" } else { "mqtt" };
                let mut words = ["load-client", kind, "--size", &size, "--conns", &conns].map(String::from).to_vec();
                words.extend(load_words(lab, host, port));
                lab.own(&words)
            }
            Kind::Postgres => {
                let tool = named("pgbench").get_program().to_owned();
                let mut c = Command::new("sh");
                let secs = lab.secs.ceil().max(1.0);
                // A server accepts before it serves; the tables are made once for all runs.
                c.arg("-c").arg(
                    "d=$1; shift; tool=$1; shift; secs=$1; shift; preload=$LD_PRELOAD; unset LD_PRELOAD\n\
                     n=0; until \"$(dirname \"$tool\")/pg_isready\" -q -h \"$2\" -p \"$4\" || [ $n = 200 ]; do\n\
                     n=$((n + 1)); sleep 0.1; done\n\
                     [ -e \"$d/pg.tables\" ] || { \"$tool\" -i -q -s 1 \"$@\" >/dev/null 2>&1 && : >\"$d/pg.tables\"; }\n\
                     [ -z \"$preload\" ] || export LD_PRELOAD=\"$preload\"\n\
                     exec \"$tool\" -n -S -M prepared -T \"$secs\" -c \"$CONNS\" -j 1 \"$@\"",
                );
                c.arg("sh").arg(&lab.dir).arg(tool).arg(secs.to_string());
                c.args(["-h", host, "-p", &p, "-U", "postgres", "postgres"]).env("CONNS", conns);
                c
            }
            Kind::Nginx | Kind::Haproxy => {
                let mut c = named("wrk");
                c.args(["-t1", "-c", &conns, "-d", &format!("{}s", lab.secs.ceil().max(1.0)), "--latency"]);
                c.arg(format!("http://{}:{port}/file", bracketed(host)));
                c
            }
        }
    }

    fn programs(&self) -> (&'static [&'static str], &'static [&'static str]) {
        self.kind.programs()
    }

    fn parse(&self, said: &str) -> Result<Values, String> {
        let mut v = Values::new();
        match self.kind {
            Kind::Memcached | Kind::Mosquitto => return parse_ok(said),
            Kind::Redis => {
                let row = said.lines().find(|l| l.starts_with("\"GET\"")).ok_or("no row of GET")?;
                let n: Vec<f64> = row.split(',').skip(1).filter_map(|w| w.trim_matches('"').parse().ok()).collect();
                let [rate, _, _, p50, _, p99, ..] = n[..] else { return Err("a short row".into()) };
                v.insert("rate".into(), rate);
                v.insert("p50".into(), p50 * 1000.0);
                v.insert("p99".into(), p99 * 1000.0);
                v.insert("messages".into(), self.requests as f64);
                v.insert("bytes".into(), self.requests as f64 * self.size as f64);
            }
            Kind::Postgres => {
                let after = |s: &str| said.split(s).nth(1)?.split_whitespace().next()?.parse::<f64>().ok();
                let n = after("transactions actually processed: ").ok_or("no count")?;
                v.insert("rate".into(), after("tps = ").ok_or("no rate")?);
                v.insert("p50".into(), after("latency average = ").ok_or("no latency")? * 1000.0);
                v.insert("messages".into(), n);
                v.insert("bytes".into(), n * 100.0);
            }
            Kind::Nginx | Kind::Haproxy => {
                // The name begins a line: "97.99%" stands in another one.
                let after =
                    |s: &str| said.lines().find_map(|l| l.trim_start().strip_prefix(s))?.split_whitespace().next();
                let rate: f64 = after("Requests/sec:").and_then(|w| w.parse().ok()).ok_or("no rate")?;
                if said.contains("Socket errors") || said.contains("Non-2xx") {
                    return Err("errors".into());
                }
                v.insert("rate".into(), rate);
                v.insert("p50".into(), after("50%").and_then(micros).ok_or("no median")?);
                v.insert("p99".into(), after("99%").and_then(micros).ok_or("no percentile")?);
                let line = said.lines().find(|l| l.contains(" requests in ")).ok_or("no count")?;
                let n: f64 = line.split_whitespace().next().and_then(|w| w.parse().ok()).ok_or("no count")?;
                v.insert("messages".into(), n);
                v.insert("bytes".into(), n * self.size as f64);
            }
        }
        Ok(v)
    }
}

/// `1.20ms`, `65.00us` or `2.00s` in microseconds.
fn micros(w: &str) -> Option<f64> {
    let (digits, unit) = w.split_at(w.find(|c: char| c.is_ascii_alphabetic())?);
    let x: f64 = digits.parse().ok()?;
    Some(match unit {
        "us" => x,
        "ms" => x * 1e3,
        "s" => x * 1e6,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broker(kind: Kind) -> Broker {
        Broker { kind, conns: 1, size: 100, requests: 1000 }
    }

    #[test]
    fn outputs_of_load_tools() {
        let said = "\"test\",\"rps\"\n\"GET\",\"50000.00\",\"0.5\",\"0.1\",\"0.25\",\"0.6\",\"0.7\",\"1.0\"\n";
        let v = broker(Kind::Redis).parse(said).unwrap();
        assert_eq!((v["rate"], v["p50"], v["p99"]), (50000.0, 250.0, 700.0));
        let said = "number of transactions actually processed: 900\nlatency average = 0.100 ms\ntps = 9000.5 (x)\n";
        let v = broker(Kind::Postgres).parse(said).unwrap();
        assert_eq!((v["rate"], v["p50"], v["messages"]), (9000.5, 100.0, 900.0));
        let said = "  Thread Stats   Avg      Stdev     Max   +/- Stdev\n    Latency    96.57us  155.70us   3.36ms   97.99%\n    \
            Req/Sec    12.18k     9.15k   39.61k    86.50%\n  Latency Distribution\n 50%   65.00us\n 75% 1ms\n 99%    1.20ms\n  1000 requests in 1.00s, 1MB read\nRequests/sec: 1000.0\n";
        let v = broker(Kind::Nginx).parse(said).unwrap();
        assert_eq!((v["p50"], v["p99"], v["bytes"]), (65.0, 1200.0, 100_000.0));
        assert!(broker(Kind::Nginx).parse("").is_err() && broker(Kind::Redis).parse("").is_err());
    }

    #[test]
    fn times_of_wrk() {
        assert_eq!(micros("2.00s"), Some(2e6));
        assert_eq!(micros("9"), None);
    }
}
