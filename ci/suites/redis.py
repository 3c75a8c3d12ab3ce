"""Redis' own tests, from Debian's source package: a server and its replicas, driven by clients in Tcl."""

import os
import re
import shutil

from .frame import FAIL, PASS, Unavailable, debian_source, need

PROGRAMS = ["redis-server", "redis-cli", "redis-benchmark"]
# In parts of about the same length.
PARTS = {
    "blocked": """unit/type/list unit/type/stream-cgroups unit/multi unit/pubsub unit/tracking unit/introspection
        unit/introspection-2 unit/protocol unit/networking unit/auth unit/quit unit/scripting unit/pause""",
    "replicas": "integration/replication-4 integration/psync2-reg unit/wait integration/failover integration/redis-cli",
}
SECONDS = 280


def unit(source, name, units):
    def run(place):
        # The tests write below their own folder.
        work = os.path.join(place.folder, name)
        os.makedirs(os.path.join(work, "src"))
        for part in ("tests", "utils"):
            shutil.copytree(os.path.join(source, part), os.path.join(work, part))
        shutil.copy(os.path.join(source, "redis.conf"), work)
        for program in PROGRAMS:
            os.symlink(shutil.which(program), os.path.join(work, "src", program))
        wanted = [w for u in units for w in ("--single", u)]
        command = ["tclsh", "tests/test_helper.tcl", "--clients", "1", "--durable", "--tags", "-slow", *wanted]
        status, text = place.command(command, f"{name}.log", SECONDS, cwd=work)
        results = {}
        text = re.sub(r"\x1b\[[0-9;]*m", "", text)
        for kind, test in re.findall(r"^\[(ok|err|exception|TIMEOUT)\]:? ?(.*)$", text, re.M):
            test = re.sub(r" \(\d+ ms\)$| in tests/\S+\.tcl$", "", test)
            # One name may stand for several tests.
            results[test] = PASS if kind == "ok" and results.get(test) != FAIL else FAIL
        if status not in (0, 1) or not results:
            results[f"{name}:all"] = FAIL
        return results

    return run


def prepare():
    need("redis-server", "redis-tools", "tcl")
    missing = [p for p in PROGRAMS if not shutil.which(p)]
    if missing:
        raise Unavailable("not there: " + " ".join(missing))
    source = debian_source("redis")
    return [(name, unit(source, name, units.split())) for name, units in PARTS.items()]
