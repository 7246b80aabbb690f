"""Runs the same scenarios of scripted servers with each client: the calls and the results must be equal.

client/README.md describes the policy that the clients share, and lists the scenarios of client_scenarios.py. The steps:
    score ROWS [of version V] [within MS ms]    a call of the client
    ready                                       the client waits until a server is ready
    stop | start | serve NAME                   stops or starts a server, or lets it be ready again
    unready NAME for N probes                   makes a server say NOT_SERVING to so many health checks
"""

import asyncio
import contextlib
import json
import pathlib
import re
import subprocess
import time

import numpy as np
import pytest
from client_scenarios import SCENARIOS, Scenario
from logprobd import AsyncClient, Client, HeadMismatch, LogprobdError, RetryPolicy
from scripted_server import ScriptedServer, Stage

HIDDEN_SIZE = 16
CALL_SECONDS = 60
# A scenario that lasts longer has waited for something that the policy does not wait for.
SCENARIO_SECONDS = 30

Waits = tuple[float, float]


class PythonClient:
    """Client. `call` waits for the result of its methods."""

    library = Client

    def __init__(self, binaries: pathlib.Path, addresses: list[str], waits: Waits) -> None:
        retry = RetryPolicy(base_seconds=waits[0], cap_seconds=waits[1])
        self.message = ""
        self.client = self.library(addresses, max_inflight=1, retry=retry, channels=1)

    def call(self, result):
        return result

    def close(self) -> None:
        self.call(self.client.close())

    def meet(self) -> None:
        with contextlib.suppress(LogprobdError):
            self.call(self.client.list_heads())
        if any(server.state == "unknown" for server in self.client.servers()):
            self.meet()

    def score(self, rows: int, version: int, seconds: float) -> tuple[str, list[float]]:
        hidden = np.ones((rows, HIDDEN_SIZE), np.float32)
        try:
            result = self.call(
                self.client.score(hidden, np.arange(rows), weights_version=version, timeout=seconds)
            )
        except LogprobdError as error:
            self.message = str(error)
            return self._code(error), []
        (scored_by,) = result.weights_versions
        return f"version {scored_by}", list(result.logprob)

    def ready(self) -> str:
        try:
            self.call(self.client.wait_ready(CALL_SECONDS))
        except LogprobdError as error:
            return self._code(error)
        return "OK"

    @staticmethod
    def _code(error: LogprobdError) -> str:
        return "FAILED_PRECONDITION" if isinstance(error, HeadMismatch) else error.code


class AsyncPythonClient(PythonClient):
    """AsyncClient on an event loop that runs only during its calls."""

    library = AsyncClient

    def __init__(self, binaries: pathlib.Path, addresses: list[str], waits: Waits) -> None:
        self.loop = asyncio.new_event_loop()
        super().__init__(binaries, addresses, waits)

    def call(self, result):
        return self.loop.run_until_complete(result)

    def close(self) -> None:
        super().close()
        self.loop.close()


class CppClient:
    """The C++ client, in the program scenario_client.cc."""

    def __init__(self, binaries: pathlib.Path, addresses: list[str], waits: Waits) -> None:
        self.message = ""
        program = binaries.parent / "tests" / "scenario_client"
        assert program.exists(), f"{program} is missing; build it"
        self.process = subprocess.Popen(
            [
                program,
                ",".join(addresses),
                str(HIDDEN_SIZE),
                *(f"{1000 * wait:g}" for wait in waits),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, *words: object) -> dict:
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        self.message = answer["message"]
        return answer

    def close(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(CALL_SECONDS) == 0
        self.process.stdout.close()

    def meet(self) -> None:
        self._ask("meet")

    def score(self, rows: int, version: int, seconds: float) -> tuple[str, list[float]]:
        answer = self._ask("score", rows, version, round(1000 * seconds))
        if answer["code"] != "OK":
            return answer["code"], []
        (scored_by,) = answer["versions"]
        return f"version {scored_by}", answer["logprob"]

    def ready(self) -> str:
        return self._ask("ready", 1000 * CALL_SECONDS)["code"]


CLIENTS = {"python": PythonClient, "python-async": AsyncPythonClient, "cpp": CppClient}


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    stage.close()


def log_probabilities(server: ScriptedServer, rows: int) -> np.ndarray:
    """The scores of the rows of PythonClient.score, by the server's weights."""
    logits = server.logits(np.ones(HIDDEN_SIZE))
    return (logits - np.log(np.exp(logits).sum()))[:rows]


def take(step: str, client, stage: Stage) -> str | None:
    """Takes a step. Returns the outcome of a command of the client."""
    match step.split():
        case ["score", rows, *options]:
            limits = dict(re.findall(r"(version|within) (\d+)", " ".join(options)))
            seconds = int(limits.get("within", 1000 * CALL_SECONDS)) / 1000
            outcome, scores = client.score(int(rows), int(limits.get("version", 0)), seconds)
            if scores:
                expected = log_probabilities(stage.servers["a"], int(rows))
                np.testing.assert_allclose(scores, expected, atol=1e-5)
            return outcome
        case ["ready"]:
            return client.ready()
        case ["unready", name, "for", count, "probes"]:
            stage.servers[name].unready_probes = int(count)
        case ["serve", name]:
            stage.servers[name].ready = True
        case [command, name]:
            getattr(stage.servers[name], command)()
    return None


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("kind", CLIENTS)
def test_clients_make_the_calls_of_the_scenario(kind, scenario: Scenario, binaries, stage) -> None:
    for name, script in scenario.scripts.items():
        facts = {"vocab_size": 101, "hidden_size": HIDDEN_SIZE, "request_rows_max": 2}
        facts |= scenario.facts.get(name, {})
        stage.servers[name] = ScriptedServer(stage=stage, script=list(script), **facts)
        stage.servers[name].start()
    addresses = {name: server.address for name, server in stage.servers.items()}

    client = CLIENTS[kind](binaries, list(addresses.values()), scenario.waits)
    with contextlib.closing(client):
        if len(addresses) > 1:
            client.meet()
        began = time.monotonic()
        outcomes = [take(step, client, stage) for step in scenario.steps]
        seconds = time.monotonic() - began

    assert [outcome for outcome in outcomes if outcome is not None] == scenario.results
    assert {name: server.log for name, server in stage.servers.items()} == scenario.log
    for part in scenario.says:
        assert part.format(**addresses) in client.message
    if scenario.least_gap:
        assert stage.servers["a"].least_gap() >= scenario.least_gap
    assert seconds < SCENARIO_SECONDS


def test_the_table_in_the_readme_is_that_of_the_scenarios(repository) -> None:
    lines = (repository / "client" / "README.md").read_text().splitlines()
    table = lines[lines.index("| scenario | requests at each server | results |") + 2 :]

    assert table[: len(SCENARIOS)] == [scenario.row() for scenario in SCENARIOS]
