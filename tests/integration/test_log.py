"""What peers cannot do to the log: stop calls through it, break its lines, or change weights without one.

Rows G131 to G133, A134 and C135 of tests/FAULTS.md.
"""

import contextlib
import fcntl
import http.client
import json
import re
import signal
import socket
import threading

import grpc
import numpy as np
import pytest
from model_folder import ModelFolder
from scoring_rpc import Scoring, messages, request
from server_process import ServerProcess
from weights_rpc import Weights, push_header, pushed_rows

Code = grpc.StatusCode
MIB = 1 << 20
PIPE_BYTES = 4096
# A line quotes at most 4 KiB of it.
LONG_METHOD = "/x/" + "y" * 6000


class StalledLogServer(ServerProcess):
    """A server whose standard error is a pipe of 4 KiB that nobody reads once the server is ready."""

    def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        fcntl.fcntl(stream.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        for line in iter(stream.readline, ""):
            self.log.append(line)
            if match := re.search(r" ready .* grpc=(\S+) http=(\S+) .* admin=(\S+)", line):
                self.grpc, self.http, self.admin = match.groups()
                break
        self._ready.set()

    def read_log(self) -> None:
        """Reads the log from now on."""
        self._reader.join()
        self._reader = threading.Thread(target=super()._read, daemon=True)
        self._reader.start()

    def close_log(self) -> None:
        """Closes the pipe, so that the server can no longer write."""
        self._reader.join()
        self.process.stdout.close()


@pytest.fixture
def start_stalled(binaries, model, tokens):
    servers = []

    def start(*options: str) -> StalledLogServer:
        tokens.add("scorer", "score")
        tokens.add("operator", "admin")
        server = StalledLogServer(
            binaries,
            *("--model", str(model.path), "--tokens", str(tokens.path), "--admin", "auto"),
            *("--weights-root", str(model.path.parent), *options),
        )
        servers.append(server)
        server.http_token = tokens.add("monitor", "metrics")
        return server.start()

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()


def refused_calls(server, count: int) -> None:
    """Makes calls with a wrong token, each of which may leave a line of about 4 KiB."""
    with grpc.insecure_channel(
        server.grpc, options=(("grpc.use_local_subchannel_pool", 1),)
    ) as channel:
        for _ in range(count):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(LONG_METHOD)(
                    b"", metadata=(("authorization", "Bearer x"),), timeout=20
                )
            assert refused.value.code() == Code.UNAUTHENTICATED


# Protobuf 3.21 writes a line to standard error for each of them.
def check_health_of(scoring: Scoring, name: bytes, count: int) -> None:
    """Makes health checks, which need no token, of a service whose name is not UTF-8."""
    check = scoring.channel.unary_unary("/grpc.health.v1.Health/Check")
    for _ in range(count):
        with pytest.raises(grpc.RpcError) as refused:
            check(bytes([1 << 3 | 2, len(name)]) + name, timeout=20)
        assert refused.value.code() == Code.INVALID_ARGUMENT


def change(server, tokens, method: str) -> Code:
    with grpc.insecure_channel(
        server.admin, options=(("grpc.use_local_subchannel_pool", 1),)
    ) as channel:
        try:
            channel.unary_unary(f"/logprobd.v1.Weights/{method}")(
                b"", metadata=tokens.metadata("operator"), timeout=20
            )
        except grpc.RpcError as error:
            return error.code()
    return Code.OK


# Regression: gRPC's threads wrote the log themselves, and all calls hung from the first line that found the pipe full.
def test_g131_a_log_that_nobody_reads_stops_no_call_and_no_shutdown(
    start_stalled, tokens, model
) -> None:
    server = start_stalled()
    body = request(rows=1, hidden_size=model.weight.shape[1])

    with Scoring(server.grpc) as scoring:
        for _ in range(25):
            refused_calls(server, 1)
            scoring.score(body, metadata=tokens.metadata("scorer"))
        check_health_of(scoring, b"\xff\xfe", 400)
        scoring.score(body, metadata=tokens.metadata("scorer"))
    assert change(server, tokens, "Rollback") == Code.FAILED_PRECONDITION
    assert server.get("/healthz")[0] == 200
    server.signal(signal.SIGHUP)
    server.signal(signal.SIGTERM)
    assert server.process.wait(20) == 0


def test_g131_lost_lines_are_counted_and_told_of_when_the_log_is_read_again(
    start_stalled, tokens
) -> None:
    server = start_stalled("--log-level", "debug")  # at which each failed call has a line
    assert server.metric("logprobd_log_lines_lost_total") == 0
    body = messages().ScoreRequest(head="h" * 100, request_id="r" * 100).SerializeToString()

    with Scoring(server.grpc) as scoring:
        while server.metric("logprobd_log_lines_lost_total", kind="log") < 10:
            calls = [
                scoring.score_future(body, metadata=tokens.metadata("scorer")) for _ in range(200)
            ]
            assert {call.code() for call in calls} == {Code.NOT_FOUND}
    assert change(server, tokens, "Rollback") == Code.FAILED_PRECONDITION
    assert server.metric("logprobd_log_lines_lost_total", kind="audit") == 0

    server.read_log()
    server.wait_for_log("lines of the log were lost lines=")
    server.wait_for_log(" audit method=Rollback ")
    assert server.metric("logprobd_log_lines_lost_total", kind="audit") == 0


@pytest.mark.parametrize("is_required", [False, True], ids=["counted", "required"])
def test_c135_a_change_whose_line_cannot_be_written_is_counted_or_refused(
    start_stalled, tokens, is_required: bool
) -> None:
    server = start_stalled(*(("--audit-required",) if is_required else ()))
    server.close_log()
    expected = Code.UNAVAILABLE if is_required else Code.FAILED_PRECONDITION

    assert change(server, tokens, "Commit") == expected

    # With --audit-required the line of the refusal is lost, too. One more is that of the connection.
    lost = 3 if is_required else 2
    assert server.eventually(
        lambda: server.metric("logprobd_log_lines_lost_total", kind="audit") == lost
    )
    server.signal(signal.SIGTERM)
    assert server.process.wait(20) == 0


def hostile_texts() -> list[bytes]:
    return [b"a\x9bb", b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xff\xfe", b"\xe2\x80\xae"]


def get_raw(server, path: bytes) -> int:
    """Returns the status of a GET of a path of any bytes."""
    host, port = server.http.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /" + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        return reply.status


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_g132_each_line_is_one_line_of_utf8_whatever_peers_send(
    start_server, model, tokens, log_format: str
) -> None:
    tokens.add("scorer", "score")
    server = start_server(
        *("--model", str(model.path), "--tokens", str(tokens.path), "--admin", "auto"),
        *("--log-level", "debug", "--log-format", log_format),
    )
    for text in hostile_texts():
        assert get_raw(server, text) == 401
        with Scoring(server.grpc) as scoring:
            field = bytes([1 << 3 | 2, len(text)]) + text  # a request id
            call = scoring.score_future(field, metadata=tokens.metadata("scorer"))
            assert call.code() == Code.INVALID_ARGUMENT
            if text in (b"a\x9bb", b"\xff\xfe"):
                check_health_of(scoring, text, 1)
    server.stop()

    lines = [line.encode(errors="surrogateescape") for line in server.log]
    assert sum(b"a call was refused" in line for line in lines) == len(hostile_texts())
    for line in lines:
        assert len(line.decode().splitlines()) == 1, line
        assert not re.search("[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e]", line.decode()), (
            line
        )
        if log_format == "json":
            assert json.loads(line)["level"]
        else:  # no library writes beside the log
            assert re.match(rb"\d{4}-\d\d-\d\dT[\d:.]+Z (debug|info|warning) ", line), line


def test_g133_a_line_is_bounded_whatever_a_caller_names(start_server, model) -> None:
    server = start_server("--model", str(model.path), "--admin", "auto")
    with Weights(server.admin) as weights:
        large = weights.push_call([push_header(7, head="\x01" * (8 * MIB))])
        assert large.code() == Code.INVALID_ARGUMENT
        named = weights.push_call([push_header(7, head="\x01" * 60_000)])
        assert named.code() == Code.NOT_FOUND
    with Scoring(server.grpc) as scoring:
        call = scoring.score_future(messages().ScoreRequest(head="h" * 60_000).SerializeToString())
        assert call.code() == Code.INVALID_ARGUMENT
    server.wait_for_log("outcome=NOT_FOUND")
    assert max(map(len, server.log)) < 16_000
    assert any("(60000 bytes)" in line for line in server.log)


# Regression: a copy of each message stayed until the next one came, outside of the quota.
def test_a134_pushes_that_stall_hold_only_what_the_quota_allows(
    start_server, tmp_path_factory
) -> None:
    rows = np.zeros((65_536, 64), np.uint16)  # 8 MiB
    folder = ModelFolder.write(tmp_path_factory.mktemp("rows"), vocab=len(rows), hidden=64)
    server = start_server(
        *("--model", str(folder.path), "--admin", "auto", "--local", "none"),
        *("--receive-bytes", "256MiB", "--queue-bytes", "64MiB"),
    )
    header, message = push_header(7), pushed_rows(0, rows)
    is_over = threading.Event()

    def stall():
        yield header
        yield message
        is_over.wait()

    with contextlib.ExitStack() as stack:
        before = server.peak_memory_bytes()
        calls = []
        for _ in range(4):
            weights = stack.enter_context(Weights(server.admin))
            calls += [weights.push_call(stall()) for _ in range(64)]
        stack.callback(is_over.set)  # before the channels are closed, which wait for it
        # All have stalled when those that send nothing any more are ended.
        assert server.eventually(lambda: any(call.done() for call in calls), seconds=60)
        taken = server.peak_memory_bytes() - before
        assert weights.list().pushed.rows == len(rows)
    # The quota, the 8 MiB of the version, and the margin of the allocator.
    assert taken < (256 + 8 + 128) * MIB
