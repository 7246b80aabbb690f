"""The connections of an HTTP listener: how many there are, how long each may keep the listener
waiting, and what it may send ahead."""

from __future__ import annotations

import asyncio
import collections
import ipaddress
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from typing import cast

from aiohttp import StreamReader, web

CONNECTIONS_MAX = 512
"""Default of Listener's connections_max. A connection holds at most 1.5 MiB."""

STALL_SECONDS = 30.0
"""Default of Listener's stall_seconds."""

RUNNER_OPTIONS = {
    "keepalive_timeout": 60.0,  # also for a head, from its first byte or the connection's start
    "max_line_size": 4096,
    "max_field_size": 4096,
    "max_headers": 64,
    "read_bufsize": 1 << 14,  # A part of one byte takes some 40, and twice so many may wait.
}
"""Options of a web.RequestHandler for a Listener, which bound the head of a request."""

_BYTES_PER_SECOND_MIN = 1 << 20
_AHEAD_BYTES_MAX = 1 << 19  # A part that is received has at most half of it.
_PART_BYTES = 64  # of objects, for each part
_HANDSHAKE_SECONDS = 10.0
_REFUSAL_LINE_SECONDS = 10.0
_ACCEPT_RETRY_SECONDS = 0.1

LOG = logging.getLogger("logprobd-gateway")


class StallTimeout:
    """How long a peer may keep its connection waiting: for `seconds` at a time, and at a rate below
    1 MiB a second for these seconds in all.

    Args:
        expire: is called when the peer has used it up.
    """

    def __init__(self, seconds: float, expire: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._left = seconds, seconds
        self._expire = expire
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The connection waits from now on."""
        self._began = self._loop.time()
        self._timer = self._loop.call_later(max(self._left, 0.0), self._expire)

    def stop(self, moved_bytes: int) -> None:
        """The connection waits no longer, because the peer sent or took some bytes."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        left = self._left - (self._loop.time() - self._began) + moved_bytes / _BYTES_PER_SECOND_MIN
        self._left = min(left, self._seconds)

    def renew(self) -> None:
        """Forgets earlier waits."""
        self._left = self._seconds


class Connection(asyncio.Protocol):
    """A connection of a Listener, between its transport and aiohttp's handler.

    It is cut when the peer does not take what is written to it, or sends much before it is answered
    what it has sent before.
    """

    def __init__(self, handler: asyncio.Protocol, stall_seconds: float) -> None:
        self.closed = asyncio.get_running_loop().create_future()
        """Is done when the connection has ended."""
        self._handler = handler
        self._stall_seconds = stall_seconds
        self._taking = self._stall_timeout_with("took nothing of its response")
        self._transport: asyncio.Transport | None = None
        self._content: StreamReader | None = None
        self._pending_bytes = 0
        self._ahead_bytes = 0

    def begin(self, content: StreamReader) -> None:
        """A request with this body is in progress from now on."""
        self._content = content
        self._ahead_bytes = 0
        self._taking.renew()

    def cut(self, reason: str) -> None:
        if self._transport:
            peer = self._transport.get_extra_info("peername") or ("a peer that has left",)
            LOG.warning("disconnected %s, which %s", peer[0], reason)
            self._transport.abort()

    def sending(self) -> StallTimeout:
        """Returns how long the peer may take to send a body."""
        return self._stall_timeout_with("sent nothing of its request")

    def _stall_timeout_with(self, fault: str) -> StallTimeout:
        seconds = self._stall_seconds
        reason = f"{fault}, or less than 1 MiB a second, for {seconds:g} s"
        return StallTimeout(seconds, lambda: self.cut(reason))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Each write waits for its bytes, so that none are held that nobody waits for.
        self._transport.set_write_buffer_limits(1)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._content is None or self._content.is_eof():  # The handler bounds what is its body.
            self._ahead_bytes += len(data) + _PART_BYTES
            if self._ahead_bytes > _AHEAD_BYTES_MAX:
                self.cut("sent further requests without waiting for an answer")
                return
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        if self._transport:
            self._pending_bytes = self._transport.get_write_buffer_size()
        self._taking.start()
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._taking.stop(self._pending_bytes)
        self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._taking.stop(0)
        self._handler.connection_lost(exc)
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)


class Listener(web.BaseSite):
    """Accepts connections for a web.AppRunner and closes those beyond a number at once.

    Args:
        make_handler: returns aiohttp's handler of a new connection, with RUNNER_OPTIONS.
        context: of TLS, or None.
        connections_max: most connections, half of which one address, or one /64 network of IPv6,
            may have. They take at most half of the files that the process may open.
        stall_seconds: see StallTimeout.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        *,
        make_handler: Callable[[web.Server], asyncio.Protocol],
        context: ssl.SSLContext | None,
        connections_max: int,
        stall_seconds: float,
    ) -> None:
        super().__init__(runner, ssl_context=context)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.connections_max = min(connections_max, max(files // 2, 1))
        self._host, self._port = host, port
        self._make_handler = make_handler
        self._stall_seconds = stall_seconds
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._of_network: collections.Counter[str] = collections.Counter()
        self._refused = 0
        self._next_line_time = 0.0

    @property
    def name(self) -> str:
        scheme = "https" if self._ssl_context else "http"
        host, port = self._sockets[0].getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def start(self) -> None:
        """Raises OSError if the address cannot be used."""
        await super().start()
        loop = asyncio.get_running_loop()
        # asyncio resolves and binds the addresses, and its server then leaves them to this one.
        server = await loop.create_server(
            asyncio.Protocol, self._host, self._port, start_serving=False
        )
        self._sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
        server.close()
        for listening in self._sockets:
            listening.listen(128)
            listening.setblocking(False)
            self._accepting.append(loop.create_task(self._accept(listening)))

    async def stop(self) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listening in self._sockets:
            listening.close()
        await super().stop()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as error:
                LOG.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            network = network_of(address[0])
            if (
                len(self._serving) >= self.connections_max
                or self._of_network[network] >= (self.connections_max + 1) // 2
            ):
                connection.close()
                self._log_refusal(address[0])
            else:
                self._of_network[network] += 1
                task = loop.create_task(self._serve(connection, network))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)
            await asyncio.sleep(0)  # lets others have their turn while many connect

    async def _serve(self, connection: socket.socket, network: str) -> None:
        assert self._runner.server
        try:
            handler = self._make_handler(self._runner.server)
            protocol = Connection(handler, self._stall_seconds)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._ssl_context,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS if self._ssl_context else None,
            )
            await protocol.closed
        except OSError as error:
            LOG.debug("a connection ended in its handshake: %s", error)
        finally:
            self._of_network -= collections.Counter([network])  # forgets it after the last

    def _log_refusal(self, host: str) -> None:
        self._refused += 1
        now = asyncio.get_running_loop().time()
        if now >= self._next_line_time:
            LOG.warning(
                "refused %d connections, the last one of %s: at most %d are open, half of them of "
                "an address",
                *(self._refused, host, self.connections_max),
            )
            self._refused, self._next_line_time = 0, now + _REFUSAL_LINE_SECONDS


def network_of(host: str) -> str:
    """Returns what counts as one address: an address of IPv4, or a /64 network of IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def connection_of(request: web.Request) -> Connection | None:
    """Returns the connection of a request, or None if it has ended."""
    transport = request.transport
    protocol = transport.get_protocol() if transport else None
    return protocol if isinstance(protocol, Connection) else None
