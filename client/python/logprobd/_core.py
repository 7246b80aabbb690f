"""What Client and AsyncClient share: settings, deadlines, retries, the cache of head facts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from logprobd import _wire, settings
from logprobd._carrier import Carrier
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
from logprobd.facts import HeadInfo
from logprobd.plan import ScorePlan
from logprobd.retry import RetryPolicy
from logprobd.versions import CallVersions

Message = TypeVar("Message")

# Errors after which what is known of the server's heads may be out of date.
STALE_FACTS = (InvalidArgument, NotFound, WeightsVersionMismatch, HeadMismatch)

# In place of a longer timeout, math.inf too: neither gRPC nor threads take a number for "for ever".
TIMEOUT_MAX_SECONDS = 1e9

# Rounds of scoring again what a swap of the weights left behind.
SWAP_ROUNDS_MAX = 3


class ClientCore:
    """A client of one logprobd server, or of several that hold the same heads.

    With several, each request goes to the server with the fewest unanswered bytes of this client,
    so that a slower one gets less; a large call uses all of them at once. A server that drains,
    fails or cannot be reached is left alone at once, its requests are sent again elsewhere without
    a wait, and it comes back after a pause that grows, when its health service says that it serves.
    One that refuses for load is passed over for as long as it asks. While calls are made, each
    server is asked for its health and heads every 10 s. Servers whose heads differ (vocabulary,
    hidden size, dtype, scale, soft cap, bias) are refused with HeadMismatch.

    All rows of a call are scored by one version of the weights: the pinned one, or the first that
    is seen. An answer of another version is asked again where the first one is held; when no server
    holds it any more, the call is begun again with the version that is there, at most 3 times, and
    then fails with WeightsVersionMismatch.

    Connections are made at first use and in each process anew, so a client may be pickled and may
    cross a fork. Importing the package starts nothing.

    Args:
        address: "host:port" (IPv6 in brackets), "unix:///path" or "dns:///name:port"; or several,
            separated by commas or as a list. "dns:///" stands for a server at each A and AAAA
            record of the name, looked up every 30 s and after failures: a Kubernetes headless
            service, for instance. Default: LOGPROBD_ADDRESS, else 127.0.0.1:8470.
        timeout: seconds a call may take in all, retries included; math.inf: no limit. Default:
            LOGPROBD_TIMEOUT_S, else 300.
        max_inflight: requests of one call under way at once at each server. Default:
            LOGPROBD_MAX_INFLIGHT, else 8.
        channels: TCP connections to each server, used in turn; one connection alone limits a fast
            network.
        chunk_rows: most rows of a request; a larger call is cut.
        chunk_bytes: most bytes of a request; a row above it is sent alone.
        retry: when to try again; RetryPolicy(attempts_max=1, overloaded_attempts_max=1) never does.
        client_id: the name under which the server shares its time fairly. Default: the peer
            address.
        mix_versions: allow the rows of a call to be scored by different versions of the weights;
            weights_versions of the result lists them.
        transport: how hidden states travel to a server on this host. "auto": CUDA tensors as
            handles of their memory, others through shared memory, and in the request where neither
            can be had. "tcp": in the request. "shm", "cuda-ipc": so or not at all; Unavailable says
            why. Default: LOGPROBD_TRANSPORT, else "auto".

    Raises InvalidArgument for a bad setting.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
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
            )
        )

    def _start(self, chosen: settings.Settings) -> None:
        self._settings = chosen
        self._heads: list[HeadInfo] = []  # empty: not asked yet
        self._carrier = Carrier(chosen)

    def __getstate__(self) -> settings.Settings:
        return self._settings

    def __setstate__(self, state: settings.Settings) -> None:
        self._start(state)

    def __repr__(self) -> str:
        return f'{type(self).__name__}("{self.address}")'

    @property
    def address(self) -> str:
        """The address in use; several are separated by commas."""
        return self._settings.address

    @property
    def transport(self) -> str:
        """How most hidden states of the latest call travelled: "tcp", "unix" (in the request, over
        a socket of this host), "shm" or "cuda_ipc"."""
        return self._carrier.last.transport

    @property
    def transport_reason(self) -> str:
        """Why they did not travel by a shorter way; "" where there is none."""
        return self._carrier.last.reason

    def servers(self) -> list[ServerState]:
        """What is known of each server: state, why it is out, unanswered work, version seen.

        Asks nothing: a server is "unknown" until the first call.
        """
        return self._balance().states()

    def _balance(self) -> Balance:
        raise NotImplementedError

    def _versions(self, plan: ScorePlan) -> CallVersions:
        """What keeps a call to one version of the weights."""
        return CallVersions(
            self._balance(),
            head=plan.head,
            pinned=plan.weights_version,
            mix=self._settings.mix_versions,
        )

    def _round_ends(self, assembly: Assembly) -> bool:
        """All chunks were answered. Whether they make one result; else some are to be asked
        again."""
        if not self._settings.mix_versions:
            assembly.drop_other_versions()
        return not assembly.unanswered()

    def _seconds(self, timeout: float | None) -> float:
        """What a call, or a batch of a stream, may take."""
        return min(self._settings.timeout if timeout is None else timeout, TIMEOUT_MAX_SECONDS)

    def _deadline(self, timeout: float | None) -> float:
        """On time.monotonic()."""
        return time.monotonic() + self._seconds(timeout)

    def _left(self, deadline: float) -> float:
        """Seconds to the deadline. DeadlineExceeded once it has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"no answer from {self.address} in time: raise timeout (LOGPROBD_TIMEOUT_S) or "
                "send fewer rows a call"
            )
        return left

    def _retry_delay(self, error: LogprobdError, attempts: int, deadline: float) -> float:
        """Seconds to wait before the next attempt. Raises `error` where it is time to give up."""
        return before(deadline, self._settings.retry.delay(error, attempts), error)


def before(deadline: float, delay: float | None, error: LogprobdError) -> float:
    """The delay, where there is one and it ends before the deadline. Raises `error` otherwise."""
    if delay is None or time.monotonic() + delay >= deadline:
        raise error
    return delay


def decode_answer(cls: type[Message], data: bytes) -> Message:
    """The server's message. ServerBug where it is none."""
    try:
        return _wire.decode(cls, data)
    except _wire.DecodeError as error:
        raise ServerBug(f"the server's answer cannot be read: {error}") from error


def too_many_swaps(address: str) -> WeightsVersionMismatch:
    return WeightsVersionMismatch(
        f"the weights of {address} were swapped {SWAP_ROUNDS_MAX} times during one call: pin "
        "weights_version, or call again"
    )
