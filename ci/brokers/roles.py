"""The parts that clients play in the broker checks. Each runs in a process of
its own (preloaded or not):

    roles.py ROLE PORT JSON

prints one JSON object at the end and exits in the ordinary way, so that its
report is written. Anything that is not exactly what was sent is an exception."""

import importlib
import json
import os
import random
import struct
import sys
import threading
import time
import zlib

POOL = random.Random(4711).randbytes(4 << 20)
HEAD = struct.Struct("<IIII")


def size_of(rng, low, high):
    """A size, log-uniform, so that small ones are as common as large ones."""
    return max(low, min(high, int(2 ** rng.uniform(low.bit_length() - 1, high.bit_length()))))


def message(seq, size):
    """A message that says its number, its length and its checksum."""
    size = max(size, HEAD.size)
    n = size - HEAD.size
    at = (seq * 7919) % (len(POOL) - n + 1)
    body = POOL[at : at + n]
    return HEAD.pack(seq & 0xFFFFFFFF, size, zlib.crc32(body), seq ^ 0x5A5A5A5A) + body


def check_message(data, seq):
    """Whether a message is exactly number `seq`."""
    if len(data) < HEAD.size:
        raise AssertionError(f"message {seq}: {len(data)} bytes")
    got, size, crc, inverse = HEAD.unpack_from(data)
    if got != seq & 0xFFFFFFFF or inverse != seq ^ 0x5A5A5A5A:
        raise AssertionError(f"message {seq}: carries number {got}")
    if size != len(data) or zlib.crc32(data[HEAD.size :]) != crc:
        raise AssertionError(f"message {seq}: {len(data)} bytes of {size}, checksum differs")


class Start:
    """The first seconds of a client that is going to stay: small messages with pauses between them."""

    def __init__(self, a):
        self.until = time.monotonic() + a.get("start", 0)

    def lasts(self):
        """Whether it still lasts; pauses if so."""
        if time.monotonic() >= self.until:
            return False
        time.sleep(0.02)
        return True

    def size(self, rng, low, high):
        """The size of the next message."""
        return size_of(rng, low, min(high, 256) if self.lasts() else high)


class Window:
    """Lets a publisher be at most `size` messages ahead of what has arrived."""

    def __init__(self, size):
        self.size, self.sent, self.arrived = size, 0, 0
        self.cv = threading.Condition()

    def enter(self):
        """Waits for room, then counts one message."""
        with self.cv:
            if not self.cv.wait_for(lambda: self.sent - self.arrived < self.size, 60):
                raise AssertionError(f"nothing arrived for 60 s: {self.arrived} of {self.sent}")
            self.sent += 1

    def leave(self):
        """Counts an arrival."""
        with self.cv:
            self.arrived += 1
            self.cv.notify_all()

    def drain(self):
        """Waits until all have arrived."""
        with self.cv:
            if not self.cv.wait_for(lambda: self.arrived == self.sent, 60):
                raise AssertionError(f"{self.arrived} of {self.sent} arrived")


def ready():
    """Tells the check that the role is set up."""
    print("READY", flush=True)


def wait_start():
    """Waits until the check closes our standard input, or at once if it has none."""
    sys.stdin.read()


def mqtt(port, a):
    """Publishes and subscribes over connections of their own; every message is checked, in order per level."""
    import paho.mqtt.client as paho

    qos = a["qos"]
    window = Window(a.get("window", 64))
    subs, wrong, seen = [], [], []
    up = threading.Semaphore(0)

    def on_message(client, index, m):
        try:
            check_message(m.payload, seen[index])
            seen[index] += 1
        except AssertionError as e:
            wrong.append(str(e))
        if index == 0:
            window.leave()

    for i in range(a["subscribers"]):
        c = paho.Client(paho.CallbackAPIVersion.VERSION2, userdata=i, protocol=paho.MQTTv311)
        seen.append(0)
        c.on_message = on_message
        c.on_subscribe = lambda *_: up.release()
        c.connect("127.0.0.1", port, 60)
        c.subscribe(a["topic"], qos)
        c.loop_start()
        subs.append(c)
        if not up.acquire(timeout=30):
            raise AssertionError("no SUBACK in 30 s")
    p = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv311)
    p.max_inflight_messages_set(0)
    p.connect("127.0.0.1", port, 60)
    p.loop_start()
    rng = random.Random(a["seed"])
    sent = 0
    start = Start(a)
    for seq in range(a["count"]):
        window.enter()
        m = message(seq, start.size(rng, 16, a.get("max", 65536)))
        p.publish(a["topic"], m, qos)
        sent += len(m)
        if wrong:
            break
    until = time.monotonic() + 60
    while not wrong and min(seen) < a["count"] and time.monotonic() < until:
        time.sleep(0.01)
    for c in [p, *subs]:
        c.disconnect()
        c.loop_stop()
    if wrong or min(seen) != a["count"]:
        raise AssertionError(f"{wrong[:2]}, seen {seen} of {a['count']}")
    return {"messages": a["count"] * len(subs), "bytes": sent}


def memcache(port, a):
    """Sets, gets, multi-gets, appends and counters; every value is read back and compared."""
    from pymemcache.client.base import Client

    c = Client(("127.0.0.1", port), timeout=60, no_delay=True, default_noreply=False)
    rng = random.Random(a["seed"])
    known, done = {}, 0
    start = Start(a)
    for seq in range(a["count"]):
        key = f"k{a['seed']}-{rng.randrange(200)}"
        known[key] = message(seq, start.size(rng, 16, a.get("max", 262144)))
        if not c.set(key, known[key]):
            raise AssertionError(f"set {key}")
        if seq % 7 == 0:
            keys = rng.sample(sorted(known), min(len(known), 5))
            got = c.get_many(keys)
            for k in keys:
                if got.get(k) != known[k]:
                    raise AssertionError(f"{k}: {len(got.get(k) or b'')} bytes of {len(known[k])}")
        elif c.get(key) != known[key]:
            raise AssertionError(f"{key}: other bytes than were set")
        if seq % 11 == 0:
            c.append(key, b"tail")
            known[key] += b"tail"
        done += 1
    counter = f"n{a['seed']}"
    c.set(counter, b"0")
    for i in range(200):
        if c.incr(counter, 1) != i + 1:
            raise AssertionError("the counter is wrong")
    if c.get(f"absent{a['seed']}") is not None:
        raise AssertionError("a value that nobody set")
    c.quit()
    return {"values": done}


def http(port, a):
    """Fetches files over kept connections, whole and in ranges; compares their checksums."""
    import hashlib
    import http.client

    rng = random.Random(a["seed"])
    names = sorted(a["files"])
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    got = 0
    start = Start(a)
    small = [n for n in names if os.path.getsize(a["files"][n]) < 1000]
    for _ in range(a["count"]):
        name = rng.choice(small if start.lasts() else names)
        with open(a["files"][name], "rb") as f:
            want = f.read()
        headers = {}
        if rng.random() < 0.3 and len(want) > 10:
            lo = rng.randrange(len(want) - 1)
            hi = rng.randrange(lo, len(want))
            headers["Range"] = f"bytes={lo}-{hi}"
            want = want[lo : hi + 1]
        try:
            c.request("GET", "/" + name, headers=headers)
            r = c.getresponse()
        except (http.client.RemoteDisconnected, ConnectionError):
            # A server that is reloaded may end a connection between two requests, once.
            if not a.get("reload"):
                raise
            a["reload"] = False
            c.close()
            c.request("GET", "/" + name, headers=headers)
            r = c.getresponse()
        body = r.read()
        if r.status not in (200, 206) or hashlib.md5(body).digest() != hashlib.md5(want).digest():
            raise AssertionError(f"{name}: status {r.status}, {len(body)} bytes of {len(want)}, or other bytes")
        got += len(body)
    # A reader that takes its time: the server fills every buffer on the way, and must go on afterwards.
    name = max(names, key=lambda n: os.path.getsize(a["files"][n]))
    with open(a["files"][name], "rb") as f:
        want = hashlib.md5(f.read()).digest()
    c.request("GET", "/" + name)
    r = c.getresponse()
    digest, rounds = hashlib.md5(), 0
    while True:
        part = r.read(300_000)
        if not part:
            break
        digest.update(part)
        got += len(part)
        rounds += 1
        if rounds < 20:
            time.sleep(0.01)
    if digest.digest() != want:
        raise AssertionError(f"{name}, read slowly: other bytes")
    c.close()
    return {"requests": a["count"] + 1, "bytes": got}


def postgres(port, a):
    """Inserts and selects of binary values, COPY both ways, notifications; everything is compared."""
    import io
    import select

    import psycopg2

    dsn = f"host=127.0.0.1 port={port} dbname=postgres user=postgres connect_timeout=30"
    rng = random.Random(a["seed"])
    db = psycopg2.connect(dsn)
    db.autocommit = True
    cur = db.cursor()
    table = f"t{a['seed']}"
    cur.execute(f"create unlogged table {table} (id int primary key, v bytea)")
    start = Start(a)
    for seq in range(a["count"]):
        m = message(seq, start.size(rng, 16, 65536))
        cur.execute(f"insert into {table} values (%s, %s)", (seq, psycopg2.Binary(m)))
        back = rng.randrange(seq + 1)
        cur.execute(f"select v from {table} where id = %s", (back,))
        check_message(bytes(cur.fetchone()[0]), back)
    cur.execute(f"select id, v from {table} order by id")
    rows = cur.fetchall()
    if len(rows) != a["count"]:
        raise AssertionError(f"{len(rows)} rows of {a['count']}")
    for i, v in rows:
        check_message(bytes(v), i)
    text = "".join(f"{i}\t{zlib.crc32(str(i).encode())}\n" for i in range(a["count"] * 20))
    cur.execute(f"create unlogged table c{table} (id int, crc bigint)")
    cur.copy_expert(f"copy c{table} from stdin", io.StringIO(text))
    out = io.StringIO()
    cur.copy_expert(f"copy (select * from c{table} order by id) to stdout", out)
    if out.getvalue() != text:
        raise AssertionError("COPY gave other rows")
    listener = psycopg2.connect(dsn)
    listener.autocommit = True
    listener.cursor().execute(f"listen {table}")
    for i in range(a["count"] // 4):
        cur.execute(f"notify {table}, '{i}'")
        while not listener.notifies:
            if not select.select([listener], [], [], 30)[0]:
                raise AssertionError(f"notification {i} did not come")
            listener.poll()
        if listener.notifies.pop(0).payload != str(i):
            raise AssertionError("notifications out of order")
    # A query that is cancelled over a second connection, then the first goes on.
    threading.Timer(0.3, db.cancel).start()
    try:
        cur.execute("select pg_sleep(20)")
        raise AssertionError("the cancelled query ended well")
    except psycopg2.errors.QueryCanceled:
        pass
    cur.execute("select 1")
    listener.close()
    db.close()
    return {"rows": a["count"]}


ROLES = {f.__name__: f for f in (mqtt, memcache, http, postgres)}


def main():
    """Plays the role."""
    role, port, a = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    for more in ("roles_more", "roles_services"):
        if role not in ROLES:
            ROLES.update(importlib.import_module(more).ROLES)
    print(json.dumps(ROLES[role](port, a)), flush=True)


if __name__ == "__main__":
    main()
