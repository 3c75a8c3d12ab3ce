"""A proxy that takes a short receive for a promise that there is no more, until an edge says otherwise: nutcracker
(twemproxy) before two memcached, under chaos. Every answer is checked."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time

from preload_lib import free_port, stop

PROGRAMS = ("nutcracker", "memcached")
# Some requests one by one, of sizes up to what fills a ring, then many at once.
CLIENTS, STEPS, AT_ONCE = 6, 80, 80
# For so long nothing comes: it never will.
PATIENCE = 8
CONFIG = """\
m:
  listen: 127.0.0.1:{front}
  hash: fnv1a_64
  distribution: ketama
  servers:
   - 127.0.0.1:{back[0]}:1
   - 127.0.0.1:{back[1]}:1
"""


def missing():
    """Which of the programs are not installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    return [p for p in PROGRAMS if not shutil.which(p, path=path)]


def await_port(port):
    """Waits until somebody listens."""
    until = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def value(k, i):
    """What client `k` stores in step `i`."""
    return b"%d:%d." % (k, i) * (i * 80)


def client(port, k):
    """Stores, asks one by one, and asks for many at once."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as s, s.makefile("rb") as answers:

        def expect(i):
            words = answers.readline().split()
            got = answers.read(int(words[3]) + 2)[:-2]
            if got != value(k, i) or answers.readline() != b"END\r\n":
                raise ValueError(f"client {k}: wrong answer to request {i}")

        for i in range(STEPS):
            v = value(k, i)
            s.sendall(b"set k%d-%d 0 0 %d\r\n" % (k, i, len(v)) + v + b"\r\n")
            if answers.readline() != b"STORED\r\n":
                raise ValueError(f"client {k}: value {i} was not stored")
        for i in range(STEPS):
            s.sendall(b"get k%d-%d\r\n" % (k, i))
            expect(i)
        s.sendall(b"".join(b"get k%d-%d\r\n" % (k, i) for i in range(AT_ONCE)))
        for i in range(AT_ONCE):
            expect(i)


def clients(port):
    """All of them at once; prints what went wrong, and returns whether anything did."""
    wrong = []

    def one(k):
        try:
            client(port, k)
        except (OSError, ValueError, IndexError) as e:
            wrong.append(f"{type(e).__name__}: {e}")

    threads = [threading.Thread(target=one, args=(k,)) for k in range(CLIENTS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    print("\n".join(wrong))
    return bool(wrong)


def run(env, folder):
    """Everything with `env`: what the clients said, and the statuses and ids of who is to end well."""
    env = {**env, "PATH": env.get("PATH", "") + ":/usr/sbin"}
    os.makedirs(folder, exist_ok=True)
    back, front = [free_port(), free_port()], free_port()
    config = os.path.join(folder, "nutcracker.yml")
    with open(config, "w", encoding="utf-8") as f:
        f.write(CONFIG.format(front=front, back=back))
    user = ["-u", "root"] if os.geteuid() == 0 else []
    commands = [["memcached", *user, "-l", "127.0.0.1", "-p", str(p)] for p in back]
    commands.append(["nutcracker", "-c", config, "-a", "127.0.0.1", "-s", str(free_port())])
    servers = []
    with open(os.path.join(folder, "servers.log"), "wb") as log:
        try:
            for command, port in zip(commands, [*back, front]):
                servers.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
                await_port(port)
            asks = subprocess.Popen([sys.executable, __file__, str(front)], env=env, stdout=subprocess.PIPE, text=True)
            text = asks.communicate(timeout=120)[0]
        finally:
            statuses = [stop(p) for p in reversed(servers)]
    # The proxy ends by the signal itself, without a report.
    return text.strip(), [asks.returncode, *statuses[1:]], [p.pid for p in [asks, *servers[:2]]]


if __name__ == "__main__":
    sys.exit(clients(int(sys.argv[1])))
