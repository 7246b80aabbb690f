"""Puts the answers of a call's chunks together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from logprobd import _wire
from logprobd._carrier import Way
from logprobd.chunking import sum_segments
from logprobd.errors import ServerBug
from logprobd.plan import Chunk, ScorePlan
from logprobd.result import ScoreResult

# Output bit -> arrays of the response, with their types on the wire and in the result.
_ROW_ARRAYS: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "logprob": (("logprob", "<f4", np.float32),),
    "entropy": (("entropy", "<f4", np.float32),),
    "lse": (("lse", "<f4", np.float32),),
    "argmax": (("argmax_id", "<i4", np.int64), ("argmax_logprob", "<f4", np.float32)),
    "greedy": (("greedy", "u1", np.bool_),),
    "sum_p_squared": (("sum_p_squared", "<f4", np.float32),),
    "max_logit": (("max_logit", "<f4", np.float32),),
    "min_logit": (("min_logit", "<f4", np.float32),),
}


TCP = Way("tcp", "")


class Assembly:
    """Collects the answers of all chunks of a plan, in any order."""

    def __init__(self, plan: ScorePlan, chunks: list[Chunk]) -> None:
        self._plan = plan
        self._chunks = chunks
        self._responses: dict[int, _wire.ScoreResponse] = {}
        self._last_version = 0
        self._ways: dict[int, Way] = {}
        self.rows_done = plan.rows - plan.num_scored

    def add(self, chunk: Chunk, response: _wire.ScoreResponse, way: Way = TCP) -> None:
        """Takes the answer of a chunk, whose rows went by `way`. ServerBug when its shape is not
        that of the request."""
        if response.rows != chunk.end - chunk.begin:
            raise ServerBug(
                f"the server answered {response.rows} rows to a request of "
                f"{chunk.end - chunk.begin}"
            )
        if chunk.index not in self._responses:
            self.rows_done += response.rows
        self._responses[chunk.index] = response
        self._last_version = response.weights_version
        self._ways[chunk.index] = way

    @property
    def way(self) -> Way:
        """The way that most rows went, once every chunk is answered."""
        rows: dict[Way, int] = {}
        for chunk in self._chunks:
            way = self._ways[chunk.index]
            rows[way] = rows.get(way, 0) + chunk.end - chunk.begin
        return max(rows, key=lambda way: rows[way])

    def unanswered(self) -> list[Chunk]:
        return [chunk for chunk in self._chunks if chunk.index not in self._responses]

    def drop_other_versions(self) -> None:
        """Forgets answers of other weights than the latest answer's, to be asked again.

        A swap in the midst of a call would otherwise mix two models in one result.
        """
        for index, response in list(self._responses.items()):
            if response.weights_version != self._last_version:
                del self._responses[index]
                self.rows_done -= response.rows

    def result(self) -> ScoreResult:
        """The scores of the call, once every chunk is answered. ServerBug for missing arrays."""
        plan = self._plan
        versions = sorted({response.weights_version for response in self._responses.values()})
        out: dict[str, npt.NDArray[Any]] = {}
        for output, arrays in _ROW_ARRAYS.items():
            if plan.outputs & _wire.OUTPUT_BITS[output]:
                for name, wire_type, dtype in arrays:
                    out[name] = self._spread(self._join(name, wire_type), dtype).reshape(plan.shape)
        if plan.top_k:
            shape = (*plan.shape, plan.top_k)
            for name, wire_type, dtype in (
                ("top_k_ids", "<i4", np.int64),
                ("top_k_logprobs", "<f4", np.float32),
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
            transport=self.way.transport,
        )

    def _join(self, name: str, wire_type: str, width: int = 1) -> npt.NDArray[Any]:
        """An array over all scored rows. With width 0 its length is not checked."""
        parts = []
        for chunk in self._chunks:
            data = getattr(self._responses[chunk.index], name)
            expected = (chunk.end - chunk.begin) * width * np.dtype(wire_type).itemsize
            if width and len(data) != expected:
                raise ServerBug(
                    f"{name} has {len(data)} bytes in the server's answer, not {expected}"
                )
            parts.append(np.frombuffer(data, wire_type))
        return np.concatenate(parts)

    def _spread(self, values: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
        """Values of the scored rows among zeros for the ignored ones."""
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
        values = self._join("candidate_logprobs", "<f4", 0)
        if len(values) != kept_ids.sum():
            raise ServerBug(f"the server answered {len(values)} candidates of {kept_ids.sum()}")
        flat = np.zeros(len(ids), np.float32)
        flat[kept_ids] = values
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
            response = self._responses[0]
            sums = np.frombuffer(response.segment_logprob, "<f8")
            rows = np.frombuffer(response.segment_rows, "<u4")
            greedy = np.frombuffer(response.segment_greedy, "u1")
            if not len(sums) == len(rows) == len(greedy) == len(plan.segments) - 1:
                raise ServerBug(
                    f"the server answered {len(sums)} segments of {len(plan.segments) - 1}"
                )
        else:
            sums, rows, greedy = sum_segments(
                plan.segments, self._join("logprob", "<f4"), self._join("greedy", "u1")
            )
        out["segment_logprob"] = sums.astype(np.float64)
        out["segment_rows"] = rows.astype(np.int64)
        out["segment_greedy"] = greedy.astype(np.bool_)
