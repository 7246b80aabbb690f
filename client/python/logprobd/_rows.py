"""Copies rows of hidden states into existing memory, such as memory shared with the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from logprobd.errors import InvalidArgument

Bytes = npt.NDArray[np.uint8]
Rows = slice | npt.NDArray[np.int64]

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_NUMPY_TYPES = {"bf16": "<u2", "fp16": "<f2", "fp32": "<f4"}

# Large copies are split into parts of at least this size. Passing a part to a thread takes 20 us.
_PART_BYTES_MIN = 1 << 20
_COPY_THREADS_MAX = 4

_copiers: tuple[int, ThreadPoolExecutor] | None = None  # process id and its threads


def write_numpy(
    array: npt.NDArray[Any],
    rows: Rows,
    out: Bytes,
    dtype: str,
    convert: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None,
) -> None:
    """Writes rows of `array` [rows, hidden_size] to `out` as `dtype`; `convert` may be None."""
    target = out.view(_NUMPY_TYPES[dtype]).reshape(-1, array.shape[1])
    if convert is not None:
        target[...] = convert(array[rows])
        return
    # bfloat16 is copied as uint16, because NumPy holds the GIL while it copies types that it does
    # not know.
    plain = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    if isinstance(rows, slice):
        np.copyto(target, plain[rows])
    elif plain.flags.c_contiguous and plain.dtype == target.dtype:
        np.take(plain, rows, axis=0, out=target, mode="clip")  # mode "raise" buffers the output
    else:
        target[...] = plain[rows]


def write_torch(tensor: Any, rows: Rows, out: Bytes, dtype: Any) -> None:
    """Writes rows of `tensor` [rows, hidden_size], on any device, to `out` as the torch dtype."""
    torch = sys.modules["torch"]
    bits = np.int32 if dtype == torch.float32 else np.int16
    target = torch.from_numpy(out.view(bits)).view(dtype).view(-1, tensor.shape[1])
    if isinstance(rows, slice):
        target.copy_(tensor[rows])
        return
    index = torch.from_numpy(rows).to(tensor.device)
    if tensor.dtype == dtype and tensor.device.type == "cpu":
        torch.index_select(tensor, 0, index, out=target)
    else:
        target.copy_(tensor[index])


def blocks(rows: Rows, inner: int) -> Iterator[tuple[int, Rows, int, int]]:
    """Splits rows of an array [..., inner, hidden_size] at multiples of `inner`.

    Yields for each block its number, the rows within it, and their range [begin, end) among `rows`.
    """
    if isinstance(rows, slice):
        first, last = rows.start, rows.stop
        for block in range(first // inner, -(-last // inner) if last > first else first // inner):
            begin, end = max(first, block * inner), min(last, (block + 1) * inner)
            yield (
                block,
                slice(begin - block * inner, end - block * inner),
                begin - first,
                end - first,
            )
        return
    numbers = rows // inner
    for block in np.unique(numbers):
        begin, end = (int(np.searchsorted(numbers, block, side)) for side in ("left", "right"))
        yield int(block), rows[begin:end] - block * inner, begin, end


def in_parallel(write: Callable[[Rows, Bytes], None], rows: Rows, out: Bytes) -> None:
    """Calls `write` for parts of `rows` and `out`, on several threads if there are many bytes.

    `out` is a uint8 array with the bytes of all rows.
    """
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    parts = min(_COPY_THREADS_MAX, out.nbytes // _PART_BYTES_MIN, (os.cpu_count() or 1), count)
    if parts <= 1:
        write(rows, out)
        return
    row_bytes = out.nbytes // count
    cuts = [count * part // parts for part in range(parts + 1)]

    def write_part(part: int) -> None:
        begin, end = cuts[part], cuts[part + 1]
        if isinstance(rows, slice):
            some: Rows = slice(rows.start + begin, rows.start + end)
        else:
            some = rows[begin:end]
        write(some, out[begin * row_bytes : end * row_bytes])

    others = [_threads().submit(write_part, part) for part in range(1, parts)]
    try:
        write_part(0)
    finally:
        for other in others:
            other.result()


def _threads() -> ThreadPoolExecutor:
    """Returns this process's copy threads, created at first use."""
    global _copiers  # noqa: PLW0603
    pid = os.getpid()
    copiers = _copiers
    if copiers is None or copiers[0] != pid:
        _copiers = copiers = (pid, ThreadPoolExecutor(_COPY_THREADS_MAX, "logprobd-copy"))
    return copiers[1]


def buffer_type(dtype: Any) -> tuple[int, Callable[[Bytes, tuple[int, int]], Any]]:
    """Returns the bytes per element of `dtype`, and a function that views bytes as an array.

    The function takes bytes and a shape. It returns a torch.Tensor for a torch dtype, otherwise a
    NumPy array (uint16 for "bf16"). Raises InvalidArgument for other types.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise _wrong_dtype(dtype)
        bits = np.int32 if dtype == torch.float32 else np.int16

        def make_torch(memory: Bytes, shape: tuple[int, int]) -> Any:
            return torch.from_numpy(memory.view(bits)).view(dtype).view(shape)

        return dtype.itemsize, make_torch
    names = {"bf16": "<u2", "bfloat16": "<u2", "fp16": "<f2", "fp32": "<f4"}
    try:
        numpy_type = np.dtype(names.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        raise _wrong_dtype(dtype) from None
    if numpy_type.name not in ("uint16", "bfloat16", "float16", "float32"):
        raise _wrong_dtype(dtype)
    return numpy_type.itemsize, lambda memory, shape: memory.view(numpy_type).reshape(shape)


def _wrong_dtype(dtype: Any) -> InvalidArgument:
    return InvalidArgument(
        f'dtype is {dtype!r}: use "bf16", "fp16" or "fp32", or a NumPy or torch type of these',
        field="dtype",
    )
