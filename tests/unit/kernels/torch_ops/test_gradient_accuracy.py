"""16-bit gradients are rounded once, and large logits keep the accuracy of their differences."""

import pytest
import torch
from gradient_cases import (
    DOUBLE_ERROR_MAX,
    SIXTEEN_BIT_ERROR_MAX,
    Case,
    error_of,
    gradients,
    make_case,
    score,
    true_scores,
    upstream_of,
)
from linear_logprob_reference import seeded
from logprobd_ops.linear_logprob import linear_logprob
from torch import Tensor


def plain_gradients(case: Case, upstream, logits_dtype=None) -> tuple[Tensor, ...]:
    """Returns the gradients by torch, whose logits are rounded to the dtype of hidden and weight."""
    logits = torch.nn.functional.linear(case.hidden, case.weight, case.bias)
    logprobs = torch.log_softmax(logits.to(logits_dtype or logits.dtype), -1)
    logprob = logprobs.gather(-1, case.target.unsqueeze(-1)).squeeze(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return gradients([logprob, entropy], case, upstream)


def errors(case: Case, logits_dtype) -> tuple[list[float], list[float]]:
    """Returns the errors of the operator's gradients and of torch's gradients, for each leaf."""
    upstream = upstream_of(case.target.shape, torch.float32)[:2]
    ours = gradients(score(case)[:2], case, upstream)
    plain = plain_gradients(case, upstream, logits_dtype)
    exact = case.to(torch.float64)
    truth = plain_gradients(exact, [each.double() for each in upstream])
    return (
        [error_of(our, true) for our, true in zip(ours, truth, strict=True)],
        [error_of(their, true) for their, true in zip(plain, truth, strict=True)],
    )


@pytest.mark.parametrize(
    ("rows", "size", "vocab", "dtype"),
    [
        (64, 123, 507, torch.bfloat16),
        (64, 123, 507, torch.float16),
        (200, 64, 2000, torch.bfloat16),
        (512, 16, 500, torch.bfloat16),
        (512, 16, 20_000, torch.bfloat16),
    ],
)
def test_sixteen_bit_gradients_are_rounded_once(rows, size, vocab, dtype):
    """The last size has several blocks of columns (kBlockLogits), which must not affect the result."""
    case = make_case(rows, size, vocab).to(dtype)

    ours, plain = errors(case, torch.float32)

    assert max(ours) <= SIXTEEN_BIT_ERROR_MAX
    assert all(our <= their for our, their in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    ("rows", "size", "vocab", "spread_max"),
    [
        (64, 123, 507, 1.0),
        (64, 123, 507, 20.0),
        (64, 896, 500, 4.0),
        (512, 16, 500, 4.0),
        (512, 16, 20_000, 4.0),
    ],
)
def test_fp32_gradients_are_about_as_accurate_as_those_of_torch(rows, size, vocab, spread_max):
    case = make_case(rows, size, vocab, spread_max=spread_max).to(torch.float32)

    ours, plain = errors(case, torch.float32)

    assert all(our <= 2 * their for our, their in zip(ours, plain, strict=True)), (ours, plain)


@pytest.mark.parametrize(
    ("level", "factor"), [(0, 1), (0, 8), (0, 32), (1000, 1), (1000, 8), (65_536, 1)]
)
def test_fp32_gradients_of_exact_logits_are_about_as_accurate_as_those_of_torch(level, factor):
    """Only the softmax rounds. At 65,536 lse has steps of 0.008, so the differences of logits must be used."""
    generator = seeded(0)
    hidden = factor * torch.randint(-4, 5, (64, 16), generator=generator).float()
    weight = torch.randint(-4, 5, (257, 16), generator=generator).float() / 32
    target = torch.randint(257, (64,), generator=generator)
    bias = torch.full((257,), float(level))
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]

    ours, plain = errors(Case(leaves[0], leaves[1], target, leaves[2]), torch.float32)

    assert all(our <= 2 * their for our, their in zip(ours, plain, strict=True)), (ours, plain)


@pytest.mark.parametrize("temperature", (0.1, 0.7, 1e-3))
def test_large_logits_keep_the_accuracy_of_their_differences_at_any_temperature(temperature):
    """Regression: with lse and 1 / temperature rounded to fp32 the error was 5e-3."""
    generator = seeded(0)
    hidden = 1000.0 * torch.randint(-4, 5, (64, 16), generator=generator)
    weight = torch.randint(-4, 5, (257, 16), generator=generator) / 32.0
    target = torch.randint(257, (64,), generator=generator)
    truth = weight.double().requires_grad_()
    log_p = torch.log_softmax(hidden.double() @ truth.T / temperature, -1)
    log_p.gather(1, target[:, None]).sum().backward()
    weight.requires_grad_()

    linear_logprob(hidden, weight, target, temperature=temperature)[0].sum().backward()

    assert error_of(weight.grad, truth.grad) <= 1e-6


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_more_rows_than_a_block_holds(dtype):
    """kBlockRows is 32,768."""
    few = make_case(1000, 8, 20).to(dtype)
    times = 33
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    upstream = upstream_of(1000, wide)
    many = Case(few.hidden.repeat(times, 1), few.weight, few.target.repeat(times), few.bias)

    ours = gradients(score(many), few, [each.repeat(times) for each in upstream])

    exact = few.to(torch.float64)
    truth = gradients(true_scores(exact), exact, [each.double() * times for each in upstream])
    bound = DOUBLE_ERROR_MAX if dtype == torch.float64 else SIXTEEN_BIT_ERROR_MAX
    assert max(error_of(our, true) for our, true in zip(ours, truth, strict=True)) <= bound


@pytest.mark.parametrize("hidden_dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("weight_dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_gradients_have_the_dtypes_of_their_inputs(hidden_dtype, weight_dtype):
    wide = make_case(32, 33, 257)
    leaves = [
        leaf.detach().to(dtype).requires_grad_()
        for leaf, dtype in zip(
            wide.leaves, (hidden_dtype, weight_dtype, torch.float32), strict=True
        )
    ]
    case = Case(leaves[0], leaves[1], wide.target, leaves[2])
    upstream = upstream_of(32, torch.float32)

    ours = gradients(score(case), case, upstream)

    truth = gradients(true_scores(case), case, [each.double() for each in upstream])
    for our, true, leaf in zip(ours, truth, leaves, strict=True):
        assert our.dtype == leaf.dtype
        bound = 2e-5 if leaf.dtype == torch.float32 else SIXTEEN_BIT_ERROR_MAX
        assert error_of(our, true) <= bound


# weight_grad.


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("is_transposed", (False, True))
def test_weight_grad_accumulates_two_passes_without_rounding_to_16_bits(dtype, is_transposed):
    case = make_case(64, 33, 257).to(dtype)
    upstream = upstream_of(64, torch.float32)
    start = torch.linspace(-1, 1, 257 * 33).view(257, 33)
    buffer = start.T.contiguous().T if is_transposed else start.clone()

    for _ in range(2):
        torch.autograd.backward(score(case, weight_grad=buffer), upstream)

    assert case.weight.grad is None
    exact = case.to(torch.float64)
    truth = gradients(true_scores(exact), exact, [each.double() for each in upstream])
    # On a GPU the gradient of logits is rounded to 16 bits for the products, but the buffer never is.
    is_rounded = dtype == torch.bfloat16 and case.hidden.is_cuda
    bound = SIXTEEN_BIT_ERROR_MAX if is_rounded else 2e-5
    assert error_of(buffer - start, 2 * truth[1]) <= bound
    assert error_of(case.hidden.grad, 2 * truth[0]) <= SIXTEEN_BIT_ERROR_MAX


def test_weight_grad_is_not_touched_if_the_weight_needs_no_gradient():
    case = make_case().to(torch.float32)
    case.weight.requires_grad_(False)
    buffer = torch.zeros(200, 9)

    score(case, weight_grad=buffer)[0].sum().backward()

    assert (buffer == 0).all()
    assert case.hidden.grad is not None


WRONG_BUFFERS = {
    "another shape": torch.zeros(9, 200),
    "fewer rows": torch.zeros(199, 9),
    "bfloat16": torch.zeros(200, 9, dtype=torch.bfloat16),
    "float64": torch.zeros(200, 9, dtype=torch.float64),
    "expanded": torch.zeros(1, 9).expand(200, 9),
    "another device": torch.zeros(200, 9, device="meta"),
    "with a gradient": torch.zeros(200, 9, requires_grad=True),
}


@pytest.mark.parametrize("buffer", WRONG_BUFFERS)
def test_the_forward_refuses_a_wrong_weight_grad(buffer):
    case = make_case().to(torch.float32)

    with pytest.raises(ValueError, match="weight_grad"):
        score(case, weight_grad=WRONG_BUFFERS[buffer])
