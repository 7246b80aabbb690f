"""Every option means what it means in the reference, and scores have the same bits every time."""

import inspect

import numpy as np
import pytest
import torch
from linear_logprob_reference import requested, seeded
from logprobd_ops._operator import HeadOptions
from logprobd_ops.linear_logprob import linear_logprob
from score_cases import (
    EVERY_SCORE,
    IGNORED,
    assert_matches_reference,
    exact_case,
    normal_case,
)


@pytest.mark.parametrize(
    "temperature", (1, 2, 0.1, 0.7, np.float32(0.7), np.float64(1.5), np.int64(2))
)
def test_temperature_as_any_number(temperature):
    hidden, weight, target, bias = exact_case(vocab=257)

    assert_matches_reference(hidden, weight, target, bias, temperature=float(temperature))
    plain = linear_logprob(hidden, weight, target, bias, temperature=float(temperature))
    scores = linear_logprob(hidden, weight, target, bias, temperature=temperature)
    assert all(
        torch.equal(ours, same)
        for ours, same in zip(requested(scores), requested(plain), strict=True)
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_temperature_as_a_tensor_of_one(dtype):
    hidden, weight, target, bias = exact_case(vocab=257)

    assert_matches_reference(
        hidden, weight, target, bias, temperature=torch.tensor(0.75, dtype=dtype)
    )


def test_a_temperature_per_row_affects_only_its_row():
    hidden, weight, target, bias = exact_case(13, 31, 257)
    target[[2, 7]] = IGNORED
    temperature = torch.linspace(0.1, 2, 13)

    assert_matches_reference(hidden, weight, target, bias, temperature=temperature)
    scores = linear_logprob(hidden, weight, target, bias, temperature=temperature)
    for row in range(13):
        alone = linear_logprob(hidden, weight, target, bias, temperature=temperature[row].item())
        assert all(
            torch.equal(a[row], b[row])
            for a, b in zip(requested(scores), requested(alone), strict=True)
        )


def test_a_tiny_temperature_sharpens_without_overflow():
    hidden, weight, target, _ = exact_case(vocab=257)

    assert_matches_reference(hidden, weight, target, temperature=1e-3)


@pytest.mark.parametrize("size", (31, 257, 1024))
@pytest.mark.parametrize("softcap", (None, 5.0, 30.0))
@pytest.mark.parametrize("scale", (1.0, 0.25, -1.0))
def test_scale_bias_cap_and_temperature_apply_in_this_order(size, softcap, scale):
    hidden, weight, target, bias = exact_case(7, size, 257)
    options = {"scale": scale, "softcap": softcap, "temperature": 0.75}

    assert_matches_reference(hidden, weight, target, bias * 8, **options)


def test_argmax_is_the_lowest_id_among_equals():
    hidden = torch.ones(1, 4)
    weight = torch.zeros(600, 4)
    weight[[37, 191, 192, 400, 599]] = 2.0
    for first in (37, 191, 192, 400, 599):
        argmax = linear_logprob(hidden, weight, torch.tensor([0]), return_argmax=True).argmax
        assert argmax.item() == first
        weight[first] = 0.0
    argmax = linear_logprob(hidden, weight, torch.tensor([0]), return_argmax=True).argmax
    assert argmax.item() == 0


def test_argmax_is_the_lowest_id_among_equals_of_different_blocks():
    """There are so many rows that columns are computed in several blocks (kBlockLogits)."""
    rows = 8192
    hidden = torch.ones(rows, 1)
    weight = torch.zeros(1300, 1)
    weight[[700, 1000, 1299]] = 2.0

    scores = linear_logprob(
        hidden, weight, torch.zeros(rows, dtype=torch.int64), return_argmax=True
    )

    assert (scores.argmax == 700).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_mean_logit_weights_are_the_weights_of_the_mean_logit(dtype):
    hidden, weight, target, bias = exact_case(13, 31, 507)
    mean_logit_weights = (torch.arange(507).remainder(9) - 2).to(dtype) / 64

    assert_matches_reference(
        hidden, weight, target, bias, mean_logit_weights=mean_logit_weights, temperature=0.5
    )


def test_scores_that_are_not_requested_are_empty_or_none_and_change_nothing():
    hidden, weight, target, bias = exact_case(vocab=257)
    full = linear_logprob(hidden, weight, target, bias, **EVERY_SCORE)

    logprob, entropy, lse, *others = linear_logprob(
        hidden, weight, target, bias, need_entropy=False
    )

    assert entropy.numel() == 0 and others == [None] * len(others)
    assert torch.equal(logprob, full.logprob) and torch.equal(lse, full.lse)
    for option in EVERY_SCORE:
        name = option.removeprefix("return_")
        one = linear_logprob(hidden, weight, target, bias, **{option: True})
        assert torch.equal(getattr(one, name), getattr(full, name))
        assert len(requested(one)) == 4


def test_the_result_has_named_fields_in_a_fixed_order():
    hidden, weight, target, bias = exact_case(vocab=257)

    scores = linear_logprob(hidden, weight, target, bias)

    assert scores._fields[:5] == ("logprob", "entropy", "lse", "argmax", "mean_logit")
    assert scores.argmax is None and scores.mean_logit is None
    assert scores[0] is scores.logprob


def test_the_other_functions_take_the_options_of_the_head():
    parameters = inspect.signature(linear_logprob).parameters

    assert HeadOptions.__annotations__.keys() <= parameters.keys()


# Reproducibility of every bit.


def test_the_first_row_has_the_same_bits_every_time():
    hidden, weight, target, bias = normal_case(5, 31, 193)
    first = requested(linear_logprob(hidden, weight, target, bias, **EVERY_SCORE))

    for _ in range(200):
        again = requested(linear_logprob(hidden, weight, target, bias, **EVERY_SCORE))
        assert all(torch.equal(ours[0], same[0]) for ours, same in zip(again, first, strict=True))


@pytest.mark.parametrize("ignored", ([0], [12], [3, 4, 9], list(range(1, 13))))
def test_rows_have_the_same_bits_with_and_without_ignored_rows(ignored):
    """Ignored rows are removed before any product, so this holds for every input."""
    hidden, weight, target, bias = normal_case(13, 123, 507, logits_std=8.0)
    target[ignored] = IGNORED
    valid = target != IGNORED

    scores = requested(linear_logprob(hidden, weight, target, bias))

    alone = requested(linear_logprob(hidden[valid], weight, target[valid], bias))
    assert all(torch.equal(ours[valid], same) for ours, same in zip(scores, alone, strict=True))


@pytest.mark.parametrize("rows", (1, 7, 128))
def test_sums_of_a_row_do_not_depend_on_the_other_rows(rows):
    """The products are exact. Inexact products may round differently on a CPU when the number of rows differs."""
    hidden, weight, target, bias = exact_case(513, 70, 507)
    order = torch.randperm(513, generator=seeded(1))[:rows]

    whole = requested(linear_logprob(hidden, weight, target, bias))
    part = requested(linear_logprob(hidden[order], weight, target[order], bias))

    assert all(torch.equal(ours[order], same) for ours, same in zip(whole, part, strict=True))


def test_blocks_of_rows_and_columns_do_not_affect_results():
    """There are several blocks of rows (kBlockRows) and of columns (kBlockLogits)."""
    few = exact_case(50, 8, 200)
    rows = 33_000
    repeated = [tensor.repeat(rows // 50, *[1] * (tensor.dim() - 1)) for tensor in (few[0], few[2])]

    scores = linear_logprob(repeated[0], few.weight, repeated[1], few.bias, return_mean_logit=True)

    truth = linear_logprob(few.hidden, few.weight, few.target, few.bias, return_mean_logit=True)
    for ours, same in zip(scores[:3], truth[:3], strict=True):
        assert torch.equal(ours, same.repeat(rows // 50))
    mean_logit = truth.mean_logit.repeat(rows // 50)
    torch.testing.assert_close(scores.mean_logit, mean_logit, atol=1e-6, rtol=1e-6)
