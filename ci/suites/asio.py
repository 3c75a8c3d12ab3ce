"""The tests of Boost.Asio and Boost.Beast (HTTP and WebSocket on it) that use TCP, from Debian's source: an edge-triggered reactor in
C++, by callbacks, futures and coroutines, and C++ streams on sockets."""

import os
import re

from .frame import FAIL, PASS, debian_source, need, run

ASIO = ["buffered_read_stream", "buffered_stream", "buffered_write_stream", "connect", "ip/tcp"]
# (core/basic_stream looks for a host on other networks; websocket/close fails by itself.)
BEAST = ["websocket/accept", "websocket/handshake", "websocket/ping", "websocket/read1", "websocket/timer"]
SECONDS = 200
FLAGS = ["-std=c++17", "-O1", "-w", "-pthread"]
LIBRARIES = ["-lboost_coroutine", "-lboost_context", "-lboost_thread"]


def unit(program):
    name = os.path.basename(program)

    def run_it(place):
        status, text = place.command([program], f"{name}.log", SECONDS)
        done = re.findall(r"^(\S+)::test (passed|failed)", text, re.M)
        results = {f"{name}:{test}": PASS if said == "passed" else FAIL for test, said in done}
        results[f"{name}:all"] = PASS if status == 0 else FAIL
        return results

    return run_it


def prepare():
    need("g++", *(f"lib{x}1.74-dev" for x in ("boost", "boost-coroutine", "boost-context", "boost-thread")))
    source = debian_source("boost1.74")
    build = os.path.join(source, "ci-build")
    os.makedirs(build, exist_ok=True)
    asio, beast = (os.path.join(source, "libs", x, "test") for x in ("asio", "beast"))
    log = os.path.join(build, "build.log")

    def compiled(out, *arguments):
        path = os.path.join(build, out)
        if not os.path.exists(path):
            run(["g++", *FLAGS, "-o", path + ".new", *arguments], log=log)
            os.rename(path + ".new", path)
        return path

    def parts():
        separate = [f"-DBOOST_{x}_SEPARATE_COMPILATION" for x in ("ASIO", "BEAST")]
        defines = [*separate, f"-I{beast}", f"-I{os.path.join(beast, 'extras', 'include')}"]
        for test in ASIO:
            yield compiled(f"asio-{os.path.basename(test)}", f"-I{asio}", os.path.join(asio, test + ".cpp"))
        libraries = [compiled(f"{lib}.o", "-c", *defines, os.path.join(beast, f"{lib}.cpp")) for lib in ("lib_asio", "lib_beast", "lib_test")]
        for test in BEAST:
            yield compiled(f"beast-{os.path.basename(test)}", *defines, os.path.join(beast, "beast", test + ".cpp"), *libraries, *LIBRARIES)

    return [(os.path.basename(program), unit(program)) for program in parts()]
