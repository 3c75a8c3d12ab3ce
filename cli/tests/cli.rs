//! The command as its users run it.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder that goes with the test.
struct Temp(PathBuf);

impl Temp {
    fn new(name: &str) -> Temp {
        let dir = std::env::temp_dir().join(format!("ringsock-cli-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Temp(dir)
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Some shared object under the library's name: these tests are about the
/// command, and must not wait for the library to be built.
fn stand_in(dir: &Path) -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let some = maps.lines().filter_map(|l| Some(&l[l.find('/')?..])).find(|p| p.contains("/libgcc_s.so"));
    let to = dir.join("libringsock.so");
    fs::copy(some.expect("Rust programs have libgcc_s"), &to).unwrap();
    to.canonicalize().unwrap()
}

fn ringsock(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringsock"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RINGSOCK_") || name == "LD_PRELOAD" {
            command.env_remove(name);
        }
    }
    command.args(args).envs(env.iter().copied()).output().unwrap()
}

fn out(o: &Output) -> String {
    String::from_utf8_lossy(&o.stdout).into_owned()
}

fn err(o: &Output) -> String {
    String::from_utf8_lossy(&o.stderr).into_owned()
}

#[test]
fn help_has_examples() {
    for command in [None, Some("run"), Some("stat"), Some("off"), Some("on"), Some("check"), Some("bench")] {
        let args: Vec<&str> = command.into_iter().chain(["--help"]).collect();
        let o = ringsock(&args, &[]);
        assert!(o.status.success() && out(&o).contains("Examples:"), "{args:?}");
    }
    assert!(out(&ringsock(&["run", "--help"], &[])).contains("--ring-bytes <BYTES>"));
    assert!(!out(&ringsock(&["--help"], &[])).contains("__"));
    assert_eq!(ringsock(&[], &[]).status.code(), Some(2));
}

#[test]
fn run_preloads_and_sets_and_keeps_the_exit_code() {
    let dir = Temp::new("run");
    let lib = stand_in(&dir.0);
    let lib = lib.to_str().unwrap();
    let script = "echo $LD_PRELOAD; echo $RINGSOCK_SPIN_US $RINGSOCK_LINKS $RINGSOCK_LOG; grep -c libringsock /proc/self/maps; exit 3";
    let o = ringsock(
        &["run", "--spin-us", "50", "--links=shm", "--", "sh", "-c", script],
        &[("RINGSOCK_LIB", lib), ("RINGSOCK_SPIN_US", "1"), ("RINGSOCK_LOG", "info")],
    );
    let text = out(&o);
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some(lib), "{}", err(&o));
    assert_eq!(lines.next(), Some("50 shm info"));
    assert!(lines.next().is_some_and(|n| n.parse::<u32>().unwrap() > 0));
    assert_eq!(o.status.code(), Some(3));
    assert_eq!(err(&o), "");
}

#[test]
fn run_says_what_is_wrong() {
    let dir = Temp::new("wrong");
    let lib = stand_in(&dir.0);
    let lib = &[("RINGSOCK_LIB", lib.to_str().unwrap())];
    let o = ringsock(&["run", "--spin-us", "fast", "--", "true"], lib);
    assert!(
        o.status.code() == Some(2) && err(&o).contains("--spin-us \"fast\" is not understood; expected auto"),
        "{}",
        err(&o)
    );
    let o = ringsock(&["run", "--", "no-such-program-here"], lib);
    assert!(o.status.code() == Some(2) && err(&o).contains("no-such-program-here was not found"));
    let o = ringsock(&["run", "--rules", "/nonexistent/rules", "--", "true"], lib);
    assert!(o.status.code() == Some(2) && err(&o).contains("/nonexistent/rules"));
    let o = ringsock(&["run", "--", "true"], &[("RINGSOCK_LIB", "/nonexistent/lib.so")]);
    assert!(o.status.code() == Some(2) && err(&o).contains("/nonexistent/lib.so"));
    let o = ringsock(&["run"], lib);
    assert!(o.status.code() == Some(2) && err(&o).contains("PROGRAM"));
}

#[test]
fn summary_waits_and_cleans_up() {
    let dir = Temp::new("summary");
    let lib = stand_in(&dir.0);
    let temp = dir.0.join("tmp");
    fs::create_dir(&temp).unwrap();
    let env = [("RINGSOCK_LIB", lib.to_str().unwrap()), ("TMPDIR", temp.to_str().unwrap())];
    let o = ringsock(&["run", "--summary", "--", "sh", "-c", "exit 4"], &env);
    assert_eq!(o.status.code(), Some(4));
    assert!(err(&o).contains("ringsock summary") && err(&o).contains("no report"), "{}", err(&o));
    // A program that writes a report as the library does.
    let report = r#"{"pid":1,"program":"x","connections":[],"totals":{"connections":4,"upgraded":3,"tx_bytes_tcp":1,"tx_bytes_ring":9,"rx_bytes_tcp":0,"rx_bytes_ring":0,"upgrades":3,"returns":0}}"#;
    let script = format!("echo '{report}' > $(dirname \"$RINGSOCK_REPORT\")/1.json; kill -9 $$");
    let o = ringsock(&["run", "--summary", "--", "sh", "-c", &script], &env);
    assert_eq!(o.status.code(), Some(137));
    assert!(err(&o).contains("3 (75.0%)") && err(&o).contains("9 B (90.0%)"), "{}", err(&o));
    assert_eq!(fs::read_dir(&temp).unwrap().count(), 0, "the reports are removed");
}

#[test]
fn stat_of_this_process() {
    let me = std::process::id().to_string();
    let o = ringsock(&["stat", &me], &[]);
    assert!(o.status.code() == Some(2) && err(&o).contains("ringsock run"), "{}", err(&o));
    let o = ringsock(&["stat", "4294967295"], &[]);
    assert!(err(&o).contains("there is no process"));
    let o = ringsock(&["stat", "--json"], &[]);
    assert!(serde_json::from_slice::<Value>(&o.stdout).unwrap().is_array());
}

#[test]
fn check_in_words_and_json() {
    let dir = Temp::new("check");
    let lib = stand_in(&dir.0);
    let env = [("RINGSOCK_LIB", lib.to_str().unwrap()), ("RINGSOCK_LINKS", "carrier-pigeon")];
    let o = ringsock(&["check", "sh"], &env);
    let text = out(&o);
    for part in ["can be preloaded", "abstract Unix sockets", "carrier-pigeon is not understood", "  rdma  "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let o = ringsock(&["check", "--json", "/etc/passwd"], &env);
    let json: Value = serde_json::from_slice(&o.stdout).unwrap();
    assert_eq!((o.status.code(), &json["shm"], &json["verbs"]), (Some(1), &Value::Bool(false), &Value::Bool(false)));
    let program = json["items"].as_array().unwrap().iter().find(|i| i["name"] == "program").unwrap();
    assert_eq!(program["verdict"], "fail");
}

#[test]
fn bench_names_its_experiments_and_refuses_others() {
    let o = ringsock(&["bench", "--quick", "--list"], &[]);
    let text = out(&o);
    assert!(o.status.success() && text.contains("trips ") && text.contains("pubsub-rate "), "{text}");
    let o = ringsock(&["bench", "--only", "nonsense"], &[]);
    assert!(!o.status.success() && err(&o).contains("--list"), "{}", err(&o));
    let o = ringsock(&["bench", "--seconds", "1000"], &[]);
    assert!(!o.status.success() && err(&o).contains("--seconds"), "{}", err(&o));
}

#[test]
fn a_program_of_bench_checks_what_comes_back() {
    let o = ringsock(&["__program", "load-client", "nonsense"], &[]);
    assert!(!o.status.success() && err(&o).contains("trips"), "{}", err(&o));
    // A server that sends other bytes back is found out.
    let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = l.local_addr().unwrap().port().to_string();
    let liar = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut s, mut b) = (l.accept().unwrap().0, [0; 64]);
        s.read_exact(&mut b).unwrap();
        b[40] ^= 1;
        s.write_all(&b).unwrap();
        let _ = s.read(&mut b);
    });
    let o = ringsock(&["__program", "load-client", "trips", "--port", &port, "--secs", "0.1"], &[]);
    assert!(!o.status.success() && err(&o).contains("other bytes"), "{}", err(&o));
    liar.join().unwrap();
}
