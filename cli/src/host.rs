//! What the kernel and this process's surroundings allow, tried out.

use std::ffi::CStr;
use std::fs;
use std::fs::File;
use std::io;
use std::mem::{size_of, zeroed, MaybeUninit};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes of the test memory: one page, or a part of one.
const PAGE: usize = 4096;

fn checked(ret: i32) -> io::Result<i32> {
    if ret < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(ret)
    }
}

/// The kernel's release.
pub fn kernel() -> String {
    // SAFETY: all zeroes is a valid `utsname`.
    let mut name: libc::utsname = unsafe { zeroed() };
    // SAFETY: a place for the answer.
    if unsafe { libc::uname(&raw mut name) } != 0 {
        return "unknown".into();
    }
    // SAFETY: the kernel ends it with NUL.
    unsafe { CStr::from_ptr(name.release.as_ptr()) }.to_string_lossy().into_owned()
}

/// Major and minor number of a release.
pub fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// A memfd that cannot change its size any more.
pub fn sealed_memfd() -> io::Result<File> {
    // SAFETY: a C string and flags.
    let fd = checked(unsafe {
        libc::memfd_create(c"ringsock-check".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    })?;
    // SAFETY: a new fd that nobody else has.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(PAGE as u64)?;
    seal(&file, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW)?;
    Ok(file)
}

fn seal(file: &File, seals: i32) -> io::Result<()> {
    // SAFETY: fcntl on an fd of ours.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }).map(drop)
}

/// Whether who gets the fd later can be kept from writing.
pub fn future_write_seal(file: &File) -> io::Result<()> {
    seal(file, libc::F_SEAL_FUTURE_WRITE)
}

/// Whether one can wait on a futex in memory that one may only read.
pub fn futex_on_read_only_memory(file: &File) -> io::Result<()> {
    // SAFETY: a mapping of one page of a file that has it.
    let at = unsafe { libc::mmap(null_mut(), PAGE, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the page is mapped and zero.
    let word = unsafe { &*at.cast::<AtomicU32>() };
    let value = word.load(Ordering::Relaxed);
    let soon = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    // SAFETY: a mapped word and a valid time; nobody changes the word, so this runs out.
    let ret = unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const soon) };
    let error = io::Error::last_os_error();
    // SAFETY: the mapping made above, used no more.
    unsafe { libc::munmap(at, PAGE) };
    match error.raw_os_error() {
        Some(libc::ETIMEDOUT | libc::EINTR) => Ok(()),
        _ if ret == 0 => Ok(()),
        _ => Err(error),
    }
}

/// Whether abstract Unix sockets tell who the peer is.
pub fn abstract_sockets() -> io::Result<()> {
    let name = SocketAddr::from_abstract_name(format!("ringsock-check-{}", std::process::id()))?;
    let listener = UnixListener::bind_addr(&name)?;
    let _client = UnixStream::connect_addr(&name)?;
    let (server, _) = listener.accept()?;
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let fd = server.as_raw_fd();
    get_option(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut cred).map(drop)
}

fn get_option<T>(fd: RawFd, level: i32, name: i32, to: &mut T) -> io::Result<usize> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `to` has as many bytes as said.
    checked(unsafe { libc::getsockopt(fd, level, name, std::ptr::from_mut(to).cast(), &raw mut len) })?;
    Ok(len as usize)
}

/// Whether the kernel counts a connection's bytes (needed before a connection may move).
pub fn tcp_counts() -> io::Result<()> {
    use std::io::{Read, Write};
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut a = TcpStream::connect(listener.local_addr()?)?;
    let (mut b, _) = listener.accept()?;
    a.write_all(b"hello")?;
    let mut buf = [0; 5];
    b.read_exact(&mut buf)?;
    // `tcpi_bytes_received` is the u64 at offset 128 of `struct tcp_info`.
    let mut info = [0u64; 32];
    let len = get_option(b.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
    match info[128 / 8] {
        5 if len >= 136 => Ok(()),
        n => Err(io::Error::other(format!("TCP_INFO counts {n} of 5 bytes"))),
    }
}

/// Soft and hard limit.
pub fn limit(which: libc::__rlimit_resource_t) -> (u64, u64) {
    let mut l = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the answer.
    unsafe { libc::getrlimit(which, &raw mut l) };
    (l.rlim_cur, l.rlim_max)
}

/// CPUs that this process may run on.
pub fn cpus() -> u32 {
    let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: a place for the answer, of the size said; zeroes are a valid set.
    unsafe {
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), set.as_mut_ptr()) != 0 {
            return 1;
        }
        libc::CPU_COUNT(set.assume_init_ref()) as u32
    }
}

/// CPUs' worth of time that the control group grants, if it limits that.
pub fn cpu_quota() -> Option<f64> {
    let group = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = group.lines().find_map(|l| l.strip_prefix("0::"))?;
    let mut dir = Some(Path::new(path));
    let mut least: Option<f64> = None;
    while let Some(d) = dir {
        let file = Path::new("/sys/fs/cgroup").join(d.strip_prefix("/").unwrap_or(d)).join("cpu.max");
        if let Some(q) = fs::read_to_string(file).ok().as_deref().and_then(parse_cpu_max) {
            least = Some(least.map_or(q, |l| l.min(q)));
        }
        dir = d.parent();
    }
    least
}

fn parse_cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0.0).then_some(quota / period)
}

/// The mode in `/proc/PID/status`: 0 none, 1 strict, 2 a filter.
pub fn seccomp(pid: &str) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|l| l.strip_prefix("Seccomp:"))?.trim().parse().ok()
}

/// A port of an RDMA device.
#[derive(Debug, serde::Serialize)]
pub struct RdmaPort {
    pub device: String,
    pub port: u32,
    /// Like `ACTIVE`.
    pub state: String,
    /// `Ethernet` or `InfiniBand`.
    pub link_layer: String,
    /// A device without hardware (rxe, siw).
    pub software: bool,
}

/// Every port below `/sys/class/infiniband`.
pub fn rdma_ports(class: &Path) -> Vec<RdmaPort> {
    let mut found = Vec::new();
    for device in fs::read_dir(class).into_iter().flatten().flatten() {
        let read = |path: &Path| fs::read_to_string(path).map(|t| t.trim().to_string()).unwrap_or_default();
        for port in fs::read_dir(device.path().join("ports")).into_iter().flatten().flatten() {
            let Some(number) = port.file_name().to_str().and_then(|n| n.parse().ok()) else { continue };
            let state = read(&port.path().join("state"));
            found.push(RdmaPort {
                device: device.file_name().to_string_lossy().into_owned(),
                port: number,
                // The file says like `4: ACTIVE`.
                state: state.split_once(": ").map_or(state.as_str(), |(_, s)| s).to_string(),
                link_layer: read(&port.path().join("link_layer")),
                // Hardware hangs on a bus.
                software: !device.path().join("device").exists(),
            });
        }
    }
    found.sort_by(|a, b| (&a.device, a.port).cmp(&(&b.device, b.port)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases() {
        assert_eq!(kernel_version("6.18.44-1-amd64"), Some((6, 18)));
        assert_eq!(kernel_version("5.15"), Some((5, 15)));
        assert_eq!(kernel_version("unknown"), None);
        assert!(kernel_version(&kernel()).is_some());
    }

    #[test]
    fn what_any_linux_has() {
        let file = sealed_memfd().unwrap();
        futex_on_read_only_memory(&file).unwrap();
        assert!(file.set_len(1).is_err());
        abstract_sockets().unwrap();
        assert!(cpus() >= 1 && limit(libc::RLIMIT_NOFILE).0 > 0);
        assert!(seccomp("self").is_some());
    }

    #[test]
    fn quotas() {
        assert_eq!(parse_cpu_max("max 100000\n"), None);
        assert_eq!(parse_cpu_max("150000 100000\n"), Some(1.5));
        assert_eq!(parse_cpu_max("1 0"), None);
    }

    #[test]
    fn ports_from_sysfs() {
        let dir = std::env::temp_dir().join(format!("ringsock-sysfs-{}", std::process::id()));
        let port = dir.join("rxe0/ports/1");
        fs::create_dir_all(&port).unwrap();
        fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
        fs::write(port.join("link_layer"), "Ethernet\n").unwrap();
        let ports = rdma_ports(&dir);
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(ports.len(), 1);
        assert_eq!((ports[0].device.as_str(), ports[0].port, ports[0].state.as_str()), ("rxe0", 1, "ACTIVE"));
        assert!(ports[0].software && rdma_ports(&dir).is_empty());
    }
}
