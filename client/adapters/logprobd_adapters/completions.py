"""Requests to /v1/completions and their responses, in the protocol of vLLM."""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from logprobd.errors import InvalidArgument, NotFound
from numpy.typing import NDArray

from logprobd_adapters.teacher import TOP_K_MAX, Prompt, PromptScores

_CANDIDATES_MAX = 1 << 24  # of a request: 64 MiB of scores
_BLOCK_ENTRIES = 8192
_PIECE_BYTES = 1 << 16  # of a response, at least
# Masks of 16 bytes for texts of 0 to 16 bytes: the bytes of the text, and spaces after it.
_KEPT = np.array([b"\xff" * size for size in range(17)], "S16").view(np.uint64).reshape(17, 2)
_SPACES = ~_KEPT & np.uint64(0x2020202020202020)
# Fields of vLLM's completions that request something that a teacher does not do, and their values
# that request nothing.
_NOT_SERVED = {"stream": (False,), "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": ()}


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """The contents of a request to /v1/completions."""

    prompts: list[Prompt]
    has_logprobs: bool
    """Whether it has prompt_logprobs."""
    candidates_start: int | None
    """prompt_logprob_start, or None if it has no prompt_logprob_token_ids."""


def _integer(body: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{name} is {value!r}, expected an integer from {low} to {high}")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def parse_request(data: bytes, model: str) -> CompletionRequest:
    """Reads the body of a request. Raises InvalidArgument or NotFound if it cannot be served."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidArgument("the body is no JSON object")
    if body.get("model") not in (None, model):
        raise NotFound(f"no model {body['model']!r}, this gateway serves {model!r}")
    for name, values in _NOT_SERVED.items():
        if body.get(name) is not None and body[name] not in values:
            raise InvalidArgument(
                f"{name} is {body[name]!r}: this gateway scores prompts and generates no text"
            )
    if body.get("max_tokens") not in (None, 0, 1):
        raise InvalidArgument(
            f"max_tokens is {body['max_tokens']!r}, expected 1: this gateway generates no text"
        )
    prompt = body.get("prompt")
    prompts = [prompt] if _are_ids(prompt) else prompt
    if not (isinstance(prompts, list) and prompts and all(map(_are_ids, prompts))):
        raise InvalidArgument(
            "prompt must be a list of token ids, or a list of such lists: this gateway has no "
            "tokenizer, and no prompt may be empty"
        )
    top_k = _integer(body, "prompt_logprobs", -1, 0, TOP_K_MAX)
    ids = body.get("prompt_logprob_token_ids")
    if top_k < 0 and ids is None:
        raise InvalidArgument("the request has no prompt_logprobs and no prompt_logprob_token_ids")
    if ids is not None and len(prompts) > 1:
        raise InvalidArgument(
            "prompt_logprob_token_ids needs a single prompt: send a request for each, which are "
            "scored together"
        )
    temperature = body.get("temperature")
    if temperature is None:
        temperature = 1.0
    elif type(temperature) not in (int, float):
        raise InvalidArgument(f"temperature is {temperature!r}, expected a number")
    length = min(map(len, prompts))
    start = _integer(body, "prompt_logprob_start", 0, 0, length - 1)
    first = start if top_k < 0 else 0
    candidates = None
    if ids is not None:
        of_rows = _parse_candidates(ids, length - 1 - start)
        candidates = np.pad(of_rows, ((start - first, 0), (0, 0)), constant_values=-1)
    return CompletionRequest(
        [Prompt(tokens, max(top_k, 0), temperature, first, candidates) for tokens in prompts],
        top_k >= 0,
        None if ids is None else start,
    )


def _parse_candidates(ids: Any, rows: int) -> NDArray[np.int64]:
    """Returns [rows, n] ids from a list for each row, or from one list for all rows."""
    is_list = _are_ids(ids)
    if not is_list and not (
        isinstance(ids, list)
        and len(ids) == rows
        and all(row == [] or _are_ids(row) for row in ids)
    ):
        raise InvalidArgument(
            f"prompt_logprob_token_ids must be a list of ids, or one for each of {rows} rows, "
            "which are those from prompt_logprob_start to the one before the prompt's last"
        )
    lists = [ids] if is_list else ids
    width = max(map(len, lists), default=0)
    if rows * width > _CANDIDATES_MAX:
        raise InvalidArgument(
            f"prompt_logprob_token_ids has {width} ids for {rows} rows, expected a product of at "
            f"most {_CANDIDATES_MAX}: send fewer ids, or a shorter prompt"
        )
    try:
        matrix = np.array([row + [-1] * (width - len(row)) for row in lists], np.int64)
    except OverflowError:
        raise InvalidArgument("an id of prompt_logprob_token_ids is beyond 64 bits") from None
    return np.broadcast_to(matrix.reshape(len(lists), width), (rows, width))


def _texts(numbers: NDArray[Any]) -> NDArray[np.bytes_]:
    """Returns the JSON of each number, at most 16 bytes, padded with spaces to equal lengths.

    NumPy moves the texts, because an object of Python for each takes several times as long.
    """
    flat = np.ascontiguousarray(numbers).reshape(-1)
    text = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
    commas = np.flatnonzero(np.frombuffer(text, np.uint8) == ord(","))
    begins = np.append(1, commas + 1)
    lengths = np.append(commas, len(text) - 1) - begins
    windows = np.ndarray(len(text), "V16", text + bytes(16), strides=(1,))
    texts = windows[begins].view(np.uint64).reshape(-1, 2)
    texts &= _KEPT.take(lengths, 0)
    texts |= _SPACES.take(lengths, 0)
    return texts.view("S16").reshape(numbers.shape).astype(f"S{lengths.max()}")


def _around(before: bytes, integers: NDArray[np.int64], after: bytes) -> NDArray[np.bytes_]:
    """Returns the JSON of each integer, at least -1, between two texts, padded with spaces to equal
    lengths. The text of -1 is arbitrary."""
    # The size is a power of two, so that few tables are made.
    return _table(1 << int(integers.max()).bit_length(), before, after)[integers]


@functools.cache
def _table(count: int, before: bytes, after: bytes) -> NDArray[np.bytes_]:
    texts = np.char.add(np.char.add(before, np.arange(count).astype("S")), after)
    longest = len(texts[-1])
    return np.char.ljust(texts, longest).astype(f"S{longest}")


def _rows(tokens: NDArray[np.int64], scores: PromptScores) -> bytes:
    """Returns a comma and an object for each row, one at least, of the most likely tokens and, if
    it is not among them, the row's own of `tokens`: {id: {"logprob": ..., "rank": ...}}.

    A row whose logits are not finite is null. Rows have the same number of bytes, with spaces.
    """
    count, top_k = scores.top_ids.shape
    ids = np.column_stack([scores.top_ids, tokens])
    logprobs = np.column_stack([scores.top_logprobs, scores.logprobs])
    ranks = np.empty_like(ids)
    ranks[:, :top_k], ranks[:, top_k] = range(1, top_k + 1), scores.ranks
    fields = {
        "id": _around(b',"', ids, b'":{"logprob":'),
        # JSON has no infinity.
        "logprob": _texts(np.maximum(logprobs, np.finfo(np.float32).min)),
        "rank": _around(b',"rank":', ranks, b"}"),
    }
    entry = np.dtype([(name, texts.dtype) for name, texts in fields.items()])
    rows = np.empty(count, [("comma", "S1"), ("entries", entry, (top_k + 1,)), ("end", "S1")])
    rows["comma"], rows["end"] = b",", b"}"
    for name, texts in fields.items():
        rows["entries"][name] = texts
    characters = rows.view(np.uint8).reshape(count, -1)
    characters[:, 1] = ord("{")
    characters[scores.ranks <= top_k, -1 - entry.itemsize : -1] = ord(" ")
    null = b",null".ljust(rows.itemsize)
    characters[scores.ranks == 0] = np.frombuffer(null, np.uint8)
    return characters.tobytes()


def _blocks(prompt: Prompt, scores: PromptScores) -> Iterator[bytes]:
    """Yields the rows of a prompt in blocks, whose arrays stay in the CPU's caches."""
    tokens = np.array(prompt.tokens[prompt.start + 1 :], np.int64)
    block = max(1, _BLOCK_ENTRIES // (scores.top_ids.shape[1] + 1))
    for begin in range(0, len(tokens), block):
        rows = slice(begin, begin + block)
        fields = [getattr(scores, field.name)[rows] for field in dataclasses.fields(scores)]
        yield _rows(tokens[rows], PromptScores(*fields))


def _npy(array: NDArray[np.float32]) -> str:
    """Returns an array as base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def encode_response(
    model: str, request: CompletionRequest, scores: Sequence[PromptScores]
) -> Iterator[bytes]:
    """Yields the JSON of a response in pieces, from the scores of the prompts of the request.

    A piece can be sent while the next one is made. None is empty.
    """
    tokens = sum(len(prompt.tokens) for prompt in request.prompts)
    fields = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }
    text = orjson.dumps(fields)[:-1] + b',"choices":['
    for index, (prompt, of_prompt) in enumerate(zip(request.prompts, scores, strict=True)):
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
        if request.candidates_start is not None:
            rows = of_prompt.candidate_logprobs[request.candidates_start - prompt.start :]
            choice["prompt_token_id_logprobs"] = _npy(rows)
        text += b"," * (index > 0) + orjson.dumps(choice)[:-1] + b',"prompt_logprobs":'
        if request.has_logprobs:
            text += b"[null"  # the first token, which no row predicts
            for block in _blocks(prompt, of_prompt):
                text += block
                if len(text) >= _PIECE_BYTES:
                    yield text
                    text = b""
            text += b"]}"
        else:
            text += b"null}"
    yield text + b"]}"
