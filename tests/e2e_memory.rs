//! Memory that links have taken and do not need goes back to the kernel, and nobody notices.

mod common;

use common::*;
use std::time::{Duration, Instant};

const SETTINGS: Side = with(&[("RINGSOCK_IDLE", "1")]);

/// KiB of ring memory that the kernel has given to the segments that a process has mapped.
fn ring_kib(pid: u32) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let (mut ours, mut all) = (false, 0);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Rss:") if ours => all += words.next().and_then(|n| n.parse::<u64>().ok()).expect("a number"),
            Some(first) if first.contains('-') => ours = line.contains("/memfd:ringsock-ring"),
            _ => {}
        }
    }
    all
}

/// Waits until `is` of the ring memory that the two have together.
fn wait_until(what: &str, seconds: u64, pids: [u32; 2], is: impl Fn(u64) -> bool) {
    let until = Instant::now() + Duration::from_secs(seconds);
    let (mut least, mut most) = (u64::MAX, 0);
    loop {
        let now = pids.map(ring_kib).iter().sum::<u64>();
        if is(now) {
            return;
        }
        (least, most) = (least.min(now), most.max(now));
        if Instant::now() >= until {
            let state = pids.map(connections);
            panic!("{what}: not within {seconds} s, {least} to {most} KiB meanwhile; {state:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until the only connection of a process has received so many bytes.
fn await_bytes(pid: u32, wanted: u64) {
    let until = Instant::now() + Duration::from_secs(30);
    let got = || connections(pid).first().map_or(0, |c| c.get("rx_bytes_tcp").num() + c.get("rx_bytes_ring").num());
    while got() < wanted {
        assert!(Instant::now() < until, "{} of {wanted} bytes", got());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A connection sends much, rests, and sends much again: the memory of both ends goes while it rests, and it is on a ring
/// before and after. Every byte is verified by the programs.
#[test]
fn memory_of_a_connection_that_rests_goes_back() {
    if dry() {
        return;
    }
    let _one = one_at_a_time();
    let place = Place::new("memory");
    // The readers rest, so that the rings grow as large as they may: little is not worth giving back. And what is sent takes
    // long enough (40 times 40 ms) for a machine with other things to do to agree on a ring.
    let (server, port) = start_server(&place, &SETTINGS, "pingpong-server --size 8000000 --rest-us 20000");
    let line = "pingpong-client --size 8000000 --rest-us 20000 --count 80 --burst 40 --pause-us 20000000";
    let client = start_client(&place, &SETTINGS, line, port);
    let (pids, sent) = ([server.pid(), client.pid()], 40 * 8_000_000);
    for turn in ["at first", "again"] {
        wait_until(&format!("much is taken {turn}"), 20, pids, |kib| kib > 16 << 10);
        // While it rests, for 20 s from when all has come.
        await_bytes(client.pid(), sent * (1 + u64::from(turn == "again")));
        wait_until(&format!("it is given back {turn}"), 18, pids, |kib| kib == 0);
    }
    let client = client.wait(60.0);
    client.assert_ok("client");
    let t = client.report("client").totals();
    // More than one burst has; of each some goes by TCP before the ends have agreed.
    assert!(t.upgraded == 1 && t.returns >= 2 && t.tx_ring > 400_000_000, "{t:?}");
    server.stop().assert_ok("server");
}

/// Nobody looks at the memory of a link whose other process ended meanwhile.
#[test]
fn a_process_that_is_gone_before_its_memory_is_looked_at() {
    let _one = one_at_a_time();
    let place = Place::new("memory-gone");
    // Its link is forgotten 2 s after its death.
    let late = with(&[("RINGSOCK_IDLE", "3")]);
    let (server, port) = start_server(&place, &late, "pingpong-server");
    for turn in ["first", "second"] {
        let client = start_client(&place, &late, "pingpong-client --count 40000", port).wait(60.0);
        client.assert_ok(turn);
        if !dry() {
            client.report(turn).assert_rings(turn);
        }
        std::thread::sleep(Duration::from_secs(4));
    }
    server.stop().assert_ok("server");
}

/// A server whose children end without closing what they have served does not keep what it knows of that.
#[test]
fn connections_that_children_leave_are_forgotten() {
    let _one = one_at_a_time();
    let place = Place::new("memory-left");
    let (server, port) = start_server(&place, &RINGS, "echo-server --style fork-left");
    const EACH: usize = 300;
    for turn in ["first", "second"] {
        let line = format!("echo-client --conns 1 --threads 1 --rounds 2 --max 1k --reconnect {EACH}");
        start_client(&place, &RINGS, &line, port).wait(60.0).assert_ok(turn);
        // Who has just ended may still be at its last calls.
        std::thread::sleep(Duration::from_millis(2_500));
    }
    if !dry() {
        let kept = connections(server.pid()).len();
        // (Those that ended last are always there: 0 would be no answer.)
        assert!((1..EACH * 3 / 2).contains(&kept), "{kept} of {} connections are remembered", 2 * EACH);
    }
    server.stop().assert_ok("server");
}
