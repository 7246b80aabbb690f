"""The drop-in function of TRL has the arguments, results and gradients of TRL's own function."""

import sys
import types

import pytest
import torch
from drop_in_cases import arguments, make_case, near, relative_error
from linear_logprob_reference import reference, reference_logits, seeded
from logprobd_ops.compat import trl
from originals import original, small_llama

KERNEL = "trl.kernels.chunked_logprob"
DIFFERENTIABLE = ("log_probs", "entropy")


@pytest.fixture
def loaded_trl(monkeypatch):
    """Loads TRL, and restores its autograd function after the test."""
    utils = original("trl.trainer.utils")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trl":
            for attribute in ("_ChunkedLogProbFunction", "ChunkedLogProbFunction"):
                if attribute in vars(module):
                    monkeypatch.setattr(module, attribute, getattr(module, attribute))
    return utils


def test_arguments_are_those_of_trl():
    theirs = original(KERNEL)

    assert trl.OPTIONAL_OUTPUTS == theirs.OPTIONAL_OUTPUTS
    assert arguments(trl.ChunkedLogProbFunction.apply) == arguments(
        theirs.ChunkedLogProbFunction.forward
    )


def results(function, case, bias, *options) -> dict[str, torch.Tensor]:
    """Returns the scores and, for fixed upstream gradients, the gradients by name."""
    hidden, weight, target = case
    scores = function.apply(hidden, weight, bias, target, *options)
    named = dict(zip(trl.ChunkedLogProbOutput._fields, scores, strict=True))
    outputs = [named[name] for name in DIFFERENTIABLE if named[name] is not None]
    for name, score in named.items():
        assert score is None or score.requires_grad == (name in DIFFERENTIABLE), name
    upstream = [torch.linspace(-1, 1, output.numel()) for output in outputs]
    inputs = [hidden, weight, *([] if bias is None else [bias])]
    grads = torch.autograd.grad(outputs, inputs, upstream)
    return {**named, **dict(zip(("d_hidden", "d_weight", "d_bias"), grads, strict=False))}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("softcap", "scale"), [(None, 1.0), (30.0, 1.0), (None, 0.25), (20.0, 2.0)]
)
@pytest.mark.parametrize(
    "outputs", [trl.OPTIONAL_OUTPUTS, ("log_probs",), ("entropy",), ("mean_logits", "is_top1")]
)
def test_results_equal_those_of_trl(temperature, has_bias, softcap, scale, outputs):
    theirs = original(KERNEL).ChunkedLogProbFunction
    case = make_case(torch.float32, rows=40, size=32, vocab=300)
    case[2][::3] = reference(*case).argmax[::3]
    bias = torch.linspace(-1, 1, 300).requires_grad_() if has_bias else None
    options = (temperature, 128, softcap, scale, outputs)

    ours, truth = (results(f, case, bias, *options) for f in (trl.ChunkedLogProbFunction, theirs))

    for name, true in truth.items():
        if true is None:
            assert ours[name] is None, name
            continue
        assert ours[name].dtype == true.dtype, name
        if name.startswith("d_"):
            assert relative_error(ours[name], true) <= 1e-4, name
        else:
            near(ours[name], true, rtol=1e-4, atol=1e-4)


def test_16_bit_results_are_at_least_as_accurate_as_those_of_trl():
    theirs = original(KERNEL).ChunkedLogProbFunction
    hidden, weight, target = case = make_case(torch.bfloat16, rows=40, size=64, vocab=300)
    options = (1.0, 128, None, 1.0, trl.OPTIONAL_OUTPUTS)

    ours, other = (results(f, case, None, *options) for f in (trl.ChunkedLogProbFunction, theirs))

    exact = reference(*case)
    p = reference_logits(hidden, weight).softmax(-1)
    truth = {
        "log_probs": exact.logprob,
        "entropy": exact.entropy,
        "mean_logits": exact.mean_logit,
        "log_sum_sq_probs": p.square().sum(-1).log(),
    }
    for name, true in truth.items():
        error, theirs_error = ((r[name] - true).abs().max().item() for r in (ours, other))
        assert error <= min(1e-4, theirs_error), name
    upstream = [torch.linspace(-1, 1, 40, dtype=torch.float64)] * 2
    true_gradients = torch.autograd.grad(exact[:2], (hidden, weight), upstream)
    for name, true in zip(("d_hidden", "d_weight"), true_gradients, strict=True):
        error, theirs_error = (relative_error(r[name], true) for r in (ours, other))
        assert error <= min(5e-3, theirs_error), name


def test_fp32_parameters_under_autocast_give_the_results_of_16_bit_inputs():
    """transformers' Trainer trains in this way with bf16=True."""
    hidden, weight, target = make_case(torch.float32, rows=40, size=64, vocab=300)

    with torch.autocast(hidden.device.type, torch.bfloat16):
        ours = trl.ChunkedLogProbFunction.apply(hidden, weight, None, target, 0.7, 128)

    exact = reference(hidden.bfloat16(), weight.bfloat16(), target, temperature=0.7)
    near(ours.log_probs, exact.logprob.float(), rtol=0, atol=1e-4)
    near(ours.entropy, exact.entropy.float(), rtol=0, atol=1e-4)
    grads = torch.autograd.grad(ours.log_probs.sum(), (hidden, weight))
    truth = torch.autograd.grad(exact.logprob.sum(), (hidden, weight))
    for our, true in zip(grads, truth, strict=True):
        assert our.dtype == torch.float32
        assert relative_error(our, true) <= 5e-3


def test_a_model_with_a_fused_head(loaded_trl):
    """TRL's fused LM head on a Llama of two layers calls the drop-in and returns the same results."""
    model = small_llama()
    loaded_trl.add_fused_lm_head(
        model, 0.7, outputs=("log_probs", "entropy", "log_sum_sq_probs", "is_top1")
    )
    tokens = torch.randint(96, (2, 9), generator=seeded(0))
    labels = tokens.clone()
    labels[0, :4] = -100

    def step():
        model.zero_grad()
        output = model(input_ids=tokens, labels=labels, fused_lm_head=True)
        (output.loss - 0.1 * output.entropy.sum()).backward()
        return output, [p.grad.clone() for p in model.parameters()]

    truth, true_gradients = step()
    trl.apply_logprobd_kernel()
    assert loaded_trl._ChunkedLogProbFunction is trl.ChunkedLogProbFunction
    ours, our_gradients = step()

    for name in ("loss", "log_probs", "entropy", "log_sum_sq_probs", "is_top1"):
        near(ours[name], truth[name], rtol=1e-5, atol=1e-5)
    assert ours.mean_logits is None
    for our, true in zip(our_gradients, true_gradients, strict=True):
        near(our, true, rtol=1e-4, atol=1e-6)


def test_a_wide_weight_is_cast_to_the_dtype_of_hidden():
    hidden, weight, target = make_case(torch.bfloat16, weight_dtype=torch.float32)

    ours = trl.ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, 8)

    truth = reference(hidden, weight.bfloat16(), target)
    near(ours.log_probs, truth.logprob.float(), rtol=0, atol=2e-5)
    assert torch.autograd.grad(ours.log_probs.sum(), weight)[0].dtype == torch.float32


def test_a_target_outside_the_vocabulary_is_refused():
    hidden, weight, target = make_case()
    target[2] = -100

    with pytest.raises(IndexError, match="-100"):
        trl.ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, 8)


def test_a_weight_that_deepspeed_releases_before_the_backward_is_refused():
    hidden, weight, target = make_case()
    weight = types.SimpleNamespace(ds_id=0)

    with pytest.raises(RuntimeError, match="ZeRO-3"):
        trl.ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, 8)
