"""Converts the kinds of torch tensors whose rows can be read to plain tensors, and refuses others.

Plain means dense, with values, and computed by torch itself. A subclass such as torch.nn.Parameter
is read as a plain tensor. A jagged nested tensor is read as packed rows.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from logprobd.errors import InvalidArgument

# Subclasses that compute in their own way, by name, because importing their modules takes long.
_WRAPPERS = {
    "DTensor": (
        "a DTensor, whose rows are spread over ranks",
        "{name}.full_tensor() gathers them, {name}.to_local() is the part of this rank",
    ),
    "AsyncCollectiveTensor": ("the result of a collective that still runs", "{name}.wait()"),
    "FakeTensor": (
        "a FakeTensor, which has no values",
        "call score outside of FakeTensorMode and of functions that torch.compile traces",
    ),
    "MaskedTensor": (
        "a MaskedTensor",
        "{name}.get_data(), with ignore_index as the target of masked rows",
    ),
}


Offsets = npt.NDArray[np.int64]
"""Where the sequences of a nested tensor begin among its rows, and the number of rows."""


def is_jagged(value: object) -> bool:
    """Returns whether `value` is a nested tensor of the layout torch.jagged."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.Tensor)
        and value.is_nested
        and value.layout == torch.jagged
    )


def pack(**values: Any) -> tuple[list[Any], Offsets | None]:
    """Replaces jagged nested tensors [sequences, (length), ...] by their rows one after another,
    [rows, ...], and leaves other values as they are.

    Returns the values, and the offsets of the sequences, [sequences + 1], or None if no value is
    nested. Raises InvalidArgument, also if the sequences of two values differ in their lengths.
    """
    nested = {name: _offsets(value, name) for name, value in values.items() if is_jagged(value)}
    if not nested:
        return list(values.values()), None
    first, offsets = next(iter(nested.items()))
    for name, others in nested.items():
        if not np.array_equal(others, offsets):
            raise InvalidArgument(
                f"the sequences of {name} have the lengths {_lengths(others)}, but those of "
                f"{first} have {_lengths(offsets)}: nested tensors must have the same sequences",
                field=name,
            )
    return [v.values() if name in nested else v for name, v in values.items()], offsets


def _offsets(value: Any, name: str) -> Offsets:
    if value.lengths() is not None:
        raise InvalidArgument(
            f"{name} is a nested tensor with gaps between its sequences: pass {name}.contiguous()",
            field=name,
        )
    if isinstance(value.shape[1], int):  # The extent of the ragged axis is symbolic.
        raise InvalidArgument(
            f"{name} is a nested tensor of the shape {tuple(value.shape)}: its second axis must be "
            f"the ragged one, as in [sequences, (length), hidden_size]; transpose it",
            field=name,
        )
    offsets: Offsets = value.offsets().cpu().numpy().astype(np.int64)
    return offsets


def _lengths(offsets: Offsets) -> str:
    lengths = np.diff(offsets).tolist()
    return str(lengths) if len(lengths) <= 8 else f"{str(lengths[:8])[:-1]}, ...]"


def plain(tensor: Any, name: str) -> Any:
    """Returns a torch.Tensor as a plain tensor.

    Raises InvalidArgument that names the kind and the remedy if it is of another kind.
    """
    torch = sys.modules["torch"]
    other = _other_kind(tensor, torch)
    if other is not None:
        kind, remedy = (text.format(name=name) for text in other)
        raise InvalidArgument(f"{name} is {kind}, not a plain tensor: {remedy}", field=name)
    if type(tensor) is not torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.as_subclass(torch.Tensor)
    return tensor.resolve_neg()


def _other_kind(tensor: Any, torch: Any) -> tuple[str, str] | None:
    """Returns what a tensor is and the remedy if it is not plain, otherwise None."""
    if tensor.is_nested:
        if tensor.layout == torch.jagged:
            return "a nested tensor", "pass {name}.values(), its packed rows"
        return (
            "a nested tensor of the strided layout",
            "torch.nested.nested_tensor({name}.unbind(), layout=torch.jagged) has the layout that "
            "score takes",
        )
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        for base in kind.__mro__:
            if base.__name__ in _WRAPPERS:
                return _WRAPPERS[base.__name__]
        return f"of the type {kind.__name__}, which computes in its own way", "convert it to one"
    if tensor.device.type == "meta":
        return "on the meta device, where tensors have no values", "compute it on a CPU or a GPU"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype})", "{name}.dequantize()"
    if tensor.layout != torch.strided:
        return f"of the layout {tensor.layout}", "{name}.to_dense()"
    return None
