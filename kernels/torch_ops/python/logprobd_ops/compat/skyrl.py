"""Replaces the fused LM-head log-prob of SkyRL's Megatron backend (pull request 1765).

It is called FusedLinearLogprob in model_utils.py (formerly FusedLinearChunkedDistributedLogprob) and
FusedLinearLogprobTriton in fused_linear_logprob_triton.py. Callers use `apply` with the same
arguments for each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logprobd_ops.linear_logprob import linear_logprob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# SkyRL has no ignored id, because its loss masks rows. No vocabulary contains this id, so no row is
# ignored.
_NO_ID = -(2**31)


class FusedLinearLogprob:
    """Replaces an autograd function of SkyRL. Only `apply` is provided."""

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
    ) -> Tensor:
        """Returns the log-probs [B, S], fp32, of the already shifted `target` [B, S] for `hidden`
        [B, S, H].

        `weight` is the rank's shard, ids [vocab_start_index, vocab_end_index). A target outside all ranks'
        ranges has log-prob 0 but the gradient of -lse, as in the original. The gradient of `hidden`
        is the rank's part of the sum. The caller's gather from the tensor-parallel region, or copy
        to it, sums the parts.

        chunk_size, which bounds the original's memory, has no effect. `inference_only` builds no graph.
        """
        del chunk_size
        if vocab_end_index - vocab_start_index != weight.shape[0]:
            raise ValueError(
                f"[vocab_start_index, vocab_end_index) must be the {weight.shape[0]} rows of the weight, "
                f"got [{vocab_start_index}, {vocab_end_index})"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            scores = linear_logprob(
                hidden,
                weight,
                target,
                ignore_index=_NO_ID,
                vocab_start=vocab_start_index,
                process_group=tp_group,
                hidden_gradient="partial",
                need_entropy=False,
                out_of_vocab="zero",
            )
        return scores.logprob


FusedLinearChunkedDistributedLogprob = FusedLinearLogprob
FusedLinearLogprobTriton = FusedLinearLogprob
