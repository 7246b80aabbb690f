"""Rows written into existing memory have the same bytes as rows in a request."""

import ml_dtypes
import numpy as np
import pytest
import torch
from logprobd import InvalidArgument, _rows
from logprobd.arrays import hidden_rows

VALUES = np.random.default_rng(3).standard_normal((4, 6, 8))

NUMPY_INPUTS = {
    "fp32": (VALUES.astype(np.float32), None),
    "fp16": (VALUES.astype(np.float16), None),
    "bf16": (VALUES.astype(ml_dtypes.bfloat16), None),
    "bf16 bits": (VALUES.astype(ml_dtypes.bfloat16).view(np.uint16), "bf16"),
    "big-endian fp32": (VALUES.astype(">f4"), None),
    "big-endian bf16 bits": (
        VALUES.astype(ml_dtypes.bfloat16).view(np.uint16).astype(">u2"),
        "bf16",
    ),
    "float64 to bf16": (VALUES, "bf16"),
    "fp32 to fp16": (VALUES.astype(np.float32), "fp16"),
    "bf16 to fp32": (VALUES.astype(ml_dtypes.bfloat16), "fp32"),
}
TORCH_INPUTS = {
    "torch bf16": (torch.from_numpy(VALUES).bfloat16(), None),
    "torch fp32": (torch.from_numpy(VALUES).float(), None),
    "torch float64 to fp16": (torch.from_numpy(VALUES), "fp16"),
}
VIEWS = {
    "flat": lambda a: a.reshape(24, 8),
    "whole": lambda a: a,
    "a part of each sequence": lambda a: a[:, 1:5],
    "every other sequence": lambda a: a[::2],
    "every other row": lambda a: a.reshape(24, 8)[::2],
    "turned": lambda a: a.swapaxes(0, 1),
    "columns apart": lambda a: a.swapaxes(1, 2).reshape(-1).reshape(4, 8, 6).swapaxes(1, 2),
    "four axes": lambda a: a.reshape(2, 2, 6, 8)[:, :, 2:],
    "one row": lambda a: a[0, 0],
    "one row of columns apart": lambda a: a[0, 0, ::2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", [*NUMPY_INPUTS, *TORCH_INPUTS])
def test_rows_written_to_memory_equal_rows_that_are_sent(name, view):
    array, dtype = {**NUMPY_INPUTS, **TORCH_INPUTS}[name]
    hidden = hidden_rows(VIEWS[view](array), dtype)
    for rows in (
        slice(0, hidden.rows),
        slice(min(3, hidden.rows - 1), hidden.rows),
        np.arange(0, hidden.rows, 3),
        np.arange(hidden.rows),
    ):
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        out = np.full(count * hidden.row_bytes, 0xAA, np.uint8)

        hidden.copy_to(rows, out)

        assert out.tobytes() == bytes(hidden.take(rows))


@pytest.mark.parametrize("rows", [slice(5, 3000), np.arange(1, 3000, 2)])
def test_a_large_copy_is_split_over_threads_and_is_the_same(monkeypatch, rows):
    monkeypatch.setattr(_rows, "_PART_BYTES_MIN", 1 << 12)
    monkeypatch.setattr(_rows.os, "cpu_count", lambda: 16)
    parts = []
    write = _rows.write_numpy
    monkeypatch.setattr(_rows, "write_numpy", lambda *a: (parts.append(a[2].nbytes), write(*a)))
    hidden = hidden_rows(np.random.default_rng(0).standard_normal((3000, 32)).astype(np.float32))
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    out = np.zeros(count * hidden.row_bytes, np.uint8)

    hidden.copy_to(rows, out)

    assert out.tobytes() == bytes(hidden.take(rows))
    assert len(parts) == 4
    assert sum(parts) == out.nbytes


def test_an_error_in_a_part_of_a_copy_is_raised(monkeypatch):
    monkeypatch.setattr(_rows, "_PART_BYTES_MIN", 1)
    monkeypatch.setattr(_rows.os, "cpu_count", lambda: 16)

    def write(rows, out):
        if rows.start > 0:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        _rows.in_parallel(write, slice(0, 8), np.zeros(64, np.uint8))


def test_rows_in_the_form_that_is_sent_have_an_address():
    array = VALUES.astype(np.float32).reshape(24, 8)
    tensor = torch.from_numpy(array)

    assert hidden_rows(array).host_address(slice(2, 5)) == array[2:].ctypes.data
    assert hidden_rows(tensor).host_address(slice(2, 5)) == array[2:].ctypes.data
    assert hidden_rows(array[::2]).host_address(slice(1, 2)) == array[2:].ctypes.data


@pytest.mark.parametrize(
    ("array", "dtype", "rows"),
    [
        (VALUES.astype(np.float32).reshape(24, 8), "bf16", slice(0, 4)),
        (VALUES.astype(">f4").reshape(24, 8), None, slice(0, 4)),
        (VALUES.astype(np.float32).reshape(24, 8)[:, ::2], None, slice(0, 4)),
        (VALUES.astype(np.float32)[:, 1:], None, slice(0, 4)),
        (VALUES.astype(np.float32).reshape(24, 8), None, np.array([0, 2])),
        (torch.from_numpy(VALUES).float()[..., ::2].reshape(24, 4).t(), None, slice(0, 2)),
        (torch.from_numpy(VALUES).float().reshape(24, 8), "bf16", slice(0, 2)),
    ],
)
def test_rows_that_need_conversion_have_no_address(array, dtype, rows):
    assert hidden_rows(array, dtype).host_address(rows) is None


def test_device_rows_are_contiguous_aligned_and_of_the_type_that_is_sent():
    tensor = torch.arange(60, dtype=torch.float32).reshape(4, 15)
    whole, part = hidden_rows(tensor), hidden_rows(tensor.reshape(2, 2, 15)[:, 1:], "bf16")

    assert whole.device_rows(slice(0, 2)).data_ptr() == tensor.data_ptr()
    moved = whole.device_rows(slice(1, 3))  # a row has 60 bytes, not a multiple of 16
    assert moved.data_ptr() % 16 == 0
    assert torch.equal(moved, tensor[1:3])
    assert torch.equal(whole.device_rows(np.array([0, 3])), tensor[[0, 3]])
    assert torch.equal(part.device_rows(slice(0, 2)), tensor[[1, 3]].bfloat16())


@pytest.mark.parametrize(
    ("dtype", "size", "kind"),
    [
        ("bf16", 2, np.uint16),
        ("fp16", 2, np.float16),
        ("fp32", 4, np.float32),
        (np.float32, 4, np.float32),
        (ml_dtypes.bfloat16, 2, ml_dtypes.bfloat16),
        (torch.bfloat16, 2, torch.bfloat16),
        (torch.float32, 4, torch.float32),
    ],
)
def test_buffers_have_the_type_asked_for(dtype, size, kind):
    element_bytes, make = _rows.buffer_type(dtype)

    array = make(np.zeros(6 * size, np.uint8), (2, 3))

    assert element_bytes == size
    assert array.dtype == kind
    assert tuple(array.shape) == (2, 3)


@pytest.mark.parametrize("dtype", ["int8", np.int64, torch.int32, "nonsense", np.float64])
def test_buffers_of_other_types_are_refused(dtype):
    with pytest.raises(InvalidArgument, match="dtype is"):
        _rows.buffer_type(dtype)
