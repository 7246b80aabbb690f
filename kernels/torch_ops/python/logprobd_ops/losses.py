"""Cross-entropy of a language model's head from hidden states, composed of linear_logprob.

With x the logits of a row (after scale, bias, cap and temperature), y its target, V the number of valid
classes, w their weights (1 when none are given) and e = label_smoothing, a row's loss is

    nll    = -w[y] * logprob(y)
    smooth = e / V * sum_j w[j] * (lse(x) - x[j])  =  e / V * (sum(w) * lse(x) - w . x)
    z      = z_loss * lse(x)^2
    loss   = (1 - e) * nll + smooth + z,

times the predicted probability of y, as a constant, when token_scaling is set. Only w . x is more than a
log-probability needs; linear_logprob returns it as the mean logit. No [rows, V] tensor exists, but for what the
memory modes keep.

Source: the label smoothing is that of torch.nn.functional.cross_entropy; z loss and token scaling are those
of Liger's fused linear cross-entropy (lse_square_scale, use_token_scaling).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from logprobd_ops._cross_entropy import Classes, RowWeights, row_weights, uniform_weights
from logprobd_ops._memory import Memory
from logprobd_ops.linear_logprob import linear_logprob
from logprobd_ops.linear_logprob_loss import linear_logprob_loss

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
    memory: Memory = "recompute",
    memory_budget: int | None = None,
    weight_grad: Tensor | None = None,
    gradients_in_forward: bool = False,
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
    softcap, scale, temperature, vocab_*, process_group, sequence_parallel, memory, memory_budget, weight_grad: as
      in linear_logprob.
    gradients_in_forward: form them in this call and let the backward, of which there can be one, multiply them by
      the loss's upstream gradient (linear_logprob_loss). For reduction "mean" and "sum" without z_loss and
      token_scaling, whose weights are not known before the scores; without weight_grad, to which a forward would
      add; memory is not asked then, memory_budget bounds the logits that are kept at a time.

    Waits for the device no more than linear_logprob does. ValueError names an option out of range, or one that
    gradients_in_forward does not serve.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction must be "none", "sum" or "mean", got {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if gradients_in_forward:
        _check_weights_are_known(reduction, z_loss, token_scaling, weight_grad)
    is_smoothed = label_smoothing > 0.0
    needs_argmax = return_token_accuracy or return_predicted_tokens
    classes = None
    if class_weights is not None:
        shard = range(vocab_start, vocab_start + weight.shape[0])
        classes = Classes(class_weights, shard, vocab_valid, is_whole=process_group is None)

    is_double = torch.float64 in (hidden.dtype, weight.dtype)
    # Weights of the rows alike are better known to the operator than to a dozen kernels before it.
    is_uniform = gradients_in_forward and classes is None
    weights = (
        uniform_weights(label_smoothing)
        if is_uniform
        else row_weights(
            target,
            _is_valid(target, ignore_index),
            classes,
            label_smoothing,
            is_mean=reduction == "mean",
            dtype=torch.float64 if is_double else torch.float32,
        )
    )
    options: dict[str, Any] = {
        "temperature": temperature,
        "scale": scale,
        "softcap": softcap,
        "ignore_index": ignore_index,
        "vocab_start": vocab_start,
        "vocab_valid": vocab_valid,
        "process_group": process_group,
        "sequence_parallel": sequence_parallel,
        "need_entropy": False,
        "mean_logit_weights": classes.of_shard() if classes is not None and is_smoothed else None,
        "return_argmax": needs_argmax,
        "memory_budget": memory_budget,
    }
    if gradients_in_forward:
        loss, logprob, _, lse, *more = linear_logprob_loss(
            hidden,
            weight,
            target,
            bias,
            logprob_weights=weights.logprob,
            lse_weights=weights.lse,
            mean_logit_weights=weights.mean_logit,
            reduction="mean" if is_uniform and reduction == "mean" else "sum",
            **options,
        )
    else:
        options.update(memory=memory, weight_grad=weight_grad, return_mean_logit=is_smoothed)
        logprob, _, lse, *more = linear_logprob(hidden, weight, target, bias, **options)
        loss = _weighted(weights, logprob, lse, more)
    # Ignored rows have zeros for all scores, and so for all that follows.
    z = None
    if z_loss != 0.0 or return_z_loss:
        z = z_loss * lse.square()
        if reduction == "mean":
            z = z / _is_valid(target, ignore_index).sum().clamp(min=1)
        if z_loss != 0.0:
            loss = loss + z
    if token_scaling:
        probability = logprob.detach().exp()
        loss, z = loss * probability, None if z is None else z * probability
    if reduction != "none":
        loss = loss if gradients_in_forward else loss.sum()
        z = None if z is None else z.sum()
    if not (return_z_loss or needs_argmax):
        return loss

    accuracy = predicted = None
    is_valid = _is_valid(target, ignore_index)
    if return_token_accuracy:
        accuracy = (is_valid & (more[0] == target)).to(torch.float32)
        if reduction != "none":
            accuracy = accuracy.sum() / is_valid.sum().clamp(min=1)
    if return_predicted_tokens:
        predicted = more[0].masked_fill(~is_valid, -1)
    return LinearCrossEntropyOutput(
        loss, None if z is None or not return_z_loss else z.detach(), accuracy, predicted
    )


def _is_valid(target: Tensor, ignore_index: int) -> Tensor:
    return target.long() != ignore_index


def _weighted(weights: RowWeights, logprob: Tensor, lse: Tensor, more: list[Tensor]) -> Tensor:
    """The loss of each row; the mean logit, where it is weighted, is the last of `more`."""
    loss: Tensor = weights.logprob * logprob
    if weights.lse is not None and weights.mean_logit is not None:
        loss = loss + (weights.lse * lse + weights.mean_logit * more[-1])
    return loss


def _check_weights_are_known(
    reduction: Reduction, z_loss: float, token_scaling: bool, weight_grad: Tensor | None
) -> None:
    """ValueError unless gradients can be formed in the forward."""
    reasons = {
        'reduction "none" has many losses': reduction == "none",
        "z_loss weighs lse by itself": z_loss != 0.0,
        "token_scaling weighs losses by the probabilities": token_scaling,
        "weight_grad would be added to in the forward": weight_grad is not None,
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise ValueError(f"gradients_in_forward: {reason}: leave one of the two out")
