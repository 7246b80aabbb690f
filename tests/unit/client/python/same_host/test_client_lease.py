"""Tests leases of pickled, forked and garbage-collected clients."""

import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from logprobd import Client

PACKAGE = Path(__file__).resolve().parents[5] / "client" / "python"


def test_a_pickled_client_makes_a_lease_of_its_own(server, client, rows, expected):
    client.score(*rows)

    with pickle.loads(pickle.dumps(client)) as other:
        assert np.array_equal(other.score(*rows).logprob, expected)
        assert other.transport == "shm"
        assert len(server.control.clients) == 2


FORK = """
import os, sys
import numpy as np
from logprobd import Client

client = Client(sys.argv[1], timeout=15, client_id="family")
hidden = np.ones((100, 512), np.float32)
before = client.score(hidden, [1] * 100).logprob
buffer = client.buffer(100, 512, "fp32")
buffer[:] = hidden
lease = client._local._lease.id
child = os.fork()
if child == 0:
    same = np.array_equal(client.score(buffer, [1] * 100).logprob, before)
    own = client.transport == "shm" and client._local._lease.id != lease
    client.close()
    os._exit(0 if same and own else 1)
code = os.waitpid(child, 0)[1]
assert code == 0, code
assert np.array_equal(client.score(buffer, [1] * 100).logprob, before)
assert client.transport == "shm" and client._local._lease.id == lease
print("ok")
"""


def test_a_forked_child_has_a_lease_of_its_own_and_leaves_the_parents(server):
    done = subprocess.run(
        [sys.executable, "-c", FORK, server.address],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert done.stdout.strip() == "ok", done.stderr


def test_an_unreferenced_lease_is_returned(server, rows):
    client = Client(server.address)
    client.score(*rows)
    assert len(server.control.clients) == 1

    del client
    gc.collect()

    for _ in range(1000):
        if not server.control.clients:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the lease is still held")
