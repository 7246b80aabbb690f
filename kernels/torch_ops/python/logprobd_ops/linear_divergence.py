"""Divergence between a student's and a teacher's distributions over the vocabulary, for distillation.

Let s and t be the probabilities of a row under the student and the teacher: the softmax of z / temperature, where
z = cap(scale * (hidden . weight) + bias) are the logits of each model. The divergences, in nats, are

    "forward_kl"   KL(t || s) = sum t (ln t - ln s)
    "reverse_kl"   KL(s || t) = sum s (ln s - ln t)
    "jsd"          beta KL(t || m) + (1 - beta) KL(s || m), with m = beta t + (1 - beta) s

Source: "jsd" is the generalized Jensen-Shannon divergence of TRL's distillation (beta 0 and 1 of TRL are the KL
divergences here; the generalized divergence itself is 0 there).
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from logprobd_ops._memory import (
    LOSS_BUDGET_MIN,
    Memory,
    _as_number,
    are_saved_tensors_hooked,
    budget_bytes,
    check_memory,
    dtype_after_autocast,
    gradients_needed,
)
from logprobd_ops._operator import (
    WHOLE_VOCABULARY,
    Reduction,
    check_reduction,
    load_library,
    needed_gradients,
    result_type,
    softcap_argument,
    split_temperature,
)
from logprobd_ops._tensor_kinds import check_tensors

load_library()
_Results = result_type("linear_divergence")
_LossResults = result_type("linear_divergence_loss")
_RowBytes = result_type("divergence_row_bytes")

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]

# GradientCacheKind in kernels/torch_ops/types/divergence.h.
_NOT_CACHED = 0
# Rows whose logits should fit beside a cache: smaller blocks make the products slower.
_BLOCK_ROWS = 1024


class LinearDivergenceOutput(NamedTuple):
    """Results of each row, shaped like student_hidden without its last dimension, fp32 (fp64 if an input is fp64). Both
    are differentiable with respect to student_hidden, student_weight and student_bias. Later versions may append
    fields: read fields by name."""

    divergence: Tensor
    """In nats, at least 0. Masked rows have 0."""
    entropy: Tensor
    """Entropy of the student's distribution, in nats. Masked rows have 0."""


class LinearDivergenceLossOutput(NamedTuple):
    """The loss and the values it is made of. Later versions may append fields: read fields by name."""

    loss: Tensor
    """[], fp32 (fp64 if an input is fp64). Differentiable with respect to the student's tensors."""
    divergence: Tensor
    """This and the following field are those of LinearDivergenceOutput, but they have no gradients."""
    entropy: Tensor


def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: DivergenceKind = "forward_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_scale: float = 1.0,
    teacher_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    vocab_valid: int | None = None,
    mask: Tensor | None = None,
    memory: Memory = "auto",
    memory_budget: float | None = None,
) -> LinearDivergenceOutput:
    """Computes the divergence of each row and the student's entropy without [rows, V] logits of either model.

    The teacher's tensors are constants: they get no gradient, even if they require one. Under torch.autocast, hidden
    states, weights and biases are cast as torch.nn.functional.linear casts its arguments. The weights must be
    complete: heads that are sharded over ranks are not supported. On a GPU, a model whose hidden states and weight do
    not have the same 16-bit dtype is multiplied in fp32, which is many times slower; a warning says so once.

    Args:
        student_hidden: [..., H_s], fp32, bf16, fp16 or fp64, with any strides.
        student_weight: [V, H_s], one of these dtypes.
        teacher_hidden: [..., H_t], with the same leading dimensions; H_t may differ from H_s.
        teacher_weight: [V, H_t].
        kind: "forward_kl" is KL(teacher || student), "reverse_kl" is KL(student || teacher), "jsd" the generalized
            Jensen-Shannon divergence (see the module).
        beta: the teacher's share of the mixture of "jsd", above 0 and below 1.
        temperature: above 0; divides the logits of both models. One number, or a tensor of one element per row. It
            has no gradient, and the divergence is not multiplied by its square. That of a masked row may be
            anything; on a GPU, other values are not checked, as in linear_logprob.
        student_bias, teacher_bias: [V].
        student_scale, teacher_scale: factors of the dot products, not 0. They do not scale the biases. TRL's
            ChunkedDivergenceFunction scales them too: student_bias=scale * bias gives its logits.
        student_softcap, teacher_softcap: above 0; None: no cap.
        vocab_valid: the number of ids that are compared; later rows of the weights are padding. Needed if the
            weights have different numbers of rows. Default: all.
        mask: one element per row. Rows with 0 have results and gradients of exactly zero and cost nothing.
        memory: whether the forward keeps the gradient of each row's divergence for the backward. "recompute": it
            does not, and the backward computes the logits of both models again. "cached": it keeps [rows, V]
            in the dtype of the weight if the products are computed in bf16, else in fp32 (fp64), until the end of
            the backward, which then only multiplies. "auto": "cached" if that fits in memory_budget beside
            the logits of a block of rows, else "recompute"; also "recompute" while hooks take the saved tensors, as
            in torch.utils.checkpoint. Nothing is kept if no backward can follow, if memory is short, or in
            fp16, whose range is too small. A cache does not help a backward through the entropy.
        memory_budget: bytes for the logits and gradients of a block of rows, which is at least one row; with "auto"
            also for what is kept. Default: as in linear_logprob.

    Raises:
        ValueError: shapes, dtypes, devices or options are invalid or do not match; the message names the argument.

    Waits for the device once in the forward if there is a mask, and in the backward to find the rows that have an
    upstream gradient. In a CUDA graph all rows are computed, and the hidden states of masked rows must be finite.
    """
    arguments = _arguments(
        student_hidden=student_hidden,
        student_weight=student_weight,
        student_bias=student_bias,
        student_scale=student_scale,
        student_softcap=student_softcap,
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
        teacher_bias=teacher_bias,
        teacher_scale=teacher_scale,
        teacher_softcap=teacher_softcap,
        kind=kind,
        beta=beta,
        temperature=temperature,
        vocab_valid=vocab_valid,
        mask=mask,
    )
    vocab = student_weight.shape[0] if vocab_valid is None else vocab_valid
    keep_gradient, block_bytes = _memory_plan(
        memory,
        memory_budget,
        any(gradients_needed(student_hidden, student_weight, student_bias)),
        student_hidden,
        student_weight,
        teacher_hidden,
        teacher_weight,
        vocab,
    )
    results = _Results(
        *torch.ops.logprobd.linear_divergence(
            **arguments, keep_gradient=keep_gradient, block_bytes=block_bytes
        )
    )
    return LinearDivergenceOutput(results.divergence, results.entropy)


def linear_divergence_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: DivergenceKind = "forward_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_scale: float = 1.0,
    teacher_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    vocab_valid: int | None = None,
    mask: Tensor | None = None,
    row_weights: Tensor | None = None,
    reduction: Reduction = "mean",
    memory_budget: float | None = None,
) -> LinearDivergenceLossOutput:
    """Computes one loss: the sum over rows of the divergence times the row's weight.

    If a backward pass may follow, this call also computes the gradients, which the backward pass only multiplies by
    the upstream gradient of the loss. Between the two, memory holds the gradients of the student's tensors
    instead of logits. Only one backward pass can follow each call. Gradients are rounded to the inputs' dtypes before
    they are multiplied by the upstream gradient, so with fp16 put the loss scale into row_weights.

    Args:
        row_weights: the weight of each row, floating-point, shaped like mask; None: 1. It has no gradient. A row with
            the weight 0 is not part of the loss, even if its divergence is NaN.
        reduction: "sum", or "mean", which divides the sum by the number of rows that are not masked (0 if there
            are none).
        memory_budget: bytes for the logits and gradients of a block of rows, which is at least one row. Default: as
            in linear_logprob.

    The other arguments are those of linear_divergence. Raises the exceptions of linear_divergence, and RuntimeError in a
    second backward pass.
    """
    check_tensors(row_weights=row_weights)
    check_reduction(reduction)
    arguments = _arguments(
        student_hidden=student_hidden,
        student_weight=student_weight,
        student_bias=student_bias,
        student_scale=student_scale,
        student_softcap=student_softcap,
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
        teacher_bias=teacher_bias,
        teacher_scale=teacher_scale,
        teacher_softcap=teacher_softcap,
        kind=kind,
        beta=beta,
        temperature=temperature,
        vocab_valid=vocab_valid,
        mask=mask,
    )
    results = _LossResults(
        *torch.ops.logprobd.linear_divergence_loss(
            **arguments,
            **needed_gradients(student_hidden, student_weight, student_bias),
            keep_gradient=_NOT_CACHED,
            block_bytes=budget_bytes(
                memory_budget, student_hidden, student_weight, LOSS_BUDGET_MIN
            ),
            row_weights=row_weights,
            is_mean=reduction == "mean",
        )
    )
    return LinearDivergenceLossOutput(results.loss, results.divergence, results.entropy)


def _arguments(
    *,
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    kind: DivergenceKind,
    beta: float,
    temperature: float | Tensor,
    student_scale: float,
    teacher_scale: float,
    student_softcap: float | None,
    teacher_softcap: float | None,
    vocab_valid: int | None,
    **others: Tensor | None,
) -> dict[str, Any]:
    """Returns the arguments that both operators have in common, by their names in the schema. Raises a ValueError that
    names the argument for invalid values that C++ cannot check."""
    check_tensors(
        student_hidden=student_hidden,
        **others,
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
        teacher_bias=teacher_bias,
        temperature=temperature,
    )
    if kind not in get_args(DivergenceKind):
        raise ValueError(f'kind is {kind!r}: it must be "forward_kl", "reverse_kl" or "jsd"')
    student_cap = softcap_argument(student_softcap, "student_softcap")
    teacher_cap = softcap_argument(teacher_softcap, "teacher_softcap")
    number, row_temperature = split_temperature(temperature, student_hidden.shape[:-1])
    return {
        "student_hidden": student_hidden,
        "teacher_hidden": teacher_hidden.detach(),
        "teacher_weight": teacher_weight.detach(),
        "teacher_bias": None if teacher_bias is None else teacher_bias.detach(),
        "row_temperature": row_temperature,
        "kind": get_args(DivergenceKind).index(kind),
        "beta": float(beta),
        "temperature": number,
        "student_scale": float(student_scale),
        "student_softcap": student_cap,
        "teacher_scale": float(teacher_scale),
        "teacher_softcap": teacher_cap,
        "vocab_valid": WHOLE_VOCABULARY if vocab_valid is None else vocab_valid,
        **others,
    }


def _memory_plan(
    memory: Memory,
    memory_budget: float | None,
    needs_gradient: bool,
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    vocab: int,
) -> tuple[int, int]:
    """Returns the operator's keep_gradient and block_bytes."""
    check_memory(memory)
    # Logits exist at a time in any case.
    budget = budget_bytes(memory_budget, student_hidden, student_weight, LOSS_BUDGET_MIN)
    if memory == "recompute" or not needs_gradient:
        return _NOT_CACHED, budget
    row_bytes = _RowBytes(
        *_row_bytes(
            student_hidden.device,
            *(
                dtype_after_autocast(each, autocast=True)
                for each in (student_hidden, student_weight, teacher_hidden, teacher_weight)
            ),
            _as_number(vocab),
        )
    )
    if memory == "cached":
        return row_bytes.cache_kind, budget
    rows = student_hidden.shape[:-1].numel()
    left = budget - rows * row_bytes.gradient
    # A checkpoint runs the forward again, where it must save tensors of the same shapes.
    if are_saved_tensors_hooked() or left < min(rows, _BLOCK_ROWS) * row_bytes.logits:
        return _NOT_CACHED, budget
    return row_bytes.cache_kind, left


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _row_bytes(
    device: torch.device,
    hidden: torch.dtype,
    weight: torch.dtype,
    teacher_hidden: torch.dtype,
    teacher_weight: torch.dtype,
    vocab: int,
) -> tuple[int, int, int]:
    return _asked_row_bytes(device, hidden, weight, teacher_hidden, teacher_weight, vocab)


@functools.cache  # Every step calls this.
def _asked_row_bytes(
    device: torch.device,
    hidden: torch.dtype,
    weight: torch.dtype,
    teacher_hidden: torch.dtype,
    teacher_weight: torch.dtype,
    vocab: int,
) -> tuple[int, int, int]:
    row_bytes: tuple[int, int, int] = torch.ops.logprobd.divergence_row_bytes(
        device,
        hidden_dtype=hidden,
        weight_dtype=weight,
        teacher_hidden_dtype=teacher_hidden,
        teacher_weight_dtype=teacher_weight,
        columns=vocab,
    )
    return row_bytes
