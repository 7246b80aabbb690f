"""Error messages name the wrong argument, and values that are not finite affect only their own row."""

import functools
import math

import pytest
import torch
from linear_logprob_reference import requested
from logprobd_ops import (
    linear_cross_entropy,
    linear_divergence,
    linear_divergence_loss,
    linear_logprob_loss,
)
from logprobd_ops.linear_logprob import linear_logprob
from raw_operator import raw_arguments
from score_cases import EVERY_SCORE, exact_case

BAD_ARGUMENTS = {
    "weight of one dimension": ({"weight": torch.ones(8)}, "weight"),
    "weight of three dimensions": ({"weight": torch.ones(1, 20, 8)}, "weight"),
    "weight gathered away": ({"weight": torch.ones(0)}, "weight"),
    "weight without columns": ({"weight": torch.ones(20, 0)}, "weight"),
    "hidden of another size": ({"hidden": torch.ones(6, 9)}, "hidden"),
    "hidden without dimensions": ({"hidden": torch.tensor(1.0)}, "hidden"),
    "fewer targets": ({"target": torch.zeros(5, dtype=torch.int64)}, "target"),
    "more targets": ({"target": torch.zeros(6, 2, dtype=torch.int64)}, "target"),
    "targets of floats": ({"target": torch.zeros(6)}, "target"),
    "targets of truth values": ({"target": torch.zeros(6, dtype=torch.bool)}, "target"),
    "hidden of integers": ({"hidden": torch.ones(6, 8, dtype=torch.int32)}, "hidden"),
    "weight of bytes": ({"weight": torch.ones(20, 8, dtype=torch.int8)}, "weight"),
    "weight of float8": ({"weight": torch.ones(20, 8).to(torch.float8_e4m3fn)}, "weight"),
    "complex hidden": ({"hidden": torch.ones(6, 8, dtype=torch.complex64)}, "hidden"),
    "bias of another size": ({"bias": torch.ones(19)}, "bias"),
    "bias of two dimensions": ({"bias": torch.ones(20, 1)}, "bias"),
    "bias of one": ({"bias": torch.ones(1)}, "bias"),
    "complex bias": ({"bias": torch.ones(20, dtype=torch.complex64)}, "bias"),
    "mean_logit_weights of another size": (
        {"mean_logit_weights": torch.ones(21)},
        "mean_logit_weights",
    ),
    "temperature of another size": ({"temperature": torch.ones(5)}, "temperature"),
    "temperature a column": ({"temperature": torch.ones(6, 1)}, "temperature"),
    "temperature of zero": ({"temperature": 0}, "temperature"),
    "temperature below zero": ({"temperature": -1.0}, "temperature"),
    "temperature not a number": ({"temperature": math.nan}, "temperature"),
    "softcap below zero": ({"softcap": -1.0}, "softcap"),
    "softcap not a number": ({"softcap": math.nan}, "softcap"),
    "one split": ({"hidden_splits": 1}, "hidden_splits"),
    "four splits": ({"hidden_splits": 4}, "hidden_splits"),
    "vocab_start below zero": ({"vocab_start": -1}, "vocab_start"),
    "vocab_valid of zero": ({"vocab_valid": 0}, "vocab_valid"),
    "vocab_valid below zero": ({"vocab_valid": -2}, "vocab_valid"),
    "out_of_vocab of another kind": ({"out_of_vocab": "nothing"}, "out_of_vocab"),
    "hidden_gradient of another kind": ({"hidden_gradient": "mean"}, "hidden_gradient"),
    "sequence_parallel alone": ({"sequence_parallel": True}, "sequence_parallel"),
    "weight elsewhere": ({"weight": torch.ones(20, 8, device="meta")}, "weight"),
    "hidden elsewhere": ({"hidden": torch.ones(6, 8, device="meta")}, "hidden"),
    "bias elsewhere": ({"bias": torch.ones(20, device="meta")}, "bias"),
    "temperature elsewhere": ({"temperature": torch.ones(6, device="meta")}, "temperature"),
    "mean_logit_weights elsewhere": (
        {"mean_logit_weights": torch.ones(20, device="meta"), "return_mean_logit": True},
        "mean_logit_weights",
    ),
}


@pytest.mark.parametrize("mistake", BAD_ARGUMENTS)
def test_the_error_names_the_wrong_argument(mistake):
    changes, name = BAD_ARGUMENTS[mistake]
    right = {
        "hidden": torch.ones(6, 8),
        "weight": torch.ones(20, 8),
        "target": torch.zeros(6, dtype=torch.int64),
    }

    with pytest.raises(ValueError, match=name):
        linear_logprob(**(right | changes))


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("vocab", (125, 507))
def test_a_value_that_is_not_finite_affects_only_its_row(bad, vocab):
    hidden, weight, target, bias = exact_case(7, 31, vocab)
    weight[-1, 3] = 1.0  # Not 0, so that an infinite value gives an infinite logit and not NaN.
    truth = requested(linear_logprob(hidden, weight, target, bias, **EVERY_SCORE))
    hidden[3, 3] = bad

    scores = linear_logprob(hidden, weight, target, bias, **EVERY_SCORE)

    others = [0, 1, 2, 4, 5, 6]
    for ours, before in zip(requested(scores), truth, strict=True):
        assert torch.equal(ours[others], before[others])
    assert all(score[3].isnan() for score in scores[:3])
    assert scores.argmax[3] == -1 and scores.target_rank[3] == -1
    assert scores.max_logit[3].isnan() and scores.min_logit[3].isnan()
    assert scores.sum_p_squared[3].isnan()


def test_a_logit_of_plus_infinity_has_no_scores():
    hidden, weight, target, bias = exact_case(7, 31, 257)
    bias[200] = math.inf

    scores = linear_logprob(hidden, weight, target, bias, **EVERY_SCORE)

    assert (scores.argmax == -1).all() and (scores.target_rank == -1).all()
    for name in ("logprob", "entropy", "lse", "max_logit", "min_logit", "sum_p_squared"):
        assert getattr(scores, name).isnan().all(), name


def test_a_row_of_minus_infinities_has_no_scores():
    hidden, weight, target, _ = exact_case(7, 31, 257)

    logprob, entropy, lse, *_ = linear_logprob(
        hidden, weight, target, torch.full((257,), -math.inf)
    )

    assert logprob.isnan().all() and entropy.isnan().all() and lse.isnan().all()


def test_the_values_of_the_weights_padding_do_not_matter():
    hidden, weight, target, bias = exact_case(vocab=257)
    target %= 125
    mean_logit_weights = torch.linspace(0, 1, 257).double()
    truth = linear_logprob(
        hidden,
        weight[:125],
        target,
        bias[:125],
        mean_logit_weights=mean_logit_weights[:125],
        **EVERY_SCORE,
    )
    weight[125:] = math.nan
    bias[125:] = math.inf
    mean_logit_weights[125:] = math.nan

    scores = linear_logprob(
        hidden,
        weight,
        target,
        bias,
        vocab_valid=125,
        mean_logit_weights=mean_logit_weights,
        **EVERY_SCORE,
    )

    for ours, same in zip(requested(scores), requested(truth), strict=True):
        assert torch.equal(ours, same)


@pytest.mark.parametrize("function", (linear_logprob, linear_logprob_loss, linear_cross_entropy))
def test_an_unknown_keyword_names_the_function_that_was_called(function):
    case = exact_case()
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an .* 'column_weights'"):
        function(case.hidden, case.weight, case.target, column_weights=None)


def divergence_from_itself(function, hidden, weight, _, **options):
    return function(hidden, weight, hidden, weight, **options)


TAKING_A_BUDGET = {
    "linear_logprob": linear_logprob,
    "linear_logprob_loss": functools.partial(linear_logprob_loss, logprob_coef=1.0),
    "linear_cross_entropy": linear_cross_entropy,
    "linear_divergence": functools.partial(divergence_from_itself, linear_divergence),
    "linear_divergence_loss": functools.partial(divergence_from_itself, linear_divergence_loss),
}
TAKING_A_MEMORY = {
    "linear_logprob": linear_logprob,
    "linear_divergence": TAKING_A_BUDGET["linear_divergence"],
    "linear_cross_entropy": linear_cross_entropy,
    "linear_cross_entropy, forward": functools.partial(
        linear_cross_entropy, gradients_in_forward=True
    ),
    "linear_cross_entropy, backward": functools.partial(
        linear_cross_entropy, gradients_in_forward=False
    ),
}


@pytest.mark.parametrize("function", TAKING_A_MEMORY.values(), ids=TAKING_A_MEMORY)
@pytest.mark.parametrize("memory", ("none", "Auto", None))
def test_an_unknown_memory_is_refused_with_the_values_that_exist(function, memory):
    with pytest.raises(ValueError, match=f'^memory is {memory!r}.*"recompute", "cached" or "auto"'):
        function(*exact_case()[:3], memory=memory)


@pytest.mark.parametrize("function", TAKING_A_BUDGET.values(), ids=TAKING_A_BUDGET)
@pytest.mark.parametrize("budget", (-1, -1.0, 0.5, math.inf, -math.inf, math.nan))
def test_a_budget_that_is_no_number_of_bytes_is_named(function, budget):
    with pytest.raises(ValueError, match=f"^memory_budget is {budget}: it must "):
        function(*exact_case()[:3], memory_budget=budget)


OPERATORS = (
    "linear_logprob",
    "linear_logprob_backward",
    "linear_logprob_backward_into",
    "linear_logprob_loss",
    "linear_divergence",
    "linear_divergence_backward",
    "linear_divergence_loss",
)


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_takes_only_tensors_by_position(operator):
    schema = getattr(torch.ops.logprobd, operator).default._schema

    by_position = [str(each.type) for each in schema.arguments if not each.kwarg_only]

    assert set(by_position) <= {"Tensor"}
    assert len({each.name for each in schema.returns}) == len(schema.returns)


def test_a_flag_by_position_is_an_error():
    arguments = raw_arguments(torch.ones(6, 8), torch.ones(20, 8), torch.zeros(6).long())

    with pytest.raises(RuntimeError, match="linear_logprob"):
        torch.ops.logprobd.linear_logprob(*arguments.values(), None)
