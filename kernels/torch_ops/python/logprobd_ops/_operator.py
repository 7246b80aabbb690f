"""Loads the library of torch.ops.logprobd and builds the flat argument lists of its operators."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

LIBRARY_NAME = "liblogprobd_torch_ops.so"
# The name does not begin with LOGPROBD_, because the server rejects unknown variables with this
# prefix.
LIBRARY_VARIABLE = "LINEAR_LOGPROB_LIBRARY"

WHOLE_VOCABULARY = -1  # value of the operators' vocab_valid

OutOfVocab = Literal["error", "zero"]


class HeadOptions(TypedDict, total=False):
    """Options of the head that every function of this package accepts. linear_logprob describes
    them."""

    temperature: float | Tensor
    scale: float
    softcap: float | None
    ignore_index: int
    vocab_start: int
    vocab_valid: int | None
    process_group: ProcessGroup | None
    sequence_parallel: bool
    hidden_splits: int
    autocast: bool


HEAD_OPTION_NAMES = frozenset(HeadOptions.__annotations__)


def check_head_options(function: str, names: Iterable[str]) -> None:
    """Raises the TypeError of a function that does not have one of these keyword arguments."""
    for name in names:
        if name not in HEAD_OPTION_NAMES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def load_library() -> None:
    """Loads the library that LINEAR_LOGPROB_LIBRARY names, or the one in this package if the
    variable is not set. Raises an ImportError that says how to get the library."""
    path = os.environ.get(LIBRARY_VARIABLE) or pathlib.Path(__file__).with_name(LIBRARY_NAME)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"cannot load {path}: {error}. Build the CMake target logprobd_torch_ops with the torch that "
            f"is imported here ({torch.__version__}), and set {LIBRARY_VARIABLE} to the path of {LIBRARY_NAME}"
        ) from None


def linear_logprob_arguments(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    need_entropy: bool,
    mean_logit_weights: Tensor | None,
    out_of_vocab: OutOfVocab,
    return_argmax: bool,
    return_mean_logit: bool,
    keep_logits: int,
    cached_rows: int,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_start: int = 0,
    vocab_valid: int | None = None,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    hidden_splits: int = 2,
    autocast: bool = True,
) -> tuple[Any, ...]:
    """Returns the arguments in the order of the fields in kernels/torch_ops/api/linear_logprob.h.
    Raises a ValueError that names the argument for invalid values that C++ cannot check."""
    if out_of_vocab not in ("error", "zero"):
        raise ValueError(f'out_of_vocab is {out_of_vocab!r}: it must be "error" or "zero"')
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}: it must be above 0, or None for no cap")
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
        WHOLE_VOCABULARY if vocab_valid is None else vocab_valid,
        "" if process_group is None else process_group.group_name,
        sequence_parallel,
        out_of_vocab == "zero",
        need_entropy,
        return_argmax,
        return_mean_logit,
        keep_logits,
        cached_rows,
        autocast,
        hidden_splits,
    )
