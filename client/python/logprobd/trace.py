"""The times of a call on the server, and the caller's trace to which the call belongs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from logprobd import _wire

InjectTrace = Callable[[dict[str, str]], object]
"""Writes the W3C header `traceparent` of the current span into a dict, as OpenTelemetry's
`propagate.inject` does."""

TRACEPARENT_LENGTH_MAX = 256

_STAGES = ("receive", "queue", "copy", "engine", "reply")


@dataclass(frozen=True)
class StageTrace:
    """Begin and end of a stage, in nanoseconds since 1970-01-01 UTC on the clock of the server's
    host."""

    begin_unix_ns: int
    end_unix_ns: int


@dataclass(frozen=True)
class RequestTrace:
    """When one request of a call passed the stages of the server.

    For a request whose rows the server scored in one batch, the stages follow each other without a
    gap. For one in several batches, queue, copy and engine reach from the first to the last batch,
    and overlap.
    """

    traceparent: str
    """The W3C traceparent that counted; "" if the call had no valid one."""
    kernel_ns: int
    """Time of the kernels within the stage "engine", summed over the request's batches."""
    stages: Mapping[str, StageTrace] = field(default_factory=dict)
    """The stages in their order: "receive" (parsing, validation and admission), "queue", "copy"
    (to the engine's memory), "engine" (waiting for its earlier batch, copies to and from the
    devices, and kernels) and "reply". A request without scored rows has no "copy" and
    "engine"."""


def trace_from_wire(trace: _wire.Trace) -> RequestTrace:
    """Returns the trace of a response, with times of the wall clock."""
    begin = trace.received_unix_ns
    found = ((name, getattr(trace, name)) for name in _STAGES)
    return RequestTrace(
        traceparent=trace.traceparent,
        kernel_ns=trace.kernel_ns,
        stages={
            name: StageTrace(begin + stage.begin_ns, begin + stage.end_ns)
            for name, stage in found
            if stage is not None
        },
    )


def can_travel(traceparent: object) -> TypeGuard[str]:
    """Returns whether a value can be sent as gRPC metadata; the server checks the rest."""
    return (
        isinstance(traceparent, str)
        and len(traceparent) <= TRACEPARENT_LENGTH_MAX
        and traceparent.isascii()
        and traceparent.isprintable()
    )
