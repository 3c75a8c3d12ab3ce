"""Node.js' own tests of what stands on sockets, from Debian's source package."""

import os
import re
import shutil

from .frame import FAIL, PASS, SKIP, debian_source, need

TESTS = re.compile(r"^test-(net|http|https|http2|tls|cluster|pipe|child-process-.*(net|fork|pass|server|socket))-")
# For `--pairs`: what may stand on pipes and pairs of Unix sockets. (Clusters hand fds over, which TCP does not.)
PROCESSES = re.compile(
    r"^test-(child[-_]process|stdio|process|pipe|worker|stream|signal|stdin|stdout|stderr|spawn|fork|kill|sync-io|tty|domain-stdout"
    r"|listen-fd|cli-|debug|async-hooks|async-wrap|http-chunk|fs-(read|write)-?stream|fs-sir|readline|repl-(stdin|pipe)|exit|unhandled|ref|next-tick)"
)
USES = re.compile(r"child_process|cluster|common\.PIPE|process\.(stdin|stdout|stderr|on|kill)|spawn|fork")
# They look at addresses outside this machine, or wait for tens of seconds.
OUTSIDE = re.compile(r"autoselectfamily|net-dns|net-connect-timeout|better-error|http2-(max-session-memory|ping-flood)")
AT_ONCE = 12
SECONDS = 60


def unit(node, tests, names, number):
    def run(place):
        results = {}
        # The tests remove and make folders there.
        scratch = os.path.join(place.folder, f"part-{number}")
        os.makedirs(scratch)
        for name in names:
            path = os.path.join(tests, name)
            with open(path, encoding="utf-8", errors="replace") as f:
                flags = [w for line in re.findall(r"^// Flags: (.*)$", f.read(), re.MULTILINE) for w in line.split()]
            env = {"NODE_TEST_DIR": scratch, "TEST_THREAD_ID": "0"}
            log = f"{number}-{os.path.basename(name)}.log"
            status, text = place.command([node, *flags, path], log, SECONDS, cwd=tests, env=env)
            skipped = re.search(r"^1\.\.0 # Skipped", text, re.MULTILINE)
            results[name] = SKIP if status == 0 and skipped else PASS if status == 0 else FAIL
        return results

    return run


def uses_processes(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return USES.search(f.read())


def prepare_processes():
    return units(lambda path: PROCESSES.match(os.path.basename(path)) and uses_processes(path))


def prepare():
    return units(lambda path: TESTS.match(os.path.basename(path)))


def units(wanted):
    need("nodejs", "openssl")
    tests = os.path.join(debian_source("nodejs"), "test")
    names = []
    for folder in ("parallel", "sequential"):
        names += [
            f"{folder}/{n}"
            for n in sorted(os.listdir(os.path.join(tests, folder)))
            if n.endswith((".js", ".mjs")) and not OUTSIDE.search(n) and wanted(os.path.join(tests, folder, n))
        ]
    node = shutil.which("node") or shutil.which("nodejs")
    parts = [names[i : i + AT_ONCE] for i in range(0, len(names), AT_ONCE)]
    return [(f"part {i}", unit(node, tests, part, i)) for i, part in enumerate(parts)]
