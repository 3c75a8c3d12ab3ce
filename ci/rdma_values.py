#!/usr/bin/env python3
"""rdma_values.py HOST PORT COUNT: writes random values to a Redis, reads them back and compares, over plain sockets."""

import random
import socket
import sys


def command(*words):
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


def main():
    host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(count)
    with socket.create_connection((host, port), 30) as s:
        f = s.makefile("rb")
        for i in range(count):
            # The first ones are small: the connection is on TCP yet.
            value = rng.randbytes(8 if i < 600 else rng.randrange(1, 20000))
            key = b"value:%d" % i
            s.sendall(command(b"SET", key, value) + command(b"GET", key))
            if f.readline() != b"+OK\r\n" or f.readline() != b"$%d\r\n" % len(value):
                sys.exit(f"value {i}: another answer")
            if f.read(len(value) + 2) != value + b"\r\n":
                sys.exit(f"value {i} differs")
    print("OK", count)


if __name__ == "__main__":
    main()
