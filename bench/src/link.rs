//! The limit of what carries the bytes: shared memory on one host, the RDMA device between two, which
//! perftest's `ib_write_lat` and `ib_write_bw` measure.

use crate::brokers::find;
use crate::kid::{tail, Kid, Watch};
use crate::machine;
use crate::pairs::Lab;
use crate::plan::Limit;
use crate::raw;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::Duration;

/// What measures a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tool {
    /// The time of a write.
    Latency,
    /// Writes one after another.
    Bandwidth,
}

impl Tool {
    /// The program.
    pub fn program(self) -> &'static str {
        match self {
            Tool::Latency => "ib_write_lat",
            Tool::Bandwidth => "ib_write_bw",
        }
    }

    /// The one of that program.
    pub fn named(program: &str) -> Option<Tool> {
        [Tool::Latency, Tool::Bandwidth].into_iter().find(|t| t.program() == program)
    }

    /// Round trips in microseconds, or MB per second: what the experiments show.
    fn parse(self, said: &str) -> Option<f64> {
        let row = said.lines().skip_while(|l| !l.trim_start().starts_with("#bytes")).nth(1)?;
        let n: Vec<f64> = row.split_whitespace().map_while(|w| w.parse().ok()).collect();
        match self {
            // bytes, iterations, least, most, typical: one way.
            Tool::Latency => n.get(4).map(|us| us * 2.0),
            // bytes, iterations, peak, average, in units of 2^20 bytes.
            Tool::Bandwidth => n.get(3).map(|mib| mib * 1.048576),
        }
        .filter(|x| x.is_finite() && *x > 0.0)
    }
}

/// One side of a measurement of the device: the active one knows the other's address.
pub fn command(tool: Tool, size: usize, port: u16, host: Option<&str>) -> Command {
    let mut c = Command::new(find(tool.program()).unwrap_or_else(|| tool.program().into()));
    // Addresses choose the device, as they do for the library.
    c.args(["-R", "-F", "-s", &size.to_string(), "-n", "1000", "-p", &port.to_string()]).args(host);
    c.env_remove("LD_PRELOAD");
    c
}

/// The limits of the link that is measured.
pub struct Link<'a> {
    lab: &'a Lab,
    /// Results by tool and size, each measured once; after a failure no more.
    known: RefCell<BTreeMap<(Tool, usize), Option<f64>>>,
    /// What the limit is, in words, or why there is none.
    pub what: String,
    device: bool,
}

impl<'a> Link<'a> {
    /// Of this host, or to the other one.
    pub fn new(lab: &'a Lab) -> Link<'a> {
        let no = |h: &str| format!("none: no RDMA device with perftest {h}");
        let tools = |missing: bool| !missing && find("ib_write_lat").is_some() && find("ib_write_bw").is_some();
        let (what, device) = match &lab.peer {
            None => ("two threads and a shared buffer, no socket".to_string(), false),
            Some(_) if !tools(machine::devices().is_empty()) => (no("on this host"), false),
            Some(p) if p.machine["perftest"] != true => (no("on the other host"), false),
            Some(_) => ("RDMA writes alone, by ib_write_lat (there and back) and ib_write_bw".to_string(), true),
        };
        Link { lab, known: RefCell::default(), what, device }
    }

    /// For messages of a size.
    pub fn limit(&self, limit: Limit, size: usize) -> Option<f64> {
        let time = Duration::from_millis(100);
        match (limit, &self.lab.peer) {
            (Limit::No, _) => None,
            (Limit::Trip, None) => Some(raw::trip(size, time)),
            (Limit::Flow, None) => Some(raw::flow(size, time)),
            (Limit::Trip, Some(_)) => self.device(Tool::Latency, size),
            (Limit::Flow, Some(_)) => self.device(Tool::Bandwidth, size),
        }
    }

    fn device(&self, tool: Tool, size: usize) -> Option<f64> {
        let mut known = self.known.borrow_mut();
        if !self.device || known.values().any(Option::is_none) {
            return None;
        }
        *known.entry((tool, size)).or_insert_with(|| {
            let r = self.measure(tool, size);
            if let Err(why) = &r {
                eprintln!("no limit of the raw link: {why}");
            }
            r.ok()
        })
    }

    fn measure(&self, tool: Tool, size: usize) -> Result<f64, String> {
        let peer = self.lab.peer.as_ref().ok_or("one host")?;
        let mut why = String::new();
        for _ in 0..3 {
            let port = peer.start_raw(tool, size, &self.lab.host)?;
            for _ in 0..10 {
                // The other side takes a moment to listen, and serves one client.
                std::thread::sleep(Duration::from_millis(200));
                let watch = Watch::new(Duration::from_secs(20));
                let mut c = command(tool, size, port, Some(&self.lab.host));
                c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
                let mut k = Kid::start(c, &watch)?;
                let said = k.all();
                let (status, _) = k.wait();
                if let Some(x) = tool.parse(&said).filter(|_| status == 0) {
                    peer.forget();
                    return Ok(x);
                }
                why = tail(&said, &mut k);
                if watch.fired() {
                    break;
                }
            }
            peer.forget();
        }
        Err(format!("{}: {why}", tool.program()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_perftest_says() {
        let lat = " WARNING: x\n #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]\n \
                   64      1000          1.35           3.37         1.40     \t       1.39        \t0.04\n";
        assert_eq!(Tool::Latency.parse(lat), Some(2.8));
        let bw = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                  65536      1000             11651.34            1000.00\t\t   0.186420\n";
        assert_eq!(Tool::Bandwidth.parse(bw), Some(1048.576));
        for t in [Tool::Latency, Tool::Bandwidth] {
            assert_eq!(t.parse("Couldn't connect\n"), None);
            assert_eq!(Tool::named(t.program()), Some(t));
        }
    }
}
