"""Calls carry the caller's trace, and return the times of the server's stages."""

import pickle
import time

import numpy as np
import pytest
from logprobd import Client, InvalidArgument, RequestTrace, StageTrace, _wire
from logprobd.trace import trace_from_wire

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = "00-11111111111111111111111111111111-2222222222222222-00"


def inject(carrier):
    carrier["traceparent"] = TRACEPARENT
    carrier["tracestate"] = "vendor=1"


def test_a_unary_request_has_the_traceparent_in_its_metadata(server, connect, rows):
    with connect(server.address, client_id="me") as client:
        client.score(*rows, traceparent=TRACEPARENT)
        client.score(*rows)

    first, second = server.requests
    assert first.metadata["traceparent"] == TRACEPARENT
    assert first.metadata["client_id"] == second.metadata["client_id"] == "me"
    assert "traceparent" not in second.metadata


def test_each_request_of_a_split_call_has_it(server, connect, rows):
    with connect(server.address, chunk_rows=3) as client:
        client.score(*rows, traceparent=TRACEPARENT)

    assert [each.metadata["traceparent"] for each in server.requests] == [TRACEPARENT] * 4


def test_a_chunk_of_a_stream_has_it_in_its_message(server, connect, rows):
    hidden, targets = rows
    batches = [
        {"hidden": hidden, "targets": targets, "traceparent": each} for each in (TRACEPARENT, OTHER)
    ]
    with connect(server.address) as client:
        client.stream(batches)

    assert [each.traceparent for each in server.requests] == [TRACEPARENT, OTHER]
    assert all("traceparent" not in each.metadata for each in server.requests)


def test_inject_trace_names_the_trace_of_each_call_and_batch(server, connect, rows):
    with connect(server.address, inject_trace=inject) as client:
        client.score(*rows)
        client.score(*rows, traceparent=OTHER)
        client.stream([rows])

    assert [each.traceparent for each in server.requests] == [TRACEPARENT, OTHER, TRACEPARENT]


def test_inject_trace_is_called_once_for_a_call_of_several_requests(server, rows):
    calls = []
    with Client(server.address, chunk_rows=3, inject_trace=calls.append) as client:
        client.score(*rows)

    assert len(server.requests) == 4
    assert calls == [{}]


@pytest.mark.parametrize("value", [None, 7, "a\nb", "ü", "x" * 257])
def test_what_a_tracer_injects_never_fails_a_call(server, client, rows, value):
    with Client(
        server.address, inject_trace=lambda carrier: carrier.update(traceparent=value)
    ) as c:
        assert np.array_equal(c.score(*rows).logprob, client.score(*rows).logprob)

    assert server.requests[0].traceparent == ""


# Regression: the exception of a tracer failed the call.
def test_a_tracer_that_raises_costs_the_trace_and_one_warning(server, connect, rows, caplog):
    def fail(carrier):
        inject(carrier)
        raise RuntimeError("no exporter")

    with connect(server.address, inject_trace=fail) as client:
        client.score(*rows)
        client.score(*rows)
        client.stream([rows])

    assert [each.traceparent for each in server.requests] == ["", "", ""]
    (record,) = (record for record in caplog.records if record.name == "logprobd")
    assert record.levelname == "WARNING"
    assert "no exporter" in str(record.exc_info[1])


@pytest.mark.parametrize("value", [None, 7, "a\nb", "ü", "x" * 257])
def test_a_traceparent_argument_that_cannot_travel_is_refused(client, rows, value):
    with pytest.raises(InvalidArgument, match="traceparent is .*: pass at most 256") as caught:
        client.score(*rows, traceparent=value)

    assert caught.value.field == "traceparent"


def test_the_longest_traceparent_travels(server, client, rows):
    client.score(*rows, traceparent=TRACEPARENT + "-" + "x" * 200)

    assert len(server.requests[0].traceparent) == 256


def test_a_pickled_client_keeps_inject_trace(server, rows):
    with Client(server.address, inject_trace=inject) as client:
        copy = pickle.loads(pickle.dumps(client))

    with copy:
        copy.score(*rows)
    assert server.requests[0].traceparent == TRACEPARENT


def test_trace_returns_the_times_of_each_request_in_the_order_of_rows(server, connect, rows):
    before = time.time_ns()
    with connect(server.address, chunk_rows=3) as client:
        result = client.score(*rows, trace=True, traceparent=TRACEPARENT)

    assert len(result.traces) == 4
    for trace in result.traces:
        assert trace.traceparent == TRACEPARENT
        assert list(trace.stages) == ["receive", "queue", "copy", "engine", "reply"]
        stages = list(trace.stages.values())
        assert before <= stages[0].begin_unix_ns <= stages[-1].end_unix_ns <= time.time_ns()


def test_trace_works_in_streams(server, connect, rows):
    with connect(server.address) as client:
        results = client.stream([rows, rows], trace=True)

    assert [len(result.traces) for result in results] == [1, 1]


def test_without_trace_there_are_no_times(client, rows):
    assert client.score(*rows).traces == ()


def test_times_are_those_of_the_wall_clock():
    message = _wire.Trace(
        traceparent=TRACEPARENT,
        received_unix_ns=1_000,
        receive=_wire.TraceStage(0, 2),
        queue=_wire.TraceStage(2, 5),
        kernel_ns=7,
        reply=_wire.TraceStage(5, 9),
    )

    assert trace_from_wire(message) == RequestTrace(
        TRACEPARENT,
        7,
        {
            "receive": StageTrace(1_000, 1_002),
            "queue": StageTrace(1_002, 1_005),
            "reply": StageTrace(1_005, 1_009),
        },
    )
