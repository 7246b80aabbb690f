"""The drop-in functions have the signatures, results and gradients of the originals."""

import functools
import importlib
import inspect
import pathlib

import pytest
import torch
import torch.distributed as dist
from linear_logprob_reference import reference, reference_logits, seeded
from logprobd_ops.compat import areal, liger, skyrl, verl
from logprobd_ops.losses import linear_cross_entropy
from torch.nn.functional import cross_entropy

ROWS, VOCAB, SIZE = 6, 20, 16
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def make_case(dtype=torch.float64):
    """Returns (hidden, weight, target). The rows' logits have standard deviations from 1 (flat) to 20 (peaked)."""
    generator = seeded(0)
    spread = torch.linspace(1, 20, ROWS, dtype=torch.float64).unsqueeze(-1)
    hidden = spread * torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, SIZE, generator=generator, dtype=torch.float64) / SIZE**0.5
    target = torch.randint(VOCAB, (ROWS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


def gradients(outputs, upstream, case):
    return torch.autograd.grad(outputs, case[:2], upstream, retain_graph=True)


def upstream_of(*outputs):
    """Returns gradients with values of both signs, the same at each call."""
    generator = seeded(1)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            verl.linear_cross_entropy,
            "hidden weight labels temperature=1.0 reduction=none dist_process_group=None",
        ),
        (
            areal.linear_cross_entropy,
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
        (
            skyrl.FusedLinearLogprob.apply,
            "hidden weight target vocab_start_index vocab_end_index chunk_size tp_group"
            " inference_only=False",
        ),
        (
            liger.LigerFusedLinearCrossEntropyLoss,
            "ce_weight=None ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0 reduction=mean"
            " softcap=None return_z_loss=False accum_dtype=None use_token_scaling=False"
            " return_token_accuracy=False return_predicted_tokens=False",
        ),
        (liger.LigerFusedLinearCrossEntropyLoss.forward, "self lin_weight _input target bias=None"),
        (
            liger.liger_fused_linear_cross_entropy,
            "input weight target bias=None ce_weight=None ignore_index=-100 lse_square_scale=0.0"
            " label_smoothing=0.0 reduction=mean softcap=None return_z_loss=False accum_dtype=None"
            " use_token_scaling=False return_token_accuracy=False return_predicted_tokens=False"
            " chunk_mem_const=1",
        ),
    ],
)
def test_arguments_have_the_names_order_and_defaults_of_the_originals(function, names):
    parameters = inspect.signature(function).parameters.values()

    ours = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]

    assert ours == names.split()


@pytest.mark.parametrize("drop_in", [verl.linear_cross_entropy, areal.linear_cross_entropy])
def test_verl_and_areal_return_logprobs_and_entropy_of_flattened_rows(drop_in):
    hidden, weight, target = case = make_case()

    ours = drop_in(hidden.reshape(2, 3, SIZE), weight, target.reshape(2, 3), 1.5, "none", None)

    truth = reference(*case, temperature=1.5)[:2]
    upstream = upstream_of(*truth)
    for our, true in zip(ours, truth, strict=True):
        assert our.shape == (ROWS,)
        close(our, true)
    for our, true in zip(
        gradients(ours, upstream, case), gradients(truth, upstream, case), strict=True
    ):
        close(our, true)


@pytest.mark.parametrize("drop_in", [verl.linear_cross_entropy, areal.linear_cross_entropy])
def test_verl_and_areal_reduce_logprobs_but_not_the_entropy(drop_in):
    case = make_case()
    logprob, entropy, *_ = reference(*case)

    for reduction, truth in (("sum", logprob.sum()), ("Mean", logprob.mean())):
        ours = drop_in(*case, reduction=reduction)
        close(ours[0], truth)
        close(ours[1], entropy)
        close(gradients(ours[0], None, case)[0], gradients(truth, None, case)[0])
    with pytest.raises(ValueError, match="reduction.*'average'"):
        drop_in(*case, reduction="average")


def test_areal_returns_the_largest_logit_before_temperature_even_if_all_are_negative():
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


def test_areal_gathers_few_rows_of_the_weight_at_a_time(monkeypatch):
    case = make_case()
    monkeypatch.setattr(areal, "_ROWS_AT_A_TIME", 4)

    largest = areal.linear_cross_entropy(*case, return_max_logits=True)[2]

    close(largest, reference_logits(*case[:2]).amax(-1).detach())


def test_areal_wrappers_keep_the_shape_of_the_labels():
    hidden, weight, target = case = make_case()
    truth = reference(*case)
    shaped = (hidden.reshape(2, 3, SIZE), weight, target.reshape(2, 3))

    logprobs, entropy = areal.linear_cross_entropy_logprobs_entropy(*shaped)
    alone = areal.linear_cross_entropy_logprobs(*shaped)

    close(logprobs, truth.logprob.reshape(2, 3))
    close(entropy, truth.entropy.reshape(2, 3))
    close(alone, truth.logprob.reshape(2, 3))


def test_skyrl_out_of_vocab_targets_have_logprob_zero_and_the_gradient_of_the_softmax():
    hidden, weight, target = case = make_case()
    is_owned = torch.tensor([True, False, True, False, True, True])
    truth = reference(*case)
    # -100 is out of vocabulary as well: this function ignores no target.
    given = target.masked_fill(~is_owned, VOCAB + 7)
    given[3] = -100

    ours = skyrl.FusedLinearLogprob.apply(
        hidden.reshape(2, 3, SIZE), weight, given.reshape(2, 3), 0, VOCAB, 1024, None
    )

    close(ours, torch.where(is_owned, truth.logprob, 0.0).reshape(2, 3))
    upstream = upstream_of(truth.logprob)
    with_gradient = torch.where(is_owned, truth.logprob, -truth.lse)
    for our, true in zip(
        gradients(ours.reshape(-1), upstream, case),
        gradients(with_gradient, upstream, case),
        strict=True,
    ):
        close(our, true)


def test_skyrl_builds_no_graph_for_inference_only():
    hidden, weight, target = make_case()

    ours = skyrl.FusedLinearLogprob.apply(
        hidden.unsqueeze(0), weight, target.unsqueeze(0), 0, VOCAB, 1024, None, True
    )

    assert ours.shape == (1, ROWS) and not ours.requires_grad


def test_skyrl_rejects_a_range_that_does_not_match_the_weight():
    hidden, weight, target = make_case()

    with pytest.raises(ValueError, match=r"vocab_end_index.*20 rows.*\[0, 21\)"):
        skyrl.FusedLinearLogprob.apply(
            hidden.unsqueeze(0), weight, target.unsqueeze(0), 0, VOCAB + 1, 8, None
        )


def test_skyrl_provides_the_function_under_each_of_its_names():
    assert skyrl.FusedLinearChunkedDistributedLogprob is skyrl.FusedLinearLogprob
    assert skyrl.FusedLinearLogprobTriton is skyrl.FusedLinearLogprob


def test_ligers_module_passes_every_option_on():
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
    for our, true in zip(ours, truth, strict=True):
        close(our, true)


def test_ligers_module_returns_only_the_mean_loss_by_default():
    hidden, weight, target = case = make_case()
    target[1] = -100

    loss = liger.LigerFusedLinearCrossEntropyLoss()(weight, hidden, target)

    truth = cross_entropy(reference_logits(hidden, weight), target)
    close(loss, truth)
    close(gradients(loss, None, case)[1], gradients(truth, None, case)[1])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("has_class_weights", [False, True])
@pytest.mark.parametrize("is_token_scaled", [False, True])
def test_the_loss_equals_that_of_liger(reduction, smoothing, has_class_weights, is_token_scaled):
    if not torch.cuda.is_available():
        pytest.skip("Liger's kernels run on a GPU only")
    pytest.importorskip("liger_kernel")
    theirs = importlib.import_module("liger_kernel.transformers.functional")
    case = tuple(tensor.detach().cuda() for tensor in make_case(torch.float32))
    hidden, weight = (tensor.requires_grad_() for tensor in case[:2])
    target = case[2]
    target[1] = -100
    options = {
        "ce_weight": (torch.arange(VOCAB).remainder(5) / 4).cuda() if has_class_weights else None,
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
    truth = theirs.liger_fused_linear_cross_entropy(hidden, weight, target, **options)

    # Liger multiplies in TF32 if PyTorch is configured to; by default it is not.
    near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    for name in ("loss", "z_loss", "token_accuracy", "predicted_tokens"):
        near(getattr(ours, name), getattr(truth, name), check_dtype=False)
    upstream = [u.to(ours.loss) for u in upstream_of(ours.loss)]
    for our, true in zip(
        torch.autograd.grad(ours.loss, (hidden, weight), upstream),
        torch.autograd.grad(truth.loss, (hidden, weight), upstream),
        strict=True,
    ):
        near(our, true)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_results_equal_those_of_verl(reduction, temperature):
    if not torch.cuda.is_available():
        pytest.skip("verl's kernels run on a GPU only")
    pytest.importorskip("verl")
    theirs = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(96, 128, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(1000, 128, generator=generator, device="cuda") * 3 / 128**0.5
    weight = weight.bfloat16().requires_grad_()
    target = torch.randint(1000, (96,), generator=generator, device="cuda")

    ours = verl.linear_cross_entropy(hidden, weight, target, temperature, reduction)
    truth = theirs.linear_cross_entropy(hidden, weight, target, temperature, reduction)

    # verl multiplies in TF32.
    near = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
    for our, true in zip(ours, truth, strict=True):
        near(our, true, check_dtype=False)
    upstream = [torch.randn(o.shape, generator=generator, device="cuda") for o in ours]
    for our, true in zip(
        torch.autograd.grad(ours, (hidden, weight), upstream),
        torch.autograd.grad(truth, (hidden, weight), upstream),
        strict=True,
    ):
        assert (our.float() - true.float()).norm() <= 8e-3 * true.float().norm()


def run_rank(rank: int, store: str) -> None:
    """Runs one of two ranks with half of the vocabulary each, and compares its results with those of the whole head."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD
    hidden, weight, target = case = make_case()
    half = VOCAB // 2
    mine = slice(rank * half, (rank + 1) * half)
    shard = weight.detach()[mine].clone().requires_grad_()
    truth = reference(*case)
    upstream = upstream_of(truth.logprob, truth.entropy)
    d_hidden, d_weight = gradients(truth[:2], upstream, case)
    d_hidden_of_logprob, d_weight_of_logprob = gradients(truth.logprob, upstream[:1], case)

    # The callers of verl and SkyRL sum over the ranks themselves; the callers of AReaL do not.
    ours = verl.linear_cross_entropy(hidden, shard, target, 1.0, "none", group)
    close(ours, truth[:2])
    parts = torch.autograd.grad(ours, (hidden, shard), upstream)
    dist.all_reduce(parts[0])
    close(parts, (d_hidden, d_weight[mine]))

    ours = areal.linear_cross_entropy(hidden, shard, target, 1.0, "none", group, True)
    close(ours, (*truth[:2], reference_logits(hidden, weight).amax(-1).detach()))
    whole = torch.autograd.grad(ours[:2], (hidden, shard), upstream)
    close(whole, (d_hidden, d_weight[mine]))

    ours = skyrl.FusedLinearLogprob.apply(
        hidden.unsqueeze(0), shard, target.unsqueeze(0), mine.start, mine.stop, 64, group
    )
    close(ours.squeeze(0), truth.logprob)
    parts = torch.autograd.grad(ours.squeeze(0), (hidden, shard), upstream[:1])
    dist.all_reduce(parts[0])
    close(parts, (d_hidden_of_logprob, d_weight_of_logprob[mine]))

    classes = torch.arange(VOCAB).remainder(5).double() / 4
    loss = linear_cross_entropy(
        hidden,
        shard,
        target,
        label_smoothing=0.1,
        class_weights=classes,
        vocab_start=mine.start,
        process_group=group,
    )
    loss_truth = cross_entropy(
        reference_logits(hidden, weight), target, classes, label_smoothing=0.1
    )
    close(loss, loss_truth)
    d_hidden, d_weight = gradients(loss_truth, None, case)
    close(torch.autograd.grad(loss, (hidden, shard)), (d_hidden, d_weight[mine]))
    dist.destroy_process_group()


def test_two_ranks_with_half_of_the_vocabulary_each_get_the_results_of_the_whole_head(
    tmp_path: pathlib.Path,
):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("PyTorch is built without gloo")

    torch.multiprocessing.spawn(run_rank, (str(tmp_path / "store"),), nprocs=2)
