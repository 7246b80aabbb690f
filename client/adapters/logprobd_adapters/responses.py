"""Responses to /v1/completions, in the protocol of vLLM.

Most of a response is numbers as text. NumPy moves them in blocks, since an object of Python for
each of them takes several times as long.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from logprobd_adapters.completions import CompletionRequest
from logprobd_adapters.teacher import Prompt, PromptScores

_BLOCK_ENTRIES = 8192
_PIECE_BYTES = 1 << 16  # A piece of a response has at least so many.
_NPY_BYTES = 3 << 16  # A piece of a file has so many, which base64 encodes without padding.
# The fields of scores that are listed for each row.
_LISTED = ("logprobs", "ranks", "top_ids", "top_logprobs")
# Masks of 16 bytes for texts of 0 to 16 bytes: the bytes of the text, and spaces after it.
_KEPT = np.array([b"\xff" * size for size in range(17)], "S16").view(np.uint64).reshape(17, 2)
_SPACES = ~_KEPT & np.uint64(0x2020202020202020)


def _numbers_as_json(numbers: NDArray[Any]) -> NDArray[np.bytes_]:
    """Returns the JSON of each number, at most 16 bytes, padded with spaces to equal lengths."""
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


def _wrap_integers_as_json(
    before: bytes, integers: NDArray[np.int64], after: bytes
) -> NDArray[np.bytes_]:
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
        "id": _wrap_integers_as_json(b',"', ids, b'":{"logprob":'),
        # JSON has no infinity.
        "logprob": _numbers_as_json(np.maximum(logprobs, np.finfo(np.float32).min)),
        "rank": _wrap_integers_as_json(b',"rank":', ranks, b"}"),
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
        parts = {name: getattr(scores, name)[rows] for name in _LISTED}
        yield _rows(tokens[rows], dataclasses.replace(scores, **parts))


def _rows_of_prompts(
    prompts: Sequence[Prompt], scores: Sequence[PromptScores]
) -> Iterator[Iterator[bytes]]:
    """Yields the blocks of rows of each prompt. Prompts of few rows share a call of NumPy's
    functions, which take longer for a call than for a row."""
    block = max(1, _BLOCK_ENTRIES // (scores[0].top_ids.shape[1] + 1))
    counts = [len(prompt.tokens) - 1 - prompt.start for prompt in prompts]
    begin = 0
    while begin < len(prompts):
        end, rows = begin + 1, counts[begin]
        # A prompt without rows counts as one, too, so that this ends after `block` prompts.
        while end < len(prompts) and (end - begin) + rows + counts[end] < block:
            rows += counts[end]
            end += 1
        together = slice(begin, end)
        if end == begin + 1:
            yield _blocks(prompts[begin], scores[begin])
        else:
            yield from _shared_block(prompts[together], scores[together], counts[together])
        begin = end


def _shared_block(
    prompts: Sequence[Prompt], scores: Sequence[PromptScores], counts: Sequence[int]
) -> Iterator[Iterator[bytes]]:
    """Yields the rows of each of several prompts, each as one block."""
    rows, size = b"", 0
    if total := sum(counts):
        ids = itertools.chain.from_iterable(p.tokens[p.start + 1 :] for p in prompts)
        parts = {
            name: np.concatenate(
                [getattr(each, name) for each, n in zip(scores, counts, strict=True) if n]
            )
            for name in _LISTED
        }
        rows = _rows(np.fromiter(ids, np.int64, total), dataclasses.replace(scores[0], **parts))
        size = len(rows) // total
    end = 0
    for count in counts:
        begin, end = end, end + count * size
        yield iter((rows[begin:end],))


def _npy_as_base64(array: NDArray[np.float32]) -> Iterator[bytes]:
    """Yields the base64 of a .npy file in pieces."""
    file = io.BytesIO()
    np.save(file, array)
    data = file.getbuffer()
    for begin in range(0, len(data), _NPY_BYTES):
        yield base64.b64encode(data[begin : begin + _NPY_BYTES])


def encode_response(
    model: str, request: CompletionRequest, scores: Sequence[PromptScores]
) -> Iterator[bytes]:
    """Yields the JSON of a response in pieces, from the scores of the prompts of the request.

    A piece can be sent while the next one is made. None is empty. The time for a piece does not
    grow with the response, however many prompts it has.
    """
    tokens = sum(len(prompt.tokens) for prompt in request.prompts)
    fields = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }
    text = bytearray(orjson.dumps(fields)[:-1] + b',"choices":[')
    rows = _rows_of_prompts(request.prompts, scores) if request.has_logprobs else None
    for index, (prompt, of_prompt) in enumerate(zip(request.prompts, scores, strict=True)):
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
        text += b"," * (index > 0) + orjson.dumps(choice)[:-1]
        if prompt.candidates is not None:
            text += b',"prompt_token_id_logprobs":"'
            for piece in _npy_as_base64(of_prompt.candidate_logprobs):
                yield bytes(text + piece)
                text.clear()
            text += b'"'
        text += b',"prompt_logprobs":'
        if rows:
            text += b"[null"  # the first token, which no row predicts
            for block in next(rows):
                text += block
                if len(text) >= _PIECE_BYTES:
                    yield bytes(text)
                    text.clear()
            text += b"]}"
        else:
            text += b"null}"
        if len(text) >= _PIECE_BYTES:
            yield bytes(text)
            text.clear()
    yield bytes(text + b"]}")
