"""Scores equal those of the fp64 reference, at the edges of every size and value."""

import math

import pytest
import torch
from linear_logprob_reference import reference, reference_logits
from logprobd_ops.linear_logprob import linear_logprob
from score_cases import (
    FLOATS,
    LOGIT_MAX,
    assert_in_bounds,
    assert_matches_reference,
    exact_case,
    normal_case,
)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize(
    ("rows", "size", "vocab"),
    [
        (0, 31, 193),
        (1, 1, 1),
        (1, 4095, 193),
        (7, 1, 257),
        (7, 8, 1),
        (7, 896, 1937),
        (127, 8, 2),
        (127, 31, 191),
        (128, 8, 8),
        (128, 70, 192),
        (129, 123, 193),
        (129, 31, 125),
        (513, 8, 129),
        (513, 70, 257),
        (64, 123, 507),
        (7, 31, 384),
        (7, 31, 385),
    ],
)
def test_every_size_gives_the_reference_values(rows, size, vocab, dtype):
    hidden, weight, target, bias = exact_case(rows, size, vocab, dtype)

    assert_matches_reference(hidden, weight, target)
    assert_matches_reference(hidden, weight, target, bias)


@pytest.mark.parametrize("size", (1, 8, 31, 70, 123, 896, 4095))
@pytest.mark.parametrize("logits_std", (1.0, 3.0))
def test_products_of_full_width_keep_fp32_accuracy(size, logits_std):
    """Logits are at most 30; rows with larger logits are scaled down."""
    hidden, weight, target, _ = normal_case(64, size, 507, logits_std)
    largest = (hidden.double() @ weight.double().T).abs().amax(1, keepdim=True)
    hidden = hidden * (LOGIT_MAX / largest).clamp(max=1).float()

    logprob, entropy, lse, *_ = linear_logprob(hidden, weight, target)

    truth = reference(hidden, weight, target)
    assert (logprob - truth.logprob).abs().max() <= 5e-6
    assert (lse - truth.lse).abs().max() <= 5e-6
    assert (entropy - truth.entropy).abs().max() <= 1e-5


@pytest.mark.parametrize(("size", "logits_std"), [(70, 1.0), (896, 4.0), (4095, 10.0), (896, 20.0)])
def test_fp32_is_as_accurate_as_logits_materialised_by_torch(size, logits_std):
    hidden, weight, target, _ = normal_case(256, size, 507, logits_std)

    logprob, *_ = linear_logprob(hidden, weight, target)

    truth = reference(hidden, weight, target).logprob
    materialised = torch.log_softmax(hidden @ weight.T, -1).gather(1, target[:, None]).squeeze(1)
    assert (logprob - truth).norm() <= 1.05 * (materialised - truth).norm()


@pytest.mark.parametrize("vocab", (1, 125, 129, 193, 257, 507, 1937))
@pytest.mark.parametrize("shift", (-128.0, -256.0, -16384.0))
def test_padding_zeros_do_not_affect_logits_far_below_zero(vocab, shift):
    hidden, weight, target, _ = exact_case(7, 31, vocab)
    bias = torch.full((vocab,), shift)
    assert reference_logits(hidden, weight, bias).max() < -40

    assert_matches_reference(hidden, weight, target, bias)


@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_logits_of_seventy_thousand_keep_their_differences(dtype):
    """The two largest logits are 7e4: their logprob is -ln 2, although lse has steps of 0.008."""
    weight = torch.zeros(193, 1, dtype=dtype)
    weight[3] = weight[192] = 7e4
    weight[7] = -7e4
    hidden = torch.tensor([[1.0], [1.0], [1.0], [-1.0], [-1.0]], dtype=dtype)
    target = torch.tensor([3, 192, 7, 7, 3])

    logprob, entropy, lse, *_ = linear_logprob(hidden, weight, target)

    truth = reference(hidden, weight, target)
    torch.testing.assert_close(logprob.double(), truth.logprob, atol=5e-6, rtol=2**-23)
    torch.testing.assert_close(entropy.double(), truth.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), truth.lse, atol=0, rtol=2**-23)
    assert abs(logprob[0].item() + math.log(2)) <= 1e-6


@pytest.mark.parametrize("vocab", (1, 2, 8, 125, 192, 193, 507, 1937))
@pytest.mark.parametrize("level", (0.0, -96.0, 17.25))
def test_equal_logits_have_an_entropy_of_ln_v(vocab, level):
    hidden = torch.zeros(3, 8)
    weight = torch.ones(vocab, 8)
    bias = torch.full((vocab,), level)

    logprob, entropy, lse, *_ = linear_logprob(hidden, weight, torch.zeros(3).long(), bias)

    log_vocab = torch.full((3,), math.log(vocab))
    torch.testing.assert_close(entropy, log_vocab, atol=1e-12, rtol=1e-7)
    torch.testing.assert_close(logprob, -log_vocab, atol=1e-12, rtol=1e-7)
    torch.testing.assert_close(lse, level + log_vocab, atol=5e-6, rtol=2**-23)
    assert_in_bounds(logprob, entropy, vocab)


@pytest.mark.parametrize("place", (0, 191, 192, 506))
def test_a_logit_forty_above_the_rest_has_probability_one(place):
    weight = torch.zeros(507, 8)
    weight[place] = 5.0
    hidden = torch.ones(2, 8)
    target = torch.tensor([place, (place + 1) % 507])

    logprob, entropy, lse, *_ = linear_logprob(hidden, weight, target)

    truth = reference(hidden, weight, target)
    torch.testing.assert_close(logprob.double(), truth.logprob, atol=5e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), truth.entropy, atol=1e-10, rtol=0)
    assert_in_bounds(logprob, entropy, 507)


def test_columns_of_minus_infinity_do_not_count():
    hidden, weight, target, bias = exact_case(7, 31, 400)
    bias[:200] = -math.inf
    target = target.clamp(min=200)
    target[6] = 5

    logprob, entropy, lse, *_ = linear_logprob(hidden, weight, target, bias)

    truth = reference(hidden, weight[200:], target[:6].sub(200).repeat(2)[:7], bias[200:])
    torch.testing.assert_close(logprob[:6].double(), truth.logprob[:6], atol=5e-6, rtol=2**-22)
    torch.testing.assert_close(entropy.double(), truth.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), truth.lse, atol=5e-6, rtol=2**-22)
    assert logprob[6] == -math.inf


def test_a_certain_token_never_has_a_positive_logprob():
    hidden, weight, _, _ = normal_case(513, 70, 193, logits_std=20.0)
    target = (hidden @ weight.T).argmax(1)

    logprob, entropy, *_ = linear_logprob(hidden, weight, target)

    assert logprob.max() > -1e-6
    assert_in_bounds(logprob, entropy, 193)
