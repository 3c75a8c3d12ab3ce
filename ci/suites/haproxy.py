"""HAProxy's regression tests, from Debian's source package: its server between varnishtest's clients and servers."""

import os
import re
import shutil
import tempfile

from .frame import FAIL, PASS, debian_source, need

# Folders in as many parts; each test waits most of its time.
PARTS = 4
SECONDS = 280


def regtests(place, source, tests, jobs, log):
    """Runs tests or folders of them; gives the exit status and the results."""
    env = {"HAPROXY_PROGRAM": shutil.which("haproxy") or "/usr/sbin/haproxy"}
    env |= {"VTEST_PROGRAM": shutil.which("varnishtest"), "VTEST_TIMEOUT": "60"}
    command = ["./scripts/run-regtests.sh", "--j", str(jobs), "--type", "default,bug,slow", *tests]
    # There are Unix sockets in it, whose names may not be long.
    with tempfile.TemporaryDirectory() as scratch:
        env["TMPDIR"] = scratch
        status, text = place.command(command, log, SECONDS, cwd=source, env=env)
    results = {test: PASS for test in re.findall(r"Add test: (reg-tests/\S+\.vtc)", text)}
    for test in re.findall(r"TEST (reg-tests/\S+\.vtc) (?:FAILED|TIMED OUT)", text):
        results[test] = FAIL
    return status, results


def unit(source, folders, number):
    def run(place):
        status, results = regtests(place, source, folders, 2, f"part-{number}.log")
        if status not in (0, 1) or not results:
            results[f"part {number}:all"] = FAIL
        # Many count on 10 ms, or on the end of a connection to come with the last bytes: once more, alone.
        for test in [t for t, result in results.items() if result == FAIL and t.endswith(".vtc")]:
            results |= regtests(place, source, [test], 1, f"again-{os.path.basename(test)}.log")[1]
        return results

    return run


def prepare():
    need("haproxy", "varnish", "socat")
    source = debian_source("haproxy")
    folders = sorted(os.listdir(os.path.join(source, "reg-tests")))
    folders = [f"reg-tests/{f}" for f in folders if os.path.isdir(os.path.join(source, "reg-tests", f))]
    parts = [folders[i::PARTS] for i in range(PARTS)]
    return [(f"part {i}", unit(source, part, i)) for i, part in enumerate(parts)]
