"""Tests how often a client may ping. The server's clock runs faster than the real one, which saves a minute."""

import os
import pathlib
import socket
import subprocess
import threading

import grpc
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PINGS = 6
"""More than the server's limit of early pings, which is 2."""


class Relay:
    """Passes a connection on to a server and counts the pings that the server has answered."""

    PREFACE_BYTES = 24
    HEADER_BYTES = 9
    PING, GOAWAY, ACK = 6, 7, 1

    def __init__(self, server: str, path: pathlib.Path) -> None:
        self._server = server
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._news = threading.Condition()
        self._answered = 0
        self._goaway: bytes | None = None
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"unix:{self._path}"

    def outcome(self, pings: int) -> bytes | None:
        """Waits for the answers to `pings` pings. Returns the text with which the server leaves, or None."""
        with self._news:
            has_news = self._news.wait_for(
                lambda: self._answered >= pings or self._goaway is not None, timeout=30
            )
            assert has_news, f"{self._answered} pings were answered"
            return self._goaway

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            if self._server.startswith("unix:"):
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server.removeprefix("unix:"))
            else:
                host, port = self._server.rsplit(":", 1)
                server = socket.create_connection((host, int(port)))
            self._sockets += [client, server]
            threading.Thread(target=self._pump, args=(client, server), daemon=True).start()
            threading.Thread(target=self._watch, args=(server, client), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one of the two has left

    def _watch(self, source: socket.socket, sink: socket.socket) -> None:
        frames = b""
        try:
            while data := source.recv(1 << 16):
                frames = self._parse(frames + data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _parse(self, frames: bytes) -> bytes:
        """Notes the server's frames, and returns the rest, which is no whole frame."""
        while len(frames) >= self.HEADER_BYTES:
            end = self.HEADER_BYTES + int.from_bytes(frames[:3])
            if len(frames) < end:
                break
            kind, flags, body = frames[3], frames[4], frames[self.HEADER_BYTES : end]
            with self._news:
                if kind == self.PING and flags & self.ACK:
                    self._answered += 1
                if kind == self.GOAWAY:
                    self._goaway = body[8:]
                self._news.notify_all()
            frames = frames[end:]
        return frames


@pytest.fixture(scope="module")
def racing_clock(tmp_path_factory) -> pathlib.Path:
    """Returns the library that makes a server's clock run faster."""
    library = tmp_path_factory.mktemp("clock") / "racing_clock.so"
    source = ROOT / "tests" / "support" / "racing_clock.c"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


class Client:
    """A gRPC client that pings every second, the least that gRPC allows, with or without a call."""

    def __init__(self, server: str, path: pathlib.Path, has_call: bool) -> None:
        self.relay = Relay(server, path)
        self._channel = grpc.insecure_channel(
            self.relay.address,
            options=(
                ("grpc.keepalive_time_ms", 1_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )
        if has_call:
            watch = self._channel.unary_stream("/grpc.health.v1.Health/Watch")
            self._call = watch(b"", wait_for_ready=True)
            next(self._call)
        else:
            grpc.channel_ready_future(self._channel).result(10)

    def close(self) -> None:
        self._channel.close()
        self.relay.close()


@pytest.fixture
def start(start_server, model, racing_clock, tmp_path):
    """Returns a function that starts clients of all listeners, with and without a call.

    They ping a server of which `seconds` pass from one ping to the next.
    """
    clients: list[Client] = []

    def start_clients(seconds: int) -> dict[tuple[str, bool], Client]:
        local, admin = tmp_path / "local", tmp_path / "admin"
        server = start_server(
            *("--model", str(model.path), "--local", str(local), "--admin", f"unix:{admin}"),
            environment={"LD_PRELOAD": str(racing_clock), "RACING_CLOCK": str(seconds)},
        )
        listeners = {"listen": server.grpc, "local": f"unix:{local}", "admin": f"unix:{admin}"}
        made = {}
        for name, address in listeners.items():
            for has_call in (False, True):
                path = tmp_path / f"relay-{len(clients)}"
                clients.append(Client(address, path, has_call))
                made[name, has_call] = clients[-1]
        return made

    yield start_clients
    for client in clients:
        client.close()


# Regression: the server sent such clients away with "too_many_pings".
def test_a21_a_client_may_ping_every_ten_seconds_with_and_without_calls(start) -> None:
    clients = start(10)

    outcomes = {key: client.relay.outcome(PINGS) for key, client in clients.items()}

    assert set(outcomes.values()) == {None}, outcomes


def test_a21_a_client_that_pings_every_two_seconds_is_sent_away(start) -> None:
    clients = start(2)

    outcomes = {key: client.relay.outcome(PINGS) for key, client in clients.items()}

    assert set(outcomes.values()) == {b"too_many_pings"}, outcomes
