"""Cuts the rows of a call into requests that keep the server's limits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logprobd.errors import InvalidArgument

ROW_OVERHEAD_BYTES = 12  # target, temperature and candidate offset
MESSAGE_OVERHEAD_BYTES = 4096  # all other fields: names, numbers, tags


@dataclass(frozen=True)
class ChunkLimits:
    """What one request may hold; 0: no limit."""

    rows_max: int
    bytes_max: int
    candidates_max: int = 0


def cut_rows(
    rows: int,
    row_bytes: int,
    limits: ChunkLimits,
    candidate_offsets: npt.NDArray[np.int64] | None = None,
) -> list[tuple[int, int]]:
    """Half-open ranges of rows, in order, each within `limits`: as few as they allow, of about
    equal length, since a short last one would count as a small request, for which the server cuts
    its batches smaller.

    `row_bytes` are the bytes of a hidden row. No rows give one empty range: the request is still
    sent, so that its other fields are checked. Raises InvalidArgument when a single row breaks a
    limit.
    """
    if rows == 0:
        return [(0, 0)]
    budget = limits.bytes_max - MESSAGE_OVERHEAD_BYTES if limits.bytes_max else 1 << 62
    step = min(limits.rows_max or rows, max(1, budget // (row_bytes + ROW_OVERHEAD_BYTES)))
    step = -(-rows // -(-rows // step))
    if candidate_offsets is None:
        return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]

    counts = np.diff(candidate_offsets)
    candidates_max = limits.candidates_max or 1 << 62
    if counts.max() > candidates_max:
        row = int(np.argmax(counts > candidates_max))
        raise InvalidArgument(
            f"row {row} has {counts[row]} candidates, above the server's limit of {candidates_max} "
            "a request",
            field="candidates",
            row=row,
        )
    bytes_before = np.concatenate(([0], np.cumsum(row_bytes + ROW_OVERHEAD_BYTES + 4 * counts)))
    ranges = []
    begin = 0
    while begin < rows:
        end = min(
            begin + step,
            int(np.searchsorted(bytes_before, bytes_before[begin] + budget, "right")) - 1,
            int(
                np.searchsorted(
                    candidate_offsets, candidate_offsets[begin] + candidates_max, "right"
                )
            )
            - 1,
        )
        end = max(begin + 1, end)
        ranges.append((begin, end))
        begin = end
    return ranges


def sum_segments(
    offsets: npt.NDArray[np.int64],
    logprob: npt.NDArray[np.float32],
    greedy: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Sum of logprob, rows and "all greedy" of each segment of scored rows, as the server gives
    them.

    Sums run in double, in the order of the rows. An empty segment gives 0, 0 and greedy.
    """
    segments = len(offsets) - 1
    sums = np.zeros(segments, np.float64)
    all_greedy = np.ones(segments, np.uint8)
    values = logprob.astype(np.float64)
    for segment, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end > begin:
            # cumsum adds one by one; sum() would add pairwise and round differently.
            sums[segment] = np.cumsum(values[begin:end])[-1]
            all_greedy[segment] = greedy[begin:end].all()
    return sums, np.diff(offsets), all_greedy
