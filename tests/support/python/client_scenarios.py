"""Scenarios of scripted servers, with the calls that each of the clients makes.

The steps of a scenario are commands of the client and of the servers (test_client_scenarios.py describes them), and the
script of a server says what it does with its requests (scripted_server.py). `log` has the requests that each server
received, as "ROWS rows: OUTCOME", and `results` has the outcome of each command of the client.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

Script = list[tuple[Any, ...]]
REFUSE = ("refuse", None)
HOUR = 3600.0


@dataclass
class Scenario:
    name: str
    scripts: dict[str, Script]
    steps: list[str]
    results: list[str]
    log: dict[str, list[str]]
    least_gap: float = 0.0
    """Seconds that lie at least between two requests at the first server."""
    says: tuple[str, ...] = ()
    """Parts of the last error; {a} is the address of the server a."""
    waits: tuple[float, float] = (0.002, 0.02)
    """First and longest bound of the waits between attempts, in seconds. They are shorter than the policy's, so that a
    scenario is quick."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By server: further fields of its FakeServer."""

    def row(self) -> str:
        """The scenario's row in the table of client/README.md."""
        calls = "; ".join(f"{server}: {summary(log)}" for server, log in self.log.items())
        return f"| {self.name} | {calls} | {summary(self.results)} |"


def summary(texts: list[str]) -> str:
    """Returns the texts, those that follow each other and are equal as one with their number."""
    runs = [(text, len(list(same))) for text, same in itertools.groupby(texts)]
    return ", ".join(f"{count} × {text}" if count > 1 else text for text, count in runs) or "none"


ONE_CALL = ["score 1"]

SCENARIOS = [
    Scenario(
        "a refused request is sent again",
        {"a": [REFUSE, REFUSE]},
        ONE_CALL,
        ["version 1"],
        {"a": ["1 row: RESOURCE_EXHAUSTED", "1 row: RESOURCE_EXHAUSTED", "1 row: version 1"]},
    ),
    Scenario(
        "an overloaded server is waited for beyond the attempts at an unavailable one",
        {"a": [REFUSE] * 20},
        ONE_CALL,
        ["version 1"],
        {"a": ["1 row: RESOURCE_EXHAUSTED"] * 20 + ["1 row: version 1"]},
    ),
    Scenario(
        "an unavailable server is given up after 8 attempts",
        {"a": [("fail", "UNAVAILABLE")] * 20},
        ONE_CALL,
        ["UNAVAILABLE"],
        {"a": ["1 row: UNAVAILABLE"] * 8},
        says=("8 attempts",),
    ),
    Scenario(
        "a hint is the least wait",
        {"a": [("refuse", 0.2)]},
        ONE_CALL,
        ["version 1"],
        {"a": ["1 row: RESOURCE_EXHAUSTED", "1 row: version 1"]},
        least_gap=0.2,
    ),
    Scenario(
        "a hint beyond the deadline ends the call at once",
        {"a": [("refuse", HOUR)]},
        ONE_CALL,
        ["RESOURCE_EXHAUSTED"],
        {"a": ["1 row: RESOURCE_EXHAUSTED"]},
    ),
    Scenario(
        "a negative hint forbids a retry",
        {"a": [("refuse", -1)]},
        ONE_CALL,
        ["RESOURCE_EXHAUSTED"],
        {"a": ["1 row: RESOURCE_EXHAUSTED"]},
    ),
    Scenario(
        "a negative hint forbids a retry at another server, and does not keep later calls away",
        {"a": [("refuse", -1)], "b": []},
        ["score 1"] * 3,
        ["RESOURCE_EXHAUSTED", "version 1", "version 1"],
        {"a": ["1 row: RESOURCE_EXHAUSTED", "1 row: version 1"], "b": ["1 row: version 1"]},
    ),
    Scenario(
        "other failures are not retried",
        {"a": [("fail", "INVALID_ARGUMENT"), ("fail", "INTERNAL"), ("fail", "NOT_FOUND")]},
        ["score 1"] * 3,
        ["INVALID_ARGUMENT", "INTERNAL", "NOT_FOUND"],
        {"a": ["1 row: INVALID_ARGUMENT", "1 row: INTERNAL", "1 row: NOT_FOUND"]},
    ),
    Scenario(
        "a request without an answer ends at the deadline",
        {"a": [("hold",)]},
        ["score 1 within 300 ms"],
        ["DEADLINE_EXCEEDED"],
        {"a": ["1 row: no answer"]},
    ),
    Scenario(
        "a server that restarts during a request answers it",
        {"a": [("restart",)]},
        ONE_CALL,
        ["version 1"],
        {"a": ["1 row: closed", "1 row: version 1"]},
        waits=(0.1, 0.4),  # an attempt before the server listens again makes gRPC wait for 0.1 s
    ),
    Scenario(
        "a server that restarts between calls is used again",
        {"a": []},
        ["score 1", "stop a", "start a", "score 1"],
        ["version 1", "version 1"],
        {"a": ["1 row: version 1"] * 2},
    ),
    Scenario(
        "a server that says GOAWAY after an answer and comes back is used again",
        {"a": [("answer and close",)]},
        ["score 1", "start a", "score 1"],
        ["version 1", "version 1"],
        {"a": ["1 row: version 1"] * 2},
    ),
    Scenario(
        "a call waits until its server is ready",
        {"a": []},
        ["unready a for 3 probes", "ready"],
        ["OK"],
        {"a": ["4 probes"]},
    ),
    Scenario(
        "servers take turns",
        {"a": [], "b": []},
        ["score 1"] * 4,
        ["version 1"] * 4,
        {"a": ["1 row: version 1"] * 2, "b": ["1 row: version 1"] * 2},
    ),
    Scenario(
        "a refused request goes to another server without a wait, and the busy one is avoided",
        {"a": [("refuse", HOUR)], "b": []},
        ["score 1"] * 3,
        ["version 1"] * 3,
        {"a": ["1 row: RESOURCE_EXHAUSTED"], "b": ["1 row: version 1"] * 3},
    ),
    Scenario(
        "a draining server is left out",
        {"a": [("drain",)], "b": []},
        ["score 1"] * 3,
        ["version 1"] * 3,
        {"a": ["1 row: UNAVAILABLE"], "b": ["1 row: version 1"] * 3},
    ),
    Scenario(
        "a server that was left out is asked at once when the last other one is gone",
        {"a": [("drain",)], "b": []},
        ["score 1", "serve a", "stop b", "score 1"],
        ["version 1", "version 1"],
        {"a": ["1 row: UNAVAILABLE", "1 row: version 1"], "b": ["1 row: version 1"]},
    ),
    Scenario(
        "a request at a server that dies goes to another one",
        {"a": [("die",)], "b": []},
        ["score 1"] * 3,
        ["version 1"] * 3,
        {"a": ["1 row: closed"], "b": ["1 row: version 1"] * 3},
    ),
    Scenario(
        "a server that says GOAWAY is left out",
        {"a": [("answer and close",)], "b": []},
        ["score 1"] * 4,
        ["version 1"] * 4,
        {"a": ["1 row: version 1"], "b": ["1 row: version 1"] * 3},
    ),
    Scenario(
        "an error names all servers when none is left",
        {"a": [], "b": []},
        ["score 1", "stop a", "stop b", "score 1"],
        ["version 1", "UNAVAILABLE"],
        {"a": ["1 row: version 1"], "b": []},
        says=("no server is available", "{a}", "{b}"),
    ),
    Scenario(
        "servers of different heads are refused",
        {"a": [], "b": []},
        ONE_CALL,
        ["FAILED_PRECONDITION"],
        {"a": [], "b": []},
        says=("{a} and {b} hold different heads: ", "vocab_size of", "is 101 and 99"),
        facts={"b": {"vocab_size": 99}},
    ),
    Scenario(
        "a call whose weights are swapped between its requests ends in the new version",
        {"a": [("answer and swap", 2)]},
        ["score 6"],
        ["version 2"],
        {"a": ["2 rows: version 1", "2 rows: version 2", "2 rows: version 2", "2 rows: version 2"]},
    ),
    Scenario(
        "a request that another version scored goes to the server of the call's version",
        {"a": [], "b": [("swap and hold", 2, "a", 2)]},
        ["score 6"],
        ["version 1"],
        {"a": ["2 rows: version 1"] * 3, "b": ["2 rows: version 2"]},
    ),
    Scenario(
        "a pinned version is found at the server that holds it",
        {"a": [], "b": [("swap", 2)]},
        ["score 1", "score 1", "score 1 of version 2", "score 1 of version 1"],
        ["version 1", "version 2", "version 2", "version 1"],
        {
            "a": ["1 row: version 1", "1 row of version 1: version 1"],
            "b": ["1 row: version 2", "1 row of version 2: version 2"],
        },
    ),
    Scenario(
        "a pinned version that no server holds is an error that names them",
        {"a": [], "b": []},
        ["score 1 of version 9"],
        ["ABORTED"],
        {
            "a": ["1 row of version 9: FAILED_PRECONDITION"],
            "b": ["1 row of version 9: FAILED_PRECONDITION"],
        },
        says=("version 9", "{a}", "{b}"),
    ),
    Scenario(
        "a pinned version that the only server does not hold is an error",
        {"a": []},
        ["score 1 of version 9"],
        ["FAILED_PRECONDITION"],
        {"a": ["1 row of version 9: FAILED_PRECONDITION"]},
    ),
]
