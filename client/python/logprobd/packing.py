"""Shifts targets for packed and padded batches. `score` itself never shifts.

Row i of the hidden states predicts token i + 1. Both functions pair rows and targets accordingly
and leave out rows that predict nothing.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from logprobd import _tensor_kinds
from logprobd.arrays import Array, is_torch, to_numpy, to_offsets
from logprobd.errors import InvalidArgument
from logprobd.score_args import DEFAULT_IGNORE_INDEX


class Shifted(NamedTuple):
    """Arguments of score: `client.score(s.hidden, s.targets, segments=s.segments)`."""

    hidden: Array
    targets: Array
    """int64, so that it can hold any ignore_index."""
    segments: Array
    """Offsets of the sequences among the flattened rows, a NumPy array [sequences + 1] of int64."""


def from_packed(
    hidden: Array,
    input_ids: Array,
    cu_seqlens: Any = None,
    *,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
) -> Shifted:
    """Pairs hidden states and targets of sequences that are concatenated.

    Args:
        hidden: [tokens, hidden_size] or [1, tokens, hidden_size], or a nested tensor of the layout
            torch.jagged, [sequences, (length), hidden_size].
        input_ids: [tokens] or [1, tokens], or a nested tensor [sequences, (length)]: the ids from
            which the model computed `hidden`, of any integer type.
        cu_seqlens: [sequences + 1], offsets of the sequences, from 0 to tokens. None if hidden or
            input_ids is a nested tensor, which has them.

    Returns hidden unchanged, and targets of the shape of input_ids: targets[i] is input_ids[i + 1],
    or ignore_index for the last token of a sequence, which predicts nothing. logprob[i] is then the
    logprob of token i + 1, and 0 at the end of each sequence. Nested tensors become [tokens,
    hidden_size] and [tokens].

    Raises InvalidArgument.
    """
    (hidden, input_ids), sequences = _tensor_kinds.pack(hidden=hidden, input_ids=input_ids)
    if (cu_seqlens is None) == (sequences is None):
        raise InvalidArgument(
            "cu_seqlens is None: pass the offsets of the sequences, [sequences + 1]"
            if sequences is None
            else "cu_seqlens is given with a nested tensor, which has its own offsets: pass None",
            field="cu_seqlens",
        )
    hidden, ids = _plain(hidden, "hidden"), _to_int64(input_ids, "input_ids")
    shape = _shape(ids)
    is_flat = len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)
    if not is_flat or shape != _shape(hidden)[:-1]:
        raise InvalidArgument(
            f"input_ids has shape {shape}, hidden {_shape(hidden)}: pass [tokens] with "
            "[tokens, hidden_size], or both with a leading 1",
            field="input_ids",
        )
    offsets = to_offsets(cu_seqlens if sequences is None else sequences, "cu_seqlens", shape[-1])
    targets = _copy(ids)
    targets[..., :-1] = ids[..., 1:]
    ends = offsets[1:][np.diff(offsets) > 0] - 1
    targets[..., ends] = ignore_index
    return Shifted(hidden, targets, offsets)


def from_padded(
    hidden: Array,
    input_ids: Array,
    attention_mask: Array | None = None,
    *,
    keep_last: int | None = None,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
) -> Shifted:
    """Pairs hidden states and targets of sequences that are padded on either side to one length.

    Args:
        hidden: [batch, length, hidden_size].
        input_ids: [batch, length], the ids from which the model computed `hidden`, of any integer
            type.
        attention_mask: [batch, length], 0 for padding and 1 for tokens. Integers above 1 are the
            numbers of documents that are packed into one row: a token is not scored if its
            predecessor has another number. None means that there is no padding.
        keep_last: number of last tokens to score (the responses), 1 to length - 1. None scores all
            tokens except the first.

    Returns hidden [batch, R, hidden_size] (a view) and targets [batch, R], where R is keep_last or
    length - 1: logprob[:, j] is the logprob of token input_ids[:, length - R + j]. The target of a
    token that is padding, or that does not follow a token of its document, is ignore_index.

    Raises InvalidArgument.
    """
    for name, value in (("hidden", hidden), ("input_ids", input_ids)):
        if _tensor_kinds.is_jagged(value):
            raise InvalidArgument(
                f"{name} is a nested tensor, which has no padding: from_packed takes it", field=name
            )
    hidden, ids = _plain(hidden, "hidden"), _to_int64(input_ids, "input_ids")
    shape = _shape(ids)
    if len(shape) != 2 or shape != _shape(hidden)[:-1]:
        raise InvalidArgument(
            f"input_ids has shape {shape}, hidden {_shape(hidden)}: pass [batch, length] and "
            "[batch, length, hidden_size]",
            field="input_ids",
        )
    batch, length = shape
    if length < 2:
        raise InvalidArgument(f"length is {length}: pass at least 2 tokens", field="input_ids")
    rows = length - 1 if keep_last is None else int(keep_last)
    if not 1 <= rows < length:
        raise InvalidArgument(
            f"keep_last is {rows}: it must be in [1, {length - 1}]", field="keep_last"
        )
    targets = _copy(ids[:, length - rows :])
    if attention_mask is not None:
        documents = _documents(attention_mask, shape)
        document = documents[:, length - rows :]
        # The first token of a document, or after padding, has no predecessor that predicts it.
        is_scored = (document != 0) & (document == documents[:, length - rows - 1 : length - 1])
        targets[_like(~is_scored, targets)] = ignore_index
    segments = np.arange(batch + 1, dtype=np.int64) * rows
    return Shifted(hidden[:, length - rows - 1 : length - 1], targets, segments)


def _documents(attention_mask: Any, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Returns the number of each token's document, 0 for padding. Raises InvalidArgument."""
    mask = to_numpy(attention_mask, "attention_mask")
    if mask.shape != shape:
        raise InvalidArgument(
            f"attention_mask has shape {mask.shape}: pass the shape of input_ids, {shape}",
            field="attention_mask",
        )
    # Floating-point numbers above 1 may be rounded numbers of documents, and masks that are added
    # to attention scores hold 0 for tokens.
    is_integer = mask.dtype.kind in "biu"
    is_wrong = mask < 0 if is_integer else ~((mask == 0) | (mask == 1))
    if is_wrong.any():
        raise InvalidArgument(
            f"attention_mask has the value {mask[is_wrong][0]} and the type {mask.dtype}: pass 0 "
            "for padding and 1 for tokens, or the numbers of packed documents as integers above 0",
            field="attention_mask",
        )
    return mask.astype(np.int64)


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(int(extent) for extent in array.shape)


def _plain(array: Any, name: str) -> Any:
    return _tensor_kinds.plain(array, name) if is_torch(array) else array


def _copy(ids: Any) -> Any:
    return ids.clone() if is_torch(ids) else ids.copy()


def _like(values: npt.NDArray[np.bool_], targets: Any) -> Any:
    """Returns `values` as an index of the targets."""
    if not is_torch(targets):
        return values
    return sys.modules["torch"].from_numpy(values).to(targets.device)


def _to_int64(ids: Any, name: str) -> Any:
    """Returns ids as int64, which can hold a negative ignore_index. Raises InvalidArgument."""
    if is_torch(ids):
        torch = sys.modules["torch"]
        ids = _tensor_kinds.plain(ids, name)
        kind = ids.dtype
        is_integer = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
        signed = ids.to(torch.int64) if is_integer else ids
    else:
        ids = to_numpy(ids, name)
        kind = ids.dtype
        is_integer = kind.kind in "iu"
        signed = ids.astype(np.int64) if is_integer else ids
    if not is_integer:
        raise InvalidArgument(
            f"{name} has type {kind}: ids must be integers, such as int64", field=name
        )
    # Of unsigned integers only those of 64 bits can wrap around.
    if str(kind).endswith("uint64") and (signed < 0).any():
        raise InvalidArgument(f"{name} has an id of 2^63 or more, must fit in int32", field=name)
    return signed
