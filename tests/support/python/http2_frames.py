"""Makes a gRPC call frame by frame, because a client library does not let the caller choose the frame sizes."""

import socket
import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0,
    1,
    3,
    4,
    6,
    7,
    8,
    9,
)
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE = 4  # identifier of a setting
STREAM = 1
MAGIC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PREFACE = MAGIC + b"\0\0\0\4\0\0\0\0\0"  # followed by an empty SETTINGS frame


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    length = struct.pack(">I", len(payload))[1:]
    return length + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """Returns a header as an HPACK literal without indexing."""
    return b"\0" + _hpack_text(name) + _hpack_text(value)


def _hpack_text(text: str) -> bytes:
    rest = len(text) - 127
    if rest < 0:
        return bytes([len(text)]) + text.encode()
    length = [127]
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes([*length, rest]) + text.encode()


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Raises ConnectionResetError if the server closes the connection before."""
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the server closed the connection")
        data += piece
    return data


def read_frame(connection: socket.socket) -> tuple[int, int, int, bytes]:
    """Returns the kind, the flags, the stream and the payload of the next frame."""
    head = read_exactly(connection, 9)
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return kind, flags, stream, read_exactly(connection, int.from_bytes(head[:3], "big"))


def call_headers(
    address: str, method: str = "/logprobd.v1.Scoring/Score", metadata: dict[str, str] | None = None
) -> bytes:
    """Returns the header block of a gRPC call."""
    headers = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *(metadata or {}).items(),
    )
    return b"".join(header(*pair) for pair in headers)


def call_in_frames(address: str, method: str, message: bytes, sizes: list[int]) -> bytes:
    """Sends `message` in DATA frames that cycle through `sizes`, and returns the response message.

    The message must fit the flow-control window of a new stream, 64 KiB less one byte.
    """
    host, port = address.rsplit(":", 1)
    body = struct.pack(">BI", 0, len(message)) + message
    out = PREFACE + frame(HEADERS, END_HEADERS, STREAM, call_headers(address, method))
    begin, count = 0, 0
    while begin < len(body):
        size = sizes[count % len(sizes)]
        out += frame(DATA, 0, STREAM, body[begin : begin + size])
        begin, count = begin + size, count + 1
    out += frame(DATA, END_STREAM, STREAM)
    answer = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(out)
        while True:
            kind, flags, stream, payload = read_frame(connection)
            assert kind not in (RST_STREAM, GOAWAY), f"frame {kind}: {payload!r}"
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            if stream == STREAM and kind == DATA:
                answer += payload
            if stream == STREAM and kind in (DATA, HEADERS) and flags & END_STREAM:
                break
    assert len(answer) >= 5, "the call failed: the response has trailers but no message"
    assert struct.unpack(">BI", answer[:5]) == (0, len(answer) - 5)
    return answer[5:]
