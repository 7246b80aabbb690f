"""What Client and AsyncClient share: settings, deadlines, retries, the cache of head facts."""

from __future__ import annotations

import time
from typing import TypeVar

from logprobd import _wire, settings
from logprobd.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LogprobdError,
    NotFound,
    ServerBug,
    WeightsVersionMismatch,
)
from logprobd.facts import HeadInfo
from logprobd.retry import RetryPolicy

Message = TypeVar("Message")

# Errors after which what is known of the server's heads may be out of date.
STALE_FACTS = (InvalidArgument, NotFound, WeightsVersionMismatch)

# Rounds of scoring again what a swap of the weights left behind.
SWAP_ROUNDS_MAX = 3


class ClientCore:
    """A client of one logprobd server.

    Connections are made at first use and in each process anew, so a client may be pickled and may
    cross a fork. Importing the package starts nothing.

    Args:
        address: "host:port" or "unix:/path". Default: LOGPROBD_ADDRESS, else 127.0.0.1:8470.
        timeout: seconds a call may take in all, retries included. Default: LOGPROBD_TIMEOUT_S, else
            300.
        max_inflight: requests of one call under way at once. Default: LOGPROBD_MAX_INFLIGHT, else
            8.
        channels: TCP connections, used in turn; one connection alone limits a fast network.
        chunk_rows: most rows of a request; a larger call is cut.
        chunk_bytes: most bytes of a request; a row above it is sent alone.
        retry: when to try again; RetryPolicy(attempts_max=1, overloaded_attempts_max=1) never does.
        client_id: the name under which the server shares its time fairly. Default: the peer
            address.

    Raises InvalidArgument for a bad setting.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float | None = None,
        max_inflight: int | None = None,
        channels: int = 4,
        chunk_rows: int = settings.DEFAULT_CHUNK_ROWS,
        chunk_bytes: int = settings.DEFAULT_CHUNK_BYTES,
        retry: RetryPolicy | None = None,
        client_id: str | None = None,
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
            )
        )

    def _start(self, chosen: settings.Settings) -> None:
        self._settings = chosen
        self._heads: list[HeadInfo] = []  # empty: not asked yet

    def __getstate__(self) -> settings.Settings:
        return self._settings

    def __setstate__(self, state: settings.Settings) -> None:
        self._start(state)

    def __repr__(self) -> str:
        return f'{type(self).__name__}("{self.address}")'

    @property
    def address(self) -> str:
        """The address in use."""
        return self._settings.address

    @property
    def transport(self) -> str:
        """How hidden states travel: "tcp", or "unix" for a socket of this host."""
        return "unix" if self._settings.is_unix else "tcp"

    def _deadline(self, timeout: float | None) -> float:
        """On time.monotonic()."""
        return time.monotonic() + (self._settings.timeout if timeout is None else timeout)

    def _left(self, deadline: float) -> float:
        """Seconds to the deadline. DeadlineExceeded once it has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"no answer from {self.address} in time: raise timeout (LOGPROBD_TIMEOUT_S) or "
                "send fewer rows a call"
            )
        return left

    def _retry_delay(self, error: LogprobdError, attempts: int, deadline: float) -> float | None:
        """Seconds to wait before the next attempt, or None: give up."""
        delay = self._settings.retry.delay(error, attempts)
        if delay is None or time.monotonic() + delay >= deadline:
            return None
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
