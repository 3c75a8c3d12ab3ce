"""Tcl's own tests of sockets, channels and its http package, from Debian's source: clients and servers in one event loop, in
threads, and in programs that the tests start."""

import glob
import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, need

FILES = ["socket", "io", "chanio", "ioCmd", "iogt", "ioTrans", "event", "http", "http11", "httpold", "httpPipeline", "exec"]
SECONDS = 200
VERDICTS = {"++++": {"PASSED": PASS, "SKIPPED": SKIP}, "====": {"FAILED": FAIL}}


def unit(tests, name):
    def run_it(place):
        # They write beside themselves.
        work = os.path.join(place.folder, name)
        shutil.copytree(tests, work, symlinks=True)
        status, text = place.command(
            ["tclsh8.6", f"{name}.test", "-verbose", "pse", "-tmpdir", work], f"{name}.log", SECONDS, cwd=work
        )
        results = {}
        for sign, test, rest in re.findall(r"^(\+\+\+\+|====) (\S+) (.*)$", text, re.M):
            for word, verdict in VERDICTS[sign].items():
                if word in rest:
                    results[f"{name}:{test}"] = verdict
        if status != 0 or not results:
            results[f"{name}:all"] = FAIL
        return results

    return run_it


def prepare():
    need("tcl8.6")
    tests = os.path.join(debian_source("tcl8.6"), "tests")
    there = {os.path.basename(f)[: -len(".test")] for f in glob.glob(os.path.join(tests, "*.test"))}
    return [(name, unit(tests, name)) for name in FILES if name in there]
