"""Perl's event loops, servers and clients, from Debian's sources, with Debian's interpreter: every test file is one test."""

import glob
import os
import re

from .frame import FAIL, PASS, SKIP, Unavailable, debian_source, need

# Source packages, and what they need to run.
SOURCES = {
    "libmojolicious-perl": ["libmojolicious-perl", "libev-perl", "libio-socket-ssl-perl"],
    "libio-async-perl": ["libio-async-perl", "libtest-fatal-perl", "libtest-refcount-perl", "libtest-metrics-any-perl"],
    "libanyevent-perl": ["libanyevent-perl", "libev-perl", "libnet-ssleay-perl"],
    "libpoe-perl": ["libpoe-perl", "libpoe-test-loops-perl"],
    "libio-socket-ssl-perl": ["libio-socket-ssl-perl"],
    "libnet-server-perl": ["libnet-server-perl"],
    "libhttp-daemon-perl": ["libhttp-daemon-perl", "libwww-perl", "libtest-needs-perl"],
    "libwww-perl": ["libwww-perl", "libhttp-daemon-perl", "libtest-requiresinternet-perl", "libtest-fatal-perl", "libtest-needs-perl"],
    "libnet-http-perl": ["libnet-http-perl"],
    "starman": ["starman", "libtest-requires-perl", "libtest-tcp-perl"],
    "twiggy": ["twiggy", "libtest-requires-perl", "libtest-tcp-perl"],
    "libtest-tcp-perl": ["libtest-tcp-perl"],
}
AT_ONCE = 25
SECONDS = 60


def unit(source, tests, number):
    def run_it(place):
        results = {}
        for test in tests:
            name = f"{os.path.basename(source)}:{test}"
            log = f"{os.path.basename(source)}-{test.replace('/', '-')}.log"
            env = {"TEST_ONLINE": "0", "MOJO_MODE": "", "NO_NETWORK_TESTING": "1", "NONINTERACTIVE_TESTING": "1"}
            status, text = place.command(["perl", "-Ilib", "-It/lib", "-I.", test], log, SECONDS, cwd=source, env=env)
            skipped = re.search(r"^1\.\.0", text, re.M)
            results[name] = PASS if status == 0 else FAIL
            if skipped:
                results[name] = SKIP
        return results

    return run_it


def prepare():
    units, why = [], None
    for package, needs in SOURCES.items():
        need("perl", *needs)
        try:
            source = debian_source(package)
        except Unavailable as e:
            # Mirrors have not all sources.
            print(f"SKIP perl: {package}: {e}", flush=True)
            why = e
            continue
        found = sorted(glob.glob(os.path.join(source, "t", "**", "*.t"), recursive=True))
        tests = [os.path.relpath(f, source) for f in found]
        for i in range(0, len(tests), AT_ONCE):
            units.append((f"{package} {i}", unit(source, tests[i : i + AT_ONCE], i)))
    if not units:
        raise why
    return units
