"""Cross-entropy of a language model's head from hidden states, composed of linear_logprob.

With x the logits of a row (after scale, bias, cap and temperature), y its target, V the number of valid
classes, w their weights (1 when none are given) and e = label_smoothing, a row's loss is

    nll    = -w[y] * logprob(y)
    smooth = e / V * sum_j w[j] * (lse(x) - x[j])  =  e / V * (sum(w) * lse(x) - w . x)
    z      = z_loss * lse(x)^2
    loss   = (1 - e) * nll + smooth + z,

times the predicted probability of y, as a constant, when token_scaling is set. Only w . x is more than a
log-probability needs; linear_logprob returns it as the mean logit. No [rows, V] tensor exists.

Source: the label smoothing is that of torch.nn.functional.cross_entropy; z loss and token scaling are those
of Liger's fused linear cross-entropy (lse_square_scale, use_token_scaling).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from logprobd_ops.linear_logprob import linear_logprob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Reduction = Literal["none", "sum", "mean"]


class LinearCrossEntropyOutput(NamedTuple):
    """What linear_cross_entropy returns when more than the loss is asked for; None: not asked for."""

    loss: Tensor
    """Reduced, z loss included; [...] with reduction "none"."""
    z_loss: Tensor | None
    """The part of the loss that the z loss is, reduced alike. For logs: without a gradient."""
    token_accuracy: Tensor | None
    """1 where the target is the argmax, else 0, 0 for ignored rows; reduced: the share of the counted rows."""
    predicted_tokens: Tensor | None
    """[...] int64, the argmax of each row, the lowest id of equals; -1 for ignored rows."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,
    token_scaling: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    vocab_valid: int | None = None,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | LinearCrossEntropyOutput:
    """Cross-entropy of `target` [...] under the head `weight` [V, H] at the states `hidden` [..., H].

    A tensor, fp32 (double for double inputs), or a LinearCrossEntropyOutput when a return_* option is set.
    Differentiable with respect to hidden, weight and bias, also for an upstream gradient of each row.

    reduction "mean" divides the cross-entropy by the sum of the counted targets' class weights (their number
    without class weights) and the z loss by their number, before token scaling. Rows whose target is
    `ignore_index` count nowhere and get zero gradients; with no other rows a reduced loss, and a reduced
    accuracy, is 0 (cross_entropy gives NaN).

    class_weights: of the whole vocabulary, also when `weight` is a shard of it; not differentiable. Entries
      beyond `vocab_valid` are never used and may be left out.
    label_smoothing: in [0, 1]; the smoothed share is spread over the valid vocabulary.
    softcap, scale, temperature, vocab_*, process_group, sequence_parallel: as in linear_logprob.

    Waits for the device no more than linear_logprob does. ValueError names an option out of range.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction must be "none", "sum" or "mean", got {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    is_smoothed = label_smoothing > 0.0
    needs_argmax = return_token_accuracy or return_predicted_tokens
    classes = None
    if class_weights is not None:
        shard = range(vocab_start, vocab_start + weight.shape[0])
        classes = _Classes(class_weights, shard, vocab_valid, is_whole=process_group is None)

    logprob, _, lse, *more = linear_logprob(
        hidden,
        weight,
        target,
        bias,
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        ignore_index=ignore_index,
        vocab_start=vocab_start,
        vocab_valid=vocab_valid,
        process_group=process_group,
        sequence_parallel=sequence_parallel,
        need_entropy=False,
        column_weights=classes.of_shard() if classes is not None and is_smoothed else None,
        return_argmax=needs_argmax,
        return_mean_logit=is_smoothed,
    )

    # Ignored rows have zeros for logprob, lse and mean logit, and so for all that follows.
    is_counted = target.long() != ignore_index
    num_counted = is_counted.sum()
    loss = -logprob
    normalizer = num_counted.to(loss.dtype)
    if classes is not None:
        target_weights = classes.of_targets(target, is_counted).to(loss.dtype)
        loss = loss * target_weights
        normalizer = target_weights.sum()
    if is_smoothed:
        mean_logit = more[-1]
        if classes is None:
            smooth = lse - mean_logit
        else:
            smooth = (classes.total().to(lse.dtype) * lse - mean_logit) / classes.num_valid
        loss = (1.0 - label_smoothing) * loss + label_smoothing * smooth
    z = z_loss * lse.square()

    if reduction == "mean":
        loss = loss / normalizer.masked_fill(num_counted == 0, 1.0)
        z = z / num_counted.clamp(min=1)
    if z_loss != 0.0:
        loss = loss + z
    if token_scaling:
        probability = logprob.detach().exp()
        loss, z = loss * probability, z * probability
    if reduction != "none":
        loss, z = loss.sum(), z.sum()
    if not (return_z_loss or needs_argmax):
        return loss

    accuracy = predicted = None
    if return_token_accuracy:
        accuracy = (is_counted & (more[0] == target)).to(torch.float32)
        if reduction != "none":
            accuracy = accuracy.sum() / num_counted.clamp(min=1)
    if return_predicted_tokens:
        predicted = more[0].masked_fill(~is_counted, -1)
    return LinearCrossEntropyOutput(
        loss, z.detach() if return_z_loss else None, accuracy, predicted
    )


class _Classes:
    """Class weights of the whole vocabulary, and what a loss needs of them."""

    def __init__(
        self, class_weights: Tensor, shard: range, vocab_valid: int | None, *, is_whole: bool
    ) -> None:
        """`shard`: ids of the weight's rows; `is_whole`: no other rank has further ones."""
        num_classes = class_weights.numel()
        needed = shard.stop if vocab_valid is None else vocab_valid
        has_surplus = is_whole and num_classes > max(shard.stop, needed)
        if class_weights.dim() != 1 or num_classes < needed or has_surplus:
            raise ValueError(
                f"class_weights must have one entry for each id of the whole vocabulary, {needed}"
                f"{'' if is_whole else ' or more'}, got the shape {list(class_weights.shape)}"
            )
        self.num_valid = num_classes if vocab_valid is None else vocab_valid
        self._shard = shard
        self._valid = class_weights.detach()[: self.num_valid]

    def of_shard(self) -> Tensor:
        """[shard's rows] fp32, contiguous; 0 for rows beyond the valid vocabulary."""
        mine = self._valid[self._shard.start : self._shard.stop].float()
        return torch.nn.functional.pad(mine, (0, len(self._shard) - mine.numel())).contiguous()

    def of_targets(self, target: Tensor, is_counted: Tensor) -> Tensor:
        """The weight of each target; 0 for ignored rows. The range of ids is linear_logprob's to check."""
        ids = target.long().clamp(0, self.num_valid - 1)
        return self._valid[ids] * is_counted

    def total(self) -> Tensor:
        """Their sum, in double."""
        return self._valid.sum(dtype=torch.float64)
