"""Inputs for tests of gradients, and scores and gradients of the fp64 reference."""

from typing import NamedTuple

import torch
from linear_logprob_reference import reference, requested, seeded
from logprobd_ops.linear_logprob import linear_logprob
from torch import Tensor

IGNORED = -100
OUTPUTS = ("logprob", "entropy", "lse", "mean_logit")
# Relative Frobenius errors.
DOUBLE_ERROR_MAX = 1e-10
SIXTEEN_BIT_ERROR_MAX = 4e-3
# Options of linear_logprob for cases of 11 rows and 200 columns.
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 7.0},
    "scale": {"scale": -0.5},
    "temperature": {"temperature": 0.6},
    "temperature a row": {"temperature": torch.linspace(0.3, 2, 11, dtype=torch.float64)},
    "padding": {"vocab_valid": 195},
    "padding over tiles": {"vocab_valid": 100},
    "mean_logit_weights": {"mean_logit_weights": torch.linspace(-1, 2, 200, dtype=torch.float64)},
    "all together": {
        "softcap": 7.0,
        "scale": 1.5,
        "temperature": torch.linspace(0.3, 2, 11, dtype=torch.float64),
        "vocab_valid": 195,
        "mean_logit_weights": torch.linspace(-1, 2, 200, dtype=torch.float64),
    },
}


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias

    def to(self, dtype: torch.dtype) -> "Case":
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in self.leaves]
        return Case(leaves[0], leaves[1], self.target, leaves[2])


def make_case(rows=11, size=9, vocab=200, dtype=torch.float64, spread_max=10.0, seed=0) -> Case:
    """Returns rows whose logits have standard deviations from 1 (flat) to spread_max (peaked)."""
    generator = seeded(seed)
    spread = torch.linspace(1, spread_max, rows, dtype=torch.float64).unsqueeze(-1)
    hidden = spread * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, size, generator=generator, dtype=torch.float64) / size**0.5
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
    target = torch.randint(vocab, (rows,), generator=generator)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]
    return Case(leaves[0], leaves[1], target, leaves[2])


def upstream_of(shape, dtype=torch.float64, seed=1) -> list[Tensor]:
    """Returns one upstream gradient for each of OUTPUTS, with values of both signs."""
    generator = seeded(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in OUTPUTS]


def score(case: Case, **options) -> list[Tensor]:
    """Returns the operator's results, in the order of OUTPUTS."""
    return requested(linear_logprob(*case, return_mean_logit=True, **options))


def true_scores(case: Case, **options) -> list[Tensor]:
    scores = reference(*case, **options)
    return [getattr(scores, name) for name in OUTPUTS]


def gradients(scores, case: Case, upstream=None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(scores, case.leaves, upstream)


def error_of(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth.double()).norm() / truth.double().norm()).item()


def assert_same(ours, truth) -> None:
    for our, true in zip(ours, truth, strict=True):
        assert our.shape == true.shape
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)
