"""The bookkeeping of ScoreStream: which chunk is sent when, and which result is next.

It does no input or output of its own; Client and AsyncClient drive it.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from logprobd import _wire
from logprobd._core import SWAP_ROUNDS_MAX, decode_answer, too_many_swaps
from logprobd.assembly import Assembly
from logprobd.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LogprobdError,
    Overloaded,
    code_name,
    from_status,
)
from logprobd.facts import Limits
from logprobd.plan import Chunk, ScorePlan
from logprobd.result import ScoreResult
from logprobd.retry import Window
from logprobd.settings import Settings

_WINDOW_UNKNOWN = 16


@dataclass(eq=False)
class _Batch:
    """A batch from when it is taken to when its result is yielded."""

    plan: ScorePlan | None
    assembly: Assembly | None
    seconds: float
    """What it may take from when its first chunk is sent."""
    deadline: float | None = None
    """On time.monotonic(); None: nothing sent yet."""
    rounds: int = 1
    result: ScoreResult | LogprobdError | None = None


@dataclass(eq=False, order=False)
class _Job:
    """A chunk to be answered."""

    batch: _Batch
    chunk: Chunk
    attempts: int = 0
    chunk_id: int = field(default=0)


def stream_plan(
    batch: tuple[Any, Any] | Mapping[str, Any], options: Mapping[str, Any]
) -> ScorePlan:
    """The plan of one element of `batches`."""
    try:
        if isinstance(batch, Mapping):
            return ScorePlan(**{**options, **batch})
        hidden, targets = batch
    except (TypeError, ValueError) as error:
        if isinstance(error, LogprobdError):
            raise
        raise InvalidArgument(
            f"a batch must be (hidden, targets) or a mapping of score's arguments: {error}"
        ) from error
    return ScorePlan(hidden, targets, **options)


class StreamBook:
    """Chunks waiting, in flight and to be sent again; results in the order of the batches."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._window = Window(settings.max_inflight)
        self._batches: deque[_Batch] = deque()
        self._waiting: deque[_Job] = deque()
        self._again: list[tuple[float, int, _Job]] = []
        self._inflight: dict[int, _Job] = {}
        self._ids = itertools.count(1)

    @property
    def has_room(self) -> bool:
        """Whether another batch should be taken."""
        open_chunks = len(self._waiting) + len(self._again) + len(self._inflight)
        most = self._window.size
        return open_chunks < most and len(self._batches) < 2 * most

    @property
    def is_empty(self) -> bool:
        return not self._batches

    def add(self, plan: ScorePlan, chunks: list[Chunk], limits: Limits, seconds: float) -> None:
        """A batch whose result must come within `seconds` of the sending of its first chunk."""
        self._window.limit(
            min(self._settings.max_inflight, limits.stream_window or _WINDOW_UNKNOWN)
        )
        batch = _Batch(plan, Assembly(plan, chunks), seconds)
        self._batches.append(batch)
        self._waiting.extend(_Job(batch, chunk) for chunk in chunks)

    def add_failed(self, error: LogprobdError) -> None:
        """A batch that was refused before anything was sent; its error comes in its place."""
        self._batches.append(_Batch(None, None, 0.0, result=error))

    def next_request(self, now: float) -> bytes | None:
        """The next message to write, or None while the window is full or nothing is due."""
        while len(self._inflight) < self._window.size:
            if self._again and self._again[0][0] <= now:
                job = heapq.heappop(self._again)[2]
            elif self._waiting:
                job = self._waiting.popleft()
            else:
                return None
            if job.batch.result is not None or job.batch.plan is None:
                continue  # its batch has failed meanwhile
            if job.batch.deadline is None:
                job.batch.deadline = now + job.batch.seconds
            job.attempts += 1
            job.chunk_id = next(self._ids)
            self._inflight[job.chunk_id] = job
            return job.batch.plan.encode(job.chunk, chunk_id=job.chunk_id)
        return None

    def receive(self, data: bytes, now: float) -> None:
        """Takes one message of the server."""
        response = decode_answer(_wire.ScoreResponse, data)
        job = self._inflight.pop(response.chunk_id, None)
        if job is None or job.batch.result is not None:
            return  # an answer for a batch that has failed, or that was sent again
        if response.status_code != 0:
            self._refused(job, response, now)
            return
        self._window.succeeded()
        batch = job.batch
        assert batch.assembly is not None
        try:
            batch.assembly.add(job.chunk, response)
            if batch.assembly.unanswered():
                return
            batch.assembly.drop_other_versions()
            stale = batch.assembly.unanswered()
            if not stale:
                batch.result = batch.assembly.result()
            elif batch.rounds == SWAP_ROUNDS_MAX:
                self._fail(batch, too_many_swaps(self._settings.address))
            else:
                batch.rounds += 1
                self._waiting.extendleft(_Job(batch, chunk) for chunk in reversed(stale))
        except LogprobdError as error:
            self._fail(batch, error)

    def _fail(self, batch: _Batch, error: LogprobdError) -> None:
        """None of the batch's chunks is sent any more, nor takes room of others."""
        batch.result = error
        self._waiting = deque(job for job in self._waiting if job.batch is not batch)
        self._again = [entry for entry in self._again if entry[2].batch is not batch]
        heapq.heapify(self._again)
        for chunk_id in [i for i, job in self._inflight.items() if job.batch is batch]:
            del self._inflight[chunk_id]

    def _refused(self, job: _Job, response: _wire.ScoreResponse, now: float) -> None:
        error = from_status(
            code_name(response.status_code),
            response.status_message,
            address=self._settings.address,
            retry_after=response.retry_after_ms / 1000 if response.retry_after_ms else None,
        )
        if isinstance(error, Overloaded):
            self._window.refused()
        assert job.batch.plan is not None
        assert job.batch.deadline is not None
        error = job.batch.plan.locate(error, job.chunk)
        delay = self._settings.retry.delay(error, job.attempts)
        if delay is None or now + delay >= job.batch.deadline:
            self._fail(job.batch, error)
        else:
            heapq.heappush(self._again, (now + delay, job.chunk_id, job))

    def reconnect(self, error: LogprobdError, now: float) -> None:
        """The stream has ended with chunks unanswered: they are sent again, or `error` is
        raised."""
        jobs = list(self._inflight.values())
        self._inflight.clear()
        for job in jobs:
            assert job.batch.deadline is not None
            delay = self._settings.retry.delay(error, job.attempts)
            if delay is None or now + delay >= job.batch.deadline:
                raise error
            heapq.heappush(self._again, (now + delay, job.chunk_id, job))

    def finished(self) -> Iterator[ScoreResult | LogprobdError]:
        """Results that are next in order."""
        while self._batches and self._batches[0].result is not None:
            result = self._batches.popleft().result
            assert result is not None
            yield result

    def pause(self, now: float) -> float | None:
        """Seconds until something is due: a chunk to send again, or the deadline of the next
        result. None when nothing has been sent that is not answered.

        Raises DeadlineExceeded when that deadline has passed.
        """
        deadline = min(
            (
                batch.deadline
                for batch in self._batches
                if batch.result is None and batch.deadline is not None
            ),
            default=None,
        )
        if deadline is None:
            return None
        if now >= deadline:
            raise DeadlineExceeded(
                f"no answer from {self._settings.address} in time: raise timeout "
                "(LOGPROBD_TIMEOUT_S) or send smaller batches"
            )
        due = (
            self._again[0][0]
            if self._again and len(self._inflight) < self._window.size
            else deadline
        )
        return max(0.0, min(due, deadline) - now)


class ReadStream:
    """A synchronous ScoreStream call; a thread of its own reads, so that waiting can time out."""

    def __init__(self, method: Any, metadata: Any) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[bytes | Any] = queue.SimpleQueue()
        self._call = method(iter(self._requests.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="logprobd-stream", daemon=True)
        self._reader.start()

    def send(self, request: bytes) -> None:
        self._requests.put(request)

    def wait(self, seconds: float | None) -> Any:
        """The next message (bytes), the call itself once it has ended, or None after `seconds`."""
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Ends the stream; what is unanswered is cancelled."""
        self._requests.put(None)
        self._reader.join(timeout=_CLOSE_SECONDS)
        self._call.cancel()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._events.put(response)
        except grpc.RpcError:
            pass  # its status is read from the call
        self._events.put(self._call)


# For the server to end a stream on which nothing is unanswered.
_CLOSE_SECONDS = 0.5


def wait_for(book: StreamBook, stream: ReadStream | None) -> Any:
    """What happens next on the stream; None when only time has passed. DeadlineExceeded."""
    ready = stream.wait(0.0) if stream is not None else None
    if ready is not None:
        return ready
    seconds = book.pause(time.monotonic())
    if stream is None:
        time.sleep(seconds or 0.0)
        return None
    return stream.wait(seconds)
