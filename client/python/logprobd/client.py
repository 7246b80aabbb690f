"""The synchronous client."""

from __future__ import annotations

import heapq
import queue
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grpc

from logprobd import _wire, settings
from logprobd._channels import Channels, error_of, identity
from logprobd._core import (
    STALE_FACTS,
    SWAP_ROUNDS_MAX,
    ClientCore,
    decode_answer,
    too_many_swaps,
)
from logprobd._stream import ReadStream, StreamBook, stream_plan, wait_for
from logprobd.assembly import Assembly
from logprobd.errors import (
    Cancelled,
    InvalidArgument,
    LogprobdError,
    Overloaded,
    Unavailable,
)
from logprobd.facts import HeadInfo, VerifyReport, choose_head, heads_from_wire
from logprobd.plan import Chunk, Progress, ScorePlan
from logprobd.result import ScoreResult
from logprobd.retry import Window


class Client(ClientCore):
    __doc__ = f"{ClientCore.__doc__}\n    Any thread may use it.\n"

    def _start(self, chosen: settings.Settings) -> None:
        super()._start(chosen)
        self._channels = Channels(chosen)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and cancels what is in flight. Idempotent."""
        self._channels.close()

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
        """Scores many batches over one stream and yields their results in order.

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
        seconds = self._settings.timeout if timeout is None else timeout
        return self._stream(iter(batches), on_error == "raise", seconds, options)

    def _stream(
        self,
        source: Iterator[tuple[Any, Any] | Mapping[str, Any]],
        raises: bool,
        seconds: float,
        options: Mapping[str, Any],
    ) -> Iterator[ScoreResult]:
        book = StreamBook(self._settings)
        stream: ReadStream | None = None
        exhausted = False
        try:
            while True:
                # One batch a turn: a slow source holds up neither what is taken nor what is ready.
                if not exhausted and book.has_room:
                    try:
                        self._take(next(source), options, book, seconds)
                    except StopIteration:
                        exhausted = True
                while stream is not None and (event := stream.wait(0.0)) is not None:
                    stream = self._receive(event, book, stream)
                while (request := book.next_request(time.monotonic())) is not None:
                    if stream is None:
                        method = self._channels.next().stream_stream(
                            _wire.SCORE_STREAM,
                            request_serializer=identity,
                            response_deserializer=identity,
                        )
                        stream = ReadStream(method, self._settings.metadata)
                    stream.send(request)
                for result in book.finished():
                    if isinstance(result, STALE_FACTS):
                        self._heads = []
                    if raises and isinstance(result, LogprobdError):
                        raise result
                    yield result  # type: ignore[misc]  # an error only where asked for
                if exhausted and book.is_empty:
                    return
                if exhausted or not book.has_room:
                    event = wait_for(book, stream)
                    if event is not None:
                        stream = self._receive(event, book, stream)
        finally:
            if stream is not None:
                stream.close()

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
        self, event: Any, book: StreamBook, stream: ReadStream | None
    ) -> ReadStream | None:
        """Takes what `wait` gave. Returns the stream, or None once it has ended."""
        if isinstance(event, bytes):
            book.receive(event, time.monotonic())
            return stream
        book.reconnect(error_of(event, self.address), time.monotonic())
        return None

    def list_heads(self, *, timeout: float | None = None) -> list[HeadInfo]:
        """The heads served, with their limits. Raises as `score`."""
        data = self._unary(_wire.LIST_HEADS, b"", self._deadline(timeout))
        heads = heads_from_wire(decode_answer(_wire.ListHeadsResponse, data))
        self._heads = heads
        return list(heads)

    def info(self, head: str = "", *, timeout: float | None = None) -> HeadInfo:
        """Facts of one head; "" is the only one. NotFound, InvalidArgument, and as `score`."""
        return choose_head(self.list_heads(timeout=timeout), head)

    def verify(
        self, rows: int = 0, seed: int = 0, *, head: str = "", timeout: float | None = None
    ) -> VerifyReport:
        """Has the server compare its engine with double precision on a probe.

        Args:
            rows: 1 to 64. 0: the server's default.
            seed: the same seed gives the same probe. 0: the server's default.
        """
        request = _wire.encode(_wire.VerifyRequest(head=head, rows=rows, seed=seed))
        data = self._unary(_wire.VERIFY, request, self._deadline(timeout))
        return VerifyReport(**vars(decode_answer(_wire.VerifyResponse, data)))

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the server can score. Unavailable, with the last reason, when it cannot in
        time."""
        deadline = self._deadline(timeout)
        request = _wire.encode(_wire.HealthRequest(service=_wire.SCORING_SERVICE))
        reason = "no answer yet"
        pause = 0.02
        while (left := deadline - time.monotonic()) > 0:
            try:
                data = self._method(_wire.HEALTH_CHECK)(request, timeout=min(left, 5.0))
                status = decode_answer(_wire.HealthResponse, data).status
                if status == _wire.SERVING:
                    return
                reason = f"health status {status}: starting or stopping"
            except grpc.RpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, 0.5)
        raise Unavailable(f"{self.address} is not ready: {reason}. Raise timeout, or see its log")

    def _method(self, name: str) -> Any:
        return self._channels.next().unary_unary(
            name, request_serializer=identity, response_deserializer=identity
        )

    def _unary(self, method: str, request: bytes, deadline: float) -> bytes:
        """One call with its retries. Typed errors."""
        attempts = 0
        while True:
            attempts += 1
            try:
                return self._method(method)(  # type: ignore[no-any-return]
                    request, timeout=self._left(deadline), metadata=self._settings.metadata
                )
            except grpc.RpcError as failed:
                error = error_of(failed, self.address)
            except ValueError as failed:  # gRPC: the channel was closed meanwhile
                raise Cancelled(str(failed)) from failed
            delay = self._retry_delay(error, attempts, deadline)
            if delay is None:
                raise error
            time.sleep(delay)

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
        for _ in range(SWAP_ROUNDS_MAX):
            for chunk, data in self._answers(plan, assembly.unanswered(), deadline):
                assembly.add(chunk, decode_answer(_wire.ScoreResponse, data))
                if progress is not None:
                    progress(assembly.rows_done, plan.rows)
            assembly.drop_other_versions()
            if not assembly.unanswered():
                return assembly.result()
        raise too_many_swaps(self.address)

    def _answers(
        self, plan: ScorePlan, chunks: list[Chunk], deadline: float
    ) -> Iterator[tuple[Chunk, bytes]]:
        """Sends chunks and yields each answer as it comes."""
        if len(chunks) == 1:  # a blocking call has the shortest way
            try:
                yield chunks[0], self._unary(_wire.SCORE, plan.encode(chunks[0]), deadline)
            except LogprobdError as error:
                raise plan.locate(error, chunks[0]) from None
        else:
            yield from self._answers_at_once(plan, chunks, deadline)

    def _answers_at_once(
        self, plan: ScorePlan, chunks: list[Chunk], deadline: float
    ) -> Iterator[tuple[Chunk, bytes]]:
        waiting = deque(chunks)
        again: list[tuple[float, int, Chunk]] = []  # a heap, by the time to send again
        attempts = dict.fromkeys((chunk.index for chunk in chunks), 0)
        inflight: dict[int, Any] = {}
        done: queue.SimpleQueue[tuple[Chunk, Any]] = queue.SimpleQueue()
        window = Window(self._settings.max_inflight)

        def next_chunk() -> Chunk | None:
            if again and again[0][0] <= time.monotonic():
                return heapq.heappop(again)[2]
            return waiting.popleft() if waiting else None

        try:
            while waiting or again or inflight:
                pause = None
                while len(inflight) < window.size:
                    chunk = next_chunk()
                    if chunk is None:
                        pause = max(0.0, again[0][0] - time.monotonic()) if again else None
                        break
                    attempts[chunk.index] += 1
                    call = self._begin(plan.encode(chunk), deadline)
                    inflight[chunk.index] = call
                    call.add_done_callback(lambda call, chunk=chunk: done.put((chunk, call)))
                try:
                    chunk, call = done.get(timeout=pause)
                except queue.Empty:
                    continue
                del inflight[chunk.index]
                if call.code() is grpc.StatusCode.OK:
                    window.succeeded()
                    yield chunk, call.result()
                    continue
                error = error_of(call, self.address)
                if isinstance(error, Overloaded):
                    window.refused()
                delay = self._retry_delay(error, attempts[chunk.index], deadline)
                if delay is None:
                    raise plan.locate(error, chunk)
                heapq.heappush(again, (time.monotonic() + delay, chunk.index, chunk))
        finally:
            for call in inflight.values():
                call.cancel()

    def _begin(self, request: bytes, deadline: float) -> Any:
        try:
            return self._method(_wire.SCORE).future(
                request, timeout=self._left(deadline), metadata=self._settings.metadata
            )
        except ValueError as error:  # gRPC: the channel was closed meanwhile
            raise Cancelled(str(error)) from error
