"""Requests to /v1/completions, in the protocol of vLLM."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import numpy as np
import orjson
from logprobd.errors import InvalidArgument, NotFound
from numpy.typing import NDArray

from logprobd_adapters.quoting import quote
from logprobd_adapters.teacher import TOP_K_MAX, Prompt

_CANDIDATES_MAX = 1 << 24  # The scores of a request have at most 64 MiB.
_IDS_AT_ONCE = 1 << 16  # So many become an array in a step, in which nothing else runs.
# Lists and objects of a body beside one for each token, and its fields. What orjson makes of a body
# is made in one step, which takes four times as long for small lists as for numbers.
_LISTS_MORE = 1024
_FIELDS_MAX = 1 << 16
_NAME_MAX = 64  # An error shows so many characters of a field's name.

_SERVED = (
    *("model", "prompt", "max_tokens", "temperature"),
    *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"),
)

# Fields of the schemas of OpenAI and vLLM on which no score of a prompt depends.
_WITHOUT_EFFECT = frozenset(
    (
        # how tokens are drawn
        *("seed", "top_p", "top_k", "min_p", "length_penalty"),
        # where generation ends
        *("stop", "stop_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output"),
        # how generated text looks
        *("response_format", "structured_outputs", "skip_special_tokens"),
        *("spaces_between_special_tokens", "return_tokens_as_token_ids"),
        # how a prompt of text becomes token ids
        "add_special_tokens",
        # who asks, and when the request has its turn
        *("user", "priority", "request_id", "cache_salt"),
    )
)

_NO_TEXT = "this gateway scores prompts and generates no text"
_NO_CHANGE = "this gateway divides logits by the temperature and changes them in no other way"
# Fields of these schemas that ask for what a teacher does not do: the values beside null that ask
# for nothing, and what the gateway does instead.
_NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), _NO_TEXT),
    "stream_options": ((), _NO_TEXT),
    "n": ((1,), _NO_TEXT),
    "best_of": ((1,), _NO_TEXT),
    "echo": ((False,), _NO_TEXT),
    "logprobs": ((), _NO_TEXT),
    "suffix": (("",), _NO_TEXT),
    "use_beam_search": ((False,), _NO_TEXT),
    "logit_bias": (({},), _NO_CHANGE),
    "presence_penalty": ((0,), _NO_CHANGE),
    "frequency_penalty": ((0,), _NO_CHANGE),
    "repetition_penalty": ((1,), _NO_CHANGE),
    "allowed_token_ids": ((), _NO_CHANGE),
    "bad_words": (([],), _NO_CHANGE),
    "logits_processors": (([],), _NO_CHANGE),
    "vllm_xargs": (({},), _NO_CHANGE),
    "truncate_prompt_tokens": ((), "this gateway scores whole prompts, so cut them before"),
    "prompt_embeds": (([],), "this gateway takes token ids"),
    "return_token_ids": ((False,), "this gateway returns no tokens of the request"),
    "kv_transfer_params": (({},), "this gateway transfers no keys and values"),
}


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """The contents of a request to /v1/completions."""

    prompts: list[Prompt]
    has_logprobs: bool
    """Whether it has prompt_logprobs."""


def _is_among(value: Any, values: tuple[Any, ...]) -> bool:
    """Returns whether a value is null or equals one of `values`, where true is not 1."""
    return value is None or any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in values
    )


def _check_fields(body: dict[str, Any]) -> None:
    """Refuses fields that are not served, unless no score depends on them."""
    for name, value in body.items():
        if name in _SERVED or name in _WITHOUT_EFFECT:
            continue
        if name not in _NOT_SERVED:
            raise InvalidArgument(_describe_unknown(name))
        neutral, reason = _NOT_SERVED[name]
        if not _is_among(value, neutral):
            raise InvalidArgument(f"{name} is {quote(value)}: {reason}")


def _describe_unknown(name: str) -> str:
    name = name[:_NAME_MAX]
    known = (*_SERVED, *_NOT_SERVED, *_WITHOUT_EFFECT)
    nearest = difflib.get_close_matches(name.lower(), known, 1)
    advice = f"use {nearest[0]}, or leave it out" if nearest else "leave it out"
    return f"this gateway does not serve the field {quote(name)}: {advice}"


def _integer(body: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{name} is {quote(value)}, expected an integer from {low} to {high}")
    return value


def _check_size(data: bytes | bytearray, tokens_max: int) -> None:
    """Refuses a body of more values than a request can have, before they take time and memory.
    Characters of strings count, too."""
    counts = (
        ("lists and objects", data.count(b"[") + data.count(b"{"), tokens_max + _LISTS_MORE),
        ("fields", data.count(b":"), _FIELDS_MAX),
    )
    for what, count, most in counts:
        if count > most:
            raise InvalidArgument(
                f"the body has {count} {what}, expected at most {most}: send fewer in a request"
            )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def parse_request(data: bytes | bytearray, model: str, tokens_max: int) -> CompletionRequest:
    """Reads the body of a request for a model, of at most so many tokens.

    Raises InvalidArgument or NotFound if it cannot be served.
    """
    _check_size(data, tokens_max)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidArgument("the body is no JSON object")
    if body.get("model") not in (None, model):
        raise NotFound(f"no model {quote(body['model'])}, this gateway serves {quote(model)}")
    _check_fields(body)
    if not _is_among(body.get("max_tokens"), (0, 1)):
        raise InvalidArgument(
            f"max_tokens is {quote(body['max_tokens'])}, expected 1: this gateway generates no text"
        )
    prompt = body.get("prompt")
    prompts = [prompt] if _are_ids(prompt) else prompt
    if not (isinstance(prompts, list) and prompts and all(map(_are_ids, prompts))):
        raise InvalidArgument(
            "prompt must be a list of token ids, or a list of such lists: this gateway has no "
            "tokenizer, and no prompt may be empty"
        )
    tokens = sum(map(len, prompts))
    if tokens > tokens_max:  # A Prompt takes more memory than its token in the body.
        raise InvalidArgument(
            f"the request has {tokens} tokens, expected at most {tokens_max}: send fewer prompts "
            "in a request"
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
        raise InvalidArgument(f"temperature is {quote(temperature)}, expected a number")
    length = min(map(len, prompts))
    start = _integer(body, "prompt_logprob_start", 0, 0, length - 1)
    first = start if top_k < 0 else 0
    candidates = None if ids is None else _parse_candidates(ids, length - 1 - start)
    return CompletionRequest(
        [
            Prompt(tokens, max(top_k, 0), temperature, first, candidates, start)
            for tokens in prompts
        ],
        top_k >= 0,
    )


def _parse_candidates(ids: Any, rows: int) -> NDArray[np.int64]:
    """Returns [rows, n] ids from a list for each row, or a view of one list for all rows."""
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
    matrix = np.full((len(lists), width), -1, np.int64)
    try:
        for row, of_row in zip(matrix, lists, strict=True):
            for begin in range(0, len(of_row), _IDS_AT_ONCE):
                part = of_row[begin : begin + _IDS_AT_ONCE]
                row[begin : begin + len(part)] = part
    except OverflowError:
        raise InvalidArgument("an id of prompt_logprob_token_ids is beyond 64 bits") from None
    return np.broadcast_to(matrix, (rows, width)) if is_list else matrix
