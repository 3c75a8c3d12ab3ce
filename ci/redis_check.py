#!/usr/bin/env python3
"""Unmodified Redis and unmodified clients, preloaded: every value that is
written is read back and compared, and the reports must show that the bytes
went over rings (or, in the variants, that they did not).

With `--links verbs`, in a machine of ci/rdma-vm, the same over RDMA, without
the variants: with servers of its own, or with those that `--serve` starts in
another machine.

Prints one PASS or FAIL line for each check, then `N passed, N failed`."""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback

# fmt: off
from preload_lib import (
    Reports, all_bytes, default_preload, ring_bytes, share, stat, stop, summed, venv_python, workplace,
)
# fmt: on
from redis_lib import Server
from redis_remote import Remote, serve

PACKAGE = "redis>=5,<6"
# Each connection begins on TCP, which weighs more in a short run on a busy machine.
WANTED_SHARE_FULL = 0.99
WANTED_SHARE_FAST = 0.95
HERE = os.path.dirname(os.path.abspath(__file__))
# A slow reader is waited for, not given up.
OPTIONS = ("--client-output-buffer-limit", "pubsub 0 0 0", "--client-output-buffer-limit", "replica 0 0 0")
# Where redis-benchmark is to begin slowly: how often it gets no answer for a while, and for how many clients all of these
# take a second longer.
PAUSES = 15
PAUSE_CLIENTS = 50


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


class Pace:
    """How long things may take, and for how many seconds clients begin slowly."""

    def __init__(self, patience=1, start=0):
        self.patience, self.start = patience, start


# An emulated processor is so many times slower, to be sure; and until there is a queue pair, for a second or two there,
# bytes go by TCP. So clients begin as those do that stay for hours: with a few small messages.
VERBS_PACE = Pace(5, 5)


class Client:
    """One process that plays a role."""

    def __init__(self, check, role, server, args, lib):
        self.role = role
        self.preloaded = lib is not None
        self.patience = check.pace.patience
        if check.pace.start:
            args["start"] = check.pace.start
        self.proc = subprocess.Popen(
            [check.python, os.path.join(HERE, "redis_roles.py"), role, server.host, str(server.port), json.dumps(args)],
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
        seconds *= self.patience
        try:
            out, err = self.proc.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.role}: still running after {seconds} s") from None
        if self.proc.returncode != 0:
            raise Failed(f"{self.role}: status {self.proc.returncode}: {' '.join(err.strip().splitlines()[-2:])}")
        return json.loads(out.strip().splitlines()[-1])


class Check:
    """One check: servers and clients under one setting, then what the reports say."""

    def __init__(self, setting, python, folder, wanted, pace, remote=None):
        self.setting, self.python = setting, python
        self.reports = Reports(folder)
        self.servers, self.clients, self.others = [], [], []
        self.wanted, self.pace, self.remote = wanted, pace, remote

    def server(self):
        """Starts a server, in the other machine if there is one."""
        lib, settings = self.setting.server, self.setting.server_set
        if self.remote:
            return self.one_more(lib, self.remote.server(lib, settings, OPTIONS))
        return self.one_more(lib, Server(self.reports, lib, settings, OPTIONS))

    def replica(self):
        """Starts a server that is preloaded as clients are, where they are."""
        lib = self.setting.client
        return self.one_more(lib, Server(self.reports, lib, self.setting.client_set, OPTIONS))

    def one_more(self, lib, server):
        """Notes a server that has been started with that library."""
        server.preloaded = lib is not None
        self.servers.append(server)
        return server

    def client(self, role, server, **args):
        """Starts a client."""
        return Client(self, role, server, args, self.setting.client)

    def onlooker(self, role, server, **args):
        """Starts a client that is not preloaded."""
        return Client(self, role, server, args, None)

    def stop(self):
        """Ends all processes; the statuses of the servers."""
        for c in self.clients:
            stop(c.proc, 5)
        return [s.stop() for s in self.servers]

    def evidence(self):
        """What the library says of those that still run, and what servers wrote last."""
        lib = self.setting.client
        running = [(c.role, c.proc) for c in self.clients if c.preloaded]
        running += [("redis-benchmark", p) for p in self.others if lib]
        lines = [f"{name}: {stat(lib, p.pid)}" for name, p in running if p.poll() is None]
        for s in self.servers:
            lines += [f"server: {s.stat()}"] if s.preloaded and s.status() is None else []
            lines.append(f"end of a server's log: {s.tail()}")
        return lines

    def complaints(self):
        """What the library complained of, here and in servers of another machine."""
        there = [line for s in self.servers for line in s.complaints()]
        return list(dict.fromkeys(self.reports.logs() + there))[:10]

    def verdict(self):
        """Stops all and reads the reports; returns the text for the PASS line."""
        for s in self.servers:
            if s.status() is not None:
                raise Failed(f"the server ended by itself with {s.status()}: {s.tail()}")
        for status in self.stop():
            if status != 0:
                raise Failed(f"a server ended with status {status} on SIGTERM")
        servers = [s.report() for s in self.servers if s.preloaded]
        client_pids = [c.proc.pid for c in self.clients if c.preloaded]
        client_pids += [p.pid for p in self.others] if self.setting.client else []
        clients = [self.reports.of(pid) for pid in client_pids]
        if not servers + clients:
            return "not preloaded"
        texts = []
        moved = []
        for who, reports in (("server", servers), ("clients", clients)):
            if not reports:
                continue
            if None in reports:
                raise Failed(f"{reports.count(None)} of {len(reports)} reports of {who} are missing")
            t = summed(reports)
            if t["connections"] == 0 or all_bytes(t) == 0:
                raise Failed(f"the report of {who} shows no traffic: {t}")
            text = f"{who} {share(t) * 100:.2f} % of {all_bytes(t) / 1e6:.1f} MB on rings"
            if not self.setting.rings and (ring_bytes(t) or t["upgraded"]):
                raise Failed(f"{text}, expected none: {t}")
            if self.setting.rings:
                text += f" ({t['upgraded']} of {t['connections']} connections, {t['returns']} returns)"
                if share(t) < self.wanted:
                    raise Low(text)
            texts.append(text)
            moved.append(all_bytes(t))
        # What the clients counted the server must have counted; it also had a few questions of ours.
        if len(moved) == 2 and len(self.servers) == 1 and not 0 <= moved[0] - moved[1] <= 1 << 20:
            raise Failed(f"the ends count differently: {'; '.join(texts)}")
        return "; ".join(texts)


# The checks. Each returns what it did, in a few words.


def check_setget(c, a, count, procs, seconds, least=0, saves=0):
    """SET and GET of random values from several processes, BGSAVE in the middle."""
    s = c.server()
    # fmt: off
    workers = [
        c.client("setget", s, seed=a.seed + i, count=count // procs, keys=max(50, 2000 // procs), seconds=seconds)
        for i in range(procs)
    ]
    # fmt: on
    saved = 0
    if saves:
        time.sleep(c.pace.start)
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
    if done < least // procs * procs:
        raise Failed(f"only {done} of {count} in {seconds} s")
    text = f"{done} SET, {sum(g['read'] for g in got)} values read back and equal, "
    text += f"{sum(g['bytes'] for g in got) / 1e6:.0f} MB of values"
    return text + (f", {max(saved, 1)} BGSAVE" if saves else "")


def bgsave(s):
    """One BGSAVE, awaited; the file must be sound."""
    mark = ("rdb_last_save_time", "rdb_saves")
    before = [s.info("persistence").get(k) for k in mark]
    if not s.ask("BGSAVE").startswith("+Background saving started"):
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
    fault = s.rdb_fault()
    if fault:
        raise Failed(f"redis-check-rdb: {fault}")


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
    while s.ask("PUBSUB", "NUMPAT") != ":1" and time.monotonic() < until:
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
    if not c.pace.start:
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
    time.sleep(c.pace.start + 0.4)
    if two.ask("REPLICAOF", one.host, one.port) != "+OK":
        raise Failed("REPLICAOF")
    for w in writers:
        w.result(seconds + 120)
    until = time.monotonic() + 90 * c.pace.patience
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
    n = look("compare", one, other=[two.host, two.port]).result(120)["keys"]
    return f"{n} keys equal on both, digests equal"


def check_bench(c, a, runs):
    """redis-benchmark with several numbers of clients, with and without pipelining."""
    s = c.server()
    texts = []
    for clients, pipeline, n in runs:
        name = f"-c {clients} -P {pipeline}"
        ran = [benchmark(c, s, test, clients, pipeline, n) for test in ("set", "get")]
        text = f"{name}: " + "/".join(str(rate) for _, rate in ran)
        if c.setting.rings:
            t, silent = c.reports.totals([pid for pid, _ in ran])
            if silent:
                raise Failed(f"redis-benchmark {name}: no report")
            text += f" {share(t) * 100:.2f} %"
            if share(t) < c.wanted:
                texts.append(text)
                n_up = f"{t['upgraded']} of {t['connections']} upgraded"
                raise Low(f"redis-benchmark {name}: {share(t) * 100:.2f} % on rings, {n_up}; {', '.join(texts)}")
        texts.append(text)
    return "ops/s SET/GET " + ", ".join(texts)


def benchmark(c, s, test, clients, pipeline, n):
    """Runs redis-benchmark once: its process id, and how many requests it had answered in a second."""
    # fmt: off
    cmd = [
        "redis-benchmark", "-h", s.host, "-p", str(s.port), "-t", test, "-c", str(clients),
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
    name = f"{test} -c {clients} -P {pipeline}"
    if c.pace.start:
        hold_back(s, c.pace.start + clients / PAUSE_CLIENTS)
    try:
        out, _ = p.communicate(timeout=240 * c.pace.patience)
    except subprocess.TimeoutExpired:
        raise Failed(f"redis-benchmark {name}: hung") from None
    rows = [x for x in out.splitlines() if x.startswith(f'"{test.upper()}"')]
    if p.returncode != 0 or len(rows) != 1 or "rror" in out:
        raise Failed(f"redis-benchmark {name}: status {p.returncode}: {out[-300:]}")
    return p.pid, int(float(rows[0].split(",")[1].strip('"')))


def hold_back(s, seconds):
    """Lets redis-benchmark, too, begin slowly: what a server is asked it answers once in a while."""
    for _ in range(PAUSES):
        # Even the next of these waits until the pause before it is over.
        s.ask("CLIENT", "PAUSE", int(1000 * seconds / PAUSES), "ALL", timeout=60)


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
# As much as the link's beginning is not more than a hundredth of.
BENCH_VERBS = (
    (1, 1, 20_000),
    (50, 1, 100_000),
    (500, 1, 500_000),
    (1, 16, 100_000),
    (50, 16, 800_000),
    (500, 16, 5_000_000),
)
BENCH_VARIANT = ((1, 1, 2_000), (50, 1, 20_000), (500, 16, 100_000))


def some(count, procs, seconds=59, saves=0):
    """The arguments of a `check_setget` that must come to its end."""
    return dict(count=count, procs=procs, seconds=seconds, least=count, saves=saves)


def plan_verbs(a):
    """As `plan`, for machines with an emulated processor and a software device."""
    settings = {"RINGSOCK_LINKS": a.links}
    both = Setting("", a.preload, a.preload, settings, settings, rings=True)
    return [
        ("setget", both, check_setget, some(a.count, a.procs, a.max_seconds)),
        ("setget-bgsave", both, check_setget, some(8_000, 3, a.max_seconds, saves=3)),
        ("monitor", both, check_monitor, dict(count=8_000)),
        ("pubsub", both, check_pubsub, dict(count=12_000)),
        ("blocking-pops", both, check_pops, dict(count=3_000)),
        ("idle", both, check_idle, dict(count=3_000)),
        ("replica", both, check_replica, dict(count=10_000, seconds=200)),
        *((f"benchmark-c{run[0]}-p{run[1]}", both, check_bench, dict(runs=[run])) for run in BENCH_VERBS),
    ]


def plan(a):
    """All checks: (name, setting, function, its further arguments)."""
    lib = a.preload
    both = Setting("", lib, lib, rings=lib is not None)
    fast = not a.full
    big = dict(count=a.count, procs=a.procs, seconds=a.max_seconds, least=a.count if a.max_seconds < 60 else 0)
    checks = [
        ("setget", both, check_setget, big),
        ("setget-bgsave", both, check_setget, some(8_000 if fast else 40_000, 3, saves=3)),
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
            (f"{v.name}/setget", v, check_setget, some(400 if fast else 4_000, 2, saves=1)),
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


def run_one(name, setting, function, more, a, python, folder, remote):
    """One check; whether it passed. Where it takes a second or two, as in the fast tier, a pause of the machine while
    connections move is a good part of it: that alone gets another try."""
    place = os.path.join(folder, name.replace("/", "-"))
    full = a.full or a.links
    for last, at in [(True, place)] if full else [(False, place), (True, place + "-again")]:
        wanted = WANTED_SHARE_FULL if full else WANTED_SHARE_FAST
        c = Check(setting, python, at, wanted, VERBS_PACE if a.links else Pace(), remote)
        try:
            return attempt(name, function, more, a, c)
        except Low as e:
            print(f"{'FAIL' if last else 'AGAIN'} {name}: {e}", flush=True)
            explain(c)
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
        tell(c.complaints())
        return True
    except Low:
        raise
    except Failed as e:
        print(f"FAIL {name}: {e}", flush=True)
    except Exception:  # a check that breaks has failed, and the others go on
        print(f"FAIL {name}: {traceback.format_exc(limit=3)}", flush=True)
    explain(c)
    return False


def tell(lines):
    """Prints lines below that of a check."""
    print("".join(f"   {line}\n" for line in lines), end="", flush=True)


def explain(c):
    """Prints what there is to see of a check that failed."""
    try:
        tell(c.complaints() + c.evidence())
    except Exception:  # of what does not answer either
        print(f"   no more to see: {traceback.format_exc(limit=1)}", flush=True)


def address(text):
    """HOST:PORT."""
    host, port = text.rsplit(":", 1)
    return host, int(port)


def main():
    """Runs the checks."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--preload", default=default_preload(), help="path of the library, or `none`")
    ap.add_argument("--count", type=int, help="SET/GET of random values (8,000; --full 1,000,000; --links 45,000)")
    ap.add_argument("--procs", type=int, default=4, help="client processes for them")
    ap.add_argument("--max-seconds", type=float, help="bound of that check (59; --full 600; --links 1,200)")
    ap.add_argument("--full", action="store_true", help="larger counts")
    ap.add_argument("--links", choices=["verbs"], help="over RDMA, in a machine that has it")
    ap.add_argument("--remote", type=address, metavar="HOST:PORT", help="with servers that --serve starts there")
    ap.add_argument("--serve", type=address, metavar="HOST:PORT", help="start servers for another machine, for ever")
    ap.add_argument("--only", default="", help="only checks whose name contains this")
    ap.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    ap.add_argument("--setup-only", action="store_true", help="make the virtual environment and end")
    a = ap.parse_args()
    python = venv_python(["redis"], [PACKAGE])
    if a.setup_only:
        return 0
    if a.serve:
        with workplace("redis-serve-", tempfile.gettempdir()) as folder:
            serve(*a.serve, folder)
    a.count = a.count or (45_000 if a.links else 1_000_000 if a.full else 8_000)
    a.max_seconds = a.max_seconds or (1200 if a.links else 600 if a.full else 59)
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
    watchdog = threading.Timer(2400 * (VERBS_PACE.patience if a.links else 1), lambda: os._exit(124))
    watchdog.daemon = True
    watchdog.start()
    remote = Remote(*a.remote) if a.remote else None
    # A machine's own files are in its memory; the build's folder may be the host's.
    with workplace("redis-check-", tempfile.gettempdir() if a.links else None) as folder:
        for name, setting, function, more in plan_verbs(a) if a.links else plan(a):
            if a.only not in name:
                continue
            if run_one(name, setting, function, more, a, python, folder, remote):
                passed += 1
            else:
                failed += 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
