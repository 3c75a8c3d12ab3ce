"""More parts for roles.py: the clients of the heavy brokers."""

import asyncio
import hashlib
import os
import random
import sys
import threading
import time

from roles import Window, check_message, message, size_of


def amqp(port, a):
    """Publishes to a queue and consumes from it, over two connections; order and acknowledgements."""
    import pika

    where = pika.ConnectionParameters("127.0.0.1", port, heartbeat=0, blocked_connection_timeout=60)
    window = Window(200)
    wrong, seen = [], 0
    begun = threading.Event()

    def consume():
        nonlocal seen
        try:
            c = pika.BlockingConnection(where)
            ch = c.channel()
            ch.queue_declare(a["queue"], durable=False)
            ch.basic_qos(prefetch_count=100)
            begun.set()
            for method, _, body in ch.consume(a["queue"], inactivity_timeout=60):
                if method is None:
                    raise AssertionError(f"nothing for 60 s after {seen}")
                check_message(body, seen)
                ch.basic_ack(method.delivery_tag)
                seen += 1
                window.leave()
                if seen == a["count"]:
                    break
            ch.cancel()
            c.close()
        except Exception as e:  # told to the main thread
            wrong.append(repr(e))
            begun.set()

    t = threading.Thread(target=consume, daemon=True)
    t.start()
    begun.wait(60)
    c = pika.BlockingConnection(where)
    ch = c.channel()
    if a["confirm"]:
        ch.confirm_delivery()
    rng = random.Random(a["seed"])
    for seq in range(a["count"]):
        window.enter()
        ch.basic_publish("", a["queue"], message(seq, size_of(rng, 16, 32768)), mandatory=a["confirm"])
        if wrong:
            break
    t.join(120)
    if wrong or seen != a["count"]:
        raise AssertionError(f"{wrong}, {seen} of {a['count']}")
    ch.queue_delete(a["queue"])
    c.close()
    return {"messages": seen}


def stomp(port, a):
    """Sends to a queue and receives from it over a connection of its own."""
    import stomp as lib

    window = Window(200)
    wrong = []

    class Listener(lib.ConnectionListener):
        """Checks what arrives."""

        seen = 0

        def on_message(self, frame):
            try:
                body = frame.body
                check_message(body if isinstance(body, bytes) else body.encode("latin-1"), Listener.seen)
                Listener.seen += 1
            except AssertionError as e:
                wrong.append(str(e))
            window.leave()

        def on_error(self, frame):
            wrong.append(f"error frame: {frame.body}")

    hosts = [("127.0.0.1", port)]
    queue = f"/queue/q{port}"
    receiver = lib.Connection(hosts, auto_decode=False)
    receiver.set_listener("", Listener())
    receiver.connect("", "", wait=True)
    receiver.subscribe(queue, id=1, ack="auto")
    sender = lib.Connection(hosts, auto_decode=False)
    sender.connect("", "", wait=True)
    rng = random.Random(a["seed"])
    for seq in range(a["count"]):
        window.enter()
        sender.send(queue, message(seq, size_of(rng, 16, 32768)), "application/octet-stream")
        if wrong:
            break
    window.drain()
    if wrong or Listener.seen != a["count"]:
        raise AssertionError(f"{wrong[:2]}, {Listener.seen} of {a['count']}")
    sender.disconnect()
    receiver.disconnect()
    return {"messages": Listener.seen}


def zookeeper(port, a):
    """Sets nodes and reads them back over another session, with watches."""
    from kazoo.client import KazooClient

    one, two = (KazooClient(f"127.0.0.1:{port}", timeout=30) for _ in range(2))
    one.start(30)
    two.start(30)
    base = f"/rs{a['seed']}"
    rng = random.Random(a["seed"])
    for i in range(20):
        one.create(f"{base}/n{i}", b"", makepath=True)
    for seq in range(a["count"]):
        node, m = f"{base}/n{rng.randrange(20)}", message(seq, size_of(rng, 16, 60_000))
        one.set(node, m)
        two.sync(node)
        check_message(two.get(node)[0], seq)
        if seq % 50 == 0:
            fired = threading.Event()
            two.get(node, watch=lambda _: fired.set())
            one.set(node, m)
            if not fired.wait(30):
                raise AssertionError(f"a watch did not fire at {seq}")
    made = [one.create(f"{base}/s-", b"x", sequence=True) for _ in range(50)]
    if made != sorted(made) or sorted(two.get_children(base))[-50:] != [m.rsplit("/", 1)[1] for m in made]:
        raise AssertionError("sequential nodes are out of order")
    for c in (one, two):
        c.stop()
        c.close()
    return {"nodes": a["count"]}


def nats(port, a):
    """Publishes and subscribes with asyncio over two connections."""
    import nats as lib

    async def play():
        url = f"nats://127.0.0.1:{port}"
        sub, pub = await lib.connect(url), await lib.connect(url)
        s = await sub.subscribe(a["subject"], pending_bytes_limit=-1, pending_msgs_limit=-1)
        await sub.flush()
        rng = random.Random(a["seed"])
        seen = 0
        for seq in range(a["count"]):
            await pub.publish(a["subject"], message(seq, size_of(rng, 16, 32768)))
            if seq % 100 == 99 or seq == a["count"] - 1:
                # What the client has put off it may forget while it only waits.
                await pub.flush()
                while seen <= seq:
                    check_message((await s.next_msg(30)).data, seen)
                    seen += 1
        await sub.close()
        await pub.close()
        return {"messages": seen}

    return asyncio.run(play())


def kafka_brokers(_port, _a):
    """Three mock brokers of librdkafka's, until standard input ends; prints where they are."""
    from confluent_kafka import Producer

    p = Producer({"test.mock.num.brokers": 3, "bootstrap.servers": "", "log_level": 0})
    brokers = p.list_topics(timeout=30).brokers.values()
    print(",".join(f"{b.host}:{b.port}" for b in brokers), flush=True)
    sys.stdin.read()
    return {}


def kafka(_port, a):
    """Produces to and consumes from four partitions; order in each."""
    from confluent_kafka import Consumer, Producer, TopicPartition

    base = {"bootstrap.servers": a["where"], "log_level": 3}
    parts = 4
    if a.get("make"):
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient(base)
        for f in admin.create_topics([NewTopic(a["topic"], parts, 1)], request_timeout=30).values():
            f.result(60)
    p = Producer({**base, "acks": a["acks"], "linger.ms": 1, "enable.idempotence": a["acks"] == "all"})
    c = Consumer({**base, "group.id": f"g{a['seed']}", "auto.offset.reset": "earliest", "fetch.wait.max.ms": 20})
    wrong, done = [], 0

    def delivered(e, _):
        nonlocal done
        if e is not None:
            wrong.append(str(e))
        done += 1

    def pace(ahead):
        until = time.monotonic() + 60
        while sum(seen) < ahead and not wrong:
            p.poll(0)
            m = c.poll(0.05)
            if m is not None:
                if m.error():
                    wrong.append(str(m.error()))
                    break
                check_message(m.value(), seen[m.partition()])
                seen[m.partition()] += 1
                until = time.monotonic() + 60
            elif time.monotonic() > until:
                wrong.append(f"nothing for 60 s: seen {seen}, delivered {done}")

    seen = [0] * parts
    # The mock cluster makes a topic when it is first asked for.
    p.list_topics(a["topic"], timeout=30)
    c.assign([TopicPartition(a["topic"], i, 0) for i in range(parts)])
    rng = random.Random(a["seed"])
    count = a["count"] // parts * parts
    for n in range(count):
        p.produce(a["topic"], message(n // parts, size_of(rng, 16, 16384)), partition=n % parts, on_delivery=delivered)
        if n % 8 == 0:
            # The cluster keeps only a few megabytes of a partition: stay near the consumer.
            pace(n - 200)
        if wrong:
            break
    if not wrong:
        if p.flush(60):
            wrong.append("not all were delivered")
        pace(count)
    c.close()
    if wrong or seen != [count // parts] * parts or done != count:
        raise AssertionError(f"{wrong[:2]}, seen {seen}, delivered {done} of {count}")
    return {"messages": count}


def kafka_python(port, a):
    """The same in pure Python, written after the Java client."""
    from kafka import KafkaConsumer, KafkaProducer, TopicPartition
    from kafka.admin import KafkaAdminClient, NewTopic

    where, parts = f"127.0.0.1:{port}", 4
    admin = KafkaAdminClient(bootstrap_servers=where)
    admin.create_topics([NewTopic(a["topic"], parts, 1)], timeout_ms=30_000)
    admin.close()
    c = KafkaConsumer(bootstrap_servers=where, auto_offset_reset="earliest", fetch_max_wait_ms=20)
    c.assign([TopicPartition(a["topic"], i) for i in range(parts)])
    p = KafkaProducer(bootstrap_servers=where, acks="all", linger_ms=1, enable_idempotence=False)
    rng = random.Random(a["seed"])
    count = a["count"] // parts * parts
    sent, seen = [], [0] * parts
    until = time.monotonic() + 60

    def take(ms):
        nonlocal until
        for part, got in c.poll(timeout_ms=ms).items():
            for m in got:
                check_message(m.value, seen[part.partition])
                seen[part.partition] += 1
            until = time.monotonic() + 60
        if time.monotonic() > until:
            raise AssertionError(f"nothing for 60 s: seen {seen}")

    for n in range(count):
        sent.append(p.send(a["topic"], message(n // parts, size_of(rng, 16, 16384)), partition=n % parts))
        if n % 100 == 99:
            p.flush(60)
            while sum(seen) < n - 400:
                take(50)
    p.flush(60)
    while sum(seen) < count:
        take(200)
    offsets = [0] * parts
    for n, f in enumerate(sent):
        if f.get(60).offset != offsets[n % parts]:
            raise AssertionError(f"record {n} has offset {f.get(0).offset}")
        offsets[n % parts] += 1
    p.close()
    c.close()
    return {"messages": count}


def spark(_port, a):
    """Rows with checksums through two shuffles on a cluster of two executors; the first is read again and again, as by an
    iterative job: the two connections' beginnings on TCP, at full speed, are megabytes."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from pyspark.sql import SparkSession

    # fmt: off
    s = (
        SparkSession.builder.master("local-cluster[2,1,768]").appName("ringsock")
        .config("spark.shuffle.readHostLocalDisk", "false").config("spark.ui.enabled", "false")
        .config("spark.executor.memory", "768m").config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1").config("spark.local.dir", a["folder"])
        .config("spark.shuffle.compress", "false").config("spark.executorEnv.PYTHONPATH", os.path.dirname(__file__))
        .config("spark.log.level", "ERROR").getOrCreate()
    )
    # fmt: on
    rows = a["rows"]

    def make(i):
        body = message(i, 200 + i % 4000)
        return (i * 7919 % 1009, (i, hashlib.md5(body).hexdigest(), body))

    def verify(group):
        key, values = group
        n = size = 0
        for i, digest, body in values:
            if i * 7919 % 1009 != key or hashlib.md5(body).hexdigest() != digest:
                raise AssertionError(f"row {i} is wrong")
            n += 1
            size += len(body)
        return n, size

    rdd = s.sparkContext.parallelize(range(rows), 8).map(make).partitionBy(8)
    for _ in range(a["passes"]):
        got = rdd.groupByKey(8).map(verify).reduce(lambda x, y: (x[0] + y[0], x[1] + y[1]))
        if got[0] != rows:
            raise AssertionError(f"{got} of {rows} rows")
    rdd = rdd.map(lambda kv: (kv[1][0] % 97, kv[1])).groupByKey(6).map(lambda g: (g[0], list(g[1])))
    again = rdd.map(lambda g: (len(g[1]), sum(len(v[2]) for v in g[1]))).reduce(lambda x, y: (x[0] + y[0], x[1] + y[1]))
    s.stop()
    if again != got:
        raise AssertionError(f"{got} and {again} of {rows} rows")
    return {"rows": rows, "bytes": got[1] * (a["passes"] + 2)}


ROLES = {f.__name__: f for f in (amqp, stomp, zookeeper, nats, kafka_brokers, kafka, kafka_python, spark)}
