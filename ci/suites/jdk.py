"""The JDK's own tests of its sockets, channels and HTTP, from Debian's source package, by Debian's jtreg."""

import glob
import os
import re

from .frame import FAIL, PASS, Unavailable, debian_source, need

PARTS = {
    "sockets": ["java/net/Socket", "java/net/ServerSocket", "java/net/SocketInputStream", "java/net/SocketOption"],
    "channels": ["java/nio/channels/SocketChannel", "java/nio/channels/ServerSocketChannel"],
    "selectors": ["java/nio/channels/Selector", "java/nio/channels/SelectionKey", "java/nio/channels/Channels"],
    "asynchronous": ["java/nio/channels/AsynchronousSocketChannel", "java/nio/channels/AsynchronousServerSocketChannel"],
    "http": ["com/sun/net/httpserver", "sun/net/www/http"],
}
# For `--pairs`. The JDK's own helper for `posix_spawn` wants pipes that are pipes.
VFORK = "-Djdk.lang.Process.launchMechanism=VFORK"
PROCESSES = {
    "builder": ["java/lang/ProcessBuilder"],
    "processes": ["java/lang/ProcessHandle", "java/lang/Process", "java/lang/RuntimeTests"],
    "pipes": ["java/nio/channels/Pipe", "sun/nio/ch"],
}
SECONDS = 600


def unit(java, tests, name, folders, options=()):
    def run(place):
        work = os.path.join(place.folder, name)
        # What the tests' own virtual machines get, in the names' order.
        names = [k for k in place.env if k == "LD_PRELOAD" or k.startswith(("RINGSOCK_", "WARM_"))]
        command = ["jtreg", f"-jdk:{java}", "-agentvm", "-a", "-ignore:quiet", "-conc:2", "-timeoutFactor:4", "-retain:none", "-nr"]
        command += ["-v:summary", f"-w:{work}/work", f"-r:{work}/report", *(f"-e:{k}" for k in names)]
        command += options
        status, text = place.command([*command, *folders], f"{name}.log", SECONDS, cwd=tests, env={"JT_JAVA": java})
        results = {}
        for said, test in re.findall(r"^(Passed|FAILED|Error)[:.] +(\S+)$", text, re.M):
            results[test] = PASS if said == "Passed" else FAIL
        if status is None or not results:
            results[f"{name}:all"] = FAIL
        return results

    return run


def prepare():
    return units(PARTS)


def prepare_processes():
    return units(PROCESSES, [f"-J{VFORK}", f"-vmoption:{VFORK}"])


def units(parts, options=()):
    need("jtreg7", "openjdk-17-jdk-headless")
    found = glob.glob("/usr/lib/jvm/java-17-openjdk-*")
    if not found:
        raise Unavailable("no JDK 17")
    tests = os.path.join(debian_source("openjdk-17"), "test", "jdk")
    return [(name, unit(found[0], tests, name, folders, options)) for name, folders in parts.items()]
