#!/usr/bin/env python3
"""What the verbs link costs beside a queue pair alone, in a machine whose clock
counts instructions (`ci/rdma-vm run --count`), against what it cost when
docs/verbs.json was written: none of the figures may be more than 5 % worse.

  ci/verbs_check.py            checks
  ci/verbs_check.py --write    writes docs/verbs.json anew

The figures are ratios to raw verbs in the same machine, so that another kernel
or another QEMU changes little. Prints PASS and FAIL lines, then a count."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from preload_lib import target_dir

HERE = os.path.dirname(os.path.abspath(__file__))
REFERENCE = os.path.join(HERE, "..", "docs", "verbs.json")
WORSE = 1.05
# Streams of small messages vary with who runs when, by a factor of two: so much of raw verbs passes whatever the reference says.
ENOUGH = {"stream 64": 4.0, "stream 1024": 3.0}


def measure():
    """The table: name of a row, and how much better than raw verbs it is (below 1: worse)."""
    bench = os.path.join(target_dir(), "release", "rs-bench")
    with tempfile.NamedTemporaryFile(dir=target_dir(), suffix=".json") as f:
        cmd = [os.path.join(HERE, "rdma-vm"), "run", "-t", "900", "--count", "--", bench, "--verbs", "--quick"]
        subprocess.run([*cmd, "--json", f.name], cwd=target_dir(), check=True, timeout=1000)
        rows = json.load(f)
    better = {}
    for r in rows:
        ratio = r["raw"] / r["ringsock"] if r["unit"] == "us" else r["ringsock"] / r["raw"]
        better[f"{r['kind']} {r['size']}"] = round(ratio, 3)
    return better


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the reference anew")
    options = parser.parse_args()
    subprocess.run([os.path.join(HERE, "rdma-vm"), "setup"], check=True)
    now = measure()
    if options.write:
        with open(REFERENCE, "w", encoding="utf-8") as f:
            json.dump(now, f, indent=2)
            f.write("\n")
        return 0
    with open(REFERENCE, encoding="utf-8") as f:
        reference = json.load(f)
    failed = 0
    for name, was in reference.items():
        bar = min(was / WORSE, ENOUGH.get(name, was))
        is_now = now.get(name, 0)
        good = is_now >= bar
        failed += not good
        print(f"{'PASS' if good else 'FAIL'} {name}: {is_now:.3f} of raw verbs, {was:.3f} in docs/verbs.json")
    print(f"{len(reference) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
