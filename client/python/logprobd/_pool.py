"""The servers of a Client: connections, health checks, and look-ups.

Calls start the checks and look-ups that are due. Nothing runs while no call is made.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import grpc

from logprobd import _wire, addresses
from logprobd.balance import Balance, Server
from logprobd.errors import (
    Cancelled,
    LogprobdError,
    ServerBug,
    from_status,
    http_port_hint,
    tls_hint,
)
from logprobd.info import HeadInfo, heads_from_wire
from logprobd.settings import Settings
from logprobd.tls import TlsFiles

CHECK_TIMEOUT_SECONDS = 5.0
FIRST_LOOK_SECONDS = 1.0
"""Maximum time that the first call waits for further servers once one is ready."""

HEALTH_REQUEST = _wire.encode(_wire.HealthRequest(service=_wire.SCORING_SERVICE))
HEALTH_STATUS = {1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


# A forked child keeps its parent's channels here, because closing or freeing them could hang.
_inherited: list[Any] = []


def identity(data: bytes) -> bytes:
    """Returns `data`. gRPC uses it as serializer, because this package encodes messages itself."""
    return data


def open_channels(
    library: Any, settings: Settings, tls: TlsFiles | None, address: str
) -> list[Any]:
    """Returns the channels to one server, made by `library`: grpc or grpc.aio."""
    options = [settings.channel_options(address, index) for index in range(settings.channels)]
    if tls is None or addresses.is_unix(address):
        return [library.insecure_channel(address, options=each) for each in options]
    credentials = tls.credentials()
    return [library.secure_channel(address, credentials, options=each) for each in options]


class Channels:
    """Several connections to one server, opened at first use and used in turn. Thread-safe."""

    def __init__(self, settings: Settings, tls: TlsFiles | None, address: str) -> None:
        self._settings = settings
        self._tls = tls
        self._address = address
        self._channels: list[Any] = []
        self._closed = False
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def next(self) -> Any:
        """Returns the next channel in turn. Raises Cancelled after close()."""
        with self._lock:
            if self._closed:
                raise Cancelled("the client is closed: make another one")
            if not self._channels:
                self._channels = open_channels(grpc, self._settings, self._tls, self._address)
            return self._channels[next(self._turn) % len(self._channels)]

    def close(self) -> None:
        """Cancels requests in flight. Idempotent."""
        with self._lock:
            channels, self._channels, self._closed = self._channels, [], True
        for channel in channels:
            channel.close()

    def forget_after_fork(self) -> None:
        """Drops the connections in a forked child without closing the parent's connections."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old lock
        _inherited.extend(self._channels)
        self._channels = []


class Pool:
    """The servers of one client. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tls = None if settings.tls is None else TlsFiles(settings.tls)
        self._closed = False
        self._start()
        _live.add(self)

    def _start(self) -> None:
        self.book = addresses.AddressBook(self._settings.addresses, self._settings.find)
        self.balance = Balance(self.book.servers(), solo=self.book.is_plain)
        self._channels: dict[Server, Channels] = {}
        self._is_looking_up = False
        self._changed = threading.Condition()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def method(self, server: Server, name: str) -> Any:
        """Returns a unary method on the server's next connection. Raises Cancelled after close."""
        return self.channel(server).unary_unary(
            name, request_serializer=identity, response_deserializer=identity
        )

    def channel(self, server: Server) -> Any:
        with self._changed:
            if self._closed:
                raise Cancelled("the client is closed: make another one")
            channels = self._channels.get(server)
            if channels is None:
                channels = self._channels[server] = Channels(
                    self._settings, self._tls, server.address
                )
        return channels.next()

    def refresh(self) -> None:
        """Starts the checks and look-ups that are due, without waiting for them."""
        if self.balance.solo:
            return
        self._look_up_if_due()
        self._check(self.balance.due_checks())

    def gather(self, deadline: float, *, every: bool = False) -> None:
        """Waits until a server is ready, and up to FIRST_LOOK_SECONDS for the others.

        If `every` is true, all servers are asked for their heads again. Raises Unavailable if no
        server is ready, HeadMismatch, and Cancelled.
        """
        if self.balance.solo:
            return
        if self._closed:
            raise Cancelled("the client is closed: make another one")
        begin = time.monotonic()
        self._look_up_if_due()
        self._check(self.balance.due_checks(every=every, idle=not self.balance.usable()))
        with self._changed:
            while self._is_looking_up or self.balance.num_checked:
                if self._closed:
                    raise Cancelled("the client was closed")
                is_ready = bool(self.balance.usable())
                end = min(deadline, begin + FIRST_LOOK_SECONDS) if is_ready else deadline
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
        if not self.balance.heads():
            raise self.balance.gone(*self.book.errors)

    def close(self) -> None:
        """Cancels requests in flight. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            channels = list(self._channels.values())
        for each in channels:
            each.close()

    def forget_after_fork(self) -> None:
        """Drops connections and server state in a forked child. The parent's stay unchanged."""
        for channels in self._channels.values():
            channels.forget_after_fork()
        self._start()

    def _look_up_if_due(self) -> None:
        """Starts a look-up on its own thread if it is due. Look-ups take no deadline."""
        with self._changed:
            if self._is_looking_up or not self.book.take_due(
                time.monotonic(), self.balance.left_at
            ):
                return
            self._is_looking_up = True
        threading.Thread(target=self._look_up, name="logprobd-look-up", daemon=True).start()

    def _look_up(self) -> None:
        found: dict[str, tuple[str, ...] | Exception] = {}
        for address, look_up in self.book.look_ups.items():
            try:
                found[address] = look_up()
            except Exception as error:  # a caller's function may raise anything
                found[address] = error
        with self._changed:
            self.balance.set_addresses(self.book.update(found))
            # A removed server keeps its connections until its requests in flight have ended.
            stay = set(self.balance.all())
            idle = [s for s in self._channels if s not in stay and not s.requests]
            closed = [self._channels.pop(server) for server in idle]
        for channels in closed:
            channels.close()
        self._check(self.balance.due_checks())
        with self._changed:
            self._is_looking_up = False
            self._changed.notify_all()

    def _check(self, servers: Sequence[Server]) -> None:
        for server in servers:
            _Check(self, server, self._settings).begin()

    def checked(
        self, server: Server, heads: Sequence[HeadInfo] | None, reason: str, began: float
    ) -> None:
        with self._changed:
            self.balance.checked(server, heads, reason, began)
            self._changed.notify_all()


class _Check:
    """Asks a server for its health over every connection, then for its heads."""

    def __init__(self, pool: Pool, server: Server, settings: Settings) -> None:
        self._pool = pool
        self._server = server
        self._settings = settings
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._left = settings.channels
        self._reason = ""

    def begin(self) -> None:
        try:
            calls = [self._send(_wire.HEALTH_CHECK, HEALTH_REQUEST) for _ in range(self._left)]
        except (ValueError, LogprobdError) as error:  # the client is being closed
            self._end(None, str(error))
            return
        for call in calls:
            call.add_done_callback(self._health_came)

    def _send(self, method: str, request: bytes) -> Any:
        return self._pool.method(self._server, method).future(
            request, timeout=CHECK_TIMEOUT_SECONDS, metadata=self._settings.metadata
        )

    def _health_came(self, call: Any) -> None:
        ok = call.code() is grpc.StatusCode.OK
        reason = health_reason(call.code(), call.details(), call.result() if ok else b"")
        with self._lock:
            self._reason = self._reason or reason
            self._left -= 1
            if self._left:
                return
        if self._reason:
            self._end(None, self._reason)
            return
        try:
            self._send(_wire.LIST_HEADS, b"").add_done_callback(self._heads_came)
        except (ValueError, LogprobdError) as error:
            self._end(None, str(error))

    def _heads_came(self, call: Any) -> None:
        ok = call.code() is grpc.StatusCode.OK
        self._end(*heads_or_reason(call.code(), call.details(), call.result() if ok else b""))

    def _end(self, heads: Sequence[HeadInfo] | None, reason: str = "") -> None:
        self._pool.checked(self._server, heads, reason, self._began)


def health_reason(code: grpc.StatusCode, details: str | None, data: bytes) -> str:
    """Returns why a server cannot be used, from its answer to Health.Check, or "" if it can."""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ""  # the server can be reached, although it has no health service
    if code is not grpc.StatusCode.OK:
        return f"{code.name}: {details}{tls_hint(details) or http_port_hint(details)}"
    try:
        status = _wire.decode(_wire.HealthResponse, data).status
    except _wire.DecodeError as error:
        return f"its health cannot be read: {error}"
    if status == _wire.SERVING:
        return ""
    return f"health says {HEALTH_STATUS.get(status, status)}: the server is starting or stopping"


def heads_or_reason(
    code: grpc.StatusCode, details: str | None, data: bytes
) -> tuple[list[HeadInfo] | None, str]:
    """Returns the heads from an answer to ListHeads, or None and the reason."""
    if code is not grpc.StatusCode.OK:
        return None, f"{code.name}: {details}"
    try:
        heads = heads_from_wire(_wire.decode(_wire.ListHeadsResponse, data))
    except (_wire.DecodeError, ServerBug) as error:
        return None, f"its heads cannot be read: {error}"
    return (heads, "") if heads else (None, "it holds no head")


def error_of(call: Any, address: str, *, is_closed: bool = False) -> LogprobdError:
    """Returns the typed error of `call`, a grpc.RpcError or a call that has ended."""
    return status_error(
        call.code(), call.details(), call.trailing_metadata(), address, is_closed=is_closed
    )


def status_error(
    code: Any, details: str | None, metadata: Any, address: str, *, is_closed: bool
) -> LogprobdError:
    """Returns the typed error of a status.

    OK means that a stream ended before every chunk was answered. CANCELLED means that the server
    cancelled the call, for example at the end of its drain, unless the client `is_closed`.
    """
    if code is grpc.StatusCode.OK:
        return from_status("UNAVAILABLE", "the server ended the stream early", address=address)
    if code is grpc.StatusCode.CANCELLED and not is_closed:
        return from_status(
            "UNAVAILABLE", f"the server cancelled the call: {details}", address=address
        )
    return from_status(
        code.name, details or "", address=address, retry_after=pushback_seconds(metadata)
    )


def pushback_seconds(metadata: Any) -> float | None:
    """Returns the server's retry hint in seconds, or None if there is none.

    A negative hint means "do not retry"; so does a hint that is not a number.
    """
    for key, value in metadata or ():
        if key == "grpc-retry-pushback-ms":
            try:
                return int(value) / 1000
            except ValueError:
                return -1.0
    return None


_live: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_live):
        pool.forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)
