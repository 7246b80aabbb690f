#!/usr/bin/env python3
"""Renders the tables of measured numbers in Markdown files from tests/bench/results.

Tables are written between two comments: `<!-- results: NAME... -->` and `<!-- /results -->`. NAME is the stem of
a file in tests/bench/results. Each file gets its own tables below a caption with machine, date and commit.
table_views.py defines how the records of a file become rows and columns. There are two more kinds of blocks:
`ratios` joins all its files in one table of times, each divided by that of the GEMM in the same run, and
`speedups` shows throughput by arrangement of GPUs. `where TEXT` after the names selects the records with TEXT
in their `what`.

With `--check` the program writes nothing and exits with 1 if a file is out of date. A test runs this check, so
that no number in a document is typed by hand.
"""

import argparse
import json
import pathlib
import re
import sys
import textwrap

from bench_records import misses, target_of
from table_views import SHORT, SPEEDUPS, TRANSLATIONS, VIEWS, Note, View

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "bench" / "results"
BLOCK = re.compile(
    r"(<!-- (results|ratios|speedups): ([\w ]+?)(?: where ([^>]+))? -->\n).*?(<!-- /\2 -->)",
    re.DOTALL,
)
REQUIRED = {
    *("what", "machine", "date", "commit", "figure", "unit", "rounds", "baseline", "ratio", "note"),
}
PLAIN = View(
    "",
    "(?P<what>.+)",
    ("figure", "spread", "baseline_name", "baseline", "ratio", "target", "note"),
    has_baseline=False,
)
# Parts of a note that begin like this are not shown: they concern one baseline or the target.
NOT_A_REMARK = ("wanted", "target", "best ", "a further", "baseline spread")


def number(value: float) -> str:
    """Formats a number: as an integer from 1000 on, with three significant digits from 0.01 on, else as 1.2e-03."""
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
            raise SystemExit(f"{path}: a record has no {', '.join(sorted(missing))}")
        for old, new in TRANSLATIONS:
            record["what"] = record["what"].replace(old, new)
            record["note"] = record["note"].replace(old, new)
    return records


def records_of(name: str, text: str) -> list[dict]:
    """Returns the records of a file that have `text` in their `what`."""
    records = [record for record in load(name) if text in record["what"]]
    if not records:
        raise SystemExit(f"{name}: no record has {text!r} in its `what`")
    return records


def remarks(record: dict) -> list[str]:
    parts = [part.strip() for part in record["note"].split(";")]
    return [part for part in parts if part and not part.startswith(NOT_A_REMARK)]


def remarks_of_all(records: list[dict]) -> list[str]:
    """Returns the remarks that all records share."""
    return [part for part in remarks(records[0]) if all(part in remarks(r) for r in records)]


def target(record: dict) -> str:
    """Returns the bound of the record's figure or ratio, marked if it is missed."""
    found = target_of(record)
    if found is None:
        return ""
    bound, limit = found
    mark = " **missed**" if misses(record) else ""
    return f"{'≤' if bound == 'most' else '≥'} {limit}{mark}"


def field(record: dict, name: str | Note, common: list[str], with_unit: bool) -> str:
    """Returns the text of one cell."""
    if isinstance(name, Note):
        match = re.search(name.pattern, record["note"])
        return " / ".join(group.strip() for group in match.groups() if group) if match else ""
    baseline, low_high = record["baseline"], record.get("spread")
    unit = f" {record['unit']}" if with_unit else ""
    texts = {
        "figure": lambda: (
            record["note"] if record["figure"] is None else number(record["figure"]) + unit
        ),
        "spread": lambda: (
            f"{number(low_high[0])} to {number(low_high[1])}"
            if low_high and low_high[0] != low_high[1]
            else ""
        ),
        "baseline": lambda: number(baseline["figure"]) + unit if baseline else "",
        "baseline_name": lambda: baseline["what"] if baseline else "",
        "ratio": lambda: "" if record["ratio"] is None else f"{record['ratio']:.2f}",
        "target": lambda: target(record),
        "note": lambda: "; ".join(part for part in remarks(record) if part not in common),
    }
    return texts[name]()


def heading(name: str | Note, column: str, unit: str, baselines: list[str]) -> str:
    """Returns the heading of a field. `column` is the name of its group of columns and may be empty."""
    column = SHORT.get(column, column)
    in_unit = f", {unit}" if unit else ""
    if isinstance(name, Note):
        return name.heading or column
    if name == "figure":
        return f"{column}{in_unit}" if column else unit or "figure"
    if name == "ratio" and not column and len(baselines) == 1:
        return f"ratio to {SHORT.get(baselines[0], baselines[0])}"
    if name == "baseline":
        return f"{column or 'baseline figure'}{in_unit}"
    if name == "ratio" and column:
        return column
    return {"spread": "lowest to highest", "baseline_name": "baseline"}.get(name, name)


def markdown(header: list[str], rows: list[list[str]], num_labels: int) -> list[str]:
    """Returns a table without the value columns that are empty in all rows."""
    used = [k for k in range(len(header)) if k < num_labels or any(row[k] for row in rows)]
    lines = [[header[k] for k in used], *([row[k] for k in used] for row in rows)]
    text = [f"| {' | '.join(line)} |" for line in lines]
    return [text[0], "|---" * len(used) + "|", *text[1:], ""]


class Selection:
    """The records of a file that a view selects, by the labels of their row and by column."""

    def __init__(self, view: View, records: list[dict]) -> None:
        self.rows: dict[tuple[str, ...], dict[str, list[dict]]] = {}
        self.labels: list[str] = []
        self.records: list[dict] = []
        for record in records:
            match = re.fullmatch(view.pattern, record["what"])
            if not match:
                continue
            groups = {name: value or view.blank for name, value in match.groupdict().items()}
            column = record["baseline"]["what"] if view.by_baseline else groups.pop("column", "")
            if view.columns and column not in view.columns:
                continue
            # T, the number of rows of a batch, is the last part of a shape.
            self.labels = sorted(groups, key=lambda label: label == "T")
            key = tuple(groups[label] for label in self.labels)
            self.rows.setdefault(key, {}).setdefault(column, []).append(record)
            self.records.append(record)
        if view.is_sorted:
            self.rows = dict(sorted(self.rows.items(), key=lambda item: [*map(int, item[0])]))

    def columns(self, view: View) -> list[str]:
        found = dict.fromkeys(column for row in self.rows.values() for column in row)
        return [c for c in view.columns if c in found] if view.columns else list(found)

    def baselines(self) -> list[str]:
        return list(dict.fromkeys(r["baseline"]["what"] for r in self.records if r["baseline"]))

    def constant_labels(self) -> list[int]:
        """Returns the labels that are the same in all rows, but always leaves one label for the table."""
        found = [k for k in range(len(self.labels)) if len({key[k] for key in self.rows}) == 1]
        return found[1:] if len(found) == len(self.labels) else found


def baseline_cell(name: str, group: list[dict], with_unit: bool) -> str:
    of_name = [r for r in group if r["baseline"] and r["baseline"]["what"] == name]
    return field(of_name[0], "baseline", [], with_unit) if of_name else ""


def pivot(view: View, records: list[dict], common: list[str]) -> list[str]:
    """Returns the records that `view` selects as a table with a row for each set of labels."""
    chosen = Selection(view, records)
    if not chosen.records:
        return []
    units = {r["unit"] for r in chosen.records}
    unit = units.pop() if len(units) == 1 else ""
    constant = chosen.constant_labels()
    kept = [k for k in range(len(chosen.labels)) if k not in constant]
    shown_baselines = chosen.baselines() if view.has_baseline else []

    fields: list[tuple[str, str | Note]] = [("", "figure")] if view.by_baseline else []
    fields += [
        (column, name)
        for column in chosen.columns(view)
        for name in view.fields
        if not (view.by_baseline and name == "figure")
    ]
    labels = [chosen.labels[k] for k in kept]
    header = [SHORT.get(label, label.replace("_", " ")) for label in labels]
    header += [f"{SHORT.get(name, name)}{f', {unit}' if unit else ''}" for name in shown_baselines]
    for k, (column, name) in enumerate(fields):
        # Only the first field of a group has the group's name in its heading.
        is_first = k == 0 or fields[k - 1][0] != column
        baselines = [] if column else chosen.baselines()
        header.append(heading(name, column if is_first else "", unit, baselines))

    lines = []
    for key, row in chosen.rows.items():
        group = [record for of_column in row.values() for record in of_column]
        shown = [key[k] for k in kept] + [
            baseline_cell(name, group, not unit) for name in shown_baselines
        ]
        # Each of the records with the same labels gets a separate line.
        for depth in range(max(len(of_column) for of_column in row.values())):
            cells = []
            for column, name in fields:
                of_column = row.get(column) or (group if not column else [])
                is_there = depth < len(of_column)
                cells.append(field(of_column[depth], name, common, not unit) if is_there else "")
            lines.append([*shown, *cells])
    first = next(iter(chosen.rows))
    fixed = ", ".join(f"{chosen.labels[k]}={first[k]}" for k in constant if first[k])
    title = ". ".join(part for part in (view.title, fixed) if part)
    return [*([f"{title}:", ""] if title else []), *markdown(header, lines, len(kept))]


def origins(records: list[dict]) -> str:
    found = {f"{r['machine']}, {r['date']}, commit {r['commit']}" for r in records}
    return "; ".join(sorted(found))


def caption(name: str, records: list[dict]) -> str:
    """Returns a caption that says where and how a file was measured."""
    # A figure without a spread is not one of rounds, such as a size.
    rounds = sorted({r["rounds"] for r in records if r["rounds"] > 1 or r.get("spread")})
    count = " to ".join(dict.fromkeys(str(r) for r in (rounds[:1] + rounds[-1:])))
    medians = f"; medians of {count} rounds" if rounds and rounds[-1] > 1 else ""
    about = "".join(f"; {part}" for part in remarks_of_all(records))
    return f"`{name}`: {origins(records)}{medians}{about}."


def tables_of(name: str, records: list[dict], views: tuple[View, ...]) -> list[str]:
    """Returns the tables of a file: those of its views, then tables of the records that no view matches."""
    common = remarks_of_all(records)
    lines = [caption(name, records), ""]
    for view in views:
        lines += pivot(view, records, common)
    rest = [r for r in records if not any(re.fullmatch(view.pattern, r["what"]) for view in views)]
    for has_baseline in (True, False):
        part = [r for r in rest if bool(r["baseline"]) == has_baseline]
        names = {r["baseline"]["what"] for r in part if has_baseline}
        if len(names) == 1:  # the heading then names the baseline
            fields = tuple(name for name in PLAIN.fields if not name.startswith("baseline"))
            lines += pivot(PLAIN._replace(fields=fields, has_baseline=True), part, common)
        else:
            lines += pivot(PLAIN, part, common)
    return lines


def with_legend(lines: list[str]) -> str:
    """Returns the lines below a legend that explains their columns."""
    heads = " ".join(line for line in lines if line.startswith("| "))
    legend = []
    if "| ratio" in heads:
        legend.append("Ratio: the figure divided by that of the baseline in the same run.")
    if "| target |" in heads:
        legend.append("Target: the bound for the ratio, or for the figure if there is no ratio.")
    if "**missed**" in heads:
        legend.append("**missed**: the target is not reached.")
    return "\n".join([*([" ".join(legend), ""] if legend else []), *lines])


def results(names: list[str], text: str = "") -> str:
    """Returns the tables of some result files, each below its caption."""
    return with_legend(
        [
            line
            for name in names
            for line in tables_of(name, records_of(name, text), VIEWS.get(name, ()))
        ]
    )


def speedups(names: list[str], text: str = "") -> str:
    """Returns the tables of some result files, with a column for each arrangement of GPUs."""
    lines = []
    for name in names:
        records = records_of(name, text)
        lines += [caption(name, records), "", *pivot(SPEEDUPS[0], records, [])]
    return with_legend(lines)


SHAPED = re.compile(r"(?P<method>.+?)(, few rows)?, H=(?P<H>\d+), V=(?P<V>\d+), T=(?P<T>\d+)")
GEMM = "GEMM that writes bf16 logits"


def ratios(names: list[str], text: str = "") -> str:
    """Returns a table of times over the GEMM's: a row for each shape of the first file, a column for each method."""
    methods: dict[str, dict[tuple[int, ...], str]] = {}
    shapes: list[tuple[int, ...]] = []
    captions: dict[str, list[str]] = {}
    for name in names:
        used = []
        for r in records_of(name, text):
            match = SHAPED.fullmatch(r["what"])
            if match and r["baseline"] and GEMM in r["baseline"]["what"]:
                shape = tuple(int(match[letter]) for letter in "HVT")
                methods.setdefault(match["method"], {})[shape] = f"{r['ratio']:.2f}"
                used.append(r)
        shapes = shapes or sorted({shape for cells in methods.values() for shape in cells})
        captions.setdefault(origins(used), []).append(f"`{name}`")
    rows = [
        [*(str(size) for size in shape), *(cells.get(shape, "") for cells in methods.values())]
        for shape in shapes
    ]
    measured = "; ".join(f"{', '.join(files)}: {origin}" for origin, files in captions.items())
    return "\n".join([f"{measured}.", "", *markdown(["H", "V", "T", *methods], rows, 3)])


KINDS = {"results": results, "ratios": ratios, "speedups": speedups}


def rendered_block(match: re.Match[str]) -> str:
    head, kind, names, text, foot = match.groups()
    lines = KINDS[kind](names.split(), text or "").split("\n")
    return (
        head + "\n".join(line if line.startswith("|") else wrapped(line) for line in lines) + foot
    )


def wrapped(prose: str) -> str:
    return textwrap.fill(prose, 140, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file is out of date")
    arguments = parser.parse_args()
    stale = []
    for path in sorted(ROOT.glob("**/*.md")):
        if "build" in path.relative_to(ROOT).parts:
            continue
        text = path.read_text()
        rendered = BLOCK.sub(rendered_block, text)
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
