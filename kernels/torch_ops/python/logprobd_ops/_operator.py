"""Loads the library of torch.ops.logprobd, and builds the arguments of its operators and the types of their results."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import itertools
import os
import pathlib
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from logprobd_ops._memory import gradients_needed
from logprobd_ops._tensor_kinds import check_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import ProcessGroup

# The name does not begin with LOGPROBD_, because the server rejects unknown variables with this
# prefix.
LIBRARY_VARIABLE = "LINEAR_LOGPROB_LIBRARY"
LIBRARY_PREFIX = "liblogprobd_torch_ops-torch"
# Kernels and operator must have the same version.
VERSION = "0.2.0"
BUILD_LIBRARY = (
    "To build the library for this torch, with a C++ compiler, run: pip install 'setuptools>=77' && "
    "pip install --no-build-isolation --no-deps --force-reinstall --no-binary logprobd-ops "
    f"logprobd-ops=={VERSION}"
)

WHOLE_VOCABULARY = -1  # value of the operators' vocab_valid

OutOfVocab = Literal["error", "zero"]
Reduction = Literal["sum", "mean"]
HiddenGradient = Literal["sum", "partial"]


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
    hidden_gradient: HiddenGradient
    hidden_splits: int
    autocast: bool


HEAD_OPTION_NAMES = frozenset(HeadOptions.__annotations__)


@dataclasses.dataclass(kw_only=True)
class VocabularyParallel:
    """Which part of the vocabulary a rank holds, and what the ranks of a group share. linear_logprob describes the
    fields."""

    vocab_start: int = 0
    vocab_valid: int | None = None
    process_group: ProcessGroup | None = None
    sequence_parallel: bool = False
    hidden_gradient: HiddenGradient = "sum"

    def arguments(self) -> dict[str, Any]:
        """Returns the operators' arguments. Raises a ValueError that names the argument for values that C++ cannot
        check."""
        if self.hidden_gradient not in ("sum", "partial"):
            raise ValueError(
                f'hidden_gradient is {self.hidden_gradient!r}: it must be "sum" or "partial"'
            )
        group = self.process_group
        return {
            "vocab_start": self.vocab_start,
            "vocab_valid": WHOLE_VOCABULARY if self.vocab_valid is None else self.vocab_valid,
            "group": "" if group is None else group.group_name,
            "sequence_parallel": self.sequence_parallel,
            "partial_hidden_gradient": self.hidden_gradient == "partial",
        }


_PARALLEL_NAMES = tuple(field.name for field in dataclasses.fields(VocabularyParallel))


def split_parallel(options: dict[str, Any]) -> tuple[VocabularyParallel, dict[str, Any]]:
    """Returns the vocabulary-parallel options among `options`, and the others."""
    parallel = {name: value for name, value in options.items() if name in _PARALLEL_NAMES}
    others = {name: value for name, value in options.items() if name not in _PARALLEL_NAMES}
    return VocabularyParallel(**parallel), others


def check_head_options(function: str, names: Iterable[str]) -> None:
    """Raises the TypeError of a function that does not have one of these keyword arguments."""
    for name in names:
        if name not in HEAD_OPTION_NAMES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def softcap_argument(softcap: float | None, name: str = "softcap") -> float:
    """Returns the operators' value of a cap, 0 for none. Raises a ValueError that names the argument for a cap that is
    not above 0."""
    if softcap is None:
        return 0.0
    if not softcap > 0:
        raise ValueError(f"{name} is {softcap}: it must be above 0, or None for no cap")
    return float(softcap)


def check_reduction(reduction: Reduction) -> None:
    """Raises a ValueError for a reduction that the losses with gradients in the forward do not have."""
    if reduction not in get_args(Reduction):
        raise ValueError(f'reduction is {reduction!r}: it must be "sum" or "mean"')


def _library_of_torch(folder: pathlib.Path, torch_version: str) -> pathlib.Path:
    """Returns the library in a folder for a version of torch. Raises an ImportError that lists the versions
    that have one."""
    minor = ".".join(torch_version.split(".")[:2])
    library = folder / f"{LIBRARY_PREFIX}{minor}.so"
    if library.exists():
        return library
    found = [
        path.stem.removeprefix(LIBRARY_PREFIX) for path in folder.glob(f"{LIBRARY_PREFIX}*.so")
    ]
    if not found:
        raise ImportError(
            f"{folder} has no library, because it is a folder of sources: install the package, or set "
            f"{LIBRARY_VARIABLE} to the library that the CMake target logprobd_torch_ops builds"
        )
    versions = ", ".join(
        sorted(found, key=lambda version: [int(part) for part in version.split(".")])
    )
    raise ImportError(
        f"logprobd-ops has no library for torch {torch_version}, only for {versions}: install one of these versions. "
        + BUILD_LIBRARY
    )


def load_library() -> None:
    """Loads the library that LINEAR_LOGPROB_LIBRARY names, or the one in this package for the imported
    torch if the variable is not set. Raises an ImportError that says how to get the library."""
    path = os.environ.get(LIBRARY_VARIABLE)
    if not path:
        path = str(_library_of_torch(pathlib.Path(__file__).parent, torch.__version__))
        try:
            import logprobd_kernels  # noqa: PLC0415 (other libraries have the kernels beside them)

            if logprobd_kernels.__version__ != VERSION:
                raise ImportError(
                    f"logprobd-kernels has version {logprobd_kernels.__version__}, not {VERSION}"
                )
            # The operator's library finds them by name, since they are loaded.
            ctypes.CDLL(str(logprobd_kernels.library_path()))
        except (ImportError, OSError) as error:
            raise ImportError(
                f"cannot load the kernels: {error}. Run: pip install --force-reinstall --no-deps logprobd-kernels=={VERSION}"
            ) from None
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            # torch's own error does not say why.
            f"cannot load {path}: {error.__cause__ or error}. It may be built for another torch than {torch.__version__}, for example "
            f"one with CUDA. {BUILD_LIBRARY}"
        ) from None


def _concatenated(lists: Sequence[Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the candidates of all rows one after another, and where those of each row begin. Raises a
    ValueError that names the index of a wrong item."""
    if len(lists) != target.numel():
        raise ValueError(
            f"candidate_ids is a list of {len(lists)} tensors, but target has {target.numel()} elements: "
            "there must be one tensor per row"
        )
    for index, ids in enumerate(lists):
        if not isinstance(ids, Tensor):
            raise ValueError(
                f"candidate_ids[{index}] is of type {type(ids).__name__}: every item of the list must be a tensor"
            )
        if ids.numel() == 0:
            continue  # torch.tensor([]) is fp32.
        if (
            ids.is_floating_point()
            or ids.is_complex()
            or ids.dtype in (torch.bool, torch.uint64)  # uint64 may wrap around.
        ):
            raise ValueError(f"candidate_ids[{index}] is {ids.dtype}: ids must be integers")
        if ids.device != target.device:
            raise ValueError(
                f"candidate_ids[{index}] is on {ids.device}, but target is on {target.device}"
            )
    ends = itertools.accumulate((ids.numel() for ids in lists), initial=0)
    offsets = torch.tensor(list(ends), dtype=torch.int64, device=target.device)
    none = torch.empty(0, dtype=torch.int64, device=target.device)
    ids_of_rows = [ids.reshape(-1).long() for ids in lists if ids.numel() > 0]
    return torch.cat([none, *ids_of_rows]), offsets


def result_type(operator: str) -> Any:
    """Returns the type of an operator's results: a named tuple with the names of its schema."""
    returns = getattr(torch.ops.logprobd, operator).default._schema.returns
    return collections.namedtuple(f"{operator}_results", [result.name for result in returns])


def split_temperature(
    temperature: float | Tensor, shape: torch.Size
) -> tuple[float, Tensor | None]:
    """Returns the operators' temperature and row_temperature for rows of this shape."""
    if not isinstance(temperature, Tensor):
        return float(temperature), None
    return 1.0, temperature if temperature.dim() else temperature.expand(shape)


def linear_logprob_arguments(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    parallel: VocabularyParallel,
    need_entropy: bool = True,
    mean_logit_weights: Tensor | None = None,
    out_of_vocab: OutOfVocab = "error",
    return_argmax: bool = False,
    return_mean_logit: bool = False,
    return_max_logit: bool = False,
    return_min_logit: bool = False,
    return_sum_p_squared: bool = False,
    return_target_rank: bool = False,
    top_k: int = 0,
    candidate_ids: Tensor | Sequence[Tensor] | None = None,
    candidate_offsets: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    hidden_splits: int = 2,
    autocast: bool = True,
    need_gradients: bool = False,
) -> dict[str, Any]:
    """Returns the arguments that linear_logprob and linear_logprob_loss have in common, by their names in the schema,
    without those of LogitCache. Autograd sets `need_gradients` itself, so only callers of the backward operator pass
    True. Raises a ValueError that names the argument for invalid values that C++ cannot check."""
    check_tensors(
        hidden=hidden,
        weight=weight,
        target=target,
        bias=bias,
        temperature=temperature,
        mean_logit_weights=mean_logit_weights,
        candidate_ids=candidate_ids,
        candidate_offsets=candidate_offsets,
    )
    if out_of_vocab not in ("error", "zero"):
        raise ValueError(f'out_of_vocab is {out_of_vocab!r}: it must be "error" or "zero"')
    softcap_number = softcap_argument(softcap)
    if candidate_ids is not None and not isinstance(candidate_ids, Tensor):
        if candidate_offsets is not None:
            raise ValueError(
                "candidate_offsets: a list of candidate_ids has no offsets; concatenate the list or omit them"
            )
        candidate_ids, candidate_offsets = _concatenated(candidate_ids, target)
    number, row_temperature = split_temperature(temperature, target.shape)
    return {
        "hidden": hidden,
        "weight": weight,
        "target": target,
        "bias": bias,
        "row_temperature": row_temperature,
        "mean_logit_weights": mean_logit_weights,
        "candidate_ids": candidate_ids,
        "candidate_offsets": candidate_offsets,
        "temperature": number,
        "scale": float(scale),
        "softcap": softcap_number,
        "ignore_index": ignore_index,
        "out_of_vocab_is_zero": out_of_vocab == "zero",
        "need_entropy": need_entropy,
        "need_argmax": return_argmax,
        "need_mean_logit": return_mean_logit,
        "need_max_logit": return_max_logit,
        "need_min_logit": return_min_logit,
        "need_sum_p_squared": return_sum_p_squared,
        "need_target_rank": return_target_rank,
        "top_k": top_k,
        "autocast": autocast,
        "hidden_splits": hidden_splits,
        "need_gradients": need_gradients,
        **parallel.arguments(),
    }


def needed_gradients(*inputs: Tensor | None) -> dict[str, bool]:
    """Returns the losses' arguments that say which gradients of hidden, weight and bias the forward forms."""
    names = ("needs_d_hidden", "needs_d_weight", "needs_d_bias")
    return dict(zip(names, gradients_needed(*inputs), strict=True))
