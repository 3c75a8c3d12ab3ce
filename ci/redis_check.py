#!/usr/bin/env python3
"""Unmodified Redis and unmodified clients, preloaded: every value that is
written is read back and compared, and the reports must show that the bytes
went over rings (or, in the variants, that they did not).

Prints one PASS or FAIL line for each check, then `N passed, N failed`."""

import argparse
import json
import os
import select
import subprocess
import sys
import threading
import time
import traceback

from preload_lib import Reports, all_bytes, clean_env, default_preload, ring_bytes, share, stop, venv_python, workplace
from redis_lib import Server, ask

PACKAGE = "redis>=5,<6"
# Each connection begins on TCP, which weighs more in a short run on a busy machine.
WANTED_SHARE_FULL = 0.99
WANTED_SHARE_FAST = 0.95
HERE = os.path.dirname(os.path.abspath(__file__))


class Failed(Exception):
    """A check found something wrong."""


class Low(Failed):
    """All was right, but too little of it was on rings."""


class Setting:
    """Which side is preloaded, with which settings, and what the reports must then show."""

    def __init__(self, name, server, client, server_set=None, client_set=None, rings=False):
        self.name = name
        self.server, self.client = server, client
        self.server_set, self.client_set = server_set, client_set
        self.rings = rings


class Client:
    """One process that plays a role."""

    def __init__(self, check, role, port, args, lib):
        self.role = role
        self.preloaded = lib is not None
        self.proc = subprocess.Popen(
            [check.python, os.path.join(HERE, "redis_roles.py"), role, str(port), json.dumps(args)],
            env=check.reports.env(lib, check.setting.client_set),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        check.clients.append(self)

    def wait_ready(self):
        """Until it says so."""
        ready, _, _ = select.select([self.proc.stdout], [], [], 60)
        line = self.proc.stdout.readline() if ready else "nothing for 60 s"
        if line.strip() != "READY":
            self.proc.kill()
            _, err = self.proc.communicate(timeout=60)
            raise Failed(f"{self.role}: {line.strip()} {err.strip().splitlines()[-1:]}")

    def result(self, seconds):
        """What it found; raises if it did not end well."""
        try:
            out, err = self.proc.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.communicate()
            raise Failed(f"{self.role}: still running after {seconds} s") from None
        if self.proc.returncode != 0:
            raise Failed(f"{self.role}: status {self.proc.returncode}: {' '.join(err.strip().splitlines()[-2:])}")
        return json.loads(out.strip().splitlines()[-1])


class Check:
    """One check: servers and clients under one setting, then what the reports say."""

    def __init__(self, setting, python, folder, wanted):
        self.setting, self.python = setting, python
        self.reports = Reports(folder)
        self.servers, self.clients, self.others = [], [], []
        self.wanted = wanted

    def server(self, *options):
        """Starts a server."""
        return self.one_more(self.setting.server, self.setting.server_set, options)

    def replica(self, *options):
        """Starts a server that is preloaded as clients are."""
        return self.one_more(self.setting.client, self.setting.client_set, options)

    def one_more(self, lib, settings, options):
        """Starts a server with a library."""
        # fmt: off
        s = Server(
            self.reports, lib, settings,
            ("--client-output-buffer-limit", "pubsub 0 0 0", "--client-output-buffer-limit", "replica 0 0 0", *options),
        )
        # fmt: on
        s.preloaded = lib is not None
        self.servers.append(s)
        return s

    def client(self, role, server, **args):
        """Starts a client."""
        return Client(self, role, server.port, args, self.setting.client)

    def onlooker(self, role, server, **args):
        """Starts a client that is not preloaded."""
        return Client(self, role, server.port, args, None)

    def stop(self):
        """Ends all processes; the statuses of the servers."""
        for c in self.clients:
            stop(c.proc, 5)
        return [s.stop() for s in self.servers]

    def verdict(self):
        """Stops all and reads the reports; returns the text for the PASS line."""
        for s in self.servers:
            if s.proc.poll() is not None:
                raise Failed(f"the server ended by itself with {s.proc.returncode}: {s.tail()}")
        for status in self.stop():
            if status != 0:
                raise Failed(f"a server ended with status {status} on SIGTERM")
        server_pids = [s.pid for s in self.servers if s.preloaded]
        client_pids = [c.proc.pid for c in self.clients if c.preloaded]
        client_pids += [p.pid for p in self.others] if self.setting.client else []
        if not server_pids + client_pids:
            return "not preloaded"
        texts = []
        moved = []
        for who, pids in (("server", server_pids), ("clients", client_pids)):
            if not pids:
                continue
            t, silent = self.reports.totals(pids)
            if silent:
                raise Failed(f"no report of {who} {silent}")
            if t["connections"] == 0 or all_bytes(t) == 0:
                raise Failed(f"the report of {who} shows no traffic: {t}")
            text = f"{who} {share(t) * 100:.2f} % of {all_bytes(t) / 1e6:.1f} MB on rings"
            if not self.setting.rings and (ring_bytes(t) or t["upgraded"]):
                raise Failed(f"{text}, expected none: {t}")
            if self.setting.rings and share(t) < self.wanted:
                raise Low(f"{text}, {t['upgraded']} of {t['connections']} upgraded: {self.reports.logs()[:3]}")
            texts.append(text)
            moved.append(all_bytes(t))
        # What the clients counted the server must have counted; it also had a few questions of ours.
        if len(moved) == 2 and len(self.servers) == 1 and not 0 <= moved[0] - moved[1] <= 1 << 20:
            raise Failed(f"the ends count differently: {'; '.join(texts)}")
        return "; ".join(texts)


# The checks. Each returns what it did, in a few words.


def check_setget(c, a, count, procs, seconds, saves=0):
    """SET and GET of random values from several processes, BGSAVE in the middle."""
    s = c.server()
    # fmt: off
    workers = [
        c.client("setget", s, seed=a.seed + i, count=count // procs, keys=max(50, 2000 // procs), seconds=seconds)
        for i in range(procs)
    ]
    # fmt: on
    saved = 0
    for _ in range(saves):
        time.sleep(0.2)
        if any(w.proc.poll() is not None for w in workers):
            break
        bgsave(s)
        saved += 1
    got = [w.result(seconds + 180) for w in workers]
    if saves and not saved:
        bgsave(s)
    done = sum(g["set"] for g in got)
    if done < count // procs * procs and seconds < 60:
        raise Failed(f"only {done} of {count} in {seconds} s")
    text = f"{done} SET, {sum(g['read'] for g in got)} values read back and equal, "
    text += f"{sum(g['bytes'] for g in got) / 1e6:.0f} MB of values"
    return text + (f", {max(saved, 1)} BGSAVE" if saves else "")


def bgsave(s):
    """One BGSAVE, awaited; the file must be sound."""
    mark = ("rdb_last_save_time", "rdb_saves")
    before = [s.info("persistence").get(k) for k in mark]
    if not ask(s.port, "BGSAVE").startswith("+Background saving started"):
        raise Failed("BGSAVE did not start")
    until = time.monotonic() + 120
    while True:
        info = s.info("persistence")
        if info["rdb_bgsave_in_progress"] == "0" and [info.get(k) for k in mark] != before:
            break
        if time.monotonic() > until:
            raise Failed("BGSAVE did not end in 120 s")
        time.sleep(0.05)
    if info["rdb_last_bgsave_status"] != "ok":
        raise Failed(f"BGSAVE: {info['rdb_last_bgsave_status']}: {s.tail()}")
    rdb = os.path.join(s.dir, "dump.rdb")
    r = subprocess.run(["redis-check-rdb", rdb], capture_output=True, text=True, timeout=120, env=clean_env())
    if r.returncode != 0:
        raise Failed(f"redis-check-rdb: {r.stdout[-200:]}")


def check_monitor(c, a, count):
    """MONITOR."""
    s = c.server()
    m = c.client("monitor", s, count=count)
    return f"{m.result(120)['seen']} commands seen in order"


def check_pubsub(c, a, count):
    """Publishing to channels and patterns."""
    s = c.server()
    subs = [c.client("subscriber", s, seed=a.seed, count=count, pattern=i % 2 == 1) for i in range(3)]
    for x in subs:
        x.wait_ready()
    until = time.monotonic() + 10
    while ask(s.port, "PUBSUB", "NUMPAT") != ":1" and time.monotonic() < until:
        time.sleep(0.02)
    p = c.client("publisher", s, seed=a.seed, count=count, subscribers=3)
    p.result(120)
    got = [x.result(60)["messages"] for x in subs]
    return f"{count} messages to {len(got)} subscribers"


def check_pops(c, a, count):
    """Blocking pops."""
    s = c.server()
    pop = c.client("popper", s, count=count)
    pop.wait_ready()
    push = c.client("pusher", s, count=count, seed=a.seed)
    push.result(120)
    return f"{pop.result(60)['popped']} pops in order, and a time-out"


def check_idle(c, a, count):
    """Traffic with pauses in which both ends sleep."""
    s = c.server()
    w = [c.client("idler", s, seed=a.seed + i, count=count) for i in range(2)]
    return f"{sum(x.result(120)['rounds'] for x in w)} rounds with pauses"


def check_replica(c, a, count, seconds):
    """A replica attached while writes go on, compared in full at the end."""
    # Most is sent while a child of the primary saves its memory on the same processors.
    c.wanted = 0.75
    one = c.server()
    # To its primary it is a client.
    two = c.replica()
    # fmt: off
    writers = [
        c.client("setget", one, seed=a.seed + i, count=count // 2, keys=400, seconds=seconds) for i in range(2)
    ]
    # fmt: on
    time.sleep(0.4)
    if ask(two.port, "REPLICAOF", "127.0.0.1", one.port) != "+OK":
        raise Failed("REPLICAOF")
    for w in writers:
        w.result(seconds + 120)
    until = time.monotonic() + 90
    while True:
        p, r = one.info("replication"), two.info("replication")
        if r.get("master_link_status") == "up" and r["slave_repl_offset"] == p["master_repl_offset"]:
            break
        if time.monotonic() > until:
            raise Failed(f"the replica did not catch up: {r}")
        time.sleep(0.1)
    if two.info("stats").get("sync_full", "0") != "0" or one.info("stats")["sync_full"] != "1":
        raise Failed(f"{one.info('stats')['sync_full']} full synchronisations, expected 1: {one.tail()}")
    # Where nothing is to be on rings the replica, preloaded as clients are, must meet none of them.
    look = c.client if c.setting.rings else c.onlooker
    n = look("compare", one, other=two.port).result(120)["keys"]
    return f"{n} keys equal on both, digests equal"


def check_bench(c, a, runs):
    """redis-benchmark with several numbers of clients, with and without pipelining."""
    s = c.server()
    texts = []
    for clients, pipeline, n in runs:
        # fmt: off
        cmd = [
            "redis-benchmark", "-h", "127.0.0.1", "-p", str(s.port), "-t", "set,get", "-c", str(clients),
            "-P", str(pipeline), "-n", str(n), "-d", "512", "-r", "10000", "--csv",
        ]
        # fmt: on
        p = subprocess.Popen(
            cmd,
            env=c.reports.env(c.setting.client, c.setting.client_set),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        c.others.append(p)
        name = f"-c {clients} -P {pipeline}"
        try:
            out, _ = p.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            p.kill()
            p.communicate()
            raise Failed(f"redis-benchmark {name}: hung") from None
        rows = [x for x in out.splitlines() if x.startswith(('"SET"', '"GET"'))]
        if p.returncode != 0 or len(rows) != 2 or "rror" in out:
            raise Failed(f"redis-benchmark {name}: status {p.returncode}: {out[-300:]}")
        text = f"{name}: " + "/".join(str(int(float(x.split(",")[1].strip('"')))) for x in rows)
        if c.setting.rings:
            t, silent = c.reports.totals([p.pid])
            if silent:
                raise Failed(f"redis-benchmark {name}: no report")
            if share(t) < c.wanted:
                n_up = f"{t['upgraded']} of {t['connections']} upgraded"
                raise Low(f"redis-benchmark {name}: {share(t) * 100:.2f} % on rings, {n_up}")
            text += f" {share(t) * 100:.1f} %"
        texts.append(text)
    return "ops/s SET/GET " + ", ".join(texts)


# Each connection begins on TCP, and every test of redis-benchmark has new ones: to have 99 % of
# the bytes on rings each needs some thousand calls.
BENCH_FAST = ((1, 1, 60_000), (50, 1, 200_000), (50, 16, 2_000_000))
BENCH_FULL = (
    (1, 1, 50_000),
    (50, 1, 400_000),
    (500, 1, 2_000_000),
    (1, 16, 300_000),
    (50, 16, 3_000_000),
    (500, 16, 20_000_000),
)
BENCH_VARIANT = ((1, 1, 2_000), (50, 1, 20_000), (500, 16, 100_000))


def plan(a):
    """All checks: (name, setting, function, its further arguments)."""
    lib = a.preload
    both = Setting("", lib, lib, rings=lib is not None)
    fast = not a.full
    big = dict(count=a.count, procs=a.procs, seconds=a.max_seconds)
    checks = [
        ("setget", both, check_setget, big),
        ("setget-bgsave", both, check_setget, dict(count=8_000 if fast else 40_000, procs=3, seconds=59, saves=3)),
        ("monitor", both, check_monitor, dict(count=20_000 if fast else 60_000)),
        ("pubsub", both, check_pubsub, dict(count=8_000 if fast else 40_000)),
        ("blocking-pops", both, check_pops, dict(count=6_000 if fast else 20_000)),
        ("idle", both, check_idle, dict(count=2_500 if fast else 10_000)),
        ("replica", both, check_replica, dict(count=2_000 if fast else 20_000, seconds=50)),
        ("benchmark", both, check_bench, dict(runs=BENCH_FAST if fast else BENCH_FULL)),
    ]
    if lib is None:
        return checks
    none = {"RINGSOCK_LINKS": "none"}
    other = {"RINGSOCK_TEST_PROTOCOL": "4000"}
    variants = (
        Setting("server-only", lib, None),
        Setting("client-only", None, lib),
        Setting("links-none", lib, lib, none, none),
        Setting("server-links-none", lib, lib, none, None),
        Setting("other-version-server", lib, lib, other, None),
        Setting("other-version-client", lib, lib, None, other),
    )
    for v in variants:
        checks += [
            (f"{v.name}/setget", v, check_setget, dict(count=400 if fast else 4_000, procs=2, seconds=59, saves=1)),
            (f"{v.name}/pubsub", v, check_pubsub, dict(count=1_000)),
            (f"{v.name}/blocking-pops", v, check_pops, dict(count=500)),
            (f"{v.name}/benchmark", v, check_bench, dict(runs=BENCH_VARIANT)),
        ]
        if not fast:
            checks += [
                (f"{v.name}/monitor", v, check_monitor, dict(count=2_000)),
                (f"{v.name}/replica", v, check_replica, dict(count=2_000, seconds=50)),
            ]
    return checks


def run_one(name, setting, function, more, a, python, folder):
    """One check; whether it passed. Where it takes a second or two, as in the fast tier, a pause of the machine while
    connections move is a good part of it: that alone gets another try."""
    place = os.path.join(folder, name.replace("/", "-"))
    for last, at in [(True, place)] if a.full else [(False, place), (True, place + "-again")]:
        c = Check(setting, python, at, WANTED_SHARE_FULL if a.full else WANTED_SHARE_FAST)
        try:
            return attempt(name, function, more, a, c)
        except Low as e:
            print(f"{'FAIL' if last else 'AGAIN'} {name}: {e}", flush=True)
        finally:
            c.stop()
            for p in c.others:
                stop(p, 1)
    return False


def attempt(name, function, more, a, c):
    """As `run_one`, for one try."""
    began = time.monotonic()
    try:
        text = function(c, a, **more)
        text += "; " + c.verdict()
        print(f"PASS {name}: {text} ({time.monotonic() - began:.1f} s)", flush=True)
        return True
    except Low:
        raise
    except Failed as e:
        print(f"FAIL {name}: {e}", flush=True)
    except Exception:  # a check that breaks has failed, and the others go on
        print(f"FAIL {name}: {traceback.format_exc(limit=3)}", flush=True)
    return False


def main():
    """Runs the checks."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--preload", default=default_preload(), help="path of the library, or `none`")
    ap.add_argument("--count", type=int, help="SET/GET of random values (8,000; with --full 1,000,000)")
    ap.add_argument("--procs", type=int, default=4, help="client processes for them")
    ap.add_argument("--max-seconds", type=float, help="bound of that check (59; with --full 600)")
    ap.add_argument("--full", action="store_true", help="larger counts")
    ap.add_argument("--only", default="", help="only checks whose name contains this")
    ap.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    ap.add_argument("--setup-only", action="store_true", help="make the virtual environment and end")
    a = ap.parse_args()
    python = venv_python(["redis"], [PACKAGE])
    if a.setup_only:
        return 0
    a.count = a.count or (1_000_000 if a.full else 8_000)
    a.max_seconds = a.max_seconds or (600 if a.full else 59)
    if a.preload == "none":
        a.preload = None
    else:
        a.preload = os.path.abspath(a.preload)
        if not os.path.exists(a.preload):
            print(f"FAIL {a.preload} is missing: cargo build --release")
            print("0 passed, 1 failed")
            return 1
    print(f"seed {a.seed}", flush=True)
    passed = failed = 0
    watchdog = threading.Timer(2400, lambda: os._exit(124))
    watchdog.daemon = True
    watchdog.start()
    with workplace("redis-check-") as folder:
        for name, setting, function, more in plan(a):
            if a.only not in name:
                continue
            if run_one(name, setting, function, more, a, python, folder):
                passed += 1
            else:
                failed += 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
