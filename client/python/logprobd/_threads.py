"""The I/O of a Client: its coroutines block the calling thread and never suspend."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import grpc

from logprobd._pool import Answer, Call, Channels, Mailbox, Pool, Source, Stream, inherited
from logprobd.balance import Server
from logprobd.errors import Cancelled

T = TypeVar("T")

# Seconds that the server has to end a stream after it has answered everything.
_CLOSE_SECONDS = 0.5


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never suspends, and returns its result."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("the coroutine has suspended")


def iterate(results: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterates over an asynchronous generator that never suspends."""
    try:
        while True:
            try:
                result = finish(results.__anext__())
            except StopAsyncIteration:
                return
            yield result
    finally:
        finish(results.aclose())


class ThreadsPool(Pool):
    """The servers of a Client. Thread-safe."""

    _library = grpc

    def _start(self) -> None:
        super()._start()
        self._change = threading.Condition()
        _live.add(self)

    def forget_after_fork(self) -> None:
        """Drops connections and server state in a forked child. The parent's stay unchanged."""
        inherited.extend(self._channels.values())
        self._start()  # with new locks: a thread of the parent may have held the old ones

    async def ask(self, call: Call) -> Answer:
        method = self.channel(call.server).unary_unary(call.method)
        try:
            data = method(call.request, timeout=call.timeout, metadata=call.metadata)
        except grpc.RpcError as failed:
            return Answer.of_failed(failed)
        except ValueError as error:  # gRPC: the channel was closed meanwhile
            raise Cancelled(str(error)) from error
        return Answer(grpc.StatusCode.OK, data=data)

    def begin(self, call: Call, done: Callable[[Answer], object]) -> Any:
        method = self.channel(call.server).unary_unary(call.method)
        try:
            begun = method.future(call.request, timeout=call.timeout, metadata=call.metadata)
        except ValueError as error:  # gRPC: the channel was closed meanwhile
            raise Cancelled(str(error)) from error

        def ended(begun: Any) -> None:
            if begun.code() is grpc.StatusCode.OK:
                done(Answer(grpc.StatusCode.OK, data=begun.result()))
            else:
                done(Answer.of_failed(begun))

        begun.add_done_callback(ended)
        return begun

    async def cancel(self, calls: Sequence[Any]) -> None:
        for call in calls:
            call.cancel()

    def mailbox(self) -> Mailbox:
        return _Mailbox()

    def stream(self, server: Server, events: Mailbox) -> Stream:
        return _Stream(server, self._stream_method(server), self._settings.metadata, events)

    def source(self, batches: Iterable[Any], events: Mailbox) -> Source:
        return _Source(batches, events)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def block(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        threading.Thread(target=finish, args=(work,), name="logprobd-look-up", daemon=True).start()

    async def _wait_until(self, is_over: Callable[[], bool], end: float) -> None:
        with self._change:
            while not is_over() and (left := end - time.monotonic()) > 0:
                self.own()
                self._change.wait(left)

    def _changed(self) -> None:
        with self._change:
            self._change.notify_all()

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, {}
        self._changed()
        await self._close_channels(channels.values())

    async def _close_channels(self, closed: Iterable[Channels]) -> None:
        for channels in closed:
            for channel in channels.opened:
                channel.close()


class _Mailbox(Mailbox):
    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, event: Any) -> None:
        self._events.put(event)

    async def get(self, timeout: float | None) -> Any:
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None


class _Stream(Stream):
    """A thread reads from it, so that waiting can time out."""

    def __init__(self, server: Server, method: Any, metadata: Any, events: Mailbox) -> None:
        self.server = server
        self._events = events
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        requests = iter(self._requests.get, None)
        self._call = method(requests, metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="logprobd-stream", daemon=True)
        self._reader.start()

    def send(self, request: bytes) -> None:
        self._requests.put(request)

    def finish(self) -> None:
        self._requests.put(None)  # the server may now end the stream

    async def close(self) -> None:
        self.finish()
        self._reader.join(timeout=_CLOSE_SECONDS)
        self._call.cancel()

    async def answer(self) -> Answer:
        return Answer.of_failed(self._call)

    def _read(self) -> None:
        try:
            for message in self._call:
                self._events.put((self, message))
        except grpc.RpcError:
            pass  # `answer` tells the status
        self._events.put((self, None))


class _Source(Source):
    def __init__(self, batches: Iterable[Any], events: Mailbox) -> None:
        self._batches = iter(batches)
        self._events = events

    def request(self) -> None:
        self._batch = next(self._batches, self.END)
        self._events.put((self, None))

    def take(self) -> Any:
        return self._batch

    def finish(self) -> None:
        pass

    async def close(self) -> None:
        pass


_live: weakref.WeakSet[ThreadsPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_live):
        pool.forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)
