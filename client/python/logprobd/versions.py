"""Keeps the answers of one call to one version of the weights."""

from __future__ import annotations

from logprobd.balance import Balance, Server
from logprobd.errors import WeightsVersionMismatch

RESTARTS_MAX = 3
"""How often a call over several servers is begun again with another version."""


class CallVersions:
    """The version that a call is scored with, and which servers do not hold it.

    The first version seen, or the pinned one, is kept. When no server that is ready holds it any
    more, an unpinned call goes on with the version that is there; what was scored before is then
    scored again. With `mix` every version is taken.
    """

    def __init__(self, balance: Balance, *, head: str, pinned: int = 0, mix: bool = False) -> None:
        self._balance = balance
        self._head = head
        self._pinned = pinned
        self._mix = mix
        self._kept = pinned  # 0: no answer yet
        self._expected = pinned  # what the first server asked is believed to hold
        self._others: set[Server] = set()
        self._seen: dict[int, dict[str, None]] = {}
        self.epoch = 0
        """Grows when the call is begun again. A request remembers that of its sending."""

    def choose(self, servers: list[Server], now: float) -> list[Server]:
        """Of these servers, those that hold the version; where none is believed to, those that have
        not said otherwise in this call."""
        possible = [server for server in servers if server not in self._others]
        if self._mix or self._expected == 0:
            return possible
        known = [s for s in possible if s.version(self._head, now) in (None, self._expected)]
        return known or possible

    def asked(self, server: Server, now: float) -> None:
        """A request goes to this server: until an answer says more, the call keeps to its
        version."""
        if self._expected == 0:
            self._expected = server.version(self._head, now) or 0

    def keeps(self, server: Server, version: int, epoch: int) -> bool:
        """Takes note of an answer. False: it is of another version, ask again elsewhere.

        `epoch` is that of the request. Raises WeightsVersionMismatch when the call cannot be
        finished with one version.
        """
        fits = self._mix or self._kept in (0, version)
        if not fits and epoch != self.epoch:
            return False  # asked before the call was begun again; nothing new is known
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
        """The server says that the pinned version is not live there. Whether to ask elsewhere."""
        self._others.add(server)
        return self._has_possible()

    def stuck(self) -> bool:
        """No request is under way and none can be sent. Whether that is because all ready servers
        hold another version; the call is then begun again with theirs. Raises as `keeps`."""
        if not self._balance.usable() or self._has_possible():
            return False
        self._begin_again(0)
        return True

    def mismatch(self) -> WeightsVersionMismatch:
        """The error, naming versions and where they were seen."""
        seen = "; ".join(
            f"version {version} at {', '.join(addresses)}"
            for version, addresses in sorted(self._seen.items())
        )
        lacking = ", ".join(sorted(server.address for server in self._others))
        wanted = f"version {self._pinned}" if self._pinned else "one version"
        return WeightsVersionMismatch(
            f"the call could not be scored by {wanted} of the weights: "
            f"{seen or f'{lacking} does not hold it'}. "
            "Wait until all servers hold the same version, pin weights_version to one that stays, "
            "or allow mix_versions=True",
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
