"""Replaces the function that TRL's fused LM head calls, ChunkedLogProbFunction of trl/kernels (TRL 1.16)."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch
from torch import Tensor

from logprobd_ops._tensor_kinds import check_tensors
from logprobd_ops.compat._shared import NO_ID, replace_in_package
from logprobd_ops.linear_logprob import linear_logprob

OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class ChunkedLogProbOutput(NamedTuple):
    """Scores of each row, [N]. Those that are not requested are None."""

    log_probs: Tensor
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


class ChunkedLogProbFunction:
    """Replaces an autograd function of TRL. Only `apply` is provided."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
    ) -> ChunkedLogProbOutput:
        """Returns the scores of `targets` [N] for `hidden` [N, H] and `weight` [V, H], fp32.

        `outputs` names the scores to compute in addition to log_probs. log_probs and entropy are differentiable,
        the others are not, as in TRL. Products have the autocast dtype under autocast, else hidden's dtype.

        chunk_size, which bounds the original's memory, has no effect. Unlike TRL's function, this one raises an
        IndexError for targets outside the vocabulary, and a RuntimeError for a weight that DeepSpeed ZeRO-3
        partitions again before the backward pass.
        """
        del chunk_size
        check_tensors(hidden=hidden, weight=weight, bias=bias, targets=targets)
        if hasattr(weight, "ds_id") and torch.is_grad_enabled():
            raise RuntimeError(
                "weight is partitioned by DeepSpeed ZeRO-3, which releases it before the backward pass of "
                "logprobd_ops: use ZeRO-2 or FSDP, or TRL's own function"
            )
        if weight.dtype.itemsize > hidden.dtype.itemsize:
            weight = weight.to(hidden.dtype)
        if bias is not None and logit_scale != 1.0:
            bias = bias * logit_scale  # TRL adds the bias before it scales the logits.
        scores = linear_logprob(
            hidden,
            weight,
            targets,
            bias,
            temperature=temperature,
            scale=logit_scale,
            softcap=final_logit_softcapping,
            ignore_index=NO_ID,
            need_entropy="entropy" in outputs,
            return_argmax="is_top1" in outputs,
            return_mean_logit="mean_logits" in outputs,
            return_sum_p_squared="log_sum_sq_probs" in outputs,
        )
        return ChunkedLogProbOutput(
            scores.logprob,
            scores.entropy if "entropy" in outputs else None,
            None if scores.sum_p_squared is None else scores.sum_p_squared.log(),
            None if scores.mean_logit is None else scores.mean_logit.detach(),
            None if scores.argmax is None else scores.argmax == targets.long(),
        )


def apply_logprobd_kernel() -> None:
    """Replaces TRL's ChunkedLogProbFunction in the modules of TRL that are loaded, and in those that are loaded
    later. The fused LM head looks it up at each call."""
    module = importlib.import_module("trl.trainer.utils")
    replace_in_package("trl", module._ChunkedLogProbFunction, ChunkedLogProbFunction)
