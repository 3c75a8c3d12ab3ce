//! Both ends preloaded: in every style of waiting, reading and writing the bytes are exact (the
//! programs verify each of them) and at least 99 % of them went over rings.

mod common;

use common::*;

/// Runs a pair, both preloaded; asserts integrity, rings, and that both ends counted exactly. Says whether one of them left
/// TCP `late`.
#[track_caller]
fn pair_with(server: &str, client: &str, rings: impl Fn(&Report, &str), late: impl Fn(&Report) -> bool) -> bool {
    let place = Place::new("rings");
    let (s, c) = run_pair(&place, (RINGS, server), (RINGS, client), 100.0);
    if dry() {
        expected_bytes(client, &c.out);
        return false;
    }
    let what = format!("`{server}` and `{client}`");
    let was_late = late(c.report(client)) || late(s.report(server));
    if !was_late {
        rings(c.report(client), &format!("client of {what}"));
        rings(s.report(server), &format!("server of {what}"));
    }
    let (tx, rx) = expected_bytes(client, &c.out);
    c.report(client).assert_bytes((tx, rx), &format!("client of {what}"));
    s.report(server).assert_bytes((rx, tx), &format!("server of {what}"));
    let (s, c) = (s.report(server).totals(), c.report(client).totals());
    assert_eq!((s.tx_ring, s.rx_ring), (c.rx_ring, c.tx_ring), "{what}: {s:?} {c:?}");
    assert_eq!(c.connections, c.upgraded, "{what}: {c:?}");
    was_late
}

/// At least 99 % on rings.
#[track_caller]
fn pair(server: &str, client: &str) {
    let _one = one_at_a_time();
    pair_with(server, client, Report::assert_rings, |_| false);
}

/// Both directions at full speed from the first byte. Now and then the background thread does not get a processor for as
/// long as the programs need to send half of all. That happens, but not three times.
#[track_caller]
fn bulk(server: &str, client: &str) {
    let _one = one_at_a_time();
    for last in [false, false, true] {
        if !pair_with(server, client, Report::assert_bulk_rings, |r| !last && !r.is_on_rings_in_bulk()) {
            break;
        }
    }
}

/// As `pair`, for servers that serve in forked children: the client's report counts both directions.
#[track_caller]
fn pair_of_forks(server: &str, client: &str) {
    let _one = one_at_a_time();
    let place = Place::new("rings");
    let (_, c) = run_pair(&place, (RINGS, server), (RINGS, client), 100.0);
    if !dry() {
        c.report(client).assert_rings(&format!("client of `{server}`"));
    }
}

const ECHO: &str = "echo-client --conns 4 --threads 2 --rounds 24000 --max 16k";

#[test]
fn echo_thread_per_connection() {
    pair("echo-server --style thread", ECHO);
}

#[test]
fn echo_poll() {
    pair("echo-server --style poll", ECHO);
}

#[test]
fn echo_epoll_level() {
    pair("echo-server --style epoll-lt", ECHO);
}

#[test]
fn echo_epoll_edge() {
    pair("echo-server --style epoll-et", ECHO);
}

#[test]
fn echo_epoll_oneshot_shared_by_threads() {
    pair("echo-server --style epoll-oneshot", ECHO);
}

#[test]
fn echo_connection_in_several_epoll_sets() {
    pair("echo-server --style epoll-multi", ECHO);
}

#[test]
fn echo_epoll_in_epoll() {
    pair("echo-server --style epoll-nested", ECHO);
}

#[test]
fn echo_prefork() {
    pair_of_forks(
        "echo-server --style prefork --children 3",
        "echo-client --conns 3 --threads 3 --rounds 24000 --max 16k --reconnect 2",
    );
}

#[test]
fn echo_fork_per_connection() {
    pair_of_forks("echo-server --style fork", ECHO);
}

#[test]
fn echo_client_that_selects() {
    pair("echo-server --style epoll-lt", "echo-client --select --conns 3 --rounds 24000 --max 16k");
}

#[test]
fn echo_with_pauses_in_which_both_sleep() {
    pair("echo-server --style epoll-lt", "echo-client --conns 2 --rounds 3000 --max 4k --pause-us 300");
    pair("echo-server --style thread", "echo-client --conns 2 --rounds 3000 --max 4k --pause-us 300");
}

#[test]
fn echo_many_connections() {
    pair("echo-server --style epoll-lt", "echo-client --conns 120 --threads 4 --rounds 2500 --max 4k");
}

#[test]
fn echo_connections_come_and_go() {
    let client = "echo-client --conns 4 --threads 4 --rounds 40000 --max 4k --reconnect 8";
    pair("echo-server --style thread", client);
    pair("echo-server --style epoll-et", client);
}

/// Both directions at once, megabytes in flight, any mixture of calls.
#[track_caller]
fn soak(options: &str) {
    let line = format!("--bytes 160m --max-op 256k --limit-s 90 {options}");
    bulk(&format!("soak-server {line}"), &format!("soak-client {line}"));
}

#[test]
fn soak_blocking() {
    soak("--mode blocking");
}

#[test]
fn soak_poll() {
    soak("--mode poll");
}

#[test]
fn soak_ppoll() {
    soak("--mode ppoll");
}

#[test]
fn soak_select() {
    soak("--mode select");
}

#[test]
fn soak_epoll_level() {
    soak("--mode epoll-lt");
}

#[test]
fn soak_epoll_edge() {
    soak("--mode epoll-et");
}

#[test]
fn soak_epoll_sets_that_get_the_socket_before_it_is_dialled() {
    soak("--mode epoll-lt --early");
    soak("--mode epoll-et --early");
}

#[test]
fn soak_epoll_oneshot() {
    soak("--mode epoll-oneshot");
}

#[test]
fn soak_mixed_modes() {
    soak("--mode epoll-et --server-mode blocking");
    soak("--mode blocking --server-mode epoll-lt");
    soak("--mode select --server-mode epoll-oneshot");
}

#[test]
fn soak_reader_and_writer_threads() {
    soak("--mode poll --threads --close client-first");
    soak("--mode epoll-lt --threads --close server-first");
}

#[test]
fn soak_several_connections() {
    soak("--mode epoll-lt --conns 4");
}

#[test]
fn soak_half_close_in_both_orders() {
    soak("--mode blocking --close client-first");
    soak("--mode blocking --close server-first");
}

#[test]
fn both_ends_in_one_process() {
    let _one = one_at_a_time();
    for mode in ["blocking", "poll", "epoll-et", "epoll-lt"] {
        let place = Place::new("self");
        let line = format!("soak-self --bytes 128m --max-op 256k --conns 2 --limit-s 90 --mode {mode}");
        let e = start_app(&place, &RINGS, &words(&line)).wait(100.0);
        e.assert_ok(&line);
        if !dry() {
            e.report(&line).assert_bulk_rings(&line);
        }
    }
}

#[test]
fn pingpong_blocking() {
    pair("pingpong-server --size 64", "pingpong-client --size 64 --count 60000");
}

#[test]
fn pingpong_large() {
    pair("pingpong-server --size 64k", "pingpong-client --size 64k --count 6000");
}

#[test]
fn pingpong_busy() {
    pair("pingpong-server --size 64 --busy", "pingpong-client --size 64 --count 300000 --busy");
}

#[test]
fn pingpong_with_pauses() {
    pair("pingpong-server --size 200", "pingpong-client --size 200 --count 4000 --pause-us 200");
}

#[test]
fn stream_of_small_messages() {
    pair("stream-server --size 64", "stream-client --size 64 --count 1500000");
}

/// A thread that waits in its first `recv` for something that comes at the end of all (as STOMP and other
/// clients have it) is not in the way of the upgrade.
#[test]
fn stream_with_a_reader_that_waits_all_the_time() {
    pair("stream-server --size 64", "stream-client --size 64 --count 1500000 --reader 1");
}

#[test]
fn stream_of_large_messages() {
    bulk("stream-server --size 64k", "stream-client --size 64k --count 6000");
}
