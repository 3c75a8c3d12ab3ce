#!/usr/bin/env python3
"""Streams that programs hold back and wait for in every way there is: corks, `MSG_MORE`, files, gathered and
non-blocking sends; receives with low-water marks, looks, waits for all, polls. Both directions of each connection
have one of either, at random (but the same for the same seed), and every byte is compared.

    odd_streams.py SEED serve            prints its port; ends with its standard input
    odd_streams.py SEED ask PORT COUNT   so many connections, four at a time

Prints what went wrong, and ends with 1 then."""

import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import threading

PERIOD = 1 << 16
BYTES = random.Random(5).randbytes(PERIOD)
MORE = 0x8000
AT_ONCE = 4
# A stall of this many seconds is one for good.
LIMIT = 30
TOTALS = (10, 3000, 100_000, 2_000_000, 9_000_000)
LENGTHS = (1, 3, 50, 900, 1448, 5000, 16384, 40000, 65483, 70000, 200_000)
ROOMS = (1, 10, 1000, 16384, 65536, 300_000)


def stream(key, at, n):
    """`n` bytes of stream `key`, from `at` on."""
    at = (at + key * 977) % PERIOD
    return (BYTES * ((at + n) // PERIOD + 1))[at : at + n]


class Sender(threading.Thread):
    """Sends stream `key`, and ends the direction."""

    def __init__(self, s, key, total, dice, file):
        super().__init__()
        self.s, self.key, self.total, self.dice, self.file = s, key, total, dice, file
        self.corked = False
        self.start()

    def run(self):
        at = 0
        while at < self.total:
            self.turn()
            at += self.put(at, min(self.total - at, self.dice.choice(LENGTHS)))
        if self.corked and self.dice.random() < 0.5:
            self.cork()
        self.s.shutdown(socket.SHUT_WR)

    def cork(self):
        self.corked = not self.corked
        self.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, self.corked)

    def turn(self):
        """Something else, now and then."""
        what = self.dice.random()
        if what < 0.12:
            self.cork()
        elif what > 0.985:
            # More than the 200 ms after which the kernel sends what is held back.
            threading.Event().wait(self.dice.choice((0.001, 0.25)))
        elif what > 0.95:
            self.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, self.dice.random() < 0.7)

    def put(self, at, n):
        way, more = self.dice.random(), MORE if self.dice.random() < 0.5 else 0
        data = stream(self.key, at, n)
        if way < 0.4:
            self.s.sendall(data, more)
        elif way < 0.6:
            sent = 0
            while sent < n:
                begin = (at + sent + self.key * 977) % PERIOD
                sent += os.sendfile(self.s.fileno(), self.file.fileno(), begin, n - sent)
        elif way < 0.8:
            step = 1 + n // 3
            return self.s.sendmsg([data[i : i + step] for i in range(0, n, step)], [], more)
        else:
            try:
                return self.s.send(data, socket.MSG_DONTWAIT | more)
            except BlockingIOError:
                if not select.select([], [self.s], [], LIMIT)[1]:
                    raise TimeoutError(f"stream {self.key}: no room at {at}") from None
                return 0
        return n


def receive(s, key, total, dice):
    """Receives stream `key` to its end."""
    at, mark = 0, 1
    while True:
        if dice.random() < 0.05:
            mark = dice.choice((1, 1, 2, 100, 4000, 30000))
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
        if dice.random() < 0.03:
            threading.Event().wait(dice.choice((0.0005, 0.003, 0.02)))
        if dice.random() < 0.2:
            p = select.poll()
            p.register(s, select.POLLIN | select.POLLRDHUP)
            if not p.poll(LIMIT * 1000):
                raise TimeoutError(f"stream {key}: nothing to read at {at}")
        n, way = dice.choice(ROOMS), dice.random()
        # A look does not wait for the mark: in the kernel (6.18) one may do so for good.
        looks = way < 0.1 and (mark == 1 or bool(select.select([s], [], [], 0)[0]))
        flags = socket.MSG_WAITALL if 0.1 <= way < 0.2 else 0
        if looks:
            flags = socket.MSG_PEEK | (socket.MSG_DONTWAIT if mark > 1 else 0)
        data = s.recv(n, flags)
        if looks and data:
            again = s.recv(len(data))
            if again != data[: len(again)]:
                raise ValueError(f"stream {key}: other bytes at {at} than a look had shown")
            data = again
        if not data:
            break
        if data != stream(key, at, len(data)):
            raise ValueError(f"stream {key}: wrong bytes among {len(data)} at {at}")
        at += len(data)
    if at != total:
        raise ValueError(f"stream {key}: ends at {at} of {total}")


def exchange(s, mine, theirs, total, seed, file):
    sender = Sender(s, mine, total, random.Random(seed * 1009 + mine), file)
    receive(s, theirs, total, random.Random(seed * 2003 + theirs))
    sender.join(LIMIT)
    if sender.is_alive():
        raise TimeoutError(f"stream {mine}: not sent")
    s.close()


def main():
    seed, role = int(sys.argv[1]), sys.argv[2]
    file = tempfile.TemporaryFile()
    file.write(BYTES * (max(LENGTHS) // PERIOD + 2))
    file.flush()

    def tell(kind):
        print(f"{role}: {kind.exc_value!r}", flush=True)
        # Whoever waits for this one's peer has waited long enough.
        os._exit(1)

    threading.excepthook = tell

    def serve(s):
        key, total = map(int, s.makefile("rb", 0).readline().split())
        exchange(s, 2 * key + 1, 2 * key, total, seed, file)

    if role == "serve":
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=lambda: os._exit(bool(sys.stdin.read())), daemon=True).start()
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    def ask(first, count):
        for key in range(first, count, AT_ONCE):
            total = random.Random(seed * 31 + key).choice(TOTALS)
            s = socket.create_connection(("127.0.0.1", int(sys.argv[3])))
            s.sendall(b"%d %d\n" % (key, total))
            exchange(s, 2 * key, 2 * key + 1, total, seed, file)

    threads = [threading.Thread(target=ask, args=(i, int(sys.argv[4]))) for i in range(AT_ONCE)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def run(env, seed, count):
    """Both ends with `env`: what they said, their statuses and ids."""
    # fmt: off
    start = lambda *words: subprocess.Popen(
        [sys.executable, __file__, str(seed), *words], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    # fmt: on
    serves = start("serve")
    asks = start("ask", serves.stdout.readline().strip(), str(count))
    try:
        said = asks.communicate(timeout=2 * LIMIT)[0]
    except subprocess.TimeoutExpired:
        asks.kill()
        said = "no end " + asks.communicate()[0]
    said += serves.communicate(timeout=LIMIT)[0]
    return said, [asks.returncode, serves.returncode], [asks.pid, serves.pid]


if __name__ == "__main__":
    main()
