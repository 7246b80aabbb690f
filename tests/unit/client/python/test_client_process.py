"""Clients work in threads, in child processes and after pickling, and an import starts nothing."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from logprobd import AsyncClient, Client

PACKAGE = Path(__file__).resolve().parents[4] / "client" / "python"


def test_a_pickled_client_scores_the_same(server, rows):
    client = Client(server.address, timeout=12, max_inflight=3, chunk_rows=4, client_id="me")
    expected = client.score(*rows).logprob

    again = pickle.loads(pickle.dumps(client))

    assert again._settings == client._settings
    assert np.array_equal(again.score(*rows).logprob, expected)
    assert pickle.loads(pickle.dumps(AsyncClient(server.address))).address == server.address


def _score_in_child(client, rows, connection):
    connection.send((os.getpid(), client.score(*rows).logprob))
    connection.close()


# The FakeServer's threads live in this process: a child forked from it could inherit a lock that
# one of them holds. Therefore the process that forks holds only a client.
FORK = """
import os, sys
import numpy as np
from logprobd import Client

client = Client(sys.argv[1], chunk_rows=3, timeout=15)
hidden = np.ones((10, 16), np.float32)
before = client.score(hidden, range(10)).logprob
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        same = np.array_equal(client.score(hidden, range(10)).logprob, before)
        os._exit(0 if same else 1)
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
assert codes == [0, 0], codes
assert np.array_equal(client.score(hidden, range(10)).logprob, before)
print("ok")
"""


@pytest.mark.parametrize("count", [1, 3])
def test_a_used_client_works_in_forked_children_and_in_the_parent(servers, count):
    addresses = ",".join(server.address for server in servers[:count])
    done = subprocess.run(
        [sys.executable, "-c", FORK, addresses],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert done.stdout.strip() == "ok", done.stderr


def test_a_client_crosses_into_a_spawned_process(server, client, rows, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGE}{os.pathsep}{Path(__file__).parent}")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)

    child = context.Process(target=_score_in_child, args=(client, rows, sender))
    child.start()
    pid, logprob = receiver.recv()
    child.join(timeout=20)

    assert pid == child.pid
    assert np.array_equal(logprob, client.score(*rows).logprob)


def test_threads_share_a_client(server, small_chunks, rows):
    hidden, targets = rows
    expected = small_chunks.score(hidden, targets).logprob
    wrong = []

    def score(turn):
        for _ in range(5):
            order = np.roll(np.arange(10), turn)
            if not np.array_equal(
                small_chunks.score(hidden[order], targets[order]).logprob, expected[order]
            ):
                wrong.append(turn)

    threads = [threading.Thread(target=score, args=(turn,)) for turn in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)

    assert wrong == []


IMPORT = """
import sys, threading
import logprobd
assert threading.active_count() == 1, threading.enumerate()
assert "torch" not in sys.modules and "ml_dtypes" not in sys.modules
assert not any(name.startswith("google.protobuf") for name in sys.modules)
client = logprobd.Client("127.0.0.1:1")
assert threading.active_count() == 1
"""


def test_import_starts_no_thread_and_loads_no_extra():
    subprocess.run(
        [sys.executable, "-c", IMPORT],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        check=True,
        timeout=30,
    )


def test_a_closed_client_may_be_closed_again(server, rows):
    with Client(server.address) as client:
        client.score(*rows)
        client.close()
    client.close()
