"""OpenSSL's tests of protocols, from Debian's source: its own client and server, as processes, and between them a proxy in Perl that
looks into the records and changes them; and its tests of HTTP and of certificate management by HTTP."""

import glob
import os
import re

from .frame import FAIL, PASS, SKIP, debian_source, need, run

RECIPES = re.compile("70-test_.*|79-test_http|80-test_(ocsp|ssl).*|81-test_cmp_cli|82-test_.*|90-test_(bio|ssl).*")
SECONDS = 280


def unit(source, recipe):
    name = os.path.basename(recipe)[:-2]

    def run_it(place):
        results_at = os.path.join(place.folder, name)
        os.makedirs(results_at, exist_ok=True)
        # fmt: off
        env = {
            "SRCTOP": source, "BLDTOP": source, "PERL": "perl", "EXE_EXT": "", "RESULT_D": results_at, "HARNESS_ACTIVE": "1", "V": "1",
            "HARNESS_VERBOSE": "1", "OPENSSL_ENGINES": f"{source}/engines", "OPENSSL_MODULES": f"{source}/providers",
            "OPENSSL_CONF": f"{source}/apps/openssl.cnf", "CTLOG_FILE": f"{source}/test/ct/log_list.cnf", "LD_LIBRARY_PATH": source,
        }
        # fmt: on
        command = ["env", "-u", "TOP", "perl", f"-I{source}/util/perl", recipe]
        status, text = place.command(command, name + ".log", SECONDS, cwd=source, env=env)
        results = {f"{name}:end": SKIP if re.search(r"^1\.\.0", text, re.M) else PASS if status == 0 else FAIL}
        for no, number, skipped in re.findall(r"^(not )?ok (\d+)(?:[^#\n]*)(# (?:TODO|skip))?", text, re.M | re.I):
            results[f"{name}:{number}"] = SKIP if skipped else FAIL if no else PASS
        return results

    return run_it


def prepare():
    need("gcc", "make", "perl")
    source = debian_source("openssl")
    log = os.path.join(source, "ci-build.log")
    done = os.path.join(source, "ci-done")
    if not os.path.exists(done):
        run(["./config", "no-asm", "enable-ssl-trace"], log=log, cwd=source)
        run(["make", "-j2", "build_sw"], log=log, cwd=source, timeout=1800)
        open(done, "w", encoding="utf-8").close()
    recipes = sorted(glob.glob(os.path.join(source, "test", "recipes", "*.t")))
    return [(os.path.basename(r)[:-2], unit(source, r)) for r in recipes if RECIPES.fullmatch(os.path.basename(r)[:-2])]
