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


TORCH_INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]
NUMPY_INTEGERS = [np.dtype(str(each).removeprefix("torch.")) for each in TORCH_INTEGERS]


# uint8 ids turned -100 into the id 156, and 16 and 32 unsigned bits raised an error of torch.
@pytest.mark.parametrize("dtype", [*TORCH_INTEGERS, *NUMPY_INTEGERS], ids=str)
def test_ids_of_every_integer_type_can_be_ignored(dtype):
    is_torch = isinstance(dtype, torch.dtype)
    values = [[1, 2, 3], [4, 5, 6]]
    ids = torch.tensor(values).to(dtype) if is_torch else np.array(values, dtype)
    mask = np.array([[1, 1, 0], [1, 1, 1]])

    padded = from_padded(np.zeros((2, 3, 2)), ids, mask)
    packed = from_packed(np.zeros((6, 2)), ids.reshape(6), [0, 3, 6])

    assert padded.targets.tolist() == [[2, -100], [5, 6]]
    assert packed.targets.tolist() == [2, 3, -100, 5, 6, -100]
    assert padded.targets.dtype == packed.targets.dtype == (torch.int64 if is_torch else np.int64)
    assert ids.reshape(-1).tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "ids",
    [
        np.array([[1.0, 2.0, 3.0]]),
        np.array([[True, False, True]]),
        np.array([[1 + 0j, 2, 3]]),
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16),
        torch.tensor([[True, False, True]]),
    ],
    ids=lambda ids: str(ids.dtype),
)
def test_ids_that_are_not_integers_are_refused(ids):
    with pytest.raises(InvalidArgument, match="input_ids has type .*ids must be integers"):
        from_padded(np.zeros((1, 3, 2)), ids)
    with pytest.raises(InvalidArgument, match="input_ids has type .*ids must be integers"):
        from_packed(np.zeros((1, 3, 2)), ids, [0, 3])


# 2^64 - 100 as a signed integer is the ignore_index.
@pytest.mark.parametrize("give", [np.array, torch.from_numpy])
def test_ids_that_would_wrap_around_are_refused(give):
    ids = give(np.array([[1, 2**64 - 100, 3]], np.uint64))

    with pytest.raises(InvalidArgument, match="input_ids has an id of 2.63 or more"):
        from_padded(np.zeros((1, 3, 2)), ids)


@pytest.mark.parametrize("dtype", TORCH_INTEGERS, ids=str)
def test_score_takes_targets_of_every_integer_type(client, rows, dtype):
    hidden, targets = rows
    expected = client.score(hidden, targets)

    result = client.score(hidden, torch.from_numpy(targets).to(dtype))

    assert np.array_equal(result.logprob, expected.logprob)


def test_targets_beyond_32_bits_are_refused(client, rows):
    hidden, targets = rows
    for wrong in (2**32 + 5, 2**64 - 100):
        too_large = targets.astype(np.uint64)
        too_large[3] = wrong
        for given in (too_large, torch.from_numpy(too_large)):
            with pytest.raises(InvalidArgument, match=rf"targets\[3\]: {wrong}, must fit in int32"):
                client.score(hidden, given)


# Axolotl's and LLaMA-Factory's collators number the documents that they pack into a row. The first
# token of a document was scored as if it continued the previous one.
@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_a_mask_of_document_numbers_ends_each_document(make, dtype):
    ids = make([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]])
    mask = make([[1, 1, 2, 2, 2, 3], [1, 1, 1, 2, 0, 0]])
    mask = mask.astype(dtype) if make is np.array else mask.to(getattr(torch, dtype))
    hidden = np.zeros((2, 6, 1))

    shifted = from_padded(hidden, ids, mask)
    last = from_padded(hidden, ids, mask, keep_last=4)

    assert shifted.targets.tolist() == [[2, -100, 4, 5, -100], [8, 9, -100, -100, -100]]
    assert last.targets.tolist() == [[-100, 4, 5, -100], [9, -100, -100, -100]]


def test_documents_are_scored_as_if_each_had_its_own_row(client, rows):
    hidden, ids = rows[0].reshape(1, 10, -1), rows[1].reshape(1, 10)
    shifted = from_padded(hidden, ids, np.array([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3]]))

    packed = from_packed(hidden, ids, [0, 4, 7, 10])

    result = client.score(shifted.hidden, shifted.targets).logprob
    assert np.array_equal(result, client.score(packed.hidden, packed.targets).logprob[:, :-1])


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float16, np.float64])
def test_masks_of_zeros_and_ones_may_have_any_type(dtype):
    shifted = from_padded(
        np.zeros((1, 4, 1)), np.array([[1, 2, 3, 4]]), np.array([[0, 1, 1, 0]], dtype)
    )

    assert shifted.targets.tolist() == [[-100, 3, -100]]


def test_bfloat16_masks_of_zeros_and_ones():
    mask = torch.tensor([[0, 1, 1, 0]], dtype=torch.bfloat16)

    shifted = from_padded(torch.zeros(1, 4, 1), torch.tensor([[1, 2, 3, 4]]), mask)

    assert shifted.targets.tolist() == [[-100, 3, -100]]


# A mask that is added to attention scores has 0 where a token is: all but its padding was ignored.
@pytest.mark.parametrize(
    ("mask", "value"),
    [
        ([[0.0, 0.0, -np.inf]], "-inf"),
        ([[1.0, 2.0, 2.0]], "2.0"),
        ([[1, 1, -1]], "-1"),
        ([[np.nan, 1.0, 1.0]], "nan"),
    ],
)
def test_masks_of_other_values_are_refused(mask, value):
    with pytest.raises(InvalidArgument, match=f"attention_mask has the value {value} ") as error:
        from_padded(np.zeros((1, 3, 1)), np.array([[1, 2, 3]]), np.array(mask))

    assert error.value.field == "attention_mask"
