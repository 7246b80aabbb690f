"""A loss whose gradients are computed in the forward pass has the values and gradients of linear_logprob."""

import math

import pytest
import torch
from gradient_cases import (
    IGNORED,
    OPTIONS,
    SIXTEEN_BIT_ERROR_MAX,
    Case,
    assert_same,
    error_of,
    gradients,
    make_case,
    score,
    true_scores,
    upstream_of,
)
from linear_logprob_reference import requested
from logprobd_ops import linear_logprob, linear_logprob_loss
from raw_operator import raw_arguments
from torch import Tensor

NAMES = ("logprob_coef", "entropy_coef", "lse_coef", "mean_logit_coef")
CACHE_ROW_BYTES = 200 * 8  # size of one row of a case's logits in fp64


def coefficients_of(shape, dtype=torch.float64) -> dict[str, Tensor]:
    return dict(zip(NAMES, upstream_of(shape, dtype), strict=True))


def token_loss(case: Case, coefficients: dict[str, Tensor], **options) -> Tensor:
    """Returns the loss that is computed from the scores of linear_logprob."""
    scores = score(case, **options)
    return sum((coefficients[name] * s).sum() for name, s in zip(NAMES, scores, strict=True))


def true_loss(case: Case, coefficients: dict[str, Tensor], **options) -> Tensor:
    scores = true_scores(case, **options)
    return sum((coefficients[name] * s).sum() for name, s in zip(NAMES, scores, strict=True))


# Values.


@pytest.mark.parametrize("rows_at_a_time", (1, 4, 11))
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_the_reference_loss_and_gradient(name, rows_at_a_time):
    case = make_case()
    case.target[:] %= OPTIONS[name].get("vocab_valid", 200)
    case.target[[2, 7]] = IGNORED
    coefficients = coefficients_of(11)
    budget = rows_at_a_time * CACHE_ROW_BYTES

    loss, *_ = linear_logprob_loss(*case, **coefficients, **OPTIONS[name], memory_budget=budget)

    truth = true_loss(case, coefficients, **OPTIONS[name])
    assert_same([loss], [truth])
    assert_same(gradients(loss, case), gradients(truth, case))


@pytest.mark.parametrize("name", NAMES)
def test_a_single_coefficient(name):
    case = make_case()
    coefficients = {other: torch.zeros(11, dtype=torch.float64) for other in NAMES}
    coefficients[name] = coefficients_of(11)[name]

    loss, *_ = linear_logprob_loss(*case, **{name: coefficients[name]}, memory_budget=0)

    truth = true_loss(case, coefficients)
    assert_same([loss], [truth])
    assert_same(gradients(loss, case), gradients(truth, case))


@pytest.mark.parametrize("reduction", ("sum", "mean"))
@pytest.mark.parametrize("memory_budget", (None, 0))
def test_a_number_is_the_coefficient_of_every_valid_row(reduction, memory_budget):
    case = make_case()
    case.target[::3] = IGNORED
    num_valid = 7
    numbers = {"logprob_coef": -1.0, "entropy_coef": 0.25, "lse_coef": 0.0}
    share = 1 / num_valid if reduction == "mean" else 1
    tensors = {
        name: torch.full(case.target.shape, number * share, dtype=torch.float64)
        for name, number in numbers.items()
    }
    options = {"memory_budget": memory_budget}
    truth = linear_logprob_loss(*case, **tensors, **options)[0]

    loss = linear_logprob_loss(*case, **numbers, reduction=reduction, **options)[0]

    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=1e-12)
    for ours, true in zip(gradients(loss, case), gradients(truth, case), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_a_mean_of_coefficients_per_row_is_not_rounded_to_their_dtype(dtype):
    case = make_case()
    case.target[::3] = IGNORED
    coefficients = upstream_of(11, torch.float32)[0].to(dtype)
    truth = linear_logprob_loss(*case, logprob_coef=coefficients.double() / 7)[0]

    loss = linear_logprob_loss(*case, logprob_coef=coefficients, reduction="mean")[0]

    tolerance = {"rtol": 1e-6, "atol": 1e-7}  # the error of a division in fp32
    torch.testing.assert_close(loss, truth, **tolerance)
    for ours, true in zip(gradients(loss, case), gradients(truth, case), strict=True):
        torch.testing.assert_close(ours, true, **tolerance)


def test_the_mean_over_no_rows_is_zero():
    case = make_case()
    case.target.fill_(IGNORED)
    loss = linear_logprob_loss(*case, logprob_coef=-1.0, reduction="mean")[0]
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(loss, case))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_rows_that_fit_the_budget_have_the_gradient_bits_of_linear_logprob(dtype):
    case = make_case(64, 33, 507).to(dtype)
    case.target[::9] = IGNORED
    coefficients = coefficients_of(64, torch.float64 if dtype == torch.float64 else torch.float32)

    loss, *_ = linear_logprob_loss(*case, **coefficients)
    ours = gradients(loss, case)

    truth = gradients(token_loss(case, coefficients, memory="cached"), case)
    assert all(torch.equal(our, same) for our, same in zip(ours, truth, strict=True))


def test_the_scores_are_those_of_linear_logprob_without_gradients():
    case = make_case()
    case.target[3] = IGNORED
    coefficients = coefficients_of(11)

    names = ("argmax", "mean_logit", "max_logit", "min_logit")  # all that it can return
    requests = {f"return_{name}": True for name in names}
    _, *ours = linear_logprob_loss(*case, **coefficients, memory_budget=0, **requests)

    assert_same(requested(ours), requested(linear_logprob(*case, **requests)))
    assert not any(each.requires_grad for each in requested(ours))


def test_an_entropy_with_a_coefficient_counts_even_if_it_is_not_returned():
    case = make_case()
    coefficients = coefficients_of(11)

    loss, _, entropy, *_ = linear_logprob_loss(*case, **coefficients, need_entropy=False)

    assert entropy.numel() == 0
    assert_same([loss], [true_loss(case, coefficients)])


@pytest.mark.parametrize("memory_budget", (None, 0))
def test_sixteen_bit_gradients_are_rounded_once_in_one_block_or_many(memory_budget):
    case = make_case(100, 33, 257).to(torch.bfloat16)
    coefficients = coefficients_of(100, torch.float32)

    loss, *_ = linear_logprob_loss(*case, **coefficients, memory_budget=memory_budget)

    assert loss.dtype == torch.float32 and loss.shape == ()
    ours = gradients(loss, case)
    exact = case.to(torch.float64)
    truth = gradients(
        true_loss(exact, {name: each.double() for name, each in coefficients.items()}), exact
    )
    assert all(our.dtype == torch.bfloat16 for our in ours)
    assert all(
        error_of(our, true) <= SIXTEEN_BIT_ERROR_MAX for our, true in zip(ours, truth, strict=True)
    )


def test_more_rows_than_a_block_holds():
    """kBlockRows is 32,768."""
    few = make_case(1000, 8, 20)
    many = few._replace(hidden=few.hidden.repeat(33, 1), target=few.target.repeat(33))
    coefficients = coefficients_of(33_000)

    loss, *_ = linear_logprob_loss(*many, **coefficients)

    truth = true_loss(many, coefficients)
    torch.testing.assert_close(loss, truth)
    for our, true in zip(gradients(loss, few), gradients(truth, few), strict=True):
        assert error_of(our, true) <= 1e-10


def test_sequences_of_any_stride():
    case = make_case(12)
    tied = case._replace(
        hidden=case.hidden.view(3, 4, 9).transpose(0, 1), target=case.target.view(3, 4).T
    )
    coefficients = {name: each.T for name, each in coefficients_of((3, 4)).items()}

    loss, logprob, *_ = linear_logprob_loss(*tied, **coefficients, memory_budget=0)

    truth = true_loss(tied, coefficients)
    assert logprob.shape == (4, 3)
    assert_same([loss, *gradients(loss, case)], [truth, *gradients(truth, case)])


# Rows.


@pytest.mark.parametrize("memory_budget", (None, 3 * CACHE_ROW_BYTES))
def test_ignored_rows_do_not_count_whatever_they_and_their_coefficients_hold(memory_budget):
    case = make_case()
    ignored = [0, 4, 10]
    valid = [row for row in range(11) if row not in ignored]
    case.target[ignored] = IGNORED
    coefficients = coefficients_of(11)
    rest = case._replace(hidden=case.hidden[valid], target=case.target[valid])
    truth = true_loss(rest, {name: each[valid] for name, each in coefficients.items()})
    true_grads = gradients(truth, case)
    with torch.no_grad():
        case.hidden[ignored] = math.nan
    for each in coefficients.values():
        each[ignored] = math.nan

    loss, *_ = linear_logprob_loss(*case, **coefficients, memory_budget=memory_budget)

    assert_same([loss, *gradients(loss, case)], [truth, *true_grads])


@pytest.mark.parametrize("memory_budget", (None, 3 * CACHE_ROW_BYTES))
def test_rows_with_coefficient_zero_are_scored_but_have_no_gradient(memory_budget):
    case = make_case()
    without = [1, 2, 9]
    coefficients = coefficients_of(11)
    for each in coefficients.values():
        each[without] = 0
    truth = true_loss(case, coefficients)
    true_grads = gradients(truth, case)
    with torch.no_grad():
        case.hidden[9] = math.nan

    loss, logprob, *_ = linear_logprob_loss(*case, **coefficients, memory_budget=memory_budget)

    ours = gradients(loss, case)
    assert (logprob[[1, 2]] != 0).all() and logprob[9].isnan()
    assert (ours[0][without] == 0).all()
    assert_same([loss, *ours], [truth, *true_grads])


@pytest.mark.parametrize("memory_budget", (None, 0))
def test_coefficients_that_are_all_zero_give_exact_zeros(memory_budget):
    case = make_case()

    loss, *_ = linear_logprob_loss(*case, logprob_coef=torch.zeros(11), memory_budget=memory_budget)

    assert loss == 0
    assert all((each == 0).all() for each in gradients(loss, case))


def test_no_rows_and_only_ignored_rows_give_exact_zeros():
    for case in (make_case(0), make_case()):
        case.target[:] = IGNORED

        loss, *_ = linear_logprob_loss(*case, **coefficients_of(case.target.shape))

        assert loss == 0
        assert all((each == 0).all() for each in gradients(loss, case))


def test_out_of_vocab_targets_have_the_gradient_of_minus_lse():
    case = make_case()
    case.target[5] = 2**31
    coefficients = coefficients_of(11)

    loss, *_ = linear_logprob_loss(*case, **coefficients, out_of_vocab="zero", memory_budget=0)

    truth = token_loss(case, coefficients, out_of_vocab="zero")
    assert_same([loss, *gradients(loss, case)], [truth, *gradients(truth, case)])


# The backward.


@pytest.mark.parametrize("factor", (1.0, 3.0, -0.25, 0.0))
def test_gradients_are_multiplied_by_the_upstream_gradient(factor):
    case = make_case()
    coefficients = coefficients_of(11)
    truth = gradients(true_loss(case, coefficients) * factor, case)

    loss, *_ = linear_logprob_loss(*case, **coefficients)

    assert_same(gradients(loss * factor, case), truth)


def test_a_factor_of_one_does_not_touch_the_gradient():
    shared = torch.tensor([2.0], device="cpu").expand(3)  # This tensor cannot be written to.

    torch.ops.logprobd.scale_gradient_(shared, torch.tensor(1.0, device="cpu"))

    with pytest.raises(RuntimeError, match="written-to"):
        torch.ops.logprobd.scale_gradient_(shared, torch.tensor(2.0, device="cpu"))


@pytest.mark.parametrize("needed", (0, 1, 2))
def test_the_gradient_of_a_single_input(needed):
    case = make_case()
    coefficients = coefficients_of(11)
    all_three = gradients(linear_logprob_loss(*case, **coefficients)[0], case)
    for i, leaf in enumerate(case.leaves):
        leaf.requires_grad_(i == needed)

    linear_logprob_loss(*case, **coefficients)[0].backward()

    for i, leaf in enumerate(case.leaves):
        if i == needed:
            assert torch.equal(leaf.grad, all_three[i])
        else:
            assert leaf.grad is None


def test_without_a_bias():
    case = make_case()
    coefficients = coefficients_of(11)

    loss, *_ = linear_logprob_loss(
        *case[:3], **coefficients, temperature=torch.linspace(0.5, 2, 11), memory_budget=0
    )

    no_bias = case._replace(bias=torch.zeros(200, dtype=torch.float64))
    truth = true_loss(no_bias, coefficients, temperature=torch.linspace(0.5, 2, 11))
    leaves = case.leaves[:2]
    assert_same(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))


def test_gradients_of_two_calls_add_up():
    case = make_case()
    coefficients = coefficients_of(11)
    truth = gradients(true_loss(case, coefficients), case)

    for _ in range(2):
        linear_logprob_loss(*case, **coefficients)[0].backward()

    assert_same([leaf.grad for leaf in case.leaves], [2 * each for each in truth])


@pytest.mark.parametrize("retain_graph", (False, True))
def test_a_second_backward_raises_and_says_what_to_do(retain_graph):
    case = make_case()
    loss, *_ = linear_logprob_loss(*case, **coefficients_of(11))
    loss.backward(retain_graph=retain_graph)

    with pytest.raises(RuntimeError, match=r"Call it again .* or use linear_logprob,"):
        loss.backward()


def test_a_second_derivative_raises():
    case = make_case()
    loss, *_ = linear_logprob_loss(*case, **coefficients_of(11))

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, case.leaves, create_graph=True)


def test_no_gradients_are_formed_if_no_backward_can_follow():
    case = make_case()
    coefficients = coefficients_of(11)
    truth = true_loss(case, coefficients)

    with torch.no_grad():
        loss, *_ = linear_logprob_loss(*case, **coefficients)

    assert not loss.requires_grad
    assert_same([loss], [truth.detach()])
    detached, *_ = linear_logprob_loss(*[each.detach() for each in case], **coefficients)
    assert not detached.requires_grad and torch.equal(detached, loss)


def test_under_activation_checkpointing():
    case = make_case()
    coefficients = coefficients_of(11)

    def function(*inputs):
        return linear_logprob_loss(*inputs, **coefficients)[0]

    loss = torch.utils.checkpoint.checkpoint(function, *case, use_reentrant=False)

    assert_same(gradients(loss, case), gradients(true_loss(case, coefficients), case))


# Compiled callers.


@pytest.mark.parametrize("is_dynamic", (False, True))
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_compiled_caller_gets_the_bits_of_eager(backend, is_dynamic):
    torch._dynamo.reset()

    def function(hidden, weight, target, bias, coefficients):
        loss, logprob, *_ = linear_logprob_loss(
            hidden, weight, target, bias, logprob_coef=coefficients, entropy_coef=0.5 * coefficients
        )
        return 2 * loss, logprob

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=is_dynamic)
    for rows in (11, 30):
        case = make_case(rows).to(torch.bfloat16)
        coefficients = upstream_of(rows, torch.float32)[0]

        ours, truth = compiled(*case, coefficients), function(*case, coefficients)

        assert all(torch.equal(our, same) for our, same in zip(ours, truth, strict=True))
        assert all(
            torch.equal(our, same)
            for our, same in zip(gradients(ours[0], case), gradients(truth[0], case), strict=True)
        )


def arguments_of_loss(case: Case, *, needs: bool) -> dict:
    arguments = raw_arguments(
        *case,
        temperature=0.75,
        scale=1.5,
        return_argmax=True,
        return_mean_logit=True,
        keep_logits=1,
    )
    scores = ("logprob", "entropy", "lse", "mean_logit")
    values, factors = upstream_of(11, torch.float32), (1.0, 0.5, 1.0, -2.0)
    for name, value, factor in zip(scores, values, factors, strict=True):
        arguments |= {f"{name}_coef": value, f"{name}_factor": factor}
    arguments |= {f"needs_d_{name}": needs for name in ("hidden", "weight", "bias")}
    return {**arguments, "is_mean": False, "cache_bytes": 3 * 200 * 4}


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize(
    ("needs_grad", "check"),
    [
        *[(True, check) for check in CHECKS],
        *[(False, check) for check in (*CHECKS, "test_aot_dispatch_dynamic")],
    ],
)
def test_the_operator_passes_opcheck(needs_grad, check):
    """Tracing with gradients is not checked: opcheck would return the gradients, which a backward changes in
    place. linear_logprob_loss does not return them, and compiled callers are tested above."""
    case = make_case().to(torch.float32)
    for leaf in case.leaves:
        leaf.requires_grad_(needs_grad)

    torch.library.opcheck(
        torch.ops.logprobd.linear_logprob_loss.default,
        args=(),
        kwargs=arguments_of_loss(case, needs=needs_grad),
        test_utils=check,
    )


def test_the_scaling_operator_passes_opcheck():
    torch.library.opcheck(
        torch.ops.logprobd.scale_gradient_.default,
        (torch.ones(3, 4), torch.tensor(2.0)),
        test_utils=("test_schema", "test_faketensor"),
    )


# Wrong arguments.

BAD_COEFFICIENTS = {
    "none": {},
    "another shape": {"lse_coef": torch.zeros(10)},
    "a tensor of one number": {"logprob_coef": torch.tensor(1.0)},
    "numbers of 0": {"logprob_coef": 0.0, "entropy_coef": 0.0},
    "an infinite number": {"lse_coef": float("inf")},
    "integers": {"entropy_coef": torch.zeros(11, dtype=torch.int64)},
    "another device": {"mean_logit_coef": torch.zeros(11, device="meta")},
    "with a gradient": {"logprob_coef": torch.zeros(11, requires_grad=True)},
}


@pytest.mark.parametrize("mistake", BAD_COEFFICIENTS)
def test_wrong_coefficients_are_named(mistake):
    names = "|".join(BAD_COEFFICIENTS[mistake]) or "logprob_coef"

    with pytest.raises(ValueError, match=names):
        linear_logprob_loss(*make_case(), **BAD_COEFFICIENTS[mistake])


def test_an_unknown_reduction_is_named():
    with pytest.raises(ValueError, match="reduction is 'none'"):
        linear_logprob_loss(*make_case(), logprob_coef=1.0, reduction="none")


def test_a_negative_budget_is_named():
    with pytest.raises(ValueError, match="memory_budget"):
        linear_logprob_loss(*make_case(), logprob_coef=torch.ones(11), memory_budget=-1)
