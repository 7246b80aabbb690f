"""The servers of a client: connections, health checks, and look-ups.

Calls start the checks and look-ups that are due. Nothing runs while no call is made. A Pool does no
I/O: it says what is asked, and _threads.py and _asyncio.py ask it.
"""

from __future__ import annotations

import abc
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

import grpc

from logprobd import _wire, addresses
from logprobd._policy import CHECK_TIMEOUT_SECONDS, FIRST_LOOK_SECONDS
from logprobd._status import from_status
from logprobd.balance import Balance, Server
from logprobd.errors import Cancelled, LogprobdError, ServerBug, http_port_hint, tls_hint
from logprobd.info import HeadInfo, heads_from_wire
from logprobd.settings import Metadata, Settings
from logprobd.tls import TlsFiles

HEALTH_REQUEST = _wire.encode(_wire.HealthRequest(service=_wire.SCORING_SERVICE))
HEALTH_STATUS = {1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}

# Channels of a parent process, whose closing or freeing in a forked child could hang, or of an
# event loop that may still run.
inherited: list[Any] = []


class Call(NamedTuple):
    """A unary call."""

    server: Server
    method: str
    request: bytes
    timeout: float
    metadata: Metadata | None = None


class Answer(NamedTuple):
    """How a call has ended."""

    code: grpc.StatusCode
    details: str | None = None
    metadata: Any = None
    """The trailing metadata of a call that failed."""
    data: bytes = b""

    @classmethod
    def of_failed(cls, call: Any) -> Answer:
        """Returns the status of a grpc.RpcError, or of a call that has ended."""
        return cls(call.code(), call.details(), call.trailing_metadata())

    def error(self, address: str, *, is_closed: bool = False) -> LogprobdError:
        """Returns the typed error of a call that has failed.

        OK means that a stream ended before every chunk was answered. CANCELLED means that the
        server cancelled the call, for example at the end of its drain, unless the client
        `is_closed`.
        """
        code, details = self.code.name, self.details or ""
        if self.code is grpc.StatusCode.OK:
            code, details = "UNAVAILABLE", "the server ended the stream early"
        elif self.code is grpc.StatusCode.CANCELLED and not is_closed:
            code, details = "UNAVAILABLE", f"the server cancelled the call: {self.details}"
        hint = pushback_seconds(self.metadata)
        return from_status(code, details, address=address, retry_after=hint)

    def unhealthy(self) -> str:
        """Returns why a server cannot be used, from its answer to Health.Check, or "" if it can."""
        if self.code is grpc.StatusCode.UNIMPLEMENTED:
            return ""  # the server can be reached, although it has no health service
        if self.code is not grpc.StatusCode.OK:
            hint = tls_hint(self.details) or http_port_hint(self.details)
            return f"{self.code.name}: {self.details}{hint}"
        try:
            status = _wire.decode(_wire.HealthResponse, self.data).status
        except _wire.DecodeError as error:
            return f"its health cannot be read: {error}"
        if status == _wire.SERVING:
            return ""
        shown = HEALTH_STATUS.get(status, status)
        return f"health says {shown}: the server is starting or stopping"

    def heads(self) -> tuple[list[HeadInfo] | None, str]:
        """Returns the heads from an answer to ListHeads, or None and the reason."""
        if self.code is not grpc.StatusCode.OK:
            return None, f"{self.code.name}: {self.details}"
        try:
            heads = heads_from_wire(_wire.decode(_wire.ListHeadsResponse, self.data))
        except (_wire.DecodeError, ServerBug) as error:
            return None, f"its heads cannot be read: {error}"
        return (heads, "") if heads else (None, "it holds no head")


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


class Channels:
    """The connections to one server, used in turn."""

    def __init__(self, opened: Sequence[Any]) -> None:
        self.opened = opened
        self._turn = itertools.count()

    def next(self) -> Any:
        return self.opened[next(self._turn) % len(self.opened)]


class Mailbox(abc.ABC):
    """Events for one call, in the order in which they came."""

    @abc.abstractmethod
    def put(self, event: Any) -> None: ...

    @abc.abstractmethod
    async def get(self, timeout: float | None) -> Any:
        """Returns the next event, or None if none comes in time; None waits without a limit."""


class Sender(abc.ABC):
    """Puts events into a mailbox."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Begins to end its work. Does not wait."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends its work."""


class Stream(Sender):
    """A call of ScoreStream. Its events are (self, message) for each message, and (self, None) once
    the call has ended."""

    server: Server

    @abc.abstractmethod
    def send(self, request: bytes) -> None: ...

    @abc.abstractmethod
    async def answer(self) -> Answer:
        """Returns how the call has ended."""


class Source(Sender):
    """The batches of a stream. Its event (self, None) says that `take` has the requested one."""

    END: Any = object()

    @abc.abstractmethod
    def request(self) -> None: ...

    @abc.abstractmethod
    def take(self) -> Any:
        """Returns the batch, or END. Raises the errors of the caller's iterable."""


class Pool(abc.ABC):
    """The servers of one client.

    Its coroutines either wait on asyncio's event loop, or block the calling thread and never
    suspend.
    """

    _library: Any
    """Opens channels: grpc or grpc.aio."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tls = None if settings.tls is None else TlsFiles(settings.tls)
        self._closed = False
        self._start()

    def _start(self) -> None:
        self.book = addresses.AddressBook(self._settings.addresses, self._settings.find)
        self.balance = Balance(self.book.servers(), solo=self.book.is_plain)
        self._channels: dict[Server, Channels] = {}
        self._is_looking_up = False
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def own(self) -> None:
        """Must be called first by each call. Raises Cancelled after close()."""
        if self._closed:
            raise Cancelled("the client is closed: make another one")

    def channel(self, server: Server) -> Any:
        """Returns the next connection to this server. Raises Cancelled after close()."""
        with self._lock:
            if self._closed:
                raise Cancelled("the client is closed: make another one")
            channels = self._channels.get(server)
            if channels is None:
                channels = self._channels[server] = Channels(self._open(server.address))
        return channels.next()

    def _stream_method(self, server: Server) -> Any:
        return self.channel(server).stream_stream(_wire.SCORE_STREAM)

    def _open(self, address: str) -> list[Any]:
        indices = range(self._settings.channels)
        options = [self._settings.channel_options(address, index) for index in indices]
        if self._tls is None or addresses.is_unix(address):
            return [self._library.insecure_channel(address, options=each) for each in options]
        credentials = self._tls.credentials()
        return [self._library.secure_channel(address, credentials, options=o) for o in options]

    def refresh(self) -> None:
        """Starts the checks and look-ups that are due, without waiting for them."""
        if not self.balance.solo:
            self._look_up_if_due()
            self._check(self.balance.due_checks())

    async def gather(self, deadline: float, *, every: bool = False) -> None:
        """Waits until a server is ready, and up to FIRST_LOOK_SECONDS for the others.

        If `every` is true, all servers are asked for their heads again. Raises Unavailable if no
        server is ready, HeadMismatch, and Cancelled.
        """
        if self.balance.solo:
            return
        self.own()
        first_look_ends = time.monotonic() + FIRST_LOOK_SECONDS
        self._look_up_if_due()
        self._check(self.balance.due_checks(every=every, idle=not self.balance.usable()))

        def is_settled() -> bool:
            return not (self._is_looking_up or self.balance.num_checked)

        await self._wait_until(is_settled, min(deadline, first_look_ends))
        await self._wait_until(lambda: is_settled() or bool(self.balance.usable()), deadline)
        if not self.balance.heads():
            raise self.balance.gone(*self.book.errors)

    def _look_up_if_due(self) -> None:
        with self._lock:
            if self._is_looking_up or not self.book.take_due(
                time.monotonic(), self.balance.left_at
            ):
                return
            self._is_looking_up = True
        self._spawn(self._look_up())

    async def _look_up(self) -> None:
        """Makes the look-ups, which take no deadline."""
        found: dict[str, tuple[str, ...] | Exception] = {}
        try:
            for address, look_up in self.book.look_ups.items():
                try:
                    found[address] = await self.block(look_up)
                except Exception as error:  # a caller's function may raise anything
                    found[address] = error
            with self._lock:
                self.balance.set_addresses(self.book.update(found))
                # A removed server keeps its connections until its requests in flight have ended.
                stay = set(self.balance.all())
                idle = [s for s in self._channels if s not in stay and not s.requests]
                closed = [self._channels.pop(server) for server in idle]
            self._check(self.balance.due_checks())
        finally:
            self._is_looking_up = False
            self._changed()
        await self._close_channels(closed)

    def _check(self, servers: Iterable[Server]) -> None:
        for server in servers:
            _Check(self, server, self._settings).begin()

    def checked(
        self, server: Server, heads: Sequence[HeadInfo] | None, reason: str, began: float
    ) -> None:
        self.balance.checked(server, heads, reason, began)
        self._changed()

    # --- what is asked of threads or of asyncio

    @abc.abstractmethod
    async def ask(self, call: Call) -> Answer:
        """Makes a call and waits for its end. Raises Cancelled if the client is closed."""

    @abc.abstractmethod
    def begin(self, call: Call, done: Callable[[Answer], object]) -> Any:
        """Begins a call, whose end `done` gets. Returns what `cancel` takes. Raises Cancelled."""

    @abc.abstractmethod
    async def cancel(self, calls: Sequence[Any]) -> None:
        """Cancels calls that were begun."""

    @abc.abstractmethod
    def mailbox(self) -> Mailbox: ...

    @abc.abstractmethod
    def stream(self, server: Server, events: Mailbox) -> Stream:
        """Opens a stream to a server. Raises Cancelled."""

    @abc.abstractmethod
    def source(self, batches: Any, events: Mailbox) -> Source: ...

    @abc.abstractmethod
    async def sleep(self, seconds: float) -> None: ...

    @abc.abstractmethod
    async def block(self, work: Callable[..., Any], *args: Any) -> Any:
        """Returns the result of a function that may block."""

    @abc.abstractmethod
    def _spawn(self, work: Coroutine[Any, Any, None]) -> object:
        """Runs a coroutine beside the caller."""

    @abc.abstractmethod
    async def _wait_until(self, is_over: Callable[[], bool], end: float) -> None:
        """Waits until `is_over` holds, which may be after a call of `_changed`, or the time `end`.
        Raises Cancelled if the client is closed."""

    @abc.abstractmethod
    def _changed(self) -> None: ...

    @abc.abstractmethod
    async def close(self) -> None:
        """Cancels requests in flight. Idempotent."""

    @abc.abstractmethod
    async def _close_channels(self, closed: Iterable[Channels]) -> None: ...


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
            for _ in range(self._settings.channels):
                self._send(_wire.HEALTH_CHECK, HEALTH_REQUEST, self._health_came)
        except LogprobdError as error:  # the client is being closed
            self._end(None, str(error))

    def _send(self, method: str, request: bytes, done: Callable[[Answer], object]) -> None:
        metadata = self._settings.metadata
        call = Call(self._server, method, request, CHECK_TIMEOUT_SECONDS, metadata)
        self._pool.begin(call, done)

    def _health_came(self, answer: Answer) -> None:
        with self._lock:
            self._reason = self._reason or answer.unhealthy()
            self._left -= 1
            if self._left:
                return
        if self._reason:
            self._end(None, self._reason)
            return
        try:
            self._send(_wire.LIST_HEADS, b"", lambda answer: self._end(*answer.heads()))
        except LogprobdError as error:
            self._end(None, str(error))

    def _end(self, heads: Sequence[HeadInfo] | None, reason: str = "") -> None:
        self._pool.checked(self._server, heads, reason, self._began)
