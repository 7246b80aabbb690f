"""The gateway's responses, errors, readiness, batches and queue, over HTTP in one process."""

import asyncio
import base64
import io
import json
import threading
from collections.abc import Awaitable, Callable

import logprobd
import numpy as np
import pytest
import torch
from aiohttp import ClientSession
from logprobd.retry import RetryPolicy
from logprobd_adapters import LocalScorer, RemoteScorer, Scorer, completions
from logprobd_adapters.gateway import QUEUE_TOKENS, Gateway
from logprobd_adapters.teacher import Prompt, PromptScores, Teacher
from server_process import ServerProcess

HIDDEN, VOCAB, MAX_MODEL_LEN = 16, 50, 32
POISON = 49


class Backbone:
    """Hidden states that depend on each token. Its calls wait while `release` is not set."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.table = torch.randn(VOCAB, HIDDEN)
        self.shapes: list[tuple[int, ...]] = []
        self.entered = threading.Semaphore(0)
        self.release = threading.Event()
        self.release.set()

    def __call__(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        self.shapes.append((len(prompts), max(map(len, prompts))))
        self.entered.release()
        assert self.release.wait(60)
        if any(POISON in prompt for prompt in prompts):
            raise RuntimeError("poisoned")
        return [self.table[prompt] for prompt in prompts]


@pytest.fixture
def backbone():
    backbone = Backbone()
    yield backbone
    backbone.release.set()


@pytest.fixture
def scorer(built_operator) -> LocalScorer:
    torch.manual_seed(1)
    return LocalScorer(torch.randn(VOCAB, HIDDEN))


@pytest.fixture
def teacher(backbone, scorer) -> Teacher:
    return Teacher(backbone, scorer, MAX_MODEL_LEN)


def run(
    teacher: Teacher | None,
    scenario: Callable[[ClientSession, Gateway], Awaitable[None]],
    queue_tokens: int = QUEUE_TOKENS,
    server: logprobd.Client | None = None,
) -> None:
    """Runs a scenario against a gateway, which has not loaded its model if there is no teacher."""

    async def main() -> None:
        gateway = Gateway("teacher", queue_tokens, server=server)
        if teacher:
            gateway.start(teacher)
        runner, url = await gateway.listen("127.0.0.1", 0)
        try:
            async with ClientSession(url) as client:
                await scenario(client, gateway)
        finally:
            await runner.cleanup()

    asyncio.run(main())


async def status_of(client: ClientSession, path: str) -> int:
    async with client.get(path) as response:
        return response.status


async def post(client: ClientSession, prompt, **fields) -> tuple[int, dict]:
    body = {"prompt": prompt, "prompt_logprobs": 0, "max_tokens": 1} | fields
    async with client.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


def array_of(result: dict) -> np.ndarray:
    text = result["choices"][0]["prompt_token_id_logprobs"]
    return np.load(io.BytesIO(base64.b64decode(text)))


async def entered(backbone: Backbone) -> None:
    """Waits until the backbone is called."""
    assert await asyncio.to_thread(backbone.entered.acquire, timeout=60)


async def queued(gateway: Gateway, tokens: int) -> None:
    """Waits until so many tokens wait or are being scored."""
    while gateway._batcher._tokens != tokens:
        await asyncio.sleep(0)


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


def test_logprobs_that_json_cannot_express_are_null_or_the_lowest_number(backbone) -> None:
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
    request = completions.CompletionRequest([Prompt(tokens, top_k)], True, None)

    response = b"".join(completions.encode_response("teacher", request, [scores]))

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
        "expected a product of at most",
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
        assert (await error("POST", completions, data=bytes(65 << 20)))[0] == 413

    run(teacher, scenario)


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


def test_requests_that_wait_for_a_batch_are_the_next_batch(teacher, backbone) -> None:
    async def scenario(client, gateway) -> None:
        backbone.release.clear()
        first = asyncio.create_task(post(client, [1, 2, 3]))
        await entered(backbone)
        others = [asyncio.create_task(post(client, [4, 5] * n)) for n in (1, 2, 3)]
        await queued(gateway, 3 + 12)
        backbone.release.set()

        results = await asyncio.gather(first, *others)

        assert backbone.shapes == [(1, 3), (3, 6)]
        assert [len(a["choices"][0]["prompt_logprobs"]) for _, a in results] == [3, 2, 4, 6]
        assert gateway._batcher._tokens == 0

    run(teacher, scenario)


def test_a_full_queue_refuses_with_retry_after_and_loses_nothing(teacher, backbone) -> None:
    async def scenario(client, gateway) -> None:
        backbone.release.clear()
        accepted = [asyncio.create_task(post(client, [1, 2, 3]))]
        await entered(backbone)
        accepted.append(asyncio.create_task(post(client, [4, 5, 6, 7])))
        await queued(gateway, 7)

        body = {"prompt": [8, 9], "prompt_logprobs": 0}
        async with client.post("/v1/completions", json=body) as response:
            result = await response.json()
            assert response.status == 429 and 1 <= int(response.headers["Retry-After"]) <= 60
            assert "7 tokens are waiting, of at most 5" in result["error"]["message"]
        backbone.release.set()

        assert [status for status, _ in await asyncio.gather(*accepted)] == [200, 200]
        assert (await post(client, [8, 9]))[0] == 200

    run(teacher, scenario, queue_tokens=5)


def test_a_prompt_that_fails_does_not_fail_its_batch(teacher, backbone) -> None:
    async def scenario(client, gateway) -> None:
        backbone.release.clear()
        first = asyncio.create_task(post(client, [1, 2, 3]))
        await entered(backbone)
        others = [asyncio.create_task(post(client, [4, token])) for token in (5, POISON, 6)]
        await queued(gateway, 9)
        backbone.release.set()

        results = await asyncio.gather(first, *others)

        assert [status for status, _ in results] == [200, 200, 500, 200]
        assert results[2][1]["error"]["message"] == "RuntimeError: poisoned"
        assert backbone.shapes == [(1, 3), (3, 2), (1, 2), (1, 2), (1, 2)]

    run(teacher, scenario)


# Regression: such errors, which Scorer.score documents, were 500.
@pytest.mark.parametrize(
    ("tokens", "ids"), [([4, VOCAB - 2], [1]), ([4, 5], [VOCAB - 2])], ids=["target", "candidate"]
)
def test_a_prompt_that_the_scorer_refuses_is_400_and_does_not_fail_its_batch(
    backbone, built_operator, tokens, ids
) -> None:
    class SmallHead(LocalScorer):
        vocab_size = VOCAB  # of which the head has fewer

    async def scenario(client, gateway) -> None:
        backbone.release.clear()
        requests = [asyncio.create_task(post(client, [1, 2, 3]))]
        await entered(backbone)
        refused = post(client, tokens, prompt_logprob_token_ids=ids)
        requests += [asyncio.create_task(each) for each in (refused, post(client, [7, 8]))]
        await queued(gateway, 7)
        backbone.release.set()

        results = await asyncio.gather(*requests)

        assert [status for status, _ in results] == [200, 400, 200]
        assert "the scorer refuses the prompt" in results[1][1]["error"]["message"]

    run(Teacher(backbone, SmallHead(torch.randn(VOCAB - 5, HIDDEN)), MAX_MODEL_LEN), scenario)


def test_a_request_whose_client_leaves_is_taken_off_the_queue(teacher, backbone) -> None:
    async def scenario(client, gateway) -> None:
        backbone.release.clear()
        first = asyncio.create_task(post(client, [1, 2, 3]))
        await entered(backbone)
        leaving = asyncio.create_task(post(client, [4, 5]))
        await queued(gateway, 5)
        leaving.cancel()
        await queued(gateway, 3)
        backbone.release.set()

        assert (await first)[0] == 200
        assert (await post(client, [6, 7, 8]))[0] == 200
        assert backbone.shapes == [(1, 3), (1, 3)]

    run(teacher, scenario)


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
