"""The recipes for DeepSpeed ZeRO-3, over the two ranks of a gloo group, compared with the whole model."""

import os
import pathlib

import pytest
import torch
from logprobd_adapters import LocalScorer
from sharded_model import (
    RANKS,
    Batch,
    Results,
    assert_close,
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

# The first call imports DeepSpeed, which takes most of a minute on a busy machine.
ANSWERS_WITHIN_S = 150

# The functions below run on each rank.


def engine_of(module: torch.nn.Module, is_trained: bool):
    """Returns the ZeRO-3 engine of a module, in which no parameter is so small that each rank keeps it."""
    import deepspeed  # noqa: PLC0415  (changes Torch, so only on the ranks)

    # DeepSpeed would compile collectives through shared memory, for half a minute; gloo has the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())  # which a launcher would set
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0) if is_trained else None
    return deepspeed.initialize(model=module, config=config, optimizer=optimizer)[0]


def policy_of(folder: pathlib.Path):
    return engine_of(recipe("A sharded policy")["Policy"](load(folder)), is_trained=True)


def reference_logprobs(rank: int, _: int, folder: pathlib.Path, address: str) -> torch.Tensor:
    body = engine_of(load(folder).base_model, is_trained=False)
    return served_logprobs(rank, body, address)


def policy_results(rank: int, _: int, folder: pathlib.Path) -> Results:
    from deepspeed.utils import safe_get_full_grad  # noqa: PLC0415

    engine = policy_of(folder)
    logprob, entropy = engine(*Batch.make().of_rank(rank))
    engine.backward(loss_of(logprob, entropy))
    model = engine.module.model
    gradients = {name: safe_get_full_grad(each) for name, each in model.named_parameters()}
    return Results(logprob.detach(), entropy.detach(), gradients)


def sizes_of_the_head(_: int, __: int, folder: pathlib.Path) -> tuple[int, int]:
    """Returns how many numbers of the head a rank has, and their number in a row."""
    weight = policy_of(folder).module.model.lm_head.weight
    return weight.ds_tensor.numel(), weight.ds_shape[1]


def scores_of_the_gathered_head(rank: int, _: int, folder: pathlib.Path) -> torch.Tensor:
    import deepspeed  # noqa: PLC0415

    batch, model = Batch.make().of_rank(rank), policy_of(folder).module.model
    with torch.no_grad():
        hidden = model.base_model(*batch).last_hidden_state
    with deepspeed.zero.GatheredParameters([model.lm_head.weight]):
        scorer = LocalScorer(model.lm_head.weight)
        return scorer.score(hidden[:, :-1], batch.targets).logprob


def backward_through_the_gathered_head(rank: int, _: int, folder: pathlib.Path) -> None:
    import deepspeed  # noqa: PLC0415
    from logprobd_ops import linear_logprob  # noqa: PLC0415  (loads the library)

    batch, engine = Batch.make().of_rank(rank), policy_of(folder)
    hidden = load(folder).base_model(*batch).last_hidden_state
    weight = engine.module.model.lm_head.weight
    with deepspeed.zero.GatheredParameters([weight]):
        logprob = linear_logprob(hidden[:, :-1], weight, batch.targets).logprob
    engine.backward(-logprob.sum())


def test_a_served_reference_has_the_logprobs_of_the_whole_model(
    ranks, sharded_folder, binaries
) -> None:
    assert_served_reference(ranks, reference_logprobs, sharded_folder, binaries)


@pytest.mark.usefixtures("built_operator")
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_policy_has_the_results_of_the_whole_model(ranks, tmp_path, is_tied) -> None:
    folder = write_model(tmp_path, is_tied)

    parts = ranks.results(policy_results, folder)

    assert_results(joined(parts), results_of_the_whole(folder))


@pytest.mark.usefixtures("built_operator")
def test_a_part_of_the_head_may_begin_within_a_row(ranks, sharded_folder) -> None:
    for part_size, row_size in ranks.results(sizes_of_the_head, sharded_folder):
        assert part_size % row_size == row_size // RANKS


@pytest.mark.usefixtures("built_operator")
def test_a_scorer_takes_the_gathered_head(ranks, sharded_folder) -> None:
    parts = ranks.results(scores_of_the_gathered_head, sharded_folder)

    assert_close(torch.cat(parts), results_of_the_whole(sharded_folder).logprob)


@pytest.mark.usefixtures("built_operator")
def test_a_backward_through_a_gathered_head_is_an_error(ranks, sharded_folder) -> None:
    for _, error in ranks.outcomes(backward_through_the_gathered_head, sharded_folder):
        assert error is not None
        assert "Dimension out of range" in error
