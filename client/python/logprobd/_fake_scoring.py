"""Checks and scores the requests of FakeServer in double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logprobd import _wire
from logprobd.arrays import fp32_from_bf16
from logprobd.assembly import sum_segments

Floats = npt.NDArray[np.float64]

# Wire types of a response's arrays with one value per row.
_ROW_TYPES = {
    name: wire_type
    for output in _wire.OUTPUTS.values()
    for name, (wire_type, _) in output.arrays.items()
}


class Refusal(Exception):
    """Raised to answer a request with a status other than OK."""

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after


@dataclass
class FakeHead:
    """The properties of a FakeServer that scoring needs."""

    name: str
    vocab_size: int
    hidden_size: int
    weights_version: int
    request_rows_max: int
    top_k_max: int
    candidates_max: int
    segments_max: int
    logits: Callable[[Floats], Floats]
    """Returns the logits [vocab_size] of a hidden row [hidden_size]."""


def _refuse(message: str) -> Refusal:
    return Refusal("INVALID_ARGUMENT", message)


@dataclass
class _CheckedRequest:
    """The arrays of a valid request."""

    hidden: Floats
    targets: npt.NDArray[np.int32]
    ignored: npt.NDArray[np.bool_]
    temperatures: Floats
    entropy_temperatures: Floats
    candidate_ids: npt.NDArray[np.int32]
    candidate_offsets: npt.NDArray[np.int64]


def _check(head: FakeHead, request: _wire.ScoreRequest) -> _CheckedRequest:
    """Checks a request by the rules of scoring.proto. Raises Refusal."""
    rows, vocab = request.rows, head.vocab_size
    if request.head not in ("", head.name):
        raise Refusal("NOT_FOUND", f'head "{request.head}" is not served')
    if request.weights_version not in (0, head.weights_version):
        raise Refusal(
            "FAILED_PRECONDITION",
            f"weights_version: {request.weights_version} is not live; "
            f"{head.weights_version} is live",
        )
    if request.hidden_size != head.hidden_size:
        raise _refuse(f"hidden_size: {request.hidden_size}, must be {head.hidden_size}")
    if rows > head.request_rows_max:
        raise _refuse(f"rows: {rows}, must be in [0, {head.request_rows_max}]")
    if request.top_k > min(head.top_k_max, vocab):
        raise _refuse(f"top_k: {request.top_k}, must be in [0, {min(head.top_k_max, vocab)}]")
    hidden = _hidden(request)
    targets = _array(request.targets, "<i4", "targets", rows)
    ignore_index = -100 if request.ignore_index is None else request.ignore_index
    if 0 <= ignore_index < vocab:
        raise _refuse(f"ignore_index: {ignore_index}, must lie outside [0, {vocab})")
    ignored = targets == ignore_index
    _check_ids("targets", targets, ignored, vocab)
    one = 1.0 if request.temperature is None else request.temperature
    temperatures = np.full(rows, one)
    if len(request.row_temperatures):
        temperatures = _array(request.row_temperatures, "<f4", "row_temperatures", rows).astype(
            np.float64
        )
        temperatures[ignored] = 1.0  # The server does not read these.
    entropy_temperatures = temperatures
    if request.entropy_temperature is not None:
        entropy_temperatures = np.full(rows, request.entropy_temperature)
    for name, values in (
        ("row_temperatures" if len(request.row_temperatures) else "temperature", temperatures),
        ("entropy_temperature", entropy_temperatures),
    ):
        wrong = np.flatnonzero(~((values >= 0.999e-4) & (values <= 1.001e4)))
        if len(wrong):
            where = f"{name}[{wrong[0]}]" if name == "row_temperatures" else name
            raise _refuse(f"{where}: {values[wrong[0]]}, must be finite and in [1e-4, 1e4]")
    ids = np.frombuffer(request.candidate_ids, "<i4")
    offsets = np.zeros(rows + 1, np.int64)
    if len(request.candidate_offsets):
        offsets = _offsets(request.candidate_offsets, "candidate_offsets", len(ids))
        if len(offsets) != rows + 1:
            raise _refuse(f"candidate_offsets has {len(offsets)} elements for {rows} rows")
    if len(ids) > head.candidates_max:
        raise _refuse(f"candidate_ids has {len(ids)} ids, above {head.candidates_max}")
    _check_ids("candidate_ids", ids, np.zeros(len(ids), bool), vocab)
    return _CheckedRequest(
        hidden, targets, ignored, temperatures, entropy_temperatures, ids, offsets
    )


def _check_ids(
    name: str, ids: npt.NDArray[np.int32], allowed: npt.NDArray[np.bool_], vocab: int
) -> None:
    wrong = np.flatnonzero(((ids < 0) | (ids >= vocab)) & ~allowed)
    if len(wrong):
        raise _refuse(f"{name}[{wrong[0]}]: {ids[wrong[0]]}, must be in [0, {vocab})")


def _hidden(request: _wire.ScoreRequest) -> Floats:
    name = _wire.DTYPE_NAMES.get(request.dtype)
    if name is None:
        raise _refuse(f"dtype: {request.dtype}, is not known")
    wire_type = {"bf16": "<u2", "fp16": "<f2", "fp32": "<f4"}[name]
    elements = request.rows * request.hidden_size
    if len(request.hidden) != elements * np.dtype(wire_type).itemsize:
        raise _refuse(f"hidden has {len(request.hidden)} bytes for {elements} elements of {name}")
    values = np.frombuffer(request.hidden, wire_type)
    exact = fp32_from_bf16(values) if name == "bf16" else values
    return exact.astype(np.float64).reshape(request.rows, request.hidden_size)


def _array(data: _wire.Buffer, wire_type: str, name: str, rows: int) -> npt.NDArray[Any]:
    if len(data) != rows * np.dtype(wire_type).itemsize:
        raise _refuse(f"{name} has {len(data)} bytes for {rows} rows")
    return np.frombuffer(data, wire_type)


def _offsets(data: _wire.Buffer, name: str, end: int) -> npt.NDArray[np.int64]:
    offsets = np.frombuffer(data, "<u4").astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        raise _refuse(f"{name} must rise from 0 to {end}")
    return offsets


def score(head: FakeHead, request: _wire.ScoreRequest) -> _wire.ScoreResponse:
    """Scores a request. Raises Refusal."""
    checked = _check(head, request)
    rows, top_k = request.rows, request.top_k
    out: dict[str, Any] = {name: np.zeros(rows, kind) for name, kind in _ROW_TYPES.items()}
    top_ids = np.zeros((rows, top_k), "<i4")
    top_logprobs = np.zeros((rows, top_k), "<f4")
    candidates = np.zeros(len(checked.candidate_ids), "<f4")
    nonfinite = 0
    for row in np.flatnonzero(~checked.ignored):
        begin, end = checked.candidate_offsets[row : row + 2]
        with np.errstate(invalid="ignore", over="ignore"):
            z = head.logits(checked.hidden[row])
        if not np.isfinite(z).all():
            if request.reject_nonfinite:
                raise _refuse(f"hidden: the logits of row {row} hold NaN or Inf")
            nonfinite += 1
            for name, kind in _ROW_TYPES.items():
                out[name][row] = {"<f4": np.nan, "<i4": -1, "u1": 0}[kind]
            top_ids[row], top_logprobs[row], candidates[begin:end] = -1, np.nan, np.nan
            continue
        target = int(checked.targets[row])
        x, lse = _log_sum_exp(z, float(checked.temperatures[row]))
        order = np.argsort(-z, kind="stable")
        # [generated: fake_scores]
        out["logprob"][row] = min(0.0, x[target] - lse)
        out["entropy"][row] = _entropy(z, float(checked.entropy_temperatures[row]))
        out["lse"][row] = lse
        out["argmax_id"][row] = order[0]
        out["argmax_logprob"][row] = x[order[0]] - lse
        out["greedy"][row] = order[0] == target
        out["sum_p_squared"][row] = np.exp(2 * (x - lse)).sum()
        out["max_logit"][row] = z.max()
        out["min_logit"][row] = z.min()
        out["target_rank"][row] = np.flatnonzero(order == target)[0]
        # [end]
        best_ids = order[:top_k]
        top_ids[row], top_logprobs[row] = best_ids, x[best_ids] - lse
        candidates[begin:end] = x[checked.candidate_ids[begin:end]] - lse

    response = _wire.ScoreResponse(
        request_id=request.request_id,
        chunk_id=request.chunk_id,
        weights_version=head.weights_version,
        rows=rows,
        ignored_rows=int(checked.ignored.sum()),
        nonfinite_rows=nonfinite,
        timings=_wire.StageTimings(total_us=1),
    )
    bits = request.outputs or 3
    for output in _wire.OUTPUTS.values():
        if bits & output.bit:
            for name in output.arrays:
                setattr(response, name, out[name].tobytes())
    if top_k:
        response.top_k_ids, response.top_k_logprobs = top_ids.tobytes(), top_logprobs.tobytes()
    response.candidate_logprobs = candidates.tobytes()
    if len(request.segment_offsets):
        _sum(head, request, checked, out, response)
    return response


def _sum(
    head: FakeHead,
    request: _wire.ScoreRequest,
    checked: _CheckedRequest,
    out: dict[str, Any],
    response: _wire.ScoreResponse,
) -> None:
    offsets = _offsets(request.segment_offsets, "segment_offsets", request.rows)
    if len(offsets) - 1 > head.segments_max:
        raise _refuse(
            f"segment_offsets: {len(offsets) - 1} segments, must be at most {head.segments_max}"
        )
    scored = np.flatnonzero(~checked.ignored)
    sums, counts, greedy = sum_segments(
        np.searchsorted(scored, offsets), out["logprob"][scored], out["greedy"][scored]
    )
    response.segment_logprob = sums.astype("<f8").tobytes()
    response.segment_rows = counts.astype("<u4").tobytes()
    response.segment_greedy = greedy.tobytes()


def _log_sum_exp(z: Floats, temperature: float) -> tuple[Floats, float]:
    """Returns x = z / temperature and its logsumexp."""
    x = z / temperature
    most = x.max()
    return x, float(most + np.log(np.exp(x - most).sum()))


def _entropy(z: Floats, temperature: float) -> float:
    x, lse = _log_sum_exp(z, temperature)
    return float(lse - (np.exp(x - lse) * x).sum())
