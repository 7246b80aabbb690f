"""Rows that travel through shared memory, and how clients come back to TCP."""

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from logprobd import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    RetryPolicy,
    Unavailable,
    _carrier,
)
from logprobd._carrier import Carrier
from logprobd._fake_local import FakeLimits
from logprobd.arrays import HiddenRows
from logprobd.testing import FakeServer

PACKAGE = Path(__file__).resolve().parents[4] / "client" / "python"
HIDDEN = 512
VOCAB = 31


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
    """100 rows of fp32: 200 KiB, more than what goes in the message."""
    draw = np.random.default_rng(11)
    return draw.standard_normal((100, HIDDEN)).astype(np.float32), draw.integers(0, VOCAB, 100)


@pytest.fixture
def expected(server, rows):
    with Client(server.address, transport="tcp") as client:
        result = client.score(*rows)
        assert (result.transport, client.transport) == ("tcp", "tcp")
    server.requests.clear()
    return result.logprob


def transports(server):
    return [request.transport for request in server.requests]


def test_rows_of_a_client_on_the_same_host_go_through_shared_memory(server, client, rows, expected):
    result = client.score(*rows)

    assert np.array_equal(result.logprob, expected)
    assert (result.transport, client.transport, client.transport_reason) == ("shm", "shm", "")
    assert transports(server) == ["shm"]
    assert server.requests[0].message_bytes < 1000


def test_before_the_first_call_nothing_has_travelled(client):
    assert (client.transport, client.transport_reason) == ("tcp", "nothing was scored yet")


@pytest.mark.parametrize("ignored", [[], [0, 1, 2], [5, 50, 99]])
def test_a_call_that_is_cut_gives_the_same_scores(server, rows, expected, ignored):
    hidden, targets = rows
    targets = targets.copy()
    targets[ignored] = -100

    with Client(server.address, chunk_rows=33, max_inflight=2, transport="shm") as client:
        result = client.score(hidden, targets)

    kept = targets != -100
    assert np.array_equal(result.logprob[kept], expected[kept])
    assert (result.logprob[ignored] == 0).all()
    assert set(transports(server)) == {"shm"}
    assert result.transport == "shm"


def test_types_are_converted_on_the_way_in(server, client, rows):
    hidden, targets = rows
    tensor = torch.from_numpy(hidden)
    with Client(server.address, transport="tcp") as tcp:
        expected = tcp.score(hidden, targets, dtype="bf16").logprob

    for given in (hidden, tensor, tensor.bfloat16(), hidden.astype(np.float64), tensor.t().t()):
        result = client.score(given, targets, dtype="bf16")
        assert np.array_equal(np.asarray(result.logprob), expected)
        assert client.transport == "shm"


def test_rows_to_several_servers_travel_in_requests(server, rows, expected):
    with FakeServer(vocab_size=VOCAB, hidden_size=HIDDEN, shared_memory=True) as other:
        with Client([server.address, other.address], chunk_rows=50) as client:
            result = client.score(*rows)
            streamed = list(client.score_stream([rows]))
            buffer = client.buffer(100, HIDDEN, "fp32")

    assert np.array_equal(result.logprob, expected)
    assert np.array_equal(streamed[0].logprob, expected)
    assert (result.transport, client.transport) == ("tcp", "tcp")
    assert client.transport_reason == "several servers: rows travel in requests"
    assert set(transports(server) + transports(other)) == {"tcp"}
    assert buffer.shape == (100, HIDDEN)


def test_a_stream_that_is_abandoned_gives_its_slots_back(server, rows):
    with Client(server.address, transport="shm", max_inflight=2) as client:
        for _ in range(5):
            stream = client.score_stream([rows] * 4)
            next(stream)
            stream.close()
        client.score(*rows)

        assert client.servers()[0].bytes == 0
        assert client.transport == "shm"


def test_small_requests_go_in_their_message(server, client, rows):
    hidden, targets = rows

    result = client.score(hidden[:3], targets[:3])

    assert result.transport == "tcp"
    assert "6144 bytes travels faster in its message" in client.transport_reason


def test_most_rows_decide_what_is_reported(server, rows):
    hidden, targets = rows
    with Client(server.address, chunk_rows=32) as client:
        result = client.score(hidden[:63], targets[:63])

    assert sorted(transports(server)) == ["shm", "tcp"]  # 32 rows, which are 64 KiB, and 31
    assert result.transport == "shm"


def test_slots_are_used_again(server, client, rows):
    for _ in range(20):
        client.score(*rows)

    assert server.control.num_regions == 1


def test_slots_of_failed_and_late_calls_are_free_again(server, rows, expected):
    with Client(server.address, retry=RetryPolicy(attempts_max=1), max_inflight=2) as client:
        client.score(*rows)
        pool = client._carrier._pool
        server.fail_next(1, "INVALID_ARGUMENT")
        with pytest.raises(InvalidArgument):
            client.score(*rows)
        server.delay = 0.5
        with pytest.raises(DeadlineExceeded):
            client.score(*rows, timeout=0.1)
        with pytest.raises(DeadlineExceeded):
            list(client.score_stream([rows], timeout=0.1))
        server.delay = 0

        assert all(region.is_empty for region in pool._regions)
        assert np.array_equal(client.score(*rows).logprob, expected)


def test_a_retry_after_overload_is_scored_from_shared_memory(server, client, rows, expected):
    server.fail_next(2, "RESOURCE_EXHAUSTED", retry_after=0.001)

    result = client.score(*rows)

    assert np.array_equal(result.logprob, expected)
    assert transports(server) == ["shm"] * 3


def test_a_stream_uses_the_same_slots(server, client, rows, expected):
    results = list(client.score_stream([rows] * 12))

    assert all(np.array_equal(result.logprob, expected) for result in results)
    assert {result.transport for result in results} == {"shm"}
    assert client.transport == "shm"
    assert {request.method for request in server.requests} == {"ScoreStream"}
    assert server.control.num_regions == 1


def test_a_stream_survives_a_lost_lease_and_a_broken_connection(server, client, rows, expected):
    def batches():
        yield rows
        server.control.drop_leases()
        yield rows
        server.fail_next(1, "ABORTED")
        yield rows

    results = list(client.score_stream(batches()))

    assert all(np.array_equal(result.logprob, expected) for result in results)
    assert len(results) == 3


def test_threads_share_the_lease(server, client, rows, expected):
    wrong = []

    def score():
        for _ in range(5):
            if not np.array_equal(client.score(*rows).logprob, expected):
                wrong.append(1)

    threads = [threading.Thread(target=score) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert wrong == []
    assert len(server.control.clients) == 1


def test_the_asyncio_client_does_the_same(server, rows, expected):
    async def run():
        async with AsyncClient(server.address, chunk_rows=40, timeout=20) as client:
            results = await asyncio.gather(*(client.score(*rows) for _ in range(4)))
            server.control.drop_leases()
            results.append(await client.score(*rows))
            results += [r async for r in client.score_stream([rows] * 3)]
            buffer = await client.buffer(100, HIDDEN, "fp32")
            buffer[:] = rows[0]
            results.append(await client.score(buffer, rows[1]))
            return results, client.transport

    results, transport = asyncio.run(run())

    assert all(np.array_equal(result.logprob, expected) for result in results)
    assert transport == "shm"
    assert {result.transport for result in results} == {"shm"}


# --- arrays that need no copy


@pytest.fixture
def copies(monkeypatch):
    """How many chunks were copied."""
    counted = []
    original = HiddenRows.copy_to
    monkeypatch.setattr(
        HiddenRows, "copy_to", lambda self, *a: (counted.append(1), original(self, *a))
    )
    return counted


@pytest.mark.parametrize("dtype", ["fp32", np.float32, torch.float32])
def test_a_buffer_is_scored_where_it_lies(server, client, rows, expected, copies, dtype):
    hidden, targets = rows
    buffer = client.buffer(100, HIDDEN, dtype)
    buffer[:] = torch.from_numpy(hidden) if dtype is torch.float32 else hidden

    result = client.score(buffer, targets)

    assert np.array_equal(np.asarray(result.logprob), expected)
    assert (client.transport, copies) == ("shm", [])


def test_a_small_part_of_a_buffer_is_not_copied_either(server, client, rows, expected, copies):
    hidden, targets = rows
    buffer = client.buffer(100, HIDDEN, "fp32")
    buffer[:] = hidden

    result = client.score(buffer[10:13], targets[10:13])

    assert np.array_equal(result.logprob, expected[10:13])
    assert (result.transport, copies) == ("shm", [])


def test_a_buffer_of_bf16_bits_is_scored_as_such(server, client, rows, copies):
    bits = torch.from_numpy(rows[0]).bfloat16()
    buffer = client.buffer(100, HIDDEN)
    buffer[:] = bits.view(torch.int16).numpy().view(np.uint16)

    result = client.score(buffer, rows[1], dtype="bf16")

    assert copies == []
    assert np.array_equal(result.logprob, client.score(bits, rows[1]).logprob.numpy())


def test_a_buffer_with_ignored_rows_or_another_type_is_copied(
    server, client, rows, expected, copies
):
    hidden, targets = rows
    buffer = client.buffer(100, HIDDEN, "fp32")
    buffer[:] = hidden
    targets = targets.copy()
    targets[50] = -100

    assert np.array_equal(client.score(buffer, targets).logprob[:50], expected[:50])
    client.score(buffer, targets, dtype="bf16")

    assert (client.transport, len(copies)) == ("shm", 2)


def test_rows_that_are_not_aligned_are_copied(copies):
    with FakeServer(vocab_size=7, hidden_size=1001, shared_memory=True) as server:
        client = Client(server.address)
        buffer = client.buffer(30, 1001, "fp32")
        buffer[:] = 1

        client.score(buffer[1:], [1] * 29)

        assert (client.transport, len(copies)) == ("shm", 1)


def test_buffers_are_freed_with_their_last_reference(server, client):
    first = client.buffer(100, HIDDEN, "fp32")
    place = first.ctypes.data
    del first
    gc.collect()

    assert client.buffer(100, HIDDEN, "fp32").ctypes.data == place


def test_a_buffer_of_a_lost_lease_is_still_scored(server, client, rows, expected):
    buffer = client.buffer(100, HIDDEN, "fp32")
    buffer[:] = rows[0]
    server.control.drop_leases()

    result = client.score(buffer, rows[1])

    assert np.array_equal(result.logprob, expected)
    assert result.transport == "shm"


def test_a_buffer_outlives_close(server, client, rows):
    buffer = client.buffer(100, HIDDEN, "fp32")
    client.close()

    buffer[:] = rows[0]

    assert np.array_equal(buffer, rows[0])


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_where_no_memory_is_shared_a_buffer_is_an_ordinary_array(transport):
    with FakeServer(vocab_size=VOCAB, hidden_size=8, shared_memory=transport == "tcp") as server:
        client = Client(server.address, transport=transport)
        buffer = client.buffer(3, 8, "fp32")
        buffer[:] = 1

        assert client.score(buffer, [1, 2, 3]).transport == "tcp"


def test_a_buffer_may_be_empty(client):
    assert client.buffer(0, 8, "fp16").shape == (0, 8)


def test_a_negative_shape_is_refused(client):
    with pytest.raises(InvalidArgument, match="negative"):
        client.buffer(-1, 8)


# --- falling back


def test_without_a_local_socket_tcp_is_used(rows):
    with FakeServer(vocab_size=VOCAB, hidden_size=HIDDEN) as server, Client(server.address) as c:
        assert c.score(*rows).transport == "tcp"
        assert c.transport_reason == "the server has no local socket"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot_id": "other"}, "another host"),
        ({"control_path": "/nowhere/c.sock"}, "mount the folder"),
    ],
)
def test_a_server_that_cannot_be_reached_locally_is_reached_by_tcp(
    server, client, rows, expected, monkeypatch, change, reason
):
    access = server.control.access()
    for name, value in change.items():
        setattr(access, name, value)
    monkeypatch.setattr(server.control, "access", lambda: access)

    result = client.score(*rows)

    assert np.array_equal(result.logprob, expected)
    assert result.transport == "tcp"
    assert reason in client.transport_reason


def test_after_a_restart_the_client_connects_again(server, client, rows, expected):
    client.score(*rows)
    server.stop()
    server.start()

    result = client.score(*rows)

    assert np.array_equal(result.logprob, expected)
    assert result.transport == "shm"


def test_a_region_that_the_server_lost_is_replaced_once(server, client, rows, expected):
    client.score(*rows)
    for lease in server.control._leases:
        lease.regions.clear()

    result = client.score(*rows)

    assert np.array_equal(result.logprob, expected)
    assert result.transport == "shm"
    assert transports(server)[-2:] == ["shm", "shm"]  # refused, and again with a new lease


@pytest.mark.parametrize("chunk_rows", [1000, 50])
def test_a_server_that_refuses_every_slice_gets_tcp(
    server, rows, expected, monkeypatch, chunk_rows
):
    def lose(*_):
        for lease in server.control._leases:
            lease.regions.clear()

    read = server.control.read
    monkeypatch.setattr(server.control, "read", lambda request: (lose(), read(request))[1])

    with Client(server.address, chunk_rows=chunk_rows) as client:
        for _ in range(3):
            result = client.score(*rows)
            assert np.array_equal(result.logprob, expected)

        assert result.transport == "tcp"
        assert "no such region" in client.transport_reason
    assert transports(server).count("shm") <= 2 * (2 if chunk_rows == 50 else 1)


def test_an_error_of_the_request_itself_is_not_sent_again(server, client, rows):
    server.fail_next(1, "INVALID_ARGUMENT")

    with pytest.raises(InvalidArgument, match="told to fail"):
        client.score(*rows)

    assert transports(server) == ["shm"]


def test_when_the_servers_limits_are_reached_requests_go_by_tcp(server, rows, expected):
    server.control.limits.lease_bytes_max = 64 << 10  # 100 rows are 200 KiB

    with Client(server.address) as client:
        result = client.score(*rows)

        assert np.array_equal(result.logprob, expected)
        assert result.transport == "tcp"
        assert "limits on shared memory" in client.transport_reason


def test_a_transport_can_be_forced(server, rows, expected):
    with Client(server.address, transport="shm") as client:
        assert np.array_equal(client.score(*rows).logprob, expected)
        assert client.score(rows[0][:1], rows[1][:1]).transport == "shm"  # small ones too
        assert client.score(rows[0][:0], rows[1][:0]).logprob.shape == (0,)


def test_tcp_asks_for_nothing_local(server, rows):
    with Client(server.address, transport="tcp") as client:
        client.score(*rows)

    assert client.transport_reason == 'transport is "tcp"'
    assert server.control.clients == []


def test_a_forced_transport_that_cannot_be_had_says_why(rows):
    with FakeServer(vocab_size=VOCAB, hidden_size=HIDDEN) as server:
        client = Client(server.address, transport="shm")

        with pytest.raises(Unavailable, match='"shm", which .* no local socket'):
            client.score(*rows)
        with pytest.raises(Unavailable, match="no local socket"):
            next(client.score_stream([rows]))
        with pytest.raises(Unavailable, match="no local socket"):
            client.buffer(1, HIDDEN)
        assert server.requests == []


def test_a_server_without_shared_memory_is_told_when_it_is_forced(rows):
    with (
        FakeServer(vocab_size=VOCAB, hidden_size=HIDDEN, device_reader=lambda *_: b"") as server,
        Client(server.address, transport="shm") as client,
    ):
        with pytest.raises(Unavailable, match="the server shares no memory"):
            client.score(*rows)


def test_cuda_ipc_needs_a_cuda_tensor(server, rows):
    with Client(server.address, transport="cuda-ipc") as client:
        with pytest.raises(InvalidArgument, match="hidden is not a CUDA tensor"):
            client.score(*rows)


def test_after_a_failure_the_local_way_is_tried_again_later(server, rows):
    now = [100.0]
    with Client(server.address) as client:
        client._carrier = Carrier(client._settings, clock=lambda: now[0])
        server.control.stop()
        assert client.score(*rows).transport == "tcp"
        server.control.start()
        assert client.score(*rows).transport == "tcp"

        now[0] += _carrier.RETRY_SECONDS
        assert client.score(*rows).transport == "shm"


# --- processes


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
lease = client._carrier._lease.id
child = os.fork()
if child == 0:
    same = np.array_equal(client.score(buffer, [1] * 100).logprob, before)
    own = client.transport == "shm" and client._carrier._lease.id != lease
    client.close()
    os._exit(0 if same and own else 1)
code = os.waitpid(child, 0)[1]
assert code == 0, code
assert np.array_equal(client.score(buffer, [1] * 100).logprob, before)
assert client.transport == "shm" and client._carrier._lease.id == lease
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


def test_a_lease_that_nobody_uses_any_more_is_given_back(server, rows):
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


def test_limits_of_the_fake_can_be_set(rows):
    limits = FakeLimits(lease_regions_max=0)
    with (
        FakeServer(
            vocab_size=VOCAB, hidden_size=HIDDEN, shared_memory=True, local_limits=limits
        ) as server,
        Client(server.address) as client,
    ):
        assert client.score(*rows).transport == "tcp"
