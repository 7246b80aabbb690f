"""Computes the coefficients of each row's scores in the cross-entropy of losses.py.

They are known before the scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Classes:
    """The class weights of the whole vocabulary and the values that a loss derives from them."""

    def __init__(
        self, class_weights: Tensor, shard: range, vocab_valid: int | None, *, is_whole: bool
    ) -> None:
        """`shard` has the ids of the weight's rows. `is_whole` is true if no other rank has rows."""
        num_classes = class_weights.numel()
        needed = shard.stop if vocab_valid is None else vocab_valid
        has_surplus = is_whole and num_classes > max(shard.stop, needed)
        if class_weights.dim() != 1 or num_classes < needed or has_surplus:
            raise ValueError(
                f"class_weights must have one entry for each id of the whole vocabulary, {needed}"
                f"{'' if is_whole else ' or more'}, but has the shape {list(class_weights.shape)}"
            )
        self.num_valid = num_classes if vocab_valid is None else vocab_valid
        self._shard = shard
        self._valid = class_weights.detach()[: self.num_valid]

    def of_shard(self) -> Tensor:
        """Returns the weights of the shard's rows, contiguous fp32; 0 behind the valid vocabulary."""
        mine = self._valid[self._shard.start : self._shard.stop].float()
        return torch.nn.functional.pad(mine, (0, len(self._shard) - mine.numel())).contiguous()

    def of_targets(self, target: Tensor, is_valid: Tensor) -> Tensor:
        """Returns the weight of each target, and 0 for ignored rows.

        linear_logprob checks the range of the ids.
        """
        ids = target.long().clamp(0, self.num_valid - 1)
        return self._valid[ids] * is_valid

    def total(self) -> Tensor:
        """Returns the sum of the valid weights, fp64."""
        return self._valid.sum(dtype=torch.float64)


class RowCoefficients(NamedTuple):
    """Coefficients of the scores: tensors shaped like target, or one number for all rows. The loss
    of a row is the sum of its scores times their coefficients."""

    logprob: Tensor | float
    lse: Tensor | float | None
    mean_logit: Tensor | float | None


def uniform_coefficients(label_smoothing: float) -> RowCoefficients:
    """Returns the coefficients of a row's cross-entropy without class weights."""
    if label_smoothing == 0.0:
        return RowCoefficients(-1.0, None, None)
    return RowCoefficients(label_smoothing - 1.0, label_smoothing, -label_smoothing)


def row_coefficients(
    target: Tensor,
    is_valid: Tensor,
    classes: Classes | None,
    label_smoothing: float,
    *,
    is_mean: bool,
    dtype: torch.dtype,
) -> RowCoefficients:
    """Returns the coefficients of the cross-entropy, summed or averaged like in torch, without z
    loss and token scaling. With label smoothing, the mean logit must be weighted by
    classes.of_shard(), or be the plain mean if `classes` is None."""
    nll = is_valid if classes is None else classes.of_targets(target, is_valid).to(dtype)
    if not is_mean:
        share = torch.ones((), dtype=dtype, device=target.device)
    elif classes is None:
        share = 1.0 / is_valid.sum(dtype=dtype).clamp(min=1.0)
    else:
        share = 1.0 / nll.sum().masked_fill(~is_valid.any(), 1.0)
    logprob = nll * ((label_smoothing - 1.0) * share)
    if label_smoothing == 0.0:
        return RowCoefficients(logprob, None, None)
    smooth = is_valid * (label_smoothing * share)
    if classes is None:
        return RowCoefficients(logprob, smooth, -smooth)
    smooth = smooth / classes.num_valid
    return RowCoefficients(logprob, classes.total().to(dtype) * smooth, -smooth)
