"""The suites of two event libraries in C, from Debian's sources: libuv and libevent."""

import os
import re

from .frame import FAIL, PASS, SKIP, clean_env, cmake, debian_source, need, run

# What touches sockets, readiness, or processes that inherit them.
UV = re.compile(
    r"^(tcp|ipc|poll|socket|connect|shutdown|listen|delayed_accept|close_|emfile|fork|spawn|multiple_listen|ping_pong"
    r"|oob|getsockname|not_readable|not_writable|loop_|read|write|stream|active|callback|handle|metrics|watcher)"
)
# They need addresses outside this machine.
UV_OUTSIDE = re.compile(r"tcp_connect_timeout|tcp_local_connect_timeout|tcp_close_while_connecting|multicast")
UV_AT_ONCE = 40
# For `--pairs`: what may stand on pipes and pairs of Unix sockets; all but names, files and threads by themselves.
UV_NO_PAIRS = re.compile(r"(fs_(?!async)|udp_multicast|getaddrinfo|getnameinfo|idna|ip[46]?_|utf8|str|barrier|condvar|semaphore|thread_)")

BACKENDS = {
    "epoll": {"EVENT_NOPOLL": "1", "EVENT_NOSELECT": "1"},
    "changelist": {"EVENT_NOPOLL": "1", "EVENT_NOSELECT": "1", "EVENT_EPOLL_USE_CHANGELIST": "1"},
    "poll": {"EVENT_NOEPOLL": "1", "EVENT_NOSELECT": "1"},
    "select": {"EVENT_NOEPOLL": "1", "EVENT_NOPOLL": "1"},
}
# Groups without stream sockets, and what OpenSSL 3 made of a library of 2020.
NOT_EVENT = ["util/..", "dns/..", "evtag/..", "thread/.."]
NOT_EVENT += ["ssl/bufferevent_socketpair_dirty_shutdown", "ssl/bufferevent_renegotiate_socketpair_dirty_shutdown"]
NOT_EVENT += ["ssl/bufferevent_socketpair_startopen_dirty_shutdown"]


def uv_unit(exe, source, names, number):
    def run_it(place):
        results = {}
        # They make folders and files of fixed names where they are.
        work = os.path.join(place.folder, f"part-{number}")
        os.makedirs(work)
        os.symlink(os.path.join(source, "test"), os.path.join(work, "test"))
        for name in names:
            log = f"{number}-{name}.log"
            status, text = place.command([exe, name], log, 60, cwd=work, env={"UV_RUN_AS_ROOT": "1"})
            good = status == 0 and re.search(r"^ok ", text, re.MULTILINE)
            results[name] = SKIP if "# SKIP" in text else PASS if good else FAIL
        return results

    return run_it


def uv(wanted):
    source = debian_source("libuv1")
    build = cmake(source, "libuv", "-DLIBUV_BUILD_TESTS=ON", target="uv_run_tests")
    exe = os.path.join(build, "uv_run_tests")
    listing = run([exe, "--list"], env=clean_env({"UV_RUN_AS_ROOT": "1"}))
    names = [line.split()[0] for line in listing.splitlines() if line.strip()]
    names = [n for n in names if wanted(n) and not UV_OUTSIDE.search(n)]
    parts = [names[i : i + UV_AT_ONCE] for i in range(0, len(names), UV_AT_ONCE)]
    return [(f"part {i}", uv_unit(exe, source, part, i)) for i, part in enumerate(parts)]


def prepare_libuv():
    return uv(UV.search)


def prepare_libuv_processes():
    return uv(lambda n: not UV_NO_PAIRS.match(n))


def event_unit(exe, backend, settings):
    def run_it(place):
        names = [":" + name for name in NOT_EVENT]
        if backend != "epoll":
            names.append(":ssl/..")
        status, text = place.command([exe, *names], f"{backend}.log", 300, env=settings)
        results = {}
        for name, result in re.findall(r"^(\w+/\S+): (.*?)$", text, re.MULTILINE):
            skipped = "SKIPPED" in result or "DISABLED" in result
            results[f"{backend}:{name}"] = SKIP if skipped else PASS if result.endswith("OK") else FAIL
        if status not in (0, 1) or not results:
            results[f"{backend}:all"] = FAIL
        return results

    return run_it


def prepare_libevent():
    need("libssl-dev", "zlib1g-dev", "python3")
    source = debian_source("libevent")
    options = ["-DEVENT__LIBRARY_TYPE=STATIC", "-DEVENT__DISABLE_BENCHMARK=ON", "-DEVENT__DISABLE_SAMPLES=ON"]
    exe = os.path.join(cmake(source, "libevent", *options), "bin", "regress")
    return [(backend, event_unit(exe, backend, settings)) for backend, settings in BACKENDS.items()]
