"""The batches and the bounded queue of the gateway."""

import asyncio
import weakref

import pytest
from gateway_scenario import MAX_MODEL_LEN, POISON, FixedTeacher, entered, post, queued, run
from logprobd_adapters.batcher import Batcher
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
