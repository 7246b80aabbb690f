"""logprobctl against the real server: input files, scores, exit codes."""

import json
import subprocess

import numpy as np
import pytest
import safetensors.numpy
from logprobd import Client


@pytest.fixture
def logprobctl(binaries, server):
    def run(command: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binaries / "logprobctl", command, "--address", server.grpc, *options],
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def rows():
    draw = np.random.default_rng(3)
    return draw.standard_normal((5, 64)).astype(np.float32), draw.integers(0, 1003, 5)


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_score_gives_the_numbers_of_the_python_client(logprobctl, server, rows, kind, tmp_path):
    hidden, targets = rows
    if kind == "npy":
        np.save(tmp_path / "hidden.npy", hidden)
        np.save(tmp_path / "targets.npy", targets)
        options = [
            "--hidden",
            str(tmp_path / "hidden.npy"),
            "--targets",
            str(tmp_path / "targets.npy"),
        ]
    else:
        tensors = {"hidden": hidden, "targets": targets}
        safetensors.numpy.save_file(tensors, tmp_path / "rows.safetensors")
        options = [str(tmp_path / "rows.safetensors")]

    result = logprobctl("score", "--json", *options)

    assert result.returncode == 0, result.stderr
    with Client(server.grpc) as client:
        expected = client.score(hidden, targets)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["target"] for answer in answers] == targets.tolist()
    for name in ("logprob", "entropy"):
        theirs = np.array([answer[name] for answer in answers], np.float32)
        assert np.array_equal(theirs, getattr(expected, name)), name


def test_score_names_a_file_that_is_missing(logprobctl, tmp_path):
    result = logprobctl("score", str(tmp_path / "absent.safetensors"))

    assert result.returncode != 0
    assert "absent.safetensors" in result.stderr


def test_selftest_passes(logprobctl):
    result = logprobctl("selftest", "--json", "--rows", "4")

    assert result.returncode == 0, result.stdout + result.stderr
    answer = json.loads(result.stdout)
    assert answer["passed"]
    assert answer["heads"][0]["rows"] == 4


def test_ping_and_info_find_the_server(logprobctl):
    assert logprobctl("ping", "--count", "2").returncode == 0
    assert "1003" in logprobctl("info", "--json").stdout


def test_bench_counts_its_requests(logprobctl):
    result = logprobctl("bench", "--json", "--rows", "4", "--requests", "20")

    assert result.returncode == 0, result.stderr
    (line,) = json.loads(result.stdout)["results"]
    assert (line["requests"], line["errors"], line["rows"]) == (20, 0, 4)
    assert line["rows_per_second"] > 0
