"""Every kind of input is converted to the right bytes."""

import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from logprobd import InvalidArgument, _tensor_kinds
from logprobd.arrays import (
    OutputKind,
    bf16_from_fp32,
    fp32_from_bf16,
    hidden_rows,
    to_candidates,
    to_int32,
    to_offsets,
)
from logprobd.result import ScoreResult

ALL = slice(None)


def all_bytes(hidden, dtype=None):
    rows = hidden_rows(hidden, dtype)
    return bytes(rows.take(slice(0, rows.rows)))


@pytest.fixture
def values():
    return np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


def test_bf16_rounds_to_nearest_and_ties_to_even():
    def from_bits(*bits):
        return np.array(bits, np.uint32).view(np.float32)

    rounded = bf16_from_fp32(
        from_bits(0x3F80_8000, 0x3F81_8000, 0x3F80_8001, 0x3F80_7FFF, 0x7F7F_FFFF, 0x8000_0000)
    )

    # a tie to even below, a tie to even above, above a tie, below a tie, overflow to inf, -0
    assert [hex(bits) for bits in rounded] == [
        "0x3f80",
        "0x3f82",
        "0x3f81",
        "0x3f80",
        "0x7f80",
        "0x8000",
    ]


def test_bf16_rounding_agrees_with_torch_and_ml_dtypes_on_random_bits():
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    finite = values[~np.isnan(values)]

    ours = bf16_from_fp32(finite)

    assert np.array_equal(ours, finite.astype(ml_dtypes.bfloat16).view(np.uint16))
    theirs = torch.from_numpy(finite).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(ours, theirs)


def test_bf16_keeps_every_nan_and_its_sign():
    nans = np.array([0x7FFF_FFFF, 0x7F80_0001, 0xFFFF_FFFF, 0xFF80_0001], np.uint32)

    kept = bf16_from_fp32(nans.view(np.float32))

    assert np.isnan(fp32_from_bf16(kept)).all()
    assert [bits >> 15 for bits in kept.tolist()] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("numpy_type", "torch_type", "name"),
    [
        (np.float32, torch.float32, "fp32"),
        (np.float16, torch.float16, "fp16"),
        (ml_dtypes.bfloat16, torch.bfloat16, "bf16"),
    ],
)
def test_numpy_and_torch_give_the_same_bytes(values, numpy_type, torch_type, name):
    array = values.astype(numpy_type)
    tensor = torch.from_numpy(values).to(torch_type)

    assert hidden_rows(array).dtype == hidden_rows(tensor).dtype == name
    assert all_bytes(array) == all_bytes(tensor) == array.tobytes()


def test_uint16_is_read_as_bf16_with_dtype(values):
    bits = bf16_from_fp32(values)

    assert all_bytes(bits, "bf16") == bits.tobytes()
    with pytest.raises(InvalidArgument, match='dtype="bf16"'):
        hidden_rows(bits)


def test_a_dtype_asks_for_rounding(values):
    expected = values.astype(ml_dtypes.bfloat16).tobytes()

    for name in ("bf16", "bfloat16"):
        assert all_bytes(values, name) == expected
    for name in ("fp16", "half", "float16"):
        assert all_bytes(values, name) == values.astype(np.float16).tobytes()
    assert all_bytes(torch.from_numpy(values), "bf16") == expected
    assert all_bytes(values.astype(np.float64), "fp32") == values.tobytes()
    assert all_bytes(torch.from_numpy(values).double(), "fp32") == values.tobytes()
    assert all_bytes(values.astype(ml_dtypes.bfloat16), "fp32") == (
        values.astype(ml_dtypes.bfloat16).astype(np.float32).tobytes()
    )


@pytest.mark.parametrize(
    "hidden",
    [
        np.zeros((2, 3)),
        torch.zeros(2, 3, dtype=torch.float64),
        [[0.5, 1.0]],
        np.zeros((2, 3), int),
        torch.zeros(2, 3, dtype=torch.int32),
    ],
)
def test_other_types_are_refused_with_advice(hidden):
    with pytest.raises(InvalidArgument, match="float32"):
        hidden_rows(hidden)


@pytest.mark.parametrize(
    "hidden", [np.zeros((2, 3), int), torch.zeros(2, 3, dtype=torch.int32), np.zeros((2, 3), bool)]
)
def test_a_dtype_does_not_make_integers_acceptable(hidden):
    with pytest.raises(InvalidArgument, match=r"hidden has type .*: convert it \(hidden\."):
        hidden_rows(hidden, "fp32")


def test_rows_on_the_host_are_not_taken_for_those_of_a_gpu(values):
    assert not hidden_rows(values).is_cuda
    assert not hidden_rows(torch.from_numpy(values)).is_cuda


def test_an_unknown_dtype_is_refused(values):
    with pytest.raises(InvalidArgument, match="fp8"):
        hidden_rows(values, "fp8")


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
def test_strides_are_followed(make):
    base = np.arange(2 * 5 * 8, dtype=np.float32).reshape(2, 5, 8)
    array = make(base)

    assert all_bytes(array[:, :-1]) == base[:, :-1].tobytes()
    assert all_bytes(array[:, :, ::2] if make is np.asarray else array[:, :, 0:8:2]) == (
        base[:, :, ::2].tobytes()
    )
    assert all_bytes(array[0].T) == base[0].T.tobytes()


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
def test_chosen_rows_are_gathered(make):
    base = np.arange(2 * 5 * 8, dtype=np.float32).reshape(2, 5, 8)
    chosen = np.array([0, 3, 7])

    for view in (base, base[:, 1:]):
        rows = hidden_rows(make(view))
        flat = view.reshape(-1, 8)
        assert bytes(rows.take(chosen)) == flat[chosen].tobytes()
        assert bytes(rows.take(slice(2, 6))) == flat[2:6].tobytes()


def test_contiguous_numpy_rows_are_not_copied(values):
    view = hidden_rows(values).take(slice(1, 3))

    values[1, 0] = 42.0

    assert np.frombuffer(view, np.float32)[0] == 42.0


def test_big_endian_arrays_are_swapped(values):
    assert all_bytes(values.astype(">f4")) == values.tobytes()


def test_a_tensor_that_requires_grad_is_accepted(values):
    assert all_bytes(torch.from_numpy(values).requires_grad_()) == values.tobytes()


class DlpackOnly:
    """An array of another library, which offers only the DLPack protocol."""

    def __init__(self, owner):
        self._owner = owner

    def __dlpack__(self, **kwargs):
        return self._owner.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._owner.__dlpack_device__()


def test_dlpack_arrays_are_read(values):
    assert all_bytes(DlpackOnly(values)) == values.tobytes()


def test_dlpack_bf16_is_read_through_torch(values):
    tensor = torch.from_numpy(values).bfloat16()

    rows = hidden_rows(DlpackOnly(tensor))

    assert rows.dtype == "bf16"
    assert bytes(rows.take(slice(0, 4))) == values.astype(ml_dtypes.bfloat16).tobytes()
    assert isinstance(rows.kind.give(np.zeros(2)), np.ndarray)


class Dlpack(DlpackOnly):
    """An array whose memory NumPy cannot read, at least not by DLPack."""

    device = 1

    def __dlpack__(self, **kwargs):
        raise BufferError("bfloat16")

    def __dlpack_device__(self):
        return (self.device, 0)


def test_dlpack_arrays_that_numpy_cannot_read_may_convert_themselves(values):
    class WithArray(Dlpack):
        def __array__(self, dtype=None, copy=None):
            return self._owner

    bits = values.astype(ml_dtypes.bfloat16)

    assert all_bytes(WithArray(bits)) == bits.tobytes()


def test_without_torch_numpy_reads_what_it_can(values, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)

    assert all_bytes(DlpackOnly(values)) == values.tobytes()
    on_a_gpu = Dlpack(values)
    on_a_gpu.device = 2
    for array in (Dlpack(values), on_a_gpu):
        with pytest.raises(InvalidArgument, match="install torch") as refused:
            hidden_rows(array, name="rows")
        assert refused.value.field == "rows"


@pytest.fixture
def gpu(monkeypatch):
    """Returns a function that makes a tensor one on a GPU, and what was done with it: the sizes of
    page-locked memory, and "wait" where the work on the GPU was waited for."""

    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 1)

    class Stream:
        def __init__(self, device):
            assert device == OnGpu.device

        def synchronize(self):
            done.append("wait")

    def empty(count, dtype, pin_memory):
        assert pin_memory
        done.append(count)
        return torch.zeros(count, dtype=dtype)

    done = []
    monkeypatch.setattr(_tensor_kinds, "plain", lambda tensor, name: tensor)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return lambda tensor: tensor.as_subclass(OnGpu), done


def test_chunks_of_a_gpu_are_copied_through_the_same_page_locked_memory(values, gpu):
    on_gpu, done = gpu
    rows = hidden_rows(on_gpu(torch.from_numpy(values)))

    for begin, end in ((0, 2), (2, 3), (1, 4)):
        assert bytes(rows.take(slice(begin, end))) == values[begin:end].tobytes()

    assert rows.is_cuda
    assert done == [2 * 6, "wait", "wait", 3 * 6, "wait"]


def test_ids_must_be_integers_that_fit():
    assert to_int32(torch.tensor([1, -100]), "targets").tolist() == [1, -100]
    ends = [-(2**31), 2**31 - 1]
    assert to_int32(ends, "targets").tolist() == ends
    for wrong in (-(2**31) - 1, 2**31):
        with pytest.raises(InvalidArgument, match=rf"candidates\[0\]: {wrong}, must fit") as caught:
            to_int32([wrong], "candidates")
        assert caught.value.row is None
    with pytest.raises(InvalidArgument, match="float64"):
        to_int32([1.0, 2.0], "targets")
    with pytest.raises(InvalidArgument, match=r"targets\[1\]: 2147483648") as caught:
        to_int32([0, 2**31], "targets")
    assert caught.value.row == 1


@pytest.mark.parametrize("offsets", [[1, 4], [0, 3], [0, 3, 2, 4], [], [[0, 4]], [0.0, 4.0]])
def test_bad_offsets_are_refused(offsets):
    with pytest.raises(InvalidArgument, match="segments"):
        to_offsets(offsets, "segments", 4)


@pytest.mark.parametrize(
    ("given", "shape", "message"),
    [
        ([1, 2, 3, 4], (5,), r"list of 4 ids: .* such as \[\[1, 2, 3, \.\.\.\]\] \* 5"),
        ([[[1]]], (1,), "one flat list of ids for each of the 1 rows"),
        (([[1, 2]], [0, 2]), (1,), r"ids \[n\] and offsets \[2\]"),
        (([1, 2], [0, 1, 2]), (1,), r"ids \[n\] and offsets \[2\]"),
        (5, (), r"has shape \(\): pass \('n',\)"),
        (np.zeros((4, 3), int), (2, 3), r"has shape \(4, 3\): pass \(2, 3, 'n'\), n ids per row"),
    ],
)
def test_candidates_of_another_form_are_refused(given, shape, message):
    with pytest.raises(InvalidArgument, match=message) as refused:
        to_candidates(given, shape)
    assert refused.value.field == "candidates"


@pytest.mark.parametrize(
    ("given", "shape", "offsets"),
    [
        ([], (0,), [0]),
        (np.zeros((6, 2), int), (2, 3), [0, 2, 4, 6, 8, 10, 12]),
        (np.zeros((2, 3, 2), int), (2, 3), [0, 2, 4, 6, 8, 10, 12]),
        (np.array([[7, 8, 9]]), (), [0, 3]),
        (np.array([7, 8]), (), [0, 2]),
        (([], [0, 0]), (1,), [0, 0]),
    ],
)
def test_candidates_may_be_flattened_or_empty(given, shape, offsets):
    assert to_candidates(given, shape).offsets.tolist() == offsets


# Each copy to the GPU makes the GPU switch away from the server's process in the middle of a batch.
def test_a_result_is_given_output_by_output_when_it_is_read_and_once():
    class Given(OutputKind):
        def give(self, values):
            given.append(float(values[0]))
            return torch.from_numpy(values)

    given: list[float] = []
    arrays = {"logprob": np.array([-1.0], np.float32), "entropy": np.array([2.0], np.float32)}
    result = ScoreResult(
        arrays, Given(), shape=(1,), weights_version=1, ignored_rows=0, nonfinite_rows=0
    )

    assert given == []
    assert result.logprob is result.logprob
    assert given == [-1.0]
    assert result.sum_by_segment([0, 1]).tolist() == [-1.0]
    assert result.entropy.tolist() == [2.0]
    with pytest.raises(AttributeError, match="lse was not requested"):
        _ = result.lse
    assert given == [-1.0, -1.0, 2.0]
