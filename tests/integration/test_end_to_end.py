"""Checks the scores of a model folder through the real server and the Python client."""

import logprobd
import ml_dtypes
import numpy as np
import pytest
from model_folder import ModelFolder
from scoring_rpc import Scoring, floats, request
from server_process import ServerProcess


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_scores_match_double_precision(server, model, dtype) -> None:
    hidden = np.random.default_rng(5).standard_normal((40, 64)).astype(dtype)
    targets = np.arange(40) * 25
    with logprobd.Client(server.grpc) as client:
        result = client.score(hidden, targets, outputs=("logprob", "entropy", "argmax"))
    for row in range(40):
        truth = model.score(hidden[row], targets[row])
        assert abs(result.logprob[row] - truth.logprob) < 1e-5
        assert abs(result.entropy[row] - truth.entropy) < 1e-5
        assert result.argmax_id[row] == truth.argmax


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_heads_of_every_type_are_served(binaries, tmp_path, dtype) -> None:
    model = ModelFolder.write(tmp_path, vocab=331, hidden=40, dtype=dtype)
    hidden = np.random.default_rng(6).standard_normal((5, 40)).astype(np.float32)
    with ServerProcess(binaries, "--model", str(model.path)) as server:
        with logprobd.Client(server.grpc) as client:
            result = client.score(hidden, np.arange(5), temperature=0.5)
    for row in range(5):
        assert abs(result.logprob[row] - model.score(hidden[row], row, 0.5).logprob) < 2e-5


def test_a_row_has_the_same_bits_alone_in_a_batch_and_cut(server, start_server, model) -> None:
    rows = 300
    hidden = np.random.default_rng(7).standard_normal((rows, 64)).astype(np.float32)
    targets = np.random.default_rng(8).integers(0, 1003, rows).astype(np.int32)

    def score(address: str, picked: np.ndarray, **fields) -> np.ndarray:
        with Scoring(address) as scoring:
            message = request(
                rows=len(picked),
                hidden=hidden[picked].tobytes(),
                targets=targets[picked].tobytes(),
                **fields,
            )
            reply = scoring.score(message)
            return np.stack([floats(reply.logprob), floats(reply.entropy)])

    whole = score(server.grpc, np.arange(rows))
    shuffled = np.random.default_rng(9).permutation(rows)
    assert (score(server.grpc, shuffled) == whole[:, shuffled]).all()
    for row in (0, 17, 299):
        assert (score(server.grpc, np.array([row]))[:, 0] == whole[:, row]).all()
    assert (score(server.grpc, np.arange(rows), outputs=511, top_k=5) == whole).all()
    cutting = start_server("--model", str(model.path), "--batch-rows", "7")
    assert (score(cutting.grpc, np.arange(rows)) == whole).all()
    one_thread = start_server("--model", str(model.path), "--cpu-threads", "1")
    assert (score(one_thread.grpc, np.arange(rows)) == whole).all()


def test_stream_and_unary_agree(server) -> None:
    chunks = [request(rows=3, seed=i, chunk_id=i + 1) for i in range(30)]
    with Scoring(server.grpc) as scoring:
        answers = {reply.chunk_id: reply.logprob for reply in scoring.stream(chunks)}
        for chunk in chunks:
            assert answers[chunk.chunk_id] == scoring.score(chunk).logprob


def test_verify_passes_on_the_demo_head(server) -> None:
    with logprobd.Client(server.grpc) as client:
        report = client.verify(rows=4, seed=3)
    assert report.passed
    assert report.logit_stddev > 1
    assert 0 < report.logprob_difference_max < 1e-4
