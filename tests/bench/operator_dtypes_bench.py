#!/usr/bin/env python3
"""Measures linear_logprob, forward and backward, on the inputs that trainers pass, compared with bf16 inputs.

    operator_dtypes_bench.py --out operator_dtypes.json     on a GPU
    operator_dtypes_bench.py --device cpu --quick           a trial run that takes seconds

The contenders are: hidden states in fp32 and fp16 with a bf16 head; fp32 parameters under bf16 autocast; and the
recomputation of the logits without entropy. Their baseline is the operator on bf16 inputs in the same rounds and in the
same memory mode. Liger's drop-in is compared with three bf16 GEMMs of the same size. A round runs all contenders in a
different order; figures are medians over the rounds. Exits with 1 if a figure misses its target; results are written in
any case.

Needs torch and the library of kernels/torch_ops (LINEAR_LOGPROB_LIBRARY).
"""

import argparse
import functools
import sys
from collections.abc import Callable

import operator_bench  # finds the packages below
import torch
from e2e.fixture import say
from logprobd_ops import linear_logprob
from logprobd_ops.compat.liger import liger_fused_linear_cross_entropy
from operator_bench import (
    GEMMS,
    Inputs,
    forward_of,
    inputs_of,
    records_with_targets,
    three_gemms,
    trained,
)
from torch import Tensor

BF16 = "bf16 hidden, bf16 weight"
RECOMPUTED = BF16 + ", logits recomputed"
FORWARD = ", forward alone"
LIGER = "Liger's drop-in, mean loss"


def scores_of(memory: str, need_entropy: bool = True) -> Callable[..., tuple[Tensor, ...]]:
    def scores(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        result = linear_logprob(hidden, weight, target, memory=memory, need_entropy=need_entropy)
        return result[: 1 + need_entropy]

    return scores


def under_autocast(
    scores: Callable[..., tuple[Tensor, ...]], device: str
) -> Callable[..., tuple[Tensor, ...]]:
    def cast(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(device, torch.bfloat16):
            return scores(*inputs)

    return cast


def liger_mean_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    loss = liger_fused_linear_cross_entropy(hidden, weight, target)
    return (loss if isinstance(loss, Tensor) else loss.loss,)


def in_dtypes(given: Inputs, hidden: torch.dtype, weight: torch.dtype) -> Inputs:
    return given._replace(
        hidden=given.hidden.detach().to(hidden).requires_grad_(),
        weight=given.weight.detach().to(weight).requires_grad_(),
    )


def measure(args: argparse.Namespace, rows: int, hidden: int, vocab: int) -> list[dict]:
    shape = f"T={rows}, H={hidden}, V={vocab}"
    say(f"{shape}, ms:")
    bf16 = inputs_of(rows, hidden, vocab, args.device)
    kept, recomputed = scores_of("auto"), scores_of("recompute")
    # Each contender with its baseline and the largest allowed ratio.
    targets: dict[str, tuple[str, float]] = {}
    calls: dict[str, Callable[[], None]] = {
        GEMMS: functools.partial(three_gemms, bf16),
        BF16: functools.partial(trained, kept, bf16),
        RECOMPUTED: functools.partial(trained, recomputed, bf16),
        BF16 + FORWARD: functools.partial(forward_of, kept, bf16),
        LIGER: functools.partial(trained, liger_mean_loss, bf16),
        "bf16, no entropy, logits recomputed": functools.partial(
            trained, scores_of("recompute", need_entropy=False), bf16
        ),
    }
    targets[LIGER] = (GEMMS, 1.01)
    targets["bf16, no entropy, logits recomputed"] = (RECOMPUTED, 0.97)
    for dtype in (torch.float32, torch.float16):
        name = f"{str(dtype).removeprefix('torch.')} hidden, bf16 weight"
        other = in_dtypes(bf16, dtype, torch.bfloat16)
        calls[name] = functools.partial(trained, kept, other)
        calls[name + FORWARD] = functools.partial(forward_of, kept, other)
        targets[name] = (BF16, 2.2)
        targets[name + FORWARD] = (BF16 + FORWARD, 2.1)
    cast = "float32 parameters under bf16 autocast"
    wide = in_dtypes(bf16, torch.float32, torch.float32)
    calls[cast] = functools.partial(trained, under_autocast(kept, args.device), wide)
    targets[cast] = (BF16, 1.1)
    return records_with_targets(calls, targets, shape, args)


if __name__ == "__main__":
    sys.exit(operator_bench.measure_one_size(__doc__ or "", measure, rounds=9))
