"""Results of score have the right values, shapes and types, however the call is split into requests."""

import ml_dtypes
import numpy as np
import pytest
import torch
from logprobd import (
    Client,
    InvalidArgument,
    NotFound,
    WeightsVersionMismatch,
)
from logprobd._wire import OUTPUTS
from numpy_reference import entropy, log_softmax, logits_of

TOLERANCE = 2e-6  # float32 rounding of values up to about 20


def test_logprob_and_entropy_are_those_of_the_definitions(server, client, rows):
    hidden, targets = rows

    result = client.score(hidden, targets)

    logits = logits_of(server, hidden)
    expected = [log_softmax(z)[t] for z, t in zip(logits, targets, strict=True)]
    np.testing.assert_allclose(result.logprob, expected, atol=TOLERANCE)
    np.testing.assert_allclose(result.entropy, [entropy(z) for z in logits], atol=TOLERANCE)
    assert result.outputs == ("logprob", "entropy")
    assert result.weights_version == 1


def test_all_outputs_are_those_of_the_definitions(server, client, rows):
    hidden, targets = rows
    targets[0] = int(np.argmax(logits_of(server, hidden)[0]))

    result = client.score(hidden, targets, outputs=OUTPUTS, top_k=3, temperature=0.7)

    for row, (z, target) in enumerate(zip(logits_of(server, hidden), targets, strict=True)):
        logp = log_softmax(z, 0.7)
        best = np.argsort(-z)[:3]
        close = {
            "lse": z[0] / 0.7 - logp[0],
            "argmax_logprob": logp.max(),
            "sum_p_squared": np.exp(2 * logp).sum(),
            "max_logit": z.max(),
            "min_logit": z.min(),
            "top_k_logprobs": logp[best],
        }
        for name, expected in close.items():
            np.testing.assert_allclose(getattr(result, name)[row], expected, atol=TOLERANCE)
        assert result.argmax_id[row] == z.argmax()
        assert result.greedy[row] == (z.argmax() == target)
        assert result.target_rank[row] == (z > z[target]).sum()
        assert result.top_k_ids[row].tolist() == best.tolist()
    assert result.greedy[0]
    assert result.target_rank[0] == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_each_dtype_is_scored_on_its_exact_values(server, client, rows, dtype):
    hidden, targets = rows[0].astype(dtype), rows[1]

    result = client.score(hidden, targets)

    logits = logits_of(server, hidden.astype(np.float64))
    expected = [log_softmax(z)[t] for z, t in zip(logits, targets, strict=True)]
    np.testing.assert_allclose(result.logprob, expected, atol=TOLERANCE)


def test_torch_arguments_give_torch_results(client, rows):
    hidden, targets = torch.from_numpy(rows[0]), torch.from_numpy(rows[1])

    result = client.score(hidden, targets, outputs=OUTPUTS, top_k=2, segments=[0, 4, 10])

    same = client.score(*rows, outputs=OUTPUTS, top_k=2, segments=[0, 4, 10])
    for name in result.outputs:
        tensor = getattr(result, name)
        assert isinstance(tensor, torch.Tensor)
        assert tensor.device == hidden.device
        assert np.array_equal(tensor.numpy(), getattr(same, name))
    assert result.logprob.dtype == torch.float32
    assert result.argmax_id.dtype == torch.int64
    assert result.greedy.dtype == torch.bool
    assert result.segment_logprob.dtype == torch.float64


def test_results_keep_the_leading_axes(client, rows):
    hidden, targets = rows[0].reshape(2, 5, -1), rows[1].reshape(2, 5)

    result = client.score(hidden, targets, top_k=2, candidates=np.zeros((2, 5, 3), int))

    flat = client.score(*rows, top_k=2)
    assert result.shape == result.logprob.shape == result.entropy.shape == (2, 5)
    assert result.top_k_ids.shape == (2, 5, 2)
    assert result.candidate_logprobs.shape == (2, 5, 3)
    assert np.array_equal(result.logprob.ravel(), flat.logprob)


def test_one_row_without_leading_axes(client, rows):
    result = client.score(rows[0][0], rows[1][0])

    assert result.logprob.shape == ()


def test_shifted_views_are_scored_in_place(client, rows):
    hidden, targets = rows[0].reshape(2, 5, -1), rows[1].reshape(2, 5)

    result = client.score(hidden[:, :-1], targets[:, 1:])

    again = client.score(hidden[:, :-1].copy(), targets[:, 1:].copy())
    assert np.array_equal(result.logprob, again.logprob)


def test_no_rows_give_empty_outputs(server, client, rows):
    result = client.score(rows[0][:0], rows[1][:0], outputs=OUTPUTS, top_k=2, segments=[0])

    assert result.logprob.shape == (0,)
    assert result.top_k_ids.shape == (0, 2)
    assert result.segment_logprob.shape == (0,)
    assert len(server.requests) == 1


FULL = {
    "outputs": OUTPUTS,
    "top_k": 2,
    "temperature": np.linspace(0.5, 2.0, 10),
    "entropy_temperature": 1.5,
    "segments": [0, 2, 2, 7, 10],
    "candidates": [[1], [], [2, 3, 4], [5], [6], [7, 8], [], [9], [10], [11]],
}


def test_a_cut_call_gives_the_same_bits(server, client, small_chunks, rows):
    whole = client.score(*rows, **FULL)
    cut = small_chunks.score(*rows, **FULL)

    assert [request.rows for request in server.requests[:1]] == [10]
    assert sorted(request.rows for request in server.requests[1:]) == [1, 3, 3, 3]
    assert whole.outputs == cut.outputs
    for name in whole.outputs:
        assert np.array_equal(getattr(whole, name), getattr(cut, name)), name


def test_ignored_rows_are_zero_not_sent_and_counted(server, client, small_chunks, rows):
    hidden, targets = rows
    ignored = [0, 4, 5, 6, 9]
    targets[ignored] = -100

    for one in (client, small_chunks):
        result = one.score(hidden, targets, **FULL)
        assert result.ignored_rows == 5
        for name in ("logprob", "entropy", "lse", "argmax_id", "greedy", "top_k_logprobs"):
            assert not getattr(result, name)[ignored].any()
        assert result.candidate_lists()[5].tolist() == [0.0, 0.0]
        assert result.segment_rows.tolist() == [1, 0, 2, 2]
    assert sorted(request.rows for request in server.requests) == [2, 3, 5]
    others = np.delete(np.arange(10), ignored)
    full = client.score(hidden[others], targets[others], temperature=FULL["temperature"][others])
    assert np.array_equal(result.logprob[others], full.logprob)


def test_an_own_ignore_index_is_passed_on(client, rows):
    hidden, targets = rows
    targets[3] = -1

    assert client.score(hidden, targets, ignore_index=-1).ignored_rows == 1
    with pytest.raises(InvalidArgument, match=r"targets\[3\]: -1"):
        client.score(hidden, targets)


def test_a_call_of_ignored_rows_alone_is_still_checked(client, rows):
    result = client.score(rows[0], np.full(10, -100))

    assert result.ignored_rows == 10
    assert result.weights_version == 1
    with pytest.raises(InvalidArgument, match="ignore_index"):
        client.score(rows[0], np.full(10, 5), ignore_index=5)


def test_temperature_may_be_a_number_or_an_array(server, client, rows):
    hidden, targets = rows[0].reshape(2, 5, -1), rows[1].reshape(2, 5)
    a_sequence = np.array([[0.5], [2.0]])

    result = client.score(hidden, targets, temperature=a_sequence)

    first = client.score(hidden[0], targets[0], temperature=0.5)
    second = client.score(hidden[1], targets[1], temperature=torch.tensor(2.0))
    assert np.array_equal(result.logprob, np.stack([first.logprob, second.logprob]))


# The same call was refused by the server, and by the operator.
@pytest.mark.parametrize("unused", [0.0, -1.0, np.nan, np.inf])
def test_the_temperature_of_an_ignored_row_may_be_anything(client, rows, unused):
    hidden, targets = rows
    targets = np.where(np.arange(10) % 3 == 0, -100, targets)
    temperatures = np.where(targets == -100, unused, 0.7)

    result = client.score(hidden, targets, temperature=temperatures)

    assert np.array_equal(result.logprob, client.score(hidden, targets, temperature=0.7).logprob)
    with pytest.raises(InvalidArgument, match=r"row_temperatures\[\d\].*\(row 4 of the call\)"):
        client.score(hidden, targets, temperature=np.where(np.arange(10) == 4, unused, 1.0))


def test_entropy_temperature_changes_the_entropy_alone(server, client, rows):
    plain = client.score(*rows, temperature=0.5)

    result = client.score(*rows, temperature=0.5, entropy_temperature=1.0)

    assert np.array_equal(result.logprob, plain.logprob)
    expected = [entropy(z) for z in logits_of(server, rows[0])]
    np.testing.assert_allclose(result.entropy, expected, atol=TOLERANCE)


def test_candidates_in_their_three_forms_agree(server, client, small_chunks, rows):
    ids = np.random.default_rng(5).integers(0, 101, (10, 4))
    logp = [log_softmax(z) for z in logits_of(server, rows[0])]
    expected = np.stack([logp[row][ids[row]] for row in range(10)])

    for one in (client, small_chunks):
        array = one.score(*rows, candidates=ids)
        lists = one.score(*rows, candidates=ids.tolist())
        offsets = one.score(*rows, candidates=(ids.ravel(), np.arange(11) * 4))
        tensor = one.score(*rows, candidates=torch.from_numpy(ids))

        np.testing.assert_allclose(array.candidate_logprobs, expected, atol=TOLERANCE)
        for result in (lists, offsets):
            assert np.array_equal(result.candidate_logprobs, array.candidate_logprobs.ravel())
            assert np.array_equal(np.stack(result.candidate_lists()), array.candidate_logprobs)
        assert np.array_equal(tensor.candidate_logprobs, array.candidate_logprobs)


def test_candidates_above_the_servers_limit_are_cut(server, client, rows):
    server.candidates_max = 8

    result = client.score(*rows, candidates=np.ones((10, 3), int))

    assert [request.rows for request in server.requests] == [2] * 5
    assert result.candidate_logprobs.shape == (10, 3)


def test_calls_above_the_servers_message_limit_are_cut(server, client, rows):
    # 4096 bytes are reserved for other fields, and 12 for each row of 64 bytes.
    server.message_bytes_max = 4096 + 3 * (64 + 12)

    client.score(*rows)

    assert sorted(request.rows for request in server.requests) == [1, 3, 3, 3]


def test_segments_across_chunks_are_those_of_one_request(client, small_chunks, rows):
    whole = client.score(*rows, segments=[0, 4, 10], outputs=("greedy",))
    cut = small_chunks.score(*rows, segments=[0, 4, 10], outputs=("greedy",))

    assert np.array_equal(whole.segment_logprob, cut.segment_logprob)
    assert whole.segment_rows.tolist() == cut.segment_rows.tolist() == [4, 6]
    assert np.array_equal(whole.segment_greedy, cut.segment_greedy)
    assert cut.outputs == whole.outputs  # logprob was requested only for the sums


def test_segment_greedy_says_whether_every_row_is(server, client, small_chunks, rows):
    hidden, _ = rows
    targets = logits_of(server, hidden).argmax(axis=1)
    targets[7] = (targets[7] + 1) % 101
    targets[1] = -100

    for one in (client, small_chunks):
        result = one.score(hidden, targets, segments=[0, 5, 10])
        assert result.segment_greedy.tolist() == [True, False]


def test_segments_above_the_servers_limit_are_summed_here(server, client, rows):
    server.segments_max = 2

    result = client.score(*rows, segments=np.arange(11))

    assert np.array_equal(result.segment_logprob, result.logprob.astype(np.float64))


def test_sum_by_segment(client, rows):
    result = client.score(*rows, segments=[0, 4, 10])

    assert np.array_equal(result.sum_by_segment(), result.segment_logprob)
    assert np.array_equal(result.sum_by_segment([0, 4, 10]), result.segment_logprob)
    assert result.sum_by_segment([0, 0, 10])[0] == 0
    with pytest.raises(InvalidArgument, match="end at 10"):
        result.sum_by_segment([0, 9])


def test_nonfinite_rows_are_nan_and_counted(client, small_chunks, rows):
    hidden, targets = rows
    hidden[[5, 6, 8], 0] = np.nan

    # The first chunk to fail decides, of rows 3 to 5 and 6 to 8.
    for one, named in (client, [5]), (small_chunks, [5, 6]):
        result = one.score(hidden, targets, outputs=("logprob", "argmax", "target_rank"))
        assert result.nonfinite_rows == 3
        assert np.flatnonzero(np.isnan(result.logprob)).tolist() == [5, 6, 8]
        assert (result.argmax_id[[5, 6, 8]] == -1).all()
        assert (result.target_rank[[5, 6, 8]] == -1).all()
        with pytest.raises(InvalidArgument) as caught:
            one.score(hidden, targets, reject_nonfinite=True)
        assert caught.value.row in named


def test_an_error_names_the_row_of_the_call(small_chunks, rows):
    hidden, targets = rows
    targets[[0, 2]] = -100
    targets[8] = 101

    with pytest.raises(InvalidArgument) as caught:
        small_chunks.score(hidden, targets)

    assert (caught.value.field, caught.value.row) == ("targets", 8)
    assert "row 8 of the call" in str(caught.value)
    assert caught.value.code == "INVALID_ARGUMENT"


def test_an_error_names_the_row_of_a_candidate(small_chunks, rows):
    candidates = [[1]] * 10
    candidates[7] = [1, 2, 500]

    with pytest.raises(InvalidArgument) as caught:
        small_chunks.score(*rows, candidates=candidates)

    assert caught.value.row == 7


def test_an_error_at_a_rows_first_candidate_names_that_row(small_chunks, rows):
    candidates = [[1]] * 10
    candidates[6], candidates[7] = [], [500, 1]

    with pytest.raises(InvalidArgument) as caught:
        small_chunks.score(*rows, candidates=candidates)

    assert caught.value.row == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": [1, 2]}, "targets has shape"),
        ({"targets": np.zeros(10)}, "ids must be integers"),
        ({"outputs": ("logprobs",)}, "choose from logprob"),
        ({"priority": "urgent"}, "priority"),
        ({"temperature": [1.0, 2.0]}, "broadcasts"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": [0.0] + [1.0] * 9}, r"row_temperatures\[0\]"),
        ({"segments": [0, 5]}, "end at 10"),
        ({"candidates": [[1]]}, "one flat list"),
        ({"candidates": np.zeros((3, 2), int)}, "candidates has shape"),
        ({"candidates": ([1, 2], [0, 2])}, "offsets"),
        ({"candidates": [[101]] * 10}, r"candidate_ids\[0\]"),
        ({"top_k": -1}, "top_k is -1: pass an integer, 0 or more"),
        ({"top_k": "many"}, "top_k is 'many': pass an integer"),
        ({"weights_version": None}, "weights_version is None: pass an integer"),
        ({"top_k": 10_000}, "top_k"),
        ({"hidden": np.zeros((10, 15), np.float32)}, "takes 16"),
        ({"hidden": np.float32(1)}, "scalar"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_bad_arguments_say_what_to_change(client, rows, change, message):
    arguments = {"hidden": rows[0], "targets": rows[1], **change}

    with pytest.raises(InvalidArgument, match=message):
        client.score(**arguments)


def test_unknown_heads_and_versions_are_typed_errors(client, rows):
    with pytest.raises(NotFound, match='"fake"'):
        client.score(*rows, head="other")
    with pytest.raises(WeightsVersionMismatch, match="weights_version=0"):
        client.score(*rows, weights_version=9)
    assert client.score(*rows, head="fake", weights_version=1).weights_version == 1


def test_a_missing_output_says_how_to_ask(client, rows):
    result = client.score(*rows)

    with pytest.raises(AttributeError, match='outputs=\\("lse"'):
        _ = result.lse
    with pytest.raises(AttributeError, match="top_k=k"):
        _ = result.top_k_ids
    with pytest.raises(AttributeError, match="segments=offsets"):
        result.sum_by_segment()
    with pytest.raises(InvalidArgument):
        result.candidate_lists()


def test_repr_is_short(client, rows):
    assert len(repr(client.score(*rows))) < 200
    assert "10" in repr(client.score(*rows))


def test_outputs_may_be_one_name_the_names_of_results_or_none(client, rows):
    assert client.score(*rows, outputs="lse").outputs == ("lse",)
    for name in ("argmax", "argmax_id", "argmax_logprob"):
        assert client.score(*rows, outputs=[name]).outputs == ("argmax_id", "argmax_logprob")
    alone = client.score(*rows, outputs=(), top_k=2)
    assert alone.outputs == ("top_k_ids", "top_k_logprobs")


def test_candidates_of_an_array_are_listed_by_row(client, rows):
    hidden, targets = rows[0].reshape(2, 5, -1), rows[1].reshape(2, 5)
    result = client.score(hidden, targets, candidates=np.arange(30).reshape(2, 5, 3))

    lists = result.candidate_lists()

    assert len(lists) == 10
    assert np.array_equal(np.stack(lists), result.candidate_logprobs.reshape(10, 3))


def test_sums_by_segment_have_the_kind_of_the_rows(client, rows):
    result = client.score(torch.from_numpy(rows[0]), rows[1])

    sums = result.sum_by_segment([0, 3, 10])

    assert isinstance(sums, torch.Tensor)
    expected = result.logprob.double().numpy()
    assert sums.tolist() == [np.cumsum(expected[:3])[-1], np.cumsum(expected[3:])[-1]]


def test_progress_counts_rows(small_chunks, rows):
    seen = []

    small_chunks.score(*rows, progress=lambda done, total: seen.append((done, total)))

    assert len(seen) == 4
    assert seen[-1] == (10, 10)


def test_request_id_and_client_id_reach_the_server(server, rows):
    with Client(server.address, client_id="trainer-3") as client:
        client.score(*rows, request_id="step-7")

    assert server.requests[0].request_id == "step-7"
    assert server.requests[0].metadata["client_id"] == "trainer-3"


def test_the_transport_is_reported(server):
    assert Client(server.address).transport == "tcp"
    assert Client("unix:/run/logprobd.sock").transport == "unix"


def test_large_calls_are_cut_to_the_default_chunks(server, rows):
    server.weight = np.ones((3, 4096), np.float32)
    server.vocab_size, server.hidden_size = 3, 4096
    with Client(server.address, timeout=20) as client:
        client.score(np.zeros((1200, 4096), np.float16), np.zeros(1200, int))

    # 4 MiB hold 510 rows of 8 KiB and the other fields, so the call is split into three requests of
    # equal length.
    assert [request.rows for request in server.requests] == [400, 400, 400]
    assert max(request.message_bytes for request in server.requests) <= 4 << 20


def test_a_single_row_gives_scalars_in_torch_as_in_numpy(client, rows):
    # Regression: torch results had shape (1,), because ascontiguousarray adds a dimension to a scalar.
    ours = client.score(torch.from_numpy(rows[0][0]), int(rows[1][0]))
    theirs = client.score(rows[0][0], int(rows[1][0]))

    assert tuple(ours.logprob.shape) == theirs.logprob.shape == ()
    assert float(ours.logprob) == float(theirs.logprob)


@pytest.mark.parametrize(
    "argument", [{"request_id": 5}, {"head": 5}, {"entropy_temperature": "x"}], ids=str
)
def test_an_argument_of_the_wrong_type_is_named(client, rows, argument):
    # Regression: such arguments raised AttributeError or a plain ValueError.
    with pytest.raises(InvalidArgument) as caught:
        client.score(*rows, **argument)

    assert caught.value.field == next(iter(argument))
