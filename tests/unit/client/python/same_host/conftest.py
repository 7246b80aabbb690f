"""Fixtures: a server that shares memory, its client, and more rows than are sent in a message."""

import numpy as np
import pytest
from logprobd import Client
from logprobd.testing import FakeServer
from shared_case import HIDDEN, VOCAB


@pytest.fixture
def server():
    with FakeServer(vocab_size=VOCAB, hidden_size=HIDDEN, shared_memory=True) as server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.address, timeout=20) as client:
        yield client


@pytest.fixture
def rows():
    """Returns 100 rows of fp32, or 200 KiB, which is more than the limit for rows in the message."""
    draw = np.random.default_rng(11)
    return draw.standard_normal((100, HIDDEN)).astype(np.float32), draw.integers(0, VOCAB, 100)


@pytest.fixture
def expected(server, rows):
    with Client(server.address, transport="tcp") as client:
        result = client.score(*rows)
        assert (result.transport, client.transport) == ("tcp", "tcp")
    server.requests.clear()
    return result.logprob
