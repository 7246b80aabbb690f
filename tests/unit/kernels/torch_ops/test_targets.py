"""Tests of targets of every integer dtype, ignored targets, and out-of-vocabulary targets."""

import math

import pytest
import torch
from linear_logprob_reference import reference, requested
from logprobd_ops.linear_logprob import linear_logprob
from score_cases import (
    EVERY_SCORE,
    IGNORED,
    assert_matches_reference,
    exact_case,
)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.int16))
def test_targets_in_the_first_and_last_columns_of_tiles(dtype):
    hidden, weight, _, _ = exact_case(7, 31, 507)
    target = torch.tensor([0, 191, 192, 383, 384, 505, 506], dtype=dtype)

    assert_matches_reference(hidden, weight, target)


@pytest.mark.parametrize(
    ("bad", "options"),
    [
        (-1, {}),
        (193, {}),
        (193 + 50, {}),
        (2**31, {}),
        (2**32, {}),
        (2**63 - 1, {}),
        (-(2**63), {}),
        (-100, {"ignore_index": -1}),
        (125, {"vocab_valid": 125}),
        (192, {"vocab_valid": 125}),
    ],
)
def test_an_out_of_vocab_target_is_named_with_its_row(bad, options):
    hidden, weight, target, _ = exact_case()
    target %= 125
    target[[1, 4]] = options.get("ignore_index", IGNORED)
    target[9] = bad

    with pytest.raises(IndexError, match=rf"target {bad} of row 9 "):
        linear_logprob(hidden, weight, target, **options)


def test_a_target_behind_the_weight_raises_even_if_vocab_valid_includes_it():
    hidden, weight, target, _ = exact_case(vocab=193)
    target[9] = 200

    with pytest.raises((IndexError, ValueError), match="target 200 of row 9 |vocab_valid"):
        linear_logprob(hidden, weight, target, vocab_valid=256)


def test_a_target_before_vocab_start_raises_without_a_group():
    hidden, weight, target, _ = exact_case(vocab=193)
    target += 64
    target[9] = 5

    with pytest.raises((IndexError, ValueError), match="target 5 of row 9 |vocab_start"):
        linear_logprob(hidden, weight, target, vocab_start=64)


@pytest.mark.parametrize("vocab_start", (1, 64, 192, 200))
def test_vocab_start_shifts_the_ids(vocab_start):
    hidden, weight, target, _ = exact_case(vocab=507)
    scores = linear_logprob(hidden, weight, target, return_argmax=True)

    shifted = linear_logprob(
        hidden, weight, target + vocab_start, vocab_start=vocab_start, return_argmax=True
    )

    for ours, truth in zip(shifted[:3], scores[:3], strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-6, rtol=2**-22)
    assert torch.equal(shifted.argmax, scores.argmax + vocab_start)


def test_out_of_vocab_targets_have_logprob_zero_if_requested():
    hidden, weight, target, _ = exact_case(vocab=193)
    truth = reference(hidden, weight, target)
    out_of_vocab_rows = [1, 5, 8, 12]
    target[out_of_vocab_rows] = torch.tensor([-1, 193, 2**31, 250])

    logprob, entropy, lse, *_ = linear_logprob(hidden, weight, target, out_of_vocab="zero")

    others = [row for row in range(13) if row not in out_of_vocab_rows]
    assert (logprob[out_of_vocab_rows] == 0).all()
    torch.testing.assert_close(logprob[others].double(), truth.logprob[others], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), truth.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), truth.lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("ignore_index", (-100, -1, 5))
def test_ignored_rows_give_exact_zeros_whatever_their_values(ignore_index):
    hidden, weight, target, _ = exact_case()
    target[target == ignore_index] += 1
    hidden[[0, 4, 12]] = torch.tensor([math.nan, math.inf, -math.inf]).unsqueeze(1)
    target[[0, 4, 12]] = ignore_index
    valid = target != ignore_index

    scores = linear_logprob(hidden, weight, target, ignore_index=ignore_index, **EVERY_SCORE)

    alone = linear_logprob(hidden[valid], weight, target[valid], **EVERY_SCORE)
    for ours, truth in zip(requested(scores), requested(alone), strict=True):
        assert (ours[~valid] == 0).all()
        assert torch.equal(ours[valid], truth)


@pytest.mark.parametrize("rows", (1, 7, 129))
def test_only_ignored_rows_give_only_zeros(rows):
    weight = torch.full((193, 31), math.nan)

    hidden = torch.full((rows, 31), math.nan)
    target = torch.full((rows,), IGNORED)
    scores = requested(linear_logprob(hidden, weight, target, **EVERY_SCORE))

    assert all(torch.equal(out, torch.zeros_like(out)) for out in scores)
    assert all(out.shape == (rows,) for out in scores)


@pytest.mark.parametrize("vocab_valid", (None, 300))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("memory", ("recompute", "cached"))
def test_the_rank_of_a_target_is_the_number_of_ids_before_it(memory, dtype, vocab_valid):
    """The factors have few bits, so many logits are equal."""
    hidden, weight, target, bias = exact_case(129, 31, 507, dtype)
    target %= 300
    target[::5] = IGNORED
    hidden.requires_grad_()

    scores = linear_logprob(
        *(hidden, weight, target, bias),
        return_target_rank=True,
        return_argmax=True,
        vocab_valid=vocab_valid,
        memory=memory,
    )

    truth = reference(hidden.detach(), weight, target, bias, vocab_valid=vocab_valid)
    assert torch.equal(scores.target_rank, truth.target_rank)
    is_best = (scores.argmax == target) & (target != IGNORED)
    assert is_best.any() and (scores.target_rank[is_best] == 0).all()
    assert (scores.target_rank[::5] == 0).all()


def test_the_rank_counts_equal_logits_with_lower_ids_only():
    hidden = torch.ones(5, 4)
    weight = torch.zeros(600, 4)
    weight[[37, 191, 192, 599]] = 2.0
    target = torch.tensor([37, 191, 192, 599, 36])

    scores = linear_logprob(hidden, weight, target, return_target_rank=True)

    assert scores.target_rank.tolist() == [0, 1, 2, 3, 4 + 36]


def test_a_target_outside_the_vocabulary_has_no_rank():
    hidden, weight, target, _ = exact_case(vocab=193)
    target[4] = 250

    scores = linear_logprob(hidden, weight, target, out_of_vocab="zero", return_target_rank=True)

    assert scores.target_rank[4] == -1 and (scores.target_rank[:4] >= 0).all()
