"""Attacks on a gateway in a process of its own, whose resident memory is measured.

The limits are those of client/adapters/docs/GATEWAY.md ("Memory"): 40 times the bytes of one body of 8 MiB while it is
parsed, and for each connection 1.5 MiB.
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

MIB = 1 << 20
BODY_BYTES = 8 * MIB
PARSED_MIB = 320
CONNECTION_MIB = 1.5
SPARE_MIB = 32  # of allocators
HEALTH_SECONDS = 1  # how long the probes of Kubernetes wait by default
PROMPT = {"prompt": [1, 2], "prompt_logprobs": 0}


class Victim:
    """A gateway process, and what it holds beyond what it held at the start."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._folder = pathlib.Path("/proc", str(process.pid))
        assert process.stdout is not None
        self.port = int(process.stdout.readline().rpartition(":")[2])
        assert self.post(PROMPT) == 200
        (self._folder / "clear_refs").write_text("5")  # The peak is from here on.
        self._start_mib = self._mib("VmRSS")

    def _mib(self, field: str) -> float:
        status = dict(
            line.split(":", 1) for line in (self._folder / "status").read_text().splitlines()
        )
        return int(status[field].split()[0]) / 1024

    def _cpu_ticks(self) -> int:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def held_mib(self) -> float:
        """Waits until the gateway has nothing to do. Returns what it holds then."""
        ticks = -1
        while ticks != (ticks := self._cpu_ticks()):
            time.sleep(1)
        return self._mib("VmRSS") - self._start_mib

    def peak_mib(self) -> float:
        return self._mib("VmHWM") - self._start_mib

    def connect(self) -> socket.socket:
        """Returns a connection of a client that reads nothing."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 13)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def send(self, data: bytes) -> socket.socket:
        """Sends data, or what the gateway takes of it."""
        connection = self.connect()
        with contextlib.suppress(OSError):
            connection.sendall(data)
        return connection

    def post(self, body: dict) -> int:
        connection = self.send(request_of(json.dumps(body).encode()))
        status = int(connection.recv(12).split()[1])
        connection.close()
        return status


def request_of(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture
def victim(environment) -> Iterator[Victim]:
    import gateway_scenario

    command = [sys.executable, gateway_scenario.__file__, "32768"]
    path = os.pathsep.join([environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, env=environment | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Victim(process)
        process.kill()


# Regression: 16 such answers kept 1.2 GiB, since a message repeated the name with its characters escaped.
def test_unread_refusals_of_a_long_name_hold_no_memory(victim) -> None:
    name = b"\x7f" * (BODY_BYTES - 100)
    body = json.dumps(PROMPT | {"model": "NAME"}).encode().replace(b"NAME", name)

    connections = [victim.send(request_of(body)) for _ in range(16)]

    assert victim.held_mib() < len(connections) * CONNECTION_MIB + SPARE_MIB
    assert victim.peak_mib() < PARSED_MIB
    assert connections[-1].recv(12) == b"HTTP/1.1 404"
    assert victim.post(PROMPT) == 200


# Regression: each prompt of a token became an object before they were counted, 60 bytes for a byte of the body.
def test_many_prompts_take_what_is_declared_for_a_body(victim) -> None:
    count = 2 * MIB // 4
    body = b'{"prompt_logprobs": 0, "prompt": [' + b",".join([b"[1]"] * count) + b"]}"

    connection = victim.send(request_of(body))

    assert connection.recv(12) == b"HTTP/1.1 400"
    assert victim.peak_mib() < PARSED_MIB * 2 * MIB / BODY_BYTES


# Regression: 64 connections kept 1.3 GiB of heads that waited behind a request in progress.
def test_heads_behind_an_answer_that_is_not_read_are_bounded(victim) -> None:
    count = 64
    large = request_of(json.dumps(PROMPT | {"prompt": [1] * 4_000, "prompt_logprobs": 50}).encode())
    lines = b"".join(b"x%d: %s\r\n" % (number, b"y" * 4_000) for number in range(60))
    ahead = b"GET /health HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n"
    connections = []

    def attack() -> None:
        connections.append(victim.send(large + ahead * 32))

    attackers = [threading.Thread(target=attack) for _ in range(count)]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join()

    assert victim.peak_mib() < count * CONNECTION_MIB + SPARE_MIB
    assert victim.post(PROMPT) == 200
    for connection in connections:
        connection.close()


def longest_health_seconds(victim: Victim, attack: bytes, status: bytes) -> float:
    """Returns how long /health took at most while a request was answered, as a client that reads
    its response at once sees it."""
    connection = victim.connect()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    answer = bytearray()

    def send_and_read() -> None:
        connection.sendall(attack)
        while part := connection.recv(1 << 20):
            answer.extend(part)

    attacker = threading.Thread(target=send_and_read)
    attacker.start()
    longest = 0.0
    while attacker.is_alive():
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", victim.port), 60) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert probe.recv(12) == b"HTTP/1.1 200"
        longest = max(longest, time.monotonic() - started)
    connection.close()
    assert answer.startswith(b"HTTP/1.1 " + status)
    return longest


# Regression: nothing else was answered for 14 s while 20,000 prompts of two tokens were.
@pytest.mark.parametrize(
    ("prompt", "count", "status"),
    [
        (b"[1]", 262_144, b"200"),
        (b"[1,1]", 131_072, b"200"),
        (b"[1]", 2 * MIB - 100, b"400"),
    ],
)
def test_others_are_answered_while_a_request_of_many_prompts_is(
    victim, prompt, count, status
) -> None:
    body = b'{"prompt_logprobs": 0, "prompt": [' + b",".join([prompt] * count) + b"]}"
    attack = request_of(body).replace(b"Host: a", b"Host: a\r\nConnection: close")

    assert longest_health_seconds(victim, attack, status) < HEALTH_SECONDS
