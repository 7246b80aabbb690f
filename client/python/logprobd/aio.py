"""The asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Any

import grpc
import grpc.aio

from logprobd import _wire, settings
from logprobd._channels import error_of, status_error
from logprobd._core import (
    STALE_FACTS,
    SWAP_ROUNDS_MAX,
    ClientCore,
    decode_answer,
    too_many_swaps,
)
from logprobd._stream import StreamBook, stream_plan
from logprobd.assembly import Assembly
from logprobd.errors import (
    Cancelled,
    InvalidArgument,
    LogprobdError,
    Overloaded,
    Unavailable,
    from_status,
)
from logprobd.facts import HeadInfo, VerifyReport, choose_head, heads_from_wire
from logprobd.plan import Chunk, Progress, ScorePlan
from logprobd.result import ScoreResult
from logprobd.retry import Window

_Batch = tuple[Any, Any] | Mapping[str, Any]
_END = object()  # in place of a batch: there are no more
_inherited: list[Any] = []  # channels of a parent process or of another loop: never closed here


class AsyncClient(ClientCore):
    __doc__ = f"""{ClientCore.__doc__}
    The methods are those of Client, awaited. Arrays are encoded, and CUDA tensors copied, on the
    event loop: a few milliseconds a request. One event loop at a time.
    """

    def _start(self, chosen: settings.Settings) -> None:
        super()._start(chosen)
        self._open: list[Any] = []
        self._owner: tuple[int, Any] = (0, None)
        self._turn = itertools.count()
        self._closed = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections and cancels what is in flight. Idempotent."""
        channels, self._open, self._closed = self._open, [], True
        if self._owner[0] != os.getpid():
            _inherited.extend(channels)
            return
        for channel in channels:
            await channel.close()

    async def score(
        self,
        hidden: Any,
        targets: Any,
        *,
        temperature: Any = 1.0,
        outputs: Iterable[str] = ("logprob", "entropy"),
        entropy_temperature: float | None = None,
        candidates: Any = None,
        top_k: int = 0,
        segments: Any = None,
        ignore_index: int = -100,
        head: str = "",
        weights_version: int = 0,
        priority: str = "normal",
        reject_nonfinite: bool = False,
        dtype: str | None = None,
        request_id: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> ScoreResult:
        """As Client.score."""
        deadline = self._deadline(timeout)
        plan = ScorePlan(
            hidden,
            targets,
            temperature=temperature,
            outputs=outputs,
            entropy_temperature=entropy_temperature,
            candidates=candidates,
            top_k=top_k,
            segments=segments,
            ignore_index=ignore_index,
            head=head,
            weights_version=weights_version,
            priority=priority,
            reject_nonfinite=reject_nonfinite,
            dtype=dtype,
            request_id=request_id,
        )
        try:
            _, chunks = await self._cut(plan, deadline)
            return await self._score_chunks(plan, chunks, deadline, progress)
        except STALE_FACTS:
            self._heads = []
            raise

    async def score_stream(
        self,
        batches: Iterable[_Batch] | AsyncIterable[_Batch],
        *,
        on_error: str = "raise",
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncIterator[ScoreResult]:
        """As Client.score_stream; `batches` may be an async iterable too.

        An async iterable may wait for earlier results: they are yielded meanwhile.
        """
        if on_error not in ("raise", "return"):
            raise InvalidArgument(f'on_error is "{on_error}": use "raise" or "return"')
        seconds = self._settings.timeout if timeout is None else timeout
        source = _iterate(batches)
        book = StreamBook(self._settings)
        stream: _AioStream | None = None
        taking: asyncio.Future[Any] | None = None
        exhausted = False
        wake = asyncio.Event()  # set by a taken batch and by each event of the stream
        try:
            while True:
                wake.clear()
                if taking is not None and taking.done():
                    batch, taking = taking.result(), None
                    if batch is _END:
                        exhausted = True
                    else:
                        await self._take(batch, options, book, seconds)
                while stream is not None and (event := stream.next_event()) is not None:
                    if isinstance(event, bytes):
                        book.receive(event, time.monotonic())
                    else:
                        stream = None
                        book.reconnect(await _aio_error(event, self.address), time.monotonic())
                while (request := book.next_request(time.monotonic())) is not None:
                    if stream is None:
                        stream = _AioStream(self._channel(), self._settings.metadata, wake)
                    await stream.send(request)
                for result in book.finished():
                    if isinstance(result, STALE_FACTS):
                        self._heads = []
                    if on_error == "raise" and isinstance(result, LogprobdError):
                        raise result
                    yield result  # type: ignore[misc]  # an error only where asked for
                if exhausted and book.is_empty:
                    return
                if taking is None and not exhausted and book.has_room:
                    taking = asyncio.ensure_future(_next_batch(source))
                    taking.add_done_callback(lambda _: wake.set())
                if not wake.is_set():
                    pause = book.pause(time.monotonic())  # its DeadlineExceeded is a TimeoutError
                    with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                        await asyncio.wait_for(wake.wait(), pause)
        finally:
            if taking is not None:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
            if stream is not None:
                await stream.close()

    async def _take(
        self, batch: _Batch, options: Mapping[str, Any], book: StreamBook, seconds: float
    ) -> None:
        """Enters a batch in the book, as failed where its arguments or its head are wrong."""
        try:
            plan = stream_plan(batch, options)
            head, chunks = await self._cut(plan, time.monotonic() + seconds)
            book.add(plan, chunks, head.limits, seconds)
        except STALE_FACTS as error:
            book.add_failed(error)

    async def list_heads(self, *, timeout: float | None = None) -> list[HeadInfo]:
        """As Client.list_heads."""
        data = await self._unary(_wire.LIST_HEADS, b"", self._deadline(timeout))
        heads = heads_from_wire(decode_answer(_wire.ListHeadsResponse, data))
        self._heads = heads
        return list(heads)

    async def info(self, head: str = "", *, timeout: float | None = None) -> HeadInfo:
        """As Client.info."""
        return choose_head(await self.list_heads(timeout=timeout), head)

    async def verify(
        self, rows: int = 0, seed: int = 0, *, head: str = "", timeout: float | None = None
    ) -> VerifyReport:
        """As Client.verify."""
        request = _wire.encode(_wire.VerifyRequest(head=head, rows=rows, seed=seed))
        data = await self._unary(_wire.VERIFY, request, self._deadline(timeout))
        return VerifyReport(**vars(decode_answer(_wire.VerifyResponse, data)))

    async def wait_ready(self, timeout: float | None = None) -> None:
        """As Client.wait_ready."""
        deadline = self._deadline(timeout)
        request = _wire.encode(_wire.HealthRequest(service=_wire.SCORING_SERVICE))
        reason = "no answer yet"
        pause = 0.02
        while (left := deadline - time.monotonic()) > 0:
            try:
                data = await self._method(_wire.HEALTH_CHECK)(request, timeout=min(left, 5.0))
                status = decode_answer(_wire.HealthResponse, data).status
                if status == _wire.SERVING:
                    return
                reason = f"health status {status}: starting or stopping"
            except grpc.RpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, 0.5)
        raise Unavailable(f"{self.address} is not ready: {reason}. Raise timeout, or see its log")

    def _channel(self) -> Any:
        """The next channel in turn, made at first use in each process and event loop."""
        if self._closed:
            raise Cancelled("the client is closed: make another one")
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._owner != owner:
            _inherited.extend(self._open)
            self._open, self._owner = [], owner
        if not self._open:
            self._open = [
                grpc.aio.insecure_channel(
                    self._settings.address, options=self._settings.channel_options(index)
                )
                for index in range(self._settings.channels)
            ]
        return self._open[next(self._turn) % len(self._open)]

    def _method(self, name: str) -> Any:
        # Bytes pass through when no serializer is given.
        return self._channel().unary_unary(name)

    async def _unary(self, method: str, request: bytes, deadline: float) -> bytes:
        """One call with its retries. Typed errors."""
        attempts = 0
        while True:
            attempts += 1
            answer = await self._attempt(method, request, deadline)
            if isinstance(answer, bytes):
                return answer
            delay = self._retry_delay(answer, attempts, deadline)
            if delay is None:
                raise answer
            await asyncio.sleep(delay)

    async def _attempt(self, method: str, request: bytes, deadline: float) -> bytes | LogprobdError:
        """One call, sent once: its answer, or the error to retry or raise."""
        try:
            return await self._method(method)(  # type: ignore[no-any-return]
                request, timeout=self._left(deadline), metadata=self._settings.metadata
            )
        except grpc.RpcError as failed:
            return error_of(failed, self.address)
        except grpc.aio.UsageError as failed:  # the channel was closed meanwhile
            raise Cancelled(str(failed)) from failed

    async def _head(self, name: str, deadline: float, *, fresh: bool = False) -> HeadInfo:
        heads = self._heads  # read once: another task's error may empty it
        if fresh or not heads:
            heads = await self.list_heads(timeout=self._left(deadline))
        return choose_head(heads, name)

    async def _cut(self, plan: ScorePlan, deadline: float) -> tuple[HeadInfo, list[Chunk]]:
        """The head and the requests of a call, by the head's facts as of now."""
        head = await self._head(plan.head, deadline)
        if plan.hidden.hidden_size != head.hidden_size:
            head = await self._head(plan.head, deadline, fresh=True)
        plan.check_head(head)
        return head, plan.cut(head, self._settings.chunk_rows, self._settings.chunk_bytes)

    async def _score_chunks(
        self, plan: ScorePlan, chunks: list[Chunk], deadline: float, progress: Progress | None
    ) -> ScoreResult:
        assembly = Assembly(plan, chunks)
        slots = _Slots(self._settings.max_inflight)

        async def answer_of(chunk: Chunk) -> bytes:
            attempts = 0
            while True:
                attempts += 1
                async with slots:
                    answer = await self._attempt(_wire.SCORE, plan.encode(chunk), deadline)
                    if isinstance(answer, bytes):
                        slots.window.succeeded()
                        return answer
                    if isinstance(answer, Overloaded):
                        slots.window.refused()
                delay = self._retry_delay(answer, attempts, deadline)
                if delay is None:
                    raise plan.locate(answer, chunk)
                await asyncio.sleep(delay)

        async def score_chunk(chunk: Chunk) -> None:
            data = await answer_of(chunk)
            assembly.add(chunk, decode_answer(_wire.ScoreResponse, data))
            if progress is not None:
                progress(assembly.rows_done, plan.rows)

        for _ in range(SWAP_ROUNDS_MAX):
            tasks = [asyncio.ensure_future(score_chunk(chunk)) for chunk in assembly.unanswered()]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            assembly.drop_other_versions()
            if not assembly.unanswered():
                return assembly.result()
        raise too_many_swaps(self.address)


class _Slots:
    """Requests under way at once: as many as the window allows at the moment."""

    def __init__(self, most: int) -> None:
        self.window = Window(most)
        self._held = 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._held < self.window.size)
            self._held += 1

    async def __aexit__(self, *_: object) -> None:
        self._held -= 1
        async with self._changed:
            # As many as now find room, not all: with thousands of chunks that would be millions.
            self._changed.notify(max(0, self.window.size - self._held))


class _AioStream:
    """A ScoreStream call; a task of its own reads, and sets `wake` at each event."""

    def __init__(self, channel: Any, metadata: Any, wake: asyncio.Event) -> None:
        self._wake = wake
        self._call = channel.stream_stream(_wire.SCORE_STREAM)(metadata=metadata)
        self._events: deque[Any] = deque()
        self._reader = asyncio.ensure_future(self._read())

    async def send(self, request: bytes) -> None:
        # When the stream has ended, the reader reports it.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.write(request)

    def next_event(self) -> Any:
        """The next message (bytes), the call itself once it has ended, or None: nothing new."""
        return self._events.popleft() if self._events else None

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                self._add(data)
        except grpc.RpcError:
            pass  # its status is read from the call
        finally:  # also when the channel was closed, which cancels the read
            self._add(self._call)

    def _add(self, event: Any) -> None:
        self._events.append(event)
        self._wake.set()


# How grpc.aio words a write to a stream that the other side has ended; the real status is lost.
_WRITE_FAILED = "Internal error from Core"


async def _aio_error(call: Any, address: str) -> LogprobdError:
    """The typed error of a stream that has ended."""
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.INTERNAL and details == _WRITE_FAILED:
        return from_status("UNAVAILABLE", "the stream broke", address=address)
    return status_error(code, details, await call.trailing_metadata(), address)


async def _next_batch(source: AsyncIterator[_Batch]) -> Any:
    return await anext(source, _END)


async def _iterate(batches: Iterable[_Batch] | AsyncIterable[_Batch]) -> AsyncIterator[_Batch]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch
