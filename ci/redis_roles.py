"""The parts that clients play in the Redis check. Each runs in a process of
its own (preloaded or not), with the PyPI package `redis`:

    redis_roles.py ROLE HOST PORT JSON

prints one JSON object at the end and exits in the ordinary way, so that its
report is written. A difference to what was written is an exception."""

import json
import math
import random
import sys
import threading
import time

import redis

POOL_BYTES = 4 << 20
# The largest value of a slow start.
SMALL = 256


class Values:
    """Random values that can be made again from two numbers."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.pool = random.Random(4711).randbytes(POOL_BYTES)

    def draw(self, low=1, high=1 << 20):
        """A position and a length, log-uniform."""
        n = int(math.exp(self.rng.uniform(math.log(low), math.log(high + 1))))
        n = max(low, min(high, n))
        return self.rng.randrange(POOL_BYTES - n + 1), n

    def bytes(self, at):
        """The value of a draw."""
        return self.pool[at[0] : at[0] + at[1]]


class Start:
    """The first seconds, if they are to be slow: with small messages, one after the other."""

    PAUSE_S = 0.02

    def __init__(self, a):
        self.until = time.monotonic() + a.get("start", 0)

    def lasts(self):
        """Whether they still last; pauses if so."""
        if time.monotonic() >= self.until:
            return False
        time.sleep(self.PAUSE_S)
        return True


def connect(server, **more):
    """A client with one connection of its own to a host and a port."""
    host, port = server
    return redis.Redis(host=host, port=port, socket_timeout=60, single_connection_client=True, **more)


def differ(what, want, got):
    """Ends the role with what was wrong."""
    where = "absent" if got is None else f"{len(got)} bytes"
    if got is not None:
        k = next((i for i, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))
        where += f", first difference at {k}"
    raise AssertionError(f"{what}: {len(want)} bytes written, read back {where}")


def setget(server, a):
    """SET and GET of random keys and values; every value is read back and compared."""
    r = connect(server)
    v = Values(a["seed"])
    known = {}
    start = Start(a)
    until = time.monotonic() + a["seconds"]
    done = read = moved = 0

    def check(key, got):
        nonlocal read, moved
        want = v.bytes(known[key])
        if got != want:
            differ(key, want, got)
        read += 1
        moved += 2 * len(want)

    while done < a["count"] and time.monotonic() < until:
        high = SMALL if start.lasts() else 1 << 20
        batch = 1 if v.rng.random() < 0.8 else v.rng.randrange(2, 17)
        batch = min(batch, a["count"] - done)
        keys = [f"k:{a['seed']}:{v.rng.randrange(a['keys'])}" for _ in range(batch)]
        if batch == 1:
            known[keys[0]] = v.draw(high=high)
            r.set(keys[0], v.bytes(known[keys[0]]))
            check(keys[0], r.get(keys[0]))
        else:
            pipe = r.pipeline(transaction=v.rng.random() < 0.5)
            for k in keys:
                known[k] = v.draw(high=high)
                pipe.set(k, v.bytes(known[k]))
            pipe.execute()
            for k in set(keys):
                pipe.get(k)
            for k, got in zip(set(keys), pipe.execute()):
                check(k, got)
        done += batch
        if v.rng.random() < 0.1:
            k = v.rng.choice(list(known)) if len(known) < 64 else keys[0]
            check(k, r.get(k))
    for k in known:  # all that is left, once more
        check(k, r.get(k))
    r.close()
    return {"set": done, "read": read, "bytes": moved}


def monitor(server, a):
    """MONITOR must show every command of a second connection, in order."""
    watcher, r = connect(server), connect(server)
    n = a["count"]
    with watcher.monitor() as m:
        ended = []

        def write():
            start = Start(a)
            for i in range(n):
                start.lasts()
                r.set(f"m:{i}", f"value-{i}")
            ended.append(True)

        t = threading.Thread(target=write, daemon=True)
        t.start()
        seen = 0
        while seen < n:
            c = m.next_command()["command"]
            if not c.startswith("SET m:"):
                continue
            want = f"SET m:{seen} value-{seen}"
            if c != want:
                raise AssertionError(f"MONITOR said {c!r}, expected {want!r}")
            seen += 1
        t.join(30)
        if not ended:
            raise AssertionError("the writer did not end")
    r.close()
    return {"seen": seen}


def subscriber(server, a):
    """Receives numbered messages, by channel or by pattern, and compares."""
    r = connect(server)
    v = Values(a["seed"])
    p = r.pubsub(ignore_subscribe_messages=True)
    if a["pattern"]:
        p.psubscribe("news:*")
    else:
        p.subscribe("news:x")
    print("READY", flush=True)
    n = 0
    while n < a["count"]:
        m = p.get_message(timeout=30)
        if m is None:
            if not p.connection.can_read(timeout=30):
                raise AssertionError(f"no message after {n}")
            continue
        want = b"%d:" % n + v.bytes(v.draw(high=8192))
        if m["data"] != want:
            differ(f"message {n}", want, m["data"])
        n += 1
    p.close()
    r.close()
    return {"messages": n}


def publisher(server, a):
    """Publishes what the subscribers expect."""
    r = connect(server)
    v = Values(a["seed"])
    start = Start(a)
    for n in range(a["count"]):
        start.lasts()
        got = r.publish("news:x", b"%d:" % n + v.bytes(v.draw(high=8192)))
        if got != a["subscribers"]:
            raise AssertionError(f"message {n} went to {got} of {a['subscribers']}")
    r.close()
    return {"published": a["count"]}


def popper(server, a):
    """Blocking pops: all items in order, and a time-out that is one."""
    r = connect(server)
    began = time.monotonic()
    if r.blpop(["nothing:here"], timeout=1) is not None:
        raise AssertionError("BLPOP gave an item of an empty list")
    waited = time.monotonic() - began
    if not 0.9 <= waited < 5:
        raise AssertionError(f"BLPOP with a time-out of 1 s came back after {waited:.2f} s")
    print("READY", flush=True)
    for n in range(a["count"]):
        got = r.blpop(["jobs:a", "jobs:b"], timeout=30)
        if got is None or got[1] != b"job-%d" % n:
            raise AssertionError(f"pop {n} gave {got}")
        r.rpush("done", n)
    r.close()
    return {"popped": a["count"]}


def pusher(server, a):
    """Feeds the popper, sometimes faster than it pops, sometimes slower."""
    r = connect(server)
    rng = random.Random(a["seed"])
    start = Start(a)
    for n in range(a["count"]):
        start.lasts()
        r.rpush("jobs:a" if n % 2 == 0 else "jobs:b", b"job-%d" % n)
        got = r.blpop(["done"], timeout=30)
        if got is None or int(got[1]) != n:
            raise AssertionError(f"answer {n} is {got}")
        if rng.random() < 0.002:
            time.sleep(0.005)
    r.close()
    return {"pushed": a["count"]}


def idler(server, a):
    """Commands with long pauses between them: sleepers must be woken."""
    r = connect(server)
    v = Values(a["seed"])
    key = f"idle:{a['seed']}"
    start = Start(a)
    for n in range(a["count"]):
        value = v.bytes(v.draw(high=SMALL if start.lasts() else 65536))
        r.set(key, value)
        got = r.get(key)
        if got != value:
            differ(f"round {n}", value, got)
        if n % 100 == 99:
            time.sleep(0.05)
    r.close()
    return {"rounds": a["count"]}


def compare(server, a):
    """All keys of two servers, value by value."""
    one, two = connect(server), connect(a["other"])
    start = Start(a)
    while start.lasts():
        one.ping()
        two.ping()
    n = 0
    for key in one.scan_iter(count=500):
        want, got = one.get(key), two.get(key)
        if want != got:
            differ(key.decode(), want, got)
        n += 1
    if two.dbsize() != n or one.dbsize() != n:
        raise AssertionError(f"{n} keys, but {one.dbsize()} and {two.dbsize()} by DBSIZE")
    a, b = one.execute_command("DEBUG DIGEST"), two.execute_command("DEBUG DIGEST")
    if a != b:
        raise AssertionError(f"DEBUG DIGEST {a} and {b}")
    one.close()
    two.close()
    return {"keys": n}


ROLES = {f.__name__: f for f in (setget, monitor, subscriber, publisher, popper, pusher, idler, compare)}


def main():
    """Plays one part."""
    role, host, port, a = sys.argv[1:]
    print(json.dumps(ROLES[role]((host, int(port)), json.loads(a))), flush=True)


if __name__ == "__main__":
    main()
