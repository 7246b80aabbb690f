"""Runs logprobctl bench against the real server: mixes, streams, open loops, verification and the report."""

import json
import subprocess

import pytest


@pytest.fixture
def bench(binaries, server):
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binaries / "logprobctl", "bench", "--address", server.grpc, *options],
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_a_mix_is_verified_and_reported(bench, server, tmp_path):
    out = tmp_path / "b.json"

    result = bench(
        *("--rows", "1:6,5:3,64:1", "--concurrency-range", "1:4:3", "--requests", "150"),
        *("--metrics", server.http, "--verify", "--export", str(out)),
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "verify: PASS\n" in result.stdout
    report = json.loads(out.read_text())
    verification = report["verification"]
    assert verification["passed"]
    assert verification["server_before"]["passed"]
    assert verification["server_after"]["rows"] == 8
    assert verification["answers_compared"] > 0
    assert verification["answers_different"] == 0
    for load in report["results"]:
        assert (load["requests"], load["errors"]) == (150, 0)
        assert sum(size["requests"] for size in load["sizes"]) == 150
        assert sum(count for _, _, count in load["latency_histogram"]) == 150
        figures = load["server"]
        sent = sum(size["requests"] * size["rows"] for size in load["sizes"])
        assert figures["rows_scored"] == sent
        assert figures["batches"] > 0
        assert figures["resident_bytes_peak"] > 0
        assert {"queue", "kernel"} <= {stage["stage"] for stage in figures["stages"]}


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_fresh_rows_give_the_same_bits(bench, dtype):
    result = bench(
        *("--rows", "3,700", "--concurrency-range", "4"),
        *("--requests", "40", "--fresh", "--writers", "4", "--dtype", dtype),
        *("--verify", "--json"),
    )

    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["verification"]["passed"]
    assert report["verification"]["answers_different"] == 0
    assert [load["errors"] for load in report["results"]] == [0, 0]


def test_an_open_loop_counts_from_the_planned_time(bench):
    result = bench(
        *("--rows", "2", "--request-rate", "200", "--arrivals", "fixed", "--requests", "40"),
        "--json",
    )

    assert result.returncode == 0, result.stderr
    (load,) = json.loads(result.stdout)["results"]
    assert (load["requests"], load["arrivals"]) == (40, "fixed")
    # The last request is due 39 intervals after the first.
    assert load["seconds"] >= 39 / 200
