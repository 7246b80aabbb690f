"""Replaces the function of verl/utils/kernel/linear_cross_entropy.py (verl 0.9)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from logprobd_ops.compat._shared import (
    NO_ID,
    flat_temperature,
    reduced,
    replace_in_package,
    shard_start,
)
from logprobd_ops.linear_logprob import linear_logprob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (logprobs, entropy), fp32, of `hidden` [..., H] flattened to T rows.

    `labels` must already be shifted. entropy is [T]. logprobs is [T] for reduction "none", else the
    sum or the mean over all T rows. With a group, `weight` is the rank's shard, shards have equal
    sizes, and the gradient of `hidden` is the rank's part of the sum. As in verl, the caller's
    gather from the sequence-parallel region sums the parts.

    verl ignores no label: one outside the vocabulary, such as -100, has the log-prob -lse, which is what
    verl computes with a group (without a group, it returns memory that was never written).

    Under autocast, hidden and weight are cast to its dtype, as the products of the model's other layers are. verl's
    function does not follow autocast: it multiplies fp32 tensors in TF32, and fails if hidden and weight have
    different dtypes. Nothing is cast where both have autocast's dtype, as with the mixed precision of verl's FSDP.
    Call this function under torch.autocast(..., enabled=False) to multiply fp32 tensors in fp32 (not TF32), which is
    many times slower on a GPU.

    Unlike verl's function, this one takes any hidden size, inputs that are not contiguous, and a
    temperature per row: a tensor with an element for each label, or one that can be broadcast to labels' shape.
    """
    temperature = flat_temperature(temperature, labels)
    labels = labels.reshape(-1)
    scores = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels,
        temperature=temperature,
        ignore_index=NO_ID,
        vocab_start=shard_start(weight, dist_process_group),
        process_group=dist_process_group,
        hidden_gradient="partial",
        out_of_vocab="zero",
    )
    num_ranks = 1 if dist_process_group is None else dist.get_world_size(dist_process_group)
    is_id = (labels >= 0) & (labels < weight.shape[0] * num_ranks)
    # The operator gives other labels the log-prob 0 with the gradient of -lse.
    logprob = scores.logprob - torch.where(is_id, 0.0, scores.lse.detach())
    return reduced(logprob, reduction), scores.entropy


def apply_logprobd_kernel() -> None:
    """Replaces verl's linear_cross_entropy in the modules of verl that are loaded, and in those that are
    loaded later."""
    module = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    replace_in_package("verl", module.linear_cross_entropy, linear_cross_entropy)
