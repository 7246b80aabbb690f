"""The gateway's responses, errors and readiness, over HTTP in one process."""

import asyncio
import threading
import types
from unittest import mock

import aiohttp
import logprobd
import numpy as np
import openai
import pytest
import torch
from aiohttp import ClientSession
from gateway_scenario import (
    HIDDEN,
    MAX_MODEL_LEN,
    VOCAB,
    array_of,
    entered,
    post,
    queued,
    run,
    status_of,
)
from logprobd import errors
from logprobd.retry import RetryPolicy
from logprobd_adapters import LocalScorer, RemoteScorer, Scorer, Scores, gateway
from logprobd_adapters.batcher import Batcher
from logprobd_adapters.gateway import Gateway
from logprobd_adapters.teacher import Prompt, Teacher
from server_process import ServerProcess
from test_gateway_memory import body_of


def test_a_response_has_the_teachers_scores(teacher) -> None:
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6]]

    async def scenario(client, _) -> None:
        status, result = await post(client, prompts, prompt_logprobs=3, temperature=0.5)

        assert status == 200 and result["model"] == "teacher"
        assert result["usage"] == {"prompt_tokens": 8, "completion_tokens": 0, "total_tokens": 8}
        assert [choice["index"] for choice in result["choices"]] == [0, 1, 2]
        assert result["choices"][1]["prompt_logprobs"] == [None]
        scores = teacher.score([Prompt(tokens, 3, 0.5) for tokens in prompts])
        for tokens, choice, expected in zip(prompts, result["choices"], scores, strict=True):
            first, *rows = choice["prompt_logprobs"]
            assert first is None and len(rows) == len(tokens) - 1
            for row, entries in enumerate(rows):
                of_top = zip(
                    expected.top_ids[row], expected.top_logprobs[row], (1, 2, 3), strict=True
                )
                own = (tokens[row + 1], expected.logprobs[row], expected.ranks[row])
                assert {
                    int(token): (np.float32(entry["logprob"]), entry["rank"])
                    for token, entry in entries.items()
                } == {token: (logprob, rank) for token, logprob, rank in (*of_top, own)}

    run(teacher, scenario)


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 2}])
def test_candidates_come_back_as_an_array(teacher, fields) -> None:
    tokens = [3, 1, 4, 1, 5]

    async def scenario(client, _) -> None:
        fields_of_all = {"prompt_logprobs": None, "prompt_logprob_start": 1} | fields
        ids = [[7, 8], [], [9]]
        _, of_rows = await post(client, tokens, prompt_logprob_token_ids=ids, **fields_of_all)
        _, same = await post(client, tokens, prompt_logprob_token_ids=[7, 8], **fields_of_all)

        padded = np.array([[7, 8], [-1, -1], [9, -1]])
        (expected,) = teacher.score([Prompt(tokens, start=1, candidates=padded)])
        np.testing.assert_array_equal(array_of(of_rows), expected.candidate_logprobs)
        (expected,) = teacher.score([Prompt(tokens, start=1, candidates=np.array([[7, 8]] * 3))])
        np.testing.assert_array_equal(array_of(same), expected.candidate_logprobs)
        listed = of_rows["choices"][0]["prompt_logprobs"]
        assert (listed is None) == (not fields)
        assert listed is None or len(listed) == 5

    run(teacher, scenario)


@pytest.mark.parametrize(
    ("tokens", "ids", "shape"),
    [([3, 1, 4], [[], []], (2, 0)), ([3], [7, 8], (0, 2)), ([3], [], (0, 0))],
)
def test_no_candidates_or_no_rows_give_an_empty_array(teacher, tokens, ids, shape) -> None:
    async def scenario(client, _) -> None:
        status, result = await post(client, tokens, prompt_logprob_token_ids=ids)

        assert status == 200 and array_of(result).shape == shape

    run(teacher, scenario)


def test_logprobs_that_json_cannot_express_are_null_or_the_lowest_number(
    backbone, built_operator
) -> None:
    bias = torch.zeros(VOCAB)
    bias[7] = -torch.inf
    backbone.table[9] = torch.nan
    scorer = LocalScorer(torch.randn(VOCAB, HIDDEN), bias)

    async def scenario(client, _) -> None:
        status, result = await post(client, [3, 7, 9, 5])

        rows = result["choices"][0]["prompt_logprobs"]
        assert status == 200 and rows[1]["7"]["rank"] == VOCAB
        assert np.float32(rows[1]["7"]["logprob"]) == np.finfo(np.float32).min
        assert rows[2]["9"]["logprob"] > -100 and rows[3] is None

    run(Teacher(backbone, scorer, MAX_MODEL_LEN), scenario)


BAD = [
    ({"prompt": "text"}, "prompt must be a list of token ids"),
    ({"prompt": ["text"]}, "prompt must be a list of token ids"),
    ({"prompt": []}, "no prompt may be empty"),
    ({"prompt": [[1], []]}, "no prompt may be empty"),
    ({"prompt": [1, True]}, "prompt must be a list of token ids"),
    ({"prompt": [1, 2.0]}, "prompt must be a list of token ids"),
    ({"prompt": [1, VOCAB]}, f"token 1 of the prompt is {VOCAB}"),
    ({"prompt": [1, 2**63]}, f"token 1 of the prompt is {2**63}"),
    ({"prompt": [1] * (MAX_MODEL_LEN + 1)}, "expected 1 to max_model_len, 32"),
    ({"prompt": [[1] * 30] * 5}, "the request has 150 tokens, expected at most 100"),
    ({"prompt_logprobs": None}, "no prompt_logprobs and no prompt_logprob_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs is -1, expected an integer from 0 to 128"),
    ({"prompt_logprobs": "5"}, "prompt_logprobs is '5'"),
    ({"prompt_logprobs": VOCAB + 1}, "51 most likely tokens were asked for, expected 0 to 50"),
    ({"prompt_logprob_token_ids": [[1]]}, "one for each of 2 rows"),
    ({"prompt_logprob_token_ids": [[1], ["2"]]}, "one for each of 2 rows"),
    ({"prompt_logprob_token_ids": [1, VOCAB]}, f"an id to score is {VOCAB}"),
    ({"prompt_logprob_token_ids": [1, 2**63]}, "beyond 64 bits"),
    (
        {"prompt": [1] * 32, "prompt_logprob_token_ids": [1] * 600_000},
        "a product of at most 16777216",
    ),
    ({"prompt_logprob_token_ids": [1], "prompt_logprob_start": 3}, "prompt_logprob_start is 3"),
    ({"prompt_logprob_token_ids": [1], "prompt": [[1, 2], [3, 4]]}, "needs a single prompt"),
    ({"temperature": 0}, "the temperature is 0, expected 0.0001 to 10000"),
    # Regression: these are 0, infinite or subnormal in fp32.
    ({"temperature": 1e-300}, "the temperature is 1e-300"),
    ({"temperature": 1e39}, "the temperature is 1e+39"),
    ({"temperature": 1e-40}, "the temperature is 1e-40"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"max_tokens": 16}, "max_tokens is 16, expected 1"),
    ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens is 2: this gateway scores whole"),
    ({"temprature": 2}, "does not serve the field 'temprature': use temperature"),
    ({"stream": True}, "stream is True: this gateway scores prompts and generates no text"),
    ({"logprobs": 1}, "logprobs is 1: this gateway"),
    ({"n": 2}, "n is 2: this gateway"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_request_is_refused_with_what_to_change(teacher, fields, message) -> None:
    async def scenario(client, _) -> None:
        status, result = await post(client, **({"prompt": [1, 2, 3]} | fields))
        assert (status, result["error"]["code"]) == (400, 400)
        assert message in result["error"]["message"]

        assert (await post(client, [1, 2, 3]))[0] == 200

    run(teacher, scenario, queue_tokens=100)


def test_the_client_of_openai_gets_scores_and_refusals(teacher) -> None:
    def ask(url: str, **fields):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return client.completions.create(model="teacher", prompt=[3, 1, 4], **fields)

    async def scenario(http, _) -> None:
        url = str(http._base_url).rstrip("/")
        sampling = {"max_tokens": 1, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["a"]}
        extra = {"prompt_logprobs": 2, "top_k": 5}
        completion = await asyncio.to_thread(ask, url, **sampling, n=1, user="a", extra_body=extra)

        _, expected = await post(http, [3, 1, 4], prompt_logprobs=2, temperature=0.5)
        found = completion.choices[0].model_dump()["prompt_logprobs"]
        assert found == expected["choices"][0]["prompt_logprobs"]
        misspelt = {"prompt_logprobs": 2, "temperatur": 0.5}
        with pytest.raises(openai.BadRequestError, match="use temperature, or leave it out"):
            await asyncio.to_thread(ask, url, max_tokens=1, extra_body=misspelt)

    run(teacher, scenario)


def test_requests_that_are_not_for_this_gateway_get_json_errors(teacher) -> None:
    async def scenario(client, _) -> None:
        async def error(method: str, path: str, **options) -> tuple[int, str]:
            async with client.request(method, path, **options) as response:
                return response.status, (await response.json())["error"]["message"]

        completions = "/v1/completions"
        assert await error("POST", completions, data=b"{") == (
            400,
            "the body is no JSON: unexpected end of data: line 1 column 2 (char 1)",
        )
        assert await error("POST", completions, data=b"[1]") == (400, "the body is no JSON object")
        status, message = await error("POST", completions, json={"model": "gpt", "prompt": [1]})
        assert (status, message) == (404, "no model 'gpt', this gateway serves 'teacher'")
        assert (await error("GET", completions))[0] == 405
        assert (await error("POST", "/v1/chat/completions"))[0] == 404
        status, message = await error("POST", completions, data=bytes((1 << 20) + 1))
        assert status == 413 and "has 1048577 bytes, expected at most 1048576" in message

        async def pieces():
            yield b"{}"

        status, message = await error("POST", completions, data=pieces())
        assert status == 411 and "has no Content-Length" in message
        headers = {"Content-Encoding": "gzip"}
        status, message = await error("POST", completions, data=b"{}", headers=headers)
        assert status == 415 and "send it uncompressed" in message

    run(teacher, scenario, body_mib_max=1)


def test_the_model_and_its_length_are_listed(teacher) -> None:
    async def scenario(client, _) -> None:
        async with client.get("/v1/models") as response:
            (model,) = (await response.json())["data"]
        assert (model["id"], model["max_model_len"]) == ("teacher", MAX_MODEL_LEN)
        assert await status_of(client, "/health") == 200
        assert await status_of(client, "/readyz") == 200

    run(teacher, scenario)


def test_everything_is_503_while_the_model_is_loaded() -> None:
    async def scenario(client, _) -> None:
        for path in ("/health", "/readyz", "/v1/models"):
            async with client.get(path) as response:
                assert response.status == 503 and response.headers["Retry-After"] == "1"
        assert (await post(client, [1, 2]))[0] == 503

    run(None, scenario)


# Regression: such errors of a scorer, whose head is not the one that the gateway knows, were 500, then 400.
@pytest.mark.parametrize(
    ("tokens", "ids"), [([4, VOCAB - 2], [1]), ([4, 5], [VOCAB - 2])], ids=["target", "candidate"]
)
def test_a_prompt_that_the_scorer_refuses_is_502_and_does_not_fail_its_batch(
    backbone, built_operator, tokens, ids
) -> None:
    small = LocalScorer(torch.randn(VOCAB - 5, HIDDEN))
    scorer = types.SimpleNamespace(score=small.score, vocab_size=VOCAB)  # of which it has fewer

    async def scenario(client, gateway) -> None:
        backbone.release.clear()
        requests = [asyncio.create_task(post(client, [1, 2, 3]))]
        await entered(backbone)
        refused = post(client, tokens, prompt_logprob_token_ids=ids)
        requests += [asyncio.create_task(each) for each in (refused, post(client, [7, 8]))]
        await queued(gateway, 7)
        backbone.release.set()

        results = await asyncio.gather(*requests)

        assert [status for status, _ in results] == [200, 502, 200]
        assert "the scorer refuses the prompt" in results[1][1]["error"]["message"]

    run(Teacher(backbone, scorer, MAX_MODEL_LEN), scenario)


def test_a_client_that_leaves_during_its_response_disturbs_no_other(teacher, caplog) -> None:
    async def scenario(client, _) -> None:
        body = {"prompt": [[1] * 16] * 1000, "prompt_logprobs": 8}  # 6 MB, more than sockets hold
        async with client.post("/v1/completions", json=body) as response:
            response.close()

        assert (await post(client, [6, 7, 8]))[0] == 200

    run(teacher, scenario)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_gateway_that_stops_answers_the_requests_in_progress(teacher, backbone) -> None:
    async def main() -> None:
        gateway = Gateway("teacher")
        gateway.start(teacher)
        runner, url = await gateway.listen("127.0.0.1", 0)
        backbone.release.clear()
        async with ClientSession(url) as client:
            requests = [asyncio.create_task(post(client, [1, 2, 3]))]
            await entered(backbone)
            requests.append(asyncio.create_task(post(client, [4, 5])))
            await queued(gateway, 5)
            stopping = asyncio.create_task(runner.cleanup())
            while runner.sites:
                await asyncio.sleep(0)
            backbone.release.set()

            assert [status for status, _ in await asyncio.gather(*requests)] == [200, 200]
            await stopping

    asyncio.run(main())


class FailingScorer:
    """A scorer that raises an error."""

    hidden_size, vocab_size = HIDDEN, VOCAB

    def __init__(self, error: Exception) -> None:
        self.error = error

    def score(self, *_, **__) -> Scores:
        raise self.error


NO_CONNECTION = "failed to connect to all addresses; last error: UNKNOWN: "
FAILURES = {
    "another head": (errors.NotFound('no head "a"'), 502, None),
    "a changed head": (errors.InvalidArgument("hidden has 16 elements per row"), 502, None),
    "a refused token": (
        errors.LogprobdError("UNAUTHENTICATED: token", code="UNAUTHENTICATED"),
        502,
        None,
    ),
    "a refused certificate": (
        errors.Unavailable(
            "gone", details=f"{NO_CONNECTION}Ssl handshake failed: CERTIFICATE_VERIFY_FAILED"
        ),
        *(502, None),
    ),
    "different heads": (errors.HeadMismatch("two heads"), 502, None),
    "a failed server": (errors.ServerBug("INTERNAL"), 502, None),
    "a server that wants no retry": (errors.Overloaded("full", retry_after=-1.0), 502, None),
    "a full server": (errors.Overloaded("full", retry_after=7.2), 503, "8"),
    "a lost server": (
        errors.Unavailable("gone", details=f"{NO_CONNECTION}Connection refused"),
        503,
        "1",
    ),
    "a closed connection": (
        errors.Unavailable("gone", details=f"{NO_CONNECTION}Socket closed"),
        503,
        "1",
    ),
    "a server that stops": (errors.Unavailable("stopping", retry_after=2.5), 503, "3"),
    "a late answer": (errors.DeadlineExceeded("late"), 503, "1"),
    "a change of weights": (errors.WeightsVersionMismatch("changed"), 503, "1"),
}


# Regression: callers got 404 and 400 for what only the operator of the gateway can change, and 503 with Retry-After
# for what no retry mends.
@pytest.mark.parametrize(("error", "status", "retry_after"), FAILURES.values(), ids=FAILURES)
def test_an_error_of_the_scorer_is_not_the_callers(backbone, error, status, retry_after) -> None:
    async def scenario(http, _) -> None:
        body = {"prompt": [1, 2], "prompt_logprobs": 0}
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == status
            assert response.headers.get("Retry-After") == retry_after
            assert (await response.json())["error"]["message"] == str(error)
            assert "WWW-Authenticate" not in response.headers

    run(Teacher(backbone, FailingScorer(error), MAX_MODEL_LEN), scenario)


# Regression: the operator took no tensor of integers, which those of a request became.
def test_a_temperature_may_be_an_integer(backbone, built_operator) -> None:
    async def scenario(client, _) -> None:
        status, result = await post(client, [3, 1, 4], temperature=2)
        assert status == 200
        _, expected = await post(client, [3, 1, 4], temperature=2.0)
        assert result["choices"] == expected["choices"]

    scorer = LocalScorer(torch.randn(VOCAB, HIDDEN))
    run(Teacher(backbone, scorer, MAX_MODEL_LEN), scenario)


@pytest.mark.parametrize(("hint", "header"), [(None, "1"), (0.2, "1"), (7.0, "7"), (7.2, "8")])
def test_a_refusal_says_after_how_many_whole_seconds_to_ask_again(
    teacher, monkeypatch, hint, header
) -> None:
    refuse = mock.Mock(side_effect=errors.Overloaded("full", retry_after=hint))
    monkeypatch.setattr(Batcher, "reserve", refuse)

    async def scenario(client, _) -> None:
        body = {"prompt": [1, 2], "prompt_logprobs": 0}
        async with client.post("/v1/completions", json=body) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, header)

    run(teacher, scenario)


def test_a_body_of_exactly_the_limit_is_read(teacher) -> None:
    async def scenario(client, _) -> None:
        data = body_of({"prompt": [1, 2], "prompt_logprobs": 0}, 1 << 20)
        assert len(data) == 1 << 20

        async with client.post("/v1/completions", data=data) as response:
            assert response.status == 200

    run(teacher, scenario, body_mib_max=1)


# Regression: a second response followed the part of the first one that was sent.
def test_a_response_that_breaks_off_does_not_look_complete(teacher, monkeypatch, caplog) -> None:
    encode = gateway.encode_response

    def encode_and_fail(*arguments):
        yield next(encode(*arguments))
        raise RuntimeError("broken")

    async def scenario(client, _) -> None:
        monkeypatch.setattr(gateway, "encode_response", encode_and_fail)
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(client, [3, 1, 4])
        monkeypatch.setattr(gateway, "encode_response", encode)
        assert (await post(client, [3, 1, 4]))[0] == 200

    run(teacher, scenario)
    assert "a response broke off" in caplog.text


def test_an_error_before_the_first_byte_of_a_response_has_a_status(teacher, monkeypatch) -> None:
    def fail(*_):
        raise RuntimeError("broken")
        yield

    async def scenario(client, _) -> None:
        monkeypatch.setattr(gateway, "encode_response", fail)
        status, result = await post(client, [3, 1, 4])
        assert (status, result["error"]["message"]) == (500, "RuntimeError: broken")

    run(teacher, scenario)


# Regression: large bodies held up the event loop.
@pytest.mark.parametrize(("ids", "is_small"), [(1_000, True), (100_000, False)])
def test_large_bodies_are_parsed_in_a_thread(teacher, monkeypatch, ids, is_small) -> None:
    parse = gateway.parse_request
    threads = []

    def parse_and_note(*arguments):
        threads.append(threading.current_thread())
        return parse(*arguments)

    monkeypatch.setattr(gateway, "parse_request", parse_and_note)

    async def scenario(client, _) -> None:
        status, result = await post(client, [3, 1, 4], prompt_logprob_token_ids=[7] * ids)
        assert status == 200 and array_of(result).shape == (2, ids)
        status, result = await post(client, [3, 1, 4], prompt_logprob_token_ids=[VOCAB] * ids)
        assert status == 400 and "an id to score is 50" in result["error"]["message"]

    run(teacher, scenario)
    assert [thread is threading.main_thread() for thread in threads] == [is_small] * 2


# Regression: such a request was 502, since the gateway knew only the server's defaults.
def test_a_request_beyond_the_limits_of_the_server_is_400(backbone, binaries, model) -> None:
    async def scenario(client, _) -> None:
        async def post_ids(ids: list) -> tuple[int, dict]:
            return await post(client, [1, 2, 3], prompt_logprob_token_ids=ids)

        status, result = await post_ids([[7] * 9, [7]])
        assert status == 400
        message = (
            "a row has 9 ids to score, expected at most 8, the logprobd server's --candidates-max"
        )
        assert message in result["error"]["message"]
        assert (await post_ids([7] * 9))[0] == 400
        assert (await post_ids([7] * 8))[0] == 200
        assert (await post_ids([[7] * 8 + [-1] * 4, []]))[0] == 200

        status, result = await post(client, [1, 2, 3], prompt_logprobs=3)
        assert status == 400 and "expected 0 to 2: for more" in result["error"]["message"]
        assert (await post(client, [1, 2, 3], prompt_logprobs=2))[0] == 200

    limits = ("--candidates-max", "8", "--top-k-max", "2")
    with (
        ServerProcess(binaries, "--model", str(model.path), *limits) as server,
        logprobd.Client(server.grpc) as client,
    ):
        scorer = RemoteScorer(client)
        backbone.table = torch.randn(VOCAB, scorer.hidden_size)
        run(Teacher(backbone, scorer, MAX_MODEL_LEN), scenario)


def test_a_lost_server_is_503(backbone, binaries, model) -> None:
    with ServerProcess(binaries, "--model", str(model.path)) as server:
        client = logprobd.Client(server.grpc, retry=RetryPolicy(attempts_max=1))
        scorer: Scorer = RemoteScorer(client)
    backbone.table = torch.randn(VOCAB, scorer.hidden_size)

    async def scenario(http, _) -> None:
        body = {"prompt": [1, 2], "prompt_logprobs": 0}
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            assert "Unavailable" not in (await response.json())["error"]["message"]

    with client:
        run(Teacher(backbone, scorer, MAX_MODEL_LEN), scenario)


def test_a_gateway_is_ready_only_while_its_server_is_and_healthy_throughout(
    backbone, binaries, model
) -> None:
    options = ("--model", str(model.path))

    async def until_ready(http: ClientSession) -> None:
        while await status_of(http, "/readyz") != 200:  # takes up to half a second
            assert await status_of(http, "/health") == 200

    async def scenario(http, _) -> None:
        assert await status_of(http, "/readyz") == 200
        server.stop()
        async with http.get("/readyz") as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            assert server.grpc not in await response.text()
        assert await status_of(http, "/health") == 200
        with ServerProcess(binaries, *options, "--listen", server.grpc):
            await asyncio.wait_for(until_ready(http), 60)

    with (
        ServerProcess(binaries, *options) as server,
        logprobd.Client(server.grpc) as client,
    ):
        scorer: Scorer = RemoteScorer(client)
        backbone.table = torch.randn(VOCAB, scorer.hidden_size)
        run(Teacher(backbone, scorer, MAX_MODEL_LEN), scenario, server=client)


def test_its_threads_end_with_it(teacher) -> None:
    async def scenario(client, _) -> None:
        status, _ = await post(client, [3, 1, 4], prompt_logprob_token_ids=[7] * 100_000)
        assert status == 200

    before = set(threading.enumerate())
    run(teacher, scenario)

    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive(), thread.name
