"""The drop-in functions of Liger have the arguments, results and gradients of Liger's own functions.

Liger's kernels run on a GPU only: test_gpu_drop_ins.py compares values with them, this file with torch's.
"""

import sys

import pytest
import torch
from drop_in_cases import VOCAB, arguments, close, gradients, make_case, near, relative_error
from linear_logprob_reference import reference_logits
from logprobd_ops.compat import liger
from logprobd_ops.losses import linear_cross_entropy
from originals import original
from torch.nn.functional import cross_entropy


def test_arguments_are_those_of_liger():
    functional = original("liger_kernel.transformers.functional")
    module = original("liger_kernel.transformers.fused_linear_cross_entropy")
    name = "LigerFusedLinearCrossEntropyLoss"

    for ours, theirs in (
        (liger.liger_fused_linear_cross_entropy, functional.liger_fused_linear_cross_entropy),
        (
            liger.LigerFusedLinearCrossEntropyFunction.apply,
            functional.LigerFusedLinearCrossEntropyFunction.forward,
        ),
        (getattr(liger, name), getattr(module, name)),
        (getattr(liger, name).forward, getattr(module, name).forward),
    ):
        assert arguments(ours) == arguments(theirs), ours


@pytest.fixture
def loaded_liger(monkeypatch):
    """Loads Liger, and restores its autograd function after the test."""
    original("liger_kernel.transformers")
    original("liger_kernel.transformers.model.loss_utils")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "liger_kernel":
            for attribute in ("LigerFusedLinearCrossEntropyFunction", "CrossEntropyOutput"):
                if attribute in vars(module):
                    monkeypatch.setattr(module, attribute, getattr(module, attribute))
    return original


def test_the_result_has_the_fields_of_ligers(loaded_liger, monkeypatch):
    theirs = loaded_liger("liger_kernel.transformers.functional").CrossEntropyOutput
    monkeypatch.setattr(liger, "CrossEntropyOutput", theirs)

    ours = liger.liger_fused_linear_cross_entropy(*make_case(), return_z_loss=True)

    assert type(ours) is theirs
    assert ours.z_loss is not None and ours.token_accuracy is None


def test_the_class_that_stands_in_for_ligers_result_equals_it(loaded_liger):
    theirs = loaded_liger("liger_kernel.transformers.functional").CrossEntropyOutput

    assert arguments(liger.CrossEntropyOutput) == [
        (name, default) for name, default in arguments(theirs)
    ]


def test_ligers_own_entry_points_compute_with_linear_logprob(loaded_liger):
    transformers = loaded_liger("liger_kernel.transformers")
    functional = loaded_liger("liger_kernel.transformers.functional")
    before = transformers.LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)
    hidden, weight, target = case = make_case(torch.float32)
    target[1] = -100

    liger.apply_logprobd_kernel()
    liger.apply_logprobd_kernel()

    truth = cross_entropy(reference_logits(hidden, weight), target, label_smoothing=0.1)
    losses = (
        before(weight, hidden, target),
        transformers.LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)(weight, hidden, target),
        functional.liger_fused_linear_cross_entropy(*case, label_smoothing=0.1),
        loaded_liger("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction.apply(
            *case, label_smoothing=0.1
        )[0],
    )
    for loss in losses:
        near(loss, truth, rtol=1e-5, atol=1e-5)
        for our, true in zip(
            gradients(loss, None, case), gradients(truth, None, case), strict=True
        ):
            assert relative_error(our, true) <= 1e-5
    assert (
        type(functional.liger_fused_linear_cross_entropy(*case, return_token_accuracy=True))
        is functional.CrossEntropyOutput
    )


def test_the_loss_of_a_model_that_liger_has_patched(loaded_liger):
    loss_of = loaded_liger("liger_kernel.transformers.model.loss_utils").LigerForCausalLMLoss
    liger.apply_logprobd_kernel()
    hidden, weight, target = make_case(torch.float32)

    ours = loss_of(
        hidden.unsqueeze(0), weight, target.unsqueeze(0), hidden.shape[-1], num_items_in_batch=4
    )

    logits = reference_logits(hidden, weight)[:-1]
    near(ours, cross_entropy(logits, target[1:], reduction="sum") / 4, rtol=1e-5, atol=1e-5)


def test_the_module_passes_every_option_on():
    hidden, weight, target = case = make_case()
    target[1] = 3
    bias = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)
    classes = torch.arange(VOCAB).remainder(5) / 4
    module = liger.LigerFusedLinearCrossEntropyLoss(
        classes, 3, 1e-2, 0.1, "sum", 30.0, True, torch.float32, True, True, True
    )

    ours = module(weight, hidden, target, bias)

    truth = linear_cross_entropy(
        *case,
        bias,
        reduction="sum",
        ignore_index=3,
        label_smoothing=0.1,
        z_loss=1e-2,
        class_weights=classes,
        token_scaling=True,
        softcap=30.0,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
    )
    for name, true in truth._asdict().items():
        close(getattr(ours, name), true)


def test_the_module_returns_only_the_mean_loss_by_default():
    hidden, weight, target = case = make_case()
    target[1] = -100

    loss = liger.LigerFusedLinearCrossEntropyLoss()(weight, hidden, target)

    truth = cross_entropy(reference_logits(hidden, weight), target)
    close(loss, truth)
    close(gradients(loss, None, case)[1], gradients(truth, None, case)[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing must be in"),
        ({"reduction": "average"}, "reduction must be"),
        ({"softcap": 0.0}, "softcap is 0.0"),
    ],
)
def test_the_module_rejects_what_ligers_module_rejects(options, message):
    theirs = original("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    with pytest.raises(AssertionError):
        theirs(**options)

    with pytest.raises(ValueError, match=message):
        liger.LigerFusedLinearCrossEntropyLoss(**options)


# Liger's tests: batch, rows and sizes that a CPU computes in a second, and their tolerances.
@pytest.mark.parametrize(
    ("rows", "size", "vocab"), [(8, 512, 512), (9 * 7, 41, 41), (94, 423, 320)]
)
@pytest.mark.parametrize(
    ("dtype", "atol", "rtol"), [(torch.bfloat16, 5e-3, 5e-2), (torch.float32, 1e-5, 5e-4)]
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_cases_of_ligers_tests(rows, size, vocab, dtype, atol, rtol, has_bias, reduction):
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    hidden = torch.randn(rows, size, generator=generator).to(dtype).requires_grad_()
    weight = torch.rand(vocab, size, generator=generator).to(dtype).requires_grad_()
    bias = torch.rand(vocab, generator=generator).to(dtype) if has_bias else None
    target = torch.randint(vocab, (rows,), generator=generator)
    target[::5] = -100

    ours = liger.liger_fused_linear_cross_entropy(hidden, weight, target, bias, reduction=reduction)

    logits = reference_logits(hidden, weight, bias)
    truth = cross_entropy(logits, target, reduction=reduction)
    near(ours, truth, rtol=rtol, atol=atol)
    for our, true in zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(truth, (hidden, weight)),
        strict=True,
    ):
        near(our, true, rtol=rtol, atol=atol * (1 if reduction == "mean" else rows))
