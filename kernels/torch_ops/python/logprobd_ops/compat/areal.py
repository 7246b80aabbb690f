"""Replaces the package areal/models/kernel of AReaL's pull request 1322. No release has it (1.0.4 is the latest
that was checked)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from logprobd_ops.compat._shared import flat_temperature, reduced, shard_start
from logprobd_ops.linear_logprob import linear_logprob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Number of the weight's rows that are gathered at a time for the largest logits.
_ROWS_AT_A_TIME = 1024


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
    return_max_logits: bool = False,
) -> tuple[Tensor, ...]:
    """Returns (logprobs, entropy[, max_logits]), fp32, [T] each, of `hidden` [..., H] flattened to
    T rows.

    AReaL documents only reduction "none"; "sum" and "mean" reduce logprobs over all rows. max_logits is the
    largest logit of each row before temperature, over the whole vocabulary, without a gradient. With a group,
    `weight` is the rank's shard, shards have equal sizes, and every rank gets the gradient of `hidden` summed
    over the ranks.

    As in AReaL, a row with a NaN has the largest logit NaN. hidden is first cast to the weight's dtype. Unlike
    AReaL's function, this one returns zeros for labels of -100, and raises an error for other labels outside the
    vocabulary.
    """
    flat = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)
    vocab_start = shard_start(weight, dist_process_group)
    scores = linear_logprob(
        flat,
        weight,
        labels.reshape(-1),
        temperature=flat_temperature(temperature, labels),
        vocab_start=vocab_start,
        process_group=dist_process_group,
        return_argmax=return_max_logits,
    )
    logprobs = reduced(scores.logprob, reduction)
    if scores.argmax is None:
        return logprobs, scores.entropy
    max_logits = _logits_at(flat, weight, scores.argmax, vocab_start, dist_process_group)
    return logprobs, scores.entropy, max_logits


class LinearCrossEntropy:
    """Replaces the autograd function of this name. Only `apply` is provided."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float | Tensor = 1.0,
        reduction: str = "none",
        dist_process_group: ProcessGroup | None = None,
        return_max_logits: bool = False,
    ) -> tuple[Tensor, ...]:
        """See linear_cross_entropy."""
        return linear_cross_entropy(
            hidden, weight, labels, temperature, reduction, dist_process_group, return_max_logits
        )


def linear_cross_entropy_logprobs_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    tp_group: ProcessGroup | None = None,
    return_max_logits: bool = False,
) -> tuple[Tensor, ...]:
    """Returns the results of linear_cross_entropy without a reduction, shaped like `labels`."""
    scores = linear_cross_entropy(
        hidden, weight, labels, temperature, "none", tp_group, return_max_logits
    )
    return tuple(score.reshape(labels.shape) for score in scores)


def linear_cross_entropy_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Returns only the logprobs of linear_cross_entropy_logprobs_entropy. The entropy is not
    computed."""
    scores = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype),
        weight,
        labels.reshape(-1),
        temperature=flat_temperature(temperature, labels),
        vocab_start=shard_start(weight, tp_group),
        process_group=tp_group,
        need_entropy=False,
    )
    return scores.logprob.reshape(labels.shape)


@torch.no_grad()
def _logits_at(
    hidden: Tensor, weight: Tensor, ids: Tensor, vocab_start: int, group: ProcessGroup | None
) -> Tensor:
    """Returns the logit of one id per row, [T] fp32 (fp64 for fp64 inputs), from the rank that has
    the id. It is NaN for the id -1, which rows with a logit that is not finite have."""
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    rows = ids - vocab_start
    is_mine = (rows >= 0) & (rows < weight.shape[0])
    rows = rows.clamp(0, weight.shape[0] - 1)
    logits = torch.empty(rows.shape, dtype=wide, device=hidden.device)
    for begin in range(0, rows.numel(), _ROWS_AT_A_TIME):
        part = slice(begin, begin + _ROWS_AT_A_TIME)
        logits[part] = (hidden[part].to(wide) * weight[rows[part]].to(wide)).sum(-1)
    logits.masked_fill_(~is_mine, 0.0)
    if group is not None:
        dist.all_reduce(logits, group=group)
    return logits.masked_fill_(ids < 0, torch.nan)
