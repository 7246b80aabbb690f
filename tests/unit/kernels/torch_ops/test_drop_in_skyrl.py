"""The drop-in functions of SkyRL have the arguments, results and gradients of SkyRL's own functions."""

import pytest
import torch
import torch.distributed as dist
from drop_in_cases import (
    ROWS,
    SIZE,
    VOCAB,
    arguments,
    close,
    gradients,
    make_case,
    near,
    relative_error,
    unowned_logprob,
    upstream_of,
    use_device,
)
from linear_logprob_reference import reference, seeded
from logprobd_ops.compat import skyrl
from originals import original, skip_without_originals

MEGATRON = "skyrl.backends.skyrl_train.distributed.megatron"
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("model_utils", "FusedLinearChunkedDistributedLogprob"),
        ("fused_linear_logprob_triton", "FusedLinearLogprobTriton"),
    ],
)
def test_arguments_are_those_of_skyrl_and_one_of_its_pull_request_1765(module, name):
    theirs = getattr(original(f"{MEGATRON}.{module}"), name)

    of_pull_request = [("return_entropy", False)]
    assert arguments(getattr(skyrl, name).apply) == arguments(theirs.forward) + of_pull_request


def groups_of(rank: int, size: int) -> dict[int, dist.ProcessGroup]:
    """Returns this rank's group by its number of ranks. Every rank creates every group."""
    alone = [dist.new_group([each]) for each in range(size)]
    return {1: alone[rank], size: dist.group.WORLD}


def compare_with_skyrl(rank, size, num_ranks, chunk, dtypes, rows, vocab, targets) -> None:
    """Compares the results of SkyRL's function and of ours with each other and with those of a whole head."""
    use_device()
    theirs = original(f"{MEGATRON}.model_utils").FusedLinearChunkedDistributedLogprob
    group = groups_of(rank, size)[num_ranks]
    generator = seeded(0)
    hidden = torch.randn(2, rows // 2, 64, generator=generator).to(dtypes[0]).requires_grad_()
    weight = (torch.randn(vocab, 64, generator=generator) / 8).to(dtypes[1]).requires_grad_()
    first, last = {
        "any": (0, vocab + vocab // 4),
        "inside": (0, vocab),
        "outside": (vocab, 2 * vocab),
    }[targets]
    target = torch.randint(first, last, (2, rows // 2), generator=generator)
    part = vocab // num_ranks
    begin = dist.get_rank(group) * part
    shard = weight.detach()[begin : begin + part].clone().requires_grad_()
    upstream = upstream_of(target.float())

    results = {}
    for name, function in (
        ("ours", skyrl.FusedLinearChunkedDistributedLogprob),
        ("theirs", theirs),
    ):
        logprob = function.apply(hidden, shard, target, begin, begin + part, chunk, group)
        d_hidden, d_shard = torch.autograd.grad(logprob, (hidden, shard), upstream)
        assert logprob.dtype == FP32
        assert (d_hidden.dtype, d_shard.dtype) == dtypes
        d_hidden = d_hidden.float()
        dist.all_reduce(d_hidden, group=group)
        results[name] = (logprob.detach(), d_hidden, d_shard)

    # As SkyRL does, the drop-in casts hidden to the weight's dtype.
    cast = hidden.detach().to(dtypes[1]).double().requires_grad_()
    with_gradient = unowned_logprob(cast, weight, target)
    d_hidden, d_weight = torch.autograd.grad(
        with_gradient, (cast, weight), [u.double() for u in upstream]
    )
    truth = (
        torch.where(target < vocab, with_gradient, 0.0),
        d_hidden,
        d_weight[begin : begin + part],
    )

    ours, other = results["ours"], results["theirs"]
    near(ours[0], truth[0].float(), rtol=0, atol=1e-5)
    is_narrow = dtypes[1] == BF16
    for our, true in zip(ours[1:], truth[1:], strict=True):
        assert relative_error(our, true) <= (4e-3 if BF16 in dtypes else 1e-5)
    # SkyRL's tests use these tolerances.
    near(ours[0], other[0], rtol=0, atol=2e-2 if is_narrow else 1e-4)
    near(ours[1], other[1], rtol=2e-2, atol=2e-2 if BF16 in dtypes else 2e-3)
    near(ours[2], other[2], rtol=4e-2, atol=4e-2 if is_narrow else 2e-3)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP32, FP32), (FP32, BF16)])
def test_results_equal_those_of_skyrl(two_ranks, num_ranks, chunk, dtypes):
    skip_without_originals()
    two_ranks.results(compare_with_skyrl, num_ranks, chunk, dtypes, 64, 1024, "any")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("targets", ["inside", "outside"])
def test_all_targets_inside_or_outside_the_vocabulary(two_ranks, num_ranks, targets):
    skip_without_originals()
    two_ranks.results(compare_with_skyrl, num_ranks, 64, (FP32, FP32), 2, 8, targets)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_65536_rows(two_ranks, num_ranks):
    skip_without_originals()
    two_ranks.results(compare_with_skyrl, num_ranks, 4096, (FP32, FP32), 65_536, 64, "any")


def compare_groups(rank: int, size: int) -> None:
    """Checks what a group of None means to each function."""
    use_device()
    hidden, weight, target = make_case()
    half = VOCAB // size
    mine = slice(rank * half, (rank + 1) * half)
    rows = (hidden.unsqueeze(0), weight.detach()[mine], target.unsqueeze(0))
    of_shard = unowned_logprob(hidden, weight[mine], target - mine.start)
    is_mine = (target >= mine.start) & (target < mine.stop)

    of_all = skyrl.FusedLinearChunkedDistributedLogprob.apply(*rows, mine.start, mine.stop, 8, None)
    alone = skyrl.FusedLinearLogprobTriton.apply(*rows, mine.start, mine.stop, 8, None)

    close(of_all.squeeze(0), unowned_logprob(hidden, weight, target))
    close(alone.squeeze(0), torch.where(is_mine, of_shard, 0.0))


def test_without_a_group_the_torch_function_uses_all_ranks_and_the_triton_function_one(two_ranks):
    skip_without_originals()
    two_ranks.results(compare_groups)


def test_out_of_vocab_targets_have_logprob_zero_and_the_gradient_of_the_softmax():
    hidden, weight, target = case = make_case()
    # -100 is out of vocabulary as well: this function ignores no target.
    target[1], target[3] = VOCAB + 7, -100
    with_gradient = unowned_logprob(*case)

    ours = skyrl.FusedLinearChunkedDistributedLogprob.apply(
        hidden.reshape(2, 3, SIZE), weight, target.reshape(2, 3), 0, VOCAB, 1024, None
    )

    is_id = (target >= 0) & (target < VOCAB)
    close(ours, torch.where(is_id, with_gradient, 0.0).reshape(2, 3))
    upstream = upstream_of(with_gradient)
    close(
        gradients(ours.reshape(-1), upstream, case),
        gradients(with_gradient, upstream, case),
    )


def test_hidden_gets_its_own_dtype_back_after_the_cast_to_that_of_the_weight():
    hidden, weight, target = make_case(torch.float32, weight_dtype=torch.bfloat16)

    ours = skyrl.FusedLinearLogprobTriton.apply(
        hidden.unsqueeze(0), weight, target.unsqueeze(0), 0, VOCAB, 8, None
    )

    truth = reference(hidden.bfloat16(), weight, target).logprob
    near(ours.squeeze(0), truth.float(), rtol=0, atol=2e-5)
    assert torch.autograd.grad(ours.sum(), hidden)[0].dtype == torch.float32


def test_autocast_leaves_the_dtype_of_the_weight():
    hidden, weight, target = case = make_case(torch.float32)

    with torch.autocast(hidden.device.type, torch.bfloat16):
        ours = skyrl.FusedLinearLogprobTriton.apply(
            hidden.unsqueeze(0), weight, target.unsqueeze(0), 0, VOCAB, 8, None
        )

    near(ours.squeeze(0), reference(*case).logprob.float(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "function",
    [skyrl.FusedLinearLogprobTriton, skyrl.FusedLinearChunkedDistributedLogprob],
)
def test_the_entropy_follows_its_definition_for_every_target(function):
    hidden, weight, target = case = make_case()
    target[1], target[3] = VOCAB + 7, -100  # The entropy does not depend on targets.
    log_p = (hidden.double() @ weight.double().T).log_softmax(-1)
    truth = -(log_p.exp() * log_p).sum(-1)
    rows = (hidden.unsqueeze(0), weight, target.unsqueeze(0))

    logprob, entropy = function.apply(*rows, 0, VOCAB, 8, None, False, True)

    assert entropy.shape == (1, ROWS)
    close(logprob, function.apply(*rows, 0, VOCAB, 8, None))
    close(entropy.squeeze(0), truth)
    upstream = upstream_of(truth)
    close(gradients(entropy.squeeze(0), upstream, case), gradients(truth, upstream, case))


def test_the_gradients_of_logprob_and_entropy_add_up():
    hidden, weight, target = case = make_case()
    truth = reference(hidden, weight, target)

    logprob, entropy = skyrl.FusedLinearLogprobTriton.apply(
        hidden.unsqueeze(0),
        weight,
        target.unsqueeze(0),
        0,
        VOCAB,
        8,
        None,
        return_entropy=True,
    )

    loss, true_loss = (2 * a.sum() - 3 * b.sum() for a, b in ((logprob, entropy), truth[:2]))
    close(gradients(loss, None, case), gradients(true_loss, None, case))


def test_the_entropy_has_no_graph_for_inference_only():
    hidden, weight, target = make_case()

    results = skyrl.FusedLinearLogprobTriton.apply(
        hidden.unsqueeze(0), weight, target.unsqueeze(0), 0, VOCAB, 8, None, True, True
    )

    assert [each.requires_grad for each in results] == [False, False]


def compare_entropy_with_skyrl(rank, size, num_ranks, dtype) -> None:
    """Compares the entropy with SkyRL's function for it, and its gradients with those of a whole head."""
    use_device()
    theirs = original(f"{MEGATRON}.model_utils")._fused_vocab_parallel_entropy_from_hidden
    group = groups_of(rank, size)[num_ranks]
    generator = seeded(0)
    hidden = torch.randn(2, 16, 64, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(256, 64, generator=generator) / 4).to(dtype)
    target = torch.randint(0, 300, (2, 16), generator=generator)
    part = 256 // num_ranks
    begin = dist.get_rank(group) * part
    shard = weight[begin : begin + part].clone().requires_grad_()

    _, entropy = skyrl.FusedLinearChunkedDistributedLogprob.apply(
        hidden, shard, target, begin, begin + part, 8, group, False, True
    )

    with torch.no_grad():
        other = theirs(hidden, shard, group, chunk_size=8)
    whole = weight.double().requires_grad_()
    cast = hidden.detach().double().requires_grad_()
    logits = cast @ whole.T
    log_p = logits.log_softmax(-1)
    truth = -(log_p.exp() * log_p).sum(-1)
    # SkyRL rounds each logit to the dtype, which moves the entropy by dH/dz = -p (log p + H).
    slope = (log_p.exp() * (log_p + truth[..., None])).abs()
    rounding = torch.finfo(dtype).eps / 2 * (slope * logits.abs()).sum(-1)
    upstream = torch.linspace(0.3, 1.1, 32).reshape(2, 16)
    d_hidden, d_shard = torch.autograd.grad(entropy, (hidden, shard), upstream)
    true_d_hidden, true_d_weight = torch.autograd.grad(truth, (cast, whole), upstream.double())
    d_hidden = d_hidden.float()
    dist.all_reduce(d_hidden, group=group)
    assert entropy.dtype == FP32
    near(entropy, truth.float(), rtol=0, atol=1e-5)
    assert ((entropy - other).abs() <= rounding + 1e-4).all()
    limit = 4e-3 if dtype == BF16 else 1e-5
    assert relative_error(d_hidden, true_d_hidden) <= limit
    assert relative_error(d_shard, true_d_weight[begin : begin + part]) <= limit


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_entropy_equals_that_of_skyrl(two_ranks, num_ranks, dtype):
    skip_without_originals()
    two_ranks.results(compare_entropy_with_skyrl, num_ranks, dtype)


@pytest.fixture
def loaded_skyrl(monkeypatch):
    """Loads SkyRL's modules, and restores their functions after the test."""
    modules = {}
    for name, function in (
        ("model_utils", "FusedLinearChunkedDistributedLogprob"),
        ("fused_linear_logprob_triton", "FusedLinearLogprobTriton"),
    ):
        modules[name] = original(f"{MEGATRON}.{name}")
        monkeypatch.setattr(modules[name], function, getattr(modules[name], function))
    # SkyRL uses its Triton function on a GPU only; ours runs on a CPU as well.
    for name in ("TRITON_AVAILABLE", "is_cuda_available"):
        monkeypatch.setattr(modules["fused_linear_logprob_triton"], name, True)
    return modules["model_utils"]


@pytest.mark.parametrize(
    ("backend", "function"),
    [("torch", "FusedLinearChunkedDistributedLogprob"), ("triton", "FusedLinearLogprobTriton")],
)
def test_skyrls_own_caller_computes_with_linear_logprob(
    loaded_skyrl, monkeypatch, backend, function
):
    hidden, weight, target = case = make_case()
    calls = []
    ours = getattr(skyrl, function)
    of_ours = ours.apply
    monkeypatch.setattr(ours, "apply", lambda *given: calls.append(given) or of_ours(*given))

    skyrl.apply_logprobd_kernel()
    skyrl.apply_logprobd_kernel()
    logprob = loaded_skyrl._fused_lm_head_logprob_apply(
        backend, hidden.unsqueeze(0), weight, target.unsqueeze(0), 0, VOCAB, 8, None, False
    )

    assert len(calls) == 1
    truth = reference(*case).logprob
    close(logprob.squeeze(0), truth)
    close(gradients(logprob.sum(), None, case), gradients(truth.sum(), None, case))


def test_builds_no_graph_for_inference_only():
    hidden, weight, target = make_case()

    ours = skyrl.FusedLinearChunkedDistributedLogprob.apply(
        hidden.unsqueeze(0), weight, target.unsqueeze(0), 0, VOCAB, 1024, None, True
    )

    assert ours.shape == (1, ROWS) and not ours.requires_grad


def test_rejects_a_range_that_does_not_match_the_weight():
    hidden, weight, target = make_case()

    with pytest.raises(ValueError, match=r"vocab_end_index.*20 rows.*\[0, 21\)"):
        skyrl.FusedLinearChunkedDistributedLogprob.apply(
            hidden.unsqueeze(0), weight, target.unsqueeze(0), 0, VOCAB + 1, 8, None
        )
