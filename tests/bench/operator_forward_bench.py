#!/usr/bin/env python3
"""Measures the forward of linear_logprob, compared with a GEMM that writes the logits and with other packages.

    operator_forward_bench.py --out operator_forward.json     six heads, about 150 s on a GPU
    operator_forward_bench.py --device cpu --quick            a trial run that takes seconds

The contenders are torch's bf16 GEMM `hidden @ weight.T`; the operator without gradients, with logprob and entropy; and
of the packages that can be imported QuACK (logprob alone) and Liger CuTe (logprob and bf16 entropy). Each is measured
in two states. Settled: each contender runs alone for 0.45 s, of which the first third is not timed, so that the power
limit is in force. Mixed: one call at a time, each after a rest. A round runs all contenders in a different order;
figures are medians over the rounds. A contender that fails or whose logprobs are not finite is left out.

Needs torch and the library of kernels/torch_ops (LINEAR_LOGPROB_LIBRARY).
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable

import bench_records
import operator_bench  # finds the packages below
import torch
from e2e.fixture import say
from operator_bench import able, inputs_of, seconds, timed_rounds, warmed_up
from operator_peers import FORWARD_PEERS, Scores, importable
from torch import Tensor

GEMM = "torch's GEMM that writes bf16 logits"
HEADS = "1024x151936,2048x151936,4096x151936,5120x151936,7168x129280,5376x262208:6144"
SETTLE_S = 0.15
TIMED_S = 0.3
REST_S = 0.025
MIXED_CALLS = 3  # mixed calls per round, since single calls are noisy
STATES = {
    "settled": f"{SETTLE_S + TIMED_S:g} s alone, of which the first third is not timed",
    "mixed": f"one call at a time, after {1e3 * REST_S:g} ms of rest",
}


def gemm(hidden: Tensor, weight: Tensor) -> None:
    _ = hidden @ weight.T


@torch.no_grad()
def scored(scores: Scores, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return scores(hidden, weight, target)


def finite(call: Callable[[], object]) -> Callable[[], object]:
    """Returns a warmed-up call. Raises RuntimeError if its logprobs are not finite."""
    outputs = warmed_up(call)()
    if isinstance(outputs, tuple) and not outputs[0].isfinite().all():
        raise RuntimeError("its logprobs are not finite")
    return call


def settled_ms(_: str, call: Callable[[], None], device: str) -> float:
    """Returns the milliseconds of a call between others, once the same call has run for SETTLE_S."""

    def in_a_row(calls: int) -> None:
        for _ in range(calls):
            call()

    one = seconds(call, device)
    in_a_row(max(1, round(SETTLE_S / one)))
    calls = max(1, round(TIMED_S / one))
    return 1e3 * seconds(functools.partial(in_a_row, calls), device) / calls


def rested_ms(_: str, call: Callable[[], None], device: str) -> float:
    time.sleep(REST_S)
    return 1e3 * seconds(call, device)


def measure(args: argparse.Namespace, rows: int, hidden: int, vocab: int) -> list[dict]:
    shape = f"T={rows}, H={hidden}, V={vocab}"
    say(f"{shape}, ms:")
    given = inputs_of(rows, hidden, vocab, args.device)
    inputs = given.hidden.detach(), given.weight.detach(), given.target
    calls: dict[str, Callable[[], object]] = {GEMM: functools.partial(gemm, *inputs[:2])}
    peers = {} if args.no_peers else importable(FORWARD_PEERS)
    for name, scores in ({"operator": operator_bench.ours} | peers).items():
        calls[name] = functools.partial(scored, scores, *inputs)
    ready = able(calls, finite)
    times = {
        "settled": timed_rounds(ready, args.device, args.rounds, settled_ms),
        "mixed": timed_rounds(ready, args.device, MIXED_CALLS * args.rounds, rested_ms),
    }
    return [
        bench_records.record_of_rounds(
            f"Forward, {state}, {name}, {shape}",
            "ms",
            figures,
            baseline=(GEMM, milliseconds[GEMM]),
            note=STATES[state],
        )
        for state, milliseconds in times.items()
        for name, figures in milliseconds.items()
        if name != GEMM
    ]


def main() -> int:
    parser = operator_bench.parser_of(__doc__ or "", heads=HEADS, rounds=3, rows="1024,8192,16384")
    parser.add_argument("--no-peers", action="store_true", help="leave out other packages")
    return operator_bench.measure_sizes(operator_bench.parsed(parser), measure)


if __name__ == "__main__":
    sys.exit(main())
