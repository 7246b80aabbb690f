"""Replaces the fused LM-head log-prob of SkyRL's Megatron backend (SkyRL 0.3).

The originals are FusedLinearChunkedDistributedLogprob in model_utils.py and FusedLinearLogprobTriton in
fused_linear_logprob_triton.py. Callers use `apply` with the same arguments for both.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from logprobd_ops._tensor_kinds import check_tensors
from logprobd_ops.compat._shared import NO_ID, replace_in_package
from logprobd_ops.linear_logprob import linear_logprob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FusedLinearLogprobTriton:
    """Replaces an autograd function of SkyRL. Only `apply` is provided. A tp_group of None means that this rank
    holds the whole vocabulary."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: ProcessGroup | None,
        inference_only: bool = False,
        return_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the log-probs [B, S], fp32, of the already shifted `target` [B, S] for `hidden`
        [B, S, H].

        `weight` is the rank's shard, ids [vocab_start_index, vocab_end_index). A target outside all ranks'
        ranges has log-prob 0 but the gradient of -lse, as in the original. The gradient of `hidden`
        is the rank's part of the sum. The caller's gather from the tensor-parallel region, or copy
        to it, sums the parts. hidden is first cast to the weight's dtype, also under autocast.

        chunk_size, which bounds the original's memory, has no effect. `inference_only` builds no graph.

        With `return_entropy` the result is (log-probs, entropy). The entropy, [B, S] in fp32 and in nats, is that of
        the softmax over all ranks' ids, whatever the target is, and has a gradient. SkyRL 0.3 does not have this
        argument, which stands last in earlier versions of its pull request 1765.
        """
        del chunk_size
        check_tensors(hidden=hidden, weight=weight, target=target)
        if vocab_end_index - vocab_start_index != weight.shape[0]:
            raise ValueError(
                f"[vocab_start_index, vocab_end_index) must be the {weight.shape[0]} rows of the weight, "
                f"got [{vocab_start_index}, {vocab_end_index})"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            scores = linear_logprob(
                hidden.to(weight.dtype),
                weight,
                target,
                ignore_index=NO_ID,
                vocab_start=vocab_start_index,
                process_group=tp_group,
                hidden_gradient="partial",
                need_entropy=return_entropy,
                out_of_vocab="zero",
                autocast=False,
            )
        return (scores.logprob, scores.entropy) if return_entropy else scores.logprob


class FusedLinearChunkedDistributedLogprob(FusedLinearLogprobTriton):
    """As FusedLinearLogprobTriton, but a tp_group of None means all ranks of torch.distributed, if it is
    initialized."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: ProcessGroup | None,
        inference_only: bool = False,
        return_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See FusedLinearLogprobTriton.apply."""
        if tp_group is None and dist.is_initialized():
            tp_group = dist.group.WORLD
        return FusedLinearLogprobTriton.apply(
            hidden,
            weight,
            target,
            vocab_start_index,
            vocab_end_index,
            chunk_size,
            tp_group,
            inference_only,
            return_entropy,
        )


def apply_logprobd_kernel() -> None:
    """Replaces both functions in the modules of SkyRL that are loaded, and in those that are loaded later. It must be
    called in each worker process, since it changes only the process that calls it."""
    folder = "skyrl.backends.skyrl_train.distributed.megatron"
    for name, replacement in (
        ("model_utils", FusedLinearChunkedDistributedLogprob),
        ("fused_linear_logprob_triton", FusedLinearLogprobTriton),
    ):
        module = importlib.import_module(f"{folder}.{name}")
        replace_in_package("skyrl", getattr(module, replacement.__name__), replacement)
