#!/usr/bin/env python3
"""A server that lives for minutes, and clients that come, burst, trickle, rest and go.

What only time brings out: links that are left when they rest and taken up
again, memory that goes back, peers that were killed long ago, connections that
stop and go on, `ringsock off` and `on`. An unmodified redis-server and Python
clients, all preloaded; every value is read back and compared.

Prints one PASS or FAIL line for each check, then `N passed, N failed`."""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import time

from preload_lib import Reports, clean_env, default_preload, ring_bytes, share, target_dir, workplace
from redis_lib import Server, ask

HERE = os.path.dirname(os.path.abspath(__file__))
CLIENTS = 6
# A connection begins on TCP, and is there again after each rest and each order.
WANTED_SHARE = 0.6
# Beyond what a server of this kind has at rest with as many clients.
MOST_MORE_FDS = 60
MOST_RING_MB = 256


class Client:
    """The client's process: a connection at a time, values that it can tell again."""

    def __init__(self, port, seed, seconds):
        self.port, self.rng = port, random.Random(seed)
        self.prefix = b"%d:" % seed
        self.until = time.monotonic() + seconds
        self.held = {}
        self.sock, self.buf = None, b""

    def connect(self):
        """A new connection instead of the old one."""
        if self.sock:
            self.sock.close()
        self.sock, self.buf = socket.create_connection(("127.0.0.1", self.port), timeout=60), b""

    def line(self):
        """One line of an answer."""
        while b"\r\n" not in self.buf:
            self.more()
        text, self.buf = self.buf.split(b"\r\n", 1)
        return text

    def more(self):
        """Some bytes more."""
        part = self.sock.recv(self.rng.choice((1000, 65536, 1 << 20)))
        if not part:
            raise RuntimeError("the stream has ended")
        self.buf += part

    def take(self, n):
        """Exactly so many bytes, and the end of the line behind them."""
        while len(self.buf) < n + 2:
            self.more()
        data, self.buf = self.buf[:n], self.buf[n + 2 :]
        return data

    def send(self, *commands):
        """Commands, in one piece or in several."""
        raw = b"".join(
            b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words) for words in commands
        )
        self.sock.sendall(raw)

    def values(self, count, largest):
        """Writes so many values, as a pipeline, and reads some back."""
        rng = self.rng
        commands = []
        for _ in range(count):
            key = rng.randrange(200)
            size = int(largest ** rng.random())
            self.held[key] = (rng.getrandbits(32), size)
            commands.append((b"SET", self.prefix + b"%d" % key, self.value(key)))
        self.send(*commands)
        for _ in commands:
            if self.line() != b"+OK":
                raise RuntimeError("a SET was refused")
        for key in rng.sample(sorted(self.held), min(len(self.held), count)):
            self.compare(key)

    def value(self, key):
        """What a key has."""
        seed, size = self.held[key]
        return random.Random(seed).randbytes(size)

    def compare(self, key):
        """Reads a key back."""
        self.send((b"GET", self.prefix + b"%d" % key))
        size = int(self.line()[1:])
        if size < 0 or self.take(size) != self.value(key):
            raise RuntimeError(f"key {key} has another value")

    def run(self):
        """Until its time is over, then compares everything."""
        self.connect()
        while time.monotonic() < self.until:
            what = self.rng.randrange(10)
            if what < 3:
                self.values(self.rng.randrange(1, 40), 1 << 20)
            elif what < 6:
                for _ in range(self.rng.randrange(200)):
                    self.values(1, 300)
            elif what < 9:
                time.sleep(self.rng.random() * 4)
            else:
                self.connect()
        self.connect()
        for key in sorted(self.held):
            self.compare(key)
        print(len(self.held))


def start(port, seed, seconds, env):
    """A client in a process of its own."""
    words = [sys.executable, os.path.join(HERE, "soak_check.py"), "--client", f"{port},{seed},{seconds}"]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Soak:
    """What goes on around the server."""

    def __init__(self, server, reports, lib, seconds, rng):
        self.server, self.rng = server, rng
        self.env = reports.env(lib, {"RINGSOCK_IDLE": "1"})
        self.end = time.monotonic() + seconds
        self.clients, self.ended, self.killed, self.bad = [], [], 0, []
        self.seed = 0

    def come(self):
        """One client more."""
        self.seed += 1
        left = max(1, self.end - time.monotonic())
        self.clients.append(start(self.server.port, self.seed, round(min(left, 5 + self.rng.random() * 25)), self.env))

    def go(self, client):
        """One that has ended."""
        out, err = client.communicate(timeout=30)
        self.ended.append(client.pid)
        if client.returncode != 0:
            self.bad.append(f"a client ended with {client.returncode}: {err.strip().splitlines()[-1:]} {out}")

    def disturb(self):
        """Now and then something happens to somebody."""
        what, client = self.rng.randrange(12), self.rng.choice(self.clients)
        if what == 0:
            client.kill()
            client.communicate(timeout=30)
            self.clients.remove(client)
            self.killed += 1
        elif what == 1:
            client.send_signal(signal.SIGSTOP)
            time.sleep(1.5)
            client.send_signal(signal.SIGCONT)
        elif what == 2:
            for order in ("off", "on"):
                words = [os.path.join(target_dir(), "release", "ringsock"), order, str(self.server.pid)]
                if subprocess.run(words, env=clean_env(), capture_output=True, timeout=30).returncode != 0:
                    self.bad.append(f"`ringsock {order}` has failed")
                time.sleep(0.5)

    def run(self):
        """To the end of the time, and of all clients."""
        while time.monotonic() < self.end:
            for client in [c for c in self.clients if c.poll() is not None]:
                self.clients.remove(client)
                self.go(client)
            while len(self.clients) < CLIENTS:
                self.come()
            self.disturb()
            time.sleep(0.3)
        for client in self.clients:
            try:
                self.go(client)
            except subprocess.TimeoutExpired:
                client.kill()
                client.communicate()
                self.bad.append("a client hangs")


def fds(pid):
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def ring_mb(pid):
    """MiB of ring memory that a process has mapped and that exists."""
    total, ours = 0, False
    with open(f"/proc/{pid}/smaps", encoding="utf-8") as f:
        for line in f:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                ours = "ringsock" in line
            elif ours and words[0] == "Rss:":
                total += int(words[1])
    return total / 1024


def main():
    """Runs the soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="another course of things (default: %(default)s)")
    parser.add_argument("--preload", default=default_preload(), help="the library (default: %(default)s)")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        Client(*map(int, args.client.split(","))).run()
        return 0
    passed = failed = 0

    def check(good, name, detail):
        nonlocal passed, failed
        passed, failed = passed + bool(good), failed + (not good)
        print(f"{'PASS' if good else 'FAIL'} {name}: {detail}", flush=True)

    with workplace("soak-") as folder:
        reports = Reports(os.path.join(folder, "reports"))
        server = Server(reports, args.preload, {"RINGSOCK_IDLE": "1"})
        try:
            begun = fds(server.pid)
            soak = Soak(server, reports, args.preload, args.seconds, random.Random(args.seed))
            soak.run()
            count = len(soak.ended)
            check(not soak.bad and count > CLIENTS, "values", f"{count} clients, {soak.killed} killed; {soak.bad[:3]}")
            check(ask(server.port, "PING") == "+PONG", "the server", "answers")
            # What rests is given back, and what belonged to the dead.
            time.sleep(5)
            more, held = fds(server.pid) - begun, ring_mb(server.pid)
            check(more <= MOST_MORE_FDS, "files", f"{more} more than at the beginning")
            check(held <= MOST_RING_MB, "memory", f"{held:.0f} MiB of rings at rest")
            pid = server.pid
            check(server.stop() == 0, "the end", "the server ends well")
            totals, silent = reports.totals([pid, *soak.ended])
            moved = f"{ring_bytes(totals) >> 20} MiB on rings, {share(totals):.1%}; {totals['returns']} returns"
            check(share(totals) >= WANTED_SHARE and totals["returns"] > 0 and not silent, "rings", moved)
            complaints = [c for c in reports.logs() if "error" in c or "panic" in c]
            check(not complaints, "log", f"{complaints[:3]}")
        finally:
            if server.proc.poll() is None:
                server.proc.kill()
                server.proc.wait(10)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
