"""Decides which server gets the next request, and which servers get none for a while.

A Balance does no I/O and takes its clock as an argument; the pools of Client and AsyncClient drive
it. Thread-safe.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from logprobd._policy import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_MAX_SECONDS,
    BUSY_SECONDS,
    CHECK_SECONDS,
    VERSION_SECONDS,
)
from logprobd.errors import HeadMismatch, Unavailable
from logprobd.info import HeadInfo, heads_differ, least_limits


class State(enum.Enum):
    UNKNOWN = "unknown"  # the server was not asked yet
    READY = "ready"
    OUT = "out"


@dataclass(frozen=True)
class ServerState:
    """A client's view of one of its servers, for debugging."""

    address: str
    state: str
    """"unknown" (not asked yet), "ready", "busy" (it has just refused a request because of
    overload) or "out" (it failed, drains, or cannot be reached)."""
    reason: str
    """Why the server is out; "" otherwise."""
    requests: int
    """Unanswered requests of this client."""
    bytes: int
    """Bytes of hidden states in those requests."""
    weights_versions: dict[str, int]
    """Latest known version, by head."""
    retry_in: float
    """Seconds until the next health check; 0 unless the server is out."""


@dataclass(eq=False)
class Server:
    """A Balance's record of one server. Only the Balance writes to it."""

    address: str
    state: State = State.UNKNOWN
    reason: str = ""
    requests: int = 0
    bytes: int = 0
    failures: int = 0
    is_checked: bool = False
    """Whether a check is running."""
    check_at: float = 0.0
    busy_until: float = 0.0
    left_at: float = 0.0
    heads: tuple[HeadInfo, ...] = ()
    versions: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By head: the latest known version, and when it was seen."""

    def head_key(self, head: str) -> str:
        """Returns the key of `versions` for `head`; "" stands for the only head."""
        return self.heads[0].name if not head and len(self.heads) == 1 else head

    def version(self, head: str, now: float) -> int | None:
        """Returns the version that the server probably holds, or None if unknown or outdated."""
        version, seen_at = self.versions.get(self.head_key(head), (None, 0.0))
        return version if now - seen_at < VERSION_SECONDS else None


class Balance:
    """Chooses among the servers of a client.

    A request goes to the ready server with the fewest unanswered bytes of this client; servers with
    equal bytes take turns. With `solo` there is one server, which is always used.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        solo: bool = False,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] | None = None,
    ) -> None:
        self.solo = solo
        self._clock = clock
        self._uniform = uniform or random.SystemRandom().uniform
        self._lock = threading.RLock()
        self._servers = [Server(address) for address in addresses]
        self._turn = 0
        self._conflict = ""
        self.left_at = float("-inf")
        """When a server last became OUT."""

    def set_addresses(self, addresses: Iterable[str]) -> list[Server]:
        """Sets the servers that exist now; known servers keep their records. Returns the removed
        servers."""
        with self._lock:
            known = {server.address: server for server in self._servers}
            self._servers = [
                known.pop(address) if address in known else Server(address)
                for address in dict.fromkeys(addresses)
            ]
            self._compare_heads()
            return list(known.values())

    def take(
        self,
        num_bytes: int,
        choose: Callable[[list[Server], float], Iterable[Server]] = lambda servers, now: servers,
        has_room: Callable[[Server], bool] = lambda server: True,
    ) -> Server | None:
        """Returns the server for a request of `num_bytes`.

        The bytes count as unanswered bytes of the server until `give` is called.

        `choose` filters the ready servers. Returns None if none of them is ready or has room.
        Raises HeadMismatch when servers hold different heads.
        """
        with self._lock:
            if self._conflict:
                raise HeadMismatch(self._conflict)
            now = self._clock()
            servers = list(choose(self._usable(), now))
            # A busy server is avoided while another is ready, even if that one is full.
            servers = [s for s in servers if s.busy_until <= now] or servers
            servers = [s for s in servers if has_room(s)]
            if not servers:
                return None
            turn = {id(server): index for index, server in enumerate(self._servers)}
            count = len(self._servers)
            server = min(servers, key=lambda s: (s.bytes, (turn[id(s)] - self._turn) % count))
            self._turn = (turn[id(server)] + 1) % count
            server.requests += 1
            server.bytes += num_bytes
            return server

    def give(self, server: Server, num_bytes: int) -> None:
        """Notes that a request has ended, with or without success."""
        with self._lock:
            server.requests -= 1
            server.bytes -= num_bytes

    def saw_heads(self, server: Server, heads: Iterable[HeadInfo]) -> None:
        """Notes the heads that the server has listed."""
        with self._lock:
            now = self._clock()
            server.heads = tuple(sorted(heads, key=lambda head: head.name))
            for head in server.heads:
                server.versions[head.name] = (head.weights_version, now)

    def saw_version(self, server: Server, head: str, version: int) -> None:
        """Notes that the server has answered a request for `head` with `version`."""
        with self._lock:
            server.versions[server.head_key(head)] = (version, self._clock())
            server.failures = 0
            if self.solo:
                server.state, server.reason = State.READY, ""

    def leave(self, server: Server, reason: str) -> None:
        """Notes that the server failed or is stopping: it gets no requests until a check succeeds.

        Requests that fail together count as one failure.
        """
        with self._lock:
            if server.state is not State.OUT:
                self._put_out(server, reason)

    def busy(self, server: Server, seconds: float | None) -> None:
        """Notes that the server refused a request because of overload.

        The server is avoided for `seconds`, its retry hint, or BUSY_SECONDS if it gave none.
        """
        with self._lock:
            until = self._clock() + (BUSY_SECONDS if seconds is None else max(0.0, seconds))
            server.busy_until = max(server.busy_until, until)

    def has_other(
        self, server: Server, choose: Callable[[list[Server], float], Iterable[Server]]
    ) -> bool:
        """Returns whether a request that failed at `server` can go to another one at once."""
        with self._lock:
            now = self._clock()
            others = [s for s in choose(self._usable(), now) if s is not server]
            return any(s.busy_until <= now for s in others)

    def due_checks(self, *, every: bool = False, idle: bool = False) -> list[Server]:
        """Returns the servers to check now; `checked` must be called for each of them.

        With `idle` (no server is ready), servers that are out are checked before their pause ends.
        With `every`, all servers are checked.
        """
        with self._lock:
            now = self._clock()
            due = [
                server
                for server in self._servers
                if not server.is_checked
                and (every or server.check_at <= now or (idle and server.state is not State.READY))
            ]
            for server in due:
                server.is_checked = True
            return due

    def checked(
        self, server: Server, heads: Sequence[HeadInfo] | None, reason: str = "", began: float = 0.0
    ) -> None:
        """Notes the result of a check that began at `began`: heads, or None and the reason."""
        with self._lock:
            server.is_checked = False
            now = self._clock()
            if heads is None:
                self._put_out(server, reason)
            elif server.state is State.OUT and server.left_at > began:
                pass  # the server failed after the check began, so the result is outdated
            else:
                server.state, server.reason = State.READY, ""
                server.check_at = now + CHECK_SECONDS
                self.saw_heads(server, heads)
            self._compare_heads()

    @property
    def num_checked(self) -> int:
        """Number of servers whose check is running."""
        with self._lock:
            return sum(server.is_checked for server in self._servers)

    def usable(self) -> list[Server]:
        """Returns the servers that may get requests."""
        with self._lock:
            return self._usable()

    def all(self) -> list[Server]:
        with self._lock:
            return list(self._servers)

    def heads(self) -> list[HeadInfo]:
        """Returns the heads with the tightest limits of all ready servers; [] if none is ready.

        Raises HeadMismatch.
        """
        with self._lock:
            if self._conflict:
                raise HeadMismatch(self._conflict)
            lists = [server.heads for server in self._usable() if server.heads]
        return [least_limits(same) for same in zip(*lists, strict=True)] if lists else []

    def gone(self, *notes: str) -> Unavailable:
        """Returns the error for the case that no server is ready. It lists `notes`, then each
        server and why it is not ready."""
        with self._lock:
            servers = [f"{s.address} ({s.reason or 'no answer yet'})" for s in self._servers]
        reasons = "; ".join((*notes, *servers))
        return Unavailable(
            f"no server is available: {reasons}. Check that the servers run and that the "
            "addresses (LOGPROBD_ADDRESS) are right; wait_ready() waits for a starting server",
            code="UNAVAILABLE",
            details=reasons,
        )

    def states(self) -> list[ServerState]:
        """Returns the state of every server."""
        with self._lock:
            now = self._clock()
            return [
                ServerState(
                    address=server.address,
                    state="busy"
                    if server.state is State.READY and server.busy_until > now
                    else server.state.value,
                    reason=server.reason,
                    requests=server.requests,
                    bytes=server.bytes,
                    weights_versions={head: seen[0] for head, seen in server.versions.items()},
                    retry_in=max(0.0, server.check_at - now) if server.state is State.OUT else 0.0,
                )
                for server in self._servers
            ]

    def _usable(self) -> list[Server]:
        if self.solo:
            return list(self._servers)
        return [server for server in self._servers if server.state is State.READY]

    def _put_out(self, server: Server, reason: str) -> None:
        now = self._clock()
        server.state, server.reason = State.OUT, reason
        self.left_at = server.left_at = now
        pause = min(BACKOFF_MAX_SECONDS, BACKOFF_FIRST_SECONDS * 2 ** min(server.failures, 20))
        server.failures += 1
        server.check_at = now + self._uniform(pause / 2, pause)
        self._compare_heads()

    def _compare_heads(self) -> None:
        ready = [server for server in self._servers if server.state is State.READY]
        self._conflict = ""
        for server in ready[1:]:
            difference = heads_differ(ready[0].heads, server.heads)
            if difference and not self.solo:
                self._conflict = (
                    f"{ready[0].address} and {server.address} hold different heads: {difference}. "
                    "All servers of a client must hold the same heads: fix one of them, or remove "
                    "it from the addresses"
                )
                return
