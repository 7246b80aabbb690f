"""Decides whether a forward caches logits for its backward. The C++ library defines the rules."""

from __future__ import annotations

import functools
from typing import Literal, get_args

import torch
from torch import Tensor

Memory = Literal["recompute", "cached", "auto"]

# Values of the operators' keep_logits: LogitCacheKind in kernels/torch_ops/api/linear_logprob.h.
NOT_CACHED = 0
WIDE = 1
EXPONENTIALS = 2

GIB = 1 << 30
BUDGET_MIN = GIB
BUDGET_MAX = 4 * GIB


def budget_bytes(memory_budget: int | None, device: torch.device) -> int:
    """Returns `memory_budget`, or the default if it is None. The default is an eighth of the GPU's
    free memory, from 1 to 4 GiB; 4 GiB on a CPU; 1 GiB in a function that is being compiled."""
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
    """Returns the operators' keep_logits for these arguments of linear_logprob. Raises a ValueError
    that names the argument if one is invalid."""
    if memory not in get_args(Memory):
        raise ValueError(f'memory is {memory!r}: it must be "recompute", "cached" or "auto"')
    budget = budget_bytes(memory_budget, hidden.device) if memory == "auto" else None
    if memory == "recompute" or not any(gradients_needed(hidden, weight, bias)):
        return NOT_CACHED
    kind = cache_kind(hidden, weight)
    if budget is not None:
        row_bytes = _cached_row_bytes(kind, hidden.dtype, weight.dtype, _as_number(weight.shape[0]))
        if target.numel() * row_bytes > budget:
            return NOT_CACHED
    return kind


def gradients_needed(*inputs: Tensor | None) -> list[bool]:
    """Returns, for each of the inputs, whether a backward would compute its gradient."""
    is_enabled = torch.is_grad_enabled()
    return [is_enabled and each is not None and each.requires_grad for each in inputs]


def cache_kind(hidden: Tensor, weight: Tensor) -> int:
    """Returns the keep_logits other than NOT_CACHED that supports these inputs."""
    is_fused = _is_fused(hidden.device, hidden.dtype, weight.dtype, _as_number(hidden.shape[-1]))
    return EXPONENTIALS if is_fused else WIDE


def _as_number(size: int) -> int:
    """Returns the size itself. torch.compile specialises the compiled function for it."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # noqa: PLC0415

        return int(guard_scalar(size))
    return size


# torch.compile evaluates these two functions while it traces, and guards everything that they depend on.


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_fused(
    device: torch.device, hidden: torch.dtype, weight: torch.dtype, hidden_size: int
) -> bool:
    return _asked_is_fused(device, hidden, weight, hidden_size)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _cached_row_bytes(
    keep_logits: int, hidden: torch.dtype, weight: torch.dtype, weight_rows: int
) -> int:
    return _asked_row_bytes(keep_logits, hidden, weight, weight_rows)


@functools.cache  # Every step calls this.
def _asked_is_fused(
    device: torch.device, hidden: torch.dtype, weight: torch.dtype, hidden_size: int
) -> bool:
    return torch.ops.logprobd.is_fused(device, hidden, weight, hidden_size)


@functools.cache  # Every step calls this.
def _asked_row_bytes(
    keep_logits: int, hidden: torch.dtype, weight: torch.dtype, weight_rows: int
) -> int:
    return torch.ops.logprobd.logit_cache_row_bytes(keep_logits, hidden, weight, weight_rows)
