"""The synchronous client."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grpc

from logprobd import _wire, settings
from logprobd._core import (
    STALE_INFO_ERRORS,
    SWAP_ROUNDS_MAX,
    ClientCore,
    before,
    decode_answer,
    too_many_swaps,
)
from logprobd._local_transport import Placement
from logprobd._pool import HEALTH_REQUEST, Pool, error_of, health_reason, identity
from logprobd._routing import CallBook, CallJob, Routing
from logprobd._stream import ReadStream, StreamBook, stream_plan, wait_for
from logprobd.assembly import Assembly
from logprobd.balance import Balance, Server
from logprobd.errors import (
    Cancelled,
    InvalidArgument,
    LogprobdError,
    Unavailable,
    http_port_hint,
)
from logprobd.info import HeadInfo, VerifyReport, choose_head, heads_from_wire
from logprobd.plan import Chunk, ScorePlan
from logprobd.result import ScoreResult
from logprobd.retry import RetryNotice
from logprobd.score_args import Progress, ScoreArgs, with_score_args
from logprobd.versions import CallVersions


class Client(ClientCore):
    __doc__ = f"{ClientCore.__doc__}\n    Thread-safe.\n"

    def _start(self, chosen: settings.Settings) -> None:
        super()._start(chosen)
        self._pool = Pool(chosen)

    def _balance(self) -> Balance:
        return self._pool.balance

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections, cancels requests in flight, and returns shared memory to the
        server. Arrays from `buffer` stay readable. Idempotent."""
        self._pool.close()
        self._local.close()

    def buffer(self, rows: int, hidden_size: int, dtype: Any = "bf16") -> Any:
        """Returns an uninitialised array whose rows a same-host server reads without a copy.

        Args:
            rows, hidden_size: the shape.
            dtype: "bf16" (gives NumPy uint16, to be scored with dtype="bf16"), "fp16", "fp32", or a
                NumPy or ml_dtypes type; a torch dtype gives a torch.Tensor.

        Returns an array [rows, hidden_size]. Its memory is freed with its last reference. It is an
        ordinary array if no memory can be shared, for example with several servers. Do not write
        rows while they are being scored.

        Raises InvalidArgument, Unavailable if transport is "shm" and it is not available, and the
        errors of list_heads, which finds out whether the server is on this host.
        """
        if self._local.needs_asking:
            self.list_heads()
        return self._local.array(rows, hidden_size, dtype)

    @with_score_args
    def score(self, args: ScoreArgs) -> ScoreResult:
        """Scores the target of each row of hidden states.

        Raises InvalidArgument, NotFound, Overloaded, Unavailable, DeadlineExceeded,
        WeightsVersionMismatch, HeadMismatch, Cancelled or ServerBug.
        """
        deadline = self._deadline(args.timeout)
        plan = self._in_trace(ScorePlan(args))
        try:
            _, chunks = self._cut(plan, deadline)
            return self._score_chunks(plan, chunks, deadline, args.progress)
        except STALE_INFO_ERRORS:
            self._heads = []
            raise

    def score_stream(
        self,
        batches: Iterable[tuple[Any, Any] | Mapping[str, Any]],
        *,
        on_error: str = "raise",
        timeout: float | None = None,
        **options: Any,
    ) -> Iterator[ScoreResult]:
        """Scores many batches, over one stream per server, and yields the results in order.

        Batches are taken from the iterable while the streams have room, so it may be infinite. The
        calling thread takes them, so no result is yielded while the iterable computes the next
        batch. If the iterable waits for earlier results, use AsyncClient.

        Args:
            batches: tuples (hidden, targets), or mappings of `score` arguments that differ between
                batches, such as {"hidden": h, "targets": t, "segments": s}.
            on_error: "raise", or "return" to yield the LogprobdError instead of a failed batch's
                result and continue.
            timeout: seconds from sending a batch to its result. None means the client's timeout.
            options: further arguments of `score` for all batches, except progress.

        Raises the errors of `score`. DeadlineExceeded and lost connections always end the stream.
        """
        if on_error not in ("raise", "return"):
            raise InvalidArgument(f'on_error is "{on_error}": use "raise" or "return"')
        seconds = self._seconds(timeout)
        return self._stream(iter(batches), on_error == "raise", seconds, options)

    def _stream(
        self,
        source: Iterator[tuple[Any, Any] | Mapping[str, Any]],
        raises: bool,
        seconds: float,
        options: Mapping[str, Any],
    ) -> Iterator[ScoreResult]:
        book = StreamBook(self._settings, self._pool.balance, self._local)
        streams: dict[Server, ReadStream] = {}
        events: queue.SimpleQueue[tuple[ReadStream, Any]] = queue.SimpleQueue()
        exhausted = False
        try:
            while True:
                # Takes one batch per turn, so a slow source does not delay batches taken earlier.
                if not exhausted and book.has_room:
                    try:
                        self._take(next(source), options, book, seconds)
                    except StopIteration:
                        exhausted = True
                while not events.empty():
                    self._receive(events.get(), book, streams)
                self._pool.refresh()
                while (request := book.next_request(time.monotonic())) is not None:
                    server = request.server
                    if server not in streams:
                        streams[server] = self._open_stream(server, events)
                    streams[server].send(request.data)
                for result in book.finished():
                    if isinstance(result, STALE_INFO_ERRORS):
                        self._heads = []
                    if raises and isinstance(result, LogprobdError):
                        raise result
                    yield result  # type: ignore[misc]  # an error only with on_error="return"
                if exhausted and book.is_empty:
                    return
                if book.is_stranded:
                    self._wait_for_servers(book)
                elif exhausted or not book.has_room:
                    event = wait_for(book, events)
                    if event is not None:
                        self._receive(event, book, streams)
        finally:
            for stream in streams.values():
                stream.finish()
            for stream in streams.values():
                stream.close()
            book.close()

    def _open_stream(
        self, server: Server, events: queue.SimpleQueue[tuple[ReadStream, Any]]
    ) -> ReadStream:
        method = self._pool.channel(server).stream_stream(
            _wire.SCORE_STREAM, request_serializer=identity, response_deserializer=identity
        )
        return ReadStream(server, method, self._settings.metadata, events)

    def _wait_for_servers(self, book: StreamBook) -> None:
        now = time.monotonic()
        try:
            self._pool.gather(book.gather_deadline(now))
        except Unavailable as error:
            book.nobody_is_ready(error, time.monotonic())

    def _take(
        self,
        batch: tuple[Any, Any] | Mapping[str, Any],
        options: Mapping[str, Any],
        book: StreamBook,
        seconds: float,
    ) -> None:
        """Adds a batch to the book. Adds it as failed if its arguments or its head are wrong."""
        try:
            plan = self._in_trace(stream_plan(batch, options))
            head, chunks = self._cut(plan, time.monotonic() + seconds)
            book.add(plan, chunks, head.limits, seconds)
        except STALE_INFO_ERRORS as error:
            book.add_failed(error)

    def _receive(
        self, event: tuple[ReadStream, Any], book: StreamBook, streams: dict[Server, ReadStream]
    ) -> None:
        """Handles an event of a stream, which is a message or its end."""
        stream, came = event
        if isinstance(came, bytes):
            book.receive(came, time.monotonic())
            return
        if streams.get(stream.server) is stream:
            del streams[stream.server]
        error = error_of(came, stream.server.address, is_closed=self._pool.is_closed)
        book.reconnect(stream.server, error, time.monotonic())

    def list_heads(self, *, timeout: float | None = None) -> list[HeadInfo]:
        """Returns the heads and their limits. With several servers, these are the lowest limits.

        Raises the errors of `score`.
        """
        deadline = self._deadline(timeout)
        if self._pool.balance.solo:
            data = self._unary(_wire.LIST_HEADS, b"", deadline)
            response = decode_answer(_wire.ListHeadsResponse, data)
            heads = heads_from_wire(response)
            self._pool.balance.saw_heads(self._pool.balance.all()[0], heads)
            self._local.offer(response.local)
        else:
            self._gather(deadline, every=True)
            heads = self._pool.balance.heads()
        self._heads = heads
        return list(heads)

    def info(self, head: str = "", *, timeout: float | None = None) -> HeadInfo:
        """Returns the description of one head; "" means the only head.

        Raises NotFound, InvalidArgument if there are several heads and `head` is "", and the errors
        of `score`.
        """
        return choose_head(self.list_heads(timeout=timeout), head)

    def verify(
        self, rows: int = 0, seed: int = 0, *, head: str = "", timeout: float | None = None
    ) -> VerifyReport:
        """Makes the server, or one of several, compare its engine with a double-precision
        computation on synthetic rows.

        Args:
            rows: number of rows, 1 to 64; 0 means the server's default.
            seed: seed of the rows; the same seed gives the same rows. 0 means the server's default.
        """
        request = _wire.encode(_wire.VerifyRequest(head=head, rows=rows, seed=seed))
        data = self._unary(_wire.VERIFY, request, self._deadline(timeout))
        return VerifyReport(**vars(decode_answer(_wire.VerifyResponse, data)))

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the server, or one of several, can score.

        Raises Unavailable with the last reason if no server can score in time, NotFound if another
        kind of gRPC server listens at the address, and HeadMismatch.
        """
        deadline = self._deadline(timeout)
        notice = RetryNotice()
        reason = "no answer yet"
        pause = 0.02
        while (left := deadline - time.monotonic()) > 0:
            try:
                if not self._pool.balance.solo:
                    self._pool.gather(deadline)
                    return
                method = self._pool.method(self._pool.balance.all()[0], _wire.HEALTH_CHECK)
                data = method(HEALTH_REQUEST, timeout=min(left, 5.0))
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
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, 0.5)
        raise Unavailable(f"{self.address} is not ready: {reason}. Raise timeout, or see its log")

    def _unary(self, method: str, request: bytes, deadline: float) -> bytes:
        """Makes one call, with retries, to the least loaded server. Raises typed errors."""
        balance = self._pool.balance
        routing = Routing(balance, self._settings.retry, self._settings.max_inflight)
        anyone = CallVersions(balance, head="", mix=True)
        notice = RetryNotice()
        attempts = 0
        while True:
            attempts += 1
            server = routing.take(0, anyone, time.monotonic())
            if server is None:
                self._gather(deadline)
                continue
            try:
                answer = self._attempt(server, method, request, deadline, self._settings.metadata)
            finally:
                routing.give(server, 0)
            if isinstance(answer, bytes):
                return answer
            delay = routing.retry_in(server, answer, attempts, anyone)
            time.sleep(before(deadline, delay, answer, attempts, notice))

    def _attempt(
        self,
        server: Server,
        method: str,
        request: bytes,
        deadline: float,
        metadata: settings.Metadata | None,
    ) -> bytes | LogprobdError:
        """Sends a request once. Returns its answer, or the error to retry or raise."""
        try:
            return self._pool.method(server, method)(  # type: ignore[no-any-return]
                request, timeout=self._left(deadline), metadata=metadata
            )
        except grpc.RpcError as failed:
            return error_of(failed, server.address, is_closed=self._pool.is_closed)
        except ValueError as failed:  # gRPC: the channel was closed meanwhile
            raise Cancelled(str(failed)) from failed

    def _gather(self, deadline: float, *, every: bool = False) -> None:
        """Waits until a server is ready, with retries. Raises Unavailable, HeadMismatch."""
        notice = RetryNotice()
        attempts = 0
        while True:
            attempts += 1
            try:
                self._pool.gather(deadline, every=every)
                return
            except Unavailable as error:
                time.sleep(self._retry_delay(error, attempts, deadline, notice))

    def _head(self, name: str, deadline: float, *, fresh: bool = False) -> HeadInfo:
        heads = self._heads  # read once: an error in another thread may clear it
        if fresh or not heads:
            heads = self.list_heads(timeout=self._left(deadline))
        return choose_head(heads, name)

    def _cut(self, plan: ScorePlan, deadline: float) -> tuple[HeadInfo, list[Chunk]]:
        """Returns the head of a call, and the call split into requests within the head's limits."""
        head = self._head(plan.head, deadline)
        if plan.hidden.hidden_size != head.hidden_size:
            head = self._head(plan.head, deadline, fresh=True)
        plan.check_head(head)
        return head, plan.cut(head, self._settings.chunk_rows, self._settings.chunk_bytes)

    def _score_chunks(
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
            for chunk, response, placement in self._answers(book, len(chunks) == 1, deadline):
                assembly.add(chunk, response, placement)
                if progress is not None:
                    progress(assembly.rows_done, plan.rows)
            if self._round_ends(assembly):
                self._local.used(assembly.placement)
                return assembly.result()
        raise too_many_swaps(self.address)

    def _answers(
        self, book: CallBook, blocking: bool, deadline: float
    ) -> Iterator[tuple[Chunk, _wire.ScoreResponse, Placement]]:
        """Sends the chunks of the book and yields each answer as it arrives."""
        inflight: dict[CallJob, Any] = {}
        done: queue.SimpleQueue[tuple[CallJob, Any]] = queue.SimpleQueue()
        try:
            while not book.is_done:
                self._pool.refresh()
                while (job := book.next(time.monotonic())) is not None:
                    assert job.server is not None
                    inflight[job] = None
                    if blocking:  # a single request needs no completion queue
                        answer = self._attempt(
                            job.server, _wire.SCORE, job.request, deadline, book.metadata
                        )
                        done.put((job, answer))
                        break
                    call = inflight[job] = self._begin(job, deadline, book.metadata)
                    call.add_done_callback(lambda call, job=job: done.put((job, call)))
                if book.is_stranded:
                    self._find_servers(book, deadline)
                    continue
                try:
                    job, call = done.get(timeout=book.pause(time.monotonic()))
                except queue.Empty:
                    continue
                assert job.server is not None
                answer = call if blocking else self._outcome(call, job.server)
                if isinstance(answer, LogprobdError):
                    del inflight[job]
                    book.failed(job, answer)
                    continue
                response = decode_answer(_wire.ScoreResponse, answer)
                del inflight[job]
                if book.keeps(job, response):
                    yield job.chunk, response, job.placement
        finally:
            for job, call in inflight.items():
                if call is not None:
                    call.cancel()
                book.cancelled(job)

    def _find_servers(self, book: CallBook, deadline: float) -> None:
        try:
            self._pool.gather(deadline)
        except Unavailable as error:
            book.nobody_is_ready(error)

    def _begin(self, job: CallJob, deadline: float, metadata: settings.Metadata | None) -> Any:
        assert job.server is not None
        try:
            return self._pool.method(job.server, _wire.SCORE).future(
                job.request, timeout=self._left(deadline), metadata=metadata
            )
        except ValueError as error:  # gRPC: the channel was closed meanwhile
            raise Cancelled(str(error)) from error

    def _outcome(self, call: Any, server: Server) -> bytes | LogprobdError:
        """Returns the answer of a call that has ended, or its error."""
        if call.code() is grpc.StatusCode.OK:
            return call.result()  # type: ignore[no-any-return]
        return error_of(call, server.address, is_closed=self._pool.is_closed)
