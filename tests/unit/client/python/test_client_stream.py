"""score_stream: order, errors of single batches, retries, lost connections."""

import itertools
import time

import numpy as np
import pytest
from logprobd import (
    Client,
    DeadlineExceeded,
    InvalidArgument,
    LogprobdError,
    RetryPolicy,
    Unavailable,
)


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


def test_the_servers_window_is_kept(server, rows):
    server.stream_window = 2
    with Client(server.address, chunk_rows=1, timeout=20) as client:
        (result,) = client.score_stream([rows])

    assert result.logprob.shape == (10,)
