#!/usr/bin/env python3
"""`ringsock bench`, run for real with short measurements: every experiment
must run, its bytes must go over rings, and the report must be a sound page
that shows a chart for every experiment, without an error in the console of a
headless browser (if one is installed).

Prints PASS, FAIL and SKIP lines, then `N passed, N failed, N skipped`."""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

from preload_lib import clean_env, target_dir, workplace

SVG = "{http://www.w3.org/2000/svg}svg"
# Share of the bytes on rings at which a point counts as measured on rings. Measurements are short here: what
# goes over TCP before the rings are there weighs more, most of all where many threads share the processors.
SHARE = 0.9
LESS = {
    "setup": 0,  # connections that are not worth a ring
    "log-24": 0,
    "log-produce": 0.5,
    "log-batching": 0.5,
    "log-end-to-end": 0.5,
    "channel": 0.5,
    "channel-threads": 0.5,
    "window": 0.5,
    "netty-trips": 0.5,
    "netty-throughput": 0.5,
    "pubsub-rate": 0.5,
    "relay": 0.5,
}


def check_run(a, folder):
    """Runs the command."""
    cmd = [os.path.join(target_dir(), "release", "ringsock"), "bench", "--quick", "--out", folder]
    cmd += ["--rounds", str(a.rounds), "--seconds", str(a.seconds)]
    if a.only:
        cmd += ["--only", a.only]
    began = time.monotonic()
    r = subprocess.run(cmd, env=clean_env(), capture_output=True, text=True, timeout=a.limit, cwd=folder)
    failed = [x.strip() for x in r.stdout.splitlines() if "FAILED" in x]
    assert r.returncode == 0 and not failed, f"status {r.returncode}: {failed[:3]} {r.stderr[-300:]}"
    return f"{time.monotonic() - began:.0f} s"


def check_data(a, folder):
    """JSON and CSV: all experiments, all points, bytes on rings."""
    with open(os.path.join(folder, "report.json"), encoding="utf-8") as f:
        data = json.load(f)
    points = 0
    low = []
    for e in data["experiments"]:
        assert e["points"], e["name"]
        for p in e["points"]:
            assert p["results"] and not p["failed"], (e["name"], p["x"], p["failed"])
            assert any(r["metric"] == "cpu_msg" for r in p["results"]), (e["name"], "no processor time")
            points += 1
            if p["share_on_rings"] < LESS.get(e["name"], SHARE):
                low.append(f"{e['name']} {p['x']} {p['share_on_rings']:.3f}")
    assert not low, f"too few bytes on rings: {low}"
    for key in ("processor", "cores", "kernel", "ringsock", "settings", "rdma_devices"):
        assert key in data["machine"], key
    with open(os.path.join(folder, "report.csv"), encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert len({(r["experiment"], r["point"]) for r in rows}) == points
    return f"{len(data['experiments'])} experiments, {points} points, {len(rows)} lines"


def check_page(a, folder):
    """The page is well-formed, loads nothing, and has a chart in every section."""
    with open(os.path.join(folder, "report.html"), encoding="utf-8") as f:
        text = f.read()
    head, body = text.split("\n", 1)
    assert head == "<!DOCTYPE html>", head
    page = ElementTree.fromstring(body)
    charts = sum(1 for _ in page.iter(SVG))
    sections = [h.attrib["id"] for h in page.iter("h2")]
    assert sections and charts >= 2 * len(sections), f"{charts} charts for {sections}"
    for loads in ("<script", " src=", "@import", "url("):
        assert loads not in text, loads
    return f"{len(sections)} sections, {charts} charts"


def check_browser(a, folder):
    """A headless browser shows every chart and says nothing in its console."""
    browser = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)
    if browser is None:
        return None
    # fmt: off
    cmd = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
        f"--user-data-dir={folder}/profile", "--virtual-time-budget=3000", "--dump-dom",
        f"file://{folder}/report.html",
    ]
    # fmt: on
    r = subprocess.run(cmd, env=clean_env({"HOME": folder}), capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, f"status {r.returncode}: {r.stderr[-300:]}"
    said = [x for x in r.stderr.splitlines() if ":CONSOLE" in x]
    assert not said, said[:3]
    charts, sections = r.stdout.count("<svg"), r.stdout.count("<h2")
    assert sections and charts >= 2 * sections, f"{charts} charts in {sections} sections"
    return f"{charts} charts shown, nothing in the console"


def main():
    """Runs the checks in order."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="experiments, as `ringsock bench --only` takes them")
    ap.add_argument("--rounds", type=int, default=1)
    ap.add_argument("--seconds", type=float, default=0.2)
    ap.add_argument("--limit", type=float, default=600, help="seconds that the command may take")
    a = ap.parse_args()
    count = {"PASS": 0, "FAIL": 0, "SKIP": 0}
    with workplace("bench-check-") as folder:
        for f in (check_run, check_data, check_page, check_browser):
            try:
                text = f(a, os.path.abspath(folder))
                verdict = "SKIP" if text is None else "PASS"
                text = text or "no browser is installed"
            except (AssertionError, OSError, KeyError, ValueError, subprocess.SubprocessError) as e:
                verdict, text = "FAIL", f"{type(e).__name__}: {e}"
            except ElementTree.ParseError as e:
                verdict, text = "FAIL", f"not well-formed: {e}"
            count[verdict] += 1
            print(f"{verdict} {f.__name__[6:]}: {text}", flush=True)
    print(f"{count['PASS']} passed, {count['FAIL']} failed, {count['SKIP']} skipped")
    return 1 if count["FAIL"] or not count["PASS"] else 0


if __name__ == "__main__":
    sys.exit(main())
