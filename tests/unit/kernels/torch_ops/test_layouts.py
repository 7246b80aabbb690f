"""Strides, shapes and dtypes of the arguments do not affect the scores."""

import math

import pytest
import torch
from linear_logprob_reference import reference, requested
from logprobd_ops.linear_logprob import linear_logprob
from score_cases import (
    FLOATS,
    assert_matches_reference,
    exact_case,
    normal_case,
)
from torch import Tensor


def strided(tensor: Tensor) -> Tensor:
    wide = tensor.new_full((tensor.shape[0] * 2, tensor.shape[1] * 3), math.nan)
    wide[::2, ::3] = tensor
    return wide[::2, ::3]


def offset_by_one(tensor: Tensor) -> Tensor:
    room = tensor.new_full((tensor.numel() + 1,), math.nan)
    room[1:] = tensor.flatten()
    return room[1:].view(tensor.shape)


LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.T.contiguous().T,
    "strided": strided,
    "offset by one": offset_by_one,
    "last columns": lambda tensor: torch.cat([tensor.new_full((len(tensor), 1), 9.0), tensor], 1)[
        :, 1:
    ],
}


@pytest.mark.parametrize("hidden_layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_strides_do_not_matter(hidden_layout, weight_layout, dtype):
    hidden, weight, target, bias = exact_case(7, 31, 257, dtype)
    truth = linear_logprob(hidden, weight, target, bias)

    scores = linear_logprob(
        LAYOUTS[hidden_layout](hidden), LAYOUTS[weight_layout](weight), target, bias
    )

    assert all(
        torch.equal(ours, same)
        for ours, same in zip(requested(scores), requested(truth), strict=True)
    )


def test_expanded_and_strided_tensors_of_every_argument():
    hidden, weight, target, bias = exact_case(7, 31, 257)
    one_row = hidden[2:3].expand(7, 31)
    targets = torch.stack([target, target + 1], 1)[:, 0]
    biases = torch.stack([bias, bias + 1], 1)[:, 0]
    mean_logit_weights = torch.tensor([0.25]).expand(257)

    scores = linear_logprob(
        one_row,
        weight,
        targets,
        biases,
        temperature=torch.tensor([0.5]).expand(7),
        mean_logit_weights=mean_logit_weights,
        return_mean_logit=True,
    )

    truth = linear_logprob(
        one_row.contiguous(),
        weight,
        target,
        bias,
        temperature=torch.full((7,), 0.5),
        mean_logit_weights=mean_logit_weights.contiguous(),
        return_mean_logit=True,
    )
    assert all(
        torch.equal(ours, same)
        for ours, same in zip(requested(scores), requested(truth), strict=True)
    )
    assert_matches_reference(
        hidden, weight[4:5].expand(257, 31), torch.zeros(7, dtype=torch.int64), bias
    )


def test_targets_that_are_slices_of_a_longer_tensor():
    hidden, weight, target, _ = exact_case(13, 31, 257)

    assert_matches_reference(hidden[:-1], weight, target[1:])
    assert_matches_reference(hidden[::2], weight, target[::2])


@pytest.mark.parametrize("shape", ((), (1,), (2, 3), (3, 0), (2, 1, 3)))
def test_scores_have_the_shape_of_the_target(shape):
    rows = math.prod(shape)
    hidden, weight, target, _ = exact_case(rows, 31, 193)
    hidden = hidden.reshape(*shape, 31)
    target = target.reshape(shape)

    assert_matches_reference(hidden, weight, target)


def test_sequences_transposed_to_the_front():
    hidden, weight, target, _ = exact_case(12, 31, 193)
    hidden, target = hidden.view(3, 4, 31).transpose(0, 1), target.view(3, 4).T
    temperature = torch.linspace(0.5, 2, 12).view(3, 4).T

    assert_matches_reference(hidden, weight, target, temperature=temperature)


@pytest.mark.parametrize("hidden_dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_all_pairs_of_dtypes_give_the_same_bits_if_products_are_exact(hidden_dtype, weight_dtype):
    hidden, weight, target, bias = exact_case(13, 123, 257)
    truth = linear_logprob(hidden, weight, target, bias)

    scores = linear_logprob(hidden.to(hidden_dtype), weight.to(weight_dtype), target, bias)

    assert all(out.dtype == torch.float32 for out in requested(scores))
    assert all(
        torch.equal(ours, same)
        for ours, same in zip(requested(scores), requested(truth), strict=True)
    )


@pytest.mark.parametrize("pair", [(torch.float64, torch.bfloat16), (torch.float32, torch.float64)])
def test_fp64_on_either_side_gives_fp64_scores(pair):
    hidden, weight, target, bias = exact_case(13, 123, 257)

    assert_matches_reference(hidden.to(pair[0]), weight.to(pair[1]), target, bias)


def test_fp32_hidden_states_are_not_rounded_to_the_bf16_of_the_weight():
    hidden, weight, target, _ = normal_case(64, 123, 257, logits_std=3.0)
    weight = weight.bfloat16()

    logprob, entropy, *_ = linear_logprob(hidden, weight, target)

    truth = reference(hidden, weight, target)
    rounded = reference(hidden.bfloat16(), weight, target)
    assert (logprob - truth.logprob).abs().max() <= 5e-6
    assert (entropy - truth.entropy).abs().max() <= 1e-5
    assert (rounded.logprob - truth.logprob).abs().max() > 1e-3


def test_an_fp32_bias_is_not_rounded_to_the_dtype_of_the_weight():
    hidden, weight, target, bias = exact_case(13, 31, 257, torch.bfloat16)
    bias = bias.float() + 2**-12

    assert_matches_reference(hidden, weight, target, bias)
