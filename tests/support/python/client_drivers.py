"""The clients behind one interface: the Python client, its asyncio half, and the C++ client in a program."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from logprobd import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    HeadMismatch,
    LogprobdError,
    RetryPolicy,
    ServerBug,
)

HIDDEN_SIZE = 16
CALL_SECONDS = 60
CLOSE_SECONDS = 30
NUMBERS_PER_UNIT = 32
"""A call's number and a row's are divided by this, so that they are exact and the logits are small."""

Addresses = list[str] | Callable[[], list[str]]


def hidden_rows(call: int, rows: int) -> np.ndarray:
    """The hidden states of a call, which name the call and the row, so that no two rows are equal."""
    hidden = np.ones((rows, HIDDEN_SIZE), np.float32)
    hidden[:, 0] = call / NUMBERS_PER_UNIT
    hidden[:, 1] = np.arange(rows) / NUMBERS_PER_UNIT
    return hidden


@dataclasses.dataclass(frozen=True)
class ClientOptions:
    waits: tuple[float, float]
    """First and longest bound of the waits between attempts, in seconds."""
    channels: int = 1
    max_inflight: int = 1


@dataclasses.dataclass(frozen=True)
class CallArgs:
    """A call of Score: `rows` rows with the targets 0, 1, 2, ..."""

    call: int
    rows: int
    version: int = 0
    """The version of the weights that it demands; 0: any."""
    seconds: float = CALL_SECONDS

    @property
    def batch(self) -> dict[str, Any]:
        """Its arguments by the names of Client.score, without the time limit."""
        return {
            "hidden": hidden_rows(self.call, self.rows),
            "targets": np.arange(self.rows),
            "weights_version": self.version,
        }


@dataclasses.dataclass
class Outcome:
    """How a call has ended."""

    result: str
    """"version V", or the name of the gRPC status."""
    logprob: Sequence[float] = ()
    message: str = ""
    began: float = 0.0
    ended: float = 0.0


@dataclasses.dataclass(frozen=True)
class ServerView:
    """What a client says of one of its servers."""

    address: str
    state: str
    requests: int
    bytes: int


def code_of(error: LogprobdError) -> str:
    """The name of the gRPC status that the C++ client has for this error."""
    if isinstance(error, HeadMismatch):
        return "FAILED_PRECONDITION"
    # An error that the Python client detects itself has no code.
    own = {DeadlineExceeded: "DEADLINE_EXCEEDED", ServerBug: "INTERNAL"}
    return error.code or own.get(type(error), "")


def outcome_of(result: Any) -> Outcome:
    if isinstance(result, LogprobdError):
        return Outcome(code_of(result), message=str(result))
    (version,) = result.weights_versions
    return Outcome(f"version {version}", list(result.logprob))


class PythonClient:
    """Client. `call` waits for the result of its methods."""

    library: Any = Client

    def __init__(self, _: pathlib.Path | None, addresses: Addresses, options: ClientOptions):
        self.message = ""
        first, longest = options.waits
        self.client = self.library(
            addresses,
            max_inflight=options.max_inflight,
            retry=RetryPolicy(base_seconds=first, cap_seconds=longest),
            channels=options.channels,
        )

    def call(self, result: Any) -> Any:
        return result

    def close(self) -> None:
        self.call(self.client.close())

    def meet(self) -> None:
        """Asks all servers for their heads, until each has answered or failed."""
        self.look()
        while any(server.state == "unknown" for server in self.client.servers()):
            self.look()

    def look(self) -> None:
        """Asks all servers for their heads."""
        with contextlib.suppress(LogprobdError):
            self.call(self.client.list_heads())

    def score(self, rows: int, version: int, seconds: float) -> tuple[str, Sequence[float]]:
        (outcome,) = self.score_all([CallArgs(1, rows, version, seconds)])
        self.message = outcome.message or self.message
        return outcome.result, outcome.logprob

    def score_all(self, calls: Sequence[CallArgs]) -> list[Outcome]:
        """Makes calls at once, each on a thread of its own."""
        ended: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()

        def score(index: int) -> None:
            ended.put((index, self._score(calls[index])))

        for index in range(1, len(calls)):
            threading.Thread(target=score, args=(index,), daemon=True).start()
        score(0)
        return [outcome for _, outcome in sorted(ended.get(timeout=CALL_SECONDS) for _ in calls)]

    def _score(self, call: CallArgs) -> Outcome:
        began = time.monotonic()
        try:
            result = self.client.score(**call.batch, timeout=call.seconds)
        except LogprobdError as error:
            result = error
        return self._timed(result, began)

    def _timed(self, result: Any, began: float) -> Outcome:
        outcome = outcome_of(result)
        outcome.began, outcome.ended = began, time.monotonic()
        return outcome

    def stream_all(self, calls: Sequence[CallArgs]) -> list[Outcome]:
        """Makes the calls as the batches of one stream. An error that ends it is that of all the rest."""
        began = time.monotonic()
        outcomes: list[Outcome] = []
        results = self.client.score_stream(
            [call.batch for call in calls], on_error="return", timeout=calls[0].seconds
        )
        try:
            for result in results:
                outcomes.append(self._timed(result, began))
        except LogprobdError as error:
            outcomes += [self._timed(error, began)] * (len(calls) - len(outcomes))
        return outcomes

    def ready(self) -> str:
        try:
            self.call(self.client.wait_ready(CALL_SECONDS))
        except LogprobdError as error:
            return code_of(error)
        return "OK"

    def servers(self) -> list[ServerView]:
        return [
            ServerView(each.address, each.state, each.requests, each.bytes)
            for each in self.client.servers()
        ]

    def leftovers(self) -> list[str]:
        """What still runs when calls and the checks that they began have had time to end."""
        end = time.monotonic() + CLOSE_SECONDS
        while self.client._pool.balance.num_checked and time.monotonic() < end:
            self._wait_a_moment()
        return ["a check"] * self.client._pool.balance.num_checked

    def _wait_a_moment(self) -> None:
        threading.Event().wait(0.01)


class AsyncPythonClient(PythonClient):
    """AsyncClient on an event loop that runs only during its calls."""

    library = AsyncClient

    def __init__(self, _: pathlib.Path | None, addresses: Addresses, options: ClientOptions):
        self.loop = asyncio.new_event_loop()
        super().__init__(_, addresses, options)

    def call(self, result: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(result, 2 * CALL_SECONDS))

    def close(self) -> None:
        super().close()
        self.loop.close()

    def leftovers(self) -> list[str]:
        tasks = set(self.client._pool._tasks)
        if tasks:
            self.call(asyncio.wait(tasks, timeout=CLOSE_SECONDS))
        return super().leftovers() + [str(task) for task in tasks if not task.done()]

    def _wait_a_moment(self) -> None:
        self.call(asyncio.sleep(0.01))

    def score_all(self, calls: Sequence[CallArgs]) -> list[Outcome]:
        """Makes calls at once, each as a task."""

        async def score(call: CallArgs) -> Outcome:
            began = time.monotonic()
            try:
                result = await self.client.score(**call.batch, timeout=call.seconds)
            except LogprobdError as error:
                result = error
            return self._timed(result, began)

        async def score_each() -> list[Outcome]:
            return await asyncio.gather(*map(score, calls))

        return self.call(score_each())

    def stream_all(self, calls: Sequence[CallArgs]) -> list[Outcome]:
        began = time.monotonic()
        outcomes: list[Outcome] = []

        async def read() -> None:
            async for result in self.client.score_stream(
                [call.batch for call in calls], on_error="return", timeout=calls[0].seconds
            ):
                outcomes.append(self._timed(result, began))

        try:
            self.call(read())
        except LogprobdError as error:
            outcomes += [self._timed(error, began)] * (len(calls) - len(outcomes))
        return outcomes


class CppClient:
    """The C++ client, in the program scenario_client.cc. It has no streams."""

    def __init__(
        self, binaries: pathlib.Path | None, addresses: Addresses, options: ClientOptions
    ) -> None:
        self.message = ""
        assert binaries is not None and not callable(addresses)
        program = binaries.parent / "tests" / "scenario_client"
        assert program.exists(), f"{program} is missing; build it"
        self.process = subprocess.Popen(
            [
                program,
                ",".join(addresses),
                str(HIDDEN_SIZE),
                *(f"{1000 * wait:g}" for wait in options.waits),
                str(options.channels),
                str(options.max_inflight),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.SimpleQueue[tuple[float, dict]] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put((time.monotonic(), json.loads(line)))

    def _tell(self, *words: object) -> None:
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def _ask(self, *words: object) -> dict:
        self._tell(*words)
        return self.lines.get(timeout=2 * CALL_SECONDS)[1]

    def close(self) -> None:
        self.process.stdin.close()
        try:
            assert self.process.wait(CLOSE_SECONDS) == 0
        finally:
            self.process.kill()
            self.reader.join()
            self.process.stdout.close()
        assert self.lines.empty(), "a call has ended twice"

    def meet(self) -> None:
        self._ask("meet")

    def look(self) -> None:
        self._ask("look")

    def score(self, rows: int, version: int, seconds: float) -> tuple[str, Sequence[float]]:
        (outcome,) = self.score_all([CallArgs(1, rows, version, seconds)])
        self.message = outcome.message or self.message
        return outcome.result, outcome.logprob

    def score_all(self, calls: Sequence[CallArgs]) -> list[Outcome]:
        """Makes calls at once: Score on a thread for those with odd numbers, ScoreAsync for the others."""
        began = {}
        for call in calls:
            began[call.call] = time.monotonic()
            command = "score" if call.call % 2 else "score_async"
            milliseconds = round(1000 * call.seconds)
            self._tell(command, call.call, call.rows, call.version, milliseconds)
        outcomes = {}
        for _ in calls:
            ended, answer = self.lines.get(timeout=2 * CALL_SECONDS)
            result = answer["code"]
            if result == "OK":
                (version,) = answer["versions"]
                result = f"version {version}"
            assert answer["call"] not in outcomes, "a call has ended twice"
            outcomes[answer["call"]] = Outcome(
                result,
                answer.get("logprob", ()),
                answer["message"],
                began[answer["call"]],
                ended,
            )
        return [outcomes[call.call] for call in calls]

    def stream_all(self, calls: Sequence[CallArgs]) -> list[Outcome]:
        return self.score_all(calls)

    def ready(self) -> str:
        return self._ask("ready", 1000 * CALL_SECONDS)["code"]

    def servers(self) -> list[ServerView]:
        return [ServerView(**server) for server in self._ask("servers")["servers"]]

    def leftovers(self) -> list[str]:
        """Nothing can be asked here: the program ends only after every check, and close waits for its end."""
        return []


CLIENTS = {"python": PythonClient, "python-async": AsyncPythonClient, "cpp": CppClient}
