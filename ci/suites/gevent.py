"""gevent's own tests, which it brings along: its sockets, servers and clients on libev, in greenlets of one thread."""

import os
import re
import subprocess
import sys

from .frame import FAIL, PASS, SKIP, Unavailable

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from preload_lib import venv_python  # noqa: E402

PACKAGES = ["gevent==25.9.1", "requests==2.32.5", "psutil==7.1.3"]
# `test__x.py` of gevent.tests, without the underscores and the end.
MODULES = ["socket", "socket_close", "socket_errors", "socket_ex", "socket_send_memoryview", "socket_ssl", "socket_timeout"]
MODULES += ["server", "server_pywsgi", "pywsgi", "select", "selectors", "makefile_ref", "ssl", "backdoor", "iwait", "os", "core_fork"]
MODULES += ["example_echoserver", "example_portforwarder", "example_wsgiserver", "example_wsgiserver_ssl", "example_webproxy"]
MODULES += ["greenio", "greenness", "monkey_select", "monkey_selectors", "close_backend_fd", "issue6", "issue600", "subprocess"]
SECONDS = 240
RESULT = re.compile(r"^(\w+) \((\S+?)\)(?:\n[^\n]*?)? \.\.\. (?:[^\n]*\n)*?(ok|FAIL|ERROR|skipped|expected failure)", re.M)


def unit(python, module):
    def run_it(place):
        env = {"PYTHONDONTWRITEBYTECODE": "1", "GEVENTTEST_USE_RESOURCES": "-network", "HOME": place.folder}
        command = [python, "-m", f"gevent.tests.test__{module}", "-v"]
        status, text = place.command(command, module + ".log", SECONDS, cwd=place.folder, env=env)
        results = {}
        for test, where, result in RESULT.findall(text):
            kind = {"ok": PASS, "FAIL": FAIL, "ERROR": FAIL}.get(result, SKIP)
            results[f"{module}:{where.removeprefix('__main__.')}.{test}"] = kind
        results[f"{module}:all"] = PASS if status == 0 else FAIL
        return results

    return run_it


def prepare():
    try:
        python = venv_python(["gevent", "requests", "psutil"], PACKAGES, "gevent-venv")
    except (OSError, subprocess.SubprocessError) as e:
        raise Unavailable(f"Python packages: {e}") from e
    return [(module, unit(python, module)) for module in MODULES]
