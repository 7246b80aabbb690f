"""Tests of when a request is retried, when a call gives up, and which error it raises."""

import asyncio
import contextlib
import math
import random
import threading
import time
from concurrent import futures

import grpc
import numpy as np
import pytest
from logprobd import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    LogprobdError,
    NotFound,
    Overloaded,
    RetryPolicy,
    ServerBug,
    Unavailable,
)
from logprobd._core import before
from logprobd._fake_scoring import Refusal
from logprobd.retry import RetryNotice, Window
from logprobd.testing import FakeServer
from waiting import wait_until


class Highest(random.Random):
    """A random source that returns the upper bound of each wait."""

    def uniform(self, a, b):
        return b


def test_waits_double_up_to_the_cap():
    policy = RetryPolicy(base_seconds=0.1, cap_seconds=1.0)
    error = Unavailable("x")

    waits = [policy.delay(error, attempts, Highest()) for attempts in range(1, 7)]

    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_waits_have_full_jitter():
    policy = RetryPolicy(base_seconds=1.0)
    waits = [policy.delay(Unavailable("x"), 1) for _ in range(200)]

    assert min(waits) < 0.2
    assert max(waits) > 0.8


def test_a_hint_is_the_shortest_wait_and_a_negative_one_forbids_a_retry():
    # Regression: the hint replaced the growing wait, so refused clients retried at the same time.
    policy = RetryPolicy(base_seconds=0.1, cap_seconds=1.0)
    error = Overloaded("x", retry_after=4.0)

    assert [policy.delay(error, attempts, Highest()) for attempts in (1, 2, 9)] == [4.1, 4.2, 5.0]
    assert min(policy.delay(error, 9) for _ in range(100)) >= 4.0
    assert policy.delay(Overloaded("x", retry_after=-1.0), 1) is None


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("x"),
        DeadlineExceeded("x"),
        Cancelled("x"),
        ServerBug("x"),
        LogprobdError("x"),
    ],
)
def test_other_errors_are_not_retried(error):
    assert RetryPolicy().delay(error, 1) is None


def test_attempts_are_bounded():
    policy = RetryPolicy(attempts_max=3, overloaded_attempts_max=5)

    assert policy.delay(Unavailable("x"), 2) is not None
    assert policy.delay(Unavailable("x"), 3) is None
    assert policy.delay(Overloaded("x"), 4) is not None
    assert policy.delay(Overloaded("x"), 5) is None


def test_the_window_halves_and_grows_back():
    window = Window(8)
    window.refused()
    window.refused()
    assert window.size == 2
    for _ in range(100):
        window.succeeded()
    assert window.size == 8
    for _ in range(10):
        window.refused()
    assert window.size == 1


def test_a_limit_of_the_window_does_not_undo_a_refusal():
    window = Window(8)
    window.refused()

    window.limit(6)

    assert window.size == 4
    for _ in range(100):
        window.succeeded()
    assert window.size == 6


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "UNAVAILABLE"])
@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_refused_requests_are_sent_again(server, rows, code, chunk_rows):
    with Client(server.address, chunk_rows=chunk_rows, timeout=20) as client:
        expected = client.score(*rows).logprob
        server.requests.clear()
        server.fail_next(3, code, retry_after=0.01)

        result = client.score(*rows)

    assert np.array_equal(result.logprob, expected)
    assert len(server.requests) == 3 + (4 if chunk_rows == 3 else 1)


def test_the_servers_hint_is_waited_for(server, client, rows):
    server.fail_next(1, retry_after=0.3)

    begin = time.monotonic()
    client.score(*rows)

    assert time.monotonic() - begin >= 0.3


def test_a_negative_hint_is_obeyed(server, client, rows):
    server.fail_next(1, retry_after=-1)

    with pytest.raises(Overloaded) as caught:
        client.score(*rows)

    assert caught.value.retry_after < 0
    assert len(server.requests) == 1


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_invalid_arguments_are_sent_once(server, rows, chunk_rows):
    server.fail_next(100, "INVALID_ARGUMENT")

    with (
        Client(server.address, chunk_rows=chunk_rows, max_inflight=1) as client,
        pytest.raises(InvalidArgument),
    ):
        client.score(*rows)

    assert len(server.requests) == 1


def test_a_wait_beyond_the_deadline_is_not_begun(server, rows):
    server.fail_next(100, retry_after=60)

    begin = time.monotonic()
    with Client(server.address) as client, pytest.raises(Overloaded) as caught:
        client.score(*rows, timeout=5)

    assert time.monotonic() - begin < 4
    assert caught.value.retry_after == 60
    assert "max_inflight" in str(caught.value)


def test_a_wait_of_any_method_must_end_before_its_deadline():
    error, notice = Unavailable("x"), RetryNotice()
    deadline = time.monotonic() + 100

    assert before(deadline, 10.0, error, 1, notice) == 10.0
    with pytest.raises(Unavailable):
        before(deadline, 200.0, error, 1, notice)


def test_an_error_cancels_the_other_requests_of_its_call(server, connect, rows, monkeypatch):
    arrived = threading.Barrier(2)
    released = threading.Event()
    genuine = server._answer

    def answer(*args):
        if arrived.wait(20) == 0:
            raise Refusal("INVALID_ARGUMENT", "bad")
        released.wait(20)
        return genuine(*args)

    begun = []
    with connect([server.address], chunk_rows=5) as client:
        client.info()
        pool = client.client._pool
        begin = pool.begin
        monkeypatch.setattr(pool, "begin", lambda *args: begun.append(begin(*args)) or begun[-1])
        monkeypatch.setattr(server, "_answer", answer)

        with pytest.raises(InvalidArgument, match="bad"):
            client.score(*rows)
        ended = [call.done() for call in begun]
        released.set()

    assert ended == [True, True]


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_what_a_server_cancels_is_sent_again(server, rows, chunk_rows):
    # Regression: calls failed with Cancelled when a server cancelled them at the end of its drain.
    with Client(server.address, chunk_rows=chunk_rows, timeout=20) as client:
        client.info()
        server.fail_next(1, "CANCELLED")

        assert client.score(*rows).logprob.shape == (10,)

        server.fail_next(1, "CANCELLED")
        assert len(list(client.score_stream([rows]))) == 1


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_a_slow_server_is_a_deadline_error(server, rows, chunk_rows):
    with Client(server.address, chunk_rows=chunk_rows) as client:
        client.info()
        server.delay = 1.0
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="timeout") as caught:
            client.score(*rows, timeout=0.3)
    assert time.monotonic() - begin < 0.9
    assert isinstance(caught.value, TimeoutError)


def test_a_call_may_have_no_time_limit(server, rows):
    # Regression: the call ended at once, because gRPC read the deadline as a time in the past.
    with Client(server.address, timeout=math.inf) as client:
        assert client.score(*rows).logprob.shape == (10,)
        assert len(list(client.score_stream([rows]))) == 1

    async def score():
        async with AsyncClient(server.address, timeout=math.inf) as client:
            return await client.score(*rows), [r async for r in client.score_stream([rows])]

    assert len(asyncio.run(score())) == 2


def test_an_absent_server_is_named(rows):
    policy = RetryPolicy(attempts_max=2, base_seconds=0.01)

    with (
        Client("127.0.0.1:1", retry=policy) as client,
        pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 .*LOGPROBD_ADDRESS"),
    ):
        client.score(*rows)


def test_a_call_survives_a_restart_of_the_server(rows):
    server = FakeServer(hidden_size=16).start()
    with Client(server.address, timeout=20) as client:
        client.score(*rows)
        server.stop()
        restart = threading.Timer(0.3, server.start)
        restart.start()

        assert client.score(*rows).logprob.shape == (10,)

        restart.join()
    server.stop()


def test_wait_ready_waits_for_a_starting_server(server, client):
    server.ready = False
    with pytest.raises(Unavailable, match="the server is starting or stopping"):
        client.wait_ready(timeout=0.2)
    threading.Timer(0.2, lambda: setattr(server, "ready", True)).start()

    client.wait_ready(timeout=10)


def test_wait_ready_says_why_nothing_answers():
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable, match="UNAVAILABLE"):
        client.wait_ready(timeout=0.2)


@contextlib.contextmanager
def health_of(*answers: bytes | None):
    """Serves Health.Check with these answers in turn, None for no answer, and yields its address and those given."""
    is_over = threading.Event()
    checks: list[bytes | None] = []

    def check(_request, _context):
        checks.append(answers[len(checks)])
        if checks[-1] is None:
            is_over.wait(60)
        return checks[-1] or b""

    server = grpc.server(futures.ThreadPoolExecutor(2))
    method = grpc.unary_unary_rpc_method_handler(check)
    service = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", checks
    finally:
        is_over.set()
        server.stop(None).wait()


def test_wait_ready_checks_again_when_a_check_is_not_answered(monkeypatch):
    monkeypatch.setattr("logprobd._core.CHECK_TIMEOUT_SECONDS", 0.2)

    with health_of(None, b"\x08\x01") as (address, checks), Client(address) as client:
        client.wait_ready(timeout=20)

        assert len(checks) == 2


# Regression: the timeout of the last check replaced what the server had said.
def test_wait_ready_says_what_the_server_said_last():
    with health_of(b"\x08\x02", None) as (address, checks), Client(address) as client:
        with pytest.raises(Unavailable, match="the server is starting or stopping"):
            client.wait_ready(timeout=1)

        assert len(checks) == 2


def test_wait_ready_does_not_wait_for_another_kind_of_server():
    # Regression: wait_ready retried until its timeout.
    other = grpc.server(futures.ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()

    with Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(NotFound, match="Is it a logprobd server"):
            client.wait_ready(timeout=60)

    other.stop(None).wait()


def test_a_failed_call_leaves_no_work_behind(server, client):
    # Regression: the request stayed counted, so a removed server's connection was never closed.
    with pytest.raises(DeadlineExceeded):
        client.verify(timeout=-1.0)

    assert client.servers()[0].requests == 0


def test_internal_errors_are_server_bugs(server, client, rows):
    server.fail_next(1, "INTERNAL")

    with pytest.raises(ServerBug, match="log"):
        client.score(*rows)


def test_a_message_above_the_servers_limit_says_so(rows):
    with (
        FakeServer(hidden_size=16, message_bytes_max=300) as server,
        Client(server.address) as client,
    ):
        server.message_bytes_max = 0  # so that the client does not learn the limit
        with pytest.raises(InvalidArgument, match="chunk_bytes"):
            client.score(*rows)


def test_close_cancels_what_is_in_flight(server, rows):
    client = Client(server.address)
    client.info()
    server.delay = 1.0
    errors = []

    def score():
        try:
            client.score(*rows)
        except LogprobdError as error:
            errors.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    wait_until(lambda: server.requests)
    client.close()
    thread.join(timeout=5)

    assert [type(error) for error in errors] == [Cancelled]
    with pytest.raises(Cancelled, match="closed"):
        client.score(*rows)
