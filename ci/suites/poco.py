"""The tests of POCO's network library, from Debian's source against Debian's build: sockets, poll sets, reactors, and servers and
clients of several protocols in threads of one process."""

import os
import re

from .frame import FAIL, PASS, debian_source, home, need, run

SUITES = [
    "SocketTest", "SocketStreamTest", "DialogSocketTest", "PollSetTest", "TCPServerTest", "SocketReactorTest", "HTTPServerTest",
    "HTTPClientSessionTest", "HTTPStreamFactoryTest", "WebSocketTest", "FTPClientSessionTest", "FTPStreamFactoryTest",
    "SMTPClientSessionTest", "POP3ClientSessionTest", "SyslogTest",
]  # fmt: skip
SECONDS = 120

MAKEFILE = """
SRC = $(filter-out %/WinDriver.cpp,$(wildcard $(SOURCE)/Net/testsuite/src/*.cpp))
SRC += $(filter-out %/WinTestRunner.cpp,$(wildcard $(SOURCE)/CppUnit/src/*.cpp))
OBJ = $(notdir $(SRC:.cpp=.o))
VPATH = $(SOURCE)/Net/testsuite/src:$(SOURCE)/CppUnit/src
CXXFLAGS = -std=c++14 -w -DPOCO_NO_AUTOMATIC_LIBS -I$(SOURCE)/CppUnit/include
runner: $(OBJ)
\tg++ -o $@ $(OBJ) -lPocoNet -lPocoFoundation -lpthread
"""


def unit(runner, suite):
    def run_it(place):
        status, text = place.command([runner, suite], f"{suite}.log", SECONDS)
        results = {f"{suite}:{t}": PASS for t in re.findall(r"^(test\w+): ", text, re.M)}
        results.update({f"{suite}:{t}": FAIL for t in re.findall(r"^ *\d+: .*\.(test\w+)$", text, re.M)})
        results[f"{suite}:all"] = PASS if status == 0 else FAIL
        return results

    return run_it


def prepare():
    need("g++", "make", "libpoco-dev")
    source = debian_source("poco")
    build = os.path.join(home(), "poco-build")
    os.makedirs(build, exist_ok=True)
    with open(os.path.join(build, "Makefile"), "w", encoding="utf-8") as f:
        f.write(MAKEFILE)
    run(["make", "-j2", f"SOURCE={source}"], log=build + ".log", cwd=build, timeout=1200)
    return [(suite, unit(os.path.join(build, "runner"), suite)) for suite in SUITES]
