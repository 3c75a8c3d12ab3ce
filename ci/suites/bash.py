"""Bash's own tests, from Debian's source package, with Debian's Bash: pipelines, substitutions, coprocesses and jobs; no
network, so they are for `--pairs`. Each file is one test, whose output Bash's authors recorded. Where it differs natively,
the difference is part of the test's name, and is to be the same elsewhere."""

import glob
import hashlib
import os
import re
import shutil

from .frame import FAIL, PASS, debian_source, home, need, run

HELPERS = ["recho", "zecho", "printenv", "xcase"]
# Other tests together; what measures; one substitution 6,856 times.
NOT = ["all", "minimal", "gprof", "ifs-posix"]
SECONDS = 120
AT_ONCE = 10


def helpers(source):
    """A folder with the programs that the tests start."""
    place = os.path.join(home(), "bash-helpers")
    os.makedirs(place, exist_ok=True)
    with open(os.path.join(place, "config.h"), "w", encoding="utf-8") as f:
        f.write("#define HAVE_STRING_H 1\n#define HAVE_STDLIB_H 1\n#define HAVE_UNISTD_H 1\n#define HAVE_MEMORY_H 1\n")
    for name in HELPERS:
        to = os.path.join(place, name)
        if not os.path.exists(to):
            gcc = ["gcc", "-w", "-DHAVE_CONFIG_H", f"-I{place}", f"-I{source}", f"-I{source}/include"]
            run([*gcc, "-o", to, os.path.join(source, "support", name + ".c")])
    return place


def plain(text):
    """What was printed other than recorded, without what no two runs share: numbers of processes, times, places, and the
    order of what several processes say. Natively, too, `/dev/fd` has no sockets, and who says so first may hide another; and a coprocess of
    `nameref` may have ended, or not, when its variable `RO_PID` is looked at. So it is with the file of `new-exp`, whose writer cannot be
    opened by `/dev/fd`."""
    chance = ("/dev/fd/", "RO_PID", "/bashtest-")
    lines = [line for line in text.split("\n") if line[:1] not in "0123456789-" and not any(c in line for c in chance)]
    return "\n".join(sorted(re.sub(r"\d{3,}", "N", re.sub(r"/\S*(tmp|run)-\S*|\d+[.:]\d+", "X", line)) for line in lines))


def unit(tests, tools, names):
    def run_it(place):
        results = {}
        for name in names:
            # They write beside themselves.
            work = os.path.join(place.folder, name)
            shutil.copytree(tests, work, symlinks=True)
            env = {
                "THIS_SH": "/bin/bash",
                "BUILD_DIR": work,
                "TMPDIR": work,
                "BASH_TSTOUT": os.path.join(work, "told"),
                "PATH": f".:{tools}:{os.environ['PATH']}",
            }
            # `run-all` does without these, too.
            command = ["env", "-u", "BASH_ENV", "-u", "SHELLOPTS", "-u", "LC_ALL", "sh", f"./run-{name}"]
            status, text = place.command(command, f"{name}.log", SECONDS, cwd=work, env=env)
            differs = plain("\n".join(line for line in text.split("\n") if not line.startswith("warning: "))).strip()
            if status is None:
                results[f"{name}: out of time"] = results[name] = FAIL
            elif not differs:
                results[name] = PASS
            else:
                results[f"{name} differs {hashlib.sha256(differs.encode()).hexdigest()[:8]}"] = PASS
            shutil.rmtree(work, ignore_errors=True)
        return results

    return run_it


def prepare():
    need("bash", "gcc", "libc6-dev")
    source = debian_source("bash")
    tests = os.path.join(source, "tests")
    tools = helpers(source)
    names = sorted(os.path.basename(f)[len("run-") :] for f in glob.glob(os.path.join(tests, "run-*")))
    names = [n for n in names if n not in NOT]
    return [(f"{i}", unit(tests, tools, names[i : i + AT_ONCE])) for i in range(0, len(names), AT_ONCE)]
