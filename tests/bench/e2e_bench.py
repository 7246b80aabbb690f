#!/usr/bin/env python3
"""Measures the service end to end on one machine, together with its baselines, in one run.

    e2e_bench.py --out service.json                     all sections that fit into 8 minutes, on a GPU
    e2e_bench.py --only tcp,shm --hidden 4096           some sections, in this order
    e2e_bench.py --only baselines,swap --out more.json  the sections that take minutes each
    e2e_bench.py --only tcp,shm --replicas 2            two GPUs with a whole head each
    e2e_bench.py --device cpu --quick                   a dry run of every section in about two minutes

A round measures the contenders in turn, among them the engine alone (engine_bench), on a random head of a
realistic size, which is written first. `logprobctl bench` sends the loads. Figures are medians over the rounds.
Each section has a time limit, and its figures are printed and written when it ends, so that the others are still
measured if it fails or hangs. A section that this machine cannot measure is left out, and the reason is printed.
SIGTERM and Ctrl-C end the run early.

Exits with 1 if a figure misses its target, and with 3 if a section failed or was left out for lack of time.
The results are written and the table is printed in any case.

Needs logprobd, logprobctl and engine_bench in --bin-dir; Python with grpcio, grpcio-tools and numpy; for the
baselines also torch, safetensors and, for torch.compile, a C compiler.
"""

import argparse
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support" / "python"))

import bench_records
from e2e import baselines, latency, swap, throughput, tls
from e2e.fixture import GRACE_S, Fixture, Skipped, say, within
from e2e.processes import gpu_memory_mib

ROOT = bench_records.ROOT
PROGRAMS = ("logprobd", "logprobctl", "engine_bench")
TRANSPORTS = ("tcp", "shm", "ipc")


class Section(NamedTuple):
    measure: Callable[[Fixture], None]
    limit_s: float  # above the section's own time budget, so that only a hang reaches it


SECTIONS = {
    "one-row": Section(latency.one_row, 120),
    "small-beside-bulk": Section(latency.small_beside_bulk, 150),
    "baselines": Section(baselines.measure, 420),
    "swap": Section(swap.measure, 390),
    "tls": Section(tls.measure, 240),
}
THROUGHPUT_LIMIT_S = 180  # per hidden size
QUICK = {"hidden": [64], "vocab": 2048, "batch_rows": 512, "rounds": 1, "seconds": 0.4}
FULL = {"hidden": [4096, 2048], "vocab": 151_936, "batch_rows": 8192, "rounds": 5, "seconds": 3.0}


def names(text: str) -> list[str]:
    chosen = text.split(",")
    known = [*TRANSPORTS, *SECTIONS]
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not a section; the sections are {', '.join(known)}"
            )
    return chosen


def sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bin-dir",
        type=pathlib.Path,
        default=ROOT / "build" / "release" / "bin",
        help="folder of the programs; default: build/release/bin",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="JSON file to write; default: only the table is printed"
    )
    parser.add_argument(
        "--only",
        type=names,
        default=[*TRANSPORTS, *SECTIONS],
        help=f"sections in the order in which to run: {', '.join([*TRANSPORTS, *SECTIONS])}; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="use a small head and short rounds")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        help="number of whole heads, each on its own GPU; default: 1",
    )
    parser.add_argument(
        "--hidden",
        type=sizes,
        help="hidden sizes; transports use all of them, other sections use the first",
    )
    parser.add_argument("--vocab", type=int, help="vocabulary size; default: 151936")
    parser.add_argument("--batch-rows", type=int, help="rows of a batch; default: 8192")
    parser.add_argument(
        "--baselines",
        type=lambda text: tuple(text.split(",")),
        default=tuple(baselines.NAMES),
        help="modes of torch in the Python baselines: eager, compiled or both; default: both",
    )
    parser.add_argument(
        "--in-flight",
        type=int,
        default=8,
        help="bulk requests in flight per replica; default: 8, since with 4 the GPU waits for the "
        "transport",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="maximum number of rounds; a section stops earlier at its time limit; default: 5",
    )
    parser.add_argument("--seconds", type=float, help="seconds of a load in a round; default: 3")
    parser.add_argument(
        "--work", type=pathlib.Path, help="folder for the heads; default: a temporary folder"
    )
    parser.add_argument(
        "--smaller-batches",
        metavar="FLAGS",
        help="flags of a server with smaller batches, for small-beside-bulk; default: --batch-rows with "
        "a quarter",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="minutes after which no round starts; the run ends within one more minute; default: 8",
    )
    parser.add_argument(
        "--commit", help="commit of the records; default: HEAD of git, with -dirty if files differ"
    )
    args = parser.parse_args()
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not set(args.baselines) <= set(baselines.NAMES):
        parser.error(f"--baselines must be among {', '.join(baselines.NAMES)}")
    if args.device is None:
        args.device = "cpu" if gpu_memory_mib() is None else "cuda"
    if args.smaller_batches is None:
        args.smaller_batches = f"--batch-rows {max(1, args.batch_rows // 4)}"
    for program in PROGRAMS:
        if not (args.bin_dir / program).exists():
            parser.error(
                f"{args.bin_dir / program} is missing: build with -DLOGPROBD_BENCHMARKS=ON, or "
                "give the folder of the programs with --bin-dir"
            )
    return args


def table(records: list[dict]) -> str:
    rows = [("figure", "target", "measured")]
    for entry in records:
        found = bench_records.target_of(entry)
        sign = {"most": "<=", "least": ">="}
        target = f"{sign[found[0]]} {found[1]}" if found else ""
        measured = f"{entry['figure']:,.4g} {entry['unit']}"
        if entry["baseline"]:
            baseline = entry["baseline"]
            measured += (
                f", {entry['ratio']:.3f} times {baseline['figure']:,.4g} of {baseline['what']}"
            )
        if bench_records.misses(entry):
            measured += "  MISSED"
        rows.append((entry["what"], target, measured))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{what:<{widths[0]}}  {target:<{widths[1]}}  {measured}" for what, target, measured in rows
    )


def sections_of(chosen: list[str], hidden_sizes: list[int]) -> dict[str, Section]:
    """Returns sections by name, in the order of `chosen`. All transports form one section per hidden size."""
    sections: dict[str, Section] = {}
    transports = [name for name in TRANSPORTS if name in chosen]
    for name in chosen:
        if name in SECTIONS:
            sections[name] = SECTIONS[name]
            continue
        for hidden in hidden_sizes:

            def measure(fixture: Fixture, hidden: int = hidden) -> None:
                throughput.measure(fixture, transports, hidden)

            title = f"{', '.join(transports)} at H={hidden}"
            sections.setdefault(title, Section(measure, THROUGHPUT_LIMIT_S))
    return sections


def run_sections(
    fixture: Fixture, sections: dict[str, Section], write: Callable[[], None]
) -> dict[str, str]:
    """Measures the sections one after another. Returns the incomplete sections with the reasons."""
    failed: dict[str, str] = {}
    for name, section in sections.items():
        left = fixture.deadline - time.monotonic()
        if left <= 0:
            failed[name] = "the time limit of the run is reached"
            say(f"{name} is left out: {failed[name]}")
            continue
        say(f"{name} ...")
        begin, before = time.monotonic(), len(fixture.records)
        try:
            with within(min(section.limit_s, left + GRACE_S)):
                section.measure(fixture)
        except Skipped as reason:
            say(f"{name} is left out: {reason}")
        except Exception as error:  # the other sections are still measured
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        finally:
            write()  # a run that ends early keeps its figures
        if len(fixture.records) > before:
            say(table(fixture.records[before:]))
        say(f"{name}: {time.monotonic() - begin:.0f} s\n")
    return failed


def end_on_sigterm() -> None:
    """Handles SIGTERM like Ctrl-C, so that no server keeps running and holds GPU memory."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def main() -> int:
    args = arguments()
    bench_records.ORIGIN.update(
        machine=bench_records.machine(with_gpu=args.device == "cuda"),
        commit=args.commit or bench_records.commit(),
    )
    end_on_sigterm()
    work = args.work or pathlib.Path(tempfile.mkdtemp(prefix="logprobd_e2e_"))
    fixture = Fixture(
        binaries=args.bin_dir,
        work=work,
        device=args.device,
        hidden_sizes=args.hidden,
        vocab=args.vocab,
        batch_rows=args.batch_rows,
        rounds=args.rounds,
        seconds=args.seconds,
        replicas=args.replicas,
        in_flight=args.in_flight,
        baselines=args.baselines,
        smaller_batches=args.smaller_batches,
        deadline=time.monotonic() + 60 * args.minutes,
    )

    def write() -> None:
        if args.out:
            bench_records.write(fixture.records, args.out)

    failed: dict[str, str] = {}
    try:
        failed = run_sections(fixture, sections_of(args.only, args.hidden), write)
    except KeyboardInterrupt:
        failed["the run"] = "ended early"
    finally:
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)
    print(f"{bench_records.ORIGIN['machine']}, commit {bench_records.ORIGIN['commit']}\n")
    print(table(fixture.records), flush=True)
    has_misses = bench_records.report_misses(fixture.records)
    for name, reason in failed.items():
        say(f"FAILED: {name}: {reason}")
    if failed:
        return 3
    return 1 if has_misses else 0


if __name__ == "__main__":
    sys.exit(main())
