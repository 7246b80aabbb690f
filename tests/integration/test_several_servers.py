"""Tests clients of two servers, one of which is stopped during the work.

No call may fail, and the scores must be bit-identical to those of one server.
"""

import asyncio
import signal
import subprocess

import numpy as np
import pytest
from logprobd import AsyncClient, Client
from server_process import ServerProcess

ROWS = 6000  # seconds of work for two servers with the slow model


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    hidden = draw.standard_normal((ROWS, 256)).astype(np.float16)
    return hidden, draw.integers(0, 40_000, ROWS).astype(np.int32)


@pytest.fixture
def pair(start_server, slow_model):
    """Starts two servers of the same head, with small requests and batches, so that many are in flight."""
    options = ["--model", str(slow_model.path), "--client-share", "1"]
    options += ["--batch-rows", "256", "--request-rows", "64"]
    return start_server(*options), start_server(*options)


@pytest.fixture(scope="module")
def expected(binaries, slow_model, rows) -> np.ndarray:
    """Returns the log-probabilities that one server computes."""
    with (
        ServerProcess(binaries, "--model", str(slow_model.path)) as server,
        Client(server.grpc) as client,
    ):
        return client.score(*rows).logprob


def stop_at(server, part: float):
    """Returns a progress callback that sends SIGTERM once that fraction of the rows is done."""
    sent = []

    def progress(done: int, total: int) -> None:
        if done >= part * total and not sent:
            sent.append(True)
            server.signal(signal.SIGTERM)

    return progress


def test_a_server_stopped_during_a_bulk_call_fails_nothing(pair, rows, expected) -> None:
    one, two = pair
    with Client([one.grpc, two.grpc], chunk_rows=64, max_inflight=4, timeout=240) as client:
        result = client.score(*rows, progress=stop_at(two, 0.2))
        states = {state.address: state for state in client.servers()}

    assert np.array_equal(result.logprob, expected)
    assert states[two.grpc].state == "out"
    assert states[one.grpc].state == "ready"
    assert two.wait() == 0
    assert (
        one.metric("logprobd_rows_total", kind="scored") < ROWS
    )  # the other server scored some rows


def test_a_server_stopped_during_a_stream_fails_nothing(pair, rows, expected) -> None:
    one, two = pair
    hidden, targets = rows
    parts = [slice(begin, begin + 100) for begin in range(0, ROWS, 100)]

    async def score() -> list:
        results = []
        async with AsyncClient(f"{one.grpc},{two.grpc}", max_inflight=4, timeout=240) as client:
            async for result in client.score_stream((hidden[p], targets[p]) for p in parts):
                results.append(result)
                if len(results) == 10:
                    two.signal(signal.SIGTERM)
        return results

    results = asyncio.run(score())

    assert np.array_equal(np.concatenate([result.logprob for result in results]), expected)
    assert two.wait() == 0


def test_logprobctl_outlives_a_server_that_is_stopped(
    binaries, pair, rows, expected, tmp_path
) -> None:
    one, two = pair
    hidden, targets = rows
    np.save(tmp_path / "hidden.npy", hidden)
    np.save(tmp_path / "targets.npy", targets)
    command = [
        str(binaries / "logprobctl"),
        "score",
        "--address",
        f"{one.grpc},{two.grpc}",
        "--hidden",
        str(tmp_path / "hidden.npy"),
        "--targets",
        str(tmp_path / "targets.npy"),
        "--timeout",
        "240s",
        "--format",
        "npy",
        "--output",
        str(tmp_path / "out"),
    ]

    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert two.eventually(lambda: two.metric("logprobd_rows_total", kind="scored") > 0, seconds=60)
    two.signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=240)

    assert process.returncode == 0, output + errors
    assert np.array_equal(np.load(tmp_path / "out" / "logprob.npy"), expected)
    assert two.wait() == 0
