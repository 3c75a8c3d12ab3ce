"""libwebsockets' own tests, from Debian's source: its example clients and servers, many connections of one event loop on poll,
as HTTP/1.1, HTTP/2 and WebSockets, pipelined and not, over TLS."""

import os
import re
import shutil

from .frame import FAIL, PASS, cmake, debian_source, need

SECONDS = 500
OPTIONS = ["-DLWS_WITH_MINIMAL_EXAMPLES=1", "-DLWS_WITH_HTTP2=1", "-DDISABLE_WERROR=ON"]
# With a server of their own, and what starts and ends these.
TESTS = r"st_hc|ki_hc|st_wcs|ki_wcs|http-client-(multi|post|hugeurl)|ws-client-spam"
# It ends whatever of its name is there, also of another variant.
KILL = "scripts/ctest-background-kill.sh"
KILL_BY_ID = """#!/bin/sh
kill `cat /tmp/sai-ctest-$(basename $2).$1.$SAI_INSTANCE_IDX`
:
"""


def unit(build):
    def run(place):
        # Where it is started ctest writes what it has done.
        folder = os.path.join(place.folder, "work")
        shutil.copytree(build, folder, ignore=lambda d, names: [n for n in names if not os.path.isdir(os.path.join(d, n)) and n != "CTestTestfile.cmake"])
        _, text = place.command(["ctest", "-R", TESTS, "--timeout", "60"], "all.log", SECONDS, cwd=folder)
        results = {}
        for test, result in re.findall(r"Test +#\d+: (\S+) \.*(?: +|\*\*\*)(.*?) +[\d.]+ sec", text):
            results[test] = PASS if result == "Passed" else FAIL
        return results or {"all": FAIL}

    return run


def prepare():
    need("gcc", "cmake", "make", "libssl-dev", "zlib1g-dev")
    source = debian_source("libwebsockets")
    with open(os.path.join(source, KILL), "w", encoding="utf-8") as f:
        f.write(KILL_BY_ID)
    return [("all", unit(cmake(source, "libwebsockets", *OPTIONS)))]
