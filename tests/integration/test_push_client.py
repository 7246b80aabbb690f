"""Tests the Python client of the service Weights with the real server."""

import concurrent.futures
import contextlib
import hashlib
import pickle
import queue
import threading

import grpc
import ml_dtypes
import numpy as np
import pytest
import torch
from logprobd import (
    Client,
    InvalidArgument,
    LogprobdError,
    NotFound,
    Overloaded,
    Tls,
    Unavailable,
    WeightsClient,
    WeightsConflict,
    WeightsDataLoss,
)
from logprobd.retry import RetryPolicy
from model_folder import ModelFolder, write_biased_head
from weights_rpc import Weights, push_header, pushed_rows

VOCAB, HIDDEN, SPLIT = 1003, 64, 617
# 9 MiB of bf16 rows, so that they take two messages.
LARGE_VOCAB, LARGE_HIDDEN = 9216, 512


@pytest.fixture
def connect():
    """Returns a function that makes clients with a deadline, which are closed after the test."""
    clients: list[WeightsClient] = []

    def connect(server, **options) -> WeightsClient:
        clients.append(WeightsClient(server.admin, timeout=60, load_timeout=60, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


PUSHES_MAX = 256
"""The server's limit of pushes at once (weights.proto)."""


@contextlib.contextmanager
def open_pushes(server, count: int, version: int):
    """Holds `count` pushes open, each of which has sent one row of zeros. Yields their calls, which end afterwards."""
    sent: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(count)]
    row = np.zeros((1, HIDDEN), np.uint16)
    # The pushes take all streams of their connection.
    with Weights(server.admin) as weights, Weights(server.admin) as other:
        try:
            calls = [weights.push_call(iter(each.get, None)) for each in sent]
            for i, each in enumerate(sent):
                each.put(push_header(version))
                each.put(pushed_rows(i, row))
            assert server.eventually(lambda: other.list().pushed.rows == count)
            yield calls
        finally:
            for each in sent:
                each.put(None)
        for call in calls:
            call.exception(timeout=30)


def digest(rows: np.ndarray) -> str:
    return hashlib.sha256(rows.tobytes()).hexdigest()


def test_two_clients_push_and_one_commits(start_pushable, models, connect) -> None:
    server = start_pushable()
    rows = models[1].weight
    one, two = connect(server), connect(server)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        pushes = [
            pool.submit(one.push, rows[:SPLIT], version=2),
            pool.submit(
                two.push,
                torch.from_numpy(rows[SPLIT:].astype(np.float32)).bfloat16(),
                version=2,
                row_begin=SPLIT,
            ),
        ]
        (staged,) = (push.result() for push in pushes if push.result() is not None)

    assert (staged.version, staged.sha256, staged.source) == (2, digest(rows), "pushed")
    (state,) = one.list()
    assert (state.live.version, state.staged, state.pushed) == (1, staged, None)
    assert one.commit(version=2).live == staged
    assert one.rollback().live.version == 1
    assert one.discard(previous=True).previous is None


def test_pushed_rows_score_like_those_of_a_folder(
    start_pushable, start_server, models, connect
) -> None:
    server = start_pushable()
    client = connect(server)
    hidden = np.random.default_rng(0).standard_normal((7, HIDDEN)).astype(np.float32)
    with Client(start_server("--model", str(models[1].path)).grpc) as scores:
        expected = scores.score(hidden, np.arange(7))

    client.push(models[1].weight, version=2)
    client.commit(version=2)

    with Client(server.grpc) as scores:
        result = scores.score(hidden, np.arange(7))
    assert result.weights_version == 2
    assert np.array_equal(result.logprob, expected.logprob)


def test_a_head_is_pushed_over_tls_with_a_token_of_the_scope_admin(
    start_server, models, connect, security
) -> None:
    admin = ["--admin", "127.0.0.1:0", *security.server_flags()]
    server = start_server("--model", str(models[0].path), *admin)
    tls = Tls(**security.client_tls())
    hidden = np.random.default_rng(0).standard_normal((7, HIDDEN)).astype(np.float32)

    def scores() -> np.ndarray:
        with Client(server.grpc, tls=tls, token=security.token, transport="tcp") as client:
            return client.score(hidden, np.arange(7)).logprob

    def push(token: str) -> None:
        client = connect(server, tls=tls, token=token)
        client.push(models[1].weight, version=2)
        client.commit(version=2)

    before = scores()
    with pytest.raises(LogprobdError, match="PERMISSION_DENIED: .*scope admin"):
        push(security.token)
    (state,) = connect(server, tls=tls, token=security.admin_token).list()
    assert (state.highest_version, state.pushed) == (1, None)
    assert np.array_equal(scores(), before)

    push(security.admin_token)

    with Client(start_server("--model", str(models[1].path)).grpc) as client:
        expected = client.score(hidden, np.arange(7)).logprob
    assert np.array_equal(scores(), expected) and not np.array_equal(expected, before)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_rows_of_several_messages_and_calls_arrive(
    start_pushable, tmp_path, connect, monkeypatch, transport
) -> None:
    monkeypatch.setenv("LOGPROBD_TRANSPORT", transport)
    monkeypatch.setattr("logprobd.weights._CALL_MESSAGES", 1)
    model = ModelFolder.write(tmp_path, vocab=LARGE_VOCAB, hidden=LARGE_HIDDEN)
    server = start_pushable("--local", str(tmp_path / "socket"), model=model)
    rows = np.flip(model.weight, 0)  # not contiguous
    client = connect(server, scoring_address=server.grpc)

    staged = client.push(rows, version=2, sha256=digest(rows))

    assert (staged.sha256, client.transport) == (digest(rows), transport)


def test_rows_are_rounded_to_the_type_that_is_named(start_pushable, models, connect) -> None:
    client = connect(start_pushable())
    rows = np.random.default_rng(4).standard_normal((VOCAB, HIDDEN))

    staged = client.push(rows, version=2, dtype="bf16")

    expected = rows.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert staged.sha256 == digest(expected)


def start_biased(start_server, folder, weight: np.ndarray, bias: np.ndarray):
    write_biased_head(folder, weight, bias)
    return start_server("--model", str(folder), "--admin", "auto")


def test_a_bias_travels_with_its_rows(start_server, tmp_path, connect) -> None:
    random = np.random.default_rng(1)
    weight = random.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    bias = random.standard_normal(VOCAB).astype(np.float32)
    client = connect(start_biased(start_server, tmp_path, weight, bias))

    first = client.push(weight[:SPLIT], version=2, bias=bias[:SPLIT])
    staged = client.push(weight[SPLIT:], version=2, row_begin=SPLIT, bias=bias[SPLIT:])

    assert first is None
    assert staged.sha256 == hashlib.sha256(weight.tobytes() + bias.tobytes()).hexdigest()
    assert staged.sha256 == client.list()[0].live.sha256


def test_no_rows_send_nothing(start_pushable, models, connect) -> None:
    client = connect(start_pushable())

    assert client.push(models[1].weight[:0], version=2) is None

    assert client.list()[0].pushed is None


# Regression: the client had no way to send a header without rows, which the protocol advises.
def test_rows_that_arrived_while_another_version_was_staged_are_not_sent_again(
    start_pushable, models, connect
) -> None:
    server = start_pushable()
    client = connect(server)
    rows = models[1].weight
    with Weights(server.admin) as weights:
        sent: queue.SimpleQueue = queue.SimpleQueue()
        call = weights.push_call(iter(sent.get, None))
        sent.put(push_header(3))
        assert server.eventually(lambda: weights.list().HasField("pushed"))
        client.load(str(models[0].path), version=2)
        for message in (pushed_rows(0, rows), None):
            sent.put(message)
        assert "version 2 is staged" in call.exception(timeout=20).details()
    client.commit(version=2)

    staged = client.push(None, version=3, dtype="bf16")

    assert (staged.version, staged.sha256) == (3, digest(rows))


def test_a_bias_may_be_pushed_apart_from_the_rows(start_server, tmp_path, connect) -> None:
    random = np.random.default_rng(1)
    weight = random.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    bias = random.standard_normal(VOCAB).astype(np.float32)
    client = connect(start_biased(start_server, tmp_path, weight, bias))

    assert client.push(None, version=2, bias=bias[SPLIT:], row_begin=SPLIT) is None
    assert client.push(weight, version=2) is None
    staged = client.push(None, version=2, bias=bias[:SPLIT])

    assert staged.sha256 == client.list()[0].live.sha256


def test_a_folder_is_loaded_with_progress(start_pushable, models, connect) -> None:
    client = connect(start_pushable())
    phases = []

    loaded = client.load(
        str(models[1].path), version=5, progress=lambda step: phases.append(step.phase)
    )

    assert loaded == client.list()[0].staged
    assert (loaded.version, loaded.sha256) == (5, digest(models[1].weight))
    assert phases[0] == "checking"


def test_an_exception_of_progress_cancels_a_load(start_pushable, models, connect) -> None:
    client = connect(start_pushable())

    def stop(_: object) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        client.load(str(models[1].path), progress=stop)


def test_errors_have_classes_that_say_what_failed(start_pushable, models, connect) -> None:
    server = start_pushable()
    client = connect(server)
    rows = models[1].weight

    with pytest.raises(WeightsDataLoss, match=digest(rows)):
        client.push(rows, version=2, sha256="0" * 64)
    with pytest.raises(WeightsConflict, match="live") as live:
        client.push(rows, version=1)
    assert live.value.code == "ALREADY_EXISTS"
    client.push(rows[:1], version=2)
    with pytest.raises(WeightsDataLoss, match="differ"):
        client.push(rows[1:2], version=2)
    with pytest.raises(WeightsConflict) as absent:
        client.commit(version=2)
    assert absent.value.code == "FAILED_PRECONDITION"
    with pytest.raises(InvalidArgument, match="rows: 1 from row 1003"):
        client.push(rows[:1], version=2, row_begin=VOCAB)
    with pytest.raises(InvalidArgument, match="rows is .64.: pass an array"):
        client.push(rows[0], version=2)
    with pytest.raises(InvalidArgument, match="rows has type int64"):
        client.push(np.zeros((1, HIDDEN), int), version=2)
    with pytest.raises(InvalidArgument, match="dtype is None: name it"):
        client.push(None, version=2)
    with pytest.raises(InvalidArgument, match="bias has 2 elements of bf16, but there are 1 rows"):
        client.push(rows[:1], version=2, bias=rows[0, :2])
    with pytest.raises(NotFound):
        client.list("none")
    with pytest.raises(LogprobdError, match="PERMISSION_DENIED: path: .*allowed root"):
        client.load("/nowhere/at/all")
    with WeightsClient(server.grpc) as scoring, pytest.raises(NotFound, match="--admin"):
        scoring.list()


def test_a_client_that_ends_is_told_apart_from_a_server_that_ends(start_pushable, connect) -> None:
    server = start_pushable()
    client = connect(server)
    copy = pickle.loads(pickle.dumps(client))
    assert copy.list() == client.list()
    copy.close()

    server.signal()
    assert server.wait() == 0

    with pytest.raises(Unavailable, match="--admin"):
        client.list()


# Regression: the 33rd push at once failed.
def test_more_ranks_than_the_limit_push_at_once(start_pushable, models, connect) -> None:
    server = start_pushable()
    rows = models[1].weight
    ranks = PUSHES_MAX + 64
    step = -(-VOCAB // ranks)
    begins = [min(rank * step, VOCAB) for rank in range(ranks)]
    clients = [connect(server) for _ in range(ranks)]
    barrier = threading.Barrier(ranks, timeout=60)

    def push(client, begin: int):
        barrier.wait()
        return client.push(rows[begin : begin + step], version=2, row_begin=begin)

    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        answers = list(pool.map(push, clients, begins))

    (staged,) = filter(None, answers)
    assert staged.sha256 == digest(rows)


def test_a_push_above_the_limit_waits_for_room(
    start_pushable, models, connect, monkeypatch
) -> None:
    server = start_pushable()
    rows = np.zeros((VOCAB, HIDDEN), np.uint16)
    client = connect(server)
    refusals: queue.SimpleQueue = queue.SimpleQueue()

    class Recorder(RetryPolicy):
        def delay(self, error, *rest):
            refusals.put(error)
            return super().delay(error, *rest)

    monkeypatch.setattr("logprobd.weights._PUSH_RETRY", Recorder())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with open_pushes(server, PUSHES_MAX, version=2):
            push = pool.submit(client.push, rows, version=2, dtype="bf16")
            refused = refusals.get(timeout=30)
        staged = push.result(timeout=30)

    assert (type(refused), refused.retry_after) == (Overloaded, 0.2)
    assert f"{PUSHES_MAX} pushes" in str(refused)
    assert staged.sha256 == digest(rows)


# Regression: 32 open pushes locked out all other calls.
def test_open_pushes_keep_out_no_rollback(start_pushable, models, connect) -> None:
    server = start_pushable()
    client = connect(server)
    client.push(models[1].weight, version=2)
    client.commit(version=2)
    with open_pushes(server, PUSHES_MAX, version=3) as calls:
        assert client.list()[0].pushed.version == 3
        assert client.rollback().live.version == 1
        assert client.discard(staged=True).pushed is None
    assert {call.code() for call in calls} == {grpc.StatusCode.ABORTED}
