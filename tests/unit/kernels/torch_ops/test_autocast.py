"""Under autocast the operator casts what torch.nn.functional.linear casts, unless it is told not to."""

import pytest
import torch
import torch._dynamo.testing
from gradient_cases import Case, make_case
from linear_logprob_reference import requested
from logprobd_ops import linear_cross_entropy, linear_logprob_loss
from logprobd_ops.linear_logprob import linear_logprob
from torch import Tensor

DEVICE = torch.get_default_device().type
LOWER = (torch.bfloat16, torch.float16)


def autocast(dtype=torch.bfloat16, enabled=True) -> torch.autocast:
    return torch.autocast(DEVICE, dtype=dtype, enabled=enabled)


def scores_and_gradients(case: Case, **options) -> list[Tensor]:
    scores = requested(linear_logprob(*case, **options))
    return [*scores, *torch.autograd.grad(scores[0].sum() + scores[1].sum(), case.leaves)]


def loss_and_gradients(case: Case, **options) -> list[Tensor]:
    loss = linear_logprob_loss(*case, logprob_coef=-1.0, entropy_coef=0.1, **options).loss
    return [loss, *torch.autograd.grad(loss, case.leaves)]


COMPUTE = pytest.mark.parametrize("compute", (scores_and_gradients, loss_and_gradients))


def assert_same_bits(ours: list[Tensor], truth: list[Tensor]) -> None:
    assert all(torch.equal(our, same) for our, same in zip(ours, truth, strict=True))


@pytest.mark.parametrize("lower", LOWER)
@COMPUTE
def test_fp32_parameters_are_scored_in_the_autocast_dtype_and_get_fp32_gradients(compute, lower):
    case = make_case(32, 16, 257).to(torch.float32)
    num_leaves = len(case.leaves)
    *truth, d_hidden, d_weight, d_bias = compute(case.to(lower))

    with autocast(lower):
        ours = compute(case)

    assert_same_bits(ours[:-num_leaves], truth)
    for our, lower_one in zip(ours[-num_leaves:], (d_hidden, d_weight, d_bias), strict=True):
        assert our.dtype == torch.float32 and torch.equal(our, lower_one.float())


@COMPUTE
def test_autocast_false_keeps_the_inputs(compute):
    case = make_case(32, 16, 257).to(torch.float32)
    truth = compute(case)

    with autocast():
        ours = compute(case, autocast=False)

    assert_same_bits(ours, truth)


@COMPUTE
def test_fp64_is_never_cast(compute):
    case = make_case(32, 16, 257)
    truth = compute(case)

    with autocast():
        ours = compute(case)

    assert ours[0].dtype == torch.float64
    assert_same_bits(ours, truth)


CONTEXTS = {
    "none": (),
    "bf16": ((torch.bfloat16, True),),
    "fp16": ((torch.float16, True),),
    "off inside bf16": ((torch.bfloat16, True), (torch.bfloat16, False)),
    "bf16 inside off": ((torch.bfloat16, False), (torch.bfloat16, True)),
    "fp16 inside bf16": ((torch.bfloat16, True), (torch.float16, True)),
}
INPUT_DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("dtypes", INPUT_DTYPES, ids=str)
def test_nested_contexts_cast_as_functional_linear_does(contexts, dtypes):
    wide = make_case(32, 16, 257)
    hidden, weight = (
        leaf.detach().to(dtype) for leaf, dtype in zip(wide.leaves, dtypes, strict=False)
    )
    managers = [autocast(*context) for context in contexts]
    for manager in managers:
        manager.__enter__()
    try:
        lower = torch.get_autocast_dtype(DEVICE) if torch.is_autocast_enabled(DEVICE) else None
        ours = linear_logprob(hidden, weight, wide.target)
        if lower is not None:
            assert torch.nn.functional.linear(hidden, weight).dtype == lower
    finally:
        for manager in reversed(managers):
            manager.__exit__(None, None, None)

    cast = [tensor if lower is None else tensor.to(lower) for tensor in (hidden, weight)]
    assert_same_bits(requested(ours), requested(linear_logprob(*cast, wide.target)))


def test_two_calls_in_one_context_cast_a_parameter_once():
    case = make_case(32, 16, 257).to(torch.float32)
    casts = []

    class Casts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].shape == (257, 16):
                casts.append(function)
            return function(*args, **(kwargs or {}))

    with Casts(), autocast():
        for _ in range(2):
            linear_logprob(case.hidden, case.weight, case.target)

    assert len(casts) == 1


def test_weight_grad_accumulates_for_a_parameter_that_autocast_casts():
    case = make_case(32, 16, 257).to(torch.float32)
    buffer = torch.zeros(257, 16)

    with autocast():
        logprob, *_ = linear_logprob(*case[:3], weight_grad=buffer)
    logprob.sum().backward()

    lower = case.to(torch.bfloat16)
    truth = torch.zeros(257, 16)
    linear_logprob(*lower[:3], weight_grad=truth)[0].sum().backward()
    assert case.weight.grad is None and torch.equal(buffer, truth)


@pytest.mark.parametrize("memory", ("recompute", "cached", "auto"))
def test_a_compiled_caller_has_the_bits_of_eager_under_autocast(memory):
    torch._dynamo.reset()

    def function(hidden, weight, target):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            scores = linear_logprob(hidden, weight, target, memory=memory)
        return scores.logprob.sum() + scores.entropy.sum()

    case = make_case(32, 16, 257).to(torch.float32)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")

    ours = torch.autograd.grad(compiled(*case[:3]), case.leaves[:2])

    assert_same_bits(list(ours), list(torch.autograd.grad(function(*case[:3]), case.leaves[:2])))


def test_a_compiled_caller_is_compiled_again_for_another_autocast_state():
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    hidden, weight, target, _ = make_case(32, 16, 257).to(torch.float32)

    for enabled in (False, True, False):
        with autocast(enabled=enabled):
            assert torch.equal(
                compiled(hidden, weight, target, memory="cached"),
                linear_cross_entropy(hidden, weight, target, memory="cached"),
            )


def test_gradients_are_not_formed_in_the_forward_under_fp16_autocast_unless_asked():
    """They would be rounded to fp16 before the loss scale multiplies them."""
    case = make_case(32, 16, 257).to(torch.float32)
    with autocast(torch.float16):
        loss = linear_cross_entropy(*case[:3])

    # A loss whose gradients were formed in the forward has no second backward.
    for _ in range(2):
        torch.autograd.grad(loss, case.hidden, retain_graph=True)
