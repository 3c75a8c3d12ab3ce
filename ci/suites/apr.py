"""The tests of the Apache Portable Runtime, from Debian's source: a portable layer over sockets, polls, files and processes."""

import os
import shutil

from .frame import FAIL, PASS, debian_source, home, need, run

SUITES = ["testdup", "testoc", "testpipe", "testpoll", "testproc", "testsock", "testsockets", "testsockopt", "testthread"]
SECONDS = 200
# The program of the measurements connects to a server that echoes, and compares what comes back.
ECHO = "./echod & server=$!; sleep 1; ./sockperf 127.0.0.1; status=$?; kill $server; exit $status"


def unit(tests, name, command, good):
    def run_it(place):
        status, text = place.command(command, f"{name.replace(' ', '-')}.log", SECONDS, cwd=work(place, tests, name))
        return {name: PASS if status == 0 and good in text else FAIL}

    return run_it


def work(place, tests, name):
    """They make files of fixed names where they are, and start their neighbours."""
    path = os.path.join(place.folder, "work-" + name.replace(" ", "-"))
    shutil.copytree(tests, path, symlinks=True)
    return path


def prepare():
    need("gcc", "make", "libtool-bin")
    source = debian_source("apr")
    build = os.path.join(home(), "apr-build")
    if not os.path.exists(os.path.join(build, "ci-done")):
        shutil.rmtree(build, ignore_errors=True)
        shutil.copytree(source, build)
        log = build + ".log"
        run(["sh", "./configure", "--enable-nonportable-atomics"], log=log, cwd=build)
        run(["make", "-j2"], log=log, cwd=build)
        run(["make", "-C", "test", "-j2", "all"], log=log, cwd=build)
        open(os.path.join(build, "ci-done"), "w", encoding="utf-8").close()
    tests = os.path.join(build, "test")
    units = [(s, unit(tests, s, ["./testall", "-v", s], "SUCCESS")) for s in SUITES]
    for mode in ("blocking", "nonblocking", "timeout"):
        name = f"sendfile {mode}"
        units.append((name, unit(tests, name, ["./sendfile", "client", mode, "startserver", "127.0.0.1"], "")))
    units.append(("sockperf", unit(tests, "sockperf", ["sh", "-c", ECHO], "")))
    return units
