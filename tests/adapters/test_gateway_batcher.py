"""The batches and the bounded queue of the gateway."""

import asyncio
import types
import weakref
from unittest import mock

import pytest
from gateway_scenario import (
    MAX_MODEL_LEN,
    POISON,
    VOCAB,
    FixedTeacher,
    entered,
    post,
    queued,
    run,
)
from logprobd.errors import Overloaded
from logprobd_adapters.batcher import Batcher, ScorerError
from logprobd_adapters.teacher import CANDIDATES_PER_TOKEN, Prompt, Teacher


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
            assert "7 tokens are in progress, of at most 5" in result["error"]["message"]
        backbone.release.set()

        assert [status for status, _ in await asyncio.gather(*accepted)] == [200, 200]
        assert (await post(client, [8, 9]))[0] == 200

    run(teacher, scenario, queue_tokens=5)


def rows_of_ids(tokens: int, rows: int) -> list[list[int]]:
    """Returns ids to score that cost so many tokens, for so many rows."""
    return [[7] * (tokens * CANDIDATES_PER_TOKEN // rows)] * rows


# Regression: a request with a list of ids to score counted as its tokens alone, whatever memory its scores take.
def test_ids_to_score_fill_the_queue(teacher, backbone) -> None:
    async def scenario(client, gateway) -> None:
        backbone.release.clear()
        ids = rows_of_ids(10, 2)
        accepted = [asyncio.create_task(post(client, [1, 2, 3], prompt_logprob_token_ids=ids))]
        await entered(backbone)
        await queued(gateway, 13)
        accepted.append(
            asyncio.create_task(post(client, [1, 2, 3], prompt_logprob_token_ids=ids[0]))
        )
        await queued(gateway, 26)
        accepted.append(asyncio.create_task(post(client, [4])))
        await queued(gateway, 27)

        status, result = await post(client, [4])
        assert status == 429
        assert "27 tokens are in progress, of at most 27" in result["error"]["message"]
        backbone.release.set()

        assert [status for status, _ in await asyncio.gather(*accepted)] == [200] * 3

    run(teacher, scenario, queue_tokens=27)


@pytest.mark.parametrize(("cost", "shapes"), [(37, [(1, 3), (2, 3)]), (38, [(1, 3)] * 3)])
def test_ids_to_score_fill_a_batch(backbone, scorer, cost, shapes) -> None:
    async def scenario(client, gateway) -> None:
        backbone.release.clear()
        requests = [asyncio.create_task(post(client, [1, 2, 3]))]
        await entered(backbone)
        fields = {"prompt_logprob_token_ids": rows_of_ids(cost, 2)}
        requests.append(asyncio.create_task(post(client, [4, 5, 6], **fields)))
        await queued(gateway, 6 + cost)
        requests.append(asyncio.create_task(post(client, [4, 5, 6])))
        await queued(gateway, 9 + cost)
        backbone.release.set()

        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 3
        assert backbone.shapes == shapes

    run(Teacher(backbone, scorer, MAX_MODEL_LEN, batch_tokens=2 * 3 + 37), scenario)


# Regression: the body was read and parsed before the queue was looked at.
def test_a_full_queue_refuses_before_it_reads_a_body(teacher, backbone) -> None:
    async def scenario(client, gateway) -> None:
        backbone.release.clear()
        accepted = asyncio.create_task(post(client, [1, 2, 3]))
        await entered(backbone)
        url = client._base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 8000000\r\n\r\n")

        status = await asyncio.wait_for(reader.readline(), 60)

        assert status == b"HTTP/1.1 429 Too Many Requests\r\n"
        writer.close()
        backbone.release.set()
        assert (await accepted)[0] == 200

    run(teacher, scenario, queue_tokens=3)


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


def test_a_request_whose_client_leaves_is_taken_off_the_queue(teacher, backbone) -> None:
    async def scenario(client, gateway) -> None:
        backbone.release.clear()
        first = asyncio.create_task(post(client, [1, 2, 3]))
        await entered(backbone)
        leaving = asyncio.create_task(post(client, [4, 5]))
        await queued(gateway, 5)
        leaving.cancel()
        await queued(gateway, 3)
        assert not gateway._batcher._waiting  # regression: its prompts stayed until the next batch
        backbone.release.set()

        assert (await first)[0] == 200
        assert (await post(client, [6, 7, 8]))[0] == 200
        assert backbone.shapes == [(1, 3), (1, 3)]

    run(teacher, scenario)


def test_prompts_of_a_request_keep_their_order_over_several_batches(backbone, scorer) -> None:
    async def scenario(client, gateway) -> None:
        lengths = [1, 2, 3, 3, 1, 2, 3]

        status, result = await post(client, [[5] * length for length in lengths])

        assert status == 200 and len(backbone.shapes) > 1
        assert [len(c["prompt_logprobs"]) for c in result["choices"]] == lengths

    run(Teacher(backbone, scorer, MAX_MODEL_LEN, batch_tokens=6), scenario)


def test_no_prompt_of_a_request_is_scored_after_one_that_failed(backbone, scorer) -> None:
    async def scenario(client, gateway) -> None:
        assert (await post(client, [[4, 5], [POISON], [6, 7], [8, 9]]))[0] == 500

        assert (await post(client, [1, 2, 3]))[0] == 200
        assert backbone.shapes == [(1, 2), (1, 1), (1, 3)]

    run(Teacher(backbone, scorer, MAX_MODEL_LEN, batch_tokens=2), scenario)


def test_nothing_refers_to_scores_that_were_returned() -> None:
    async def main() -> None:
        batcher = Batcher(FixedTeacher(), 100)

        scores = await batcher.score([Prompt([1, 2])] * 3)

        references = [weakref.ref(each) for each in scores]
        del scores
        await batcher.close()  # Until then the thread may hold its last result.
        assert [reference() for reference in references] == [None] * 3

    asyncio.run(main())


def score_together(batcher: Batcher, prompts: list[list[int]]) -> list[asyncio.Task]:
    """Asks for each prompt in a request of its own. All are in one batch if none runs."""
    return [asyncio.create_task(batcher.score([Prompt(tokens)])) for tokens in prompts]


@pytest.mark.parametrize("of_leaving", [[4, 5], [4, POISON]], ids=["scored", "failed"])
def test_the_others_of_a_batch_are_answered_if_a_client_leaves_while_it_runs(
    teacher, backbone, of_leaving
) -> None:
    async def main() -> None:
        batcher = Batcher(teacher, 100)
        backbone.release.clear()
        leaving, *others = score_together(batcher, [of_leaving, [6, 7], [8, 9]])
        await entered(backbone)

        leaving.cancel()
        await asyncio.wait([leaving])
        backbone.release.set()

        results = await asyncio.wait_for(asyncio.gather(*others), 20)
        assert [len(scores.ranks) for (scores,) in results] == [1, 1]
        assert backbone.shapes[0] == (3, 2)
        await batcher.close()

    asyncio.run(main())


def test_an_error_of_the_scorer_ends_all_requests_of_the_batch_at_once(backbone) -> None:
    failing = types.SimpleNamespace(
        score=mock.Mock(side_effect=Overloaded("full", retry_after=7.0)), vocab_size=VOCAB
    )

    async def main() -> None:
        batcher = Batcher(Teacher(backbone, failing, MAX_MODEL_LEN), 100)
        requests = score_together(batcher, [[4, 5], [6, 7], [8, 9]])

        results = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 20)

        assert [type(result) for result in results] == [ScorerError] * 3
        assert [result.error.retry_after for result in results] == [7.0] * 3
        assert backbone.shapes == [(3, 2)]  # none is asked for alone
        await batcher.close()

    asyncio.run(main())


class TimedTeacher(FixedTeacher):
    """A teacher whose batches take so many seconds of its clock."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.now, self.seconds = 0.0, seconds

    def score(self, prompts):
        self.now += self.seconds
        return super().score(prompts)


@pytest.mark.parametrize(("seconds", "hint"), [(0.0, 1), (6.0, 8), (47.9, 60), (1000.0, 60)])
def test_a_full_queue_tells_the_time_of_its_tokens_at_the_speed_of_the_last_batch(
    seconds, hint
) -> None:
    async def main() -> None:
        teacher = TimedTeacher(seconds)
        asyncio.get_running_loop().time = lambda: teacher.now
        batcher = Batcher(teacher, 5)
        await batcher.score([Prompt([1, 2])] * 2)  # 4 tokens

        with batcher.reserve(5), pytest.raises(Overloaded) as error, batcher.reserve(1):
            pass

        assert error.value.retry_after == hint
        await batcher.close()

    asyncio.run(main())


def test_a_queue_that_is_one_token_short_of_full_takes_a_request() -> None:
    async def main() -> None:
        batcher = Batcher(FixedTeacher(), 5)

        with batcher.reserve(4), batcher.reserve(7):
            with pytest.raises(Overloaded, match="11 tokens are in progress, of at most 5"):
                batcher.reserve(1).__enter__()

        await batcher.close()

    asyncio.run(main())
