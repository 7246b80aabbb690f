"""Which server gets the next request, and which is left alone for a while.

It does no input or output, and its clock is an argument; the pools of Client and AsyncClient drive
it. Any thread may use a Balance.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from logprobd.errors import HeadMismatch, Unavailable
from logprobd.info import HeadInfo, heads_differ, least_limits

CHECK_SECONDS = 10.0
"""A server in use is asked for its health and its heads this often."""
BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_MAX_SECONDS = 30.0
"""How long a server that failed is left alone: doubled with each failure, drawn from the upper
half."""
BUSY_SECONDS = 0.1
"""How long a server that refused for load without a hint is not preferred."""
VERSION_SECONDS = 10.0
"""How long a server is believed to hold the version that it named last."""


class State(enum.Enum):
    UNKNOWN = "unknown"  # not asked yet
    READY = "ready"
    OUT = "out"


@dataclass(frozen=True)
class ServerState:
    """What a client knows of one of its servers, for debugging."""

    address: str
    state: str
    """"unknown" (not asked yet), "ready", "busy" (it refused for load a moment ago) or "out" (it
    failed, drains, or holds another head)."""
    reason: str
    """Why it is out; "" otherwise."""
    requests: int
    """Of this client, unanswered."""
    bytes: int
    """Of hidden states in those requests."""
    weights_versions: dict[str, int]
    """By head, as seen last."""
    retry_in: float
    """Seconds until it is asked again whether it is well; 0 unless it is out."""


@dataclass(eq=False)
class Server:
    """One server as a Balance sees it. Only its Balance writes to it."""

    address: str
    state: State = State.UNKNOWN
    reason: str = ""
    requests: int = 0
    bytes: int = 0
    failures: int = 0
    is_checked: bool = False
    """A check is under way."""
    check_at: float = 0.0
    busy_until: float = 0.0
    left_at: float = 0.0
    heads: tuple[HeadInfo, ...] = ()
    versions: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By head: the version seen last, and when."""

    def head_key(self, head: str) -> str:
        """The name under which versions of `head` are kept: "" stands for the only one."""
        return self.heads[0].name if not head and len(self.heads) == 1 else head

    def version(self, head: str, now: float) -> int | None:
        """The version it is believed to hold; None: not known, or seen long ago."""
        version, seen_at = self.versions.get(self.head_key(head), (None, 0.0))
        return version if now - seen_at < VERSION_SECONDS else None


class Balance:
    """The servers of a client and who is next.

    A request goes to the ready server with the fewest unanswered bytes of this client; equals take
    turns. With `solo` there is one server, which is used whatever happened to it.
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
        """When a server was put out last."""

    def set_addresses(self, addresses: Iterable[str]) -> list[Server]:
        """Takes the servers that exist now; those that stay keep what is known of them. Returns
        those that went."""
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
        """The server for a request of so many bytes, which counts as its work until `give`.

        `choose` narrows the ready servers down. None when none of them is ready or has room.
        Raises HeadMismatch when servers hold different heads.
        """
        with self._lock:
            if self._conflict:
                raise HeadMismatch(self._conflict)
            now = self._clock()
            servers = list(choose(self._usable(), now))
            # One that asked to wait is left alone while another is there, even if that is full.
            servers = [s for s in servers if s.busy_until <= now] or servers
            servers = [s for s in servers if has_room(s)]
            if not servers:
                return None
            turn = {id(server): place for place, server in enumerate(self._servers)}
            count = len(self._servers)
            server = min(servers, key=lambda s: (s.bytes, (turn[id(s)] - self._turn) % count))
            self._turn = (turn[id(server)] + 1) % count
            server.requests += 1
            server.bytes += num_bytes
            return server

    def give(self, server: Server, num_bytes: int) -> None:
        """The request has ended, in whatever way."""
        with self._lock:
            server.requests -= 1
            server.bytes -= num_bytes

    def saw_heads(self, server: Server, heads: Iterable[HeadInfo]) -> None:
        """The server has listed its heads."""
        with self._lock:
            now = self._clock()
            server.heads = tuple(sorted(heads, key=lambda head: head.name))
            for head in server.heads:
                server.versions[head.name] = (head.weights_version, now)

    def saw_version(self, server: Server, head: str, version: int) -> None:
        """The server has answered a request for `head`."""
        with self._lock:
            server.versions[server.head_key(head)] = (version, self._clock())
            server.failures = 0
            if self.solo:
                server.state, server.reason = State.READY, ""

    def leave(self, server: Server, reason: str) -> None:
        """The server failed, or said that it stops: it is left alone until a check finds it well.

        Requests that fail together count as one failure.
        """
        with self._lock:
            if server.state is not State.OUT:
                self._put_out(server, reason)

    def busy(self, server: Server, seconds: float | None) -> None:
        """The server refused for load: others are preferred for `seconds`, its hint."""
        with self._lock:
            until = self._clock() + (BUSY_SECONDS if seconds is None else max(0.0, seconds))
            server.busy_until = max(server.busy_until, until)

    def has_other(
        self, server: Server, choose: Callable[[list[Server], float], Iterable[Server]]
    ) -> bool:
        """Whether a request that `server` failed can go elsewhere without waiting."""
        with self._lock:
            now = self._clock()
            others = [s for s in choose(self._usable(), now) if s is not server]
            return any(s.busy_until <= now for s in others)

    def due_checks(self, *, every: bool = False, idle: bool = False) -> list[Server]:
        """The servers to be checked now; `checked` must follow for each.

        `idle`: nobody is ready, so those that are out do not get their whole pause. `every`: all.
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
        """A check, begun at `began`, has ended: with the server's heads, or with what is wrong."""
        with self._lock:
            server.is_checked = False
            now = self._clock()
            if heads is None:
                self._put_out(server, reason)
            elif server.state is State.OUT and server.left_at > began:
                pass  # it failed meanwhile: what the check saw is out of date
            else:
                server.state, server.reason = State.READY, ""
                server.check_at = now + CHECK_SECONDS
                self.saw_heads(server, heads)
            self._compare_heads()

    @property
    def num_checked(self) -> int:
        """Servers whose check is under way."""
        with self._lock:
            return sum(server.is_checked for server in self._servers)

    def usable(self) -> list[Server]:
        """The servers that may be sent requests."""
        with self._lock:
            return self._usable()

    def all(self) -> list[Server]:
        with self._lock:
            return list(self._servers)

    def heads(self) -> list[HeadInfo]:
        """The heads, with the tightest limits of all ready servers; [] when none is ready.

        Raises HeadMismatch.
        """
        with self._lock:
            if self._conflict:
                raise HeadMismatch(self._conflict)
            lists = [server.heads for server in self._usable() if server.heads]
        return [least_limits(same) for same in zip(*lists, strict=True)] if lists else []

    def gone(self, *notes: str) -> Unavailable:
        """The error when no server is ready, naming each and why; `notes` come before them."""
        with self._lock:
            servers = [f"{s.address} ({s.reason or 'no answer yet'})" for s in self._servers]
        reasons = "; ".join((*notes, *servers))
        return Unavailable(
            f"no server is available: {reasons}. Check that the servers run and the addresses "
            "(LOGPROBD_ADDRESS); wait_ready() waits for a starting server",
            code="UNAVAILABLE",
            details=reasons,
        )

    def states(self) -> list[ServerState]:
        """A picture of all servers."""
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
                    "A client's servers must hold the same: mend one of them, or leave it out of "
                    "the addresses"
                )
                return
