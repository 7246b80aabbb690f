"""The operator as Python calls it."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logprobd_ops import _library
from logprobd_ops._arguments import OutOfVocab, flattened
from logprobd_ops._memory import Memory, logits_to_keep

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_library.load()


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
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
    weight_grad: Tensor | None = None,
    return_argmax: bool = False,
    return_mean_logit: bool = False,
    memory: Memory = "recompute",
    memory_budget: int | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability of each target, entropy and lse of each row, without [rows, V] logits.

    With z = cap(scale * (hidden . weight) + bias), cap(x) = softcap * tanh(x / softcap), and
    x = z / temperature: logprob = x[target] - lse(x), the entropy is that of softmax(x); in nats.

    Args:
        hidden: [..., H], fp32, bf16, fp16 or fp64, of any strides; never rounded to fewer bits.
        weight: [V, H], of the same dtypes, not necessarily the same one. Under tensor parallelism
            this rank's rows.
        target: [...], integers: ids in the whole vocabulary. Rows with `ignore_index` give and get
            exact zeros and cost nothing.
        bias: [V].
        temperature: above 0; one number, or a tensor like target, one a row; it gets no gradient.
        vocab_start: the id of the weight's first row, under tensor parallelism.
        vocab_valid: ids from here on are padding and take no part. Default: all that ranks have.
        process_group: of the ranks that hold the other rows of the weight. All call with the same
            target; results are the same on each. The gradient of hidden is summed over the group.
        sequence_parallel: hidden holds this rank's equal part of the rows (in the order of ranks);
            its gradient is this rank's part of the sum.
        need_entropy: without, entropy has no elements.
        mean_logit_weights: [V], what return_mean_logit weighs logits by. Default: 1 / vocabulary.
        out_of_vocab: what a target outside the vocabulary is: an "error" (IndexError), or "zero":
            logprob 0, with the gradient of -lse.
        weight_grad: fp32 [V, H], to which the weight's gradient is added (main_grad); the weight
            itself then gets none. A backward that fails may have added a part. It is added on the
            stream of the forward, for which a reader on another must wait.
        return_argmax: also the id of the largest logit, int64, the lowest among equals; -1 where a
            logit is not finite.
        return_mean_logit: also the sum of mean_logit_weights * x.
        memory: what the backward has of the logits. "recompute": nothing, they are computed again.
            "cached": all, [rows, V] in fp32 (fp64 where hidden or weight are; some 2 bytes each where
            the fused kernels compute), ignored rows too, from the forward to the end of the
            backward: one product less of three, but on fused kernels not where the mean logit has a
            gradient. "auto": cached where that fits memory_budget. Never kept where no backward can
            follow. A CUDA graph must hold both forward and backward then, or neither.
        memory_budget: bytes, for "auto". Default: an eighth of the GPU's free memory, from 1 to 4 GiB;
            4 GiB on a CPU; 1 GiB in a function that torch.compile traces.

    Returns:
        (logprob, entropy, lse[, argmax][, mean_logit]), each like target, fp32 (fp64 where hidden or
        weight are). All but argmax are differentiable with respect to hidden, weight and bias.

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit; the message names the argument.
            On every rank where ranks differ in targets, sizes or options, or their parts overlap.
        IndexError: a target that no rank has; the message names the row.
        RuntimeError: another rank of the group failed.
    """
    logprob, entropy, lse, argmax, mean_logit, *_ = torch.ops.logprobd.linear_logprob(
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
            keep_logits=logits_to_keep(memory, memory_budget, hidden, weight, target, bias),
        ),
        weight_grad,
    )
    extras = [argmax] * return_argmax + [mean_logit] * return_mean_logit
    return (logprob, entropy, lse, *extras)
