"""Odd calls on a connection that has had traffic enough to be on a ring: what each returns is printed, one line
for each, to be compared with what the same calls return without the library (`odd_check.py`).

`calls`: hundreds of options, requests, flags, lengths and bad arguments, once. `ends FIRST COUNT`: COUNT random
programs of calls at both ends, about the states in which a connection can end. Standard library only."""

import ctypes
import errno
import fcntl
import os
import random
import select
import socket
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
buf = ctypes.create_string_buffer(70_000)
DONTWAIT, NOSIGNAL = 0x40, 0x4000
# What one end does is seen at the other after this many seconds.
SETTLE = 0.012


def warm(a, b, rounds):
    """Small messages both ways."""
    for _ in range(rounds):
        for frm, to in ((a, b), (b, a)):
            frm.sendall(b"x" * 50)
            got = 0
            while got < 50:
                got += len(to.recv(50 - got))


def pair():
    """Two ends of a connection that has been used for a while."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    for s in (a, b):
        # What is sent arrives at once: otherwise results depend on when.
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(3):
        warm(a, b, 60)
        time.sleep(0.025)
    return a, b


def call(name, *args):
    """The result of libc's function, or its error by name."""
    ctypes.set_errno(0)
    r = getattr(libc, name)(*args)
    return errno.errorcode.get(ctypes.get_errno(), ctypes.get_errno()) if r == -1 else r


# ---------------------------------------------------------------- odd arguments


class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class Event(ctypes.Structure):
    _pack_ = 1 if os.uname().machine == "x86_64" else 0
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]


def option(fd, level, name, size, value=None):
    """A getsockopt, and what it wrote."""
    length = ctypes.c_int(size)
    buf.raw = b"\xaa" * 256
    r = call("getsockopt", fd, level, name, buf, ctypes.byref(length))
    seen = buf.raw[:8].hex() if r == 0 and value is None else ""
    print("getsockopt", level, name, size, r, length.value if r == 0 else "", seen)


def odd_options(fd):
    # Those whose values are the kernel's measurements, or a process id.
    vary = {(0, 52), (1, 17), (1, 49), (1, 55), (1, 56), (1, 57), (1, 68), (6, 11), (6, 12), (6, 24), (6, 26)}
    for level in (0, 1, 6, 41, 17, 255):
        for name in range(80):
            if (level, name) != (6, 35):
                option(fd, level, name, 200, "" if (level, name) in vary else None)
    for size in (0, 1, 2, 3, 4, -1):
        for name in (4, 18, 20, 13):
            option(fd, 1, name, size)
    four = ctypes.byref(ctypes.c_int(4))
    print("getsockopt to nowhere", call("getsockopt", fd, 1, 4, None, four), call("getsockopt", fd, 1, 4, buf, None))
    for size in (0, 1, 3, 4, 8):
        for name in (18, 20, 21, 13, 7, 8, 15, 2):
            print("setsockopt", name, size, call("setsockopt", fd, 1, name, b"\1\0\0\0\0\0\0\0", size))
    # Else it would depend on acknowledgements whether there is room.
    for name, value in ((7, 200_000), (8, 200_000), (18, 1)):
        call("setsockopt", fd, 1, name, struct.pack("i", value), 4)
    call("setsockopt", fd, 1, 13, struct.pack("ii", 0, 0), 8)
    for name in (20, 21):
        for seconds, micros in ((-1, 0), (0, 1_000_001), (0, -5), (0, 0)):
            print("timeout", name, micros, call("setsockopt", fd, 1, name, struct.pack("qq", seconds, micros), 16))


def odd_requests(fd):
    # Not those that change signals, owners' numbers or duplicate: 0, 4, 8, 10, 1030.
    for command in (1, 2, 3, 5, 6, 7, 9, 11, *range(12, 20), *(n for n in range(1024, 1041) if n != 1030), 9999):
        print("fcntl", command, call("fcntl", fd, command, 0))
    for request in (
        (0x541B, 0x5411, 0x5450, 0x5451, 0x5460, 0x5401, 0x8901, 0x8902, 0x8903, 0x8904, 0x8905, 0x8906, 0x8907)
        + (0x894B, 0x8912, 0x8913, 0x5421, 0x1234)
    ):
        ctypes.memset(buf, 0, 256)
        print("ioctl", hex(request), call("ioctl", fd, request, buf), buf.raw[:8].hex())
    print("ioctl to nowhere", call("ioctl", fd, 0x541B, None), call("ioctl", fd, 0x5411, 8))


def odd_transfers(fd):
    for flags in (0x40 | 2, 0x2040, 1, 0x41, 0x840, 0x10040, 0x40000040, 0x50, 0x44, 0x240, 0x80040, 0x20040, 0x1040, 0x60):
        print("recv", hex(flags), call("recv", fd, buf, 3, flags))
    print("recv of nothing", call("recv", fd, buf, 0, DONTWAIT), call("recv", fd, None, 0, DONTWAIT))
    for flags in (0x800, 0x10000, 0x4000, 0x40000000, 0x10, 0x4, 0x200, 0x80000):
        print("send", hex(flags), call("send", fd, b"abc", 3, flags | DONTWAIT))
    print("send of nothing", call("send", fd, buf, 0, 0), call("send", fd, None, 0, 0))
    for address, size in ((b"\0" * 16, 16), (b"\0" * 16, 500), (None, 16)):
        print("sendto", size, call("sendto", fd, b"abc", 3, 0, address, size))
    two = (Iovec * 2)(Iovec(ctypes.addressof(buf), 3), Iovec(ctypes.addressof(buf), 2**63))
    for name in ("writev", "readv"):
        for v, n in ((two, 2), (two, 0), (two, -1), (two, 1025), (None, 1)):
            if n > 0 or name == "writev" or n == -1:
                print(name, v is None, n, call(name, fd, v, n))
    print("at a position", *(call(n, fd, buf, 10, 0) for n in ("pread", "pwrite")))
    print("pieces at a position", *(call(n, fd, two, 1, 0) for n in ("preadv", "pwritev")))
    print("endless", *(call(n, fd, buf, ctypes.c_size_t(2**64 - 1)) for n in ("read", "write")))
    out = os.pipe()[1]
    print("tee", call("tee", fd, fd, 10, 0), "vmsplice", call("vmsplice", fd, two, 1, 0))
    print("splice", call("splice", fd, None, fd, None, 10, 2))
    print("copy_file_range", call("copy_file_range", fd, None, out, None, 10, 0), "sendfile", call("sendfile", fd, fd, None, 10))


def odd_rest(fd):
    print("shutdown", *(call("shutdown", fd, how) for how in (-1, 3, 4, 100)))
    nobody, other = struct.pack("HHI8x", 2, 0, 0), struct.pack("HHI8x", 99, 0, 0)
    print("listen", call("listen", fd, 1), "bind", call("bind", fd, other, 16))
    print("connect", call("connect", fd, nobody, 16), call("connect", fd, other, 16))
    print("accept", call("accept", fd, None, None), call("accept4", fd, None, None, 12345))
    print("dup2", call("dup2", fd, -1), call("dup2", fd, fd) == fd, call("dup2", -1, fd))
    print("dup3", call("dup3", fd, fd, 0), call("dup3", fd, 50, 1), call("dup3", fd, 50, os.O_CLOEXEC), call("close", 50))
    print("as a file", call("lseek", fd, 0, 0), *(call(n, fd, 0) for n in ("ftruncate", "fsync", "fdatasync")))
    print("as a file", call("fchmod", fd, 0o600), call("posix_fadvise", fd, 0, 0, 0), call("fallocate", fd, 0, 0, 10))
    print("as a file", call("flock", fd, 2), call("isatty", fd), call("tcgetpgrp", fd))
    print("names", call("getpeername", fd, buf, ctypes.byref(ctypes.c_int(-1))))
    print("names", call("getsockname", fd, None, ctypes.byref(ctypes.c_int(16))))
    ep = libc.epoll_create1(0)
    e = ctypes.byref(Event(1, 5))
    for who, op, what, event in (
        (ep, 1, fd, e),
        (ep, 1, fd, e),
        (ep, 9, fd, e),
        (ep, 3, fd, None),
        (ep, 2, fd, None),
        (ep, 2, fd, None),
        (ep, 3, fd, e),
        (fd, 1, ep, e),
        (fd, 1, fd, e),
        (ep, 1, ep, e),
        (ep, 1, -1, e),
        (ep, 1, fd, None),
    ):
        print("epoll_ctl", op, call("epoll_ctl", who, op, what, event))
    for who, n in ((fd, 1), (ep, 0), (ep, -1), (ep, 1)):
        print("epoll_wait", n, call("epoll_wait", who, e, n, 0))
    print("epoll_wait to nowhere", call("epoll_wait", ep, None, 1, 0))
    print("poll of nowhere", call("poll", None, 0, 0), call("poll", None, 1, 0))


def calls():
    a, b = pair()
    for part in (odd_requests, odd_options, odd_rest, odd_transfers):
        part(a.fileno())
    time.sleep(0.1)
    b.setblocking(False)
    arrived = 0
    while True:
        try:
            n = len(b.recv(65536))
        except BlockingIOError:
            break
        if n == 0:
            break
        arrived += n
    print("arrived", arrived)


# --------------------------------------------------------------------- ends


class End:
    """One end of a connection, and the epoll sets that were made for it."""

    def __init__(self, sock):
        self.sock, self.fd, self.sets = sock, sock.fileno(), {}

    def recv(self, n, flags=0):
        ctypes.memset(buf, 0, 64)
        r = call("recv", self.fd, buf, n, flags | DONTWAIT)
        return r, buf.raw[: min(r, 8)] if isinstance(r, int) else ""

    def poll(self, events):
        p = select.poll()
        p.register(self.fd, events)
        return [e for _, e in p.poll(0)]

    def new_set(self, events):
        s = select.epoll()
        s.register(self.fd, events)
        return s

    def keep(self, name, events):
        self.sets[name] = self.new_set(events)

    def look(self, name):
        return [e for _, e in self.sets[name].poll(0)] if name in self.sets else None

    def again(self, name, events):
        if name in self.sets:
            self.sets[name].modify(self.fd, events)

    def queued(self):
        return struct.unpack("i", fcntl.ioctl(self.fd, 0x541B, b"\0" * 4))[0]

    def send(self, data):
        return call("send", self.fd, data, len(data), NOSIGNAL | DONTWAIT)

    def reset(self):
        self.sock.setsockopt(1, 13, struct.pack("ii", 1, 0))
        self.sock.close()


ET, ONESHOT = 0x8000_2005, 0x4000_2005
MINE = {
    "recv": lambda e: e.recv(10),
    "peek": lambda e: e.recv(10, 2),
    "trunc": lambda e: e.recv(10, 0x20),
    "waitall": lambda e: e.recv(10, 0x100),
    "peek-waitall": lambda e: e.recv(30, 0x102),
    "recv-0": lambda e: e.recv(0),
    "read-0": lambda e: call("read", e.fd, buf, 0),
    "recv-all": lambda e: e.recv(60_000),
    "oob": lambda e: e.recv(1, 1),
    "send": lambda e: e.send(b"abc"),
    "send-0": lambda e: e.send(b""),
    "writev-0": lambda e: call("writev", e.fd, None, 0),
    "poll": lambda e: e.poll(0x7FF),
    "poll-in": lambda e: e.poll(1),
    "poll-out": lambda e: e.poll(4),
    "poll-rdhup": lambda e: e.poll(0x2000),
    "poll-0": lambda e: e.poll(0),
    "epoll": lambda e: [x for _, x in e.new_set(0x20FF).poll(0)],
    "epoll-in": lambda e: [x for _, x in e.new_set(1).poll(0)],
    "edge-add": lambda e: e.keep("edge", ET),
    "edge-look": lambda e: e.look("edge"),
    "edge-mod": lambda e: e.again("edge", ET),
    "oneshot-add": lambda e: e.keep("oneshot", ONESHOT),
    "oneshot-look": lambda e: e.look("oneshot"),
    "select": lambda e: [len(x) for x in select.select([e.fd], [e.fd], [e.fd], 0)],
    "fionread": End.queued,
    "error": lambda e: e.sock.getsockopt(1, 4),
    "peer": lambda e: call("getpeername", e.fd, buf, ctypes.byref(ctypes.c_int(100))),
    "shut-rd": lambda e: call("shutdown", e.fd, 0),
    "shut-wr": lambda e: call("shutdown", e.fd, 1),
    "shut-both": lambda e: call("shutdown", e.fd, 2),
    "connect": lambda e: call("connect", e.fd, struct.pack("HHI8x", 2, 0, 0), 16),
    "lowat-5": lambda e: e.sock.setsockopt(1, 18, 5),
    "lowat-1": lambda e: e.sock.setsockopt(1, 18, 1),
}
ITS = {
    "its-send-20": lambda e: e.send(b"0123456789abcdefghij"),
    "its-send-3": lambda e: e.send(b"XYZ"),
    "its-shut-wr": lambda e: call("shutdown", e.fd, 1),
    "its-shut-rd": lambda e: call("shutdown", e.fd, 0),
    "its-recv": lambda e: e.recv(4)[0],
    "its-recv-all": lambda e: e.recv(60_000)[0],
    "its-close": lambda e: e.sock.close(),
    "its-reset": End.reset,
}
LAST = ("its-close", "its-reset")


def ends(first, count):
    for seed in range(first, first + count):
        r = random.Random(seed)
        mine, its = map(End, pair())
        closed = False
        print("#", seed)
        for step in range(14):
            other = not closed and r.random() < 0.4
            name = r.choice(list(ITS if other else MINE))
            if name in LAST and step < 5 and r.random() < 0.6:
                continue
            closed |= name in LAST
            try:
                result = ITS[name](its) if other else MINE[name](mine)
            except OSError as e:
                result = errno.errorcode[e.errno]
            if other or name.startswith(("send", "shut", "writev")):
                time.sleep(SETTLE)
            print(step, name, result, flush=True)
        mine.sock.close()
        its.sock.close()


if __name__ == "__main__":
    if sys.argv[1] == "calls":
        calls()
    else:
        ends(int(sys.argv[2]), int(sys.argv[3]))
