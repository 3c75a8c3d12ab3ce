"""Tests of servers and event loops for Python, from their sources at PyPI: pyftpdlib's FTP (select, poll, epoll, threads and
processes), waitress' and cheroot's HTTP, eventlet's green sockets. Every test file is run by itself."""

import glob
import os
import subprocess
import sys

from .frame import FAIL, Unavailable, home, junit, run

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from preload_lib import venv_python  # noqa: E402

# Package, version, where its test files are.
SOURCES = [
    ("pyftpdlib", "2.2.0", "tests/test_*.py"),
    ("waitress", "3.0.2", "tests/test_*.py"),
    ("cheroot", "11.1.2", "cheroot/test/test_*.py"),
    ("eventlet", "0.41.3", "tests/**/*_test.py"),
]
# What the tests import.
MORE = ["pytest==8.4.2", "pytest-timeout==2.4.0", "pytest-mock==3.15.1", "pytest-instafail", "jaraco.test", "jaraco.text", "psutil==7.1.3"]
MORE += ["pyopenssl", "requests==2.32.5", "requests-unixsocket", "requests-toolbelt", "portend", "trustme", "pypytools", "six", "setuptools"]
NEEDS = ["pytest", "pytest_timeout", "psutil", "OpenSSL", "trustme", *(p for p, _, _ in SOURCES)]
SECONDS = 300


def unit(python, source, file):
    package = os.path.basename(source)
    name = f"{package}/{file}"

    def run_it(place):
        log = name.replace("/", "-")
        report = os.path.join(place.folder, log + ".xml")
        # What their own settings ask for (coverage, several processes) is not wanted.
        options = ["-q", "-c", "/dev/null", "--rootdir", ".", "--timeout=60", "-p", "no:cacheprovider", "-W", "ignore", f"--junit-xml={report}"]
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        status, _ = place.command([python, "-m", "pytest", *options, file], log + ".log", SECONDS, cwd=source, env=env)
        results = junit(report, lambda case: f"{package}:{case.get('classname')}.{case.get('name')}")
        # 5: no tests.
        if status not in (0, 1, 5):
            results[f"{name}:all"] = FAIL
        return results

    return run_it


def prepare():
    packages = [f"{p}=={v}" for p, v, _ in SOURCES]
    try:
        python = venv_python(NEEDS, [*packages, *MORE], "pypi-venv")
    except (OSError, subprocess.SubprocessError) as e:
        raise Unavailable(f"Python packages: {e}") from e
    place = os.path.join(home(), "pypi")
    os.makedirs(place, exist_ok=True)
    units = []
    for package, version, tests in SOURCES:
        source = os.path.join(place, f"{package}-{version}")
        if not os.path.exists(source):
            wanted = f"{package}=={version}"
            run([python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", package, "-d", place, wanted])
            run(["tar", "xzf", source + ".tar.gz", "-C", place])
        for path in sorted(glob.glob(os.path.join(source, tests), recursive=True)):
            file = os.path.relpath(path, source)
            units.append((f"{package} {file}", unit(python, source, file)))
    return units
