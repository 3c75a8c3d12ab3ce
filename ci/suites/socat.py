"""socat's own tests: its many kinds of sockets between processes that fork, execute others and leave them their sockets."""

import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, need, run

# They are numbered; each part is so many numbers.
LAST, PART = 462, 21
SECONDS = 240
PRIME = "testcert.dh"

# The script's own choice of tests, which comes first in it.
CHOICE = re.compile(r"^NUMCOND=.*$", re.M)
RESULT = re.compile(r"^test +(\d+) (\w+): .*\.\.\. (?:.*\n)??.*?\x1b\[(\d+)m", re.M)
GREEN, YELLOW = "32", "33"


def unit(source, first):
    def run_it(place):
        with open(os.path.join(source, "test.sh"), encoding="utf-8", errors="surrogateescape") as f:
            text = f.read()
        chosen = rf'NUMCOND="test \\$N -ge {first} -a \\$N -lt {first + PART}"'
        script = os.path.join(source, f"ci-test-{place.variant}-{first}.sh")
        with open(script, "w", encoding="utf-8", errors="surrogateescape") as f:
            f.write(CHOICE.sub(chosen, text, count=1))
        # The script leaves certificates where it runs, and would look for a prime for each.
        folder = os.path.join(place.folder, f"work-{first}")
        os.makedirs(folder)
        shutil.copy(os.path.join(source, PRIME), folder)
        names = {name: os.path.join(source, name.lower()) for name in ("SOCAT", "FILAN", "PROCAN")}
        env = names | {"TERM": "xterm", "TMPDIR": "/tmp", "HOME": folder}
        # A signal that comes while it ends by itself makes it free its TLS context twice, and turn round in that for ever.
        for attempt in (1, 2):
            status, text = place.command(["bash", script], f"from-{first}-{attempt}.log", SECONDS, cwd=folder, env=env)
            if status is not None:
                break
        os.remove(script)
        results = {}
        for number, name, color in RESULT.findall(text):
            results[f"{number} {name}"] = PASS if color == GREEN else SKIP if color == YELLOW else FAIL
        if status is None:
            results[f"from {first}:all"] = FAIL
        return results

    return run_it


def prepare():
    need("gcc", "make", "libssl-dev", "libreadline-dev", "openssl", "net-tools", "iputils-ping", "iproute2", "procps")
    source = debian_source("socat")
    if not os.path.exists(os.path.join(source, "socat")):
        log = os.path.join(os.path.dirname(source), "build.log")
        run(["./configure"], log=log, cwd=source)
        run(["openssl", "dhparam", "-out", PRIME, "2048"], log=log, cwd=source)
        run(["make", "-j2"], log=log, cwd=source)
    return [(f"from {first}", unit(source, first)) for first in range(1, LAST + 1, PART)]
