"""The JSON of responses."""

import json
import time
from collections.abc import Sequence

import numpy as np
import pytest
from gateway_scenario import FixedTeacher
from logprobd_adapters import responses
from logprobd_adapters.completions import CompletionRequest
from logprobd_adapters.responses import encode_response
from logprobd_adapters.teacher import Prompt, PromptScores


@pytest.mark.parametrize(("rows", "top_k"), [(1, 0), (2, 1), (1500, 0), (1500, 8)])
def test_entries_and_numbers_are_those_of_the_shortest_texts(rows, top_k) -> None:
    generator = np.random.default_rng(rows)
    ids = np.array([generator.choice(200_000, top_k + 1, replace=False) for _ in range(rows)])
    bits = generator.integers(0, 1 << 32, (rows, top_k + 1), dtype=np.uint32).view(np.float32)
    logprobs = np.where(np.isfinite(bits), bits, np.float32(-0.000012345678))  # 15 characters
    ranks = generator.choice([0, *range(1, top_k + 1), top_k + 1, 199_999], rows)
    in_top = (ranks > 0) & (ranks <= top_k)
    own = np.where(in_top, ranks - 1, top_k)
    rows_of_all = np.arange(rows)
    tokens = [5, *ids[rows_of_all, own].tolist()]
    scores = PromptScores(
        logprobs[rows_of_all, own],
        ranks,
        ids[:, :top_k],
        logprobs[:, :top_k],
        np.zeros((rows, 0), np.float32),
    )
    request = CompletionRequest([Prompt(tokens, top_k)], True)

    response = b"".join(encode_response("teacher", request, [scores]))

    (choice,) = json.loads(response)["choices"]
    first, *of_rows = choice["prompt_logprobs"]
    assert first is None and len(of_rows) == rows
    for row, entries in enumerate(of_rows):
        listed = [*zip(ids[row, :top_k], logprobs[row, :top_k], range(1, top_k + 1), strict=True)]
        if ranks[row] > top_k:
            listed.append((ids[row, top_k], logprobs[row, top_k], ranks[row]))
        # NumPy's text of a float32 is the shortest one that is no other float32.
        expected = {
            str(token): {"logprob": float(str(logprob)), "rank": rank}
            for token, logprob, rank in listed
        }
        assert entries == (expected if ranks[row] else None)


# JSON with a name twice is valid, but what it means is up to its reader.
def test_a_token_of_the_most_likely_ones_is_listed_once() -> None:
    ids, logprobs = np.array([[7, 8], [7, 8], [7, 8]]), np.zeros((3, 2), np.float32)
    ranks = np.array([1, 2, 3])
    scores = PromptScores(logprobs[:, 0], ranks, ids, logprobs, np.zeros((3, 0), np.float32))
    request = CompletionRequest([Prompt([5, 7, 8, 9], 2)], True)

    response = b"".join(encode_response("teacher", request, [scores]))

    names: list[str] = []
    json.loads(response, object_pairs_hook=lambda pairs: names.extend(name for name, _ in pairs))
    assert [name for name in names if name.isdigit()] == ["7", "8", "7", "8", "7", "8", "9"]


def encode(prompts: Sequence[Prompt], scores: Sequence[PromptScores]) -> list[bytes]:
    return list(encode_response("teacher", CompletionRequest([*prompts], True), scores))


@pytest.mark.parametrize("top_k", [0, 3])
def test_prompts_of_any_length_have_the_rows_that_they_have_alone(top_k) -> None:
    generator = np.random.default_rng(top_k)
    lengths = [1, 2, 1, 9_000, 3, 1, 1, *[2] * 5_000, 8_192, 1]
    prompts = [Prompt(generator.integers(0, 50, length).tolist(), top_k) for length in lengths]
    scores = [
        PromptScores(
            generator.normal(size=rows).astype(np.float32),
            generator.integers(0, 9, rows),
            generator.integers(0, 50, (rows, top_k)),
            generator.normal(size=(rows, top_k)).astype(np.float32),
            np.zeros((rows, 0), np.float32),
        )
        for rows in (length - 1 for length in lengths)
    ]

    choices = json.loads(b"".join(encode(prompts, scores)))["choices"]

    for index, choice in enumerate(choices):
        (alone,) = json.loads(b"".join(encode([prompts[index]], [scores[index]])))["choices"]
        assert choice == alone | {"index": index}
    assert len(choices) == len(prompts)


def small_prompts(length: int, count: int) -> tuple[list[Prompt], list[PromptScores]]:
    prompts = [Prompt([1] * length)] * count
    return prompts, FixedTeacher().score(prompts)


# Regression: a prompt of one token copied what was written for all prompts before it.
@pytest.mark.parametrize("length", [1, 2])
def test_the_time_for_a_prompt_does_not_grow_with_their_number(length) -> None:
    def seconds_per_prompt(count: int) -> float:
        prompts, scores = small_prompts(length, count)
        times = []
        for _ in range(3):
            started = time.thread_time()
            encode(prompts, scores)
            times.append(time.thread_time() - started)
        return min(times) / count

    assert seconds_per_prompt(32_000) < 2 * seconds_per_prompt(4_000)


# Regression: all prompts of one token were one piece, in which nothing else was answered.
@pytest.mark.parametrize("length", [1, 2])
def test_many_small_prompts_are_many_pieces(length) -> None:
    pieces = encode(*small_prompts(length, 20_000))

    assert max(map(len, pieces)) < 2 * 65_536
    assert len(json.loads(b"".join(pieces))["choices"]) == 20_000


def test_the_pieces_of_a_long_prompt_do_not_grow_with_it() -> None:
    longest = [max(map(len, encode(*small_prompts(length, 1)))) for length in (20_000, 100_000)]

    assert longest[1] < 1.1 * longest[0]


def test_prompts_share_calls_of_no_more_rows_than_fit_the_caches(monkeypatch) -> None:
    monkeypatch.setattr(responses, "_BLOCK_ENTRIES", 64)
    rows_of_calls = []

    def rows(tokens, scores):
        rows_of_calls.append(len(tokens))
        return make_rows(tokens, scores)

    make_rows = responses._rows
    monkeypatch.setattr(responses, "_rows", rows)
    lengths = [2, *[8] * 5, 200, 2, 2, 2, 40, 30, 20, 20, 2]
    prompts = [Prompt([1] * length) for length in lengths]

    encode(prompts, FixedTeacher().score(prompts))

    assert sum(rows_of_calls) == sum(lengths) - len(lengths)
    assert max(rows_of_calls) <= 64
    assert len(rows_of_calls) <= 9  # four of them for the long prompt
