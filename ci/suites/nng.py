"""The tests of nng, nanomsg's successor, from Debian's source: messages over TCP and WebSockets, asynchronous in threads of its own."""

import glob
import os
import re

from .frame import FAIL, PASS, cmake, debian_source, need

# They are of other transports, of none, or look for names of other hosts.
NOT = re.compile(r"(udp|inproc|ipc\w*|ipc_test|cplusplus_pair|base64_test|sha1_test|url_test|list_test|id_test|errors_test|message_test|resolver_test|zt)")
AT_ONCE = 12
SECONDS = 120


def unit(build, programs, number):
    def run_it(place):
        results = {}
        for path in programs:
            program = os.path.basename(path)
            # Of the older tests some take a port, and some say more when asked.
            args = ["13000"] if program.startswith("compat_") else [] if program.endswith("_test") else ["-v", "-p", "TEST_PORT=13000"]
            status, text = place.command([path, *args], f"{program}.log", SECONDS, cwd=build)
            for test, result in re.findall(r"^Test (.*?)\.\.\. +\[ *(\w+) *\]", text, re.M):
                results[f"{program}:{test}"] = PASS if result == "OK" else FAIL
            for result, test in re.findall(r"^--- (\w+)[^:\n]*: (.*?) \(", text, re.M):
                results[f"{program}:{test}"] = PASS if result == "PASS" else FAIL
            results[f"{program}:all"] = PASS if status == 0 else FAIL
        return results

    return run_it


def prepare():
    need("gcc", "g++")
    source = debian_source("nng")
    # Debian leaves out what needs a network, and be it the loopback.
    for path in glob.glob(os.path.join(source, "**", "CMakeLists.txt"), recursive=True):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        with open(path, "w", encoding="utf-8") as f:
            f.write(re.sub(r"^#(nng_test|add_nng_test)", r"\1", text, flags=re.M))
    build = cmake(source, "nng", "-DNNG_TESTS=ON", "-DNNG_TOOLS=OFF")
    found = sorted(glob.glob(os.path.join(build, "tests", "*")) + glob.glob(os.path.join(build, "src", "**", "*_test"), recursive=True))
    found = [p for p in found if os.path.isfile(p) and os.access(p, os.X_OK) and not NOT.fullmatch(os.path.basename(p))]
    parts = [found[i : i + AT_ONCE] for i in range(0, len(found), AT_ONCE)]
    return [(f"part {i}", unit(build, part, i)) for i, part in enumerate(parts)]
