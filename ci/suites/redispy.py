"""The tests of redis-py, Python's client of Redis, from its source at PyPI: blocking sockets, asyncio's streams, connections
that a forked process has of its parent, and subscriptions; with a server that is preloaded, too."""

import glob
import os
import subprocess
import sys

from .frame import FAIL, Unavailable, home, junit, need, run

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from preload_lib import venv_python  # noqa: E402

VERSION = "5.0.8"
PACKAGES = ["redis==" + VERSION, "pytest==8.4.2", "pytest-asyncio==0.23.8", "pytest-timeout==2.4.0", "cachetools==5.5.0", "mock==5.1.0", "packaging"]
NEEDS = ["redis", "pytest", "pytest_asyncio", "pytest_timeout", "cachetools", "mock"]
FILES = ["multiprocessing", "connection", "connection_pool", "connect", "pubsub", "monitor", "pipeline", "lock", "encoding", "retry", "scripting"]
FILES += ["commands"]
FOLDERS = ["tests", "tests/test_asyncio"]
SECONDS = 280
# Its server goes with the tests.
RUN = """
redis-server --port 6379 --save '' --enable-debug-command yes >/dev/null &
server=$!
for _ in $(seq 100); do redis-cli ping >/dev/null 2>&1 && break; sleep 0.1; done
"$@"
status=$?
kill $server
wait $server
exit $status
"""


def unit(python, source, file):
    name = file.removeprefix("tests/").removesuffix(".py")

    def run_it(place):
        log = name.replace("/", "-")
        report = os.path.join(place.folder, log + ".xml")
        options = ["-q", "--timeout=60", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "-W", "ignore", "-m", "not redismod and not ssl and not onlycluster", f"--junit-xml={report}"]
        command = ["sh", "-c", RUN, "sh", python, "-m", "pytest", *options, file]
        status, _ = place.command(command, log + ".log", SECONDS, cwd=source, env={"PYTHONDONTWRITEBYTECODE": "1"})
        results = junit(report)
        if status not in (0, 1) or not results:
            results[f"{name}:all"] = FAIL
        return results

    return run_it


def prepare():
    need("redis-server", "redis-tools")
    try:
        python = venv_python(NEEDS, PACKAGES, "redispy-venv")
    except (OSError, subprocess.SubprocessError) as e:
        raise Unavailable(f"Python packages: {e}") from e
    place = os.path.join(home(), "redispy")
    source = os.path.join(place, "redis-" + VERSION)
    if not os.path.exists(source):
        os.makedirs(place, exist_ok=True)
        run([python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", place, "redis==" + VERSION])
        run(["tar", "xzf", *glob.glob(os.path.join(place, "redis-*.tar.gz")), "-C", place])
    files = [f"{folder}/test_{name}.py" for folder in FOLDERS for name in FILES]
    return [(file, unit(python, source, file)) for file in files if os.path.exists(os.path.join(source, file))]
