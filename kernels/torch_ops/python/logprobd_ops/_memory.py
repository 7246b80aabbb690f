"""Whether logits are kept from the forward for the backward."""

import functools
from typing import Literal, get_args

import torch
from torch import Tensor

Memory = Literal["recompute", "cached", "auto"]

# As the operator's keep_logits: KeptLogits in kernels/torch_ops/linear_logprob.h.
NOT_KEPT = 0
WIDE = 1
POWERS = 2

GIB = 1 << 30
BUDGET_MIN = GIB
BUDGET_MAX = 4 * GIB


def budget_bytes(memory_budget: int | None, device: torch.device) -> int:
    """`memory_budget`, or the default: an eighth of the memory that is free on the GPU, from 1 to 4 GiB. Where
    that is not known, on a CPU, 4 GiB; in a function that is being compiled, 1 GiB."""
    if memory_budget is not None:
        if memory_budget < 0:
            raise ValueError(f"memory_budget is {memory_budget}: it must not be negative")
        return memory_budget
    if torch.compiler.is_compiling():
        return BUDGET_MIN
    if device.type != "cuda":
        return BUDGET_MAX
    free = torch.ops.logprobd.free_bytes(
        torch.cuda.current_device() if device.index is None else device.index, 8 * BUDGET_MAX
    )
    return max(BUDGET_MIN, min(BUDGET_MAX, free // 8))


def logits_to_keep(
    memory: Memory,
    memory_budget: int | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
) -> int:
    """The operator's keep_logits for these arguments of linear_logprob; ValueError names a bad one."""
    if memory not in get_args(Memory):
        raise ValueError(f'memory is {memory!r}: it must be "recompute", "cached" or "auto"')
    budget = budget_bytes(memory_budget, hidden.device) if memory == "auto" else None
    if memory == "recompute" or not any(gradients_needed(hidden, weight, bias)):
        return NOT_KEPT
    kept = kept_format(hidden, weight)
    if budget is not None and _cache_bytes(kept, hidden, weight, target) > budget:
        return NOT_KEPT
    return kept


def gradients_needed(*inputs: Tensor | None) -> list[bool]:
    """Which of them a backward would give a gradient."""
    is_enabled = torch.is_grad_enabled()
    return [is_enabled and each is not None and each.requires_grad for each in inputs]


def kept_format(hidden: Tensor, weight: Tensor) -> int:
    """The keep_logits other than NOT_KEPT that serves them."""
    return POWERS if _is_fused(hidden, weight) else WIDE


def _is_fused(hidden: Tensor, weight: Tensor) -> bool:
    """As IsFused in fused_head.h."""
    return (
        hidden.is_cuda
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and hidden.shape[-1] % 8 == 0
        and _has_fused_kernels(hidden.get_device())
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_fused_kernels(device: int) -> bool:
    return _looked_up(device)


@functools.cache  # it is asked at every step
def _looked_up(device: int) -> bool:
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return is_hopper and torch.ops.logprobd.has_fused_kernels()


def _cache_bytes(kept: int, hidden: Tensor, weight: Tensor, target: Tensor) -> int:
    """Of all rows' logits, about as logit_cache.h has them."""
    if kept == POWERS:
        return target.numel() * weight.shape[0] * 388 // 192
    is_double = torch.float64 in (hidden.dtype, weight.dtype)
    return target.numel() * weight.shape[0] * (8 if is_double else 4)
