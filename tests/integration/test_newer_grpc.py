"""What the gRPC of releases holds beyond that of Debian 12, run with its binaries (deploy/newer_grpc)."""

import time

import pytest
from attacks import Attackers, EndlessContinuation, EndlessLiteral, Resets, connect
from built_packages import has_newer_grpc
from http2_frames import GOAWAY, PREFACE, read_frame
from scoring_rpc import Scoring, request

MIB = 1 << 20
SECONDS = 5.0
# The server closes connections that do not acknowledge its SETTINGS after 5 s.
SETTINGS_SECONDS_MAX = 10.0
# Of another client on two cores, which the attackers use as well.
LONGEST_CALL_SECONDS_MAX = 5.0
LIMITS = ("--receive-bytes", "256MiB", "--max-message-bytes", "64MiB", "--queue-bytes", "64MiB")
# Above the bytes that the server receives at most, for what gRPC and the allocator keep of a connection.
MARGIN_BYTES = 256 * MIB


@pytest.fixture(autouse=True, scope="module")
def _has_newer_grpc(binaries) -> None:
    if not has_newer_grpc(binaries):
        pytest.skip("the programs have the distribution's gRPC")


@pytest.fixture
def attacked(start_server, model):
    return start_server("--model", str(model.path), *LIMITS)


def longest_call_during(server, attack, seconds: float = SECONDS) -> float:
    """Attacks the server and returns the longest time of another client's call."""
    longest = 0.0
    with Scoring(server.grpc) as scoring, Attackers(server, attack):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.monotonic()
            assert scoring.score(request(), timeout=60).rows == 2
            longest = max(longest, time.monotonic() - begin)
    assert attack.amount > 0
    return longest


@pytest.mark.parametrize("attack", [EndlessContinuation, EndlessLiteral])
def test_headers_without_end_take_bounded_memory_and_time(attacked, attack) -> None:
    with Scoring(attacked.grpc) as scoring:
        assert scoring.score(request(), timeout=20).rows == 2
    before, cpu_before = attacked.peak_memory_bytes(), attacked.cpu_seconds()
    headers = attack()

    longest = longest_call_during(attacked, headers)

    assert longest < LONGEST_CALL_SECONDS_MAX
    assert attacked.peak_memory_bytes() - before < 256 * MIB + MARGIN_BYTES
    # gRPC 1.51 takes 370 ms for each MB of a literal without end, which it parses anew with each frame.
    assert (attacked.cpu_seconds() - cpu_before) / (headers.amount / 1e6) < 0.05


def test_rapid_resets_take_bounded_memory(attacked) -> None:
    with Scoring(attacked.grpc) as scoring:
        assert scoring.score(request(), timeout=20).rows == 2
    before = attacked.peak_memory_bytes()

    longest = longest_call_during(attacked, Resets(100_000))

    assert longest < LONGEST_CALL_SECONDS_MAX
    assert attacked.peak_memory_bytes() - before < MARGIN_BYTES


def test_a_connection_that_does_not_acknowledge_settings_is_closed(attacked) -> None:
    with connect(attacked.grpc, timeout=30) as connection:
        connection.sendall(PREFACE)
        begin = time.monotonic()
        kinds = []
        while GOAWAY not in kinds:
            kinds.append(read_frame(connection)[0])

    assert time.monotonic() - begin < SETTINGS_SECONDS_MAX
