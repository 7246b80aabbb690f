"""Makes, writes and checks records of measured figures, in the schema of README.md, for all benchmark scripts."""

import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def cpu_name() -> str:
    """Returns the processor and the number of cores that this process may use."""
    model = "unknown CPU"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = " ".join(line.split(":", 1)[1].split())
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def gpu_names() -> str:
    """Returns the GPUs with their clocks and driver, or an empty string without a GPU."""
    query = "--query-gpu=name,clocks.max.sm,clocks.max.mem,driver_version"
    try:
        text = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line]
    if not lines:
        return ""
    name, clock, memory_clock, driver = lines[0]
    count = f"{len(lines)} x " if len(lines) > 1 else ""
    return f"{count}{name}, up to {clock} MHz, memory {memory_clock} MHz, driver {driver}"


def machine(with_gpu: bool = False) -> str:
    gpus = gpu_names() if with_gpu else ""
    return f"{gpus}; {cpu_name()}" if gpus else cpu_name()


def commit() -> str:
    """Returns HEAD of git, with -dirty if files differ, or "unknown" without git."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        # The result files are excluded, since this run writes them.
        changes = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!tests/bench/results"]
        dirty = subprocess.run(changes, cwd=ROOT, check=False).returncode != 0
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if dirty else head


ORIGIN = {"machine": "", "commit": ""}  # the same for all records of a run; main sets it


def record(what: str, figure: float | None, unit: str, **more: object) -> dict:
    """Returns a record with default fields, which `more` overrides."""
    return {
        "what": what,
        "machine": ORIGIN["machine"],
        "date": datetime.date.today().isoformat(),
        "commit": ORIGIN["commit"],
        "figure": figure,
        "unit": unit,
        "spread": None,
        "rounds": 1,
        "baseline": None,
        "ratio": None,
        "note": "",
        **more,
    }


def record_of_rounds(
    what: str,
    unit: str,
    figures: list[float],
    *,
    baseline: tuple[str, list[float]] | None = None,
    note: str = "",
) -> dict:
    """Returns a record with the median of `figures`, and that of a baseline measured in turn with them."""
    figure = statistics.median(figures)
    entry = record(
        what,
        figure,
        unit,
        rounds=len(figures),
        spread=[min(figures), max(figures)],
        note=note,
    )
    if baseline:
        name, others = baseline
        entry["baseline"] = {"what": name, "figure": statistics.median(others)}
        entry["ratio"] = figure / entry["baseline"]["figure"]
    return entry


def write(records: list[dict], out: pathlib.Path | None) -> None:
    text = json.dumps(records, indent=1) + "\n"
    if out:
        # The rename makes sure that the file is complete even if the process is killed.
        beside = out.with_name(out.name + ".part")
        beside.write_text(text)
        beside.replace(out)
    else:
        print(text, end="")


# Records up to November 2026 say "wanted" instead of "target".
TARGET = re.compile(r"(?:target|wanted) at (?P<bound>most|least) (?:\S+ = )?(?P<limit>[\d.e+-]*\d)")


def target_of(entry: dict) -> tuple[str, str] | None:
    """Returns the bound in a record's note as ("most" or "least", the limit), or None without a bound."""
    match = TARGET.search(entry["note"])
    return (match["bound"], match["limit"]) if match else None


def misses(entry: dict) -> bool:
    """Returns whether the ratio, or the figure if there is no baseline, misses the target in the note."""
    target = target_of(entry)
    if target is None:
        return False
    figure = entry["figure"] if entry["ratio"] is None else entry["ratio"]
    excess = figure - float(target[1])
    return excess > 0 if target[0] == "most" else excess < 0


def report_misses(records: list[dict]) -> bool:
    """Prints the records that miss their target and returns whether there are any.

    A record also counts as missed if its field "missed" is true. This field is removed.
    """
    found = False
    for entry in records:
        if entry.pop("missed", False) or misses(entry):
            figure = entry["figure"] if entry["ratio"] is None else entry["ratio"]
            print(f"MISSED: {entry['what']}: {figure:g}; {entry['note']}", file=sys.stderr)
            found = True
    return found
