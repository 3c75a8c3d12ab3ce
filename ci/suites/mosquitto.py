"""The tests of Mosquitto's broker, from Debian's source package: clients in Python that count every byte of the protocol."""

import os
import re
import shutil
import sys

from .frame import FAIL, PASS, debian_source, need

AT_ONCE = 12
SECONDS = 60


def unit(source, tests, number):
    def run(place):
        # Configuration files and databases lie beside the tests.
        work = os.path.join(place.folder, f"part-{number}")
        shutil.copytree(os.path.join(source, "test"), work)
        results = {}
        for ports, test in tests:
            command = [sys.executable, f"./{test}", *(str(1888 + i) for i in range(ports))]
            status, _ = place.command(command, f"{test}.log", SECONDS, cwd=os.path.join(work, "broker"))
            results[test] = PASS if status == 0 else FAIL
        return results

    return run


def prepare():
    need("mosquitto")
    source = debian_source("mosquitto")
    with open(os.path.join(source, "test", "broker", "test.py"), encoding="utf-8") as f:
        tests = [(int(ports), test) for ports, test in re.findall(r"^\s*\((\d), '\./(\S+\.py)'\)", f.read(), re.M)]
    parts = [tests[i : i + AT_ONCE] for i in range(0, len(tests), AT_ONCE)]
    return [(f"part {i}", unit(source, part, i)) for i, part in enumerate(parts)]
