"""Defines linear_logprob, the operator's Python function."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from logprobd_ops._memory import EXPONENTIALS, LogitCache, Memory, logit_cache
from logprobd_ops._operator import (
    HiddenGradient,
    OutOfVocab,
    VocabularyParallel,
    linear_logprob_arguments,
    load_library,
    result_type,
)
from logprobd_ops._tensor_kinds import check_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

load_library()
_Results = result_type("linear_logprob")


class LinearLogprobOutput(NamedTuple):
    """Scores of each row, shaped like target, fp32 (fp64 if hidden or weight is fp64). They are zero for
    ignored rows. logprob, entropy, lse, mean_logit, top_k_logprobs and candidate_logprobs are differentiable
    with respect to hidden, weight and bias. Later versions may append fields: read fields by name, or unpack as
    `logprob, entropy, lse, *_`."""

    logprob: Tensor
    """Log-probability of the target, in nats."""
    entropy: Tensor
    """Entropy of the distribution, in nats. It has no elements if need_entropy is False."""
    lse: Tensor
    """ln of the sum of exp(x) over the vocabulary."""
    argmax: Tensor | None = None
    """int64: id of the largest logit, the lowest id in case of ties; -1 if a logit is not finite.
    None unless return_argmax is set."""
    mean_logit: Tensor | None = None
    """Sum of mean_logit_weights * x over the vocabulary. None unless return_mean_logit is set."""
    max_logit: Tensor | None = None
    """Largest logit z, before the division by the temperature. None unless return_max_logit is set."""
    min_logit: Tensor | None = None
    """Smallest logit z, before the division by the temperature. None unless return_min_logit is set."""
    sum_p_squared: Tensor | None = None
    """Sum of the squared probabilities, in (0, 1]. None unless return_sum_p_squared is set."""
    target_rank: Tensor | None = None
    """int64: number of ids whose logit is larger than the target's, or equal with a lower id; 0 if the target is
    the argmax. -1 if a logit is not finite or the target is outside the vocabulary. An ignored row has 0 as well, so
    a count of rows with rank 0 must exclude ignored rows. None unless return_target_rank is set."""
    top_k_ids: Tensor | None = None
    """[..., top_k] int64: ids of the largest logits, best first, the lowest id first in case of ties. -1 behind
    the last id of a smaller vocabulary, and if a logit is not finite. None unless top_k is above 0."""
    top_k_logprobs: Tensor | None = None
    """[..., top_k]: log-probabilities of top_k_ids, in nats; NaN where the id is -1, without a gradient."""
    candidate_logprobs: Tensor | None = None
    """Log-probabilities of candidate_ids, in nats, with the shape of candidate_ids ([N] for a list of tensors).
    None unless candidate_ids are given."""


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
    hidden_gradient: HiddenGradient = "sum",
    need_entropy: bool = True,
    mean_logit_weights: Tensor | None = None,
    out_of_vocab: OutOfVocab = "error",
    weight_grad: Tensor | None = None,
    return_argmax: bool = False,
    return_mean_logit: bool = False,
    return_max_logit: bool = False,
    return_min_logit: bool = False,
    return_sum_p_squared: bool = False,
    return_target_rank: bool = False,
    top_k: int = 0,
    candidate_ids: "Tensor | Sequence[Tensor] | None" = None,
    candidate_offsets: Tensor | None = None,
    memory: Memory = "auto",
    memory_budget: float | None = None,
    hidden_splits: int = 2,
    autocast: bool = True,
) -> LinearLogprobOutput:
    """Computes log-probability, entropy and lse of each row without a [rows, V] tensor of logits.

    The logits are z = cap(scale * (hidden . weight) + bias) with cap(x) = softcap * tanh(x / softcap). The
    scores are those of x = z / temperature: logprob = x[target] - lse(x), and the entropy of softmax(x).

    Args:
        hidden: [..., H], fp32, bf16, fp16 or fp64, with any strides. It is never rounded to fewer than 16 bits
            (see hidden_splits).
        weight: [V, H], one of these dtypes, not necessarily that of hidden. Under tensor
            parallelism, it has this rank's rows.
        target: [...], integers: ids in the whole vocabulary. Rows with `ignore_index` have scores and
            gradients of exactly zero and cost nothing.
        bias: [V].
        temperature: above 0; one number, or a tensor shaped like target. It has no gradient. The temperature of
            an ignored row may be anything. On a GPU, where a check would wait for the device, another row whose
            temperature is not above 0 and finite gets results and gradients that mean nothing.
        scale: factor of the dot products.
        softcap: above 0; None: no cap.
        ignore_index: the target of rows to be ignored.
        vocab_start: the id of the weight's first row, under tensor parallelism.
        vocab_valid: ids from this one on are padding and are ignored. Default: the whole vocabulary.
        process_group: the ranks that hold the other rows of the weight. All ranks call with the same target
            and get the same scores. The gradient of hidden is summed over the group. A group of one
            rank is like None. A CUDA graph can contain calls with a group over NCCL if the same calls have run
            outside of it before; the ranks do not compare their arguments in a graph.
        sequence_parallel: hidden holds this rank's equal part of the rows, in the order of ranks. Its
            gradient is this rank's part of the sum.
        hidden_gradient: "sum": the operator sums the gradient of hidden over process_group.
            "partial": each rank gets the gradient of its own rows of the weight, for a caller that
            sums it over the ranks; hidden must not be split (sequence_parallel).
        need_entropy: if False, entropy is not computed and has no elements.
        mean_logit_weights: [V], the weights of return_mean_logit. Default: 1 / vocabulary.
        out_of_vocab: for a target outside the vocabulary, "error" raises IndexError, and "zero" gives
            logprob 0 with the gradient of -lse.
        weight_grad: fp32 [V, H], such as main_grad, with any strides but not expanded. The weight's gradient is added to it on the
            stream of the forward, so a reader on another stream must wait for that stream. The
            weight itself gets no gradient. A backward that fails may have added a part of the
            gradient.
        return_argmax, return_mean_logit, return_max_logit, return_min_logit: also compute this score.
        return_sum_p_squared: also compute sum_p_squared. The fused kernels cache no logits then, whatever
            `memory` says, because they cannot do both at once.
        return_target_rank: also compute target_rank. The fused kernels cache no logits then, and on GPUs a
            group of several ranks takes the slower path of tensor operations.
        top_k: number of largest logits to list for each row, at most 128.
        candidate_ids: integers, additional ids whose log-probabilities are computed: [..., K], K for each row;
            or [N] with candidate_offsets; or a list with one tensor per row, in which empty tensors may have any
            dtype. An id may occur several times. Ignored rows may have candidates too: their log-probabilities
            are 0, without a gradient, but their ids must be in the vocabulary. All ranks pass the same ids.
            Reading them waits for the GPU.
        candidate_offsets: [rows + 1] integers. The candidates of row r are
            candidate_ids[candidate_offsets[r] : candidate_offsets[r + 1]]; the first offset is 0 and the
            last is N.
        memory: of how many rows the forward caches the logits for the backward, which computes those
            of the other rows again: one matrix product more than the three that are needed. "auto": as
            many as fit in memory_budget, the first rows that are not ignored. "cached": all rows.
            "recompute": none. The cache takes [rows, V] in fp32 (fp64 if hidden or weight is fp64), or
            about 2 bytes per logit with the fused kernels, which do not use it if the mean logit has a
            gradient. It has room for ignored rows as well. Nothing is cached if no backward can follow
            or the GPU's memory is short and, with "auto", while hooks take the tensors that autograd
            saves, as in torch.utils.checkpoint without reentrance. If memory is short for a cache of all
            rows in a compiled function, or with "cached" under such hooks, torch.OutOfMemoryError is
            raised instead, because the saved tensors must have known shapes. A backward outside of the
            CUDA graph that contains its forward does not use the cache.
        memory_budget: a whole number of bytes, for "auto": the cache and, with the fused kernels and rows that are not
            cached, the block of gradients that the backward computes at a time. Default: an eighth of
            the GPU's free memory, from 1 to 4 GiB; 4 GiB on a CPU; 1 GiB in a function that
            torch.compile traces. On a GPU it is reduced to what is free besides the gradients.
        hidden_splits: 2 or 3, the number of bf16 values that represent an fp32 value of hidden, on
            GPUs with a bf16 weight. Two keep 16 bits of it, three keep all 24 and take half
            as long again. It has no effect on other dtypes (two splits represent fp16 exactly) or
            devices.
        autocast: under torch.autocast, cast hidden, weight and bias as torch.nn.functional.linear does; if
            False, keep them. Gradients have the dtypes of the tensors that were passed.

    The results may be changed in place, which changes no gradient but those of the caller's own operations.

    Raises:
        ValueError: shapes, dtypes, devices or options are invalid or do not match, or a tensor is nested, sparse,
            quantized, a DTensor or of another subclass that computes in its own way; the message
            names the argument. It is raised on every rank if the ranks' targets, candidates, sizes or
            options differ, if only some ranks record gradients, or if their shards overlap.
        IndexError: a target or a candidate is outside the vocabulary; the message names the row or the id.
        RuntimeError: another rank of the group failed. If it failed in a backward or a loss after the ranks had
            compared their arguments, ranks on GPUs, which do not wait there, raise this error in their next call: the
            gradients that they already have are wrong. Trainers that go on after an error must ask all ranks for
            errors before they use the gradients of a step.
    """
    check_tensors(weight_grad=weight_grad)
    parallel = VocabularyParallel(
        vocab_start=vocab_start,
        vocab_valid=vocab_valid,
        process_group=process_group,
        sequence_parallel=sequence_parallel,
        hidden_gradient=hidden_gradient,
    )
    arguments = linear_logprob_arguments(
        hidden,
        weight,
        target,
        bias,
        parallel=parallel,
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        ignore_index=ignore_index,
        need_entropy=need_entropy,
        mean_logit_weights=mean_logit_weights,
        out_of_vocab=out_of_vocab,
        return_argmax=return_argmax,
        return_mean_logit=return_mean_logit,
        return_max_logit=return_max_logit,
        return_min_logit=return_min_logit,
        return_sum_p_squared=return_sum_p_squared,
        return_target_rank=return_target_rank,
        top_k=top_k,
        candidate_ids=candidate_ids,
        candidate_offsets=candidate_offsets,
        hidden_splits=hidden_splits,
        autocast=autocast,
    )
    cache = logit_cache(memory, memory_budget, hidden, weight, target, bias, autocast=autocast)
    if (return_sum_p_squared or return_target_rank) and cache.kind == EXPONENTIALS:
        cache = LogitCache()
    results = _Results(
        *torch.ops.logprobd.linear_logprob(
            **arguments, **cache.arguments(), weight_grad=weight_grad
        )
    )
    return LinearLogprobOutput(
        logprob=results.logprob,
        entropy=results.entropy,
        lse=results.lse,
        argmax=results.argmax if return_argmax else None,
        mean_logit=results.mean_logit if return_mean_logit else None,
        max_logit=results.max_logit if return_max_logit else None,
        min_logit=results.min_logit if return_min_logit else None,
        sum_p_squared=results.sum_p_squared if return_sum_p_squared else None,
        target_rank=results.target_rank if return_target_rank else None,
        top_k_ids=results.top_k_ids if top_k > 0 else None,
        top_k_logprobs=results.top_k_logprobs if top_k > 0 else None,
        candidate_logprobs=None if candidate_ids is None else results.candidate_logprobs,
    )
