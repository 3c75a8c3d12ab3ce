"""GNU make's own tests, from Debian's source package, with Debian's make: commands, their output, and the jobserver, which
is a pipe of tokens; no network, so they are for `--pairs`. Each file is one test, of which some calls fail natively: how
many do is part of the test's name then."""

import glob
import os
import re
import shutil

from .frame import FAIL, PASS, debian_source, need

SECONDS = 300
PARTS = ["features", "functions", "misc", "options", "targets", "variables"]
# The driver gives make an environment of its own.
KEEPS = """
  foreach (grep { /^(LD_PRELOAD$|WARM_|RINGSOCK_)/ } keys %ENV) {
    $makeENV{$_} = $ENV{$_};
  }
"""
AFTER = "  # Make sure our compares are not foiled by locale differences"


def unit(source, part, names):
    def run_it(place):
        top = os.path.join(place.folder, part)
        work = os.path.join(top, "tests")
        # They write beside themselves, and look for the source above.
        shutil.copytree(os.path.join(source, "tests"), work, symlinks=True)
        shutil.copytree(os.path.join(source, "src"), os.path.join(top, "src"), symlinks=True)
        driver = os.path.join(work, "test_driver.pl")
        with open(driver, encoding="utf-8") as f:
            text = f.read()
        with open(driver, "w", encoding="utf-8") as f:
            f.write(text.replace(AFTER, KEEPS + AFTER, 1))
        with open(os.path.join(work, "config-flags.pm"), "w", encoding="utf-8") as f:
            f.write("%CONFIG_FLAGS = (AR => 'ar', CC => 'gcc', CPP => 'gcc -E');\n1;\n")
        command = ["perl", "run_make_tests.pl", "-make", "/usr/bin/make", "-srcdir", top]
        results = {}
        for name in names:
            test = f"{part}/{name}"
            status, text = place.command([*command, test], f"{part}-{name}.log", SECONDS, cwd=work)
            told = re.search(rf"^{re.escape(test)} \.*\s+(.*\n)*?(ok|FAILED|N/A)(.*)$", text, re.M)
            if status is None or not told:
                results[f"{test}: no result"] = results[test] = FAIL
            elif told[2] == "ok":
                results[test] = PASS
            else:
                results[f"{test}: {told[2]}{told[3]}".rstrip()] = PASS
            # What failed keeps what it got and what it wanted.
            kept = os.path.join(work, "work")
            if os.path.isdir(kept) and told and told[2] == "FAILED":
                shutil.copytree(kept, os.path.join(place.folder, f"{part}-{name}"), symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(kept, ignore_errors=True)
        shutil.rmtree(top, ignore_errors=True)
        return results

    return run_it


def prepare():
    need("make", "perl", "gcc")
    source = debian_source("make-dfsg")
    units = []
    for part in PARTS:
        found = sorted(glob.glob(os.path.join(source, "tests", "scripts", part, "*")))
        units.append((part, unit(source, part, [os.path.basename(f) for f in found if os.path.isfile(f)])))
    return units
