"""Distributes the requests of one call, or of one stream, over the servers. It does no I/O."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from logprobd import _policy, _wire
from logprobd._local_transport import LocalTransport, PlacedChunk, Placement
from logprobd.balance import Balance, Server
from logprobd.errors import LogprobdError, Overloaded, Unavailable, WeightsVersionMismatch
from logprobd.plan import Chunk, ScorePlan
from logprobd.retry import RetryNotice, RetryPolicy, Window
from logprobd.settings import Settings
from logprobd.versions import CallVersions

LOOK_AGAIN_SECONDS = _policy.LOOK_AGAIN_SECONDS


class Routing:
    """Chooses servers, keeps a window of requests in flight per server, and handles failures."""

    def __init__(self, balance: Balance, retry: RetryPolicy, most: int) -> None:
        self.balance = balance
        self._retry = retry
        self._most = most
        self._windows: dict[Server, Window] = {}
        self._inflight: dict[Server, int] = {}

    @property
    def room(self) -> int:
        """The number of requests that all ready servers together accept."""
        return sum(self._window(server).size for server in self.balance.usable()) or self._most

    def limit(self, most: int) -> None:
        """Sets the maximum window of every server."""
        self._most = most
        for window in self._windows.values():
            window.limit(most)

    def take(self, num_bytes: int, versions: CallVersions, now: float) -> Server | None:
        """Returns the server for a request, which counts as in flight until `give` is called.

        Returns None if every window is full or no server is ready.
        """
        server = self.balance.take(num_bytes, versions.choose, self._has_room)
        if server is not None:
            self._inflight[server] = self._inflight.get(server, 0) + 1
            versions.asked(server, now)
        return server

    def give(self, server: Server, num_bytes: int) -> None:
        self._inflight[server] -= 1
        self.balance.give(server, num_bytes)

    def succeeded(self, server: Server) -> None:
        self._window(server).succeeded()

    def retry_in(
        self, server: Server, error: LogprobdError, attempts: int, versions: CallVersions
    ) -> float | None:
        """Records that a request failed at `server`; `attempts` is the number of attempts so far.

        Returns the seconds to wait before it is sent again (0 if another server is ready), or None
        to give up. Raises WeightsVersionMismatch if no server holds the pinned version.
        """
        if isinstance(error, WeightsVersionMismatch) and not self.balance.solo:
            if versions.lacks(server):
                return 0.0
            raise versions.mismatch()
        if isinstance(error, Unavailable):
            self.balance.leave(server, error.details or str(error))
        elif isinstance(error, Overloaded):
            self._window(server).refused()
            self.balance.busy(server, error.retry_after)
        delay = self._retry.delay(error, attempts)
        if delay is not None and self.balance.has_other(server, versions.choose):
            return 0.0
        return delay

    def _window(self, server: Server) -> Window:
        return self._windows.setdefault(server, Window(self._most))

    def _has_room(self, server: Server) -> bool:
        return self._inflight.get(server, 0) < self._window(server).size


@dataclass(eq=False)
class CallJob:
    """A chunk that is not answered yet."""

    chunk: Chunk
    attempts: int = 0
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
    def placement(self) -> Placement:
        """How the rows of the latest attempt were passed to the server."""
        assert self.placed is not None
        return self.placed.placement


class CallBook:
    """The chunks of one call: those that wait, are in flight, or are to be sent again."""

    def __init__(
        self,
        plan: ScorePlan,
        chunks: Iterable[Chunk],
        *,
        settings: Settings,
        versions: CallVersions,
        balance: Balance,
        local: LocalTransport,
        deadline: float,
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._versions = versions
        self._routing = Routing(balance, settings.retry, settings.max_inflight)
        self._local = local
        self._deadline = deadline
        self._waiting = deque(CallJob(chunk) for chunk in chunks)
        self._again: list[tuple[float, int, CallJob]] = []  # a heap, by the time to send again
        self._order = itertools.count()
        self._num_inflight = 0
        self._notice = RetryNotice()
        self.metadata = settings.metadata_in(plan.traceparent)
        """The gRPC metadata of each request."""

    @property
    def is_done(self) -> bool:
        return not (self._waiting or self._again or self._num_inflight)

    def next(self, now: float) -> CallJob | None:
        """Returns the next chunk to send to its `server`, or None if none is due or no server has
        room.

        Raises HeadMismatch and WeightsVersionMismatch, and Unavailable or InvalidArgument if the
        transport that the settings require cannot pass the chunk's rows.
        """
        while self._again and self._again[0][0] <= now:
            self._waiting.appendleft(heapq.heappop(self._again)[2])
        if not self._waiting:
            return None
        job = self._waiting[0]
        server = self._routing.take(self._plan.bytes_of(job.chunk), self._versions, now)
        if server is None and not self._num_inflight and self._versions.stuck():
            server = self._routing.take(self._plan.bytes_of(job.chunk), self._versions, now)
        if server is None:
            return None
        self._waiting.popleft()
        job.server, job.epoch = server, self._versions.epoch
        job.attempts += 1
        self._num_inflight += 1
        try:
            job.placed = self._local.place(self._plan, job.chunk)
        except BaseException:
            self._end(job)
            raise
        return job

    @property
    def is_stranded(self) -> bool:
        """True if chunks wait and none is in flight. After `next` has returned None, this means
        that no server is ready."""
        return bool(self._waiting) and not self._num_inflight

    def keeps(self, job: CallJob, response: _wire.ScoreResponse) -> bool:
        """Records an answer. Returns False if another version of the weights scored the chunk, in
        which case it is sent again."""
        server = self._end(job)
        self._routing.succeeded(server)
        self._notice.answered()
        if self._versions.keeps(server, response.weights_version, job.epoch):
            return True
        self._waiting.appendleft(job)
        return False

    def failed(self, job: CallJob, error: LogprobdError) -> None:
        """Schedules a failed request to be sent again, or raises its error."""
        server = self._end(job)
        if job.placed is not None and self._local.refused(job.placed, error):
            self._waiting.appendleft(job)
            return
        delay = self._routing.retry_in(server, error, job.attempts, self._versions)
        self._send_again(job, error, delay)

    def nobody_is_ready(self, error: LogprobdError) -> None:
        """Counts a failed attempt of the next chunk, because no server was ready."""
        job = self._waiting.popleft()
        job.attempts += 1
        self._send_again(job, error, self._settings.retry.delay(error, job.attempts))

    def cancelled(self, job: CallJob) -> None:
        """Removes a cancelled request from those that are in flight at its server."""
        self._end(job)

    def pause(self, now: float) -> float | None:
        """Returns the seconds until a chunk may be sent, or None if an answer must come first."""
        due = self._again[0][0] - now if self._again else None
        if self._waiting and not self._routing.balance.solo:
            return LOOK_AGAIN_SECONDS if due is None else max(0.0, min(due, LOOK_AGAIN_SECONDS))
        return None if due is None else max(0.0, due)

    def _end(self, job: CallJob) -> Server:
        assert job.server is not None
        server, job.server = job.server, None
        self._num_inflight -= 1
        if job.placed is not None:
            job.placed.release()
        self._routing.give(server, self._plan.bytes_of(job.chunk))
        return server

    def _send_again(self, job: CallJob, error: LogprobdError, delay: float | None) -> None:
        now = time.monotonic()
        if delay is None or now + delay >= self._deadline:
            raise self._plan.locate(self._notice.gave_up(error, job.attempts, now), job.chunk)
        self._notice.waits(error, delay, now)
        heapq.heappush(self._again, (now + delay, next(self._order), job))
