"""Requests to /v1/completions and their answers, in the protocol of vLLM."""

from __future__ import annotations

import base64
import dataclasses
import io
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from logprobd.errors import InvalidArgument, NotFound
from numpy.typing import NDArray

from logprobd_adapters.teacher import TOP_K_MAX, Prompt, PromptScores

_CANDIDATES_MAX = 1 << 24  # of a request: 64 MiB of scores
# Fields of vLLM's completions that request something that a teacher does not do, and their values
# that request nothing.
_NOT_SERVED = {"stream": (False,), "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": ()}


@dataclasses.dataclass(frozen=True)
class Completion:
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


def parse_completion(data: bytes, model: str) -> Completion:
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
        raise InvalidArgument(f"temperature is {temperature!r}, expected a number above 0")
    length = min(map(len, prompts))
    start = _integer(body, "prompt_logprob_start", 0, 0, length - 1)
    first = start if top_k < 0 else 0
    candidates = None
    if ids is not None:
        of_rows = _parse_candidates(ids, length - 1 - start)
        candidates = np.pad(of_rows, ((start - first, 0), (0, 0)), constant_values=-1)
    return Completion(
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


def _numbers(values: NDArray[Any]) -> list[bytes]:
    """Returns the JSON of each value of an array."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if not flat.size:
        return []
    return orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")


def _logprobs(values: NDArray[np.float32]) -> list[bytes]:
    return _numbers(np.maximum(values, np.finfo(np.float32).min))  # JSON has no infinity


def _prompt_logprobs(prompt: Prompt, scores: PromptScores) -> bytes:
    """Returns JSON: null for the first token, and for each other one an object of the most likely
    tokens and the token itself, {id: {"logprob": ..., "rank": ...}}.

    A row whose logits are not finite is null. Texts are joined because a dictionary for each entry
    takes ten times as long, several milliseconds for a short prompt.
    """
    top_k = scores.top_ids.shape[1]
    top = b"{" + b",".join(b'"%%b":{"logprob":%%b,"rank":%d}' % (i + 1) for i in range(top_k))
    begin, end = top + b"," * (top_k > 0), top + b"}"
    rows = [b"null"]
    tokens = prompt.tokens[prompt.start + 1 :]
    of_tokens = zip(tokens, _logprobs(scores.logprobs), scores.ranks.tolist(), strict=True)
    for token, logprob, rank in of_tokens:
        if rank == 0:
            rows.append(b"null")
        elif rank <= top_k:
            rows.append(end)
        else:
            rows.append(begin + b'"%d":{"logprob":%b,"rank":%d}}' % (token, logprob, rank))
    is_finite = scores.ranks > 0
    values = [b""] * (2 * top_k * int(is_finite.sum()))
    values[::2] = _numbers(scores.top_ids[is_finite])
    values[1::2] = _logprobs(scores.top_logprobs[is_finite])
    return b"[%b]" % b",".join(rows) % tuple(values)


def _npy(array: NDArray[np.float32]) -> str:
    """Returns an array as base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def answer(model: str, completion: Completion, scores: Sequence[PromptScores]) -> bytes:
    """Returns the JSON of an answer, from the scores of the prompts of the request."""
    choices = []
    for index, (prompt, of_prompt) in enumerate(zip(completion.prompts, scores, strict=True)):
        choice: dict[str, Any] = {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": "length",
            "prompt_logprobs": None,
        }
        if completion.has_logprobs:
            choice["prompt_logprobs"] = orjson.Fragment(_prompt_logprobs(prompt, of_prompt))
        if completion.candidates_start is not None:
            rows = of_prompt.candidate_logprobs[completion.candidates_start - prompt.start :]
            choice["prompt_token_id_logprobs"] = _npy(rows)
        choices.append(choice)
    tokens = sum(len(prompt.tokens) for prompt in completion.prompts)
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    return orjson.dumps(
        {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            "usage": usage,
        }
    )
