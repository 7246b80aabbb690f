#!/usr/bin/env python3
"""Draws the pictures of ARCHITECTURE.md from the comments in it that describe them.

    python3 .ci/draw_pictures.py [--check] [ROOT]

A comment is `<!-- picture: FILE`, lines of boxes `NAME: TEXT | NAME: TEXT`, lines of arrows `NAME -> NAME: TEXT`, and
`-->`. The box `_` is an empty place. An arrow goes along the row of its start, then along the column of its end.
--check fails if a FILE is not what would be drawn.
"""

import argparse
import html
import pathlib
import re
import textwrap

COMMENT = re.compile(r"^<!-- picture: (\S+)\n(.*?)\n-->$", re.DOTALL | re.MULTILINE)
ARROW = re.compile(r"(.+) -> ([^:]+)(?:: (.+))?")
WIDTH, HEIGHT, GAP_X, GAP_Y, LINE = 148, 88, 34, 30, 15
HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker>'
)


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(words)}</text>'


def box(x: float, y: float, name: str, words: str) -> list[str]:
    lines = textwrap.wrap(words, 21)
    top = y + (HEIGHT - LINE * len(lines)) / 2 + 4
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef4fa" stroke="#0072b2"/>',
        text(x + WIDTH / 2, top, name, 'font-weight="bold"'),
        *(text(x + WIDTH / 2, top + LINE * (k + 1), line) for k, line in enumerate(lines)),
    ]


def arrow(begin: tuple[float, float], end: tuple[float, float], words: str) -> list[str]:
    """Draws from the border of one box to that of another; both are given by their centers."""
    (x1, y1), (x2, y2) = begin, end
    right, down = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    start = (x1 + right * WIDTH / 2, y1) if right else (x1, y1 + down * HEIGHT / 2)
    stop = (x2, y2 - down * HEIGHT / 2) if down else (x2 - right * WIDTH / 2, y2)
    corner = [(x2, y1)] if right and down else []
    points = " ".join(f"{x:g},{y:g}" for x, y in (start, *corner, stop))
    line = f'<polyline points="{points}" fill="none" stroke="#333" marker-end="url(#head)"/>'
    return [line, text((start[0] + x2) / 2, y1 - 6, words)] if words else [line]


def draw(description: str) -> str:
    centers: dict[str, tuple[float, float]] = {}
    parts = []
    lines = description.split("\n")
    rows = [line for line in lines if not ARROW.fullmatch(line)]
    for row, line in enumerate(rows):
        for column, cell in enumerate(line.split("|")):
            name, _, words = cell.strip().partition(": ")
            x, y = GAP_Y + column * (WIDTH + GAP_X), GAP_Y + row * (HEIGHT + GAP_Y)
            if name != "_":
                centers[name] = (x + WIDTH / 2, y + HEIGHT / 2)
                parts += box(x, y, name, words)
    for begin, end, words in (match.groups() for match in map(ARROW.fullmatch, lines) if match):
        parts += arrow(centers[begin], centers[end], words or "")
    width = max(x for x, _ in centers.values()) + WIDTH / 2 + GAP_Y
    height = max(y for _, y in centers.values()) + HEIGHT / 2 + GAP_Y
    style = f'width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="12" text-anchor="middle"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    body = "\n".join([HEAD, background, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style}>\n{body}\n</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a picture is out of date")
    here = pathlib.Path(__file__).resolve().parents[1]
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=here)
    arguments = parser.parse_args()
    for name, description in COMMENT.findall((arguments.root / "ARCHITECTURE.md").read_text()):
        path, picture = arguments.root / name, draw(description)
        if not arguments.check:
            path.write_text(picture)
        elif not path.is_file() or path.read_text() != picture:
            raise SystemExit(
                f"draw_pictures.py: error: {name} is out of date: run draw_pictures.py"
            )


if __name__ == "__main__":
    main()
