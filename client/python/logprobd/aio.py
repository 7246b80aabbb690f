"""The asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Any

import grpc
import grpc.aio

from logprobd import _wire, settings
from logprobd._aio_pool import AioPool
from logprobd._core import (
    STALE_INFO_ERRORS,
    SWAP_ROUNDS_MAX,
    ClientCore,
    before,
    decode_answer,
    too_many_swaps,
)
from logprobd._local_transport import Placement
from logprobd._pool import HEALTH_REQUEST, error_of, health_reason, status_error
from logprobd._routing import CallBook, CallJob, Routing
from logprobd._stream import StreamBook, stream_plan
from logprobd.assembly import Assembly
from logprobd.balance import Balance, Server
from logprobd.errors import (
    Cancelled,
    InvalidArgument,
    LogprobdError,
    Unavailable,
    from_status,
    http_port_hint,
)
from logprobd.info import HeadInfo, VerifyReport, choose_head, heads_from_wire
from logprobd.plan import Chunk, ScorePlan
from logprobd.result import ScoreResult
from logprobd.retry import RetryNotice
from logprobd.score_args import Progress, ScoreArgs, with_score_args
from logprobd.versions import CallVersions

_Batch = tuple[Any, Any] | Mapping[str, Any]
_END = object()  # marks the end of the batches


class AsyncClient(ClientCore):
    __doc__ = f"""{ClientCore.__doc__}
    It has the methods of Client as coroutines. Encoding arrays and copying CUDA tensors blocks the
    event loop for a few milliseconds per request. Use a client on one event loop at a time.
    """

    def _start(self, chosen: settings.Settings) -> None:
        super()._start(chosen)
        self._pool = AioPool(chosen)

    def _balance(self) -> Balance:
        return self._pool.balance

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See Client.close."""
        self._local.close()
        await self._pool.close()

    async def buffer(self, rows: int, hidden_size: int, dtype: Any = "bf16") -> Any:
        """See Client.buffer."""
        if self._local.needs_asking:
            await self.list_heads()
        return await asyncio.to_thread(self._local.array, rows, hidden_size, dtype)

    @with_score_args
    async def score(self, args: ScoreArgs) -> ScoreResult:
        """Scores the target of each row of hidden states. Raises the errors of Client.score."""
        self._pool.own()
        deadline = self._deadline(args.timeout)
        plan = self._in_trace(ScorePlan(args))
        try:
            _, chunks = await self._cut(plan, deadline)
            return await self._score_chunks(plan, chunks, deadline, args.progress)
        except STALE_INFO_ERRORS:
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
        """Like Client.score_stream; `batches` may also be an async iterable.

        An async iterable may wait for earlier results, because they are yielded while it waits.
        """
        if on_error not in ("raise", "return"):
            raise InvalidArgument(f'on_error is "{on_error}": use "raise" or "return"')
        seconds = self._seconds(timeout)
        source = _iterate(batches)
        self._pool.own()
        book = StreamBook(self._settings, self._pool.balance, self._local)
        streams: dict[Server, _AioStream] = {}
        taking: asyncio.Future[Any] | None = None
        exhausted = False
        wake = asyncio.Event()  # set when the next batch is available and by each stream event
        try:
            while True:
                wake.clear()
                if taking is not None and taking.done():
                    batch, taking = taking.result(), None
                    if batch is _END:
                        exhausted = True
                    else:
                        await self._take(batch, options, book, seconds)
                for stream in list(streams.values()):
                    await self._receive(stream, book, streams)
                self._pool.refresh()
                while (request := book.next_request(time.monotonic())) is not None:
                    server = request.server
                    if server not in streams:
                        channel = self._pool.channel(server)
                        streams[server] = _AioStream(server, channel, self._settings.metadata, wake)
                    streams[server].send(request.data)
                for result in book.finished():
                    if isinstance(result, STALE_INFO_ERRORS):
                        self._heads = []
                    if on_error == "raise" and isinstance(result, LogprobdError):
                        raise result
                    yield result  # type: ignore[misc]  # an error only with on_error="return"
                if exhausted and book.is_empty:
                    return
                if taking is None and not exhausted and book.has_room:
                    taking = asyncio.ensure_future(_next_batch(source))
                    taking.add_done_callback(lambda _: wake.set())
                if book.is_stranded:
                    await self._wait_for_servers(book)
                elif not wake.is_set():
                    # This call is outside `suppress`: its DeadlineExceeded is a TimeoutError.
                    pause = book.pause(time.monotonic())
                    with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                        await asyncio.wait_for(wake.wait(), pause)
        finally:
            book.close()  # comes first: the task may be cancelled again while it waits below
            ends = [stream.close() for stream in streams.values()]
            if taking is not None:
                taking.cancel()
                ends.append(taking)
            await asyncio.gather(*ends, return_exceptions=True)

    async def _receive(
        self, stream: _AioStream, book: StreamBook, streams: dict[Server, _AioStream]
    ) -> None:
        """Handles the events of a stream: messages, and its end."""
        while (event := stream.next_event()) is not None:
            if isinstance(event, bytes):
                book.receive(event, time.monotonic())
            else:
                del streams[stream.server]
                await stream.close()
                error = await self._error_of(event, stream.server)
                book.reconnect(stream.server, error, time.monotonic())

    async def _error_of(self, call: Any, server: Server) -> LogprobdError:
        """Returns the typed error of a stream that has ended."""
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.INTERNAL and details == _WRITE_FAILED:
            return from_status("UNAVAILABLE", "the stream broke", address=server.address)
        metadata = await call.trailing_metadata()
        return status_error(code, details, metadata, server.address, is_closed=self._pool.is_closed)

    async def _wait_for_servers(self, book: StreamBook) -> None:
        try:
            await self._pool.gather(book.gather_deadline(time.monotonic()))
        except Unavailable as error:
            book.nobody_is_ready(error, time.monotonic())

    async def _take(
        self, batch: _Batch, options: Mapping[str, Any], book: StreamBook, seconds: float
    ) -> None:
        """Adds a batch to the book; one whose arguments or head are wrong is added as failed."""
        try:
            plan = self._in_trace(stream_plan(batch, options))
            head, chunks = await self._cut(plan, time.monotonic() + seconds)
            book.add(plan, chunks, head.limits, seconds)
        except STALE_INFO_ERRORS as error:
            book.add_failed(error)

    async def list_heads(self, *, timeout: float | None = None) -> list[HeadInfo]:
        """See Client.list_heads."""
        self._pool.own()
        deadline = self._deadline(timeout)
        if self._pool.balance.solo:
            data = await self._unary(_wire.LIST_HEADS, b"", deadline)
            response = decode_answer(_wire.ListHeadsResponse, data)
            heads = heads_from_wire(response)
            self._pool.balance.saw_heads(self._pool.balance.all()[0], heads)
            self._local.offer(response.local)
        else:
            await self._gather(deadline, every=True)
            heads = self._pool.balance.heads()
        self._heads = heads
        return list(heads)

    async def info(self, head: str = "", *, timeout: float | None = None) -> HeadInfo:
        """See Client.info."""
        return choose_head(await self.list_heads(timeout=timeout), head)

    async def verify(
        self, rows: int = 0, seed: int = 0, *, head: str = "", timeout: float | None = None
    ) -> VerifyReport:
        """See Client.verify."""
        request = _wire.encode(_wire.VerifyRequest(head=head, rows=rows, seed=seed))
        data = await self._unary(_wire.VERIFY, request, self._deadline(timeout))
        return VerifyReport(**vars(decode_answer(_wire.VerifyResponse, data)))

    async def wait_ready(self, timeout: float | None = None) -> None:
        """See Client.wait_ready."""
        self._pool.own()
        notice = RetryNotice()
        deadline = self._deadline(timeout)
        reason = "no answer yet"
        pause = 0.02
        while (left := deadline - time.monotonic()) > 0:
            try:
                if not self._pool.balance.solo:
                    await self._pool.gather(deadline)
                    return
                method = self._pool.method(self._pool.balance.all()[0], _wire.HEALTH_CHECK)
                data = await method(HEALTH_REQUEST, timeout=min(left, 5.0))
                reason = health_reason(grpc.StatusCode.OK, "", data)
                if not reason:
                    return
            except Unavailable as error:
                reason = error.details
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    raise error_of(error, self.address) from error
                reason = f"{error.code().name}: {error.details()}{http_port_hint(error.details())}"
            notice.waits(f"{self.address}: {reason}", pause, time.monotonic())
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, 0.5)
        raise Unavailable(f"{self.address} is not ready: {reason}. Raise timeout, or see its log")

    async def _unary(self, method: str, request: bytes, deadline: float) -> bytes:
        """Makes one call, with retries, to the least loaded server. Raises typed errors."""
        self._pool.own()
        balance = self._pool.balance
        routing = Routing(balance, self._settings.retry, self._settings.max_inflight)
        anyone = CallVersions(balance, head="", mix=True)
        notice = RetryNotice()
        attempts = 0
        while True:
            attempts += 1
            server = routing.take(0, anyone, time.monotonic())
            if server is None:
                await self._gather(deadline)
                continue
            try:
                answer = await self._attempt(
                    server, method, request, deadline, self._settings.metadata
                )
            finally:
                routing.give(server, 0)
            if isinstance(answer, bytes):
                return answer
            delay = routing.retry_in(server, answer, attempts, anyone)
            await asyncio.sleep(before(deadline, delay, answer, attempts, notice))

    async def _attempt(
        self,
        server: Server,
        method: str,
        request: bytes,
        deadline: float,
        metadata: settings.Metadata | None,
    ) -> bytes | LogprobdError:
        """Sends a request once. Returns its answer, or the error to retry or raise."""
        try:
            return await self._pool.method(server, method)(  # type: ignore[no-any-return]
                request, timeout=self._left(deadline), metadata=metadata
            )
        except grpc.RpcError as failed:
            return error_of(failed, server.address, is_closed=self._pool.is_closed)
        except grpc.aio.UsageError as failed:  # the channel was closed meanwhile
            raise Cancelled(str(failed)) from failed
        except asyncio.CancelledError:
            if self._pool.is_closed:  # gRPC reports a closed channel as a cancelled task
                raise Cancelled("the client was closed") from None
            raise

    async def _gather(self, deadline: float, *, every: bool = False) -> None:
        """See Client._gather."""
        notice = RetryNotice()
        attempts = 0
        while True:
            attempts += 1
            try:
                await self._pool.gather(deadline, every=every)
                return
            except Unavailable as error:
                await asyncio.sleep(self._retry_delay(error, attempts, deadline, notice))

    async def _head(self, name: str, deadline: float, *, fresh: bool = False) -> HeadInfo:
        heads = self._heads  # read once: an error in another task may clear it
        if fresh or not heads:
            heads = await self.list_heads(timeout=self._left(deadline))
        return choose_head(heads, name)

    async def _cut(self, plan: ScorePlan, deadline: float) -> tuple[HeadInfo, list[Chunk]]:
        """Returns the head of a call, and the call split into requests within the head's limits."""
        head = await self._head(plan.head, deadline)
        if plan.hidden.hidden_size != head.hidden_size:
            head = await self._head(plan.head, deadline, fresh=True)
        plan.check_head(head)
        if self._local.needs_preparing:
            await asyncio.to_thread(self._local.prepare)
        return head, plan.cut(head, self._settings.chunk_rows, self._settings.chunk_bytes)

    async def _score_chunks(
        self, plan: ScorePlan, chunks: list[Chunk], deadline: float, progress: Progress | None
    ) -> ScoreResult:
        assembly = Assembly(plan, chunks)
        versions = self._versions(plan)
        for _ in range(SWAP_ROUNDS_MAX):
            book = CallBook(
                plan,
                assembly.unanswered(),
                settings=self._settings,
                versions=versions,
                balance=self._pool.balance,
                local=self._local,
                deadline=deadline,
            )
            async with contextlib.aclosing(self._answers(book, deadline)) as answers:
                async for chunk, response, placement in answers:
                    assembly.add(chunk, response, placement)
                    if progress is not None:
                        progress(assembly.rows_done, plan.rows)
            if self._round_ends(assembly):
                self._local.used(assembly.placement)
                return assembly.result()
        raise too_many_swaps(self.address)

    async def _answers(
        self, book: CallBook, deadline: float
    ) -> AsyncGenerator[tuple[Chunk, _wire.ScoreResponse, Placement], None]:
        """Sends the chunks of the book and yields each answer as it arrives."""
        inflight: dict[asyncio.Task[bytes | LogprobdError], CallJob] = {}
        try:
            while not book.is_done:
                self._pool.refresh()
                while (job := book.next(time.monotonic())) is not None:
                    assert job.server is not None
                    attempt = self._attempt(
                        job.server, _wire.SCORE, job.request, deadline, book.metadata
                    )
                    inflight[asyncio.ensure_future(attempt)] = job
                if book.is_stranded:
                    await self._find_servers(book, deadline)
                    continue
                pause = book.pause(time.monotonic())
                if not inflight:
                    await asyncio.sleep(pause or 0.0)
                    continue
                ended, _ = await asyncio.wait(
                    inflight, timeout=pause, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    answer = task.result()
                    if isinstance(answer, LogprobdError):
                        book.failed(inflight.pop(task), answer)
                        continue
                    response = decode_answer(_wire.ScoreResponse, answer)
                    job = inflight.pop(task)
                    if book.keeps(job, response):
                        yield job.chunk, response, job.placement
        finally:
            for task, job in inflight.items():
                task.cancel()
                book.cancelled(job)
            await asyncio.gather(*inflight, return_exceptions=True)

    async def _find_servers(self, book: CallBook, deadline: float) -> None:
        try:
            await self._pool.gather(deadline)
        except Unavailable as error:
            book.nobody_is_ready(error)


class _AioStream:
    """A ScoreStream call with its own tasks for writing and reading, so that a server that does not
    read delays no other server. The reader sets `wake` at each event."""

    def __init__(self, server: Server, channel: Any, metadata: Any, wake: asyncio.Event) -> None:
        self.server = server
        self._wake = wake
        self._call = channel.stream_stream(_wire.SCORE_STREAM)(metadata=metadata)
        self._events: deque[Any] = deque()
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks = [asyncio.ensure_future(work) for work in (self._write(), self._read())]

    def send(self, request: bytes) -> None:
        self._unsent.put_nowait(request)

    def next_event(self) -> Any:
        """Returns the next message (bytes), the call itself once it has ended, or None."""
        return self._events.popleft() if self._events else None

    def close(self) -> asyncio.Future[list[Any]]:
        """Cancels the call at once. Await the result to wait for its tasks."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        return asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self) -> None:
        # The reader reports the end of the stream.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await self._call.write(await self._unsent.get())

    async def _read(self) -> None:
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                self._add(data)
        except grpc.RpcError:
            pass  # the receiver reads the status from the call
        finally:  # also when the channel was closed, which cancels the read
            self._add(self._call)

    def _add(self, event: Any) -> None:
        self._events.append(event)
        self._wake.set()


# The message of grpc.aio after a write to a stream that the server has ended; the server's status
# is lost.
_WRITE_FAILED = "Internal error from Core"


async def _next_batch(source: AsyncIterator[_Batch]) -> Any:
    return await anext(source, _END)


async def _iterate(batches: Iterable[_Batch] | AsyncIterable[_Batch]) -> AsyncIterator[_Batch]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch
