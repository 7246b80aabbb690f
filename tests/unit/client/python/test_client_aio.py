"""Tests that AsyncClient does what Client does."""

import asyncio
import gc
import inspect
import threading
import time
import weakref

import numpy as np
import pytest
from logprobd import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Overloaded,
    RetryPolicy,
    ServerBug,
    Unavailable,
    _pool,
    _wire,
)
from logprobd._wire import OUTPUTS
from several_servers import fake
from waiting import wait_until


def run(server, body, **settings):
    """Runs `body(client)` with an AsyncClient of the server."""

    async def main():
        async with AsyncClient(server.address, **{"timeout": 20, **settings}) as client:
            return await body(client)

    return asyncio.run(main())


def test_the_methods_and_their_parameters_are_those_of_client():
    for name in ("score", "score_stream", "list_heads", "info", "verify", "wait_ready", "close"):
        theirs = inspect.signature(getattr(Client, name)).parameters
        ours = inspect.signature(getattr(AsyncClient, name)).parameters
        assert {p: (v.kind, v.default) for p, v in ours.items()} == {
            p: (v.kind, v.default) for p, v in theirs.items()
        }, name
    assert inspect.signature(Client) == inspect.signature(AsyncClient)


def test_score_is_a_coroutine_function():
    # Regression: it returned a coroutine without being one, so that mocks of it could not be awaited.
    assert inspect.iscoroutinefunction(AsyncClient.score)


@pytest.mark.parametrize("max_inflight", [1, 8])
def test_an_unexpected_error_ends_a_call_at_once(server, rows, max_inflight, monkeypatch):
    # Regression: it counted as an answer of a server that cancelled the call, and was retried.
    attempts = []

    def channel(*_):
        attempts.append(1)
        raise TypeError("metadata was wrong")

    async def body(c):
        await c.info()
        monkeypatch.setattr(c._pool, "channel", channel)
        await c.score(*rows)

    with pytest.raises((TypeError, ServerBug), match="metadata was wrong"):
        run(server, body, chunk_rows=3, max_inflight=max_inflight)
    assert len(attempts) <= max_inflight


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_scores_equal_those_of_the_synchronous_client(server, client, rows, chunk_rows):
    arguments = {
        "outputs": OUTPUTS,
        "top_k": 2,
        "segments": [0, 3, 10],
        "candidates": [[row] for row in range(10)],
        "temperature": np.linspace(0.5, 1.5, 10),
    }
    rows[1][2] = -100
    expected = client.score(*rows, **arguments)

    result = run(server, lambda c: c.score(*rows, **arguments), chunk_rows=chunk_rows)

    for name in expected.outputs:
        assert np.array_equal(getattr(result, name), getattr(expected, name)), name
    assert result.ignored_rows == 1


def test_many_calls_at_once(server, client, rows):
    expected = client.score(*rows).logprob

    async def body(c):
        return await asyncio.gather(*(c.score(*rows) for _ in range(30)))

    for result in run(server, body, chunk_rows=4):
        assert np.array_equal(result.logprob, expected)


def test_info_verify_and_wait_ready(server, client):
    async def body(c):
        await c.wait_ready(5)
        return await c.info(), await c.list_heads(), await c.verify(3)

    info, heads, report = run(server, body)

    assert info == client.info()
    assert heads == [info]
    assert report.rows == 3


def test_overload_is_retried_and_errors_are_typed(server, rows):
    server.fail_next(3, "RESOURCE_EXHAUSTED", retry_after=0.01)
    assert run(server, lambda c: c.score(*rows), chunk_rows=3).logprob.shape == (10,)

    server.fail_next(1, "RESOURCE_EXHAUSTED", retry_after=-1)
    with pytest.raises(Overloaded):
        run(server, lambda c: c.score(*rows))
    targets = rows[1].copy()
    targets[7] = 101
    with pytest.raises(InvalidArgument) as caught:
        run(server, lambda c: c.score(rows[0], targets), chunk_rows=2)
    assert caught.value.row == 7


def test_deadlines_hold(server, rows):
    server.delay = 1.0
    begin = time.monotonic()

    with pytest.raises(DeadlineExceeded):
        run(server, lambda c: c.score(*rows, timeout=0.2), chunk_rows=3)

    assert time.monotonic() - begin < 0.9


def test_a_cancelled_task_stops_waiting(server, rows):
    server.delay = 1.0

    async def body(c):
        await c.info()
        await asyncio.wait_for(c.score(*rows), 0.1)

    with pytest.raises(asyncio.TimeoutError):
        run(server, body, chunk_rows=2)


def test_an_absent_server_is_unavailable(rows):
    async def main():
        client = AsyncClient("127.0.0.1:1", retry=RetryPolicy(attempts_max=1))
        with pytest.raises(Unavailable):
            await client.score(*rows)
        with pytest.raises(Unavailable):
            await client.wait_ready(0.1)
        await client.close()
        with pytest.raises(Cancelled):
            await client.score(*rows)

    asyncio.run(main())


def test_a_stream_of_batches(server, client, rows):
    expected = client.score(*rows).logprob
    server.fail_next(2, "RESOURCE_EXHAUSTED", retry_after=0.01)

    async def batches():
        for _ in range(4):
            yield rows

    async def body(c):
        return [r async for r in c.score_stream(batches())] + [
            r async for r in c.score_stream([rows, {"hidden": rows[0], "targets": rows[1]}])
        ]

    results = run(server, body, chunk_rows=3)

    assert len(results) == 6
    assert all(np.array_equal(result.logprob, expected) for result in results)


def test_a_broken_stream_is_opened_again(server, rows):
    server.fail_next(1, "ABORTED")

    async def body(c):
        return [result async for result in c.score_stream([rows] * 3)]

    results = run(server, body, chunk_rows=3, retry=RetryPolicy(base_seconds=0.01))

    assert len(results) == 3


def test_a_bad_batch_of_a_stream(server, rows):
    batches = [rows, (rows[0], [1]), rows]

    async def body(c):
        return [result async for result in c.score_stream(batches, on_error="return")]

    results = run(server, body)
    assert isinstance(results[1], InvalidArgument)
    assert results[2].logprob.shape == (10,)


def test_a_silent_server_ends_a_stream(server, rows):
    server.delay = 1.0

    async def body(c):
        await c.info()
        return [result async for result in c.score_stream([rows], timeout=0.2)]

    with pytest.raises(DeadlineExceeded):
        run(server, body)


def test_a_client_serves_one_loop_after_another(server, rows):
    client = AsyncClient(server.address, timeout=20)

    first = asyncio.run(client.score(*rows))
    second = asyncio.run(client.score(*rows))

    assert np.array_equal(first.logprob, second.logprob)


def test_connections_of_a_loop_that_ended_are_closed(server, rows):
    # Regression: the connections stayed open until the process ended.
    client = AsyncClient(server.address, timeout=20)
    kept = len(_pool.inherited)
    asyncio.run(client.score(*rows))
    (channels,) = client._pool._channels.values()
    channels = [weakref.ref(channel) for channel in channels.opened]

    asyncio.run(client.score(*rows))
    gc.collect()

    assert [channel() for channel in channels] == [None] * 4
    assert len(_pool.inherited) == kept


def test_close_cancels_what_is_in_flight(server, rows):
    # Regression: the call ended with asyncio.CancelledError, although its task was not cancelled.
    server.delay = 1.0

    async def body(c):
        await c.info()
        calls = [asyncio.ensure_future(c.score(*rows)), asyncio.ensure_future(stream(c))]
        await asyncio.to_thread(wait_until, lambda: len(server.requests) >= 2)
        await c.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    async def stream(c):
        return [result async for result in c.score_stream([rows])]

    assert [type(error) for error in run(server, body)] == [Cancelled, Cancelled]


def test_a_server_that_reads_nothing_holds_up_no_other():
    # Regression: the client waited for its write to that server and handled no results or deadlines.
    batch = np.ones((4096, 512), np.float32), np.ones(4096, int)  # 8 MiB
    released, answered = threading.Event(), []

    def answer(method, data, metadata):
        request = _wire.decode(_wire.ScoreRequest, data)
        answered.append(request.chunk_id)
        values = bytes(4 * request.rows)
        return _wire.ScoreResponse(
            chunk_id=request.chunk_id, rows=request.rows, logprob=values, entropy=values
        )

    with fake(hidden_size=512) as stuck, fake(hidden_size=512) as other:
        stuck._answer = lambda *args: released.wait(60) and answer(*args)
        other._answer = answer

        async def main():
            async with AsyncClient(
                [stuck.address, other.address], chunk_rows=4096, chunk_bytes=16 << 20
            ) as client:
                with pytest.raises(DeadlineExceeded):
                    async for _ in client.score_stream([batch] * 16, timeout=2):
                        pass

        asyncio.run(main())
        assert len(answered) >= 2
        released.set()


def test_a_stream_cancelled_twice_leaves_no_work_behind(server, rows):
    # Regression: after a second cancellation during the close, chunks stayed counted as work.
    server.delay = 1.0

    async def body(c):
        async def read():
            async for _ in c.score_stream([rows] * 3):
                pass

        reading = asyncio.ensure_future(read())
        await asyncio.to_thread(wait_until, lambda: server.requests)
        while not reading.done():
            reading.cancel()
            await asyncio.sleep(0)
        return c.servers()[0]

    state = run(server, body)
    assert (state.requests, state.bytes) == (0, 0)


def test_a_source_may_wait_for_the_result_of_its_first_batch(server, rows):
    # Regression: the client filled its window before it sent the first batch.
    async def body(c):
        first_result = asyncio.Event()

        async def batches():
            yield rows
            await first_result.wait()
            yield rows

        count = 0
        async for _ in c.score_stream(batches(), timeout=10):
            first_result.set()
            count += 1
        return count

    assert run(server, body) == 2


def test_a_closed_stream_has_waited_for_its_source_to_end(server, rows):
    ended = []

    async def body(c):
        async def batches():
            try:
                yield rows
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                ended.append("source")

        stream = c.score_stream(batches())
        await anext(stream)
        await stream.aclose()
        ended.append("stream")

    run(server, body)

    assert ended == ["source", "stream"]


def test_a_batch_for_an_absent_head_is_returned_in_its_place(server, rows):
    batches = [{"hidden": rows[0], "targets": rows[1], "head": "absent"}, rows]

    async def body(c):
        return [result async for result in c.score_stream(batches, on_error="return")]

    results = run(server, body)
    assert isinstance(results[0], NotFound)
    assert results[1].logprob.shape == (10,)
