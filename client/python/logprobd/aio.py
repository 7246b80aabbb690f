"""The asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Any

import grpc
import grpc.aio

from logprobd import _wire, settings
from logprobd._channels import error_of, status_error
from logprobd._core import SWAP_ROUNDS_MAX, ClientCore, decode_answer, too_many_swaps
from logprobd._stream import StreamBook, stream_plan
from logprobd.assembly import Assembly
from logprobd.errors import (
    Cancelled,
    InvalidArgument,
    LogprobdError,
    NotFound,
    Unavailable,
    WeightsVersionMismatch,
    from_status,
)
from logprobd.facts import HeadInfo, VerifyReport, choose_head, heads_from_wire
from logprobd.plan import Chunk, Progress, ScorePlan
from logprobd.result import ScoreResult

_Batch = tuple[Any, Any] | Mapping[str, Any]
_inherited: list[Any] = []  # channels of a parent process or of another loop: never closed here


class AsyncClient(ClientCore):
    __doc__ = f"""{ClientCore.__doc__}
    The methods are those of Client, awaited. Arrays are encoded, and CUDA tensors copied, on the
    event
    loop: a few milliseconds a request. One event loop at a time.
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
            chunks = await self._cut(plan, deadline)
            return await self._score_chunks(plan, chunks, deadline, progress)
        except (InvalidArgument, NotFound, WeightsVersionMismatch):
            self._heads = []  # what is known of the server may be out of date
            raise

    async def score_stream(
        self,
        batches: Iterable[_Batch] | AsyncIterable[_Batch],
        *,
        on_error: str = "raise",
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncIterator[ScoreResult]:
        """As Client.score_stream; `batches` may be an async iterable too."""
        if on_error not in ("raise", "return"):
            raise InvalidArgument(f'on_error is "{on_error}": use "raise" or "return"')
        seconds = self._settings.timeout if timeout is None else timeout
        source = _iterate(batches)
        book = StreamBook(self._settings)
        stream: _AioStream | None = None
        exhausted = False
        try:
            while True:
                while not exhausted and book.has_room:
                    try:
                        batch = await anext(source)
                    except StopAsyncIteration:
                        exhausted = True
                        break
                    deadline = time.monotonic() + seconds
                    try:
                        plan = stream_plan(batch, options)
                        chunks = await self._cut(plan, deadline)
                        book.add(plan, chunks, self._heads, deadline)
                    except InvalidArgument as error:
                        book.add_failed(error)
                while (request := book.next_request(time.monotonic())) is not None:
                    if stream is None:
                        stream = _AioStream(self._channel(), self._settings.metadata)
                    await stream.send(request)
                for result in book.finished():
                    if on_error == "raise" and isinstance(result, LogprobdError):
                        raise result
                    yield result  # type: ignore[misc]  # an error only where asked for
                if book.is_empty:
                    if exhausted:
                        return
                    continue
                event = await _wait_for(book, stream)
                if isinstance(event, bytes):
                    book.receive(event, time.monotonic())
                elif event is not None:
                    stream = None
                    book.reconnect(await _aio_error(event, self.address), time.monotonic())
        finally:
            if stream is not None:
                await stream.close()

    async def list_heads(self, *, timeout: float | None = None) -> list[HeadInfo]:
        """As Client.list_heads."""
        data = await self._unary(_wire.LIST_HEADS, b"", self._deadline(timeout))
        self._heads = heads_from_wire(decode_answer(_wire.ListHeadsResponse, data))
        return list(self._heads)

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
            try:
                return await self._method(method)(  # type: ignore[no-any-return]
                    request, timeout=self._left(deadline), metadata=self._settings.metadata
                )
            except grpc.RpcError as failed:
                error = error_of(failed, self.address)
            except grpc.aio.UsageError as failed:  # the channel was closed meanwhile
                raise Cancelled(str(failed)) from failed
            delay = self._retry_delay(error, attempts, deadline)
            if delay is None:
                raise error
            await asyncio.sleep(delay)

    async def _head(self, name: str, deadline: float, *, fresh: bool = False) -> HeadInfo:
        if fresh or not self._heads:
            await self.list_heads(timeout=self._left(deadline))
        return choose_head(self._heads, name)

    async def _cut(self, plan: ScorePlan, deadline: float) -> list[Chunk]:
        """The requests of a call, by the head's facts as of now."""
        head = await self._head(plan.head, deadline)
        if plan.hidden.hidden_size != head.hidden_size:
            head = await self._head(plan.head, deadline, fresh=True)
        plan.check_head(head)
        return plan.cut(head, self._settings.chunk_rows, self._settings.chunk_bytes)

    async def _score_chunks(
        self, plan: ScorePlan, chunks: list[Chunk], deadline: float, progress: Progress | None
    ) -> ScoreResult:
        assembly = Assembly(plan, chunks)
        slots = asyncio.Semaphore(self._settings.max_inflight)

        async def score_chunk(chunk: Chunk) -> None:
            async with slots:
                try:
                    data = await self._unary(_wire.SCORE, plan.encode(chunk), deadline)
                except LogprobdError as error:
                    raise plan.locate(error, chunk) from None
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


class _AioStream:
    """A ScoreStream call; a task of its own reads, so that waiting can time out."""

    def __init__(self, channel: Any, metadata: Any) -> None:
        self._call = channel.stream_stream(_wire.SCORE_STREAM)(metadata=metadata)
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.ensure_future(self._read())

    async def send(self, request: bytes) -> None:
        # When the stream has ended, the reader reports it.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.write(request)

    @property
    def is_idle(self) -> bool:
        """Whether nothing has been received that was not taken."""
        return self._events.empty()

    async def next_event(self) -> Any:
        return await self._events.get()

    async def wait(self, seconds: float) -> Any:
        """The next message (bytes), the call itself once it has ended, or None after `seconds`."""
        try:
            return await asyncio.wait_for(self._events.get(), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            return None

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                await self._events.put(data)
        except grpc.RpcError:
            pass  # its status is read from the call
        await self._events.put(self._call)


async def _wait_for(book: StreamBook, stream: _AioStream | None) -> Any:
    """What happens next on the stream; None when only time has passed. DeadlineExceeded."""
    if stream is not None and not stream.is_idle:
        return await stream.next_event()
    seconds = book.pause(time.monotonic())
    if stream is None:
        await asyncio.sleep(seconds)
        return None
    return await stream.wait(seconds)


# How grpc.aio words a write to a stream that the other side has ended; the real status is lost.
_WRITE_FAILED = "Internal error from Core"


async def _aio_error(call: Any, address: str) -> LogprobdError:
    """The typed error of a stream that has ended."""
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.INTERNAL and details == _WRITE_FAILED:
        return from_status("UNAVAILABLE", "the stream broke", address=address)
    return status_error(code, details, await call.trailing_metadata(), address)


async def _iterate(batches: Iterable[_Batch] | AsyncIterable[_Batch]) -> AsyncIterator[_Batch]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch
