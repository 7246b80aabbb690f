"""Tests overload, deadlines, cancellation and shutdown of a running server: rows D59 to D75 of tests/FAULTS.md."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest
from scoring_rpc import ROOT, Scoring, floats, request

ROWS = 2000  # scoring takes a large part of a second with the slow model on two cores


def bulk(rows: int = ROWS, **fields) -> bytes:
    targets = np.zeros(rows, np.int32).tobytes()
    return request(rows=rows, hidden_size=256, targets=targets, **fields).SerializeToString()


def codes_of(futures) -> list[grpc.StatusCode]:
    return [future.code() for future in futures]


def assert_empty(server) -> None:
    assert server.eventually(lambda: server.metric("logprobd_queue_rows") == 0)
    assert server.eventually(lambda: server.metric("logprobd_inflight_bytes") == 0)


def test_d59_a_queue_full_of_rows_refuses_with_a_retry_hint(start_server, slow_model) -> None:
    server = start_server(
        "--model",
        str(slow_model.path),
        "--queue-rows",
        str(3 * ROWS),
        "--batch-rows",
        "512",
        "--client-share",
        "1",
    )
    with Scoring(server.grpc) as scoring:
        futures = [scoring.score_future(bulk()) for _ in range(12)]
        codes = codes_of(futures)
        refused = [f for f in futures if f.code() == grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert refused and grpc.StatusCode.OK in codes
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        hints = dict(refused[0].trailing_metadata())
        assert 1 <= int(hints["grpc-retry-pushback-ms"]) <= 10_000
        assert server.metric("logprobd_rejected_total", reason="queue_rows") >= 1
        assert_empty(server)


def test_d60_a_queue_full_of_bytes_refuses(start_server, slow_model) -> None:
    server = start_server(
        "--model",
        str(slow_model.path),
        "--queue-bytes",
        "5MiB",
        "--batch-rows",
        "512",
        "--client-share",
        "1",
    )
    with Scoring(server.grpc) as scoring:
        codes = codes_of([scoring.score_future(bulk()) for _ in range(10)])
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
    assert server.metric("logprobd_rejected_total", reason="queue_bytes") >= 1
    assert_empty(server)


def test_d61_a_client_at_its_share_does_not_hurt_another(start_server, slow_model) -> None:
    server = start_server(
        "--model",
        str(slow_model.path),
        "--queue-rows",
        str(4 * ROWS),
        "--batch-rows",
        "512",
        "--client-share",
        "0.5",
    )
    with Scoring(server.grpc) as greedy, Scoring(server.grpc) as modest:
        futures = [
            greedy.score_future(bulk(), metadata=(("client_id", "greedy"),)) for _ in range(10)
        ]
        small = modest.score_raw(bulk(rows=4), metadata=(("client_id", "modest"),), timeout=30)
        assert small
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes_of(futures)
    assert server.metric("logprobd_rejected_total", reason="client_share") >= 1
    assert_empty(server)


def test_d63_a_deadline_ends_a_queued_request_while_the_engine_is_busy(start_server, slow_model):
    # A batch takes seconds, so the first one is still in the engine when the deadline passes.
    rows = 16_000
    server = start_server(
        "--model", str(slow_model.path), "--client-share", "1", "--batch-rows", str(rows)
    )

    def waiting() -> float:
        return server.metric("logprobd_queue_requests", priority="low")

    with Scoring(server.grpc) as heavy, Scoring(server.grpc) as scoring:
        assert scoring.health() == 1
        busy = [heavy.score_future(bulk(rows)) for _ in range(3)]
        assert server.eventually(lambda: server.metric("logprobd_queue_rows") > 0)
        # With low priority the request stays behind the others and is counted in a separate metric.
        late = scoring.score_future(bulk(priority=3), timeout=1)
        assert server.eventually(lambda: waiting() == 1, seconds=1)
        assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert server.eventually(lambda: waiting() == 0, seconds=1)
        assert not all(future.done() for future in busy), "the engine became idle too early"
        assert set(codes_of(busy)) == {grpc.StatusCode.OK}
        assert server.metric("logprobd_rows_total", kind="scored") == 3 * rows
    assert_empty(server)


def test_d65_cancelled_requests_are_dropped(start_server, slow_model) -> None:
    server = start_server("--model", str(slow_model.path), "--client-share", "1")
    with Scoring(server.grpc) as scoring:
        futures = [scoring.score_future(bulk()) for _ in range(8)]
        assert server.eventually(lambda: server.metric("logprobd_queue_rows") > 0)
        for future in futures[1:]:
            future.cancel()
        assert futures[0].code() == grpc.StatusCode.OK
        assert server.eventually(lambda: server.metric("logprobd_cancelled_total") >= 1)
        assert_empty(server)
        assert scoring.score_raw(bulk(rows=1))


def test_d66_a_killed_client_leaves_nothing_behind(start_server, slow_model) -> None:
    # Batches are small, so only the rows of two batches leave the queue before the client is killed.
    server = start_server(
        "--model", str(slow_model.path), "--client-share", "1", "--batch-rows", "512"
    )
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[2]); import test_load_and_shutdown as t\n"
        "scoring = t.Scoring(sys.argv[1])\n"
        "futures = [scoring.score_future(t.bulk(200)) for _ in range(64)]\n"
        "print('sent', flush=True); time.sleep(60)\n"
    )
    here = str(ROOT / "tests" / "integration")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support" / "python")}
    client = subprocess.Popen(
        [sys.executable, "-c", program, server.grpc, here], stdout=subprocess.PIPE, env=environment
    )
    client.stdout.readline()
    assert server.eventually(lambda: server.metric("logprobd_queue_rows") > 8000)
    client.send_signal(signal.SIGKILL)
    client.wait()
    # Queued requests are dropped within a second; only the batches in flight are finished.
    assert server.eventually(lambda: server.metric("logprobd_queue_rows") == 0, seconds=1)
    assert_empty(server)
    assert server.metric("logprobd_rows_total", kind="scored") < 64 * 200 / 2


def test_d69_small_requests_overtake_bulk_requests(start_server, slow_model) -> None:
    server = start_server("--model", str(slow_model.path), "--client-share", "1")
    with Scoring(server.grpc) as heavy, Scoring(server.grpc) as light:
        scored = light.score(request(rows=1, hidden_size=256))
        start = time.monotonic()
        futures = [
            heavy.score_future(bulk(8000), metadata=(("client_id", "heavy"),)) for _ in range(4)
        ]
        assert server.eventually(lambda: server.metric("logprobd_queue_rows") > 0)
        waits = []
        for _ in range(5):
            sent = time.monotonic()
            reply = light.score(
                request(rows=1, hidden_size=256), metadata=(("client_id", "light"),)
            )
            waits.append(time.monotonic() - sent)
            # The scores are bit-identical to those without the bulk requests.
            assert reply.logprob == scored.logprob
        assert set(codes_of(futures)) == {grpc.StatusCode.OK}
        total = time.monotonic() - start
    assert max(waits) < total / 2


def test_d72_sigterm_finishes_work_in_flight_and_exits_0(start_server, slow_model) -> None:
    server = start_server("--model", str(slow_model.path), "--grace-s", "60", "--client-share", "1")
    with Scoring(server.grpc) as scoring, Scoring(server.grpc) as other:
        assert other.health() == 1
        futures = [scoring.score_future(bulk()) for _ in range(3)]
        assert server.eventually(
            lambda: server.metric("logprobd_received_bytes_total") > 3 * ROWS * 1024
        )
        server.signal()
        assert set(codes_of(futures)) == {grpc.StatusCode.OK}
        assert all(len(floats(response_logprob(f.result()))) == ROWS for f in futures)
    assert server.wait() == 0


def response_logprob(data: bytes) -> bytes:
    import scoring_rpc

    return scoring_rpc.messages().ScoreResponse.FromString(data).logprob


def test_d72_health_says_not_serving_while_draining(start_server, slow_model) -> None:
    server = start_server("--model", str(slow_model.path), "--grace-s", "60", "--client-share", "1")
    with Scoring(server.grpc) as scoring:
        watch = scoring.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60)
        seen = [next(watch)[1]]
        futures = [scoring.score_future(bulk(8000)) for _ in range(2)]
        assert server.eventually(lambda: server.metric("logprobd_received_bytes_total") > 16e6)
        server.signal()
        seen.append(next(watch)[1])
        assert seen == [1, 2]
        assert server.get("/readyz")[0] == 503
        assert set(codes_of(futures)) == {grpc.StatusCode.OK}
        watch.cancel()
    assert server.wait() == 0


@pytest.fixture
def stepping_clock(tmp_path):
    """Returns the environment of a process whose wall clock a test sets, and a function that moves it by seconds."""
    library, step = tmp_path / "stepping_clock.so", tmp_path / "step"
    source = ROOT / "tests" / "support" / "stepping_clock.c"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    step.write_bytes(bytes(8))

    def move(seconds: int) -> None:
        with step.open("r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    return {"LD_PRELOAD": str(library), "STEPPING_CLOCK": str(step)}, move


YEAR_SECONDS = 365 * 24 * 3600


@pytest.mark.parametrize("years", [10, -10], ids=["forward", "back"])
def test_d75_a_step_of_the_wall_clock_moves_no_deadline(
    start_server, slow_model, stepping_clock, years: int
) -> None:
    environment, move = stepping_clock
    options = ("--model", str(slow_model.path), "--client-share", "1")
    server = start_server(*options, environment=environment)
    with Scoring(server.grpc) as scoring:
        futures = [scoring.score_future(bulk(4000), timeout=120) for _ in range(2)]
        late = scoring.score_future(bulk(), timeout=0.5)
        assert server.eventually(lambda: server.metric("logprobd_queue_rows") > 0)

        move(years * YEAR_SECONDS)

        assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        after = scoring.score_future(bulk(rows=1), timeout=120)
        after_late = scoring.score_future(bulk(), timeout=0.05)
        assert after_late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert codes_of([*futures, after]) == [grpc.StatusCode.OK] * 3
        assert_empty(server)
    lines = len(server.log)
    server.signal(signal.SIGHUP)
    assert server.eventually(lambda: len(server.log) > lines)
    logged = int(re.search(r"\b(20\d\d)-\d\d-\d\dT", server.log[lines])[1])
    assert abs(logged - time.gmtime().tm_year - years) <= 1  # else the server's clock did not step


def test_d73_a_second_sigterm_ends_at_once(start_server, slow_model) -> None:
    server = start_server("--model", str(slow_model.path), "--grace-s", "60", "--client-share", "1")
    with Scoring(server.grpc) as scoring:
        futures = [scoring.score_future(bulk(8000)) for _ in range(4)]
        assert server.eventually(lambda: server.metric("logprobd_queue_rows") > 0)
        server.signal()
        assert server.eventually(lambda: server.get("/readyz")[0] == 503)
        server.signal()
        assert server.wait(20) == 3
        assert set(codes_of(futures)) <= {
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
            grpc.StatusCode.OK,
        }


def test_d72_work_that_outlives_the_grace_time_is_cancelled_and_exits_3(start_server, slow_model):
    server = start_server(
        "--model", str(slow_model.path), "--grace-s", "0.2", "--client-share", "1"
    )
    with Scoring(server.grpc) as scoring:
        futures = [scoring.score_future(bulk(8000)) for _ in range(8)]
        assert server.eventually(lambda: server.metric("logprobd_queue_rows") > 0)
        start = time.monotonic()
        server.signal()
        assert server.wait() == 3
        assert time.monotonic() - start < 5
        codes = set(codes_of(futures))
    assert codes & {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    assert any("stopped before all work was finished" in line for line in server.log)


@pytest.mark.parametrize("line", ["starting", "loading"])
def test_d74_sigterm_while_starting_exits_0(start_server, slow_model, line) -> None:
    server = start_server("--model", str(slow_model.path), wait=False)
    # The signals are handled before the first line is logged.
    server.wait_for_log(f" {line} ")
    server.signal()
    assert server.wait() == 0
    assert any("SIGTERM" in written for written in server.log)


def test_a_slow_http_client_does_not_delay_the_exit(start_server, model) -> None:
    # Regression: the client kept the process alive beyond --grace-s as long as it sent a byte from time to time.
    server = start_server("--model", str(model.path), "--grace-s", "1")
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert server.get("/healthz")[0] == 200
        stopped = threading.Event()

        def drip() -> None:
            while not stopped.wait(0.1):
                try:
                    slow.send(b"x")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            server.signal()
            assert server.wait(5) == 0
        finally:
            stopped.set()
            thread.join()


def test_many_clients_at_once_get_their_own_answers(server, model) -> None:
    def work(seed: int) -> None:
        with Scoring(server.grpc) as scoring:
            for i in range(20):
                message = request(rows=3, seed=seed * 100 + i)
                hidden = np.frombuffer(message.hidden, np.float32).reshape(3, 64)
                got = floats(scoring.score(message).logprob)
                for row in range(3):
                    truth = model.score(hidden[row], row).logprob
                    if abs(got[row] - truth) > 1e-4:
                        errors.append((seed, i, row, got[row], truth))

    errors: list[tuple] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
