//! The background thread goes when it has nothing to do, and another comes when there is.

mod common;

use common::procfs::Holdings;
use common::*;
use std::time::{Duration, Instant};

/// Waits until the process has threads of the library's, or none.
#[track_caller]
fn await_threads(p: &mut Proc, wanted: bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !dry() && (Holdings::of(p.pid()).threads > 1) != wanted {
        assert!(p.alive() && Instant::now() < until, "{:?}; threads of the library's: {wanted}", Holdings::of(p.pid()));
        std::thread::sleep(Duration::from_millis(5));
    }
}

const SERVER: &str = "echo-server --style epoll-lt";

/// Beside a peer that is not preloaded a program has its own thread alone before long, while their connection goes on; and
/// whoever comes later is on a ring all the same, again and again.
#[test]
fn a_thread_comes_and_goes_with_those_who_can_be_met() {
    let _one = one_at_a_time();
    let place = Place::new("rest");
    let (mut server, port) = start_server(&place, &RINGS, SERVER);
    let plain = "echo-client --conns 1 --rounds 120000 --max 2k";
    let mut other = start_client(&place, &PLAIN, plain, port);
    for round in 0..3 {
        if round > 0 {
            let line = "echo-client --conns 2 --rounds 24000 --max 16k";
            let client = start_client(&place, &RINGS, line, port).wait(60.0);
            client.assert_ok(line);
            if !dry() {
                client.report(line).assert_rings(line);
            }
        } else {
            await_threads(&mut server, true);
        }
        await_threads(&mut server, false);
        assert!(round > 0 || other.alive(), "the connection was over before the thread was gone");
    }
    other.wait(120.0).assert_ok(plain);
    server.signal(libc::SIGTERM);
    let server = server.wait(20.0);
    server.assert_ok(SERVER);
    if !dry() {
        assert_eq!(server.report(SERVER).totals().upgraded, 4);
    }
}

/// The same where threads come and go all the time, and connections begin in every moment of that.
#[test]
fn connections_begin_while_threads_come_and_go() {
    const CHAOS: Side = with(&[("RINGSOCK_CHAOS", "7")]);
    let _one = one_at_a_time();
    let place = Place::new("restless");
    let (mut server, port) = start_server(&place, &CHAOS, SERVER);
    let line = "echo-client --conns 1 --rounds 400 --max 2k";
    let rounds = env_num("RINGSOCK_TEST_RESTS", 40);
    for round in 0..rounds {
        let side = if round % 3 == 0 { PLAIN } else { CHAOS };
        start_client(&place, &side, line, port).wait(60.0).assert_ok(line);
        std::thread::sleep(Duration::from_millis(round % 7));
        if round % 10 == 9 {
            await_threads(&mut server, false);
        }
    }
    server.signal(libc::SIGTERM);
    let server = server.wait(20.0);
    server.assert_ok(SERVER);
    if !dry() {
        let t = server.report(SERVER).totals();
        assert!(t.upgraded >= rounds / 2, "of {rounds} connections, a third of them with others: {t:?}");
    }
}
