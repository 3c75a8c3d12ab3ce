"""What the Redis demonstration and the Redis check share: servers on free
loopback ports, preloaded environments, and the reports that preloaded
processes write at exit. Standard library only."""

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
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


def free_port():
    """A loopback port that nobody uses at this moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def clean_env(extra=None):
    """This environment without any preload or setting of ringsock."""
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD" and not k.startswith("RINGSOCK_")}
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
        out = dict.fromkeys(COUNTS, 0)
        silent = []
        for pid in pids:
            r = self.of(pid)
            if r is None:
                silent.append(pid)
                continue
            for k in COUNTS:
                out[k] += r["totals"][k]
        return out, silent

    def logs(self):
        """What the library complained of, in all processes."""
        lines = []
        for path in sorted(glob.glob(os.path.join(self.folder, "*.log"))):
            with open(path, encoding="utf-8", errors="replace") as f:
                lines += f.read().splitlines()
        return lines


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


def ask(port, *words, timeout=10.0):
    """One command to a server over a plain connection of this (not preloaded) process.

    Returns the raw reply, which must be of one line or one bulk string."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as s:
        parts = [w if isinstance(w, bytes) else str(w).encode() for w in words]
        s.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
        data = b""
        while not complete(data):
            chunk = s.recv(65536)
            if not chunk:
                raise ConnectionError("end of the stream in a reply")
            data += chunk
    if data.startswith(b"$"):
        return data.split(b"\r\n", 1)[1][:-2].decode()
    return data[:-2].decode()


def complete(data):
    """Whether a reply of one line or one bulk string is all there."""
    end = data.find(b"\r\n")
    if end < 0:
        return False
    if data[:1] != b"$":
        return True
    n = int(data[1:end])
    return n < 0 or len(data) >= end + 2 + n + 2


class Server:
    """A redis-server of our own on a free loopback port."""

    def __init__(self, reports, preload=None, settings=None, options=(), name="redis"):
        self.dir = tempfile.mkdtemp(prefix=name + "-", dir=reports.folder)
        self.reports = reports
        self.log = os.path.join(self.dir, "redis.log")
        last = None
        for _ in range(5):  # another program may take the port in between
            self.port = free_port()
            # fmt: off
            cmd = [
                "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                "--appendonly", "no", "--daemonize", "no", "--dir", self.dir, "--logfile", self.log,
                "--enable-debug-command", "local", *options,
            ]
            # fmt: on
            self.proc = subprocess.Popen(
                cmd,
                env=reports.env(preload, settings),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=open(os.path.join(self.dir, "stderr"), "wb"),
            )
            try:
                self.wait_ready()
                return
            except (OSError, RuntimeError) as e:
                last = e
                stop(self.proc, 2)
        raise RuntimeError(f"redis-server does not start: {last}; {self.tail()}")

    def wait_ready(self):
        """Until it answers."""
        until = time.monotonic() + 15
        while True:
            if self.proc.poll() is not None:
                raise RuntimeError(f"ended with {self.proc.returncode}")
            with contextlib.suppress(OSError):
                if ask(self.port, "PING", timeout=2) == "+PONG":
                    return
            if time.monotonic() > until:
                raise RuntimeError("no answer for 15 s")
            time.sleep(0.02)

    def info(self, section):
        """INFO of a section as a dict."""
        text = ask(self.port, "INFO", section)
        return dict(x.split(":", 1) for x in text.splitlines() if ":" in x)

    def tail(self):
        """The end of the server's own log."""
        with contextlib.suppress(OSError):
            with open(self.log, encoding="utf-8", errors="replace") as f:
                return " | ".join(f.read().splitlines()[-5:])
        return ""

    @property
    def pid(self):
        """Its process id."""
        return self.proc.pid

    def stop(self):
        """Ends it in the ordinary way, so that it reports; its status (0 is good)."""
        status = stop(self.proc)
        return status


@contextlib.contextmanager
def workplace(prefix):
    """A temporary folder that goes at the end; under the build's folder, not /tmp."""
    base = target_dir()
    os.makedirs(base, exist_ok=True)
    path = tempfile.mkdtemp(prefix=prefix, dir=base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
