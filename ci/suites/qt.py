"""Qt's tests of TCP and TLS sockets, servers and HTTP, from Debian's source, against Debian's libraries. Those that want the servers
of Qt's own network are left out, or fail natively."""

import os
import re
import shutil
import subprocess

from .frame import FAIL, PASS, SKIP, cmake, debian_source, home, need

# Where below tests/auto a test is, and what else it is built from.
TESTS = {
    "tst_qtcpserver": ("network/socket/qtcpserver", []),
    "tst_qtcpsocket": ("network/socket/qtcpsocket", []),
    "tst_qsslserver": ("network/ssl/qsslserver", []),
    "tst_qsslsocket": ("network/ssl/qsslsocket", []),
    "tst_qnetworkreply": ("network/access/qnetworkreply", ["data/gzip.rcc.cpp", "data/zstandard.rcc.cpp"]),
}
# They wait for those servers until they are ended, or for their names.
LONG = re.compile(
    "delayedClose|downloadBigFile|flush|nonBlockingIMAP|recursiveReadyRead|waitForReadyReadInASlot|socketsInThreads"
    "|socketInAThread|readAllAfterClose|waitForConnectedInHostLookupSlot|forwardReadChannelFinished|simpleConnectWithIgnore"
    "|ioPostToHttpFromSocket(Synchronous)?|autoDeleteRepliesAttribute"
)
# The tests' only look at that network, and what Debian's library keeps to itself.
LOOK = "static bool verifyTestNetworkSettings()\n    {\n"
HIDDEN = """#include <QtNetwork/QHostInfo>
void qt_qhostinfo_clear_cache() {}
void qt_qhostinfo_cache_inject(const QString &, const QHostInfo &) {}
void qt_qhostinfo_enable_cache(bool) {}
"""
PROJECT = """cmake_minimum_required(VERSION 3.16)
project(tests LANGUAGES CXX)
set(CMAKE_AUTOMOC ON)
set(CMAKE_CXX_STANDARD 17)
find_package(Qt6 REQUIRED COMPONENTS Core Network Test)
include_directories({auto} {auto}/../shared {auto}/network/ssl/shared)
add_compile_definitions(QT_NETWORK_LIB SRCDIR="{auto}/network/")
link_libraries(Qt6::CorePrivate Qt6::NetworkPrivate Qt6::TestPrivate)
{tests}
"""
SECONDS = 40


def unit(program, function, source):
    name = f"{os.path.basename(program)}:{function}"

    def run_it(place):
        # They make files beside their own.
        own = os.path.join(place.folder, "files-" + name.replace(":", "-"))
        shutil.copytree(source, own)
        status, text = place.command([program, function], name.replace(":", "-") + ".log", SECONDS, cwd=own)
        shutil.rmtree(own, ignore_errors=True)
        results = {f"{name}:end": PASS if status == 0 else FAIL}
        kinds = {"PASS": PASS, "XFAIL": PASS, "SKIP": SKIP}
        for said, data in re.findall(rf"^(PASS|FAIL!|XFAIL|XPASS|SKIP) +: \w+::{function}\((.*?)\)", text, re.M):
            test = f"{name}:{data}"
            if results.get(test) != FAIL:
                results[test] = kinds.get(said, FAIL)
        return results

    return run_it


def prepare():
    need("g++", "cmake", "qt6-base-dev", "qt6-base-private-dev", "qt6-base-dev-tools")
    auto = os.path.join(debian_source("qt6-base"), "tests", "auto")
    settings = os.path.join(auto, "network-settings.h")
    with open(settings, encoding="utf-8") as f:
        text = f.read()
    if f"{LOOK}return true;" not in text:
        with open(settings, "w", encoding="utf-8") as f:
            f.write(text.replace(LOOK, f"{LOOK}return true;\n"))
    project = os.path.join(home(), "qt-project")
    os.makedirs(project, exist_ok=True)
    hidden = os.path.join(project, "hidden.cpp")
    with open(hidden, "w", encoding="utf-8") as f:
        f.write(HIDDEN)
    files = {name: [os.path.join(auto, at, x) for x in (name + ".cpp", *more)] for name, (at, more) in TESTS.items()}
    tests = "\n".join(f"qt_add_executable({name} {' '.join(x)} {hidden})" for name, x in files.items())
    with open(os.path.join(project, "CMakeLists.txt"), "w", encoding="utf-8") as f:
        f.write(PROJECT.format(auto=auto, tests=tests))
    build = cmake(project, "qt")
    units = []
    for name, (at, _) in TESTS.items():
        program, source = os.path.join(build, name), os.path.join(auto, at)
        listed = subprocess.run([program, "-functions"], capture_output=True, text=True, check=True, cwd=source).stdout
        functions = [f for f in re.findall(r"\w+", listed) if not LONG.fullmatch(f)]
        units += [(f"{name} {f}", unit(program, f, source)) for f in functions]
    return units
