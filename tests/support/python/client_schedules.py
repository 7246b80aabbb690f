"""Random schedules of servers and calls, the servers that follow them, and what a client may make of them.

A schedule is a list of groups. A group has events that come before its calls, calls that are made at once, and events
that come when a certain number of its requests has arrived. What happens to the requests of a call is a script of the
call and not of a server: it holds wherever the client sends them. So the outcome of a call follows from the policy in
client/README.md, although the client chooses the servers. Events of servers (EVENTS) come on top of that.

Model.outcomes says how a call may end. Where the policy fixes the outcome, there is one, and it is that of all clients.
check_requests says what must hold for the requests of the whole schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
from client_drivers import HIDDEN_SIZE, NUMBERS_PER_UNIT, CallArgs, Outcome, ServerView, hidden_rows
from logprobd import _wire, testing
from logprobd._fake_scoring import Refusal
from logprobd._policy import ATTEMPTS_MAX

VOCAB_SIZE = 29
REQUEST_ROWS_MAX = 2
WAITS = (0.002, 0.02)
"""Bounds of the clients' waits between attempts. They are shorter than the policy's, so that a schedule is quick."""
PATIENT_SECONDS = 20.0
"""Time limit of calls that must not need it. It is also how long a hang takes to be noticed."""
LONGEST_HOLD_SECONDS = 60.0
NO_VERSION = 99
"""A version that no server ever holds."""

Step = tuple[Any, ...]
"""What happens to a request:
    "refuse", MS        refused for load with a hint in ms; None: without a hint; negative: it must not be sent again
    "unavailable", MS   fails with UNAVAILABLE and such a hint
    "cancel",           fails with CANCELLED
    "fail", CODE        fails with a gRPC status that ends the call
    "too large",        fails as gRPC refuses a message above its limit, which ends the call
    "garbage", KIND     gets an answer that is none, which ends the call
    "hold",             gets no answer while its call lasts
    "slow", MS          gets its answer late
    "together", N       gets its answer once N requests of its group have arrived
After its script, a request is answered."""

TERMINAL_CODES = (
    *("INVALID_ARGUMENT", "INTERNAL", "NOT_FOUND", "UNIMPLEMENTED", "PERMISSION_DENIED"),
    *("UNAUTHENTICATED", "OUT_OF_RANGE", "DATA_LOSS", "UNKNOWN", "ALREADY_EXISTS"),
)
GARBAGE = {"a cut varint": b"\xff" * 10, "a cut field": b"\x0a\x7fabc", "nothing": b""}
GARBAGE_FIELDS = ("rows", "logprob")
"""Fields of a decodable answer that do not fit its request."""

Event = tuple[Any, ...]
"""What happens to a server:
    "stop" S, "start" S, "restart" S     closes its connections; listens; both
    "drain" S, "garble" S, "serve" S     refuses and says NOT_SERVING; answers checks with garbage; ends both
    "swap" S V                           has the version V of the weights
    "remove" S, "add" S                  leaves or joins the list of the servers
"""
HARMFUL = frozenset({"stop", "restart", "drain", "garble", "remove"})
ENDS_CONNECTIONS = frozenset({"stop", "restart"})


@dataclasses.dataclass
class Call:
    args: CallArgs
    scripts: dict[int, list[Step]] = dataclasses.field(default_factory=dict)
    """By the first row of a request."""
    is_tight: bool = False
    """Whether the deadline may come before the answers."""

    @property
    def requests(self) -> list[int]:
        """The first rows of its requests."""
        return list(range(0, self.args.rows, REQUEST_ROWS_MAX))

    @property
    def steps(self) -> list[Step]:
        return [step for script in self.scripts.values() for step in script]


@dataclasses.dataclass
class Group:
    before: list[Event]
    meets: bool
    """Whether the client sees all running servers as ready before the calls."""
    is_stream: bool
    """Whether the Python clients make the calls as the batches of a stream."""
    calls: list[Call]
    during: list[tuple[int, Event]]
    """Events with the number of the request of this group with which they come."""


@dataclasses.dataclass
class Schedule:
    seed: int
    servers: int
    absent: frozenset[int]
    """Servers that an event adds."""
    follows: bool
    """Whether a function lists the servers, for a client that takes one. Otherwise all are named from the start, and
    one that is not in the list does not run."""
    channels: int
    max_inflight: int
    groups: list[Group]

    def __str__(self) -> str:
        facts = ", ".join(
            f"{field.name} {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "groups"
        )
        lines = [facts]
        for number, group in enumerate(self.groups):
            lines.append(
                f"group {number}: before {group.before}{', meets' if group.meets else ''}"
                f"{', stream' if group.is_stream else ''}, during {group.during}"
            )
            lines += [f"    {call}" for call in group.calls]
        return "\n".join(lines)


# --- drawing


class Drawing:
    """Draws a schedule from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.servers = self.random.choice((1, 1, 2, 2, 3, 4))
        self.versions = [1] * self.servers
        self.newest = 1
        self.calls = 0
        # Server 0 often stays as it is, so that the policy fixes more outcomes.
        has_anchor = self.servers > 1 and self.random.random() < 0.6
        self.changed = list(range(1 if has_anchor else 0, self.servers))
        self.membership = self.servers > 1 and self.random.random() < 0.4
        absent = frozenset({self.servers - 1} if self.membership else ())
        self.schedule = Schedule(
            seed,
            self.servers,
            absent,
            follows=self.membership and self.random.random() < 0.6,
            channels=1 if self.servers == 1 else self.random.choice((1, 1, 2)),
            max_inflight=self.random.randint(1, 3),
            groups=[],
        )
        for _ in range(self.random.randint(6, 10)):
            self.schedule.groups.append(self.group())

    def group(self) -> Group:
        draw = self.random.random
        before = [self.event() for _ in range(self.random.choice((0, 0, 0, 1, 1, 2)))]
        is_stream = draw() < 0.2
        many = draw() < 0.5
        calls = [
            self.call(is_stream, many) for _ in range(self.random.randint(2, 3) if many else 1)
        ]
        requests = sum(len(call.requests) for call in calls)
        during = []
        if draw() < 0.35:
            during = [(self.random.randint(1, requests), self.event())]
        return Group(before, draw() < 0.4, is_stream, calls, during)

    def event(self) -> Event:
        server = self.random.choice(self.changed)
        kinds = ["stop", "start", "start", "restart", "drain", "serve", "serve", "swap", "swap"]
        if self.servers > 1:
            kinds += ["garble", "level", "level"]
        if self.membership and server > 0:
            kinds += ["add", "add", "remove"]
        kind = self.random.choice(kinds)
        if kind == "level":  # a server gets the version that the newest one has
            kind, version = "swap", self.newest
            server = min(range(self.servers), key=lambda each: self.versions[each])
        elif kind == "swap":
            self.newest += 1
            version = self.newest
        else:
            return (kind, server)
        self.versions[server] = version
        return (kind, server, version)

    def call(self, is_stream: bool, among_others: bool) -> Call:
        draw = self.random
        self.calls += 1
        shares = {"plain": 6.0, "bumpy": 8.0, "pinned": 3.0, "terminal": 3.0}
        if not is_stream:  # a deadline that has passed ends a stream
            shares |= {"hold": 1.5, "tight": 1.5, "long hint": 1.0}
        if not among_others:  # its failures would count for the requests of other calls
            shares |= {"given up": 1.0}
        (kind,) = draw.choices(list(shares), list(shares.values()))
        call = Call(CallArgs(self.calls, draw.randint(1, 7), seconds=PATIENT_SECONDS))
        first = draw.choice(call.requests)
        if kind in ("bumpy", "tight", "terminal", "pinned") and draw.random() < 0.8:
            for row in draw.sample(call.requests, min(len(call.requests), draw.randint(1, 2))):
                call.scripts[row] = self.bumps(among_others)
        if kind == "pinned":
            version = draw.choice([self.versions[0], self.versions[-1], NO_VERSION])
            call.args = dataclasses.replace(call.args, version=version)
        elif kind == "terminal":
            call.scripts[first] = [
                *without_answer(call.scripts.get(first)),
                self.terminal(is_stream),
            ]
        elif kind == "given up":
            call.args = dataclasses.replace(call.args, rows=min(call.args.rows, REQUEST_ROWS_MAX))
            call.scripts = {0: [("unavailable", None)] * (ATTEMPTS_MAX + 2)}
        elif kind == "hold":
            call.scripts = {first: [("hold",)]}
            self.tighten(call, 150, 300)
        elif kind == "tight":
            slow = ("slow", draw.randint(20, 60))
            call.scripts[first] = [*without_answer(call.scripts.get(first)), slow]
            self.tighten(call, 30, 150)
        elif kind == "long hint":
            call.scripts = {first: [("refuse", draw.randint(900, 1500))]}
            self.tighten(call, 400, 600)
        return call

    def tighten(self, call: Call, least: int, most: int) -> None:
        call.is_tight = True
        seconds = self.random.randint(least, most) / 1000
        call.args = dataclasses.replace(call.args, seconds=seconds)

    def bumps(self, among_others: bool) -> list[Step]:
        """What a request survives. Among other calls, a failure may be counted for several requests."""
        draw = self.random
        kinds = ["refuse", "refuse", "refuse", "unavailable"] + ["cancel"] * (not among_others)
        script: list[Step] = []
        for _ in range(draw.randint(1, 1 if among_others else 3)):
            kind = draw.choice(kinds)
            hint = draw.choice((None, 5, 20, 50))
            script.append((kind,) if kind == "cancel" else (kind, hint))
        if draw.random() < 0.3:
            script.append(("slow", draw.randint(5, 40)))
        return script

    def terminal(self, is_stream: bool) -> Step:
        draw = self.random
        steps: list[Step] = [
            *(("fail", draw.choice(TERMINAL_CODES)) for _ in range(3)),
            ("too large",),
            ("garbage", draw.choice(GARBAGE_FIELDS)),
        ]
        if not is_stream:  # a stream ends with such an answer, and it has no negative hints
            steps += [("garbage", draw.choice(list(GARBAGE)))]
            steps += [("refuse", -1), ("unavailable", -1), ("fail", "ABORTED")]
        return draw.choice(steps)


def without_answer(script: list[Step] | None) -> list[Step]:
    return [step for step in script or () if step[0] != "slow"]


def draw_schedule(seed: int) -> Schedule:
    return Drawing(seed).schedule


# --- the servers


@functools.cache
def weights(version: int) -> np.ndarray:
    """The head's weights [VOCAB_SIZE, HIDDEN_SIZE] in this version."""
    return np.random.default_rng(version).standard_normal((VOCAB_SIZE, HIDDEN_SIZE))


def log_probabilities(args: CallArgs, version: int) -> np.ndarray:
    """The scores that the rows of a call have with this version of the weights."""
    logits = hidden_rows(args.call, args.rows).astype(np.float64) @ weights(version).T
    every = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return every[np.arange(args.rows), np.arange(args.rows)]


@dataclasses.dataclass
class Received:
    """A request of Score at a server, and what became of it."""

    server: int
    group: int
    """The group that ran when it arrived."""
    call: int
    row: int
    at: float
    order: int
    """Its place among all requests and checks of the schedule."""
    step: Step = ("lost",)
    ended: float = float("inf")
    ended_order: int = 1 << 62


class Stage:
    """The servers of a schedule, what happens to them, and all that they receive."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.changed = threading.Condition()
        self.is_over = False
        self.group = -1
        self.received: list[Received] = []
        self.checked: list[tuple[int, int]] = []
        """(server, order) of the answers to health checks that say SERVING."""
        self.launched = [0] * schedule.servers
        """By server: the order of its latest start; 0 for the first one."""
        self._order = 0
        self._scripts: dict[tuple[int, int], list[Step]] = {}
        self._during: list[tuple[int, Event]] = []
        self._arrived = 0
        self._open_calls: set[int] = set()
        self._changing = threading.RLock()
        self.servers = [ScheduledServer(stage=self, number=n) for n in range(schedule.servers)]
        self.listed = set(range(schedule.servers)) - schedule.absent
        for server in self.servers:
            server.start()  # an absent one, too, for its port
        for number in schedule.absent:
            self.servers[number].halt()

    def close(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()
        for server in self.servers:
            server.halt()

    def addresses(self) -> list[str]:
        """The addresses that are listed now."""
        return [self.servers[number].address for number in sorted(self.listed)]

    def begin(self, number: int, group: Group) -> None:
        with self.changed:
            self.group = number
            self._arrived = 0
            self._during = sorted(group.during)
            self._open_calls = {call.args.call for call in group.calls}
            for call in group.calls:
                for row, script in call.scripts.items():
                    self._scripts[call.args.call, row] = list(script)

    def finish(self) -> None:
        """Ends what waits for the calls of the group, and makes the events that did not come."""
        with self.changed:
            self._open_calls = set()
            events, self._during = [event for _, event in self._during], []
            self.changed.notify_all()
        for event in events:
            self.apply(event)
        with self._changing:  # an event that a request has begun
            pass

    def apply(self, event: Event) -> None:
        kind, number, *version = event
        server = self.servers[number]
        with self._changing:
            match kind:
                case "stop":
                    server.halt()
                case "start" if number in self.listed:
                    self._launch(server)
                case "restart" if server.is_running:
                    server.halt()
                    self._launch(server)
                case "drain":
                    server.ready = False
                case "garble":
                    server.is_garbled = True
                case "serve":
                    server.ready, server.is_garbled = True, False
                case "swap":
                    with self.changed:
                        server.weights_version = version[0]
                case "remove" if number in self.listed and len(self.listed) > 1:
                    self.listed.discard(number)
                    if not self.schedule.follows:
                        server.halt()
                case "add":
                    self.listed.add(number)
                    self._launch(server)

    def _launch(self, server: ScheduledServer) -> None:
        if not server.is_running:
            self.launched[server.number] = self.next_order()
            server.start()

    def facts(self, views: list[ServerView]) -> list[ServerFacts]:
        """What is known of the servers now, with what the client says of them."""
        states = {view.address: view.state for view in views}
        return [
            ServerFacts(
                server.weights_version,
                server.is_running,
                server.ready and not server.is_garbled,
                number in self.listed,
                self._is_known(number),
                states.get(server.address) in ("ready", "busy"),
            )
            for number, server in enumerate(self.servers)
        ]

    def _is_known(self, number: int) -> bool:
        since = self.launched[number]
        checks = sum(server == number and order > since for server, order in self.checked)
        return since == 0 or checks >= self.schedule.channels

    # --- called by the servers

    def next_order(self) -> int:
        with self.changed:
            self._order += 1
            return self._order

    def arrive(self, server: ScheduledServer, call: int, row: int) -> Received:
        """Notes a request, and makes the event that comes with it."""
        with self.changed:
            order = self.next_order()
            received = Received(server.number, self.group, call, row, time.monotonic(), order)
            self.received.append(received)
            self._arrived += 1
            due = [event for count, event in self._during if count <= self._arrived]
            self._during = [pair for pair in self._during if pair[0] > self._arrived]
            self.changed.notify_all()
        for event in due:
            self.apply(event)
        return received

    def end(self, received: Received) -> None:
        with self.changed:
            received.ended, received.ended_order = time.monotonic(), self.next_order()

    def next_step(self, received: Received) -> Step:
        with self.changed:
            script = self._scripts.get((received.call, received.row))
            return script.pop(0) if script else ("answer",)

    def wait_for(self, is_due: Callable[[], bool], seconds: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.is_over or is_due(), seconds)

    def is_open(self, call: int) -> bool:
        return call in self._open_calls

    def have_arrived(self, count: int) -> bool:
        return self._arrived >= count


class Garbage(Exception):
    """Raised to answer a request with bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data


class _Handlers(testing._Handlers):
    def _score(self, data: bytes, context: Any) -> bytes:
        try:
            return super()._score(data, context)
        except Garbage as garbage:
            return garbage.data

    def _list_heads(self, data: bytes, context: Any) -> bytes:
        heads = super()._list_heads(data, context)
        return GARBAGE["a cut field"] if self._fake.is_garbled else heads

    def _health(self, data: bytes, context: Any) -> bytes:
        return self._fake.health(super()._health(data, context))


@dataclasses.dataclass
class ScheduledServer(testing.FakeServer):
    """A FakeServer that follows the scripts of the calls and the events of its stage."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = HIDDEN_SIZE
    request_rows_max: int = REQUEST_ROWS_MAX
    stage: Any = None
    number: int = 0
    is_garbled: bool = False

    def __post_init__(self) -> None:
        self.weight = weights(1)
        super().__post_init__()

    @property
    def is_running(self) -> bool:
        return self._server is not None

    def start(self) -> ScheduledServer:
        server = grpc.server(
            futures.ThreadPoolExecutor(self.workers), options=[("grpc.so_reuseport", 0)]
        )
        server.add_generic_rpc_handlers((_Handlers(self),))
        self.port = server.add_insecure_port(self.address)
        server.start()
        self._server = server
        return self

    def halt(self) -> None:
        """Closes its connections without answers, and listens no more."""
        server, self._server = self._server, None
        if server is not None:
            with self.stage.changed:
                self.stage.changed.notify_all()
            server.stop(None).wait(LONGEST_HOLD_SECONDS)

    def health(self, answer: bytes) -> bytes:
        if self.is_garbled:
            return GARBAGE["a cut varint"]
        if _wire.decode(_wire.HealthResponse, answer).status == _wire.SERVING:
            with self.stage.changed:
                self.stage.checked.append((self.number, self.stage.next_order()))
        return answer

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return weights(self.weights_version) @ hidden

    def _answer(self, method: str, data: bytes, metadata: Any) -> _wire.ScoreResponse:
        request = _wire.decode(_wire.ScoreRequest, data)
        numbers = np.frombuffer(request.hidden, "<f4")[:2] * NUMBERS_PER_UNIT
        call, row = (round(float(number)) for number in numbers)
        received = self.stage.arrive(self, call, row)
        try:
            if not self.ready:
                received.step = ("drained",)
                raise Refusal("UNAVAILABLE", "draining")
            received.step = self.stage.next_step(received)
            self._take(received)
            with self.stage.changed:  # the weights and their version change together
                response = super()._answer(method, data, metadata)
            match received.step:
                case ("garbage", "rows"):
                    response.rows += 1
                case ("garbage", "logprob"):
                    response.logprob = bytes(response.logprob) + b"more"
            return response
        finally:
            self.stage.end(received)

    def _take(self, received: Received) -> None:
        """Does what the step demands before the answer. Raises Refusal or Garbage instead of one."""
        match received.step:
            case ("refuse", ms):
                raise Refusal("RESOURCE_EXHAUSTED", "full", None if ms is None else ms / 1000)
            case ("unavailable", ms):
                raise Refusal("UNAVAILABLE", "simulated", None if ms is None else ms / 1000)
            case ("cancel",):
                raise Refusal("CANCELLED", "simulated")
            case ("fail", code):
                raise Refusal(code, "simulated")
            case ("too large",):
                raise Refusal("RESOURCE_EXHAUSTED", "message larger than max (9 vs. 8)")
            case ("garbage", kind) if kind in GARBAGE:
                raise Garbage(GARBAGE[kind])
            case ("slow", ms):
                self.stage.wait_for(lambda: False, ms / 1000)
            case ("hold",):
                self.stage.wait_for(
                    lambda: not (self.stage.is_open(received.call) and self.is_running),
                    LONGEST_HOLD_SECONDS,
                )
                raise Refusal("UNKNOWN", "held")
            case ("together", count):
                self.stage.wait_for(lambda: self.stage.have_arrived(count), PATIENT_SECONDS / 2)


# --- what must follow


@dataclasses.dataclass
class ServerFacts:
    """What is known of a server when a group begins."""

    version: int
    is_up: bool
    is_whole: bool
    """It is neither drained nor garbled."""
    is_listed: bool
    is_known: bool
    """The client has a connection that works."""
    is_believed: bool
    """The client sees it as ready."""


class Model:
    """How the calls of a group may end, by the policy of client/README.md."""

    def __init__(self, group: Group, facts: list[ServerFacts], *, is_solo: bool) -> None:
        self.group = group
        self.is_solo = is_solo
        events = [event for _, event in group.during]
        self.hurt = {event[1] for event in events if event[0] in HARMFUL}
        self.helped = {event[1] for event in events if event[0] in ("start", "add", "serve")}
        self.loses = any(event[0] in ENDS_CONNECTIONS | {"remove"} for event in events)
        self.swapped = {event[2] for event in events if event[0] == "swap"}
        listed = {n: each for n, each in enumerate(facts) if each.is_listed or n in self.helped}
        self.candidates = {n for n, each in listed.items() if each.is_up or n in self.helped}
        self.steady = {
            n
            for n, each in listed.items()
            if each.is_up and each.is_whole and each.is_listed and each.is_known
            if n not in self.hurt
        }
        self.may_answer = {n for n in self.candidates if facts[n].is_whole or n in self.helped}
        if any(event[0] == "restart" for event in events):
            self.may_answer |= self.candidates
        self.versions = {facts[n].version for n in self.candidates} | self.swapped
        self.holders = {n for n in self.steady if facts[n].is_believed or is_solo}
        self.facts = facts
        steps = [step for call in group.calls for step in call.steps]
        self.leaves = sum(step[0] in ("unavailable", "cancel") for step in steps)
        self.is_quiet = (
            not self.leaves
            and not events
            and self.steady == set(listed)
            and (is_solo or self.holders == self.steady)
        )
        self.is_exact = not self.hurt and not self.swapped and len(self.versions) == 1

    def outcomes(self, call: Call) -> set[str]:
        """All results that the call may have."""
        scored = {f"version {version}" for version in self.versions}
        if not self.may_answer:
            return {"UNAVAILABLE"} | ({"DEADLINE_EXCEEDED"} if call.is_tight else set())
        ends = ends_of(call)
        if call.args.version:
            outcomes = self._pinned(call)
        elif ends:
            outcomes = ends | (scored if self.loses else set())
        else:
            outcomes = set(scored)
        if len(self.versions) > 1 and self.leaves + len(self.group.during) >= 3:
            outcomes |= {"ABORTED"}
        if not self.steady:
            outcomes |= {"UNAVAILABLE"} | (ends and scored)
        if call.is_tight and ("hold",) not in call.steps:
            outcomes |= scored | {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
            if self.is_quiet and self.is_solo and ends_early(call):
                outcomes = {"RESOURCE_EXHAUSTED"}
        return outcomes

    def _pinned(self, call: Call) -> set[str]:
        pinned = call.args.version
        lacking = {"FAILED_PRECONDITION" if self.is_solo else "ABORTED"}
        if self.is_quiet:
            holds = any(self.facts[n].version == pinned for n in self.holders)
            return {f"version {pinned}"} if holds else lacking
        return lacking | ({f"version {pinned}"} if pinned in self.versions else set())


def ends_early(call: Call) -> bool:
    """Whether its only step is a hint beyond its deadline."""
    return any(s[0] == "refuse" and (s[1] or 0) / 1000 > call.args.seconds for s in call.steps)


def ends_of(call: Call) -> set[str]:
    """The codes with which the scripts of its requests end the call, of whichever server it is."""
    ends = set()
    for script in call.scripts.values():
        for attempt, step in enumerate(script, 1):
            code = end_of(step, attempt)
            if code:
                ends.add(code)
                break
    return ends


def end_of(step: Step, attempt: int) -> str:
    """The code with which this step of the given attempt ends the call, or ""."""
    match step:
        case ("refuse", ms) if ms is not None and ms < 0:
            return "RESOURCE_EXHAUSTED"
        case ("unavailable", ms) if (ms is not None and ms < 0) or attempt >= ATTEMPTS_MAX:
            return "UNAVAILABLE"
        case ("cancel",) if attempt >= ATTEMPTS_MAX:
            return "UNAVAILABLE"
        case ("too large",):
            return "RESOURCE_EXHAUSTED"
        case ("fail", code):
            return code
        case ("garbage", _):
            return "INTERNAL"
        case ("hold",):
            return "DEADLINE_EXCEEDED"
    return ""


def least_requests(script: list[Step]) -> int:
    """The requests that a script needs when no server fails."""
    for attempt, step in enumerate(script, 1):
        if end_of(step, attempt):
            return attempt
    return len(script) if script and script[-1][0] in ("slow", "together") else len(script) + 1


@dataclasses.dataclass
class Past:
    """A group that has run."""

    group: Group
    model: Model
    outcomes: list[Outcome]

    def pairs(self) -> Iterator[tuple[Call, Outcome]]:
        return zip(self.group.calls, self.outcomes, strict=True)


SLACK_SECONDS = 0.1
"""By so much a server may count as busy for longer than its hint says."""
FORGOTTEN_SECONDS = 1.0
"""Time after a call in which a request of it may still arrive."""


class Requests:
    """The requests of a schedule, and what must hold for them."""

    def __init__(self, stage: Stage, past: list[Past]) -> None:
        self.stage = stage
        self.past = past
        self.received = sorted(stage.received, key=lambda each: each.order)
        self.group_of = {
            call.args.call: n for n, each in enumerate(past) for call in each.group.calls
        }
        self.ended = {call.args.call: outcome for each in past for call, outcome in each.pairs()}
        self.is_solo = stage.schedule.servers == 1

    def check(self) -> None:
        self.check_numbers()
        self.check_hints()
        if not self.is_solo:
            self.check_left_servers()
        self.check_ends()

    def of(self, call: int, row: int) -> list[Received]:
        return [each for each in self.received if (each.call, each.row) == (call, row)]

    def check_numbers(self) -> None:
        """Each request is sent as often as its script and the policy demand."""
        for each in self.past:
            for call, outcome in each.pairs():
                for row in call.requests:
                    received = self.of(call.args.call, row)
                    script = call.scripts.get(row, [])
                    failed = sum(
                        r.step[0] in ("unavailable", "cancel", "drained") for r in received
                    )
                    if outcome.result == "UNAVAILABLE" and len(received) == failed:
                        assert len(received) <= ATTEMPTS_MAX, received
                    if call.is_tight or call.args.version or not each.model.is_exact:
                        continue
                    if outcome.result.startswith("version") and not each.model.loses:
                        assert len(received) >= least_requests(script), received
                        if each.model.steady and each.model.candidates == each.model.steady:
                            assert len(received) == least_requests(script), received

    def is_known(self, refused: Received, later: Received) -> bool:
        """Whether the client had the answer to `refused` when it sent `later`."""
        if (refused.call, refused.row) == (later.call, later.row):
            return True
        is_later = self.group_of.get(later.call, 1 << 62) > self.group_of[refused.call]
        return is_later and self.ended[refused.call].result.startswith("version")

    def check_hints(self) -> None:
        """A refused request waits for the hint, and other servers are taken before it has passed."""
        for at, refused in enumerate(self.received):
            if refused.step[0] not in ("refuse", "unavailable") or not refused.step[1]:
                continue
            hint = refused.step[1] / 1000
            for later in self.received[at + 1 :]:
                if later.server != refused.server or not self.is_known(refused, later):
                    continue
                if later.order < refused.ended_order or later.at >= refused.ended + hint - 0.001:
                    continue
                is_same = (later.call, later.row) == (refused.call, refused.row)
                if self.is_solo:
                    assert not is_same, ("before the hint", refused, later)
                elif refused.step[0] == "refuse":
                    free = self.free_servers(later)
                    assert not free, ("before the hint, and others were free", refused, later, free)

    def free_servers(self, later: Received) -> set[int]:
        """Servers other than that of `later` that were certainly ready and not busy when it was sent."""
        group = self.group_of.get(later.call)
        if group is None or not self.past[group].model.is_exact:
            return set()
        model = self.past[group].model
        free = {n for n in model.steady if model.facts[n].is_believed} - {later.server}
        for each in self.received:
            if each.server not in free or each.order > later.order:
                continue
            if each.step[0] in ("unavailable", "cancel", "drained", "lost") and each.group >= group:
                free.discard(each.server)
            if each.step[0] == "refuse":
                until = each.ended + max(0.1, (each.step[1] or 0) / 1000) + SLACK_SECONDS
                if until >= later.at or each.ended_order > later.order:
                    free.discard(each.server)
        return free

    def check_left_servers(self) -> None:
        """A server that failed gets no request before a check has found it healthy."""
        for at, failed in enumerate(self.received):
            if failed.step[0] not in ("unavailable", "cancel", "drained"):
                continue
            # A check that was answered while this request was under way may have begun after an earlier failure.
            checks = (
                order
                for server, order in self.stage.checked
                if server == failed.server and order > failed.order
            )
            checked = min(checks, default=1 << 62)
            for later in self.received[at + 1 :]:
                if later.server != failed.server or later.order < failed.ended_order:
                    continue
                if self.is_known(failed, later):
                    assert later.order > checked, ("sent to a server that was left", failed, later)

    def check_ends(self) -> None:
        """Nothing is sent for a call that has ended."""
        for each in self.received:
            outcome = self.ended.get(each.call)
            if outcome is not None and each.group > self.group_of[each.call]:
                assert each.at < outcome.ended + FORGOTTEN_SECONDS, ("sent late", each, outcome)


def check_deadlines(pairs: Iterator[tuple[Call, Outcome]], late_seconds: float) -> None:
    """No call outlasts its deadline, and none fails because of it before."""
    for call, outcome in pairs:
        seconds = outcome.ended - outcome.began
        assert seconds <= call.args.seconds + late_seconds, ("late", call, outcome)
        if outcome.result == "DEADLINE_EXCEEDED":
            assert seconds >= call.args.seconds - 0.005, ("early", call, outcome)


def check_scores(call: Call, outcome: Outcome) -> None:
    """All rows are scored by the version that the result names."""
    if outcome.result.startswith("version"):
        version = int(outcome.result.split()[1])
        expected = log_probabilities(call.args, version)
        np.testing.assert_allclose(outcome.logprob, expected, atol=2e-5, err_msg=str(call))


def check_nothing_is_left(servers: list[ServerView]) -> None:
    counts = [(server.requests, server.bytes) for server in servers]
    assert counts == [(0, 0)] * len(servers), servers
