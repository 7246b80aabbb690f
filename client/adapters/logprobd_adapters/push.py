"""Moves the head of a model in training to a logprobd server, without a gather and without a disk.

Each rank sends the rows that it holds, and one of them makes the new version live:

    weights = logprobd.WeightsClient("127.0.0.1:8471")
    push_head(weights, model.lm_head.weight, version=2, dtype="bf16")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        weights.commit(version=2)

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
    push_head(weights, teacher.lm_head.weight, version=next_version(weights), dtype="bf16")

The body of the teacher runs in the trainer or elsewhere; only the head moves to the server.
"""

from __future__ import annotations

from logprobd import HeadWeights, WeightsClient, WeightsVersion
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
        bias: [n], like `weight`. Needed if the head has one.

    The other arguments are those of logprobd.WeightsClient.push; `dtype="bf16"` rounds fp32 weights
    to the type in which the model computes.

    Returns the staged version if these rows were the last ones, otherwise None. Raises
    InvalidArgument for a DTensor with another placement, and the errors of WeightsClient.push.
    """
    rows, begin = _local_rows(weight)
    elements = None if bias is None else _local_rows(bias)[0]
    if rows is None:
        return None
    return client.push(
        rows,
        version=version,
        head=head,
        row_begin=row_begin + begin,
        vocab_rows=vocab_rows,
        bias=elements,
        dtype=dtype,
        sha256=sha256,
        allow_nonfinite=allow_nonfinite,
    )


def next_version(client: WeightsClient, head: str = "") -> int:
    """Returns one more than the highest version that the server holds of a head.

    Ranks that push one version get the same number, as long as all have called this function before
    the last missing row arrives, which stages the version.
    """
    return _next_of(_state(client, head))


def begin_version(client: WeightsClient, head: str = "") -> int:
    """Drops what a step that failed before its commit has left, and returns the next version.

    One rank calls it before any rank pushes. Rows of the failed step would refuse those of the
    next one, which differ, and a staged version would refuse every push.
    """
    state = _state(client, head)
    if state.staged is not None or state.pushed is not None:
        client.discard(head, staged=True)
    return _next_of(state)


def _state(client: WeightsClient, head: str) -> HeadWeights:
    states = client.list(head)
    if len(states) != 1:
        raise InvalidArgument(f"the server holds {len(states)} heads: pass head=", field="head")
    return states[0]


def _next_of(state: HeadWeights) -> int:
    held = (state.live, state.staged, state.previous)
    return 1 + max((each.version for each in held if each is not None), default=0)


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
