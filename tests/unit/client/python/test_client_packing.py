"""Tests that the helpers pair each state with the token that follows it."""

import numpy as np
import pytest
import torch
from logprobd import InvalidArgument, from_packed, from_padded
from numpy_reference import log_softmax, logits_of


def test_packed_targets_are_shifted_within_each_sequence():
    ids = np.array([1, 2, 3, 4, 5, 6])

    shifted = from_packed(np.zeros((6, 2)), ids, [0, 3, 3, 4, 6])

    assert shifted.targets.tolist() == [2, 3, -100, -100, 6, -100]
    assert shifted.segments.tolist() == [0, 3, 3, 4, 6]
    assert ids.tolist() == [1, 2, 3, 4, 5, 6]


def test_packed_torch_with_a_leading_axis():
    ids = torch.tensor([[1, 2, 3, 4]])

    shifted = from_packed(torch.zeros(1, 4, 2), ids, torch.tensor([0, 2, 4]), ignore_index=-1)

    assert shifted.targets.tolist() == [[2, -1, 4, -1]]


def test_no_tokens_give_no_targets():
    shifted = from_packed(np.zeros((0, 2)), np.zeros(0, np.int64), [0, 0])

    assert shifted.targets.shape == (0,)
    assert shifted.segments.tolist() == [0, 0]


def test_padded_targets_drop_the_first_token():
    hidden = np.arange(2 * 4).reshape(2, 4, 1)
    ids = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])

    shifted = from_padded(hidden, ids)

    assert shifted.targets.tolist() == [[2, 3, 4], [6, 7, 8]]
    assert shifted.hidden[..., 0].tolist() == [[0, 1, 2], [4, 5, 6]]
    assert shifted.segments.tolist() == [0, 3, 6]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_padding_on_either_side_is_ignored(make):
    ids = make([[0, 0, 3, 4, 5], [1, 2, 3, 0, 0]])
    mask = make([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])

    shifted = from_padded(make(np.zeros((2, 5, 1)).tolist()), ids, mask)

    assert shifted.targets.tolist() == [[-100, -100, 4, 5], [2, 3, -100, -100]]


def test_the_last_tokens_alone():
    ids = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    hidden = np.arange(2 * 4).reshape(2, 4, 1)

    shifted = from_padded(hidden, ids, np.array([[1, 1, 1, 1], [1, 1, 1, 0]]), keep_last=2)

    assert shifted.targets.tolist() == [[3, 4], [7, -100]]
    assert shifted.hidden[..., 0].tolist() == [[1, 2], [5, 6]]


def test_packed_and_padded_give_the_same_sums(server, client, rows):
    hidden, ids = rows
    packed = from_packed(hidden, ids, [0, 5, 10])
    padded = from_padded(hidden.reshape(2, 5, -1), ids.reshape(2, 5))

    a = client.score(packed.hidden, packed.targets, segments=packed.segments)
    b = client.score(padded.hidden, padded.targets, segments=padded.segments)

    logits = logits_of(server, hidden)
    expected = sum(log_softmax(logits[row])[ids[row + 1]] for row in range(4))
    assert a.segment_logprob[0] == pytest.approx(expected, abs=1e-5)
    assert np.array_equal(a.segment_logprob, b.segment_logprob)
    assert a.segment_rows.tolist() == b.segment_rows.tolist() == [4, 4]


@pytest.mark.parametrize(
    "call",
    [
        lambda: from_packed(np.zeros((4, 2)), np.zeros(3, int), [0, 3]),
        lambda: from_packed(np.zeros((4, 2)), np.zeros(4, int), [0, 3]),
        lambda: from_packed(np.zeros((2, 4, 2)), np.zeros((2, 4), int), [0, 4]),
        lambda: from_padded(np.zeros((2, 4, 2)), np.zeros((2, 3), int)),
        lambda: from_padded(np.zeros((2, 1, 2)), np.zeros((2, 1), int)),
        lambda: from_padded(np.zeros((2, 4, 2)), np.zeros((2, 4), int), keep_last=4),
        lambda: from_padded(np.zeros((2, 4, 2)), np.zeros((2, 4), int), np.zeros((2, 3))),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(InvalidArgument):
        call()
