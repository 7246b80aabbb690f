"""A model of a device whose memory is short, to test that no rank waits for one that fails."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OutOfMemoryError(RuntimeError):
    """The error of an allocation that fails."""


class FailingMemory(TorchDispatchMode):
    """Makes one allocation of a call fail, and counts the allocations that may fail.

    PyTorch's allocator for GPUs holds memory that was freed. So after the ranks have agreed (the first collective), an
    allocation does not fail if it has the size of an earlier one, or only a few numbers per row: the operator has
    reserved such memory. The message that the ranks exchange is small and never fails.
    """

    NUMBERS_PER_ROW = 4

    def __init__(self, num_rows: int, message_size: int, fails_at: int) -> None:
        super().__init__()
        self._small = self.NUMBERS_PER_ROW * num_rows
        self._message_size = message_size
        self._fails_at = fails_at
        self._count = 0
        self._sizes: set[int] = set()
        self._have_agreed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._have_agreed = True
        elif not any(each.alias_info for each in func._schema.returns):
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self._allocate(tensor)
        return result

    def _allocate(self, tensor: torch.Tensor) -> None:
        if tensor.shape == (self._message_size,) and tensor.dtype == torch.int64:
            return
        if self._have_agreed and (tensor.numel() <= self._small or tensor.nbytes in self._sizes):
            return
        if not self._have_agreed:
            self._sizes.add(tensor.nbytes)
        self._count += 1
        if self._count > self._fails_at:
            raise OutOfMemoryError(f"allocation {self._fails_at} failed")


def call(name: str, arguments: tuple) -> Any:
    """Calls a CPU kernel of torch.ops.logprobd so that modes see the operations of which it consists."""
    operator = getattr(torch.ops.logprobd, name).default
    return operator._op_dk(torch._C.DispatchKey.CPU, *arguments)
