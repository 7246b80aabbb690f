"""The drop-in functions of Liger have the arguments, results and gradients of Liger's own functions.

Liger's kernels run on a GPU only: test_gpu_drop_ins.py compares values with them, this file with torch's.
"""

import sys

import pytest
import torch
from drop_in_cases import VOCAB, arguments, close, gradients, make_case, near, relative_error
from linear_logprob_reference import reference_logits, seeded
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

    assert arguments(liger.CrossEntropyOutput) == arguments(theirs)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "average"}, "reduction must be .* 'average'"),
        ({"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\], got -0.1"),
        ({"softcap": -30.0}, "softcap is -30.0: it must be above 0"),
        ({"ce_weight": torch.ones(19)}, r"class_weights .* 20, but has the shape \[19\]"),
        ({"bias": torch.ones(19)}, "bias .*19"),
    ],
)
def test_the_function_says_what_is_wrong_with_an_option(options, message):
    with pytest.raises(ValueError, match=message):
        liger.liger_fused_linear_cross_entropy(*make_case(), **options)


def test_a_label_outside_the_vocabulary_is_named_with_its_row():
    hidden, weight, target = make_case()
    target[4] = VOCAB

    with pytest.raises(IndexError, match=f"target {VOCAB} of row 4 "):
        liger.liger_fused_linear_cross_entropy(hidden, weight, target, ignore_index=-1)


def test_a_reduced_loss_has_one_backward_and_losses_of_rows_have_many():
    case = make_case(torch.float32)
    loss = liger.liger_fused_linear_cross_entropy(*case)
    truth = gradients(loss, None, case)

    with pytest.raises(RuntimeError, match="previous backward .* retain_graph"):
        gradients(loss, None, case)

    of_rows = liger.liger_fused_linear_cross_entropy(*case, reduction="none")
    for _ in range(2):
        for our, true in zip(gradients(of_rows.mean(), None, case), truth, strict=True):
            near(our, true, rtol=1e-5, atol=1e-6)


# The following cases have the shapes, options and tolerances of Liger's own tests. The truth is torch's cross-entropy
# of fp32 logits; Liger rounds logits to the dtype of its inputs first.
LARGE, SMALL = (8 * 128, 1024, 4096), (4 * 47, 31, 123)  # rows, hidden size, vocabulary
WITH_AND_WITHOUT_BIAS = [(LARGE, True), (SMALL, False), (SMALL, True)]
TOLERANCES = {
    ("mean", torch.bfloat16): {"atol": 5e-3, "rtol": 5e-2},
    ("mean", torch.float32): {"atol": 1e-5, "rtol": 5e-4},
    ("sum", torch.bfloat16): {"atol": 5e-2, "rtol": 5e-2},  # Liger's are 5 and 50.
    ("sum", torch.float32): {"atol": 1e-3, "rtol": 5e-2},
}
EVERY_OPTION = {
    "ignore_index": 42,
    "label_smoothing": 0.1,
    "lse_square_scale": 1e-4,
    "softcap": 30.0,
    "return_z_loss": True,
    "accum_dtype": torch.float32,
}


def liger_case(sizes, dtype, has_bias, ignore_index=-100):
    """Returns (hidden, weight, target, bias) with the distributions of Liger's tests. A quarter of the rows is
    ignored."""
    rows, size, vocab = sizes
    generator = seeded(0)
    hidden = torch.randn(rows, size, generator=generator).to(dtype).requires_grad_()
    weight = torch.rand(vocab, size, generator=generator).to(dtype).requires_grad_()
    bias = torch.rand(vocab, generator=generator).to(dtype).requires_grad_() if has_bias else None
    target = torch.randint(vocab, (rows,), generator=generator)
    target[torch.randperm(rows, generator=generator)[: rows // 4]] = ignore_index
    return hidden, weight, target, bias


def fp32_logits(hidden, weight, bias, softcap=None):
    logits = torch.nn.functional.linear(
        hidden.float(), weight.float(), None if bias is None else bias.float()
    )
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def z_loss_of(logits, target, reduction, ignore_index, lse_square_scale):
    is_valid = target != ignore_index
    z_loss = (lse_square_scale * logits.logsumexp(-1).square() * is_valid).sum()
    return z_loss / is_valid.sum() if reduction == "mean" else z_loss


def gradients_near(ours, truth, inputs, **tolerance) -> None:
    inputs = [each for each in inputs if each is not None]
    for our, true in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(truth, inputs), strict=True
    ):
        near(our, true, **tolerance)


@pytest.mark.parametrize(("sizes", "has_bias"), WITH_AND_WITHOUT_BIAS)
@pytest.mark.parametrize(("reduction", "dtype"), TOLERANCES)
@pytest.mark.parametrize("options", [{}, EVERY_OPTION], ids=["plain", "every option"])
def test_ligers_cases(sizes, reduction, dtype, has_bias, options):
    tolerance = TOLERANCES[reduction, dtype]
    ignored = options.get("ignore_index", -100)
    hidden, weight, target, bias = liger_case(sizes, dtype, has_bias, ignored)
    classes = torch.rand(sizes[2], generator=seeded(1)) if options else None
    module = liger.LigerFusedLinearCrossEntropyLoss(classes, reduction=reduction, **options)

    ours = module(weight, hidden, target, bias)
    with torch.no_grad():
        alone = module(weight, hidden, target, bias)

    logits = fp32_logits(hidden, weight, bias, options.get("softcap"))
    truth = cross_entropy(
        logits,
        target,
        classes,
        reduction=reduction,
        ignore_index=ignored,
        label_smoothing=options.get("label_smoothing", 0.0),
    )
    if options:
        z_loss = z_loss_of(logits, target, reduction, ignored, options["lse_square_scale"])
        near(ours.z_loss, z_loss, **tolerance)
        near(alone.z_loss, z_loss, **tolerance)
        truth = truth + z_loss
        ours, alone = ours.loss, alone.loss
    near(ours, truth, **tolerance)
    near(alone, truth, **tolerance)
    gradients_near(ours, truth, (hidden, weight, bias), **tolerance)


@pytest.mark.parametrize(("sizes", "has_bias"), WITH_AND_WITHOUT_BIAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_ligers_cases_of_accuracy_and_predicted_tokens(sizes, dtype, has_bias, ignore_index):
    tolerance = TOLERANCES["mean", dtype]
    hidden, weight, target, bias = liger_case(sizes, dtype, has_bias, ignore_index)
    options = {"return_token_accuracy": True, "return_predicted_tokens": True}

    with torch.no_grad():
        logits = fp32_logits(hidden, weight, bias)
        target[::3] = torch.where(target == ignore_index, ignore_index, logits.argmax(-1))[::3]
        ours = liger.liger_fused_linear_cross_entropy(
            hidden, weight, target, bias, ignore_index=ignore_index, **options
        )

    is_valid = target != ignore_index
    assert (ours.predicted_tokens[~is_valid] == -1).all()
    chosen = logits[is_valid].gather(-1, ours.predicted_tokens[is_valid].unsqueeze(-1))
    near(chosen.squeeze(-1), logits[is_valid].amax(-1), **tolerance)
    is_right = (logits.argmax(-1) == target)[is_valid]
    near(ours.token_accuracy, is_right.float().mean(), **tolerance)


@pytest.mark.parametrize(("sizes", "has_bias"), WITH_AND_WITHOUT_BIAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ligers_cases_of_autocast(sizes, has_bias, dtype):
    hidden, weight, target, bias = liger_case(sizes, torch.float32, has_bias)

    with torch.autocast(hidden.device.type, dtype):
        ours = liger.liger_fused_linear_cross_entropy(hidden, weight, target, bias)

    truth = cross_entropy(fp32_logits(hidden, weight, bias), target)
    near(ours, truth, atol=5e-3, rtol=5e-2)
    gradients_near(ours, truth, (hidden, weight, bias), atol=5e-3, rtol=5e-2)


@pytest.mark.parametrize("sizes", [(2 * 2, 8, 8), (9 * 7, 41, 41)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_ce_weight", [False, True])
def test_ligers_cases_of_the_autograd_function(sizes, has_bias, has_ce_weight):
    hidden, weight, target, bias = liger_case(sizes, torch.float32, has_bias)
    classes = torch.randn(sizes[2], generator=seeded(1)) if has_ce_weight else None
    arguments = (hidden, weight, target, bias, classes, -100, 1e-4, 0.1, "mean", 30.0, True)

    ours = liger.LigerFusedLinearCrossEntropyFunction.apply(*arguments, torch.float32)

    logits = fp32_logits(hidden, weight, bias, 30.0)
    z_loss = z_loss_of(logits, target, "mean", -100, 1e-4)
    truth = cross_entropy(logits, target, classes, label_smoothing=0.1) + z_loss
    near(ours.loss, truth, atol=1e-5, rtol=5e-4)
    near(ours.z_loss, z_loss, atol=1e-5, rtol=5e-4)
    gradients_near(ours.loss, truth, (hidden, weight, bias), atol=1e-5, rtol=5e-4)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("has_ignored", [False, True])
def test_ligers_cases_of_token_scaling(reduction, has_ignored):
    hidden, weight, target, bias = liger_case((8, 8, 16), torch.float32, has_bias=True)
    if not has_ignored:
        target.clamp_(min=0)

    ours = liger.LigerFusedLinearCrossEntropyLoss(reduction=reduction, use_token_scaling=True)(
        weight, hidden, target, bias
    )

    losses = cross_entropy(fp32_logits(hidden, weight, bias), target, reduction="none")
    truth = losses * (-losses.detach()).exp() * (target != -100)
    if reduction != "none":
        truth = truth.sum() / (1 if reduction == "sum" else (target != -100).sum())
    near(ours, truth, atol=1e-5, rtol=1e-5)
    gradients_near(ours.sum(), truth.sum(), (hidden, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(2 * 16, 32, 64), (32, 64, 128)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_ligers_cases_of_an_upstream_gradient_for_each_row(sizes, has_bias):
    hidden, weight, target, bias = liger_case(sizes, torch.float32, has_bias)
    upstream = torch.rand(sizes[0], generator=seeded(1)) + 0.5

    ours = liger.liger_fused_linear_cross_entropy(hidden, weight, target, bias, reduction="none")

    truth = cross_entropy(fp32_logits(hidden, weight, bias), target, reduction="none")
    near(ours, truth, atol=1e-4, rtol=1e-4)
    gradients_near(
        (upstream * ours).sum(),
        (upstream * truth).sum(),
        (hidden, weight, bias),
        atol=1e-4,
        rtol=1e-4,
    )
