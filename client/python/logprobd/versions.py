"""Chooses the servers of a call's requests, so that one version of the weights scores all its rows.

It does no I/O.
"""

from __future__ import annotations

from logprobd._policy import RESTARTS_MAX, SWAP_ROUNDS_MAX
from logprobd.balance import Balance, Server
from logprobd.errors import LogprobdError, Overloaded, Unavailable, WeightsVersionMismatch
from logprobd.retry import RetryPolicy, Window


def too_many_swaps(address: str) -> WeightsVersionMismatch:
    """Returns the error of a call during which the weights changed too often."""
    return WeightsVersionMismatch(
        f"the weights of {address} were swapped {SWAP_ROUNDS_MAX} times during one call: pin "
        "weights_version, or call again"
    )


class CallVersions:
    """The version of the weights that a call uses, and the servers that do not hold it.

    A call keeps the pinned version, or the first one that answers. If no ready server holds that
    version any more, an unpinned call restarts with the live version, and the rows that were
    scored before are scored again. If `mix` is true, the call accepts every version.
    """

    def __init__(self, balance: Balance, *, head: str, pinned: int = 0, mix: bool = False) -> None:
        self._balance = balance
        self._head = head
        self._pinned = pinned
        self._mix = mix
        self._kept = pinned  # 0: no answer yet
        self._expected = pinned  # the version that the first server probably holds
        self._others: set[Server] = set()
        self._seen: dict[int, dict[str, None]] = {}
        self.epoch = 0
        """Number of restarts so far. A request remembers the epoch in which it was sent."""

    def choose(self, servers: list[Server], now: float) -> list[Server]:
        """Returns the servers that probably hold the call's version. If there are none, returns the
        servers that have not answered with another version in this call."""
        possible = [server for server in servers if server not in self._others]
        if self._mix or self._expected == 0:
            return possible
        known = [s for s in possible if s.version(self._head, now) in (None, self._expected)]
        return known or possible

    def asked(self, server: Server, now: float) -> None:
        """Records that a request is sent to this server. Until an answer arrives, the call expects
        this server's version."""
        if self._expected == 0:
            self._expected = server.version(self._head, now) or 0

    def keeps(self, server: Server, version: int, epoch: int) -> bool:
        """Records an answer. Returns False if another version gave it, so that the request must be
        sent again.

        `epoch` is the request's epoch. Raises WeightsVersionMismatch if the call cannot be scored
        by one version.
        """
        fits = self._mix or self._kept in (0, version)
        if not fits and epoch != self.epoch:
            return False  # sent before a restart: the answer says nothing about the new version
        self._balance.saw_version(server, self._head, version)
        self._seen.setdefault(version, {})[server.address] = None
        if fits:
            self._kept = self._expected = version
            return True
        self._others.add(server)
        if self._has_possible():
            return False
        self._begin_again(version)
        return True

    def lacks(self, server: Server) -> bool:
        """Records that the server does not hold the pinned version. Returns whether another server
        may hold it."""
        self._others.add(server)
        return self._has_possible()

    def stuck(self) -> bool:
        """Restarts the call and returns True if all ready servers hold another version. Call it
        only if no request is in flight and none can be sent. Raises the errors of `keeps`."""
        if not self._balance.usable() or self._has_possible():
            return False
        self._begin_again(0)
        return True

    def mismatch(self) -> WeightsVersionMismatch:
        """Returns an error that names the versions and the servers that hold them."""
        seen = "; ".join(
            f"version {version} at {', '.join(addresses)}"
            for version, addresses in sorted(self._seen.items())
        )
        lacking = ", ".join(sorted(server.address for server in self._others))
        needed = f"version {self._pinned}" if self._pinned else "one version"
        return WeightsVersionMismatch(
            f"the call could not be scored by {needed} of the weights: "
            f"{seen or f'{lacking} does not hold it'}. "
            "Wait until all servers hold the same version, pin weights_version to a version that "
            "stays loaded, or allow mix_versions=True",
            code="ABORTED",
        )

    def _has_possible(self) -> bool:
        return any(server not in self._others for server in self._balance.usable())

    def _begin_again(self, version: int) -> None:
        if self._pinned or (self.epoch >= RESTARTS_MAX and not self._balance.solo):
            raise self.mismatch()
        self.epoch += 1
        self._kept = self._expected = version
        self._others.clear()


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
