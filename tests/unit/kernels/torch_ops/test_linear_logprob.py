"""Scores equal the double reference on the exact inputs, at the edges of every size and option."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from linear_logprob_reference import reference, reference_logits, seeded
from logprobd_ops.linear_logprob import linear_logprob
from torch import Tensor

IGNORED = -100
# Absolute, for logits up to LOGIT_MAX; beyond, fp32 itself is coarser in proportion.
LOGPROB_TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-10}
ENTROPY_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LOGIT_MAX = 30.0
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SPREADS = torch.tensor([1, 2, 4, 8, 16, 4, 1])  # standard deviation of a row's logits, about


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor


def exact_case(rows=13, size=31, vocab=193, dtype=torch.float32, seed=0) -> Case:
    """Factors of few bits, so that every sum of products is exact in fp32, in any order and for any 16-bit dtype:
    what differs from the reference is the operator's own. Every third target is the argmax."""
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
    # Not "error > tolerance": NaN must not pass.
    is_wrong = ~((error <= tolerance) | (ours.double() == truth))
    assert not is_wrong.any(), (
        f"{name}: row {is_wrong.flatten().nonzero()[0].item()} of {is_wrong.sum().item()} wrong ones, "
        f"off by {error.max().item():.3g}: {ours[is_wrong][0].item()} for {truth[is_wrong][0].item()}"
    )


def assert_in_bounds(logprob: Tensor, entropy: Tensor, vocab: int) -> None:
    assert (logprob <= 0).all()
    assert (entropy >= 0).all()
    assert (entropy <= torch.tensor(math.log(vocab), dtype=entropy.dtype)).all()


def assert_matches_reference(hidden, weight, target, bias=None, **options) -> None:
    logprob, entropy, lse, argmax, mean_logit = linear_logprob(
        hidden, weight, target, bias, return_argmax=True, return_mean_logit=True, **options
    )
    truth = reference(hidden, weight, target, bias, **options)
    is_double = torch.float64 in (hidden.dtype, weight.dtype)
    dtype = torch.float64 if is_double else torch.float32
    assert [out.dtype for out in (logprob, entropy, lse, mean_logit)] == [dtype] * 4

    shaping = {k: options[k] for k in options if k in ("temperature", "scale", "softcap")}
    vocab_valid = options.get("vocab_valid")
    x = reference_logits(hidden, weight, bias, vocab_valid=vocab_valid, **shaping)
    is_counted = target != options.get("ignore_index", IGNORED)
    size = torch.where(is_counted, x.abs().amax(-1), 0.0) / LOGIT_MAX
    factor = size.clamp(min=1)
    assert_near(logprob, truth.logprob, LOGPROB_TOLERANCE[dtype] * factor, "logprob")
    assert_near(lse, truth.lse, LOGPROB_TOLERANCE[dtype] * factor, "lse")
    assert_near(entropy, truth.entropy, ENTROPY_TOLERANCE[dtype] * factor, "entropy")
    column_weights = options.get("column_weights")
    mass = 1.0 if column_weights is None else max(1.0, column_weights.abs().sum().item())
    assert_near(mean_logit, truth.mean_logit, LOGPROB_TOLERANCE[dtype] * factor * mass, "mean")
    assert argmax.dtype == torch.int64
    if options.get("softcap") is None:
        assert torch.equal(argmax, truth.argmax)
    else:  # in fp32 different logits become equal near the cap
        best = x.gather(-1, argmax.unsqueeze(-1)).squeeze(-1)
        assert_near(best, x.amax(-1), LOGPROB_TOLERANCE[dtype], "argmax")
    assert_in_bounds(logprob, entropy, x.shape[-1])


# Values.


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
    """Logits up to 30; larger ones are scaled down row by row."""
    hidden, weight, target, _ = normal_case(64, size, 507, logits_std)
    largest = (hidden.double() @ weight.double().T).abs().amax(1, keepdim=True)
    hidden = hidden * (LOGIT_MAX / largest).clamp(max=1).float()

    logprob, entropy, lse = linear_logprob(hidden, weight, target)

    truth = reference(hidden, weight, target)
    assert (logprob - truth.logprob).abs().max() <= 5e-6
    assert (lse - truth.lse).abs().max() <= 5e-6
    assert (entropy - truth.entropy).abs().max() <= 1e-5


@pytest.mark.parametrize(("size", "logits_std"), [(70, 1.0), (896, 4.0), (4095, 10.0), (896, 20.0)])
def test_fp32_is_as_accurate_as_logits_materialised_by_torch(size, logits_std):
    hidden, weight, target, _ = normal_case(256, size, 507, logits_std)

    logprob, _, _ = linear_logprob(hidden, weight, target)

    truth = reference(hidden, weight, target).logprob
    materialised = torch.log_softmax(hidden @ weight.T, -1).gather(1, target[:, None]).squeeze(1)
    assert (logprob - truth).norm() <= 1.05 * (materialised - truth).norm()


@pytest.mark.parametrize("vocab", (1, 125, 129, 193, 257, 507, 1937))
@pytest.mark.parametrize("shift", (-128.0, -256.0, -16384.0))
def test_logits_far_below_zero_see_no_zeros_of_padding(vocab, shift):
    hidden, weight, target, _ = exact_case(7, 31, vocab)
    bias = torch.full((vocab,), shift)
    assert reference_logits(hidden, weight, bias).max() < -40

    assert_matches_reference(hidden, weight, target, bias)


@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_logits_of_seventy_thousand_keep_their_differences(dtype):
    """Two largest, 7e4 both: their logprob is -ln 2, though the lse has steps of 0.008."""
    weight = torch.zeros(193, 1, dtype=dtype)
    weight[3] = weight[192] = 7e4
    weight[7] = -7e4
    hidden = torch.tensor([[1.0], [1.0], [1.0], [-1.0], [-1.0]], dtype=dtype)
    target = torch.tensor([3, 192, 7, 7, 3])

    logprob, entropy, lse = linear_logprob(hidden, weight, target)

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

    logprob, entropy, lse = linear_logprob(hidden, weight, torch.zeros(3).long(), bias)

    log_vocab = torch.full((3,), math.log(vocab))
    torch.testing.assert_close(entropy, log_vocab, atol=1e-12, rtol=1e-7)
    torch.testing.assert_close(logprob, -log_vocab, atol=1e-12, rtol=1e-7)
    torch.testing.assert_close(lse, level + log_vocab, atol=5e-6, rtol=2**-23)
    assert_in_bounds(logprob, entropy, vocab)


@pytest.mark.parametrize("place", (0, 191, 192, 506))
def test_one_logit_forty_above_the_rest_takes_all(place):
    weight = torch.zeros(507, 8)
    weight[place] = 5.0
    hidden = torch.ones(2, 8)
    target = torch.tensor([place, (place + 1) % 507])

    logprob, entropy, lse = linear_logprob(hidden, weight, target)

    truth = reference(hidden, weight, target)
    torch.testing.assert_close(logprob.double(), truth.logprob, atol=5e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), truth.entropy, atol=1e-10, rtol=0)
    assert_in_bounds(logprob, entropy, 507)


def test_columns_of_minus_infinity_have_no_part():
    hidden, weight, target, bias = exact_case(7, 31, 400)
    bias[:200] = -math.inf
    target = target.clamp(min=200)
    target[6] = 5

    logprob, entropy, lse = linear_logprob(hidden, weight, target, bias)

    truth = reference(hidden, weight[200:], target[:6].sub(200).repeat(2)[:7], bias[200:])
    torch.testing.assert_close(logprob[:6].double(), truth.logprob[:6], atol=5e-6, rtol=2**-22)
    torch.testing.assert_close(entropy.double(), truth.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), truth.lse, atol=5e-6, rtol=2**-22)
    assert logprob[6] == -math.inf


def test_a_certain_token_never_has_a_positive_logprob():
    hidden, weight, _, _ = normal_case(513, 70, 193, logits_std=20.0)
    target = (hidden @ weight.T).argmax(1)

    logprob, entropy, _ = linear_logprob(hidden, weight, target)

    assert logprob.max() > -1e-6
    assert_in_bounds(logprob, entropy, 193)


# Targets.


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
def test_a_target_outside_the_vocabulary_is_named_with_its_row(bad, options):
    hidden, weight, target, _ = exact_case()
    target %= 125
    target[[1, 4]] = options.get("ignore_index", IGNORED)
    target[9] = bad

    with pytest.raises(IndexError, match=rf"target {bad} of row 9 "):
        linear_logprob(hidden, weight, target, **options)


def test_a_target_behind_the_last_row_of_the_weight_is_refused_though_vocab_valid_counts_it():
    hidden, weight, target, _ = exact_case(vocab=193)
    target[9] = 200

    with pytest.raises((IndexError, ValueError), match="target 200 of row 9 |vocab_valid"):
        linear_logprob(hidden, weight, target, vocab_valid=256)


def test_a_target_before_vocab_start_is_refused_where_no_group_holds_it():
    hidden, weight, target, _ = exact_case(vocab=193)
    target += 64
    target[9] = 5

    with pytest.raises((IndexError, ValueError), match="target 5 of row 9 |vocab_start"):
        linear_logprob(hidden, weight, target, vocab_start=64)


@pytest.mark.parametrize("vocab_start", (1, 64, 192, 200))
def test_vocab_start_shifts_the_ids(vocab_start):
    hidden, weight, target, _ = exact_case(vocab=507)
    scores = linear_logprob(hidden, weight, target, return_argmax=True)

    *shifted, argmax = linear_logprob(
        hidden, weight, target + vocab_start, vocab_start=vocab_start, return_argmax=True
    )

    for ours, truth in zip(shifted, scores[:3], strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-6, rtol=2**-22)
    assert torch.equal(argmax, scores[3] + vocab_start)


def test_unowned_targets_count_as_zero_where_asked():
    hidden, weight, target, _ = exact_case(vocab=193)
    truth = reference(hidden, weight, target)
    unowned = [1, 5, 8, 12]
    target[unowned] = torch.tensor([-1, 193, 2**31, 250])

    logprob, entropy, lse = linear_logprob(hidden, weight, target, unowned_target="zero")

    owned = [row for row in range(13) if row not in unowned]
    assert (logprob[unowned] == 0).all()
    torch.testing.assert_close(logprob[owned].double(), truth.logprob[owned], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), truth.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), truth.lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("ignore_index", (-100, -1, 5))
def test_ignored_rows_give_exact_zeros_whatever_they_hold(ignore_index):
    hidden, weight, target, _ = exact_case()
    target[target == ignore_index] += 1
    hidden[[0, 4, 12]] = torch.tensor([math.nan, math.inf, -math.inf]).unsqueeze(1)
    target[[0, 4, 12]] = ignore_index
    counted = target != ignore_index

    scores = linear_logprob(
        hidden,
        weight,
        target,
        ignore_index=ignore_index,
        return_argmax=True,
        return_mean_logit=True,
    )

    alone = linear_logprob(
        hidden[counted], weight, target[counted], return_argmax=True, return_mean_logit=True
    )
    for ours, truth in zip(scores, alone, strict=True):
        assert (ours[~counted] == 0).all()
        assert torch.equal(ours[counted], truth)


@pytest.mark.parametrize("rows", (1, 7, 129))
def test_only_ignored_rows_give_only_zeros(rows):
    weight = torch.full((193, 31), math.nan)

    scores = linear_logprob(
        torch.full((rows, 31), math.nan),
        weight,
        torch.full((rows,), IGNORED),
        return_argmax=True,
        return_mean_logit=True,
    )

    assert all(torch.equal(out, torch.zeros_like(out)) for out in scores)
    assert all(out.shape == (rows,) for out in scores)


# Bad values.


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("vocab", (125, 507))
def test_a_value_that_is_not_finite_touches_its_row_only(bad, vocab):
    hidden, weight, target, bias = exact_case(7, 31, vocab)
    weight[-1, 3] = 1.0  # inf * 0 would be NaN: here it is an infinite logit
    truth = linear_logprob(hidden, weight, target, bias, return_argmax=True, return_mean_logit=True)
    hidden[3, 3] = bad

    scores = linear_logprob(
        hidden, weight, target, bias, return_argmax=True, return_mean_logit=True
    )

    others = [0, 1, 2, 4, 5, 6]
    for ours, before in zip(scores, truth, strict=True):
        assert torch.equal(ours[others], before[others])
    assert all(score[3].isnan() for score in scores[:3])


def test_a_logit_of_plus_infinity_has_no_scores():
    hidden, weight, target, bias = exact_case(7, 31, 257)
    bias[200] = math.inf

    logprob, entropy, lse, argmax = linear_logprob(hidden, weight, target, bias, return_argmax=True)

    assert logprob.isnan().all() and entropy.isnan().all() and lse.isnan().all()
    assert (argmax == -1).all()


def test_a_row_of_minus_infinities_has_no_scores():
    hidden, weight, target, _ = exact_case(7, 31, 257)

    logprob, entropy, lse = linear_logprob(hidden, weight, target, torch.full((257,), -math.inf))

    assert logprob.isnan().all() and entropy.isnan().all() and lse.isnan().all()


def test_what_the_padding_of_the_weight_holds_does_not_matter():
    hidden, weight, target, bias = exact_case(vocab=257)
    target %= 125
    column_weights = torch.linspace(0, 1, 257).double()
    truth = linear_logprob(
        hidden,
        weight[:125],
        target,
        bias[:125],
        column_weights=column_weights[:125],
        return_argmax=True,
        return_mean_logit=True,
    )
    weight[125:] = math.nan
    bias[125:] = math.inf
    column_weights[125:] = math.nan

    scores = linear_logprob(
        hidden,
        weight,
        target,
        bias,
        vocab_valid=125,
        column_weights=column_weights,
        return_argmax=True,
        return_mean_logit=True,
    )

    assert all(torch.equal(ours, same) for ours, same in zip(scores, truth, strict=True))


# Layouts and dtypes.


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

    assert all(torch.equal(ours, same) for ours, same in zip(scores, truth, strict=True))


def test_expanded_and_strided_tensors_of_every_argument():
    hidden, weight, target, bias = exact_case(7, 31, 257)
    one_row = hidden[2:3].expand(7, 31)
    targets = torch.stack([target, target + 1], 1)[:, 0]
    biases = torch.stack([bias, bias + 1], 1)[:, 0]
    column_weights = torch.tensor([0.25]).expand(257)

    scores = linear_logprob(
        one_row,
        weight,
        targets,
        biases,
        temperature=torch.tensor([0.5]).expand(7),
        column_weights=column_weights,
        return_mean_logit=True,
    )

    truth = linear_logprob(
        one_row.contiguous(),
        weight,
        target,
        bias,
        temperature=torch.full((7,), 0.5),
        column_weights=column_weights.contiguous(),
        return_mean_logit=True,
    )
    assert all(torch.equal(ours, same) for ours, same in zip(scores, truth, strict=True))
    assert_matches_reference(
        hidden, weight[4:5].expand(257, 31), torch.zeros(7, dtype=torch.int64), bias
    )


def test_targets_cut_from_a_longer_tensor():
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
def test_all_pairs_of_dtypes_give_the_same_bits_where_products_are_exact(
    hidden_dtype, weight_dtype
):
    hidden, weight, target, bias = exact_case(13, 123, 257)
    truth = linear_logprob(hidden, weight, target, bias)

    scores = linear_logprob(hidden.to(hidden_dtype), weight.to(weight_dtype), target, bias)

    assert all(out.dtype == torch.float32 for out in scores)
    assert all(torch.equal(ours, same) for ours, same in zip(scores, truth, strict=True))


@pytest.mark.parametrize("pair", [(torch.float64, torch.bfloat16), (torch.float32, torch.float64)])
def test_a_double_on_either_side_gives_doubles(pair):
    hidden, weight, target, bias = exact_case(13, 123, 257)

    assert_matches_reference(hidden.to(pair[0]), weight.to(pair[1]), target, bias)


def test_fp32_hidden_states_are_not_rounded_to_the_bf16_of_the_weight():
    hidden, weight, target, _ = normal_case(64, 123, 257, logits_std=3.0)
    weight = weight.bfloat16()

    logprob, entropy, _ = linear_logprob(hidden, weight, target)

    truth = reference(hidden, weight, target)
    rounded = reference(hidden.bfloat16(), weight, target)
    assert (logprob - truth.logprob).abs().max() <= 5e-6
    assert (entropy - truth.entropy).abs().max() <= 1e-5
    assert (rounded.logprob - truth.logprob).abs().max() > 1e-3


def test_an_fp32_bias_is_not_rounded_to_the_dtype_of_the_weight():
    hidden, weight, target, bias = exact_case(13, 31, 257, torch.bfloat16)
    bias = bias.float() + 2**-12

    assert_matches_reference(hidden, weight, target, bias)


# Options.


@pytest.mark.parametrize(
    "temperature", (1, 2, 0.1, 0.7, np.float32(0.7), np.float64(1.5), np.int64(2))
)
def test_temperature_as_any_number(temperature):
    hidden, weight, target, bias = exact_case(vocab=257)

    assert_matches_reference(hidden, weight, target, bias, temperature=float(temperature))
    plain = linear_logprob(hidden, weight, target, bias, temperature=float(temperature))
    scores = linear_logprob(hidden, weight, target, bias, temperature=temperature)
    assert all(torch.equal(ours, same) for ours, same in zip(scores, plain, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_temperature_as_a_tensor_of_one(dtype):
    hidden, weight, target, bias = exact_case(vocab=257)

    assert_matches_reference(
        hidden, weight, target, bias, temperature=torch.tensor(0.75, dtype=dtype)
    )


def test_a_temperature_a_row_is_that_rows_alone():
    hidden, weight, target, bias = exact_case(13, 31, 257)
    target[[2, 7]] = IGNORED
    temperature = torch.linspace(0.1, 2, 13)

    assert_matches_reference(hidden, weight, target, bias, temperature=temperature)
    scores = linear_logprob(hidden, weight, target, bias, temperature=temperature)
    for row in range(13):
        alone = linear_logprob(hidden, weight, target, bias, temperature=temperature[row].item())
        assert all(torch.equal(a[row], b[row]) for a, b in zip(scores, alone, strict=True))


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
        *_, argmax = linear_logprob(hidden, weight, torch.tensor([0]), return_argmax=True)
        assert argmax.item() == first
        weight[first] = 0.0
    *_, argmax = linear_logprob(hidden, weight, torch.tensor([0]), return_argmax=True)
    assert argmax.item() == 0


def test_argmax_is_the_lowest_id_among_equals_of_different_blocks():
    """So many rows that columns are computed in several blocks (kBlockLogits)."""
    rows = 8192
    hidden = torch.ones(rows, 1)
    weight = torch.zeros(1300, 1)
    weight[[700, 1000, 1299]] = 2.0

    *_, argmax = linear_logprob(
        hidden, weight, torch.zeros(rows, dtype=torch.int64), return_argmax=True
    )

    assert (argmax == 700).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_column_weights_weigh_the_mean_logit(dtype):
    hidden, weight, target, bias = exact_case(13, 31, 507)
    column_weights = (torch.arange(507).remainder(9) - 2).to(dtype) / 64

    assert_matches_reference(
        hidden, weight, target, bias, column_weights=column_weights, temperature=0.5
    )


def test_what_is_not_needed_has_no_elements_and_changes_nothing():
    hidden, weight, target, bias = exact_case(vocab=257)
    full = linear_logprob(hidden, weight, target, bias, return_argmax=True, return_mean_logit=True)

    logprob, entropy, lse = linear_logprob(hidden, weight, target, bias, need_entropy=False)
    with_mean = linear_logprob(hidden, weight, target, bias, return_mean_logit=True)

    assert entropy.numel() == 0
    assert torch.equal(logprob, full[0]) and torch.equal(lse, full[2])
    assert len(with_mean) == 4 and torch.equal(with_mean[3], full[4])


# Bits.


def test_the_first_row_is_the_same_every_time():
    hidden, weight, target, bias = normal_case(5, 31, 193)
    first = linear_logprob(hidden, weight, target, bias, return_argmax=True, return_mean_logit=True)

    for _ in range(200):
        again = linear_logprob(
            hidden, weight, target, bias, return_argmax=True, return_mean_logit=True
        )
        assert all(torch.equal(ours[0], same[0]) for ours, same in zip(again, first, strict=True))


@pytest.mark.parametrize("ignored", ([0], [12], [3, 4, 9], list(range(1, 13))))
def test_rows_have_the_bits_that_they_have_without_the_ignored_ones(ignored):
    """Ignored rows are left out before any product, so this holds for every input."""
    hidden, weight, target, bias = normal_case(13, 123, 507, logits_std=8.0)
    target[ignored] = IGNORED
    counted = target != IGNORED

    scores = linear_logprob(hidden, weight, target, bias)

    alone = linear_logprob(hidden[counted], weight, target[counted], bias)
    assert all(torch.equal(ours[counted], same) for ours, same in zip(scores, alone, strict=True))


@pytest.mark.parametrize("rows", (1, 7, 128))
def test_sums_of_a_row_do_not_depend_on_the_rows_beside_it(rows):
    """With exact products; the CPU's products of other inputs may round differently for other numbers of rows."""
    hidden, weight, target, bias = exact_case(513, 70, 507)
    order = torch.randperm(513, generator=seeded(1))[:rows]

    whole = linear_logprob(hidden, weight, target, bias)
    part = linear_logprob(hidden[order], weight, target[order], bias)

    assert all(torch.equal(ours[order], same) for ours, same in zip(whole, part, strict=True))


def test_blocks_of_rows_and_columns_do_not_show():
    """More rows than a block holds (kBlockRows), and so many that columns are cut (kBlockLogits)."""
    few = exact_case(50, 8, 200)
    rows = 33_000
    repeated = [tensor.repeat(rows // 50, *[1] * (tensor.dim() - 1)) for tensor in (few[0], few[2])]

    scores = linear_logprob(repeated[0], few.weight, repeated[1], few.bias, return_mean_logit=True)

    truth = linear_logprob(few.hidden, few.weight, few.target, few.bias, return_mean_logit=True)
    for ours, same in zip(scores[:3], truth[:3], strict=True):
        assert torch.equal(ours, same.repeat(rows // 50))
    torch.testing.assert_close(scores[3], truth[3].repeat(rows // 50), atol=1e-6, rtol=1e-6)


# Mistakes.

BAD_ARGUMENTS = {
    "weight of one dimension": ({"weight": torch.ones(8)}, "weight"),
    "weight of three dimensions": ({"weight": torch.ones(1, 20, 8)}, "weight"),
    "weight gathered away": ({"weight": torch.ones(0)}, "weight"),
    "weight without columns": ({"weight": torch.ones(20, 0)}, "weight"),
    "hidden of another size": ({"hidden": torch.ones(6, 9)}, "hidden"),
    "hidden without dimensions": ({"hidden": torch.tensor(1.0)}, "hidden"),
    "fewer targets": ({"target": torch.zeros(5, dtype=torch.int64)}, "target"),
    "more targets": ({"target": torch.zeros(6, 2, dtype=torch.int64)}, "target"),
    "targets of floats": ({"target": torch.zeros(6)}, "target"),
    "targets of truth values": ({"target": torch.zeros(6, dtype=torch.bool)}, "target"),
    "hidden of integers": ({"hidden": torch.ones(6, 8, dtype=torch.int32)}, "hidden"),
    "weight of bytes": ({"weight": torch.ones(20, 8, dtype=torch.int8)}, "weight"),
    "weight of float8": ({"weight": torch.ones(20, 8).to(torch.float8_e4m3fn)}, "weight"),
    "complex hidden": ({"hidden": torch.ones(6, 8, dtype=torch.complex64)}, "hidden"),
    "bias of another size": ({"bias": torch.ones(19)}, "bias"),
    "bias of two dimensions": ({"bias": torch.ones(20, 1)}, "bias"),
    "bias of one": ({"bias": torch.ones(1)}, "bias"),
    "complex bias": ({"bias": torch.ones(20, dtype=torch.complex64)}, "bias"),
    "column_weights of another size": ({"column_weights": torch.ones(21)}, "column_weights"),
    "temperature of another size": ({"temperature": torch.ones(5)}, "temperature"),
    "temperature a column": ({"temperature": torch.ones(6, 1)}, "temperature"),
    "temperature of zero": ({"temperature": 0}, "temperature"),
    "temperature below zero": ({"temperature": -1.0}, "temperature"),
    "temperature not a number": ({"temperature": math.nan}, "temperature"),
    "softcap below zero": ({"softcap": -1.0}, "softcap"),
    "softcap not a number": ({"softcap": math.nan}, "softcap"),
    "vocab_start below zero": ({"vocab_start": -1}, "vocab_start"),
    "vocab_valid of zero": ({"vocab_valid": 0}, "vocab_valid"),
    "vocab_valid below zero": ({"vocab_valid": -2}, "vocab_valid"),
    "unowned_target of another kind": ({"unowned_target": "nothing"}, "unowned_target"),
    "sequence_parallel alone": ({"sequence_parallel": True}, "sequence_parallel"),
    "weight elsewhere": ({"weight": torch.ones(20, 8, device="meta")}, "weight"),
    "hidden elsewhere": ({"hidden": torch.ones(6, 8, device="meta")}, "hidden"),
    "bias elsewhere": ({"bias": torch.ones(20, device="meta")}, "bias"),
    "temperature elsewhere": ({"temperature": torch.ones(6, device="meta")}, "temperature"),
    "column_weights elsewhere": (
        {"column_weights": torch.ones(20, device="meta"), "return_mean_logit": True},
        "column_weights",
    ),
}


@pytest.mark.parametrize("mistake", BAD_ARGUMENTS)
def test_a_mistake_names_its_argument(mistake):
    changes, name = BAD_ARGUMENTS[mistake]
    right = {
        "hidden": torch.ones(6, 8),
        "weight": torch.ones(20, 8),
        "target": torch.zeros(6, dtype=torch.int64),
    }

    with pytest.raises(ValueError, match=name):
        linear_logprob(**(right | changes))
