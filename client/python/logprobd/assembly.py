"""Concatenates the answers to a call's chunks into one ScoreResult."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from logprobd import _wire
from logprobd.errors import ServerBug
from logprobd.plan import Chunk, Placement, ScorePlan
from logprobd.result import ScoreResult
from logprobd.trace import trace_from_wire

TCP = Placement("tcp", "")


class Assembly:
    """Collects the answers to all chunks of a plan, in any order."""

    def __init__(self, plan: ScorePlan, chunks: list[Chunk]) -> None:
        self._plan = plan
        self._chunks = chunks
        self._responses: dict[int, _wire.ScoreResponse] = {}
        self._last_version = 0
        self._placements: dict[int, Placement] = {}
        self.rows_done = plan.rows - plan.num_scored

    def add(self, chunk: Chunk, response: _wire.ScoreResponse, placement: Placement = TCP) -> None:
        """Stores the answer to a chunk; `placement` says how its rows were passed to the server.

        Raises the error of `check_rows`.
        """
        self.check_rows(chunk, response)
        if chunk.index not in self._responses:
            self.rows_done += response.rows
        self._responses[chunk.index] = response
        self._last_version = response.weights_version
        self._placements[chunk.index] = placement

    @staticmethod
    def check_rows(chunk: Chunk, response: _wire.ScoreResponse) -> None:
        """Raises ServerBug if the answer does not have the chunk's number of rows."""
        if response.rows != chunk.end - chunk.begin:
            raise ServerBug(
                f"the server answered {response.rows} rows to a request of "
                f"{chunk.end - chunk.begin} rows"
            )

    @property
    def placement(self) -> Placement:
        """The placement of most rows. Every chunk must be answered."""
        rows: dict[Placement, int] = {}
        for chunk in self._chunks:
            placement = self._placements[chunk.index]
            rows[placement] = rows.get(placement, 0) + chunk.end - chunk.begin
        return max(rows, key=lambda placement: rows[placement])

    @property
    def is_complete(self) -> bool:
        return len(self._responses) == len(self._chunks)

    def unanswered(self) -> list[Chunk]:
        return [chunk for chunk in self._chunks if chunk.index not in self._responses]

    def drop_other_versions(self) -> None:
        """Drops answers whose weights version differs from that of the latest answer.

        Their chunks count as unanswered again. Otherwise, a swap of the weights during a call would
        mix two models in one result.
        """
        for index, response in list(self._responses.items()):
            if response.weights_version != self._last_version:
                del self._responses[index]
                self.rows_done -= response.rows

    def result(self) -> ScoreResult:
        """Returns the scores of the call. Every chunk must be answered.

        Raises ServerBug if an array is missing or has the wrong size.
        """
        plan = self._plan
        versions = sorted({response.weights_version for response in self._responses.values()})
        out: dict[str, npt.NDArray[Any]] = {}
        for output in _wire.OUTPUTS.values():
            if plan.outputs & output.bit:
                for name, (wire_type, dtype) in output.arrays.items():
                    out[name] = self._spread(self._join(name, wire_type), dtype).reshape(plan.shape)
        if plan.top_k:
            shape = (*plan.shape, plan.top_k)
            for name, wire_type, dtype in (
                ("top_k_ids", "<i4", "int64"),
                ("top_k_logprobs", "<f4", "float32"),
            ):
                rows = self._join(name, wire_type, plan.top_k).reshape(-1, plan.top_k)
                out[name] = self._spread(rows, dtype).reshape(shape)
        self._add_candidates(out)
        self._add_segments(out)
        responses = self._responses.values()
        return ScoreResult(
            out,
            plan.hidden.kind,
            shape=plan.shape,
            weights_version=versions[-1],
            weights_versions=tuple(versions),
            ignored_rows=plan.rows - plan.num_scored + sum(r.ignored_rows for r in responses),
            nonfinite_rows=sum(r.nonfinite_rows for r in responses),
            transport=self.placement.transport,
            traces=[
                trace_from_wire(trace)
                for chunk in self._chunks
                if (trace := self._responses[chunk.index].trace) is not None
            ],
        )

    def _array(self, chunk: Chunk, name: str, wire_type: str, length: int) -> npt.NDArray[Any]:
        """Returns an array of the answer to a chunk. Raises ServerBug if it has another length."""
        data = getattr(self._responses[chunk.index], name)
        expected = length * np.dtype(wire_type).itemsize
        if len(data) != expected:
            raise ServerBug(f"{name} has {len(data)} bytes in the server's answer, not {expected}")
        return np.frombuffer(data, wire_type)

    def _join(self, name: str, wire_type: str, width: int = 1) -> npt.NDArray[Any]:
        """Concatenates an array with `width` values per row over all scored rows."""
        return np.concatenate(
            [
                self._array(chunk, name, wire_type, (chunk.end - chunk.begin) * width)
                for chunk in self._chunks
            ]
        )

    def _spread(self, values: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
        """Scatters the values of the scored rows; ignored rows get zeros."""
        if self._plan.scored is None:
            return values.astype(dtype)
        out = np.zeros((self._plan.rows, *values.shape[1:]), dtype)
        out[self._plan.scored] = values
        return out

    def _add_candidates(self, out: dict[str, npt.NDArray[Any]]) -> None:
        plan = self._plan
        if plan.candidates is None:
            return
        ids, offsets, shape = plan.candidates.ids, plan.candidates.offsets, plan.candidates.shape
        counts = np.diff(offsets)
        kept = np.ones(plan.rows, bool)
        if plan.scored is not None:
            kept[:] = False
            kept[plan.scored] = True
        kept_ids = np.repeat(kept, counts)
        flat = np.zeros(len(ids), np.float32)
        flat[kept_ids] = np.concatenate(
            [
                self._array(chunk, "candidate_logprobs", "<f4", plan.candidates_of(chunk))
                for chunk in self._chunks
            ]
        )
        if shape is not None:
            out["candidate_logprobs"] = flat.reshape((*plan.shape, shape[-1]))
        else:
            out["candidate_logprobs"] = flat
            out["candidate_offsets"] = offsets

    def _add_segments(self, out: dict[str, npt.NDArray[Any]]) -> None:
        plan = self._plan
        if plan.segments is None:
            return
        if plan.server_segments:
            segments = len(plan.segments) - 1
            sums, rows, greedy = (
                self._array(self._chunks[0], name, wire_type, segments)
                for name, wire_type in (
                    ("segment_logprob", "<f8"),
                    ("segment_rows", "<u4"),
                    ("segment_greedy", "u1"),
                )
            )
        else:
            sums, rows, greedy = sum_segments(
                plan.segments, self._join("logprob", "<f4"), self._join("greedy", "u1")
            )
        out["segment_logprob"] = sums.astype(np.float64)
        out["segment_rows"] = rows.astype(np.int64)
        out["segment_greedy"] = greedy.astype(np.bool_)


def sum_segments(
    offsets: npt.NDArray[np.int64],
    logprob: npt.NDArray[np.float32],
    greedy: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Returns for each segment the sum of logprob, the number of rows, and whether all are greedy.

    Sums are computed in double precision and in row order, so they are bit-identical to the
    server's. An empty segment gives 0, 0 and 1.
    """
    segments = len(offsets) - 1
    sums = np.zeros(segments, np.float64)
    all_greedy = np.ones(segments, np.uint8)
    values = logprob.astype(np.float64)
    for segment, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end > begin:
            # cumsum adds in order, as the server does; sum() adds pairwise and rounds differently.
            # Like the server's, a sum begins with 0.0, which keeps it from being -0.0.
            sums[segment] += np.cumsum(values[begin:end])[-1]
            all_greedy[segment] = greedy[begin:end].all()
    return sums, np.diff(offsets), all_greedy
