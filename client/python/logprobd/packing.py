"""Shifts targets for packed and padded batches. `score` itself never shifts.

Row i of the hidden states predicts token i + 1. Both functions pair rows and targets accordingly
and leave out rows that predict nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from logprobd.arrays import Array, is_torch, to_numpy, to_offsets
from logprobd.errors import InvalidArgument
from logprobd.score_args import DEFAULT_IGNORE_INDEX


class Shifted(NamedTuple):
    """Arguments of score: `client.score(s.hidden, s.targets, segments=s.segments)`."""

    hidden: Array
    targets: Array
    segments: Array
    """Offsets of the sequences among the flattened rows, a NumPy array [sequences + 1] of int64."""


def from_packed(
    hidden: Array,
    input_ids: Array,
    cu_seqlens: Any,
    *,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
) -> Shifted:
    """Pairs hidden states and targets of sequences that are concatenated.

    Args:
        hidden: [tokens, hidden_size] or [1, tokens, hidden_size].
        input_ids: [tokens] or [1, tokens], the ids from which the model computed `hidden`.
        cu_seqlens: [sequences + 1], offsets of the sequences, from 0 to tokens.

    Returns hidden unchanged, and targets of the shape of input_ids: targets[i] is input_ids[i + 1],
    or ignore_index for the last token of a sequence, which predicts nothing. logprob[i] is then the
    logprob of token i + 1, and 0 at the end of each sequence.

    Raises InvalidArgument.
    """
    ids_shape = _shape(input_ids)
    is_flat = len(ids_shape) == 1 or (len(ids_shape) == 2 and ids_shape[0] == 1)
    if not is_flat or ids_shape != _shape(hidden)[:-1]:
        raise InvalidArgument(
            f"input_ids has shape {ids_shape}, hidden {_shape(hidden)}: pass [tokens] with "
            "[tokens, hidden_size], or both with a leading 1",
            field="input_ids",
        )
    offsets = to_offsets(cu_seqlens, "cu_seqlens", ids_shape[-1])
    targets = _copy(input_ids)
    targets[..., :-1] = input_ids[..., 1:]
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
        input_ids: [batch, length], the ids from which the model computed `hidden`.
        attention_mask: [batch, length], 0 for padding. None means that there is no padding.
        keep_last: number of last tokens to score (the responses), 1 to length - 1. None scores all
            tokens except the first.

    Returns hidden [batch, R, hidden_size] (a view) and targets [batch, R], where R is keep_last or
    length - 1: logprob[:, j] is the logprob of token input_ids[:, length - R + j]. The target of a
    token that is padding or follows padding is ignore_index.

    Raises InvalidArgument.
    """
    shape = _shape(input_ids)
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
    targets = _copy(input_ids[:, length - rows :])
    if attention_mask is not None:
        if _shape(attention_mask) != shape:
            raise InvalidArgument(
                f"attention_mask has shape {_shape(attention_mask)}: pass the shape of input_ids, "
                f"{shape}",
                field="attention_mask",
            )
        real = attention_mask != 0
        # The first token after padding on the left has no predecessor that predicts it.
        scored = real[:, length - rows :] & real[:, length - rows - 1 : length - 1]
        targets[~scored] = ignore_index
    segments = np.arange(batch + 1, dtype=np.int64) * rows
    return Shifted(hidden[:, length - rows - 1 : length - 1], targets, segments)


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(int(extent) for extent in array.shape)


def _copy(ids: Any) -> Any:
    """Returns a writable copy that can hold a negative ignore_index."""
    return ids.clone() if is_torch(ids) else to_numpy(ids, "input_ids").astype(np.int64)
