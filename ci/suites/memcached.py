"""memcached's own tests, from Debian's source package: clients in Perl that check each answer."""

import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, home, need, run

# They measure memory for minutes, or want OpenSSL's certificates of 2020.
NOT = re.compile(r"^(ssl_|lru-crawler|slabs-reassign|extstore|chunked-extstore|binary-extstore|stress)")
AT_ONCE = 12
SECONDS = 100
# What the server says it can: without its Unix sockets the tests use TCP.
SHIM = """#!/bin/sh
case "$1" in
-h) exec "$0.real" -h | grep -v unix-socket ;;
*) exec "$0.real" "$@" ;;
esac
"""


def unit(build, tests, number):
    def run_it(place):
        results = {}
        for test in tests:
            log = f"{number}-{test}.log"
            status, text = place.command(["perl", "-Ilib", f"t/{test}"], log, SECONDS, cwd=build)
            skipped = re.search(r"^1\.\.0 # [Ss][Kk][Ii][Pp]", text, re.M)
            good = status == 0 and not re.search(r"^not ok (?!.*# TODO)", text, re.M)
            results[test] = SKIP if skipped else PASS if good else FAIL
        return results

    return run_it


def prepare():
    need("gcc", "make", "libevent-dev", "perl")
    source = debian_source("memcached")
    build = os.path.join(home(), "memcached-build")
    if not os.path.exists(os.path.join(build, "ci-done")):
        shutil.rmtree(build, ignore_errors=True)
        shutil.copytree(source, build)
        log = build + ".log"
        run(["sh", "./configure"], log=log, cwd=build)
        run(["make", "-j2", "memcached-debug", "timedrun"], log=log, cwd=build)
        exe = os.path.join(build, "memcached-debug")
        os.rename(exe, exe + ".real")
        with open(exe, "w", encoding="utf-8") as f:
            f.write(SHIM)
        os.chmod(exe, 0o755)
        open(os.path.join(build, "ci-done"), "w", encoding="utf-8").close()
    tests = [t for t in sorted(os.listdir(os.path.join(build, "t"))) if t.endswith(".t") and not NOT.search(t)]
    parts = [tests[i : i + AT_ONCE] for i in range(0, len(tests), AT_ONCE)]
    return [(f"part {i}", unit(build, part, i)) for i, part in enumerate(parts)]
