//! `ringsock off` and `ringsock on`, given to processes whose connections are on rings and in use.

mod common;

use common::json::Json;
use common::*;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

fn ringsock(words: &[&str]) -> Output {
    let mut c = plain_command(artifacts().join("ringsock"));
    c.args(words).output().expect("the command")
}

fn wait_for(pid: u32, path: &str) -> Json {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let c = connections(pid).first().cloned();
        let is = |key: &str| c.as_ref().is_some_and(|c| c.get(key).text() == Some(path));
        if is("path_tx") && is("path_rx") {
            return c.expect("just looked at");
        }
        assert!(Instant::now() < until, "never on {path}: {c:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Bytes by TCP and on rings, sent.
fn sent(c: &Json) -> (u64, u64) {
    (c.get("tx_bytes_tcp").num(), c.get("tx_bytes_ring").num())
}

/// Whichever end is told, and whichever end connected: the connection leaves its ring in use, stays where it was ordered to be,
/// and comes back, however often. Every byte is verified by the programs.
#[test]
fn an_operator_takes_connections_off_rings_and_lets_them_back() {
    let _one = one_at_a_time();
    let place = Place::new("orders");
    let (server, port) = start_server(&place, &RINGS, "pingpong-server");
    let client = start_client(&place, &RINGS, "pingpong-client --count 60000 --pause-us 100", port);
    for pid in [client.pid(), server.pid(), server.pid(), server.pid(), client.pid()] {
        wait_for(pid, "ring");
        let told = ringsock(&["off", &pid.to_string()]);
        let said = String::from_utf8_lossy(&told.stdout).into_owned();
        assert!(told.status.success() && said.contains(": 1 connection returned to TCP"), "{said} {told:?}");
        let before = wait_for(pid, "tcp");
        assert_eq!(before.get("why").text(), Some("switched off by the operator (ringsock off)"));
        std::thread::sleep(Duration::from_millis(500));
        let after = wait_for(pid, "tcp");
        let ((tcp, ring), (tcp_after, ring_after)) = (sent(&before), sent(&after));
        assert!(ring > 0 && ring_after == ring && tcp_after > tcp, "{before:?} {after:?}");
        let told = ringsock(&["on", &pid.to_string()]);
        assert!(told.status.success(), "{told:?}");
    }
    wait_for(client.pid(), "ring");
    let (client_pid, server_pid) = (client.pid(), server.pid());
    let client = client.wait(60.0);
    client.assert_ok("client");
    let report = client.report("client");
    let returns = report.totals().returns;
    assert!(returns >= 2, "{returns} returns");
    let returned = report.json.get("totals").get("returned");
    let of = |why: &str| returned.get(why).num();
    assert_eq!(of("switched off by the operator (ringsock off)") + of("the other end took it back to TCP"), returns);
    server.stop().assert_ok("server");
    for pid in [client_pid, server_pid] {
        assert_eq!(ringsock(&["off", &pid.to_string()]).status.code(), Some(2), "it is gone");
    }
}

/// Who cannot be told is named, with the reason.
#[test]
fn orders_that_nobody_hears() {
    let me = std::process::id().to_string();
    let o = ringsock(&["off", &me]);
    assert_eq!(o.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&o.stderr).contains("is not preloaded"), "{o:?}");
    assert_eq!(ringsock(&["off"]).status.code(), Some(2));
    let place = Place::new("orders-none");
    let mut quiet = Command::new(app());
    quiet.args(["pingpong-server"]);
    place.preload(&mut quiet);
    let mut server = Proc::start(&place, quiet);
    server.port();
    // It has no connection, and so perhaps no state; in neither case is this a success.
    assert_ne!(ringsock(&["off", &server.pid().to_string()]).status.code(), Some(0));
    server.stop().assert_ok("server");
}
