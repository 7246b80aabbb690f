"""Inputs for tests of scores, and the comparison with the fp64 reference."""

import math
from typing import NamedTuple

import torch
from linear_logprob_reference import reference, reference_logits, requested, seeded
from logprobd_ops.linear_logprob import linear_logprob
from torch import Tensor

IGNORED = -100
# Options that request every score of a row.
EVERY_SCORE = {
    f"return_{name}": True
    for name in ("argmax", "mean_logit", "max_logit", "min_logit", "sum_p_squared", "target_rank")
}
# Absolute tolerances for logits up to LOGIT_MAX. For larger logits they grow in proportion, like fp32's steps.
LOGPROB_TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-10}
ENTROPY_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LOGIT_MAX = 30.0
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SPREADS = torch.tensor([1, 2, 4, 8, 16, 4, 1])  # approximate standard deviation of a row's logits


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor


def exact_case(rows=13, size=31, vocab=193, dtype=torch.float32, seed=0) -> Case:
    """Returns factors of few bits, so that every sum of products is exact in fp32, in any order and for any 16-bit
    dtype. Any difference from the reference is then an error of the operator. Every third target is the argmax."""
    generator = seeded(seed)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator).double()

    quantum = 2.0 ** -round(math.log2(6.67 * size**0.5))
    spread = SPREADS.repeat(rows // len(SPREADS) + 1)[:rows].unsqueeze(1)
    hidden = (integers(rows, size) * spread).to(dtype)
    weight = (integers(vocab, size) * quantum).to(dtype)
    bias = (integers(vocab) / 4).to(dtype)
    target = torch.randint(vocab, (rows,), generator=generator)
    target[::3] = reference(hidden, weight, target).argmax[::3]
    return Case(hidden, weight, target, bias)


def normal_case(rows, size, vocab, logits_std=4.0, seed=0) -> Case:
    generator = seeded(seed)
    hidden = torch.randn(rows, size, generator=generator)
    weight = torch.randn(vocab, size, generator=generator) * (logits_std / size**0.5)
    target = torch.randint(vocab, (rows,), generator=generator)
    return Case(hidden, weight, target, torch.randn(vocab, generator=generator))


def assert_near(ours: Tensor, truth: Tensor, tolerance: Tensor, name: str) -> None:
    assert ours.shape == truth.shape, name
    error = (ours.double() - truth).abs()
    # The condition is negated so that NaN fails.
    is_wrong = ~((error <= tolerance) | (ours.double() == truth))
    assert not is_wrong.any(), (
        f"{name}: row {is_wrong.flatten().nonzero()[0].item()} is the first of {is_wrong.sum().item()} wrong rows; "
        f"it has {ours[is_wrong][0].item()} instead of {truth[is_wrong][0].item()}; "
        f"the largest error is {error.max().item():.3g}"
    )


def assert_in_bounds(logprob: Tensor, entropy: Tensor, vocab: int) -> None:
    assert (logprob <= 0).all()
    assert (entropy >= 0).all()
    assert (entropy <= torch.tensor(math.log(vocab), dtype=entropy.dtype)).all()


def assert_matches_reference(hidden, weight, target, bias=None, **options) -> None:
    scores = linear_logprob(hidden, weight, target, bias, **EVERY_SCORE, **options)
    logprob, entropy, lse, argmax, mean_logit, *_ = scores
    truth = reference(hidden, weight, target, bias, **options)
    is_double = torch.float64 in (hidden.dtype, weight.dtype)
    dtype = torch.float64 if is_double else torch.float32
    assert {out.dtype for out in requested(scores) if out.is_floating_point()} == {dtype}

    shaping = {k: options[k] for k in options if k in ("scale", "softcap", "vocab_valid")}
    z = reference_logits(hidden, weight, bias, **shaping)
    x = reference_logits(
        hidden, weight, bias, temperature=options.get("temperature", 1.0), **shaping
    )
    is_valid = target != options.get("ignore_index", IGNORED)

    def growth(logits: Tensor) -> Tensor:
        return (torch.where(is_valid, logits.abs().amax(-1), 0.0) / LOGIT_MAX).clamp(min=1)

    factor = growth(x)
    assert_near(logprob, truth.logprob, LOGPROB_TOLERANCE[dtype] * factor, "logprob")
    assert_near(lse, truth.lse, LOGPROB_TOLERANCE[dtype] * factor, "lse")
    assert_near(entropy, truth.entropy, ENTROPY_TOLERANCE[dtype] * factor, "entropy")
    mean_logit_weights = options.get("mean_logit_weights")
    mass = 1.0 if mean_logit_weights is None else max(1.0, mean_logit_weights.abs().sum().item())
    assert_near(mean_logit, truth.mean_logit, LOGPROB_TOLERANCE[dtype] * factor * mass, "mean")
    tolerance = LOGPROB_TOLERANCE[dtype]
    assert_near(scores.max_logit, truth.max_logit, tolerance * growth(z), "max_logit")
    assert_near(scores.min_logit, truth.min_logit, tolerance * growth(z), "min_logit")
    # The relative error is at most twice the absolute error of the logits.
    squares = truth.sum_p_squared
    assert_near(scores.sum_p_squared, squares, 2 * tolerance * factor * squares, "sum_p_squared")
    assert (scores.sum_p_squared <= 1).all()
    assert argmax.dtype == torch.int64
    if options.get("softcap") is None:
        assert torch.equal(argmax, truth.argmax)
    else:  # In fp32 different logits become equal near the cap.
        best = x.gather(-1, argmax.unsqueeze(-1)).squeeze(-1)
        assert_near(best, x.amax(-1), LOGPROB_TOLERANCE[dtype], "argmax")
    assert_in_bounds(logprob, entropy, x.shape[-1])
