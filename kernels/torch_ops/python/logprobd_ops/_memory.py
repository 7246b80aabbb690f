"""Decides whether a forward caches logits for its backward. The C++ library defines the rules."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, get_args

import torch
from torch import Tensor

Memory = Literal["recompute", "cached", "auto"]

# Values of the operators' keep_logits: LogitCacheKind in kernels/torch_ops/types/linear_logprob.h.
NOT_CACHED = 0
WIDE = 1
EXPONENTIALS = 2

ALL_ROWS = -1  # value of the operators' cached_rows

GIB = 1 << 30
BUDGET_MIN = GIB
BUDGET_MAX = 4 * GIB
# Size of a block of logits for a loss when memory is short. A backward that computes logits again needs as much.
LOSS_BUDGET_MIN = GIB // 4


def check_memory(memory: str) -> None:
    """Raises ValueError for a value that is not one of Memory."""
    if memory not in get_args(Memory):
        raise ValueError(f'memory is {memory!r}: it must be "recompute", "cached" or "auto"')


def budget_bytes(
    memory_budget: float | None, hidden: Tensor, weight: Tensor, free_min: int = 0
) -> int:
    """Returns how many bytes of logits may be cached: `memory_budget`, or the default if it is None.

    The default is an eighth of the GPU's free memory, from 1 to 4 GiB; 4 GiB on a CPU; 1 GiB in a
    function that is being compiled. On a GPU the result is at most what is free besides the
    gradients, within torch.cuda.set_per_process_memory_fraction, but `free_min` bytes count as
    free. Compiled functions do not query the free memory.
    """
    if memory_budget is not None:
        memory_budget = _whole_bytes(memory_budget)
    if torch.compiler.is_compiling():
        return BUDGET_MIN if memory_budget is None else memory_budget
    if hidden.device.type != "cuda":
        return BUDGET_MAX if memory_budget is None else memory_budget
    # Blocks, and the gradients of both inputs in their own dtypes and as sums in fp32.
    reserve = GIB // 4 + 3 * (hidden.nbytes + weight.nbytes)
    enough = max(8 * BUDGET_MAX, BUDGET_MAX + reserve)
    if memory_budget is not None:
        enough = memory_budget + reserve
    index = hidden.device.index
    device = torch.cuda.current_device() if index is None else index
    free = min(torch.ops.logprobd.free_bytes(device, enough=enough), _allowed_bytes(device))
    if memory_budget is None:
        memory_budget = max(BUDGET_MIN, min(BUDGET_MAX, free // 8))
    return min(memory_budget, max(free_min, free - reserve))


def _whole_bytes(memory_budget: float) -> int:
    """Returns the budget as an integer, for callers who write 2.5e9."""
    if memory_budget < 0:
        raise ValueError(f"memory_budget is {memory_budget}: it must not be negative")
    if isinstance(memory_budget, float) and not memory_budget.is_integer():
        raise ValueError(f"memory_budget is {memory_budget}: it must be a whole number of bytes")
    return int(memory_budget)


def _allowed_bytes(device: int) -> float:
    """Returns how many bytes torch.cuda.set_per_process_memory_fraction lets PyTorch allocate in
    addition to what it has allocated. Without a limit the result is infinite."""
    # Older versions of torch do not tell the fraction.
    fraction_of = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
    fraction = 1.0 if fraction_of is None else fraction_of(device)
    if fraction >= 1:
        return math.inf
    stats = torch.cuda.memory_stats(device)
    # PyTorch cannot return parts of segments of which other parts are in use.
    kept = stats["active_bytes.all.current"] + stats["inactive_split_bytes.all.current"]
    total = torch.cuda.get_device_properties(device).total_memory
    return max(0, int(fraction * total) - kept)


@dataclasses.dataclass
class LogitCache:
    """What a forward caches: the operators' keep_logits and cached_rows."""

    kind: int = NOT_CACHED
    rows: int = ALL_ROWS

    def arguments(self) -> dict[str, int]:
        return {"keep_logits": self.kind, "cached_rows": self.rows}


def logit_cache(
    memory: Memory,
    memory_budget: float | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    autocast: bool = True,
) -> LogitCache:
    """Returns what linear_logprob caches for these arguments. Raises a ValueError that names the
    argument if one is invalid."""
    check_memory(memory)
    if memory == "auto" and memory_budget is not None:
        memory_budget = _whole_bytes(memory_budget)
    if memory == "recompute" or not any(gradients_needed(hidden, weight, bias)):
        return LogitCache()  # A query of the free memory would take longer than all the rest.
    kind = cache_kind(hidden, weight, autocast=autocast)
    is_hooked = are_saved_tensors_hooked()
    rows = target.numel()
    if memory == "auto":
        budget = budget_bytes(memory_budget, hidden, weight)
        dtypes = dtype_after_autocast(hidden, autocast), dtype_after_autocast(weight, autocast)
        rows_max = _cacheable_rows(kind, *dtypes, _as_number(weight.shape[0]), _as_number(budget))
        if is_hooked or rows_max == 0:
            return LogitCache()
        if rows > rows_max:
            return LogitCache(kind, rows_max)
    # A forward that is traced, or run again by a checkpoint, must save tensors of known shapes.
    is_fixed = is_hooked or torch.compiler.is_compiling()
    return LogitCache(kind, ALL_ROWS if is_fixed else rows)


def are_saved_tensors_hooked() -> bool:
    """Returns whether hooks take the tensors that autograd saves, as in torch.utils.checkpoint
    without reentrance, or when saved tensors are moved to the CPU.

    Large tensors should not be saved then: checkpointing drops them, and runs the forward again in
    the backward, where it must save tensors of the same shapes although the free memory has changed.
    """
    return not torch.compiler.is_compiling() and torch.ops.logprobd.are_saved_tensors_hooked()


def gradients_needed(*inputs: Tensor | None) -> list[bool]:
    """Returns, for each of the inputs, whether a backward would compute its gradient."""
    is_enabled = torch.is_grad_enabled()
    return [is_enabled and each is not None and each.requires_grad for each in inputs]


def dtype_after_autocast(tensor: Tensor, autocast: bool) -> torch.dtype:
    """Returns the dtype in which the operator gets `tensor`, which is hidden or weight: autocast casts
    them as torch.nn.functional.linear does, unless `autocast` is False."""
    device = tensor.device.type
    is_cast = (
        autocast
        and device in ("cpu", "cuda")
        and torch.is_autocast_enabled(device)
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )
    return torch.get_autocast_dtype(device) if is_cast else tensor.dtype


def cache_kind(hidden: Tensor, weight: Tensor, *, autocast: bool = True) -> int:
    """Returns the keep_logits other than NOT_CACHED that supports these inputs."""
    dtypes = dtype_after_autocast(hidden, autocast), dtype_after_autocast(weight, autocast)
    is_fused = _is_fused(hidden.device, *dtypes, _as_number(hidden.shape[-1]))
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
def _cacheable_rows(
    keep_logits: int, hidden: torch.dtype, weight: torch.dtype, weight_rows: int, budget: int
) -> int:
    """Returns how many rows can be cached within a budget in bytes."""
    return torch.ops.logprobd.cacheable_rows(
        keep_logits=keep_logits,
        hidden_dtype=hidden,
        weight_dtype=weight,
        weight_rows=weight_rows,
        budget_bytes=budget,
    )


@functools.cache  # Every step calls this.
def _asked_is_fused(
    device: torch.device, hidden: torch.dtype, weight: torch.dtype, hidden_size: int
) -> bool:
    return torch.ops.logprobd.is_fused(
        device, hidden_dtype=hidden, weight_dtype=weight, hidden_size=hidden_size
    )
