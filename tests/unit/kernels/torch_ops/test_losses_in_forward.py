"""A cross-entropy whose gradients are computed in the forward pass has the values and gradients of torch's."""

import pytest
import torch
from gradient_cases import IGNORED, Case, assert_same, gradients, make_case
from logprobd_ops import linear_cross_entropy
from torch import Tensor


@pytest.mark.parametrize("reduction", ("sum", "mean"))
@pytest.mark.parametrize("smoothing", (0.0, 0.2))
@pytest.mark.parametrize("has_classes", (False, True))
@pytest.mark.parametrize("memory_budget", (None, 0))
def test_cross_entropy_with_gradients_in_the_forward(
    reduction, smoothing, has_classes, memory_budget
):
    case = make_case()
    case.target[[2, 7]] = IGNORED
    classes = torch.arange(200).remainder(9).double() / 4 if has_classes else None
    options = {"reduction": reduction, "label_smoothing": smoothing}
    logits = torch.nn.functional.linear(case.hidden, case.weight, case.bias)
    truth = torch.nn.functional.cross_entropy(logits, case.target, classes, **options)

    loss = linear_cross_entropy(
        *case,
        class_weights=classes,
        gradients_in_forward=True,
        memory_budget=memory_budget,
        **options,
    )

    assert_same([loss, *gradients(3 * loss, case)], [truth, *gradients(3 * truth, case)])


def test_cross_entropy_returns_the_same_values_besides_the_loss():
    case = make_case()
    case.target[:4] = true_scores_argmax(case)[:4]
    options = {"return_z_loss": True, "return_token_accuracy": True, "label_smoothing": 0.1}

    ours = linear_cross_entropy(
        *case, gradients_in_forward=True, return_predicted_tokens=True, **options
    )

    truth = linear_cross_entropy(*case, return_predicted_tokens=True, **options)
    assert_same(ours, truth)


def true_scores_argmax(case: Case) -> Tensor:
    return torch.nn.functional.linear(case.hidden, case.weight, case.bias).argmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "none"},
        {"z_loss": 1e-3},
        {"token_scaling": True},
        {"weight_grad": torch.zeros(200, 9)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_cross_entropy_rejects_options_that_a_forward_cannot_support(options):
    with pytest.raises(ValueError, match=f"gradients_in_forward: {next(iter(options))}"):
        linear_cross_entropy(*make_case(), gradients_in_forward=True, **options)
