"""Cross-entropy from hidden states equals that of materialised logits, in values and gradients."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from linear_logprob_reference import reference, reference_logits, seeded
from logprobd_ops.losses import linear_cross_entropy
from torch import Tensor
from torch.nn.functional import cross_entropy

REDUCTIONS = ("none", "sum", "mean")
IGNORED = -100
# Logits reach 80 and are sums of 24 products, so in fp32 they and lse have errors of about 10 * 80 * 2^-24.
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
}


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor


def make_case(rows=13, vocab=37, size=24, ignored=(2, 7), dtype=torch.float64, seed=0) -> Case:
    """Returns rows whose logits have standard deviations from 1 (flat) to 20 (peaked). Every third target is the
    argmax."""
    generator = seeded(seed)
    spread = torch.linspace(1, 20, rows, dtype=torch.float64).unsqueeze(-1)
    hidden = spread * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, size, generator=generator, dtype=torch.float64) / size**0.5
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
    target = torch.randint(vocab, (rows,), generator=generator)
    hidden, weight, bias = (tensor.to(dtype) for tensor in (hidden, weight, bias))
    target[::3] = reference(hidden, weight, target, bias).argmax[::3]
    target[list(ignored)] = IGNORED
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    return Case(leaves[0], leaves[1], target, leaves[2])


def logits_of(case: Case, **options) -> Tensor:
    return reference_logits(case.hidden, case.weight, case.bias, **options)


def class_weights_of(vocab: int) -> Tensor:
    """Returns class weights from 0 to 2, which are exact in fp32."""
    return torch.arange(vocab).remainder(9).double() / 4


def assert_same(ours: Tensor, truth: Tensor, case: Case) -> None:
    """Asserts equal values, and equal gradients for upstream gradients of both signs."""
    tolerance = TOLERANCES[case.hidden.dtype]
    assert ours.dtype == case.hidden.dtype
    torch.testing.assert_close(ours.double(), truth.double(), **tolerance)
    leaves = (case.hidden, case.weight, case.bias)
    upstream = torch.randn(truth.shape, generator=seeded(1)).double()
    our_gradients = torch.autograd.grad(ours, leaves, upstream.to(ours.dtype))
    true_gradients = torch.autograd.grad(truth, leaves, upstream.to(truth.dtype))
    for name, our, true in zip(
        ("hidden", "weight", "bias"), our_gradients, true_gradients, strict=True
    ):
        torch.testing.assert_close(
            our, true, **tolerance, msg=lambda text, n=name: f"d_{n}: {text}"
        )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_it_equals_the_cross_entropy_of_the_logits_for_each_reduction(reduction, dtype):
    case = make_case(dtype=dtype)

    loss = linear_cross_entropy(*case, reduction=reduction)

    assert_same(loss, cross_entropy(logits_of(case), case.target, reduction=reduction), case)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_label_smoothing_is_that_of_cross_entropy(reduction, smoothing):
    case = make_case()

    loss = linear_cross_entropy(*case, reduction=reduction, label_smoothing=smoothing)

    truth = cross_entropy(
        logits_of(case), case.target, reduction=reduction, label_smoothing=smoothing
    )
    assert_same(loss, truth, case)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("softcap", [None, 15.0])
def test_class_weights_smoothing_and_cap_work_together(reduction, smoothing, softcap):
    case = make_case()
    class_weights = class_weights_of(37)

    loss = linear_cross_entropy(
        *case,
        reduction=reduction,
        label_smoothing=smoothing,
        class_weights=class_weights,
        softcap=softcap,
    )

    truth = cross_entropy(
        logits_of(case, softcap=softcap),
        case.target,
        class_weights,
        reduction=reduction,
        label_smoothing=smoothing,
    )
    assert_same(loss, truth, case)


def test_smoothing_with_class_weights_is_accurate_in_fp32():
    case = make_case(dtype=torch.float32)
    class_weights = class_weights_of(37)

    loss = linear_cross_entropy(*case, label_smoothing=0.2, class_weights=class_weights.float())

    truth = cross_entropy(logits_of(case), case.target, class_weights, label_smoothing=0.2)
    assert_same(loss, truth, case)


def test_scale_and_a_temperature_of_each_row_change_the_logits():
    case = make_case()
    options = {"scale": 0.5, "temperature": torch.linspace(0.5, 2, 13, dtype=torch.float64)}

    loss = linear_cross_entropy(*case, label_smoothing=0.1, **options)

    truth = cross_entropy(logits_of(case, **options), case.target, label_smoothing=0.1)
    assert_same(loss, truth, case)


@pytest.mark.parametrize("class_weights", [class_weights_of(30), class_weights_of(37), None])
def test_padding_columns_do_not_count(class_weights):
    case = make_case()
    case.target.clamp_(max=29)
    used = None if class_weights is None else class_weights[:30]

    loss = linear_cross_entropy(
        *case, label_smoothing=0.2, class_weights=class_weights, vocab_valid=30
    )

    truth = cross_entropy(logits_of(case, vocab_valid=30), case.target, used, label_smoothing=0.2)
    assert_same(loss, truth, case)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_z_loss_is_averaged_over_valid_rows_whatever_their_class_weights(reduction):
    case = make_case()
    class_weights = class_weights_of(37)

    loss, z_loss, *_ = linear_cross_entropy(
        *case, reduction=reduction, z_loss=1e-2, class_weights=class_weights, return_z_loss=True
    )

    logits = logits_of(case)
    rows = 1e-2 * logits.logsumexp(-1).square() * (case.target != IGNORED)
    z_truth = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / 11}[reduction]
    truth = cross_entropy(logits, case.target, class_weights, reduction=reduction) + z_truth
    assert_same(loss, truth, case)
    torch.testing.assert_close(z_loss, z_truth.detach())
    assert not z_loss.requires_grad


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_token_scaling_multiplies_each_loss_by_the_constant_probability_of_its_target(reduction):
    case = make_case()
    class_weights = class_weights_of(37)

    loss, z_loss, *_ = linear_cross_entropy(
        *case,
        reduction=reduction,
        z_loss=1e-2,
        label_smoothing=0.1,
        class_weights=class_weights,
        softcap=30.0,
        token_scaling=True,
        return_z_loss=True,
    )

    logits = logits_of(case, softcap=30.0)
    is_valid = case.target != IGNORED
    ids = case.target.clamp(min=0).unsqueeze(-1)
    probability = (logits.softmax(-1).gather(-1, ids).squeeze(-1) * is_valid).detach()
    assert probability.max() > 0.9  # Otherwise rows with confident targets would not be tested.
    nll = cross_entropy(logits, case.target, class_weights, reduction="none", label_smoothing=0.1)
    z = 1e-2 * logits.logsumexp(-1).square() * is_valid
    if reduction == "mean":
        nll, z = nll / class_weights[case.target[is_valid]].sum(), z / 11
    truth, z_truth = (nll + z) * probability, (z * probability).detach()
    if reduction != "none":
        truth, z_truth = truth.sum(), z_truth.sum()
    assert_same(loss, truth, case)
    torch.testing.assert_close(z_loss, z_truth)


def test_predicted_tokens_and_accuracy_are_those_of_the_argmax():
    case = make_case()
    truth = reference(*case)

    _, _, accuracy, predicted = linear_cross_entropy(
        *case, return_token_accuracy=True, return_predicted_tokens=True
    )

    is_valid = case.target != IGNORED
    assert predicted.dtype == torch.int64
    assert predicted.tolist() == truth.argmax.masked_fill(~is_valid, -1).tolist()
    hits = (truth.argmax == case.target).sum().item()
    assert 0 < hits < 11
    assert accuracy.item() == pytest.approx(hits / 11)


def test_the_accuracy_of_an_ignored_row_is_zero():
    case = make_case(ignored=(0,))
    case.target[0] = 0
    is_hit = (reference(*case).argmax == case.target) & (case.target != 0)

    output = linear_cross_entropy(
        *case, reduction="none", ignore_index=0, return_token_accuracy=True
    )

    # Id 0 is ignored here. It is also the argmax that linear_logprob returns for ignored rows.
    assert output.token_accuracy.tolist() == is_hit.float().tolist()
    assert output.z_loss is None and output.predicted_tokens is None


def test_accuracy_and_mean_logit_are_not_confused_when_both_are_needed():
    case = make_case()

    output = linear_cross_entropy(*case, label_smoothing=0.1, return_predicted_tokens=True)

    assert_same(output.loss, cross_entropy(logits_of(case), case.target, label_smoothing=0.1), case)
    assert output.predicted_tokens.max() > 1


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_of_ignored_rows_has_no_loss_and_no_gradients(reduction):
    case = make_case(ignored=range(13))

    output = linear_cross_entropy(
        *case,
        reduction=reduction,
        z_loss=1e-2,
        label_smoothing=0.1,
        class_weights=class_weights_of(37),
        token_scaling=True,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
    )

    assert not output.loss.any() and not output.z_loss.any() and not output.token_accuracy.any()
    assert output.predicted_tokens.tolist() == [-1] * 13
    gradients = torch.autograd.grad(output.loss.sum(), (case.hidden, case.weight, case.bias))
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_loss_of_no_rows_is_zero(reduction):
    case = make_case(rows=3, ignored=())
    hidden, target = case.hidden[:0], case.target[:0]

    output = linear_cross_entropy(
        hidden,
        case.weight,
        target,
        case.bias,
        reduction=reduction,
        label_smoothing=0.1,
        return_token_accuracy=True,
    )

    assert output.loss.shape == ((0,) if reduction == "none" else ())
    assert output.loss.sum() == 0 and output.token_accuracy.sum() == 0
    gradients = torch.autograd.grad(output.loss.sum(), (case.weight, case.bias))
    assert not any(gradient.any() for gradient in gradients)


def test_values_of_ignored_rows_do_not_affect_the_loss_or_gradients():
    case = make_case()
    truth = cross_entropy(logits_of(case), case.target, label_smoothing=0.1)
    true_gradient = torch.autograd.grad(truth, case.weight)[0]
    with torch.no_grad():
        case.hidden[2] = float("nan")

    loss = linear_cross_entropy(*case, label_smoothing=0.1)
    gradients = torch.autograd.grad(loss, (case.weight, case.hidden))

    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(gradients[0], true_gradient)
    assert not gradients[1][2].any()


def test_rows_may_have_any_leading_shape_and_int32_targets():
    case = make_case(rows=12)
    class_weights = class_weights_of(37)

    output = linear_cross_entropy(
        case.hidden.reshape(3, 4, 24),
        case.weight,
        case.target.reshape(3, 4).int(),
        case.bias,
        reduction="none",
        class_weights=class_weights,
        return_predicted_tokens=True,
    )

    truth = cross_entropy(logits_of(case), case.target, class_weights, reduction="none")
    assert_same(output.loss, truth.reshape(3, 4), case)
    assert output.predicted_tokens.shape == (3, 4)


def test_reductions_treat_targets_of_class_weight_zero_as_cross_entropy_does():
    case = make_case()
    class_weights = class_weights_of(37)
    class_weights[case.target[0]] = 0

    loss = linear_cross_entropy(*case, class_weights=class_weights)

    assert_same(loss, cross_entropy(logits_of(case), case.target, class_weights), case)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "average"}, "reduction.*average"),
        ({"label_smoothing": 1.5}, "label_smoothing.*1.5"),
        ({"label_smoothing": -0.1}, "label_smoothing.*-0.1"),
        ({"class_weights": torch.ones(36)}, r"class_weights.*37.*\[36\]"),
        ({"class_weights": torch.ones(38)}, r"class_weights.*37.*\[38\]"),
        ({"class_weights": torch.ones(37, 1)}, r"class_weights.*\[37, 1\]"),
        ({"class_weights": torch.ones(29), "vocab_valid": 30}, r"class_weights.*30.*\[29\]"),
    ],
)
def test_an_option_out_of_range_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*make_case(), **options)


@pytest.mark.parametrize(
    "function", [linear_cross_entropy, torch.compile(linear_cross_entropy, backend="eager")]
)
@pytest.mark.parametrize("gradients_in_forward", [True, False])
def test_a_budget_may_be_a_float_without_a_fraction(function, gradients_in_forward):
    case = make_case()

    loss = function(*case, memory_budget=2.5e3, gradients_in_forward=gradients_in_forward)

    assert_same(loss, cross_entropy(logits_of(case), case.target, case.bias.new_ones(37)), case)


def check_class_weights_of_a_group_of_one(rank: int, size: int) -> None:
    """A group of one rank holds the whole vocabulary, as no group does."""
    alone = [dist.new_group([each]) for each in range(size)][rank]
    case = make_case()
    class_weights = class_weights_of(37)

    loss = linear_cross_entropy(*case, class_weights=class_weights, process_group=alone)

    assert_same(loss, cross_entropy(logits_of(case), case.target, class_weights), case)
    with pytest.raises(ValueError, match=r"class_weights.*vocabulary, 37, but.*\[38\]"):
        linear_cross_entropy(*case, class_weights=class_weights_of(38), process_group=alone)


def test_class_weights_of_a_group_of_one_rank_have_one_entry_for_each_id(two_ranks):
    two_ranks.results(check_class_weights_of_a_group_of_one)
