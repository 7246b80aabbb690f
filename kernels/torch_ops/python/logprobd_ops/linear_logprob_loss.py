"""A loss of all rows whose gradients are formed together with it."""

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from logprobd_ops import _library
from logprobd_ops._arguments import OutOfVocab, flattened
from logprobd_ops._memory import NOT_KEPT, budget_bytes, gradients_needed, kept_format

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_library.load()

Reduction = Literal["sum", "mean"]


def linear_logprob_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    logprob_weights: Tensor | float | None = None,
    entropy_weights: Tensor | float | None = None,
    lse_weights: Tensor | float | None = None,
    mean_logit_weights: Tensor | float | None = None,
    reduction: Reduction = "sum",
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_start: int = 0,
    vocab_valid: int | None = None,
    process_group: "ProcessGroup | None" = None,
    sequence_parallel: bool = False,
    need_entropy: bool = True,
    mean_logit_weights: Tensor | None = None,
    out_of_vocab: OutOfVocab = "error",
    return_argmax: bool = False,
    return_mean_logit: bool = False,
    memory_budget: int | None = None,
) -> tuple[Tensor, ...]:
    """The sum over rows of logprob, entropy, lse and mean logit, each times its weight, as one loss.

    For weights that are known before the scores, as in a cross-entropy or a policy gradient with given
    advantages. Where a backward may follow, gradients are formed in this call, from the logits of as many
    rows at a time as fit the budget; the backward only multiplies them by the loss's upstream gradient, and
    does not touch them for 1. Between the two, gradients of hidden and weight live instead of logits.

    One backward can follow each call. Gradients are rounded to the inputs' dtypes before they are multiplied:
    for a loss scale in fp16, put it into the weights.

    Args:
        logprob_weights, entropy_weights, lse_weights, mean_logit_weights: like target, real numbers, or one
            number for every row; at least one of them; absent: 0. They get no gradient. What they hold for
            ignored rows is not used; a weight of 0 takes the score out, though it be NaN.
        reduction: "sum", or "mean": the sum over the number of rows that are not ignored (0 of none).
        need_entropy: return it; a weighted one is computed in any case.
        memory_budget: bytes of the logits that are kept at a time, at least one row. Default: as in
            linear_logprob.
        The others are those of linear_logprob.

    Returns:
        (loss, logprob, entropy, lse[, argmax][, mean_logit]); the loss is [], fp32 (fp64 where hidden or weight
        are), and differentiable with respect to hidden, weight and bias; the others are for logs.

    Raises:
        As linear_logprob; ValueError also for weights that do not fit or require a gradient. RuntimeError in a
        second backward.
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f'reduction is {reduction!r}: it must be "sum" or "mean"')
    needs = gradients_needed(hidden, weight, bias)
    weights = (logprob_weights, entropy_weights, lse_weights, mean_logit_weights)
    loss, logprob, entropy, lse, argmax, mean_logit, *_ = torch.ops.logprobd.linear_logprob_loss(
        *flattened(
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
            need_entropy=need_entropy,
            mean_logit_weights=mean_logit_weights,
            out_of_vocab=out_of_vocab,
            return_argmax=return_argmax,
            return_mean_logit=return_mean_logit,
            keep_logits=kept_format(hidden, weight) if any(needs) else NOT_KEPT,
        ),
        *(each if isinstance(each, Tensor) else None for each in weights),
        [_factor(each) for each in weights],
        reduction == "mean",
        needs,
        budget_bytes(memory_budget, hidden.device),
    )
    extras = [argmax] * return_argmax + [mean_logit] * return_mean_logit
    return (loss, logprob, entropy, lse, *extras)


def _factor(weight: Tensor | float | None) -> float:
    """What the weights are a multiple of: a tensor's elements, or 1."""
    if weight is None:
        return 0.0
    return 1.0 if isinstance(weight, Tensor) else float(weight)
