"""What the benchmark scripts say of a figure that misses what is wanted of it."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import cpu_bench
import render_tables


def record(figure: float, note: str, ratio: float | None = None) -> dict:
    return {"what": "case: error", "figure": figure, "unit": "nats", "ratio": ratio, "note": note}


@pytest.mark.parametrize(
    "entry, is_missed",
    [
        (record(2.4e-5, "64 rows; wanted at most 2e-05"), True),
        (record(1.9e-5, "64 rows; wanted at most 2e-05"), False),
        (record(0.3, "wanted at most 1.3; baseline spread 1 to 2 s", ratio=1.4), True),
        (record(3.0, "wanted at most 1.3; baseline spread 1 to 2 s", ratio=1.2), False),
        (record(3.0, "nothing is asked of it"), False),
        (record(0.0, "wanted at most 1") | {"missed": True}, True),
    ],
)
def test_a_figure_above_what_is_wanted_is_missed(entry: dict, is_missed: bool) -> None:
    # A miss was printed, and the exit code was 0; speeds were not checked at all.
    assert cpu_bench.missed([entry]) is is_missed
    assert "missed" not in entry


def test_tables_show_a_miss() -> None:
    note = "baseline spread 1 to 2 s; torch, wanted at most 0.71"

    assert render_tables.judged("0.9", 0.9, note) == "0.9, wanted <= 0.71, **missed**"
    assert render_tables.judged("0.5", 0.5, note) == "0.5, wanted <= 0.71"
    assert render_tables.judged("0.5", 0.5, "") == "0.5"
