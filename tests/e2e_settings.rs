//! Wrong settings, missing resources and nonsense on the rendezvous socket: a line in the log at
//! most, and the programs go on.

mod common;

use common::procfs::rendezvous_names;
use common::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const SERVER: &str = "echo-server --style epoll-lt";
const CLIENT: &str = "echo-client --conns 3 --rounds 24000 --max 16k";

/// Runs a pair whose both ends have one more setting.
fn pair_with(place: &Place, name: &str, value: &str) -> (Ended, Ended) {
    let start = |line: &str| {
        let mut cmd = plain_command(app());
        cmd.args(words(line));
        if !dry() {
            place.preload(&mut cmd);
            cmd.env(name, value);
        }
        Proc::start(place, cmd)
    };
    let mut server = start(SERVER);
    let port = server.port();
    let client = start(&format!("{CLIENT} --port {port}")).wait(60.0);
    let server = server.stop();
    client.assert_ok(name);
    server.assert_ok(name);
    (server, client)
}

/// Both ends with a wrong setting: the default holds, so rings are used, and the log says what is
/// wrong.
#[track_caller]
fn is_named_and_ignored(name: &str, value: &str, named: &str) {
    let _one = one_at_a_time();
    let place = Place::new("settings");
    let (server, client) = pair_with(&place, name, value);
    if dry() {
        return;
    }
    client.report(name).assert_rings(name);
    server.report(name).assert_rings(name);
    let log = place.log();
    assert!(log.contains(named), "the log does not name {named}: {log:?}");
    let lines = log.lines().count();
    assert!(lines <= 4, "{lines} lines of log for one wrong setting of two processes: {log}");
}

#[test]
fn a_spin_time_that_is_no_number() {
    is_named_and_ignored("RINGSOCK_SPIN_US", "banana", "RINGSOCK_SPIN_US");
}

#[test]
fn a_ring_size_that_is_no_power_of_two() {
    is_named_and_ignored("RINGSOCK_RING_BYTES", "5000", "RINGSOCK_RING_BYTES");
}

#[test]
fn links_that_do_not_exist() {
    is_named_and_ignored("RINGSOCK_LINKS", "pigeon", "RINGSOCK_LINKS");
}

/// A list of peers that cannot be understood lets in nobody, not everybody.
#[test]
fn peers_that_do_not_exist() {
    let _one = one_at_a_time();
    let place = Place::new("settings");
    let (server, client) = pair_with(&place, "RINGSOCK_PEERS", "no-such-user-here");
    if !dry() {
        client.report(CLIENT).assert_tcp(CLIENT);
        server.report(SERVER).assert_tcp(SERVER);
        assert!(place.log().contains("RINGSOCK_PEERS"), "{}", place.log());
    }
}

#[test]
fn rules_that_are_not_there() {
    is_named_and_ignored("RINGSOCK_RULES", "/nonexistent/rules", "/nonexistent/rules");
}

#[test]
fn rules_that_are_a_folder() {
    is_named_and_ignored("RINGSOCK_RULES", "/", "rules file");
}

#[test]
fn a_log_that_cannot_be_written() {
    let _one = one_at_a_time();
    let place = Place::new("settings");
    let side = with(&[("RINGSOCK_LOG", "debug,/nonexistent/log")]);
    let (s, c) = run_pair(&place, (side, SERVER), (side, CLIENT), 60.0);
    if !dry() {
        s.report(SERVER).assert_rings(SERVER);
        c.report(CLIENT).assert_rings(CLIENT);
    }
}

#[test]
fn a_report_that_cannot_be_written() {
    let _one = one_at_a_time();
    let place = Place::new("settings");
    let side = with(&[("RINGSOCK_REPORT", "/nonexistent/%p.json")]);
    // The client's report shows rings all the same.
    let (s, c) = run_pair(&place, (side, SERVER), (RINGS, CLIENT), 60.0);
    assert!(s.report.is_none());
    if !dry() {
        c.report(CLIENT).assert_rings(CLIENT);
    }
}

/// The server's rules deny; the connections stay on TCP, at both ends.
#[track_caller]
fn denied(rules: &str, must_report: bool) {
    let _one = one_at_a_time();
    let place = Place::new("settings");
    std::fs::write(place.path("rules"), rules).expect("rules");
    let mut cmd = plain_command(app());
    cmd.args(words(SERVER));
    if !dry() {
        place.preload(&mut cmd);
        cmd.env("RINGSOCK_RULES", place.path("rules"));
    }
    let mut server = Proc::start(&place, cmd);
    let port = server.port();
    let client = start_client(&place, &RINGS, CLIENT, port).wait(60.0);
    let server = server.stop();
    client.assert_ok(CLIENT);
    server.assert_ok(SERVER);
    if dry() {
        return;
    }
    client.report(CLIENT).assert_tcp(CLIENT);
    match &server.report {
        Some(r) => r.assert_tcp(SERVER),
        None => assert!(!must_report, "no report of the server"),
    }
}

#[test]
fn rules_that_deny_connections() {
    denied("program rs-app\nallow peer 10.0.0.0/8\ndeny peer 127.0.0.0/8\n", true);
}

/// Of a program that is denied altogether the library keeps out: it need not even report.
#[test]
fn rules_that_deny_a_program() {
    denied("# nothing of this program\nprogram rs-app\ndeny\n", false);
}

#[test]
fn rules_that_deny_another_program() {
    let _one = one_at_a_time();
    let place = Place::new("settings");
    let rules = place.path("rules");
    std::fs::write(&rules, "program nginx\ndeny\nprogram *\nallow\n").expect("rules");
    let (server, client) = pair_with(&place, "RINGSOCK_RULES", &rules.to_string_lossy());
    if !dry() {
        client.report(CLIENT).assert_rings(CLIENT);
        server.report(SERVER).assert_rings(SERVER);
    }
}

/// Starts `rs-app` with few fds allowed.
fn start_limited<'a>(place: &'a Place, fds: u32, line: &str) -> Proc<'a> {
    start_under(place, &format!("-n {fds}"), line)
}

/// Starts `rs-app` under a limit of the shell's.
fn start_under<'a>(place: &'a Place, limit: &str, line: &str) -> Proc<'a> {
    let mut cmd = plain_command("bash");
    cmd.args(["-c", &format!("ulimit {limit}; exec \"$0\" \"$@\"")]).arg(app()).args(words(line));
    if !dry() {
        place.preload(&mut cmd);
    }
    Proc::start(place, cmd)
}

/// System calls that systemd's `SystemCallFilter=@system-service` has the process killed for (version 252).
#[cfg(target_arch = "x86_64")]
const NO_SERVICE: [libc::c_long; 26] = [
    libc::SYS_pidfd_getfd,
    libc::SYS_seccomp,
    libc::SYS_ptrace,
    libc::SYS_process_madvise,
    libc::SYS_perf_event_open,
    libc::SYS_bpf,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_fanotify_init,
    libc::SYS_open_by_handle_at,
    libc::SYS_chroot,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_move_mount,
    libc::SYS_swapon,
    libc::SYS_reboot,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_init_module,
    libc::SYS_kexec_load,
    libc::SYS_clock_settime,
    libc::SYS_settimeofday,
];

/// Has `cmd` run as such a service.
#[cfg(target_arch = "x86_64")]
fn as_a_service(cmd: &mut std::process::Command) {
    use std::os::unix::process::CommandExt;
    let line = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // struct seccomp_data begins with the call's number.
    let mut lines = vec![line(0x20, 0, 0, 0)];
    for n in NO_SERVICE {
        lines.push(line(0x15, 0, 1, n as u32));
        lines.push(line(0x06, 0, 0, libc::SECCOMP_RET_KILL_PROCESS));
    }
    lines.push(line(0x06, 0, 0, libc::SECCOMP_RET_ALLOW));
    let install = move || {
        let p = libc::sock_fprog { len: lines.len() as u16, filter: lines.as_ptr().cast_mut() };
        // SAFETY: the program is valid and readable.
        let r = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER as usize, &raw const p)
        };
        if r == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    };
    // SAFETY: two system calls.
    unsafe { cmd.pre_exec(install) };
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_service_that_is_killed_for_unusual_calls() {
    let _one = one_at_a_time();
    let place = Place::new("service");
    let start = |line: &str| {
        let mut cmd = plain_command(app());
        cmd.args(words(line));
        as_a_service(&mut cmd);
        if !dry() {
            place.preload(&mut cmd);
        }
        Proc::start(&place, cmd)
    };
    let mut server = start(SERVER);
    let port = server.port();
    let client = start(&format!("{CLIENT} --port {port}")).wait(60.0);
    let server = server.stop();
    for (who, end) in [("client", &client), ("server", &server)] {
        end.assert_ok(who);
        if !dry() {
            end.report(who).assert_rings(who);
        }
    }
}

#[test]
fn few_fds_are_enough_for_few_connections() {
    let _one = one_at_a_time();
    let place = Place::new("nofile");
    let mut server = start_limited(&place, 64, SERVER);
    let port = server.port();
    let client = start_limited(&place, 64, &format!("{CLIENT} --port {port}")).wait(60.0);
    let server = server.stop();
    client.assert_ok("client with 64 fds");
    server.assert_ok("server with 64 fds");
    if !dry() {
        client.report(CLIENT).assert_rings(CLIENT);
    }
}

/// Files may be no longer than 1000 KiB: who makes one longer is killed by a signal. (Nor are there segments for rings then.)
#[test]
fn files_may_not_be_long() {
    let _one = one_at_a_time();
    let place = Place::new("fsize");
    let mut server = start_under(&place, "-f 1000", SERVER);
    let port = server.port();
    let client = start_under(&place, "-f 1000", &format!("{CLIENT} --port {port}")).wait(60.0);
    let server = server.stop();
    client.assert_ok("client that may not make long files");
    server.assert_ok("server that may not make long files");
}

/// Natively 48 connections fit into 64 fds; they must with the library's own fds too, and come
/// through whole, on whatever path.
#[test]
fn the_library_leaves_the_program_its_fds() {
    let _one = one_at_a_time();
    for style in ["epoll-lt", "thread"] {
        let place = Place::new("nofile");
        let mut server = start_limited(&place, 64, &format!("echo-server --style {style}"));
        let port = server.port();
        let line = format!("echo-client --conns 48 --threads 4 --rounds 1000 --max 8k --port {port}");
        let client = start_limited(&place, 64, &line).wait(60.0);
        client.assert_ok("client with 48 connections in 64 fds");
        server.stop().assert_ok("server with 48 connections in 64 fds");
    }
}

/// One visit to a rendezvous socket of the library: random bytes, fds that nobody asked for, or
/// nothing at all.
fn pester(name: &str, kind: i32, turn: u64) -> bool {
    // SAFETY: plain socket calls; every pointer is to a local value that outlives its call, with
    // its right length; all-zero values of these C structs are valid.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, kind | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return false;
        }
        let mut sa: libc::sockaddr_un = std::mem::zeroed();
        sa.sun_family = libc::AF_UNIX as u16;
        for (to, b) in sa.sun_path[1..].iter_mut().zip(name.bytes()) {
            *to = b as libc::c_char;
        }
        let len = std::mem::size_of::<libc::sa_family_t>() + 1 + name.len();
        let hit = libc::connect(fd, (&raw const sa).cast(), len as libc::socklen_t) == 0;
        if hit {
            let noise: Vec<u8> = (0..(turn * 37 % 700)).map(|i| ((i * turn * 31) >> 3) as u8).collect();
            let mut iov = libc::iovec { iov_base: noise.as_ptr().cast_mut().cast(), iov_len: noise.len() };
            let mut control = [0u64; 8];
            let mut m: libc::msghdr = std::mem::zeroed();
            m.msg_iov = &mut iov;
            m.msg_iovlen = 1;
            if turn % 3 == 1 {
                m.msg_control = control.as_mut_ptr().cast();
                m.msg_controllen = libc::CMSG_SPACE(8) as usize;
                let c = libc::CMSG_FIRSTHDR(&m);
                (*c).cmsg_level = libc::SOL_SOCKET;
                (*c).cmsg_type = libc::SCM_RIGHTS;
                (*c).cmsg_len = libc::CMSG_LEN(8) as usize;
                libc::CMSG_DATA(c).cast::<[i32; 2]>().write_unaligned([0, 2]);
            }
            if turn % 5 != 4 {
                libc::sendmsg(fd, &m, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
            }
            // Some stay for a while, so that the peer may wait for more.
            std::thread::sleep(Duration::from_millis(if turn & 3 == 0 { 30 } else { 0 }));
        }
        libc::close(fd);
        hit
    }
}

/// Runs clients one after the other while several threads pester every rendezvous socket that
/// concerns the server's port.
fn under_nonsense(server: Side, client: Side, rounds: u32) {
    let _one = one_at_a_time();
    let place = Place::new("nonsense");
    let peaceful_rings = server.preloaded;
    let (server, port) = start_server(&place, &server, SERVER);
    let (stop, hits) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| {
        for t in 0..2u64 {
            let (stop, hits) = (&stop, &hits);
            s.spawn(move || {
                let mut turn = t;
                while !stop.load(Ordering::SeqCst) {
                    for (name, kind) in rendezvous_names(port) {
                        turn += 2;
                        hits.fetch_add(u64::from(pester(&name, kind, turn)), Ordering::SeqCst);
                    }
                    std::thread::sleep(Duration::from_micros(100));
                }
            });
        }
        let run = || {
            for _ in 0..rounds {
                let line = "echo-client --conns 4 --threads 2 --rounds 400 --max 8k --reconnect 4";
                start_client(&place, &client, line, port).wait(60.0).assert_ok("client under nonsense");
            }
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        stop.store(true, Ordering::SeqCst);
        result.unwrap_or_else(|e| std::panic::resume_unwind(e));
    });
    let hits = hits.into_inner();
    eprintln!("{hits} visits with nonsense");
    assert!(dry() || hits > 0, "no rendezvous socket was found: nothing was tested");
    // Left in peace, two preloaded move to rings; but not at once, where those were looked for in vain that were pestered.
    for still in (0..3).rev() {
        let last = start_client(&place, &RINGS, CLIENT, port).wait(60.0);
        last.assert_ok("client after the nonsense");
        if !peaceful_rings || dry() || still > 0 && last.report(CLIENT).totals().share() >= WANTED_SHARE {
            break;
        }
        if still == 0 {
            last.report(CLIENT).assert_rings("client after the nonsense");
        }
    }
    server.stop().assert_ok("server under nonsense");
}

#[test]
fn nonsense_while_the_peer_is_not_preloaded() {
    under_nonsense(PLAIN, RINGS, 4);
}

#[test]
fn nonsense_between_two_preloaded() {
    under_nonsense(RINGS, RINGS, 8);
}
