"""Moves the head of a model in training to a logprobd server, without a gather and without a disk.

Each rank sends the rows that it holds, and one of them makes the new version live:

    def move_head(client: logprobd.WeightsClient, weight: torch.Tensor) -> None:
        is_first = torch.distributed.get_rank() == 0
        version = [begin_version(client) if is_first else 0]
        torch.distributed.broadcast_object_list(version, src=0)
        push_head(client, weight, version=version[0], dtype="bf16")
        torch.distributed.barrier()
        if is_first:
            client.commit(version=version[0])

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
    move_head(logprobd.WeightsClient(), teacher.lm_head.weight)

The body of the teacher runs in the trainer or elsewhere; only the head moves to the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from logprobd import WeightsClient, WeightsVersion
from logprobd.errors import InvalidArgument
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


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
            sends all of it.
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
    what a step that failed before its commit has left.

    One rank calls it and tells the others the number before any of them pushes. Rows of the failed
    step would refuse those of the next one, which differ, and a staged version would refuse every
    push.
    """
    states = client.list(head)
    if len(states) != 1:
        raise InvalidArgument(f"the server holds {len(states)} heads: pass head=", field="head")
    (state,) = states
    if state.staged is not None or state.pushed is not None:
        client.discard(head, staged=True)
    return state.highest_version + 1


@contextmanager
def collected(errors: list[Exception]) -> Iterator[None]:
    """Appends an error of the block to `errors` instead of raising it, so that a failed push does
    not stop a transfer in which other ranks take part."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def check_staged(is_staged: bool, tensor: str, bias: str) -> None:
    """Raises InvalidArgument if the pushed tensors of a model did not complete a version."""
    if not is_staged:
        raise InvalidArgument(
            f'the tensors "{tensor}" and "{bias}" of the model are not a whole head: set tensor to '
            "the name of the head's weight, and bias to that of its bias if it has one"
        )


def range_of_shard(rows: int, shards: list[tuple[int, int]]) -> tuple[int, int]:
    """Returns the rows [begin, end) of one rank.

    `shards` has the coordinate and the size of each mesh dimension that splits the rows, outermost
    first. Rows are split as by torch.chunk: each rank has the same number, and the last ones have
    fewer or none.
    """
    begin, end = 0, rows
    for coordinate, size in shards:
        step = -(-(end - begin) // size)
        begin, end = min(begin + coordinate * step, end), min(begin + (coordinate + 1) * step, end)
    return begin, end


def _local_rows(tensor: Tensor) -> tuple[Tensor | None, int]:
    """Returns the rows that this rank sends, or None, and the first one's position."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None, 0
    shards = []
    is_first_replica = True
    for position, size, placement in zip(coordinate, mesh.shape, tensor.placements, strict=True):
        if type(placement) is Replicate:
            is_first_replica &= position == 0
        elif type(placement) is Shard and placement.dim == 0:
            shards.append((position, size))
        else:
            raise InvalidArgument(
                f"the weight has placements {tensor.placements}: pass a DTensor that is sharded on "
                "dimension 0, or its local rows and row_begin"
            )
    local = tensor.to_local().detach()
    begin, end = range_of_shard(tensor.shape[0], shards)
    if end - begin != local.shape[0]:
        raise InvalidArgument(
            f"this rank has {local.shape[0]} rows, but {end - begin} of an even split: pass its "
            "local rows and row_begin"
        )
    return (local if is_first_replica else None), begin
