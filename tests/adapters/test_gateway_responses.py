"""The JSON of responses."""

import json

import numpy as np
import pytest
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
