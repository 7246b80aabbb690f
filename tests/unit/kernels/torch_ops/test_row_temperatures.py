"""Temperatures of rows that are not computed are not read; those of other rows are checked on a CPU."""

import math

import pytest
import torch
from divergence_cases import KINDS
from divergence_cases import make_case as divergence_case
from linear_logprob_reference import requested
from logprobd_ops import (
    linear_cross_entropy,
    linear_divergence,
    linear_divergence_loss,
    linear_logprob,
    linear_logprob_loss,
)
from logprobd_ops.compat.areal import linear_cross_entropy as areal_linear_cross_entropy
from score_cases import EVERY_SCORE, IGNORED, normal_case
from torch import Tensor

UNUSED = (0.0, -1.0, math.nan, math.inf)
ROWS, VOCAB = 24, 300
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture
def on_the_host():
    """Values are checked on the host only: a check on a GPU would wait for it."""
    with torch.device("cpu"):
        yield


def make_case(dtype=torch.float32):
    """Returns (hidden, weight, target, bias) whose rows 0, 3, 6, ... are ignored."""
    hidden, weight, target, bias = normal_case(ROWS, 64, VOCAB)
    target[::3] = IGNORED
    leaves = [each.to(dtype).requires_grad_() for each in (hidden, weight, bias)]
    return leaves[0], leaves[1], target, leaves[2]


def temperatures(unused: float) -> Tensor:
    """Returns a temperature for each row, `unused` for ignored ones."""
    values = torch.linspace(0.5, 2.0, ROWS)
    values[::3] = unused
    return values


def scores_and_gradients(temperature, dtype, **options) -> list[Tensor]:
    hidden, weight, target, bias = make_case(dtype)
    scores = linear_logprob(
        hidden, weight, target, bias, temperature=temperature, **EVERY_SCORE, **options
    )
    loss = (scores.logprob + 0.5 * scores.entropy - 0.1 * scores.lse + scores.mean_logit).sum()
    if "top_k" in options:
        loss = loss + scores.top_k_logprobs.sum()
    if "candidate_ids" in options:
        loss = loss + scores.candidate_logprobs.sum()
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    return [*(each.detach() for each in requested(scores)), *gradients]


OPTIONS = {
    "recompute": {"memory": "recompute"},
    "cached": {"memory": "cached"},
    "soft cap": {"softcap": 20.0},
    "top-k": {"top_k": 4},
    # Without a cap, the gradient of the bias alone was NaN.
    "candidates": {"candidate_ids": torch.arange(ROWS * 3).reshape(ROWS, 3).tolist()},
    "candidates with a soft cap": {
        "candidate_ids": torch.arange(ROWS * 3).reshape(ROWS, 3).tolist(),
        "softcap": 20.0,
    },
}


# The client and the service took such a row, and the operator refused it.
@pytest.mark.parametrize("unused", UNUSED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_temperature_of_an_ignored_row_changes_no_bit(unused, dtype, name):
    options = dict(OPTIONS[name])
    if "candidate_ids" in options:
        options["candidate_ids"] = torch.tensor(options["candidate_ids"])
    expected = scores_and_gradients(temperatures(1.0), dtype, **options)

    ours = scores_and_gradients(temperatures(unused), dtype, **options)

    for our, other in zip(ours, expected, strict=True):
        assert other.isfinite().all()
        assert torch.equal(our, other)


@pytest.mark.parametrize("unused", UNUSED)
def test_losses_do_not_read_the_temperature_of_an_ignored_row(unused):
    def losses(temperature: Tensor) -> list[Tensor]:
        hidden, weight, target, bias = make_case()
        rows = (hidden, weight, target, bias)
        coefficients = torch.linspace(-1, 1, ROWS)
        smoothed = {"label_smoothing": 0.1, "temperature": temperature}
        all_losses = [
            linear_logprob_loss(
                *rows,
                logprob_coef=coefficients,
                entropy_coef=0.3,
                temperature=temperature,
            ).loss,
            linear_cross_entropy(*rows, **smoothed),
            linear_cross_entropy(*rows, z_loss=1e-3, gradients_in_forward=False, **smoothed),
            areal_linear_cross_entropy(*rows[:3], temperature)[0].sum(),
        ]
        gradients = [
            torch.autograd.grad(loss, rows[:2])
            for loss in all_losses  # AReaL's has no bias.
        ]
        return [
            *(each.detach() for each in all_losses),
            *(g for pair in gradients for g in pair),
        ]

    for our, other in zip(losses(temperatures(unused)), losses(temperatures(1.0)), strict=True):
        assert other.isfinite().all()
        assert torch.equal(our, other)


@pytest.mark.parametrize("unused", UNUSED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", ["recompute", "cached"])
def test_divergences_do_not_read_the_temperature_of_a_masked_row(unused, kind, memory):
    mask = torch.arange(11) % 3 != 0

    def results(value: float) -> list[Tensor]:
        case = divergence_case(dtype=torch.float32, spread_max=4.0)
        options = {
            "kind": kind,
            "mask": mask,
            "temperature": torch.where(mask, torch.linspace(0.5, 2, 11), value),
        }
        rows = linear_divergence(*case, memory=memory, **options)
        loss = linear_divergence_loss(*case, **options).loss
        total = rows.divergence.sum() + rows.entropy.sum() + loss
        return [*rows, loss, *torch.autograd.grad(total, case.leaves)]

    for our, other in zip(results(unused), results(1.0), strict=True):
        assert other.isfinite().all()
        assert torch.equal(our, other)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("wrong", UNUSED)
def test_the_error_names_the_first_row_whose_temperature_is_wrong(wrong):
    hidden, weight, target, bias = make_case()
    values = temperatures(0.0)
    values[[4, 7]] = wrong

    for compute in (
        lambda: linear_logprob(hidden, weight, target, temperature=values),
        lambda: linear_logprob_loss(hidden, weight, target, logprob_coef=1.0, temperature=values),
        lambda: linear_cross_entropy(hidden, weight, target, temperature=values),
        lambda: linear_divergence(
            hidden, weight, hidden, weight, mask=target != IGNORED, temperature=values
        ),
    ):
        with pytest.raises(ValueError, match=rf"temperature of row 4 is {wrong:g}: .*except in"):
            compute()


@pytest.mark.usefixtures("on_the_host")
def test_an_ignore_index_of_the_callers_choice_marks_the_rows():
    hidden, weight, target, _ = make_case()
    target = torch.where(target == IGNORED, -1, target)

    scores = linear_logprob(hidden, weight, target, temperature=temperatures(0.0), ignore_index=-1)

    assert scores.logprob.isfinite().all()
    with pytest.raises(ValueError, match="temperature of row 0 is 0"):
        linear_logprob(hidden, weight, target, temperature=temperatures(0.0), out_of_vocab="zero")
