"""A teacher over HTTP, in the protocol of vLLM's completions.

Tokens go in, and log-probabilities come out. No text is generated. gateway_command serves it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from logprobd import Client
from logprobd.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    LogprobdError,
    NotFound,
    Overloaded,
    Unavailable,
    WeightsVersionMismatch,
    refuses_tls,
)

from logprobd_adapters.batcher import (
    BODY_BYTES_PER_TOKEN,
    QUEUE_TOKENS,
    Batcher,
    ScorerError,
    cost_of,
)
from logprobd_adapters.completions import CompletionRequest, parse_request
from logprobd_adapters.connections import (
    CONNECTIONS_MAX,
    LOG,
    RUNNER_OPTIONS,
    STALL_SECONDS,
    Listener,
    connection_of,
)
from logprobd_adapters.http_access import AccessError, Certificate, Tokens
from logprobd_adapters.quoting import QUOTE_MAX, one_line
from logprobd_adapters.responses import encode_response
from logprobd_adapters.teacher import PromptScores, Teacher

BODY_MIB_MAX = 8
"""Default of Gateway's body_mib_max. Nothing else runs, /health neither, while orjson parses a
body: see docs/GATEWAY.md ("Memory")."""

_INLINE_BYTES = 1 << 14  # A larger body is parsed in a thread.
_STOP_SECONDS = 60.0
_READY_SECONDS = 0.5  # the probes of Kubernetes wait 1 s by default
_OPEN_PATHS = ("/health", "/readyz")  # for probes, which have no token
_FREED_AT_ONCE = 1 << 13  # Prompts and their scores, of which a request may have 262,144.
_TOKENS = web.RequestKey("tokens", int)  # The log has the number of tokens of each request.


def _is_not_malformed(record: logging.LogRecord) -> bool:
    """Says whether aiohttp logs something else than a request that is no HTTP. Such a request has
    its answer, and a traceback for each would let anybody fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


_HTTP_LOG = logging.getLogger(f"{LOG.name}.http")
_HTTP_LOG.addFilter(_is_not_malformed)


def _error(status: int, message: str, retry_after: str | None = None) -> web.Response:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    phrase = HTTPStatus(status).phrase
    body = {"error": {"message": one_line(message), "type": phrase, "code": status}}
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )


class _Handler(web.RequestHandler):
    """aiohttp's handler of a connection. What is no HTTP has the same form of answer as other
    errors, which is also bounded, where aiohttp repeats what it has received."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # writes to the log
        text = " ".join((message or HTTPStatus(status).description).split())
        response = _error(status, one_line(text, QUOTE_MAX))
        response.force_close()
        return response


def _free(items: list[Any]) -> None:
    """Empties a list in steps, since others wait while a large number of items is freed."""
    del items[-_FREED_AT_ONCE:]
    if items:
        asyncio.get_running_loop().call_soon(_free, items)


def _retry_seconds(error: Exception) -> str | None:
    """Returns after how many seconds the scorer may score the same request, or None if it will not
    before someone changes the gateway or the server: tokens, certificates, or the head."""
    if isinstance(error, Unavailable) and refuses_tls(error.details):
        return None
    if isinstance(error, Overloaded | Unavailable):
        seconds = error.retry_after or 0
        return None if seconds < 0 else str(max(math.ceil(seconds), 1))
    may_pass = isinstance(error, DeadlineExceeded | WeightsVersionMismatch | Cancelled)
    return "1" if may_pass else None


async def _respond_to_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turns errors into JSON and writes a line to the log for each request, at level DEBUG."""
    started = time.perf_counter()
    if connection := connection_of(request):
        connection.begin(request.content)
    response: web.StreamResponse
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = _error(
            error.status, error.text or error.reason, error.headers.get("Retry-After")
        )
    except AccessError as error:
        response = _error(error.status, str(error))
        response.headers["WWW-Authenticate"] = "Bearer"
    except InvalidArgument as error:
        response = _error(400, str(error))
    except NotFound as error:
        response = _error(404, str(error))
    except Overloaded as error:
        response = _error(429, str(error), str(max(math.ceil(error.retry_after or 0), 1)))
    except ScorerError as error:
        LOG.error("scoring failed: %s: %s", type(error.error).__name__, error)
        seconds = _retry_seconds(error.error)
        response = _error(502 if seconds is None else 503, str(error), seconds)
    except Exception as error:
        LOG.exception("%s %s failed", request.method, one_line(request.path, QUOTE_MAX))
        response = _error(500, f"{type(error).__name__}: {error}")
    LOG.debug(
        "%s %s %s %d, %d tokens, %.1f ms",
        *(request.remote, request.method, one_line(request.path, QUOTE_MAX), response.status),
        *(request.get(_TOKENS, 0), (time.perf_counter() - started) * 1e3),
    )
    return response


def _demand_token(tokens: Tokens) -> Any:
    """Returns a middleware that lets callers with a token pass, before it reads a body."""

    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in _OPEN_PATHS:
            tokens.check(request.headers.get("Authorization"))
        return await handler(request)

    return web.middleware(check)


class Gateway:
    """The HTTP application. Until `start` is called it answers 503, so that clients wait.

    Args:
        model: name of the model in requests and responses.
        queue_tokens: see Batcher.
        tokens: callers need one of them, except for /health and /readyz. None: everybody may call.
        server: the client of the teacher's scorer, by which /readyz asks whether the server is
            ready. None: the teacher needs no server.
        body_mib_max: largest body of a request, in MiB.
        stall_seconds: how long a client may let the gateway wait for a body, or with a response
            (connections.StallTimeout).
        connections_max: see connections.Listener.
    """

    def __init__(
        self,
        model: str,
        queue_tokens: int = QUEUE_TOKENS,
        *,
        tokens: Tokens | None = None,
        server: Client | None = None,
        body_mib_max: int = BODY_MIB_MAX,
        stall_seconds: float = STALL_SECONDS,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._model = model
        self._queue_tokens = queue_tokens
        self._server = server
        self._body_bytes_max = body_mib_max << 20
        self._stall_seconds = stall_seconds
        self._connections_max = connections_max
        self._readiness_check: asyncio.Future[None] | None = None
        self._batcher: Batcher | None = None
        # One thread, so that the numbers of large bodies are objects of Python one after another.
        self._parser = ThreadPoolExecutor(1, "parse")
        self._models: list[dict[str, Any]] = []
        middlewares = [web.middleware(_respond_to_errors)]
        if tokens:
            middlewares.append(_demand_token(tokens))
        app = web.Application(middlewares=middlewares)
        app.router.add_get("/health", self._health)
        app.router.add_get("/readyz", self._readiness)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/completions", self._complete)
        app.on_cleanup.append(self._close)
        self._app = app

    def start(self, teacher: Teacher) -> None:
        """Serves a teacher from now on. Call it on the event loop."""
        self._models = [
            {
                "id": self._model,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "logprobd",
                "max_model_len": teacher.max_model_len,
            }
        ]
        self._batcher = Batcher(teacher, self._queue_tokens)

    async def listen(
        self, host: str, port: int, certificate: Certificate | None = None
    ) -> tuple[web.AppRunner, str]:
        """Serves HTTP, or HTTPS with a certificate, until the runner that it returns, with the URL,
        is cleaned up. That waits for requests in progress.

        Raises OSError if the address cannot be used.
        """
        runner = web.AppRunner(
            self._app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_STOP_SECONDS,
        )
        await runner.setup()
        make_handler = functools.partial(
            _Handler,
            loop=asyncio.get_running_loop(),
            access_log=None,
            auto_decompress=False,  # A body has its Content-Length in memory.
            logger=_HTTP_LOG,
            **RUNNER_OPTIONS,
        )
        context = certificate.context if certificate else None
        listener = Listener(
            runner,
            host,
            port,
            make_handler=make_handler,
            context=context,
            connections_max=self._connections_max,
            stall_seconds=self._stall_seconds,
        )
        await listener.start()
        LOG.info(
            "listening on %s for at most %d connections, half of them of an address; bodies have "
            "at most %d MiB",
            *(listener.name, listener.connections_max, self._body_bytes_max >> 20),
        )
        return runner, listener.name

    async def _close(self, _: web.Application) -> None:
        self._parser.shutdown(wait=False)
        if self._batcher:
            await self._batcher.close()

    def _started(self) -> Batcher:
        if self._batcher is None:
            raise web.HTTPServiceUnavailable(
                text="the model is being loaded", headers={"Retry-After": "1"}
            )
        return self._batcher

    async def _health(self, _: web.Request) -> web.Response:
        """Says whether the model is loaded. A restart does not bring back a lost server."""
        self._started()
        return web.json_response({"status": "ok"})

    async def _readiness(self, _: web.Request) -> web.Response:
        """Says whether requests can be scored now."""
        self._started()
        if self._server:
            # Callers share a check, since a few that wait would take all threads.
            if self._readiness_check is None or self._readiness_check.done():
                self._readiness_check = asyncio.ensure_future(self._check_server(self._server))
            try:
                await asyncio.shield(self._readiness_check)
            except LogprobdError as error:
                # The address of the server stays in the log, since callers need no token here.
                raise web.HTTPServiceUnavailable(
                    text="the logprobd server is not ready: see the log of the gateway",
                    headers={"Retry-After": "1"},
                ) from error
        return web.json_response({"status": "ok"})

    async def _check_server(self, server: Client) -> None:
        try:
            await asyncio.to_thread(server.wait_ready, _READY_SECONDS)
        except LogprobdError as error:
            LOG.warning("not ready: %s", error)
            raise

    async def _list_models(self, _: web.Request) -> web.Response:
        self._started()
        return web.json_response({"object": "list", "data": self._models})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        batcher = self._started()
        completion = await self._receive(request, batcher)
        request[_TOKENS] = sum(len(prompt.tokens) for prompt in completion.prompts)
        scores: list[PromptScores] = []
        try:
            with batcher.reserve(cost_of(completion.prompts)):
                scores = await batcher.score(completion.prompts)
                return await self._send(request, completion, scores)
        finally:
            _free(completion.prompts)
            _free(scores)

    async def _receive(self, request: web.Request, batcher: Batcher) -> CompletionRequest:
        """Reads and parses a body, which is counted before it takes memory."""
        size = request.content_length
        if size is None:
            raise web.HTTPLengthRequired(
                text="the request has no Content-Length: send its body in one piece"
            )
        if "Content-Encoding" in request.headers:
            raise web.HTTPUnsupportedMediaType(
                text="the body has a Content-Encoding: send it uncompressed"
            )
        if size > self._body_bytes_max:
            raise web.HTTPRequestEntityTooLarge(
                self._body_bytes_max,
                size,
                text=f"the body has {size} bytes, expected at most {self._body_bytes_max} "
                "(--max-body-mib): send fewer ids or prompts in a request",
            )
        connection = connection_of(request)
        if connection is None:
            raise web.HTTPRequestTimeout(text="the client has left")
        stall = connection.sending()
        with batcher.reserve(math.ceil(size / BODY_BYTES_PER_TOKEN)):
            body = bytearray()
            try:
                while not request.content.at_eof():
                    stall.start()
                    part = b""
                    try:
                        part = await request.content.readany()
                    finally:
                        stall.stop(len(part))
                    body += part
                if size <= _INLINE_BYTES:
                    return self._parse(batcher, body)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._parser, self._parse, batcher, body)
            finally:
                body.clear()  # If the client has left, the parser's queue still refers to it.

    def _parse(self, batcher: Batcher, body: bytearray) -> CompletionRequest:
        completion = parse_request(body, self._model, batcher.tokens_max)
        batcher.check(completion.prompts)
        return completion

    async def _send(
        self, request: web.Request, completion: CompletionRequest, scores: Sequence[PromptScores]
    ) -> web.StreamResponse:
        """Returns a response once its last byte is written to the connection."""
        pieces = encode_response(self._model, completion, scores)
        piece: bytes | None = next(pieces)  # An error is not yet too late for a status.
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            await response.prepare(request)
            while piece:
                await response.write(piece)
                # A write does not wait if the socket takes everything at once.
                await asyncio.sleep(0)
                piece = next(pieces, None)
            await response.write_eof()
        except ConnectionError:
            pass  # the client has left
        except Exception:
            LOG.exception("a response broke off")
            if request.transport:  # An end of the body would make it look complete.
                request.transport.abort()
        return response
