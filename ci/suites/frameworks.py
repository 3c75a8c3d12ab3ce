"""Tests that frameworks of Python bring in their packages: Tornado's on asyncio, trio's on a loop of its own, those of
Twisted's reactors."""

import os
import re
import subprocess
import sys

from .frame import FAIL, PASS, SKIP, Unavailable, junit

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from preload_lib import venv_python  # noqa: E402

PACKAGES = ["tornado==6.5.2", "trio==0.31.0", "trustme==1.2.1", "pyOpenSSL==25.3.0", "astor==0.8.1", "jedi==0.19.2"]
PACKAGES += ["pytest==8.4.2", "pytest-timeout==2.4.0", "twisted==25.5.0", "service-identity==24.2.0", "PyHamcrest==2.1.0"]
NEEDS = ["tornado", "trio", "trustme", "OpenSSL", "astor", "jedi", "pytest", "pytest_timeout"]
NEEDS += ["twisted", "service_identity", "hamcrest"]
# Of Twisted: its reactors, and protocols over them.
TWISTED = ["internet.test.test_tcp", "internet.test.test_tls", "test.test_tcp", "test.test_ssl", "protocols.test.test_tls"]
TWISTED += ["web.test.test_webclient"]
SECONDS = 280


def tornado(python):
    def run(place):
        command = [python, "-m", "tornado.test.runtests", "--verbose"]
        status, text = place.command(command, "tornado.log", SECONDS)
        results = {}
        told = r"^\w+ \((\S+?)\)(?:\n[^\n]*)? \.\.\. (ok|FAIL|ERROR|skipped)"
        for test, result in re.findall(told, text, re.MULTILINE):
            results[test] = {"ok": PASS, "skipped": SKIP}.get(result, FAIL)
        if status not in (0, 1) or not results:
            results["tornado:all"] = FAIL
        return results

    return run


def trio(python):
    def run(place):
        xml_file = os.path.join(place.folder, "trio.xml")
        command = [python, "-m", "pytest", "-q", "--timeout", "60", "-p", "no:cacheprovider", f"--junit-xml={xml_file}"]
        command += ["-p", "trio._tests.pytest_plugin", "--pyargs", "trio._tests"]
        # Tests of its own tools, which are not there: pytest takes a relative pattern to be below the working directory.
        command += [f"--ignore-glob={os.path.dirname(os.path.dirname(python))}/*/trio/_tests/tools/*"]
        status, _ = place.command(command, "trio.log", SECONDS, cwd=place.folder)
        results = junit(xml_file)
        if status not in (0, 1) or not results:
            results["trio:all"] = FAIL
        return results

    return run


def twisted(python):
    def run(place):
        tests = [f"twisted.{name}" for name in TWISTED]
        command = [python, "-m", "twisted.trial", "--reporter=bwverbose", "--unclean-warnings", *tests]
        status, text = place.command(command, "twisted.log", SECONDS, cwd=place.folder)
        results = {}
        for test, result in re.findall(r"^(twisted\.\S+) \.\.\. +\[(\w+)\]", text, re.MULTILINE):
            results[test] = {"OK": PASS, "FAIL": FAIL, "ERROR": FAIL}.get(result, SKIP)
        if status not in (0, 1) or not results:
            results["twisted:all"] = FAIL
        return results

    return run


def prepare():
    try:
        python = venv_python(NEEDS, PACKAGES, "frameworks-venv")
    except (OSError, subprocess.SubprocessError) as e:
        raise Unavailable(f"Python packages: {e}") from e
    return [("twisted", twisted(python)), ("tornado", tornado(python)), ("trio", trio(python))]
