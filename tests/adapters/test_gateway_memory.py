"""What requests of the gateway hold in memory: their bodies, what waits, and responses that are not read."""

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import ClientSession
from gateway_scenario import POISON, entered, post, queued, run
from logprobd_adapters import gateway
from logprobd_adapters.batcher import BODY_BYTES_PER_TOKEN
from logprobd_adapters.gateway import Gateway
from logprobd_adapters.http_access import Certificate

SIZE = 100 * BODY_BYTES_PER_TOKEN
LARGE = {
    "prompt": [[1] * 16] * 1000,
    "prompt_logprobs": 8,
}  # Its response, 6 MB, is more than sockets hold.
LARGE_TOKENS = 16_000

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send_head(client: ClientSession, size: int = SIZE) -> Connection:
    """Sends the head of a request, without its body."""
    reader, writer = await asyncio.open_connection(client._base_url.host, client._base_url.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n"
    writer.write(head.encode())
    return reader, writer


def body_of(fields: dict, size: int = 0) -> bytes:
    return json.dumps(fields).ljust(size).encode()


async def send_large(client: ClientSession) -> socket.socket:
    """Sends a request and reads nothing of its response, which the socket does not hold."""
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    await loop.sock_connect(connection, (client._base_url.host, client._base_url.port))
    body = body_of(LARGE)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(connection, head.encode() + body)
    return connection


async def read_all(connection: socket.socket, end: bytes) -> bytes:
    """Reads until the data ends so, or the connection does."""
    data, part = bytearray(), b"none"
    while part and not data.endswith(end):
        try:
            part = await asyncio.get_running_loop().sock_recv(connection, 1 << 16)
        except ConnectionResetError:
            break
        data += part
    return bytes(data)


# Regression: a body was counted only when it was read and parsed, so that any number of them were read at once.
def test_bodies_are_counted_before_they_are_read(teacher) -> None:
    async def scenario(client, gateway) -> None:
        accepted = []
        for tokens in (100, 200):
            accepted.append(await send_head(client))
            await queued(gateway, tokens)

        refused = [await send_head(client) for _ in range(5)]

        for reader, writer in refused:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ") and b"Retry-After: " in head
            writer.close()
        assert gateway._batcher._tokens == 200
        for reader, writer in accepted:
            writer.write(body_of({"prompt": [1, 2, 3], "prompt_logprobs": 0}, SIZE))
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        await queued(gateway, 0)

    run(teacher, scenario, queue_tokens=150)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": [1, 2, 3]}, 200),
        ({"prompt": [1, 2.5]}, 400),
        ({"prompt": [4, POISON]}, 500),
        ({"prompt": [1, 2, 3], "model": "x" * 100_000}, 404),  # parsed in the thread
    ],
)
def test_nothing_is_counted_after_a_response(teacher, fields, status) -> None:
    async def scenario(client, gateway) -> None:
        assert (await post(client, **fields))[0] == status

        await queued(gateway, 0)

    run(teacher, scenario)


async def leave_while_the_body_is_read(client, gateway, _) -> None:
    _, writer = await send_head(client)
    writer.write(b"{" * (SIZE // 2))
    await queued(gateway, 100)
    writer.close()


async def leave_while_the_prompt_is_scored(client, gateway, backbone) -> None:
    backbone.release.clear()
    request = asyncio.create_task(post(client, [1, 2, 3]))
    await entered(backbone)
    await queued(gateway, 3)
    request.cancel()


async def leave_while_the_response_is_sent(client, gateway, _) -> None:
    connection = await send_large(client)
    assert await asyncio.get_running_loop().sock_recv(connection, 1) == b"H"
    assert gateway._batcher._tokens == LARGE_TOKENS
    connection.close()


@pytest.mark.parametrize(
    "leave",
    [
        leave_while_the_body_is_read,
        leave_while_the_prompt_is_scored,
        leave_while_the_response_is_sent,
    ],
)
def test_nothing_is_counted_after_a_client_has_left(
    teacher, backbone, leave: Callable[..., Awaitable[None]]
) -> None:
    async def scenario(client, gateway) -> None:
        await leave(client, gateway, backbone)

        await queued(gateway, 0)

        backbone.release.set()
        assert (await post(client, [1, 2]))[0] == 200

    run(teacher, scenario)


def test_a_body_that_waits_for_the_parser_is_dropped_when_its_client_leaves(
    teacher, monkeypatch
) -> None:
    parse, bodies, parsing, release = (
        gateway.parse_request,
        [],
        threading.Event(),
        threading.Event(),
    )

    def parse_later(body: bytearray, model: str, tokens_max: int):
        bodies.append(body)
        parsing.set()
        assert release.wait(60)
        return parse(body, model, tokens_max)

    monkeypatch.setattr(gateway, "parse_request", parse_later)

    async def scenario(client, gateway) -> None:
        reader, first = await send_head(client)
        first.write(body_of({"prompt": [1, 2, 3], "prompt_logprobs": 0}, SIZE))
        assert await asyncio.to_thread(parsing.wait, 60)
        _, second = await send_head(client)
        second.write(body_of({"prompt": [4]}, SIZE))
        await queued(gateway, 200)
        second.close()
        await queued(gateway, 100)
        release.set()

        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        first.close()
        await queued(gateway, 0)

    run(teacher, scenario)
    assert bodies == [b""]  # The second was not parsed, and the first is no longer in memory.


# Regression: scores were counted only until the response began.
def test_a_response_is_counted_until_its_last_byte_is_sent(teacher) -> None:
    async def scenario(client, gateway) -> None:
        connection = await send_large(client)
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b"H"

        status, result = await post(client, [1, 2])
        assert status == 429
        assert "16000 tokens are in progress" in result["error"]["message"]

        data = await read_all(connection, b"\r\n0\r\n\r\n")
        assert data.endswith(b"]}\r\n0\r\n\r\n")
        await queued(gateway, 0)
        assert (await post(client, [1, 2]))[0] == 200
        connection.close()

    run(teacher, scenario, queue_tokens=LARGE_TOKENS)


def test_a_large_response_is_complete_over_https(teacher, security) -> None:
    async def main() -> None:
        gateway = Gateway("teacher")
        gateway.start(teacher)
        certificate = Certificate(security.server_cert, security.server_key)
        runner, url = await gateway.listen("127.0.0.1", 0, certificate)
        context = ssl.create_default_context(cafile=security.ca)
        try:
            async with ClientSession() as client:
                for _ in range(2):  # on one connection
                    request = client.post(f"{url}/v1/completions", json=LARGE, ssl=context)
                    async with request as response:
                        assert len((await response.json())["choices"]) == 1000
            await queued(gateway, 0)
        finally:
            await runner.cleanup()

    asyncio.run(main())


# Regression: a client that did not read its response kept it in memory without end.
def test_a_client_that_does_not_read_its_response_is_disconnected(teacher, caplog) -> None:
    async def scenario(client, gateway) -> None:
        connection = await send_large(client)
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b"H"

        await queued(gateway, 0)

        data = await read_all(connection, b"\r\n0\r\n\r\n")
        assert not data.endswith(b"0\r\n\r\n")
        connection.close()

    run(teacher, scenario, stall_seconds=0.3)
    assert "took nothing of its response, or less than 1 MiB a second, for 0.3 s" in caplog.text


def test_a_client_that_does_not_send_its_body_is_disconnected(teacher, caplog) -> None:
    async def scenario(client, gateway) -> None:
        reader, writer = await send_head(client)
        writer.write(b"{")
        await queued(gateway, 100)

        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await asyncio.wait_for(reader.readexactly(1), 60)

        await queued(gateway, 0)
        writer.close()

    run(teacher, scenario, stall_seconds=0.3)
    assert "sent nothing of its request" in caplog.text


def test_a_large_number_of_items_is_freed_in_steps() -> None:
    async def scenario() -> list[int]:
        items = [None] * (2 * gateway._FREED_AT_ONCE + 1)
        left = []
        gateway._free(items)
        for _ in range(3):
            left.append(len(items))
            await asyncio.sleep(0)
        return left

    assert asyncio.run(scenario()) == [gateway._FREED_AT_ONCE + 1, 1, 0]
