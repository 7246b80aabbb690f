"""The recipes for FSDP2, over the two ranks of a gloo group, compared with the whole model."""

import pathlib

import pytest
import torch
from logprobd_adapters import LocalScorer
from sharded_model import (
    RANKS,
    Batch,
    Results,
    assert_close,
    assert_gradients,
    assert_results,
    assert_served_reference,
    joined,
    load,
    loss_of,
    recipe,
    results_of_the_whole,
    served_logprobs,
    write_model,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial


def whole_gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.full_tensor() for name, each in module.named_parameters()}


# The functions below run on each rank.


def reference_logprobs(rank: int, _: int, folder: pathlib.Path, address: str) -> torch.Tensor:
    model = load(folder)
    body = recipe("A sharded reference")["shard_body"](model)
    del model.lm_head
    return served_logprobs(rank, body, address)


def sharded_policy(folder: pathlib.Path, has_own_group: bool = False) -> torch.nn.Module:
    model = load(folder)
    policy = recipe("A sharded policy")["Policy"](model)
    for layer in model.base_model.layers:
        fully_shard(layer)
    if has_own_group:
        fully_shard(model.lm_head)
    return fully_shard(policy)


def policy_results(rank: int, _: int, folder: pathlib.Path, has_own_group: bool) -> Results:
    policy = sharded_policy(folder, has_own_group)
    logprob, entropy = policy(*Batch.make().of_rank(rank))
    loss_of(logprob, entropy).backward()
    return Results(logprob.detach(), entropy.detach(), whole_gradients(policy.model))


def call_outside_of_the_root(rank: int, _: int, folder: pathlib.Path) -> None:
    sharded_policy(folder).model.base_model(*Batch.make().of_rank(rank))


def scores_of_the_full_tensor(rank: int, _: int, folder: pathlib.Path) -> torch.Tensor:
    batch = Batch.make().of_rank(rank)
    weight = sharded_policy(folder).model.lm_head.weight
    hidden = load(folder).base_model(*batch).last_hidden_state
    return LocalScorer(weight.full_tensor()).score(hidden[:, :-1], batch.targets).logprob


def gradient_through_the_full_tensor(
    rank: int, _: int, folder: pathlib.Path, is_averaged: bool
) -> torch.Tensor:
    from logprobd_ops import linear_logprob  # noqa: PLC0415  (loads the library)

    batch = Batch.make().of_rank(rank)
    weight = sharded_policy(folder).model.lm_head.weight
    hidden = load(folder).base_model(*batch).last_hidden_state.detach()
    options = {"grad_placements": [Partial("avg")]} if is_averaged else {}
    scores = linear_logprob(hidden[:, :-1], weight.full_tensor(**options), batch.targets)
    loss_of(scores.logprob, scores.entropy).backward()
    return weight.grad.full_tensor()


def results_without_a_gather(rank: int, _: int, folder: pathlib.Path) -> Results:
    ungathered = recipe("A head that is never gathered")
    model, batch = load(folder), Batch.make().of_rank(rank)
    body = recipe("A sharded reference")["shard_body"](model)
    head = ungathered["shard_head"](model.lm_head.weight, init_device_mesh("cpu", (RANKS,)))
    hidden = body(*batch).last_hidden_state[:, :-1]
    logprob, entropy = ungathered["scores_of_all_ranks"](hidden, head, batch.targets)
    (loss_of(logprob, entropy) / RANKS).backward()
    gradients = {f"model.{name}": gradient for name, gradient in whole_gradients(body).items()}
    gradients["lm_head.weight"] = head.grad.full_tensor()
    return Results(logprob.detach(), entropy.detach(), gradients)


def test_a_served_reference_has_the_logprobs_of_the_whole_model(
    ranks, sharded_folder, binaries
) -> None:
    assert_served_reference(ranks, reference_logprobs, sharded_folder, binaries)


@pytest.mark.usefixtures("built_operator")
@pytest.mark.parametrize("has_own_group", [False, True])
def test_a_policy_has_the_results_of_the_whole_model(ranks, sharded_folder, has_own_group) -> None:
    parts = ranks.results(policy_results, sharded_folder, has_own_group)

    assert_results(joined(parts), results_of_the_whole(sharded_folder))


@pytest.mark.usefixtures("built_operator")
def test_a_policy_may_have_tied_embeddings(ranks, tmp_path) -> None:
    folder = write_model(tmp_path, is_tied=True)

    parts = ranks.results(policy_results, folder, False)

    assert_results(joined(parts), results_of_the_whole(folder))


@pytest.mark.usefixtures("built_operator")
def test_the_body_of_a_policy_cannot_be_called_outside_of_its_root(ranks, sharded_folder) -> None:
    for _, error in ranks.outcomes(call_outside_of_the_root, sharded_folder):
        assert "mixed torch.Tensor and DTensor" in error


@pytest.mark.usefixtures("built_operator")
def test_a_scorer_takes_the_full_tensor_of_a_head(ranks, sharded_folder) -> None:
    parts = ranks.results(scores_of_the_full_tensor, sharded_folder)

    assert_close(torch.cat(parts), results_of_the_whole(sharded_folder).logprob)


@pytest.mark.usefixtures("built_operator")
def test_a_gradient_through_the_full_tensor_must_be_averaged(ranks, sharded_folder) -> None:
    whole = results_of_the_whole(sharded_folder).gradients["lm_head.weight"]

    averaged = ranks.results(gradient_through_the_full_tensor, sharded_folder, True)
    default = ranks.results(gradient_through_the_full_tensor, sharded_folder, False)

    for gradient in averaged:
        assert_gradients({"head": gradient}, {"head": whole})
    assert (default[0] - whole).abs().max() > 0.1 * whole.abs().max()


@pytest.mark.usefixtures("built_operator")
def test_a_head_that_is_never_gathered_has_the_results_of_a_whole_one(
    ranks, sharded_folder
) -> None:
    for part in ranks.results(results_without_a_gather, sharded_folder):
        assert_results(part, results_of_the_whole(sharded_folder))
