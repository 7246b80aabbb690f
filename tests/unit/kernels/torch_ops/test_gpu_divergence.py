"""linear_divergence on a GPU: 16-bit products, kernels for any width, CUDA graphs, and memory."""

import pytest
import torch
from divergence_cases import KINDS, Case, error_of, reference
from gpu_cases import memory_limited_to
from linear_logprob_reference import seeded
from logprobd_ops import linear_divergence, linear_divergence_loss
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GRADIENT_ERROR_MAX = {torch.float32: 1e-4, torch.bfloat16: 4e-3, torch.float16: 1.5e-3}


def make_case(rows=300, vocab=5003, dtype=torch.bfloat16, size=256, gap=0.3, seed=0) -> Case:
    with torch.device("cuda"):
        random = seeded(seed)
        spread = torch.linspace(1, 10, rows).unsqueeze(-1)
        hidden = spread * torch.randn(rows, size, generator=random)
        weight = torch.randn(vocab, size, generator=random) / size**0.5
        teacher_hidden = hidden + gap * spread * torch.randn(rows, size, generator=random)
    tensors = [each.to(dtype) for each in (hidden, weight, teacher_hidden, weight)]
    return Case(tensors[0].requires_grad_(), tensors[1].requires_grad_(), *tensors[2:])


def truth_of(case: Case, weights: Tensor, **options) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    exact = [each.detach().double() for each in case]
    exact_case = Case(*(each.requires_grad_() for each in exact[:2]), *exact[2:])
    divergence, entropy = reference(exact_case, **options)
    gradients = torch.autograd.grad((weights.double() * divergence).sum(), exact_case.leaves)
    return divergence.detach(), entropy.detach(), gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("vocab", (5003, 5056))
def test_values_and_gradients_match_fp64(kind, dtype, vocab):
    case = make_case(vocab=vocab, dtype=dtype)
    weights = torch.rand(300, device="cuda") + 0.5
    options = {"kind": kind, "beta": 0.3, "temperature": 0.8, "student_softcap": 50.0}
    divergence, entropy, gradients = truth_of(case, weights, **options)

    rows = {
        memory: linear_divergence(*case, memory=memory, **options)
        for memory in ("recompute", "cached")
    }
    loss = linear_divergence_loss(*case, row_weights=weights, reduction="sum", **options)

    for ours in (*rows.values(), loss):
        torch.testing.assert_close(ours.divergence.double(), divergence, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    for result in (
        *(torch.autograd.grad(each.divergence, case.leaves, weights) for each in rows.values()),
        torch.autograd.grad(loss.loss, case.leaves),
    ):
        for our, true in zip(result, gradients, strict=True):
            assert our.dtype == dtype
            assert error_of(our, true) < GRADIENT_ERROR_MAX[dtype]


def test_the_budget_bounds_the_memory_of_a_loss():
    case = make_case(rows=2048, vocab=20_000)
    budget = 64 << 20  # logits and gradients of all rows take 410 MB
    linear_divergence_loss(*case, memory_budget=budget).loss.backward()
    for leaf in case.leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    linear_divergence_loss(*case, memory_budget=budget)

    # Beside the budget: the weight's gradient in fp32 and in 16 bits, the hidden states', row values.
    extra = 6 * case.student_weight.numel() + 8 * case.student_hidden.numel() + (8 << 20)
    assert torch.cuda.max_memory_allocated() - before <= budget + extra


@pytest.mark.parametrize("memory", ("recompute", "cached"))
def test_a_replayed_graph_computes_forward_and_backward_of_the_current_inputs(memory):
    case = make_case()
    mask = torch.arange(300, device="cuda") % 3 != 1
    weights = torch.rand(300, device="cuda") + 0.5
    temperature = torch.full((300,), 0.8, device="cuda")

    def step() -> list[Tensor]:
        options = {"mask": mask, "temperature": temperature}
        rows = linear_divergence(*case, memory=memory, **options)
        loss = linear_divergence_loss(*case, row_weights=weights, **options).loss
        return [
            *(each.detach() for each in rows),
            loss.detach(),
            *torch.autograd.grad(rows.divergence, case.leaves, weights),
            *torch.autograd.grad(loss, case.leaves),
        ]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other = make_case(seed=1)
    with torch.no_grad():
        case.student_hidden.copy_(other.student_hidden)
        mask.copy_(mask.roll(1))
        # A graph computes masked rows as well, whose temperatures may be anything.
        temperature[~mask] = torch.tensor([0.0, torch.nan], device="cuda").repeat(50)
    graph.replay()

    expected = step()

    for ours, true in zip(captured, expected, strict=True):
        # The graph computes masked rows as well, so its products have other shapes.
        assert error_of(ours, true) < (1e-5 if ours.dtype == torch.float32 else 4e-3)
    for values in captured[:2]:
        assert (values[~mask] == 0).all()


def test_a_forward_without_memory_for_the_cache_keeps_nothing():
    case = make_case(rows=4096, vocab=60_000, size=64)  # The cache takes 470 MiB.

    def gradients() -> list[Tensor]:
        rows = linear_divergence(*case, memory="cached", memory_budget=64 << 20)
        return [rows.divergence, *torch.autograd.grad(rows.divergence.sum(), case.leaves)]

    expected = [each.detach() for each in gradients()]
    with memory_limited_to(350):
        ours = gradients()

    torch.testing.assert_close(ours[0], expected[0])
    for our, true in zip(ours[1:], expected[1:], strict=True):
        assert error_of(our, true) < 4e-3
