"""What the Redis demonstration and the Redis checks share: redis-server on free
ports. Standard library only."""

import contextlib
import os
import socket
import subprocess
import tempfile
import time

from preload_lib import clean_env, free_port, stat, stop

LOOPBACK = "127.0.0.1"


def ask(port, *words, host=LOOPBACK, timeout=10.0):
    """One command to a server over a plain connection of this (not preloaded) process.

    Returns the raw reply, which must be of one line or one bulk string."""
    with socket.create_connection((host, port), timeout=timeout) as s:
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


class Asked:
    """A redis-server at an address."""

    def __init__(self, host, port):
        self.host, self.port = host, port

    def ask(self, *words, timeout=10.0):
        """One command, as `ask`."""
        return ask(self.port, *words, host=self.host, timeout=timeout)

    def info(self, section):
        """INFO of a section as a dict."""
        text = self.ask("INFO", section)
        return dict(x.split(":", 1) for x in text.splitlines() if ":" in x)


class Server(Asked):
    """A redis-server of our own on a free port."""

    def __init__(self, reports, preload=None, settings=None, options=(), name="redis", host=LOOPBACK):
        super().__init__(host, None)
        self.dir = tempfile.mkdtemp(prefix=name + "-", dir=reports.folder)
        self.reports, self.preload = reports, preload
        self.log = os.path.join(self.dir, "redis.log")
        last = None
        for _ in range(5):  # another program may take the port in between
            self.port = free_port(host)
            # fmt: off
            cmd = [
                "redis-server", "--port", str(self.port), "--bind", host, "--save", "",
                "--appendonly", "no", "--daemonize", "no", "--dir", self.dir, "--logfile", self.log,
                "--enable-debug-command", "yes", "--protected-mode", "no", *options,
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
                if self.ask("PING", timeout=2) == "+PONG":
                    return
            if time.monotonic() > until:
                raise RuntimeError("no answer for 15 s")
            time.sleep(0.02)

    def address(self):
        """Where it listens."""
        return self.host, self.port

    def status(self):
        """Its exit status, or None while it runs."""
        return self.proc.poll()

    def rdb_fault(self):
        """What redis-check-rdb says against the file of the last BGSAVE, if anything."""
        # fmt: off
        r = subprocess.run(
            ["redis-check-rdb", os.path.join(self.dir, "dump.rdb")],
            capture_output=True, text=True, timeout=120, env=clean_env(),
        )
        # fmt: on
        return r.stdout[-200:] or f"status {r.returncode}" if r.returncode != 0 else None

    def report(self):
        """What the library reported at its end, or None."""
        return self.reports.of(self.pid)

    def stat(self):
        """What the library says of its connections now."""
        return stat(self.preload, self.pid)

    def complaints(self):
        """What the library complained of in it."""
        return self.reports.log(self.pid)

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
        return stop(self.proc)
