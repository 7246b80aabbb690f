"""When to send again: scoring is idempotent, so overload and lost connections are safe to retry."""

from __future__ import annotations

import random
from dataclasses import dataclass

from logprobd.errors import LogprobdError, Overloaded, Unavailable, is_about_a_slice


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter, within the call's deadline.

    A server's hint (`grpc-retry-pushback-ms`) is the least wait, and the backoff comes on top:
    clients refused together must not come back together. A negative hint forbids a retry.
    """

    attempts_max: int = 8
    """Most attempts while the server is unavailable, 1: no retries."""
    overloaded_attempts_max: int = 1000
    """Most attempts while the server refuses for load: in effect, until the deadline."""
    base_seconds: float = 0.1
    """Bound of the first wait; it doubles with each attempt."""
    cap_seconds: float = 5.0
    """Largest bound of a wait."""

    def delay(
        self, error: LogprobdError, attempts: int, uniform: random.Random | None = None
    ) -> float | None:
        """Seconds to wait after `attempts` failed attempts, or None: give up with `error`."""
        if is_about_a_slice(error):
            return None
        if isinstance(error, Overloaded):
            most = self.overloaded_attempts_max
        elif isinstance(error, Unavailable):
            most = self.attempts_max
        else:
            return None
        if attempts >= most:
            return None
        draw = (uniform or _RANDOM).uniform
        hint = error.retry_after or 0.0
        if hint < 0:
            return None
        bound = min(self.cap_seconds, self.base_seconds * 2 ** min(attempts - 1, 30))
        return hint + draw(0.0, bound)


# Not a seeded generator: forked workers would wait alike.
_RANDOM = random.SystemRandom()


class Window:
    """How many chunks may be in flight: halved when the server refuses, regrown on success."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = float(most)

    @property
    def size(self) -> int:
        return int(self._size)

    def limit(self, most: int) -> None:
        """Sets the largest size; what refusals have taken away stays away until regrown."""
        self._most = most
        self._size = min(float(most), self._size)

    def succeeded(self) -> None:
        self._size = min(float(self._most), self._size + 1 / self._size)

    def refused(self) -> None:
        self._size = max(1.0, self._size / 2)
