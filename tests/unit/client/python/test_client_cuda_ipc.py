"""Tests CUDA tensors that are passed as handles of their memory, with a fake driver and a fake GPU.

A tensor on the CPU represents one on a GPU. The fake driver knows where each "allocation" begins,
and the fake server reads a handle's bytes from there.
"""

import asyncio
import ctypes

import numpy as np
import pytest
import torch
from logprobd import AsyncClient, Client, Unavailable, _local_transport, arrays
from logprobd._cuda_ipc import DeviceMemory, NotShareable
from logprobd._fake_scoring import Refusal
from logprobd._local_transport import LocalTransport
from logprobd.score_args import ScoreArgs
from logprobd.testing import FakeServer

HIDDEN = 64
VOCAB = 31
UUID = b"GPU-0-----------"


class FakeDriver:
    """Treats each tensor's storage as an allocation whose handle is its address."""

    def __init__(self):
        self.events = []
        self.is_shareable = True
        self.pinned = {}

    def wait(self, tensor):
        self.events.append("wait")

    def share(self, tensor):
        self.events.append("share")
        if not self.is_shareable:
            raise NotShareable("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE")
        base = tensor.untyped_storage().data_ptr()
        return DeviceMemory(UUID, base.to_bytes(64, "little"), tensor.data_ptr() - base)

    def pin(self, address, size):
        self.pinned[address] = size
        return True

    def unpin(self, address):
        del self.pinned[address]


class FakeGpu:
    """Reads the memory for the server, or raises `refusal`."""

    def __init__(self):
        self.refusal = None
        self.reads = []

    def read(self, uuid, handle, offset, size):
        if self.refusal is not None:
            raise self.refusal
        assert uuid == UUID
        self.reads.append(size)
        return ctypes.string_at(int.from_bytes(handle, "little") + offset, size)


@pytest.fixture
def gpu(monkeypatch):
    rows = arrays.HiddenRows

    def start(self, array, *rest, **options):
        original(self, array, *rest, **options)
        self.is_cuda = arrays.is_torch(array)

    original = rows.__init__
    monkeypatch.setattr(rows, "__init__", start)
    return FakeGpu()


@pytest.fixture
def server(gpu):
    with FakeServer(
        vocab_size=VOCAB, hidden_size=HIDDEN, shared_memory=True, device_reader=gpu.read
    ) as server:
        yield server


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def connect(server, driver):
    clients = []

    def connect(kind=Client, **options):
        client = kind(server.address, timeout=20, **options)
        client._local = LocalTransport(client._settings, driver=lambda: driver)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client._local.close()


@pytest.fixture
def rows():
    draw = np.random.default_rng(2)
    hidden = torch.from_numpy(draw.standard_normal((600, HIDDEN)).astype(np.float32))
    return hidden, draw.integers(0, VOCAB, 600)


@pytest.fixture
def expected(server, rows):
    with Client(server.address, transport="tcp") as client:
        logprob = client.score(rows[0].numpy(), rows[1]).logprob
    server.requests.clear()
    return torch.from_numpy(logprob)


def transports(server):
    return {request.transport for request in server.requests}


def test_a_tensor_is_scored_without_a_copy(server, gpu, driver, connect, rows, expected):
    client = connect()

    result = client.score(*rows)

    assert torch.equal(result.logprob, expected)
    assert (client.transport, client.transport_reason, result.transport) == (
        "cuda_ipc",
        "",
        "cuda_ipc",
    )
    assert transports(server) == {"cuda_ipc"}
    assert gpu.reads == [600 * HIDDEN * 4]
    assert server.requests[0].message_bytes < 3000
    assert (
        driver.events[-1] == "wait"
    )  # the kernels that write the rows are done before the request is sent


def test_small_tensors_travel_as_handles_too(connect, rows, expected):
    client = connect()

    assert torch.equal(client.score(rows[0][:2], rows[1][:2]).logprob, expected[:2])
    assert client.transport == "cuda_ipc"


@pytest.mark.parametrize("chunk_rows", [1000, 7])
def test_views_ignored_rows_and_other_types_are_converted_on_the_device(
    server, connect, rows, chunk_rows
):
    hidden, targets = rows[0].view(20, 30, HIDDEN)[:, 3:], rows[1].reshape(20, 30)[:, 3:].copy()
    targets[::2, 5] = -100
    with Client(server.address, transport="tcp") as tcp:
        expected = tcp.score(hidden.numpy(), targets, dtype="bf16").logprob
    server.requests.clear()

    result = connect(chunk_rows=chunk_rows).score(hidden, targets, dtype="bf16")

    assert np.array_equal(result.logprob.numpy(), expected)
    assert transports(server) == {"cuda_ipc"}


def test_streams_and_asyncio_send_handles_too(server, connect, rows, expected):
    async def run():
        client = connect(AsyncClient)
        results = [await client.score(*rows)]
        results += [result async for result in client.score_stream([rows] * 3)]
        await client.close()
        return results

    results = [*asyncio.run(run()), *connect().score_stream([rows] * 3)]

    assert all(torch.equal(result.logprob, expected) for result in results)
    assert transports(server) == {"cuda_ipc"}


def test_the_tensor_lives_until_its_request_is_answered(connect, rows):
    client = connect()
    client.score(*rows)
    plan = _local_transport.ScorePlan(
        ScoreArgs(rows[0].view(2, 300, HIDDEN)[:, 1:], rows[1].reshape(2, 300)[:, 1:])
    )
    placed = client._local.place(plan, _local_transport.Chunk(0, 0, 598))

    assert placed._tensor is not None

    placed.release()
    assert placed._tensor is None


def test_memory_without_a_handle_goes_through_shared_memory(
    server, driver, connect, rows, expected
):
    driver.is_shareable = False
    client = connect()

    result = client.score(*rows)

    assert torch.equal(result.logprob, expected)
    assert transports(server) == {"shm"}
    assert client.transport == "shm"
    assert "CUDA_ERROR_INVALID_VALUE" in client.transport_reason


def test_a_region_that_gpus_copy_to_is_page_locked_once(driver, connect, rows):
    driver.is_shareable = False
    client = connect()

    client.score(*rows)
    client.score(*rows)

    region = client._local._pool._regions[0]
    assert driver.pinned == {region.address: region.size}


def test_a_region_is_unlocked_before_it_is_unmapped(driver, connect, rows):
    driver.is_shareable = False
    client = connect()
    client.score(*rows)

    client.close()

    assert driver.pinned == {}


def test_a_gpu_that_the_server_does_not_reach_is_remembered(
    server, gpu, driver, connect, rows, expected
):
    gpu.refusal = Refusal("FAILED_PRECONDITION", "cuda_ipc: this server does not use that GPU")
    client = connect()

    for _ in range(3):
        assert torch.equal(client.score(*rows).logprob, expected)

    assert [request.transport for request in server.requests] == ["cuda_ipc", "shm", "shm", "shm"]
    assert "does not use that GPU" in client.transport_reason
    assert driver.events.count("share") == 1


def test_a_gpu_that_one_lease_did_not_reach_is_tried_with_the_next(
    server, gpu, connect, rows, expected
):
    gpu.refusal = Refusal("FAILED_PRECONDITION", "cuda_ipc: this server does not use that GPU")
    client = connect()
    assert client.score(*rows).transport == "shm"
    gpu.refusal = None

    server.control.drop_leases()

    assert torch.equal(client.score(*rows).logprob, expected)
    assert client.transport == "cuda_ipc"


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal("RESOURCE_EXHAUSTED", "cuda_ipc: 64 mappings are open"),
        Refusal(
            "INVALID_ARGUMENT", "cuda_ipc.handle: no memory"
        ),  # regression: this refusal disabled the GPU permanently
    ],
)
def test_a_temporary_refusal_is_tried_again_later(server, gpu, connect, rows, expected, refusal):
    now = [0.0]
    gpu.refusal = refusal
    client = connect()
    client._local._clock = lambda: now[0]
    assert torch.equal(client.score(*rows).logprob, expected)
    assert [request.transport for request in server.requests] == ["cuda_ipc", "shm"]
    gpu.refusal = None
    assert client.score(*rows).transport == "shm"

    now[0] += _local_transport.RETRY_SECONDS

    assert client.score(*rows).transport == "cuda_ipc"


def test_a_lost_lease_is_made_again(server, connect, rows, expected):
    client = connect()
    client.score(*rows)
    server.control._leases[0].id = b"another one's id"

    assert torch.equal(client.score(*rows).logprob, expected)
    assert client.transport == "cuda_ipc"


def test_without_libcuda_the_rows_go_through_shared_memory(server, connect, rows, expected):
    def no_driver():
        raise NotShareable("libcuda.so.1 cannot be loaded")

    client = connect()
    client._local = LocalTransport(client._settings, driver=no_driver)

    assert torch.equal(client.score(*rows).logprob, expected)
    assert client.transport == "shm"
    assert "libcuda.so.1" in client.transport_reason


def test_a_server_without_cuda_ipc_gets_shared_memory(gpu, driver, rows):
    with FakeServer(vocab_size=VOCAB, hidden_size=HIDDEN, shared_memory=True) as server:
        client = Client(server.address)
        client._local = LocalTransport(client._settings, driver=lambda: driver)

        assert client.score(*rows).transport == "shm"
        assert "does not read GPU memory" in client.transport_reason


def test_forced_and_refused_is_an_error_that_says_why(server, gpu, driver, connect, rows):
    client = connect(transport="cuda-ipc")
    driver.is_shareable = False
    with pytest.raises(Unavailable, match='"cuda-ipc", which .*CUDA_ERROR_INVALID_VALUE'):
        client.score(*rows)
    driver.is_shareable = True

    assert client.score(*rows).transport == "cuda_ipc"
    gpu.refusal = Refusal("INVALID_ARGUMENT", "cuda_ipc: no handle of living memory")
    with pytest.raises(ValueError, match="no handle of living memory"):
        client.score(*rows)
    gpu.refusal = Refusal("FAILED_PRECONDITION", "cuda_ipc.device_uuid: another server's")
    with pytest.raises(Unavailable, match="cannot read the rows where they are: cuda_ipc.device"):
        client.score(*rows)
    gpu.refusal = None
    assert (
        client.score(*rows).transport == "cuda_ipc"
    )  # regression: the GPU was disabled permanently
    assert transports(server) == {"cuda_ipc"}


def test_shared_memory_can_be_forced_for_tensors_of_a_gpu(server, driver, connect, rows, expected):
    client = connect(transport="shm")

    assert torch.equal(client.score(*rows).logprob, expected)
    assert transports(server) == {"shm"}
    assert "share" not in driver.events


def test_arrays_of_the_host_never_ask_the_driver(server, driver, connect, rows):
    client = connect()

    client.score(rows[0].numpy(), rows[1])

    assert client.transport == "shm"
    assert driver.events == []
