"""Defines the options that the scripts of this folder share, and the form of the results of attacks and rotations."""

import argparse
import datetime
import json
import os
import pathlib
import sys

import bench_records

BINARIES = pathlib.Path(__file__).resolve().parents[2] / "build" / "release" / "bin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bin-dir",
        type=pathlib.Path,
        default=BINARIES,
        help="folder of the programs; default: build/release/bin",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="JSON file to write; default: standard output"
    )
    parser.add_argument(
        "--commit", help="commit of the programs; default: HEAD of git, with -dirty if files differ"
    )


def write(result: dict, problems: list[str], args: argparse.Namespace) -> int:
    """Writes the result with its machine, date and commit, and prints the problems. Returns the exit code."""
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": args.commit or bench_records.commit(),
        "machine": bench_records.machine(),
        # The mean number of processes that ran or waited for a core in the last 15 minutes.
        "load_average": round(os.getloadavg()[2], 1),
        **result,
        "problems": problems,
    }
    text = json.dumps(record, indent=2) + "\n"
    if args.out:
        args.out.write_text(text)
    else:
        print(text, end="")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0
