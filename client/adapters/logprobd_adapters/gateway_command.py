"""The command logprobd-gateway.

logprobd-gateway --model DIR --address HOST:PORT
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import orjson
import torch
from logprobd import Client
from logprobd.errors import InvalidArgument, LogprobdError
from transformers import AutoModelForCausalLM

from logprobd_adapters.batcher import QUEUE_TOKENS
from logprobd_adapters.connections import CONNECTIONS_MAX, LOG
from logprobd_adapters.gateway import BODY_MIB_MAX, Gateway
from logprobd_adapters.gateway_log import log_thread
from logprobd_adapters.http_access import Certificate, Tokens, check_reachable
from logprobd_adapters.scorer import SERVER_OPTIONS, RemoteScorer, Scorer, connect
from logprobd_adapters.teacher import BATCH_TOKENS, Prompt, Teacher

_LISTEN = "127.0.0.1:8480"
_PORT_MAX = 65_535
_SERVER_WAIT_SECONDS = 600.0
_HEAD_CHECKED = {
    "transformers": "the head agrees with the model's",
    "vllm": "the head has the model's hidden size, its weights are not compared",
}


def _load(options: argparse.Namespace, server: Client | None) -> Teacher:
    started = time.monotonic()
    scorer: Scorer | None = None
    if server:
        LOG.info("waiting for the server at %s", server.address)
        server.wait_ready(_SERVER_WAIT_SECONDS)
        scorer = RemoteScorer(server, options.head)
    LOG.info("loading %s by %s", options.model, options.backbone)
    load = _load_in_vllm if options.backbone == "vllm" else _load_in_transformers
    teacher = load(options, scorer)
    LOG.info(
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
        allow_rounded_head=options.allow_rounded_head,
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
            LOG.error("%s; what was read before stays in use", error)
        else:
            LOG.info("read the %s again", type(part).__name__.lower())


async def _serve(
    options: argparse.Namespace, certificate: Certificate | None, tokens: Tokens | None
) -> None:
    loop = asyncio.get_running_loop()
    if parts := [part for part in (certificate, tokens) if part]:
        loop.add_signal_handler(signal.SIGHUP, _reload, parts)
    server = None
    if not options.local:
        server = connect(**{name: getattr(options, name) for name in SERVER_OPTIONS})
    name = options.served_model_name or options.model
    gateway = Gateway(
        name,
        options.queue_tokens,
        tokens=tokens,
        server=server,
        body_mib_max=options.max_body_mib,
        connections_max=options.max_connections,
    )
    host, port = options.listen
    async with contextlib.AsyncExitStack() as stack:
        if server:
            stack.callback(server.close)
        runner, url = await gateway.listen(host, port, certificate)
        stack.push_async_callback(runner.cleanup)
        LOG.info("requests get 503 until the model is loaded")
        gateway.start(await loop.run_in_executor(None, _load, options, server))
        # Large bodies cause full collections, each of which would stop the process for 0.2 s to
        # walk the objects of Torch and of the model.
        gc.collect()
        gc.freeze()
        LOG.info("ready: %s", url)
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
        LOG.info("stopping: no new connections, requests in progress are answered")


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) <= _PORT_MAX):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port to {_PORT_MAX}")
    return host.strip("[]"), int(port)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
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
  GET /readyz            the same, but 503 also while the logprobd server is not ready
  GET /v1/models         the name and max_model_len
  POST /v1/completions   log-probabilities of the tokens of prompts; no text is generated
    prompt                    token ids, or a list of such lists
    prompt_logprobs           lists the K most likely tokens and the prompt's own at each position,
                              as {id: {logprob, rank}}; K is from 0 to 128
    prompt_logprob_token_ids  ids to score: a list for each row, or one for all rows. They come back
                              as "prompt_token_id_logprobs", base64 of a float32 .npy [rows, n]
    prompt_logprob_start      first row of these; row i predicts token i + 1. Default: 0
    temperature               divisor of the logits, from 1e-4 to 1e4. Default: 1
    model, max_tokens         optional; max_tokens is 1
  Fields that cannot change a score, such as seed, top_p, stop and user, have no effect; any other
  field is refused.

errors are JSON: 400 for a request to change, 404 for another model, 411 without Content-Length, 413
for a body beyond --max-body-mib, 429 with Retry-After while too many tokens are in progress, 503
with Retry-After while the logprobd server cannot be reached, 502 when it refuses the gateway (its
token, certificate or head), which a retry does not mend. A connection is closed when it makes no
progress for 30 s, or for longer at less than 1 MiB a second, or when it is idle for 60 s.

On another address than loopback, --listen needs --https-cert, --https-key and --tokens, or
--insecure. A request is sent with "Authorization: Bearer TOKEN", or with the token as the password
of HTTP Basic (https://:TOKEN@HOST:PORT); /health and /readyz need none. On SIGHUP these files are
read again.
--tls-* and --token-file are for the logprobd server; without them LOGPROBD_TLS_CA,
LOGPROBD_TLS_CERT, LOGPROBD_TLS_KEY, LOGPROBD_TLS_SERVER_NAME and LOGPROBD_TOKEN are used.
"""


# The gateway presents these to the logprobd server; see connect.
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
    head.add_argument(
        "--allow-rounded-head",
        action="store_true",
        help="accept a head that is the model's, rounded to a coarser type, such as a bf16 head of "
        "an fp32 model",
    )
    for name, (metavar, text) in _CREDENTIALS.items():
        head.add_argument(name, metavar=metavar, help=text)
    http = parser.add_argument_group("serving")
    http.add_argument(
        "--listen",
        type=_address,
        default=_LISTEN,
        metavar="HOST:PORT",
        help=f"address of HTTP; port 0 takes a free port. Default: {_LISTEN}",
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
        help="while so many tokens are in progress, from the first byte of a request to the last "
        "of its response, requests get 429; 64 ids to score, and 1 KiB of a body that is being "
        "read, count as a token. Bounds memory, to 2 KiB for each and the last request that was "
        f"accepted. Default: {QUEUE_TOKENS}",
    )
    http.add_argument(
        "--max-body-mib",
        type=_positive,
        default=BODY_MIB_MAX,
        metavar="MIB",
        help="largest body of a request. Everything else waits, /health too, while its numbers "
        f"are read, some 10 ms for each MiB. Default: {BODY_MIB_MAX}",
    )
    http.add_argument(
        "--max-connections",
        type=_positive,
        default=CONNECTIONS_MAX,
        metavar="N",
        help="most connections, half of which one address may have; others are closed at once. "
        "They take at most half of the files that the process may open. A connection takes up to "
        f"1.5 MiB. Default: {CONNECTIONS_MAX}",
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
    LOG.setLevel(logging.DEBUG if options.verbose else logging.INFO)
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
    # While the model is being loaded, in a thread, Ctrl-C ends the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with log_thread():
        if options.insecure:
            LOG.warning("--insecure: whoever reaches the port can use the model, in the clear")
        try:
            asyncio.run(_serve(options, certificate, tokens))
        except (LogprobdError, OSError, ValueError, ImportError) as error:
            LOG.error("%s", error)
            sys.exit(1)


if __name__ == "__main__":
    main()
