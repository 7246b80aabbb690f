"""Cached logits give the bits of recomputed logits, and are cached exactly when they should be."""

import gc
import weakref

import pytest
import torch
from gradient_cases import (
    IGNORED,
    OPTIONS,
    Case,
    error_of,
    gradients,
    make_case,
    score,
    true_scores,
    upstream_of,
)
from linear_logprob_reference import seeded
from logprobd_ops._memory import GIB, budget_bytes
from logprobd_ops.linear_logprob import linear_logprob
from logprobd_ops.losses import linear_cross_entropy
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def exact_case(rows=40, size=16, vocab=400) -> Case:
    """Returns factors of few bits, so that dot products are exact for any number of rows."""
    generator = seeded(0)
    hidden = torch.randint(-4, 5, (rows, size), generator=generator).float()
    weight = torch.randint(-4, 5, (vocab, size), generator=generator).float() / 8
    bias = torch.randint(-4, 5, (vocab,), generator=generator).float() / 4
    target = torch.randint(vocab, (rows,), generator=generator)
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]
    return Case(leaves[0], leaves[1], target, leaves[2])


def wide_upstream(case: Case) -> list[Tensor]:
    is_double = case.hidden.dtype == torch.float64
    return upstream_of(case.target.shape, torch.float64 if is_double else torch.float32)


def assert_kept_logits_give_the_same_bits(case: Case, upstream=None, **options) -> None:
    upstream = wide_upstream(case) if upstream is None else upstream
    cached, recomputed = (score(case, memory=m, **options) for m in ("cached", "recompute"))
    assert all(torch.equal(our, same) for our, same in zip(cached, recomputed, strict=True))

    ours = gradients(cached, case, upstream)

    truth = gradients(recomputed, case, upstream)
    assert all(torch.equal(our, same) for our, same in zip(ours, truth, strict=True))


class SavedCaches:
    """Counts caches of logits among the tensors that autograd saves inside the context."""

    def __init__(self, case: Case) -> None:
        self._rows_and_columns = (case.target.numel(), case.weight.shape[0])
        self._holders: list[weakref.ref] = []

    def __enter__(self) -> "SavedCaches":
        class Holder:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor = tensor

        def pack(tensor: Tensor) -> Holder:
            holder = Holder(tensor)
            if tuple(tensor.shape) == self._rows_and_columns:
                self._holders.append(weakref.ref(holder))
            return holder

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def logits(self) -> int:
        """Number of caches that still exist."""
        gc.collect()
        return sum(holder() is not None for holder in self._holders)


# Bits.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_cached_logits_give_the_bits_of_recomputed_logits(name, dtype):
    case = make_case().to(dtype)
    case.target[:] %= OPTIONS[name].get("vocab_valid", 200)
    case.target[[2, 7]] = IGNORED

    assert_kept_logits_give_the_same_bits(case, **OPTIONS[name])


@pytest.mark.parametrize("name", ("plain", "all together"))
def test_cached_logits_give_the_reference_gradient(name):
    case = make_case()
    case.target[:] %= OPTIONS[name].get("vocab_valid", 200)
    case.target[[0, 7]] = IGNORED
    upstream = upstream_of(11)
    for each in upstream:
        each[[1, 5, 10]] = 0

    ours = gradients(score(case, memory="cached", **OPTIONS[name]), case, upstream)

    truth = gradients(true_scores(case, **OPTIONS[name]), case, upstream)
    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("ignored", ([], [0], [39], [3, 4, 20]))
@pytest.mark.parametrize("unreached", ([], [0], [5, 39], [1, 2, 3, 21, 38], list(range(39))))
def test_rows_that_the_backward_skips_do_not_shift_the_others(ignored, unreached):
    case = exact_case()
    case.target[ignored] = IGNORED
    upstream = wide_upstream(case)
    for each in upstream:
        each[unreached] = 0

    assert_kept_logits_give_the_same_bits(case, upstream)


def test_a_single_upstream_gradient():
    case = exact_case()
    case.target[7] = IGNORED
    upstream = wide_upstream(case)[0]
    cached, recomputed = (linear_logprob(*case, memory=m)[0] for m in ("cached", "recompute"))

    ours = gradients(cached, case, upstream)

    truth = gradients(recomputed, case, upstream)
    assert all(torch.equal(our, same) for our, same in zip(ours, truth, strict=True))


@pytest.mark.parametrize(("rows", "vocab"), [(33_500, 50), (700, 8_000)])
def test_blocks_of_rows_and_columns_do_not_affect_results(rows, vocab):
    """kBlockRows is 32,768, and kBlockLogits is 4 Mi."""
    case = exact_case(rows, 8, vocab)
    case.target[::7] = IGNORED
    upstream = wide_upstream(case)
    for each in upstream:
        each[1::5] = 0

    assert_kept_logits_give_the_same_bits(case, upstream)


def test_only_ignored_rows_and_no_rows():
    for case in (make_case(0), make_case()):
        case.target[:] = IGNORED
        assert_kept_logits_give_the_same_bits(case)


# Lifetime of the cache.


@pytest.mark.parametrize("retain_graph", (False, True))
def test_the_cache_is_freed_by_the_backward_unless_the_graph_is_retained(retain_graph):
    case = make_case()
    with SavedCaches(case) as saved:
        scores = score(case, memory="cached")
        assert saved.logits == 1

        torch.autograd.grad(scores, case.leaves, upstream_of(11), retain_graph=retain_graph)

        assert saved.logits == int(retain_graph)


def test_a_second_backward_gives_the_same_bits():
    case = make_case(64, 33, 507).to(torch.float32)
    scores, upstream = score(case, memory="cached"), wide_upstream(case)

    first = torch.autograd.grad(scores, case.leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(scores, case.leaves, upstream)

    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_nothing_is_cached_by_default():
    case = make_case()
    with SavedCaches(case) as saved:
        scores = score(case)

    assert saved.logits == 0 and scores[0].requires_grad


# Choice of the mode.

BYTES = 11 * 200 * 8  # size of the case's logits in fp64


@pytest.mark.parametrize(("budget", "is_cached"), [(BYTES - 1, False), (BYTES, True), (None, True)])
def test_auto_caches_logits_that_fit_the_budget(budget, is_cached):
    case = make_case()
    with SavedCaches(case) as saved:
        score_kept = score(case, memory="auto", memory_budget=budget)

        assert saved.logits == int(is_cached)
    assert score_kept[0].requires_grad


def test_cached_ignores_the_budget():
    case = make_case()
    with SavedCaches(case) as saved:
        _alive = score(case, memory="cached", memory_budget=0)

        assert saved.logits == 1


def cache_of(case: Case, keep_logits: int) -> Tensor:
    """Returns the cache of the operator."""
    arguments = (1.0, 1.0, 0.0, IGNORED, 0, -1, "", False, False, True, False, False)
    return torch.ops.logprobd.linear_logprob(*case, None, None, *arguments, keep_logits, None)[-1]


def test_the_operator_returns_the_cache():
    case = make_case().to(torch.bfloat16)

    cache, empty = cache_of(case, 1), cache_of(case, 0)

    assert cache.shape == (11, 200) and cache.dtype == torch.float32
    assert not cache.requires_grad
    assert empty.numel() == 0


@pytest.mark.parametrize("keep_logits", (1, 2))
@pytest.mark.parametrize("vocab", (1, 192, 200, 151_936))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_the_library_knows_the_size_of_the_cache(keep_logits, vocab, dtype):
    hidden = torch.empty(7, 16, dtype=dtype, device="meta")
    weight = torch.empty(vocab, 16, dtype=dtype, device="meta")
    case = Case(hidden, weight, torch.empty(7, dtype=torch.int64, device="meta"), None)

    row_bytes = torch.ops.logprobd.logit_cache_row_bytes(keep_logits, dtype, dtype, vocab)

    assert cache_of(case, keep_logits).nbytes == 7 * row_bytes


def test_the_fused_kernels_do_not_support_a_cpu():
    cpu = torch.device("cpu")
    assert not torch.ops.logprobd.is_fused(cpu, torch.bfloat16, torch.bfloat16, 64)


@pytest.mark.parametrize("needed", (0, 1, 2))
def test_logits_are_cached_if_any_input_needs_a_gradient(needed):
    case = make_case()
    for i, leaf in enumerate(case.leaves):
        leaf.requires_grad_(i == needed)

    with SavedCaches(case) as saved:
        _alive = score(case, memory="cached")

        assert saved.logits == 1


def test_nothing_is_cached_if_no_backward_can_follow(monkeypatch):
    case = make_case()
    seen = []
    operator = torch.ops.logprobd.linear_logprob
    monkeypatch.setattr(
        torch.ops.logprobd,
        "linear_logprob",
        lambda *arguments: seen.append(operator(*arguments)[-1].numel()) or operator(*arguments),
    )

    with torch.no_grad():
        score(case, memory="cached")
    score(Case(*[each.detach() for each in case]), memory="cached")

    assert len(seen) >= 2 and not any(seen)


@pytest.mark.parametrize(("free_gib", "budget_gib"), [(100, 4), (16, 2), (8, 1), (2, 1)])
def test_the_default_budget_is_an_eighth_of_the_free_memory(monkeypatch, free_gib, budget_gib):
    monkeypatch.setattr(torch.ops.logprobd, "free_bytes", lambda _device, _enough: free_gib * GIB)

    assert budget_bytes(None, torch.device("cuda", 0)) == budget_gib * GIB


def test_the_default_budget_on_a_cpu_is_the_maximum():
    assert budget_bytes(None, torch.device("cpu")) == 4 * GIB


# Compiled callers.


@pytest.mark.parametrize("memory", ("cached", "auto"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("is_dynamic", (False, True))
def test_a_compiled_caller_gets_the_bits_of_eager(memory, dtype, is_dynamic):
    torch._dynamo.reset()

    def loss(hidden, weight, target, bias):
        logprob, entropy, *_ = linear_logprob(hidden, weight, target, bias, memory=memory)
        return logprob.sum() + 0.5 * entropy.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=is_dynamic)
    for rows in (11, 30):
        case = make_case(rows).to(dtype)

        ours = torch.autograd.grad(compiled(*case), case.leaves)

        truth = torch.autograd.grad(loss(*case), case.leaves)
        assert all(torch.equal(our, same) for our, same in zip(ours, truth, strict=True))


def test_the_backward_operator_passes_opcheck_with_cached_logits():
    case = make_case().to(torch.float32)
    leaves = [leaf.detach() for leaf in case.leaves]
    options = (1.0, 1.0, 0.0, IGNORED, 0, -1, "", False, False, True, False, False, 1)
    inputs = (leaves[0], leaves[1], case.target, leaves[2], None, None, *options)
    _, entropy, lse, _, _, lse_rest, cache = torch.ops.logprobd.linear_logprob(*inputs, None)

    torch.library.opcheck(
        torch.ops.logprobd.linear_logprob_backward.default,
        (*wide_upstream(case), lse, lse_rest, entropy, cache, *inputs, [True, True, True]),
        test_utils=("test_schema", "test_faketensor"),
    )


# Wrong arguments.


@pytest.mark.parametrize(
    "options", [{"memory": "none"}, {"memory": "auto", "memory_budget": -1}], ids=str
)
def test_an_unknown_mode_is_named(options):
    with pytest.raises(ValueError, match="memory"):
        score(make_case(), **options)


def test_an_unknown_kind_of_cache_is_named():
    with pytest.raises(ValueError, match="keep_logits is 7"):
        cache_of(make_case(), 7)


@pytest.mark.parametrize("cache", [torch.zeros(10, 200).double(), torch.zeros(11, 200)], ids=str)
def test_a_cache_of_another_format_raises(cache):
    case = make_case()
    hidden, weight, bias = (leaf.detach() for leaf in case.leaves)
    options = (1.0, 1.0, 0.0, IGNORED, 0, -1, "", False, False, True, False, False, 1)
    rows = torch.ones(11, dtype=torch.float64)

    with pytest.raises(ValueError, match="cache is"):
        torch.ops.logprobd.linear_logprob_backward(
            *(rows, None, None, None, rows, rows, rows, cache),
            *(hidden, weight, case.target, bias, None, None, *options, [True, True, True]),
        )


# Losses.


@pytest.mark.parametrize("memory", ("cached", "auto"))
def test_the_cross_entropy_passes_on_the_mode(memory):
    case = make_case()
    with SavedCaches(case) as saved:
        loss = linear_cross_entropy(*case, memory=memory)
        assert saved.logits == 1
        small = linear_cross_entropy(*case, memory=memory, memory_budget=BYTES - 1)
        assert saved.logits == 1 + (memory == "cached")

    assert torch.equal(loss, small)


def test_the_cross_entropy_passes_on_weight_grad():
    case = make_case().to(torch.float32)
    (truth,) = torch.autograd.grad(linear_cross_entropy(*case), case.weight)
    buffer = torch.ones(200, 9)

    linear_cross_entropy(*case, weight_grad=buffer).backward()

    assert case.weight.grad is None
    assert error_of(buffer - 1, truth) <= 1e-5
