"""Moves the head of a model in training to a logprobd server, without a gather and without a disk.

Each rank sends the rows that it holds, and one of them makes the new version live. Every rank calls
this after a step:

    move_head(client, model.lm_head.weight, dtype="bf16")

A teacher whose weights are an exponential moving average (EMA) of the model's is a copy that is
sharded like it:

    teacher = copy.deepcopy(model)
    fully_shard(model)
    fully_shard(teacher)

    @torch.no_grad()
    def follow(decay: float) -> None:
        for average, weight in zip(teacher.parameters(), model.parameters()):
            average.lerp_(weight, 1 - decay)

    follow(0.99)
    move_head(client, teacher.lm_head.weight, dtype="bf16")

The body of the teacher runs in the trainer or elsewhere; only the head moves to the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from logprobd import LogprobdError, WeightsClient, WeightsVersion
from logprobd.errors import InvalidArgument
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

_LOG = logging.getLogger("logprobd")
_T = TypeVar("_T")


def move_head(
    client: WeightsClient,
    weight: Tensor,
    *,
    head: str = "",
    row_begin: int = 0,
    vocab_rows: int = 0,
    bias: Tensor | None = None,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
) -> int:
    """Moves a head from all ranks of the default process group to a server, and makes it live.

    Every rank calls it, with its own client. Without a process group this process is the only rank.
    The arguments are those of push_head.

    Returns the version that is live. Raises on all ranks if there was an error on any; see
    move_version. A rank without an error waits for the others as long as the time limit of the
    process group allows.
    """

    def send(version: int, _: list[Exception]) -> bool:
        if version == 0:
            return False
        staged = push_head(
            client,
            weight,
            version=version,
            head=head,
            row_begin=row_begin,
            vocab_rows=vocab_rows,
            bias=bias,
            dtype=dtype,
            allow_nonfinite=allow_nonfinite,
        )
        return staged is not None

    advice = "pass row_begin for the shard of a tensor-parallel rank, and bias if the head has one"
    return move_version(client, send, head=head, advice=advice)


def move_version(
    client: WeightsClient,
    send: Callable[[int, list[Exception]], bool],
    *,
    advice: str,
    head: str = "",
    is_first: bool | None = None,
) -> int:
    """Moves a version of a head in the way that `send` says, and makes it live.

    Every rank of the default process group calls it. All ranks take part in the same exchanges,
    whatever fails on one of them, so that none waits for one that has failed.

    Args:
        send: called on each rank with the number of the version, or 0 if it could not be begun.
            Sends this rank's rows, and returns whether they were the last ones. It appends errors
            after which it goes on to the list.
        advice: what to change if all rows that were sent are not a whole head.
        is_first: whether this rank begins and commits the version. It is true on exactly one rank,
            which may be any of the process group. None: rank 0 does.

    Returns the version. Raises on all ranks if there was an error on any: its own on the rank that
    has one, otherwise a LogprobdError that names the rank. Raises InvalidArgument on all ranks,
    and calls `send` on none, if not exactly one is first. The next call drops what a failed one has
    left on the server.
    """
    if is_first is None:
        is_first = not _has_ranks() or torch.distributed.get_rank() == 0
    errors: list[Exception] = []
    begun: int | None = None
    if is_first:
        begun = 0
        with collect_errors(errors):
            begun = begin_version(client, head)
    versions = {rank: each for rank, each in enumerate(_gathered(begun)) if each is not None}
    if len(versions) != 1:
        raise InvalidArgument(
            f"the ranks that begin the version are {list(versions)}, expected one of the process "
            "group: pass is_first=True on one rank alone, or rank=0 to one engine of vLLM alone"
        )
    (version,) = versions.values()
    is_staged = False
    with collect_errors(errors):
        is_staged = send(version, errors)
    is_staged = _raise_together(errors, is_staged)  # all rows have arrived
    if is_first:
        with collect_errors(errors):
            check_staged(is_staged, advice)
            client.commit(head, version=version)
    _raise_together(errors, is_staged)  # the next version is counted from this one
    return version


def push_head(
    client: WeightsClient,
    weight: Tensor,
    *,
    version: int,
    head: str = "",
    row_begin: int = 0,
    vocab_rows: int = 0,
    bias: Tensor | None = None,
    dtype: str | None = None,
    sha256: str = "",
    allow_nonfinite: bool = False,
) -> WeightsVersion | None:
    """Sends this rank's rows of a head to a server.

    Every rank calls it with its own client. After all have returned (a barrier is the caller's),
    one rank commits the version.

    Args:
        client: a client of the server's admin listener.
        weight: [n, hidden_size], bf16, fp16 or fp32. A DTensor is sharded on dimension 0 (FSDP2),
            also unevenly; of replicas (HSDP) the first sends. Each rank that has a plain tensor
            sends all of it, and the rows of copies must be equal; one without rows sends nothing.
        row_begin: row of the head at which `weight` begins, for the shard of a tensor-parallel
            rank.
        bias: [n], the elements of the same rows: a DTensor, which may be placed in another way than
            `weight`, or a plain tensor, of which each rank sends those of its rows. Needed if the
            head has one.

    The other arguments are those of logprobd.WeightsClient.push; `dtype="bf16"` rounds fp32 weights
    to the type in which the model computes.

    Returns the staged version if these rows were the last ones, otherwise None. Raises
    InvalidArgument for a DTensor with another placement or a bias that does not fit, and the errors
    of WeightsClient.push.
    """
    rows, begin = _local_rows(weight)
    elements, first = None, 0
    if bias is not None:
        if bias.shape != weight.shape[:1] or (dtype is None and bias.dtype != weight.dtype):
            raise InvalidArgument(
                f"bias is {list(bias.shape)} of {bias.dtype}, but the weight has "
                f"{weight.shape[0]} rows of {weight.dtype}: pass one element a row, and dtype if "
                "the types differ",
                field="bias",
            )
        if isinstance(bias, DTensor):
            elements, first = _local_rows(bias)
        elif rows is not None:
            elements, first = bias[begin : begin + len(rows)], begin
    staged = None
    # The bias goes first, so that the version is not staged before a rank's last call.
    for part, is_bias, part_begin in ((elements, True, first), (rows, False, begin)):
        if part is not None:
            staged = client.push(
                None if is_bias else part,
                version=version,
                head=head,
                row_begin=row_begin + part_begin,
                vocab_rows=vocab_rows,
                bias=part if is_bias else None,
                dtype=dtype,
                sha256=sha256,
                allow_nonfinite=allow_nonfinite,
            )
    return staged


def begin_version(client: WeightsClient, head: str = "") -> int:
    """Returns one more than the highest version that a head has ever had on the server, and drops
    the staged version and rows of one that is not staged yet, whoever has sent them.

    One rank calls it and tells the others the number before any of them pushes. A step that failed
    before its commit leaves one or the other. The server would compare the rows of the next step
    with rows that are left, which have the same number, and while a version is staged it refuses
    every other one.
    """
    states = client.list(head)
    if len(states) != 1:
        raise InvalidArgument(f"the server holds {len(states)} heads: pass head=", field="head")
    (state,) = states
    if state.staged is not None or state.pushed is not None:
        client.discard(head, staged=True)
    return state.highest_version + 1


@contextmanager
def collect_errors(errors: list[Exception]) -> Iterator[None]:
    """Appends an error of the block to `errors` instead of raising it, so that a failed push does
    not stop a transfer in which other ranks take part."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def check_staged(is_staged: bool, advice: str) -> None:
    """Raises InvalidArgument, which ends with the advice, if the rows are not a whole version."""
    if not is_staged:
        raise InvalidArgument(f"the rows that were pushed are not a whole head: {advice}")


def advice_on_names(tensor: str, bias: str) -> str:
    """Returns what to change if the tensors of these names are not a whole head."""
    return (
        f'the tensors are "{tensor}" and "{bias}": set tensor to the name of the head\'s weight, '
        "and bias to that of its bias if it has one"
    )


def rows_of_rank(rows: int, axes: Iterable[tuple[int, int, bool]]) -> tuple[int, int, bool]:
    """Returns the rows [begin, end) of one rank, and whether it is the first of its replicas.

    `axes` has the rank's coordinate, the size, and whether it splits the rows, of each mesh
    dimension, outermost first. Rows are split as by torch.chunk: each rank has the same number, and
    the last ones have fewer or none. A dimension that does not split them has replicas.
    """
    begin, end, is_first_replica = 0, rows, True
    for coordinate, size, splits in axes:
        if splits:
            step = -(-(end - begin) // size)
            begin, end = (min(begin + n * step, end) for n in (coordinate, coordinate + 1))
        else:
            is_first_replica &= coordinate == 0
    return begin, end, is_first_replica


def _has_ranks() -> bool:
    """Returns whether the default process group has other ranks."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _gathered(value: _T) -> list[_T]:
    """Waits for all ranks, and returns the value of each."""
    values = [value]
    if _has_ranks():
        values *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(values, value)
    return values


def _raise_together(errors: list[Exception], is_staged: bool) -> bool:
    """Waits for all ranks, and raises on all of them if one has errors. Returns whether `is_staged`
    is true on one of them."""
    ours = (is_staged, [f"{type(error).__name__}: {error}" for error in errors])
    outcomes = _gathered(ours)
    for error in errors[1:]:
        _LOG.error("a transfer of weights failed in another way, too", exc_info=error)
    if errors:
        raise errors[0]
    for rank, (_, texts) in enumerate(outcomes):
        if texts:
            raise LogprobdError(f"rank {rank} failed: {'; '.join(texts)}")
    return any(is_staged for is_staged, _ in outcomes)


def _local_rows(tensor: Tensor) -> tuple[Tensor | None, int]:
    """Returns the rows that this rank sends, or None, and the first one's position."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None, 0
    if not all(
        type(place) is Replicate or (type(place) is Shard and place.dim == 0)
        for place in tensor.placements
    ):
        raise InvalidArgument(
            f"the weight has placements {tensor.placements}: pass a DTensor that is sharded on "
            "dimension 0, or its local rows and row_begin"
        )
    local = tensor.to_local().detach()
    splits = [type(place) is Shard for place in tensor.placements]
    axes = zip(coordinate, mesh.shape, splits, strict=True)
    begin, end, is_first_replica = rows_of_rank(tensor.shape[0], axes)
    if end - begin != local.shape[0]:
        raise InvalidArgument(
            f"this rank has {local.shape[0]} rows, but {end - begin} of an even split: pass its "
            "local rows and row_begin"
        )
    return (local if is_first_replica else None), begin
