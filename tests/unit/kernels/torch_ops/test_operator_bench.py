"""Runs the operator's benchmarks of tests/bench with a small head on the CPU."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[3] / "bench" / "operator_bench.py"


# Regression: the GEMMs of the rows that are not ignored were left out, because their name began like the baseline's.
def test_every_contender_except_the_baseline_has_a_record(tmp_path):
    results = tmp_path / "operator.json"
    options = ["--device", "cpu", "--quick", "--rows", "64", "--rounds", "1", "--no-peers"]

    subprocess.run(
        [sys.executable, BENCH, *options, "--commit", "none", "--out", results],
        check=True,
        capture_output=True,
        timeout=120,
    )

    names = [record["what"] for record in json.loads(results.read_text())]
    for contender in (
        "three GEMMs of 30 % of the rows",
        "operator",
        "operator, logits kept",
        "operator, mean loss, gradients in the forward",
        "operator, 70 % of rows ignored",
        "operator, steps in a row",
    ):
        assert any(name.startswith(f"Forward and backward, {contender}, T=") for name in names)
    assert not any(name.startswith("Forward and backward, three GEMMs, ") for name in names)


@pytest.mark.parametrize(("bench", "records"), [("dtypes", 7), ("divergence", 9)])
def test_every_contender_with_a_target_has_a_record(bench, records, tmp_path):
    results = tmp_path / "results.json"

    subprocess.run(
        [
            *(sys.executable, BENCH.with_name(f"operator_{bench}_bench.py"), "--device", "cpu"),
            *("--quick", "--commit", "none", "--out", results),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )

    assert len(json.loads(results.read_text())) == records
