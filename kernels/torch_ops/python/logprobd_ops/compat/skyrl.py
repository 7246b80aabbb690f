"""SkyRL: the fused LM-head log-prob of its Megatron backend (pull request 1765).

model_utils.py has it as FusedLinearLogprob or, before, FusedLinearChunkedDistributedLogprob, and
fused_linear_logprob_triton.py as FusedLinearLogprobTriton. All are called through `apply` with the same
arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logprobd_ops.compat._ranks import with_partial_gradient
from logprobd_ops.linear_logprob import linear_logprob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# SkyRL ignores no id: rows that do not count are masked in its loss. No vocabulary has this one.
_NO_ID = -(2**31)


class FusedLinearLogprob:
    """Stands where SkyRL has an autograd function; only `apply` is part of it."""

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
        """The log-probs [B, S], fp32, of `target` [B, S], already shifted, for `hidden` [B, S, H].

        `weight` is the rank's shard, ids [vocab_start_index, vocab_end_index). A target in no rank's range
        has log-prob 0 and yet the gradient of -lse, as the original. The gradient of `hidden` is the rank's
        part of the sum: the caller's gather from, or copy to, the tensor-parallel region adds the parts up.

        chunk_size bounds the original's memory; it changes nothing here. `inference_only` leaves no graph.
        """
        del chunk_size
        if vocab_end_index - vocab_start_index != weight.shape[0]:
            raise ValueError(
                f"[vocab_start_index, vocab_end_index) must be the {weight.shape[0]} rows of the weight, "
                f"got [{vocab_start_index}, {vocab_end_index})"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            logprob, *_ = linear_logprob(
                with_partial_gradient(hidden, tp_group),
                weight,
                target,
                ignore_index=_NO_ID,
                vocab_start=vocab_start_index,
                process_group=tp_group,
                need_entropy=False,
                out_of_vocab="zero",
            )
        return logprob


FusedLinearChunkedDistributedLogprob = FusedLinearLogprob
FusedLinearLogprobTriton = FusedLinearLogprob
