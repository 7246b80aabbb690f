"""Tests clients on the host of the real server, which pass their rows through shared memory."""

import asyncio
import json
import pathlib
import subprocess

import numpy as np
import pytest
from logprobd import AsyncClient, Client, Unavailable
from unused_ports import unused_ports

# At 64 fp32 elements per row these are 250 KiB, which is more than a client puts into the message.
ROWS = 1000


@pytest.fixture
def start_local(start_server, model, tmp_path: pathlib.Path):
    """Returns a function that starts servers, all with the same path of the control socket."""

    def start(*options: str):
        return start_server("--model", str(model.path), "--local", str(tmp_path / "s"), *options)

    return start


@pytest.fixture
def rows():
    draw = np.random.default_rng(5)
    return draw.standard_normal((ROWS, 64)).astype(np.float32), draw.integers(0, 1003, ROWS)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    monkeypatch.delenv("LOGPROBD_TRANSPORT", raising=False)


def requests_over(server, transport: str) -> float:
    return server.metric(
        "logprobd_request_duration_seconds_count", method="Score", transport=transport
    )


def test_rows_use_shared_memory_by_default_and_give_the_bits_of_tcp(start_local, rows):
    server = start_local()

    with Client(server.grpc) as client, Client(server.grpc, transport="tcp") as tcp:
        local, remote = client.score(*rows), tcp.score(*rows)
        assert (client.transport, client.transport_reason) == ("shm", "")
        assert (tcp.transport, tcp.transport_reason) == ("tcp", 'transport is "tcp"')

    assert (local.transport, remote.transport) == ("shm", "tcp")
    assert np.array_equal(local.logprob, remote.logprob)
    assert np.array_equal(local.entropy, remote.entropy)
    assert requests_over(server, "shm") == 1


def test_rows_of_small_requests_are_in_the_message(start_local, rows):
    hidden, targets = rows

    with Client(start_local().grpc) as client:
        client.score(hidden[:10], targets[:10])

        assert client.transport == "tcp"
        assert "sending the rows inside the request is faster" in client.transport_reason


@pytest.mark.parametrize("cut", [{}, {"chunk_rows": 300, "max_inflight": 2}])
def test_streams_and_calls_that_are_cut_give_the_same_bits(start_local, rows, cut):
    server = start_local()
    with Client(server.grpc, transport="tcp") as tcp:
        expected = tcp.score(*rows).logprob

    with Client(server.grpc, transport="shm", **cut) as client:
        results = [client.score(*rows), *client.score_stream([rows] * 5)]

    for result in results:
        assert result.transport == "shm"
        assert np.array_equal(result.logprob, expected)


def test_the_asyncio_client_uses_the_same_transport(start_local, rows):
    server = start_local()

    async def score(transport: str):
        async with AsyncClient(server.grpc, transport=transport) as client:
            return await client.score(*rows), client.transport

    (local, local_transport), (remote, remote_transport) = (
        asyncio.run(score(transport)) for transport in ("auto", "tcp")
    )

    assert (local_transport, remote_transport) == ("shm", "tcp")
    assert np.array_equal(local.logprob, remote.logprob)


def test_rows_in_a_buffer_are_scored_in_place(start_local, rows):
    hidden, targets = rows
    server = start_local()

    with Client(server.grpc) as client:
        buffer = client.buffer(ROWS, 64, "fp32")
        buffer[:] = hidden
        whole = client.score(buffer, targets)
        # Rows in a buffer need no copy, so not even a few are sent in the message.
        few = client.score(buffer[:4], targets[:4])
        transports = (whole.transport, few.transport)

    with Client(server.grpc, transport="tcp") as tcp:
        expected = tcp.score(hidden, targets).logprob
    assert transports == ("shm", "shm")
    assert np.array_equal(whole.logprob, expected)
    assert np.array_equal(few.logprob, expected[:4])
    assert np.array_equal(buffer, hidden)  # readable after the client is closed


def test_a_client_recovers_after_its_server_was_killed(start_local, rows):
    address = f"127.0.0.1:{unused_ports(1)[0]}"
    server = start_local("--listen", address)
    with Client(address, timeout=60) as client:
        buffer = client.buffer(ROWS, 64, "fp32")
        buffer[:] = rows[0]
        expected = client.score(*rows).logprob
        assert client.transport == "shm"
        server.process.kill()
        server.wait()

        restarted = start_local("--listen", address)

        assert np.array_equal(client.score(*rows).logprob, expected)
        assert client.transport == "shm"
        assert np.array_equal(client.score(buffer, rows[1]).logprob, expected)
        assert requests_over(restarted, "shm") >= 1


def test_without_a_socket_rows_travel_by_tcp_and_the_client_says_why(start_server, model, rows):
    server = start_server("--model", str(model.path), "--local", "none")

    with Client(server.grpc) as client:
        assert client.score(*rows).transport == "tcp"
        assert client.transport_reason == "the server has no control socket"
        assert client.buffer(2, 64).shape == (2, 64)
    with Client(server.grpc, transport="shm") as client:
        with pytest.raises(
            Unavailable, match='transport is "shm".*the server has no control socket'
        ):
            client.score(*rows)
        with pytest.raises(Unavailable, match="the server has no control socket"):
            client.buffer(2, 64)


def test_rows_beyond_the_servers_limits_travel_by_tcp(start_local, rows):
    server = start_local("--shared-memory-bytes", "64KiB", "--region-bytes", "64KiB")

    with Client(server.grpc) as client, Client(server.grpc, transport="tcp") as tcp:
        assert np.array_equal(client.score(*rows).logprob, tcp.score(*rows).logprob)
        assert client.transport == "tcp"
        assert client.transport_reason != ""


def test_several_servers_get_their_rows_in_requests(start_server, model, rows, tmp_path):
    servers = [
        start_server("--model", str(model.path), "--local", str(tmp_path / name)) for name in "ab"
    ]

    with Client([server.grpc for server in servers], chunk_rows=100) as client:
        client.score(*rows)

        assert client.transport == "tcp"
        assert client.transport_reason == "with several servers, rows are sent inside requests"
    assert sum(requests_over(server, "tcp") for server in servers) == 10


def logprobctl(binaries, command: str, *options: str, transport: str = ""):
    return subprocess.run(
        [binaries / "logprobctl", command, *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={"LOGPROBD_TRANSPORT": transport},
    )


def test_logprobctl_scores_the_same_over_both_transports(binaries, start_local, rows, tmp_path):
    server = start_local()
    np.save(tmp_path / "hidden.npy", rows[0])
    np.save(tmp_path / "targets.npy", rows[1])
    files = ("--hidden", str(tmp_path / "hidden.npy"), "--targets", str(tmp_path / "targets.npy"))

    results = [
        logprobctl(binaries, "score", "--address", server.grpc, *files, transport=transport)
        for transport in ("auto", "tcp")
    ]

    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    assert results[0].stdout == results[1].stdout
    assert len(results[0].stdout.splitlines()) == ROWS
    assert requests_over(server, "shm") == 1


def test_logprobctl_says_why_a_forced_transport_is_not_available(
    binaries, start_server, model, rows
):
    server = start_server("--model", str(model.path), "--local", "none")

    result = logprobctl(
        binaries, "bench", "--address", server.grpc, "--requests", "3", "--transport", "shm"
    )

    assert result.returncode == 1
    assert "transport is shm, which" in result.stderr
    assert "the server has no control socket" in result.stderr


@pytest.mark.parametrize(
    ("rows", "options", "transport"),
    [
        (1000, ("--transport", "tcp"), "tcp"),
        (1000, (), "shm"),
        (1000, ("--fresh", "--writers", "2"), "shm"),
        (2, (), "tcp"),  # copying a few rows into the message is faster
        (2, ("--fresh",), "shm"),  # the server reads them in place, without a copy
    ],
)
def test_bench_reports_the_transport_of_the_rows(binaries, start_local, rows, options, transport):
    server = start_local()

    result = logprobctl(
        binaries,
        "bench",
        *("--address", server.grpc, "--rows", str(rows), "--requests", "30", "--json"),
        *("--concurrency-range", "2", "--verify"),
        *options,
    )

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["results"][0]["transport"] == transport
    assert report["verification"]["passed"]
    assert report["verification"]["answers_different"] == 0
