"""The errors of this package. Each is a LogprobdError whose message says what to change.

The classes also extend the nearest built-in exception, and they survive pickling (for Ray and
multiprocessing).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from logprobd import _wire

# Names of grpc.StatusCode by number, as in ScoreResponse.status_code.
_CODES = {
    1: "CANCELLED",
    2: "UNKNOWN",
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    5: "NOT_FOUND",
    6: "ALREADY_EXISTS",
    7: "PERMISSION_DENIED",
    8: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    10: "ABORTED",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    15: "DATA_LOSS",
    16: "UNAUTHENTICATED",
}


# Names that `parse_place` accepts as a field. They are fields of requests that a server may refuse.
FIELDS = frozenset(
    field.name
    for request in (_wire.ScoreRequest, _wire.VerifyRequest)
    for field in dataclasses.fields(request)
)


class LogprobdError(Exception):
    """Base of all errors of this package.

    `code` is the name of the gRPC status, or "" for an error that this package detected itself.
    """

    code: str = ""

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)
        for name, value in attributes.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[LogprobdError], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidArgument(LogprobdError, ValueError):
    """The request is invalid. Sending it again will not help.

    `field` names the argument and `row` is the first offending row of the flattened hidden states;
    each is None if the message does not name it.
    """

    field: str | None = None
    row: int | None = None


class NotFound(LogprobdError, LookupError):
    """The head does not exist, or the address is not that of a logprobd server."""


class Overloaded(LogprobdError):
    """The server stayed full through every retry.

    `retry_after` is the server's hint in seconds. None means that there is no hint, and a negative
    value means that the client must not retry.
    """

    retry_after: float | None = None


class Unavailable(LogprobdError, ConnectionError):
    """The server cannot be reached, is starting, or is stopping, or the requested transport is not
    available."""

    retry_after: float | None = None
    details: str = ""
    """The message of the server or of gRPC, without this package's advice."""


class DeadlineExceeded(LogprobdError, TimeoutError):
    """The call's timeout passed before its answer arrived."""


class WeightsVersionMismatch(LogprobdError):
    """The requested weights_version is not live, or no single version could score the whole
    call."""


class WeightsConflict(LogprobdError):
    """The versions of a head do not allow this change of its weights.

    `code` is FAILED_PRECONDITION (for example if another version is staged), ALREADY_EXISTS (the
    version is live or kept) or ABORTED (another call changes the head: call again later).
    """


class WeightsDataLoss(LogprobdError):
    """Weights have another sha256 than requested, changed while they were read, or differ from rows
    that the server has received before."""


class HeadMismatch(LogprobdError):
    """The servers of this client hold different heads."""


class Cancelled(LogprobdError):
    """The call was cancelled, for instance by close() in another thread."""


class ServerBug(LogprobdError):
    """The server failed, or its answer breaks the protocol."""


def code_name(number: int) -> str:
    """Returns the name of a gRPC status code."""
    return _CODES.get(number, "UNKNOWN")


# Parts of gRPC's messages which say that the peer speaks HTTP/1 instead of HTTP/2.
_HTTP1_WORDS = ("http1.x server", "Failed parsing HTTP/2")


def http_port_hint(details: str | None) -> str:
    """Returns advice if gRPC's message says that the peer speaks HTTP/1, otherwise ""."""
    if details is None or not any(word in details for word in _HTTP1_WORDS):
        return ""
    return (
        " The peer answers with HTTP/1: is this the --http port? The gRPC port is 8470 by default."
    )


_CLOSED_AT_ONCE = (
    "The peer closed the connection at once: a server with --tls-cert needs "
    "tls=logprobd.Tls(...), and one with --tls-client-ca also tls.cert and tls.key of a CA "
    "that it trusts"
)
# Parts of gRPC's messages about failed connections, and what to check. The first match counts.
_TLS_HINTS = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        "The server's certificate is not trusted: check that tls.ca contains the CA that issued "
        "it, and that it has not expired",
    ),
    (
        "Hostname Verification Check failed",
        "The server's certificate does not contain the host of the address: use another address, "
        "or set tls.server_name",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "The peer speaks no TLS: check the port, that the server runs with --tls-cert, or leave "
        "tls out",
    ),
    ("Socket closed", _CLOSED_AT_ONCE),
    ("Connection reset", _CLOSED_AT_ONCE),
)


def tls_hint(details: str | None) -> str:
    """Returns advice if gRPC's message says that TLS may be why it cannot connect, otherwise ""."""
    if details is None or "failed to connect" not in details:
        return ""
    return next((f" {advice}" for words, advice in _TLS_HINTS if words in details), "")


def refuses_tls(details: str | None) -> bool:
    """Returns whether gRPC's message says that TLS is why it cannot connect, beyond doubt: a closed
    connection may also be that of a server that stops."""
    return tls_hint(details) not in ("", f" {_CLOSED_AT_ONCE}")


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
    if code == "FAILED_PRECONDITION" and _names_a_slice(details):
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


# Words in the server's messages when it refuses the memory that contains the rows.
_SLICE_WORDS = ("shared_memory", "cuda_ipc", " region", " lease")


def is_placement_refusal(error: LogprobdError) -> bool:
    """Returns whether the server refused the location of the rows and not the request itself.

    The same request with another placement may then succeed, while a plain retry fails again.
    """
    return is_answer(error) and _names_a_slice(str(error))


def is_answer(error: LogprobdError) -> bool:
    """Returns whether the server has ended the request with this error. Otherwise it may still read
    memory of the request."""
    no_answer = ("", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
    return error.code not in no_answer


def _names_a_slice(message: str) -> bool:
    return any(word in message for word in _SLICE_WORDS)


def parse_place(details: str) -> tuple[str | None, int | None]:
    """Parses the field and the row from a server's message: `targets[3] = 9 ...`, `row 3 ...`."""
    match = re.search(r"\b([a-z][a-z_]*)\[(\d+)\]", details)
    if match:
        return match[1], int(match[2])
    first = re.match(r"([a-z][a-z_]*)\b(?= |:|=)", details)
    field = first[1] if first and first[1] in FIELDS else None
    row = re.search(r"\brow (\d+)", details)
    return field, int(row[1]) if row else None
