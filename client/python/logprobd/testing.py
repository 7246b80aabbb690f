"""A logprobd server in NumPy for testing code that uses the client.

    with FakeServer(vocab_size=100, hidden_size=16) as server:
        client = logprobd.Client(server.address)

It speaks the real protocol over a real gRPC connection, computes in double precision, and can
simulate failures. It is slow: use it with at most a few thousand ids and a few thousand rows.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from logprobd import _wire
from logprobd._fake_local import DeviceReader, FakeControl, FakeLimits
from logprobd._fake_scoring import FakeHead, Floats, Refusal, score


@dataclass
class ReceivedRequest:
    """A scoring message as the server received it."""

    method: str
    rows: int
    head: str
    request_id: str
    message_bytes: int
    metadata: dict[str, str]
    weights_version: int
    traceparent: str = ""
    """The request's own, or else that of the metadata."""
    transport: str = "tcp"
    """How the hidden states were passed: "tcp", "shm" or "cuda_ipc"."""


@dataclass
class _Fault:
    code: str
    left: int
    retry_after: float | None


@dataclass
class FakeServer:
    """One head behind a gRPC server, by default on a free port of 127.0.0.1.

    Use it as a context manager, or call start and stop. Attributes may change while it runs.
    """

    vocab_size: int = 1003
    hidden_size: int = 64
    name: str = "fake"
    tensor: str = "lm_head.weight"
    """Name of the weight in the answer to ListHeads."""
    seed: int = 0
    weight: Any = None
    """[vocab_size, hidden_size] float32. None means random values, scaled so that N(0, 1) rows give
    logits with standard deviation 3."""
    scale: float = 1.0
    bias: Any = None
    """[vocab_size], or None if there is no bias."""
    softcap: float = 0.0
    weights_version: int = 1
    ready: bool = True
    """Whether health says SERVING. While it is False, Score answers UNAVAILABLE."""
    delay: float = 0.0
    """Seconds before each answer."""
    message_bytes_max: int = 64 << 20
    request_rows_max: int = 8192
    top_k_max: int = 128
    candidates_max: int = 1 << 20
    segments_max: int = 65536
    stream_window: int = 16
    workers: int = 16
    host: str = "127.0.0.1"
    port: int = 0
    """Port to listen on; 0 means a free port."""
    shared_memory: bool = False
    """Whether clients may pass rows through shared memory."""
    device_reader: DeviceReader | None = None
    """Reads the bytes of CUDA IPC slices. If it is None, the server accepts no such slices."""
    local_limits: FakeLimits = field(default_factory=FakeLimits)
    control: FakeControl | None = None
    """The control socket; None unless shared_memory or device_reader is set."""
    requests: list[ReceivedRequest] = field(default_factory=list)
    """All Score and ScoreStream messages so far, including refused ones."""
    _faults: list[_Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _server: Any = None

    def __post_init__(self) -> None:
        if self.weight is None:
            draw = np.random.default_rng(self.seed)
            shape = (self.vocab_size, self.hidden_size)
            self.weight = (draw.standard_normal(shape) * 3 / math.sqrt(self.hidden_size)).astype(
                np.float32
            )
        self.vocab_size, self.hidden_size = self.weight.shape
        if self.shared_memory or self.device_reader is not None:
            self.control = FakeControl(
                self.local_limits,
                shared_memory=self.shared_memory,
                device_reader=self.device_reader,
            )

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> FakeServer:
        """Starts the server. After a stop, it listens on the same port again."""
        self._server = grpc.server(
            futures.ThreadPoolExecutor(self.workers),
            options=[
                ("grpc.max_receive_message_length", self.message_bytes_max),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self.port = self._server.add_insecure_port(self.address)
        self._server.start()
        if self.control is not None:
            self.control.start()
        return self

    def stop(self, grace: float | None = None) -> None:
        """Stops the server. Requests that are still in flight after `grace` seconds are cancelled.
        If `grace` is None, all requests in flight are cancelled at once.
        """
        if self._server is not None:
            self._server.stop(grace).wait()
            self._server = None
            if self.control is not None:
                self.control.stop()

    def __enter__(self) -> FakeServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def fail_next(
        self, count: int = 1, code: str = "RESOURCE_EXHAUSTED", retry_after: float | None = None
    ) -> None:
        """Makes the next `count` scoring messages fail with a gRPC status.

        `retry_after` is a number of seconds, or negative for "do not retry". It is sent as
        grpc-retry-pushback-ms, or on a stream in the chunk's answer.
        """
        with self._lock:
            self._faults.append(_Fault(code, count, retry_after))

    def logits(self, hidden: Floats) -> Floats:
        """Computes the logits [vocab_size] of one hidden row in double precision, with the scale,
        then the bias, then the soft cap."""
        z: Floats = self.scale * (np.asarray(self.weight, np.float64) @ hidden)
        if self.bias is not None:
            z = z + np.asarray(self.bias, np.float64)
        return self.softcap * np.tanh(z / self.softcap) if self.softcap > 0 else z

    def head(self) -> _wire.Head:
        """Returns the head as ListHeads describes it."""
        return _wire.Head(
            name=self.name,
            model_type="fake",
            vocab_size=self.vocab_size,
            vocab_rows=self.vocab_size,
            hidden_size=self.hidden_size,
            dtype=_wire.DTYPE_NUMBERS["fp32"],
            weights_version=self.weights_version,
            ready=self.ready,
            scale=self.scale,
            softcap=self.softcap,
            has_bias=self.bias is not None,
            tensor=self.tensor,
            engine="numpy",
            weight_bytes=self.vocab_size * self.hidden_size * 4,
            limits=_wire.Limits(
                message_bytes_max=self.message_bytes_max,
                request_rows_max=self.request_rows_max,
                top_k_max=self.top_k_max,
                candidates_max=self.candidates_max,
                segments_max=self.segments_max,
                stream_window=self.stream_window,
            ),
            transports=self._transports(),
            layout=[_wire.Shard(device="cpu", vocab_end=self.vocab_size)],
        )

    def _transports(self) -> list[str]:
        cuda_ipc = ["cuda_ipc"] if self.device_reader is not None else []
        return ["tcp", *(["shm"] if self.shared_memory else []), *cuda_ipc]

    def _answer(self, method: str, data: bytes, metadata: Any) -> _wire.ScoreResponse:
        """Scores one message. Raises Refusal."""
        began = time.time_ns()
        try:
            request = _wire.decode(_wire.ScoreRequest, data)
        except _wire.DecodeError as error:
            raise Refusal("INVALID_ARGUMENT", f"message: {error}") from error
        texts = {key: value for key, value in metadata or () if isinstance(value, str)}
        received = ReceivedRequest(
            method,
            request.rows,
            request.head,
            request.request_id,
            len(data),
            texts,
            request.weights_version,
            request.traceparent or texts.get("traceparent", ""),
            _transport(request),
        )
        with self._lock:
            self.requests.append(received)
            fault = next((fault for fault in self._faults if fault.left > 0), None)
            if fault is not None:
                fault.left -= 1
        if self.delay:
            time.sleep(self.delay)
        if fault is not None:
            raise Refusal(fault.code, "simulated failure", fault.retry_after)
        if not self.ready:
            raise Refusal("UNAVAILABLE", "the head is loading")
        if self.control is not None:
            request.hidden = self.control.read(request)
        checked = time.time_ns()
        response = score(
            FakeHead(
                name=self.name,
                vocab_size=self.vocab_size,
                hidden_size=self.hidden_size,
                weights_version=self.weights_version,
                request_rows_max=self.request_rows_max,
                top_k_max=self.top_k_max,
                candidates_max=self.candidates_max,
                segments_max=self.segments_max,
                logits=self.logits,
            ),
            request,
        )
        if request.trace:
            response.trace = _trace(received.traceparent, began, checked, time.time_ns())
        return response


def _trace(traceparent: str, began: int, checked: int, scored: int) -> _wire.Trace:
    """Returns the trace of a request that waited neither in a queue nor for a copy."""
    ends = (checked - began, scored - began)
    at_checked, at_scored = (_wire.TraceStage(end, end) for end in ends)
    return _wire.Trace(
        traceparent=traceparent,
        received_unix_ns=began,
        receive=_wire.TraceStage(0, ends[0]),
        queue=at_checked,
        copy=at_checked,
        engine=_wire.TraceStage(*ends),
        kernel_ns=ends[1] - ends[0],
        reply=at_scored,
    )


def _transport(request: _wire.ScoreRequest) -> str:
    if request.shared_memory is not None:
        return "shm"
    return "tcp" if request.cuda_ipc is None else "cuda_ipc"


class _Handlers(grpc.GenericRpcHandler):
    """Dispatches calls by method name. Messages are passed as bytes."""

    def __init__(self, server: FakeServer) -> None:
        self._fake = server

    def service(self, details: Any) -> Any:
        unary = {
            _wire.SCORE: self._score,
            _wire.LIST_HEADS: self._list_heads,
            _wire.VERIFY: self._verify,
            _wire.HEALTH_CHECK: self._health,
        }
        if details.method in unary:
            return grpc.unary_unary_rpc_method_handler(unary[details.method])
        if details.method == _wire.SCORE_STREAM:
            return grpc.stream_stream_rpc_method_handler(self._stream)
        return None

    def _score(self, data: bytes, context: Any) -> bytes:
        try:
            return _wire.encode(self._fake._answer("Score", data, context.invocation_metadata()))
        except Refusal as refusal:
            if refusal.retry_after is not None:
                pushback = str(round(refusal.retry_after * 1000))
                context.set_trailing_metadata((("grpc-retry-pushback-ms", pushback),))
            context.abort(grpc.StatusCode[refusal.code], refusal.message)
            raise AssertionError("abort raises") from refusal

    def _stream(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for data in messages:
            try:
                answer = self._fake._answer("ScoreStream", data, context.invocation_metadata())
            except Refusal as refusal:
                if refusal.code == "ABORTED":  # ends the whole stream
                    context.abort(grpc.StatusCode.UNAVAILABLE, refusal.message)
                answer = _wire.ScoreResponse(
                    status_code=grpc.StatusCode[refusal.code].value[0],
                    status_message=refusal.message,
                    retry_after_ms=round(max(refusal.retry_after or 0, 0) * 1000),
                )
                with contextlib.suppress(_wire.DecodeError):
                    answer.chunk_id = _wire.decode(_wire.ScoreRequest, data).chunk_id
            yield _wire.encode(answer)

    def _list_heads(self, data: bytes, context: Any) -> bytes:
        control = self._fake.control
        local = None if control is None else control.access()
        return _wire.encode(
            _wire.ListHeadsResponse(heads=[self._fake.head()], server_version="fake", local=local)
        )

    def _verify(self, data: bytes, context: Any) -> bytes:
        request = _wire.decode(_wire.VerifyRequest, data)
        rows = request.rows or 8
        if rows > 64:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"rows: {rows}, must be in [0, 64]")
        return _wire.encode(
            _wire.VerifyResponse(
                passed=True,
                rows=rows,
                logprob_tolerance=1e-4,
                entropy_tolerance=2e-4,
                logit_stddev=3.0,
                weights_version=self._fake.weights_version,
                engine="numpy",
            )
        )

    def _health(self, data: bytes, context: Any) -> bytes:
        service = _wire.decode(_wire.HealthRequest, data).service
        if service not in ("", _wire.SCORING_SERVICE):
            context.abort(grpc.StatusCode.NOT_FOUND, f'no service "{service}"')
        return _wire.encode(_wire.HealthResponse(status=_wire.SERVING if self._fake.ready else 2))
