"""More parts for roles.py: gRPC, a server and its clients."""

import asyncio
import random
import sys
import threading
from concurrent import futures

from roles import Start, check_message, message

MOST = 4 << 20
# Each client has a connection of its own.
OPTIONS = [
    ("grpc.max_receive_message_length", MOST + 65536),
    ("grpc.max_send_message_length", MOST + 65536),
    ("grpc.use_local_subchannel_pool", 1),
]


def grpc_server(port, _a):
    """Answers what it is asked, and streams it back, until standard input ends."""
    import grpc

    class Echo(grpc.GenericRpcHandler):
        """One method for a message, one for streams of them."""

        def service(self, details):
            if details.method == "/check/one":
                return grpc.unary_unary_rpc_method_handler(lambda request, _context: request)
            return grpc.stream_stream_rpc_method_handler(lambda requests, _context: iter(requests))

    server = grpc.server(futures.ThreadPoolExecutor(8), options=OPTIONS)
    server.add_generic_rpc_handlers((Echo(),))
    if server.add_insecure_port(f"127.0.0.1:{port}") != port:
        raise AssertionError(f"port {port} is taken")
    server.start()
    print("up", flush=True)
    sys.stdin.read()
    server.stop(2).wait()
    return {}


def grpc_client(port, a):
    """Single messages and streams of them, from threads and from asyncio, on two connections; every answer checked."""
    import grpc
    import grpc.aio

    rng, start = random.Random(a["seed"]), Start(a)
    where, count = f"127.0.0.1:{port}", a["count"]
    done = {"messages": 0, "bytes": 0}

    def right(reply, i):
        check_message(reply, i)
        done["messages"] += 1
        done["bytes"] += len(reply)

    with grpc.insecure_channel(where, options=OPTIONS) as channel:
        one, stream = channel.unary_unary("/check/one"), channel.stream_stream("/check/stream")
        one(message(0, 100), wait_for_ready=True, timeout=60)
        for i in range(count):
            right(one(message(i, start.size(rng, 16, 20_000)), timeout=60), i)
        for i in range(3):
            right(one(message(i, MOST - i), timeout=60), i)
        # Many under way at once.
        pending = [one.future(message(i, 16 + i % 3000), timeout=60) for i in range(count)]
        for i, reply in enumerate(pending):
            right(reply.result(), i)
        for i, reply in enumerate(stream((message(i, 16 + i * 31 % 9000) for i in range(count)), timeout=60)):
            right(reply, i)
        # A stream that is given up in the middle; the connection goes on.
        given_up = stream((message(i, 1000) for i in range(count)), timeout=60)
        right(next(given_up), 0)
        given_up.cancel()
        right(one(message(7, 1000), timeout=60), 7)

    async def loops():
        async with grpc.aio.insecure_channel(where, options=OPTIONS) as channel:
            one = channel.unary_unary("/check/one")

            async def some(first):
                for i in range(first, count, 8):
                    right(await one(message(i, 16 + i % 5000), timeout=60), i)

            await asyncio.gather(*(some(first) for first in range(8)))

    worker = threading.Thread(target=asyncio.run, args=(loops(),))
    worker.start()
    worker.join()
    if done["messages"] != 4 * count + 5:
        raise AssertionError(f"{done['messages']} messages came back")
    return done


ROLES = {f.__name__: f for f in (grpc_server, grpc_client)}
