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
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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

/// A device, its port, and the index of an address among the port's identifiers where those are addresses (RoCE).
type Device = (String, String, Option<String>);

fn names(dir: &Path) -> Vec<String> {
    let all = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut v: Vec<String> = all.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    v.sort();
    v
}

/// The device that has an address, as below `/sys/class`; `nets` are the network devices that have it.
fn device_of(sys: &Path, addr: IpAddr, nets: &[String]) -> Option<Device> {
    let words = match addr {
        IpAddr::V4(a) => a.to_ipv6_mapped().segments(),
        IpAddr::V6(a) => a.segments(),
    };
    let gid = words.map(|w| format!("{w:04x}")).join(":");
    let read = |p: PathBuf| std::fs::read_to_string(p).unwrap_or_default().trim().to_string();
    let mut found = None;
    for dev in names(&sys.join("infiniband")) {
        let ports = sys.join("infiniband").join(&dev).join("ports");
        for port in names(&ports) {
            let p = ports.join(&port);
            for i in names(&p.join("gids")).into_iter().filter(|i| read(p.join("gids").join(i)) == gid) {
                // The same address is there for each version of RoCE.
                let newer = read(p.join("gid_attrs/types").join(&i)).contains("v2");
                if newer || found.is_none() {
                    found = Some((dev.clone(), port.clone(), Some(i)));
                }
            }
        }
    }
    // InfiniBand: the address is that of a network device above it.
    found.or_else(|| {
        let dir = |n: &String| sys.join("net").join(n).join("device/infiniband");
        let dev = nets.iter().find_map(|n| names(&dir(n)).into_iter().next())?;
        Some((dev, "1".into(), None))
    })
}

/// Network devices of this host that have an address.
fn nets_of(addr: IpAddr) -> Vec<String> {
    let o = Command::new("ip").args(["-o", "addr", "show", "to", &addr.to_string()]).output();
    let text = o.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    text.lines().filter_map(|l| Some(l.split_whitespace().nth(1)?.to_string())).collect()
}

/// One side of a measurement of the device that has the address `own`: the active side knows the other's.
pub fn command(tool: Tool, size: usize, port: u16, own: IpAddr, other: Option<&str>) -> Result<Command, String> {
    let found = device_of(Path::new("/sys/class"), own, &nets_of(own));
    let (dev, ib_port, gid) = found.ok_or(format!("no RDMA device has the address {own}"))?;
    let mut c = Command::new(find(tool.program()).ok_or(format!("{} is not installed", tool.program()))?);
    c.args(["-F", "-d", &dev, "-i", &ib_port, "-s", &size.to_string(), "-n", "1000", "-p", &port.to_string()]);
    if let Some(i) = gid {
        c.args(["-x", &i]);
    }
    c.args(other).env_remove("LD_PRELOAD");
    Ok(c)
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
        let (mut why, until) = (String::new(), Instant::now() + Duration::from_secs(30));
        while Instant::now() < until {
            let port = peer.start_raw(tool, size, &self.lab.host)?;
            for _ in 0..10 {
                // The other side takes a moment to listen; once it has served it is gone.
                std::thread::sleep(Duration::from_millis(300));
                let watch = Watch::new(Duration::from_secs(15));
                let own = *self.lab.clients.first().ok_or("no address of this host")?;
                let mut c = command(tool, size, port, own, Some(&self.lab.host))?;
                c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
                let mut k = Kid::start(c, &watch)?;
                let said = k.all();
                let (status, _) = k.wait();
                if let Some(x) = tool.parse(&said).filter(|_| status == 0) {
                    peer.forget();
                    return Ok(x);
                }
                why = tail(&said, &mut k);
                if watch.fired() || Instant::now() > until {
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
    fn devices_by_their_addresses() {
        let sys = std::env::temp_dir().join(format!("ringsock-sys.{}", std::process::id()));
        let write = |p: &str, text: &str| {
            let p = sys.join(p);
            std::fs::create_dir_all(p.parent().unwrap()).unwrap();
            std::fs::write(p, text).unwrap();
        };
        let mapped = "0000:0000:0000:0000:0000:ffff:0a09:0002";
        for (i, gid, kind) in [
            ("0", "fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2"),
            ("1", mapped, "IB/RoCE v1"),
            ("2", mapped, "RoCE v2"),
        ] {
            write(&format!("infiniband/rxe0/ports/1/gids/{i}"), gid);
            write(&format!("infiniband/rxe0/ports/1/gid_attrs/types/{i}"), kind);
        }
        write("net/ib0/device/infiniband/mlx5_0/x", "");
        let of = |a: &str, nets: &[String]| device_of(&sys, a.parse().unwrap(), nets);
        assert_eq!(of("10.9.0.2", &[]), Some(("rxe0".into(), "1".into(), Some("2".into()))));
        assert_eq!(of("10.1.0.1", &["eth0".into(), "ib0".into()]), Some(("mlx5_0".into(), "1".into(), None)));
        assert_eq!(of("10.1.0.1", &[]), None);
        std::fs::remove_dir_all(&sys).unwrap();
    }

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
