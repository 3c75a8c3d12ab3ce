"""What the suites share: variants, sources, builds, and units of work.

A suite is a list of units, each a function that runs some of the suite's
tests in an environment and gives their results. All units of all variants
are independent; each command runs with a network and a /tmp of its own where
that can be had (root), so that fixed ports and fixed names do not meet."""

import glob
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "ci"))

from preload_lib import clean_env, target_dir  # noqa: E402

PASS, FAIL, SKIP = "pass", "fail", "skip"

# Connections move at once, or at random moments.
VARIANTS = {
    "native": None,
    "rings": {"RINGSOCK_UPGRADE_AFTER": "0", "RINGSOCK_UPGRADE_BYTES": "0"},
    "chaos": {"RINGSOCK_CHAOS": "{seed}"},
}


# Runs "$@" with an empty /tmp that nobody else has, and a loopback of its own where there is one: first the folder where
# that is made, then what stays visible below /tmp, then "--". All of it goes with the last process.
APART = """
set -e
ip link set lo up
new=$1
shift
mount -t tmpfs -o mode=1777 apart "$new"
while [ "$1" != -- ]; do
    mkdir -p "$new${1#/tmp}"
    mount --bind "$1" "$new${1#/tmp}"
    shift
done
shift
mount --move "$new" /tmp
# A relative path begins where it is now.
cd "$PWD"
exec "$@"
"""


class Unavailable(Exception):
    """The suite cannot be had here."""


def home():
    """Where sources and builds are kept between runs, below the build's folder."""
    path = os.path.join(target_dir(), "ci-suites")
    os.makedirs(path, exist_ok=True)
    return path


def run(command, log=None, timeout=600, cwd=None, env=None):
    """Runs a command that must work."""
    out = open(log, "ab") if log else subprocess.PIPE
    try:
        r = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=timeout, cwd=cwd, env=env, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Unavailable(f"{command[0]}: {e}") from e
    finally:
        if log:
            out.close()
    if r.returncode != 0:
        said = "" if log else r.stdout.decode(errors="replace")[-300:]
        raise Unavailable(f"{' '.join(command[:4])} ended with {r.returncode} {said} {log or ''}")
    return "" if log else r.stdout.decode(errors="replace")


def installed(package):
    """Whether a Debian package is there."""
    r = subprocess.run(["dpkg-query", "-W", "-f", "${db:Status-Status}", package], capture_output=True, check=False)
    return r.stdout == b"installed"


def need(*packages):
    """Installs Debian packages, as root."""
    missing = [p for p in packages if not installed(p)]
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Unavailable("not installed: " + " ".join(missing))
    env = clean_env({"DEBIAN_FRONTEND": "noninteractive"})
    lock = ["-o", "DPkg::Lock::Timeout=300"]
    install = ["apt-get", *lock, "install", "-y", "-qq", "--no-install-recommends", *missing]
    try:
        run(install, env=env, timeout=900)
    except Unavailable:
        run(["apt-get", *lock, "update", "-qq"], env=env, timeout=300)
        run(install, env=env, timeout=900)


def debian_source(package):
    """The unpacked source of a Debian package; the system's own lists are left as they are."""
    place = os.path.join(home(), package)
    there = [d for d in glob.glob(os.path.join(place, "*")) if os.path.isdir(os.path.join(d, "debian"))]
    if there:
        return there[0]
    if not shutil.which("apt-get"):
        raise Unavailable("no apt-get")
    need("dpkg-dev")
    shutil.rmtree(place, ignore_errors=True)
    for folder in ("lists/partial", "source"):
        os.makedirs(os.path.join(place, folder))
    form = "$(SITE) $(RELEASE) $(COMPONENT)"
    lines = set(run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"]).split("\n"))
    keys = glob.glob("/usr/share/keyrings/*archive-keyring.gpg")
    signed = f"[signed-by={','.join(keys)}] " if keys else ""
    lines = [f"deb-src {signed}{line}\n" for line in sorted(lines) if line.count(" ") == 2]
    own = ["-o", f"Dir::Etc::SourceList={place}/sources.list", "-o", "Dir::Etc::SourceParts=/dev/null"]
    own += ["-o", f"Dir::State::Lists={place}/lists", "-o", f"Dir::Cache={place}", "-o", "APT::Sandbox::User=root"]
    # A mirror of the security archive may lack the sources that its own list names.
    for wanted in lines, [line for line in lines if "-security" not in line]:
        with open(os.path.join(place, "sources.list"), "w", encoding="utf-8") as f:
            f.writelines(wanted)
        run(["apt-get", *own, "update", "-qq"], timeout=300)
        try:
            run(["apt-get", *own, "source", "-qq", package], cwd=place, timeout=300)
            break
        except Unavailable as e:
            why = e
    else:
        raise why
    there = [d for d in glob.glob(os.path.join(place, "*")) if os.path.isdir(os.path.join(d, "debian"))]
    if not there:
        raise Unavailable(f"the source of {package} did not unpack")
    return there[0]


def junit(path, name=lambda case: f"{case.get('classname')}.{case.get('name')}"):
    """The results that a test runner has written as XML; none if it wrote none. `name`: of a test case."""
    results = {}
    if os.path.exists(path):
        for case in xml.etree.ElementTree.parse(path).iter("testcase"):
            kinds = {child.tag for child in case}
            results[name(case)] = FAIL if kinds & {"failure", "error"} else SKIP if "skipped" in kinds else PASS
    return results


def below_tmp(*paths):
    """The folders of these that lie below /tmp, without those that lie below another."""
    out = []
    for path in sorted({os.path.realpath(p) for p in paths if p}):
        if path.startswith("/tmp/") and not any(path.startswith(o + "/") for o in out):
            out.append(path)
    return out


def cmake(source, name, *options, target=None):
    """A build folder in which `target` is built."""
    need("cmake", "make", "gcc")
    build = os.path.join(home(), name + "-build")
    log = build + ".log"
    done = os.path.join(build, "ci-done")
    if not os.path.exists(done):
        run(["cmake", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=RelWithDebInfo", *options], log=log)
        run(["make", "-C", build, "-j2", *([target] if target else [])], log=log, timeout=1200)
        open(done, "w", encoding="utf-8").close()
    return build


class Place:
    """One variant of one suite: its environment, and its reports."""

    def __init__(self, folder, variant, preload, seed, links=None, warm=None, pairs=None):
        self.folder = folder
        self.variant = variant
        self.preload = preload
        self.warm = warm
        # An RDMA device is that of one network only.
        self.apart = ["-m"] if links else ["-n", "-m"]
        os.makedirs(folder)
        os.chmod(folder, 0o777)
        self.env = clean_env()
        settings = VARIANTS[variant]
        libraries = [warm] if warm else []
        if settings is not None:
            libraries.append(preload)
            self.env["RINGSOCK_REPORT"] = os.path.join(folder, "report-%p.json")
            self.env.update({k: v.format(seed=seed) for k, v in settings.items()})
            if links:
                self.env["RINGSOCK_LINKS"] = links
                # A link between hosts takes longer than what most of these connections do.
                self.env["WARM_ROUNDS"] = "300"
        if pairs:
            self.env["WARM_PAIRS"] = pairs
        if libraries:
            self.env["LD_PRELOAD"] = ":".join(libraries)

    def command(self, command, log, timeout, cwd=None, env=None):
        """Runs tests, preloaded where the variant is; gives the exit status (None: out of time) and the output."""
        full = {**self.env, **(env or {})}
        if self.warm:
            full["WARM_TABLE"] = os.path.join(self.folder, log + ".warm")
        names = [f"{k}={full.pop(k)}" for k in list(full) if k == "LD_PRELOAD" or k.startswith(("RINGSOCK_", "WARM_"))]
        wrapped = ["env", *names, *command]
        if os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip"):
            new = os.path.join(self.folder, "tmp")
            os.makedirs(new, exist_ok=True)
            libraries = [os.path.dirname(p) for p in (self.preload, self.warm) if p]
            stays = below_tmp(ROOT, target_dir(), *libraries, cwd or os.getcwd(), full.get("TMPDIR"))
            wrapped = ["unshare", *self.apart, "sh", "-c", APART, "sh", new, *stays, "--", *wrapped]
        path = os.path.join(self.folder, log)
        with open(path, "wb") as out:
            # Hung tests leave children: the whole group goes.
            wrapped = ["timeout", "-k", "5", str(timeout), *wrapped]
            r = subprocess.run(wrapped, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd, env=full, check=False)
        with open(path, encoding="utf-8", errors="replace") as f:
            text = f.read()
        return (None if r.returncode in (124, 137) else r.returncode), text

    def counts(self):
        """Sums of what the processes reported: connections, those that moved, returns."""
        out = dict.fromkeys(("connections", "upgraded", "upgrades", "returns"), 0)
        for path in glob.glob(os.path.join(self.folder, "report-*.json")):
            with open(path, encoding="utf-8") as f:
                totals = json.load(f)["totals"]
            for k in out:
                out[k] += totals[k]
        return out
