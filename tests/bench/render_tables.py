#!/usr/bin/env python3
"""Renders the tables of measured numbers in README files from tests/bench/results.

A table stands between `<!-- results: NAME... -->` and `<!-- /results -->`, NAME being the stem of a file
in tests/bench/results. `--check` writes nothing and exits 1 when a file is out of date, which a test does,
so that no number in a README is typed by hand.
"""

import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "bench" / "results"
BLOCK = re.compile(r"(<!-- results: (?P<names>[\w ]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
REQUIRED = {"what", "machine", "date", "commit", "figure", "unit"}


def number(value: float) -> str:
    """Three significant digits, without an exponent where it reads better."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 1000:
        return f"{value:,.0f}"
    if magnitude >= 0.01:
        return f"{value:.3g}"
    return f"{value:.1e}"


def load(name: str) -> list[dict]:
    path = RESULTS / f"{name}.json"
    records = json.loads(path.read_text())
    for record in records:
        missing = REQUIRED - record.keys()
        if missing:
            raise SystemExit(f"{path}: a record lacks {', '.join(sorted(missing))}")
    return records


def spread(record: dict) -> str:
    low_high = record.get("spread")
    return f"{number(low_high[0])} to {number(low_high[1])}" if low_high else ""


def baseline(record: dict) -> str:
    base = record.get("baseline")
    return f"{base['what']}: {number(base['figure'])}" if base else ""


def table(names: list[str]) -> str:
    records = [record for name in names for record in load(name)]
    lines = ["| what | figure | spread | baseline, same run | ratio |", "|---|---|---|---|---|"]
    for record in records:
        ratio = record.get("ratio")
        lines.append(
            f"| {record['what']} | {number(record['figure'])} {record['unit']} | {spread(record)} "
            f"| {baseline(record)} | {'' if ratio is None else f'{ratio:.2f}'} |"
        )
    sources = sorted({f"{r['machine']}, {r['date']}, commit {r['commit']}" for r in records})
    return "\n".join([*lines, "", *(f"Measured on {source}." for source in sources), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a file is out of date")
    arguments = parser.parse_args()
    stale = []
    for path in sorted(ROOT.glob("**/*.md")):
        if "build" in path.relative_to(ROOT).parts:
            continue
        text = path.read_text()
        rendered = BLOCK.sub(lambda m: m.group(1) + table(m["names"].split()) + m.group(3), text)
        if rendered != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not arguments.check:
                path.write_text(rendered)
    if stale and arguments.check:
        print(f"out of date: {', '.join(stale)}; run tests/bench/render_tables.py", file=sys.stderr)
        return 1
    print(f"rendered: {', '.join(stale)}" if stale else "tables are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
