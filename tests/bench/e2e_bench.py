#!/usr/bin/env python3
"""Measures the service end to end on one machine, and what it replaces beside it, in one run.

    e2e_bench.py --out service.json                     everything that 8 minutes allow, on a GPU
    e2e_bench.py --only tcp,shm --hidden 4096           some sections, in that order
    e2e_bench.py --only baselines,swap --out more.json  those that take minutes each
    e2e_bench.py --only tcp,shm --replicas 2            two GPUs, with a whole head each
    e2e_bench.py --device cpu --quick                   a dry run of every section in some two minutes

A round runs the contenders in turn, the engine alone (engine_bench) among them, on a random head of a
real size that is made first. Figures are medians over the rounds. Each section has a limit in time, and
its figures are shown and written when it ends: one that fails, hangs or is left out costs no other. A
section that this machine cannot measure is left out with the reason. Ends early on SIGTERM and Ctrl-C.

Exits 1 when a figure is not what is wanted of it and 3 when a section failed or was left out for want of
time; results and the table are written in any case.

Needs logprobd, logprobctl and engine_bench in --bin-dir; Python with grpcio, grpcio-tools, numpy and,
for the baselines, torch and safetensors, and a C compiler for torch.compile.
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
from e2e import baselines, latency, swap, throughput
from e2e.fixture import Fixture, Skipped, say
from e2e.processes import gpu_memory_mib
from e2e.time_limit import GRACE_S, within

ROOT = bench_records.ROOT
PROGRAMS = ("logprobd", "logprobctl", "engine_bench")
TRANSPORTS = ("tcp", "shm", "ipc")


class Section(NamedTuple):
    measure: Callable[[Fixture], None]
    limit_s: float  # beyond what it allows itself: something hangs


SECTIONS = {
    "one-row": Section(latency.one_row, 120),
    "small-beside-bulk": Section(latency.small_beside_bulk, 150),
    "baselines": Section(baselines.measure, 420),
    "swap": Section(swap.measure, 390),
}
THROUGHPUT_LIMIT_S = 180  # a hidden size
QUICK = {"hidden": [64], "vocab": 2048, "batch_rows": 512, "rounds": 1, "seconds": 0.4}
FULL = {"hidden": [4096, 2048], "vocab": 151_936, "batch_rows": 8192, "rounds": 5, "seconds": 3.0}


def names(text: str) -> list[str]:
    chosen = text.split(",")
    known = [*TRANSPORTS, *SECTIONS]
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return chosen


def sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin-dir", type=pathlib.Path, default=ROOT / "build" / "release" / "bin")
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write; default: only the table")
    parser.add_argument(
        "--only",
        type=names,
        default=[*TRANSPORTS, *SECTIONS],
        help=f"of {', '.join([*TRANSPORTS, *SECTIONS])}, in the order to run; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="a small head and short rounds")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument(
        "--replicas", type=int, default=1, help="whole heads, each on a GPU of its own"
    )
    parser.add_argument(
        "--hidden", type=sizes, help="hidden sizes; the first one for every section"
    )
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--batch-rows", type=int)
    parser.add_argument(
        "--baselines",
        type=lambda text: tuple(text.split(",")),
        default=tuple(baselines.NAMES),
        help="eager or compiled, or both: how the Python baselines run torch",
    )
    parser.add_argument(
        "--in-flight",
        type=int,
        default=8,
        help="bulk requests of a whole batch at once, for each replica; default: 8, with 4 the way "
        "there and back keeps the GPU waiting",
    )
    parser.add_argument("--rounds", type=int, help="most; fewer where a section's time is over")
    parser.add_argument("--seconds", type=float, help="of a load in a round")
    parser.add_argument(
        "--work", type=pathlib.Path, help="folder for the heads; default: a temporary one"
    )
    parser.add_argument(
        "--cut-smaller",
        metavar="FLAGS",
        help="flags of a server that cuts bulk batches smaller, for small-beside-bulk; "
        "default: --batch-rows of a quarter",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="begin no round after these, and end within one more",
    )
    parser.add_argument("--commit", help="where there is no git; default: HEAD, -dirty if changed")
    args = parser.parse_args()
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not set(args.baselines) <= set(baselines.NAMES):
        parser.error(f"--baselines: of {', '.join(baselines.NAMES)}")
    if args.device is None:
        args.device = "cpu" if gpu_memory_mib() is None else "cuda"
    if args.cut_smaller is None:
        args.cut_smaller = f"--batch-rows {max(1, args.batch_rows // 4)}"
    for program in PROGRAMS:
        if not (args.bin_dir / program).exists():
            parser.error(
                f"{args.bin_dir / program} is missing: build with -DLOGPROBD_BENCHMARKS=ON, or "
                "name the folder of the binaries with --bin-dir"
            )
    return args


def table(records: list[dict]) -> str:
    rows = [("figure", "asked", "measured")]
    for entry in records:
        wanted = bench_records.WANTED.search(entry["note"])
        sign = {"most": "<=", "least": ">="}
        asked = f"{sign[wanted['bound']]} {wanted['limit']}" if wanted else ""
        measured = f"{entry['figure']:,.4g} {entry['unit']}"
        if entry["baseline"]:
            baseline = entry["baseline"]
            measured = f"{entry['ratio']:.3f}: {measured} over {baseline['figure']:,.4g}, {baseline['what']}"
        if bench_records.misses(entry):
            measured += "  MISSED"
        rows.append((entry["what"], asked, measured))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{what:<{widths[0]}}  {asked:<{widths[1]}}  {measured}" for what, asked, measured in rows
    )


def sections_of(chosen: list[str], hidden_sizes: list[int]) -> dict[str, Section]:
    """By name, in the order of `chosen`; the transports are measured beside each other."""
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
    """Measures section by section; those that have not all their figures, with the reason."""
    failed: dict[str, str] = {}
    for name, section in sections.items():
        left = fixture.deadline - time.monotonic()
        if left <= 0:
            failed[name] = "the time is over"
            say(f"{name} left out: {failed[name]}")
            continue
        say(f"{name} ...")
        begin, before = time.monotonic(), len(fixture.records)
        try:
            with within(min(section.limit_s, left + GRACE_S)):
                section.measure(fixture)
        except Skipped as reason:
            say(f"{name} left out: {reason}")
        except Exception as error:  # the other sections are still worth having
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        finally:
            write()  # a run that is ended early leaves what it has
        if len(fixture.records) > before:
            say(table(fixture.records[before:]))
        say(f"{name}: {time.monotonic() - begin:.0f} s\n")
    return failed


def end_on_sigterm() -> None:
    """As Ctrl-C: servers that stay behind would hold the GPU's memory."""

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
        cut_smaller=args.cut_smaller,
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
    is_missed = bench_records.missed(fixture.records)
    for name, reason in failed.items():
        say(f"FAILED: {name}: {reason}")
    if failed:
        return 3
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
