"""Helpers of the drop-in modules: equal shards of the vocabulary and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shard_start(weight: Tensor, group: ProcessGroup | None) -> int:
    """Returns the id of the shard's first row, or 0 without a group. All ranks of `group` must have
    the same number of rows."""
    return 0 if group is None else dist.get_rank(group) * weight.shape[0]


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
