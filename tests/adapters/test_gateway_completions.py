"""The contents of requests."""

import json

import numpy as np
import pytest
from logprobd.errors import InvalidArgument
from logprobd_adapters.completions import parse_request


def parse(**fields):
    (prompt,) = parse_request(json.dumps(fields).encode(), "teacher").prompts
    return prompt


# Regression: 32,768 ids for 513 tokens became 128 MiB.
def test_one_list_for_all_rows_is_not_repeated() -> None:
    prompt = parse(prompt=[1] * 513, prompt_logprob_token_ids=list(range(32_768)))

    assert prompt.candidates.shape == (512, 32_768) and prompt.candidates.strides[0] == 0
    assert np.array_equal(prompt.candidates[511], np.arange(32_768))
    assert prompt.candidates_cost == 512 * 32_768 // 64


# Regression: rows before prompt_logprob_start were filled up, without a bound on their memory.
@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 2}])
def test_rows_before_the_first_with_ids_take_no_memory(fields) -> None:
    ids = {"prompt_logprob_token_ids": [[7, 8]], "prompt_logprob_start": 998}

    prompt = parse(prompt=[1] * 1_000, **ids, **fields)

    assert prompt.candidates.tolist() == [[7, 8]]
    assert (prompt.start, prompt.candidates_start) == (0 if fields else 998, 998)


def test_shorter_lists_are_filled_up() -> None:
    prompt = parse(prompt=[1, 2, 3, 4], prompt_logprob_token_ids=[[7, 8], [], [9]])

    assert prompt.candidates.tolist() == [[7, 8], [-1, -1], [9, -1]]


@pytest.mark.parametrize("ids", [[1, 2**63], [[1], [2**63]]])
def test_ids_beyond_64_bits_are_refused(ids) -> None:
    with pytest.raises(InvalidArgument, match="beyond 64 bits"):
        parse(prompt=[1, 2, 3], prompt_logprob_token_ids=ids)
