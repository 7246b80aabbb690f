"""Refuses tensors that the operators cannot read, before torch fails in its dispatcher.

The operators take dense tensors, on the meta device for shapes alone, and subclasses that compute as torch does, such as
torch.nn.Parameter. Those of tracing and of functional collectives convert themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

# By name, because importing their modules takes long.
_ACCEPTED_WRAPPERS = frozenset({"AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor"})


def check_tensors(**arguments: object) -> None:
    """Raises a ValueError that names the argument, its kind and a remedy if one of the arguments is a
    tensor of a kind that the operators do not take."""
    if torch.compiler.is_compiling():
        return
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        other = _other_kind(value)
        if other is not None:
            kind, remedy = other
            raise ValueError(
                f"{name} is {kind}: the operator takes plain tensors; {remedy.format(name=name)}"
            )


def _other_kind(tensor: Tensor) -> tuple[str, str] | None:
    """Returns what a tensor is and the remedy, or None if the operators take it."""
    if tensor.is_nested:
        if tensor.layout is torch.jagged:
            return "a nested tensor", "pass {name}.values(), its packed rows"
        return (
            "a nested tensor of the strided layout",
            "pass torch.cat({name}.unbind()), its packed rows",
        )
    kind = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        names = {base.__name__ for base in kind.__mro__}
        if "DTensor" in names:
            return (
                "a DTensor",
                "call it in the forward of FSDP's root module, which gathers {name}, or pass "
                "{name}.full_tensor(), or {name}.to_local() with process_group and vocab_start if it "
                "is a weight whose rows are sharded",
            )
        if names.isdisjoint(_ACCEPTED_WRAPPERS):
            return f"of the type {kind.__name__}, which computes in its own way", "convert {name}"
        return None
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype})", "pass {name}.dequantize()"
    if tensor.layout is not torch.strided:
        return f"of the layout {tensor.layout}", "pass {name}.to_dense()"
    return None
