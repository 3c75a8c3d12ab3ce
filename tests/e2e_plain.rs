//! Any peer will do: where only one end is preloaded, or versions differ, or links are off, the
//! connection stays on kernel TCP, exact, and nothing of the library is in its stream.

mod common;

use common::*;

const LOADS: [(&str, &str); 6] = [
    ("stream-server --size 1000", "stream-client --size 1000 --count 20000"),
    ("echo-server --style epoll-et", "echo-client --conns 4 --threads 2 --rounds 1500 --max 16k"),
    ("echo-server --style thread", "echo-client --select --conns 4 --rounds 1500 --max 16k"),
    (
        "soak-server --bytes 8m --max-op 256k --mode poll --limit-s 60",
        "soak-client --bytes 8m --max-op 256k --mode poll --limit-s 60",
    ),
    (
        "soak-server --bytes 8m --max-op 256k --mode blocking --limit-s 60",
        "soak-client --bytes 8m --max-op 256k --mode blocking --limit-s 60",
    ),
    ("pingpong-server --size 64", "pingpong-client --size 64 --count 5000"),
];

/// Runs all loads; whichever end is preloaded must report TCP alone, and all the bytes.
#[track_caller]
fn stays_on_tcp(server: Side, client: Side) {
    let _one = one_at_a_time();
    for (sw, cw) in LOADS {
        let place = Place::new("plain");
        let (s, c) = run_pair(&place, (server, sw), (client, cw), 90.0);
        if dry() {
            continue;
        }
        let (tx, rx) = expected_bytes(cw, &c.out);
        if server.preloaded {
            s.report(sw).assert_tcp(&format!("server `{sw}`"));
            s.report(sw).assert_bytes((rx, tx), &format!("server `{sw}`"));
        }
        if client.preloaded {
            c.report(cw).assert_tcp(&format!("client `{cw}`"));
            c.report(cw).assert_bytes((tx, rx), &format!("client `{cw}`"));
        }
    }
}

const NO_LINKS: Side = with(&[("RINGSOCK_LINKS", "none")]);
const OTHER_VERSION: Side = with(&[("RINGSOCK_TEST_PROTOCOL", "4000")]);

#[test]
fn only_the_server_is_preloaded() {
    stays_on_tcp(RINGS, PLAIN);
}

#[test]
fn only_the_client_is_preloaded() {
    stays_on_tcp(PLAIN, RINGS);
}

#[test]
fn links_are_off_at_both_ends() {
    stays_on_tcp(NO_LINKS, NO_LINKS);
}

#[test]
fn links_are_off_at_one_end() {
    stays_on_tcp(NO_LINKS, RINGS);
    stays_on_tcp(RINGS, NO_LINKS);
}

#[test]
fn an_empty_list_of_links_is_none() {
    stays_on_tcp(with(&[("RINGSOCK_LINKS", "")]), RINGS);
}

#[test]
fn the_server_has_another_version() {
    stays_on_tcp(OTHER_VERSION, RINGS);
}

#[test]
fn the_client_has_another_version() {
    stays_on_tcp(RINGS, OTHER_VERSION);
}

/// The setting that makes another version does nothing else: two of the same other version meet.
#[test]
fn two_of_the_same_other_version_use_rings() {
    let _one = one_at_a_time();
    let place = Place::new("version");
    let (sw, cw) = ("echo-server --style epoll-lt", "echo-client --conns 2 --rounds 24000 --max 16k");
    let (s, c) = run_pair(&place, (OTHER_VERSION, sw), (OTHER_VERSION, cw), 90.0);
    if !dry() {
        s.report(sw).assert_rings(sw);
        c.report(cw).assert_rings(cw);
    }
}
