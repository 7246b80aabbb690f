"""Replaces the package areal/models/kernel of AReaL's pull request 1322. No release has it (1.0.4 is the latest
that was checked)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from logprobd_ops._tensor_kinds import check_tensors
from logprobd_ops.compat._shared import flat_temperature, reduced, shard_start
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
    return_max_logits: bool = False,
) -> tuple[Tensor, ...]:
    """Returns (logprobs, entropy[, max_logits]), fp32, [T] each, of `hidden` [..., H] flattened to
    T rows.

    AReaL documents only reduction "none"; "sum" and "mean" reduce logprobs over all rows. max_logits is the
    largest logit of each row before temperature, over the whole vocabulary, without a gradient. With a group,
    `weight` is the rank's shard, shards have equal sizes, and every rank gets the gradient of `hidden` summed
    over the ranks.

    As in AReaL, a row with a NaN has the largest logit NaN. hidden is first cast to the weight's dtype, also under autocast. Unlike
    AReaL's function, this one returns zeros for labels of -100, and raises an error for other labels outside the
    vocabulary.
    """
    check_tensors(hidden=hidden, weight=weight, labels=labels, temperature=temperature)
    scores = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype),
        weight,
        labels.reshape(-1),
        temperature=flat_temperature(temperature, labels),
        vocab_start=shard_start(weight, dist_process_group),
        process_group=dist_process_group,
        return_max_logit=return_max_logits,
        autocast=False,
    )
    logprobs = reduced(scores.logprob, reduction)
    if scores.max_logit is None:
        return logprobs, scores.entropy
    return logprobs, scores.entropy, scores.max_logit


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
    check_tensors(hidden=hidden, weight=weight, labels=labels, temperature=temperature)
    scores = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype),
        weight,
        labels.reshape(-1),
        temperature=flat_temperature(temperature, labels),
        vocab_start=shard_start(weight, tp_group),
        process_group=tp_group,
        need_entropy=False,
        autocast=False,
    )
    return scores.logprob.reshape(labels.shape)
