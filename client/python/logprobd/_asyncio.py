"""The I/O of an AsyncClient: its coroutines wait on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from logprobd._pool import Answer, Call, Channels, Mailbox, Pool, Source, Stream, inherited
from logprobd.balance import Server
from logprobd.errors import Cancelled

T = TypeVar("T")

# The message of grpc.aio after a write to a stream that the server has ended; the server's status
# is lost.
_WRITE_FAILED = "Internal error from Core"


class AsyncioPool(Pool):
    """The servers of an AsyncClient. It is used on one event loop at a time, and each new loop
    starts with new connections."""

    _library = grpc.aio
    _owner: tuple[int, Any] = (0, None)

    def _start(self) -> None:
        super()._start()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._change: asyncio.Future[None] | None = None

    def own(self) -> None:
        """Drops connections of another process or event loop."""
        super().own()
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._owner != owner:
            pid, loop = self._owner
            if pid != owner[0] or not loop.is_closed():
                inherited.extend(self._channels.values())
            # The channels of a closed loop are closed when their last reference is released.
            self._owner = owner
            self._start()

    async def ask(self, call: Call) -> Answer:
        method = self.channel(call.server).unary_unary(call.method)
        try:
            data = await method(call.request, timeout=call.timeout, metadata=call.metadata)
        except grpc.RpcError as failed:
            return Answer.of_failed(failed)
        except grpc.aio.UsageError as error:  # the channel was closed meanwhile
            raise Cancelled(str(error)) from error
        except asyncio.CancelledError:
            if self._closed:  # gRPC reports a closed channel as a cancelled task
                raise Cancelled("the client was closed") from None
            raise
        return Answer(grpc.StatusCode.OK, data=data)

    def begin(self, call: Call, done: Callable[[Answer], object]) -> Any:
        def ended(task: asyncio.Task[Answer]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                done(task.result())
            elif isinstance(error, (Cancelled, asyncio.CancelledError)):
                done(Answer(grpc.StatusCode.CANCELLED, str(error)))
            else:  # an error in this package or in an interceptor, which a retry would only hide
                done(Answer(grpc.StatusCode.INTERNAL, repr(error)))

        task = self._spawn(self.ask(call))
        task.add_done_callback(ended)
        return task

    async def cancel(self, calls: Sequence[Any]) -> None:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def mailbox(self) -> Mailbox:
        return _Mailbox()

    def stream(self, server: Server, events: Mailbox) -> Stream:
        return _Stream(server, self._stream_method(server), self._settings.metadata, events)

    def source(self, batches: Iterable[Any] | AsyncIterable[Any], events: Mailbox) -> Source:
        return _Source(batches, events)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def block(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(work, *args)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait_until(self, is_over: Callable[[], bool], end: float) -> None:
        while not is_over() and (left := end - time.monotonic()) > 0:
            self.own()
            if self._change is None:
                self._change = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._change], timeout=left)

    def _changed(self) -> None:
        change, self._change = self._change, None
        if change is not None:
            change.set_result(None)

    async def close(self) -> None:
        channels, self._channels, self._closed = self._channels, {}, True
        tasks, self._tasks = self._tasks, set()
        if self._owner[0] != os.getpid():
            inherited.extend(channels.values())
            return
        for task in tasks:
            task.cancel()
        self._changed()
        await self._close_channels(channels.values())

    async def _close_channels(self, closed: Iterable[Channels]) -> None:
        for channels in closed:
            for channel in channels.opened:
                await channel.close()


class _Mailbox(Mailbox):
    def __init__(self) -> None:
        self._events: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Any) -> None:
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self, timeout: float | None) -> Any:
        if not self._events and timeout != 0:
            self._waiter = asyncio.get_running_loop().create_future()
            if timeout is None:
                await self._waiter
            else:
                await asyncio.wait([self._waiter], timeout=timeout)
        return self._events.popleft() if self._events else None


class _Stream(Stream):
    """It has a task for writing and one for reading, so that a server that does not read delays no
    other server."""

    def __init__(self, server: Server, method: Any, metadata: Any, events: Mailbox) -> None:
        self.server = server
        self._events = events
        self._call = method(metadata=metadata)
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks = [asyncio.ensure_future(work) for work in (self._write(), self._read())]

    def send(self, request: bytes) -> None:
        self._unsent.put_nowait(request)

    def finish(self) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.finish()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def answer(self) -> Answer:
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.INTERNAL and details == _WRITE_FAILED:
            return Answer(grpc.StatusCode.UNAVAILABLE, "the stream broke")
        return Answer(code, details, await self._call.trailing_metadata())

    async def _write(self) -> None:
        # The reader reports the end of the stream.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await self._call.write(await self._unsent.get())

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._events.put((self, message))
        except grpc.RpcError:
            pass  # `answer` tells the status
        finally:  # also when the channel was closed, which cancels the read
            self._events.put((self, None))


class _Source(Source):
    def __init__(self, batches: Iterable[Any] | AsyncIterable[Any], events: Mailbox) -> None:
        self._batches = _iterate(batches)
        self._events = events
        self._taking: asyncio.Task[Any] | None = None

    def request(self) -> None:
        self._taking = asyncio.ensure_future(self._next())
        self._taking.add_done_callback(lambda _: self._events.put((self, None)))

    async def _next(self) -> Any:
        return await anext(self._batches, self.END)

    def take(self) -> Any:
        assert self._taking is not None
        return self._taking.result()

    def finish(self) -> None:
        if self._taking is not None:
            self._taking.cancel()

    async def close(self) -> None:
        if self._taking is not None:
            await asyncio.gather(self._taking, return_exceptions=True)


async def _iterate(batches: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch
