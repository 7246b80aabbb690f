"""Clients of several servers balance their load and handle draining, failures and DNS names."""

import asyncio
import functools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from logprobd import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    Overloaded,
    RetryPolicy,
    Unavailable,
)
from several_servers import VOCAB_SIZE, addresses, counts, fake, states


def test_a_large_call_uses_all_servers_and_gives_the_bits_of_one(connect, servers, many_rows):
    with Client(servers[0].address) as alone:
        expected = alone.score(*many_rows, segments=[0, 50, 120])
    servers[0].requests.clear()

    with connect(addresses(servers), chunk_rows=5) as client:
        result = client.score(*many_rows, segments=[0, 50, 120])

    assert np.array_equal(result.logprob, expected.logprob)
    assert np.array_equal(result.segment_logprob, expected.segment_logprob)
    assert sum(counts(servers)) == 24
    assert min(counts(servers)) >= 4


def test_a_slow_server_gets_less(connect, servers, many_rows):
    released = threading.Event()
    answer = servers[1]._answer
    servers[1]._answer = lambda *args: released.wait(60) and answer(*args)

    def release(done, total):
        if done >= 100:
            released.set()

    with connect(addresses(servers), chunk_rows=1, max_inflight=4) as client:
        client.score(*many_rows, progress=release)

    fast, slow, other = counts(servers)
    assert slow < fast / 2
    assert slow < other / 2


def test_small_calls_take_turns(connect, servers, rows):
    with connect(",".join(addresses(servers))) as client:
        for _ in range(6):
            client.score(*rows)

    assert counts(servers) == [2, 2, 2]


def test_the_window_holds_for_each_server(connect, servers, many_rows):
    # No request is answered until the window of every server is full.
    lock, now, most = threading.Lock(), [0] * 3, [0] * 3
    full = threading.Event()

    def held(index, answer, *args):
        with lock:
            now[index] += 1
            most[index] = max(most[index], now[index])
            if min(most) == 2:
                full.set()
        full.wait(60)
        with lock:
            now[index] -= 1
        return answer(*args)

    for index, server in enumerate(servers):
        server._answer = functools.partial(held, index, server._answer)

    with connect(addresses(servers), chunk_rows=2, max_inflight=2) as client:
        client.score(*many_rows)

    assert most == [2, 2, 2]


def test_a_draining_server_is_left_and_no_call_fails(connect, servers, many_rows):
    def drain(done, total):
        servers[1].ready = False

    with connect(addresses(servers), chunk_rows=2, max_inflight=4) as client:
        result = client.score(*many_rows, progress=drain)
        seen = len(servers[1].requests)
        for _ in range(4):
            client.score(*many_rows)

        assert len(servers[1].requests) - seen < 8
        state = client.servers()[1]
    assert result.logprob.shape == (120,)
    assert (state.state, state.weights_versions) == ("out", {"fake": 1})
    assert "loading" in state.reason or "NOT_SERVING" in state.reason


def test_a_server_comes_back_when_its_health_says_so(connect, servers, rows):
    servers[0].ready = False

    with connect(addresses(servers[:2])) as client:
        client.score(*rows)
        assert states(client) == ["out", "ready"]
        assert "NOT_SERVING" in client.servers()[0].reason
        servers[0].ready = True
        end = time.monotonic() + 10
        while not servers[0].requests and time.monotonic() < end:
            client.score(*rows)

        assert states(client) == ["ready", "ready"]
    assert servers[0].requests


def test_a_server_killed_during_a_call_fails_nothing(connect, servers, many_rows):
    with connect(servers[0].address) as alone:
        expected = alone.score(*many_rows).logprob
    killed = []

    def kill(done, total):
        if not killed:
            killed.append(True)
            servers[2].stop()

    with connect(addresses(servers), chunk_rows=2, max_inflight=4) as client:
        result = client.score(*many_rows, progress=kill)

    assert killed
    assert np.array_equal(result.logprob, expected)


def test_requests_of_a_failed_server_do_not_wait(connect, servers, rows):
    patient = RetryPolicy(base_seconds=1000, cap_seconds=1000)
    with connect(addresses(servers), retry=patient) as client:
        servers[0].fail_next(1, "UNAVAILABLE")
        servers[1].fail_next(1, "RESOURCE_EXHAUSTED", retry_after=900)

        for _ in range(3):
            client.score(*rows)

        assert states(client) == ["out", "busy", "ready"]
        servers[2].fail_next(1, "RESOURCE_EXHAUSTED", retry_after=900)
        with pytest.raises(Overloaded, match="900 s"):  # no other server is ready
            client.score(*rows)


def test_a_server_that_asks_to_wait_is_passed_over(connect, servers, rows):
    with connect(addresses(servers)) as client:
        for server in servers:
            server.fail_next(1, "RESOURCE_EXHAUSTED", retry_after=60)
            before = counts(servers)
            client.score(*rows)
            if "busy" in states(client):
                break
        assert sum(counts(servers)) - sum(before) == 2
        busy = states(client).index("busy")
        seen = len(servers[busy].requests)
        for _ in range(4):
            client.score(*rows)

    assert len(servers[busy].requests) == seen


def test_a_stream_uses_all_servers_and_survives_the_loss_of_one(connect, servers, rows):
    with Client(servers[0].address) as alone:
        expected = alone.score(*rows).logprob

    def batches():
        for index in range(60):
            if index == 30:
                servers[1].stop()
            yield rows

    servers[0].requests.clear()
    with connect(addresses(servers), chunk_rows=3, max_inflight=3) as client:
        results = client.stream(batches())

    assert len(results) == 60
    assert all(np.array_equal(result.logprob, expected) for result in results)
    assert min(counts(servers)) > 5
    assert {request.method for server in servers for request in server.requests} == {"ScoreStream"}


def test_an_unreachable_server_is_named_by_servers_and_hinders_nothing(connect, servers, rows):
    with connect(["127.0.0.1:1", servers[0].address]) as client:
        assert states(client) == ["unknown", "unknown"]
        client.score(*rows)
        out = client.servers()[0]

    assert out.address == "127.0.0.1:1"
    assert out.state == "out"
    assert "UNAVAILABLE" in out.reason


def test_with_all_gone_each_is_named_with_its_reason(connect, servers, rows):
    servers[0].ready = False

    with connect(["127.0.0.1:1", servers[0].address]) as client:
        for call in (lambda: client.score(*rows), lambda: client.stream([rows])):
            with pytest.raises(
                Unavailable,
                match=rf"127\.0\.0\.1:1 \(UNAVAILABLE: .*\); {servers[0].address} \(health says "
                r"NOT_SERVING.*LOGPROBD_ADDRESS",
            ):
                call()


def test_a_call_waits_for_one_of_all_gone_servers_to_come_back(connect, servers, rows):
    for server in servers:
        server.ready = False
    timer = threading.Timer(0.3, lambda: setattr(servers[1], "ready", True))
    timer.start()

    with connect(
        addresses(servers), retry=RetryPolicy(attempts_max=100, base_seconds=0.05)
    ) as client:
        assert client.score(*rows).logprob.shape == (10,)

    assert counts(servers) == [0, 1, 0]


def test_wait_ready_waits_for_one_of_several(connect, servers):
    for server in servers:
        server.ready = False

    with connect(addresses(servers)) as client:
        with pytest.raises(Unavailable, match="NOT_SERVING"):
            client.list_heads()
        with pytest.raises(Unavailable, match="NOT_SERVING"):
            client.wait_ready(timeout=0.2)
        servers[2].ready = True

        client.wait_ready(timeout=10)


@pytest.fixture
def records(monkeypatch):
    """Returns the list of hosts that the name "scorer.test" resolves to, which a test may change."""
    hosts = []
    genuine = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        if host != "scorer.test":
            return genuine(host, port, *args, **kwargs)
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return hosts


def test_a_name_stands_for_a_server_at_each_record(connect, records, rows):
    with fake() as one, fake(host="127.0.0.2", port=one.port) as two:
        records += ["127.0.0.1", "127.0.0.2"]

        with connect(f"dns:///scorer.test:{one.port}") as client:
            for _ in range(4):
                client.score(*rows)
            known = [state.address for state in client.servers()]

        assert known == [one.address, two.address]
        assert counts([one, two]) == [2, 2]


def test_a_name_is_looked_up_again_after_a_failure(connect, records, rows):
    with fake() as one, fake(host="127.0.0.2", port=one.port) as two:
        records.append("127.0.0.1")
        with connect(
            f"dns:///scorer.test:{one.port}",
            retry=RetryPolicy(attempts_max=100, base_seconds=0.1, cap_seconds=0.2),
        ) as client:
            client.score(*rows)
            records[:] = ["127.0.0.2"]
            one.stop()

            client.score(*rows)

            assert [state.address for state in client.servers()] == [two.address]


def test_an_unknown_name_is_an_error_that_names_it(connect, records, rows):
    with (
        connect("dns:///scorer.test:1") as client,
        pytest.raises(Unavailable, match=r"dns:///scorer\.test:1: .*not known"),
    ):
        client.score(*rows)


def test_the_servers_of_a_function_are_followed(connect, rows):
    with fake() as one, fake() as two:
        known = [one.address]
        with connect(
            lambda: known,
            retry=RetryPolicy(attempts_max=100, base_seconds=0.1, cap_seconds=0.2),
        ) as client:
            client.score(*rows)
            known[:] = [two.address]
            one.stop()

            client.score(*rows)

            assert [state.address for state in client.servers()] == [two.address]


def test_a_function_that_raises_is_named_in_the_error(connect, rows):
    def find():
        raise KeyError("no cluster")

    with connect(find) as client, pytest.raises(Unavailable, match=r"find>: 'no cluster'"):
        client.score(*rows)


@pytest.fixture
def slow_records(monkeypatch):
    """Returns an event: look-ups of "scorer.test" wait for it and then give 127.0.0.1."""
    released = threading.Event()
    genuine = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        if host != "scorer.test":
            return genuine(host, port, *args, **kwargs)
        assert released.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield released
    released.set()


def test_a_slow_look_up_does_not_outlast_the_deadline(connect, slow_records, rows):
    # Regression: the look-up ran on the caller's thread without a time limit.
    with connect("dns:///scorer.test:1") as client:
        with pytest.raises((Unavailable, DeadlineExceeded)):
            client.score(*rows, timeout=0.1)
        assert not slow_records.is_set()
        slow_records.set()


def test_calls_wait_for_the_look_up_that_another_one_began(slow_records, rows):
    # Regression: these calls failed at once, because no server was known.
    once = RetryPolicy(attempts_max=1)
    with fake() as server, ThreadPoolExecutor(3) as threads:
        address = f"dns:///scorer.test:{server.port}"
        with Client(address, retry=once, timeout=60) as client:
            calls = [threads.submit(client.score, *rows) for _ in range(3)]
            assert wait(calls, timeout=0.2).done == set()
            slow_records.set()

            assert [call.result().logprob.shape for call in calls] == [(10,)] * 3

        slow_records.clear()

        async def score():
            async with AsyncClient(address, retry=once, timeout=60) as client:
                calls = [asyncio.ensure_future(client.score(*rows)) for _ in range(3)]
                done, _ = await asyncio.wait(calls, timeout=0.2)
                assert done == set()
                slow_records.set()
                return await asyncio.gather(*calls)

        assert [result.logprob.shape for result in asyncio.run(score())] == [(10,)] * 3


def test_close_ends_a_call_that_waits_for_a_look_up(slow_records, rows):
    client = Client("dns:///scorer.test:1")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.score, *rows)
        assert wait([call], timeout=0.1).done == set()

        client.close()

        with pytest.raises(Cancelled):
            call.result(timeout=30)


def test_a_bad_argument_is_sent_once(connect, servers, rows):
    for server in servers:
        server.fail_next(100, "INVALID_ARGUMENT")

    with connect(addresses(servers)) as client, pytest.raises(InvalidArgument):
        client.score(*rows)

    assert sum(counts(servers)) == 1


def test_no_work_is_counted_after_calls_have_ended(connect, servers, many_rows):
    bad = many_rows[1].copy()
    bad[60] = VOCAB_SIZE

    with connect(addresses(servers), chunk_rows=3) as client:
        client.score(*many_rows)
        with pytest.raises(InvalidArgument):
            client.score(many_rows[0], bad)
        client.stream([many_rows, (many_rows[0], bad)], on_error="return")

        assert [(state.requests, state.bytes) for state in client.servers()] == [(0, 0)] * 3


def test_verify_goes_to_a_server_that_is_ready(connect, servers):
    with connect(["127.0.0.1:1", servers[0].address]) as client:
        assert client.verify().passed


def test_the_environment_may_name_several(connect, servers, rows, monkeypatch):
    monkeypatch.setenv("LOGPROBD_ADDRESS", ", ".join(addresses(servers)))

    with connect() as client:
        client.score(*rows)
        assert len(client.servers()) == 3
        assert client.servers()[0].address == servers[0].address
