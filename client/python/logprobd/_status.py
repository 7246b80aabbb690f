"""Converts the status of a call, or an answer that cannot be read, to an error of this package."""

from __future__ import annotations

import dataclasses
import re
from typing import TypeVar

from logprobd import _wire
from logprobd.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    LogprobdError,
    NotFound,
    Overloaded,
    ServerBug,
    Unavailable,
    WeightsConflict,
    WeightsDataLoss,
    WeightsVersionMismatch,
    http_port_hint,
    names_a_slice,
    tls_hint,
)

Message = TypeVar("Message")

# Names that `parse_place` accepts as a field. They are fields of requests that a server may refuse.
FIELDS = frozenset(
    field.name
    for request in (_wire.ScoreRequest, _wire.VerifyRequest)
    for field in dataclasses.fields(request)
)


def decode_answer(cls: type[Message], data: bytes) -> Message:
    """Decodes an answer of the server. Raises ServerBug if it is not a message of this type."""
    try:
        return _wire.decode(cls, data)
    except _wire.DecodeError as error:
        raise ServerBug(f"the server's answer cannot be read: {error}") from error


def from_status(
    code: str, details: str, *, address: str, retry_after: float | None = None
) -> LogprobdError:
    """Returns the error for a gRPC status. `retry_after` is the server's hint in seconds."""
    if code == "INVALID_ARGUMENT":
        field, row = parse_place(details)
        return InvalidArgument(details, code=code, field=field, row=row)
    if code == "RESOURCE_EXHAUSTED":
        if "larger than max" in details:
            return InvalidArgument(
                f"{details}: lower chunk_bytes, or raise the server's message limit", code=code
            )
        hint = "" if retry_after is None else f" (it asks to wait {retry_after:.3g} s)"
        return Overloaded(
            f"{address} is overloaded{hint}: {details}. Send less at once (max_inflight), allow "
            "more time (timeout), or add replicas",
            code=code,
            retry_after=retry_after,
        )
    if code == "UNAVAILABLE":
        advice = (
            tls_hint(details)
            or http_port_hint(details)
            or (
                " Check that the server runs and that the address (LOGPROBD_ADDRESS) is correct; "
                "wait_ready() waits for a starting server"
            )
        )
        return Unavailable(
            f"{address} is not available: {details}.{advice}",
            code=code,
            retry_after=retry_after,
            details=details,
        )
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(
            f"no answer from {address} in time: {details}. Raise timeout (LOGPROBD_TIMEOUT_S) or "
            "send fewer rows per call",
            code=code,
        )
    if code == "NOT_FOUND":
        return NotFound(details, code=code)
    if code == "UNIMPLEMENTED":
        return NotFound(
            f"{address} does not serve this method: {details}. Is it a logprobd server of this "
            "version?",
            code=code,
        )
    if code == "FAILED_PRECONDITION" and names_a_slice(details):
        return Unavailable(
            f"{address} cannot read the rows where they are: {details}", code=code, details=details
        )
    if code == "FAILED_PRECONDITION":
        return WeightsVersionMismatch(
            f"{details}. Pass weights_version=0 for the live version, or see info()", code=code
        )
    if code == "CANCELLED":
        return Cancelled(details or "the call was cancelled", code=code)
    if code in ("INTERNAL", "UNKNOWN", "DATA_LOSS"):
        return ServerBug(f"{address} failed: {code}: {details}. See the server's log", code=code)
    return LogprobdError(f"{code}: {details}", code=code)


def from_weights_status(
    code: str, details: str, *, address: str, retry_after: float | None = None
) -> LogprobdError:
    """Returns the error for a status of the service Weights. `address` is that of --admin, and
    `retry_after` is the server's hint in seconds."""
    if code in ("FAILED_PRECONDITION", "ALREADY_EXISTS", "ABORTED"):
        return WeightsConflict(details, code=code)
    if code == "DATA_LOSS":
        return WeightsDataLoss(details, code=code)
    if code == "UNIMPLEMENTED" and not details:  # gRPC's own answer; the service's have a message
        return NotFound(
            f"there is no Weights service at {address}: use the address of logprobd --admin",
            code=code,
        )
    if code == "UNAVAILABLE":
        return Unavailable(
            f"{address} is not available: {details}. Check that logprobd runs with --admin "
            f"{address}",
            code=code,
            details=details,
        )
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(
            f"no answer from {address} in time: {details}. Raise timeout, or load_timeout for load "
            "and push",
            code=code,
        )
    if code == "RESOURCE_EXHAUSTED" and retry_after is not None:
        return Overloaded(
            f"{address} has no room for the call: {details}", code=code, retry_after=retry_after
        )
    if code in ("RESOURCE_EXHAUSTED", "UNIMPLEMENTED"):
        return LogprobdError(f"{code}: {details}", code=code)
    return from_status(code, details, address=address)


def parse_place(details: str) -> tuple[str | None, int | None]:
    """Parses the field and the row from a server's message: `targets[3] = 9 ...`, `row 3 ...`."""
    match = re.search(r"\b([a-z][a-z_]*)\[(\d+)\]", details)
    if match:
        return match[1], int(match[2])
    first = re.match(r"([a-z][a-z_]*)\b(?= |:|=)", details)
    field = first[1] if first and first[1] in FIELDS else None
    row = re.search(r"\brow (\d+)", details)
    return field, int(row[1]) if row else None
