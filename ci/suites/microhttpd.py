"""GNU libmicrohttpd's tests, from Debian's source: its server in each of its ways to wait, and clients of libcurl and of its own."""

import glob
import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, home, need, run

FOLDERS = ["src/microhttpd", "src/testcurl", "src/testcurl/https"]
NOT = re.compile(r"test_(str|http_reasons|md5|sha|postprocessor|response_entries|options|daemon)")
AT_ONCE = 20
SECONDS = 120


def unit(build, programs, number):
    def run_it(place):
        results = {}
        for path in programs:
            folder, program = os.path.split(path)
            status, _ = place.command([path], f"{number}-{program}.log", SECONDS, cwd=os.path.join(build, folder))
            results[f"{os.path.basename(folder)}:{program}"] = SKIP if status == 77 else PASS if status == 0 else FAIL
        return results

    return run_it


def prepare():
    need("gcc", "make", "curl", "libcurl4-openssl-dev", "libgnutls28-dev")
    source = debian_source("libmicrohttpd")
    build = os.path.join(home(), "microhttpd-build")
    if not os.path.exists(os.path.join(build, "ci-done")):
        shutil.rmtree(build, ignore_errors=True)
        shutil.copytree(source, build)
        log = build + ".log"
        # Libraries of its own only, so that the programs are programs.
        run(["sh", "./configure", "--disable-shared", "--enable-https=yes", "--disable-doc", "--disable-examples"], log=log, cwd=build)
        run(["make", "-j2"], log=log, cwd=build)
        for folder in FOLDERS:
            run(["make", "-C", folder, "-j2", "check", "TESTS="], log=log, cwd=build)
        open(os.path.join(build, "ci-done"), "w", encoding="utf-8").close()
    programs = []
    for folder in FOLDERS:
        found = sorted(glob.glob(os.path.join(build, folder, "test_*")) + glob.glob(os.path.join(build, folder, "perf_*")))
        programs += [p for p in found if os.path.isfile(p) and os.access(p, os.X_OK) and not NOT.match(os.path.basename(p))]
    parts = [programs[i : i + AT_ONCE] for i in range(0, len(programs), AT_ONCE)]
    return [(f"part {i}", unit(build, part, i)) for i, part in enumerate(parts)]
