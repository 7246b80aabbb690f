#!/usr/bin/env python3
"""Renders the tables of measured numbers in README files from tests/bench/results.

Tables stand between `<!-- results: NAME... -->` and `<!-- /results -->`, NAME being the stem of a file
in tests/bench/results; each file gets its own, with its machine above it. Between `<!-- ratios: NAME... -->`
and `<!-- /ratios -->` stands one table of all the files: times over that of the GEMM of the same run. Between
`<!-- speedups: NAME... -->` and `<!-- /speedups -->` each file is a table with a column for each arrangement of GPUs:
throughput, and how many times that of one GPU. With `where TEXT` behind the names, which all three may have, only
records with TEXT in their `what` are taken.

`--check` writes nothing and exits 1 when a file is out of date, which a test does,
so that no number in a README is typed by hand.
"""

import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "bench" / "results"
BLOCK = re.compile(
    r"(<!-- (results|ratios|speedups): ([\w ]+?)(?: where ([^>]+))? -->\n).*?(<!-- /\2 -->)",
    re.DOTALL,
)
REQUIRED = {
    "what",
    "machine",
    "date",
    "commit",
    "figure",
    "unit",
    "rounds",
    "baseline",
    "ratio",
    "note",
}


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


def records_of(name: str, text: str) -> list[dict]:
    """The records of a file that have `text` in what they measured."""
    records = [record for record in load(name) if text in record["what"]]
    if not records:
        raise SystemExit(f"{name}: no record has {text!r} in what it measured")
    return records


WANTED = re.compile(r"wanted at (?P<bound>most|least) (?:\S+ = )?(?P<limit>[\d.e+-]*\d)")
# Remarks on one baseline, not on what was measured.
OF_A_BASELINE = ("wanted", "best ", "a further", "baseline spread")


def spread(record: dict) -> str:
    low_high = record.get("spread")
    return f" ({number(low_high[0])} to {number(low_high[1])})" if low_high else ""


def wanted(note: str) -> str | None:
    """What a note asks of its figure, as "<= 1.3"."""
    match = WANTED.search(note)
    return match and f"{'<=' if match['bound'] == 'most' else '>='} {match['limit']}"


def judged(text: str, value: float, note: str) -> str:
    """The cell, with the limit of its note and whether it was missed."""
    limit = wanted(note)
    if not limit:
        return text
    sign, number_text = limit.split()
    excess = value - float(number_text)
    is_missed = excess > 0 if sign == "<=" else excess < 0
    return f"{text}, wanted {limit}{', **missed**' if is_missed else ''}"


def remarks(record: dict) -> list[str]:
    parts = [part.strip() for part in record["note"].split(";")]
    return [part for part in parts if part and not part.startswith(OF_A_BASELINE)]


def rows_of(header: list[str], rows: list[list[str]]) -> list[str]:
    # A column in which nothing stands says nothing.
    used = [k for k in range(len(header)) if k == 0 or any(row[k] for row in rows)]
    lines = [[header[k] for k in used], *([row[k] for k in used] for row in rows)]
    text = [f"| {' | '.join(line)} |" for line in lines]
    return [text[0], "|---" * len(used) + "|", *text[1:], ""]


def grouped(records: list[dict], key) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def against_baselines(records: list[dict], common: list[str]) -> list[str]:
    """A row for what was measured, a column for each baseline of the same run: ours / its figure."""
    names = list(dict.fromkeys(r["baseline"]["what"] for r in records))
    rows = []
    for what, group in grouped(records, lambda r: r["what"]).items():
        cells = {
            r["baseline"]["what"]: judged(
                f"{r['ratio']:.2f} of {number(r['baseline']['figure'])}", r["ratio"], r["note"]
            )
            for r in group
        }
        first = group[0]
        note = "; ".join(part for part in remarks(first) if part not in common)
        figure = f"{number(first['figure'])} {first['unit']}{spread(first)}"
        rows.append([what, figure, *(cells.get(name, "") for name in names), note])
    return rows_of(["what", "figure", *names, "note"], rows)


def several_figures(records: list[dict], common: list[str]) -> list[str]:
    """A row for each "case: figure", a column for each figure."""
    parts = {id(r): r["what"].rsplit(": ", 1) for r in records}
    names = list(dict.fromkeys(parts[id(r)][1] for r in records))
    limits = {n: {wanted(r["note"]) for r in records if parts[id(r)][1] == n} for n in names}
    rows = []
    for case, group in grouped(records, lambda r: parts[id(r)][0]).items():
        cells = {}
        for r in group:
            text = f"{number(r['figure'])}{spread(r)}"
            judgement = judged(text, r["figure"], r["note"])
            # A limit that holds for the whole column stands in its head.
            column_limit = len(limits[parts[id(r)][1]]) == 1 and "missed" not in judgement
            cells[parts[id(r)][1]] = text if column_limit else judgement
        note = "; ".join(part for part in remarks(group[0]) if part not in common)
        rows.append([case, *(cells.get(name, "") for name in names), note])
    unit = records[0]["unit"]
    heads = []
    for name in names:
        limit = next(iter(limits[name])) if len(limits[name]) == 1 else None
        heads.append(f"{name}, {unit}" + (f", wanted {limit}" if limit else ""))
    return rows_of(["what", *heads, "note"], rows)


def plain(records: list[dict], common: list[str]) -> list[str]:
    rows = []
    for r in records:
        figure = judged(f"{number(r['figure'])} {r['unit']}{spread(r)}", r["figure"], r["note"])
        rows.append([r["what"], figure, "; ".join(p for p in remarks(r) if p not in common)])
    return rows_of(["what", "figure", "note"], rows)


def origins(records: list[dict]) -> str:
    found = {f"{r['machine']}, {r['date']}, commit {r['commit']}" for r in records}
    return "; ".join(sorted(found))


SHAPED = re.compile(r"(?P<method>.+?)(, few rows)?, H=(?P<H>\d+), V=(?P<V>\d+), T=(?P<T>\d+)")
GEMM = "GEMM that writes bf16 logits"


def ratios(names: list[str], text: str = "") -> str:
    """A row for each method, a column for each shape of the first file: time over the GEMM's."""
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
    header = ["time over the GEMM's", *(f"H={h}, V={v}, T={t}" for h, v, t in shapes)]
    rows = [[m, *(cells.get(shape, "") for shape in shapes)] for m, cells in methods.items()]
    measured = "; ".join(f"{', '.join(files)}: {origin}" for origin, files in captions.items())
    return "\n".join([f"{measured}.", "", *rows_of(header, rows)])


ARRANGED = re.compile(r"GPU engine, (?P<how>.+?), (?P<case>H=\d+, V=\d+, batches of \d+ rows)\b.*")


def speedups(names: list[str], text: str = "") -> str:
    """The tables of some result files, each with a column for each arrangement of GPUs."""
    return "\n".join(line for name in names for line in speedups_of(name, records_of(name, text)))


def speedups_of(name: str, records: list[dict]) -> list[str]:
    """A row for each shape and size of batch; throughput, and how many times that of one GPU."""
    matches = {id(r): ARRANGED.fullmatch(r["what"]) for r in records}
    arranged = [r for r in records if matches[id(r)]]
    hows = list(dict.fromkeys(matches[id(r)]["how"] for r in arranged))
    rows = []
    for case, group in grouped(arranged, lambda r: matches[id(r)]["case"]).items():
        cells = {}
        for r in group:
            text = f"{number(r['figure'])}{spread(r)}"
            if r["baseline"]:
                text = judged(f"{text}, {r['ratio']:.3f} times", r["ratio"], r["note"])
            cells[matches[id(r)]["how"]] = text
        rows.append([case, *(cells.get(how, "") for how in hows)])
    heads = [f"{how}, {arranged[0]['unit']}" for how in hows]
    return [caption(name, records), "", *rows_of(["what", *heads], rows)]


def in_common(records: list[dict]) -> list[str]:
    """The remarks that all of them have."""
    return [part for part in remarks(records[0]) if all(part in remarks(r) for r in records)]


def caption(name: str, records: list[dict]) -> str:
    """Where and how a file was measured."""
    rounds = sorted({r["rounds"] for r in records if r["rounds"] > 1})
    count = " to ".join(dict.fromkeys(str(r) for r in (rounds[:1] + rounds[-1:])))
    medians = f"; medians of {count} rounds (lowest to highest)" if rounds else ""
    about = "".join(f"; {part}" for part in in_common(records))
    return f"`{name}`: {origins(records)}{medians}{about}."


def table(names: list[str], text: str = "") -> str:
    """The tables of some result files, each under a caption that says where it was measured."""
    lines = []
    for name in names:
        records = records_of(name, text)
        common = in_common(records)
        lines += [caption(name, records), ""]
        compared = [r for r in records if r["baseline"]]
        alone = [r for r in records if not r["baseline"]]
        if compared:
            lines += against_baselines(compared, common)
        is_one_unit = len({r["unit"] for r in alone}) == 1
        if is_one_unit and len(alone) > 2 and all(": " in r["what"] for r in alone):
            lines += several_figures(alone, common)
        elif alone:
            lines += plain(alone, common)
    return "\n".join(lines)


KINDS = {"results": table, "ratios": ratios, "speedups": speedups}


def rendered_block(match: re.Match[str]) -> str:
    head, kind, names, text, foot = match.groups()
    return head + KINDS[kind](names.split(), text or "") + foot


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a file is out of date")
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
