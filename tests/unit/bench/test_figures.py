"""Tests the tables that are rendered from results, and the targets of figures."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import bench_records
import render_tables
from table_views import View

ORIGIN = {"machine": "a card", "date": "2026-01-01", "commit": "abc"}
RATIO = "Ratio: the figure divided by that of the baseline in the same run."
TARGET = "Target: the bound for the ratio, or for the figure if there is no ratio."


def record(figure: float, note: str, ratio: float | None = None) -> dict:
    return {"what": "case: error", "figure": figure, "unit": "nats", "ratio": ratio, "note": note}


@pytest.mark.parametrize(
    "entry, is_missed",
    [
        (record(2.4e-5, "64 rows; target at most 2e-05"), True),
        (record(1.9e-5, "64 rows; target at most 2e-05"), False),
        (record(2.4e-5, "64 rows; wanted at most 2e-05"), True),  # older records use this word
        (record(0.3, "target at most 1.3; baseline spread 1 to 2 s", ratio=1.4), True),
        (record(3.0, "target at most 1.3; baseline spread 1 to 2 s", ratio=1.2), False),
        (record(3.0, "there is no target"), False),
        (record(0.0, "target at most 1") | {"missed": True}, True),
        (record(0.9, "of one run; target at least 0.95"), True),
        (record(0.96, "of one run; target at least 0.95"), False),
        (record(9.0, "target at least 0.95", ratio=0.94), True),
    ],
)
def test_a_figure_beyond_its_target_is_reported(entry: dict, is_missed: bool) -> None:
    assert bench_records.report_misses([entry]) is is_missed
    assert "missed" not in entry


def test_a_target_is_shown_with_its_bound_and_marked_if_it_is_missed() -> None:
    note = "baseline spread 1 to 2 s; torch, wanted at most 0.71"

    assert render_tables.target(record(0.9, note)) == "≤ 0.71 **missed**"
    assert render_tables.target(record(0.5, note)) == "≤ 0.71"
    assert render_tables.target(record(0.5, "")) == ""
    assert render_tables.target(record(1.8, "target at least 1.9")) == "≥ 1.9 **missed**"
    assert render_tables.target(record(2.0, "target at least 1.9")) == "≥ 1.9"


def timed(what: str, ratio: float, baseline: str = "cuBLASLt GEMM that writes bf16 logits") -> dict:
    return {
        "what": what,
        "ratio": ratio,
        "figure": 2.0,
        "unit": "ms",
        "spread": [1.9, 2.1],
        "rounds": 1,
        "note": "",
        "baseline": {"what": baseline, "figure": 1.0},
    } | ORIGIN


def rendered(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, list[dict]], comment: str
) -> list[str]:
    """Returns the lines of a block with this comment, rendered from these result files."""
    monkeypatch.setattr(render_tables, "load", files.__getitem__)
    kind = comment.split(":")[0]
    text = f"<!-- {comment} -->\nstale\n<!-- /{kind} -->\n"
    lines = render_tables.BLOCK.sub(render_tables.rendered_block, text).splitlines()
    assert lines[0] == f"<!-- {comment} -->"
    assert lines[-1] == f"<!-- /{kind} -->"
    return lines[1:-1]


def test_ratios_to_the_gemm_of_several_files_stand_in_one_table(monkeypatch) -> None:
    files = {
        "others": [
            timed("theirs, logprob alone, H=64, V=9, T=1024", 0.97) | {"commit": "none"},
            timed("theirs, logprob alone, H=64, V=9, T=16", 2.5) | {"commit": "none"},
        ],
        "ours": [
            timed("GPU fused, H=64, V=9, T=1024", 1.01),
            timed("GPU fused, H=64, V=9, T=4096", 1.03),  # this shape is not in the first file
            timed("GPU fused, H=64, V=9, T=1024, and argmax", 1.3),  # the work differs
            timed("GPU engine, H=64, V=9, T=1024", 1.4) | {"baseline": None},
        ],
        "few": [
            timed("GPU fused, few rows, H=64, V=9, T=16", 1.02),
            timed("GPU fused, few rows, H=64, V=9, T=16", 1.07, "reading the weight once"),
        ],
    }

    assert rendered(monkeypatch, files, "ratios: others ours few") == [
        "`others`: a card, 2026-01-01, commit none; `ours`, `few`: a card, 2026-01-01, commit abc.",
        "",
        "| H | V | T | theirs, logprob alone | GPU fused |",
        "|---|---|---|---|---|",
        "| 64 | 9 | 16 | 2.50 | 1.02 |",
        "| 64 | 9 | 1024 | 0.97 | 1.01 |",
    ]


def test_a_table_may_take_some_records_of_a_file_but_never_none(monkeypatch) -> None:
    files = {"ours": [timed(f"GPU fused, H=64, V=9, T={rows}", 1.01) for rows in (1024, 4096)]}

    lines = rendered(monkeypatch, files, "results: ours where V=9, T=4096")

    assert any("T=4096" in line for line in lines)
    assert not any("T=1024" in line for line in lines)
    with pytest.raises(SystemExit, match="T=7"):
        rendered(monkeypatch, files, "results: ours where V=9, T=7")


def test_a_file_without_a_view_gets_ratio_and_target_in_columns_of_their_own(monkeypatch) -> None:
    files = {
        "served": [
            timed("Service, TCP", 1.01, "engine alone") | {"note": "wanted at least 0.95"},
            timed("Service, shm", 0.91, "engine alone")
            | {"note": "wanted at least 0.95; 2 clients"},
        ]
    }

    assert rendered(monkeypatch, files, "results: served") == [
        f"{RATIO} {TARGET}",
        "**missed**: the target is not reached.",
        "",
        "`served`: a card, 2026-01-01, commit abc.",
        "",
        "| what | engine alone, ms | ms | lowest to highest | ratio to engine alone | target | note |",
        "|---|---|---|---|---|---|---|",
        "| Service, TCP | 1 | 2 | 1.9 to 2.1 | 1.01 | ≥ 0.95 |  |",
        "| Service, shm | 1 | 2 | 1.9 to 2.1 | 0.91 | ≥ 0.95 **missed** | 2 clients |",
    ]


def test_a_view_makes_a_row_for_each_shape_and_a_column_for_each_contender(monkeypatch) -> None:
    view = View(
        "Times", r"(?P<column>\w+), T=(?P<T>\d+), H=(?P<H>\d+)", ("figure", "ratio", "target")
    )
    monkeypatch.setitem(render_tables.VIEWS, "some", (view,))
    files = {
        "some": [
            timed("ours, T=16, H=64", 1.1, "GEMM") | {"note": "wanted at most 1.2"},
            timed("theirs, T=16, H=64", 2.5, "GEMM"),
            timed("ours, T=32, H=64", 1.3, "GEMM") | {"note": "wanted at most 1.2"},
        ]
    }

    lines = rendered(monkeypatch, files, "results: some")

    assert lines[5:] == [
        "Times. H=64:",
        "",
        "| T | GEMM, ms | ours, ms | ratio | target | theirs, ms | ratio |",
        "|---|---|---|---|---|---|---|",
        "| 16 | 1 | 2 | 1.10 | ≤ 1.2 | 2 | 2.50 |",
        "| 32 | 1 | 2 | 1.30 | ≤ 1.2 **missed** |  |  |",
    ]


def test_records_that_no_view_shows_stand_in_a_plain_table(monkeypatch) -> None:
    view = View("Times", r"(?P<column>ours), T=(?P<T>\d+)", ("figure",))
    monkeypatch.setitem(render_tables.VIEWS, "some", (view,))
    files = {"some": [timed("ours, T=16", 1.1, "GEMM"), timed("further, T=16", 1.2, "GEMM")]}

    lines = rendered(monkeypatch, files, "results: some")

    assert "| 16 | 1 | 2 |" in lines
    assert "| further, T=16 | 1 | 2 | 1.9 to 2.1 | 1.20 |" in lines


def test_every_record_of_every_result_file_is_shown() -> None:
    for name, views in render_tables.VIEWS.items():
        # A layout may be there before its results are.
        is_measured = (render_tables.RESULTS / f"{name}.json").exists()
        for entry in render_tables.load(name) if is_measured else []:
            views_of = [v for v in views if render_tables.re.fullmatch(v.pattern, entry["what"])]
            shown = [v for v in views_of if render_tables.Selection(v, [entry]).records]
            # The pattern of a view with selected columns may match records that another view shows.
            assert shown or not views_of or name in ("gpu_fused_extras",), entry["what"]


def rate(how: str, rows: int, figure: float, ratio: float | None, note: str = "") -> dict:
    return {
        "what": f"GPU engine, {how}, H=64, V=9, batches of {rows} rows, 2 in flight",
        "machine": "2 x a card",
        "date": "2026-01-01",
        "commit": "abc",
        "figure": figure,
        "unit": "thousand rows/s",
        "spread": [figure - 1, figure + 1],
        "rounds": 7,
        "baseline": ratio and {"what": "1 GPU", "figure": figure / ratio},
        "ratio": ratio,
        "note": f"host to host; ms of a batch: {how}; {note}",
    }


def test_speedups_have_a_column_for_each_arrangement_of_gpus(monkeypatch) -> None:
    records = [
        rate("1 GPU", 64, 100, None),
        rate("2 shards", 64, 150, 1.5, "wanted at least 1.6"),
        rate("2 shards, NCCL", 64, 140, 1.4),
        rate("1 GPU", 8192, 500, None),
        rate("2 shards", 8192, 960, 1.92, "wanted at least 1.9"),
    ]

    assert rendered(monkeypatch, {"shards": records}, "speedups: shards") == [
        f"{RATIO} {TARGET}",
        "**missed**: the target is not reached.",
        "",
        "`shards`: 2 x a card, 2026-01-01, commit abc; medians of 7 rounds; host to host.",
        "",
        "Throughput, and its ratio to that of one GPU. H=64, V=9:",
        "",
        "| rows | 1 GPU, thousand rows/s | 2 shards, thousand rows/s | ratio | target "
        "| 2 shards, NCCL, thousand rows/s | ratio |",
        "|---|---|---|---|---|---|---|",
        "| 64 | 100 | 150 | 1.50 | ≥ 1.6 **missed** | 140 | 1.40 |",
        "| 8192 | 500 | 960 | 1.92 | ≥ 1.9 |  |  |",
    ]


def test_figures_of_several_units_carry_their_unit(monkeypatch) -> None:
    common = {"spread": None, "rounds": 1, "baseline": None, "ratio": None, "note": ""}
    records = [
        {"what": f"Load: {name}", "figure": 1.5, "unit": unit} | ORIGIN | common
        for name, unit in (("RSS", "MiB/h"), ("GPU memory", "MiB/h"), ("threads", "threads/h"))
    ]

    rows = rendered(monkeypatch, {"some": records}, "results: some")

    assert "| Load: GPU memory | 1.5 MiB/h |" in rows
    assert "| Load: threads | 1.5 threads/h |" in rows
