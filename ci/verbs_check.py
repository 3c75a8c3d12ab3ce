#!/usr/bin/env python3
"""What the verbs link costs beside a queue pair alone, in a machine whose clock
counts instructions (`ci/rdma-vm run --count`), against what it cost when
docs/verbs.json was written: none of the figures may be more than 5 % worse.
And what `send` and `recv` cost beside rsocket's, in instructions.

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
from vm_lib import install

HERE = os.path.dirname(os.path.abspath(__file__))
REFERENCE = os.path.join(HERE, "..", "docs", "verbs.json")
WORSE = 1.05
# Streams of small messages vary with who runs when, by a factor of two: so much of raw verbs passes whatever the reference says.
ENOUGH = {"stream 64": 4.0, "stream 1024": 3.0}


def measure():
    """The table: name of a row, and how much better than raw verbs it is (below 1: worse); and names of calls, with the
    instructions that they take in user space, ours and rsocket's."""
    bench = os.path.join(target_dir(), "release", "rs-bench")
    with tempfile.NamedTemporaryFile(dir=target_dir(), suffix=".json") as f:
        cmd = [os.path.join(HERE, "rdma-vm"), "run", "-t", "1200", "--count", "--", bench, "--verbs", "--calls", "--quick"]
        subprocess.run([*cmd, "--json", f.name], cwd=target_dir(), check=True, timeout=1300)
        rows = json.load(f)
    better, calls = {}, {}
    for r in rows:
        if "raw" in r:
            ratio = r["raw"] / r["ringsock"] if r["unit"] == "us" else r["ringsock"] / r["raw"]
            better[f"{r['kind']} {r['size']}"] = round(ratio, 3)
        elif r["unit"] == "instructions":
            for call, ours, theirs in zip(["send", "recv"], r["ringsock"], r["rsocket"]):
                calls[f"{call} of {r['size']}, {r['kind']}"] = (ours, theirs)
    return better, calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the reference anew")
    options = parser.parse_args()
    subprocess.run([os.path.join(HERE, "rdma-vm"), "setup"], check=True)
    install("verbs_check", ["valgrind", "libc6-dbg"])
    now, calls = measure()
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
    for name, (ours, theirs) in calls.items():
        good = ours <= theirs * WORSE
        failed += not good
        print(f"{'PASS' if good else 'FAIL'} {name}: {ours:.0f} instructions, rsocket's {theirs:.0f}")
    if not calls:
        failed += 1
        print("FAIL calls: nothing was counted")
    print(f"{len(reference) + (len(calls) or 1) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
