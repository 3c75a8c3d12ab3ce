//! Threads that share less with each other than threads do: their table of file descriptors, or the network.

use super::cx::{untried, Cx, Op, Res, Why};
use super::procs::{child, reap};
use super::Check;
use crate::{ensure, same, sys, util};
use libc::{c_int, POLLIN};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::RawFd;
use std::sync::{Arc, Barrier};
use std::thread::spawn;

/// The checks of this file.
pub const CHECKS: &[Check] = &[
    ("own-files-of-a-thread", |cx| own_files(cx, unshare_and_close)),
    ("own-files-by-close-range", |cx| own_files(cx, close_range)),
    ("own-files-of-a-program-of-one-thread", files_alone),
    ("own-networks-of-threads", networks),
];

const CLOSE_RANGE_UNSHARE: c_int = 2;

fn unshare_and_close(fd: RawFd) -> Res {
    // SAFETY: no pointers.
    same!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0, "unshare");
    Ok(sys::close(fd)?)
}

fn close_range(fd: RawFd) -> Res {
    // SAFETY: plain numbers.
    same!(unsafe { libc::syscall(libc::SYS_close_range, fd, fd, CLOSE_RANGE_UNSHARE) }, 0, "close_range");
    Ok(())
}

/// A thread closes its copy of the connection, and has another one by that number.
fn own_files(cx: &mut Cx, close: fn(RawFd) -> Res) -> Res {
    let ep = sys::epoll_awaited()?;
    sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, cx.fd, libc::EPOLLIN as u32, 7)?;
    let fd = cx.fd;
    let other = spawn(move || {
        close(fd)?;
        let (l, port) = sys::listen(0, 1)?;
        same!(l, fd, "the lowest number in the thread's own table");
        let ours = sys::connect(port)?;
        sys::nonblock(ours, true)?;
        sys::accept(l, 0)?;
        sys::dup2(ours, l)?;
        same!(sys::recv(l, &mut [0; 10], 0), Err(libc::EAGAIN), "a receive of nothing");
        Ok(())
    });
    other.join().map_err(|_| Why("a thread panicked".into()))??;
    cx.warm(20, 0)?;
    cx.later(50, 100)?;
    same!(sys::epoll_wait(ep, 8, 2000)?, [(libc::EPOLLIN as u32, 7)], "what the set tells of");
    cx.recv(100)?;
    cx.later(50, 100)?;
    cx.recv(100)?;
    cx.tell(Op::Send, 100_000, 0, 0)?;
    cx.recv(100_000)?;
    cx.renew()?;
    cx.warm(200, 10)
}

/// Enough for a connection of one process with itself to leave TCP.
fn talk(ours: RawFd, theirs: RawFd, tag: u8) -> Res {
    let mut got = [0u8; 64];
    for i in 0..200u8 {
        let sent = [i ^ tag; 64];
        for (from, to) in [(ours, theirs), (theirs, ours)] {
            same!(sys::write(from, &sent)?, 64, "write {i}");
            ensure!(sys::wait1(to, POLLIN, 5000)? & POLLIN != 0, "poll {i}");
            sys::read_exact(to, &mut got)?;
            ensure!(got == sent, "the bytes of {i} differ: {:02x?}", &got[..8]);
        }
        if i % 50 == 0 {
            util::pause_ms(5);
        }
    }
    Ok(())
}

/// To a program of one thread it makes no difference: what it closes is closed, and its connections are what they were.
fn files_alone(_: &mut Cx) -> Res {
    reap(child(|| {
        let round = || {
            let (l, port) = sys::listen(0, 1)?;
            let ours = sys::connect(port)?;
            let theirs = sys::accept(l, 0)?;
            talk(ours, theirs, 0)?;
            sys::close(ours)?;
            same!(sys::recv(theirs, &mut [0; 10], 0)?, 0, "a receive at the end");
            // TCP_CLOSE_WAIT.
            ensure!(
                (0..200).any(|_| {
                    util::pause_ms(10);
                    sys::tcp_state(theirs) == Ok(8)
                }),
                "the kernel knows of no end"
            );
            [l, theirs].into_iter().try_for_each(sys::close)?;
            Ok::<(), Why>(())
        };
        round()?;
        // SAFETY: no pointers.
        same!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0, "unshare");
        round()?;
        close_range(sys::dup(0)?)?;
        round()
    })?)
}

/// `lo` is up in the network of this thread.
fn open_network() -> Res {
    // SAFETY: plain data.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[..2].copy_from_slice(&[b'l' as _, b'o' as _]);
    request.ifr_ifru.ifru_flags = libc::IFF_UP as i16;
    let fd = sys::tcp_socket()?;
    // SAFETY: the request is what the call takes.
    same!(unsafe { libc::ioctl(fd, libc::SIOCSIFFLAGS as _, &request) }, 0, "SIOCSIFFLAGS");
    Ok(sys::close(fd)?)
}

/// Connections with the same addresses and ports, in networks of threads' own.
fn networks(cx: &mut Cx) -> Res {
    const THREADS: u8 = 3;
    const PORT: u16 = 23901;
    const LO: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let here = Arc::new(Barrier::new(THREADS.into()));
    let threads: Vec<_> = (1..=THREADS)
        .map(|tag| {
            let here = here.clone();
            spawn(move || {
                // SAFETY: no pointers.
                let may = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
                here.wait();
                if !may {
                    return untried("the user may not make networks");
                }
                open_network()?;
                for i in 0..5 {
                    let (l, port) = sys::listen_at(LO, PORT, 1)?;
                    let ours = sys::tcp_socket_for(LO)?;
                    sys::bind_to_host(ours, LO, PORT + 1 + i)?;
                    sys::connect_to_host(ours, LO, port)?;
                    let theirs = sys::accept(l, 0)?;
                    talk(ours, theirs, tag)?;
                    [ours, theirs, l].into_iter().try_for_each(sys::close)?;
                }
                Ok(())
            })
        })
        .collect();
    for t in threads {
        t.join().map_err(|_| Why("a thread panicked".into()))??;
    }
    cx.warm(20, 0)
}
