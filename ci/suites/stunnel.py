"""stunnel's own tests, from Debian's source: TLS on one side of each of its threads, plain bytes on the other, programs that it
starts with a connection as their input; clients and servers of Python's asyncio."""

import glob
import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, home, need, run

AT_ONCE = 7
SECONDS = 200

RESULT = re.compile(r"^(?!\s)(\S.*)\n(?:(?!\.{20}).*\n)*?\.{20,} (\w+)$", re.M)


def unit(build, plugins, number):
    def run_it(place):
        # Each folder of tests has its plugins, and runs all that it has.
        folder = os.path.join(place.folder, f"tests-{number}")
        shutil.copytree(os.path.join(build, "tests"), folder, ignore=lambda _, names: [n for n in names if re.match(r"p\d\d_", n) and n not in plugins])
        command = ["python3", "maketest.py", f"--program={build}/src/stunnel"]
        status, text = place.command(command, f"part-{number}.log", SECONDS, cwd=folder)
        results = {}
        for test, result in RESULT.findall(text):
            results[test] = {"succeeded": PASS, "skipped": SKIP}.get(result, FAIL)
        results[f"part {number}:all"] = PASS if status == 0 else FAIL
        return results

    return run_it


def prepare():
    need("gcc", "make", "libssl-dev", "openssl")
    source = debian_source("stunnel4")
    build = os.path.join(home(), "stunnel-build")
    if not os.path.exists(os.path.join(build, "ci-done")):
        shutil.rmtree(build, ignore_errors=True)
        shutil.copytree(source, build)
        log = build + ".log"
        run(["sh", "./configure", "--enable-ipv6", "--with-threads=pthread"], log=log, cwd=build)
        run(["make", "-C", "src", "-j2"], log=log, cwd=build)
        run(["make", "-C", "tests/certs", "check"], log=log, cwd=build)
        open(os.path.join(build, "ci-done"), "w", encoding="utf-8").close()
    plugins = sorted(os.path.basename(p) for p in glob.glob(os.path.join(build, "tests", "plugins", "p*.py")))
    parts = [plugins[i : i + AT_ONCE] for i in range(0, len(plugins), AT_ONCE)]
    return [(f"part {i}", unit(build, part, i)) for i, part in enumerate(parts)]
