"""Helpers of the drop-in modules: equal shards of the vocabulary, partial gradients and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shard_start(weight: Tensor, group: ProcessGroup | None) -> int:
    """Returns the id of the shard's first row, or 0 without a group. All ranks of `group` must have
    the same number of rows."""
    return 0 if group is None else dist.get_rank(group) * weight.shape[0]


def with_partial_gradient(hidden: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns `hidden` for a caller that sums the gradients of the ranks of `group` itself.

    linear_logprob gives every rank the sum of the gradients. Each rank passes an equal share of the
    sum to the caller, so that the caller's sum is correct.
    """
    if group is None or dist.get_world_size(group) == 1:
        return hidden
    shared: Tensor = _GradientShare.apply(hidden, dist.get_world_size(group))
    return shared


class _GradientShare(torch.autograd.Function):
    """The identity function with a gradient that is divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.num_ranks, None


def reduced(logprob: Tensor, reduction: str) -> Tensor:
    """Reduces `logprob` [T] over all rows. `reduction` is "none", "sum" or "mean", in upper or
    lower case."""
    match reduction.lower():
        case "none":
            return logprob
        case "sum":
            return logprob.sum()
        case "mean":
            return logprob.mean()
    raise ValueError(f'reduction must be "none", "sum" or "mean", got {reduction!r}')
