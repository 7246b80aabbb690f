"""The contents of requests."""

import json

import numpy as np
import pytest
from logprobd.errors import InvalidArgument
from logprobd_adapters import completions
from logprobd_adapters.completions import parse_request

TOKENS_MAX = 100_000


def parse(**fields):
    (prompt,) = parse_request(json.dumps(fields).encode(), "teacher", TOKENS_MAX).prompts
    return prompt


# Regression: 32,768 ids for 513 tokens became 128 MiB.
def test_one_list_for_all_rows_is_not_repeated() -> None:
    prompt = parse(prompt=[1] * 513, prompt_logprob_token_ids=list(range(32_768)))

    assert prompt.candidates.shape == (512, 32_768) and prompt.candidates.strides[0] == 0
    assert np.array_equal(prompt.candidates[511], np.arange(32_768))
    assert prompt.candidates_cost == 512 * 32_768 // 64


# Regression: rows before prompt_logprob_start were filled up, without a bound on their memory.
@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 0}, {"prompt_logprobs": 2}])
def test_rows_before_the_first_with_ids_take_no_memory(fields) -> None:
    ids = {"prompt_logprob_token_ids": [[7, 8]], "prompt_logprob_start": 998}

    prompt = parse(prompt=[1] * 1_000, **ids, **fields)

    assert prompt.candidates.tolist() == [[7, 8]]
    assert (prompt.start, prompt.candidates_start) == (0 if fields else 998, 998)


def test_shorter_lists_are_filled_up() -> None:
    prompt = parse(prompt=[1, 2, 3, 4], prompt_logprob_token_ids=[[7, 8], [], [9]])

    assert prompt.candidates.tolist() == [[7, 8], [-1, -1], [9, -1]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * (TOKENS_MAX + 1024), "the body is no JSON"),
        (b"{" + b'"a":1,' * 65_535 + b'"a":1}', "does not serve the field 'a'"),
    ],
    ids=["lists", "fields"],
)
def test_as_many_lists_and_fields_as_a_request_may_have_are_parsed(body, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_request(body, "teacher", TOKENS_MAX)


@pytest.mark.parametrize("ids", [[1, 2**63], [[1], [2**63]]])
def test_ids_beyond_64_bits_are_refused(ids) -> None:
    with pytest.raises(InvalidArgument, match="beyond 64 bits"):
        parse(prompt=[1, 2, 3], prompt_logprob_token_ids=ids)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[" + b"[1]," * 200_000 + b"1]", "200001 lists and objects, expected at most 101024"),
        (b"[" * 200_000, "200000 lists and objects"),
        (b"{" + b'"a":1,' * 100_000 + b'"b":1}', "100001 fields, expected at most 65536"),
    ],
)
def test_more_lists_and_fields_than_a_request_has_are_refused_before_they_are_parsed(
    body, what, monkeypatch
) -> None:
    monkeypatch.setattr(completions.orjson, "loads", None)

    with pytest.raises(InvalidArgument, match=what):
        parse_request(body, "teacher", TOKENS_MAX)


def test_as_many_prompts_as_tokens_are_parsed() -> None:
    body = json.dumps({"prompt": [[1]] * TOKENS_MAX, "prompt_logprobs": 0}).encode()

    assert len(parse_request(body, "teacher", TOKENS_MAX).prompts) == TOKENS_MAX


SCORED = {"prompt": [1, 2, 3], "prompt_logprobs": 2}

# The defaults of vLLM's schema, and null, which clients send for what they do not set.
DEFAULTS = {
    **{"model": None, "best_of": None, "echo": False, "frequency_penalty": 0.0, "logit_bias": None},
    **{
        "logprobs": None,
        "max_tokens": 1,
        "n": 1,
        "presence_penalty": 0.0,
        "seed": None,
        "stop": [],
    },
    **{"stream": False, "stream_options": None, "suffix": None, "temperature": None, "top_p": None},
    **{"user": None, "use_beam_search": False, "top_k": None, "min_p": None, "bad_words": []},
    **{"repetition_penalty": None, "length_penalty": 1.0, "stop_token_ids": [], "min_tokens": 0},
    **{"include_stop_str_in_output": False, "ignore_eos": False, "skip_special_tokens": True},
    **{"spaces_between_special_tokens": True, "truncate_prompt_tokens": None},
    **{"allowed_token_ids": None, "prompt_embeds": None, "add_special_tokens": True, "priority": 0},
    **{"response_format": None, "structured_outputs": None, "request_id": "a", "cache_salt": None},
    **{"logits_processors": None, "return_tokens_as_token_ids": None, "return_token_ids": None},
    **{"kv_transfer_params": None, "vllm_xargs": None},
}


@pytest.mark.parametrize(
    "fields",
    [
        DEFAULTS,
        dict.fromkeys([*DEFAULTS, "prompt_logprob_token_ids", "prompt_logprob_start"]),
        {"n": 1, "best_of": 1, "repetition_penalty": 1.0, "logit_bias": {}, "suffix": ""},
    ],
    ids=["the defaults of vLLM", "null", "values that ask for nothing"],
)
def test_fields_that_ask_for_nothing_are_accepted(fields) -> None:
    assert parse(**fields | SCORED) == parse(**SCORED)


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 1234, "top_p": 0.5, "top_k": 40, "min_p": 0.1, "length_penalty": 2},
        {"stop": ["\n"], "stop_token_ids": [2], "ignore_eos": True, "min_tokens": 1},
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
        {"spaces_between_special_tokens": False, "return_tokens_as_token_ids": True},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"user": "trainer", "priority": -1, "request_id": "17", "cache_salt": "salt"},
        {"add_special_tokens": False},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_on_which_no_score_depends_are_accepted(fields) -> None:
    assert parse(**fields | SCORED) == parse(**SCORED)


# Regression: these were ignored, and another distribution or another prompt was scored than the caller meant.
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens is 2: .* scores whole prompts"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens is -1"),
        ({"logit_bias": {"7": 5}}, "logit_bias is .'7': 5.: this gateway divides logits by the te"),
        ({"presence_penalty": 0.5}, "presence_penalty is 0.5"),
        ({"frequency_penalty": -1}, "frequency_penalty is -1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids is .1, 2."),
        ({"bad_words": ["a"]}, "bad_words is .'a'."),
        ({"logits_processors": ["a.b"]}, "logits_processors is .'a.b'."),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs is"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds is 'AAAA': this gateway takes token ids"),
        ({"suffix": "tail"}, "suffix is 'tail': this gateway scores prompts and generates no text"),
        ({"use_beam_search": True}, "use_beam_search is True"),
        ({"stream_options": {"include_usage": True}}, "stream_options is"),
        ({"return_token_ids": True}, "return_token_ids is True: this gateway returns no tokens"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params is"),
        # true equals 1 in Python.
        ({"n": True}, "n is True"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"echo": 0}, "echo is 0"),
        # what lm-eval's local-completions asks for
        ({"logprobs": 1, "seed": 1234, "echo": True}, "logprobs is 1: this gateway scores prompts"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_fields_that_ask_for_something_else_are_refused(fields, message) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse(**fields | SCORED)


# Regression: a misspelt field was ignored, so that the default was scored.
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("temprature", "use temperature, or leave it out"),
        ("Temperature", "use temperature, or leave it out"),
        ("prompt_logprob", "use prompt_logprobs, or leave it out"),
        ("prompt_logprobs_token_ids", "use prompt_logprob_token_ids, or leave it out"),
        ("truncate_prompt_token", "use truncate_prompt_tokens, or leave it out"),
        ("messages", "leave it out"),
        ("", "leave it out"),
        ("x" * 100_000, "leave it out"),
    ],
    ids=lambda text: text[:20],
)
@pytest.mark.parametrize("value", [0.5, None])
def test_an_unknown_field_is_refused_with_the_nearest_known_one(name, advice, value) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse(**SCORED | {name: value})

    assert str(error.value) == f"this gateway does not serve the field {name[:64]!r}: {advice}"


def test_a_refusal_does_not_repeat_a_large_value() -> None:
    with pytest.raises(InvalidArgument) as error:
        parse(**SCORED, allowed_token_ids=list(range(100_000)))

    assert len(str(error.value)) < 300
