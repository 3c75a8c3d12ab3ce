"""rsync's own tests of its daemon, from Debian's source, in two forms: as they are, with a pair of TCP sockets that is made in
one process and of which a program that it starts gets one end as its input and output; and with a daemon that listens, and
forks for each connection."""

import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, Unavailable, debian_source, home, need, run

SECONDS = 200
FORMS = ("pair", "daemon")

# What a test does to have a daemon of its own, and what it does here instead.
PAIR = 'RSYNC_CONNECT_PROG="$RSYNC --config=$conf --daemon"'
DAEMON = 'RSYNC_STARTED="$(start_daemon)"'
START = """
start_daemon() {
    $RSYNC --config="$conf" --daemon >/dev/null 2>&1
    n=0
    until ss -Hltn 'sport = :873' | grep -q . || [ $n = 100 ]; do
        n=`expr $n + 1`
        sleep 0.05
    done
}
"""
# Who listens in this network of its own goes with the test.
RUN = """
whichtests=$1.test scratchbase=$2 ./runtests.sh
kill $(ss -Hltnp 'sport = :873' | sed -n 's/.*pid=\\([0-9]*\\),.*/\\1/p') 2>/dev/null
:
"""


def unit(build, form, test):
    def run_it(place):
        scratch = os.path.join(place.folder, f"{form}-{test}")
        os.makedirs(scratch)
        _, text = place.command(["sh", "-c", RUN, "sh", test, scratch], f"{form}-{test}.log", SECONDS, cwd=build)
        found = re.search(r"^(PASS|SKIP|FAIL) +" + re.escape(test), text, re.M)
        return {f"{form}:{test}": {"PASS": PASS, "SKIP": SKIP}.get(found and found[1], FAIL)}

    return run_it


def prepare():
    if os.geteuid() != 0:
        raise Unavailable("the daemon's port is for root")
    need("gcc", "make", "libssl-dev", "zlib1g-dev", "libpopt-dev", "libacl1-dev", "libattr1-dev", "iproute2", "acl")
    source = debian_source("rsync")
    units = []
    for form in FORMS:
        build = os.path.join(home(), f"rsync-build-{form}")
        suite = os.path.join(build, "testsuite")
        if not os.path.exists(os.path.join(build, "ci-done")):
            shutil.rmtree(build, ignore_errors=True)
            shutil.copytree(source, build, symlinks=True)
            log = build + ".log"
            run(["sh", "./configure", "--disable-xxhash", "--disable-zstd", "--disable-lz4", "--disable-md2man"], log=log, cwd=build)
            run(["make", "-j2", "-o", "configure.sh", "-o", "config.h.in", "all", "testrun", "tls", "getgroups", "trimslash"], log=log, cwd=build)
            if form == "daemon":
                with open(os.path.join(suite, "rsync.fns"), "a", encoding="utf-8") as f:
                    f.write(START)
            open(os.path.join(build, "ci-done"), "w", encoding="utf-8").close()
        for name in sorted(os.listdir(suite)):
            path = os.path.join(suite, name)
            with open(path, encoding="utf-8") as f:
                text = f.read()
            if not name.endswith(".test") or (PAIR not in text and DAEMON not in text):
                continue
            if form == "daemon":
                with open(path, "w", encoding="utf-8") as f:
                    f.write(text.replace(PAIR, DAEMON))
            test = name.removesuffix(".test")
            units.append((f"{form} {test}", unit(build, form, test)))
    return units
