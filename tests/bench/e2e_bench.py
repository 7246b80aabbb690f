#!/usr/bin/env python3
"""Measures the service end to end on one machine, and what it replaces beside it, in one run.

    e2e_bench.py --out service.json                     everything, in less than 9 minutes on a GPU
    e2e_bench.py --only tcp,shm --hidden 4096           some sections
    e2e_bench.py --only tcp,shm --replicas 2            two GPUs, with a whole head each
    e2e_bench.py --device cpu --quick                   a dry run of every section in about a minute

A round runs the contenders in turn, the engine alone (engine_bench) among them, on a random head of a
real size that is made first. Figures are medians over the rounds. A section that this build or machine
cannot measure is left out with the reason. Exits 1 when a figure is not what is wanted of it and 3 when
a section failed; results and the table are written in any case.

Needs logprobd, logprobctl and engine_bench in --bin-dir; Python with grpcio, grpcio-tools, numpy and,
for the baselines, torch and safetensors.
"""

import argparse
import pathlib
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support" / "python"))

import bench_records
from e2e import baselines, latency, swap, throughput
from e2e.processes import gpu_memory_mib
from e2e.scene import Scene, Skipped, say, timed

ROOT = bench_records.ROOT
TRANSPORTS = ("tcp", "shm", "ipc")
SECTIONS: dict[str, Callable[[Scene], None]] = {
    "one-row": latency.one_row,
    "small-beside-bulk": latency.small_beside_bulk,
    "baselines": baselines.measure,
    "swap": swap.measure,
}
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
        help=f"of {', '.join([*TRANSPORTS, *SECTIONS])}; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="a small head and short rounds")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument("--replicas", type=int, default=1, help="GPUs, with a whole head each")
    parser.add_argument(
        "--hidden", type=sizes, help="hidden sizes; the first one for every section"
    )
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--batch-rows", type=int)
    parser.add_argument("--rounds", type=int)
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
    parser.add_argument("--minutes", type=float, default=8.5, help="begin nothing after these")
    parser.add_argument("--commit", help="where there is no git; default: HEAD, -dirty if changed")
    args = parser.parse_args()
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.device is None:
        args.device = "cpu" if gpu_memory_mib() is None else "cuda"
    if args.cut_smaller is None:
        args.cut_smaller = f"--batch-rows {max(1, args.batch_rows // 4)}"
    return args


def print_table(records: list[dict]) -> None:
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
    for what, asked, measured in rows:
        print(f"{what:<{widths[0]}}  {asked:<{widths[1]}}  {measured}")


def run_sections(scene: Scene, chosen: list[str], write: Callable[[], None]) -> list[str]:
    """Measures section by section; the names of those that failed."""
    sections: dict[str, Callable[[Scene], None]] = {}
    transports = [name for name in TRANSPORTS if name in chosen]
    if transports:
        sections[", ".join(transports)] = lambda scene: throughput.measure(scene, transports)
    sections |= {name: SECTIONS[name] for name in SECTIONS if name in chosen}
    failed = []
    for name, measure in sections.items():
        if time.monotonic() > scene.deadline:
            say(f"{name} left out: the time is over")
            continue
        with timed(name):
            try:
                measure(scene)
            except Skipped as reason:
                say(f"{name} left out: {reason}")
            except Exception:  # the other sections are still worth having
                traceback.print_exc()
                failed.append(name)
            write()  # a run that is ended early leaves what it has
    return failed


def main() -> int:
    args = arguments()
    bench_records.ORIGIN.update(
        machine=bench_records.machine(with_gpu=args.device == "cuda"),
        commit=args.commit or bench_records.commit(),
    )
    work = args.work or pathlib.Path(tempfile.mkdtemp(prefix="logprobd_e2e_"))
    scene = Scene(
        binaries=args.bin_dir,
        work=work,
        device=args.device,
        hidden_sizes=args.hidden,
        vocab=args.vocab,
        batch_rows=args.batch_rows,
        rounds=args.rounds,
        seconds=args.seconds,
        replicas=args.replicas,
        cut_smaller=args.cut_smaller,
        deadline=time.monotonic() + 60 * args.minutes,
    )
    try:
        failed = run_sections(
            scene,
            args.only,
            lambda: bench_records.write(scene.records, args.out) if args.out else None,
        )
    finally:
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)
    print(f"{bench_records.ORIGIN['machine']}\n")
    print_table(scene.records)
    is_missed = bench_records.missed(scene.records)
    if failed:
        say(f"failed: {', '.join(failed)}")
        return 3
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
