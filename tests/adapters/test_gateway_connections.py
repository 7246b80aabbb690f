"""What a connection may hold and how long it may wait, and what answers and the log repeat of callers' texts."""

import asyncio
import errno
import json
import logging
import time
from collections.abc import Callable
from unittest import mock

import pytest
from gateway_scenario import FixedTeacher, post, queued, run
from logprobd_adapters import connections
from logprobd_adapters.connections import network_of
from logprobd_adapters.gateway import Gateway
from logprobd_adapters.http_access import Certificate
from logprobd_adapters.quoting import MESSAGE_MAX, QUOTE_MAX, one_line, quote
from test_gateway_memory import SIZE, body_of, send_head


@pytest.fixture
def teacher():
    """Returns a teacher without a model, which waits while its `release` is not set."""
    teacher = FixedTeacher()
    yield teacher
    teacher.release.set()


async def connect(client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(client._base_url.host, client._base_url.port)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Waits until a connection ends."""
    try:
        await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        pass
    return True


NESTED = "x" * 500
for _ in range(6):
    NESTED = [NESTED] * 4  # six levels of lists
VALUES = {
    "text": "\x7f" * 100_000,
    "astral": "\U0010ffff" * 100_000,
    "nested lists": NESTED,
    "keys": {str(number): number for number in range(100_000)},
    "nested keys": {"x" * 1_000: {"y" * 1_000: NESTED}},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_quoted_value_is_short(value) -> None:
    assert len(quote(value)) <= QUOTE_MAX


def test_a_line_has_no_character_that_ends_it_or_that_a_terminal_obeys() -> None:
    text = one_line("a\nb\r\x1b[31m\x85\u2028\x9b\udcff é中")

    assert text == r"a\nb\r\x1b[31m\x85\u2028\x9b\udcff é中"
    assert len(one_line("\x00" * 10_000)) == MESSAGE_MAX


def test_a_text_of_exactly_the_length_of_a_message_is_not_cut() -> None:
    assert one_line("x" * MESSAGE_MAX) == "x" * MESSAGE_MAX
    assert one_line("x" * (MESSAGE_MAX + 1)) == "x" * (MESSAGE_MAX - 3) + "..."


# Regression: a body of 8 MiB was in the answer, five times as long where characters are escaped.
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize(
    "field",
    ["model", "max_tokens", "temperature", "prompt_logprobs", "prompt_logprob_start"]
    + ["prompt", "prompt_logprob_token_ids", "logit_bias", "truncate_prompt_tokens", "unknown"],
)
def test_no_answer_repeats_a_large_value(teacher, field, value) -> None:
    async def scenario(client, _) -> None:
        status, answer = await post(client, **{"prompt": [1, 2, 3], field: value})

        assert status in (400, 404) and len(json.dumps(answer)) < 2_000

    run(teacher, scenario)


def test_no_answer_repeats_the_name_of_a_field(teacher) -> None:
    async def scenario(client, _) -> None:
        status, answer = await post(client, [1, 2, 3], **{"\x7f" * 100_000: 1})

        assert status == 400 and len(json.dumps(answer)) < 2_000

    run(teacher, scenario)


@pytest.mark.parametrize(
    "request_line", [b"GET /a%0AERROR%20forged%1b", b"nonsense", b"GET /" + b"x" * 9000]
)
def test_a_caller_writes_no_line_of_the_log(teacher, request_line, caplog) -> None:
    async def scenario(client, _) -> None:
        reader, writer = await connect(client)
        writer.write(request_line + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")) and len(answer) < 2_000
        writer.close()

    with caplog.at_level(logging.DEBUG, "logprobd-gateway"):
        run(teacher, scenario)

    assert all(record.exc_info is None for record in caplog.records)
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert max(len(record.getMessage()) for record in caplog.records) < 500


def test_a_request_that_is_no_http_is_told_why(teacher) -> None:
    async def scenario(client, _) -> None:
        reader, writer = await connect(client)
        writer.write(b"nonsense HTTP/1.1\r\nHost: a\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

        assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
        assert "Invalid method" in json.loads(body)["error"]["message"]

    run(teacher, scenario)


def test_one_address_holds_half_of_the_connections(teacher, caplog) -> None:
    async def scenario(client, _) -> None:
        kept = [await connect(client) for _ in range(4)]
        refused = [await connect(client) for _ in range(20)]

        for reader, writer in refused:
            assert await is_closed(reader)
            writer.close()

        for _, writer in kept:
            writer.close()
        while True:  # A connection that has ended makes room.
            reader, writer = await connect(client)
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            try:
                line = await asyncio.wait_for(reader.readline(), 60)
            except ConnectionResetError:
                line = b""
            writer.close()
            if line:
                break
        assert line == b"HTTP/1.1 200 OK\r\n"

    run(teacher, scenario, connections_max=8)
    refusals = [line for line in caplog.messages if line.startswith("refused ")]
    assert len(refusals) == 1  # in ten seconds


def test_a_connection_that_cannot_be_accepted_ends_no_listener(
    teacher, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(connections, "_ACCEPT_RETRY_SECONDS", 0.01)

    async def scenario(client, _) -> None:
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept
        faults = [OSError(errno.EMFILE, "too many open files")]

        async def accept_or_fail(listening):
            if faults:
                raise faults.pop()
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", accept_or_fail)
        for _ in range(3):  # The first one was being waited for before.
            reader, writer = await connect(client)
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert await asyncio.wait_for(reader.readline(), 60) == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        assert not faults

    run(teacher, scenario)
    assert "cannot accept a connection: [Errno 24] too many open files" in caplog.text


def test_all_addresses_together_have_no_more_than_the_most_connections(teacher) -> None:
    async def scenario(client, _) -> None:
        async def connect_from(address: str):
            url = client._base_url
            return await asyncio.open_connection(url.host, url.port, local_addr=(address, 0))

        kept = [await connect_from(f"127.0.0.{number}") for number in (2, 2, 3, 3)]
        for reader, writer in kept:
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"

        refused, other = await connect_from("127.0.0.4")

        assert await is_closed(refused)
        for writer in (other, *(writer for _, writer in kept)):
            writer.close()

    run(teacher, scenario, connections_max=4)


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("2001:db8::1", "2001:db8::2:3", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_a_network_of_64_bits_counts_as_an_address(first, second, are_one) -> None:
    assert (network_of(first) == network_of(second)) == are_one


HEAD = b"GET /health HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("sent", "more"),
    [(b"", b""), (HEAD, b""), (HEAD, b"x"), (HEAD + b"\r\n", b"")],
    ids=["nothing", "half a head", "a head that drips", "a request"],
)
def test_an_idle_connection_and_an_unfinished_head_are_closed(
    teacher, monkeypatch, sent, more
) -> None:
    monkeypatch.setitem(connections.RUNNER_OPTIONS, "keepalive_timeout", 0.3)

    async def scenario(client, _) -> None:
        reader, writer = await connect(client)
        writer.write(sent)
        if sent.endswith(b"\r\n\r\n"):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"

        end = asyncio.create_task(is_closed(reader))
        while not end.done():
            writer.write(more)
            await asyncio.wait([end], timeout=0.02)

        assert await end
        writer.close()

    run(teacher, scenario)


def test_a_handshake_that_is_not_finished_is_cut(security, monkeypatch) -> None:
    monkeypatch.setattr(connections, "_HANDSHAKE_SECONDS", 0.3)

    async def main() -> None:
        certificate = Certificate(security.server_cert, security.server_key)
        runner, url = await Gateway("teacher").listen("127.0.0.1", 0, certificate)
        try:
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)

            assert await is_closed(reader)
            writer.close()
        finally:
            await runner.cleanup()

    asyncio.run(main())


# Regression: a byte in each 30 s kept a request in the account for ever.
def test_a_body_that_arrives_a_byte_at_a_time_is_cut(teacher, caplog) -> None:
    async def scenario(client, gateway) -> None:
        reader, writer = await send_head(client)
        end = asyncio.create_task(is_closed(reader))
        started = time.monotonic()
        while not end.done():
            assert time.monotonic() - started < 60, "the body is still being read"
            writer.write(b"{")
            await asyncio.wait([end], timeout=0.02)  # far less than stall_seconds

        await queued(gateway, 0)
        writer.close()

    run(teacher, scenario, stall_seconds=0.5)
    assert "less than 1 MiB a second" in caplog.text


class FakeTimer:
    def __init__(self, end: float, callback: Callable[[], None]) -> None:
        self.end, self.callback = end, callback

    def cancel(self) -> None:
        self.callback = None


class FakeLoop:
    """Time that stands still, and timers that end when a test moves it on."""

    create_future = mock.Mock

    def __init__(self) -> None:
        self.now, self.delay = 0.0, 0.0
        self.timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        self.delay = delay
        self.timers.append(FakeTimer(self.now + delay, callback))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for timer in self.timers:
            if timer.callback and timer.end <= self.now:
                timer.callback()


@pytest.fixture
def loop(monkeypatch) -> FakeLoop:
    loop = FakeLoop()
    monkeypatch.setattr(connections.asyncio, "get_running_loop", lambda: loop)
    return loop


@pytest.mark.parametrize(
    ("moved_bytes", "delays"),
    [
        (1, [30, 10]),  # 20 s for each byte
        (10 << 20, [30, 20, 10]),
        (20 << 20, [30, 30, 30, 30]),  # 1 MiB a second
        (1 << 30, [30, 30, 30, 30]),  # What was fast before allows no longer wait.
    ],
)
def test_a_peer_that_moves_less_than_a_mebibyte_a_second_runs_out_of_time(
    loop, moved_bytes, delays
) -> None:
    stall = connections.StallTimeout(30.0, mock.Mock())

    found = []
    for _ in delays:
        stall.start()
        found.append(round(loop.delay))
        loop.now += 20.0
        stall.stop(moved_bytes)

    assert found == delays


def test_only_a_wait_that_still_goes_on_ends_a_connection(loop) -> None:
    expire = mock.Mock()
    stall = connections.StallTimeout(30.0, expire)

    stall.start()
    loop.advance(29.0)
    stall.stop(1 << 30)
    loop.advance(1000.0)
    expire.assert_not_called()

    stall.start()
    loop.advance(30.0)
    expire.assert_called_once_with()


def connection_with(loop: FakeLoop) -> tuple[connections.Connection, mock.Mock]:
    """Returns a connection that may stall for 30 s, and its transport."""
    transport = mock.Mock()
    transport.get_write_buffer_size.return_value = 100
    connection = connections.Connection(mock.Mock(), stall_seconds=30.0)
    connection.connection_made(transport)
    return connection, transport


@pytest.mark.parametrize("end", ["resume_writing", "connection_lost"])
def test_a_connection_that_no_longer_waits_is_not_cut_later(loop, end) -> None:
    connection, transport = connection_with(loop)

    connection.pause_writing()
    loop.advance(29.0)
    getattr(connection, end)(*([None] if end == "connection_lost" else []))

    assert all(timer.callback is None for timer in loop.timers)
    loop.advance(1000.0)
    transport.abort.assert_not_called()


def test_each_request_of_a_connection_may_wait_anew(loop) -> None:
    connection, _ = connection_with(loop)
    connection.pause_writing()
    loop.advance(20.0)
    connection.resume_writing()

    connection.pause_writing()
    assert round(loop.delay) == 10
    connection.resume_writing()
    connection.begin(mock.Mock())
    connection.pause_writing()

    assert loop.delay == 30.0


def test_a_request_whose_body_has_arrived_may_wait_longer_than_a_stalled_one(teacher) -> None:
    async def scenario(client, gateway) -> None:
        teacher.release.clear()
        reader, writer = await send_head(client)
        writer.write(body_of({"prompt": [1, 2, 3], "prompt_logprobs": 0}, SIZE))
        await queued(gateway, 3)
        stalled, other = await send_head(client)

        assert await is_closed(stalled)  # A timer of the first request would have ended before.
        teacher.release.set()

        assert await asyncio.wait_for(reader.readline(), 60) == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        other.close()

    run(teacher, scenario, stall_seconds=0.3)


# Regression: only the parts of a response to a prompt had a limit in time.
def test_any_answer_that_is_not_taken_cuts_its_connection() -> None:
    async def main() -> None:
        transport, is_cut = mock.Mock(), asyncio.Event()
        transport.get_extra_info.return_value = ("192.0.2.1", 1)
        transport.get_write_buffer_size.return_value = 100
        transport.abort.side_effect = is_cut.set
        connection = connections.Connection(mock.Mock(), stall_seconds=0.01)
        connection.connection_made(transport)

        connection.pause_writing()

        await asyncio.wait_for(is_cut.wait(), 60)
        transport.set_write_buffer_limits.assert_called_once_with(1)

    asyncio.run(main())


# Regression: heads of 1 MiB, 32 of them on each connection, waited behind a request in progress.
def test_requests_that_are_sent_ahead_are_bounded(teacher, caplog) -> None:
    async def scenario(client, gateway) -> None:
        teacher.release.clear()
        reader, writer = await send_head(client)
        writer.write(body_of({"prompt": [1, 2, 3], "prompt_logprobs": 0}, SIZE))
        await queued(gateway, 3)
        end = asyncio.create_task(is_closed(reader))

        lines = b"".join(b"x%d: %s\r\n" % (number, b"y" * 4_000) for number in range(50))
        for _ in range(10):
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n")

        assert await end
        await queued(gateway, 0)
        writer.close()
        teacher.release.set()

    run(teacher, scenario)
    assert "disconnected 127.0.0.1, which sent further requests without waiting" in caplog.text


def test_requests_on_one_connection_are_answered_in_turn(teacher) -> None:
    async def scenario(client, _) -> None:
        reader, writer = await connect(client)
        body = body_of({"prompt": [1, 2, 3], "prompt_logprobs": 0}, 1 << 20)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(20):
            writer.write(head.encode() + body)
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()

    run(teacher, scenario)


# Regression: aiohttp's own answers repeated a request line of 4,000 bytes as 16,000 characters.
@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"\xff" * 4_000 + b" HTTP/1.1",
        b"GET / HTTP/1.1 " + b"y" * 4_000,
        b"\xff" * 4_000,
        b"GET / HTTP/1.1\r\n" + b"\xff" * 4_000,
        b"GET / HTTP/1.1\r\nx: " + b"\x00" * 4_000,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 5_000,
        b"POST / HTTP/1.1\r\nContent-Length: " + b"y" * 4_000,
    ],
)
def test_an_answer_to_what_is_no_http_repeats_no_more_than_others(teacher, head) -> None:
    async def scenario(client, gateway) -> None:
        reader, writer = await connect(client)
        writer.write(head + b"\r\nHost: a\r\n\r\n")

        answer = await asyncio.wait_for(reader.read(), 60)

        first, _, body = answer.partition(b"\r\n\r\n")
        assert b" 400 " in first.splitlines()[0] and len(first) < 500
        assert len(json.loads(body)["error"]["message"]) <= QUOTE_MAX
        writer.close()

    run(teacher, scenario)
