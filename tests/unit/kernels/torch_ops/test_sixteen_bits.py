"""Tests of 16-bit heads whose rows are multiples of 16 bytes. GPUs of compute capability 8.0 or later use fused kernels
for them; the same tests run on other devices."""

import math

import pytest
import torch
from gradient_cases import IGNORED, OUTPUTS, Case
from gradient_cases import SIXTEEN_BIT_ERROR_MAX as GRADIENT_ERROR_MAX
from linear_logprob_reference import reference, reference_logits, requested, seeded
from logprobd_ops import linear_cross_entropy, linear_logprob_loss
from logprobd_ops.linear_logprob import linear_logprob
from score_cases import EVERY_SCORE
from torch import Tensor

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
IN_EVERY_MEMORY = pytest.mark.parametrize("memory", ("recompute", "cached"))
# Errors of rows whose logits have a standard deviation of at most 4.
SCORE_ERROR_MAX = 1e-4


def make_case(rows=70, size=64, vocab=507, dtype=torch.bfloat16, spread_max=4.0, seed=0) -> Case:
    """Returns rows whose logits have standard deviations from 1 (flat) to spread_max (peaked)."""
    random = seeded(seed)
    spread = torch.linspace(1, spread_max, rows).unsqueeze(-1)
    hidden = spread * torch.randn(rows, size, generator=random)
    weight = torch.randn(vocab, size, generator=random) / size**0.5
    bias = torch.randn(vocab, generator=random)
    target = torch.randint(vocab, (rows,), generator=random)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]
    return Case(leaves[0], leaves[1], target, leaves[2])


def error_of(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def assert_right(case: Case, bias=True, outputs=OUTPUTS, memory="recompute", **options) -> None:
    """Asserts that scores and gradients are those of the fp64 reference."""
    truth_case = case.to(torch.float64)
    ours = dict(
        zip(
            OUTPUTS,
            requested(
                linear_logprob(
                    *case[: 3 + bias],
                    return_mean_logit="mean_logit" in outputs,
                    memory=memory,
                    **options,
                )
            ),
            strict=False,
        )
    )
    truth = reference(*truth_case[: 3 + bias], **options)
    for name in outputs:
        wrong = (
            (ours[name].double() - getattr(truth, name)).abs().max().item()
            if len(case.target)
            else 0
        )
        assert wrong <= SCORE_ERROR_MAX, (name, wrong)
    random = seeded(5)
    upstream = [torch.randn(case.target.shape, generator=random) for _ in outputs]
    leaves, true_leaves = case.leaves[: 2 + bias], truth_case.leaves[: 2 + bias]
    gradients = torch.autograd.grad([ours[name] for name in outputs], leaves, upstream)
    true_gradients = torch.autograd.grad(
        [getattr(truth, name) for name in outputs],
        true_leaves,
        [gradient.double() for gradient in upstream],
    )
    for gradient, true, leaf in zip(gradients, true_gradients, leaves, strict=True):
        assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
        assert error_of(gradient, true) <= GRADIENT_ERROR_MAX


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(
    ("rows", "size", "vocab"),
    [
        (1, 8, 1),
        (1, 8, 2),
        (7, 64, 191),
        (127, 72, 192),
        (128, 64, 193),
        (129, 128, 507),
        (513, 200, 2000),
        (300, 896, 5000),
    ],
)
@IN_EVERY_MEMORY
def test_every_size(rows, size, vocab, dtype, memory):
    case = make_case(rows, size, vocab, dtype)

    assert_right(case, bias=False, outputs=OUTPUTS[:3], memory=memory)


OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 7.0},
    "scale": {"scale": -0.5},
    "temperature": {"temperature": 0.6},
    "temperature a row": {"temperature": lambda: torch.linspace(0.3, 2, 70)},
    "padding": {"vocab_valid": 500},
    "padding over tiles": {"vocab_valid": 100},
    "mean_logit_weights": {"mean_logit_weights": lambda: torch.linspace(-1, 2, 507) / 507},
    "all together": {
        "softcap": 7.0,
        "scale": 1.5,
        "temperature": lambda: torch.linspace(0.3, 2, 70),
        "vocab_valid": 500,
        "mean_logit_weights": lambda: torch.linspace(-1, 2, 507) / 507,
    },
}


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("outputs", [OUTPUTS, *[(name,) for name in OUTPUTS]])
@IN_EVERY_MEMORY
def test_every_option_and_output(name, outputs, dtype, memory):
    options = {key: value() if callable(value) else value for key, value in OPTIONS[name].items()}
    case = make_case(dtype=dtype)
    case.target[:] %= options.get("vocab_valid", 507)
    case.target[[2, 7]] = IGNORED

    assert_right(case, outputs=outputs, memory=memory, **options)


@pytest.mark.parametrize("option", ({}, {"softcap": 90.0}))
@IN_EVERY_MEMORY
def test_peaked_rows_keep_small_gradients(option, memory):
    case = make_case(129, 256, 1000, spread_max=20.0)
    with torch.no_grad():
        best = reference(*case.to(torch.float64)[:3]).argmax
    case.target.copy_(best)  # With probabilities near 1, the gradient is 1 - p.
    truth_case = case.to(torch.float64)
    logprob, *_ = linear_logprob(*case[:3], **option, memory=memory)
    truth = reference(*truth_case[:3], **option)

    ours = torch.autograd.grad(logprob.sum(), case.hidden)[0]
    true = torch.autograd.grad(truth.logprob.sum(), truth_case.hidden)[0]

    is_peaked = truth.logprob > math.log(0.98)
    assert is_peaked.sum() > 5
    assert error_of(ours[is_peaked], true[is_peaked]) <= GRADIENT_ERROR_MAX


def test_rows_have_the_same_bits_with_and_without_other_rows():
    case = make_case(513, 128, 2000)
    together = requested(linear_logprob(*case[:3]))

    for rows in (1, 64, 127, 200):
        alone = requested(linear_logprob(case.hidden[:rows], case.weight, case.target[:rows]))

        assert all(torch.equal(a, b[:rows]) for a, b in zip(alone, together, strict=True))


@IN_EVERY_MEMORY
def test_everything_has_the_same_bits_every_time(memory):
    case = make_case(200, 128, 2000)

    def once():
        scores = requested(linear_logprob(*case, memory=memory))
        return [*scores, *torch.autograd.grad(scores[0].sum() + scores[1].sum(), case.leaves)]

    first = once()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_argmax_is_the_lowest_id_among_equals():
    case = make_case(130, 64, 1000)
    with torch.no_grad():
        case.weight[700:900] = case.weight[100:300]
    argmax = linear_logprob(*case[:3], return_argmax=True).argmax

    best = reference(*case.to(torch.float64)[:3]).argmax
    assert torch.equal(argmax, best)


SHAPINGS = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "capped": {"softcap": 5.0, "scale": 1.5, "temperature": 2.0},
}


@pytest.mark.parametrize("rows", (70, 600))
@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_the_extremes_and_the_sum_of_squares_are_those_of_the_reference(dtype, shaping, rows):
    case = make_case(rows, 64, 1000, dtype)
    options = SHAPINGS[shaping] | {"vocab_valid": 963}
    case.target[:] %= 963
    case.target[::5] = IGNORED

    requests = EVERY_SCORE | {"return_target_rank": False}
    scores = linear_logprob(*case, **requests, memory="cached", **options)

    truth = reference(*case, **options)
    for name in ("max_logit", "min_logit"):
        error = (getattr(scores, name).double() - getattr(truth, name)).abs().max()
        assert error <= SCORE_ERROR_MAX, name
    error = (scores.sum_p_squared.double() - truth.sum_p_squared).abs()
    assert (error <= 4 * SCORE_ERROR_MAX * truth.sum_p_squared).all()
    assert not any(getattr(scores, name).requires_grad for name in ("max_logit", "sum_p_squared"))


@IN_EVERY_MEMORY
def test_ignored_rows_and_rows_without_upstream_gradient_give_exact_zeros(memory):
    case = make_case(300, 64, 507)
    case.target[::3] = IGNORED
    with torch.no_grad():
        case.hidden[::3] = math.nan
    logprob, entropy, lse, *_ = linear_logprob(*case[:3], memory=memory)
    upstream = torch.ones_like(logprob)
    upstream[1::3] = 0
    d_hidden, d_weight = torch.autograd.grad(logprob, case.leaves[:2], upstream)

    for values in (logprob, entropy, lse):
        assert (values[::3] == 0).all() and (values[1::3] != 0).all()
    assert (d_hidden[::3] == 0).all() and (d_hidden[1::3] == 0).all()
    assert (d_hidden[2::3] != 0).any() and d_weight.isfinite().all()


@IN_EVERY_MEMORY
def test_logits_of_minus_infinity_do_not_count_and_have_no_gradient(memory):
    case = make_case(40, 64, 507)
    with torch.no_grad():
        case.bias[:200] = -math.inf
    case.target[:] = 200 + case.target % 300
    logprob, entropy, *_ = linear_logprob(*case, memory=memory)
    d_hidden, d_weight, d_bias = torch.autograd.grad((logprob + entropy).sum(), case.leaves)

    alone = linear_logprob(case.hidden, case.weight[200:], case.target - 200, case.bias[200:])
    torch.testing.assert_close(logprob, alone[0], rtol=0, atol=SCORE_ERROR_MAX)
    torch.testing.assert_close(entropy, alone[1], rtol=0, atol=SCORE_ERROR_MAX)
    assert (d_weight[:200] == 0).all() and (d_bias[:200] == 0).all()
    assert d_hidden.isfinite().all() and d_weight.isfinite().all()


@IN_EVERY_MEMORY
def test_a_value_that_is_not_finite_affects_only_its_row(memory):
    case = make_case(140, 64, 507)
    clean = linear_logprob(*case[:3], memory=memory)
    with torch.no_grad():
        case.hidden[13, 5] = math.nan
    scores = linear_logprob(*case[:3], memory=memory)
    d_hidden = torch.autograd.grad(scores[0].sum(), case.hidden)[0]

    others = torch.arange(140) != 13
    for score, before in zip(requested(scores), requested(clean), strict=True):
        assert score[13].isnan() and torch.equal(score[others], before[others])
    assert d_hidden[13].isnan().all() and d_hidden[others].isfinite().all()


@pytest.mark.parametrize("bad", (-1, 507, 2**31, 2**31 + 5, -(2**31)))
def test_an_out_of_vocab_target_is_named_with_its_row(bad):
    case = make_case()
    case.target[7] = bad

    with pytest.raises(IndexError, match=rf"target {bad} of row 7"):
        linear_logprob(*case[:3])


@IN_EVERY_MEMORY
def test_more_rows_than_a_block_holds(memory):
    case = make_case(8_192 + 300, 16, 400)
    logprob, entropy, *_ = linear_logprob(*case[:3], memory=memory)
    truth_case = case.to(torch.float64)
    truth = reference(*truth_case[:3])
    ours = torch.autograd.grad((logprob + entropy).sum(), case.leaves[:2])
    true = torch.autograd.grad((truth.logprob + truth.entropy).sum(), truth_case.leaves[:2])

    assert (logprob - truth.logprob).abs().max() <= SCORE_ERROR_MAX
    for gradient, true_gradient in zip(ours, true, strict=True):
        assert error_of(gradient, true_gradient) <= GRADIENT_ERROR_MAX


@pytest.mark.parametrize("layout", ("rows apart", "transposed", "offset by one"))
def test_any_layout_of_hidden_and_weight(layout):
    case = make_case(70, 64, 507)

    def laid_out(tensor: Tensor) -> Tensor:
        if layout == "transposed":
            return tensor.detach().T.contiguous().T
        if layout == "rows apart":
            wide = tensor.new_zeros(tensor.shape[0], tensor.shape[1] + 5)
            wide[:, :-5] = tensor.detach()
            return wide[:, :-5]
        flat = tensor.new_zeros(tensor.numel() + 1)
        flat[1:] = tensor.detach().flatten()
        return flat[1:].view(tensor.shape)

    expected = linear_logprob(*case[:3])
    hidden, weight = (laid_out(leaf).requires_grad_() for leaf in case.leaves[:2])
    scores = linear_logprob(hidden, weight, case.target)

    assert all(
        torch.equal(a, b) for a, b in zip(requested(scores), requested(expected), strict=True)
    )
    ours = torch.autograd.grad(scores[0].sum(), (hidden, weight))
    expected_gradients = torch.autograd.grad(expected[0].sum(), case.leaves[:2])
    assert all(torch.equal(a, b) for a, b in zip(ours, expected_gradients, strict=True))


@pytest.mark.parametrize("unit", (1, 3))
def test_cutting_a_large_vocabulary_does_not_affect_the_bits(unit):
    case = make_case(unit * 64, 32, 40_000)
    logprob, entropy, *_ = linear_logprob(*case[:3])
    d_hidden, d_weight = torch.autograd.grad((logprob + entropy).sum(), case.leaves[:2])
    truth_case = case.to(torch.float64)
    truth = reference(*truth_case[:3])
    true = torch.autograd.grad((truth.logprob + truth.entropy).sum(), truth_case.leaves[:2])

    assert error_of(d_hidden, true[0]) <= GRADIENT_ERROR_MAX
    assert error_of(d_weight, true[1]) <= GRADIENT_ERROR_MAX


@IN_EVERY_MEMORY
def test_a_masked_tile_next_to_very_negative_logits_has_no_gradient(memory):
    """Regression: 2^(0 - K) of a masked tile overflowed when all other logits were below -89."""
    case = make_case(40, 64, 507)
    with torch.no_grad():
        case.bias.fill_(-200.0)
        case.bias[:192] = -math.inf
    case.target[:] = 192 + case.target % 300
    logprob, entropy, *_ = linear_logprob(*case, memory=memory)
    gradients = torch.autograd.grad((logprob + entropy).sum(), case.leaves)

    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[1][:192] == 0).all()


@IN_EVERY_MEMORY
def test_the_slope_of_a_cap_is_taken_at_the_target_however_improbable(memory):
    """Regression: with cached logits the slope was taken at 2^-200."""
    case = make_case(60, 64, 507, spread_max=20.0)
    options = {"softcap": 15.0, "temperature": 0.05}
    with torch.no_grad():
        worst = reference_logits(case.hidden, case.weight).argmin(-1)
    case.target.copy_(worst)
    truth_case = case.to(torch.float64)
    logprob, *_ = linear_logprob(*case[:3], memory=memory, **options)
    truth = reference(*truth_case[:3], **options)

    ours = torch.autograd.grad(logprob.sum(), case.leaves[:2])
    true = torch.autograd.grad(truth.logprob.sum(), truth_case.leaves[:2])

    assert (truth.logprob < -250).any()
    for gradient, true_gradient in zip(ours, true, strict=True):
        # The bound includes the rounding of the cap.
        assert error_of(gradient, true_gradient) <= 2 * GRADIENT_ERROR_MAX


@pytest.mark.parametrize("memory_budget", (0, 300_000, 1 << 30))
def test_a_loss_with_gradients_in_the_forward_is_that_of_its_rows(memory_budget):
    """Regression: blocks of rows used row indices of all rows to look up targets in an array of the block."""
    case = make_case(400, 64, 507)
    case.target[::3] = IGNORED
    random = seeded(7)
    temperature = 0.5 + torch.rand(400, generator=random)
    weights = [torch.randn(400, generator=random) for _ in range(2)]
    loss, logprob, entropy, *_ = linear_logprob_loss(
        *case[:3],
        logprob_coef=weights[0],
        entropy_coef=weights[1],
        temperature=temperature,
        memory_budget=memory_budget,
    )
    ours = torch.autograd.grad(loss, case.leaves[:2])

    truth_case = case.to(torch.float64)
    truth = reference(*truth_case[:3], temperature=temperature)
    true_loss = (weights[0] * truth.logprob + weights[1] * truth.entropy).sum()
    true = torch.autograd.grad(true_loss, truth_case.leaves[:2])
    # Temperatures below 1 enlarge errors.
    assert (logprob - truth.logprob).abs().max() <= 2 * SCORE_ERROR_MAX
    assert (entropy - truth.entropy).abs().max() <= 2 * SCORE_ERROR_MAX
    assert abs(loss.item() - true_loss.item()) <= 400 * SCORE_ERROR_MAX
    for gradient, true_gradient in zip(ours, true, strict=True):
        assert error_of(gradient, true_gradient) <= GRADIENT_ERROR_MAX


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("spread_max", (4.0, 20.0, 150.0))
@pytest.mark.parametrize("memory_budget", (300_000, 1 << 30))
def test_a_policy_gradient_s_loss_is_right_for_flat_and_for_peaked_rows(
    dtype, spread_max, memory_budget
):
    """The largest logit of a row is far above the logits of its first columns, and the target's is far below them."""
    case = make_case(400, 64, 1500, dtype, spread_max=spread_max)
    case.target[::3] = IGNORED
    case.target[1::12] = reference_logits(case.hidden, case.weight).argmax(-1)[1::12]
    advantages = torch.randn(400, generator=seeded(7))
    advantages[2::9] = 1e-6 if dtype == torch.bfloat16 else 0.1  # fp16 has no values below 6e-8.
    loss = linear_logprob_loss(
        *case[:3], logprob_coef=advantages, memory_budget=memory_budget, need_entropy=False
    )[0]
    ours = torch.autograd.grad(loss, case.leaves[:2])

    truth_case = case.to(torch.float64)
    true_loss = (advantages * reference(*truth_case[:3]).logprob).sum()
    true = torch.autograd.grad(true_loss, truth_case.leaves[:2])
    for gradient, true_gradient in zip(ours, true, strict=True):
        assert error_of(gradient, true_gradient) <= GRADIENT_ERROR_MAX
    # Small gradients are as accurate as large ones, because each row has its own factor.
    small = slice(2, None, 9)
    assert error_of(ours[0][small], true[0][small]) <= GRADIENT_ERROR_MAX


def test_rows_with_coefficient_zero_do_not_affect_the_gradients_of_others():
    case = make_case(300, 64, 1500)
    weights = torch.randn(300, generator=seeded(7))
    weights[::4] = 0
    loss = linear_logprob_loss(*case[:3], logprob_coef=weights)[0]
    ours = torch.autograd.grad(loss, case.leaves[:2])

    truth_case = case.to(torch.float64)
    true_loss = (weights * reference(*truth_case[:3]).logprob).sum()
    true = torch.autograd.grad(true_loss, truth_case.leaves[:2])
    assert (ours[0][::4] == 0).all()
    for gradient, true_gradient in zip(ours, true, strict=True):
        assert error_of(gradient, true_gradient) <= GRADIENT_ERROR_MAX


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_class_weights_of_a_large_vocabulary_do_not_overflow(dtype):
    """Regression: fp16 weights of the mean logit were multiplied by the size of the vocabulary."""
    case = make_case(20, 64, 70_000, dtype)
    class_weights = torch.linspace(0.5, 2, 70_000)

    loss = linear_cross_entropy(*case[:3], class_weights=class_weights, label_smoothing=0.1)

    logits = reference_logits(case.hidden, case.weight)
    truth = torch.nn.functional.cross_entropy(
        logits, case.target, class_weights.double(), label_smoothing=0.1
    )
    assert abs(loss.item() - truth.item()) <= 1e-3


@IN_EVERY_MEMORY
@pytest.mark.parametrize("is_ignored", (True, False))
def test_rows_that_are_all_ignored_or_without_gradient_give_exact_zeros(memory, is_ignored):
    case = make_case()
    target = torch.full_like(case.target, IGNORED) if is_ignored else case.target
    scores = linear_logprob(
        case.hidden,
        case.weight,
        target,
        case.bias,
        memory=memory,
        **EVERY_SCORE,
    )
    scores = requested(scores)
    summed = sum(score.sum() for score in scores if score.is_floating_point())
    gradients = torch.autograd.grad(
        summed if is_ignored else summed * 0, (case.hidden, case.weight, case.bias)
    )

    assert not is_ignored or all((score == 0).all() for score in scores)
    assert all((gradient == 0).all() for gradient in gradients)
