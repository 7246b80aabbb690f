"""Requests in a caller's trace: the times that the server returns, and the trace id in its log."""

import itertools
import time

import logprobd
import numpy as np
import pytest

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STAGES = ["receive", "queue", "copy", "engine", "reply"]


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    hidden = np.random.default_rng(4).standard_normal((count, 64)).astype(np.float32)
    return hidden, np.arange(count) % 1003


def score_or_stream(client: logprobd.Client, method: str, *arrays, **options):
    if method == "score":
        return client.score(*arrays, **options)
    (result,) = client.score_stream([arrays], **options)
    return result


@pytest.mark.parametrize("method", ["score", "stream"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_stages_of_a_request_follow_each_other_within_the_callers_time(
    server, method, transport
) -> None:
    with logprobd.Client(server.grpc, transport=transport) as client:
        client.info()
        began, began_wall = time.monotonic_ns(), time.time_ns()
        result = score_or_stream(client, method, *rows(600), trace=True, traceparent=TRACEPARENT)
        elapsed = time.monotonic_ns() - began

    assert result.transport == transport
    (trace,) = result.traces
    assert trace.traceparent == TRACEPARENT
    assert list(trace.stages) == STAGES
    stages = list(trace.stages.values())
    assert all(
        before.end_unix_ns == after.begin_unix_ns for before, after in itertools.pairwise(stages)
    )
    lengths = [stage.end_unix_ns - stage.begin_unix_ns for stage in stages]
    assert min(lengths) >= 0
    assert 0 < sum(lengths) <= elapsed
    assert began_wall <= stages[0].begin_unix_ns <= began_wall + elapsed
    assert 0 < trace.kernel_ns <= lengths[STAGES.index("engine")]


def test_the_stages_of_a_request_in_several_batches_overlap(start_server, model) -> None:
    server = start_server("--model", str(model.path), "--batch-rows", "64")
    with logprobd.Client(server.grpc) as client:
        result = client.score(*rows(1000), trace=True)

    (trace,) = result.traces
    assert trace.traceparent == ""
    times = {name: (stage.begin_unix_ns, stage.end_unix_ns) for name, stage in trace.stages.items()}
    assert times["receive"][1] == times["queue"][0] <= times["copy"][0] < times["engine"][0]
    assert times["engine"][0] < times["queue"][1] < times["copy"][1] < times["engine"][1]
    assert times["engine"][1] == times["reply"][0] <= times["reply"][1]


def test_a_call_of_several_requests_has_a_trace_of_each(server) -> None:
    with logprobd.Client(server.grpc, chunk_rows=100) as client:
        result = client.score(*rows(250), trace=True)

    assert [list(trace.stages) for trace in result.traces] == [STAGES] * 3


def test_the_log_has_the_trace_id_of_a_failed_request(start_server, model) -> None:
    server = start_server("--model", str(model.path), "--log-level", "debug")
    hidden, targets = rows(2)
    with logprobd.Client(server.grpc) as client:
        for method, trace_id in (("score", "a" * 32), ("stream", "b" * 32)):
            with pytest.raises(logprobd.InvalidArgument):
                score_or_stream(
                    client,
                    method,
                    hidden,
                    targets + 5000,
                    traceparent=f"00-{trace_id}-00f067aa0ba902b7-01",
                )
            server.wait_for_log(f"trace_id={trace_id}")
        with pytest.raises(logprobd.InvalidArgument):
            client.score(hidden, targets + 5000, request_id="untraced", traceparent="not valid")

    server.wait_for_log("request_id=untraced")
    (line,) = (line for line in server.log if "request_id=untraced" in line)
    assert "trace_id" not in line
