"""The errors of this package. Each is a LogprobdError whose message says what to change.

The classes also extend the nearest built-in exception, and they survive pickling (for Ray and
multiprocessing).
"""

from __future__ import annotations

from typing import Any

import grpc


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


# Names of status codes by number, as in ScoreResponse.status_code.
_CODES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


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


# Words in the server's messages when it refuses the memory that contains the rows.
_SLICE_WORDS = ("shared_memory", "cuda_ipc", " region", " lease")


def is_placement_refusal(error: LogprobdError) -> bool:
    """Returns whether the server refused the location of the rows and not the request itself.

    The same request with another placement may then succeed, while a plain retry fails again.
    """
    return is_answer(error) and names_a_slice(str(error))


def is_answer(error: LogprobdError) -> bool:
    """Returns whether the server has ended the request with this error. Otherwise it may still read
    memory of the request."""
    no_answer = ("", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
    return error.code not in no_answer


def names_a_slice(message: str) -> bool:
    """Returns whether a message of the server is about the memory that contains the rows."""
    return any(word in message for word in _SLICE_WORDS)
