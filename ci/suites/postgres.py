"""PostgreSQL's own tests of its server, from Debian's source package: what its regression tests ask by psql, and its
isolation tests, in which several sessions wait for each other. The server forks a process for each connection."""

import glob
import os
import re
import shutil

from .frame import FAIL, PASS, Unavailable, debian_source, need

SECONDS = 280
SCRIPT = """
set -e
mkdir data out
initdb -D data -A trust -N --no-locale -E UTF8 >initdb.log
pg_ctl -D data -w -l server.log -o "-p $PORT -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off" start
stop() { pg_ctl -D data -m immediate stop >stop.log; }
trap stop EXIT
"$RUNNER" --host=127.0.0.1 --port=$PORT --bindir="$BIN" --inputdir="$TESTS" --outputdir="$PWD/out" --dlpath="$LIBS" \
    --max-connections=8 --schedule="$SCHEDULE"
"""


def unit(name, runner, tests, schedule, binaries, port):
    def run(place):
        work = os.path.join(place.folder, name)
        os.makedirs(work)
        env = {"PORT": str(port), "RUNNER": runner, "BIN": binaries, "TESTS": tests, "LIBS": os.path.dirname(runner)}
        env |= {"SCHEDULE": os.path.join(tests, schedule), "PATH": f"{binaries}:{os.environ['PATH']}"}
        command = ["bash", "-c", SCRIPT]
        if os.geteuid() == 0:
            # Its server does not run as root.
            shutil.chown(work, "postgres")
            command = ["runuser", "-u", "postgres", "--", *command]
        status, text = place.command(command, f"{name}.log", SECONDS, cwd=work, env=env)
        done = re.findall(r"^(?:test|    ) +(\S+) +\.\.\. (ok|FAILED)", text, re.M)
        results = {f"{name}:{test}": PASS if said == "ok" else FAIL for test, said in done}
        # A server that hangs, or ends, leaves tests that are not told of.
        if status not in (0, 1) or not results:
            results[f"{name}:all"] = FAIL
        return results

    return run


def prepare():
    need("postgresql")
    found = sorted(glob.glob("/usr/lib/postgresql/*/lib/pgxs/src/test/isolation/pg_isolation_regress"))
    if not found:
        raise Unavailable("PostgreSQL's programs for its tests are not installed")
    base = found[-1].split("/lib/pgxs")[0]
    source = os.path.join(debian_source(f"postgresql-{os.path.basename(base)}"), "src", "test")
    units = []
    for port, name, runner in (5998, "isolation", "pg_isolation_regress"), (5999, "regress", "pg_regress"):
        runner = os.path.join(base, "lib", "pgxs", "src", "test", name, runner)
        schedule = "isolation_schedule" if name == "isolation" else "parallel_schedule"
        units.append((name, unit(name, runner, os.path.join(source, name), schedule, os.path.join(base, "bin"), port)))
    return units
