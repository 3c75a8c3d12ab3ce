"""uvloop's own tests, from its source on PyPI: asyncio's streams on libuv, driven by Python."""

import glob
import os
import subprocess
import sys

from .frame import FAIL, Unavailable, clean_env, home, junit, run

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from preload_lib import venv_python  # noqa: E402

VERSION = "0.22.1"
PACKAGES = [f"uvloop=={VERSION}", "pytest==8.4.2", "pytest-timeout==2.4.0", "aiohttp==3.13.2", "pyOpenSSL==25.3.0"]
MODULES = ["test_tcp", "test_sockets", "test_base", "test_regr1", "test_unix", "test_aiohttp"]
SECONDS = 280


def source(python):
    """The folder of the tests."""
    place = os.path.join(home(), f"uvloop-{VERSION}")
    if not os.path.isdir(os.path.join(place, "tests")):
        command = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", home(), f"uvloop=={VERSION}"]
        # (What it is built with is fetched and built for it, too.)
        run(command, timeout=900, env=clean_env())
        found = glob.glob(os.path.join(home(), f"uvloop-{VERSION}.tar.gz"))
        if not found:
            raise Unavailable("uvloop's source was not fetched")
        # Debian 12's tarfile has no filters.
        run(["tar", "-xzf", found[0], "-C", home()])
    # Beside the folder `uvloop` of the source, which has nothing built in it, the tests would take that one.
    apart = place + "-tests"
    if not os.path.isdir(apart):
        os.makedirs(apart)
        os.symlink(os.path.join(place, "tests"), os.path.join(apart, "tests"))
    return apart


def unit(python, tests, module):
    def run_it(place):
        xml_file = os.path.join(place.folder, module + ".xml")
        command = [python, "-m", "pytest", "-q", "--timeout", "60", "-p", "no:cacheprovider"]
        command += [f"--junit-xml={xml_file}", f"tests/{module}.py"]
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        status, _ = place.command(command, module + ".log", SECONDS, cwd=tests, env=env)
        # (One that could not be collected has no class.)
        name = lambda case: f"{module}:{(case.get('classname') or '').split('.')[-1]}.{case.get('name')}"
        results = junit(xml_file, name)
        if status not in (0, 1) or not results:
            results[f"{module}:all"] = FAIL
        return results

    return run_it


def prepare():
    try:
        python = venv_python(["uvloop", "pytest", "pytest_timeout", "aiohttp", "OpenSSL"], PACKAGES, "suites-venv")
    except (OSError, subprocess.SubprocessError) as e:
        raise Unavailable(f"Python packages: {e}") from e
    tests = source(python)
    return [(m, unit(python, tests, m)) for m in MODULES]
