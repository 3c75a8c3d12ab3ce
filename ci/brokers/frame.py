"""What every broker's check shares: variants, processes with their reports,
and the verdict. Standard library only."""

import collections
import json
import os
import select
import signal
import socket
import subprocess
import time

from preload_lib import Reports, all_bytes, clean_env, ring_bytes, share

HERE = os.path.dirname(os.path.abspath(__file__))
WANTED_SHARE = 0.99
# Until there is a queue pair bytes go by TCP, and on an emulated processor that takes a second or two. So clients begin
# there as those do that stay for hours: with a few small messages.
VERBS_START = 5
NONE = {"RINGSOCK_LINKS": "none"}
VERBS = {"RINGSOCK_LINKS": "verbs"}


class Failed(Exception):
    """A check found something wrong."""


class Skipped(Exception):
    """A check cannot run here; the text says why."""


class Variant:
    """Which ends are preloaded, and with which settings."""

    def __init__(self, name, server, client, settings=None):
        self.name, self.server, self.client, self.settings = name, server, client, settings

    @property
    def rings(self):
        """Whether bytes must go over rings; otherwise none may."""
        return self.server and self.client and self.settings is not NONE


VARIANTS = (
    Variant("plain", False, False),
    Variant("both", True, True),
    Variant("server-only", True, False),
    Variant("client-only", False, True),
    Variant("links-none", True, True, NONE),
)
# For a machine with an RDMA device (ci/rdma-vm), by name.
BY_NAME = (Variant("verbs", True, True, VERBS),)


class Role:
    """A client in a process of its own: roles.py, or a program that prints one JSON object at its end."""

    def __init__(self, name, proc, patience=1):
        self.name, self.proc, self.patience = name, proc, patience

    def wait_ready(self, seconds=60):
        """Until it prints READY."""
        ready, _, _ = select.select([self.proc.stdout], [], [], seconds)
        line = self.proc.stdout.readline() if ready else f"nothing for {seconds} s"
        if line.strip() != "READY":
            self.proc.kill()
            _, err = self.proc.communicate(timeout=60)
            raise Failed(f"{self.name}: {line.strip()} {err.strip().splitlines()[-1:]}")
        return self

    def result(self, seconds=180):
        """What it found; raises if it did not end well."""
        seconds *= self.patience
        try:
            out, err = self.proc.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            out, err = self.proc.communicate()
            raise Failed(f"{self.name}: still running after {seconds} s: {(out + err)[-300:]}") from None
        if self.proc.returncode != 0:
            raise Failed(f"{self.name}: status {self.proc.returncode}: {' '.join(err.strip().splitlines()[-3:])}")
        lines = out.strip().splitlines()
        return json.loads(lines[-1]) if lines else {}


class Run:
    """One broker under one variant: its processes, their reports, a folder."""

    def __init__(self, variant, lib, folder, python, effort):
        self.variant, self.lib, self.dir, self.python = variant, lib, folder, python
        # Variants that only show that TCP is left alone need less traffic.
        self.effort = effort if variant.rings or variant.name == "plain" else effort * 0.3
        self.reports = {}
        for side in ("server", "client"):
            path = os.path.join(folder, side)
            self.reports[side] = Reports(path)
            os.chmod(path, 0o1777)
        self.servers, self.procs = [], []
        self.notes = []
        # Bytes of a connection's beginning, and of helpers, are on TCP: a check may say how much.
        self.wanted = {"server": WANTED_SHARE, "client": WANTED_SHARE}
        verbs = variant.settings is VERBS
        # For so many seconds clients begin slowly.
        self.start = VERBS_START if verbs else 0
        # An emulated processor is so many times slower, to be sure.
        self.patience = 5 if verbs else 1
        # Servers that talk to each other have rings of their own even where no client has.
        self.among_servers = False
        # A family of processes that talk among themselves has one side.
        self.sides = ("server", "client")
        # A server that talks to the kernel itself: no connection with it may leave TCP, and it may not report.
        self.untouched = False
        # Exit statuses that count as a clean end.
        self.clean = (0,)

    def n(self, count):
        """A count, scaled by the effort."""
        return max(1, int(count * self.effort))

    def env(self, side, extra=None):
        """The environment of a process of that side."""
        v = self.variant
        on = v.server if side == "server" else v.client
        env = self.reports[side].env(self.lib if on else None, v.settings)
        env.update(extra or {})
        return env

    def path(self, name):
        """A file in this run's folder."""
        return os.path.join(self.dir, name)

    def write(self, name, text, mode=0o644):
        """Writes a file into this run's folder; its path."""
        p = self.path(name)
        with open(p, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(p, mode)
        return p

    def server(self, name, cmd, stop=signal.SIGTERM, env=None, **more):
        """Starts a server that stays in the foreground; its output goes to NAME.log."""
        log = open(self.path(name + ".log"), "ab")
        # fmt: off
        p = subprocess.Popen(
            cmd, env=self.env("server", env), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, **more,
        )
        # fmt: on
        p.name, p.stop_signal = name, stop
        self.servers.append(p)
        return p

    def spawn(self, cmd, side="client", env=None, **more):
        """Starts a client whose output is read."""
        # fmt: off
        p = subprocess.Popen(
            cmd, env=self.env(side, env), stdin=more.pop("stdin", subprocess.DEVNULL), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True, **more,
        )
        # fmt: on
        self.procs.append(p)
        return p

    def role(self, name, port, **args):
        """Starts a role of roles.py."""
        if self.start:
            args["start"] = self.start
        cmd = [self.python, os.path.join(HERE, "roles.py"), name, str(port), json.dumps(args)]
        return Role(name, self.spawn(cmd), self.patience)

    def tool(self, cmd, seconds=120, side="client", given=None, env=None, ok=(0,)):
        """Runs a program to its end; what it printed."""
        seconds *= self.patience
        p = self.spawn(cmd, side, env, stdin=subprocess.PIPE if given is not None else subprocess.DEVNULL)
        try:
            out, err = p.communicate(given, timeout=seconds)
        except subprocess.TimeoutExpired:
            kill_group(p)
            out, err = p.communicate()
            raise Failed(f"{os.path.basename(cmd[0])}: hung for {seconds} s: {(out + err)[-300:]}") from None
        if p.returncode not in ok:
            raise Failed(f"{os.path.basename(cmd[0])}: status {p.returncode}: {(out + err)[-400:]}")
        return out + err

    def wait_port(self, port, server=None, seconds=30):
        """Until somebody accepts there."""
        until = time.monotonic() + seconds
        while True:
            if server is not None and server.poll() is not None:
                raise Failed(f"{server.name} ended with {server.returncode}: {self.tail(server.name)}")
            try:
                socket.create_connection(("127.0.0.1", port), 2).close()
                return
            except OSError:
                if time.monotonic() > until:
                    name = server.name if server else ""
                    raise Failed(f"nobody accepts at port {port} for {seconds} s: {self.tail(name)}") from None
                time.sleep(0.05)

    def tail(self, name):
        """The end of a server's output."""
        try:
            with open(self.path(name + ".log"), encoding="utf-8", errors="replace") as f:
                return " | ".join(f.read().splitlines()[-4:])[-500:]
        except OSError:
            return ""

    def stop_servers(self):
        """Ends the servers in their ordinary way, last started first; raises if one does not end well."""
        bad = []
        for p in reversed(self.servers):
            if p.poll() is not None:
                bad.append(f"{p.name} had ended by itself with {p.returncode}: {self.tail(p.name)}")
                continue
            p.send_signal(p.stop_signal)
            try:
                p.wait(30)
            except subprocess.TimeoutExpired:
                bad.append(f"{p.name} did not end within 30 s of signal {p.stop_signal}: {self.tail(p.name)}")
                kill_group(p)
                p.wait(10)
                continue
            if p.returncode not in self.clean:
                bad.append(f"{p.name} ended with {p.returncode}: {self.tail(p.name)}")
        self.servers.clear()
        if bad:
            raise Failed("; ".join(bad))

    def sweep(self):
        """Kills what is left."""
        for p in self.servers + self.procs:
            if p.poll() is None:
                kill_group(p)
                p.wait(10)

    def totals(self, side):
        """Summed totals of all processes of a side, and why connections were on TCP."""
        total, why, n = collections.Counter(), collections.Counter(), 0
        folder = self.reports[side].folder
        for f in os.listdir(folder):
            if not f.endswith(".json"):
                continue
            with open(os.path.join(folder, f), encoding="utf-8") as h:
                r = json.load(h)
            n += 1
            total.update({k: v for k, v in r["totals"].items() if isinstance(v, int)})
            for c in r["connections"]:
                if c.get("why"):
                    why[c["why"]] += c["tx_bytes_tcp"] + c["rx_bytes_tcp"]
        for k in ("tx_bytes_tcp", "tx_bytes_ring", "rx_bytes_tcp", "rx_bytes_ring", "connections", "upgraded"):
            total[k] += 0
        return total, why, n

    def verdict(self):
        """What the reports say; raises if that is not what the variant must show."""
        texts = []
        for side in self.sides:
            if not (self.variant.server if side == "server" else self.variant.client):
                continue
            t, why, n = self.totals(side)
            if self.untouched and side == "server":
                continue
            rings = self.variant.rings and not self.untouched
            if n == 0:
                raise Failed(f"no report of any {side}")
            if all_bytes(t) == 0:
                raise Failed(f"the {side}'s reports show no traffic: {dict(t)}")
            text = f"{side} {share(t) * 100:.2f} % of {all_bytes(t) / 1e6:.1f} MB on rings"
            text += f" ({t['upgraded']} of {t['connections']} connections, {t['returns']} returns)"
            among = self.among_servers and side == "server" and self.variant.settings is not NONE
            if not rings and not among and (ring_bytes(t) or t["upgraded"]):
                raise Failed(f"{text}, expected none")
            if rings and share(t) < self.wanted[side]:
                raise Failed(f"{text}, at least {self.wanted[side] * 100:g} % wanted; TCP bytes by reason: {dict(why)}")
            texts.append(text)
        for side in ("server", "client"):
            for line in self.reports[side].logs()[:2]:
                texts.append(f"log: {line}")
        return "; ".join(texts) or "not preloaded"


def kill_group(p):
    """Ends a process of ours and what it started."""
    try:
        os.killpg(p.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def need(*programs):
    """Skips the check unless these programs are there; their paths."""
    out = []
    for p in programs:
        for d in os.environ.get("PATH", "").split(":") + ["/usr/sbin", "/usr/local/sbin", "/usr/games"]:
            f = p if p.startswith("/") else os.path.join(d, p)
            if os.access(f, os.X_OK):
                out.append(f)
                break
        else:
            raise Skipped(f"{p} is not installed")
    return out if len(out) > 1 else out[0]


def plain_env():
    """An environment without any preload, for set-up commands."""
    return clean_env()
