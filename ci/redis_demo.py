#!/usr/bin/env python3
"""redis-server under redis-benchmark, on kernel TCP and with ringsock in
turn; prints one table. Called by ci/demo."""

import argparse
import csv
import io
import os
import subprocess
import sys
import time

from preload_lib import Reports, default_preload, share, workplace
from redis_lib import Server

SIZES = ((16, "16 B"), (1024, "1 KiB"), (65536, "64 KiB"))
CLIENTS = (1, 50, 500)
TESTS = ("SET", "GET")


def bench(server, reports, preload, test, clients, size, requests):
    """One run: (operations per second, p50 in ms, p99 in ms, share of bytes on rings)."""
    # fmt: off
    cmd = [
        "redis-benchmark", "-h", "127.0.0.1", "-p", str(server.port), "-t", test.lower(),
        "-c", str(clients), "-d", str(size), "-n", str(requests), "-r", "1000", "--csv",
    ]
    # fmt: on
    p = subprocess.Popen(
        cmd,
        env=reports.env(preload),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = p.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        p.kill()
        p.communicate()
        raise SystemExit(f"demo: {' '.join(cmd)} hung") from None
    rows = [r for r in csv.DictReader(io.StringIO(out)) if r.get("test") == test]
    if p.returncode != 0 or not rows:
        raise SystemExit(f"demo: {' '.join(cmd)} failed: {out}{err}")
    row = rows[0]
    # Redis 6 gives the rate only.
    ms = [float(row[k]) if row.get(k) else None for k in ("p50_latency_ms", "p99_latency_ms")]
    totals, silent = reports.totals([p.pid])
    if preload and silent:
        raise SystemExit("demo: the preloaded redis-benchmark wrote no report")
    return float(row["rps"]), ms[0], ms[1], share(totals)


def mean(values):
    """The mean, or None if there are no values."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def us(ms):
    """Milliseconds as text in microseconds."""
    return "-" if ms is None else f"{ms * 1000:.0f}"


def main():
    """Measures and prints."""
    ap = argparse.ArgumentParser()
    ap.add_argument("--preload", default=default_preload())
    ap.add_argument("--seconds", type=float, default=1.2, help="aimed length of one run on kernel TCP")
    a = ap.parse_args()
    if not os.path.exists(a.preload):
        raise SystemExit(f"demo: {a.preload} is missing: cargo build --release")
    began = time.monotonic()
    head = f"{'test':4} {'clients':>7} {'size':>7} {'plain op/s':>10} {'ring op/s':>10} {'ratio':>6}"
    head += f" {'p50 plain/ring us':>17} {'p99 plain/ring us':>17} {'on rings':>8}"
    print("redis-benchmark against redis-server, both ends on kernel TCP (plain) or preloaded (ring),")
    print("runs in turn plain, ring, plain, ring; means of two runs; every run has fresh connections\n")
    print(head, flush=True)
    with workplace("demo-") as folder:
        reports = Reports(folder)
        plain = ring = None
        try:
            plain, ring = Server(reports), Server(reports, a.preload)
            for size, label in SIZES:
                for clients in CLIENTS:
                    for test in TESTS:
                        probe = bench(plain, reports, None, test, clients, size, 4 * clients + 500)
                        # More clients need more requests: each connection begins on TCP.
                        n = int(probe[0] * a.seconds * (1.6 if clients >= 500 else 1))
                        runs = {None: [], a.preload: []}
                        for which in (None, a.preload) * 2:
                            server = ring if which else plain
                            runs[which].append(bench(server, reports, which, test, clients, size, n))
                        p, r = ([mean(x) for x in zip(*runs[k])] for k in (None, a.preload))
                        print(
                            f"{test:4} {clients:7} {label:>7} {p[0]:10.0f} {r[0]:10.0f} {r[0] / p[0]:6.2f}"
                            f" {us(p[1]) + ' / ' + us(r[1]):>17} {us(p[2]) + ' / ' + us(r[2]):>17}"
                            f" {r[3] * 100:7.1f}%",
                            flush=True,
                        )
        finally:
            for s in (plain, ring):
                if s:
                    s.stop()
        totals, silent = reports.totals([ring.pid])
        if not silent:
            text = f"{totals['upgraded']} of {totals['connections']} connections moved to rings"
            print(f"\nThe preloaded server's own report: {text}, {share(totals) * 100:.1f} % of its bytes.")
        for line in reports.logs()[:5]:
            print(f"log: {line}")
    print(f"({os.cpu_count()} cores, {time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    sys.exit(main())
