#!/usr/bin/env python3
"""Writes random values to a Redis over plain sockets, reads them back and compares.

  rdma_values.py HOST PORT COUNT         by one connection
  rdma_values.py HOST PORT COUNT FILE    by four, again and again until there is FILE, but no longer than 20 minutes"""

import os
import random
import socket
import struct
import subprocess
import sys
import time

LONGEST_S = 1200
# Longer than any link is looked for in vain, and not for ever.
ANSWER_S = 60
PAUSE_S = 0.01


def command(*words):
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


class Client:
    """One connection, which writes keys of its own."""

    def __init__(self, name, address):
        self.name = name
        self.done = 0
        self.rng = random.Random(name)
        self.socket = socket.create_connection(address, 30)
        self.socket.settimeout(ANSWER_S)
        self.file = self.socket.makefile("rb")

    def step(self):
        try:
            self.exchange()
        except TimeoutError:
            self.explain()
            sys.exit(f"value {self.done} of connection {self.name}: no answer within {ANSWER_S} s")

    def explain(self):
        """Whether it is TCP that is stuck, what the library says, and whether anything comes later."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        names = ("rto_us", "ato_us", "snd_mss", "rcv_mss", "unacked", "sacked", "lost", "retrans", "fackets")
        names += ("ms_since_sent", "ms_since_ack_sent", "ms_since_received", "ms_since_ack")
        print("TCP:", dict(zip(names, struct.unpack_from("13I", info, 8))), "retransmits", info[2], file=sys.stderr)
        stat = os.path.join(os.environ.get("RELEASE", "target/release"), "ringsock")
        env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        subprocess.run([stat, "stat", "--json", str(os.getpid())], env=env, stdout=sys.stderr, timeout=30, check=False)
        # The other machine is to say what its library knows.
        if run := os.environ.get("RUN"):
            open(os.path.join(run, "stuck"), "w", encoding="utf-8").close()
        self.socket.settimeout(20)
        try:
            print("came later:", len(self.socket.recv(1 << 16)), file=sys.stderr, flush=True)
        except TimeoutError:
            print("nothing came later", file=sys.stderr, flush=True)

    def exchange(self):
        """One value there and back."""
        # The first ones are small: the connection is on TCP yet.
        value = self.rng.randbytes(8 if self.done < 600 else self.rng.randrange(1, 20000))
        key = b"value:%d:%d" % (self.name, self.done % 1000)
        self.socket.sendall(command(b"SET", key, value) + command(b"GET", key))
        f = self.file
        if f.readline() != b"+OK\r\n" or f.readline() != b"$%d\r\n" % len(value):
            sys.exit(f"value {self.done} of connection {self.name}: another answer")
        if f.read(len(value) + 2) != value + b"\r\n":
            sys.exit(f"value {self.done} of connection {self.name} differs")
        self.done += 1


def main():
    address, count = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
    until = sys.argv[4] if len(sys.argv) > 4 else None
    clients = [Client(i, address) for i in range(4 if until else 1)]
    end = time.monotonic() + LONGEST_S
    while clients[0].done < count or until and not os.path.exists(until):
        if time.monotonic() > end:
            sys.exit(f"no {until} within {LONGEST_S} s")
        for c in clients:
            c.step()
        if until:
            time.sleep(PAUSE_S)
    print("OK", sum(c.done for c in clients))


if __name__ == "__main__":
    main()
