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


def records_of(bench: str, folder: pathlib.Path) -> list[dict]:
    """Returns the records of operator_<bench>_bench.py."""
    results = folder / "results.json"
    subprocess.run(
        [
            *(sys.executable, BENCH.with_name(f"operator_{bench}_bench.py"), "--device", "cpu"),
            *("--quick", "--commit", "none", "--out", results),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return json.loads(results.read_text())


@pytest.mark.parametrize(
    ("bench", "records"), [("dtypes", 7), ("divergence", 9), ("transforms", 14)]
)
def test_every_contender_with_a_target_has_a_record(bench, records, tmp_path):
    assert len(records_of(bench, tmp_path)) == records


def test_rows_are_compared_with_the_gemms_and_with_the_next_multiple_of_256(tmp_path):
    records = records_of("rows", tmp_path)

    operators = (
        "operator",
        "operator, logits kept",
        "operator, mean loss, gradients in the forward",
    )
    shape = "T=128, H=64, V=2048"
    compared = {(record["what"], record["baseline"]["what"]) for record in records}
    assert compared == {
        *((f"Forward and backward, {name}, {shape}", "three GEMMs") for name in operators),
        *(
            (f"Forward and backward, {name}, {shape}: next multiple of 256 rows", "256 rows")
            for name in ("three GEMMs", *operators)
        ),
    }


def test_the_forward_is_compared_with_the_gemm_in_both_states(tmp_path):
    records = records_of("forward", tmp_path)

    ours = [record for record in records if ", operator, " in record["what"]]
    assert [record["what"] for record in ours] == [
        f"Forward, {state}, operator, T=128, H=64, V=2048" for state in ("settled", "mixed")
    ]
    for record in ours:
        assert record["baseline"]["what"] == "torch's GEMM that writes bf16 logits"
        assert record["note"]
