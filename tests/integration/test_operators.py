"""Metrics, health, readiness and logs for operators (rows G103 to G106 of tests/FAULTS.md)."""

import concurrent.futures
import http.client
import json
import shutil
import socket
import subprocess

import grpc
import pytest
from scoring_rpc import Scoring, request


def test_metrics_pass_promtool(server) -> None:
    with Scoring(server.grpc) as scoring:
        scoring.score(request())
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: install the package prometheus"
    result = subprocess.run(
        [promtool, "check", "metrics"],
        input=server.get("/metrics")[1],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_request_moves_its_metrics(server) -> None:
    before = {
        name: server.metric(name)
        for name in (
            "logprobd_requests_total",
            "logprobd_rows_total",
            "logprobd_received_bytes_total",
            "logprobd_request_duration_seconds_count",
            "logprobd_batch_rows_count",
        )
    }
    with Scoring(server.grpc) as scoring:
        scoring.score(request(rows=2))
    assert server.metric("logprobd_requests_total") == before["logprobd_requests_total"] + 1
    assert server.metric("logprobd_rows_total") == before["logprobd_rows_total"] + 2
    assert (
        server.metric("logprobd_received_bytes_total")
        > before["logprobd_received_bytes_total"] + 512
    )
    assert server.metric("logprobd_batch_rows_count") == before["logprobd_batch_rows_count"] + 1


def test_health_names_the_service_and_refuses_others(server) -> None:
    with Scoring(server.grpc) as scoring:
        assert scoring.health() == 1
        assert scoring.health("logprobd.v1.Scoring") == 1
        with pytest.raises(grpc.RpcError) as error:
            scoring.health("other")
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert server.get("/healthz")[0] == 200
    assert server.get("/readyz")[0] == 200


def test_reflection_is_served_only_with_its_flag(server, start_server, model) -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    list_services = b"\x3a\x00"
    with Scoring(server.grpc) as scoring:
        replies = scoring.channel.stream_stream(method)(iter([list_services]), timeout=5)
        assert b"logprobd.v1.Scoring" in next(replies)
    plain = start_server("--model", str(model.path))
    with Scoring(plain.grpc) as scoring, pytest.raises(grpc.RpcError) as error:
        list(scoring.channel.stream_stream(method)(iter([list_services]), timeout=5))
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_g103_http_survives_slow_readers_and_odd_requests(server) -> None:
    host, port = server.http.split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(20)]
    for connection in slow:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")  # the request never ends
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: server.get("/metrics", timeout=30)[0], range(200)))
    assert set(answers) == {200}
    for connection in slow:
        connection.close()
    for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/nothing"):
        assert server.get(path)[0] == 404
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    connection.request("POST", "/metrics", body=b"x" * 1000)
    assert connection.getresponse().status in (404, 405)
    assert server.get("/healthz")[0] == 200


def test_g106_a_storm_of_bad_requests_does_not_flood_the_log(start_server, model) -> None:
    server = start_server("--model", str(model.path))
    with Scoring(server.grpc) as scoring:
        for _ in range(1000):
            with pytest.raises(grpc.RpcError):
                scoring.score_raw(b"\xff")
    server.stop()
    assert len(server.log) < 50


def test_json_logs_are_json(start_server, model) -> None:
    server = start_server("--model", str(model.path), "--log-format", "json", wait=False)
    assert server.eventually(lambda: any('"ready' in line for line in server.log), 30)
    server.stop()
    for line in server.log:
        assert json.loads(line)["level"] in ("debug", "info", "warning", "error")


@pytest.mark.parametrize("level", ["debug", "warning", "error"])
def test_the_ready_line_is_written_at_every_level(start_server, model, level) -> None:
    # Regression: it was an info line, so --log-level warning hid the ports.
    server = start_server("--model", str(model.path), "--log-level", level)
    assert server.get("/readyz")[0] == 200
    if level != "debug":
        assert len(server.log) == 1


def test_the_local_socket_serves_the_same_api(start_server, model, tmp_path) -> None:
    path = tmp_path / "s.sock"
    server = start_server("--model", str(model.path), "--local", str(path))
    with Scoring(f"unix:{path}") as local, Scoring(server.grpc) as remote:
        assert local.score(request()).logprob == remote.score(request()).logprob
