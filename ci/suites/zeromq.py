"""ZeroMQ's own tests, from Debian's source: sockets of both ends in one process, served by its I/O threads."""

import glob
import os
import re

from .frame import FAIL, PASS, SKIP, cmake, debian_source, need

# Transports that are no TCP, and what has no sockets at all.
NOT = re.compile(r"_(inproc|ipc|tipc|vmci|cap_net_admin)$|test_(atomics|base85|z85_decode_fuzzer|timers|dgram|radio_dish|msg_init|abstract_ipc)$")
AT_ONCE = 12
SECONDS = 120


def unit(build, programs, number):
    def run_it(place):
        results = {}
        for program in programs:
            exe = os.path.join(build, "bin", program)
            status, text = place.command([exe], f"{program}.log", SECONDS)
            for test, result in re.findall(r"^[^:\n]*:\d+:(\w+):(PASS|FAIL|IGNORE)", text, re.M):
                results[f"{program}:{test}"] = {"PASS": PASS, "FAIL": FAIL}.get(result, SKIP)
            results[f"{program}:all"] = SKIP if status == 77 else PASS if status == 0 else FAIL
        return results

    return run_it


def prepare():
    need("g++", "pkg-config", "libsodium-dev", "libgnutls28-dev", "libbsd-dev")
    source = debian_source("zeromq3")
    # A dozen of socket types and the WebSocket transport count as drafts.
    build = cmake(source, "zeromq", "-DENABLE_DRAFTS=ON", "-DENABLE_WS=ON", "-DBUILD_TESTS=ON", "-DBUILD_STATIC=OFF", "-DENABLE_PRECOMPILED=OFF", "-DWITH_DOCS=OFF")
    programs = sorted(os.path.basename(p) for p in glob.glob(os.path.join(build, "bin", "test_*")))
    programs = [p for p in programs if not NOT.search(p)]
    parts = [programs[i : i + AT_ONCE] for i in range(0, len(programs), AT_ONCE)]
    return [(f"part {i}", unit(build, part, i)) for i, part in enumerate(parts)]
