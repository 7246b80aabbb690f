"""WeightsClient's messages: sizes, handles of GPU memory, and placements that the server refuses."""

import concurrent.futures
import ctypes
import threading
import time

import grpc
import numpy as np
import pytest
import torch
from logprobd import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    WeightsClient,
    _status,
    _wire,
    arrays,
    errors,
    weights,
)
from logprobd._cuda_ipc import DeviceMemory
from logprobd._local_transport import LocalTransport
from logprobd._threads import finish
from logprobd.testing import FakeServer
from waiting import wait_until

HIDDEN = 512
ROWS = 9216  # 18 MiB of fp32: three messages


class FakePush(grpc.GenericRpcHandler):
    """Receives pushes, and refuses those that name memory if `refusal` is set."""

    def __init__(self) -> None:
        self.calls = []
        self.refusal = ""
        self.may_answer = threading.Event()
        self.may_answer.set()

    def service(self, details):
        assert details.method == _wire.PUSH_WEIGHTS
        return grpc.stream_unary_rpc_method_handler(self.push)

    def push(self, requests, context) -> bytes:
        header, *rows = [_wire.decode(_wire.PushWeightsRequest, data) for data in requests]
        self.calls.append((header.header, [each.rows for each in rows]))
        self.may_answer.wait(20)
        if self.refusal and any(each.rows.cuda_ipc or each.rows.shared_memory for each in rows):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        return _wire.encode(_wire.PushWeightsResponse())

    @property
    def rows(self):
        return [each for _, rows in self.calls for each in rows]


@pytest.fixture
def fake():
    push = FakePush()
    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(2),
        handlers=(push,),
        options=(("grpc.max_receive_message_length", -1),),
    )
    push.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield push
    push.may_answer.set()
    server.stop(None)


@pytest.fixture
def scoring():
    with FakeServer(
        vocab_size=7, hidden_size=HIDDEN, shared_memory=True, device_reader=lambda *_: b""
    ) as server:
        yield server


class FakeDriver:
    """Treats a tensor's storage as an allocation whose handle is its address."""

    def wait(self, tensor) -> None:
        pass

    def share(self, tensor) -> DeviceMemory:
        base = tensor.untyped_storage().data_ptr()
        return DeviceMemory(b"u" * 16, base.to_bytes(64, "little"), tensor.data_ptr() - base)

    def pin(self, address, size) -> bool:
        return False


@pytest.fixture
def gpu_client(fake, scoring, monkeypatch):
    """A client for which tensors on the CPU represent tensors on a GPU."""
    original = arrays.HiddenRows.__init__

    def start(self, array, *rest, **options):
        original(self, array, *rest, **options)
        self.is_cuda = arrays.is_torch(array)

    monkeypatch.setattr(arrays.HiddenRows, "__init__", start)
    with WeightsClient(
        fake.address, timeout=20, load_timeout=20, scoring_address=scoring.address
    ) as client:
        local = LocalTransport(client._scoring._settings, driver=FakeDriver)
        client._local = client._scoring._local = local
        yield client


def weight() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, HIDDEN)).astype(np.float32)


def test_messages_have_at_most_8_mib_and_all_rows_in_order(fake):
    rows = weight()

    with WeightsClient(fake.address, load_timeout=20) as client:
        client.push(rows, version=3, row_begin=10, vocab_rows=20_000, head="h", bias=rows[:, 0])

    ((header, sent),) = fake.calls
    assert header == _wire.PushHeader("h", 3, _wire.DTYPE_NUMBERS["fp32"], 20_000)
    bias, *pieces = sent
    assert (bias.is_bias, bias.row_begin, bias.rows) == (True, 10, ROWS)
    assert bytes(bias.data) == rows[:, 0].tobytes()
    assert [(each.row_begin, each.rows) for each in pieces] == [
        (10, 4096),
        (4106, 4096),
        (8202, 1024),
    ]
    assert max(len(each.data) for each in pieces) == 8 << 20
    assert b"".join(each.data for each in pieces) == rows.tobytes()


def test_a_cuda_tensor_travels_as_handles_of_its_memory(fake, gpu_client):
    rows = torch.from_numpy(weight())

    gpu_client.push(rows, version=2)

    read = [
        ctypes.string_at(int.from_bytes(at.handle, "little") + at.offset, at.bytes)
        for at in (each.cuda_ipc for each in fake.rows)
    ]
    assert b"".join(read) == rows.numpy().tobytes()
    assert all(len(each.data) == 0 for each in fake.rows)
    assert (gpu_client.transport, gpu_client.transport_reason) == ("cuda_ipc", "")


def test_refused_handles_are_sent_through_shared_memory(fake, gpu_client):
    fake.refusal = "cuda_ipc: this GPU cannot be reached"
    original = fake.push

    def push(requests, context):
        fake.refusal = "cuda_ipc: this GPU cannot be reached" if len(fake.calls) == 0 else ""
        return original(requests, context)

    fake.push = push

    gpu_client.push(torch.from_numpy(weight()), version=2)

    assert len(fake.calls) == 2
    assert all(each.shared_memory is not None for each in fake.calls[1][1])
    assert gpu_client.transport == "shm"
    assert "this GPU cannot be reached" in gpu_client.transport_reason


def test_memory_of_an_unanswered_push_is_not_used_again(fake, scoring, monkeypatch):
    monkeypatch.setenv("LOGPROBD_TRANSPORT", "shm")
    fake.may_answer.clear()
    with WeightsClient(
        fake.address, timeout=20, load_timeout=0.5, scoring_address=scoring.address
    ) as client:
        with pytest.raises(DeadlineExceeded, match="load_timeout"):
            client.push(weight()[:1024], version=2)
        fake.may_answer.set()
        client._load_timeout = 20
        client.push(weight()[:1024], version=2)

    abandoned, later = (call[1][0].shared_memory.region for call in fake.calls)
    assert bytes(abandoned) != bytes(later)


def test_a_cancelled_push_gives_up_its_memory_before_the_client_is_closed(
    fake, scoring, monkeypatch
):
    # A push of another thread would else write into memory that the server may still read.
    monkeypatch.setenv("LOGPROBD_TRANSPORT", "shm")
    fake.may_answer.clear()
    with (
        WeightsClient(
            fake.address, timeout=20, load_timeout=20, scoring_address=scoring.address
        ) as client,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        push = threads.submit(client.push, weight()[:1024], version=2)
        wait_until(lambda: fake.calls)
        assert len(scoring.control.clients) == 1

        finish(client._pool.close())  # the first step of close

        with pytest.raises(Cancelled):
            push.result(timeout=20)
        wait_until(lambda: not scoring.control.clients)


def test_memory_of_an_answered_push_is_used_again(fake, scoring, monkeypatch):
    monkeypatch.setenv("LOGPROBD_TRANSPORT", "shm")
    with WeightsClient(fake.address, load_timeout=20, scoring_address=scoring.address) as client:
        for version in (2, 3):
            client.push(weight()[:1024], version=version)

    first, second = (each.shared_memory for each in fake.rows)
    assert (second.region, second.offset) == (first.region, first.offset)


class Clock:
    """Takes the place of the module `time`."""

    now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(weights, "time", clock)
    return clock


def test_all_calls_of_a_push_share_its_time_limit(fake, clock, monkeypatch):
    monkeypatch.setattr(weights, "_CALL_MESSAGES", 1)
    receive = fake.push

    def push(requests, context):
        clock.now += 40
        return receive(requests, context)

    fake.push = push

    with WeightsClient(fake.address, load_timeout=70) as client:
        with pytest.raises(DeadlineExceeded, match="load_timeout passed"):
            client.push(weight(), version=2)  # three messages

    assert len(fake.calls) == 2


def test_time_limits_are_finite_and_grow_with_the_rows(fake, monkeypatch):
    limits = []
    original = WeightsClient._push_requests

    def push_requests(self, requests, deadline):
        limits.append(deadline - time.monotonic())
        return original(self, requests, deadline)

    monkeypatch.setattr(WeightsClient, "_push_requests", push_requests)
    with WeightsClient(fake.address) as client:
        client.push(weight(), version=2)
    with WeightsClient(fake.address, load_timeout=7) as client:
        client.push(weight(), version=2)

    assert limits == pytest.approx([600 + weight().nbytes / (8 << 20), 7], abs=1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"address": "a:1,b:1"}, "name one server"),
        ({"timeout": 0}, "timeout is 0"),
        ({"load_timeout": 0}, "load_timeout is 0"),
    ],
)
def test_bad_settings_are_refused(options, text):
    with pytest.raises(InvalidArgument, match=text):
        WeightsClient(**options)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("FAILED_PRECONDITION", errors.WeightsConflict),
        ("ALREADY_EXISTS", errors.WeightsConflict),
        ("ABORTED", errors.WeightsConflict),
        ("DATA_LOSS", errors.WeightsDataLoss),
        ("RESOURCE_EXHAUSTED", errors.LogprobdError),
        ("UNIMPLEMENTED", errors.LogprobdError),
        ("PERMISSION_DENIED", errors.LogprobdError),
        ("UNAVAILABLE", errors.Unavailable),
        ("INVALID_ARGUMENT", errors.InvalidArgument),
        ("NOT_FOUND", errors.NotFound),
    ],
)
def test_each_code_of_the_service_has_its_class(code, error):
    made = _status.from_weights_status(code, "some details", address="host:1")

    assert (type(made), made.code) == (error, code)
    assert "some details" in str(made)


def test_another_kind_of_server_is_told_from_a_missing_method():
    error = _status.from_weights_status("UNIMPLEMENTED", "", address="host:1")

    assert type(error) is errors.NotFound
    assert "host:1" in str(error)
    assert "--admin" in str(error)


def test_a_push_without_room_waits_only_while_its_time_lasts(fake):
    def refuse(requests, context):
        fake.calls.append(list(requests))
        context.set_trailing_metadata((("grpc-retry-pushback-ms", "30000"),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "256 pushes")

    fake.push = refuse

    with WeightsClient(fake.address, load_timeout=20) as client:
        with pytest.raises(errors.Overloaded, match="256 pushes") as refused:
            client.push(weight()[:1], version=2)

    assert refused.value.retry_after == 30
    assert len(fake.calls) == 1


def test_a_push_without_room_is_sent_again_after_the_hint(fake, clock):
    receive = fake.push

    def refuse(requests, context):
        list(requests)
        fake.push = receive
        context.set_trailing_metadata((("grpc-retry-pushback-ms", "30000"),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "256 pushes")

    fake.push = refuse

    with WeightsClient(fake.address, load_timeout=200) as client:
        client.push(weight()[:1], version=2)

    assert [each.rows for each in fake.rows] == [1]
    assert clock.now >= 1030.0


def test_a_push_for_which_memory_is_missing_is_not_repeated(fake):
    def refuse(requests, context):
        fake.calls.append(list(requests))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "1 B are missing")

    fake.push = refuse

    with WeightsClient(fake.address, load_timeout=20) as client:
        with pytest.raises(errors.LogprobdError, match="1 B are missing"):
            client.push(weight()[:1], version=2)

    assert len(fake.calls) == 1


def test_the_default_address_is_the_socket_of_the_own_user(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "logprobd-8470.sock.admin"
    with WeightsClient() as elsewhere:
        assert elsewhere.address != f"unix:{path}"
    path.touch()
    with WeightsClient() as client:
        assert client.address == f"unix:{path}"


def test_a_socket_of_another_user_is_not_taken(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "logprobd-8470.sock.admin").touch()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with WeightsClient() as client:
        assert client.address == "unix:/tmp/logprobd-12345/logprobd-8470.sock.admin"
