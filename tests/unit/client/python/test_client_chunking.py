"""Tests that splitting a call keeps every limit, loses no row, and does not change sums."""

import numpy as np
import pytest
from logprobd import InvalidArgument
from logprobd.assembly import sum_segments
from logprobd.plan import ChunkLimits, cut_rows


def test_rows_are_cut_at_the_row_limit():
    assert cut_rows(10, 8, ChunkLimits(rows_max=4, bytes_max=0)) == [(0, 4), (4, 8), (8, 10)]


def test_rows_are_cut_at_the_byte_limit():
    # 4096 bytes are reserved for other fields, and 12 for each row.
    limits = ChunkLimits(rows_max=0, bytes_max=4096 + 3 * (100 + 12))

    assert cut_rows(7, 100, limits) == [(0, 3), (3, 6), (6, 7)]


def test_chunks_of_a_long_call_are_about_equal():
    # Regression: the server treated a short last chunk as a small request and formed smaller batches.
    ranges = cut_rows(8192, 8, ChunkLimits(rows_max=1023, bytes_max=0))

    assert len(ranges) == 9
    assert {end - begin for begin, end in ranges} == {911, 904}


def test_a_row_above_the_byte_limit_goes_alone():
    assert cut_rows(2, 10_000, ChunkLimits(rows_max=0, bytes_max=5_000)) == [(0, 1), (1, 2)]


def test_no_rows_are_one_empty_request():
    assert cut_rows(0, 8, ChunkLimits(4, 100)) == [(0, 0)]


def test_candidates_are_counted():
    offsets = np.array([0, 3, 3, 5, 9, 9, 10])
    limits = ChunkLimits(rows_max=100, bytes_max=0, candidates_max=5)

    assert cut_rows(6, 8, limits, offsets) == [(0, 3), (3, 6)]


def test_candidates_count_towards_the_byte_limit():
    offsets = np.arange(0, 60, 10)  # 40 bytes of ids per row
    limits = ChunkLimits(rows_max=100, bytes_max=4096 + 2 * (8 + 12 + 40))

    assert cut_rows(5, 8, limits, offsets) == [(0, 2), (2, 4), (4, 5)]


def test_a_row_with_too_many_candidates_is_named():
    with pytest.raises(InvalidArgument, match="row 1 has 6 candidates") as caught:
        cut_rows(2, 8, ChunkLimits(9, 0, candidates_max=5), np.array([0, 1, 7]))
    assert caught.value.row == 1


def test_a_row_may_have_as_many_candidates_as_the_limit():
    limits = ChunkLimits(9, 0, candidates_max=5)

    assert cut_rows(3, 8, limits, np.array([0, 5, 10, 12])) == [(0, 1), (1, 2), (2, 3)]


def test_the_first_row_with_too_many_candidates_is_named():
    with pytest.raises(InvalidArgument, match="row 1 has 6 candidates") as caught:
        cut_rows(3, 8, ChunkLimits(9, 0, candidates_max=5), np.array([0, 1, 7, 15]))
    assert caught.value.row == 1


def test_random_cuts_are_a_partition_within_the_limits():
    draw = np.random.default_rng(3)
    for _ in range(200):
        rows = int(draw.integers(1, 50))
        offsets = np.concatenate(([0], np.cumsum(draw.integers(0, 5, rows))))
        limits = ChunkLimits(int(draw.integers(1, 20)), 4096 + int(draw.integers(50, 900)), 8)

        ranges = cut_rows(rows, 32, limits, offsets)

        assert [row for begin, end in ranges for row in range(begin, end)] == list(range(rows))
        for begin, end in ranges:
            ids = offsets[end] - offsets[begin]
            assert end - begin <= limits.rows_max
            assert ids <= limits.candidates_max
            assert end - begin == 1 or (end - begin) * 44 + ids * 4 <= limits.bytes_max - 4096


def test_segments_are_summed_one_by_one_in_double():
    logprob = np.array([-1e8, -1.0, -1e-8, -2.0], np.float32)

    sums, counts, greedy = sum_segments(
        np.array([0, 3, 3, 4]), logprob, np.array([1, 0, 1, 1], np.uint8)
    )

    expected = float(logprob[0]) + float(logprob[1]) + float(logprob[2])
    assert sums.tolist() == [expected, 0.0, -2.0]
    assert counts.tolist() == [3, 0, 1]
    assert greedy.tolist() == [0, 1, 1]


def test_long_segments_of_wide_range_are_summed_in_the_order_of_rows():
    draw = np.random.default_rng(5)
    logprob = (-(10.0 ** draw.uniform(-12, 8, 256))).astype(np.float32)
    expected = 0.0
    for value in logprob:
        expected += float(value)
    pairwise = float(np.sum(logprob.astype(np.float64)))
    assert expected != pairwise  # otherwise these values could not tell the two orders apart

    sums, _, _ = sum_segments(np.array([0, 256]), logprob, np.ones(256, np.uint8))

    assert sums.tolist() == [expected]
