"""Tests the cache of head infos, changes of heads during calls, and answers of a wrong shape."""

import numpy as np
import pytest
from logprobd import Client, InvalidArgument, ServerBug, Shard, _wire
from logprobd.assembly import Assembly
from logprobd.info import heads_from_wire
from logprobd.plan import ScorePlan
from logprobd.score_args import ScoreArgs


def test_a_new_hidden_size_is_noticed_after_a_swap(server, client, rows):
    client.score(*rows)
    server.weight = np.ones((50, 8), np.float32)
    server.vocab_size, server.hidden_size = 50, 8

    assert client.score(np.ones((3, 8), np.float32), [1, 2, 3]).logprob.shape == (3,)


def test_a_swap_during_a_call_never_mixes_versions(rows):
    plan = ScorePlan(ScoreArgs(*rows, outputs=("logprob",)))
    head = _head(hidden_size=16)
    chunks = plan.cut(head, 5, 1 << 20)
    assembly = Assembly(plan, chunks)

    def answer(chunk, version):
        values = np.full(5, -float(version), "<f4").tobytes()
        assembly.add(chunk, _wire.ScoreResponse(rows=5, weights_version=version, logprob=values))

    answer(chunks[0], 1)
    answer(chunks[1], 2)
    assert assembly.rows_done == 10
    assembly.drop_other_versions()
    assert assembly.unanswered() == [chunks[0]]
    assert assembly.rows_done == 5
    answer(chunks[0], 2)
    assert assembly.rows_done == 10

    assert assembly.result().logprob.tolist() == [-2.0] * 10
    assert assembly.result().weights_version == 2


def test_rows_that_are_answered_twice_count_once(rows):
    plan = ScorePlan(ScoreArgs(*rows))
    chunks = plan.cut(_head(hidden_size=16), 5, 1 << 20)
    assembly = Assembly(plan, chunks)

    for _ in range(2):
        assembly.add(chunks[0], _wire.ScoreResponse(rows=5, weights_version=1))

    assert assembly.rows_done == 5


def test_a_swap_in_the_midst_of_a_call_is_scored_again(server, rows):
    with Client(server.address, chunk_rows=1, max_inflight=1, timeout=20) as client:
        swapped = []

        def swap(done, total):
            if done == 4 and not swapped:
                swapped.append(True)
                server.weights_version = 2
                server.weight = server.weight * 2

        result = client.score(*rows, progress=swap)

        assert result.weights_version == 2
        assert np.array_equal(result.logprob, client.score(*rows).logprob)


def test_an_answer_of_the_wrong_shape_is_a_server_bug(rows):
    plan = ScorePlan(ScoreArgs(*rows))
    chunks = plan.cut(_head(hidden_size=16), 100, 1 << 20)
    assembly = Assembly(plan, chunks)

    with pytest.raises(ServerBug, match="answered 9 rows"):
        assembly.add(chunks[0], _wire.ScoreResponse(rows=9))
    assembly.add(chunks[0], _wire.ScoreResponse(rows=10, logprob=b"123"))
    with pytest.raises(ServerBug, match="logprob has 3 bytes"):
        assembly.result()


def _head(hidden_size):
    heads = _wire.ListHeadsResponse(heads=[_wire.Head(name="h", hidden_size=hidden_size)])
    return heads_from_wire(heads)[0]


def test_info_list_heads_and_verify(server, client):
    info = client.info()

    assert client.list_heads() == [info]
    assert (info.name, info.vocab_size, info.hidden_size, info.dtype) == ("fake", 101, 16, "fp32")
    assert info.limits.request_rows_max == server.request_rows_max
    assert info.layout == (Shard(replica=0, shard=0, device="cpu", vocab_begin=0, vocab_end=101),)
    assert client.verify(rows=4, seed=2).rows == 4
    with pytest.raises(InvalidArgument, match="rows: 65"):
        client.verify(rows=65)


def test_a_server_without_a_layout_gives_an_empty_one():
    assert _head(16).layout == ()


def test_another_threads_error_does_not_empty_the_heads_of_this_call(server, rows):
    # Regression: a call failed with NotFound when an error in another thread cleared the cache.
    class Emptied(Client):
        def list_heads(self, *, timeout=None):
            heads = super().list_heads(timeout=timeout)
            self._heads = []
            return heads

    with Emptied(server.address, timeout=20) as client:
        assert client.score(*rows).logprob.shape == (10,)
        (result,) = client.score_stream([rows])

    assert result.logprob.shape == (10,)
