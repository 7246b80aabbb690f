"""A teacher over HTTP, in the protocol of vLLM's completions, and the command logprobd-gateway.

    logprobd-gateway --model DIR --address HOST:PORT

Tokens go in, and log-probabilities come out. No text is generated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import math
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import orjson
import torch
from aiohttp import web
from logprobd.errors import InvalidArgument, LogprobdError, NotFound, Overloaded
from transformers import AutoModelForCausalLM

from logprobd_adapters.completions import answer, parse_completion
from logprobd_adapters.http_access import AccessError, Certificate, Tokens, check_reachable
from logprobd_adapters.scorer import SERVER_OPTIONS, RemoteScorer, Scorer, connect
from logprobd_adapters.teacher import Prompt, PromptScores, Teacher

LISTEN = "127.0.0.1:8480"
BATCH_TOKENS = 8192
QUEUE_TOKENS = 262_144

_BODY_BYTES_MAX = 64 << 20
_RETRY_SECONDS_MAX = 60
_SERVER_WAIT_SECONDS = 600.0
_STOP_SECONDS = 60.0
_HEAD_CHECKED = {
    "transformers": "the head agrees with the model's",
    "vllm": "the head has the model's hidden size, its weights are not compared",
}
_TOKENS = web.RequestKey("tokens", int)  # of a request, for the log

_log = logging.getLogger("logprobd-gateway")


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


async def _answer_errors(
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
        _log.error("%s: %s", type(error).__name__, error)
        response = _error(503, str(error), "1")
    except Exception as error:
        _log.exception("%s %s failed", request.method, request.path)
        response = _error(500, f"{type(error).__name__}: {error}")
    _log.debug(
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
        if request.path != "/health":
            tokens.check(request.headers.get("Authorization"))
        return await handler(request)

    return web.middleware(check)


class Gateway:
    """The HTTP application. Until `start` is called it answers 503, so that clients wait.

    Args:
        model: name of the model in requests and answers.
        queue_tokens: see Batcher.
        tokens: callers need one of them, except for /health. None: everybody may call.
    """

    def __init__(
        self, model: str, queue_tokens: int = QUEUE_TOKENS, tokens: Tokens | None = None
    ) -> None:
        self._model = model
        self._queue_tokens = queue_tokens
        self._batcher: Batcher | None = None
        self._models: list[dict[str, Any]] = []
        middlewares = [web.middleware(_answer_errors)]
        if tokens:
            middlewares.append(_demand_token(tokens))
        app = web.Application(middlewares=middlewares, client_max_size=_BODY_BYTES_MAX)
        app.router.add_get("/health", self._health)
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
        self._started()
        return web.json_response({"status": "ok"})

    async def _list_models(self, _: web.Request) -> web.Response:
        self._started()
        return web.json_response({"object": "list", "data": self._models})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        batcher = self._started()
        completion = parse_completion(await request.read(), self._model)
        request[_TOKENS] = sum(len(prompt.tokens) for prompt in completion.prompts)
        scores = await batcher.score(completion.prompts)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        with contextlib.suppress(ConnectionError):  # the client has left
            await response.prepare(request)
            for piece in answer(self._model, completion, scores):
                await response.write(piece)
        return response


def _load(options: argparse.Namespace) -> Teacher:
    started = time.monotonic()
    scorer: Scorer | None = None
    if not options.local:
        client = connect(**{name: getattr(options, name) for name in SERVER_OPTIONS})
        _log.info("waiting for the server at %s", client.address)
        client.wait_ready(_SERVER_WAIT_SECONDS)
        scorer = RemoteScorer(client, options.head)
    _log.info("loading %s by %s", options.model, options.backbone)
    load = _load_in_vllm if options.backbone == "vllm" else _load_in_transformers
    teacher = load(options, scorer)
    _log.info(
        "loaded in %.1f s, max_model_len %d; %s",
        *(time.monotonic() - started, teacher.max_model_len, _HEAD_CHECKED[options.backbone]),
    )
    return teacher


def _load_in_transformers(options: argparse.Namespace, scorer: Scorer | None) -> Teacher:
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    return Teacher.from_model(
        model.to(options.device).eval(),
        scorer,
        max_model_len=options.max_model_len,
        batch_tokens=options.batch_tokens,
    )


def _load_in_vllm(options: argparse.Namespace, scorer: Scorer | None) -> Teacher:
    assert scorer  # main refuses --local
    from logprobd_adapters.vllm import VllmBackbone  # noqa: PLC0415  (needs vllm)

    arguments = {"dtype": options.dtype}
    if options.max_model_len:
        arguments["max_model_len"] = options.max_model_len
    try:
        backbone = VllmBackbone(options.model, **arguments | (options.vllm_arguments or {}))
    except TypeError as error:
        raise InvalidArgument(f"vLLM does not take these arguments: {error}") from error
    teacher = Teacher(backbone.hidden_states, scorer, backbone.max_model_len, options.batch_tokens)
    teacher.score([Prompt([0, 0])])  # fails now if the head has another size
    return teacher


def _reload(parts: Sequence[Certificate | Tokens]) -> None:
    for part in parts:
        try:
            part.reload()
        except InvalidArgument as error:
            _log.error("%s; what was read before stays in use", error)
    _log.info("read certificate and tokens again")


async def _serve(
    options: argparse.Namespace, certificate: Certificate | None, tokens: Tokens | None
) -> None:
    loop = asyncio.get_running_loop()
    if parts := [part for part in (certificate, tokens) if part]:
        loop.add_signal_handler(signal.SIGHUP, _reload, parts)
    gateway = Gateway(options.served_model_name or options.model, options.queue_tokens, tokens)
    host, port = options.listen
    runner, url = await gateway.listen(host, port, certificate)
    try:
        _log.info("listening on %s; /health is 503 until the model is loaded", url)
        gateway.start(await loop.run_in_executor(None, _load, options))
        _log.info("ready: %s", url)
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
        _log.info("stopping: no new connections, requests in progress are answered")
    finally:
        await runner.cleanup()


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


_DESCRIPTION = """\
Serves a teacher for distillation over HTTP: tokens in, log-probabilities out. The body of a Hugging
Face model runs in this process, or in vLLM with --backbone vllm, and a logprobd server, or the
operator logprobd_ops with --local, scores the tokens with the model's head. Clients of vLLM that
ask for prompt_logprobs work with it, such as TRL's.
"""

_EPILOG = """\
example:
  logprobd --model Qwen/Qwen3-8B &
  logprobd-gateway --model Qwen/Qwen3-8B &
  curl http://127.0.0.1:8480/v1/completions -d \\
    '{"prompt": [9707, 11, 1879], "max_tokens": 1, "prompt_logprobs": 2}'

requests:
  GET /health            200 when the model is loaded, 503 before
  GET /v1/models         the name and max_model_len
  POST /v1/completions   log-probabilities of the tokens of prompts; no text is generated
    prompt                    token ids, or a list of such lists
    prompt_logprobs           lists the K most likely tokens and the prompt's own at each position,
                              as {id: {logprob, rank}}; K is from 0 to 128
    prompt_logprob_token_ids  ids to score: a list for each row, or one for all rows. They come back
                              as "prompt_token_id_logprobs", base64 of a float32 .npy [rows, n]
    prompt_logprob_start      first row of these; row i predicts token i + 1. Default: 0
    temperature               divisor of the logits, above 0. Default: 1
    model, max_tokens         optional; max_tokens is 1

errors are JSON: 400 for a request to change, 404 for another model, 429 with Retry-After while too
many tokens wait, 503 with Retry-After when the logprobd server cannot be reached.

On another address than loopback, --listen needs --https-cert, --https-key and --tokens, or
--insecure. A request is sent with "Authorization: Bearer TOKEN", or with the token as the password
of HTTP Basic (https://:TOKEN@HOST:PORT); /health needs none. On SIGHUP these files are read again.
--tls-* and --token-file are for the logprobd server; without them LOGPROBD_TLS_CA,
LOGPROBD_TLS_CERT, LOGPROBD_TLS_KEY, LOGPROBD_TLS_SERVER_NAME and LOGPROBD_TOKEN are used.
"""


# What the gateway presents to the logprobd server, see connect.
_CREDENTIALS = {
    "--tls-ca": ("FILE", "PEM file with the CAs that may have issued the server's certificate"),
    "--tls-cert": ("FILE", "PEM file with a certificate for servers with --tls-client-ca"),
    "--tls-key": ("FILE", "PEM file with the private key of --tls-cert"),
    "--tls-server-name": ("NAME", "name in the server's certificate. Default: that of --address"),
    "--token-file": ("FILE", "file with the token for servers with --tokens"),
}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logprobd-gateway",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", required=True, metavar="DIR", help="folder or id of a Hugging Face causal model"
    )
    model.add_argument(
        "--served-model-name", metavar="NAME", help="its name in requests. Default: DIR"
    )
    model.add_argument(
        "--backbone",
        default="transformers",
        choices=tuple(_HEAD_CHECKED),
        help="what runs the body. vllm needs vLLM 0.33 and a server, and loads no head. Default: "
        "transformers",
    )
    model.add_argument(
        "--vllm-arguments",
        type=_json_object,
        metavar="JSON",
        help="further arguments of vllm.LLM for --backbone vllm, such as "
        '\'{"tensor_parallel_size": 2, "gpu_memory_utilization": 0.7}\'',
    )
    model.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="torch device of the body in transformers. Default: cuda if there is one, otherwise "
        "cpu",
    )
    model.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="type of the body; auto takes that of the checkpoint. Default: auto",
    )
    model.add_argument(
        "--max-model-len",
        type=_positive,
        metavar="TOKENS",
        help="most tokens of a prompt; a longer one is refused. Default: max_position_embeddings "
        "of the model's config",
    )
    head = parser.add_argument_group("head")
    head.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="logprobd server of the same model, or several, separated by commas. Default: "
        "LOGPROBD_ADDRESS, else 127.0.0.1:8470",
    )
    head.add_argument(
        "--head", default="", metavar="NAME", help="name of the server's head, if it has several"
    )
    head.add_argument(
        "--local",
        action="store_true",
        help="score in this process by logprobd_ops, without a server",
    )
    for name, (metavar, text) in _CREDENTIALS.items():
        head.add_argument(name, metavar=metavar, help=text)
    http = parser.add_argument_group("serving")
    http.add_argument(
        "--listen",
        type=_address,
        default=LISTEN,
        metavar="HOST:PORT",
        help=f"address of HTTP; port 0 takes a free port. Default: {LISTEN}",
    )
    http.add_argument(
        "--https-cert",
        metavar="FILE",
        help="PEM file with the certificate of HTTPS and its chain. Default: HTTP",
    )
    http.add_argument("--https-key", metavar="FILE", help="its private key, without a passphrase")
    http.add_argument(
        "--tokens",
        metavar="FILE",
        help="file of the tokens that callers need, with the scope score; as of logprobd --tokens, "
        "and written by `logprobctl token new`",
    )
    http.add_argument(
        "--insecure",
        action="store_true",
        help="allow another address than loopback without HTTPS and tokens",
    )
    http.add_argument(
        "--batch-tokens",
        type=_positive,
        default=BATCH_TOKENS,
        metavar="TOKENS",
        help="most tokens of prompts that run through the body together, padding included; bounds "
        f"its memory. A longer prompt runs alone. Default: {BATCH_TOKENS}",
    )
    http.add_argument(
        "--queue-tokens",
        type=_positive,
        default=QUEUE_TOKENS,
        metavar="TOKENS",
        help=f"while so many tokens wait or are scored, requests get 429. Default: {QUEUE_TOKENS}",
    )
    http.add_argument("--verbose", action="store_true", help="log a line for each request")
    return parser


def main() -> None:
    """Runs the command logprobd-gateway."""
    parser = _parser()
    options = parser.parse_args()
    if options.local and any(getattr(options, name) for name in SERVER_OPTIONS):
        parser.error("--local needs no server: leave out --address, --tls-* and --token-file")
    if options.local and options.backbone == "vllm":
        parser.error("the head is not in vLLM: serve it by logprobd and leave out --local")
    if options.vllm_arguments is not None and options.backbone != "vllm":
        parser.error("--vllm-arguments needs --backbone vllm")
    if (options.https_cert is None) != (options.https_key is None):
        parser.error("--https-cert and --https-key belong together: give both")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    _log.setLevel(logging.DEBUG if options.verbose else logging.INFO)
    try:
        check_reachable(
            options.listen[0],
            has_tls=options.https_cert is not None,
            has_tokens=options.tokens is not None,
            insecure=options.insecure,
        )
        certificate = options.https_cert and Certificate(options.https_cert, options.https_key)
        tokens = options.tokens and Tokens(options.tokens)
    except InvalidArgument as error:
        parser.error(str(error))
    if options.insecure:
        _log.warning("--insecure: whoever reaches the port can use the model, in the clear")
    # While the model is being loaded, in a thread, Ctrl-C ends the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        asyncio.run(_serve(options, certificate, tokens))
    except (LogprobdError, OSError, ValueError, ImportError) as error:
        _log.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
