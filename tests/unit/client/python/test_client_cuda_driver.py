"""Tests CudaDriver with a fake libcuda."""

import ctypes

import pytest
import torch
from logprobd import _cuda_ipc
from logprobd._cuda_ipc import CudaDriver, NotShareable

BASE = 0x7F00_0000_0000


class FakeCuda:
    """The functions that CudaDriver calls.

    `fails` maps a name to the status that it returns, or to None if the function does not exist.
    """

    def __init__(self):
        self.fails = {}
        self.calls = []

    def __getattr__(self, name):
        if not name.startswith("cu") or name in self.fails and self.fails[name] is None:
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            values = {
                "cuDeviceGet": lambda out, device: setattr(out._obj, "value", device.value + 10),
                "cuDevicePrimaryCtxRetain": lambda out, device: setattr(out._obj, "value", 77),
                "cuDeviceGetUuid_v2": lambda out, device: fill(out, bytes([device.value]) * 16),
                "cuMemGetAddressRange_v2": lambda base, size, at: setattr(base._obj, "value", BASE),
                "cuIpcGetMemHandle": lambda out, base: fill(out, base.value.to_bytes(64, "big")),
                "cuGetErrorName": lambda status, out: setattr(
                    out._obj, "value", b"CUDA_ERROR_%d" % status.value
                ),
            }
            values.get(name, lambda *_: None)(*arguments)
            return 0

        return call


def fill(out, data):
    ctypes.memmove(out._obj, data, len(data))


class FakeTensor:
    device = torch.device("cuda", 3)

    def data_ptr(self):
        return BASE + 4096


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(_cuda_ipc.ctypes, "CDLL", lambda name: fake)
    return fake


def test_a_tensor_is_named_by_its_gpu_its_allocation_and_its_place_in_it(cuda):
    driver = CudaDriver()

    memory = driver.share(FakeTensor())
    driver.share(FakeTensor())

    assert memory.device_uuid == bytes([13]) * 16
    assert memory.handle == BASE.to_bytes(64, "big")
    assert memory.offset == 4096
    assert cuda.calls.count("cuDevicePrimaryCtxRetain") == 1
    assert cuda.calls.count("cuDeviceGetUuid_v2") == 1
    assert cuda.calls.count("cuCtxPushCurrent_v2") == cuda.calls.count("cuCtxPopCurrent_v2") == 2


@pytest.mark.parametrize("name", ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle"])
def test_memory_that_has_no_handle_is_not_shareable_and_the_context_is_put_back(cuda, name):
    cuda.fails[name] = 1

    with pytest.raises(NotShareable, match=f"{name}: CUDA_ERROR_1"):
        CudaDriver().share(FakeTensor())

    assert cuda.calls.count("cuCtxPushCurrent_v2") == cuda.calls.count("cuCtxPopCurrent_v2") == 1


def test_an_error_without_a_name_has_its_number(cuda):
    cuda.fails = {"cuIpcGetMemHandle": 801, "cuGetErrorName": 1}

    with pytest.raises(NotShareable, match="error 801"):
        CudaDriver().share(FakeTensor())


def test_an_old_libcuda_is_reported(cuda):
    cuda.fails["cuDeviceGetUuid_v2"] = None

    with pytest.raises(NotShareable, match="libcuda has no cuDeviceGetUuid_v2"):
        CudaDriver().share(FakeTensor())


def test_without_libcuda_nothing_is_shareable(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_cuda_ipc.ctypes, "CDLL", missing)

    with pytest.raises(NotShareable, match="libcuda.so.1 cannot be loaded"):
        CudaDriver()


@pytest.mark.parametrize("is_done", [False, True])
def test_waiting_is_for_the_tensors_stream_and_only_while_it_works(cuda, monkeypatch, is_done):
    calls = []

    class Stream:
        def __init__(self, device):
            calls.append(f"stream of {device}")

        def query(self):
            return is_done

        def synchronize(self):
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)

    CudaDriver().wait(FakeTensor())

    assert calls == ["stream of cuda:3", *([] if is_done else ["synchronize"])]


def test_host_memory_is_page_locked_by_torchs_runtime(cuda, monkeypatch):
    class Runtime:
        status = 0
        calls = []

        def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
            self.calls.append((address, size, flags))
            return self.status

        def cudaHostUnregister(self, address):  # noqa: N802
            self.calls.append(address)

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    driver = CudaDriver()

    assert driver.pin(4096, 8192)
    driver.unpin(4096)
    runtime.status = 712  # already registered

    assert not driver.pin(0, 1)
    assert runtime.calls == [(4096, 8192, 1), 4096, (0, 1, 1)]
