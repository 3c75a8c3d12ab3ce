//! What was measured on: processor, kernel, versions, settings.

use crate::brokers::find;
use serde_json::{json, Value};
use std::path::Path;
use std::process::Command;

fn first_line(path: &str) -> String {
    std::fs::read_to_string(path).ok().and_then(|t| t.lines().next().map(str::to_string)).unwrap_or_default()
}

fn cpu_model() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("model name"));
    line.and_then(|l| l.split_once(": ")).map_or_else(|| std::env::consts::ARCH.to_string(), |x| x.1.to_string())
}

fn memory_gib() -> f64 {
    let line = first_line("/proc/meminfo");
    let kib: f64 = line.split_whitespace().nth(1).and_then(|w| w.parse().ok()).unwrap_or(0.0);
    (kib / 1024.0 / 1024.0 * 10.0).round() / 10.0
}

/// RDMA devices that the kernel knows.
pub fn devices() -> Vec<String> {
    let dir = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    let mut v: Vec<String> = dir.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    v.sort();
    v
}

/// The first line that a program says of its version.
pub fn version(program: &Path, word: &str) -> String {
    let out = Command::new(program).arg(word).env_remove("LD_PRELOAD").output();
    let text = out.map(|o| [o.stdout, o.stderr].concat()).unwrap_or_default();
    String::from_utf8_lossy(&text).lines().next().unwrap_or("").trim().to_string()
}

/// What can be said of any host that takes part.
pub fn host() -> Value {
    let os = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let os = os.lines().find_map(|l| l.strip_prefix("PRETTY_NAME=")).unwrap_or("").trim_matches('"').to_string();
    json!({
        "ringsock": env!("CARGO_PKG_VERSION"),
        "hostname": first_line("/proc/sys/kernel/hostname"),
        "processor": cpu_model(),
        "cores": std::thread::available_parallelism().map_or(0, |n| n.get()),
        "memory_gib": memory_gib(),
        "kernel": first_line("/proc/sys/kernel/osrelease"),
        "system": os,
        "load_before": first_line("/proc/loadavg"),
        "rdma_devices": devices(),
        "perftest": !devices().is_empty() && find("ib_write_lat").is_some() && find("ib_write_bw").is_some(),
    })
}

/// Everything that a reader needs to judge the numbers.
pub fn describe(lib: &Path, rounds: usize, quick: bool, seconds: f64) -> Value {
    let settings: Vec<String> =
        std::env::vars().filter(|(k, _)| k.starts_with("RINGSOCK_")).map(|(k, v)| format!("{k}={v}")).collect();
    let mut v = host();
    v["library"] = json!(lib.display().to_string());
    v["settings"] = json!(settings);
    v["rounds"] = json!(rounds);
    v["quick"] = json!(quick);
    v["seconds_per_run"] = json!(seconds);
    v["time"] = json!(timestamp());
    v
}

/// Now, in UTC.
pub fn timestamp() -> String {
    // SAFETY: both structures have room for the answers.
    let t = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut t: libc::tm = std::mem::zeroed();
        libc::gmtime_r(&now, &mut t);
        t
    };
    let (y, m, d) = (t.tm_year + 1900, t.tm_mon + 1, t.tm_mday);
    format!("{y}-{m:02}-{d:02} {:02}:{:02} UTC", t.tm_hour, t.tm_min)
}
