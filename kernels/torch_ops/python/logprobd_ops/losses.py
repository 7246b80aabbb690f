"""Computes the cross-entropy of a language model's head from hidden states with linear_logprob.

Let x be the logits of a row (after scale, bias, cap and temperature), y its target, V the number of valid
classes, w their weights (1 by default) and e = label_smoothing. The loss of the row is

    nll    = -w[y] * logprob(y)
    smooth = e / V * sum_j w[j] * (lse(x) - x[j])  =  e / V * (sum(w) * lse(x) - w . x)
    z      = z_loss * lse(x)^2
    loss   = (1 - e) * nll + smooth + z,

times the predicted probability of y, as a constant, if token_scaling is set. Of these terms, only
w . x is not a function of logprob and lse; linear_logprob returns it as the mean logit. No
[rows, V] tensor is created, except for the cache of the memory modes.

Source: label smoothing is that of torch.nn.functional.cross_entropy. The z loss and token scaling are those of
Liger's fused linear cross-entropy (lse_square_scale, use_token_scaling).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from logprobd_ops._cross_entropy import (
    Classes,
    RowCoefficients,
    row_coefficients,
    uniform_coefficients,
)
from logprobd_ops._memory import (
    Memory,
    are_saved_tensors_hooked,
    check_memory,
    dtype_after_autocast,
)
from logprobd_ops._operator import check_head_options
from logprobd_ops._tensor_kinds import check_tensors
from logprobd_ops.linear_logprob import LinearLogprobOutput, linear_logprob
from logprobd_ops.linear_logprob_loss import LinearLogprobLossOutput, linear_logprob_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from logprobd_ops._operator import HeadOptions

Reduction = Literal["none", "sum", "mean"]


class LinearCrossEntropyOutput(NamedTuple):
    """The result of linear_cross_entropy if a return_* option is set. Fields that are not requested
    are None."""

    loss: Tensor
    """The reduced loss, including the z loss; [...] for reduction "none"."""
    z_loss: Tensor | None
    """The z loss part of the loss, reduced in the same way. It is meant for logs and has no
    gradient."""
    token_accuracy: Tensor | None
    """1 if the target is the argmax, else 0; 0 for ignored rows. With a reduction, it is the
    fraction of the valid rows."""
    predicted_tokens: Tensor | None
    """[...] int64: the argmax of each row, the lowest id in case of ties; -1 for ignored rows."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,
    token_scaling: bool = False,
    memory: Memory = "auto",
    memory_budget: float | None = None,
    weight_grad: Tensor | None = None,
    gradients_in_forward: bool | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **head_options: Unpack[HeadOptions],
) -> Tensor | LinearCrossEntropyOutput:
    """Computes the cross-entropy of `target` [...] under the head `weight` [V, H] for `hidden`
    [..., H].

    Returns a tensor, fp32 (fp64 for fp64 inputs), or a LinearCrossEntropyOutput if a return_* option is set. The
    loss is differentiable with respect to hidden, weight and bias, for any upstream gradient per row.

    Reduction "mean" divides the cross-entropy by the sum of the valid targets' class weights (their number
    without class weights) and the z loss by their number, before token scaling. Rows whose target
    is `ignore_index` do not count and have zero gradients. If there are no other rows, a reduced
    loss and a reduced accuracy are 0 (cross_entropy gives NaN).

    Args:
        class_weights: the weights of the whole vocabulary, even if `weight` is a shard of it. They
            have no gradient. Entries from `vocab_valid` on are not used and may be missing.
        label_smoothing: in [0, 1]. The smoothed share is spread over the valid vocabulary.
        gradients_in_forward: True: compute the gradients in this call, which is the fastest way. Only
            one backward can follow; it multiplies them by the upstream gradient of the loss (see
            linear_logprob_loss). This requires reduction "mean" or "sum". It excludes z_loss and
            token_scaling, whose coefficients depend on the scores, and weight_grad, to which the
            forward would add. `memory` is not used; memory_budget bounds the logits that are cached at
            a time. False: compute them in the backward, as often as it runs. None: True if it is
            possible, `memory` is "auto", no input is fp16 (a loss scale would come after the rounding
            of the gradients) and no hooks take the tensors that autograd saves (as in
            torch.utils.checkpoint without reentrance); else False.

    linear_logprob describes ignore_index, temperature, scale, softcap, vocab_start, vocab_valid, process_group,
    sequence_parallel, hidden_gradient, hidden_splits, autocast, memory, memory_budget and weight_grad.

    Waits for the device as often as linear_logprob does. Raises ValueError for an option that is out of range or
    that gradients_in_forward does not support.
    """
    check_head_options("linear_cross_entropy", head_options)
    # The operator checks the other tensors.
    check_tensors(hidden=hidden, weight=weight, target=target, class_weights=class_weights)
    check_loss_options(reduction, label_smoothing)
    check_memory(memory)  # Also where it is not used.
    obstacle = _obstacle_to_forward(reduction, z_loss, token_scaling, weight_grad)
    if gradients_in_forward is None:
        is_fp16 = torch.float16 in [
            dtype_after_autocast(each, head_options.get("autocast", True))
            for each in (hidden, weight, bias)
            if each is not None
        ]
        gradients_in_forward = (
            obstacle is None and memory == "auto" and not is_fp16 and not are_saved_tensors_hooked()
        )
    elif gradients_in_forward and obstacle is not None:
        raise ValueError(f"gradients_in_forward: {obstacle}; use only one of the two")
    is_smoothed = label_smoothing > 0.0
    needs_argmax = return_token_accuracy or return_predicted_tokens
    ignore_index = head_options.get("ignore_index", -100)
    classes = None
    if class_weights is not None:
        vocab_start = head_options.get("vocab_start", 0)
        group = head_options.get("process_group")
        classes = Classes(
            class_weights,
            range(vocab_start, vocab_start + weight.shape[0]),
            head_options.get("vocab_valid"),
            is_whole=group is None or group.size() == 1,
        )

    is_double = torch.float64 in (hidden.dtype, weight.dtype)
    # The operator itself applies coefficients that are equal for all rows, which saves a dozen
    # kernels before it.
    is_uniform = gradients_in_forward and classes is None
    coefficients = (
        uniform_coefficients(label_smoothing)
        if is_uniform
        else row_coefficients(
            target,
            _is_valid(target, ignore_index),
            classes,
            label_smoothing,
            is_mean=reduction == "mean",
            dtype=torch.float64 if is_double else torch.float32,
        )
    )
    options: dict[str, Any] = {
        **head_options,
        "need_entropy": False,
        "mean_logit_weights": classes.of_shard() if classes is not None and is_smoothed else None,
        "return_argmax": needs_argmax,
        "memory_budget": memory_budget,
    }
    scores: LinearLogprobOutput | LinearLogprobLossOutput
    if gradients_in_forward:
        scores = linear_logprob_loss(
            hidden,
            weight,
            target,
            bias,
            logprob_coef=coefficients.logprob,
            lse_coef=coefficients.lse,
            mean_logit_coef=coefficients.mean_logit,
            reduction="mean" if is_uniform and reduction == "mean" else "sum",
            **options,
        )
        loss = scores.loss
    else:
        options.update(memory=memory, weight_grad=weight_grad, return_mean_logit=is_smoothed)
        scores = linear_logprob(hidden, weight, target, bias, **options)
        loss = _loss_of_rows(coefficients, scores)
    # Ignored rows have zero scores, so they need no masks below.
    z = None
    if z_loss != 0.0 or return_z_loss:
        z = z_loss * scores.lse.square()
        if reduction == "mean":
            z = z / _is_valid(target, ignore_index).sum().clamp(min=1)
        if z_loss != 0.0:
            loss = loss + z
    if token_scaling:
        probability = scores.logprob.detach().exp()
        loss, z = loss * probability, None if z is None else z * probability
    if reduction != "none":
        loss = loss if gradients_in_forward else loss.sum()
        z = None if z is None else z.sum()
    if not (return_z_loss or needs_argmax):
        return loss

    accuracy = predicted = None
    is_valid = _is_valid(target, ignore_index)
    if return_token_accuracy:
        accuracy = (is_valid & (scores.argmax == target.long())).to(torch.float32)
        if reduction != "none":
            accuracy = accuracy.sum() / is_valid.sum().clamp(min=1)
    if return_predicted_tokens:
        assert scores.argmax is not None
        predicted = scores.argmax.masked_fill(~is_valid, -1)
    return LinearCrossEntropyOutput(
        loss, None if z is None or not return_z_loss else z.detach(), accuracy, predicted
    )


def check_loss_options(reduction: str, label_smoothing: float) -> None:
    """Raises ValueError for values that linear_cross_entropy does not accept."""
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction must be "none", "sum" or "mean", got {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")


def _is_valid(target: Tensor, ignore_index: int) -> Tensor:
    return target.long() != ignore_index


def _loss_of_rows(coefficients: RowCoefficients, scores: LinearLogprobOutput) -> Tensor:
    loss: Tensor = coefficients.logprob * scores.logprob
    if coefficients.lse is not None and coefficients.mean_logit is not None:
        assert scores.mean_logit is not None
        smooth = coefficients.lse * scores.lse + coefficients.mean_logit * scores.mean_logit
        loss = loss + smooth
    return loss


def _obstacle_to_forward(
    reduction: Reduction, z_loss: float, token_scaling: bool, weight_grad: Tensor | None
) -> str | None:
    """Returns why gradients cannot be computed in the forward, or None if they can."""
    obstacles = {
        'reduction "none" has one loss per row': reduction == "none",
        "z_loss has a gradient that depends on lse": z_loss != 0.0,
        "token_scaling depends on the probabilities": token_scaling,
        "weight_grad would change in the forward": weight_grad is not None,
    }
    return next((obstacle for obstacle, is_given in obstacles.items() if is_given), None)
