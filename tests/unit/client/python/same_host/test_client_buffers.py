"""Arrays of Client.buffer, which are scored without a copy."""

import gc

import numpy as np
import pytest
import torch
from logprobd import Client, InvalidArgument
from logprobd.arrays import HiddenRows
from logprobd.testing import FakeServer
from shared_case import HIDDEN, VOCAB


@pytest.fixture
def copies(monkeypatch):
    """Counts the chunks that were copied."""
    counted = []
    original = HiddenRows.copy_to
    monkeypatch.setattr(
        HiddenRows, "copy_to", lambda self, *a: (counted.append(1), original(self, *a))
    )
    return counted


@pytest.mark.parametrize("dtype", ["fp32", np.float32, torch.float32])
def test_a_buffer_is_scored_without_a_copy(server, client, rows, expected, copies, dtype):
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
