"""Converts torch, NumPy and DLPack inputs to bytes, and results to the caller's kind of array.

torch and ml_dtypes are imported only if the caller's own arrays come from them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from logprobd import _rows, _tensor_kinds
from logprobd._protobuf import Buffer
from logprobd.errors import InvalidArgument

Array = Any
"""A torch.Tensor or a numpy.ndarray."""

Ints = npt.NDArray[np.int64]
Rows = slice | Ints
"""Rows of a call: a range, or row indices in ascending order."""

_NUMPY_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ALIASES = {**_NUMPY_NAMES, "half": "fp16"}
_TORCH_NAMES = {short: name for name, short in _NUMPY_NAMES.items()}
_KDLCPU = 1
DEVICE_ALIGNMENT = 16
"""Required alignment, in bytes, of rows that the server reads from GPU memory."""


def is_torch(value: object) -> bool:
    """Returns whether `value` is a torch.Tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def bf16_from_fp32(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to bfloat16 (to nearest, ties to even) and returns the bits. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(
        16
    )
    # Rounding could overflow a NaN's mantissa into the sign, so NaN is truncated and made quiet.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def fp32_from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Returns the exact values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class OutputKind:
    """Converts NumPy results to the caller's kind: NumPy, or torch on the device of `hidden`."""

    def __init__(self, device: Any = None) -> None:
        self._device = device

    def give(self, values: npt.NDArray[Any]) -> Array:
        if self._device is None:
            return values
        torch = sys.modules["torch"]
        # reshape undoes ascontiguousarray's change of a scalar (a single row) to one dimension.
        return torch.from_numpy(np.ascontiguousarray(values).reshape(values.shape)).to(self._device)


class HiddenRows:
    """Hidden states [..., hidden_size] viewed as [rows, hidden_size].

    Rows are copied only when `take`, `copy_to` or `device_rows` requests them. A non-contiguous
    input is gathered, and a CUDA tensor is copied, one chunk at a time.
    """

    def __init__(
        self,
        array: Any,
        dtype: str,
        kind: OutputKind,
        to_bytes: Callable[[Any], Buffer],
        *,
        write: Callable[[Any, Rows, _rows.Bytes], None],
        is_as_sent: bool,
    ) -> None:
        shape = tuple(int(extent) for extent in array.shape)
        if not shape:
            raise InvalidArgument(
                "hidden is a scalar: pass hidden states [..., hidden_size]", field="hidden"
            )
        self.leading_shape = shape[:-1]
        self.hidden_size = shape[-1]
        self.rows = int(np.prod(self.leading_shape, dtype=np.int64))
        self.dtype = dtype
        self.kind = kind
        self.row_bytes = self.hidden_size * _rows.DTYPE_BYTES[dtype]
        self.is_cuda = is_torch(array) and array.device.type == "cuda"
        self._to_bytes = to_bytes
        self._write = write
        self._is_as_sent = is_as_sent
        self._array, self._is_flat = _flatten(array, self.rows, self.hidden_size)

    def take(self, rows: Rows) -> Buffer:
        """Returns the bytes of some rows, possibly as a view of the caller's memory. They are valid
        until the next call."""
        if self._is_flat:
            return self._to_bytes(self._array[rows])
        flat = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return self._to_bytes(self._array[np.unravel_index(flat, self.leading_shape)])

    def copy_to(self, rows: Rows, out: _rows.Bytes) -> None:
        """Converts some rows and writes their bytes contiguously to `out`, a uint8 array
        [rows * row_bytes]. Large NumPy copies use several threads; torch uses its own threads."""

        def write(some: Rows, part: _rows.Bytes) -> None:
            if self._is_flat:
                self._write(self._array, some, part)
                return
            outer = self.leading_shape[:-1]
            for block, within, begin, end in _rows.blocks(some, self.leading_shape[-1]):
                index = tuple(int(i) for i in np.unravel_index(block, outer))
                target = part[begin * self.row_bytes : end * self.row_bytes]
                self._write(self._array[index], within, target)

        if is_torch(self._array):
            write(rows, out)
        else:
            _rows.in_parallel(write, rows, out)

    def host_address(self, rows: Rows) -> int | None:
        """Returns the address of some rows if host memory contains them exactly as they would be
        sent; otherwise returns None."""
        if not self._is_as_sent or not self._is_flat or not isinstance(rows, slice):
            return None
        part = self._array[rows]
        if is_torch(part):
            is_here = part.device.type == "cpu" and part.is_contiguous()
            return int(part.data_ptr()) if is_here else None
        return int(part.ctypes.data) if part.flags.c_contiguous else None

    def device_rows(self, rows: Rows) -> Any:
        """Returns some rows of a CUDA tensor as they would be sent, contiguous on its device. The
        result is a view of the caller's memory if possible."""
        torch = sys.modules["torch"]
        if self._is_flat:
            index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
            part = self._array[index]
        else:
            flat = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            indices = np.unravel_index(flat, self.leading_shape)
            part = self._array[tuple(torch.from_numpy(index) for index in indices)]
        part = part.to(getattr(torch, _TORCH_NAMES[self.dtype])).contiguous()
        return part if part.data_ptr() % DEVICE_ALIGNMENT == 0 else part.clone()


def _flatten(array: Any, rows: int, hidden_size: int) -> tuple[Any, bool]:
    """Returns `array` as [rows, hidden_size] and True if that needs no copy; otherwise returns it
    unchanged and False."""
    if array.ndim == 2:
        return array, True
    if array.ndim == 1:
        return array[None], True
    if is_torch(array):
        try:
            return array.view(rows, hidden_size), True
        except RuntimeError:
            return array, False
    return (array.reshape(rows, hidden_size), True) if array.flags.c_contiguous else (array, False)


def dtype_name(dtype: str) -> str:
    """Returns "bf16", "fp16" or "fp32" for this name or another one of the type. Raises
    InvalidArgument."""
    dtype = _ALIASES.get(dtype, dtype)
    if dtype not in _NUMPY_NAMES.values():
        raise InvalidArgument(f'dtype is "{dtype}": use "bf16", "fp16" or "fp32"', field="dtype")
    return dtype


def hidden_rows(hidden: Any, dtype: str | None = None, name: str = "hidden") -> HiddenRows:
    """Wraps the hidden states of a call, or other rows that errors call `name`.

    `dtype` ("bf16", "fp16", "fp32") is the type of the content of a uint16 array, or requests a
    conversion (to nearest, ties to even). Without it, `hidden` must have one of these types and is
    sent unchanged. Raises InvalidArgument.
    """
    if dtype is not None:
        dtype = dtype_name(dtype)
    if is_torch(hidden):
        return _torch_rows(_tensor_kinds.plain(hidden, name), dtype, name)
    array = _as_numpy(hidden, name)
    if is_torch(array):  # DLPack memory that only torch can read; the results are NumPy arrays
        rows = _torch_rows(array, dtype, name)
        rows.kind = OutputKind()
        return rows
    return _numpy_rows(array, dtype, name)


def _as_numpy(value: Any, name: str) -> Any:
    """Returns `value` as a NumPy array, or as a torch tensor if NumPy cannot read its memory."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        device = value.__dlpack_device__()[0] if hasattr(value, "__dlpack_device__") else _KDLCPU
        if int(device) == _KDLCPU:
            try:
                return np.from_dlpack(value)
            except (BufferError, RuntimeError, TypeError):  # for example bfloat16
                if hasattr(value, "__array__"):
                    return np.asarray(value)
        try:
            import torch  # noqa: PLC0415 - only for memory that NumPy cannot read
        except ImportError as error:
            raise InvalidArgument(
                "NumPy cannot read this DLPack array (device memory or bfloat16): install torch, "
                "or pass a NumPy array",
                field=name,
            ) from error
        return torch.from_dlpack(value)
    return np.asarray(value)


def _numpy_rows(array: npt.NDArray[Any], dtype: str | None, name: str) -> HiddenRows:
    kind = array.dtype.name
    if kind == "uint16":
        if dtype != "bf16":
            raise InvalidArgument(
                f'{name} is uint16: pass dtype="bf16" if it holds bfloat16 bits', field=name
            )
        given = "bf16"
    elif kind in _NUMPY_NAMES:
        given = _NUMPY_NAMES[kind]
    elif kind == "float64" and dtype is not None:
        given = "float64"
    else:
        raise _wrong_type(name, kind, "astype(numpy.float32)")
    sent = dtype or given

    def to_bytes(rows: npt.NDArray[Any]) -> Buffer:
        return _numpy_bytes(_numpy_convert(rows, given, sent))

    def write(rows: npt.NDArray[Any], some: Rows, out: _rows.Bytes) -> None:
        convert = None if given == sent else lambda part: _numpy_convert(part, given, sent)
        _rows.write_numpy(rows, some, out, sent, convert)

    is_as_sent = given == sent and array.dtype.byteorder != ">"
    return HiddenRows(array, sent, OutputKind(), to_bytes, write=write, is_as_sent=is_as_sent)


def _numpy_convert(rows: npt.NDArray[Any], given: str, sent: str) -> npt.NDArray[Any]:
    if given == sent:
        return rows
    if given == "bf16":
        rows = fp32_from_bf16(np.ascontiguousarray(rows).view(np.uint16))
    if sent == "bf16":
        return bf16_from_fp32(rows.astype(np.float32))
    return rows.astype(np.float16 if sent == "fp16" else np.float32)


def _numpy_bytes(rows: npt.NDArray[Any]) -> Buffer:
    if rows.size == 0:
        return b""
    rows = np.ascontiguousarray(rows)
    if rows.dtype.byteorder == ">":
        rows = rows.astype(rows.dtype.newbyteorder("<"))
    return rows.view(np.uint8).reshape(-1).data


def _torch_rows(tensor: Any, dtype: str | None, name: str) -> HiddenRows:
    torch = sys.modules["torch"]
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    types = {short: kind for kind, short in names.items()}
    given = names.get(tensor.dtype)
    if given is None and (dtype is None or tensor.dtype != torch.float64):
        raise _wrong_type(name, str(tensor.dtype), "float()")
    sent = dtype or given
    assert sent is not None
    if tensor.requires_grad and torch.is_grad_enabled():
        warnings.warn(
            "hidden requires grad, but scores carry no gradients: call score under torch.no_grad() "
            "or with hidden.detach(); for scores with gradients use the operator logprobd_ops",
            UserWarning,
            stacklevel=2,
        )
    staging = _Staging()

    def to_bytes(rows: Any) -> Buffer:
        rows = rows.to(types[sent]).contiguous()
        if rows.numel() == 0:
            return b""
        # NumPy has no bfloat16, so the bytes are viewed as integers of the same width.
        rows = rows.view(torch.int32 if sent == "fp32" else torch.int16)
        host = rows if rows.device.type == "cpu" else staging.copy(rows)
        return cast(memoryview, host.numpy().view(np.uint8).reshape(-1).data)

    def write(source: Any, some: Rows, out: _rows.Bytes) -> None:
        _rows.write_torch(source, some, out, types[sent])

    kind = OutputKind(tensor.device)
    return HiddenRows(tensor.detach(), sent, kind, to_bytes, write=write, is_as_sent=given == sent)


class _Staging:
    """Page-locked memory through which the chunks of a call are copied from the GPU."""

    def __init__(self) -> None:
        self._buffer: Any = None

    def copy(self, rows: Any) -> Any:
        if rows.device.type != "cuda":
            return rows.cpu()
        torch = sys.modules["torch"]
        if self._buffer is None or self._buffer.numel() < rows.numel():
            self._buffer = torch.empty(rows.numel(), dtype=rows.dtype, pin_memory=True)
        host = self._buffer[: rows.numel()].view(rows.shape)
        host.copy_(rows, non_blocking=True)
        torch.cuda.current_stream(rows.device).synchronize()
        return host


def _wrong_type(name: str, kind: str, cure: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} has type {kind}, but must have bfloat16, float16 or float32: convert it "
        f'({name}.{cure}), or pass dtype="fp32" to round it',
        field=name,
    )


def to_numpy(value: Any, name: str) -> npt.NDArray[Any]:
    """Converts a small argument (ids, offsets, temperatures) to a NumPy array.

    Raises InvalidArgument.
    """
    if is_torch(value):
        value = _tensor_kinds.plain(value, name).detach().cpu()
        torch = sys.modules["torch"]
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    try:
        array = _as_numpy(value, name)
        return np.asarray(array.cpu().numpy() if is_torch(array) else array)
    except ValueError as error:  # ragged lists
        raise InvalidArgument(f"{name} is not an array: {error}", field=name) from error


def to_int32(value: Any, name: str) -> npt.NDArray[np.int32]:
    """Converts ids to int32. Raises InvalidArgument if they are not integers or do not fit."""
    array = to_numpy(value, name)
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{name} has type {array.dtype}: ids must be integers (int32 or int64)", field=name
        )
    info = np.iinfo(np.int32)
    outside = (
        (array > info.max) if array.dtype.kind == "u" else (array > info.max) | (array < info.min)
    )
    if outside.any():
        index = int(np.flatnonzero(outside)[0])
        raise InvalidArgument(
            f"{name}[{index}]: {array.reshape(-1)[index]}, must fit in int32",
            field=name,
            row=index if name == "targets" else None,
        )
    return array.astype(np.int32)


def to_offsets(value: Any, name: str, end: int) -> Ints:
    """Converts offsets of consecutive ranges, which start at 0, never decrease and end at `end`.

    Raises InvalidArgument.
    """
    array = to_numpy(value, name)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{name} has shape {array.shape} and type {array.dtype}: pass integer offsets [n + 1]",
            field=name,
        )
    offsets = array.astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        raise InvalidArgument(
            f"{name} must start at 0, never decrease, and end at {end}; it starts at {offsets[0]} "
            f"and ends at {offsets[-1]}",
            field=name,
        )
    return offsets


def to_temperatures(
    value: Any, shape: tuple[int, ...]
) -> tuple[float | None, npt.NDArray[np.float32] | None]:
    """Converts the temperature of rows of this shape to one number, of which None means 1, or to
    an array with the temperature of each row. Raises InvalidArgument."""
    array = to_numpy(value, "temperature")
    if array.dtype.kind not in "fiu":
        raise InvalidArgument(
            f"temperature has type {array.dtype}: pass a number or a float array",
            field="temperature",
        )
    if array.ndim == 0:
        return (None if float(array) == 1.0 else float(array)), None
    try:
        return None, np.broadcast_to(array.astype(np.float32), shape).reshape(-1)
    except ValueError:
        raise InvalidArgument(
            f"temperature has shape {array.shape}: pass a number, or an array that broadcasts "
            f"to the shape of targets, {shape}",
            field="temperature",
        ) from None


@dataclass(frozen=True)
class Candidates:
    """Further ids to score. Those of row r are ids[offsets[r] : offsets[r + 1]]."""

    ids: npt.NDArray[np.int32]
    offsets: Ints
    """[rows + 1]."""
    shape: tuple[int, ...] | None
    """Shape of the caller's array, or None if the caller gave lists."""

    def of_rows(self, rows: Ints | None) -> tuple[npt.NDArray[np.int32], Ints]:
        """Returns the ids and offsets of some rows; None means all."""
        if rows is None:
            return self.ids, self.offsets
        counts = np.diff(self.offsets)
        kept = np.zeros(len(counts), bool)
        kept[rows] = True
        offsets = np.concatenate(([0], np.cumsum(counts[rows], dtype=np.int64)))
        return self.ids[np.repeat(kept, counts)], offsets


def to_candidates(value: Any, shape: tuple[int, ...]) -> Candidates:
    """Converts candidates for rows of this shape: an array, lists, or a tuple of ids and offsets.

    Raises InvalidArgument.
    """
    name = "candidates"
    rows = int(np.prod(shape, dtype=np.int64))
    if isinstance(value, tuple) and len(value) == 2 and not isinstance(value[1], (int, np.integer)):
        ids = to_int32(value[0], name)
        offsets = to_offsets(value[1], name, ids.size)
        if ids.ndim != 1 or len(offsets) != rows + 1:
            raise InvalidArgument(
                f"candidates (ids, offsets) have shapes {ids.shape} and {offsets.shape}: pass "
                f"ids [n] and offsets [{rows + 1}]",
                field=name,
            )
        return Candidates(ids, offsets, None)
    if isinstance(value, (list, tuple)):
        lists = [to_int32(ids, name) for ids in value]
        if lists and all(ids.ndim == 0 for ids in lists):
            shown = ", ".join(str(int(i)) for i in value[:3]) + (", ..." if len(value) > 3 else "")
            raise InvalidArgument(
                f"candidates is a list of {len(value)} ids: pass a list with one list of ids per "
                f"row, such as [[{shown}]] * {rows} to score the same ids in each of the {rows} "
                "rows",
                field=name,
            )
        if len(lists) != rows or any(ids.ndim != 1 for ids in lists):
            raise InvalidArgument(
                f"candidates has {len(lists)} lists: pass one flat list of ids for each of the "
                f"{rows} rows",
                field=name,
            )
        flat = np.concatenate(lists) if lists else np.zeros(0, np.int32)
        offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in lists], dtype=np.int64)))
        return Candidates(flat, offsets.astype(np.int64), None)
    ids = to_int32(value, name)
    if ids.ndim == 0 or ids.shape[:-1] not in (shape, (rows,)):
        raise InvalidArgument(
            f"candidates has shape {ids.shape}: pass {(*shape, 'n')}, n ids per row", field=name
        )
    offsets = np.arange(rows + 1, dtype=np.int64) * ids.shape[-1]
    return Candidates(ids.reshape(-1), offsets, ids.shape)
