"""Tests that the baseline server is correct, so that comparisons with it are meaningful."""

import os
import pathlib
import subprocess
import sys

import grpc
import numpy as np
import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import baseline_server
import ml_dtypes
import scoring_rpc
from model_folder import ModelFolder

# The logits lie below 16 and are rounded to bf16, with an error d of at most 1/32 each. A logprob is a logit minus
# the log of a sum, so its error is at most 2 d. The error of an entropy is at most d * sum p |log p + H|, and this sum
# is below 2 here.
TOLERANCE = 2 / 32


def start(model: ModelFolder, *, compiled: bool) -> baseline_server.BaselineServer:
    """Returns a baseline server for the test's model, with chunks of 3 rows."""
    weight = baseline_server.load_weight(model.path, torch.device("cpu"))
    scorer = baseline_server.TorchScorer(weight, chunk_rows=3, compiled=compiled)
    return baseline_server.BaselineServer(scorer, "127.0.0.1:0")


@pytest.fixture(scope="module")
def served(model: ModelFolder):
    server = start(model, compiled=False)
    with scoring_rpc.Scoring(server.address) as scoring:
        yield scoring
    server.server.stop(None).wait()


def errors(scoring: scoring_rpc.Scoring, model: ModelFolder, rows: int) -> np.ndarray:
    """Returns the errors of logprob and entropy, [2, rows], for random rows against the double reference."""
    random = np.random.default_rng(3)
    hidden = random.standard_normal((rows, 64)).astype(ml_dtypes.bfloat16)
    targets = random.integers(0, 1003, rows, dtype=np.int32)
    request = scoring_rpc.request(
        rows=rows, dtype=1, hidden=hidden.tobytes(), targets=targets.tobytes()
    )
    response = scoring.score(request, timeout=150)
    truth = [model.score(row, int(target)) for row, target in zip(hidden, targets, strict=True)]
    return np.array(
        [
            scoring_rpc.floats(response.logprob) - [row.logprob for row in truth],
            scoring_rpc.floats(response.entropy) - [row.entropy for row in truth],
        ]
    )


def test_scores_match_the_double_reference(served, model: ModelFolder) -> None:
    assert np.abs(errors(served, model, rows=7)).max() < TOLERANCE


def test_compiled_scores_match_the_double_reference(model: ModelFolder) -> None:
    server = start(model, compiled=True)
    with scoring_rpc.Scoring(server.address) as scoring:
        assert np.abs(errors(scoring, model, rows=3)).max() < TOLERANCE
    server.server.stop(None).wait()


# Regression: the first trace ran in a thread of gRPC, which left a dangling pointer to every later backward.
def test_a_backward_works_after_the_threads_of_a_compiled_server_have_ended() -> None:
    script = """
import concurrent.futures, torch
from baseline_server import TorchScorer
scorer = TorchScorer(torch.randn(300, 64).bfloat16(), chunk_rows=3, compiled=True)
rows, ids = torch.zeros(3 * 64 * 2, dtype=torch.uint8), torch.zeros(3 * 4, dtype=torch.uint8)
score = lambda: scorer.score(bytearray(rows.numpy()), torch.bfloat16, bytearray(ids.numpy()))
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(score).result()
torch.ones(2, requires_grad=True).sum().backward()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=pathlib.Path(baseline_server.__file__).parent,
        env={**os.environ, "MALLOC_PERTURB_": "165"},  # glibc overwrites memory that is freed.
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"hidden_size": 63}, "hidden_size is 63, but the head has 64"),
        ({"targets": b"1234"}, "targets must be i32"),
        ({"targets": np.array([1003, 0], np.int32).tobytes()}, "targets must lie in"),
        ({"hidden": b"1234"}, "hidden must be dtype"),
        ({"dtype": 9}, "dtype 9 is unknown"),
        ({"outputs": 8}, "only logprob and entropy are supported"),
    ],
)
def test_unsupported_requests_are_refused(served, fields: dict, text: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        served.score(scoring_rpc.request(**fields))

    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert text in raised.value.details()


def test_a_request_without_rows_gets_empty_scores(served) -> None:
    response = served.score(scoring_rpc.request(rows=0, targets=b"", hidden=b""))

    assert (response.rows, response.logprob, response.entropy) == (0, b"", b"")
