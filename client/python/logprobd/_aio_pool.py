"""The servers of an AsyncClient. This is the asyncio counterpart of _pool.py."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio

from logprobd import _wire, addresses
from logprobd._pool import (
    CHECK_TIMEOUT_SECONDS,
    FIRST_LOOK_SECONDS,
    HEALTH_REQUEST,
    heads_or_reason,
    health_reason,
    open_channels,
)
from logprobd.balance import Balance, Server
from logprobd.errors import Cancelled
from logprobd.settings import Settings
from logprobd.tls import TlsFiles

# Channels of a parent process, or of an event loop that may still run. This process and loop never
# close them.
_inherited: list[Any] = []


class AioPool:
    """The servers of one client. It is used on one event loop at a time, and each new loop starts
    with new connections."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tls = None if settings.tls is None else TlsFiles(settings.tls)
        self._closed = False
        self._owner: tuple[int, Any] = (0, None)
        self._turn = itertools.count()
        self._start()

    def _start(self) -> None:
        self.book = addresses.AddressBook(self._settings.addresses, self._settings.find)
        self.balance = Balance(self.book.servers(), solo=self.book.is_plain)
        self._channels: dict[Server, list[Any]] = {}
        self._is_looking_up = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def own(self) -> None:
        """Drops connections of another process or event loop. Call it before any other method.

        Raises Cancelled after close().
        """
        if self._closed:
            raise Cancelled("the client is closed: make another one")
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._owner != owner:
            pid, loop = self._owner
            if pid != owner[0] or not loop.is_closed():
                _inherited.extend(self._channels.values())
            # The channels of a closed loop are closed when their last reference is released.
            self._owner = owner
            self._start()

    def channel(self, server: Server) -> Any:
        """Returns the next connection to this server. Raises Cancelled after close()."""
        if self._closed:
            raise Cancelled("the client is closed: make another one")
        if server not in self._channels:
            self._channels[server] = open_channels(
                grpc.aio, self._settings, self._tls, server.address
            )
        channels = self._channels[server]
        return channels[next(self._turn) % len(channels)]

    def method(self, server: Server, name: str) -> Any:
        """Returns a unary method on the server's next connection. Raises Cancelled after close."""
        # Without a serializer, gRPC passes bytes through.
        return self.channel(server).unary_unary(name)

    def refresh(self) -> None:
        """Starts the checks and look-ups that are due, without waiting for them."""
        if self.balance.solo:
            return
        self._look_up_if_due()
        self._check(self.balance.due_checks())

    async def gather(self, deadline: float, *, every: bool = False) -> None:
        """See Pool.gather."""
        if self.balance.solo:
            return
        begin = time.monotonic()
        self._look_up_if_due()
        self._check(self.balance.due_checks(every=every, idle=not self.balance.usable()))
        while (self._is_looking_up or self.balance.num_checked) and self._tasks:
            is_ready = bool(self.balance.usable())
            end = min(deadline, begin + FIRST_LOOK_SECONDS) if is_ready else deadline
            left = end - time.monotonic()
            if left <= 0:
                break
            await asyncio.wait(self._tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not self.balance.heads():
            raise self.balance.gone(*self.book.errors)

    async def close(self) -> None:
        """Cancels requests in flight. Idempotent."""
        channels, self._channels, self._closed = self._channels, {}, True
        tasks, self._tasks = self._tasks, set()
        if self._owner[0] != os.getpid():
            _inherited.extend(channels.values())
            return
        for task in tasks:
            task.cancel()
        await _close(itertools.chain.from_iterable(channels.values()))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look_up_if_due(self) -> None:
        if not self._is_looking_up and self.book.take_due(time.monotonic(), self.balance.left_at):
            self._is_looking_up = True
            self._spawn(self._look_up())

    async def _look_up(self) -> None:
        found: dict[str, tuple[str, ...] | Exception] = {}
        try:
            loop = asyncio.get_running_loop()
            for address, look_up in self.book.look_ups.items():
                try:
                    found[address] = await loop.run_in_executor(None, look_up)
                except Exception as error:  # a caller's function may raise anything
                    found[address] = error
            self.balance.set_addresses(self.book.update(found))
            self._check(self.balance.due_checks())
        finally:
            self._is_looking_up = False
        # A removed server keeps its connections until its requests in flight have ended.
        stay = set(self.balance.all())
        idle = [s for s in self._channels if s not in stay and not s.requests]
        await _close([channel for server in idle for channel in self._channels.pop(server)])

    def _check(self, servers: Iterable[Server]) -> None:
        for server in servers:
            self._spawn(self._check_one(server))

    async def _check_one(self, server: Server) -> None:
        began = time.monotonic()
        heads, reason = None, "the check was cancelled"
        try:
            answers = await asyncio.gather(
                *(
                    self._ask(server, _wire.HEALTH_CHECK, HEALTH_REQUEST)
                    for _ in range(self._settings.channels)
                )
            )
            reason = next(filter(None, itertools.starmap(health_reason, answers)), "")
            if not reason:
                heads, reason = heads_or_reason(*await self._ask(server, _wire.LIST_HEADS, b""))
        except (Cancelled, grpc.aio.UsageError) as error:  # the client is being closed
            reason = str(error)
        finally:
            self.balance.checked(server, heads, reason, began)

    async def _ask(
        self, server: Server, method: str, request: bytes
    ) -> tuple[grpc.StatusCode, str | None, bytes]:
        try:
            data = await self.method(server, method)(
                request, timeout=CHECK_TIMEOUT_SECONDS, metadata=self._settings.metadata
            )
        except grpc.RpcError as error:
            return error.code(), error.details(), b""
        return grpc.StatusCode.OK, None, data


async def _close(channels: Iterable[Any]) -> None:
    for channel in channels:
        await channel.close()
