"""The light brokers: mosquitto, memcached, nginx, HAProxy, PostgreSQL, Node.js."""

import os
import pwd
import random
import re
import shutil
import signal
import subprocess
import time

from preload_lib import free_port

from .frame import HERE, Failed, Skipped, need, plain_env


def root():
    """Whether this runs as root: then servers get users of their own, as they have in real use."""
    return os.geteuid() == 0


def mosquitto(run):
    """mosquitto, with paho clients at every QoS level and mosquitto_pub/mosquitto_sub."""
    program, pub, sub = need("mosquitto", "mosquitto_pub", "mosquitto_sub")
    port = free_port()
    conf = f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\nmax_queued_bytes 0\n"
    conf += "max_inflight_messages 0\npersistence false\nset_tcp_nodelay true\n"
    run.wait_port(port, run.server("mosquitto", [program, "-c", run.write("mosquitto.conf", conf)]))
    # fmt: off
    roles = [
        run.role("mqtt", port, topic=f"t/{q}", qos=q, count=run.n(c), subscribers=s, seed=q)
        for q, c, s in ((0, 8000, 2), (1, 6000, 1), (2, 4000, 1))
    ]
    # fmt: on
    moved = sum(r.result()["messages"] for r in roles)
    lines = [f"{i} {'x' * (i * 7 % 900)}" for i in range(run.n(40_000))]
    s = run.spawn([sub, "-p", str(port), "-t", "lines", "-q", "1", "-C", str(len(lines))])
    # mosquitto_sub says nothing when it has subscribed: a retained message on its topic would come first.
    time.sleep(0.7)
    run.tool([pub, "-p", str(port), "-t", "lines", "-q", "1", "-l"], given="\n".join(lines) + "\n")
    try:
        out, err = s.communicate(timeout=60 * run.patience)
    except subprocess.TimeoutExpired:
        raise Failed("mosquitto_sub: still running long after mosquitto_pub ended") from None
    if s.returncode != 0 or out.splitlines() != lines:
        raise Failed(f"mosquitto_sub: status {s.returncode}, {len(out.splitlines())} lines of {len(lines)}: {err[-200:]}")
    return f"{moved} messages of 16 B to 64 KiB at QoS 0, 1 and 2, and {len(lines)} lines, all in order"


def memcached(run):
    """memcached with four threads, with pymemcache, memccapable and memcslap."""
    program, capable, slap = need("memcached", "memccapable", "memcslap")
    port = free_port()
    user = "memcache" if root() and has_user("memcache") else None
    cmd = [program, "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-t", "4", "-m", "256", "-c", "512", "-I", "2m"]
    run.wait_port(port, run.server("memcached", cmd + (["-u", user] if user else ["-u", "root"] if root() else [])))
    roles = [run.role("memcache", port, seed=i, count=run.n(1500)) for i in range(4)]
    values = sum(r.result()["values"] for r in roles)
    # A pause of a second in each of some of its tests: it is about the protocol, not about speed.
    out = run.tool([capable, "-h", "127.0.0.1", "-p", str(port), "-a"], 120)
    if "All tests passed" not in out and re.search(r"\[(fail|FAIL)\]", out):
        raise Failed(f"memccapable: {out[-300:]}")
    n = len(re.findall(r"\[pass\]", out))
    # fmt: off
    out = run.tool([
        slap, f"--servers=127.0.0.1:{port}", "--concurrency=8", f"--execute-number={run.n(6000)}",
        "--test=get", f"--initial-load={run.n(2000)}",
    ])
    # fmt: on
    took = re.search(r"Took\s+([0-9.]+) seconds", out) or re.search(r"([0-9.]+) seconds", out)
    text = f"{values} values of 16 B to 256 KiB equal, memccapable: {n} tests passed"
    return text + (f", memcslap {took.group(1)} s" if took else "")


def files_of(run):
    """Files of several sizes with known bytes; {name: path}."""
    folder = run.path("files")
    os.makedirs(folder)
    os.chmod(folder, 0o755)
    rng = random.Random(5)
    out = {}
    for name, size in (("empty", 0), ("one", 1), ("small", 700), ("page", 4096), ("middle", 100_000), ("big", 12 << 20)):
        out[name] = os.path.join(folder, name)
        with open(out[name], "wb") as f:
            f.write(rng.randbytes(size))
        os.chmod(out[name], 0o644)
    return out


def start_nginx(run, more="", workers=2):
    """nginx with sendfile; (port, files)."""
    program = need("nginx")
    files, port = files_of(run), free_port()
    user = "user www-data;" if root() and has_user("www-data") else ""
    conf = f"""{user} worker_processes {workers}; daemon off; pid {run.path('nginx.pid')}; error_log stderr warn;
events {{ worker_connections 1024; multi_accept on; }}
http {{
  access_log off; sendfile on; tcp_nopush on; tcp_nodelay on; keepalive_requests 1000000; keepalive_timeout 65;
  client_body_temp_path {run.path('b')}; proxy_temp_path {run.path('p')}; fastcgi_temp_path {run.path('f')};
  uwsgi_temp_path {run.path('u')}; scgi_temp_path {run.path('s')};
  server {{ listen 127.0.0.1:{port} backlog=1024; root {run.path('files')}; default_type application/octet-stream; }}
  {more}
}}
"""
    cmd = [program, "-e", "stderr", "-p", run.dir, "-c", run.write("nginx.conf", conf)]
    run.wait_port(port, run.server("nginx", cmd, stop=signal.SIGQUIT))
    return port, files


def fetch(run, port, files, clients=3):
    """HTTP clients that compare what they get; text."""
    roles = [run.role("http", port, files=files, seed=i, count=run.n(400)) for i in range(clients)]
    got = [r.result() for r in roles]
    return f"{sum(g['requests'] for g in got)} files and ranges equal, {sum(g['bytes'] for g in got) / 1e6:.0f} MB"


# As `Start` in roles.py.
WRK_START = """local began = os.time()
local function starts() return os.time() - began <= START end
function request() return wrk.format("GET", starts() and "/small" or nil) end
function delay() return starts() and 20 or 0 end
"""


def load(run, port, seconds=2):
    """wrk and ab on a small and a middle file; nothing may fail. Text."""
    wrk, ab = need("wrk", "ab")
    texts, script = [], []
    if run.start:
        script = ["-s", run.write("start.lua", WRK_START.replace("START", str(run.start))), "--timeout", "60s"]
        seconds += 2 * run.start
    for name, conns in (("small", 32), ("middle", 8)):
        out = run.tool([wrk, "-t2", f"-c{conns}", f"-d{seconds}s", *script, f"http://127.0.0.1:{port}/{name}"])
        rate = re.search(r"Requests/sec:\s+([0-9.]+)", out)
        if not rate or float(rate.group(1)) == 0 or "Non-2xx" in out or "Socket errors" in out:
            raise Failed(f"wrk {name}: {' '.join(out[-300:].split())}")
        texts.append(f"wrk {name} {float(rate.group(1)):.0f}/s")
    n = run.n(20_000)
    out = run.tool([ab, "-q", "-k", "-c", "8", "-n", str(n), f"http://127.0.0.1:{port}/small"])
    if f"Complete requests:      {n}" not in out or "Failed requests:        0" not in out or "Non-2xx" in out:
        raise Failed(f"ab: {' '.join(out[-400:].split())}")
    return ", ".join(texts)


def nginx(run):
    """nginx with two workers: static files by sendfile, whole and in ranges."""
    port, files = start_nginx(run)
    return fetch(run, port, files) + "; " + load(run, port)


def haproxy(run):
    """HAProxy before nginx, in its HTTP and its TCP mode, reloaded once while clients are connected."""
    program = need("haproxy")
    run.among_servers = True
    back, files = start_nginx(run, workers=1)
    web, raw = free_port(), free_port()
    conf = f"""global
  maxconn 500
  stats socket {run.path('ha.sock')} expose-fd listeners
defaults
  timeout connect 10s
  timeout client 60s
  timeout server 60s
frontend web
  mode http
  bind 127.0.0.1:{web}
  default_backend b
backend b
  mode http
  server s 127.0.0.1:{back}
frontend raw
  mode tcp
  bind 127.0.0.1:{raw}
  default_backend r
backend r
  mode tcp
  server s 127.0.0.1:{back}
"""
    # -W: a master, which starts new workers on SIGUSR2 and hands them the listeners.
    p = run.server("haproxy", [program, "-W", "-f", run.write("haproxy.cfg", conf)])
    # The master ends with 143 on SIGTERM when a worker did.
    run.clean = (0, 143)
    for port in (web, raw):
        run.wait_port(port, p)
    half = [run.role("http", port, files=files, seed=i, count=run.n(300), reload=True) for i, port in enumerate((web, raw))]
    p.send_signal(signal.SIGUSR2)
    got = sum(r.result()["requests"] for r in half)
    text = f"{got} through a reload; " + fetch(run, web, files, 2) + "; " + load(run, web)
    return text + "; " + fetch(run, raw, files, 2)


def postgresql(run):
    """PostgreSQL under its own user: psycopg2 and pgbench; a backend process for each connection."""
    bin_dir = next((d for d in pg_dirs() if os.access(os.path.join(d, "initdb"), os.X_OK)), None)
    if bin_dir is None:
        raise Skipped("PostgreSQL is not installed")
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if root() else {}
    data, port = run.path("data"), free_port()
    os.makedirs(data, mode=0o700)
    if user:
        shutil.chown(data, "postgres", "postgres")
    # fmt: off
    r = subprocess.run(
        [os.path.join(bin_dir, "initdb"), "-D", data, "-A", "trust", "-U", "postgres", "--no-sync", "--locale=C"],
        env=plain_env(), capture_output=True, text=True, cwd="/", timeout=120, **user,
    )
    # fmt: on
    if r.returncode != 0:
        raise Failed(f"initdb: {r.stderr[-300:]}")
    # fmt: off
    cmd = [
        os.path.join(bin_dir, "postgres"), "-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1",
        "-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "max_connections=60", "-c", "shared_buffers=32MB",
    ]
    # fmt: on
    run.wait_port(port, run.server("postgres", cmd, stop=signal.SIGINT, cwd="/", **user))
    # It accepts, and refuses, before it has started.
    ready = [os.path.join(bin_dir, "pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-t", "30"]
    for _ in range(600):
        if subprocess.run(ready, env=plain_env(), stdout=subprocess.DEVNULL, timeout=60, check=False).returncode == 0:
            break
        time.sleep(0.05)
    roles = [run.role("postgres", port, seed=i, count=run.n(1500)) for i in range(3)]
    rows = sum(r.result()["rows"] for r in roles)
    pgbench = need(os.path.join(bin_dir, "pgbench"))
    where = ["-h", "127.0.0.1", "-p", str(port), "-U", "postgres"]
    run.tool([pgbench, *where, "-i", "-q", "-s", "1", "postgres"], side="client")
    # Some fifty in a second on an emulated processor.
    n = run.n(1000 if run.start else 4000)
    out = run.tool([pgbench, *where, "-c", "8", "-j", "2", "-M", "prepared", "-t", str(n), "postgres"])
    if f"{8 * n}/{8 * n}" not in out:
        raise Failed(f"pgbench: {' '.join(out[-300:].split())}")
    psql = need(os.path.join(bin_dir, "psql"))
    query = "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history),"
    query += " (select count(*) from pgbench_history)"
    out = run.tool([psql, *where, "-At", "-c", query, "postgres"])
    if out.strip() != f"t|{8 * n}":
        raise Failed(f"pgbench's sums differ: {out.strip()}")
    return f"{rows} rows equal, COPY, NOTIFY, cancel; pgbench {8 * n} transactions, sums equal"


def node(run):
    """Node.js: an HTTP server, a raw echo server, and a cluster whose workers get connections passed."""
    return node_by(run, need("node"))


def node_by(run, program):
    """The same by any Node.js."""
    texts = []
    for mode, n in (("raw", 3000), ("http", 3000), ("cluster", 300)):
        port = free_port()
        js = os.path.join(HERE, "node_check.js")
        p = run.server(f"node-{mode}", [program, js, "serve", mode, str(port)])
        run.wait_port(port, p)
        out = run.tool([program, js, "client", mode, str(port), str(run.n(n))], 150)
        if not out.strip().endswith("OK"):
            raise Failed(f"{mode}: {out[-300:]}")
        texts.append(f"{mode} {run.n(n) * 4} messages")
    # Connections of a cluster are passed from process to process: those stay on TCP.
    run.wanted = {"server": 0.5, "client": 0.5}
    return ", ".join(texts)


def pg_dirs():
    """Where PostgreSQL's programs may be, the newest first."""
    base = "/usr/lib/postgresql"
    found = sorted(os.listdir(base), reverse=True) if os.path.isdir(base) else []
    return [os.path.join(base, v, "bin") for v in found] + ["/usr/bin", "/usr/local/bin"]


def has_user(name):
    """Whether there is such a user."""
    try:
        pwd.getpwnam(name)
        return True
    except KeyError:
        return False


CHECKS = {f.__name__: f for f in (mosquitto, memcached, nginx, haproxy, postgresql, node)}
