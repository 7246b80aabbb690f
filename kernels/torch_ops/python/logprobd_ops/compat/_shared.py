"""Helpers of the drop-in modules: equal shards of the vocabulary, temperatures, reductions, and the
replacement of functions in loaded packages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The ignored id of packages that ignore none, because their losses mask rows. Labels of fewer than 64 bits cannot
# have this value, and no padding value is as low.
NO_ID = -(2**63)


def shard_start(weight: Tensor, group: ProcessGroup | None) -> int:
    """Returns the id of the shard's first row, or 0 without a group. All ranks of `group` must have
    the same number of rows."""
    return 0 if group is None else dist.get_rank(group) * weight.shape[0]


def flat_temperature(temperature: float | Tensor, labels: Tensor) -> float | Tensor:
    """Returns the number, or the temperature of each of the T flattened labels. A tensor has an element
    for each label, or can be broadcast to their shape."""
    if not isinstance(temperature, Tensor):
        return temperature
    is_per_label = temperature.numel() == labels.numel()
    return (temperature if is_per_label else temperature.expand(labels.shape)).reshape(-1)


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


def replace_in_package(package: str, original: object, replacement: object) -> None:
    """Binds every name of the package's loaded modules that is bound to `original` to `replacement`. Modules
    that are imported later take the name from one of these."""
    for name, module in list(sys.modules.items()):
        if name != package and not name.startswith(f"{package}."):
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, replacement)
