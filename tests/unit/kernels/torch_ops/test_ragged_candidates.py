"""candidate_ids given as a list of tensors: what the list may contain, and which errors name a wrong item."""

import numpy
import pytest
import torch
from logprobd_ops import linear_logprob
from score_cases import IGNORED, exact_case

ROWS = 4
EMPTY = torch.empty(0, dtype=torch.int64)


@pytest.fixture
def case():
    return exact_case(ROWS, 31, 193)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([3, 4], r"candidate_ids\[2\] is of type list: every item of the list must be a tensor"),
        (7, r"candidate_ids\[2\] is of type int"),
        (None, r"candidate_ids\[2\] is of type NoneType"),
        (numpy.array([3, 4]), r"candidate_ids\[2\] is of type ndarray"),
        (torch.tensor([3.0, 4.0]), r"candidate_ids\[2\] is torch.float32: ids must be integers"),
        (torch.tensor([True]), r"candidate_ids\[2\] is torch.bool"),
        (torch.tensor([3j]), r"candidate_ids\[2\] is torch.complex64"),
        (torch.ones(2, dtype=torch.int64, device="meta"), r"candidate_ids\[2\] is on meta"),
    ],
)
def test_a_wrong_item_is_named_by_its_index(case, item, message):
    lists = [EMPTY, torch.tensor([5]), item, EMPTY]

    with pytest.raises(ValueError, match=message):
        linear_logprob(case.hidden, case.weight, case.target, candidate_ids=lists)


def test_a_list_of_another_length_than_the_rows_is_refused(case):
    with pytest.raises(ValueError, match="list of 3 tensors, but target has 4 elements"):
        linear_logprob(case.hidden, case.weight, case.target, candidate_ids=[EMPTY] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int64])
def test_empty_items_may_have_any_dtype(case, dtype):
    empty = torch.empty(0, dtype=dtype)
    ids = torch.tensor([5, 192])
    truth = linear_logprob(
        case.hidden, case.weight, case.target, candidate_ids=[EMPTY, ids, EMPTY, EMPTY]
    ).candidate_logprobs

    mixed = linear_logprob(
        case.hidden, case.weight, case.target, candidate_ids=[empty, ids, empty, empty]
    )
    none = linear_logprob(case.hidden, case.weight, case.target, candidate_ids=[empty] * ROWS)

    assert torch.equal(mixed.candidate_logprobs, truth)
    assert none.candidate_logprobs.shape == (0,)


def test_items_may_have_different_integer_dtypes_and_shapes(case):
    lists = [
        torch.tensor([3], dtype=torch.uint8),
        torch.tensor([[4, 5], [6, 7]], dtype=torch.int16),
        torch.tensor(8, dtype=torch.int32),
        torch.tensor([192]),
    ]

    ours = linear_logprob(case.hidden, case.weight, case.target, candidate_ids=lists)

    truth = linear_logprob(
        case.hidden,
        case.weight,
        case.target,
        candidate_ids=torch.tensor([3, 4, 5, 6, 7, 8, 192]),
        candidate_offsets=torch.tensor([0, 1, 5, 6, 7]),
    )
    assert torch.equal(ours.candidate_logprobs, truth.candidate_logprobs)


def test_candidates_of_ignored_rows_have_zeros_without_a_gradient(case):
    case.target[1] = IGNORED
    hidden = case.hidden.clone().requires_grad_()
    lists = [torch.tensor([3]), torch.tensor([4, 5]), torch.tensor([6]), EMPTY]

    logprobs = linear_logprob(
        hidden, case.weight, case.target, candidate_ids=lists
    ).candidate_logprobs
    logprobs.sum().backward()

    assert (logprobs != 0).tolist() == [True, False, False, True]
    assert (hidden.grad != 0).any(-1).tolist() == [True, False, True, False]


def test_candidates_of_ignored_rows_must_be_in_the_vocabulary(case):
    case.target[1] = IGNORED
    lists = [EMPTY, torch.tensor([193]), EMPTY, EMPTY]

    with pytest.raises(IndexError, match="candidate_ids contains 193"):
        linear_logprob(case.hidden, case.weight, case.target, candidate_ids=lists)
