"""The client of the service Weights, which changes the weights of a server's heads."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import grpc

from logprobd import _wire, arrays, settings
from logprobd._core import TIMEOUT_MAX_SECONDS
from logprobd._local_transport import LocalTransport, PlacedChunk, RowsAt
from logprobd._pool import Answer, Call, pushback_seconds
from logprobd._status import decode_answer, from_weights_status
from logprobd._threads import ThreadsPool, finish
from logprobd.addresses import DEFAULT_PORT
from logprobd.client import Client
from logprobd.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    LogprobdError,
    Overloaded,
    ServerBug,
    is_answer,
)
from logprobd.retry import RetryPolicy
from logprobd.tls import Tls

DEFAULT_ADDRESS = "auto"

# Maximum number of bytes of rows in a message (weights.proto).
_MESSAGE_BYTES = 8 << 20
# Maximum number of messages of a call of Push. Larger tensors take several calls, which use one
# piece of shared memory in turn.
_CALL_MESSAGES = 8
# Time limits if load_timeout is None. The size of a folder is unknown; that of a push adds to the
# time in which the server checks and loads the version.
_LOAD_SECONDS = 3600.0
_PUSH_SECONDS = 600.0
_PUSH_BYTES_PER_SECOND = 8 << 20
# For pushes that find no room.
_PUSH_RETRY = RetryPolicy()


@dataclass(frozen=True)
class WeightsVersion:
    """A version of a head's weights."""

    version: int
    """Number of the version, at least 1."""
    sha256: str
    """Hex digest of the bytes of the head's rows, followed by its bias."""
    source: str
    """Path on the server's host from which it was loaded, or "pushed"."""
    loaded_unix_seconds: int
    weight_bytes: int
    dtype: str = "unknown"
    """Type of the weight: "bf16", "fp16" or "fp32"; "unknown" if the server is 0.2 or older."""


@dataclass(frozen=True)
class PushedVersion:
    """A version of which rows have arrived."""

    version: int
    rows: int
    """Number of rows of the weight that have arrived."""
    vocab_rows: int
    """Number of rows of the weight."""


@dataclass(frozen=True)
class HeadWeights:
    """The versions of a head's weights. A version that does not exist is None."""

    head: str
    live: WeightsVersion | None
    """The version that scores requests. None if an in-place replacement failed half-way."""
    staged: WeightsVersion | None
    """The version that `commit` makes live."""
    previous: WeightsVersion | None
    """The version that `rollback` makes live."""
    pushed: PushedVersion | None
    """The version of which `push` has sent rows, until it is staged."""
    highest_version: int
    """Highest number that a staged or live version has ever had; every higher number is free."""


@dataclass(frozen=True)
class LoadProgress:
    """How far a load is."""

    phase: str
    """"checking", "verifying", "loading" or "committing"."""
    bytes_done: int
    bytes_total: int
    """0 if it is unknown."""


_Arguments = tuple[str, float, float | None, str | None, Tls | Literal[False] | None, str | None]


def _auto_address() -> str:
    """Returns the address that --admin auto gives a server of this user on the default port.

    A socket of another user is not taken, since it could read the token.
    """
    user = os.geteuid()
    folders = [os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}", f"/tmp/logprobd-{user}"]
    path = ""
    for folder in filter(None, folders):
        path = f"{folder}/logprobd-{DEFAULT_PORT}.sock.admin"
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == user:
                break
    return f"unix:{path}"


class _Piece(NamedTuple):
    """Rows that one message carries."""

    tensor: arrays.HiddenRows
    is_bias: bool
    begin: int
    """First row, counted within the tensor."""
    end: int


class WeightsClient:
    """Changes the weights of a server's heads through its admin listener (logprobd --admin).

    Calls are not retried: after a lost connection, `list` shows whether a change took effect. Only
    a push that finds no room on the server waits for it, until load_timeout.
    Connections are opened at first use, separately in each process, so a client may be pickled and
    may be used after a fork. Thread-safe.

    Args:
        address: "host:port" or "unix:///path" of the server's admin listener. "auto": the socket of
            a server of this user that runs with --admin auto and the default --listen.
        timeout: seconds of each call except load and push, > 0; math.inf means no limit.
        load_timeout: seconds of load and of push, > 0; math.inf means no limit. Default: an hour
            for load, and for push 10 minutes and a second for each 8 MiB that it sends.
        scoring_address: address of the same server's listener for scores. On the server's host,
            `push` then sends rows through shared memory, and rows of CUDA tensors as handles of
            their memory, as far as the server allows it and LOGPROBD_TRANSPORT does not forbid it.
            None: rows are sent in messages.
        tls: files for TLS, or False for plaintext. Default: LOGPROBD_TLS_*, as for Client.
        token: token with the scope admin, and score for scoring_address. Default: LOGPROBD_TOKEN,
            else none.

    Raises InvalidArgument if an argument is invalid. All methods raise Unavailable if the server
    cannot be reached, NotFound if the address is not an admin listener or no head has the name,
    DeadlineExceeded, Cancelled after close(), InvalidArgument, WeightsConflict if the versions of
    the head do not allow the change, and LogprobdError, whose `code` is that of weights.proto, for
    all other errors. `head` is the name of a head; "" means the only head.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = 60.0,
        load_timeout: float | None = None,
        scoring_address: str | None = None,
        tls: Tls | Literal[False] | None = None,
        token: str | None = None,
    ) -> None:
        self._start((address, timeout, load_timeout, scoring_address, tls, token))

    def _start(self, arguments: _Arguments) -> None:
        self._arguments = arguments
        address, timeout, self._load_timeout, scoring_address, tls, token = arguments
        self._address = _auto_address() if address == DEFAULT_ADDRESS else address
        chosen = settings.make_settings(
            self._address,
            timeout=timeout,
            max_inflight=1,
            channels=1,
            chunk_rows=1,
            chunk_bytes=_MESSAGE_BYTES,
            retry=None,
            client_id=None,
            transport="tcp",
            tls=tls,
            token=token,
        )
        if not chosen.is_one_server:
            raise InvalidArgument(
                f'address is "{address}": name one server, as "host:port"', field="address"
            )
        if self._load_timeout is not None and not self._load_timeout > 0:
            raise InvalidArgument(
                f"load_timeout is {self._load_timeout}: it must be above 0", field="load_timeout"
            )
        self._timeout = timeout
        self._metadata = chosen.metadata
        self._pool = ThreadsPool(chosen)
        self._local = LocalTransport(chosen)
        self._scoring: Client | None = None
        if scoring_address is not None:
            self._scoring = Client(
                scoring_address,
                timeout=timeout,
                max_inflight=_CALL_MESSAGES,
                channels=1,
                chunk_bytes=_MESSAGE_BYTES,
                tls=tls,
                token=token,
            )
            self._local = self._scoring._local

    def __getstate__(self) -> _Arguments:
        return self._arguments

    def __setstate__(self, state: _Arguments) -> None:
        self._start(state)

    def __repr__(self) -> str:
        return f'{type(self).__name__}("{self.address}")'

    def __enter__(self) -> WeightsClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The address of the admin listener; for "auto" that of the socket."""
        return self._address

    @property
    def transport(self) -> str:
        """The transport of the rows of the latest push: "tcp" or "unix" (in messages), "shm"
        (shared memory) or "cuda_ipc" (read from the client's GPU memory)."""
        return self._local.last.transport

    @property
    def transport_reason(self) -> str:
        """The reason why the latest push used no faster transport; "" if there is none."""
        return self._local.last.reason

    def close(self) -> None:
        """Closes the connections, cancels calls, and returns shared memory. Idempotent."""
        finish(self._pool.close())
        self._local.close()
        if self._scoring is not None:
            self._scoring.close()

    def load(
        self,
        path: str,
        *,
        head: str = "",
        version: int = 0,
        sha256: str = "",
        commit: bool = False,
        in_place: bool = False,
        allow_nonfinite: bool = False,
        progress: Callable[[LoadProgress], object] | None = None,
    ) -> WeightsVersion:
        """Loads a version from a folder next to the live one, waits for it, and returns it.

        Args:
            path: absolute path of a Hugging Face folder or .safetensors file on the server's host.
            version: number of the new version, above all that have been live; 0 means one more than
                the highest so far. The number of a version that was live is accepted with the same
                weights.
            sha256: hex digest that the rows must have; "" means that it is not compared.
            commit: make the version live at once.
            in_place: overwrite the live weights, which implies `commit`, so that two copies need
                not fit in memory. Requests wait meanwhile, and `rollback` is not possible.
            allow_nonfinite: accept weights with NaN or Inf.
            progress: called a few times per second. An exception from it cancels the load.

        A failed load does not change the live version, unless it was in_place. Raises also
        WeightsDataLoss.
        """
        request = _wire.LoadWeightsRequest(
            head=head,
            path=str(path),
            version=version,
            sha256=sha256,
            commit=commit,
            in_place=in_place,
            allow_nonfinite=allow_nonfinite,
        )
        method = self._channel().unary_stream(_wire.LOAD_WEIGHTS)
        call = method(
            _wire.encode(request),
            timeout=self._load_seconds(_LOAD_SECONDS),
            metadata=self._metadata,
        )
        done = None
        try:
            for data in call:
                message = decode_answer(_wire.LoadWeightsProgress, data)
                if message.done is not None:
                    done = _version(message.done)
                elif progress is not None:
                    progress(LoadProgress(message.phase, message.bytes_done, message.bytes_total))
        except grpc.RpcError as error:
            raise self._error(Answer.of_failed(error)) from error
        finally:
            call.cancel()
        if done is None:
            raise ServerBug(f"{self.address} ended a load without its version")
        return done

    def push(
        self,
        rows: Any | None,
        *,
        version: int,
        head: str = "",
        row_begin: int = 0,
        vocab_rows: int = 0,
        bias: Any = None,
        dtype: str | None = None,
        sha256: str = "",
        allow_nonfinite: bool = False,
    ) -> WeightsVersion | None:
        """Sends rows of a new version's weight, which becomes the staged version once all have
        arrived.

        Any number of clients send the rows of a version, in any order. Each names the same version,
        vocab_rows, dtype, sha256 and allow_nonfinite. After an error, send the same rows again,
        also if the version may be staged already: the server keeps what has arrived until
        `discard(staged=True)`, the first push of another version, or a time without rows (its
        --push-idle-s), and compares rows that it has with those that are sent again. If all have
        arrived, but another change of the head prevented the version from being staged
        (WeightsConflict), `push(None, version=..., dtype=...)` stages it without sending them
        again. A number that was live needs the sha256 of its weights.

        Args:
            rows: [n, hidden_size], a NumPy array or torch.Tensor (CPU or CUDA) of bf16, fp16 or
                fp32. An array without rows sends nothing. None: there are none in this call, which
                sends the bias, or neither.
            version: number of the new version, above all that have been live.
            row_begin: row of the weight that rows[0] is.
            vocab_rows: number of rows of the whole weight, with its padding; 0 means as many as the
                live version has.
            bias: [n], elements of the bias for the same rows; with rows=None, those that begin at
                row_begin. A version is staged without them only if the live version has no bias.
            dtype: "bf16", "fp16" or "fp32" rounds rows and bias to this type; uint16 is bf16 bits.
                None: they have one type. It must be that of the live version. Needed if there are
                neither rows nor bias.
            sha256: hex digest of all rows followed by the bias; "" means that it is not compared.
            allow_nonfinite: accept weights with NaN or Inf.

        Returns the staged version if its last rows were among these or it was staged before,
        otherwise None. Rows and bias must not change during the call. Raises also WeightsDataLoss,
        if the sha256 differs or rows differ from those that have arrived before, and
        WeightsConflict, if they differ from those of the staged version.
        """
        weight = None if rows is None else _tensor(rows, "rows", "[n, hidden_size]", 2, dtype)
        elements = None if bias is None else _tensor(bias, "bias", "[n]", 1, dtype)
        if (
            weight is not None
            and elements is not None
            and (elements.rows, elements.dtype) != (weight.rows, weight.dtype)
        ):
            raise InvalidArgument(
                f"bias has {elements.rows} elements of {elements.dtype}, but there are "
                f"{weight.rows} rows of {weight.dtype}",
                field="bias",
            )
        pieces = [
            piece
            for tensor, is_bias in ((elements, True), (weight, False))
            if tensor is not None
            for piece in _cut(tensor, is_bias=is_bias)
        ]
        if pieces:
            type_name = pieces[0].tensor.dtype
        elif rows is not None or bias is not None:
            return None
        elif dtype is not None:
            type_name = arrays.dtype_name(dtype)
        else:
            raise InvalidArgument("dtype is None: name it if there are no rows", field="dtype")
        header = _wire.PushHeader(
            head=head,
            version=version,
            dtype=_wire.DTYPE_NUMBERS[type_name],
            vocab_rows=vocab_rows,
            sha256=sha256,
            allow_nonfinite=allow_nonfinite,
        )
        first = _wire.encode(_wire.PushWeightsRequest(header=header))
        if self._scoring is not None and self._local.needs_asking:
            self._scoring.list_heads()
        size = sum((each.end - each.begin) * each.tensor.row_bytes for each in pieces)
        seconds = self._load_seconds(_PUSH_SECONDS + size / _PUSH_BYTES_PER_SECOND)
        deadline = time.monotonic() + seconds
        staged = None
        for index in range(0, max(1, len(pieces)), _CALL_MESSAGES):
            call = pieces[index : index + _CALL_MESSAGES]
            staged = self._push_pieces(first, call, row_begin, deadline)
        return staged

    def commit(self, head: str = "", *, version: int = 0) -> HeadWeights:
        """Makes the staged version live between two batches. `version` must be its number; 0 means
        any. Raises WeightsConflict if no such version is staged."""
        return self._change(
            _wire.COMMIT_WEIGHTS, _wire.CommitWeightsRequest(head=head, version=version)
        )

    def rollback(self, head: str = "") -> HeadWeights:
        """Makes the previous version live again. Raises WeightsConflict if there is none."""
        return self._change(_wire.ROLLBACK_WEIGHTS, _wire.RollbackWeightsRequest(head=head))

    def discard(
        self, head: str = "", *, staged: bool = False, previous: bool = False
    ) -> HeadWeights:
        """Drops the staged version and rows that were pushed, or the previous version, or both, and
        frees their memory."""
        request = _wire.DiscardWeightsRequest(head=head, staged=staged, previous=previous)
        return self._change(_wire.DISCARD_WEIGHTS, request)

    def list(self, head: str = "") -> Sequence[HeadWeights]:
        """Returns the versions of one head, or of all heads for "".

        As long as the server does not know the sha256 of its first version, it reads the weights
        for it, so that the call takes longer.
        """
        data = self._unary(_wire.LIST_WEIGHTS, _wire.ListWeightsRequest(head=head))
        return [_head(state) for state in decode_answer(_wire.ListWeightsResponse, data).heads]

    def _change(self, method: str, request: Any) -> HeadWeights:
        return _head(decode_answer(_wire.WeightsResponse, self._unary(method, request)).head)

    def _unary(self, method: str, request: Any) -> bytes:
        server = self._pool.balance.all()[0]
        data = _wire.encode(request)
        call = Call(server, method, data, _seconds(self._timeout), self._metadata)
        answer = finish(self._pool.ask(call))
        if answer.code is not grpc.StatusCode.OK:
            raise self._error(answer)
        return answer.data

    def _push_pieces(
        self, header: bytes, pieces: Sequence[_Piece], row_begin: int, deadline: float
    ) -> WeightsVersion | None:
        """Makes a call of Push. It is repeated if the server refuses the memory of the pieces."""
        while True:
            placed: MutableSequence[PlacedChunk] = []
            try:
                placed += (self._place(piece, row_begin) for piece in pieces)
                data = self._push_requests([header, *(each.request for each in placed)], deadline)
                response = decode_answer(_wire.PushWeightsResponse, data)
                if placed:
                    self._local.used(placed[-1].placement)
                return None if response.staged is None else _version(response.staged)
            except BaseException as error:
                if not isinstance(error, LogprobdError) or not is_answer(error):
                    self._local.abandon()
                    raise
                if not any(self._local.refused(each, error) for each in placed):
                    raise
            finally:
                for each in placed:
                    each.release()

    def _place(self, piece: _Piece, row_begin: int) -> PlacedChunk:
        rows = slice(piece.begin, piece.end)

        def encode(rows_at: RowsAt | None) -> bytes:
            message = _wire.PushedRows(
                row_begin=row_begin + piece.begin,
                rows=piece.end - piece.begin,
                is_bias=piece.is_bias,
                **({"data": piece.tensor.take(rows)} if rows_at is None else rows_at),
            )
            return _wire.encode(_wire.PushWeightsRequest(rows=message))

        size = (piece.end - piece.begin) * piece.tensor.row_bytes
        return self._local.place_rows(piece.tensor, rows, size, encode)

    def _push_requests(self, requests: Sequence[bytes], deadline: float) -> bytes:
        """Makes a call of Push, and repeats it while the server has no room for another push."""
        attempts = 0
        while True:
            try:
                return self._push_once(requests, deadline)
            except Overloaded as error:
                attempts += 1
                delay = _PUSH_RETRY.delay(error, attempts)
                if delay is None or time.monotonic() + delay >= deadline:
                    raise
                time.sleep(delay)

    def _push_once(self, requests: Sequence[bytes], deadline: float) -> bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"load_timeout passed before {self.address} had all rows")
        method = self._channel().stream_unary(_wire.PUSH_WEIGHTS)
        call = method.future(iter(requests), timeout=left, metadata=self._metadata)
        try:
            return call.result()  # type: ignore[no-any-return]
        except grpc.RpcError as error:
            raise self._error(Answer.of_failed(error)) from error
        finally:
            call.cancel()

    def _load_seconds(self, default: float) -> float:
        return _seconds(default if self._load_timeout is None else self._load_timeout)

    def _channel(self) -> Any:
        return self._pool.channel(self._pool.balance.all()[0])

    def _error(self, answer: Answer) -> LogprobdError:
        """Returns the typed error of a call that has failed."""
        code, details = answer.code.name, answer.details or ""
        if code == "CANCELLED" and self._pool.is_closed:
            return Cancelled("the client was closed", code=code)
        if code == "CANCELLED":
            code, details = "UNAVAILABLE", f"the server cancelled the call: {details}"
        hint = pushback_seconds(answer.metadata)
        return from_weights_status(code, details, address=self.address, retry_after=hint)


def _seconds(timeout: float) -> float:
    return min(timeout, TIMEOUT_MAX_SECONDS)


def _tensor(
    value: Any, name: str, shape: str, dimensions: int, dtype: str | None
) -> arrays.HiddenRows:
    """Returns `value` as rows to send; each element of a bias is a row."""
    if getattr(value, "ndim", None) != dimensions:
        got = list(getattr(value, "shape", ())) or type(value).__name__
        raise InvalidArgument(f"{name} is {got}: pass an array {shape}", field=name)
    if arrays.is_torch(value):
        value = value.detach()
    return arrays.hidden_rows(value if dimensions == 2 else value[:, None], dtype, name)


def _cut(tensor: arrays.HiddenRows, *, is_bias: bool) -> list[_Piece]:
    step = max(1, _MESSAGE_BYTES // max(1, tensor.row_bytes))
    return [
        _Piece(tensor, is_bias, begin, min(begin + step, tensor.rows))
        for begin in range(0, tensor.rows, step)
    ]


def _version(version: _wire.WeightsVersion) -> WeightsVersion:
    fields = dict(vars(version))
    fields["dtype"] = _wire.DTYPE_NAMES.get(version.dtype, "unknown")
    return WeightsVersion(**fields)


def _head(state: _wire.HeadWeightsState) -> HeadWeights:
    def known(version: _wire.WeightsVersion | None) -> WeightsVersion | None:
        return None if version is None else _version(version)

    pushed = None if state.pushed is None else PushedVersion(**vars(state.pushed))
    return HeadWeights(
        state.head,
        known(state.live),
        known(state.staged),
        known(state.previous),
        pushed,
        state.highest_version,
    )
