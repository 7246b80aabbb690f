"""Base of Client and AsyncClient: settings, deadlines, retries and cached head descriptions."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal, TypeVar

from logprobd import _wire, settings
from logprobd._local_transport import LocalTransport
from logprobd.addresses import FindServers
from logprobd.assembly import Assembly
from logprobd.balance import Balance, ServerState
from logprobd.errors import (
    DeadlineExceeded,
    HeadMismatch,
    InvalidArgument,
    LogprobdError,
    NotFound,
    ServerBug,
    WeightsVersionMismatch,
)
from logprobd.info import HeadInfo
from logprobd.plan import ScorePlan
from logprobd.retry import RetryNotice, RetryPolicy
from logprobd.tls import Tls
from logprobd.trace import InjectTrace, can_travel
from logprobd.versions import CallVersions

Message = TypeVar("Message")

_LOG = logging.getLogger("logprobd")

# Errors after which the cached descriptions of the server's heads may be out of date.
STALE_INFO_ERRORS = (InvalidArgument, NotFound, WeightsVersionMismatch, HeadMismatch)

# Longer timeouts, and math.inf, are reduced to this: gRPC and threads do not accept infinity.
TIMEOUT_MAX_SECONDS = 1e9

# Maximum number of rounds of a call. Each round after the first sends chunks again that were scored
# before a swap of the weights.
SWAP_ROUNDS_MAX = 3


class ClientCore:
    """A client of one logprobd server, or of several that hold the same heads.

    With several servers, each request is sent to the ready server with the fewest unanswered bytes
    of this client, so a slower server gets less work and a large call uses all servers at once.
    When a server drains, fails or cannot be reached, its requests are sent to another server
    without delay. It gets requests again after a pause that grows with each failure, once its
    health service says SERVING. A server that refuses because of load gets no requests for the time
    that it asks for. While calls are made, the client checks the health and the heads of each
    server every 10 s. Raises HeadMismatch if the servers' heads differ (vocabulary, hidden size,
    dtype, scale, soft cap, bias).

    All rows of a call are scored by one version of the weights: the pinned version, or the first
    one that answers. A chunk that was scored by another version is sent again to a server that
    holds the call's version. If no server holds that version any more, the call starts again with
    the live version, at most 3 times, and then raises WeightsVersionMismatch.

    A call that gets no answer for 1 s while it retries logs a warning to the logger "logprobd".

    Connections are opened at first use, separately in each process, so a client may be pickled and
    may be used after a fork. Importing the package starts no thread.

    Args:
        address: "host:port" (IPv6 in brackets), "unix:///path" or "dns:///name:port"; several
            addresses are separated by commas or given as a list. "dns:///" means one server per A
            or AAAA record of the name, such as a Kubernetes headless service; the name is resolved
            every 30 s and after failures. For servers that change in another way, a function
            without arguments that returns their addresses; it is called as often, on another
            thread, and may block. While it raises, the client uses the servers that it knows.
            Default: LOGPROBD_ADDRESS, else 127.0.0.1:8470.
        timeout: seconds for a whole call, including retries, > 0; math.inf means no limit.
            Default: LOGPROBD_TIMEOUT_S, else 300.
        max_inflight: maximum number of requests of one call in flight at each server, >= 1.
            Default: LOGPROBD_MAX_INFLIGHT, else 8.
        channels: TCP connections to each server, used in turn, >= 1. One connection alone does not
            fill a fast network.
        chunk_rows: maximum number of rows per request, >= 1; a larger call is split.
        chunk_bytes: maximum number of bytes per request, >= 1; a larger row is sent alone.
        retry: policy of retries; RetryPolicy(attempts_max=1, overloaded_attempts_max=1) disables
            them.
        client_id: name that identifies this client to the server, which shares its time fairly
            between clients, or between those of a tenant if it demands tokens. Default: the peer
            address.
        mix_versions: allow different versions of the weights to score the rows of one call;
            ScoreResult.weights_versions lists them.
        transport: how hidden states are passed to a server on the same host. "auto" passes CUDA
            tensors as handles of their memory and other arrays through shared memory, or sends them
            inside the request if neither is available. "tcp" sends them inside the request. "shm"
            and "cuda-ipc" use only this transport; calls raise Unavailable, which says why, if it
            is not available. Default: LOGPROBD_TRANSPORT, else "auto".
        tls: files for TLS to servers that run with --tls-cert; see Tls. False means plaintext.
            Default: LOGPROBD_TLS_CA, LOGPROBD_TLS_CERT, LOGPROBD_TLS_KEY and
            LOGPROBD_TLS_SERVER_NAME if one of them is set, else plaintext.
        token: token for servers that run with --tokens, sent with each call. Default:
            LOGPROBD_TOKEN, else none.
        inject_trace: function that writes the W3C header `traceparent` of the caller's current span
            into a dict, such as OpenTelemetry's `propagate.inject`. It is called once for each call
            of score and for each batch of a stream, where it is taken. If it raises, the call goes
            on without a trace, and the logger "logprobd" gets one warning per client. Default:
            none.

    Raises InvalidArgument if a setting is invalid.
    """

    def __init__(
        self,
        address: str | Sequence[str] | FindServers | None = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        channels: int = 4,
        chunk_rows: int = settings.DEFAULT_CHUNK_ROWS,
        chunk_bytes: int = settings.DEFAULT_CHUNK_BYTES,
        retry: RetryPolicy | None = None,
        client_id: str | None = None,
        mix_versions: bool = False,
        transport: str | None = None,
        tls: Tls | Literal[False] | None = None,
        token: str | None = None,
        inject_trace: InjectTrace | None = None,
    ) -> None:
        self._start(
            settings.make_settings(
                address,
                timeout=timeout,
                max_inflight=max_inflight,
                channels=channels,
                chunk_rows=chunk_rows,
                chunk_bytes=chunk_bytes,
                retry=retry,
                client_id=client_id,
                mix_versions=mix_versions,
                transport=transport,
                tls=tls,
                token=token,
                inject_trace=inject_trace,
            )
        )

    def _start(self, chosen: settings.Settings) -> None:
        self._settings = chosen
        self._heads: list[HeadInfo] = []  # empty until ListHeads has answered
        self._local = LocalTransport(chosen)
        self._has_warned_of_tracer = False

    def __getstate__(self) -> settings.Settings:
        return self._settings

    def __setstate__(self, state: settings.Settings) -> None:
        self._start(state)

    def __repr__(self) -> str:
        return f'{type(self).__name__}("{self.address}")'

    @property
    def address(self) -> str:
        """The server's address; several addresses are separated by commas."""
        return self._settings.address

    @property
    def transport(self) -> str:
        """The transport of most rows of the latest call: "tcp" or "unix" (the rows are inside the
        request), "shm" (shared memory) or "cuda_ipc" (read from the client's GPU memory)."""
        return self._local.last.transport

    @property
    def transport_reason(self) -> str:
        """The reason why the latest call did not use a faster transport; "" if there is none."""
        return self._local.last.reason

    def servers(self) -> list[ServerState]:
        """Returns the known state of each server, without asking it.

        A server is "unknown" until the first call.
        """
        return self._balance().states()

    def _balance(self) -> Balance:
        raise NotImplementedError

    def _versions(self, plan: ScorePlan) -> CallVersions:
        """Returns the object that keeps one call to one version of the weights."""
        return CallVersions(
            self._balance(),
            head=plan.head,
            pinned=plan.weights_version,
            mix=self._settings.mix_versions,
        )

    def _in_trace(self, plan: ScorePlan) -> ScorePlan:
        """Puts a call into the caller's current trace, unless its arguments name one."""
        if self._settings.inject_trace is not None and not plan.traceparent:
            carrier: dict[str, str] = {}
            try:
                self._settings.inject_trace(carrier)
            except Exception:  # any fault of a tracer costs the trace, not the call
                carrier.clear()
                if not self._has_warned_of_tracer:
                    self._has_warned_of_tracer = True
                    _LOG.warning("inject_trace failed: calls go on without it", exc_info=True)
            traceparent = carrier.get("traceparent", "")
            plan.traceparent = traceparent if can_travel(traceparent) else ""
        return plan

    def _round_ends(self, assembly: Assembly) -> bool:
        """Returns whether a call whose chunks are all answered is complete. If it is not, some
        chunks must be scored again, because another version of the weights scored them."""
        if not self._settings.mix_versions:
            assembly.drop_other_versions()
        return not assembly.unanswered()

    def _seconds(self, timeout: float | None) -> float:
        """Returns the time limit of a call, or of a batch of a stream, in seconds."""
        return min(self._settings.timeout if timeout is None else timeout, TIMEOUT_MAX_SECONDS)

    def _deadline(self, timeout: float | None) -> float:
        """Returns the deadline of a call that starts now, on the clock time.monotonic()."""
        return time.monotonic() + self._seconds(timeout)

    def _left(self, deadline: float) -> float:
        """Returns the seconds until the deadline. Raises DeadlineExceeded if it has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"no answer from {self.address} in time: raise timeout (LOGPROBD_TIMEOUT_S) or "
                "send fewer rows per call"
            )
        return left

    def _retry_delay(
        self, error: LogprobdError, attempts: int, deadline: float, notice: RetryNotice
    ) -> float:
        """Returns the seconds to wait before the next attempt, or raises `error` to give up."""
        delay = self._settings.retry.delay(error, attempts)
        return before(deadline, delay, error, attempts, notice)


def before(
    deadline: float, delay: float | None, error: LogprobdError, attempts: int, notice: RetryNotice
) -> float:
    """Returns `delay` if it ends before the deadline. Raises `error` otherwise and for None."""
    now = time.monotonic()
    if delay is None or now + delay >= deadline:
        raise notice.gave_up(error, attempts, now)
    notice.waits(error, delay, now)
    return delay


def decode_answer(cls: type[Message], data: bytes) -> Message:
    """Decodes an answer of the server. Raises ServerBug if it is not a message of this type."""
    try:
        return _wire.decode(cls, data)
    except _wire.DecodeError as error:
        raise ServerBug(f"the server's answer cannot be read: {error}") from error


def too_many_swaps(address: str) -> WeightsVersionMismatch:
    """Returns the error of a call during which the weights changed too often."""
    return WeightsVersionMismatch(
        f"the weights of {address} were swapped {SWAP_ROUNDS_MAX} times during one call: pin "
        "weights_version, or call again"
    )
