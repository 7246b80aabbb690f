"""What Client and AsyncClient do, without I/O.

The coroutines of ClientCore say what happens next, and a Pool does it: that of a Client blocks and
never suspends, so that `finish` runs them without an event loop.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal

import grpc

from logprobd import _wire, settings
from logprobd._local_transport import LocalTransport
from logprobd._policy import (
    CHECK_TIMEOUT_SECONDS,
    READY_PAUSE_FIRST_SECONDS,
    READY_PAUSE_MAX_SECONDS,
)
from logprobd._pool import HEALTH_REQUEST, Answer, Call, Mailbox, Pool, Sender, Source, Stream
from logprobd._queue import ChunkQueue, Job, stream_plan
from logprobd._status import decode_answer
from logprobd.addresses import FindServers
from logprobd.balance import Server, ServerState
from logprobd.errors import (
    DeadlineExceeded,
    HeadMismatch,
    InvalidArgument,
    LogprobdError,
    NotFound,
    Unavailable,
    WeightsVersionMismatch,
)
from logprobd.info import HeadInfo, VerifyReport, choose_head, heads_from_wire
from logprobd.plan import Chunk, ScorePlan
from logprobd.result import ScoreResult
from logprobd.retry import RetryNotice, RetryPolicy
from logprobd.score_args import Progress, ScoreArgs
from logprobd.tls import Tls
from logprobd.trace import InjectTrace, can_travel
from logprobd.versions import CallVersions, Routing

_LOG = logging.getLogger("logprobd")

# Errors after which the cached descriptions of the server's heads may be out of date.
STALE_INFO_ERRORS = (InvalidArgument, NotFound, WeightsVersionMismatch, HeadMismatch)

# Longer timeouts, and math.inf, are reduced to this: gRPC and threads do not accept infinity.
TIMEOUT_MAX_SECONDS = 1e9


class ClientCore:
    """A client of one logprobd server, or of several that hold the same heads.

    With several servers, each request is sent to the ready server with the fewest unanswered bytes
    of this client, so a slower server gets less work and a large call uses all servers at once.
    When a server drains, fails or cannot be reached, its requests are sent to another server
    without delay. It gets requests again after a pause that grows with each failure, once its
    health service says SERVING. A server that refuses because of load gets no requests for the time
    that it asks for. While calls are made, the client checks the health and the heads of each
    server every 10 s. Raises HeadMismatch if the servers' heads differ (vocabulary, hidden size,
    dtype, scale, soft cap, bias).

    All rows of a call are scored by one version of the weights: the pinned version, or the first
    one that answers. A chunk that was scored by another version is sent again to a server that
    holds the call's version. If no server holds that version any more, the call starts again with
    the live version, at most 3 times, and then raises WeightsVersionMismatch.

    A call that gets no answer for 1 s while it retries logs a warning to the logger "logprobd".

    Connections are opened at first use, separately in each process, so a client may be pickled and
    may be used after a fork. Importing the package starts no thread.

    Args:
        address: "host:port" (IPv6 in brackets), "unix:///path" or "dns:///name:port"; several
            addresses are separated by commas or given as a list. "dns:///" means one server per A
            or AAAA record of the name, such as a Kubernetes headless service; the name is resolved
            every 30 s and after failures. For servers that change in another way, a function
            without arguments that returns their addresses; it is called as often, on another
            thread, and may block. While it raises, the client uses the servers that it knows.
            Default: LOGPROBD_ADDRESS, else 127.0.0.1:8470.
        timeout: seconds for a whole call, including retries, > 0; math.inf means no limit.
            Default: LOGPROBD_TIMEOUT_S, else 300.
        max_inflight: maximum number of requests of one call in flight at each server, >= 1.
            Default: LOGPROBD_MAX_INFLIGHT, else 8.
        channels: TCP connections to each server, used in turn, >= 1. One connection alone does not
            fill a fast network.
        chunk_rows: maximum number of rows per request, >= 1; a larger call is split.
        chunk_bytes: maximum number of bytes per request, >= 1; a larger row is sent alone.
        retry: policy of retries; RetryPolicy(attempts_max=1, overloaded_attempts_max=1) disables
            them.
        client_id: name that identifies this client to the server, which shares its time fairly
            between clients, or between those of a tenant if it demands tokens. Default: the peer
            address.
        mix_versions: allow different versions of the weights to score the rows of one call;
            ScoreResult.weights_versions lists them.
        transport: how hidden states are passed to a server on the same host. "auto" passes CUDA
            tensors as handles of their memory and other arrays through shared memory, or sends them
            inside the request if neither is available. "tcp" sends them inside the request. "shm"
            and "cuda-ipc" use only this transport; calls raise Unavailable, which says why, if it
            is not available. Default: LOGPROBD_TRANSPORT, else "auto".
        tls: files for TLS to servers that run with --tls-cert; see Tls. False means plaintext.
            Default: LOGPROBD_TLS_CA, LOGPROBD_TLS_CERT, LOGPROBD_TLS_KEY and
            LOGPROBD_TLS_SERVER_NAME if one of them is set, else plaintext.
        token: token for servers that run with --tokens, sent with each call. Default:
            LOGPROBD_TOKEN, else none.
        inject_trace: function that writes the W3C header `traceparent` of the caller's current span
            into a dict, such as OpenTelemetry's `propagate.inject`. It is called once for each call
            of score and for each batch of a stream, where it is taken. If it raises, the call goes
            on without a trace, and the logger "logprobd" gets one warning per client. Default:
            none.

    Raises InvalidArgument if a setting is invalid.
    """

    _pool_class: type[Pool]

    def __init__(
        self,
        address: str | Sequence[str] | FindServers | None = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        channels: int = 4,
        chunk_rows: int = settings.DEFAULT_CHUNK_ROWS,
        chunk_bytes: int = settings.DEFAULT_CHUNK_BYTES,
        retry: RetryPolicy | None = None,
        client_id: str | None = None,
        mix_versions: bool = False,
        transport: str | None = None,
        tls: Tls | Literal[False] | None = None,
        token: str | None = None,
        inject_trace: InjectTrace | None = None,
    ) -> None:
        self._start(
            settings.make_settings(
                address,
                timeout=timeout,
                max_inflight=max_inflight,
                channels=channels,
                chunk_rows=chunk_rows,
                chunk_bytes=chunk_bytes,
                retry=retry,
                client_id=client_id,
                mix_versions=mix_versions,
                transport=transport,
                tls=tls,
                token=token,
                inject_trace=inject_trace,
            )
        )

    def _start(self, chosen: settings.Settings) -> None:
        self._settings = chosen
        self._pool = self._pool_class(chosen)
        self._heads: list[HeadInfo] = []  # empty until ListHeads has answered
        self._local = LocalTransport(chosen)
        self._has_warned_of_tracer = False

    def __getstate__(self) -> settings.Settings:
        return self._settings

    def __setstate__(self, state: settings.Settings) -> None:
        self._start(state)

    def __repr__(self) -> str:
        return f'{type(self).__name__}("{self.address}")'

    @property
    def address(self) -> str:
        """The server's address; several addresses are separated by commas."""
        return self._settings.address

    @property
    def transport(self) -> str:
        """The transport of most rows of the latest call: "tcp" or "unix" (the rows are inside the
        request), "shm" (shared memory) or "cuda_ipc" (read from the client's GPU memory)."""
        return self._local.last.transport

    @property
    def transport_reason(self) -> str:
        """The reason why the latest call did not use a faster transport; "" if there is none."""
        return self._local.last.reason

    def servers(self) -> list[ServerState]:
        """Returns the known state of each server, without asking it.

        A server is "unknown" until the first call.
        """
        return self._pool.balance.states()

    def _in_trace(self, plan: ScorePlan) -> ScorePlan:
        """Puts a call into the caller's current trace, unless its arguments name one."""
        if self._settings.inject_trace is not None and not plan.traceparent:
            carrier: dict[str, str] = {}
            try:
                self._settings.inject_trace(carrier)
            except Exception:  # any fault of a tracer costs the trace, not the call
                carrier.clear()
                if not self._has_warned_of_tracer:
                    self._has_warned_of_tracer = True
                    _LOG.warning("inject_trace failed: calls go on without it", exc_info=True)
            traceparent = carrier.get("traceparent", "")
            plan.traceparent = traceparent if can_travel(traceparent) else ""
        return plan

    def _seconds(self, timeout: float | None) -> float:
        """Returns the time limit of a call, or of a batch of a stream, in seconds."""
        return min(self._settings.timeout if timeout is None else timeout, TIMEOUT_MAX_SECONDS)

    def _deadline(self, timeout: float | None) -> float:
        """Returns the deadline of a call that starts now, on the clock time.monotonic()."""
        return time.monotonic() + self._seconds(timeout)

    def _left(self, deadline: float) -> float:
        """Returns the seconds until the deadline. Raises DeadlineExceeded if it has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"no answer from {self.address} in time: raise timeout (LOGPROBD_TIMEOUT_S) or "
                "send fewer rows per call"
            )
        return left

    async def _close(self) -> None:
        try:
            await self._pool.close()
        finally:
            self._local.close()

    async def _buffer(self, rows: int, hidden_size: int, dtype: Any) -> Any:
        if self._local.needs_asking:
            await self._list_heads(None)
        return await self._pool.block(self._local.array, rows, hidden_size, dtype)

    async def _list_heads(self, timeout: float | None) -> list[HeadInfo]:
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

    async def _info(self, head: str, timeout: float | None) -> HeadInfo:
        return choose_head(await self._list_heads(timeout), head)

    async def _verify(self, rows: int, seed: int, head: str, timeout: float | None) -> VerifyReport:
        request = _wire.encode(_wire.VerifyRequest(head=head, rows=rows, seed=seed))
        data = await self._unary(_wire.VERIFY, request, self._deadline(timeout))
        return VerifyReport(**vars(decode_answer(_wire.VerifyResponse, data)))

    async def _wait_ready(self, timeout: float | None) -> None:
        self._pool.own()
        deadline = self._deadline(timeout)
        notice = RetryNotice()
        reason = ""
        pause = READY_PAUSE_FIRST_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if self._pool.balance.solo:
                server = self._pool.balance.all()[0]
                limit = min(left, CHECK_TIMEOUT_SECONDS)
                call = Call(server, _wire.HEALTH_CHECK, HEALTH_REQUEST, limit)
                answer = await self._pool.ask(call)
                if answer.code is grpc.StatusCode.UNIMPLEMENTED:
                    raise answer.error(self.address)
                unhealthy = answer.unhealthy()
                if not unhealthy:
                    return
                # A check that this deadline cut short says less than the one before.
                is_cut = limit == left and answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
                if not (reason and is_cut):
                    reason = unhealthy
            else:
                try:
                    await self._pool.gather(deadline)
                    return
                except Unavailable as error:
                    reason = error.details
            notice.waits(f"{self.address}: {reason}", pause, time.monotonic())
            await self._pool.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, READY_PAUSE_MAX_SECONDS)
        reason = reason or "no answer yet"
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
                metadata = self._settings.metadata
                call = Call(server, method, request, self._left(deadline), metadata)
                answer = await self._pool.ask(call)
            finally:
                routing.give(server, 0)
            if answer.code is grpc.StatusCode.OK:
                return answer.data
            error = self._error(answer, server)
            delay = routing.retry_in(server, error, attempts, anyone)
            await self._pool.sleep(before(deadline, delay, error, attempts, notice))

    def _error(self, answer: Answer, server: Server) -> LogprobdError:
        return answer.error(server.address, is_closed=self._pool.is_closed)

    async def _gather(self, deadline: float, *, every: bool = False) -> None:
        """Waits until a server is ready, with retries. Raises Unavailable, HeadMismatch."""
        notice = RetryNotice()
        attempts = 0
        while True:
            attempts += 1
            try:
                await self._pool.gather(deadline, every=every)
                return
            except Unavailable as error:
                delay = self._settings.retry.delay(error, attempts)
                await self._pool.sleep(before(deadline, delay, error, attempts, notice))

    async def _head(self, name: str, deadline: float, *, fresh: bool = False) -> HeadInfo:
        heads = self._heads  # read once: an error in another thread or task may clear it
        if fresh or not heads:
            heads = await self._list_heads(self._left(deadline))
        return choose_head(heads, name)

    async def _cut(self, plan: ScorePlan, deadline: float) -> tuple[HeadInfo, list[Chunk]]:
        """Returns the head of a call, and the call split into requests within the head's limits."""
        head = await self._head(plan.head, deadline)
        if plan.hidden.hidden_size != head.hidden_size:
            head = await self._head(plan.head, deadline, fresh=True)
        plan.check_head(head)
        await self._prepare()
        return head, plan.cut(head, self._settings.chunk_rows, self._settings.chunk_bytes)

    async def _prepare(self) -> None:
        """Connects to the memory of a same-host server, if a later request must not wait for it."""

    async def _score(self, args: ScoreArgs) -> ScoreResult:
        self._pool.own()
        deadline = self._deadline(args.timeout)
        plan = self._in_trace(ScorePlan(args))
        try:
            _, chunks = await self._cut(plan, deadline)
            return await self._score_chunks(plan, chunks, deadline, args.progress)
        except STALE_INFO_ERRORS:
            self._heads = []
            raise

    async def _score_chunks(
        self, plan: ScorePlan, chunks: list[Chunk], deadline: float, progress: Progress | None
    ) -> ScoreResult:
        """Sends each chunk as a call of its own."""
        queue = ChunkQueue(self._settings, self._pool.balance, self._local, deadline=deadline)
        assembly = queue.add(plan, chunks)
        metadata = self._settings.metadata_in(plan.traceparent)
        inflight: dict[Job, Any] = {}
        events = self._pool.mailbox()
        try:
            while True:
                self._pool.refresh()
                while (job := queue.next(time.monotonic())) is not None:
                    assert job.server is not None
                    left = self._left(deadline)
                    call = Call(job.server, _wire.SCORE, job.request, left, metadata)
                    if len(chunks) == 1:  # needs no mailbox between threads
                        events.put((job, await self._pool.ask(call)))
                    else:
                        done = functools.partial(_post, events, job)
                        inflight[job] = self._pool.begin(call, done)
                for result in queue.finished():
                    if isinstance(result, LogprobdError):
                        raise result
                    return result
                if queue.is_stranded:
                    await self._wait_for_servers(queue)
                    continue
                event = await events.get(queue.pause(time.monotonic()))
                if event is None:
                    continue
                job, answer = event
                inflight.pop(job, None)
                now = time.monotonic()
                if answer.code is not grpc.StatusCode.OK:
                    assert job.server is not None
                    queue.failed(job, self._error(answer, job.server), now)
                elif queue.receive(answer.data, now, job) and progress is not None:
                    progress(assembly.rows_done, plan.rows)
        finally:
            queue.close()  # comes first: a task may be cancelled again while it waits below
            await self._pool.cancel(list(inflight.values()))

    def _stream(
        self, batches: Any, on_error: str, timeout: float | None, options: Mapping[str, Any]
    ) -> AsyncGenerator[ScoreResult, None]:
        if on_error not in ("raise", "return"):
            raise InvalidArgument(f'on_error is "{on_error}": use "raise" or "return"')
        return self._results(batches, on_error == "raise", self._seconds(timeout), options)

    async def _results(
        self, batches: Any, raises: bool, seconds: float, options: Mapping[str, Any]
    ) -> AsyncGenerator[ScoreResult, None]:
        """Sends the batches over one stream per server, and yields the results in order."""
        self._pool.own()
        queue = ChunkQueue(self._settings, self._pool.balance, self._local)
        events = self._pool.mailbox()
        source = self._pool.source(batches, events)
        streams: dict[Server, Stream] = {}
        is_taking = exhausted = False
        try:
            while True:
                self._pool.refresh()
                while (job := queue.next(time.monotonic())) is not None:
                    assert job.server is not None
                    if job.server not in streams:
                        streams[job.server] = self._pool.stream(job.server, events)
                    streams[job.server].send(job.request)
                for result in queue.finished():
                    if isinstance(result, STALE_INFO_ERRORS):
                        self._heads = []
                    if raises and isinstance(result, LogprobdError):
                        raise result
                    yield result  # type: ignore[misc]  # an error only with on_error="return"
                if exhausted and queue.is_empty:
                    return
                was_stranded = queue.is_stranded
                if was_stranded:
                    await self._wait_for_servers(queue)
                elif not (is_taking or exhausted) and queue.has_room:
                    source.request()
                    is_taking = True
                event = await events.get(0)  # an event that is there comes before a deadline
                if event is None and not was_stranded:
                    event = await events.get(queue.pause(time.monotonic()))
                while event is not None:
                    sender, message = event
                    if sender is not source:
                        await self._receive(sender, message, queue, streams)
                    else:
                        is_taking = False
                        batch = source.take()
                        exhausted = batch is Source.END
                        if not exhausted:
                            await self._take(batch, options, queue, seconds)
                    event = await events.get(0)
        finally:
            queue.close()  # comes first: a task may be cancelled again while it waits below
            senders: list[Sender] = [source, *streams.values()]
            for sender in senders:
                sender.finish()
            for sender in senders:
                await sender.close()

    async def _wait_for_servers(self, queue: ChunkQueue) -> None:
        now = time.monotonic()
        try:
            await self._pool.gather(queue.gather_deadline(now))
        except Unavailable as error:
            queue.nobody_is_ready(error, time.monotonic())

    async def _take(
        self,
        batch: tuple[Any, Any] | Mapping[str, Any],
        options: Mapping[str, Any],
        queue: ChunkQueue,
        seconds: float,
    ) -> None:
        """Adds a batch to the queue. Adds it as failed if its arguments or its head are wrong."""
        try:
            plan = self._in_trace(stream_plan(batch, options))
            head, chunks = await self._cut(plan, time.monotonic() + seconds)
            queue.add(plan, chunks, head.limits, seconds)
        except STALE_INFO_ERRORS as error:
            queue.add_failed(error)

    async def _receive(
        self,
        stream: Stream,
        message: bytes | None,
        queue: ChunkQueue,
        streams: dict[Server, Stream],
    ) -> None:
        """Handles an event of a stream: a message, or its end."""
        if message is not None:
            queue.receive(message, time.monotonic())
            return
        del streams[stream.server]
        await stream.close()
        error = self._error(await stream.answer(), stream.server)
        queue.disconnected(stream.server, error, time.monotonic())


def _post(events: Mailbox, job: Job, answer: Answer) -> None:
    events.put((job, answer))


def before(
    deadline: float, delay: float | None, error: LogprobdError, attempts: int, notice: RetryNotice
) -> float:
    """Returns `delay` if it ends before the deadline. Raises `error` otherwise and for None."""
    now = time.monotonic()
    if delay is None or now + delay >= deadline:
        raise notice.gave_up(error, attempts, now)
    notice.waits(error, delay, now)
    return delay
