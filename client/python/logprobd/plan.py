"""Checks and normalises a score call and splits it into requests, for Client and AsyncClient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from logprobd import _tensor_kinds, _wire, arrays
from logprobd.errors import InvalidArgument, LogprobdError
from logprobd.info import HeadInfo
from logprobd.score_args import DEFAULT_IGNORE_INDEX, ScoreArgs
from logprobd.trace import TRACEPARENT_LENGTH_MAX, can_travel

_LOGPROB, _GREEDY = _wire.OUTPUTS["logprob"].bit, _wire.OUTPUTS["greedy"].bit

ROW_OVERHEAD_BYTES = 12
"""Bytes of the target, the temperature and the candidate offset of a row."""
MESSAGE_OVERHEAD_BYTES = 4096
"""Bytes reserved in a request for all other fields: names, numbers and tags."""


@dataclass(frozen=True)
class Chunk:
    """One request of a call: the half-open range [begin, end) of the scored rows."""

    index: int
    begin: int
    end: int


class Placement(NamedTuple):
    """How the hidden states of a request are passed to the server."""

    transport: str
    """"tcp", "unix", "shm" or "cuda_ipc"."""
    reason: str
    """The reason why no faster transport was used; "" if there is none."""


class ScorePlan:
    """The arguments of one call as arrays, and its requests. It ignores timeout and progress.

    "Scored rows" are the rows whose target is not ignore_index, in order. Only they are sent.
    `scored` contains their indices among all rows, or is None if every row is scored.

    Raises InvalidArgument for every mistake that can be detected without the server.
    """

    def __init__(self, args: ScoreArgs) -> None:
        (hidden, targets, temperature, candidates), _ = _tensor_kinds.pack(
            hidden=args.hidden,
            targets=args.targets,
            temperature=args.temperature,
            candidates=args.candidates,
        )
        self.hidden = arrays.hidden_rows(hidden, args.dtype)
        self.shape = self.hidden.leading_shape
        self.rows = self.hidden.rows
        self.head = args.head
        self.top_k = _count(args.top_k, "top_k")
        self.outputs = _output_bits(args.outputs)
        self.traceparent = _traceparent(args.traceparent)
        """W3C traceparent of the call, or ""."""

        ids = arrays.to_int32(targets, "targets")
        if ids.shape != self.shape:
            raise InvalidArgument(
                f"targets has shape {ids.shape}, hidden {(*self.shape, self.hidden.hidden_size)}: "
                f"targets must be {self.shape}, one id per row, already shifted: from_padded "
                "(padded batches) and from_packed (packed sequences) shift them",
                field="targets",
            )
        ids = ids.reshape(-1)
        kept = ids != args.ignore_index
        self.scored: arrays.Ints | None = None if kept.all() else np.flatnonzero(kept)
        self.num_scored = self.rows if self.scored is None else len(self.scored)
        self.targets = self._only_scored(ids)

        number, each = arrays.to_temperatures(temperature, self.shape)
        self.row_temperatures = None if each is None else self._only_scored(each)
        self.candidates = self._scored_candidates = None
        if candidates is not None:
            self.candidates = arrays.to_candidates(candidates, self.shape)
            self._scored_candidates = self.candidates.of_rows(self.scored)
        self.segments: arrays.Ints | None = None
        """Offsets of the segments among the scored rows."""
        if args.segments is not None:
            self.segments = arrays.to_offsets(args.segments, "segments", self.rows)
            if self.scored is not None:
                self.segments = np.searchsorted(self.scored, self.segments)
        self.server_segments = False
        """Whether the server sums the segments. `cut` sets it."""
        ignores_default = args.ignore_index == DEFAULT_IGNORE_INDEX
        try:
            self._fixed = _wire.ScoreRequest(
                request_id=_text(args.request_id, "request_id"),
                head=_text(args.head, "head"),
                weights_version=_count(args.weights_version, "weights_version"),
                dtype=_wire.DTYPE_NUMBERS[self.hidden.dtype],
                hidden_size=self.hidden.hidden_size,
                temperature=number,
                entropy_temperature=None
                if args.entropy_temperature is None
                else _number(args.entropy_temperature, "entropy_temperature"),
                ignore_index=None if ignores_default else int(args.ignore_index),
                top_k=self.top_k,
                priority=_wire.PRIORITIES[args.priority],
                reject_nonfinite=bool(args.reject_nonfinite),
                trace=bool(args.trace),
            )
        except KeyError:
            raise InvalidArgument(
                f'priority is "{args.priority}": use one of {list(_wire.PRIORITIES)}',
                field="priority",
            ) from None

    def _only_scored(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values if self.scored is None else values[self.scored]

    @property
    def weights_version(self) -> int:
        """The requested version; 0 means the live version."""
        return self._fixed.weights_version

    def check_head(self, head: HeadInfo) -> None:
        """Raises InvalidArgument if the rows do not have the head's hidden size."""
        if self.hidden.hidden_size != head.hidden_size:
            raise InvalidArgument(
                f"hidden has {self.hidden.hidden_size} elements per row, but head "
                f'"{head.name}" takes {head.hidden_size}: pass the states after the final norm '
                f"(last_hidden_state), [..., {head.hidden_size}]",
                field="hidden",
            )

    def cut(self, head: HeadInfo, chunk_rows: int, chunk_bytes: int) -> list[Chunk]:
        """Returns the requests of this call, each within the server's limits.

        Raises InvalidArgument if a single row exceeds a limit.
        """
        limits = head.limits
        bytes_max = min(chunk_bytes, limits.message_bytes_max or chunk_bytes)
        ranges = cut_rows(
            self.num_scored,
            self.hidden.row_bytes,
            ChunkLimits(
                rows_max=min(chunk_rows, limits.request_rows_max or chunk_rows),
                bytes_max=bytes_max,
                candidates_max=limits.candidates_max,
            ),
            None if self._scored_candidates is None else self._scored_candidates[1],
            self.scored,
        )
        if self.segments is not None:
            self.server_segments = (
                len(ranges) == 1
                and len(self.segments) - 1 <= (limits.segments_max or 1 << 62)
                and self._bytes_with_segments() <= bytes_max - MESSAGE_OVERHEAD_BYTES
            )
        return [Chunk(index, begin, end) for index, (begin, end) in enumerate(ranges)]

    def _bytes_with_segments(self) -> int:
        """Returns the bytes of all rows, candidates and segments in one request."""
        rows = self.num_scored * (self.hidden.row_bytes + ROW_OVERHEAD_BYTES)
        candidates = 0 if self._scored_candidates is None else len(self._scored_candidates[0])
        segments = 0 if self.segments is None else len(self.segments)
        return rows + 4 * (candidates + segments)

    def candidates_of(self, chunk: Chunk) -> int:
        """Returns the number of candidates of a chunk's rows."""
        if self._scored_candidates is None:
            return 0
        offsets = self._scored_candidates[1]
        return int(offsets[chunk.end] - offsets[chunk.begin])

    def bytes_of(self, chunk: Chunk) -> int:
        """Returns the number of bytes of hidden states in a chunk."""
        return (chunk.end - chunk.begin) * self.hidden.row_bytes

    def chunk_rows(self, chunk: Chunk) -> arrays.Rows:
        """Returns a chunk's rows as indices among all rows, or a slice if they are consecutive."""
        if self.scored is None:
            return slice(chunk.begin, chunk.end)
        rows = self.scored[chunk.begin : chunk.end]
        if len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows):
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return rows

    def encode(
        self,
        chunk: Chunk,
        *,
        chunk_id: int = 0,
        rows_at: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Encodes the request of a chunk.

        `chunk_id` is not 0 for a chunk of a stream. Such a request has the call's traceparent,
        because the metadata of a stream belongs to all of its chunks. `rows_at` is the request
        field that locates the hidden states in shared or GPU memory. If it is None, they are copied
        into the request.
        """
        request = _wire.ScoreRequest(**vars(self._fixed))
        begin, end = chunk.begin, chunk.end
        request.chunk_id = chunk_id
        request.traceparent = self.traceparent if chunk_id else ""
        request.rows = end - begin
        request.outputs = self.outputs or _LOGPROB  # 0 would mean the default outputs
        request.targets = _bytes(self.targets[begin:end], "<i4")
        if self.row_temperatures is not None:
            request.row_temperatures = _bytes(self.row_temperatures[begin:end], "<f4")
        if self._scored_candidates is not None:
            ids, offsets = self._scored_candidates
            request.candidate_ids = _bytes(ids[offsets[begin] : offsets[end]], "<i4")
            request.candidate_offsets = _bytes(offsets[begin : end + 1] - offsets[begin], "<u4")
        if self.segments is not None:
            if self.server_segments:
                request.segment_offsets = _bytes(self.segments, "<u4")
            else:
                request.outputs |= _LOGPROB | _GREEDY
        if rows_at is None:
            rows_at = {"hidden": self.hidden.take(self.chunk_rows(chunk))}
        for name, value in rows_at.items():
            setattr(request, name, value)
        return _wire.encode(request)

    def locate(self, error: LogprobdError, chunk: Chunk) -> LogprobdError:
        """Returns the error with its row counted over the whole call instead of the chunk."""
        if not isinstance(error, InvalidArgument) or error.row is None:
            return error
        row = error.row
        if error.field in ("candidate_offsets", "segment_offsets"):
            error.row = None
            return error
        if error.field == "candidate_ids" and self._scored_candidates is not None:
            offsets = self._scored_candidates[1]
            row = int(np.searchsorted(offsets, offsets[chunk.begin] + row, "right")) - 1
        else:
            row += chunk.begin
        if row < self.num_scored:
            error.row = int(row if self.scored is None else self.scored[row])
            error.args = (f"{error.args[0]} (row {error.row} of the call)",)
        return error


def _bytes(values: npt.NDArray[Any], dtype: str) -> bytes:
    return values.astype(dtype).tobytes()


def _count(value: Any, name: str) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = -1
    if count < 0:
        raise InvalidArgument(f"{name} is {value!r}: pass an integer, 0 or more", field=name)
    return count


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name} is {value!r}: pass a number", field=name) from None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {value!r}: pass a str", field=name)
    return value


def _traceparent(value: Any) -> str:
    if not can_travel(value):
        raise InvalidArgument(
            f"traceparent is {value!r}: pass at most {TRACEPARENT_LENGTH_MAX} printable ASCII "
            "characters",
            field="traceparent",
        )
    return value


def _output_bits(names: Iterable[str]) -> int:
    bits = 0
    for name in (names,) if isinstance(names, str) else names:
        output = _wire.OUTPUTS.get("argmax" if name in ("argmax_id", "argmax_logprob") else name)
        if output is None:
            raise InvalidArgument(
                f'outputs has "{name}": choose from {", ".join(_wire.OUTPUTS)}; top_k, candidates '
                "and segments are separate arguments",
                field="outputs",
            )
        bits |= output.bit
    return bits


@dataclass(frozen=True)
class ChunkLimits:
    """Limits of one request; 0 means no limit."""

    rows_max: int
    bytes_max: int
    candidates_max: int = 0


def cut_rows(
    rows: int,
    row_bytes: int,
    limits: ChunkLimits,
    candidate_offsets: npt.NDArray[np.int64] | None = None,
    rows_of_call: arrays.Ints | None = None,
) -> list[tuple[int, int]]:
    """Splits rows into half-open ranges, in order, each within `limits`.

    There are as few ranges as the limits allow, and they have about equal lengths, because the
    server treats a short last request as latency-sensitive and forms smaller batches for it.

    Args:
        rows: number of rows; 0 gives one empty range, so that the server checks the other fields.
        row_bytes: bytes of the hidden states of one row.
        candidate_offsets: offsets of the rows' candidates, [rows + 1], or None if there are none.
        rows_of_call: indices of the rows among those of the call, for errors; None if all are sent.

    Raises InvalidArgument if a single row exceeds a limit.
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
        index = int(np.argmax(counts > candidates_max))
        row = index if rows_of_call is None else int(rows_of_call[index])
        raise InvalidArgument(
            f"row {row} has {counts[index]} candidates, above the server's limit of "
            f"{candidates_max} per request",
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
