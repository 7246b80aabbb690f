"""Replaces the function of verl/utils/kernel/linear_cross_entropy.py (verl 0.9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from logprobd_ops.compat._ranks import reduced, shard_start
from logprobd_ops.linear_logprob import linear_logprob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (logprobs, entropy), fp32, of `hidden` [..., H] flattened to T rows.

    `labels` must already be shifted. entropy is [T]. logprobs is [T] for reduction "none", else the
    sum or the mean over all T rows. With a group, `weight` is the rank's shard, shards have equal
    sizes, and the gradient of `hidden` is the rank's part of the sum. As in verl, the caller's
    gather from the sequence-parallel region sums the parts.

    Unlike verl's function, this one returns zeros for labels of -100, and raises an error for other
    labels outside the vocabulary.
    """
    scores = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        temperature=temperature,
        vocab_start=shard_start(weight, dist_process_group),
        process_group=dist_process_group,
        hidden_gradient="partial",
    )
    return reduced(scores.logprob, reduction), scores.entropy
