"""WeightsClient's messages: sizes, handles of GPU memory, and placements that the server refuses."""

import concurrent.futures
import ctypes
import pickle
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


# Calls that change versions


class FakeWeights(grpc.GenericRpcHandler):
    """Answers every method but Push with what `answers` has for it: a message, or a list of those of
    a stream. A tuple of a status and a text, also at the end of a stream, ends the call."""

    REQUESTS = {
        _wire.LOAD_WEIGHTS: _wire.LoadWeightsRequest,
        _wire.COMMIT_WEIGHTS: _wire.CommitWeightsRequest,
        _wire.ROLLBACK_WEIGHTS: _wire.RollbackWeightsRequest,
        _wire.DISCARD_WEIGHTS: _wire.DiscardWeightsRequest,
        _wire.LIST_WEIGHTS: _wire.ListWeightsRequest,
    }

    def __init__(self) -> None:
        self.answers = {}
        self.requests = []
        self.seconds = []
        self.metadata = []
        self.ended = threading.Event()

    def service(self, details):
        method = details.method
        if method == _wire.LOAD_WEIGHTS:
            return grpc.unary_stream_rpc_method_handler(self.stream)
        return grpc.unary_unary_rpc_method_handler(lambda *call: self.unary(method, *call))

    def receive(self, method, data, context):
        self.requests.append(_wire.decode(self.REQUESTS[method], data))
        self.seconds.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata()))
        return self.answers[method]

    def unary(self, method, data, context) -> bytes:
        answer = self.receive(method, data, context)
        if isinstance(answer, tuple):
            context.abort(*answer)
        return _wire.encode(answer)

    def stream(self, data, context):
        context.add_callback(self.ended.set)
        for answer in self.receive(_wire.LOAD_WEIGHTS, data, context):
            if isinstance(answer, tuple):
                context.abort(*answer)
            if isinstance(answer, threading.Event):
                answer.wait(20)
            else:
                yield _wire.encode(answer)


@pytest.fixture
def service():
    weights_service = FakeWeights()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), handlers=(weights_service,))
    weights_service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield weights_service
    server.stop(None)


LIVE = {"version": 3, "sha256": "ab", "source": "/m", "loaded_unix_seconds": 9, "weight_bytes": 8}
STATE = _wire.HeadWeightsState(
    "h",
    live=_wire.WeightsVersion(**LIVE, dtype=_wire.DTYPE_NUMBERS["fp16"]),
    previous=_wire.WeightsVersion(version=2),
    pushed=_wire.PushedVersion(4, 5, 6),
    highest_version=7,
)
KNOWN = weights.HeadWeights(
    "h",
    live=weights.WeightsVersion(**LIVE, dtype="fp16"),
    staged=None,
    previous=weights.WeightsVersion(2, "", "", 0, 0, "unknown"),
    pushed=weights.PushedVersion(version=4, rows=5, vocab_rows=6),
    highest_version=7,
)


@pytest.mark.parametrize(
    ("method", "call", "request_"),
    [
        (
            _wire.COMMIT_WEIGHTS,
            lambda client: client.commit("h", version=3),
            _wire.CommitWeightsRequest("h", 3),
        ),
        (_wire.COMMIT_WEIGHTS, lambda client: client.commit(), _wire.CommitWeightsRequest()),
        (
            _wire.ROLLBACK_WEIGHTS,
            lambda client: client.rollback("h"),
            _wire.RollbackWeightsRequest("h"),
        ),
        (_wire.DISCARD_WEIGHTS, lambda client: client.discard(), _wire.DiscardWeightsRequest()),
        (
            _wire.DISCARD_WEIGHTS,
            lambda client: client.discard("h", staged=True),
            _wire.DiscardWeightsRequest("h", staged=True),
        ),
        (
            _wire.DISCARD_WEIGHTS,
            lambda client: client.discard(previous=True),
            _wire.DiscardWeightsRequest(previous=True),
        ),
    ],
)
def test_a_change_is_sent_and_answered_with_the_versions_of_the_head(
    service, method, call, request_
):
    service.answers[method] = _wire.WeightsResponse(STATE)

    with WeightsClient(service.address) as client:
        assert call(client) == KNOWN

    assert service.requests == [request_]


def test_list_gives_the_versions_of_every_head(service):
    nothing = _wire.HeadWeightsState("i", staged=_wire.WeightsVersion(version=1, dtype=9))
    service.answers[_wire.LIST_WEIGHTS] = _wire.ListWeightsResponse([STATE, nothing])

    with WeightsClient(service.address) as client:
        first, second = client.list()
        client.list("h")

    assert first == KNOWN
    assert (second.live, second.previous, second.pushed) == (None, None, None)
    assert (second.staged.version, second.staged.dtype) == (1, "unknown")
    assert [request.head for request in service.requests] == ["", "h"]


def test_a_refused_change_is_a_typed_error(service):
    service.answers[_wire.COMMIT_WEIGHTS] = (grpc.StatusCode.FAILED_PRECONDITION, "not staged")

    with WeightsClient(service.address) as client:
        with pytest.raises(errors.WeightsConflict, match="not staged"):
            client.commit()


def test_a_call_that_the_server_cancels_may_be_made_elsewhere(service):
    service.answers[_wire.LIST_WEIGHTS] = (grpc.StatusCode.CANCELLED, "drained")

    with WeightsClient(service.address) as client:
        with pytest.raises(errors.Unavailable, match="the server cancelled the call: drained"):
            client.list()


def test_a_closed_client_makes_no_calls(service):
    client = WeightsClient(service.address)
    client.close()
    client.close()

    with pytest.raises(Cancelled):
        client.list()
    assert service.requests == []


def test_the_limit_of_a_call_is_the_clients(service):
    service.answers[_wire.LIST_WEIGHTS] = _wire.ListWeightsResponse()

    for timeout in (50, float("inf")):
        with WeightsClient(service.address, timeout=timeout) as client:
            assert client.list() == []

    assert service.seconds[0] == pytest.approx(50, abs=20)
    assert service.seconds[1] > 1e6


def test_token_and_name_of_the_client_travel_with_each_call(service):
    service.answers[_wire.LIST_WEIGHTS] = _wire.ListWeightsResponse()
    service.answers[_wire.LOAD_WEIGHTS] = [_wire.LoadWeightsProgress(done=STATE.live)]

    with WeightsClient(service.address, token="secret") as client:
        client.list()
        client.load("/m")

    assert [each["authorization"] for each in service.metadata] == ["Bearer secret"] * 2


def test_a_client_survives_pickling(service):
    service.answers[_wire.LIST_WEIGHTS] = _wire.ListWeightsResponse([STATE])
    with WeightsClient(service.address, timeout=50, load_timeout=70) as client:
        again = pickle.loads(pickle.dumps(client))

    with again:
        assert again.list() == [KNOWN]
    assert service.seconds[0] == pytest.approx(50, abs=20)
    assert repr(again) == f'WeightsClient("{service.address}")'


# Loading


def test_a_load_tells_its_progress_and_returns_its_version(service):
    service.answers[_wire.LOAD_WEIGHTS] = [
        _wire.LoadWeightsProgress("checking"),
        _wire.LoadWeightsProgress("loading", 5, 8),
        _wire.LoadWeightsProgress(done=STATE.live),
    ]
    options = {"head": "h", "version": 3, "sha256": "ab"}
    seen = []

    with WeightsClient(service.address) as client:
        version = client.load("/m", **options, commit=True, progress=seen.append)
        client.load("/m", in_place=True)
        client.load("/m", allow_nonfinite=True)

    assert version == KNOWN.live
    assert seen == [weights.LoadProgress("checking", 0, 0), weights.LoadProgress("loading", 5, 8)]
    assert service.requests == [
        _wire.LoadWeightsRequest(path="/m", **options, commit=True),
        _wire.LoadWeightsRequest(path="/m", in_place=True),
        _wire.LoadWeightsRequest(path="/m", allow_nonfinite=True),
    ]


def test_a_failed_load_is_a_typed_error(service):
    service.answers[_wire.LOAD_WEIGHTS] = [
        _wire.LoadWeightsProgress("checking"),
        (grpc.StatusCode.DATA_LOSS, "sha256 differs"),
    ]
    with WeightsClient(service.address) as client:
        with pytest.raises(errors.WeightsDataLoss, match="sha256 differs"):
            client.load("/m")

    service.answers[_wire.LOAD_WEIGHTS] = [_wire.LoadWeightsProgress("checking")]
    with WeightsClient(service.address) as client:
        with pytest.raises(errors.ServerBug, match="ended a load without its version"):
            client.load("/m")


def test_an_exception_of_the_progress_function_cancels_the_load(service):
    may_go_on = threading.Event()
    service.answers[_wire.LOAD_WEIGHTS] = [_wire.LoadWeightsProgress("checking"), may_go_on]

    def stop(progress):
        raise KeyError("enough")

    with WeightsClient(service.address) as client:
        with pytest.raises(KeyError, match="enough"):
            client.load("/m", progress=stop)
        assert service.ended.wait(20)  # before the client is closed
    may_go_on.set()


def test_the_limit_of_a_load_is_an_hour_or_load_timeout(service):
    service.answers[_wire.LOAD_WEIGHTS] = [_wire.LoadWeightsProgress(done=STATE.live)]

    for load_timeout in (None, 70, float("inf")):
        with WeightsClient(service.address, load_timeout=load_timeout) as client:
            client.load("/m")

    assert service.seconds[:2] == [pytest.approx(3600, abs=60), pytest.approx(70, abs=20)]
    assert service.seconds[2] > 1e6


# What a push refuses, and what it sends without rows


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (np.zeros(4, np.float32), {}, r"rows is \[4\]: pass an array \[n, hidden_size\]"),
        ([[1.0]], {}, r"rows is list: pass an array \[n, hidden_size\]"),
        (None, {"bias": np.zeros((4, 1), np.float32)}, r"bias is \[4, 1\]: pass an array \[n\]"),
        (np.zeros((4, 2)), {}, "rows has type float64"),
        (None, {"bias": np.zeros(4)}, "bias has type float64"),
        (
            np.zeros((4, 2), np.float32),
            {"bias": np.zeros(3, np.float32)},
            "bias has 3 elements of fp32, but there are 4 rows of fp32",
        ),
        (
            np.zeros((4, 2), np.float32),
            {"bias": np.zeros(4, np.float16)},
            "bias has 4 elements of fp16, but there are 4 rows of fp32",
        ),
        (None, {}, "dtype is None: name it if there are no rows"),
        (None, {"dtype": "fp8"}, "fp8"),
    ],
)
def test_rows_that_do_not_fit_are_refused(fake, rows, options, message):
    with WeightsClient(fake.address) as client:
        with pytest.raises(InvalidArgument, match=message):
            client.push(rows, version=2, **options)

    assert fake.calls == []


def test_a_push_may_have_a_bias_alone_or_neither(fake):
    bias = torch.arange(3.0, requires_grad=True)
    with WeightsClient(fake.address, load_timeout=20) as client:
        client.push(None, version=2, bias=bias, row_begin=5, dtype="bf16")
        client.push(None, version=2, dtype="bfloat16", sha256="ab", allow_nonfinite=True)
        assert client.push(np.zeros((0, 4), np.float32), version=2) is None
        assert client.push(None, version=2, bias=np.zeros(0, np.float32)) is None
        assert client.transport == "tcp"

    (first, (rows,)), (second, none) = fake.calls
    assert (rows.row_begin, rows.rows, rows.is_bias) == (5, 3, True)
    assert bytes(rows.data) == bias.detach().bfloat16().view(torch.int16).numpy().tobytes()
    assert first.dtype == second.dtype == _wire.DTYPE_NUMBERS["bf16"]
    assert (second.sha256, second.allow_nonfinite, none) == ("ab", True, [])


def test_the_version_is_staged_by_the_last_of_several_calls(fake, monkeypatch):
    monkeypatch.setattr(weights, "_MESSAGE_BYTES", 100)
    rows = np.arange(17 * 60, dtype=np.float32).reshape(17, 60)  # a row is larger than a message
    receive = fake.push

    def push(requests, context):
        receive(requests, context)
        staged = STATE.live if len(fake.rows) == 17 else None
        return _wire.encode(_wire.PushWeightsResponse(staged=staged))

    fake.push = push

    with WeightsClient(fake.address, load_timeout=20) as client:
        assert client.push(rows[:16], version=3) is None
        assert client.push(rows[16:], version=3, row_begin=16) == KNOWN.live

    assert [each.row_begin for each in fake.rows] == list(range(17))
    assert b"".join(each.data for each in fake.rows) == rows.tobytes()
    assert [len(call[1]) for call in fake.calls] == [8, 8, 1]


def test_the_default_address_falls_back_to_the_folder_of_temporary_files(monkeypatch, tmp_path):
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    for folder in ("", str(tmp_path)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        with WeightsClient() as client:
            assert client.address == "unix:/tmp/logprobd-12345/logprobd-8470.sock.admin"


def test_rows_without_elements_are_one_piece_for_the_server_to_refuse():
    rows = arrays.hidden_rows(np.zeros((4, 0), np.float32), None, "weight")

    (piece,) = weights._cut(rows, is_bias=False)

    assert (piece.begin, piece.end) == (0, 4)
