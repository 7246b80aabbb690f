"""The examples of the package's documents run."""

import contextlib
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from logprobd.testing import FakeServer

DOCUMENTS = sorted((Path(__file__).resolve().parents[4] / "client" / "python").glob("*.md"))
EXAMPLES = [
    example
    for document in DOCUMENTS
    for example in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
]


TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class FakeTracer:
    """Records spans like a tracer of OpenTelemetry's Python API, which is not installed for tests."""

    def __init__(self):
        self.spans = []

    @contextlib.contextmanager
    def start_as_current_span(self, name):
        self.spans.append([name, time.time_ns(), None])
        span = self.spans[-1]
        yield
        span[2] = time.time_ns()

    def start_span(self, name, *, start_time):
        self.spans.append([name, start_time, None])
        self.end = lambda *, end_time, span=self.spans[-1]: span.__setitem__(2, end_time)
        return self


@pytest.fixture(autouse=True)
def tracer(monkeypatch):
    tracer = FakeTracer()
    package = ModuleType("opentelemetry")
    package.trace = ModuleType("opentelemetry.trace")
    package.trace.get_tracer = lambda name: tracer
    package.propagate = ModuleType("opentelemetry.propagate")
    package.propagate.inject = lambda carrier: carrier.update(traceparent=TRACEPARENT)
    monkeypatch.setitem(sys.modules, "opentelemetry", package)
    return tracer


def test_the_documents_have_examples():
    assert len(EXAMPLES) == 8


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number, monkeypatch):
    with FakeServer(vocab_size=100, hidden_size=16) as server:
        monkeypatch.setenv("LOGPROBD_ADDRESS", server.address)

        exec(compile(EXAMPLES[number], f"example {number}", "exec"), {})


def test_the_example_of_tracing_draws_the_stages_within_its_span(tracer, monkeypatch):
    (example,) = [each for each in EXAMPLES if "opentelemetry" in each]
    with FakeServer(vocab_size=100, hidden_size=16) as server:
        monkeypatch.setenv("LOGPROBD_ADDRESS", server.address)

        exec(compile(example, "example", "exec"), {})

    (name, begin, end), *stages = tracer.spans
    assert name == "score"
    assert [each[0] for each in stages] == [
        f"logprobd {stage}" for stage in ("receive", "queue", "copy", "engine", "reply")
    ]
    times = [begin, *(t for _, *both in stages for t in both), end]
    assert times == sorted(times)
    assert server.requests[0].traceparent == TRACEPARENT
