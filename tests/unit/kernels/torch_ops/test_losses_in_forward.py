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


# The default.


def is_formed_in_forward(loss: Tensor) -> bool:
    return "LossFunction" in loss.grad_fn.name()


@pytest.mark.parametrize("reduction", ("sum", "mean"))
@pytest.mark.parametrize("smoothing", (0.0, 0.2))
def test_the_gradients_of_a_reduced_loss_are_formed_in_the_forward_by_default(reduction, smoothing):
    case = make_case()
    options = {"reduction": reduction, "label_smoothing": smoothing}

    loss = linear_cross_entropy(*case, **options)

    assert is_formed_in_forward(loss)
    later = linear_cross_entropy(*case, **options, gradients_in_forward=False)
    assert not is_formed_in_forward(later)
    assert_same([loss, *gradients(loss, case)], [later, *gradients(later, case)])


@pytest.mark.parametrize(
    "options",
    [{"z_loss": 1e-3}, {"token_scaling": True}, {"memory": "recompute"}, {"memory": "cached"}],
    ids=lambda options: next(iter(options.items())),
)
def test_other_losses_form_their_gradients_in_the_backward(options):
    case = make_case()

    loss = linear_cross_entropy(*case, **options)

    assert not is_formed_in_forward(loss)
    first = torch.autograd.grad(loss, case.leaves, retain_graph=True)
    assert_same(torch.autograd.grad(loss, case.leaves), first)


def test_a_loss_a_row_and_a_given_buffer_get_their_gradients_in_the_backward():
    case = make_case().to(torch.float32)
    buffer = torch.zeros(200, 9)
    (truth,) = torch.autograd.grad(linear_cross_entropy(*case, reduction="sum"), case.weight)

    losses = linear_cross_entropy(*case, reduction="none", weight_grad=buffer)
    losses.backward(torch.ones_like(losses))

    torch.testing.assert_close(buffer, truth)


def test_a_second_backward_names_the_option_that_allows_it():
    case = make_case()
    loss = linear_cross_entropy(*case)
    loss.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="gradients_in_forward=False"):
        loss.backward()


@pytest.mark.parametrize("is_summed_first", (False, True))
def test_gradients_accumulate_over_micro_batches(is_summed_first):
    case = make_case()
    halves = [
        Case(case.hidden[rows], case.weight, case.target[rows], case.bias)
        for rows in (slice(0, 6), slice(6, 11))
    ]
    truth = gradients(linear_cross_entropy(*case, reduction="sum") / 11, case)

    losses = [linear_cross_entropy(*half, reduction="sum") / 11 for half in halves]
    for loss in [sum(losses)] if is_summed_first else losses:
        loss.backward()

    assert_same([leaf.grad for leaf in case.leaves], truth)


def test_an_evaluation_has_the_bits_of_training_and_no_gradient():
    case = make_case().to(torch.bfloat16)
    trained = linear_cross_entropy(*case)

    with torch.no_grad():
        evaluated = linear_cross_entropy(*case)
    constant = linear_cross_entropy(*[each.detach() for each in case])

    assert torch.equal(evaluated, trained) and torch.equal(constant, trained)
    assert not evaluated.requires_grad and not constant.requires_grad


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.float32, torch.float16)])
def test_a_loss_scale_keeps_the_small_gradients_of_fp16(dtypes):
    """Gradients of 1e-8 would become 0 in fp16 if they were rounded before they are scaled."""
    target = torch.arange(64).remainder(11)
    hidden = torch.nn.functional.one_hot(target, 64).to(dtypes[0]).requires_grad_()
    weight = (16 * torch.eye(64)).to(dtypes[1]).requires_grad_()
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target).backward()

    loss = linear_cross_entropy(hidden, weight, target)
    (2.0**16 * loss).backward()

    for leaf, true in zip((hidden, weight), exact, strict=True):
        error = (leaf.grad.double() / 2**16 - true.grad).norm()
        assert error <= 2e-3 * true.grad.norm()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_autocast_to_fp16_forms_the_gradients_in_the_backward(dtype):
    case = make_case().to(torch.float32)

    with torch.autocast(case.hidden.device.type, dtype=dtype):
        loss = linear_cross_entropy(*case)

    assert is_formed_in_forward(loss) == (dtype == torch.bfloat16)


def test_a_compiled_mean_loss_has_the_gradients_of_eager():
    torch._dynamo.reset()
    case = make_case().to(torch.float32)
    truth = gradients(linear_cross_entropy(*case), case)

    loss = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")(*case)

    assert all(torch.equal(a, b) for a, b in zip(gradients(loss, case), truth, strict=True))
