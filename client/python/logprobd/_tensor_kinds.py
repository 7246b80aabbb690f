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


def packed(value: Any, name: str) -> tuple[Any, Offsets | None]:
    """Returns the rows of a jagged nested tensor [sequences, (length), ...] one after another, as
    [rows, ...], and the offsets of the sequences, [sequences + 1]. Returns any other value
    unchanged, and None.

    Raises InvalidArgument.
    """
    if not is_jagged(value):
        return value, None
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
    return value.values(), value.offsets().cpu().numpy().astype(np.int64)


def check_same_sequences(offsets: Offsets | None, name: str, of_hidden: Offsets | None) -> None:
    """Raises InvalidArgument if two nested tensors do not have sequences of the same lengths. None
    stands for a value that is not nested."""
    if offsets is None or of_hidden is None or np.array_equal(offsets, of_hidden):
        return
    raise InvalidArgument(
        f"the sequences of {name} have the lengths {_lengths(offsets)}, but those of hidden have "
        f"{_lengths(of_hidden)}: nested tensors must have the same sequences",
        field=name,
    )


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
