#!/usr/bin/env python3
"""Draws the ratios of results/gpu_fused_rows.json over the number of rows, a line for each hidden size, as rows.svg.

    python3 tests/bench/plot_rows.py [--check]

--check fails if rows.svg is not what would be drawn.
"""

import json
import math
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
PICTURE = HERE / "rows.svg"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # distinct for color-blind readers
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 360, 50, 40, 30
ROWS_MAX, RATIO_MIN, RATIO_MAX = 5_000, 0.9, 1.9
TARGET = 1.10


def x_of(rows: int) -> float:
    return LEFT + (WIDTH - LEFT - 20) * math.log(rows) / math.log(ROWS_MAX)


def y_of(ratio: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (RATIO_MAX - ratio) / (RATIO_MAX - RATIO_MIN)


def points(records: list[dict]) -> dict[int, list[tuple[int, float]]]:
    """Returns (rows, ratio) of each hidden size, by ascending rows."""
    found: dict[int, list[tuple[int, float]]] = {}
    for record in records:
        hidden, rows = re.search(r"H=(\d+), V=\d+, T=(\d+)$", record["what"]).groups()
        found.setdefault(int(hidden), []).append((int(rows), record["ratio"]))
    return {hidden: sorted(of_hidden) for hidden, of_hidden in sorted(found.items())}


def text(x: float, y: float, words: str, anchor: str = "middle", color: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def draw(records: list[dict]) -> str:
    grid, target = 'stroke="#ddd"', 'stroke="#333" stroke-dasharray="6 4"'
    right, bottom = x_of(ROWS_MAX), y_of(RATIO_MIN)
    parts = []
    for tenth in range(round(RATIO_MIN * 10), round(RATIO_MAX * 10) + 1):
        y = y_of(tenth / 10)
        parts += [line(LEFT, y, right, y, grid), text(LEFT - 6, y + 4, f"{tenth / 10:.1f}", "end")]
    for rows in (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096):
        parts += [line(x_of(rows), TOP, x_of(rows), bottom, grid)]
        parts += [text(x_of(rows), bottom + 16, str(rows))]
    parts.append(line(LEFT, y_of(TARGET), right, y_of(TARGET), target))
    parts.append(text(LEFT + 4, y_of(TARGET) - 4, f"target {TARGET:.2f}", "start"))
    for index, (hidden, of_hidden) in enumerate(points(records).items()):
        color = COLORS[index]
        path = " ".join(f"{x_of(rows):.1f},{y_of(ratio):.1f}" for rows, ratio in of_hidden)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(text(LEFT + 20 + 90 * index, TOP - 12, f"H={hidden}", "start", color))
    parts.append(text(right, TOP - 12, "time divided by that of cuBLAS", "end"))
    parts.append(text(right, HEIGHT - 6, "rows", "end"))
    style = f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12"'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    body = "\n".join([background, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style}>\n{body}\n</svg>\n'


def main() -> None:
    picture = draw(json.loads((HERE / "results" / "gpu_fused_rows.json").read_text()))
    if "--check" not in sys.argv[1:]:
        PICTURE.write_text(picture)
    elif PICTURE.read_text() != picture:
        raise SystemExit("plot_rows.py: error: rows.svg is out of date: run plot_rows.py")


if __name__ == "__main__":
    main()
