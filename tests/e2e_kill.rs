//! `kill -9` of either end at a random moment under load: the survivor sees what TCP would show
//! it, in time and with only correct bytes before, and nothing is left behind.
//!
//! `RINGSOCK_TEST_KILLS` is the number of kills in all (50), `RINGSOCK_TEST_SEED` repeats a run.

mod common;

use common::procfs::{fd_list, no_names, Holdings};
use common::*;
use std::time::{Duration, Instant};

/// The survivor must have ended, or let go of the dead peer, within this time.
const SOON: f64 = 2.0;

/// A small random number generator (xorshift).
struct Rng(u64);

impl Rng {
    fn new(salt: u64) -> Rng {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("clock");
        let seed = env_num("RINGSOCK_TEST_SEED", now.subsec_nanos().into());
        eprintln!("RINGSOCK_TEST_SEED={seed}");
        Rng((seed ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    /// Sleeps for a random time under load: before, during and, every other time, surely after the process `pid` has got a
    /// connection on a ring.
    fn moment(&mut self, pid: u32) {
        let until = Instant::now() + Duration::from_secs(10);
        let sends = |c: &json::Json| c.get("path_tx").text() == Some("ring");
        let receives = |c: &json::Json| c.get("path_rx").text() == Some("ring");
        if self.below(2) == 0 && !dry() {
            // What is in flight goes by TCP before a stream of megabytes moves, which takes its time.
            while !connections(pid).iter().any(|c| sends(c) || receives(c)) {
                assert!(Instant::now() < until, "no connection has moved: {:?}", connections(pid));
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let us = match self.below(3) {
            0 => self.below(8_000),
            1 => self.below(40_000),
            _ => 20_000 + self.below(150_000),
        };
        std::thread::sleep(Duration::from_micros(us));
    }

    fn pick<'a>(&mut self, v: &[&'a str]) -> &'a str {
        v[self.below(v.len() as u64) as usize]
    }
}

/// This test's part of the kills, in percent, and when to stop at the latest.
fn kills(percent: u64) -> (u64, Instant) {
    let n = env_num("RINGSOCK_TEST_KILLS", 50);
    let secs = 60 + n / 4;
    ((n * percent / 100).max(4), Instant::now() + Duration::from_secs(secs))
}

/// Counts how many of the kills hit connections on rings: a test whose connections were all on TCP
/// would prove nothing.
#[derive(Default)]
struct Hits {
    kills: u64,
    on_rings: u64,
}

impl Hits {
    fn count(&mut self, report: &Report) {
        self.kills += 1;
        self.on_rings += u64::from(report.totals().upgraded > 0);
    }

    fn assert_enough(&self) {
        eprintln!("{} of {} kills hit connections on rings", self.on_rings, self.kills);
        assert!(dry() || self.on_rings * 3 >= self.kills, "only {} of {} kills", self.on_rings, self.kills);
    }
}

/// The survivor's end: in time, in a good way, with a report.
fn survived(survivor: Proc, who: &str, hits: &mut Hits) {
    let began = Instant::now();
    let end = survivor.try_wait(20.0).unwrap_or_else(|so_far| panic!("{who} hangs after the kill: {so_far}"));
    let took = began.elapsed().as_secs_f64();
    end.assert_ok(who);
    assert!(took < SOON, "{who} noticed the death of its peer only after {took:.1} s");
    // Killed before the client could connect there is no connection to report.
    match &end.report {
        Some(r) => hits.count(r),
        None => hits.kills += 1,
    }
}

const STYLES: [&str; 7] = ["thread", "poll", "epoll-lt", "epoll-et", "epoll-oneshot", "epoll-multi", "epoll-nested"];
const ENDLESS: &str = "echo-client --conns 4 --threads 2 --rounds 100000000 --max 32k --expect-death";

#[test]
fn the_server_is_killed_under_echo_load() {
    let _one = one_at_a_time();
    let (n, until) = kills(30);
    let (mut rng, mut hits) = (Rng::new(1), Hits::default());
    for _ in 0..n {
        if Instant::now() > until {
            break;
        }
        let place = Place::new("kill-server");
        let style = rng.pick(&STYLES);
        let (server, port) = start_server(&place, &RINGS, &format!("echo-server --style {style}"));
        let client = start_client(&place, &RINGS, ENDLESS, port);
        rng.moment(server.pid());
        server.kill();
        survived(client, &format!("client of killed {style}"), &mut hits);
        no_names(port, Duration::from_secs(2)).expect("rendezvous names");
    }
    hits.assert_enough();
}

#[test]
fn either_end_is_killed_with_megabytes_in_flight() {
    let _one = one_at_a_time();
    let (n, until) = kills(30);
    let (mut rng, mut hits) = (Rng::new(2), Hits::default());
    let modes = ["blocking", "poll", "ppoll", "select", "epoll-lt", "epoll-et", "epoll-oneshot"];
    for _ in 0..n {
        if Instant::now() > until {
            break;
        }
        let place = Place::new("kill-soak");
        let mode = rng.pick(&modes);
        let load = format!("--bytes 64g --max-op 256k --conns 2 --expect-death --limit-s 60 --mode {mode}");
        let (mut server, port) = start_server(&place, &RINGS, &format!("soak-server {load}"));
        let client = start_client(&place, &RINGS, &format!("soak-client {load}"), port);
        // The server ends after two connections: it must have got both.
        server.says("serving 2");
        rng.moment(server.pid());
        let (victim, survivor, who) = match rng.below(2) {
            0 => (server, client, "client"),
            _ => (client, server, "server"),
        };
        victim.kill();
        survived(survivor, &format!("{who} in mode {mode}"), &mut hits);
        no_names(port, Duration::from_secs(2)).expect("rendezvous names");
    }
    hits.assert_enough();
}

/// One server outlives many clients: after each its fds, threads and mappings are as before, and
/// at the end it still serves, on rings.
fn clients_are_killed(style: &str, percent: u64, salt: u64) {
    let (n, until) = kills(percent);
    let mut rng = Rng::new(salt);
    let place = Place::new("kill-client");
    let (server, port) = start_server(&place, &RINGS, &format!("echo-server --style {style}"));
    let healthy = "echo-client --conns 4 --threads 2 --rounds 60000 --max 16k";
    // What the library sets up once is there after this.
    start_client(&place, &RINGS, healthy, port).wait(60.0).assert_ok("first client");
    let warm = start_client(&place, &RINGS, ENDLESS, port);
    std::thread::sleep(Duration::from_millis(200));
    warm.kill();
    let base = Holdings::settled(server.pid(), Duration::from_secs(1));
    for i in 0..n {
        if Instant::now() > until {
            break;
        }
        let client = start_client(&place, &RINGS, ENDLESS, port);
        rng.moment(client.pid());
        client.kill();
        if let Err(h) = Holdings::back_to(server.pid(), &base, Duration::from_secs_f64(SOON)) {
            let fds = fd_list(server.pid());
            panic!("{style}: after kill {i} the server holds {h:?}, before {base:?}: {fds}");
        }
        no_names(port, Duration::from_secs(2)).expect("rendezvous names");
    }
    // Now and then a background thread gets no processor for as long as the programs need for a twentieth of all.
    for still in (0..3).rev() {
        let last = start_client(&place, &RINGS, healthy, port).wait(60.0);
        last.assert_ok("last client");
        if dry() || still > 0 && last.report("last client").totals().share() >= WANTED_SHARE {
            break;
        }
        if still == 0 {
            last.report("last client").assert_rings("last client");
        }
    }
    let end = server.stop();
    end.assert_ok(style);
    if !dry() {
        let t = end.report(style).totals();
        assert!(t.upgraded * 2 >= t.connections, "{style}: most kills hit plain TCP: {t:?}");
    }
}

#[test]
fn clients_of_a_thread_server_are_killed() {
    let _one = one_at_a_time();
    clients_are_killed("thread", 10, 3);
}

#[test]
fn clients_of_an_epoll_server_are_killed() {
    let _one = one_at_a_time();
    clients_are_killed("epoll-lt", 10, 4);
    clients_are_killed("epoll-et", 10, 5);
}

#[test]
fn clients_of_a_oneshot_server_are_killed() {
    let _one = one_at_a_time();
    clients_are_killed("epoll-oneshot", 10, 6);
}

/// Children serve; a killed client must end its child, or set it free for the next one.
#[test]
fn clients_of_forking_servers_are_killed() {
    let _one = one_at_a_time();
    let mut rng = Rng::new(7);
    for style in ["prefork", "fork"] {
        let place = Place::new("kill-fork");
        let (server, port) = start_server(&place, &RINGS, &format!("echo-server --style {style}"));
        for _ in 0..4 {
            let load = "echo-client --conns 3 --threads 3 --rounds 100000000 --max 32k";
            let client = start_client(&place, &RINGS, load, port);
            rng.moment(client.pid());
            client.kill();
        }
        let healthy = "echo-client --conns 3 --threads 3 --rounds 60000 --max 16k";
        let last = start_client(&place, &RINGS, healthy, port).wait(60.0);
        last.assert_ok("last client");
        server.stop().assert_ok(style);
        if !dry() {
            last.report("last client").assert_rings(style);
        }
    }
}

/// A sleeping survivor is woken: it waits in a blocking read when its peer dies.
#[test]
fn a_sleeping_client_notices_the_death() {
    let _one = one_at_a_time();
    let mut hits = Hits::default();
    for style in ["thread", "epoll-lt"] {
        let place = Place::new("kill-idle");
        let (server, port) = start_server(&place, &RINGS, &format!("echo-server --style {style}"));
        let load = "echo-client --conns 1 --rounds 100000000 --max 4k --expect-death --limit-s 60";
        let client = start_client(&place, &RINGS, load, port);
        std::thread::sleep(Duration::from_millis(200));
        // Stopped, the server answers nothing; the client goes to sleep in its read.
        server.signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(300));
        server.kill();
        survived(client, "sleeping client", &mut hits);
    }
    assert!(dry() || hits.on_rings == hits.kills, "{} of {}", hits.on_rings, hits.kills);
}
