"""The tests of PgBouncer, PostgreSQL's connection pooler, from Debian's source: a proxy on libevent between psql and a server that
forks, with its own time limits, cancelled queries, and restarts in which a new process takes all connections over."""

import glob
import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, Unavailable, debian_source, need, run

# psql's every start is a connection or two; none takes longer than its sleeps, of 5 s at most.
SECONDS = 280
AT_ONCE = 10


def unit(source, tests, binaries):
    def run_it(place):
        work = os.path.join(place.folder, tests[0])
        folder = os.path.join(work, "test")
        shutil.copytree(os.path.join(source, "test"), folder)
        shutil.copytree(os.path.join(source, "include"), os.path.join(work, "include"))
        shutil.copy(os.path.join(source, "pgbouncer"), work)
        command = [os.path.join(folder, "test.sh"), *tests]
        if os.geteuid() == 0:
            # Neither server runs as root.
            run(["chown", "-R", "postgres", work])
            command = ["runuser", "-u", "postgres", "--", *command]
        env = {"PATH": f"{binaries}:{os.environ['PATH']}"}
        status, text = place.command(command, f"{tests[0]}.log", SECONDS, cwd=folder, env=env)
        words = {"ok": PASS, "FAILED": FAIL, "skipped": SKIP}
        results = {test: words[said] for test, said in re.findall(r" running (\w+) \.\.\. (\w+)$", text, re.M) if said in words}
        # One that hangs leaves the rest untold of.
        return dict.fromkeys(tests, FAIL) | results if results else {"all": FAIL}

    return run_it


def prepare():
    need("gcc", "make", "pkg-config", "libevent-dev", "postgresql")
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin"))
    if not found:
        raise Unavailable("PostgreSQL is not installed")
    source = debian_source("pgbouncer")
    if not os.path.exists(os.path.join(source, "pgbouncer")):
        log = os.path.join(source, "build.log")
        run(["./configure", "--without-openssl", "--without-cares", "--without-pam", "--without-systemd"], log=log, cwd=source)
        run(["make", "-j2", "pgbouncer"], log=log, cwd=source)
    with open(os.path.join(source, "test", "test.sh"), encoding="utf-8") as f:
        tests = re.search(r'^testlist="\n(.*?)^"', f.read(), re.M | re.S).group(1).split()
    parts = [tests[i : i + AT_ONCE] for i in range(0, len(tests), AT_ONCE)]
    return [(f"part {i}", unit(source, part, found[-1])) for i, part in enumerate(parts)]
