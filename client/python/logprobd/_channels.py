"""The gRPC channels to one server: made at first use, in each process anew."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import grpc

from logprobd.errors import Cancelled, LogprobdError, from_status
from logprobd.settings import Settings

# Channels that a forked child got from its parent: closing or freeing them there could hang.
_inherited: list[Any] = []


def identity(data: bytes) -> bytes:
    """Messages are encoded by this package, so gRPC passes bytes through."""
    return data


class Channels:
    """Several connections to one server, used in turn. Any thread may use it."""

    def __init__(self, settings: Settings, address: str) -> None:
        self._settings = settings
        self._address = address
        self._channels: list[Any] = []
        self._closed = False
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def next(self) -> Any:
        """The next channel in turn. Cancelled after close()."""
        with self._lock:
            if self._closed:
                raise Cancelled("the client is closed: make another one")
            if not self._channels:
                self._channels = [
                    grpc.insecure_channel(
                        self._address, options=self._settings.channel_options(self._address, index)
                    )
                    for index in range(self._settings.channels)
                ]
            return self._channels[next(self._turn) % len(self._channels)]

    def close(self) -> None:
        """Cancels what is in flight. Idempotent."""
        with self._lock:
            channels, self._channels, self._closed = self._channels, [], True
        for channel in channels:
            channel.close()

    def forget_after_fork(self) -> None:
        """In a child: leaves the parent's connections alone; new ones are made at first use."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        _inherited.extend(self._channels)
        self._channels = []


def error_of(call: Any, address: str, *, is_closed: bool = False) -> LogprobdError:
    """The typed error of a failed call: a grpc.RpcError, or a call that has ended."""
    return status_error(
        call.code(), call.details(), call.trailing_metadata(), address, is_closed=is_closed
    )


def status_error(
    code: Any, details: str | None, metadata: Any, address: str, *, is_closed: bool
) -> LogprobdError:
    """The typed error of a status. OK stands for a stream that ended before all was answered, and
    CANCELLED, unless the client `is_closed`, for a server that gave the call up, at the end of its
    drain for instance."""
    if code is grpc.StatusCode.OK:
        return from_status("UNAVAILABLE", "the server ended the stream early", address=address)
    if code is grpc.StatusCode.CANCELLED and not is_closed:
        return from_status("UNAVAILABLE", f"the server cancelled it: {details}", address=address)
    return from_status(
        code.name, details or "", address=address, retry_after=pushback_seconds(metadata)
    )


def pushback_seconds(metadata: Any) -> float | None:
    """The server's retry hint; negative ("do not retry") also for what is not a number."""
    for key, value in metadata or ():
        if key == "grpc-retry-pushback-ms":
            try:
                return int(value) / 1000
            except ValueError:
                return -1.0
    return None
