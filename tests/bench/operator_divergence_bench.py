#!/usr/bin/env python3
"""Measures linear_divergence and linear_divergence_loss, forward and backward, compared with four GEMMs.

    operator_divergence_bench.py --out operator_divergence.json     on a GPU
    operator_divergence_bench.py --device cpu --quick               a trial run that takes seconds

The four bf16 GEMMs of the same size compute the logits of student and teacher, and the products of the logits with the
student's weight and hidden states. The contenders are each kind of divergence as a mean loss; per row with a cache that
holds all rows; and per row with the logits computed again in the backward. A round runs all contenders in a different
order; figures are medians over the rounds. Exits with 1 if a figure misses its target; results are written in any case.

Needs torch and the library of kernels/torch_ops (LINEAR_LOGPROB_LIBRARY).
"""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import operator_bench  # finds the packages below
import torch
from e2e.fixture import say
from logprobd_ops import linear_divergence, linear_divergence_loss
from operator_bench import inputs_of, records_with_targets
from torch import Tensor

GEMMS = "four GEMMs"
KINDS = ("forward_kl", "reverse_kl", "jsd")
# The teacher's logits are those of the student plus noise of this share.
TEACHER_NOISE = 0.3


class Heads(NamedTuple):
    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    d_divergence: Tensor


def heads_of(rows: int, hidden: int, vocab: int, device: str) -> Heads:
    student = inputs_of(rows, hidden, vocab, device)
    generator = torch.Generator(device=device).manual_seed(2)

    def noisy(values: Tensor) -> Tensor:
        noise = torch.empty_like(values).normal_(generator=generator)
        return values + TEACHER_NOISE * values.std() * noise

    with torch.no_grad():
        teacher = noisy(student.hidden), noisy(student.weight)
    return Heads(student.hidden, student.weight, *teacher, student.d_logprob)


def four_gemms(given: Heads) -> None:
    hidden, weight = given.hidden.detach(), given.weight.detach()
    _ = given.teacher_hidden @ given.teacher_weight.T
    logits = hidden @ weight.T
    _ = logits @ weight
    _ = logits.T @ hidden


def trained_loss(kind: str, given: Heads) -> None:
    given.hidden.grad = given.weight.grad = None
    linear_divergence_loss(*given[:4], kind=kind).loss.backward()


def trained_rows(kind: str, memory: str, given: Heads) -> None:
    given.hidden.grad = given.weight.grad = None
    divergence = linear_divergence(*given[:4], kind=kind, memory=memory).divergence
    divergence.backward(given.d_divergence)


def measure(args: argparse.Namespace, rows: int, hidden: int, vocab: int) -> list[dict]:
    shape = f"T={rows}, H={hidden}, V={vocab}"
    say(f"{shape}, ms:")
    given = heads_of(rows, hidden, vocab, args.device)
    calls: dict[str, Callable[[], None]] = {GEMMS: functools.partial(four_gemms, given)}
    targets: dict[str, tuple[str, float]] = {}
    for kind in KINDS:
        for name, call, limit in (
            (f"{kind}, mean loss", functools.partial(trained_loss, kind), 1.2),
            (f"{kind}, gradients kept", functools.partial(trained_rows, kind, "cached"), 1.2),
            (f"{kind}, recomputed", functools.partial(trained_rows, kind, "recompute"), 1.6),
        ):
            calls[name] = functools.partial(call, given)
            targets[name] = (GEMMS, limit)
    return records_with_targets(calls, targets, shape, args)


if __name__ == "__main__":
    sys.exit(operator_bench.measure_one_size(__doc__ or "", measure, rounds=7))
