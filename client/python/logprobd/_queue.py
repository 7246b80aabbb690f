"""The chunks of one call, or of one stream: when each is sent, and which result is next. No I/O."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from logprobd import _wire
from logprobd._local_transport import LocalTransport, PlacedChunk
from logprobd._policy import LOOK_AGAIN_SECONDS, SWAP_ROUNDS_MAX
from logprobd._status import decode_answer, from_status
from logprobd.assembly import Assembly
from logprobd.balance import Balance, Server
from logprobd.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LogprobdError,
    Unavailable,
    WeightsVersionMismatch,
    code_name,
)
from logprobd.info import Limits
from logprobd.plan import Chunk, ScorePlan
from logprobd.result import ScoreResult
from logprobd.retry import RetryNotice
from logprobd.score_args import ScoreArgs
from logprobd.settings import Settings
from logprobd.versions import CallVersions, Routing, too_many_swaps

_WINDOW_UNKNOWN = 16


@dataclass(eq=False)
class _Batch:
    """The rows of a call, or a batch of a stream, whose result is not yielded yet."""

    plan: ScorePlan
    assembly: Assembly
    versions: CallVersions
    seconds: float
    """Time limit, counted from sending the first chunk."""
    deadline: float | None
    """Deadline on time.monotonic(). None until the first chunk is sent."""
    rounds: int = 1
    result: ScoreResult | LogprobdError | None = None


@dataclass(eq=False)
class Job:
    """A chunk that is not answered yet."""

    batch: _Batch
    chunk: Chunk
    attempts: int = 0
    id: int = 0
    """Number of the latest attempt in its queue."""
    server: Server | None = None
    """The server to which it was sent, while it is in flight."""
    epoch: int = 0
    placed: PlacedChunk | None = None
    """The request of the latest attempt."""

    @property
    def request(self) -> bytes:
        assert self.placed is not None
        return self.placed.request

    @property
    def bytes(self) -> int:
        return self.batch.plan.bytes_of(self.chunk)


def stream_plan(
    batch: tuple[Any, Any] | Mapping[str, Any], options: Mapping[str, Any]
) -> ScorePlan:
    """Returns the plan of one element of `batches`."""
    try:
        if isinstance(batch, Mapping):
            named = {**options, **batch}
            for name in ("progress", "timeout"):
                if name in named:
                    raise TypeError(f"{name} cannot be set for a batch")
            return ScorePlan(ScoreArgs(**named))
        hidden, targets = batch
    except (TypeError, ValueError) as error:
        if isinstance(error, LogprobdError):
            raise
        raise InvalidArgument(
            f"a batch must be (hidden, targets) or a mapping of score's arguments: {error}"
        ) from error
    if "progress" in options:
        raise TypeError("score_stream() takes no progress")
    return ScorePlan(ScoreArgs(hidden, targets, **options))


class ChunkQueue:
    """Keeps chunks that wait, are in flight or will be sent again, and results in batch order.

    Args:
        deadline: that of a call, whose chunks are unary calls and end by then. None for a stream,
            each batch of which has a deadline of its own.
    """

    def __init__(
        self,
        settings: Settings,
        balance: Balance,
        local: LocalTransport,
        *,
        deadline: float | None = None,
    ) -> None:
        self._settings = settings
        self._balance = balance
        self._local = local
        self._deadline = deadline
        self._routing = Routing(self._balance, settings.retry, settings.max_inflight)
        self._batches: deque[_Batch | LogprobdError] = deque()
        self._waiting: deque[Job] = deque()
        self._again: list[tuple[float, int, Job]] = []  # a heap, by the time to send again
        self._inflight: dict[int, Job] = {}
        self._ids = itertools.count(1)
        self._order = itertools.count()
        self._notice = RetryNotice()

    @property
    def has_room(self) -> bool:
        """True if another batch may be taken."""
        open_chunks = len(self._waiting) + len(self._again) + len(self._inflight)
        most = self._routing.room
        return open_chunks < most and len(self._batches) < 2 * most

    @property
    def is_empty(self) -> bool:
        return not self._batches

    def add(
        self,
        plan: ScorePlan,
        chunks: list[Chunk],
        limits: Limits | None = None,
        seconds: float = 0.0,
    ) -> Assembly:
        """Adds a batch of a stream, whose result must arrive within `seconds` of sending its first
        chunk, or the rows of a call. Returns what collects its answers."""
        if limits is not None:
            self._routing.limit(
                min(self._settings.max_inflight, limits.stream_window or _WINDOW_UNKNOWN)
            )
        versions = CallVersions(
            self._balance,
            head=plan.head,
            pinned=plan.weights_version,
            mix=self._settings.mix_versions,
        )
        batch = _Batch(plan, Assembly(plan, chunks), versions, seconds, self._deadline)
        self._batches.append(batch)
        self._waiting.extend(Job(batch, chunk) for chunk in chunks)
        return batch.assembly

    def add_failed(self, error: LogprobdError) -> None:
        """Adds a batch that failed before anything was sent; its error becomes its result."""
        self._batches.append(error)

    def next(self, now: float) -> Job | None:
        """Returns the next chunk to send to its `server`, or None if none is due or no server has
        room. Raises HeadMismatch."""
        while True:
            job = self._next_job(now)
            if job is None:
                return None
            batch = job.batch
            server = self._routing.take(job.bytes, batch.versions, now)
            try:
                if server is None and not self._inflight and batch.versions.stuck():
                    server = self._routing.take(job.bytes, batch.versions, now)
            except WeightsVersionMismatch as error:
                self._fail(batch, error)
                continue
            if server is None:
                self._waiting.appendleft(job)
                return None
            if batch.deadline is None:
                batch.deadline = now + batch.seconds
            job.attempts += 1
            job.id = next(self._ids)
            job.server, job.epoch = server, batch.versions.epoch
            self._inflight[job.id] = job
            chunk_id = job.id if self._deadline is None else 0
            try:
                job.placed = self._local.place(batch.plan, job.chunk, chunk_id=chunk_id)
            except LogprobdError as error:
                self._fail(batch, error)
                continue
            return job

    def _next_job(self, now: float) -> Job | None:
        while self._again and self._again[0][0] <= now:
            self._waiting.appendleft(heapq.heappop(self._again)[2])
        return self._waiting.popleft() if self._waiting else None

    def receive(self, data: bytes, now: float, job: Job | None = None) -> bool:
        """Handles a message of a stream, or the answer to a chunk that was sent alone. Returns
        whether it scores a chunk."""
        response = decode_answer(_wire.ScoreResponse, data)
        job = job or self._inflight.get(response.chunk_id)
        if job is None or job.server is None:
            return False  # the batch has failed, or the chunk was sent again
        server = self._end(job)
        try:
            if response.status_code == 0:
                return self._answered(job, server, response)
            code = code_name(response.status_code)
            error = from_status(
                "UNAVAILABLE" if code == "CANCELLED" else code,  # cancelled by the server
                response.status_message,
                address=server.address,
                retry_after=response.retry_after_ms / 1000 if response.retry_after_ms else None,
            )
            self._refused(job, server, error, now)
        except LogprobdError as error:
            self._fail(job.batch, error)
        return False

    def failed(self, job: Job, error: LogprobdError, now: float) -> None:
        """Handles the error of a chunk that was sent alone."""
        if job.server is None:
            return
        try:
            self._refused(job, self._end(job), error, now)
        except LogprobdError as final:
            self._fail(job.batch, final)

    def _end(self, job: Job) -> Server:
        """Removes a job from those in flight. Returns the server to which it was sent."""
        assert job.server is not None
        server, job.server = job.server, None
        del self._inflight[job.id]
        if job.placed is not None:
            job.placed.release()
        self._routing.give(server, job.bytes)
        return server

    def _answered(self, job: Job, server: Server, response: _wire.ScoreResponse) -> bool:
        self._routing.succeeded(server)
        self._notice.answered()
        batch = job.batch
        batch.assembly.check_rows(job.chunk, response)  # its version may be as wrong
        if not batch.versions.keeps(server, response.weights_version, job.epoch):
            self._waiting.appendleft(Job(batch, job.chunk))
            return False
        assert job.placed is not None
        batch.assembly.add(job.chunk, response, job.placed.placement)
        if not batch.assembly.is_complete:
            return True
        if not self._settings.mix_versions:
            batch.assembly.drop_other_versions()
        stale = batch.assembly.unanswered()
        if not stale:
            self._local.used(batch.assembly.placement)
            batch.result = batch.assembly.result()
        elif batch.rounds == SWAP_ROUNDS_MAX:
            raise too_many_swaps(self._settings.address)
        else:
            batch.rounds += 1
            self._waiting.extendleft(Job(batch, chunk) for chunk in reversed(stale))
        return True

    def _fail(self, batch: _Batch, error: LogprobdError) -> None:
        """Sets the batch's error as its result, and drops its chunks."""
        batch.result = error
        self._waiting = deque(job for job in self._waiting if job.batch is not batch)
        self._again = [entry for entry in self._again if entry[2].batch is not batch]
        heapq.heapify(self._again)
        for job in [job for job in self._inflight.values() if job.batch is batch]:
            self._end(job)

    def _refused(self, job: Job, server: Server, error: LogprobdError, now: float) -> None:
        if job.placed is not None and self._local.refused(job.placed, error):
            self._waiting.appendleft(job)
        else:
            self._send_again(job, server, job.batch.plan.locate(error, job.chunk), now)

    def disconnected(self, server: Server, error: LogprobdError, now: float) -> None:
        """Schedules the unanswered chunks of a stream that has ended to be sent again, or raises
        `error`."""
        if isinstance(error, Unavailable):
            self._balance.leave(server, error.details or str(error))
        for job in [job for job in self._inflight.values() if job.server is server]:
            self._end(job)
            self._send_again(job, server, error, now)

    def _send_again(self, job: Job, server: Server, error: LogprobdError, now: float) -> None:
        """Schedules the chunk to be sent again, or raises `error` to give up."""
        delay = self._routing.retry_in(server, error, job.attempts, job.batch.versions)
        self._push_again(job, error, delay, now)

    def _push_again(self, job: Job, error: LogprobdError, delay: float | None, now: float) -> None:
        assert job.batch.deadline is not None
        if delay is None or now + delay >= job.batch.deadline:
            raise self._notice.gave_up(error, job.attempts, now)
        self._notice.waits(error, delay, now)
        heapq.heappush(self._again, (now + delay, next(self._order), job))

    @property
    def is_stranded(self) -> bool:
        """True if chunks wait and none is in flight. After `next` has returned None, this means
        that no server is ready."""
        return bool(self._waiting) and not self._inflight

    def nobody_is_ready(self, error: LogprobdError, now: float) -> None:
        """Counts a failed attempt of the next chunk, because no server was ready. Raises `error` to
        give up."""
        job = self._waiting.popleft()
        job.attempts += 1
        if job.batch.deadline is None:
            job.batch.deadline = now + job.batch.seconds
        self._push_again(job, error, self._settings.retry.delay(error, job.attempts), now)

    def gather_deadline(self, now: float) -> float:
        """Returns the time until which the next chunk may wait for a server."""
        batch = self._waiting[0].batch
        return now + batch.seconds if batch.deadline is None else batch.deadline

    def close(self) -> None:
        """Gives up all chunks in flight."""
        for job in list(self._inflight.values()):
            self._end(job)

    def finished(self) -> Iterator[ScoreResult | LogprobdError]:
        """Yields the finished results that are next in batch order."""
        while self._batches:
            first = self._batches[0]
            result = first if isinstance(first, LogprobdError) else first.result
            if result is None:
                return
            self._batches.popleft()
            yield result

    def pause(self, now: float) -> float | None:
        """Returns the seconds until a chunk may be sent or the deadline of a stream's batch passes,
        or None if only an answer is waited for.

        Raises DeadlineExceeded once the earliest deadline has passed.
        """
        ends = [self._again[0][0]] if self._again else []
        # Waiting chunks need room, which an answer or another server provides.
        if self._waiting and not self._balance.solo:
            ends.append(now + LOOK_AGAIN_SECONDS)
        if self._deadline is None:
            deadlines = [
                batch.deadline
                for batch in self._batches
                if isinstance(batch, _Batch) and batch.deadline is not None
            ]
            if deadlines and now >= min(deadlines):
                raise DeadlineExceeded(
                    f"no answer from {self._settings.address} in time: raise timeout "
                    "(LOGPROBD_TIMEOUT_S) or send smaller batches"
                )
            ends += deadlines
        return max(0.0, min(ends) - now) if ends else None
