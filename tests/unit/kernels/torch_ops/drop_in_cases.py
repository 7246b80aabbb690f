"""Inputs and comparisons of the tests of drop-in functions."""

import functools
import inspect
import os
from collections.abc import Callable

import torch
from linear_logprob_reference import reference_logits, seeded
from torch import Tensor

ROWS, VOCAB, SIZE = 6, 20, 16
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
# For comparisons with originals, which return fp32 or narrower results.
near = functools.partial(torch.testing.assert_close, check_dtype=False)


def use_device() -> None:
    """Makes a rank's process create its tensors on the tests' device."""
    torch.set_default_device(os.environ.get("LINEAR_LOGPROB_DEVICE", "cpu"))


def make_case(dtype=torch.float64, rows=ROWS, vocab=VOCAB, size=SIZE, weight_dtype=None):
    """Returns (hidden, weight, target). The rows' logits have standard deviations from 1 (flat) to 20 (peaked)."""
    generator = seeded(0)
    spread = torch.linspace(1, 20, rows, dtype=torch.float64).unsqueeze(-1)
    hidden = spread * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, size, generator=generator, dtype=torch.float64) / size**0.5
    target = torch.randint(vocab, (rows,), generator=generator)
    weight = weight.to(weight_dtype or dtype)
    return hidden.to(dtype).requires_grad_(), weight.requires_grad_(), target


def gradients(outputs, upstream, case):
    return torch.autograd.grad(outputs, case[:2], upstream, retain_graph=True)


def upstream_of(*outputs: Tensor) -> list[Tensor]:
    """Returns gradients with values of both signs, the same at each call."""
    generator = seeded(1)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outputs]


def unowned_logprob(hidden, weight, target, **options) -> Tensor:
    """Returns the log-probs of `target` in fp64, and -lse for targets outside the vocabulary."""
    x = reference_logits(hidden, weight, **options)
    is_id = (target >= 0) & (target < x.shape[-1])
    chosen = x.gather(-1, torch.where(is_id, target, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(is_id, chosen, 0.0) - x.logsumexp(-1)


def arguments(function: Callable) -> list[tuple[str, object]]:
    """Returns the names and default values of a function's arguments, without the ctx of an autograd function."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in parameters if p.name != "ctx"]


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth.double()).norm() / truth.double().norm()).item()
