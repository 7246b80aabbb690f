"""Replaces Liger's LigerFusedLinearCrossEntropyLoss and its function (Liger 0.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from logprobd_ops.losses import LinearCrossEntropyOutput, Reduction, linear_cross_entropy


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | LinearCrossEntropyOutput:
    """Returns the loss of `input` [BT, H] and `target` [BT], or a tuple with the fields of Liger's output.

    accum_dtype and chunk_mem_const have no effect: gradients are always summed in fp32 or wider, and
    linear_logprob bounds the memory itself. The z loss is fp32. Without valid rows the accuracy is
    0 (Liger returns NaN).
    """
    del accum_dtype, chunk_mem_const
    return linear_cross_entropy(
        input,
        weight,
        target,
        bias,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=lse_square_scale,
        class_weights=ce_weight,
        token_scaling=use_token_scaling,
        softcap=softcap,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
    )


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """Calls liger_fused_linear_cross_entropy with options that are set once. The weight is the
    first argument, as in Liger."""

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.ce_weight = ce_weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction: Reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | LinearCrossEntropyOutput:
        return liger_fused_linear_cross_entropy(
            _input,
            lin_weight,
            target,
            bias,
            self.ce_weight,
            self.ignore_index,
            self.lse_square_scale,
            self.label_smoothing,
            self.reduction,
            self.softcap,
            self.return_z_loss,
            self.accum_dtype,
            self.use_token_scaling,
            self.return_token_accuracy,
            self.return_predicted_tokens,
        )
