"""Distributes the requests of one call, or of one stream, over the servers. It does no I/O."""

from __future__ import annotations

from logprobd.balance import Balance, Server
from logprobd.errors import LogprobdError, Overloaded, Unavailable, WeightsVersionMismatch
from logprobd.retry import RetryPolicy, Window
from logprobd.versions import CallVersions

LOOK_AGAIN_SECONDS = 0.25
"""Interval at which a call with waiting chunks checks whether more servers are ready."""


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
