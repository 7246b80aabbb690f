"""What the drop-ins share: equal shards of the vocabulary, gradients that stay a rank's part, reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shard_start(weight: Tensor, group: ProcessGroup | None) -> int:
    """The id of the shard's first row where every rank of `group` has as many; None: the head is whole."""
    return 0 if group is None else dist.get_rank(group) * weight.shape[0]


def with_partial_gradient(hidden: Tensor, group: ProcessGroup | None) -> Tensor:
    """`hidden`, for a caller that itself sums the gradients of the ranks of `group`.

    linear_logprob gives every rank the sum; each hands on its share of it, so that the caller's sum is right.
    """
    if group is None or dist.get_world_size(group) == 1:
        return hidden
    shared: Tensor = _GradientShare.apply(hidden, dist.get_world_size(group))
    return shared


class _GradientShare(torch.autograd.Function):
    """The identity; its gradient is divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.num_ranks, None


def reduced(logprob: Tensor, reduction: str) -> Tensor:
    """`logprob` [T] as "none", "sum" or "mean" of all its rows says, in any case of letters."""
    match reduction.lower():
        case "none":
            return logprob
        case "sum":
            return logprob.sum()
        case "mean":
            return logprob.mean()
    raise ValueError(f'reduction must be "none", "sum" or "mean", got {reduction!r}')
