//! What a report says of connections that stayed on TCP, or went back to it.

mod common;

use common::json::Json;
use common::*;

/// Checks of socket semantics in which a connection leaves its ring, and what the report must name then.
const RETURNS: [(&str, &str); 10] = [
    ("oob-sent", "urgent data (MSG_OOB)"),
    ("zerocopy", "zero-copy by the kernel (MSG_ZEROCOPY, TCP_ZEROCOPY_RECEIVE)"),
    ("zero-copy-receive", "zero-copy by the kernel (MSG_ZEROCOPY, TCP_ZEROCOPY_RECEIVE)"),
    ("sigio-fcntl", "signals for its events (O_ASYNC, FIOASYNC)"),
    ("repair", "the connection is frozen or restored (TCP_REPAIR)"),
    ("peek-offset", "looks from an offset (SO_PEEK_OFF)"),
    ("splice-in", "bytes are moved within the kernel (splice)"),
    ("stdio-fdopen", "the C library reads it by itself (stdio, asynchronous I/O)"),
    ("stdio-dprintf", "the C library or the kernel uses it by itself (stdio, asynchronous I/O)"),
    ("wait-out-of-sight-poll", "the program waits for it in a way the library does not see"),
];

/// How often all processes of `place` have given a reason, among those of `kind`.
fn named(place: &Place, kind: &str, why: &str) -> u64 {
    let files = std::fs::read_dir(place.path("")).expect("temporary folder").flatten().map(|e| e.path());
    let reports = files.filter(|p| p.extension().is_some_and(|x| x == "json"));
    let count = |text: String| {
        let json = Json::parse(&text).expect("a report");
        match json.get("totals").get(kind) {
            Json::Map(reasons) => reasons.get(why).map_or(0, Json::num),
            other => panic!("{kind}: {other:?}"),
        }
    };
    reports.map(|p| count(std::fs::read_to_string(p).expect("a report"))).sum()
}

#[test]
fn returns_are_counted_by_their_reasons() {
    let _one = one_at_a_time();
    for (check, why) in RETURNS {
        let place = Place::new("why");
        let mut cmd = plain_command(app());
        cmd.args(["semantics", "--ring", "--only", check]);
        if dry() {
            continue;
        }
        place.preload(&mut cmd);
        cmd.env("RINGSOCK_UPGRADE_AFTER", "1");
        Proc::start(&place, cmd).wait(60.0).assert_ok(check);
        assert!(named(&place, "returned", why) > 0, "{check}: nothing has returned for {why:?}");
        let others = named(&place, "returned", "the other end took it back to TCP");
        assert!(others > 0, "{check}: no other end says that it was not the one");
    }
}

#[test]
fn who_stays_on_tcp_is_counted_by_the_reason() {
    let _one = one_at_a_time();
    let place = Place::new("stays");
    let few = ["pingpong-server --size 64", "pingpong-client --size 64 --count 2"];
    run_pair(&place, (RINGS, few[0]), (RINGS, few[1]), 30.0);
    if !dry() {
        assert!(named(&place, "stayed", "too little traffic so far") >= 2);
    }
    let place = Place::new("stays");
    let many = ["pingpong-server --size 64", "pingpong-client --size 64 --count 5000 --pause-us 200"];
    run_pair(&place, (RINGS, many[0]), (PLAIN, many[1]), 30.0);
    if !dry() {
        let why = "the peer is not preloaded, keeps it on TCP, or cannot be reached";
        assert_eq!(named(&place, "stayed", why), 1);
    }
}
