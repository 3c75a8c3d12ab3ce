"""Services that are no brokers: Apache's web server, Varnish, Samba, a network block device, iperf3, MPI programs, gRPC."""

import filecmp
import json
import os
import random
import re
import signal
import subprocess
import time

from preload_lib import free_port

from .frame import HERE, Failed, Role, Skipped, need, plain_env
from .light import fetch, files_of, has_user, load, root, start_nginx

MODULES = "/usr/lib/apache2/modules"


def apache(run):
    """Apache's web server with its event module: processes with threads, and files by sendfile."""
    program = need("apache2")
    files, port = files_of(run), free_port()
    conf = f"""ServerRoot {run.dir}
ServerName localhost
Listen 127.0.0.1:{port}
PidFile {run.path('apache.pid')}
ErrorLog /dev/stderr
DocumentRoot {run.path('files')}
MaxKeepAliveRequests 0
EnableSendfile On
"""
    conf += "".join(f"LoadModule {m}_module {MODULES}/mod_{m}.so\n" for m in ("mpm_event", "authz_core"))
    if root() and has_user("www-data"):
        conf += "User www-data\nGroup www-data\n"
    cmd = [program, "-DFOREGROUND", "-f", run.write("apache.conf", conf)]
    run.wait_port(port, run.server("apache2", cmd))
    return fetch(run, port, files) + "; " + load(run, port)


def varnish(run):
    """Varnish before nginx: threads that hand resting connections to one that waits for all of them."""
    program = need("varnishd")
    run.among_servers = True
    back, files = start_nginx(run, workers=1)
    port = free_port()
    # fmt: off
    cmd = [
        program, "-F", "-j", "none", "-a", f"127.0.0.1:{port}", "-b", f"127.0.0.1:{back}",
        "-n", run.path("varnish"), "-s", "malloc,256m", "-p", "workspace_client=128k",
    ]
    # fmt: on
    run.wait_port(port, run.server("varnish", cmd))
    return fetch(run, port, files) + "; " + load(run, port)


def samba(run):
    """Samba: a process for each client; it is asked to send files by sendfile, and to receive them by splice."""
    program, client = need("smbd", "smbclient")
    if not root():
        raise Skipped("Samba's server runs as root only")
    port = free_port()
    for name in ("share", "state", "private"):
        os.makedirs(run.path(name))
    state = run.path("state")
    places = "".join(f"{kind} directory = {state}\n" for kind in ("lock", "state", "cache", "pid"))
    conf = f"""[global]
smb ports = {port}
interfaces = lo
bind interfaces only = yes
{places}private dir = {run.path('private')}
ncalrpc dir = {state}/ncalrpc
log file = {state}/log
map to guest = Bad User
guest account = root
disable netbios = yes
load printers = no
use sendfile = yes
min receivefile size = 16384
[share]
path = {run.path('share')}
guest ok = yes
writable = yes
"""
    # Its signal handler ends it by the signal.
    run.clean = (0, -signal.SIGTERM)
    conf = run.write("smb.conf", conf)
    run.wait_port(port, run.server("smbd", [program, "-F", "--no-process-group", "-s", conf]))
    given = run.write("given", "")
    with open(given, "wb") as f:
        f.write(random.Random(3).randbytes(20 << 20))
    times = run.n(12)
    for turn in range(3):
        line = "".join(f"put {given} f{i}; get f{i} {run.path(f'back{i}')}; " for i in range(times))
        run.tool([client, "-s", conf, "-p", str(port), "-N", "//127.0.0.1/share", "-c", line])
        for i in range(times):
            if not all(filecmp.cmp(given, run.path(p), shallow=False) for p in (f"share/f{i}", f"back{i}")):
                raise Failed(f"file {i} of turn {turn} differs")
            os.unlink(run.path(f"back{i}"))
    # The process of a client ends after it, and is killed with the server: it is to report first.
    until = time.monotonic() + 10
    while run.variant.server and len(os.listdir(run.reports["server"].folder)) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    return f"{3 * times} files of 21 MB written and read back, all equal"


# (Where rings are forbidden no child makes its own what its parent has accepted, and the parent is killed: nobody reports.)
samba.variants = ("plain", "both", "server-only", "client-only")


def nbd(run):
    """nbdkit, a network block device of threads, and nbdcopy, with several connections and many requests under way."""
    program, copy = need("nbdkit", "nbdcopy")
    size = 64 << 20
    paths = [run.path(name) for name in ("given", "disk", "back")]
    for i, path in enumerate(paths):
        with open(path, "wb") as f:
            f.write(random.Random(4).randbytes(size) if i == 0 else b"")
            f.truncate(size)
    given, disk, back = paths
    port = free_port()
    run.wait_port(port, run.server("nbdkit", [program, "-f", "-i", "127.0.0.1", "-p", str(port), "file", disk]))
    # Each copy is a program of its own, whose connections begin at full speed: some megabytes are on TCP before they move.
    run.wanted = {"server": 0.9, "client": 0.9}
    times = run.n(6)
    for turn in range(times):
        run.tool([copy, given, f"nbd://127.0.0.1:{port}"])
        run.tool([copy, f"nbd://127.0.0.1:{port}", back])
        if not filecmp.cmp(given, back, shallow=False) or not filecmp.cmp(given, disk, shallow=False):
            raise Failed(f"copy {turn} differs")
    return f"{times} times 67 MB written and read back, all equal"


def iperf(run):
    """iperf3: from the client, to it, both, with several streams, and by sendfile."""
    program = need("iperf3")
    port = free_port()
    # It says that it was interrupted.
    run.clean = (0, 1)
    server = run.server("iperf3", [program, "-s", "-p", str(port)])
    run.wait_port(port, server)
    rates = []
    for how in ([], ["-R"], ["-P", "4", "--bidir"], ["-Z"]):
        said = json.loads(run.tool([program, "-c", "127.0.0.1", "-p", str(port), "-t", "2", "-J", *how]))
        sent, received = (said["end"][f"sum_{x}"]["bytes"] for x in ("sent", "received"))
        if not 0 < received <= sent:
            raise Failed(f"{' '.join(how)}: {sent} bytes sent, {received} received")
        rates.append(f"{' '.join(how) or 'plain'} {received / 2e9:.1f} GB/s")
    return ", ".join(rates)


def mpi(run):
    """Open MPI's processes, which look at all their connections again and again, and never sleep."""
    compiler, start = need("mpicc.openmpi", "mpirun.openmpi")
    program = run.path("mpi")
    r = subprocess.run(
        [compiler, "-O2", "-o", program, os.path.join(HERE, "MpiCheck.c")], env=plain_env(), capture_output=True, text=True, timeout=120
    )
    if r.returncode != 0:
        raise Failed(f"mpicc: {r.stderr[-300:]}")
    run.sides = ("client",)
    # Rings begin with the first messages, which are its own.
    run.wanted["client"] = 0.95
    rounds, trips = run.n(400), run.n(20_000)
    tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]
    out = run.tool([start, "--allow-run-as-root", "--oversubscribe", *tcp, "-n", "3", program, str(rounds), str(trips)])
    found = re.search(r"wrong 0, ([0-9.]+) us", out)
    if not found:
        raise Failed(f"mpirun: {out[-300:]}")
    return f"3 processes, {rounds} rounds of up to 1 MiB, all bytes right; ping-pong {found.group(1)} us"


# Its processes are all started by one.
mpi.variants = ("plain", "both", "links-none")


def grpc(run):
    """gRPC's own library in C++, by Python: it reads until the kernel says that nothing is left (`TCP_INQ`), and waits for an edge."""
    port = free_port()
    cmd = [run.python, os.path.join(HERE, "roles.py"), "grpc_server", str(port), "{}"]
    p = run.spawn(cmd, side="server", stdin=subprocess.PIPE)
    server = Role("grpc_server", p)
    if p.stdout.readline().strip() != "up":
        raise Failed(f"the server does not start: {p.stderr.read()[-300:]}")
    roles = [run.role("grpc_client", port, seed=i, count=run.n(1500)) for i in range(2)]
    done = [r.result(300) for r in roles]
    p.stdin.close()
    p.stdin = None
    server.result(60)
    return f"{sum(d['messages'] for d in done)} messages, {sum(d['bytes'] for d in done) / 1e6:.0f} MB, all equal"


CHECKS = {f.__name__: f for f in (apache, varnish, samba, nbd, iperf, mpi, grpc)}
