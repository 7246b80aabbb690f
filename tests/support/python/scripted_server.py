"""A fake server that follows a script: one step for each scoring request, in their order of arrival.

Steps:
    "answer"               answers; so does every request after the end of the script
    "refuse", S            refuses for load with the hint S in seconds; None: without a hint
    "fail", CODE           fails with a gRPC status
    "drain"                fails with UNAVAILABLE, and its health says NOT_SERVING from then on
    "hold"                 does not answer while the scenario runs
    "swap", V              makes V the version of the weights, then answers
    "swap and hold", V, NAME, N
                           makes V the version, and answers once the server NAME has received N requests
    "answer and swap", V   answers, then makes V the version of the weights
    "die"                  closes its connections without an answer, and listens no more
    "restart"              closes its connections without an answer, and listens again
    "answer and close"     answers, then sends GOAWAY and listens no more
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

from logprobd import _wire
from logprobd._fake_scoring import Refusal
from logprobd.testing import FakeServer

LONGEST_HOLD_S = 60


@dataclasses.dataclass
class Received:
    """A scoring request and what the script made of it."""

    rows: int
    pinned: int  # version of the weights that the request demands; 0: any
    at: float  # time.monotonic() of its arrival
    outcome: str = "no answer"

    def __str__(self) -> str:
        version = f" of version {self.pinned}" if self.pinned else ""
        return f"{self.rows} {'row' if self.rows == 1 else 'rows'}{version}: {self.outcome}"


class Stage:
    """The servers of a scenario. A server's script may wait for what another one receives."""

    def __init__(self) -> None:
        self.servers: dict[str, ScriptedServer] = {}
        self.changed = threading.Condition()
        self.is_over = False

    def close(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()
        for server in self.servers.values():
            server.stop()


@dataclasses.dataclass
class ScriptedServer(FakeServer):
    """A FakeServer with a script."""

    stage: Stage = dataclasses.field(default_factory=Stage)
    script: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    received: list[Received] = dataclasses.field(default_factory=list)
    unready_probes: int = 0  # number of health checks to which it says NOT_SERVING
    probes: int = 0  # number of health checks since unready_probes was set

    @property
    def log(self) -> list[str]:
        """What it received, and how each request ended."""
        probes = [f"{self.probes} probes"] if self.probes else []
        return probes + [str(received) for received in self.received]

    @property
    def ready(self) -> bool:  # type: ignore[override]
        """Whether it can score. Without requests only health checks read this."""
        if not self.unready_probes:
            return self._is_ready
        self.probes += 1
        return self.probes > self.unready_probes

    @ready.setter
    def ready(self, is_ready: bool) -> None:
        self._is_ready = is_ready

    def least_gap(self) -> float:
        """The shortest time between two requests, in seconds."""
        times = [received.at for received in self.received]
        return min(after - before for before, after in zip(times, times[1:], strict=False))

    def _answer(self, method: str, data: bytes, metadata: Any) -> _wire.ScoreResponse:
        request = _wire.decode(_wire.ScoreRequest, data)
        received = Received(request.rows, request.weights_version, time.monotonic())
        with self.stage.changed:
            step = self.script.pop(0) if self.script else ("answer",)
            self.received.append(received)
            self.stage.changed.notify_all()
        try:
            self._before(step)
            response = super()._answer(method, data, metadata)
        except Refusal as refusal:
            received.outcome = "closed" if step[0] in ("die", "restart") else refusal.code
            raise
        received.outcome = f"version {response.weights_version}"
        if step[0] == "answer and swap":
            self.weights_version = step[1]
        elif step[0] == "answer and close":
            self._server.stop(grace=LONGEST_HOLD_S)
        return response

    def _before(self, step: tuple[Any, ...]) -> None:
        """Does what the step demands before the answer. Raises Refusal instead of one."""
        match step:
            case ("refuse", hint):
                raise Refusal("RESOURCE_EXHAUSTED", "the queue is full", hint)
            case ("fail", code):
                raise Refusal(code, "as the script demands")
            case ("drain",):
                self.ready = False
                raise Refusal("UNAVAILABLE", "draining")
            case ("hold",):
                self._wait(lambda: False)
                raise Refusal("CANCELLED", "held")
            case ("swap", version):
                self.weights_version = version
            case ("swap and hold", version, name, count):
                self.weights_version = version
                self._wait(lambda: len(self.stage.servers[name].received) >= count)
            case ("die",) | ("restart",):
                self._server.stop(None).wait(LONGEST_HOLD_S)
                if step == ("restart",):
                    self.start()
                raise Refusal("ABORTED", "its connection is closed")

    def _wait(self, is_due: Any) -> None:
        with self.stage.changed:
            self.stage.changed.wait_for(lambda: self.stage.is_over or is_due(), LONGEST_HOLD_S)
