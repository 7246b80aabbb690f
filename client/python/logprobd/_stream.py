"""The state of a score_stream call: when each chunk is sent, and which result is next. No I/O."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from logprobd import _wire
from logprobd._local_transport import LocalTransport, PlacedChunk
from logprobd._routing import LOOK_AGAIN_SECONDS, Routing
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
from logprobd.versions import SWAP_ROUNDS_MAX, CallVersions, too_many_swaps

_WINDOW_UNKNOWN = 16


@dataclass(eq=False)
class _Batch:
    """A batch that was taken from the iterable and whose result is not yielded yet."""

    plan: ScorePlan | None
    assembly: Assembly | None
    versions: CallVersions
    seconds: float
    """Time limit, counted from sending the first chunk."""
    deadline: float | None = None
    """Deadline on time.monotonic(). None until the first chunk is sent."""
    rounds: int = 1
    result: ScoreResult | LogprobdError | None = None


@dataclass(eq=False, order=False)
class _Job:
    """A chunk that is not answered yet."""

    batch: _Batch
    chunk: Chunk
    attempts: int = 0
    chunk_id: int = field(default=0)
    server: Server | None = None
    """The server to which it was sent, while it is in flight."""
    epoch: int = 0
    placed: PlacedChunk | None = None
    """The request of the latest attempt."""

    @property
    def bytes(self) -> int:
        assert self.batch.plan is not None
        return self.batch.plan.bytes_of(self.chunk)

    def release(self) -> None:
        if self.placed is not None:
            self.placed.release()


@dataclass(frozen=True)
class Outgoing:
    """A message and the server to which it is sent."""

    server: Server
    data: bytes


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


class StreamBook:
    """Keeps chunks that wait, are in flight or will be sent again, and results in batch order."""

    def __init__(
        self,
        settings: Settings,
        balance: Balance | None = None,
        local: LocalTransport | None = None,
    ) -> None:
        self._settings = settings
        self._balance = balance or Balance(settings.addresses, solo=True)
        self._local = local or LocalTransport(settings)
        self._routing = Routing(self._balance, settings.retry, settings.max_inflight)
        self._batches: deque[_Batch] = deque()
        self._waiting: deque[_Job] = deque()
        self._again: list[tuple[float, int, _Job]] = []
        self._inflight: dict[int, _Job] = {}
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

    def add(self, plan: ScorePlan, chunks: list[Chunk], limits: Limits, seconds: float) -> None:
        """Adds a batch. Its result must arrive within `seconds` of sending its first chunk."""
        self._routing.limit(
            min(self._settings.max_inflight, limits.stream_window or _WINDOW_UNKNOWN)
        )
        versions = CallVersions(
            self._balance,
            head=plan.head,
            pinned=plan.weights_version,
            mix=self._settings.mix_versions,
        )
        batch = _Batch(plan, Assembly(plan, chunks), versions, seconds)
        self._batches.append(batch)
        self._waiting.extend(_Job(batch, chunk) for chunk in chunks)

    def add_failed(self, error: LogprobdError) -> None:
        """Adds a batch that failed before anything was sent; its error becomes its result."""
        versions = CallVersions(self._balance, head="")
        self._batches.append(_Batch(None, None, versions, 0.0, result=error))

    def next_request(self, now: float) -> Outgoing | None:
        """Returns the next message to send, or None if the windows are full or none is due."""
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
            job.chunk_id = next(self._ids)
            job.server, job.epoch = server, batch.versions.epoch
            self._inflight[job.chunk_id] = job
            assert batch.plan is not None
            try:
                job.placed = self._local.place(batch.plan, job.chunk, chunk_id=job.chunk_id)
            except LogprobdError as error:
                self._fail(batch, error)
                continue
            return Outgoing(server, job.placed.request)

    def _next_job(self, now: float) -> _Job | None:
        while self._again and self._again[0][0] <= now:
            self._waiting.appendleft(heapq.heappop(self._again)[2])
        while self._waiting:
            job = self._waiting.popleft()
            if job.batch.result is None and job.batch.plan is not None:
                return job  # chunks of failed batches are skipped
        return None

    def receive(self, data: bytes, now: float) -> None:
        """Handles one message from the server."""
        response = decode_answer(_wire.ScoreResponse, data)
        job = self._inflight.get(response.chunk_id)
        if job is None or job.batch.result is not None:
            return  # the batch has failed, or the chunk was sent again
        server = self._end(job)
        try:
            if response.status_code != 0:
                self._refused(job, server, response, now)
            else:
                self._answered(job, server, response)
        except LogprobdError as error:
            self._fail(job.batch, error)

    def _end(self, job: _Job) -> Server:
        """Removes a job from those in flight. Returns the server to which it was sent."""
        assert job.server is not None
        server, job.server = job.server, None
        del self._inflight[job.chunk_id]
        job.release()
        self._routing.give(server, job.bytes)
        return server

    def _answered(self, job: _Job, server: Server, response: _wire.ScoreResponse) -> None:
        self._routing.succeeded(server)
        self._notice.answered()
        batch = job.batch
        assert batch.assembly is not None
        if not batch.versions.keeps(server, response.weights_version, job.epoch):
            self._waiting.appendleft(_Job(batch, job.chunk))
            return
        assert job.placed is not None
        batch.assembly.add(job.chunk, response, job.placed.placement)
        if batch.assembly.unanswered():
            return
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
            self._waiting.extendleft(_Job(batch, chunk) for chunk in reversed(stale))

    def _fail(self, batch: _Batch, error: LogprobdError) -> None:
        """Sets the batch's error as its result, and drops its chunks."""
        batch.result = error
        self._waiting = deque(job for job in self._waiting if job.batch is not batch)
        self._again = [entry for entry in self._again if entry[2].batch is not batch]
        heapq.heapify(self._again)
        for job in [job for job in self._inflight.values() if job.batch is batch]:
            self._end(job)

    def _refused(
        self, job: _Job, server: Server, response: _wire.ScoreResponse, now: float
    ) -> None:
        code = code_name(response.status_code)
        error = from_status(
            "UNAVAILABLE" if code == "CANCELLED" else code,  # the server cancelled, not this client
            response.status_message,
            address=server.address,
            retry_after=response.retry_after_ms / 1000 if response.retry_after_ms else None,
        )
        assert job.placed is not None
        if self._local.refused(job.placed, error):
            self._waiting.appendleft(job)
            return
        assert job.batch.plan is not None
        error = job.batch.plan.locate(error, job.chunk)
        self._send_again(job, server, error, now)

    def reconnect(self, server: Server, error: LogprobdError, now: float) -> None:
        """Schedules the unanswered chunks of a stream that has ended to be sent again, or raises
        `error`."""
        if isinstance(error, Unavailable):
            self._balance.leave(server, error.details or str(error))
        for job in [job for job in self._inflight.values() if job.server is server]:
            self._end(job)
            self._send_again(job, server, error, now)

    def _send_again(self, job: _Job, server: Server, error: LogprobdError, now: float) -> None:
        """Schedules the chunk to be sent again, or raises `error` to give up."""
        delay = self._routing.retry_in(server, error, job.attempts, job.batch.versions)
        self._push_again(job, error, delay, now)

    def _push_again(self, job: _Job, error: LogprobdError, delay: float | None, now: float) -> None:
        assert job.batch.deadline is not None
        if delay is None or now + delay >= job.batch.deadline:
            raise self._notice.gave_up(error, job.attempts, now)
        self._notice.waits(error, delay, now)
        heapq.heappush(self._again, (now + delay, next(self._order), job))

    @property
    def is_stranded(self) -> bool:
        """True if chunks wait and none is in flight. After `next_request` has returned None, this
        means that no server is ready."""
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
        while self._batches and self._batches[0].result is not None:
            result = self._batches.popleft().result
            assert result is not None
            yield result

    def pause(self, now: float) -> float | None:
        """Returns the seconds until a chunk is to be sent again or the earliest deadline passes.

        Returns None if every chunk that was sent is answered. Raises DeadlineExceeded once the
        earliest deadline has passed.
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
        # Waiting chunks need room, which an answer or another server provides.
        due = self._again[0][0] if self._again else deadline
        if self._waiting and not self._balance.solo:
            due = min(due, now + LOOK_AGAIN_SECONDS)
        return max(0.0, min(due, deadline) - now)
