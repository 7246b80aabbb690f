"""Clients of several servers use one version of the weights per call and require equal heads."""

import pytest
from logprobd import (
    HeadMismatch,
    WeightsVersionMismatch,
)
from several_servers import counts, fake


def test_differing_heads_are_refused_until_they_agree(connect, rows):
    with fake() as one, fake(vocab_size=99) as two:
        with connect([one.address, two.address]) as client:
            with pytest.raises(HeadMismatch) as caught:
                client.score(*rows)
            assert one.address in str(caught.value)
            assert two.address in str(caught.value)
            assert 'vocab_size of "fake" is 101 and 99' in str(caught.value)
            assert one.requests == two.requests == []
            (failed,) = client.stream([rows], on_error="return")
            assert isinstance(failed, HeadMismatch)

            two.weight, two.vocab_size = one.weight, one.vocab_size

            assert client.score(*rows).logprob.shape == (10,)


def test_list_heads_gives_the_tightest_limits(connect, many_rows):
    with fake(request_rows_max=7) as one, fake(request_rows_max=50) as two:
        with connect([one.address, two.address]) as client:
            assert client.info().limits.request_rows_max == 7
            client.score(*many_rows)

        assert max(request.rows for request in one.requests + two.requests) == 7


def test_versions_are_not_mixed_in_a_call(connect, many_rows):
    with fake() as one, fake(weights_version=2, scale=1.0) as two:
        with connect([one.address, two.address], chunk_rows=3) as client:
            results = [client.score(*many_rows) for _ in range(4)]

    assert {result.weights_versions for result in results} == {(1,), (2,)}
    # The client knew the versions, so it sent no chunk twice.
    assert sum(counts([one, two])) == 4 * 40


def test_an_answer_of_another_version_is_asked_again_where_the_first_is_held(connect, many_rows):
    with fake() as one, fake() as two:
        swapped = []

        def swap(done, total):
            if done >= 30 and not swapped:
                swapped.append(True)
                two.weights_version = 2
                two.delay = 0.0

        with connect([one.address, two.address], chunk_rows=3, max_inflight=2) as client:
            result = client.score(*many_rows, progress=swap)

        assert swapped
        assert result.weights_versions == (1,)
        assert sum(counts([one, two])) > 40


def test_a_swap_of_all_servers_during_a_call_ends_in_the_new_version(connect, many_rows):
    with fake() as one, fake() as two:

        def swap(done, total):
            if done >= 60:
                one.weights_version = two.weights_version = 2

        with connect([one.address, two.address], chunk_rows=3, max_inflight=2) as client:
            result = client.score(*many_rows, progress=swap)
            (streamed,) = client.stream([many_rows])

    assert result.weights_versions == streamed.weights_versions == (2,)


def test_mixing_is_allowed_on_request_and_reported(connect, many_rows):
    with fake() as one, fake(weights_version=2) as two:
        with connect([one.address, two.address], chunk_rows=3, mix_versions=True) as client:
            result = client.score(*many_rows)
            (streamed,) = client.stream([many_rows])

    assert result.weights_versions == streamed.weights_versions == (1, 2)
    assert result.weights_version == 2
    assert min(counts([one, two])) > 5


def test_a_pinned_version_is_found_where_it_is_held(connect, rows):
    with fake() as one, fake(weights_version=2) as two:
        with connect([one.address, two.address]) as client:
            client.info()
            # The versions that the client knows are now outdated.
            one.weights_version, two.weights_version = 3, 4
            for version in (3, 4, 3, 4):
                assert client.score(*rows, weights_version=version).weights_version == version
            (streamed,) = client.stream([rows], weights_version=4)
            assert streamed.weights_version == 4
            with pytest.raises(WeightsVersionMismatch, match="version 9") as caught:
                client.score(*rows, weights_version=9)
            (failed,) = client.stream([rows], weights_version=9, on_error="return")
            assert isinstance(failed, WeightsVersionMismatch)

    assert one.address in str(caught.value)
    assert two.address in str(caught.value)


def test_servers_that_swap_all_the_time_end_in_an_error(connect, many_rows):
    with fake() as one, fake() as two:

        def restless(server, first):
            versions = iter(range(first, 10_000, 2))
            answer = server._answer

            def answered(*args):
                response = answer(*args)
                response.weights_version = next(versions)
                return response

            server._answer = answered

        restless(one, 1)
        restless(two, 2)
        with (
            connect([one.address, two.address], chunk_rows=3) as client,
            pytest.raises(WeightsVersionMismatch, match="mix_versions"),
        ):
            client.score(*many_rows)


def test_a_batch_that_no_version_can_score_does_not_end_the_stream(connect, rows):
    # No ready server holds the pinned version, and no request is in flight.
    batch = {"hidden": rows[0], "targets": rows[1]}
    with fake() as one, fake() as two:
        with connect([one.address, two.address], chunk_rows=3) as client:
            results = client.stream([rows, batch | {"weights_version": 9}, rows], on_error="return")

    assert [type(result).__name__ for result in results] == [
        "ScoreResult",
        "WeightsVersionMismatch",
        "ScoreResult",
    ]
