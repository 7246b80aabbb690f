"""The drop-in functions of AReaL have the results and gradients of AReaL's own functions.

AReaL 1.0.4 has no functions that the drop-ins replace: they are those of pull request 1322, whose argument lists are
repeated here. Values are compared with 1.0.4's functions of logits.
"""

import functools
import inspect

import pytest
import torch
import torch.distributed as dist
from drop_in_cases import (
    SIZE,
    close,
    gradients,
    make_case,
    near,
    relative_error,
    upstream_of,
    use_device,
)
from linear_logprob_reference import reference, reference_logits, seeded
from logprobd_ops.compat import areal
from originals import SITE, original, skip_without_originals

# Rows, hidden size, vocabulary, dtype and tolerance of the pull request's tests.
SHAPES = [(256, 512, 4096, torch.float32, 1e-5), (128, 768, 8192, torch.float16, 1e-2)]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            areal.linear_cross_entropy,
            "hidden weight labels temperature=1.0 reduction=none dist_process_group=None"
            " return_max_logits=False",
        ),
        (
            areal.LinearCrossEntropy.apply,
            "hidden weight labels temperature=1.0 reduction=none dist_process_group=None"
            " return_max_logits=False",
        ),
        (
            areal.linear_cross_entropy_logprobs_entropy,
            "hidden weight labels temperature=1.0 tp_group=None return_max_logits=False",
        ),
        (
            areal.linear_cross_entropy_logprobs,
            "hidden weight labels temperature=1.0 tp_group=None",
        ),
    ],
)
def test_arguments_are_those_of_the_pull_request(function, names):
    parameters = inspect.signature(function).parameters.values()

    ours = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]

    assert ours == names.split()


def test_the_release_has_no_module_to_compare_with():
    original("areal.utils.functional.vocab_parallel")

    assert not (SITE / "areal" / "models" / "kernel").exists()


def of_logits(hidden, weight, labels, temperature=1.0, group=None):
    """Returns the results of AReaL's function of logits, without torch.compile."""
    theirs = original("areal.utils.functional.vocab_parallel")
    logits = hidden.float() @ weight.float().T
    with torch.compiler.set_stance("force_eager"):
        return theirs.gather_logprobs_entropy(logits, labels, temperature, group)


@pytest.mark.parametrize(("rows", "size", "vocab", "dtype", "tolerance"), SHAPES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_results_equal_those_of_areal(rows, size, vocab, dtype, tolerance, temperature):
    generator = seeded(0)
    hidden = (torch.randn(rows, size, generator=generator) * 0.02).to(dtype)
    weight = (torch.randn(vocab, size, generator=generator) * 0.02).to(dtype)
    labels = torch.randint(vocab, (rows,), generator=generator)

    ours = areal.linear_cross_entropy_logprobs_entropy(hidden, weight, labels, temperature)

    for our, true in zip(ours, of_logits(hidden, weight, labels, temperature), strict=True):
        near(our, true, rtol=tolerance, atol=tolerance)


def test_gradients_equal_those_of_areal():
    hidden, weight, labels = case = make_case(torch.float32, rows=64, size=256, vocab=2048)

    ours = areal.LinearCrossEntropy.apply(*case)
    truth = of_logits(*case)

    upstream = upstream_of(*ours)
    for our, true in zip(
        gradients(ours, upstream, case), gradients(truth, upstream, case), strict=True
    ):
        assert relative_error(our, true) <= 1e-4


def compare_shards(rank: int, size: int) -> None:
    """Compares the results of two shards with those of AReaL's function of the shards' logits."""
    use_device()
    hidden, weight, labels = make_case(torch.float32, rows=128, size=64, vocab=512)
    group = dist.group.WORLD
    half = weight.shape[0] // size
    mine = slice(rank * half, (rank + 1) * half)
    shard = weight.detach()[mine].clone().requires_grad_()

    ours = areal.linear_cross_entropy(hidden, shard, labels, 0.7, "none", group, True)
    truth = of_logits(hidden, shard, labels, 0.7, group)

    for our, true in zip(ours, truth, strict=False):
        near(our, true, rtol=2e-4, atol=2e-4)
    near(ours[2], reference_logits(hidden, weight).amax(-1).float(), rtol=0, atol=1e-4)
    upstream = upstream_of(*truth)
    whole = torch.autograd.grad(ours[:2], (hidden, shard), upstream)
    d_hidden, d_shard = torch.autograd.grad(truth, (hidden, shard), upstream)
    # AReaL's function of logits leaves the sum over the ranks to the caller, that of the pull request does not.
    dist.all_reduce(d_hidden)
    assert relative_error(whole[0], d_hidden) <= 2e-4
    assert relative_error(whole[1], d_shard) <= 2e-4


def test_shards_give_the_results_of_areal(two_ranks):
    skip_without_originals()
    two_ranks.results(compare_shards)


def test_rows_are_flattened():
    hidden, weight, target = case = make_case()

    ours = areal.linear_cross_entropy(
        hidden.reshape(2, 3, SIZE), weight, target.reshape(2, 3), 1.5, "none", None
    )

    truth = reference(*case, temperature=1.5)[:2]
    upstream = upstream_of(*truth)
    close(ours, truth)
    close(gradients(ours, upstream, case), gradients(truth, upstream, case))


def test_logprobs_are_reduced_but_not_the_entropy():
    case = make_case()
    logprob, entropy, *_ = reference(*case)

    for reduction, truth in (("sum", logprob.sum()), ("Mean", logprob.mean())):
        ours = areal.linear_cross_entropy(*case, reduction=reduction)
        close(ours, (truth, entropy))
        close(gradients(ours[0], None, case)[0], gradients(truth, None, case)[0])
    with pytest.raises(ValueError, match="reduction.*'average'"):
        areal.linear_cross_entropy(*case, reduction="average")


def test_returns_the_largest_logit_before_temperature_even_if_all_are_negative():
    hidden, weight, target = make_case()
    with torch.no_grad():
        hidden.copy_(hidden.abs())
        weight.copy_(-weight.abs())
    truth = reference_logits(hidden, weight).amax(-1)
    assert (truth < 0).all()

    _, _, largest = areal.linear_cross_entropy_logprobs_entropy(
        hidden.reshape(2, 3, SIZE), weight, target.reshape(2, 3), 0.7, None, True
    )

    close(largest, truth.detach().reshape(2, 3))
    assert not largest.requires_grad


def test_a_row_with_a_nan_has_the_largest_logit_nan():
    hidden, weight, target = case = make_case(torch.float32)
    with torch.no_grad():
        hidden[2, 5] = torch.nan

    largest = areal.linear_cross_entropy(*case, return_max_logits=True)[2]

    assert largest.isnan().tolist() == [False, False, True, False, False, False]
    near(largest, (hidden @ weight.T).amax(-1).detach(), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_wrappers_keep_the_shape_of_the_labels():
    hidden, weight, target = case = make_case()
    truth = reference(*case)
    shaped = (hidden.reshape(2, 3, SIZE), weight, target.reshape(2, 3))

    logprobs, entropy = areal.linear_cross_entropy_logprobs_entropy(*shaped)
    alone = areal.linear_cross_entropy_logprobs(*shaped)

    close(logprobs, truth.logprob.reshape(2, 3))
    close(entropy, truth.entropy.reshape(2, 3))
    close(alone, truth.logprob.reshape(2, 3))


@pytest.mark.parametrize(
    "function",
    [areal.LinearCrossEntropy.apply, areal.linear_cross_entropy_logprobs_entropy],
)
def test_hidden_is_cast_to_the_dtype_of_the_weight(function):
    hidden, weight, target = make_case(torch.float32, weight_dtype=torch.bfloat16)

    ours = function(hidden, weight, target)

    truth = reference(hidden.bfloat16(), weight, target)
    compare = functools.partial(near, rtol=0, atol=2e-5)
    compare(ours[0], truth.logprob.float())
    compare(ours[1], truth.entropy.float())
    assert torch.autograd.grad(ours[0].sum(), hidden)[0].dtype == torch.float32
