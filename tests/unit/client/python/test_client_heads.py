"""Tests the cache of head infos, changes of heads during calls, and answers of a wrong shape."""

import numpy as np
import pytest
from logprobd import Client, InvalidArgument, ServerBug, Shard, _wire
from logprobd.assembly import Assembly
from logprobd.info import heads_from_wire
from logprobd.plan import Placement, ScorePlan
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


def test_an_array_that_is_too_long_is_a_server_bug(rows):
    assembly, (chunk,) = _assembly(rows, 10, outputs=("logprob",))

    assembly.add(chunk, _wire.ScoreResponse(rows=10, logprob=bytes(44)))

    with pytest.raises(ServerBug, match="logprob has 44 bytes .* not 40"):
        assembly.result()


@pytest.mark.parametrize("count", [9, 11])
def test_another_number_of_candidates_is_a_server_bug(rows, count):
    assembly, (chunk,) = _assembly(rows, 10, outputs=("logprob",), candidates=[[1]] * 10)
    values = bytes(4 * count)

    assembly.add(chunk, _wire.ScoreResponse(rows=10, logprob=bytes(40), candidate_logprobs=values))

    with pytest.raises(ServerBug, match=f"candidate_logprobs has {4 * count} bytes .* not 40"):
        assembly.result()


@pytest.mark.parametrize("name", ["segment_logprob", "segment_rows", "segment_greedy"])
def test_segments_without_one_of_their_arrays_are_a_server_bug(rows, name):
    assembly, (chunk,) = _assembly(rows, 10, outputs=("logprob",), segments=[0, 4, 10])
    arrays = {
        "segment_logprob": bytes(16),
        "segment_rows": bytes(8),
        "segment_greedy": bytes(2),
        name: b"",
    }

    assembly.add(chunk, _wire.ScoreResponse(rows=10, logprob=bytes(40), **arrays))

    with pytest.raises(ServerBug, match=f"{name} has 0 bytes"):
        assembly.result()


def test_nonfinite_rows_of_all_requests_are_counted(rows):
    assembly, chunks = _assembly(rows, 5, outputs=("logprob",))

    for chunk, count in zip(chunks, (2, 3), strict=True):
        response = _wire.ScoreResponse(rows=5, logprob=bytes(20), nonfinite_rows=count)
        assembly.add(chunk, response)

    assert assembly.result().nonfinite_rows == 5


def test_the_transport_of_most_rows_is_found_among_all_requests(rows):
    assembly, chunks = _assembly(rows, 4)
    assert [chunk.end - chunk.begin for chunk in chunks] == [4, 4, 2]

    for chunk, transport in zip(chunks, ("shm", "tcp", "tcp"), strict=True):
        response = _wire.ScoreResponse(rows=chunk.end - chunk.begin)
        assembly.add(chunk, response, Placement(transport, ""))

    assert assembly.placement.transport == "tcp"


def _assembly(rows, chunk_rows, **options):
    """Returns the Assembly of a call, and the chunks of the call."""
    plan = ScorePlan(ScoreArgs(*rows, **options))
    chunks = plan.cut(_head(hidden_size=16), chunk_rows, 1 << 20)
    return Assembly(plan, chunks), chunks


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
