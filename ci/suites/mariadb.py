"""MariaDB's own tests of replication, with Debian's server: primaries and replicas that stream by TCP, are stopped, killed and
started again, and clients with and without TLS."""

import glob
import os
import re

from .frame import FAIL, PASS, SKIP, Unavailable, need

TESTS = "/usr/share/mysql/mysql-test"
SUITES = ("rpl", "multi_source")
AT_ONCE = 20
SECONDS = 600
VERDICTS = {"pass": PASS, "fail": FAIL, "skipped": SKIP, "disabled": SKIP}


def unit(suite, tests, number):
    def run_it(place):
        name = f"{suite}-{number}"
        var = os.path.join(place.folder, name)
        command = ["perl", "./mysql-test-run.pl", f"--vardir={var}", f"--suite={suite}", "--force", "--max-test-fail=0"]
        # One of the three formats in which changes are sent, which are tests of their own.
        command += ["--parallel=1", "--retry=2", "--combination=--binlog-format=row", "--nocheck-testcases"]
        command += ["--testcase-timeout=2", "--shutdown-timeout=60", *tests]
        _, text = place.command(command, f"{name}.log", SECONDS, cwd=TESTS)
        results, wanted = {}, {f"{suite}.{t}" for t in tests}
        for test, verdict in re.findall(r"^(?:worker\[\d+\] )?([\w.-]+) (?:'[^']*' )*\s*\[ (?:retry-)?(\w+) \]", text, re.M):
            # What holds only when it is tried again has failed: it may have hung.
            if test in wanted and results.get(test) != FAIL:
                results[test] = VERDICTS.get(verdict, FAIL)
        return dict.fromkeys(wanted, FAIL) | results

    return run_it


def prepare():
    need("mariadb-server", "mariadb-test", "mariadb-test-data", "perl")
    if not os.path.isdir(TESTS):
        raise Unavailable("no tests in " + TESTS)
    units = []
    for suite in SUITES:
        found = [f for place in ("t", "") for f in glob.glob(os.path.join(TESTS, "suite", suite, place, "*.test"))]
        names = []
        for path in sorted(found):
            with open(path, encoding="utf-8", errors="replace") as f:
                text = f.read()
            # Other builds, or other replications than by rows.
            if not re.search(r"have_debug|have_binlog_format_(mixed|statement)|not_embedded_big|big_test|have_federatedx", text):
                names.append(os.path.basename(path)[: -len(".test")])
        for i in range(0, len(names), AT_ONCE):
            units.append((f"{suite} {i // AT_ONCE}", unit(suite, names[i : i + AT_ONCE], i // AT_ONCE)))
    return units
