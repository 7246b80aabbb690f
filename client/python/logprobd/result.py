"""The result of a score call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from logprobd.arrays import Array, OutputKind, to_offsets
from logprobd.errors import InvalidArgument
from logprobd.trace import RequestTrace

# Maps outputs that are not requested through `outputs` to the argument of score for them.
_ASK = {
    "argmax_id": 'outputs=("argmax", ...)',
    "argmax_logprob": 'outputs=("argmax", ...)',
    "top_k_ids": "top_k=k",
    "top_k_logprobs": "top_k=k",
    "candidate_logprobs": "candidates=...",
    "candidate_offsets": "candidates=... as lists or (ids, offsets)",
    "segment_logprob": "segments=offsets",
    "segment_rows": "segments=offsets",
    "segment_greedy": "segments=offsets",
}


class ScoreResult:
    """The scores of one call.

    Arrays have the caller's array type: NumPy arrays, or torch tensors, which are copied to the
    device of `hidden` when they are first read. "[...]" is the shape of the targets, which is the
    shape of `hidden` without its last axis. Values are float32, in nats; ids and ranks are
    int64. Ignored rows hold zeros; rows with NaN or Inf logits hold NaN, and -1 as ids and ranks.
    Reading an output that was not requested raises AttributeError.
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        kind: OutputKind,
        *,
        shape: tuple[int, ...],
        weights_version: int,
        weights_versions: tuple[int, ...] | None = None,
        ignored_rows: int,
        nonfinite_rows: int,
        transport: str = "tcp",
        traces: Iterable[RequestTrace] = (),
    ) -> None:
        self._arrays = dict(arrays)
        self._given: dict[str, Array] = {}
        self._kind = kind
        self.shape = shape
        """Shape of the targets, written as "[...]" in the descriptions."""
        self.weights_version = weights_version
        """Version of the weights that scored the rows; with mix_versions, the highest version."""
        self.weights_versions = weights_versions or (weights_version,)
        """All versions that scored rows, ascending; more than one only with mix_versions."""
        self.ignored_rows = ignored_rows
        """Number of rows whose target was ignore_index."""
        self.nonfinite_rows = nonfinite_rows
        """Number of rows whose logits held NaN or Inf."""
        self.transport = transport
        """The transport that carried most of the rows; see Client.transport."""
        self.traces = tuple(traces)
        """With trace=True, the times of each request into which the call was split, in the order of
        its rows. Servers that do not know traces give none."""

    def _values(self, name: str) -> npt.NDArray[Any]:
        try:
            return self._arrays[name]
        except KeyError:
            ask = _ASK.get(name, f'outputs=("{name}", ...)')
            raise AttributeError(f"{name} was not requested: call score with {ask}") from None

    def _get(self, name: str) -> Array:
        # Copies to the GPU delay its other work, so an array is copied only when it is read.
        given = self._given.get(name)
        if given is None:
            given = self._given.setdefault(name, self._kind.give(self._values(name)))
        return given

    # proto/generate.py writes these properties.
    # [generated: python_arrays]
    @property
    def logprob(self) -> Array:
        """[...]: log-probability of the target in nats, at most 0."""
        return self._get("logprob")

    @property
    def entropy(self) -> Array:
        """[...]: entropy in nats, in [0, ln vocab_size]."""
        return self._get("entropy")

    @property
    def lse(self) -> Array:
        """[...]: log-sum-exp of logits / temperature in nats."""
        return self._get("lse")

    @property
    def argmax_id(self) -> Array:
        """[...] int64: id of the largest logit; the lowest id in case of ties."""
        return self._get("argmax_id")

    @property
    def argmax_logprob(self) -> Array:
        """[...]: log-probability of argmax_id in nats."""
        return self._get("argmax_logprob")

    @property
    def greedy(self) -> Array:
        """[...] bool: whether the target is argmax_id."""
        return self._get("greedy")

    @property
    def sum_p_squared(self) -> Array:
        """[...]: sum of the squared probabilities, in (0, 1]."""
        return self._get("sum_p_squared")

    @property
    def max_logit(self) -> Array:
        """[...]: largest logit, before the division by the temperature."""
        return self._get("max_logit")

    @property
    def min_logit(self) -> Array:
        """[...]: smallest logit, before the division by the temperature."""
        return self._get("min_logit")

    @property
    def top_k_ids(self) -> Array:
        """[..., top_k] int64: ids of the largest logits, best first; ties are ordered by ascending
        id.
        """
        return self._get("top_k_ids")

    @property
    def top_k_logprobs(self) -> Array:
        """[..., top_k]: log-probabilities of top_k_ids in nats."""
        return self._get("top_k_logprobs")

    @property
    def segment_logprob(self) -> Array:
        """[segments] float64: sum of logprob over the segment's rows, ignored rows excluded, in
        nats.
        """
        return self._get("segment_logprob")

    @property
    def segment_rows(self) -> Array:
        """[segments] int64: number of the segment's rows, ignored rows excluded."""
        return self._get("segment_rows")

    @property
    def segment_greedy(self) -> Array:
        """[segments] bool: whether every row that counts in segment_rows is greedy."""
        return self._get("segment_greedy")

    @property
    def target_rank(self) -> Array:
        """[...] int64: number of ids whose logit is larger than the target's, or equal with a lower
        id. 0 means that the target is argmax_id, and k < top_k that it is entry k of top_k_ids.
        """
        return self._get("target_rank")

    # [end]

    @property
    def candidate_logprobs(self) -> Array:
        """[..., n] if the candidates are an array, otherwise flat [ids], in the order given."""
        return self._get("candidate_logprobs")

    @property
    def candidate_offsets(self) -> Array:
        """[rows + 1] int64, where each row's candidates begin, for candidates given as lists."""
        return self._get("candidate_offsets")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the arrays that this result holds."""
        return tuple(self._arrays)

    def sum_by_segment(self, segments: Any = None) -> Array:
        """Returns [segments] float64: logprob summed between consecutive offsets of flattened rows.

        Without an argument it uses the segments of the call. Raises InvalidArgument for bad
        offsets.
        """
        if segments is None:
            return self.segment_logprob
        logprob = self._values("logprob").reshape(-1).astype(np.float64)
        offsets = to_offsets(segments, "segments", len(logprob))
        ranges = itertools.pairwise(offsets)
        return self._kind.give(
            np.array([logprob[b:e].cumsum()[-1] if e > b else 0.0 for b, e in ranges])
        )

    def candidate_lists(self) -> list[Array]:
        """Returns one array of candidate_logprobs per row, for candidates given as lists."""
        if "candidate_offsets" not in self._arrays:
            if "candidate_logprobs" not in self._arrays:
                raise InvalidArgument("the call had no candidates")
            values = self.candidate_logprobs
            return list(values.reshape(-1, values.shape[-1]))
        values, offsets = self.candidate_logprobs, self.candidate_offsets
        return [values[int(b) : int(e)] for b, e in itertools.pairwise(offsets)]

    def __repr__(self) -> str:
        return (
            f"ScoreResult(shape={self.shape}, outputs={list(self._arrays)}, "
            f"weights_version={self.weights_version}, ignored_rows={self.ignored_rows}, "
            f"nonfinite_rows={self.nonfinite_rows})"
        )
