"""Errors of one rank reach every rank of a gloo group, and name the argument that differs."""

import resource
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from logprobd_ops import linear_logprob, linear_logprob_loss
from rank_pool import RankPool
from torch import Tensor

pytestmark = pytest.mark.skipif(
    torch.get_default_device().type != "cpu", reason="test_gpu_ranks.py tests ranks on GPUs"
)

SIZE = 2
ROWS, HIDDEN, SHARD = 6, 16, 192
MIB = 1 << 20


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with RankPool(SIZE, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


def call(rank: int, function: Callable = linear_logprob, **changes):
    """Calls the function with the head of both ranks, of which each has a shard."""
    random = torch.Generator().manual_seed(5)
    weight = torch.randn(SIZE * SHARD, HIDDEN, generator=random)
    arguments = {
        "hidden": torch.randn(ROWS, HIDDEN, generator=random),
        "weight": weight[rank * SHARD :][:SHARD].clone().requires_grad_(),
        "target": torch.arange(ROWS) * 60,
        "vocab_start": rank * SHARD,
        "process_group": dist.group.WORLD,
    }
    return function(**arguments | changes)


def loss(**arguments):
    return linear_logprob_loss(**{"logprob_coef": -1.0} | arguments)


# Arguments that differ.

IDS = torch.arange(8)
DIFFERENT = {
    "values of candidate_offsets": [
        {"candidate_ids": IDS, "candidate_offsets": torch.tensor(offsets)}
        for offsets in ([0, 1, 2, 3, 4, 5, 8], [0, 3, 4, 5, 6, 7, 8])
    ],
    "values of candidate_ids": [{"candidate_ids": (IDS[:ROWS] + i).view(ROWS, 1)} for i in (0, 1)],
    "number of candidate_ids": [{"candidate_ids": IDS[: ROWS * i].view(ROWS, i)} for i in (0, 1)],
    "values of target": [{"target": torch.full((ROWS,), i)} for i in (0, 1)],
    "number of targets": [
        {"hidden": torch.ones(rows, HIDDEN), "target": torch.zeros(rows, dtype=torch.int64)}
        for rows in (5, 6)
    ],
    "dtype of hidden": [{"hidden": torch.ones(ROWS, HIDDEN, dtype=d)} for d in (None, torch.half)],
    "temperature": [{"temperature": 0.7 + 0.1 * i} for i in (0, 1)],
    "temperature per row or not": [{"temperature": torch.ones(ROWS)}, {}],
    "need_argmax": [{"return_argmax": True}, {}],
    "need_gradients": [{"weight": torch.ones(SHARD, HIDDEN)}, {}],
    "top_k": [{"top_k": i} for i in (2, 3)],
}


def call_with_own_arguments(rank: int, _size: int, function: Callable, changes: list[dict]) -> None:
    call(rank, function, **changes[rank])


# Regression: the offsets were not compared, so ranks read the candidates of other rows or aborted.
@pytest.mark.parametrize("name", DIFFERENT)
def test_every_rank_names_the_argument_that_differs(ranks, name):
    outcomes = ranks.outcomes(call_with_own_arguments, linear_logprob, DIFFERENT[name])

    for _, error in outcomes:
        message, named = error.splitlines()[0].rsplit(": ", 1)
        assert message.startswith("ValueError: the ranks of the group were called with different")
        assert name in named.split(", ")


def test_every_rank_names_the_coefficient_that_differs(ranks):
    changes = [{"entropy_coef": 0.1}, {"entropy_coef": 0.2}]

    outcomes = ranks.outcomes(call_with_own_arguments, loss, changes)

    for _, error in outcomes:
        assert error.splitlines()[0].endswith("different arguments: coefficient of a score")


def call_different_operators(rank: int, _size: int) -> None:
    call(rank, loss if rank else linear_logprob)


def test_ranks_that_call_different_operators_raise(ranks):
    outcomes = ranks.outcomes(call_different_operators)

    for _, error in outcomes:
        assert error.startswith("ValueError: the ranks of the group were called with different")


# Constants that need a gradient.

CONSTANTS = {
    "temperature": linear_logprob,
    "mean_logit_weights": linear_logprob,
    "logprob_coef": loss,
    "entropy_coef": loss,
}


def constant_of(name: str) -> Tensor:
    return torch.ones(SHARD if name == "mean_logit_weights" else ROWS, requires_grad=True)


def call_with_a_constant(rank: int, _size: int, name: str, is_recorded: bool) -> Tensor:
    mine = constant_of(name)
    if rank == 0 and is_recorded:
        mine = mine.detach()
    with torch.set_grad_enabled(is_recorded):
        return call(rank, CONSTANTS[name], **{name: mine})[0].detach()


# Regression: the rank raised before the first exchange, in which the others waited until they timed out.
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_of_one_rank_that_needs_a_gradient_raises_on_every_rank(ranks, name):
    outcomes = ranks.outcomes(call_with_a_constant, name, True)

    assert "failed on another rank" in outcomes[0][1]
    assert outcomes[1][1].startswith(f"ValueError: {name} requires a gradient")


# Regression: the constants raised although no gradient was recorded.
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_may_require_a_gradient_while_none_is_recorded(ranks, name):
    first, second = ranks.results(call_with_a_constant, name, False)

    assert torch.equal(first, second)


# Memory.

LIST_ROWS, LIST_SIZE = 4096, 128
ROOM_STEP, ROOM_MAX = 4 * MIB, 400 * MIB


def call_with_lists(rank: int) -> None:
    call(
        rank,
        hidden=torch.ones(LIST_ROWS, HIDDEN),
        target=torch.zeros(LIST_ROWS, dtype=torch.int64),
        top_k=LIST_SIZE,
        candidate_ids=torch.zeros(LIST_ROWS, LIST_SIZE, dtype=torch.int64),
    )


def size_of_the_process() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def call_short_of_memory(rank: int, _size: int) -> list[str]:
    """Returns the errors of calls in which rank 1 may take more and more memory, until one has none."""
    call_with_lists(rank)  # starts all threads
    no_limit = resource.getrlimit(resource.RLIMIT_AS)
    errors = []
    for room in range(ROOM_STEP, ROOM_MAX, ROOM_STEP):
        if rank == 1:
            limit = size_of_the_process() + room
            resource.setrlimit(resource.RLIMIT_AS, (limit, no_limit[1]))
        try:
            call_with_lists(rank)
            return errors
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])
        finally:
            resource.setrlimit(resource.RLIMIT_AS, no_limit)
    return errors


# Regression: a rank without memory for the lists of all ranks failed alone, and the others waited.
def test_every_rank_learns_that_one_has_no_memory_for_its_lists(ranks):
    healthy, short = ranks.results(call_short_of_memory)

    assert len(short) >= 5
    assert all("allocate" in error for error in short)
    assert ["failed on another rank" in error for error in healthy] == [True] * len(short)
