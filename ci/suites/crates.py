"""Tests that come with crates: tokio's of TCP and of what stands on it."""

import glob
import json
import os
import re
import shutil
import subprocess

from .frame import FAIL, PASS, SKIP, Unavailable, clean_env, home, run

TOKIO = "1.50.0"
TESTS = re.compile(r"^(tcp_|io_copy_bidirectional|io_driver|io_async_fd|io_split|net_|rt_basic|uds_stream|buffered)")
# For `--pairs`: what may stand on pipes and pairs of Unix sockets.
PROCESSES = re.compile(r"^(process_|signal_|uds_|net_unix|io_async|io_driver|io_copy|io_split|io_read|io_write|rt_|task_blocking|duplex)")
CRATES = {
    "async-process": ["2.5.0"],
    "shared_child": ["1.1.2", "--all-features"],
    "os_pipe": ["1.2.3"],
    "duct": ["1.1.2"],
    "subprocess": ["1.2.3"],
    "polling": ["3.11.0"],
    "signal-hook": ["0.3.18"],
    "nix": ["0.30.1", "--all-features"],
}
UNSTABLE = re.compile(r"panic|loom|wasi|drop")


def source(name, version):
    """A copy of a crate's package, as a workspace of its own."""
    place = os.path.join(home(), f"{name}-{version}")
    if os.path.exists(os.path.join(place, "ci-done")):
        return place
    if not shutil.which("cargo"):
        raise Unavailable("no cargo")
    probe = os.path.join(home(), f"fetch-{name}")
    shutil.rmtree(probe, ignore_errors=True)
    os.makedirs(os.path.join(probe, "src"))
    open(os.path.join(probe, "src", "lib.rs"), "w", encoding="utf-8").close()
    with open(os.path.join(probe, "Cargo.toml"), "w", encoding="utf-8") as f:
        f.write(f'[package]\nname = "fetch"\nversion = "0.0.0"\nedition = "2021"\n[workspace]\n')
        f.write(f'[dependencies]\n{name} = "={version}"\n')
    run(["cargo", "fetch", "-q"], cwd=probe, timeout=300, env=clean_env())
    registry = os.environ.get("CARGO_HOME") or os.path.expanduser("~/.cargo")
    found = glob.glob(os.path.join(registry, "registry", "src", "*", f"{name}-{version}"))
    if not found:
        raise Unavailable(f"{name} {version} is not in cargo's registry")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(found[0], place)
    with open(os.path.join(place, "Cargo.toml"), "a", encoding="utf-8") as f:
        f.write("\n[workspace]\n")
    open(os.path.join(place, "ci-done"), "w", encoding="utf-8").close()
    return place


def unit(name, exe, place_of_source):
    def run_it(place):
        status, text = place.command([exe, "--test-threads=4"], name + ".log", 180, cwd=place_of_source)
        results = {}
        for test, result in re.findall(r"^test (\S+)(?: - should panic)? \.\.\. (ok|FAILED|ignored)", text, re.MULTILINE):
            results[f"{name}:{test}"] = {"ok": PASS, "FAILED": FAIL, "ignored": SKIP}[result]
        if status not in (0, 101):
            results[f"{name}:all"] = FAIL
        return results

    return run_it


def built(crate, place, arguments, prefix=""):
    """A unit for each test program that cargo makes of a crate."""
    env = clean_env({"CARGO_TARGET_DIR": os.path.join(home(), "crates"), "CARGO_PROFILE_DEV_DEBUG": "0"})
    command = ["cargo", *arguments, "-q", "-j2", "--message-format=json"]
    try:
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, timeout=1200, check=False)
    except subprocess.TimeoutExpired as e:
        raise Unavailable(f"building {crate}'s tests takes too long") from e
    units = []
    for line in done.stdout.splitlines():
        try:
            m = json.loads(line)
        except ValueError:
            continue
        if m.get("executable") and m.get("profile", {}).get("test"):
            name = prefix + m["target"]["name"]
            units.append((name, unit(name, m["executable"], place)))
    if not units:
        raise Unavailable(f"{crate}'s tests did not build: " + done.stderr.decode(errors="replace")[-300:])
    return units


def tokio(tests_of):
    place = source("tokio", TOKIO)
    tests = sorted(os.path.basename(p)[:-3] for p in glob.glob(os.path.join(place, "tests", "*.rs")))
    tests = [t for t in tests if tests_of.search(t) and not UNSTABLE.search(t)]
    wanted = [x for t in tests for x in ("--test", t)]
    return built("tokio", place, ["build", "--keep-going", "--features", "full", *wanted])


def prepare():
    return tokio(TESTS)


def prepare_processes():
    units = tokio(PROCESSES)
    for name, (version, *options) in CRATES.items():
        try:
            units += built(name, source(name, version), ["build", "--keep-going", "--tests", "--bins", *options], name + "-")
        except Unavailable as e:
            print(f"SKIP rust-processes: {name}: {e}", flush=True)
    return units
