"""One score call, checked and normalised: what Client and AsyncClient have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logprobd import _wire, arrays, chunking
from logprobd.errors import InvalidArgument, LogprobdError
from logprobd.facts import HeadInfo

OUTPUTS = tuple(_wire.OUTPUT_BITS)
_LOGPROB, _GREEDY = _wire.OUTPUT_BITS["logprob"], _wire.OUTPUT_BITS["greedy"]
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Candidates:
    """Further ids to score: row r owns ids[offsets[r] : offsets[r + 1]]."""

    ids: npt.NDArray[np.int32]
    offsets: arrays.Ints
    shape: tuple[int, ...] | None
    """Shape of the array given, or None for ragged lists."""


@dataclass(frozen=True)
class Chunk:
    """A request: a half-open range of the scored rows."""

    index: int
    begin: int
    end: int


class ScorePlan:
    """The arguments of a score call. Rows with ignore_index as target are never sent.

    "Scored rows" below are the others, in order; `scored` holds their indices among all rows.
    Raises InvalidArgument for what can be seen to be wrong without the server.
    """

    def __init__(
        self,
        hidden: Any,
        targets: Any,
        *,
        temperature: Any = 1.0,
        outputs: Iterable[str] = ("logprob", "entropy"),
        entropy_temperature: float | None = None,
        candidates: Any = None,
        top_k: int = 0,
        segments: Any = None,
        ignore_index: int = -100,
        head: str = "",
        weights_version: int = 0,
        priority: str = "normal",
        reject_nonfinite: bool = False,
        dtype: str | None = None,
        request_id: str = "",
    ) -> None:
        self.hidden = arrays.hidden_rows(hidden, dtype)
        self.shape = self.hidden.leading_shape
        self.rows = self.hidden.rows
        self.head = head
        self.top_k = _count(top_k, "top_k")
        self.outputs = _output_bits(outputs)

        ids = arrays.to_int32(targets, "targets")
        if ids.shape != self.shape:
            raise InvalidArgument(
                f"targets has shape {ids.shape}, hidden {(*self.shape, self.hidden.hidden_size)}: "
                f"targets must be {self.shape}, one id a row, already shifted",
                field="targets",
            )
        ids = ids.reshape(-1)
        kept = ids != ignore_index
        self.scored: arrays.Ints | None = None if kept.all() else np.flatnonzero(kept)
        self.num_scored = self.rows if self.scored is None else len(self.scored)
        self.targets = self._only_scored(ids)

        self.temperature, self.row_temperatures = self._temperatures(temperature)
        self.candidates = None if candidates is None else self._candidates(candidates)
        self._scored_candidates = (
            None if self.candidates is None else self._take_candidates(self.candidates)
        )
        self.segments = None if segments is None else self._segments(segments)
        self.server_segments = False
        """Whether the server sums the segments; set by `cut`."""
        try:
            self._fixed = _wire.ScoreRequest(
                request_id=_text(request_id, "request_id"),
                head=_text(head, "head"),
                weights_version=_count(weights_version, "weights_version"),
                dtype=_wire.DTYPE_NUMBERS[self.hidden.dtype],
                hidden_size=self.hidden.hidden_size,
                temperature=self.temperature,
                entropy_temperature=None
                if entropy_temperature is None
                else _number(entropy_temperature, "entropy_temperature"),
                ignore_index=None if ignore_index == -100 else int(ignore_index),
                top_k=self.top_k,
                priority=_wire.PRIORITIES[priority],
                reject_nonfinite=bool(reject_nonfinite),
            )
        except KeyError:
            raise InvalidArgument(
                f'priority is "{priority}": use one of {list(_wire.PRIORITIES)}', field="priority"
            ) from None

    def _only_scored(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values if self.scored is None else values[self.scored]

    def _temperatures(self, value: Any) -> tuple[float | None, npt.NDArray[np.float32] | None]:
        array = arrays.to_numpy(value, "temperature")
        if array.dtype.kind not in "fiu":
            raise InvalidArgument(
                f"temperature has type {array.dtype}: pass a number or a float array",
                field="temperature",
            )
        if array.ndim == 0:
            return (None if float(array) == 1.0 else float(array)), None
        try:
            rows = np.broadcast_to(array.astype(np.float32), self.shape).reshape(-1)
        except ValueError:
            raise InvalidArgument(
                f"temperature has shape {array.shape}: pass a number, or an array that broadcasts "
                f"to the shape of targets, {self.shape}",
                field="temperature",
            ) from None
        return None, self._only_scored(rows)

    def _candidates(self, value: Any) -> Candidates:
        if isinstance(value, tuple) and len(value) == 2:
            ids = arrays.to_int32(value[0], "candidates")
            offsets = arrays.to_offsets(value[1], "candidates", ids.size)
            if ids.ndim != 1 or len(offsets) != self.rows + 1:
                raise InvalidArgument(
                    f"candidates (ids, offsets) have shapes {ids.shape} and {offsets.shape}: pass "
                    f"ids [n] and offsets [{self.rows + 1}]",
                    field="candidates",
                )
            return Candidates(ids, offsets, None)
        if isinstance(value, (list, tuple)):
            lists = [arrays.to_int32(ids, "candidates") for ids in value]
            if len(lists) != self.rows or any(ids.ndim != 1 for ids in lists):
                raise InvalidArgument(
                    f"candidates has {len(lists)} lists: pass one flat list of ids for each of the "
                    f"{self.rows} rows",
                    field="candidates",
                )
            flat = np.concatenate(lists) if lists else np.zeros(0, np.int32)
            offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in lists], dtype=np.int64)))
            return Candidates(flat, offsets.astype(np.int64), None)
        ids = arrays.to_int32(value, "candidates")
        if ids.ndim == 0 or ids.shape[:-1] not in (self.shape, (self.rows,)):
            raise InvalidArgument(
                f"candidates has shape {ids.shape}: pass {(*self.shape, 'n')}, one list a row",
                field="candidates",
            )
        offsets = np.arange(self.rows + 1, dtype=np.int64) * ids.shape[-1]
        return Candidates(ids.reshape(-1), offsets, ids.shape)

    def _segments(self, value: Any) -> arrays.Ints:
        """Segment offsets among the scored rows."""
        offsets = arrays.to_offsets(value, "segments", self.rows)
        return offsets if self.scored is None else np.searchsorted(self.scored, offsets)

    @property
    def weights_version(self) -> int:
        """The version asked for; 0: whichever is live."""
        return self._fixed.weights_version

    def check_head(self, head: HeadInfo) -> None:
        """Raises InvalidArgument where the rows cannot be this head's."""
        if self.hidden.hidden_size != head.hidden_size:
            raise InvalidArgument(
                f'hidden has {self.hidden.hidden_size} elements a row, head "{head.name}" takes '
                f"{head.hidden_size}: pass the states after the final norm, [..., "
                f"{head.hidden_size}]",
                field="hidden",
            )

    def cut(self, head: HeadInfo, chunk_rows: int, chunk_bytes: int) -> list[Chunk]:
        """The requests of this call, within the server's limits. InvalidArgument as `cut_rows`."""
        limits = head.limits
        bytes_max = min(chunk_bytes, limits.message_bytes_max or chunk_bytes)
        ranges = chunking.cut_rows(
            self.num_scored,
            self._row_bytes,
            chunking.ChunkLimits(
                rows_max=min(chunk_rows, limits.request_rows_max or chunk_rows),
                bytes_max=bytes_max,
                candidates_max=limits.candidates_max,
            ),
            None if self._scored_candidates is None else self._scored_candidates[1],
        )
        if self.segments is not None:
            fits = len(self.segments) - 1 <= (limits.segments_max or 1 << 62)
            self.server_segments = fits and len(ranges) == 1
        return [Chunk(index, begin, end) for index, (begin, end) in enumerate(ranges)]

    @property
    def _row_bytes(self) -> int:
        return self.hidden.hidden_size * (4 if self.hidden.dtype == "fp32" else 2)

    def bytes_of(self, chunk: Chunk) -> int:
        """Bytes of hidden states in the request of a chunk."""
        return (chunk.end - chunk.begin) * self._row_bytes

    def _take_candidates(self, given: Candidates) -> tuple[npt.NDArray[np.int32], arrays.Ints]:
        if self.scored is None:
            return given.ids, given.offsets
        counts = np.diff(given.offsets)
        kept = np.zeros(self.rows, bool)
        kept[self.scored] = True
        offsets = np.concatenate(([0], np.cumsum(counts[self.scored], dtype=np.int64)))
        return given.ids[np.repeat(kept, counts)], offsets

    def chunk_rows(self, chunk: Chunk) -> arrays.Rows:
        """The rows of a chunk, among all rows of the call; a slice where they are consecutive."""
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
        place: Mapping[str, Any] | None = None,
    ) -> bytes:
        """The request of a chunk. `place` is the field that says where its hidden states lie; None:
        they are copied into the request."""
        request = _wire.ScoreRequest(**vars(self._fixed))
        begin, end = chunk.begin, chunk.end
        request.chunk_id = chunk_id
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
        for name, value in (place or {"hidden": self.hidden.take(self.chunk_rows(chunk))}).items():
            setattr(request, name, value)
        return _wire.encode(request)

    def locate(self, error: LogprobdError, chunk: Chunk) -> LogprobdError:
        """The error with its row counted over the whole call, not over the chunk."""
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


def _output_bits(names: Iterable[str]) -> int:
    bits = 0
    for name in (names,) if isinstance(names, str) else names:
        bit = _wire.OUTPUT_BITS.get("argmax" if name in ("argmax_id", "argmax_logprob") else name)
        if bit is None:
            raise InvalidArgument(
                f'outputs has "{name}": choose from {", ".join(OUTPUTS)}; top_k, candidates and '
                "segments have arguments of their own",
                field="outputs",
            )
        bits |= bit
    return bits
