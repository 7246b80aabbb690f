#!/usr/bin/env python3
"""Measures linear_logprob forward and backward at odd numbers of rows, compared with three GEMMs and with more rows.

    operator_rows_bench.py --out operator_rows.json     two heads with all rows, about 40 s on a GPU
    operator_rows_bench.py --device cpu --quick         a trial run that takes seconds

The contenders are three bf16 GEMMs of the same size, the operator with logits recomputed or cached, and the mean loss
with gradients computed in the forward; with --peers also other packages that can be imported. The kernels compute 256
rows together, so each contender is also measured at the next multiple of 256 rows in the same rounds: fewer rows must
not take longer than that by more than 3 %. On a GPU all contenders are CUDA graphs, which do not need the host. A round
runs all contenders in a different order; figures are medians over the rounds. Exits with 1 if a figure misses its
target; results are written in any case.

Needs torch and the library of kernels/torch_ops (LINEAR_LOGPROB_LIBRARY).
"""

import argparse
import functools
import sys
from collections.abc import Callable

import bench_records
import operator_bench  # finds the packages below
from e2e.fixture import say
from operator_bench import (
    FAST_PEERS,
    GEMMS,
    KEPT,
    MEAN,
    able,
    importable,
    in_graph,
    inputs_of,
    three_gemms,
    timed_rounds,
    trained,
    warmed_up,
)

ROWS = "520,577,640,700,900,1040,1300,2100,2304,3000,4200,4352"
ROWS_TOGETHER = 256
SLOWDOWN_MAX = 1.03  # of fewer rows, compared with the next multiple of ROWS_TOGETHER


def contenders_of(
    args: argparse.Namespace, rows: int, hidden: int, vocab: int
) -> dict[str, Callable[[], None]]:
    given = inputs_of(rows, hidden, vocab, args.device)
    scores = {"operator": operator_bench.ours, KEPT: operator_bench.kept}
    scores[MEAN] = operator_bench.mean_loss
    if args.peers:
        scores |= {name: peer for name, peer in importable().items() if name in FAST_PEERS}
    return {GEMMS: functools.partial(three_gemms, given)} | {
        name: functools.partial(trained, score, given) for name, score in scores.items()
    }


def prepared(call: Callable[[], None], device: str) -> Callable[[], None]:
    return in_graph(warmed_up(call)) if device == "cuda" else warmed_up(call)


def measure(args: argparse.Namespace, rows: int, hidden: int, vocab: int) -> list[dict]:
    next_rows = -(-rows // ROWS_TOGETHER) * ROWS_TOGETHER
    say(f"T={rows} and {next_rows}, H={hidden}, V={vocab}, ms:")
    calls = {
        f"{name}, T={count}": call
        for count in dict.fromkeys((rows, next_rows))
        for name, call in contenders_of(args, count, hidden, vocab).items()
    }
    ready = able(calls, functools.partial(prepared, device=args.device))
    milliseconds = timed_rounds(ready, args.device, args.rounds)
    here, there = f", T={rows}", f", T={next_rows}"
    how = "in CUDA graphs" if args.device == "cuda" else ""
    records = []
    for name, figures in milliseconds.items():
        if not name.endswith(here):
            continue
        contender = name.removesuffix(here)
        what = f"Forward and backward, {name}, H={hidden}, V={vocab}"
        if contender != GEMMS:
            gemms = (GEMMS, milliseconds[GEMMS + here])
            records.append(
                bench_records.record_of_rounds(what, "ms", figures, baseline=gemms, note=how)
            )
        if next_rows != rows and contender + there in milliseconds:
            has_target = contender in ("operator", KEPT, MEAN) and not args.quick
            target = f"target at most {SLOWDOWN_MAX}" if has_target else ""
            records.append(
                bench_records.record_of_rounds(
                    f"{what}: next multiple of {ROWS_TOGETHER} rows",
                    "ms",
                    figures,
                    baseline=(f"{next_rows} rows", milliseconds[contender + there]),
                    note="; ".join(part for part in (target, how) if part),
                )
            )
    return records


def main() -> int:
    parser = operator_bench.parser_of(
        __doc__ or "", heads="4096x151936,2048x151936", rounds=15, rows=ROWS
    )
    parser.add_argument("--peers", action="store_true", help="also measure other packages")
    return operator_bench.measure_sizes(operator_bench.parsed(parser), measure)


if __name__ == "__main__":
    sys.exit(main())
