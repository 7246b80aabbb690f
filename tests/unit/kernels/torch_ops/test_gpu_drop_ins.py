"""Values of the drop-in functions beside those of the originals whose kernels run on a GPU only, and at the shapes of
AReaL's pull request 1322, of verl's tests and of Liger's."""

import pytest
import torch
from drop_in_cases import near, relative_error, upstream_of
from logprobd_ops.compat import areal, liger, skyrl, verl
from originals import original
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, FP32 = torch.bfloat16, torch.float32


def uniform_case(rows: int, size: int, vocab: int, dtype=BF16, bound=0.5):
    """Returns (hidden, weight, labels), uniform as in verl's tests. The logits' standard deviation is
    bound^2 / 3 * sqrt(size)."""
    generator = torch.Generator("cuda").manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        tensor = torch.empty(shape, device="cuda").uniform_(-bound, bound, generator=generator)
        return tensor.to(dtype).requires_grad_()

    labels = torch.randint(vocab, (rows,), generator=generator, device="cuda")
    return uniform(rows, size), uniform(vocab, size), labels


def torch_scores(hidden, weight, labels, temperature=1.0) -> tuple[Tensor, Tensor]:
    """Returns (logprobs, entropy) of fp32 logits."""
    logits = hidden.float() @ weight.float().T / temperature
    logprobs = -torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return logprobs, entropy


def gradients(outputs, inputs, upstream) -> list[Tensor]:
    """Returns the gradients, and frees the graph."""
    return list(torch.autograd.grad(outputs, inputs, upstream))


VERL_SHAPES = [
    (1937, 3584, 152_064),
    (2169, 896, 151_936),
    (1530, 2048, 32_256),
    (1388, 4096, 102_400),
    (8192, 4096, 102_400),
]


@pytest.mark.parametrize("shape", VERL_SHAPES)
def test_verls_tests(shape):
    theirs = original("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    hidden, weight, labels = case = uniform_case(*shape)
    generator = torch.Generator("cuda").manual_seed(1)
    upstream = [torch.rand(shape[0], generator=generator, device="cuda") - 0.5 for _ in range(2)]

    ours = verl.linear_cross_entropy(*case, 1.5)
    our_gradients = gradients(ours, case[:2], upstream)
    other = theirs(*case, 1.5)
    their_gradients = gradients(other, case[:2], upstream)
    truth = torch_scores(*case, 1.5)
    true_gradients = gradients(truth, case[:2], upstream)

    for reference in (truth, other):
        near(ours[0], reference[0], rtol=2e-4, atol=1e-3)
        near(ours[1], reference[1], rtol=5e-4, atol=5e-3)
    for each in (true_gradients, their_gradients):
        for our, true in zip(our_gradients, each, strict=True):
            near(our, true, rtol=4e-2, atol=2e-2)
    for our, other_one, true in zip(our_gradients, their_gradients, true_gradients, strict=True):
        assert relative_error(our, true) <= relative_error(other_one, true) * 1.01 + 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_verls_reductions(reduction, temperature):
    theirs = original("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    case = uniform_case(96, 128, 1000, bound=1.5)

    ours = verl.linear_cross_entropy(*case, temperature, reduction)
    truth = theirs(*case, temperature, reduction)

    upstream = upstream_of(*ours)
    for our, true in zip(ours, truth, strict=True):
        near(our, true, rtol=1e-3, atol=1e-3)
    for our, true in zip(
        gradients(ours, case[:2], upstream), gradients(truth, case[:2], upstream), strict=True
    ):
        assert relative_error(our, true) <= 8e-3


# Rows, hidden size, vocabulary, dtype, tolerance of the scores and of the gradients in the pull request's tests.
AREAL_SHAPES = [
    (256, 512, 4096, FP32, 1e-5, 1e-4),
    (512, 1024, 32_000, BF16, 2e-2, 2e-2),
    (128, 768, 8192, torch.float16, 1e-2, 1e-2),
    (512, 1024, 32_000, FP32, 1e-5, 1e-4),
    (2048, 2048, 32_000, FP32, 1e-5, 5e-4),
    (1024, 1024, 32_000, BF16, 2e-2, 2e-2),
    (4096, 4096, 128_256, BF16, 2e-2, 2e-2),
    (2048, 4096, 152_064, BF16, 2e-2, 2e-2),
]


@pytest.mark.parametrize("shape", AREAL_SHAPES)
def test_the_shapes_of_areals_pull_request(shape):
    *sizes, dtype, tolerance, gradient_tolerance = shape
    case = uniform_case(*sizes, dtype, bound=0.02 * 3**0.5)

    ours = areal.LinearCrossEntropy.apply(*case)
    our_gradients = torch.autograd.grad(ours[0].sum() + 0.5 * ours[1].sum(), case[:2])
    truth = torch_scores(*case)
    true_gradients = torch.autograd.grad(truth[0].sum() + 0.5 * truth[1].sum(), case[:2])

    for our, true in zip(ours, truth, strict=True):
        near(our, true, rtol=tolerance, atol=tolerance)
    for our, true in zip(our_gradients, true_gradients, strict=True):
        near(our, true, rtol=gradient_tolerance, atol=gradient_tolerance)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("rows", [72, 3 * 21_846])
def test_skyrls_triton_function(dtype, rows, monkeypatch):
    module = original("skyrl.backends.skyrl_train.distributed.megatron.fused_linear_logprob_triton")
    monkeypatch.setattr(module, "FORCE_FP32_IEEE_PRECISION", True)  # SkyRL's tests set it too.
    hidden, weight, _ = uniform_case(rows, 128, 256, dtype)
    generator = torch.Generator("cuda").manual_seed(1)
    target = torch.randint(306, (3, rows // 3), generator=generator, device="cuda")
    arguments = (hidden.reshape(*target.shape, 128), weight, target, 0, 256, 8, None)

    ours = skyrl.FusedLinearLogprobTriton.apply(*arguments)
    truth = module.FusedLinearLogprobTriton.apply(*arguments)

    tolerance = 2e-2 if dtype == BF16 else 2e-3  # SkyRL's
    near(ours, truth, rtol=0, atol=tolerance)
    upstream = upstream_of(ours)
    for our, true in zip(
        gradients(ours, (hidden, weight), upstream),
        gradients(truth, (hidden, weight), upstream),
        strict=True,
    ):
        assert relative_error(our, true) <= (8e-3 if dtype == BF16 else 2e-3)


# A reduced loss rounds the probabilities, the hidden states times a factor per row, and the gradient to bf16. Each
# rounding moves a number by up to 2^-8 of itself, evenly spread. Liger rounds two of these; for the sum of flat rows
# the largest number of a row is -1, which needs no rounding.
ROUNDINGS_OF_A_REDUCED_LOSS = (3 * (2**-8) ** 2 / 3) ** 0.5

# Rows, hidden size and vocabulary of Liger's tests.
LIGER_SHAPES = [(8, 512, 512), (8 * 2048, 4096, 32_000), (4 * 423, 8192, 32_000)]


@pytest.mark.parametrize("shape", LIGER_SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_ligers_tests(shape, reduction, has_bias):
    theirs = original("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    rows, size, vocab = shape
    hidden, weight, target = uniform_case(rows, size, vocab)
    bias = torch.linspace(0, 1, vocab, device="cuda").to(BF16) if has_bias else None

    ours = liger.liger_fused_linear_cross_entropy(hidden, weight, target, bias, reduction=reduction)
    our_gradients = torch.autograd.grad(ours, (hidden, weight))
    other = theirs(hidden, weight, target, bias, reduction=reduction)
    their_gradients = torch.autograd.grad(other, (hidden, weight))

    logits = hidden.float() @ weight.float().T + (0 if bias is None else bias)
    truth = torch.nn.functional.cross_entropy(logits, target, reduction=reduction)
    true_gradients = torch.autograd.grad(truth, (hidden, weight))

    # Liger's tolerances. Its own gradients miss those of the sum at the last shape by up to 0.08, so ours are compared
    # with fp32 logits.
    near(ours, truth, rtol=5e-2, atol=5e-3)
    near(ours, other, rtol=5e-2, atol=5e-3)
    atol = 5e-3 * (1 if reduction == "mean" else 10)
    for our, other_one, true in zip(our_gradients, their_gradients, true_gradients, strict=True):
        near(our, true, rtol=5e-2, atol=atol)
        error_max = max(relative_error(other_one, true), ROUNDINGS_OF_A_REDUCED_LOSS)
        assert relative_error(our, true) <= error_max


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("has_class_weights", [False, True])
@pytest.mark.parametrize("is_token_scaled", [False, True])
def test_ligers_options(reduction, smoothing, has_class_weights, is_token_scaled):
    theirs = original("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    hidden, weight, target = uniform_case(6, 16, 20, FP32, bound=3.0)
    target[1] = -100
    options = {
        "ce_weight": torch.arange(20, device="cuda").remainder(5) / 4
        if has_class_weights
        else None,
        "lse_square_scale": 1e-2,
        "label_smoothing": smoothing,
        "reduction": reduction,
        "softcap": 30.0,
        "return_z_loss": True,
        "use_token_scaling": is_token_scaled,
        "return_token_accuracy": True,
        "return_predicted_tokens": True,
    }

    ours = liger.liger_fused_linear_cross_entropy(hidden, weight, target, **options)
    truth = theirs(hidden, weight, target, **options)

    for name in ("loss", "z_loss", "token_accuracy", "predicted_tokens"):
        near(getattr(ours, name), getattr(truth, name), rtol=1e-4, atol=1e-4)
    upstream = upstream_of(ours.loss)
    for our, true in zip(
        gradients([ours.loss], (hidden, weight), upstream),
        gradients([truth.loss], (hidden, weight), upstream),
        strict=True,
    ):
        near(our, true, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_liger_under_autocast(dtype):
    theirs = original("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    hidden, weight, target = uniform_case(300, 256, 2000, dtype, bound=1.0)

    with torch.autocast("cuda", BF16):
        ours = liger.liger_fused_linear_cross_entropy(hidden, weight, target)
        other = theirs(hidden, weight, target)

    near(ours, other, rtol=5e-2, atol=5e-3)
    for our, true in zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(other, (hidden, weight)),
        strict=True,
    ):
        assert our.dtype == true.dtype == dtype
        assert relative_error(our, true) <= 2e-2
