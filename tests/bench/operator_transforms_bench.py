#!/usr/bin/env python3
"""Measures linear_logprob with a soft cap or a bias, compared with the same call without.

    operator_transforms_bench.py --out operator_transforms.json     heads of models with a soft cap, on a GPU
    operator_transforms_bench.py --device cpu --quick               a trial run that takes seconds

The contenders are: a soft cap of 30, which leaves all logits in the range of tanh's polynomial; one of 3, which leaves
half of them outside; a bias; and both. Each runs forward without gradients, and forward and backward with a gradient
for each token and for the mean loss. The baseline is the plain call; of the backward, three GEMMs as well. A round runs
all contenders in a different order; figures are medians over the rounds. Exits with 1 if a figure misses its target;
results are written in any case.

Needs torch and the library of kernels/torch_ops (LINEAR_LOGPROB_LIBRARY).
"""

import functools
import statistics
import sys
from argparse import Namespace

import bench_records
import operator_bench  # finds the packages below
import torch
from e2e.fixture import say
from logprobd_ops import linear_cross_entropy, linear_logprob
from operator_bench import (
    GEMMS,
    forward_of,
    inputs_of,
    three_gemms,
    timed_rounds,
    trained,
    warmed_up,
)
from torch import Tensor

PLAIN = "plain"
# The heads of Gemma 2 (2B and 9B) and Gemma 3n, and small heads.
HEADS = "2304x256000:4096,3584x256000:4096,2048x262144:1024,1024x151936:1024,1024x151936:8192,896x151936:263"
BACKWARD_SHARE = 0.08  # what a transform may add to the backward, of the time of three GEMMs


def forward_limit(hidden: int) -> float:
    """Returns the largest allowed ratio of the time of a forward to that of the plain one."""
    limits = {3584: 1.03, 2304: 1.05, 2048: 1.06}
    return next((limit for depth, limit in limits.items() if hidden >= depth), 1.15)


def scored(options: dict, *inputs: Tensor) -> tuple[Tensor, ...]:
    return linear_logprob(*inputs, **options)[:2]


def mean_loss(options: dict, *inputs: Tensor) -> tuple[Tensor, ...]:
    return (linear_cross_entropy(*inputs, **options),)


def measure(args: Namespace, rows: int, hidden: int, vocab: int) -> list[dict]:
    shape = f"T={rows}, H={hidden}, V={vocab}"
    say(f"{shape}, ms:")
    given = inputs_of(rows, hidden, vocab, args.device)
    bias = torch.randn(vocab, device=args.device)
    transforms: dict[str, dict] = {
        PLAIN: {},
        "soft cap of 30": {"softcap": 30.0},
        "soft cap of 3": {"softcap": 3.0},
        "bias": {"bias": bias},
        "soft cap of 30 and bias": {"softcap": 30.0, "bias": bias},
    }
    modes = {
        "forward": (scored, forward_of),
        "forward and backward": (scored, trained),
        "forward and backward of the mean loss": (mean_loss, trained),
    }
    records = []
    for mode, (scores, run) in modes.items():
        calls = {
            name: functools.partial(run, functools.partial(scores, options), given)
            for name, options in transforms.items()
        }
        if run is trained:
            calls[GEMMS] = functools.partial(three_gemms, given)
        for call in calls.values():
            warmed_up(call)
        milliseconds = timed_rounds(calls, args.device, args.rounds)
        baselines = {name: PLAIN for name in transforms if name != PLAIN}
        limit = forward_limit(hidden)
        if run is trained:
            baselines = {PLAIN: GEMMS} | baselines
            of = {name: statistics.median(figures) for name, figures in milliseconds.items()}
            limit = 1 + BACKWARD_SHARE * of[GEMMS] / of[PLAIN]
        for name, baseline in baselines.items():
            records.append(
                bench_records.record_of_rounds(
                    f"{mode.capitalize()}, {name}, {shape}",
                    "ms",
                    milliseconds[name],
                    baseline=(baseline, milliseconds[baseline]),
                    note="" if args.quick or name == PLAIN else f"target at most {limit:.3f}",
                )
            )
    return records


def main() -> int:
    parser = operator_bench.parser_of(__doc__ or "", heads=HEADS, rounds=9)
    return operator_bench.measure_sizes(operator_bench.parsed(parser), measure)


if __name__ == "__main__":
    sys.exit(main())
