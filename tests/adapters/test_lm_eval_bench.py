"""Runs the benchmark of lm-eval with a small head on the CPU."""

import json
import pathlib
import subprocess
import sys

BENCH = pathlib.Path(__file__).resolve().parents[1] / "bench" / "lm_eval_bench.py"


def test_every_way_of_scoring_has_its_figures(built_operator, binaries, tmp_path) -> None:
    results = tmp_path / "results.json"
    options = ["--device", "cpu", "--heads", "64x2048", "--length", "64", "--commit", "none"]

    subprocess.run(
        [sys.executable, BENCH, *options, "--bin-dir", binaries, "--out", results],
        check=True,
        capture_output=True,
        timeout=600,
    )

    figures = {entry["what"]: entry["figure"] for entry in json.loads(results.read_text())}
    size = "H=64, V=2048, 8 x 64 tokens"
    for way in ("lm-eval", "logprobd-local", "logprobd"):
        assert figures[f"{size}, {way}: CPU time"] > 0
        assert figures[f"{size}, {way}: peak memory"] > 0
    assert figures[f"{size}, logprobd: peak memory of the server"] > 0
    assert figures[f"{size}, lm-eval: largest error"] > 1e-3  # rounded to bf16
    for way in ("logprobd-local", "logprobd"):
        assert (
            figures[f"{size}, {way}: largest error"] <= 1e-4
        )  # tolerance of the kernels, tests/README.md
