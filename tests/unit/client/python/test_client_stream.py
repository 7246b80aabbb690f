"""score_stream: order, errors of single batches, retries, lost connections."""

import itertools
import logging
import threading
import time

import numpy as np
import pytest
from logprobd import (
    Client,
    DeadlineExceeded,
    InvalidArgument,
    LogprobdError,
    NotFound,
    RetryPolicy,
    Unavailable,
    WeightsVersionMismatch,
    _wire,
    testing,
)
from logprobd._queue import ChunkQueue
from logprobd.balance import Balance
from logprobd.info import Limits
from logprobd.plan import Chunk, ScorePlan
from logprobd.score_args import ScoreArgs


def test_results_come_in_order_and_equal_those_of_score(server, small_chunks, rows):
    hidden, targets = rows
    batches = [(hidden[: n % 10 + 1], targets[: n % 10 + 1]) for n in range(25)]

    results = list(small_chunks.score_stream(batches, temperature=0.8))

    assert len(results) == 25
    for (h, t), result in zip(batches, results, strict=True):
        expected = small_chunks.score(h, t, temperature=0.8)
        assert np.array_equal(result.logprob, expected.logprob)
        assert np.array_equal(result.entropy, expected.entropy)
    assert {r.method for r in server.requests[:20]} == {"ScoreStream"}


def test_a_batch_may_bring_its_own_arguments(client, rows):
    hidden, targets = rows
    batches = [
        {"hidden": hidden, "targets": targets, "segments": [0, 10]},
        {"hidden": hidden, "targets": targets, "segments": [0, 5, 10], "top_k": 2},
    ]

    first, second = client.score_stream(batches)

    assert first.segment_logprob.shape == (1,)
    assert second.top_k_ids.shape == (10, 2)
    assert second.segment_logprob.sum() == pytest.approx(first.segment_logprob[0])


def test_batches_are_taken_as_there_is_room(server, rows):
    taken = itertools.count()

    def endless():
        while True:
            next(taken)
            yield rows

    with Client(server.address, max_inflight=2) as client:
        results = client.score_stream(endless())
        for _ in range(5):
            next(results)
        results.close()

    assert next(taken) < 15


def test_a_bad_batch_raises_or_is_returned_in_its_place(client, rows):
    hidden, targets = rows
    bad = targets.copy()
    bad[4] = 101
    batches = [rows, (hidden, bad), (hidden[:, :3], targets), rows]

    results = list(client.score_stream(batches, on_error="return"))

    assert [isinstance(result, LogprobdError) for result in results] == [False, True, True, False]
    assert results[1].row == 4
    stream = client.score_stream(batches)
    next(stream)
    with pytest.raises(InvalidArgument, match=r"targets\[4\]"):
        next(stream)


def test_a_batch_of_the_wrong_form_is_refused(client):
    with pytest.raises(InvalidArgument, match="batch must be"):
        next(client.score_stream([5]))
    with pytest.raises(InvalidArgument, match="on_error"):
        client.score_stream([], on_error="ignore")
    assert list(client.score_stream([])) == []


def test_refused_chunks_are_sent_again(server, small_chunks, rows):
    server.fail_next(5, "RESOURCE_EXHAUSTED", retry_after=0.01)

    results = list(small_chunks.score_stream([rows] * 4))

    expected = small_chunks.score(*rows).logprob
    assert all(np.array_equal(result.logprob, expected) for result in results)


def test_a_broken_stream_is_opened_again(server, rows):
    with Client(
        server.address, chunk_rows=3, retry=RetryPolicy(base_seconds=0.01), timeout=20
    ) as client:
        server.fail_next(1, "ABORTED")

        results = list(client.score_stream([rows] * 4))

        expected = client.score(*rows).logprob
    assert all(np.array_equal(result.logprob, expected) for result in results)


def test_a_server_that_stays_away_ends_the_stream(server, rows):
    policy = RetryPolicy(attempts_max=2, base_seconds=0.01)
    with Client(server.address, retry=policy) as client:
        client.info()
        server.fail_next(100, "ABORTED")
        with pytest.raises(Unavailable):
            list(client.score_stream([rows]))


def test_a_silent_server_is_a_deadline_error(server, client, rows):
    client.info()
    server.delay = 2.0

    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        list(client.score_stream([rows], timeout=0.3))
    assert time.monotonic() - begin < 1.9


def test_a_stream_that_is_late_is_cancelled_at_the_server(server, client, rows, monkeypatch):
    client.info()
    released, ended = threading.Event(), threading.Event()
    genuine = testing._Handlers._stream

    def stream(self, messages, context):
        context.add_callback(ended.set)
        return genuine(self, messages, context)

    monkeypatch.setattr(testing._Handlers, "_stream", stream)
    monkeypatch.setattr(server, "_answer", lambda *_: released.wait(20))

    with pytest.raises(DeadlineExceeded):
        list(client.score_stream([rows], timeout=0.1))

    was_cancelled = ended.wait(10)
    released.set()
    assert was_cancelled


def test_the_servers_window_is_kept(server, rows):
    server.stream_window = 2
    with Client(server.address, chunk_rows=1, timeout=20) as client:
        (result,) = client.score_stream([rows])

    assert result.logprob.shape == (10,)


def test_a_slow_source_neither_delays_its_batches_nor_times_them_out(server, client, rows):
    # Regression: the client filled its window before it sent the first batch.
    client.info()
    arrived = threading.Semaphore(0)

    class Requests(list):
        def append(self, request):
            super().append(request)
            arrived.release()

    server.requests = Requests()

    def one_at_a_time():
        yield rows
        for _ in range(2):
            assert arrived.acquire(timeout=10)  # the previous batch was sent
            yield rows

    results = list(client.score_stream(one_at_a_time(), timeout=10))

    assert len(results) == 3


def stream_queue(**settings):
    client = Client("host:1", **settings)
    return ChunkQueue(client._settings, client._pool.balance, client._local)


def test_the_time_of_a_batch_begins_when_it_is_sent(rows):
    queue = stream_queue(max_inflight=1)
    plan = ScorePlan(ScoreArgs(*rows))
    chunk = Chunk(0, 0, 10)
    limits = Limits(1 << 20, 1024, 1, 1, 1, 4)
    queue.add(plan, [chunk], limits, 5.0)
    queue.add(plan, [chunk], limits, 5.0)
    assert queue.pause(1000.0) is None

    queue.next(1000.0)

    assert queue.pause(1001.0) == 4.0


def limits_of(stream_window):
    return Limits(1 << 20, 1024, 1, 1, 1, stream_window)


def single_rows(count):
    return [Chunk(row, row, row + 1) for row in range(count)]


def send_all(queue, now=0.0):
    """Sends what is due. Returns how many chunks these are."""
    count = 0
    while queue.next(now) is not None:
        count += 1
    return count


def score(queue, chunk_id, now=0.0):
    """Answers a chunk of one row."""
    answer = _wire.ScoreResponse(chunk_id=chunk_id, rows=1, logprob=b"1234", entropy=b"1234")
    queue.receive(_wire.encode(answer), now)


def test_the_time_of_a_batch_begins_with_its_first_chunk(rows):
    queue = stream_queue(max_inflight=1)
    queue.add(ScorePlan(ScoreArgs(*rows)), single_rows(2), limits_of(16), 5.0)
    assert send_all(queue, 1000.0) == 1
    score(queue, 1, 1003.0)

    assert send_all(queue, 1003.0) == 1

    assert queue.pause(1003.0) == 2.0


def test_the_time_of_a_batch_begins_with_its_first_try_to_find_a_server(rows):
    client = Client(["a:1", "b:1"], retry=RetryPolicy(base_seconds=0.0))
    queue = ChunkQueue(client._settings, Balance(["a:1", "b:1"]), client._local)
    queue.add(ScorePlan(ScoreArgs(*rows)), single_rows(1), limits_of(16), 5.0)

    for now in (1000.0, 1003.0):
        assert queue.next(now) is None
        queue.nobody_is_ready(Unavailable("nobody"), now)

    assert queue.next(1004.0) is None
    assert queue.gather_deadline(1004.0) == 1005.0


def test_the_servers_window_bounds_the_chunks_in_flight(rows):
    queue = stream_queue(max_inflight=8)
    queue.add(ScorePlan(ScoreArgs(*rows)), single_rows(10), limits_of(2), 100.0)

    assert send_all(queue) == 2


def test_a_smaller_window_of_a_later_batch_bounds_open_windows_too(rows):
    hidden, targets = rows
    queue = stream_queue(max_inflight=8)
    queue.add(ScorePlan(ScoreArgs(hidden[:1], targets[:1])), single_rows(1), limits_of(16), 100.0)
    assert send_all(queue) == 1
    score(queue, 1)

    queue.add(ScorePlan(ScoreArgs(hidden, targets)), single_rows(10), limits_of(2), 100.0)

    assert send_all(queue) == 2


def test_few_results_are_kept_behind_a_slow_batch(rows):
    queue = stream_queue(max_inflight=2)
    plan = ScorePlan(ScoreArgs(rows[0][:1], rows[1][:1]))
    for chunk_id in range(1, 5):
        assert queue.has_room
        queue.add(plan, single_rows(1), limits_of(16), 100.0)
        assert send_all(queue) == 1
        if chunk_id > 1:
            score(queue, chunk_id)

    assert not queue.has_room
    score(queue, 1)
    assert len(list(queue.finished())) == 4
    assert queue.has_room


def test_a_refused_chunk_waits_for_its_hint(rows):
    queue = stream_queue(retry=RetryPolicy(base_seconds=0.0))
    queue.add(ScorePlan(ScoreArgs(*rows)), single_rows(1), limits_of(16), 100.0)
    assert send_all(queue) == 1

    refusal = _wire.ScoreResponse(chunk_id=1, status_code=8, retry_after_ms=50_000)
    queue.receive(_wire.encode(refusal), 0.0)

    assert send_all(queue, 49.0) == 0
    assert send_all(queue, 51.0) == 1


def test_overload_narrows_the_window_until_answers_widen_it(rows):
    # Regression: the next batch restored the full window at once, and within one batch it never grew again.
    queue = stream_queue(max_inflight=4)
    plan = ScorePlan(ScoreArgs(*rows))
    limits = Limits(1 << 20, 1024, 1, 1, 1, 16)
    chunks = [Chunk(row, row, row + 1) for row in range(10)]

    def send_all():
        count = 0
        while queue.next(0.0) is not None:
            count += 1
        return count

    queue.add(plan, chunks, limits, 100.0)
    assert send_all() == 4
    for chunk_id in (1, 2):
        refusal = _wire.ScoreResponse(chunk_id=chunk_id, status_code=8, retry_after_ms=50_000)
        queue.receive(_wire.encode(refusal), 0.0)
    queue.add(plan, chunks, limits, 100.0)
    assert send_all() == 0  # two are in flight, and one is allowed

    sent = 4
    for chunk_id in itertools.count(3):
        if chunk_id > sent:
            break
        answer = _wire.ScoreResponse(chunk_id=chunk_id, rows=1, logprob=b"1234", entropy=b"1234")
        queue.receive(_wire.encode(answer), 0.0)
        widest = send_all()
        sent += widest
    assert widest == 0 and sent == 4 + 6 + 10


def test_an_answer_starts_the_time_without_an_answer_again(rows, caplog):
    caplog.set_level(logging.WARNING, logger="logprobd")
    queue = stream_queue(max_inflight=4, retry=RetryPolicy(base_seconds=0.0))
    queue.add(ScorePlan(ScoreArgs(*rows)), single_rows(4), limits_of(16), 100.0)
    assert send_all(queue) == 4

    def refuse(chunk_id, now):
        refusal = _wire.ScoreResponse(chunk_id=chunk_id, status_code=8, retry_after_ms=900)
        queue.receive(_wire.encode(refusal), now)

    refuse(1, 0.0)
    score(queue, 2, 0.5)
    refuse(3, 0.75)
    assert caplog.messages == []
    refuse(4, 1.25)

    assert [message[:22] for message in caplog.messages] == ["no answer for 0.5 s, n"]


def test_chunks_of_a_failed_batch_take_no_room(rows):
    # Regression: refused chunks of a failed batch filled the narrowed window, and the stream hung.
    queue = stream_queue(max_inflight=4)
    limits = Limits(1 << 20, 1024, 1, 1, 1, 16)
    queue.add(
        ScorePlan(ScoreArgs(*rows)), [Chunk(row, row, row + 1) for row in range(10)], limits, 100.0
    )
    while queue.next(0.0) is not None:
        pass
    for chunk_id in (1, 2, 3):
        refusal = _wire.ScoreResponse(chunk_id=chunk_id, status_code=8, retry_after_ms=50_000)
        queue.receive(_wire.encode(refusal), 0.0)

    queue.receive(_wire.encode(_wire.ScoreResponse(chunk_id=4, status_code=3)), 0.0)

    assert [type(result) for result in queue.finished()] == [InvalidArgument]
    assert queue.has_room and queue.is_empty
    assert queue.next(200.0) is None
    assert queue.pause(0.0) is None


def test_a_batch_for_an_absent_head_is_returned_in_its_place(server, client, rows):
    # Regression: it ended the stream, although on_error="return" fails only that batch.
    named = {"hidden": rows[0], "targets": rows[1]}
    batches = [rows, named | {"head": "absent"}, named | {"weights_version": 99}, rows]

    results = list(client.score_stream(batches, on_error="return"))

    assert [type(result) for result in results[1:3]] == [NotFound, WeightsVersionMismatch]
    assert results[3].logprob.shape == (10,)
