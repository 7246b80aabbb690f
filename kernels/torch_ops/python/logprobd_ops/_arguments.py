"""The operators' common arguments, checked as far as C++ cannot, and flattened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALL_VALID = -1  # as vocab_valid: the whole vocabulary

OutOfVocab = Literal["error", "zero"]


def flattened(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    temperature: float | Tensor,
    scale: float,
    softcap: float | None,
    ignore_index: int,
    vocab_start: int,
    vocab_valid: int | None,
    process_group: ProcessGroup | None,
    sequence_parallel: bool,
    need_entropy: bool,
    mean_logit_weights: Tensor | None,
    out_of_vocab: OutOfVocab,
    return_argmax: bool,
    return_mean_logit: bool,
    keep_logits: int,
) -> tuple[Any, ...]:
    """In the order of the schemas in kernels/torch_ops/ops.cc. ValueError names a bad one."""
    if out_of_vocab not in ("error", "zero"):
        raise ValueError(f'out_of_vocab is {out_of_vocab!r}: it must be "error" or "zero"')
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}: it must be above 0, or None for none")
    row_temperature = None
    if isinstance(temperature, Tensor):
        row_temperature = temperature if temperature.dim() else temperature.expand(target.shape)
        temperature = 1.0
    return (
        hidden,
        weight,
        target,
        bias,
        row_temperature,
        mean_logit_weights,
        float(temperature),
        float(scale),
        0.0 if softcap is None else float(softcap),
        ignore_index,
        vocab_start,
        ALL_VALID if vocab_valid is None else vocab_valid,
        "" if process_group is None else process_group.group_name,
        sequence_parallel,
        out_of_vocab == "zero",
        need_entropy,
        return_argmax,
        return_mean_logit,
        keep_logits,
    )
