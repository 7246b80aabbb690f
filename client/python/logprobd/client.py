"""The synchronous client."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grpc

from logprobd import _wire, settings
from logprobd._carrier import Way
from logprobd._channels import error_of, identity
from logprobd._core import (
    STALE_FACTS,
    SWAP_ROUNDS_MAX,
    ClientCore,
    before,
    decode_answer,
    too_many_swaps,
)
from logprobd._pool import HEALTH_REQUEST, Pool, health_reason
from logprobd._routing import CallBook, CallJob, Routing
from logprobd._stream import ReadStream, StreamBook, stream_plan, wait_for
from logprobd.assembly import Assembly
from logprobd.balance import Balance, Server
from logprobd.errors import Cancelled, InvalidArgument, LogprobdError, Unavailable
from logprobd.facts import HeadInfo, VerifyReport, choose_head, heads_from_wire
from logprobd.plan import Chunk, Progress, ScorePlan
from logprobd.result import ScoreResult
from logprobd.versions import CallVersions


class Client(ClientCore):
    __doc__ = f"{ClientCore.__doc__}\n    Any thread may use it.\n"

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
        """Closes the connections, cancels what is in flight and gives shared memory back: arrays of
        `buffer` stay readable. Idempotent."""
        self._pool.close()
        self._carrier.close()

    def buffer(self, rows: int, hidden_size: int, dtype: Any = "bf16") -> Any:
        """An array for hidden states that score need not copy when the server is on this host.

        Args:
            rows, hidden_size: its shape.
            dtype: "bf16" (gives NumPy uint16, to be scored with dtype="bf16"), "fp16", "fp32", or a
                NumPy or ml_dtypes type; a torch dtype gives a torch.Tensor.

        Returns an array [rows, hidden_size] whose content is arbitrary. It is freed when nothing
        refers to it any more. Where no memory can be shared, as with several servers, it is an
        ordinary array. Rows must not be written while they are scored.

        Raises InvalidArgument; Unavailable when transport is "shm" and cannot be had; and as
        list_heads, which it asks where the server is.
        """
        if self._carrier.needs_asking:
            self.list_heads()
        return self._carrier.array(rows, hidden_size, dtype)

    def score(
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
        """Scores the target of each row of hidden states.

        Nothing is shifted: row i's target is targets[i], the token that follows it (from_packed and
        from_padded do the shifting). Rows whose target is ignore_index are not sent.

        Args:
            hidden: [..., hidden_size], the states that enter the head, after the final norm: torch
                (CPU or CUDA), NumPy, or DLPack; bfloat16, float16 or float32. Any strides.
            targets: [...], ids in [0, vocab) or ignore_index.
            temperature: logits are divided by it, 1e-4 to 1e4: a number, or an array that
                broadcasts to the shape of targets.
            outputs: any of logprob, entropy, lse, argmax, greedy, sum_p_squared, max_logit,
                min_logit.
            entropy_temperature: temperature of the entropy alone. None: as temperature.
            candidates: further ids to score: [..., n]; or one list for each row; or a tuple of ids
                [n] and offsets [rows + 1].
            top_k: best ids to return for each row.
            segments: offsets [segments + 1] of consecutive flattened rows to sum: from 0 to rows.
            ignore_index: the target of rows that get zeros.
            head: name of the head. "": the only one.
            weights_version: version of the weights to score with. 0: whichever is live, the same
                for all rows of the call.
            priority: "high", "normal" or "low".
            reject_nonfinite: InvalidArgument when a row's logits hold NaN or Inf, instead of NaN.
            dtype: "bf16" for NumPy uint16 holding bfloat16 bits; else a type to round to before
                sending.
            request_id: for the server's log, at most 128 bytes.
            timeout: seconds for the whole call. None: the client's.
            progress: called with rows done and rows in all after each answered request.

        Raises InvalidArgument, NotFound, Overloaded, Unavailable, DeadlineExceeded,
        WeightsVersionMismatch, Cancelled or ServerBug.
        """
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
            _, chunks = self._cut(plan, deadline)
            return self._score_chunks(plan, chunks, deadline, progress)
        except STALE_FACTS:
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
        """Scores many batches, over one stream to each server, and yields their results in order.

        Batches are taken from the iterable as the stream has room, so an endless generator is fine.
        They are taken on this thread: while the iterable makes the next one, no result is yielded.
        One that waits for earlier results needs AsyncClient.

        Args:
            batches: tuples (hidden, targets), or mappings of arguments of `score` for what differs
                from batch to batch, such as {"hidden": h, "targets": t, "segments": s}.
            on_error: "raise", or "return" to yield the LogprobdError in place of a failed batch's
                result and go on.
            timeout: seconds a batch may take from when it is sent to its result. None: the
                client's.
            options: further arguments of `score`, for all batches; not progress.

        Raises as `score`; DeadlineExceeded and lost connections always end the stream.
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
        book = StreamBook(self._settings, self._pool.balance, self._carrier)
        streams: dict[Server, ReadStream] = {}
        events: queue.SimpleQueue[tuple[ReadStream, Any]] = queue.SimpleQueue()
        exhausted = False
        try:
            while True:
                # One batch a turn: a slow source holds up neither what is taken nor what is ready.
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
                    if isinstance(result, STALE_FACTS):
                        self._heads = []
                    if raises and isinstance(result, LogprobdError):
                        raise result
                    yield result  # type: ignore[misc]  # an error only where asked for
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
        """Enters a batch in the book, as failed where its arguments or its head are wrong."""
        try:
            plan = stream_plan(batch, options)
            head, chunks = self._cut(plan, time.monotonic() + seconds)
            book.add(plan, chunks, head.limits, seconds)
        except STALE_FACTS as error:
            book.add_failed(error)

    def _receive(
        self, event: tuple[ReadStream, Any], book: StreamBook, streams: dict[Server, ReadStream]
    ) -> None:
        """Takes what came on a stream."""
        stream, came = event
        if isinstance(came, bytes):
            book.receive(came, time.monotonic())
            return
        if streams.get(stream.server) is stream:
            del streams[stream.server]
        error = error_of(came, stream.server.address, is_closed=self._pool.is_closed)
        book.reconnect(stream.server, error, time.monotonic())

    def list_heads(self, *, timeout: float | None = None) -> list[HeadInfo]:
        """The heads served, with their limits: of several servers the tightest. Raises as
        `score`."""
        deadline = self._deadline(timeout)
        if self._pool.balance.solo:
            data = self._unary(_wire.LIST_HEADS, b"", deadline)
            response = decode_answer(_wire.ListHeadsResponse, data)
            heads = heads_from_wire(response)
            self._pool.balance.saw_heads(self._pool.balance.all()[0], heads)
            self._carrier.offer(response.local)
        else:
            self._gather(deadline, every=True)
            heads = self._pool.balance.heads()
        self._heads = heads
        return list(heads)

    def info(self, head: str = "", *, timeout: float | None = None) -> HeadInfo:
        """Facts of one head; "" is the only one. NotFound, InvalidArgument, and as `score`."""
        return choose_head(self.list_heads(timeout=timeout), head)

    def verify(
        self, rows: int = 0, seed: int = 0, *, head: str = "", timeout: float | None = None
    ) -> VerifyReport:
        """Has the server, or one of several, compare its engine with double precision on a probe.

        Args:
            rows: 1 to 64. 0: the server's default.
            seed: the same seed gives the same probe. 0: the server's default.
        """
        request = _wire.encode(_wire.VerifyRequest(head=head, rows=rows, seed=seed))
        data = self._unary(_wire.VERIFY, request, self._deadline(timeout))
        return VerifyReport(**vars(decode_answer(_wire.VerifyResponse, data)))

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the server, or one of several, can score. Unavailable, with the last reason,
        when none can in time; NotFound for an address that is no logprobd's; HeadMismatch."""
        deadline = self._deadline(timeout)
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
                reason = f"{error.code().name}: {error.details()}"
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, 0.5)
        raise Unavailable(f"{self.address} is not ready: {reason}. Raise timeout, or see its log")

    def _unary(self, method: str, request: bytes, deadline: float) -> bytes:
        """One call with its retries, at the server with least to do. Typed errors."""
        balance = self._pool.balance
        routing = Routing(balance, self._settings.retry, self._settings.max_inflight)
        anyone = CallVersions(balance, head="", mix=True)
        attempts = 0
        while True:
            attempts += 1
            server = routing.take(0, anyone, time.monotonic())
            if server is None:
                self._gather(deadline)
                continue
            try:
                answer = self._attempt(server, method, request, deadline)
            finally:
                routing.give(server, 0)
            if isinstance(answer, bytes):
                return answer
            delay = routing.retry_in(server, answer, attempts, anyone)
            time.sleep(before(deadline, delay, answer))

    def _attempt(
        self, server: Server, method: str, request: bytes, deadline: float
    ) -> bytes | LogprobdError:
        """One call, sent once: its answer, or the error to retry or raise."""
        try:
            return self._pool.method(server, method)(  # type: ignore[no-any-return]
                request, timeout=self._left(deadline), metadata=self._settings.metadata
            )
        except grpc.RpcError as failed:
            return error_of(failed, server.address, is_closed=self._pool.is_closed)
        except ValueError as failed:  # gRPC: the channel was closed meanwhile
            raise Cancelled(str(failed)) from failed

    def _gather(self, deadline: float, *, every: bool = False) -> None:
        """Waits until a server is ready, with retries. Raises Unavailable, HeadMismatch."""
        attempts = 0
        while True:
            attempts += 1
            try:
                self._pool.gather(deadline, every=every)
                return
            except Unavailable as error:
                time.sleep(self._retry_delay(error, attempts, deadline))

    def _head(self, name: str, deadline: float, *, fresh: bool = False) -> HeadInfo:
        heads = self._heads  # read once: another thread's error may empty it
        if fresh or not heads:
            heads = self.list_heads(timeout=self._left(deadline))
        return choose_head(heads, name)

    def _cut(self, plan: ScorePlan, deadline: float) -> tuple[HeadInfo, list[Chunk]]:
        """The head and the requests of a call, by the head's facts as of now."""
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
                carrier=self._carrier,
                deadline=deadline,
            )
            for chunk, response, way in self._answers(book, len(chunks) == 1, deadline):
                assembly.add(chunk, response, way)
                if progress is not None:
                    progress(assembly.rows_done, plan.rows)
            if self._round_ends(assembly):
                self._carrier.used(assembly.way)
                return assembly.result()
        raise too_many_swaps(self.address)

    def _answers(
        self, book: CallBook, blocking: bool, deadline: float
    ) -> Iterator[tuple[Chunk, _wire.ScoreResponse, Way]]:
        """Sends the chunks of the book and yields each answer as it comes."""
        inflight: dict[CallJob, Any] = {}
        done: queue.SimpleQueue[tuple[CallJob, Any]] = queue.SimpleQueue()
        try:
            while not book.is_done:
                self._pool.refresh()
                while (job := book.next(time.monotonic())) is not None:
                    assert job.server is not None
                    inflight[job] = None
                    request = job.request
                    if blocking:  # a single request has the shortest way
                        done.put((job, self._attempt(job.server, _wire.SCORE, request, deadline)))
                        break
                    call = inflight[job] = self._begin(job.server, request, deadline)
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
                    yield job.chunk, response, job.way
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

    def _begin(self, server: Server, request: bytes, deadline: float) -> Any:
        try:
            return self._pool.method(server, _wire.SCORE).future(
                request, timeout=self._left(deadline), metadata=self._settings.metadata
            )
        except ValueError as error:  # gRPC: the channel was closed meanwhile
            raise Cancelled(str(error)) from error

    def _outcome(self, call: Any, server: Server) -> bytes | LogprobdError:
        """The answer of a call that has ended, or its error."""
        if call.code() is grpc.StatusCode.OK:
            return call.result()  # type: ignore[no-any-return]
        return error_of(call, server.address, is_closed=self._pool.is_closed)
