"""Replaces Liger's fused linear cross-entropy: its autograd function, its function and its module (Liger 0.8)."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from logprobd_ops._operator import softcap_argument
from logprobd_ops.compat._shared import replace_in_package
from logprobd_ops.losses import (
    LinearCrossEntropyOutput,
    Reduction,
    check_loss_options,
    linear_cross_entropy,
)

try:
    from liger_kernel.transformers.functional import CrossEntropyOutput
except ImportError:

    @dataclass
    class CrossEntropyOutput:  # type: ignore[no-redef]
        """Equals Liger's class, which is used if it is installed."""

        loss: Tensor
        z_loss: Tensor | None = None
        token_accuracy: Tensor | None = None
        predicted_tokens: Tensor | None = None


class LigerFusedLinearCrossEntropyFunction:
    """Replaces an autograd function of Liger. Only `apply` is provided."""

    # Liger passes the last three arguments only to functions that have this attribute.
    supports_inner_impl_dispatch = True

    @staticmethod
    def apply(
        _input: Tensor,
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
        ce_impl: str | None = None,
        ce_mode: str | None = None,
        chunk_mem_const: int = 1,
    ) -> LinearCrossEntropyOutput:
        """Returns (loss, z_loss, token_accuracy, predicted_tokens) of `_input` [BT, H] and `target` [BT]. Results
        that are not requested are None.

        accum_dtype, ce_impl, ce_mode and chunk_mem_const have no effect: gradients are always summed in
        fp32 or wider, and linear_logprob bounds the memory itself. The z loss is fp32. Without valid rows
        the accuracy is 0 (Liger returns NaN).

        A reduced loss forms its gradients in this call if linear_cross_entropy can (see gradients_in_forward there), so
        only one backward can follow: a second one, after retain_graph=True, raises a RuntimeError. (Liger's function
        allows it, but multiplies its gradients again by an upstream gradient other than 1.) For several backwards,
        pass reduction "none" and reduce the result, whose gradients are formed in each backward.
        """
        del accum_dtype, ce_impl, ce_mode, chunk_mem_const
        result = linear_cross_entropy(
            _input,
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
        if isinstance(result, LinearCrossEntropyOutput):
            return result
        return LinearCrossEntropyOutput(result, None, None, None)


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
) -> Tensor | CrossEntropyOutput:
    """Returns the loss of `input` [BT, H] and `target` [BT], or Liger's CrossEntropyOutput if a return_* option
    is set. See LigerFusedLinearCrossEntropyFunction."""
    results = LigerFusedLinearCrossEntropyFunction.apply(
        input,
        weight,
        target,
        bias,
        ce_weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        accum_dtype,
        use_token_scaling,
        return_token_accuracy,
        return_predicted_tokens,
        chunk_mem_const=chunk_mem_const,
    )
    if return_z_loss or return_token_accuracy or return_predicted_tokens:
        return CrossEntropyOutput(*results)
    return results.loss


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """Calls liger_fused_linear_cross_entropy with options that are set once. The weight is the
    first argument, as in Liger. Raises ValueError for a label_smoothing, reduction or softcap that is out of
    range."""

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
        check_loss_options(reduction, label_smoothing)
        softcap_argument(softcap)
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
    ) -> Tensor | CrossEntropyOutput:
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


def apply_logprobd_kernel() -> None:
    """Replaces Liger's autograd function in the modules of Liger that are loaded, and in those that are loaded
    later. Liger's function, its module and its patched models call it, and so do objects that exist already."""
    for name in ("liger_kernel.transformers.functional", "liger_kernel.ops"):
        module = importlib.import_module(name)
        replace_in_package(
            "liger_kernel",
            module.LigerFusedLinearCrossEntropyFunction,
            LigerFusedLinearCrossEntropyFunction,
        )
