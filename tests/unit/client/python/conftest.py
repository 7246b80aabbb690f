"""Fixtures of the Python client's tests: fake servers, their clients, and rows to score."""

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "client" / "python"))

import logprobd
from logprobd import _pool
from logprobd.testing import FakeServer
from several_servers import Aio, Sync, fake

HIDDEN_SIZE = 16
VOCAB_SIZE = 101  # odd, so that swapped rows and columns are detected


@pytest.fixture(autouse=True)
def patient_first_look(monkeypatch):
    """Waits for the checks of all servers before the first request, even on a busy machine."""
    monkeypatch.setattr(_pool, "FIRST_LOOK_SECONDS", 30.0)


@pytest.fixture
def server():
    with FakeServer(vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE) as server:
        yield server


@pytest.fixture
def client(server):
    with logprobd.Client(server.address, timeout=20) as client:
        yield client


@pytest.fixture
def small_chunks(server):
    """Provides a client that splits every call into requests of at most 3 rows."""
    with logprobd.Client(server.address, timeout=20, chunk_rows=3, max_inflight=4) as client:
        yield client


@pytest.fixture
def rows():
    """Returns 10 rows of float32 hidden states and their targets."""
    draw = np.random.default_rng(7)
    hidden = draw.standard_normal((10, HIDDEN_SIZE)).astype(np.float32)
    return hidden, draw.integers(0, VOCAB_SIZE, 10)


@pytest.fixture
def servers():
    """Provides three servers of the same head."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(fake()) for _ in range(3)]


@pytest.fixture
def many_rows():
    draw = np.random.default_rng(3)
    hidden = draw.standard_normal((120, HIDDEN_SIZE)).astype(np.float32)
    return hidden, draw.integers(0, VOCAB_SIZE, 120)


@pytest.fixture(params=[Sync, Aio])
def connect(request):
    return request.param
