"""What the checks and demonstrations with real programs share: preloaded
environments, the reports that preloaded processes write at exit, and virtual
environments for PyPI clients. Standard library only."""

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COUNTS = (
    "tx_bytes_tcp",
    "tx_bytes_ring",
    "rx_bytes_tcp",
    "rx_bytes_ring",
    "upgrades",
    "returns",
    "connections",
    "upgraded",
)


def target_dir():
    """Where cargo builds."""
    path = os.environ.get("CARGO_TARGET_DIR") or "target"
    return os.path.join(ROOT, path)


def default_preload():
    """The library that `cargo build --release` makes."""
    return os.path.join(target_dir(), "release", "libringsock.so")


def free_port(host="127.0.0.1"):
    """A port that nobody uses there at this moment."""
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]


def clean_env(extra=None):
    """This environment without any preload or setting of ringsock but those for tests, `RINGSOCK_TEST_*`."""
    for_tests = {k: v for k, v in os.environ.items() if k.startswith("RINGSOCK_TEST_")}
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD" and not k.startswith("RINGSOCK_")} | for_tests
    env.update(extra or {})
    return env


class Reports:
    """A folder into which preloaded processes report, by process id."""

    def __init__(self, folder):
        self.folder = folder
        os.makedirs(folder, exist_ok=True)

    def env(self, preload, settings=None):
        """The environment of a process: preloaded and reporting, or plain if `preload` is None."""
        if preload is None:
            return clean_env()
        env = clean_env({"LD_PRELOAD": preload})
        env["RINGSOCK_REPORT"] = os.path.join(self.folder, "%p.json")
        env["RINGSOCK_LOG"] = "warn," + os.path.join(self.folder, "%p.log")
        env.update(settings or {})
        return env

    def of(self, pid):
        """The report of one process, or None."""
        try:
            with open(os.path.join(self.folder, f"{pid}.json"), encoding="utf-8") as f:
                return json.load(f)
        except FileNotFoundError:
            return None

    def totals(self, pids):
        """Summed totals of these processes, and which of them have not reported."""
        found = {pid: self.of(pid) for pid in pids}
        return summed(r for r in found.values() if r), [pid for pid, r in found.items() if r is None]

    def logs(self):
        """What the library complained of, in all processes."""
        return [line for path in sorted(glob.glob(os.path.join(self.folder, "*.log"))) for line in lines_of(path)]

    def log(self, pid):
        """What it complained of in one process."""
        path = os.path.join(self.folder, f"{pid}.log")
        return lines_of(path) if os.path.exists(path) else []


def lines_of(path):
    """The lines of a log."""
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read().splitlines()


def summed(reports):
    """The totals of these reports in one."""
    out = dict.fromkeys(COUNTS, 0)
    for r in reports:
        for k in COUNTS:
            out[k] += r["totals"][k]
    return out


def stat(preload, pid):
    """What the library says of the connections of a process that runs."""
    tool = os.path.join(os.path.dirname(preload), "ringsock")
    r = subprocess.run([tool, "stat", "--json", str(pid)], capture_output=True, text=True, timeout=60, env=clean_env())
    return r.stdout.strip() or f"ringsock stat: status {r.returncode}: {r.stderr.strip()}"


def ring_bytes(t):
    """Bytes of both directions on rings."""
    return t["tx_bytes_ring"] + t["rx_bytes_ring"]


def all_bytes(t):
    """Bytes of both directions."""
    return ring_bytes(t) + t["tx_bytes_tcp"] + t["rx_bytes_tcp"]


def share(t):
    """Share of the bytes that were on rings; 0 without any bytes."""
    total = all_bytes(t)
    return ring_bytes(t) / total if total else 0.0


def stop(proc, patience=20.0):
    """Ends a process of ours by SIGTERM, in the end by SIGKILL; returns its status."""
    if proc.poll() is None:
        proc.send_signal(signal.SIGTERM)
        try:
            proc.wait(patience)
        except subprocess.TimeoutExpired:
            proc.kill()
            proc.wait(10)
            return None
    return proc.returncode


@contextlib.contextmanager
def workplace(prefix, base=None):
    """A temporary folder that goes at the end; under the build's folder, not /tmp, unless `base` says where."""
    base = base or target_dir()
    os.makedirs(base, exist_ok=True)
    path = tempfile.mkdtemp(prefix=prefix, dir=base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def venv_python(modules, packages, name="ci-venv"):
    """The Python of a virtual environment below the build's folder that can import `modules`.

    What is missing is installed: `packages` are requirements as pip takes them."""
    venv = os.path.join(target_dir(), name)
    python = os.path.join(venv, "bin", "python3")
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True, timeout=120)
    wanted = "\n".join(f"import {m}" for m in modules)
    good = subprocess.run([python, "-c", wanted], capture_output=True, env=clean_env())
    if good.returncode != 0:
        # fmt: off
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
            check=True, timeout=600, env=clean_env(),
        )
        # fmt: on
    return python
