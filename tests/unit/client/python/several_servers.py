"""Fake servers of one head, and both clients behind one interface, for tests with several servers."""

import asyncio

from logprobd import AsyncClient, Client, RetryPolicy
from logprobd.testing import FakeServer

HIDDEN_SIZE, VOCAB_SIZE = 16, 101
QUICK = RetryPolicy(attempts_max=3, base_seconds=0.01)


def fake(**facts):
    return FakeServer(**{"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, **facts})


class Sync:
    """Client with the methods that these tests call."""

    def __init__(self, *args, **settings):
        self.client = Client(*args, **{"timeout": 120, "retry": QUICK, **settings})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def __getattr__(self, name):
        return getattr(self.client, name)

    def stream(self, batches, **options):
        return list(self.client.score_stream(batches, **options))


class Aio(Sync):
    """AsyncClient with blocking methods. Each runs to its end on the client's own event loop."""

    def __init__(self, *args, **settings):
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(*args, **{"timeout": 120, "retry": QUICK, **settings})

    def __exit__(self, *_):
        self.loop.run_until_complete(self.client.close())
        self.loop.close()

    def __getattr__(self, name):
        if name == "servers":
            return self.client.servers
        return lambda *args, **options: self.loop.run_until_complete(
            getattr(self.client, name)(*args, **options)
        )

    def stream(self, batches, **options):
        async def collect():
            return [result async for result in self.client.score_stream(batches, **options)]

        return self.loop.run_until_complete(collect())


def addresses(servers):
    return [server.address for server in servers]


def counts(servers):
    return [len(server.requests) for server in servers]


def states(client):
    return [state.state for state in client.servers()]
