"""What the benchmark scripts say of a figure that misses what is wanted of it."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import bench_records
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
        (record(0.9, "of one run; wanted at least 0.95"), True),
        (record(0.96, "of one run; wanted at least 0.95"), False),
        (record(9.0, "wanted at least 0.95", ratio=0.94), True),
    ],
)
def test_a_figure_beyond_what_is_wanted_is_missed(entry: dict, is_missed: bool) -> None:
    # A miss was printed, and the exit code was 0; speeds were not checked at all.
    assert bench_records.missed([entry]) is is_missed
    assert "missed" not in entry


def test_tables_show_a_miss() -> None:
    note = "baseline spread 1 to 2 s; torch, wanted at most 0.71"

    assert render_tables.judged("0.9", 0.9, note) == "0.9, wanted <= 0.71, **missed**"
    assert render_tables.judged("0.5", 0.5, note) == "0.5, wanted <= 0.71"
    assert render_tables.judged("0.5", 0.5, "") == "0.5"
    assert (
        render_tables.judged("1.8", 1.8, "wanted at least 1.9") == "1.8, wanted >= 1.9, **missed**"
    )
    assert render_tables.judged("2", 2.0, "wanted at least 1.9") == "2, wanted >= 1.9"


def timed(what: str, ratio: float, baseline: str = "cuBLASLt GEMM that writes bf16 logits") -> dict:
    origin = {"machine": "a card", "date": "2026-01-01", "commit": "abc"}
    return {"what": what, "ratio": ratio, "baseline": {"what": baseline, "figure": 1.0}} | origin


def test_ratios_to_the_gemm_of_several_files_stand_in_one_table(monkeypatch) -> None:
    files = {
        "others": [
            timed("theirs, logprob alone, H=64, V=9, T=1024", 0.97) | {"commit": "none"},
            timed("theirs, logprob alone, H=64, V=9, T=16", 2.5) | {"commit": "none"},
        ],
        "ours": [
            timed("GPU fused, H=64, V=9, T=1024", 1.01),
            timed("GPU fused, H=64, V=9, T=4096", 1.03),  # no shape of the first file
            timed("GPU fused, H=64, V=9, T=1024, and argmax", 1.3),  # not the same work
            timed("GPU engine, H=64, V=9, T=1024", 1.4) | {"baseline": None},
        ],
        "few": [
            timed("GPU fused, few rows, H=64, V=9, T=16", 1.02),
            timed("GPU fused, few rows, H=64, V=9, T=16", 1.07, "reading the weight once"),
        ],
    }
    monkeypatch.setattr(render_tables, "load", files.__getitem__)
    text = "<!-- ratios: others ours few -->\nstale\n<!-- /ratios -->\n"

    assert render_tables.BLOCK.sub(render_tables.rendered_block, text).splitlines() == [
        "<!-- ratios: others ours few -->",
        "`others`: a card, 2026-01-01, commit none; `ours`, `few`: a card, 2026-01-01, commit abc.",
        "",
        "| time over the GEMM's | H=64, V=9, T=16 | H=64, V=9, T=1024 |",
        "|---|---|---|",
        "| theirs, logprob alone | 2.50 | 0.97 |",
        "| GPU fused | 1.02 | 1.01 |",
        "<!-- /ratios -->",
    ]


def test_a_table_may_take_some_records_of_a_file_but_never_none(monkeypatch) -> None:
    records = [
        timed(f"GPU fused, H=64, V=9, T={rows}", 1.01)
        | {"figure": 2.0, "unit": "ms", "rounds": 1, "note": ""}
        for rows in (1024, 4096)
    ]
    monkeypatch.setattr(render_tables, "load", {"ours": records}.__getitem__)
    text = "<!-- results: ours where V=9, T=4096 -->\nstale\n<!-- /results -->\n"

    rendered = render_tables.BLOCK.sub(render_tables.rendered_block, text)

    assert rendered.startswith("<!-- results: ours where V=9, T=4096 -->\n`ours`: a card")
    assert "T=4096 | 2 ms" in rendered
    assert "T=1024" not in rendered
    with pytest.raises(SystemExit, match="T=7"):
        render_tables.BLOCK.sub(render_tables.rendered_block, text.replace("4096", "7"))


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
    monkeypatch.setattr(render_tables, "load", {"shards": records}.__getitem__)
    text = "<!-- speedups: shards -->\nstale\n<!-- /speedups -->\n"

    assert render_tables.BLOCK.sub(render_tables.rendered_block, text).splitlines() == [
        "<!-- speedups: shards -->",
        "`shards`: 2 x a card, 2026-01-01, commit abc; medians of 7 rounds (lowest to highest); "
        "host to host.",
        "",
        "| what | 1 GPU, thousand rows/s | 2 shards, thousand rows/s "
        "| 2 shards, NCCL, thousand rows/s |",
        "|---|---|---|---|",
        "| H=64, V=9, batches of 64 rows | 100 (99 to 101) "
        "| 150 (149 to 151), 1.500 times, wanted >= 1.6, **missed** "
        "| 140 (139 to 141), 1.400 times |",
        "| H=64, V=9, batches of 8192 rows | 500 (499 to 501) "
        "| 960 (959 to 961), 1.920 times, wanted >= 1.9 |  |",
        "<!-- /speedups -->",
    ]


def test_figures_of_several_units_stand_in_rows_of_their_own(monkeypatch) -> None:
    origin = {"machine": "a card", "date": "2026-01-01", "commit": "abc"}
    common = {"spread": None, "rounds": 1, "baseline": None, "ratio": None, "note": ""}
    records = [
        {"what": f"Soak: {name}", "figure": 1.5, "unit": unit} | origin | common
        for name, unit in (("RSS", "MiB/h"), ("GPU memory", "MiB/h"), ("threads", "threads/h"))
    ]
    monkeypatch.setattr(render_tables, "load", {"soak": records}.__getitem__)

    rows = render_tables.table(["soak"]).splitlines()

    # One table with the unit of the first in its head said MiB of threads.
    assert "| Soak: GPU memory | 1.5 MiB/h |" in rows
    assert "| Soak: threads | 1.5 threads/h |" in rows
