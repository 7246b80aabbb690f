"""Log-probabilities of the largest logits and of candidates, and their gradients, equal those of the fp64 reference."""

import math

import pytest
import torch
from gradient_cases import (
    DOUBLE_ERROR_MAX,
    IGNORED,
    OPTIONS,
    OUTPUTS,
    SIXTEEN_BIT_ERROR_MAX,
    Case,
    assert_same,
    error_of,
    make_case,
    upstream_of,
)
from linear_logprob_reference import reference, reference_logits, seeded
from logprobd_ops import linear_logprob
from score_cases import exact_case
from torch import Tensor

ROWS, VOCAB = 11, 200


def candidates_of(rows=ROWS, vocab=VOCAB, count=6, seed=2) -> Tensor:
    """Returns [rows, count] ids. Each row has an id twice, the first and the last id of the vocabulary."""
    ids = torch.randint(vocab, (rows, count), generator=seeded(seed))
    ids[:, 1] = ids[:, 0]
    ids[:, 2], ids[:, 3] = 0, vocab - 1
    return ids


def true_logprobs(hidden, weight, target, bias=None, **options) -> Tensor:
    """Returns the log-probabilities of all ids, fp64 [rows, vocabulary], with zeros in ignored rows."""
    options.pop("mean_logit_weights", None)
    is_valid = (target != IGNORED).unsqueeze(-1)
    # An ignored row may hold any values.
    hidden = torch.where(is_valid, hidden, torch.zeros_like(hidden))
    logprobs = reference_logits(hidden, weight, bias, **options).log_softmax(-1)
    return torch.where(is_valid, logprobs, torch.zeros_like(logprobs))


def true_top_ids(logits: Tensor, count: int) -> Tensor:
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def case_of(name: str) -> tuple[Case, dict, int]:
    """Returns a case with ignored rows, its options, and the size of the valid vocabulary."""
    case, options = make_case(), OPTIONS[name]
    vocab = options.get("vocab_valid", VOCAB)
    case.target[:] %= vocab
    case.target[[2, 7]] = IGNORED
    return case, options, vocab


# Values.


@pytest.mark.parametrize("name", OPTIONS)
def test_candidates_have_the_reference_logprobs(name):
    case, options, vocab = case_of(name)
    ids = candidates_of(vocab=vocab)

    logprobs = linear_logprob(*case, candidate_ids=ids, **options).candidate_logprobs

    assert_same([logprobs], [true_logprobs(*case, **options).gather(-1, ids)])
    assert (logprobs[[2, 7]] == 0).all()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("top_k", (1, 5, 128))
def test_the_top_k_are_those_of_the_reference(name, top_k):
    case, options, vocab = case_of(name)
    count = min(top_k, vocab)

    scores = linear_logprob(*case, top_k=top_k, **options)

    assert scores.top_k_ids.shape == scores.top_k_logprobs.shape == (ROWS, top_k)
    logprobs = true_logprobs(*case, **options)
    ids = true_top_ids(logprobs, count)
    ids[[2, 7]] = 0
    is_valid = case.target != IGNORED
    assert torch.equal(scores.top_k_ids[:, :count], ids)
    assert_same([scores.top_k_logprobs[:, :count]], [logprobs.gather(-1, ids)])
    assert (scores.top_k_ids[is_valid, count:] == -1).all()
    assert scores.top_k_logprobs[is_valid, count:].isnan().all()
    assert (scores.top_k_logprobs[~is_valid] == 0).all()


def test_lists_have_the_bits_of_logprob():
    hidden, weight, target, bias = exact_case(vocab=507)
    best = linear_logprob(hidden, weight, target, bias, return_argmax=True).argmax

    scores = linear_logprob(
        *(hidden, weight, best, bias), top_k=3, candidate_ids=torch.stack((best, best), 1)
    )

    assert torch.equal(scores.top_k_ids[:, 0], best)
    assert torch.equal(scores.top_k_logprobs[:, 0], scores.logprob)
    assert torch.equal(scores.candidate_logprobs, scores.logprob.unsqueeze(1).expand(-1, 2))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_equal_logits_are_listed_by_ascending_id(dtype):
    hidden = torch.ones(3, 8, dtype=dtype)
    weight = torch.zeros(600, 8, dtype=dtype)
    weight[[599, 400, 192, 191, 37]] = 2.0
    weight[300] = 3.0

    scores = linear_logprob(hidden, weight, torch.zeros(3).long(), top_k=9)

    best = torch.tensor([300, 37, 191, 192, 400, 599, 0, 1, 2])
    assert torch.equal(scores.top_k_ids, best.expand(3, 9))


def test_equal_logits_of_different_blocks_are_listed_by_ascending_id():
    """There are so many rows that columns are computed in several blocks (kBlockLogits)."""
    rows = 8192
    hidden = torch.ones(rows, 1)
    weight = torch.zeros(1300, 1)
    weight[[1299, 1000, 700]] = 2.0

    scores = linear_logprob(hidden, weight, torch.zeros(rows, dtype=torch.int64), top_k=4)

    assert torch.equal(scores.top_k_ids, torch.tensor([700, 1000, 1299, 0]).expand(rows, 4))


def test_logits_of_minus_infinity_are_listed_last():
    hidden, weight, target, bias = exact_case(7, 31, 200)
    bias[:] = -math.inf
    bias[[7, 100]] = 0.0

    scores = linear_logprob(hidden, weight, target, bias, top_k=4)

    assert torch.equal(scores.top_k_ids[:, 2:], torch.tensor([[0, 1]]).expand(7, 2))
    assert (scores.top_k_logprobs[:, 2:] == -math.inf).all()
    assert {7, 100} == set(scores.top_k_ids[0, :2].tolist())


def test_rows_that_are_not_finite_have_no_lists():
    hidden, weight, target, _ = exact_case(7, 31, 257)
    truth = linear_logprob(hidden, weight, target, top_k=3, candidate_ids=target.unsqueeze(1))
    hidden[3] = math.nan

    scores = linear_logprob(hidden, weight, target, top_k=3, candidate_ids=target.unsqueeze(1))

    others = [0, 1, 2, 4, 5, 6]
    assert (scores.top_k_ids[3] == -1).all()
    assert scores.top_k_logprobs[3].isnan().all() and scores.candidate_logprobs[3].isnan().all()
    for name in ("top_k_ids", "top_k_logprobs", "candidate_logprobs"):
        assert torch.equal(getattr(scores, name)[others], getattr(truth, name)[others])


def test_lists_of_different_lengths_follow_one_another():
    case = make_case()
    case.target[4] = IGNORED
    lengths = [0, 3, 1, 0, 2, 200, 0, 5, 1, 1, 0]
    lists = [torch.randint(VOCAB, (n,), generator=seeded(n)) for n in lengths]
    offsets = torch.tensor([0, *lengths]).cumsum(0)

    of_lists = linear_logprob(*case, candidate_ids=lists).candidate_logprobs
    of_offsets = linear_logprob(
        *case, candidate_ids=torch.cat(lists), candidate_offsets=offsets.int()
    ).candidate_logprobs

    truth = true_logprobs(*case)
    expected = torch.cat([truth[row][ids] for row, ids in enumerate(lists)])
    assert_same([of_lists, of_offsets], [expected, expected])


def test_lists_of_any_shape():
    case = make_case(12)
    target, ids = case.target.view(3, 4), candidates_of(12).view(3, 4, 6)

    scores = linear_logprob(
        case.hidden.view(3, 4, -1), case.weight, target, case.bias, candidate_ids=ids, top_k=2
    )

    flat = linear_logprob(*case, candidate_ids=ids.view(12, 6), top_k=2)
    assert scores.candidate_logprobs.shape == (3, 4, 6) and scores.top_k_ids.shape == (3, 4, 2)
    assert torch.equal(scores.candidate_logprobs.view(12, 6), flat.candidate_logprobs)
    assert torch.equal(scores.top_k_ids.view(12, 2), flat.top_k_ids)


@pytest.mark.parametrize("rows", (0, 5))
def test_no_candidates_give_no_logprobs(rows):
    hidden, weight, target, _ = exact_case(5, 31, 193)
    inputs = (hidden[:rows], weight, target[:rows])

    none = linear_logprob(*inputs, candidate_ids=[torch.empty(0).long()] * rows)
    flat = linear_logprob(*inputs, candidate_ids=torch.empty(rows, 0).long(), top_k=2)

    assert none.candidate_logprobs.shape == (0,) and flat.candidate_logprobs.shape == (rows, 0)
    assert flat.top_k_ids.shape == (rows, 2)


def test_only_ignored_rows_give_zeros():
    hidden, weight, target, _ = exact_case(5, 31, 193)
    ids = torch.ones(5, 4).long()

    scores = linear_logprob(
        hidden * math.nan, weight, torch.full_like(target, IGNORED), top_k=2, candidate_ids=ids
    )

    for name in ("top_k_ids", "top_k_logprobs", "candidate_logprobs"):
        assert not getattr(scores, name).any()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_blocks_of_rows_do_not_affect_lists(dtype):
    """There are several blocks of rows and of columns, on every path."""
    few = exact_case(50, 8, 200, dtype)
    rows = 33_000
    repeated = [tensor.repeat(rows // 50, *[1] * (tensor.dim() - 1)) for tensor in (few[0], few[2])]
    ids = candidates_of(50)

    scores = linear_logprob(
        *(repeated[0], few.weight, repeated[1], few.bias),
        top_k=5,
        candidate_ids=ids.repeat(rows // 50, 1),
    )

    truth = linear_logprob(*few, top_k=5, candidate_ids=ids)
    for name in ("top_k_ids", "top_k_logprobs", "candidate_logprobs"):
        assert torch.equal(getattr(scores, name), getattr(truth, name).repeat(rows // 50, 1))


# Gradients.


def upstream_of_lists(shape, dtype=torch.float64) -> Tensor:
    """Returns gradients of which those of one row add up to 0, and those of another row are all 0."""
    upstream = torch.randn(shape, generator=seeded(7)).to(dtype)
    upstream[1] -= upstream[1].mean()
    upstream[3] = 0
    return upstream


@pytest.mark.parametrize("memory", ("recompute", "cached"))
@pytest.mark.parametrize("outputs", [(), OUTPUTS], ids=["lists", "every score"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_the_reference_gradient(name, outputs, memory):
    case, options, vocab = case_of(name)
    ids = candidates_of(vocab=vocab)
    top_upstream = upstream_of_lists((ROWS, 5))
    candidate_upstream = upstream_of_lists((ROWS, 6)).flip(0)
    upstream = dict(zip(OUTPUTS, upstream_of(ROWS), strict=True))

    scores = linear_logprob(
        *case, top_k=5, candidate_ids=ids, return_mean_logit=True, memory=memory, **options
    )
    loss = (scores.top_k_logprobs * top_upstream).sum()
    loss = loss + (scores.candidate_logprobs * candidate_upstream).sum()
    truth = true_logprobs(*case, **options)
    true_loss = (truth.gather(-1, scores.top_k_ids) * top_upstream).sum()
    true_loss = true_loss + (truth.gather(-1, ids) * candidate_upstream).sum()
    true_scores = reference(*case, **options)
    for output in outputs:
        loss = loss + getattr(scores, output) @ upstream[output]
        true_loss = true_loss + getattr(true_scores, output) @ upstream[output]

    ours = torch.autograd.grad(loss, case.leaves)
    true = torch.autograd.grad(true_loss, case.leaves)
    assert_same(ours, true)
    assert (ours[0][[2, 7]] == 0).all()


def test_gradients_of_ragged_lists():
    case = make_case()
    lists = [torch.randint(VOCAB, (n,), generator=seeded(n)) for n in range(ROWS)]
    logprobs = linear_logprob(*case, candidate_ids=lists).candidate_logprobs
    upstream = torch.randn(logprobs.shape, generator=seeded(1)).double()

    ours = torch.autograd.grad(logprobs, case.leaves, upstream)

    truth = true_logprobs(*case)
    expected = torch.cat([truth[row][ids] for row, ids in enumerate(lists)])
    assert_same(ours, torch.autograd.grad(expected, case.leaves, upstream))


def test_ids_that_are_missing_have_no_gradient():
    case = make_case(vocab=3)
    scores = linear_logprob(*case, top_k=5)

    ours = torch.autograd.grad(scores.top_k_logprobs.nansum(), case.leaves)
    with_missing = torch.autograd.grad(
        linear_logprob(*case, top_k=5).top_k_logprobs.sum(), case.leaves
    )

    true = torch.autograd.grad(true_logprobs(*case).sum(), case.leaves)
    assert_same(ours, true)
    assert_same(with_missing, true)


def test_a_distillation_from_the_top_k_of_a_teacher():
    """The gradients of a student whose probabilities equal the teacher's nearly cancel."""
    case = make_case(dtype=torch.bfloat16, spread_max=4.0)
    exact = case.to(torch.float64)
    truth = true_logprobs(*exact)
    ids = true_top_ids(truth, 8)
    teacher = truth.gather(-1, ids).detach().exp()

    logprobs = linear_logprob(*case, candidate_ids=ids).candidate_logprobs
    ours = torch.autograd.grad(-(teacher * logprobs).sum(), case.leaves)

    true = torch.autograd.grad(-(teacher * truth.gather(-1, ids)).sum(), exact.leaves)
    for our, expected in zip(ours, true, strict=True):
        assert our.dtype == torch.bfloat16
        assert error_of(our, expected) <= SIXTEEN_BIT_ERROR_MAX


def test_a_list_alone_may_be_differentiated_twice_with_the_same_bits():
    case = make_case(dtype=torch.float32)
    loss = linear_logprob(*case, top_k=4, candidate_ids=candidates_of()).candidate_logprobs.sum()

    first = torch.autograd.grad(loss, case.leaves, retain_graph=True)

    assert all(map(torch.equal, first, torch.autograd.grad(loss, case.leaves)))


def test_changing_a_list_in_place_does_not_change_its_gradient():
    case = make_case()
    expected = torch.autograd.grad(
        linear_logprob(*case, top_k=4).top_k_logprobs.sum() * 2, case.leaves
    )

    scores = linear_logprob(*case, top_k=4)
    scores.top_k_ids.zero_()
    ours = torch.autograd.grad(scores.top_k_logprobs.mul_(2).sum(), case.leaves)

    assert_same(ours, expected)


def test_gradients_of_lists_accumulate_into_weight_grad():
    case = make_case(dtype=torch.float32)
    ids = candidates_of()

    def loss(**options) -> Tensor:
        return linear_logprob(*case, candidate_ids=ids, **options).candidate_logprobs.sum()

    (truth,) = torch.autograd.grad(loss(), case.weight)
    buffer = torch.ones(VOCAB, 9)
    loss(weight_grad=buffer).backward()

    assert error_of(buffer - 1, truth) <= 1e-5


@pytest.mark.parametrize("needed", (0, 1, 2))
def test_the_gradient_of_a_single_input(needed):
    case = make_case()

    def loss() -> Tensor:
        return linear_logprob(*case, candidate_ids=candidates_of()).candidate_logprobs.sum()

    all_three = torch.autograd.grad(loss(), case.leaves)

    (ours,) = torch.autograd.grad(loss(), case.leaves[needed])

    assert error_of(ours, all_three[needed]) <= DOUBLE_ERROR_MAX


@pytest.mark.parametrize("is_dynamic", (False, True))
def test_a_compiled_caller_gets_the_bits_of_eager(is_dynamic):
    def loss(hidden, weight, target, bias, ids):
        scores = linear_logprob(hidden, weight, target, bias, top_k=3, candidate_ids=ids)
        return scores.top_k_logprobs.sum() + (scores.candidate_logprobs * 0.5).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=is_dynamic)
    for rows in (11, 30):
        case = make_case(rows).to(torch.float32)
        ids = candidates_of(rows)

        ours = torch.autograd.grad(compiled(*case, ids), case.leaves)

        truth = torch.autograd.grad(loss(*case, ids), case.leaves)
        assert all(map(torch.equal, ours, truth))


# 16-bit heads whose rows are multiples of 16 bytes, for which GPUs of compute capability 8.0 or later use fused
# kernels.

LOGPROB_ERROR_MAX = 1e-4
SIXTEEN_BITS = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
SHAPINGS = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "capped": {"softcap": 5.0, "scale": 1.5, "temperature": 2.0, "vocab_valid": 963},
}


def sixteen_bit_case(rows: int, dtype: torch.dtype) -> Case:
    case = make_case(rows, 64, 1000, dtype, spread_max=4.0)
    case.target[:] %= 963
    case.target[::5] = IGNORED
    return case


@pytest.mark.parametrize("rows", (70, 600, 4500))
@pytest.mark.parametrize("shaping", SHAPINGS)
@SIXTEEN_BITS
def test_lists_of_a_sixteen_bit_head_are_those_of_the_reference(dtype, shaping, rows):
    case, options = sixteen_bit_case(rows, dtype), SHAPINGS[shaping]
    ids = candidates_of(rows, 963)

    scores = linear_logprob(*case, top_k=20, candidate_ids=ids, **options)

    truth = true_logprobs(*case, **options)
    is_valid = case.target != IGNORED
    assert (scores.candidate_logprobs - truth.gather(-1, ids)).abs().max() <= LOGPROB_ERROR_MAX
    listed = truth.gather(-1, scores.top_k_ids)
    best = truth.gather(-1, true_top_ids(truth, 20))
    assert (listed - best)[is_valid].abs().max() <= LOGPROB_ERROR_MAX
    assert (scores.top_k_logprobs - listed)[is_valid].abs().max() <= LOGPROB_ERROR_MAX
    assert not scores.top_k_ids[~is_valid].any() and not scores.top_k_logprobs[~is_valid].any()


@SIXTEEN_BITS
def test_equal_logits_of_a_sixteen_bit_head_are_listed_by_ascending_id(dtype):
    """The factors have few bits, so many logits are equal. With a bias they would not be: the correction of the
    truncation comes before it."""
    case = exact_case(70, 64, 1000, dtype)

    ids = linear_logprob(*case[:3], top_k=128).top_k_ids

    assert torch.equal(ids, true_top_ids(true_logprobs(*case[:3]), 128))


@pytest.mark.parametrize("memory", ("recompute", "cached"))
@pytest.mark.parametrize("rows", (70, 4500))
@pytest.mark.parametrize("shaping", SHAPINGS)
@SIXTEEN_BITS
def test_gradients_of_the_lists_of_a_sixteen_bit_head(dtype, shaping, rows, memory):
    case, options = sixteen_bit_case(rows, dtype), SHAPINGS[shaping]
    exact = case.to(torch.float64)
    ids = candidates_of(rows, 963)
    upstream = [upstream_of_lists((rows, n), torch.float32) for n in (5, 6)]

    scores = linear_logprob(*case, top_k=5, candidate_ids=ids, memory=memory, **options)
    loss = (scores.top_k_logprobs * upstream[0]).sum() + scores.logprob.sum()
    loss = loss + (scores.candidate_logprobs * upstream[1]).sum()
    ours = torch.autograd.grad(loss, case.leaves)

    logprobs = true_logprobs(*exact, **options)
    true_loss = (logprobs.gather(-1, scores.top_k_ids) * upstream[0]).sum()
    true_loss = true_loss + (logprobs.gather(-1, ids) * upstream[1]).sum()
    true_loss = true_loss + reference(*exact, **options).logprob.sum()
    for our, true in zip(ours, torch.autograd.grad(true_loss, exact.leaves), strict=True):
        assert error_of(our, true) <= SIXTEEN_BIT_ERROR_MAX
    assert (ours[0][case.target == IGNORED] == 0).all()


# Wrong arguments.

TWO = torch.zeros(2).long()
BAD_LISTS = {
    "a negative top_k": ({"top_k": -1}, ValueError, "top_k is -1"),
    "a large top_k": ({"top_k": 129}, ValueError, "top_k is 129"),
    "ids of another shape": (
        {"candidate_ids": torch.zeros(4, 3).long()},
        ValueError,
        "candidate_ids",
    ),
    "ids without a list dimension": (
        {"candidate_ids": torch.zeros(5).long()},
        ValueError,
        "candidate_ids",
    ),
    "ids that are not integers": (
        {"candidate_ids": torch.zeros(5, 3)},
        ValueError,
        "candidate_ids",
    ),
    "ids on another device": (
        {"candidate_ids": torch.zeros(5, 3, device="meta").long()},
        ValueError,
        "candidate_ids is on",
    ),
    "a negative id": (
        {"candidate_ids": torch.full((5, 1), -1)},
        IndexError,
        "candidate_ids contains -1",
    ),
    "an id in the padding": (
        {"candidate_ids": torch.full((5, 1), 190)},
        IndexError,
        "candidate_ids contains 190",
    ),
    "too few lists": ({"candidate_ids": [TWO] * 4}, ValueError, "candidate_ids is a list of 4"),
    "a list with offsets": (
        {"candidate_ids": [TWO] * 5, "candidate_offsets": TWO},
        ValueError,
        "candidate_offsets",
    ),
    "offsets alone": ({"candidate_offsets": TWO}, ValueError, "candidate_offsets"),
    "too few offsets": (
        {"candidate_ids": TWO, "candidate_offsets": TWO},
        ValueError,
        "candidate_offsets",
    ),
    "offsets that end early": (
        {"candidate_ids": TWO, "candidate_offsets": torch.tensor([0, 0, 0, 0, 0, 1])},
        ValueError,
        "candidate_offsets",
    ),
    "offsets that decrease": (
        {"candidate_ids": TWO, "candidate_offsets": torch.tensor([0, 1, 0, 1, 2, 2])},
        ValueError,
        "candidate_offsets",
    ),
}


@pytest.mark.parametrize("mistake", BAD_LISTS)
def test_wrong_lists_are_named(mistake):
    hidden, weight, target, _ = exact_case(5, 31, 193)
    options, error, message = BAD_LISTS[mistake]

    with pytest.raises(error, match=message):
        linear_logprob(hidden, weight, target % 190, vocab_valid=190, **options)
