"""A teacher over HTTP, in the protocol of vLLM's completions.

Tokens go in, and log-probabilities come out. No text is generated. gateway_command serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web
from logprobd import Client
from logprobd.errors import InvalidArgument, LogprobdError, NotFound, Overloaded

from logprobd_adapters.completions import encode_response, parse_request
from logprobd_adapters.http_access import AccessError, Certificate, Tokens
from logprobd_adapters.teacher import Prompt, PromptScores, Teacher

QUEUE_TOKENS = 262_144

_BODY_BYTES_MAX = 64 << 20
_RETRY_SECONDS_MAX = 60
_STOP_SECONDS = 60.0
_READY_SECONDS = 0.5  # the probes of Kubernetes wait 1 s by default
_OPEN_PATHS = ("/health", "/readyz")  # for probes, which have no token
_TOKENS = web.RequestKey("tokens", int)  # of a request, for the log

LOG = logging.getLogger("logprobd-gateway")


class Batcher:
    """Scores prompts of concurrent requests together, in the order in which they came.

    A batch leaves as soon as the one before it is done. Use it from the event loop.

    Args:
        teacher: scores batches in a thread of the batcher.
        queue_tokens: while so many tokens wait or are being scored, no request is accepted. Also
            the most tokens of a request, if that is not max_model_len.
    """

    def __init__(self, teacher: Teacher, queue_tokens: int) -> None:
        self._teacher = teacher
        self._queue_tokens = queue_tokens
        self._tokens = 0
        self._seconds_per_token = 0.0
        self._waiting: list[tuple[Prompt, asyncio.Future[PromptScores]]] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "score")
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()

    async def score(self, prompts: Sequence[Prompt]) -> list[PromptScores]:
        """Scores the prompts of a request. Cancelling it takes those that wait off the queue.

        Raises InvalidArgument if a prompt cannot be scored, Overloaded if the queue is full, before
        any prompt is queued, and the errors of the scorer.
        """
        for prompt in prompts:
            self._teacher.check(prompt)
        tokens = sum(len(prompt.tokens) for prompt in prompts)
        tokens_max = max(self._queue_tokens, self._teacher.max_model_len)
        if tokens > tokens_max:
            raise InvalidArgument(
                f"the request has {tokens} tokens, expected at most {tokens_max}: send fewer "
                "prompts in a request"
            )
        if self._tokens >= self._queue_tokens:
            seconds = math.ceil(self._tokens * self._seconds_per_token)
            raise Overloaded(
                f"{self._tokens} tokens are waiting, of at most {self._queue_tokens}: send the "
                "request again later",
                retry_after=min(max(seconds, 1), _RETRY_SECONDS_MAX),
            )
        futures = [self._submit(prompt) for prompt in prompts]
        self._wake.set()
        try:
            return await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()

    def _submit(self, prompt: Prompt) -> asyncio.Future[PromptScores]:
        future: asyncio.Future[PromptScores] = asyncio.get_running_loop().create_future()
        self._tokens += len(prompt.tokens)
        future.add_done_callback(lambda _: self._leave(prompt))
        self._waiting.append((prompt, future))
        return future

    def _leave(self, prompt: Prompt) -> None:
        self._tokens -= len(prompt.tokens)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batch := self._take():
                started = loop.time()
                prompts = [prompt for prompt, _ in batch]
                results = await loop.run_in_executor(self._thread, self._score, prompts)
                tokens = sum(len(prompt.tokens) for prompt in prompts)
                self._seconds_per_token = (loop.time() - started) / tokens
                for (_, future), result in zip(batch, results, strict=True):
                    if future.done():
                        continue
                    if isinstance(result, Exception):
                        future.set_exception(result)
                    else:
                        future.set_result(result)

    def _take(self) -> list[tuple[Prompt, asyncio.Future[PromptScores]]]:
        """Takes the next batch off the queue; it is empty if nothing waits."""
        waiting = [each for each in self._waiting if not each[1].done()]
        count = self._teacher.batch_size(len(prompt.tokens) for prompt, _ in waiting)
        self._waiting = waiting[count:]
        return waiting[:count]

    def _score(self, prompts: Sequence[Prompt]) -> list[PromptScores | Exception]:
        """Scores a batch. A prompt that fails, for lack of memory perhaps, fails alone."""
        try:
            return list(self._teacher.score(prompts))
        except Exception as error:
            failure = error
        is_of_all = isinstance(failure, LogprobdError) and not isinstance(failure, InvalidArgument)
        if is_of_all or len(prompts) == 1:
            return [failure] * len(prompts)
        failure = failure.with_traceback(None)  # which holds the tensors of the batch
        return list(itertools.chain.from_iterable(self._score([prompt]) for prompt in prompts))


def _error(status: int, message: str, retry_after: str | None = None) -> web.Response:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    body = {"error": {"message": message, "type": HTTPStatus(status).phrase, "code": status}}
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )


async def _respond_to_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turns errors into JSON and writes a line to the log for each request, at level DEBUG."""
    started = time.perf_counter()
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
    except LogprobdError as error:
        LOG.error("%s: %s", type(error).__name__, error)
        response = _error(503, str(error), "1")
    except Exception as error:
        LOG.exception("%s %s failed", request.method, request.path)
        response = _error(500, f"{type(error).__name__}: {error}")
    LOG.debug(
        "%s %s %s %d, %d tokens, %.1f ms",
        *(request.remote, request.method, request.path, response.status),
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
    """

    def __init__(
        self,
        model: str,
        queue_tokens: int = QUEUE_TOKENS,
        tokens: Tokens | None = None,
        server: Client | None = None,
    ) -> None:
        self._model = model
        self._queue_tokens = queue_tokens
        self._server = server
        self._batcher: Batcher | None = None
        self._models: list[dict[str, Any]] = []
        middlewares = [web.middleware(_respond_to_errors)]
        if tokens:
            middlewares.append(_demand_token(tokens))
        app = web.Application(middlewares=middlewares, client_max_size=_BODY_BYTES_MAX)
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
            self._app, access_log=None, handler_cancellation=True, shutdown_timeout=_STOP_SECONDS
        )
        await runner.setup()
        context = certificate.context if certificate else None
        await web.TCPSite(runner, host, port, ssl_context=context).start()
        host, port = runner.addresses[0][:2]
        scheme = "https" if certificate else "http"
        return runner, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def _close(self, _: web.Application) -> None:
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
            try:
                await asyncio.to_thread(self._server.wait_ready, _READY_SECONDS)
            except LogprobdError as error:
                LOG.warning("not ready: %s", error)
                # The address of the server stays in the log, since callers need no token here.
                raise web.HTTPServiceUnavailable(
                    text="the logprobd server is not ready: see the log of the gateway",
                    headers={"Retry-After": "1"},
                ) from error
        return web.json_response({"status": "ok"})

    async def _list_models(self, _: web.Request) -> web.Response:
        self._started()
        return web.json_response({"object": "list", "data": self._models})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        batcher = self._started()
        completion = parse_request(await request.read(), self._model)
        request[_TOKENS] = sum(len(prompt.tokens) for prompt in completion.prompts)
        scores = await batcher.score(completion.prompts)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        with contextlib.suppress(ConnectionError):  # the client has left
            await response.prepare(request)
            for piece in encode_response(self._model, completion, scores):
                await response.write(piece)
        return response
