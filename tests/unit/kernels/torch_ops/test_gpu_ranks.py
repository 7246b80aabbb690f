"""Tests of shards of a head on several GPU ranks. Gloo ranks share one GPU; each NCCL rank has its own GPU."""

import contextlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gpu_cases import make_case, memory_limited_to
from logprobd_ops import linear_logprob_loss
from logprobd_ops.linear_logprob import linear_logprob
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
BACKENDS = (pytest.param("gloo"), pytest.param("nccl", marks=needs_two))
TILED = [0, 1152, 2000]
UNEVEN = {"gloo": [0, 1, 701, 701, 2000], "nccl": [0, 701, 2000]}
# Losses compute their gradients in the forward pass; losses of logprobs alone compute them from rebased exponentials.
# At a low temperature, one shard has nearly all of a row's probability. If another shard has the row's target, all
# logits of that shard can be far lower.
MODES = (
    *("recompute", "cached", "sequence parallel", "mean logit", "many rows", "every row"),
    *("loss", "loss with entropy", "peaked loss", "loss of every row", "fp32 hidden", "fp32 loss"),
)

EXTREMES = {"return_argmax": True, "return_max_logit": True, "return_min_logit": True}


def case_of(mode: str, vocab: int, device="cuda") -> tuple[tuple[Tensor, Tensor, Tensor], dict]:
    """Returns the inputs and options of a mode. "many rows" has two blocks of rows and ranks with only padding."""
    if "every row" in mode:  # No row is ignored.
        hidden, weight, target = make_case(vocab=vocab, device=device)
        return (hidden, weight, target.clamp_(min=0)), {}
    if "fp32" in mode:  # Most values have more bits than one bf16 split.
        hidden, weight, target = make_case(vocab=vocab, device=device)
        return ((hidden.detach().float() * 1.001).requires_grad_(), weight, target), {}
    if mode != "many rows":
        return make_case(vocab=vocab, device=device), {}
    hidden, weight, target = make_case(rows=10_000, vocab=vocab, device=device)
    return (hidden, weight, target.clamp_(max=1099)), {"vocab_valid": 1100}


def computed(
    hidden: Tensor, weight: Tensor, target: Tensor, mode: str, **options
) -> dict[str, Tensor]:
    """Returns the scores, the loss and the gradients by name."""
    if "loss" in mode:
        weights = torch.linspace(-1, 1, target.numel(), device=target.device)
        results = linear_logprob_loss(
            hidden,
            weight,
            target,
            logprob_coef=weights,
            entropy_coef=0.01 * weights if "entropy" in mode else None,
            temperature=0.1 if "peaked" in mode else 1.0,
            **EXTREMES,
            **options,
        )
        loss = results.loss
    else:
        results = linear_logprob(
            hidden,
            weight,
            target,
            memory="cached" if mode == "cached" else "recompute",
            return_mean_logit=mode == "mean logit",
            return_sum_p_squared=mode != "cached",
            top_k=3,
            candidate_ids=torch.stack((target.clamp_min(0), torch.zeros_like(target)), -1),
            **EXTREMES,
            **options,
        )
        loss = (results.logprob + 0.01 * results.entropy).sum()
        loss = loss + results.top_k_logprobs[:, 1].sum() - results.candidate_logprobs.sum()
        if results.mean_logit is not None:
            loss = loss + results.mean_logit.sum()
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    scores = {name: score for name, score in results._asdict().items() if score is not None}
    return scores | {"loss": loss, "d_hidden": d_hidden, "d_weight": d_weight}


def computed_in_a_graph(
    hidden: Tensor, shard: Tensor, target: Tensor, options: dict
) -> dict[str, str | list[Tensor]]:
    """Returns the error of a capture before the same call has run, and then the results of a graph and of the call that
    it captures, both for other hidden states than those of the capture."""
    hidden, shard = (each.detach().clone().requires_grad_() for each in (hidden, shard))
    side = torch.cuda.Stream()

    def step(weight: Tensor) -> list[Tensor]:
        scores = linear_logprob(hidden, weight, target, return_argmax=True, **options)
        loss = linear_logprob_loss(hidden, weight, target, logprob_coef=-1.0, **options).loss
        gradients = torch.autograd.grad(scores.logprob.sum() + loss, (hidden, weight))
        return [scores.logprob.detach(), scores.argmax, loss.detach(), *gradients]

    def capture(weight: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            results = step(weight)
        return graph, results

    refusal = ""
    unknown = shard.detach()[: max(len(shard) - 192, 0)].requires_grad_()
    try:
        capture(unknown)
    except ValueError as error:
        refusal = str(error)
    if "gloo" in refusal:
        return {"refusal": refusal}
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # A backward runs on the stream of its forward.
        step(shard)
    graph, of_graph = capture(shard)
    with torch.no_grad():
        hidden.mul_(0.5)
    graph.replay()
    of_graph = [result.clone() for result in of_graph]
    return {"refusal": refusal, "graph": of_graph, "call": step(shard)}


def serve(rank: int, backend: str, cuts: list[int], store: str, out: str) -> None:
    """Runs one of several processes that each have a part of the vocabulary."""
    device = torch.device("cuda", rank % torch.cuda.device_count() if backend == "nccl" else 0)
    torch.cuda.set_device(device)
    size = len(cuts) - 1
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    options = {"vocab_start": cuts[rank], "process_group": dist.group.WORLD}

    def part_of(weight: Tensor) -> Tensor:
        return weight.detach()[cuts[rank] : cuts[rank + 1]].clone().requires_grad_()

    results = {}
    for mode in MODES:
        (hidden, weight, target), more = case_of(mode, cuts[-1], device)
        if mode == "sequence parallel":
            hidden = hidden.detach().chunk(size)[rank].clone().requires_grad_()
            more = {"sequence_parallel": True}
        results[mode] = computed(hidden, part_of(weight), target, mode, **options, **more)
    hidden, weight, target = make_case(vocab=cuts[-1], device=device)
    shard = part_of(weight)
    try:
        linear_logprob(hidden, shard, target.roll(rank), **options)
    except ValueError as error:
        results["refusal"] = str(error)
    narrow = shard[:, :8] if rank == 1 else shard
    try:
        linear_logprob(hidden, narrow, target, **options)
    except (RuntimeError, ValueError) as error:
        results["failure in the forward"] = str(error)
    sum_for_weight = torch.zeros(len(shard), 64, device=device)
    scores = linear_logprob(hidden, shard, target, weight_grad=sum_for_weight, **options)
    if rank == 1:
        sum_for_weight.resize_(8, 64)
    try:
        scores[0].sum().backward()
    except (RuntimeError, ValueError) as error:
        results["failure in the backward"] = str(error)
    results["graph"] = computed_in_a_graph(hidden, shard, target, options)
    torch.save(results, f"{out}{rank}")
    dist.destroy_process_group()


MIB = 1 << 20
SHORT_STEPS = range(0, 512, 4)  # MiB that rank 1 may take in addition to its inputs


def take_small_memory() -> list[Tensor]:
    """Returns tensors that leave no memory for any other tensor."""
    taken = []
    while True:
        try:
            taken.append(torch.empty(1, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            return taken


def serve_short_of_memory(rank: int, store: str, out: str) -> None:
    """Runs one of two ranks. Rank 1 may take only some memory, at first none, which grows until the calls succeed. The
    weight is not aligned, so the fused kernels need a copy of it."""
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    half = 50_000
    hidden, weight, target = make_case(rows=2_000, vocab=2 * half)
    memory = torch.empty(half * weight.shape[1] + 1, dtype=weight.dtype, device="cuda")
    shard = memory[1:].view(half, -1).copy_(weight.detach()[rank * half :][:half]).requires_grad_()
    bias = torch.zeros(half, device="cuda")
    ids = torch.arange(64, device="cuda").repeat(len(target), 1)  # The lists take 30 MiB.
    del weight, memory
    options = {"vocab_start": rank * half, "process_group": dist.group.WORLD}

    def tell_errors() -> None:
        """Raises the error of another rank's backward, which the ranks share in their next call."""
        linear_logprob(hidden.detach()[:1], shard.detach(), target[:1], **options)

    def score() -> None:
        scores = linear_logprob(
            *(hidden, shard, target, bias),
            return_mean_logit=True,
            top_k=ids.shape[1],
            candidate_ids=ids,
            **options,
        )
        torch.autograd.grad((scores.logprob + scores.mean_logit).sum(), (hidden, shard))

    def loss() -> None:
        result = linear_logprob_loss(
            hidden, shard, target, bias, logprob_coef=-1.0, memory_budget=64 * MIB, **options
        )
        torch.autograd.grad(result.loss, (hidden, shard))

    outcomes: dict[str, list[str]] = {"score": [], "loss": []}
    for name, compute in (("score", score), ("loss", loss)):
        compute()  # takes the memory of cuBLAS and of the kernels' code
        for step in SHORT_STEPS:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            limit = (torch.cuda.memory_reserved() + step * MIB) / total if rank == 1 else 1.0
            torch.cuda.set_per_process_memory_fraction(limit)
            taken = take_small_memory() if rank == 1 and step == 0 else []
            errors = []
            for call in (compute, tell_errors):
                try:
                    call()
                except RuntimeError as error:
                    errors.append(str(error))
            outcomes[name].append(errors[0] if errors else "")
            del taken
            torch.cuda.set_per_process_memory_fraction(1.0)
            if not outcomes[name][-1]:
                break
    torch.save(outcomes, f"{out}{rank}")
    dist.destroy_process_group()


# Regression: a rank without memory for the numbers that ranks exchange, for a copy of its weight, or for the lists of
# all ranks, failed alone, and the others waited until they timed out.
def test_every_rank_learns_that_one_has_too_little_memory(tmp_path):
    torch.multiprocessing.spawn(
        serve_short_of_memory, (str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2
    )
    healthy, short = (torch.load(tmp_path / f"out{rank}") for rank in (0, 1))

    for name, errors in short.items():
        *failed, succeeded = zip(errors, healthy[name], strict=True)
        assert succeeded == ("", "") and len(failed) >= 5
        for error, of_the_other in failed:
            assert "out of memory" in error
            assert "failed on another rank" in of_the_other


def serve_failing_backward(rank: int, has_columns: bool, store: str, out: str) -> None:
    """Runs one of two ranks. Rank 0 has no memory for its block of gradients in one of two backward passes. Unless
    `has_columns`, the shard of rank 1 is padding."""
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    half = 50_112
    hidden, weight, target = make_case(rows=2_000, vocab=2 * half)
    shard = weight.detach()[rank * half :][:half].clone().requires_grad_()
    options = {"vocab_start": rank * half, "process_group": dist.group.WORLD, "memory": "recompute"}
    if not has_columns:
        target = target.clamp_max(half - 1)
        options["vocab_valid"] = half
    errors = []

    def attempt(call) -> None:
        try:
            call()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))

    def score() -> Tensor:
        return linear_logprob(hidden, shard, target, **options).logprob.sum()

    score().backward()  # takes the memory of cuBLAS and of the kernels' code
    first, second = score(), score()
    with memory_limited_to(64) if rank == 0 else contextlib.nullcontext():
        attempt(first.backward)
    attempt(second.backward)  # The host learns of the error here.
    attempt(score)
    torch.save(errors, f"{out}{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize("has_columns", (True, False))
def test_ranks_learn_in_their_next_call_that_one_failed_in_a_backward(tmp_path, has_columns):
    torch.multiprocessing.spawn(
        serve_failing_backward,
        (has_columns, str(tmp_path / "store"), str(tmp_path / "out")),
        nprocs=2,
    )
    failed, healthy = (torch.load(tmp_path / f"out{rank}") for rank in (0, 1))

    assert "out of memory" in failed[0]
    assert failed[1].startswith("this rank failed in an earlier backward pass")
    assert failed[2] == ""
    assert healthy[0] == ""
    assert healthy[1].startswith("an earlier backward pass or loss of the group failed on another")
    assert healthy[2] == ""


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=("whole tiles", "any size"))
def cuts(request, backend) -> list[int]:
    return TILED if request.param == "whole tiles" else UNEVEN[backend]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, backend, cuts) -> list[dict]:
    """Returns the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    size = len(cuts) - 1
    torch.multiprocessing.spawn(
        serve, (backend, cuts, str(folder / "store"), str(folder / "out")), nprocs=size
    )
    return [torch.load(folder / f"out{rank}", map_location="cuda:0") for rank in range(size)]


def assert_near(gradient: Tensor, truth: Tensor) -> None:
    assert (gradient.float() - truth.float()).norm() <= 5e-3 * truth.float().norm()


@pytest.mark.parametrize("mode", MODES)
def test_shards_give_the_scores_of_the_whole_head(ranks, cuts, mode):
    case, options = case_of(mode, cuts[-1])
    whole = computed(*case, mode, **options)

    for rank in ranks:
        for name in whole.keys() - {"loss", "mean_logit", "d_hidden", "d_weight"}:
            ours = rank[mode][name]
            if cuts == TILED:
                assert torch.equal(ours, whole[name]), name
            else:
                torch.testing.assert_close(ours, whole[name], rtol=1e-6, atol=1e-5)
        for name in {"loss", "mean_logit"} & whole.keys():
            torch.testing.assert_close(rank[mode][name], whole[name], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_shards_give_the_gradients_of_the_whole_head(ranks, cuts, mode):
    case, options = case_of(mode, cuts[-1])
    whole = computed(*case, mode, **options)
    of_hidden = [rank[mode]["d_hidden"] for rank in ranks]

    if mode == "sequence parallel":
        assert_near(torch.cat(of_hidden), whole["d_hidden"])
    else:
        assert all(torch.equal(ours, of_hidden[0]) for ours in of_hidden)
        assert_near(of_hidden[0], whole["d_hidden"])
    assert_near(torch.cat([rank[mode]["d_weight"] for rank in ranks]), whole["d_weight"])


def test_different_targets_raise_on_every_rank(ranks):
    for rank in ranks:
        assert "called with different" in rank["refusal"]


def test_a_graph_contains_calls_of_a_group_over_nccl(ranks, backend):
    for rank in ranks:
        if backend == "gloo":
            assert "gloo" in rank["graph"]["refusal"]
            continue
        assert "outside of the graph" in rank["graph"]["refusal"]
        of_graph, of_call = rank["graph"]["graph"], rank["graph"]["call"]
        assert torch.equal(of_graph[0], of_call[0])  # logprob
        assert torch.equal(of_graph[1], of_call[1])  # argmax
        torch.testing.assert_close(of_graph[2], of_call[2])  # loss
        for gradient, truth in zip(of_graph[3:], of_call[3:], strict=True):
            assert_near(gradient, truth)


@pytest.mark.parametrize(("where", "what"), (("forward", "hidden"), ("backward", "weight_grad")))
def test_the_failure_of_one_rank_raises_on_every_rank(ranks, where, what):
    for number, rank in enumerate(ranks):
        failure = rank[f"failure in the {where}"]
        assert (what if number == 1 else "another rank") in failure
