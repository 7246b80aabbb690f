"""Tests rows that are sent through shared memory."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from logprobd import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    RetryPolicy,
    _wire,
)
from logprobd.arrays import HiddenRows
from logprobd.testing import FakeServer
from shared_case import HIDDEN, VOCAB, transports


def test_rows_of_a_client_on_the_same_host_go_through_shared_memory(server, client, rows, expected):
    result = client.score(*rows)

    assert np.array_equal(result.logprob, expected)
    assert (result.transport, client.transport, client.transport_reason) == ("shm", "shm", "")
    assert transports(server) == ["shm"]
    assert server.requests[0].message_bytes < 1000


def test_before_the_first_call_nothing_has_travelled(client):
    assert (client.transport, client.transport_reason) == ("tcp", "nothing has been scored yet")


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
    assert client.transport_reason == "with several servers, rows are sent inside requests"
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
    assert "6144 bytes, sending the rows inside the request is faster" in client.transport_reason


def test_most_rows_decide_what_is_reported(server, rows):
    hidden, targets = rows
    with Client(server.address, chunk_rows=32) as client:
        result = client.score(hidden[:63], targets[:63])

    assert sorted(transports(server)) == ["shm", "tcp"]  # chunks of 32 rows (64 KiB) and of 31
    assert result.transport == "shm"


def test_slots_are_used_again(server, client, rows):
    for _ in range(20):
        client.score(*rows)

    assert server.control.num_regions == 1


def test_slots_of_failed_and_late_calls_are_free_again(server, rows, expected):
    with Client(server.address, retry=RetryPolicy(attempts_max=1), max_inflight=2) as client:
        client.score(*rows)
        pool = client._local._pool
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


@pytest.mark.parametrize(("owner", "name"), [(HiddenRows, "copy_to"), (_wire, "SharedMemorySlice")])
def test_the_slot_of_rows_that_cannot_be_sent_is_free_again(client, rows, monkeypatch, owner, name):
    client.score(*rows)
    pool = client._local._pool

    def fail(*_):
        raise MemoryError("no memory for the conversion")

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(MemoryError):
        client.score(*rows)

    assert all(region.is_empty for region in pool._regions)


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
