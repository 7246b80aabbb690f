"""Tests the fallback to TCP, the return to shared memory, and forced transports."""

import numpy as np
import pytest
from logprobd import Client, InvalidArgument, Unavailable, _local_transport
from logprobd._fake_local import FakeLimits
from logprobd._local_transport import LocalTransport
from logprobd.testing import FakeServer
from shared_case import HIDDEN, VOCAB, transports


def test_without_a_control_socket_tcp_is_used(rows):
    with FakeServer(vocab_size=VOCAB, hidden_size=HIDDEN) as server, Client(server.address) as c:
        assert c.score(*rows).transport == "tcp"
        assert c.transport_reason == "the server has no control socket"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot_id": "other"}, "another host"),
        ({"control_path": "/nowhere/c.sock"}, "mount the folder"),
    ],
)
def test_without_access_to_the_control_socket_tcp_is_used(
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
    # The first request is refused, the second one uses a new lease.
    assert transports(server)[-2:] == ["shm", "shm"]


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

    with pytest.raises(InvalidArgument, match="simulated failure"):
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
        assert client.score(rows[0][:1], rows[1][:1]).transport == "shm"  # even a small request
        assert client.score(rows[0][:0], rows[1][:0]).logprob.shape == (0,)


def test_tcp_opens_no_control_socket(server, rows):
    with Client(server.address, transport="tcp") as client:
        client.score(*rows)

    assert client.transport_reason == 'transport is "tcp"'
    assert server.control.clients == []


def test_a_forced_transport_that_is_not_available_says_why(rows):
    with FakeServer(vocab_size=VOCAB, hidden_size=HIDDEN) as server:
        client = Client(server.address, transport="shm")

        with pytest.raises(Unavailable, match='"shm", which .* no control socket'):
            client.score(*rows)
        with pytest.raises(Unavailable, match="no control socket"):
            next(client.score_stream([rows]))
        with pytest.raises(Unavailable, match="no control socket"):
            client.buffer(1, HIDDEN)
        assert server.requests == []


def test_forcing_shared_memory_that_the_server_lacks_is_reported(rows):
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


def test_after_a_failure_shared_memory_is_tried_again_later(server, rows):
    now = [100.0]
    with Client(server.address) as client:
        client._local = LocalTransport(client._settings, clock=lambda: now[0])
        server.control.stop()
        assert client.score(*rows).transport == "tcp"
        server.control.start()
        assert client.score(*rows).transport == "tcp"

        now[0] += _local_transport.RETRY_SECONDS
        assert client.score(*rows).transport == "shm"


def test_limits_of_the_fake_can_be_set(rows):
    limits = FakeLimits(lease_regions_max=0)
    with (
        FakeServer(
            vocab_size=VOCAB, hidden_size=HIDDEN, shared_memory=True, local_limits=limits
        ) as server,
        Client(server.address) as client,
    ):
        assert client.score(*rows).transport == "tcp"
