"""A loss over all rows whose gradients are computed in the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from logprobd_ops._memory import LOSS_BUDGET_MIN, LogitCache, budget_bytes, cache_kind
from logprobd_ops._operator import (
    OutOfVocab,
    Reduction,
    check_head_options,
    check_reduction,
    linear_logprob_arguments,
    load_library,
    needed_gradients,
    result_type,
    split_parallel,
)
from logprobd_ops._tensor_kinds import check_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from logprobd_ops._operator import HeadOptions

load_library()
_Results = result_type("linear_logprob_loss")


class LinearLogprobLossOutput(NamedTuple):
    """The loss and the scores it is made of. Later versions may append fields: read fields by name."""

    loss: Tensor
    """[], fp32 (fp64 if hidden or weight is fp64). Differentiable with respect to hidden, weight and bias."""
    logprob: Tensor
    """This and the following fields are those of LinearLogprobOutput, but they have no gradients."""
    entropy: Tensor
    lse: Tensor
    argmax: Tensor | None = None
    mean_logit: Tensor | None = None
    max_logit: Tensor | None = None
    min_logit: Tensor | None = None


def linear_logprob_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    logprob_coef: Tensor | float | None = None,
    entropy_coef: Tensor | float | None = None,
    lse_coef: Tensor | float | None = None,
    mean_logit_coef: Tensor | float | None = None,
    reduction: Reduction = "sum",
    need_entropy: bool = True,
    mean_logit_weights: Tensor | None = None,
    out_of_vocab: OutOfVocab = "error",
    return_argmax: bool = False,
    return_mean_logit: bool = False,
    return_max_logit: bool = False,
    return_min_logit: bool = False,
    memory_budget: float | None = None,
    **head_options: Unpack[HeadOptions],
) -> LinearLogprobLossOutput:
    """Computes one loss: the sum over rows of logprob, entropy, lse and mean logit, each times its coefficient.

    Use it for losses whose coefficients are known before the scores, such as a cross-entropy, or a policy
    gradient with given advantages. If a backward pass may follow, this call also computes the gradients, for
    as many rows at a time as have logits that fit in memory_budget. The backward pass only multiplies them by
    the upstream gradient of the loss, and does not touch them if that gradient is 1. Between the forward and
    the backward pass, memory holds the gradients of hidden and weight instead of logits.

    Only one backward pass can follow each call. Gradients are rounded to the inputs' dtypes before they are
    multiplied by the upstream gradient, so with fp16 multiply the coefficients by the loss scale.

    Args:
        logprob_coef, entropy_coef, lse_coef, mean_logit_coef: the coefficient of each score: a floating-point
            tensor shaped like target, one number for every row, or None for 0. At least one must be given.
            They have no gradient. Elements of ignored rows are not used; a coefficient of 0 takes the score
            out of the loss, even if the score is NaN.
        reduction: "sum", or "mean", which divides the sum by the number of rows that are not ignored (0 if
            there are none).
        need_entropy: return the entropy; it is computed in any case if it has a coefficient.
        memory_budget: bytes for the cached logits. It limits how many rows are processed at a time; this is
            at least one row. Default: as in linear_logprob.

    The other arguments are those of linear_logprob. Raises the exceptions of linear_logprob; ValueError also if a
    coefficient is not finite, has a wrong shape, dtype or device, or requires a gradient; RuntimeError in a second
    backward pass.
    """
    check_head_options("linear_logprob_loss", head_options)
    coefficients = {
        "logprob": logprob_coef,
        "entropy": entropy_coef,
        "lse": lse_coef,
        "mean_logit": mean_logit_coef,
    }
    check_tensors(**{f"{score}_coef": each for score, each in coefficients.items()})
    check_reduction(reduction)
    parallel, others = split_parallel({**head_options})
    arguments = linear_logprob_arguments(
        hidden,
        weight,
        target,
        bias,
        parallel=parallel,
        need_entropy=need_entropy,
        mean_logit_weights=mean_logit_weights,
        out_of_vocab=out_of_vocab,
        return_argmax=return_argmax,
        return_mean_logit=return_mean_logit,
        return_max_logit=return_max_logit,
        return_min_logit=return_min_logit,
        **others,
    )
    needs = needed_gradients(hidden, weight, bias)
    cache = LogitCache()
    if any(needs.values()):
        cache = LogitCache(cache_kind(hidden, weight, autocast=head_options.get("autocast", True)))
    for score, coefficient in coefficients.items():
        arguments[f"{score}_coef"] = coefficient if isinstance(coefficient, Tensor) else None
        arguments[f"{score}_factor"] = _factor(coefficient)
    results = _Results(
        *torch.ops.logprobd.linear_logprob_loss(
            **arguments,
            **cache.arguments(),
            **needs,
            is_mean=reduction == "mean",
            cache_bytes=budget_bytes(memory_budget, hidden, weight, LOSS_BUDGET_MIN),
        )
    )
    return LinearLogprobLossOutput(
        loss=results.loss,
        logprob=results.logprob,
        entropy=results.entropy,
        lse=results.lse,
        argmax=results.argmax if return_argmax else None,
        mean_logit=results.mean_logit if return_mean_logit else None,
        max_logit=results.max_logit if return_max_logit else None,
        min_logit=results.min_logit if return_min_logit else None,
    )


def _factor(coefficient: Tensor | float | None) -> float:
    """Returns the number by which the operator multiplies a score, in addition to the tensor if one is given."""
    if coefficient is None:
        return 0.0
    return 1.0 if isinstance(coefficient, Tensor) else float(coefficient)
