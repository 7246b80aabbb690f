"""Tests pushes of a head's rows to a running server."""

import concurrent.futures
import hashlib
import queue
import threading

import grpc
import numpy as np
import pytest
from control_socket import ControlSocket
from scoring_rpc import Scoring, messages, request
from weights_rpc import Weights, push_header, pushed_rows

VOCAB, HIDDEN = 1003, 64
SPLIT = 617
Code = grpc.StatusCode


def bits(response) -> tuple[bytes, bytes]:
    return response.logprob, response.entropy


def test_two_clients_push_their_rows_under_load_without_a_failed_request(
    start_server, start_pushable, models
) -> None:
    message, waiting = request(rows=17), request(rows=800)
    expected, expected_of_waiting = [], []
    for model in models:
        with Scoring(start_server("--model", str(model.path)).grpc) as scoring:
            expected.append(bits(scoring.score(message)))
            expected_of_waiting.append(bits(scoring.score(waiting)))
    assert expected[0] != expected[1]
    # Batches of one row keep a backlog waiting for seconds, during which the version is committed.
    server = start_pushable("--batch-rows", "1", "--client-share", "1")
    is_over = threading.Event()

    def score_until_over() -> list[int]:
        """Returns the versions of all answers, the last of which was asked for after the end."""
        versions = []
        with Scoring(server.grpc) as scoring:
            while True:
                is_last = is_over.is_set()
                response = scoring.score(message)
                versions.append(response.weights_version)
                assert bits(response) == expected[response.weights_version % 2 == 0]
                if is_last:
                    return versions

    def pinned_backlog(scoring: Scoring) -> list:
        """Sends requests pinned to version 1, and returns their calls once the server has all of them.

        The first keeps the engines busy. The others wait behind it, because their priority is lower: they get a
        row of 16, so that the first of them ends when a third of the busy request has been scored.
        """
        busy = request(rows=32_768, weights_version=1, targets=bytes(4 * 32_768))
        waiting.priority = messages().Priority.Value("PRIORITY_LOW")
        waiting.weights_version = 1
        calls = [scoring.score_future(busy.SerializeToString())]
        assert server.eventually(lambda: server.metric("logprobd_queue_rows") > 1_000)
        calls += [scoring.score_future(waiting.SerializeToString()) for _ in range(3)]
        assert server.eventually(
            lambda: server.metric("logprobd_queue_requests", priority="low") == 3
        )
        return calls

    rows = models[1].weight
    with (
        concurrent.futures.ThreadPoolExecutor(4) as pool,
        Weights(server.admin) as weights,
        Weights(server.admin) as other,
        Scoring(server.grpc) as scoring,
    ):
        load = pool.submit(score_until_over)
        try:
            pushes = [
                pool.submit(weights.push, 2, rows[:SPLIT]),
                pool.submit(other.push, 2, rows[SPLIT:], SPLIT),
            ]
            answers = [push.result() for push in pushes]
            (staged,) = (answer.staged for answer in answers if answer.HasField("staged"))
            assert staged.sha256 == hashlib.sha256(rows.tobytes()).hexdigest()
            assert (staged.version, staged.source) == (2, "pushed")
            assert scoring.score(message).weights_version == 1  # it is staged only
            pinned = pinned_backlog(scoring)
            assert not any(call.done() for call in pinned)
            # The commit returns once the engines of version 1 have scored them.
            assert weights.commit(version=2).live.version == 2
            assert bits(scoring.score(message)) == expected[1]
        finally:
            is_over.set()
        versions = load.result()
        assert versions == sorted(versions) and versions[-1] == 2
        answers = [messages().ScoreResponse.FromString(call.result()) for call in pinned]
        assert {answer.weights_version for answer in answers} == {1}
        assert all(bits(answer) == expected_of_waiting[0] for answer in answers[1:])
    assert server.metric("logprobd_weights_swaps_total", result="committed") == 1


def test_rows_in_shared_memory_are_staged_like_rows_in_messages(
    start_pushable, models, tmp_path
) -> None:
    server = start_pushable("--local", str(tmp_path / "socket"))
    rows = models[1].weight
    with Weights(server.admin) as weights, ControlSocket(f"{tmp_path}/socket.control") as control:
        control.hello()
        region = control.create_region(rows.nbytes + 64)
        region.memory[64 : 64 + rows.nbytes] = rows.tobytes()
        slice_of_rows = messages("weights").SharedMemorySlice(
            region=region.id, offset=64, bytes=rows.nbytes
        )
        answer = weights.push_call(
            [push_header(2), pushed_rows(0, rows, shared_memory=slice_of_rows)]
        ).result()
        assert answer.staged.sha256 == hashlib.sha256(rows.tobytes()).hexdigest()
        region.close()


def test_a_client_that_ends_in_its_push_can_push_its_rows_again(start_pushable, models) -> None:
    server = start_pushable()
    rows = models[1].weight
    with Weights(server.admin) as weights:
        assert weights.push(2, rows[:SPLIT]).pushed.rows == SPLIT
        sent: queue.SimpleQueue = queue.SimpleQueue()
        call = weights.push_call(iter(sent.get, None))
        sent.put(push_header(2))
        sent.put(pushed_rows(SPLIT, rows[SPLIT : SPLIT + 100]))
        assert server.eventually(lambda: weights.list().pushed.rows == SPLIT + 100)
        call.cancel()
        sent.put(None)
        assert weights.list().pushed.vocab_rows == VOCAB

        assert weights.push(2, rows[SPLIT:], SPLIT).staged.version == 2

        assert not weights.list().HasField("pushed")


def test_rows_sent_again_are_answered_with_the_staged_version(start_pushable, models) -> None:
    server = start_pushable()
    rows = models[1].weight
    with Weights(server.admin) as weights:
        staged = weights.push(2, rows).staged

        assert weights.push(2, rows).staged == staged
        assert weights.push(2, rows[SPLIT:], SPLIT, sha256=staged.sha256).staged == staged

        changed = rows.copy()
        changed.view(np.uint16)[700, 5] ^= 1
        with pytest.raises(grpc.RpcError) as refused:
            weights.push(2, changed)
        assert refused.value.code() == Code.FAILED_PRECONDITION
        assert "staged with other weights" in refused.value.details()
        assert weights.commit(version=2).live.sha256 == staged.sha256


def test_ranks_that_push_all_rows_at_once_stage_one_version(start_pushable, models) -> None:
    server = start_pushable()
    rows = models[1].weight
    with Weights(server.admin) as weights, concurrent.futures.ThreadPoolExecutor(4) as pool:
        for version in range(2, 8):
            ranks = [pool.submit(weights.push, version, rows) for _ in range(4)]
            answers = [rank.result() for rank in ranks]
            staged = [answer.staged for answer in answers if answer.HasField("staged")]
            assert {answer.pushed.rows for answer in answers} == {VOCAB}
            assert {each.sha256 for each in staged} == {hashlib.sha256(rows.tobytes()).hexdigest()}
            assert weights.commit(version=version).live.version == version


def test_a_number_that_was_live_is_refused_before_rows_are_sent(start_pushable, models) -> None:
    server = start_pushable()
    rows = models[1].weight
    with Weights(server.admin) as weights:
        digest = weights.push(5, rows).staged.sha256
        weights.commit(version=5)
        weights.rollback()
        weights.discard(previous=True)
        state = weights.list()
        assert (state.live.version, state.highest_version) == (1, 5)

        with pytest.raises(grpc.RpcError) as refused:
            weights.push_call([push_header(5)]).result()

        assert refused.value.code() == Code.ALREADY_EXISTS
        assert "the next free number is 6" in refused.value.details()
        assert not weights.list().HasField("pushed")
        assert weights.push(5, rows, sha256=digest).staged.version == 5


def test_rows_to_which_nobody_adds_are_dropped(start_pushable, models) -> None:
    server = start_pushable("--push-idle-s", "1")
    with Weights(server.admin) as weights:
        weights.push(2, models[1].weight[:SPLIT])
        assert server.eventually(lambda: not weights.list().HasField("pushed"))
    assert server.metric("logprobd_weights_swaps_total", result="discarded") == 1


def test_a_push_whose_digest_differs_is_dropped(start_pushable, models) -> None:
    server = start_pushable()
    rows = models[1].weight
    with Weights(server.admin) as weights, pytest.raises(grpc.RpcError) as refused:
        weights.push(2, rows, sha256="0" * 64)
    assert refused.value.code() == Code.DATA_LOSS
    assert hashlib.sha256(rows.tobytes()).hexdigest() in refused.value.details()
    with Weights(server.admin) as weights:
        assert not weights.list().HasField("pushed")
        assert weights.push(2, rows).HasField("staged")


def test_sigterm_ends_a_push_that_waits_for_rows(start_pushable, models) -> None:
    server = start_pushable()
    with Weights(server.admin) as weights:
        sent: queue.SimpleQueue = queue.SimpleQueue()
        call = weights.push_call(iter(sent.get, None))
        sent.put(push_header(2))
        assert server.eventually(lambda: weights.list().HasField("pushed"))

        server.signal()

        assert call.exception(timeout=20).code() == Code.UNAVAILABLE
        sent.put(None)
        assert server.wait() == 0


ROW = np.zeros((1, HIDDEN), np.uint16)


@pytest.mark.parametrize(
    ("sent", "code", "text"),
    [
        ([], Code.INVALID_ARGUMENT, "header: missing"),
        ([pushed_rows(0, ROW)], Code.INVALID_ARGUMENT, "header: missing"),
        ([push_header(0)], Code.INVALID_ARGUMENT, "version: 0"),
        ([push_header(1)], Code.ALREADY_EXISTS, "live"),
        ([push_header(2, head="none")], Code.NOT_FOUND, "head: "),
        ([push_header(2, dtype=0)], Code.INVALID_ARGUMENT, "dtype: 0"),
        ([push_header(2, vocab_rows=VOCAB - 1)], Code.INVALID_ARGUMENT, "vocab_rows: 1002"),
        ([push_header(2, sha256="ab")], Code.INVALID_ARGUMENT, "sha256: "),
        ([push_header(2), push_header(2)], Code.INVALID_ARGUMENT, "rows: missing"),
        ([push_header(2), pushed_rows(VOCAB, ROW)], Code.INVALID_ARGUMENT, "rows: 1 from row 1003"),
        ([push_header(2), pushed_rows(2**63, ROW)], Code.INVALID_ARGUMENT, "rows: 1 from row "),
        ([push_header(2), pushed_rows(0, ROW[:, 1:])], Code.INVALID_ARGUMENT, "128 bytes, but 126"),
        ([push_header(2), pushed_rows(0, ROW[:0])], Code.INVALID_ARGUMENT, "rows: 0"),
        ([push_header(2), pushed_rows(0, ROW, is_bias=True)], Code.INVALID_ARGUMENT, "rows: 0 of"),
        (
            [push_header(2), pushed_rows(0, ROW, data=b"ab", is_bias=True)],
            Code.INVALID_ARGUMENT,
            "no bias",
        ),
    ],
)
def test_bad_pushes_get_an_error_that_names_the_field(start_pushable, sent, code, text) -> None:
    server = start_pushable()
    with Weights(server.admin) as weights:
        with pytest.raises(grpc.RpcError) as refused:
            weights.push_call(sent).result()
        assert refused.value.code() == code
        assert text in refused.value.details()
        assert weights.list().live.version == 1
