//! What this host has: devices, their addresses, and what the library may use of them.

use crate::ffi::{self, Lib};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

const CLASS: &str = "/sys/class/infiniband";
/// So many entries of a port's table of addresses are looked at; most have a thousand that are empty.
const GIDS: u32 = 32;

/// Whether a device has no hardware behind it (rxe, siw).
pub fn is_software(name: &str) -> bool {
    !Path::new(CLASS).join(name).join("device").exists()
}

/// Whether a device may be used: the one that is named, or else any with hardware, or any at all.
pub fn allowed(name: &str, wanted: &str, software: bool) -> bool {
    if wanted.is_empty() {
        software || !is_software(name)
    } else {
        name == wanted
    }
}

/// The address as IPv6 bytes, IPv4 mapped.
pub fn octets(sa: &libc::sockaddr_storage) -> [u8; 16] {
    if i32::from(sa.ss_family) == libc::AF_INET {
        // SAFETY: the family says which type it is.
        let a = unsafe { &*(&raw const *sa).cast::<libc::sockaddr_in>() };
        Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr)).to_ipv6_mapped().octets()
    } else {
        // SAFETY: as above; librdmacm knows no others here.
        unsafe { &*(&raw const *sa).cast::<libc::sockaddr_in6>() }.sin6_addr.s6_addr
    }
}

/// An address for librdmacm.
pub fn sockaddr(addr: &[u8; 16], port: u16) -> libc::sockaddr_storage {
    // SAFETY: zeroes are valid.
    let mut s: libc::sockaddr_storage = unsafe { core::mem::zeroed() };
    match IpAddr::V6(Ipv6Addr::from(*addr)).to_canonical() {
        IpAddr::V4(a) => {
            // SAFETY: a sockaddr_in fits.
            let to = unsafe { &mut *(&raw mut s).cast::<libc::sockaddr_in>() };
            to.sin_family = libc::AF_INET as u16;
            to.sin_port = port.to_be();
            to.sin_addr.s_addr = u32::from(a).to_be();
        }
        IpAddr::V6(a) => {
            // SAFETY: a sockaddr_in6 fits.
            let to = unsafe { &mut *(&raw mut s).cast::<libc::sockaddr_in6>() };
            to.sin6_family = libc::AF_INET6 as u16;
            to.sin6_port = port.to_be();
            to.sin6_addr.s6_addr = a.octets();
        }
    }
    s
}

/// The address by which RDMA reaches `addr`: loopback addresses have no device, so one of a device
/// of this host stands for them. Both ends of such a connection are here and find the same one.
pub fn reachable(addr: &[u8; 16], device: &str, software: bool) -> Option<[u8; 16]> {
    if !IpAddr::V6(Ipv6Addr::from(*addr)).to_canonical().is_loopback() {
        return Some(*addr);
    }
    names().into_iter().filter(|n| allowed(n, device, software)).find_map(|n| addresses(&n).into_iter().next())
}

/// The address at an index of a usable device's table, if connections with `peer` can begin there.
pub fn address_at(index: u32, peer: &[u8; 16], device: &str, software: bool) -> Option<[u8; 16]> {
    let is_v4 = |a: &Ipv6Addr| a.to_ipv4_mapped().is_some();
    let fits =
        |a: &Ipv6Addr| !a.is_unspecified() && !a.is_unicast_link_local() && is_v4(a) == is_v4(&Ipv6Addr::from(*peer));
    let ports = names().into_iter().filter(|n| allowed(n, device, software)).flat_map(|n| {
        fs::read_dir(Path::new(CLASS).join(n).join("ports")).into_iter().flatten().flatten().map(|p| p.path())
    });
    ports.filter_map(|p| gid(&p, index)).find(fits).map(|a| a.octets())
}

/// An entry of a port's table of addresses.
fn gid(port: &Path, index: u32) -> Option<Ipv6Addr> {
    fs::read_to_string(port.join(format!("gids/{index}"))).ok()?.trim().parse().ok()
}

/// By which device, port and own address the route leads to `peer`, in one line.
pub fn way(lib: &Lib, peer: &[u8; 16]) -> Result<String, i32> {
    const WAIT_MS: i32 = 1500;
    let errno = || std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    let mut sa = sockaddr(peer, 1);
    // SAFETY: objects of librdmacm that are made and destroyed here; the event is acknowledged before its id goes.
    unsafe {
        let channel = (lib.rdma_create_event_channel)();
        if channel.is_null() {
            return Err(errno());
        }
        let mut id = std::ptr::null_mut();
        let mut answer = Err(libc::EHOSTUNREACH);
        if (lib.rdma_create_id)(channel, &mut id, std::ptr::null_mut(), ffi::PS_TCP) != 0 {
            answer = Err(errno());
        } else {
            if (lib.rdma_resolve_addr)(id, std::ptr::null_mut(), (&raw mut sa).cast(), WAIT_MS) != 0 {
                answer = Err(errno());
            } else {
                let mut p = libc::pollfd { fd: (*channel).fd, events: libc::POLLIN, revents: 0 };
                let mut event = std::ptr::null_mut();
                if libc::poll(&mut p, 1, WAIT_MS + 500) == 1 && (lib.rdma_get_cm_event)(channel, &mut event) == 0 {
                    if (*event).event == ffi::cm::ADDR_RESOLVED && !(*id).verbs.is_null() {
                        let name = (lib.ibv_get_device_name)((*(*id).verbs).device);
                        let name = core::ffi::CStr::from_ptr(name).to_string_lossy();
                        let from = IpAddr::V6(Ipv6Addr::from(octets(&(*id).src))).to_canonical();
                        answer = Ok(format!("{name} port {} from {from}", (*id).port_num));
                    }
                    (lib.rdma_ack_cm_event)(event);
                }
            }
            (lib.rdma_destroy_id)(id);
        }
        (lib.rdma_destroy_event_channel)(channel);
        answer
    }
}

/// Names of the devices, sorted.
fn names() -> Vec<String> {
    let mut v: Vec<String> =
        fs::read_dir(CLASS).into_iter().flatten().flatten().map(|e| e.file_name().to_string_lossy().into()).collect();
    v.sort();
    v
}

/// Addresses of a device's ports that are not link-local: IPv4 first.
fn addresses(name: &str) -> Vec<[u8; 16]> {
    let mut v: Vec<Ipv6Addr> = Vec::new();
    for port in fs::read_dir(Path::new(CLASS).join(name).join("ports")).into_iter().flatten().flatten() {
        for gid in 0..GIDS {
            let Some(a) = self::gid(&port.path(), gid) else { continue };
            if !a.is_unspecified() && !a.is_unicast_link_local() && !v.contains(&a) {
                v.push(a);
            }
        }
    }
    v.sort_by_key(|a| (a.to_ipv4_mapped().is_none(), *a));
    v.iter().map(Ipv6Addr::octets).collect()
}

/// Devices, ports, addresses and limits, for people: one line each.
pub fn describe(lib: &Lib) -> String {
    let mut out = String::new();
    let mut n = 0;
    // SAFETY: the list is freed below, after its devices were closed.
    let list = unsafe { (lib.ibv_get_device_list)(&mut n) };
    if list.is_null() {
        return "no RDMA devices".into();
    }
    for i in 0..n.max(0) as usize {
        // SAFETY: `n` entries; the device is open while it is asked.
        unsafe {
            let dev = *list.add(i);
            let name = core::ffi::CStr::from_ptr((lib.ibv_get_device_name)(dev)).to_string_lossy().into_owned();
            let ctx = (lib.ibv_open_device)(dev);
            if ctx.is_null() {
                out += &format!("{name}: cannot be opened ({})\n", std::io::Error::last_os_error());
                continue;
            }
            let mut a: ffi::DeviceAttr = core::mem::zeroed();
            if (lib.ibv_query_device)(ctx, &mut a) == 0 {
                out += &format!(
                    "{name}{}: {} ports, {} queue pairs, {} writes each, {} completions, {} registrations\n",
                    if is_software(&name) { " (software)" } else { "" },
                    a.phys_port_cnt,
                    a.max_qp,
                    a.max_qp_wr,
                    a.max_cqe,
                    a.max_mr,
                );
                for port in 1..=a.phys_port_cnt {
                    let mut p: ffi::PortAttr = core::mem::zeroed();
                    if (lib.ibv_query_port)(ctx, port, &mut p) == 0 {
                        out += &format!(
                            "{name} port {port}: {}, {}, MTU {}\n",
                            if p.state == 4 { "active" } else { "not active" },
                            if p.link_layer == 2 { "Ethernet".into() } else { format!("InfiniBand, LID {}", p.lid) },
                            128u32 << p.active_mtu.min(5),
                        );
                    }
                }
                for a in addresses(&name) {
                    out += &format!("{name} address {}\n", IpAddr::V6(Ipv6Addr::from(a)).to_canonical());
                }
            }
            (lib.ibv_close_device)(ctx);
        }
    }
    // SAFETY: got above.
    unsafe { (lib.ibv_free_device_list)(list) };
    out
}
