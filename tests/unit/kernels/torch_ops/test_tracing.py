"""Tracing knows the shapes of the operator's results, and compiled callers get the bits of eager ones."""

from typing import NamedTuple

import pytest
import torch
import torch._dynamo.testing
from linear_logprob_reference import requested, seeded
from logprobd_ops.linear_logprob import linear_logprob
from raw_operator import backward_arguments, raw_arguments, raw_scores
from score_cases import EVERY_SCORE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

IGNORED = -100


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor
    temperature: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias


def make_case(rows=12, size=17, vocab=257, dtype=torch.float32, needs_grad=True, seed=0) -> Case:
    """Returns rows whose logits have standard deviations from 1 (flat) to 20 (peaked). One row is ignored."""
    generator = seeded(seed)
    spread = torch.linspace(1, 20, rows).unsqueeze(-1)
    hidden = spread * torch.randn(rows, size, generator=generator)
    weight = torch.randn(vocab, size, generator=generator) / size**0.5
    bias = torch.randn(vocab, generator=generator)
    target = torch.randint(vocab, (rows,), generator=generator)
    target[rows // 2] = IGNORED
    leaves = [each.to(dtype).requires_grad_(needs_grad) for each in (hidden, weight, bias)]
    return Case(leaves[0], leaves[1], target, leaves[2], torch.linspace(0.3, 2, rows))


def arguments_of(
    case: Case,
    *,
    bias=True,
    row_temperature=False,
    mean_logit_weights=False,
    **options,
) -> dict:
    """Returns the arguments of torch.ops.logprobd.linear_logprob. `options` are those of raw_arguments."""
    arguments = raw_arguments(
        *case[:3],
        case.bias if bias else None,
        temperature=case.temperature if row_temperature else 0.75,
        scale=1.5,
        mean_logit_weights=torch.linspace(0, 1, case.weight.shape[0])
        if mean_logit_weights
        else None,
        **options,
    )
    return {**arguments, "weight_grad": None}


SAMPLES = {
    "plain": {},
    "without bias": {"bias": False},
    "temperature per row": {"row_temperature": True},
    "all outputs": {**EVERY_SCORE, "mean_logit_weights": True},
    "logprob alone": {"need_entropy": False},
    "softcap": {"softcap": 10.0},
    "padding": {"vocab_valid": 256},
    "cached logits": {"keep_logits": 1},
}
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("needs_grad", (False, True))
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_operator_passes_opcheck(sample, needs_grad, check):
    options = SAMPLES[sample]
    case = make_case(needs_grad=needs_grad)
    if "vocab_valid" in options:
        case.target.clamp_(max=options["vocab_valid"] - 1)
    if "keep_logits" in options:
        # No row is ignored, because an ignored row leaves a row of the cache unwritten.
        case.target.clamp_(min=0)

    torch.library.opcheck(
        torch.ops.logprobd.linear_logprob.default,
        args=(),
        kwargs=arguments_of(case, **options),
        test_utils=check,
    )


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_the_operator_passes_opcheck_in_other_dtypes(dtype):
    torch.library.opcheck(
        torch.ops.logprobd.linear_logprob.default,
        args=(),
        kwargs=arguments_of(make_case(dtype=dtype)),
    )


def raw_backward_arguments(needs) -> dict:
    inputs, options = make_case(needs_grad=False)[:4], {"temperature": 0.75, "scale": 1.5}
    saved = raw_scores(*inputs, **options) | {"cache": None}
    upstream = {"logprob": torch.linspace(-1, 1, 12), "entropy": torch.linspace(1, 2, 12)}
    return backward_arguments(upstream, saved, *inputs, needs=needs, **options)


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, True), (False, True, False)])
def test_the_backward_operator_passes_opcheck(needs):
    torch.library.opcheck(
        torch.ops.logprobd.linear_logprob_backward.default,
        args=(),
        kwargs=raw_backward_arguments(needs),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_the_accumulating_backward_operator_passes_opcheck():
    torch.library.opcheck(
        torch.ops.logprobd.linear_logprob_backward_into.default,
        args=(torch.ones(257, 17),),
        kwargs=raw_backward_arguments((True, True, True)),
        test_utils=("test_schema", "test_faketensor"),
    )


# Compiled callers.


def loss_of(hidden, weight, target, bias, temperature):
    scores = linear_logprob(
        hidden,
        weight,
        target,
        bias,
        temperature=temperature,
        **EVERY_SCORE,
    )
    loss = scores.logprob.sum() + 0.5 * scores.entropy.sum() - 0.25 * scores.lse.sum()
    return loss + 2 * scores.mean_logit.sum(), requested(scores)


def run(function, case: Case) -> list[Tensor]:
    """Returns the scores and gradients."""
    loss, scores = function(*case)
    return [*scores, *torch.autograd.grad(loss, case.leaves)]


def assert_same_bits(ours: list[Tensor], truth: list[Tensor]) -> None:
    for our, same in zip(ours, truth, strict=True):
        assert our.dtype == same.dtype
        assert torch.equal(our, same)


BACKENDS = ("aot_eager", "inductor")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("eager", torch.float32),
        ("aot_eager", torch.float32),
        ("aot_eager", torch.bfloat16),
    ],
)
def test_a_compiled_caller_gets_the_bits_of_eager(backend, dtype):
    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    case = make_case(dtype=dtype)

    assert_same_bits(run(compiled, case), run(loss_of, case))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_caller_with_one_temperature(backend):
    def function(hidden, weight, target):
        return linear_logprob(
            hidden, weight, target, temperature=0.7, softcap=10.0, vocab_valid=250
        )

    case = make_case()
    case.target.clamp_(max=249)
    compiled = torch.compile(function, fullgraph=True, backend=backend)

    assert_same_bits(requested(compiled(*case[:3])), requested(function(*case[:3])))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compilation_serves_all_numbers_of_rows(backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter, dynamic=True)

    run(compiled, make_case(12))
    compilations = counter.frame_count

    for rows in (7, 33, 200):
        case = make_case(rows)
        assert_same_bits(run(compiled, case), run(loss_of, case))

    assert counter.frame_count == compilations


def test_a_compiled_module_under_activation_checkpointing():
    case = make_case()

    def function(*arguments):
        return torch.utils.checkpoint.checkpoint(loss_of, *arguments, use_reentrant=False)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")

    assert_same_bits(run(compiled, case), run(loss_of, case))


def test_a_compiled_caller_may_accumulate_into_weight_grad():
    def function(hidden, weight, target, weight_grad):
        return linear_logprob(hidden, weight, target, weight_grad=weight_grad)[0].sum()

    case = make_case()
    buffers = [torch.ones(257, 17), torch.ones(257, 17)]
    compiled = torch.compile(function, backend="aot_eager")

    function(case.hidden, case.weight, case.target, buffers[0]).backward()
    hidden_grad, case.hidden.grad = case.hidden.grad, None
    compiled(case.hidden, case.weight, case.target, buffers[1]).backward()

    assert torch.equal(buffers[0], buffers[1])
    assert torch.equal(hidden_grad, case.hidden.grad)
    assert case.weight.grad is None


# Fake tensors.


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float64, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("shape", ((), (12,), (3, 4), (0,)))
@pytest.mark.parametrize("need_entropy", (True, False))
def test_fake_scores_have_the_shapes_and_dtypes_of_real_ones(dtypes, shape, need_entropy):
    def scores():
        hidden = torch.ones(*shape, 17, dtype=dtypes[0])
        weight = torch.ones(257, 17, dtype=dtypes[1])
        target = torch.zeros(shape, dtype=torch.int32)
        options = {**EVERY_SCORE, "need_entropy": need_entropy}
        return requested(linear_logprob(hidden, weight, target, **options))

    real = scores()
    with FakeTensorMode():
        fake = scores()

    assert [(s.shape, s.dtype, s.device, s.stride()) for s in fake] == [
        (s.shape, s.dtype, s.device, s.stride()) for s in real
    ]


def test_fake_gradients_have_the_shapes_and_dtypes_of_real_ones():
    with FakeTensorMode() as mode:
        case = Case(*[mode.from_tensor(each) for each in make_case(dtype=torch.bfloat16)])
        fake = run(loss_of, case)

    real = run(loss_of, make_case(dtype=torch.bfloat16))

    assert [(s.shape, s.dtype, s.stride()) for s in fake] == [
        (s.shape, s.dtype, s.stride()) for s in real
    ]


# Modes.


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_without_gradients_the_scores_are_the_same_and_nothing_is_saved(mode):
    case = make_case()
    _, truth = loss_of(*case)

    with mode():
        _, scores = loss_of(*case)

    assert_same_bits(list(scores), list(truth))
    assert not any(each.requires_grad for each in scores)
    assert all(each.grad_fn is None for each in scores)


def test_a_compiled_caller_under_no_grad():
    case = make_case()
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    _, truth = loss_of(*case)

    with torch.no_grad():
        _, scores = compiled(*case)

    assert_same_bits(list(scores), list(truth))


def test_inference_tensors_are_scored():
    with torch.inference_mode():
        case = make_case(needs_grad=False)
    _, scores = loss_of(*case)
    _, truth = loss_of(*make_case(needs_grad=False))

    assert_same_bits(list(scores), list(truth))
