"""Cached logits give the bits of recomputed logits, and are cached exactly when they should be."""

import gc
import inspect
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from gradient_cases import (
    IGNORED,
    OPTIONS,
    OUTPUTS,
    Case,
    assert_same,
    error_of,
    gradients,
    make_case,
    score,
    true_scores,
    upstream_of,
)
from linear_logprob_reference import seeded
from logprobd_ops import _memory
from logprobd_ops._memory import (
    ALL_ROWS,
    EXPONENTIALS,
    GIB,
    LOSS_BUDGET_MIN,
    NOT_CACHED,
    WIDE,
    LogitCache,
    budget_bytes,
    logit_cache,
)
from logprobd_ops.linear_logprob import linear_logprob
from logprobd_ops.losses import linear_cross_entropy
from raw_operator import backward_arguments, raw_scores
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


def test_nothing_is_cached_on_request():
    case = make_case()
    with SavedCaches(case) as saved:
        scores = score(case, memory="recompute")

    assert saved.logits == 0 and scores[0].requires_grad


# Choice of the mode.

ROW_BYTES = 200 * 8  # size of a row of the case's logits in fp64


def cache_for(case: Case, memory="auto", memory_budget=None) -> LogitCache:
    return logit_cache(memory, memory_budget, *case)


@pytest.mark.parametrize(
    ("budget", "rows"),
    [(11 * ROW_BYTES, 11), (None, 11), (11 * ROW_BYTES - 1, 10), (ROW_BYTES, 1)],
)
def test_auto_caches_as_many_rows_as_fit_the_budget(budget, rows):
    assert cache_for(make_case(), memory_budget=budget) == LogitCache(WIDE, rows)


def test_auto_caches_nothing_if_not_one_row_fits_the_budget():
    assert cache_for(make_case(), memory_budget=ROW_BYTES - 1).kind == NOT_CACHED


def test_auto_is_the_default():
    case = make_case()

    assert linear_logprob(*case).logprob.grad_fn is not None
    assert inspect.signature(linear_logprob).parameters["memory"].default == "auto"


# Every cut through 40 rows, of which some are ignored and some have no gradient.
@pytest.mark.parametrize("cached_rows", (1, 2, 17, 34, 35, 36, 39))
@pytest.mark.parametrize("ignored", ([], [0, 3, 4, 20, 39]))
@pytest.mark.parametrize("unreached", ([], [0, 1, 5, 17, 38], list(range(30)), list(range(10, 40))))
def test_rows_that_are_partly_cached_have_the_bits_of_recomputed_ones(
    cached_rows, ignored, unreached
):
    case = exact_case()
    case.target[ignored] = IGNORED
    upstream = wide_upstream(case)
    for each in upstream:
        each[unreached] = 0
    budget = cached_rows * 400 * 4
    assert logit_cache("auto", budget, *case) == LogitCache(WIDE, cached_rows)

    partly, recomputed = (
        score(case, memory=m, memory_budget=budget) for m in ("auto", "recompute")
    )
    ours = torch.autograd.grad(partly, case.leaves, upstream, retain_graph=True)
    again = torch.autograd.grad(partly, case.leaves, upstream)

    truth = gradients(recomputed, case, upstream)
    for our, same, true in zip(ours, again, truth, strict=True):
        assert torch.equal(our, true) and torch.equal(same, true)


@pytest.mark.parametrize(
    ("rows", "vocab", "cached_rows"), [(33_500, 50, 32_900), (700, 8_000, 300)]
)
def test_blocks_of_rows_and_columns_may_be_partly_cached(rows, vocab, cached_rows):
    case = exact_case(rows, 8, vocab)
    case.target[::7] = IGNORED
    upstream = wide_upstream(case)
    budget = cached_rows * vocab * 4

    ours = gradients(score(case, memory_budget=budget), case, upstream)

    truth = gradients(score(case, memory="recompute"), case, upstream)
    assert all(torch.equal(our, true) for our, true in zip(ours, truth, strict=True))


def test_cached_ignores_the_budget():
    case = make_case()
    with SavedCaches(case) as saved:
        _alive = score(case, memory="cached", memory_budget=0)

        assert saved.logits == 1


def cache_of(case: Case, keep_logits: int, cached_rows: int = ALL_ROWS) -> Tensor:
    """Returns the cache of the operator."""
    return raw_scores(*case, keep_logits=keep_logits, cached_rows=cached_rows)["cache"]


def test_the_operator_returns_the_cache():
    case = make_case().to(torch.bfloat16)

    cache, part, empty = cache_of(case, 1), cache_of(case, 1, 5), cache_of(case, 0)

    assert cache.shape == (11, 200) and cache.dtype == torch.float32
    assert not cache.requires_grad
    assert torch.equal(part, cache[:5])
    assert cache_of(case, 1, 100).shape == (11, 200)
    assert empty.numel() == 0


@pytest.mark.parametrize("keep_logits", (1, 2))
@pytest.mark.parametrize("vocab", (1, 192, 200, 151_936))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_the_library_knows_the_size_of_the_cache(keep_logits, vocab, dtype):
    hidden = torch.empty(7, 16, dtype=dtype, device="meta")
    weight = torch.empty(vocab, 16, dtype=dtype, device="meta")
    case = Case(hidden, weight, torch.empty(7, dtype=torch.int64, device="meta"), None)

    row_bytes = cache_of(case, keep_logits).nbytes // 7
    budget = 3 << 40

    rows = torch.ops.logprobd.cacheable_rows(
        keep_logits=keep_logits,
        hidden_dtype=dtype,
        weight_dtype=dtype,
        weight_rows=vocab,
        budget_bytes=budget,
    )

    # Beside exponentials, a block of 208 MiB fits, and rows are whole tiles of 256.
    spare = budget - rows * row_bytes
    block = 208 << 20 if keep_logits == EXPONENTIALS else 0
    assert block <= spare < block + (256 if block else 1) * row_bytes


def test_the_fused_kernels_do_not_support_a_cpu():
    cpu = torch.device("cpu")
    bf16 = torch.bfloat16
    assert not torch.ops.logprobd.is_fused(
        cpu, hidden_dtype=bf16, weight_dtype=bf16, hidden_size=64
    )


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
        lambda **arguments: seen.append(operator(**arguments)[-1].numel()) or operator(**arguments),
    )

    with torch.no_grad():
        score(case, memory="cached")
    score(Case(*[each.detach() for each in case]), memory="cached")

    assert len(seen) >= 2 and not any(seen)


class OnGpu(NamedTuple):
    """What budget_bytes reads of a tensor on a GPU."""

    nbytes: int
    device: torch.device = torch.device("cuda", 0)


def fake_gpu(monkeypatch, *, free_bytes: int, fraction: float = 1.0) -> None:
    """Replaces the GPU that budget_bytes asks: it has 100 GiB, of which PyTorch has allocated 18 GiB and cannot return
    another 2 GiB."""
    monkeypatch.setattr(torch.ops.logprobd, "free_bytes", lambda *_, **__: free_bytes)
    fakes = {
        "get_per_process_memory_fraction": fraction,
        "memory_stats": {
            "active_bytes.all.current": 18 * GIB,
            "inactive_split_bytes.all.current": 2 * GIB,
        },
        "get_device_properties": SimpleNamespace(total_memory=100 * GIB),
    }
    for name, answer in fakes.items():
        owner = torch.cuda.memory if name.startswith("get_per") else torch.cuda
        monkeypatch.setattr(owner, name, lambda _device, answer=answer: answer, raising=False)


@pytest.mark.parametrize(
    ("given_gib", "free_gib", "budget_gib"),
    [
        *[(None, 100, 4), (None, 16, 2), (None, 8, 1), (None, 3, 1)],
        # A quarter and three times the inputs, here half a GiB in all, are left free.
        *[(None, 1, 0.5), (None, 0.5, 0), (None, 0.3, 0), (None, 0, 0)],
        *[(6, 100, 6), (6, 3, 2.5), (6, 0.3, 0), (0.25, 3, 0.25), (0, 100, 0)],
    ],
)
def test_the_budget_is_at_most_what_is_free_besides_the_gradients(
    monkeypatch, given_gib, free_gib, budget_gib
):
    fake_gpu(monkeypatch, free_bytes=int(free_gib * GIB))
    given = None if given_gib is None else int(given_gib * GIB)

    budget = budget_bytes(given, OnGpu(GIB // 24), OnGpu(GIB // 24))

    assert abs(budget - budget_gib * GIB) <= 16


@pytest.mark.parametrize(
    ("given_mib", "free_mib", "budget_mib"),
    [(None, 300, 256), (None, 0, 256), (None, 1024, 512), (100, 0, 100), (0, 0, 0)],
)
def test_a_loss_has_a_block_of_logits_even_if_memory_is_short(
    monkeypatch, given_mib, free_mib, budget_mib
):
    fake_gpu(monkeypatch, free_bytes=free_mib << 20)
    given = None if given_mib is None else given_mib << 20

    budget = budget_bytes(given, OnGpu(GIB // 24), OnGpu(GIB // 24), LOSS_BUDGET_MIN)

    assert abs(budget - (budget_mib << 20)) <= 16


# Regression: the budget ignored the limit, so a cache within it could run out of memory.
@pytest.mark.parametrize(
    ("fraction", "budget_gib"), [(1.0, 4), (0.99, 4), (0.36, 2), (0.22, 1), (0.21, 0.5), (0.1, 0)]
)
def test_the_budget_is_within_the_memory_fraction_of_the_process(monkeypatch, fraction, budget_gib):
    fake_gpu(monkeypatch, free_bytes=60 * GIB, fraction=fraction)

    budget = budget_bytes(None, OnGpu(GIB // 24), OnGpu(GIB // 24))

    assert abs(budget - budget_gib * GIB) <= 16


def test_a_version_of_torch_that_does_not_tell_the_fraction_has_none(monkeypatch):
    fake_gpu(monkeypatch, free_bytes=60 * GIB, fraction=0.1)
    monkeypatch.delattr(torch.cuda.memory, "get_per_process_memory_fraction")

    assert budget_bytes(None, OnGpu(GIB // 24), OnGpu(GIB // 24)) == 4 * GIB


def test_the_default_budget_on_a_cpu_is_the_maximum():
    case = make_case()

    assert budget_bytes(None, case.hidden, case.weight) == 4 * GIB


# Checkpoints.


@pytest.mark.parametrize("use_reentrant", (False, True))
@pytest.mark.parametrize("memory", ("auto", "cached", "recompute"))
@pytest.mark.parametrize("budgets", [(0, GIB), (GIB, 0), (5 * ROW_BYTES, 3 * ROW_BYTES)])
def test_a_checkpoint_may_see_another_budget_in_its_second_forward(
    monkeypatch, use_reentrant, memory, budgets
):
    """Regression: without reentrance, torch raised CheckpointError."""
    case = make_case()
    case.target[3] = IGNORED
    of_forwards = iter(budgets)
    monkeypatch.setattr(_memory, "budget_bytes", lambda *_: next(of_forwards))

    def scores_of(hidden, weight, target, bias):
        return tuple(score(Case(hidden, weight, target, bias), memory=memory))

    scores = checkpoint(scores_of, *case, use_reentrant=use_reentrant)
    torch.autograd.backward(scores, upstream_of(11))

    truth = gradients(score(case, memory="recompute"), case, upstream_of(11))
    assert_same([leaf.grad for leaf in case.leaves], truth)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_a_checkpoint_of_a_mean_loss_has_its_gradients(use_reentrant):
    case = make_case()

    def loss_of(hidden, weight, target, bias):
        return linear_cross_entropy(hidden, weight, target, bias)

    loss = checkpoint(loss_of, *case, use_reentrant=use_reentrant)
    loss.backward()

    truth = gradients(loss_of(*case), case)
    assert_same([leaf.grad for leaf in case.leaves], truth)


@pytest.mark.parametrize(("memory", "kind"), [("auto", NOT_CACHED), ("cached", WIDE)])
def test_auto_saves_no_logits_through_hooks(memory, kind):
    case = make_case()

    with torch.autograd.graph.save_on_cpu():
        cache = cache_for(case, memory)

    assert cache == LogitCache(kind, ALL_ROWS)


# Compiled callers.


@pytest.mark.parametrize(
    ("memory", "memory_budget"), [("cached", None), ("auto", None), ("auto", 17 * 200 * 4)]
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("is_dynamic", (False, True))
def test_a_compiled_caller_gets_the_bits_of_eager(memory, memory_budget, dtype, is_dynamic):
    torch._dynamo.reset()

    def loss(hidden, weight, target, bias):
        logprob, entropy, *_ = linear_logprob(
            hidden, weight, target, bias, memory=memory, memory_budget=memory_budget
        )
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
    inputs = (leaves[0], leaves[1], case.target, leaves[2])
    saved = raw_scores(*inputs, keep_logits=1)
    upstream = dict(zip(OUTPUTS, wide_upstream(case), strict=True))

    torch.library.opcheck(
        torch.ops.logprobd.linear_logprob_backward.default,
        args=(),
        kwargs=backward_arguments(upstream, saved, *inputs, keep_logits=1),
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
    rows = torch.ones(11, dtype=torch.float64)
    saved = {"lse": rows, "lse_rest": rows, "entropy": rows, "cache": cache}
    arguments = backward_arguments(
        {"logprob": rows}, saved, hidden, weight, case.target, bias, keep_logits=1
    )

    with pytest.raises(ValueError, match="cache is"):
        torch.ops.logprobd.linear_logprob_backward(**arguments)


# Losses.


@pytest.mark.parametrize(("memory", "budget"), [("cached", 0), ("recompute", None)])
@pytest.mark.parametrize("gradients_in_forward", (False, None))
def test_the_cross_entropy_passes_on_the_mode(memory, budget, gradients_in_forward):
    case = make_case()
    with SavedCaches(case) as saved:
        _alive = linear_cross_entropy(
            *case,
            memory=memory,
            memory_budget=budget,
            gradients_in_forward=gradients_in_forward,
        )

        assert saved.logits == int(memory == "cached")


def test_the_cross_entropy_passes_on_weight_grad():
    case = make_case().to(torch.float32)
    (truth,) = torch.autograd.grad(linear_cross_entropy(*case), case.weight)
    buffer = torch.ones(200, 9)

    linear_cross_entropy(*case, weight_grad=buffer).backward()

    assert case.weight.grad is None
    assert error_of(buffer - 1, truth) <= 1e-5
