"""Tests of fp32 and fp16 hidden states with a bf16 weight. GPUs of compute capability 8.0 or later multiply them as
bf16 splits in fused kernels; the same tests run on other devices."""

import pytest
import torch
from gradient_cases import IGNORED, OPTIONS, OUTPUTS, Case, error_of, make_case
from gradient_cases import SIXTEEN_BIT_ERROR_MAX as GRADIENT_ERROR_MAX
from linear_logprob_reference import reference, requested, seeded
from logprobd_ops import (
    linear_cross_entropy,
    linear_divergence,
    linear_divergence_loss,
    linear_logprob_loss,
)
from logprobd_ops.linear_logprob import linear_logprob

HIDDEN_DTYPES = (torch.float32, torch.float16)
IN_EVERY_MEMORY = pytest.mark.parametrize("memory", ("recompute", "cached"))
SCORE_ERROR_MAX = 1e-4
# Of many rows. With rounded hidden states the error of the weight's gradient would be 2.9e-3.
AVERAGE_ERROR_MAX = 2.5e-3


def mixed_case(hidden_dtype, rows=11, size=64, vocab=200, spread_max=4.0) -> Case:
    wide = make_case(rows, size, vocab, torch.float32, spread_max)
    hidden = wide.hidden.detach().to(hidden_dtype).requires_grad_()
    weight, bias = (leaf.detach().bfloat16().requires_grad_() for leaf in wide.leaves[1:])
    return Case(hidden, weight, wide.target, bias)


def assert_right(case: Case, bias=True, outputs=OUTPUTS, memory="recompute", **options) -> None:
    scores = linear_logprob(
        *case[: 3 + bias],
        return_mean_logit="mean_logit" in outputs,
        memory=memory,
        **options,
    )
    exact = case.to(torch.float64)
    options.pop("hidden_splits", None)
    truth = reference(*exact[: 3 + bias], **options)
    ours = [getattr(scores, name) for name in outputs]
    true = [getattr(truth, name) for name in outputs]
    for name, our, same in zip(outputs, ours, true, strict=True):
        assert (our.double() - same).abs().max() <= SCORE_ERROR_MAX, name
    generator = seeded(5)
    upstream = [torch.randn(our.shape, generator=generator) for our in ours]
    leaves, true_leaves = case.leaves[: 2 + bias], exact.leaves[: 2 + bias]
    gradients = torch.autograd.grad(ours, leaves, upstream)
    true_gradients = torch.autograd.grad(true, true_leaves, [each.double() for each in upstream])
    for gradient, true_gradient, leaf in zip(gradients, true_gradients, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        assert error_of(gradient, true_gradient) <= GRADIENT_ERROR_MAX


@pytest.mark.parametrize("hidden_dtype", HIDDEN_DTYPES)
@pytest.mark.parametrize(
    ("rows", "size", "vocab"),
    [(1, 8, 20), (7, 64, 191), (129, 72, 193), (300, 200, 2000), (8_192 + 300, 16, 400)],
)
@IN_EVERY_MEMORY
def test_every_size(rows, size, vocab, hidden_dtype, memory):
    case = mixed_case(hidden_dtype, rows, size, vocab)

    assert_right(case, bias=False, outputs=OUTPUTS[:3], memory=memory)


@pytest.mark.parametrize("hidden_dtype", HIDDEN_DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@IN_EVERY_MEMORY
def test_every_option(name, hidden_dtype, memory):
    case = mixed_case(hidden_dtype)
    case.target[:] %= OPTIONS[name].get("vocab_valid", 200)
    case.target[[2, 7]] = IGNORED

    assert_right(case, memory=memory, **OPTIONS[name])


@pytest.mark.parametrize("hidden_splits", (2, 3))
def test_the_number_of_splits_is_an_option(hidden_splits):
    case = mixed_case(torch.float32, rows=129, size=256, vocab=507)

    assert_right(case, hidden_splits=hidden_splits)


def test_three_splits_keep_all_bits_of_fp32():
    """Two values cancel but for their last bits, which two splits do not have."""
    last_bits = torch.tensor([[0.0, 1.0], [3.0, 1.0], [2.0, 0.0]])
    hidden = torch.zeros(3, 8)
    hidden[:, :2] = 2.0**8 * (1 + 2.0**-9 + 2.0**-20 * last_bits)
    weight = torch.zeros(4, 8)
    weight[:, 0] = 4096.0 * torch.tensor([0.0, 1.0, 2.0, -1.0])
    weight[:, 1] = -weight[:, 0]
    weight, target = weight.bfloat16(), torch.tensor([0, 1, 3])

    logprob, *_ = linear_logprob(hidden, weight, target, hidden_splits=3)

    assert (logprob - reference(hidden, weight, target).logprob).abs().max() <= SCORE_ERROR_MAX


@pytest.mark.parametrize("hidden_dtype", HIDDEN_DTYPES)
def test_gradients_of_many_rows_are_as_accurate_as_those_of_bf16_hidden_states(hidden_dtype):
    case = mixed_case(hidden_dtype, rows=300, size=200, vocab=2000)
    exact = case.to(torch.float64)
    true = torch.autograd.grad(reference(*exact[:3]).logprob.sum(), exact.leaves[:2])

    logprob, *_ = linear_logprob(*case[:3], memory="recompute")
    ours = torch.autograd.grad(logprob.sum(), case.leaves[:2])

    for gradient, true_gradient in zip(ours, true, strict=True):
        assert error_of(gradient, true_gradient) <= AVERAGE_ERROR_MAX


@pytest.mark.parametrize("hidden_dtype", HIDDEN_DTYPES)
@pytest.mark.parametrize("memory_budget", (0, 300_000, 1 << 30))
@pytest.mark.parametrize("entropy_coef", (None, 0.1))
def test_a_loss_with_gradients_in_the_forward(hidden_dtype, memory_budget, entropy_coef):
    case = mixed_case(hidden_dtype, rows=300, size=64, vocab=507, spread_max=20.0)
    case.target[::3] = IGNORED
    advantage = torch.linspace(-1, 1, 300)
    loss = linear_logprob_loss(
        *case[:3],
        logprob_coef=advantage,
        entropy_coef=entropy_coef,
        memory_budget=memory_budget,
    ).loss
    ours = torch.autograd.grad(loss, case.leaves[:2])

    exact = case.to(torch.float64)
    truth = reference(*exact[:3])
    true_loss = (advantage * truth.logprob).sum() + (entropy_coef or 0) * truth.entropy.sum()
    true = torch.autograd.grad(true_loss, exact.leaves[:2])
    assert abs(loss.item() - true_loss.item()) <= 300 * SCORE_ERROR_MAX
    for gradient, true_gradient, leaf in zip(ours, true, case.leaves, strict=False):
        assert gradient.dtype == leaf.dtype
        assert error_of(gradient, true_gradient) <= GRADIENT_ERROR_MAX


@pytest.mark.parametrize("hidden_dtype", HIDDEN_DTYPES)
def test_weight_grad_is_a_sum_in_fp32(hidden_dtype):
    case = mixed_case(hidden_dtype, rows=64, size=64, vocab=257)
    buffer = torch.ones(257, 64)
    for _ in range(2):
        linear_logprob(*case[:3], weight_grad=buffer)[0].sum().backward()

    exact = case.to(torch.float64)
    true = torch.autograd.grad(reference(*exact[:3]).logprob.sum(), exact.weight)[0]
    assert error_of(buffer - 1, 2 * true) <= AVERAGE_ERROR_MAX


@pytest.mark.parametrize("layout", ("rows apart", "transposed", "offset by one"))
@pytest.mark.parametrize("hidden_dtype", HIDDEN_DTYPES)
def test_any_layout_of_hidden(layout, hidden_dtype):
    case = mixed_case(hidden_dtype, rows=70)
    expected = requested(linear_logprob(*case[:3]))
    plain = case.hidden.detach()
    if layout == "transposed":
        hidden = plain.T.contiguous().T
    elif layout == "rows apart":
        hidden = torch.nn.functional.pad(plain, (0, 5))[:, :-5]
    else:
        hidden = torch.nn.functional.pad(plain.flatten(), (1, 0))[1:].view(plain.shape)

    ours = requested(linear_logprob(hidden, case.weight, case.target))

    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


needs_fused = pytest.mark.skipif(
    not torch.cuda.is_available()
    or not torch.ops.logprobd.is_fused(
        torch.device("cuda"),
        hidden_dtype=torch.bfloat16,
        weight_dtype=torch.bfloat16,
        hidden_size=64,
    ),
    reason="needs the fused kernels",
)


@needs_fused
@pytest.mark.parametrize("hidden_dtype", HIDDEN_DTYPES)
def test_gpus_with_fused_kernels_use_them(hidden_dtype):
    device = torch.device("cuda")
    inputs = {"hidden_dtype": hidden_dtype, "weight_dtype": torch.bfloat16, "hidden_size": 64}
    assert torch.ops.logprobd.is_fused(device, **inputs)
    assert torch.ops.logprobd.slow_path_reason(device, **inputs) == ""


@needs_fused
@pytest.mark.parametrize(
    ("hidden", "weight", "size", "remedy"),
    [
        (torch.float32, torch.float32, 64, "cast the weight to bfloat16 or run under"),
        (torch.bfloat16, torch.float32, 64, "cast the weight to bfloat16 or run under"),
        (torch.bfloat16, torch.float16, 64, "cast hidden to float16 or the weight to bfloat16"),
        (torch.float64, torch.bfloat16, 64, "unless the results must be float64"),
        (torch.bfloat16, torch.bfloat16, 63, "the hidden size is 63: pad"),
    ],
)
def test_the_reason_of_the_slow_path_says_what_to_change(hidden, weight, size, remedy):
    device = torch.device("cuda")
    inputs = {"hidden_dtype": hidden, "weight_dtype": weight, "hidden_size": size}
    assert not torch.ops.logprobd.is_fused(device, **inputs)
    assert remedy in torch.ops.logprobd.slow_path_reason(device, **inputs)


@needs_fused
def test_the_slow_path_warns_once_for_each_reason(capfd):
    hidden, weight = torch.ones(2, 1237, device="cuda"), torch.ones(5, 1237, device="cuda")
    target = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(2):
        linear_logprob(hidden.bfloat16(), weight.bfloat16(), target)

    assert capfd.readouterr().err.count("the hidden size is 1237") == 1


# No other test gives a teacher these dtypes, so no other test has used up these warnings.
@needs_fused
@pytest.mark.parametrize(
    ("function", "hidden", "weight", "remedy"),
    [
        (linear_divergence, torch.float32, torch.bfloat16, "cast teacher_hidden to bfloat16"),
        (linear_divergence_loss, torch.bfloat16, torch.float16, "cast teacher_hidden to float16"),
        (linear_divergence, torch.bfloat16, torch.float32, "cast both to bfloat16 or run under"),
        (linear_divergence, torch.bfloat16, torch.float64, "unless the results must be float64"),
    ],
)
def test_a_divergence_without_products_in_sixteen_bits_warns_once_for_each_reason(
    capfd, function, hidden, weight, remedy
):
    rows, head = torch.ones(2, 8, device="cuda"), torch.ones(5, 8, device="cuda")
    for _ in range(2):
        function(rows.bfloat16(), head.bfloat16(), rows.to(hidden), head.to(weight))

    warnings = capfd.readouterr().err
    assert warnings.count("linear_divergence does not multiply in 16 bits") == 1
    assert remedy in warnings


def test_other_devices_have_no_slow_path():
    inputs = {"hidden_dtype": torch.float32, "weight_dtype": torch.float32, "hidden_size": 63}
    assert torch.ops.logprobd.slow_path_reason(torch.device("cpu"), **inputs) == ""


@needs_fused
def test_a_mean_loss_of_fp32_parameters_under_autocast_is_that_of_bf16_parameters():
    case = make_case(300, 64, 507, torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = linear_cross_entropy(*case[:3], gradients_in_forward=True)

    lower = case.to(torch.bfloat16)
    assert torch.equal(ours, linear_cross_entropy(*lower[:3], gradients_in_forward=True))
