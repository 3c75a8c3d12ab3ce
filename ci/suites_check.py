#!/usr/bin/env python3
"""Test suites that others wrote, natively and preloaded in one go: CPython's,
libuv's, libevent's, tokio's, Node.js', uvloop's, Ruby's, Tornado's, trio's,
Twisted's, HAProxy's, PostgreSQL's; by name also the JDK's, memcached's,
Mosquitto's, Redis', curl's, Erlang's, gevent's, GLib's, Perl's, PgBouncer's,
PHP's, APR's, Boost.Asio's, Bash's and GNU make's (for `--pairs`), lighttpd's,
libmicrohttpd's, MariaDB's, nng's, OpenLDAP's, OpenSSH's, OpenSSL's, POCO's,
pyftpdlib's and other Python servers', Qt's, redis-py's, rsync's, socat's,
stunnel's, Tcl's, ZeroMQ's. Both ends of nearly all their connections are in the preloaded
processes, so these must leave TCP: a suite of which no connection did counts
as failed.

Each suite runs in three variants: native; `rings`, where connections move at
once; `chaos`, where they move and return at random moments. What passes
natively and fails otherwise is printed and counted as failed; what is known
to fail now and then is told of with its reason and counted as skipped.

Most of these connections live for a millisecond. With `--warm`, both ends of
each play some round trips of their own before the suite gets them, natively
as well (libringsock_warm.so), so that nearly all of them move.

Prints a line for each suite and variant, then `N passed, N failed, N skipped`."""

import argparse
import concurrent.futures
import os
import re
import shutil
import sys
import tempfile
import time

from preload_lib import default_preload
from suites import (
    apr, asio, bash, cpython, crates, curl, erlang, events, frameworks, gevent, gio, haproxy, jdk, lighttpd, make, mariadb,
    memcached, microhttpd, mosquitto, nng, node, openldap, openssh, openssl, perl, pgbouncer, php, poco, postgres, pypi, qt,
    redis, redispy, rsync, ruby, socat, stunnel, tcl, uvloop, zeromq,
)
from suites.frame import FAIL, PASS, SKIP, VARIANTS, Place, Unavailable, home

SUITES = {
    "cpython": cpython.prepare,
    "libuv": events.prepare_libuv,
    "libevent": events.prepare_libevent,
    "tokio": crates.prepare,
    "node": node.prepare,
    "uvloop": uvloop.prepare,
    "ruby": ruby.prepare,
    "frameworks": frameworks.prepare,
    "haproxy": haproxy.prepare,
    "postgres": postgres.prepare,
}

# Run by name only: they take ten minutes and more, and Redis' and memcached's have time limits of their own that the
# chaos variant does not keep.
BY_NAME = {
    "apr": apr.prepare,
    "asio": asio.prepare,
    "bash": bash.prepare,
    "cpython-processes": cpython.prepare_processes,
    "curl": curl.prepare,
    "erlang": erlang.prepare,
    "gevent": gevent.prepare,
    "gio": gio.prepare,
    "jdk": jdk.prepare,
    "jdk-processes": jdk.prepare_processes,
    "libuv-processes": events.prepare_libuv_processes,
    "lighttpd": lighttpd.prepare,
    "make": make.prepare,
    "mariadb": mariadb.prepare,
    "memcached": memcached.prepare,
    "microhttpd": microhttpd.prepare,
    "mosquitto": mosquitto.prepare,
    "nng": nng.prepare,
    "node-processes": node.prepare_processes,
    "openldap": openldap.prepare,
    "openssh": openssh.prepare,
    "openssl": openssl.prepare,
    "perl": perl.prepare,
    "pgbouncer": pgbouncer.prepare,
    "php": php.prepare,
    "poco": poco.prepare,
    "pypi": pypi.prepare,
    "qt": qt.prepare,
    "redis": redis.prepare,
    "redispy": redispy.prepare,
    "rsync": rsync.prepare,
    "ruby-processes": ruby.prepare_processes,
    "rust-processes": crates.prepare_processes,
    "socat": socat.prepare,
    "stunnel": stunnel.prepare,
    "tcl": tcl.prepare,
    "zeromq": zeromq.prepare,
}

# Suites whose tests sleep most of the time, and how many times as many of them run at a time.
IDLERS = {"node", "node-processes", "uvloop", "frameworks"}
IDLE = 4

# (suite, variant, test), each a pattern, and why its failure says nothing.
FLAKY = [
    ("cpython-processes", ".*", r"test_subprocess:.*test_(close_fds_when_max_fd_is_lowered|pass_fds_redirected|failed_child_execute_fd_leak)", "lists its open fds, and finds the library's"),
    ("cpython-processes", ".*", r"test_io:.*test_interrupted_write_.*", "writes 4 MiB to who does not read: a ring may take them"),
    ("cpython-processes", ".*", r"test_subprocess:.*test_communicate_epipe", "writes 1 MiB to a program that ends: a reset, if that is quicker"),
    ("libevent", ".*", r".*:(main/(loopexit|loopexit_multiple|del_wait|.*timeout.*)|bufferevent/.*timeout.*)", "measures time; fails natively on a busy machine"),
    ("libevent", ".*", r".*:http/close_detection(_delay)?", "gives all it does 0.1 s; fails natively now and then"),
    ("libevent", ".*", r".*:bufferevent/.*ratelim.*", "measures rates; fails natively on a busy machine"),
    ("frameworks", ".*", r"tornado\.test\.autoreload_test\..*", "gives programs that start themselves anew 4 s in all"),
    ("frameworks", ".*", r"tornado\.test\.simple_httpclient_test\..*test_request_timeout", "gives a TLS handshake and a request 0.1 s"),
    ("uvloop", ".*", r"test_sockets:.*cancel_sock_sendall", "gives a send of 200 MB 0.2 s; fails natively on a busy machine"),
    ("haproxy", "chaos", r"reg-tests/checks/http-check\.vtc", "gives a health check 100 ms; chaos holds calls up for as long as 15 ms"),
    ("haproxy", "chaos", r"reg-tests/log/load_balancing\.vtc", "gives 500 exchanges, one after the other, 10 s; chaos holds calls up for as long as 15 ms"),
    ("openldap", "chaos", r"test0(60-mt-hot|74-asyncmeta-concurrency)", "makes thousands of requests, one after the other, in 280 s; chaos holds calls up for as long as 15 ms"),
    ("libuv", "chaos", r"tcp_ping_pong", "gives 1,000 exchanges, one after the other, 5 s; chaos holds calls up for as long as 15 ms"),
    ("libuv-processes", "chaos", r"shutdown_eof|run_nowait|timer_from_check", "has a timer of 100 ms and less from before its first round; chaos holds calls up for as long as 15 ms"),
    ("libuv-processes", ".*", r"timer_from_check", "fails natively now and then"),
    ("libuv-processes", ".*", r"spawn_exercise_sigchld_issue", "gives 101 processes, one after the other, 5 s; fails on a busy machine"),
    ("rust-processes", ".*", r"polling-.*", "adds blocking sockets to epoll sets by system calls that the library does not see, after they have moved"),
    ("node", ".*", r"parallel/test-http-writable-true-after-close\.js", "wants the end of one connection to be told before the bytes of another; one closed in the middle of a move (3 in 100 runs) ends later"),
    ("node", "chaos", r"parallel/test-http2-forget-closed-streams\.js", "10,000 requests, one after the other, get a minute here; chaos holds calls up for as long as 15 ms"),
    ("erlang", ".*", r"gen_tcp_misc_SUITE:accept_timeouts.*", "gives an accept 100 ms; fails on a busy machine"),
    ("erlang", ".*", r"gen_tcp_misc_SUITE:send_timeout_resume.*", "fills a connection and wants it to stay full: one that moves then has room again"),
    ("php", "chaos", r"sapi/cli/tests/upload_2G\.phpt", "sends 2 GB in a minute; chaos holds calls up for as long as 15 ms"),
    ("apr", "chaos", r"sendfile.*", "370,000 receives of one byte each get 3 s; chaos holds calls up for as long as 15 ms"),
    ("microhttpd", "chaos", r"testcurl:test_post_loop(11)?", "5,000 connections, one after the other, get two minutes; chaos holds calls up for as long as 15 ms"),
    ("nng", "chaos", r"compat_surveyttl:.*", "gives two connections 100 ms to be set up, and loses what comes earlier; chaos holds calls up for as long as 15 ms"),
    ("socat", ".*", r"\d+ TCP[46]LISTENFORK", "wants the answers to two clients in the order of their pauses; fails on a busy machine"),
    ("zeromq", "chaos", r"test_mock_pub_sub:.*", "waits for ever if a socket has got nothing within 1 ms"),
    ("zeromq", "chaos", r"test_ws_transport:.*", "ends a connection for good whose peer does not answer within 10 ms, and waits for it"),
    ("zeromq", "chaos", r"test_socks:.*", "takes too much of a proxy's answer that comes in pieces, and waits for ever"),
    ("zeromq", "chaos", r"test_monitor:.*stats.*|test_monitor:all", "wants handshakes to end in the order in which their connections were begun"),
    ("zeromq", ".*", r"test_spec_(req|dealer|pushpull|router|rep):.*", "wants handshakes to end in the order in which their connections were begun; those that move meanwhile are late"),
    ("frameworks", "chaos", r"test_highlevel_socket\.test_SocketStream_generic", "fills a connection and wants it to stay full: one that moves then has room again"),
    ("libevent", ".*", r".*:http/bad_request", "gives an exchange 10 ms; fails natively on a busy machine"),
]


def why_flaky(suite, variant, test):
    for s, v, t, why in FLAKY:
        if re.fullmatch(s, suite) and re.fullmatch(v, variant) and re.fullmatch(t, test):
            return why
    return None


def compare(suite, variant, native, results, counts):
    """Judges one variant by the native results; gives the counts of passed, failed and skipped tests."""
    passed = failed = skipped = 0
    for test, before in sorted(native.items()):
        now = results.get(test)
        if before == PASS and now == PASS:
            passed += 1
        elif before != PASS or now == SKIP:
            skipped += 1
        elif why := why_flaky(suite, variant, test):
            skipped += 1
            print(f"KNOWN {suite}/{variant}: {test}: {why}", flush=True)
        else:
            failed += 1
            print(f"FAIL {suite}/{variant}: {test} {'fails' if now == FAIL else 'did not run'}", flush=True)
    # A unit that only broke here.
    for test in sorted(results.keys() - native.keys()):
        if results[test] == FAIL:
            failed += 1
            print(f"FAIL {suite}/{variant}: {test}", flush=True)
    if counts["upgraded"] == 0:
        failed += 1
        print(f"FAIL {suite}/{variant}: no connection left TCP, so this counts as not run", flush=True)
    return passed, failed, skipped


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preload", default=default_preload(), help="the library")
    p.add_argument("--only", default=",".join(SUITES), help="suites, with commas between; also: " + ", ".join(BY_NAME))
    p.add_argument("--variants", default=",".join(VARIANTS), help="native is always run")
    p.add_argument("--seed", type=int, default=1, help="of the chaos variant")
    p.add_argument("--jobs", type=int, default=2, help="units at a time")
    p.add_argument("--units", default=".*", help="only the units of a suite whose names match this pattern as a whole")
    p.add_argument("--links", help="RINGSOCK_LINKS of the preloaded variants, which share one network then, one unit at a time")
    p.add_argument("--warm", action="store_true", help="warm connections up, so that the tests begin on rings")
    p.add_argument("--pairs", nargs="?", const="pipes,sockets", help="with --warm: pipes, Unix sockets or both (%(const)s) are TCP")
    p.add_argument("--keep", action="store_true", help="keep logs and reports also where nothing failed")
    a = p.parse_args()
    preload = os.path.abspath(a.preload)
    if not os.path.exists(preload):
        sys.exit(f"{preload} is not there; build it first")
    warm = os.path.join(os.path.dirname(preload), "libringsock_warm.so") if a.warm else None
    if warm and not os.path.exists(warm):
        sys.exit(f"{warm} is not there; build the whole workspace first")
    if a.pairs and not warm:
        p.error("--pairs needs --warm")
    variants = [v for v in VARIANTS if v == "native" or v in a.variants.split(",")]
    folder = tempfile.mkdtemp(prefix="run-", dir=home())
    os.chmod(folder, 0o755)
    print(f"logs in {folder}", flush=True)
    began = time.monotonic()
    total = [0, 0, 0]
    for name in a.only.split(","):
        try:
            units = [(unit, f) for unit, f in (SUITES | BY_NAME)[name]() if re.fullmatch(a.units, unit)]
        except Unavailable as e:
            print(f"SKIP {name}: {e}", flush=True)
            total[2] += 1
            continue
        places = {v: Place(os.path.join(folder, f"{name}-{v}"), v, preload, a.seed, a.links, warm, a.pairs) for v in variants}
        results = {v: {} for v in variants}
        jobs = 1 if a.links or os.geteuid() != 0 else a.jobs * (IDLE if name in IDLERS else 1)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(f, places[v]): v for _, f in units for v in variants}
            for future in concurrent.futures.as_completed(futures):
                results[futures[future]].update(future.result())
        native = results["native"]
        good = sum(r == PASS for r in native.values())
        print(f"PASS {name}/native: {good} of {len(native)} pass ({time.monotonic() - began:.0f} s so far)", flush=True)
        # Of such a unit perhaps nothing was compared, which is not to be overlooked.
        for test in sorted(t for t, r in native.items() if t.endswith(":all") and r == FAIL):
            print(f"SKIP {name}/native: {test} fails by itself", flush=True)
        for v in variants[1:]:
            counts = places[v].counts()
            judged = compare(name, v, native, results[v], counts)
            total = [x + y for x, y in zip(total, judged)]
            print(
                f"{'FAIL' if judged[1] else 'PASS'} {name}/{v}: passed {judged[0]} failed {judged[1]} skipped {judged[2]};"
                f" {counts['upgraded']} of {counts['connections']} connections upgraded,"
                f" {counts['upgrades']} upgrades, {counts['returns']} returns",
                flush=True,
            )
    if total[1] == 0 and not a.keep:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if total[1] or not total[0] else 0


if __name__ == "__main__":
    sys.exit(main())
