"""Tests of linear_logprob over the ranks of a gloo group, each of which has a shard of the vocabulary."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradient_cases import OUTPUTS
from logprobd_ops import linear_logprob, linear_logprob_loss
from rank_pool import RankPool
from raw_operator import backward_arguments, raw_scores
from score_cases import EVERY_SCORE

TILE = 192  # Columns of a tile. Sums are exact if all shards begin at multiples of it.
SIZE = 3
ROWS, HIDDEN, VOCAB = 12, 24, 5 * TILE
# Scores that have the bits of the whole head if shards begin with tiles.
SCORES = (
    *("logprob", "entropy", "lse", "argmax", "max_logit", "min_logit", "sum_p_squared"),
    *("target_rank", "top_k_ids", "top_k_logprobs", "candidate_logprobs"),
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with RankPool(SIZE, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


def head(*, exact: bool = False) -> dict[str, torch.Tensor]:
    """Returns a whole head and its rows. With `exact`, dot products are exact in any order."""
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, generator=random)
    weight = torch.randn(VOCAB, HIDDEN, generator=random)
    if exact:
        hidden, weight = (hidden * 8).round() / 8, (weight * 4).round() / 4
    target = torch.randint(0, VOCAB, (ROWS,), generator=random)
    target[4] = -100
    bias = torch.randn(VOCAB, generator=random)
    upstream = torch.randn(4, ROWS, generator=random)
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": (bias * 4).round() / 4 if exact else bias,
        "target": target,
        "candidate_ids": torch.randint(0, 2 * TILE, (ROWS, 4), generator=random),
        "upstream": upstream,
        "list_upstream": torch.randn(ROWS, 9, generator=random),
    }


def head_without_ignored_rows() -> dict[str, torch.Tensor]:
    """Returns a head without ignored rows, for which the sum of hidden's gradient starts before the last product is
    enqueued."""
    given = head()
    given["target"][4] = 7
    return given


def score(given: dict, *, with_lists: bool = False, **options) -> dict[str, torch.Tensor]:
    """Returns the scores and gradients by name. With `with_lists`, the loss contains the lists."""
    inputs = {name: given[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    results = linear_logprob(
        inputs["hidden"],
        inputs["weight"],
        given["target"],
        inputs["bias"],
        top_k=5,
        candidate_ids=given["candidate_ids"],
        **EVERY_SCORE,
        **{"temperature": 0.7, **options},
    )
    scores = {name: getattr(results, name) for name in OUTPUTS}
    loss = sum(u @ s for u, s in zip(given["upstream"], scores.values(), strict=True))
    if with_lists:
        loss = loss + (results.top_k_logprobs * given["list_upstream"][:, :5]).sum()
        loss = loss + (results.candidate_logprobs * given["list_upstream"][:, 5:]).sum()
    loss.backward()
    gradients = {f"d_{name}": tensor.grad for name, tensor in inputs.items()}
    detached = {name: each.detach() for name, each in results._asdict().items() if each is not None}
    return detached | gradients


def shard(given: dict, borders: list[int], rank: int) -> dict:
    """Returns the inputs of one rank, with its rows of the weight."""
    part = slice(borders[rank], borders[rank + 1])
    return given | {"weight": given["weight"][part], "bias": given["bias"][part]}


def score_shard(rank: int, _size: int, given: dict, borders: list[int], options: dict) -> dict:
    return score(
        shard(given, borders, rank),
        vocab_start=borders[rank],
        process_group=dist.group.WORLD,
        **options,
    )


def assert_close(parts: list[dict], whole: dict, borders: list[int]) -> None:
    for rank, part in enumerate(parts):
        own = slice(borders[rank], borders[rank + 1])
        for name, value in part.items():
            truth = whole[name][own] if name in ("d_weight", "d_bias") else whole[name]
            torch.testing.assert_close(
                value,
                truth,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, what=f"{name} of {rank}": f"{what}: {text}",
            )


UNEVEN = {
    "aligned": [0, 2 * TILE, 3 * TILE, VOCAB],
    "within tiles": [0, 100, 501, VOCAB],
    "one column": [0, 1, 2 * TILE, VOCAB],
    "an empty shard": [0, 0, 2 * TILE, VOCAB],
}


@pytest.mark.parametrize("borders", UNEVEN.values(), ids=UNEVEN)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 0.5}], ids=["plain", "capped"])
def test_shards_of_any_size_give_the_results_of_the_whole_head(ranks, borders, options) -> None:
    given = head()

    parts = ranks.results(score_shard, given, borders, options)

    assert_close(parts, score(given, **options), borders)


@pytest.mark.parametrize("borders", UNEVEN.values(), ids=UNEVEN)
def test_lists_of_shards_have_the_gradients_of_the_whole_head(ranks, borders) -> None:
    given = head()
    given["candidate_ids"] = (given["candidate_ids"] * 7) % VOCAB
    options = {"with_lists": True, "softcap": 5.0}

    parts = ranks.results(score_shard, given, borders, options)

    assert_close(parts, score(given, **options), borders)


def score_other_candidates(rank: int, size: int, given: dict, borders: list[int]) -> dict:
    given["candidate_ids"] = given["candidate_ids"] + (rank == 1)
    return score_shard(rank, size, given, borders, {})


def test_different_candidates_raise_on_every_rank(ranks) -> None:
    outcomes = ranks.outcomes(score_other_candidates, head(), UNEVEN["aligned"])

    for _, error in outcomes:
        assert error.startswith("ValueError: the ranks of the group were called with different")


@pytest.mark.parametrize("memory", ["recompute", "cached"])
def test_gradients_without_ignored_rows_are_those_of_the_whole_head(ranks, memory) -> None:
    given, borders = head_without_ignored_rows(), UNEVEN["an empty shard"]

    parts = ranks.results(score_shard, given, borders, {"memory": memory})

    assert_close(parts, score(given), borders)


def test_scores_have_the_same_bits_on_every_rank(ranks) -> None:
    first, *others = ranks.results(score_shard, head(), UNEVEN["within tiles"], {})

    for other in others:
        for name in (*SCORES, "mean_logit", "d_hidden"):
            assert torch.equal(other[name], first[name]), name


def test_shards_that_begin_with_a_tile_give_the_bits_of_the_whole_head(ranks) -> None:
    given = head(exact=True)

    parts = ranks.results(score_shard, given, UNEVEN["aligned"], {})

    whole = score(given)
    for part in parts:
        for name in SCORES:
            assert torch.equal(part[name], whole[name]), name


def test_padding_behind_the_vocabulary_counts_in_no_shard(ranks) -> None:
    given = head()
    valid = 2 * TILE + 50
    given["target"] = given["target"].where(given["target"] < valid, 7)
    padded = given | {"weight": given["weight"].clone()}
    padded["weight"][valid:] = 1e4
    borders = UNEVEN["aligned"]

    parts = ranks.results(score_shard, padded, borders, {"vocab_valid": valid})

    whole = score(given | {"weight": given["weight"][:valid], "bias": given["bias"][:valid]})
    for part in parts:
        for name in SCORES:
            torch.testing.assert_close(part[name], whole[name], rtol=1e-5, atol=1e-5, msg=name)
    assert not parts[2]["d_weight"].any()


def score_split_rows(rank: int, size: int, given: dict, borders: list[int]) -> dict:
    rows = given["hidden"].chunk(size)[rank]
    return score(
        shard(given | {"hidden": rows}, borders, rank),
        vocab_start=borders[rank],
        process_group=dist.group.WORLD,
        sequence_parallel=True,
    )


def test_rows_split_over_the_ranks_are_gathered_and_their_gradient_is_scattered(ranks) -> None:
    given, borders = head(), UNEVEN["within tiles"]

    parts = ranks.results(score_split_rows, given, borders)

    whole = score(given)
    d_hidden = torch.cat([part.pop("d_hidden") for part in parts])
    torch.testing.assert_close(d_hidden, whole["d_hidden"], rtol=1e-5, atol=1e-5)
    assert_close(parts, whole, borders)


def score_with_a_bad_rank(rank: int, _size: int, given: dict, borders: list[int]) -> dict:
    mine = shard(given, borders, rank)
    if rank == 1:
        mine["hidden"] = mine["hidden"][:, :-1]
    return score(mine, vocab_start=borders[rank], process_group=dist.group.WORLD)


@pytest.mark.parametrize("memory", ["cached", "auto"])
def test_each_rank_caches_the_logits_of_its_shard(ranks, memory) -> None:
    given, borders = head(), UNEVEN["an empty shard"]

    parts = ranks.results(score_shard, given, borders, {"memory": memory})

    recomputed = ranks.results(score_shard, given, borders, {})
    for part, truth in zip(parts, recomputed, strict=True):
        assert all(torch.equal(part[name], truth[name]) for name in truth)


def loss_of(given: dict, **options) -> dict[str, torch.Tensor]:
    """Returns a loss whose gradients are computed in the forward pass, the scores, and the gradients."""
    inputs = {name: given[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    upstream = given["upstream"]
    loss, logprob, entropy, lse, *_ = linear_logprob_loss(
        inputs["hidden"],
        inputs["weight"],
        given["target"],
        inputs["bias"],
        logprob_coef=upstream[0],
        entropy_coef=upstream[1],
        lse_coef=upstream[2],
        mean_logit_coef=upstream[3],
        temperature=0.7,
        **options,
    )
    (2 * loss).backward()
    gradients = {f"d_{name}": tensor.grad / 2 for name, tensor in inputs.items()}
    return {"loss": loss.detach(), "logprob": logprob, "entropy": entropy, "lse": lse} | gradients


def loss_of_shard(
    rank: int, size: int, given: dict, borders: list[int], budgets: list[int], is_split: bool
) -> dict:
    mine = shard(given, borders, rank)
    if is_split:
        mine["hidden"] = mine["hidden"].chunk(size)[rank]
    return loss_of(
        mine,
        vocab_start=borders[rank],
        process_group=dist.group.WORLD,
        sequence_parallel=is_split,
        memory_budget=budgets[rank],
    )


@pytest.mark.parametrize("given", [head(), head_without_ignored_rows()], ids=["some", "all"])
@pytest.mark.parametrize("is_split", [False, True], ids=["all rows", "split rows"])
@pytest.mark.parametrize(
    "budgets", [[1 << 30] * 3, [1 << 30, 5 * 4 * TILE, 0]], ids=["one", "many"]
)
def test_gradients_formed_in_the_forward_are_those_of_the_whole_head(
    ranks, budgets, is_split, given
) -> None:
    borders = UNEVEN["within tiles"]

    parts = ranks.results(loss_of_shard, given, borders, budgets, is_split)

    whole = score(given)
    terms = ("logprob", "entropy", "lse", "mean_logit")
    whole["loss"] = sum(u @ whole[t] for u, t in zip(given["upstream"], terms, strict=True))
    if is_split:
        d_hidden = torch.cat([part.pop("d_hidden") for part in parts])
        torch.testing.assert_close(d_hidden, whole["d_hidden"], rtol=1e-5, atol=1e-5)
    assert_close(parts, whole, borders)


def num_collectives() -> int:
    """Returns how many collectives this rank has started in the group of all ranks."""
    return dist.group.WORLD._get_sequence_number_for_group()


def results_and_collectives(
    rank: int, size: int, function: Callable, *arguments: Any
) -> tuple[dict, int]:
    before = num_collectives()
    return function(rank, size, *arguments), num_collectives() - before


@pytest.mark.parametrize("given", [head(), head_without_ignored_rows()], ids=["some", "all"])
def test_partial_gradients_of_hidden_add_up_to_the_gradient_without_a_collective(
    ranks, given
) -> None:
    borders = UNEVEN["within tiles"]
    partial = {"hidden_gradient": "partial"}

    ours = ranks.results(results_and_collectives, score_shard, given, borders, partial)
    summed = ranks.results(results_and_collectives, score_shard, given, borders, {})

    for (_, mine), (_, usual) in zip(ours, summed, strict=True):
        assert mine == usual - 1
    parts = [part for part, _ in ours]
    d_hidden = sum(part.pop("d_hidden") for part in parts)
    whole = score(given)
    torch.testing.assert_close(d_hidden, whole["d_hidden"], rtol=1e-5, atol=1e-5)
    assert_close(parts, whole, borders)


def gradients_of_the_weight(rank: int, _size: int, given: dict, borders: list[int]) -> dict:
    """Returns the gradient from the backward and that formed in the forward, of a frozen hidden."""
    mine = shard(given, borders, rank)
    group = {"vocab_start": borders[rank], "process_group": dist.group.WORLD}
    weight = mine["weight"].clone().requires_grad_()
    arguments = (mine["hidden"], weight, given["target"])
    logprob = linear_logprob(*arguments, **group).logprob
    loss = linear_logprob_loss(*arguments, logprob_coef=given["upstream"][0], **group).loss
    return {
        "backward": torch.autograd.grad(logprob, weight, given["upstream"][0])[0],
        "forward": torch.autograd.grad(loss, weight)[0],
    }


@pytest.mark.parametrize("given", [head(), head_without_ignored_rows()], ids=["some", "all"])
def test_the_weight_has_a_gradient_if_hidden_needs_none(ranks, given) -> None:
    """Regression: the ranks summed a gradient of hidden that did not exist."""
    borders = UNEVEN["within tiles"]

    parts = ranks.results(gradients_of_the_weight, given, borders)

    weight = given["weight"].clone().requires_grad_()
    logprob = linear_logprob(given["hidden"], weight, given["target"]).logprob
    [whole] = torch.autograd.grad(logprob, weight, given["upstream"][0])
    for name in ("backward", "forward"):
        d_weight = torch.cat([part[name] for part in parts])
        torch.testing.assert_close(d_weight, whole, rtol=1e-5, atol=1e-5)


def partial_loss_of_shard(rank: int, _size: int, given: dict, borders: list[int]) -> dict:
    return loss_of(
        shard(given, borders, rank),
        vocab_start=borders[rank],
        process_group=dist.group.WORLD,
        hidden_gradient="partial",
    )


@pytest.mark.parametrize("given", [head(), head_without_ignored_rows()], ids=["some", "all"])
def test_partial_gradients_of_a_loss_add_up_to_the_gradient(ranks, given) -> None:
    parts = ranks.results(partial_loss_of_shard, given, UNEVEN["within tiles"])

    d_hidden = sum(part["d_hidden"] for part in parts)
    torch.testing.assert_close(d_hidden, loss_of(given)["d_hidden"], rtol=1e-5, atol=1e-5)


def test_the_partial_gradient_of_split_rows_is_refused(ranks) -> None:
    options = {"hidden_gradient": "partial", "sequence_parallel": True}

    outcomes = ranks.outcomes(score_shard, head(), UNEVEN["aligned"], options)

    for _, error in outcomes:
        assert error.startswith("ValueError: ")


def score_in_a_group_of_one(
    rank: int, size: int, given: dict, compute: Callable, options: dict
) -> dict:
    """Compares `compute` in a group of this rank alone with `compute` without a group."""
    groups = [dist.new_group([other]) for other in range(size)]
    mine = groups[rank]
    before = mine._get_sequence_number_for_group()
    ours = compute(given, process_group=mine, **options)
    num_collectives = mine._get_sequence_number_for_group() - before
    alone = compute(given)
    for group in groups:
        dist.destroy_process_group(group)
    return {
        "collectives": num_collectives,
        "is_equal": all(torch.equal(ours[name], alone[name]) for name in alone),
    }


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=["plain", "split rows"])
@pytest.mark.parametrize("compute", [score, loss_of], ids=["scores", "loss"])
def test_a_group_of_one_rank_is_like_no_group(ranks, compute, options) -> None:
    results = ranks.results(score_in_a_group_of_one, head(), compute, options)

    for ours in results:
        assert ours["collectives"] == 0
        assert ours["is_equal"]


# If ranks did not share errors, one failing rank would leave the others in a collective forever (as in AReaL's
# fallback).
def test_the_failure_of_one_rank_raises_on_every_rank(ranks) -> None:
    outcomes = ranks.outcomes(score_with_a_bad_rank, head(), UNEVEN["aligned"])

    errors = [error.splitlines()[0] for _, error in outcomes]
    assert "hidden has the shape" in errors[1]
    for rank in (0, 2):
        assert "failed on another rank" in errors[rank]


def score_another_target(rank: int, _size: int, given: dict, borders: list[int]) -> dict:
    mine = shard(given, borders, rank)
    mine["target"] = mine["target"].clone()  # The ranks share the memory of what they receive.
    mine["target"][0] = rank
    return score(mine, vocab_start=borders[rank], process_group=dist.group.WORLD)


# Regression: ranks with different rows entered collectives of different sizes, which aborted the process.
def test_different_targets_raise_on_every_rank(ranks) -> None:
    outcomes = ranks.outcomes(score_another_target, head(), UNEVEN["aligned"])

    for _, error in outcomes:
        assert error.startswith("ValueError: the ranks of the group were called with different")


def score_at_another_temperature(rank: int, _size: int, given: dict, borders: list[int]) -> dict:
    return score_shard(rank, _size, given, borders, {"temperature": 0.7 + 0.1 * rank})


# Regression: the scores of ranks with different temperatures were combined into meaningless ones.
def test_different_temperatures_raise_on_every_rank(ranks) -> None:
    outcomes = ranks.outcomes(score_at_another_temperature, head(), UNEVEN["aligned"])

    for _, error in outcomes:
        assert error.startswith("ValueError: the ranks of the group were called with different")


def score_without_a_gradient(rank: int, _size: int, given: dict, borders: list[int]) -> None:
    mine = shard(given, borders, rank)
    logprob, *_ = linear_logprob(
        mine["hidden"].requires_grad_(rank != 1),
        mine["weight"].requires_grad_(),
        mine["target"],
        vocab_start=borders[rank],
        process_group=dist.group.WORLD,
    )
    logprob.sum().backward()


def test_different_needs_of_a_gradient_of_hidden_raise_on_every_rank(ranks) -> None:
    outcomes = ranks.outcomes(score_without_a_gradient, head(), UNEVEN["aligned"])

    for _, error in outcomes:
        assert error.startswith("ValueError: the ranks of the group were called with different")


def score_with_a_bad_weight_grad(rank: int, _size: int, given: dict, borders: list[int]) -> None:
    mine = shard(given, borders, rank)
    linear_logprob(
        mine["hidden"],
        mine["weight"],
        mine["target"],
        vocab_start=borders[rank],
        process_group=dist.group.WORLD,
        weight_grad=torch.zeros(1, 1) if rank == 2 else None,
    )


def test_a_wrong_weight_grad_of_one_rank_raises_in_the_forward_of_every_rank(ranks) -> None:
    outcomes = ranks.outcomes(score_with_a_bad_weight_grad, head(), UNEVEN["aligned"])

    assert "weight_grad has the shape" in outcomes[2][1]
    for rank in (0, 1):
        assert "failed on another rank" in outcomes[rank][1]


def differentiate_with_a_bad_rank(
    rank: int, _size: int, given: dict, borders: list[int], vocab_valid: int | None
) -> None:
    mine = shard(given, borders, rank)
    weight_grad = torch.zeros_like(mine["weight"])
    logprob, *_ = linear_logprob(
        mine["hidden"],
        mine["weight"].requires_grad_(),
        mine["target"],
        vocab_start=borders[rank],
        vocab_valid=vocab_valid,
        process_group=dist.group.WORLD,
        weight_grad=weight_grad,
    )
    if rank == 2:
        weight_grad.resize_(1, 1)
    logprob.sum().backward()


# Regression: with vocab_valid the rank continued and reported that vocab_valid did not fit.
@pytest.mark.parametrize("vocab_valid", (None, UNEVEN["aligned"][-1]))
def test_the_failure_of_one_rank_in_the_backward_raises_on_every_rank(ranks, vocab_valid) -> None:
    outcomes = ranks.outcomes(differentiate_with_a_bad_rank, head(), UNEVEN["aligned"], vocab_valid)

    assert "weight_grad has the shape" in outcomes[2][1]
    for rank in (0, 1):
        assert "failed on another rank" in outcomes[rank][1]


def differentiate_another_cache(rank: int, _size: int, given: dict, borders: list[int]) -> None:
    mine = shard(given, borders, rank)
    inputs = [mine[name] for name in ("hidden", "weight", "target")]
    options = {
        "vocab_start": borders[rank],
        "process_group": dist.group.WORLD,
        "keep_logits": 1,
    }
    saved = raw_scores(*inputs, **options)
    if rank == 1:
        saved["cache"] = saved["cache"][:, 1:]
    torch.ops.logprobd.linear_logprob_backward(
        **backward_arguments({"logprob": torch.ones(ROWS)}, saved, *inputs, **options)
    )


# The rank fails after the agreement, when the others are about to start the sum of hidden's gradient or have
# started it.
@pytest.mark.parametrize("given", [head(), head_without_ignored_rows()], ids=["some", "all"])
def test_a_failure_while_gradients_are_formed_raises_on_every_rank(ranks, given) -> None:
    outcomes = ranks.outcomes(differentiate_another_cache, given, UNEVEN["aligned"])

    assert "cache is" in outcomes[1][1]
    for rank in (0, 2):
        assert "failed on another rank" in outcomes[rank][1]


@pytest.mark.parametrize("overlapping_id", [2 * TILE, 0], ids=["a target", "no target"])
def test_overlapping_shards_raise(ranks, overlapping_id) -> None:
    given = head()
    given["target"].fill_(overlapping_id)  # The last two shards both have 2 * TILE.

    outcomes = ranks.outcomes(score_overlapping, given)

    for _, error in outcomes:
        assert error.startswith("ValueError: vocab_start: several ranks have id ")


def score_overlapping(rank: int, _size: int, given: dict) -> dict:
    begin = [0, TILE, 3 * TILE][rank]
    part = slice(begin, begin + 2 * TILE)
    mine = given | {"weight": given["weight"][part], "bias": given["bias"][part]}
    return score(mine, vocab_start=begin, process_group=dist.group.WORLD)


@pytest.mark.parametrize("target", [VOCAB, -1, 2**31, 2**63 - 1, -(2**63)])
def test_an_out_of_vocab_target_raises_on_every_rank(ranks, target) -> None:
    given = head()
    given["target"][3] = target

    outcomes = ranks.outcomes(score_shard, given, UNEVEN["aligned"], {})

    for _, error in outcomes:
        assert error.startswith(f"IndexError: target {target} of row 3")


def test_an_out_of_vocab_target_may_have_only_the_gradient_of_the_softmax(ranks) -> None:
    given = head()
    given["target"][3] = VOCAB

    parts = ranks.results(score_shard, given, UNEVEN["aligned"], {"out_of_vocab": "zero"})

    whole = score(given, out_of_vocab="zero")
    assert whole["logprob"][3] == 0
    assert whole["d_hidden"][3].any()
    assert_close(parts, whole, UNEVEN["aligned"])


def test_the_ranks_continue_to_work_after_an_error(ranks) -> None:
    ranks.outcomes(score_with_a_bad_rank, head(), UNEVEN["aligned"])

    parts = ranks.results(score_shard, head(), UNEVEN["aligned"], {})

    assert_close(parts, score(head()), UNEVEN["aligned"])


def test_an_unknown_group_raises() -> None:
    given = head()
    inputs = [given[name] for name in ("hidden", "weight", "target")]
    group = SimpleNamespace(group_name="nobody")

    with pytest.raises(ValueError, match="process_group: this process has no group named"):
        raw_scores(*inputs, process_group=group)
