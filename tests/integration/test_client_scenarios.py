"""Runs the same scenarios of scripted servers with each client: the calls and the results must be equal.

client/README.md describes the policy that the clients share, and lists the scenarios of client_scenarios.py. The steps:
    score ROWS [of version V] [within MS ms]    a call of the client
    ready                                       the client waits until a server is ready
    stop | start | serve NAME                   stops or starts a server, or lets it be ready again
    unready NAME for N probes                   makes a server say NOT_SERVING to so many health checks
"""

import contextlib
import re
import time

import numpy as np
import pytest
from client_drivers import CALL_SECONDS, CLIENTS, HIDDEN_SIZE, ClientOptions, hidden_rows
from client_scenarios import SCENARIOS, Scenario
from scripted_server import ScriptedServer, Stage

# A scenario that lasts longer has waited for something that the policy does not wait for.
SCENARIO_SECONDS = 30


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    stage.close()


def log_probabilities(server: ScriptedServer, rows: int) -> np.ndarray:
    """The scores of the rows of a client's `score`, by the server's weights."""
    logits = [server.logits(row) for row in hidden_rows(1, rows)]
    return np.array([x[target] - np.log(np.exp(x).sum()) for target, x in enumerate(logits)])


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

    client = CLIENTS[kind](binaries, list(addresses.values()), ClientOptions(scenario.waits))
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
