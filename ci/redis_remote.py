"""redis-servers in another machine. There `serve` starts and ends them as it is asked to; here a `Remote` gives servers
that are used as those of this machine are. The orders go over connections of their own, between processes that are not
preloaded. Whoever reaches that port may give orders: it is for machines that are on a wire of their own."""

from multiprocessing.managers import BaseManager

from preload_lib import Reports
from redis_lib import Asked, Server

KEY = b"ringsock"


class Orders(BaseManager):
    """The connection on which servers are asked for."""


def serve(host, port, folder):
    """Starts servers at this host for whoever asks, until this process is ended."""
    reports = Reports(folder)

    def server(preload, settings, options):
        return Server(reports, preload, settings, options, host=host)

    Orders.register("server", server)
    listener = Orders((host, port), KEY).get_server()
    print("listening", flush=True)
    listener.serve_forever()


class RemoteServer(Asked):
    """A server in the other machine, with what `redis_lib.Server` can."""

    def __init__(self, there):
        super().__init__(*there.address())
        self.status, self.stop, self.tail = there.status, there.stop, there.tail
        self.report, self.complaints, self.stat = there.report, there.complaints, there.stat
        self.rdb_fault = there.rdb_fault


class Remote:
    """The other machine."""

    def __init__(self, host, port):
        Orders.register("server")
        self.orders = Orders((host, port), KEY)
        self.orders.connect()

    def server(self, preload, settings, options):
        """Starts a server there."""
        return RemoteServer(self.orders.server(preload, settings, options))
