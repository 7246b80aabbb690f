"""Gradients equal those of the fp64 reference for any upstream gradient, and only needed ones are computed."""

import math
import threading

import pytest
import torch
from gradient_cases import (
    DOUBLE_ERROR_MAX,
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
from linear_logprob_reference import reference, reference_logits, requested
from logprobd_ops import linear_logprob_loss
from logprobd_ops.linear_logprob import linear_logprob
from raw_operator import backward_arguments, raw_scores


def assert_same_gradients(case: Case, outputs=OUTPUTS, **options) -> None:
    chosen = [OUTPUTS.index(name) for name in outputs]
    upstream = [upstream_of(case.target.shape)[i] for i in chosen]
    ours = gradients([score(case, **options)[i] for i in chosen], case, upstream)
    truth = gradients([true_scores(case, **options)[i] for i in chosen], case, upstream)
    for our, true, leaf in zip(ours, truth, case.leaves, strict=True):
        assert our.dtype == leaf.dtype and our.shape == leaf.shape
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)


# Comparison with the fp64 reference, in fp64.


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("outputs", [OUTPUTS, *[(name,) for name in OUTPUTS]])
def test_every_option_and_output_has_the_reference_gradient(name, outputs):
    case = make_case()
    case.target[:] %= OPTIONS[name].get("vocab_valid", 200)
    case.target[[2, 7]] = IGNORED

    assert_same_gradients(case, outputs, **OPTIONS[name])


@pytest.mark.parametrize(
    ("rows", "size", "vocab"),
    [(1, 1, 1), (1, 8, 193), (7, 31, 2), (13, 70, 191), (13, 70, 192), (5, 123, 507), (129, 8, 8)],
)
def test_every_size_has_the_reference_gradient(rows, size, vocab):
    assert_same_gradients(make_case(rows, size, vocab, spread_max=20.0))


@pytest.mark.parametrize("name", ("plain", "softcap", "temperature a row", "all together"))
def test_numeric_derivatives_agree(name):
    rows, vocab = 4, 9
    case = make_case(rows, 3, vocab, spread_max=3.0)
    case.target[1] = IGNORED
    options = dict(OPTIONS[name])
    if "vocab_valid" in options:
        options["vocab_valid"] = 7
        case.target[:] = torch.tensor([0, IGNORED, 6, 3])
    if "temperature" in options:
        options["temperature"] = torch.linspace(0.3, 2, rows, dtype=torch.float64)
    if "mean_logit_weights" in options:
        options["mean_logit_weights"] = torch.linspace(-1, 2, vocab, dtype=torch.float64)

    def scores(hidden, weight, bias):
        return tuple(score(Case(hidden, weight, case.target, bias), **options))

    assert torch.autograd.gradcheck(scores, case.leaves)


def test_numeric_derivatives_agree_over_several_tiles():
    case = make_case(3, 2, 400, spread_max=3.0)

    def scores(hidden, weight, bias):
        return tuple(score(Case(hidden, weight, case.target, bias)))

    assert torch.autograd.gradcheck(scores, case.leaves, fast_mode=True)


def test_out_of_vocab_targets_have_the_gradient_of_minus_lse():
    case = make_case()
    case.target[:] %= 195
    case.target[[0, 5]] = torch.tensor([-1, 2**31])
    case.target[3] = 197  # This id is padding.
    out_of_vocab_rows = [0, 3, 5]
    upstream = upstream_of(11)

    ours = gradients(score(case, out_of_vocab="zero", vocab_valid=195), case, upstream)

    is_out_of_vocab = torch.zeros(11, dtype=torch.bool)
    is_out_of_vocab[out_of_vocab_rows] = True
    owned = case._replace(target=case.target.masked_fill(is_out_of_vocab, 0))
    logprob, entropy, lse, mean_logit = true_scores(owned, vocab_valid=195)
    logprob = torch.where(is_out_of_vocab, -lse, logprob)
    truth = gradients([logprob, entropy, lse, mean_logit], case, upstream)
    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)


def test_sequences_of_any_stride_get_gradients_of_their_shape():
    case = make_case(12)
    hidden = case.hidden.view(3, 4, 9).transpose(0, 1)
    target = case.target.view(3, 4).T
    upstream = upstream_of((4, 3))
    tied = Case(hidden, case.weight, target, case.bias)

    ours = gradients(score(tied), case, upstream)

    truth = gradients(true_scores(tied), case, upstream)
    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)


def test_columns_of_minus_infinity_have_zero_gradients_without_nan():
    case = make_case()
    with torch.no_grad():
        case.bias[:150] = -math.inf
    case.target[:] = 150 + case.target % 50
    upstream = upstream_of(11)[:3]
    valid = Case(case.hidden, case.weight[150:], case.target - 150, case.bias[150:])

    ours = gradients(score(case)[:3], case, upstream)

    truth = gradients(true_scores(valid)[:3], case, upstream)
    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)
    assert (ours[1][:150] == 0).all() and (ours[2][:150] == 0).all()


# Upstream gradients.


def test_outputs_that_a_loss_does_not_use_have_zero_gradients():
    case = make_case()
    upstream = upstream_of(11)
    for i, name in enumerate(OUTPUTS):
        alone = gradients(score(case)[i], case, upstream[i])
        zeros = [torch.zeros(11, dtype=torch.float64) for _ in OUTPUTS]
        zeros[i] = upstream[i]
        explicit = gradients(score(case), case, zeros)
        for ours, same in zip(alone, explicit, strict=True):
            torch.testing.assert_close(ours, same, rtol=1e-12, atol=1e-13, msg=name)


LAYOUTS = {
    "expanded": lambda upstream: torch.tensor(0.75, dtype=upstream.dtype).expand(upstream.shape),
    "zero stride": lambda upstream: upstream[:1].as_strided(upstream.shape, (0,)),
    "every second": lambda upstream: torch.stack([upstream, upstream * 9], 1)[:, 0],
    "tail": lambda upstream: torch.cat([upstream[:1], upstream])[1:],
    "tiny": lambda upstream: upstream * 1e-6,
    "huge": lambda upstream: upstream * 1e4,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upstream_gradients_of_any_layout_and_size(layout):
    case = make_case()
    upstream = [LAYOUTS[layout](each) for each in upstream_of(11)]

    ours = gradients(score(case), case, upstream)

    truth = gradients(true_scores(case), case, [each.contiguous() for each in upstream])
    for our, true in zip(ours, truth, strict=True):
        assert error_of(our, true) <= DOUBLE_ERROR_MAX


def test_a_sum_over_transposed_sequences():
    case = make_case(12)
    hidden, target = case.hidden.view(3, 4, 9), case.target.view(3, 4)
    weights = upstream_of((4, 3))[0]

    logprob, entropy, *_ = linear_logprob(hidden, case.weight, target, case.bias)
    ours = gradients([(logprob.T * weights).sum() + entropy.mean()], case, None)

    truth_scores = reference(hidden, case.weight, target, case.bias)
    truth = gradients(
        [(truth_scores.logprob.T * weights).sum() + truth_scores.entropy.mean()], case, None
    )
    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_rows_without_an_upstream_gradient_have_zero_gradients_and_add_nothing(dtype):
    """Ignored rows also have zero gradients and add nothing, whatever their values are."""
    case = make_case().to(dtype)
    without = [1, 4, 9]
    with torch.no_grad():
        case.hidden[4] = math.nan
        case.hidden[9] = math.inf
    case.target[4] = IGNORED
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    upstream = upstream_of(11, wide)
    for each in upstream:
        each[[1, 9]] = 0
    reached = [row for row in range(11) if row not in without]
    rest = Case(case.hidden[reached], case.weight, case.target[reached], case.bias)

    ours = gradients(score(case), case, upstream)

    assert (ours[0][without] == 0).all()
    alone = gradients(score(rest), case, [each[reached] for each in upstream])
    # On some CPUs the bits of torch's products, which fp64 inputs use, depend on the number of rows.
    tolerance = 1e-12 if dtype == torch.float64 else 0
    for our, same in zip(ours, alone, strict=True):
        torch.testing.assert_close(our, same, rtol=tolerance, atol=tolerance)


def test_only_ignored_rows_give_exact_zeros():
    case = make_case()
    case.target[:] = IGNORED

    ours = gradients(score(case), case, upstream_of(11))

    assert all((each == 0).all() for each in ours)


def test_no_rows_give_exact_zeros():
    case = make_case(0)

    ours = gradients(score(case), case, upstream_of(0))

    assert ours[0].shape == (0, 9)
    assert (ours[1] == 0).all() and (ours[2] == 0).all()


@pytest.mark.parametrize("valid", (1, 100, 192, 199))
def test_padding_rows_of_the_weight_have_zero_gradients(valid):
    case = make_case()
    with torch.no_grad():
        case.weight[valid:] = math.nan
        case.bias[valid:] = math.inf
    case.target[:] %= valid

    d_hidden, d_weight, d_bias = gradients(score(case, vocab_valid=valid), case, upstream_of(11))

    assert (d_weight[valid:] == 0).all() and (d_bias[valid:] == 0).all()
    assert d_hidden.isfinite().all() and d_weight.isfinite().all() and d_bias.isfinite().all()


def test_an_entropy_that_was_not_requested_adds_nothing_to_a_loss():
    case = make_case()

    logprob, entropy, *_ = linear_logprob(*case, need_entropy=False)
    ours = gradients([logprob.sum() + entropy.sum()], case, None)

    truth = gradients([linear_logprob(*case)[0].sum()], case, None)
    assert all(torch.equal(our, same) for our, same in zip(ours, truth, strict=True))


# Only needed gradients are computed.


@pytest.mark.parametrize("needed", (0, 1, 2))
def test_the_gradient_of_a_single_input(needed):
    case = make_case()
    both = gradients(score(case), case, upstream_of(11))
    for i, leaf in enumerate(case.leaves):
        leaf.requires_grad_(i == needed)

    torch.autograd.backward(score(case), upstream_of(11))

    for i, leaf in enumerate(case.leaves):
        if i == needed:
            assert torch.equal(leaf.grad, both[i])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_a_gradient_that_is_not_needed_has_no_elements(needs):
    case = make_case()
    hidden, weight, bias = (leaf.detach() for leaf in case.leaves)
    inputs = (hidden, weight, case.target, bias)
    saved = raw_scores(*inputs) | {"cache": None}
    upstream = dict(zip(OUTPUTS, upstream_of(11), strict=True))

    computed = torch.ops.logprobd.linear_logprob_backward(
        **backward_arguments(upstream, saved, *inputs, needs=needs)
    )

    assert [gradient.numel() > 0 for gradient in computed] == list(needs)


def test_the_argmax_is_not_differentiable_and_nothing_is_if_no_input_needs_a_gradient():
    case = make_case()
    scores = linear_logprob(*case, return_argmax=True, return_mean_logit=True)
    assert not scores.argmax.requires_grad and scores.mean_logit.requires_grad

    detached = [leaf.detach() for leaf in case.leaves]
    scores = linear_logprob(detached[0], detached[1], case.target, detached[2])
    assert not any(each.requires_grad for each in requested(scores))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_second_backward_gives_the_same_bits(dtype):
    case = make_case(64, 33, 507).to(dtype)
    scores = score(case)
    upstream = upstream_of(64, torch.float32)

    first = torch.autograd.grad(scores, case.leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(scores, case.leaves, upstream)

    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


# Regression: the backward read the entropy and the lse that the caller had changed, which raised an error.
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("memory", ("recompute", "cached"))
@pytest.mark.parametrize("changed", OUTPUTS)
def test_a_score_that_is_changed_in_place_has_the_gradient_of_the_change(changed, memory, dtype):
    case = make_case(spread_max=20.0).to(dtype)
    mask = torch.linspace(-1, 1, 11).round()  # Some rows are masked out.
    upstream = upstream_of(11, torch.float32)
    index = OUTPUTS.index(changed)

    scores = score(case, memory=memory)
    scores[index].mul_(mask)
    ours = gradients(scores, case, upstream)

    upstream[index] = upstream[index] * mask
    truth = gradients(score(case, memory=memory), case, upstream)
    assert all(torch.equal(our, true) for our, true in zip(ours, truth, strict=True))


@pytest.mark.parametrize("changed", OUTPUTS)
def test_a_score_without_a_gradient_may_be_overwritten(changed):
    case = make_case()
    others = [index for index, name in enumerate(OUTPUTS) if name != changed]
    upstream = [upstream_of(11)[index] for index in others]

    scores = score(case)
    with torch.no_grad():
        scores[OUTPUTS.index(changed)].fill_(torch.nan)
    ours = gradients([scores[index] for index in others], case, upstream)

    truth = score(case)
    assert_same(ours, gradients([truth[index] for index in others], case, upstream))


def test_the_loss_and_scores_of_gradients_in_the_forward_may_be_changed_in_place():
    case = make_case()
    loss, *scores = requested(linear_logprob_loss(*case, logprob_coef=-1.0, entropy_coef=0.1))

    loss.mul_(2.0)
    for each in scores:
        each.zero_()
    ours = gradients(loss, case)

    truth = linear_logprob_loss(*case, logprob_coef=-2.0, entropy_coef=0.2).loss
    assert_same(ours, gradients(truth, case))


@pytest.mark.filterwarnings("ignore:logprobd.*an autograd kernel was not registered")
@pytest.mark.parametrize("leaf", (0, 1, 2))
def test_a_second_derivative_raises(leaf):
    case = make_case()
    logprob, entropy, _, _ = score(case)
    selected = case.leaves[leaf]
    (gradient,) = torch.autograd.grad((logprob * entropy).sum(), selected, create_graph=True)

    with pytest.raises(RuntimeError, match="derivative .* is not implemented"):
        (gradient.square().sum() + selected.sum()).backward()


# Threads.


def test_eight_concurrent_threads_get_the_results_of_one():
    cases = [make_case(16, 33, 257, torch.float32, seed=seed) for seed in range(8)]
    upstream = upstream_of(16, torch.float32)
    alone = [gradients(score(case), case, upstream) for case in cases]
    together: list = [None] * 8
    ready = threading.Barrier(8)

    def work(i: int) -> None:
        ready.wait()
        for _ in range(5):
            together[i] = gradients(score(cases[i]), cases[i], upstream)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for ours, truth in zip(together, alone, strict=True):
        for our, same in zip(ours, truth, strict=True):
            torch.testing.assert_close(our, same, rtol=1e-5, atol=1e-6)


def test_the_logits_of_the_cases_are_as_large_as_the_tests_assume():
    case = make_case(11, 9, 200, spread_max=20.0)

    spread = reference_logits(case.hidden, case.weight).std(1)

    assert spread.min() < 2 and spread.max() > 10
